"""Crews of workers on this machine: every order has one answer, whatever becomes of the workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.workers.handlers import Dying, Squarer, broken
from xrlflow.workers import (
    InProcess,
    Kind,
    MakeHandler,
    Processes,
    Worker,
    WorkerError,
    WorkerFactory,
    WorkerLost,
    WorkerPool,
)
from xrlflow.workers.local import DirectWorker

pytestmark = pytest.mark.process


@pytest.fixture(params=[InProcess, Processes])
def place(request: pytest.FixtureRequest) -> WorkerFactory:
    made: WorkerFactory = request.param()
    return made


def test_orders_are_answered_once_each(place: WorkerFactory) -> None:
    with WorkerPool(place, Squarer, 2) as pool:
        for _ in range(2):  # a pool may be used again
            result = dict(pool.work(iter(range(7))))
            assert {number: square for number, (square, _) in result.items()} == {n: n * n for n in range(7)}
        assert list(pool.work(iter([]))) == []
        assert list(pool.work(iter([1, 2]), until=time.monotonic() - 1.0)) == []


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    with WorkerPool(Processes(), partial(Dying, str(tmp_path / "died")), 2) as pool:
        assert sorted(pool.work(iter(range(8)))) == [(n, n) for n in range(8)]
    assert (tmp_path / "died").exists()


def test_an_order_that_kills_every_worker_is_given_up() -> None:
    with (
        WorkerPool(Processes(), Squarer, 1) as pool,
        pytest.raises(
            WorkerError,
            match=r"ended by SIGKILL.* \(3 workers were lost over one task\)",
        ),
    ):
        list(pool.work(iter(["die"])))


def test_an_order_that_is_given_up_may_have_an_answer_instead() -> None:
    with WorkerPool(Processes(), Squarer, 2) as pool:
        result = dict(pool.work(iter([2, "die", 3, 4]), fallback=lambda order, error: (order, str(error))))
    assert [result[number][0] for number in (0, 2, 3)] == [4, 9, 16]
    assert result[1][0] == "die"
    assert "3 workers were lost over one task" in result[1][1]


def test_an_error_of_a_hand_is_the_callers(place: WorkerFactory) -> None:
    pool = WorkerPool(place, Squarer, 1, "squarer")
    kind, output = (ValueError, "-1 is negative") if isinstance(place, InProcess) else (
        WorkerError, "squarer 0 failed: ValueError: -1 is negative"
    )  # fmt: skip
    with pool, pytest.raises(kind, match=output):
        list(pool.work(iter([1, -1])))
    with pytest.raises((ValueError, WorkerError), match="there is no hand"):
        list(WorkerPool(place, broken, 1).work(iter([1])))


def test_closing_early_ends_what_is_busy(tmp_path: Path) -> None:
    before = {p.pid for p in psutil.Process().children()}
    pool = WorkerPool(Processes(), partial(Squarer, str(tmp_path), 0.3), 2)
    with pool:
        answers = pool.work(iter(range(100)))
        next(answers)
        answers.close()
    assert {p.pid for p in psutil.Process().children() if "tracker" not in " ".join(p.cmdline())} <= before
    assert len(list(tmp_path.iterdir())) < 6


def test_a_dead_worker_says_so_at_once() -> None:
    worker = Processes().worker(Squarer, "worker 5")
    worker.begin(2)
    assert worker.reply()[0] == 4
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="worker 5 ended by SIGKILL"):
        worker.reply()
    with pytest.raises(WorkerLost, match="worker 5 ended by SIGKILL"):
        worker.begin(2)
    worker.close()


def test_orders_are_drawn_when_there_is_a_worker() -> None:
    drawn = []

    def orders() -> Iterator[int]:
        for number in range(10):
            drawn.append(number)
            yield number

    with WorkerPool(InProcess(), Squarer, 2) as pool:
        answers = pool.work(orders())
        next(answers)
        assert len(drawn) <= 4
        answers.close()


class Ending(InProcess):
    """Its workers note how they are ended."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def worker(self, make: MakeHandler, name: str, kind: Kind = Kind.COMPUTE) -> DirectWorker:
        made = DirectWorker(make, name)
        made.release = lambda: self.noted.append("release")  # type: ignore[method-assign]
        made.close = lambda: self.noted.append("close")  # type: ignore[method-assign]
        return made

    def replied(self, workers: Sequence[Worker], seconds: float | None = None) -> list[Worker]:
        raise KeyboardInterrupt


def test_an_interrupt_ends_all_workers_at_the_same_time() -> None:
    """Each may need its time to clean up."""
    factory = Ending()
    with WorkerPool(factory, Squarer, 3) as pool, pytest.raises(KeyboardInterrupt):
        list(pool.work(iter([1, 2, 3])))
    assert factory.noted == ["release"] * 3 + ["close"] * 3


def test_a_crew_needs_workers() -> None:
    with pytest.raises(ValueError, match="needs workers"):
        WorkerPool(InProcess(), Squarer, 0)
