"""Creates tuners by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.tuners.protocol import Method, Tuner

if TYPE_CHECKING:
    from xrlflow.tuning.tuners.chameleon import Agent


def make_tuner(method: Method, space: DesignSpace, seed: int, *, agent: Agent | None = None) -> Tuner:
    """A tuner of the method for a design space.

    `agent` is only for `chameleon`: an agent that learned on other layers. The tuner works on a copy. Raises ValueError
    if another method is given an agent.
    """
    if agent is not None and method is not Method.CHAMELEON:
        raise ValueError(f"an agent is of no use to {method.value}")
    match method:
        case Method.RANDOM:
            from xrlflow.tuning.tuners.random import RandomTuner

            return RandomTuner(space, seed)
        case Method.GENETIC:
            from xrlflow.tuning.tuners.genetic import GeneticTuner

            return GeneticTuner(space, seed)
        case Method.ANNEALING:
            from xrlflow.tuning.tuners.annealing import AnnealingTuner

            return AnnealingTuner(space, seed)
        case Method.BEAM:
            from xrlflow.tuning.tuners.beam import BeamTuner

            return BeamTuner(space, seed)
        case Method.CHAMELEON:
            from xrlflow.tuning.tuners.chameleon import ChameleonTuner

            return ChameleonTuner(space, seed, agent=agent)
        case Method.ONE_SHOT | Method.ONE_SHOT_8:
            from xrlflow.tuning.one_shot.predictor import shipped
            from xrlflow.tuning.tuners.one_shot import OneShotTuner

            return OneShotTuner(space, shipped(), 1 if method is Method.ONE_SHOT else 8)
