"""Constants around convolutions and matrix products."""

from __future__ import annotations

import numpy as np
import pytest

from rewrite_rules.fold_into_weights import (
    FoldBatchNormBeforeConv,
    FoldBatchNormIntoConv,
    FoldBatchNormIntoConvTranspose,
    FoldBatchNormIntoGemm,
    FoldBatchNormIntoMatMul,
    FoldBiasBeforeConv,
    FoldBiasBeforeGemm,
    FoldBiasIntoConv,
    FoldBiasIntoConvTranspose,
    FoldBiasIntoGemm,
    FoldScaleBeforeConv,
    FoldScaleBeforeConvTranspose,
    FoldScaleBeforeGemm,
    FoldScaleBeforeMatMul,
    FoldScaleIntoConv,
    FoldScaleIntoConvTranspose,
    FoldScaleIntoGemm,
    FoldScaleIntoLeftMatMul,
    FoldScaleIntoMatMul,
    FuseMatMulAddIntoGemm,
    MoveBiasBehindMatMul,
    SplitGemm,
)
from tests.rules.harness import applies, model, normal, refuses


def statistics(channels, dtype=np.float32):
    """Scale, shift, mean and variance of a normalisation."""
    values = {n: normal(channels, seed=i, dtype=dtype) for i, n in enumerate(("scale", "shift", "mean"))}
    return values | {"var": np.abs(normal(channels, seed=4, dtype=dtype)) + dtype(0.1)}


BATCH_NORM = "BatchNormalization <epsilon=0.01, momentum=0.8> ({}, scale, shift, mean, var)"

# Shape of x, shape of a Conv's weights, attributes of a Conv.
CONVS = [
    ("2,3,5,5", (4, 3, 3, 3), ""),
    ("2,4,6,5", (6, 2, 3, 2), "<group=2, pads=[1,0,1,1], strides=[2,1]>"),
    ("2,3,7", (4, 3, 3), "<dilations=[2]>"),
    ("1,2,4,4,4", (2, 1, 2, 2, 2), '<group=2, auto_pad="SAME_UPPER">'),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("x", "w", "attrs"), CONVS)
def test_batch_norm_into_conv(x, w, attrs, bias):
    given = "x, w, b" if bias else "x, w"
    source = model(
        f"agraph (float[{x}] x) => (float[] y) "
        f"{{ c = Conv{attrs}({given}) n = {BATCH_NORM.format('c')} y = Relu(n) }}",
        w=normal(*w),
        b=normal(w[0], seed=9),
        **statistics(w[0]),
    )
    applies(FoldBatchNormIntoConv(), source, ops=["Conv", "Relu"])


# The same of a ConvTranspose, and its number of output channels.
TRANSPOSED = [
    ("2,3,5,5", (3, 4, 3, 3), "", 4),
    ("2,4,3,5", (4, 3, 3, 2), "<group=2, pads=[1,0,1,1], strides=[2,1]>", 6),
    ("2,4,7", (4, 1, 3), "<group=4>", 4),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("x", "w", "attrs", "channels"), TRANSPOSED)
def test_batch_norm_into_conv_transpose(x, w, attrs, channels, bias):
    given = "x, w, b" if bias else "x, w"
    source = model(
        f"agraph (float[{x}] x) => (float[] y) {{ c = ConvTranspose{attrs}({given}) y = {BATCH_NORM.format('c')} }}",
        w=normal(*w),
        b=normal(channels, seed=9),
        **statistics(channels),
    )
    applies(FoldBatchNormIntoConvTranspose(), source, ops=["ConvTranspose"])


def test_batch_norm_that_stays():
    read_twice = model(
        f"agraph (float[1,2,3,3] x) => (float[] y, float[] c) {{ c = Conv(x, w) y = {BATCH_NORM.format('c')} }}",
        w=normal(2, 2, 1, 1),
        **statistics(2),
    )
    refuses(FoldBatchNormIntoConv(), read_twice)
    training = model(
        "agraph (float[1,2,3,3] x) => (float[] y) { c = Conv(x, w) "
        "y, m, v = BatchNormalization <training_mode=1> (c, scale, shift, mean, var) }",
        w=normal(2, 2, 1, 1),
        **statistics(2),
    )
    refuses(FoldBatchNormIntoConv(), training)
    for wide in (("scale", "shift"), ("mean", "var")):  # ONNX allows either pair to be of another type
        mixed = model(
            f"agraph (double[1,2,3,3] x) => (double[] y) {{ c = Conv(x, w) y = {BATCH_NORM.format('c')} }}",
            w=normal(2, 2, 1, 1, dtype=np.float64),
            **{k: v.astype(np.float64 if k in wide else np.float32) for k, v in statistics(2).items()},
        )
        refuses(FoldBatchNormIntoConv(), mixed, "another element type")
    changing = model(
        f"agraph (float[1,2,3,3] x, float[2,2,1,1] w) => (float[] y) {{ c = Conv(x, w) y = {BATCH_NORM.format('c')} }}",
        **statistics(2),
    )
    refuses(FoldBatchNormIntoConv(), changing)


def per_channel(channels, rank):
    ones = (1,) * (rank - 2)
    return [(), (1,), (channels, *ones), (1, channels, *ones), (1,) * rank]


@pytest.mark.parametrize("form", range(5))
@pytest.mark.parametrize(("x", "w", "attrs"), CONVS)
@pytest.mark.parametrize(("rule", "operator"), [(FoldScaleIntoConv(), "Mul"), (FoldBiasIntoConv(), "Add")])
def test_constant_into_conv(rule, operator, x, w, attrs, form):
    given = "x, w, b" if form % 2 else "x, w"
    source = model(
        f"agraph (float[{x}] x) => (float[] y) {{ c = Conv{attrs}({given}) y = {operator}(k, c) }}",
        w=normal(*w),
        b=normal(w[0], seed=9),
        k=normal(*per_channel(w[0], len(w))[form], seed=3),
    )
    applies(rule, source, ops=["Conv"])


@pytest.mark.parametrize("form", range(5))
@pytest.mark.parametrize(("x", "w", "attrs", "channels"), TRANSPOSED)
@pytest.mark.parametrize(
    ("rule", "operator"), [(FoldScaleIntoConvTranspose(), "Mul"), (FoldBiasIntoConvTranspose(), "Add")]
)
def test_constant_into_conv_transpose(rule, operator, x, w, attrs, channels, form):
    bias = form % 2
    source = model(
        f"agraph (float[{x}] x) => (float[] y) "
        f"{{ c = ConvTranspose{attrs}({'x, w, b' if bias else 'x, w'}) y = {operator}(c, k) }}",
        w=normal(*w),
        b=normal(channels, seed=9),
        k=normal(*per_channel(channels, len(w))[form], seed=3),
    )
    applies(rule, source, ops=["ConvTranspose"])


@pytest.mark.parametrize("shape", [(3, 1), (3, 3), (2, 1, 1, 1), (1, 1, 2, 1, 1)])
def test_constants_that_are_not_per_channel(shape):
    text = "agraph (float[2,2,3,3] x) => (float[] y) {{ c = Conv(x, w) y = {}(c, k) }}"
    given = {"w": normal(2, 2, 1, 1), "k": normal(*shape)}
    refuses(FoldScaleIntoConv(), model(text.format("Mul"), **given), "dimension")
    refuses(FoldBiasIntoConv(), model(text.format("Add"), **given), "dimension")


def test_bias_that_broadcasts_the_channels():
    # One output channel and three constants: the sum has three channels.
    source = model(
        "agraph (float[2,2,3,3] x) => (float[2,3,3,3] y) { c = Conv(x, w) y = Add(c, k) }",
        w=normal(1, 2, 1, 1),
        k=normal(3, 1, 1),
    )
    refuses(FoldBiasIntoConv(), source, "dimension")


@pytest.mark.parametrize("form", range(5))
@pytest.mark.parametrize(("x", "w", "attrs"), CONVS)
def test_scale_before_conv(x, w, attrs, form):
    channels = int(x.split(",")[1])
    source = model(
        f"agraph (float[{x}] x) => (float[] y) {{ s = Mul(x, k) y = Conv{attrs}(s, w, b) }}",
        w=normal(*w),
        b=normal(w[0], seed=9),
        k=normal(*per_channel(channels, len(w))[form], seed=3),
    )
    applies(FoldScaleBeforeConv(), source, ops=["Conv"])


@pytest.mark.parametrize("form", range(5))
@pytest.mark.parametrize(("x", "w", "attrs", "channels"), TRANSPOSED)
def test_scale_before_conv_transpose(x, w, attrs, channels, form):
    source = model(
        f"agraph (float[{x}] x) => (float[] y) {{ s = Mul(x, k) y = ConvTranspose{attrs}(s, w, b) }}",
        w=normal(*w),
        b=normal(channels, seed=9),
        k=normal(*per_channel(w[0], len(w))[form], seed=3),
    )
    applies(FoldScaleBeforeConvTranspose(), source, ops=["ConvTranspose"])


def test_scale_that_broadcasts_the_image():
    source = model(
        "agraph (float[2,1,3,3] x) => (float[] y) { s = Mul(x, k) y = Conv(s, w) }",
        w=normal(2, 3, 1, 1),
        k=normal(3, 1, 1),
    )
    refuses(FoldScaleBeforeConv(), source, "dimension")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("x", "w", "attrs"), [("2,3,5,5", (4, 3, 3, 3), ""), ("2,4,6", (6, 2, 3), "<group=2, strides=[2]>")]
)
def test_before_conv_without_pads(x, w, attrs, bias):
    channels = int(x.split(",")[1])
    given = "w, b" if bias else "w"
    for form in per_channel(channels, len(w)):
        source = model(
            f"agraph (float[{x}] x) => (float[] y) {{ s = Add(x, k) y = Conv{attrs}(s, {given}) }}",
            w=normal(*w),
            b=normal(w[0], seed=9),
            k=normal(*form, seed=3),
        )
        applies(FoldBiasBeforeConv(), source, ops=["Conv"])
    source = model(
        f"agraph (float[{x}] x) => (float[] y) {{ s = {BATCH_NORM.format('x')} y = Conv{attrs}(s, {given}) }}",
        w=normal(*w),
        b=normal(w[0], seed=9),
        **statistics(channels),
    )
    applies(FoldBatchNormBeforeConv(), source, ops=["Conv"])


@pytest.mark.parametrize("attrs", ["<pads=[1,1,1,1]>", '<auto_pad="SAME_LOWER">'])
def test_before_conv_with_pads(attrs):
    source = model(
        f"agraph (float[2,3,5,5] x) => (float[] y) {{ s = Add(x, k) y = Conv{attrs}(s, w) }}",
        w=normal(2, 3, 3, 3),
        k=normal(3, 1, 1),
    )
    refuses(FoldBiasBeforeConv(), source, "pads")
    source = model(
        f"agraph (float[2,3,5,5] x) => (float[] y) {{ s = {BATCH_NORM.format('x')} y = Conv{attrs}(s, w) }}",
        w=normal(2, 3, 3, 3),
        **statistics(3),
    )
    refuses(FoldBatchNormBeforeConv(), source, "pads")


ROWS = [(), (1,), (4,), (1, 1), (1, 4)]


@pytest.mark.parametrize("k", [*ROWS, (1, 1, 4)])
@pytest.mark.parametrize(("x", "w"), [("2,2,3", (3, 4)), ("B,A,3", (3, 4)), ("2,2,3", (2, 3, 4))])
def test_scale_into_matmul(x, w, k):
    source = model(
        f"agraph (float[{x}] x) => (float[] y) {{ m = MatMul(x, w) y = Mul(m, k) }}",
        w=normal(*w),
        k=normal(*k, seed=3),
    )
    applies(FoldScaleIntoMatMul(), source, ops=["MatMul"])


def test_scale_into_matmul_of_integers():
    source = model(
        "agraph (int32[2,3] x) => (int32[2,4] y) { m = MatMul(x, w) y = Mul(m, k) }",
        w=np.arange(12, dtype=np.int32).reshape(3, 4),
        k=np.array([2, -1, 0, 5], np.int32),
    )
    applies(FoldScaleIntoMatMul(), source, ops=["MatMul"])


@pytest.mark.parametrize("k", [(2, 1), (2, 4), (1, 1, 4)])
def test_scales_that_are_no_rows(k):
    source = model(
        "agraph (float[2,3] x) => (float[] y) { m = MatMul(x, w) y = Mul(m, k) }",
        w=normal(3, 4),
        k=normal(*k),
    )
    refuses(FoldScaleIntoMatMul(), source, "dimension")


def test_scale_that_widens_the_product():
    source = model(
        "agraph (float[2,3] x) => (float[2,4] y) { m = MatMul(x, w) y = Mul(m, k) }",
        w=normal(3, 1),
        k=normal(4),
    )
    refuses(FoldScaleIntoMatMul(), source, "dimension")


@pytest.mark.parametrize("k", [(), (1,), (1, 1), (4, 1)])
def test_scale_into_left_matmul(k):
    source = model(
        "agraph (float[2,3,5] x) => (float[2,4,5] y) { m = MatMul(w, x) y = Mul(m, k) }",
        w=normal(4, 3),
        k=normal(*k),
    )
    applies(FoldScaleIntoLeftMatMul(), source, ops=["MatMul"])


@pytest.mark.parametrize("k", [(), (1,), (3,), (1, 3), (1, 1, 3)])
def test_before_matmul(k):
    given = {"w": normal(3, 4), "k": normal(*k, seed=5)}
    text = "agraph (float[2,B,3] x) => (float[2,B,4] y) {{ s = {}(x, k) y = MatMul(s, w) }}"
    applies(FoldScaleBeforeMatMul(), model(text.format("Mul"), **given), ops=["MatMul"])
    applies(MoveBiasBehindMatMul(), model(text.format("Add"), **given), ops=["Add", "MatMul"])


def test_before_matmul_what_widens_x():
    given = {"w": normal(3, 4), "k": normal(3)}
    text = "agraph (float[2,1] x) => (float[2,4] y) {{ s = {}(x, k) y = MatMul(s, w) }}"
    refuses(FoldScaleBeforeMatMul(), model(text.format("Mul"), **given), "differs")
    refuses(MoveBiasBehindMatMul(), model(text.format("Add"), **given), "differs")


def test_batch_norm_into_matmul():
    source = model(
        f"agraph (float[B,3] x) => (float[B,4] y) {{ m = MatMul(x, w) y = {BATCH_NORM.format('m')} }}",
        w=normal(3, 4),
        **statistics(4),
    )
    applies(FoldBatchNormIntoMatMul(), source, ops=["Add", "MatMul"])
    # Here the channels are the rows of x.
    source = model(
        f"agraph (float[2,4,3] x) => (float[2,4,4] y) {{ m = MatMul(x, w) y = {BATCH_NORM.format('m')} }}",
        w=normal(3, 4),
        **statistics(4),
    )
    refuses(FoldBatchNormIntoMatMul(), source, "3 dimensions")


GEMMS = ["", "<alpha=0.5, beta=2.0>", "<transB=1, beta=0.5>", "<transA=1>"]


def gemm(attrs, tail, b=(4,), head="", **more):
    """A Gemm of 3 to 4 columns in the middle of a graph."""
    x = "3,3" if "transA" in attrs else "2,3"
    bias = "" if b is None else ", b"
    return model(
        f"agraph (float[{x}] x) => (float[] y) {{ {head or 'h = Relu(x)'} g = Gemm{attrs}(h, w{bias}) {tail} }}",
        w=normal(4, 3) if "transB" in attrs else normal(3, 4),
        b=normal(*(b or ())),
        **more,
    )


@pytest.mark.parametrize("attrs", GEMMS)
@pytest.mark.parametrize("b", [None, (), (4,), (1, 4)])
def test_into_gemm(attrs, b):
    for k in ROWS:
        given = {"k": normal(*k, seed=3)}
        applies(FoldScaleIntoGemm(), gemm(attrs, "y = Mul(g, k)", b, **given), ops=["Gemm", "Relu"])
        applies(FoldBiasIntoGemm(), gemm(attrs, "y = Add(g, k)", b, **given), ops=["Gemm", "Relu"])
    source = gemm(attrs, f"y = {BATCH_NORM.format('g')}", b, **statistics(4))
    applies(FoldBatchNormIntoGemm(), source, ops=["Gemm", "Relu"])


@pytest.mark.parametrize("attrs", GEMMS)
def test_not_into_gemm(attrs):
    rows = 3 if "transA" in attrs else 2
    refuses(FoldScaleIntoGemm(), gemm(attrs, "y = Mul(g, k)", (rows, 4), k=normal(4)), "dimension")
    refuses(FoldScaleIntoGemm(), gemm(attrs, "y = Mul(g, k)", k=normal(rows, 1)), "dimension")
    refuses(FoldBiasIntoGemm(), gemm(attrs, "y = Add(g, k)", k=normal(1, 1, 4)), "dimensions")


@pytest.mark.parametrize("attrs", GEMMS)
@pytest.mark.parametrize("b", [None, (), (1, 4)])
def test_before_gemm(attrs, b):
    for k in [(), (1,), (3,), (1, 3)]:
        given = {"k": normal(*k, seed=3)}
        scaled = gemm(attrs, "y = Relu(g)", b, "h = Mul(k, x)", **given) if "transA" not in attrs else None
        if scaled is None:
            source = gemm(attrs, "y = Relu(g)", b, "h = Mul(x, k)", k=np.float32(2))
            refuses(FoldScaleBeforeGemm(), source, "transposed")
            source = gemm(attrs, "y = Relu(g)", b, "h = Add(x, k)", k=np.float32(2))
            refuses(FoldBiasBeforeGemm(), source, "transposed")
            continue
        applies(FoldScaleBeforeGemm(), scaled, ops=["Gemm", "Relu"])
        shifted = gemm(attrs, "y = Relu(g)", b, "h = Add(k, x)", **given)
        applies(FoldBiasBeforeGemm(), shifted, ops=["Gemm", "Relu"])


@pytest.mark.parametrize("b", [(), (1,), (4,), (1, 1), (1, 4), (2, 1), (2, 4)])
def test_matmul_add_to_gemm_and_back(b):
    source = model(
        "agraph (float[2,3] x, float[3,4] w) => (float[2,4] y) { m = MatMul(x, w) y = Add(b, m) }",
        b=normal(*b),
    )
    applies(FuseMatMulAddIntoGemm(), source, ops=["Gemm"])
    for attrs in GEMMS if b[:1] != (2,) else GEMMS[:3]:
        applies(SplitGemm(), gemm(attrs, "y = Relu(g)", b))


def test_matmul_add_that_broadcasts():
    source = model(
        "agraph (float[1,3] x) => (float[2,4] y) { m = MatMul(x, w) y = Add(b, m) }",
        w=normal(3, 4),
        b=normal(2, 4),
    )
    refuses(FuseMatMulAddIntoGemm(), source, "differs")
    source = model(
        "agraph (float[A,3] x, float[B,4] b) => (float[] y) { m = MatMul(x, w) y = Add(b, m) }",
        w=normal(3, 4),
    )
    refuses(FuseMatMulAddIntoGemm(), source, "differs")


def test_gemm_without_bias():
    source = gemm("<transB=1, alpha=3.0>", "y = Relu(g)", None)
    applies(SplitGemm(), source, ops=["MatMul", "Relu", "Relu"])
