"""Whether a model is faster than another, and by how much: two questions, answered by two sets of fresh processes.

Each process gives one estimate: the logarithm of how many times faster the new model ran in it, with its noise.
Estimates differ by what is fixed for the life of a process (addresses of weights, CPUs of threads). So a process counts
as one estimate, however many runs it makes, and intervals come from the spread between processes.

`decide` looks at the estimates several times and stops as soon as they suffice. Looking often and stopping at a good
moment is wrong more often than looking once. So the admitted error of 2.5% is divided among the looks, little for the
first ones; the parts add up to it, which holds however the looks depend on each other. An estimate at which the search
stopped is also too good, because the lucky ones are selected. So the reported figure comes from `confirm`, from further
processes whose number was fixed before the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xrlflow.backends.pairs import Estimate, errors
from xrlflow.backends.results import SpeedUp, Verdict
from xrlflow.backends.statistics import Pooled, pool

Draw = Callable[[], Estimate | None]
"""Returns the estimate of one more process; None if there is no time left for one."""

FEWEST = 3
"""The fewest processes for an answer."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When a new model is accepted: it is faster by more than `bar` (a logarithm), and at most `error` are wrong.

    The bar exists because two sessions of one model differ by half a percent, and a smaller gain is not worth a new
    file. `first`: the number of processes at the first look, or half of them if that is fewer; `growth`: the ratio of
    the numbers at two looks. After the part t of the processes, t ** `spending` of `error` has been spent. The
    comparison is given up when not even a mean that is exceeded with probability `hope` would suffice after all
    processes.
    """

    bar: float = math.log(1.003)
    error: float = 0.025
    first: int = 8
    growth: float = 1.5
    spending: float = 1.5
    hope: float = 0.025

    def looks(self, most: int) -> tuple[int, ...]:
        """The numbers of processes, up to `most`, after which to look: once if half of them are too few to look."""
        found: list[int] = []
        count = min(self.first, most // 2) if most >= 2 * FEWEST else most
        # A look shortly before the last one would spend the error that the last one needs.
        while count * math.sqrt(self.growth) < most:
            found.append(count)
            count = math.ceil(count * self.growth)
        return (*found, most)

    def spent(self, count: int, most: int) -> float:
        """The part of `error` that is spent after `count` of `most` processes."""
        return float(self.error * min(1.0, count / most) ** self.spending)


SHIP = Rule()


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict of `decide`, and its interval, which allows for all looks; None if there are too few estimates."""

    verdict: Verdict
    estimates: tuple[Estimate, ...]
    interval: SpeedUp | None


def pooled(estimates: Sequence[Estimate]) -> Pooled:
    """The mean of estimates and its error (`statistics.pool`)."""
    return pool([e.ratio for e in estimates], errors(estimates))


def decide(draw: Draw, most: int, rule: Rule = SHIP) -> Decision:
    """Draw up to `most` estimates, until they are clearly above `rule.bar` or clearly will not be.

    If `draw` ends the series earlier, that is the last look, and it may spend all of `rule.error`: the time has ended
    it, not the result.
    """
    estimates: list[Estimate] = []
    looks = rule.looks(most)
    before = 0.0
    interval: SpeedUp | None = None
    for look in looks:
        while len(estimates) < look and (estimate := draw()) is not None:
            estimates.append(estimate)
        if len(estimates) < FEWEST:
            return Decision(Verdict.TOO_FEW, tuple(estimates), None)
        last = len(estimates) < look or look == looks[-1]
        after = rule.error if last else rule.spent(look, most)
        found = pooled(estimates)
        interval = found.interval(after - before)
        # Weights alone decide nothing: noisy processes may be those in which the new model is slower.
        if interval.low > math.exp(rule.bar) and pool([e.ratio for e in estimates]).mean > rule.bar:
            return Decision(Verdict.FASTER, tuple(estimates), interval)
        if last or _hopeless(found, len(estimates), most, rule):
            break
        before = after
    return Decision(Verdict.NOT_FASTER, tuple(estimates), interval)


def _hopeless(found: Pooled, count: int, most: int, rule: Rule) -> bool:
    """Whether even the upper end of the present estimate would not suffice at the last look, which has more processes:
    a smaller error, and more degrees of freedom."""
    more = most / count
    upper = found.mean + found.quantile(rule.hope) * found.error
    last = Pooled(upper, found.error / math.sqrt(more), (found.freedom + 1.0) * more - 1.0)
    share = rule.error - rule.spent(rule.looks(most)[-2], most)
    return last.mean - last.quantile(share) * last.error <= rule.bar


WIDTH = 0.005
"""The wanted half width of `confirm`'s interval, as a logarithm, if time and machine allow it."""
_CONFIRM_AT_LEAST, _CONFIRM_AT_MOST = 8, 40
DECIDE_AT_MOST = 40
"""The most processes of a decision. Where there is no time for more, it may take all: a faster result without a figure
is better than the original."""


def needed(estimates: Sequence[Estimate]) -> int:
    """How many processes `confirm` should use after a decision on these estimates."""
    spread = pooled(estimates).error * math.sqrt(len(estimates))
    return max(_CONFIRM_AT_LEAST, min(math.ceil((2.0 * spread / WIDTH) ** 2), _CONFIRM_AT_MOST))


def confirm(draw: Draw, count: int) -> SpeedUp | None:
    """The 95% interval of `count` estimates, without intermediate looks; None if there was time for too few."""
    estimates: list[Estimate] = []
    while len(estimates) < count and (estimate := draw()) is not None:
        estimates.append(estimate)
    return pooled(estimates).interval(0.025) if len(estimates) >= FEWEST else None


@dataclass(frozen=True, slots=True)
class Answer:
    """The results of two sets of processes. `figure`: from the second set; None if nothing is faster or time was up."""

    decision: Decision
    verdict: Verdict
    figure: SpeedUp | None
    confirming: int = 0

    @property
    def faster(self) -> bool:
        return self.verdict is Verdict.FASTER


def settle(draw: Draw, affordable: int, rule: Rule = SHIP, check: Callable[[], bool] | None = None) -> Answer:
    """Decide, and measure again if the decision is "faster" and there is time: `affordable` processes in all.

    `check` is called in between, if something is faster, and returns whether it is of use; if not, there is no figure.
    A model that is certainly slower in the second set is not faster after all. The second set changes nothing else, so
    that the reported figures are not the better half of all figures.
    """
    decision = decide(draw, min(affordable, DECIDE_AT_MOST), rule)
    if decision.verdict is not Verdict.FASTER:
        return Answer(decision, decision.verdict, None)
    if check is not None and not check():
        return Answer(decision, decision.verdict, None)
    count = min(needed(decision.estimates), affordable - len(decision.estimates))
    figure = confirm(draw, count) if count >= FEWEST else None
    verdict = Verdict.REFUTED if figure is not None and figure.slower else Verdict.FASTER
    return Answer(decision, verdict, figure, count if figure is not None else 0)
