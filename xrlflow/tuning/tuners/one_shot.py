"""The One-Shot Tuner as a tuner: it proposes the ways of a layer in the order of a predictor, and learns nothing from
measurements (Ryu et al., 2022, "One-Shot Tuner for Deep Learning Compilers")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xrlflow.tuning.knobs import Candidate
from xrlflow.tuning.one_shot.predictor import Predictor
from xrlflow.tuning.one_shot.tokens import tokens_of
from xrlflow.tuning.space import WaySpace
from xrlflow.tuning.tuners.protocol import Measurement


class OneShotTuner:
    """All ways of the space are scored, once. `threads`: that kernels run with."""

    name = "one-shot"

    def __init__(self, space: WaySpace, predictor: Predictor, threads: int) -> None:
        scores = predictor.scores(tokens_of(space, threads))
        self._space = space
        self._left = iter(np.argsort(-scores, kind="stable").tolist())
        self._known: set[str] = set()

    def propose(self, count: int) -> Sequence[Candidate]:
        found: list[Candidate] = []
        while len(found) < count and (place := next(self._left, None)) is not None:
            candidate = self._space.decode(self._space.points[place].tolist())
            if candidate is not None and candidate.key not in self._known:
                self._known.add(candidate.key)
                found.append(candidate)
        return found

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        self._known.update(candidate.key for candidate, _ in measured)
