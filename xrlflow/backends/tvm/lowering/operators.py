"""Operators that TVM's importer misinterprets, or whose attributes it ignores.

Each is lowered here, or refused by name. Operators that the importer lowers correctly are left to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrlflow.backends.tvm.kernels.elementwise import celu, normalized, with_exponent
from xrlflow.backends.tvm.kernels.scanning import greatest, running_sums
from xrlflow.backends.tvm.lowering.einsum import legal_einsum
from xrlflow.backends.tvm.lowering.quantised import dequantized, dynamically_quantized, quantized
from xrlflow.backends.tvm.toolchain.imported import Imported
from xrlflow.backends.tvm.toolchain.reading import constant, known_value, sizes

# A computed size may differ by at most this many pixels from an integer, because it was multiplied in single precision.
_WHOLE = 1e-3


def lowered(op: str, node: Imported) -> Any | None:
    """The result of a node; None if TVM's importer lowers it correctly, maybe after its attributes were changed here.

    Raises BackendError for nodes that cannot be lowered.
    """
    return _LOWERED[op](node) if op in _LOWERED else None


def _dropout(node: Imported) -> Any:
    """The input, and a mask of True. TVM's own operator returns a mask of numbers, and makes TVM's change of layouts
    fail."""
    from tvm import relax

    x, training = node.inputs[0], node.given(2)
    if training is not None and (known_value(training) is None or known_value(training)):
        raise node.refused("in training mode")
    if node.results == 1:
        return x
    return relax.Tuple([x, node.emit(relax.op.ones(x.ty.shape, "bool"))])


def _batch_norm(node: Imported) -> None:
    """Refuse training mode: TVM's importer would use the fixed statistics."""
    if node.attributes.get("training_mode", 0) or node.results > 1:
        raise node.refused("in training mode")


def _layer_norm(node: Imported) -> Any | None:
    """The results of LayerNormalization; None if TVM's importer lowers it correctly. Several axes are merged into one,
    since TVM's change of layouts would not transpose scale and bias. TVM's importer returns constants as mean and
    deviation: here these two results are computed."""
    from tvm import relax

    x, scale, bias = node.inputs[0], node.inputs[1], node.given(2)
    rows = _Rows.of(node)
    if rows is None:
        return None
    parts = (scale,) if bias is None else (scale, bias)
    if node.results == 1 and len(rows.along) == 1 and all(sizes(part) == rows.along for part in parts):
        return None
    flat = rows.flat(x)
    if bias is None:
        bias = constant(np.zeros(rows.along, np.dtype(str(x.ty.dtype))))
    weights = [rows.spread(scale), rows.spread(bias)]
    result = rows.back(
        node.emit(relax.op.nn.layer_norm(flat, *weights, [len(rows.outer)], rows.epsilon)), rows.along
    )
    if node.results == 1:
        return result
    precise = rows.precise(flat)
    middle = rows.mean(precise)
    distance = node.emit(relax.op.subtract(precise, middle))
    ones = (1,) * len(rows.along)
    return relax.Tuple([result, rows.back(middle, ones), rows.back(rows.scaling(distance), ones)])


def _rms_norm(node: Imported) -> Any | None:
    """RMSNormalization as elementary operators: TVM's own operator only supports scales of certain shapes."""
    from tvm import relax

    rows = _Rows.of(node)
    if rows is None:
        return None
    x, scale = node.inputs[0], node.inputs[1]
    precise = rows.precise(rows.flat(x))
    scaled = node.emit(relax.op.multiply(precise, rows.scaling(precise)))
    result = rows.back(node.emit(relax.op.astype(scaled, str(x.ty.dtype))), rows.along)
    return node.emit(relax.op.multiply(result, scale))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a tensor. Each row is normalised on its own. `outer`: the dimensions of rows; `along`: the dimensions
    within a row."""

    node: Imported
    outer: tuple[int, ...]
    along: tuple[int, ...]
    epsilon: float

    @classmethod
    def of(cls, node: Imported) -> _Rows | None:
        """The rows of a node's first operand; None if its sizes are unknown."""
        shape = sizes(node.inputs[0])
        if not shape:
            return None
        axis = int(node.attributes.get("axis", -1)) % len(shape)
        return cls(node, shape[:axis], shape[axis:], float(node.attributes.get("epsilon", 1e-5)))

    @property
    def length(self) -> int:
        return math.prod(self.along)

    def flat(self, x: Any) -> Any:
        """The tensor, reshaped to one dimension within a row."""
        from tvm import relax

        return x if len(self.along) == 1 else self.node.emit(relax.op.reshape(x, (*self.outer, self.length)))

    def back(self, x: Any, along: Sequence[int]) -> Any:
        """A tensor of rows, reshaped to the dimensions `along` within a row."""
        from tvm import relax

        return x if len(along) == 1 else self.node.emit(relax.op.reshape(x, (*self.outer, *along)))

    def spread(self, weight: Any) -> Any:
        """A scale or bias as one row. Raises BackendError if rows have different scales or biases."""
        from tvm import relax

        shape = sizes(weight)
        rank = len(self.along)
        if shape is None or any(n != 1 for n in shape[:-rank]):
            raise self.node.refused("with a scale or bias that differs between rows")
        if len(shape) > rank:
            weight = self.node.emit(relax.op.reshape(weight, shape[-rank:]))
        if shape[-rank:] != self.along:
            weight = self.node.emit(relax.op.broadcast_to(weight, self.along))
        return self.node.emit(relax.op.reshape(weight, (self.length,)))

    def precise(self, x: Any) -> Any:
        """The tensor, cast to the precision in which sums are computed."""
        from tvm import relax

        return self.node.emit(relax.op.astype(x, "float32")) if str(x.ty.dtype) == "float16" else x

    def mean(self, x: Any) -> Any:
        from tvm import relax

        return self.node.emit(relax.op.mean(x, [len(self.outer)], keepdims=True))

    def scaling(self, x: Any) -> Any:
        """1 / sqrt(mean of squares + epsilon), for each row."""
        from tvm import relax

        squares = self.mean(self.node.emit(relax.op.multiply(x, x)))
        small = relax.const(self.epsilon, str(x.ty.dtype))
        return self.node.emit(relax.op.rsqrt(self.node.emit(relax.op.add(squares, small))))


def _transposed_convolution(node: Imported) -> None:
    """ConvTranspose: replace an output shape, which TVM's importer ignores, by the borders that give this shape."""
    attributes, image = node.attributes, sizes(node.inputs[0])
    if "output_shape" not in attributes:
        return
    kernel = sizes(node.inputs[1])
    if image is None or kernel is None:
        raise node.refused("with an output_shape and open sizes")
    space = len(image) - 2
    requested = [int(n) for n in attributes.pop("output_shape")][-space:]
    strides, dilations, more = (
        list(attributes.get(name, [value] * space))
        for name, value in (("strides", 1), ("dilations", 1), ("output_padding", 0))
    )
    full = [
        strides[i] * (image[2 + i] - 1) + more[i] + dilations[i] * (kernel[2 + i] - 1) + 1
        for i in range(space)
    ]
    attributes["output_padding"] = [n + max(size - w, 0) for n, w, size in zip(more, full, requested)]
    if any(n >= stride for n, stride in zip(attributes["output_padding"], strides)):
        raise node.refused("with an output_shape beyond the image")
    cropped = [max(n - size, 0) for n, size in zip(full, requested)]
    upper = attributes.pop("auto_pad", b"NOTSET") in (b"SAME_UPPER", "SAME_UPPER")
    before = [n // 2 if upper else n - n // 2 for n in cropped]
    attributes["pads"] = [*before, *(n - b for n, b in zip(cropped, before))]


def _resize(node: Imported) -> None:
    """Resize: rewrite the sizes for TVM's importer, and refuse what TVM would compute differently.

    TVM's importer computes the scale from the sizes of image and result, can only resize the last dimensions, and has
    no filter for shrinking.
    """
    attributes, shape = node.attributes, sizes(node.inputs[0])
    if attributes.get("antialias", 0):
        raise node.refused("with antialias")
    if attributes.get("keep_aspect_ratio_policy", b"stretch") not in (b"stretch", "stretch"):
        raise node.refused("that keeps the ratio of sides")
    region, mode = node.given(1), attributes.get("coordinate_transformation_mode", b"half_pixel")
    if mode in (b"half_pixel_symmetric", "half_pixel_symmetric"):
        raise node.refused("with half_pixel_symmetric")
    crops = mode in (b"tf_crop_and_resize", "tf_crop_and_resize")
    if crops and (region is None or 0 in (sizes(region) or ())):
        raise node.refused("to a region that is not given")
    axes = attributes.pop("axes", None)
    if axes is not None and region is not None:
        raise node.refused("with axes and a region")
    scale = None if (scales := node.given(2)) is None else known_value(scales)
    size = None if (requested := node.given(3)) is None else known_value(requested)
    if scale is not None and not scale.size:  # an empty tensor stands for a missing one
        scale = node.inputs[2] = None
    if shape is None or (scale is None and size is None):
        raise node.refused("to a size that is not known")
    before = np.asarray(shape, np.int64)
    resized_axes = range(len(shape)) if axes is None else [int(axis) % len(shape) for axis in axes]
    if scale is None:
        assert size is not None
        resized = before.copy()
        resized[list(resized_axes)] = size
        node.inputs[3] = constant(resized)
    else:
        factors = np.ones(len(shape), np.float32)
        factors[list(resized_axes)] = scale
        node.inputs[2] = constant(factors)
        resized = np.floor(factors * before.astype(np.float32)).astype(np.int64)
        exact = np.abs(factors * before.astype(np.float64) - resized).max() < _WHOLE
        if not exact and mode not in (b"align_corners", "align_corners"):
            raise node.refused("by a scale that does not give whole numbers")
    if resized[:2].tolist() != before[:2].tolist():
        raise node.refused("of images or channels")
    pairs = list(zip(before[2:].tolist(), resized[2:].tolist()))
    # TVM divides by the size minus one.
    if 1 in resized[2:] and (crops or mode in (b"align_corners", "align_corners")):
        raise node.refused("of corners to one pixel")
    # ONNX Runtime only copies along an axis whose size does not change, but TVM would shift pixels.
    shifts = mode in (b"tf_half_pixel_for_nn", "tf_half_pixel_for_nn")
    shifts &= attributes.get("mode", b"nearest") not in (b"nearest", "nearest")
    if (crops or shifts) and any(image == result for image, result in pairs):
        raise node.refused("that moves pixels along an axis that keeps its size")


def _grid_sample(node: Imported) -> None:
    """GridSample: refuse images for which TVM divides by zero (by the size minus one)."""
    attributes, image = node.attributes, sizes(node.inputs[0])
    mirrored = attributes.get("padding_mode", b"zeros") in (b"reflection", "reflection")
    if mirrored and attributes.get("align_corners", 0) and (image is None or 1 in image[2:]):
        raise node.refused("with reflection of one row or column")


def _is_infinite(node: Imported) -> Any | None:
    """IsInf for one sign: TVM's importer ignores the sign."""
    from tvm import relax

    below, above = (int(node.attributes.get(f"detect_{side}", 1)) for side in ("negative", "positive"))
    if below and above:
        return None
    x = node.inputs[0]
    if not below and not above:
        return node.emit(relax.op.zeros(x.ty.shape, "bool"))
    return node.emit(relax.op.equal(x, relax.const(math.inf if above else -math.inf, str(x.ty.dtype))))


def _extreme(node: Imported) -> None:
    """ReduceMax and ReduceMin: refuse tensors without elements, for which TVM returns the largest finite number."""
    shape = sizes(node.inputs[0])
    if shape is not None and 0 in shape:
        raise node.refused("of no elements")


def _roi_align(node: Imported) -> None:
    """RoiAlign: refuse mode max. TVM takes the maximum of interpolated pixels, ONNX the maximum of weighted pixels."""
    if node.attributes.get("mode", b"avg") not in (b"avg", "avg"):
        raise node.refused("with mode max")


def _space_to_depth(node: Imported) -> None:
    """SpaceToDepth: refuse the attribute for another order of channels, which TVM's importer ignores."""
    if node.attributes.get("mode", b"DCR") not in (b"DCR", "DCR"):
        raise node.refused("with another mode than DCR")


def _remainder(node: Imported) -> None:
    """Mod: refuse floats without fmod. TVM returns NaN for infinite numbers, and ONNX does not."""
    if not node.attributes.get("fmod", 0) and "float" in str(node.inputs[0].ty.dtype):
        raise node.refused("of floats without fmod")


def _shift(node: Imported) -> None:
    """BitShift: refuse signed integers. In LLVM, shifts of negative numbers and shifts by negative numbers are
    undefined."""
    if not str(node.inputs[0].ty.dtype).startswith("uint"):
        raise node.refused("of numbers with a sign")


def _einsum(node: Imported) -> Any | None:
    equation = node.attributes["equation"]
    text = equation.decode() if isinstance(equation, bytes) else str(equation)
    return legal_einsum(node.builder, text, list(node.inputs))


ADDED = frozenset({"Celu", "LpNormalization"})
"""Operators that TVM's importer lacks."""

_LOWERED: Mapping[str, Callable[[Imported], Any | None]] = {
    "BatchNormalization": _batch_norm,
    "BitShift": _shift,
    "Celu": celu,
    "ConvTranspose": _transposed_convolution,
    "CumSum": running_sums,
    "DequantizeLinear": dequantized,
    "Dropout": _dropout,
    "DynamicQuantizeLinear": dynamically_quantized,
    "Einsum": _einsum,
    "GridSample": _grid_sample,
    "IsInf": _is_infinite,
    "LayerNormalization": _layer_norm,
    "LpNormalization": normalized,
    "Mod": _remainder,
    "Pow": with_exponent,
    "QuantizeLinear": quantized,
    "RMSNormalization": _rms_norm,
    "ReduceMax": _extreme,
    "ReduceMin": _extreme,
    "Resize": _resize,
    "RoiAlign": _roi_align,
    "SpaceToDepth": _space_to_depth,
    "TopK": greatest,
}
