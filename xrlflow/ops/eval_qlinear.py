"""Evaluation of ONNX Runtime's quantised operators: they dequantise, compute in real numbers, and round to multiples of
the output's scale.

Semantics: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrlflow.ir import Attrs
from xrlflow.ops.eval_elementwise import element
from xrlflow.ops.eval_linear import average_pool, gemm
from xrlflow.ops.eval_norm import softmax
from xrlflow.ops.eval_quant import ROUNDINGS as ONNX_ROUNDINGS
from xrlflow.ops.eval_quant import SPECS as QUANTISED
from xrlflow.ops.eval_quant import Rounding, Unrounded, requantised, rounding
from xrlflow.ops.eval_spec import OpSpec, f32, integer, number, single
from xrlflow.ops.field import Array, Field, NotEvaluable


@dataclass(frozen=True, slots=True, eq=False)
class _Output:
    """Scale and zero point of an output. `like`: an input; without a zero point the output has its type."""

    field: Field
    scale: Array
    zero: Array | None
    like: Array

    def of(self, value: Array) -> Unrounded:
        return requantised(
            self.field, self.field.div(value, element(self.field, self.scale)), self.zero, self.like
        )


def _real(field: Field, x: Array, scale: Array, zero: Array | None) -> Array:
    """The numbers that quantised integers stand for, as elements of the field."""
    value = element(field, x)
    centred = value if zero is None else field.sub(value, element(field, zero))
    return field.mul(centred, element(field, scale))


def _padded(inputs: tuple[Any, ...], count: int) -> list[Any]:
    return [*inputs, *[None] * (count - len(inputs))]


def _pair(field: Field, *operands: Any) -> tuple[Array, Array, _Output]:
    """The numbers of two quantised operands, and the output's scale and zero point. `operands`: a, its scale and
    zero point; b, its scale and zero point; scale and zero point of the output.
    """
    a, a_scale, a_zero, b, b_scale, b_zero, to, to_zero = _padded(operands, 8)
    return _real(field, a, a_scale, a_zero), _real(field, b, b_scale, b_zero), _Output(field, to, to_zero, a)


def _add(field: Field, attrs: Attrs, *operands: Any) -> Unrounded:
    a, b, output = _pair(field, *operands)
    return output.of(field.add(a, b))


def _mul(field: Field, attrs: Attrs, *operands: Any) -> Unrounded:
    a, b, output = _pair(field, *operands)
    return output.of(field.mul(a, b))


def _single(field: Field, *operands: Any) -> tuple[Array, _Output]:
    """The numbers of a quantised operand, and the output's scale and zero point. `operands`: x, its scale and zero
    point; scale and zero point of the output.
    """
    x, scale, zero, to, to_zero = _padded(operands, 5)
    return _real(field, x, scale, zero), _Output(field, to, to_zero, x)


def _sigmoid(field: Field, attrs: Attrs, *operands: Any) -> Unrounded:
    x, output = _single(field, *operands)
    return output.of(field.unary("sigmoid", x))


def _leaky_relu(field: Field, attrs: Attrs, *operands: Any) -> Unrounded:
    x, output = _single(field, *operands)
    return output.of(field.unary("leaky_relu", x, number(attrs, "alpha", f32(0.01))))


def _softmax(field: Field, attrs: Attrs, *operands: Any) -> Unrounded:
    x, output = _single(field, *operands)
    axis = integer(attrs, "axis", -1)
    if integer(attrs, "opset", 13) < 13:
        rows = x.reshape(int(np.prod(x.shape[: axis % x.ndim])), -1)
        return output.of(softmax(field, rows, -1).reshape(x.shape))
    return output.of(softmax(field, x, axis))


def _global_average_pool(field: Field, attrs: Attrs, *operands: Any) -> Unrounded:
    x, output = _single(field, *operands)
    axes = tuple(range(1, x.ndim - 1)) if integer(attrs, "channels_last", 0) else tuple(range(2, x.ndim))
    return output.of(field.mean(x, axes, keepdims=True))


def _average_pool(field: Field, attrs: Attrs, *operands: Any) -> Unrounded:
    x, output = _single(field, *operands)
    if not integer(attrs, "channels_last", 0):
        return output.of(average_pool(field, attrs, x))
    return output.of(np.moveaxis(average_pool(field, attrs, np.moveaxis(x, -1, 1)), 1, -1))


def _conv(field: Field, attrs: Attrs, x: Array, *more: Array) -> Unrounded:
    if integer(attrs, "channels_last", 0):
        raise NotEvaluable("QLinearConv with the channels last")
    return ONNX_ROUNDINGS["QLinearConv"](field, attrs, x, *more)


def _concat(field: Field, attrs: Attrs, scale: Array, zero: Array, *parts: Array) -> Unrounded:
    values = [_real(field, *parts[at : at + 3]) for at in range(0, len(parts), 3)]
    return _Output(field, scale, zero, parts[0]).of(np.concatenate(values, integer(attrs, "axis", 0)))


def _where(field: Field, attrs: Attrs, condition: Array, *inputs: Array) -> Unrounded:
    to, to_zero = inputs[6:8]
    return _Output(field, to, to_zero, inputs[0]).of(
        np.where(condition, _real(field, *inputs[:3]), _real(field, *inputs[3:6]))
    )


def _product(field: Field, attrs: Attrs, *operands: Any) -> Array:
    """The sum alpha * a' * b' + bias. The bias is in units of the product of all scales. `operands`:
    a and b, each with scale and zero point, and the bias or None.
    """
    a, s, z, b, t, u, bias = operands
    if b.ndim == 2 and t.ndim == 1 and integer(attrs, "transB", 0):
        t, u = t[:, None], u.reshape(-1, 1)
    x, y = _real(field, a, s, z), _real(field, b, t, u)
    steps = None
    if bias is not None:
        scale = field.mul(
            field.mul(element(field, s), element(field, t).reshape(-1)),
            field.constant(number(attrs, "alpha", 1.0)),
        )
        steps = field.mul(element(field, bias), scale)
    return gemm(field, attrs, x, y, steps)


def _gemm(field: Field, attrs: Attrs, *inputs: Array) -> Unrounded:
    *operands, scale, zero = _padded(inputs, 9)
    unit = np.ones((), np.float32) if scale is None else scale
    return _Output(field, unit, zero, inputs[0]).of(_product(field, attrs, *operands))


def _any_gemm(field: Field, attrs: Attrs, *inputs: Array) -> Array:
    """Without a zero point of the output, the output is in floats, in units of the scale if there is one."""
    *operands, scale, zero = _padded(inputs, 9)
    if zero is None:
        value = _product(field, attrs, *operands)
        return value if scale is None else field.div(value, element(field, scale))
    return _gemm(field, attrs, *inputs).rounded(field)


def _unpacked(field: Field, packed: Array, bits: int) -> Array:
    """The numbers of `bits` bits each that the last axis of bytes holds, the lowest bits first, as elements."""
    byte = np.arange(256)
    numbers = np.stack([(byte >> at) & ((1 << bits) - 1) for at in range(0, 8, bits)], -1)
    # All numbers of a byte as one element: taking whole elements is four times as fast as taking rows.
    elements = np.ascontiguousarray(field.lift(numbers))
    of_byte = elements.view(np.dtype((np.void, elements.itemsize * elements.shape[1]))).ravel()
    return np.take(of_byte, packed).view(np.float64).reshape(*packed.shape[:-1], -1)


# Up to this many rows, products with packed weights are computed block by block, without a matrix of all weights.
_FEW = 4


def _block_by_block(field: Field, a: Array, numbers: Array, offsets: Array, factors: Array) -> Array:
    """The product of a[..,k] and numbers[n,block,position] less offsets[n,block], times factors[n,block]."""
    n, blocks, size = numbers.shape
    rows = np.zeros((a.size // a.shape[-1], blocks * size))
    rows[:, : a.shape[-1]] = a.reshape(len(rows), -1)
    rows = rows.reshape(len(rows), blocks, size)
    products = field.matmul(numbers.transpose(1, 0, 2), rows.transpose(1, 2, 0))  # [block, n, row]
    sums = field.sum(rows, (2,)).T[:, None, :]
    less = field.sub(products, field.mul(offsets.T[..., None], sums))
    y = field.sum(field.mul(less, factors.T[..., None]), (0,))
    return y.T.reshape(*a.shape[:-1], n)


def _matmul_bits(
    field: Field,
    attrs: Attrs,
    a: Array,
    b: Array,
    scales: Array,
    zeros: Array | None = None,
    groups: Array | None = None,
    bias: Array | None = None,
) -> Array:
    """The product of a[..,k] and a matrix [k,n] whose columns are packed in blocks, each with a scale.

    `groups`: the block whose scale and zero point each row has; by default its own.
    """
    if integer(attrs, "weight_prepacked", 0):
        raise NotEvaluable("MatMulNBits with weights in the layout of a kernel")
    k, n, bits = (integer(attrs, name, 4) for name in ("K", "N", "bits"))
    block = integer(attrs, "block_size", 32)
    blocks = -(-k // block)
    numbers = _unpacked(field, b.reshape(n, blocks, -1), bits)
    if zeros is None:
        offsets = field.lift(np.full((n, blocks), 1 << (bits - 1)))
    elif zeros.dtype == np.uint8:
        if groups is not None:  # ONNX Runtime 1.31 then takes the default
            raise NotEvaluable("MatMulNBits with g_idx and packed zero points")
        offsets = _unpacked(field, zeros.reshape(n, -1), bits)[:, :blocks]
    else:
        offsets = element(field, zeros).reshape(n, blocks)
    factors = element(field, scales).reshape(n, blocks)
    finite = all(np.isfinite(x).all() for x in (a, offsets, factors))  # else inf - inf would be NaN
    if groups is None and finite and a.shape[-1] == k and 0 < a.size <= _FEW * k:
        y = _block_by_block(field, a, numbers, offsets, factors)
        return y if bias is None else field.add(y, bias)
    if groups is None:
        offsets, factors = offsets[..., None], factors[..., None]
    else:
        numbers, own = numbers.reshape(n, -1)[:, :k], groups.reshape(-1)[:k]
        offsets, factors = offsets[:, own], factors[:, own]
    weight = field.mul(field.sub(numbers, offsets), factors).reshape(n, -1)[:, :k]
    y = field.matmul(a, weight.T)
    return y if bias is None else field.add(y, bias)


_ROUNDINGS: Mapping[str, Rounding] = {
    "QLinearAdd": _add,
    "QLinearAveragePool": _average_pool,
    "QLinearConcat": _concat,
    "QLinearConv": _conv,
    "QLinearGlobalAveragePool": _global_average_pool,
    "QLinearLeakyRelu": _leaky_relu,
    "QLinearMul": _mul,
    "QLinearSigmoid": _sigmoid,
    "QLinearSoftmax": _softmax,
    "QLinearWhere": _where,
    "QuantizeLinear": ONNX_ROUNDINGS["QuantizeLinear"],
}
_GEMM = "com.microsoft::QGemm"

ROUNDINGS: Mapping[str, Rounding] = {
    **ONNX_ROUNDINGS,
    **{f"com.microsoft::{op}": find for op, find in _ROUNDINGS.items()},
    _GEMM: _gemm,
}
"""Every operator whose only output is rounded to the steps of a scale that it is given."""

SPECS: dict[str, OpSpec] = {
    **{f"com.microsoft::{op}": rounding(f"com.microsoft::{op}", find) for op, find in _ROUNDINGS.items()},
    "com.microsoft::DequantizeLinear": OpSpec(
        "com.microsoft::DequantizeLinear", QUANTISED["DequantizeLinear"].evaluate, "polynomial"
    ),
    "com.microsoft::MatMulNBits": OpSpec("com.microsoft::MatMulNBits", single(_matmul_bits), "polynomial"),
    _GEMM: OpSpec(_GEMM, single(_any_gemm), "uninterpreted"),
}
