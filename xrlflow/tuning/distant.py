"""Candidates are built and run on the nodes of a cluster.

A worker on a node has what a pool has here: a fork server, and a process that may crash. Libraries travel as bytes. To
the pool a crew there is like one here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xrlflow.cost.machine import cpu_name
from xrlflow.storage.exclusive import measuring
from xrlflow.tuning.crew import JobCrew, PoolError, Work, fork_server, local_crew
from xrlflow.tuning.worker import Answer, Build, Built, Job, moved, paths_of
from xrlflow.workers import Kind, WorkerError, WorkerFactory, WorkerPool


@dataclass(frozen=True, slots=True)
class _Sent:
    """A job, and the libraries that it runs, by their paths there."""

    job: Job
    libraries: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class _Received:
    """An answer, and the library that was built."""

    answer: Answer
    library: bytes | None


class Bench:
    """A worker's hand that builds or runs candidates on its node. `machine` and `processor`: those that its node must
    have; None: any, because it takes no times. Raises PoolError if the node has others.
    """

    def __init__(self, work: Work, machine: str, processor: str | None) -> None:
        if platform.machine() != machine:
            raise PoolError(f"it is {platform.machine()}, and kernels are for {machine}")
        if processor is not None and cpu_name() != processor:
            raise PoolError(
                f"it would take times on {cpu_name()}, and they are wanted for {processor}: give `latency` to nodes "
                "with that processor only"
            )
        self._server = fork_server()
        self._crew = local_crew(self._server, 1, work)
        self._measures = processor is not None

    def do(self, order: _Sent) -> _Received:
        theirs = paths_of(order.job)
        paths = [os.path.join(self._server.folder, os.path.basename(path)) for path in theirs]
        try:
            for path, their in zip(paths, theirs):
                if their in order.libraries:
                    Path(path).write_bytes(order.libraries[their])
            turn = measuring(lambda holder: None) if self._measures else contextlib.nullcontext()
            job = moved(order.job, paths)
            with turn, contextlib.closing(self._crew.work(iter([job]))) as answers:
                _, answer = next(answers)
            return _Received(answer, Path(paths[0]).read_bytes() if isinstance(answer, Built) else None)
        finally:
            for path in paths:
                Path(path).unlink(missing_ok=True)


class DistantCrew(JobCrew):
    """Workers of a place for one kind of job. Libraries travel with jobs and answers."""

    def __init__(self, crew: WorkerPool, work: Work) -> None:
        super().__init__(crew, work)
        self._paths: list[str] = []

    def _orders(self, jobs: Iterator[Job]) -> Iterator[_Sent]:
        self._paths = []
        for job in jobs:
            needed = paths_of(job)
            self._paths.append(needed[0])
            read = () if isinstance(job, Build) else needed
            yield _Sent(job, {path: Path(path).read_bytes() for path in read})

    def _answer(self, number: int, received: _Received) -> Answer:
        if received.library is not None:
            Path(self._paths[number]).write_bytes(received.library)
        return received.answer

    def _given_up(self, order: Any, error: WorkerError) -> Any:
        """What ends worker after worker is no fault of a candidate: those of a node have given up on it before."""
        raise error

    def settle(self) -> None:
        """Workers of other machines disturb nothing here."""


def distant_crew(place: WorkerFactory, work: Work, count: int, kind: Kind = Kind.COMPUTE) -> DistantCrew:
    """At most `count` workers of a place. Those that measure must have this machine's processor."""
    processor = cpu_name() if kind is Kind.MEASURE else None
    make = functools.partial(Bench, work, platform.machine(), processor)
    name = "runner" if kind is Kind.MEASURE else "builder"
    return DistantCrew(WorkerPool(place, make, max(1, count), name, kind), work)
