"""Which graphs `bench/latencies.py` measures."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

import models
from bench import latencies as bench
from rewrite_rules import LIBRARY
from xrlflow.cost import Database, Machine, Profiled, Roofline
from xrlflow.onnxio import load
from xrlflow.rewrite import Library, RewriteState
from xrlflow.search import Limits, SearchNode, greedy

pytestmark = pytest.mark.measures


def starts(folder: Path) -> list[SearchNode]:
    machine = Machine.reference()
    library = Library(LIBRARY)
    graph = load(models.small("squeezenet")).graph
    slower = replace(machine, peak=0.9 * machine.peak)
    prices = Profiled(
        slower, database=Database(folder / "prices.sqlite"), time_budget=0.0
    )  # measures nothing
    return [
        SearchNode(RewriteState.start(graph, library, model.delta), None, model.cost(graph))
        for model in bench.cost_models(prices, Roofline(machine), random.Random(1))
    ]


def test_variants_differ_and_hold_what_each_cost_model_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_SEARCHING", 120.0)
    found = starts(tmp_path)
    variants = bench.variants(found, 30, random.Random(2))
    prints = [v.state.fingerprint for v in variants]
    assert len(set(prints)) == len(prints) == 30
    assert found[0].state.fingerprint not in prints
    best = [greedy(s.state, s.cost, Limits(budget=60)).best.state.fingerprint for s in found]
    assert {*best} - {found[0].state.fingerprint} <= {*prints[: 2 * len(found)]}
    assert best[2] not in best[:2]  # the network leads elsewhere than both kinds of prices


def test_each_cost_model_costs_a_graph_differently(tmp_path: Path) -> None:
    assert len({s.cost for s in starts(tmp_path)}) == 4


def test_searches_give_six_of_ten_variants_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    walked = bench._walked
    monkeypatch.setattr(bench, "_walked", lambda node, rng: asked.append(node) or walked(node, rng))
    monkeypatch.setattr(bench, "_swept", bench._walked)
    found = starts(tmp_path)
    assert len(bench.variants(found, 10, random.Random(2))) == 10
    assert len(asked) >= 4
