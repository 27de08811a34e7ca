"""PPO with measured rewards in the place of a search."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import models
import xrlflow
from bench import model_free
from rewrite_rules import LIBRARY
from xrlflow.cost import Roofline
from xrlflow.ir import Graph
from xrlflow.onnxio import load
from xrlflow.pipeline import attempts
from xrlflow.rewrite import Library, RewriteState
from xrlflow.rl.latency import UNRUNNABLE
from xrlflow.search import Limits, SearchNode, greedy, replay

pytestmark = pytest.mark.learns


def test_graphs_that_were_measured_are_kept_with_their_paths() -> None:
    graph, prices = load(models.small("squeezenet")).graph, Roofline()
    base = SearchNode(RewriteState.start(graph, Library(LIBRARY), prices.delta), None, prices.cost(graph))
    steps = greedy(base.state, base.cost, Limits(100)).best.trace
    assert len(steps) > 6
    asked: list[int] = []

    def latency(graph: Graph) -> float:
        asked.append(graph.fingerprint)
        return 0.5 if len(asked) == 1 else UNRUNNABLE if len(asked) == 2 else 0.75

    found = model_free.Measured(base, latency)
    for trace in (steps, (), steps, steps[:6]):  # no graph is measured twice, not even one that does not run
        found.note(SimpleNamespace(info={"trace": trace}))  # type: ignore[arg-type]
    assert len(steps) < 10
    assert asked == list(found.known) == list(dict.fromkeys(asked))
    assert [node.cost / base.cost for node in found.nodes.values()] == pytest.approx([0.5, 0.75])
    assert [len(node.trace) for node in found.nodes.values()] == [5, 6]
    first = next(iter(found.nodes.values()))
    assert [step.cost / base.cost for step in first.trace] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5])
    for fingerprint, node in found.nodes.items():
        assert node.state.fingerprint == fingerprint
        assert [base.state, *replay(base.state, node.trace)][-1].fingerprint == fingerprint


@pytest.mark.whole
def test_it_takes_the_place_of_the_search_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    explore, given = attempts.explore, []

    def learn(policy: Any, environments: Any, steps: int, seed: int, seconds: float, note: Any) -> Any:
        given.append(seconds)
        return {"steps": 0, "seconds": 0.0}

    monkeypatch.setattr(model_free, "learn", learn)
    with model_free.instead_of_search():
        result = xrlflow.optimize(
            models.small("squeezenet"), cost="profiled", backend="onnxruntime", threads=1, time_limit=20.0
        )
    assert attempts.explore is explore
    assert "PPO took 0 steps and measured 0 graphs" in result.report.notes
    assert 0.0 < given[0] <= 10.0
