"""What every tuner is: it proposes candidates, and is told how long they took."""

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
    """A measured candidate: seconds of each repeat, or, where it did not run, why."""

    seconds: tuple[float, ...] = ()
    error: str | None = None

    def __post_init__(self) -> None:
        if bool(self.seconds) == (self.error is not None):
            raise ValueError("an outcome has either seconds or an error")
        if not all(math.isfinite(s) and s > 0 for s in self.seconds):
            raise ValueError(f"times must be positive numbers of seconds, not {self.seconds}")

    @property
    def median(self) -> float:
        """The median of the repeats in seconds; infinite where it failed."""
        return statistics.median(self.seconds) if self.seconds else math.inf


class Tuner(Protocol):
    """Ask and tell. A tuner is for one task, is seeded, and measures nothing itself."""

    name: str

    def propose(self, count: int) -> Sequence[Candidate]:
        """At most `count` candidates, distinct and none proposed or told of before; none when exhausted.

        The most promising come first, where the tuner knows: the first few are measured before the rest is built.
        """
        ...

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        """Learn from measurements, of this tuner's candidates or of another's of the same task."""
        ...


class Method(Enum):
    """The tuners that there are, by the name on the command line."""

    CHAMELEON = "chameleon"
    EVOLUTIONARY = "evolutionary"
    RANDOM = "random"
    ANNEALING = "annealing"
    BEAM = "beam"
