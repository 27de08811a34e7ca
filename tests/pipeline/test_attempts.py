"""Another cost model guides a search where nothing was faster by the first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

import models
import xrlflow
from xrlflow.cost import AdditiveCost, CostModel, Learned, Roofline, load_network
from xrlflow.cost.pretrained import PRETRAINED
from xrlflow.ir import Edit, Graph, Node
from xrlflow.options import AUTO, Options
from xrlflow.pipeline import attempts
from xrlflow.pipeline.attempts import Attempt, attempted
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.finish import Candidates, Finished
from xrlflow.pipeline.prepare import Start, opened, with_feeds
from xrlflow.pipeline.results import _notes

OPTIONS = Options(search="greedy", cost="auto", backend="onnxruntime", threads=1, time_limit=60.0)


class Named(AdditiveCost):
    """All operators cost the same."""

    def __init__(self, name: str) -> None:
        super().__init__({})
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def price(self, graph: Graph, node: Node, in_types: object) -> float:
        return 1e-6


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "cost_model", lambda context, cost: Named(cost))


@contextmanager
def context(options: Options = OPTIONS) -> Iterator[Context]:
    with opened(models.small("squeezenet"), options, None, time.monotonic()) as result:
        yield with_feeds(result)


def finishing(monkeypatch: pytest.MonkeyPatch, *kept: bool, interrupting: int = -1) -> list[str]:
    """The cost models whose results were judged; each is kept or not, and Ctrl-C comes in one of them."""
    judged: list[str] = []

    def plain(context: Context, start: Start, explored: Explored) -> Candidates:
        yield from ()
        judged.append(start.model.name)
        if len(judged) - 1 == interrupting:
            raise KeyboardInterrupt
        result = explored.result.best if kept[len(judged) - 1] else None
        return Finished(result, f"as {start.model.name} says")

    monkeypatch.setitem(attempts.CANDIDATES, "onnxruntime", plain)  # type: ignore[arg-type]
    monkeypatch.setattr("xrlflow.pipeline.choose.plain", plain)
    return judged


@pytest.mark.parametrize("kept", [(True,), (False, True), (False, False, True)])
def test_the_first_result_that_is_kept_is_the_last_attempt(
    monkeypatch: pytest.MonkeyPatch, kept: tuple[bool, ...]
) -> None:
    judged = finishing(monkeypatch, *kept)
    with context() as known:
        result = attempted(known)
        assert judged == list(AUTO[: len(kept)])
        assert result.start.model.name == judged[-1]
        assert result.finished.accepted is not None
        output = [f"by {name} costs: as {name} says" for name in judged[:-1]]
        assert [note for note in known.notes if note.startswith("by ")] == output


def test_if_nothing_is_kept_the_first_attempt_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = finishing(monkeypatch, False, False, False)
    with context() as known:
        result = attempted(known)
        assert [n for n in known.notes if n.startswith("by ")] == [
            f"by {c} costs: as {c} says" for c in AUTO[1:]
        ]
    assert judged == list(AUTO)
    assert result.finished == Finished(None, "as profiled says")


def test_later_attempts_make_no_kernels_and_have_the_time_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = finishing(monkeypatch, False, True)
    reserved: list[float] = []

    def with_kernels(context: Context, start: Start, explored: Explored) -> Candidates:
        reserved.append(context.clock.reserved)
        return attempts.choose.plain(context, start, explored)

    monkeypatch.setitem(attempts.CANDIDATES, "auto", with_kernels)  # type: ignore[arg-type]
    monkeypatch.setattr(attempts, "lacking", lambda context: None)
    monkeypatch.setattr(attempts, "compile_seconds", lambda context: 5.0)
    with context(replace(OPTIONS, backend="auto")) as known:
        attempted(known)
        assert known.clock.reserved == known.clock.compiling == 0.0
    assert reserved == [5.0]
    assert judged == ["profiled", "learned"]


def test_learned_costs_that_were_asked_for_have_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = Learned(Roofline(), load_network(PRETRAINED))
    monkeypatch.setattr(attempts, "cost_model", lambda context, cost: learned)
    given: list[float] = []
    monkeypatch.setattr(attempts, "start", lambda context, model: given.append(model.until))
    monkeypatch.setattr(attempts, "explore", lambda context, begin: None)
    finishing(monkeypatch)
    with context() as known, pytest.raises(AttributeError):  # there is no start to judge
        attempted(known)
    assert given == [float("inf")]


def test_ctrl_c_in_a_later_attempt_keeps_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = finishing(monkeypatch, False, True, interrupting=1)
    with context() as known:
        result = attempted(known)
        assert "interrupted: the original is kept" in known.notes
    assert judged == ["profiled", "learned"]
    assert result.finished == Finished(None, "as profiled says")


def test_ctrl_c_in_the_first_attempt_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    finishing(monkeypatch, False, interrupting=0)
    with context() as known, pytest.raises(KeyboardInterrupt):
        attempted(known)


def test_after_an_interrupted_search_there_is_no_other_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = finishing(monkeypatch, False, True)
    with context() as known:
        known.clock.hurry()
        attempted(known)
    assert judged == ["profiled"]


def test_without_time_there_is_no_other_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = finishing(monkeypatch, False, True)
    with context() as known:
        known.clock.deadline = time.monotonic() + 1.0
        attempted(known)
    assert judged == ["profiled"]


def test_a_later_attempt_shares_out_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[float, float]] = []
    start = SimpleNamespace(model=SimpleNamespace(name="x"))

    def attempt(known: Context, cost: str, later: bool = False) -> Attempt:
        budget = known.clock.budget
        begun.append((budget.begin, budget.until))
        return Attempt(known, start, None, Finished(None, ""))  # type: ignore[arg-type]

    monkeypatch.setattr(attempts, "_attempt", attempt)
    with context() as known:
        begin, until = known.clock.budget.begin, known.clock.budget.until
        attempted(known)
    assert [u for _, u in begun] == [until, until, until]
    assert begun[0][0] == begin < begun[1][0] < begun[2][0]


def test_prices_that_take_too_long_end_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are about two thousand substitutions in NasRNN whose layers share weights."""

    class Slow(Learned):
        def delta(self, graph: Graph, edit: Edit) -> float:
            self.until -= 60.0  # as if so much time had passed
            return super().delta(graph, edit)

    def cost_model(context: Context, cost: str) -> CostModel:
        return Slow(Roofline(), load_network(PRETRAINED)) if cost == "learned" else Named(cost)

    monkeypatch.setattr(attempts, "cost_model", cost_model)
    judged = finishing(monkeypatch, False, True)
    with context() as known:
        attempted(known)
        assert "there was no time for a search by learned costs (--time-limit)" in known.notes
    assert judged == ["profiled", "roofline"]


def test_what_several_attempts_say_is_said_once() -> None:
    with context() as known:
        known.notes.extend(["late", "other", "late"])
        assert _notes(known, Finished(None, "")) == (*known.imported.notes, "late", "other")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({}, AUTO), ({"cost": "learned"}, ("learned",)), ({"measure": False}, AUTO[:1]), ({"search": "random"}, AUTO[:1]),
     ({"search": "rlflow"}, AUTO[:1]), ({"search": "mcts"}, AUTO), ({"train_steps": 8}, AUTO[:1]),
     ({"backend": "hybrid"}, AUTO[:1]), ({"backend": "tvm"}, AUTO[:1])],
)  # fmt: skip
def test_which_costs_are_tried(changed: dict[str, object], expected: tuple[str, ...]) -> None:
    assert Options(**({"cost": "auto"} | changed)).costs == expected  # type: ignore[arg-type]


def test_the_report_names_the_cost_that_led() -> None:
    result = xrlflow.optimize(
        models.small("squeezenet"), search="greedy", cost="auto", measure=False, threads=1
    )
    assert result.report.cost_model == "profiled"
