"""Valleys are what they claim: greedy is stuck, no way leads out without climbing, and the optimum can be reached."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import onnx
import pytest

import models
from models.valleys import (
    COMPOSITES,
    EXCLUDED,
    FAMILIES,
    MAX_STEP,
    MAX_STEPS,
    MIN_GAIN,
    MIN_STEP,
    SLOW,
    WIDE,
    NoValley,
    Valley,
    ValleyRecord,
    catalogue,
    chart,
    explore,
    valley_library,
)
from rewrite_rules import LIBRARY
from xrlflow.cost.machine import REFERENCE
from xrlflow.search import Limits, SearchNode, greedy, taso

pytestmark = pytest.mark.corpus

CATALOGUE = catalogue()
# One instance of each family, depth and width.
SAMPLE = [
    next(group) for _, group in itertools.groupby(CATALOGUE, lambda c: c.valley.name.rpartition("-")[0])
]


def named(sample: list[ValleyRecord]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("charted", sample, ids=[c.valley.name for c in sample])


def test_there_are_dozens_of_each_family() -> None:
    counts = Counter(c.valley.family.name for c in CATALOGUE)
    assert counts.keys() == FAMILIES.keys()
    assert min(counts.values()) >= 12
    assert sum(counts.values()) >= 200
    assert len({c.valley.name for c in CATALOGUE}) == len(CATALOGUE)


def test_families_are_real_made_up_and_held_out() -> None:
    assert sum(f.real for f in FAMILIES.values()) >= 3
    assert [f.name for f in FAMILIES.values() if f.held_out] == ["forks"]
    assert {f.machine.name for f in FAMILIES.values()} == {REFERENCE.name, WIDE.name, SLOW.name}


def test_composites_are_rules_and_so_are_their_parts() -> None:
    names = {r.name for r in LIBRARY}
    for rule, parts in COMPOSITES.items():
        assert {rule, *parts} <= names
    assert (
        valley_library().rules.keys()
        == {r.name for r in LIBRARY if not r.contrib and not r.assumes and r.backend in (None, "onnxruntime")}
        - EXCLUDED
    )


def test_hills_are_what_was_asked_for() -> None:
    for charted in CATALOGUE:
        assert 1 <= len(charted.climbs) <= MAX_STEPS
        assert all(MIN_STEP <= c <= MAX_STEP for c in charted.climbs)
        assert charted.optimum <= (1 - MIN_GAIN) * charted.cost
        assert charted.reached(charted.optimum)
        assert not charted.reached(charted.cost)
    assert {len(c.climbs) for c in CATALOGUE} == {1, 2, 3, 4}
    # TASO at 1.3 keeps nothing that costs 30% more.
    assert sum(c.height > 0.3 for c in CATALOGUE) >= 30


@named(SAMPLE)
def test_greedy_is_stuck_and_every_first_step_costs_more(charted: ValleyRecord) -> None:
    start = charted.valley.start()
    assert start.cost == pytest.approx(charted.cost)
    assert start.state.candidates
    assert all(m.delta > 0 for m in start.state.candidates)
    assert greedy(start.state, start.cost, Limits()).best.cost == start.cost


@named(SAMPLE)
def test_the_optimum_is_reached_by_the_chain(charted: ValleyRecord) -> None:
    found = charted.valley.start()
    assert charted.chain
    ways = [found]
    for rule, cost in charted.chain:
        # Several places of one rule can cost the same: all are followed.
        further = {}
        for way in ways:
            for match in way.state.candidates:
                if match.rule.name == rule and way.cost + match.delta == pytest.approx(cost, rel=1e-9):
                    state = way.state.apply(match)
                    further.setdefault(state.fingerprint, SearchNode(state, None, way.cost + match.delta))
        ways = list(further.values())
        assert ways, f"{rule} leads to no graph of {cost:g} s"
    end = ways[0]
    assert end.cost == pytest.approx(charted.optimum)
    assert charted.valley.cost_model().cost(end.state.graph) == pytest.approx(charted.optimum)


@named([c for c in SAMPLE if c.valley.depth == 1])
def test_nothing_better_is_reached_without_climbing(charted: ValleyRecord) -> None:
    start = charted.valley.start()
    near = explore(start, start.cost * (1 + MIN_STEP), 200)
    assert near.better is None
    assert near.best.cost == start.cost


@named([c for c in SAMPLE if c.height > 0.3][:2])
def test_taso_does_not_pass_a_hill_above_its_alpha(charted: ValleyRecord) -> None:
    start = charted.valley.start()
    result = taso(start.state, start.cost, Limits(300), alpha=1.3)
    assert not charted.reached(result.best.cost)


@pytest.mark.parametrize("name", FAMILIES)
def test_builders_make_valid_models_that_a_seed_fixes(name: str) -> None:
    family = FAMILIES[name]
    for depth, width in family.shapes:
        proto = family.build(depth, width, 3)
        onnx.checker.check_model(proto, full_check=True)
        assert proto.SerializeToString() == family.build(depth, width, 3).SerializeToString()
        assert proto.SerializeToString() != family.build(depth, width, 4).SerializeToString()


def test_charting_finds_what_the_catalogue_says() -> None:
    charted = next(c for c in CATALOGUE if c.valley.family.name == "layouts")
    again = chart(charted.valley, budget=200)
    assert again.optimum == pytest.approx(charted.optimum)
    assert again.climbs == pytest.approx(charted.climbs, abs=1e-4)
    assert [r for r, _ in again.chain] == [r for r, _ in charted.chain]


def test_what_is_no_valley_is_said_so() -> None:
    layouts = FAMILIES["layouts"]
    with pytest.raises(NoValley, match="do not lead to anything better"):
        chart(Valley(replace(layouts, rules=frozenset()), 1, 1, 0), budget=50)
    gaining = replace(layouts, build=lambda depth, width, seed: models.small("resnet18"))
    with pytest.raises(NoValley, match="a first step does not cost more"):
        chart(Valley(gaining, 1, 1, 0), budget=50)
    # Vectors of 16 lanes are filled by the first two groups: from there on it gets dearer only.
    narrow = replace(FAMILIES["wide-groups"], machine=REFERENCE)
    with pytest.raises(NoValley):
        chart(Valley(narrow, 1, 1, 0), budget=50)


def test_exploring_climbs_least_first() -> None:
    charted = next(c for c in CATALOGUE if c.valley.family.name == "layouts" and c.valley.depth == 1)
    start = charted.valley.start()
    limit = start.cost * (1 + charted.height)
    found = explore(start, limit * 1.001, 2000)
    assert found.better is not None
    assert found.climb == pytest.approx(limit, rel=1e-4)
    assert found.best.cost == pytest.approx(charted.optimum)
    lower = explore(start, limit * 0.99, 2000)
    assert lower.better is None
    assert lower.exhausted
