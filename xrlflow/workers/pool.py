"""A pool of workers of one kind that take their tasks from one queue."""

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
    MakeHandler,
    Worker,
    WorkerError,
    WorkerFactory,
    WorkerLate,
    WorkerLost,
    WorkerUnable,
)

if TYPE_CHECKING:
    from typing_extensions import Self

ATTEMPTS = 3
"""The default of `Terms.attempts`, and the number of workers in a row that may fail to start."""

Fallback = Callable[[Any, WorkerError], Any]
"""A function that computes the reply to a task that was given up, from the task and the error."""
OnMessage = Callable[[int, Any], float]
"""A function that receives a message of a worker: the number of its task, and the content. It returns for how many
seconds the worker may be silent from now on.
"""


@dataclass(frozen=True, slots=True)
class Terms:
    """The limits for the workers of a pool."""

    seconds: float = math.inf
    """A worker that sends nothing for longer than this while it does a task is ended, and the task is given up."""
    start: float = math.inf
    """Seconds that a worker may take to become ready. After ATTEMPTS failures in a row, WorkerError is raised."""
    uses: float = math.inf
    """A worker is replaced after this many tasks, because libraries do not release all memory."""
    attempts: int = ATTEMPTS
    """A task is given up after this many workers were lost while they did it."""
    scarce: bool = False
    """Whether workers need a scarce resource. If so, a worker that was silent for too long counts as having lost the
    resource: it is not replaced, and another worker gets its task.
    """


@dataclass(slots=True)
class _QueuedTask:
    """A task, its number, and how many workers were lost while they did it."""

    number: int
    task: Any
    lost: int = 0


@dataclass(slots=True)
class _Member:
    """A worker of the pool, with its present task. `limit`: until when it may be silent (time.monotonic). `attempt`:
    how many workers in a row had failed to start when it was started.
    """

    worker: Worker
    limit: float
    attempt: int
    uses: int = 0
    queued: _QueuedTask | None = None
    ready: bool = False


@dataclass(slots=True)
class _Queue:
    """Tasks that no worker has. `again`: the tasks whose worker was lost. `over`: the replies of the fallback to tasks
    that were given up.
    """

    source: Iterator[_QueuedTask]
    fallback: Fallback | None = None
    on_message: OnMessage | None = None
    again: deque[_QueuedTask] = field(default_factory=deque)
    over: deque[tuple[int, Any]] = field(default_factory=deque)

    def next(self) -> _QueuedTask | None:
        return self.again.popleft() if self.again else next(self.source, None)

    def give_up(self, queued: _QueuedTask, error: WorkerError) -> None:
        if self.fallback is None:
            raise error
        self.over.append((queued.number, self.fallback(queued.task, error)))


class WorkerPool:
    """`count` workers of a factory. Use it in a `with` statement, or close it. Workers start when there are tasks.

    A worker that is lost is replaced, and its task is given to another worker, so that each task has one reply. If the
    factory has no room for another worker, the remaining workers do the tasks.
    """

    def __init__(
        self,
        factory: WorkerFactory,
        make: MakeHandler,
        count: int,
        name: str = "worker",
        kind: Kind = Kind.COMPUTE,
        terms: Terms | None = None,
    ) -> None:
        if count < 1:
            raise ValueError(f"a pool needs workers, not {count}")
        self.count = count
        self._factory, self._make, self._name, self._kind = factory, make, name, kind
        self._terms = Terms() if terms is None else terms
        self._members: list[_Member] = []
        self._numbers = itertools.count()
        self._failed_starts = 0

    @property
    def workers(self) -> list[Worker]:
        return [member.worker for member in self._members]

    def work(
        self,
        tasks: Iterator[Any],
        until: float = math.inf,
        fallback: Fallback | None = None,
        on_message: OnMessage | None = None,
    ) -> Generator[tuple[int, Any], None, None]:
        """Yield the replies as they arrive, each with the number of its task. No task begins after `until`
        (time.monotonic).

        The reply to a task that is given up (see `Terms`) is `fallback(task, error)`. If the generator is closed
        early, busy workers are ended. Raises WorkerError if a handler fails, if a task is given up without `fallback`,
        or if no worker is left.
        """
        queued_tasks = (_QueuedTask(number, task) for number, task in enumerate(tasks))
        queue = _Queue(queued_tasks, fallback, on_message)
        try:
            while True:
                self._give(queue, until)
                while queue.over:
                    yield queue.over.popleft()
                if not (busy := self._busy()):
                    return
                yield from self._receive(busy, queue)
        finally:
            self._end_all(self._busy())

    def settle(self) -> None:
        """Start all workers, and wait until they are ready. Raises WorkerError."""
        while True:
            while len(self._members) < self.count and self._another() is not None:
                pass
            starting = [member for member in self._members if not member.worker.ready]
            if not starting:
                return
            for _ in self._receive(starting, _Queue(iter(()))):
                pass

    def _busy(self) -> list[_Member]:
        return [member for member in self._members if member.queued is not None]

    def _give(self, queue: _Queue, until: float) -> None:
        """Give tasks to all idle workers, while there are tasks."""
        while len(self._busy()) < self.count and time.monotonic() < until:
            queued = queue.next()
            if queued is None:
                return
            idle = [member for member in self._members if member.queued is None]
            try:
                member = idle[0] if idle else self._another()
            except BaseException:
                queue.again.append(queued)
                raise
            if member is None:  # there is no room for another worker: the task waits for a busy worker
                queue.again.appendleft(queued)
                return
            try:
                member.worker.begin(queued.task)
            except WorkerLost as lost:  # the worker was lost while it was idle
                queue.again.append(queued)
                self._lost(member, queue, lost)
            except BaseException:
                self._end(member)
                raise
            else:
                member.queued, member.uses = queued, member.uses + 1
                member.limit = time.monotonic() + (
                    self._terms.seconds if member.worker.ready else self._terms.start
                )

    def _another(self) -> _Member | None:
        """A new worker; None if there is no room for it and the pool has other workers."""
        try:
            worker = self._factory.worker(self._make, f"{self._name} {next(self._numbers)}", self._kind)
        except WorkerError:
            if not self._members:
                raise
            return None
        member = _Member(worker, time.monotonic() + self._terms.start, self._failed_starts)
        self._members.append(member)
        return member

    def _receive(self, members: Sequence[_Member], queue: _Queue) -> Iterator[tuple[int, Any]]:
        """Wait until one of these workers replies, sends a message, becomes ready, is lost, or was silent for too long.
        Yields replies."""
        remaining = min(member.limit for member in members) - time.monotonic()
        replied = self._factory.replied(
            [member.worker for member in members], None if math.isinf(remaining) else max(remaining, 0.0)
        )
        for member in members:
            self._note(member, queue)
            if member.worker in replied:
                try:
                    reply = member.worker.reply()
                except WorkerLost as lost:
                    self._lost(member, queue, lost)
                except WorkerUnable as unable:
                    self._retire(member, queue, unable)
                except BaseException:
                    self._end(member)
                    raise
                else:
                    queued, member.queued = member.queued, None
                    if member.uses >= self._terms.uses:
                        self._end(member)
                    assert queued is not None
                    yield queued.number, reply
            elif member.limit <= time.monotonic():
                self._late(member, queue)

    def _note(self, member: _Member, queue: _Queue) -> None:
        """Receive a worker's messages, and note whether the worker is ready."""
        if member.worker.ready and not member.ready:
            member.ready, self._failed_starts = True, 0
            member.limit = time.monotonic() + self._terms.seconds
        for content in member.worker.messages():
            if queue.on_message is not None and member.queued is not None:
                member.limit = time.monotonic() + queue.on_message(member.queued.number, content)

    def _lost(self, member: _Member, queue: _Queue, lost: WorkerLost) -> None:
        """Handle the loss of a worker. If it was not ready yet, its task does not count as the cause."""
        self._end(member)
        queued = member.queued
        if not member.worker.ready:
            if member.attempt >= self._failed_starts:  # several that fail together count once
                self._failed_starts += 1
            if self._failed_starts >= ATTEMPTS:
                raise WorkerError(f"no {self._name} can be started: {lost}") from lost
        elif queued is not None:
            queued.lost += 1
            if queued.lost >= self._terms.attempts:
                many = f" ({queued.lost} workers were lost over one task)" if queued.lost > 1 else ""
                queue.give_up(queued, WorkerLost(f"{lost}{many}", f"{lost.how}{many}"))
                return
        if queued is not None:
            queue.again.append(queued)

    def _late(self, member: _Member, queue: _Queue) -> None:
        """Handle a worker that was silent for too long."""
        if not member.worker.ready:
            self._lost(member, queue, WorkerLate(f"it did not start in {self._terms.start:g} s"))
            return
        late = WorkerLate(f"{member.worker.name} took longer than {self._terms.seconds:g} s")
        if self._terms.scarce:
            self._retire(member, queue, late)
            return
        self._end(member)
        if member.queued is not None:
            queue.give_up(member.queued, late)

    def _retire(self, member: _Member, queue: _Queue, error: WorkerError) -> None:
        """End a worker without replacing it. Another worker gets its task."""
        self._end(member)
        self.count -= 1
        if not self.count:
            self.count = 1
            raise error
        if member.queued is not None:
            queue.again.append(member.queued)

    def _end(self, member: _Member) -> None:
        self._members.remove(member)
        member.worker.close()

    def close(self) -> None:
        """End the workers. The pool may be used again, with new workers."""
        self._end_all(list(self._members))

    def _end_all(self, members: Sequence[_Member]) -> None:
        """End several members at once, in the time that one of them needs."""
        for member in members:
            member.worker.release()
        for member in members:
            self._end(member)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
