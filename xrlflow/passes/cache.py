"""A cache on disk of the results of passes, so that a pass runs only once on a module, also in later runs of the
program.

It is a bounded SQLite file that processes share (see `SharedFile`). Each module is stored once, compressed. Rows have
a checksum, which SQLite lacks: a row that the disk has damaged counts as missing.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from xrlflow.passes.compiler import Module, Summary
from xrlflow.storage.sqlite import Layout, SharedFile, cache_directory

VERSION = 1
_PATIENCE = 20.0  # seconds that a writer waits while another process writes
_PUT = "INSERT OR REPLACE INTO result"
_LAYOUT = Layout(
    (
        "CREATE TABLE IF NOT EXISTS result (compiler TEXT NOT NULL, before TEXT NOT NULL, pass TEXT NOT NULL,"
        " after TEXT NOT NULL, error TEXT, PRIMARY KEY (compiler, before, pass)) WITHOUT ROWID",
        "CREATE TABLE IF NOT EXISTS module (digest TEXT PRIMARY KEY, summary TEXT NOT NULL, data BLOB NOT NULL,"
        " bytes INTEGER NOT NULL, taken REAL NOT NULL)",
        "CREATE INDEX IF NOT EXISTS age ON module (taken)",
    ),
    VERSION,
    "result",
    _PUT,
)
# The size of the file is checked each time this many modules were added.
_LOOK = 200


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a pass on a module: the digest of the new module (or of the old one if nothing changed), and the
    error."""

    after: str
    error: str | None = None


class Cache:
    """Outcomes of passes, and modules by digest. `limit`: how many bytes of compressed modules stay, roughly; older
    modules are dropped.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, limit: int = 1 << 30) -> None:
        """`path`: the file. By default it is `passes.sqlite` in the user's cache directory."""
        self.path = Path(path) if path is not None else cache_directory() / "passes.sqlite"
        self.limit = limit
        self._file = SharedFile(self.path, _LAYOUT, _PATIENCE)
        self._new = 0

    def outcome(self, compiler: str, before: str, name: str) -> Outcome | None:
        """The stored outcome of a pass on a module; None if there is none."""
        rows = self._file.read(
            "SELECT after, error FROM result WHERE compiler = ? AND before = ? AND pass = ?",
            (compiler, before, name),
        )
        for after, sealed in reversed(rows):
            error = _opened(sealed, compiler, before, name, after)
            if error is not None:
                return Outcome(after, error or None)
        return None

    def module(self, compiler: str, digest: str) -> Module | None:
        """A stored module; None if there is none. Its figures are those that this compiler computed."""
        key = _key(compiler, digest)
        rows = self._file.read("SELECT summary, data FROM module WHERE digest = ?", (key,))
        if not rows:
            return None
        sealed, data = rows[-1]
        try:
            if (summary := _opened(sealed, key, zlib.crc32(data))) is None:
                return None
            return Module(digest, zlib.decompress(data), _summary(summary))
        except (zlib.error, ValueError, TypeError):  # the row is damaged: the pass will run again
            return None

    def put(self, compiler: str, before: str, name: str, outcome: Outcome, module: Module | None) -> None:
        """Store an outcome, and the new module if there is one."""
        if module is not None:
            data, module_key = zlib.compress(module.data, 3), _key(compiler, module.digest)
            summary = _sealed(json.dumps(astuple(module.summary)), module_key, zlib.crc32(data))
            self._file.write(
                "INSERT OR REPLACE INTO module VALUES (?, ?, ?, ?, ?)",
                (module_key, summary, data, len(data), time.time()),
            )
            self._new += 1
            if self._new % _LOOK == 0:
                self.prune()
        key = compiler, before, name, outcome.after
        self._file.write(f"{_PUT} VALUES (?, ?, ?, ?, ?)", (*key, _sealed(outcome.error or "", *key)))

    def prune(self) -> None:
        """Drop the oldest modules beyond the limit, and outcomes whose modules were dropped."""
        self._file.write(
            "DELETE FROM module WHERE digest IN (SELECT digest FROM (SELECT digest, sum(bytes) OVER"
            " (ORDER BY taken DESC, digest) AS total FROM module) WHERE total > ?)",
            (self.limit,),
        )
        self._file.write(
            "DELETE FROM result WHERE after != before"
            " AND compiler || ' ' || after NOT IN (SELECT digest FROM module)",
            (),
        )

    def __len__(self) -> int:
        return sum(int(count) for (count,) in self._file.read("SELECT count(*) FROM result", ()))

    @property
    def bytes(self) -> int:
        """The compressed bytes of all modules."""
        return sum(
            int(total) for (total,) in self._file.read("SELECT coalesce(sum(bytes), 0) FROM module", ())
        )

    def close(self) -> None:
        """Write the outcomes that are not written yet, unless another process writes now."""
        self._file.close()


def _key(compiler: str, digest: str) -> str:
    """The key of a module. It includes the compiler's name, as another compiler may count operations differently."""
    return f"{compiler} {digest}"


_SEAL = 8  # hex digits of a checksum


def _sealed(text: str, *parts: str | int) -> str:
    """A text, preceded by a checksum of the text and of the other fields of its row."""
    return f"{zlib.crc32(json.dumps([text, *parts]).encode()):08x}{text}"


def _opened(sealed: object, *parts: Any) -> str | None:
    """The text from which `_sealed` made this string; None if the row is damaged."""
    if not isinstance(sealed, str) or not all(isinstance(part, str | int) for part in parts):
        return None
    text = sealed[_SEAL:]
    return text if sealed == _sealed(text, *parts) else None


def _summary(text: str) -> Summary:
    operations, bytes_accessed, flops, opcodes, computations = json.loads(text)
    return Summary(
        operations,
        bytes_accessed,
        flops,
        tuple((name, count) for name, count in opcodes),
        tuple(computations),
    )
