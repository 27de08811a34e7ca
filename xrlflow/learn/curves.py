"""Reads the learning curves that training runs wrote for TensorBoard (see `log.TensorBoard`)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

EVENTS = "*tfevents*"
"""The names of event files."""


class CurveError(ValueError):
    """A folder has no curve of this name. The message is one line."""


@dataclass(frozen=True, slots=True)
class Scalars:
    """The values of one scalar of one run, by step."""

    steps: tuple[int, ...]
    seconds: tuple[float, ...]  # seconds since the run began
    values: tuple[float, ...]


def runs_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The folders with event files: `folder` itself and those in it, in the order of their names."""
    return sorted({file.parent for file in Path(folder).rglob(EVENTS) if file.is_file()})


def read_scalars(folder: str | os.PathLike[str], name: str) -> list[Scalars]:
    """The scalar `name` of each run in a folder.

    Raises CurveError if there are no runs, or if a run has no such scalar, or no finite value of it.

    If a run was resumed from a checkpoint, events that the earlier run wrote after this checkpoint are left out.
    """
    from tensorboard.backend.event_processing import event_accumulator

    runs = runs_in(folder)
    if not runs:
        raise CurveError(f"{os.fspath(folder)}: no logs of TensorBoard in there: train with --log")
    curves = []
    for run in runs:
        reader = event_accumulator.EventAccumulator(str(run), size_guidance={event_accumulator.SCALARS: 0})
        reader.Reload()
        tags: Sequence[str] = reader.Tags()["scalars"]
        if name not in tags:
            names = ", ".join(sorted(tags)) or "none"
            raise CurveError(f"{run}: no scalar {name!r}: choose one of {names}")
        events = reader.Scalars(name)
        if not any(math.isfinite(e.value) for e in events):
            raise CurveError(f"{run}: {name!r} has no finite value: the run diverged, leave it out")
        begin = reader.FirstEventTimestamp()
        curves.append(
            Scalars(
                tuple(int(e.step) for e in events),
                tuple(float(e.wall_time - begin) for e in events),
                tuple(float(e.value) for e in events),
            )
        )
    return curves
