"""The kernels of a space that a tuner has not proposed yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from xrlflow.tuning.knobs import Candidate, Vector
from xrlflow.tuning.space import DesignSpace

# Design spaces of at most this size are listed in random order, so that a tuner knows when all kernels were proposed.
_LISTED = 4096
# In larger design spaces, a search for random new kernels stops after this many draws in a row without one.
_PATIENCE = 200


class Frontier:
    """The new kernels of a design space: those that the tuner has not proposed, and of which it has got no measurement.

    Kernels are equal if their keys are equal. If several vectors decode to the same kernel, the first one represents
    it.
    """

    def __init__(self, space: DesignSpace, generator: np.random.Generator) -> None:
        self.space, self._generator = space, generator
        self._keys: set[str] = set()
        # Vectors that give no new kernel, because they are invalid, or because their kernel was claimed (proposed or
        # measured).
        self._spent: set[Vector] = set()
        self._remaining: list[Vector] | None = None

    def new(self, vectors: Iterable[Vector], count: int) -> list[Candidate]:
        """Decode vectors until there are `count` new kernels, or no vectors are left. The kernels remain new until
        `claim` is called with them."""
        new: dict[str, Candidate] = {}
        untried = (vector for vector in vectors if vector not in self._spent)
        # At most as many vectors are decoded at a time as kernels are missing.
        while batch := list(islice(untried, count - len(new))):
            for vector, candidate in zip(batch, map(self.space.decode, batch)):
                if candidate is None or candidate.key in self._keys:
                    self._spent.add(vector)
                else:
                    new.setdefault(candidate.key, candidate)
        return list(new.values())

    def claim(self, candidates: Sequence[Candidate]) -> None:
        """Record that these kernels are no longer new, since they are proposed or measured."""
        for candidate in candidates:
            self._keys.add(candidate.key)
            if candidate.vector is not None:
                self._spent.add(candidate.vector)

    def claimed(self, candidate: Candidate) -> bool:
        return candidate.key in self._keys

    def spent(self, vector: Vector) -> bool:
        """Whether it is known that the vector gives no new kernel. False if the vector was not decoded yet."""
        return vector in self._spent

    def random(self, count: int) -> list[Candidate]:
        """Claim and return `count` random new kernels, or fewer if no more can be found."""
        proposed: list[Candidate] = []
        if self.space.size <= _LISTED:
            if self._remaining is None:
                everything = list(self.space.enumerate())
                self._remaining = [everything[i] for i in self._generator.permutation(len(everything))]
            while self._remaining and len(proposed) < count:
                candidates = self.new([self._remaining.pop()], 1)
                self.claim(candidates)
                proposed += candidates
            return proposed
        failures = 0
        while len(proposed) < count and failures < _PATIENCE:
            candidates = self.new([self.space.random(self._generator)], 1)
            self.claim(candidates)
            proposed += candidates
            failures = 0 if candidates else failures + 1
        return proposed
