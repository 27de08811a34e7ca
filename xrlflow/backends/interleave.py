"""The one measuring loop: models timed in turns, so that only ratios inside a round are ever compared."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from xrlflow.backends import load
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.results import Comparison, Latency, SpeedUp
from xrlflow.backends.statistics import Floats, median_interval

Run = Callable[[], object]

MIN_SAMPLE = 2e-3
"""Seconds that one sample lasts at least: several runs of a fast model are timed as one."""
SETTLE_BELOW = 0.25
"""Models slower than this many seconds get no untimed run at the start of their turn: it would tell nothing."""
MIN_ROUNDS = 16
"""Rounds before an interval may end the measurement (an interval of few samples can be narrow by luck)."""
DECIDED_ROUNDS = 6
"""Rounds before a measurement may end because its question is answered: the interval of six covers all of them."""
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
    read_load: Callable[[], load.Reading] = load.read,
) -> Comparison:
    """Time `runs` (calls that run one model once) in rotating order and compare each with the first.

    A round gives every model two turns, in halves: the first half compares every model with the baseline, so does the
    second, and the baseline's two turns compared with each other are the A/A control, which needs no third session in
    memory. Without `control` a round is one half. A turn always follows one of another model, whose data have
    pushed this one's out of the caches, and starts with one untimed run: a run right after another model is 2
    to 15% slower than those after it, a user runs one model, and a baseline that followed itself now and then
    came out 0.8% faster than its own copy. A sample is the mean of as many runs as last 2 ms.

    The loop ends when the 95% interval (see `median_interval`) of every median log ratio is narrower than
    `target_width`, or before a further round would pass `time_limit` seconds; one round is always taken. With
    `margin` it also ends, for those who only ask which is faster, when every interval is wholly above 1 + margin or
    below 1 - margin.
    `clock` times the samples, `watch` (default: the same) the whole: where models run on another machine, they differ.
    Python's garbage collector is off meanwhile. Raises BackendError for fewer than two models, and whatever a
    run raises.
    """
    if len(runs) < 2:
        raise BackendError("measuring needs at least two models: a baseline and something to compare it with")
    if target_width <= 0 or time_limit <= 0:
        raise BackendError("the target width and the time limit of a measurement must be above zero")
    watch = watch if watch is not None else clock
    started = watch()
    deadline = started + time_limit
    models = len(runs)
    halves = 2 if control else 1
    rows: list[list[float]] = []
    check_at = MIN_ROUNDS if margin is None else DECIDED_ROUNDS
    converged = False
    with no_garbage_collection():
        single = [warm_up(run, clock, time_limit / (8 * len(runs))) for run in runs]
        batches = [max(1, math.ceil(MIN_SAMPLE / max(seconds, 1e-7))) for seconds in single]
        before = read_load()
        longest = 0.0
        last = -1
        while len(rows) < MAX_ROUNDS:
            round_start = watch()
            if rows and round_start + longest > deadline:
                break
            row = [0.0] * (models * halves)
            for slot in turns(models * halves, len(rows)):
                model = slot % models
                settle = single[model] < SETTLE_BELOW
                if settle and model == last:
                    runs[(model + 1) % models]()
                row[slot] = turn(runs[model], batches[model], settle, clock)
                last = model
            rows.append(row)
            longest = max(0.9 * longest, watch() - round_start)
            if len(rows) >= check_at:
                check_at = len(rows) + max(5, len(rows) // 8)
                speedups = [_speedup(_logs(rows, halves), model) for model in range(1, models)]
                converged = len(rows) >= MIN_ROUNDS and all(s.width < target_width for s in speedups)
                if converged or (margin is not None and all(_decided(s, margin) for s in speedups)):
                    break
        after = read_load()
    logs = _logs(rows, halves)
    return Comparison(
        latencies=tuple(_latency(np.exp(logs[:, :, model]).ravel()) for model in range(models)),
        speedups=tuple(_speedup(logs, model) for model in range(1, models)),
        control=_interval(logs[:, 0, 0] - logs[:, 1, 0]) if control else None,
        load=load.judge(before, after, threads),
        samples=len(rows),
        seconds=watch() - started,
        threads=threads,
        converged=converged,
    )


def time_alone(
    run: Run, *, time_limit: float, min_samples: int = 5, clock: Callable[[], float] = time.perf_counter
) -> Latency:
    """Time one call by itself: at least `min_samples` samples of 0.2 ms or more, then more until `time_limit` seconds.

    For figures that are compared only roughly or among themselves (an operator's cost): it is no basis for a
    claim that one model is faster than another. Raises what `run` raises.
    """
    started = clock()
    with no_garbage_collection():
        single = warm_up(run, clock, time_limit / 4)
        batch = max(1, math.ceil(2e-4 / max(single, 1e-7)))
        samples: list[float] = []
        # After 100 samples the median is known to about a tenth of the spread: more would be wasted.
        while len(samples) < min_samples or (len(samples) < 100 and clock() - started < time_limit):
            samples.append(turn(run, batch, False, clock))
            if clock() - started > 4 * time_limit:
                break
    return _latency(np.array(samples))


def turns(slots: int, round_index: int) -> list[int]:
    """The order of `slots` turns in a round: rotated by one every 4 rounds, reversed in every other cycle.

    So every slot has every place equally often, and comes before and after each of its neighbours.
    """
    cycle, shift = divmod(round_index // 4, slots)
    order = [(index + shift) % slots for index in range(slots)]
    return order[::-1] if cycle % 2 else order


def warm_up(run: Run, clock: Callable[[], float], budget: float) -> float:
    """Seconds of the fastest of some runs that plan memory and fill caches: 3 of them, fewer beyond `budget`."""
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
    """Seconds of one run, as the mean of `batch` of them."""
    if settle:
        run()
    start = clock()
    for _ in range(batch):
        run()
    return max((clock() - start) / batch, 1e-9)


def _latency(seconds: Floats) -> Latency:
    p10, median, p90 = (float(v) * 1e3 for v in np.percentile(seconds, [10, 50, 90]))
    return Latency(median, p10, p90, len(seconds))


def _logs(rows: list[list[float]], halves: int) -> Floats:
    """Logarithms of the samples, by round, half and model."""
    logs: Floats = np.log(np.array(rows)).reshape(len(rows), halves, -1)
    return logs


def _speedup(logs: Floats, model: int) -> SpeedUp:
    return _interval(logs[:, :, 0] - logs[:, :, model])


def _decided(speedup: SpeedUp, margin: float) -> bool:
    return speedup.low > 1 + margin or speedup.high < 1 - margin


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
