"""Worker processes that may crash. If a worker dies, the reply to its request is the reason, and another worker
starts.

Workers start on first use. The requests of a batch are distributed over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xrlflow.passes.compiler import CompilerError
from xrlflow.workers import MakeHandler, Processes, Terms, WorkerError, WorkerLate, WorkerLost, WorkerPool

if TYPE_CHECKING:
    from typing_extensions import Self

_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Died:
    """The reply to a request that crashed its worker, or exceeded its time limit. `reason`: one line."""

    reason: str


class Pool:
    """Workers whose handlers reply to requests (see `worker.Xla`).

    `seconds`: the time limit of a request. `variables`: environment variables of the workers. A worker is replaced
    after `uses` requests, because XLA does not release all memory.
    """

    def __init__(
        self,
        make: MakeHandler,
        workers: int,
        seconds: float,
        uses: int = 2000,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        if min(workers, uses) < 1 or seconds <= 0:
            raise ValueError(f"a pool needs workers, uses and seconds: {workers}, {uses}, {seconds}")
        terms = Terms(seconds, _START_SECONDS, uses, attempts=1)
        self._workers = WorkerPool(Processes(variables=variables), make, workers, terms=terms)
        self._seconds = seconds
        self._closed = False
        self.deaths = 0

    def ask(self, request: Any) -> Any:
        """The reply to one request."""
        return self.ask_each([request])[0]

    def ask_each(self, requests: Sequence[Any]) -> list[Any]:
        """The replies to several requests, in their order. The reply to a request that crashed its worker is `Died`.

        Raises CompilerError if no worker starts.
        """
        if self._closed:
            raise CompilerError("the pool is closed")
        try:
            answers = dict(self._workers.work(iter(requests), fallback=self._died))
        except WorkerError as error:
            raise CompilerError(str(error)) from error
        return [answers[number] for number in range(len(requests))]

    def _died(self, request: Any, error: WorkerError) -> Died:
        self.deaths += 1
        if isinstance(error, WorkerLate):
            return Died(f"it took more than {self._seconds:g} s")
        assert isinstance(error, WorkerLost)
        return Died(f"the worker ended {error.how}")

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        self._workers.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
