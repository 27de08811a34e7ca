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
    """`best` is the number of the fastest measured vectors in the first generation; all other vectors of the first
    generation are random. `mutation` is the probability that a knob of a child gets a random value."""

    population: int = 256
    generations: int = 8
    best: int = 32
    mutation: float = 0.15

    def __post_init__(self) -> None:
        if min(self.population, self.generations, self.best) < 1 or not 0 <= self.mutation <= 1:
            raise ValueError(f"a genetic algorithm takes positive numbers and a chance, not {self}")


class GeneticTuner(Guided):
    """A tuner that breeds vectors. A child gets each knob from one of its two parents. Vectors with high scores become
    parents more often."""

    name = "genetic"

    def __init__(self, space: DesignSpace, seed: int, config: GeneticConfig = GeneticConfig()) -> None:
        super().__init__(space, seed)
        self._config = config

    def plan(self, count: int) -> Sequence[Vector]:
        config, scores_of = self._config, dict[Vector, float]()
        fastest = np.array(self.surrogate.best(config.best), np.int64).reshape(-1, len(self.space.knobs))
        others = self.space.draw(self.generator, config.population - len(fastest))
        points = np.concatenate([fastest, others])
        for _ in range(config.generations):
            points = np.unique(points, axis=0)
            scores = self.surrogate.predict(points)
            scores_of |= zip(map(tuple, points.tolist()), scores.tolist())
            points = self._children(points, scores)
        fresh = [vector for vector in scores_of if not self.frontier.spent(vector)]
        return sorted(fresh, key=lambda vector: (-scores_of[vector], vector))

    def _children(self, points: Indices, scores: Floats) -> Indices:
        """The next generation, [population, K], of points [N, K] with scores [N]."""
        size, generator = self._config.population, self.generator
        chances = np.maximum(scores.astype(np.float64), 0.0) + 1e-6
        parents: Indices = points[generator.choice(len(points), size=(2, size), p=chances / chances.sum())]
        first, second = parents
        children = np.where(generator.random(first.shape) < 0.5, first, second)
        random_values = generator.integers(self.space.sizes, size=children.shape)
        return self.space.masked(
            np.where(generator.random(children.shape) < self._config.mutation, random_values, children)
        )
