"""Whether other programs used the machine during a measurement."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from xrlflow.backends.results import Load

# The kernel counts CPU time in ticks of 10 ms: the difference of two readings may be wrong by this much on each CPU.
TICK = 0.01


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds since a fixed moment: used by all programs, stolen by the hypervisor, and used by this process; and a
    clock."""

    busy: float
    steal: float
    own: float
    clock: float


def read() -> Reading:
    """Read the counters. Reading takes about 50 microseconds, so call this function before and after a measurement, not
    inside."""
    times: Any = psutil.cpu_times()
    # `user` and `nice` include guests. Counters that a system lacks (macOS, Windows) count as 0.
    busy = times.user + getattr(times, "nice", 0.0) + times.system
    busy += getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    return Reading(busy, getattr(times, "steal", 0.0), time.process_time(), time.perf_counter())


def waited() -> float:
    """Seconds that this process's threads were ready to run but had no processor.

    Linux counts this exactly; counters of processor time are too coarse for milliseconds. 0 on other systems.
    """
    total = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(file.read_text().split()[1])
        except (OSError, IndexError):  # the thread has just ended
            continue
    return total * 1e-9


def judge(before: Reading, after: Reading, threads: int, cpus: int | None = None) -> Load:
    """The load between two readings.

    Other programs may use the CPUs that our `threads` leave free, up to half of them (the scheduler keeps programs
    apart as far as it can). Use beyond this half counts as use of our threads' CPUs. The measurement is disturbed if
    such use is more than 5% of our threads' time, or if more than 2% was stolen.
    """
    cpus = cpus or psutil.cpu_count() or 1
    seconds = max(after.clock - before.clock, 1e-9)
    own = (after.own - before.own) / seconds
    other = max(after.busy - before.busy - (after.own - before.own) - cpus * TICK, 0.0) / seconds
    steal = max(after.steal - before.steal - TICK, 0.0) / seconds
    threads = min(threads, cpus)
    in_our_way = max(other - (cpus - threads) / 2, 0.0)
    disturbed = in_our_way > 0.05 * threads or steal > 0.02 * threads
    return Load(other, steal, own, cpus, threads, seconds, disturbed)
