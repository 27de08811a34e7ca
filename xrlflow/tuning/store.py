"""Measurements on disk: each schedule of a task is measured once on a machine, and again if it is among the best."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xrlflow import files
from xrlflow.backends.protocol import BackendError, one_line
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.stack import CODE
from xrlflow.cost.machine import cpu_name
from xrlflow.sqlite import Layout, Row, cache_directory
from xrlflow.stores import StoreError, Where, opened
from xrlflow.tuning.tasks import Task, module_key, target_text
from xrlflow.tuning.tuners.protocol import Measurement

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target
    from typing_extensions import Self

    from xrlflow.tuning.knobs import Candidate

VERSION = 1
CONFIRMED = 4
"""With this many measurements, a median is reliable. The least of many single times is a lucky one."""
_PATIENCE = 5.0  # seconds that a writer waits for another process
_NO_TIME = 1e10  # the seconds that TVM writes for failures

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS workload (task TEXT PRIMARY KEY, workload TEXT NOT NULL) WITHOUT ROWID",
    """
    CREATE TABLE IF NOT EXISTS record (
        id INTEGER PRIMARY KEY, task TEXT NOT NULL,
        target TEXT NOT NULL, tvm TEXT NOT NULL, device TEXT NOT NULL, threads INTEGER NOT NULL,
        candidate TEXT NOT NULL, trace TEXT NOT NULL, arguments TEXT NOT NULL,
        seconds TEXT NOT NULL, error TEXT NOT NULL, taken REAL NOT NULL, digest TEXT NOT NULL UNIQUE
    )
    """,
    "CREATE INDEX IF NOT EXISTS record_of_task ON record (task)",
)
_PUT = "INSERT INTO record"
_LAYOUT = Layout(_SCHEMA, VERSION, "record", _PUT)
_COLUMNS = "task, target, tvm, device, threads, candidate, trace, arguments, seconds, error, taken"


@dataclass(frozen=True, slots=True)
class Setting:
    """What times depend on besides the schedule.

    `target`: TVM's, as JSON (`tasks.target_text`). `tvm`: the version of the code generator, and whether kernels are
    timed with cold caches (`worker.Timing.flush`).
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
        """A device by its name (None: this machine), with the TVM that is installed here and our additions to it."""
        return Setting(target_text(target), _version(flushed), device or cpu_name(), threads)


def _version(flushed: bool) -> str:
    return f"{tvm().__version__}, {CODE}" + ", timed between others" * flushed


@dataclass(frozen=True, slots=True)
class Record:
    """A measurement, or several together (`Store.best`), of one candidate of a task in one setting.

    `trace` and `arguments` (the kernel's parameters) are JSON, as in TVM's own database. `seconds` is empty if there is
    an `error`; records from elsewhere may have neither. `taken`: seconds since 1970.
    """

    task: str
    setting: Setting
    candidate: str
    trace: str
    arguments: str
    seconds: tuple[float, ...]
    error: str | None
    taken: float

    @staticmethod
    def of(task: Task, setting: Setting, candidate: Candidate, outcome: Measurement) -> Record:
        """The record of a measurement that was just taken."""
        arguments = tvm().s_tir.meta_schedule.arg_info.ArgInfo.from_entry_func(candidate.mod, True)
        described = [["TENSOR", str(a.dtype), [int(size) for size in a.shape]] for a in arguments]
        return Record(
            task=task.key,
            setting=setting,
            candidate=candidate.key,
            trace=_text(candidate.trace),
            arguments=_text(described),
            seconds=outcome.seconds,
            error=outcome.error,
            taken=time.time(),
        )

    @property
    def outcome(self) -> Measurement:
        """The measurement, as tuners use it."""
        if self.seconds and all(0.0 < s < _NO_TIME for s in self.seconds):
            return Measurement(self.seconds)
        return Measurement(error=self.error or "it has no time")

    @property
    def digest(self) -> str:
        """A key that is equal for measurements that differ only in the time of day."""
        setting = self.setting
        where = (setting.target, setting.tvm, setting.device, setting.threads)
        what = (self.task, self.candidate, self.trace, self.arguments, self.seconds, self.error)
        return hashlib.sha256(_text((where, what)).encode()).hexdigest()


class Store:
    """Measurements in a SQLite file (see `SharedFile`) or on a server (see `SharedServer`).

    The file in the user's cache directory is our own. A named file that is not a store is refused: whatever reads or
    writes first raises StoreError.
    """

    def __init__(self, where: Where = None) -> None:
        """`where`: the file or server (see `stores.opened`); the file of the user's is `tuning.sqlite`."""
        self._file = opened(where, cache_directory() / "tuning.sqlite", _LAYOUT, _PATIENCE, StoreError)
        self.path = self._file.path

    def check(self) -> None:
        """Open it now. Raises StoreError if it is a named file that is not a store, or a server that cannot be used."""
        self._file.check()

    def put(self, record: Record) -> None:
        """Store a measurement. Measurements that differ only in the time of day are stored once."""
        setting = record.setting
        values = (
            *(record.task, setting.target, setting.tvm, setting.device, setting.threads),
            *(record.candidate, record.trace, record.arguments, _text(record.seconds)),
            *(record.error or "", record.taken),
            record.digest,
        )
        marks = ", ".join("?" * len(values))
        self._file.write(f"{_PUT} ({_COLUMNS}, digest) VALUES ({marks}) ON CONFLICT DO NOTHING", values)

    def put_task(self, task: Task) -> None:
        """Store a task's module, without which records are useless elsewhere."""
        workload = tvm().s_tir.meta_schedule.database.Workload(task.mod).as_json()
        self._put_workload(task.key, _text([str(part) for part in workload]))

    def known(self, task: str, setting: Setting | None = None) -> list[Record]:
        """All records of the task with this key, in the order they were taken. Rows that are no records are left out.

        `setting`: only those of this setting.
        """
        found = [record for row in self._select("task = ?", (task,)) if (record := _record(row)) is not None]
        return sorted((r for r in found if setting in (None, r.setting)), key=lambda record: record.taken)

    def best(
        self, task: str, count: int = 1, setting: Setting | None = None, *, least: int = 1
    ) -> list[Record]:
        """The fastest candidates of the task with this key, each once in a setting, of those that were measured at
        least so often, if there are any.

        What counts is the median of the medians of all measurements of one, whose times the record has together. What
        failed the last time that it was measured is left out.
        """
        found: dict[tuple[str, Setting], list[Record]] = {}
        for record in self.known(task, setting):
            found.setdefault((record.candidate, record.setting), []).append(record)
        running = [
            [record for record in records if record.outcome.error is None]
            for records in found.values()
            if records[-1].outcome.error is None
        ]
        often = [records for records in running if len(records) >= least] or running
        ordered = sorted(often, key=lambda records: statistics.median(r.outcome.median for r in records))
        return [
            replace(records[-1], seconds=tuple(second for r in records for second in r.seconds))
            for records in ordered[:count]
        ]

    def state(self, device: str) -> str | None:
        """Another text if kernels may have been tuned further, on a server: on this device; None: nothing is kept."""
        if isinstance(self.path, Path):
            return str(os.stat(self.path).st_mtime_ns) if self.path.exists() else None
        rows = self._file.read("SELECT count(*) FROM record WHERE device = ?", (device,))
        count = sum(int(count) for (count,) in rows)
        return f"{count} records" if count else None

    def scheduled(self, task: Task, record: Record) -> IRModule:
        """The task's module, scheduled as in a record. Raises BackendError if that is not possible."""
        from tvm.s_tir import Schedule, ScheduleError, Trace

        schedule = Schedule(task.mod, debug_mask="none")
        try:
            Trace.apply_json_to_schedule(json.loads(record.trace), schedule)
        except (ScheduleError, RuntimeError, ValueError) as error:
            raise BackendError(
                f"{self.path}: a tuned schedule cannot be applied ({one_line(str(error)[-200:])}): tune again"
            ) from error
        return schedule.mod

    def tasks(self) -> list[str]:
        """The keys of all tasks with records, sorted."""
        return sorted({str(key) for (key,) in self._file.read("SELECT DISTINCT task FROM record", ())})

    def __len__(self) -> int:
        return sum(int(count) for (count,) in self._file.read("SELECT count(*) FROM record", ()))

    def database(self, target: Target, tasks: Iterable[Task] | None = None, *, flushed: bool = False) -> Any:
        """The best record of each task (default: all) for this target and version of TVM, as a MetaSchedule database
        for its pass MetaScheduleApplyDatabase. `flushed`: records of kernels timed with cold caches."""
        meta = tvm().s_tir.meta_schedule.database
        found = meta.MemoryDatabase()
        ours = target_text(target), _version(flushed)
        modules = {task.key: task.mod for task in tasks} if tasks is not None else self._modules()
        for key, module in modules.items():
            records = [
                r for r in self.best(key, count=len(self)) if (r.setting.target, r.setting.tvm) == ours
            ]
            if records:
                workload = found.commit_workload(module)
                found.commit_tuning_record(meta.TuningRecord.from_json(_for_tvm(records[0]), workload))
        return found

    def export_json(self, folder: str | os.PathLike[str]) -> int:
        """Write everything as a JSON database of TVM (`JSONDatabase(work_dir=folder)`). Returns the number of records.

        TVM keeps no reasons for failures, only that there is no time. Raises StoreError if the folder already has such
        files, or cannot be written to.
        """
        place = Path(folder)
        places = place / _WORKLOADS, place / _RECORDS
        if present := [file for file in places if file.exists()]:
            raise StoreError(f"{present[0]} exists already")
        workloads: dict[str, str] = dict(self._file.read("SELECT task, workload FROM workload", ()))
        # Tasks for several targets may share a module.
        numbers = {text: number for number, text in enumerate(dict.fromkeys(workloads.values()))}
        records = [record for key in sorted(workloads) for record in self.known(key)]
        lines = [_text([numbers[workloads[record.task]], _for_tvm(record)]) for record in records]
        try:
            place.mkdir(parents=True, exist_ok=True)
            for file, text in zip(places, (list(numbers), lines)):
                files.write(file, "".join(f"{line}\n" for line in text).encode())
        except OSError as error:
            raise StoreError(f"cannot export to {place}: {one_line(error)}") from error
        return len(lines)

    def import_json(
        self,
        folder: str | os.PathLike[str],
        *,
        setting: Setting | None = None,
        threads: int | None = None,
        flushed: bool = False,
    ) -> int:
        """Add the records of a JSON database of TVM. Returns how many were new.

        The files do not tell where and with how many threads kernels were measured. `setting` does (its target is used
        for records without one). By default it is this machine with the cores of each record's target, or `threads`,
        and kernels built as here (`backends.tvm.stack`), timed alone or, as those of models, `flushed`. Raises
        StoreError, with file and line, if it is no such database; then nothing is added.
        """
        workloads = [
            (text, _workload(line, place)) for place, text, line in _lines(Path(folder) / _WORKLOADS)
        ]
        found: list[tuple[Record, str]] = []
        for place, _, line in _lines(Path(folder) / _RECORDS):
            try:
                number, (trace, seconds, target, arguments) = line
                text, workload = workloads[int(number)]
                kind = tvm().target.Target(target) if target is not None else _target(setting)
                task = Task.of("imported", workload.mod, kind)
                cores = threads or int(kind.attrs.get("num-cores", 1))
                where = setting or Setting.here(kind, cores, flushed=flushed)
                record = Record(
                    task=task.key,
                    setting=Setting(target_text(kind), where.tvm, where.device, where.threads),
                    candidate=_candidate(line[1], workload),
                    trace=_text(trace),
                    arguments=_text(arguments),
                    seconds=tuple(float(s) for s in seconds or ()),
                    error=None,
                    taken=time.time(),
                )
            except (ValueError, TypeError, IndexError, RuntimeError, KeyError) as error:
                raise StoreError(f"{place}: no tuning record ({one_line(error, 150)})") from error
            found.append((record, text))
        before = len(self)
        for record, text in found:
            self._put_workload(record.task, text)
            self.put(record)
        return len(self) - before

    def close(self) -> None:
        """Write what is not yet written, if that is possible now, and report what is lost."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put_workload(self, task: str, text: str) -> None:
        self._file.write("INSERT INTO workload VALUES (?, ?) ON CONFLICT DO NOTHING", (task, text))

    def _modules(self) -> dict[str, Any]:
        workload = tvm().s_tir.meta_schedule.database.Workload
        rows = self._file.read("SELECT task, workload FROM workload", ())
        return {key: workload.from_json(json.loads(text)).mod for key, text in rows}

    def _select(self, condition: str, values: Row) -> list[Row]:
        return self._file.read(f"SELECT {_COLUMNS} FROM record WHERE {condition} ORDER BY id", values)


_WORKLOADS = "database_workload.json"
_RECORDS = "database_tuning_record.json"


def _text(value: object) -> str:
    """Compact JSON. Floats keep every bit."""
    return json.dumps(value, separators=(",", ":"))


def _record(row: Row) -> Record | None:
    """The record of a row; None if its numbers are none."""
    task, target, version, device, threads, candidate, trace, arguments, seconds, error, taken = row
    try:
        setting = Setting(target, version, device, int(threads))
        times = tuple(float(s) for s in json.loads(seconds))
        return Record(task, setting, candidate, trace, arguments, times, error or None, float(taken))
    except (ValueError, TypeError, RecursionError):
        return None


def _for_tvm(record: Record) -> list[Any]:
    """The record in the form of TVM's JSON database: trace, seconds, target, arguments."""
    return [
        json.loads(record.trace),
        list(record.seconds) or None,
        json.loads(record.setting.target),
        json.loads(record.arguments),
    ]


def _lines(file: Path) -> Iterator[tuple[str, str, Any]]:
    """(place, text, value) for each line of a file of JSON lines. Raises StoreError."""
    try:
        texts = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read {file}: {one_line(error)}") from error
    for number, text in enumerate(texts, start=1):
        try:
            yield f"{file}:{number}", text, json.loads(text)
        except json.JSONDecodeError as error:
            raise StoreError(f"{file}:{number}: not JSON ({error})") from error


def _workload(line: Any, place: str) -> Any:
    try:
        return tvm().s_tir.meta_schedule.database.Workload.from_json(line)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise StoreError(f"{place}: no workload ({one_line(error, 150)})") from error


def _target(setting: Setting | None) -> Any:
    if setting is None:
        raise ValueError("it has no target, and no setting was given")
    return tvm().target.Target(json.loads(setting.target))


def _candidate(line: Sequence[Any], workload: Any) -> str:
    """The key of the kernel that a record's trace makes from its workload."""
    record = tvm().s_tir.meta_schedule.database.TuningRecord.from_json(line, workload)
    return module_key(record.as_measure_candidate().sch.mod)
