"""Learned costs are corrected by comparisons of whole models before an agent learns from them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import models
from xrlflow.cost import Database, Learned, Machine, Profiled, load_network
from xrlflow.cost.pretrained import PRETRAINED
from xrlflow.options import Options
from xrlflow.pipeline import attempts, correct, history
from xrlflow.pipeline.attempts import attempted
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.correct import corrected
from xrlflow.pipeline.explore import Explored, explore
from xrlflow.pipeline.finish import Finished
from xrlflow.pipeline.prepare import Start, opened, start, with_feeds
from xrlflow.search import Limits, Ratio, SearchNode, greedy

OPTIONS = Options(
    search="rlflow", cost="learned", backend="onnxruntime", threads=1, time_limit=60.0, train_steps=10
)


@pytest.fixture(autouse=True)
def measured_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons are kept here, as if all operators had measured prices."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(history, "prices_of", lambda model: model.prices)


@contextmanager
def begun(tmp_path: Path) -> Iterator[tuple[Context, Start, Learned]]:
    """An optimisation whose operators have modelled prices, all of them in time."""
    with opened(models.small("squeezenet"), OPTIONS, None, time.monotonic()) as found:
        context = with_feeds(found)
        prices = Profiled(Machine.reference(), database=Database(tmp_path / "prices.sqlite"), time_budget=0.0)
        model = Learned(prices, load_network(PRETRAINED))
        begin = start(context, model)
        yield context, begin, model


def measuring(monkeypatch: pytest.MonkeyPatch, ratio: Callable[[SearchNode], float]) -> list[SearchNode]:
    """The nodes that were measured; each is so many times faster, for sure."""
    compared: list[SearchNode] = []

    class Trials(correct.Trials):
        def compare(self, against: SearchNode | None, found: SearchNode) -> Ratio:
            assert against is not None
            assert against.state.graph is self.start.base.state.graph
            compared.append(found)
            middle = ratio(found)
            said = Ratio(middle, 0.995 * middle, 1.005 * middle)
            self.kept += history.keep(
                self.known, self.context, self.start.model, against.state.graph, found.state.graph, said
            )
            return said

    monkeypatch.setattr(correct, "Trials", Trials)
    return compared


def uses(node: SearchNode, rule: str) -> bool:
    return any(step.rule == rule for step in node.trace)


def best(start: Start) -> SearchNode:
    return greedy(start.base.state, start.base.cost, Limits()).best


def test_costs_follow_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(tmp_path) as (context, begin, model):
        rule = best(begin).trace[0].rule
        compared = measuring(monkeypatch, lambda node: 0.9 if uses(node, rule) else 1.05)
        after = corrected(context, begin, model, time.monotonic() + 15)
        assert isinstance(after.model, Learned)
        first = begin.base.state.graph

        def error(model: Learned) -> float:
            wanted = ((n.state.graph, 0.9 if uses(n, rule) else 1.05) for n in compared)
            return sum(abs(math.log(model.predict(first, g).median / r)) for g, r in wanted) / len(compared)

        assert error(after.model) < 0.7 * error(model)
    assert after.base.state.graph is first
    assert after.base.cost == after.model.cost(first) != begin.base.cost
    assert len({node.state.fingerprint for node in compared}) == len(compared) >= 16
    assert any(note.startswith(f"{len(compared)} whole models were measured") for note in context.notes)
    assert after.before == begin.before


def test_the_last_comparisons_count_where_time_ends_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(tmp_path) as (context, begin, model):
        until = time.monotonic() + 6

        def ratio(node: SearchNode) -> float:
            if len(compared) == 8:  # the last of the first round
                time.sleep(max(0.0, until - time.monotonic()))
            return 1.1

        compared = measuring(monkeypatch, ratio)
        after = corrected(context, begin, model, until)
    assert isinstance(after.model, Learned)
    moved = after.model.parameters.arrays["head.weight"] - model.parameters.arrays["head.weight"]
    assert abs(moved).max() > 0


def test_what_was_not_kept_corrects_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some operators had no measured price in time."""
    monkeypatch.setattr(history, "prices_of", lambda model: None)
    with begun(tmp_path) as (context, begin, model):
        compared = measuring(monkeypatch, lambda node: 1.1)
        after = corrected(context, begin, model, time.monotonic() + 3)
        assert after.model is model
        said = f"{len(compared)} whole models were measured, and learned costs corrected by 0 of them"
        assert context.notes == [said]


def test_what_was_measured_to_be_faster_is_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faster: dict[int, float] = {}

    def ratio(node: SearchNode) -> float:
        if len(faster) == 6:
            return 0.9
        return faster.setdefault(node.state.fingerprint, 1.1 + 0.1 * len(faster))

    with begun(tmp_path) as (context, begin, model):
        measuring(monkeypatch, ratio)
        after = corrected(context, begin, model, time.monotonic() + 10)
        assert [n.state.fingerprint for n in after.measured] == list(reversed(faster))[:4]
        for node in after.measured:
            assert node.cost == pytest.approx(after.model.cost(node.state.graph))
        found = explore(replace(context, options=replace(OPTIONS, search="greedy", train_steps=0)), after)
    assert {n.state.fingerprint for n in after.measured} <= {n.state.fingerprint for n in found.proposals}
    assert [n.cost for n in found.proposals] == sorted(n.cost for n in found.proposals)


def test_it_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(tmp_path) as (context, begin, model):
        compared = measuring(monkeypatch, lambda node: time.sleep(0.1) or 1.1)
        now = time.monotonic()
        corrected(context, begin, model, now + 3)
        assert time.monotonic() - now < 5
        assert compared
        assert corrected(context, begin, model, time.monotonic()) is begin


def test_few_comparisons_change_no_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(tmp_path) as (context, begin, model):
        monkeypatch.setattr(correct, "_AT_ONCE", 2)
        measuring(monkeypatch, lambda node: time.sleep(1.0) or 1.1)
        after = corrected(context, begin, model, time.monotonic() + 2)
    assert after.base is begin.base
    assert after.model is model
    assert after.measured


def test_after_an_interrupt_what_was_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ratio(node: SearchNode) -> float:
        if len(compared) == 5:
            raise KeyboardInterrupt
        return 1.2

    with begun(tmp_path) as (context, begin, model):
        compared = measuring(monkeypatch, ratio)
        after = corrected(context, begin, model, time.monotonic() + 10)
        assert context.clock.hurried
    assert len(after.measured) == 4


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, True),
        ({"search": "xrlflow"}, True),
        ({"train_steps": 0}, False),
        ({"measure": False}, False),
        ({"time_limit": 5.0}, False),  # there is no time to train for itself
        ({"cost": "roofline"}, False),
    ],
)
def test_it_is_done_where_an_agent_learns_from_learned_costs(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], wanted: bool
) -> None:
    given: list[float] = []

    def record(context: Context, start: Start, model: Learned, until: float) -> Start:
        given.append(until)
        return start

    monkeypatch.setattr(attempts, "corrected", record)
    monkeypatch.setattr(attempts, "explore", lambda context, start: Explored(None, (), True))  # type: ignore[arg-type]
    monkeypatch.setitem(attempts.FINISHERS, "onnxruntime", lambda *_: Finished(None, ""))
    with opened(models.small("squeezenet"), replace(OPTIONS, **options), None, time.monotonic()) as found:
        context = found if options.get("measure") is False else with_feeds(found)
        now = time.monotonic()
        attempted(context)
        assert bool(given) == wanted
        training = context.clock.budget.train_until
    if wanted:
        assert training is not None
        assert now + 0.3 * (training - now) < given[0] < training
