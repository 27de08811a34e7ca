"""Builds and runs candidates on the nodes of a cluster.

A worker on a node has a fork server, and a process that may crash, just as a pool has them on this machine. Libraries
are sent as bytes. A pool uses workers of a cluster like workers of this machine.
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
from xrlflow.tuning.worker import Answer, Build, Built, Job, paths_of, relocated
from xrlflow.workers import Kind, WorkerError, WorkerFactory, WorkerPool


@dataclass(frozen=True, slots=True)
class _Sent:
    """A job, and the contents of the libraries that it runs, by their paths on the sender's machine."""

    job: Job
    libraries: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class _Received:
    """A reply, and the library that was built."""

    answer: Answer
    library: bytes | None


class Bench:
    """The handler of a worker that builds or runs candidates on its node. The node must have this `machine` and this
    `processor` (None: any, if nothing is timed). Raises PoolError if it does not."""

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

    def do(self, task: _Sent) -> _Received:
        sent_paths = paths_of(task.job)
        paths = [os.path.join(self._server.folder, os.path.basename(path)) for path in sent_paths]
        try:
            for path, sent in zip(paths, sent_paths):
                if sent in task.libraries:
                    Path(path).write_bytes(task.libraries[sent])
            exclusively = measuring(lambda holder: None) if self._measures else contextlib.nullcontext()
            job = relocated(task.job, paths)
            with exclusively, contextlib.closing(self._crew.work(iter([job]))) as replies:
                _, reply = next(replies)
            return _Received(reply, Path(paths[0]).read_bytes() if isinstance(reply, Built) else None)
        finally:
            for path in paths:
                Path(path).unlink(missing_ok=True)


class DistantCrew(JobCrew):
    """Workers of a cluster for one kind of job. Libraries are sent with jobs and replies."""

    def __init__(self, crew: WorkerPool, work: Work) -> None:
        super().__init__(crew, work)
        self._paths: list[str] = []

    def _tasks(self, jobs: Iterator[Job]) -> Iterator[_Sent]:
        self._paths = []
        for job in jobs:
            needed = paths_of(job)
            self._paths.append(needed[0])
            read = () if isinstance(job, Build) else needed
            yield _Sent(job, {path: Path(path).read_bytes() for path in read})

    def _reply(self, number: int, received: _Received) -> Answer:
        if received.library is not None:
            Path(self._paths[number]).write_bytes(received.library)
        return received.answer

    def _failure(self, task: Any, error: WorkerError) -> Any:
        """Raise the error of a job that ended one worker of the cluster after the other. The candidate is not the
        cause: each of these workers has already tried it again itself (see `crew`)."""
        raise error

    def settle(self) -> None:
        """Do nothing: workers of other machines do not disturb measurements here."""


def distant_crew(factory: WorkerFactory, work: Work, count: int, kind: Kind = Kind.COMPUTE) -> DistantCrew:
    """At most `count` workers of a cluster. Workers that measure must have this machine's processor."""
    processor = cpu_name() if kind is Kind.MEASURE else None
    make = functools.partial(Bench, work, platform.machine(), processor)
    name = "runner" if kind is Kind.MEASURE else "builder"
    return DistantCrew(WorkerPool(factory, make, max(1, count), name, kind), work)
