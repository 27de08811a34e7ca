"""Evaluation of the quantised operators. Sums of integer products are exact; scales are floats of the field.

In a proof over a prime field, a quantised tensor that is computed consists of elements of the field: rounding is an
unknown function of the number that is rounded, so equal arguments give equal integers, and sums of their products are
exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from xrlflow.ir import Attrs, DType
from xrlflow.ops.eval_elementwise import (
    NARROW_INTEGER,
    WIDE_INTEGER,
    element,
    narrow_float,
    round_narrow,
    widen,
)
from xrlflow.ops.eval_linear import conv
from xrlflow.ops.eval_spec import Inputs, OpSpec, f32, integer, several, single, table
from xrlflow.ops.field import REALS, Array, Field, NotEvaluable


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """Integers that represent the numbers (integer - zero) * scale. `zero` is None if it is 0."""

    numbers: Array
    scale: Array
    zero: Array | None


def _spread(scale: Array, x: Array, attrs: Attrs) -> Array:
    """A scale or zero point, broadcast to `x`. It has one number for all, one for each index of the axis, or one for
    each block.
    """
    if scale.ndim == 0 or (scale.size == 1 and scale.ndim == 1):
        return scale.reshape(())
    axis = integer(attrs, "axis", 1) % x.ndim
    if scale.ndim == 1:
        return scale.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    block = integer(attrs, "block_size", 0)
    repeated = np.repeat(scale, block, axis=axis) if block else scale
    return repeated[(slice(None),) * axis + (slice(0, x.shape[axis]),)]


def _saturate(x: Array, dtype: np.dtype[Any]) -> Array:
    """Integers in a float array, clamped to the range of `dtype` and converted to it."""
    for number, storage in NARROW_INTEGER.items():
        if storage == dtype:
            signed, bits = number in (DType.INT4, DType.INT2), 4 if number in (DType.INT4, DType.UINT4) else 2
            low = -(1 << bits - 1) if signed else 0
            high = low + (1 << bits) - 1
            return np.clip(x, low, high).astype(np.int8).astype(dtype)
    info = np.iinfo(dtype)
    # ONNX does not say what NaN becomes. ONNX Runtime makes the least number of it.
    return np.where(np.isnan(x), info.min, np.clip(x, info.min, info.max)).astype(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Unrounded:
    """The result of an operator before rounding: numbers in units of the scale, without the zero point, and the
    result's type.

    `float_type`: the format of a result in float8 or float4. Whether it has infinities depends on `saturate`.
    """

    scaled: Array
    zero: Array | float
    dtype: np.dtype[Any]
    float_type: DType | None = None
    saturate: bool = True

    @property
    def steps(self) -> Array:
        """The result before it is rounded and clamped, in units of the scale, with the zero point."""
        return np.asarray(self.scaled + self.zero)

    def rounded(self, field: Field = REALS) -> Array:
        """round(scaled) + zero point, clamped to the type. Ties are rounded to even, in double precision.

        If the field is not `real`, elements that stand for these integers: an unknown function of the number that is
        rounded and the zero point.
        """
        if not field.real:
            type = self.dtype if self.float_type is None else f"{self.float_type.name} {self.saturate}"
            return field.binary(f"quantise to {type}", self.scaled, element(field, np.asarray(self.zero)))
        if self.float_type is not None:
            return round_narrow(self.steps, self.float_type, self.saturate)
        return _saturate(np.rint(self.scaled) + self.zero, self.dtype)


def requantised(field: Field, scaled: Array, zero: Array | None, like: Array) -> Unrounded:
    """Elements of the field, in units of the output's scale, that are still to be rounded. Without a zero point the
    type is that of `like`. Raises NotEvaluable if that is not known.
    """
    if zero is None and not field.real:
        raise NotEvaluable("an output without a zero point")
    dtype = like.dtype if zero is None else zero.dtype
    offset: Array | float = 0.0 if zero is None else widen(zero).astype(np.float64)
    return Unrounded(scaled, offset, dtype, narrow_float(dtype))


def _quantize(field: Field, attrs: Attrs, x: Array, scale: Array, zero: Array | None = None) -> Unrounded:
    to = DType(integer(attrs, "output_dtype", 0))
    scaled = field.div(element(field, x), _spread(element(field, scale), x, attrs))
    offset: Array | float = 0.0 if zero is None else _spread(widen(zero), x, attrs).astype(np.float64)
    dtype = {**WIDE_INTEGER, **NARROW_INTEGER}.get(to, np.dtype(np.uint8)) if zero is None else zero.dtype
    float_type = to if to.name.startswith("FLOAT") else narrow_float(dtype)
    return Unrounded(scaled, offset, dtype, float_type, bool(integer(attrs, "saturate", 1)))


def _dequantize(field: Field, attrs: Attrs, x: Array, scale: Array, zero: Array | None = None) -> Array:
    value = element(field, x)
    if zero is not None:
        value = field.sub(value, element(field, _spread(widen(zero), x, attrs)))
    return field.mul(value, _spread(element(field, scale), x, attrs))


def dynamic_quantize(x: Array) -> tuple[Array, Any, Array]:
    """Quantise to uint8 by the range of the data, extended to include 0. If all data are zeros the scale is 1, as in
    runtimes.

    Scale and quotient are rounded to float32, by definition.
    """
    low, high = min(0.0, float(x.min(initial=0.0))), max(0.0, float(x.max(initial=0.0)))
    scale = f32((high - low) / 255.0) or 1.0
    zero = np.clip(np.rint(-low / scale), 0, 255)
    quotient = (x / scale).astype(np.float32)
    y = np.clip(np.rint(quotient) + zero, 0, 255).astype(np.uint8)
    return y, np.float64(scale), np.asarray(zero).astype(np.uint8)


def _dynamic_quantize(field: Field, attrs: Attrs, x: Array) -> tuple[Any, ...]:
    return dynamic_quantize(x)


def _summing(field: Field, *arrays: Array | None) -> Field:
    """The field in which integers are summed: exact numbers, unless one of the tensors consists of elements."""
    return field if any(a is not None and a.dtype.kind == "f" for a in arrays) else REALS


def _centred(field: Field, x: Array, zero: Array | None, columns: bool) -> Array:
    """Integers minus their zero point (one number, or one for each row or column), as elements of the field."""
    value = element(field, x)
    if zero is None:
        return value
    shift = element(field, zero)
    return field.sub(value, shift[:, None] if shift.ndim == 1 and shift.size > 1 and not columns else shift)


def integer_product(field: Field, a: Array, b: Array, a_zero: Array | None, b_zero: Array | None) -> Array:
    """The product of two integer matrices, each minus its zero point, as elements of the field."""
    return field.matmul(_centred(field, a, a_zero, False), _centred(field, b, b_zero, True))


def _as_sums(field: Field, total: Array) -> Array:
    """Sums in the type of sums of products of bytes."""
    return total.astype(np.int64).astype(np.int32) if field.real else total


def _matmul_integer(
    field: Field,
    attrs: Attrs,
    a: Array,
    b: Array,
    a_zero: Array | None = None,
    b_zero: Array | None = None,
) -> Array:
    field = _summing(field, a, b, a_zero, b_zero)
    return _as_sums(field, integer_product(field, a, b, a_zero, b_zero))


def _conv_sum(
    field: Field, attrs: Attrs, x: Array, w: Array, x_zero: Array | None, w_zero: Array | None
) -> Array:
    """The convolution of integers, each tensor minus its zero point, as elements of the field."""
    data, weight = element(field, x), element(field, w)
    if x_zero is not None:
        data = field.sub(data, element(field, x_zero.reshape(-1)[:1].reshape(())))
    if w_zero is not None:
        weight = field.sub(weight, element(field, w_zero).reshape(-1, *(1,) * (w.ndim - 1)))
    return conv(field, attrs, data, weight)


def _conv_integer(
    field: Field,
    attrs: Attrs,
    x: Array,
    w: Array,
    x_zero: Array | None = None,
    w_zero: Array | None = None,
) -> Array:
    field = _summing(field, x, w, x_zero, w_zero)
    return _as_sums(field, _conv_sum(field, attrs, x, w, x_zero, w_zero))


def _widened(numbers: Array, scale: Array, zero: Array) -> Quantised:
    """Quantised numbers, converted to types with which NumPy computes."""
    return Quantised(widen(numbers), scale, widen(zero))


def _qlinear_matmul(field: Field, attrs: Attrs, *inputs: Array) -> Unrounded:
    """The inputs are matrices a and b, each with scale and zero point, then scale and zero point of the output."""
    a, b = _widened(*inputs[:3]), _widened(*inputs[3:6])
    y_scale, y_zero = inputs[6:]
    total = integer_product(field, a.numbers, b.numbers, a.zero, b.zero)
    rows = a.scale[:, None] if a.scale.ndim == 1 and a.scale.size > 1 else a.scale
    factor = field.div(field.mul(element(field, rows), element(field, b.scale)), element(field, y_scale))
    return requantised(field, field.mul(total, factor), y_zero, inputs[0])


def _qlinear_conv(field: Field, attrs: Attrs, *inputs: Array) -> Unrounded:
    """The inputs are x and w, each with scale and zero point, then those of the output, then an optional bias."""
    x, w = Quantised(*inputs[:3]), Quantised(*inputs[3:6])
    y_scale, y_zero = inputs[6:8]
    bias: Array | None = inputs[8] if len(inputs) > 8 else None
    total = _conv_sum(field, attrs, x.numbers, w.numbers, x.zero, w.zero)
    channels = (-1, *(1,) * (x.numbers.ndim - 2))
    if bias is not None:
        total = field.add(total, element(field, bias).reshape(channels))
    scales = field.mul(element(field, x.scale), element(field, w.scale).reshape(channels))
    return requantised(field, field.mul(total, field.div(scales, element(field, y_scale))), y_zero, inputs[0])


Rounding: TypeAlias = Callable[..., Unrounded]
"""function(field, attrs, *inputs): what an operator rounds."""

ROUNDINGS: Mapping[str, Rounding] = {
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "QuantizeLinear": _quantize,
}
"""The operators whose only output is rounded to the steps of a scale that they are given."""


def rounding(op: str, find: Rounding) -> OpSpec:
    """The OpSpec of an operator that rounds its result."""

    def evaluate(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
        return (find(field, attrs, *inputs).rounded(field),)

    return OpSpec(op, evaluate, "uninterpreted")


SPECS: dict[str, OpSpec] = {
    **table("polynomial", DequantizeLinear=single(_dequantize)),
    **table("integer", ConvInteger=single(_conv_integer), MatMulInteger=single(_matmul_integer)),
    **table(
        "numeric",
        DynamicQuantizeLinear=several(_dynamic_quantize),
    ),
    **{op: rounding(op, find) for op, find in ROUNDINGS.items()},
}
