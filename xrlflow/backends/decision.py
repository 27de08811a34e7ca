"""Whether a model is faster than another, and by how much: two questions, answered by two sets of fresh processes.

Each process gives one estimate with its noise: the logarithm of how many times faster the new model ran than the
baseline. Estimates differ by what is fixed for the life of a process (addresses of weights, CPUs of threads). So a
process counts as one estimate, however many runs it makes, and intervals come from the spread between processes.

`decide` is a sequential test: it analyses the estimates several times and stops as soon as they suffice. A test that
may stop at any of its analyses is wrong more often than one with a single analysis. So the admitted error probability
of 2.5% is divided among the analyses, with small parts for the first analyses. The sum of the parts bounds the error
probability, however the analyses depend on each other.

The estimates of a test that stopped early are too high on average, because it stops when they happen to be high. So the
reported figure comes from `confirm`: from further processes, whose number was fixed before the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xrlflow.backends.pairs import Estimate, errors
from xrlflow.backends.results import SpeedUp, Verdict
from xrlflow.backends.statistics import Pooled, pool

Draw = Callable[[], Estimate | None]
"""A function that returns the estimate of one more process; None if there is no time left for one."""

FEWEST = 3
"""A result needs at least this many processes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule by which `decide` accepts a new model: a test must show that it is faster by more than a threshold."""

    threshold: float = math.log(1.003)
    """The least gain, as a logarithm. Two sessions of the same model differ by half a percent, and a smaller gain is
    not worth a new file."""
    significance: float = 0.025
    """The admitted probability of accepting a model whose gain is not above the threshold."""
    first: int = 8
    """The number of processes at the first analysis, if the limit is at least twice as many; otherwise the first
    analysis is at half of the limit."""
    growth: float = 1.5
    """The number of processes at an analysis, divided by the number at the analysis before."""
    spending: float = 1.5
    """When the fraction t of all processes has run, t ** `spending` of the significance has been used up."""
    hope: float = 0.025
    """The test is given up if even the upper end of the mean's interval, which the true value exceeds with this
    probability, would not pass the last analysis."""

    def analyses(self, limit: int) -> tuple[int, ...]:
        """The numbers of processes, up to `limit`, at which the estimates are analysed. If half of `limit` is less than
        `FEWEST`, there is only one analysis."""
        counts: list[int] = []
        count = min(self.first, limit // 2) if limit >= 2 * FEWEST else limit
        # An analysis shortly before the last one would use up the error probability that the last one needs.
        while count * math.sqrt(self.growth) < limit:
            counts.append(count)
            count = math.ceil(count * self.growth)
        return (*counts, limit)

    def spent(self, count: int, limit: int) -> float:
        """The part of `significance` that is used up after `count` of `limit` processes."""
        return float(self.significance * min(1.0, count / limit) ** self.spending)


SHIP = Rule()


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of `decide`. `interval` allows for all interim analyses; it is None if there are too few estimates."""

    verdict: Verdict
    estimates: tuple[Estimate, ...]
    interval: SpeedUp | None


def pooled(estimates: Sequence[Estimate]) -> Pooled:
    """The mean of estimates with its standard error (see `statistics.pool`)."""
    return pool([e.ratio for e in estimates], errors(estimates))


def decide(draw: Draw, limit: int, rule: Rule = SHIP) -> Decision:
    """Draw up to `limit` estimates, and stop as soon as their mean is clearly above the threshold of `rule`, or clearly
    will not get above it.

    If `draw` returns None earlier, the last analysis takes place at that point. It may use up all of the significance,
    because the time ended the series, not the estimates.
    """
    estimates: list[Estimate] = []
    analyses = rule.analyses(limit)
    before = 0.0
    interval: SpeedUp | None = None
    for count in analyses:
        while len(estimates) < count and (estimate := draw()) is not None:
            estimates.append(estimate)
        if len(estimates) < FEWEST:
            return Decision(Verdict.TOO_FEW, tuple(estimates), None)
        last = len(estimates) < count or count == analyses[-1]
        after = rule.significance if last else rule.spent(count, limit)
        result = pooled(estimates)
        interval = result.interval(after - before)
        # The weights of noisy processes are small, and it may be just the noisy processes in which the new model is
        # slower. So the mean without weights must be above the threshold, too.
        if (
            interval.low > math.exp(rule.threshold)
            and pool([e.ratio for e in estimates]).mean > rule.threshold
        ):
            return Decision(Verdict.FASTER, tuple(estimates), interval)
        if last or _hopeless(result, len(estimates), limit, rule):
            break
        before = after
    return Decision(Verdict.NOT_FASTER, tuple(estimates), interval)


def _hopeless(result: Pooled, count: int, limit: int, rule: Rule) -> bool:
    """Whether the test would fail after all processes even if the mean were at the upper end of its present interval.
    More processes mean a smaller error and more degrees of freedom."""
    more = limit / count
    upper = result.mean + result.quantile(rule.hope) * result.error
    last = Pooled(upper, result.error / math.sqrt(more), (result.degrees_of_freedom + 1.0) * more - 1.0)
    share = rule.significance - rule.spent(rule.analyses(limit)[-2], limit)
    return last.mean - last.quantile(share) * last.error <= rule.threshold


WIDTH = 0.005
"""The half width, as a logarithm, that `confirm`'s interval should have if time and machine allow it."""
_CONFIRM_AT_LEAST, _CONFIRM_AT_MOST = 8, 40
DECIDE_AT_MOST = 40
"""A decision uses at most this many processes. If the time suffices for no more, `confirm` gets none: a faster model
without a measured speed-up is better than the original."""


def needed(estimates: Sequence[Estimate]) -> int:
    """How many processes `confirm` should use after a decision on these estimates."""
    spread = pooled(estimates).error * math.sqrt(len(estimates))
    return max(_CONFIRM_AT_LEAST, min(math.ceil((2.0 * spread / WIDTH) ** 2), _CONFIRM_AT_MOST))


def confirm(draw: Draw, count: int) -> SpeedUp | None:
    """The 95% interval of `count` estimates, without interim analyses; None if there was time for fewer than
    `FEWEST`."""
    estimates: list[Estimate] = []
    while len(estimates) < count and (estimate := draw()) is not None:
        estimates.append(estimate)
    return pooled(estimates).interval(0.025) if len(estimates) >= FEWEST else None


@dataclass(frozen=True, slots=True)
class RepeatedDecision:
    """The decision about a model, and the speed-up that was measured after the decision."""

    decision: Decision
    verdict: Verdict
    figure: SpeedUp | None
    """The speed-up in the second set of processes; None if the model is not faster, or if there was no time for
    them."""
    confirming: int = 0
    """The number of processes in the second set."""

    @property
    def faster(self) -> bool:
        return self.verdict is Verdict.FASTER


def settle(
    draw: Draw, affordable: int, rule: Rule = SHIP, check: Callable[[], bool] | None = None
) -> RepeatedDecision:
    """Decide whether a model is faster. If so, and if there is time, measure its speed-up in further processes. At most
    `affordable` processes are used in all.

    `check` is called between decision and measurement if the model is faster. It returns whether the model can be used;
    if it cannot, the speed-up is not measured. A model that is certainly slower in the second set of processes is
    refuted. The second set does not change the decision in any other case, so that the reported speed-ups are not a
    selection of high ones.
    """
    decision = decide(draw, min(affordable, DECIDE_AT_MOST), rule)
    if decision.verdict is not Verdict.FASTER:
        return RepeatedDecision(decision, decision.verdict, None)
    if check is not None and not check():
        return RepeatedDecision(decision, decision.verdict, None)
    count = min(needed(decision.estimates), affordable - len(decision.estimates))
    figure = confirm(draw, count) if count >= FEWEST else None
    verdict = Verdict.REFUTED if figure is not None and figure.slower else Verdict.FASTER
    return RepeatedDecision(decision, verdict, figure, count if figure is not None else 0)
