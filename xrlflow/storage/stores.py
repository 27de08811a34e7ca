"""Where measurements are kept: in a SQLite file of this machine, or on a PostgreSQL server that machines share."""

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
"""A file, the URL of a server, or None: what the environment variable says, or else a file of the user's."""


class StoreError(ValueError):
    """Measurements cannot be kept there. The message is one line, without passwords."""


class Storage(Protocol):
    """Rows that processes share. `SharedFile` and `SharedServer` are alike: what cannot be written now waits in memory.

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
        """What the statement finds, then what it finds among the rows that are not yet written."""
        ...

    def write(self, statement: str, values: Row) -> None:
        """Write a row, or keep it in memory until it can be written."""
        ...

    def close(self) -> None:
        """Write what is not yet written, if that is possible now, and warn about what is lost."""
        ...


def opened(
    where: Where, default: Path, layout: Layout, patience: float, refused: type[Exception] | None = None
) -> Storage:
    """The storage at this place; None: at the server of the environment, or in the file `default`.

    Nothing is opened before it is used. `patience`: seconds that a statement waits for another process. `refused`: for
    a file that the user named (see `SharedFile`). Raises StoreError for a URL that is none.
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
    return SharedFile(Path(where), layout, patience, refused)


def server_of(where: Where) -> str | None:
    """The URL of the server that is meant, if one is. Raises StoreError if the environment variable has no URL."""
    if where is None:
        named = os.environ.get(VARIABLE, "").strip()
        if named and not named.startswith(_SCHEMES):
            raise StoreError(
                f"{VARIABLE} is no URL: write it as {_SCHEMES[0]}USER@HOST:PORT/DATABASE, or unset it"
            )
        return named or None
    text = os.fspath(where)
    return text if text.startswith(_SCHEMES) else None


def masked(where: str) -> str:
    """What a user gave as a place, without what may be a password."""
    head, at, tail = where.rpartition("@")
    scheme, found, _ = head.partition("://")
    return (f"{scheme}://" if found else "") + ("***@" if at else "") + tail.partition("?")[0]
