"""Worker processes that may crash. A request whose worker dies gets the reason as its answer; another worker starts.

Workers start when they are needed first. Requests of a batch are spread over all of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xrlflow.backends.children import serve_in_child
from xrlflow.passes.compiler import CompilerError

if TYPE_CHECKING:
    from typing_extensions import Self

_START_SECONDS = 120.0
_ATTEMPTS = 3  # to start a worker


@dataclass(frozen=True, slots=True)
class Died:
    """The answer to a request that ended its worker, or exceeded its time limit. `reason`: one line."""

    reason: str


class _Worker:
    """A process and the pipe to it. It says that it is ready before its first answer."""

    def __init__(self, serve: Callable[..., None], variables: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (it is read when the process has died)
        try:
            self.process = serve_in_child(serve, theirs.fileno(), log=self.log, **variables)
        except OSError as error:
            raise CompilerError(f"no worker can be started: {error}") from error
        finally:
            theirs.close()
        self.pipe = Connection(ours.detach())
        self.ready = False
        # The number of the request that it works on, and the request.
        self.task: int | None = None
        self.request: Any = None
        self.deadline = 0.0
        self.end = weakref.finalize(self, _end, self.process, self.pipe)

    def reason(self) -> str:
        """Why the process died: the last error that it printed, or its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - (1 << 16)))
        lines = self.log.read().decode(errors="replace").splitlines()
        # glog: "F1125 10:31:03.766393   11234 file.cc:744] message". C++: "terminate called after ...". Python:
        # the last line of the traceback.
        fatal = [line.partition("] ")[2] for line in lines if line.startswith("F") and "] " in line]
        fatal = fatal or [line for line in lines if line.startswith("terminate called")]
        if not fatal:
            fatal = [line for line in lines if line and not line[0].isspace() and "Error" in line]
        status = self.process.returncode
        if status is not None and status < 0:
            died = f"the worker was ended by {signal.Signals(-status).name}"
        else:
            died = f"the worker exited with status {status}"
        return " ".join(f"{died}: {fatal[-1]}".split())[:300] if fatal else died


def _end(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.wait()


class Pool:
    """Workers that run `serve`, a function of a module of ours that takes a descriptor (see `worker.serve`).

    `seconds`: the time limit of a request. `variables`: of the workers' environment. A worker is replaced after `uses`
    requests, because XLA keeps memory.
    """

    def __init__(
        self,
        serve: Callable[[int], None],
        workers: int,
        seconds: float,
        uses: int = 2000,
        variables: dict[str, str] | None = None,
    ) -> None:
        if min(workers, uses) < 1 or seconds <= 0:
            raise ValueError(f"a pool needs workers, uses and seconds: {workers}, {uses}, {seconds}")
        self._serve, self._seconds, self._uses = serve, seconds, uses
        self._variables = variables or {}
        self._workers: list[_Worker | None] = [None] * workers
        self._used = [0] * workers
        self._closed = False
        self.deaths = 0
        self._failed_starts = 0

    def ask(self, request: Any) -> Any:
        """The answer to one request."""
        return self.ask_each([request])[0]

    def ask_each(self, requests: Sequence[Any]) -> list[Any]:
        """The answers to several requests, in their order. `Died` answers one that ended its worker.

        Raises CompilerError if no worker starts.
        """
        if self._closed:
            raise CompilerError("the pool is closed")
        waiting = deque(enumerate(requests))
        answers: list[Any] = [None] * len(requests)
        try:
            while waiting or any(w is not None and w.task is not None for w in self._workers):
                for place in range(len(self._workers)):
                    worker = self._workers[place]
                    if waiting and (worker is None or worker.task is None):
                        self._give(place, *waiting.popleft())
                self._collect(answers)
        except BaseException:  # answers that still come belong to no later request
            self._stop()
            raise
        return answers

    def _give(self, place: int, task: int, request: Any) -> None:
        worker = self._workers[place]
        if worker is not None and self._used[place] >= self._uses:
            worker.end()
            worker = None
        if worker is None:
            worker = self._workers[place] = _Worker(self._serve, self._variables)
            self._used[place] = 0
        self._used[place] += 1
        worker.task, worker.request = task, request
        # It reads the request when it is ready; until then others work.
        worker.deadline = time.monotonic() + (self._seconds if worker.ready else _START_SECONDS)
        with contextlib.suppress(OSError):  # it has died: `_collect` sees the end of its pipe
            worker.pipe.send(request)

    def _collect(self, answers: list[Any]) -> None:
        """Wait for an answer, a greeting, a death or a time limit."""
        busy = {
            w.pipe: (place, w)
            for place, w in enumerate(self._workers)
            if w is not None and w.task is not None
        }
        left = min(w.deadline for _, w in busy.values()) - time.monotonic()
        done = wait(list(busy), max(0.0, left))
        for pipe in done:
            place, worker = busy[pipe]  # type: ignore[index]
            assert worker.task is not None
            try:
                message = worker.pipe.recv()
            except (EOFError, OSError):
                self._bury(place, worker, answers, worker.reason())
                continue
            if worker.ready:
                answers[worker.task] = message
                worker.task = worker.request = None
            else:
                self._failed_starts, worker.ready = 0, True
                worker.deadline = time.monotonic() + self._seconds
        now = time.monotonic()
        for place, worker in busy.values():
            if worker.pipe not in done and now >= worker.deadline:
                limit = self._seconds if worker.ready else _START_SECONDS
                self._bury(place, worker, answers, f"it took more than {limit:g} s")

    def _bury(self, place: int, worker: _Worker, answers: list[Any], reason: str) -> None:
        """A worker is dead: its request has its answer, or, if it never was ready, gets another worker."""
        assert worker.task is not None
        worker.end()
        self._workers[place] = None
        if worker.ready:
            answers[worker.task] = Died(reason)
            self.deaths += 1
            return
        self._failed_starts += 1
        if self._failed_starts >= _ATTEMPTS:
            raise CompilerError(f"no worker can be started: {reason}")
        self._give(place, worker.task, worker.request)

    def _stop(self) -> None:
        for worker in self._workers:
            if worker is not None:
                worker.end()
        self._workers = [None] * len(self._workers)

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        self._stop()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
