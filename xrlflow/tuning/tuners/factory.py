"""Makes tuners by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrlflow.tuning.knobs import KnobSpace
from xrlflow.tuning.space import Space, WaySpace
from xrlflow.tuning.tasks import Task
from xrlflow.tuning.tuners.protocol import Method, Tuner

if TYPE_CHECKING:
    from xrlflow.tuning.tuners.chameleon import Agent


def make_tuner(
    method: Method,
    task: Task,
    seed: int,
    *,
    space: Space | None = None,
    agent: Agent | None = None,
    threads: int = 1,
) -> Tuner:
    """A tuner of this kind. `space`: the task's knobs, if they are not those of TVM's own schedule rules. `agent`: for
    `chameleon`, one that learned on other tasks; the tuner uses a copy. `threads`: used to decode and propose if no
    `space` is given. With several threads, MetaSchedule's search gives other results for the same seed.

    Raises KnobError if the task cannot be scheduled, and ValueError if an agent is given to another method.
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

            if not isinstance(knobs, KnobSpace):
                raise ValueError(f"{method.value} searches TVM's own schedules, and this space has others")

            return EvolutionaryTuner(knobs, seed, EvolutionaryConfig(threads=threads))
        case Method.GENETIC:
            from xrlflow.tuning.tuners.genetic import GeneticTuner

            return GeneticTuner(knobs, seed)
        case Method.ANNEALING:
            from xrlflow.tuning.tuners.annealing import AnnealingTuner

            return AnnealingTuner(knobs, seed)
        case Method.BEAM:
            from xrlflow.tuning.tuners.beam import BeamTuner

            return BeamTuner(knobs, seed)
        case Method.CHAMELEON:
            from xrlflow.tuning.tuners.chameleon import ChameleonTuner

            return ChameleonTuner(knobs, seed, agent=agent)
        case Method.ONE_SHOT | Method.ONE_SHOT_8:
            from xrlflow.tuning.one_shot.predictor import shipped
            from xrlflow.tuning.tuners.one_shot import OneShotTuner

            if not isinstance(knobs, WaySpace):
                raise ValueError(
                    f"{method.value} knows kernels of ours, and this space has TVM's own schedules"
                )
            return OneShotTuner(knobs, shipped(), 1 if method is Method.ONE_SHOT else 8)
