"""Workers on this machine: in this process, or in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from xrlflow.workers.protocol import Failure, Kind, MakeHand, Worker, WorkerError, WorkerLost


class InProcess:
    """Makes workers that work in this process, when they are asked for the answer."""

    cores = measuring = 1

    def worker(self, make: MakeHand, name: str, kind: Kind = Kind.COMPUTE) -> DirectWorker:
        return DirectWorker(make, name)

    def answered(self, workers: Sequence[Worker], seconds: float | None = None) -> list[Worker]:
        return list(workers)

    def close(self) -> None:
        pass


class DirectWorker:
    """Works in this process."""

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

    def close(self) -> None:
        self._orders = []


class Processes:
    """Makes workers in processes of this machine. `cores`: how many may compute at a time; by default all."""

    measuring = 1

    def __init__(self, cores: int | None = None) -> None:
        self.cores = cores or os.cpu_count() or 1

    def worker(self, make: MakeHand, name: str, kind: Kind = Kind.COMPUTE) -> ProcessWorker:
        return ProcessWorker(make, name)

    def answered(self, workers: Sequence[Worker], seconds: float | None = None) -> list[Worker]:
        found = [w for w in workers if isinstance(w, ProcessWorker)]
        ready = set(wait([end for worker in found for end in worker.ends], seconds))
        return [worker for worker in found if not ready.isdisjoint(worker.ends)]

    def close(self) -> None:
        pass


class ProcessWorker:
    """Works in a process of its own. That process ends whenever this one ends."""

    def __init__(self, make: MakeHand, name: str = "worker") -> None:
        # Threads of torch and of runtimes do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make), name=name, daemon=True)
        self.process.start()
        theirs.close()

    @property
    def ends(self) -> tuple[Connection[Any, Any], int]:
        """What is readable when there is an answer, and when the process has ended."""
        return self._connection, self.process.sentinel

    def begin(self, order: Any) -> None:
        try:
            self._connection.send(order)
        except OSError:  # the process is dead; its last message says why
            self.answer()
            raise WorkerLost(f"{self.name} takes no orders") from None

    def answer(self) -> Any:
        wait(self.ends)
        try:
            if not self._connection.poll():
                raise EOFError
            found = self._connection.recv()
        except (EOFError, OSError):
            self.process.join(5.0)
            raise WorkerLost(f"{self.name} ended with exit code {self.process.exitcode}") from None
        if isinstance(found, Failure):
            raise found.as_error(self.name)
        return found

    def close(self) -> None:
        self._connection.close()
        self.process.terminate()
        self.process.join(5.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(connection: Connection[Any, Any], make: MakeHand) -> None:
    """Run a worker's process: carry out orders until the other end closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that gives the orders handles Ctrl-C
    try:
        hand = make()
        while True:
            try:
                order = connection.recv()
            except EOFError:
                return
            connection.send(hand.do(order))
    except BrokenPipeError:
        return
    except Exception as error:
        connection.send(Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))
