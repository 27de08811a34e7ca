"""Workers in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xrlflow.workers.protocol import Kind, MakeHandler, Worker, WorkerError


class InProcess:
    """A factory of workers that do their tasks in this process, when `reply` is called."""

    cores = measuring = 1

    def worker(self, make: MakeHandler, name: str, kind: Kind = Kind.COMPUTE) -> DirectWorker:
        return DirectWorker(make, name)

    def replied(self, workers: Sequence[Worker], seconds: float | None = None) -> list[Worker]:
        return list(workers)

    def close(self) -> None:
        pass


class DirectWorker:
    """A worker in this process."""

    ready = True

    def __init__(self, make: MakeHandler, name: str = "worker") -> None:
        self.name = name
        self.handler = make()
        self._tasks: list[Any] = []

    def begin(self, task: Any) -> None:
        self._tasks = [task]

    def reply(self) -> Any:
        if not self._tasks:
            raise WorkerError(f"{self.name} has no task")
        return self.handler.do(self._tasks.pop())

    def messages(self) -> list[Any]:
        return []

    def release(self) -> None:
        self._tasks = []

    close = release
