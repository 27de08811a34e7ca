"""Products with packed weights and quantised tables: what the rules make of them, and where they must refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from rewrite_rules.packed_weights import (
    AddBiasInPackedMatMul,
    LookUpQuantisedRows,
    MergePackedMatMuls,
    UnpackWeightsOnce,
)
from rewrite_rules.slice_pushdown import PushSliceIntoPackedMatMul
from tests.rules.harness import applies, assert_equivalent, model, normal, refuses, rewritten, run
from xrlflow.ir import Graph
from xrlflow.onnxio import load
from xrlflow.rewrite import AnyRule, Library

RNG = np.random.default_rng(0)


def bytes_(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def weights(n: int, k: int, *, bits: int = 4, block: int = 32, name: str = "w") -> dict[str, np.ndarray]:
    """Packed weights, scales and zero points, under names that end alike."""
    blocks = -(-k // block)
    return {
        name: bytes_(n, blocks, block * bits // 8),
        f"s{name}": (RNG.random((n, blocks)) * 0.02).astype(np.float32),
        f"z{name}": bytes_(n, -(-blocks * bits // 8)),
    }


def product(
    out: str,
    n: int,
    k: int,
    *,
    bits: int = 4,
    block: int = 32,
    level: int = 0,
    name: str = "w",
    more: str = "",
) -> str:
    attrs = f"K={k}, N={n}, bits={bits}, block_size={block}, accuracy_level={level}"
    return f"{out} = com.microsoft.MatMulNBits<{attrs}>(x, {name}, s{name}, z{name}{more})"


def two(
    n: int, m: int, k: int, rows: int, *, level: int = 0, second: Mapping[str, int] = {}
) -> onnx.ModelProto:
    """Two products of x[rows,k], with n and m columns; `second`: how the second one is packed otherwise."""
    packing = {key: second[key] for key in ("bits", "block") if key in second}
    source = (
        f"agraph (float[{rows},{k}] x) => (y, v) {{ {product('y', n, k, level=level)} "
        f"{product('v', m, k, name='u', **{'level': level, **second})} }}"
    )
    return model(source, **weights(n, k), **weights(m, k, name="u", **packing))


def optimised(proto: onnx.ModelProto, feeds: dict[str, np.ndarray], threads: int) -> list[np.ndarray]:
    """The outputs in ONNX Runtime with all its optimisations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def operators(graph: Graph) -> list[str]:
    return sorted(n.op.rpartition("::")[2] for n in graph.nodes() if not n.const)


# Several products


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 16, 128])
@pytest.mark.parametrize(("n", "m", "k"), [(16, 48, 64), (4, 12, 100), (96, 32, 320)])
@pytest.mark.parametrize("level", [0, 4])
def test_merged_products_are_equal_bit_by_bit(
    level: int, n: int, m: int, k: int, rows: int, threads: int
) -> None:
    proto = two(n, m, k, rows, level=level)
    after, graph = rewritten(MergePackedMatMuls(), proto)
    assert operators(graph) == ["MatMulNBits", "Split"]
    feeds = {"x": normal(rows, k)}
    for a, b in zip(optimised(proto, feeds, threads), optimised(after, feeds, threads), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_missing_bias_is_zero() -> None:
    k = 64
    source = f"""agraph (float[2,{k}] x) => (y, v, t) {{
      {product("y", 8, k, more=", , b")} {product("v", 16, k, name="u")}
      {product("t", 4, k, name="q", more=", , d")} }}"""
    packed = {**weights(8, k), **weights(16, k, name="u"), **weights(4, k, name="q")}
    proto = model(source, **packed, b=normal(8), d=normal(4))
    assert operators(applies(MergePackedMatMuls(), proto)) == ["MatMulNBits", "Split"]


@pytest.mark.parametrize("second", [{"block": 16}, {"bits": 8}, {"level": 4}])
def test_products_that_are_packed_otherwise_stay_apart(second: dict[str, int]) -> None:
    _nothing(MergePackedMatMuls(), two(8, 16, 64, 2, second=second))


def test_products_with_and_without_zero_points_stay_apart() -> None:
    proto = two(8, 16, 64, 2)
    del proto.graph.node[1].input[3:]
    _nothing(MergePackedMatMuls(), proto)


def test_products_with_groups_stay_apart() -> None:
    proto = two(8, 16, 64, 2)
    groups = onnx.numpy_helper.from_array(RNG.integers(0, 2, 64).astype(np.int32), "g")
    proto.graph.initializer.append(groups)
    proto.graph.node[1].input.append("g")
    _nothing(MergePackedMatMuls(), proto)


def test_products_with_computed_weights_stay_apart() -> None:
    products = product("y", 8, 64) + " " + product("v", 8, 64, name="u")
    source = f"agraph (float[2,64] x, uint8[8,2,16] w) => (y, v) {{ {products} }}"
    first = weights(8, 64)
    del first["w"]
    _nothing(MergePackedMatMuls(), model(source, **first, **weights(8, 64, name="u")))


def test_groups_of_four_columns_are_of_one_product() -> None:
    refuses(MergePackedMatMuls(), two(6, 10, 64, 2), "four columns")


def _nothing(rule: AnyRule, proto: onnx.ModelProto) -> None:
    with pytest.raises(AssertionError, match="does not apply"):
        rewritten(rule, proto)


# A bias


def test_a_bias_becomes_an_input() -> None:
    proto = model(
        f"agraph (float[2,64] x) => (y) {{ {product('p', 8, 64)} y = Add(p, b) }}",
        **weights(8, 64),
        b=normal(8),
    )
    assert operators(applies(AddBiasInPackedMatMul(), proto)) == ["MatMulNBits"]


@pytest.mark.parametrize("shape", [(1,), (2, 8), (1, 8)])
def test_other_sums_stay(shape: tuple[int, ...]) -> None:
    source = f"agraph (float[2,64] x) => (y) {{ {product('p', 8, 64)} y = Add(p, b) }}"
    refuses(
        AddBiasInPackedMatMul(), model(source, **weights(8, 64), b=normal(*shape)), "one number per column"
    )


def test_a_product_that_others_read_keeps_its_sum() -> None:
    source = f"agraph (float[2,64] x) => (y, p) {{ {product('p', 8, 64)} y = Add(p, b) }}"
    _nothing(AddBiasInPackedMatMul(), model(source, **weights(8, 64), b=normal(8)))


# Cuts


def test_rows_that_nobody_reads_are_not_computed() -> None:
    source = f"agraph (float[N,5,64] x) => (y) {{ {product('p', 8, 64)} y = Gather<axis=1>(p, i) }}"
    graph = applies(PushSliceIntoPackedMatMul(), model(source, **weights(8, 64), i=np.int64(4)))
    (node,) = (n for n in graph.nodes() if n.op.endswith("NBits"))
    assert node.types[0].shape is not None
    assert node.types[0].shape[1:] == (1, 8)


def test_columns_are_not_cut() -> None:
    source = f"agraph (float[5,64] x) => (y) {{ {product('p', 8, 64)} y = Slice(p, i, j, i) }}"
    proto = model(source, **weights(8, 64), i=np.int64([1]), j=np.int64([3]))
    refuses(PushSliceIntoPackedMatMul(), proto, "it cuts the columns")


# Unpacked weights


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "block"), [(8, 64, 32), (7, 100, 16), (33, 200, 128)])
def test_unpacked_weights_are_the_same(n: int, k: int, block: int, bits: int) -> None:
    source = f"agraph (float[16,{k}] x) => (y) {{ {product('y', n, k, bits=bits, block=block)} }}"
    proto = model(source, **weights(n, k, bits=bits, block=block))
    assert operators(applies(UnpackWeightsOnce(), proto)) == ["MatMul"]
    after, _ = rewritten(UnpackWeightsOnce(), proto)
    columns = np.eye(k, dtype=np.float32)[:16]
    np.testing.assert_allclose(
        run(proto, {"x": columns})[0], run(after, {"x": columns})[0], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("rows", "level", "reason"), [(1, 0, "the product has one row"), (16, 4, "products of bytes are faster")]
)
def test_weights_stay_packed(rows: int, level: int, reason: str) -> None:
    source = f"agraph (float[{rows},64] x) => (y) {{ {product('y', 8, 64, level=level)} }}"
    refuses(UnpackWeightsOnce(), model(source, **weights(8, 64)), reason)


def test_scattered_blocks_stay_packed() -> None:
    source = f"agraph (float[4,64] x) => (y) {{ {product('y', 8, 64, more=', g')} }}"
    groups = RNG.integers(0, 2, 64).astype(np.int32)
    refuses(UnpackWeightsOnce(), model(source, **weights(8, 64), g=groups), "scattered")


def test_packed_weights_stay_packed_without_the_assumption() -> None:
    assert not Library([UnpackWeightsOnce()], backend="onnxruntime").rules
    assert Library([UnpackWeightsOnce()], backend="onnxruntime", assuming=("memory",)).rules


def test_the_file_keeps_packed_weights() -> None:
    n, k = 256, 512
    proto = model(f"agraph (float[16,{k}] x) => (y) {{ {product('y', n, k)} }}", **weights(n, k))
    after, _ = rewritten(UnpackWeightsOnce(), proto)
    assert after.ByteSize() < 1.2 * proto.ByteSize()


# Tables


def table(kind: Any, scale: tuple[int, ...], zero: bool, axis: int, block: int = 0) -> onnx.ModelProto:
    low, high = (0, 16) if kind is ml_dtypes.uint4 else (-8, 8) if kind is ml_dtypes.int4 else (0, 128)
    extra = f", block_size={block}" if block else ""
    inputs = "w, s, z" if zero else "w, s"
    step = f"t = DequantizeLinear<axis={axis}{extra}>({inputs})"
    source = f"agraph (int64[A,2] i) => (y) {{ {step} y = Gather(t, i) }}"
    parameters = {
        "w": RNG.integers(low, high, (8, 6)).astype(kind),
        "s": RNG.random(scale).astype(np.float32),
    }
    zeros = {"z": RNG.integers(low, high, scale).astype(kind)} if zero else {}
    return model(source, **parameters, **zeros)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("scale", "axis", "block"), [((), 1, 0), ((6,), 1, 0), ((8,), 0, 0), ((8, 3), 1, 2), ((8, 2), -1, 4)]
)
def test_rows_of_tables_are_dequantised_alone(
    kind: Any, zero: bool, scale: tuple[int, ...], axis: int, block: int
) -> None:
    proto = table(kind, scale, zero, axis, block)
    after, graph = rewritten(LookUpQuantisedRows(), proto)
    for node in graph.nodes():
        for type in node.types:
            assert node.const or type.shape is None or type.shape[:1] != (8,), f"{node.op} computes the table"
    feeds = {"i": np.array([[0, 7], [3, -1], [5, 5]], np.int64)}
    for a, b in zip(run(proto, feeds), run(after, feeds), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_block_of_several_rows_stays() -> None:
    refuses(LookUpQuantisedRows(), table(np.int8, (4, 6), False, 0, 2), "several rows")


def test_blocks_of_a_list_stay() -> None:
    text = (
        "agraph (int64[5] i) => (y) <int8[4] w = {1,2,3,4}, float[2] s = {0.1,0.2}> "
        "{ t = DequantizeLinear<axis=0, block_size=2>(w, s) y = Gather(t, i) }"
    )
    refuses(LookUpQuantisedRows(), model(text), "several rows")


def test_a_table_that_others_read_stays() -> None:
    proto = table(np.int8, (6,), False, 1)
    proto.graph.output.append(onnx.helper.make_empty_tensor_value_info("t"))
    _nothing(LookUpQuantisedRows(), proto)


# Types


def test_what_is_behind_a_product_has_a_type() -> None:
    proto = model(
        f"agraph (float[N,5,64] x) => (y) {{ {product('p', 8, 64)} r = Relu(p) y = Neg(r) }}",
        **weights(8, 64),
    )
    graph = load(proto).graph
    assert [str(graph.type(v)) for v in graph.outputs] == ["float[N,5,8]"]
    assert_equivalent(proto, proto, {"x": normal(2, 5, 64)})


def test_products_of_an_operand_of_unknown_type_stay() -> None:
    text = (
        "agraph (float[4,16] i) => (a, b) <float[4] s = {1,2,3,4}> "
        "{ x = com.microsoft.NobodyKnowsThis(i) "
        "a = com.microsoft.MatMulNBits<K=16, N=4, bits=4, block_size=16>(x, v, s) "
        "b = com.microsoft.MatMulNBits<K=16, N=4, bits=4, block_size=16>(x, v, s, , , s) }"
    )
    refuses(MergePackedMatMuls(), model(text, v=np.arange(32, dtype=np.uint8).reshape(4, 1, 8)))
