"""The interface of tuners: they propose candidates and learn how long these took."""

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
    """The outcome for a candidate: seconds of each repetition or, if it did not run, the reason."""

    seconds: tuple[float, ...] = ()
    error: str | None = None

    def __post_init__(self) -> None:
        if bool(self.seconds) == (self.error is not None):
            raise ValueError("an outcome has either seconds or an error")
        if not all(math.isfinite(s) and s > 0 for s in self.seconds):
            raise ValueError(f"times must be positive numbers of seconds, not {self.seconds}")

    @property
    def median(self) -> float:
        """The median of the repetitions in seconds; infinite if it failed."""
        return statistics.median(self.seconds) if self.seconds else math.inf


class Tuner(Protocol):
    """Ask and tell. A tuner belongs to one task, has a seed, and measures nothing itself."""

    name: str

    def propose(self, count: int) -> Sequence[Candidate]:
        """At most `count` different candidates that were neither proposed nor reported before; none if exhausted.

        The most promising come first, if the tuner knows them: the first few are measured before others are built.
        """
        ...

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        """Learn from measurements of this tuner's candidates, or of other candidates of the task."""
        ...


class Method(Enum):
    """The tuners, by their names on the command line."""

    CHAMELEON = "chameleon"
    GENETIC = "genetic"
    ANNEALING = "annealing"
    BEAM = "beam"
    RANDOM = "random"
    ONE_SHOT = "one-shot"
    ONE_SHOT_8 = "one-shot-8"


SEARCHING = (Method.CHAMELEON, Method.GENETIC, Method.ANNEALING, Method.BEAM, Method.RANDOM)
"""Those that measure until trials or time are spent. With ONE_SHOT a predictor chooses, and no kernel is measured;
ONE_SHOT_8 measures the first eight of each layer."""
