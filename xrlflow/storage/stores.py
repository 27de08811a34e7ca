"""Opens a store of measurements: a SQLite file of this machine, or a PostgreSQL server that machines share."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Protocol

from xrlflow.storage.sqlite import Layout, Row, SharedFile

VARIABLE = "XRLFLOW_STORE"
"""The environment variable with the URL of the server, if there is one."""
_SCHEMES = ("postgresql://", "postgres://")

Where = str | os.PathLike[str] | None
"""A file, the URL of a server, or None: the server of the environment variable, or else a file in the user's cache."""


class StoreError(ValueError):
    """A store cannot be used. The message is one line, without passwords."""


class Storage(Protocol):
    """Rows that processes share (`SharedFile`, `SharedServer`). Rows that cannot be written now are pending in memory.

    Statements are in the SQL that SQLite and PostgreSQL share, with a question mark for each value.
    """

    @property
    def path(self) -> Path | str:
        """Where the rows are, for messages: a file, or a server without the password."""
        ...

    def check(self) -> None:
        """Connect now. Raises StoreError."""
        ...

    def read(self, statement: str, values: Row) -> list[Row]:
        """The result of the statement, then its result on pending rows."""
        ...

    def write(self, statement: str, values: Row) -> None:
        """Write a row, or store it in memory until it can be written."""
        ...

    def close(self) -> None:
        """Write all pending rows, if that is possible now; warn about rows that are lost."""
        ...


def open_storage(
    where: Where, default: Path, layout: Layout, patience: float, error_type: type[Exception] | None = None
) -> Storage:
    """The store `where`; if `where` is None, the server of the environment variable, or else the file `default`.

    The store is opened on first use. `patience`: seconds that a statement waits for another process. `error_type`: the
    class of errors for a file that the user named (see `SharedFile`). Raises StoreError for an invalid URL.
    """
    server = server_of(where)
    if server is not None:
        if importlib.util.find_spec("psycopg") is None:
            raise StoreError(
                "a store on a server needs psycopg: install it with `pip install 'xrlflow[postgres]'`"
            )
        from xrlflow.storage.postgres import SharedServer

        return SharedServer(server, layout, patience, StoreError)
    if where is None:
        return SharedFile(default, layout, patience)
    return SharedFile(Path(where), layout, patience, error_type)


def server_of(where: Where) -> str | None:
    """The URL of the server that `where` names, or None. Raises StoreError if the environment variable has no URL."""
    if where is None:
        url = os.environ.get(VARIABLE, "").strip()
        if url and not url.startswith(_SCHEMES):
            raise StoreError(
                f"{VARIABLE} is no URL: write it as {_SCHEMES[0]}USER@HOST:PORT/DATABASE, or unset it"
            )
        return url or None
    text = os.fspath(where)
    return text if text.startswith(_SCHEMES) else None


def masked(where: str) -> str:
    """A store's name for messages: without parts that may be a password."""
    head, at, tail = where.rpartition("@")
    scheme, separator, _ = head.partition("://")
    return (f"{scheme}://" if separator else "") + ("***@" if at else "") + tail.partition("?")[0]
