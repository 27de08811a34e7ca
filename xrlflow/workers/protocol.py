"""The interfaces of workers and of the factories that start them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


class WorkerError(RuntimeError):
    """A worker failed, or no worker can be started. The message is one line; a note has the traceback of the worker."""


class WorkerLost(WorkerError):
    """A worker's process or machine ended. Its task can be given to another worker.

    `how`: how the process ended, if that is known: the words that follow "it ended", such as "by SIGSEGV" or "with
    status 3: its last error".
    """

    def __init__(self, text: str, how: str = "") -> None:
        super().__init__(text)
        self.how = how


class WorkerLate(WorkerLost):
    """A worker was ended because it took too long."""


class Unable(Exception):
    """Raised by a handler that can do no more tasks, because a resource is gone. Its worker is not replaced, and
    another worker gets the task.
    """


class WorkerUnable(WorkerError):
    """A worker's handler raised Unable."""


class Handler(Protocol):
    """An object that does tasks inside a worker. It changes neither a task nor the arrays in it."""

    def do(self, task: Any) -> Any: ...


MakeHandler = Callable[[], Handler]
"""A function that creates a handler in the worker's process. It is pickled and sent to that process, so it is a
function of a module, or an object with `__call__`.
"""


class Kind(Enum):
    """The kind of work that a worker does, on which it depends where the worker may run."""

    COMPUTE = "compute"  # occupies a processor core
    WAIT = "wait"  # mostly waits, and occupies no core
    MEASURE = "measure"  # measures times: there is at most one on a machine


class Worker(Protocol):
    """Does one task at a time: call `begin`, then `reply`. `ready`: whether its handler was created, as far as is
    known.
    """

    name: str
    ready: bool

    def begin(self, task: Any) -> None:
        """Give the worker a task. Raises WorkerLost if the worker is gone."""
        ...

    def reply(self) -> Any:
        """Wait for the reply. Raises WorkerLost if the worker is gone, WorkerError if the task or the handler
        failed."""
        ...

    def messages(self) -> list[Any]:
        """The messages that its handler has sent (see `tell`) since the last call."""
        ...

    def release(self) -> None:
        """Announce that the worker is not needed any more. It still has to be closed."""
        ...

    def close(self) -> None:
        """End the worker, even if it is busy. A second call does nothing."""
        ...


class WorkerFactory(Protocol):
    """Starts workers."""

    @property
    def cores(self) -> int:
        """How many of its workers may compute at a time."""
        ...

    @property
    def measuring(self) -> int:
        """How many of its workers may measure at a time: one on each machine that measures times."""
        ...

    def worker(self, make: MakeHandler, name: str, kind: Kind = Kind.COMPUTE) -> Worker:
        """Start a worker. It may not be ready yet when this returns. Raises WorkerError if there is no room for it."""
        ...

    def replied(self, workers: Sequence[Worker], seconds: float | None = None) -> list[Worker]:
        """Wait until some of these workers, which all have a task, have replied or are lost, and return those that
        have or are. The result is empty after `seconds`, and when a worker only became ready or sent a message.
        """
        ...

    def close(self) -> None:
        """End all workers and processes that the factory has started."""
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in a worker, as an object that can be pickled."""

    error: str
    traceback: str
    unable: bool = False

    @staticmethod
    def of(error: Exception) -> Failure:
        if isinstance(error, Unable):
            return Failure(str(error), "", unable=True)
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())

    def as_error(self, name: str) -> WorkerError:
        """The error as the caller of the worker raises it."""
        if self.unable:
            return WorkerUnable(self.error)
        failed = WorkerError(f"{name} failed: {self.error}")
        if sys.version_info >= (3, 11):
            failed.add_note(self.traceback)
        return failed


def own_version() -> str:
    """The version of this package. The package itself is loaded already. It may not be imported in this module,
    because it imports upper layers.
    """
    return str(sys.modules[__name__.partition(".")[0]].__version__)
