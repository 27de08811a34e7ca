"""Operators spelt out of others, and simpler spellings."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from rewrite_rules import idioms
from rewrite_rules.idioms import (
    FlipWhere,
    FoldComparisonOfBool,
    FuseGreaterOrEqual,
    FuseHardSwishFromScaled,
    FuseInstanceNormalization,
    FuseLayerNormalizationByMoments,
    FuseLeakyReluFromMax,
    FuseLessOrEqual,
    FuseLogOfSoftmax,
    FuseLogSoftmax,
    FuseNearestResize,
    FusePRelu,
    FuseReduceL1,
    FuseReduceL2,
    FuseReduceMean,
    FuseReduceSumSquare,
    FuseRotaryEmbedding,
    FuseSigmoid,
    FuseSoftmax,
    FuseSoftplus,
    FuseSoftsign,
    FuseTanh,
    FuseTanhGeluOfPolynomial,
    FuseUnshiftedSoftmax,
    PushNotIntoComparison,
    RemoveConstantWhere,
    RemoveExpandBeforeBroadcast,
    RemoveNoopMax,
    ReplaceCastLike,
    ReplaceClipByRelu,
    ReplaceDivByReciprocal,
    ReplaceDivBySigmoid,
    ReplaceMaxByClip,
    ReplaceMinByClip,
    ReplaceMulByNeg,
    ReplaceNegByMul,
    ReplacePowByProduct,
    ReplacePowBySqrt,
    ReplacePReluByLeakyRelu,
    ReplaceWhereByCast,
    ReplaceWhereByElu,
    ReplaceWhereByPRelu,
    ReplaceWhereByRelu,
    ReplaceWhereBySelu,
    ReplaceWhereByShrink,
    ReplaceWhereByThresholdedRelu,
)
from tests.rules.harness import applies, model, refuses
from xrlflow.rewrite import declared_in

EXAMPLES = [(r, e) for r in declared_in(idioms) for e in r.examples]
# The last examples of these are near misses.
NEAR_MISSES = {"PushNotIntoComparison": 1, "RemoveExpandBeforeBroadcast": 2}

ONE, ZERO, SIX, THREE = (np.float32(v) for v in (1, 0, 6, 3))


@pytest.mark.parametrize(("rule", "example"), EXAMPLES, ids=lambda v: getattr(v, "name", ""))
def test_examples(rule, example):
    if rule.examples.index(example) < len(rule.examples) - NEAR_MISSES.get(rule.name, 0):
        applies(rule, model(example))
    else:
        refuses(rule, model(example))


def unary(body: str, **constants: np.ndarray | np.generic) -> onnx.ModelProto:
    """y of x[N, 4]."""
    return model(f"agraph (float[N,4] x) => (float[N,4] y) {{ {body} }}", **constants)


@pytest.mark.parametrize(
    "compare", ["Less(x, z)", "LessOrEqual(x, z)", "Greater(z, x)", "GreaterOrEqual(z, x)"]
)
def test_relu(compare):
    rule, where = ReplaceWhereByRelu(), f"c = {compare} y = Where(c, {{}})"
    applies(rule, unary(where.format("z, x"), z=ZERO), ops=["Relu"])
    refuses(rule, unary(where.format("z, x"), z=ONE))
    refuses(rule, unary(where.format("x, z"), z=ZERO))
    refuses(rule, unary("c = Greater(x, z) y = Where(c, x, z)", z=ZERO), "NaN")


def test_what_is_read_elsewhere():
    source = "agraph (float[N,4] x) => (float[N,4] y, bool[N,4] c) { c = Less(x, z) y = Where(c, z, x) }"
    refuses(ReplaceWhereByRelu(), model(source, z=ZERO), "read elsewhere")


@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 4)])
@pytest.mark.parametrize(
    "where",
    [
        "c = Less(x, z) y = Where(c, m, x)",
        "c = Greater(x, z) y = Where(c, x, m)",
        "c = Less(z, x) y = Where(c, x, m)",
    ],
)
def test_prelu(where, shape):
    slope = np.linspace(-0.5, 0.5, int(np.prod(shape)) or 1, dtype=np.float32).reshape(shape)
    op = "LeakyRelu" if slope.size == 1 else "PRelu"
    applies(ReplaceWhereByPRelu(), unary(f"m = Mul(a, x) {where}", z=ZERO, a=slope), ops=[op])
    refuses(ReplaceWhereByPRelu(), unary(f"m = Add(a, x) {where}", z=ZERO, a=slope))
    refuses(ReplaceWhereByPRelu(), unary(f"m = Mul(a, x) {where}", z=ONE, a=slope))


def test_prelu_of_a_slope_that_changes():
    source = (
        "agraph (float[N,4] x, float[4] a) => (float[N,4] y) {{ m = Mul(a, x) c = {}(x, z) y = Where(c, "
        "{}) }}"
    )
    applies(ReplaceWhereByPRelu(), model(source.format("Less", "m, x"), z=ZERO), ops=["PRelu"])
    refuses(ReplaceWhereByPRelu(), model(source.format("Greater", "x, m"), z=ZERO))
    wide = (
        "agraph (float[4] x, float[3,4] a) => (float[3,4] y) { m = Mul(a, x) c = Less(x, z) y = "
        "Where(c, m, x) }"
    )
    refuses(ReplaceWhereByPRelu(), model(wide, z=ZERO))


def test_prelu_of_two_relus():
    source = "p = Relu(x) n = Neg(x) r = Relu(n) m = Mul(r, a) y = {}"
    for slope in (np.float32(0.25), np.array([0.5, 1, 2, -1], np.float32)):
        op = "LeakyRelu" if slope.ndim == 0 else "PRelu"
        applies(FusePRelu(), unary(source.format("Sub(p, m)"), a=slope), ops=[op])
        applies(FusePRelu(), unary(source.format("Add(m, p)"), a=slope), ops=[op])
        refuses(FusePRelu(), unary(source.format("Sub(m, p)"), a=slope))
    refuses(FusePRelu(), unary(source.format("Sub(p, m)").replace("Neg", "Abs"), a=np.float32(0.25)))


def test_prelu_of_one_number():
    slope = np.full((4,), 0.25, np.float32)
    applies(ReplacePReluByLeakyRelu(), unary("y = PRelu(x, a)", a=slope), ops=["LeakyRelu"])
    slope[1] = 0.5
    refuses(ReplacePReluByLeakyRelu(), unary("y = PRelu(x, a)", a=slope), "not one number")


def test_leaky_relu_of_max():
    for alpha in (0.1, 0.9):
        applies(
            FuseLeakyReluFromMax(),
            unary("m = Mul(a, x) y = Max(m, x)", a=np.float32(alpha)),
            ops=["LeakyRelu"],
        )
    for alpha in (0.0, 1.5, -0.5):
        refuses(FuseLeakyReluFromMax(), unary("m = Mul(a, x) y = Max(x, m)", a=np.float32(alpha)), "slope")


@pytest.mark.parametrize("rule", [ReplaceWhereByElu(), ReplaceWhereBySelu()])
def test_elu(rule):
    if rule.name == "ReplaceWhereByElu":
        source = "c = Less(x, z) e = Exp(x) s = {} m = Mul(a, s) y = Where(c, m, x)"
        applies(rule, unary(source.format("Sub(e, one)"), z=ZERO, a=np.float32(0.7), one=ONE), ops=["Elu"])
        refuses(rule, unary(source.format("Sub(one, e)"), z=ZERO, a=np.float32(0.7), one=ONE))
        refuses(rule, unary(source.format("Sub(e, one)"), z=ZERO, a=np.float32(0.7), one=THREE))
    else:
        source = (
            "c = Less(x, z) e = Exp(x) m = Mul(a, e) s = Sub(m, {}) n = Mul(g, s) p = Mul(g, x) y = "
            "Where(c, n, p)"
        )
        given = {"z": ZERO, "a": np.float32(1.67), "g": np.float32(1.05)}
        applies(rule, unary(source.format("a"), **given), ops=["Selu"])
        refuses(rule, unary(source.format("g"), **given))
        refuses(rule, unary(source.format("a"), **given | {"g": ZERO}))
        refuses(rule, unary("q = Neg(x) " + source.format("a").replace("Mul(g, x)", "Mul(g, q)"), **given))


def test_thresholded_relu_and_shrink():
    source = "c = Less(a, x) y = Where(c, x, z)"
    applies(
        ReplaceWhereByThresholdedRelu(), unary(source, a=np.float32(0.3), z=ZERO), ops=["ThresholdedRelu"]
    )
    refuses(
        ReplaceWhereByThresholdedRelu(),
        unary(source.replace("Less", "LessOrEqual"), a=np.float32(0.3), z=ZERO),
    )
    source = "c = Less(x, n) p = Add(x, b) m = Sub(x, b) d = Less(l, x) i = Where(d, m, z) y = Where(c, p, i)"
    given = {"n": np.float32(-0.3), "l": np.float32(0.3), "b": np.float32(0.1), "z": ZERO}
    applies(ReplaceWhereByShrink(), unary(source, **given), ops=["Shrink"])
    refuses(ReplaceWhereByShrink(), unary(source, **given | {"n": np.float32(-0.4)}))
    refuses(ReplaceWhereByShrink(), unary(source.replace("Sub(x, b)", "Add(x, b)"), **given))
    # At a bound itself it is 0, and NaN stays NaN.
    for other in ("LessOrEqual(x, n)", "Greater(x, n)"):
        refuses(ReplaceWhereByShrink(), unary(source.replace("Less(x, n)", other), **given))
    refuses(ReplaceWhereByShrink(), unary(source.replace("Less(l, x)", "LessOrEqual(l, x)"), **given))
    hard = "c = Less(x, n) d = Less(l, x) i = Where(d, x, z) y = Where(c, x, i)"
    applies(ReplaceWhereByShrink(), unary(hard, **{k: given[k] for k in "nlz"}), ops=["Shrink"])


def test_clip():
    applies(ReplaceMaxByClip(), unary("y = Max(a, x)", a=np.float32(0.2)), ops=["Clip"])
    applies(ReplaceMinByClip(), unary("y = Min(x, a)", a=np.full((1, 4), 0.2, np.float32)), ops=["Clip"])
    refuses(
        ReplaceMaxByClip(), unary("y = Max(a, x)", a=np.array([1, 2, 3, 4], np.float32)), "not one number"
    )
    wide = model(
        "agraph (float[4] x) => (float[2,4] y) { y = Min(x, a) }", a=np.full((2, 1), 0.2, np.float32)
    )
    refuses(ReplaceMinByClip(), wide, "may broadcast")
    infinite = np.float32(np.inf)
    applies(ReplaceClipByRelu(), unary("y = Clip(x, z, i)", z=ZERO, i=infinite), ops=["Relu"])
    refuses(ReplaceClipByRelu(), unary("y = Clip(x, z, i)", z=ONE, i=infinite), "not 0")
    refuses(ReplaceClipByRelu(), unary("y = Clip(x, z)", z=ZERO))  # infinity is clipped to a number
    refuses(ReplaceClipByRelu(), unary("y = Clip(x, z, s)", z=ZERO, s=SIX), "upper bound")


def test_bounds_that_are_infinite():
    infinite = np.float32(np.inf)
    applies(RemoveNoopMax(), unary("r = Relu(x) y = Max(r, a)", a=-infinite), ops=["Relu"])
    applies(RemoveNoopMax(), unary("r = Relu(x) y = Clip(r, b, a)", a=infinite, b=-infinite), ops=["Relu"])
    refuses(RemoveNoopMax(), unary("r = Relu(x) y = Clip(r, , a)", a=infinite))  # no lower bound is a number
    refuses(RemoveNoopMax(), unary("r = Relu(x) y = Max(r, a)", a=infinite))
    refuses(RemoveNoopMax(), unary("r = Relu(x) y = Clip(r, z, a)", z=ZERO, a=infinite))


@pytest.mark.parametrize("divide", ["Div(one, s)", "Reciprocal(s)"])
@pytest.mark.parametrize("negate", ["Neg(x)", "Mul(m, x)"])
def test_sigmoid(divide, negate):
    source = f"n = {negate} e = Exp(n) s = Add(one, e) y = {divide}"
    given = {"one": ONE} | ({"m": np.float32(-1)} if "m" in negate else {})
    applies(FuseSigmoid(), unary(source, **given), ops=["Sigmoid"])
    refuses(FuseSigmoid(), unary(source, **given | {"one": THREE}))
    if "m" in negate:
        refuses(FuseSigmoid(), unary(source, **given | {"m": np.float32(-2)}))


def test_silu():
    source = "n = Neg(x) e = Exp(n) s = Add(one, e) y = Div({}, s)"
    applies(ReplaceDivBySigmoid(), unary(source.format("x"), one=ONE), ops=["Mul", "Sigmoid"])
    refuses(ReplaceDivBySigmoid(), unary(source.format("one"), one=ONE))
    refuses(ReplaceDivBySigmoid(), unary(source.replace("Neg", "Abs").format("x"), one=ONE))


def test_softplus_tanh_softsign():
    applies(FuseSoftplus(), unary("e = Exp(x) s = Add(one, e) y = Log(s)", one=ONE), ops=["Softplus"])
    refuses(FuseSoftplus(), unary("e = Exp(x) s = Add(one, e) y = Log(s)", one=THREE))
    source = "n = Neg(x) e = Exp(x) f = Exp(n) s = Sub({}) t = Add(f, e) y = Div(s, t)"
    applies(FuseTanh(), unary(source.format("e, f")), ops=["Tanh"])
    refuses(FuseTanh(), unary(source.format("f, e")))
    applies(FuseSoftsign(), unary("a = Abs(x) s = Add(a, one) y = Div(x, s)", one=ONE), ops=["Softsign"])
    refuses(FuseSoftsign(), unary("a = Abs(x) s = Add(a, one) y = Div(s, x)", one=ONE))


@pytest.mark.parametrize(
    "product",
    [
        "m = Mul(x, c) y = Mul(m, r)",
        "m = Mul(c, r) y = Mul(x, m)",
        "m = Mul(r, x) y = Mul(m, c)",
        "m = Div(x, s) y = Mul(c, m)",
        "m = Div(c, s) y = Mul(x, m)",
    ],
)
def test_hard_swish(product):
    source = f"a = Add(x, t) c = Clip(a, z, s) {product}"
    given = {"t": THREE, "z": ZERO, "s": SIX} | (
        {"r": np.float32(1 / 6)} if " r" in product or "r," in product else {}
    )
    applies(FuseHardSwishFromScaled(), unary(source, **given), ops=["HardSigmoid", "Mul"])
    refuses(FuseHardSwishFromScaled(), unary(source, **given | {"t": SIX}))


SOFTMAX = "m = ReduceMax(x, i) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, j) {}"


@pytest.mark.parametrize("divide", ["y = Div(e, s)", "r = Reciprocal(s) y = Mul(e, r)"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(divide, axis):
    given = {"i": np.array([axis]), "j": np.array([axis])}
    applies(FuseSoftmax(), unary(SOFTMAX.format(divide), **given), ops=["Softmax"])
    refuses(FuseSoftmax(), unary(SOFTMAX.format(divide), **given | {"i": np.array([1 - axis % 2])}))
    refuses(FuseSoftmax(), unary(SOFTMAX.format(divide).replace("ReduceMax", "ReduceMin"), **given))
    plain = f"e = Exp(x) s = ReduceSum(e, j) {divide}"
    applies(FuseUnshiftedSoftmax(), unary(plain, j=np.array([axis])), ops=["Softmax"])
    refuses(FuseUnshiftedSoftmax(), unary(SOFTMAX.format(divide), **given))
    if "Div" in divide:
        refuses(FuseUnshiftedSoftmax(), unary(plain.replace("Div(e, s)", "Div(s, e)"), j=np.array([axis])))


def test_log_softmax():
    given = {"i": np.array([0]), "j": np.array([0])}
    applies(FuseLogSoftmax(), unary(SOFTMAX.format("l = Log(s) y = Sub(d, l)"), **given), ops=["LogSoftmax"])
    refuses(FuseLogSoftmax(), unary(SOFTMAX.format("l = Log(s) y = Sub(l, d)"), **given))
    refuses(
        FuseLogSoftmax(), unary(SOFTMAX.format("l = Log(s) y = Sub(d, l)"), **given | {"i": np.array([1])})
    )
    applies(FuseLogOfSoftmax(), unary("s = Softmax<axis=0>(x) y = Log(s)"), ops=["LogSoftmax"])


def test_a_shape_that_is_read_elsewhere():
    """How it is computed is no part of what is fused."""
    text = (
        "agraph (float[N,4] x) => (float[N,4] y, int64[2] t) { f = Shape<start=0, end=1>(x) "
        "t = Concat<axis=0>(f, one) m = ReduceMax(x, i) d = Sub(x, m) e = Exp(d) s = ReduceSum<keepdims=0>(e, i) "
        "l = Log(s) v = Reshape(l, t) y = Sub(d, v) }"
    )
    ops = ["Concat", "LogSoftmax", "Shape"]
    applies(FuseLogSoftmax(), model(text, i=np.array([1]), one=np.array([1])), ops=ops)


def reduced(body: str, x: str = "2,3,4", y: str = "2,1,4", **constants) -> onnx.ModelProto:
    return model(f"agraph (float[{x}] x) => (float[{y}] y) {{ {body} }}", **constants)


def test_reductions():
    i = np.array([1])
    applies(FuseReduceMean(), reduced("s = ReduceSum(x, i) y = Div(s, n)", i=i, n=THREE), ops=["ReduceMean"])
    third = np.array([1 / 3], np.float32)
    applies(FuseReduceMean(), reduced("s = ReduceSum(x, i) y = Mul(n, s)", i=i, n=third), ops=["ReduceMean"])
    refuses(FuseReduceMean(), reduced("s = ReduceSum(x, i) y = Div(s, n)", i=i, n=SIX), "another number")
    refuses(FuseReduceMean(), reduced("s = ReduceSum(x, i) y = Div(n, s)", i=i, n=THREE))
    applies(FuseReduceSumSquare(), reduced("s = Mul(x, x) y = ReduceSum(s, i)", i=i), ops=["ReduceSumSquare"])
    refuses(FuseReduceSumSquare(), reduced("a = Relu(x) s = Mul(x, a) y = ReduceSum(s, i)", i=i))
    few, many = "agraph (float[3,8,8] x)", "agraph (float[3,8,9] x)"
    for rule, inner in ((FuseReduceSumSquare(), "Mul(x, x)"), (FuseReduceL1(), "Abs(x)")):
        graph = " => (float[3] y) { s = " + inner + " y = ReduceSum<keepdims=0>(s, i) }"
        applies(rule, model(few + graph, i=np.array([1, 2])))
        refuses(rule, model(many + graph, i=np.array([1, 2])), "loses accuracy")
    applies(FuseReduceL1(), reduced("s = Abs(x) y = ReduceSum(s, i)", i=i), ops=["ReduceL1"])
    applies(
        FuseReduceL2(),
        reduced("s = ReduceSumSquare<keepdims=0>(x, i) y = Sqrt(s)", y="2,4", i=i),
        ops=["ReduceL2"],
    )


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


def test_cast_like():
    source = "agraph (float[N,4] x, int64[3] z) => (int64[N,4] y) { y = CastLike(x, z) }"
    applies(ReplaceCastLike(), model(source), ops=["Cast"])


def test_where():
    source = "agraph (float[N,4] x, float[4] z) => (float[N,4] y) {{ y = Where(c, {}) }}"
    applies(RemoveConstantWhere(), model(source.format("x, z"), c=np.ones((1, 4), np.bool_)))
    applies(RemoveConstantWhere(), model(source.format("z, x"), c=np.bool_(False)))
    refuses(RemoveConstantWhere(), model(source.format("z, x"), c=np.bool_(True)), "may broadcast")
    mixed = np.array([True, False, True, True])
    refuses(RemoveConstantWhere(), model(source.format("x, z"), c=mixed), "not the same")
    source = (
        "agraph (bool[N,4] c, float[N,4] x, float[4] z) => (float[N,4] y) { n = Not(c) y = Where(n, x, z) }"
    )
    applies(FlipWhere(), model(source), ops=["Where"])
    source = "agraph (bool[N,4] c) => (float[N,4] y) { y = Where(c, a, b) }"
    applies(ReplaceWhereByCast(), model(source, a=ONE, b=np.zeros(4, np.float32)), ops=["Cast"])
    applies(ReplaceWhereByCast(), model(source, a=ZERO, b=ONE), ops=["Cast", "Not"])
    refuses(ReplaceWhereByCast(), model(source, a=THREE, b=ZERO), "not 1 and 0")
    wide = model(
        source.replace("bool[N,4]", "bool[4]").replace("[N,4] y", "[2,4] y"),
        a=np.ones((2, 4), np.float32),
        b=ZERO,
    )
    refuses(ReplaceWhereByCast(), wide, "may broadcast")


def test_comparisons():
    source = (
        "agraph (float[N,4] x, float[4] z) => (bool[N,4] y) {{ a = {}(x, z) b = Equal(z, x) y = {}(b, a) }}"
    )
    applies(FuseLessOrEqual(), model(source.format("Less", "Or")), ops=["LessOrEqual"])
    applies(FuseGreaterOrEqual(), model(source.format("Greater", "Or")), ops=["GreaterOrEqual"])
    refuses(FuseLessOrEqual(), model(source.format("Less", "And")))
    refuses(FuseLessOrEqual(), model(source.format("Less", "Or").replace("Less(x, z)", "Less(z, z)")))
    source = "agraph ({0}[N,4] x, {0}[4] z) => (bool[N,4] y) {{ a = Less(x, z) y = Not(a) }}"
    applies(PushNotIntoComparison(), model(source.format("int64")), ops=["GreaterOrEqual"])
    refuses(PushNotIntoComparison(), model(source.format("float")), "NaN")


def test_comparisons_of_booleans():
    source = "agraph (bool[N,4] c) => (bool[N,4] y) {{ i = Cast<to=1>(c) b = {} y = Not(b) }}"
    for compare, ops in (
        ("Equal(i, one)", ["Not"]),
        ("Equal(zero, i)", ["Not", "Not"]),
        ("Greater(i, zero)", ["Not"]),
        ("Greater(one, i)", ["Not", "Not"]),
    ):
        name = "one" if "one" in compare else "zero"
        given = {name: ONE if name == "one" else ZERO}
        applies(FoldComparisonOfBool(), model(source.format(compare), **given), ops=ops)
    refuses(FoldComparisonOfBool(), model(source.format("Greater(i, one)"), one=ONE), "the same for both")
    refuses(
        FoldComparisonOfBool(),
        model(source.replace("bool[N,4] c", "int64[N,4] c").format("Equal(i, one)"), one=ONE),
    )


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


def test_layer_normalization_of_jax():
    """As jax2tf writes it: sums without their axes, a variance that is at least 0, computed shapes."""
    body = (
        "d = Shape<start=0, end=1>(x) u = Concat<axis=0>(d, r) s = ReduceSum<keepdims=0, "
        "noop_with_empty_axes=1>(x, i) "
        "m = Mul(s, n) p = Mul(x, x) q = ReduceSum<keepdims=0, noop_with_empty_axes=1>(p, i) w = Mul(q, n) "
        "t = Mul(m, m) "
        "v = Sub(w, t) c = Max(z, v) g = Reshape(c, u) e = Add(g, k) f = Sqrt(e) h = Reciprocal(f) j = "
        "Mul(h, scale) "
        "l = Reshape(m, u) o = Sub(x, l) a = Mul(o, j) y = Add(a, bias)"
    )
    given = {
        "n": np.float32(0.25),
        "z": ZERO,
        "k": np.float32(1e-3),
        "r": np.array([3, 1]),
        "i": np.array([2]),
    }
    given |= {"scale": np.linspace(1, 2, 4, dtype=np.float32), "bias": np.ones((1, 4), np.float32)}
    rule = FuseLayerNormalizationByMoments()
    proto = reduced(body, x="N,3,4", y="N,3,4", **given)
    applies(rule, proto, ops=["LayerNormalization"])
    middle = given | {"r": np.array([1, 4]), "i": np.array([1]), "n": np.float32(1 / 3)}
    proto = reduced(body, x="N,3,4", y="N,3,4", **middle | {"scale": np.ones((3, 1), np.float32)})
    refuses(rule, proto, "other axes")
    middle |= {"scale": np.array([[1], [2], [3]], np.float32), "bias": np.float32(0.5)}
    ops = ["LayerNormalization", "Transpose", "Transpose"]
    applies(rule, reduced(body, x="N,3,4", y="N,3,4", **middle), ops=ops)
    refuses(rule, reduced(body, x="N,3,4", y="N,3,4", **given | {"n": np.float32(0.5)}))
    refuses(rule, reduced(body.replace("Sub(w, t)", "Sub(t, w)"), x="N,3,4", y="N,3,4", **given))


def test_instance_normalization():
    body = (
        "m = ReduceMean(x, i) c = Sub(x, m) p = Mul(c, c) v = ReduceMean(p, i) a = Add(v, e) d = Sqrt(a) n "
        "= Div(c, d) "
        "s = Mul(n, g) y = Add(s, b)"
    )
    given = {"i": np.array([3, 2]), "e": np.float32(1e-3), "g": np.ones((2, 1, 1), np.float32), "b": ONE}
    rule, image = FuseInstanceNormalization(), {"x": "N,2,H,W", "y": "N,2,H,W"}
    applies(rule, reduced(body, **image, **given), ops=["InstanceNormalization"])
    refuses(
        rule, reduced(body, x="N,2,3,4", y="N,2,3,4", **given | {"g": np.ones(4, np.float32)}), "other axes"
    )
    refuses(rule, reduced(body, **image, **given | {"i": np.array([1, 2, 3])}))
    refuses(rule, reduced(body.replace("Div(c, d)", "Div(d, c)"), **image, **given))


def test_tanh_gelu():
    body = (
        "a = Mul(k, x) p = Mul(x, a) q = Mul(x, p) s = Add(x, q) u = Mul(r, s) t = Tanh(u) v = Add(one, "
        "t) w = Mul(h, v) y = Mul(x, w)"
    )
    given = {"k": np.float32(0.044715), "r": np.float32(np.sqrt(2 / np.pi)), "one": ONE, "h": np.float32(0.5)}
    applies(FuseTanhGeluOfPolynomial(), unary(body, **given), ops=["Gelu"])
    refuses(FuseTanhGeluOfPolynomial(), unary(body, **given | {"k": np.float32(0.0447)}), "another factor")
    refuses(FuseTanhGeluOfPolynomial(), unary(body, **given | {"h": ONE}))
    refuses(FuseTanhGeluOfPolynomial(), unary(body.replace("Mul(x, w)", "Mul(u, w)"), **given))


ROTARY = (
    "agraph (float[2,3,5,4] x, float[2,5,2] f{}) => (float[2,3,5,4] y) {{ d = Concat<axis=-1>({}) a = "
    "Cos(d) b = Sin(d) "
    "c = Unsqueeze(a, i) s = Unsqueeze(b, i) p, q = Split<axis=-1>(x, k) n = Neg({}) r = Concat<axis=-1>(n, "
    "{}) "
    "u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }}"
)


def test_rotary_embedding():
    given = {"i": np.array([1]), "k": np.array([2, 2])}
    rule = FuseRotaryEmbedding()
    ops = [
        "Concat",
        "Cos",
        "RotaryEmbedding",
        "Sin",
        "Slice",
        "Slice",
        "Squeeze",
        "Squeeze",
        "Unsqueeze",
        "Unsqueeze",
    ]
    applies(rule, model(ROTARY.format("", "f, f", "q", "p"), **given), ops=ops)
    refuses(rule, model(ROTARY.format(", float[2,5,2] g", "f, g", "q", "p"), **given), "other angles")
    refuses(rule, model(ROTARY.format("", "f, f", "p", "q"), **given))
    uneven = given | {"k": np.array([2, 2]), "i": np.array([1])}
    one_batch = ROTARY.replace("float[2,5,2] f", "float[1,5,2] f").format("", "f, f", "q", "p")
    refuses(rule, model(one_batch, **uneven), "each position")


def test_nearest_neighbours():
    body = "r = Reshape(x, a) e = Expand(r, b) y = Reshape(e, c)"
    given = {
        "a": np.array([1, 2, 3, 1, 4, 1]),
        "b": np.array([1, 2, 3, 2, 4, 3]),
        "c": np.array([1, 2, 6, 12]),
    }
    image = {"x": "1,2,3,4", "y": "1,2,6,12"}
    applies(FuseNearestResize(), reduced(body, **image, **given), ops=["Resize"])
    swapped = given | {"a": np.array([1, 2, 1, 3, 4, 1]), "b": np.array([1, 2, 2, 3, 4, 3])}
    refuses(FuseNearestResize(), reduced(body, **image, **swapped), "into pixels")
