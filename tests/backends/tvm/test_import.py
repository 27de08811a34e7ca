"""What TVM's importer or its passes would take for something else."""

from __future__ import annotations

import numpy as np
import onnx.numpy_helper
import onnx.parser
import pytest

from tests.backends.tvm.test_kernels import network
from tests.backends.tvm.test_pooling import compare
from xrlflow.backends import BackendError
from xrlflow.backends.tvm import Tvm, detect
from xrlflow.backends.tvm.hybrid import hybrid

IMAGES = "(float[1,8,12,12] x, float[8,8,3,3] w)"


@pytest.mark.parametrize("nodes", ["b = Dropout(a)", "b, m = Dropout(a)", "b, mask = Dropout(a)"])
def test_a_dropout_between_layouts_keeps_everything(nodes: str) -> None:
    results = "float[1,8,10,10] y" + (", bool[1,8,10,10] mask" if "mask" in nodes else "")
    text = f"{IMAGES} => ({results}) {{ a = Conv(x, w)\n {nodes}\n y = Relu(b) }}"
    model = compare(text, detect())
    made = hybrid(model, {}, detect())
    assert (made.nodes, made.remarks) == (3, ())


@pytest.mark.parametrize("trains", [True, False])
def test_a_dropout_that_may_drop_is_refused(trains: bool) -> None:
    model = network("(float[64] x) => (float[64] y) { y = Dropout(x, ratio, mode) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "ratio"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.bool_(trains), "mode"))
    if not trains:
        x = np.arange(64, dtype=np.float32)
        (y,) = Tvm().compile(model.SerializeToString()).run({"x": x})
        np.testing.assert_array_equal(y, x)
        return
    with pytest.raises(BackendError, match="TVM cannot lower Dropout in training mode: use --backend"):
        Tvm().compile(model.SerializeToString())
    with pytest.raises(BackendError, match="no part of the model can be lowered"):
        hybrid(model, {}, detect())


@pytest.mark.parametrize(
    "text",
    [
        f"{IMAGES} => (float[1,8,10,10] y, int64[4] s) {{ y = Conv(x, w)\n s = Shape(y) }}",
        "(float[3,4] x) => (int64[2] s, float[3,4] y) { y = Relu(x)\n s = Shape(y) }",
        "(float[3,4] x) => (int64[2] s) { s = Shape(x) }",
        "(float[3,4] x) => (int64[1] s, int64 n) { s = Shape<start=1>(x)\n n = Size(x) }",
        "(float[3,4] x) => (int64 n) <int64 one = {1}> { s = Shape(x)\n n = Gather(s, one) }",
    ],
)
def test_sizes_are_outputs(text: str) -> None:
    compare(text, detect())


def test_a_size_that_depends_on_values_is_no_output() -> None:
    model = network("(float[3,4] x) => (int64[2] sizes) { i = NonZero(x)\n sizes = Shape(i) }")
    with pytest.raises(BackendError, match="TVM cannot compile output sizes, a size that depends on values"):
        Tvm().compile(model.SerializeToString())
