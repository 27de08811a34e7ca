"""Workers (processes) that build or run candidates for a `Pool`, on this machine."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from xrlflow.tuning.worker import Answer, Failed, Job, JobHandler, load
from xrlflow.workers import Forks, Terms, WorkerError, WorkerLate, WorkerLost, WorkerPool

START_SECONDS = 120.0
"""Seconds that a worker may take to load TVM."""
_ATTEMPTS = 2
"""The number of attempts to build or run a candidate. If the worker ends during the first attempt, an earlier candidate
may have damaged it, so the candidate is tried again in a fresh process."""


class PoolError(RuntimeError):
    """No kernel can be measured: workers do not start, the disk is full, or the pool is closed.

    The message is one line.
    """


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a crew (a group of workers). `activity`: "building" or "running", with `threads` threads, for at most
    `seconds` seconds for each candidate.

    A worker is replaced after `uses` candidates. `device`: the name of the other machine on which candidates run.
    """

    activity: str
    threads: int
    uses: int
    seconds: float
    device: str | None = None


def fork_server() -> Forks:
    """The process from which workers are forked, with TVM loaded. Raises PoolError."""
    variables = {
        # Without this setting (of glibc), a library may leave a small allocation where a large tensor was. The next
        # tensor does not fit there any more, which costs megabytes per candidate. With this setting, large tensors get
        # pages of their own.
        "MALLOC_MMAP_THRESHOLD_": str(128 * 1024),
        # Libraries must not start threads: a process with threads cannot be forked safely.
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }
    try:
        return Forks(load, variables)
    except WorkerError as error:
        raise PoolError(str(error)) from error


class JobCrew:
    """Workers for one kind of job. `seconds`: for how long at least one of them had work.

    If several devices have the same key, a device that disappears takes its worker with it. PoolError is raised when
    the last worker does not reply in time.
    """

    def __init__(self, crew: WorkerPool, work: Work) -> None:
        self.crew, self._work = crew, work
        self.seconds = 0.0
        self._closed = False

    def work(self, jobs: Iterator[Job], until: float = math.inf) -> Generator[tuple[int, Answer], None, None]:
        """The replies to jobs, as (number of the job, reply), in order of arrival. No job begins after `until`.

        If the generator is closed early, busy workers are replaced. Raises PoolError.
        """
        if self._closed:
            raise PoolError("the pool is closed")
        with contextlib.closing(self.crew.work(self._tasks(jobs), until, self._failure)) as replies:
            while True:
                start = time.monotonic()
                try:
                    result = next(replies, None)
                except WorkerError as error:
                    raise PoolError(self._reason(error)) from error
                finally:
                    self.seconds += time.monotonic() - start
                if result is None:
                    return
                reply = self._reply(*result)
                if isinstance(reply, Failed) and reply.fatal:
                    raise PoolError(reply.error)
                yield result[0], reply

    def _tasks(self, jobs: Iterator[Job]) -> Iterator[Any]:
        return jobs

    def _reply(self, number: int, received: Any) -> Answer:
        reply: Answer = received
        return reply

    def _reason(self, error: WorkerError) -> str:
        if isinstance(error, WorkerLate) and self._work.device is not None:
            return f"remote device {self._work.device} has not answered for {self._work.seconds:g} s"
        return str(error)

    def _failure(self, task: Any, error: WorkerError) -> Any:
        if isinstance(error, WorkerLate):
            return Failed(f"{self._work.activity} it took longer than {self._work.seconds:g} s")
        how = error.how if isinstance(error, WorkerLost) else str(error)
        return Failed(f"{self._work.activity} it, the process ended {how}")

    def settle(self) -> None:
        """Wait until every worker is ready. Raises PoolError."""
        try:
            self.crew.settle()
        except WorkerError as error:
            raise PoolError(str(error)) from error

    def close(self) -> None:
        """End the workers."""
        self._closed = True
        self.crew.close()


def local_crew(server: Forks, count: int, work: Work) -> JobCrew:
    """A crew of `count` workers that are forked from a fork server of this machine."""
    terms = Terms(work.seconds, START_SECONDS, work.uses, _ATTEMPTS, scarce=work.device is not None)
    return JobCrew(
        WorkerPool(server, functools.partial(JobHandler, work.threads), count, "worker", terms=terms), work
    )
