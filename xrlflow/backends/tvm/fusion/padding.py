"""Pads sizes that tiles do not divide: products and convolutions compute a little more, and the result is cropped.

- Weights get columns of zeros, when the model is compiled, if the number of columns is not a multiple of a vector.
  Otherwise a product with 50,257 columns, or a convolution to 255 channels, would be computed element by element.
- Convolutions whose rows have a prime number of pixels (17, 71, 149) get a few more pixels at the right. Otherwise only
  tiles of one row would fit, and the multipliers would wait for operands half of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrlflow.backends.tvm.schedules.ratings import Grid, rated_tiles
from xrlflow.backends.tvm.toolchain.reading import numbers, operator, sizes, with_calls
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.backends.tvm.toolchain.weights import moved

# The padded number of columns may be at most this many times the least number that vectors divide.
_MORE_COLUMNS = 1.05
_FEW_VECTORS = 3
# Rows are made longer if the kernel is estimated to be `_GAIN` times faster, and at most `_MORE_PIXELS` times as long.
_GAIN, _MORE_PIXELS = 1.15, 1.15
# The time to copy a vector of an image (or one channel of a pixel, if vectors do not divide the channels), in
# multiply-adds of vectors. Padding a photograph took longer than its first convolution (measured).
_COPY = 8
_ELEMENTWISE = 0  # relax's OpPatternKind: such a function may be fused with the product before it


def pad_to_tiles(module: Any, machine: Machine) -> Any:
    """The module with padded sizes in "main", for two-dimensional products with constant weights, and for convolutions
    with constant weights and channels last."""
    from tvm.ir import GenericConst

    makers = {"relax.matmul": _matmul, "relax.nn.conv2d": _conv}

    def replace(call: Any, builder: Any) -> Any | None:
        make = makers.get(operator(call))
        if make is None or not isinstance(call.args[1], GenericConst):
            return None
        result, weights = sizes(call), sizes(call.args[1])
        if result is None or weights is None or 0 in (*result, *weights):
            return None
        wide = make(call, result, weights, machine)
        if wide is None:
            return None
        return builder.call_te(
            crop, builder.emit(wide), result,
            primfunc_name_hint="crop", primfunc_attrs={"op_pattern": _ELEMENTWISE},
        )  # fmt: skip

    return with_calls(module, replace)


def crop(x: Any, shape: Sequence[int]) -> Any:
    """The first elements along each dimension, as many as `shape` says."""
    from tvm import te

    return te.compute(list(shape), lambda *i: x[i], name="crop")


def padded_columns(columns: int, lanes: int, in_halves: bool = False) -> int:
    """The number of columns to compute: a multiple of several vectors, if that is hardly more than a multiple of one
    vector.

    `in_halves`: see `Machine`. On such machines, small numbers of columns that half vectors divide are not padded: 24
    columns take 0.86 to 0.78 of the time of 32 (measured on Zen 4; this does not hold for 88 and 1,000 columns). On
    other machines, only a single half vector is not padded: 24 columns took 1.45 to 1.8 times as long as 32, and 40
    1.65 times as long as 48 (measured on Zen 5).
    """
    if columns % lanes == 0 or columns == 1:
        return columns
    if columns % (lanes // 2) == 0 and columns <= (_FEW_VECTORS * lanes if in_halves else lanes // 2):
        return columns
    least = -(-columns // lanes) * lanes
    for vectors in (4, 3, 2):
        width = -(-columns // (vectors * lanes)) * vectors * lanes
        if width <= _MORE_COLUMNS * least:
            return width
    return least


@dataclass(frozen=True, slots=True)
class Rows:
    """The output of a convolution: `count` rows of `width` pixels. `flat`: a tile may cover the end of one row and the
    beginning of the next.

    `copies`: the number of vectors (or of channels of pixels) that are copied to make the rows longer.
    """

    count: int
    width: int
    flat: bool
    copies: int = 0


def padded_width(rows: Rows, columns: int, row_stride: int, reduction: int, machine: Machine) -> int:
    """The number of pixels in a row to compute: the number with the least estimated time, if it is clearly faster than
    the present `rows.width`."""

    def steps(pixels: int, tiled: int) -> float:
        """The multiply-adds of vectors that take as long as rows of this many pixels. `tiled`: the number of pixels
        that tiles divide."""
        best = max(value for value, _ in rated_tiles(Grid(tiled, columns, row_stride, reduction), machine))
        return rows.count * pixels * columns * reduction / machine.lanes / best

    now = steps(rows.width, rows.count * rows.width if rows.flat else rows.width)
    wider = range(rows.width + 1, math.floor(_MORE_PIXELS * rows.width) + 1)
    least, width = min(((steps(w, w) + _COPY * rows.copies, w) for w in wider), default=(now, rows.width))
    return width if now > _GAIN * least else rows.width


def _matmul(call: Any, result: Sequence[int], weights: Sequence[int], machine: Machine) -> Any | None:
    from tvm import relax

    width = padded_columns(weights[-1], machine.lanes, machine.in_halves)
    if len(weights) != 2 or width == weights[-1]:
        return None
    return relax.Call(call.op, [call.args[0], _widened(call.args[1], width)], call.attrs, call.ty_args)


def _conv(call: Any, result: Sequence[int], weights: Sequence[int], machine: Machine) -> Any | None:
    from tvm import relax

    attrs = call.attrs
    if attrs.data_layout != "NHWC" or attrs.kernel_layout != "HWIO" or int(attrs.groups) != 1:
        return None
    batch, height, width, columns = result
    strides, padding = numbers(attrs.strides), numbers(attrs.padding)
    flat = list(weights[:2]) == [1, 1] and strides == [1, 1] and not any(padding)
    wide_columns = padded_columns(columns, machine.lanes, machine.in_halves)
    image = sizes(call.args[0])
    # An image with a border is copied anyway.
    copied = 0 if image is None or any(padding) else math.prod(image)
    vectors = machine.lanes if weights[2] % machine.lanes == 0 else 1
    rows = Rows(batch * height, width, flat, copied // vectors)
    wide = padded_width(rows, wide_columns, 4 * weights[2], math.prod(weights[:3]), machine)
    if (wide, wide_columns) == (width, columns):
        return None
    top, left, bottom, right = padding
    return relax.op.nn.conv2d(
        call.args[0],
        _widened(call.args[1], wide_columns) if wide_columns > columns else call.args[1],
        strides=strides,
        padding=[top, left, bottom, right + (wide - width) * strides[1]],
        dilation=numbers(attrs.dilation),
        data_layout="NHWC",
        kernel_layout="HWIO",
        out_layout=attrs.out_layout,
        out_dtype=attrs.out_dtype,
    )


def _widened(weights: Any, width: int) -> Any:
    shape = sizes(weights) or ()
    return moved(weights, np.pad, (*((0, 0),) * (len(shape) - 1), (0, width - shape[-1])))
