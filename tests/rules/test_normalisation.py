"""Softmax and normalisations."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

from rewrite_rules.normalisation import (
    FoldAffineIntoReaders,
    FoldBiasIntoNormalization,
    FoldScaleIntoNormalization,
    FuseInstanceNormalization,
    FuseLayerNormalization,
    FuseLayerNormalizationByMoments,
    FuseLogOfSoftmax,
    FuseLogSoftmax,
    FuseMomentsLayerNormalization,
    FuseRMSNormalization,
    FuseSoftmax,
    FuseUnshiftedSoftmax,
    MergeBatchNormalizations,
    PushBatchNormalizationIntoConcat,
    ReplaceAddBySum,
    SplitBatchNormalization,
)
from tests.rules.harness import applies, model, normal, numbers, refuses


def unary(body: str, **constants: np.ndarray | np.generic) -> onnx.ModelProto:
    """y of x[N, 4]."""
    return model(f"agraph (float[N,4] x) => (float[N,4] y) {{ {body} }}", **constants)


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


ONE, ZERO, SIX, THREE = (np.float32(v) for v in (1, 0, 6, 3))


def reduced(body: str, x: str = "2,3,4", y: str = "2,1,4", **constants) -> onnx.ModelProto:
    return model(f"agraph (float[{x}] x) => (float[{y}] y) {{ {body} }}", **constants)


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


def moments(shift: str = "Sub(b, mg)", **constants: np.ndarray | np.generic) -> onnx.ModelProto:
    """The normalisation of x[2,3,4] over its last axis as TensorFlow writes it; the constants replace its own."""
    source = (
        "agraph (float[2,3,4] x) => (y) { m = ReduceMean(x, i) d = Sub(x, m) q = Mul(d, d) "
        "v = ReduceMean(q, i) e = Add(v, eps) r = Sqrt(e) t = Reciprocal(r) g = Mul(s, t) "
        f"xg = Mul(g, x) mg = Mul(m, g) c = {shift} y = Add(c, xg) }}"
    )
    given = {"i": np.array([2]), "eps": np.float32(1e-3), "s": numbers(4), "b": numbers(4)}
    return model(source, **(given | constants))


def test_moments():
    rule = FuseMomentsLayerNormalization()
    applies(rule, moments(), ops=["LayerNormalization"])
    applies(rule, moments(eps=np.full((1, 1, 1), 1e-3, np.float32)), ops=["LayerNormalization"])
    refuses(rule, moments(shift="Sub(mg, b)"))
    refuses(rule, moments(eps=np.full((1, 1, 1, 1), 1e-3, np.float32)), "the epsilon adds a dimension")
    refuses(rule, moments(s=numbers(3, 1)), "the scale is not of the normalised dimensions")


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


@pytest.mark.parametrize("shape", ["4,3", "5,4,3"])
def test_affine_part_for_weights_that_change_or_are_no_matrix(shape):
    source = "agraph (float[5,5,4] x{}) => (float[] y) {{ n = LayerNormalization(x, s, b) y = MatMul(n, w) }}"
    given = {"s": normal(4), "b": normal(4, seed=1)}
    changing = model(source.format(f", float[{shape}] w"), **given)
    refuses(FoldAffineIntoReaders(), changing, "no constant matrix")
    if shape != "4,3":
        refuses(FoldAffineIntoReaders(), model(source.format(""), **given, w=normal(5, 4, 3)), "no constant")


def test_affine_part():
    rule = FoldAffineIntoReaders()
    source = (
        "agraph (float[N,5,4] x) => ({}) {{ n = LayerNormalization{}(x, s, b) p = MatMul(n, w) q = "
        "MatMul(n, v) }}"
    )
    given = {"s": normal(4), "b": normal(4, seed=1), "w": normal(4, 3), "v": normal(4, 2)}
    two = source.format("float[N,5,3] p, float[N,5,2] q", "")
    applies(rule, model(two, **given), ops=["Add", "Add", "LayerNormalization", "MatMul", "MatMul"])
    refuses(rule, model(source.format("float[N,5,3] p, float[N,5,2] q, float[N,5,4] n", ""), **given))
    relu = two.replace("q = MatMul(n, v)", "q = Relu(n)").replace("[N,5,2] q", "[N,5,4] q")
    del given["v"]
    refuses(rule, model(relu, **given))
    left = two.replace("q = MatMul(n, v)", "q = MatMul(v, n)").replace("[N,5,2] q", "[N,2,4] q")
    refuses(rule, model(left, **given, v=normal(2, 5)), "as a weight")


def test_scale_and_bias_of_a_normalisation():
    source = "agraph (float[N,5,4] x) => (float[N,5,4] y) {{ n = LayerNormalization({}) y = {}(n, c) }}"
    given = {"s": normal(4), "c": normal(4, seed=2)}
    for rule, op in ((FoldScaleIntoNormalization(), "Mul"), (FoldBiasIntoNormalization(), "Add")):
        applies(rule, model(source.format("x, s", op), **given), ops=["LayerNormalization"])
        applies(rule, model(source.format("x, s, b", op), **given, b=normal(4)), ops=["LayerNormalization"])
        single = given | {"c": normal(1)}
        applies(rule, model(source.format("x, s", op), **single), ops=["LayerNormalization"])
        refuses(rule, model(source.format("x, s", op), **given | {"c": normal(5, 1)}))


def statistics(channels: int, seed: int = 0, suffix: str = "") -> dict[str, np.ndarray]:
    values = {f"{n}{suffix}": normal(channels, seed=seed + i) for i, n in enumerate(("s", "b", "m"))}
    return values | {f"v{suffix}": np.abs(normal(channels, seed=seed + 3)) + np.float32(0.1)}


BATCH_NORM = "BatchNormalization<epsilon=0.01>({0}, s{1}, b{1}, m{1}, v{1})"


@pytest.mark.parametrize("x", ["N,3", "N,3,4", "N,3,4,4"])
def test_batch_normalization(x):
    source = f"agraph (float[{x}] x) => (float[{x}] y) {{{{ {{}} }}}}"
    single = source.format(f"y = {BATCH_NORM.format('x', '')}")
    applies(SplitBatchNormalization(), model(single, **statistics(3)), ops=["Add", "Mul"])
    double = source.format(f"a = {BATCH_NORM.format('x', '')} y = {BATCH_NORM.format('a', 2)}")
    given = statistics(3) | statistics(3, 7, "2")
    applies(MergeBatchNormalizations(), model(double, **given), ops=["BatchNormalization"])


def test_batch_normalization_of_a_concat():
    rule = PushBatchNormalizationIntoConcat()
    source = (
        f"agraph (float[N,1,4] x, float[N,2,4] z) => (float[N,3,4] y) {{{{ a = Concat<axis={{}}>(x, z) y "
        f"= {BATCH_NORM.format('a', '')} }}}}"
    )
    applies(rule, model(source.format(1), **statistics(3)), ops=["BatchNormalization"] * 2 + ["Concat"])
    rows = (
        source.format(0)
        .replace("[N,1,4] x", "[2,3,4] x")
        .replace("[N,2,4] z", "[3,3,4] z")
        .replace("[N,3,4] y", "[5,3,4] y")
    )
    refuses(rule, model(rows, **statistics(3)), "channels")
    node = BATCH_NORM.format("a", "").replace("<", "<training_mode=1, ")
    text = f"{source.format(1).partition(' y =')[0]} y, q, r = {node} }}"
    refuses(rule, model(text.replace("[N", "[2"), **statistics(3)))
