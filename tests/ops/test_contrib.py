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
