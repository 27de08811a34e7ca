"""QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear in generated kernels, compared with ONNX Runtime and with
exact numbers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.rules.harness import model
from xrlflow.backends.library_files import library_path
from xrlflow.backends.onnxruntime import with_library
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.fusion.bytes import handle_bytes
from xrlflow.backends.tvm.kernels.byte_moves import transposition
from xrlflow.backends.tvm.library.code_generation import CodeGenerator, compile_region
from xrlflow.backends.tvm.library.hybrid import Hybrid, hybrid
from xrlflow.backends.tvm.lowering.importer import import_model
from xrlflow.backends.tvm.lowering.value_types import types_of
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.onnxio.regions import region_of
from xrlflow.verify import verify

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
LAYER = """
layer (KIND[1,24,9,7] q) => (KIND[1,20,9,7] y) {
  x = DequantizeLinear(q, s, z)
  wd = DequantizeLinear<axis = 0>(w, ws)
  c = Conv<pads = [1,1,1,1]>(x, wd, b)
  r = Relu(c)
  y = QuantizeLinear(r, t, u)
}"""


def layer(kind: str, bias: float = 0.0) -> onnx.ModelProto:
    dtype = np.dtype(kind)
    zero = 0 if kind == "int8" else 128
    return model(
        LAYER.replace("KIND", kind),
        s=np.float32(0.05), z=np.array(zero, dtype), t=np.float32(0.031), u=np.array(zero - 7, dtype),
        w=RNG.integers(-60, 60, (20, 24, 3, 3)).astype(np.int8), ws=np.linspace(1e-3, 2e-3, 20, dtype=np.float32),
        b=(RNG.standard_normal(20) + bias).astype(np.float32),
    )  # fmt: skip


def built(proto: onnx.ModelProto, path: Path) -> Hybrid:
    result = hybrid(proto, {}, detect())
    result.save(path)
    return result


def run(
    path: Path | bytes, feeds: dict[str, Array], kernels: bool = False, exact: bool = False
) -> list[Array]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    if kernels:
        options.register_custom_ops_library(str(library_path(str(path))))
    if exact:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(
        ort.InferenceSession(path if isinstance(path, bytes) else str(path), options).run(None, feeds)
    )


def same(proto: onnx.ModelProto, path: Path) -> bool:
    """Whether a file with its kernels is verified."""
    return verify(proto, path, session_options=with_library(None, str(library_path(str(path))))).verified


def numbers(kind: str, *shape: int) -> Array:
    limits = np.iinfo(kind)
    return RNG.integers(limits.min, limits.max + 1, shape).astype(kind)


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_a_layer_between_bytes_is_one_region(kind: str, tmp_path: Path) -> None:
    proto, path = layer(kind), tmp_path / "x.onnx"
    result = built(proto, path)
    assert [len(region.nodes) for region in result.regions] == [5]
    feeds = {"q": numbers(kind, 1, 24, 9, 7)}
    (y,), (expected,) = run(path, feeds, kernels=True), run(proto.SerializeToString(), feeds, exact=True)
    assert y.dtype == expected.dtype
    difference = np.abs(y.astype(int) - expected.astype(int))
    assert difference.max() <= 1  # at a tie
    assert (difference > 0).mean() < 0.01
    assert len(np.unique(y)) > 50


def test_a_region_ends_with_a_quantisation(tmp_path: Path) -> None:
    """So that verification can compare the bytes."""
    text = """
    net (float[1,16,8,8] x) => (float[1,16,8,8] y) {
      q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) c = Conv(d, w) r = Relu(c)
      q2 = QuantizeLinear(r, s, z) d2 = DequantizeLinear(q2, s, z) c2 = Conv(d2, w) y = Add(c2, r)
    }"""
    weights = (RNG.standard_normal((16, 16, 1, 1)) / 4).astype(np.float32)
    proto = model(text, s=np.float32(0.03), z=np.int8(0), w=weights)
    path = tmp_path / "x.onnx"
    result = built(proto, path)
    ends = [[proto.graph.node[i].op_type for i in region.nodes] for region in result.regions]
    assert ends == [
        ["DequantizeLinear", "Conv", "Relu", "QuantizeLinear"],
        ["DequantizeLinear", "Conv", "Add"],
    ]
    feeds = {"x": RNG.standard_normal((1, 16, 8, 8)).astype(np.float32)}
    (y,), (expected,) = run(path, feeds, kernels=True), run(proto.SerializeToString(), feeds, exact=True)
    assert np.abs(y - expected).max() < 0.1
    assert same(proto, path)


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_numbers_that_are_no_numbers_become_the_least_byte(kind: str, tmp_path: Path) -> None:
    """ONNX leaves them open; a conversion of NaN to an integer must not be undefined."""
    proto = model(
        f"g (float[64] x) => ({kind}[64] y) {{ a = Add(x, k) y = QuantizeLinear(a, s, z) }}",
        k=np.zeros(64, np.float32), s=np.float32(0.5), z=np.array(1, kind),
    )  # fmt: skip
    path = tmp_path / "x.onnx"
    built(proto, path)
    x = np.zeros(64, np.float32)
    x[:6] = np.nan, np.inf, -np.inf, 1e30, 0.25, 0.75  # the last two are ties
    (y,) = run(path, {"x": x}, kernels=True)
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    assert y[:7].tolist() == [low, high, low, high, 1, 3, 1]


@pytest.mark.parametrize(
    ("batch", "rows", "columns"), [(1, 16, 16), (2, 49, 20), (1, 17, 31), (3, 16, 40), (1, 300, 130)]
)
def test_bytes_are_transposed(batch: int, rows: int, columns: int) -> None:
    package = tvm()
    shape, result = (batch, rows, columns), (batch, columns, rows)
    function = transposition((batch, rows, columns), shape, result, "uint8").with_attr(
        "global_symbol", "main"
    )
    run_it = package.tirx.build(package.IRModule({"main": function}), detect().target())
    x, out = numbers("uint8", *shape), np.zeros(result, np.uint8)
    given, got = package.runtime.tensor(x), package.runtime.tensor(out)
    run_it["main"](given, got)
    assert np.array_equal(got.numpy(), x.transpose(0, 2, 1))


def main_of(proto: onnx.ModelProto) -> str:
    return str(handle_bytes(import_model(proto))["main"].script())


def test_sums_are_quantised_without_a_division() -> None:
    assert "R.divide" not in main_of(layer("int8"))
    pool = model(
        "g (float[1,4,8,8] x) => (int8[1,4,4,4] y) "
        "{ p = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x) y = QuantizeLinear(p, s, z) }",
        s=np.float32(0.3), z=np.int8(0),
    )  # fmt: skip
    assert "R.divide" in main_of(pool)  # a mean of bytes is often a tie
    tiny = layer("int8")
    (scale,) = (t for t in tiny.graph.initializer if t.name == "t")
    scale.CopyFrom(onnx.numpy_helper.from_array(np.float32(1e-40), "t"))
    assert "R.divide" in main_of(tiny)  # its inverse is infinite


def test_equal_kernels_of_regions_are_compiled_once(tmp_path: Path) -> None:
    """They have other weights."""
    text = """
    net (int8[1,16,8,8] q) => (int8[1,16,8,8] y) {
      d = DequantizeLinear(q, s, z) c = Conv(d, w) q2 = QuantizeLinear(c, s, z)
      d2 = DequantizeLinear(q2, s, z) c2 = Conv(d2, v) y = QuantizeLinear(c2, s, z)
    }"""
    w, v = ((RNG.standard_normal((16, 16, 1, 1)) / 4).astype(np.float32) for _ in range(2))
    proto = model(text, s=np.float32(0.03), z=np.int8(0), w=w, v=v)
    machine = detect()
    types = types_of(proto, {})
    regions = [region_of(proto.graph, nodes) for nodes in (range(3), range(3, 6))]
    compiled = [compile_region(proto, region, types, machine) for region in regions]
    with CodeGenerator(machine) as generator:
        for each in compiled:
            generator.add(each)
    assert set(generator.symbols[0].values()) == set(generator.symbols[1].values())
    assert all(symbol.startswith("region0_") for symbol in generator.symbols[1].values())
    path = tmp_path / "x.onnx"
    built(proto, path)
    feeds = {"q": numbers("int8", 1, 16, 8, 8)}
    (y,), (expected,) = run(path, feeds, kernels=True), run(proto.SerializeToString(), feeds, exact=True)
    assert np.abs(y.astype(int) - expected.astype(int)).max() <= 1


DYNAMIC = """
net (float[1,24,H,W] x) => (uint8[1,40,H,W] y, float s, uint8 z, float[1,40,H,W] d2) {
  q, sq, zq = DynamicQuantizeLinear(x)
  d = DequantizeLinear(q, one, zq)
  c = Conv<pads = [1,1,1,1]>(d, w)
  m = Mul(sq, ws) e = Mul(c, m) b = Add(e, bias) r = Relu(b)
  y, s, z = DynamicQuantizeLinear(r)
  d2 = DequantizeLinear(y, s, z)
}"""


@pytest.mark.parametrize(("high", "across"), [(30, 30), (5, 7)])
def test_a_layer_between_dynamic_quantisations(high: int, across: int, tmp_path: Path) -> None:
    """Range, scale and zero point are computed by the kernels, and the scales of bytes and weights are a step of the
    convolution's kernel."""
    proto = model(
        DYNAMIC.replace("H", str(high)).replace("W", str(across)),
        one=np.float32(1), ws=np.float32(0.01), w=RNG.integers(-60, 60, (40, 24, 3, 3)).astype(np.float32),
        bias=RNG.standard_normal((1, 40, 1, 1)).astype(np.float32),
    )  # fmt: skip
    path = tmp_path / "x.onnx"
    result = built(proto, path)
    ends = [proto.graph.node[region.nodes[-1]].op_type for region in result.regions]
    assert ends == ["DynamicQuantizeLinear"]
    assert [len(region.nodes) for region in result.regions] == [7]
    assert [each.algorithm for each in result.chosen] != []
    for scale in (1.0, 1e-3, 0.0):
        x = (scale * RNG.standard_normal((1, 24, high, across))).astype(np.float32)
        y, s, z, _ = run(path, {"x": x}, kernels=True)
        expected = run(proto.SerializeToString(), {"x": x}, exact=True)
        assert (y.dtype, s.shape, z.dtype, z) == (expected[0].dtype, (), expected[2].dtype, expected[2])
        assert np.isclose(s, expected[1], rtol=1e-5, atol=0)
        assert np.abs(y.astype(int) - expected[0].astype(int)).max() <= 1
    if high == 5:
        assert same(proto, path)


@pytest.mark.parametrize("shape", [(3, 5), (4, 8), (1, 33), (2, 3, 40), (7, 20_000), (1, 1)])
def test_bytes_of_equal_numbers_are_equal(shape: tuple[int, ...], tmp_path: Path) -> None:
    text = ",".join(map(str, shape))
    proto = model(
        f"g (float[{text}] x) => (uint8[{text}] y, float s, uint8 z) "
        "{ a = Neg(x) y, s, z = DynamicQuantizeLinear(a) }"
    )
    path = tmp_path / "x.onnx"
    assert built(proto, path).nodes == 2
    for low, high in [(-1, 1), (2, 3), (-7, -1), (0, 0), (-1e-30, 1e30)]:
        x = np.linspace(low, high, math.prod(shape)).astype(np.float32).reshape(shape)
        mine = run(path, {"x": x}, kernels=True)
        for a, b in zip(mine, run(proto.SerializeToString(), {"x": x}, exact=True), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert np.array_equal(a, b)


def test_a_range_that_is_not_finite_stays_that(tmp_path: Path) -> None:
    proto = model(
        "g (float[4,64] x) => (float[4,64] y) "
        "{ a = Neg(x) q, s, z = DynamicQuantizeLinear(a) d = DequantizeLinear(q, s, z) y = Neg(d) }"
    )
    path = tmp_path / "x.onnx"
    built(proto, path)
    for value in (math.nan, math.inf):
        feeds = {"x": np.full((4, 64), value, np.float32)}
        (y,), (expected,) = run(path, feeds, kernels=True), run(proto.SerializeToString(), feeds, exact=True)
        assert not np.isfinite(expected).any()
        assert np.array_equal(y, expected, equal_nan=True)


@pytest.mark.parametrize("single", ["1,1", "1,1,1", "1,1,1,1"])
def test_an_operand_of_one_element_may_have_more_dimensions(single: str, tmp_path: Path) -> None:
    ones = [1] * (single.count(",") - 1)
    proto = model(
        f"g (float[4,16] x, float[{single}] m) => (float{[*ones, 4, 16]} y) "
        "{ a = MatMul(x, w) t = Exp(m) u = Mul(a, t) y = Neg(u) }",
        w=RNG.standard_normal((16, 16)).astype(np.float32) / 4,
    )
    path = tmp_path / "x.onnx"
    built(proto, path)
    shape = [*map(int, single.split(","))]
    feeds = {"x": RNG.standard_normal((4, 16)).astype(np.float32), "m": np.full(shape, 0.3, np.float32)}
    (y,), (expected,) = run(path, feeds, kernels=True), run(proto.SerializeToString(), feeds, exact=True)
    assert y.shape == expected.shape
    assert np.allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "(uint8[4,9] q, float s, uint8 z) => (float[4,9] y) { d = DequantizeLinear(q, s, z) y = Relu(d) }",
            0,
        ),
        ("(uint8[4,9] q, float[1] s) => (float[4,9] y) { d = DequantizeLinear(q, s) y = Relu(d) }", 0),
        ("(uint8[4,9] q, uint8[1] z) => (float[4,9] y) { d = DequantizeLinear(q, s1, z) y = Neg(d) }", 0),
        ("(float[4,9] q, float s, int8 z) => (int8[4,9] y) { d = Relu(q) y = QuantizeLinear(d, s, z) }", 0),
        (
            "(uint8[4,9] q, float[4] s) => (float[4,9] y) "
            "{ d = DequantizeLinear<axis = 0>(q, s) e = Relu(d) y = Neg(e) }",
            1,
        ),
    ],
)
def test_parameters_may_be_computed(text: str, left: int, tmp_path: Path) -> None:
    constants = {"s1": np.float32([0.05])} if "s1" in text else {}
    proto, path = model(f"g {text}", **constants), tmp_path / "x.onnx"
    result = built(proto, path)
    assert result.total - result.nodes == left, result.remarks
    feeds: dict[str, Array] = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape, dtype = (
            [d.dim_value for d in kind.shape.dim],
            onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type),
        )
        feeds[value.name] = np.asarray(RNG.random(shape) * 8 + 0.01).astype(dtype)
    (y,), (expected,) = run(path, feeds, kernels=True), run(proto.SerializeToString(), feeds, exact=True)
    assert np.array_equal(y, expected)


def test_what_onnxruntime_fuses_with_an_integer_product_is_left_to_it() -> None:
    text = """
    net (float[4,32] x) => (float[4,16] y) {
      r = Relu(x) n = Neg(r)
      q, s, z = DynamicQuantizeLinear(n)
      p = MatMulInteger(q, w, z) c = Cast<to = 1>(p)
      m = Mul(s, ws) e = Mul(c, m) b = Add(e, bias) t = Tanh(b) y = Relu(t)
    }"""
    proto = model(
        text, w=numbers("int8", 32, 16), ws=np.float32(0.01), bias=RNG.standard_normal(16).astype(np.float32)
    )
    result = hybrid(proto, {}, detect())
    assert [[proto.graph.node[i].op_type for i in each.nodes] for each in result.regions] == [
        ["Relu", "Neg"],
        ["Tanh", "Relu"],
    ]
    del proto.graph.node[-4:]  # the sums of bytes, scaled, but no longer by one operator
    proto.graph.node[-1].op_type = "Add"
    proto.graph.node.append(onnx.helper.make_node("Relu", ["m"], ["v"]))
    del proto.graph.output[:]
    proto.graph.output.extend(
        [onnx.helper.make_tensor_value_info("c", 1, [4, 16]), onnx.helper.make_tensor_value_info("v", 1, [])]
    )
    result = hybrid(proto, {}, detect())
    assert ["Relu", "Neg", "DynamicQuantizeLinear"] in [
        [proto.graph.node[i].op_type for i in each.nodes] for each in result.regions
    ]


def test_a_scale_within_an_inverted_residual(tmp_path: Path) -> None:
    """A kernel for the entire block takes only constants for its steps."""
    text = """
    net (float[1,16,14,14] x, float m) => (float[1,16,14,14] y) {
      a = Conv(x, e) am = Mul(a, m) ar = Relu(am)
      d = Conv<pads = [1,1,1,1], group = 96>(ar, k) dm = Mul(d, m) dr = Relu(dm)
      y = Conv(dr, p)
    }"""
    shapes = {"e": (96, 16, 1, 1), "k": (96, 1, 3, 3), "p": (16, 96, 1, 1)}
    proto = model(text, **{n: RNG.standard_normal(s).astype(np.float32) / 4 for n, s in shapes.items()})
    path = tmp_path / "x.onnx"
    built(proto, path)
    feeds = {"x": RNG.standard_normal((1, 16, 14, 14)).astype(np.float32), "m": np.asarray(0.7, np.float32)}
    (y,), (expected,) = run(path, feeds, kernels=True), run(proto.SerializeToString(), feeds, exact=True)
    assert np.allclose(y, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("attributes", "known"),
    [
        ("kernel_shape=[3,3], strides=[2,2], ceil_mode=1", True),
        ("kernel_shape=[2,2], strides=[3,3], ceil_mode=1", False),
        ("kernel_shape=[3,3], strides=[2,2], pads=[0,0,1,1], ceil_mode=1", False),
        ("kernel_shape=[3,3], strides=[2,2], pads=[1,1,0,0], ceil_mode=1", True),
        ("kernel_shape=[2,2], strides=[3,3], dilations=[2,2], ceil_mode=1", True),
    ],
)
def test_sizes_behind_pools_are_known_where_onnx_infers_them_right(attributes: str, known: bool) -> None:
    proto = model(
        f"g (float[1,2,10,10] x) => (float[1,2,H,W] y) {{ a = MaxPool<{attributes}>(x) y = Relu(a) }}"
    )
    types = types_of(proto, {})
    assert types["y"].tensor_type.HasField("shape") is known
    if known:
        (y,) = run(proto.SerializeToString(), {"x": np.zeros((1, 2, 10, 10), np.float32)})
        assert tuple(dim.dim_value for dim in types["y"].tensor_type.shape.dim) == y.shape


@pytest.mark.parametrize(
    "text",
    [
        "(float[N,4] a, float[N,4] b) => (int8[N,4] y) { c = Sub(b, a) r = Relu(c) y = QuantizeLinear(r, s, z) }",
        "(float[N,4] a, float[N,4] b) => (int8[N,4] y, float[N,4] w) "
        "{ w = Sub(b, a) c = Neg(w) y = QuantizeLinear(c, s, z) }",
        "(float[N,4] a, float[N,4] b) => (float[N,4] y) "
        "{ q = QuantizeLinear(v, s, z) d = DequantizeLinear(q, s, z) c = Sub(b, a) y = MatMul(c, d) }",
    ],
)
def test_a_guard_passes_inputs_and_outputs_in_order(text: str, tmp_path: Path) -> None:
    proto = model(f"g {text}", s=np.float32(0.1), z=np.int8(0), v=np.eye(4, dtype=np.float32))
    used = {name for node in proto.graph.node for name in node.input}
    for tensor in [t for t in proto.graph.initializer if t.name not in used]:
        proto.graph.initializer.remove(tensor)
    path = tmp_path / "x.onnx"
    hybrid(proto, {"a": (3, 4), "b": (3, 4)}, detect()).save(path)
    feeds = {name: RNG.standard_normal((3, 4)).astype(np.float32) for name in "ab"}
    for y, expected in zip(
        run(path, feeds, kernels=True), run(proto.SerializeToString(), feeds, exact=True), strict=True
    ):
        assert np.abs(y.astype(float) - expected).max() <= 1e-5


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("(float[64] x) => (uint8[64] y) { a = Relu(x) y = QuantizeLinear(a, s1, z1) }", 0),
        ("(uint8[64] x) => (float[64] y) { a = DequantizeLinear(x, s1, z1) y = Relu(a) }", 0),
        (
            "(float[4,64] x) => (int8[4,64] y) { a = Relu(x) b = Neg(a) y = QuantizeLinear<output_dtype=3>(b, s) }",
            0,
        ),
        ("(float[4,64] x) => (uint8[4,64] y) { a = Relu(x) b = Neg(a) y = QuantizeLinear(b, none) }", 1),
        (
            "(uint8[8] x) => (float[8] y) { a = DequantizeLinear<axis=0, block_size=2>(x, s4) b = Relu(a) y = Neg(b) }",
            1,
        ),
        (
            "(uint8[32,20] x) => (float[32,20,2] y) "
            "{ c = Cast<to=1>(x) d = Mul(c, k) t = Transpose<perm=[1,2,0]>(d) "
            "u = Transpose<perm=[2,0,1]>(t) y = Relu(u) }",
            0,
        ),
    ],
)
def test_parameters_are_lowered_or_refused_by_node(text: str, left: int, tmp_path: Path) -> None:
    constants = {
        "s": np.float32(0.05), "s1": np.float32([0.05]), "z1": np.uint8([3]), "none": np.float32(0),
        "s4": np.float32([0.1, 0.2, 0.3, 0.4]), "k": np.float32([[[2]], [[3]]]),
    }  # fmt: skip
    proto = model(f"g {text}".replace("[32,20,2] y", "[2,32,20] y"), **constants)
    used = {name for node in proto.graph.node for name in node.input}
    for tensor in [t for t in proto.graph.initializer if t.name not in used]:
        proto.graph.initializer.remove(tensor)
    path = tmp_path / "x.onnx"
    result = built(proto, path)
    assert result.total - result.nodes == left, result.remarks
    shape = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    kind = "uint8" if proto.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8 else "float32"
    x = numbers("uint8", *shape) if kind == "uint8" else RNG.standard_normal(shape).astype(np.float32)
    (y,) = run(path, {"x": x}, kernels=True)
    (expected,) = run(proto.SerializeToString(), {"x": x}, exact=True)
    assert y.dtype == expected.dtype
    if "none" not in text:  # what a scale of 0 gives is not defined
        assert np.allclose(y, expected, atol=1e-5)
