"""Makes tuners by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.tuners.protocol import Method, Tuner

if TYPE_CHECKING:
    from xrlflow.tuning.tuners.chameleon import Agent


def make_tuner(method: Method, space: DesignSpace, seed: int, *, agent: Agent | None = None) -> Tuner:
    """A tuner of this kind. `agent`: for `chameleon`, one that learned on other layers; the tuner uses a copy.

    Raises ValueError if an agent is given to another method.
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
