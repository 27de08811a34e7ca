"""Intervals cover what they say, on samples whose median is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from xrlflow.backends.statistics import combine, median_interval

Draw = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]


def independent(rng: np.random.Generator, rounds: int) -> npt.NDArray[np.float64]:
    return rng.standard_normal(rounds) * 0.02


def heavy_tails(rng: np.random.Generator, rounds: int) -> npt.NDArray[np.float64]:
    return rng.standard_cauchy(rounds) * 0.01


def two_halves(rng: np.random.Generator, rounds: int) -> npt.NDArray[np.float64]:
    a, b = rng.exponential(0.05, (2, rounds, 2))
    return np.asarray(a - b)


def shared_measurement(rng: np.random.Generator, rounds: int) -> npt.NDArray[np.float64]:
    return np.asarray(rng.exponential(0.05, (rounds, 2)) - rng.exponential(0.05, (rounds, 1)))


def autocorrelated(rng: np.random.Generator, rounds: int) -> npt.NDArray[np.float64]:
    noise, series = rng.standard_normal(rounds), np.zeros(rounds)
    for index in range(1, rounds):
        series[index] = 0.6 * series[index - 1] + noise[index]
    return series


@pytest.mark.parametrize("rounds", [16, 60, 250])
@pytest.mark.parametrize("draw", [independent, heavy_tails, two_halves, shared_measurement, autocorrelated])
def test_the_interval_covers_the_median(draw: Draw, rounds: int) -> None:
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        median, low, high = median_interval(draw(rng, rounds))
        assert low <= median <= high
        hits += low <= 0.0 <= high
    assert hits / 400 >= 0.92


def test_the_interval_narrows_as_the_root_of_the_rounds() -> None:
    rng = np.random.default_rng(3)

    def width(rounds: int) -> float:
        intervals = [median_interval(independent(rng, rounds)) for _ in range(50)]
        return float(np.median([high - low for _, low, high in intervals]))

    # The exact width for independent normal samples is 2 * 1.96 * 1.2533 * sigma / sqrt(n).
    exact = 2 * 1.96 * 1.2533 * 0.02 / math.sqrt(400)
    assert exact * 0.9 < width(400) < exact * 1.3
    assert 1.6 < width(100) / width(400) < 2.8


def test_few_rounds_have_no_interval() -> None:
    for rounds in range(1, 6):
        median, low, high = median_interval(np.linspace(0.0, 1.0, rounds))
        assert (low, high) == (-math.inf, math.inf)
        assert 0.0 <= median <= 1.0
    assert math.isnan(median_interval(np.zeros((0, 2)))[0])


def test_many_rounds_that_hang_together_have_their_range() -> None:
    """A machine that changes its mind once: the long run cannot be told, but the samples say where they are."""
    steps = np.repeat([0.1, 0.2], 12)
    assert median_interval(steps)[1:] == (0.1, 0.2)
    assert median_interval(steps[8:16])[1:] == (-math.inf, math.inf)


def test_equal_samples_are_a_point() -> None:
    assert median_interval(np.full(40, 0.3)) == (0.3, 0.3, 0.3)


def test_combining_counts_the_spread_between_processes() -> None:
    mean, low, high = combine([0.00, 0.02, 0.04], [0.001, 0.001, 0.001])
    assert mean == pytest.approx(0.02)
    assert high - mean == pytest.approx(mean - low) == pytest.approx(4.303 * 0.02 / math.sqrt(3))


def test_combining_never_undercuts_the_processes_own_intervals() -> None:
    mean, low, high = combine([0.01, 0.01, 0.01], [0.03, 0.03, 0.03])
    assert (low, mean, high) == pytest.approx((0.01 - 0.03 / math.sqrt(3), 0.01, 0.01 + 0.03 / math.sqrt(3)))


def test_one_process_has_no_interval_and_an_endless_one_spreads() -> None:
    assert combine([0.5], [0.01]) == (0.5, -math.inf, math.inf)
    assert combine([0.5, 0.5], [math.inf, 0.01])[1:] == (-math.inf, math.inf)


def test_processes_without_an_interval_are_judged_by_their_spread() -> None:
    """Three processes with 15 rounds each of a slow model know what they agree on."""
    inf = math.inf
    assert combine([0.07, 0.08, 0.09], [inf, inf, inf])[1] == pytest.approx(
        0.08 - 4.303 * 0.01 / math.sqrt(3)
    )
    mean, low, high = combine([0.01, 0.01, 0.01], [0.03, inf, 0.02])
    assert high - mean == pytest.approx(mean - low) == pytest.approx(math.sqrt(2 * 0.03**2 + 0.02**2) / 3)


def test_combined_intervals_cover() -> None:
    rng = np.random.default_rng(11)
    hits = 0
    for _ in range(1000):
        offsets = rng.standard_normal(3) * 0.01
        _, low, high = combine(list(offsets), [0.001] * 3)
        hits += low <= 0.0 <= high
    assert hits / 1000 >= 0.93
