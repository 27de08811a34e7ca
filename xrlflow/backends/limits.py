"""What this process may use of the machine: processors by affinity and by the quota of its control groups, and memory.

A container sees all processors of its machine. Threads beyond its quota do not run faster: the kernel stops all of them
for the rest of each period (usually 100 ms), which makes every measurement worthless.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

ROOT = Path("/")
_UNLIMITED = 1 << 60
"""Version 1 writes the greatest number of pages for memory without a limit."""
_NONSENSE = 1 << 64
"""The kernel's numbers are below."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the control groups of a process permit; None: no limit.

    `versions`: of control groups that were found (1, 2). `cpus`: processors that the quota pays for. `memory`: bytes,
    and `used` bytes of them. `periods`: those that began with something to run, and `throttled`: those in which the
    quota was used up, since the group was made.
    """

    versions: tuple[int, ...] = ()
    cpus: float | None = None
    memory: int | None = None
    used: int | None = None
    periods: int = 0
    throttled: int = 0


def limits(root: Path = ROOT) -> Limits:
    """The limits of this process: of its control groups and of all groups around them that it can see.

    `root`: where `proc` and `sys` are. What cannot be read, or is not understood, is no limit.
    """
    groups = list(_groups(root))
    quotas = [quota for group in groups if (quota := _quota(group)) is not None]
    memory = [found for group in groups if (found := _memory(group)) is not None]
    limit, used = min(memory, key=lambda found: found[0]) if memory else (None, None)
    throttled, periods = max(map(_throttling, groups), default=(0, 0))
    versions = tuple(sorted({group.version for group in groups}))
    return Limits(versions, min(quotas, default=None), limit, used, periods, throttled)


def available_cpus(root: Path = ROOT) -> int:
    """The processors (hyper-threads count) that this process may use: by affinity, and by whole ones of its quota."""
    return _paid(len(allowed_cpus()), root)


def default_threads(root: Path = ROOT) -> int:
    """The physical cores that this process may use: by affinity, and by whole ones of its quota. At least 1."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return _paid(min(physical, len(one_cpu_a_core(allowed_cpus()))), root)


def most_threads() -> int:
    """The threads of a runtime that are accepted. More than the processors never help, and each one waits actively: an
    ONNX Runtime with a thousand threads on two processors takes 16 s to open a small model."""
    return max(64, 4 * (os.cpu_count() or 1))


def available_memory(root: Path = ROOT) -> int:
    """Bytes that this process and others may still take: of the machine, and of its control groups."""
    free = int(psutil.virtual_memory().available)
    found = limits(root)
    return free if found.memory is None else max(0, min(free, found.memory - (found.used or 0)))


def allowed_cpus() -> list[int]:
    """The numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def one_cpu_a_core(cpus: list[int]) -> list[int]:
    """The first CPU of each core, of several that share one (hyper-threads)."""
    seen: set[str] = set()
    chosen: list[int] = []
    for cpu in cpus:
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = _text(file).strip() or str(cpu)
        if core not in seen:
            seen.add(core)
            chosen.append(cpu)
    return chosen


def _paid(count: int, root: Path) -> int:
    quota = limits(root).cpus
    return max(1, count if quota is None else min(count, math.floor(quota)))


@dataclass(frozen=True, slots=True)
class _Group:
    """A control group: its version, a controller ("" with version 2, where one folder has all), and its folder."""

    version: int
    kind: str
    folder: Path


def _groups(root: Path) -> Iterator[_Group]:
    """The groups that this process is in, and those around them."""
    own = dict(_own_groups(root))
    for kinds, top, mounted in _mounts(root):
        for kind in kinds:
            if kind not in own:
                continue
            # Without a namespace of its own, a container is told the path on its machine, and has its group mounted.
            group = Path(own[kind])
            folder = mounted / group.relative_to(top) if group.is_relative_to(top) else mounted
            if ".." in folder.parts or not os.path.isdir(folder):
                folder = mounted
            yield _Group(1 if kind else 2, kind, folder)
            while folder != mounted:
                folder = folder.parent
                yield _Group(1 if kind else 2, kind, folder)


def _own_groups(root: Path) -> Iterator[tuple[str, str]]:
    """Controllers and the paths of this process's groups: lines like `4:cpu,cpuacct:/a/b`, or `0::/a/b`."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        kinds, colon, path = rest.partition(":")
        if colon:
            for kind in kinds.split(","):
                yield kind, path


def _mounts(root: Path) -> Iterator[tuple[tuple[str, ...], Path, Path]]:
    """The controllers of each mounted hierarchy, the group that is mounted, and where."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, dash, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not dash or len(fields) < 5 or not kind:
            continue
        place = root / fields[4].lstrip("/")
        if kind[0] == "cgroup2":
            yield ("",), Path(fields[3]), place
        elif kind[0] == "cgroup" and len(kind) > 2:
            yield tuple(kind[2].split(",")), Path(fields[3]), place


def _quota(group: _Group) -> float | None:
    """Processors that a group's quota pays for."""
    if group.version == 2:
        words = _text(group.folder / "cpu.max").split()
    elif group.kind == "cpu":
        words = [_text(group.folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    else:
        return None
    quota, period = map(_number, words) if len(words) == 2 else (None, None)
    if quota is None or quota <= 0 or period is None or period <= 0:  # "max" or -1: there is no quota
        return None
    return quota / period


def _memory(group: _Group) -> tuple[int, int | None] | None:
    """The bytes that a group may use, and those that it uses."""
    if group.version == 2:
        most, used = "memory.max", "memory.current"
    elif group.kind == "memory":
        most, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
    else:
        return None
    limit = _number(_text(group.folder / most))
    if limit is None or not 0 < limit < _UNLIMITED:
        return None
    return limit, _number(_text(group.folder / used))


def _throttling(group: _Group) -> tuple[int, int]:
    """Periods in which the quota was used up, and all periods."""
    if group.kind not in ("", "cpu"):
        return 0, 0
    counts = dict(line.split()[:2] for line in _lines(group.folder / "cpu.stat") if " " in line.strip())
    return _number(counts.get("nr_throttled", "")) or 0, _number(counts.get("nr_periods", "")) or 0


def _number(text: str) -> int | None:
    try:
        number = int(text)
    except ValueError:  # "max", or no such file
        return None
    return number if abs(number) < _NONSENSE else None


def _text(path: Path) -> str:
    """The text of a file; none if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()
