"""Confidence intervals: of medians of paired, autocorrelated samples, and of means over several processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xrlflow.backends.results import SpeedUp

# With this many rounds, the range of their samples is a confidence interval of the median: all rounds are on one side
# of the median with probability 2^-15.
_ENOUGH = 16
Floats = npt.NDArray[np.float64]

Z95 = 1.959964


def median_interval(samples: Floats) -> tuple[float, float, float]:
    """(median, low, high) of paired differences: an order-statistic interval that allows for autocorrelation.

    `samples` has one row per round, in order. A row may have several differences that share a measurement (the baseline
    timed twice). The textbook interval of a median lies between the order statistics at ranks n/2 -+ z sqrt(n)/2. It
    assumes nothing of the distribution except that a sample is above the median with probability 1/2, so the skewed,
    heavy-tailed distribution of latencies does no harm. Unlike a bootstrap it is cheap enough to compute every few
    rounds, and needs no seed.

    Rounds are not independent, because load comes and goes. So there are two half widths, of which the larger is used.
    The first holds for independent rounds. The second comes from the long-run variance of the series "part of this row
    below the median" (Bartlett's window over sqrt(n) lags, with the wider quantile for such a window). A continuity
    correction of half a rank makes the interval agree with the exact binomial interval for small n. Fewer than 6 rounds
    have no 95% interval: (median, -inf, inf); without rounds it is (nan, -inf, inf). With 16 rounds or more it never
    exceeds the range of the samples.
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
    ):  # few rows estimate the variance badly: use at least the variance of independent columns
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
"""The fraction of the estimates that is trimmed on either side, because another program may have disturbed them."""
_ENOUGH_PROCESSES = 8
"""If a change has no effect, the signs of this many estimates still agree once in 128 times. Fewer estimates prove
less."""
SPREAD = 0.01
"""The standard deviation, as a logarithm, between sessions of one model. The spread of fewer than `_ENOUGH_PROCESSES`
estimates is assumed to be at least this."""
_MOST_PRECISE = 0.5
"""The error of an estimate counts as at least this part of the median error: a quiet process may be quiet by chance."""
_LEAST_FREEDOM = 0.5
"""A lower bound of the degrees of freedom. Without this bound, the error would be infinite if one weight were almost
the sum of all weights."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """A quantity estimated several times: the mean, its standard error, and the error's degrees of freedom."""

    mean: float
    error: float
    degrees_of_freedom: float

    def quantile(self, tail_probability: float) -> float:
        """The number of standard errors above the mean that is exceeded with probability `tail_probability`."""
        from scipy.special import stdtrit

        return float(stdtrit(self.degrees_of_freedom, 1.0 - tail_probability))

    def interval(self, tail_probability: float) -> SpeedUp:
        """The interval of the ratio whose logarithm is the mean. The true ratio is above the interval with probability
        `tail_probability`, and below it with the same probability."""
        half = self.quantile(tail_probability) * self.error
        return SpeedUp(math.exp(self.mean), math.exp(self.mean - half), math.exp(self.mean + half))


def pool(estimates: Sequence[float], errors: Sequence[float] | None = None) -> Pooled:
    """Combine estimates of one quantity, each from a different process.

    Estimates differ by what differs between processes (`SPREAD`), and by the noise of the few runs in each process.
    `errors`: the standard errors that come from this noise. The weights of the estimates follow from them; None: all
    weights are equal. The error of the mean comes from the spread of the estimates, which contains both causes (White
    1980: it holds for any weights). Its degrees of freedom follow from the weights (Kish 1965, effective sample size).
    So wrong `errors` make the mean less precise, but do not make its error too small, unless they depend on the
    estimates.

    The highest and the lowest tenth are left out of the mean (of fewer than 10: none) and winsorised in its error
    (Tukey and McLaughlin 1963). Fewer than 8 estimates may be close by chance, so their standard deviation is assumed
    to be at least `SPREAD`. Raises ValueError for fewer than 2.
    """
    count = len(estimates)
    if count < 2:
        raise ValueError("a spread needs two estimates at least")
    order = np.argsort(estimates)
    values = np.asarray(estimates, dtype=np.float64)[order]
    within = np.zeros(count) if errors is None else np.asarray(errors, dtype=np.float64)[order]
    weights = 1.0 / (max(SPREAD, _MOST_PRECISE * float(np.median(within))) ** 2 + within**2)
    cut = int(TRIMMED * count)
    inner = slice(cut, count - cut)
    winsorised = np.clip(values, values[cut], values[count - cut - 1])
    parts = weights / weights.sum()
    effective = _effective(parts)
    off = winsorised - np.sum(parts * winsorised)
    variance = float(np.sum((parts * off) ** 2)) * effective / max(effective - 1.0, _LEAST_FREEDOM)
    if count < _ENOUGH_PROCESSES:
        variance = max(variance, SPREAD**2 / effective)
    error = math.sqrt(variance) / (1.0 - 2.0 * cut / count)
    mean = float(np.average(values[inner], weights=weights[inner]))
    return Pooled(mean, error, max(_effective(weights[inner]) - 1.0, 1.0))


def _effective(weights: Floats) -> float:
    """How many equally weighted estimates would have a mean of the same variance."""
    return float(weights.sum() ** 2 / np.sum(weights**2))
