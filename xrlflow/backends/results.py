"""The results of measurements: small frozen records, which go into reports and JSON as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

# An interval wider than this around 1 tells nothing: its ends are a factor of 1.5 apart.
_RESTLESS = math.log(1.5)


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """How many times faster a model is than the baseline, with the 95% interval of that median.

    The interval is (0, inf) if there are too few samples for one.
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
    """What other programs did during a measurement.

    `other`: CPUs that other programs used on average; `steal`: CPUs that the hypervisor gave to other machines; `own`:
    CPUs that we used, of `cpus` in all, over `seconds`. `disturbed`: our `threads` threads cannot have had their CPUs
    for themselves.
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
        """The part of the machine (0 to 1) that worked for others, including stolen time."""
        return (self.other + self.steal) / self.cpus


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several models measured in turns in one process. The first is the baseline.

    `speedups[i]` says how many times faster `latencies[i + 1]` is than the baseline. `control` compares the baseline
    with itself in a turn of its own (None: not asked for): if its interval does not contain 1, the others are not
    reliable either. `samples`: the number of rounds. `converged`: every interval became as narrow as asked within the
    time limit.
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
        """The speed-up of the second model over the first."""
        return self.speedups[0]

    @property
    def trustworthy(self) -> bool:
        """Whether the control contains 1 to within half a percent, and no other program used our CPUs."""
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
    """Two models compared in many fresh processes.

    - `speedup`: the mean over processes that had no part in the decision, with a 95% interval from the spread between
      processes; None if nothing was decided, or too few processes were left.
    - `verdict`: the decision. `decided`: the interval that decided, which allows for all looks; None if nothing had to
      be decided, or too few processes took part.
    - `control`: the baseline compared with itself. `before`, `after`: latencies over all turns of all processes; None
      if the time was up before the first had ended.
    - `processes`: their number. `pairs`: the number of pairs of neighbouring turns. `disturbed`: other programs used
      our CPUs in many processes.
    - `ratios`, `controls`: how many times faster the new model, and the baseline itself, ran in each process; those
      that decided come first.
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
    ratios: tuple[float, ...] = ()
    controls: tuple[float, ...] = ()
