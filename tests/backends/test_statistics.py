"""Intervals have the coverage that they claim, on samples with a known median."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from xrlflow.backends.statistics import median_interval, pool

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
    """The machine changes its speed once. The long-run median cannot be estimated, but the samples have a range."""
    steps = np.repeat([0.1, 0.2], 12)
    assert median_interval(steps)[1:] == (0.1, 0.2)
    assert median_interval(steps[8:16])[1:] == (-math.inf, math.inf)


def test_equal_samples_are_a_point() -> None:
    assert median_interval(np.full(40, 0.3)) == (0.3, 0.3, 0.3)


def test_pooling_is_students_t() -> None:
    result = pool([0.00, 0.02, 0.04])
    assert result.mean == pytest.approx(0.02)
    assert result.error == pytest.approx(0.02 / math.sqrt(3))
    interval = result.interval(0.025)
    assert math.log(interval.high) - result.mean == pytest.approx(4.303 * 0.02 / math.sqrt(3), rel=1e-3)
    assert math.log(interval.high) - result.mean == pytest.approx(result.mean - math.log(interval.low))


def test_one_estimate_has_no_spread() -> None:
    with pytest.raises(ValueError, match="two estimates"):
        pool([0.1])


def test_few_estimates_that_agree_may_do_so_by_luck() -> None:
    assert pool([0.01] * 7).error == pytest.approx(0.01 / math.sqrt(7))
    assert pool([0.01] * 8).error == pytest.approx(0.0)


def test_one_disturbed_process_of_many_is_not_believed() -> None:
    quiet = np.random.default_rng(3).normal(0.02, 0.004, 19).tolist()
    with_it, without = pool([*quiet, 3.0]), pool(quiet)
    assert with_it.mean == pytest.approx(without.mean, abs=0.002)
    assert with_it.error < 2 * without.error


@pytest.mark.parametrize("count", [8, 12, 30])
def test_pooled_intervals_cover(count: int) -> None:
    rng = np.random.default_rng(11)
    hits = 0
    for _ in range(1000):
        interval = pool(rng.normal(0.0, 0.01, count).tolist()).interval(0.025)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.93 <= hits / 1000 <= 0.98


def test_equal_errors_are_none() -> None:
    values = np.random.default_rng(0).normal(0.0, 0.03, 23).tolist()
    with_them, without = pool(values, [0.02] * 23), pool(values)
    assert with_them.mean == pytest.approx(without.mean)
    assert with_them.error == pytest.approx(without.error)
    assert with_them.degrees_of_freedom == without.degrees_of_freedom


def test_a_noisy_estimate_has_little_weight() -> None:
    values, errors = [0.05, 0.04, 0.06, 0.05, 0.35], [0.005] * 4 + [0.2]
    assert pool(values, errors).mean == pytest.approx(0.05, abs=0.002)
    assert pool(values, errors).error < 0.01 < pool(values).error


@pytest.mark.parametrize("noise", [0.03, 0.3])
@pytest.mark.parametrize("count", [3, 6, 12, 24])
def test_weighted_intervals_cover(count: int, noise: float) -> None:
    """The coverage also holds if the errors are assigned to the wrong estimates."""
    rng = np.random.default_rng(count)
    right, mistaken = 0, 0
    for _ in range(2000):
        errors = np.where(rng.random(count) < 0.7, noise, 0.01)
        values = (errors * rng.standard_normal(count)).tolist()
        known = pool(values, errors.tolist()).interval(0.025)
        right += known.low <= 1.0 <= known.high
        wrong = pool(values, rng.permutation(errors).tolist()).interval(0.025)
        mistaken += wrong.low <= 1.0 <= wrong.high
    assert min(right, mistaken) / 2000 > 0.955
