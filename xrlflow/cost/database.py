"""Measurements on disk, so that an operator is measured only once on each machine."""

from __future__ import annotations

import os
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from xrlflow.cost.microbench import Sample
from xrlflow.sqlite import Layout, SharedFile, cache_directory

if TYPE_CHECKING:
    from typing_extensions import Self

VERSION = 1
_PATIENCE = 20.0  # seconds that a writer waits for another process

_PUT = "INSERT OR REPLACE INTO measurement"
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
    """What was measured, and on which machine.

    `operands`: types of inputs and outputs, with the values of constants.
    """

    device: str
    runtime: str
    threads: int
    operator: str
    attributes: str
    operands: str


class Database:
    """A SQLite file of measurements (see `SharedFile`).

    A file that is damaged, of another version or of another program is renamed to `.damaged`, with a warning, and a new
    one is begun.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """`path`: the file. By default it is `measurements.sqlite` in the user's cache directory."""
        self.path = Path(path) if path is not None else cache_directory() / "measurements.sqlite"
        self._file = SharedFile(self.path, _LAYOUT, _PATIENCE)

    def get(self, subject: Subject) -> Sample | None:
        """The measurement of this subject, or None."""
        rows = self._file.read(
            "SELECT median, low, high, count FROM measurement WHERE device = ? AND runtime = ? AND threads = ?"
            " AND operator = ? AND attributes = ? AND operands = ?",
            astuple(subject),
        )
        if not rows:
            return None
        median, low, high, count = rows[-1]  # measurements that are not yet written come last
        return Sample(median, low, high, int(count))

    def put(self, subject: Subject, sample: Sample) -> None:
        """Keep a measurement; it replaces an older one of the same subject."""
        self._file.write(
            f"{_PUT} VALUES ({', '.join('?' * 11)})",
            (*astuple(subject), sample.median, sample.low, sample.high, sample.count, time.time()),
        )

    def __len__(self) -> int:
        return sum(int(count) for (count,) in self._file.read("SELECT count(*) FROM measurement", ()))

    def close(self) -> None:
        """Write what is not yet written, if that is possible now, and warn about what is lost."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
