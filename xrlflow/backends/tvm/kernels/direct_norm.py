"""A depthwise convolution and the normalisation of its channels (LayerNormalization) as one kernel.

A task (iteration of the parallel loop) computes a few rows as in `direct`, one vector of channels after the other, and
stores the results. Then it normalises these results pixel by pixel, while they are still in its core's caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from xrlflow.backends.tvm.kernels.building import (
    FLOAT,
    LOCAL,
    OPAQUE,
    SCHEDULED,
    lanes_of,
    number,
    pieces,
    ramp,
    spread,
    tiles,
    where,
)
from xrlflow.backends.tvm.kernels.direct import Band, Convolution, DirectBlocking, blockings, cost, task_cost
from xrlflow.backends.tvm.kernels.direct import best_blocking as best_blocking_alone
from xrlflow.backends.tvm.kernels.steps import extras_of
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine

# The channels of a pixel are summed in this many accumulators. With fewer accumulators, additions would wait for one
# another, and round more.
_SUMS = 4
# The time to normalise a vector, in multiply-adds of vectors: in the fused kernel, and in a kernel of its own, which
# reads results that another core may have written.
_HERE, _APART = 8.0, 14.0
# The busiest core may have at most this many times its share of the rows. (7 rows on two cores are slower than two
# kernels.)
_UNEVEN = 1.1
# The kernel unrolls the loop over all taps, of which there may be at most this many.
_MOST_TAPS = 49


def best_blocking(workload: Convolution, machine: Machine) -> DirectBlocking | None:
    """The blocking with the least estimated time; None if two separate kernels are faster, because these also divide
    channels among cores."""
    if (
        not is_depthwise(workload)
        or workload.out[3] < machine.lanes
        or math.prod(workload.window) > _MOST_TAPS
    ):
        return None
    full = [
        blocking
        for blocking in blockings(workload, machine)
        if blocking.together == blocking.lanes == machine.lanes
    ]
    even = [
        blocking
        for blocking in full
        if _busiest(workload, blocking, machine) * machine.cores <= _UNEVEN * _rows(workload)
    ]
    if not even:
        return None
    best = min(even, key=lambda blocking: (fused_cost(workload, blocking, machine), repr(blocking)))
    separate = cost(workload, best_blocking_alone(workload, machine), machine)
    separate += (
        _APART * -(-_rows(workload) // machine.cores) * workload.out[2] * _vectors_of(workload, machine.lanes)
    )
    return best if fused_cost(workload, best, machine) < separate else None


def is_depthwise(workload: Convolution) -> bool:
    """Whether the workload is a depthwise convolution of (two-dimensional) images."""
    return len(workload.image) == 4 and workload.groups == workload.image[3] == workload.out[3] > 1


def fused_cost(workload: Convolution, blocking: DirectBlocking, machine: Machine) -> float:
    """The estimated time until the busiest core has finished, in multiply-adds of vectors at a core's peak."""
    near = 4 * blocking.band * workload.out[2] * workload.out[3] <= machine.second_level // 2
    pixels = blocking.band * workload.out[2] * (_HERE if near else _APART)
    one = blocking.units(workload) * task_cost(workload, blocking, machine) + pixels * _vectors_of(
        workload, blocking.lanes
    )
    return _busiest(workload, blocking, machine) / blocking.band * one


def _rows(workload: Convolution) -> int:
    return workload.out[0] * workload.out[1]


def _busiest(workload: Convolution, blocking: DirectBlocking, machine: Machine) -> int:
    """The number of rows of results that the busiest core computes."""
    return -(-workload.out[0] * blocking.bands(workload) // machine.cores) * blocking.band


def _vectors_of(workload: Convolution, lanes: int) -> int:
    """The number of vectors of a pixel."""
    return len(pieces(workload.out[3], lanes))


def kernel(workload: Convolution, blocking: DirectBlocking, epsilon: float) -> Any:
    """The PrimFunc with parameters image, weights (`direct.packed`), the extra operands of the steps in their order,
    scale and bias of the normalisation, and result."""
    tvm()
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    weights = (blocking.units(workload), workload.window[1], 1, workload.window[2], blocking.lanes)
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            image = T.arg("image", T.buffer(workload.image, FLOAT))
            panels = T.arg("weights", T.buffer(weights, FLOAT))
            shapes = [
                workload.out[-1:] if extra.by_channel else workload.out for extra in extras_of(workload.steps)
            ]
            extras = [T.arg(f"x{i}", T.buffer(shape, FLOAT)) for i, shape in enumerate(shapes)]
            scale, bias = (T.arg(name, T.buffer(workload.out[-1:], FLOAT)) for name in ("scale", "bias"))
            out = T.arg("out", T.buffer(workload.out, FLOAT))
            tasks = T.parallel(0, workload.out[0] * blocking.bands(workload))
            with T.sblock("root"), tasks as task, T.sblock("direct_norm"):
                T.reads([])
                T.writes([])
                batch, first = (
                    task // blocking.bands(workload),
                    task % blocking.bands(workload) * blocking.band,
                )
                band = Band(workload, blocking, image, panels, extras, out)
                with T.serial(0, blocking.units(workload)) as unit:
                    band.write(batch, [number(0), first, number(0)], unit)
                norm = _Pixel(out, scale, bias, blocking.lanes)
                with T.serial(0, blocking.band) as row:
                    exact = workload.out[1] % blocking.band == 0
                    at = [batch, first + row]
                    where(None if exact else first + row < workload.out[1], lambda: norm.row(at, epsilon))
        return builder.get()


class _Pixel:
    """Writes the loops that normalise pixels in place."""

    def __init__(self, out: Any, scale: Any, bias: Any, lanes: int) -> None:
        from tvm.script.ir_builder import tirx as T

        self._out, self._scale, self._bias, self._lanes = out, scale, bias, lanes
        self._width, self._channels = (int(n) for n in out.shape[2:])
        self._sums = T.alloc_buffer((_SUMS, lanes), FLOAT, scope=LOCAL)
        self._moments = T.alloc_buffer((2,), FLOAT, scope=LOCAL)

    def row(self, at: Sequence[Any], epsilon: float) -> None:
        """Write the normalisation of a row of an image."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        part = tirx.const(1.0 / self._channels, FLOAT)
        mean, scale = number(0), number(1)
        with T.serial(0, self._width) as x:
            pixel = [*at, x]
            T.buffer_store(self._moments, self._sum(pixel, lambda value: value) * part, [mean])
            variance = self._sum(pixel, lambda value: self._distance(value) * self._distance(value)) * part
            root = tirx.rsqrt(variance + tirx.const(epsilon, FLOAT))
            T.buffer_store(self._moments, root, [scale])

            def normalise(index: Any) -> None:
                by = self._spread(self._moments[scale], lanes_of(index))
                value = self._distance(self._out[(*pixel, index)]) * by
                T.buffer_store(self._out, value * self._scale[index] + self._bias[index], [*pixel, index])

            self._vectors(lambda index, _: normalise(index))

    def _spread(self, value: Any, lanes: int) -> Any:
        from tvm import tirx

        return value if lanes == 1 else tirx.Broadcast(value, lanes)

    def _distance(self, value: Any) -> Any:
        """The value minus the mean."""
        return value - self._spread(self._moments[number(0)], lanes_of(value))

    def _vectors(self, body: Callable[[Any, int], None]) -> None:
        """Call `body` for each vector of a pixel, with the number of the accumulator to which it belongs: for all full
        vectors, then for the shorter vectors at the end."""
        lanes = self._lanes

        def some(start: Any, count: int) -> None:
            for i in range(count):
                body(ramp((start + i) * lanes, lanes), i)

        tiles(self._channels // lanes, _SUMS, some)
        whole = self._channels // lanes * lanes
        for start, length in pieces(self._channels - whole, lanes):
            body(ramp(number(whole + start), length), 0)

    def _sum(self, pixel: Sequence[Any], of: Callable[[Any], Any]) -> Any:
        """The sum over the channels of a pixel, each mapped by `of`."""
        from tvm.script.ir_builder import tirx as T

        lanes = self._lanes
        for i in range(_SUMS):
            T.buffer_store(self._sums, spread(0.0, lanes), [number(i), ramp(number(0), lanes)])

        def add(index: Any, turn: int) -> None:
            at = [number(turn), ramp(number(0), lanes_of(index))]
            T.buffer_store(self._sums, self._sums[tuple(at)] + of(self._out[(*pixel, index)]), at)

        self._vectors(add)
        sums = [self._sums[number(i), ramp(number(0), lanes)] for i in range(_SUMS)]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
        return _total(sums[0], lanes)


def _total(vector: Any, lanes: int) -> Any:
    """The sum of a vector's lanes. The two halves of the vector are added until one lane remains."""
    from tvm import tirx
    from tvm.script.ir_builder import tirx as T

    while lanes > 1:
        lanes //= 2
        whole = T.bind(vector)
        low, high = ([number(n + begin) for n in range(lanes)] for begin in (0, lanes))
        vector = tirx.Shuffle([whole], low) + tirx.Shuffle([whole], high)
    return vector
