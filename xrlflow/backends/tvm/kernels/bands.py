"""Inverted residuals as one kernel: expansion by 1x1, depthwise convolution, projection by 1x1.

What the expansion gives is several times as large as the image, and leaves the core's caches if each convolution is a
kernel of its own. Here a task takes a band of rows, and some expanded channels at a time (a block): it expands the
band's pixels, convolves them row by row, and adds the products of each row with the block's projection to the sums of
the band. What is expanded stays in the second-level cache of a core.

Expansion or projection may be absent: a depthwise convolution with its pointwise neighbour.
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

# Neighbouring pixels of a depthwise convolution that share what they load.
_PIXELS = 4


@dataclass(frozen=True, slots=True)
class ConvBlock:
    """A block of convolutions with channels last.

    `image`, `middle`, `out`: [batch, row, column, channel] of what is read, of the depthwise convolution's result, and
    of the whole result. `window`, `strides`: of the depthwise convolution. `top`, `left`: its rows and columns of zeros
    before the image. `expand`, `depthwise`, `project`: the steps after each convolution; None: there is no such
    convolution. Steps of the first two have no operands but numbers and numbers by channel.
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
        """The columns of an expanded row with its borders."""
        return (self.middle[2] - 1) * self.strides[1] + self.window[1]


@dataclass(frozen=True, slots=True)
class Tile:
    """Accumulators of a product: `rows` x `columns`."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class BandBlocking:
    """How a kernel is blocked. `block`: expanded channels at a time, a multiple of the columns of `expand`. `band`: the
    rows of results of a task. `parts`: among how many tasks the channels of a band are divided; their sums are added
    afterwards."""

    expand: Tile
    project: Tile
    lanes: int
    block: int
    band: int
    parts: int = 1

    def rows(self, form: ConvBlock) -> int:
        """The expanded rows of a band."""
        return (self.band - 1) * form.strides[0] + form.window[0]

    def blocks(self, form: ConvBlock) -> int:
        return -(-form.middle[3] // self.block)

    def bands(self, form: ConvBlock) -> int:
        return -(-form.middle[1] // self.band)

    def panels(self, form: ConvBlock) -> int:
        """The panels of the projection."""
        return -(-form.out[3] // self.project.columns)


def packed_expansion(
    weights: npt.NDArray[np.float32], form: ConvBlock, how: BandBlocking
) -> npt.NDArray[np.float32]:
    """[panel, channel, column] of weights [channel, expanded]."""
    wide = _padded(weights, 1, how.blocks(form) * how.block)
    split = wide.reshape(weights.shape[0], -1, how.expand.columns)
    return np.ascontiguousarray(split.transpose(1, 0, 2))


def packed_projection(
    weights: npt.NDArray[np.float32], form: ConvBlock, how: BandBlocking
) -> npt.NDArray[np.float32]:
    """[block, panel, channel of the block, column] of weights [expanded, channel]."""
    tall = _padded(weights, 0, how.blocks(form) * how.block)
    wide = _padded(tall, 1, how.panels(form) * how.project.columns)
    split = wide.reshape(how.blocks(form), how.block, how.panels(form), how.project.columns)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3))


def by_channel(
    values: npt.NDArray[np.float32], form: ConvBlock, how: BandBlocking
) -> npt.NDArray[np.float32]:
    """Values with expanded channels last, for whole blocks."""
    return _padded(values, values.ndim - 1, how.blocks(form) * how.block)


def _padded(array: npt.NDArray[np.float32], axis: int, size: int) -> npt.NDArray[np.float32]:
    pads = [(0, 0)] * array.ndim
    pads[axis] = (0, size - array.shape[axis])
    return np.ascontiguousarray(np.pad(array, pads), np.float32)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One convolution in a kernel: its weights (None if there is no such convolution), steps and buffers of extras."""

    weights: Any | None
    steps: tuple[Step, ...]
    extras: tuple[Any, ...]


def kernel(form: ConvBlock, how: BandBlocking) -> Any:
    """The PrimFunc with parameters image, for each convolution its weights and the extras of its steps, and result.

    Weights are `packed_expansion`, `by_channel` [row, column, channel] and `packed_projection`; extras of the first two
    convolutions are `by_channel`.
    """
    tvm()
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    columns = how.panels(form) * how.project.columns
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            image = T.arg("image", T.buffer(form.image, FLOAT))
            stages = [_stage(form, how, name) for name in ("expand", "depthwise", "project")]
            out = T.arg("out", T.buffer(form.out, FLOAT))
            with T.sblock("root"), T.sblock("bands"):
                T.reads([])
                T.writes([])
                shares = None
                if how.parts > 1 and form.project is not None:
                    shares = T.alloc_buffer((how.parts, *form.out[:3], columns), FLOAT)
                with T.parallel(0, form.out[0] * how.bands(form) * how.parts) as task, T.sblock("band"):
                    T.reads([])
                    T.writes([])
                    band, part = task // how.parts, task % how.parts
                    body = _Band(form, how, image, stages, out, shares)
                    body.write(band // how.bands(form), band % how.bands(form), part)
                if shares is not None:
                    with T.parallel(0, math.prod(form.out[:2])) as row, T.sblock("sums"):
                        T.reads([])
                        T.writes([])
                        body = _Band(form, how, image, stages, out, shares)
                        body.add_up(row // form.out[1], row % form.out[1])
        return builder.get()


def _stage(form: ConvBlock, how: BandBlocking, name: str) -> _Stage:
    """Declare the parameters of one convolution."""
    from tvm.script.ir_builder import tirx as T

    wide = how.blocks(form) * how.block
    channels: tuple[int, ...] = (wide,)
    shape: tuple[int, ...] = (*form.window, wide)
    steps: tuple[Step, ...] | None = form.depthwise
    if name == "expand":
        steps, shape = form.expand, (wide // how.expand.columns, form.image[3], how.expand.columns)
    elif name == "project":
        steps, channels = form.project, form.out[3:]
        shape = (how.blocks(form), how.panels(form), how.block, how.project.columns)
    if steps is None:
        return _Stage(None, (), ())
    weights = T.arg(f"{name}_weights", T.buffer(shape, FLOAT))
    shapes = [channels if extra.by_channel else form.out for extra in extras_of(steps)]
    extras = [T.arg(f"{name}{i}", T.buffer(shape, FLOAT)) for i, shape in enumerate(shapes)]
    return _Stage(weights, steps, tuple(extras))


class _Band:
    """Writes the loops of one task into the function that is being built."""

    def __init__(
        self,
        form: ConvBlock,
        how: BandBlocking,
        image: Any,
        stages: Sequence[_Stage],
        out: Any,
        shares: Any | None,
    ) -> None:
        from tvm.script.ir_builder import tirx as T

        self._form, self._how, self._image, self._out, self._shares = form, how, image, out, shares
        self._expansion, self._depthwise, self._projection = stages
        most = max(len(stage.steps) for stage in stages)
        self._done = T.alloc_buffer((most + 1, how.lanes), FLOAT, scope=LOCAL)

    def write(self, image: Any, band: Any, part: Any) -> None:
        from tvm.script.ir_builder import tirx as T

        form, how = self._form, self._how
        first = band * how.band
        self._wide = T.alloc_buffer((how.rows(form), form.width, how.block), FLOAT)
        if form.project is not None:
            self._row = T.alloc_buffer((form.middle[2], how.block), FLOAT)
            if self._shares is None:
                columns = how.panels(form) * how.project.columns
                self._sums = T.alloc_buffer((how.band, form.out[2], columns), FLOAT)
        share = -(-how.blocks(form) // how.parts)
        self._clear_borders(first)

        def one(turn: Any, more: bool) -> None:
            block = part * share + turn
            if form.expand is None:
                self._copy(image, first, block)
            else:
                self._expand(image, first, block)
            self._convolve(image, first, block, part, more)

        one(number(0), False)
        if share > 1:
            with T.serial(1, share) as turn:
                exact = share * how.parts == how.blocks(form)
                where(None if exact else part * share + turn < how.blocks(form), lambda: one(turn, True))
        if form.project is not None and self._shares is None:
            with T.serial(0, how.band) as row:
                where(self._within(first + row), lambda: self._leave(image, first + row, row))

    def _within(self, row: Any) -> Any | None:
        return None if self._form.out[1] % self._how.band == 0 else row < self._form.out[1]

    def _clear_borders(self, first: Any) -> None:
        """Zeros in the columns left and right of the image, and in the rows above and below."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        form, how = self._form, self._how
        height, width = form.image[1:3]
        zero = spread(0.0, how.lanes)

        def clear(row: Any, columns: range) -> None:
            if columns:
                with T.serial(columns.start, columns.stop) as x, T.serial(0, how.block // how.lanes) as v:
                    T.buffer_store(self._wide, zero, [row, x, ramp(v * how.lanes, how.lanes)])

        with T.serial(0, how.rows(form)) as row:
            y = first * form.strides[0] - form.top + row
            with T.If(tirx.any(y < 0, y >= height)):
                with T.Then():
                    clear(row, range(form.width))
                with T.Else():
                    clear(row, range(min(form.left, form.width)))
                    clear(row, range(form.left + width, form.width))

    def _rows_of_image(self, first: Any, body: Callable[[Any, Any], None]) -> None:
        """`body` for each row of the band that lies in the image: its number in the band, and in the image."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        form = self._form
        with T.serial(0, self._how.rows(form)) as row:
            y = first * form.strides[0] - form.top + row
            with T.If(tirx.all(y >= 0, y < form.image[1])), T.Then():
                body(row, y)

    @property
    def _used(self) -> int:
        """The columns of the image that are read: none, if the border on the left is wider than what is read."""
        return max(0, min(self._form.image[2], self._form.width - self._form.left))

    def _copy(self, image: Any, first: Any, block: Any) -> None:
        """The pixels of a block of channels, with borders."""
        from tvm.script.ir_builder import tirx as T

        form, how = self._form, self._how

        def one(row: Any, y: Any) -> None:
            with T.serial(0, self._used) as x, T.serial(0, how.block // how.lanes) as v:
                start = block * how.block + v * how.lanes

                def vector(offset: int, lanes: int) -> None:
                    value = self._image[image, y, x, ramp(start + offset, lanes)]
                    to = ramp(v * how.lanes + offset, lanes)
                    T.buffer_store(self._wide, value, [row, form.left + x, to])

                whole, rest = divmod(form.image[3], how.lanes)
                exact = form.image[3] % how.block == 0
                where(None if exact else start < whole * how.lanes, lambda: vector(0, how.lanes))
                for piece in pieces(rest, how.lanes):
                    where(start == whole * how.lanes, partial(vector, *piece))

        self._rows_of_image(first, one)

    def _expand(self, image: Any, first: Any, block: Any) -> None:
        """The pixels of a band after expansion to a block of channels, with borders."""
        from tvm.script.ir_builder import tirx as T

        form, how, stage = self._form, self._how, self._expansion
        weights = stage.weights
        assert weights is not None
        with T.serial(0, how.block // how.expand.columns) as panel:
            at = block * (how.block // how.expand.columns) + panel

            def one(row: Any, y: Any) -> None:
                def tile(start: Any, rows: int) -> None:
                    def leave(i: Any, k: Any, value: Any) -> None:
                        c = ramp(at * how.expand.columns + k, how.lanes)
                        done = stepped(stage.steps, stage.extras, value, [image, y, start + i, c], self._done)
                        to = ramp(panel * how.expand.columns + k, how.lanes)
                        T.buffer_store(self._wide, done, [row, form.left + start + i, to])

                    product(
                        (rows, how.expand.columns, how.lanes), form.image[3],
                        lambda i, c: self._image[image, y, start + i, c],
                        lambda c, k: weights[at, c, k],
                        leave,
                    )  # fmt: skip

                tiles(self._used, how.expand.rows, tile)

            self._rows_of_image(first, one)

    def _convolve(self, image: Any, first: Any, block: Any, part: Any, more: bool) -> None:
        """The depthwise convolution of the rows of a band, each multiplied with the projection at once."""
        from tvm.script.ir_builder import tirx as T

        form, how = self._form, self._how
        with T.serial(0, how.band) as row:

            def one() -> None:
                place = [image, first + row]
                with T.serial(0, how.block // how.lanes) as v:
                    # Without a projection, nothing may be stored after the last channel.
                    exact = form.project is not None or form.middle[3] % how.block == 0
                    channel = block * how.block + v * how.lanes
                    where(
                        None if exact else channel < form.middle[3],
                        lambda: tiles(
                            form.middle[2], _PIXELS, lambda x, n: self._filter(row, x, n, (block, v), place)
                        ),
                    )
                if form.project is not None:
                    self._multiply(place, row, block, part, more)

            where(self._within(first + row), one)

    def _filter(self, row: Any, x: Any, count: int, where_: tuple[Any, Any], place: Sequence[Any]) -> None:
        """Some pixels of a row of the depthwise convolution, for one vector of a block's channels."""
        from tvm.script.ir_builder import tirx as T

        form, how, stage = self._form, self._how, self._depthwise
        weights = stage.weights
        assert weights is not None
        (high, wide), (down, right) = form.window, form.strides
        block, v = where_
        within = ramp(v * how.lanes, how.lanes)
        channel = ramp(block * how.block + v * how.lanes, how.lanes)
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
            done = stepped(stage.steps, stage.extras, total, [*place, x + n, channel], self._done)
            if form.project is None:
                T.buffer_store(self._out, done, [*place, x + n, channel])
            else:
                T.buffer_store(self._row, self._known(done, channel), [x + n, within])

    def _known(self, value: Any, channel: Any) -> Any:
        """A vector with zeros after the last channel: there infinity times a weight of 0 would be not a number."""
        from tvm import tirx

        form, lanes = self._form, self._how.lanes
        if form.middle[3] % self._how.block == 0:
            return value
        last = number(form.middle[3])
        known = channel < (last if lanes == 1 else tirx.Broadcast(last, lanes))
        return tirx.Select(known, value, spread(0.0, lanes))

    def _multiply(self, place: Sequence[Any], row: Any, block: Any, part: Any, more: bool) -> None:
        """Add the products of one row with a block's projection to the sums."""
        from tvm.script.ir_builder import tirx as T

        form, how = self._form, self._how
        weights = self._projection.weights
        assert weights is not None
        sums, line = (self._sums, [row]) if self._shares is None else (self._shares, [part, *place])
        with T.serial(0, how.panels(form)) as panel:

            def tile(start: Any, rows: int) -> None:
                def leave(i: Any, k: Any, value: Any) -> None:
                    at = [*line, start + i, ramp(panel * how.project.columns + k, how.lanes)]
                    T.buffer_store(sums, sums[tuple(at)] + value if more else value, at)

                product(
                    (rows, how.project.columns, how.lanes), how.block,
                    lambda i, c: self._row[start + i, c], lambda c, k: weights[block, panel, c, k], leave,
                )  # fmt: skip

            tiles(form.out[2], how.project.rows, tile)

    def add_up(self, image: Any, y: Any) -> None:
        """A row of results from the sums of all parts."""
        self._leave(image, y, None)

    def _leave(self, image: Any, y: Any, row: Any | None) -> None:
        """A row of results from the sums in `row` of the band; None: from the sums of all parts."""
        from tvm.script.ir_builder import tirx as T

        form, stage = self._form, self._projection
        with T.serial(0, form.out[2]) as x:

            def vector(start: Any, lanes: int) -> None:
                k = ramp(start, lanes)
                if row is not None:
                    value = self._sums[row, x, k]
                else:
                    assert self._shares is not None
                    value = self._shares[0, image, y, x, k]
                    for part in range(1, self._how.parts):
                        value = value + self._shares[part, image, y, x, k]
                done = stepped(stage.steps, stage.extras, value, [image, y, x, k], self._done)
                T.buffer_store(self._out, done, [image, y, x, k])

            along(form.out[3], self._how.lanes, vector)
