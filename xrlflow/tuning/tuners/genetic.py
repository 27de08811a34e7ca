"""A genetic algorithm on a surrogate, as in MetaSchedule (Shao et al., 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xrlflow.tuning.knobs import Floats, Indices, Vector
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.tuners.guided import Guided


@dataclass(frozen=True, slots=True)
class GeneticConfig:
    """`best`: so many of the fastest measured vectors are in the first generation; the others are drawn. `mutation`:
    the chance of a knob of a child to get another value."""

    population: int = 256
    generations: int = 8
    best: int = 32
    mutation: float = 0.15

    def __post_init__(self) -> None:
        if min(self.population, self.generations, self.best) < 1 or not 0 <= self.mutation <= 1:
            raise ValueError(f"a genetic algorithm takes positive numbers and a chance, not {self}")


class GeneticTuner(Guided):
    """Children take each knob from one of two parents, which are drawn by their scores."""

    name = "genetic"

    def __init__(self, space: DesignSpace, seed: int, config: GeneticConfig = GeneticConfig()) -> None:
        super().__init__(space, seed)
        self._config = config

    def plan(self, count: int) -> Sequence[Vector]:
        config, seen = self._config, dict[Vector, float]()
        known = np.array(self.surrogate.best(config.best), np.int64).reshape(-1, len(self.space.knobs))
        drawn = self.space.draw(self.generator, config.population - len(known))
        points = np.concatenate([known, drawn])
        for _ in range(config.generations):
            points = np.unique(points, axis=0)
            scores = self.surrogate.predict(points)
            seen |= zip(map(tuple, points.tolist()), scores.tolist())
            points = self._children(points, scores)
        fresh = [vector for vector in seen if not self.frontier.spent(vector)]
        return sorted(fresh, key=lambda vector: (-seen[vector], vector))

    def _children(self, points: Indices, scores: Floats) -> Indices:
        """The next generation, [population, K]."""
        size, generator = self._config.population, self.generator
        chances = np.maximum(scores.astype(np.float64), 0.0) + 1e-6
        parents: Indices = points[generator.choice(len(points), size=(2, size), p=chances / chances.sum())]
        one, other = parents
        children = np.where(generator.random(one.shape) < 0.5, one, other)
        others = generator.integers(self.space.sizes, size=children.shape)
        return self.space.masked(
            np.where(generator.random(children.shape) < self._config.mutation, others, children)
        )
