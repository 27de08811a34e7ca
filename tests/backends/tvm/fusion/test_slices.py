"""Concatenations become slices that kernels write and read directly, without a change of results."""

from __future__ import annotations

import pytest

from tests.backends.tvm.kernels.test_kernels import network
from tests.backends.tvm.kernels.test_pooling import compare
from tests.backends.tvm.library.carried import carried
from tests.levels import whole
from xrlflow.backends.tvm import detect

pytestmark = pytest.mark.measures

GRAPHS = {
    "branches": (
        "(float[1,8,12,10] x, float[32,8,1,1] w, float[48,8,3,3] v) => (float[1,80,12,10] y) {"
        " a = Conv(x, w)\n b = Relu(a)\n c = Conv<pads=[1,1,1,1]>(x, v)\n d = Concat<axis=1>(b, c)\n y = Relu(d) }",
        0,
    ),
    "odd channels": (
        "(float[1,8,12,10] x, float[37,8,1,1] w, float[21,8,3,3] v) => (float[1,58,12,10] y) {"
        " a = Conv(x, w)\n c = Conv<pads=[1,1,1,1]>(x, v)\n d = Concat<axis=1>(a, c)\n y = Relu(d) }",
        0,
    ),
    "a part with other readers": (
        "(float[1,8,12,10] x, float[32,8,1,1] w, float[32,32,3,3] v) => (float[1,64,12,10] y, float[1,32,6,5] z) {"
        " a = Conv(x, w)\n b = Relu(a)\n c = Conv<pads=[1,1,1,1]>(b, v)\n d = Concat<axis=1>(c, b)\n y = Relu(d)"
        " z = MaxPool<kernel_shape=[2,2], strides=[2,2]>(b) }",
        0,
    ),
    "grown": (
        "(float[1,8,9,9] x, float[64,8,1,1] w, float[16,64,3,3] v, float[16,80,3,3] s) => (float[1,96,9,9] y) {"
        " a = Conv(x, w)\n b = Relu(a)\n c = Conv<pads=[1,1,1,1]>(b, v)\n d = Concat<axis=1>(b, c)\n e = Sigmoid(d)"
        " f = Conv<pads=[1,1,1,1]>(e, s)\n g = Concat<axis=1>(d, f)\n y = Tanh(g) }",
        0,
    ),
    "in two": (
        "(float[1,8,12,10] x, float[32,8,1,1] w, float[32,8,3,3] v) => (float[1,64,12,10] y, float[1,64,12,10] z) {"
        " a = Conv(x, w)\n c = Conv<pads=[1,1,1,1]>(x, v)\n d = Concat<axis=1>(a, c)\n e = Concat<axis=1>(c, a)"
        " y = Relu(d)\n z = Sigmoid(e) }",
        2,
    ),
    "twice in one": (
        "(float[1,8,12,10] x, float[32,8,1,1] w) => (float[1,64,12,10] y) {"
        " a = Conv(x, w)\n b = Relu(a)\n d = Concat<axis=1>(b, b)\n y = Tanh(d) }",
        1,
    ),
    "an input": (
        "(float[64,48] x, float[48,80] w, float[64,16] r) => (float[64,96] y) {"
        " a = MatMul(x, w)\n b = Concat<axis=1>(a, r)\n y = Relu(b) }",
        1,
    ),
    "an output": (
        "(float[64,48] x, float[48,80] w, float[48,16] v) => (float[64,96] y, float[64,16] z) {"
        " a = MatMul(x, w)\n z = MatMul(x, v)\n y = Concat<axis=1>(a, z) }",
        1,
    ),
    "rows, reshaped": (
        "(float[64,48] x, float[48,80] w, float[48,80] v) => (float[128,80] y, float[80,64] z)"
        " <int64[2] shape = {80, 64}> { a = MatMul(x, w)\n b = MatMul(x, v)\n c = Relu(b)\n z = Reshape(c, shape)"
        " y = Concat<axis=0>(a, c) }",
        1,
    ),
}


@pytest.mark.parametrize("name", whole(GRAPHS, [*GRAPHS][::2]))
def test_concatenations_agree_with_onnx_runtime(name: str) -> None:
    compare(GRAPHS[name][0], detect())


@pytest.mark.parametrize("name", whole(["odd channels", "grown"], ("odd channels",)))
def test_narrower_machines(name: str) -> None:
    compare(GRAPHS[name][0], detect(cpu="haswell"))


@pytest.mark.parametrize("name", GRAPHS)
def test_parts_are_written_where_the_whole_has_them(name: str) -> None:
    """Copies remain only for parts that must also be elsewhere in memory."""
    text, copies = GRAPHS[name]
    calls = [call.kernel for call in carried("Region_0", network(text), detect()).compiled.plan.calls]
    assert not [kernel for kernel in calls if "concat" in kernel]
    assert sum(kernel.startswith("copy_slice") for kernel in calls) == copies


def test_what_is_only_moved_stays_one_kernel() -> None:
    """The rotation of halves of rotary embeddings is one pass over the tensor, together with the product after it."""
    text = (
        "(float[1,128,64] x, float[1,128,64] c) => (float[1,128,64] y) <int64[1] o = {0}, int64[1] h = {32},"
        " int64[1] e = {64}, int64[1] a = {2}> { l = Slice(x, o, h, a)\n r = Slice(x, h, e, a)\n n = Neg(r)"
        " t = Concat<axis=2>(n, l)\n y = Mul(t, c) }"
    )
    assert len(carried("Region_0", network(text), detect()).compiled.plan.calls) == 1
