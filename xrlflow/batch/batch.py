"""Many models in one batch, with one table and one page. The results of finished jobs stay, so that the same call
continues with the unfinished jobs.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from xrlflow.backends.onnxruntime import default_threads
from xrlflow.batch.jobs import Executor, Job, Row, earlier, failed
from xrlflow.batch.plan import plan
from xrlflow.batch.processes import Processes
from xrlflow.batch.sources import MARK, find_models
from xrlflow.onnxio import ModelError
from xrlflow.options import OptionError, Options
from xrlflow.report.page.document import VERSION
from xrlflow.report.page.environment import environment
from xrlflow.report.page.html import page_html
from xrlflow.storage import files
from xrlflow.storage.exclusive import LockedError, locked

INDEX = "report.html"
"""The page of a batch, in its output folder."""
_BETWEEN = 2.0
"""The minimum number of seconds between two writes of a running batch's page."""
_ABANDONED = 3600.0
"""Age in seconds from which an unfinished file counts as abandoned."""
Models = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a batch as a whole, and of one of its jobs."""

    done: int
    failed: int
    total: int
    left: float | None = None  # the estimated seconds to the end, from the jobs that are done; None: unknown
    row: Row | None = None  # the row of a job that has just finished
    name: str = ""  # if no job has just finished: the name of a running job
    doing: str = ""  # what the running job does now


Listener = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Batch:
    """The result of a batch: the rows of the finished jobs."""

    output: Path
    names: tuple[str, ...]  # the names of all models
    rows: tuple[Row, ...]
    seconds: float = 0.0
    interrupted: bool = False  # whether Ctrl-C ended the batch
    asked: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.done)

    @property
    def mean(self) -> float | None:
        """The geometric mean of the measured speed-ups; None if there is none."""
        speedups = [row.speedup for row in self.rows if row.speedup is not None]
        return math.exp(sum(map(math.log, speedups)) / len(speedups)) if speedups else None

    def to_json(self) -> dict[str, Any]:
        """The whole batch as JSON values, with the reports of all models."""
        return {**self._figures(), "rows": [{**row.to_json(), "speedup": row.speedup} for row in self.rows]}

    def _figures(self) -> dict[str, Any]:
        return {
            "output": os.fspath(self.output),
            "models": len(self.names),
            "done": len(self.rows) - len(self.failed),
            "failed": len(self.failed),
            "earlier": sum(row.earlier for row in self.rows),
            "measured": sum(row.speedup is not None for row in self.rows),
            "mean_speedup": self.mean,
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 1),
            "waiting": sorted(set(self.names) - {row.name for row in self.rows}),
        }

    def page(self) -> dict[str, Any]:
        """The data of the batch's page: all rows, without the data of the models' own pages."""
        threads = next((int(row.report["threads"]) for row in self.rows if row.report), default_threads())
        rows = [_shown(row) for row in self.rows]
        return {
            "version": VERSION, "kind": "batch", "title": self.output.resolve().name, "runs": [],
            "batch": {**self._figures(), "rows": rows}, "environment": environment(threads, self.asked),
        }  # fmt: skip

    def report_html(self) -> str:
        """The page as one HTML file. It links to the models' own pages in the same folder."""
        return page_html(self.page())


_SHOWN = (
    "nodes_before", "nodes_after", "latency_before_ms", "latency_after_ms", "speedup", "speedup_low", "speedup_high",
    "decided", "decided_low", "decided_high", "verified", "returned_original", "reason",
)  # fmt: skip


def _shown(row: Row) -> dict[str, Any]:
    """The parts of a row that the page shows. `link`: the URL of the model's own page, quoted, since a path may have
    any character.
    """
    report = row.report or {}
    link = f"./{quote(os.fsencode(row.files[-1][0]))}" if row.files else None
    return {
        "name": row.name, "error": row.error, "link": link, "seconds": row.seconds, "earlier": row.earlier,
        "machine": row.machine, "notes": list(row.notes), **{key: report.get(key) for key in _SHOWN},
    }  # fmt: skip


def optimize_all(
    models: Models,
    output: str | os.PathLike[str],
    options: Options,
    *,
    executor: Executor | None = None,
    listener: Listener | None = None,
) -> Batch:
    """Optimise all models of a folder, pattern or list (see `sources.find_models`) into the folder `output`.

    Models that an earlier call has optimised into this folder, with the same content and options, are skipped. Ctrl-C
    ends the batch; the results of finished jobs stay. Raises OptionError and ModelError; an error of one model is
    recorded in the row of this model in the result.
    """
    begin, folder = time.monotonic(), Path(output)
    sources = find_models(models, folder)
    with _output(folder):
        tell = listener if listener is not None else lambda progress: None
        names = tuple(each.name for each in sources)
        jobs = plan(sources, folder, options)
        asked = {
            "search": options.search, "cost model": options.cost_name, "backend": options.backend,
            "time limit": f"{options.time_limit:g} s for each model", "seed": str(options.seed),
        }  # fmt: skip
        running = _Running(Batch(folder, names, (), asked=asked), begin, tell)
        return running.run(jobs, executor if executor is not None else Processes())


@dataclass(slots=True)
class _Running:
    """A running batch. It writes its page from time to time, so that even a batch that is killed leaves a page."""

    batch: Batch
    begin: float
    tell: Listener
    todo: int = 0
    first: float = 0.0
    written: float = -math.inf
    rows: dict[str, Row] = field(default_factory=dict)

    def run(self, jobs: Sequence[Job], executor: Executor) -> Batch:
        todo = []
        for job in jobs:
            if (row := earlier(job)) is None:
                todo.append(job)
            else:
                self.rows[job.name] = row
        self.todo, self.first = len(todo), time.monotonic()
        interrupted = False
        try:
            self._say()
            with closing(executor(todo, self._doing)) as rows:
                for row in rows:
                    self.rows[row.name] = row
                    self._say(row)
            for job in todo:
                if job.name not in self.rows:
                    self.rows[job.name] = row = failed(job, "the executor has no result for it")
                    self._say(row)
        except KeyboardInterrupt:
            interrupted = True
        return self._write(interrupted)

    def _doing(self, name: str, doing: str) -> None:
        self.tell(self._progress(name=name, doing=doing))

    def _say(self, row: Row | None = None) -> None:
        if time.monotonic() - self.written > _BETWEEN:
            self._write()
            self.written = time.monotonic()
        self.tell(self._progress(row))

    def _progress(self, row: Row | None = None, name: str = "", doing: str = "") -> Progress:
        total = len(self.batch.names)
        to_go = total - len(self.rows)
        here = self.todo - to_go
        seconds_left = (time.monotonic() - self.first) / here * to_go if here else None
        failures = sum(not row_done.done for row_done in self.rows.values())
        return Progress(len(self.rows) - failures, failures, total, seconds_left, row, name, doing)

    def _write(self, interrupted: bool = False) -> Batch:
        rows = tuple(self.rows[name] for name in self.batch.names if name in self.rows)
        batch = replace(self.batch, rows=rows, seconds=time.monotonic() - self.begin, interrupted=interrupted)
        page = batch.output / INDEX
        try:
            files.write(page, batch.report_html().encode())
        except OSError as error:
            raise ModelError(
                f"{page}: cannot be written ({error.strerror}): what is done so far is kept"
            ) from error
        return batch


@contextmanager
def _output(folder: Path) -> Iterator[None]:
    """Create the output folder if there is none, and lock it, so that no other batch writes to it at the same time.

    Raises OptionError if the folder has files but is not the output of a batch.
    """
    with ExitStack() as lock:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / MARK).exists() and any(folder.iterdir()):
                raise OptionError(
                    f"{folder}: has files that no batch wrote: give a new folder, or an empty one"
                )
            lock.enter_context(locked(folder / MARK))
            _sweep(folder)
        except LockedError as error:
            raise OptionError(
                f"{folder}: another batch writes to it ({error}): wait, or give another folder"
            ) from error
        except OSError as error:
            raise OptionError(
                f"{folder}: cannot be written ({error.strerror}): choose another output"
            ) from error
        yield


def _sweep(folder: Path) -> None:
    """Remove the unfinished files of killed jobs. Recent files may belong to jobs that still run, and stay."""
    for path in folder.rglob(f"{files.UNFINISHED}*"):
        with contextlib.suppress(OSError):  # a file that cannot be removed does no harm
            if time.time() - path.lstat().st_mtime < _ABANDONED:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
