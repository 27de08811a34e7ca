"""Learned costs are corrected by comparisons of whole models before an agent learns from them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import models
from xrlflow.backends import BackendError
from xrlflow.cost import Database, Learned, Machine, Profiled, load_network
from xrlflow.cost.pretrained import PRETRAINED
from xrlflow.options import Options
from xrlflow.pipeline import attempts, correct, history
from xrlflow.pipeline.attempts import attempted
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.correct import corrected, ordered
from xrlflow.pipeline.explore import Explored, explore
from xrlflow.pipeline.finish import Finished
from xrlflow.pipeline.prepare import Start, opened, start, with_feeds
from xrlflow.search import Limits, Ratio, SearchNode, greedy

pytestmark = pytest.mark.measures

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
    with opened(models.small("squeezenet"), OPTIONS, None, time.monotonic()) as result:
        context = with_feeds(result)
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
            output = Ratio(middle, 0.995 * middle, 1.005 * middle)
            self.stored += history.keep(
                self.history, self.context, self.start.model, against.state.graph, found.state.graph, output
            )
            return output

    monkeypatch.setattr(correct, "Trials", Trials)
    return compared


def uses(node: SearchNode, rule: str) -> bool:
    return any(step.rule == rule for step in node.trace)


def best(start: Start) -> SearchNode:
    return greedy(start.base.state, start.base.cost, Limits()).best


@pytest.mark.whole
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
    over: list[bool] = []

    def ratio(node: SearchNode) -> float:
        if len(compared) == 8:  # the last of the first round
            over.append(True)
        return 1.1

    with begun(tmp_path) as (context, begin, model):
        compared = measuring(monkeypatch, ratio)
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (60 if over else 0))
        monkeypatch.setattr(correct, "time", clock)
        after = corrected(context, begin, model, time.monotonic() + 60)
    assert len(compared) == 8
    assert isinstance(after.model, Learned)
    moved = after.model.parameters.arrays["head.weight"] - model.parameters.arrays["head.weight"]
    assert abs(moved).max() > 0


def test_without_prices_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some operators had no measured price in time: comparisons would correct nothing, and training has the time."""
    monkeypatch.setattr(history, "prices_of", lambda model: None)
    with begun(tmp_path) as (context, begin, model):
        compared = measuring(monkeypatch, lambda node: 1.1)
        after = corrected(context, begin, model, time.monotonic() + 10)
        assert after.model is model
        assert not compared
        assert context.notes == ["learned costs were not corrected: no whole model was measured"]


def test_it_ends_with_a_round_that_corrects_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where others use the processors."""
    monkeypatch.setattr(history, "keep", lambda *_: False)
    with begun(tmp_path) as (context, begin, model):
        compared = measuring(monkeypatch, lambda node: 1.1)
        after = corrected(context, begin, model, time.monotonic() + 60)
        assert after.model is model
        assert len(compared) == len(after.measured) == 8
        message = "8 whole models were measured, and learned costs corrected by 0 of them"
        assert context.notes == [message]


def test_graphs_that_are_refused_are_not_measured_and_their_files_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def refuse(models: Sequence[str], *_: Any, **__: Any) -> None:
        written.extend(models)
        raise BackendError(f"refused number {len(written) // 2}")

    monkeypatch.setattr("xrlflow.pipeline.choose.measure", refuse)
    with begun(tmp_path) as (context, begin, model):
        after = corrected(context, begin, model, time.monotonic() + 60)
        assert len(set(written)) > 4
        assert sum(Path(path).exists() for path in set(written)) == 4
    assert after.measured == ()
    assert context.notes == [
        "8 graphs could not be measured; the first: refused number 1",
        "learned costs were not corrected: no whole model was measured",
    ]


def found_by_taso(context: Context, start: Start) -> Explored:
    """What TASO's search finds, each graph once, without the start."""
    explored = explore(
        replace(context, options=replace(OPTIONS, search="taso", budget=30, train_steps=0)), start
    )
    once = {node.state.fingerprint: node for node in explored.proposals if node.path is not None}
    return replace(explored, proposals=tuple(once.values()))


def fingerprints(nodes: Iterable[SearchNode]) -> list[int]:
    return [node.state.fingerprint for node in nodes]


def test_what_was_measured_to_be_faster_is_proposed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster: dict[int, float] = {}

    def ratio(node: SearchNode) -> float:
        if len(faster) == 6:
            return 0.9
        return faster.setdefault(node.state.fingerprint, 1.1 + 0.1 * len(faster))

    new = correct._graphs_to_measure
    monkeypatch.setattr(
        correct, "_graphs_to_measure", lambda *given: new(*given) if len(compared) < 16 else []
    )
    with begun(tmp_path) as (context, begin, model):
        compared = measuring(monkeypatch, ratio)
        after = corrected(context, begin, model, time.monotonic() + 60)
        result = ordered(context, after, found_by_taso(context, after))
    assert fingerprints(result.proposals)[:4] == list(reversed(faster))[:4]
    for node in result.proposals:
        assert node.cost == pytest.approx(after.model.cost(node.state.graph))


def test_a_slow_model_is_compared_for_as_long_as_an_interval_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparisons without an interval are not kept."""
    limits: list[float] = []

    def refuse(*_: Any, time_limit: float, **__: Any) -> None:
        limits.append(time_limit)
        raise BackendError("refused")

    monkeypatch.setattr("xrlflow.pipeline.choose.measure", refuse)
    with begun(tmp_path) as (context, begin, model):
        context.clock.latency, context.clock.loading = 0.2, 0.5
        corrected(context, begin, model, time.monotonic() + 600)
        careful = context.clock.budget.careful_comparison
        assert limits == [careful] * len(limits) != []
        # Fewer than six rounds, each of two turns with two runs, have no interval.
        assert careful > max(context.clock.budget.each_comparison, 2 * 0.5 + 6 * 4 * 0.2)


def test_proposals_of_the_search_are_measured_and_the_fastest_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(tmp_path) as (context, begin, _):
        explored = found_by_taso(context, begin)
        *quick, last = explored.proposals
        assert len(quick) >= 2
        compared = measuring(monkeypatch, lambda node: 1.2 if node is last else 0.8)
        begin = replace(
            begin, measured=((Ratio(1.1, 1.09, 1.11), quick[1]), (Ratio(0.9, 0.8, 1.0), quick[0]))
        )
        result = ordered(context, begin, explored)
        assert fingerprints(result.proposals[:2]) == fingerprints([last, quick[1]])
        assert fingerprints(compared) == fingerprints([*quick[2:], last])
        assert sorted(fingerprints(result.proposals)) == sorted({*fingerprints(explored.proposals)})
        assert context.notes[-1] == f"measured of the search's proposals: {len(compared)}"


def test_what_was_not_measured_comes_before_what_may_be_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(tmp_path) as (context, begin, _):
        explored = found_by_taso(context, begin)
        first, *others = explored.proposals
        context.clock.hurry()  # nothing is measured
        assert not measuring(monkeypatch, lambda node: 1.0)
        result = ordered(context, replace(begin, measured=((Ratio(1.0, 0.9, 1.1), first),)), explored)
        assert fingerprints(result.proposals) == [*fingerprints(others), first.state.fingerprint]


@pytest.mark.parametrize(("low", "high", "wanted"), [(0.3, 4.8, 0), (1.19, 1.21, -1), (0.0, math.inf, 0)])
def test_a_vague_measurement_outweighs_no_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, low: float, high: float, wanted: int
) -> None:
    """The last seems to be 1.2 times faster than costs expect of the first."""
    with begun(tmp_path) as (context, begin, model):
        explored = found_by_taso(context, begin)
        first, *_, last = explored.proposals
        context.clock.hurry()  # nothing is measured
        factor = model.predict(begin.base.state.graph, first.state.graph).median
        ratio = Ratio(1.2 * factor, low * factor, high * factor)
        result = ordered(context, replace(begin, measured=((ratio, last),)), explored)
        assert result.proposals[0].state.fingerprint == explored.proposals[wanted].state.fingerprint


def test_an_interrupt_while_proposals_are_measured_keeps_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(node: SearchNode) -> float:
        raise KeyboardInterrupt

    with begun(tmp_path) as (context, begin, _):
        explored = found_by_taso(context, begin)
        measuring(monkeypatch, interrupt)
        result = ordered(context, begin, explored)
        assert context.clock.hurried
        assert fingerprints(result.proposals) == fingerprints(explored.proposals)


def test_it_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(tmp_path) as (context, begin, model):
        compared = measuring(monkeypatch, lambda node: time.sleep(0.1) or 1.1)
        now = time.monotonic()
        corrected(context, begin, model, now + 3)
        assert time.monotonic() - now < 5
        assert compared
        assert corrected(context, begin, model, time.monotonic()).model is model


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
        pytest.param({}, True, marks=pytest.mark.whole),
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

    monkeypatch.setattr("xrlflow.pipeline.prepare._PROFILING", 0.0)  # prices do not matter here
    monkeypatch.setattr(attempts, "corrected", record)
    monkeypatch.setattr(attempts, "explore", lambda context, start: Explored(None, ()))  # type: ignore[arg-type]
    monkeypatch.setattr(attempts, "finish", lambda _: Finished(None, ""))
    with opened(models.small("squeezenet"), replace(OPTIONS, **options), None, time.monotonic()) as result:
        context = result if options.get("measure") is False else with_feeds(result)
        now = time.monotonic()
        attempted(context)
        assert bool(given) == wanted
        training = context.clock.budget.train_until
    if wanted:
        assert training is not None
        assert now + 0.3 * (training - now) < given[0] < training
