"""A model of a task's run times, learned from what was measured: gradient-boosted trees, as AutoTVM's and
MetaSchedule's cost models are (Chen et al., 2018, "Learning to Optimize Tensor Programs").

Two models of the same measurements: one sees knobs alone and answers for thousands of vectors in milliseconds; the
other sees the schedules too, which have to be decoded (milliseconds each), and orders those that the first has chosen.
Every tuner that has a surrogate has this one. It starts knowing nothing, but for what it is given of other tasks:
knobs are a task's own, but schedules are described alike everywhere, so that the second model can learn from them.
What it thinks of schedules that nobody has measured then teaches the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.tuning.knobs import Candidate, Floats, Indices, KnobSpace, Vector
from xrlflow.tuning.tuners.protocol import Measurement

if TYPE_CHECKING:
    import xgboost

# With fewer measurements, or with one that worked, there is nothing to learn from.
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


# What other tasks have shown weighs as much as so many measurements of this one at most, however much it is.
_EXPERIENCE = 128.0
# TVM's features of a store; they begin with its numbers of floating-point operations, by kind.
_STORE, _ARITHMETIC = 164, 7
SCHEDULE_FEATURES = 2 * _STORE
"""How many numbers describe a schedule."""


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """What was measured of tasks: schedules as a surrogate describes them [N, SCHEDULE_FEATURES], their scores [N]."""

    schedules: Floats
    scores: Floats

    @staticmethod
    def none() -> Experience:
        return Experience(np.zeros((0, SCHEDULE_FEATURES), np.float32), np.zeros(0, np.float32))

    def __len__(self) -> int:
        return len(self.scores)

    def __add__(self, other: Experience) -> Experience:
        return Experience(
            np.concatenate([self.schedules, other.schedules]), np.concatenate([self.scores, other.scores])
        )


class Surrogate:
    """Scores of schedules: the best time measured over their own, so that 1 is as good as the best and 0 a failure.

    `experience`: of other tasks, if there is any.
    """

    def __init__(self, space: KnobSpace, seed: int, experience: Experience | None = None) -> None:
        self.space, self._seed = space, seed % 2**31
        self._others = experience if experience is not None else Experience.none()
        self._candidates: dict[str, Candidate] = {}
        self._seconds: dict[str, float] = {}
        # Decoded, but not measured.
        self._supposed: dict[str, Candidate] = {}
        self._schedules: dict[str, Floats] = {}
        self._by_knobs: xgboost.Booster | None = None
        self._by_schedule: xgboost.Booster | None = None

    def add(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        """Learn from these too; of a kernel that was measured before, the lesser time counts."""
        for candidate, outcome in measured:
            self._candidates.setdefault(candidate.key, candidate)
            before = self._seconds.get(candidate.key, math.inf)
            self._seconds[candidate.key] = min(before, outcome.median)
            self._supposed.pop(candidate.key, None)
        if measured:
            self._by_knobs = self._by_schedule = None

    def suppose(self, candidates: Sequence[Candidate]) -> None:
        """Let the model of knobs learn what the model of schedules thinks of these, until they are measured."""
        fresh = [c for c in candidates if c.vector is not None and c.key not in self._seconds]
        if fresh:
            self._supposed |= {c.key: c for c in fresh}
            self._by_knobs = None

    @property
    def ready(self) -> bool:
        """Whether there is enough to say anything: measurements of this task or of others."""
        times = self._seconds.values()
        enough = len(times) >= _FEWEST and len({t for t in times if math.isfinite(t)}) >= _FEWEST_FINE
        return enough or len(self._others) > 0

    @property
    def experience(self) -> Experience:
        """All that it was given and told, for the surrogates of other tasks."""
        if not any(map(math.isfinite, self._seconds.values())):
            return self._others
        own = self._schedules_of(list(self._candidates.values()))
        return self._others + Experience(own, self._scores(self._candidates))

    def best(self, count: int) -> list[Vector]:
        """The vectors of the fastest kernels measured, fastest first; not of those that failed."""
        order = sorted((t, key) for key, t in self._seconds.items() if math.isfinite(t))
        found = (self._candidates[key].vector for _, key in order)
        return [vector for vector in found if vector is not None][:count]

    def promising(self, count: int) -> list[tuple[Vector, float]]:
        """The vectors of the best schedules supposed with their scores, the best first."""
        supposed = list(self._supposed.values())
        scores = self.rank(supposed)
        order = np.argsort(-scores, kind="stable")[:count]
        return [(vector, float(scores[i])) for i in order if (vector := supposed[i].vector) is not None]

    def predict(self, vectors: Indices | Sequence[Vector]) -> Floats:
        """Scores of normal vectors [N, K], valid or not, without decoding them: [N]. Zeros before it is ready."""
        if not self.ready:
            return np.zeros(len(vectors), np.float32)
        if self._by_knobs is None:
            known = {k: c.vector for k, c in self._candidates.items() if c.vector is not None}
            supposed = list(self._supposed.values())
            places = [*known.values(), *(c.vector for c in supposed if c.vector is not None)]
            if not places:
                return np.zeros(len(vectors), np.float32)
            scores = np.concatenate([self._scores(known), self.rank(supposed)])
            self._by_knobs = self._train(self.space.features(places), scores)
        return self._ask(self._by_knobs, self.space.features(vectors))

    def rank(self, candidates: Sequence[Candidate]) -> Floats:
        """Scores of decoded candidates, by their knobs and their schedules: [N]. Zeros before it is ready."""
        if not self.ready or not candidates:
            return np.zeros(len(candidates), np.float32)
        if self._by_schedule is None:
            self._by_schedule = self._learn_schedules()
        return self._ask(self._by_schedule, self._describe(candidates))

    def _learn_schedules(self) -> xgboost.Booster:
        known, others = list(self._candidates.values()), self._others
        own = self._describe(known) if known else None
        if not len(others):
            assert own is not None
            return self._train(own, self._scores(self._candidates))
        # Their knobs are not this task's: they are missing.
        width = len(self.space.features([(0,) * len(self.space.knobs)])[0])
        blank = np.full((len(others), width), np.nan, np.float32)
        theirs = np.concatenate([blank, others.schedules], axis=1)
        if own is None:
            return self._train(theirs, others.scores)
        # Nothing weighs less than 1: what is a leaf's least weight would hide what few of them show.
        weights = np.full(len(own), max(1.0, len(others) / _EXPERIENCE), np.float32)
        return self._train(
            np.concatenate([own, theirs]),
            np.concatenate([self._scores(self._candidates), others.scores]),
            np.concatenate([weights, np.ones(len(others), np.float32)]),
        )

    def _scores(self, keys: Any) -> Floats:
        best = min(self._seconds.values(), default=math.inf)
        if not math.isfinite(best):  # nothing has worked so far
            return np.zeros(len(keys), np.float32)
        return np.array([best / self._seconds[key] for key in keys], np.float32)

    def _describe(self, candidates: Sequence[Candidate]) -> Floats:
        """Knobs (missing where a schedule has no vector), and the schedules: [N, F]."""
        blank = (0,) * len(self.space.knobs)
        knobs = self.space.features([blank if c.vector is None else c.vector for c in candidates])
        knobs[[c.vector is None for c in candidates]] = np.nan
        return np.concatenate([knobs, self._schedules_of(candidates)], axis=1)

    def _schedules_of(self, candidates: Sequence[Candidate]) -> Floats:
        """TVM's features of each store, which are logarithms, as their sum and as those of the store that computes
        most: [N, SCHEDULE_FEATURES], whatever the task."""
        self._extract([c for c in candidates if c.key not in self._schedules])
        return np.stack([self._schedules[c.key] for c in candidates])

    def _extract(self, candidates: Sequence[Candidate]) -> None:
        if not candidates:
            return
        package = tvm()
        meta = package.s_tir.meta_schedule
        extractor = meta.feature_extractor.PerStoreFeature()
        wanted = self.space.spread(
            lambda c: meta.MeasureCandidate(package.s_tir.Schedule(c.mod), []), candidates
        )
        for candidate, stores in zip(candidates, extractor.extract_from(self.space.context, wanted)):
            array: Floats = stores.numpy().astype(np.float32)
            main = array[array[:, :_ARITHMETIC].sum(axis=1).argmax()]
            self._schedules[candidate.key] = np.concatenate([array.sum(axis=0), main])

    def _train(self, features: Floats, scores: Floats, weights: Floats | None = None) -> xgboost.Booster:
        import xgboost

        data = xgboost.DMatrix(features, scores, weight=weights, nthread=1)
        return xgboost.train({**_PARAMETERS, "seed": self._seed}, data, _ROUNDS)

    @staticmethod
    def _ask(model: xgboost.Booster, features: Floats) -> Floats:
        found: Floats = model.inplace_predict(features)
        return found
