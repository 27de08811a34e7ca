"""Networks with channels last are transposed only at their ends, whatever is between the convolutions."""

from __future__ import annotations

import pytest

from tests.backends.tvm.kernels.test_kernels import network
from tests.backends.tvm.kernels.test_pooling import compare
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.lowering.importer import import_model

pytestmark = pytest.mark.measures

MIDDLES = {
    "a border, pooled": "p = Pad(a, sides, zero)\n c = AveragePool<kernel_shape=[3,3]>(p)",
    "a border below and at the right": "p = Pad(a, corner, six)\n c = MaxPool<kernel_shape=[2,2]>(p)",
    "LeakyRelu": "c = LeakyRelu<alpha=0.1>(a)",
    "HardSwish": "c = HardSwish(a)",
    "Clip": "c = Clip(a, zero, six)",
    "Where": "k = Greater(a, zero)\n h = Mul(a, a)\n c = Where(k, a, h)",
    "Expand": "g = GlobalAveragePool(a)\n e = Expand(g, like)\n c = Add(e, a)",
    "means and maxima of a border": (
        "p = LeakyRelu(a)\n t = Pad(p, sides, zero)\n m = ReduceMean<keepdims=1>(t, rows)\n"
        " n = ReduceMax<keepdims=1>(t, every)\n d = Add(m, t)\n e = Add(d, n)\n c = AveragePool<kernel_shape=[3,3]>(e)"
    ),
    "several readers": (
        "p = Pad(a, sides, zero)\n q = AveragePool<kernel_shape=[3,3]>(p)\n r = MaxPool<kernel_shape=[3,3]>(p)\n"
        " d = Add(q, r)\n e = Conv(a, v)\n f = Add(d, e)\n c = LeakyRelu(f)"
    ),
    "channels last already": (
        "t = Transpose<perm=[0,2,3,1]>(a)\n n = LayerNormalization<axis=-1>(t, s, b)\n"
        " g = Gelu(n)\n c = Transpose<perm=[0,3,1,2]>(g)"
    ),
    "a border, concatenated": (
        "p = Pad(a, sides, zero)\n q = AveragePool<kernel_shape=[3,3]>(p)\n l = LeakyRelu(a)\n"
        " k = Concat<axis=1>(q, l)\n u = Concat<axis=1>(v, v)\n c = Conv(k, u)"
    ),
}


def between_convolutions(middle: str) -> str:
    return (
        "(float[1,16,11,9] x, float[32,16,1,1] w, float[32,32,1,1] v, float[32] b, float[32] s) =>"
        " (float[1,32,p,q] y)"
        " <int64[8] sides = {0, 0, 1, 1, 0, 0, 1, 1}, int64[8] corner = {0, 0, 0, 0, 0, 0, 2, 1},"
        " int64[2] rows = {2, 3}, int64[1] every = {-3},"
        " int64[4] like = {1, 32, 11, 9}, float zero = {0.0}, float six = {6.0}>"
        f" {{ a = Conv(x, w)\n {middle}\n y = Conv(c, v) }}"
    )


@pytest.mark.parametrize("name", MIDDLES)
def test_transposed_at_the_ends_only(name: str) -> None:
    text = between_convolutions(MIDDLES[name])
    module = fuse(import_model(network(text)), detect())
    kernels = [variable.name_hint for variable in module.functions]
    assert sum(kernel.count("transpose") for kernel in kernels) == 2, kernels
    compare(text, detect())


def test_what_is_read_in_both_layouts() -> None:
    """The images before and after the padding are outputs of the model, too."""
    text = (
        "(float[1,16,11,9] x, float[32,16,1,1] w, float[32,32,1,1] v) =>"
        " (float[1,32,11,9] y, float[1,32,13,11] p, float[1,3168] z)"
        " <int64[8] sides = {0, 0, 1, 1, 0, 0, 1, 1}, float zero = {0.0}>"
        " { a = Conv(x, w)\n p = Pad(a, sides, zero)\n c = AveragePool<kernel_shape=[3,3]>(p)\n y = Conv(c, v)"
        " z = Flatten(a) }"
    )
    compare(text, detect())


def test_a_large_operand_of_another_layout_stays() -> None:
    """The other operand of the product is an input, which no convolution computed."""
    text = (
        "(float[1,16,11,9] x, float[1,32,11,9] r, float[32,16,1,1] w, float[32,32,1,1] v) => (float[1,32,11,9] y) {"
        " a = Conv(x, w)\n l = LeakyRelu(a)\n c = Mul(l, r)\n y = Conv(c, v) }"
    )
    compare(text, detect())
