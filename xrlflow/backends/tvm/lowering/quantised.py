"""QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from xrlflow.backends.tvm.toolchain.imported import Imported
from xrlflow.backends.tvm.toolchain.reading import constant, known_value, sizes

_LIMITS = {"int8": (-128.0, 127.0), "uint8": (0.0, 255.0)}
# The types by ONNX's numbers, and the default.
_KINDS = {0: "uint8", int(TensorProto.UINT8): "uint8", int(TensorProto.INT8): "int8"}


def quantized(node: Imported) -> Any:
    """`clip(round(x / scale) + zero)` as bytes, in float32, in which all these integers are exact. NaN becomes the
    least byte. Constants are computed here."""
    x = node.inputs[0]
    scale, zero = _parameters(node, x)
    kind = _KINDS.get(int(node.attributes.get("output_dtype", 0)), "other")
    if node.given(2) is not None:
        kind = str(node.inputs[2].ty.dtype)
    if isinstance(scale, np.ndarray) and not scale.all():
        raise node.refused("with a scale of 0")
    if kind not in _LIMITS or str(x.ty.dtype) != "float32":
        raise node.refused("of other types than float32 and bytes")
    constants = known_value(x)
    if constants is not None and _are_constant(scale, zero):
        with np.errstate(all="ignore"):
            rounded = np.clip(np.rint(constants / scale) + zero, *_LIMITS[kind])
        return constant(np.nan_to_num(rounded, nan=_LIMITS[kind][0]).astype(kind))
    return _bytes_of(node, x, _operand(scale), None if _is_zero(zero) else _operand(zero), kind)


def _bytes_of(node: Imported, x: Any, scale: Any, zero: Any | None, kind: str) -> Any:
    """`clip(round(x / scale) + zero)` as bytes (zero: float32; None stands for 0)."""
    from tvm import relax

    steps = node.emit(relax.op.round(node.emit(relax.op.divide(x, scale))))
    if zero is not None:
        steps = node.emit(relax.op.add(steps, zero))
    low, high = (relax.const(limit, "float32") for limit in _LIMITS[kind])
    # These return their second operand if the first is NaN.
    steps = node.emit(relax.op.minimum(node.emit(relax.op.maximum(steps, low)), high))
    return node.emit(relax.op.astype(steps, kind))


def dynamically_quantized(node: Imported) -> Any:
    """The bytes, scale and zero point of a tensor, by its range extended to include 0. All operators and their order
    are those of ONNX Runtime, so that equal finite numbers give equal bits; a range without extent has the scale 1. If
    there is a NaN, ONNX Runtime's result depends on its place, and ours may differ."""
    from tvm import relax

    x = node.inputs[0]
    shape = sizes(x, "float32")
    if shape is None or 0 in shape:
        raise node.refused("of no elements, or of another type than float32")
    none, one, most = (relax.const(value, "float32") for value in (0.0, 1.0, 255.0))
    # Of minimum and maximum, NaN remains if it is the second operand: in the range, but not in the zero point.
    low = node.emit(relax.op.minimum(none, node.emit(relax.op.min(x))))
    high = node.emit(relax.op.maximum(none, node.emit(relax.op.max(x))))
    extent = node.emit(relax.op.subtract(high, low))
    step = node.emit(relax.op.divide(extent, most))
    scale = node.emit(relax.op.where(node.emit(relax.op.equal(extent, none)), one, step))
    below = node.emit(relax.op.round(node.emit(relax.op.divide(node.emit(relax.op.negative(low)), scale))))
    zero = node.emit(relax.op.maximum(node.emit(relax.op.minimum(below, most)), none))
    result = _bytes_of(node, x, scale, zero, "uint8")
    return relax.Tuple([result, scale, node.emit(relax.op.astype(zero, "uint8"))])


def dequantized(node: Imported) -> Any:
    """`(x - zero) * scale` in float32, in which the difference of two bytes is exact. Constants are computed here."""
    from tvm import relax

    x = node.inputs[0]
    scale, zero = _parameters(node, x)
    weights = known_value(x)
    if weights is not None and _are_constant(scale, zero):
        difference = weights.astype(np.int64) - zero.astype(np.int64)
        return constant(difference.astype(np.float32) * scale)
    if str(x.ty.dtype) not in _LIMITS:
        raise node.refused("of other types than bytes")
    result = node.emit(relax.op.astype(x, "float32"))
    if not _is_zero(zero):
        result = node.emit(relax.op.subtract(result, _operand(zero)))
    if isinstance(scale, np.ndarray) and (scale == 1).all():
        return result
    return node.emit(relax.op.multiply(result, _operand(scale)))


def _are_constant(*parameters: Any) -> bool:
    return all(isinstance(each, np.ndarray) for each in parameters)


def _is_zero(parameter: Any) -> bool:
    return isinstance(parameter, np.ndarray) and not parameter.any()


def _operand(parameter: Any) -> Any:
    return constant(parameter) if isinstance(parameter, np.ndarray) else parameter


def _parameters(node: Imported, x: Any) -> tuple[Any, Any]:
    """The scale and the zero point in float32: arrays, shaped so that they are broadcast along the axis, or scalars of
    Relax that are computed.

    Raises BackendError if they belong to blocks, if a list of them is computed, or if the scale is not of float32.
    """
    given = [node.inputs[1], node.given(2)]
    scale, zero = (None if each is None else known_value(each) for each in given)
    if scale is None or (zero is None and given[1] is not None):
        none = np.zeros((), np.float32)
        return _computed(node, given[0]), none if given[1] is None else _computed(node, given[1])
    if zero is None:
        zero = np.zeros(scale.shape, np.float32)
    blocks = scale.ndim > 1 or node.attributes.get("block_size", 0)
    if scale.dtype != np.float32 or blocks or scale.size != zero.size:
        raise node.refused("with a scale of another type, or for blocks")
    if scale.size == 1:
        return scale.reshape(()), zero.astype(np.float32).reshape(())
    rank = len(x.ty.shape.values)
    shape = [1] * rank
    shape[int(node.attributes.get("axis", 1))] = -1
    return scale.reshape(shape), zero.astype(np.float32).reshape(shape)


def _computed(node: Imported, parameter: Any) -> Any:
    """A parameter that is one number, which may be computed, in float32: an array or a scalar of Relax."""
    from tvm import relax

    if sizes(parameter) not in ((), (1,)) or str(parameter.ty.dtype) not in ("float32", *_LIMITS):
        raise node.refused("with computed parameters, of which one is a list or of another type")
    array = known_value(parameter)
    if array is not None:
        return array.astype(np.float32).reshape(())
    if sizes(parameter):
        parameter = node.emit(relax.op.reshape(parameter, ()))
    return node.emit(relax.op.astype(parameter, "float32"))
