"""The schedule of row reductions: softmax, normalisation, mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xrlflow.backends.tvm.schedules.blocks import (
    ABREAST,
    WORTH_A_THREAD,
    blocks_of,
    can_have_partial_sums,
    extent_of,
    extents_of,
    name_of,
    outputs_of,
    uses,
)
from xrlflow.backends.tvm.schedules.injective import dividing, parallel_vectors
from xrlflow.backends.tvm.toolchain.target import Machine


def schedule_rows(sch: Any, anchors: Sequence[Any], machine: Machine) -> None:
    """Schedule a function with several reductions, or with one that is not a contraction (softmax, pooling)."""
    names = {name_of(sch, a) for a in anchors}
    outputs = outputs_of(sch)
    for block in blocks_of(sch):
        if name_of(sch, block) not in names | outputs and not _is_dear(sch, block, names):
            sch.compute_inline(block)
    if _schedule_by_row(sch, names, machine):
        return
    for block in blocks_of(sch):
        if name_of(sch, block) in names:
            _vectorize_reduction(sch, block, machine)
        else:
            parallel_vectors(sch, block, machine)


def _schedule_by_row(sch: Any, reductions: set[str], machine: Machine) -> bool:
    """Run all blocks on one row after the other, while it is in the cache: softmax, normalisations, and means that are
    read along rows. Returns False, and schedules nothing, if the blocks do not have the same rows, or too few for all
    threads.

    All reductions must have the same first dimensions (the rows) and reduce all others. The last block must have these
    first dimensions, and at least one more.
    """
    outputs = outputs_of(sch)
    if len(outputs) != 1 or outputs & reductions:
        return False
    (last,) = sch.get_output_blocks(sch.get_sblock("root"))
    extents = extents_of(sch, last)
    anchors = [block for block in blocks_of(sch) if name_of(sch, block) in reductions]
    kinds = [[int(v.iter_type) for v in sch.get(anchor).iter_vars] for anchor in anchors]
    rows = kinds[0].count(0)
    alike = all(
        kind == [0] * rows + [2] * (len(kind) - rows) and extents_of(sch, anchor)[:rows] == extents[:rows]
        for kind, anchor in zip(kinds, anchors)
    )
    if not alike or not 0 < rows < len(extents) or not _read_along_rows(sch, rows):
        return False
    work = max(math.prod(extents_of(sch, block)) for block in (last, *anchors))
    if work >= WORTH_A_THREAD and math.prod(extents[:rows]) < machine.cores:
        return False
    partial: set[str] = set()
    for anchor in anchors:
        lanes = partial_lanes(extents_of(sch, anchor)[-1], machine.lanes)
        if lanes and can_have_partial_sums(sch):
            _, lane = sch.split(sch.get_loops(anchor)[-1], [None, lanes])
            partial.add(name_of(sch, sch.rfactor(lane, rows)))
    row = sch.fuse(*sch.get_loops(last)[:rows])
    _vectorize_last(sch, last, machine)
    for block in reversed(blocks_of(sch)):
        if name_of(sch, block) not in outputs:
            sch.compute_at(block, row, preserve_unit_loops=True)
    for block in blocks_of(sch):
        name = name_of(sch, block)
        if name in partial:  # rfactor inserts the lanes as the first dimension
            lane, *steps = sch.get_loops(block)[1:]
            sch.reorder(*steps, lane)
            sch.vectorize(lane)
        elif name not in reductions | outputs:
            _vectorize_last(sch, block, machine)
    if work >= WORTH_A_THREAD:
        sch.parallel(row)
    return True


def _read_along_rows(sch: Any, rows: int) -> bool:
    """Whether each block reads the results of other blocks only at its own row. The first `rows` iterators of a block
    are the row."""
    written = {region.source.name for block in blocks_of(sch) for region in sch.get(block).writes}

    def at_own_row(block: Any, region: Any) -> bool:
        variables, at = list(sch.get(block).iter_vars)[:rows], list(region.region)[:rows]
        return len(at) == rows and all(
            extent_of(variable) == 1 or one.min.same_as(variable.var) for variable, one in zip(variables, at)
        )

    return all(
        at_own_row(block, region)
        for block in blocks_of(sch)
        for region in sch.get(block).reads
        if region.source.name in written
    )


def _vectorize_last(sch: Any, block: Any, machine: Machine) -> None:
    """Vectorise the innermost loop if vectors divide it."""
    loop = sch.get_loops(block)[-1]
    if lanes := dividing(int(sch.get(loop).extent), machine):
        _, lane = sch.split(loop, [None, lanes])
        sch.vectorize(lane)


def _is_dear(sch: Any, block: Any, reductions: set[str]) -> bool:
    """Whether inlining a block would repeat its work, because several blocks or a reduction read its results."""
    consumers = sch.get_consumers(block)
    return len(consumers) > 1 or any(name_of(sch, c) in reductions for c in consumers)


def partial_lanes(along: int, lanes: int) -> int:
    """The number of partial results of a reduction along a row, which are one vector; 0 if the reduction has a single
    (scalar) result.

    Half vectors serve short rows. A long row is better reduced in two parts (see `kernels.legalize`).
    """
    lengths = (lanes, lanes // 2) if along < 8 * lanes else (lanes,)
    return next((n for n in lengths if n > 1 and along % n == 0 and along >= 2 * n), 0)


def _vectorize_reduction(sch: Any, block: Any, machine: Machine) -> None:
    """Reduce rows in parallel: along contiguous memory with a vector of partial results, otherwise with a few vectors
    of results."""
    variables = list(sch.get(block).iter_vars)
    extents, loops = extents_of(sch, block), sch.get_loops(block)
    spatial = [i for i, v in enumerate(variables) if int(v.iter_type) == 0]
    reduced = [i for i, v in enumerate(variables) if int(v.iter_type) == 2]
    parallel = bool(spatial) and math.prod(extents) >= WORTH_A_THREAD
    last = reduced[-1]
    reads = [region.region[-1].min for region in sch.get(block).reads if region.region]
    along = uses(reads, variables[last].var)
    lanes = partial_lanes(extents[last], machine.lanes) if along else 0
    if lanes and can_have_partial_sums(sch):
        _, lane = sch.split(loops[last], [None, lanes])
        partial = sch.rfactor(lane, len(spatial))
        *outer, lane = sch.get_loops(partial)
        sch.vectorize(lane)
        if parallel:
            sch.parallel(sch.fuse(*outer[: len(spatial)]))
            sch.parallel(sch.fuse(*sch.get_loops(block)[: len(spatial)]))
    elif not along and spatial and (lanes := dividing(extents[spatial[-1]], machine)):
        # Several adjacent vectors read full cache lines, and share the index computations of a row of the window. But
        # enough loop iterations must remain for all cores.
        others = math.prod(extents[i] for i in spatial[:-1])
        parts = machine.cores if parallel else 1
        pieces = extents[spatial[-1]] // lanes
        vectors = next(
            (n for n in range(ABREAST, 1, -1) if pieces % n == 0 and others * pieces // n >= parts), 1
        )
        piece, vector, lane = sch.split(loops[spatial[-1]], [None, vectors, lanes])
        rows = [*(loops[i] for i in spatial[:-1]), piece]
        sch.reorder(*rows, *(loops[i] for i in reduced), vector, lane)
        fused = sch.fuse(*rows)
        sch.vectorize(lane)
        sch.unroll(vector)
        if parallel:
            sch.parallel(fused)
        sch.decompose_reduction(block, loops[reduced[0]])
    elif parallel:
        sch.parallel(sch.fuse(*(loops[i] for i in spatial)))
