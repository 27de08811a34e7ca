"""Random walks with the whole library over every network of the zoo, against all oracles."""

from __future__ import annotations

import random

import numpy as np
import pytest

import models
from rewrite_rules import LIBRARY
from tests.rules.harness import assert_equivalent, random_feeds
from xrlflow.cost import Roofline
from xrlflow.onnxio import load, to_proto
from xrlflow.rewrite import Library, RewriteState

STEPS = 12


@pytest.mark.parametrize("name", models.ZOO)
def test_walk(name: str) -> None:
    """After each step: candidates equal a match from scratch, fingerprint and modelled cost equal the rebuilt ones.

    At the end the exported graph gives what the original gives.
    """
    proto = models.small(name)
    imported = load(proto)
    cost = Roofline()
    state = RewriteState.start(imported.graph, Library(LIBRARY), cost.delta)
    modelled = cost.cost(imported.graph)
    rng = random.Random(name)
    for _ in range(STEPS):
        candidates = state.candidates
        if not candidates:
            break
        match = rng.choice(candidates)
        edit = state.edit(match)
        modelled += cost.delta(state.graph, edit)
        state = state.apply(match, edit)
        scratch = RewriteState.start(state.graph, state.library, cost.delta)
        assert {m.key for m in state.candidates} == {m.key for m in scratch.candidates}, match.rule.name
        assert state.fingerprint == state.graph.rebuilt_fingerprint()
        assert np.isclose(modelled, cost.cost(state.graph), rtol=1e-9, atol=0), match.rule.name
        assert len(state.graph.topological()) == state.graph.node_count
    assert_equivalent(proto, to_proto(imported, state.graph), random_feeds(proto))
