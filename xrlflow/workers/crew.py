"""Workers of one kind that take their orders from one queue."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xrlflow.workers.protocol import Kind, MakeHand, Place, Worker, WorkerError, WorkerLost

if TYPE_CHECKING:
    from typing_extensions import Self

ATTEMPTS = 3
"""An order that so many workers were lost over, one after another, is not given again."""

Instead = Callable[[Any, WorkerError], Any]
"""What is answered to an order that was given up."""


@dataclass(slots=True)
class _Duty:
    """An order, its number, and how many workers were lost over it."""

    number: int
    order: Any
    lost: int = 0


@dataclass(slots=True)
class _Queue:
    """Orders that nobody works on. `again`: those whose worker was lost. `over`: what is answered `instead` of those
    that were given up."""

    source: Iterator[_Duty]
    instead: Instead | None
    again: deque[_Duty] = field(default_factory=deque)
    over: deque[tuple[int, Any]] = field(default_factory=deque)

    def next(self) -> _Duty | None:
        return self.again.popleft() if self.again else next(self.source, None)


class Crew:
    """`count` workers of a place. Use it in a `with` statement, or close it. Workers start when there is work.

    A worker that is lost is replaced. Its order is given again, so that each order has one answer. If a place has no
    room for another worker, those that are left do the work.
    """

    def __init__(
        self, place: Place, make: MakeHand, count: int, name: str = "worker", kind: Kind = Kind.COMPUTE
    ) -> None:
        if count < 1:
            raise ValueError(f"a crew needs workers, not {count}")
        self._place, self._make, self._count, self._name, self._kind = place, make, count, name, kind
        self._workers: list[Worker] = []
        self._made = 0

    def work(
        self, orders: Iterator[Any], until: float = math.inf, instead: Instead | None = None
    ) -> Generator[tuple[int, Any], None, None]:
        """The answers, each with the number of its order, as they come. No order begins after `until` (time.monotonic).

        An order over which three workers were lost is answered by `instead(order, loss)`. If the generator is closed
        early, workers that are busy are ended. Raises WorkerError if a hand fails, if there is no `instead`, or if no
        worker is left.
        """
        queue = _Queue((_Duty(number, order) for number, order in enumerate(orders)), instead)
        busy: dict[int, tuple[Worker, _Duty]] = {}
        try:
            while True:
                self._give(queue, busy, until)
                while queue.over:
                    yield queue.over.popleft()
                if not busy:
                    return
                for worker in self._place.answered([worker for worker, _ in busy.values()]):
                    _, duty = busy.pop(id(worker))
                    try:
                        answer = worker.answer()
                    except WorkerLost as lost:
                        self._lost(worker, duty, queue, lost)
                    except BaseException:
                        self._end(worker)
                        raise
                    else:
                        yield duty.number, answer
        finally:
            for worker, _ in busy.values():
                self._end(worker)

    def _give(
        self,
        queue: _Queue,
        busy: dict[int, tuple[Worker, _Duty]],
        until: float,
    ) -> None:
        """Give orders to all that have none, while there are any."""
        while len(busy) < self._count and time.monotonic() < until:
            duty = queue.next()
            if duty is None:
                return
            idle = [worker for worker in self._workers if id(worker) not in busy]
            try:
                worker = idle[0] if idle else self._another(bool(busy))
            except BaseException:
                queue.again.append(duty)
                raise
            if worker is None:  # no room for another one: it waits for one of the busy
                queue.again.appendleft(duty)
                return
            try:
                worker.begin(duty.order)
            except WorkerLost as lost:
                self._lost(worker, duty, queue, lost)
            else:
                busy[id(worker)] = (worker, duty)

    def _another(self, others: bool) -> Worker | None:
        """A new worker. None if there is no room for it and there are others."""
        try:
            worker = self._place.worker(self._make, f"{self._name} {self._made}", self._kind)
        except WorkerError:
            if not others:
                raise
            return None
        self._made += 1
        self._workers.append(worker)
        return worker

    def _lost(self, worker: Worker, duty: _Duty, queue: _Queue, lost: WorkerLost) -> None:
        self._end(worker)
        duty.lost += 1
        if duty.lost < ATTEMPTS:
            queue.again.append(duty)
            return
        given_up = WorkerError(f"{lost} ({ATTEMPTS} workers were lost over one order)")
        if queue.instead is None:
            raise given_up from lost
        queue.over.append((duty.number, queue.instead(duty.order, given_up)))

    def _end(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.close()

    def close(self) -> None:
        """End the workers. The crew may be used again, with new ones."""
        for worker in list(self._workers):
            self._end(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
