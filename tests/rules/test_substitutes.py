"""Operators by others that ONNX Runtime computes faster."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import pytest

from rewrite_rules.substitutes import (
    ReplaceCeluByExp,
    ReplaceEluByExp,
    ReplaceMishByExp,
    ReplaceNarrowConvByConvTranspose,
    ReplaceNearestResize,
    ReplacePowByProducts,
    ReplacePReluByMax,
    ReplaceReduceByMatMul,
    ReplaceReduceBySplit,
    ReplaceResizeByMatMul,
    ReplaceSeluByExp,
    ReplaceSoftmaxByExp,
    ReplaceSoftplusByLog,
    SplitDepthToSpace,
)
from tests.rules.harness import applies, model, normal, refuses, rewritten, run
from xrlflow.rewrite import AnyRule

I1 = np.array([1])


def of(call: str, shape: str = "2,5,3,4", type: str = "float", **constants: np.ndarray):
    return model(f"agraph ({type}[{shape}] x) => ({type}[] y) {{ y = {call} }}", **constants)


@pytest.mark.parametrize("type", ["float", "double"])
def test_softmax_over_channels(type: str) -> None:
    rule = ReplaceSoftmaxByExp()
    for axis in (0, 1, -2):
        applies(
            rule,
            of(f"Softmax<axis={axis}>(x)", type=type),
            ops=["Div", "Exp", "ReduceMax", "ReduceSum", "Sub"],
        )
        applies(rule, of(f"LogSoftmax<axis={axis}>(x)", "2,5,3,1", type))
    applies(rule, of("Softmax<axis=1>(x)", "N,5,H,W"))
    refuses(rule, of("Softmax<axis=1>(x)", "2,C,3", type), "not a known number")
    refuses(rule, of("Softmax(x)", type=type), "the axis is the last")
    refuses(rule, of("Softmax<axis=1>(x)", "1,513,2"), "loses accuracy")


def test_softmax_of_what_is_not_finite() -> None:
    """A channel that is infinite or NaN makes its pixel NaN; minus infinity alone is a probability of 0."""
    x = normal(1, 4, 5)
    x[0, 1, 0], x[0, 2, 1], x[0, 3, 2], x[0, :, 3] = np.nan, np.inf, -np.inf, -np.inf
    for call in ("Softmax<axis=1>(x)", "LogSoftmax<axis=1>(x)"):
        before = of(call, "1,4,5")
        after, _ = rewritten(ReplaceSoftmaxByExp(), before)
        (a,), (b,) = run(before, {"x": x}), run(after, {"x": x})
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_allclose(a[0, :, [2, 4]], b[0, :, [2, 4]], rtol=1e-5)


@pytest.mark.parametrize(("op", "keep"), product(("ReduceSum", "ReduceMean"), (0, 1)))
def test_reductions_by_products(op: str, keep: int) -> None:
    rule, call = ReplaceReduceByMatMul(), f"{op}<keepdims={keep}>(x, a)"
    for axes in ([0], [1], [-2], [1, 0], [1, 2], [0, 1, 2]):
        graph = applies(rule, of(call, a=np.array(axes)))
        assert [n.op for n in graph.nodes() if n.op.startswith("Reduce")] == []
    applies(rule, of(call, "3,4", a=np.array([0])))
    applies(rule, of(call, "N,4,L", a=I1))
    applies(rule, of(call, "N,4,3,3", "double", a=I1))
    refuses(rule, of(call, "N,4,H,W", a=I1), "may be 0")
    refuses(rule, of(call, a=np.array([0, 2])), "no neighbours")
    refuses(rule, of(call, a=np.array([3])), "last axis")
    refuses(rule, of(call, "2,4097,3", a=I1), "too long")
    refuses(rule, of(call, type="int32", a=I1))
    refuses(rule, of(f"{op}<noop_with_empty_axes=1>(x, a)", a=np.array([], np.int64)), "or nothing")


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
def test_the_greatest_of_few(op: str) -> None:
    rule, extreme = ReplaceReduceBySplit(), op.removeprefix("Reduce")
    applies(rule, of(f"{op}(x, a)", a=I1), ops=[extreme, "Split"])
    applies(rule, of(f"{op}<keepdims=0>(x, a)", "N,5,H,W", "double", a=I1), ops=[extreme, "Split", "Squeeze"])
    refuses(rule, of(f"{op}(x, a)", a=np.array([1, 2])), "several")
    refuses(rule, of(f"{op}(x, a)", "2,33,3", a=I1), "too long")
    refuses(rule, of(f"{op}(x, a)", type="int64", a=I1))


SLOPES = {"up to 1": [0.25, -2, 1], "more": [0.25, 3, 1], "0": [0.5, 0, 1]}
FUNCTIONS: list[tuple[AnyRule, str, dict[str, np.ndarray]]] = [
    (ReplaceSoftplusByLog(), "Softplus(x)", {}),
    (ReplaceMishByExp(), "Mish(x)", {}),
    *((ReplaceEluByExp(), f"Elu<alpha={a}>(x)", {}) for a in (1.0, 0.3, -0.3, 0.0)),
    *((ReplaceCeluByExp(), f"Celu<alpha={a}>(x)", {}) for a in (1.0, 0.5, 3.0)),
    (ReplaceSeluByExp(), "Selu(x)", {}),
    *((ReplacePReluByMax(), "PRelu(x, s)", {"s": np.array(s, np.float32)}) for s in SLOPES.values()),
    *((ReplacePowByProducts(), "Pow(x, s)", {"s": np.float32(c)}) for c in (4, -1, -2)),
]


@pytest.mark.parametrize(("rule", "call", "given"), FUNCTIONS)
def test_functions_where_they_are_extreme(rule: AnyRule, call: str, given: dict[str, np.ndarray]) -> None:
    """Equal to the rounding of the function's own kernel, NaN and infinities where it has them."""
    kinds = [
        0,
        -0.0,
        np.nan,
        np.inf,
        -np.inf,
        19.9,
        20.1,
        -20,
        60,
        -60,
        85,
        -85,
        1e4,
        -1e4,
        1e30,
        -1e30,
        1e-20,
        -1e-20,
    ]
    x = np.concatenate([np.array(kinds, np.float32), normal(300) * 5]).reshape(-1, 3)
    before = of(call, f"{len(x)},3", **given)
    applies(rule, before)
    (a,), (b,) = run(before, {"x": x}), run(rewritten(rule, before)[0], {"x": x})
    # These kernels subtract 1 from an exponential, with an error of what float32 rounds 1 to.
    rounded = 2e-7 if "lu" in call and "PRelu" not in call else 0
    np.testing.assert_allclose(b, a, rtol=2e-6, atol=rounded)


def test_functions_refuse() -> None:
    refuses(ReplaceEluByExp(), of("Elu<alpha=1.5>(x)"), "above")
    refuses(ReplaceCeluByExp(), of("Celu<alpha=-1.0>(x)"), "above")
    refuses(ReplacePReluByMax(), of("PRelu(x, s)", s=np.array([np.inf], np.float32)), "not finite")
    refuses(ReplacePReluByMax(), of("PRelu(x, s)", s=np.array([np.nan], np.float32)), "not finite")
    refuses(ReplacePReluByMax(), model("agraph (float[3] x, float[3] s) => (float[] y) { y = PRelu(x, s) }"))
    refuses(ReplacePowByProducts(), of("Pow(x, s)", s=np.float32(3.3)), "another")
    refuses(ReplacePowByProducts(), of("Pow(x, s)", type="int32", s=np.int32(4)))


def scaled(attributes: str, *scales: float, shape: str = "2,3,4,5", type: str = "float"):
    return of(f"Resize<{attributes}>(x, , z)", shape, type, z=np.array(scales, np.float32))


def sized(attributes: str, *sizes: int, shape: str = "2,3,4,5"):
    return of(f"Resize<{attributes}>(x, , , z)", shape, z=np.array(sizes))


COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric")


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_interpolation_by_products(mode: str) -> None:
    rule = ReplaceResizeByMatMul()
    for coordinates in COORDINATES:
        given = f'mode="{mode}", coordinate_transformation_mode="{coordinates}"'
        applies(rule, scaled(given, 1, 1, 2, 3), ops=["MatMul", "MatMul"])
        applies(rule, sized(given, 2, 3, 7, 5), ops=["MatMul"])
        applies(rule, sized(given + ", antialias=1", 2, 3, 2, 3))
    plain = f'mode="{mode}"'
    applies(rule, scaled(plain, 1, 1, 2, 2, shape="N,3,4,5"))
    applies(rule, scaled('mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1', 1, 1, 2, 2))
    refuses(rule, scaled(plain, 1, 1, 0.5, 0.5, shape="2,3,4,6"), "left out")
    refuses(rule, scaled(plain, 1, 1, 1.1, 1), "rounded")
    refuses(rule, scaled(plain, 1, 1, 2, 2, shape="2,3,H,W"), "not a known number")
    refuses(rule, scaled(plain, 1, 1, 2, 2, shape="1,1,1024,4"), "too large")
    refuses(rule, scaled(plain, 1, 1, 2, 2, type="int32"))
    refuses(rule, sized(plain + ', keep_aspect_ratio_policy="not_larger"', 2, 3, 8, 10), "sets the scale")
    refuses(rule, scaled('mode="nearest"', 1, 1, 2, 2), "interpolate")


def test_nearest_pixels_by_other_coordinates() -> None:
    rule = ReplaceNearestResize()
    for coordinates, rounding, type in product(
        COORDINATES[:2], ("round_prefer_floor", "round_prefer_ceil"), ("float", "uint8")
    ):
        given = f'coordinate_transformation_mode="{coordinates}", nearest_mode="{rounding}"'
        graph = applies(rule, scaled(given, 1, 1, 2, 3, type=type))
        (resize,) = [n for n in graph.nodes() if n.op == "Resize"]
        assert resize.attrs["nearest_mode"] == "floor"
    applies(rule, sized("axes=[2,3]", 8, 5))
    refuses(rule, scaled('nearest_mode="floor"', 1, 1, 2, 2), "round")
    refuses(rule, scaled('coordinate_transformation_mode="align_corners"', 1, 1, 2, 2), "coordinates")
    refuses(rule, scaled("axes=[2,3]", 1.5, 2), "repeat")
    refuses(rule, sized("axes=[2,3]", 8, 7), "repeat")


@pytest.mark.parametrize(("mode", "type"), product(("DCR", "CRD"), ("float", "uint8")))
def test_pixels_out_of_channels(mode: str, type: str) -> None:
    rule = SplitDepthToSpace()
    for shape, size in (("2,8,3,5", 2), ("1,27,2,1", 3), ("N,16,1,4", 2)):
        graph = applies(rule, of(f'DepthToSpace<blocksize={size}, mode="{mode}">(x)', shape, type))
        assert [n.op for n in graph.nodes() if not n.const].count("Transpose") == 2
    refuses(rule, of(f'DepthToSpace<blocksize=1, mode="{mode}">(x)', "2,8,3,5", type), "single pixels")
    refuses(rule, of(f'DepthToSpace<blocksize=2, mode="{mode}">(x)', "2,8,H,W", type), "not a known number")


CONVOLUTIONS = (
    ("2,8,5,6", (2, 8, 3, 3), "pads=[1,1,1,1]"),
    ("N,8,5,6", (1, 8, 3, 2), "pads=[0,1,2,0]"),
    ("1,16,9,7", (3, 16, 3, 1), "dilations=[2,3], pads=[4,0,0,0]"),
    ("2,4,H,W", (1, 4, 1, 5), "pads=[0,2,0,2]"),
    ("2,4,7", (1, 4, 3), "pads=[1,1]"),
)


@pytest.mark.parametrize(("image", "kernel", "attributes"), CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_to_few_channels(
    image: str, kernel: tuple[int, ...], attributes: str, bias: bool
) -> None:
    given = {"w": normal(*kernel), **({"b": normal(kernel[0])} if bias else {})}
    call = f"Conv<{attributes}>(x, w{', b' if bias else ''})"
    applies(ReplaceNarrowConvByConvTranspose(), of(call, image, **given), ops=["ConvTranspose"])


def test_convolutions_refuse() -> None:
    rule, w = ReplaceNarrowConvByConvTranspose(), normal(1, 8, 3, 3)
    refuses(rule, of("Conv<strides=[2,1]>(x, w)", "2,8,5,5", w=w), "strides")
    refuses(rule, of("Conv<pads=[3,0,0,0]>(x, w)", "2,8,5,5", w=w), "reach")
    refuses(rule, of('Conv<auto_pad="SAME_LOWER">(x, w)', "2,8,5,5", w=w), "image demands")
    refuses(rule, of("Conv(x, w)", "2,8,2,5", w=w), "larger")
    refuses(rule, of("Conv(x, w)", "2,8,5,5", w=normal(3, 8, 3, 3)), "many output channels")
    refuses(rule, of("Conv(x, w)", "2,8,5,5", w=normal(1, 8, 1, 1)), "one tap")
    refuses(rule, of("Conv<group=2>(x, w)", "2,16,5,5", w=normal(2, 8, 3, 3)))


@pytest.mark.parametrize(
    ("rule", "call"),
    [
        (ReplaceResizeByMatMul(), 'Resize<mode="linear">(s, , k)'),
        (ReplaceReduceByMatMul(), "ReduceSum(s, a)"),
    ],
)
def test_products_with_what_may_be_empty(rule: AnyRule, call: str) -> None:
    """ONNX Runtime's MatMul refuses matrices before an empty batch of them."""
    given = {"k": np.array([1, 1, 2, 1], np.float32), "a": I1 + 1, "zero": I1 - 1, "end": -I1}

    def graph(first: str) -> onnx.ModelProto:
        return model(f"agraph (float[N,2,3,4] x) => (float[] y) {{ s = {first}\n y = {call} }}", **given)

    applies(rule, graph("Relu(x)"))
    refuses(rule, graph("Slice(x, zero, end, zero)"), "may be 0")


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
def test_what_is_no_number_may_spread(op: str) -> None:
    """ONNX Runtime's reductions along other axes than the last pass over NaN."""
    x = np.array([[[1, 2], [np.nan, 3], [4, np.nan]]], np.float32)
    before = of(f"{op}(x, a)", "1,3,2", a=I1)
    after, _ = rewritten(ReplaceReduceBySplit(), before)
    (a,), (b,) = run(before, {"x": x}), run(after, {"x": x})
    assert ReplaceReduceBySplit.may_add_nonfinite or np.array_equal(a, b, equal_nan=True)
    assert np.isnan(b).all()
