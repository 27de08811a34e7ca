"""Intervals for medians of paired, autocorrelated samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

Z95 = 1.959964
# Two-sided 95% quantiles of Student's t with 1, 2, ... degrees of freedom.
T95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)


def median_interval(samples: Floats) -> tuple[float, float, float]:
    """(median, low, high) of paired differences: an order-statistic interval that allows for autocorrelation.

    `samples` has one row a round, in the order in which they were taken; a row may hold several differences
    that share a measurement (the baseline timed twice). The textbook interval of a median lies between the
    order statistics at ranks n/2 -+ z sqrt(n)/2: distribution-free, because all it uses is that each sample
    is above the median with probability 1/2. Latencies are skewed and have heavy tails, which such an
    interval does not mind, and unlike a bootstrap it is cheap enough to look at after every few rounds and
    needs no seed. Its weak point is that rounds are not independent: load comes and goes in stretches. So the
    1/4 (the variance of the indicator "below the median") becomes the indicator series' long-run variance, by
    Bartlett's window over sqrt(n) lags, and never less than the variance without any correlation. Half a rank
    of continuity correction makes it agree with the exact binomial interval for small n. Fewer than 6 rounds
    have no 95% interval: (median, -inf, inf).
    """
    rows = samples.reshape(len(samples), -1)
    rounds = len(rows)
    if rounds == 0:
        return math.nan, -math.inf, math.inf
    pooled = np.sort(rows.ravel())
    median = float(np.median(pooled))
    below = (rows < median).mean(axis=1) + 0.5 * (rows == median).mean(axis=1) - 0.5
    half = Z95 * math.sqrt(_long_run_variance(below) / rounds)
    rank = math.floor(len(pooled) * (0.5 - half) + 0.5)
    if rank < 1:
        return median, -math.inf, math.inf
    return median, float(pooled[rank - 1]), float(pooled[-rank])


def _long_run_variance(scores: Floats) -> float:
    """Variance of sqrt(n) times the mean of `scores` (centred at their expectation, 0)."""
    rounds = len(scores)
    # With few rounds the estimate is worth little: then that of one independent pair, the largest without correlation.
    plain = float(np.mean(scores**2)) if rounds >= 30 else 0.25
    # A run of exactly equal samples has all its scores at 0; the interval is then that one point whatever the ranks.
    plain = plain or 0.25
    lags = math.isqrt(rounds)
    correlated = sum(
        2.0 * (1.0 - lag / (lags + 1)) * float(np.dot(scores[lag:], scores[:-lag])) / rounds
        for lag in range(1, lags + 1)
        if lag < rounds
    )
    return plain + max(correlated, 0.0)


def combine(medians: Sequence[float], within: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of one quantity measured in several processes.

    `medians` are the processes' estimates, `within` the half widths of their own 95% intervals. Memory layout
    and thread placement differ from process to process and stay fixed inside one, so more samples in one
    process do not help: the spread between the estimates is what counts. With k of them the interval is
    Student's t on k - 1 degrees of freedom, and never narrower than what the processes' own intervals alone
    would give. One process has no interval.
    """
    count = len(medians)
    mean = sum(medians) / count
    if count < 2:
        return mean, -math.inf, math.inf
    spread = math.sqrt(sum((m - mean) ** 2 for m in medians) / (count - 1))
    quantile = T95[count - 2] if count - 2 < len(T95) else Z95 * (1 + 1.5 / (count - 2))
    between = quantile * spread / math.sqrt(count)
    inside = math.sqrt(sum(half * half for half in within)) / count
    half = max(between, inside)
    return mean, mean - half, mean + half
