"""Handlers of workers for the tests: they are made in other processes."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.workers import Unable, tell


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """An order to add up an array, which is large."""

    array: npt.NDArray[np.float32]
    number: int


class Squarer:
    """Squares numbers, and says in which process. A negative number is an error, a text ends the process.

    `folder`: a file there for each order that is carried out to its end, with the process and the times.
    """

    def __init__(self, folder: str | None = None, seconds: float = 0.0) -> None:
        self._folder, self._seconds = folder, seconds

    def do(self, order: Any) -> tuple[float, int]:
        begin = time.time()
        if isinstance(order, str):
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(order, Sum):
            assert not order.array.flags.writeable
            return float(order.array.sum()) + order.number, os.getpid()
        if order < 0:
            raise ValueError(f"{order} is negative")
        time.sleep(self._seconds)
        if self._folder is not None:
            note = f"{os.getpid()} {socket.gethostname()} {begin} {time.time()}"
            Path(self._folder, f"{order}.{os.getpid()}").write_text(note)
        return float(order**2), os.getpid()


class Dying:
    """Ends its process at the first order, as long as there is no file of this name."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def do(self, order: int) -> int:
        if order == 3 and not self._path.exists():
            self._path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return order


class NodeOf:
    """Says on which node it is, and when it worked."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def do(self, order: int) -> tuple[str, float, float]:
        import ray

        begin = time.time()
        time.sleep(self._seconds)
        return ray.get_runtime_context().get_node_id(), begin, time.time()


def broken() -> Any:
    raise ValueError("there is no hand")


class Doing:
    """Does what it is told. `path`: of a file, or of a folder."""

    def __init__(self, path: str = "") -> None:
        self._path = Path(path)

    def do(self, order: Any) -> Any:
        if isinstance(order, Path):
            return self._start_another(order)
        return getattr(self, f"_{order.replace(' ', '_')}")()

    def _start_another(self, pids: Path) -> None:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
            pids.with_suffix(".new").write_text(f"{os.getpid()} {other.pid}")
            pids.with_suffix(".new").rename(pids)

    def _abort(self) -> None:
        message = (
            "terminate called after throwing an instance of 'std::x'\n  what():  no luck\n*** somewhere\n"
        )
        os.write(2, message.encode())
        os.abort()

    def _leave(self) -> None:
        os.write(2, b"something\nthe last line\n")
        os._exit(3)

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _fail(self) -> None:
        raise KeyError("a mistake")

    def _process(self) -> int:
        return os.getpid()

    def _lambda(self) -> Any:
        return lambda: 0

    def _unreadable(self) -> Any:
        return Unreadable()

    def _sleep(self) -> None:
        time.sleep(600)

    def _busy(self) -> None:
        while True:
            pass

    def _hold_the_lock(self) -> None:
        hold_the_lock()

    def _tell(self) -> str:
        tell("one")
        time.sleep(0.8)
        tell("two")
        return "told"

    def _unable(self) -> str:
        if not self._path.exists():
            self._path.touch()
            raise Unable("it is gone")
        return "able"

    def _once(self) -> str:
        if not self._path.exists():
            self._path.touch()
            time.sleep(600)
        return "in time"

    def _leave_behind(self) -> str:
        """A file, and a process."""
        Path(tempfile.mkdtemp(), str(self._path)).touch()
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return f"{os.getpid()} {other.pid}"

    def _unwind(self) -> None:
        try:
            (self._path / "begun").touch()
            time.sleep(600)
        finally:
            (self._path / "unwound").touch()


class Unreadable:
    """What cannot be read where it is sent."""

    def __reduce__(self) -> Any:
        return unread, ()


def unread() -> None:
    raise KeyError("it cannot be read")


class Meeting:
    """Waits until both of two workers have a task."""

    def __init__(self, folder: str, number: int) -> None:
        self._folder, self._number = Path(folder), number

    def do(self, order: Any) -> str:
        (self._folder / str(self._number)).touch()
        end = time.monotonic() + 30.0
        while not (self._folder / str(1 - self._number)).exists():
            assert time.monotonic() < end, "nobody came"
            time.sleep(0.01)
        return "met"


class Doubler:
    """Returns twice what it is given."""

    def do(self, order: Any) -> Any:
        return 2 * order


def aborting() -> Any:
    os.abort()


def never_made() -> Any:
    time.sleep(600)


def hold_the_lock() -> None:
    """An endless loop in C, in which no thread of Python runs."""
    sum(itertools.repeat(0))


def made_later(folder: str, count: int) -> Doing:
    """A handler; the processes of the first ones are killed."""
    Path(folder, str(os.getpid())).touch()
    if len(os.listdir(folder)) <= count:
        os.kill(os.getpid(), signal.SIGKILL)
    return Doing()
