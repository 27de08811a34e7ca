"""The code that runs in the processes that the module `process` starts: a worker, or the server from which workers are
forked.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import time
import traceback
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from xrlflow.workers.protocol import Failure, Handler

PREPARE = "prepare"
"""The file in a server's folder that names the function that the server calls first."""
REQUEST = struct.Struct("!Bid")
"""A request to a server: what to do, the number of a worker, and how many seconds the worker has to end. A connection
and a log file are sent with FORK.
"""
FORK, END, DROP = range(3)
"""FORK: start a worker. END: end a worker, and reply how it ended. DROP: end a worker, without a reply."""
STATUS = struct.Struct("!ii")
"""The number of a worker, and how it ended, as `Popen.returncode`; KILLED: the worker did not end, and was killed."""
KILLED = 1 << 16


@dataclass(frozen=True, slots=True)
class Ready:
    """The handler was created. `pid`: of the worker's process."""

    pid: int


@dataclass(frozen=True, slots=True)
class Message:
    """A message that a handler sends while it works."""

    content: Any


@dataclass(frozen=True, slots=True)
class Done:
    """The reply to a task."""

    content: Any


_connection: Connection[Any, Any] | None = None
"""The connection of the worker that runs in this process."""


def tell(content: Any) -> None:
    """Send a message to the caller of this worker. Outside a worker's own process nothing is sent."""
    if _connection is not None:
        _connection.send(Message(content))


def serve(descriptor: int, life: int, folder: str, patience: float) -> None:
    """Be a worker until the other end of the connection is closed. See `process.Processes`."""
    if patience:
        signal.signal(signal.SIGTERM, _terminated)
    _end_with_parent(descriptor, life, folder, patience)
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        spawn.prepare(connection.recv())
        _work(connection)
    except (EOFError, ConnectionError):
        if not patience:  # end at once: unwinding would release the handler, and close what it has open
            os.killpg(0, signal.SIGKILL)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        if _closed(descriptor, 0):
            os.killpg(0, signal.SIGKILL)


def _closed(descriptor: int, milliseconds: int | None = None) -> bool:
    """Wait until the other end of the connection is closed, or for `milliseconds` (None: for ever). Returns whether it
    is closed.
    """
    poll = select.poll()
    poll.register(descriptor, 0)  # a closed other end is always reported
    return bool(poll.poll(milliseconds))


def _end_with_parent(descriptor: int, life: int, folder: str, patience: float = 0.0) -> None:
    """Fork a process that ends this one, and the processes that this one started, as soon as the other end of `life`
    is closed.

    A parent that is killed cannot end its children. A child may be in an endless loop inside a library that does not
    release the interpreter's lock, so that none of its threads could end it.
    """
    os.set_inheritable(descriptor, False)
    worker = os.getpid()
    if os.fork():
        os.close(life)
        return
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(descriptor)  # so that the parent notices when the worker closes its own copy
        _closed(life)
        if patience and os.getppid() == worker:
            os.kill(worker, signal.SIGTERM)
        end = time.monotonic() + patience
        while os.getppid() == worker and time.monotonic() < end:
            time.sleep(0.02)
        _end_group(folder)
    finally:
        os._exit(1)


def _end_group(folder: str) -> None:
    """End all processes of this process group, this one included, and remove the folder."""
    if folder:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        time.sleep(0.05)  # until no process writes any more
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _terminated(number: int, frame: object) -> None:
    """Raise SystemExit, so that unfinished files are removed."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _work(connection: Connection[Any, Any]) -> None:
    """Create a handler, and let it do tasks until the other end of the connection is closed. Raises EOFError, or
    ConnectionError.
    """
    global _connection
    _connection = connection
    make = connection.recv_bytes()
    try:
        handler: Handler = pickle.loads(make)()
    except Exception as error:
        connection.send(Failure.of(error))
        return
    connection.send(Ready(os.getpid()))
    while True:
        connection.send_bytes(_answer(handler, connection.recv_bytes()))


def _answer(handler: Handler, task: bytes) -> bytes:
    try:
        return pickle.dumps(Done(handler.do(pickle.loads(task))), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return pickle.dumps(Failure.of(error))


def serve_forks(descriptor: int, life: int, folder: str) -> None:
    """Fork a worker for each request. See `process.Forks`.

    When the other end of the connection is closed, all processes of this group are killed, even those in endless
    loops, and the folder is removed.
    """
    _end_with_parent(descriptor, life, folder)
    requests = socket.socket(fileno=descriptor)
    workers: dict[int, int] = {}
    try:
        file = Path(folder, PREPARE)
        with file.open("rb") as content:
            spawn.prepare(pickle.load(content))
            pickle.load(content)()
        file.unlink()
        gc.collect()
        gc.freeze()  # a garbage collection would write to shared pages, and so copy them
        while True:
            data, descriptors, _, _ = socket.recv_fds(requests, REQUEST.size, 2)
            if not data:
                return
            order, number, patience = REQUEST.unpack(data)
            if order == FORK:
                workers[number] = _fork(requests, *descriptors)
                continue
            status = _reap(workers.pop(number, -1), patience)
            if order == END:
                requests.sendall(STATUS.pack(number, status))
    except Exception:
        traceback.print_exc()
    finally:
        _end_group(folder)


def _fork(requests: socket.socket, connection: int, log: int) -> int:
    """Be a worker in a forked process, with this connection; its standard error goes to the log. Returns its number;
    -1 if there is none."""
    try:
        process = os.fork()
    except OSError:  # out of memory: the caller notices that the connection closes
        traceback.print_exc()
        process = -1
    if process != 0:
        os.close(connection)
        os.close(log)
        return process
    status = 1
    try:
        requests.close()
        os.dup2(log, 2)
        _work(Connection(connection))
        status = 0
    except (EOFError, ConnectionError):
        os._exit(0)  # see `serve`
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # a worker runs none of the exit handlers of the server


def _reap(process: int, patience: float) -> int:
    if process < 0:
        return KILLED
    end = time.monotonic() + patience
    while True:
        pid, status = os.waitpid(process, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return KILLED
        time.sleep(0.002)
