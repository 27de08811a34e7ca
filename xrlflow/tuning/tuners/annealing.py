"""Simulated annealing on a surrogate: AutoTVM's tuner (Chen et al., 2018, "Learning to Optimize Tensor Programs")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xrlflow.tuning.knobs import Floats, Indices, Vector
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.tuners.guided import Guided


@dataclass(frozen=True, slots=True)
class AnnealingConfig:
    """The parameters of simulated annealing, with the defaults of AutoTVM's `sa_model_optimizer.py`."""

    chains: int = 128
    steps: int = 500
    # The temperature at the first step. It falls linearly to 0. Scores lie between 0 and about 1.
    temperature: float = 1.0
    # The search stops early if the list of the best vectors has not changed for this many steps.
    patience: int = 50

    def __post_init__(self) -> None:
        if min(self.chains, self.steps, self.patience) < 1 or self.temperature <= 0:
            raise ValueError(f"annealing takes positive numbers, not {self}")


class AnnealingTuner(Guided):
    """A tuner that runs many Markov chains in parallel, scored by the surrogate. In each step, every chain proposes to
    change one knob to any other value.

    The next call of `plan` continues from the points where the chains ended.
    """

    name = "annealing"

    def __init__(self, space: DesignSpace, seed: int, config: AnnealingConfig = AnnealingConfig()) -> None:
        super().__init__(space, seed)
        self._config = config
        self._points: Indices | None = None

    def plan(self, count: int) -> Sequence[Vector]:
        config = self._config
        points = self._points
        if points is None:
            points = self.space.draw(self.generator, config.chains)
        scores = self.surrogate.predict(points)
        # The best vectors so far that may give a new kernel (see `Frontier.spent`), with their scores.
        best: dict[Vector, float] = {}
        size = 8 * count
        floor, idle = -np.inf, 0
        self._note(best, points, scores, floor)
        for step in range(config.steps):
            changed = self._changed(points)
            new_scores = self.surrogate.predict(changed)
            temperature = config.temperature * (1 - step / config.steps) + 1e-5
            chance = np.exp(np.minimum((new_scores - scores) / temperature, 0.0))
            accepted = self.generator.random(len(points)) < chance
            points = np.where(accepted[:, None], changed, points)
            scores = np.where(accepted, new_scores, scores)
            idle = 0 if self._note(best, changed, new_scores, floor) else idle + 1
            if len(best) > size:
                best = dict(sorted(best.items(), key=lambda entry: (-entry[1], entry[0]))[:size])
                floor = min(best.values())
            if idle >= config.patience:
                break
        self._points = points
        return sorted(best, key=lambda vector: (-best[vector], vector))

    def _note(self, best: dict[Vector, float], points: Indices, scores: Floats, floor: float) -> bool:
        """Add the vectors with a score above `floor` to `best`, unless they are known to give no new kernel. Returns
        whether any vector was added."""
        before = len(best)
        for i in np.flatnonzero(scores > floor):
            vector: Vector = tuple(points[i].tolist())
            if vector not in best and not self.frontier.spent(vector):
                best[vector] = float(scores[i])
        return len(best) > before

    def _changed(self, points: Indices) -> Indices:
        """The points, [N, K], with one random knob of each changed to another value. A point without a knob to change
        remains."""
        draws = np.where(self.space.movable(points), self.generator.random(points.shape), -1.0)
        knob = draws.argmax(axis=1)
        rows = np.arange(len(points))
        # The shift leads to any value but the present one. A knob with a single value does not change.
        shift = 1 + (self.generator.random(len(points)) * (self.space.sizes[knob] - 1)).astype(np.int64)
        changed = points.copy()
        changed[rows, knob] = (points[rows, knob] + shift) % self.space.sizes[knob]
        return self.space.masked(changed)
