"""What a measurement says: small frozen records that go into reports and JSON as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """How many times faster a model is than the baseline, with the 95% interval of that median.

    An interval that could not be formed (too few samples) is (0, inf).
    """

    median: float
    low: float
    high: float

    @property
    def faster(self) -> bool:
        """The whole interval lies above 1."""
        return self.low > 1.0

    @property
    def slower(self) -> bool:
        """The whole interval lies below 1."""
        return self.high < 1.0

    @property
    def width(self) -> float:
        """Width of the interval in log units: 0.01 is one percent from end to end."""
        return (
            math.log(self.high) - math.log(self.low) if 0.0 < self.low <= self.high < math.inf else math.inf
        )

    def __str__(self) -> str:
        return f"{self.median:.3f}x [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one run: the median sample, and the 10th and 90th percentile as its spread."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    samples: int

    @property
    def seconds(self) -> float:
        """The median in seconds."""
        return self.median_ms / 1e3


@dataclass(frozen=True, slots=True)
class Load:
    """What else the machine was doing during a measurement.

    `other` is how many CPUs on average were busy with somebody else's work, `steal` how many the
    hypervisor gave to another machine, `own` how many we used, of `cpus` in all, over `seconds`.
    `disturbed` says that our `threads` threads cannot have had their CPUs to themselves.
    """

    other: float
    steal: float
    own: float
    cpus: int
    threads: int
    seconds: float
    disturbed: bool

    @property
    def other_fraction(self) -> float:
        """The share of the machine (0 to 1) that worked for others, stolen time included."""
        return (self.other + self.steal) / self.cpus


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several models measured in turns in one process. The first is the baseline.

    `speedups[i]` says how many times faster `latencies[i + 1]` is than the baseline. `control` is the
    baseline against itself, timed in a turn of its own (None: not asked for): its interval should hold 1, and
    when it does not, neither should the others be believed. `samples` is the number of rounds, and
    `converged` says that every interval got as narrow as asked before the time limit.
    """

    latencies: tuple[Latency, ...]
    speedups: tuple[SpeedUp, ...]
    control: SpeedUp | None
    load: Load
    samples: int
    seconds: float
    threads: int
    converged: bool

    @property
    def speedup(self) -> SpeedUp:
        """Of the second model over the first."""
        return self.speedups[0]

    @property
    def trustworthy(self) -> bool:
        """The control holds 1 to within half a percent, and nobody else was using our CPUs."""
        control = self.control
        fair = control is None or (control.low <= 1.005 and control.high >= 0.995)
        return fair and not self.load.disturbed


@dataclass(frozen=True, slots=True)
class RepeatedComparison:
    """Two models compared afresh in several processes.

    `speedup` is the mean of the processes' log medians with a 95% interval that counts the spread *between*
    processes; `control` is the same of their A/A controls. `before` and `after` are medians over the
    processes.
    """

    speedup: SpeedUp
    control: SpeedUp
    before: Latency
    after: Latency
    runs: tuple[Comparison, ...]
    seconds: float
    threads: int
    fresh_processes: bool = True

    @property
    def disturbed(self) -> bool:
        """In at least one process others were using our CPUs."""
        return any(run.load.disturbed for run in self.runs)
