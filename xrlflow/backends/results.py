"""The results of measurements: frozen records, which are written to reports and JSON unchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

# An interval wider than this around 1 is useless: its ends are a factor of 1.5 apart.
_RESTLESS = math.log(1.5)


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """How many times faster a model is than the baseline: the median, and its 95% interval.

    The interval is (0, inf) if there are too few samples for an interval.
    """

    median: float
    low: float
    high: float

    @property
    def faster(self) -> bool:
        """Whether the whole interval is above 1."""
        return self.low > 1.0

    @property
    def slower(self) -> bool:
        """Whether the whole interval is below 1."""
        return self.high < 1.0

    @property
    def width(self) -> float:
        """The width of the interval in logarithms: 0.01 is one percent from end to end."""
        return (
            math.log(self.high) - math.log(self.low) if 0.0 < self.low <= self.high < math.inf else math.inf
        )

    @property
    def bounded(self) -> bool:
        """Whether there is an interval."""
        return self.low > 0.0 and self.high < math.inf

    def __str__(self) -> str:
        if not self.bounded:
            return f"{self.median:.3f}x (too few measurements for an interval)"
        restless = self.width > _RESTLESS and not (self.faster or self.slower)
        doubt = " (the machine was too restless to say)" if restless else ""
        return f"{self.median:.3f}x [{self.low:.3f}, {self.high:.3f}]{doubt}"


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one run: the median, and the 10th and 90th percentile as its spread."""

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
    """The use of CPUs during a measurement, by other programs and by this process."""

    other: float
    """CPUs that other programs used on average."""
    steal: float
    """CPUs that the hypervisor gave to other machines, on average."""
    own: float
    """CPUs that this process used on average."""
    cpus: int
    """CPUs of the machine."""
    threads: int
    """Threads of the measured models."""
    seconds: float
    disturbed: bool
    """Whether other programs must have used CPUs of the measured threads."""

    @property
    def other_fraction(self) -> float:
        """The fraction of this machine's CPUs (0 to 1) that other programs and other virtual machines used."""
        return (self.other + self.steal) / self.cpus


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several models that took turns in one process. The first is the baseline."""

    latencies: tuple[Latency, ...]
    speedups: tuple[SpeedUp, ...]
    """`speedups[i]` says how many times faster `latencies[i + 1]` is than the baseline."""
    control: SpeedUp | None
    """The baseline compared with itself, in a turn of its own; None if the caller requested no control. If its interval
    does not contain 1, the other intervals are not reliable either."""
    load: Load
    samples: int
    """The number of rounds."""
    seconds: float
    threads: int
    converged: bool
    """Whether every interval became as narrow as requested within the time limit."""

    @property
    def speedup(self) -> SpeedUp:
        """The speed-up of the second model over the first."""
        return self.speedups[0]

    @property
    def trustworthy(self) -> bool:
        """Whether the control's interval contains 1 to within half a percent, and no other program used our CPUs."""
        control = self.control
        fair = control is None or (control.low <= 1.005 and control.high >= 0.995)
        return fair and not self.load.disturbed


class Verdict(Enum):
    """The result of comparing two models in many processes."""

    FASTER = "faster"
    NOT_FASTER = "not clearly faster"
    REFUTED = "slower when it was measured again"
    TOO_FEW = "too few measurements"


@dataclass(frozen=True, slots=True)
class RepeatedComparison:
    """Two models compared in many fresh processes."""

    speedup: SpeedUp | None
    """The mean over processes that had no part in the decision, with a 95% interval from the spread between processes;
    None if nothing was decided, or if there was time for too few processes."""
    control: SpeedUp | None
    """The baseline compared with itself."""
    before: Latency | None
    """The latency of the baseline over all turns of all processes; None if the time was over before the first process
    ended."""
    after: Latency | None
    """The latency of the new model, over the same turns."""
    seconds: float
    threads: int
    verdict: Verdict | None = None
    decided: SpeedUp | None = None
    """The interval that led to the verdict, which allows for all interim analyses; None if there was no decision, or
    if too few processes took part."""
    processes: int = 1
    pairs: int = 0
    """The number of pairs of neighbouring turns."""
    disturbed: bool = False
    """Whether other programs used the CPUs of our threads in more than a quarter of the processes."""
    fresh_processes: bool = True
    """Whether each sample came from a process of its own."""
    ratios: tuple[float, ...] = ()
    """How many times faster the new model ran in each process. Processes of the decision come first."""
    controls: tuple[float, ...] = ()
    """How many times faster the baseline ran than itself in each process."""
