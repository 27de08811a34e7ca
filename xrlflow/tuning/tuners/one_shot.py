"""A tuner that proposes the kernels of a layer in the order of their predicted times (Ryu et al., 2022, "One-Shot Tuner
for Deep Learning Compilers"). The tuner learns nothing from measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from xrlflow.tuning.knobs import Candidate
from xrlflow.tuning.one_shot.predictor import Predictor
from xrlflow.tuning.one_shot.times import predictable, predicted
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.tuners.protocol import Measurement


class OneShotTuner:
    """Predicts the times of the promising kernels of a design space once, and proposes at most `limit` of these
    kernels, fastest first.

    Kernels of inverted residuals, and of layers that are too large for the predictor, are proposed in the order of
    their estimated times instead.
    """

    name = "one-shot"

    def __init__(self, space: DesignSpace, predictor: Predictor, limit: float = math.inf) -> None:
        if predictable(space.layer):
            untuned = space.choices.index(space.layer.estimated(space.machine))
            positions, seconds = predicted(predictor, space, untuned)
            order = positions[np.argsort(seconds, kind="stable")]
        else:
            order = np.argsort(space.estimates, kind="stable")
        self._space = space
        self._remaining = iter(order.tolist())
        self._limit = limit
        self._proposed: set[str] = set()

    def propose(self, count: int) -> Sequence[Candidate]:
        candidates: list[Candidate] = []
        while (
            len(candidates) < min(count, self._limit)
            and (position := next(self._remaining, None)) is not None
        ):
            candidate = self._space.decode(self._space.points[position].tolist())
            if candidate is not None and candidate.key not in self._proposed:
                self._proposed.add(candidate.key)
                candidates.append(candidate)
        self._limit -= len(candidates)
        return candidates

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        self._proposed.update(candidate.key for candidate, _ in measured)
