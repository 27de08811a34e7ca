"""The schedule of contractions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.schedules.blocks import (
    LOCAL,
    WORTH_A_THREAD,
    elements_kept,
    elements_of,
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

# Marks the packing of a constant: SplitLayoutRewritePreproc makes it a function, which constant folding runs.
_PACKING = "meta_schedule.layout_rewrite_preproc"
# Groups with fewer columns are not treated as contractions.
_NARROWEST = 4
# Longer reductions are summed in chunks, because rounding errors grow with the number of terms of an accumulator.
_CHUNK = 128


@dataclass(frozen=True, slots=True)
class Contraction:
    """What a contraction block computes, by positions of its iterators.

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
    found = _contraction(sch, anchors[0])
    return None if found is None else (anchors[0], found)


def _contraction(sch: Any, block: Any) -> Contraction | None:
    """C[.., n] += A[.., k] * B[k.., n]; None for another reduction, or one with unknown extents."""
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
        # An output dimension of extent 1 may look like the number 0, but a product of one row has rows.
        if int(variable.iter_type) == 2 or extent_of(variable) != 1:
            analyzer.bind(variable.var, variable.dom)
    indices = [analyzer.simplify(i) for i in node.body.indices]
    read = [[analyzer.simplify(i) for i in f.indices] for f in factors]

    def place(expression: Any) -> int | None:
        return next((i for i, v in enumerate(variables) if v.var.same_as(expression)), None)

    places = [place(index) for index in indices]
    if not places or places[-1] is None:
        return None
    column = places[-1]
    with_column = [uses(r, variables[column].var) for r in read]
    reductions = tuple(i for i, v in enumerate(variables) if int(v.iter_type) == 2)
    spatial = [p for p in places[:-1] if p is not None]
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
        return None  # neighbours are not adjacent in memory, or move with the reduction
    rows = tuple(
        p
        for p in spatial
        if uses(read[other], variables[p].var) and not uses(read[weights], variables[p].var)
    )
    reads = [region.source for region in node.reads]
    at = next((i for i, buffer in enumerate(reads) if buffer.same_as(factors[weights].source)), None)
    return None if at is None or not rows else Contraction(column, rows, reductions, at)


def _split_groups(sch: Any, block: Any) -> None:
    """C[.., n] += A[.., n // m * k + r] * W[.., r, n], a grouped convolution, becomes a batch of contractions:
    C[.., g, n] += A[.., g * k + r] * W[.., r, g * m + n]. Anything else stays as it is, also groups of few columns, and
    sums of one term, of which nothing would be left to sum.
    """
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
    # In this order. The other one leaves indices (g * m + n) // m, which compute_at cannot handle.
    whole, parts = index_map(split, len(outputs), sch, block), index_map(split, len(variables), sch, block)
    sch.transform_block_layout(block, parts)
    sch.transform_layout(block, ("write", 0), whole)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A contraction whose function has been prepared: the blocks around it, and how its output can be tiled.

    `flat`: the rows are one dimension, or can be made one; `row` is the tiled one. Constant weights are packed before
    and not padded here (see `padding`). `cropped`: the result has fewer columns.
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
            # With few channels, threads that share them would read the same pages.
            return TileBlocking(tile, self.grid.columns // tile.columns >= 3 * machine.cores)
        return TileBlocking(tile, self.columns_first)


def prepare(sch: Any, block: Any, found: Contraction) -> Prepared:
    """Inline everything possible around a contraction, and analyse what is left."""
    inline_copies(sch, block)
    if found.weights is None:
        # A condition for each vector costs less than a padded copy in memory, which is read as often as it is computed.
        for producer in sch.get_producers(block):
            sch.compute_inline(producer)
    before = tuple(sch.get_producers(block))
    cropped = elements_kept(sch, block) < elements_of(sch, block)
    final, later = inline_epilogue(sch, block)
    extents = extents_of(sch, block)
    count = math.prod(extents[p] for p in found.rows)
    flat = (
        all(extents[r] == 1 for r in found.reductions[:-1])
        and [*found.rows, found.column] == list(range(len(found.rows) + 1))
        and _flat_rows(sch, block, found)
        and (not cropped or _keeps_rows(sch, final, extents, found))
    )
    # An image that is one pixel wide has rows of its height.
    innermost = next((p for p in reversed(found.rows) if extents[p] > 1), found.rows[-1])
    row = max(found.rows, key=lambda p: (extents[p], p)) if flat else innermost
    product = found.weights is not None and not before and _is_product(sch, block)
    constant = found.weights is not None and _is_constant(sch, block, found.weights)
    reduction = math.prod(extents[r] for r in found.reductions)
    row_stride = 4 * extents[found.reductions[-1]]
    column = extents[found.column]
    padded = product and count == extents[row]
    grid = Grid(
        count if flat else extents[row], column, row_stride, reduction, padded, padded and not constant,
        found.weights is None,
    )  # fmt: skip
    # The larger operand is read once: what it does not depend on goes inside.
    columns_first = found.weights is not None and 4 * reduction * column > row_stride * count
    return Prepared(before, final, tuple(later), flat, row, grid, columns_first, cropped)


def schedule_contraction(
    sch: Any,
    block: Any,
    found: Contraction,
    workload: Prepared,
    machine: Machine,
    choice: TileBlocking | None,
) -> None:
    chosen = choice if choice is not None else workload.heuristic(machine)
    tile = chosen.tile
    laid = _lay_out(sch, block, found, workload, tile)
    found, final, cropped = laid.found, laid.final, laid.cropped
    nest = _tile(sch, block, found, workload.row, chosen)
    if final is None:
        final = sch.cache_write(block, 0, LOCAL)
    else:
        sch.set_scope(block, 0, LOCAL)
    sch.reverse_compute_at(final, nest.innermost, preserve_unit_loops=True)
    partial, reductions = nest.partial, nest.reductions
    steps = None if partial is None else _accumulate(sch, partial, reductions[-1], found.column, tile)
    vectors, lane = sch.split(nest.inner_column, [None, tile.lanes])
    sch.vectorize(lane)
    sch.unroll(vectors)
    sch.unroll(nest.inner_row)
    if found.weights is None:
        unroll(sch, reductions)
    outside = nest.outside
    vectorize_tile(sch, final, tile, outside)
    if cropped is not None:
        sch.reverse_compute_at(cropped, nest.innermost, preserve_unit_loops=True)
        vectorize_tile(sch, cropped, tile, outside)
    if 2 * math.prod(laid.extents) >= WORTH_A_THREAD:
        sch.parallel(nest.outer)
    _start_at_zero(sch, block, reductions[0], outside)
    if partial is not None:
        _start_at_zero(sch, partial, steps, outside + 1)
    for other in (*laid.before, *workload.later):
        parallel_vectors(sch, other, machine)


@dataclass(frozen=True, slots=True)
class _Laid:
    """A contraction whose operands and result are laid out for tiles.

    Blocks `before` the contraction run first. The `final` block takes the tiles out of the registers (None: not made
    yet). The block `cropped` removes the padding. `extents`: the contraction's loop extents.
    """

    found: Contraction
    before: tuple[Any, ...]
    final: Any | None
    cropped: Any | None
    extents: Sequence[int]


def _lay_out(sch: Any, block: Any, found: Contraction, workload: Prepared, tile: Tile) -> _Laid:
    """Pad the dimensions that tiles do not divide, pack constant weights, and make the rows one dimension."""
    row, final, before = workload.row, workload.final, workload.before
    extents = extents_of(sch, block)
    cropped = None
    if workload.grid.rows % tile.rows or workload.grid.columns % tile.columns:
        cropped = final if final is not None else sch.cache_write(block, 0, "global")
        before = tuple(_pad(sch, block, found, row, tile))
        extents = extents_of(sch, block)
        final = None
    elif workload.cropped:
        cropped, final = final, None
    # Tiles leave uncropped: LLVM keeps accumulators in registers only if no condition guards the copy out of them.
    if found.weights is not None and _is_constant(sch, block, found.weights):
        _pack(sch, block, found.weights, tile.columns)
    if workload.flat and math.prod(extents[p] for p in found.rows) > extents[row]:
        if final is None and cropped is None:
            final = sch.cache_write(block, 0, "global")
        found = _flatten(sch, block, final if cropped is None else cropped, found)
        extents = extents_of(sch, block)
    return _Laid(found, before, final, cropped, extents)


@dataclass(frozen=True, slots=True)
class _Nest:
    """The tiled loops of a contraction: `outer` runs over tiles, `walk` over the tiles of one thread (at most a loop).

    The reductions, and the rows and columns of a tile, are inside. `partial`: the block that sums one chunk.
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


def _tile(sch: Any, block: Any, found: Contraction, row: int, chosen: TileBlocking) -> _Nest:
    """Split the loops of a contraction into tiles, and a long reduction into chunks."""
    loops = sch.get_loops(block)
    rows = [loops[p] for p in found.rows]
    batch = [loops[i] for i in range(len(loops)) if i not in (*found.rows, found.column, *found.reductions)]
    reductions = [loops[r] for r in found.reductions]
    (tiled,) = [loop for loop, p in zip(rows, found.rows) if p == row or len(rows) == 1]
    rows = [loop for loop in rows if loop is not tiled] + [tiled]
    outer_row, inner_row = sch.split(rows[-1], [None, chosen.tile.rows])
    outer_column, inner_column = sch.split(loops[found.column], [None, chosen.tile.columns])
    channelwise = found.weights is None
    walk = [outer_row] if channelwise else []  # a loop of its own within one thread
    across = [*rows[:-1]] if channelwise else [*rows[:-1], outer_row]
    tiles = [outer_column, *across] if chosen.columns_first else [*across, outer_column]
    sch.reorder(*batch, *tiles, *walk, *reductions, inner_row, inner_column)
    outer = sch.fuse(*batch, *tiles)
    partial = None if channelwise else _sum_chunks(sch, block, reductions)
    if partial is not None:
        outer, *reductions, inner_row, inner_column = sch.get_loops(block)
    return _Nest(outer, walk, reductions, inner_row, inner_column, partial)


def _sum_chunks(sch: Any, block: Any, reductions: Sequence[Any]) -> Any | None:
    """Split a long reduction into chunks. Returns the block that sums a chunk; `block` then adds the chunks up.
    Returns None for a short reduction, which stays as it is.

    The rounding error of an accumulator grows with the number of its terms. With thousands of terms, a network of many
    layers would differ noticeably from the result of other runtimes.
    """
    found = chunk([int(sch.get(loop).extent) for loop in reductions])
    if found is None:
        return None
    at, step = found
    outer, _ = sch.split(reductions[at], [None, step])
    return sch.rfactor(sch.fuse(*reductions[:at], outer), 0)


def chunk(extents: Sequence[int]) -> tuple[int, int] | None:
    """Where to split loops of these extents into chunks of about `_CHUNK` terms: (index of the loop, inner extent).

    None for a short reduction, and for one that no factor divides into such chunks.
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
    # LLVM unrolls three loops in succession, and then has too few registers for the sums of all chunks.
    plain = [part for part in fitting if part[2] * 3 != terms or part[0] < len(extents) - 1]
    fitting = plain or fitting
    at, step, _ = min(fitting, key=lambda part: abs(math.log(part[2] / _CHUNK)))
    return at, step


def _accumulate(sch: Any, partial: Any, chunks: Any, column: int, tile: Tile) -> Any:
    """Keep the sums of a chunk in registers, as a tile in the loop over chunks. Returns the loop over its terms."""
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


def _flatten(sch: Any, block: Any, final: Any, found: Contraction) -> Contraction:
    """Make the rows one dimension in the anchor, in its result, and in the block that reads the result."""
    extents = extents_of(sch, block)
    sizes = [extents[p] for p in found.rows]
    others = [i for i in range(len(extents)) if i not in (*found.rows, found.column, *found.reductions)]
    assert not others
    assert [*found.rows, found.column] == list(range(len(sizes) + 1))

    def flat(*indices: Any) -> list[Any]:
        row = indices[0]
        for index, size in zip(indices[1 : len(sizes)], sizes[1:]):
            row = row * size + index
        return [row, *indices[len(sizes) :]]

    sch.transform_layout(block, ("write", 0), index_map(flat, len(sizes) + 1, sch, block))
    sch.transform_block_layout(block, index_map(flat, len(extents), sch, block))
    sch.transform_block_layout(final, index_map(flat, len(sizes) + 1, sch, block))
    reductions = tuple(range(2, 2 + len(found.reductions)))
    return Contraction(1, (0,), reductions, found.weights)


def _pad(sch: Any, block: Any, found: Contraction, row: int, tile: Tile) -> list[Any]:
    """Pad rows and columns to multiples of the tile; returns the blocks that copy padded operands."""
    extents = extents_of(sch, block)
    steps = [1] * len(extents)
    steps[row], steps[found.column] = tile.rows, tile.columns
    assert found.weights is not None
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


def _flat_rows(sch: Any, block: Any, found: Contraction) -> bool:
    """Whether the row iterators themselves index the broadcast operand, so that they can become one dimension."""
    from tvm.ir.expr import TensorLoad

    node = sch.get(block)
    product = node.body.value.b
    variables = [v.var for v in node.iter_vars]
    rows = [variables[p] for p in found.rows]
    for factor in (product.a, product.b):
        if not isinstance(factor, TensorLoad):
            return False
        used = [index for index in factor.indices if any(uses([index], row) for row in rows)]
        if used and not (len(used) == len(rows) and all(_plain(i, row) for i, row in zip(used, rows))):
            return False
    return True


def _keeps_rows(sch: Any, final: Any, extents: Sequence[int], found: Contraction) -> bool:
    """Whether the final block has all rows: at most columns are cropped."""
    return extents_of(sch, final)[: len(found.rows)] == [extents[p] for p in found.rows]


def _is_product(sch: Any, block: Any) -> bool:
    """Whether plain iterators index both operands, as in a matrix product."""
    product = sch.get(block).body.value.b
    variables = [v.var for v in sch.get(block).iter_vars]
    return all(any(i.same_as(v) for v in variables) for f in (product.a, product.b) for i in f.indices)


def _plain(index: Any, row: Any) -> bool:
    """index = row, or row + r with a reduction variable of extent 1 (which simplification leaves in)."""
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
