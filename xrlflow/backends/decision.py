"""Whether a model is faster than another, and by how much: two questions, answered by two sets of fresh processes.

Each process gives one estimate, the logarithm of how many times faster the new model ran in it. What is fixed for the
life of a process (where weights lie, on which CPU a thread sits) is most of what makes estimates differ, so an
estimate counts once, however many runs are behind it, and intervals come from the spread between processes.

`decide` looks at the estimates several times and stops as soon as they say enough. Who looks often, and stops at what
pleases, is wrong more often than a single look would be, so the 2.5% that may be wrong are shared out among the looks
(the shares add up to it: it holds however the looks hang together), few to the first ones. And what it stops at is
too good: among all that are shipped are those that were lucky. So what is reported is what `confirm` finds, in as many
further processes as were fixed before the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xrlflow.backends.results import SpeedUp, Verdict
from xrlflow.backends.statistics import Pooled, pool

Draw = Callable[[], float | None]
"""One more process's estimate; None where no time is left for one."""

FEWEST = 3
"""Processes that an answer takes at least."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When a new model is shipped: it is faster by more than `bar` (a logarithm), and at most `error` are wrong.

    Two sessions of one model differ by half a percent, and what is not worth that is not worth another file. `first`
    is the number of processes at the first look, `growth` how many times as many the next one has. `spending` says how
    late `error` is spent: after the part t of the processes t ** spending of it. The comparison is given up where not
    even the mean plus `hope` standard errors would suffice after all processes.
    """

    bar: float = math.log(1.003)
    error: float = 0.025
    first: int = 8
    growth: float = 1.5
    spending: float = 1.5
    hope: float = 1.5

    def looks(self, most: int) -> tuple[int, ...]:
        """After how many of at most `most` processes to look."""
        found: list[int] = []
        count = self.first
        # A look shortly before the last one spends what the last one needs.
        while count * math.sqrt(self.growth) < most:
            found.append(count)
            count = math.ceil(count * self.growth)
        return (*found, most)

    def spent(self, count: int, most: int) -> float:
        """How much of `error` is spent after so many of `most` processes."""
        return float(self.error * min(1.0, count / most) ** self.spending)


SHIP = Rule()


@dataclass(frozen=True, slots=True)
class Decision:
    """What `decide` says, and its interval, which allows for all looks; None: there are too few estimates for one."""

    verdict: Verdict
    estimates: tuple[float, ...]
    interval: SpeedUp | None


def decide(draw: Draw, most: int, rule: Rule = SHIP) -> Decision:
    """Draw up to `most` estimates, until they are clearly above `rule.bar`, or clearly will not be.

    Where `draw` ends it before, that was the last look, which may spend what is left of `rule.error`: time, not what
    was measured, has ended it.
    """
    estimates: list[float] = []
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
        found = pool(estimates)
        interval = found.interval(after - before)
        if interval.low > math.exp(rule.bar):
            return Decision(Verdict.FASTER, tuple(estimates), interval)
        if last or _hopeless(found, len(estimates), most, rule):
            break
        before = after
    return Decision(Verdict.NOT_FASTER, tuple(estimates), interval)


def _hopeless(found: Pooled, count: int, most: int, rule: Rule) -> bool:
    """Whether the estimate, were it better than it seems, would still not suffice at the last look."""
    share = rule.error - rule.spent(rule.looks(most)[-2], most)
    at_last = found.error * math.sqrt(count / most)
    return found.mean + rule.hope * found.error - found.quantile(share) * at_last <= rule.bar


WIDTH = 0.005
"""Half the width of the interval that `confirm` should have, as a logarithm, where time and machine allow it."""
_CONFIRM_AT_LEAST, _CONFIRM_AT_MOST = 8, 40


def needed(estimates: Sequence[float]) -> int:
    """How many processes confirm a decision that was made on these estimates: known before the first of them runs."""
    spread = pool(estimates).error * math.sqrt(len(estimates))
    return max(_CONFIRM_AT_LEAST, min(math.ceil((2.0 * spread / WIDTH) ** 2), _CONFIRM_AT_MOST))


def confirm(draw: Draw, count: int) -> SpeedUp | None:
    """The 95% interval of `count` estimates, taken without a look; None if there was time for too few."""
    estimates: list[float] = []
    while len(estimates) < count and (estimate := draw()) is not None:
        estimates.append(estimate)
    return pool(estimates).interval(0.025) if len(estimates) >= FEWEST else None


def share_out(affordable: int) -> int:
    """How many of the processes that there is time for may decide; the rest are for the figure that is reported.

    Where they do not suffice for both, all decide.
    """
    return affordable // 2 if affordable >= 2 * FEWEST else affordable


@dataclass(frozen=True, slots=True)
class Answer:
    """What two sets of processes say. `figure`: of the second set; None where nothing is faster, or no time was."""

    decision: Decision
    verdict: Verdict
    figure: SpeedUp | None
    confirming: int = 0

    @property
    def faster(self) -> bool:
        return self.verdict is Verdict.FASTER


def settle(draw: Draw, affordable: int, rule: Rule = SHIP, check: Callable[[], bool] | None = None) -> Answer:
    """Decide, and measure again what was decided to be faster; there is time for `affordable` processes in all.

    `check` is asked in between, if something is faster, whether that is of any use: if not, there is no figure.
    What turns out to be slower for sure when it is measured again is not faster: it is the only thing that the second
    set can change, so that what is reported of the others is not the better half of it.
    """
    decision = decide(draw, share_out(affordable), rule)
    if decision.verdict is not Verdict.FASTER:
        return Answer(decision, decision.verdict, None)
    if check is not None and not check():
        return Answer(decision, decision.verdict, None)
    count = min(needed(decision.estimates), affordable - len(decision.estimates))
    figure = confirm(draw, count) if count >= FEWEST else None
    verdict = Verdict.REFUTED if figure is not None and figure.slower else Verdict.FASTER
    return Answer(decision, verdict, figure, count if figure is not None else 0)
