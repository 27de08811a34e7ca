"""Runs jobs in processes of this machine. A model that crashes its process ends only its own job."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from xrlflow import workers
from xrlflow.batch.jobs import WAITING, Job, ProgressCallback, Row, failed
from xrlflow.options import OptionError
from xrlflow.storage.exclusive import VARIABLE, measuring_lock
from xrlflow.workers import Terms, WorkerError, WorkerLate, WorkerLost, WorkerPool

_USES = 16
"""How many jobs a process runs before it is replaced, since caches of graphs grow with each job."""
_PATIENCE = 12.0
"""Seconds that a process may take to remove its temporary files when it is ended. If it is killed, whole models stay
in its temporary folder until the folder itself is removed.
"""
_BETWEEN = 0.1
"""The minimum number of seconds between two messages about what a job does."""
_SILENCE = 3600.0
"""Seconds without a message (or ten times the time limit, if that is more) after which a job counts as hung."""


@dataclass(frozen=True, slots=True)
class Processes:
    """An `Executor` that runs `count` jobs at a time. Of the jobs that measure, only one runs at a time (see `run`)."""

    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise OptionError(f"workers {self.count} is not positive: give 1 or more")

    def __call__(self, jobs: Sequence[Job], report: ProgressCallback) -> Generator[Row, None, None]:
        silence = max((max(_SILENCE, 10 * job.options.time_limit) for job in jobs), default=_SILENCE)
        started: dict[str, float] = {}

        def on_message(number: int, text: str) -> float:
            started.setdefault(jobs[number].name, time.monotonic())
            report(jobs[number].name, text)
            return math.inf if text.startswith(WAITING) else silence

        def row_of_lost(job: Job, error: WorkerError) -> Row:
            seconds = time.monotonic() - started.get(job.name, time.monotonic())
            return failed(job, _reason(error, silence), seconds=seconds)

        factory = workers.Processes(variables={VARIABLE: str(measuring_lock())}, patience=_PATIENCE)
        unfinished = dict(enumerate(jobs))
        with WorkerPool(
            factory, ReportingJobHandler, self.count, "process", terms=Terms(silence, uses=_USES, attempts=1)
        ) as pool:
            try:
                for number, row in pool.work(iter(jobs), fallback=row_of_lost, on_message=on_message):
                    del unfinished[number]
                    yield row
            except WorkerError as error:
                for job in unfinished.values():
                    yield failed(job, str(error))


def _reason(error: WorkerError, silence: float) -> str:
    if isinstance(error, WorkerLate):
        return (
            f"it has not gone on for {silence:.0f} s, and was ended: if the model only needs so long, give a longer "
            "time limit"
        )
    return f"its process ended {error.how}" if isinstance(error, WorkerLost) else str(error)


class ReportingJobHandler:
    """A worker's handler that runs jobs, and reports what they do now, at a limited rate."""

    def __init__(self) -> None:
        self._last, self._said = 0.0, ""

    def do(self, job: Job) -> Row:
        from xrlflow.batch.running import run

        return run(job, self._tell)

    def _tell(self, text: str) -> None:
        now, phase = time.monotonic(), text.partition(" ")[0]
        if phase != self._said or now - self._last >= _BETWEEN:
            self._last, self._said = now, phase
            workers.tell(text)
