"""Workers of one kind that take their orders from one queue."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xrlflow.workers.protocol import (
    Kind,
    MakeHand,
    Place,
    Worker,
    WorkerError,
    WorkerLate,
    WorkerLost,
    WorkerUnable,
)

if TYPE_CHECKING:
    from typing_extensions import Self

ATTEMPTS = 3
"""An order that so many workers were lost over, one after another, is not given again."""

Instead = Callable[[Any, WorkerError], Any]
"""What is answered to an order that was given up."""
Heard = Callable[[int, Any], float]
"""What is done with what a worker tells: the number of its order, and what it told. It may then be silent for so many
seconds."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What is expected of workers.

    `seconds`: a worker that is silent for longer over an order is ended, and the order is given up. `start`: seconds
    that it may take to become ready; where so many as ATTEMPTS do not, there is an error. `uses`: it is replaced after
    so many orders, because libraries keep memory. `attempts`: an order over which so many workers were lost is given
    up. `scarce`: what workers need is scarce, and a worker that was silent has lost it: it is not replaced, and the
    order is given to another one.
    """

    seconds: float = math.inf
    start: float = math.inf
    uses: float = math.inf
    attempts: int = ATTEMPTS
    scarce: bool = False


@dataclass(slots=True)
class _Duty:
    """An order, its number, and how many workers were lost over it."""

    number: int
    order: Any
    lost: int = 0


@dataclass(slots=True)
class _Member:
    """A worker, and what it does. `limit`: until when it may be silent (time.monotonic)."""

    worker: Worker
    limit: float
    uses: int = 0
    duty: _Duty | None = None
    ready: bool = False


@dataclass(slots=True)
class _Queue:
    """Orders that nobody works on. `again`: those whose worker was lost. `over`: what is answered `instead` of those
    that were given up."""

    source: Iterator[_Duty]
    instead: Instead | None = None
    heard: Heard | None = None
    again: deque[_Duty] = field(default_factory=deque)
    over: deque[tuple[int, Any]] = field(default_factory=deque)

    def next(self) -> _Duty | None:
        return self.again.popleft() if self.again else next(self.source, None)

    def give_up(self, duty: _Duty, error: WorkerError) -> None:
        if self.instead is None:
            raise error
        self.over.append((duty.number, self.instead(duty.order, error)))


class Crew:
    """`count` workers of a place. Use it in a `with` statement, or close it. Workers start when there is work.

    A worker that is lost is replaced. Its order is given again, so that each order has one answer. If a place has no
    room for another worker, those that are left do the work.
    """

    def __init__(
        self,
        place: Place,
        make: MakeHand,
        count: int,
        name: str = "worker",
        kind: Kind = Kind.COMPUTE,
        terms: Terms | None = None,
    ) -> None:
        if count < 1:
            raise ValueError(f"a crew needs workers, not {count}")
        self.count = count
        self._place, self._make, self._name, self._kind = place, make, name, kind
        self._terms = Terms() if terms is None else terms
        self._members: list[_Member] = []
        self._numbers = itertools.count()
        self._failed_starts = 0

    @property
    def workers(self) -> list[Worker]:
        return [member.worker for member in self._members]

    def work(
        self,
        orders: Iterator[Any],
        until: float = math.inf,
        instead: Instead | None = None,
        heard: Heard | None = None,
    ) -> Generator[tuple[int, Any], None, None]:
        """The answers, each with the number of its order, as they come. No order begins after `until` (time.monotonic).

        An order that is given up (see `Terms`) is answered by `instead(order, loss)`. If the generator is closed early,
        workers that are busy are ended. Raises WorkerError if a hand fails, if there is no `instead`, or if no worker
        is left.
        """
        duties = (_Duty(number, order) for number, order in enumerate(orders))
        queue = _Queue(duties, instead, heard)
        try:
            while True:
                self._give(queue, until)
                while queue.over:
                    yield queue.over.popleft()
                if not (busy := self._busy()):
                    return
                yield from self._hear(busy, queue)
        finally:
            for member in self._busy():
                self._end(member)

    def settle(self) -> None:
        """Wait until there are all workers, and all are ready. Raises WorkerError."""
        while True:
            while len(self._members) < self.count and self._another() is not None:
                pass
            starting = [member for member in self._members if not member.worker.ready]
            if not starting:
                return
            for _ in self._hear(starting, _Queue(iter(()))):
                pass

    def _busy(self) -> list[_Member]:
        return [member for member in self._members if member.duty is not None]

    def _give(self, queue: _Queue, until: float) -> None:
        """Give orders to all that have none, while there are any."""
        while len(self._busy()) < self.count and time.monotonic() < until:
            duty = queue.next()
            if duty is None:
                return
            idle = [member for member in self._members if member.duty is None]
            try:
                member = idle[0] if idle else self._another()
            except BaseException:
                queue.again.append(duty)
                raise
            if member is None:  # no room for another one: it waits for one of the busy
                queue.again.appendleft(duty)
                return
            try:
                member.worker.begin(duty.order)
            except WorkerLost as lost:  # it was lost before
                queue.again.append(duty)
                self._lost(member, queue, lost)
            except BaseException:
                self._end(member)
                raise
            else:
                member.duty, member.uses = duty, member.uses + 1
                member.limit = time.monotonic() + (
                    self._terms.seconds if member.worker.ready else self._terms.start
                )

    def _another(self) -> _Member | None:
        """A new worker. None if there is no room for it and there are others."""
        try:
            worker = self._place.worker(self._make, f"{self._name} {next(self._numbers)}", self._kind)
        except WorkerError:
            if not self._members:
                raise
            return None
        member = _Member(worker, time.monotonic() + self._terms.start)
        self._members.append(member)
        return member

    def _hear(self, members: Sequence[_Member], queue: _Queue) -> Iterator[tuple[int, Any]]:
        """Wait until one of these has an answer, tells something, is ready, is lost, or has been silent for too
        long."""
        left = min(member.limit for member in members) - time.monotonic()
        answered = self._place.answered(
            [member.worker for member in members], None if math.isinf(left) else max(left, 0.0)
        )
        for member in members:
            self._note(member, queue)
            if member.worker in answered:
                try:
                    answer = member.worker.answer()
                except WorkerLost as lost:
                    self._lost(member, queue, lost)
                except WorkerUnable as unable:
                    self._retire(member, queue, unable)
                except BaseException:
                    self._end(member)
                    raise
                else:
                    duty, member.duty = member.duty, None
                    if member.uses >= self._terms.uses:
                        self._end(member)
                    assert duty is not None
                    yield duty.number, answer
            elif member.limit <= time.monotonic():
                self._late(member, queue)

    def _note(self, member: _Member, queue: _Queue) -> None:
        """What a worker has told, and whether it is ready."""
        if member.worker.ready and not member.ready:
            member.ready, self._failed_starts = True, 0
            member.limit = time.monotonic() + self._terms.seconds
        for content in member.worker.said():
            if queue.heard is not None and member.duty is not None:
                member.limit = time.monotonic() + queue.heard(member.duty.number, content)

    def _lost(self, member: _Member, queue: _Queue, lost: WorkerLost) -> None:
        """A worker is gone. Before it was ready, that was not its order's fault."""
        self._end(member)
        duty = member.duty
        if not member.worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= ATTEMPTS:
                raise WorkerError(f"no {self._name} can be started: {lost}") from lost
        elif duty is not None:
            duty.lost += 1
            if duty.lost >= self._terms.attempts:
                many = f" ({duty.lost} workers were lost over one order)" if duty.lost > 1 else ""
                queue.give_up(duty, WorkerLost(f"{lost}{many}", f"{lost.how}{many}"))
                return
        if duty is not None:
            queue.again.append(duty)

    def _late(self, member: _Member, queue: _Queue) -> None:
        """End a worker that has been silent for too long."""
        if not member.worker.ready:
            self._lost(member, queue, WorkerLate(f"it did not start in {self._terms.start:g} s"))
            return
        late = WorkerLate(f"{member.worker.name} took longer than {self._terms.seconds:g} s")
        if self._terms.scarce:
            self._retire(member, queue, late)
            return
        self._end(member)
        if member.duty is not None:
            queue.give_up(member.duty, late)

    def _retire(self, member: _Member, queue: _Queue, error: WorkerError) -> None:
        """End a worker, and do not replace it."""
        self._end(member)
        self.count -= 1
        if not self.count:
            self.count = 1
            raise error
        if member.duty is not None:
            queue.again.append(member.duty)

    def _end(self, member: _Member) -> None:
        self._members.remove(member)
        member.worker.close()

    def close(self) -> None:
        """End the workers. The crew may be used again, with new ones."""
        for worker in self.workers:
            worker.release()
        for member in list(self._members):
            self._end(member)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
