"""Weights multiplied out when the model is written."""

from __future__ import annotations

import numpy as np
import pytest

from rewrite_rules import weights_algebra
from rewrite_rules.weights_algebra import (
    FoldGemmIntoGemm,
    FoldScaleOfPartIntoMatMul,
    MoveScaleIntoMatMul,
    MoveScaleOutOfMatMul,
    PushGatherThroughFunction,
    PushGatherThroughMatMul,
    ReplaceOneHotByGather,
)
from tests.rules.harness import applies, model, normal, refuses


@pytest.mark.parametrize("index", ["", "N", "N,5"])
def test_table_times_matrix(index):
    out = f"{index},2" if index else "2"
    source = f"agraph (int64[{index}] i) => (float[{out}] y) {{ g = Gather(t, i) y = MatMul(g, w) }}"
    applies(PushGatherThroughMatMul(), model(source, t=normal(6, 3), w=normal(3, 2)), ops=["Gather"])
    other = source.replace("Gather(", "Gather<axis=1>(").replace("MatMul(g, w)", "MatMul(w, g)")
    refuses(PushGatherThroughMatMul(), model(other, t=normal(3, 6), w=normal(2, 3)))


def test_large_tables_stay():
    source = "agraph (int64[N] i) => (float[N,9000] y) { g = Gather(t, i) y = MatMul(g, w) }"
    refuses(PushGatherThroughMatMul(), model(source, t=normal(9000, 2), w=normal(2, 9000)), "large")


def test_tables_up_to_so_many_bytes(monkeypatch):
    source = "agraph (int64[N] i) => (float[N,2] y) { g = Gather(t, i) y = MatMul(g, w) }"
    proto = model(source, t=normal(6, 3), w=normal(3, 2))
    monkeypatch.setattr(weights_algebra, "_BYTES", 6 * 2 * 4)
    applies(PushGatherThroughMatMul(), proto, ops=["Gather"])
    monkeypatch.setattr(weights_algebra, "_BYTES", 6 * 2 * 4 - 1)
    refuses(PushGatherThroughMatMul(), proto, "large")


def test_functions_of_rows():
    source = "agraph (int64[N,5] i) => (float[N,5,{}] y) {{ g = Gather(t, i) {} }}"
    rule, table = PushGatherThroughFunction(), normal(6, 3)
    applies(rule, model(source.format(3, "y = Gelu(g)"), t=table), ops=["Gather"])
    applies(rule, model(source.format(3, "y = Sub(c, g)"), t=table, c=normal(1, 1, 3)), ops=["Gather"])
    for one in ((), (1,), (1, 1)):
        applies(rule, model(source.format(3, "y = Sub(c, g)"), t=table, c=normal(*one)), ops=["Gather"])
    applies(rule, model(source.format(3, "y = Clip(g, , h)"), t=table, h=np.float32(0.5)), ops=["Gather"])
    refuses(rule, model(source.format(3, "y = Add(g, c)"), t=table, c=normal(5, 3)), "per column")
    refuses(rule, model(source.format(3, "y = Softmax<axis=1>(g)"), t=table), "not the last")
    both = source.format(3, "a = Relu(g) b = Tanh(g) y = Add(a, b)")
    refuses(rule, model(both, t=table), "read elsewhere")
    cube = "agraph (int64[N] i) => (float[N,2,3] y) { g = Gather(t, i) y = Relu(g) }"
    refuses(rule, model(cube, t=normal(6, 2, 3)), "no table")


def one_hot(numbers, dtype="int64", weight=None):
    source = (
        f"agraph ({dtype}[N,5,1] i) => (float[N,5,2] y) {{ e = Equal(i, r) h = Cast<to=1>(e) y = "
        f"MatMul(h, w) }}"
    )
    return model(
        source, r=np.asarray(numbers, dtype), w=normal(len(numbers), 2) if weight is None else weight
    )


_ONE_HOT = ["And", "Gather", "GreaterOrEqual", "Less", "Squeeze", "Where"]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_one_hot(dtype):
    # The drawn indices reach from 0 to 3: one is out of range.
    applies(ReplaceOneHotByGather(), one_hot([0, 1, 2], dtype), ops=_ONE_HOT)
    applies(ReplaceOneHotByGather(), one_hot(range(5), dtype), ops=_ONE_HOT)
    refuses(ReplaceOneHotByGather(), one_hot([0, 2, 1], dtype), "from 0")
    refuses(ReplaceOneHotByGather(), one_hot([1, 2, 3], dtype), "from 0")
    source = (
        f"agraph ({dtype}[N,3] i) => (float[N,2] y) {{ e = Equal(i, r) h = Cast<to=1>(e) y = MatMul(h, w) }}"
    )
    refuses(
        ReplaceOneHotByGather(), model(source, r=np.arange(3).astype(dtype), w=normal(3, 2)), "not one number"
    )


def test_one_hot_of_one_row():
    """The numbers may be a single one, without dimensions too."""
    source = "agraph (int64[4,1] i) => (float[4,2] y) { e = Equal(i, r) h = Cast<to=1>(e) y = MatMul(h, w) }"
    for shape in ((), (1,), (1, 1)):
        proto = model(source, r=np.zeros(shape, np.int64), w=normal(1, 2))
        applies(ReplaceOneHotByGather(), proto, ops=_ONE_HOT)
        refuses(ReplaceOneHotByGather(), model(source, r=np.ones(shape, np.int64), w=normal(1, 2)), "from 0")


@pytest.mark.parametrize("u", [0, 1])
@pytest.mark.parametrize("t", [0, 1])
def test_gemms(t, u):
    source = (
        f"agraph (float[N,3] x) => (float[N,5] y) {{{{ a = Gemm<transB={t}>({{}}) y = "
        f"Gemm<transB={u}>(a, w{{}}) }}}}"
    )
    given = {"v": normal(4, 3) if t else normal(3, 4), "w": normal(5, 4) if u else normal(4, 5)}
    for first, second in (("x, v", ""), ("x, v, b", ""), ("x, v", ", c"), ("x, v, b", ", c")):
        biases = ({"b": normal(4)} if "b" in first else {}) | ({"c": normal(1, 5)} if second else {})
        applies(FoldGemmIntoGemm(), model(source.format(first, second), **given, **biases), ops=["Gemm"])


def test_gemms_that_would_take_long(monkeypatch):
    """So many products of the first weights with a column, or a row, of the second."""
    source = "agraph (float[N,3] x) => (float[N,5] y) { a = Gemm(x, v) y = Gemm(a, w) }"
    proto = model(source, v=normal(3, 4), w=normal(4, 5))
    monkeypatch.setattr(weights_algebra, "_WORK", 3 * 4 * 5)
    applies(FoldGemmIntoGemm(), proto, ops=["Gemm"])
    monkeypatch.setattr(weights_algebra, "_WORK", 3 * 4 * 5 - 1)
    refuses(FoldGemmIntoGemm(), proto, "take long")


def test_scale_of_a_product():
    source = "agraph (float[N,3,4] x, float[N,4,5] z) => (float[N,3,5] y) {{ {} }}"
    into = source.format("p = MatMul(x, z) y = Mul(p, s)")
    out = source.format("p = Mul(z, s) y = MatMul(x, p)")
    half = np.float32(0.5)
    applies(MoveScaleIntoMatMul(), model(into, s=half), ops=["MatMul", "Mul"])
    applies(MoveScaleOutOfMatMul(), model(out, s=half), ops=["MatMul", "Mul"])
    refuses(MoveScaleIntoMatMul(), model(into, s=normal(5)))
    refuses(MoveScaleOutOfMatMul(), model(out, s=normal(5)))
    constant = "agraph (float[N,3,4] x) => (float[N,3,5] y) { p = MatMul(x, z) y = Mul(p, s) }"
    refuses(MoveScaleIntoMatMul(), model(constant, s=half, z=normal(4, 5)), "constant")


@pytest.mark.parametrize("bias", ["", "q = Add(c, p)"])
def test_scale_of_a_part(bias):
    split = f"Split<axis=-1>({'q' if bias else 'p'}, k)"
    source = (
        f"agraph (float[N,3,4] x) => (float[N,3,2] d, float[N,3,2] y) "
        f"{{ p = MatMul(x, w) {bias} d, e = {split} y = Mul(e, s) }}"
    )
    given = {"w": normal(4, 4), "s": np.float32(0.5), "k": np.array([2, 2])} | (
        {"c": normal(4)} if bias else {}
    )
    ops = ["Add", "MatMul", "Split"] if bias else ["MatMul", "Split"]
    applies(FoldScaleOfPartIntoMatMul(), model(source, **given), ops=ops)
    refuses(FoldScaleOfPartIntoMatMul(), model(source, **given | {"s": normal(2)}))
    rows = (
        source.replace("axis=-1", "axis=1")
        .replace("[N,3,2] d", "[N,1,4] d")
        .replace("[N,3,2] y", "[N,2,4] y")
    )
    refuses(FoldScaleOfPartIntoMatMul(), model(rows, **given | {"k": np.array([1, 2])}), "columns")
