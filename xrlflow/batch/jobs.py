"""What a batch is made of: a job for each model, and the row that becomes of it. Both can be pickled."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from xrlflow.options import Options

RECORD = ".json"
PAGE = ".html"
WAITING = "waiting"
"""How what a job does begins if it only waits for others."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One model of a batch. `name`: its path in the table, with slashes.

    `source`: the absolute path of its file; `root`: that of the batch's output folder; `target`: where the result goes
    in there. `key` says what the result depends on: the content of the model and its external data, the options, and
    the versions of xrlflow, ONNX Runtime and TVM. `remarks` are kept with the row.
    """

    name: str
    source: str
    root: str
    target: str
    key: str
    options: Options
    remarks: tuple[str, ...] = ()

    @property
    def output(self) -> Path:
        """The file of the result."""
        return Path(self.root, self.target)

    @property
    def page(self) -> Path:
        """The model's own report page."""
        return Path(self.root, self.target + PAGE)

    @property
    def record(self) -> Path:
        """The file with the row. It is written last: if it is there, with the job's key, the job is done."""
        return Path(self.root, self.target + RECORD)


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a job. `error`: one line; None: it is done.

    `report` is that of `Report.to_json`. `files`: the files that were written, as paths in the output folder of the
    batch with their bytes: the result is the first, its page the last. `detail` has more about an error that nobody
    expected. `earlier`: it was done by an earlier run.
    """

    name: str
    key: str
    error: str | None
    report: Mapping[str, Any] | None = None
    files: Sequence[tuple[str, int]] = ()
    machine: str = ""
    seconds: float = 0.0
    notes: Sequence[str] = ()
    detail: str = ""
    earlier: bool = False

    @property
    def done(self) -> bool:
        return self.error is None

    @property
    def speedup(self) -> float | None:
        """How many times faster the result was measured to be; None: not measured, or the original."""
        found = self.report["speedup"] if self.report is not None else None
        return None if found is None else float(found)

    def to_json(self) -> dict[str, Any]:
        """The row as plain data, with the whole report."""
        return {
            "name": self.name, "error": self.error, "report": self.report, "machine": self.machine,
            "files": [list(file) for file in self.files], "seconds": self.seconds, "notes": list(self.notes),
            "detail": self.detail, "earlier": self.earlier,
        }  # fmt: skip

    def recorded(self) -> bytes:
        """The content of a record."""
        data = {"version": _VERSION, "key": self.key, "row": self.to_json()}
        return json.dumps(data, indent=1, allow_nan=False).encode()


def failed(job: Job, error: str, *, seconds: float = 0.0, detail: str = "") -> Row:
    """The row of a job that came to nothing."""
    return Row(job.name, job.key, error, seconds=round(seconds, 1), notes=job.remarks, detail=detail)


def earlier(job: Job) -> Row | None:
    """The row of a job that an earlier run has done, if nothing that it depends on has changed since.

    A record that cannot be read, or whose files have gone or are of another size, counts as none.
    """
    try:
        data = json.loads(job.record.read_bytes(), parse_constant=_no_number)
        if data["version"] != _VERSION or data["key"] != job.key:
            return None
        row = data["row"]
        files = tuple((str(name), int(size)) for name, size in row["files"])
        if not files or any(os.stat(Path(job.root, name)).st_size != size for name, size in files):
            return None
        _check_figures(row["report"])
        found = Row(
            job.name, job.key, row["error"], row["report"], files, str(row["machine"]), float(row["seconds"]),
            tuple(row["notes"]), str(row["detail"]), earlier=True,
        )  # fmt: skip
        return found if found.done else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _check_figures(report: Mapping[str, Any]) -> None:
    """Raises ValueError, TypeError or KeyError if a report lacks what the figures of a batch are computed from."""
    speedup = report["speedup"]
    if int(report["threads"]) < 1 or not (speedup is None or float(speedup) > 0):
        raise ValueError("no figures")


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


# told(name of a job, what it does).
Told = Callable[[str, str], None]


class Executor(Protocol):
    """Runs the jobs of a batch, here or elsewhere: `run(job)` in any process that reaches the job's paths."""

    def __call__(self, jobs: Sequence[Job], told: Told) -> Generator[Row, None, None]:
        """The row of every job, in any order, each as soon as it is there.

        A job whose process ends has a failed row. `told(name, text)` may be called with what a running job does. When
        the iterator is closed, what runs is ended.
        """
        ...
