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
    """Defaults are AutoTVM's (`sa_model_optimizer.py`)."""

    chains: int = 128
    steps: int = 500
    # Falls linearly to 0. Scores are between 0 and about 1.
    temperature: float = 1.0
    # The chains stop if the best `plan` vectors have not changed for this many steps.
    patience: int = 50

    def __post_init__(self) -> None:
        if min(self.chains, self.steps, self.patience) < 1 or self.temperature <= 0:
            raise ValueError(f"annealing takes positive numbers, not {self}")


class AnnealingTuner(Guided):
    """Parallel chains that change one knob to any other value. With new measurements they continue where they ended."""

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
        # The score of each vector that may still give something new.
        seen: dict[Vector, float] = {}
        size = 8 * count
        floor, idle = -np.inf, 0
        self._note(seen, points, scores, floor)
        for step in range(config.steps):
            moved = self._moved(points)
            found = self.surrogate.predict(moved)
            temperature = config.temperature * (1 - step / config.steps) + 1e-5
            chance = np.exp(np.minimum((found - scores) / temperature, 0.0))
            accepted = self.generator.random(len(points)) < chance
            points = np.where(accepted[:, None], moved, points)
            scores = np.where(accepted, found, scores)
            idle = 0 if self._note(seen, moved, found, floor) else idle + 1
            if len(seen) > size:
                seen = dict(sorted(seen.items(), key=lambda entry: (-entry[1], entry[0]))[:size])
                floor = min(seen.values())
            if idle >= config.patience:
                break
        self._points = points
        return sorted(seen, key=lambda vector: (-seen[vector], vector))

    def _note(self, seen: dict[Vector, float], points: Indices, scores: Floats, floor: float) -> bool:
        """Remember vectors above the floor that are not spent. True if any was new."""
        before = len(seen)
        for i in np.flatnonzero(scores > floor):
            vector: Vector = tuple(points[i].tolist())
            if vector not in seen and not self.frontier.spent(vector):
                seen[vector] = float(scores[i])
        return len(seen) > before

    def _moved(self, points: Indices) -> Indices:
        """The points, each with one knob changed to another value, if it has one to change."""
        draws = np.where(self.space.movable(points), self.generator.random(points.shape), -1.0)
        knob = draws.argmax(axis=1)
        rows = np.arange(len(points))
        # Any value but the present one. Knobs with a single value stay.
        shift = 1 + (self.generator.random(len(points)) * (self.space.sizes[knob] - 1)).astype(np.int64)
        moved = points.copy()
        moved[rows, knob] = (points[rows, knob] + shift) % self.space.sizes[knob]
        return self.space.masked(moved)
