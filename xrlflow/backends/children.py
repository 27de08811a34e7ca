"""A child process that calls functions which may crash or take too long."""

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
    """A child process ended before it returned a result. The message has the last lines that it wrote."""


class Child:
    """A process that calls functions of importable modules, one after another, and that can be ended at any moment.

    It starts with the first call, and starts again with the next call after it has ended. Use it in a `with` statement.
    It ends with this process, and Ctrl-C does not reach it. One thread at a time may use it. `variables`: variables of
    its environment.
    """

    def __init__(self, **variables: str) -> None:
        self._processes = Processes(variables=variables)
        self._worker: ProcessWorker | None = None
        self._prepares = False  # nobody has read the result of `prepare`

    def prepare(self, function: Callable[[], None]) -> None:
        """Start the process and let it call a function first, without waiting for it. Errors of the function are
        ignored."""
        with contextlib.suppress(WorkerLost):  # the next call finds out that the process has ended
            self._begin(function, ())
            self._prepares = True

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the process and return its result. Function and arguments are pickled.

        Raises OutOfTime if there is no result when the time of `deadline` is over, ChildDied if the process ends,
        BackendError if the function raises it, and RuntimeError for any other error of the function. The process is
        ended after OutOfTime, ChildDied and Ctrl-C.
        """
        if deadline.over():
            raise OutOfTime("the time was over before it began")
        try:
            worker = self._begin(function, arguments)
            result: T | BackendError = worker.reply(deadline.until())
        except WorkerLate:
            raise OutOfTime("it was ended: its time was over") from None
        except WorkerLost as lost:
            raise ChildDied(f"its process ended {lost.how}") from None
        except KeyboardInterrupt:
            self.close()
            raise
        if isinstance(result, BackendError):
            raise result
        return result

    def close(self) -> None:
        """End the process and all that it started. A second call does nothing."""
        if self._worker is not None:
            self._worker.close()
        self._worker, self._prepares = None, False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> ProcessWorker:
        if self._worker is None or self._worker.closed:
            self._prepares = False
            try:
                self._worker = self._processes.worker(_Caller, "its process")
            except WorkerError as error:
                raise BackendError(str(error)) from error
        if self._prepares:
            self._prepares = False
            try:
                self._worker.reply(deadline.until())
            except WorkerLost:
                raise
            except WorkerError:
                pass
        self._worker.begin((function, arguments))
        return self._worker


class _Caller:
    """The handler in the process of `Child`, which calls functions. A BackendError is returned, so that its message
    reaches the user."""

    def do(self, task: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        function, arguments = task
        try:
            return function(*arguments)
        except BackendError as error:
            return BackendError(str(error))
