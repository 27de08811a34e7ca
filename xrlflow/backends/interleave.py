"""The loop that measures models: they take turns at running, and only times within one round are compared."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from xrlflow.backends import system_load
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.results import Comparison, Latency, SpeedUp
from xrlflow.backends.statistics import Floats, median_interval

Run = Callable[[], object]

MIN_SAMPLE = 2e-3
"""A sample takes at least this many seconds: several runs of a fast model are timed as one."""
SETTLE_BELOW = 0.25
"""A model whose run takes more seconds than this has no untimed run at the start of a turn: such a run would not change
the times."""
MIN_ROUNDS = 16
"""A measurement may end by the width of its intervals after this many rounds. An interval of fewer rounds can be narrow
by chance."""
DECIDED_ROUNDS = 6
"""A measurement may end because all intervals are on one side of 1 after this many rounds: the interval of six rounds
covers the samples of all six."""
MAX_ROUNDS = 20_000


def interleave(
    runs: Sequence[Run],
    *,
    threads: int,
    time_limit: float,
    target_width: float = 0.01,
    control: bool = True,
    margin: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    watch: Callable[[], float] | None = None,
    read_load: Callable[[], system_load.Reading] = system_load.read,
) -> Comparison:
    """Time `runs` (functions that run one model once) in rotating order, and compare each with the first, the baseline.

    In a round every model has a turn in each of two halves. The A/A control compares the baseline's two turns with each
    other, so it needs no further session in memory. Without `control` a round has one half. A sample is the mean of as
    many runs as take 2 ms.

    A turn always follows a turn of another model, whose data has replaced this model's data in the caches. So it starts
    with an untimed run: the first run after another model is 2 to 15% slower than later runs, while users run a single
    model. (When a baseline sometimes followed itself, it seemed 0.8% faster than its own copy.)

    The loop ends when the 95% intervals (see `median_interval`) of all median log ratios are narrower than
    `target_width`, or when another round would exceed `time_limit` seconds; there is at least one round. With `margin`
    it also ends when every interval is above 1 + margin or below 1 - margin, for callers who only want to know which
    model is faster. `clock` times the samples; `watch` times the whole measurement, and differs from `clock` if the
    models run on another machine. Python's garbage collector is off. Raises BackendError for fewer than two models, and
    whatever a run raises.
    """
    if len(runs) < 2:
        raise BackendError("measuring needs at least two models: a baseline and something to compare it with")
    if target_width <= 0 or time_limit <= 0:
        raise BackendError("the target width and the time limit of a measurement must be above zero")
    watch = watch if watch is not None else clock
    started = watch()
    halves = 2 if control else 1
    with no_garbage_collection():
        rounds = _Rounds(runs, halves, clock, budget=time_limit / (8 * len(runs)))
        before = read_load()
        converged = rounds.take(_Goal(target_width, margin), started + time_limit, watch)
        after = read_load()
    logs = rounds.logs()
    return Comparison(
        latencies=tuple(_latency(np.exp(logs[:, :, model]).ravel()) for model in range(len(runs))),
        speedups=rounds.speedups(),
        control=_interval(logs[:, 0, 0] - logs[:, 1, 0]) if control else None,
        load=system_load.judge(before, after, threads),
        samples=len(rounds.rows),
        seconds=watch() - started,
        threads=threads,
        converged=converged,
    )


@dataclass(frozen=True, slots=True)
class _Goal:
    """When to stop: all intervals are narrower than `width`, or (with `margin`) all are farther than `margin` from
    1."""

    width: float
    margin: float | None

    @property
    def first_check(self) -> int:
        """The number of rounds after which the goal is checked for the first time."""
        return MIN_ROUNDS if self.margin is None else DECIDED_ROUNDS

    def converged(self, rounds: int, speedups: Sequence[SpeedUp]) -> bool:
        return rounds >= MIN_ROUNDS and all(s.width < self.width for s in speedups)

    def decided(self, speedups: Sequence[SpeedUp]) -> bool:
        margin = self.margin
        return margin is not None and all(s.low > 1 + margin or s.high < 1 - margin for s in speedups)


class _Rounds:
    """The samples of all rounds. A row of `rows` has the seconds of one round, for each half and model.

    Each run is first warmed up for `budget` seconds.
    """

    def __init__(
        self, runs: Sequence[Run], halves: int, clock: Callable[[], float], *, budget: float
    ) -> None:
        self._runs, self._halves, self._clock = runs, halves, clock
        self._single = [warm_up(run, clock, budget) for run in runs]
        self._batches = [max(1, math.ceil(MIN_SAMPLE / max(seconds, 1e-7))) for seconds in self._single]
        self._last = -1
        self.rows: list[list[float]] = []

    def take(self, goal: _Goal, deadline: float, watch: Callable[[], float]) -> bool:
        """Measure rounds until the goal is reached, or until the next round would end after `deadline`. Returns whether
        all intervals became narrow enough."""
        check_at = goal.first_check
        longest = 0.0
        while len(self.rows) < MAX_ROUNDS:
            start = watch()
            if self.rows and start + longest > deadline:
                break
            self.rows.append(self._round())
            longest = max(0.9 * longest, watch() - start)
            if len(self.rows) >= check_at:
                check_at = len(self.rows) + max(5, len(self.rows) // 8)
                speedups = self.speedups()
                if goal.converged(len(self.rows), speedups):
                    return True
                if goal.decided(speedups):
                    break
        return False

    def _round(self) -> list[float]:
        models = len(self._runs)
        row = [0.0] * (models * self._halves)
        for slot in turns(models * self._halves, len(self.rows)):
            model = slot % models
            settle = self._single[model] < SETTLE_BELOW
            if settle and model == self._last:
                self._runs[(model + 1) % models]()
            row[slot] = turn(self._runs[model], self._batches[model], settle, self._clock)
            self._last = model
        return row

    def logs(self) -> Floats:
        """The logarithms of the samples: [round, half, model]."""
        logs: Floats = np.log(np.array(self.rows)).reshape(len(self.rows), self._halves, -1)
        return logs

    def speedups(self) -> tuple[SpeedUp, ...]:
        """For each model but the first: how many times faster it is than the first."""
        logs = self.logs()
        return tuple(_interval(logs[:, :, 0] - logs[:, :, model]) for model in range(1, len(self._runs)))


def time_alone(
    run: Run, *, time_limit: float, min_samples: int = 5, clock: Callable[[], float] = time.perf_counter
) -> Latency:
    """Time one function: at least `min_samples` samples of at least 0.2 ms, then more for up to `time_limit` seconds.

    The result is good enough for rough comparisons, like operators' costs, but not for a claim that one model is faster
    than another. Raises what `run` raises.
    """
    started = clock()
    with no_garbage_collection():
        single = warm_up(run, clock, time_limit / 4)
        batch = max(1, math.ceil(2e-4 / max(single, 1e-7)))
        samples: list[float] = []
        # 100 samples give the median to a tenth of the spread. More would not help.
        while len(samples) < min_samples or (len(samples) < 100 and clock() - started < time_limit):
            samples.append(turn(run, batch, False, clock))
            if clock() - started > 4 * time_limit:
                break
    return _latency(np.array(samples))


def turns(slots: int, round_index: int) -> list[int]:
    """The order of turns in a round, as numbers of slots. It is rotated by one position every 4 rounds, and reversed in
    every other cycle of rotations.

    So every slot is equally often at every position, and equally often before and after each neighbour.
    """
    cycle, shift = divmod(round_index // 4, slots)
    order = [(index + shift) % slots for index in range(slots)]
    return order[::-1] if cycle % 2 else order


def warm_up(run: Run, clock: Callable[[], float], budget: float) -> float:
    """Run a model up to ten times, for about `budget` seconds, so that it plans its memory and fills caches.

    Returns the seconds of the fastest run. A model gets three runs if `budget` allows it, and further runs only if all
    runs take less than 20 ms.
    """
    started = clock()
    fastest = math.inf
    for count in range(1, 11):
        start = clock()
        run()
        end = clock()
        fastest = min(fastest, end - start)
        if end - started > (budget if count < 3 else min(budget, 0.02)):
            break
    return fastest


def turn(run: Run, batch: int, settle: bool, clock: Callable[[], float]) -> float:
    """The mean seconds of `batch` runs. `settle`: an untimed run comes first."""
    if settle:
        run()
    start = clock()
    for _ in range(batch):
        run()
    return max((clock() - start) / batch, 1e-9)


def _latency(seconds: Floats) -> Latency:
    p10, median, p90 = (float(v) * 1e3 for v in np.percentile(seconds, [10, 50, 90]))
    return Latency(median, p10, p90, len(seconds))


def _interval(differences: Floats) -> SpeedUp:
    median, low, high = median_interval(differences)
    return SpeedUp(math.exp(median), math.exp(low), math.exp(high))


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
