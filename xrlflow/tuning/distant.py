"""Candidates are built and run on the nodes of a cluster.

A worker on a node has what a pool has here: a fork server, and a process that may crash. Libraries travel as bytes. To
the pool a crew there is like one here.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from xrlflow.cost.machine import cpu_name
from xrlflow.storage.exclusive import measuring
from xrlflow.tuning.crew import ForkServer, LocalCrew, PoolError, Work
from xrlflow.tuning.worker import Answer, Build, Built, Failed, Job, moved, paths_of
from xrlflow.workers import Crew, Kind, Place, WorkerError


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
        self._server = ForkServer()
        self._crew = LocalCrew(self._server, 1, work)
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


class DistantCrew:
    """Workers of a place for one kind of job."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.seconds = 0.0

    def work(self, jobs: Iterator[Job], until: float = math.inf) -> Generator[tuple[int, Answer], None, None]:
        paths: list[str] = []
        with contextlib.closing(self._crew.work(_sent(jobs, paths), until)) as answers:
            while True:
                start = time.monotonic()
                try:
                    found = next(answers, None)
                except WorkerError as error:
                    raise PoolError(str(error)) from error
                finally:
                    self.seconds += time.monotonic() - start
                if found is None:
                    return
                number, received = found
                if isinstance(received.answer, Failed) and received.answer.fatal:
                    raise PoolError(received.answer.error)
                if received.library is not None:
                    Path(paths[number]).write_bytes(received.library)
                yield number, received.answer

    def settle(self) -> None:
        """Workers of other machines disturb nothing here."""

    def close(self) -> None:
        self._crew.close()


def _sent(jobs: Iterator[Job], paths: list[str]) -> Iterator[_Sent]:
    """What is sent for jobs, whose paths are noted."""
    for job in jobs:
        needed = paths_of(job)
        paths.append(needed[0])
        read = () if isinstance(job, Build) else needed
        yield _Sent(job, {path: Path(path).read_bytes() for path in read})


def distant_crew(place: Place, work: Work, count: int, kind: Kind = Kind.COMPUTE) -> DistantCrew:
    """At most `count` workers of a place. Those that measure must have this machine's processor."""
    processor = cpu_name() if kind is Kind.MEASURE else None
    make = functools.partial(Bench, work, platform.machine(), processor)
    name = "runner" if kind is Kind.MEASURE else "builder"
    return DistantCrew(Crew(place, make, max(1, count), name, kind))
