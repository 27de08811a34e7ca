"""Workers that build or run candidates for a pool, on this machine."""

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
"""An earlier candidate may have damaged the process that a candidate ends: it is tried again in a fresh one."""


class PoolError(RuntimeError):
    """Nothing can be measured: workers do not start, the disk is full, or the pool is closed.

    The message is one line.
    """


@dataclass(frozen=True, slots=True)
class Work:
    """What a crew does with a candidate: "building" or "running" it, with `threads` threads, for at most `seconds`.

    A worker is replaced after `uses` candidates. `device`: the name of the other machine that the workers wait for.
    """

    activity: str
    threads: int
    uses: int
    seconds: float
    device: str | None = None


def fork_server() -> Forks:
    """The process that workers are forked from, with TVM loaded. Raises PoolError."""
    variables = {
        # A library may leave something small where a large tensor was, so that the next tensor does not fit:
        # megabytes per candidate, unless large tensors get pages of their own (glibc).
        "MALLOC_MMAP_THRESHOLD_": str(128 * 1024),
        # Libraries must not start threads: a process with threads cannot be forked safely.
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }
    try:
        return Forks(load, variables)
    except WorkerError as error:
        raise PoolError(str(error)) from error


class JobCrew:
    """Workers for one kind of job. `seconds`: how long there was work for any of them.

    With several of a device's key, one that is gone takes its worker with it. If the last one does not answer in time,
    nothing more can be done.
    """

    def __init__(self, crew: WorkerPool, work: Work) -> None:
        self.crew, self._work = crew, work
        self.seconds = 0.0
        self._closed = False

    def work(self, jobs: Iterator[Job], until: float = math.inf) -> Generator[tuple[int, Answer], None, None]:
        """The answers to jobs, each with its number in `jobs`, as they arrive. No job begins after `until`.

        If the generator is closed early, busy workers are replaced. Raises PoolError.
        """
        if self._closed:
            raise PoolError("the pool is closed")
        with contextlib.closing(self.crew.work(self._orders(jobs), until, self._given_up)) as answers:
            while True:
                start = time.monotonic()
                try:
                    found = next(answers, None)
                except WorkerError as error:
                    raise PoolError(self._reason(error)) from error
                finally:
                    self.seconds += time.monotonic() - start
                if found is None:
                    return
                answer = self._answer(*found)
                if isinstance(answer, Failed) and answer.fatal:
                    raise PoolError(answer.error)
                yield found[0], answer

    def _orders(self, jobs: Iterator[Job]) -> Iterator[Any]:
        return jobs

    def _answer(self, number: int, received: Any) -> Answer:
        answer: Answer = received
        return answer

    def _reason(self, error: WorkerError) -> str:
        if isinstance(error, WorkerLate) and self._work.device is not None:
            return f"remote device {self._work.device} has not answered for {self._work.seconds:g} s"
        return str(error)

    def _given_up(self, order: Any, error: WorkerError) -> Any:
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
    """Workers that are forked from a server of this machine."""
    terms = Terms(work.seconds, START_SECONDS, work.uses, _ATTEMPTS, scarce=work.device is not None)
    return JobCrew(
        WorkerPool(server, functools.partial(JobHandler, work.threads), count, "worker", terms=terms), work
    )
