"""Measurements on disk, so that an operator is measured once on a machine."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from xrlflow.cost.alone import Sample

VERSION = 1
_PATIENCE = 20.0  # seconds that a writer waits for another process
_SWITCHING = 1.0  # and for another that opens a file for the first time, at least

_TABLE = "measurement"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS measurement (
    device TEXT NOT NULL, runtime TEXT NOT NULL, threads INTEGER NOT NULL,
    operator TEXT NOT NULL, attributes TEXT NOT NULL, operands TEXT NOT NULL,
    median REAL NOT NULL, low REAL NOT NULL, high REAL NOT NULL, count INTEGER NOT NULL, taken REAL NOT NULL,
    PRIMARY KEY (device, runtime, threads, operator, attributes, operands)
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured, and on what. `operands` are the types of inputs and outputs, with constants' values."""

    device: str
    runtime: str
    threads: int
    operator: str
    attributes: str
    operands: str


def cache_directory() -> Path:
    """The user's cache directory for xrlflow."""
    from platformdirs import user_cache_path

    return user_cache_path("xrlflow")


def connect(
    path: Path | str, schema: Iterable[str], version: int, table: str, patience: float = 0.0
) -> sqlite3.Connection:
    """A connection to a file that processes and threads share; `schema`: what makes its tables where there are none.

    `version` is of the tables, of which `table` is one; `patience`: seconds for which a statement waits for another
    process. Every statement is a transaction of its own unless one is begun. Raises sqlite3.OperationalError where no
    file can be opened or written, and sqlite3.DatabaseError for one that is damaged, of another version, or something
    else's.
    """
    connection = sqlite3.connect(path, timeout=patience, isolation_level=None, check_same_thread=False)
    try:
        # In one statement: another process may be making the tables just now.
        found, tables, own = connection.execute(
            "SELECT user_version, count(name), coalesce(sum(name = ?), 0) FROM pragma_user_version"
            " LEFT JOIN sqlite_master",
            (table,),
        ).fetchone()
        if tables and not own:
            raise sqlite3.DatabaseError("it has tables of something else")
        if found not in (0, version):
            raise sqlite3.DatabaseError(f"version {found}, and {version} is wanted")
        _write_ahead(connection, max(patience, _SWITCHING))
        connection.execute("PRAGMA synchronous = NORMAL")
        if found == 0:
            # One transaction: of two processes that come first, one makes the tables.
            connection.execute("BEGIN IMMEDIATE")
            for statement in schema:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version}")
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def file_number(path: Path) -> int | None:
    """What tells a file from another one of its name; None if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def set_aside(path: Path, number: int | None) -> None:
    """Rename a database and what belongs to it (`.damaged`), unless it is another file than the one that is damaged
    (`number`: its `file_number`), which another process has begun by now. Raises OSError."""
    if file_number(path) != number:
        return
    for suffix in ("-wal", "-shm", ""):  # what belongs to the next file is not there before the last is gone
        if (file := Path(f"{path}{suffix}")).exists():
            file.replace(f"{path}.damaged{suffix}")


def _write_ahead(connection: sqlite3.Connection, patience: float) -> None:
    """Switch a file to the write-ahead log. SQLite does not wait for that by itself where two come first at once."""
    until = time.monotonic() + patience
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= until:
                raise
        time.sleep(0.01)


class Database:
    """A SQLite file of measurements, shared by processes and threads (write-ahead log, a statement per write).

    A file that is damaged, of another version, or something else's is set aside (`.damaged`) and another begun, with a
    warning; where no file can be written, measurements last as long as the process, with a warning too.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """`path`: the file; by default `measurements.sqlite` in the user's cache directory."""
        self.path = Path(path) if path is not None else cache_directory() / "measurements.sqlite"
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._file: int | None = None
        self._process = 0
        self._inherited: list[sqlite3.Connection] = []

    def get(self, subject: Subject) -> Sample | None:
        """The measurement of this subject, or None."""
        rows = self._execute(
            "SELECT median, low, high, count FROM measurement WHERE device = ? AND runtime = ? AND threads = ?"
            " AND operator = ? AND attributes = ? AND operands = ?",
            astuple(subject),
        )
        if not rows:
            return None
        median, low, high, count = rows[0]
        return Sample(median, low, high, int(count))

    def put(self, subject: Subject, sample: Sample) -> None:
        """Keep a measurement; it replaces an older one of the same subject."""
        self._execute(
            f"INSERT OR REPLACE INTO measurement VALUES ({', '.join('?' * 11)})",
            (*astuple(subject), sample.median, sample.low, sample.high, sample.count, time.time()),
        )

    def __len__(self) -> int:
        return int(self._execute("SELECT count(*) FROM measurement", ())[0][0])

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _execute(self, statement: str, values: tuple[object, ...]) -> list[tuple[float, ...]]:
        with self._lock:
            try:
                return self._connected().execute(statement, values).fetchall()
            except sqlite3.OperationalError as error:
                self._disconnect()
                self._connection = self._in_memory(error)
            except sqlite3.DatabaseError as error:
                self._replace(str(error))
            return self._connected().execute(statement, values).fetchall()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is not None and self._process == os.getpid():
            return self._connection
        if self._connection is not None:  # after a fork: not ours to use, nor to close
            self._inherited.append(self._connection)
        self._process = os.getpid()
        try:
            self._connection = self._open()
        except (sqlite3.OperationalError, OSError) as error:
            self._connection = self._in_memory(error)
        except sqlite3.DatabaseError as error:
            self._replace(str(error))
            self._connection = self._open()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = file_number(self.path)
        connection = connect(self.path, [_SCHEMA], VERSION, _TABLE, _PATIENCE)
        self._file = file_number(self.path)
        return connection

    def _in_memory(self, error: Exception) -> sqlite3.Connection:
        warnings.warn(
            f"{self.path}: measurements are not kept on disk ({error})", RuntimeWarning, stacklevel=5
        )
        return connect(":memory:", [_SCHEMA], VERSION, _TABLE)

    def _replace(self, reason: str) -> None:
        warnings.warn(
            f"{self.path}: starting afresh, the old file is beside it ({reason})",
            RuntimeWarning,
            stacklevel=5,
        )
        self._disconnect()
        set_aside(self.path, self._file)

    def _disconnect(self) -> None:
        if self._connection is not None and self._process == os.getpid():
            self._connection.close()
        self._connection = None
