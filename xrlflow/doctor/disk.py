"""Checks of folders: those in which measurements are stored, and the one for temporary files."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xrlflow.cost.database import Database
from xrlflow.doctor.finding import Finding, Status
from xrlflow.storage.sqlite import cache_directory
from xrlflow.storage.stores import VARIABLE, StoreError

_LITTLE = 1 << 30
"""Bytes of free disk space that the optimisation of a large model may need."""
_PATIENCE = 0.5
"""Seconds to wait while another process writes to a store."""


@dataclass(frozen=True, slots=True)
class StoreFile:
    """A file of measurements in the cache directory, and its table with one row for each measurement."""

    name: str
    file: str
    table: str


STORES: Sequence[StoreFile] = (
    StoreFile("store of operators", "measurements.sqlite", "measurement"),
    StoreFile("store of kernels", "tuning.sqlite", "record"),
)


def store(kind: StoreFile, folder: Path | None = None) -> Finding:
    """Whether the file can be read and written. A missing file is not created, and measurements are not changed."""
    if folder is None and os.environ.get(VARIABLE, "").strip():
        return Finding(kind.name, Status.OK, f"on the server of {VARIABLE}")
    path = (cache_directory() if folder is None else folder) / kind.file
    elsewhere = "measurements are lost at the end: set XDG_CACHE_HOME to a folder that can be written"
    if not path.exists():
        if _could_be_made(path):
            return Finding(kind.name, Status.OK, f"{path}: will be made when there is something to keep")
        return Finding(kind.name, Status.WARN, f"{path}: cannot be made", elsewhere)
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=_PATIENCE)
        connection.isolation_level = None
        try:
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            # Whoever stores the first measurement makes the tables.
            counted = f"SELECT count(*) FROM {kind.table}" if tables else "SELECT 0"
            (count,) = connection.execute(counted).fetchone()
            connection.execute("BEGIN IMMEDIATE")  # fails if the file cannot be written
            connection.execute("ROLLBACK")
        finally:
            connection.close()
    except sqlite3.OperationalError as error:
        waiting = "another process writes to it: measurements wait in memory until it has ended"
        advice = waiting if "locked" in str(error) else elsewhere
        return Finding(kind.name, Status.WARN, f"{path} ({size}): {error}", advice)
    except sqlite3.DatabaseError as error:
        advice = "it will be renamed to .damaged, and a new one begun"
        return Finding(kind.name, Status.WARN, f"{path} ({size}): {error}", advice)
    if not os.access(path, os.W_OK):
        return Finding(kind.name, Status.WARN, f"{path}: {count} measurements, {size}, read-only", elsewhere)
    return Finding(kind.name, Status.OK, f"{path}: {count} measurements, {size}")


def server() -> Finding:
    """Whether the server of measurements can be used, if environment variables name one. If it cannot be used, no
    command works.
    """
    name = "store on a server"
    if not os.environ.get(VARIABLE, "").strip():
        return Finding(name, Status.OK, f"none: {VARIABLE} is not set", needed=True)
    try:
        with Database() as database:
            database.check()
            text = f"{database.path}: {len(database)} measurements of operators"
    except StoreError as error:
        return Finding(
            name, Status.FAIL, str(error), f"start it, correct {VARIABLE}, or unset it", needed=True
        )
    return Finding(name, Status.OK, text, needed=True)


def temporary() -> Finding:
    """Whether there is a folder for temporary files with enough space. Without one, no optimisation works."""
    name = "temporary files"
    try:
        with tempfile.NamedTemporaryFile(prefix="xrlflow-") as file:
            file.write(b"x" * 4096)
            file.flush()
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        advice = "free some disk, or set TMPDIR to a folder that can be written"
        return Finding(name, Status.FAIL, str(error), advice, needed=True)
    text = f"{folder}, {free / 2**30:.1f} GiB free"
    if free < _LITTLE:
        return Finding(name, Status.WARN, text, "free some disk, or set TMPDIR to another one", needed=True)
    return Finding(name, Status.OK, text, needed=True)


def _could_be_made(path: Path) -> bool:
    """Whether a file can be created at this path, together with missing folders."""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
