"""3x3 convolutions with fewer multiplications, as one kernel.

A tile of m x m results is computed from (m + 2) x (m + 2) pixels: pixels and weights are transformed, multiplied point
by point and summed over channels, and the sums are transformed back (Winograd 1980; Lavin and Gray 2016, "Fast
Algorithms for Convolutional Neural Networks"). m = 2 multiplies 2.25 times less than the direct kernel, m = 4 4 times
less. Weights are transformed when the model is compiled.

Each task transforms a block of tiles, multiplies them with panels of weights as tiles of accumulators in vector
registers (see `schedules`), and transforms the sums back, so that what is transformed stays in the second-level cache
of a core. Sums over channels go in chunks: the rounding error of an accumulator grows with the number of its terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.target import Machine

SCHEDULED = "tirx.is_scheduled"
_FLOAT = "float32"
_LOCAL = "local"
_OPAQUE = 8
_KERNEL = 3
# Channels that one accumulator sums up.
CHUNK = 32
_MOST_ROWS = 14

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Transforms:
    """The matrices of F(m, 3): of pixels (n x n), weights (n x 3) and results (m x n), for n = m + 2."""

    pixels: Matrix
    weights: Matrix
    results: Matrix


# Points of interpolation besides infinity. With these F(4, 3) has 2.2 to 3 times the error of the direct kernel; with
# 0, +-1 and +-2 it has 4.5 to 15 times.
_POINTS = {2: (0.0, 1.0, -1.0), 4: (0.0, math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(2.0), -math.sqrt(2.0))}


@cache
def transforms(m: int) -> Transforms:
    """F(m, 3) by interpolation (Toom and Cook) in the points and infinity."""
    points = _POINTS[m]
    n = m + _KERNEL - 1
    pixels, weights, results = np.zeros((n, n)), np.zeros((n, _KERNEL)), np.zeros((m, n))
    for j, point in enumerate(points):
        others = [other for other in points if other != point]
        pixels[j, : n - 1] = np.polynomial.polynomial.polyfromroots(others)
        scale = math.prod(point - other for other in others)
        weights[j] = [point**k / scale for k in range(_KERNEL)]
        results[:, j] = [point**i for i in range(m)]
    pixels[n - 1] = np.polynomial.polynomial.polyfromroots(points)
    weights[n - 1, _KERNEL - 1] = 1.0
    results[m - 1, n - 1] = 1.0
    for matrix in (pixels, weights, results):
        matrix[np.abs(matrix) < 1e-12] = 0.0
    return Transforms(pixels, weights, results)


@dataclass(frozen=True, slots=True)
class Extra:
    """A further operand of a step: one number for each output channel, or one for each result."""

    by_channel: bool


@dataclass(frozen=True, slots=True)
class Step:
    """An operator after the convolution. An operand is the result so far (None), a number, or an `Extra`."""

    operator: str
    operands: tuple[float | Extra | None, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """A convolution with channels last, 3 x 3 weights, and steps of 1.

    `image` and `out`: [batch, row, column, channel]. `top` and `left`: rows and columns of zeros before the image. `m`: the results of a tile along one side.
    """

    image: tuple[int, int, int, int]
    out: tuple[int, int, int, int]
    top: int
    left: int
    m: int
    steps: tuple[Step, ...] = ()

    @property
    def n(self) -> int:
        """The pixels of a tile along one side."""
        return self.m + _KERNEL - 1

    @property
    def across(self) -> tuple[int, int]:
        """Tiles of one image along its height and its width."""
        return -(-self.out[1] // self.m), -(-self.out[2] // self.m)

    @property
    def tiles(self) -> int:
        return self.image[0] * math.prod(self.across)

    @property
    def channels(self) -> int:
        return self.image[3]

    @property
    def columns(self) -> int:
        return self.out[3]

    @property
    def extras(self) -> list[Extra]:
        return [o for step in self.steps for o in step.operands if isinstance(o, Extra)]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a kernel is blocked.

    `rows` x `columns`: a tile of accumulators, of vectors of `lanes`. `block`: the tiles of pixels of a task. `parts`:
    among how many tasks the panels of a block are divided. `side`: the channels that are transformed at a time.
    """

    rows: int
    columns: int
    lanes: int
    block: int
    parts: int
    side: int

    def panels(self, form: Form) -> int:
        return -(-form.columns // self.columns)


def plan(form: Form, machine: Machine) -> Plan | None:
    """The blocking with the least estimated time; None if vectors do not divide the channels."""
    lengths = [n for n in (machine.lanes, machine.lanes // 2, machine.lanes // 4) if n > 1]
    side = next((n for n in lengths if form.channels % n == 0), None)
    lanes = next((n for n in lengths if form.columns % n == 0), None)
    if side is None or lanes is None:
        return None
    best: tuple[float, Plan] | None = None
    for rows in range(2, _MOST_ROWS + 1):
        for vectors in range(1, 5):
            if rows * vectors + vectors + 1 > machine.registers:
                continue
            for block in range(rows, max(rows, min(form.tiles + rows - 1, 8 * rows)) + 1, rows):
                how = Plan(rows, vectors * lanes, lanes, block, 1, side)
                for parts in range(1, min(how.panels(form), machine.cores) + 1):
                    chosen = Plan(rows, vectors * lanes, lanes, block, parts, side)
                    cost = _cost(form, chosen, machine)
                    if best is None or cost < best[0]:
                        best = cost, chosen
    return None if best is None else best[1]


def _cost(form: Form, how: Plan, machine: Machine) -> float:
    """Estimated multiply-adds of vectors until the busiest core is done."""
    n, vectors = form.n, how.columns // how.lanes
    tasks = -(-form.tiles // how.block) * how.parts
    panels = -(-how.panels(form) // how.parts)
    accumulators = how.rows * vectors
    busy = min(1.0, accumulators / 8)
    loads = 1.0 + 0.5 * (how.rows + vectors) / accumulators + 1.0 / how.rows
    product = n * n * how.block * form.channels * vectors / busy * loads * (machine.lanes / how.lanes)
    # Weights of a panel come from the second- or third-level cache, once for each block.
    weights = n * n * form.channels * vectors * 4.0
    before = how.block * form.channels / how.side * 12.0 * n
    after = how.block * vectors * 10.0 * n
    held = 4 * n * n * how.block * (form.channels + how.columns)
    spilled = 1.0 if held <= machine.second_level // 2 else 1.5
    return -(-tasks // machine.cores) * (before + panels * (product + weights + after)) * spilled


def packed(weights: npt.NDArray[np.float32], form: Form, how: Plan) -> npt.NDArray[np.float32]:
    """Transformed weights [panel, point, channel, column] of weights [3, 3, channel, column]."""
    matrix = transforms(form.m).weights
    wide = np.einsum("ai,bj,ijck->abck", matrix, matrix, weights.astype(np.float64))
    points, panels = form.n * form.n, how.panels(form)
    padded = np.zeros((points, form.channels, panels * how.columns))
    padded[..., : form.columns] = wide.reshape(points, form.channels, form.columns)
    split = padded.reshape(points, form.channels, panels, how.columns)
    return np.ascontiguousarray(split.transpose(2, 0, 1, 3), np.float32)


def kernel(form: Form, how: Plan) -> Any:
    """The PrimFunc with parameters image, weights (`packed`), the extras of the steps in their order, and result."""
    tvm()
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    weights = (how.panels(form), form.n * form.n, form.channels, how.columns)
    blocks = -(-form.tiles // how.block)
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": _OPAQUE, "tirx.noalias": True})
            image = T.arg("image", T.buffer(form.image, _FLOAT))
            panels = T.arg("weights", T.buffer(weights, _FLOAT))
            shapes = [(form.columns,) if extra.by_channel else form.out for extra in form.extras]
            extras = [T.arg(f"x{i}", T.buffer(shape, _FLOAT)) for i, shape in enumerate(shapes)]
            out = T.arg("out", T.buffer(form.out, _FLOAT))
            with T.sblock("root"), T.parallel(0, blocks * how.parts) as task, T.sblock("winograd"):
                T.reads([])
                T.writes([])
                _Block(form, how, image, panels, extras, out).write(task // how.parts, task % how.parts)
        return builder.get()


class _Block:
    """Writes the loops of one task into the function that is being built."""

    def __init__(
        self, form: Form, how: Plan, image: Any, panels: Any, extras: Sequence[Any], out: Any
    ) -> None:
        from tvm.script.ir_builder import tirx as T

        self._form, self._how = form, how
        self._image, self._panels, self._extras, self._out = image, panels, extras, out
        points = form.n * form.n
        self._pixels = T.alloc_buffer((points, how.block, form.channels), _FLOAT)
        self._sums = T.alloc_buffer((points, how.block, how.columns), _FLOAT)
        self._near = T.alloc_buffer((points, how.side), _FLOAT, scope=_LOCAL)

    def write(self, block: Any, part: Any) -> None:
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        form, how = self._form, self._how
        first = block * how.block
        last = tirx.const(form.tiles - 1, "int32")
        with T.serial(0, how.block) as turn:  # after the last tile it is the last one again
            tile = first + turn if form.tiles % how.block == 0 else tirx.Min(first + turn, last)
            self._transform(turn, *self._place(tile))
        share = -(-how.panels(form) // how.parts)
        with T.serial(0, share) as turn:
            panel = part * share + turn
            exact = share * how.parts == how.panels(form)
            _where(None if exact else panel < how.panels(form), lambda: self._panel(panel, first))

    def _place(self, tile: Any) -> tuple[Any, Any, Any]:
        """(image, first row, first column) of the results of a tile."""
        high, wide = self._form.across
        each = high * wide
        return tile // each, tile % each // wide * self._form.m, tile % wide * self._form.m

    def _transform(self, turn: Any, image: Any, row: Any, column: Any) -> None:
        """Transform the pixels of one tile, some channels at a time."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        form, how, n = self._form, self._how, self._form.n
        _, height, width, channels = form.image
        top, left = row - form.top, column - form.left
        matrix = transforms(form.m).pixels

        def keep(c: Any, vectors: list[list[Any]]) -> None:
            done = _both_ways(matrix, vectors)
            for i, line in enumerate(done):
                for j, vector in enumerate(line):
                    T.buffer_store(self._pixels, vector, [i * n + j, turn, c])

        def inner() -> None:
            with T.serial(0, channels // how.side) as part:
                c = tirx.Ramp(part * how.side, 1, how.side)
                keep(
                    c,
                    [[T.bind(self._image[image, top + i, left + j, c]) for j in range(n)] for i in range(n)],
                )

        def edge() -> None:
            with T.serial(0, channels // how.side) as part:
                c = tirx.Ramp(part * how.side, 1, how.side)
                lanes = tirx.Ramp(0, 1, how.side)
                zero = tirx.Broadcast(tirx.const(0.0, _FLOAT), how.side)
                for i in range(n):
                    for j in range(n):
                        y, x = top + i, left + j
                        T.buffer_store(self._near, zero, [i * n + j, lanes])
                        with T.If(tirx.all(y >= 0, y < height, x >= 0, x < width)), T.Then():
                            T.buffer_store(self._near, self._image[image, y, x, c], [i * n + j, lanes])
                keep(c, [[T.bind(self._near[i * n + j, lanes]) for j in range(n)] for i in range(n)])

        within = tirx.all(top >= 0, top + n <= height, left >= 0, left + n <= width)
        with T.If(within):
            with T.Then():
                inner()
            with T.Else():
                edge()

    def _panel(self, panel: Any, first: Any) -> None:
        """The products of all tiles of the block with one panel of weights, and the results."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        form, how = self._form, self._how
        whole, rest = divmod(form.channels, CHUNK)
        with T.serial(0, form.n * form.n) as point, T.serial(0, how.block // how.rows) as group:
            begin = group * how.rows

            def chunk(start: Any, length: int, more: bool) -> None:
                def leave(i: Any, k: Any, total: Any) -> None:
                    if more:
                        total = self._sums[point, begin + i, k] + total
                    T.buffer_store(self._sums, total, [point, begin + i, k])

                _product(
                    (how.rows, how.columns, how.lanes), length,
                    lambda i, c: self._pixels[point, begin + i, start + c],
                    lambda c, k: self._panels[panel, point, start + c, k],
                    leave,
                )  # fmt: skip

            zero = tirx.const(0, "int32")
            if whole:
                chunk(zero, CHUNK, False)
            if whole > 1:
                with T.serial(1, whole) as step:
                    chunk(step * CHUNK, CHUNK, True)
            if rest:
                chunk(tirx.const(whole * CHUNK, "int32"), rest, whole > 0)
        exact = form.tiles % how.block == 0
        with T.serial(0, how.block) as turn:
            _where(None if exact else first + turn < form.tiles, lambda: self._leave(panel, first, turn))

    def _leave(self, panel: Any, first: Any, turn: Any) -> None:
        """Transform the sums of one tile back, and store the results of the steps."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        form, how, n = self._form, self._how, self._form.n
        image, row, column = self._place(first + turn)
        _, height, width, columns = form.out
        matrix = transforms(form.m).results

        def vector(part: Any) -> None:
            k = tirx.Ramp(part * how.lanes, 1, how.lanes)
            out = tirx.Ramp(panel * how.columns + part * how.lanes, 1, how.lanes)
            sums = [[T.bind(self._sums[i * n + j, turn, k]) for j in range(n)] for i in range(n)]
            for i, line in enumerate(_both_ways(matrix, sums)):
                for j, value in enumerate(line):
                    y, x = row + i, column + j

                    def store(value: Any = value, y: Any = y, x: Any = x) -> None:
                        done = self._stepped(value, [image, y, x, out])
                        T.buffer_store(self._out, done, [image, y, x, out])

                    checks = []
                    if height % form.m and i:
                        checks.append(y < height)
                    if width % form.m and j:
                        checks.append(x < width)
                    _where(tirx.all(*checks) if checks else None, store)

        with T.serial(0, how.columns // how.lanes) as part:
            exact = columns % how.columns == 0
            _where(None if exact else panel * how.columns + part * how.lanes < columns, lambda: vector(part))

    def _stepped(self, value: Any, index: Sequence[Any]) -> Any:
        """A vector of results after the steps."""
        from tvm import tirx

        extras = iter(self._extras)
        for step in self._form.steps:
            operands = []
            for given in step.operands:
                if given is None:
                    operands.append(value)
                elif isinstance(given, Extra):
                    buffer = next(extras)
                    operands.append(buffer[index[3]] if given.by_channel else buffer[tuple(index)])
                else:
                    operands.append(tirx.Broadcast(tirx.const(given, _FLOAT), self._how.lanes))
            value = STEPS[step.operator](*operands)
        return value


def _relu(x: Any) -> Any:
    from tvm import tirx

    return tirx.Max(x, tirx.Broadcast(tirx.const(0.0, _FLOAT), int(x.ty.dtype.lanes)))


def _most(a: Any, b: Any) -> Any:
    from tvm import tirx

    return tirx.Max(a, b)


def _least(a: Any, b: Any) -> Any:
    from tvm import tirx

    return tirx.Min(a, b)


STEPS: dict[str, Callable[..., Any]] = {
    "relax.add": lambda a, b: a + b,
    "relax.subtract": lambda a, b: a - b,
    "relax.multiply": lambda a, b: a * b,
    "relax.maximum": _most,
    "relax.minimum": _least,
    "relax.nn.relu": _relu,
}
"""The operators that may follow the convolution, by Relax's name."""


def _both_ways(matrix: Matrix, vectors: list[list[Any]]) -> list[list[Any]]:
    """matrix x vectors x matrix transposed."""
    columns = [_applied(matrix, [line[j] for line in vectors]) for j in range(len(vectors[0]))]
    return [_applied(matrix, [column[i] for column in columns]) for i in range(matrix.shape[0])]


def _applied(matrix: Matrix, vectors: Sequence[Any]) -> list[Any]:
    """The products of a matrix with vectors. Rows of opposite points share the sums of even and of odd terms."""
    from tvm.script.ir_builder import tirx as T

    signs = np.array([(-1.0) ** i for i in range(len(vectors))])
    found: list[Any] = [None] * len(matrix)
    for i, row in enumerate(matrix):
        if found[i] is not None:
            continue
        twin = next((k for k in range(i + 1, len(matrix)) if np.allclose(matrix[k], row * signs)), None)
        flip = next((k for k in range(i + 1, len(matrix)) if np.allclose(matrix[k], -row * signs)), None)
        even, odd = (_sum(row[first::2], vectors[first::2]) for first in (0, 1))
        other = twin if twin is not None else flip
        if other is None or even is None or odd is None:
            found[i] = T.bind(
                even + odd if even is not None and odd is not None else even if odd is None else odd
            )
            continue
        even, odd = T.bind(even), T.bind(odd)
        found[i] = T.bind(even + odd)
        found[other] = T.bind(even - odd if twin is not None else odd - even)
    return found


def _sum(factors: npt.NDArray[np.float64], vectors: Sequence[Any]) -> Any | None:
    """The sum of products with numbers; None if all are 0."""
    from tvm import tirx

    total: Any | None = None
    for factor, vector in sorted(zip(factors, vectors), key=lambda pair: -pair[0]):
        if factor == 0.0:
            continue
        lanes = int(vector.ty.dtype.lanes)
        scaled = (
            vector
            if abs(factor) == 1.0
            else vector * tirx.Broadcast(tirx.const(abs(float(factor)), _FLOAT), lanes)
        )
        if total is None:
            total = scaled if factor > 0 else tirx.Broadcast(tirx.const(0.0, _FLOAT), lanes) - scaled
        else:
            total = total + scaled if factor > 0 else total - scaled
    return total


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
) -> None:  # fmt: skip
    """A tile (rows, columns, lanes) of accumulators: the sums over r of a(i, r) b(r, n). `leave` stores them."""
    from tvm import tirx
    from tvm.script.ir_builder import tirx as T

    rows, columns, lanes = tile
    sums = T.alloc_buffer((rows, columns), _FLOAT, scope=_LOCAL)

    def each(body: Callable[[Any, Any], None]) -> None:
        with (
            T.unroll(0, rows) as i,
            T.unroll(0, columns // lanes) as vector,
            T.vectorized(0, lanes) as lane,
        ):
            body(i, vector * lanes + lane)

    each(lambda i, n: T.buffer_store(sums, tirx.const(0.0, _FLOAT), [i, n]))
    with T.serial(0, reduction) as r:
        each(lambda i, n: T.buffer_store(sums, sums[i, n] + a(i, r) * b(r, n), [i, n]))
    each(lambda i, n: leave(i, n, sums[i, n]))
