"""Operators with a quantisation inside (QLinearConv, QLinearAdd, ...), as operators of floats between quantisations.

ONNX Runtime makes the same operators of these again. Between, rules that change the type of bytes apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rewrite_rules.elementwise import given
from rewrite_rules.examples import graphs
from rewrite_rules.quantised import above, below
from xrlflow.ir import ABSENT, Attrs, DType, Node, Value
from xrlflow.ops.continuity import MOVING
from xrlflow.ops.contrib import CONTRIB
from xrlflow.rewrite import Op, Reader, Region, RegionRule, Val, accurate, profitable, require

# Sums of products of bytes with two scales between these numbers stay ordinary numbers.
_SMALL, _LARGE = 1e-10, 1e10


@dataclass(frozen=True, slots=True)
class _Quantised:
    """The operator of floats inside, and where the inputs are: operands with scale and zero point behind each, the
    bias, and scale and zero point of the result.
    """

    op: str
    operands: tuple[int, ...]
    result: int
    bias: int | None = None

    @staticmethod
    def of(node: Node) -> _Quantised:
        if node.op == f"{CONTRIB}QLinearConcat":
            return _Quantised("Concat", tuple(range(2, len(node.inputs), 3)), 0)
        return _OPERATORS[node.op]


_ALONE = ("GlobalAveragePool", "LeakyRelu", "Sigmoid")
_OPERATORS: Mapping[str, _Quantised] = {
    "QLinearConv": _Quantised("Conv", (0, 3), 6, 8),
    "QLinearMatMul": _Quantised("MatMul", (0, 3), 6),
    f"{CONTRIB}QGemm": _Quantised("Gemm", (0, 3), 7, 6),
    f"{CONTRIB}QLinearAdd": _Quantised("Add", (0, 3), 6),
    f"{CONTRIB}QLinearMul": _Quantised("Mul", (0, 3), 6),
    **{f"{CONTRIB}QLinear{op}": _Quantised(op, (0,), 3) for op in _ALONE},
}


class SeparateQuantisation(RegionRule, family="precision"):
    """qlinearconv(x, w, b) -> quantise(conv(dequantise(x), dequantise(w), dequantise(b))), and so for other operators,
    of signed bytes. Then QuantiseUnsigned applies.
    """

    backend = "onnxruntime"
    unpriced = True
    anchors = (*_OPERATORS, f"{CONTRIB}QLinearConcat")
    examples = (
        "agraph (int8[N,2,5] x) => (y) <int8[3,2,3] w = {1,-2,3,4,-5,6,7,-8,9,1,2,-3,4,5,-6,7,8,-9}, float s = {0.1}, "
        "int8 z = {3}, float[3] r = {0.1,0.2,0.3}, int8[3] v = {0,1,-2}, float t = {0.7}, int8 u = {-9}, "
        "int32[3] b = {5,-7,11}> { y = QLinearConv<strides=[2], pads=[1,0]>(x, s, z, w, r, v, t, u, b) }",
        "agraph (int8[1,2,3,4] x) => (y) <int8[2,1,1,1] w = {3,-2}, float[1] s = {0.13}, int8[1] z = {3}, "
        "float t = {0.7}, int8 u = {-9}> { y = QLinearConv<group=2>(x, s, z, w, t, u, t, u) }",
        "agraph (int8[N,3] x) => (y) <int8[3,2] w = {3,-2,1,9,7,8}, float s = {0.1}, int8 z = {3}, "
        "float[2] r = {0.1,0.3}, int8[2] v = {1,2}, float t = {0.7}, int8 u = {-9}> "
        "{ y = QLinearMatMul(x, s, z, w, r, v, t, u) }",
        "agraph (int8[N,3] x, int8[3] w) => (y, p) <float s = {0.1}, int8 z = {3}, float t = {0.7}, int8 u = {-9}> "
        "{ y = com.microsoft.QLinearAdd(x, s, z, w, t, u, t, z) p = com.microsoft.QLinearMul(x, s, z, w, t, u, s, u) }",
        "agraph (int8[N,3] x, int8[N,2] w) => (y) <float s = {0.1}, int8 z = {3}, float t = {0.7}, int8 u = {-9}> "
        "{ y = com.microsoft.QLinearConcat<axis=1>(t, z, x, s, z, w, t, u) }",
        "agraph (int8[N,3,2,2] x) => (y, a, b) <float s = {0.1}, int8 z = {3}, float t = {0.7}, int8 u = {-9}> "
        "{ y = com.microsoft.QLinearGlobalAveragePool<channels_last=0>(x, s, z, t, u) "
        "a = com.microsoft.QLinearSigmoid(x, s, z, t, u) "
        "b = com.microsoft.QLinearLeakyRelu<alpha=0.25>(x, s, z, t, u) }",
        "agraph (int8[N,3] x) => (y) <int8[2,3] w = {3,-2,1,9,7,8}, float s = {0.1}, int8 z = {3}, "
        "float[2] r = {0.1,0.3}, int8[2] v = {1,2}, float t = {0.7}, int8 u = {-9}, int32[2] b = {5,-7}> "
        "{ y = com.microsoft.QGemm<transB=1>(x, s, z, w, r, v, b, t, u) }",
    )
    near_misses = (
        "agraph (uint8[N,3] x, uint8[3] w) => (y) <float s = {0.1}, uint8 z = {3}, float t = {0.7}, uint8 u = {9}> "
        "{ y = com.microsoft.QLinearAdd(x, s, z, w, t, u, t, z) }",
        "agraph (int8[N,3] x, int8[3] w, float s) => (y) <int8 z = {3}, float t = {0.7}, int8 u = {9}> "
        "{ y = com.microsoft.QLinearAdd(x, s, z, w, t, u, t, z) }",
        "agraph (int8[2,3] x) => (y) <int8[3,2] w = {3,-2,1,9,7,8}, float[2] s = {0.1,0.2}, int8[2] z = {3,1}, "
        "float t = {0.7}, int8 u = {-9}> { y = QLinearMatMul(x, s, z, w, t, u, t, u) }",
        "agraph (int8[N,3] x) => (y) <int8[3,2] w = {3,-2,1,9,7,8}, float s = {0.1}, int8 z = {3}, float t = {0.7}, "
        "int8 u = {-9}, int32[2] b = {5,-7}> { y = com.microsoft.QGemm<alpha=0.5>(x, s, z, w, t, u, b, t, u) }",
        "agraph (int8[N,3] x) => (y) <int8[3,2] w = {3,-2,1,9,7,8}, float s = {0.1}, int8 z = {3}, float t = {0.7}, "
        "int8 u = {-9}> { y = com.microsoft.QGemm(x, s, z, w, t, u) }",
        "agraph (int8[2,4] x) => (y) <float s = {0.1}, int8 z = {3}, int8[4,2] w = {1,2,3,4,5,6,7,8}, "
        "float[1,2] r = {0.1,0.3}, int8[1,2] v = {1,2}> { y = QLinearMatMul(x, s, z, w, r, v, s, z) }",
        "agraph (int8[2,0,2,2] x) => (y) <float s = {0.1}, int8 z = {3}> "
        "{ y = com.microsoft.QLinearGlobalAveragePool(x, s, z, s, z) }",
        "agraph (int8[2,3] x) => (y) <float s = {0.1}, int8 z = {3}, uint8 u = {3}> "
        "{ y = com.microsoft.QLinearSigmoid(x, s, u, s, z) }",
        "agraph (float[N,3] x) => (y) <float r = {100}, float s = {0.1}, int8 z = {3}> "
        "{ q = QuantizeLinear(x, r, z) d = DequantizeLinear(q, r, z) p = QuantizeLinear(d, s, z) "
        "y = com.microsoft.QLinearAdd(p, s, z, p, s, z, s, z) }",
        "agraph (int8[N,3] x) => (y) <float r = {100}, float s = {0.1}, int8 z = {3}> "
        "{ q = com.microsoft.QLinearAdd(x, s, z, x, s, z, r, z) d = DequantizeLinear(q, r, z) "
        "y = QuantizeLinear(d, s, z) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if node.attrs.get("channels_last"):
            return None
        parts = _Quantised.of(node)
        inputs = [*node.inputs, *[ABSENT] * 9]
        profitable(reader.type(inputs[parts.operands[0]]).dtype == DType.INT8, "the bytes are unsigned")
        require(node.attrs.get("alpha", 1.0) == 1.0 or parts.bias is None, "the product has a factor")
        places = (*parts.operands, parts.result - 1)
        profitable(inputs[parts.result] != ABSENT, "the result is of floats")
        profitable(inputs[parts.result + 1] != ABSENT, "the result has no zero point")
        for parameter in (v for at in places for v in inputs[at + 1 : at + 3] if v != ABSENT):
            profitable(reader.is_const(parameter), "a scale or zero point is computed")
        for scale in (inputs[at + 1] for at in places):
            _check_scale(reader.val(scale).whole_array)
        for at in places:
            counts = reader.val(inputs[at + 1]).sizes
            zero = None if inputs[at + 2] == ABSENT else reader.val(inputs[at + 2]).sizes
            single = counts in _SINGLE
            require(
                zero is None or (zero in _SINGLE) == single,
                "there are more zero points than scales, or fewer",
            )
            by_channel = parts.op in _AXES and at == 3 and len(counts) == 1
            by_channel = by_channel and (parts.op == "Conv" or reader.val(inputs[at]).rank == 2)
            require(single or by_channel, "the scales are not those of channels")
            kind = reader.type(inputs[at if at in parts.operands else at + 2]).dtype
            typed = inputs[at + 2] == ABSENT or reader.type(inputs[at + 2]).dtype == kind
            require(typed and kind in (DType.INT8, DType.UINT8), "a zero point has another type")
        if parts.op == "GlobalAveragePool":
            channels = reader.val(inputs[0]).shape[1:]
            accurate(all(isinstance(n, int) and n > 0 for n in channels), "an image may be empty")
        paired = any(_is_quantised_again(reader, inputs[at]) for at in parts.operands)
        accurate(not paired and not _quantises_again(reader, node.outputs[0]), _PAIRS)
        if parts.bias is not None and inputs[parts.bias] != ABSENT:
            weights, axis = reader.val(inputs[parts.operands[1]]), _axis(node)
            require(
                reader.val(inputs[parts.bias]).sizes == (weights.shape[axis],),
                "the bias is not one of channels",
            )
        return Region(node.outputs, given(node.inputs), (node,), (node, parts))

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        node, parts = region.data
        named: dict[Value, Val] = dict(zip(region.inputs, inputs))
        values = [*(named.get(v) for v in node.inputs), *[None] * 9]

        def parameters(at: int) -> list[Any]:
            return [None if v is None else _scalar(op, v) for v in values[at : at + 2]]

        axis = _axis(node)
        operands = [
            op.DequantizeLinear(
                values[at],
                *parameters(at + 1),
                **({"axis": axis} if values[at + 1].sizes not in ((), (1,)) else {}),
            )
            for at in parts.operands
        ]
        if parts.bias is not None and (bias := values[parts.bias]) is not None:
            scale = op.Mul(*(_scalar(op, values[at + 1]) for at in parts.operands))
            operands.append(op.DequantizeLinear(bias, scale, axis=0))
        attrs = {name: value for name, value in node.attrs.items() if name != "channels_last"}
        result = op[parts.op](*operands, attrs=Attrs(attrs))
        return op.QuantizeLinear(result, *parameters(parts.result))


def _check_scale(numbers: npt.NDArray[Any]) -> None:
    ordinary = numbers.dtype == np.float32 and bool(((numbers > _SMALL) & (numbers < _LARGE)).all())
    accurate(ordinary, "a scale is no ordinary number")


# The axis of the weights' scales, by the operator of floats.
_AXES = {"Conv": 0, "MatMul": 1, "Gemm": 1}


def _axis(node: Node) -> int:
    return 1 - _AXES["Gemm"] if node.attrs.get("transB") else _AXES.get(_Quantised.of(node).op, 1)


# The sizes of a scale of a whole tensor.
_SINGLE = ((), (1,))


def _scalar(op: Op, parameter: Val) -> Any:
    """A scale or zero point; a list of one as a number."""
    return op.Reshape(parameter, []) if parameter.sizes == (1,) else parameter


_PAIRS = "ONNX Runtime would leave out one of two quantisations in a row"


def _is_quantised_again(reader: Reader, quantised: Value) -> bool:
    """Whether bytes are quantised from numbers that were dequantised, perhaps moved."""
    node = reader.producer(quantised)
    return (
        node is not None and node.op == "QuantizeLinear" and "DequantizeLinear" in above(reader, node, MOVING)
    )


def _quantises_again(reader: Reader, quantised: Value) -> bool:
    """Whether bytes are dequantised, perhaps moved, and quantised again."""
    readers = (n for n in reader.users(quantised) if n.op == "DequantizeLinear")
    return any("QuantizeLinear" in below(reader, n, MOVING) for n in readers)


# Operators that take bytes of their first input, and give some of them.
_TAKING = (
    *(
        "DepthToSpace",
        "Flatten",
        "Gather",
        "Identity",
        "MaxPool",
        "Reshape",
        "Slice",
        "SpaceToDepth",
        "Squeeze",
    ),
    *("Transpose", "Unsqueeze"),
)


class SeparateTakenBytes(RegionRule, family="precision"):
    """f(q) -> quantise(f(dequantise(q, s, z)), s, z)  for q = quantise(x, s, z) and an f that takes signed bytes of q.

    Then QuantiseUnsigned applies to q.
    """

    backend = "onnxruntime"
    proof = "numeric"
    relies_on = "a byte that is dequantised, and quantised by the same scale, is the same byte"
    unpriced = True
    anchors = _TAKING
    examples = graphs(
        "(float[N,2,4,4] x) => (y) <float s = {0.1}, int8 z = {3}> "
        "{ q = QuantizeLinear(x, s, z) y = MaxPool<kernel_shape=[2,2], strides=[2,2], pads=[1,0,1,0]>(q) }",
        "(float[N,6] x) => (y, p) <float s = {0.1}> { q = QuantizeLinear<output_dtype=3>(x, s) "
        "y = Reshape(q, [-1,2,3]) p = Transpose(y) }",
        "(float[N,6] x) => (y, p) <float s = {0.7}, int8 z = {-128}> { q = QuantizeLinear(x, s, z) "
        "y = Gather<axis=1>(q, [1,0,5]) p = Slice(q, [1], [3], [1]) }",
    )
    near_misses = graphs(
        "(float[N,6] x) => (y) <float r = {100}, float s = {1}, int8 z = {0}> { q = QuantizeLinear(x, r, z) "
        "d = DequantizeLinear(q, r, z) p = QuantizeLinear(d, s, z) y = Transpose(p) }",
        "(float[N,6] x) => (y) <float s = {0.1}, uint8 z = {3}> { q = QuantizeLinear(x, s, z) y = Transpose(q) }",
        "(float[N,6] x) => (y) <float[6] s = {0.1,0.2,0.3,0.4,0.5,0.6}, int8[6] z = {3,1,2,4,5,6}> "
        "{ q = QuantizeLinear(x, s, z) y = Reshape(q, [-1,2,3]) }",
        "(float[N,6] x) => (y) <float s = {1e-30}, int8 z = {3}> { q = QuantizeLinear(x, s, z) y = Transpose(q) }",
        "(float[N,2,4] x) => (y) <float s = {-0.1}, int8 z = {3}> "
        "{ q = QuantizeLinear(x, s, z) y = MaxPool<kernel_shape=[2]>(q) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        quantised = reader.producer(node.inputs[0])
        if quantised is None or quantised.op != "QuantizeLinear" or len(node.outputs) != 1:
            return None
        profitable(quantised.types[0].dtype == DType.INT8, "the bytes are unsigned")
        parameters = given(quantised.inputs[1:])
        profitable(all(map(reader.is_const, parameters)), "a scale or zero point is computed")
        scale = reader.val(parameters[0])
        require(scale.scalar > 0, "the scale is not positive")  # else the greatest byte is the least number
        _check_scale(scale.whole_array)
        accurate(not _is_quantised_again(reader, node.inputs[0]), _PAIRS)
        accurate(not _quantises_again(reader, node.outputs[0]), _PAIRS)
        inputs = dict.fromkeys((*given(node.inputs), *parameters))
        return Region(node.outputs, tuple(inputs), (node,), (node, parameters))

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        node, parameters = region.data
        values: dict[Value, Any] = dict(zip(region.inputs, inputs))
        scale, *zero = (values[v] for v in parameters)
        zero = zero or [op.constant(np.int8(0))]
        first, *rest = (values.get(v) for v in node.inputs)
        taken = op[node.op](op.DequantizeLinear(first, scale, *zero), *rest, attrs=node.attrs)
        return op.QuantizeLinear(taken, scale, *zero)
