"""What tuners choose from: the algorithms and blockings of our kernels for a layer, as vectors of knobs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.kernels.layer_kernels import Floats
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.tuning.knobs import Candidate, Indices, Knob, KnobError, Vector

if TYPE_CHECKING:
    from xrlflow.tuning.measurable import Measurable

_UNUSED = -1.0


KNOBS = ("algorithm", "rows", "vectors", "lanes", "blocks", "parts", "ahead", "order", "other rows")
"""The knobs of all layers. Rows and vectors are those of a tile; `blocks` says in how many steps a core takes its rows;
`parts`, among how many tasks its columns are divided. What `order` is depends on the algorithm."""


@dataclass(frozen=True, eq=False)
class _Group:
    """The ways of one algorithm. `values`: for each knob the indices that occur, ascending; `first`: the position of
    the first way among all; `points`: vectors [M, K]."""

    values: tuple[Indices, ...]
    first: int
    points: Indices

    @cached_property
    def nearest(self) -> tuple[tuple[Indices, ...], Indices, Indices]:
        """Tables: for each knob, the place in `values` of the nearest index that occurs, by the index; how far cells
        lie apart along each knob; and for each cell, a place in all `values`, the position of the nearest way."""
        from scipy.spatial import cKDTree

        counts = np.array([len(v) for v in self.values], np.int64)
        radix = np.append(np.cumprod(counts[::-1])[::-1][1:], 1)
        places = tuple(
            np.abs(np.arange(values[-1] + 1)[:, None] - values[None, :]).argmin(axis=1)
            for values in self.values
        )
        scale = 1.0 / np.maximum(counts - 1, 1)
        own = np.stack([np.searchsorted(v, self.points[:, k]) for k, v in enumerate(self.values)], axis=1)
        cells = np.stack(np.unravel_index(np.arange(int(counts.prod())), tuple(counts)), axis=1)
        _, near = cKDTree(own * scale).query(cells * scale, p=1)
        return places, radix, self.first + near.astype(np.int64)

    def snapped(self, indices: Indices) -> Indices:
        """The positions of the nearest ways to vectors [N, K] of this algorithm."""
        places, radix, table = self.nearest
        local = [place[np.minimum(indices[:, k], len(place) - 1)] for k, place in enumerate(places)]
        found: Indices = table[np.stack(local, axis=1) @ radix]
        return found


@dataclass(frozen=True, eq=False)
class DesignSpace:
    """All ways of a layer, as vectors [K] of the knobs that differ between some of them: an index for each knob, the
    first of which is the algorithm. A vector that is none of a way stands for the nearest way of its algorithm, whose
    vector is its normal form."""

    layer: Measurable[Any]
    machine: Machine
    choices: tuple[Any, ...]
    knobs: tuple[Knob, ...]
    points: Indices
    numbers: npt.NDArray[np.float64] = field(repr=False)
    """Of each way, all of `KNOBS`, [M, len(KNOBS)]; -1 where its algorithm has no such knob."""

    @staticmethod
    def of(layer: Measurable[Any], machine: Machine) -> DesignSpace:
        """Raises KnobError if there is nothing to choose from."""
        choices = [*layer.everything(machine)]
        if not choices:
            raise KnobError(f"{layer.name} has no kernels to choose from")
        told: list[Mapping[str, int]] = [layer.numbers(choice) for choice in choices]
        numbers = np.array([[each.get(name, _UNUSED) for name in KNOBS] for each in told])
        order = np.argsort(numbers[:, 0], kind="stable")
        numbers, choices = numbers[order], [choices[i] for i in order]
        levels = [np.unique(column) for column in numbers.T]
        several = [k for k, level in enumerate(levels) if k == 0 or len(level) > 1]
        points = np.stack([np.searchsorted(levels[k], numbers[:, k]) for k in several], axis=1)
        knobs = tuple(Knob(KNOBS[k], tuple(levels[k].tolist()), ordered=k > 0) for k in several)
        return DesignSpace(layer, machine, tuple(choices), knobs, points, numbers)

    @property
    def size(self) -> int:
        """The number of ways."""
        return len(self.choices)

    @cached_property
    def sizes(self) -> Indices:
        """The number of values of each knob, [K]."""
        return np.array([len(knob) for knob in self.knobs], np.int64)

    @property
    def kinds(self) -> int:
        """The number of algorithms."""
        return len(self.knobs[0])

    @property
    def flops(self) -> float:
        """Floating-point operations of one call."""
        return 2.0 * self.layer.work / self.layer.weight

    @property
    def width(self) -> int:
        """The number of features in `described`."""
        return int(self._described.shape[1])

    def normal(self, vector: Sequence[int]) -> Vector:
        """The vector of the way that this one stands for. Raises KnobError if it is not in this space."""
        if len(vector) != len(self.knobs):
            raise KnobError(f"a vector of {len(vector)} knobs for a space of {len(self.knobs)}")
        for knob, index in zip(self.knobs, vector):
            if not 0 <= index < len(knob):
                raise KnobError(f"knob {knob.name} has {len(knob)} values; {index} is none of them")
        return self._vector(self._position(vector))

    def random(self, generator: np.random.Generator) -> Vector:
        """A random way: all algorithms are equally likely."""
        return self._vector(int(self._drawn(generator, 1)[0]))

    def draw(self, generator: np.random.Generator, count: int) -> Indices:
        """`count` vectors, drawn like `random`: [count, K]."""
        found: Indices = self.points[self._drawn(generator, count)]
        return found

    def masked(self, indices: Indices) -> Indices:
        """The normal vectors of vectors [N, K] with valid indices."""
        return self.points[self._positions(indices)] if len(indices) else indices

    def movable(self, indices: Indices) -> npt.NDArray[np.bool_]:
        """Which knobs of vectors [N, K] are used and have several values: [N, K]."""
        found: npt.NDArray[np.bool_] = self._used[indices[:, 0]]
        return found

    def neighbours(self, vector: Sequence[int]) -> list[Vector]:
        """The normal vectors that differ in one decision and are near (see Knob.near), without duplicates."""
        start = self.normal(vector)
        moved = [
            (*start[:k], index, *start[k + 1 :])
            for k in np.flatnonzero(self._used[start[0]]).tolist()
            for index in self.knobs[k].near(start[k])
        ]
        found = dict.fromkeys(
            map(tuple, self.masked(np.array(moved, np.int64).reshape(-1, len(start))).tolist())
        )
        found.pop(start, None)
        return list(found)

    def enumerate(self) -> Iterator[Vector]:
        """The vectors of all ways."""
        return map(self._vector, range(len(self.choices)))

    def features(self, vectors: Indices | Sequence[Vector]) -> Floats:
        """Features of vectors, without decoding them, [N, F]: the algorithm (one of all), the logarithms of the other
        knobs (-1: the algorithm has none), and that of the estimated time over the least one."""
        indices = np.asarray(vectors, np.int64).reshape(-1, len(self.knobs))
        found: Floats = self._features[self._positions(indices)]
        return found

    def decode(self, vector: Sequence[int]) -> Candidate | None:
        """The kernel of a vector; None if its way has no kernel of its own."""
        position = self._position(self.normal(vector))
        choice = self.choices[position]
        try:
            module = self.layer.kernel(choice, self.machine)
        except BackendError:
            return None
        return Candidate.of(self._vector(position), json.loads(choice.text), module)

    def candidate(self, choice: Any) -> Candidate | None:
        """The kernel of a way; None if there is none, or if it is not in the space."""
        return self.decode(self._vector(self.choices.index(choice))) if choice in self.choices else None

    def described(self, candidates: Sequence[Candidate]) -> Floats:
        """Features of kernels that mean the same for all layers, [N, width]: all of `KNOBS`, the estimate, and the
        sizes of the layer."""
        places = [self._position(c.vector) for c in candidates if c.vector is not None]
        assert len(places) == len(candidates)
        return self._described[places]

    @cached_property
    def _groups(self) -> tuple[_Group, ...]:
        found = []
        for algorithm in range(self.kinds):
            mine = np.flatnonzero(self.points[:, 0] == algorithm)
            points = self.points[mine]
            values = tuple(np.unique(column) for column in points.T)
            found.append(_Group(values, int(mine[0]), points))
        return tuple(found)

    @cached_property
    def _used(self) -> npt.NDArray[np.bool_]:
        """Which knobs vary within an algorithm, [algorithms, K]; the first one if there are several algorithms."""
        found = np.array([[len(v) > 1 for v in group.values] for group in self._groups])
        found[:, 0] = self.kinds > 1
        return found

    @cached_property
    def estimates(self) -> npt.NDArray[np.float64]:
        """The estimated times of all ways, [M], in a unit of their own."""
        return np.array([self.layer.estimate(choice, self.machine) for choice in self.choices])

    @cached_property
    def _features(self) -> Floats:
        return np.concatenate([self._of_knobs, self._relative[:, None]], axis=1).astype(np.float32)

    @cached_property
    def _relative(self) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = np.log2(self.estimates / self.estimates.min())
        return found

    @cached_property
    def _of_knobs(self) -> npt.NDArray[np.float64]:
        algorithm = np.eye(self.kinds)[self.points[:, 0]]
        others = [KNOBS.index(knob.name) for knob in self.knobs[1:]]
        return np.concatenate([algorithm, _logs(self.numbers[:, others])], axis=1)

    @cached_property
    def _described(self) -> Floats:
        sizes = np.broadcast_to(np.array(self.layer.sizes, np.float64), (self.size, len(self.layer.sizes)))
        numbers = _logs(self.numbers[:, 1:])
        algorithms = np.eye(_ALGORITHMS)[self.numbers[:, 0].astype(np.int64)]
        columns = [algorithms, numbers, self._relative[:, None], _logs(sizes)]
        return np.concatenate(columns, axis=1).astype(np.float32)

    def _drawn(self, generator: np.random.Generator, count: int) -> Indices:
        groups = generator.integers(self.kinds, size=count)
        first = np.array([group.first for group in self._groups], np.int64)
        sizes = np.array([len(group.points) for group in self._groups], np.int64)
        return first[groups] + (generator.random(count) * sizes[groups]).astype(np.int64)

    def _positions(self, indices: Indices) -> Indices:
        """The positions of the ways that vectors [N, K] stand for: [N]."""
        found = np.zeros(len(indices), np.int64)
        for algorithm, group in enumerate(self._groups):
            mine = indices[:, 0] == algorithm
            if mine.any():
                found[mine] = group.snapped(indices[mine])
        return found

    def _position(self, vector: Sequence[int]) -> int:
        return int(self._positions(np.array([vector], np.int64))[0])

    def _vector(self, position: int) -> Vector:
        return tuple(self.points[position].tolist())


_ALGORITHMS = 8


def _logs(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Logarithms of 1 + numbers; what is not used stays -1."""
    return np.where(numbers < 0, _UNUSED, np.log2(1.0 + np.maximum(numbers, 0.0)))
