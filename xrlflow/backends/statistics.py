"""Intervals for medians of paired, autocorrelated samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Rounds whose range is an interval of their median in any case: all of them are on one side of it once in 2^15.
_ENOUGH = 16
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

    `samples` has one row a round, in the order in which they were taken; a row may hold several differences that
    share a measurement (the baseline timed twice). The textbook interval of a median lies between the order
    statistics at ranks n/2 -+ z sqrt(n)/2: distribution-free, because all it uses is that each sample is above the
    median with probability 1/2. Latencies are skewed and have heavy tails, which such an interval does not mind, and
    unlike a bootstrap it is cheap enough to look at after every few rounds and needs no seed.

    Its weak point is that rounds are not independent: load comes and goes in stretches. So the half width is the
    larger of that of independent rounds and that from the long-run variance of the series "share of this row below the
    median" (Bartlett's window over sqrt(n) lags, with the wider quantile that goes with such a window). Half
    a rank of continuity correction makes it agree with the exact binomial interval for small n.
    Fewer than 6 rounds have no 95% interval: (median, -inf, inf); none at all have (nan, -inf, inf). Of 16 rounds or
    more it is never wider than all samples, however they hang together.
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
    """Half width of the 95% interval of the mean of `scores`, which are centred at their expectation, 0."""
    rounds = len(scores)
    plain = float(np.mean(scores**2))
    if (
        rounds < 30 or plain == 0.0
    ):  # an estimate from few rows is worth little: at least that of independent columns
        plain = max(plain, 0.25 / columns)
    independent = Z95 * math.sqrt(plain / rounds)
    lags = math.isqrt(rounds)
    long_run = float(np.mean(scores**2)) + sum(
        2.0 * (1.0 - lag / (lags + 1)) * float(np.dot(scores[lag:], scores[:-lag])) / rounds
        for lag in range(1, lags + 1)
        if lag < rounds
    )
    # Kiefer and Vogelsang (2005): the 97.5% quantile when the window is the fraction b of the series.
    b = (lags + 1) / rounds
    quantile = 1.96 + 2.9694 * b + 0.416 * b**2 - 0.5324 * b**3
    return max(independent, quantile * math.sqrt(max(long_run, 0.0) / rounds))


def combine(medians: Sequence[float], within: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of one quantity measured in several processes.

    `medians` are the processes' estimates, `within` the half widths of their own 95% intervals. Memory layout
    and thread placement differ from process to process and stay fixed inside one, so more samples in one
    process do not help: the spread between the estimates is what counts. With k of them the interval is
    Student's t on k - 1 degrees of freedom, and never narrower than what the processes' own intervals alone
    would give. A process with too few samples for an interval of its own (a slow model) counts as the widest of the
    others there: what its estimate is worth shows in the spread, as long as three or more can be compared. One
    process has no interval.
    """
    count = len(medians)
    mean = sum(medians) / count
    if count < 2:
        return mean, -math.inf, math.inf
    spread = math.sqrt(sum((m - mean) ** 2 for m in medians) / (count - 1))
    quantile = T95[count - 2] if count - 2 < len(T95) else Z95 * (1 + 1.5 / (count - 2))
    between = quantile * spread / math.sqrt(count)
    closed = [half for half in within if math.isfinite(half)]
    if count < 3 and len(closed) < count:
        return mean, -math.inf, math.inf
    widest = max(closed, default=0.0)
    inside = math.sqrt(sum(min(half, widest) ** 2 for half in within)) / count
    half = max(between, inside)
    return mean, mean - half, mean + half
