"""Direct convolutions as one kernel: grouped, depthwise, dilated, with few channels, of one to three dimensions.

A vector holds the results of several groups if their output channels fit into it. The pixels that these results
multiply with their weights are then a shuffle of a vector of the image: one shuffle has the first input channel of each
group, one the second channel, and so on. Each shuffle serves all taps along a row. If a group has more output channels,
its pixels are broadcast, as in a product.

A task (iteration of the parallel loop) computes a band, which is a few rows of results, for the channels of one vector
(or group). It copies the rows that it reads, with their borders of zeros, into a buffer that stays in a core's cache.
Then it computes a tile of neighbouring pixels at a time, whose sums stay in vector registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
    ramp,
    spread,
    tiles,
    where,
)
from xrlflow.backends.tvm.kernels.steps import Extra, Step, extras_of, kind_of, stepped
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine

# Longer sums are added up in parts, one for each row of the window: rounding errors grow with the number of terms.
_CHUNK = 192
_MOST_PIXELS, _MOST_VECTORS, _MOST_SPANS = 14, 4, 64
# If a vector holds several groups, the loops over channels and over the taps of a row are unrolled. Together they may
# have at most this many iterations.
_MOST_WRITTEN = 64
# This kernel is chosen for depthwise convolutions with at least the first number of taps, and for convolutions with at
# most the second number of input channels: see `gains`.
_MANY_TAPS, _FEW_CHANNELS = 49, 2
# This many accumulators keep the multipliers busy.
_BUSY = 8
# Times in multiply-adds of vectors: copying a vector of the image into the task's buffer; storing a vector of results.
_COPY, _LEAVE = 2.5, 4.0
# Bytes of the first-level cache, and three factors of time: for reading what has left the first-level cache, for
# reading what has left the second-level cache, and for copying parts of pixels that another core has written.
_FIRST_LEVEL, _SECOND, _SPILLED, _SCATTERED = 24 << 10, 1.4, 4.0, 2.0


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution with channels last, of one to three dimensions.

    `image`, `out`: [batch, ((depth,) row,) column, channel]. `window`, `strides`, `dilations`, and `begin` (the zeros
    before the image) are (depth, row, column). For a dimension that the image does not have, they are a window of 1, a
    stride of 1 and no zeros.
    """

    image: tuple[int, ...]
    out: tuple[int, ...]
    window: tuple[int, int, int]
    strides: tuple[int, int, int]
    dilations: tuple[int, int, int]
    begin: tuple[int, int, int]
    groups: int
    steps: tuple[Step, ...] = ()

    @property
    def space(self) -> tuple[int, int, int]:
        """(depth, rows, columns) of the image."""
        return _space(self.image)

    @property
    def results(self) -> tuple[int, int, int]:
        """(depth, rows, columns) of the result."""
        return _space(self.out)

    @property
    def channels(self) -> int:
        """The input channels of a group."""
        return self.image[-1] // self.groups

    @property
    def columns(self) -> int:
        """The output channels of a group."""
        return self.out[-1] // self.groups

    @property
    def terms(self) -> int:
        """The number of terms of each result."""
        return math.prod(self.window) * self.channels

    @property
    def extras(self) -> list[Extra]:
        return extras_of(self.steps)

    @property
    def kind(self) -> str:
        """The type of the results."""
        return kind_of(self.steps)

    def index(self, batch: Any, position: Sequence[Any], channel: Any) -> list[Any]:
        """The index of an element of an image. `position`: (depth, row, column); dimensions that the image lacks are
        ignored."""
        return [batch, *position[5 - len(self.image) :], channel]


def _space(shape: Sequence[int]) -> tuple[int, int, int]:
    deep, rows, columns = (1,) * (5 - len(shape)) + tuple(shape[1:-1])
    return deep, rows, columns


@dataclass(frozen=True, slots=True)
class DirectBlocking:
    """The blocking of a direct convolution.

    A tile has `pixels` x `vectors` vectors of `lanes` results. `together`: the number of groups whose results one
    vector holds; 1: a vector has results of one group. `band`, `span`: the numbers of rows and of columns of results
    that a task computes; the span is the full width or a multiple of `pixels`. `shared`: a pixel is loaded once for all
    taps along a row.
    """

    lanes: int
    vectors: int
    pixels: int
    together: int
    band: int
    span: int
    shared: bool

    def units(self, workload: Convolution) -> int:
        """The number of units into which the groups are divided. A task computes one unit, and copies the pixels of its
        channels."""
        return -(-workload.groups // self.together)

    def panels(self, workload: Convolution) -> int:
        """The number of panels of weights of a unit (see `units`)."""
        return 1 if self.together > 1 else -(-workload.columns // (self.vectors * self.lanes))

    def rows(self, workload: Convolution) -> int:
        """The number of rows of the image that a task reads."""
        return (self.band - 1) * workload.strides[1] + (workload.window[1] - 1) * workload.dilations[1] + 1

    def width(self, workload: Convolution) -> int:
        """The number of columns of the image that a task reads."""
        return (self.span - 1) * workload.strides[2] + (workload.window[2] - 1) * workload.dilations[2] + 1

    def bands(self, workload: Convolution) -> int:
        return -(-workload.results[1] // self.band)

    def spans(self, workload: Convolution) -> int:
        return -(-workload.results[2] // self.span)

    def slot(self, workload: Convolution) -> int:
        """The number of floats of a pixel in the buffer into which a task copies its part of the image."""
        return self.lanes if self.together > 1 else workload.channels

    def numbers(self, workload: Convolution) -> dict[str, int]:
        """See `layer_kernels.KernelBlocking`."""
        return {
            "rows": self.pixels, "vectors": self.vectors, "lanes": self.lanes, "blocks": self.bands(workload),
            "parts": self.spans(workload), "order": int(self.shared),
        }  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.pixels}x{self.vectors * self.lanes} in bands of {self.band} rows and {self.span} columns"
        )


def best_blocking(workload: Convolution, machine: Machine) -> DirectBlocking:
    """The blocking with the least estimated time."""
    return min(
        blockings(workload, machine), key=lambda blocking: (cost(workload, blocking, machine), repr(blocking))
    )


def blockings(workload: Convolution, machine: Machine) -> Iterator[DirectBlocking]:
    """The blockings to choose from."""
    spare = 4 if machine.registers <= 16 else 3
    bands = sorted({-(-workload.results[1] // n) for n in range(1, workload.results[1] + 1)})
    for lanes in _lanes(workload, machine):
        together = _together(workload, lanes)
        for vectors in range(1, 2 if together > 1 else _MOST_VECTORS + 1):
            taps = workload.window[2] * vectors
            for pixels in range(1, _MOST_PIXELS + 1):
                sums = pixels * vectors
                if sums + vectors + spare > machine.registers and pixels > 1:
                    continue
                shared = together > 1 or sums + taps + spare <= machine.registers
                for band in bands:
                    for span in _spans(workload, pixels):
                        yield DirectBlocking(lanes, vectors, pixels, together, band, span, shared)


def _together(workload: Convolution, lanes: int) -> int:
    """The number of groups whose results one vector holds; 1: a vector has results of one group."""
    return max(min(lanes // workload.columns, lanes // workload.channels, workload.groups), 1)


def _lanes(workload: Convolution, machine: Machine) -> list[int]:
    """The lengths of vectors to choose from: the machine's length, and shorter lengths with which no more vectors are
    needed. On a machine that computes in halves, half the length, too."""

    def vectors(lanes: int) -> int:
        together = _together(workload, lanes)
        return -(-workload.groups // together) * -(-workload.columns * together // lanes)

    lengths, lanes = [machine.lanes], machine.lanes // 2
    while lanes >= 1:
        if vectors(lanes) == vectors(machine.lanes) or (machine.in_halves and 2 * lanes == machine.lanes):
            lengths.append(lanes)
        lanes //= 2
    return lengths


def _spans(workload: Convolution, pixels: int) -> list[int]:
    """The widths of spans to choose from. If there are several rows of results, only rows are divided among tasks, and
    the only span is a full row."""
    width = workload.results[2]
    if workload.results[1] > 1:
        return [width]
    parts = {-(-width // (n * pixels)) * pixels for n in range(1, _MOST_SPANS + 1) if width >= 4 * n * pixels}
    return sorted({width, *(part for part in parts if part < width)})


def cost(workload: Convolution, blocking: DirectBlocking, machine: Machine) -> float:
    """The estimated time until the busiest core has finished, in multiply-adds of vectors at a core's peak."""
    tasks = (
        workload.out[0]
        * workload.results[0]
        * blocking.bands(workload)
        * blocking.spans(workload)
        * blocking.units(workload)
    )
    return -(-tasks // machine.cores) * task_cost(workload, blocking, machine)


def task_cost(workload: Convolution, blocking: DirectBlocking, machine: Machine) -> float:
    """The estimated time of one task, in the unit of `cost`."""
    half = 1.0 if blocking.lanes == machine.lanes or not machine.in_halves else 0.5
    deep, lines = workload.window[0], workload.window[0] * workload.window[1]
    slot, rows = blocking.slot(workload), blocking.rows(workload)
    vector = 1.0 if blocking.lanes == machine.lanes else half
    copy = _COPY * deep * rows * blocking.width(workload) * len(pieces(slot, blocking.lanes))
    if (
        workload.out[0] * workload.results[0] * blocking.bands(workload) * blocking.spans(workload)
        < machine.cores
    ):
        copy *= _SCATTERED
    used = 4 * deep * rows * blocking.width(workload) * slot
    far = _SPILLED if used > machine.second_level // 2 else _SECOND if used > _FIRST_LEVEL else 1.0
    whole, remainder = divmod(blocking.span, blocking.pixels)
    total = 0.0
    for pixels, count in ((blocking.pixels, whole), (remainder, 1 if remainder else 0)):
        sums = pixels * blocking.vectors
        reads = far * _reads(workload, blocking, pixels)
        step = max(workload.window[2] * max(sums, _BUSY) * vector, reads) + 0.1 * reads
        store = _LEAVE * sums * (1 + len(workload.steps))
        total += count * (lines * workload.channels * step + store)
    return far * copy + blocking.band * blocking.panels(workload) * total


def _reads(workload: Convolution, blocking: DirectBlocking, pixels: int) -> float:
    """The number of vectors that a tile reads for one channel and one row of the window."""
    weights = workload.window[2] * blocking.vectors
    if blocking.shared:
        return weights + len(_columns(workload, pixels))
    return weights + workload.window[2] * pixels


def _columns(workload: Convolution, pixels: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """The columns of the image that neighbouring results read, each with its readers: (column, [(result, tap)])."""
    readers: dict[int, list[tuple[int, int]]] = {}
    for n in range(pixels):
        for tap in range(workload.window[2]):
            readers.setdefault(n * workload.strides[2] + tap * workload.dilations[2], []).append((n, tap))
    return sorted(readers.items())


def gains(workload: Convolution, machine: Machine) -> bool:
    """Whether this kernel is faster than a product for each tap (measured on Zen 4).

    It is 1.1 to 2 times as fast for groups whose channels do not fill a vector, 1.2 to 1.6 times for depthwise
    convolutions of 7x7 (5x5: 1.0), 2 times for few output channels, 1.4 times for one input channel, and 1.02 to 1.05
    times for convolutions that are dilated or have one or three dimensions.
    """
    taps = math.prod(workload.window)
    if taps == 1 and workload.groups == 1:
        return False
    if workload.groups > 1:
        together = min(machine.lanes // workload.columns, machine.lanes // workload.channels)
        if together > 1 and workload.window[2] * workload.channels > _MOST_WRITTEN:
            return False
        return max(workload.columns, workload.channels) > 1 or taps >= _MANY_TAPS or len(workload.image) != 4
    few = workload.channels <= _FEW_CHANNELS or workload.columns <= machine.lanes // 2
    return few or len(workload.image) != 4 or max(workload.dilations) > 1


def packed(
    weights: npt.NDArray[np.float32], workload: Convolution, blocking: DirectBlocking
) -> npt.NDArray[np.float32]:
    """Weights [(depth,) row, column, channel of the group, output channel] as [panel, line of the window, channel, tap
    along the row, column]. Without `shared`, taps come before channels."""
    lines, across = workload.window[0] * workload.window[1], workload.window[2]
    grouped = weights.reshape(lines, across, workload.channels, workload.groups, workload.columns)
    units, panels, wide = (
        blocking.units(workload),
        blocking.panels(workload),
        blocking.vectors * blocking.lanes,
    )
    if blocking.together > 1:
        full = np.zeros(
            (lines, across, workload.channels, units * blocking.together, workload.columns), np.float32
        )
        full[:, :, :, : workload.groups] = grouped
        joined = full.reshape(lines, across, workload.channels, units, blocking.together * workload.columns)
        last = joined.shape[-1]
    else:
        joined, last = grouped, workload.columns
    padded = np.zeros((lines, across, workload.channels, units, panels * wide), np.float32)
    padded[..., :last] = joined
    split = padded.reshape(lines, across, workload.channels, units * panels, wide)
    order = (3, 0, 2, 1, 4) if blocking.shared else (3, 0, 1, 2, 4)
    return np.ascontiguousarray(split.transpose(order))


def kernel(workload: Convolution, blocking: DirectBlocking) -> Any:
    """The PrimFunc with parameters image, weights (`packed`), the extra operands of the steps in their order, and
    result."""
    tvm()
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    inner = (
        (workload.channels, workload.window[2])
        if blocking.shared
        else (workload.window[2], workload.channels)
    )
    lines = workload.window[0] * workload.window[1]
    weights = (
        blocking.units(workload) * blocking.panels(workload),
        lines,
        *inner,
        blocking.vectors * blocking.lanes,
    )
    each = (
        workload.results[0] * blocking.bands(workload) * blocking.spans(workload) * blocking.units(workload)
    )
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            image = T.arg("image", T.buffer(workload.image, FLOAT))
            panels = T.arg("weights", T.buffer(weights, FLOAT))
            shapes = [workload.out[-1:] if extra.by_channel else workload.out for extra in workload.extras]
            extras = [T.arg(f"x{i}", T.buffer(shape, FLOAT)) for i, shape in enumerate(shapes)]
            out = T.arg("out", T.buffer(workload.out, workload.kind))
            tasks = T.parallel(0, workload.out[0] * each)
            with T.sblock("root"), tasks as task, T.sblock("direct"):
                T.reads([])
                T.writes([])
                unit, turn = task % blocking.units(workload), task // blocking.units(workload)
                span, turn = turn % blocking.spans(workload), turn // blocking.spans(workload)
                band, turn = turn % blocking.bands(workload), turn // blocking.bands(workload)
                first = [turn % workload.results[0], band * blocking.band, span * blocking.span]
                Band(workload, blocking, image, panels, extras, out).write(task // each, first, unit)
        return builder.get()


class Band:
    """Writes the loops of one task, which computes a few rows of results (a band), into the function that is being
    built."""

    def __init__(
        self,
        workload: Convolution,
        blocking: DirectBlocking,
        image: Any,
        panels: Any,
        extras: Sequence[Any],
        out: Any,
    ) -> None:
        from tvm.script.ir_builder import tirx as T

        self._workload, self._blocking = workload, blocking
        self._image, self._panels, self._extras, self._out = image, panels, extras, out
        wide = blocking.vectors * blocking.lanes
        self._copy_of_band = T.alloc_buffer(
            (workload.window[0] * blocking.rows(workload), blocking.width(workload), blocking.slot(workload)),
            FLOAT,
        )
        self._sums = T.alloc_buffer((blocking.pixels, wide), FLOAT, scope=LOCAL)
        self._part = T.alloc_buffer((blocking.pixels, wide), FLOAT, scope=LOCAL)
        self._done = T.alloc_buffer((len(workload.steps) + 1, blocking.lanes), FLOAT, scope=LOCAL)

    def write(self, batch: Any, first: Sequence[Any], unit: Any) -> None:
        """Write the loops that compute the task's results, which begin at `first` (depth, row, column)."""
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        self._batch = batch
        self._copy(first, unit)
        with T.serial(0, blocking.panels(workload)) as panel, T.serial(0, blocking.band) as row:
            exact = workload.results[1] % blocking.band == 0
            where(
                None if exact else first[1] + row < workload.results[1],
                lambda: self._row(first, row, unit, panel),
            )

    def _row(self, first: Sequence[Any], row: Any, unit: Any, panel: Any) -> None:
        """Write the loop that computes a row of results."""
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking

        def tile(x: Any, count: int) -> None:
            at = [first[0], first[1] + row, first[2] + x]
            self._tile(at, row, x, count, [unit, panel])

        if blocking.spans(workload) == 1:
            tiles(blocking.span, blocking.pixels, tile)
            return
        with T.serial(0, blocking.span // blocking.pixels) as turn:  # the last span may have fewer tiles
            x = turn * blocking.pixels
            where(first[2] + x + blocking.pixels <= workload.results[2], lambda: tile(x, blocking.pixels))
            remainder = workload.results[2] % blocking.pixels
            if remainder:
                where(first[2] + x == workload.results[2] - remainder, lambda: tile(x, remainder))

    def _copy(self, first: Sequence[Any], unit: Any) -> None:
        """Copy the pixels that the task reads into its buffer, with zeros outside the image."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        (depth, height, width), wide = workload.space, blocking.width(workload)
        z, y, x = (
            start * stride - begin for start, stride, begin in zip(first, workload.strides, workload.begin)
        )
        # The first column of the copy that lies in the image, and the column after the last that does.
        start, stop = tirx.Min(tirx.Max(0 - x, 0), wide), tirx.Min(tirx.Max(width - x, 0), wide)
        with T.serial(0, workload.window[0]) as deep, T.serial(0, blocking.rows(workload)) as row:
            line = deep * blocking.rows(workload) + row
            at = [z + deep * workload.dilations[0], y + row]
            with T.If(tirx.all(at[0] >= 0, at[0] < depth, at[1] >= 0, at[1] < height)):
                with T.Then():
                    with T.serial(0, start) as column:
                        self._clear(line, column)
                    with T.serial(0, stop - start) as more:
                        self._pixel([*at, x + start + more], line, start + more, unit)
                    with T.serial(0, wide - stop) as more:
                        self._clear(line, stop + more)
                with T.Else(), T.serial(0, wide) as column:
                    self._clear(line, column)

    def _clear(self, line: Any, column: Any) -> None:
        from tvm.script.ir_builder import tirx as T

        def zeros(start: Any, length: int) -> None:
            T.buffer_store(self._copy_of_band, spread(0.0, length), [line, column, ramp(start, length)])

        along(self._blocking.slot(self._workload), self._blocking.lanes, zeros)

    def _pixel(self, at: Sequence[Any], line: Any, x: Any, unit: Any) -> None:
        """Copy the channels of a unit at one pixel. If it is possible, a full vector is copied, although its last
        channels are not used: this is faster than a few short vectors."""
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        begin = unit * blocking.together * workload.channels

        def part(start: Any, length: int) -> None:
            value = self._image[tuple(workload.index(self._batch, at, ramp(begin + start, length)))]
            T.buffer_store(self._copy_of_band, value, [line, x, ramp(start, length)])

        def some(extent: int) -> None:
            along(extent, blocking.lanes, part)

        if blocking.together == 1:
            some(workload.channels)
            return
        step, units = blocking.together * workload.channels, blocking.units(workload)
        # The number of units whose full vector lies within the pixel.
        whole = min(
            units,
            (workload.image[-1] - blocking.lanes) // step + 1 if workload.image[-1] >= blocking.lanes else 0,
        )
        if whole == units:
            some(blocking.lanes)
            return
        with T.If(unit < whole):
            with T.Then():
                some(blocking.lanes)
            with T.Else():
                # In the later units, less than a full vector is left of the pixel: only its channels are copied.
                for late in range(whole, units):
                    where(unit == late, partial(some, min(step, workload.image[-1] - late * step)))

    def _tile(self, at: Sequence[Any], row: Any, x: Any, count: int, which: Sequence[Any]) -> None:
        """Compute `count` neighbouring results of a row for one panel of a unit. They begin `x` columns after the
        task's first column."""
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        lines, across = workload.window[0] * workload.window[1], workload.window[2]
        in_parts = workload.terms > _CHUNK
        self._start(self._sums, count)
        with T.serial(0, lines) as line:
            deep, down = line // workload.window[1], line % workload.window[1]
            source = deep * blocking.rows(workload) + row * workload.strides[1] + down * workload.dilations[1]
            position = [
                source,
                x * workload.strides[2],
                which[0] * blocking.panels(workload) + which[1],
                line,
            ]

            def part(start: Any, length: int) -> None:
                """Add the products of `length` channels, from channel `start` on, to the sums."""
                sums = self._part if in_parts else self._sums
                if in_parts:
                    self._start(sums, count)
                self._line(sums, position, count, start, length)
                if in_parts:
                    for index in self._vectors(count):
                        T.buffer_store(self._sums, self._sums[index] + sums[index], list(index))

            # All channels, or as many as keep the sum of one chunk short.
            channels = workload.channels if blocking.together > 1 else max(1, _CHUNK // across)
            tiles(workload.channels, min(workload.channels, channels), part)
        self._leave(at, count, *which)

    def _vectors(self, count: int) -> list[tuple[Any, Any]]:
        """The indices of the vectors of sums, as (pixel, vector) in a tile of `count` pixels."""
        lanes = self._blocking.lanes
        return [
            (number(n), ramp(number(v * lanes), lanes))
            for n in range(count)
            for v in range(self._blocking.vectors)
        ]

    def _start(self, sums: Any, count: int) -> None:
        from tvm.script.ir_builder import tirx as T

        for index in self._vectors(count):
            T.buffer_store(sums, spread(0.0, self._blocking.lanes), list(index))

    def _line(self, sums: Any, position: Sequence[Any], count: int, start: Any, length: int) -> None:
        """Add the products of some channels with one row of the window to the sums.

        `position`: the line and the first column that are read, the panel of weights, and the row of the window.
        """
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        source, begin, *which = position
        if blocking.together > 1:
            for i in range(workload.channels):
                self._taps(sums, count, [*which, number(i)], partial(self._shuffled, source, begin, i))
            return

        def pixel(column: Any, channel: Any) -> Any:
            value = self._copy_of_band[source, begin + column, channel]
            return value if blocking.lanes == 1 else tirx.Broadcast(value, blocking.lanes)

        if blocking.shared:
            with T.serial(0, length) as i:
                self._taps(sums, count, [*which, start + i], lambda j: pixel(j, start + i))
            return
        with T.serial(0, workload.window[2]) as tap, T.serial(0, length) as i:
            factors = [self._factor([*which, tap, start + i], v) for v in range(blocking.vectors)]
            for n in range(count):
                value = T.bind(pixel(n * workload.strides[2] + tap * workload.dilations[2], start + i))
                self._add(sums, n, value, factors)

    def _taps(self, sums: Any, count: int, which: Sequence[Any], pixel: Callable[[int], Any]) -> None:
        """Add the products of one channel with all taps along a row of the window to the sums."""
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        factors = [
            [self._factor([*which, number(k)], v) for v in range(blocking.vectors)]
            for k in range(workload.window[2])
        ]
        for j, reached in _columns(workload, count):
            value = T.bind(pixel(j))
            for n, k in reached:
                self._add(sums, n, value, factors[k])

    def _factor(self, at: Sequence[Any], vector: int) -> Any:
        from tvm.script.ir_builder import tirx as T

        return T.bind(self._panels[(*at, ramp(number(vector * self._blocking.lanes), self._blocking.lanes))])

    def _add(self, sums: Any, n: int, value: Any, factors: Sequence[Any]) -> None:
        from tvm.script.ir_builder import tirx as T

        lanes = self._blocking.lanes
        for v, factor in enumerate(factors):
            index = [number(n), ramp(number(v * lanes), lanes)]
            T.buffer_store(sums, sums[tuple(index)] + value * factor, index)

    def _shuffled(self, source: Any, begin: Any, channel: int, column: int) -> Any:
        """A vector with one pixel's value for each result: the value of input channel `channel` of the result's
        group."""
        from tvm import tirx

        workload, lanes = self._workload, self._blocking.lanes
        vector = self._copy_of_band[source, begin + column, ramp(number(0), lanes)]
        order = [min(n // workload.columns * workload.channels + channel, lanes - 1) for n in range(lanes)]
        if order == list(range(lanes)):
            return vector
        return tirx.Shuffle([vector], [number(n) for n in order])

    def _leave(self, at: Sequence[Any], count: int, unit: Any, panel: Any) -> None:
        """Store the results after the steps. The last unit, and the last panel of a group, may have fewer results than
        others."""
        from tvm.script.ir_builder import tirx as T

        workload, blocking = self._workload, self._blocking
        wide = blocking.vectors * blocking.lanes
        if blocking.together > 1:
            begin, extent = unit * blocking.together * workload.columns, blocking.together * workload.columns
            last, final = (
                workload.out[-1] - (blocking.units(workload) - 1) * extent,
                unit == blocking.units(workload) - 1,
            )
        else:
            begin, extent = unit * workload.columns + panel * wide, wide
            last, final = (
                workload.columns - (blocking.panels(workload) - 1) * wide,
                panel == blocking.panels(workload) - 1,
            )
        if last == extent:
            self._store(at, count, begin, extent)
            return
        with T.If(final):
            with T.Then():
                self._store(at, count, begin, last)
            with T.Else():
                self._store(at, count, begin, extent)

    def _store(self, at: Sequence[Any], count: int, begin: Any, extent: int) -> None:
        """Store the first `extent` results of a panel."""
        from tvm.script.ir_builder import tirx as T

        workload, lanes = self._workload, self._blocking.lanes
        *outer, x = at
        for n in range(count):
            for start, length in pieces(extent, lanes):
                value = self._sums[number(n), ramp(number(start), length)]
                index = workload.index(self._batch, [*outer, x + n], ramp(begin + start, length))
                done = stepped(workload.steps, self._extras, value, index, self._done)
                T.buffer_store(self._out, done, index)
