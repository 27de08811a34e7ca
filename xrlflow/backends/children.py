"""Processes of our own: Python, with the package that is running here."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, TypeVar

from xrlflow.backends.protocol import BackendError, OutOfTime, one_line
from xrlflow.common import deadline
from xrlflow.workers.process import command, environment

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class ChildDied(BackendError):
    """A process of ours ended before it answered. The message has its last words."""


def serve_in_child(
    function: Callable[..., None], descriptor: int, *texts: str, log: IO[bytes], **variables: str
) -> subprocess.Popen[bytes]:
    """A process that calls a function of a module of ours with a descriptor, which it inherits, and these texts.

    What it says on standard error goes to `log`. Ctrl-C does not reach it. `variables`: of its environment. Raises
    OSError where no process can be started.
    """
    return subprocess.Popen(
        command(function.__module__, function.__name__, descriptor, *texts),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,
        pass_fds=(descriptor,),
        start_new_session=True,
        env=environment(**variables),
    )


def end_with_parent(descriptor: int) -> None:
    """End this process as soon as the other end of a socket is closed, whatever it is doing then.

    A parent that is killed cannot end its children, and one of them may be in a loop without end.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # that the other end is closed is told always
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Child:
    """A process that calls functions of modules of ours, one after another, and can be ended whatever it does then.

    It starts with the first call, and again with the next one after it ended. Use it in a `with` statement. It ends
    with this process, and Ctrl-C does not reach it. `variables`: of its environment.
    """

    def __init__(self, **variables: str) -> None:
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._log: IO[bytes] | None = None
        self._unheard = 0  # answers that nobody waits for

    def prepare(self, function: Callable[[], None]) -> None:
        """Start the process, and let it call a function first, whatever comes of it. It is not waited for."""
        connection = self._started()
        with contextlib.suppress(BrokenPipeError):  # it has ended: the next call finds out
            connection.send_bytes(pickle.dumps((function, ())))
            self._unheard += 1

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What the function returns there. Functions and arguments are pickled.

        Raises OutOfTime if there is no answer when the time is over (`deadline`), ChildDied if the process ends,
        BackendError if the function does, and RuntimeError for any other error of the function. After an error that is
        none of the function's, and after Ctrl-C, the process is ended.
        """
        if deadline.over():
            raise OutOfTime("the time was over before it began")
        order = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
        try:
            connection = self._started()
            with contextlib.suppress(BrokenPipeError):  # it has ended: `poll` says so
                connection.send_bytes(order)
            while self._unheard:
                self._answer(connection)
                self._unheard -= 1
            succeeded, answer = self._answer(connection)
        except (EOFError, ConnectionError):
            words = self._last_words()
            self.close()
            raise ChildDied(words) from None
        except BaseException:
            self.close()
            raise
        if succeeded:
            found: T = answer
            return found
        raise answer

    @staticmethod
    def _answer(connection: Connection[Any, Any]) -> tuple[bool, Any]:
        if not connection.poll(None if math.isinf(deadline.until()) else deadline.remaining()):
            raise OutOfTime("it was ended: its time was over")
        found: tuple[bool, Any] = pickle.loads(connection.recv_bytes())
        return found

    def close(self) -> None:
        """End the process and all that it started. A second call does nothing."""
        if self._process is None:
            return
        process, self._process = self._process, None
        self._unheard = 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for end in (self._connection, self._log):
            if end is not None:
                end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> Connection[Any, Any]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._log = tempfile.TemporaryFile()  # noqa: SIM115  (it is read when the process has died)
                self._process = serve_in_child(
                    answer_calls, theirs.fileno(), log=self._log, **self._variables
                )
            self._connection = Connection(ours.detach())
        assert self._connection is not None
        return self._connection

    def _last_words(self) -> str:
        """How the process ended, and the end of what it said."""
        assert self._process is not None
        assert self._log is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        status = self._process.returncode
        how = f"by signal {-status}" if status is not None and status < 0 else f"with status {status}"
        self._log.seek(max(self._log.seek(0, os.SEEK_END) - 300, 0))
        said = one_line(self._log.read().decode(errors="replace"))
        return f"its process ended {how}" + (f": {said}" if said else "")


def answer_calls(descriptor: int) -> None:
    """What a `Child` does: it answers until the other end is closed."""
    end_with_parent(descriptor)
    connection: Connection[Any, Any] = Connection(descriptor)
    while True:
        try:
            order = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        try:
            function, arguments = pickle.loads(order)
            answer: tuple[bool, Any] = (True, function(*arguments))
        except BackendError as error:
            answer = (False, BackendError(str(error)))
        except Exception:
            answer = (False, RuntimeError(traceback.format_exc()))
        connection.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
