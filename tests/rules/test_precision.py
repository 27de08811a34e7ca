"""Operators of float16 that are computed in float32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from rewrite_rules.precision import ComputeInFloat32, ComputeRegionInFloat32
from tests.rules.harness import alone, applies, model, refuses, rewritten, run
from xrlflow.ir import DType, Node, Value
from xrlflow.onnxio import load
from xrlflow.rewrite import AnyRule, Reader, RewriteState

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
    after, graph = rewritten(ONE, model(source))
    assert sorted(n.op for n in graph.nodes()) == ["Cast", "Cast", "Cast", "Cast", "Exp", "Less"]
    z, y, _ = run(after, {"a": np.float32([[0.1, 1.3, 2.7, -3.1]])})
    np.testing.assert_array_equal(z, y)  # all who read a number read the same one
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
        "{ a = Exp(x) c = Neg(b) y = Add(a, c) p = Hardmax(y) q = Abs(p) z = Sqrt(q) }"
    )
    state = RewriteState.start(load(model(source)).graph, alone(REGION))
    assert len(list(state.candidates)) == 1  # Hardmax, which nobody may compute in float32, reads y


def test_many_beginnings_take_no_time() -> None:
    """Each of the first nodes looked at the whole region: 400 of them took minutes."""
    count = 300
    body = " ".join(f"e{i} = Exp(x{i})" for i in range(count))
    sums = " ".join(f"s{i + 1} = Add(s{i}, e{i + 1})" for i in range(count - 1))
    inputs = ", ".join(f"float16[4] x{i}" for i in range(count))
    graph = load(
        model(f"agraph ({inputs}) => (y) {{ {body} s0 = Neg(e0) {sums} y = Neg(s{count - 1}) }}")
    ).graph
    steps = 0

    class Counting(Reader):
        def users(self, value: Value) -> list[Node]:
            nonlocal steps
            steps += 1
            return super().users(value)

    regions = [REGION.find(Counting(graph, n.id), n) for n in graph.nodes()]
    assert len([r for r in regions if r]) == 1
    assert steps < 100 * count


# Products of these numbers round up to integers, to 1, and to infinity.
FACTORS = np.float16([[1.4990234375, 0.99951171875, 1.8798828125, 300.0]])
TIMES = np.float16([[2.001953125, 1.0009765625, 1.0634765625, 300.0]])


@pytest.mark.parametrize("moved", ["t = Transpose(a)", "t = Identity(a)", "t = Relu(a)"])
@pytest.mark.parametrize(
    "end",
    [
        "f = Floor(t) y = Sub(t, f)",
        "g = Clip(t, zero, one) d = Sub(one, g) y = Sqrt(d)",
        "g = Clip(t, zero, one) y = Acos(g)",
        "y = IsInf(t)",
        "g = Cast<to=1>(t) y = IsInf(g)",
        "g = Cast<to=1>(t) y = Floor(g)",
        "g = Cast<to=1>(t) h = Relu(g) y = Cast<to=7>(h)",
        "y = Cast<to=7>(t)",
        "c = Less(t, three) z = Sub(t, t) y = Where(c, z, t)",
        "y, i = TopK<axis=1>(t, k)",
        "y = ArgMax<axis=1>(t)",
    ],
)
@pytest.mark.parametrize("rule", [ONE, REGION], ids=["one", "region"])
def test_what_jumps_sees_rounded_numbers(rule: AnyRule, end: str, moved: str) -> None:
    """What follows a rounding is what follows it where each operator rounds. After a single step, ONNX Runtime may
    leave out roundings as it does in the original.
    """
    source = f"agraph (float16[1,4] x, float16[1,4] w) => (y) {{ m = Mul(x, w) a = Abs(m) {moved} {end} }}"
    consts = {"zero": np.float16(0), "one": np.float16(1), "three": np.float16(3), "k": np.array([1])}
    proto = model(source, **{name: array for name, array in consts.items() if name in end})
    feeds = {"x": FACTORS, "w": TIMES}
    with np.errstate(all="ignore"):
        expected = ReferenceEvaluator(proto).run(None, feeds)[0]
    after, _ = rewritten(rule, proto)
    found = run(after, feeds)[0]
    if rule is ONE and not np.array_equal(found, expected):
        expected = run(proto, feeds)[0]
    np.testing.assert_array_equal(found, expected)


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
