"""What a worker is, and what a place that makes workers is."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


class WorkerError(RuntimeError):
    """A worker failed, or none can be had. One line; a note has the traceback of the worker."""


class WorkerLost(WorkerError):
    """A worker's process or machine ended. Another worker can be given what it was asked.

    `how`: how the process ended, if that is known: what follows "it ended", such as "by SIGSEGV" or "with status 3: its
    last words".
    """

    def __init__(self, text: str, how: str = "") -> None:
        super().__init__(text)
        self.how = how


class WorkerLate(WorkerLost):
    """A worker was ended, because it took too long."""


class Unable(Exception):
    """A hand can do nothing more, because what it works with is gone, and its worker is not replaced. The workers that
    are left may do what it was asked."""


class WorkerUnable(WorkerError):
    """A worker's hand raised Unable."""


class Hand(Protocol):
    """Carries out orders where a worker is. It never changes an order, nor the arrays in it."""

    def do(self, order: Any) -> Any: ...


MakeHand = Callable[[], Hand]
"""Makes a hand in the worker's process. It is pickled and sent there, so it is a module's function or an object."""


class Kind(Enum):
    """What a worker does, and so where it may be.

    COMPUTE: takes a processor core. WAIT: waits, and takes none. MEASURE: takes times; no other worker of this kind is
    on its machine at the same time.
    """

    COMPUTE = "compute"
    WAIT = "wait"
    MEASURE = "measure"


class Worker(Protocol):
    """Carries out one order at a time: call `begin`, then `answer`. `ready`: its hand is made, as far as is known."""

    name: str
    ready: bool

    def begin(self, order: Any) -> None:
        """Give it an order. Raises WorkerLost if it is gone."""
        ...

    def answer(self) -> Any:
        """Wait for the answer. Raises WorkerLost if the worker is gone, WorkerError if the order or the hand failed."""
        ...

    def said(self) -> list[Any]:
        """What its hand has told (see `tell`) since the last call."""
        ...

    def release(self) -> None:
        """Say that it is not needed any more. It still has to be closed."""
        ...

    def close(self) -> None:
        """End it, whatever it does. A second call does nothing."""
        ...


class Place(Protocol):
    """Makes workers."""

    @property
    def cores(self) -> int:
        """How many workers may compute at a time."""
        ...

    @property
    def measuring(self) -> int:
        """How many workers may measure at a time: one on each machine that takes times."""
        ...

    def worker(self, make: MakeHand, name: str, kind: Kind = Kind.COMPUTE) -> Worker:
        """A new worker. It may still be starting when this returns. Raises WorkerError if there is no room for it."""
        ...

    def answered(self, workers: Sequence[Worker], seconds: float | None = None) -> list[Worker]:
        """Wait until some of these, which all have an order, need not be waited for, and return those; none after
        `seconds`, or when one has only become ready or told something."""
        ...

    def close(self) -> None:
        """End what the place has started."""
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in a worker."""

    error: str
    traceback: str
    unable: bool = False

    @staticmethod
    def of(error: Exception) -> Failure:
        if isinstance(error, Unable):
            return Failure(str(error), "", unable=True)
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())

    def as_error(self, name: str) -> WorkerError:
        """The error as the side that asked reports it."""
        if self.unable:
            return WorkerUnable(self.error)
        failed = WorkerError(f"{name} failed: {self.error}")
        if sys.version_info >= (3, 11):
            failed.add_note(self.traceback)
        return failed


def own_version() -> str:
    """The version of this package. Its root is loaded, and is not imported here: it knows the layers above."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)
