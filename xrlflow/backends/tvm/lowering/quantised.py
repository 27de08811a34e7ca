"""QuantizeLinear and DequantizeLinear, with the parameters that they usually have: constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from xrlflow.backends.tvm.toolchain.imported import Imported
from xrlflow.backends.tvm.toolchain.reading import constant, known_value

_LIMITS = {"int8": (-128.0, 127.0), "uint8": (0.0, 255.0)}
# The types by ONNX's numbers, and the default.
_KINDS = {0: "uint8", int(TensorProto.UINT8): "uint8", int(TensorProto.INT8): "int8"}


def quantized(node: Imported) -> Any:
    """`clip(round(x / scale) + zero)` as bytes, in float32, in which all these integers are exact. NaN becomes the
    least byte. Constants are computed here."""
    from tvm import relax

    x = node.inputs[0]
    scale, zero = _parameters(node, x)
    kind = _KINDS.get(int(node.attributes.get("output_dtype", 0)), "other")
    if node.given(2) is not None:
        kind = str(node.inputs[2].ty.dtype)
    if not scale.all():
        raise node.refused("with a scale of 0")
    if kind not in _LIMITS or str(x.ty.dtype) != "float32":
        raise node.refused("of other types than float32 and bytes")
    constants = known_value(x)
    if constants is not None:
        with np.errstate(all="ignore"):
            rounded = np.clip(np.rint(constants / scale) + zero, *_LIMITS[kind])
        return constant(np.nan_to_num(rounded, nan=_LIMITS[kind][0]).astype(kind))
    low, high = (relax.const(limit, "float32") for limit in _LIMITS[kind])
    steps = node.emit(relax.op.round(node.emit(relax.op.divide(x, constant(scale)))))
    if zero.any():
        steps = node.emit(relax.op.add(steps, constant(zero)))
    # These return their second operand if the first is NaN.
    steps = node.emit(relax.op.minimum(node.emit(relax.op.maximum(steps, low)), high))
    return node.emit(relax.op.astype(steps, kind))


def dequantized(node: Imported) -> Any:
    """`(x - zero) * scale` in float32, in which the difference of two bytes is exact. Constants are computed here."""
    from tvm import relax

    x = node.inputs[0]
    scale, zero = _parameters(node, x)
    weights = known_value(x)
    if weights is not None:
        difference = weights.astype(np.int64) - zero.astype(np.int64)
        return constant(difference.astype(np.float32) * scale)
    if str(x.ty.dtype) not in _LIMITS:
        raise node.refused("of other types than bytes")
    result = node.emit(relax.op.astype(x, "float32"))
    if zero.any():
        result = node.emit(relax.op.subtract(result, constant(zero)))
    return node.emit(relax.op.multiply(result, constant(scale)))


def _parameters(node: Imported, x: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The scale and the zero point, shaped so that they are broadcast along the axis. Raises BackendError if they are
    computed, if they belong to blocks, or if the scale is not of float32."""
    given = [node.inputs[1], node.given(2)]
    arrays = [None if each is None else known_value(each) for each in given]
    scale, zero = arrays
    if scale is None or (zero is None and given[1] is not None):
        raise node.refused("with parameters that are computed")
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
