"""Observations against oracles: a fresh featuriser, a plain walk over the graph, PyG's own batching."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch as Data

import models
from rewrite_rules import LIBRARY
from tests.rewrite.test_engine import layered
from tests.rewrite.toy import TOY, CancelTransposes
from tests.rules.harness import model
from xrlflow.cost import Roofline
from xrlflow.cost.columns import NODE_CONTENT
from xrlflow.ir import ABSENT, Graph, Node, TensorType, apply_edit, plan_edit
from xrlflow.onnxio import load
from xrlflow.rewrite import Library, RewriteState
from xrlflow.rl.data import RewriteData, collate
from xrlflow.rl.features import (
    EDGE_FEATURES,
    INPUT,
    NODE_FEATURES,
    NODE_PLACE,
    UNKNOWN,
    Batch,
    Featuriser,
    Observation,
    Priced,
    Pricing,
    Vocabulary,
    squash,
)
from xrlflow.rl.situation import Situation

pytestmark = pytest.mark.learns

ALL = Library(LIBRARY)
WORDS = Vocabulary.of(ALL)
SMALL = ("squeezenet", "nasrnn-shared", "bert", "resnext50", "lstm-unrolled")


@cache
def graph_of(name: str) -> Graph:
    return load(models.small(name)).graph


def situation(state: RewriteState, cost: float, initial: float, left: float = 1.0) -> Situation:
    return Situation(state, tuple(state.candidates), cost, initial, left)


def walk(
    graph: Graph, library: Library, featuriser: Featuriser, steps: int, seed: int = 0
) -> Iterator[Situation]:
    """The situations of a random walk."""
    model = featuriser.prices
    state = RewriteState.start(graph, library, Pricing.of(model.delta))
    cost = initial = model.cost(graph)
    rng = random.Random(seed)
    for step in range(steps):
        now = situation(state, cost, initial, 1 - step / steps)
        yield now
        if not now.candidates:
            return
        match = rng.choice(now.candidates)
        edit = state.edit(match)
        cost += model.delta(state.graph, edit)
        state = state.apply(match, edit)


def assert_same(a: Observation, b: Observation) -> None:
    left, right = a.arrays(), b.arrays()
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert np.array_equal(value, right[key]), key


@pytest.mark.parametrize("name", SMALL)
def test_incremental_observations_are_those_made_from_scratch(name: str) -> None:
    featuriser = Featuriser(WORDS, Roofline())
    seen = []
    for now in walk(graph_of(name), ALL, featuriser, 12):
        observation = featuriser(now)
        assert_same(observation, Featuriser(WORDS, Roofline())(now))
        seen.append((now, observation))
    for now, observation in seen:  # in any order: a beam goes back and forth
        assert_same(featuriser(now), observation)


@pytest.mark.parametrize("name", SMALL)
def test_nodes_and_edges_are_those_of_the_graph(name: str) -> None:
    featuriser = Featuriser(WORDS, Roofline())
    numbers, _, _ = WORDS.numbers()
    for now in walk(graph_of(name), ALL, featuriser, 6, seed=1):
        graph, data = now.state.graph, featuriser(now)
        known = Counter(numbers.get(n.op, UNKNOWN) for n in graph.nodes())
        known[numbers[INPUT]] += len(graph.inputs)
        assert Counter(data.op.tolist()) == known
        assert data.x.shape == (data.op.shape[0], NODE_FEATURES)

        def op(value: Any, graph: Graph = graph) -> int:
            node = graph.producers.get(value)
            return numbers[INPUT] if node is None else numbers.get(node.op, UNKNOWN)

        expected: Counter[tuple[int, int, str]] = Counter()
        for node in graph.nodes():
            for value in node.inputs:
                if value == ABSENT:
                    continue
                if value in graph.producers or value in graph.inputs:
                    expected[op(value), op(node.id), "forward"] += 1
                    expected[op(node.id), op(value), "backward"] += 1
                else:
                    expected[op(node.id), op(node.id), "loop"] += 1
        got: Counter[tuple[int, int, str]] = Counter()
        for (a, b), attr in zip(data.edge_index.T.tolist(), data.edge_attr, strict=True):
            forward, backward = bool(attr[-2]), bool(attr[-1])
            assert (a == b) == (not forward and not backward)
            direction = "forward" if forward else "backward" if backward else "loop"
            got[int(data.op[a]), int(data.op[b]), direction] += 1
        assert got == expected
        assert data.edge_attr.shape[1] == EDGE_FEATURES
        ends = {v for v in graph.outputs if v in graph.producers}
        place = {name: len(data.x[0]) - len(NODE_PLACE) + i for i, name in enumerate(NODE_PLACE)}
        assert int(data.x[:, place["is an output"]].sum()) == len({graph.producers[v].id for v in ends})


def test_shares_of_the_cost_add_up() -> None:
    featuriser = Featuriser(WORDS, Roofline())
    (now,) = walk(graph_of("squeezenet"), ALL, featuriser, 1)
    data = featuriser(now)
    share = data.x[:, NODE_FEATURES - len(NODE_PLACE)].astype(np.float64)
    plain = np.expm1(share * np.log1p(1e4)) * 1e-4  # squash, undone
    assert np.isclose(plain.sum(), 1.0, rtol=1e-4)
    assert squash(-0.5) == -squash(0.5)


def test_candidates_show_where_they_are_and_what_they_change() -> None:
    featuriser = Featuriser(WORDS, Roofline())
    numbers, rules, families = WORDS.numbers()
    for now in walk(graph_of("nasrnn-shared"), ALL, featuriser, 4, seed=2):
        data, state = featuriser(now), now.state
        assert data.candidates == len(now.candidates)
        ids = [n.id for n in state.graph.nodes()]
        for number, match in enumerate(now.candidates):
            assert data.rule[number] == rules[match.rule.name]
            assert data.family[number] == families[match.rule.family]
            nodes = data.role_node[data.role_candidate == number].tolist()
            assert [ids[n] for n in nodes] == [n.id for n in match.nodes]
            assert isinstance(match.delta, Priced)
            edit = state.edit(match)
            if featuriser.change(state.graph, edit) != match.delta.change(featuriser):
                continue  # what this edit clears away has changed since it was priced
            mine = data.change_candidate == number
            added = data.change_op[mine & (data.change[:, 0] > 0)].tolist()
            assert set(added) == {numbers[n.op] for n in edit.added}
            parts = match.delta.change(featuriser).parts
            assert sum(p.count for p in parts) == len(edit.added) - len(edit.removed)
            gain = sum(p.seconds if p.count > 0 else -p.seconds for p in parts)
            if not edit.rewired:
                assert np.isclose(gain, match.delta, atol=1e-12)


def test_a_state_priced_otherwise_gives_the_same() -> None:
    """Candidates that carry no change have their edits built once."""
    graph, cost = graph_of("squeezenet"), Roofline()
    featuriser = Featuriser(WORDS, cost)
    plain = RewriteState.start(graph, ALL, cost.delta)
    rich = RewriteState.start(graph, ALL, Pricing.of(cost.delta))
    initial = cost.cost(graph)
    assert_same(
        featuriser(situation(plain, initial, initial)),
        Featuriser(WORDS, cost)(situation(rich, initial, initial)),
    )
    assert Pricing.of(Pricing.of(cost.delta)) == Pricing(cost.delta)


def test_readers_of_a_more_precise_type_are_made_anew() -> None:
    """An edit may show more of a value's type: its readers are the same nodes with other features."""
    proto = model(
        "agraph (float[2,3,4] x, int64[3] s) => (float[?,?,?] y) {"
        " a = Reshape(x, s)\n b = Exp(a)\n y = Neg(b) }"
    )
    graph = load(proto).graph
    featuriser = Featuriser(WORDS, Roofline())
    state = RewriteState.start(graph, Library((CancelTransposes(),)), Roofline().delta)
    before = featuriser(situation(state, 1.0, 1.0))
    # The producer of `a` gives way to one that tells the shape.
    (reshape,) = (n for n in graph.nodes() if n.op == "Reshape")
    precise = TensorType(reshape.types[0].dtype, (4, 3, 2))
    relu = Node("Relu", (graph.inputs[0],), reshape.outputs, (precise,))
    successor, _ = apply_edit(graph, plan_edit(graph, "toy", [relu], {}))
    after_state = RewriteState.start(successor, state.library, Roofline().delta)
    now = situation(after_state, 1.0, 1.0)
    after = featuriser(now)
    assert_same(after, Featuriser(WORDS, Roofline())(now))
    numbers, _, _ = WORDS.numbers()
    exp = numbers["Exp"]
    moved = NODE_CONTENT.index("bytes")
    assert not np.array_equal(before.x[before.op == exp][:, moved], after.x[after.op == exp][:, moved])
    assert_same(featuriser(situation(state, 1.0, 1.0)), before)  # and back


def test_no_candidates() -> None:
    graph = load(model("agraph (float[2] x) => (float[2] y) { y = Exp(x) }")).graph
    cost = Roofline()
    featuriser = Featuriser(WORDS, cost)
    state = RewriteState.start(graph, Library(TOY), cost.delta)
    data = featuriser(situation(state, 1e-6, 1e-6))
    assert data.candidates == 0
    assert data.op.shape == (2,)
    assert np.isfinite(data.globals).all()
    both = Batch.of([data, data])
    assert both.rule_batch.shape == (0,)


def test_a_graph_without_operators() -> None:
    graph = load(model("agraph (float[2] x) => (float[2] x) { }")).graph
    cost = Roofline()
    data = Featuriser(WORDS, cost)(situation(RewriteState.start(graph, ALL, cost.delta), 0.0, 0.0))
    assert data.op.shape == (1,)
    assert data.edge_index.shape == (2, 0)
    assert np.isfinite(data.x).all()


def test_what_was_seen_is_dropped_in_time() -> None:
    small, large = Featuriser(WORDS, Roofline(), limit=300), Featuriser(WORDS, Roofline())
    for now in walk(graph_of("nasrnn-shared"), ALL, small, 10):
        assert_same(small(now), large(now))
    for name in SMALL:
        for now in walk(graph_of(name), ALL, small, 3):
            assert_same(small(now), large(now))


def test_features_are_bounded() -> None:
    for name in SMALL:
        featuriser = Featuriser(WORDS, Roofline())
        for now in walk(graph_of(name), ALL, featuriser, 4):
            data = featuriser(now)
            for key in ("x", "edge_attr", "candidate", "change", "globals"):
                assert np.isfinite(getattr(data, key)).all(), key
                assert np.abs(getattr(data, key)).max() < 2.0, key


def test_collation_is_that_of_pyg() -> None:
    featuriser = Featuriser(WORDS, Roofline())
    seen = [featuriser(now) for name in SMALL[:3] for now in walk(graph_of(name), ALL, featuriser, 3)]
    ours, theirs = (
        collate(seen),
        Data.from_data_list([RewriteData.of(o) for o in seen], follow_batch=["rule"]),
    )
    for key in seen[0].arrays():
        assert torch.equal(ours[key], theirs[key]), key
    assert torch.equal(ours.batch, theirs.batch)
    assert torch.equal(ours.rule_batch, theirs.rule_batch)
    assert ours.num_graphs == theirs.num_graphs == len(seen)
    assert ours.num_nodes == theirs.num_nodes


def test_vocabularies_grow_at_the_end() -> None:
    first = Vocabulary.of(Library((CancelTransposes(),)))
    assert first.extended(Library((CancelTransposes(),))) == first
    second = first.extended(ALL).extended(Library(TOY))
    assert second.operators[: len(first.operators)] == first.operators
    assert second.rules[: len(first.rules)] == first.rules
    assert set(second.rules) >= {*ALL.rules, *(r.name for r in TOY)}
    assert len(set(second.rules)) == len(second.rules)


def test_an_unknown_rule_is_known_by_its_family() -> None:
    library = Library(TOY)
    words = replace(Vocabulary.of(library), rules=("CancelTransposes",))
    cost = Roofline()
    graph = load(layered(1)).graph
    state = RewriteState.start(graph, library, cost.delta)
    data = Featuriser(words, cost)(situation(state, cost.cost(graph), cost.cost(graph)))
    known = [m.rule.name == "CancelTransposes" for m in state.candidates]
    assert (data.rule > 0).tolist() == known
    assert set(data.family.tolist()) == {1}
