"""Random search, with which the other methods are compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xrlflow.tuning.knobs import Candidate
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.tuners.frontier import Frontier
from xrlflow.tuning.tuners.protocol import Measurement


class RandomTuner:
    """Proposes random vectors (see `DesignSpace.random`), and each kernel only once."""

    name = "random"

    def __init__(self, space: DesignSpace, seed: int) -> None:
        self._frontier = Frontier(space, np.random.default_rng(seed))

    def propose(self, count: int) -> Sequence[Candidate]:
        return self._frontier.random(count)

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        self._frontier.claim([candidate for candidate, _ in measured])
