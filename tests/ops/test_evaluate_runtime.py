"""The evaluator against ONNX Runtime, where ONNX's node tests are thin: windows, recurrences, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper
import pytest

from tests.ops.test_evaluate_backend import attribute
from tests.runtime import recent
from xrlflow.ir import Attrs
from xrlflow.ops.evaluate import REALS, evaluate_node, promote
from xrlflow.ops.field import NotEvaluable

Shapes = Sequence[tuple[int, ...] | None]


def check(op: str, inputs: Sequence[Any], outputs: int = 1, **attrs: Any) -> None:
    """Both give the same, in float32 precision. The operator is named as in the IR, domain in front."""
    import onnxruntime

    arrays = [None if a is None else np.asarray(a) for a in inputs]
    names = ["" if a is None else f"i{i}" for i, a in enumerate(arrays)]
    domain, _, name = op.rpartition("::")
    results = [f"o{i}" for i in range(outputs)]
    node = onnx.helper.make_node(name, names, results, domain=domain, **attrs)
    imports = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [
            onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in zip(names, arrays)
            if a is not None
        ],
        [onnx.helper.make_empty_tensor_value_info(name) for name in results],
    )
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    expected = session.run(None, {n: a for n, a in zip(names, arrays) if a is not None})
    promoted = [None if a is None else promote(REALS, a) for a in arrays]
    got = evaluate_node(op, Attrs({a.name: attribute(a) for a in node.attribute}), promoted, outputs)
    for mine, theirs in zip(got[:outputs], expected, strict=True):
        assert mine.shape == theirs.shape
        if theirs.dtype.kind != "f":
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
        else:
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-6)


def draw(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


WINDOWS: list[dict[str, Any]] = [
    {},
    {"strides": [2, 3]},
    {"pads": [1, 0, 2, 1]},
    {"dilations": [2, 1], "strides": [1, 2], "pads": [2, 1, 0, 1]},
    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"auto_pad": "SAME_LOWER", "strides": [3, 2]},
    {"auto_pad": "VALID", "dilations": [2, 2]},
]


@pytest.mark.parametrize("attrs", WINDOWS, ids=str)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_conv(attrs: dict[str, Any], group: int) -> None:
    if "auto_pad" in attrs and "dilations" in attrs:
        attrs = {k: v for k, v in attrs.items() if k != "auto_pad"}
    check("Conv", [draw(2, 4, 9, 11), draw(8, 4 // group, 3, 2), draw(8)], group=group, **attrs)


@pytest.mark.parametrize("kernel", [1, 3])
def test_conv_in_one_and_three_dimensions(kernel: int) -> None:
    check("Conv", [draw(2, 3, 17), draw(4, 3, kernel)], pads=[kernel // 2] * 2)
    check("Conv", [draw(1, 2, 5, 6, 7), draw(4, 1, kernel, 1, 2)], group=2, strides=[1, 2, 1])
    check("Conv", [draw(3, 6, 1, 1), draw(5, 6, 1, 1)])


def test_a_convolution_unfolded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrlflow.ops.eval_linear.UNFOLDED", 1000)
    check("Conv", [draw(2, 4, 19, 8), draw(6, 2, 3, 3)], group=2, pads=[1, 1, 1, 1], strides=[2, 1])


@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"strides": [2, 3], "group": 2},
        {"strides": [3, 2], "output_padding": [1, 1], "pads": [1, 0, 0, 2]},
        {"dilations": [2, 1], "pads": [1, 1, 1, 1]},
        {"strides": [2, 2], "output_shape": [10, 13]},
        {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
        {"strides": [3, 2], "auto_pad": "SAME_LOWER"},
    ],
    ids=str,
)
def test_conv_transpose(attrs: dict[str, Any]) -> None:
    group = attrs.get("group", 1)
    check("ConvTranspose", [draw(2, 4, 5, 6), draw(4, 3, 3, 2), draw(3 * group)], **attrs)


POOLS: list[dict[str, Any]] = [
    *WINDOWS[:3],
    {"ceil_mode": 1, "strides": [2, 2]},
    {"ceil_mode": 1, "strides": [3, 3], "pads": [1, 1, 1, 1]},
    {"dilations": [2, 2], "pads": [1, 1, 1, 1]},
    {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
]


@recent
@pytest.mark.parametrize("attrs", POOLS, ids=str)
def test_pools(attrs: dict[str, Any]) -> None:
    x = draw(2, 3, 9, 10)
    check("MaxPool", [x], 2, kernel_shape=[3, 3], **attrs)
    check("AveragePool", [x], kernel_shape=[3, 3], **attrs)
    if "dilations" not in attrs and "auto_pad" not in attrs:
        check("AveragePool", [x], kernel_shape=[3, 3], count_include_pad=1, **attrs)
    if "ceil_mode" not in attrs:
        check("LpPool", [x], kernel_shape=[3, 3], p=3, **attrs)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
        ("bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("bqhd,bkhd->bhqk", [(2, 4, 3, 5), (2, 6, 3, 5)]),
        ("...ij,jk->...ik", [(2, 3, 4, 5), (5, 6)]),
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
        ("ii->i", [(4, 4)]),
        ("ij->", [(3, 4)]),
        ("ij", [(3, 4)]),
        ("ba,bc", [(2, 3), (2, 4)]),
        ("i,j->ij", [(3,), (4,)]),
        ("ij,ij->i", [(3, 4), (3, 4)]),
        ("abc,cd,def->abef", [(2, 3, 4), (4, 5), (5, 6, 7)]),
    ],
)
def test_einsum(equation: str, shapes: list[tuple[int, ...]]) -> None:
    check("Einsum", [draw(*s) for s in shapes], equation=equation)


GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("ragged", [False, True])
def test_recurrences(op: str, direction: str, ragged: bool) -> None:
    time, batch, width, size = 5, 3, 4, 6
    d, g = (2 if direction == "bidirectional" else 1), GATES[op]
    inputs: list[Any] = [
        draw(time, batch, width),
        draw(d, g * size, width),
        draw(d, g * size, size),
        draw(d, 2 * g * size),
        np.array([5, 2, 4], np.int32) if ragged else None,
        draw(d, batch, size),
    ]
    states = 1
    if op == "LSTM":
        inputs += [draw(d, batch, size) + 1, draw(d, 3 * size)]
        states = 2
    check(op, inputs, 1 + states, hidden_size=size, direction=direction)


def test_recurrences_with_other_activations() -> None:
    x, w, r = draw(4, 2, 3), draw(1, 15, 3), draw(1, 15, 5)
    check("GRU", [x, w, r], 2, hidden_size=5, linear_before_reset=1, clip=0.7)
    check(
        "GRU",
        [x, w, r],
        2,
        hidden_size=5,
        activations=["HardSigmoid", "LeakyRelu"],
        activation_alpha=[0.3, 0.05],
        activation_beta=[0.4],
    )
    w, r = draw(1, 20, 3), draw(1, 20, 5)
    check("LSTM", [x, w, r], 3, hidden_size=5, input_forget=1, activations=["Sigmoid", "Softsign", "Relu"])


@recent
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", [None, "float", "bool"])
@pytest.mark.parametrize("past", [0, 3])
def test_attention(causal: int, mask: str | None, past: int) -> None:
    q, k, v = draw(2, 4, 5, 8), draw(2, 2, 5, 8), draw(3, 2, 5, 6)[:2]
    total = 5 + past
    bias: Any = None
    if mask == "float":
        bias = draw(5, total)
    elif mask == "bool":
        bias = draw(5, total) > -1
        bias[:, past] = True
        bias[0, 0] = True
    if past:
        check(
            "Attention",
            [q, k, v, bias, draw(2, 2, past, 8), draw(2, 2, past, 6)],
            3,
            is_causal=causal,
            softcap=2.0,
        )
    else:
        check("Attention", [q, k, v, bias], is_causal=causal, scale=0.5)


RESIZES = [
    ("nearest", "asymmetric", {"nearest_mode": "floor"}),
    ("nearest", "half_pixel", {"nearest_mode": "round_prefer_ceil"}),
    ("nearest", "align_corners", {}),
    ("linear", "half_pixel", {}),
    ("linear", "pytorch_half_pixel", {}),
    ("linear", "align_corners", {}),
    ("linear", "asymmetric", {}),
    ("linear", "half_pixel", {"antialias": 1}),
    ("cubic", "half_pixel", {}),
    ("cubic", "align_corners", {"cubic_coeff_a": -0.5}),
    ("cubic", "asymmetric", {"exclude_outside": 1}),
]


@pytest.mark.parametrize(("mode", "coordinates", "attrs"), RESIZES)
@pytest.mark.parametrize("size", [(7, 9), (3, 2), (11, 4)])
def test_resize(mode: str, coordinates: str, attrs: dict[str, Any], size: tuple[int, int]) -> None:
    sizes = np.array([1, 2, *size], np.int64)
    check(
        "Resize",
        [draw(1, 2, 5, 6), None, None, sizes],
        mode=mode,
        coordinate_transformation_mode=coordinates,
        **attrs,
    )


@recent
def test_integers_are_exact() -> None:
    a = np.array([7, -7, 7, -7, 2**62], np.int64)
    b = np.array([2, 2, -2, -2, 3], np.int64)
    for op in ("Add", "Sub", "Mul", "Div", "Mod"):
        check(op, [a, b])
    check("Mod", [a, b], fmod=1)
    check("ReduceMean", [np.array([3, 4, -8], np.int32)])
    u = np.array([5, 250], np.uint8)
    check("Div", [u, np.array([2, 7], np.uint8)])
    check("MatMulInteger", [u[None], u[:, None], np.array(3, np.uint8), np.array(255, np.uint8)])
    x = np.arange(98, dtype=np.uint8).reshape(2, 1, 7, 7)
    w = np.arange(-9, 9, dtype=np.int8).reshape(2, 1, 3, 3)
    check("ConvInteger", [x, w, np.array(5, np.uint8)], pads=[1, 1, 1, 1])


def test_slices_at_their_limits() -> None:
    x = draw(5, 6)
    big = np.iinfo(np.int64).max
    for start, end, step in ((4, -big, -1), (-100, 100, 2), (100, -100, -2), (2, 2, 1), (-2, big, 1)):
        index = [np.array([v], np.int64) for v in (start, end, 0, step)]
        check("Slice", [x, *index])


@recent
def test_infinities_and_nan() -> None:
    x = np.array([-np.inf, -3, -0.0, 0.0, 2, np.inf, np.nan], np.float32)
    for op in (
        "Relu",
        "Exp",
        "Tanh",
        "Sigmoid",
        "Erf",
        "Softplus",
        "Elu",
        "LeakyRelu",
        "Abs",
        "Neg",
        "Softmax",
    ):
        check(op, [x])
    check("Softmax", [np.array([[-np.inf, 1.0], [-np.inf, -np.inf]], np.float32)])
    check("ReduceMax", [x[:-1]])
    check("ReduceLogSumExp", [np.array([-np.inf, -np.inf, 1.0], np.float32)])


MS = "com.microsoft::"


def test_fused_products_and_convolutions() -> None:
    a, b = draw(2, 3, 4, 5), draw(2, 3, 6, 5)
    check(MS + "FusedMatMul", [a, b], transB=1, alpha=0.25)
    check(MS + "FusedMatMul", [draw(2, 3, 5, 4), b], transA=1, transB=1)
    # transBatch: the leading axis goes before the last but one.
    check(MS + "FusedMatMul", [draw(4, 2, 5), draw(2, 5, 3)], transBatchA=1)
    x, w = draw(1, 4, 6, 6), draw(8, 2, 3, 3)
    for activation, parameters in (("Relu", []), ("LeakyRelu", [0.2]), ("Clip", [-0.5, 0.5])):
        attrs = {"activation_params": parameters} if parameters else {}
        check(MS + "FusedConv", [x, w, draw(8)], group=2, activation=activation, **attrs)
    check(MS + "FusedConv", [x, w, draw(8), draw(1, 8, 4, 4)], group=2, activation="Relu")
    check(MS + "FusedGemm", [draw(3, 4), draw(4, 5), draw(5)], alpha=0.5, activation="Relu")


def test_fused_activations_and_normalisations() -> None:
    x, bias = draw(2, 3, 8), draw(8)
    check(MS + "Gelu", [x])
    check(MS + "BiasGelu", [x, bias])
    check(MS + "FastGelu", [x, bias])
    check(MS + "QuickGelu", [x])
    check("SimplifiedLayerNormalization", [x, bias])
    check(MS + "SkipLayerNormalization", [x, draw(3, 2, 8)[:2].repeat(3, 1)[:, :3], bias, draw(1, 8)[0]])
    check(MS + "SkipSimplifiedLayerNormalization", [x, -x + bias, draw(1, 8)[0]])


def test_multi_head_attention() -> None:
    q, k, v = draw(2, 5, 12), draw(2, 7, 12), draw(7, 2, 12).swapaxes(0, 1).copy()
    check(MS + "MultiHeadAttention", [q, k, v], num_heads=3)
    check(MS + "MultiHeadAttention", [q, k, v, draw(36), None, draw(2, 3, 5, 7)], num_heads=3, scale=0.3)


def test_products_of_integers_with_scales() -> None:
    a = np.arange(12, dtype=np.uint8).reshape(3, 4)
    b = np.arange(-10, 10, dtype=np.int8).reshape(4, 5)
    scale = np.array(0.1, np.float32)
    zero, columns = np.array(3, np.uint8), np.linspace(0.1, 0.5, 5, dtype=np.float32)
    check(MS + "MatMulIntegerToFloat", [a, b, scale, columns, zero, np.array(1, np.int8), draw(5)])
    check(MS + "DynamicQuantizeMatMul", [draw(3, 4), b, columns, np.zeros(5, np.int8), draw(5)])


def bytes_(*shape: int, signed: bool = False) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)
    return drawn.view(np.int8) if signed else drawn


def quantised(x: np.ndarray[Any, Any], scale: float, zero: int) -> list[np.ndarray[Any, Any]]:
    return [x, np.array(scale, np.float32), np.array(zero, x.dtype)]


@pytest.mark.parametrize("signed", [False, True])
def test_operators_of_quantised_numbers(signed: bool) -> None:
    """The runtime rounds in float32. No result here is near a tie."""
    zero = -3 if signed else 120
    a, b = (
        quantised(bytes_(2, 4, 6, 6, signed=signed), 0.031, zero),
        quantised(bytes_(4, 6, 6, signed=signed), 0.017, zero + 1),
    )
    to = [np.array(0.0437, np.float32), np.array(zero + 2, a[0].dtype)]
    check(MS + "QLinearAdd", [*a, *b, *to])
    check(MS + "QLinearMul", [*a, *b, np.array(0.0513, np.float32), to[1]])
    check(
        MS + "QLinearSigmoid",
        [*a, np.array(1 / 256, np.float32), np.array(-128 if signed else 0, a[0].dtype)],
    )
    check(MS + "QLinearLeakyRelu", [*a, *to], alpha=0.2)
    check(MS + "QLinearGlobalAveragePool", [*a, *to])
    check(MS + "QLinearAveragePool", [*a, *to], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 0, 0])
    check(MS + "QLinearConcat", [*to, *a, *quantised(bytes_(2, 3, 6, 6, signed=signed), 0.05, zero)], axis=1)
    check(MS + "QLinearWhere", [bytes_(6) > 99, *a, *b, *to])


def test_a_quantised_linear_layer() -> None:
    a, b = quantised(bytes_(3, 8), 0.02, 125), quantised(bytes_(5, 8, signed=True), 0.01, 0)
    bias = np.arange(-400, 600, 200, dtype=np.int32)
    check(MS + "QGemm", [*a, *b, bias, np.array(0.05, np.float32), np.array(99, np.uint8)], transB=1)
    columns = [b[0], np.linspace(0.01, 0.02, 5, dtype=np.float32), np.zeros(5, np.int8)]
    check(MS + "QGemm", [*a, *columns, bias], transB=1)
    # The zero point decides on the type of the result, and the scale is 1 if it is left out.
    check(MS + "QGemm", [*a, *columns, bias, np.array(0.05, np.float32)], transB=1)
    check(MS + "QGemm", [*a, *columns, bias, None, np.array(99, np.uint8)], transB=1)


def test_softmax_of_quantised_numbers() -> None:
    x = quantised(bytes_(2, 3, 5), 0.03, 120)
    to = [np.array(1 / 256, np.float32), np.array(0, np.uint8)]
    check(MS + "QLinearSoftmax", [*x, *to], opset=13, axis=-1)
    check(MS + "QLinearSoftmax", [*x, *to], opset=12, axis=1)


@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_packed_matrices(bits: int) -> None:
    k, n, block = 40, 6, 16
    packed, scales = bytes_(n, 3, block * bits // 8), np.abs(draw(n, 3)).reshape(-1) / 16
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block}
    check(MS + "MatMulNBits", [draw(2, 3, k), packed, scales], **attrs)
    check(
        MS + "MatMulNBits",
        [draw(2, 3, k), packed, scales, bytes_(n, 2 if bits == 4 else 3).reshape(-1)],
        **attrs,
    )
    check(MS + "MatMulNBits", [draw(2, 3, k), packed, scales, None, None, draw(n)], **attrs)


def test_rows_of_packed_matrices_in_groups() -> None:
    """The scale and the zero point of a row are those of its group, not of its block."""
    k, n = 64, 6
    groups = np.random.default_rng(5).integers(0, 2, k).astype(np.int32)
    packed, scales, zeros = bytes_(n, 2, 16), np.abs(draw(n, 2)).reshape(-1) / 16, draw(n, 2).reshape(-1)
    attrs = {"K": k, "N": n, "bits": 4, "block_size": 32}
    check(MS + "MatMulNBits", [draw(2, 3, k), packed, scales, None, groups], **attrs)
    check(MS + "MatMulNBits", [draw(2, 3, k), packed, scales, zeros, groups], **attrs)
    with pytest.raises(NotEvaluable):
        evaluate_node(MS + "MatMulNBits", Attrs(attrs), [draw(2, k), packed, scales, bytes_(n), groups], 1)


def test_infinities_in_products_with_packed_matrices_do_not_depend_on_the_rows() -> None:
    packed, scales = bytes_(3, 1, 16), np.ones(3, np.float32)
    x = np.zeros((8, 32))
    x[0, 0] = np.inf
    attrs = Attrs({"K": 32, "N": 3, "bits": 4, "block_size": 32})
    with np.errstate(all="ignore"):
        many, few = (evaluate_node(MS + "MatMulNBits", attrs, [a, packed, scales], 1)[0] for a in (x, x[:1]))
    np.testing.assert_array_equal(many[:1], few)
