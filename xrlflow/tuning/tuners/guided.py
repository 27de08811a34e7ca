"""The base class of tuners that search with a surrogate. It selects the vectors that are proposed among those that a
search considers promising."""

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

# The shortlist has this many times as many vectors as will be proposed: those with the best scores by the model of
# knobs. The model of kernels ranks the shortlist.
_SHORTLIST = 4


class Guided(ABC):
    """Proposes the best vectors that `plan` returns, and some random vectors. While the surrogate is not ready, all
    proposals are random."""

    name: str
    # The fraction of random proposals: AutoTVM's epsilon.
    explore: ClassVar[float] = 0.05

    def __init__(self, space: DesignSpace, seed: int) -> None:
        self.space = space
        self.generator = np.random.default_rng(seed)
        self.frontier = Frontier(space, self.generator)
        self.surrogate = Surrogate(space, seed)

    @abstractmethod
    def plan(self, count: int) -> Sequence[Vector]:
        """Promising normal vectors, best first, from which `count` kernels are selected. It is called only if the
        surrogate is ready."""

    def propose(self, count: int) -> Sequence[Candidate]:
        if count < 1 or not self.surrogate.ready:
            return self.frontier.random(count)
        by_plan = count - int(self.generator.binomial(count, self.explore))
        planned = self._planned(by_plan) if by_plan else []
        self.frontier.claim(planned)
        return [*planned, *self.frontier.random(count - len(planned))]

    def _planned(self, count: int) -> list[Candidate]:
        shortlist = self.frontier.new(self.plan(count), _SHORTLIST * count)
        order = np.argsort(-self.surrogate.rank(shortlist), kind="stable")
        return [shortlist[i] for i in order[:count]]

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        self.frontier.claim([candidate for candidate, _ in measured])
        self.surrogate.add(measured)
