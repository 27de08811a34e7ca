"""What every tuner is: it proposes candidates, and is told how long they took."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from xrlflow.tuning.knobs import Candidate, KnobSpace
from xrlflow.tuning.tasks import Task

if TYPE_CHECKING:
    from xrlflow.tuning.tuners.chameleon import Agent


@dataclass(frozen=True, slots=True)
class Outcome:
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

    def update(self, measured: Sequence[tuple[Candidate, Outcome]]) -> None:
        """Learn from measurements, of this tuner's candidates or of another's of the same task."""
        ...


class Method(Enum):
    """The tuners that there are, by the name on the command line."""

    CHAMELEON = "chameleon"
    EVOLUTIONARY = "evolutionary"
    RANDOM = "random"
    ANNEALING = "annealing"
    BEAM = "beam"


def make_tuner(
    method: Method,
    task: Task,
    seed: int,
    *,
    space: KnobSpace | None = None,
    agent: Agent | None = None,
    threads: int = 1,
) -> Tuner:
    """A tuner of this kind. `space`: the task's knobs, where they are not those of TVM's own schedule rules;
    `agent`: for `chameleon`, one that has learned on other tasks (the tuner works on a copy). `threads`: that
    decode and propose, where no `space` is given; MetaSchedule's search with more than one does not give the same for
    the same seed.

    Raises KnobError where the task cannot be scheduled, ValueError where an agent is given to another method.
    """
    if agent is not None and method is not Method.CHAMELEON:
        raise ValueError(f"an agent is of no use to {method.value}")
    knobs = space if space is not None else KnobSpace.of(task, seed, threads=threads)
    match method:
        case Method.RANDOM:
            from xrlflow.tuning.tuners.random import RandomTuner

            return RandomTuner(knobs, seed)
        case Method.EVOLUTIONARY:
            from xrlflow.tuning.tuners.evolutionary import EvolutionaryConfig, EvolutionaryTuner

            return EvolutionaryTuner(knobs, seed, EvolutionaryConfig(threads=threads))
        case Method.ANNEALING:
            from xrlflow.tuning.tuners.annealing import AnnealingTuner

            return AnnealingTuner(knobs, seed)
        case Method.BEAM:
            from xrlflow.tuning.tuners.beam import BeamTuner

            return BeamTuner(knobs, seed)
        case Method.CHAMELEON:
            from xrlflow.tuning.tuners.chameleon import ChameleonTuner

            return ChameleonTuner(knobs, seed, agent=agent)
