"""Constants that examples have where they are read."""

from __future__ import annotations

import pytest

from rewrite_rules.examples import graphs
from xrlflow.ir import text
from xrlflow.onnxio import load
from xrlflow.prover.proof import parse


def test_numbers_among_inputs_become_constants():
    (short,) = graphs(
        "(float[N,6] x) => (float[N,2] y) <float[1,2] w = {1, 2}> { a = Slice(x, [1], [3], [1], [1]) "
        "b = Mul(a, 0.5) c = Transpose<perm=[0,1]>(b) d = Mul(c, [1.0, 2]) e = Clip(d, , 3.0) y = Add(e, w) }"
    )
    long = (
        "agraph (float[N,6] x) => (float[N,2] y) <float[1,2] w = {1, 2}, int64[1] i = {1}, int64[1] j = {3}, "
        "float h = {0.5}, float[2] m = {1, 2}, float t = {3}> { a = Slice(x, i, j, i, i) b = Mul(a, h) "
        "c = Transpose<perm=[0,1]>(b) d = Mul(c, m) e = Clip(d, , t) y = Add(e, w) }"
    )
    assert text(load(parse(short)).graph) == text(load(parse(long)).graph)


def test_a_graph_without_constants_is_the_graph():
    whole = "agraph (float[N] x2) => (float[N] y) { y = Relu(x2) }"
    assert graphs("(float[N] x2) => (float[N] y) { y = Relu(x2) }", whole) == (whole, whole)


def test_what_is_no_graph_is_named():
    with pytest.raises(ValueError, match="this is no graph: Relu"):
        graphs("Relu(x)")
