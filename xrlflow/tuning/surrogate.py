"""A model that predicts a layer's run times, learned from measurements: gradient-boosted trees, like the cost models of
AutoTVM and MetaSchedule (Chen et al., 2018, "Learning to Optimize Tensor Programs").

Two models learn from the same measurements. The first only uses knobs, and scores thousands of vectors in milliseconds.
The second also uses descriptions of kernels. For these, vectors have to be decoded (milliseconds each), so it only
ranks the vectors that the first model has selected. All tuners that search with a surrogate (a model instead of
measurements) use this module. At the beginning, the models have no measurements of the layer, but the second model can
learn from other layers: knobs differ between layers, but descriptions of kernels have the same meaning for all layers.
Its scores of unmeasured kernels then teach the first model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xrlflow.tuning.knobs import Candidate, Floats, Indices, Vector
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.tuners.protocol import Measurement

if TYPE_CHECKING:
    import xgboost

# With fewer measurements, or fewer different times among them, there is nothing to learn from.
_FEWEST, _FEWEST_FINE = 8, 2
_ROUNDS = 60
_PARAMETERS = {
    "objective": "reg:squarederror",
    "tree_method": "hist",
    "max_depth": 4,
    "eta": 0.15,
    "gamma": 1e-4,
    "min_child_weight": 1,
    "subsample": 0.9,
    "colsample_bytree": 0.5,
    "nthread": 1,
}


# All measurements of other layers together weigh at most as much as this many measurements of the layer.
_EXPERIENCE = 128.0


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """Measurements of layers: descriptions of kernels (`DesignSpace.described`), [N, width], and their scores, [N]."""

    kernels: Floats
    scores: Floats

    @staticmethod
    def none() -> Experience:
        return Experience(np.zeros((0, 0), np.float32), np.zeros(0, np.float32))

    def __len__(self) -> int:
        return len(self.scores)

    def __add__(self, other: Experience) -> Experience:
        if not len(self) or not len(other):
            return self if len(self) else other
        return Experience(
            np.concatenate([self.kernels, other.kernels]), np.concatenate([self.scores, other.scores])
        )


class Surrogate:
    """Predicts scores of kernels. A score is the best measured time divided by the kernel's own time: 1 is as good as
    the best kernel, 0 is a failure.

    `experience`: measurements of other layers, if there are any.
    """

    def __init__(self, space: DesignSpace, seed: int, experience: Experience | None = None) -> None:
        self.space, self._seed = space, seed % 2**31
        self._others = experience if experience is not None else Experience.none()
        if len(self._others) and self._others.kernels.shape[1] != space.width:
            raise ValueError("the experience is of another version")
        self._candidates: dict[str, Candidate] = {}
        self._seconds: dict[str, float] = {}
        # Kernels that were decoded, but not measured, by key.
        self._supposed: dict[str, Candidate] = {}
        self._descriptions: dict[str, Floats] = {}
        self._by_knobs: xgboost.Booster | None = None
        self._by_kernel: xgboost.Booster | None = None

    def add(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        """Learn from more measurements. If a kernel was measured before, the shorter of the two times counts."""
        for candidate, outcome in measured:
            self._candidates.setdefault(candidate.key, candidate)
            before = self._seconds.get(candidate.key, math.inf)
            self._seconds[candidate.key] = min(before, outcome.median)
            self._supposed.pop(candidate.key, None)
        if measured:
            self._by_knobs = self._by_kernel = None

    def suppose(self, candidates: Sequence[Candidate]) -> None:
        """Let the first model (of knobs) learn the scores that the second model (of descriptions) gives to these
        kernels, until they are measured."""
        fresh = [c for c in candidates if c.key not in self._seconds]
        if fresh:
            self._supposed |= {c.key: c for c in fresh}
            self._by_knobs = None

    @property
    def ready(self) -> bool:
        """Whether there are enough measurements, of this layer or of other layers, for a prediction."""
        times = self._seconds.values()
        enough = len(times) >= _FEWEST and len({t for t in times if math.isfinite(t)}) >= _FEWEST_FINE
        return enough or len(self._others) > 0

    @property
    def experience(self) -> Experience:
        """All measurements and experience so far, for surrogates of other layers."""
        if not any(map(math.isfinite, self._seconds.values())):
            return self._others
        own = self._described(list(self._candidates.values()))
        return self._others + Experience(own, self._scores(self._candidates))

    def best(self, count: int) -> list[Vector]:
        """The vectors of the fastest measured kernels, fastest first, without failures."""
        order = sorted((t, key) for key, t in self._seconds.items() if math.isfinite(t))
        return _vectors([self._candidates[key] for _, key in order[:count]])

    def promising(self, count: int) -> list[tuple[Vector, float]]:
        """The vectors of the best decoded but unmeasured kernels (see `suppose`) with their predicted scores, best
        first."""
        supposed = list(self._supposed.values())
        scores = self.rank(supposed)
        order = np.argsort(-scores, kind="stable")[:count]
        return list(zip(_vectors([supposed[i] for i in order]), scores[order].tolist()))

    def predict(self, vectors: Indices | Sequence[Vector]) -> Floats:
        """Scores of vectors [N, K], without decoding them: [N]. All scores are 0 if the surrogate is not ready."""
        if not self.ready:
            return np.zeros(len(vectors), np.float32)
        if self._by_knobs is None:
            measured, supposed = self._candidates, list(self._supposed.values())
            vectors_known = _vectors([*measured.values(), *supposed])
            if not vectors_known:
                return np.zeros(len(vectors), np.float32)
            scores = np.concatenate([self._scores(measured), self.rank(supposed)])
            self._by_knobs = self._train(self.space.features(vectors_known), scores)
        return self._ask(self._by_knobs, self.space.features(vectors))

    def rank(self, candidates: Sequence[Candidate]) -> Floats:
        """Scores of decoded candidates, by their knobs and descriptions: [N]. All scores are 0 if the surrogate is not
        ready."""
        if not self.ready or not candidates:
            return np.zeros(len(candidates), np.float32)
        if self._by_kernel is None:
            self._by_kernel = self._learn_kernels()
        return self._ask(self._by_kernel, self._describe(candidates))

    def _learn_kernels(self) -> xgboost.Booster:
        measured, others = list(self._candidates.values()), self._others
        own = self._describe(measured) if measured else None
        if not len(others):
            assert own is not None
            return self._train(own, self._scores(self._candidates))
        # Measurements of other layers have no values for the knobs of this layer: these features are missing.
        width = len(self.space.features([(0,) * len(self.space.knobs)])[0])
        blank = np.full((len(others), width), np.nan, np.float32)
        theirs = np.concatenate([blank, others.kernels], axis=1)
        if own is None:
            return self._train(theirs, others.scores)
        # No weight is below 1, because leaves have a minimum weight: with small weights, rare cases would have no
        # effect.
        weights = np.full(len(own), max(1.0, len(others) / _EXPERIENCE), np.float32)
        return self._train(
            np.concatenate([own, theirs]),
            np.concatenate([self._scores(self._candidates), others.scores]),
            np.concatenate([weights, np.ones(len(others), np.float32)]),
        )

    def _scores(self, keys: Any) -> Floats:
        best = min(self._seconds.values(), default=math.inf)
        if not math.isfinite(best):  # nothing has run so far
            return np.zeros(len(keys), np.float32)
        return np.array([best / self._seconds[key] for key in keys], np.float32)

    def _describe(self, candidates: Sequence[Candidate]) -> Floats:
        """The features of candidates, [N, F]: knobs and descriptions."""
        knobs = self.space.features(_vectors(candidates))
        return np.concatenate([knobs, self._described(candidates)], axis=1)

    def _described(self, candidates: Sequence[Candidate]) -> Floats:
        """The descriptions of kernels, [N, width], from a cache."""
        fresh = [c for c in candidates if c.key not in self._descriptions]
        if fresh:
            self._descriptions |= zip((c.key for c in fresh), self.space.described(fresh))
        return np.stack([self._descriptions[c.key] for c in candidates])

    def _train(self, features: Floats, scores: Floats, weights: Floats | None = None) -> xgboost.Booster:
        import xgboost

        data = xgboost.DMatrix(features, scores, weight=weights, nthread=1)
        return xgboost.train({**_PARAMETERS, "seed": self._seed}, data, _ROUNDS)

    @staticmethod
    def _ask(model: xgboost.Booster, features: Floats) -> Floats:
        scores: Floats = model.inplace_predict(features)
        return scores


def _vectors(candidates: Sequence[Candidate]) -> list[Vector]:
    """The vectors of candidates of this space."""
    vectors = [candidate.vector for candidate in candidates if candidate.vector is not None]
    assert len(vectors) == len(candidates), "a kernel of another space"
    return vectors
