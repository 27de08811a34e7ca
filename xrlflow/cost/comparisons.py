"""Measured comparisons of models as training data: features of graphs, with the log-ratios of their latencies.

A record has no names, weights or inputs of a model: only the kinds, dimensions and costs of its operators, and its
edges, as the network of `xrlflow.cost.latency_network` reads them.
"""

from __future__ import annotations

import ast
import io
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.cost.neighbourhoods import CONTENT_COLUMNS, EDGE_COLUMNS, Level, Neighbourhoods, Table
from xrlflow.storage import files

Array = npt.NDArray[Any]

# The errors that NumPy, zipfile and ast raise for bytes that are no .npz file, or an .npz file with other contents.
_UNREADABLE = (
    OSError, EOFError, ValueError, KeyError, SyntaxError, TypeError, AttributeError, RuntimeError, MemoryError,
    OverflowError, IndexError, zipfile.BadZipFile, zlib.error, tokenize.TokenError,
)  # fmt: skip

# The version of the columns' meaning: data of another version cannot be read.
VERSION = 2


class ComparisonsError(ValueError):
    """A file holds no comparisons, is damaged, or was written by another version."""


@dataclass(frozen=True, slots=True, eq=False)
class Comparisons:
    """G graphs of one network, their neighbourhoods, and how much faster each runs than the first.

    `ops` [C]: the operators of the nodes; `arrays`:
    - `contents` [C, CONTENT_COLUMNS], `seconds` [C] and `moved` [C]: features, seconds and bytes of each node alone;
    - `edges` [T, EDGE_COLUMNS]: the kinds of edges;
    - for each level r from 1: `inner.r` [K], `starts.r` [K + 1], `sources.r` and `kinds.r` [E] (see `Level`);
    - `graph`, `number`, `count` [Z]: `count` nodes of graph `graph` have the number `number` on the highest level;
    - `logs` [G - 1]: log of how many times faster each other graph is than the first; `errors` [G - 1]: standard
      deviations of these.

    `about`: name, machine, runtime, threads, seconds of the first graph, when, as JSON strings and numbers.
    """

    ops: tuple[str, ...]
    arrays: Mapping[str, Array]
    about: Mapping[str, Any]

    @property
    def radius(self) -> int:
        return sum(name.startswith("inner.") for name in self.arrays)

    @property
    def graphs(self) -> int:
        return len(self.arrays["logs"]) + 1

    def prices(self) -> npt.NDArray[np.float64]:
        """For each graph the sum of the seconds of its nodes when each runs alone [G]."""
        return self.sums(self.arrays["seconds"])

    def sums(self, by_content: Array) -> npt.NDArray[np.float64]:
        """For each graph the sum over its nodes of the figure `by_content` of its content: [C] -> [G]."""
        rows = np.arange(len(self.ops))
        for radius in range(1, self.radius + 1):
            rows = rows[self.arrays[f"inner.{radius}"]]
        weights = self.arrays["count"] * by_content[rows[self.arrays["number"]]]
        return np.asarray(np.bincount(self.arrays["graph"], weights, self.graphs), np.float64)

    @staticmethod
    def of(
        neighbourhoods: Neighbourhoods,
        counts: Sequence[Mapping[int, int]],
        logs: Sequence[float],
        errors: Sequence[float],
        about: Mapping[str, Any],
    ) -> Comparisons:
        """Comparisons of graphs that `neighbourhoods` has numbered. `counts`: `View.counts` of each graph, the first
        graph's first."""
        table = neighbourhoods.table
        arrays: dict[str, Array] = {
            "contents": np.array(table.contents, np.float32).reshape(-1, CONTENT_COLUMNS),
            "seconds": np.array(table.seconds),
            "moved": np.array(table.traffic),
            "edges": np.array(table.edges, np.float32).reshape(-1, EDGE_COLUMNS),
            "graph": np.repeat(np.arange(len(counts)), [len(c) for c in counts]).astype(np.int32),
            "number": np.array([n for c in counts for n in c], np.int32),
            "count": np.array([n for c in counts for n in c.values()], np.int32),
            "logs": np.array(logs, np.float64),
            "errors": np.array(errors, np.float64),
        }
        for radius, level in enumerate(table.levels[1:], 1):
            arrays |= {
                f"inner.{radius}": np.array(level.inner, np.int32),
                f"starts.{radius}": np.array(level.starts, np.int32),
                f"sources.{radius}": np.array(level.sources, np.int32),
                f"kinds.{radius}": np.array(level.edges, np.int32),
            }
        return Comparisons(tuple(table.ops), arrays, {"version": VERSION, **about})

    def table(self) -> Table:
        """The neighbourhoods, as a network reads them."""
        arrays = self.arrays
        levels = [Level(inner=list(range(len(self.ops))), starts=[0] * (len(self.ops) + 1))]
        for radius in range(1, self.radius + 1):
            names = [f"{part}.{radius}" for part in ("inner", "starts", "sources", "kinds")]
            inner, starts, sources, edges = (arrays[name].tolist() for name in names)
            levels.append(Level(inner=inner, starts=starts, sources=sources, edges=edges))
        return Table(
            tuple(levels), list(self.ops), [tuple(row) for row in arrays["contents"].tolist()],
            arrays["seconds"].tolist(), arrays["moved"].tolist(), [tuple(row) for row in arrays["edges"].tolist()],
        )  # fmt: skip

    def counts(self, radius: int) -> npt.NDArray[np.float64]:
        """For each graph, how many of its nodes have each of the K neighbourhoods of this radius [G, K]."""
        arrays = self.arrays
        numbers = arrays["number"]
        for level in range(self.radius, radius, -1):
            numbers = arrays[f"inner.{level}"][numbers]
        size = len(arrays[f"inner.{radius}"]) if radius else len(self.ops)
        matrix: npt.NDArray[np.float64] = np.zeros((self.graphs, size))
        np.add.at(matrix, (arrays["graph"], numbers), arrays["count"])
        return matrix

    def to_bytes(self) -> bytes:
        """The comparisons as an .npz file. Raises ValueError if `about` has more than strings and finite numbers."""
        for key, value in self.about.items():
            if type(value) not in (str, int, float, bool) or (
                type(value) is float and not math.isfinite(value)
            ):
                raise ValueError(
                    f"{key} of comparisons is {value!r}: only strings and finite numbers can be read again"
                )
        buffer = io.BytesIO()
        about = np.array([f"{key}={value!r}" for key, value in self.about.items()])
        np.savez_compressed(buffer, ops=np.array(self.ops), about=about, **dict(self.arrays))  # type: ignore[arg-type]
        return buffer.getvalue()

    @staticmethod
    def from_bytes(data: bytes, where: str = "comparisons") -> Comparisons:
        """Read comparisons from bytes that `to_bytes` wrote. Raises ComparisonsError for other bytes; `where` names
        them."""
        try:
            with _opened(data) as loaded:
                arrays = {name: loaded[name] for name in loaded.files}
            about = {
                k: ast.literal_eval(v)
                for k, v in (line.split("=", 1) for line in arrays.pop("about").tolist())
            }
            ops = tuple(arrays.pop("ops").tolist())
        except _UNREADABLE as error:
            raise ComparisonsError(f"{where} holds no comparisons, or is damaged: {error}") from error
        if about.get("version") != VERSION:
            raise ComparisonsError(f"{where} is of version {about.get('version')}, and {VERSION} is wanted")
        if wrong := _wrong(ops, arrays):
            raise ComparisonsError(f"{where}: {wrong}: collect it again")
        return Comparisons(ops, arrays, about)

    def save(self, path: str | os.PathLike[str]) -> None:
        files.write(Path(path), self.to_bytes())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Comparisons:
        """Read a file. Raises ComparisonsError if it holds no comparisons."""
        return Comparisons.from_bytes(Path(path).read_bytes(), os.fspath(path))


def _opened(data: bytes) -> Any:
    """The arrays of an .npz file. Raises ValueError for a single array."""
    loaded = np.load(io.BytesIO(data), allow_pickle=False)
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        raise ValueError("it is one array")
    return loaded


def _wrong(ops: tuple[Any, ...], arrays: Mapping[str, Array]) -> str:
    """What is wrong with the arrays of a file (see `Comparisons`); empty if nothing is."""
    radius = sum(name.startswith("inner.") for name in arrays)
    parts = [f"{part}.{r}" for r in range(1, radius + 1) for part in ("inner", "starts", "sources", "kinds")]
    numbers = ("contents", "seconds", "moved", "edges", "logs", "errors")
    counted = ("graph", "number", "count", *parts)
    if odd := sorted({*numbers, *counted} ^ arrays.keys()):
        return f"its arrays are not those of comparisons: {odd[0]}"
    for name in numbers:
        columns = {"contents": (CONTENT_COLUMNS,), "edges": (EDGE_COLUMNS,)}.get(name, ())
        array = arrays[name]
        if array.ndim != 1 + len(columns) or array.shape[1:] != columns:
            return f"it has other features: {name}"
        if array.dtype not in (np.float32, np.float64) or not np.isfinite(array).all():
            return f"its {name} are not finite numbers"
    for name in counted:
        if arrays[name].ndim != 1 or arrays[name].dtype not in (np.int32, np.int64):
            return f"its {name} are no integers"
    if not all(isinstance(op, str) for op in ops):
        return "its operators have no names"
    return _unconnected(len(ops), radius, arrays)


def _unconnected(rows: int, radius: int, arrays: Mapping[str, Array]) -> str:
    """Which numbers in these arrays are out of range; empty if none is."""
    seconds, traffic, graphs = arrays["seconds"], arrays["moved"], len(arrays["logs"]) + 1
    if not rows or {len(arrays[n]) for n in ("contents", "seconds", "moved")} != {rows}:
        return "its nodes are of several counts"
    if (
        min(seconds.min(), traffic.min(), arrays["errors"].min(initial=0.0)) < 0
        or len(arrays["errors"]) != graphs - 1
    ):
        return "its figures are negative or missing"
    content = np.arange(rows)  # of each number of the level below
    for r in range(1, radius + 1):
        inner, starts, sources, kinds = (arrays[f"{p}.{r}"] for p in ("inner", "starts", "sources", "kinds"))
        if not (_within(inner, len(content)) and _within(sources, len(content))):
            return f"its neighbourhoods of radius {r} have no centres"
        if not _within(kinds, len(arrays["edges"])) or len(kinds) != len(sources):
            return f"its neighbourhoods of radius {r} have no edges"
        if (
            len(starts) != len(inner) + 1
            or starts[0] != 0
            or starts[-1] != len(sources)
            or (np.diff(starts) < 0).any()
        ):
            return f"its neighbourhoods of radius {r} do not follow each other"
        content = content[inner]
    graph, number, count = arrays["graph"], arrays["number"], arrays["count"]
    if not len(graph) == len(number) == len(count) or (count < 1).any():
        return "its graphs have no counts"
    if not (_within(graph, graphs) and _within(number, len(content))):
        return "its graphs have no nodes"
    if (np.bincount(graph, (seconds + traffic)[content[number]], graphs) <= 0).any():
        return "a graph takes no time"
    return ""


def _within(numbers: Array, size: int) -> bool:
    return not len(numbers) or bool(0 <= numbers.min() <= numbers.max() < size)
