"""A process that functions are called in which may crash, or take too long."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from xrlflow.backends.protocol import BackendError, OutOfTime
from xrlflow.common import deadline
from xrlflow.workers import Processes, ProcessWorker, WorkerError, WorkerLate, WorkerLost

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class ChildDied(BackendError):
    """A process of ours ended before it answered. The message has its last words."""


class Child:
    """A process that calls functions of modules of ours, one after another, and can be ended whatever it does then.

    It starts with the first call, and again with the next one after it ended. Use it in a `with` statement. It ends
    with this process, and Ctrl-C does not reach it. `variables`: of its environment.
    """

    def __init__(self, **variables: str) -> None:
        self._place = Processes(variables=variables)
        self._worker: ProcessWorker | None = None
        self._unheard = 0  # answers that nobody waits for

    def prepare(self, function: Callable[[], None]) -> None:
        """Start the process, and let it call a function first, whatever comes of it. It is not waited for."""
        with contextlib.suppress(WorkerLost):  # the next call finds out
            self._begun(function, ())
            self._unheard += 1

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What the function returns there. Functions and arguments are pickled.

        Raises OutOfTime if there is no answer when the time is over (`deadline`), ChildDied if the process ends,
        BackendError if the function does, and RuntimeError for any other error of the function. After an error that is
        none of the function's, and after Ctrl-C, the process is ended.
        """
        if deadline.over():
            raise OutOfTime("the time was over before it began")
        try:
            worker = self._begun(function, arguments)
            while self._unheard:
                self._unheard -= 1
                try:
                    worker.answer(deadline.until())
                except WorkerLost:
                    raise
                except WorkerError:
                    continue
            found: T | BackendError = worker.answer(deadline.until())
        except WorkerLate:
            raise OutOfTime("it was ended: its time was over") from None
        except WorkerLost as lost:
            raise ChildDied(f"its process ended {lost.how}") from None
        if isinstance(found, BackendError):
            raise found
        return found

    def close(self) -> None:
        """End the process and all that it started. A second call does nothing."""
        if self._worker is not None:
            self._worker.close()
        self._worker, self._unheard = None, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begun(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> ProcessWorker:
        if self._worker is None or self._worker.closed:
            self._unheard = 0
            try:
                self._worker = self._place.worker(_Caller, "its process")
            except WorkerError as error:
                raise BackendError(str(error)) from error
        self._worker.begin((function, arguments))
        return self._worker


class _Caller:
    """Calls functions. An error that is written for users is an answer."""

    def do(self, order: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        function, arguments = order
        try:
            return function(*arguments)
        except BackendError as error:
            return BackendError(str(error))
