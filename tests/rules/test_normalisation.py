"""Normalisations and activations, in the spellings of exporters."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rewrite_rules import normalisation
from rewrite_rules.normalisation import (
    FuseAffineHardSigmoid,
    FuseGelu,
    FuseHardSigmoid,
    FuseHardSwish,
    FuseHardSwishFromClip,
    FuseLayerNormalization,
    FuseMomentsLayerNormalization,
    FuseRMSNormalization,
    FuseScaledHardSigmoid,
    FuseTanhGelu,
    ReplaceAddBySum,
    SplitHardSwish,
)
from tests.rules.harness import applies, model, refuses
from xrlflow.rewrite import RegionRule, declared_in

EXAMPLES = [(r, e) for r in declared_in(normalisation) if isinstance(r, RegionRule) for e in r.examples]


@pytest.mark.parametrize(("rule", "example"), EXAMPLES, ids=lambda v: getattr(v, "name", ""))
def test_examples(rule, example):
    applies(rule, model(example))


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def layer_norm(
    *,
    x: str = "float[2,3,4]",
    square: str = "Pow(d, two)",
    divide: str = "n = Div(d, r)",
    again: str = "",
    scale: str = "a = Mul(n, g)",
    bias: str = "y = Add(a, b)",
    outputs: str = "float[2,3,4] y",
    axes: tuple[int, ...] = (-1,),
    g: np.ndarray | None = None,
    b: np.ndarray | None = None,
):
    given = {
        "i": np.array(axes),
        "two": np.float32(2),
        "eps": np.float32(1e-3),
        "g": numbers(4) if g is None else g,
        "b": numbers(4) if b is None else b,
    }
    source = (
        f"agraph ({x} x) => ({outputs}) {{ m = ReduceMean(x, i) d = Sub(x, m) {again} s = {square} "
        f"v = ReduceMean(s, i) e = Add(v, eps) r = Sqrt(e) {divide} {scale} {bias} }}"
    )
    return model(source, **{k: v for k, v in given.items() if f" {k})" in source or f"({k}," in source})


SQUARES = ["Pow(d, two)", "Mul(d, d)"]
DIVISIONS = ["n = Div(d, r)", "t = Reciprocal(r) n = Mul(d, t)", "t = Reciprocal(r) n = Mul(t, d)"]


@pytest.mark.parametrize(("square", "divide"), list(itertools.product(SQUARES, DIVISIONS)))
def test_layer_normalization(square, divide):
    applies(FuseLayerNormalization(), layer_norm(square=square, divide=divide), ops=["LayerNormalization"])
    twice = divide.replace("d,", "d2,").replace("t, d)", "t, d2)")
    applies(
        FuseLayerNormalization(),
        layer_norm(square=square, divide=twice, again="m2 = ReduceMean(x, i) d2 = Sub(x, m2)"),
        ops=["LayerNormalization"],
    )


def test_layer_normalization_parameters():
    rule, ops = FuseLayerNormalization(), ["LayerNormalization"]
    applies(rule, layer_norm(scale="", bias="y = Identity(n)"), ops=["Identity", *ops])
    applies(rule, layer_norm(scale="", bias="y = Add(b, n)"), ops=ops)
    applies(rule, layer_norm(scale="y = Mul(g, n)", bias=""), ops=ops)
    for shape in ((), (1,), (1, 4), (1, 1, 4), (1, 1, 1)):
        applies(rule, layer_norm(g=numbers(*shape), b=numbers(*shape)), ops=ops)
    applies(rule, layer_norm(axes=(1, 2), g=numbers(3, 4), b=numbers(1, 3, 4)), ops=ops)
    applies(rule, layer_norm(axes=(0, 1, 2), g=numbers(2, 3, 4), b=numbers(1)), ops=ops)
    applies(rule, layer_norm(x="float[N,S,4]", outputs="float[N,S,4] y"), ops=ops)
    # What does not fit, or adds a dimension, stays beside it.
    wide = layer_norm(x="float[3,4]", outputs="float[1,3,4] y", g=numbers(1, 1, 4), b=numbers(4))
    applies(rule, wide, ops=["Add", "LayerNormalization", "Mul"])
    applies(rule, layer_norm(g=numbers(3, 4)), ops=["Add", "LayerNormalization", "Mul"])
    applies(
        rule, layer_norm(axes=(1, 2), g=numbers(4), b=numbers(4)), ops=["Add", "LayerNormalization", "Mul"]
    )


def test_layer_normalization_refusals():
    rule = FuseLayerNormalization()
    refuses(rule, layer_norm(axes=(1,), g=numbers(3, 1), b=numbers(4)))
    refuses(rule, layer_norm(outputs="float[2,3,4] y, float[2,3,1] r"))
    refuses(rule, layer_norm(outputs="float[2,3,4] y, float[2,3,4] s"), "read elsewhere")
    refuses(rule, layer_norm(divide="n = Div(x, r)"), "what is divided")
    refuses(rule, layer_norm(divide="n = Div(r, d)"), "what is divided")
    refuses(rule, layer_norm(divide="k = Relu(r) n = Div(d, k)"), "what is divided")
    refuses(rule, layer_norm(square="Pow(d, eps)"))
    refuses(
        rule,
        layer_norm(x="float[2,3,D]", outputs="float[2,3,D] y", scale="y = Identity(n)", bias=""),
        "not a known number",
    )


def test_layer_normalization_of_doubles():
    source = (
        "agraph (double[2,4] x) => (double[2,4] y) { m = ReduceMean(x, i) d = Sub(x, m) s = Mul(d, d) "
        "v = ReduceMean(s, i) e = Add(v, eps) r = Sqrt(e) y = Div(d, r) }"
    )
    refuses(FuseLayerNormalization(), model(source, i=np.array([1]), eps=np.float64(1e-5)), "element type")


def test_moments():
    source = (
        "agraph (float[2,3,4] x) => (float[2,3,4] y) { m = ReduceMean(x, i) d = Sub(x, m) q = Mul(d, d) "
        "v = ReduceMean(q, i) e = Add(v, eps) r = Sqrt(e) t = Reciprocal(r) g = Mul(s, t) "
        "xg = Mul(g, x) mg = Mul(m, g) c = Sub(b, mg) y = Add(c, xg) }"
    )
    given = {"i": np.array([2]), "eps": np.float32(1e-3), "s": numbers(4), "b": numbers(4)}
    applies(FuseMomentsLayerNormalization(), model(source, **given), ops=["LayerNormalization"])
    swapped = source.replace("Sub(b, mg)", "Sub(mg, b)")
    refuses(FuseMomentsLayerNormalization(), model(swapped, **given))


@pytest.mark.parametrize("divide", ["n = Div(x, r)", "t = Reciprocal(r) n = Mul(t, x)"])
@pytest.mark.parametrize("scale", ["y = Mul(n, g)", "y = Mul(g, n)", "y = Identity(n)"])
def test_rms(divide, scale):
    source = (
        "agraph (float[N,3,4] x) => (float[N,3,4] y) "
        f"{{ s = Mul(x, x) v = ReduceMean(s, i) e = Add(eps, v) r = Sqrt(e) {divide} {scale} }}"
    )
    given = {"i": np.array([-1]), "eps": np.float32(1e-3)} | ({"g": numbers(4)} if "g" in scale else {})
    ops = ["Identity", "RMSNormalization"] if "Identity" in scale else ["RMSNormalization"]
    applies(FuseRMSNormalization(), model(source, **given), ops=ops)
    if "Div" in divide:
        refuses(FuseRMSNormalization(), model(source.replace("Div(x, r)", "Div(r, x)"), **given))


HALF, ONE = np.float32(0.5), np.float32(1)
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
def test_tanh_gelu(cube, product):
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


def test_hard_swish():
    source = "agraph (float[N,4] x) => (float[N,4] y) { a = HardSigmoid<alpha=0.16666667>(x) y = Mul(a, x) }"
    applies(FuseHardSwish(), model(source), ops=["HardSwish"])
    refuses(FuseHardSwish(), model(source.replace("0.16666667", "0.2")))
    applies(
        SplitHardSwish(),
        model("agraph (float[N,4] x) => (float[N,4] y) { y = HardSwish(x) }"),
        ops=["HardSigmoid", "Mul"],
    )


def test_sum():
    source = (
        "agraph (float[N,3,4] a, float[{0}] b) => (float[N,3,4] y{1}) "
        "{{ c = Add(a, b) y = LayerNormalization(c, s) }}"
    )
    given = {"s": numbers(4)}
    for shape in ("N,3,4", "4", "1,3,1"):
        applies(
            ReplaceAddBySum(), model(source.format(shape, ""), **given), ops=["LayerNormalization", "Sum"]
        )
    refuses(ReplaceAddBySum(), model(source.format("4", ", float[N,3,4] c"), **given), "read elsewhere")
    double = source.format("N,3,4", "").replace("float", "double")
    refuses(ReplaceAddBySum(), model(double, s=numbers(4).astype(np.float64)), "element type")


def test_rms_of_a_difference_from_the_mean():
    refuses(FuseRMSNormalization(), layer_norm(), "it is a LayerNormalization")
