"""Types of ONNX Runtime's own operators against what it computes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rules.harness import model, opened
from xrlflow.onnxio import load
from xrlflow.ops.tensors import dtype_of

_SCALES = "float s = {0.5}, uint8 z = {3}, int8 t = {1}"
_IMAGE, _ROWS = "uint8[N,2,4,4] x", "uint8[N,3] x"
_FLOATS = "float[N,3] f"
CASES = [
    (_ROWS, "", "QLinearAdd(x, s, z, x, s, z, s, z)"),
    (_ROWS, "uint8[5,1,3] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6}", "QLinearMul(x, s, z, w, s, z, s, z)"),
    (_ROWS, "", "QLinearSigmoid(x, s, z, s, z)"),
    (_ROWS, "", "QLinearLeakyRelu<alpha=0.5>(x, s, z, s, z)"),
    (_ROWS, "", "QLinearSoftmax<axis=1, opset=13>(x, s, z, s, z)"),
    (_ROWS, "", "QLinearConcat<axis=1>(s, z, x, s, z, x, s, z)"),
    (_IMAGE, "", "QLinearGlobalAveragePool<channels_last=0>(x, s, z, s, z)"),
    (_IMAGE, "", "QLinearAveragePool<kernel_shape=[2,3], strides=[2,1]>(x, s, z, s, z)"),
    (_ROWS, "bool[4,1,1] c = {0,1,1,0}", "QLinearWhere(c, x, s, z, x, s, z, s, z)"),
    (_ROWS, "int8[2,3] w = {1,2,3,4,5,6}", "QGemm<transB=1>(x, s, z, w, s, t, , s, z)"),
    (_ROWS, "int8[3,2] w = {1,2,3,4,5,6}", "QGemm(x, s, z, w, s, t)"),
    (_ROWS, "int8[3,2] w = {1,2,3,4,5,6}", "QGemm(x, s, z, w, s, t, , s)"),
    (_ROWS, "int8[3,2] w = {1,2,3,4,5,6}", "QGemm(x, s, z, w, s, t, , , z)"),
    (_ROWS, "int8[3,2] w = {1,2,3,4,5,6}", "MatMulIntegerToFloat(x, w, s, s, z, t)"),
    (_FLOATS, "int8[3,2] w = {1,2,3,4,5,6}", "DynamicQuantizeMatMul(f, w, s)"),
    (_FLOATS, "", "Gelu(f)"),
    (_FLOATS, "", "FastGelu(f)"),
    (_FLOATS, "", "QuickGelu<alpha=1.0>(f)"),
    (_FLOATS, "float[3] b = {1,2,3}", "BiasGelu(f, b)"),
]


@pytest.mark.parametrize(("of", "more", "call"), CASES, ids=lambda v: str(v).split("(")[0].split("<")[0])
def test_types_are_those_of_onnx_runtime(of: str, more: str, call: str) -> None:
    constants = ", ".join(text for text in (_SCALES, more) if text)
    proto = model(f"agraph ({of}) => (y) <{constants}> {{ y = com.microsoft.{call} }}")
    graph = load(proto).graph
    (node,) = (n for n in graph.nodes() if n.op.startswith("com.microsoft"))
    found, name = node.types[0], of.split()[-1]
    dtype = np.float32 if of is _FLOATS else np.uint8
    sizes = (7, 2, 4, 4) if of is _IMAGE else (7, 3)
    (y,) = opened(proto).run(None, {name: np.ones(sizes, dtype)})
    assert found.dtype == dtype_of(y.dtype)
    assert found.shape is not None
    assert tuple(7 if d == "N" else d for d in found.shape) == y.shape


def test_a_layout_with_the_channels_last_has_no_type() -> None:
    proto = model(
        f"agraph ({_IMAGE}) => (y) <{_SCALES}> "
        "{ y = com.microsoft.QLinearGlobalAveragePool<channels_last=1>(x, s, z, s, z) }"
    )
    (node,) = load(proto).graph.nodes()
    assert node.types[0].shape is None


def test_sizes_that_do_not_fit_are_left_to_the_runtime() -> None:
    proto = model(
        f"agraph (uint8[2,3] x, uint8[2,4] v) => (y) <{_SCALES}> "
        "{ y = com.microsoft.QLinearAdd(x, s, z, v, s, z, s, z) }"
    )
    (node,) = load(proto).graph.nodes()
    assert node.types[0].shape is None


_CACHE = "float[1,2,P,8] past_key, float[1,2,P,8] past_value"
_SEEN = "int32[1] seen = {4}, int32 total = {5}"
_NORMED = "float[8] w = {1,2,3,4,5,6,7,8}"
_ANGLES = "float[3,2] c = {1,2,3,4,5,6}, int64[1] first = {0}"
DECODERS = [
    ("float[1,1,8] x", _NORMED, "y, , , t = com.microsoft.SkipSimplifiedLayerNormalization(x, x, w)"),
    ("float[1,1,8] x", _NORMED, "y = com.microsoft.SkipSimplifiedLayerNormalization(x, x, w)"),
    ("float[1,1,8] x", _NORMED, "y, , , t = com.microsoft.SkipLayerNormalization(x, x, w)"),
    ("float[1,1,8] x", _NORMED, "y = SimplifiedLayerNormalization<axis=-1>(x, w)"),
    ("float[1,1,8] x", _ANGLES, "y = com.microsoft.RotaryEmbedding<num_heads=2>(x, first, c, c)"),
    ("float[1,2,3,4] x", _ANGLES, "y = com.microsoft.RotaryEmbedding(x, first, c, c)"),
    ("float[1,1,8] x", "", "y = com.microsoft.MultiHeadAttention<num_heads=2>(x, x, x)"),
    ("float[1,1,8] x, float[1,2,5,4] v", "", "y = com.microsoft.MultiHeadAttention<num_heads=2>(x, v, v)"),
    (
        f"float[1,1,16] x, {_CACHE}",
        _SEEN,
        "y, k, v = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2>"
        "(x, x, x, past_key, past_value, seen, total)",
    ),
    (
        f"float[1,1,48] x, {_CACHE}",
        _SEEN,
        "y, k, v = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2>"
        "(x, , , past_key, past_value, seen, total)",
    ),
]


@pytest.mark.parametrize(("inputs", "constants", "call"), DECODERS, ids=lambda v: str(v).split("<")[0][-40:])
def test_types_of_operators_of_decoders(inputs: str, constants: str, call: str) -> None:
    names = [name for part in call.split(" = ")[0].split(",") if (name := part.strip())]
    proto = model(f"agraph ({inputs}) => ({', '.join(names)}) <{constants}> {{ {call} }}")
    graph = load(proto).graph
    sizes = {v.name: [d.dim_value or 4 for d in v.type.tensor_type.shape.dim] for v in proto.graph.input}
    computed = opened(proto).run(None, {name: np.ones(of, np.float32) for name, of in sizes.items()})
    for value, array in zip(graph.outputs, computed):
        found = graph.type(value)
        assert found.dtype == dtype_of(array.dtype)
        assert found.shape is not None
        # A cache has all positions, or those of a buffer that it shares: its length is not known.
        assert [5 if d is None else d for d in found.shape] == list(array.shape)


def test_a_node_behind_a_cache_operator_has_a_type() -> None:
    proto = model(
        f"agraph (float[1,1,16] x, {_CACHE}) => (z) <{_SEEN}> {{ "
        "y = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2>"
        "(x, x, x, past_key, past_value, seen, total) z = Relu(y) }"
    )
    graph = load(proto).graph
    assert graph.type(graph.outputs[0]).shape == (1, 1, 16)
