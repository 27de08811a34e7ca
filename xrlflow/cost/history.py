"""Stores comparisons of models that this machine has measured, to fit the learned cost model to the machine.

A comparison has no names, weights or inputs of the model (see `Comparisons`).
"""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import TYPE_CHECKING

from xrlflow.cost.comparisons import Comparisons, ComparisonsError
from xrlflow.cost.model import AdditiveCost
from xrlflow.cost.neighbourhoods import Neighbourhoods
from xrlflow.ir import Graph
from xrlflow.storage.sqlite import Layout, cache_directory
from xrlflow.storage.stores import Where, open_storage

if TYPE_CHECKING:
    from typing_extensions import Self

VERSION = 1
RADIUS = 3
"""Of the neighbourhoods that are stored: networks have at most this radius."""
MAX_ROWS = 2000
"""Comparisons that are stored of one machine: the latest."""
_PATIENCE = 1.0  # seconds that a writer waits for another process

_PUT = "INSERT INTO comparison"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS comparison (
    device TEXT NOT NULL, runtime TEXT NOT NULL, threads INTEGER NOT NULL, taken REAL NOT NULL, graphs BLOB NOT NULL
)
"""
_SAME_KEY = "device = ? AND runtime = ? AND threads = ?"
_LAYOUT = Layout((_SCHEMA,), VERSION, "comparison", _PUT)


class History:
    """Comparisons of one `device`, `runtime` and number of `threads`, in a SQLite file or on a server."""

    def __init__(self, device: str, runtime: str, threads: int, where: Where = None) -> None:
        """`where`: the file or server (see `stores.open_storage`); by default `comparisons.sqlite` in the user's cache
        directory."""
        self._key = (device, runtime, threads)
        self._storage = open_storage(where, cache_directory() / "comparisons.sqlite", _LAYOUT, _PATIENCE)
        self.path = self._storage.path

    def keep(self, prices: AdditiveCost, before: Graph, after: Graph, log: float, error: float) -> bool:
        """Store that `after` is exp(`log`) times as fast as `before`; `error` is the standard deviation of `log`.

        Returns False, and stores nothing, if the graphs have the same nodes or one of them has none.
        """
        neighbourhoods = Neighbourhoods(prices, RADIUS)
        counts = [neighbourhoods.view(graph).counts() for graph in (before, after)]
        if counts[0] == counts[1] or not all(counts):
            return False
        comparison = Comparisons.of(neighbourhoods, counts, [log], [error], {"name": ""})
        now = time.time()
        # If the connection is lost before the server replies, the write is repeated: the row must be inserted only
        # once.
        self._storage.write(
            f"{_PUT} (device, runtime, threads, taken, graphs) SELECT ?, ?, ?, ?, ? WHERE NOT EXISTS"
            f" (SELECT 1 FROM comparison WHERE {_SAME_KEY} AND taken = ?)",
            (*self._key, now, comparison.to_bytes(), *self._key, now),
        )
        self._storage.write(
            f"DELETE FROM comparison WHERE {_SAME_KEY} AND taken < (SELECT min(taken) FROM"
            f" (SELECT taken FROM comparison WHERE {_SAME_KEY} ORDER BY taken DESC LIMIT ?) AS latest)",
            (*self._key, *self._key, MAX_ROWS),
        )
        return True

    def latest(self, count: int) -> list[Comparisons]:
        """Up to `count` latest comparisons of this device, runtime and number of threads. Damaged comparisons, and
        those of another version of the format, are left out."""
        rows = self._storage.read(
            f"SELECT graphs FROM comparison WHERE {_SAME_KEY} ORDER BY taken DESC LIMIT ?",
            (*self._key, count),
        )
        comparisons = []
        for (graphs,) in rows:
            if not isinstance(graphs, bytes):
                continue
            try:
                comparisons.append(Comparisons.from_bytes(graphs, os.fspath(self.path)))
            except ComparisonsError:  # written by another version
                continue
        return comparisons

    def close(self) -> None:
        """Write all pending comparisons, if that is possible now; warn about comparisons that are lost."""
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
