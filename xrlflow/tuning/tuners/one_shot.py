"""The One-Shot Tuner as a tuner: it proposes the ways of a layer in the order of a predictor, and learns nothing from
measurements (Ryu et al., 2022, "One-Shot Tuner for Deep Learning Compilers")."""

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
    """Promising ways of the space are scored, once, and at most so many proposed. Estimates order those of blocks and
    of layers that are too large for the predictor."""

    name = "one-shot"

    def __init__(self, space: DesignSpace, predictor: Predictor, most: float = math.inf) -> None:
        if predictable(space.layer):
            usual = space.choices.index(space.layer.estimated(space.machine))
            places, seconds = predicted(predictor, space, usual)
            order = places[np.argsort(seconds, kind="stable")]
        else:
            order = np.argsort(space.estimates, kind="stable")
        self._space = space
        self._rest = iter(order.tolist())
        self._most = most
        self._known: set[str] = set()

    def propose(self, count: int) -> Sequence[Candidate]:
        found: list[Candidate] = []
        while len(found) < min(count, self._most) and (place := next(self._rest, None)) is not None:
            candidate = self._space.decode(self._space.points[place].tolist())
            if candidate is not None and candidate.key not in self._known:
                self._known.add(candidate.key)
                found.append(candidate)
        self._most -= len(found)
        return found

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        self._known.update(candidate.key for candidate, _ in measured)
