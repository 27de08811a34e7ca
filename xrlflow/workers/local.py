"""Workers in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xrlflow.workers.protocol import Kind, MakeHand, Worker, WorkerError


class InProcess:
    """A factory of workers that do their tasks in this process, when they are asked for the reply."""

    cores = measuring = 1

    def worker(self, make: MakeHand, name: str, kind: Kind = Kind.COMPUTE) -> DirectWorker:
        return DirectWorker(make, name)

    def answered(self, workers: Sequence[Worker], seconds: float | None = None) -> list[Worker]:
        return list(workers)

    def close(self) -> None:
        pass


class DirectWorker:
    """A worker in this process."""

    ready = True

    def __init__(self, make: MakeHand, name: str = "worker") -> None:
        self.name = name
        self.hand = make()
        self._orders: list[Any] = []

    def begin(self, order: Any) -> None:
        self._orders = [order]

    def answer(self) -> Any:
        if not self._orders:
            raise WorkerError(f"{self.name} has no order")
        return self.hand.do(self._orders.pop())

    def said(self) -> list[Any]:
        return []

    def release(self) -> None:
        self._orders = []

    close = release
