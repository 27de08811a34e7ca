"""The base of tuners that search a surrogate: which of the vectors found are decoded and proposed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from xrlflow.tuning.knobs import Candidate, Vector
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.surrogate import Surrogate
from xrlflow.tuning.tuners.frontier import Frontier
from xrlflow.tuning.tuners.protocol import Measurement

# This many times the wanted number of vectors, the best by the model of knobs, are decoded for the model of schedules.
_SHORTLIST = 4


class Guided(ABC):
    """Proposes what `plan` finds, and some random candidates; only random ones while the surrogate is not ready."""

    name: str
    # The part of the proposals that is random: AutoTVM's epsilon.
    explore: ClassVar[float] = 0.05

    def __init__(self, space: DesignSpace, seed: int) -> None:
        self.space = space
        self.generator = np.random.default_rng(seed)
        self.frontier = Frontier(space, self.generator)
        self.surrogate = Surrogate(space, seed)

    @abstractmethod
    def plan(self, count: int) -> Sequence[Vector]:
        """Normal vectors, the most promising first, for `count` kernels. The surrogate is ready."""

    def propose(self, count: int) -> Sequence[Candidate]:
        if count < 1 or not self.surrogate.ready:
            return self.frontier.random(count)
        wanted = count - int(self.generator.binomial(count, self.explore))
        chosen = self._planned(wanted) if wanted else []
        self.frontier.claim(chosen)
        return [*chosen, *self.frontier.random(count - len(chosen))]

    def _planned(self, wanted: int) -> list[Candidate]:
        shortlist = self.frontier.new(self.plan(wanted), _SHORTLIST * wanted)
        order = np.argsort(-self.surrogate.rank(shortlist), kind="stable")
        return [shortlist[i] for i in order[:wanted]]

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        self.frontier.claim([candidate for candidate, _ in measured])
        self.surrogate.add(measured)
