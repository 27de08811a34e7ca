"""Looking ahead on small graphs whose best rewriting is known, and on valleys."""

from __future__ import annotations

import time

import pytest

from models.valleys import FAMILIES, Valley, catalogue
from tests.rewrite.test_engine import layered
from tests.rewrite.toy import TOY
from tests.search.test_search import RULES, Weighted, start, valley
from xrlflow.api import optimize
from xrlflow.cost import Roofline
from xrlflow.search import Limits, greedy, lookahead, replay


def test_one_step_ahead_is_greedy() -> None:
    base = start(layered(3), TOY, Weighted())
    ahead = lookahead(base.state, base.cost, Limits(), depth=1).best
    assert [s.key for s in ahead.trace] == [s.key for s in greedy(base.state, base.cost, Limits()).best.trace]
    assert ahead.trace


def test_two_steps_ahead_pass_what_greedy_does_not() -> None:
    base = start(valley(), RULES, Weighted())
    assert greedy(base.state, base.cost, Limits()).best.cost == base.cost
    result = lookahead(base.state, base.cost, Limits(), depth=2)
    assert [s.rule for s in result.best.trace] == ["PushTransposeThroughRelu", "CancelTransposes"]
    assert result.best.cost == Weighted().cost(result.best.state.graph) == 1.0
    assert result.shortlist[0] == result.best


def test_a_valley_is_passed_by_as_many_steps_as_it_has() -> None:
    charted = next(c for c in catalogue() if c.valley.family.name == "wide-groups" and len(c.climbs) == 2)
    base = charted.valley.start()
    two = lookahead(base.state, base.cost, Limits(), depth=2).best
    three = lookahead(base.state, base.cost, Limits(), depth=3).best
    assert two.cost == base.cost
    assert three.cost < base.cost
    assert charted.reached(three.cost)


def test_the_trace_can_be_replayed() -> None:
    base = Valley(FAMILIES["adapters"], 2, 1, 0).start()
    found = lookahead(base.state, base.cost, Limits(), depth=2).best
    assert found.cost < base.cost
    *_, last = replay(base.state, found.trace)
    assert last.fingerprint == found.state.fingerprint


def test_limits_hold() -> None:
    base = Valley(FAMILIES["gates"], 1, 2, 0).start()
    result = lookahead(base.state, base.cost, Limits(budget=3), depth=3)
    assert result.expanded == 3
    assert result.best.cost == base.cost
    result = lookahead(base.state, base.cost, Limits(deadline=time.monotonic()), depth=3)
    assert result.expanded == 0


def test_an_interrupted_look_keeps_the_best_so_far() -> None:
    base = start(layered(2), TOY, Weighted())

    def interrupt(expanded: int, best: float) -> None:
        if expanded:
            raise KeyboardInterrupt

    result = lookahead(base.state, base.cost, Limits(progress=interrupt), depth=2)
    assert result.interrupted
    assert len(result.best.trace) == 1


def test_no_candidates() -> None:
    base = start(valley(), (), Weighted())
    assert lookahead(base.state, base.cost, Limits(), depth=3).best.trace == ()


def test_a_depth_of_nothing_is_refused() -> None:
    base = start(valley(), RULES, Weighted())
    with pytest.raises(ValueError, match="at least 1 is needed"):
        lookahead(base.state, base.cost, Limits(), depth=0)


@pytest.mark.parametrize("search", ["lookahead2", "lookahead3"])
def test_optimize_takes_it_by_name(search: str) -> None:
    made = optimize(
        Valley(FAMILIES["adapters"], 1, 1, 0).model(),
        search=search,
        cost=Roofline(),
        measure=False,
        threads=1,
    )
    assert made.report.search == search
    assert made.report.cost_after < made.report.cost_before
    assert made.verification is not None
    assert made.verification.verified
