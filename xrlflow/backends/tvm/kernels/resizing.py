"""Resize of images: nearest and linear, by tables of the pixels that each result reads, and of their weights.

With channels first, a kernel of our own goes row by row: two rows of the image become one, which stays in the cache,
and its pixels become the results of a row. Where the sizes are in a ratio of small numbers, results repeat in periods
that LLVM turns into vectors and their shuffles. With channels last, vectors of channels are results of one pixel each,
and what follows is fused.
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
# Longer periods of results, and rows of which more results are in no period, are read from tables.
_LONGEST, _MOST_OTHERS = 8, 32
# A parallel loop has as many parts for each core, if there are as many rows.
_PARTS = 4
_SINGLE = np.float32

_PLACES: dict[str, Callable[[Any, Any, int, int], Any]] = {
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
"""The place in an image of each result, by ONNX's name of the mode, in ONNX Runtime's order of rounding."""
_NEAREST: dict[str, Callable[[Any], Any]] = {
    "round_prefer_floor": lambda x: np.ceil(x - _SINGLE(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + _SINGLE(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}


@dataclass(frozen=True, slots=True)
class Along:
    """One dimension. Each result is a sum of the `near` pixel and the `far` one, with weights `close` and `distant`;
    the near pixel alone, without weights, if the mode is nearest."""

    image: int
    near: tuple[int, ...]
    far: tuple[int, ...] = ()
    close: tuple[float, ...] = ()
    distant: tuple[float, ...] = ()

    @property
    def result(self) -> int:
        return len(self.near)

    @property
    def indices(self) -> npt.NDArray[np.int32]:
        return np.array([self.near, self.far] if self.far else [self.near], np.int32)

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        return np.array([self.close, self.distant], np.float32)

    @property
    def copies(self) -> int:
        """How many results in succession each pixel becomes, if it is as many for all; otherwise 1."""
        each = max(1, self.result // self.image)
        return each if not self.far and self.near == tuple(i // each for i in range(self.result)) else 1

    def terms(self, i: int) -> tuple[Any, ...]:
        """The pixels of a result, relative to the first of its period, and its weights."""
        steps, results = self.period
        begin = i // results * steps
        if not self.far:
            return (self.near[i] - begin,)
        return (self.near[i] - begin, self.far[i] - begin, self.close[i], self.distant[i])

    @property
    def period(self) -> tuple[int, int]:
        """(pixels, results) after which weights repeat."""
        common = math.gcd(self.image, self.result)
        return self.image // common, self.result // common

    def repeated(self) -> tuple[int, int]:
        """The first of the periods that are alike, and how many these are: those around the middle."""
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
    """The nearest pixels: by the rounding of single precision, which decides where two are as near. As in ONNX Runtime,
    an image that keeps its size stays as it is."""
    if image == result:
        return Along(image, tuple(range(image)))
    places = _PLACES[mode](np.arange(result, dtype=np.float32), _scale(image, result), image, result)
    pixels = np.clip(_NEAREST[rounding](places), 0, image - 1).astype(int)
    return Along(image, tuple(pixels.tolist()))


def linear(image: int, result: int, mode: str) -> Along:
    """The two pixels around each place, and their weights. Places outside are those of the border."""
    scale = np.float64(result) / np.float64(image)
    places = _PLACES[mode](np.arange(result, dtype=np.float64), scale, image, result)
    # Places that differ only by rounding have the same weights.
    places = np.round(np.clip(places, 0, image - 1), 9)
    near = np.minimum(np.floor(places), image - 1).astype(int)
    far = np.minimum(near + 1, image - 1)
    distant = np.round(places - near, 9)
    close = 1.0 - distant
    both = near == far
    distant[both] = close[both] = 0.5
    return Along(image, *(tuple(each.tolist()) for each in (near, far, close, distant)))


def _scale(image: int, result: int) -> Any:
    return _SINGLE(result) / _SINGLE(image)


def legal_resize(builder: Any, call: Any, machine: Machine) -> Any | None:
    """A nearest or linear Resize of two dimensions; None for others."""
    image, result, attrs = sizes(call.args[0], FLOAT), sizes(call, FLOAT), call.attrs
    mode, method, rounding = (
        str(each) for each in (attrs.coordinate_transformation_mode, attrs.method, attrs.rounding_method)
    )
    layout = str(attrs.layout)
    if image is None or result is None or 0 in (*image, *result) or mode not in _PLACES:
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
    return [constant(along.indices)] + ([constant(along.weights)] if along.far else [])


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

    make = sums if rows.far else pixels
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
    `planes`: the sizes of the first two."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    count = planes[0] * planes[1]
    most = -(-_PARTS * machine.cores // count)
    turns = rows.result // rows.copies
    parts = next(n for n in range(min(most, turns), 0, -1) if turns % n == 0)
    share = turns // parts
    work = count * rows.result * columns.result
    loop = T.parallel if work * (4 if rows.far else 1) >= _WORTH_A_THREAD else T.serial
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_attr({SCHEDULED: True, "op_pattern": OPAQUE, "tirx.noalias": True})
            image = T.arg("image", T.buffer((*planes, rows.image, columns.image), FLOAT))
            tables = []
            for name, axis in (("rows", rows), ("columns", columns)):
                found = [T.arg(name, T.buffer(axis.indices.shape, "int32"))]
                if axis.far:
                    found.append(T.arg(f"{name}_by", T.buffer(axis.weights.shape, FLOAT)))
                tables.append(found)
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
        self._sums: Any = T.alloc_buffer((columns.image,), FLOAT) if rows.far else None

    def write(self, plane: Sequence[Any], row: Any) -> None:
        from tvm.script.ir_builder import tirx as T

        (indices, *weights), image = self._tables[0], self._image
        near = T.bind(indices[0, row])
        if self._sums is None:
            self._row(lambda x: image[(*plane, near, x)], lambda x, value: self._leave(plane, row, x, value))
            return
        far = T.bind(indices[1, row])
        close, distant = T.bind(weights[0][0, row]), T.bind(weights[0][1, row])

        def both(first: Any, lanes: int) -> None:
            at = ramp(first, lanes)
            value = image[(*plane, near, at)] * _wide(close, lanes) + image[(*plane, far, at)] * _wide(
                distant, lanes
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
        """All results of a row."""
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
    """A result of a period that begins at this pixel."""
    near, *rest = terms
    if not rest:
        return load(begin + near)
    far, close, distant = rest
    return load(begin + near) * spread(close, 1) + load(begin + far) * spread(distant, 1)


def _wide(value: Any, lanes: int) -> Any:
    from tvm import tirx

    return value if lanes == 1 else tirx.Broadcast(value, lanes)
