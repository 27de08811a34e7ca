"""Two cost models guide a search each; what is measured to be faster leads the selection."""

from __future__ import annotations

import time

import pytest

import models
import xrlflow
from xrlflow.cost import AdditiveCost, Learned, Roofline, load_network
from xrlflow.cost.pretrained import PRETRAINED
from xrlflow.ir import Edit, Graph, Node
from xrlflow.options import Options
from xrlflow.pipeline import race
from xrlflow.pipeline.choose import Trials
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.finish import Finished
from xrlflow.pipeline.prepare import opened, with_feeds
from xrlflow.pipeline.results import _notes
from xrlflow.search import Ratio, SearchNode

FASTER, SLOWER, UNCLEAR = Ratio(1.5, 1.4, 1.6), Ratio(0.7, 0.6, 0.8), Ratio(1.002, 0.99, 1.01)
OPTIONS = Options(search="greedy", cost="auto", backend="onnxruntime", threads=1, time_limit=20.0)


class Nothing(AdditiveCost):
    """All operators cost the same, but Mul costs nothing: fewer operators are better."""

    name = "nothing"

    def price(self, graph: Graph, node: Node, in_types: object) -> float:
        return 0.0 if node.op == "Mul" else 1e-6


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[SearchNode]:
    """What was compared, in order: the leader, the challenger."""
    found: list[SearchNode] = []
    monkeypatch.setattr(race, "cost_models", lambda context: (Roofline(), Nothing()))
    return found


def led(monkeypatch: pytest.MonkeyPatch, found: list[SearchNode], *ratios: Ratio) -> str:
    """The name of the cost model that leads if the comparisons give these ratios; no more may be made."""
    given = iter(ratios)

    def compare(self: Trials, against: SearchNode | None, node: SearchNode) -> Ratio:
        assert against is not None
        found.extend((against, node))
        return next(given)

    monkeypatch.setattr(Trials, "compare", compare)
    with opened(models.small("nasrnn-shared"), OPTIONS, None, time.monotonic()) as context:
        context = with_feeds(context)
        name = race.searched(context)[0].model.name
        said = "what a search by nothing costs found is" if ratios else "found the same"
        assert said in "".join(context.notes)
        assert next(given, None) is None
    return name


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [((FASTER, FASTER), "nothing"), ((SLOWER,), "roofline"), ((UNCLEAR,), "roofline"),
     ((FASTER, UNCLEAR), "roofline"), ((FASTER, SLOWER), "roofline")],
)  # fmt: skip
def test_the_later_search_leads_if_it_is_measured_to_be_faster_twice(
    monkeypatch: pytest.MonkeyPatch, compared: list[SearchNode], ratios: tuple[Ratio, ...], expected: str
) -> None:
    assert led(monkeypatch, compared, *ratios) == expected
    first, second = compared[:2]
    assert first.state.fingerprint != second.state.fingerprint


def test_equal_results_are_not_compared(monkeypatch: pytest.MonkeyPatch, compared: list[SearchNode]) -> None:
    monkeypatch.setattr(race, "cost_models", lambda context: (Roofline(), Roofline()))
    assert led(monkeypatch, compared) == "roofline"
    assert not compared


def test_an_interrupt_keeps_the_first_search(
    monkeypatch: pytest.MonkeyPatch, compared: list[SearchNode]
) -> None:
    def interrupted(self: Trials, against: SearchNode | None, node: SearchNode) -> Ratio:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trials, "compare", interrupted)
    with opened(models.small("nasrnn-shared"), OPTIONS, None, time.monotonic()) as context:
        context = with_feeds(context)
        begin, explored = race.searched(context)
        assert begin.model.name == "roofline"
        assert explored.proposals
        assert context.clock.hurried


def test_after_an_interrupted_search_there_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []

    def explore(context: Context, begin: object) -> object:
        begun.append(begin)
        context.clock.hurry()
        return object()

    monkeypatch.setattr(race, "explore", explore)
    monkeypatch.setattr(race, "cost_models", lambda context: (Roofline(), Nothing()))
    with opened(models.small("squeezenet"), OPTIONS, None, time.monotonic()) as context:
        race.searched(context)
    assert len(begun) == 1


@pytest.mark.parametrize("where", ["start", "explore"])
def test_an_interrupt_outside_the_second_search_keeps_the_first(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real, calls = getattr(race, where), 0

    def interrupted(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(race, where, interrupted)
    monkeypatch.setattr(race, "cost_models", lambda context: (Roofline(), Nothing()))
    with opened(models.small("nasrnn-shared"), OPTIONS, None, time.monotonic()) as context:
        begin, explored = race.searched(with_feeds(context))
        assert begin.model.name == "roofline"
        assert explored.proposals
        assert context.clock.hurried
        assert calls == 2


def test_what_both_searches_say_is_said_once() -> None:
    with opened(models.small("squeezenet"), OPTIONS, None, time.monotonic()) as context:
        context.notes.extend(["late", "other", "late"])
        assert _notes(context, Finished(None, "")) == (*context.imported.notes, "late", "other")


@pytest.mark.parametrize(
    ("changed", "races"),
    [({}, True), ({"cost": "profiled"}, False), ({"measure": False}, False), ({"search": "random"}, False),
     ({"search": "rlflow"}, False), ({"search": "mcts"}, True), ({"train_steps": 8}, False)],
)  # fmt: skip
def test_what_races(changed: dict[str, object], races: bool) -> None:
    assert Options(**({"cost": "auto"} | changed)).races == races  # type: ignore[arg-type]


def test_the_report_names_the_leader() -> None:
    result = xrlflow.optimize(
        models.small("squeezenet"), search="greedy", cost="auto", measure=False, threads=1
    )
    assert result.report.cost_model == "profiled"


def test_prices_that_take_too_long_cost_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are about two thousand substitutions in NasRNN whose layers share weights."""

    class Slow(Learned):
        def delta(self, graph: Graph, edit: Edit) -> float:
            time.sleep(0.2)
            return super().delta(graph, edit)

    slow = Slow(Roofline(), load_network(PRETRAINED))
    monkeypatch.setattr(race, "cost_models", lambda context: (Roofline(), slow))
    with opened(models.small("nasrnn-shared"), OPTIONS, None, time.monotonic()) as context:
        context = with_feeds(context)
        begin, explored = race.searched(context)
        assert time.monotonic() < context.clock.budget.search_until
        assert begin.model.name == "roofline"
        assert explored.proposals
        assert "there was no time for a search by learned costs (--time-limit)" in context.notes
