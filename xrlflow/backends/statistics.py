"""Intervals: for medians of paired, autocorrelated samples, and for estimates from several processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xrlflow.backends.results import SpeedUp

# With this many rounds, their range is an interval of the median: all are on one side of it once in 2^15.
_ENOUGH = 16
Floats = npt.NDArray[np.float64]

Z95 = 1.959964


def median_interval(samples: Floats) -> tuple[float, float, float]:
    """(median, low, high) of paired differences: an order-statistic interval that allows for autocorrelation.

    `samples` has one row per round, in order. A row may have several differences that share a measurement (the baseline
    timed twice). The textbook interval of a median lies between the order statistics at ranks n/2 -+ z sqrt(n)/2. It
    makes no assumption on the distribution except that a sample is above the median with probability 1/2, so the
    skewed, heavy-tailed distribution of latencies does no harm. Unlike a bootstrap it is cheap enough to compute every
    few rounds, and needs no seed.

    Rounds are not independent, because load comes and goes. So the half width is the larger of that for independent
    rounds and that from the long-run variance of the series "part of this row below the median" (Bartlett's window over
    sqrt(n) lags, with the wider quantile for such a window). A continuity correction of half a rank makes it agree with
    the exact binomial interval for small n. Fewer than 6 rounds have no 95% interval: (median, -inf, inf); without
    rounds it is (nan, -inf, inf). With 16 rounds or more it never exceeds the range of the samples.
    """
    rounds = len(samples)
    if rounds == 0:
        return math.nan, -math.inf, math.inf
    rows = samples.reshape(rounds, -1)
    pooled = np.sort(rows.ravel())
    median = float(np.median(pooled))
    below = (rows < median).mean(axis=1) + 0.5 * (rows == median).mean(axis=1) - 0.5
    half = _score_error(below, rows.shape[1])
    rank = math.floor(len(pooled) * (0.5 - half) + 0.5)
    if rank < 1:
        if rounds >= _ENOUGH:
            return median, float(pooled[0]), float(pooled[-1])
        return median, -math.inf, math.inf
    return median, float(pooled[rank - 1]), float(pooled[-rank])


def _score_error(scores: Floats, columns: int) -> float:
    """Half the width of the 95% interval of the mean of `scores`, whose expectation is 0."""
    rounds = len(scores)
    plain = float(np.mean(scores**2))
    if (
        rounds < 30 or plain == 0.0
    ):  # few rows estimate the variance badly: use at least that of independent columns
        plain = max(plain, 0.25 / columns)
    independent = Z95 * math.sqrt(plain / rounds)
    lags = math.isqrt(rounds)
    long_run = float(np.mean(scores**2)) + sum(
        2.0 * (1.0 - lag / (lags + 1)) * float(np.dot(scores[lag:], scores[:-lag])) / rounds
        for lag in range(1, lags + 1)
        if lag < rounds
    )
    # Kiefer and Vogelsang (2005): the 97.5% quantile if the window is the fraction b of the series.
    b = (lags + 1) / rounds
    quantile = 1.96 + 2.9694 * b + 0.416 * b**2 - 0.5324 * b**3
    return max(independent, quantile * math.sqrt(max(long_run, 0.0) / rounds))


TRIMMED = 0.1
"""The part of the estimates that is trimmed on either side, because another program may have disturbed them."""
_ENOUGH_PROCESSES = 8
"""Biased estimates agree by luck once in 128 times with this number: fewer prove less."""
_SPREAD = 0.01
"""The least standard deviation assumed for fewer estimates: sessions of one model may differ so much."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """A quantity estimated several times: the mean, its standard error, and the error's degrees of freedom."""

    mean: float
    error: float
    freedom: int

    def quantile(self, tail: float) -> float:
        """The number of standard errors above the mean that is exceeded with probability `tail`."""
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, 1.0 - tail))

    def interval(self, tail: float) -> SpeedUp:
        """The interval of a logarithm, missed with probability `tail` on either side, as a ratio."""
        half = self.quantile(tail) * self.error
        return SpeedUp(math.exp(self.mean), math.exp(self.mean - half), math.exp(self.mean + half))


def pool(estimates: Sequence[float]) -> Pooled:
    """Combine estimates of one quantity, each from a different process.

    Estimates differ by what differs between processes, and by the noise of the few runs in each. Their spread contains
    both, so nothing else is needed: this is the estimate of a random effects model whose processes have equally many
    runs. The result is the mean without the highest and the lowest tenth (of fewer than 10 estimates: the mean), with
    the standard error from the winsorised variance (Tukey and McLaughlin 1963). Fewer than 8 estimates may be close by
    luck, so their standard deviation is taken to be at least 1%. Raises ValueError for fewer than 2.
    """
    count = len(estimates)
    if count < 2:
        raise ValueError("a spread needs two estimates at least")
    ordered = np.sort(np.asarray(estimates, dtype=np.float64))
    cut = int(TRIMMED * count)
    kept = ordered[cut : count - cut]
    winsorised = np.clip(ordered, kept[0], kept[-1])
    spread = float(winsorised.std(ddof=1))
    if count < _ENOUGH_PROCESSES:
        spread = max(spread, _SPREAD)
    error = spread / ((1.0 - 2.0 * cut / count) * math.sqrt(count))
    return Pooled(float(kept.mean()), error, len(kept) - 1)
