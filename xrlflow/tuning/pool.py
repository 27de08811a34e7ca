"""Candidates are built and run on this machine, in processes that may crash without ending the tuning.

Builders compile, one for each core; one runner measures while nothing is built. All of them are workers that stay for
many candidates. When a candidate crashes its worker or exceeds its time limit, the fork server (see `worker.py`) forks
a new worker while the others go on.

Nothing outlives a pool. The fork server kills all workers and removes their files when its socket closes: when the pool
is closed, and when the process that owns the pool is killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from xrlflow.backends.children import serve_in_child
from xrlflow.backends.limits import default_threads
from xrlflow.backends.protocol import Array, BackendError, one_line
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.remote import PATIENCE, Remote
from xrlflow.tuning.tuners.protocol import Measurement
from xrlflow.tuning.worker import (
    REQUEST_BYTES,
    Answer,
    Argument,
    Build,
    Built,
    Evaluate,
    Evaluated,
    Failed,
    Fork,
    Job,
    Ran,
    Ready,
    Reap,
    Run,
    RunThere,
    Timing,
    request,
    serve_forks,
)

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target
    from typing_extensions import Self

    from xrlflow.tuning.knobs import Candidate
    from xrlflow.tuning.tasks import Task

START_SECONDS = 120.0
"""Seconds that a worker may take to load TVM."""

_ATTEMPTS = 3  # to start a worker
# This many candidates of a batch, for each builder, are run before the others are built: a good one is known sooner, at
# the price of one more wait for the builders.
_FIRST = 2


# Bytes on disk that a kernel and its object file may take.
_SPACE = 1 << 20


class PoolError(RuntimeError):
    """Nothing can be measured: workers do not start, the disk is full, or the pool is closed.

    The message is one line.
    """


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that was built: its library, and the data types and shapes of its parameters."""

    path: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a pool works.

    `builders` compile at a time; kernels run with `threads` threads. A candidate may take `build_seconds` to compile
    and `run_seconds` to measure. A worker is replaced after `uses` candidates, because TVM leaks memory. `remote`:
    candidates are built here and run on that device.
    """

    builders: int = field(default_factory=default_threads)
    threads: int = field(default_factory=default_threads)
    timing: Timing = field(default_factory=Timing)
    build_seconds: float = 20.0
    run_seconds: float = 10.0
    uses: int = 500
    remote: Remote | None = None

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
    """Builders and a runner, for any number of tasks. Use it in a `with` statement, or close it.

    Raises PoolError on first use if its workers cannot start, for instance because TVM is missing.
    """

    def __init__(self, options: PoolOptions | None = None) -> None:
        self.options = options if options is not None else PoolOptions()
        self._server = _ForkServer()
        self._end = weakref.finalize(self, self._server.end)
        self._builders = _Crew(
            self._server, self.options.builders, 1, self.options.uses, "building", self.options.build_seconds
        )
        limit = self.options.run_seconds
        if self.options.remote is not None:  # the device ends slow runs itself; if it does not, it is gone
            limit += 2 * PATIENCE
        self._runners = _Crew(
            self._server, 1, self.options.threads, self.options.uses, "running", limit, self.options.device
        )
        self._built = 0

    @property
    def threads(self) -> int:
        """The number of threads that kernels run with."""
        return self.options.threads

    @property
    def device(self) -> str | None:
        """The name of the device that runs kernels; None: this machine."""
        return self.options.device

    @property
    def flushed(self) -> bool:
        """Whether kernels are timed with cold caches (see `worker.Timing`)."""
        return self.options.timing.flush

    @property
    def building(self) -> float:
        """The seconds that building has taken so far."""
        return self._builders.seconds

    @property
    def running(self) -> float:
        """The seconds that running has taken so far."""
        return self._runners.seconds

    def outcomes(
        self, task: Task, candidates: Sequence[Candidate], *, until: float = math.inf
    ) -> Generator[tuple[int, Measurement], None, None]:
        """The position and outcome of each candidate, as soon as it is known.

        The first few candidates, which are the likeliest if the tuner orders them, are built and run before the others
        are built. In both parts, those that fail to build come first. Candidates that would start after `until`
        (`time.monotonic`) are left out. The generator may be closed at any time.
        """
        few = _FIRST * self.options.builders
        for start, part in ((0, candidates[:few]), (few, candidates[few:])):
            if start and not part:
                return
            with contextlib.closing(self._outcomes(task, part, until)) as found:
                for position, outcome in found:
                    yield start + position, outcome

    def _outcomes(
        self, task: Task, candidates: Sequence[Candidate], until: float
    ) -> Generator[tuple[int, Measurement], None, None]:
        """The outcomes of a part: all are built, then run, so that nothing else runs while a kernel is timed."""
        paths = self._paths(len(candidates))
        try:
            libraries: dict[int, tuple[Argument, ...]] = {}
            builds = self._builds(task, candidates, paths, self.options.remote is not None)
            with contextlib.closing(self._builders.work(builds, until)) as answers:
                for number, answer in answers:
                    match answer:
                        case Built(arguments):
                            libraries[number] = arguments
                        case _:
                            self._check_space()
                            yield number, _failure(answer)
            order = sorted(libraries)
            runs = (self._run(paths[number], libraries[number], self.options.timing) for number in order)
            for position, answer in self._runners.work(runs, until):
                match answer:
                    case Ran(seconds):
                        yield order[position], Measurement(seconds)
                    case _:
                        yield order[position], _failure(answer)
        finally:
            for path in paths:
                Path(path).unlink(missing_ok=True)

    def measure(self, task: Task, candidates: Sequence[Candidate]) -> tuple[Measurement, ...]:
        """The outcomes of all candidates, in their order."""
        found = dict(self.outcomes(task, candidates))
        return tuple(found[number] for number in range(len(candidates)))

    def evaluate(self, task: Task, candidate: Candidate, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """What a kernel computes: its parameters after `inputs`, which are zero before the call.

        Raises BackendError if it does not build or run, does not take the inputs, or if the pool has a remote device.
        """
        with self.built(task.target, [candidate.mod]) as (kernel,):
            if kernel is None:
                raise PoolError("the pool is closed")
            if isinstance(kernel, Measurement):
                raise BackendError(kernel.error)
            return self.called(kernel, inputs)

    @contextlib.contextmanager
    def built(
        self, target: Target, modules: Sequence[IRModule], until: float = math.inf
    ) -> Iterator[list[Kernel | Measurement | None]]:
        """Modules of one function each, as kernels that can be called and timed while the context lasts; a measurement
        says why one does not build. None: it would have begun after `until` (`time.monotonic`)."""
        paths = self._paths(len(modules))
        found: list[Kernel | Measurement | None] = [None] * len(modules)
        try:
            builds = self._builds_of(target, modules, paths, self.options.remote is not None)
            with contextlib.closing(self._builders.work(builds, until)) as answers:
                for number, answer in answers:
                    if isinstance(answer, Built):
                        found[number] = Kernel(paths[number], answer.arguments)
                    else:
                        self._check_space()
                        found[number] = _failure(answer)
            yield found
        finally:
            for path in paths:
                Path(path).unlink(missing_ok=True)

    def called(self, kernel: Kernel, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """What a kernel computes, like `evaluate`."""
        if self.options.remote is not None:
            raise BackendError(f"kernels for {self.options.remote} are not evaluated here")
        call = Evaluate(kernel.path, kernel.arguments, tuple(inputs))
        for _, result in self._runners.work(iter([call])):
            if isinstance(result, Evaluated):
                return result.outputs
            raise BackendError(_failure(result).error)
        raise PoolError("the pool is closed")

    def timed(self, kernel: Kernel, timing: Timing) -> Measurement:
        """How long a kernel takes."""
        for _, answer in self._runners.work(iter([self._run(kernel.path, kernel.arguments, timing)])):
            return Measurement(answer.seconds) if isinstance(answer, Ran) else _failure(answer)
        raise PoolError("the pool is closed")

    def settle(self) -> None:
        """Wait until TVM is loaded, before something else is timed."""
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
        """Raise PoolError if the disk is full: then a failure to build is not the candidate's fault."""
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
        # A generator: a module is serialised when a builder is free, while other builders work.
        return (Build(save(mod), text, path, elsewhere) for mod, path in zip(modules, paths, strict=True))


def _failure(answer: Answer) -> Measurement:
    return Measurement(error=answer.error if isinstance(answer, Failed) else f"unexpected answer {answer!r}")


class _ForkServer:
    """The process that workers are forked from. Workers belong to its process group and share its folder of files."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="xrlflow-tuning-")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (what it says is read when it has died)
        self._socket, theirs = socket.socketpair()
        try:
            self._process = serve_in_child(
                serve_forks,
                theirs.fileno(),
                self.folder,
                log=self._log,
                TMPDIR=self.folder,
                # A library may leave something small where a large tensor was, so that the next tensor does not fit:
                # megabytes per candidate, unless large tensors get pages of their own (glibc).
                MALLOC_MMAP_THRESHOLD_=str(128 * 1024),
                # Libraries must not start threads: a process with threads cannot be forked safely.
                **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            )
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise PoolError(f"no worker can be started: {error}") from error
        theirs.close()
        self._owner = os.getpid()

    @property
    def group(self) -> int:
        return self._process.pid

    def fork(self, threads: int, pipe: int, log: int) -> None:
        """Ask for a worker, which will send `Ready` through its pipe."""
        with contextlib.suppress(OSError):  # if the fork server is dead, the pipe closes
            socket.send_fds(self._socket, [request(Fork(threads))], [pipe, log])

    def reap(self, process: int, patience: float) -> int | None:
        """The exit status of a worker, as `os.waitpid` gives it; None if the fork server has died."""
        try:
            self._socket.sendall(request(Reap(process, patience)))
            reply = self._socket.recv(REQUEST_BYTES)
        except OSError:
            return None
        return int(pickle.loads(reply)) if reply else None

    def last_words(self) -> str:
        """The last line that the fork server printed, or its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return _last_line(self._log) or f"its process ended with {self._process.returncode}"

    def end(self) -> None:
        """Kill all workers and remove their files. A second call does nothing."""
        if (
            os.getpid() != self._owner or self._socket.fileno() < 0
        ):  # a forked process must not end its parent's workers
            return
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        self._process.wait()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _last_line(log: IO[bytes]) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - 2000))
    return "".join(log.read().decode(errors="replace").strip().splitlines()[-1:])


@dataclass(slots=True)
class _Duty:
    """A job, its number in the batch, and how often it has crashed a worker."""

    number: int
    job: Job
    crashes: int = 0


class _Worker:
    """One process and the job that it works on."""

    def __init__(self, server: _ForkServer, threads: int) -> None:
        self._server = server
        self.connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (what it says is read when it has died)
        server.fork(threads, theirs.fileno(), self._log.fileno())
        theirs.close()
        self.process: int | None = None
        self.duty: _Duty | None = None
        self.deadline = time.monotonic() + START_SECONDS
        self.uses = 0

    @property
    def ready(self) -> bool:
        return self.process is not None

    @property
    def busy(self) -> bool:
        return self.duty is not None

    def begin(self, duty: _Duty, seconds: float) -> bool:
        """Send a job. False if the process has died."""
        try:
            self.connection.send(duty.job)
        except OSError:
            return False
        self.duty = duty
        self.deadline = time.monotonic() + seconds
        self.uses += 1
        return True

    def answer(self) -> Answer | None:
        """The message that it sent; None if it has died."""
        try:
            received: Answer = self.connection.recv()
        except (EOFError, OSError):
            return None
        return received

    def release(self) -> None:
        """Let it exit: closing the connection says that there is no more work."""
        self.connection.close()
        self._log.close()

    def end(self, patience: float = 0.0) -> str:
        """Wait `patience` seconds for it to exit, then kill it. Returns how it ended and its last line of output."""
        self.connection.close()  # a worker that is still starting will exit at once
        status = None if self.process is None else self._server.reap(self.process, patience)
        words = _last_line(self._log)
        self._log.close()
        if status is None:
            manner = self._server.last_words()
        elif os.WIFSIGNALED(status):
            manner = signal.Signals(os.WTERMSIG(status)).name
        else:
            manner = f"exit status {os.WEXITSTATUS(status)}"
        return one_line(": ".join(part for part in (manner, words) if part), 200)


class _Crew:
    """Workers for one kind of job. Those that died or are worn out are replaced while the others go on.

    `device`: the machine that the workers wait for, if it is another one. If it does not answer in time, nothing more
    can be done. `seconds`: how long there was work for any of them.
    """

    def __init__(
        self,
        server: _ForkServer,
        count: int,
        threads: int,
        uses: int,
        activity: str,
        seconds: float,
        device: str | None = None,
    ) -> None:
        self._server, self._threads, self._uses = server, threads, uses
        self._activity, self._limit, self._device = activity, seconds, device
        self.seconds = 0.0
        self._failed_starts = 0
        self._closed = False
        self._workers = [_Worker(server, threads) for _ in range(count)]

    def work(self, jobs: Iterator[Job], until: float = math.inf) -> Generator[tuple[int, Answer], None, None]:
        """The answers to jobs, each with its number in `jobs`, as they arrive. No job begins after `until`.

        If the generator is closed early, busy workers are replaced.
        """
        answers = self._answers(jobs, until)
        with contextlib.closing(answers):
            while True:
                start = time.monotonic()
                try:
                    found = next(answers, None)
                finally:
                    self.seconds += time.monotonic() - start
                if found is None:
                    return
                yield found

    def _answers(self, jobs: Iterator[Job], until: float) -> Generator[tuple[int, Answer], None, None]:
        if self._closed:
            raise PoolError("the pool is closed")
        source = (_Duty(number, job) for number, job in enumerate(jobs))
        again: deque[_Duty] = deque()
        more = True
        try:
            while True:
                for position, worker in enumerate(self._workers):
                    if not worker.ready or worker.busy or not more:
                        continue
                    over = time.monotonic() >= until
                    duty = None if over else again.popleft() if again else next(source, None)
                    if duty is None:
                        more = False
                    elif not worker.begin(duty, self._limit):
                        self._replace(position, patience=1.0)
                        again.append(duty)
                if not more and not any(worker.busy for worker in self._workers):
                    return
                for duty, answer in self._heard():
                    if answer is not None:
                        yield duty.number, answer
                    else:
                        again.append(duty)
                        more = True
        finally:
            for position, worker in enumerate(self._workers):
                if worker.busy and not self._closed:
                    self._replace(position)

    def settle(self) -> None:
        """Wait until every worker is ready."""
        while not all(worker.ready for worker in self._workers):
            for _ in self._heard():
                pass

    def close(self) -> None:
        """Release the workers: they exit when they have finished their jobs, or when the fork server ends."""
        self._closed = True
        for worker in self._workers:
            worker.release()
        self._workers = []

    def _heard(self) -> Iterator[tuple[_Duty, Answer | None]]:
        """Wait for messages, and yield what became of jobs; None: the job must be repeated."""
        expecting = [worker for worker in self._workers if worker.busy or not worker.ready]
        patience = min(worker.deadline for worker in expecting) - time.monotonic()
        heard = set(wait([worker.connection for worker in expecting], max(0.0, patience)))
        now = time.monotonic()
        for position, worker in enumerate(self._workers):
            if worker not in expecting:
                continue
            if worker.connection in heard:
                answer = worker.answer()
            elif worker.deadline <= now:
                answer = self._overdue(position)
            else:
                continue
            duty, worker.duty = worker.duty, None
            if duty is None:
                self._started(position, answer)
            elif answer is None:
                fresh = worker.uses == 1
                manner = self._replace(position, patience=1.0)
                duty.crashes += 1
                # An earlier job may have damaged the process: try again, at last in a fresh one.
                failed = Failed(f"the process died {self._activity} it ({manner})")
                yield duty, failed if fresh or duty.crashes > 1 else None
            else:
                if isinstance(answer, Failed) and answer.fatal:
                    raise PoolError(answer.error)
                if worker is self._workers[position] and worker.uses >= self._uses:
                    self._replace(position)
                yield duty, answer

    def _overdue(self, position: int) -> Answer:
        worker = self._workers[position]
        if worker.ready:
            self._replace(position)
            if self._device is not None:
                return Failed(
                    f"remote device {self._device} has not answered for {self._limit:g} s", fatal=True
                )
            return Failed(f"{self._activity} it took longer than {self._limit:g} s")
        return Failed(f"a worker did not load TVM in {START_SECONDS:g} s")

    def _started(self, position: int, answer: Answer | None) -> None:
        """A worker's first message, or its end without one. Raises PoolError if another worker would not help."""
        worker = self._workers[position]
        if isinstance(answer, Ready):
            worker.process = answer.process
            self._failed_starts = 0
        elif answer is None:
            manner = self._replace(position, patience=1.0)
            self._failed_starts += 1
            if self._failed_starts >= _ATTEMPTS:
                raise PoolError(f"workers die before they are ready ({manner})")
        else:
            raise PoolError(_failure(answer).error)

    def _replace(self, position: int, patience: float = 0.0) -> str:
        manner = self._workers[position].end(patience)
        self._workers[position] = _Worker(self._server, self._threads)
        return manner
