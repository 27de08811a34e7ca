"""What runs in the processes of `process`: a worker, or the server that workers are forked from."""

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

from xrlflow.workers.protocol import Failure, Hand

PREPARE = "prepare"
"""The file in a server's folder with what it does first."""
REQUEST = struct.Struct("!id")
"""To a server: FORK, with a connection and a log; or the worker to wait for, and for how many seconds."""
STATUS = struct.Struct("!i")
"""Its answer: how that worker ended, as `Popen.returncode`; KILLED: it did not, and was killed."""
FORK = 0
KILLED = 1 << 16


@dataclass(frozen=True, slots=True)
class Ready:
    """The hand is made. `pid`: of the worker's process."""

    pid: int


@dataclass(frozen=True, slots=True)
class Told:
    """What a hand tells while it works."""

    content: Any


@dataclass(frozen=True, slots=True)
class Done:
    """An order's answer."""

    content: Any


_connection: Connection[Any, Any] | None = None
"""Of the worker that this process is."""


def tell(content: Any) -> None:
    """Tell whoever has given an order how it goes. Nobody hears it if this process is no worker's own."""
    if _connection is not None:
        _connection.send(Told(content))


def serve(descriptor: int, folder: str, patience: float) -> None:
    """Be a worker until the other end is closed. See `process.Processes`."""
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with_parent, args=(descriptor, folder, patience), daemon=True).start()
    if patience:
        signal.signal(signal.SIGTERM, _terminated)
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        spawn.prepare(connection.recv())
        _work(connection)
    except (EOFError, ConnectionError):
        if (
            not patience
        ):  # at once: as long as the error is there, so is the hand, and what it has open is not closed
            os.killpg(0, signal.SIGKILL)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        if _closed(descriptor, 0):
            os.killpg(0, signal.SIGKILL)


def _closed(descriptor: int, milliseconds: int | None = None) -> bool:
    """Wait until the other end is closed, or so long."""
    poll = select.poll()
    poll.register(descriptor, 0)  # that the other end is closed is told always
    return bool(poll.poll(milliseconds))


def _end_with_parent(descriptor: int, folder: str, patience: float) -> None:
    """End this process, with what it started, as soon as the other end is closed, whatever it is doing then.

    A parent that is killed cannot end its children, and one of them may be in a loop without end, or in a library.
    """
    _closed(descriptor)
    if patience:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _terminated(number: int, frame: object) -> None:
    """Unwind: files that were begun are removed."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _work(connection: Connection[Any, Any]) -> None:
    """Make a hand, and let it carry out orders until the other end is closed. Raises EOFError, or ConnectionError."""
    global _connection
    _connection = connection
    make = connection.recv_bytes()
    try:
        hand: Hand = pickle.loads(make)()
    except Exception as error:
        connection.send(Failure.of(error))
        return
    connection.send(Ready(os.getpid()))
    while True:
        connection.send_bytes(_answer(hand, connection.recv_bytes()))


def _answer(hand: Hand, order: bytes) -> bytes:
    try:
        return pickle.dumps(Done(hand.do(pickle.loads(order))), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return pickle.dumps(Failure.of(error))


def serve_forks(descriptor: int, folder: str) -> None:
    """Fork a worker for each request. See `process.Forks`.

    When the other end is closed, all processes of this group are killed, also those in endless loops, and the folder is
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
        gc.freeze()  # a collection would write to shared pages, and copy them
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
        time.sleep(0.05)  # none of them writes any more
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _fork(requests: socket.socket, connection: int, log: int) -> None:
    """Be a worker in a forked process, with this connection; what it writes to standard error goes to the log."""
    try:
        process = os.fork()
    except OSError:  # out of memory: the other end sees the connection close
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
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return KILLED
        time.sleep(0.002)
