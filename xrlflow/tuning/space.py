"""The design space of a layer: the algorithms and blockings of its kernels, as vectors of knobs."""

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
"""The knobs of all layers. `rows`, `vectors`: the rows of a tile, and the vectors in a row of it. `lanes`: the lanes of
a vector. `blocks`: the number of steps in which a core computes its rows. `parts`: the number of parallel tasks among
which columns are divided. The meaning of `order` depends on the algorithm."""


@dataclass(frozen=True, eq=False)
class _Group:
    """The choices of one algorithm. `values`: for each knob the indices that occur, ascending. `first`: the position of
    this algorithm's first choice among the choices of all algorithms. `points`: the vectors [M, K] of the M choices,
    with an index for each of K knobs."""

    values: tuple[Indices, ...]
    first: int
    points: Indices

    @cached_property
    def nearest(self) -> tuple[tuple[Indices, ...], Indices, Indices]:
        """Tables with which the choice nearest to a vector is found. The values that occur span a grid of cells. First
        table: for each knob and index, the position in `values` of the nearest value. Second: the step between
        neighbouring cells in the third table, for each knob. Third: for each cell, the position of the nearest
        choice."""
        from scipy.spatial import cKDTree

        counts = np.array([len(v) for v in self.values], np.int64)
        radix = np.append(np.cumprod(counts[::-1])[::-1][1:], 1)
        positions = tuple(
            np.abs(np.arange(values[-1] + 1)[:, None] - values[None, :]).argmin(axis=1)
            for values in self.values
        )
        scale = 1.0 / np.maximum(counts - 1, 1)
        normal = np.stack([np.searchsorted(v, self.points[:, k]) for k, v in enumerate(self.values)], axis=1)
        cells = np.stack(np.unravel_index(np.arange(int(counts.prod())), tuple(counts)), axis=1)
        _, near = cKDTree(normal * scale).query(cells * scale, p=1)
        return positions, radix, self.first + near.astype(np.int64)

    def snapped(self, indices: Indices) -> Indices:
        """For vectors [N, K] of this algorithm, the positions of the nearest choices, [N]."""
        positions, radix, table = self.nearest
        local = [
            table_of_knob[np.minimum(indices[:, k], len(table_of_knob) - 1)]
            for k, table_of_knob in enumerate(positions)
        ]
        nearest: Indices = table[np.stack(local, axis=1) @ radix]
        return nearest


@dataclass(frozen=True, eq=False)
class DesignSpace:
    """All choices of a layer, as vectors [K] with an index for each knob. The first knob is the algorithm; knobs that
    are the same for all choices are left out. A vector that belongs to no choice represents the nearest choice of its
    algorithm. The vector of a choice is called normal."""

    layer: Measurable[Any]
    machine: Machine
    choices: tuple[Any, ...]
    knobs: tuple[Knob, ...]
    points: Indices
    numbers: npt.NDArray[np.float64] = field(repr=False)
    """For each of M choices the values of all `KNOBS`, [M, len(KNOBS)]; -1 if the choice's algorithm has no such
    knob."""

    @staticmethod
    def of(layer: Measurable[Any], machine: Machine) -> DesignSpace:
        """The design space of a layer. Raises KnobError if the layer has no choices."""
        choices = [*layer.everything(machine)]
        if not choices:
            raise KnobError(f"{layer.name} has no kernels to choose from")
        knob_values: list[Mapping[str, int]] = [layer.numbers(choice) for choice in choices]
        numbers = np.array([[each.get(name, _UNUSED) for name in KNOBS] for each in knob_values])
        order = np.argsort(numbers[:, 0], kind="stable")
        numbers, choices = numbers[order], [choices[i] for i in order]
        levels = [np.unique(column) for column in numbers.T]
        several = [k for k, level in enumerate(levels) if k == 0 or len(level) > 1]
        points = np.stack([np.searchsorted(levels[k], numbers[:, k]) for k in several], axis=1)
        knobs = tuple(Knob(KNOBS[k], tuple(levels[k].tolist()), ordered=k > 0) for k in several)
        return DesignSpace(layer, machine, tuple(choices), knobs, points, numbers)

    @property
    def size(self) -> int:
        """The number of choices."""
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
        """The number of floating-point operations of one call of the layer."""
        return 2.0 * self.layer.work / self.layer.weight

    @property
    def width(self) -> int:
        """The number of features in `described`."""
        return int(self._described.shape[1])

    def normal(self, vector: Sequence[int]) -> Vector:
        """The vector of the choice that this vector represents (see `DesignSpace`). Raises KnobError if the vector is
        not in this space."""
        if len(vector) != len(self.knobs):
            raise KnobError(f"a vector of {len(vector)} knobs for a space of {len(self.knobs)}")
        for knob, index in zip(self.knobs, vector):
            if not 0 <= index < len(knob):
                raise KnobError(f"knob {knob.name} has {len(knob)} values; {index} is none of them")
        return self._vector(self._position(vector))

    def random(self, generator: np.random.Generator) -> Vector:
        """The vector of a random choice. All algorithms are equally likely."""
        return self._vector(int(self._random_positions(generator, 1)[0]))

    def draw(self, generator: np.random.Generator, count: int) -> Indices:
        """`count` random vectors, with the same probabilities as in `random`: [count, K]."""
        vectors: Indices = self.points[self._random_positions(generator, count)]
        return vectors

    def masked(self, indices: Indices) -> Indices:
        """The normal vectors (see `DesignSpace`) of vectors [N, K] with valid indices."""
        return self.points[self._positions(indices)] if len(indices) else indices

    def movable(self, indices: Indices) -> npt.NDArray[np.bool_]:
        """For vectors [N, K], which of their knobs their algorithm uses with several values: [N, K]."""
        movable: npt.NDArray[np.bool_] = self._used[indices[:, 0]]
        return movable

    def neighbours(self, vector: Sequence[int]) -> list[Vector]:
        """The normal vectors that result from a change of one knob to a near value (see `Knob.near`), without
        duplicates."""
        start = self.normal(vector)
        changed = [
            (*start[:k], index, *start[k + 1 :])
            for k in np.flatnonzero(self._used[start[0]]).tolist()
            for index in self.knobs[k].near(start[k])
        ]
        normal = dict.fromkeys(
            map(tuple, self.masked(np.array(changed, np.int64).reshape(-1, len(start))).tolist())
        )
        normal.pop(start, None)
        return list(normal)

    def enumerate(self) -> Iterator[Vector]:
        """The vectors of all choices."""
        return map(self._vector, range(len(self.choices)))

    def features(self, vectors: Indices | Sequence[Vector]) -> Floats:
        """Features of vectors, without decoding them, [N, F]: the algorithm (one-hot), the logarithms of the other
        knobs (-1 if the algorithm has none), and the logarithm of the estimated time divided by the least estimated
        time."""
        indices = np.asarray(vectors, np.int64).reshape(-1, len(self.knobs))
        features: Floats = self._features[self._positions(indices)]
        return features

    def decode(self, vector: Sequence[int]) -> Candidate | None:
        """The kernel of a vector; None if the vector's choice has no kernel of its own."""
        position = self._position(self.normal(vector))
        choice = self.choices[position]
        try:
            module = self.layer.kernel(choice, self.machine)
        except BackendError:
            return None
        return Candidate.of(self._vector(position), json.loads(choice.text), module)

    def candidate(self, choice: Any) -> Candidate | None:
        """The kernel of a choice; None if the choice has no kernel, or if it is not in the space."""
        return self.decode(self._vector(self.choices.index(choice))) if choice in self.choices else None

    def described(self, candidates: Sequence[Candidate]) -> Floats:
        """Features of kernels that have the same meaning for all layers, [N, width]: all of `KNOBS`, the estimated
        time, and the dimensions of the layer."""
        positions = [self._position(c.vector) for c in candidates if c.vector is not None]
        assert len(positions) == len(candidates)
        return self._described[positions]

    @cached_property
    def _groups(self) -> tuple[_Group, ...]:
        groups = []
        for algorithm in range(self.kinds):
            mine = np.flatnonzero(self.points[:, 0] == algorithm)
            points = self.points[mine]
            values = tuple(np.unique(column) for column in points.T)
            groups.append(_Group(values, int(mine[0]), points))
        return tuple(groups)

    @cached_property
    def _used(self) -> npt.NDArray[np.bool_]:
        """Which knobs vary within each algorithm, [algorithms, K]. The first knob (the algorithm) counts as varying if
        there are several algorithms."""
        used = np.array([[len(v) > 1 for v in group.values] for group in self._groups])
        used[:, 0] = self.kinds > 1
        return used

    @cached_property
    def estimates(self) -> npt.NDArray[np.float64]:
        """The estimated times of all choices, [M], in the same unit for the whole layer."""
        return np.array([self.layer.estimate(choice, self.machine) for choice in self.choices])

    @cached_property
    def _features(self) -> Floats:
        return np.concatenate([self._of_knobs, self._relative[:, None]], axis=1).astype(np.float32)

    @cached_property
    def _relative(self) -> npt.NDArray[np.float64]:
        relative: npt.NDArray[np.float64] = np.log2(self.estimates / self.estimates.min())
        return relative

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

    def _random_positions(self, generator: np.random.Generator, count: int) -> Indices:
        groups = generator.integers(self.kinds, size=count)
        first = np.array([group.first for group in self._groups], np.int64)
        sizes = np.array([len(group.points) for group in self._groups], np.int64)
        return first[groups] + (generator.random(count) * sizes[groups]).astype(np.int64)

    def _positions(self, indices: Indices) -> Indices:
        """The positions of the choices that vectors [N, K] represent: [N]."""
        positions = np.zeros(len(indices), np.int64)
        for algorithm, group in enumerate(self._groups):
            mine = indices[:, 0] == algorithm
            if mine.any():
                positions[mine] = group.snapped(indices[mine])
        return positions

    def _position(self, vector: Sequence[int]) -> int:
        return int(self._positions(np.array([vector], np.int64))[0])

    def _vector(self, position: int) -> Vector:
        return tuple(self.points[position].tolist())


_ALGORITHMS = 8


def _logs(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The logarithms of 1 + numbers. The number -1 (unused) remains -1."""
    return np.where(numbers < 0, _UNUSED, np.log2(1.0 + np.maximum(numbers, 0.0)))
