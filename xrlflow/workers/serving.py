"""What runs in the processes that `process` starts: a worker, or the server from which workers are forked."""

from __future__ import annotations

import gc
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from xrlflow.workers.protocol import Failure, Handler

PREPARE = "prepare"
"""The file in a server's folder that says which function it calls first."""
REQUEST = struct.Struct("!id")
"""A request to a server: FORK, with a connection and a log; or the worker to wait for, and for how many seconds."""
STATUS = struct.Struct("!i")
"""Its reply: how that worker ended, as `Popen.returncode`; KILLED: it did not end, and was killed."""
FORK = 0
KILLED = 1 << 16


@dataclass(frozen=True, slots=True)
class Ready:
    """The handler was created. `pid`: of the worker's process."""

    pid: int


@dataclass(frozen=True, slots=True)
class Message:
    """What a handler reports while it works."""

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


def serve(descriptor: int, folder: str, patience: float) -> None:
    """Be a worker until the other end of the connection is closed. See `process.Processes`."""
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with_parent, args=(descriptor, folder, patience), daemon=True).start()
    if patience:
        signal.signal(signal.SIGTERM, _terminated)
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        spawn.prepare(connection.recv())
        _work(connection)
    except (EOFError, ConnectionError):
        if not patience:  # at once: unwinding would release the handler, and close what it has open
            os.killpg(0, signal.SIGKILL)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        if _closed(descriptor, 0):
            os.killpg(0, signal.SIGKILL)


def _closed(descriptor: int, milliseconds: int | None = None) -> bool:
    """Wait until the other end is closed, or `milliseconds` (None: for ever). Returns whether it is closed."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a closed other end is always reported
    return bool(poll.poll(milliseconds))


def _end_with_parent(descriptor: int, folder: str, patience: float) -> None:
    """End this process, and the processes it started, as soon as the other end is closed, whatever it is doing then.

    A parent that is killed cannot end its children, and a child may be in an endless loop, or inside a library.
    """
    _closed(descriptor)
    if patience:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _terminated(number: int, frame: object) -> None:
    """Raise SystemExit, so that unfinished files are removed."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _work(connection: Connection[Any, Any]) -> None:
    """Create a handler, and let it do tasks until the other end is closed. Raises EOFError, or ConnectionError."""
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


def serve_forks(descriptor: int, folder: str) -> None:
    """Fork a worker for each request. See `process.Forks`.

    When the other end is closed, all processes of this group are killed, even those in endless loops, and the folder is
    removed.
    """
    requests = socket.socket(fileno=descriptor)
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
            worker, patience = REQUEST.unpack(data)
            if worker == FORK:
                _fork(requests, *descriptors)
            else:
                requests.sendall(STATUS.pack(_reap(worker, patience)))
    except Exception:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        time.sleep(0.05)  # until none of them writes any more
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _fork(requests: socket.socket, connection: int, log: int) -> None:
    """Be a worker in a forked process, with this connection; its standard error goes to the log."""
    try:
        process = os.fork()
    except OSError:  # out of memory: the caller sees that the connection closes
        traceback.print_exc()
        process = -1
    if process != 0:
        os.close(connection)
        os.close(log)
        return
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
