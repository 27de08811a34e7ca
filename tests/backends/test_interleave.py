"""The measuring loop, with a clock that only the runs advance."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from xrlflow.backends.interleave import interleave, time_alone, turns
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.system_load import Reading


class Bench:
    """Models with given run times, plus noise and drift, and a log of their runs."""

    def __init__(self, *seconds: float, noise: float = 0.0, drift: float = 0.0) -> None:
        self.now = 0.0
        self.log: list[int] = []
        self.rng = np.random.default_rng(0)
        self.noise, self.drift = noise, drift
        self.runs = [lambda index=index: self.run(index) for index in range(len(seconds))]
        self.seconds = seconds

    def run(self, index: int) -> None:
        self.log.append(index)
        slow = 1.0 + self.drift * self.now + self.noise * float(self.rng.exponential())
        self.now += self.seconds[index] * slow

    def clock(self) -> float:
        return self.now

    def rounds(self) -> str:
        """The sequence of models that ran, without the warm-up of the first two."""
        return "".join(map(str, self.log)).lstrip("0").lstrip("1")

    def load(self) -> Reading:
        return Reading(busy=self.now, steal=0.0, own=self.now, clock=self.now)


def test_ratios_are_right_and_the_control_holds_one() -> None:
    bench = Bench(0.010, 0.005, 0.020, noise=0.05)
    result = interleave(bench.runs, threads=1, time_limit=60, clock=bench.clock, read_load=bench.load)
    assert result.converged
    assert result.speedups[0].low <= 2.0 <= result.speedups[0].high
    assert result.speedups[1].low <= 0.5 <= result.speedups[1].high
    assert result.control is not None
    assert result.control.low <= 1.0 <= result.control.high
    assert all(speedup.width < 0.01 for speedup in result.speedups)
    assert not result.load.disturbed
    assert [round(latency.median_ms) for latency in result.latencies] == [10, 5, 21]


def test_drift_cancels() -> None:
    bench = Bench(0.010, 0.005, noise=0.02, drift=0.2)
    result = interleave(bench.runs, threads=1, time_limit=60, clock=bench.clock, read_load=bench.load)
    assert result.speedup.median == pytest.approx(2.0, rel=0.005)


def test_a_turn_never_follows_one_of_the_same_model() -> None:
    bench = Bench(0.010, 0.010, noise=0.5)
    result = interleave(
        bench.runs, threads=1, time_limit=5, target_width=1e-9, clock=bench.clock, read_load=bench.load
    )
    # A turn consists of an untimed and a timed run.
    assert "000" not in bench.rounds()
    assert "111" not in bench.rounds()
    assert result.samples > 16


def test_fast_models_are_timed_in_batches() -> None:
    bench = Bench(1e-5, 3e-3)
    result = interleave(bench.runs, threads=1, time_limit=1, clock=bench.clock, read_load=bench.load)
    # Each round has two turns, each with an untimed run and a batch. Sometimes another run separates two turns of the
    # same model.
    assert bench.rounds().count("0") / result.samples == pytest.approx(2 * 201, rel=0.05)
    assert bench.rounds().count("1") / result.samples == pytest.approx(2 * 2, rel=0.2)


def test_the_time_limit_holds_but_one_round_is_taken() -> None:
    bench = Bench(1.0, 1.0)
    result = interleave(bench.runs, threads=1, time_limit=0.5, clock=bench.clock, read_load=bench.load)
    assert result.samples == 1
    assert (result.speedup.low, result.speedup.high) == (0.0, float("inf"))
    assert not result.converged
    bench = Bench(0.05, 0.05, noise=3.0)
    result = interleave(bench.runs, threads=1, time_limit=20, clock=bench.clock, read_load=bench.load)
    assert not result.converged
    assert 10 < result.seconds < 24


def test_without_a_control_a_round_is_one_turn_each() -> None:
    bench = Bench(0.010, 0.005)
    result = interleave(
        bench.runs, threads=1, time_limit=60, control=False, clock=bench.clock, read_load=bench.load
    )
    assert result.control is None
    assert result.trustworthy
    assert result.speedup.median == pytest.approx(2.0)


@pytest.mark.parametrize("slots", [2, 3, 4, 7])
def test_every_slot_has_every_place_equally_often(slots: int) -> None:
    places = np.zeros((slots, slots), int)
    for index in range(8 * slots):
        for place, slot in enumerate(turns(slots, index)):
            places[slot, place] += 1
    assert (places == 8).all()


def test_nonsense_is_refused() -> None:
    bench = Bench(0.01, 0.01)
    with pytest.raises(BackendError, match="at least two models"):
        interleave(bench.runs[:1], threads=1, time_limit=1)
    with pytest.raises(BackendError, match="above zero"):
        interleave(bench.runs, threads=1, time_limit=0)


def test_errors_of_a_run_come_through_and_the_collector_is_back() -> None:
    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        interleave([fails, fails], threads=1, time_limit=1)
    assert gc.isenabled()


def test_timing_alone_is_cheap() -> None:
    bench = Bench(1e-4, noise=0.01)
    result = time_alone(bench.runs[0], time_limit=0.02, clock=bench.clock)
    assert result.median_ms == pytest.approx(0.1, rel=0.03)
    assert result.p10_ms <= result.median_ms <= result.p90_ms
    assert bench.now < 0.04
    slow = Bench(1.0)
    assert time_alone(slow.runs[0], time_limit=0.02, clock=slow.clock).samples == 1
    assert result.seconds == pytest.approx(result.median_ms / 1e3)
