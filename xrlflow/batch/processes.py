"""Jobs in processes of this machine. A model that crashes its process ends one job, and not the batch."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import IO

from xrlflow.backends.children import serve_in_child
from xrlflow.backends.protocol import one_line
from xrlflow.batch.jobs import WAITING, Job, Row, Told, failed
from xrlflow.options import OptionError
from xrlflow.storage.exclusive import VARIABLE, measuring_lock

_USES = 16
"""A process does so many jobs: caches of graphs grow with each."""
_PATIENCE = 15.0
"""Seconds that a process may take to remove its files when it is ended."""
_BETWEEN = 0.1
"""Least seconds between two messages about what a job does."""
_SILENCE = 3600.0
"""Seconds without a sign of life, or ten times its time limit if that is more, after which a job is taken for hung."""


@dataclass(frozen=True, slots=True)
class Processes:
    """An `Executor`: so many processes do jobs at a time. Jobs that measure take turns even then (see `run`)."""

    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise OptionError(f"workers {self.count} is not positive: give 1 or more")

    def __call__(self, jobs: Sequence[Job], told: Told) -> Generator[Row, None, None]:
        waiting = deque(jobs)
        busy: dict[Connection, tuple[_Worker, Job]] = {}
        idle: list[_Worker] = []
        try:
            while waiting or busy:
                while waiting and len(busy) < self.count:
                    job = waiting.popleft()
                    try:
                        worker = idle.pop() if idle else _Worker.start()
                    except OSError as error:
                        yield failed(job, f"no process can be started for it ({error.strerror})")
                        continue
                    busy[worker.connection] = worker, job
                    worker.send(job)
                for connection, row in _heard(busy, told):
                    worker, _ = busy.pop(connection)
                    if worker.left and worker.alive:
                        idle.append(worker)
                    else:
                        worker.end()
                    yield row
        finally:
            _end_all([*idle, *(worker for worker, _ in busy.values())])


def _heard(busy: Mapping[Connection, tuple[_Worker, Job]], told: Told) -> Iterator[tuple[Connection, Row]]:
    """Wait until a process says something, or one has been silent for too long. Yields the rows that are there."""
    if not busy:
        return
    until = min(worker.deadline for worker, _ in busy.values())
    ready = wait(list(busy), None if math.isinf(until) else max(until - time.monotonic(), 0.0))
    for connection, (worker, job) in list(busy.items()):
        if connection in ready:
            row = worker.answer(job, told)
        elif worker.deadline <= time.monotonic():
            row = worker.given_up(job)
        else:
            continue
        if row is not None:
            yield connection, row


@dataclass(slots=True)
class _Worker:
    """A process that does one job at a time. `left`: how many more it may do. `folder`: where its temporary files are.
    `deadline`: when it has been silent for too long."""

    connection: Connection
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    folder: str
    left: int = _USES
    alive: bool = True
    started: float = field(default_factory=time.monotonic)
    deadline: float = math.inf

    @staticmethod
    def start() -> _Worker:
        """Raises OSError where no process can be started."""
        # A process that is killed leaves whole models in files, which nobody else would remove.
        folder = tempfile.mkdtemp(prefix="xrlflow-batch-")
        try:
            ours, theirs = socket.socketpair()
            log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
            variables = {"TMPDIR": folder, VARIABLE: str(measuring_lock())}
            with theirs:
                process = serve_in_child(serve, theirs.fileno(), folder, log=log, **variables)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return _Worker(Connection(ours.detach()), process, log, folder)

    def send(self, job: Job) -> None:
        self.left -= 1
        self.started = time.monotonic()
        self.deadline = self.started + _silence(job)
        with contextlib.suppress(BrokenPipeError):  # `answer` finds out that it has ended
            self.connection.send(job)

    def answer(self, job: Job, told: Told) -> Row | None:
        """The row of the job, if the process has it; what it does in the meantime is passed on."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.alive = False
            return failed(job, self._death(), seconds=time.monotonic() - self.started)
        if isinstance(message, Row):
            return message
        waits = str(message).startswith(WAITING)
        self.deadline = math.inf if waits else time.monotonic() + _silence(job)
        told(job.name, str(message))
        return None

    def given_up(self, job: Job) -> Row:
        """End the process of a job that hangs: it may hang in a library, and be deaf."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return failed(
            job,
            f"it has not gone on for {_silence(job):.0f} s, and was ended: if the model only needs so long, give a "
            "longer time limit",
            seconds=time.monotonic() - self.started,
        )

    def _death(self) -> str:
        """Why the process has ended, in one line."""
        status = self.process.wait()
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(size - 300, 0))
        tail = one_line(self.log.read().decode(errors="replace"))
        if status == -signal.SIGKILL:
            return "its process was killed: there may not be enough memory for this model"
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"its process ended {how}" + (f": {tail}" if tail else "")

    def end(self) -> None:
        _end_all([self])


def _silence(job: Job) -> float:
    return max(_SILENCE, 10 * job.options.time_limit)


def _end_all(workers: Sequence[_Worker]) -> None:
    """End processes. They are given some time to remove their files, and then killed."""
    for worker in workers:
        worker.connection.close()
    until = time.monotonic() + _PATIENCE
    for worker in workers:
        try:
            worker.process.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
        finally:
            worker.log.close()
            shutil.rmtree(worker.folder, ignore_errors=True)


def serve(descriptor: int, folder: str) -> None:
    """Do the jobs that come, one after the other, and answer with their rows. When the other side has gone, this ends,
    and removes the folder of its temporary files."""
    from xrlflow.batch.running import run

    signal.signal(signal.SIGTERM, _terminated)
    connection = Connection(descriptor)
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, jobs, folder), daemon=True).start()
    try:
        while True:
            connection.send(run(jobs.get(), _Teller(connection).say))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True)
class _Teller:
    """Tells the other side what a job does, not too often."""

    connection: Connection
    last: float = 0.0
    said: str = ""

    def say(self, text: str) -> None:
        now, phase = time.monotonic(), text.partition(" ")[0]
        if phase != self.said or now - self.last >= _BETWEEN:
            self.last, self.said = now, phase
            self.connection.send(text)


def _listen(connection: Connection, jobs: queue.SimpleQueue[Job], folder: str) -> None:
    """Take jobs. When the other side has gone, end this process: first with, then without a clean-up."""
    try:
        with contextlib.suppress(EOFError, OSError):
            while True:
                jobs.put(connection.recv())
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_PATIENCE - 3)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _terminated(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
