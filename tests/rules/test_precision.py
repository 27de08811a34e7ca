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


def test_all_readers_see_the_same_number() -> None:
    source = (
        "agraph (float[N,4] a) => (float[N,4] z, float16[N,4] y, float[N,4] v) "
        "{ x = Cast<to=10>(a) y = Exp(x) z = Cast<to=1>(y) w = Neg(y) v = Cast<to=1>(w) }"
    )
    after, _ = rewritten(REGION, model(source))
    z, y, v = run(after, {"a": np.float32([[0.1, 1.3, 2.7, -3.1]])})
    np.testing.assert_array_equal(z, y)
    np.testing.assert_array_equal(v, -y)


def test_in_front_of_what_jumps_a_single_step_is_not_made() -> None:
    """ONNX Runtime would leave out the Cast to float16 in front of Floor, which it computes in float32."""
    source = "agraph (float16[N,4] x) => (float16[M,4] y) { a = Transpose(x) y = Floor(a) }"
    state = RewriteState.start(load(model(source)).graph, alone(ONE))
    assert [m.nodes[0].op for m in state.candidates] == ["Floor"]


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


def test_no_number_becomes_nan() -> None:
    source = (
        "agraph (float16[1,5] x, float16[1,5] w) => (y) { m = Mul(x, w) a = Abs(m) t = Transpose(a) "
        "g = Clip(t, zero, one) d = Sub(one, g) y = Sqrt(d) }"
    )
    after, _ = rewritten(REGION, model(source, zero=np.float16(0), one=np.float16(1)))
    found = run(after, {"x": FACTORS, "w": TIMES})[0]
    exact = np.sqrt(1 - np.clip(FACTORS.astype(float) * TIMES.astype(float), 0, 1)).T
    np.testing.assert_allclose(found, exact, rtol=1e-2)


def test_all_who_read_a_cast_see_the_same_number() -> None:
    source = (
        "agraph (float[1,2] a) => (float[1,2] z, float[1,2] y) "
        "{ x = Cast<to=10>(a) z = Cast<to=1>(x) v = Sub(x, one) w = Mul(v, k) y = Cast<to=1>(w) }"
    )
    after, _ = rewritten(REGION, model(source, one=np.float16(1), k=np.float16(1000)))
    z, y = run(after, {"a": np.float32([[1.0002, 1.0004]])})
    assert z.tolist() == [[1, 1]]
    assert y.tolist() == [[0, 0]]


def test_many_beginnings_take_no_time() -> None:
    """Each of the first nodes looked at the whole region: 400 of them took minutes."""
    count = 300
    body = " ".join(f"t{i} = Transpose(x{i}) e{i} = Exp(t{i})" for i in range(count))
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


# Products of these numbers round up to 3, 2, 5 and 1, and to infinity.
FACTORS = np.float16([[1.001953125, 1.0009765625, 1.0029296875, 1.0009765625, 300]])
TIMES = np.float16([[2.994140625, 1.998046875, 4.984375, 0.9990234375, 300]])


# Around two operators that move elements, ONNX Runtime leaves out no rounding; around a single one it does.
@pytest.mark.parametrize(
    "moved", ["s = Concat<axis=0>(a, a) t = Slice(s, low, high)", "t = Transpose(a)", "t = Relu(a)"]
)
@pytest.mark.parametrize(
    "end",
    [
        "f = Floor(t) y = Sub(t, f)",
        "g = Clip(t, zero, one) y = Acos(g)",
        "y = IsInf(t)",
        "g = Cast<to=1>(t) y = IsInf(g)",
        "g = Cast<to=1>(t) y = Floor(g)",
        "g = Cast<to=1>(t) h = Relu(g) y = Cast<to=7>(h)",
        "y = Cast<to=7>(t)",
        "c = Less(t, three) z = Sub(t, t) y = Where(c, z, t)",
        "y, i = TopK<axis=1>(t, k)",
        "y = ArgMax<axis=1>(t)",
        "f = Floor(t) y = If(b) <then_branch = u () => (q) { q = Identity(f) }, "
        "else_branch = v () => (q) { q = Neg(f) }>",
        "f = Floor(t) y = Shrink<lambd=0.0>(f)",
        "u = Abs(t) f = Floor(u) y = Shrink<lambd=0.0>(f)",
        "r = Reshape(t, flat) p, y = MaxPool<kernel_shape=[2]>(r)",
        "e = Abs(t) f = Sqrt(e) g = Abs(f) h = Sign(g) y = Hardmax(h)",
    ],
)
@pytest.mark.parametrize("rule", [ONE, REGION], ids=["one", "region"])
def test_what_jumps_sees_rounded_numbers(rule: AnyRule, end: str, moved: str) -> None:
    """What follows a rounding is what follows it where each operator rounds, or where ONNX Runtime leaves out the same
    roundings in the original.
    """
    source = (
        f"agraph (float16[1,5] x, float16[1,5] w, bool b) => (y) {{ m = Mul(x, w) a = Abs(m) {moved} {end} }}"
    )
    half, ints = np.float16, np.array
    consts = {"zero": half(0), "one": half(1), "three": half(3), "k": ints([1]), "flat": ints([1, 1, 5])}
    consts |= {"low": ints([0, 0]), "high": ints([1, 5])}
    proto = model(source, **{name: array for name, array in consts.items() if name in end + moved})
    feeds = {"x": FACTORS, "w": TIMES, "b": np.array(True)}
    with np.errstate(all="ignore"):
        expected = ReferenceEvaluator(proto).run(None, feeds)[0]
    after, _ = rewritten(rule, proto)
    found = run(after, feeds)[0]
    if not np.array_equal(found, expected, equal_nan=True):
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
