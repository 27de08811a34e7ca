"""Stores measurements of kernels on disk, so that a candidate of a tuning task is measured only once on a machine. Only
the best candidates are measured repeatedly."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.stack import CODE
from xrlflow.cost.machine import cpu_name
from xrlflow.storage.sqlite import Layout, Row, cache_directory
from xrlflow.storage.stores import StoreError, Where, open_storage
from xrlflow.tuning.tasks import Task, target_text
from xrlflow.tuning.tuners.protocol import Measurement

if TYPE_CHECKING:
    from tvm.target import Target
    from typing_extensions import Self

    from xrlflow.tuning.knobs import Candidate

VERSION = 1
CONFIRMED = 4
"""The number of measurements of a kernel whose median is reliable. (The least of many single times is low by
chance.)"""
_PATIENCE = 5.0  # seconds that a writer waits for another process
_NO_TIME = 1e10  # the seconds that TVM writes for failures

_SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS record (
        id INTEGER PRIMARY KEY, task TEXT NOT NULL,
        target TEXT NOT NULL, tvm TEXT NOT NULL, device TEXT NOT NULL, threads INTEGER NOT NULL,
        candidate TEXT NOT NULL, trace TEXT NOT NULL, arguments TEXT NOT NULL, -- empty: of earlier versions
        seconds TEXT NOT NULL, error TEXT NOT NULL, taken REAL NOT NULL, digest TEXT NOT NULL UNIQUE
    )
    """,
    "CREATE INDEX IF NOT EXISTS record_of_task ON record (task)",
)
_PUT = "INSERT INTO record"
_LAYOUT = Layout(_SCHEMA, VERSION, "record", _PUT)
_COLUMNS = "task, target, tvm, device, threads, candidate, trace, seconds, error, taken"


@dataclass(frozen=True, slots=True)
class Setting:
    """The conditions, besides the kernel, on which its times depend.

    `target`: TVM's target as JSON (`tasks.target_text`). `tvm`: the version of the code generator, and whether kernels
    are timed with cold caches (`worker.Timing.flush`).
    """

    target: str
    tvm: str
    device: str
    threads: int

    @staticmethod
    def here(target: Target, threads: int, *, flushed: bool = False) -> Setting:
        """This machine with the installed TVM."""
        return Setting.on(None, target, threads, flushed=flushed)

    @staticmethod
    def on(device: str | None, target: Target, threads: int, *, flushed: bool = False) -> Setting:
        """A device by its name (None: this machine), with the TVM that is installed here and xrlflow's additions to
        TVM."""
        return Setting(target_text(target), _version(flushed), device or cpu_name(), threads)


def _version(flushed: bool) -> str:
    return f"{tvm().__version__}, {CODE}" + ", timed between others" * flushed


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement of a candidate of a tuning task in one setting; in the results of `Store.best`, several
    measurements together.

    `trace`: the choice that describes the candidate, as JSON. `seconds` is empty if there is an `error`. `taken`: when
    it was measured, in seconds since 1970.
    """

    task: str
    setting: Setting
    candidate: str
    trace: str
    seconds: tuple[float, ...]
    error: str | None
    taken: float

    @staticmethod
    def of(task: Task, setting: Setting, candidate: Candidate, outcome: Measurement) -> Record:
        """The record of a measurement, with the present time as its time."""
        return Record(
            task=task.key,
            setting=setting,
            candidate=candidate.key,
            trace=_text(candidate.trace),
            seconds=outcome.seconds,
            error=outcome.error,
            taken=time.time(),
        )

    @property
    def outcome(self) -> Measurement:
        """The measurement in the type that tuners use."""
        if self.seconds and all(0.0 < s < _NO_TIME for s in self.seconds):
            return Measurement(self.seconds)
        return Measurement(error=self.error or "it has no time")

    @property
    def digest(self) -> str:
        """A key that is equal for two records that differ only in the time of measurement."""
        setting = self.setting
        where = (setting.target, setting.tvm, setting.device, setting.threads)
        what = (self.task, self.candidate, self.trace, self.seconds, self.error)
        return hashlib.sha256(_text((where, what)).encode()).hexdigest()


class Store:
    """Measurements in a SQLite file (see `SharedFile`) or on a server (see `SharedServer`).

    The file in the user's cache directory belongs to xrlflow. If the caller names a file that is not a store, the first
    access raises StoreError.
    """

    def __init__(self, where: Where = None) -> None:
        """`where`: the file or server (see `stores.open_storage`); None: `tuning.sqlite` in the user's cache
        directory."""
        self._file = open_storage(where, cache_directory() / "tuning.sqlite", _LAYOUT, _PATIENCE, StoreError)
        self.path = self._file.path
        self.where = where

    def check(self) -> None:
        """Open the store now. Raises StoreError for a named file that is not a store, and for a server that cannot be
        used."""
        self._file.check()

    def put(self, record: Record) -> None:
        """Store a measurement. Of measurements that differ only in their time, one is stored."""
        setting = record.setting
        values = (
            *(record.task, setting.target, setting.tvm, setting.device, setting.threads),
            *(record.candidate, record.trace, _text(record.seconds)),
            *(record.error or "", record.taken),
            record.digest,
        )
        marks = ", ".join("?" * len(values))
        self._file.write(
            f"{_PUT} ({_COLUMNS}, digest, arguments) VALUES ({marks}, '') ON CONFLICT DO NOTHING", values
        )

    def records(self, task: str, setting: Setting | None = None) -> list[Record]:
        """All records of the task with this key, by the time of measurement. Damaged rows are left out.

        `setting`: only records of this setting.
        """
        records = [
            record for row in self._select("task = ?", (task,)) if (record := _record(row)) is not None
        ]
        return sorted((r for r in records if setting in (None, r.setting)), key=lambda record: record.taken)

    def best(
        self, task: str, count: int = 1, setting: Setting | None = None, *, least: int = 1
    ) -> list[Record]:
        """The `count` fastest candidates of the task with this key, each once for a setting. If some candidates have at
        least `least` measurements, only these candidates are returned.

        Candidates are ordered by the median of the medians of all their measurements; a returned record has the times
        of all of them. A candidate that failed when it was last measured is left out.
        """
        by_candidate: dict[tuple[str, Setting], list[Record]] = {}
        for record in self.records(task, setting):
            by_candidate.setdefault((record.candidate, record.setting), []).append(record)
        running = [
            [record for record in records if record.outcome.error is None]
            for records in by_candidate.values()
            if records[-1].outcome.error is None
        ]
        often = [records for records in running if len(records) >= least] or running
        ordered = sorted(often, key=lambda records: statistics.median(r.outcome.median for r in records))
        return [
            replace(records[-1], seconds=tuple(second for r in records for second in r.seconds))
            for records in ordered[:count]
        ]

    def state(self, device: str) -> str | None:
        """A text that changes whenever kernels may have been tuned further (on a server: on this device); None if the
        store has no records."""
        if isinstance(self.path, Path):
            return str(os.stat(self.path).st_mtime_ns) if self.path.exists() else None
        rows = self._file.read("SELECT count(*) FROM record WHERE device = ?", (device,))
        count = sum(int(count) for (count,) in rows)
        return f"{count} records" if count else None

    def tasks(self) -> list[str]:
        """The keys of all tasks with records, sorted."""
        return sorted({str(key) for (key,) in self._file.read("SELECT DISTINCT task FROM record", ())})

    def __len__(self) -> int:
        return sum(int(count) for (count,) in self._file.read("SELECT count(*) FROM record", ()))

    def close(self) -> None:
        """Write pending records, if that is possible now, and report records that are lost."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _select(self, condition: str, values: Row) -> list[Row]:
        return self._file.read(f"SELECT {_COLUMNS} FROM record WHERE {condition} ORDER BY id", values)


def _text(value: object) -> str:
    """Compact JSON. Floats are written exactly."""
    return json.dumps(value, separators=(",", ":"))


def _record(row: Row) -> Record | None:
    """The record of a row; None if a text or number in it is damaged."""
    task, target, version, device, threads, candidate, trace, seconds, error, taken = row
    if not all(isinstance(t, str) for t in (task, target, version, device, candidate, trace, error)):
        return None
    try:
        setting = Setting(target, version, device, int(threads))
        times = tuple(float(s) for s in json.loads(seconds))
        return Record(task, setting, candidate, trace, times, error or None, float(taken))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
