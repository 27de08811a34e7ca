"""3x3 convolutions with fewer multiplications, as one kernel.

A tile of m x m results is computed from (m + 2) x (m + 2) pixels: pixels and weights are transformed, multiplied point
by point and summed over channels, and the sums are transformed back (Winograd 1980; Lavin and Gray 2016, "Fast
Algorithms for Convolutional Neural Networks"). Compared with the direct kernel, m = 2 needs 2.25 times fewer
multiplications, and m = 4 needs 4 times fewer. Weights are transformed when the model is compiled.

Each task (iteration of the parallel loop) transforms a block of tiles, multiplies them with panels of weights as tiles
of accumulators in vector registers (see `schedules`), and transforms the sums back, so that all intermediate results
stay in the second-level cache of a core. Sums over channels are split into chunks: the rounding error of an accumulator
grows with the number of its terms.

An infinity or NaN among the pixels of a tile makes all of its results infinite or NaN, and numbers near the largest
float overflow although their plain sum does not. So a task whose results are not all finite computes them once more, as
plain sums.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.kernels.building import (
    FLOAT,
    LOCAL,
    OPAQUE,
    SCHEDULED,
    along,
    lanes_of,
    number,
    pieces,
    prefetch,
    product,
    ramp,
    spread,
    where,
)
from xrlflow.backends.tvm.kernels.steps import Extra, Step, extras_of, kind_of, stepped
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine

_KERNEL = 3
# The number of channels that one accumulator sums.
CHUNK = 32
_MOST_ROWS = 14
# Times in multiply-adds of vectors: reading a vector of weights from the third-level cache; reading it from memory; the
# sum of a chunk, with its share of the last transform; transforming a vector of pixels; reading a vector of pixels that
# has left the cache.
_FAR, _MEMORY, _SUM, _PIXELS, _SPILLED = 1.0, 11.5, 16.0, 6.0, 4.5
_LAST_LEVEL = 8 << 20
# This many accumulators keep the multipliers busy.
_BUSY = 10
_TAPS = _KERNEL * _KERNEL
# A float is infinite or NaN if its bits, without the sign, are this number or greater.
_INFINITE = 0x7F800000

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Transforms:
    """The matrices of F(m, 3): of pixels (n x n), weights (n x 3) and results (m x n), for n = m + 2."""

    pixels: Matrix
    weights: Matrix
    results: Matrix


# The points of interpolation besides infinity. With these points, F(4, 3) has 2.2 to 3 times the error of the direct
# kernel; with 0, +-1 and +-2 it has 4.5 to 15 times that error.
_POINTS = {2: (0.0, 1.0, -1.0), 4: (0.0, math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(2.0), -math.sqrt(2.0))}


@functools.cache
def transforms(m: int) -> Transforms:
    """The matrices of F(m, 3), by interpolation (Toom and Cook) in the points of interpolation and infinity."""
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
class WinogradConvolution:
    """A convolution with channels last, 3 x 3 weights, and strides and dilations of 1.

    `image` and `out`: [batch, row, column, channel]. `top` and `left`: rows and columns of zeros before the image. `m`:
    the number of results along one side of a tile.
    """

    image: tuple[int, ...]
    out: tuple[int, ...]
    top: int
    left: int
    m: int
    steps: tuple[Step, ...] = ()
    groups: int = 1

    @property
    def n(self) -> int:
        """The number of pixels of a tile along one side."""
        return self.m + _KERNEL - 1

    @property
    def across(self) -> tuple[int, int]:
        """The number of tiles of one image along its height and its width."""
        return -(-self.out[1] // self.m), -(-self.out[2] // self.m)

    @property
    def tiles(self) -> int:
        return self.image[0] * math.prod(self.across)

    @property
    def channels(self) -> int:
        """The input channels of a group."""
        return self.image[3] // self.groups

    @property
    def columns(self) -> int:
        """The output channels of a group."""
        return self.out[3] // self.groups

    @property
    def extras(self) -> list[Extra]:
        return extras_of(self.steps)

    @property
    def kind(self) -> str:
        """The type of the results."""
        return kind_of(self.steps)


@dataclass(frozen=True, slots=True)
class WinogradBlocking:
    """The blocking of a Winograd convolution.

    `rows` x `columns`: a tile of accumulators, in vectors of `lanes`. `block`: the number of tiles of pixels that a
    task transforms. `parts`: the number of tasks among which the panels of a block are divided; each of them transforms
    all pixels of the block. `ahead`: weights are prefetched by one chunk, since they come from beyond the second-level
    cache.
    """

    rows: int
    columns: int
    lanes: int
    block: int
    parts: int
    ahead: bool = False

    def panels(self, workload: WinogradConvolution) -> int:
        """The number of panels of weights of a group."""
        return -(-workload.columns // self.columns)

    def numbers(self, workload: WinogradConvolution) -> dict[str, int]:
        """See `layer_kernels.KernelBlocking`."""
        return {
            "rows": self.rows, "vectors": self.columns // self.lanes, "lanes": self.lanes, "parts": self.parts,
            "ahead": int(self.ahead), "blocks": self.block // self.rows,
        }  # fmt: skip

    def __str__(self) -> str:
        parts, ahead = f" in {self.parts} parts" * (self.parts > 1), ", fetched ahead" * self.ahead
        return f"{self.rows}x{self.columns} by {self.block}{parts}{ahead}"


def blockings(workload: WinogradConvolution, machine: Machine) -> Iterator[WinogradBlocking]:
    """The blockings to choose from, each with and without prefetched weights."""
    ahead = _is_far(workload, machine)
    for blocking in _blockings(workload, machine):
        yield replace(blocking, ahead=ahead)
        yield replace(blocking, ahead=not ahead)


def _blockings(workload: WinogradConvolution, machine: Machine) -> Iterator[WinogradBlocking]:
    """The blockings to choose from, all with the same `ahead`: they differ in the tiles of accumulators, and in how
    tiles of pixels and panels are divided among tasks."""
    lanes = machine.lanes
    while lanes > 4 and lanes // 2 >= workload.columns:
        lanes //= 2
    wide = -(-workload.columns // lanes)
    for rows in range(2, _MOST_ROWS + 1):
        for vectors in range(1, min(4, wide) + 1):
            if not machine.keeps(rows, vectors):
                continue
            for block in range(rows, max(rows, min(workload.tiles + rows - 1, 8 * rows)) + 1, rows):
                for parts in range(1, min(-(-wide // vectors), machine.cores) + 1):
                    yield WinogradBlocking(rows, vectors * lanes, lanes, block, parts)


def best_blocking(workload: WinogradConvolution, machine: Machine) -> WinogradBlocking:
    """The blocking with the least estimated time."""
    best = min(_blockings(workload, machine), key=lambda blocking: cost(workload, blocking, machine))
    return replace(best, ahead=_is_far(workload, machine))


def _is_far(workload: WinogradConvolution, machine: Machine) -> bool:
    """Whether weights come from beyond the second-level cache."""
    return _weight_bytes(workload) > machine.second_level // 2


def _weight_bytes(workload: WinogradConvolution) -> int:
    return 4 * workload.n * workload.n * workload.groups * workload.channels * workload.columns


def cost(workload: WinogradConvolution, blocking: WinogradBlocking, machine: Machine) -> float:
    """The estimated time until the busiest core has finished, in multiply-adds of vectors at a core's peak.

    The factors were fitted to 400 measured blockings of 14 layers on Zen 5. The best blocking by this estimate took
    1.00 to 1.06 times as long as the fastest measured blocking, and 1.18 times as long for one layer.
    """
    points, vectors = workload.n * workload.n, blocking.columns // blocking.lanes
    tasks = -(-workload.tiles // blocking.block) * blocking.parts * workload.groups
    panels = -(-blocking.panels(workload) // blocking.parts)
    accumulators = blocking.rows * vectors
    products = points * blocking.block * workload.channels * vectors
    # With fewer accumulators, multiplications wait for one another.
    adds = products / min(1.0, accumulators / _BUSY)
    loads = products * (blocking.rows + vectors) / accumulators
    sums = points * blocking.block * vectors * -(-workload.channels // CHUNK)
    weights = points * workload.channels * vectors
    used = 4 * points * blocking.block * (workload.channels + blocking.columns)
    pixels = points * blocking.block * workload.channels / blocking.lanes
    again = _SPILLED * pixels if used > machine.second_level // 2 else 0.0
    panel = (
        0.75 * adds
        + 0.25 * loads
        + _SUM * sums
        + distance(_weight_bytes(workload), machine) * weights
        + again
    )
    return -(-tasks // machine.cores) * (_PIXELS * pixels + panels * panel)


def distance(size: int, machine: Machine) -> float:
    """The time to read a vector of weights, in multiply-adds of vectors, if all weights together have `size` bytes."""
    return _MEMORY if size > _LAST_LEVEL else _FAR if size > machine.second_level // 2 else 0.0


def packed(
    weights: npt.NDArray[np.float32], workload: WinogradConvolution, blocking: WinogradBlocking
) -> npt.NDArray[np.float32]:
    """Weights [3, 3, channel, column], transformed, as [group, panel, point, channel, column]. The last nine points are
    the weights themselves."""
    matrix = transforms(workload.m).weights
    wide = np.einsum("ai,bj,ijck->abck", matrix, matrix, weights.astype(np.float64))
    wide = np.concatenate([wide.reshape(-1, *weights.shape[2:]), weights.reshape(_TAPS, *weights.shape[2:])])
    points, panels = len(wide), blocking.panels(workload)
    padded = np.zeros((points, workload.channels, workload.groups, panels * blocking.columns))
    padded[..., : workload.columns] = wide.reshape(
        points, workload.channels, workload.groups, workload.columns
    )
    split = padded.reshape(points, workload.channels, workload.groups, panels, blocking.columns)
    return np.ascontiguousarray(split.transpose(2, 3, 0, 1, 4), np.float32)


def kernel(workload: WinogradConvolution, blocking: WinogradBlocking) -> Any:
    """The PrimFunc with parameters image, weights (`packed`), the extra operands of the steps in their order, and
    result."""
    tvm()
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    weights = (
        workload.groups,
        blocking.panels(workload),
        workload.n * workload.n + _TAPS,
        workload.channels,
        blocking.columns,
    )
    blocks = -(-workload.tiles // blocking.block)
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            image = T.arg("image", T.buffer(workload.image, FLOAT))
            panels = T.arg("weights", T.buffer(weights, FLOAT))
            shapes = [workload.out[3:] if extra.by_channel else workload.out for extra in workload.extras]
            extras = [T.arg(f"x{i}", T.buffer(shape, FLOAT)) for i, shape in enumerate(shapes)]
            out = T.arg("out", T.buffer(workload.out, workload.kind))
            tasks = T.parallel(0, workload.groups * blocks * blocking.parts)
            with T.sblock("root"), tasks as task, T.sblock("winograd"):
                T.reads([])
                T.writes([])
                group, turn = task // (blocks * blocking.parts), task % (blocks * blocking.parts)
                body = _Block(workload, blocking, image, panels, extras, out, group)
                body.write(turn // blocking.parts, turn % blocking.parts)
        return builder.get()


class _Block:
    """Writes the loops of one task (iteration of the parallel loop) into the function that is being built."""

    def __init__(
        self,
        workload: WinogradConvolution,
        blocking: WinogradBlocking,
        image: Any,
        panels: Any,
        extras: Sequence[Any],
        out: Any,
        group: Any,
    ) -> None:
        from tvm.script.ir_builder import tirx as T

        self._workload, self._blocking, self._group = workload, blocking, group
        self._image, self._panels, self._extras, self._out = image, panels, extras, out
        points = workload.n * workload.n
        self._pixels = T.alloc_buffer((points, blocking.block, workload.channels), FLOAT)
        self._sums = T.alloc_buffer((points, blocking.block, blocking.columns), FLOAT)
        self._edge_pixels = T.alloc_buffer((points, blocking.lanes), FLOAT, scope=LOCAL)
        self._done = T.alloc_buffer((len(workload.steps) + 1, blocking.lanes), FLOAT, scope=LOCAL)
        # The largest bits of results so far, without signs.
        self._largest = T.alloc_buffer((blocking.lanes,), "int32", scope=LOCAL)
        self._plain = T.alloc_buffer((blocking.lanes,), FLOAT, scope=LOCAL)

    def write(self, block: Any, part: Any) -> None:
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        first = block * blocking.block
        last = number(workload.tiles - 1)
        with T.serial(0, blocking.block) as turn:  # beyond the end, the last tile is transformed again
            tile = first + turn if workload.tiles % blocking.block == 0 else tirx.Min(first + turn, last)
            self._transform(turn, *self._origin(tile))
        share = -(-blocking.panels(workload) // blocking.parts)
        with T.serial(0, share) as turn:
            panel = part * share + turn
            exact = share * blocking.parts == blocking.panels(workload)
            where(None if exact else panel < blocking.panels(workload), lambda: self._panel(panel, first))

    def _origin(self, tile: Any) -> tuple[Any, Any, Any]:
        """(image, first row, first column) of the results of a tile."""
        high, wide = self._workload.across
        each = high * wide
        return tile // each, tile % each // wide * self._workload.m, tile % wide * self._workload.m

    def _transform(self, turn: Any, image: Any, row: Any, column: Any) -> None:
        """Transform the pixels of one tile, some channels at a time."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload, blocking, n = self._workload, self._blocking, self._workload.n
        _, height, wide, _ = workload.image
        top, left = row - workload.top, column - workload.left
        matrix = transforms(workload.m).pixels

        def transform(first: Any, width: int, load: Callable[[Any, int, int], Any]) -> None:
            """Transform the pixels that `load` returns, for `width` channels of the group from `first` on."""
            c = ramp(self._group * workload.channels + first, width)
            vectors = [[load(c, i, j) for j in range(n)] for i in range(n)]
            at = ramp(first, width)
            for i, line in enumerate(_from_both_sides(matrix, vectors)):
                for j, vector in enumerate(line):
                    T.buffer_store(self._pixels, vector, [i * n + j, turn, at])

        def inner(c: Any, i: int, j: int) -> Any:
            return T.bind(self._image[image, top + i, left + j, c])

        def edge(c: Any, i: int, j: int) -> Any:
            width = lanes_of(c)
            lanes = ramp(number(0), width)
            y, x = top + i, left + j
            T.buffer_store(self._edge_pixels, spread(0.0, width), [i * n + j, lanes])
            with T.If(tirx.all(y >= 0, y < height, x >= 0, x < wide)), T.Then():
                T.buffer_store(self._edge_pixels, self._image[image, y, x, c], [i * n + j, lanes])
            return T.bind(self._edge_pixels[i * n + j, lanes])

        within = tirx.all(top >= 0, top + n <= height, left >= 0, left + n <= wide)
        with T.If(within):
            with T.Then():
                along(workload.channels, blocking.lanes, lambda first, width: transform(first, width, inner))
            with T.Else():
                along(workload.channels, blocking.lanes, lambda first, width: transform(first, width, edge))

    def _panel(self, panel: Any, first: Any) -> None:
        """Multiply all tiles of the block with one panel of weights, and store the results."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        whole, remainder = divmod(workload.channels, CHUNK)
        with T.serial(0, workload.n * workload.n) as point:

            def chunk(start: Any, length: int, more: bool) -> None:
                """Add the products of `length` channels, from `start` on, to the sums of the point. The weights of
                these channels stay in the first-level cache for all groups of rows."""
                with T.serial(0, blocking.block // blocking.rows) as group:
                    begin = group * blocking.rows

                    def ahead(c: Any) -> None:
                        """Prefetch weights of the next chunk. Weights lie in the order in which they are read."""
                        vectors = blocking.columns // blocking.lanes
                        each = -(-vectors // (blocking.block // blocking.rows))
                        for turn in range(each):
                            k = (group * each + turn) * blocking.lanes
                            prefetch(self._panels, [self._group, panel, point, start + c + length, k])

                    def leave(i: Any, k: Any, total: Any) -> None:
                        at = [point, begin + i, ramp(k, blocking.lanes)]
                        T.buffer_store(self._sums, self._sums[tuple(at)] + total if more else total, at)

                    product(
                        (blocking.rows, blocking.columns, blocking.lanes), length,
                        lambda i, c: self._pixels[point, begin + i, start + c],
                        lambda c, k: self._panels[self._group, panel, point, start + c, k],
                        leave,
                        ahead if blocking.ahead else None,
                    )  # fmt: skip

            if whole:
                chunk(number(0), CHUNK, False)
            if whole > 1:
                with T.serial(1, whole) as step:
                    chunk(step * CHUNK, CHUNK, True)
            if remainder:
                chunk(number(whole * CHUNK), remainder, whole > 0)
        T.buffer_store(
            self._largest, tirx.Broadcast(number(0), blocking.lanes), [ramp(number(0), blocking.lanes)]
        )
        self._each_tile(first, lambda turn: self._leave(panel, first, turn))
        with T.serial(1, blocking.lanes) as lane:
            T.buffer_store(self._largest, tirx.Max(self._largest[0], self._largest[lane]), [0])
        with T.If(self._largest[0] >= _INFINITE), T.Then():
            self._each_tile(first, lambda turn: self._leave_plain(panel, first, turn))

    def _each_tile(self, first: Any, body: Callable[[Any], None]) -> None:
        """Call `body` for each tile of the block from `first` on."""
        from tvm.script.ir_builder import tirx as T

        exact = self._workload.tiles % self._blocking.block == 0
        with T.serial(0, self._blocking.block) as turn:
            where(None if exact else first + turn < self._workload.tiles, lambda: body(turn))

    def _each_vector(self, panel: Any, body: Callable[[Any, Any], None]) -> None:
        """Call `body` for the columns of a panel as vectors: with their indices in the panel, and in the result."""
        from tvm.script.ir_builder import tirx as T

        blocking, columns = self._blocking, self._workload.columns

        def vector(part: Any, start: int, lanes: int) -> None:
            """Call `body` for `lanes` columns, from `start` on in vector `part` of the panel."""
            k = part * blocking.lanes + start
            out = self._group * columns + panel * blocking.columns + k
            body(ramp(k, lanes), ramp(out, lanes))

        whole, per_panel = columns // blocking.lanes, blocking.columns // blocking.lanes
        with T.serial(0, per_panel) as part:
            at = panel * per_panel + part
            exact = columns % blocking.columns == 0
            where(None if exact else at < whole, lambda: vector(part, 0, blocking.lanes))
            if columns % blocking.lanes:

                def last_columns(part: Any = part) -> None:
                    for piece in pieces(columns % blocking.lanes, blocking.lanes):
                        vector(part, *piece)

                where(at == whole, last_columns)

    def _leave_plain(self, panel: Any, first: Any, turn: Any) -> None:
        """Store the results of one tile after the steps, computed as plain sums."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload = self._workload
        image, row, column = self._origin(first + turn)
        _, height, wide, _ = workload.image

        def result(y: Any, x: Any) -> None:
            self._each_vector(panel, lambda k, out: vector(y, x, k, out))

        def vector(y: Any, x: Any, k: Any, out: Any) -> None:
            lanes = lanes_of(k)
            at = ramp(number(0), lanes)
            T.buffer_store(self._plain, spread(0.0, lanes), [at])
            with T.serial(0, _KERNEL) as i, T.serial(0, _KERNEL) as j:
                top, left = y + i - workload.top, x + j - workload.left
                with (
                    T.If(tirx.all(top >= 0, top < height, left >= 0, left < wide)),
                    T.Then(),
                    T.serial(0, workload.channels) as c,
                ):
                    pixel = self._image[image, top, left, self._group * workload.channels + c]
                    pixels = pixel if lanes == 1 else tirx.Broadcast(pixel, lanes)
                    weights = self._panels[
                        self._group, panel, workload.n * workload.n + i * _KERNEL + j, c, k
                    ]
                    T.buffer_store(self._plain, self._plain[at] + pixels * weights, [at])
            self._store(self._plain[at], [image, y, x, out])

        with T.serial(0, workload.m) as i, T.serial(0, workload.m) as j:
            y, x = row + i, column + j
            where(tirx.all(y < workload.out[1], x < workload.out[2]), lambda: result(y, x))

    def _store(self, value: Any, at: Sequence[Any]) -> None:
        """Store a vector of sums after the steps."""
        from tvm.script.ir_builder import tirx as T

        done = stepped(self._workload.steps, self._extras, value, at, self._done)
        T.buffer_store(self._out, done, list(at))

    def _leave(self, panel: Any, first: Any, turn: Any) -> None:
        """Transform the sums of one tile back, and store the results after the steps."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload, n = self._workload, self._workload.n
        image, row, column = self._origin(first + turn)
        _, height, width, _ = workload.out
        matrix = transforms(workload.m).results

        def vector(k: Any, out: Any) -> None:
            sums = [[T.bind(self._sums[i * n + j, turn, k]) for j in range(n)] for i in range(n)]
            lines = _from_both_sides(matrix, sums)
            self._note_largest(functools.reduce(operator.add, itertools.chain(*lines)))
            for i, line in enumerate(lines):
                for j, value in enumerate(line):
                    y, x = row + i, column + j
                    checks = []
                    if height % workload.m and i:
                        checks.append(y < height)
                    if width % workload.m and j:
                        checks.append(x < width)
                    where(
                        tirx.all(*checks) if checks else None,
                        functools.partial(self._store, value, [image, y, x, out]),
                    )

        self._each_vector(panel, vector)

    def _note_largest(self, total: Any) -> None:
        """Record the largest bits of a vector, without signs. (A sum is not finite if one of its terms is not.)"""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        lanes = lanes_of(total)
        kind = "int32" if lanes == 1 else f"int32x{lanes}"
        mask = tirx.const(0x7FFFFFFF, "int32")
        bits = tirx.reinterpret(kind, total) & (mask if lanes == 1 else tirx.Broadcast(mask, lanes))
        at = ramp(number(0), lanes)
        T.buffer_store(self._largest, tirx.Max(self._largest[at], bits), [at])


def _from_both_sides(matrix: Matrix, vectors: list[list[Any]]) -> list[list[Any]]:
    """matrix x vectors x matrix transposed."""
    columns = [_applied(matrix, [line[j] for line in vectors]) for j in range(len(vectors[0]))]
    return [_applied(matrix, [column[i] for column in columns]) for i in range(matrix.shape[0])]


def _applied(matrix: Matrix, vectors: Sequence[Any]) -> list[Any]:
    """The products of a matrix with vectors. Rows of opposite points share the sums of even and of odd terms."""
    from tvm.script.ir_builder import tirx as T

    signs = np.array([(-1.0) ** i for i in range(len(vectors))])
    products: list[Any] = [None] * len(matrix)
    for i, row in enumerate(matrix):
        if products[i] is not None:
            continue
        twin = next((k for k in range(i + 1, len(matrix)) if np.allclose(matrix[k], row * signs)), None)
        flip = next((k for k in range(i + 1, len(matrix)) if np.allclose(matrix[k], -row * signs)), None)
        even, odd = (_sum(row[first::2], vectors[first::2]) for first in (0, 1))
        other = twin if twin is not None else flip
        if other is None or even is None or odd is None:
            products[i] = T.bind(
                even + odd if even is not None and odd is not None else even if odd is None else odd
            )
            continue
        even, odd = T.bind(even), T.bind(odd)
        products[i] = T.bind(even + odd)
        products[other] = T.bind(even - odd if twin is not None else odd - even)
    return products


def _sum(factors: npt.NDArray[np.float64], vectors: Sequence[Any]) -> Any | None:
    """The sum of vectors times factors; None (which stands for zero) if all factors are 0."""
    total: Any | None = None
    for factor, vector in sorted(zip(factors, vectors), key=lambda pair: -pair[0]):
        if factor == 0.0:
            continue
        lanes = lanes_of(vector)
        scaled = vector if abs(factor) == 1.0 else vector * spread(abs(float(factor)), lanes)
        if total is None:
            total = scaled if factor > 0 else spread(0.0, lanes) - scaled
        else:
            total = total + scaled if factor > 0 else total - scaled
    return total
