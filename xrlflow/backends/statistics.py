"""Intervals: for medians of paired, autocorrelated samples, and for what several processes say together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xrlflow.backends.results import SpeedUp

# Rounds whose range is an interval of their median in any case: all of them are on one side of it once in 2^15.
_ENOUGH = 16
Floats = npt.NDArray[np.float64]

Z95 = 1.959964


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


TRIMMED = 0.1
"""The part of the estimates on either side that is not believed: a neighbour may have come in between."""
_ENOUGH_PROCESSES = 8
"""Estimates that agree by luck once in 128 times, if they can only be too high or too low: fewer prove less."""
_SPREAD = 0.01
"""Standard deviation that fewer estimates are taken to have at least: what a session of the same model may differ."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """One quantity, from estimates of it: a mean, its standard error, and the degrees of freedom of the latter."""

    mean: float
    error: float
    freedom: int

    def quantile(self, tail: float) -> float:
        """How many standard errors the mean is off, upwards, with the probability `tail`."""
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, 1.0 - tail))

    def interval(self, tail: float) -> SpeedUp:
        """The interval outside which the quantity lies with the probability `tail` on either side, of a logarithm."""
        half = self.quantile(tail) * self.error
        return SpeedUp(math.exp(self.mean), math.exp(self.mean - half), math.exp(self.mean + half))


def pool(estimates: Sequence[float]) -> Pooled:
    """What estimates of one quantity, each from a process of its own, say together.

    The estimates differ by what differs between processes and by the noise of the few runs in each. The spread between
    them has both in it, so nothing else is needed: this is the estimate of a random effects model whose processes have
    the same number of runs. It is the mean without the tenth that is highest and the tenth that is lowest (of fewer
    than 10: the mean), and its standard error from the winsorised variance (Tukey and McLaughlin 1963). Fewer than 8
    estimates may lie close together by luck: their standard deviation is taken to be 1% at least. Raises ValueError for
    fewer than 2.
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
