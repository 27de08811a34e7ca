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
"""A limit of at least this many bytes counts as no limit: where there is none, version 1 of control groups gives a huge
number."""
_NONSENSE = 1 << 64
"""Numbers that the operating system's kernel reports are below this. A greater number cannot be right."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the control groups of a process permit."""

    versions: tuple[int, ...] = ()
    """The versions of control groups (1, 2) that this system has."""
    cpus: float | None = None
    """Processors that the quota pays for; None: no limit."""
    memory: int | None = None
    """Bytes that the process may use; None: no limit."""
    used: int | None = None
    """Bytes that are in use, of those in `memory`."""
    periods: int = 0
    """The number of periods, since the group was created, in which a process of it wanted to run."""
    throttled: int = 0
    """The number of these periods in which the quota was used up."""


def limits(root: Path = ROOT) -> Limits:
    """The limits of this process, by its control groups and all groups around them that it can see.

    `root`: the folder of `proc` and `sys`. A limit that cannot be read or understood counts as no limit.
    """
    groups = list(_groups(root))
    quotas = [quota for group in groups if (quota := _quota(group)) is not None]
    memory = [pair for group in groups if (pair := _memory(group)) is not None]
    limit, used = min(memory, key=lambda pair: pair[0]) if memory else (None, None)
    throttled, periods = max(map(_throttling, groups), default=(0, 0))
    versions = tuple(sorted({group.version for group in groups}))
    return Limits(versions, min(quotas, default=None), limit, used, periods, throttled)


def available_cpus(root: Path = ROOT) -> int:
    """The processors (hyper-threads count) that this process may use, by affinity and by its quota, rounded down."""
    return _paid(len(allowed_cpus()), root)


def default_threads(root: Path = ROOT) -> int:
    """The physical cores that this process may use, by affinity and by its quota, rounded down. At least 1."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return _paid(min(physical, len(one_cpu_a_core(allowed_cpus()))), root)


def most_threads() -> int:
    """The greatest number of threads that is accepted for a runtime. More threads than processors never help, and each
    of them waits actively: an ONNX Runtime with a thousand threads on two processors takes 16 s to open a small
    model."""
    return max(64, 4 * (os.cpu_count() or 1))


def available_memory(root: Path = ROOT) -> int:
    """Bytes that are free for this process and others, on the machine and in its control groups."""
    free = int(psutil.virtual_memory().available)
    limit = limits(root)
    return free if limit.memory is None else max(0, min(free, limit.memory - (limit.used or 0)))


def allowed_cpus() -> list[int]:
    """The numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def one_cpu_a_core(cpus: list[int]) -> list[int]:
    """The first CPU of each core: hyper-threads share one."""
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
    """A control group. `kind`: the name of its controller; "" in version 2, where one folder has all controllers."""

    version: int
    kind: str
    folder: Path


def _groups(root: Path) -> Iterator[_Group]:
    """The groups that this process belongs to, and the groups around them."""
    own = dict(_own_groups(root))
    for kinds, top, mounted in _mounts(root):
        for kind in kinds:
            if kind not in own:
                continue
            # A container without a namespace of its own sees the path of its group on the host, and has the group
            # itself mounted.
            group = Path(own[kind])
            folder = mounted / group.relative_to(top) if group.is_relative_to(top) else mounted
            if ".." in folder.parts or not os.path.isdir(folder):
                folder = mounted
            yield _Group(1 if kind else 2, kind, folder)
            while folder != mounted:
                folder = folder.parent
                yield _Group(1 if kind else 2, kind, folder)


def _own_groups(root: Path) -> Iterator[tuple[str, str]]:
    """The controllers of this process's groups and their paths, from lines like `4:cpu,cpuacct:/a/b` or `0::/a/b`."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        kinds, colon, path = rest.partition(":")
        if colon:
            for kind in kinds.split(","):
                yield kind, path


def _mounts(root: Path) -> Iterator[tuple[tuple[str, ...], Path, Path]]:
    """For each mounted hierarchy: its controllers, the group that is mounted, and the folder where it is mounted."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, dash, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not dash or len(fields) < 5 or not kind:
            continue
        folder = root / fields[4].lstrip("/")
        if kind[0] == "cgroup2":
            yield ("",), Path(fields[3]), folder
        elif kind[0] == "cgroup" and len(kind) > 2:
            yield tuple(kind[2].split(",")), Path(fields[3]), folder


def _quota(group: _Group) -> float | None:
    """The processors that a group's quota pays for; None if it has none."""
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
    """The bytes that a group may use, and the bytes in use (None: unknown); None if the group has no limit."""
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
    """(The number of periods in which the quota was used up, the number of all periods) of a group."""
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
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()
