"""Measurements on disk, so that an operator is measured only once on each machine."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from xrlflow.cost.microbench import Sample
from xrlflow.storage.sqlite import Layout, cache_directory
from xrlflow.storage.stores import Where, open_storage

if TYPE_CHECKING:
    from typing_extensions import Self

VERSION = 1
_PATIENCE = 20.0  # seconds that a writer waits for another process

_PUT = "INSERT INTO measurement"
_REPLACE = (
    "ON CONFLICT (device, runtime, threads, operator, attributes, operands) DO UPDATE SET median = excluded.median,"
    " low = excluded.low, high = excluded.high, count = excluded.count, taken = excluded.taken"
)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS measurement (
    device TEXT NOT NULL, runtime TEXT NOT NULL, threads INTEGER NOT NULL,
    operator TEXT NOT NULL, attributes TEXT NOT NULL, operands TEXT NOT NULL,
    median REAL NOT NULL, low REAL NOT NULL, high REAL NOT NULL, count INTEGER NOT NULL, taken REAL NOT NULL,
    PRIMARY KEY (device, runtime, threads, operator, attributes, operands)
) WITHOUT ROWID
"""
_LAYOUT = Layout((_SCHEMA,), VERSION, "measurement", _PUT)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: an operator on a machine.

    `operands`: types of inputs and outputs, with digests of constants.
    """

    device: str
    runtime: str
    threads: int
    operator: str
    attributes: str
    operands: str


class Database:
    """Measurements in a SQLite file (see `SharedFile`) or on a server (see `SharedServer`).

    A file that is damaged, of another version or of another program is renamed to `.damaged`, with a warning, and a new
    one is begun.
    """

    def __init__(self, where: Where = None) -> None:
        """`where`: the file or server (see `stores.open_storage`); by default `measurements.sqlite` in the user's cache
        directory."""
        self._storage = open_storage(where, cache_directory() / "measurements.sqlite", _LAYOUT, _PATIENCE)
        self.path = self._storage.path

    def check(self) -> None:
        """Open the database now. Raises StoreError if it is on a server that cannot be used."""
        self._storage.check()

    def get(self, subject: Subject) -> Sample | None:
        """The measurement of this subject; None if there is none, or if it is damaged."""
        rows = self._storage.read(
            "SELECT median, low, high, count FROM measurement WHERE device = ? AND runtime = ? AND threads = ?"
            " AND operator = ? AND attributes = ? AND operands = ?",
            astuple(subject),
        )
        if not rows or not all(isinstance(number, int | float) for number in rows[-1]):
            return None
        median, low, high, count = rows[-1]  # measurements that are not yet written come last
        return Sample(median, low, high, int(count))

    def put(self, subject: Subject, sample: Sample) -> None:
        """Store a measurement; it replaces an older one of the same subject."""
        self._storage.write(
            f"{_PUT} VALUES ({', '.join('?' * 11)}) {_REPLACE}",
            (*astuple(subject), sample.median, sample.low, sample.high, sample.count, time.time()),
        )

    def __len__(self) -> int:
        return sum(int(count) for (count,) in self._storage.read("SELECT count(*) FROM measurement", ()))

    def close(self) -> None:
        """Write all pending measurements, if that is possible now; warn about measurements that are lost."""
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
