"""Inverted residuals as one kernel: expansion by 1x1, depthwise convolution, projection by 1x1.

The expanded image is several times as large as the image, and does not fit in the core's caches if each convolution is
a kernel of its own. Here a task (iteration of the parallel loop) computes a band, which is a few rows of results. It
handles a block of expanded channels at a time: it expands the band's pixels to these channels, convolves them row by
row, multiplies each row with the block's projection, and adds the products to the sums of the band. So expanded pixels
stay in the second-level cache of a core.

Expansion or projection may be absent: then the workload is a depthwise convolution and one pointwise convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.kernels.building import (
    FLOAT,
    LOCAL,
    OPAQUE,
    SCHEDULED,
    along,
    number,
    pieces,
    product,
    ramp,
    spread,
    tiles,
    where,
)
from xrlflow.backends.tvm.kernels.steps import Step, extras_of, stepped
from xrlflow.backends.tvm.toolchain.import_tvm import tvm

# The number of neighbouring pixels of the depthwise convolution that are computed together, from the same loaded
# vectors.
_PIXELS = 4


@dataclass(frozen=True, slots=True)
class ConvBlock:
    """An inverted residual with channels last.

    `image`, `middle`, `out`: [batch, row, column, channel] of the input, of the depthwise convolution's result, and of
    the result. `window`, `strides`: of the depthwise convolution. `top`, `left`: its rows and columns of zeros before
    the image. `expand`, `depthwise`, `project`: the steps after each convolution; None: there is no such convolution.
    Extra operands of the steps after the first two convolutions are numbers, or one number for each channel.
    """

    image: tuple[int, ...]
    middle: tuple[int, ...]
    out: tuple[int, ...]
    window: tuple[int, int]
    strides: tuple[int, int]
    top: int
    left: int
    expand: tuple[Step, ...] | None
    depthwise: tuple[Step, ...]
    project: tuple[Step, ...] | None

    @property
    def width(self) -> int:
        """The number of columns of an expanded row with its borders."""
        return (self.middle[2] - 1) * self.strides[1] + self.window[1]


@dataclass(frozen=True, slots=True)
class Tile:
    """The accumulators of a product: `rows` x `columns`."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class BandBlocking:
    """The blocking of a kernel for an inverted residual. `expand`, `project`: the tiles of the two products. `block`:
    the number of expanded channels at a time, a multiple of the columns of `expand`. `band`: the number of rows of
    results that a task computes. `parts`: the number of tasks among which the expanded channels of a band are divided;
    their sums are added up afterwards."""

    expand: Tile
    project: Tile
    lanes: int
    block: int
    band: int
    parts: int = 1

    def rows(self, workload: ConvBlock) -> int:
        """The number of expanded rows from which a band is computed."""
        return (self.band - 1) * workload.strides[0] + workload.window[0]

    def blocks(self, workload: ConvBlock) -> int:
        return -(-workload.middle[3] // self.block)

    def bands(self, workload: ConvBlock) -> int:
        return -(-workload.middle[1] // self.band)

    def panels(self, workload: ConvBlock) -> int:
        """The number of panels of the projection's weights."""
        return -(-workload.out[3] // self.project.columns)


def packed_expansion(
    weights: npt.NDArray[np.float32], workload: ConvBlock, blocking: BandBlocking
) -> npt.NDArray[np.float32]:
    """Weights [channel, expanded] as [panel, channel, column]."""
    wide = _padded(weights, 1, blocking.blocks(workload) * blocking.block)
    split = wide.reshape(weights.shape[0], -1, blocking.expand.columns)
    return np.ascontiguousarray(split.transpose(1, 0, 2))


def packed_projection(
    weights: npt.NDArray[np.float32], workload: ConvBlock, blocking: BandBlocking
) -> npt.NDArray[np.float32]:
    """Weights [expanded, channel] as [block, panel, channel of the block, column]."""
    tall = _padded(weights, 0, blocking.blocks(workload) * blocking.block)
    wide = _padded(tall, 1, blocking.panels(workload) * blocking.project.columns)
    split = wide.reshape(
        blocking.blocks(workload), blocking.block, blocking.panels(workload), blocking.project.columns
    )
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3))


def by_channel(
    values: npt.NDArray[np.float32], workload: ConvBlock, blocking: BandBlocking
) -> npt.NDArray[np.float32]:
    """Values, one for each expanded channel along the last dimension, padded with zeros to full blocks of channels."""
    return _padded(values, values.ndim - 1, blocking.blocks(workload) * blocking.block)


def _padded(array: npt.NDArray[np.float32], axis: int, size: int) -> npt.NDArray[np.float32]:
    pads = [(0, 0)] * array.ndim
    pads[axis] = (0, size - array.shape[axis])
    return np.ascontiguousarray(np.pad(array, pads), np.float32)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One convolution in a kernel: its weights (None if there is no such convolution), its steps, and the buffers of
    their extra operands."""

    weights: Any | None
    steps: tuple[Step, ...]
    extras: tuple[Any, ...]


def kernel(workload: ConvBlock, blocking: BandBlocking) -> Any:
    """The PrimFunc with these parameters: the image; for each convolution its weights and the extra operands of its
    steps; the result.

    Weights are `packed_expansion`, `by_channel` [row, column, channel] and `packed_projection`; extra operands of the
    first two convolutions are `by_channel`.
    """
    tvm()
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    columns = blocking.panels(workload) * blocking.project.columns
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            image = T.arg("image", T.buffer(workload.image, FLOAT))
            stages = [_stage(workload, blocking, name) for name in ("expand", "depthwise", "project")]
            out = T.arg("out", T.buffer(workload.out, FLOAT))
            with T.sblock("root"), T.sblock("bands"):
                T.reads([])
                T.writes([])
                shares = None
                if blocking.parts > 1 and workload.project is not None:
                    shares = T.alloc_buffer((blocking.parts, *workload.out[:3], columns), FLOAT)
                with (
                    T.parallel(0, workload.out[0] * blocking.bands(workload) * blocking.parts) as task,
                    T.sblock("band"),
                ):
                    T.reads([])
                    T.writes([])
                    band, part = task // blocking.parts, task % blocking.parts
                    body = _Band(workload, blocking, image, stages, out, shares)
                    body.write(band // blocking.bands(workload), band % blocking.bands(workload), part)
                if shares is not None:
                    with T.parallel(0, math.prod(workload.out[:2])) as row, T.sblock("sums"):
                        T.reads([])
                        T.writes([])
                        body = _Band(workload, blocking, image, stages, out, shares)
                        body.add_up(row // workload.out[1], row % workload.out[1])
        return builder.get()


def _stage(workload: ConvBlock, blocking: BandBlocking, name: str) -> _Stage:
    """Declare the parameters of one convolution."""
    from tvm.script.ir_builder import tirx as T

    wide = blocking.blocks(workload) * blocking.block
    channels: tuple[int, ...] = (wide,)
    shape: tuple[int, ...] = (*workload.window, wide)
    steps: tuple[Step, ...] | None = workload.depthwise
    if name == "expand":
        steps, shape = (
            workload.expand,
            (wide // blocking.expand.columns, workload.image[3], blocking.expand.columns),
        )
    elif name == "project":
        steps, channels = workload.project, workload.out[3:]
        shape = (
            blocking.blocks(workload),
            blocking.panels(workload),
            blocking.block,
            blocking.project.columns,
        )
    if steps is None:
        return _Stage(None, (), ())
    weights = T.arg(f"{name}_weights", T.buffer(shape, FLOAT))
    shapes = [channels if extra.by_channel else workload.out for extra in extras_of(steps)]
    extras = [T.arg(f"{name}{i}", T.buffer(shape, FLOAT)) for i, shape in enumerate(shapes)]
    return _Stage(weights, steps, tuple(extras))


class _Band:
    """Writes the loops of one task, which computes a few rows of results (a band), into the function that is being
    built."""

    def __init__(
        self,
        workload: ConvBlock,
        blocking: BandBlocking,
        image: Any,
        stages: Sequence[_Stage],
        out: Any,
        shares: Any | None,
    ) -> None:
        from tvm.script.ir_builder import tirx as T

        self._workload, self._blocking, self._image, self._out, self._shares = (
            workload,
            blocking,
            image,
            out,
            shares,
        )
        self._expansion, self._depthwise, self._projection = stages
        most = max(len(stage.steps) for stage in stages)
        self._done = T.alloc_buffer((most + 1, blocking.lanes), FLOAT, scope=LOCAL)

    def write(self, image: Any, band: Any, part: Any) -> None:
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        first = band * blocking.band
        self._wide = T.alloc_buffer((blocking.rows(workload), workload.width, blocking.block), FLOAT)
        if workload.project is not None:
            self._row = T.alloc_buffer((workload.middle[2], blocking.block), FLOAT)
            if self._shares is None:
                columns = blocking.panels(workload) * blocking.project.columns
                self._sums = T.alloc_buffer((blocking.band, workload.out[2], columns), FLOAT)
        share = -(-blocking.blocks(workload) // blocking.parts)
        self._clear_borders(first)

        def one(turn: Any, more: bool) -> None:
            block = part * share + turn
            if workload.expand is None:
                self._copy(image, first, block)
            else:
                self._expand(image, first, block)
            self._convolve(image, first, block, part, more)

        one(number(0), False)
        if share > 1:
            with T.serial(1, share) as turn:
                exact = share * blocking.parts == blocking.blocks(workload)
                where(
                    None if exact else part * share + turn < blocking.blocks(workload),
                    lambda: one(turn, True),
                )
        if workload.project is not None and self._shares is None:
            with T.serial(0, blocking.band) as row:
                where(self._within(first + row), lambda: self._leave(image, first + row, row))

    def _within(self, row: Any) -> Any | None:
        return None if self._workload.out[1] % self._blocking.band == 0 else row < self._workload.out[1]

    def _clear_borders(self, first: Any) -> None:
        """Set the columns left and right of the image, and the rows above and below, to zero."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        height, width = workload.image[1:3]
        zero = spread(0.0, blocking.lanes)

        def clear(row: Any, columns: range) -> None:
            if columns:
                with (
                    T.serial(columns.start, columns.stop) as x,
                    T.serial(0, blocking.block // blocking.lanes) as v,
                ):
                    T.buffer_store(self._wide, zero, [row, x, ramp(v * blocking.lanes, blocking.lanes)])

        with T.serial(0, blocking.rows(workload)) as row:
            y = first * workload.strides[0] - workload.top + row
            with T.If(tirx.any(y < 0, y >= height)):
                with T.Then():
                    clear(row, range(workload.width))
                with T.Else():
                    clear(row, range(min(workload.left, workload.width)))
                    clear(row, range(workload.left + width, workload.width))

    def _rows_of_image(self, first: Any, body: Callable[[Any, Any], None]) -> None:
        """Call `body` for each expanded row of the task that lies in the image, with the row's number in the task and
        in the image."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload = self._workload
        with T.serial(0, self._blocking.rows(workload)) as row:
            y = first * workload.strides[0] - workload.top + row
            with T.If(tirx.all(y >= 0, y < workload.image[1])), T.Then():
                body(row, y)

    @property
    def _used(self) -> int:
        """The number of the image's columns that are read. It is 0 if the border on the left is wider than all columns
        that are read."""
        return max(0, min(self._workload.image[2], self._workload.width - self._workload.left))

    def _copy(self, image: Any, first: Any, block: Any) -> None:
        """Copy the task's pixels of a block of channels, with borders of zeros."""
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking

        def one(row: Any, y: Any) -> None:
            with T.serial(0, self._used) as x, T.serial(0, blocking.block // blocking.lanes) as v:
                start = block * blocking.block + v * blocking.lanes

                def vector(offset: int, lanes: int) -> None:
                    value = self._image[image, y, x, ramp(start + offset, lanes)]
                    to = ramp(v * blocking.lanes + offset, lanes)
                    T.buffer_store(self._wide, value, [row, workload.left + x, to])

                whole, remainder = divmod(workload.image[3], blocking.lanes)
                exact = workload.image[3] % blocking.block == 0
                where(None if exact else start < whole * blocking.lanes, lambda: vector(0, blocking.lanes))
                for piece in pieces(remainder, blocking.lanes):
                    where(start == whole * blocking.lanes, partial(vector, *piece))

        self._rows_of_image(first, one)

    def _expand(self, image: Any, first: Any, block: Any) -> None:
        """Expand the task's pixels to a block of channels, with borders of zeros."""
        from tvm.script.ir_builder import tirx as T

        workload, blocking, stage = self._workload, self._blocking, self._expansion
        weights = stage.weights
        assert weights is not None
        with T.serial(0, blocking.block // blocking.expand.columns) as panel:
            at = block * (blocking.block // blocking.expand.columns) + panel

            def one(row: Any, y: Any) -> None:
                def tile(start: Any, rows: int) -> None:
                    def leave(i: Any, k: Any, value: Any) -> None:
                        c = ramp(at * blocking.expand.columns + k, blocking.lanes)
                        done = stepped(stage.steps, stage.extras, value, [image, y, start + i, c], self._done)
                        to = ramp(panel * blocking.expand.columns + k, blocking.lanes)
                        T.buffer_store(self._wide, done, [row, workload.left + start + i, to])

                    product(
                        (rows, blocking.expand.columns, blocking.lanes), workload.image[3],
                        lambda i, c: self._image[image, y, start + i, c],
                        lambda c, k: weights[at, c, k],
                        leave,
                    )  # fmt: skip

                tiles(self._used, blocking.expand.rows, tile)

            self._rows_of_image(first, one)

    def _convolve(self, image: Any, first: Any, block: Any, part: Any, more: bool) -> None:
        """Convolve the task's rows, and multiply each row with the projection while it is in the cache."""
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        with T.serial(0, blocking.band) as row:

            def one() -> None:
                row_index = [image, first + row]
                with T.serial(0, blocking.block // blocking.lanes) as v:
                    # If there is no projection, nothing may be stored beyond the last channel.
                    exact = workload.project is not None or workload.middle[3] % blocking.block == 0
                    channel = block * blocking.block + v * blocking.lanes
                    where(
                        None if exact else channel < workload.middle[3],
                        lambda: tiles(
                            workload.middle[2],
                            _PIXELS,
                            lambda x, n: self._filter(row, x, n, (block, v), row_index),
                        ),
                    )
                if workload.project is not None:
                    self._multiply(row_index, row, block, part, more)

            where(self._within(first + row), one)

    def _filter(
        self, row: Any, x: Any, count: int, vector_index: tuple[Any, Any], row_index: Sequence[Any]
    ) -> None:
        """Compute some pixels of a row of the depthwise convolution, for one vector of a block's channels."""
        from tvm.script.ir_builder import tirx as T

        workload, blocking, stage = self._workload, self._blocking, self._depthwise
        weights = stage.weights
        assert weights is not None
        (high, wide), (down, right) = workload.window, workload.strides
        block, v = vector_index
        within = ramp(v * blocking.lanes, blocking.lanes)
        channel = ramp(block * blocking.block + v * blocking.lanes, blocking.lanes)
        totals: list[Any] = [None] * count
        for ky in range(high):
            factors = [T.bind(weights[ky, kx, channel]) for kx in range(wide)]
            for j in range((count - 1) * right + wide):
                reached = [(n, j - n * right) for n in range(count) if 0 <= j - n * right < wide]
                if not reached:
                    continue
                pixel = T.bind(self._wide[row * down + ky, x * right + j, within])
                for n, kx in reached:
                    term = pixel * factors[kx]
                    totals[n] = T.bind(term if totals[n] is None else totals[n] + term)
        for n, total in enumerate(totals):
            done = stepped(stage.steps, stage.extras, total, [*row_index, x + n, channel], self._done)
            if workload.project is None:
                T.buffer_store(self._out, done, [*row_index, x + n, channel])
            else:
                T.buffer_store(self._row, self._zero_beyond(done, channel), [x + n, within])

    def _zero_beyond(self, value: Any, channel: Any) -> Any:
        """The vector `value`, with zeros in the lanes after the last channel. Without these zeros, infinity times a
        weight of 0 would give NaN in these lanes."""
        from tvm import tirx

        workload, lanes = self._workload, self._blocking.lanes
        if workload.middle[3] % self._blocking.block == 0:
            return value
        last = number(workload.middle[3])
        inside = channel < (last if lanes == 1 else tirx.Broadcast(last, lanes))
        return tirx.Select(inside, value, spread(0.0, lanes))

    def _multiply(self, row_index: Sequence[Any], row: Any, block: Any, part: Any, more: bool) -> None:
        """Add the products of one row with a block's projection to the sums."""
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        weights = self._projection.weights
        assert weights is not None
        sums, line = (self._sums, [row]) if self._shares is None else (self._shares, [part, *row_index])
        with T.serial(0, blocking.panels(workload)) as panel:

            def tile(start: Any, rows: int) -> None:
                def leave(i: Any, k: Any, value: Any) -> None:
                    at = [*line, start + i, ramp(panel * blocking.project.columns + k, blocking.lanes)]
                    T.buffer_store(sums, sums[tuple(at)] + value if more else value, at)

                product(
                    (rows, blocking.project.columns, blocking.lanes), blocking.block,
                    lambda i, c: self._row[start + i, c], lambda c, k: weights[block, panel, c, k], leave,
                )  # fmt: skip

            tiles(workload.out[2], blocking.project.rows, tile)

    def add_up(self, image: Any, y: Any) -> None:
        """Store a row of results, which are the sums of all parts added up."""
        self._leave(image, y, None)

    def _leave(self, image: Any, y: Any, row: Any | None) -> None:
        """Store a row of results: the task's own sums in its row `row`, or, if `row` is None, the sums of all parts."""
        from tvm.script.ir_builder import tirx as T

        workload, stage = self._workload, self._projection
        with T.serial(0, workload.out[2]) as x:

            def vector(start: Any, lanes: int) -> None:
                k = ramp(start, lanes)
                if row is not None:
                    value = self._sums[row, x, k]
                else:
                    assert self._shares is not None
                    value = self._shares[0, image, y, x, k]
                    for part in range(1, self._blocking.parts):
                        value = value + self._shares[part, image, y, x, k]
                done = stepped(stage.steps, stage.extras, value, [image, y, x, k], self._done)
                T.buffer_store(self._out, done, [image, y, x, k])

            along(workload.out[3], self._blocking.lanes, vector)
