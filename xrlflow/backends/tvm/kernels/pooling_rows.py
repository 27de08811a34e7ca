"""Two-dimensional pools with channels first, row by row.

First the rows of a window are reduced to one row, in full vectors; then the columns of that row. A few rows of results
are computed together, so that the reduction along columns reads from the first-level cache, and not right after the
values were stored.

NaN is treated as in ONNX Runtime's kernels. If windows have no gaps and are one or two columns apart, the maximum of
two elements is the second element unless the first is greater, so that the next element replaces a NaN. Otherwise NaN
is skipped. Two exceptions of ONNX Runtime are not copied: the last columns, which vectors of four do not divide, and
the first element of a window with gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.kernels.building import FLOAT, LOCAL, OPAQUE, SCHEDULED, number, ramp, spread
from xrlflow.backends.tvm.kernels.pooling import Along, windows_of
from xrlflow.backends.tvm.toolchain.reading import constant, sizes
from xrlflow.backends.tvm.toolchain.target import Machine

_WORTH_A_THREAD = 30_000
# A parallel loop has at least this many parts for each core, if there are as many rows.
_PARTS = 4
# The number of elements in a block of rows that is reduced along columns: 16 KiB.
_BLOCK = 4096
# Windows of more taps than the first number are computed in loops. If the stride between results is more than the
# second number of columns, pixels are read one by one.
_UNROLLED, _FURTHEST = 9, 4
_LOWEST = float(np.finfo(np.float32).min)


def legal_max_pool_rows(builder: Any, call: Any, machine: Machine) -> Any | None:
    """The kernel for the greatest elements of windows, channels first; None for pools that this module does not
    compute."""
    along = windows_of(call, "NCHW")
    return None if along is None else _legal(builder, call, machine, along, None)


def legal_average_pool_rows(builder: Any, call: Any, machine: Machine) -> Any | None:
    """The kernel for the means of windows, channels first; None for pools that this module does not compute."""
    along = windows_of(call, "NCHW")
    return (
        None if along is None else _legal(builder, call, machine, along, bool(call.attrs.count_include_pad))
    )


def shares(rows: Along, columns: Along, whole: bool) -> npt.NDArray[np.float32]:
    """The factors of means, [n, column]: 1 / the number of elements of a window with n + 1 rows inside the image; 0 for
    windows without elements. `whole`: the added pixels count as elements."""
    tall, wide = np.arange(1, rows.taps + 1), [_elements(columns, x, whole) for x in range(columns.result)]
    counts = tall[:, None] * np.array(wide)
    return np.where(counts > 0, 1 / np.maximum(counts, 1), 0).astype(np.float32)


def _elements(along: Along, pixel: int, whole: bool = False) -> int:
    """The number of taps of a window inside the image; with `whole`, taps in the added pixels count, too."""
    before, after = (along.before, along.after) if whole else (0, 0)
    return sum(-before <= along.position(pixel, tap) < along.image + after for tap in range(along.taps))


def _legal(
    builder: Any,
    call: Any,
    machine: Machine,
    along: tuple[Along, Along],
    mean: bool | None,
) -> Any | None:
    """The call of the pool's kernel; None if a window has no elements. `mean`: None for the greatest elements; for
    means, whether the added pixels count as elements."""
    from tvm import relax

    image = sizes(call.args[0])
    if image is None or not all(_elements(a, i) for a in along for i in range(a.result)):
        return None
    function = builder.add_func(kernel((image[0], image[1]), along, machine, mean), "pool2d")
    tables = [] if mean is None else [constant(shares(*along, mean))]
    out = relax.TensorType((*image[:2], *(each.result for each in along)), FLOAT)
    return relax.call_tir(function, [call.args[0], *tables], out)


def kernel(planes: tuple[int, int], along: tuple[Along, Along], machine: Machine, mean: bool | None) -> Any:
    """The PrimFunc with parameters image [batch, channel, row, column], for means the `shares`, and result. `planes`:
    the extents of batch and channel; `mean`: see `_legal`."""
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    (batch, channels), (rows, columns) = planes, along
    count = batch * channels
    most = -(-_PARTS * machine.cores // count)
    parts = next(n for n in range(min(most, rows.result), 0, -1) if rows.result % n == 0)
    share = rows.result // parts
    work = count * rows.result * columns.image * rows.taps
    loop = T.parallel if count * parts > 1 and work >= _WORTH_A_THREAD else T.serial
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            image = T.arg("image", T.buffer((*planes, rows.image, columns.image), FLOAT))
            factors = (
                T.arg("shares", T.buffer((rows.taps, columns.result), FLOAT)) if mean is not None else None
            )
            out = T.arg("out", T.buffer((*planes, rows.result, columns.result), FLOAT))
            with T.sblock("root"), loop(0, count * parts) as task, T.sblock("pool"):
                T.reads([])
                T.writes([])
                body = _Rows(along, machine.lanes, share, mean, [image, factors, out])
                body.border()
                together = body.together
                with T.serial(0, -(-share // together)) as turn:
                    first = task % parts * share + turn * together
                    plane = [task // parts // channels, task // parts % channels]
                    some = tirx.Min(number(together), share - turn * together)
                    with T.serial(0, some) as row:
                        body.down(plane, first + row, row)
                    with T.serial(0, some) as row:
                        body.across(plane, first + row, row)
        return builder.get()


class _Rows:
    """Writes the loops of a block of rows into the function that is being built. `buffers`: the image, the shares (None
    for the greatest elements) and the result."""

    def __init__(
        self, along: tuple[Along, Along], lanes: int, share: int, mean: bool | None, buffers: Sequence[Any]
    ) -> None:
        from tvm.script.ir_builder import tirx as T

        (self._rows, self._columns), self._lanes, self._mean = along, lanes, mean
        self._image, self._shares, self._out = buffers
        columns, gaps = self._columns, any(each.dilation > 1 for each in along)
        # Whether a reduction skips NaN, and the value with which it begins; both as in ONNX Runtime.
        self._skips = gaps or columns.stride > 2
        self._start = 0.0 if mean is not None else -math.inf if gaps else _LOWEST
        last = columns.position(columns.result - 1, columns.taps - 1) + 1
        self._beyond = max(0, last - columns.image)  # columns after the image that windows reach
        # A vector of results may read more columns than it needs.
        wide = columns.before + columns.image + self._beyond + columns.stride
        self.together = max(1, min(share, _BLOCK // wide))
        self._one_row = T.alloc_buffer((self.together, wide), FLOAT)
        self._sums = T.alloc_buffer((lanes,), FLOAT, scope=LOCAL)

    def border(self) -> None:
        """Fill the columns left and right of the image, once."""
        from tvm.script.ir_builder import tirx as T

        columns = self._columns
        with T.serial(0, self.together) as row:
            for first, count in ((0, columns.before), (columns.before + columns.image, self._beyond)):
                if count:
                    with T.serial(0, count) as x:
                        T.buffer_store(self._one_row, spread(self._start, 1), [row, first + x])

    def _initial(self, value: Any, lanes: int) -> Any:
        """The reduction of one element."""
        return (
            self._joined(spread(self._start, lanes), value) if self._mean is None and self._skips else value
        )

    def _joined(self, reduced: Any, value: Any) -> Any:
        """The reduction of `reduced` and one more element."""
        from tvm import tirx

        if self._mean is not None:
            return reduced + value
        return tirx.Max(value, reduced) if self._skips else tirx.Max(reduced, value)

    def down(self, plane: Sequence[Any], result: Any, row: Any) -> None:
        """Reduce the rows of the windows of one row of results."""
        from tvm import tirx
        from tvm.script.ir_builder import tirx as T

        rows, before = self._rows, self._columns.before

        def whole(first: Any, lanes: int) -> None:
            def load(tap: Any) -> Any:
                return self._image[(*plane, rows.position(result, tap), ramp(first, lanes))]

            T.buffer_store(
                self._one_row, self._reduced(load, rows.taps, lanes), [row, ramp(first + before, lanes)]
            )

        if not rows.leaves:
            self._vectors(self._columns.image, whole)
            return
        step = rows.dilation
        start = rows.position(result, 0)
        low = T.bind(tirx.Max(tirx.floordiv(step - 1 - start, step), 0))
        high = T.bind(tirx.Min(tirx.floordiv(rows.image - 1 - start, step), rows.taps - 1))

        def some(first: Any, lanes: int) -> None:
            at, sums = ramp(first, lanes), ramp(number(0), lanes)
            value = self._image[(*plane, rows.position(result, low), at)]
            T.buffer_store(self._sums, self._initial(value, lanes), [sums])
            with T.serial(0, high - low) as turn:
                value = self._image[(*plane, rows.position(result, low + 1 + turn), at)]
                T.buffer_store(self._sums, self._joined(self._sums[sums], value), [sums])
            T.buffer_store(self._one_row, self._sums[sums], [row, ramp(first + before, lanes)])

        with T.If(high - low == rows.taps - 1):
            with T.Then():
                self._vectors(self._columns.image, whole)
            with T.Else():
                self._vectors(self._columns.image, some)

    def across(self, plane: Sequence[Any], result: Any, row: Any) -> None:
        """Reduce the columns of the windows of one row of results."""
        from tvm.script.ir_builder import tirx as T

        rows, columns = self._rows, self._columns
        which = None if self._mean is None else rows.taps_inside(result, self._mean) - 1

        def results(first: Any, lanes: int) -> None:
            def load(tap: Any) -> Any:
                return self._apart(row, first * columns.stride + tap * columns.dilation, lanes)

            value = self._reduced(load, columns.taps, lanes)
            if which is not None:
                value = value * self._shares[which, ramp(first, lanes)]
            T.buffer_store(self._out, value, [*plane, result, ramp(first, lanes)])

        self._vectors(columns.result, results)

    def _apart(self, row: Any, first: Any, lanes: int) -> Any:
        """A vector of pixels of a row, from columns whose distance is the stride."""
        from tvm import tirx

        stride = self._columns.stride
        if lanes == 1 or stride == 1:
            return self._one_row[row, ramp(first, lanes)]
        if stride > _FURTHEST:
            return self._one_row[row, tirx.Ramp(first, stride, lanes)]
        columns = self._one_row[row, ramp(first, lanes * stride)]
        return tirx.Shuffle([columns], [number(stride * n) for n in range(lanes)])

    def _reduced(self, load: Callable[[Any], Any], taps: int, lanes: int) -> Any:
        """The reduction of the values that `load` returns for each tap."""
        from tvm.script.ir_builder import tirx as T

        if taps <= _UNROLLED:
            value = T.bind(self._initial(load(0), lanes))
            for tap in range(1, taps):
                value = T.bind(self._joined(value, load(tap)))
            return value
        at = ramp(number(0), lanes)
        T.buffer_store(self._sums, self._initial(load(number(0)), lanes), [at])
        with T.serial(0, taps - 1) as tap:
            T.buffer_store(self._sums, self._joined(self._sums[at], load(tap + 1)), [at])
        return self._sums[at]

    def _vectors(self, extent: int, body: Callable[[Any, int], None]) -> None:
        """Call `body` for each vector of `extent`. If vectors do not divide `extent`, the last vector overlaps the
        vector before. Results that are computed twice are equal."""
        from tvm.script.ir_builder import tirx as T

        lanes = min(self._lanes, 1 << extent.bit_length() - 1)
        whole, remainder = divmod(extent, lanes)
        with T.serial(0, whole) as turn:
            body(turn * lanes, lanes)
        if remainder:
            body(number(extent - lanes), lanes)
