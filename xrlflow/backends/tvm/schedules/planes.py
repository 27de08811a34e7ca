"""The schedule of a depthwise convolution with channels first: one plane after the other."""

from __future__ import annotations

import math
from typing import Any

from xrlflow.backends.tvm.schedules.blocks import (
    LOCAL,
    WORTH_A_THREAD,
    extent_of,
    extents_of,
    inline_copies,
    inline_epilogue,
    unroll,
    uses,
    vectorize_tile,
)
from xrlflow.backends.tvm.schedules.injective import dividing, parallel_vectors
from xrlflow.backends.tvm.schedules.ratings import Tile
from xrlflow.backends.tvm.toolchain.target import Machine

# The number of rows of a tile of a plane: with 16 vector registers, and with more.
_PLANE_ROWS, _MORE_PLANE_ROWS = 4, 8


def is_plane(sch: Any, block: Any) -> bool:
    """Whether a block computes C[.., y, x] += A[.., y + ky, x + kx] * W[.., ky, kx]: each plane of the result depends
    on one plane of A."""
    from tvm import tirx
    from tvm.ir.expr import TensorLoad

    node = sch.get(block)
    variables = list(node.iter_vars)
    if any(extent_of(v) is None for v in variables) or not isinstance(node.body, tirx.BufferStore):
        return False
    value, indices = node.body.value, list(node.body.indices)
    if len(indices) < 3 or not (isinstance(value, tirx.Add) and isinstance(value.b, tirx.Mul)):
        return False
    reductions = [v for v in variables if int(v.iter_type) == 2]
    spatial = [v for v in variables if int(v.iter_type) == 0]
    if len(spatial) != len(indices) or not all(v.var.same_as(i) for v, i in zip(spatial, indices)):
        return False
    factors = [value.b.a, value.b.b]
    if not all(isinstance(f, TensorLoad) for f in factors):
        return False
    within = [[any(uses([i], v.var) for v in spatial[-2:]) for i in f.indices] for f in factors]
    images = [f for f, used in zip(factors, within) if used[-2:] == [True, True] and not any(used[:-2])]
    return (
        len(images) == 1
        and sum(map(any, within)) == 1
        and not any((extent_of(r) or 0) > 1 and uses(images[0].indices[:-2], r.var) for r in reductions)
    )


def schedule_plane(sch: Any, block: Any, machine: Machine) -> None:
    """Compute the planes in parallel. A plane is padded in the cache; its weights stay in registers.

    The rows of a tile share the vectors that they load.
    """
    inline_copies(sch, block)
    padding = list(sch.get_producers(block))
    final, later = inline_epilogue(sch, block)
    extents = extents_of(sch, block)
    kinds = [int(v.iter_type) for v in sch.get(block).iter_vars]
    at = kinds.count(0)
    *_, height, width = extents[:at]
    lanes = dividing(width, machine) or 1
    most = _PLANE_ROWS if machine.registers <= 16 else _MORE_PLANE_ROWS
    rows = next(n for n in range(most, 0, -1) if height % n == 0)
    loops = sch.get_loops(block)
    y, row = sch.split(loops[at - 2], [None, rows])
    x, lane = sch.split(loops[at - 1], [None, lanes])
    sch.reorder(*loops[: at - 2], y, x, *loops[at:], row, lane)
    outer = sch.fuse(*loops[: at - 2])
    if final is None:
        final = sch.cache_write(block, 0, LOCAL)
    else:
        sch.set_scope(block, 0, LOCAL)
    sch.reverse_compute_at(final, x, preserve_unit_loops=True)
    sch.unroll(row)
    sch.vectorize(lane)
    unroll(sch, loops[at:])
    vectorize_tile(sch, final, Tile(rows, lanes, lanes), 3)
    for producer in padding:
        sch.compute_at(producer, outer, preserve_unit_loops=True)
    if 2 * math.prod(extents) >= WORTH_A_THREAD:
        sch.parallel(outer)
    start = sch.decompose_reduction(block, loops[at])
    for loop in sch.get_loops(start)[3:-1]:
        sch.unroll(loop)
    for other in later:
        parallel_vectors(sch, other, machine)
