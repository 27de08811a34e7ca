"""Turns of two models in one process, with a clock that only the test advances."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from xrlflow.backends.pairs import Estimate, Turn, errors, estimate, take_turns


@dataclass
class Bench:
    """Two models with given seconds per run. `calls` is the order of the runs. Every `stolen`-th run waits one second
    for a CPU."""

    seconds: tuple[float, float]
    stolen: int = 0
    now: float = 0.0
    waited: float = 0.0
    calls: list[int] = field(default_factory=list)

    def run(self, model: int) -> None:
        self.calls.append(model)
        self.now += self.seconds[model]
        if self.stolen and len(self.calls) % self.stolen == 0:
            self.now += 1.0
            self.waited += 1.0

    def turns(self, count: int | None, first: int = 0) -> tuple[Turn, ...]:
        runs = [lambda: self.run(0), lambda: self.run(1)]
        return take_turns(
            runs, self.seconds, count, first=first, clock=lambda: self.now, waits=lambda: [self.waited, 0.0]
        )


@pytest.mark.parametrize("first", [0, 1])
def test_turns_alternate(first: int) -> None:
    bench = Bench((0.003, 0.002))
    turns = bench.turns(6, first)
    assert [t.model for t in turns] == [first, 1 - first] * 3
    assert [t.seconds for t in turns] == pytest.approx([bench.seconds[t.model] for t in turns])
    assert bench.calls[-1] == turns[-1].model
    # A turn is an untimed and a timed run, and turns of the models alternate.
    assert bench.calls[-4:] == [first, first, 1 - first, 1 - first]


def test_slow_models_are_not_warmed_up() -> None:
    bench = Bench((2.0, 1.9))
    assert len(bench.turns(None)) == 2
    assert bench.calls == [0, 1]


def test_fast_models_run_many_times_in_a_turn() -> None:
    bench = Bench((1e-4, 1e-4))
    turns = bench.turns(2)
    assert len(bench.calls) > 40
    assert [t.seconds for t in turns] == pytest.approx([1e-4, 1e-4])


def test_waiting_for_a_cpu_is_not_the_models_time() -> None:
    turns = Bench((0.003, 0.002), stolen=5).turns(20)
    disturbed = [t for t in turns if t.held_up > 0.0]
    assert disturbed
    # If a turn waited for most of its time, a twentieth of that time is kept, because the true time is not known.
    assert all(t.seconds == pytest.approx(0.05 * 1.003, rel=0.05) for t in disturbed)
    assert estimate(turns).ratio == pytest.approx(math.log(1.5))


def turn(model: int, seconds: float, held_up: float = 0.0) -> Turn:
    return Turn(model, seconds, held_up)


def test_a_drift_through_the_process_cancels() -> None:
    turns = [turn(k % 2, math.exp(0.01 * k) * (1.1 if k % 2 == 0 else 1.0)) for k in range(12)]
    assert estimate(turns).ratio == pytest.approx(math.log(1.1))


def test_swapping_the_models_swaps_the_sign() -> None:
    turns = [turn(k % 2, 1.0 + 0.1 * math.sin(k * k), 0.01 * (k % 5)) for k in range(16)]
    swapped = [turn(1 - t.model, t.seconds, t.held_up) for t in turns]
    result, other = estimate(turns), estimate(swapped)
    assert result.ratio == pytest.approx(-other.ratio)
    assert result.pairs == other.pairs


def test_pairs_that_were_held_up_are_left_out_unless_they_are_most() -> None:
    calm = [turn(k % 2, 1.0) for k in range(9)]
    assert estimate(calm).pairs == 8
    one = [*calm[:4], turn(0, 3.0, 0.5), *calm[5:]]
    assert estimate(one).pairs == 6
    assert estimate(one).ratio == 0.0
    assert estimate([turn(k % 2, 1.0, 0.5 if k > 2 else 0.0) for k in range(9)]).pairs == 8


def test_the_control_compares_the_baseline_with_itself() -> None:
    assert estimate([turn(0, 1.0), turn(1, 2.0)]).control is None
    result = estimate([turn(0, 1.0), turn(1, 2.0), turn(0, 1.1), turn(1, 2.0)])
    assert result.control == pytest.approx(-math.log(1.1))


def test_one_turn_is_no_comparison() -> None:
    with pytest.raises(ValueError, match="a turn of each"):
        estimate([turn(0, 1.0)])


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="Linux counts it")
def test_linux_says_how_long_a_thread_waited() -> None:
    """Two processes compete for one CPU, so this one waits for some of the time."""
    cpus = os.sched_getaffinity(0)
    cpu = min(cpus)
    spin = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", spin])
    os.sched_setaffinity(0, {cpu})
    try:
        work = [lambda: sum(range(400_000))] * 2
        turns = take_turns(work, [0.01, 0.01], 40)
    finally:
        os.sched_setaffinity(0, cpus)
        other.kill()
        other.wait()
    assert any(t.held_up > 0.0 for t in turns)


def test_errors_of_few_pairs_are_near_the_mean_of_all() -> None:
    """The noise of a single pair is unknown, so its estimate must not count as precise."""
    single, quiet, noisy = (
        Estimate(0.0, None, 1, 0.0), Estimate(0.0, None, 100, 0.01), Estimate(0.0, None, 100, 0.1)
    )  # fmt: skip
    of_single, of_quiet, of_noisy = errors([single, quiet, noisy])
    assert of_quiet < of_noisy < of_single
    assert of_noisy == pytest.approx(math.sqrt(0.5 * math.pi / 100) * 0.1, rel=0.02)
    assert errors([single, single]) == [0.0, 0.0]
