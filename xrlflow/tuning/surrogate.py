"""A model of a task's run times, learned from what was measured: gradient-boosted trees, as AutoTVM's and
MetaSchedule's cost models are (Chen et al., 2018, "Learning to Optimize Tensor Programs").

Two models of the same measurements: one sees knobs alone and answers for thousands of vectors in milliseconds; the
other sees the schedules too, which have to be decoded (milliseconds each), and orders those that the first has chosen.
Every tuner that has a surrogate has this one. It starts knowing nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.load import tvm
from xrlflow.tuning.knobs import Candidate, Floats, Indices, KnobSpace, Vector
from xrlflow.tuning.tuners.protocol import Outcome

if TYPE_CHECKING:
    import xgboost

# With fewer measurements, or with one that worked, there is nothing to learn from.
_FEWEST, _FEWEST_FINE = 8, 2
_ROUNDS = 60
_PARAMETERS = {
    "objective": "reg:squarederror",
    "tree_method": "exact",
    "max_depth": 4,
    "eta": 0.15,
    "gamma": 1e-4,
    "min_child_weight": 1,
    "subsample": 0.9,
    "colsample_bytree": 0.5,
    "nthread": 1,
}


class Surrogate:
    """Scores of schedules: the best time measured over their own, so that 1 is as good as the best and 0 a failure."""

    def __init__(self, space: KnobSpace, seed: int) -> None:
        self.space, self._seed = space, seed % 2**31
        self._candidates: dict[str, Candidate] = {}
        self._seconds: dict[str, float] = {}
        self._stores: dict[str, Floats] = {}
        self._by_knobs: xgboost.Booster | None = None
        self._by_schedule: xgboost.Booster | None = None

    def add(self, measured: Sequence[tuple[Candidate, Outcome]]) -> None:
        """Learn from these too; of a kernel that was measured before, the lesser time counts."""
        for candidate, outcome in measured:
            self._candidates.setdefault(candidate.key, candidate)
            before = self._seconds.get(candidate.key, math.inf)
            self._seconds[candidate.key] = min(before, outcome.median)
        if measured:
            self._by_knobs = self._by_schedule = None

    @property
    def ready(self) -> bool:
        """Whether enough was measured to say anything."""
        times = self._seconds.values()
        return len(times) >= _FEWEST and len({t for t in times if math.isfinite(t)}) >= _FEWEST_FINE

    def best(self, count: int) -> list[Vector]:
        """The vectors of the fastest kernels measured, fastest first; not of those that failed."""
        order = sorted((t, key) for key, t in self._seconds.items() if math.isfinite(t))
        found = (self._candidates[key].vector for _, key in order)
        return [vector for vector in found if vector is not None][:count]

    def predict(self, vectors: Indices | Sequence[Vector]) -> Floats:
        """Scores of normal vectors [N, K], valid or not, without decoding them: [N]. Zeros before it is ready."""
        if not self.ready:
            return np.zeros(len(vectors), np.float32)
        if self._by_knobs is None:
            known = {k: c.vector for k, c in self._candidates.items() if c.vector is not None}
            if not known:
                return np.zeros(len(vectors), np.float32)
            self._by_knobs = self._train(self.space.features(list(known.values())), self._scores(known))
        return self._ask(self._by_knobs, self.space.features(vectors))

    def rank(self, candidates: Sequence[Candidate]) -> Floats:
        """Scores of decoded candidates, by their knobs and their schedules: [N]. Zeros before it is ready."""
        if not self.ready or not candidates:
            return np.zeros(len(candidates), np.float32)
        if self._by_schedule is None:
            known = self._candidates
            self._by_schedule = self._train(self._describe(list(known.values())), self._scores(known))
        return self._ask(self._by_schedule, self._describe(candidates))

    def _scores(self, keys: Any) -> Floats:
        best = min(self._seconds.values())
        return np.array([best / self._seconds[key] for key in keys], np.float32)

    def _describe(self, candidates: Sequence[Candidate]) -> Floats:
        """Knobs (missing where a schedule has no vector) and the sum over its stores of TVM's features of each,
        which are logarithms: [N, F]."""
        self._extract([c for c in candidates if c.key not in self._stores])
        blank = (0,) * len(self.space.knobs)
        knobs = self.space.features([blank if c.vector is None else c.vector for c in candidates])
        knobs[[c.vector is None for c in candidates]] = np.nan
        return np.concatenate([knobs, np.stack([self._stores[c.key] for c in candidates])], axis=1)

    def _extract(self, candidates: Sequence[Candidate]) -> None:
        if not candidates:
            return
        package = tvm()
        meta = package.s_tir.meta_schedule
        extractor = meta.feature_extractor.PerStoreFeature()
        wanted = [meta.MeasureCandidate(package.s_tir.Schedule(c.mod), []) for c in candidates]
        for candidate, stores in zip(candidates, extractor.extract_from(self.space.context, wanted)):
            array: npt.NDArray[Any] = stores.numpy()
            self._stores[candidate.key] = array.astype(np.float32).sum(axis=0)

    def _train(self, features: Floats, scores: Floats) -> xgboost.Booster:
        import xgboost

        data = xgboost.DMatrix(features, scores, nthread=1)
        return xgboost.train({**_PARAMETERS, "seed": self._seed}, data, _ROUNDS)

    @staticmethod
    def _ask(model: xgboost.Booster, features: Floats) -> Floats:
        found: Floats = model.inplace_predict(features)
        return found
