"""Operators spelt out of others, and simpler spellings."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from rewrite_rules import convolution
from rewrite_rules.convolution import (
    AlignChannelsBeforeGlobalAveragePool,
    AlignChannelsBeforeMean,
    FoldPadIntoAveragePool,
    FoldPadIntoConv,
    FoldPadIntoMaxPool,
    FoldSliceIntoConvStride,
    FuseNearestResize,
    LowerConvToOneDimension,
    MergeBatchIntoHeight,
    MergeConvIntoPointwise,
    MergeMaxPools,
    MergePatchMatMulIntoConv,
    MergePointwiseIntoConv,
    MergeTransposedMatMulIntoConv,
    MoveScaleIntoConvWeights,
    PushAveragePoolBeforeConv,
    PushConvBeforeAveragePool,
    PushConvBeforeResize,
    PushGlobalAveragePoolBeforeConv,
    PushResizeBeforeConv,
    PushRisingBeforeMaxPool,
    PushRisingBehindMaxPool,
    RaiseConvToTwoDimensions,
    ReplaceAveragePoolByConv,
    ReplaceConvOfTransposeByMatMul,
    ReplaceConvStrideBySlice,
    ReplaceConvTransposeByConv,
    ReplaceDepthwisePointwiseConvByMul,
    ReplaceFullAveragePoolByGlobal,
    ReplaceFullConvByGemm,
    ReplaceFullMaxPoolByGlobal,
    ReplaceGlobalAveragePoolByMean,
    ReplaceGlobalMaxPoolByMax,
    ReplaceMatMulByPointwiseConv,
    ReplaceMaxByGlobalMaxPool,
    ReplaceMeanByGlobalAveragePool,
    ReplacePatchConvByMatMul,
    ReplacePointwiseConvByMatMul,
    ReplaceUniformConvByAveragePool,
    SplitDilatedConvIntoPhases,
    WriteOutAutoPad,
)
from tests.rules.harness import applies, model, normal, refuses
from tests.runtime import recent
from xrlflow.rewrite import Refused


def reduced(body: str, x: str = "2,3,4", y: str = "2,1,4", **constants) -> onnx.ModelProto:
    return model(f"agraph (float[{x}] x) => (float[{y}] y) {{ {body} }}", **constants)


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


def plain(x, w, attrs="", *, bias=True, op="Conv", maps=None, **initializers):
    """A convolution of the input itself."""
    given = {"b": normal(maps or w[0], seed=9)} if bias else {}
    inputs = "x, w, b" if bias else "x, w"
    return model(
        f"agraph (float[{x}] x) => (float[] y) {{ c = {op}{attrs}({inputs}) y = Relu(c) }}",
        w=normal(*w),
        **given,
        **initializers,
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("x", "w"), [("2,3,5,4", (4, 3, 1, 1)), ("N,3,4", (2, 3, 1)), ("N,2,2,3,2", (3, 2, 1, 1, 1))]
)
def test_pointwise_to_matmul(x, w, bias):
    graph = applies(ReplacePointwiseConvByMatMul(), plain(x, w, bias=bias))
    ops = [n.op for n in graph.nodes() if not n.const]
    assert "Conv" not in ops
    assert ops.count("MatMul") == 1


def test_pointwise_to_matmul_refuses():
    rule = ReplacePointwiseConvByMatMul()
    refuses(rule, plain("2,3,5,4", (4, 3, 3, 3)))
    refuses(rule, plain("2,3,5,4", (4, 3, 1, 1), "<strides=[2,2]>"), "strides")
    refuses(rule, plain("2,3,5,4", (4, 3, 1, 1), "<pads=[1,0,0,0]>"), "pads")
    refuses(rule, plain("2,4,5,4", (4, 2, 1, 1), "<group=2>"))
    refuses(rule, plain("2,3,H,W", (4, 3, 1, 1)), "not known")


def test_matmul_to_pointwise():
    source = model("agraph (float[N,3,L] x) => (float[N,2,L] y) { y = MatMul(w, x) }", w=normal(2, 3))
    applies(ReplaceMatMulByPointwiseConv(), source, ops=["Conv"])


def test_channels_last_product():
    text = (
        "agraph (float[N,3,4,5] x) => (float[] y) "
        "{{ t = Transpose<perm={}>(x) p = MatMul(t, w) y = Transpose<perm={}>(p) }}"
    )
    rule = MergeTransposedMatMulIntoConv()
    applies(rule, model(text.format("[0,2,3,1]", "[0,3,1,2]"), w=normal(3, 2)), ops=["Conv"])
    refuses(rule, model(text.format("[0,2,3,1]", "[0,3,2,1]"), w=normal(3, 2)), "come back")
    refuses(rule, model(text.format("[0,3,2,1]", "[0,3,1,2]"), w=normal(3, 2)), "go last")


def conv(x, w, attrs="", *, bias=True, then="", before="", op="Conv", **initializers):
    """x (a shape as text) through `before` (x -> z), a convolution (z -> c) and `then` (c -> y)."""
    inner = before or "z = Identity(x)"
    given = {"b": normal(w[1] if op == "ConvTranspose" else w[0], seed=9)} if bias else {}
    inputs = "z, w, b" if bias else "z, w"
    return model(
        f"agraph (float[{x}] x) => (float[] y) {{ {inner} c = {op}{attrs}({inputs}) {then or 'y = Relu(c)'} }}",
        w=normal(*w),
        **given,
        **initializers,
    )


def test_conv_of_transpose():
    rule = ReplaceConvOfTransposeByMatMul()
    before = "z = Transpose<perm=[0,3,1,2]>(x)"
    applies(rule, conv("N,H,W,3", (4, 3, 1, 1), before=before), ops=["MatMul", "Add", "Transpose", "Relu"])
    refuses(rule, conv("2,3,4,3", (4, 3, 1, 1), before="z = Transpose<perm=[0,1,3,2]>(x)"), "last")
    refuses(rule, conv("N,4,4,3", (4, 3, 1, 1), "<strides=[2,1]>", before=before), "strides")


@pytest.mark.parametrize(
    ("x", "w", "attrs"),
    [
        ("N,3,H,W", (4, 3, 1, 1), "<strides=[2,2]>"),
        ("2,4,5,6", (4, 2, 1, 1), '<strides=[3,1], group=2, auto_pad="SAME_LOWER">'),
        ("2,3,7", (4, 3, 1), "<strides=[4], dilations=[2]>"),
    ],
)
def test_stride_and_slice(x, w, attrs):
    applies(ReplaceConvStrideBySlice(), plain(x, w, attrs), ops=["Slice", "Conv", "Relu"])


def test_stride_refuses():
    refuses(ReplaceConvStrideBySlice(), plain("2,3,5,4", (4, 3, 1, 1)), "does not stride")
    refuses(
        ReplaceConvStrideBySlice(), plain("2,3,5,4", (4, 3, 1, 1), "<strides=[2,2], pads=[1,1,1,1]>"), "pads"
    )


@pytest.mark.parametrize(
    ("start", "end", "axis", "step", "reason"),
    [
        (0, 2**31 - 1, 2, 2, None),
        (0, 5, 3, 3, None),
        (1, 2**31 - 1, 2, 2, "beginning"),
        (0, 3, 2, 2, "end"),
        (0, 2**31 - 1, 1, 1, "does not step"),
        (0, 2**31 - 1, 0, 2, "over the image"),
    ],
)
def test_slice_to_stride(start, end, axis, step, reason):
    source = conv(
        "2,3,4,5", (4, 3, 1, 1), "<strides=[2,1]>", before="z = Slice(x, s, e, a, t)",
        s=np.array([start]), e=np.array([end]), a=np.array([axis]), t=np.array([step]),
    )  # fmt: skip
    if reason is None:
        applies(FoldSliceIntoConvStride(), source, ops=["Conv", "Relu"])
    else:
        refuses(FoldSliceIntoConvStride(), source, reason)


def test_slices_to_stride():
    """To the end of an image of any size, and of several axes; channels are not stepped over."""

    def sliced(x, **given):
        arrays = {k: np.array(v) for k, v in given.items()}
        return conv(x, (4, 3, 1, 1), before="z = Slice(x, s, e, a, t)", **arrays)

    end = 2**31 - 1
    applies(FoldSliceIntoConvStride(), sliced("N,3,H,5", s=[0], e=[end], a=[2], t=[2]), ops=["Conv", "Relu"])
    refuses(FoldSliceIntoConvStride(), sliced("N,3,H,5", s=[0], e=[end - 1], a=[2], t=[2]), "an end")
    both = {"s": [0, 0], "e": [end, end], "a": [1, 3]}
    refuses(FoldSliceIntoConvStride(), sliced("2,6,4,5", **both, t=[2, 2]), "over the image")
    refuses(FoldSliceIntoConvStride(), sliced("2,3,4,5", **both, t=[1, 2]), "over the image")


@pytest.mark.parametrize("bias", [False, True])
def test_depthwise_pointwise(bias):
    rule = ReplaceDepthwisePointwiseConvByMul()
    applies(rule, plain("N,3,H,4", (3, 1, 1, 1), "<group=3>", bias=bias))
    refuses(rule, plain("N,3,H,4", (6, 1, 1, 1), "<group=3>"))
    refuses(rule, plain("N,3,H,4", (3, 1, 1, 1), "<group=3, strides=[2,2]>"), "strides")


@pytest.mark.parametrize(
    ("x", "w", "attrs"),
    [
        ("N,3,1,1", (4, 3, 1, 1), ""),
        ("N,3,1,1", (4, 3, 3, 3), "<pads=[1,1,1,1]>"),
        ("N,3,2,3", (4, 3, 2, 3), "<strides=[2,2]>"),
        ("2,3,1,2", (4, 3, 3, 4), "<pads=[0,2,2,1], strides=[3,2]>"),
    ],
)
def test_full_conv(x, w, attrs):
    applies(ReplaceFullConvByGemm(), plain(x, w, attrs))
    applies(ReplaceFullConvByGemm(), plain(x, w, attrs, bias=False))


def test_full_conv_refuses():
    rule = ReplaceFullConvByGemm()
    refuses(rule, plain("N,3,4,4", (4, 3, 3, 3)), "whole image")
    refuses(rule, plain("N,3,1,1", (4, 3, 3, 3), "<pads=[1,1,2,1]>"), "more than one")
    refuses(rule, plain("N,4,1,1", (4, 2, 1, 1), "<group=2>"))
    refuses(rule, plain("N,3,3", (4, 3, 2), "<dilations=[2]>"), "dilated")
    attrs = "<dilations=[1,2], pads=[0,0,0,1], strides=[1,2]>"
    refuses(rule, plain("N,3,2,2", (4, 3, 2, 2), attrs), "dilated")


@pytest.mark.parametrize(("x", "w"), [("N,3,20,20", (2, 3, 20, 20)), ("N,3,400", (2, 3, 400))])
def test_full_conv_of_all_taps(x, w):
    """The weights are too many to be evaluated, and are not cut."""
    graph = applies(ReplaceFullConvByGemm(), plain(x, w))
    assert "Slice" not in {n.op for n in graph.nodes()}


@pytest.mark.parametrize("bias", [False, True])
def test_patches(bias):
    rule = ReplacePatchConvByMatMul()
    applies(rule, plain("N,3,4,6", (5, 3, 2, 3), "<strides=[2,3]>", bias=bias))
    applies(rule, plain("2,3,6", (5, 3, 2), "<strides=[2]>", bias=bias))


def test_patches_refuses():
    rule = ReplacePatchConvByMatMul()
    refuses(rule, plain("N,3,5,6", (5, 3, 2, 3), "<strides=[2,3]>"), "whole number")
    refuses(rule, plain("N,3,4,6", (5, 3, 2, 3), "<strides=[2,2]>"), "not the kernel")
    refuses(rule, plain("N,3,4,6", (5, 3, 2, 2), "<strides=[2,2], pads=[1,0,1,0]>"), "pads")
    refuses(rule, plain("N,3,4,6", (5, 3, 2, 2), "<strides=[2,2], dilations=[2,2]>"), "dilated")


def test_rows_of_patches_refuses():
    rule = MergePatchMatMulIntoConv()
    text = (
        "agraph (float[2,2,4,6] x) => (float[] y) "
        "{{ r = Reshape(x, s) p = Transpose<perm={}>(r) q = Reshape(p, t) y = MatMul(q, w) }}"
    )
    given = {"s": np.array([2, 2, 2, 2, 3, 2]), "t": np.array([2, 6, 8]), "w": normal(8, 3)}
    applies(rule, model(text.format("[0,2,4,1,3,5]"), **given))
    refuses(rule, model(text.format("[0,4,2,1,3,5]"), **given), "put patches together")
    refuses(
        rule, model(text.format("[0,2,4,1,3,5]"), **{**given, "t": np.array([2, 12, 4]), "w": normal(4, 3)})
    )
    refuses(rule, model(text.format("[0,2,4,1,3,5]"), **{**given, "s": np.array([2, 2, 2, 3, 2, 2])}), "cut")


@pytest.mark.parametrize(
    ("numbers", "sizes", "filled"),
    [
        ((0, 2, -1), (3, 4, 2), (3, 2, 4)),
        ((0, -1), (3, 4, 2), (3, 8)),
        ((4, 6), (3, 4, 2), (4, 6)),
        ((2, 3, 0), (2, 3), (2, 3, 0)),
        ((2, -1, 0), (2, 3), (2, -1, 0)),
    ],
)
def test_shapes_filled_in(numbers, sizes, filled):
    assert convolution._filled(numbers, sizes) == filled


def test_shapes_of_nothing():
    with pytest.raises(Refused, match="empty"):
        convolution._filled((0, 2), (0, 2))


@pytest.mark.parametrize(
    ("x", "w", "attrs", "maps", "op"),
    [
        ("N,3,H,W", (3, 2, 2, 2), "<strides=[2,2]>", 2, "DepthToSpace"),
        ("N,4,H,W", (4, 2, 3, 3), "<strides=[3,3], group=2>", 4, "DepthToSpace"),
        ("N,3,2,3", (3, 2, 1, 2), "<strides=[1,2]>", 2, "Transpose"),
        ("N,4,3", (4, 1, 3), "<strides=[3], group=4>", 4, "Transpose"),
        ("N,3,H,W", (3, 2, 1, 1), "", 2, "Conv"),
    ],
)
def test_conv_transpose(x, w, attrs, maps, op):
    graph = applies(ReplaceConvTransposeByConv(), plain(x, w, attrs, op="ConvTranspose", maps=maps))
    assert op in {n.op for n in graph.nodes() if not n.const}
    applies(ReplaceConvTransposeByConv(), plain(x, w, attrs, op="ConvTranspose", bias=False))


def test_conv_transpose_refuses():
    rule = ReplaceConvTransposeByConv()
    refuses(rule, plain("1,3,4,4", (3, 2, 3, 3), "<strides=[2,2]>", op="ConvTranspose", maps=2), "kernel")
    attrs = "<strides=[2,2], pads=[1,0,0,0]>"
    refuses(rule, plain("1,3,4,4", (3, 2, 2, 2), attrs, op="ConvTranspose", maps=2), "pads")


@pytest.mark.parametrize(
    ("x", "w", "attrs"),
    [
        ("2,3,7,8", (4, 3, 3, 2), "<dilations=[2,3], pads=[2,1,2,0]>"),
        ("1,4,6,6", (4, 1, 3, 3), "<dilations=[2,1], group=4>"),
        ("2,2,9", (3, 2, 3), "<dilations=[4]>"),
        ("2,3,6,6", (4, 3, 2, 2), "<dilations=[2,3], pads=[2,0,0,0]>"),
    ],
)
def test_dilation(x, w, attrs):
    applies(SplitDilatedConvIntoPhases(), plain(x, w, attrs))


def test_dilation_refuses():
    rule = SplitDilatedConvIntoPhases()
    refuses(rule, plain("2,3,7,8", (4, 3, 3, 2)), "not dilated")
    refuses(rule, plain("2,3,7,8", (4, 3, 3, 2), "<dilations=[2,2], strides=[2,1]>"), "strides")
    refuses(
        rule, plain("2,3,7,8", (4, 3, 3, 2), '<dilations=[2,2], auto_pad="SAME_UPPER">'), "pads by itself"
    )


@pytest.mark.parametrize(
    ("x", "w", "attrs"),
    [
        ("3,2,5,4", (4, 2, 3, 3), "<pads=[1,1,1,1]>"),
        ("2,4,6,5", (4, 2, 2, 3), "<strides=[3,2], group=2, pads=[0,1,1,0]>"),
        ("2,2,7", (3, 2, 3), "<dilations=[2], strides=[2]>"),
        ("2,2,4,4", (3, 2, 1, 1), "<strides=[2,2]>"),
    ],
)
def test_batch_into_height(x, w, attrs):
    applies(MergeBatchIntoHeight(), plain(x, w, attrs))


def test_batch_into_height_refuses():
    refuses(MergeBatchIntoHeight(), plain("1,2,5,4", (4, 2, 3, 3)), "one image")
    refuses(
        MergeBatchIntoHeight(), plain("2,2,5,4", (4, 2, 3, 3), '<auto_pad="SAME_UPPER">'), "pads by itself"
    )


@pytest.mark.parametrize(
    "attrs",
    ["", "<strides=[2], pads=[1,2]>", '<strides=[2], auto_pad="SAME_LOWER">', "<dilations=[2]>"],
)
def test_dimensions_of_convs(attrs):
    applies(RaiseConvToTwoDimensions(), plain("N,3,8", (4, 3, 3), attrs))
    inner = attrs.replace("pads=[1,2]", "pads=[0,1,0,2]").replace("=[2]", "=[1,2]")
    applies(LowerConvToOneDimension(), plain("N,3,1,8", (4, 3, 1, 3), inner))


def test_rows_that_are_padded():
    refuses(LowerConvToOneDimension(), plain("N,3,1,8", (4, 3, 1, 3), "<pads=[1,0,0,0]>"), "pads")


def two_convs(first, second, middle, outputs, bias=True):
    """conv(conv(x)) with these kernels and attributes."""
    (kernel, attrs), (kernel2, attrs2) = first, second
    given = {"b": normal(middle, seed=2), "c": normal(outputs, seed=3)} if bias else {}
    return model(
        "agraph (float[2,5,6,6] x) => (float[] y) "
        f"{{ z = Conv{attrs}(x, w{', b' if bias else ''}) y = Conv{attrs2}(z, v{', c' if bias else ''}) }}",
        w=normal(middle, 5, *kernel), v=normal(outputs, middle, *kernel2), **given,
    )  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
def test_convs_multiplied_out(bias):
    plain_kernel = ((1, 1), "")
    wide = ((3, 3), "<strides=[2,2], pads=[1,1,1,1]>")
    applies(MergeConvIntoPointwise(), two_convs(wide, plain_kernel, 8, 3, bias), ops=["Conv"])
    valid = ((3, 2), "<dilations=[2,1]>")
    applies(MergePointwiseIntoConv(), two_convs(plain_kernel, valid, 8, 3, bias), ops=["Conv"])
    refuses(MergeConvIntoPointwise(), two_convs(wide, plain_kernel, 2, 30), "more work")
    refuses(MergeConvIntoPointwise(), two_convs(wide, ((1, 1), "<strides=[2,2]>"), 8, 3), "strides")


@pytest.mark.parametrize(
    ("rule", "first", "second", "products"),
    [
        (MergeConvIntoPointwise(), (3, 3), (1, 1), 3 * 8 * 5 * 3 * 3),
        (MergePointwiseIntoConv(), (1, 1), (3, 2), 3 * 5 * 3 * 2 * 8),
    ],
)
def test_convs_that_would_take_long(monkeypatch, rule, first, second, products):
    """The products of 3 output, 8 inner and 5 input channels by the taps, at the limit and beyond it."""
    source = two_convs((first, ""), (second, ""), 8, 3, bias=False)
    monkeypatch.setattr(convolution, "AT_EXPORT", products)
    applies(rule, source, ops=["Conv"])
    monkeypatch.setattr(convolution, "AT_EXPORT", products - 1)
    refuses(rule, source, "take long")


def test_convs_around_padding():
    padded = ((3, 3), "<pads=[1,1,1,1]>")
    applies(MergePointwiseIntoConv(), two_convs(((1, 1), ""), padded, 8, 3, bias=False), ops=["Conv"])
    refuses(MergePointwiseIntoConv(), two_convs(((1, 1), ""), padded, 8, 3), "padding")


def test_scale_into_weights():
    text = "agraph (float[1,4,5,5] x, float[1,4,1,1] s) => (float[] y) {{ z = Mul(x, s) y = Conv{}(z, w) }}"
    applies(
        MoveScaleIntoConvWeights(),
        model(text.format(""), w=normal(3, 4, 1, 1)),
        ops=["Reshape", "Mul", "Conv"],
    )
    applies(MoveScaleIntoConvWeights(), model(text.format("<group=2>"), w=normal(6, 2, 1, 1)))
    refuses(MoveScaleIntoConvWeights(), model(text.format(""), w=normal(3, 4, 3, 3)), "one tap")
    refuses(MoveScaleIntoConvWeights(), model(text.replace("1,4", "2,4").format(""), w=normal(3, 4, 1, 1)))


PADS = {"p": np.array([0, 0, 1, 0, 0, 0, 2, 1])}


def test_pad_into_conv():
    rule = FoldPadIntoConv()
    before = "z = Pad(x, p)"
    applies(
        rule, conv("N,3,H,W", (4, 3, 2, 2), "<pads=[1,0,0,1]>", before=before, **PADS), ops=["Conv", "Relu"]
    )
    one = conv("N,3,4,4", (4, 3, 2, 2), before="z = Pad(x, p, v)", v=np.float32(1), **PADS)
    refuses(rule, one, "zeros")
    edge = conv("N,3,4,4", (4, 3, 2, 2), before='z = Pad<mode="edge">(x, p)', **PADS)
    refuses(rule, edge)
    auto = conv("N,3,4,4", (4, 3, 2, 2), '<auto_pad="SAME_UPPER">', before=before, **PADS)
    refuses(rule, auto, "by itself")
    cut = conv("N,3,4,4", (4, 3, 2, 2), before=before, p=np.array([0, 0, -1, 0, 0, 0, 2, 1]))
    refuses(rule, cut, "cuts")
    more = conv("N,2,4,4", (4, 3, 2, 2), before=before, p=np.array([0, 1, 0, 0, 0, 0, 0, 0]))
    refuses(rule, more, "channels")


def pool(op, attrs, *, before="z = Pad(x, p)", x="2,3,5,6", **initializers):
    return model(f"agraph (float[{x}] x) => (float[] y) {{ {before} y = {op}<{attrs}>(z) }}", **initializers)


@recent
def test_pad_into_average_pool():
    rule = FoldPadIntoAveragePool()
    kernel = "kernel_shape=[3,3]"
    applies(rule, pool("AveragePool", kernel, **PADS), ops=["AveragePool"])
    own = f"{kernel}, pads=[1,0,0,1]"
    applies(rule, pool("AveragePool", f"{own}, count_include_pad=1", **PADS), ops=["AveragePool"])
    refuses(rule, pool("AveragePool", own, **PADS), "count its padding")
    refuses(rule, pool("AveragePool", f"{kernel}, ceil_mode=1, strides=[2,2]", **PADS), "hang over")
    refuses(rule, pool("AveragePool", "kernel_shape=[2,2]", **PADS), "refuses it")


def test_pad_into_max_pool():
    rule = FoldPadIntoMaxPool()
    kernel = "kernel_shape=[3,3]"
    low = {"v": np.float32(-np.inf)}
    applies(rule, pool("MaxPool", kernel, before="z = Pad(x, p, v)", **low, **PADS), ops=["MaxPool"])
    applies(
        rule, pool("MaxPool", kernel, before="r = Relu(x) z = Pad(r, p)", **PADS), ops=["Relu", "MaxPool"]
    )
    clip = "r = Clip(x, l) z = Pad(r, p)"
    applies(rule, pool("MaxPool", kernel, before=clip, l=np.float32(0.5), **PADS), ops=["Clip", "MaxPool"])
    refuses(rule, pool("MaxPool", kernel, before=clip, l=np.float32(-0.5), **PADS), "largest")
    refuses(rule, pool("MaxPool", kernel, **PADS), "largest")
    refuses(rule, pool("MaxPool", f"{kernel}, dilations=[2,2]", before="r = Relu(x) z = Pad(r, p)", **PADS))


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("x", ["2,3,5,6", "2,3,4,9"])
def test_auto_pad(mode, x):
    rule = WriteOutAutoPad()
    attrs = f'auto_pad="{mode}", strides=[2,3]'
    graph = applies(rule, plain(x, (4, 3, 4, 2), f"<{attrs}>"))
    assert all("auto_pad" not in n.attrs for n in graph.nodes())
    for op in ("MaxPool", "AveragePool"):
        applies(rule, pool(op, f"{attrs}, kernel_shape=[4,3]", x=x, before="z = Relu(x)"))


def test_auto_pad_of_a_pool_that_gives_its_indices():
    text = 'agraph (float[2,3,5] x) => (float[] y) { y, i = MaxPool<auto_pad="SAME_UPPER", kernel_shape=[2]>(x) }'
    refuses(WriteOutAutoPad(), model(text))


def test_auto_pad_of_unknown_sizes():
    rule = WriteOutAutoPad()
    applies(rule, plain("N,3,H,W", (4, 3, 4, 2), '<auto_pad="SAME_UPPER">'))
    refuses(rule, plain("N,3,H,W", (4, 3, 4, 2), '<auto_pad="SAME_UPPER", strides=[2,2]>'), "not a known")


@pytest.mark.parametrize(
    "attrs", ["", ", strides=[2,1]", ", pads=[1,1,0,1], count_include_pad=1", ", dilations=[2,1]"]
)
def test_average_pool_to_conv(attrs):
    source = pool("AveragePool", f"kernel_shape=[3,2]{attrs}", before="z = Relu(x)")
    applies(ReplaceAveragePoolByConv(), source, ops=["Relu", "Conv"])


def test_average_pool_to_conv_refuses():
    rule = ReplaceAveragePoolByConv()
    padded = pool("AveragePool", "kernel_shape=[3,2], pads=[1,1,0,1]", before="z = Relu(x)")
    refuses(rule, padded, "count the padding")
    auto = pool("AveragePool", 'kernel_shape=[3,2], auto_pad="SAME_UPPER"', before="z = Relu(x)")
    refuses(rule, auto, "by itself")
    ceil = pool("AveragePool", "kernel_shape=[3,2], ceil_mode=1", before="z = Relu(x)")
    refuses(rule, ceil, "hang over")


def test_uniform_conv():
    rule = ReplaceUniformConvByAveragePool()
    text = "agraph (float[N,3,5,6] x) => (float[] y) {{ y = Conv<group=3{}>(x, w) }}"
    quarter = np.full((3, 1, 2, 2), 0.25, np.float32)
    applies(rule, model(text.format(", pads=[1,1,0,0]"), w=quarter), ops=["AveragePool"])
    applies(rule, model(text.format(""), w=quarter * 3), ops=["AveragePool", "Mul"])
    more = np.full((3, 1, 2, 1), np.nextafter(np.float32(0.5), np.float32(1)))  # together the float after 1
    applies(rule, model(text.format(""), w=more), ops=["AveragePool", "Mul"])
    applies(rule, model(text.format(""), w=np.full((3, 1, 2, 1), np.float32(0.5))), ops=["AveragePool"])
    biased = "agraph (float[N,3,5,6] x) => (float[] y) { y = Conv<group=3>(x, w, b) }"
    applies(rule, model(biased, w=quarter, b=normal(3)), ops=["AveragePool", "Add"])
    refuses(rule, model(text.format(""), w=normal(3, 1, 2, 2)), "one number")
    refuses(rule, model(text.format(", pads=[2,1,0,0]"), w=quarter), "refuses it")


def test_global_pools():
    for rule, op, whole in (
        (ReplaceFullAveragePoolByGlobal(), "AveragePool", "GlobalAveragePool"),
        (ReplaceFullMaxPoolByGlobal(), "MaxPool", "GlobalMaxPool"),
    ):
        applies(
            rule, pool(op, "kernel_shape=[5,6], strides=[2,2]", before="z = Relu(x)"), ops=["Relu", whole]
        )
        refuses(rule, pool(op, "kernel_shape=[5,5]", before="z = Relu(x)"), "not the image")
        refuses(rule, pool(op, "kernel_shape=[5,6], pads=[1,0,0,0]", before="z = Relu(x)"), "pads")
    for rule, op, reduce in (
        (ReplaceGlobalAveragePoolByMean(), "GlobalAveragePool", "ReduceMean"),
        (ReplaceGlobalMaxPoolByMax(), "GlobalMaxPool", "ReduceMax"),
    ):
        applies(rule, model(f"agraph (float[N,C,3,W] x) => (float[] y) {{ y = {op}(x) }}"), ops=[reduce])


@pytest.mark.parametrize(
    ("rule", "op"),
    [(ReplaceMeanByGlobalAveragePool(), "ReduceMean"), (ReplaceMaxByGlobalMaxPool(), "ReduceMax")],
)
def test_reductions(rule, op):
    for axes in ((2,), (1, 2, 3), (0, 2, 3), (2, 2)):
        source = model(f"agraph (float[N,3,4,5] x) => (float[] y) {{ y = {op}(x, a) }}", a=np.array(axes))
        refuses(rule, source)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rule", "pool"),
    [
        (AlignChannelsBeforeGlobalAveragePool(), "GlobalAveragePool(r)"),
        (AlignChannelsBeforeMean(), "ReduceMean(r, i)"),
        (AlignChannelsBeforeMean(), "ReduceMean<keepdims=0>(r, i)"),
    ],
)
def test_aligned_channels(rule, pool, bias):
    def source(channels, attrs="pads=[1,1,1,1]", inputs=3, axes=(3, -2), pool=pool):
        operands = "x, w, b" if bias else "x, w"
        return model(
            f"agraph (float[N,3,8,W] x) => (float[] y) {{ c = Conv<{attrs}>({operands}) r = Relu(c) y = {pool} }}",
            w=normal(channels, inputs, 3, 3),
            b=normal(channels),
            i=np.array(axes),
        )

    graph = applies(rule, source(130))
    (conv,) = [n for n in graph.nodes() if n.op == "Conv"]
    assert graph.type(conv.inputs[1]).shape == (144, 3, 3, 3)
    (pooled,) = [n for n in graph.nodes() if n.op == "GlobalAveragePool"]
    (cut,) = graph.users(pooled.outputs[0])
    assert cut.op == "Slice"
    refuses(rule, source(160), "the channels are aligned")
    refuses(rule, source(150, "group=3", inputs=1), "groups")
    if "ReduceMean" in pool:
        refuses(rule, source(150, axes=(2,)), "spatial axes")


POOLS = ["kernel_shape=[2,2], strides=[2,2]", "kernel_shape=[3,3], pads=[1,1,1,1]"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("attrs", POOLS)
def test_average_pool_around_conv(attrs, bias):
    after = f"y = AveragePool<{attrs}>(c)"
    source = conv("2,3,6,6", (4, 3, 1, 1), bias=bias, then=after)
    applies(PushAveragePoolBeforeConv(), source, ops=["Identity", "AveragePool", "Conv"])
    before = f"z = AveragePool<{attrs}, count_include_pad=1>(x)"
    graph = applies(PushConvBeforeAveragePool(), conv("2,3,6,6", (4, 3, 1, 1), bias=bias, before=before))
    assert ("Add" in {n.op for n in graph.nodes() if not n.const}) == bias
    source = conv("2,3,6,6", (4, 3, 1, 1), bias=bias, then="y = GlobalAveragePool(c)")
    applies(PushGlobalAveragePoolBeforeConv(), source, ops=["Identity", "GlobalAveragePool", "Conv"])


def test_average_pool_around_conv_refuses():
    counted = f"y = AveragePool<{POOLS[1]}, count_include_pad=1>(c)"
    refuses(PushAveragePoolBeforeConv(), conv("2,3,6,6", (4, 3, 1, 1), then=counted), "averaged with padding")
    applies(PushAveragePoolBeforeConv(), conv("2,3,6,6", (4, 3, 1, 1), bias=False, then=counted))
    refuses(
        PushConvBeforeAveragePool(), conv("2,3,6,6", (4, 3, 2, 2), before=f"z = AveragePool<{POOLS[0]}>(x)")
    )


def pools(first, second, x="2,2,9,8"):
    return model(
        f"agraph (float[{x}] x) => (float[] y) {{ a = MaxPool<{first}>(x) y = MaxPool<{second}>(a) }}"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("kernel_shape=[5,5], pads=[2,2,2,2]", "kernel_shape=[5,5], pads=[2,2,2,2]"),
        ("kernel_shape=[2,3], strides=[2,1]", "kernel_shape=[3,2], strides=[1,2]"),
        ("kernel_shape=[3,2], strides=[2,2], pads=[1,0,1,0]", "kernel_shape=[2,2], pads=[1,1,1,0]"),
        ("kernel_shape=[2,3], strides=[2,2], pads=[0,1,0,0]", "kernel_shape=[2,2], pads=[1,1,0,1]"),
        ("kernel_shape=[2,2], strides=[3,3]", "kernel_shape=[1,1], strides=[2,2]"),
    ],
)
def test_max_pools(first, second):
    applies(MergeMaxPools(), pools(first, second), ops=["MaxPool"])


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("kernel_shape=[2,2], strides=[3,2]", "kernel_shape=[2,2]", "holes"),
        ("kernel_shape=[2,2], dilations=[2,2]", "kernel_shape=[2,2]", "holes"),
        ("kernel_shape=[2,2], strides=[2,2]", "kernel_shape=[2,2], pads=[0,0,1,0]", "leaves out an end"),
        ("kernel_shape=[2,2], strides=[2,2], ceil_mode=1", "kernel_shape=[2,2]", "hang over"),
    ],
)
def test_max_pools_refuses(first, second, reason):
    refuses(MergeMaxPools(), pools(first, second), reason)


def test_max_pools_that_leave_out_a_column():
    first, second = "kernel_shape=[2,3], strides=[2,2], pads=[0,1,0,0]", "kernel_shape=[2,2], pads=[1,1,0,1]"
    refuses(MergeMaxPools(), pools(first, second, "2,2,8,9"), "leaves out an end")


@pytest.mark.parametrize(
    "function",
    ["Relu", "Tanh", "Sigmoid", "Exp", "LeakyRelu<alpha=0.3>", "Elu", "HardSigmoid", "Round", "Erf"],
)
def test_rising_functions(function):
    attrs = "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]"
    before = model(
        f"agraph (float[2,2,5,6] x) => (float[] y) {{ a = {function}(x) y = MaxPool<{attrs}>(a) }}"
    )
    op = function.partition("<")[0]
    applies(PushRisingBehindMaxPool(), before, ops=[op, "MaxPool"])
    after = model(f"agraph (float[2,2,5,6] x) => (float[] y) {{ a = MaxPool<{attrs}>(x) y = {function}(a) }}")
    applies(PushRisingBeforeMaxPool(), after, ops=[op, "MaxPool"])


@pytest.mark.parametrize("function", ["LeakyRelu<alpha=-0.3>", "Neg", "HardSwish"])
def test_falling_functions(function):
    source = model(
        f"agraph (float[2,2,5,6] x) => (float[] y) {{ a = {function}(x) y = MaxPool<kernel_shape=[2,2]>(a) }}"
    )
    refuses(PushRisingBehindMaxPool(), source)


RESIZE = "agraph (float[2,3,4,5] x) => (float[] y) {{ r = Resize{}(x, , s) y = Conv(r, w, b) }}"


@pytest.mark.parametrize(
    ("attrs", "scales"),
    [
        ("", (1, 1, 2, 3)),
        ('<coordinate_transformation_mode="asymmetric", nearest_mode="floor">', (1, 1, 0.5, 2)),
        ('<mode="linear">', (1, 1, 2, 2)),
        ('<mode="cubic", cubic_coeff_a=-0.5>', (1, 1, 2, 1.5)),
        ("", (1, 2, 2, 2)),
    ],
)
def test_resize(attrs, scales):
    channels = int(3 * scales[1])
    source = model(
        RESIZE.format(attrs), s=np.array(scales, np.float32), w=normal(2, channels, 1, 1), b=normal(2)
    )
    if scales[1] != 1:
        refuses(PushConvBeforeResize(), source, "resizes the channels")
    else:
        applies(PushConvBeforeResize(), source, ops=["Conv", "Resize"])


def test_resize_after():
    text = "agraph (float[2,3,4,5] x) => (float[] y) {{ c = Conv{}(x, w) y = Resize(c, , s) }}"
    scales = np.array((1, 1, 0.5, 0.4), np.float32)
    source = model(text.format(""), s=scales, w=normal(2, 3, 1, 1))
    applies(PushResizeBeforeConv(), source, ops=["Conv", "Resize"])
    refuses(
        PushResizeBeforeConv(),
        model(text.format("<strides=[2,2]>"), s=scales, w=normal(2, 3, 1, 1)),
        "strides",
    )


def test_resize_to_sizes():
    """Sizes are of all dimensions, or of the axes that are said."""
    text = "agraph (float[2,3,4,5] x) => (float[] y) {{ r = Resize{}(x, , , s) y = Conv(r, w) }}"
    w = normal(2, 3, 1, 1)
    rule = PushConvBeforeResize()
    applies(rule, model(text.format(""), s=np.array([2, 3, 8, 5]), w=w), ops=["Conv", "Resize"])
    applies(rule, model(text.format("<axes=[2,3]>"), s=np.array([8, 5]), w=w), ops=["Conv", "Resize"])
