"""Whole tuning sessions: budgets, known results, interrupts and kills."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.tuning.kernels import matmul, scheduled
from xrlflow.tuning.knobs import Candidate, KnobError
from xrlflow.tuning.pool import Pool, PoolOptions
from xrlflow.tuning.session import Progress, Stop, TuningResult, tune
from xrlflow.tuning.store import Record, Setting, Store
from xrlflow.tuning.tasks import Task
from xrlflow.tuning.tuners.protocol import Measurement
from xrlflow.tuning.worker import Timing

pytestmark = pytest.mark.measures


@cache
def one() -> Task:
    return matmul(8)


@cache
def two() -> Task:
    return matmul(8, 16)


class Counting:
    """A tuner that proposes numbers. Their order depends on the seed."""

    name = "counting"

    def __init__(self, task: Task, seed: int, size: int = 1000, stride: int = 7) -> None:
        self._task, self._size, self._stride = task, size, stride
        self._next = seed % size
        self._left = size
        self.reported: list[tuple[str, float]] = []

    def propose(self, count: int) -> Sequence[Candidate]:
        result = []
        for _ in range(min(count, self._left)):
            result.append(Candidate((self._next,), [[], []], self._task.mod, str(self._next)))
            self._next = (self._next + self._stride) % self._size
            self._left -= 1
        return result

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        self.reported += [(candidate.key, outcome.median) for candidate, outcome in measured]


class Formula:
    """A measurer with a formula: every tenth number fails, and larger numbers take longer."""

    threads = 2
    device = None
    flushed = False

    def __init__(self, pause: float = 0.0, act: Callable[[int], None] | None = None) -> None:
        self.seen: list[str] = []
        self._pause, self._act = pause, act

    def outcomes(
        self, task: Task, candidates: Sequence[Candidate], *, until: float
    ) -> Generator[tuple[int, Measurement], None, None]:
        for position in reversed(range(len(candidates))):  # in no order that the session may rely on
            if time.monotonic() >= until:
                return
            time.sleep(self._pause)
            key = candidates[position].key
            self.seen.append(key)
            if self._act is not None:
                self._act(len(self.seen))
            yield position, self.outcome(key)

    @staticmethod
    def outcome(key: str) -> Measurement:
        return (
            Measurement(error="it crashed") if int(key) % 10 == 9 else Measurement((1e-3 + 1e-6 * int(key),))
        )


def session(store: Store, measurer: Formula, trials: int = 40, **options: object) -> TuningResult:
    tasks = options.pop("tasks", [one()])
    return tune(tasks, Counting, trials=trials, batch=16, store=store, pool=measurer, **options)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "tuning.sqlite")


def test_trials_are_spent_and_the_best_is_found(store: Store) -> None:
    measurer = Formula()
    heard: list[Progress] = []
    result = session(store, measurer, listener=heard.append)
    assert result.stop is Stop.TRIALS
    assert len(measurer.seen) == len(set(measurer.seen)) == 40
    (actual,) = result.tasks
    fastest = min(measurer.seen, key=lambda key: Formula.outcome(key).median)
    assert actual.best is not None
    assert actual.best.candidate == fastest
    assert actual.seconds == Formula.outcome(fastest).median
    assert (actual.trials, actual.measured) == (40, 40)
    assert actual.failed == sum(key.endswith("9") for key in measurer.seen) > 0
    assert [point.trials for point in actual.curve] == [16, 32, 40]
    assert all(a.best >= b.best for a, b in zip(actual.curve, actual.curve[1:]))
    assert [progress.spent for progress in heard] == list(range(1, 41))
    assert heard[-1].best == actual.seconds
    assert {progress.budget for progress in heard} == {40}


def test_a_second_session_measures_nothing_whatever_its_tuner_and_seed(store: Store) -> None:
    first = session(store, Formula(), tasks=[one(), two()], trials=100)
    again = Formula()
    second = session(store, again, tasks=[one(), two()], trials=100, seed=5)
    assert again.seen == []
    assert second.measured == 0
    assert second.stop is Stop.TRIALS
    for before, after in zip(first.tasks, second.tasks):
        assert (before.best, before.trials) == (after.best, after.trials)
        assert [(p.trials, p.best) for p in before.curve] == [(p.trials, p.best) for p in after.curve]


def test_more_trials_go_on_where_the_last_session_was(store: Store, tmp_path: Path) -> None:
    first, second = Formula(), Formula()
    session(store, first, trials=40)
    session(store, second, trials=60)
    with Store(tmp_path / "fresh.sqlite") as fresh:
        at_once = Formula()
        session(fresh, at_once, trials=60)
    assert len(second.seen) == 20
    assert set(first.seen) | set(second.seen) == set(at_once.seen)


def test_another_setting_is_measured_anew(store: Store) -> None:
    session(store, Formula())
    other = Formula()
    other.threads = 1
    session(store, other)
    assert len(other.seen) == 40


def test_a_tuner_is_told_of_all_that_it_proposed(store: Store) -> None:
    tuners: list[Counting] = []

    def make(task: Task, seed: int) -> Counting:
        tuners.append(Counting(task, seed))
        return tuners[-1]

    for trials, reported in ((20, 20), (50, 50)):
        tune([one()], make, trials=trials, batch=16, store=store, pool=Formula())
        assert len(tuners[-1].reported) == reported
    assert tuners[1].reported[:16] == tuners[0].reported[:16], "what is known is told as if it was measured"


def test_a_time_limit_ends_it_within_a_batch(store: Store) -> None:
    measurer = Formula(pause=0.02)
    result = session(store, measurer, trials=10_000, time_limit=0.3)
    assert result.stop is Stop.TIME
    assert 0 < len(measurer.seen) < 100
    assert result.measured == len(store.records(one().key)) == len(measurer.seen)
    assert result.measuring > 0


def test_tasks_that_have_no_more_candidates_leave(store: Store) -> None:
    def make(task: Task, seed: int) -> Counting:
        return Counting(task, seed, size=5 if task is one() else 30)

    result = tune([one(), two()], make, trials=1000, batch=8, store=store, pool=Formula())
    assert result.stop is Stop.EXHAUSTED
    assert [actual.trials for actual in result.tasks] == [5, 30]


def test_a_tuner_that_repeats_itself_is_exhausted(store: Store) -> None:
    class Stuck(Counting):
        def propose(self, count: int) -> Sequence[Candidate]:
            return [Candidate((1,), [[], []], self._task.mod, "1")] * count

    measurer = Formula()
    assert tune([one()], Stuck, trials=100, store=store, pool=measurer).stop is Stop.EXHAUSTED
    assert measurer.seen == ["1"]


def test_a_task_without_schedules_leaves_the_others_alone(store: Store) -> None:
    def make(task: Task, seed: int) -> Counting:
        if task is one():
            raise KnobError("no sketches")
        return Counting(task, seed)

    result = tune([one(), two()], make, trials=20, store=store, pool=Formula())
    assert result.tasks[0].error == "no sketches"
    assert result.tasks[0].best is None
    assert result.tasks[1].trials == 20


def test_an_interrupt_keeps_what_is_known(store: Store) -> None:
    def interrupt(count: int) -> None:
        if count == 21:
            raise KeyboardInterrupt

    result = session(store, Formula(act=interrupt))
    assert result.interrupted
    assert result.tasks[0].measured == 20
    assert result.tasks[0].best is not None
    rest = Formula()
    assert session(store, rest).stop is Stop.TRIALS
    assert len(rest.seen) == 20
    assert len(store.records(one().key)) == 40


@pytest.mark.usefixtures("python_handles_interrupts")
def test_an_interrupt_that_a_tuner_swallows_is_one(store: Store) -> None:
    """MetaSchedule calls Python from C++, where a KeyboardInterrupt becomes an ordinary error."""

    class Swallowing(Counting):
        def propose(self, count: int) -> Sequence[Candidate]:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            return super().propose(count)

    result = tune([one()], Swallowing, trials=20, store=store, pool=Formula())
    assert result.interrupted
    assert result.tasks[0].measured == 0


KILLED = """
import sys
from tests.tuning.test_session import *
session(Store(sys.argv[1]), Formula(pause=0.01), listener=lambda progress: print(progress.spent, flush=True))
"""


def test_a_killed_session_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    root = Path(__file__).resolve().parents[2]
    victim = subprocess.Popen(
        [sys.executable, "-c", KILLED, path], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert victim.stdout is not None
    reported = 0
    while reported < 19:
        reported = int(victim.stdout.readline())
    victim.send_signal(signal.SIGKILL)
    # `communicate` would lose the lines that were already read into the buffer.
    reported = int([str(reported), *victim.stdout.read().split()][-1])
    assert victim.wait() == -signal.SIGKILL
    with Store(path) as store:
        stored = [record.candidate for record in store.records(one().key)]
        assert reported <= len(stored) <= reported + 1, "what it told of was kept"
        remaining = Formula()
        session(store, remaining)
        assert len(remaining.seen) == 40 - len(stored)
        assert set(remaining.seen).isdisjoint(stored)
        uninterrupted = Formula()
        session(Store(tmp_path / "fresh.sqlite"), uninterrupted)
        assert set(stored) | set(remaining.seen) == set(uninterrupted.seen)


def test_a_disk_that_takes_nothing_does_not_stop_it(tmp_path: Path) -> None:
    with Store(tmp_path) as store, pytest.warns(RuntimeWarning, match="in memory"):  # a directory
        result = session(store, Formula())
    assert result.stop is Stop.TRIALS
    assert result.tasks[0].best is not None


@pytest.mark.parametrize(
    "wrong", [{"trials": -1}, {"batch": 0}, {"time_limit": 0.0}, {"time_limit": math.nan}]
)
def test_limits_that_make_no_sense_are_refused(store: Store, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cannot tune"):
        tune([one()], Counting, store=store, pool=Formula(), **({"trials": 1} | wrong))
    with pytest.raises(ValueError, match="given twice"):
        tune([one(), one()], Counting, trials=1, store=store, pool=Formula())


class Splitting:
    """A tuner that proposes a product with its columns split by several factors."""

    name = "splitting"

    def __init__(self, task: Task, seed: int) -> None:
        self._left = [scheduled(task, inner) for inner in (2, 4, 8, 16, 32, 64)]

    def propose(self, count: int) -> Sequence[Candidate]:
        result, self._left = self._left[:count], self._left[count:]
        return result

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        pass


def test_a_real_kernel_is_tuned_and_known_afterwards(store: Store) -> None:
    task = matmul(64)
    options = PoolOptions(builders=2, threads=1, timing=Timing(samples=3, sample_ms=1.0))
    with Pool(options) as pool:
        first = tune([task], Splitting, trials=6, batch=3, seed=1, store=store, pool=pool)
    (result,) = first.tasks
    assert result.best is not None
    assert result.trials == result.measured == 6
    second = tune([task], Splitting, trials=6, batch=3, seed=1, store=store, pool=options)
    assert second.measured == 0
    assert second.tasks[0].best == result.best
    assert result.best.setting == Setting.here(task.target, 1)
    assert os.path.getsize(store.path) > 0


class Lucky(Formula):
    """A measurer for which some candidates seem faster by a fifth when they are measured for the first time."""

    def __init__(self, lucky: set[str], pause: float = 0.0, act: Callable[[int], None] | None = None) -> None:
        super().__init__(pause, act)
        self._lucky = lucky
        self.asked: list[set[str]] = []

    def outcomes(
        self, task: Task, candidates: Sequence[Candidate], *, until: float
    ) -> Generator[tuple[int, Measurement], None, None]:
        self.asked.append({candidate.key for candidate in candidates})
        for position, outcome in super().outcomes(task, candidates, until=until):
            key = candidates[position].key
            factor = 0.8 if key in self._lucky and self.seen.count(key) == 1 else 1.0
            # No two measurements are equal.
            yield (
                position,
                outcome
                if outcome.error
                else Measurement((factor * outcome.median + 1e-12 * len(self.seen),)),
            )


class Again:
    """Candidates by their numbers. The untuned one is 30."""

    def untuned_candidate(self, task: Task) -> Candidate:
        return Candidate(None, [], task.mod, "30")

    def recorded(self, task: Task, record: Record) -> Candidate:
        return Candidate(None, json.loads(record.trace), task.mod, record.candidate)


def confirmed(store: Store, measurer: Formula, trials: int = 40, **options: object) -> TuningResult:
    """Run a session whose tuner proposes 0, 7, 14, ..."""
    return tune(
        [one()], lambda task, seed: Counting(task, 0), trials=trials, store=store, pool=measurer, **options
    )  # type: ignore[arg-type]


def test_what_leads_is_measured_again_beside_what_runs_otherwise(store: Store) -> None:
    measurer = Lucky({"70", "77", "84", "91", "98"})
    result = confirmed(store, measurer, kernels=Again())
    assert result.measured == 40
    (actual,) = result.tasks
    assert actual.best is not None
    assert actual.best.candidate == "0"
    assert len(actual.best.seconds) >= 4
    again = measurer.asked[3:]
    assert 4 <= len(again) <= 8
    assert all("30" in asked and len(asked) <= 4 for asked in again)
    assert {"70", "77", "84", "91", "98"} <= set().union(*again)
    # A candidate that was only lucky is not measured more often than needed to see this.
    assert max(measurer.seen.count(key) for key in ("70", "77", "84", "91", "98")) <= 4

    later = Lucky(set())
    assert confirmed(store, later, kernels=Again()).tasks[0].best == actual.best
    assert later.seen == []


def test_luck_that_is_not_at_an_end_in_time_is_not_the_best(store: Store) -> None:
    """More candidates were lucky than can be measured again. Only those that were measured often enough count."""
    measurer = Lucky({str(n) for n in range(1000)})
    (result,) = confirmed(store, measurer, kernels=Again()).tasks
    assert measurer.seen.count("30") == 8
    assert result.best is not None
    assert len(result.best.seconds) >= 4
    (fastest,) = store.best(one().key)
    assert len(fastest.seconds) < 4

    later = Lucky(set())
    confirmed(store, later, kernels=Again())
    assert later.seen == []

    # The results of further trials are measured again, however often others were before.
    more = Lucky(set())
    confirmed(store, more, 60, kernels=Again())
    assert more.seen.count("30") > 0


def test_without_something_to_compare_with_nothing_is_measured_again(store: Store) -> None:
    measurer = Lucky({"70", "77"})
    result = confirmed(store, measurer)
    assert len(measurer.seen) == 40
    assert result.tasks[0].best is not None
    assert result.tasks[0].best.candidate == "70"


def test_where_the_usual_leads_alone_nothing_is_measured_again(store: Store) -> None:
    measurer = Lucky({"30"})
    result = confirmed(store, measurer, 300, kernels=Again())
    assert result.tasks[0].best is not None
    assert result.tasks[0].best.candidate == "30"
    assert len(measurer.seen) == 300


def test_measuring_again_has_a_part_of_the_time(store: Store) -> None:
    """At most a fifth of the time: there are about twenty measurements in all, and eight rounds would need thirty."""
    measurer = Lucky({str(n) for n in range(0, 1000, 3)}, pause=0.1)
    result = confirmed(store, measurer, 10_000, kernels=Again(), time_limit=2.0)
    assert result.stop is Stop.TIME
    assert 0 < len(measurer.seen) - result.measured <= 8


def test_without_trials_nothing_is_measured_at_all(store: Store) -> None:
    confirmed(store, Lucky({"70"}))
    later = Lucky(set())
    assert confirmed(store, later, 0, kernels=Again()).stop is Stop.TRIALS
    assert later.seen == []
    confirmed(store, later, kernels=Again())
    assert later.seen != []


def test_kernels_timed_between_others_are_another_setting(store: Store) -> None:
    session(store, Formula())
    alone, between = Formula(), Formula()
    between.flushed = True
    session(store, between)
    session(store, alone)
    assert len(between.seen) == 40
    assert alone.seen == []


def test_what_fails_when_it_is_measured_again_is_not_the_best(store: Store) -> None:
    class Breaking(Lucky):
        def outcome(self, key: str) -> Measurement:  # type: ignore[override]
            broken = key == "0" and self.seen.count(key) > 1
            return Measurement(error="it crashed") if broken else Formula.outcome(key)

    measurer = Breaking(set())
    (result,) = confirmed(store, measurer, kernels=Again()).tasks
    assert result.best is not None
    assert result.best.candidate == "7"
    assert measurer.seen.count("0") == 2


def test_what_was_measured_again_is_kept_on_ctrl_c(store: Store) -> None:
    def act(count: int) -> None:
        if count == 46:
            raise KeyboardInterrupt

    result = confirmed(store, Lucky({"70"}, act=act), kernels=Again())
    assert result.stop is Stop.INTERRUPTED
    assert result.measured == 40
    assert len(store) == 45
    (actual,) = confirmed(store, Lucky(set()), kernels=Again()).tasks
    assert actual.best is not None
    assert actual.best.candidate == "0"


def test_an_interrupted_session_measures_nothing_again(store: Store) -> None:
    def act(count: int) -> None:
        if count == 20:
            raise KeyboardInterrupt

    measurer = Formula(act=act)
    result = confirmed(store, measurer, kernels=Again())
    assert result.stop is Stop.INTERRUPTED
    assert len(measurer.seen) == 20
