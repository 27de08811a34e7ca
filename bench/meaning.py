"""What a model means: its numbers in float64 and its integers exactly, by onnx's reference evaluator.

    outputs = meaning(onnx.load(path), feeds)

It uses nothing of the product, so what the product says about exactness can be checked by it. Floats of all widths are
float64 throughout: no sum is rounded, and none becomes float16. Quantisation rounds what float64 gives. Convolutions
and pools go through PyTorch, whose sums of integers in float64 are exact (they stay below 2^53).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

Array = np.ndarray[Any, Any]
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
_MICROSOFT = "com.microsoft"


class NotEvaluated(Exception):
    """The evaluator has no such operator, or not in this form. The message names it."""


def meaning(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """The outputs. Raises NotEvaluated."""
    wide = widened(model)
    given = {n: v.astype(np.float64) if np.issubdtype(v.dtype, np.floating) else v for n, v in feeds.items()}
    known = {operator.__name__ for operator in OPERATORS if operator.op_domain == _MICROSOFT}
    for node in wide.graph.node:
        if node.domain == _MICROSOFT and node.op_type not in known:
            raise NotEvaluated(f"no evaluation of {node.op_type}")
    return list(ReferenceEvaluator(wide, new_ops=list(OPERATORS)).run(None, given))


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which every float is float64."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _widen(copy.graph)
    _sort(copy.graph)
    return copy


def _sort(graph: onnx.GraphProto) -> None:
    """Put nodes behind those that they read, where a tool wrote them in another order."""
    made = {name for node in graph.node for name in node.output}
    left, done, ordered = list(graph.node), set[str](), []
    while left:
        ready = [n for n in left if all(name in done or name not in made for name in n.input)]
        if not ready:
            raise NotEvaluated("a cycle")
        ordered += ready
        done |= {name for node in ready for name in node.output}
        left = [n for n in left if not done.issuperset(n.output)]
    del graph.node[:]
    graph.node.extend(ordered)


def _widen(graph: onnx.GraphProto) -> None:
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _FLOATS:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            _widen_attribute(node, attribute)


def _widen_attribute(node: onnx.NodeProto, attribute: AttributeProto) -> None:
    if attribute.type == AttributeProto.TENSOR:
        _widen_tensor(attribute.t)
    elif attribute.type == AttributeProto.GRAPH:
        _widen(attribute.g)
    elif node.op_type == "Cast" and attribute.name == "to" and attribute.i in _FLOATS:
        attribute.i = TensorProto.DOUBLE
    elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
        values = attribute.f if attribute.name == "value_float" else list(attribute.floats)
        tensor = numpy_helper.from_array(np.asarray(values, np.float64))
        attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _FLOATS:
        values = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


# ---------------------------------------------------------------- arithmetic


def quantised(x: Array, scale: Array, zero: Array, axis: int = 1) -> Array:
    """The integers of x: rounded to even, and clipped to the zero point's type."""
    scale, zero = _along(scale, x, axis), _along(zero, x, axis)
    info = np.iinfo(zero.dtype)
    found: Array = np.clip(np.rint(x / scale) + zero.astype(np.float64), info.min, info.max)
    return found.astype(zero.dtype)


def dequantised(x: Array, scale: Array, zero: Array | None, axis: int = 1, block: int = 0) -> Array:
    """The numbers that the integers x stand for."""
    if block:
        scale = np.repeat(scale, block, axis).take(range(x.shape[axis]), axis)
        zero = None if zero is None else np.repeat(zero, block, axis).take(range(x.shape[axis]), axis)
    else:
        scale, zero = _along(scale, x, axis), None if zero is None else _along(zero, x, axis)
    return (x.astype(np.float64) - (0 if zero is None else zero.astype(np.float64))) * scale


def _along(values: Array, x: Array, axis: int) -> Array:
    """One value, or one for each index of an axis, in a shape that broadcasts over x."""
    if np.size(values) == 1:
        return np.reshape(values, ())
    return np.reshape(values, [-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _padded(x: Array, window: Window, fill: float) -> torch.Tensor:
    """x with its spatial axes padded."""
    rank = x.ndim - 2
    pads = window.pads_of(x.shape[2:])
    flat = [p for axis in reversed(range(rank)) for p in (pads[axis], pads[axis + rank])]
    return torch.nn.functional.pad(torch.tensor(x, dtype=torch.float64), flat, value=fill)


class Window:
    """The attributes of convolutions and pools over spatial axes."""

    def __init__(self, kernel: Sequence[int], attributes: Mapping[str, Any]) -> None:
        rank = len(kernel)
        self.kernel = list(kernel)
        self.strides = list(attributes.get("strides") or [1] * rank)
        self.dilations = list(attributes.get("dilations") or [1] * rank)
        self.pads = list(attributes.get("pads") or [0] * 2 * rank)
        self.auto = attributes.get("auto_pad") or "NOTSET"
        self.ceil = bool(attributes.get("ceil_mode"))
        if self.ceil and any(self.pads):
            raise NotEvaluated("a pool with ceil_mode and padding")

    def pads_of(self, sizes: Sequence[int]) -> list[int]:
        """Before each axis, then behind each."""
        if self.auto in ("NOTSET", "VALID"):
            return self.pads if self.auto == "NOTSET" else [0] * len(self.pads)
        before, behind = [], []
        for size, kernel, stride, dilation in zip(
            sizes, self.kernel, self.strides, self.dilations, strict=True
        ):
            total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
            low = total // 2 if self.auto == "SAME_UPPER" else total - total // 2
            before.append(low)
            behind.append(total - low)
        return before + behind


def convolved(x: Array, w: Array, attributes: Mapping[str, Any]) -> Array:
    """A convolution in float64, which is exact for integers. Padding has zeros."""
    window = Window(w.shape[2:], attributes)
    convolve = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[
        w.ndim - 3
    ]
    weights = torch.tensor(w, dtype=torch.float64)
    found = convolve(
        _padded(x, window, 0.0),
        weights,
        stride=window.strides,
        dilation=window.dilations,
        groups=attributes.get("group") or 1,
    )
    return np.asarray(found.numpy())


def _shifted(x: Array, zero: Array | None, axis: int) -> Array:
    wide = x.astype(np.float64)
    return wide if zero is None else wide - _along(zero, x, axis).astype(np.float64)


# ---------------------------------------------------------------- operators


class _Operator(OpRun):
    """One whose attributes come as a dictionary."""

    op_domain = ""

    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in self.onnx_node.attribute}
        plain = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}
        found = self.compute(plain, *args)
        return found if isinstance(found, tuple) else (found,)

    def _run(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        raise NotImplementedError  # `run` does it

    def compute(self, attributes: Mapping[str, Any], *args: Any) -> Any:
        raise NotImplementedError


class Conv(_Operator):
    def compute(self, attributes: Mapping[str, Any], x: Array, w: Array, b: Array | None = None) -> Any:
        y = convolved(x, w, attributes)
        return y if b is None else y + _along(b, y, 1)


class MaxPool(_Operator):
    def compute(self, attributes: Mapping[str, Any], x: Array) -> Any:
        window = Window(attributes["kernel_shape"], attributes)
        pool = (torch.nn.functional.max_pool1d, torch.nn.functional.max_pool2d)[x.ndim - 3]
        found = pool(
            _padded(x, window, -np.inf),
            window.kernel,
            stride=window.strides,
            dilation=window.dilations,
            ceil_mode=window.ceil,
        )
        return found.numpy().astype(x.dtype)


class Resize(_Operator):
    def compute(self, attributes: Mapping[str, Any], x: Array, *rest: Array | None) -> Any:
        scales, sizes = (*rest, None, None, None)[1:3]
        if sizes is None:
            sizes = np.floor(np.asarray(x.shape) * _or(scales, 1)).astype(np.int64)
        mode = (
            attributes.get("mode", "nearest"),
            attributes.get("coordinate_transformation_mode", "half_pixel"),
        )
        if x.ndim != 4 or mode not in (("nearest", "asymmetric"), ("linear", "half_pixel")):
            raise NotEvaluated(f"Resize by {' and '.join(mode)}")
        by = "nearest" if mode[0] == "nearest" else "bilinear"
        size = [int(n) for n in sizes[2:]]
        return torch.nn.functional.interpolate(torch.tensor(x), size, mode=by).numpy()


class GatherElements(_Operator):
    """onnx's own takes 64 elements at most."""

    def compute(self, attributes: Mapping[str, Any], x: Array, indices: Array) -> Any:
        return np.take_along_axis(x, indices, attributes.get("axis", 0))


class Erf(_Operator):
    def compute(self, attributes: Mapping[str, Any], x: Array) -> Any:
        return torch.erf(torch.tensor(x)).numpy()


class QuantizeLinear(_Operator):
    def compute(
        self, attributes: Mapping[str, Any], x: Array, scale: Array, zero: Array | None = None
    ) -> Any:
        if attributes.get("block_size") or attributes.get("output_dtype"):
            raise NotEvaluated("QuantizeLinear with block_size or output_dtype")
        return quantised(
            x, scale, np.asarray(0, np.uint8) if zero is None else zero, attributes.get("axis", 1)
        )


class DequantizeLinear(_Operator):
    def compute(
        self, attributes: Mapping[str, Any], x: Array, scale: Array, zero: Array | None = None
    ) -> Any:
        return dequantised(x, scale, zero, attributes.get("axis", 1), attributes.get("block_size", 0))


class DynamicQuantizeLinear(_Operator):
    def compute(self, attributes: Mapping[str, Any], x: Array) -> Any:
        low, high = min(x.min(), 0.0), max(x.max(), 0.0)
        scale = np.asarray((high - low) / 255 if high > low else 1, np.float64)
        zero = np.asarray(np.clip(np.rint(-low / scale), 0, 255), np.uint8)
        return quantised(x, scale, zero), scale, zero


class MatMulInteger(_Operator):
    def compute(
        self,
        attributes: Mapping[str, Any],
        a: Array,
        b: Array,
        az: Array | None = None,
        bz: Array | None = None,
    ) -> Any:
        found = _shifted(a, az, a.ndim - 2) @ _shifted(b, bz, b.ndim - 1)
        return np.rint(found).astype(np.int32)


class ConvInteger(_Operator):
    def compute(
        self,
        attributes: Mapping[str, Any],
        x: Array,
        w: Array,
        xz: Array | None = None,
        wz: Array | None = None,
    ) -> Any:
        return np.rint(convolved(_shifted(x, xz, 1), _shifted(w, wz, 0), attributes)).astype(np.int32)


class QLinearConv(_Operator):
    def compute(self, attributes: Mapping[str, Any], *args: Any) -> Any:
        x, xs, xz, w, ws, wz, ys, yz, b = (*args, None)[:9]
        y = convolved(_shifted(x, xz, 1), _shifted(w, wz, 0), attributes)
        if b is not None:
            y = y + _along(b, y, 1)
        return quantised(y * xs * _along(ws, y, 1), ys, yz)


class MatMulNBits(_Operator):
    op_domain = _MICROSOFT

    def compute(self, attributes: Mapping[str, Any], a: Array, b: Array, scales: Array, *rest: Any) -> Any:
        zeros, groups, bias = (*rest, None, None, None)[:3]
        if attributes.get("bits", 4) != 4 or groups is not None:
            raise NotEvaluated("MatMulNBits of other widths than 4, or with groups")
        k, n, block = attributes["K"], attributes["N"], attributes["block_size"]
        values = _nibbles(b.reshape(n, -1)).astype(np.float64)
        blocks = values.shape[1] // block
        if zeros is None:
            centre: Any = 8.0
        elif zeros.dtype == np.uint8:
            centre = _nibbles(zeros.reshape(n, -1))[:, :blocks, None].astype(np.float64)
        else:
            centre = zeros.reshape(n, blocks, 1)
        weights = (values.reshape(n, blocks, block) - centre) * scales.reshape(n, blocks, 1)
        y = a @ weights.reshape(n, -1)[:, :k].T
        return y if bias is None else y + bias


def _nibbles(packed: Array) -> Array:
    """[n, bytes] to [n, 2 * bytes], the lower half of a byte first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


class QGemm(_Operator):
    op_domain = _MICROSOFT

    def compute(self, attributes: Mapping[str, Any], *args: Any) -> Any:
        a, a_scale, az, b, bs, bz, c, ys, yz = (*args, None, None, None)[:9]
        left = _shifted(a, az, 1).T if attributes.get("transA") else _shifted(a, az, 1)
        columns = 0 if attributes.get("transB") else 1
        right = _shifted(b, bz, columns).T if attributes.get("transB") else _shifted(b, bz, columns)
        y = left @ right + (0 if c is None else c)
        real = y * a_scale * _along(bs, y, 1) * attributes.get("alpha", 1.0)
        return real if ys is None else quantised(real, ys, yz)


class QLinearAdd(_Operator):
    op_domain = _MICROSOFT

    def compute(self, attributes: Mapping[str, Any], *args: Any) -> Any:
        a, a_scale, az, b, bs, bz, ys, yz = args
        return quantised(dequantised(a, a_scale, az) + dequantised(b, bs, bz), ys, yz)


class QLinearConcat(_Operator):
    op_domain = _MICROSOFT

    def compute(self, attributes: Mapping[str, Any], ys: Array, yz: Array, *args: Any) -> Any:
        parts = [dequantised(*args[i : i + 3]) for i in range(0, len(args), 3)]
        return quantised(np.concatenate(parts, attributes["axis"]), ys, yz)


OPERATORS: tuple[type[_Operator], ...] = (
    Conv,
    ConvInteger,
    DequantizeLinear,
    DynamicQuantizeLinear,
    Erf,
    GatherElements,
    MatMulInteger,
    MatMulNBits,
    MaxPool,
    QGemm,
    QLinearAdd,
    QLinearConcat,
    QLinearConv,
    QuantizeLinear,
    Resize,
)
