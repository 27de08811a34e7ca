"""Comparisons of whole models that this machine has made, kept to fit the learned cost model to it.

A comparison is kept as `Comparisons` describes: without names, weights or inputs of the model.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from xrlflow.cost.comparisons import Comparisons, ComparisonsError
from xrlflow.cost.model import AdditiveCost
from xrlflow.cost.neighbourhoods import Neighbourhoods
from xrlflow.ir import Graph
from xrlflow.sqlite import Layout, SharedFile, cache_directory

if TYPE_CHECKING:
    from typing_extensions import Self

VERSION = 1
RADIUS = 3
"""Of the neighbourhoods that are kept: networks see at most so far."""
MOST = 2000
"""Older comparisons are dropped."""
_PATIENCE = 1.0  # seconds that a writer waits for another process

_PUT = "INSERT INTO comparison"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS comparison (
    device TEXT NOT NULL, runtime TEXT NOT NULL, threads INTEGER NOT NULL, taken REAL NOT NULL, graphs BLOB NOT NULL
)
"""
_LAYOUT = Layout((_SCHEMA,), VERSION, "comparison", _PUT)


class History:
    """A SQLite file of comparisons (see `SharedFile`), and those of one `device`, `runtime` and number of `threads`."""

    def __init__(
        self, device: str, runtime: str, threads: int, path: str | os.PathLike[str] | None = None
    ) -> None:
        """`path`: the file. By default it is `comparisons.sqlite` in the user's cache directory."""
        self.path = Path(path) if path is not None else cache_directory() / "comparisons.sqlite"
        self._key = (device, runtime, threads)
        self._file = SharedFile(self.path, _LAYOUT, _PATIENCE)

    def keep(self, prices: AdditiveCost, before: Graph, after: Graph, log: float, error: float) -> None:
        """Keep that `after` is exp(`log`) times as fast as `before`; `error` is the standard deviation of `log`."""
        known = Neighbourhoods(prices, RADIUS)
        counts = [known.view(graph).counts() for graph in (before, after)]
        if counts[0] == counts[1] or not all(counts):  # it says nothing about any node
            return
        found = Comparisons.of(known, counts, [log], [error], {"name": ""})
        self._file.write(
            f"{_PUT} (device, runtime, threads, taken, graphs) VALUES (?, ?, ?, ?, ?)",
            (*self._key, time.time(), found.to_bytes()),
        )
        self._file.write(
            "DELETE FROM comparison WHERE taken < (SELECT min(taken) FROM"
            " (SELECT taken FROM comparison ORDER BY taken DESC LIMIT ?))",
            (MOST,),
        )

    def latest(self, count: int) -> list[Comparisons]:
        """The latest comparisons of this device, runtime and threads. Those of another version are left out."""
        rows = self._file.read(
            "SELECT graphs FROM comparison WHERE device = ? AND runtime = ? AND threads = ?"
            " ORDER BY taken DESC LIMIT ?",
            (*self._key, count),
        )
        found = []
        for (graphs,) in rows:
            try:
                found.append(Comparisons.from_bytes(graphs, os.fspath(self.path)))
            except ComparisonsError:  # written by another version: it cannot be learned from
                continue
        return found

    def close(self) -> None:
        """Write what is not yet written, if that is possible now, and warn about what is lost."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
