"""How a primitive function runs on a processor without tuning: the schedules of expert kernels.

Every function from Relax's fusion has one anchor, the block that does the work, with injective blocks before it
(padding) and after it (bias, activation, residual). There are five kinds of anchors:

- a contraction (MatMul, Conv in NHWC, batched or not): register-blocked. A tile of mr x nr accumulators stays in vector
  registers through the reduction, or a chunk of a long one; each step loads nr values of the packed operand as vectors
  and multiplies them with mr values broadcast from the other (Goto and van de Geijn, Anatomy of High-Performance Matrix
  Multiplication, 2008). Constant weights are packed into panels of nr columns, once, when the model is compiled. The
  epilogue runs on the tile while it is in registers.
- a channelwise contraction (depthwise Conv): a small tile moves along the innermost row, so that the weights of its
  channels stay in registers.
- the same with channels first: one plane after the other, with a tile of a few rows in vectors along them.
- a row reduction (softmax, normalisation, mean): rows in parallel, each with vectors of partial results.
- none: everything is inlined into the last block, which runs in parallel and in vectors.

The choices for a contraction (see `Choice`) are made by a heuristic if a model was not tuned, and are among those of
the tuners (see `ways`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.kernels.pooling import WINDOW
from xrlflow.backends.tvm.toolchain.target import Machine

# The tile is on a thread's stack; LLVM turns it into registers.
_LOCAL = "local"
# Marks the packing of a constant: SplitLayoutRewritePreproc makes it a function, which constant folding runs.
_PACKING = "meta_schedule.layout_rewrite_preproc"
_MOST_ROWS = 14
# The relative speed of a tile that LLVM does not keep in registers.
_SPILLS = 0.5
# Rows of a tile of a plane, with 16 registers and with more.
_PLANE_ROWS, _MORE_PLANE_ROWS = 4, 8
# Groups with fewer columns are not treated as contractions.
_NARROWEST = 4
# Longer reductions are summed in chunks, because rounding errors grow with the number of terms of an accumulator.
_CHUNK = 128
_UNROLLED = 64
# The number of vectors of results, in a reduction across memory.
_ABREAST = 4
# Rows whose distance is a multiple of this share a set of an 8-way first-level cache.
_PAGE = 4096
_WAYS = 8
# Rows of windows are the parts of a parallel loop if each core gets as many.
_PARTS = 4
# Functions with fewer operations run in one thread: waking another one takes some microseconds.
WORTH_A_THREAD = 30_000


@dataclass(frozen=True, slots=True)
class Tile:
    """Accumulators in registers: `rows` x `columns` values, the columns in vectors of `lanes`."""

    rows: int
    columns: int
    lanes: int


@dataclass(frozen=True, slots=True)
class _Contraction:
    """What a contraction block computes, by positions of its iterators.

    `column`: the last output dimension. `rows`: the output dimensions that only the broadcast operand has, the
    innermost last. `weights`: the position, among the block's reads, of the operand with the columns; None if both
    operands have them (channelwise).
    """

    column: int
    rows: tuple[int, ...]
    reductions: tuple[int, ...]
    weights: int | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The choices for a contraction: its tile, and whether tiles of one column follow each other."""

    tile: Tile
    columns_first: bool


def schedule(mod: Any, machine: Machine) -> Any:
    """TVM's schedule of a module with one primitive function named "main".

    Functions that none of our schedules handles stay as they are, in one thread, which is slow but right. There is a
    warning.
    """
    from tvm.s_tir import Schedule, ScheduleError

    try:
        return apply(mod, machine)
    except ScheduleError as error:
        last = str(error).strip().splitlines()[-1]
        warnings.warn(f"a kernel was left unscheduled: {last}", stacklevel=2)
        return Schedule(mod, debug_mask="none")


def apply(mod: Any, machine: Machine, choice: Choice | None = None) -> Any:
    """The schedule of "main", of a contraction with `choice` (default: that of the heuristic).

    `mod` must be kept by a variable meanwhile, as it is here: TVM's schedule changes what nothing else refers to in
    place, and does not see that another module has the same body.
    """
    from tvm.s_tir import Schedule

    sch = Schedule(mod, debug_mask="none")
    _inline_scalars(sch)
    anchors = _anchors(sch)
    if contraction := _only_contraction(sch, anchors):
        _schedule_contraction(sch, *contraction, _prepare(sch, *contraction), machine, choice)
    elif len(anchors) == 1 and _is_plane(sch, anchors[0]):
        _schedule_plane(sch, anchors[0], machine)
    elif len(anchors) == 1 and WINDOW in sch.get(anchors[0]).annotations:
        _schedule_window(sch, anchors[0], machine)
    elif anchors:
        _schedule_rows(sch, anchors, machine)
    else:
        _schedule_injective(sch, machine)
    return sch


def choices(mod: Any, machine: Machine, most: int = 64) -> list[Choice]:
    """The `most` best choices for "main", the best first; [] if there is no choice."""
    form = _form(mod)
    if form is None:
        return []
    rated = sorted(rated_tiles(form.grid, machine), key=lambda entry: -entry[0])[: max(1, most // 2)]
    first = form.heuristic(machine).columns_first
    return [Choice(tile, columns_first) for _, tile in rated for columns_first in (first, not first)]


def heuristic(mod: Any, machine: Machine) -> Choice | None:
    """The choice for "main" without tuning; None if there is none."""
    form = _form(mod)
    return None if form is None else form.heuristic(machine)


def _form(mod: Any) -> _Form | None:
    """The contraction of "main", if it is one and the blocks around it are understood."""
    from tvm.s_tir import Schedule, ScheduleError

    sch = Schedule(mod, debug_mask="none")
    try:
        _inline_scalars(sch)
        contraction = _only_contraction(sch, _anchors(sch))
        return None if contraction is None else _prepare(sch, *contraction)
    except ScheduleError:
        return None  # `schedule` leaves it as it is


# --- Reading a function


def _only_contraction(sch: Any, anchors: Sequence[Any]) -> tuple[Any, _Contraction] | None:
    if len(anchors) != 1:
        return None
    _split_groups(sch, anchors[0])
    found = _contraction(sch, anchors[0])
    return None if found is None else (anchors[0], found)


def _blocks(sch: Any) -> list[Any]:
    """The function's blocks in execution order."""
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def _name(sch: Any, block: Any) -> str:
    """The name of a block, which identifies it: two handles of one block are not equal."""
    return str(sch.get(block).name_hint)


def _inline_scalars(sch: Any) -> None:
    """Inline blocks that only compute scalars, for `_can_have_partial_sums`."""
    outputs = _outputs(sch)
    for block in _blocks(sch):
        if not list(sch.get_loops(block)) and _name(sch, block) not in outputs:
            sch.compute_inline(block)


def _can_have_partial_sums(sch: Any) -> bool:
    """Whether rfactor works:

    TVM fails with an internal error if there is a block without loops next to the split one.
    """
    return all(list(sch.get_loops(block)) for block in _blocks(sch))


def _outputs(sch: Any) -> set[str]:
    return {_name(sch, block) for block in sch.get_output_blocks(sch.get_sblock("root"))}


def _anchors(sch: Any) -> list[Any]:
    """The blocks that reduce."""
    return [b for b in _blocks(sch) if any(int(v.iter_type) == 2 for v in sch.get(b).iter_vars)]


def _extent(variable: Any) -> int | None:
    extent = variable.dom.extent
    return int(extent) if hasattr(extent, "value") else None


def _extents(sch: Any, block: Any) -> list[int]:
    return [_extent(v) or 1 for v in sch.get(block).iter_vars]


def _uses(indices: Sequence[Any], variable: Any) -> bool:
    from tvm.tirx.analysis import undefined_vars

    return any(any(v.same_as(variable) for v in undefined_vars(index, [])) for index in indices)


def _contraction(sch: Any, block: Any) -> _Contraction | None:
    """C[.., n] += A[.., k] * B[k.., n]; None for another reduction, or one with unknown extents."""
    from tvm import sym, tirx
    from tvm.ir.expr import TensorLoad

    node = sch.get(block)
    variables = list(node.iter_vars)
    if any(_extent(v) is None for v in variables) or not isinstance(node.body, tirx.BufferStore):
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
        if int(variable.iter_type) == 2 or _extent(variable) != 1:
            analyzer.bind(variable.var, variable.dom)
    indices = [analyzer.simplify(i) for i in node.body.indices]
    read = [[analyzer.simplify(i) for i in f.indices] for f in factors]

    def place(expression: Any) -> int | None:
        return next((i for i, v in enumerate(variables) if v.var.same_as(expression)), None)

    places = [place(index) for index in indices]
    if not places or places[-1] is None:
        return None
    column = places[-1]
    with_column = [_uses(r, variables[column].var) for r in read]
    reductions = tuple(i for i, v in enumerate(variables) if int(v.iter_type) == 2)
    spatial = [p for p in places[:-1] if p is not None]
    if all(with_column):
        rows = tuple(p for p in spatial if sum(_uses(r, variables[p].var) for r in read) == 1)
        last = [r[-1] for r in read]
        wide = any(
            _extents(sch, block)[r] > 1 and _uses([index], variables[r].var)
            for r in reductions
            for index in last
        )
        return None if wide or not rows else _Contraction(column, rows, reductions, None)
    if not any(with_column):
        return None
    weights, other = with_column.index(True), with_column.index(False)
    first = [analyzer.simplify(read[weights][-1] - variables[column].var)]
    if any(_uses(first, variables[i].var) for i in (column, *reductions)):
        return None  # neighbours are not adjacent in memory, or move with the reduction
    rows = tuple(
        p
        for p in spatial
        if _uses(read[other], variables[p].var) and not _uses(read[weights], variables[p].var)
    )
    reads = [region.source for region in node.reads]
    at = next((i for i, buffer in enumerate(reads) if buffer.same_as(factors[weights].source)), None)
    return None if at is None or not rows else _Contraction(column, rows, reductions, at)


def _split_groups(sch: Any, block: Any) -> None:
    """C[.., n] += A[.., n // m * k + r] * W[.., r, n], a grouped convolution, becomes a batch of contractions:
    C[.., g, n] += A[.., g * k + r] * W[.., r, g * m + n]. Anything else stays as it is, also groups of few columns, and
    sums of one term, of which nothing would be left to sum.
    """
    from tvm import sym, tirx
    from tvm.ir.expr import TensorLoad

    node = sch.get(block)
    variables = list(node.iter_vars)
    if any(_extent(v) is None for v in variables) or not isinstance(node.body, tirx.BufferStore):
        return
    if all(_extent(v) == 1 for v in variables if int(v.iter_type) == 2):
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
        or _uses([*image.indices[:-1], *weights.indices[:-1]], last)
        or int(reduced.iter_type) != 2
    ):
        return
    inner, channels, columns = _extent(reduced), int(image.source.shape[-1]), _extent(outputs[-1])
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

    if _name(sch, block) in _outputs(sch):
        sch.cache_write(block, 0, "global")
    # In this order. The other one leaves indices (g * m + n) // m, which compute_at cannot handle.
    whole, parts = _index_map(split, len(outputs), sch, block), _index_map(split, len(variables), sch, block)
    sch.transform_block_layout(block, parts)
    sch.transform_layout(block, ("write", 0), whole)


# --- Choices


@dataclass(frozen=True, slots=True)
class Grid:
    """The outputs of a contraction: `rows` x `columns`, each the sum of `reduction` products.

    Rows of the broadcast operand are at least `row_stride` bytes apart. `pad_rows`, `pad_columns`: they may be padded
    to multiples of a tile. `channelwise`: nothing is broadcast, each column has its own weights.
    """

    rows: int
    columns: int
    row_stride: int
    reduction: int
    pad_rows: bool = False
    pad_columns: bool = False
    channelwise: bool = False


def tile_of(grid: Grid, machine: Machine) -> Tile:
    """The tile of a contraction: the first of the best of `rated_tiles`."""
    rated = list(rated_tiles(grid, machine))
    highest = max(value for value, _ in rated)
    return next(tile for value, tile in rated if value > highest - 1e-9)


def rated_tiles(grid: Grid, machine: Machine) -> Iterator[tuple[float, Tile]]:
    """Tiles that fit into the registers, with their ratings.

    A step of the reduction loads rows + columns / lanes operands for rows x columns / lanes multiply-adds, so a squarer
    tile loads less. But the vectors come from the second-level cache, where the panel is, and cost as much as three
    broadcasts: a higher tile loads fewer of them. (For 21 shapes that networks have, the tile that this chooses took
    1.02 times as long as the best one on average, at most 1.11; without this 1.06 and 1.33.) It may not need more
    registers than there are, and is slower if LLVM spills some. With fewer than 8 accumulators, multipliers wait
    for their own results. Rows must not evict each other from the first-level cache. A panel of reduction x columns
    stays in half of the second-level cache. A tile divides the output; if that may be padded, useless work is
    weighed against the better shape. For channelwise tiles see `_channelwise`.
    """
    if grid.channelwise:
        yield from _channelwise(grid, machine)
        return
    most = _WAYS if grid.row_stride % _PAGE == 0 else _MOST_ROWS
    for lanes in (n for n in (machine.lanes, machine.lanes // 2, machine.lanes // 4, 1) if n >= 1):
        for vectors in range(1, 9):
            width = vectors * lanes
            if grid.columns % width and not (grid.pad_columns and lanes > 1):
                continue
            if vectors > 1 and grid.reduction * width * 4 > machine.second_level // 2:
                continue
            for height in range(1, min(grid.rows, most) + 1):
                accumulators = height * vectors
                if grid.rows % height and not grid.pad_rows:
                    continue
                if accumulators + vectors + 1 > machine.registers:
                    continue
                kept = 1.0 if machine.keeps(height, vectors) else _SPILLS
                busy = min(1.0, accumulators / 8)
                loads = (height + vectors) / accumulators
                far = 1.0 / height
                useful = _useful(grid.rows, height) * _useful(grid.columns, width)
                yield (
                    useful * busy * kept * (lanes / machine.lanes) / (1.0 + 0.5 * loads + far),
                    Tile(height, width, lanes),
                )


def _channelwise(grid: Grid, machine: Machine) -> Iterator[tuple[float, Tile]]:
    """Tiles of a channelwise contraction, with their ratings.

    Every product loads its own operand. Only the weights are shared, if they stay in registers next to the accumulators
    while the tile moves along a row. Two accumulators keep the multipliers busy, since loads take the time; more gain
    nothing (measured: 1.4 to 2.2 times faster than the tile of a product).
    """
    for lanes in (n for n in (machine.lanes, machine.lanes // 2, machine.lanes // 4, 1) if n >= 1):
        for vectors in range(1, 5):
            if grid.columns % (vectors * lanes):
                continue
            for height in range(1, min(grid.rows, _MOST_ROWS) + 1):
                accumulators = height * vectors
                if grid.rows % height or accumulators + 1 > machine.registers:
                    continue
                kept = grid.reduction * vectors + accumulators + 1 <= machine.registers
                busy = min(1.0, accumulators / 2) / (1.0 + 0.015 * accumulators)
                yield (
                    busy * (lanes / machine.lanes) * (1.0 if kept else 0.7),
                    Tile(height, vectors * lanes, lanes),
                )


def _useful(extent: int, step: int) -> float:
    """The part of a padded dimension that is useful, reduced by the cost of copying it."""
    padded = -(-extent // step) * step
    return extent / padded * (0.9 if padded != extent else 1.0)


# --- Contractions


@dataclass(frozen=True, slots=True)
class _Form:
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

    def heuristic(self, machine: Machine) -> Choice:
        tile = tile_of(self.grid, machine)
        if self.grid.channelwise:
            # With few channels, threads that share them would read the same pages.
            return Choice(tile, self.grid.columns // tile.columns >= 3 * machine.cores)
        return Choice(tile, self.columns_first)


def _prepare(sch: Any, block: Any, found: _Contraction) -> _Form:
    """Inline everything possible around a contraction, and analyse what is left."""
    _inline_copies(sch, block)
    if found.weights is None:
        # A condition for each vector costs less than a padded copy in memory, which is read as often as it is computed.
        for producer in sch.get_producers(block):
            sch.compute_inline(producer)
    before = tuple(sch.get_producers(block))
    cropped = _kept(sch, block) < _elements(sch, block)
    final, later = _inline_epilogue(sch, block)
    extents = _extents(sch, block)
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
    return _Form(before, final, tuple(later), flat, row, grid, columns_first, cropped)


def _schedule_contraction(
    sch: Any, block: Any, found: _Contraction, form: _Form, machine: Machine, choice: Choice | None
) -> None:
    chosen = choice if choice is not None else form.heuristic(machine)
    tile = chosen.tile
    laid = _lay_out(sch, block, found, form, tile)
    found, final, cropped = laid.found, laid.final, laid.cropped
    nest = _tile(sch, block, found, form.row, chosen)
    if final is None:
        final = sch.cache_write(block, 0, _LOCAL)
    else:
        sch.set_scope(block, 0, _LOCAL)
    sch.reverse_compute_at(final, nest.innermost, preserve_unit_loops=True)
    partial, reductions = nest.partial, nest.reductions
    steps = None if partial is None else _accumulate(sch, partial, reductions[-1], found.column, tile)
    vectors, lane = sch.split(nest.inner_column, [None, tile.lanes])
    sch.vectorize(lane)
    sch.unroll(vectors)
    sch.unroll(nest.inner_row)
    if found.weights is None:
        _unroll(sch, reductions)
    outside = nest.outside
    _vectorize_tile(sch, final, tile, outside)
    if cropped is not None:
        sch.reverse_compute_at(cropped, nest.innermost, preserve_unit_loops=True)
        _vectorize_tile(sch, cropped, tile, outside)
    if 2 * math.prod(laid.extents) >= WORTH_A_THREAD:
        sch.parallel(nest.outer)
    _start_at_zero(sch, block, reductions[0], outside)
    if partial is not None:
        _start_at_zero(sch, partial, steps, outside + 1)
    for other in (*laid.before, *form.later):
        _parallel_vectors(sch, other, machine)


@dataclass(frozen=True, slots=True)
class _Laid:
    """A contraction whose operands and result are laid out for tiles.

    Blocks `before` the contraction run first. The `final` block takes the tiles out of the registers (None: not made
    yet). The block `cropped` removes the padding. `extents`: the contraction's loop extents.
    """

    found: _Contraction
    before: tuple[Any, ...]
    final: Any | None
    cropped: Any | None
    extents: Sequence[int]


def _lay_out(sch: Any, block: Any, found: _Contraction, form: _Form, tile: Tile) -> _Laid:
    """Pad the dimensions that tiles do not divide, pack constant weights, and make the rows one dimension."""
    row, final, before = form.row, form.final, form.before
    extents = _extents(sch, block)
    cropped = None
    if form.grid.rows % tile.rows or form.grid.columns % tile.columns:
        cropped = final if final is not None else sch.cache_write(block, 0, "global")
        before = tuple(_pad(sch, block, found, row, tile))
        extents = _extents(sch, block)
        final = None
    elif form.cropped:
        cropped, final = final, None
    # Tiles leave uncropped: LLVM keeps accumulators in registers only if no condition guards the copy out of them.
    if found.weights is not None and _is_constant(sch, block, found.weights):
        _pack(sch, block, found.weights, tile.columns)
    if form.flat and math.prod(extents[p] for p in found.rows) > extents[row]:
        if final is None and cropped is None:
            final = sch.cache_write(block, 0, "global")
        found = _flatten(sch, block, final if cropped is None else cropped, found)
        extents = _extents(sch, block)
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


def _tile(sch: Any, block: Any, found: _Contraction, row: int, chosen: Choice) -> _Nest:
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
    sch.set_scope(partial, 0, _LOCAL)
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


def _flatten(sch: Any, block: Any, final: Any, found: _Contraction) -> _Contraction:
    """Make the rows one dimension in the anchor, in its result, and in the block that reads the result."""
    extents = _extents(sch, block)
    sizes = [extents[p] for p in found.rows]
    others = [i for i in range(len(extents)) if i not in (*found.rows, found.column, *found.reductions)]
    assert not others
    assert [*found.rows, found.column] == list(range(len(sizes) + 1))

    def flat(*indices: Any) -> list[Any]:
        row = indices[0]
        for index, size in zip(indices[1 : len(sizes)], sizes[1:]):
            row = row * size + index
        return [row, *indices[len(sizes) :]]

    sch.transform_layout(block, ("write", 0), _index_map(flat, len(sizes) + 1, sch, block))
    sch.transform_block_layout(block, _index_map(flat, len(extents), sch, block))
    sch.transform_block_layout(final, _index_map(flat, len(sizes) + 1, sch, block))
    reductions = tuple(range(2, 2 + len(found.reductions)))
    return _Contraction(1, (0,), reductions, found.weights)


def _index_map(function: Any, dimensions: int, sch: Any, block: Any) -> Any:
    from tvm.tirx import IndexMap

    kind = str(sch.get(block).iter_vars[0].var.ty.dtype)
    return IndexMap.from_func(function, ndim=dimensions, index_dtype=kind)


def _pad(sch: Any, block: Any, found: _Contraction, row: int, tile: Tile) -> list[Any]:
    """Pad rows and columns to multiples of the tile; returns the blocks that copy padded operands."""
    extents = _extents(sch, block)
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


def _inline_copies(sch: Any, block: Any) -> None:
    """Inline blocks that only copy (pads of 0) into the anchor."""
    from tvm import tirx
    from tvm.ir.expr import TensorLoad

    for producer in sch.get_producers(block):
        node = sch.get(producer)
        if isinstance(node.body, tirx.BufferStore) and isinstance(node.body.value, TensorLoad):
            sch.compute_inline(producer)


def _inline_epilogue(sch: Any, block: Any) -> tuple[Any | None, list[Any]]:
    """Inline the blocks after the anchor. Returns the block that runs on each tile (or None), and the later blocks.

    Blocks with as many elements as the anchor are inlined into the last of them. A block that broadcasts the result to
    more elements (the gate of a squeeze-and-excitation block) would repeat the work, so it runs afterwards. Operands of
    the last block that do not depend on the anchor (a mask, a slice of another tensor) are inlined, too: TVM moves
    a block under the anchor's loops only with everything that it reads.
    """
    anchor = _name(sch, block)
    outputs = _outputs(sch)
    elements = _kept(sch, block)
    behind = [b for b in _blocks(sch) if _name(sch, b) != anchor and _behind(sch, anchor, b)]
    alike = [b for b in behind if _elements(sch, b) == elements and not _spreads(sch, anchor, b, elements)]
    kept = _name(sch, alike[-1]) if alike else None
    later = [b for b in behind if _name(sch, b) in outputs and _name(sch, b) != kept]
    beside = [
        b
        for b in _blocks(sch)
        if kept is not None
        and _name(sch, b) not in outputs | {anchor}
        and _behind(sch, _name(sch, b), alike[-1])
        and not _behind(sch, anchor, b)
        and not _behind(sch, _name(sch, b), block)
    ]
    for other in beside:
        sch.compute_inline(other)
    for middle in behind:
        if _name(sch, middle) not in outputs | {kept}:
            sch.compute_inline(middle)
    return (alike[-1] if alike else None), later


def _elements(sch: Any, block: Any) -> int:
    node = sch.get(block)
    return math.prod(_extent(v) or 1 for v in node.iter_vars if int(v.iter_type) == 0)


def _kept(sch: Any, block: Any) -> int:
    """How many elements of a block's result are used: fewer than all if its only reader is a block that crops it."""
    from tvm.ir.expr import TensorLoad

    consumers = list(sch.get_consumers(block))
    if len(consumers) != 1:
        return _elements(sch, block)
    node = sch.get(consumers[0])
    value = getattr(node.body, "value", None)
    if not isinstance(value, TensorLoad) or len(value.indices) != len(node.body.indices):
        return _elements(sch, block)
    if not all(a.same_as(b) for a, b in zip(value.indices, node.body.indices)):
        return _elements(sch, block)
    return _elements(sch, consumers[0])


def _spreads(sch: Any, anchor: str, block: Any, elements: int) -> bool:
    """Whether a larger block lies between the anchor and this one."""
    return any(
        _name(sch, p) != anchor
        and (_elements(sch, p) > elements or _spreads(sch, anchor, p, elements))
        and _behind(sch, anchor, p)
        for p in sch.get_producers(block)
    )


def _behind(sch: Any, anchor: str, block: Any) -> bool:
    """Whether a block depends on the anchor."""
    frontier = list(sch.get_producers(block))
    while frontier:
        current = frontier.pop()
        if _name(sch, current) == anchor:
            return True
        frontier.extend(sch.get_producers(current))
    return False


def _flat_rows(sch: Any, block: Any, found: _Contraction) -> bool:
    """Whether the row iterators themselves index the broadcast operand, so that they can become one dimension."""
    from tvm.ir.expr import TensorLoad

    node = sch.get(block)
    product = node.body.value.b
    variables = [v.var for v in node.iter_vars]
    rows = [variables[p] for p in found.rows]
    for factor in (product.a, product.b):
        if not isinstance(factor, TensorLoad):
            return False
        used = [index for index in factor.indices if any(_uses([index], row) for row in rows)]
        if used and not (len(used) == len(rows) and all(_plain(i, row) for i, row in zip(used, rows))):
            return False
    return True


def _keeps_rows(sch: Any, final: Any, extents: Sequence[int], found: _Contraction) -> bool:
    """Whether the final block has all rows: at most columns are cropped."""
    return _extents(sch, final)[: len(found.rows)] == [extents[p] for p in found.rows]


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


def _unroll(sch: Any, reductions: Sequence[Any]) -> None:
    """Unroll the reductions if they have few steps; otherwise (large kernels) only the innermost loops."""
    steps = 1
    for loop in reversed(reductions):
        steps *= int(sch.get(loop).extent)
        if steps > _UNROLLED:
            return
        sch.unroll(loop)


def _vectorize_tile(sch: Any, final: Any, tile: Tile, outside: int) -> None:
    """Copy a tile out: unroll the loops inside the `outside` outermost ones, and vectorise the last loop."""
    inside = sch.get_loops(final)[outside:]
    vectors, lane = sch.split(inside[-1], [None, tile.lanes])
    sch.vectorize(lane)
    for loop in (*inside[:-1], vectors):
        sch.unroll(loop)


# --- Channels first


def _is_plane(sch: Any, block: Any) -> bool:
    """Whether C[.., y, x] += A[.., y + ky, x + kx] * W[.., ky, kx]: one plane of A makes one plane of the result."""
    from tvm import tirx
    from tvm.ir.expr import TensorLoad

    node = sch.get(block)
    variables = list(node.iter_vars)
    if any(_extent(v) is None for v in variables) or not isinstance(node.body, tirx.BufferStore):
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
    within = [[any(_uses([i], v.var) for v in spatial[-2:]) for i in f.indices] for f in factors]
    images = [f for f, used in zip(factors, within) if used[-2:] == [True, True] and not any(used[:-2])]
    return (
        len(images) == 1
        and sum(map(any, within)) == 1
        and not any((_extent(r) or 0) > 1 and _uses(images[0].indices[:-2], r.var) for r in reductions)
    )


def _schedule_plane(sch: Any, block: Any, machine: Machine) -> None:
    """Compute the planes in parallel. A plane is padded in the cache; its weights stay in registers.

    The rows of a tile share the vectors that they load.
    """
    _inline_copies(sch, block)
    padding = list(sch.get_producers(block))
    final, later = _inline_epilogue(sch, block)
    extents = _extents(sch, block)
    kinds = [int(v.iter_type) for v in sch.get(block).iter_vars]
    at = kinds.count(0)
    *_, height, width = extents[:at]
    lanes = _dividing(width, machine) or 1
    most = _PLANE_ROWS if machine.registers <= 16 else _MORE_PLANE_ROWS
    rows = next(n for n in range(most, 0, -1) if height % n == 0)
    loops = sch.get_loops(block)
    y, row = sch.split(loops[at - 2], [None, rows])
    x, lane = sch.split(loops[at - 1], [None, lanes])
    sch.reorder(*loops[: at - 2], y, x, *loops[at:], row, lane)
    outer = sch.fuse(*loops[: at - 2])
    if final is None:
        final = sch.cache_write(block, 0, _LOCAL)
    else:
        sch.set_scope(block, 0, _LOCAL)
    sch.reverse_compute_at(final, x, preserve_unit_loops=True)
    sch.unroll(row)
    sch.vectorize(lane)
    _unroll(sch, loops[at:])
    _vectorize_tile(sch, final, Tile(rows, lanes, lanes), 3)
    for producer in padding:
        sch.compute_at(producer, outer, preserve_unit_loops=True)
    if 2 * math.prod(extents) >= WORTH_A_THREAD:
        sch.parallel(outer)
    start = sch.decompose_reduction(block, loops[at])
    for loop in sch.get_loops(start)[3:-1]:
        sch.unroll(loop)
    for other in later:
        _parallel_vectors(sch, other, machine)


# --- Windows


def _schedule_window(sch: Any, block: Any, machine: Machine) -> None:
    """Reduce windows of pixels [batch, row, column, channel]: rows in parallel, and the results of a few vectors of
    channels in registers while all taps are read."""
    _inline_copies(sch, block)
    before = sch.get_producers(block)
    final, later = _inline_epilogue(sch, block)
    *extents, channels = _extents(sch, block)[:4]
    lanes = _dividing(channels, machine)
    pieces = channels // lanes if lanes else 1
    vectors = next(n for n in range(_ABREAST, 0, -1) if pieces % n == 0)
    batch, row, column, channel, *taps = sch.get_loops(block)
    if lanes:
        piece, vector, lane = sch.split(channel, [None, vectors, lanes])
        sch.reorder(piece, *taps, vector, lane)
    else:  # LLVM makes vectors and a rest of them
        piece, lane = sch.split(channel, [1, None])
        sch.reorder(piece, *taps, lane)
    if final is None:
        final = sch.cache_write(block, 0, _LOCAL)
    else:
        sch.set_scope(block, 0, _LOCAL)
    sch.reverse_compute_at(final, piece, preserve_unit_loops=True)
    if lanes:
        sch.vectorize(lane)
        sch.unroll(vector)
        _vectorize_tile(sch, final, Tile(1, vectors * lanes, lanes), 4)
    _unroll(sch, taps)
    many = math.prod(extents[:2]) >= _PARTS * machine.cores
    outer = sch.fuse(batch, row) if many else sch.fuse(batch, row, column)
    if math.prod(extents) * channels * math.prod(int(sch.get(tap).extent) for tap in taps) >= WORTH_A_THREAD:
        sch.parallel(outer)
    start = sch.decompose_reduction(block, taps[0])
    if lanes:
        for loop in sch.get_loops(start)[3 if many else 2 : -1]:
            sch.unroll(loop)
    for other in (*before, *later):
        _parallel_vectors(sch, other, machine)


# --- Row reductions and injective functions


def _parallel_vectors(sch: Any, block: Any, machine: Machine) -> None:
    """Schedule an injective block: vectorise its innermost dimension, and run the others in parallel."""
    loops = sch.get_loops(block)
    extents = [int(sch.get(loop).extent) for loop in loops]
    elements = math.prod(extents)
    if not loops:
        return
    lanes = _dividing(extents[-1], machine)
    if not lanes and elements % machine.lanes == 0 and _elementwise(sch, block):
        loops, lanes = [sch.fuse(*loops)], machine.lanes
    turned = _turned(sch, block) if lanes and len(loops) > 1 else None
    if lanes:
        last, lane = sch.split(loops[-1], [None, lanes])
        sch.vectorize(lane)
        outer = [*loops[:-1], last]
        if turned is not None:  # visit neighbours in memory in succession: each cache line is read once
            along = outer.pop(turned)
            sch.reorder(*outer, along, lane)
    else:  # LLVM vectorises what it can: the innermost loops stay as they are
        inside = next(
            (n for n in range(1, len(loops)) if math.prod(extents[-n:]) >= machine.lanes), len(loops) - 1
        )
        outer = loops[: len(loops) - inside]
    if elements >= WORTH_A_THREAD and outer:
        sch.parallel(sch.fuse(*outer))


def _turned(sch: Any, block: Any) -> int | None:
    """The output dimension along which a transposed operand is contiguous in memory, if it is not the last one."""
    node = sch.get(block)
    variables = [v.var for v in node.iter_vars]
    for region in node.reads:
        if len(region.region) > 1:
            used = [i for i, v in enumerate(variables) if _uses([region.region[-1].min], v)]
            if used and len(variables) - 1 not in used:
                return used[-1]
    return None


def _elementwise(sch: Any, block: Any) -> bool:
    """Whether a block reads every operand where it writes."""
    from tvm import tirx

    node = sch.get(block)
    if not isinstance(node.body, tirx.BufferStore):
        return False
    return all(
        len(region.region) == len(node.body.indices)
        and all(r.min.same_as(i) for r, i in zip(region.region, node.body.indices))
        for region in node.reads
    )


def _schedule_injective(sch: Any, machine: Machine) -> None:
    outputs = _outputs(sch)
    for block in _blocks(sch):
        if _name(sch, block) not in outputs:
            sch.compute_inline(block)
    for block in _blocks(sch):
        _parallel_vectors(sch, block, machine)


def _schedule_rows(sch: Any, anchors: Sequence[Any], machine: Machine) -> None:
    """Schedule each block on its own: several reductions, or one that is no contraction (softmax, pooling)."""
    names = {_name(sch, a) for a in anchors}
    outputs = _outputs(sch)
    for block in _blocks(sch):
        if _name(sch, block) not in names | outputs and not _is_dear(sch, block, names):
            sch.compute_inline(block)
    if _schedule_by_row(sch, names, machine):
        return
    for block in _blocks(sch):
        if _name(sch, block) in names:
            _vectorize_reduction(sch, block, machine)
        else:
            _parallel_vectors(sch, block, machine)


def _schedule_by_row(sch: Any, reductions: set[str], machine: Machine) -> bool:
    """Run all blocks on a row while it is in the cache: softmax, normalisations, and means that are read along rows.
    Returns False if rows are not alike, or too few for all threads.

    All reductions must have the same first dimensions (the rows) and reduce all others. The last block must have these
    first dimensions, and at least one more.
    """
    outputs = _outputs(sch)
    if len(outputs) != 1 or outputs & reductions:
        return False
    (last,) = sch.get_output_blocks(sch.get_sblock("root"))
    extents = _extents(sch, last)
    anchors = [block for block in _blocks(sch) if _name(sch, block) in reductions]
    kinds = [[int(v.iter_type) for v in sch.get(anchor).iter_vars] for anchor in anchors]
    rows = kinds[0].count(0)
    alike = all(
        kind == [0] * rows + [2] * (len(kind) - rows) and _extents(sch, anchor)[:rows] == extents[:rows]
        for kind, anchor in zip(kinds, anchors)
    )
    if not alike or not 0 < rows < len(extents) or not _read_along_rows(sch, rows):
        return False
    work = max(math.prod(_extents(sch, block)) for block in (last, *anchors))
    if work >= WORTH_A_THREAD and math.prod(extents[:rows]) < machine.cores:
        return False
    partial: set[str] = set()
    for anchor in anchors:
        lanes = partial_lanes(_extents(sch, anchor)[-1], machine.lanes)
        if lanes and _can_have_partial_sums(sch):
            _, lane = sch.split(sch.get_loops(anchor)[-1], [None, lanes])
            partial.add(_name(sch, sch.rfactor(lane, rows)))
    row = sch.fuse(*sch.get_loops(last)[:rows])
    _vectorize_last(sch, last, machine)
    for block in reversed(_blocks(sch)):
        if _name(sch, block) not in outputs:
            sch.compute_at(block, row, preserve_unit_loops=True)
    for block in _blocks(sch):
        name = _name(sch, block)
        if name in partial:  # rfactor puts the lanes first
            lane, *steps = sch.get_loops(block)[1:]
            sch.reorder(*steps, lane)
            sch.vectorize(lane)
        elif name not in reductions | outputs:
            _vectorize_last(sch, block, machine)
    if work >= WORTH_A_THREAD:
        sch.parallel(row)
    return True


def _read_along_rows(sch: Any, rows: int) -> bool:
    """Whether each block reads the results of other blocks only at its own row, its first `rows` iterators."""
    made = {region.source.name for block in _blocks(sch) for region in sch.get(block).writes}

    def own(block: Any, region: Any) -> bool:
        variables, at = list(sch.get(block).iter_vars)[:rows], list(region.region)[:rows]
        return len(at) == rows and all(
            _extent(variable) == 1 or one.min.same_as(variable.var) for variable, one in zip(variables, at)
        )

    return all(
        own(block, region)
        for block in _blocks(sch)
        for region in sch.get(block).reads
        if region.source.name in made
    )


def _vectorize_last(sch: Any, block: Any, machine: Machine) -> None:
    """Vectorise the innermost loop if vectors divide it."""
    loop = sch.get_loops(block)[-1]
    if lanes := _dividing(int(sch.get(loop).extent), machine):
        _, lane = sch.split(loop, [None, lanes])
        sch.vectorize(lane)


def _is_dear(sch: Any, block: Any, reductions: set[str]) -> bool:
    """Whether inlining would repeat a block's work: several blocks read it, or a reduction does."""
    consumers = sch.get_consumers(block)
    return len(consumers) > 1 or any(_name(sch, c) in reductions for c in consumers)


def _dividing(extent: int, machine: Machine) -> int:
    """The lanes of the longest vectors that divide `extent`, at least a quarter of a register; 0 if there are none."""
    lengths = (machine.lanes, machine.lanes // 2, machine.lanes // 4)
    return next((n for n in lengths if n > 1 and extent % n == 0), 0)


def partial_lanes(along: int, lanes: int) -> int:
    """The number of partial results of a reduction along a row, as one vector; 0 if there is a single result.

    Half vectors serve short rows. A long row is better reduced in two parts (see `legalize`).
    """
    lengths = (lanes, lanes // 2) if along < 8 * lanes else (lanes,)
    return next((n for n in lengths if n > 1 and along % n == 0 and along >= 2 * n), 0)


def _vectorize_reduction(sch: Any, block: Any, machine: Machine) -> None:
    """Reduce rows in parallel: a vector of partial results along contiguous memory, a few vectors of results across."""
    variables = list(sch.get(block).iter_vars)
    extents, loops = _extents(sch, block), sch.get_loops(block)
    spatial = [i for i, v in enumerate(variables) if int(v.iter_type) == 0]
    reduced = [i for i, v in enumerate(variables) if int(v.iter_type) == 2]
    parallel = bool(spatial) and math.prod(extents) >= WORTH_A_THREAD
    last = reduced[-1]
    reads = [region.region[-1].min for region in sch.get(block).reads if region.region]
    along = _uses(reads, variables[last].var)
    lanes = partial_lanes(extents[last], machine.lanes) if along else 0
    if lanes and _can_have_partial_sums(sch):
        _, lane = sch.split(loops[last], [None, lanes])
        partial = sch.rfactor(lane, len(spatial))
        *rest, lane = sch.get_loops(partial)
        sch.vectorize(lane)
        if parallel:
            sch.parallel(sch.fuse(*rest[: len(spatial)]))
            sch.parallel(sch.fuse(*sch.get_loops(block)[: len(spatial)]))
    elif not along and spatial and (lanes := _dividing(extents[spatial[-1]], machine)):
        # Several adjacent vectors read whole cache lines, and share the index computations of a row of the window.
        # But each core must have work.
        others = math.prod(extents[i] for i in spatial[:-1])
        wanted = machine.cores if parallel else 1
        pieces = extents[spatial[-1]] // lanes
        vectors = next(
            (n for n in range(_ABREAST, 1, -1) if pieces % n == 0 and others * pieces // n >= wanted), 1
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
