"""The engine against its oracles: matching from scratch, fingerprints from scratch, ONNX Runtime, VF2."""

from __future__ import annotations

import random

import networkx
import numpy as np
import onnx
import pytest

from rewrite_rules.arithmetic import FactorOneOutOfSum
from tests.rewrite.toy import (
    TOY,
    CancelTransposes,
    Collect,
    MergeMatMuls,
    MergeReluChain,
    PushTransposeThroughRelu,
    SplitFirst,
)
from tests.rules.harness import applies, assert_equivalent, model, random_feeds, refuses, rewritten
from xrlflow.ir import text
from xrlflow.onnxio import load, to_proto
from xrlflow.rewrite import Library, RegionRule, RewriteState, Rule, RuleError
from xrlflow.rewrite.state import MOST_MATCHES, _Finder
from xrlflow.search import Limits, TraceError, random_walk, replay

RNG = np.random.default_rng(0)


def weight(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def layered(layers: int = 3) -> onnx.ModelProto:
    """Layers in which every toy rule applies somewhere."""
    lines, current, weights = [], "x", {}
    for i in range(layers):
        for name in "qkv":
            weights[f"w{name}{i}"] = weight(8, 8)
            lines.append(f"{name}{i} = MatMul({current}, w{name}{i})")
        lines += [
            f"s{i} = Relu(k{i})",
            f"t{i} = Transpose<perm=[0,2,1]>(s{i})",
            f"r{i} = Relu(t{i})",
            f"u{i} = Transpose<perm=[0,2,1]>(r{i})",
            f"h{i}, g{i} = Split<axis=2, num_outputs=2>(v{i})",
            f"c{i} = Concat<axis=2>(g{i}, h{i})",
            f"a{i} = Add(q{i}, u{i})",
            f"m{i} = Mul(a{i}, c{i})",
            f"y{i} = Add(m{i}, {current})",
        ]
        current = f"y{i}"
    body = "\n".join(lines)
    return model(f"agraph (float[1,4,8] x) => (float[1,4,8] {current}) {{ {body} }}", **weights)


def check_against_scratch(state: RewriteState) -> None:
    scratch = RewriteState.start(state.graph, state.library, state.delta)
    assert {m.key for m in state.candidates} == {m.key for m in scratch.candidates}
    assert state.count == scratch.count == len(state.candidates)
    assert state.fingerprint == state.graph.rebuilt_fingerprint()
    order = state.graph.topological()
    assert len(order) == state.graph.node_count


@pytest.mark.parametrize("seed", range(6))
def test_random_walk_equals_scratch_and_runs_the_same(seed: int) -> None:
    proto = layered()
    imported = load(proto)
    state = RewriteState.start(imported.graph, Library(TOY))
    rng = random.Random(seed)
    for _ in range(40):
        candidates = state.candidates
        if not candidates:
            break
        state = state.apply(rng.choice(candidates))
        check_against_scratch(state)
    assert_equivalent(proto, to_proto(imported, state.graph), random_feeds(proto, seed))


def test_parents_are_not_changed_by_their_successors() -> None:
    state = RewriteState.start(load(layered()).graph, Library(TOY))
    before = (state.fingerprint, text(state.graph), {m.key for m in state.candidates})
    for match in state.candidates:
        state.apply(match)
    assert before == (state.graph.rebuilt_fingerprint(), text(state.graph), {m.key for m in state.candidates})


def test_independent_substitutions_commute() -> None:
    """A;B and B;A meet in one state."""
    state = RewriteState.start(
        load(layered(2)).graph, Library([CancelTransposes(), PushTransposeThroughRelu()])
    )
    a, b = sorted(state.candidates, key=lambda m: m.key)
    ab = state.apply(a)
    ba = state.apply(b)
    ab = ab.apply(next(m for m in ab.candidates if m.key == b.key))
    ba = ba.apply(next(m for m in ba.candidates if m.key == a.key))
    assert ab.fingerprint == ba.fingerprint
    assert {m.key for m in ab.candidates} == {m.key for m in ba.candidates}


def test_fingerprint_is_the_same_in_another_import() -> None:
    proto = layered()
    assert load(proto).graph.fingerprint == load(proto).graph.fingerprint
    other = layered()
    other.graph.node[3].op_type = "Sigmoid"
    assert load(proto).graph.fingerprint != load(other).graph.fingerprint


def test_trace_replays() -> None:
    proto = layered()
    state = RewriteState.start(load(proto).graph, Library(TOY))
    result = random_walk(state, 0.0, Limits(budget=20), seed=3)
    *_, last = replay(RewriteState.start(load(proto).graph, Library(TOY)), result.best.trace)
    assert last.fingerprint == result.best.state.fingerprint
    without = RewriteState.start(load(proto).graph, Library([SplitFirst()]))
    with pytest.raises(TraceError, match=r"of the trace .* does not apply"):
        list(replay(without, result.best.trace))


def test_multi_root_matches_each_set_once() -> None:
    state = RewriteState.start(load(layered(1)).graph, Library([MergeMatMuls()]))
    assert sorted(len(m.nodes) for m in state.candidates) == [2, 2, 2, 3]


def test_merged_matmuls() -> None:
    proto = model(
        "agraph (float[1,4,8] x) => (float[1,4,6] a, float[1,4,2] b) { a = MatMul(x, w)\n b = MatMul(x, v) }",
        w=weight(8, 6),
        v=weight(8, 2),
    )
    applies(MergeMatMuls(), proto, ops=["MatMul", "Split"])


def test_declared_shapes_are_enforced() -> None:
    proto = model(
        "agraph (float[4,8] x) => (float[4,6] a, float[4,2] b) { a = MatMul(x, w)\n b = MatMul(x, v) }",
        w=weight(8, 6),
        v=weight(8, 2),
    )
    refuses(MergeMatMuls(), proto, "x has 2 dimensions")


def test_near_misses_say_why() -> None:
    proto = model(
        "agraph (float[2,3,4] x) => (float[4,2,3] y) {"
        " a = Transpose<perm=[0,2,1]>(x)\n y = Transpose<perm=[1,0,2]>(a) }"
    )
    refuses(CancelTransposes(), proto, "do not cancel")


def test_an_output_that_becomes_an_alias_keeps_its_name() -> None:
    proto = model(
        "agraph (float[2,3,4] x) => (float[2,3,4] y) {"
        " a = Transpose<perm=[0,2,1]>(x)\n y = Transpose<perm=[0,2,1]>(a) }"
    )
    after, graph = rewritten(CancelTransposes(), proto)
    assert graph.outputs == graph.inputs
    assert [o.name for o in after.graph.output] == ["y"]
    applies(CancelTransposes(), proto, ops=[])


def test_inner_value_that_is_read_elsewhere() -> None:
    shared = (
        "agraph (float[2,3,4] x) => (float[2,4,3] r, float[2,4,3] t) {"
        " t = Transpose<perm=[0,2,1]>(x)\n r = Relu(t) }"
    )
    refuses(PushTransposeThroughRelu(), model(shared))  # t is an output: it would have to be kept
    cancelled = (
        "agraph (float[2,3,4] x) => (float[2,3,4] y, float[2,4,3] t) {"
        " t = Transpose<perm=[0,2,1]>(x)\n y = Transpose<perm=[0,2,1]>(t) }"
    )
    applies(CancelTransposes(), model(cancelled), ops=["Transpose"])


def test_one_output_of_two_is_replaced() -> None:
    proto = model(
        "agraph (float[1,4,8] x) => (float[1,4,3] a, float[1,4,5] b) { a, b = Split<axis=2>(x, sizes) }",
        sizes=np.array([3, 5]),
    )
    graph = applies(SplitFirst(), proto, ops=["Slice", "Split"])
    assert len({o for n in graph.nodes() for o in n.outputs}) == 3


def test_region_rule() -> None:
    proto = model(
        "agraph (float[4] x) => (float[4] y) { a = Relu(x)\n b = Relu(a)\n c = Relu(b)\n y = Abs(c) }"
    )
    applies(MergeReluChain(), proto, ops=["Abs", "Relu"])
    refuses(MergeReluChain(), model("agraph (float[4] x) => (float[4] y) { y = Relu(x) }"))


def test_a_region_match_falls_when_a_node_it_read_changes() -> None:
    proto = model(
        "agraph (float[2,3,4] x) => (float[2,4,3] y) {"
        " a = Relu(x)\n b = Relu(a)\n t = Transpose<perm=[0,2,1]>(b)\n y = Relu(t) }"
    )
    state = RewriteState.start(load(proto).graph, Library([MergeReluChain(), PushTransposeThroughRelu()]))
    for _ in range(2):
        push = next(m for m in state.candidates if m.rule.name == "PushTransposeThroughRelu")
        state = state.apply(push)
        check_against_scratch(state)
        if not any(m.rule.name == "PushTransposeThroughRelu" for m in state.candidates):
            break
    (chain,) = (m for m in state.candidates if m.rule.name == "MergeReluChain")
    assert len(chain.nodes) == 3


def test_dead_nodes_go_with_their_readers() -> None:
    proto = model(
        "agraph (float[4] x, float[4] z) => (float[4] y) { a = Mul(x, z)\n b = Mul(x, z)\n y = Add(a, b) }"
    )
    state = RewriteState.start(load(proto).graph, Library([Collect()]))
    graph = state.apply(state.candidates[0]).graph
    assert sorted(n.op for n in graph.nodes()) == ["Add", "Mul"]


def test_matches_equal_those_of_vf2() -> None:
    """networkx's subgraph isomorphism finds the same places for a tree of operators."""

    class Chain(Rule):
        """add(relu(matmul(x, w)), y) -> itself, with the operands exchanged."""

        allow_multi_use = True

        def source(self, op, x, w, y):  # type: ignore[no-untyped-def]
            return op.Add(op.Relu(op.MatMul(x, w)), y)

        def target(self, op, x, w, y):  # type: ignore[no-untyped-def]
            return op.Sum(y, op.Relu(op.MatMul(x, w)))

    rng = random.Random(1)
    for _ in range(5):
        lines, values = [], ["x", "z"]
        for i in range(40):
            op = rng.choice(["MatMul", "Relu", "Add", "Relu", "Add"])
            arguments = [rng.choice(values[-6:]) for _ in range(1 if op == "Relu" else 2)]
            lines.append(f"v{i} = {op}({', '.join(arguments)})")
            values.append(f"v{i}")
        outputs = ", ".join(f"float[4,4] v{i}" for i in range(40))
        proto = model(f"agraph (float[4,4] x, float[4,4] z) => ({outputs}) {{ {chr(10).join(lines)} }}")
        graph = load(proto).graph
        whole = networkx.DiGraph(graph.to_networkx())
        pattern = networkx.DiGraph([("m", "r"), ("r", "a")])
        operators = {"m": "MatMul", "r": "Relu", "a": "Add"}
        networkx.set_node_attributes(pattern, operators, "op")
        matcher = networkx.algorithms.isomorphism.DiGraphMatcher(
            whole, pattern, node_match=lambda a, b: a["op"] == b["op"]
        )
        expected = {tuple(sorted(found)) for found in matcher.subgraph_monomorphisms_iter()}
        state = RewriteState.start(graph, Library([Chain()]))
        got = {tuple(sorted(n.id for n in m.nodes)) for m in state.candidates}
        assert got == expected


class _NoDocstring(Rule):
    def source(self, op, x):  # type: ignore[no-untyped-def]
        return op.Relu(x)

    def target(self, op, x):  # type: ignore[no-untyped-def]
        return x


class _WrongType(Rule):
    """relu(x) -> its shape, which is no float."""

    def source(self, op, x):  # type: ignore[no-untyped-def]
        return op.Relu(x)

    def target(self, op, x):  # type: ignore[no-untyped-def]
        return op.Shape(x)


class _Unsound(Rule):
    """relu(x), relu(y) -> relu(y), relu(x): y may depend on relu(x)."""

    def source(self, op, x, y):  # type: ignore[no-untyped-def]
        return [op.Relu(x), op.Relu(y)]

    def target(self, op, x, y):  # type: ignore[no-untyped-def]
        return [op.Relu(x), op.Relu(y)]


class _BadShapes(Rule):
    """relu(x) -> x."""

    shapes = "z[a]"

    def source(self, op, x):  # type: ignore[no-untyped-def]
        return op.Relu(x)

    def target(self, op, x):  # type: ignore[no-untyped-def]
        return x


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (_NoDocstring(), "no docstring"),
        (_Unsound(), "not read by every root"),
        (_BadShapes(), "shapes mention z"),
    ],
)
def test_badly_declared_rules_are_refused(rule: Rule | RegionRule, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        Library([rule])


def test_a_target_of_another_type_is_refused() -> None:
    proto = model("agraph (float[4] x) => (float[4] y) { y = Relu(x) }")
    with pytest.raises(RuleError, match="does not fit what it replaces"):
        RewriteState.start(load(proto).graph, Library([_WrongType()]))


def test_a_pattern_has_a_number_of_matches_at_a_node() -> None:
    """Of many products of one input, each three can be merged instead of others: a million triples of 180."""
    count = 40
    proto = model(
        f"agraph (float[1,2,3] x) => ({', '.join(f'float[1,2,2] y{i}' for i in range(count))}) {{"
        + " ".join(f"y{i} = MatMul(x, w{i})" for i in range(count))
        + " }",
        **{f"w{i}": weight(3, 2) for i in range(count)},
    )
    library = Library((MergeMatMuls(),))
    state = RewriteState.start(load(proto).graph, library)
    assert 2 * MOST_MATCHES < state.count <= 2 * MOST_MATCHES * count
    keys = {match.key for match in state.candidates}
    everything = _Finder(state.graph, library, None, many=None)
    for node in state.graph.nodes():
        everything.match_at(node, library.root_plans)
    left_out = next(match for match in everything.matches if match.key not in keys)
    found = state.find(left_out.key)  # a trace that has it can be followed
    assert found is not None
    assert found.key == left_out.key
    assert state.apply(found).graph.node_count < state.graph.node_count
    assert state.find(("MergeMatMuls", (*left_out.key[1][:-1], 1))) is None


def test_what_is_not_found_in_time_is_left_out() -> None:
    graph = load(layered()).graph
    assert RewriteState.start(graph, Library(TOY)).count
    late = RewriteState.start(graph, Library(TOY), until=0.0)
    assert (late.count, late.graph) == (0, graph)


def test_a_number_beside_a_value_of_unknown_type_is_refused() -> None:
    """Operators that nobody knows have results of unknown types, and a rule's number has the type of what it meets."""
    proto = model(
        "agraph (float[4] x) => (float[4] y) "
        "{ a = com.microsoft.NobodyKnowsThis(x) b = com.microsoft.NorThis(a) m = Mul(a, b) y = Add(a, m) }"
    )
    refuses(FactorOneOutOfSum(), proto, "an element type is not known")
