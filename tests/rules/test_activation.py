"""Activations spelt out, and other spellings of them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import models
import xrlflow
from rewrite_rules.activation import (
    FuseAffineHardSigmoid,
    FuseGelu,
    FuseHardSigmoid,
    FuseHardSwish,
    FuseHardSwishFromClip,
    FuseHardSwishFromScaled,
    FuseLeakyReluFromMax,
    FusePRelu,
    FuseScaledHardSigmoid,
    FuseSigmoid,
    FuseSoftplus,
    FuseSoftsign,
    FuseTanh,
    FuseTanhGelu,
    FuseTanhGeluOfPolynomial,
    MergeClipIntoRelu,
    MergeClips,
    MergeReluIntoClip,
    RemoveNoopMax,
    ReplaceClipByRelu,
    ReplaceDivBySigmoid,
    ReplaceMaxByClip,
    ReplaceMinByClip,
    ReplacePReluByLeakyRelu,
    ReplaceWhereByElu,
    ReplaceWhereByPRelu,
    ReplaceWhereByRelu,
    ReplaceWhereBySelu,
    ReplaceWhereByShrink,
    ReplaceWhereByThresholdedRelu,
    SplitHardSwish,
)
from tests.rules.harness import applies, model, refuses

ONE, ZERO, SIX, THREE, HALF = (np.float32(v) for v in (1, 0, 6, 3, 0.5))


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


SCALES = {"a = Div(x, r)": np.sqrt(2), "a = Mul(x, r)": np.sqrt(0.5), "a = Mul(r, x)": np.sqrt(0.5)}

PRODUCTS = [
    "d = Mul(x, c) y = Mul(d, half)",
    "d = Mul(c, half) y = Mul(x, d)",
    "d = Mul(half, x) y = Mul(c, d)",
]

TWO = np.float32(2)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("product", [*PRODUCTS, "d = Div(x, two) y = Mul(d, c)"])
def test_gelu(scale, product):
    source = f"agraph (float[N,4] x) => (float[N,4] y) {{ {scale} b = Erf(a) c = Add(b, one) {product} }}"
    given = {"r": np.float32(SCALES[scale]), "one": ONE} | (
        {"two": TWO} if "two" in product else {"half": HALF}
    )
    applies(FuseGelu(), model(source, **given), ops=["Gelu"])


def test_gelu_refusals():
    source = "agraph (float[N,4] x, float[N,4] z) => (float[N,4] y) {{ a = Div(x, r) b = Erf(a) c = Add(b, one) {} }}"
    given = {"r": np.float32(np.sqrt(2)), "one": ONE, "half": HALF}
    refuses(FuseGelu(), model(source.format("d = Mul(z, c) y = Mul(d, half)"), **given))
    refuses(
        FuseGelu(),
        model(source.format("d = Mul(x, c) y = Mul(d, half)"), **given | {"half": np.float32(0.6)}),
    )
    refuses(
        FuseGelu(), model(source.format("d = Mul(x, c) y = Mul(d, half)"), **given | {"r": np.float32(1.5)})
    )
    refuses(FuseGelu(), model(source.format("d = Mul(x, c) y = Add(d, half)"), **given))
    shared = source.format("d = Mul(x, c) y = Mul(d, half)").replace("[N,4] y)", "[N,4] y, float[N,4] b)")
    refuses(FuseGelu(), model(shared, **given))


@pytest.mark.parametrize(
    "cube", ["p = Pow(x, three)", "q = Mul(x, x) p = Mul(q, x)", "q = Mul(x, x) p = Mul(x, q)"]
)
@pytest.mark.parametrize("product", PRODUCTS)
def test_tanh_gelu_by_its_own_rule(cube, product):
    source = (
        f"agraph (float[N,4] x) => (float[N,4] y) {{ {cube} k = Mul(p, w) s = Add(k, x) u = Mul(s, root) "
        f"t = Tanh(u) c = Add(one, t) {product} }}"
    )
    given = {"w": np.float32(0.044715), "root": np.float32(np.sqrt(2 / np.pi)), "one": ONE, "half": HALF}
    if "three" in cube:
        given["three"] = np.float32(3)
    applies(FuseTanhGelu(), model(source, **given), ops=["Gelu"])
    refuses(FuseTanhGelu(), model(source, **given | {"w": np.float32(0.0447)}))


def test_hard_sigmoid():
    source = (
        "agraph (float[N,4] x) => (float[N,4] y) { a = Add(x, three) b = Clip(a, zero, six) y = Div(b, six) }"
    )
    given = {"three": np.float32(3), "zero": np.float32(0), "six": np.float32(6)}
    applies(FuseHardSigmoid(), model(source, **given), ops=["HardSigmoid"])
    refuses(FuseHardSigmoid(), model(source, **given | {"three": np.float32(2)}))
    scaled = source.replace("Div(b, six)", "Mul(b, sixth)")
    applies(FuseScaledHardSigmoid(), model(scaled, **given, sixth=np.float32(1 / 6)), ops=["HardSigmoid"])
    refuses(FuseScaledHardSigmoid(), model(scaled, **given, sixth=np.float32(1 / 5)))
    swish = source.replace("y = Div(b, six)", "c = Mul(b, x) y = Div(c, six)")
    applies(FuseHardSwishFromClip(), model(swish, **given), ops=["HardSigmoid", "Mul"])
    refuses(FuseHardSwishFromClip(), model(swish, **given | {"six": np.float32(5)}))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_affine_hard_sigmoid(shape):
    source = "agraph (float[N,4] x) => (float[N,4] y) { m = Mul(x, a) s = Add(m, b) y = Clip(s, zero, one) }"
    given = {
        "a": np.full(shape, 0.3, np.float32),
        "b": np.full(shape, 0.4, np.float32),
        "zero": np.float32(0),
    }
    applies(FuseAffineHardSigmoid(), model(source, **given, one=ONE), ops=["HardSigmoid"])
    refuses(FuseAffineHardSigmoid(), model(source, **given, one=TWO))
    refuses(FuseAffineHardSigmoid(), model(source, **given | {"a": np.full(4, 0.3, np.float32)}, one=ONE))
    # A constant that is computed of so many numbers is not evaluated.
    made = source.replace("{ m", "{ a = ReduceMax<keepdims=0>(many) m")
    many = np.full((2000, *shape), 0.3, np.float32)
    if not shape:
        rest = {k: v for k, v in given.items() if k != "a"}
        refuses(FuseAffineHardSigmoid(), model(made, **rest, many=many, one=ONE), "small constant")


def test_hard_swish_and_back():
    source = "agraph (float[N,4] x) => (float[N,4] y) { a = HardSigmoid<alpha=0.16666667>(x) y = Mul(a, x) }"
    applies(FuseHardSwish(), model(source), ops=["HardSwish"])
    refuses(FuseHardSwish(), model(source.replace("0.16666667", "0.2")))
    applies(
        SplitHardSwish(),
        model("agraph (float[N,4] x) => (float[N,4] y) { y = HardSwish(x) }"),
        ops=["HardSigmoid", "Mul"],
    )


CLIPS = [(-1.0, 1.0), (0.2, 5.0), (None, 0.5), (-0.5, None)]


def bounds(source: str, **given: float | None):
    """The model with bounds as constants; a bound of None is left out."""
    return model(
        source.format(**{k: '""' if v is None else k for k, v in given.items()}),
        **{k: np.float32(v) for k, v in given.items() if v is not None},
    )


@pytest.mark.parametrize("first", CLIPS)
@pytest.mark.parametrize("second", CLIPS)
def test_clips(first, second):
    source = "agraph (float[N,3] x) => (float[N,3] y) {{ r = Clip(x, {a}, {b}) y = Clip(r, {c}, {d}) }}"
    applies(MergeClips(), bounds(source, a=first[0], b=first[1], c=second[0], d=second[1]), ops=["Clip"])


@pytest.mark.parametrize("limits", CLIPS)
def test_clip_and_relu(limits):
    a, b = limits
    before = "agraph (float[N,3] x) => (float[N,3] y) {{ r = Relu(x) y = Clip(r, {a}, {b}) }}"
    after = "agraph (float[N,3] x) => (float[N,3] y) {{ r = Clip(x, {a}, {b}) y = Relu(r) }}"
    applies(MergeReluIntoClip(), bounds(before, a=a, b=b), ops=["Clip"])
    applies(MergeClipIntoRelu(), bounds(after, a=a, b=b), ops=["Clip"])


def test_clip_with_bounds_the_wrong_way_round():
    source = "agraph (float[3] x) => (float[3] y) {{ r = Clip(x, {a}, {b}) y = Relu(r) }}"
    applies(MergeClipIntoRelu(), bounds(source, a=2.0, b=1.0), ops=["Clip"])
    applies(MergeClipIntoRelu(), bounds(source, a=2.0, b=-1.0), ops=["Clip"])
    source = "agraph (float[3] x, float c) => (float[3] y) {{ r = Clip(x, c) y = Relu(r) }}"
    refuses(MergeClipIntoRelu(), bounds(source))


@pytest.mark.parametrize(("name", "op"), [("lstm-unrolled", "LSTM"), ("gru-unrolled", "GRU")])
def test_zoo(name: str, op: str) -> None:
    """Nothing but the cell and what shapes its output is left."""
    proto = models.small(name)
    result = xrlflow.optimize(proto, search="greedy", cost="roofline", measure=False)
    left = [n.op for n in result.graph.nodes() if not n.const]
    assert op in left
    assert len(left) <= 6, left
