"""The schedule of functions without an anchor, and of single blocks: in parallel and in vectors."""

from __future__ import annotations

import math
from typing import Any

from xrlflow.backends.tvm.schedules.blocks import WORTH_A_THREAD, blocks_of, name_of, outputs_of, uses
from xrlflow.backends.tvm.toolchain.target import Machine


def parallel_vectors(sch: Any, block: Any, machine: Machine) -> None:
    """Schedule an injective block: vectorise its innermost dimension, and run the other dimensions in parallel."""
    loops = sch.get_loops(block)
    extents = [int(sch.get(loop).extent) for loop in loops]
    elements = math.prod(extents)
    if not loops:
        return
    lanes = dividing(extents[-1], machine)
    if not lanes and elements % machine.lanes == 0 and _elementwise(sch, block):
        loops, lanes = [sch.fuse(*loops)], machine.lanes
    contiguous = _contiguous_dimension(sch, block) if lanes and len(loops) > 1 else None
    if lanes:
        last, lane = sch.split(loops[-1], [None, lanes])
        sch.vectorize(lane)
        outer = [*loops[:-1], last]
        if (
            contiguous is not None
        ):  # neighbours in memory are read in succession, and so each cache line only once
            along = outer.pop(contiguous)
            sch.reorder(*outer, along, lane)
    else:  # the innermost loops do not change: LLVM vectorises what it can
        inside = next(
            (n for n in range(1, len(loops)) if math.prod(extents[-n:]) >= machine.lanes), len(loops) - 1
        )
        outer = loops[: len(loops) - inside]
    if elements >= WORTH_A_THREAD and outer:
        sch.parallel(sch.fuse(*outer))


def _contiguous_dimension(sch: Any, block: Any) -> int | None:
    """The output dimension along which a transposed operand is contiguous in memory; None if it is the last
    dimension."""
    node = sch.get(block)
    variables = [v.var for v in node.iter_vars]
    for region in node.reads:
        if len(region.region) > 1:
            used = [i for i, v in enumerate(variables) if uses([region.region[-1].min], v)]
            if used and len(variables) - 1 not in used:
                return used[-1]
    return None


def _elementwise(sch: Any, block: Any) -> bool:
    """Whether a block reads every operand at the index at which it writes."""
    from tvm import tirx

    node = sch.get(block)
    if not isinstance(node.body, tirx.BufferStore):
        return False
    return all(
        len(region.region) == len(node.body.indices)
        and all(r.min.same_as(i) for r, i in zip(region.region, node.body.indices))
        for region in node.reads
    )


def schedule_injective(sch: Any, machine: Machine) -> None:
    outputs = outputs_of(sch)
    for block in blocks_of(sch):
        if name_of(sch, block) not in outputs:
            sch.compute_inline(block)
    for block in blocks_of(sch):
        parallel_vectors(sch, block, machine)


def dividing(extent: int, machine: Machine) -> int:
    """The number of lanes of the longest vectors that divide `extent`, at least a quarter of a register; 0 if no such
    vectors divide it."""
    lengths = (machine.lanes, machine.lanes // 2, machine.lanes // 4)
    return next((n for n in lengths if n > 1 and extent % n == 0), 0)
