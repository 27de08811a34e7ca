"""Resize of images, nearest and linear. Tables have, for each result, the pixels that it reads and their weights.

With channels first, a generated kernel goes row by row: it mixes two rows of the image into one, which stays in the
cache, and computes a row of results from it. If the sizes of result and image are in a ratio of small numbers, the
pattern of pixels and weights repeats in periods, which LLVM turns into vectors and their shuffles. With channels last,
a vector has the channels of one pixel, and following operators are fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.kernels.building import FLOAT, OPAQUE, SCHEDULED, along, number, ramp, spread
from xrlflow.backends.tvm.toolchain.reading import constant, sizes
from xrlflow.backends.tvm.toolchain.target import Machine

_WORTH_A_THREAD = 30_000
# Results are read from tables if their period is longer than the first number, or if more results of a row than the
# second number belong to no period.
_LONGEST, _MOST_OTHERS = 8, 32
# A parallel loop has at least this many parts for each core, if there are as many rows.
_PARTS = 4
_SINGLE = np.float32

_POSITIONS: dict[str, Callable[[Any, Any, int, int], Any]] = {
    "half_pixel": lambda i, scale, image, result: (i + _SINGLE(0.5)) / scale - _SINGLE(0.5),
    "asymmetric": lambda i, scale, image, result: i / scale,
    "pytorch_half_pixel": lambda i, scale, image, result: (
        (i + _SINGLE(0.5)) / scale - _SINGLE(0.5) if result > 1 else i * 0
    ),
    "tf_half_pixel_for_nn": lambda i, scale, image, result: (i + _SINGLE(0.5)) / scale,
    "align_corners": lambda i, scale, image, result: (
        i * _SINGLE(image - 1) / _SINGLE(result - 1) if result > 1 else i * 0
    ),
}
"""The position in the image of each result, by ONNX's name of the mode, computed with the same sequence of roundings as
in ONNX Runtime."""
_NEAREST: dict[str, Callable[[Any], Any]] = {
    "round_prefer_floor": lambda x: np.ceil(x - _SINGLE(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + _SINGLE(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}


@dataclass(frozen=True, slots=True)
class Along:
    """The resizing along one dimension. Each result is `low_weight` times the pixel `low` plus `high_weight` times the
    pixel `high`. If the mode is nearest, each result is the pixel `low`, and the other fields are empty."""

    image: int
    low: tuple[int, ...]
    high: tuple[int, ...] = ()
    low_weight: tuple[float, ...] = ()
    high_weight: tuple[float, ...] = ()

    @property
    def result(self) -> int:
        return len(self.low)

    @property
    def indices(self) -> npt.NDArray[np.int32]:
        return np.array([self.low, self.high] if self.high else [self.low], np.int32)

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        return np.array([self.low_weight, self.high_weight], np.float32)

    @property
    def copies(self) -> int:
        """The number of successive results that are copies of one pixel, if this number is the same for all pixels;
        otherwise 1."""
        each = max(1, self.result // self.image)
        return each if not self.high and self.low == tuple(i // each for i in range(self.result)) else 1

    def terms(self, i: int) -> tuple[Any, ...]:
        """The pixels of a result, counted from the first pixel of its period, and the result's weights."""
        steps, results = self.period
        begin = i // results * steps
        if not self.high:
            return (self.low[i] - begin,)
        return (self.low[i] - begin, self.high[i] - begin, self.low_weight[i], self.high_weight[i])

    @property
    def period(self) -> tuple[int, int]:
        """The numbers of pixels and of results after which weights repeat."""
        common = math.gcd(self.image, self.result)
        return self.image // common, self.result // common

    def repeated(self) -> tuple[int, int]:
        """The number of the first period whose weights equal those of the middle period, and how many such periods
        follow one another. (At the borders weights differ.)"""
        _, results = self.period
        count = self.result // results
        middle = count // 2
        kinds = [tuple(self.terms(i * results + j) for j in range(results)) for i in range(count)]
        alike = [kind == kinds[middle] for kind in kinds]
        first, last = middle, middle
        while first > 0 and alike[first - 1]:
            first -= 1
        while last + 1 < count and alike[last + 1]:
            last += 1
        return first, last - first + 1


def nearest(image: int, result: int, mode: str, rounding: str) -> Along:
    """The nearest pixel of each result. It is computed in single precision, whose rounding decides between two pixels
    of equal distance. As in ONNX Runtime, a dimension whose size does not change is copied."""
    if image == result:
        return Along(image, tuple(range(image)))
    positions = _POSITIONS[mode](np.arange(result, dtype=np.float32), _scale(image, result), image, result)
    pixels = np.clip(_NEAREST[rounding](positions), 0, image - 1).astype(int)
    return Along(image, tuple(pixels.tolist()))


def linear(image: int, result: int, mode: str) -> Along:
    """The two pixels around each position, and their weights. Positions outside of the image are moved to its
    border."""
    scale = np.float64(result) / np.float64(image)
    positions = _POSITIONS[mode](np.arange(result, dtype=np.float64), scale, image, result)
    # Positions that differ only by rounding get the same weights.
    positions = np.round(np.clip(positions, 0, image - 1), 9)
    low = np.minimum(np.floor(positions), image - 1).astype(int)
    high = np.minimum(low + 1, image - 1)
    high_weight = np.round(positions - low, 9)
    low_weight = 1.0 - high_weight
    equal = low == high
    high_weight[equal] = low_weight[equal] = 0.5
    return Along(image, *(tuple(each.tolist()) for each in (low, high, low_weight, high_weight)))


def _scale(image: int, result: int) -> Any:
    return _SINGLE(result) / _SINGLE(image)


def legal_resize(builder: Any, call: Any, machine: Machine) -> Any | None:
    """The kernel for a nearest or linear Resize of two dimensions; None for other Resize operators."""
    image, result, attrs = sizes(call.args[0], FLOAT), sizes(call, FLOAT), call.attrs
    mode, method, rounding = (
        str(each) for each in (attrs.coordinate_transformation_mode, attrs.method, attrs.rounding_method)
    )
    layout = str(attrs.layout)
    if image is None or result is None or 0 in (*image, *result) or mode not in _POSITIONS:
        return None
    if layout not in ("NCHW", "NHWC") or method not in ("nearest_neighbor", "linear"):
        return None
    if method == "nearest_neighbor" and rounding not in _NEAREST:
        return None
    first = layout.index("H")
    rows, columns = (
        nearest(image[axis], result[axis], mode, rounding)
        if method == "nearest_neighbor"
        else linear(image[axis], result[axis], mode)
        for axis in (first, first + 1)
    )
    if layout == "NHWC":
        return _channels_last(builder, call.args[0], rows, columns)
    return _channels_first(builder, call.args[0], rows, columns, machine)


def _tables(along: Along) -> list[Any]:
    return [constant(along.indices)] + ([constant(along.weights)] if along.high else [])


def _channels_last(builder: Any, image: Any, rows: Along, columns: Along) -> Any:
    from tvm import te

    def pixels(x: Any, at_rows: Any, at_columns: Any) -> Any:
        shape = (x.shape[0], rows.result, columns.result, x.shape[3])
        return te.compute(
            shape, lambda n, i, j, c: x[n, at_rows[0, i], at_columns[0, j], c], name="resize_nearest"
        )

    def sums(x: Any, at_rows: Any, by_rows: Any, at_columns: Any, by_columns: Any) -> Any:
        def value(n: Any, i: Any, j: Any, c: Any) -> Any:
            def across(column: int) -> Any:
                parts = [by_rows[row, i] * x[n, at_rows[row, i], at_columns[column, j], c] for row in (0, 1)]
                return parts[0] + parts[1]

            return by_columns[0, j] * across(0) + by_columns[1, j] * across(1)

        shape = (x.shape[0], rows.result, columns.result, x.shape[3])
        return te.compute(shape, value, name="resize_linear")

    make = sums if rows.high else pixels
    return builder.call_te(make, image, *_tables(rows), *_tables(columns), primfunc_name_hint="resize2d")


def _channels_first(builder: Any, image: Any, rows: Along, columns: Along, machine: Machine) -> Any:
    from tvm import relax

    shape = sizes(image)
    assert shape is not None
    tables = [*_tables(rows), *_tables(columns)]
    function = builder.add_func(kernel((shape[0], shape[1]), rows, columns, machine), "resize2d")
    out = relax.TensorType((*shape[:2], rows.result, columns.result), FLOAT)
    return relax.call_tir(function, [image, *tables], out)


def kernel(planes: tuple[int, int], rows: Along, columns: Along, machine: Machine) -> Any:
    """The PrimFunc with parameters image [batch, channel, row, column], the tables of rows and of columns, and result.
    `planes`: the extents of batch and channel."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    count = planes[0] * planes[1]
    most = -(-_PARTS * machine.cores // count)
    turns = rows.result // rows.copies
    parts = next(n for n in range(min(most, turns), 0, -1) if turns % n == 0)
    share = turns // parts
    work = count * rows.result * columns.result
    loop = T.parallel if work * (4 if rows.high else 1) >= _WORTH_A_THREAD else T.serial
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            image = T.arg("image", T.buffer((*planes, rows.image, columns.image), FLOAT))
            tables = []
            for name, axis in (("rows", rows), ("columns", columns)):
                arguments = [T.arg(name, T.buffer(axis.indices.shape, "int32"))]
                if axis.high:
                    arguments.append(T.arg(f"{name}_by", T.buffer(axis.weights.shape, FLOAT)))
                tables.append(arguments)
            out = T.arg("out", T.buffer((*planes, rows.result, columns.result), FLOAT))
            with T.sblock("root"), loop(0, count * parts) as task, T.sblock("resize"):
                T.reads([])
                T.writes([])
                body = _Rows(rows, columns, machine.lanes, image, tables, out)
                with T.serial(0, share) as turn:
                    plane = [task // parts // planes[1], task // parts % planes[1]]
                    body.write(plane, (task % parts * share + turn) * rows.copies)
        return builder.get()


class _Rows:
    """Writes the loops of one row of results, and of its copies, into the function that is being built."""

    def __init__(self, rows: Along, columns: Along, lanes: int, image: Any, tables: Any, out: Any) -> None:
        from tvm.script.ir_builder import tirx as T

        self._rows, self._columns, self._lanes = rows, columns, lanes
        self._image, self._tables, self._out = image, tables, out
        self._sums: Any = T.alloc_buffer((columns.image,), FLOAT) if rows.high else None

    def write(self, plane: Sequence[Any], row: Any) -> None:
        from tvm.script.ir_builder import tirx as T

        (indices, *weights), image = self._tables[0], self._image
        low = T.bind(indices[0, row])
        if self._sums is None:
            self._row(lambda x: image[(*plane, low, x)], lambda x, value: self._leave(plane, row, x, value))
            return
        high = T.bind(indices[1, row])
        low_weight, high_weight = T.bind(weights[0][0, row]), T.bind(weights[0][1, row])

        def both(first: Any, lanes: int) -> None:
            at = ramp(first, lanes)
            value = image[(*plane, low, at)] * _wide(low_weight, lanes) + image[(*plane, high, at)] * _wide(
                high_weight, lanes
            )
            T.buffer_store(self._sums, value, [at])

        along(self._columns.image, self._lanes, both)
        self._row(lambda x: self._sums[x], lambda x, value: self._leave(plane, row, x, value))

    def _leave(self, plane: Sequence[Any], row: Any, column: Any, value: Any) -> None:
        from tvm.script.ir_builder import tirx as T

        value = T.bind(value)
        for copy in range(self._rows.copies):
            T.buffer_store(self._out, value, [*plane, row + copy, column])

    def _row(self, load: Callable[[Any], Any], leave: Callable[[Any, Any], None]) -> None:
        """Compute all results of a row."""
        from tvm.script.ir_builder import tirx as T

        columns = self._columns
        steps, results = columns.period
        first, count = columns.repeated() if results <= _LONGEST else (0, 0)
        if columns.result - count * results > _MOST_OTHERS:
            with T.serial(0, columns.result) as x:
                leave(x, self._by_table(load, x))
            return
        with T.serial(0, count) as turn:
            for j in range(results):
                terms = columns.terms(first * results + j)
                base = (turn + first) * steps
                leave((turn + first) * results + j, _sum(load, base, terms))
        for i in (*range(first), *range(first + count, columns.result // results)):
            for j in range(results):
                x = i * results + j
                terms = columns.terms(x)
                leave(number(x), _sum(load, number(i * steps), terms))

    def _by_table(self, load: Callable[[Any], Any], x: Any) -> Any:
        indices, *weights = self._tables[1]
        if not weights:
            return load(indices[0, x])
        return load(indices[0, x]) * weights[0][0, x] + load(indices[1, x]) * weights[0][1, x]


def _sum(load: Callable[[Any], Any], begin: Any, terms: tuple[Any, ...]) -> Any:
    """The weighted sum of pixels that is one result. The result's period begins at pixel `begin`."""
    low, *others = terms
    if not others:
        return load(begin + low)
    high, low_weight, high_weight = others
    return load(begin + low) * spread(low_weight, 1) + load(begin + high) * spread(high_weight, 1)


def _wide(value: Any, lanes: int) -> Any:
    from tvm import tirx

    return value if lanes == 1 else tirx.Broadcast(value, lanes)
