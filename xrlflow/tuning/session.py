"""A tuning session. Trials (measured candidates) are divided among tuning tasks (kernels to tune). Candidates are
proposed, measured and stored until a limit is reached."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from xrlflow.backends.interrupts import heeding_interrupts
from xrlflow.tuning.allocation import Allocation
from xrlflow.tuning.knobs import Candidate, KnobError
from xrlflow.tuning.pool import Pool, PoolOptions
from xrlflow.tuning.store import CONFIRMED, Record, Setting, Store
from xrlflow.tuning.tasks import Task
from xrlflow.tuning.tuners.protocol import Measurement, Tuner

if TYPE_CHECKING:
    from types import TracebackType

# The leading kernels of a task: at most the first number of kernels, and slower than the fastest by at most the second
# number as a factor.
_LEADERS, _NEAR = 3, 1.05
# The leading kernels are measured again in at most this many rounds. A later session measures them again only if it has
# measured new candidates of the task.
_ROUNDS = 8
# To measure the leading kernels again takes at most this fraction of the time limit, and at most this many seconds for
# each task.
_AGAIN, _AGAIN_SECONDS = 0.2, 4.0

MakeTuner: TypeAlias = Callable[[Task, int], Tuner]
"""A function that makes a tuner for a task, with a seed. It raises KnobError if the task's design space is empty."""


Outcomes: TypeAlias = Generator[tuple[int, Measurement], None, None]
"""(Position of a candidate, outcome) for each measured candidate. The generator may be closed at any time."""


class Measurer(Protocol):
    """What a session needs in order to measure: a `Pool` or another measurer."""

    @property
    def threads(self) -> int:
        """The number of threads that kernels run with."""
        ...

    @property
    def device(self) -> str | None:
        """The name of the device that runs kernels; None: this machine."""
        ...

    @property
    def flushed(self) -> bool:
        """Whether kernels are timed with cold caches (see `worker.Timing`)."""
        ...

    def outcomes(self, task: Task, candidates: Sequence[Candidate], *, until: float) -> Outcomes:
        """The outcomes of candidates, as (position, measurement), as they arrive. Candidates that would start after
        `until` (`time.monotonic`) are left out."""
        ...


class Kernels(Protocol):
    """The kernels that a session measures again."""

    def untuned_candidate(self, task: Task) -> Candidate | None:
        """The kernel that an untuned compilation uses for a task; None if this kernel cannot be measured alone."""
        ...

    def recorded(self, task: Task, record: Record) -> Candidate | None:
        """The kernel that was measured for a record; None if this version has no such kernel for the task."""
        ...


class Stop(Enum):
    """Why a session ended."""

    TRIALS = "all trials were spent"
    TIME = "the time limit was reached"
    EXHAUSTED = "there is nothing more to try"
    INTERRUPTED = "it was interrupted"


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a task's curve. `best`: its best time in seconds after `trials` of its trials, `elapsed` seconds after
    the session began."""

    trials: int
    elapsed: float
    best: float


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of a session for one tuning task."""

    task: Task
    best: Record | None
    """The best kernel, which may be from an earlier session."""
    trials: int
    """The number of trials. Trials of earlier sessions, which are not repeated, count as well."""
    measured: int
    """The number of trials that were measured in this session."""
    failed: int
    """The number of measured trials that failed."""
    curve: tuple[Point, ...]
    """The best time after each batch, before the leading kernels are measured again."""
    error: str | None
    """Why the task could not be tuned; None if it was tuned."""

    @property
    def seconds(self) -> float:
        """The best time of one call in seconds; infinite if no candidate ran."""
        return self.best.outcome.median if self.best is not None else math.inf


@dataclass(frozen=True, slots=True)
class TuningResult:
    """The result of a session. Of the session's `seconds`, the tuners took `proposing` seconds, and measuring took
    `measuring` seconds."""

    tasks: tuple[TaskResult, ...]
    stop: Stop
    seconds: float
    proposing: float
    measuring: float

    @property
    def interrupted(self) -> bool:
        return self.stop is Stop.INTERRUPTED

    @property
    def measured(self) -> int:
        """The number of candidates that were measured in this session."""
        return sum(result.measured for result in self.tasks)

    def joined(self, later: TuningResult) -> TuningResult:
        """The result of this session and of a later one with other tasks."""
        return TuningResult(
            (*self.tasks, *later.tasks), later.stop, self.seconds + later.seconds,
            self.proposing + later.proposing, self.measuring + later.measuring,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a session after a measurement. `outcome`: the latest measurement; None after trials that an earlier
    session had measured. `best` and `trials`: the best seconds and the number of trials of `task`. `spent`: the trials
    of all tasks, out of `budget`."""

    task: Task
    outcome: Measurement | None
    best: float
    trials: int
    spent: int
    budget: int
    elapsed: float


Listener: TypeAlias = Callable[[Progress], None]


def tune(
    tasks: Sequence[Task],
    make: MakeTuner,
    *,
    trials: int,
    batch: int = 16,
    time_limit: float = math.inf,
    seed: int = 0,
    store: Store | None = None,
    pool: Measurer | PoolOptions | None = None,
    listener: Listener | None = None,
    kernels: Kernels | None = None,
) -> TuningResult:
    """Tune the kernels of `tasks` with `trials` measured candidates in all, `batch` at a time for one task (see
    `Allocation`).

    Every outcome is stored at once (default: in the user's store). Trials that the store already has for the same
    setting are not repeated: they count as trials, in the order in which they were measured. So a session continues
    where an earlier session was killed or interrupted (after Ctrl-C, the results so far are returned), and a second
    session with the same trials measures nothing. A tuner only learns about its own candidates, and repeats its steps
    with the same seed.

    `kernels`: if given, the leading kernels are measured again at the end, together with the untuned one. Without these
    repeated measurements, the kernel with the least time would be a kernel whose noise was low by chance. They are not
    counted as trials, but take place within the time limit. A kernel that was measured often enough is not measured
    again. With 0 trials, nothing is measured.

    `time_limit`, in seconds, may be exceeded by one candidate or one proposal. Raises ValueError for invalid limits,
    and PoolError if nothing can be measured.
    """
    if trials < 0 or batch < 1 or not time_limit > 0:
        raise ValueError(f"cannot tune with {trials} trials, {batch} a batch, in {time_limit} s")
    if len({task.key for task in tasks}) != len(tasks):
        raise ValueError("a task is given twice: merge them and add their weights")
    with contextlib.ExitStack() as stack:
        open_store = store if store is not None else stack.enter_context(Store())
        measurer = stack.enter_context(_Measuring(pool))
        limits, settings = _Limits(trials, batch, time_limit), _Settings(make, seed, kernels, listener)
        return _Session(tasks, limits, settings, open_store, measurer).run()


class _Measuring:
    """Measures with the given measurer, or with a new pool, which starts when there is something to measure."""

    def __init__(self, pool: Measurer | PoolOptions | None) -> None:
        self._options = pool if isinstance(pool, PoolOptions) else PoolOptions()
        self._measurer: Measurer | None = None if isinstance(pool, PoolOptions) else pool
        self._own: Pool | None = None

    @property
    def threads(self) -> int:
        return self._options.threads if self._measurer is None else self._measurer.threads

    @property
    def device(self) -> str | None:
        return self._options.device if self._measurer is None else self._measurer.device

    @property
    def flushed(self) -> bool:
        return self._options.timing.flush if self._measurer is None else self._measurer.flushed

    def outcomes(self, task: Task, candidates: Sequence[Candidate], *, until: float) -> Outcomes:
        if self._measurer is None:
            self._measurer = self._own = Pool(self._options)
        return self._measurer.outcomes(task, candidates, until=until)

    def __enter__(self) -> _Measuring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own is not None:
            self._own.close()


@dataclass(slots=True)
class _State:
    """The state of a task in a session."""

    task: Task
    setting: Setting
    stored: deque[Measurement]
    """Outcomes of earlier sessions that have not been counted as trials yet."""
    known: dict[str, Measurement]
    """Outcomes of earlier sessions and of this session, by the candidate's key."""
    tuner: Tuner | None = None
    ahead: deque[Candidate] = field(default_factory=deque)
    """Candidates that the tuner has proposed, but that were not measured yet."""
    proposed: set[str] = field(default_factory=set)
    """The keys of all candidates that were ever proposed."""
    best: float = math.inf
    trials: int = 0
    measured: int = 0
    failed: int = 0
    curve: list[Point] = field(default_factory=list)
    error: str | None = None
    untuned: Candidate | None = None
    rounds: int = 0
    """How often the leading kernels were measured again."""


@dataclass(frozen=True, slots=True)
class _Limits:
    """The limits of a session: `trials` trials in all, `batch` trials at a time for one task, and `seconds` seconds."""

    trials: int
    batch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of a session: the function that makes tuners, the seed of tuners, the kernels to measure again, and
    the listener, which is called after each measurement."""

    maker: MakeTuner
    seed: int
    kernels: Kernels | None
    listener: Listener | None


class _Session:
    def __init__(
        self, tasks: Sequence[Task], limits: _Limits, settings: _Settings, store: Store, measurer: Measurer
    ) -> None:
        self._settings, self._store, self._measurer = settings, store, measurer
        self._budget, self._batch = limits.trials, limits.batch
        self._start = time.monotonic()
        self._end = self._start + limits.seconds
        # Part of the time is reserved for measuring the leading kernels again.
        again = min(_AGAIN * limits.seconds, _AGAIN_SECONDS * len(tasks))
        self._again = again if settings.kernels is not None else 0.0
        self._until = self._end - self._again
        self._spent = 0
        self._proposing = self._measuring = 0.0
        self._states = [self._state(task) for task in tasks]
        self._allocation = Allocation([task.weight for task in tasks])

    def run(self) -> TuningResult:
        try:
            stop = self._loop()
            self._until = min(self._end, time.monotonic() + self._again)
            self._confirm()
        except KeyboardInterrupt:
            stop = Stop.INTERRUPTED
        return TuningResult(
            tasks=tuple(self._result(state) for state in self._states),
            stop=stop,
            seconds=self._elapsed(),
            proposing=self._proposing,
            measuring=self._measuring,
        )

    def _loop(self) -> Stop:
        while self._spent < self._budget:
            if self._over():
                return Stop.TIME
            if (number := self._allocation.next()) is None:
                return Stop.EXHAUSTED
            state = self._states[number]
            before = state.trials
            more = self._turn(state, min(self._batch, self._budget - self._spent))
            self._allocation.update(number, state.trials - before, state.best)
            state.curve.append(Point(state.trials, self._elapsed(), state.best))
            if not more:
                self._allocation.leave(number)
        return Stop.TRIALS

    def _confirm(self) -> None:
        """Measure the leading kernels of each task again, together with its untuned kernel, until all of them were
        measured often enough."""
        kernels = self._settings.kernels
        if kernels is None or self._budget == 0:  # a session without trials measures nothing
            return
        for state in sorted(self._states, key=lambda state: -state.task.weight * state.best):
            while not self._over():
                with self._clock_proposing():
                    again = self._unsettled(state, kernels)
                if not again:
                    break
                self._measure_again(state, again)

    def _unsettled(self, state: _State, kernels: Kernels) -> list[Candidate]:
        """The kernels of a task to measure again: its leading kernels and its untuned kernel, if some of them were
        measured too seldom; otherwise an empty list."""
        best = self._store.best(state.task.key, _LEADERS, state.setting)
        medians = [record.outcome.median for record in best]
        leading = [record for record, median in zip(best, medians) if median <= _NEAR * medians[0]]
        if not leading:
            return []
        counts = Counter(record.candidate for record in self._store.records(state.task.key, state.setting))
        if state.untuned is None:
            state.untuned = kernels.untuned_candidate(state.task)
        if state.untuned is None:
            return []
        others = [record for record in leading if record.candidate != state.untuned.key]
        often = all(counts[key] >= CONFIRMED for key in (state.untuned.key, *(r.candidate for r in others)))
        rounds = state.rounds if state.measured else counts[state.untuned.key]
        if not others or often or rounds >= _ROUNDS:
            return []
        state.rounds += 1
        return [state.untuned, *filter(None, (kernels.recorded(state.task, record) for record in others))]

    def _measure_again(self, state: _State, candidates: Sequence[Candidate]) -> None:
        start = time.monotonic()
        try:
            with contextlib.closing(
                self._measurer.outcomes(state.task, candidates, until=self._until)
            ) as outcomes:
                for position, outcome in outcomes:
                    self._store.put(Record.of(state.task, state.setting, candidates[position], outcome))
                    self._tell(state, outcome)
        finally:
            self._measuring += time.monotonic() - start

    def _turn(self, state: _State, count: int) -> bool:
        """Spend `count` trials on a tuning task. Returns whether it has candidates left."""
        stored = min(count, len(state.stored))
        for _ in range(stored):
            self._spend(state, state.stored.popleft())
        if stored:
            self._tell(state, None)
        count -= stored
        while count > 0 and not self._over():
            candidates = self._candidates(state, count)
            if not candidates:
                return False
            outcomes = self._measured(state, [c for c in candidates if c.key not in state.known])
            count -= len(outcomes)
            state.known |= outcomes
            measured = [(c, state.known[c.key]) for c in candidates if c.key in state.known]
            if state.tuner is not None and measured:
                with self._clock_proposing():
                    state.tuner.update(measured)
        return True

    def _candidates(self, state: _State, count: int) -> list[Candidate]:
        """The tuner's next candidates: at most `count` candidates that have to be measured, and further candidates
        whose outcomes are already known. The tuner's other proposals wait for the next batch of the task."""
        if not state.ahead:
            with self._clock_proposing():
                state.ahead.extend(self._proposed(state))
        candidates: list[Candidate] = []
        while state.ahead and (count > 0 or state.ahead[0].key in state.known):
            count -= state.ahead[0].key not in state.known
            candidates.append(state.ahead.popleft())
        return candidates

    def _proposed(self, state: _State) -> list[Candidate]:
        if state.tuner is None:
            try:
                state.tuner = self._settings.maker(state.task, _seed(self._settings.seed, state.task))
            except KnobError as error:
                state.error = str(error)
                return []
        fresh: list[Candidate] = []
        for candidate in state.tuner.propose(self._batch):
            if candidate.key not in state.proposed:
                state.proposed.add(candidate.key)
                fresh.append(candidate)
        return fresh

    def _measured(self, state: _State, candidates: Sequence[Candidate]) -> dict[str, Measurement]:
        """Measure candidates, and store the outcomes as they arrive. Returns the outcomes by the candidates' keys."""
        results: dict[str, Measurement] = {}
        if not candidates:
            return results
        start = time.monotonic()
        outcomes = self._measurer.outcomes(state.task, candidates, until=self._until)
        try:
            with contextlib.closing(outcomes):
                for position, outcome in outcomes:
                    candidate = candidates[position]
                    self._store.put(Record.of(state.task, state.setting, candidate, outcome))
                    results[candidate.key] = outcome
                    state.measured += 1
                    state.failed += outcome.error is not None
                    self._spend(state, outcome)
                    self._tell(state, outcome)
        finally:
            self._measuring += time.monotonic() - start
        return results

    def _spend(self, state: _State, outcome: Measurement) -> None:
        state.trials += 1
        self._spent += 1
        state.best = min(state.best, outcome.median)

    def _tell(self, state: _State, outcome: Measurement | None) -> None:
        if self._settings.listener is not None:
            self._settings.listener(
                Progress(
                    task=state.task,
                    outcome=outcome,
                    best=state.best,
                    trials=state.trials,
                    spent=self._spent,
                    budget=self._budget,
                    elapsed=self._elapsed(),
                )
            )

    def _state(self, task: Task) -> _State:
        setting = Setting.on(
            self._measurer.device, task.target, self._measurer.threads, flushed=self._measurer.flushed
        )
        known: dict[str, Measurement] = {}
        for record in self._store.records(task.key, setting):
            known.setdefault(record.candidate, record.outcome)
        return _State(task, setting, deque(known.values()), known)

    def _result(self, state: _State) -> TaskResult:
        best = self._store.best(state.task.key, 1, state.setting, least=CONFIRMED)
        return TaskResult(
            task=state.task,
            best=best[0] if best else None,
            trials=state.trials,
            measured=state.measured,
            failed=state.failed,
            curve=tuple(state.curve),
            error=state.error,
        )

    def _over(self) -> bool:
        return time.monotonic() >= self._until

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    @contextlib.contextmanager
    def _clock_proposing(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            with heeding_interrupts():
                yield
        finally:
            self._proposing += time.monotonic() - start


def _seed(seed: int, task: Task) -> int:
    """The seed of a task's tuner. It does not depend on the other tasks of the session."""
    return int.from_bytes(hashlib.sha256(f"{seed} {task.key}".encode()).digest()[:4], "big")
