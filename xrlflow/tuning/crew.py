"""Workers that build or run candidates for a pool, on this machine."""

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
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import IO, Protocol

from xrlflow.backends.children import serve_in_child
from xrlflow.backends.protocol import one_line
from xrlflow.tuning.worker import (
    REQUEST_BYTES,
    Answer,
    Failed,
    Fork,
    Job,
    Ready,
    Reap,
    request,
    serve_forks,
)

START_SECONDS = 120.0
"""Seconds that a worker may take to load TVM."""
_ATTEMPTS = 3  # to start a worker


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


class Crew(Protocol):
    """Workers for one kind of job. `seconds`: how long there was work for any of them."""

    seconds: float

    def work(self, jobs: Iterator[Job], until: float = math.inf) -> Generator[tuple[int, Answer], None, None]:
        """The answers to jobs, each with its number in `jobs`, as they arrive. No job begins after `until`.

        If the generator is closed early, busy workers are replaced. Raises PoolError.
        """
        ...

    def settle(self) -> None:
        """Wait until every worker is ready."""
        ...

    def close(self) -> None: ...


class ForkServer:
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

    def __init__(self, server: ForkServer, threads: int) -> None:
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


class LocalCrew:
    """Workers of this machine for one kind of job. Those that died or are worn out are replaced while the others go on.

    With several of a device's key, one that is gone takes its worker with it. If the last one does not answer in time,
    nothing more can be done.
    """

    def __init__(self, server: ForkServer, count: int, work: Work) -> None:
        self._server, self._work = server, work
        self.seconds = 0.0
        self._failed_starts = 0
        self._closed = False
        self._workers = [_Worker(server, work.threads) for _ in range(count)]

    def work(self, jobs: Iterator[Job], until: float = math.inf) -> Generator[tuple[int, Answer], None, None]:
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
                    elif not worker.begin(duty, self._work.seconds):
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
        for worker in expecting:
            position = self._workers.index(worker)
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
                failed = Failed(f"the process died {self._work.activity} it ({manner})")
                yield duty, failed if fresh or duty.crashes > 1 else None
            elif isinstance(answer, Failed) and answer.fatal:
                if self._work.device is None or len(self._workers) == 1:
                    raise PoolError(answer.error)
                self._workers.pop(position).end()  # its device is gone; others of the key are there
                yield duty, None
            else:
                if worker is self._workers[position] and worker.uses >= self._work.uses:
                    self._replace(position)
                yield duty, answer

    def _overdue(self, position: int) -> Answer:
        worker = self._workers[position]
        if worker.ready:
            self._replace(position)
            if self._work.device is not None:
                return Failed(
                    f"remote device {self._work.device} has not answered for {self._work.seconds:g} s",
                    fatal=True,
                )
            return Failed(f"{self._work.activity} it took longer than {self._work.seconds:g} s")
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
            raise PoolError(answer.error if isinstance(answer, Failed) else f"unexpected answer {answer!r}")

    def _replace(self, position: int, patience: float = 0.0) -> str:
        manner = self._workers[position].end(patience)
        self._workers[position] = _Worker(self._server, self._work.threads)
        return manner
