"""Operators of 8-bit integers: what the rules make of them is equal bit by bit, at the limits, too."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

from rewrite_rules.quantised import (
    ClipBytes,
    ConvolveBlocks,
    ConvolveIntegersInFloat32,
    ConvolveUnsignedWeights,
    DequantiseWeightsOnce,
    PoolBytes,
    QuantiseAllUnsigned,
    QuantiseUnsigned,
    RectifyBytes,
    StoreQuantisedWeights,
    UseSignedWeights,
    UseUnsignedWeights,
)
from tests.rules.harness import alone, applies, model, refuses, rewritten, run
from xrlflow.backends.onnxruntime.saturation import saturates
from xrlflow.ir import DType
from xrlflow.onnxio import load
from xrlflow.prover.machine import MACHINE, evaluation
from xrlflow.rewrite import AnyRule, Library, RewriteState

SCALES = {"s": np.float32(0.1), "t": np.float32(0.3), "z": np.int8(-3)}


def _equal(rule: AnyRule, proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    after, _ = rewritten(rule, proto)
    for a, b in zip(run(proto, feeds), run(after, feeds), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def _convolution(weights: np.ndarray) -> onnx.ModelProto:
    channels = weights.shape[1]
    return model(
        f"agraph (uint8[2,{channels},1] x, uint8 z) => (y) {{ p = ConvInteger(x, w, z) y = Cast<to=1>(p) }}",
        w=weights,
    )


def test_the_greatest_sums_of_24_bits_are_exact() -> None:
    """518 products of 255 and 127 are just below 2^24; negative weights as many as positive ones do not add to them."""
    weights = np.repeat(np.int8([[[127]], [[-127]]]), 518, axis=1)
    mixed = np.concatenate([weights, -weights], axis=1)
    rng = np.random.default_rng(0)
    for w in (weights, mixed):
        for zero in (0, 255, 100):
            x = rng.choice(np.uint8([0, 255, 254]), (2, w.shape[1], 1), p=[0.1, 0.8, 0.1])
            _equal(ConvolveIntegersInFloat32(), _convolution(w), {"x": x, "z": np.array(zero, np.uint8)})


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_of_25_bits_stays_one_of_integers(sign: int) -> None:
    weights = np.full((2, 519, 1), 127 * sign, np.int8)
    refuses(ConvolveIntegersInFloat32(), _convolution(weights), "24 bits")


def test_zero_points_of_weights_count() -> None:
    source = "agraph (uint8[1,400,1] x) => (y) { p = ConvInteger(x, w, z, v) y = Cast<to=1>(p) }"
    consts = {"w": np.full((1, 400, 1), 255, np.uint8), "z": np.uint8(0)}
    refuses(ConvolveIntegersInFloat32(), model(source, v=np.uint8(0), **consts), "24 bits")
    applies(ConvolveIntegersInFloat32(), model(source, v=np.uint8(200), **consts))


@pytest.mark.parametrize(
    "attributes", ["", "<group=2>", "<pads=[1,0,2,1], strides=[2,1]>", "<dilations=[2,1]>"]
)
@pytest.mark.parametrize(
    "rule", [ConvolveIntegersInFloat32(), ConvolveUnsignedWeights()], ids=lambda r: r.name
)
def test_integers_are_convolved_exactly(rule: AnyRule, attributes: str) -> None:
    rng = np.random.default_rng(1)
    weights = rng.integers(-128, 128, (4, 2 if "group" in attributes else 4, 2, 2)).astype(np.int8)
    zeros = rng.integers(-9, 9, 1).astype(np.int8)
    proto = model(
        f"agraph (uint8[2,4,6,5] x, uint8 z) => (y) {{ p = ConvInteger{attributes}(x, w, z, v) y = Cast<to=1>(p) }}",
        w=weights,
        v=zeros,
    )
    _equal(
        rule, proto, {"x": rng.integers(0, 256, (2, 4, 6, 5)).astype(np.uint8), "z": np.array(77, np.uint8)}
    )


def test_unsigned_weights_stay_in_the_file_as_bytes() -> None:
    weights = np.random.default_rng(0).integers(-128, 128, (64, 64, 3, 3)).astype(np.int8)
    source = "agraph (uint8[1,64,8,8] x, uint8 z) => (y) { y = ConvInteger(x, w, z) }"
    after, _ = rewritten(ConvolveUnsignedWeights(), model(source, w=weights))
    (stored,) = [i for i in after.graph.initializer if len(i.dims) == 4]
    assert stored.data_type == onnx.TensorProto.UINT8


NUMBERS = np.float32([[0.05, -0.05, 0.15, 12.9, -13.2, 1e30, -1e30, np.nan, np.inf, -np.inf, 0.25, -12.75]])
CHAIN = (
    "agraph (float[N,12] x) => (y, v) { q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z) b = Neg(a) "
    "r = QuantizeLinear(b, t) y = DequantizeLinear(r, t) o = QuantizeLinear(a, t, z) v = DequantizeLinear(o, t, z) }"
)


@pytest.mark.parametrize("rule", [QuantiseUnsigned(), QuantiseAllUnsigned()], ids=lambda r: r.name)
def test_signed_and_unsigned_bytes_mean_the_same(rule: AnyRule) -> None:
    _equal(rule, model(CHAIN, **SCALES), {"x": NUMBERS})


@pytest.mark.parametrize("zero", [np.int8(-3), np.uint8(125)])
def test_quantised_numbers_are_evaluated_as_they_run(zero: np.generic) -> None:
    proto = model("agraph (float[N,12] x) => (y) { y = QuantizeLinear(x, s, z) }", s=SCALES["s"], z=zero)
    graph = load(proto).graph
    with np.errstate(all="ignore"):
        (found,) = evaluation(graph).run({graph.inputs[0]: NUMBERS.astype(np.float64)}, MACHINE)
    np.testing.assert_array_equal(found, run(proto, {"x": NUMBERS})[0])


def test_all_that_operators_connect_becomes_unsigned_at_once() -> None:
    _, graph = rewritten(QuantiseAllUnsigned(), model(CHAIN, **SCALES))
    assert {n.types[0].dtype for n in graph.nodes() if n.op == "QuantizeLinear"} == {DType.UINT8}
    state = RewriteState.start(load(model(CHAIN, **SCALES)).graph, alone(QuantiseAllUnsigned()))
    assert len(list(state.candidates)) == 1


@pytest.mark.parametrize(
    "body",
    [
        "q = QuantizeLinear(x, s, z) y = Identity(q)",  # bytes leave the model
        "q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z) p = Transpose(q) o = Cast<to=1>(p) y = Add(a, o)",
        "q = QuantizeLinear(x, k, z) y = DequantizeLinear(q, k, z)",  # a scale that is computed
    ],
)
def test_other_readers_need_signed_bytes(body: str) -> None:
    source = f"agraph (float[3,3] x, float k) => (y) {{ {body} }}"
    used = {name: value for name, value in SCALES.items() if f" {name}" in body}
    refuses(QuantiseUnsigned(), model(source, **used))


def test_quantised_weights_are_stored_as_bytes() -> None:
    weights = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
    source = (
        "agraph (float[N,40] x) => (y) "
        "{ q = QuantizeLinear<axis=0>(w, s, z) v = DequantizeLinear<axis=0>(q, s, z) y = MatMul(x, v) }"
    )
    scales = np.linspace(0.01, 0.03, 40).astype(np.float32)
    proto = model(source, w=weights, s=scales, z=np.zeros(40, np.int8))
    after, _ = rewritten(StoreQuantisedWeights(), proto)
    assert onnx.TensorProto.FLOAT not in {i.data_type for i in after.graph.initializer if len(i.dims) == 2}
    assert after.ByteSize() < 0.4 * proto.ByteSize()
    _equal(StoreQuantisedWeights(), proto, {"x": np.eye(40, dtype=np.float32)})


WEIGHTS = {"w": np.random.default_rng(0).integers(-128, 128, (4, 3, 2, 2)).astype(np.int8)}


@pytest.mark.parametrize("end", ["", "f = Relu(c)", "f = Clip(c, low)", "e = Relu(c) f = LeakyRelu(e)"])
def test_weights_between_bytes_stay_quantised(end: str) -> None:
    """ONNX Runtime would quantise weights of floats itself, to other numbers."""
    last = "f" if end else "c"
    source = (
        "agraph (uint8[1,3,4,4] p) => (y) { x = DequantizeLinear(p, s) v = DequantizeLinear(w, s, z) c = Conv(x, v) "
        f"{end} y = QuantizeLinear({last}, t) }}"
    )
    consts = WEIGHTS | SCALES | ({"low": np.float32(0)} if "low" in end else {})
    refuses(DequantiseWeightsOnce(), model(source, **consts))
    freed = source.replace(f"y = QuantizeLinear({last}, t)", f"g = Abs({last}) y = QuantizeLinear(g, t)")
    applies(DequantiseWeightsOnce(), model(freed, **consts))


def test_what_is_no_number_becomes_the_least_byte() -> None:
    weights = np.float32([[np.nan, 0.5, np.inf, -np.inf, 3e38]])
    source = "agraph (float[N,5] x) => (y) { q = QuantizeLinear(w, s, z) v = DequantizeLinear(q, s, z) y = Add(x, v) }"
    for zero in (np.int8(-3), np.uint8(3)):
        proto = model(source, w=weights, s=np.float32(0.1), z=zero)
        _equal(StoreQuantisedWeights(), proto, {"x": np.zeros((1, 5), np.float32)})


@pytest.mark.parametrize("op", ["Transpose", "Identity", "MaxPool<kernel_shape=[1,1]>"])
@pytest.mark.parametrize("place", ["before", "behind"])
def test_weights_stay_quantised_where_quantisations_are_moved(op: str, place: str) -> None:
    before, behind = (op, "Identity") if place == "before" else ("Identity", op)
    source = (
        f"agraph (uint8[1,3,4,4] p) => (y) {{ x = DequantizeLinear(p, s) a = {before}(x) v = DequantizeLinear(w, s, z) "
        f"c = Conv(a, v) b = {behind}(c) y = QuantizeLinear(b, t) }}"
    )
    refuses(DequantiseWeightsOnce(), model(source, **(WEIGHTS | SCALES)))


def test_a_long_chain_behind_a_convolution_is_followed() -> None:
    chain = " ".join(f"r{i + 1} = Relu(r{i})" for i in range(1500))
    source = (
        "agraph (uint8[1,3,4,4] p) => (y) { x = DequantizeLinear(p, s) v = DequantizeLinear(w, s, z) r0 = Conv(x, v) "
        f"{chain} y = QuantizeLinear(r1500, t) }}"
    )
    refuses(DequantiseWeightsOnce(), model(source, **(WEIGHTS | SCALES)))


def test_scales_of_float16_stay() -> None:
    source = "agraph (float[1,3,4,4] x) => (y) { v = DequantizeLinear<output_dtype=1, axis=0>(w, s) y = Conv(x, v) }"
    refuses(DequantiseWeightsOnce(), model(source, **WEIGHTS, s=np.float16([0.1, 0.2, 0.3, 0.4])))
    source = "agraph (float16[1,3] x) => (y) { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }"
    refuses(QuantiseUnsigned(), model(source, s=np.float16(0.1), z=np.int8(3)))


STEM = (
    "agraph (float[2,3,24,32] x) => (y) { q = QuantizeLinear(x, s, z) p = DequantizeLinear(q, s, z) "
    "v = DequantizeLinear<axis=0>(w, r, o) c = Conv<strides=[2,2], pads=[1,1,1,1]>(p, v) "
    "g = QuantizeLinear(c, t, z) y = DequantizeLinear(g, t, z) }"
)
STEM_VALUES = {
    "s": np.float32(0.02), "z": np.uint8(114), "t": np.float32(0.5),
    "r": np.linspace(0.01, 0.02, 8).astype(np.float32), "o": np.zeros(8, np.int8),
}  # fmt: skip


def _stem(
    text: str = STEM, kernel: tuple[int, int] = (3, 3), channels: int = 3, **values: object
) -> onnx.ModelProto:
    w = np.random.default_rng(1).integers(-128, 128, (8, channels, *kernel)).astype(np.int8)
    return model(text, **(STEM_VALUES | {"w": w} | values))


@pytest.mark.parametrize(
    ("kernel", "strides", "pads"),
    [
        ((3, 3), "2,2", "1,1,1,1"),
        ((7, 7), "2,2", "3,3,3,3"),
        ((6, 5), "2,2", "2,1,0,2"),
        ((4, 4), "4,4", "0,0,0,0"),
        ((1, 3), "2,2", "0,0,0,0"),
        ((5, 3), "4,4", "3,2,2,1"),
        ((3, 3), "2,2", "0,1,2,0"),
    ],
)
def test_a_stem_of_blocks_computes_the_same_bytes(kernel: tuple[int, int], strides: str, pads: str) -> None:
    text = STEM.replace("strides=[2,2], pads=[1,1,1,1]", f"strides=[{strides}], pads=[{pads}]")
    x = np.random.default_rng(2).standard_normal((2, 3, 24, 32)).astype(np.float32)
    _equal(ConvolveBlocks(), _stem(text, kernel), {"x": x})


@pytest.mark.parametrize(
    ("text", "reason", "values"),
    [
        (STEM, "zero point", {"o": np.int8([0, 0, 0, 1, 0, 0, 0, 0])}),
        (STEM.replace("axis=0", "axis=1"), "scales", {"r": np.float32([1, 2, 3]), "o": np.zeros(3, np.int8)}),
        (STEM.replace("(y)", "(y, q)"), "elsewhere", {}),
        (STEM.replace("g = ", "k = Sigmoid(p) g = ").replace("(y)", "(y, k)"), "elsewhere", {}),
        (STEM.replace("24,32", "24,33"), None, {}),
        (STEM.replace("[2,2], pads", "[2,1], pads"), None, {}),
        (STEM.replace("[2,2], pads", "[2,2], dilations=[1,2], pads"), None, {}),
        (STEM.replace("[2,2], pads=[1,1,1,1]", '[2,2], auto_pad="SAME_LOWER"'), None, {}),
        (STEM.replace("g = QuantizeLinear(c, t, z) y = DequantizeLinear(g, t, z)", "y = Relu(c)"), None, {}),
        (STEM.replace("float[2,3", "float[2,5"), None, {"channels": 5}),
    ],
)  # fmt: skip
def test_a_convolution_that_is_no_stem_stays(
    text: str, reason: str | None, values: dict[str, object]
) -> None:
    refuses(ConvolveBlocks(), _stem(text, **values), reason)


def test_weights_become_signed() -> None:
    weights = np.random.default_rng(0).integers(0, 256, (40, 30)).astype(np.uint8)
    proto = model(
        "agraph (uint8[N,40] x, uint8 z) => (int32[N,30] y) <uint8 v = {131}> { y = MatMulInteger(x, w, z, v) }",
        w=weights,
    )
    graph = applies(UseSignedWeights(), proto, ops=["MatMulInteger"])
    (node,) = (n for n in graph.nodes() if not n.const)
    assert graph.type(node.inputs[1]).const
    feeds = {"x": np.full((2, 40), 255, np.uint8), "z": np.asarray(0, np.uint8)}
    assert run(proto, feeds)[0].shape == (2, 30)


def test_signed_weights_need_a_processor_that_does_not_saturate() -> None:
    assert "UseSignedWeights" not in Library([UseSignedWeights()]).rules
    assert "UseSignedWeights" in Library([UseSignedWeights()], assuming=("vnni",)).rules


def test_unsigned_weights_are_for_processors_that_saturate_after_activations_became_unsigned() -> None:
    assert "UseUnsignedWeights" not in Library([UseUnsignedWeights()]).rules
    assert "UseUnsignedWeights" in Library([UseUnsignedWeights()], assuming=("saturates",)).rules
    assert set(UseUnsignedWeights.swept_after) == {"QuantiseAllUnsigned", "QuantiseUnsigned"}


@pytest.mark.parametrize("channels", [False, True])
def test_unsigned_weights_do_not_saturate(channels: bool) -> None:
    """With signed ones, sums of two products of 255 and 127 do, where processors have no VNNI."""
    zeros = {"v": np.zeros(6, np.int8)} if channels else {}
    text = (
        "agraph (uint8[N,8,5,5] q) => (y) { x = DequantizeLinear(q, s, z) "
        f"u = DequantizeLinear<axis=0>(w, r{', v' * channels}) m = Conv(x, u) g = QuantizeLinear(m, t, z) "
        "y = DequantizeLinear(g, t, z) }"
    )
    proto = _product(
        text,
        w=np.full((6, 8, 3, 3), 127, np.int8),
        r=np.full(6, 0.5, np.float32),
        t=np.float32(1000),
        **zeros,
    )
    q = np.full((1, 8, 5, 5), 255, np.uint8)
    after, _ = rewritten(UseUnsignedWeights(), proto)
    (y,) = run(after, {"q": q})
    exact = 72 * (255 - 100) * 0.1 * 127 * 0.5
    assert np.allclose(y, 1000 * round(exact / 1000))
    small = _product(text, w=np.full((6, 8, 3, 3), 64, np.int8), r=np.full(6, 0.5, np.float32), **zeros)
    refuses(UseUnsignedWeights(), small, "saturates")
    depthwise = _product(
        text.replace("Conv(", "Conv<group=8>("), w=np.full((8, 1, 3, 3), 127, np.int8),
        r=np.full(8, 0.5, np.float32), **({"v": np.zeros(8, np.int8)} if channels else {}),
    )  # fmt: skip
    refuses(UseUnsignedWeights(), depthwise, "depthwise")


def test_computed_weights_stay() -> None:
    proto = model(
        "agraph (uint8[N,4] x, uint8[4,3] w, uint8 z) => (int32[N,3] y) { y = MatMulInteger(x, w, z, z) }"
    )
    refuses(UseSignedWeights(), proto)


PRODUCT = (
    "agraph (uint8[N,40] q) => (y) { x = DequantizeLinear(q, s, z) u = DequantizeLinear<axis=1>(w, r, v) "
    "m = MatMul(x, u) g = QuantizeLinear(m, t, z) y = DequantizeLinear(g, t, z) }"
)


def _product(text: str = PRODUCT, **values: object) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    given = {
        "w": rng.integers(0, 256, (40, 30)).astype(np.uint8), "r": rng.random(30).astype(np.float32) + 0.1,
        "v": rng.integers(0, 256, 30).astype(np.uint8), "s": np.float32(0.1), "t": np.float32(70), "z": np.uint8(100),
    }  # fmt: skip
    return model(text, **(given | values))


@pytest.mark.skipif(saturates(), reason="products of bytes saturate on this processor")
@pytest.mark.parametrize(
    "text",
    [
        PRODUCT,
        PRODUCT.replace("(w, r, v)", "(w, r)"),
        "agraph (uint8[N,40] q) => (y) <uint8 k = {7}> { y = QLinearMatMul(q, s, z, w, s, k, t, z) }",
        "agraph (uint8[N,40] q) => (y) { y = MatMulInteger(q, w) }",
        "agraph (uint8[N,40] q) => (y) { y = MatMulInteger(q, w, z, v) }",
    ],
)
def test_products_with_signed_weights_are_equal(text: str) -> None:
    q = np.random.default_rng(1).choice(np.uint8([0, 255, 100, 7]), (9, 40))
    _equal(UseSignedWeights(), _product(text), {"q": q})


@pytest.mark.parametrize(
    "text",
    [
        PRODUCT.replace("uint8[N,40]", "int8[N,40]").replace("(q, s, z)", "(q, s)"),
        PRODUCT.replace("g = QuantizeLinear(m, t, z) y = DequantizeLinear(g, t, z)", "y = Relu(m)"),
        PRODUCT.replace("(y)", "(y, k)").replace("m = ", "k = Neg(u) m = "),
        PRODUCT.replace("MatMul(x, u)", "Add(x, u)").replace("N,40", "40,30"),
    ],
)
def test_weights_of_no_product_of_bytes_stay(text: str) -> None:
    refuses(UseSignedWeights(), _product(text))


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
@pytest.mark.parametrize("activation", ["Relu(d)", "Clip(d, k, h)", "Clip(d, k)"])
def test_activations_between_bytes_are_equal(kind: type, activation: str) -> None:
    """All bytes, at the limits of the zero points."""
    rule = RectifyBytes() if activation == "Relu(d)" else ClipBytes()
    info = np.iinfo(kind)
    text = (
        f"agraph ({np.dtype(kind).name}[256] p) => (q) "
        f"{{ d = DequantizeLinear(p, s, z) r = {activation} q = QuantizeLinear(r, t, v) }}"
    )
    p = np.arange(info.min, info.max + 1).astype(kind)
    for zero, other in itertools.product((info.min, 3, info.max), repeat=2):
        values = {
            "s": np.float32(0.3),
            "z": kind(zero),
            "t": np.float32(0.1),
            "v": kind(other),
            "k": np.float32(0),
        }
        proto = model(text, **values, h=np.float32(0.1 * (info.max - other)))
        _equal(rule, proto, {"p": p})


BETWEEN = "agraph (uint8[9] p) => (q) { d = DequantizeLinear(p, s, z) r = Clip(d, k, h) q = QuantizeLinear(r, t, z) }"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"h": np.float32(6)}, "range"),
        ({"k": np.float32(0.1)}, "least"),
        ({"s": np.float32(2e36)}, "scale"),
    ],
)
def test_other_clips_between_bytes_stay(changes: dict[str, object], reason: str) -> None:
    values = {
        "s": np.float32(0.3),
        "z": np.uint8(5),
        "t": np.float32(0.1),
        "k": np.float32(0),
        "h": np.float32(26),
    }
    applies(ClipBytes(), model(BETWEEN, **values))
    refuses(ClipBytes(), model(BETWEEN, **(values | changes)), reason)


MEAN = (
    "agraph (uint8[2,3,112,111] p) => (q) "
    "{ d = DequantizeLinear(p, s, z) m = ReduceMean(d, a) q = QuantizeLinear(m, t, z) }"
)


def test_means_of_many_bytes_are_equal() -> None:
    values = {"s": np.float32(0.3), "z": np.uint8(5), "t": np.float32(0.1), "a": np.int64([-1, 2])}
    p = np.random.default_rng(0).integers(0, 80, (2, 3, 112, 111)).astype(np.uint8)
    _equal(PoolBytes(), model(MEAN, **values), {"p": p})
    refuses(
        PoolBytes(), model(MEAN.replace("m = ReduceMean(d, a)", "m = ReduceMean<keepdims=0>(d, a)"), **values)
    )
    refuses(PoolBytes(), model(MEAN, **(values | {"a": np.int64([1, 2])})), "axes")


@pytest.mark.parametrize("attributes", ["axis=1", "axis=0, block_size=2"])
def test_many_missing_zero_points_are_one_expression(attributes: str) -> None:
    text = PRODUCT.replace("DequantizeLinear<axis=1>(w, r, v)", f"DequantizeLinear<{attributes}>(w, r)")
    w = np.random.default_rng(0).integers(0, 256, (40, 1300)).astype(np.uint8)
    scales = np.ones((20, 1300) if "block" in attributes else 1300, np.float32)
    graph = applies(UseSignedWeights(), _product(text, w=w, r=scales))
    assert all(graph.type(n.inputs[2]).dtype == DType.INT8 for n in graph.nodes() if n.inputs[0] == "w")


def test_scales_of_unknown_shapes_stay() -> None:
    text = PRODUCT.replace("(w, r, v)", "(w, p)")
    refuses(
        UseSignedWeights(),
        _product(text.replace("q)", "q, float[M] p)")),
        "a dimension is not a known number",
    )
    unknown = text.replace("q)", "q, float[30] o, int64[K] k)").replace("{ x", "{ p = Reshape(o, k) x")
    refuses(UseSignedWeights(), _product(unknown), "known")


def test_weights_on_the_left_of_a_product_stay() -> None:
    refuses(
        UseSignedWeights(), _product(PRODUCT.replace("MatMul(x, u)", "MatMul(u, x)").replace("N,40", "30,N"))
    )


HALF = np.float16(1000)


@pytest.mark.parametrize(
    ("rule", "text", "values"),
    [
        (RectifyBytes(), "Relu(d)", {"s": HALF, "t": HALF}),
        (ClipBytes(), "Clip(d, k)", {"s": HALF, "t": HALF, "k": np.float16(0)}),
        (ClipBytes(), "Clip(d, k, h)", {"t": np.float32(-0.1), "z": np.uint8(0), "h": np.float32(-100)}),
        (ClipBytes(), "Clip(d, k, h)", {"t": np.float32(0)}),
    ],
)
def test_scales_that_are_no_ordinary_numbers_stay(
    rule: AnyRule, text: str, values: dict[str, object]
) -> None:
    given = {
        "s": np.float32(0.3),
        "z": np.uint8(5),
        "t": np.float32(0.1),
        "k": np.float32(0),
        "h": np.float32(26),
    }
    refuses(rule, model(BETWEEN.replace("Clip(d, k, h)", text), **(given | values)), "no ordinary number")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (STEM.replace("DequantizeLinear(q, s, z)", "DequantizeLinear(q, big, z)"), {"big": np.float32(1e37)}),
        (STEM, {"r": np.full(8, 1e37, np.float32)}),
        (STEM.replace("(float[2,3,24,32] x", "(float[2,3,24,32] x, float b").replace("(q, s, z)", "(q, b, z)"), {}),
        (STEM.replace("QuantizeLinear(x, s, z)", "QuantizeLinear(x, s, f)").replace("(q, s, z)", "(q, s, f)"),
         {"f": np.int16(3)}),
    ],
)  # fmt: skip
def test_stems_that_are_not_of_ordinary_bytes_stay(text: str, values: dict[str, object]) -> None:
    refuses(ConvolveBlocks(), _stem(text, **values))
