"""The interface of tuners: a tuner proposes candidates and learns from their measured times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from xrlflow.tuning.knobs import Candidate


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of measuring a candidate: the seconds of each repetition or, if the kernel did not run, the error."""

    seconds: tuple[float, ...] = ()
    error: str | None = None

    def __post_init__(self) -> None:
        if bool(self.seconds) == (self.error is not None):
            raise ValueError("an outcome has either seconds or an error")
        if not all(math.isfinite(s) and s > 0 for s in self.seconds):
            raise ValueError(f"times must be positive numbers of seconds, not {self.seconds}")

    @property
    def median(self) -> float:
        """The median of the repetitions, in seconds. It is infinite if the kernel did not run."""
        return statistics.median(self.seconds) if self.seconds else math.inf


class Tuner(Protocol):
    """A search for the fastest kernel of one tuning task. The tuner proposes candidates; the caller measures them and
    reports their times.

    The seed and the reported times determine all proposals.
    """

    name: str

    def propose(self, count: int) -> Sequence[Candidate]:
        """At most `count` different candidates that were neither proposed nor reported before. The result is empty if
        there are no more candidates.

        If the tuner can rank candidates, the most promising come first, because the caller measures the first
        candidates first.
        """
        ...

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        """Learn from measurements of this tuner's candidates, or of other candidates of the same task."""
        ...


class Method(Enum):
    """The methods of tuning, by their names on the command line."""

    CHAMELEON = "chameleon"
    GENETIC = "genetic"
    ANNEALING = "annealing"
    BEAM = "beam"
    RANDOM = "random"
    ONE_SHOT = "one-shot"
    ONE_SHOT_8 = "one-shot-8"


SEARCHING = (Method.CHAMELEON, Method.GENETIC, Method.ANNEALING, Method.BEAM, Method.RANDOM)
"""The methods that measure until the trials or the time are used up. ONE_SHOT measures nothing, and uses the kernels
that are predicted to be the fastest. ONE_SHOT_8 measures the first eight candidates of each layer."""
