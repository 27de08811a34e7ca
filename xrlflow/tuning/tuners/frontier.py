"""The kernels that a tuner has not proposed yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from xrlflow.tuning.knobs import Candidate, Vector
from xrlflow.tuning.space import DesignSpace

# Smaller spaces are listed in random order, so that it is known when nothing is left.
_LISTED = 4096
# In larger ones, drawing stops after this many draws in a row that were invalid or known.
_PATIENCE = 200


class Frontier:
    """The new kernels of a space: neither proposed by this tuner nor reported to it.

    A kernel is identified by its key. Of vectors that decode to the same kernel, the first is used.
    """

    def __init__(self, space: DesignSpace, generator: np.random.Generator) -> None:
        self.space, self._generator = space, generator
        self._keys: set[str] = set()
        # Vectors without a new kernel: they are invalid, or their kernel is known.
        self._spent: set[Vector] = set()
        self._rest: list[Vector] | None = None

    def new(self, vectors: Iterable[Vector], count: int) -> list[Candidate]:
        """The kernels of the first `count` vectors that are valid and new. They stay new until they are claimed."""
        found: dict[str, Candidate] = {}
        untried = (vector for vector in vectors if vector not in self._spent)
        # Decode no more at a time than are wanted.
        while some := list(islice(untried, count - len(found))):
            for vector, candidate in zip(some, map(self.space.decode, some)):
                if candidate is None or candidate.key in self._keys:
                    self._spent.add(vector)
                else:
                    found.setdefault(candidate.key, candidate)
        return list(found.values())

    def claim(self, candidates: Sequence[Candidate]) -> None:
        """Mark these as no longer new."""
        for candidate in candidates:
            self._keys.add(candidate.key)
            if candidate.vector is not None:
                self._spent.add(candidate.vector)

    def known(self, candidate: Candidate) -> bool:
        return candidate.key in self._keys

    def spent(self, vector: Vector) -> bool:
        """Whether the vector is known to give nothing new. False if it has not been tried."""
        return vector in self._spent

    def random(self, count: int) -> list[Candidate]:
        """At most `count` random new kernels, claimed; fewer if no more can be found."""
        found: list[Candidate] = []
        if self.space.size <= _LISTED:
            if self._rest is None:
                everything = list(self.space.enumerate())
                self._rest = [everything[i] for i in self._generator.permutation(len(everything))]
            while self._rest and len(found) < count:
                candidates = self.new([self._rest.pop()], 1)
                self.claim(candidates)
                found += candidates
            return found
        failures = 0
        while len(found) < count and failures < _PATIENCE:
            candidates = self.new([self.space.random(self._generator)], 1)
            self.claim(candidates)
            found += candidates
            failures = 0 if candidates else failures + 1
        return found
