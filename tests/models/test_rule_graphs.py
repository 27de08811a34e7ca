"""Random graphs from rules' left-hand sides: rules apply to them, they compute something, and a seed fixes them."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from models.rule_graphs import RuleGraphError, draw_piece, glue, rule_graph
from rewrite_rules import LIBRARY
from rewrite_rules.control import UnrollLoop
from rewrite_rules.expansion import ExpandRNN
from rewrite_rules.identity import RemoveIdentity
from rewrite_rules.merge import MergeGroupConv, MergeMatMuls
from rewrite_rules.transpose import PushTransposeDown
from xrlflow.cost import Roofline
from xrlflow.prover.cases import usable
from xrlflow.prover.draw import Draw
from xrlflow.prover.sketch import build
from xrlflow.rewrite import Library, RewriteState
from xrlflow.rewrite.state import match_all

pytestmark = pytest.mark.corpus

EVERYTHING = Library(LIBRARY, contrib=True, assuming=("finite", "memory", "vnni", "approximate"))


@pytest.mark.whole
def test_nearly_every_rule_can_be_drawn() -> None:
    missing = [r.name for r in LIBRARY if all(draw_piece(r, seed) is None for seed in range(2))]
    # Rules on control flow have no left side that could be drawn, and some fit together too seldom.
    assert len(missing) <= 0.06 * len(LIBRARY), missing


@pytest.mark.parametrize(
    "rule", [MergeMatMuls(), MergeGroupConv(), PushTransposeDown()], ids=lambda r: r.name
)
def test_the_rule_applies_to_its_piece(rule: object) -> None:
    library = Library([rule])  # type: ignore[list-item]
    sizes = Counter[int]()
    for seed in range(6):
        piece = draw_piece(rule, seed)  # type: ignore[arg-type]
        assert piece is not None
        problem = build(piece.sketch)
        assert match_all(problem.graph, library)
        assert usable(problem, np.random.default_rng(seed))
        sizes.update(math.prod(map(int, t.shape or ())) for t in piece.types)
    # Larger than what a proof draws, so that not the call of an operator is all that it costs.
    assert max(sizes) > 500
    assert len(sizes) > 3


def test_control_flow_is_left_out() -> None:
    assert draw_piece(UnrollLoop(), 0) is None
    with pytest.raises(RuleGraphError):
        rule_graph([UnrollLoop()], 0, 1)


def test_rules_of_other_backends_are_left_out() -> None:
    assert draw_piece(ExpandRNN(), 0) is not None
    with pytest.raises(RuleGraphError):
        rule_graph([ExpandRNN()], 0, 1)


@pytest.mark.parametrize("seed", range(12))
def test_a_graph_is_fixed_by_its_seed_and_can_be_rewritten(seed: int) -> None:
    graph = rule_graph(LIBRARY, seed, 3)
    assert graph.fingerprint == rule_graph(LIBRARY, seed, 3).fingerprint
    cost = Roofline()
    state = RewriteState.start(graph, EVERYTHING, cost.delta)
    assert state.candidates
    assert math.isfinite(cost.cost(graph))
    assert cost.cost(graph) > 0


def test_seeds_give_different_graphs_in_which_most_rules_come_up() -> None:
    fingerprints, rules = set(), set()
    for seed in range(60):
        graph = rule_graph(LIBRARY, seed, 3)
        fingerprints.add(graph.fingerprint)
        rules.update(m.rule.name for m in match_all(graph, EVERYTHING))
    assert len(fingerprints) == 60
    assert len(rules) > 100


def test_pieces_are_fed_to_each_other() -> None:
    piece = draw_piece(RemoveIdentity(), 0)
    assert piece is not None
    library = Library([RemoveIdentity()])
    joined = Counter[int]()
    for seed in range(40):
        graph = build(glue([piece] * 3, Draw(seed))).graph
        # Each piece that is fed takes away an input and an output.
        assert len(graph.inputs) == len(graph.outputs)
        assert len(match_all(graph, library)) == 3
        joined[3 - len(graph.inputs)] += 1
    assert joined.keys() == {0, 1, 2}
    assert joined[2] > joined[0]


def test_a_reshape_stands_between_pieces_of_other_shapes() -> None:
    pieces = [
        p
        for seed in range(40)
        if (p := draw_piece(RemoveIdentity(), seed, earlier_sizes=(2, 4, 8))) is not None
    ]
    reshaped = 0
    for first, second in itertools.combinations(pieces, 2):
        graph = build(glue([first, second], Draw(1))).graph
        reshapes = [n for n in graph.nodes() if n.op == "Reshape"]
        reshaped += len(reshapes)
        if reshapes:
            assert len(graph.inputs) == 1
            assert first.types[0].shape != second.types[0].shape
    assert reshaped > 0
