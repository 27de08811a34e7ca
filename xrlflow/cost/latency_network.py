"""A graph network that predicts how long a model runs, as a sum over its nodes, each in its neighbourhood.

A runtime fuses operators and keeps tensors in caches and in layouts of its own, so a node's cost depends on the nodes
around it. The network corrects the time that each node takes alone: seconds = alone * exp(a) + moving * exp(b), where
`moving` is the time to read and write the node's tensors, and a and b are the network's outputs. Before training, the
seconds are about those of the nodes alone. The seconds of a graph are the sum over its nodes, so an edit changes a few
terms.

The layers are the local ones of the agent's encoder (`xrlflow.rl.encoder`): residual layers that pass messages along
edges and sum them in logarithms. An ensemble (Lakshminarayanan et al., 2017) gives the uncertainty. This module needs
NumPy alone; `xrlflow.rl.latency_training` trains with torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from xrlflow.cost.neighbourhoods import CONTENT_COLUMNS, EDGE_COLUMNS, Table

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Number = TypeVar("Number", bound=np.floating[Any])

# Bytes per second of reading and writing tensors, before training scales it.
BYTES_PER_SECOND = 50e9
# The network's outputs before training: unchanged seconds of the node alone, and almost no time for moving tensors.
FIRST = (0.0, -4.0)
_MOST_SIZE = 4096
# Corrections stay within these factors (logarithms).
MIN_LOG, MAX_LOG = -6.0, 3.0


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """The dimensions of a network. Raises ValueError for a field that is no integer from 1 (0 for `radius`) to 4096."""

    width: int = 32
    radius: int = 2
    members: int = 8

    def __post_init__(self) -> None:
        sizes = ((self.width, 1), (self.radius, 0), (self.members, 1))
        if not all(type(size) is int and minimum <= size <= _MOST_SIZE for size, minimum in sizes):
            raise ValueError(f"a network of width {self.width}, radius {self.radius}, {self.members} members")


@dataclass(frozen=True, slots=True, eq=False)
class NetworkParameters:
    """A network's dimensions, operators and arrays.

    The first axis of each array is the ensemble's members. `noise` [members, 2]: the variance of a log-ratio that the
    network cannot explain is noise[0]^2 + (noise[1] * changed)^2, where `changed` is the part of the graph's seconds
    that the edits change. `scale` [members]: the factor by which 90% intervals are widened so that they contain 90% of
    the measurements.
    """

    config: NetworkConfig
    operators: tuple[str, ...]  # numbered from 1; 0 is an unknown operator
    arrays: Mapping[str, Floats]
    about: Mapping[str, Any] = field(default_factory=dict)


def shapes(config: NetworkConfig, operators: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a network's arrays, without the axis of the members."""
    width = config.width
    out: dict[str, tuple[int, ...]] = {
        "operator": (operators + 1, width),
        "content.weight": (CONTENT_COLUMNS, width),
        "content.bias": (width,),
        "head.weight": (width, 2),
        "head.bias": (2,),
    }
    for level in range(1, config.radius + 1):
        out |= {
            f"level.{level}.source": (width, width),
            f"level.{level}.edge": (EDGE_COLUMNS, width),
            f"level.{level}.message": (width,),
            f"level.{level}.own": (width, width),
            f"level.{level}.heard": (width, width),
            f"level.{level}.bias": (width,),
        }
    return out


class _GrowingArray(Generic[Number]):
    """An array that grows along its second axis."""

    def __init__(self, first: int, width: int, dtype: type[Number]) -> None:
        self._data: npt.NDArray[Number] = np.zeros((first, 64, width), dtype)
        self.size = 0

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Add rows [first, n, width]."""
        end = self.size + rows.shape[1]
        if end > self._data.shape[1]:
            wider = np.zeros(
                (len(self._data), max(end, 2 * self.size), self._data.shape[2]), self._data.dtype
            )
            wider[:, : self.size] = self._data[:, : self.size]
            self._data = wider
        self._data[:, self.size : end] = rows
        self.size = end

    @property
    def rows(self) -> npt.NDArray[Number]:
        """All rows [first, size, width]."""
        return self._data[:, : self.size]


class Evaluator:
    """Computes the seconds of the neighbourhoods of one table, once for each number."""

    def __init__(self, parameters: NetworkParameters, table: Table) -> None:
        self.parameters = parameters
        self.table = table
        members, width = parameters.config.members, parameters.config.width
        self._numbers = {name: number for number, name in enumerate(parameters.operators, 1)}
        self._vectors = [
            _GrowingArray(members, width, np.float32) for _ in range(parameters.config.radius + 1)
        ]
        self._parts = _GrowingArray(members, 2, np.float64)
        # Copies of the table's rows: edges, and for each node alone the seconds of computing and of moving its tensors.
        self._edges = _GrowingArray(1, EDGE_COLUMNS, np.float32)
        self._alone = _GrowingArray(1, 2, np.float64)

    def seconds(self, numbers: Sequence[int]) -> Doubles:
        """Seconds of nodes by each member of the ensemble [members, len(numbers)]."""
        return np.asarray(self.parts(numbers)[1].sum(2))

    def parts(self, numbers: Sequence[int]) -> tuple[Floats, Doubles]:
        """Vectors of nodes [members, len(numbers), width], and the two parts of their seconds, computing and moving
        [members, len(numbers), 2]."""
        if len(self.table.levels[self.parameters.config.radius]) > self._parts.size:
            self._extend()
        return self._vectors[-1].rows[:, numbers], self._parts.rows[:, numbers]

    def _extend(self) -> None:
        """Compute the vectors of all numbers that the table got since the last call, level by level."""
        arrays, table = self.parameters.arrays, self.table
        start = self._vectors[0].size
        ops = [self._numbers.get(op, 0) for op in table.ops[start:]]
        content = np.array(table.contents[start:], np.float32).reshape(-1, CONTENT_COLUMNS)
        first = content @ arrays["content.weight"] + arrays["content.bias"][:, None]
        self._vectors[0].append(np.maximum(first + arrays["operator"][:, ops], 0.0))
        moving = np.array(table.traffic[start:]) / BYTES_PER_SECOND
        self._alone.append(np.stack((np.array(table.seconds[start:]), moving), 1)[None])
        if len(table.edges) > self._edges.size:
            self._edges.append(np.array(table.edges[self._edges.size :], np.float32)[None])
        for radius in range(1, len(self._vectors)):
            self._vectors[radius].append(self._level(radius))
        start = self._parts.size
        top = self._vectors[-1].rows[:, start:]
        outputs = (top @ arrays["head.weight"] + arrays["head.bias"][:, None]).astype(np.float64)
        factors = np.exp(np.clip(outputs + FIRST, MIN_LOG, MAX_LOG))
        self._parts.append(factors * self._alone.rows[:, self._rows(start)])

    def _level(self, radius: int) -> Floats:
        """Compute the vectors of the new numbers of a level."""
        arrays, level = self.parameters.arrays, self.table.levels[radius]
        start, name = self._vectors[radius].size, f"level.{radius}"
        below = self._vectors[radius - 1].rows
        begin = level.starts[start]
        of_edge = self._edges.rows[0, level.edges[begin:]] @ arrays[f"{name}.edge"]
        of_source = below[:, level.sources[begin:]] @ arrays[f"{name}.source"]
        messages = np.maximum(of_edge + of_source + arrays[f"{name}.message"][:, None], 0.0)
        total = np.cumsum(np.pad(messages, ((0, 0), (1, 0), (0, 0))), axis=1, dtype=np.float64)
        starts = np.array(level.starts[start:]) - begin
        heard = np.log1p(total[:, starts[1:]] - total[:, starts[:-1]]).astype(np.float32)
        own = below[:, level.inner[start:]]
        change = own @ arrays[f"{name}.own"] + heard @ arrays[f"{name}.heard"]
        vectors: Floats = own + np.maximum(change + arrays[f"{name}.bias"][:, None], 0.0)
        return vectors

    def _rows(self, first: int) -> list[int]:
        """For the highest level's numbers from `first` on: the number of the node alone (its row on level 0)."""
        levels = self.table.levels[: self.parameters.config.radius + 1]
        rows = levels[-1].inner[first:]
        for level in reversed(levels[:-1]):
            rows = [level.inner[row] for row in rows]
        return rows
