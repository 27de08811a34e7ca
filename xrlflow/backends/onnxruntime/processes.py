"""Compares two models in many fresh processes. All reported speed-ups come from here."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from xrlflow.backends.decision import FEWEST, RepeatedDecision, confirm, pooled, settle
from xrlflow.backends.interleave import SETTLE_BELOW
from xrlflow.backends.onnxruntime.session import Optimization, Options, resolve_threads
from xrlflow.backends.onnxruntime.timing import Sample
from xrlflow.backends.onnxruntime.worker import Sampler, Setup, prepare
from xrlflow.backends.pairs import Estimate, errors, estimate
from xrlflow.backends.protocol import BackendError, Feeds, ModelSource
from xrlflow.backends.results import Latency, RepeatedComparison, SpeedUp, Verdict
from xrlflow.backends.statistics import SPREAD, pool
from xrlflow.workers import Forks, WorkerError, WorkerLate

if TYPE_CHECKING:
    from typing_extensions import Self

GRACE = 0.03
"""A process that was started in time may exceed the time limit by this fraction of the limit."""
_MOST_PROCESSES = 80
_ENOUGH_PROCESSES, _FEWEST_PROCESSES = 12, 5
"""If there is no time for `_ENOUGH_PROCESSES` processes, each process takes fewer turns. Its turns last at least as
long as its start, unless there would then be time for fewer than `_FEWEST_PROCESSES` processes."""
_FEWEST_TURNS, _ROBUST_TURNS, _MOST_TURNS = 4, 12, 80
"""The least number of turns of a process, the number for a robust median, and the greatest number. Where other programs
slowed single turns by half, processes of an unchanged ResNeXt-50 (47 ms) differed by 11% with 4 turns, 2.5% with 8, and
0.6% with 16, and took 1.1, 1.5 and 2.2 s."""
_PRECISE = 0.005
"""The standard error of a mean (a logarithm) above which further processes are worth their time."""
_FIGURE_ALONE = 24
"""The number of processes that measure a speed-up if there is no decision to make."""


@dataclass(frozen=True, slots=True)
class Deciding:
    """How to decide whether a model is accepted: if it is measured to be faster, and if `check` returns True.

    `check_seconds`: how long `check` takes. A decision takes more than `patience` seconds only if other programs make
    the mean of the estimates uncertain by more than 0.5%; a smaller uncertainty is hardly worth more time.
    """

    check: Callable[[], bool]
    check_seconds: float = 0.0
    patience: float = math.inf


def measure_in_fresh_processes(
    before: ModelSource,
    after: ModelSource,
    feeds: Feeds,
    *,
    deciding: Deciding | None = None,
    threads: int | None = None,
    time_limit: float = 60.0,
    optimization: Optimization = Optimization.ALL,
    session_options: Options | None = None,
) -> RepeatedComparison:
    """How many times faster `after` is than `before`, measured in many fresh processes.

    What is fixed for the life of a process (addresses of weights, CPUs of threads) can make one session a percent or
    more faster than another session of the same model, so a single process cannot tell a small speed-up from chance.
    Each process opens two sessions, every other one in reverse order, and takes a few turns (see `pairs`). It takes
    more turns if the turns of the first process were noisy, or if processes take long to start. The module `decision`
    says how many processes there are. With `deciding`, they first decide whether `after` is accepted; if so, further
    processes measure by how much it is faster. Without it they only measure.

    `time_limit`: seconds for everything, the check included. It ends earlier when the result is precise enough, or when
    the first processes show that there is no time for another. Ctrl-C ends the running process.

    A SessionOptions object cannot be sent to another process. With one, each sample uses new sessions in this process,
    and the result's `fresh_processes` is False; a mapping of configuration entries is better.

    Raises BackendError if a process crashes (with the end of its standard error), and if a model cannot be loaded or
    run.
    """
    started = time.monotonic()
    threads = resolve_threads(threads, session_options)
    setup = Setup(before, after, feeds, threads, optimization, session_options)
    with contextlib.ExitStack() as stack:
        if setup.portable:
            source: Source = stack.enter_context(FreshProcesses(setup)).sample
        else:

            def source(index: int, turns: int | None, deadline: float) -> Sample:
                return setup.sample(index, turns)

        drawing = _Drawing(source, started + time_limit, GRACE * time_limit)
        result: RepeatedDecision | SpeedUp | None = None
        if deciding is not None:
            result = drawing.decided(deciding, started)
        elif affordable := drawing.affordable_processes():
            result = confirm(drawing.draw, min(affordable, _FIGURE_ALONE))
    return drawing.summary(result, time.monotonic() - started, threads, deciding is not None, setup.portable)


# source(index, turns, deadline) takes a sample. It returns None if its turns were not over at `deadline`
# (time.monotonic).
Source: TypeAlias = Callable[[int, int | None, float], Sample | None]


@dataclass(slots=True)
class _Drawing:
    """Draws samples one after the other, until `deadline` (time.monotonic)."""

    source: Source
    deadline: float
    grace: float
    turns: int | None = None
    samples: list[Sample] = field(default_factory=list)
    estimates: list[Estimate] = field(default_factory=list)
    waiting: list[Estimate] = field(default_factory=list)  # measured by `affordable`, but not drawn yet
    longest: float = 0.0
    patient_until: float = math.inf
    ended: bool = False  # a sample was not over in time, and its processes were ended

    def decided(self, deciding: Deciding, started: float) -> RepeatedDecision | None:
        """The result of a decision that was begun at `started` (time.monotonic); None if there is no time for one."""
        end = self.deadline
        self.deadline, self.patient_until = end - deciding.check_seconds, started + deciding.patience

        def check() -> bool:
            self.deadline, self.patient_until = end, math.inf
            return deciding.check()

        affordable = self.affordable_processes()
        return settle(self.draw, affordable, check=check) if affordable else None

    def affordable_processes(self) -> int:
        """Take one sample, and choose the number of turns of the later samples. Returns the number of processes that
        there is time for.

        The first sample counts as one of these processes if it has enough turns.
        """
        started = time.monotonic()
        first = self._measure()
        if first is None:
            return 0
        seconds = time.monotonic() - started
        sampled = self.samples[0]
        each = sampled.measuring / max(len(sampled.turns), 1)
        start = max(seconds - sampled.measuring, 0.0)
        left = max(self.deadline - time.monotonic(), 0.0)
        slow = sampled.turns[0].seconds >= SETTLE_BELOW
        self.turns = _turns(self.estimates[0].noise, start, each, left, 2 if slow else _FEWEST_TURNS)
        # If the first sample has much fewer turns than later ones will have, it only serves to choose the number of
        # turns.
        if self.turns <= 2 * len(sampled.turns):
            self.waiting.append(first)
        self.longest = start + self.turns * each
        return min(len(self.waiting) + int(left / max(self.longest, 1e-6)), _MOST_PROCESSES)

    def draw(self) -> Estimate | None:
        if self.waiting:
            return self.waiting.pop()
        now = time.monotonic()
        if self.ended or now + self.longest > self.deadline or (now > self.patient_until and self._precise()):
            return None
        started = time.monotonic()
        drawn = self._measure()
        self.longest = max(0.8 * self.longest, time.monotonic() - started)
        return drawn

    def _precise(self) -> bool:
        """Whether the mean of the estimates is precise enough. This must not depend on the mean itself: a stop at high
        estimates would select them."""
        return len(self.estimates) > FEWEST and pooled(self.estimates).error <= _PRECISE

    def _measure(self) -> Estimate | None:
        sample = self.source(len(self.samples), self.turns, self.deadline + self.grace)
        if sample is None:
            self.ended = True
            return None
        self.samples.append(sample)
        self.estimates.append(estimate(sample.turns))
        return self.estimates[-1]

    def summary(
        self,
        result: RepeatedDecision | SpeedUp | None,
        seconds: float,
        threads: int,
        deciding: bool,
        fresh: bool,
    ) -> RepeatedComparison:
        controlled = [(e.control, e) for e in self.estimates if e.control is not None]
        controls = [control for control, _ in controlled]
        disturbed = sum(s.load.disturbed for s in self.samples)
        decision = result if isinstance(result, RepeatedDecision) else None
        verdict = (decision.verdict if decision else Verdict.TOO_FEW) if deciding else None
        return RepeatedComparison(
            speedup=result.figure if isinstance(result, RepeatedDecision) else result,
            control=(
                pool(controls, errors([e for _, e in controlled])).interval(0.025)
                if len(controls) >= FEWEST
                else None
            ),
            before=_latency(self.samples, 0),
            after=_latency(self.samples, 1),
            seconds=seconds,
            threads=threads,
            verdict=verdict,
            decided=decision.decision.interval if decision else None,
            processes=len(self.samples),
            pairs=sum(e.pairs for e in self.estimates),
            disturbed=disturbed > len(self.samples) / 4,
            fresh_processes=fresh,
            ratios=tuple(math.exp(e.ratio) for e in self.estimates),
            controls=tuple(map(math.exp, controls)),
        )


def _turns(noise: float, start: float, each: float, left: float, fewest: int) -> int:
    """The even number of turns of a process with which the interval becomes narrowest.

    `noise`: the standard deviation of a pair of turns. Seconds: `start`, to start a process; `each`, of one turn;
    `left`, of the time for all processes.
    """
    # This number minimises the variance (SPREAD**2 + noise**2 / turns) times the cost (start + turns * each).
    best = max(noise / SPREAD * math.sqrt(start / max(each, 1e-6)), _ROBUST_TURNS)
    measuring = max(left / _ENOUGH_PROCESSES, min(2.0 * start, left / _FEWEST_PROCESSES)) - start
    room = measuring / max(each, 1e-6)
    return max(fewest, min(2 * round(min(best, room) / 2), _MOST_TURNS))


def _latency(samples: Sequence[Sample], model: int) -> Latency | None:
    seconds = [turn.seconds for s in samples for turn in s.turns if turn.model == model]
    if not seconds:
        return None
    p10, median, p90 = (float(v) * 1e3 for v in np.percentile(seconds, [10, 50, 90]))
    return Latency(median, p10, p90, len(seconds))


class FreshProcesses:
    """Starts processes in which two models are loaded and timed, one process at a time. See `worker.Sampler`."""

    def __init__(self, setup: Setup) -> None:
        # A process in which NumPy runs threads could not be forked safely.
        variables = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        try:
            self.forks = Forks(partial(prepare, setup), variables)
        except WorkerError as error:
            raise BackendError(str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.forks.close()

    def sample(self, index: int, turns: int | None, deadline: float) -> Sample | None:
        """A sample of a new process. Every other one (odd `index`) begins with the new model.

        Returns None if the sample was not over at `deadline` (time.monotonic). Raises BackendError.
        """
        worker = self.forks.worker(Sampler, "a measuring process")
        try:
            worker.begin((index, turns))
            sample: Sample | BackendError = worker.reply(deadline)
        except WorkerLate:
            return None
        except WorkerError as error:
            raise BackendError(str(error)) from error
        finally:
            worker.close()
        if isinstance(sample, BackendError):
            raise sample
        return sample
