"""The parts of the pipeline that the interfaces do not show: the clock, and the loop over candidates."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest

import xrlflow
from tests.rules.harness import model
from xrlflow.cost import Roofline
from xrlflow.cost.model import InTypes
from xrlflow.ir import Graph, Node
from xrlflow.options import BACKENDS, OptionError, Options
from xrlflow.pipeline.attempts import CANDIDATES
from xrlflow.pipeline.context import Clock
from xrlflow.pipeline.explore import explore
from xrlflow.pipeline.finish import Candidates, Finished, finish
from xrlflow.pipeline.prepare import cost_model, opened, start, with_feeds
from xrlflow.pipeline.verifier import VerificationFailed
from xrlflow.search import SearchNode


def test_a_phase_does_not_count_those_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("xrlflow.pipeline.context.time.monotonic", lambda: now[0])
    clock = Clock(100.0, 160.0)
    with clock.phase("measure"):
        now[0] += 2.0
        with clock.phase("verify"):
            now[0] += 5.0
        now[0] += 1.0
    with clock.phase("measure"):
        now[0] += 0.5
    with clock.phase("import", 100.0):
        now[0] += 0.25
    assert clock.phases == {"verify": 5.0, "measure": 3.5, "import": 8.75}


def test_a_phase_that_fails_is_counted() -> None:
    clock = Clock(0.0, 60.0)
    with pytest.raises(ZeroDivisionError), clock.phase("search"):
        raise ZeroDivisionError
    with clock.phase("verify"):
        pass
    assert list(clock.phases) == ["search", "verify"]


def test_every_backend_has_its_candidates() -> None:
    assert set(CANDIDATES) == set(BACKENDS)


def test_what_cannot_be_compared_is_not_called_different() -> None:
    proto = model(
        "agraph (float[2,4] x) => (float[2,4] y) { a = Neg(x) b = Neg(a) c = RandomNormalLike(x) y = Add(b, c) }"
    )
    result = xrlflow.optimize(proto, search="greedy", cost="roofline", measure=False, threads=1)
    report = result.report
    assert repr(result) == f"<Result for {report.model}: the original ({report.reason})>", (
        "one line at a prompt"
    )
    assert "cannot be verified" in report.reason
    assert (report.verified, report.max_error) == (None, None)


def test_phases_take_values_and_return_values(tmp_path: Path) -> None:
    """Each can be called by itself, twice, and finds the same."""
    proto = model("agraph (float[N,4] x) => (float[N,4] y) { a = Neg(x) b = Neg(a) y = Relu(b) }")
    options = Options(search="greedy", cost="roofline", measure=False, threads=1, time_limit=30.0)
    with opened(proto, options, None, time.monotonic()) as context:
        assert with_feeds(context) is context  # nothing is measured
        prices = cost_model(context, "roofline")
        begins = [start(context, prices) for _ in range(2)]
        result = [explore(context, begin) for begin in begins]
        assert begins[0].base.state.fingerprint == begins[1].base.state.fingerprint
        assert result[0].result.best.trace == result[1].result.best.trace
        finished = finish(CANDIDATES["onnxruntime"](context, begins[0], result[0]))
        assert finished.accepted is not None
        assert [n.op for n in finished.accepted.state.graph.nodes()] == ["Relu"]
        folder = Path(context.folder)
        assert folder.is_dir()
    assert not folder.exists()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1e-6])
@pytest.mark.parametrize("search", ["greedy", "xrlflow", "mcts"])
def test_a_cost_models_that_gives_no_seconds_is_named(seconds: float, search: str) -> None:
    """It is the user's own; no agent is to blame."""

    class Odd(Roofline):
        def price(self, graph: Graph, node: Node, in_types: InTypes) -> float:
            return seconds if node.op == "Relu" else super().price(graph, node, in_types)

    proto = model("agraph (float[N,4] x) => (float[N,4] y) { a = Neg(x) b = Neg(a) y = Relu(b) }")
    with pytest.raises(OptionError, match=r"cost 'roofline' gives Relu .* seconds: give 0 or more"):
        xrlflow.optimize(proto, search=search, cost=Odd(), measure=False, threads=1)


class Offered:
    """A candidate that is judged as it is told."""

    def __init__(self, result: Finished | VerificationFailed) -> None:
        self.result = result

    def judged(self) -> Finished:
        if isinstance(self.result, VerificationFailed):
            raise self.result
        return self.result


NODE = SearchNode(cast(Any, None), None, 1.0)
KEPT, LOST, WRONG = Finished(NODE, "faster"), Finished(None, "slower"), VerificationFailed("it is wrong")


def test_candidates_are_judged_until_one_is_kept() -> None:
    answers: list[Finished] = []

    def candidates() -> Candidates:
        answers.append((yield Offered(LOST)))
        answers.append((yield Offered(KEPT)))
        pytest.fail("it goes on")

    assert finish(candidates()) is KEPT
    assert answers == [LOST]


def test_a_source_says_why_nothing_is_kept() -> None:
    def nothing() -> Candidates:
        yield from ()
        return LOST

    def one(last: Finished | None) -> Candidates:
        yield Offered(Finished(None, "not faster"))
        return last

    assert finish(nothing()) is LOST
    assert finish(one(None)).reason == "not faster"
    assert finish(one(LOST)) is LOST


def test_a_source_may_answer_what_is_wrong_by_another_candidate() -> None:
    def candidates() -> Candidates:
        with pytest.raises(VerificationFailed, match="it is wrong"):
            yield Offered(WRONG)
        yield Offered(KEPT)
        return None

    def helpless() -> Candidates:
        yield Offered(WRONG)
        return LOST

    assert finish(candidates()) is KEPT
    with pytest.raises(VerificationFailed) as caught:
        finish(helpless())
    assert caught.value is WRONG
