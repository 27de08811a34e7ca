"""The schedule of a pool with channels last."""

from __future__ import annotations

import math
from typing import Any

from xrlflow.backends.tvm.schedules.blocks import (
    ABREAST,
    LOCAL,
    WORTH_A_THREAD,
    extents_of,
    inline_copies,
    inline_epilogue,
    unroll,
    vectorize_tile,
)
from xrlflow.backends.tvm.schedules.injective import dividing, parallel_vectors
from xrlflow.backends.tvm.schedules.ratings import Tile
from xrlflow.backends.tvm.toolchain.target import Machine

WINDOW = "xrlflow.window"
"""The annotation of blocks that reduce a window of pixels, channels last."""
# A parallel loop runs over rows only if each core gets at least this many rows; otherwise it runs over pixels.
_PARTS = 4


def schedule_window(sch: Any, block: Any, machine: Machine) -> None:
    """Reduce windows of pixels [batch, row, column, channel]: rows in parallel, and the results of a few vectors of
    channels in registers while all taps are read."""
    inline_copies(sch, block)
    before = sch.get_producers(block)
    final, later = inline_epilogue(sch, block)
    *extents, channels = extents_of(sch, block)[:4]
    lanes = dividing(channels, machine)
    pieces = channels // lanes if lanes else 1
    vectors = next(n for n in range(ABREAST, 0, -1) if pieces % n == 0)
    batch, row, column, channel, *taps = sch.get_loops(block)
    if lanes:
        piece, vector, lane = sch.split(channel, [None, vectors, lanes])
        sch.reorder(piece, *taps, vector, lane)
    else:  # LLVM makes vectors, and handles the remaining channels
        piece, lane = sch.split(channel, [1, None])
        sch.reorder(piece, *taps, lane)
    if final is None:
        final = sch.cache_write(block, 0, LOCAL)
    else:
        sch.set_scope(block, 0, LOCAL)
    sch.reverse_compute_at(final, piece, preserve_unit_loops=True)
    if lanes:
        sch.vectorize(lane)
        sch.unroll(vector)
        vectorize_tile(sch, final, Tile(1, vectors * lanes, lanes), 4)
    unroll(sch, taps)
    many = math.prod(extents[:2]) >= _PARTS * machine.cores
    outer = sch.fuse(batch, row) if many else sch.fuse(batch, row, column)
    if math.prod(extents) * channels * math.prod(int(sch.get(tap).extent) for tap in taps) >= WORTH_A_THREAD:
        sch.parallel(outer)
    start = sch.decompose_reduction(block, taps[0])
    if lanes:
        for loop in sch.get_loops(start)[3 if many else 2 : -1]:
            sch.unroll(loop)
    for other in (*before, *later):
        parallel_vectors(sch, other, machine)
