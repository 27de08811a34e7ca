"""What a measurement says: small frozen records that go into reports and JSON as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


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

    @property
    def bounded(self) -> bool:
        """There is an interval."""
        return self.low > 0.0 and self.high < math.inf

    def __str__(self) -> str:
        if not self.bounded:
            return f"{self.median:.3f}x (too few measurements for an interval)"
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


class Verdict(Enum):
    """What many processes say of two models."""

    FASTER = "faster"
    NOT_FASTER = "not clearly faster"
    REFUTED = "slower when it was measured again"
    TOO_FEW = "too few measurements"


@dataclass(frozen=True, slots=True)
class RepeatedComparison:
    """Two models compared afresh in many processes.

    `speedup`: in processes that had no part in a decision, their mean with a 95% interval that counts the spread
    *between* processes; None where nothing was decided or too few were left. `verdict`: what was decided, and `decided`
    the interval that did it, which allows for all looks at it; None where nothing had to be decided, or too few
    processes decided. `control` is the baseline compared with itself. `before` and `after`: of all turns in all
    processes; None where time was up before the first had ended. `processes`: all of them. `pairs`: of runs that are
    neighbours in time, in all. `disturbed`: in many processes others were using our CPUs.
    """

    speedup: SpeedUp | None
    control: SpeedUp | None
    before: Latency | None
    after: Latency | None
    seconds: float
    threads: int
    verdict: Verdict | None = None
    decided: SpeedUp | None = None
    processes: int = 1
    pairs: int = 0
    disturbed: bool = False
    fresh_processes: bool = True
