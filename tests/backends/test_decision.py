"""Decisions from the estimates of many processes, and the reported figures: properties and a small simulation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.backends.worlds import WORLDS, World, simulate
from xrlflow.backends.decision import (
    DECIDE_AT_MOST,
    FEWEST,
    SHIP,
    Rule,
    confirm,
    decide,
    needed,
    pooled,
    settle,
)
from xrlflow.backends.pairs import Estimate
from xrlflow.backends.results import Verdict
from xrlflow.backends.statistics import Pooled, pool


def exact(ratios: Sequence[float]) -> list[Estimate]:
    """Estimates without errors of their own."""
    return [Estimate(ratio, None, 1, 0.0) for ratio in ratios]


def drawing(ratios: Sequence[float]) -> Callable[[], Estimate | None]:
    left = iter(exact(ratios))
    return lambda: next(left, None)


def around(mean: float, spread: float, count: int, seed: int = 0) -> list[float]:
    result: list[float] = np.random.default_rng(seed).normal(mean, spread, count).tolist()
    return result


@pytest.mark.parametrize("most", [3, 6, 8, 12, 40, 80])
def test_looks_share_the_error(most: int) -> None:
    looks = SHIP.analyses(most)
    assert list(looks) == sorted(set(looks))
    assert looks[-1] == most
    assert looks[0] == (min(SHIP.first, most // 2) if most >= 2 * FEWEST else most)
    spent = [0.0, *(SHIP.spent(look, most) for look in looks)]
    shares = [b - a for a, b in itertools.pairwise(spent)]
    assert min(shares) > 0.0
    assert math.fsum(shares) == pytest.approx(SHIP.significance) == 0.025


def test_a_clear_gain_is_decided_at_the_first_look() -> None:
    result = decide(drawing(around(0.05, 0.004, 40)), 40)
    assert result.verdict is Verdict.FASTER
    assert len(result.estimates) == SHIP.first
    assert result.interval is not None
    assert result.interval.low > 1.003


def test_what_will_not_be_faster_is_given_up() -> None:
    result = decide(drawing(around(0.0, 0.004, 40)), 40)
    assert result.verdict is Verdict.NOT_FASTER
    assert len(result.estimates) == SHIP.first


def test_what_is_in_doubt_takes_longer() -> None:
    result = decide(drawing(around(0.008, 0.012, 40)), 40)
    assert len(result.estimates) > SHIP.first


def test_a_gain_below_the_bar_is_none() -> None:
    """The gain is known precisely, but it is too small to be worth a file."""
    result = decide(drawing(around(0.002, 1e-5, 40)), 40)
    assert result.verdict is Verdict.NOT_FASTER
    assert result.interval is not None
    assert result.interval.low > 1.0


def test_two_estimates_decide_nothing() -> None:
    result = decide(drawing([0.5, 0.5]), 40)
    assert result.verdict is Verdict.TOO_FEW
    assert result.interval is None


def test_few_that_agree_by_luck_decide_nothing() -> None:
    """In three sessions the weights may happen to lie well: equal estimates of a gain of 1% do not suffice."""
    assert decide(drawing([0.01] * 3), 3).verdict is Verdict.NOT_FASTER
    assert decide(drawing([0.10] * 3), 3).verdict is Verdict.FASTER


def test_time_that_runs_out_is_a_last_look() -> None:
    """The last analysis may use up all of the remaining significance. With only its regular share, this case would be
    in doubt."""
    estimates = [0.03, 0.02, 0.025, 0.04, 0.01, 0.035]
    assert decide(drawing(estimates), 40).verdict is Verdict.FASTER
    early = pool(estimates).interval(SHIP.spent(6, 40))
    assert early.low < math.exp(SHIP.threshold)


def test_the_figure_has_nothing_of_what_decided() -> None:
    deciding, after = around(0.05, 0.004, SHIP.first), around(0.02, 0.004, 60, seed=1)
    answer = settle(drawing([*deciding, *after]), 60)
    assert answer.faster
    assert answer.figure == confirm(drawing(after), answer.confirming)
    assert answer.confirming == needed(exact(deciding))


def test_how_many_confirm_is_known_before_the_first_does() -> None:
    """The number of confirming processes does not depend on their results, so they are not analysed repeatedly."""
    deciding = around(0.05, 0.008, SHIP.first)
    counts = {
        settle(drawing([*deciding, *around(mean, 0.02, 60)]), 60).confirming for mean in (-0.05, 0.0, 0.2)
    }
    assert counts == {needed(exact(deciding))}


def test_what_is_slower_when_measured_again_is_not_faster() -> None:
    deciding = around(0.05, 0.004, SHIP.first)
    assert settle(drawing([*deciding, *around(-0.03, 0.004, 60)]), 60).verdict is Verdict.REFUTED
    assert settle(
        drawing([*deciding, *around(0.0, 0.004, 60)]), 60
    ).faster  # no choice by the figure otherwise


def test_where_time_suffices_for_one_set_there_is_no_figure() -> None:
    answer = settle(drawing([0.2] * 5), 5)
    assert answer.faster
    assert answer.figure is None


def test_what_is_in_doubt_may_take_the_processes_of_the_figure() -> None:
    """With half of the processes a gain of 10% is in doubt, with all of them it is not. To miss a gain is worse than to
    report no figure."""
    estimates = [0.10, -0.04, 0.24, 0.12, 0.04, 0.12, 0.14, 0.06, 0.10, 0.08]
    assert decide(drawing(estimates), 5).verdict is Verdict.NOT_FASTER
    answer = settle(drawing(estimates), 10)
    assert answer.faster
    assert len(answer.decision.estimates) > 5


def test_a_clear_gain_leaves_few_processes_for_the_figure() -> None:
    answer = settle(drawing(around(0.3, 0.01, 8)), 8)
    assert len(answer.decision.estimates) == 4
    assert answer.confirming == 4
    assert answer.figure is not None


def test_what_is_slower_next_to_neighbours_is_not_faster_on_average() -> None:
    """The weighted mean prefers the processes without disturbance, but the plain mean must show a gain, too."""
    rng = np.random.default_rng(0)
    quiet = [Estimate(r, None, 11, 0.005) for r in rng.normal(0.02, 0.003, 24)]
    noisy = [Estimate(r, None, 11, 0.15) for r in rng.normal(-0.08, 0.02, 16)]
    both = [e for i in range(8) for e in (*quiet[3 * i : 3 * i + 3], *noisy[2 * i : 2 * i + 2])]
    assert pooled(both).interval(0.01).low > math.exp(SHIP.threshold)
    left = iter(both)
    assert decide(lambda: next(left, None), 40).verdict is Verdict.NOT_FASTER
    left = iter(quiet)
    assert decide(lambda: next(left, None), 24).verdict is Verdict.FASTER


def test_one_bad_process_of_three_ends_nothing() -> None:
    """Three estimates hardly tell their own error. Together with the later ones, the first model is clearly faster."""
    left = iter([Estimate(r, None, 12, 0.005) for r in (0.05, -0.05, 0.05, 0.055, 0.045, 0.05, 0.055, 0.05)])
    assert len(decide(lambda: next(left, None), 8).estimates) == 8
    slower = iter([Estimate(r, None, 12, 0.005) for r in (-0.04, -0.05, -0.06, -0.05, -0.05, -0.05)])
    assert len(decide(lambda: next(slower, None), 6).estimates) == 3


@pytest.mark.parametrize(("mean", "drawn"), [(-0.03, 6), (-0.05, 3)])
def test_hope_counts_on_the_processes_to_come(mean: float, drawn: int) -> None:
    """Whether to go on depends on the interval that six processes would have. Compared with three, its error is smaller
    and it has more degrees of freedom. Only with both of them, -3% does not look hopeless."""
    off = 0.02 * math.sqrt(3.0)
    left = iter([Estimate(mean + d, None, 12, 0.005) for d in (-off, 0.0, off, -off, 0.0, off)])
    assert len(decide(lambda: next(left, None), 6).estimates) == drawn


def test_a_doubt_does_not_take_all_time() -> None:
    answer = settle(drawing(around(0.006, 0.02, 80)), 80, Rule(hope=0.0))
    assert len(answer.decision.estimates) == DECIDE_AT_MOST


def test_what_does_not_stand_the_check_is_not_measured_again() -> None:
    drawn: list[float] = []

    def draw() -> Estimate:
        drawn.append(0.05)
        return Estimate(0.05 + 1e-4 * len(drawn), None, 1, 0.0)

    answer = settle(draw, 60, check=lambda: False)
    assert answer.figure is None
    assert len(drawn) == SHIP.first
    drawn.clear()
    assert settle(draw, 60, check=lambda: True).figure is not None


def test_what_is_not_faster_is_not_checked() -> None:
    def never() -> bool:
        raise AssertionError("checked")

    assert settle(drawing(around(-0.05, 0.004, 60)), 60, check=never).verdict is Verdict.NOT_FASTER


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_the_original_against_itself_is_not_shipped(world: World) -> None:
    """At most 2.5% may ship, which are 10 of 400, plus two standard errors. `python bench/decide.py` runs the whole
    simulation."""
    assert simulate(world, 0.0, 400, seed=1).shipped <= 0.025 + 2 * math.sqrt(0.025 * 0.975 / 400)


def test_the_simulation_sees_who_looks_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: if every analysis may use all of the significance, and any gain suffices, more ships."""
    eager, interval = Rule(threshold=0.0, hope=1e-12), Pooled.interval
    monkeypatch.setattr(
        "tests.backends.worlds.settle", lambda draw, affordable: settle(draw, affordable, eager)
    )
    fair = simulate(WORLDS[0], 0.0, 400, seed=1).shipped
    monkeypatch.setattr(Pooled, "interval", lambda self, tail: interval(self, 0.025))
    assert fair < 0.03 < 0.05 < simulate(WORLDS[0], 0.0, 400, seed=1).shipped


@pytest.mark.parametrize("gain", [0.005, 0.02])
def test_what_is_reported_is_neither_too_good_nor_too_bad(gain: float) -> None:
    result = simulate(WORLDS[0], gain, 400, seed=1)
    assert result.bias is not None
    assert result.off is not None
    assert abs(result.bias) < 0.0005 + 3 * result.off
    assert result.covered is not None
    assert result.covered > 0.9
