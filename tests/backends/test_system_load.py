"""Whether other programs disturbed a measurement, from invented readings."""

from __future__ import annotations

import pytest

from xrlflow.backends import system_load
from xrlflow.backends.system_load import Reading, judge

START = Reading(busy=100.0, steal=5.0, own=10.0, clock=50.0)


def after(seconds: float, own: float, other: float, steal: float = 0.0) -> Reading:
    """The counters `seconds` later, after this process used `own` CPU seconds and other processes used `other`."""
    return Reading(
        busy=START.busy + own + other,
        steal=START.steal + steal,
        own=START.own + own,
        clock=START.clock + seconds,
    )


def test_alone() -> None:
    result = judge(START, after(10, own=19.5, other=0.1), threads=2, cpus=2)
    assert not result.disturbed
    assert result.own == pytest.approx(1.95)
    assert result.other == pytest.approx(0.008)  # less a tick for each CPU


def test_a_competitor_on_our_cpus() -> None:
    result = judge(START, after(10, own=12, other=7), threads=2, cpus=2)
    assert result.disturbed
    assert result.other_fraction == pytest.approx((0.7 - 0.002) / 2)


def test_others_may_use_half_of_the_cpus_that_we_leave() -> None:
    assert not judge(START, after(10, own=9.9, other=4.0), threads=1, cpus=2).disturbed
    assert judge(START, after(10, own=9.9, other=9.0), threads=1, cpus=2).disturbed
    assert not judge(START, after(10, own=79, other=200), threads=8, cpus=64).disturbed


def test_stolen_time_disturbs() -> None:
    assert judge(START, after(10, own=19, other=0, steal=1.0), threads=2, cpus=2).disturbed


def test_a_tick_more_or_less_is_no_load() -> None:
    result = judge(START, after(0.05, own=0.1, other=0.02, steal=0.01), threads=2, cpus=2)
    assert not result.disturbed
    assert result.other == 0.0


def test_more_threads_than_cpus() -> None:
    assert judge(START, after(10, own=19, other=0.1), threads=8, cpus=2).threads == 2


def test_readings_grow() -> None:
    first = system_load.read()
    second = system_load.read()
    assert second.clock >= first.clock
    assert second.own >= first.own
