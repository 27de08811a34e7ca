"""Pins threads to the same CPUs for every model that is compared.

A scheduler places a session's worker threads when they start, and may leave them on the same CPUs. If another program
or the main thread uses the same CPU, this session stays slow as long as it lives, while the session of the compared
model is not slowed. On a 2-core machine under load, two sessions of one model then differed steadily by a factor of two
(2.09x [2.07, 2.09]; 0.60x [0.50, 0.80]), which the A/A control of a single session cannot see. With the workers of all
sessions on the same CPUs, and the calling thread on another, no such ratio occurred; on a quiet machine pinning changes
nothing. ONNX Runtime pins its workers itself if no number of threads is set.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from xrlflow.backends.limits import allowed_cpus, one_cpu_a_core

LOOK = 0.05
"""Seconds during which the CPUs are watched if there are more CPUs than threads."""


def cache_levels() -> dict[int, int]:
    """Bytes of the first core's data caches by level (1, 2, ...); empty if the system does not list them."""
    sizes: dict[int, int] = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 1)
            if kind != "Instruction":
                sizes[int(level)] = int(size.rstrip("KMG")) * unit
        except (OSError, ValueError):  # some systems list a cache without its size
            continue
    return sizes


def last_level() -> int:
    """Bytes of the largest cache of the first core; 32 MB if the system does not list caches."""
    return max(cache_levels().values(), default=0) or 32_000_000


def choose_cpus(threads: int) -> tuple[int, ...] | None:
    """One CPU (by number) for each of `threads` threads, on different cores. The calling thread gets the first.

    The CPUs belong to the block of neighbouring cores that other programs use least at the moment. Returns None if a
    process cannot choose its CPUs (on systems other than Linux), or if there are too few cores; the operating system's
    scheduler places the threads in this case.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = one_cpu_a_core(allowed_cpus())
    if threads > len(cores):
        return None
    blocks = [cores[first : first + threads] for first in range(0, len(cores) - threads + 1, threads)]
    if len(blocks) > 1:
        busy = _busy()
        blocks.sort(key=lambda block: sum(busy.get(cpu, 0.0) for cpu in block))
    return tuple(blocks[0])


@contextlib.contextmanager
def pinned(cpus: Sequence[int] | None) -> Iterator[None]:
    """Keep the calling thread on the first of `cpus` inside the block. With None the thread is not pinned."""
    if cpus is None:
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpus[0]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _busy() -> dict[int, float]:
    """How busy each CPU is during the next `LOOK` seconds, from 0 to 1."""
    before = psutil.cpu_times(percpu=True)
    time.sleep(LOOK)
    after = psutil.cpu_times(percpu=True)
    return {cpu: 1.0 - (b.idle - a.idle) / LOOK for cpu, (a, b) in enumerate(zip(before, after))}
