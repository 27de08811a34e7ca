"""Workers in processes of this machine that may crash, hang or be killed: how they are started, used and ended.

A worker's process has the Python, package, environment and module path of this process. It leads its own session:
Ctrl-C does not reach it, and the processes that it starts are ended with it. It ends when this process ends, even if
this process is killed. Its standard error goes to a file; the last error in this file is part of the message when a
worker is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Protocol

from xrlflow.common.text import printable, shortened
from xrlflow.workers import serving
from xrlflow.workers.channel import Channel, wait
from xrlflow.workers.protocol import Failure, Kind, MakeHandler, Worker, WorkerError, WorkerLate, WorkerLost
from xrlflow.workers.serving import DROP, END, FORK, KILLED, REQUEST, STATUS, Message, Ready

if TYPE_CHECKING:
    from typing_extensions import Self

DYING = 5.0
"""Seconds that a process may take to end after it has closed its connection."""
_LAST = 1 << 16
# glog: "F1125 10:31:03.766393   11234 file.cc:744] message". C++: "terminate called after ...", then "  what():  ...".
_GLOG = re.compile(r"F\d{4} \S+ +\d+ \S+\] (.*)")
_FATAL = re.compile(r"terminate called|Fatal Python error|\S*Error\b")


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, together with `variables` and the variables that a child needs to import this
    package.
    """
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = root + (os.pathsep + inherited if inherited else "")
    return {**os.environ, "PYTHONPATH": path, **variables}


def command(module: str, function: str, *arguments: float | str) -> list[str]:
    """The command of a process that calls a function of a module of this package.

    The process does not search its working directory for modules, since a file in it may have the name of a module.
    """
    path = "import sys; sys.path[:] = filter(None, sys.path)"
    return [sys.executable, "-c", f"{path}; from {module} import {function}; {function}(*{arguments!r})"]


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Raises WorkerError if the system refuses another process, socket or file in the block."""
    try:
        yield
    except OSError as error:
        raise WorkerError(f"no process can be started ({error.strerror})") from error


class Process(Protocol):
    """A worker's process. `pid`: 0 until it is known. `logs`: files of its output; the first file with an error
    counts.
    """

    pid: int
    logs: Sequence[IO[bytes]]

    def end(self, patience: float) -> int | None:
        """Wait up to `patience` seconds until the process ends, then kill it. Returns its status, as
        `Popen.returncode`, or None if this call killed it. This is called once.
        """
        ...

    def release(self) -> None:
        """Let the process end by itself, as if its parent had ended."""
        ...

    def close(self) -> None:
        """Remove the files of the process, which must have ended."""
        ...


class Started:
    """A process that was started to call a function of `serving`, with a socket (`socket` is its other end), a folder
    for temporary files ("": the usual folder), and further arguments. Raises WorkerError if the process cannot be
    started.
    """

    def __init__(
        self, function: Callable[..., None], variables: Mapping[str, str], folder: str, *arguments: float
    ) -> None:
        if folder:
            variables = {"TMPDIR": folder, **variables}
        with _starting(), contextlib.ExitStack() as files:
            if folder:
                files.callback(shutil.rmtree, folder, ignore_errors=True)
            log = files.enter_context(tempfile.TemporaryFile())
            self.socket, theirs = map(files.enter_context, socket.socketpair())
            self._life, watched = map(files.enter_context, socket.socketpair())
            ends = (theirs.fileno(), watched.fileno())
            self._process = subprocess.Popen(
                command(function.__module__, function.__name__, *ends, folder, *arguments),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, pass_fds=ends,
                start_new_session=True, env=environment(**variables),
            )  # fmt: skip
            theirs.close()
            watched.close()
            self._files = files.pop_all()
        self.logs: Sequence[IO[bytes]] = (log,)
        self.pid = self._process.pid

    def end(self, patience: float) -> int | None:
        ended = self.ends(patience)
        if self._process.returncode is None:
            # Until the status of the process is read, no other process group can have its number.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        return self._process.returncode if ended else None

    def ends(self, patience: float) -> bool:
        """Whether the process ends within `patience` seconds."""
        until = time.monotonic() + patience
        while self._process.returncode is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.002)
        return True

    def release(self) -> None:
        self._life.close()

    def close(self) -> None:
        self._files.close()


class ProcessWorker:
    """A worker in a separate process. `patience`: seconds that the process has to clean up when it is ended.

    `end`: this process's end of the socket. `first`: messages that are sent before all others. `lost`: the exception
    that `begin` and `reply` raise once the worker has ended, or was ended. Only one thread at a time may use a worker.
    """

    def __init__(
        self, process: Process, end: socket.socket, first: Sequence[bytes], name: str, patience: float = 0.0
    ) -> None:
        self.name, self.ready = name, False
        self.process, self.channel, self._patience = process, Channel(end), patience
        self._busy, self._released = False, math.inf
        self._replies: deque[Any] = deque()
        self._messages: list[Any] = []
        self.lost: WorkerLost | None = None
        _OWN.add(self)
        for message in first:
            self.channel.send(message)

    @property
    def closed(self) -> bool:
        """Whether the worker has ended, or was ended."""
        if self.lost is None:
            self.replied()
        return self.lost is not None

    def begin(self, task: Any) -> None:
        """See `Worker.begin`. This returns before the worker has read the task.

        Raises WorkerError if the worker has a task already.
        """
        data = _pickled(task)
        closed = self.closed
        if self._busy and not closed:
            raise WorkerError(f"{self.name} has a task already")
        if closed:
            if self._replies:  # the reply says why the handler could not be created
                self.reply()
            assert self.lost is not None
            raise self.lost
        self._busy = True
        self.channel.send(data)

    def replied(self) -> bool:
        """Receive the messages that have arrived. Returns whether there is a reply, or the worker is lost."""
        try:
            for data in self.channel.receive():
                self._take(data)
            if self.channel.ended and self.lost is None:
                self._lose(self._end(DYING))
        except BaseException:  # Ctrl-C: a part of a message may be lost
            self.close()
            raise
        return bool(self._replies) or self.lost is not None

    def _take(self, data: bytearray) -> None:
        try:
            message = pickle.loads(data)
        except Exception as error:  # later replies must not count as replies to later tasks
            why = traceback.format_exception_only(error)[-1].strip()
            message = Failure(f"its reply cannot be read: {why}", traceback.format_exc())
            self.close()
        match message:
            case Ready(pid):
                self.process.pid, self.ready = pid, True
            case Message(text):
                self._messages.append(text)
            case _:
                self._replies.append(message)

    def reply(self, until: float = math.inf) -> Any:
        """See `Worker.reply`. If there is no reply at `until` (time.monotonic), the worker is closed, and WorkerLate
        is raised.
        """
        try:
            while not self._replies:
                if self.lost is not None:
                    raise self.lost
                wait([self.channel], max(until - time.monotonic(), 0.0))
                if not self.replied() and time.monotonic() >= until:
                    self._end(0.0)
                    self.lost = WorkerLost(f"{self.name} is closed")
                    raise WorkerLate(f"{self.name} was ended: its time was over")
        except WorkerLost:
            raise
        except BaseException:  # Ctrl-C: replies that arrive later must not count as replies to later tasks
            self.close()
            raise
        reply, self._busy = self._replies.popleft(), False
        if isinstance(reply, Failure):
            raise reply.as_error(self.name)
        return reply.content

    def messages(self) -> list[Any]:
        messages, self._messages = self._messages, []
        return messages

    def release(self) -> None:
        """Let the worker end by itself, so that `close` waits for a shorter time."""
        self._released = min(self._released, time.monotonic())
        self.channel.close()
        self.process.release()

    def close(self) -> None:
        if self.lost is None:
            self.release()
            self._end(max(self._released + self._patience - time.monotonic(), 0.0))
            self.lost = WorkerLost(f"{self.name} is closed")

    def disown(self) -> None:
        """Leave the worker to the process from which this one was forked."""
        self.channel.disown()
        self.process.release()
        if self.lost is None:
            self.lost = WorkerLost(f"{self.name} belongs to the process that this one was forked from")

    def _lose(self, how: str) -> None:
        self.lost = WorkerLost(f"{self.name} ended {how}", how)

    def _end(self, patience: float) -> str:
        """End the worker. Returns how its process ended, and the last error in its output."""
        self.channel.close()
        how = manner(self.process.end(patience))
        error = next(filter(None, map(last_words, self.process.logs)), "")
        self.process.close()
        return f"{how}: {error}" if error else how


def manner(status: int | None) -> str:
    """How a process ended, for messages: "by SIGILL", or "with status 3"."""
    if status is None:
        return "without a status"
    if status == -signal.SIGKILL:
        return "by SIGKILL: there may not be enough memory"
    if status >= 0:
        return f"with status {status}"
    names = {s.value: s.name for s in signal.Signals}
    return f"by {names.get(-status, f'signal {-status}')}"


def last_words(log: IO[bytes]) -> str:
    """The last error in a log, or its last line, as one line."""
    log.seek(max(log.seek(0, os.SEEK_END) - _LAST, 0))
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    at = next((number for number in reversed(range(len(lines))) if _gist(lines[number])), None)
    if at is None:
        return shortened(printable(lines[-1]), LONGEST) if lines else ""
    more = [line for line in lines[at + 1 : at + 2] if line.lstrip().startswith("what():")]
    return shortened(printable(" ".join([_gist(lines[at]), *more])), LONGEST)


LONGEST = 300
"""The greatest length of the last error in a message, in characters."""


def _gist(line: str) -> str:
    """The error that a line of output reports; "" if it reports none."""
    if match := _GLOG.match(line):
        return match[1]
    return line if _FATAL.match(line) else ""


class Local:
    """The parts that all worker factories of this machine share."""

    measuring = 1

    def __init__(self, cores: int | None = None) -> None:
        self.cores = cores or os.cpu_count() or 1

    def replied(self, workers: Sequence[Worker], seconds: float | None = None) -> list[Worker]:
        mine = [worker for worker in workers if isinstance(worker, ProcessWorker)]
        there = [worker.channel for worker in mine if worker.lost is None]
        limit = math.inf if seconds is None else seconds
        ready = wait(there, limit if len(there) == len(mine) else 0.0)
        return [w for w in mine if w.lost is not None or (w.channel in ready and w.replied())]

    def close(self) -> None:
        pass


class Processes(Local):
    """A factory of workers in processes of this machine. `cores`: how many workers may compute at a time; by default
    as many as there are cores.

    `variables`: variables for their environment. `patience`: seconds that a process has to clean up when it is ended.
    With `patience`, each process has a folder of its own for temporary files, which is removed in any case.
    """

    def __init__(
        self, cores: int | None = None, variables: Mapping[str, str] | None = None, patience: float = 0.0
    ) -> None:
        super().__init__(cores)
        self._variables, self._patience = variables or {}, patience

    def worker(self, make: MakeHandler, name: str, kind: Kind = Kind.COMPUTE) -> ProcessWorker:
        pickled = _pickled(make)
        first = (_pickled(_modules(name, b"__main__" in pickled)), pickled)
        with _starting():
            folder = tempfile.mkdtemp(prefix="xrlflow-worker-") if self._patience else ""
        process = Started(serving.serve, self._variables, folder, self._patience)
        return ProcessWorker(process, process.socket, first, name, self._patience)


class Forks(Local):
    """A factory of workers that are forked from one process (the fork server), which has called `prepare` before. A
    fork takes milliseconds.

    Workers share the server's process group and its folder for temporary files. They end, and the folder is removed,
    when the factory is closed, or when this process ends. `prepare` must start no thread, because a process with
    several threads cannot be forked safely; `variables` of the environment keep libraries from starting threads.
    Raises WorkerError.
    """

    def __init__(self, prepare: Callable[[], object], variables: Mapping[str, str] | None = None) -> None:
        super().__init__()
        pickled = _pickled(prepare)
        modules = _pickled(_modules("forks", b"__main__" in pickled))
        with _starting(), contextlib.ExitStack() as failed:
            self.folder = tempfile.mkdtemp(prefix="xrlflow-worker-")
            failed.callback(shutil.rmtree, self.folder, ignore_errors=True)
            with open(os.path.join(self.folder, serving.PREPARE), "wb") as file:
                file.writelines((modules, pickled))
            failed.pop_all()
        self.server = Started(serving.serve_forks, variables or {}, self.folder)
        self._owned, self._numbers = True, itertools.count()
        _OWN.add(self)

    def worker(self, make: MakeHandler, name: str, kind: Kind = Kind.COMPUTE) -> ProcessWorker:
        if not self._owned:
            raise WorkerError("no process can be started (this one was forked from the one that can)")
        pickled = _pickled(make)
        number = next(self._numbers)
        with _starting():
            ours, theirs = socket.socketpair()
            log = tempfile.TemporaryFile()  # noqa: SIM115  (it is read when the process has died)
        with theirs, contextlib.suppress(OSError):  # if the server is dead, the worker counts as lost
            request = REQUEST.pack(FORK, number, 0.0)
            socket.send_fds(self.server.socket, [request], [theirs.fileno(), log.fileno()])
        return ProcessWorker(_Forked(self.server, number, log), ours, (pickled,), name)

    def close(self) -> None:
        self.server.socket.close()
        if self._owned:
            self.server.end(0.0)
            self.server.close()

    def disown(self) -> None:
        """Leave the workers to the process from which this one was forked."""
        self.server.socket.close()
        self.server.release()
        self._owned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_OWN: weakref.WeakSet[ProcessWorker | Forks] = weakref.WeakSet()
"""The workers and factories that this process has started. A forked copy of this process leaves them to this process:
two readers of one socket would receive each other's replies, and a worker would not notice that this process ends.
"""


def _disown() -> None:
    for started in list(_OWN):
        started.disown()


os.register_at_fork(after_in_child=_disown)


class _Forked:
    """A process that was forked from a server. Only the server can wait for this process."""

    def __init__(self, server: Started, number: int, log: IO[bytes]) -> None:
        self.pid = 0
        self.logs: Sequence[IO[bytes]] = (log, *server.logs)
        self._server, self._number = server, number

    def end(self, patience: float) -> int | None:
        # Before the worker is ready, the server may be busy for long, and cannot reply.
        order = END if self.pid or patience else DROP
        with contextlib.suppress(OSError):  # the server has ended
            self._server.socket.sendall(REQUEST.pack(order, self._number, patience))
            if order == DROP:
                return None
            while reply := self._server.socket.recv(STATUS.size):
                number, status = STATUS.unpack(reply)
                if number == self._number:  # after an interrupt, an earlier status may still be unread
                    return None if status == KILLED else int(status)
        return self._server.end(0.0) if self._server.ends(min(patience, 1.0)) else None

    def release(self) -> None:
        """Does nothing: the process ends when its connection is closed."""

    def close(self) -> None:
        self.logs[0].close()


def _modules(name: str, main: bool) -> dict[str, Any]:
    """The module path for the worker. `main`: include this process's own main module, because the handler is defined
    in it.
    """
    keys = ("sys_path", "init_main_from_name", "init_main_from_path") if main else ("sys_path",)
    data = spawn.get_preparation_data(name)
    return {key: data[key] for key in keys if key in data}


def _pickled(content: object) -> bytes:
    return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
