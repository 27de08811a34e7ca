"""Which operators run in generated kernels, as substitutions."""

from __future__ import annotations

from random import Random

from rewrite_rules.placement import placement_rules
from tests.rules.harness import model
from xrlflow.ir import Graph, Node
from xrlflow.onnxio import load, to_proto
from xrlflow.onnxio.model import ON_RUNTIME
from xrlflow.rewrite import Library, Match, Op, RewriteState, Rule, Val

CHAIN = "agraph (float[4,8] x, float[8,8] w) => (float[4,8] z) { a = MatMul(x, w) b = Relu(a) c = Tanh(b) z = Neg(c) }"


class TwiceNegated(Rule):
    """Tanh(x) == Neg(Tanh(Neg(x)))"""

    def source(self, op: Op, x: Val) -> Val:
        return op.Tanh(x)

    def target(self, op: Op, x: Val) -> Val:
        return op.Neg(op.Tanh(op.Neg(x)))


def start(text: str, *loses: str) -> RewriteState:
    """`loses`: the operators that run faster in ONNX Runtime."""
    library = Library([TwiceNegated(), *placement_rules(lambda graph, node: node.op in loses)])
    return RewriteState.start(load(model(text)).graph, library)


def named(state: RewriteState, rule: str, op: str | None = None) -> list[Match]:
    return [m for m in state.candidates if m.rule.name == rule and op in (None, m.nodes[0].op)]


def left(graph: Graph) -> list[str]:
    return [node.op for node in graph.topological() if node.on_runtime]


def test_an_operator_that_loses_is_left_with_what_follows_it_and_taken_back() -> None:
    state = start(CHAIN, "MatMul")
    (match,) = named(state, "LeaveToRuntime")
    assert [node.op for node in match.nodes] == ["MatMul", "Relu", "Tanh", "Neg"]
    successor = state.apply(match)
    assert left(successor.graph) == ["MatMul", "Relu", "Tanh", "Neg"]
    assert successor.fingerprint != state.fingerprint
    back = successor.apply(named(successor, "TakeFromRuntime", "MatMul")[0])
    assert back.fingerprint == state.fingerprint


def test_a_border_moves_next_to_what_is_left() -> None:
    state = start(CHAIN, "Relu")
    (match,) = named(state, "LeaveToRuntime")
    state = state.apply(match)
    assert left(state.graph) == ["Relu", "Tanh", "Neg"]
    (match,) = named(state, "LeaveToRuntime")
    assert match.nodes[0].op == "MatMul"
    (taken,) = named(state, "TakeFromRuntime", "Tanh")
    assert left(state.apply(taken).graph) == ["Relu"]


def test_nothing_is_left_where_kernels_win() -> None:
    assert not named(start(CHAIN), "LeaveToRuntime")


def test_what_replaces_an_operator_runs_where_that_ran() -> None:
    state = start(CHAIN, "Tanh")
    (rewrite,) = named(state, "TwiceNegated")
    assert left(state.apply(rewrite).graph) == []
    state = state.apply(named(state, "LeaveToRuntime")[0])
    (rewrite,) = named(state, "TwiceNegated")
    assert left(state.apply(rewrite).graph) == ["Neg", "Tanh", "Neg", "Neg"]


def test_candidates_are_those_of_a_new_start() -> None:
    draw = Random(0)
    text = CHAIN.replace(
        "z = Neg(c)",
        "d = Add(a, c) e, f = Split <axis = 1, num_outputs = 2> (d) z = Concat <axis = 1> (f, e)",
    )
    for _ in range(20):
        state = start(text, "Split", "Tanh")
        for _ in range(6):
            state = state.apply(draw.choice(state.candidates))
            again = RewriteState.start(state.graph, state.library)
            assert {m.key for m in state.candidates} == {m.key for m in again.candidates}


def test_files_say_what_is_left() -> None:
    imported = load(model(CHAIN))
    state = start(CHAIN, "Tanh")
    graph = state.apply(named(state, "LeaveToRuntime")[0]).graph

    def marked(graph: Graph) -> list[str]:
        nodes = to_proto(imported, graph).graph.node
        return [
            node.op_type for node in nodes if any(entry.key == ON_RUNTIME for entry in node.metadata_props)
        ]

    assert marked(graph) == ["Tanh", "Neg"]
    assert marked(state.graph) == []


def test_a_node_on_the_other_side_is_another_node() -> None:
    node = next(iter(start(CHAIN).graph.nodes()))
    other: Node = node.with_runtime(True)
    assert other.fingerprint != node.fingerprint
    assert other.key == node.key
    assert other.with_inputs(node.inputs).on_runtime
    assert other.with_outputs(node.outputs).on_runtime
