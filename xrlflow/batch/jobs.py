"""The parts of a batch: a job for each model, and a row with its result. Both can be pickled."""

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
"""The beginning of the text about what a job does, while the job waits for other jobs."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Job:
    """The optimisation of one model of a batch."""

    name: str  # the model's path in the table, with slashes
    source: str  # the absolute path of the model's file
    root: str  # the absolute path of the batch's output folder
    target: str  # the path of the result in that folder
    key: str
    """A digest of everything on which the result depends: the content of the model and its external data, the options,
    and the versions of xrlflow, ONNX Runtime and TVM.
    """
    options: Options
    remarks: tuple[str, ...] = ()  # stored in the row

    @property
    def output(self) -> Path:
        """The path of the result."""
        return Path(self.root, self.target)

    @property
    def page(self) -> Path:
        """The path of the model's own report page."""
        return Path(self.root, self.target + PAGE)

    @property
    def record(self) -> Path:
        """The path of the file with the row. This file is written last: if it has the job's key, the job is done."""
        return Path(self.root, self.target + RECORD)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a job, for a row of the batch's table."""

    name: str
    key: str
    error: str | None  # one line; None: the job is done
    report: Mapping[str, Any] | None = None  # in the format of `Report.to_json`
    files: Sequence[tuple[str, int]] = ()
    """The files that were written: paths in the batch's output folder, with bytes. The first is the result, the last
    is its page.
    """
    machine: str = ""
    seconds: float = 0.0
    notes: Sequence[str] = ()
    detail: str = ""  # the traceback of an unexpected error
    earlier: bool = False  # the job was done by an earlier run

    @property
    def done(self) -> bool:
        return self.error is None

    @property
    def speedup(self) -> float | None:
        """The measured speed-up of the result; None if it was not measured, or is the original."""
        value = self.report["speedup"] if self.report is not None else None
        return None if value is None else float(value)

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values, with the whole report."""
        return {
            "name": self.name, "error": self.error, "report": self.report, "machine": self.machine,
            "files": [list(file) for file in self.files], "seconds": self.seconds, "notes": list(self.notes),
            "detail": self.detail, "earlier": self.earlier,
        }  # fmt: skip

    def recorded(self) -> bytes:
        """The content of the record, the file with the row."""
        data = {"version": _VERSION, "key": self.key, "row": self.to_json()}
        return json.dumps(data, indent=1, allow_nan=False).encode()


def failed(job: Job, error: str, *, seconds: float = 0.0, detail: str = "") -> Row:
    """The row of a job that failed."""
    return Row(job.name, job.key, error, seconds=round(seconds, 1), notes=job.remarks, detail=detail)


def earlier(job: Job) -> Row | None:
    """The row of a job that an earlier run has done, if everything on which its result depends is the same; else None.

    A record does not count if it cannot be read, or if its files are missing or have another size.
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
        recorded = Row(
            job.name, job.key, row["error"], row["report"], files, str(row["machine"]), float(row["seconds"]),
            tuple(row["notes"]), str(row["detail"]), earlier=True,
        )  # fmt: skip
        return recorded if recorded.done else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _check_figures(report: Mapping[str, Any]) -> None:
    """Raise ValueError, TypeError or KeyError if a report lacks values from which the figures of a batch are
    computed."""
    speedup = report["speedup"]
    if int(report["threads"]) < 1 or not (speedup is None or float(speedup) > 0):
        raise ValueError("no figures")


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


# A function that receives the name of a job, and a text on what the job does now.
ProgressCallback = Callable[[str, str], None]


class Executor(Protocol):
    """Runs the jobs of a batch. It calls `run(job)` in any processes that reach the job's paths, here or elsewhere."""

    def __call__(self, jobs: Sequence[Job], report: ProgressCallback) -> Generator[Row, None, None]:
        """Yield the row of every job, in any order, each as soon as it is finished.

        A job whose process crashes has a failed row. `report(name, text)` may be called with what a running job does.
        When the caller closes the iterator, running jobs are ended.
        """
        ...
