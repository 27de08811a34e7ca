"""Two models take turns in one process. Each turn is compared with the next turn, which belongs to the other model."""

from __future__ import annotations

import glob
import itertools
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from xrlflow.backends.interleave import MIN_SAMPLE, SETTLE_BELOW, Run, no_garbage_collection, turn, warm_up

if TYPE_CHECKING:
    from typing_extensions import Self

HELD_UP = 0.02
"""A turn is disturbed if our threads waited for a CPU for more than this fraction of the turn."""
_WARM_UP = 0.03
"""Seconds of untimed runs of each model."""

_PRIOR = 2

Waits = Callable[[], Sequence[float]]
"""A function that returns the seconds that each thread of this process has waited for a CPU until now, the calling
thread first."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The seconds of a turn of a model (0: the baseline, 1: the new one): the mean of a few runs, without the time that
    the calling thread waited for a CPU.

    `held_up`: the fraction of the turn, from 0 to 1, that the most delayed thread waited.
    """

    model: int
    seconds: float
    held_up: float


def take_turns(
    runs: Sequence[Run],
    singles: Sequence[float],
    count: int | None,
    *,
    first: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    waits: Waits | None = None,
) -> tuple[Turn, ...]:
    """Take `count` turns of two models, one after the other, beginning with model `first`. If `count` is None, only a
    few turns are taken: their noise shows how many turns a process should take.

    `singles`: seconds of a first run of each model; models below 0.25 s are warmed up. A turn always follows a turn of
    the other model, and starts with an untimed run unless the model is slow (see `interleave`).

    On two cores that another program used as well, a run of 3.6 ms took 43 ms [12, 60] (10th and 90th percentile) with
    two threads, and 3.6 [3.5, 4.0] without the time that the calling thread waited for a CPU. With one thread, 43 ms
    became 58 [43, 91], and 43.5 [42.7, 44.4] without the calling thread's waiting time. The waiting of other threads is
    not subtracted, because the calling thread may have done their work meanwhile. `waits` counts the waiting (by
    default, Linux's counters). Raises what a run raises.
    """
    with no_garbage_collection(), _Waiting() as waiting:
        read = waits if waits is not None else waiting.seconds
        quick = [single < SETTLE_BELOW for single in singles]
        rough = list(singles)
        for model in (first, 1 - first):
            if quick[model]:
                rough[model] = warm_up(runs[model], clock, _WARM_UP)
        waiting.look()  # all threads of the sessions exist now
        batches = [max(1, math.ceil(MIN_SAMPLE / max(seconds, 1e-7))) for seconds in rough]
        result: list[Turn] = []
        for index in range(count if count is not None else _first_turns(max(rough))):
            model = (first + index) % 2
            if quick[model]:
                runs[model]()
            before = read()
            seconds = turn(runs[model], batches[model], False, clock)
            waited = [(b - a) / batches[model] for a, b in zip(before, read())]
            # Part of the counted waiting may have been just before or after the turn.
            lost = min(max(waited[0] if waited else 0.0, 0.0), 0.95 * seconds)
            result.append(Turn(model, seconds - lost, max(waited, default=0.0) / seconds))
        return tuple(result)


def _first_turns(seconds: float) -> int:
    return 12 if seconds < 0.02 else 6 if seconds < SETTLE_BELOW else 2


@dataclass(frozen=True, slots=True)
class Estimate:
    """The result of one process. `ratio`: the logarithm of how many times faster the new model ran than the baseline.

    `control`: the same for the baseline compared with itself, turn by turn; None if the baseline had one turn. `pairs`:
    the number of pairs of turns. `noise`: the standard deviation of a pair, from the median deviation (0 for one pair).
    """

    ratio: float
    control: float | None
    pairs: int
    noise: float


def estimate(turns: Sequence[Turn]) -> Estimate:
    """Compare each turn with the next one. Raises ValueError for fewer than two.

    A cause that slows the machine for longer slows both turns of a pair. A thread that lost its CPU slows one turn, so
    pairs with such a turn are left out if they are less than half of all pairs. If such pairs are the majority, all
    pairs are used, because the median of many pairs is nearer the truth than the median of a few pairs (5% off instead
    of 20% on a busy machine). The baseline is first in every other pair. The medians of both kinds of pairs are
    averaged, so that a drift cancels.
    """
    if len(turns) < 2:
        raise ValueError("a comparison needs a turn of each model")
    pairs = _undisturbed(list(itertools.pairwise(turns)))
    kinds = [
        [_faster(a, b) for a, b in pairs if a.model == 0],
        [-_faster(a, b) for a, b in pairs if a.model == 1],
    ]
    medians = [statistics.median(kind) for kind in kinds if kind]
    baseline = [t for t in turns if t.model == 0]
    among = [
        _faster(a, b) * (-1.0 if index % 2 else 1.0)
        for index, (a, b) in enumerate(itertools.pairwise(baseline))
    ]
    ratio = statistics.fmean(medians)
    deviations = [abs(difference - ratio) for kind in kinds for difference in kind]
    noise = 1.4826 * statistics.median(deviations) if len(pairs) > 1 else 0.0
    return Estimate(ratio, statistics.median(among) if among else None, len(pairs), noise)


def errors(estimates: Sequence[Estimate]) -> list[float]:
    """The standard errors of estimates, from the noise in their processes.

    A process with few pairs hardly shows its own noise, so the mean noise of all processes is added to the average,
    with the weight of two pairs.
    """
    mean = statistics.fmean(e.noise**2 for e in estimates)
    variances = [(e.pairs * e.noise**2 + _PRIOR * mean) / (e.pairs + _PRIOR) for e in estimates]
    # The variance of a median is pi / 2 times the variance of a mean.
    return [math.sqrt(0.5 * math.pi * v / e.pairs) for v, e in zip(variances, estimates)]


def _undisturbed(pairs: Sequence[tuple[Turn, Turn]]) -> Sequence[tuple[Turn, Turn]]:
    free = [pair for pair in pairs if max(turn.held_up for turn in pair) <= HELD_UP]
    return free if 2 * len(free) >= len(pairs) else pairs


def _faster(first: Turn, second: Turn) -> float:
    return math.log(first.seconds) - math.log(second.seconds)


class _Waiting:
    """Counts how long the threads of this process have waited for a CPU. Linux counts the waiting; on other systems the
    count is 0."""

    def __init__(self) -> None:
        self._files: list[int] = []

    def __enter__(self) -> Self:
        self.look()
        return self

    def look(self) -> None:
        """Read the counters of all threads that there are now."""
        self._close()
        own = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        for name in sorted(glob.glob("/proc/self/task/*/schedstat"), key=lambda name: name != own):
            try:
                self._files.append(os.open(name, os.O_RDONLY))
            except FileNotFoundError:  # the thread has ended
                continue

    def seconds(self) -> list[float]:
        # The columns are: nanoseconds on a CPU, nanoseconds of waiting, times on a CPU.
        waits = []
        for file in self._files:
            try:
                waits.append(int(os.pread(file, 100, 0).split()[1]) * 1e-9)
            except ProcessLookupError:  # the thread has ended
                waits.append(0.0)
        return waits

    def _close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
