"""Chooses the scheduler of a primitive function, and lists the tiles of a contraction."""

from __future__ import annotations

import warnings
from typing import Any

from xrlflow.backends.tvm.schedules.blocks import anchors_of, inline_scalars
from xrlflow.backends.tvm.schedules.contraction import (
    Prepared,
    only_contraction,
    prepare,
    schedule_contraction,
)
from xrlflow.backends.tvm.schedules.injective import schedule_injective
from xrlflow.backends.tvm.schedules.planes import is_plane, schedule_plane
from xrlflow.backends.tvm.schedules.ratings import TileBlocking, rated_tiles
from xrlflow.backends.tvm.schedules.rows import schedule_rows
from xrlflow.backends.tvm.schedules.windows import WINDOW, schedule_window
from xrlflow.backends.tvm.toolchain.target import Machine


def schedule(mod: Any, machine: Machine) -> Any:
    """TVM's schedule of a module with one primitive function named "main".

    If a scheduler fails, the function runs in one thread without a schedule, which is slow but right, and a warning is
    issued.
    """
    from tvm.s_tir import Schedule, ScheduleError

    try:
        return apply(mod, machine)
    except ScheduleError as error:
        last = str(error).strip().splitlines()[-1]
        warnings.warn(f"a kernel was left unscheduled: {last}", stacklevel=2)
        return Schedule(mod, debug_mask="none")


def apply(mod: Any, machine: Machine, choice: TileBlocking | None = None) -> Any:
    """The schedule of "main". A contraction gets the tile `choice` (default: the heuristic's tile).

    The caller must hold a reference to `mod`: TVM's schedule changes objects in place if nothing else refers to them,
    and does not see that another module has the same body.
    """
    from tvm.s_tir import Schedule

    sch = Schedule(mod, debug_mask="none")
    inline_scalars(sch)
    anchors = anchors_of(sch)
    if contraction := only_contraction(sch, anchors):
        schedule_contraction(sch, *contraction, prepare(sch, *contraction), machine, choice)
    elif len(anchors) == 1 and is_plane(sch, anchors[0]):
        schedule_plane(sch, anchors[0], machine)
    elif len(anchors) == 1 and WINDOW in sch.get(anchors[0]).annotations:
        schedule_window(sch, anchors[0], machine)
    elif anchors:
        schedule_rows(sch, anchors, machine)
    else:
        schedule_injective(sch, machine)
    return sch


def choices(mod: Any, machine: Machine, limit: int = 64) -> list[TileBlocking]:
    """The best tiles for "main", best first, each with both orders of tiles (see `TileBlocking`): at most `limit`
    blockings. The list is empty if "main" is not a contraction."""
    workload = _workload(mod)
    if workload is None:
        return []
    rated = sorted(rated_tiles(workload.grid, machine), key=lambda entry: -entry[0])[: max(1, limit // 2)]
    first = workload.heuristic(machine).columns_first
    return [TileBlocking(tile, columns_first) for _, tile in rated for columns_first in (first, not first)]


def heuristic(mod: Any, machine: Machine) -> TileBlocking | None:
    """The tile for "main" without tuning; None if "main" is not a contraction."""
    workload = _workload(mod)
    return None if workload is None else workload.heuristic(machine)


def _workload(mod: Any) -> Prepared | None:
    """The contraction of "main"; None if "main" is not a contraction, or if the blocks around it cannot be
    scheduled."""
    from tvm.s_tir import Schedule, ScheduleError

    sch = Schedule(mod, debug_mask="none")
    try:
        inline_scalars(sch)
        contraction = only_contraction(sch, anchors_of(sch))
        return None if contraction is None else prepare(sch, *contraction)
    except ScheduleError:
        return None  # `schedule` will leave it unscheduled
