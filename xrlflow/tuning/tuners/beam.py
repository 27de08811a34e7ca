"""Beam search on a surrogate, like the tree search of Halide (Adams et al., 2019, "Learning to Optimize Halide with
Tree Search and Random Programs").

The search decides one knob after the other and keeps the best partial vectors. The surrogate can only score complete
vectors, so the score of a partial vector is the mean over several completions. The completions are random in the first
pass. In later passes they are the best results of the pass before, just as Halide's later passes look for programs
similar to the best so far.
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
    """The size of the search: of the beam, and the number of passes. Halide uses a beam of 32 and 5 passes.

    Both are smaller here, because the tile of an operator has hundreds of values, all of which are scored when that
    knob is decided.
    """

    beam: int = 16
    completions: int = 8
    passes: int = 3

    def __post_init__(self) -> None:
        if min(self.beam, self.completions, self.passes) < 1:
            raise ValueError(f"a beam search takes positive numbers, not {self}")


class BeamTuner(Guided):
    """A tuner that decides the algorithm first, then one knob after the other. Each pass uses a new random order of the
    knobs."""

    name = "beam"

    def __init__(self, space: DesignSpace, seed: int, config: BeamConfig = BeamConfig()) -> None:
        super().__init__(space, seed)
        self._config = config

    def plan(self, count: int) -> Sequence[Vector]:
        config = self._config
        scores_of: dict[Vector, float] = {}
        # Partial vectors are completed with the fastest measured vectors and with random vectors: a decision that is
        # good with these completions is often good with others.
        fastest = np.array(self.surrogate.best(config.completions // 2), np.int64)
        completions = self.space.draw(self.generator, config.completions)
        completions = np.concatenate([fastest.reshape(-1, len(self.space.knobs)), completions])[
            : config.completions
        ]
        for _ in range(config.passes):
            ends, scores = self._pass(completions, max(config.beam, 4 * count))
            for end, score in zip(ends.tolist(), scores.tolist()):
                if not self.frontier.spent(tuple(end)):
                    scores_of[tuple(end)] = score
            completions = ends[: config.completions]
        return sorted(scores_of, key=lambda vector: (-scores_of[vector], vector))

    def _pass(
        self, completions: Indices, limit: int
    ) -> tuple[Indices, np.ndarray[tuple[int], np.dtype[np.float32]]]:
        """One pass of the search: decide all knobs in a random order, and score partial vectors with the completions
        [C, K].

        Returns at most `limit` complete vectors and their scores, best first.
        """
        beam = np.zeros((1, len(self.space.knobs)), np.int64)
        decided = np.zeros(len(self.space.knobs), bool)
        order = [0, *(1 + self.generator.permutation(len(self.space.knobs) - 1)).tolist()]
        scores = np.zeros(1, np.float32)
        for position, knob in enumerate(order):
            size = int(self.space.sizes[knob])
            wider = np.repeat(beam, size, axis=0)
            wider[:, knob] = np.tile(np.arange(size), len(beam))
            decided[knob] = True
            # Unused knobs become 0, so that vectors that differ only in unused knobs are equal.
            wider = np.unique(np.where(decided, self.space.masked(wider), 0), axis=0)
            complete = np.where(decided, wider[:, None, :], completions[None, :, :])
            flat = self.space.masked(complete.reshape(-1, len(decided)))
            means = self.surrogate.predict(flat).reshape(len(wider), len(completions)).mean(axis=1)
            count = self._config.beam if position + 1 < len(order) else limit
            best = np.argsort(-means, kind="stable")[:count]
            beam, scores = wider[best], means[best]
        return beam, scores
