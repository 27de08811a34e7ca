"""Evaluation of the elementwise operators: arithmetic, activations, comparisons, logic, bits, casts."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

from xrlflow.ir import FLOATS, INTEGERS, Attrs, DType
from xrlflow.ops.eval_spec import (
    Evaluate,
    Inputs,
    OpSpec,
    f32,
    integer,
    number,
    single,
    string,
    table,
)
from xrlflow.ops.field import Array, Field, NotEvaluable
from xrlflow.ops.tensors import numpy_dtype


def _unary(name: str, *defaults: tuple[str, float]) -> Evaluate:
    """Evaluation by a function that the field knows by name. Its parameters are attributes with these defaults."""
    if not defaults:

        def plain(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
            return (field.unary(name, inputs[0]),)

        return plain
    rounded = tuple((attribute, f32(value)) for attribute, value in defaults)

    def evaluate(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
        return (field.unary(name, inputs[0], *(number(attrs, a, v) for a, v in rounded)),)

    return evaluate


def _numpy(function: Callable[..., Any]) -> Evaluate:
    """Evaluation by a NumPy function that does not depend on the field."""

    def evaluate(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
        return (function(*inputs),)

    return evaluate


def _arithmetic(name: str) -> Evaluate:
    def evaluate(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
        return (getattr(field, name)(*inputs),)

    return evaluate


def _compared(name: str, swapped: bool = False) -> Evaluate:
    def evaluate(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
        a, b = inputs
        return (field.compare(name, b, a) if swapped else field.compare(name, a, b),)

    return evaluate


def _variadic(name: str) -> Evaluate:
    def evaluate(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
        return (reduce(getattr(field, name), inputs),)

    return evaluate


def _mean(field: Field, attrs: Attrs, *inputs: Array) -> Array:
    total: Array = reduce(field.add, inputs)
    return field.div(total, field.constant(len(inputs)))


def _mod(field: Field, attrs: Attrs, a: Array, b: Array) -> Array:
    return field.binary("fmod" if integer(attrs, "fmod", 0) else "mod", a, b)


def _pow(field: Field, attrs: Attrs, a: Array, b: Array) -> Array:
    """The result has the base's type. An integer base with an exponent of another type is computed in float64."""
    if a.dtype.kind in "iu":
        if b.dtype.kind in "iu" and (b.size == 0 or b.min() >= 0):
            return np.power(a, b).astype(a.dtype, copy=False)
        return np.power(a.astype(np.float64), b).astype(a.dtype)
    return field.binary("pow", a, b)


def _shift(field: Field, attrs: Attrs, a: Array, b: Array) -> Array:
    """Shifting by the type's width or more gives zero, or -1 for negative numbers that are shifted right."""
    bits = a.dtype.itemsize * 8
    left = string(attrs, "direction", "") == "LEFT"
    shifted = (np.left_shift if left else np.right_shift)(a, np.minimum(b, bits - 1))
    if left or a.dtype.kind == "u":
        shifted = np.where(b < bits, shifted, 0)
    return shifted.astype(a.dtype)


def _clip(field: Field, attrs: Attrs, x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    if low is not None:
        x = field.maximum(x, low)
    if high is not None:
        x = field.minimum(x, high)
    return x


def _reciprocal(field: Field, attrs: Attrs, x: Array) -> Array:
    return field.div(field.constant(1), x)


def _hard_swish(field: Field, attrs: Attrs, x: Array) -> Array:
    return field.mul(x, field.unary("hard_sigmoid", x, f32(1 / 6), 0.5))


def _mish(field: Field, attrs: Attrs, x: Array) -> Array:
    return field.mul(x, field.unary("tanh", field.unary("softplus", x)))


def _softsign(field: Field, attrs: Attrs, x: Array) -> Array:
    return field.div(x, field.add(field.constant(1), field.unary("abs", x)))


def _gelu(field: Field, attrs: Attrs, x: Array) -> Array:
    return field.unary("gelu_tanh" if string(attrs, "approximate", "none") == "tanh" else "gelu", x)


def _is_inf(field: Field, attrs: Attrs, x: Array) -> Array:
    result = np.isinf(x)
    if not integer(attrs, "detect_positive", 1):
        result &= ~(x > 0)
    if not integer(attrs, "detect_negative", 1):
        result &= ~(x < 0)
    return result


def _where(field: Field, attrs: Attrs, condition: Array, a: Array, b: Array) -> Array:
    return np.where(condition, a, b)


def _same(field: Field, attrs: Attrs, x: Array, *rest: Array) -> Array:
    return x


def _dropout(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
    """Dropout in inference: the input, and a mask of True."""
    x = inputs[0]
    assert x is not None
    training = inputs[2] if len(inputs) > 2 else None
    if training is not None and bool(training):
        ratio = inputs[1] if len(inputs) > 1 else None
        if ratio is None or float(ratio) != 0.0:
            raise NotEvaluable("Dropout that drops")
    return (x,) if outputs == 1 else (x, np.ones(x.shape, dtype=np.bool_))


# --- casts ---

# Formats that NumPy lacks. Arrays of these formats keep their dtype; `widen` converts them for arithmetic.
NARROW_FLOAT: dict[DType, np.dtype[Any]] = {
    dtype: numpy_dtype(dtype)
    for dtype in (
        DType.FLOAT8E4M3FN,
        DType.FLOAT8E4M3FNUZ,
        DType.FLOAT8E5M2,
        DType.FLOAT8E5M2FNUZ,
        DType.FLOAT4E2M1,
    )
}
NARROW_INTEGER: dict[DType, np.dtype[Any]] = {
    dtype: numpy_dtype(dtype) for dtype in (DType.INT4, DType.UINT4, DType.INT2, DType.UINT2)
}
WIDE_INTEGER: dict[DType, np.dtype[Any]] = {dtype: numpy_dtype(dtype) for dtype in sorted(INTEGERS)}
_NARROW_FORMATS = {
    dtype: number_ for number_, dtype in (NARROW_FLOAT | NARROW_INTEGER | WIDE_INTEGER).items()
}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def narrow_float(dtype: np.dtype[Any]) -> DType | None:
    """The float8 or float4 format that a dtype stands for, or None."""
    dtype_ = _NARROW_FORMATS.get(dtype)
    return dtype_ if dtype_ in NARROW_FLOAT else None


def widen(x: Array) -> Array:
    """Narrow floats as float64, integers of less than eight bits as int8, and other arrays as they are."""
    narrow = _NARROW_FORMATS.get(x.dtype)
    if narrow in NARROW_FLOAT:
        return x.astype(np.float64)
    return x.astype(np.int8) if narrow in NARROW_INTEGER else x


def promote(field: Field, array: Array) -> Array:
    """Arrays of float16, bfloat16, float32 and float64 as elements of the field; others as they are."""
    dtype = array.dtype
    if dtype.kind == "f" and dtype.itemsize > 1:  # float8_e5m2 has kind "f", too
        return field.lift(array)
    return field.lift(array.astype(np.float64)) if dtype == _BFLOAT16 else array


def element(field: Field, array: Array) -> Array:
    """Integers, booleans or floats of any format as elements of the field; elements as they are."""
    return (
        array if array.dtype == np.float64 else field.lift(array if array.dtype.kind == "f" else widen(array))
    )


def round_narrow(x: Array, to: DType, saturate: bool) -> Array:
    """Floats rounded to a float8 or float4 format.

    Numbers beyond the format's range, and infinities, become the greatest number if `saturate`, else infinity or NaN.
    """
    dtype = NARROW_FLOAT[to]
    if saturate or to == DType.FLOAT4E2M1:
        top = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
        x = np.clip(x, -top, top)
    return x.astype(np.float32).astype(dtype)


def _wrap(x: Array, to: DType) -> Array:
    """Integers reduced to a format of a few bits, in two's complement."""
    bits = 4 if to in (DType.INT4, DType.UINT4) else 2
    low = x.astype(np.int64) & ((1 << bits) - 1)
    if to in (DType.INT4, DType.INT2):
        low = np.where(low >= 1 << (bits - 1), low - (1 << bits), low)
    return low.astype(np.int8).astype(NARROW_INTEGER[to])


def cast(field: Field, x: Array, to: DType, saturate: bool = True) -> Array:
    """An array converted to another element type. What happens to floats is described in `evaluate_node`.

    Raises NotEvaluable for strings and complex numbers.
    """
    x = promote(field, widen(x))
    kind = x.dtype.kind
    if kind not in "fiub":
        raise NotEvaluable(f"Cast from {x.dtype}")
    if to in FLOATS:
        return field.narrow(x if kind == "f" else field.lift(x), to)
    if to == DType.BOOL:
        return ~field.compare("equal", x, 0) if kind != "b" else x
    if to in WIDE_INTEGER:
        dtype = WIDE_INTEGER[to]
        return field.truncate(x, dtype) if kind == "f" else x.astype(dtype, copy=False)
    if to in NARROW_INTEGER:
        return _wrap(field.truncate(x, np.dtype(np.int64)) if kind == "f" else x, to)
    if to in NARROW_FLOAT and field.real:
        return round_narrow(field.lift(x), to, saturate)
    raise NotEvaluable(f"Cast to {to.name}")


def _cast(field: Field, attrs: Attrs, x: Array) -> Array:
    return cast(field, x, DType(integer(attrs, "to", 0)), bool(integer(attrs, "saturate", 1)))


def _dtype_of(dtype: np.dtype[Any]) -> DType:
    """The element type of an array. Here float16, bfloat16, float32 and float64 all count as DOUBLE."""
    if dtype.kind == "f" or dtype == _BFLOAT16:
        return DType.DOUBLE
    if dtype.kind == "b":
        return DType.BOOL
    if dtype not in _NARROW_FORMATS:
        raise NotEvaluable(f"element type {dtype}")
    return _NARROW_FORMATS[dtype]


def _cast_like(field: Field, attrs: Attrs, x: Array, like: Array) -> Array:
    return cast(field, x, _dtype_of(like.dtype), bool(integer(attrs, "saturate", 1)))


SPECS: dict[str, OpSpec] = {
    **table(
        "polynomial",
        Add=_arithmetic("add"),
        Sub=_arithmetic("sub"),
        Mul=_arithmetic("mul"),
        Div=_arithmetic("div"),
        Neg=_arithmetic("neg"),
        Sum=_variadic("add"),
        Mean=single(_mean),
        Reciprocal=single(_reciprocal),
    ),
    **table(
        "uninterpreted",
        Abs=_unary("abs"),
        Acos=_unary("acos"),
        Acosh=_unary("acosh"),
        Asin=_unary("asin"),
        Asinh=_unary("asinh"),
        Atan=_unary("atan"),
        Atanh=_unary("atanh"),
        Ceil=_unary("ceil"),
        Celu=_unary("celu", ("alpha", 1.0)),
        Clip=single(_clip),
        Cos=_unary("cos"),
        Cosh=_unary("cosh"),
        Elu=_unary("elu", ("alpha", 1.0)),
        Erf=_unary("erf"),
        Exp=_unary("exp"),
        Floor=_unary("floor"),
        Gelu=single(_gelu),
        HardSigmoid=_unary("hard_sigmoid", ("alpha", 0.2), ("beta", 0.5)),
        HardSwish=single(_hard_swish),
        LeakyRelu=_unary("leaky_relu", ("alpha", 0.01)),
        Log=_unary("log"),
        Max=_variadic("maximum"),
        Min=_variadic("minimum"),
        Mish=single(_mish),
        Mod=single(_mod),
        Pow=single(_pow),
        PRelu=single(lambda field, attrs, x, slope: field.binary("prelu", x, slope)),
        Relu=_unary("relu"),
        Round=_unary("round"),
        Selu=_unary("selu", ("alpha", 1.67326319217681884765625), ("gamma", 1.05070102214813232421875)),
        Shrink=_unary("shrink", ("bias", 0.0), ("lambd", 0.5)),
        Sigmoid=_unary("sigmoid"),
        Sign=_unary("sign"),
        Sin=_unary("sin"),
        Sinh=_unary("sinh"),
        Softplus=_unary("softplus"),
        Softsign=single(_softsign),
        Sqrt=_unary("sqrt"),
        Tan=_unary("tan"),
        Tanh=_unary("tanh"),
        ThresholdedRelu=_unary("thresholded_relu", ("alpha", 1.0)),
    ),
    **table(
        "movement",
        Cast=single(_cast),
        CastLike=single(_cast_like),
        Dropout=_dropout,
        Identity=single(_same),
        Where=single(_where),
        Equal=_compared("equal"),
    ),
    **table(
        "integer",
        And=_numpy(np.logical_and),
        Or=_numpy(np.logical_or),
        Xor=_numpy(np.logical_xor),
        Not=_numpy(np.logical_not),
        BitwiseAnd=_numpy(np.bitwise_and),
        BitwiseOr=_numpy(np.bitwise_or),
        BitwiseXor=_numpy(np.bitwise_xor),
        BitwiseNot=_numpy(np.bitwise_not),
        BitShift=single(_shift),
    ),
    **table(
        "numeric",
        Greater=_compared("less", swapped=True),
        GreaterOrEqual=_compared("less_equal", swapped=True),
        Less=_compared("less"),
        LessOrEqual=_compared("less_equal"),
        IsInf=single(_is_inf),
        IsNaN=_numpy(np.isnan),
    ),
}
