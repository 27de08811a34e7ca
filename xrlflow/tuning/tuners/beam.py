"""Beam search on a surrogate: Halide's tree search (Adams et al., 2019, "Learning to Optimize Halide with Tree Search
and Random Programs").

Knobs are decided one after the other, and the best partial assignments are kept. The surrogate only scores complete
ones, so the score of a partial one is the mean over several completions. These are random in the first pass. In later
passes they are the results of the pass before, just as Halide's passes look for programs similar to the best so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xrlflow.tuning.knobs import Indices, Vector
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.tuners.guided import Guided


@dataclass(frozen=True, slots=True)
class BeamConfig:
    """Halide keeps 32 and makes 5 passes.

    Here both are less, because a step scores the hundreds of values of a tile.
    """

    beam: int = 16
    completions: int = 8
    passes: int = 3

    def __post_init__(self) -> None:
        if min(self.beam, self.completions, self.passes) < 1:
            raise ValueError(f"a beam search takes positive numbers, not {self}")


class BeamTuner(Guided):
    """Decides the algorithm first, then one knob after the other, in a new random order for each pass."""

    name = "beam"

    def __init__(self, space: DesignSpace, seed: int, config: BeamConfig = BeamConfig()) -> None:
        super().__init__(space, seed)
        self._config = config

    def plan(self, count: int) -> Sequence[Vector]:
        config = self._config
        seen: dict[Vector, float] = {}
        # The fastest measured vectors and random ones: a good decision is often good in other combinations.
        known = np.array(self.surrogate.best(config.completions // 2), np.int64)
        rest = self.space.draw(self.generator, config.completions)
        rest = np.concatenate([known.reshape(-1, len(self.space.knobs)), rest])[: config.completions]
        for _ in range(config.passes):
            ends, scores = self._pass(rest, max(config.beam, 4 * count))
            for end, score in zip(ends.tolist(), scores.tolist()):
                if not self.frontier.spent(tuple(end)):
                    seen[tuple(end)] = score
            rest = ends[: config.completions]
        return sorted(seen, key=lambda vector: (-seen[vector], vector))

    def _pass(self, rest: Indices, most: int) -> tuple[Indices, np.ndarray[tuple[int], np.dtype[np.float32]]]:
        """At most `most` complete vectors and their scores, best first. `rest` [C, K] completes partial ones."""
        beam = np.zeros((1, len(self.space.knobs)), np.int64)
        decided = np.zeros(len(self.space.knobs), bool)
        order = [0, *(1 + self.generator.permutation(len(self.space.knobs) - 1)).tolist()]
        scores = np.zeros(1, np.float32)
        for place, knob in enumerate(order):
            size = int(self.space.sizes[knob])
            wider = np.repeat(beam, size, axis=0)
            wider[:, knob] = np.tile(np.arange(size), len(beam))
            decided[knob] = True
            # Unused knobs are 0, so that vectors that differ only there are equal.
            wider = np.unique(np.where(decided, self.space.masked(wider), 0), axis=0)
            complete = np.where(decided, wider[:, None, :], rest[None, :, :])
            flat = self.space.masked(complete.reshape(-1, len(decided)))
            means = self.surrogate.predict(flat).reshape(len(wider), len(rest)).mean(axis=1)
            kept = self._config.beam if place + 1 < len(order) else most
            best = np.argsort(-means, kind="stable")[:kept]
            beam, scores = wider[best], means[best]
        return beam, scores
