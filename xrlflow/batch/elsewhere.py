"""Runs jobs on the workers of any factory, such as those of a cluster. A worker that is lost is replaced, and its job
starts again.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

from xrlflow.batch.jobs import Job, ProgressCallback, Row, earlier, failed
from xrlflow.batch.processes import Processes
from xrlflow.batch.running import measures
from xrlflow.workers import Kind, WorkerError, WorkerFactory, WorkerPool

_VISIBLE = 20.0
"""Seconds after which a file that one machine wrote to a shared folder is visible on another."""


class JobHandler:
    """A worker's handler that runs each job in a separate process, so that a model that crashes gives a failed row."""

    def do(self, job: Job) -> Row:
        # An earlier worker may have done the job, and been lost before it could reply.
        if (row := earlier(job)) is not None:
            return row
        with closing(Processes()([job], _discard)) as rows:
            return next(rows)


def _discard(name: str, text: str) -> None:
    """Discard the progress of a job: it is not sent to other machines."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """An `Executor` with the workers of a factory: one on each node that measures times or, if no job measures, one for
    each core. All nodes must reach the jobs' paths. Raises WorkerError."""

    factory: WorkerFactory

    def __call__(self, jobs: Sequence[Job], report: ProgressCallback) -> Generator[Row, None, None]:
        if not jobs:
            return
        measuring = any(measures(job.options) for job in jobs)
        kind = Kind.MEASURE if measuring else Kind.COMPUTE
        count = self.factory.measuring if measuring else self.factory.cores
        with WorkerPool(self.factory, JobHandler, min(count, len(jobs)), "optimizer", kind) as pool:
            for number, row in pool.work(iter(jobs), fallback=_given_up):
                yield row if not row.done else _visible_here(jobs[number], row)


def _given_up(job: Job, error: WorkerError) -> Row:
    """The failed row of a job whose workers were lost again and again, for instance because the job uses up all
    memory.
    """
    return failed(job, f"{error}: if that is so each time, no node may have enough memory for this model")


def _visible_here(job: Job, row: Row) -> Row:
    """The row, if this machine sees the files that it lists. Otherwise a failed row: the node may have its own folder
    of this name.
    """
    until = time.monotonic() + _VISIBLE
    while earlier(job) is None:
        if time.monotonic() > until:
            return failed(
                job,
                f"a node has done it, and this machine does not see its files: {job.root} has to be a folder that all "
                "nodes share",
                seconds=row.seconds,
            )
        time.sleep(0.1)
    return row
