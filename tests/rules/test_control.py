"""Control flow: every rule by itself, and models with loops and branches from end to end."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from rewrite_rules import control
from rewrite_rules.bodies import _sizes, made_outside
from rewrite_rules.control import (
    DropFailingBranch,
    HoistOutOfLoop,
    HoistOutOfScan,
    InlineConstantIf,
    MoveInvariantsOutOfLoop,
    UnrollLoop,
)
from tests.rules.harness import applies, assert_equivalent, model, random_feeds, refuses, rewritten, run
from xrlflow import optimize
from xrlflow.ir import Body, DType, Graph, Node, TensorType
from xrlflow.onnxio import load
from xrlflow.rewrite import AnyRule, Library, declared_in
from xrlflow.search import simplify, steps_of


def only(graph: Graph, op: str) -> Node:
    found = [n for n in graph.nodes() if n.op == op]
    assert len(found) == 1
    return found[0]


def inside(graph: Graph, op: str, name: str = "body") -> list[str]:
    """The operators that run in the body of the only node of an operator, sorted."""
    body = only(graph, op).attrs[name]
    assert isinstance(body, Body)
    return sorted(n.op for n in body.graph.nodes() if not n.const and n.op != "Identity")


def outside(graph: Graph) -> list[str]:
    return sorted(n.op for n in graph.nodes() if not n.const)


@pytest.mark.parametrize("rule", declared_in(control), ids=lambda r: r.name)
def test_there_are_examples_enough(rule: AnyRule) -> None:
    assert len(rule.examples) >= 8


# --- If ---


def branches(condition: str, then: str = "p = Relu(x)", inputs: str = "float[3] x") -> onnx.ModelProto:
    return model(
        f"agraph ({inputs}) => (float[3] y) {{ {condition}"
        f" y = If (c) <then_branch = a () => (float[3] p) {{ {then} }},"
        " else_branch = b () => (float[3] q) { q = Neg(x) }> }"
    )


def test_the_taken_branch_is_inlined() -> None:
    applies(InlineConstantIf(), branches("c = Constant<value = bool {1}>()"), ops=["Relu"])
    applies(InlineConstantIf(), branches("c = Constant<value = bool {0}>()"), ops=["Neg"])


def test_a_branch_may_be_a_captured_value_or_a_constant() -> None:
    yes = "c = Constant<value = bool {1}>()"
    applies(InlineConstantIf(), branches(yes, "p = Identity(x)"), ops=["Identity"])
    constant = "p = Constant<value = float[3] {1, 2, 3}>()"
    assert outside(applies(InlineConstantIf(), branches(yes, constant))) == []


def test_the_constants_of_a_branch_keep_their_names() -> None:
    proto = branches("c = Constant<value = bool {1}>()", "p = Mul(x, weight)")
    branch = proto.graph.node[-1].attribute[0].g
    branch.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "weight"))
    after, _ = rewritten(InlineConstantIf(), proto)
    assert [i.name for i in after.graph.initializer] == ["weight"]


def test_a_condition_that_is_computed_stays() -> None:
    refuses(InlineConstantIf(), branches("", inputs="bool c, float[3] x"))


def test_a_random_branch_stays() -> None:
    yes = "c = Constant<value = bool {1}>()"
    refuses(InlineConstantIf(), branches(yes, "p = RandomNormal<shape = [3]>()"), "random")


def test_what_follows_a_branch_learns_its_shape() -> None:
    """The branches differ in rank, so that nothing is known of the result until one is chosen."""
    proto = model(
        "agraph (float[1,3] x, float[3] z) => (int64[N] s, float[M] y) { c = Constant<value = bool {1}>()"
        " d = If (c) <then_branch = a () => (float[A] p) { zero = Constant<value_ints = [0]>() p = Squeeze(x, zero) },"
        " else_branch = b () => (float[A,B] q) { q = Identity(x) }> s = Shape(d) y = Add(d, z) }"
    )
    graph = applies(InlineConstantIf(), proto)
    assert outside(graph) == ["Add", "Squeeze"]
    assert graph.type(graph.outputs[1]).shape == (3,)


def squeezed(after: str, condition: str = "") -> onnx.ModelProto:
    """As exporters write `x.squeeze(1)` of a dimension that is not known."""
    return model(
        "agraph (float[2,N,4] x, float[2,3] z) => (float[A,B] y) { one = Constant<value_ints = [1]>()"
        " s = Shape(x) d = Gather(s, one) c = Equal(d, one)"
        " q = If (c) <then_branch = a () => (float[C,D] p) { p = Squeeze(x, one) },"
        f" else_branch = b () => (float[E,F,G] r) {{ r = Identity(x) }}> {after} }}"
    )


def test_a_branch_that_fails_later_is_dropped() -> None:
    proto = squeezed("t = Tanh(q) y = Concat<axis = 1>(t, z)")
    after, graph = rewritten(DropFailingBranch(), proto)
    assert outside(graph) == ["Concat", "Squeeze", "Tanh"]
    feeds = {k: v.astype(np.float32) for k, v in (("x", np.ones((2, 1, 4))), ("z", np.ones((2, 3))))}
    np.testing.assert_array_equal(run(proto, feeds)[0], run(after, feeds)[0])


def test_a_branch_that_fails_by_what_it_decides_is_dropped() -> None:
    """Of rank 3 it would get another dimension, and four are too many."""
    proto = squeezed(
        "t = Shape(q) n = Size(t) two = Constant<value_int = 2>() f = Equal(n, two)"
        " e = If (f) <then_branch = g () => (float[H,I] o) { o = Relu(q) },"
        " else_branch = h () => (float[J,K,L,M] v) { zero = Constant<value_ints = [0]>() v = Unsqueeze(q, zero) }>"
        " y = Concat<axis = 1>(e, z)"
    )
    rewritten(DropFailingBranch(), proto)
    graph, path = simplify(load(proto).graph, Library(declared_in(control)), lambda graph: 1.0)
    assert outside(graph) == ["Concat", "Relu", "Squeeze"]
    assert {s.rule for s in steps_of(path)} <= {"DropFailingBranch", "InlineConstantIf"}


def branched(value: str, then: str, other: str, after: str = "y = Relu(e)") -> str:
    """What follows in `squeezed`: a branch that depends on the rank of a value."""
    return (
        f"t = Shape({value}) n = Size(t) k = Constant<value_int = 3>() f = Equal(n, k)"
        f" e = If (f) <then_branch = g () => (float[H,I] o) {{ o = {then} }},"
        f" else_branch = h () => (float[J,K] v) {{ v = {other} }}> {after}"
    )


def test_a_branch_that_fails_within_what_it_decides_is_dropped() -> None:
    _, graph = rewritten(DropFailingBranch(), squeezed(branched("q", "Concat<axis = 1>(q, z)", "Relu(q)")))
    assert "Squeeze" in outside(graph)
    custom = squeezed(branched("q", "other.Op(q)", "other.Op(q)"))  # of which nobody knows what it takes
    custom.opset_import.add(domain="other", version=1)
    refuses(DropFailingBranch(), custom)


def test_what_follows_is_looked_at_beyond_what_it_decides() -> None:
    """There are more nodes than types are found for at a time, or nodes looked at in the beginning."""
    many = [" ".join(f"{x}{i + 1} = Relu({x}{i})" for i in range(150)) for x in "ab"]
    text = branched(
        "a150", "Relu(a150)", "Relu(a150)", f"b0 = Relu(e) {many[1]} y = Concat<axis = 1>(b150, z)"
    )
    rewritten(DropFailingBranch(), squeezed(f"a0 = Relu(q) {many[0]} {text}"))


def test_a_branch_stays_while_both_can_be() -> None:
    refuses(DropFailingBranch(), squeezed("y = Tanh(q)"))
    # What runs in one case only says nothing.
    refuses(
        DropFailingBranch(),
        squeezed("y = If (c) <then_branch = g () => (float[H,I] o) { o = Concat<axis = 1>(q, z) },"
                 " else_branch = h () => (float[J,K,L] v) { v = Neg(q) }>"),
    )  # fmt: skip


def test_a_type_of_a_body_that_is_not_so_is_not_believed() -> None:
    """The body's result is a matrix, and the file says a vector: only inlining it shows."""
    proto = model(
        "agraph (float[2,3] x) => (float[A,B] y, float[M,C,D] all) { n = Constant<value_int = 2>()"
        " y, all = Loop (n, , x) <body = b (int64 i, bool going, float[] v) => (bool on, float[] w, float[K] s)"
        " { on = Identity(going) w = Neg(v) s = Identity(v) }> }"
    )
    refuses(UnrollLoop(), proto)


# --- loops ---


def loop(body: str, *, count: str = "n", more: str = "", state: str = "float[2,3]") -> onnx.ModelProto:
    return model(
        f"agraph (int64 n, float[2,3] x, {state} z, float[3,3] m) => ({state} last, float[T,2,3] all) {{ {more}"
        f" last, all = Loop ({count}, , z) <body = b (int64 i, bool going, {state} v)"
        f" => (bool on, {state} w, float[2,3] s) {{ {body} }}> }}"
    )


def test_invariants_are_computed_once() -> None:
    graph = applies(
        MoveInvariantsOutOfLoop(),
        loop("on = Identity(going) a = MatMul(x, m) b = Tanh(a) w = Add(v, b) s = Mul(w, b)"),
    )
    assert outside(graph) == ["Loop", "MatMul", "Tanh"]
    assert inside(graph, "Loop") == ["Add", "Mul"]
    assert only(graph, "Loop").captured == 1


def test_what_may_fail_is_not_moved_out_of_a_loop_that_may_have_no_step() -> None:
    body = "on = Identity(going) a = Gather(m, j) w = Add(v, a) s = Relu(w)"
    k = "k = Constant<value_int = 2>() j = Min(n, k)"
    refuses(MoveInvariantsOutOfLoop(), loop(body, more=k))
    assert inside(applies(MoveInvariantsOutOfLoop(), loop(body, count="k", more=k)), "Loop") == [
        "Add",
        "Relu",
    ]


def test_integer_division_may_fail() -> None:
    refuses(
        MoveInvariantsOutOfLoop(),
        loop("on = Identity(going) d = Div(n, n) c = Cast<to = 1>(d) w = Add(v, c) s = Relu(w)"),
    )


def test_random_numbers_are_drawn_in_every_step() -> None:
    body = "on = Identity(going) r = RandomNormalLike(x) w = Add(v, r) s = Relu(w)"
    refuses(MoveInvariantsOutOfLoop(), loop(body))
    refuses(UnrollLoop(), loop(body, count="k", more="k = Constant<value_int = 2>()"), "random")


def test_small_loops_are_unrolled() -> None:
    k = "k = Constant<value_int = 3>()"
    graph = applies(UnrollLoop(), loop("on = Identity(going) w = Add(v, x) s = Relu(w)", count="k", more=k))
    assert outside(graph) == ["Add", "Add", "Add", "Concat", *["Relu"] * 3, *["Unsqueeze"] * 3]


@pytest.mark.parametrize(
    ("count", "nodes", "small"), [(16, 8, True), (16, 9, False), (17, 4, False), (14, 9, True)]
)
def test_few_steps_of_few_nodes_are_unrolled(count: int, nodes: int, small: bool) -> None:
    more = " ".join(f"a{i + 1} = Neg(a{i})" for i in range(nodes - 4))
    body = f"on = Identity(going) a0 = Neg(v) {more} w = Neg(a{nodes - 4}) s = Neg(w)"
    proto = loop(body, count="k", more=f"k = Constant<value_int = {count}>()")
    if small:
        rewritten(UnrollLoop(), proto)
    else:
        refuses(UnrollLoop(), proto, "too large")


@pytest.mark.parametrize("count", [0, -1])
def test_a_loop_without_steps_is_nothing(count: int) -> None:
    proto = model(
        f"agraph (float[2] z) => (float[2] y) <int64 k = {{{count}}}> {{"
        " last = Loop (k, , z) <body = b (int64 i, bool going, float[2] v) => (bool on, float[2] w) {"
        " on = Identity(going) w = Neg(v) }> y = Exp(last) }"
    )
    applies(UnrollLoop(), proto, ops=["Exp"])


def test_the_condition_holds_in_every_step() -> None:
    body = "on = Identity(going) g = Not(going) w = Where(g, v, x) s = Neg(w)"
    applies(UnrollLoop(), loop(body, count="k", more="k = Constant<value_int = 2>()"))


def test_symbols_of_a_body_say_nothing_outside() -> None:
    """They stand for another number in each step."""
    assert _sizes(TensorType(DType.FLOAT, ("N", 3))).shape == (None, 3)
    assert _sizes(TensorType(DType.FLOAT, None)).shape is None
    proto = model(
        "agraph (float[2] z) => (float[K] last) <int64 two = {2}, int64[1] first = {0}> {"
        " last = Loop (two, , z) <body = b (int64 i, bool going, float[L] v) => (bool on, float[P] w) {"
        " on = Identity(going) n = NonZero(v) f = Cast<to = 1>(n) w = Squeeze(f, first) }> }"
    )
    graph = applies(UnrollLoop(), proto)
    assert [n.types[0].shape for n in graph.nodes() if n.op == "NonZero"] == [(1, None)] * 2


def test_what_is_made_outside_is_no_constant_inside() -> None:
    graph = load(loop("on = Identity(going) w = Neg(v) s = Neg(w)")).graph
    assert not made_outside(graph, graph.outputs[0], TensorType(DType.FLOAT, (2,), True)).const


@pytest.mark.parametrize("made", ["r = Clip(c, , x0)", "q = Neg(c) r = Mul(q, c)"])
def test_what_is_made_of_large_constants_is_known_inside(made: str) -> None:
    numbers = np.arange(1200, dtype=np.float32).reshape(4, 300)
    proto = model(
        "agraph (int64 n, float[4,300] x, float[4,300] z) => (float[4,300] last) <float x0 = {50}> {"
        f" {made} last = Loop (n, , z) <body = b (int64 i, bool going, float[4,300] v)"
        " => (bool on, float[4,300] w) { on = Identity(going) a = Tanh(x) t = Add(v, r) w = Add(t, a) }> }",
        c=numbers,
    )
    graph = applies(MoveInvariantsOutOfLoop(), proto)
    assert outside(graph) == ["Loop", "Tanh"]
    assert only(graph, "Loop").captured == 1


def test_unrolled_steps_know_their_shapes() -> None:
    proto = model(
        "agraph (float[2] z, float[3] x) => (float[K] last) <int64 two = {2}> {"
        " last = Loop (two, , z) <body = b (int64 i, bool going, float[L] v) => (bool on, float[P] w) {"
        " on = Identity(going) w = Concat<axis = 0>(v, x) }> }"
    )
    graph = applies(UnrollLoop(), proto)
    assert graph.type(graph.outputs[0]).shape == (8,)


@pytest.mark.parametrize(
    ("body", "count", "more", "reason"),
    [
        ("on = Identity(going) w = Neg(v) s = Relu(w)", "n", "", "not known"),
        ("r = ReduceSum<keepdims = 0>(v) c = Cast<to = 9>(r) on = Identity(c) w = Neg(v) s = Relu(w)", "k",
         "k = Constant<value_int = 3>()", "stop early"),
        ("on = Identity(going) w = Neg(v) s = Relu(w)", "k", "k = Constant<value_int = 99>()", "too large"),
        ("on = Identity(going) w = Neg(v) s = Relu(w)", "k", "k = Constant<value_int = 0>()", "collects nothing"),
    ],
)  # fmt: skip
def test_other_loops_are_not_unrolled(body: str, count: str, more: str, reason: str) -> None:
    refuses(UnrollLoop(), loop(body, count=count, more=more), reason)


# --- sequences ---


def scan(body: str, *, attributes: str = "", weights: str = "") -> onnx.ModelProto:
    return model(
        f"agraph (float[T,2,3] x, float[2,3] z, float[3,3] m) => (float[2,3] last, float[T,2,3] all){weights} {{"
        f" last, all = Scan (z, x) <num_scan_inputs = 1{attributes}, body = b (float[2,3] h, float[2,3] e)"
        f" => (float[2,3] k, float[2,3] s) {{ {body} }}> }}"
    )


def test_projections_are_made_for_all_steps() -> None:
    graph = applies(
        HoistOutOfScan(), scan("a = MatMul(e, m) b = Add(a, c) k = Tanh(d) d = Add(b, h) s = Relu(k)".replace(
            "k = Tanh(d) d = Add(b, h)", "d = Add(b, h) k = Tanh(d)"), weights=" <float[3] c = {1, 2, 3}>")
    )  # fmt: skip
    assert outside(graph) == ["Add", "MatMul", "Scan"]
    assert inside(graph, "Scan") == ["Add", "Relu", "Tanh"]
    assert only(graph, "Scan").attrs["num_scan_inputs"] == 1


def test_a_product_of_input_and_state_is_cut_in_two() -> None:
    numbers = ", ".join(str(i % 5 - 2) for i in range(18))
    graph = applies(
        HoistOutOfScan(),
        scan("a = Concat<axis = 1>(h, e) b = MatMul(a, w) k = Tanh(b) s = Neg(b)",
             weights=f" <float[6,3] w = {{{numbers}}}>"),
    )  # fmt: skip
    assert outside(graph) == ["MatMul", "Scan"]
    assert inside(graph, "Scan") == ["Add", "MatMul", "Neg", "Tanh"]


def test_what_needs_no_step_needs_no_loop() -> None:
    graph = applies(HoistOutOfScan(), scan("a = MatMul(e, m) k = Add(h, a) s = Sigmoid(a)"))
    assert len(only(graph, "Scan").outputs) == 1
    assert outside(graph) == ["MatMul", "Scan", "Sigmoid"]
    turned = ", scan_output_directions = [1]"
    kept = applies(HoistOutOfScan(), scan("a = MatMul(e, m) k = Add(h, a) s = Sigmoid(a)", attributes=turned))
    assert len(only(kept, "Scan").outputs) == 2


def test_states_are_not_hoisted() -> None:
    refuses(HoistOutOfScan(), scan("a = MatMul(h, m) k = Add(a, e) s = Neg(k)"))
    refuses(HoistOutOfScan(), scan("a = Softmax<axis = 0>(e) k = Add(a, h) s = Neg(k)"))


def test_a_product_along_the_steps_stays() -> None:
    proto = model(
        "agraph (float[2,3,T] x, float[2,3] z, float[3,3] m) => (float[2,3] last) {"
        " last = Scan (z, x) <num_scan_inputs = 1, scan_input_axes = [2], body = b (float[2,3] h, float[2,3] e)"
        " => (float[2,3] k) { a = MatMul(e, m) k = Add(h, a) }> }"
    )
    refuses(HoistOutOfScan(), proto)


def test_a_loop_that_takes_its_steps_by_gather() -> None:
    proto = model(
        "agraph (float[4,2,3] x, float[2,3] z, float[3,3] m) => (float[2,3] last) <int64 four = {4}> {"
        " last = Loop (four, , z) <body = b (int64 i, bool going, float[2,3] h) => (bool on, float[2,3] k) {"
        " on = Identity(going) e = Gather(x, i) a = MatMul(e, m) r = Relu(a) k = Add(h, r) }> }"
    )
    graph = applies(HoistOutOfLoop(), proto)
    assert outside(graph) == ["Loop", "MatMul", "Relu"]
    assert inside(graph, "Loop") == ["Add", "Gather"]
    refuses(HoistOutOfLoop(), loop("on = Identity(going) g = Gather(m, i) w = Add(v, g) s = Relu(w)"))


def test_a_loop_without_condition_and_states() -> None:
    """The condition is left out at the end, and nothing is captured once what is constant is known inside."""
    proto = model(
        "agraph (int64 n) => (float[T,2] all) <int64 one = {1}, int64 two = {2},"
        " float[3,2] x = {1, 2, 3, -1, -2, -3}> { k1 = Add(n, one) t = Min(k1, two)"
        " all = Loop (t) <body = b (int64 i, bool going) => (bool on, float[2] s) {"
        " on = Identity(going) e = Gather(x, i) s = Exp(e) }> }"
    )
    proto.graph.node[-1].input.append("")
    applies(HoistOutOfLoop(), proto)


def test_sequences_of_other_lengths_do_not_mix() -> None:
    proto = model(
        "agraph (float[4,3] x, float[5,3] y, float[3] z) => (float[3] last) <int64 four = {4}> {"
        " last = Loop (four, , z) <body = b (int64 i, bool going, float[3] h) => (bool on, float[3] k) {"
        " on = Identity(going) e = Gather(x, i) f = Gather(y, i) a = Mul(e, f) k = Add(h, a) }> }"
    )
    refuses(HoistOutOfLoop(), proto)


# --- end to end ---


def checked(proto: onnx.ModelProto, **options: object) -> onnx.ModelProto:
    """The optimised model, which verification has compared, compared again here."""
    result = optimize(proto, measure=False, cost="roofline", search="greedy", **options)  # type: ignore[arg-type]
    assert result.report.verified
    for seed in range(2):
        feeds = random_feeds(proto, seed)
        assert_equivalent(proto, result.model, feeds)
    return result.model


def ops(proto: onnx.ModelProto) -> list[str]:
    return sorted(n.op_type for n in proto.graph.node)


def test_a_recurrent_scan() -> None:
    rng = np.random.default_rng(0)
    proto = model(
        "agraph (float[16,4,32] x, float[4,32] z) => (float[4,32] last, float[16,4,32] all) {"
        " last, all = Scan (z, x) <num_scan_inputs = 1, body = b (float[4,32] h, float[4,32] e)"
        " => (float[4,32] k, float[4,32] s) { a = MatMul(e, w) c = Add(a, bias) d = MatMul(h, u) f = Add(c, d)"
        " k = Tanh(f) s = Identity(k) }> }",
        w=rng.standard_normal((32, 32)).astype(np.float32) / 6,
        u=rng.standard_normal((32, 32)).astype(np.float32) / 6,
        bias=rng.standard_normal(32).astype(np.float32),
    )
    result = checked(proto)
    body = next(
        a.g for n in result.graph.node if n.op_type == "Scan" for a in n.attribute if a.name == "body"
    )
    assert sum(n.op_type in ("MatMul", "Gemm") for n in body.node) == 1
    assert "MatMul" in ops(result) or "Gemm" in ops(result)


def test_a_loop_with_an_invariant_product() -> None:
    rng = np.random.default_rng(0)
    proto = model(
        "agraph (float[64,64] x, float[64,64] z) => (float[64,64] last) <int64 n = {20}> {"
        " last = Loop (n, , z) <body = b (int64 i, bool going, float[64,64] v) => (bool on, float[64,64] w) {"
        " on = Identity(going) p = MatMul(x, m) a = Softmax(p) w = Mul(v, a) }> }",
        m=rng.standard_normal((64, 64)).astype(np.float32),
    )
    assert ops(checked(proto)) == ["Loop", "MatMul", "Softmax"]


def test_branches_that_a_shape_decides() -> None:
    """As exporters write `x.squeeze(1)`: squeeze if the dimension is 1; here it is known to be."""
    proto = model(
        "agraph (float[N,1,8] x) => (float[N,8] y) { one = Constant<value_ints = [1]>() i = Constant<value_int = 1>()"
        " s = Shape(x) d = Gather(s, i) k = Constant<value_int = 1>() c = Equal(d, k)"
        " q = If (c) <then_branch = a () => (float[A,B] p) { p = Squeeze(x, one) },"
        " else_branch = b () => (float[A,B,C] r) { r = Identity(x) }> y = Relu(q) }"
    )
    assert "If" not in ops(checked(proto))
