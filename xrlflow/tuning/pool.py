"""Builds and runs candidates in processes that may crash without ending the tuning.

Builders compile; there is one builder for each core. One runner measures while nothing is built; with a remote device,
there is one runner for each device with its key. Builders and runners are workers, each of which is used for many
candidates. When a candidate crashes its worker or exceeds its time limit, the fork server (see `worker.py`) forks a new
worker while the other workers go on. On a cluster, each builder and runner has a fork server on its node (see
`distant.py`).

Nothing outlives a pool. The fork server kills all workers and removes their files when its socket closes: when the pool
is closed, and when the process that owns the pool is killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from xrlflow.backends.limits import default_threads
from xrlflow.backends.protocol import Array, BackendError
from xrlflow.backends.tvm.devices.remote import PATIENCE, Remote, count_devices
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.tuning.crew import JobCrew, PoolError, Work, fork_server, local_crew
from xrlflow.tuning.distant import distant_crew
from xrlflow.tuning.tuners.protocol import Measurement
from xrlflow.tuning.worker import (
    Answer,
    Argument,
    Build,
    Built,
    Evaluate,
    Evaluated,
    Failed,
    Ran,
    RanInTurns,
    Run,
    RunThere,
    Timing,
    Turns,
)
from xrlflow.workers import Kind, WorkerFactory

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target
    from typing_extensions import Self

    from xrlflow.tuning.knobs import Candidate
    from xrlflow.tuning.tasks import Task

# For each builder, this many candidates of a batch are built and run before the others are built: so a good candidate
# is measured sooner, but the runner waits for the builders once more.
_FIRST = 2


# Bytes on disk that a kernel and its object file may take.
_SPACE = 1 << 20


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that was built: its library, and the data types and shapes of its parameters."""

    path: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The options of a pool."""

    builders: int = field(default_factory=default_threads)
    """The number of candidates that are compiled at a time."""
    threads: int = field(default_factory=default_threads)
    """The number of threads that kernels run with."""
    timing: Timing = field(default_factory=Timing)
    build_seconds: float = 20.0
    """The seconds that a candidate may take to compile."""
    run_seconds: float = 10.0
    """The seconds that a candidate may take to be measured."""
    uses: int = 500
    """The number of candidates after which a worker is replaced, because TVM leaks memory."""
    remote: Remote | None = None
    """Candidates run on the devices with this key, one candidate at a time on each; None: no remote device is used."""
    factory: WorkerFactory | None = None
    """Creates workers that build candidates, and run them if there is no remote device; None: this machine does the
    work."""

    def __post_init__(self) -> None:
        if min(self.builders, self.threads, self.uses) < 1:
            raise ValueError(f"a pool needs builders, threads and uses: {self}")
        if min(self.build_seconds, self.run_seconds) <= 0:
            raise ValueError(f"time limits must be positive: {self}")

    @property
    def device(self) -> str | None:
        """The name of the device that runs kernels; None: this machine."""
        return str(self.remote) if self.remote is not None else None


class Pool:
    """Builders and a runner, for any number of tuning tasks. Use it in a `with` statement, or close it.

    Raises PoolError on first use if its workers cannot start, for instance because TVM is missing.
    """

    def __init__(self, options: PoolOptions | None = None) -> None:
        self.options = options if options is not None else PoolOptions()
        self._server = fork_server()
        self._end = weakref.finalize(self, self._server.close)
        self._builders = self._crew_of_builders()
        self._runners = self._crew_of_runners()
        self._built = 0

    def _crew_of_builders(self) -> JobCrew:
        options = self.options
        work = Work("building", 1, options.uses, options.build_seconds)
        if options.factory is None:
            return local_crew(self._server, options.builders, work)
        return distant_crew(options.factory, work, options.builders)

    def _crew_of_runners(self) -> JobCrew:
        options, remote = self.options, self.options.remote
        work = Work("running", options.threads, options.uses, options.run_seconds)
        if remote is not None:  # the device ends slow runs itself, unless it has disappeared
            work = replace(work, seconds=options.run_seconds + 2 * PATIENCE, device=options.device)
            return local_crew(self._server, count_devices(remote), work)
        if options.factory is None:
            return local_crew(self._server, 1, work)
        return distant_crew(options.factory, work, options.factory.measuring, Kind.MEASURE)

    @property
    def threads(self) -> int:
        """The number of threads that kernels run with."""
        return self.options.threads

    @property
    def device(self) -> str | None:
        """The name of the device that runs kernels; None: this machine."""
        return self.options.device

    @property
    def _elsewhere(self) -> bool:
        """Whether kernels are built or run on another machine, so that the file of a kernel must name the libraries on
        which it depends."""
        return self.options.remote is not None or self.options.factory is not None

    @property
    def flushed(self) -> bool:
        """Whether kernels are timed with cold caches (see `worker.Timing`)."""
        return self.options.timing.flush

    @property
    def building(self) -> float:
        """The seconds during which candidates were built so far."""
        return self._builders.seconds

    @property
    def running(self) -> float:
        """The seconds during which candidates were run so far."""
        return self._runners.seconds

    def outcomes(
        self, task: Task, candidates: Sequence[Candidate], *, until: float = math.inf
    ) -> Generator[tuple[int, Measurement], None, None]:
        """The outcomes of candidates, as (position, measurement), as they arrive.

        The first few candidates (the most promising ones, if the tuner orders them) are built and run before all other
        candidates are built. In both parts, candidates that fail to build come first. Candidates that would start after
        `until` (`time.monotonic`) are left out. The generator may be closed at any time.
        """
        few = _FIRST * self.options.builders
        for start, part in ((0, candidates[:few]), (few, candidates[few:])):
            if start and not part:
                return
            with contextlib.closing(self._outcomes(task, part, until)) as outcomes:
                for position, outcome in outcomes:
                    yield start + position, outcome

    def _outcomes(
        self, task: Task, candidates: Sequence[Candidate], until: float
    ) -> Generator[tuple[int, Measurement], None, None]:
        """The outcomes of one part of the candidates. First all of them are built, and then they are run, so that
        nothing else runs while a kernel is timed."""
        paths = self._paths(len(candidates))
        try:
            libraries: dict[int, tuple[Argument, ...]] = {}
            builds = self._builds(task, candidates, paths, self._elsewhere)
            with contextlib.closing(self._builders.work(builds, until)) as replies:
                for number, reply in replies:
                    match reply:
                        case Built(arguments):
                            libraries[number] = arguments
                        case _:
                            self._check_space()
                            yield number, _failure(reply)
            order = sorted(libraries)
            runs = (self._run(paths[number], libraries[number], self.options.timing) for number in order)
            for position, reply in self._runners.work(runs, until):
                match reply:
                    case Ran(seconds):
                        yield order[position], Measurement(seconds)
                    case _:
                        yield order[position], _failure(reply)
        finally:
            for path in paths:
                Path(path).unlink(missing_ok=True)

    def measure(self, task: Task, candidates: Sequence[Candidate]) -> tuple[Measurement, ...]:
        """The outcomes of all candidates, in their order."""
        outcomes = dict(self.outcomes(task, candidates))
        return tuple(outcomes[number] for number in range(len(candidates)))

    def evaluate(self, task: Task, candidate: Candidate, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """The outputs of a kernel: its parameters after `inputs`, which are zero before the call.

        Raises BackendError if the kernel does not build or run, if it does not accept the inputs, or if the pool has a
        remote device.
        """
        with self.built(task.target, [candidate.mod]) as (kernel,):
            if kernel is None:
                raise PoolError("the pool is closed")
            if isinstance(kernel, Measurement):
                raise BackendError(str(kernel.error))
            return self.called(kernel, inputs)

    @contextlib.contextmanager
    def built(
        self, target: Target, modules: Sequence[IRModule], until: float = math.inf
    ) -> Iterator[list[Kernel | Measurement | None]]:
        """Build modules of one function each, as kernels that can be called and timed inside the context. A module that
        does not build gives a measurement with the error. A module whose building would have begun after `until`
        (`time.monotonic`) gives None."""
        paths = self._paths(len(modules))
        kernels: list[Kernel | Measurement | None] = [None] * len(modules)
        try:
            builds = self._builds_of(target, modules, paths, self._elsewhere)
            with contextlib.closing(self._builders.work(builds, until)) as replies:
                for number, reply in replies:
                    if isinstance(reply, Built):
                        kernels[number] = Kernel(paths[number], reply.arguments)
                    else:
                        self._check_space()
                        kernels[number] = _failure(reply)
            yield kernels
        finally:
            for path in paths:
                Path(path).unlink(missing_ok=True)

    def called(self, kernel: Kernel, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """The outputs of a kernel. See `evaluate`."""
        if self.options.remote is not None:
            raise BackendError(f"kernels for {self.options.remote} are not evaluated here")
        call = Evaluate(kernel.path, kernel.arguments, tuple(inputs))
        for _, result in self._runners.work(iter([call])):
            if isinstance(result, Evaluated):
                return result.outputs
            raise BackendError(str(_failure(result).error))
        raise PoolError("the pool is closed")

    def timed(self, kernel: Kernel, timing: Timing) -> Measurement:
        """The times of a kernel."""
        for _, reply in self._runners.work(iter([self._run(kernel.path, kernel.arguments, timing)])):
            return Measurement(reply.seconds) if isinstance(reply, Ran) else _failure(reply)
        raise PoolError("the pool is closed")

    def in_turns(self, kernels: Sequence[Kernel], timing: Timing) -> list[tuple[float, ...]] | Measurement:
        """For each round, the seconds of one call of each kernel; a measurement with the error if a kernel fails.
        Raises BackendError if the pool has a remote device."""
        if self.options.remote is not None:
            raise BackendError(f"kernels are not timed in turns on {self.options.remote}")
        job = Turns(tuple((kernel.path, kernel.arguments) for kernel in kernels), timing)
        for _, reply in self._runners.work(iter([job])):
            return list(reply.seconds) if isinstance(reply, RanInTurns) else _failure(reply)
        raise PoolError("the pool is closed")

    def settle(self) -> None:
        """Wait until TVM is loaded in all workers, before something else is timed."""
        self._builders.settle()
        self._runners.settle()

    def close(self) -> None:
        """End the workers and remove their files. A second call does nothing."""
        self._builders.close()
        self._runners.close()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _paths(self, count: int) -> list[str]:
        first, self._built = self._built, self._built + count
        return [os.path.join(self._server.folder, f"{number}.so") for number in range(first, first + count)]

    def _run(self, path: str, arguments: tuple[Argument, ...], timing: Timing) -> Run | RunThere:
        remote = self.options.remote
        if remote is None:
            return Run(path, arguments, timing)
        seconds, threads = self.options.run_seconds, self.options.threads
        return RunThere(path, arguments, timing, remote, seconds, threads, PATIENCE)

    def _check_space(self) -> None:
        """Raise PoolError if the disk is full: in this case, the candidate is not the cause of a failure to build."""
        folder = self._server.folder
        if shutil.disk_usage(folder).free < _SPACE:
            raise PoolError(f"{folder}: no space is left for kernels: make some, or set TMPDIR")

    @staticmethod
    def _builds(
        task: Task, candidates: Sequence[Candidate], paths: Sequence[str], elsewhere: bool = False
    ) -> Iterator[Build]:
        return Pool._builds_of(task.target, [c.mod for c in candidates], paths, elsewhere)

    @staticmethod
    def _builds_of(
        target: Target, modules: Sequence[IRModule], paths: Sequence[str], elsewhere: bool
    ) -> Iterator[Build]:
        save = tvm().ir.save_json
        text = save(target)
        # A generator, so that a module is serialised only when a builder is free, while other builders work.
        return (Build(save(mod), text, path, elsewhere) for mod, path in zip(modules, paths, strict=True))


def _failure(reply: Answer) -> Measurement:
    return Measurement(error=reply.error if isinstance(reply, Failed) else f"unexpected answer {reply!r}")
