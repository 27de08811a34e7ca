"""bench/shape_arithmetic.py: what counts as arithmetic on shapes, and what does not."""

from __future__ import annotations

import numpy as np
import onnx

from bench.open_dimensions import table_of_shapes
from bench.shape_arithmetic import Counts, count
from tests.rules.harness import ints, model


def test_what_depends_on_sizes_is_followed_whatever_its_name() -> None:
    source = (
        "agraph (float[N,4] x) => (float[N,4] y, float[N,N] z) {"
        " s = Shape(x) n = Gather(s, i) r = Range(i, n, k) u = Unsqueeze(r, a) v = Unsqueeze(r, b) d = Sub(u, v)"
        " f = Cast<to = 1>(d) z = Abs(f) t = Concat<axis = 0>(m, q) y = Reshape(x, t) q = Shape<start = 1>(x) }"
    )
    # Shape, Gather and Range; Unsqueeze twice, Sub, Cast and Abs. The second Shape is that of a known dimension.
    proto = model(source, **ints(i=0, k=1, a=[0], b=[1], m=[-1]))
    assert count(proto) == Counts(3, 5)


def test_data_and_constants_and_dead_nodes_do_not_count() -> None:
    source = (
        "agraph (int64[N] x) => (int64[M] y) { c = Add(k, k) e = Mul(x, c) y = Reshape(e, m) s = Shape(x)"
        " d = Neg(s) o = NonZero(x) }"
    )
    assert count(model(source, **ints(k=[1], m=[-1]))) == Counts(0, 0)


def test_random_numbers_and_bodies_depend_on_more_than_sizes() -> None:
    source = """agraph (bool p, float[N] x) => (int64[1] y, float[2] r) {
      s = Shape(x) y = If(p) <then_branch = a () => (int64[1] t) { t = Identity(s) },
        else_branch = b () => (int64[1] e) { e = Neg(s) }> r = RandomUniform<shape = [2]>() }"""
    assert count(model(source)) == Counts(1, 0)


def test_large_constants_are_left_out_of_inference() -> None:
    proto = model(
        "agraph (int64[N] x) => (float[N,64] y, int64[1] s) { y = Gather(w, x) s = Shape<end = 1>(y) }",
        w=np.zeros((100, 64), np.float32),
    )
    before = proto.SerializeToString()
    assert count(proto) == Counts(1, 0)
    assert proto.SerializeToString() == before
    fixed = onnx.ModelProto.FromString(before)
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    fixed.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 3
    assert count(fixed) == Counts(0, 0)


def test_the_table_has_both_numbers() -> None:
    row = {
        "original": Counts(3, 1),
        "onnxsim": "fails (Error)",
        "onnxslim": Counts(2, 1),
        "ours": Counts(0, 0),
    }
    assert table_of_shapes({"a": row}).splitlines()[-1] == "| a | 3 + 1 | fails (Error) | 2 + 1 | 0 + 0 |"
