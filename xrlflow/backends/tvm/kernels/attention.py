"""softmax(f(q k)) v as one kernel.

The scores of a few rows stay in the cache between the two products, while separate operators move all scores through
memory five times (Dao et al., FlashAttention, 2022; without its running maximum, since a row of scores fits into the
cache). Each task (iteration of the parallel loop) packs the keys and values of its head into panels. The kernel reads
q, k and v as they are stored and writes the result as the next operator reads it, so that the transpositions around the
heads disappear. Both products have a tile of accumulators in vector registers (see `schedules`). A row of results is
divided by the sum of its exponentials at the end. So a row of sums that overflows gives infinity. Separate operators
divide before the second product, and give a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.schedules.blocks import WORTH_A_THREAD
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine

SCHEDULED = "tirx.is_scheduled"
"""TVM's attribute of a function that needs no further schedule."""

_FLOAT = "float32"
_LOCAL = "local"
_OPAQUE = 8  # relax's OpPatternKind: never fused
_MOST_ROWS = 14
# Rows whose distance is a multiple of a page share a set of an 8-way first-level cache.
_PAGE, _WAYS = 4096, 8
# Packing the keys and values of a head takes as long as computing this many tiles of rows (1.8 with 12 heads of 64 and
# 128 keys).
_PACKING = 2


@dataclass(frozen=True, slots=True)
class Array:
    """An operand [.., row, column] that is stored as an array of `shape`. Its dimension i is dimension `axes[i]` of
    `shape`.

    `fixed`: (dimension, index) for each dimension of `shape` from which the operand takes one index.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    fixed: tuple[tuple[int, int], ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.shape[a] for a in self.axes)

    @property
    def row_stride(self) -> int:
        """Bytes from one row to the next."""
        return 4 * math.prod(self.shape[self.axes[-2] + 1 :])

    def stored_index(self, index: Sequence[Any]) -> list[Any]:
        """The index in `shape` of an element of the operand."""
        result: list[Any] = [None] * len(self.shape)
        for axis, i in (*zip(self.axes, index), *self.fixed):
            result[axis] = i
        return result

    def at(self, head: Any, row: Any, column: Any) -> list[Any]:
        """The index in `shape` of an element. `head`: the number of its head, counted through all dimensions before row
        and column."""
        return self.stored_index([*_unfold(head, self.sizes[:-2]), row, column])


@dataclass(frozen=True, slots=True)
class Extra:
    """A further operand of a step, such as a mask. Its shape broadcasts to the shape of the scores. `heads`: the
    dimensions that the scores have before rows and columns in this step."""

    shape: tuple[int, ...]
    dtype: str
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoreStep:
    """An operator between the two products. An operand is None (the scores), a number, or an `Extra`."""

    operator: str
    operands: tuple[float | Extra | None, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """The workload softmax(steps(q k)) v, along the last dimension of the scores. Operands have the same number of
    heads, but their dimensions may differ."""

    q: Array
    k: Array
    v: Array
    out: Array
    steps: tuple[ScoreStep, ...]

    @property
    def heads(self) -> tuple[int, ...]:
        return self.q.sizes[:-2]

    @property
    def rows(self) -> int:
        return self.q.sizes[-2]

    @property
    def depth(self) -> int:
        return self.q.sizes[-1]

    @property
    def keys(self) -> int:
        return self.k.sizes[-1]

    @property
    def width(self) -> int:
        return self.v.sizes[-1]

    @property
    def extras(self) -> list[Extra]:
        return [o for step in self.steps for o in step.operands if isinstance(o, Extra)]

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.heads) * self.rows * self.keys * (self.depth + self.width)


@dataclass(frozen=True, slots=True)
class AttentionBlocking:
    """The blocking of an attention kernel: the rows of a tile; the columns of a panel of keys and of a panel of values,
    in vectors of `lanes` and `value_lanes`; and the number of parts into which the rows of a head are divided among
    threads."""

    rows: int
    columns: int
    lanes: int
    value_columns: int
    value_lanes: int
    parts: int


def best_blocking(workload: Attention, machine: Machine) -> AttentionBlocking:
    """The blocking with the least estimated time of both products together. The estimate is like the one of
    `schedules.ratings`."""
    lanes = machine.lanes
    value_lanes = next((n for n in _vectors(lanes) if workload.width % n == 0), lanes)
    paged = any(array.row_stride % _PAGE == 0 for array in (workload.q, workload.out))
    best: tuple[float, int, int, int] | None = None
    for rows in range(1, min(workload.rows, _WAYS if paged else _MOST_ROWS) + 1):
        for first in range(1, 7):
            for second in range(1, 7):
                if not machine.keeps(rows, max(first, second)):
                    continue
                tiles = -(-workload.rows // rows)
                keys = _whole(workload.keys, first * lanes) / lanes
                columns = _whole(workload.width, second * value_lanes) / value_lanes
                cost = tiles * (
                    keys * workload.depth * _cost(rows, first) + columns * workload.keys * _cost(rows, second)
                )
                if best is None or cost < best[0]:
                    best = cost, rows, first * lanes, second * value_lanes
    assert best is not None
    _, rows, columns, value_columns = best
    return AttentionBlocking(
        rows, columns, lanes, value_columns, value_lanes, _parts(workload, rows, machine.cores)
    )


def _vectors(lanes: int) -> list[int]:
    """Vector lengths: full registers, halves and quarters."""
    return [n for n in (lanes, lanes // 2, lanes // 4) if n > 1]


def _whole(extent: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `extent`."""
    return -(-extent // step) * step


def _cost(rows: int, vectors: int) -> float:
    """The estimated time of one step of a tile's reduction, divided by the number of vectors of the tile's columns."""
    accumulators = rows * vectors
    busy = min(1.0, accumulators / 8)
    return rows / busy * (1.0 + 0.5 * (rows + vectors) / accumulators)


def _parts(workload: Attention, rows: int, cores: int) -> int:
    """The number of parts into which the rows of a head are divided, so that the busiest thread finishes as early as
    possible. Each part packs all keys of its head."""
    heads, tiles = math.prod(workload.heads), -(-workload.rows // rows)

    def longest(parts: int) -> int:
        return -(-heads * parts // cores) * (_PACKING + -(-tiles // parts))

    return min(range(1, min(tiles, 2 * cores) + 1), key=longest)


def kernel(workload: Attention, machine: Machine) -> Any:
    """The PrimFunc with parameters q, k, v, the extra operands of the steps in their order, and the result."""
    tvm()
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    blocking = best_blocking(workload, machine)
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": _OPAQUE, "tirx.noalias": True})
            arrays = [
                T.arg(name, T.buffer(array.shape, _FLOAT))
                for name, array in (("q", workload.q), ("k", workload.k), ("v", workload.v))
            ]
            extras = [T.arg(f"x{i}", T.buffer(e.shape, e.dtype)) for i, e in enumerate(workload.extras)]
            out = T.arg("out", T.buffer(workload.out.shape, _FLOAT))
            loop = T.parallel if workload.flops >= WORTH_A_THREAD else T.serial
            tasks = loop(0, math.prod(workload.heads) * blocking.parts)
            # TVM expects a root block in every function, and another block inside the root block.
            with T.sblock("root"), tasks as task, T.sblock("attention"):
                T.reads([])
                T.writes([])
                _Head(workload, blocking, arrays, extras, out, task // blocking.parts).write(
                    task % blocking.parts
                )
        return builder.get()


def _unfold(index: Any, sizes: Sequence[int]) -> list[Any]:
    """The index in each of several dimensions, from the number of an element counted through all of them. `sizes`: the
    extents of the dimensions."""
    indices: list[Any] = []
    for size in reversed(sizes):
        indices.insert(0, index % size)
        index = index // size
    return indices


class _Head:
    """Writes the loops over some rows of one head into the function that is being built."""

    def __init__(
        self,
        workload: Attention,
        blocking: AttentionBlocking,
        arrays: Sequence[Any],
        extras: Sequence[Any],
        out: Any,
        head: Any,
    ) -> None:
        from tvm.script.ir_builder import tirx as T

        self._workload, self._blocking, self._head = workload, blocking, head
        self._q, self._k, self._v = arrays
        self._extras, self._out = extras, out
        self._panels = -(-workload.keys // blocking.columns)
        width = self._panels * blocking.columns
        # Rows whose distance is a multiple of a page would evict each other from the cache.
        stride = width + (blocking.lanes if width * 4 % _PAGE == 0 else 0)
        self._keys = T.alloc_buffer((self._panels, workload.depth, blocking.columns), _FLOAT)
        self._value_panels = -(-workload.width // blocking.value_columns)
        self._values = T.alloc_buffer((self._value_panels, workload.keys, blocking.value_columns), _FLOAT)
        self._scores = T.alloc_buffer((blocking.rows, stride), _FLOAT)
        self._over = T.alloc_buffer((blocking.rows,), _FLOAT, scope=_LOCAL)

    def write(self, part: Any) -> None:
        from tvm.script.ir_builder import tirx as T

        self._pack_keys()
        self._pack_values()
        tiles = -(-self._workload.rows // self._blocking.rows)
        share = -(-tiles // self._blocking.parts)
        with T.serial(0, share) as turn:
            tile = part * share + turn
            _where(None if share * self._blocking.parts == tiles else tile < tiles, lambda: self._tile(tile))

    def _tile(self, tile: Any) -> None:
        """Compute the rows of one tile: scores, their softmax, and the sums of values."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        first, exact = tile * blocking.rows, workload.rows % blocking.rows == 0

        def row(i: Any) -> Any:
            """The row to read. Beyond the end, the last row is read again, and its result is not stored."""
            return first + i if exact else tirx.Min(first + i, tirx.const(workload.rows - 1, "int32"))

        def score(i: Any, n: Any, total: Any) -> None:
            T.buffer_store(self._scores, total, [i, panel * blocking.columns + n])

        def leave(i: Any, e: Any, total: Any) -> None:
            column = panel * blocking.value_columns + e
            where = workload.out.at(self._head, first + i, column)
            _where(
                None if workload.width % blocking.value_columns == 0 else column < workload.width,
                lambda: T.buffer_store(self._out, total * self._over[i], where),
            )

        with T.serial(0, self._panels) as panel:
            _product(
                (blocking.rows, blocking.columns, blocking.lanes), workload.depth,
                lambda i, d: self._q[workload.q.at(self._head, row(i), d)],
                lambda d, n: self._keys[panel, d, n],
                score,
            )  # fmt: skip
        with T.serial(0, blocking.rows) as i:
            self._softmax(i, row(i))
        with T.serial(0, self._value_panels) as panel:
            _product(
                (blocking.rows, blocking.value_columns, blocking.value_lanes), workload.keys,
                lambda i, n: self._scores[i, n],
                lambda n, e: self._values[panel, n, e],
                leave,
                None if exact else lambda i: first + i < workload.rows,
            )  # fmt: skip

    def _key(self, d: Any, n: Any) -> Any:
        return self._k[self._workload.k.at(self._head, d, n)]

    def _pack_keys(self) -> None:
        """Pack keys as [panel, depth, column]; columns after the last key are 0. The loops read keys in the order in
        which they lie in memory."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        last = len(workload.k.shape) - 1
        along_keys, along_depth = workload.k.axes[-1] == last, workload.k.axes[-2] == last
        side = next((n for n in _vectors(blocking.lanes) if workload.depth % n == 0), 1) if along_depth else 1

        def fill(panel: Any, first: int, end: int) -> None:
            outer, inner = ((0, workload.depth), (first, end))[:: 1 if along_keys else -1]
            with T.serial(*outer) as a, T.serial(*inner) as b:
                d, n = (a, b) if along_keys else (b, a)
                T.buffer_store(self._keys, self._key(d, panel * blocking.columns + n), [panel, d, n])

        whole, remainder = divmod(workload.keys, blocking.columns)
        if side > 1:
            self._pack_squares(side)
        elif whole:
            with T.serial(0, whole) as panel:
                fill(panel, 0, blocking.columns)
        begin = remainder // side * side if side > 1 else 0
        if begin < remainder:
            fill(tirx.const(whole, "int32"), begin, remainder)
        if remainder:
            with T.serial(0, workload.depth) as d, T.serial(remainder, blocking.columns) as n:
                T.buffer_store(self._keys, tirx.const(0.0, _FLOAT), [whole, d, n])

    def _pack_squares(self, side: int) -> None:
        """Pack keys whose depths are adjacent in memory, in squares of `side` x `side`.

        A square is transposed in registers: halves, quarters and eighths are exchanged, one after the other. Element by
        element it would take three times as long.
        """
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        across = self._blocking.columns // side
        with (
            T.serial(0, self._workload.keys // side) as square,
            T.serial(0, self._workload.depth // side) as level,
        ):
            depths = tirx.Ramp(level * side, 1, side)
            vectors = [T.bind(self._key(depths, square * side + i)) for i in range(side)]
            step = side // 2
            while step:
                low = [x if not x & step else side + x - step for x in range(side)]
                high = [x + step if not x & step else side + x for x in range(side)]
                for i in (i for i in range(side) if not i & step):
                    pair = [vectors[i], vectors[i + step]]
                    vectors[i], vectors[i + step] = (T.bind(tirx.Shuffle(pair, half)) for half in (low, high))
                step //= 2
            columns = tirx.Ramp(square % across * side, 1, side)
            for i, vector in enumerate(vectors):
                T.buffer_store(self._keys, vector, [square // across, level * side + i, columns])

    def _pack_values(self) -> None:
        """Pack values as [panel, key, column]; columns after the last are 0."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking

        def put(panel: Any, n: Any, e: Any) -> None:
            value = self._v[workload.v.at(self._head, n, panel * blocking.value_columns + e)]
            T.buffer_store(self._values, value, [panel, n, e])

        whole, remainder = divmod(workload.width, blocking.value_columns)
        vectors = blocking.value_columns // blocking.value_lanes
        if whole:
            with (
                T.serial(0, whole) as panel,
                T.serial(0, workload.keys) as n,
                T.unroll(0, vectors) as vector,
                T.vectorized(0, blocking.value_lanes) as lane,
            ):
                put(panel, n, vector * blocking.value_lanes + lane)
        if remainder:
            with T.serial(0, workload.keys) as n:
                with T.serial(0, remainder) as e:
                    put(tirx.const(whole, "int32"), n, e)
                with T.serial(remainder, blocking.value_columns) as e:
                    T.buffer_store(self._values, tirx.const(0.0, _FLOAT), [whole, n, e])

    def _softmax(self, i: Any, row: Any) -> None:
        """Replace row i of the scores by exp(x - max), and set `over[i]` to 1 / their sum."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        scores, lanes, keys = self._scores, self._blocking.lanes, self._workload.keys
        whole, padded = keys // lanes, -(-keys // lanes)
        maxima = T.alloc_buffer((lanes,), _FLOAT, scope=_LOCAL)
        sums = T.alloc_buffer((lanes,), _FLOAT, scope=_LOCAL)
        reduced = T.alloc_buffer((1,), _FLOAT, scope=_LOCAL)
        lowest, zero = tirx.const(-math.inf, _FLOAT), tirx.const(0.0, _FLOAT)

        def take(n: Any) -> None:
            T.buffer_store(scores, self._stepped(scores[i, n], row, n), [i, n])

        def fill(buffer: Any, value: Any) -> None:
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(buffer, value, [lane])

        def gather(buffer: Any, combine: Callable[[Any, Any], Any], vector: Any) -> None:
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(buffer, combine(buffer[lane], scores[i, vector * lanes + lane]), [lane])

        def together(buffer: Any, combine: Callable[[Any, Any], Any], start: Any) -> None:
            T.buffer_store(reduced, start, [0])
            with T.unroll(0, lanes) as lane:
                T.buffer_store(reduced, combine(reduced[0], buffer[lane]), [0])

        fill(maxima, lowest)
        with T.serial(0, whole) as vector:
            with T.vectorized(0, lanes) as lane:
                take(vector * lanes + lane)
            gather(maxima, tirx.Max, vector)
        if padded > whole:  # after the last key: exp(-inf) = 0
            with T.serial(whole * lanes, keys) as n:
                take(n)
            with T.serial(keys, padded * lanes) as n:
                T.buffer_store(scores, lowest, [i, n])
            gather(maxima, tirx.Max, whole)
        together(maxima, tirx.Max, lowest)
        fill(sums, zero)
        with T.serial(0, padded) as vector:
            with T.vectorized(0, lanes) as lane:
                n = vector * lanes + lane
                T.buffer_store(scores, tirx.exp(scores[i, n] - reduced[0]), [i, n])
            gather(sums, lambda a, b: a + b, vector)
        together(sums, lambda a, b: a + b, zero)
        T.buffer_store(self._over, tirx.const(1.0, _FLOAT) / reduced[0], [i])

    def _stepped(self, score: Any, row: Any, column: Any) -> Any:
        """The value of a score after all steps between the products."""
        from tvm import tirx

        extras = iter(self._extras)
        for step in self._workload.steps:
            operands = []
            for operand in step.operands:
                if operand is None:
                    operands.append(score)
                elif isinstance(operand, Extra):
                    index = [*_unfold(self._head, operand.heads), row, column]
                    trailing = index[len(index) - len(operand.shape) :]
                    position = [0 if size == 1 else i for size, i in zip(operand.shape, trailing)]
                    operands.append(next(extras)[position])
                else:
                    operands.append(tirx.const(operand, _FLOAT))
            score = STEPS[step.operator](*operands)
        return score


def _select(condition: Any, yes: Any, no: Any) -> Any:
    from tvm import tirx

    return tirx.Select(condition, yes, no)


STEPS: Mapping[str, Callable[..., Any]] = {
    "relax.add": lambda a, b: a + b,
    "relax.subtract": lambda a, b: a - b,
    "relax.multiply": lambda a, b: a * b,
    "relax.divide": lambda a, b: a / b,
    "relax.where": _select,
}
"""The operators that are supported between the products, by Relax's name."""


def _where(condition: Any | None, body: Callable[[], None]) -> None:
    from tvm.script.ir_builder import tirx as T

    if condition is None:
        body()
    else:
        with T.If(condition), T.Then():
            body()


def _product(
    tile: tuple[int, int, int], reduction: int,
    a: Callable[[Any, Any], Any], b: Callable[[Any, Any], Any], leave: Callable[[Any, Any, Any], None],
    needed: Callable[[Any], Any] | None = None,
) -> None:  # fmt: skip
    """Compute a tile (rows, columns, lanes) of accumulators: the sums over r of a(i, r) b(r, n). `leave` stores the
    sums of those rows for which `needed` is true."""
    from tvm import tirx
    from tvm.script.ir_builder import tirx as T

    rows, columns, lanes = tile
    sums = T.alloc_buffer((rows, columns), _FLOAT, scope=_LOCAL)

    def each(body: Callable[[Any, Any], None], needed: Callable[[Any], Any] | None = None) -> None:
        def of(i: Any) -> None:
            with T.unroll(0, columns // lanes) as vector, T.vectorized(0, lanes) as lane:
                body(i, vector * lanes + lane)

        with T.unroll(0, rows) as i:
            _where(None if needed is None else needed(i), lambda: of(i))

    each(lambda i, n: T.buffer_store(sums, tirx.const(0.0, _FLOAT), [i, n]))
    with T.serial(0, reduction) as r:
        each(lambda i, n: T.buffer_store(sums, sums[i, n] + a(i, r) * b(r, n), [i, n]))
    each(lambda i, n: leave(i, n, sums[i, n]), needed)
