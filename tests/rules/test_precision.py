"""Operators of float16 that are computed in float32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from rewrite_rules.precision import ComputeInFloat32, ComputeRegionInFloat32
from tests.rules.harness import alone, applies, model, refuses, rewritten, run
from xrlflow.ir import DType
from xrlflow.onnxio import load
from xrlflow.rewrite import RewriteState

ONE, REGION = ComputeInFloat32(), ComputeRegionInFloat32()


def test_an_operator_gets_a_border_of_casts() -> None:
    source = "agraph (float16[N,4] x, float16[4] b) => (float16[N,4] y) { y = Add(x, b) }"
    applies(ONE, model(source), ops=["Add", "Cast", "Cast", "Cast"])


def test_casts_next_to_float32_vanish() -> None:
    source = (
        "agraph (float[N,4] a, float16[N,4] b) => (float[N,4] z) "
        "{ x = Cast<to=10>(a) y = Mul(x, b) z = Cast<to=1>(y) }"
    )
    applies(ONE, model(source), ops=["Cast", "Mul"])


def test_other_readers_see_float16() -> None:
    source = (
        "agraph (float[N,4] a) => (float[N,4] z, float16[N,4] y, bool[N,4] p) "
        "{ x = Cast<to=10>(a) p = Less(x, y) y = Exp(x) z = Cast<to=1>(y) }"
    )
    graph = applies(ONE, model(source), ops=["Cast", "Cast", "Exp", "Less"])
    less = next(n for n in graph.nodes() if n.op == "Less")
    assert {graph.type(v).dtype for v in less.inputs} == {DType.FLOAT16}


def test_constants_stay_float16() -> None:
    source = "agraph (float16[N,64] x) => (float16[N,64] z) { y = MatMul(x, w) z = Relu(y) }"
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
    proto = model(source, w=weights)
    after, _ = rewritten(REGION, proto)
    assert [i.data_type for i in after.graph.initializer] == [onnx.TensorProto.FLOAT16]
    assert after.ByteSize() < 1.1 * proto.ByteSize()
    applies(REGION, proto, ops=["Cast", "Cast", "MatMul", "Relu"])


@pytest.mark.parametrize(
    "op", ["Softmax", "Gelu", "Transpose", "Concat", "Split", "Where", "LayerNormalization"]
)
def test_a_region_has_casts_at_its_border_alone(op: str) -> None:
    calls = {
        "Where": "c = Where(m, a, b)",
        "Concat": "c = Concat<axis=0>(a, b)",
        "Split": "c, d = Split<axis=1, num_outputs=2>(a)",
        "LayerNormalization": "c = LayerNormalization(a, s)",
    }
    source = (
        "agraph (float16[3,4] x, float16[3,4] b, bool[3,4] m, float16[4] s) => (y) "
        f"{{ a = Exp(x) {calls.get(op, f'c = {op}(a)')} y = Neg(c) }}"
    )
    _, graph = rewritten(REGION, model(source))
    kept = [n.op for n in graph.nodes() if n.op != "Cast"]
    assert sorted(kept) == sorted(["Exp", op, "Neg"])
    assert all(
        graph.type(v).dtype != DType.FLOAT16 for n in graph.nodes() if n.op != "Cast" for v in n.outputs
    )
    applies(REGION, model(source))


def test_each_region_is_found_once() -> None:
    source = (
        "agraph (float16[N,4] x, float16[N,4] b) => (float16[N,4] y, float16[N,4] z) "
        "{ a = Exp(x) c = Neg(b) y = Add(a, c) p = Floor(y) q = Abs(p) z = Sqrt(q) }"
    )
    state = RewriteState.start(load(model(source)).graph, alone(REGION))
    assert len(list(state.candidates)) == 2  # Floor stays between them


@pytest.mark.parametrize(
    "node",
    ["y = Floor(x)", "y = ArgMax<axis=1>(x)", "y, i = TopK<axis=1>(x, k)", "y = Less(x, x)", "y = IsInf(t)"],
)
def test_what_sees_a_rounding_stays(node: str) -> None:
    source = f"agraph (float16[2,4] x, float[2,4] t) => (y) {{ {node} }}"
    refuses(ONE, model(source, k=np.array([2])))


def test_rows_of_a_table_are_taken_from_float16() -> None:
    source = "agraph (int64[N] i) => (float16[N,4] z) { y = Gather(w, i) z = Exp(y) }"
    table = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float16)
    graph = applies(ONE, model(source, w=table), ops=["Cast", "Cast", "Exp", "Gather"])
    gather = next(n for n in graph.nodes() if n.op == "Gather")
    assert gather.types[0].dtype == DType.FLOAT16


def test_float32_is_left_alone() -> None:
    for dtype in ("float", "double", "bfloat16"):
        refuses(ONE, model(f"agraph ({dtype}[N,4] x) => ({dtype}[N,4] y) {{ y = Exp(x) }}"))


def test_a_number_that_overflows_in_between_stays_a_number() -> None:
    source = (
        "agraph (float16[N,4] x) => (float16[4,M] z) "
        "{ a = Mul(x, k) c = Concat<axis=0>(a, x) t = Transpose(c) z = Mul(t, r) }"
    )
    proto = model(source, k=np.float16(300), r=np.float16(0.001))
    feeds = {"x": np.full((1, 4), 300, np.float16)}
    after, _ = rewritten(REGION, proto)
    assert np.isinf(run(proto, feeds)[0][:, 0]).all()
    np.testing.assert_allclose(run(after, feeds)[0][:, 0].astype(np.float64), 90, rtol=1e-3)


def test_a_cast_that_says_saturate_for_nothing() -> None:
    """ONNX Runtime refuses it, unless the Cast vanishes with one of its own: import leaves the attribute out."""
    source = "agraph (int64[N,4] n) => (float16[N,4] y) { x = Cast<to=10, saturate=0>(n) y = Mul(x, x) }"
    graph = applies(ONE, model(source), ops=["Cast", "Cast", "Cast", "Mul"])
    assert not any("saturate" in n.attrs for n in graph.nodes())


def test_what_a_body_reads_stays_float16() -> None:
    """ONNX Runtime drops a Cast and its inverse, also where a body of an If is all that reads the result."""
    source = (
        "agraph (float16[N,3] x, bool c) => (float16[M,3] y) { v = Relu(x) y = If (c) <"
        "then_branch = t () => (float16[N,3] q) { q = Identity(v) },"
        "else_branch = e () => (float16[N,3] p) { p = Neg(v) }> }"
    )
    refuses(ONE, model(source))
    refuses(REGION, model(source))
