"""Sums, products, powers and quotients, element by element."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from rewrite_rules.arithmetic import (
    AssociateAdds,
    AssociateMuls,
    FactorOneOutOfSum,
    FactorOutOfSum,
    MergeConstantAdds,
    MergeConstantMuls,
    MergeConstantsOfSum,
    PullMonotoneOutOfMax,
    PullMulOutOfConstantAdd,
    PushMonotoneThroughMax,
    PushMulThroughConstantAdd,
    RemoveExpandBeforeBroadcast,
    ReplaceConstantDivByMul,
    ReplaceConstantSubByAdd,
    ReplaceDivByReciprocal,
    ReplaceMulByNeg,
    ReplaceNegByMul,
    ReplacePowByProduct,
    ReplacePowBySqrt,
)
from tests.rules.harness import applies, model, normal, refuses
from xrlflow.onnxio import load
from xrlflow.rewrite import Library, RewriteState

ONE, ZERO, SIX, THREE = (np.float32(v) for v in (1, 0, 6, 3))


def unary(body: str, **constants: np.ndarray | np.generic) -> onnx.ModelProto:
    """y of x[N, 4]."""
    return model(f"agraph (float[N,4] x) => (float[N,4] y) {{ {body} }}", **constants)


def test_powers():
    positive = "a = Abs(x) "
    for rule, exponent, ops in (
        (ReplacePowByProduct(), 2, ["Abs", "Mul"]),
        (ReplacePowBySqrt(), 0.5, ["Abs", "Sqrt"]),
    ):
        for shape in ((), (1,), (4,)):
            given = np.full(shape, exponent, np.float32)
            applies(rule, unary(positive + "y = Pow(a, c)", c=given), ops=ops)
        refuses(rule, unary(positive + "y = Pow(a, c)", c=THREE))
        wide = model(
            "agraph (float[4] x) => (float[2,4] y) { y = Pow(x, c) }", c=np.full((2, 1), exponent, np.float32)
        )
        refuses(rule, wide)


def test_quotients():
    source = "agraph (float[N,4] x, float[{}] z) => (float[N,4] y) {{ {} }}"
    small = model(source.format("N,1", "y = Div(x, z)"))
    applies(ReplaceDivByReciprocal(), small, ops=["Mul", "Reciprocal"])
    refuses(ReplaceDivByReciprocal(), model(source.format("N,4", "y = Div(x, z)")), "not smaller")


def test_signs():
    applies(ReplaceNegByMul(), unary("y = Neg(x)"), ops=["Mul"])
    applies(ReplaceMulByNeg(), unary("y = Mul(c, x)", c=np.float32(-1)), ops=["Neg"])
    refuses(ReplaceMulByNeg(), unary("y = Mul(c, x)", c=ONE))


def test_expand():
    rule = RemoveExpandBeforeBroadcast()
    source = "agraph (float[{}] x, float[{}] z) => (float[2,3,4] y) {{ e = Expand(x, s) y = Add(z, e) }}"
    shape = np.array([2, 3, 4])
    applies(rule, model(source.format("3,1", "2,3,4"), s=shape), ops=["Add"])
    applies(rule, model(source.format("2,3,1", "4"), s=shape), ops=["Add"])
    refuses(rule, model(source.format("1,3,1", "4"), s=shape), "another")
    refuses(rule, model(source.format("4", "3,4"), s=shape), "another")
    tiled = source.replace("Expand", "Tile")
    applies(rule, model(tiled.format("2,1,4", "2,3,4"), s=np.array([1, 3, 1])), ops=["Add"])
    refuses(rule, model(tiled.format("2,3,2", "2,3,4"), s=np.array([1, 1, 2])), "repeated")


@pytest.mark.parametrize(("c", "d"), [((), ()), ((3,), (1,)), ((2, 1), (4, 2, 3)), ((1, 1, 1, 1), (3,))])
def test_two_constants(c, d):
    text = "agraph (float[2,3] x) => (float[] y) {{ a = {}(x, c) y = {}(d, a) }}"
    sources = {
        (MergeConstantAdds, "Add"): ("Add", "Add"),
        (MergeConstantMuls, "Mul"): ("Mul", "Mul"),
        (PushMulThroughConstantAdd, "Add Mul"): ("Add", "Mul"),
        (PullMulOutOfConstantAdd, "Add Mul"): ("Mul", "Add"),
    }
    for (rule, ops), (first, second) in sources.items():
        source = model(text.format(first, second), c=normal(*c), d=normal(*d, seed=2))
        if np.broadcast_shapes(c, d) in (c, d):
            applies(rule(), source, ops=ops.split())
        else:
            refuses(rule(), source, "larger than either")


def test_two_constants_that_span_a_table():
    source = model(
        "agraph (float[2,3] x) => (float[2,3] y) { a = Add(x, c) y = Add(a, d) }",
        c=normal(2, 1),
        d=normal(1, 3),
    )
    refuses(MergeConstantAdds(), source, "larger than either")


def test_two_integer_constants_overflow_alike():
    source = model(
        "agraph (int32[3] x) => (int32[3] y) { a = Mul(x, c) y = Mul(a, d) }",
        c=np.array([2**30, -7, 3], np.int32),
        d=np.array(5, np.int32),
    )
    applies(MergeConstantMuls(), source, ops=["Mul"])


@pytest.mark.parametrize(("c", "d"), [(1e30, 1e30), (1e-30, 1e-20), (np.inf, 2.0)])
def test_factors_whose_product_no_float_holds(c, d):
    source = model(
        "agraph (float[3] x) => (float[3] y) { a = Mul(x, c) y = Mul(a, d) }",
        c=np.float32(c),
        d=np.float32(d),
    )
    refuses(MergeConstantMuls(), source, "underflows")


def test_masks_stay_finite():
    source = model(
        "agraph (float[3] x) => (float[3] y) { a = Mul(x, d) y = Add(a, c) }",
        c=np.array([0, np.finfo(np.float32).min, 1], np.float32),
        d=np.float32(0.125),
    )
    refuses(PullMulOutOfConstantAdd(), source, "underflows")
    # The same number everywhere: nothing underflows where a factor is zero.
    zero = model(
        "agraph (float[2] x) => (float[2] y) { a = Mul(x, c) y = Mul(a, d) }",
        c=np.array([0, 2], np.float32),
        d=np.float32(0.5),
    )
    applies(MergeConstantMuls(), zero, ops=["Mul"])


def test_divisors():
    text = "agraph (float[2,3] x) => (float[2,3] y) { y = Div(x, c) }"
    applies(ReplaceConstantDivByMul(), model(text, c=normal(3)), ops=["Mul"])
    for number in (0.0, 1e-30, np.inf, np.nan):
        refuses(ReplaceConstantDivByMul(), model(text, c=np.float32(number)), "cannot be divided")
    source = model("agraph (int32[2] x) => (int32[2] y) { y = Div(x, c) }", c=np.int32(2))
    refuses(ReplaceConstantDivByMul(), source, "no kernel")
    source = model(
        "agraph (float[3] x) => (float[3] y) { a = Mul(x, d) y = Add(a, c) }", c=normal(3), d=np.float32(0)
    )
    refuses(PullMulOutOfConstantAdd(), source, "cannot be divided")


@pytest.mark.parametrize("dtype", ["float", "int32", "int64"])
def test_subtracted_constants(dtype):
    numpy = np.float32 if dtype == "float" else np.dtype(dtype)
    source = model(
        f"agraph ({dtype}[2,3] x) => ({dtype}[2,3] y) {{ y = Sub(x, c) }}", c=np.arange(3).astype(numpy)
    )
    applies(ReplaceConstantSubByAdd(), source, ops=["Add"])
    source = model(
        f"agraph ({dtype}[2,3] x) => ({dtype}[2,3] y) {{ y = Sub(c, x) }}", c=np.array(3).astype(numpy)
    )
    refuses(ReplaceConstantSubByAdd(), source)


def count(rule, proto):
    return RewriteState.start(load(proto).graph, Library([rule], assuming=("finite",))).count


@pytest.mark.parametrize(("rule", "op"), [(AssociateAdds(), "Add"), (AssociateMuls(), "Mul")])
def test_operands_that_are_at_hand(rule, op):
    source = model(
        f"agraph (float[2,3] a, float[2,3] b, float[2,3] c) => (float[2,3] y) {{ t = {op}(a, b) y = {op}(c, t) }}"
    )
    assert count(rule, source) == 2
    applies(rule, source, pick=0, ops=[op, op])
    applies(rule, source, pick=1, ops=[op, op])


@pytest.mark.parametrize("rule", [AssociateAdds(), AssociateMuls()])
def test_smaller_operands_first(rule):
    op = rule.operator
    source = model(
        f"agraph (float[2,4,3] x, float[1,1,3] b, float[1,4,1] c) => (float[2,4,3] y) "
        f"{{ a = Tanh(x) u = Sin(b) v = Sin(c) t = {op}(a, u) y = {op}(t, v) }}"
    )
    assert count(rule, source) == 1
    graph = applies(rule, source)
    assert sorted(n.types[0].shape for n in graph.nodes() if n.op == op) == [(1, 4, 3), (2, 4, 3)]


@pytest.mark.parametrize(
    ("b", "c", "size"), [("2,1", "2,1", 2), ("1", "2,1", 2), ("3", "1,3", 3), ("3", "3", 3)]
)
def test_operands_that_are_smaller_along_one_axis(b, c, size):
    source = model(
        f"agraph (float[2,3] x, float[{b}] b, float[{c}] c) => (float[2,3] y) "
        "{ a = Tanh(x) u = Sin(b) v = Sin(c) t = Add(a, u) y = Add(t, v) }"
    )
    graph = applies(AssociateAdds(), source)
    assert {n.types[0].size for n in graph.nodes() if n.op == "Add"} == {size, 6}


def test_sums_that_stay():
    text = (
        "agraph (float[2,3] x, float[2,3] b, float[2,3] z) => (float[2,3] y) "
        "{ u = Sin(x) v = Sin(b) w = Sin(z) t = Add(u, v) y = Add(t, w) }"
    )
    refuses(AssociateAdds(), model(text), "no operand is smaller")
    text = "agraph (float[2,3] x) => (float[2,3] y) { t = Add(x, u) y = Add(t, v) }"
    refuses(AssociateAdds(), model(text, u=normal(3), v=normal(2, 1)), "two constants")
    text = (
        "agraph (float[2,3] a, float[2,3] b, float[2,3] c) => (float[2,3] y, float[2,3] t) "
        "{ t = Add(a, b) y = Add(c, t) }"
    )
    refuses(AssociateAdds(), model(text))


def test_factor_of_a_sum():
    text = (
        "agraph (float[2,3] x, float[3] v, float[2,1] w) => (float[2,3] y) "
        "{{ a = Mul({}) b = Mul({}) y = Add(a, b) }}"
    )
    for one, other in (("x, v", "x, w"), ("v, x", "x, w"), ("v, x", "w, x")):
        applies(FactorOutOfSum(), model(text.format(one, other)), ops=["Add", "Mul"])
    refuses(FactorOutOfSum(), model(text.format("x, v", "w, w")))
    integers = (
        "agraph (int64[2,3] x, int64[3] v, int64[3] w) => (int64[2,3] y) "
        "{ a = Mul(x, v) b = Mul(w, x) y = Add(b, a) }"
    )
    applies(FactorOutOfSum(), model(integers), ops=["Add", "Mul"])


@pytest.mark.parametrize("kind", ["float", "int64", "double"])
def test_one_as_a_factor(kind):
    text = f"agraph ({kind}[2,4,3,3] x, {kind}[2,4,1,1] w) => ({kind}[2,4,3,3] y) {{ a = Mul(w, x) y = Add(a, x) }}"
    graph = applies(FactorOneOutOfSum(), model(text), ops=["Add", "Mul"])
    assert next(n for n in graph.nodes() if n.op == "Add").types[0].shape == (2, 4, 1, 1)


def test_functions_and_maxima():
    text = "agraph (float[2,3] x, float[3] z) => (float[2,3] y) {{ a = {0}(x) b = {1}(z) y = Max(a, b) }}"
    for name in ("Relu", "Exp", "Floor", "LeakyRelu<alpha=0.5>"):
        applies(PullMonotoneOutOfMax(), model(text.format(name, name)), ops=[name.partition("<")[0], "Max"])
    refuses(PullMonotoneOutOfMax(), model(text.format("Relu", "Sigmoid")))
    refuses(PullMonotoneOutOfMax(), model(text.format("Sin", "Sin")))
    refuses(PullMonotoneOutOfMax(), model(text.format("LeakyRelu<alpha=0.5>", "LeakyRelu<alpha=0.25>")))
    falls = "LeakyRelu<alpha=-0.5>"
    refuses(PullMonotoneOutOfMax(), model(text.format(falls, falls)), "falls")
    for undefined in ("Softsign", "LeakyRelu<alpha=0.0>"):  # NaN at infinity
        refuses(PullMonotoneOutOfMax(), model(text.format(undefined, undefined)))
    text = "agraph (float[2,3] x, float[3] z) => (float[2,3] y) { a = Max(x, z) y = Relu(a) }"
    refuses(PushMonotoneThroughMax(), model(text), "no operand is constant")
    text = "agraph (float[2,3] x) => (float[2,3] y) { a = Min(x, c) y = Relu(a) }"
    graph = applies(PushMonotoneThroughMax(), model(text, c=normal(3)), ops=["Min", "Relu"])
    assert next(n for n in graph.nodes() if n.op == "Min").id in graph.outputs


def test_constants_of_sums():
    source = (
        "agraph (float[N,3] x, float[N,3] z) => (float[N,3] y) { a = Add(x, c) b = Add(d, z) y = Add(a, b) }"
    )
    applies(MergeConstantsOfSum(), model(source, c=normal(3), d=normal(1)), ops=["Add", "Add"])
    wide = source.replace("N,3", "2,3")
    refuses(MergeConstantsOfSum(), model(wide, c=normal(3), d=normal(2, 1)), "larger")
