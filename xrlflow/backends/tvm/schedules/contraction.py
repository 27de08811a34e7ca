"""The schedule of contractions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.schedules.blocks import (
    LOCAL,
    WORTH_A_THREAD,
    elements_of,
    elements_used,
    extent_of,
    extents_of,
    index_map,
    inline_copies,
    inline_epilogue,
    name_of,
    outputs_of,
    unroll,
    uses,
    vectorize_tile,
)
from xrlflow.backends.tvm.schedules.injective import parallel_vectors
from xrlflow.backends.tvm.schedules.ratings import Grid, Tile, TileBlocking, tile_of
from xrlflow.backends.tvm.toolchain.target import Machine

# The annotation of a block that packs a constant: SplitLayoutRewritePreproc makes it a function, which constant folding
# runs.
_PACKING = "meta_schedule.layout_rewrite_preproc"
# Grouped convolutions whose groups have fewer columns are not treated as contractions.
_NARROWEST = 4
# Longer reductions are summed in chunks, because rounding errors grow with the number of terms of an accumulator.
_CHUNK = 128


@dataclass(frozen=True, slots=True)
class Contraction:
    """What a contraction block computes. The fields are positions of the block's iterators.

    `column`: the last output dimension. `rows`: the output dimensions that only the broadcast operand has, the
    innermost last. `weights`: the position, among the block's reads, of the operand with the columns; None if both
    operands have them (channelwise).
    """

    column: int
    rows: tuple[int, ...]
    reductions: tuple[int, ...]
    weights: int | None


def only_contraction(sch: Any, anchors: Sequence[Any]) -> tuple[Any, Contraction] | None:
    if len(anchors) != 1:
        return None
    _split_groups(sch, anchors[0])
    contraction = _contraction(sch, anchors[0])
    return None if contraction is None else (anchors[0], contraction)


def _contraction(sch: Any, block: Any) -> Contraction | None:
    """The contraction C[.., n] += A[.., k] * B[k.., n] of a block; None for other reductions, and for unknown
    extents."""
    from tvm import sym, tirx
    from tvm.ir.expr import TensorLoad

    node = sch.get(block)
    variables = list(node.iter_vars)
    if any(extent_of(v) is None for v in variables) or not isinstance(node.body, tirx.BufferStore):
        return None
    value = node.body.value
    if not (isinstance(value, tirx.Add) and isinstance(value.b, tirx.Mul)):
        return None
    factors = [value.b.a, value.b.b]
    if not all(isinstance(f, TensorLoad) for f in factors):
        return None
    analyzer = sym.Analyzer()
    for variable in variables:
        # An output dimension of extent 1 may look like the constant index 0, but it is still a dimension of rows.
        if int(variable.iter_type) == 2 or extent_of(variable) != 1:
            analyzer.bind(variable.var, variable.dom)
    indices = [analyzer.simplify(i) for i in node.body.indices]
    read = [[analyzer.simplify(i) for i in f.indices] for f in factors]

    def position(expression: Any) -> int | None:
        return next((i for i, v in enumerate(variables) if v.var.same_as(expression)), None)

    positions = [position(index) for index in indices]
    if not positions or positions[-1] is None:
        return None
    column = positions[-1]
    with_column = [uses(r, variables[column].var) for r in read]
    reductions = tuple(i for i, v in enumerate(variables) if int(v.iter_type) == 2)
    spatial = [p for p in positions[:-1] if p is not None]
    if all(with_column):
        rows = tuple(p for p in spatial if sum(uses(r, variables[p].var) for r in read) == 1)
        last = [r[-1] for r in read]
        wide = any(
            extents_of(sch, block)[r] > 1 and uses([index], variables[r].var)
            for r in reductions
            for index in last
        )
        return None if wide or not rows else Contraction(column, rows, reductions, None)
    if not any(with_column):
        return None
    weights, other = with_column.index(True), with_column.index(False)
    first = [analyzer.simplify(read[weights][-1] - variables[column].var)]
    if any(uses(first, variables[i].var) for i in (column, *reductions)):
        return None  # columns are not adjacent in memory, or depend on the reduction
    rows = tuple(
        p
        for p in spatial
        if uses(read[other], variables[p].var) and not uses(read[weights], variables[p].var)
    )
    reads = [region.source for region in node.reads]
    at = next((i for i, buffer in enumerate(reads) if buffer.same_as(factors[weights].source)), None)
    return None if at is None or not rows else Contraction(column, rows, reductions, at)


def _split_groups(sch: Any, block: Any) -> None:
    """Rewrite a grouped convolution as a batch of contractions: C[.., n] += A[.., n // m * k + r] * W[.., r, n] becomes
    C[.., g, n] += A[.., g * k + r] * W[.., r, g * m + n]. Other blocks do not change. Groups of few columns do not
    change either, nor do sums of one term, which would have no terms to sum any more."""
    from tvm import sym, tirx
    from tvm.ir.expr import TensorLoad

    node = sch.get(block)
    variables = list(node.iter_vars)
    if any(extent_of(v) is None for v in variables) or not isinstance(node.body, tirx.BufferStore):
        return
    if all(extent_of(v) == 1 for v in variables if int(v.iter_type) == 2):
        return
    value, indices = node.body.value, list(node.body.indices)
    if not (isinstance(value, tirx.Add) and isinstance(value.b, tirx.Mul)):
        return
    image, weights = value.b.a, value.b.b
    outputs = [v for v in variables if int(v.iter_type) == 0]
    if not isinstance(image, TensorLoad) or not isinstance(weights, TensorLoad):
        return
    if not outputs or not image.indices or not weights.indices:
        return
    last, reduced = outputs[-1].var, variables[-1]
    if (
        len(indices) != len(outputs)
        or not all(v.var.same_as(i) for v, i in zip(outputs, indices))
        or not weights.indices[-1].same_as(last)
        or uses([*image.indices[:-1], *weights.indices[:-1]], last)
        or int(reduced.iter_type) != 2
    ):
        return
    inner, channels, columns = extent_of(reduced), int(image.source.shape[-1]), extent_of(outputs[-1])
    assert inner is not None
    assert columns is not None
    groups = channels // inner
    width = columns // max(groups, 1)
    if groups < 2 or width < _NARROWEST:
        return
    if not sym.Analyzer().can_prove_equal(image.indices[-1], last // width * inner + reduced.var):
        return
    at = len(outputs) - 1

    def split(*index: Any) -> list[Any]:
        return [*index[:at], index[at] // width, index[at] % width, *index[at + 1 :]]

    if name_of(sch, block) in outputs_of(sch):
        sch.cache_write(block, 0, "global")
    # The order of these two calls matters: in the other order, indices (g * m + n) // m remain, which compute_at cannot
    # handle.
    result, parts = index_map(split, len(outputs), sch, block), index_map(split, len(variables), sch, block)
    sch.transform_block_layout(block, parts)
    sch.transform_layout(block, ("write", 0), result)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A contraction whose function has been prepared: the blocks before and after it, and how its output can be tiled.

    `flat`: the rows are one dimension, or can be made one. `row`: the output dimension whose elements are the rows of
    tiles. `cropped`: the result has fewer columns than the contraction computes. Constant weights have been padded
    before (see `fusion.padding`), so they are not padded here.
    """

    before: tuple[Any, ...]
    final: Any | None
    later: tuple[Any, ...]
    flat: bool
    row: int
    grid: Grid
    columns_first: bool
    cropped: bool

    def heuristic(self, machine: Machine) -> TileBlocking:
        tile = tile_of(self.grid, machine)
        if self.grid.channelwise:
            # If there are few channels, threads that divide channels among them would read the same pages of memory.
            return TileBlocking(tile, self.grid.columns // tile.columns >= 3 * machine.cores)
        return TileBlocking(tile, self.columns_first)


def prepare(sch: Any, block: Any, contraction: Contraction) -> Prepared:
    """Inline as many blocks as possible around a contraction, and analyse the remaining blocks."""
    inline_copies(sch, block)
    if contraction.weights is None:
        # A condition for each vector costs less than a padded copy in memory, whose elements would be read only as
        # often as they are written.
        for producer in sch.get_producers(block):
            sch.compute_inline(producer)
    before = tuple(sch.get_producers(block))
    cropped = elements_used(sch, block) < elements_of(sch, block)
    final, later = inline_epilogue(sch, block)
    extents = extents_of(sch, block)
    count = math.prod(extents[p] for p in contraction.rows)
    flat = (
        all(extents[r] == 1 for r in contraction.reductions[:-1])
        and [*contraction.rows, contraction.column] == list(range(len(contraction.rows) + 1))
        and _flat_rows(sch, block, contraction)
        and (not cropped or _keeps_rows(sch, final, extents, contraction))
    )
    # In an image that is one pixel wide, the height takes the part of the row.
    innermost = next((p for p in reversed(contraction.rows) if extents[p] > 1), contraction.rows[-1])
    row = max(contraction.rows, key=lambda p: (extents[p], p)) if flat else innermost
    product = contraction.weights is not None and not before and _is_product(sch, block)
    constant = contraction.weights is not None and _is_constant(sch, block, contraction.weights)
    reduction = math.prod(extents[r] for r in contraction.reductions)
    row_stride = 4 * extents[contraction.reductions[-1]]
    column = extents[contraction.column]
    padded = product and count == extents[row]
    grid = Grid(
        count if flat else extents[row], column, row_stride, reduction, padded, padded and not constant,
        contraction.weights is None,
    )  # fmt: skip
    # So that the larger operand is read only once, the dimension on which this operand does not depend becomes the
    # inner loop.
    columns_first = contraction.weights is not None and 4 * reduction * column > row_stride * count
    return Prepared(before, final, tuple(later), flat, row, grid, columns_first, cropped)


def schedule_contraction(
    sch: Any,
    block: Any,
    contraction: Contraction,
    workload: Prepared,
    machine: Machine,
    choice: TileBlocking | None,
) -> None:
    blocking = choice if choice is not None else workload.heuristic(machine)
    tile = blocking.tile
    layout = _lay_out(sch, block, contraction, workload, tile)
    contraction, final, cropped = layout.contraction, layout.final, layout.cropped
    nest = _tile(sch, block, contraction, workload.row, blocking)
    if final is None:
        final = sch.cache_write(block, 0, LOCAL)
    else:
        sch.set_scope(block, 0, LOCAL)
    sch.reverse_compute_at(final, nest.innermost, preserve_unit_loops=True)
    partial, reductions = nest.partial, nest.reductions
    steps = None if partial is None else _accumulate(sch, partial, reductions[-1], contraction.column, tile)
    vectors, lane = sch.split(nest.inner_column, [None, tile.lanes])
    sch.vectorize(lane)
    sch.unroll(vectors)
    sch.unroll(nest.inner_row)
    if contraction.weights is None:
        unroll(sch, reductions)
    outside = nest.outside
    vectorize_tile(sch, final, tile, outside)
    if cropped is not None:
        sch.reverse_compute_at(cropped, nest.innermost, preserve_unit_loops=True)
        vectorize_tile(sch, cropped, tile, outside)
    if 2 * math.prod(layout.extents) >= WORTH_A_THREAD:
        sch.parallel(nest.outer)
    _start_at_zero(sch, block, reductions[0], outside)
    if partial is not None:
        _start_at_zero(sch, partial, steps, outside + 1)
    for other in (*layout.before, *workload.later):
        parallel_vectors(sch, other, machine)


@dataclass(frozen=True, slots=True)
class _Layout:
    """A contraction whose operands and result are laid out for tiles.

    The blocks `before` run before the contraction. The block `final` writes the tiles to memory (None: no such block
    exists yet). The block `cropped` removes the padding. `extents`: the contraction's loop extents.
    """

    contraction: Contraction
    before: tuple[Any, ...]
    final: Any | None
    cropped: Any | None
    extents: Sequence[int]


def _lay_out(sch: Any, block: Any, contraction: Contraction, workload: Prepared, tile: Tile) -> _Layout:
    """Pad the dimensions that tiles do not divide, pack constant weights, and make the rows one dimension."""
    row, final, before = workload.row, workload.final, workload.before
    extents = extents_of(sch, block)
    cropped = None
    if workload.grid.rows % tile.rows or workload.grid.columns % tile.columns:
        cropped = final if final is not None else sch.cache_write(block, 0, "global")
        before = tuple(_pad(sch, block, contraction, row, tile))
        extents = extents_of(sch, block)
        final = None
    elif workload.cropped:
        cropped, final = final, None
    # Tiles are written with their padding: LLVM keeps accumulators in registers only if no condition guards their copy.
    if contraction.weights is not None and _is_constant(sch, block, contraction.weights):
        _pack(sch, block, contraction.weights, tile.columns)
    if workload.flat and math.prod(extents[p] for p in contraction.rows) > extents[row]:
        if final is None and cropped is None:
            final = sch.cache_write(block, 0, "global")
        contraction = _flatten(sch, block, final if cropped is None else cropped, contraction)
        extents = extents_of(sch, block)
    return _Layout(contraction, before, final, cropped, extents)


@dataclass(frozen=True, slots=True)
class _Nest:
    """The tiled loops of a contraction. `outer` runs over tiles, `walk` (at most one loop) over the tiles of one
    thread.

    The loops of the reductions, and of the rows and columns of a tile, are inside these loops. `partial`: the block
    that sums one chunk.
    """

    outer: Any
    walk: Sequence[Any]
    reductions: Sequence[Any]
    inner_row: Any
    inner_column: Any
    partial: Any | None

    @property
    def innermost(self) -> Any:
        """The last loop around the reductions."""
        return self.walk[-1] if self.walk else self.outer

    @property
    def outside(self) -> int:
        """The number of loops around the reductions."""
        return 1 + len(self.walk)


def _tile(sch: Any, block: Any, contraction: Contraction, row: int, blocking: TileBlocking) -> _Nest:
    """Split the loops of a contraction into tiles, and a long reduction into chunks."""
    loops = sch.get_loops(block)
    rows = [loops[p] for p in contraction.rows]
    batch = [
        loops[i]
        for i in range(len(loops))
        if i not in (*contraction.rows, contraction.column, *contraction.reductions)
    ]
    reductions = [loops[r] for r in contraction.reductions]
    (tiled,) = [loop for loop, p in zip(rows, contraction.rows) if p == row or len(rows) == 1]
    rows = [loop for loop in rows if loop is not tiled] + [tiled]
    outer_row, inner_row = sch.split(rows[-1], [None, blocking.tile.rows])
    outer_column, inner_column = sch.split(loops[contraction.column], [None, blocking.tile.columns])
    channelwise = contraction.weights is None
    walk = [outer_row] if channelwise else []  # a loop of its own within one thread
    across = [*rows[:-1]] if channelwise else [*rows[:-1], outer_row]
    tiles = [outer_column, *across] if blocking.columns_first else [*across, outer_column]
    sch.reorder(*batch, *tiles, *walk, *reductions, inner_row, inner_column)
    outer = sch.fuse(*batch, *tiles)
    partial = None if channelwise else _sum_chunks(sch, block, reductions)
    if partial is not None:
        outer, *reductions, inner_row, inner_column = sch.get_loops(block)
    return _Nest(outer, walk, reductions, inner_row, inner_column, partial)


def _sum_chunks(sch: Any, block: Any, reductions: Sequence[Any]) -> Any | None:
    """Split a long reduction into chunks. Returns the block that sums one chunk; `block` then adds up the chunks. For a
    short reduction nothing changes, and None is returned.

    The rounding error of an accumulator grows with the number of its terms. With thousands of terms, a network of many
    layers would differ noticeably from the result of other runtimes.
    """
    split = chunk([int(sch.get(loop).extent) for loop in reductions])
    if split is None:
        return None
    at, step = split
    outer, _ = sch.split(reductions[at], [None, step])
    return sch.rfactor(sch.fuse(*reductions[:at], outer), 0)


def chunk(extents: Sequence[int]) -> tuple[int, int] | None:
    """Where to split loops of these extents into chunks of about `_CHUNK` terms: (index of the loop, inner extent).

    None for a short reduction, and if no factor divides the reduction into such chunks.
    """
    terms = math.prod(extents)
    if terms <= _CHUNK * 3 // 2:
        return None
    parts = [
        (at, step, step * math.prod(extents[at + 1 :]))
        for at, extent in enumerate(extents)
        for step in range(1, extent + 1)
        if extent % step == 0
    ]
    fitting = [part for part in parts if _CHUNK // 2 <= part[2] <= terms // 2]
    if not fitting:
        return None
    # LLVM unrolls three chunks, and then has too few registers for the sums of all of them.
    plain = [part for part in fitting if part[2] * 3 != terms or part[0] < len(extents) - 1]
    fitting = plain or fitting
    at, step, _ = min(fitting, key=lambda part: abs(math.log(part[2] / _CHUNK)))
    return at, step


def _accumulate(sch: Any, partial: Any, chunks: Any, column: int, tile: Tile) -> Any:
    """Keep the sums of a chunk in registers, as a tile in the loop over chunks. Returns the loop over the chunk's
    terms."""
    sch.set_scope(partial, 0, LOCAL)
    sch.compute_at(partial, chunks, preserve_unit_loops=True)
    kinds = [int(v.iter_type) for v in sch.get(partial).iter_vars]
    loops = sch.get_loops(partial)[-len(kinds) :]
    outputs = [loop for loop, kind in zip(loops, kinds) if kind == 0]
    reductions = [loop for loop, kind in zip(loops, kinds) if kind == 2]
    columns = outputs.pop(1 + column)  # rfactor puts the chunk first
    sch.reorder(*reductions, *outputs, columns)
    vectors, lane = sch.split(columns, [None, tile.lanes])
    sch.vectorize(lane)
    for loop in (*outputs, vectors):
        sch.unroll(loop)
    return reductions[0]


def _start_at_zero(sch: Any, block: Any, reduction: Any, outside: int) -> None:
    """Set a tile's accumulators to zero before its reduction, inside the `outside` outermost loops."""
    start = sch.decompose_reduction(block, reduction)
    for loop in sch.get_loops(start)[outside:-1]:
        sch.unroll(loop)


def _flatten(sch: Any, block: Any, final: Any, contraction: Contraction) -> Contraction:
    """Make the rows one dimension in the anchor, in its result, and in the block that reads the result."""
    extents = extents_of(sch, block)
    sizes = [extents[p] for p in contraction.rows]
    others = [
        i
        for i in range(len(extents))
        if i not in (*contraction.rows, contraction.column, *contraction.reductions)
    ]
    assert not others
    assert [*contraction.rows, contraction.column] == list(range(len(sizes) + 1))

    def flat(*indices: Any) -> list[Any]:
        row = indices[0]
        for index, size in zip(indices[1 : len(sizes)], sizes[1:]):
            row = row * size + index
        return [row, *indices[len(sizes) :]]

    sch.transform_layout(block, ("write", 0), index_map(flat, len(sizes) + 1, sch, block))
    sch.transform_block_layout(block, index_map(flat, len(extents), sch, block))
    sch.transform_block_layout(final, index_map(flat, len(sizes) + 1, sch, block))
    reductions = tuple(range(2, 2 + len(contraction.reductions)))
    return Contraction(1, (0,), reductions, contraction.weights)


def _pad(sch: Any, block: Any, contraction: Contraction, row: int, tile: Tile) -> list[Any]:
    """Pad rows and columns to multiples of the tile. Returns the blocks that copy padded operands."""
    extents = extents_of(sch, block)
    steps = [1] * len(extents)
    steps[row], steps[contraction.column] = tile.rows, tile.columns
    assert contraction.weights is not None
    for position in range(2):
        sch.cache_read(block, position, "global")
    sch.pad_einsum(block, steps)
    (cropped,) = sch.get_consumers(block)
    sch.compute_inline(cropped)
    needed = []
    for producer in sch.get_producers(block):
        copies = list(sch.get_producers(producer))
        for copy in copies:
            sch.compute_inline(copy)
        if copies:
            needed.append(producer)
        else:  # nothing was padded
            sch.compute_inline(producer)
    return needed


def _flat_rows(sch: Any, block: Any, contraction: Contraction) -> bool:
    """Whether the broadcast operand is indexed by the row iterators themselves, so that all rows can become one
    dimension."""
    from tvm.ir.expr import TensorLoad

    node = sch.get(block)
    product = node.body.value.b
    variables = [v.var for v in node.iter_vars]
    rows = [variables[p] for p in contraction.rows]
    for factor in (product.a, product.b):
        if not isinstance(factor, TensorLoad):
            return False
        used = [index for index in factor.indices if any(uses([index], row) for row in rows)]
        if used and not (len(used) == len(rows) and all(_plain(i, row) for i, row in zip(used, rows))):
            return False
    return True


def _keeps_rows(sch: Any, final: Any, extents: Sequence[int], contraction: Contraction) -> bool:
    """Whether the final block has all rows, so that it crops at most columns."""
    return extents_of(sch, final)[: len(contraction.rows)] == [extents[p] for p in contraction.rows]


def _is_product(sch: Any, block: Any) -> bool:
    """Whether both operands are indexed by plain iterators, as in a matrix product."""
    product = sch.get(block).body.value.b
    variables = [v.var for v in sch.get(block).iter_vars]
    return all(any(i.same_as(v) for v in variables) for f in (product.a, product.b) for i in f.indices)


def _plain(index: Any, row: Any) -> bool:
    """Whether index = row, or row + r with a reduction variable of extent 1 (which simplification does not remove)."""
    from tvm import tirx

    if index.same_as(row):
        return True
    return isinstance(index, tirx.Add) and (index.a.same_as(row) or index.b.same_as(row))


def _is_constant(sch: Any, block: Any, position: int) -> bool:
    """Whether an operand is a parameter that holds a constant when the model is compiled."""
    function = sch.mod["main"]
    buffer = sch.get(block).reads[position].source
    free = function.attrs.get("layout_free_buffers") if function.attrs is not None else None
    if free is None:
        return False
    return any(function.params[int(i)].same_as(buffer) for i in free)


def _pack(sch: Any, block: Any, position: int, width: int) -> None:
    """Pack weights [.., k, n] into panels [n / width, .., k, width] when the model is compiled."""
    packed = sch.cache_read(block, position, "global")

    def panels(*indices: Any) -> list[Any]:
        *head, n = indices
        return [n // width, *head, n % width]

    sch.transform_layout(block, ("read", position), panels)
    sch.annotate(packed, _PACKING, True)
