"""How the time limit is shared out. Everything is in seconds, moments are those of time.monotonic."""

from __future__ import annotations

from dataclasses import dataclass, replace

DEFAULT_LIMIT = 60.0
# The part of the time after which searching must be over.
SEARCH_UNTIL = 0.3
# More than this part of the time is not kept for what follows the selection; of models so slow (seconds of a run) that
# a selection could compare little, nothing is kept for that.
_ENDING_AT_MOST, _SLOW = 0.5, 0.3
# What a limit of 60 s allows a fast model, besides runs of it: a model of 3 ms needs no minute.
_ENOUGH, _ENOUGH_RUNS = 14.0, 1000
# The last comparison: seconds to start the fork server, number of processes, seconds to start each, and runs in each
# (the first of both models, warming up, turns).
_FORK_SERVER, _PROCESSES, _START, _RUNS = 0.5, 24, 0.12, 14
_LOADING_TVM = 4.0
# Verification: so much besides runs (of the original and the result, on all their inputs).
_VERIFYING, _VERIFYING_RUNS = 2.5, 16
# One comparison of whole models in one process: the least and the most runs that it takes.
_COMPARE_RUNS_AT_LEAST, _COMPARE_RUNS = 8, 60
_COMPARE_AT_LEAST, _COMPARE_AT_MOST = 1.5, 5.0
# After an interrupt: the best against the original, and again.
_HURRIED_COMPARISONS = 2


@dataclass(frozen=True, slots=True)
class Budget:
    """The time of one optimisation: from `begin` to `begin + limit`.

    `latency` and `loading`: rough seconds of one run of the original and of loading it, 0 where they are not known.
    `verifying`: whether a result will be verified. `hurried`: after an interrupt nothing is kept for the selection that
    is not needed. `compiled`: by TVM, which the processes of the last comparison load.
    """

    begin: float
    limit: float
    latency: float = 0.0
    loading: float = 0.0
    verifying: bool = True
    hurried: bool = False
    compiled: bool = False

    @property
    def until(self) -> float:
        """The moment at which the limit is over."""
        return self.begin + self.limit

    @property
    def end(self) -> float:
        """When everything should be over: a fast model does not take all of a minute, or of an hour."""
        if not self.latency or self.hurried:
            return self.until
        enough = (_ENOUGH + _ENOUGH_RUNS * self.latency) * max(1.0, self.limit / DEFAULT_LIMIT)
        return self.begin + min(self.limit, enough)

    def part(self, share: float) -> float:
        """The moment at which a part of the time is over."""
        return self.begin + share * (self.end - self.begin)

    @property
    def search_until(self) -> float:
        return self.part(SEARCH_UNTIL)

    @property
    def verification(self) -> float:
        """What verifying a result takes."""
        if not self.verifying:
            return 0.0
        return _VERIFYING + 2 * self.loading + _VERIFYING_RUNS * self.latency

    @property
    def comparison(self) -> float:
        """What the last comparison wants."""
        processes = _PROCESSES * (_START + 2 * self.loading + _RUNS * self.latency)
        return _FORK_SERVER + (_LOADING_TVM if self.compiled else 0.0) + processes

    @property
    def ending(self) -> float:
        """What is kept for verification and the last comparison."""
        wanted = self.verification + self.comparison
        if self.hurried:
            return wanted
        most = 1.0 - SEARCH_UNTIL if self.latency > _SLOW else _ENDING_AT_MOST
        return min(wanted, most * (self.end - self.begin))

    @property
    def select_until(self) -> float:
        """When comparing whole models must be over."""
        return self.end - self.ending

    @property
    def begin_comparing_until(self) -> float:
        """When it is too late to begin another comparison of whole models."""
        return self.select_until - 2 * self.loading - _COMPARE_RUNS_AT_LEAST * self.latency

    @property
    def each_comparison(self) -> float:
        """What one comparison of whole models may take."""
        most = 2 * self.loading + _COMPARE_RUNS * self.latency
        return max(_COMPARE_AT_LEAST, min(most, _COMPARE_AT_MOST), most / 2)

    def final(self, now: float) -> float:
        """What verification and the last comparison have, if they begin now: all that is left of the limit.

        On a quiet machine they end long before, as enough is known; beside neighbours that takes more processes.
        """
        return self.until - now

    def can_verify(self, now: float) -> bool:
        """Whether verification, begun now, would be over in time, or soon after."""
        return now + self.verification <= self.until + 0.05 * self.limit

    def hurry(self, now: float) -> Budget:
        """The time that is left after an interrupt: enough to compare, verify and measure, if the limit allows it."""
        needed = _HURRIED_COMPARISONS * self.each_comparison + self.verification + self.comparison
        return replace(self, begin=now, limit=min(self.until - now, needed), hurried=True)
