"""Jobs on workers of any place: those of a cluster. A worker that is lost is replaced, and its job begins again."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

from xrlflow.batch.jobs import Job, Row, Told, earlier, failed
from xrlflow.batch.processes import Processes
from xrlflow.batch.running import measures
from xrlflow.workers import Kind, WorkerError, WorkerFactory, WorkerPool

_VISIBLE = 20.0
"""Seconds after which a shared folder shows on one machine what another one has written."""


class JobHandler:
    """A worker's hand that does jobs, each in a process of its own: a model that crashes it has a failed row."""

    def do(self, job: Job) -> Row:
        # A worker that was lost after it had done the job could not say so.
        if (row := earlier(job)) is not None:
            return row
        with closing(Processes()([job], _discard)) as rows:
            return next(rows)


def _discard(name: str, text: str) -> None:
    """What a job does now is not told to other machines."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """An `Executor`: as many jobs at a time as the place has nodes that take times, one on each; or, if none of the
    jobs measures, as it has cores. All nodes need to reach the jobs' paths. Raises WorkerError."""

    factory: WorkerFactory

    def __call__(self, jobs: Sequence[Job], told: Told) -> Generator[Row, None, None]:
        if not jobs:
            return
        measuring = any(measures(job.options) for job in jobs)
        kind = Kind.MEASURE if measuring else Kind.COMPUTE
        count = self.factory.measuring if measuring else self.factory.cores
        with WorkerPool(self.factory, JobHandler, min(count, len(jobs)), "optimizer", kind) as pool:
            for number, row in pool.work(iter(jobs), fallback=_given_up):
                yield row if not row.done else _visible_here(jobs[number], row)


def _given_up(job: Job, error: WorkerError) -> Row:
    """A model that ends its workers, by all the memory that it takes for instance, ends no batch."""
    return failed(job, f"{error}: if that is so each time, no node may have enough memory for this model")


def _visible_here(job: Job, row: Row) -> Row:
    """The row, if what it says was written is there for this machine, too: a node may have an OUTPUT of its own."""
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
