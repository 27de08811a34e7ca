"""A SQLite file of measurements that processes and threads share. A disk that fails does not end the program."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

_SWITCHING = 1.0  # wait at least so many seconds while another process opens the file for the first time
_RETRY = 30.0  # seconds between attempts to write to a disk that fails

Row: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The tables of a file."""

    schema: tuple[str, ...]  # statements that create the tables
    version: int
    table: str  # the name of one of the tables
    put: str  # the beginning of statements that insert a measurement


def cache_directory() -> Path:
    """The user's cache directory for xrlflow."""
    from platformdirs import user_cache_path

    return user_cache_path("xrlflow")


def connect(path: Path | str, layout: Layout, patience: float = 0.0) -> sqlite3.Connection:
    """Connect to a file that processes and threads share. Missing tables are created.

    `patience`: seconds that a statement waits for another process. Every statement is a transaction of its own unless
    one is begun. Raises sqlite3.OperationalError if the file cannot be opened or written, and sqlite3.DatabaseError if
    it is damaged, or of another version or program.
    """
    connection = sqlite3.connect(path, timeout=patience, isolation_level=None, check_same_thread=False)
    try:
        # One statement, because another process may be creating the tables.
        version, tables, own = connection.execute(
            "SELECT user_version, count(name), coalesce(sum(name = ?), 0) FROM pragma_user_version"
            " LEFT JOIN sqlite_master",
            (layout.table,),
        ).fetchone()
        if tables and not own:
            raise sqlite3.DatabaseError("it has tables of something else")
        if version not in (0, layout.version):
            raise sqlite3.DatabaseError(f"version {version}, and {layout.version} is wanted")
        _write_ahead(connection, max(patience, _SWITCHING))
        connection.execute("PRAGMA synchronous = NORMAL")
        if version == 0 or not tables:  # a copy of an empty file may have the version and no tables
            # One transaction, so that only one of two processes creates the tables.
            connection.execute("BEGIN IMMEDIATE")
            for statement in layout.schema:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {layout.version}")
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def file_number(path: Path) -> int | None:
    """A number that distinguishes a file from a later file of the same name; None if there is no file."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def set_aside(path: Path, number: int | None) -> None:
    """Rename a damaged database and the files that belong to it to `.damaged`. Raises OSError.

    `number` is the `file_number` of the damaged database. If another process has begun a new file, nothing is renamed.
    """
    if file_number(path) != number:
        return
    for suffix in (
        "-wal",
        "-shm",
        "",
    ):  # the database itself is renamed last: no process begins a new one before
        if (file := Path(f"{path}{suffix}")).exists():
            file.replace(f"{path}.damaged{suffix}")


def _write_ahead(connection: sqlite3.Connection, patience: float) -> None:
    """Switch a file to the write-ahead log. If two processes switch at once, SQLite does not wait by itself; this
    does."""
    until = time.monotonic() + patience
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= until:
                raise
        time.sleep(0.01)


class PendingRows:
    """Rows that could not be written yet. They can be read, and are written as soon as that is possible.

    `location`: where the store is, for messages. The first failure to write is a warning.
    """

    def __init__(self, location: str, layout: Layout) -> None:
        self.rows: list[tuple[str, Row]] = []
        self._location, self._layout = location, layout
        self._memory: sqlite3.Connection | None = None
        self._retry = 0.0
        self._warned = False

    @property
    def may_try(self) -> bool:
        """Whether a write may be tried: none has failed in the last seconds."""
        return time.monotonic() >= self._retry

    @property
    def due(self) -> bool:
        """Whether there are pending rows, and a write may be tried."""
        return bool(self.rows) and self.may_try

    def read(self, statement: str, values: Row) -> list[Row]:
        """The result of the statement on the pending rows."""
        return self._memory.execute(statement, values).fetchall() if self._memory is not None else []

    def keep(self, statement: str, values: Row) -> None:
        """Also put a row of `rows` into a table in memory, from which `read` answers."""
        if self._memory is None:
            self._memory = connect(":memory:", self._layout)
        self._memory.execute(statement, values)

    def failed(self, error: object, stacklevel: int) -> None:
        """Writing failed: warn the first time, and do not try again for a while."""
        self._retry = time.monotonic() + _RETRY
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._location}: measurements are kept in memory until they can be written ({error})",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )

    def hurry(self) -> None:
        """Allow the next write to be tried at once."""
        self._retry = 0.0

    def clear(self) -> None:
        """Forget the rows, which have been written."""
        self.rows.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def leave(self, stacklevel: int) -> None:
        """Give up writing, and warn about the rows that are lost."""
        if lost := sum(statement.startswith(self._layout.put) for statement, _ in self.rows):
            warnings.warn(
                f"{self._location}: {lost} measurements are lost, as they could never be written",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )
        self.clear()

    def after_fork(self) -> list[sqlite3.Connection | None]:
        """Forget the rows, which the parent process writes. Returns a connection that must not be closed."""
        connection, self._memory, self.rows = self._memory, None, []
        return [connection]


class SharedFile:
    """A file that processes and threads share (write-ahead log, one statement per write).

    - The program's own file: if it is damaged or of another version, there is a warning, the file is renamed to
      `.damaged`, and a new file is begun.
    - A file that the user named: if it is no store, it is refused on first use. If it is damaged later, it is treated
      like the program's own file.
    - If the disk is full, or the file is locked or read-only, there is one warning. Rows of the file can still be read.
      New rows are kept in memory and written as soon as possible. `close` reports those that could never be written.
    """

    def __init__(
        self, path: Path, layout: Layout, patience: float, error_type: type[Exception] | None = None
    ) -> None:
        """`patience`: seconds that a statement waits for another process.

        `error_type`: the class of the error, called with one line, if the user named the file and it is no store.
        None: the file is the program's own.
        """
        self.path, self._layout, self._patience = path, layout, patience
        self._error_type = error_type if error_type is not None else sqlite3.DatabaseError
        self._ours = error_type is None
        self._lock = threading.RLock()
        self._disk: sqlite3.Connection | None = None
        self._file: int | None = None
        self._pending = PendingRows(str(path), layout)
        self._process = 0
        self._inherited: list[sqlite3.Connection | None] = []

    def check(self) -> None:
        """Open the file now. Raises `error_type` if the file is no store."""
        with self._lock:
            self._adopt()
            self._opened()

    def read(self, statement: str, values: Row) -> list[Row]:
        """Rows of the file, then those that are still pending."""
        with self._lock:
            self._adopt()
            rows: list[Row] = []
            if (disk := self._opened()) is not None:
                try:
                    rows += disk.execute(statement, values).fetchall()
                except sqlite3.OperationalError as error:
                    self._complain(error)
                except sqlite3.DatabaseError as error:
                    self._set_aside(error)
            return rows + self._pending.read(statement, values)

    def write(self, statement: str, values: Row) -> None:
        """Write a row, or store it in memory until it can be written."""
        with self._lock:
            self._adopt()
            self._pending.rows.append((statement, values))
            self._write_pending()
            if self._pending.rows:
                self._pending.keep(statement, values)

    def _write_pending(self) -> None:
        """Write all pending rows in one transaction, unless an attempt has just failed."""
        if not self._pending.due:
            return
        for _ in range(2):
            if (disk := self._opened()) is None:
                return
            try:
                if len(self._pending.rows) > 1:
                    disk.execute("BEGIN IMMEDIATE")
                for statement, values in self._pending.rows:
                    disk.execute(statement, values)
                if disk.in_transaction:
                    disk.execute("COMMIT")
            except sqlite3.OperationalError as error:
                self._roll_back(disk)
                self._complain(error)
                return
            except sqlite3.DatabaseError as error:
                self._roll_back(disk)
                self._set_aside(error)
            else:
                self._pending.clear()
                return

    @staticmethod
    def _roll_back(disk: sqlite3.Connection) -> None:
        if disk.in_transaction:  # only some errors end the transaction
            disk.execute("ROLLBACK")

    def _adopt(self) -> None:
        """After a fork, drop the parent's connections without closing them."""
        if self._process != os.getpid():
            self._inherited += [self._disk, *self._pending.after_fork()]
            self._disk = None
            self._process = os.getpid()

    def _opened(self) -> sqlite3.Connection | None:
        if self._disk is not None:
            return self._disk
        try:
            self._disk = self._open()
        except (sqlite3.OperationalError, OSError) as error:
            self._complain(error)
            self._disk = self._open_to_read()
        except sqlite3.DatabaseError as error:
            self._set_aside(error)
            try:
                self._disk = self._open()
            except (sqlite3.Error, OSError) as again:
                self._complain(again)
        return self._disk

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = file_number(self.path)
        connection = connect(self.path, self._layout, self._patience)
        self._file = file_number(self.path)
        self._ours = True
        return connection

    def _open_to_read(self) -> sqlite3.Connection | None:
        """A connection to the file for reading only, if it is a store and read-only; else None."""
        for manner in ("mode=ro", "immutable=1"):  # `immutable` if not even a lock file can be written
            try:
                connection = sqlite3.connect(
                    f"{self.path.absolute().as_uri()}?{manner}",
                    uri=True,
                    timeout=self._patience,
                    isolation_level=None,
                    check_same_thread=False,
                )
            except sqlite3.Error:
                continue
            try:
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                if version == self._layout.version:
                    return connection
            except sqlite3.Error:
                pass
            connection.close()
        return None

    def _complain(self, error: Exception) -> None:
        """Handle a failure of the disk: warn, and let later statements wait less."""
        if self._disk is not None:
            self._disk.execute("PRAGMA busy_timeout = 100")  # after one long wait, later ones are short
        self._pending.failed(error, stacklevel=6)

    def _set_aside(self, error: Exception) -> None:
        if not self._ours:
            self._pending.clear()
            raise self._error_type(
                f"{self.path}: no store of measurements ({error}): name another file"
            ) from error
        warnings.warn(
            f"{self.path}: starting afresh, the old file is next to it ({error})",
            RuntimeWarning,
            stacklevel=6,
        )
        if self._disk is not None:
            self._disk.close()
            self._disk = None
        try:
            set_aside(self.path, self._file)
        except OSError as failure:
            self._complain(failure)

    def close(self) -> None:
        """Write all pending rows, if that is possible now; warn about rows that are lost. Close the connections."""
        with self._lock:
            if self._process == os.getpid():
                self._pending.hurry()
                self._write_pending()
                self._pending.leave(stacklevel=4)
                if self._disk is not None:
                    self._disk.close()
            self._disk = None
