"""Where threads run: the same CPUs for every model that is compared.

A scheduler puts a session's worker threads somewhere when they start and may leave them there. When that is on
the CPU of somebody else's work, or of the main thread, the session is slower for as long as it lives, and its
sibling is not. On a 2-core machine with other load, two sessions of one model then differed steadily by a
factor of two (2.09x [2.07, 2.09]; 0.60x [0.50, 0.80]) while the A/A control of a single session saw nothing. With the
workers of all sessions on the same CPUs, and the calling thread on one of its own, no such ratio came up in the
same test; on a quiet machine latencies are the same with and without. ONNX Runtime itself pins its workers when
it is not told a thread count.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

LOOK = 0.05
"""Seconds for which the CPUs are watched when there are more of them than threads."""


def default_threads() -> int:
    """The physical cores that this process may run on."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(cores, allowed))


def cache_levels() -> dict[int, int]:
    """Bytes of the caches for data of the first core, by level (1, 2, ...); empty where the system does not say."""
    found: dict[int, int] = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 1)
            if kind != "Instruction":
                found[int(level)] = int(size.rstrip("KMG")) * unit
        except (OSError, ValueError):  # some systems list a cache and do not know its size
            continue
    return found


def choose_cpus(threads: int) -> tuple[int, ...] | None:
    """One CPU (by number) for each of `threads` threads, on cores of their own; the first is the calling thread's.

    Of the blocks of neighbouring cores the one that others use least right now. None where a process cannot choose
    (the system is not Linux) or has too few cores: then the scheduler does what it can.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = _one_cpu_a_core(sorted(os.sched_getaffinity(0)))
    if threads > len(cores):
        return None
    blocks = [cores[first : first + threads] for first in range(0, len(cores) - threads + 1, threads)]
    if len(blocks) > 1:
        busy = _busy()
        blocks.sort(key=lambda block: sum(busy.get(cpu, 0.0) for cpu in block))
    return tuple(blocks[0])


@contextlib.contextmanager
def pinned(cpus: Sequence[int] | None) -> Iterator[None]:
    """Keep the calling thread on the first of `cpus` (None: leave it alone)."""
    if cpus is None:
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpus[0]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _one_cpu_a_core(cpus: Sequence[int]) -> list[int]:
    """Of CPUs that share a core (hyper-threads) the first."""
    seen: set[str] = set()
    chosen: list[int] = []
    for cpu in cpus:
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = file.read_text().strip() if file.exists() else str(cpu)
        if core not in seen:
            seen.add(core)
            chosen.append(cpu)
    return chosen


def _busy() -> dict[int, float]:
    """How much of the next moment each CPU works, 0 to 1."""
    before = psutil.cpu_times(percpu=True)
    time.sleep(LOOK)
    after = psutil.cpu_times(percpu=True)
    return {cpu: 1.0 - (b.idle - a.idle) / LOOK for cpu, (a, b) in enumerate(zip(before, after))}
