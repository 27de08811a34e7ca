"""Simulated worlds in which `xrlflow.backends.decision` decides whether a result ships.

Each process has its own effect (where weights lie), and a few runs with heavy-tailed noise, drift, and other programs
that come and go.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xrlflow.backends.decision import settle
from xrlflow.backends.pairs import Estimate


@dataclass(frozen=True, slots=True)
class World:
    """A machine and a model: the errors of a process's estimate, and the number of processes that there is time for.

    Standard deviations and shifts are logarithms of ratios (0.01 is 1%).

    - `process`: the standard deviation between processes. With `two_sided` there are only two values, as with two
      layouts of weights.
    - `run`: the scale of the error of one comparison of two neighbouring runs, a Student's t with `tail` degrees of
      freedom. `runs`: the number of comparisons in a process.
    - `bursts`: the fraction of processes in which `run` is ten times as large.
    - `disturbed`: the fraction of processes in which another program slows down one of the models, by `blow`.
    - `order`: the shift in favour of the model that was loaded first. The order alternates.
    - `wander`: the standard deviation of a slow wave over all processes, which is similar for processes that run one
      after the other.
    """

    name: str
    process: float
    run: float
    runs: int
    affordable: int
    seconds: float  # of one process
    tail: float = 3.0
    two_sided: bool = False
    bursts: float = 0.0
    disturbed: float = 0.0
    blow: float = 0.0
    order: float = 0.0
    wander: float = 0.0

    def estimates(self, rng: np.random.Generator, truth: float) -> list[Estimate]:
        """The estimates of a comparison's processes, in the order in which they run. `truth`: the logarithm of the true
        ratio."""
        count = self.affordable
        effect = rng.standard_normal(count)
        if self.two_sided:
            effect = np.sign(effect)
        each = self.run * rng.standard_t(self.tail, (count, self.runs))
        if self.bursts:
            each *= np.where(rng.random((count, 1)) < self.bursts, 10.0, 1.0)
        off = np.median(each, axis=1)
        noise = 1.4826 * np.median(np.abs(each - off[:, None]), axis=1)
        hit = rng.random(count) < self.disturbed
        blows = hit * rng.normal(0.0, self.blow, count) if self.blow else 0.0
        first = self.order * np.where(np.arange(count) % 2 == 0, 1.0, -1.0) * rng.choice((-1.0, 1.0))
        phase, period = rng.uniform(0.0, 2.0 * math.pi), rng.uniform(5.0, 40.0)
        wave = self.wander * math.sqrt(2.0) * np.sin(2.0 * math.pi * np.arange(count) / period + phase)
        off += truth + self.process * effect + blows + first + wave
        return [Estimate(ratio, None, self.runs, n) for ratio, n in zip(off.tolist(), noise.tolist())]


WORLDS = (
    World("quiet", 0.004, 0.01, 16, 40, 0.25),
    World("one of two layouts", 0.01, 0.01, 16, 40, 0.25, two_sided=True),
    World("neighbours", 0.01, 0.05, 12, 40, 0.4, tail=2.0, disturbed=0.15, blow=0.10),
    World("drift, and a wave", 0.005, 0.02, 12, 40, 0.25, order=0.005, wander=0.003),
    World("slow model", 0.006, 0.02, 3, 10, 3.0, disturbed=0.1, blow=0.05),
    World("slow model, noisy", 0.006, 0.10, 3, 16, 1.2),
    World("slow model, bursts", 0.006, 0.01, 5, 10, 4.2, bursts=0.4),
    World("very slow model", 0.006, 0.03, 1, 6, 8.0),
    World("very slow, two layouts", 0.01, 0.01, 1, 6, 8.0, two_sided=True),
)


@dataclass(frozen=True, slots=True)
class WorldSummary:
    """The results of many comparisons in one world, with one true gain."""

    world: str
    gain: float
    shipped: float  # the part of all comparisons
    bias: (
        float | None
    )  # the mean of reported minus true gain of those shipped, as a ratio; None: nothing was reported
    off: float | None  # standard error of the bias
    half_width: float | None  # the median over reported intervals
    covered: float | None  # how often the interval contains the true gain
    seconds: float


def simulate(world: World, gain: float, replications: int, seed: int) -> WorldSummary:
    """Make this many comparisons with a true gain (0.01: 1% faster)."""
    rng = np.random.default_rng([seed, round(gain * 1e6), *world.name.encode()])
    truth = math.log1p(gain)
    shipped, seconds = 0, 0.0
    errors: list[float] = []
    halves: list[float] = []
    hits = 0
    for _ in range(replications):
        answer = settle(_draw(world.estimates(rng, truth)), world.affordable)
        seconds += world.seconds * (len(answer.decision.estimates) + answer.confirming)
        shipped += answer.faster
        if answer.faster and answer.figure is not None:
            errors.append(answer.figure.median - (1.0 + gain))
            halves.append((answer.figure.high - answer.figure.low) / 2)
            hits += answer.figure.low <= 1.0 + gain <= answer.figure.high
    reported = len(errors)
    return WorldSummary(
        world.name,
        gain,
        shipped / replications,
        statistics.fmean(errors) if reported else None,
        statistics.stdev(errors) / math.sqrt(reported) if reported > 1 else None,
        statistics.median(halves) if reported else None,
        hits / reported if reported else None,
        seconds / replications,
    )


def _draw(estimates: Sequence[Estimate]) -> Callable[[], Estimate | None]:
    left = iter(estimates)
    return lambda: next(left, None)
