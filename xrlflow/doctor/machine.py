"""Checks of the machine: processor, threads, load, frequency and memory."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from xrlflow.backends import system_load
from xrlflow.backends.limits import ROOT, Limits, allowed_cpus, default_threads, limits
from xrlflow.cost.machine import cpu_name
from xrlflow.doctor.finding import Finding, Status

_LOOK = 0.25
"""Seconds during which the load is measured."""
_LITTLE = 2 << 30
"""Bytes of free memory that suffice for small models."""
_THROTTLED = 0.02
"""If the control group of this process used up its quota of processor time in more than this fraction of the periods,
measurements are useless.
"""


def processor() -> Finding:
    logical = os.cpu_count() or 1
    cores = psutil.cpu_count(logical=False) or logical
    return Finding("processor", Status.OK, f"{cpu_name()}, {cores} cores, {logical} hardware threads")


def threads(root: Path = ROOT) -> Finding:
    """The default number of threads, and what limits it."""
    permitted = limits(root)
    logical, allowed = os.cpu_count() or 1, len(allowed_cpus())
    parts = [f"{default_threads(root)} by default"]
    if allowed < logical:
        parts.append(f"{allowed} of {logical} processors by affinity")
    if permitted.cpus is not None:
        parts.append(f"{permitted.cpus:g} processors by quota (control groups, {_versions(permitted)})")
    if permitted.throttled:
        parts.append(f"stopped in {permitted.throttled} of {permitted.periods} periods")
    text = ", ".join(parts)
    if permitted.cpus is not None and permitted.cpus < 1:
        advice = (
            "with less than one processor, every measurement is disturbed: give the container one or more"
        )
        return Finding("threads", Status.WARN, text, advice)
    if permitted.throttled > _THROTTLED * max(permitted.periods, 1):
        advice = "measurements are disturbed: give the container whole processors (docker: --cpuset-cpus 0-3)"
        return Finding("threads", Status.WARN, text, advice)
    return Finding("threads", Status.OK, text)


def load() -> Finding:
    """How much other programs use the processors now. The check takes a quarter of a second, during which this process
    sleeps.
    """
    before = system_load.read()
    time.sleep(_LOOK)
    judged = system_load.judge(before, system_load.read(), default_threads())
    average = os.getloadavg()[0]
    text = f"other programs use {judged.other:.1f} of {judged.cpus} processors, {average:.1f} on average of a minute"
    if judged.steal > 0.02:
        text += f"; {judged.steal:.2f} are given to other virtual machines"
    if judged.disturbed:
        advice = "measurements take longer and are less certain: stop other programs, or use fewer --threads"
        return Finding("load", Status.WARN, text, advice)
    return Finding("load", Status.OK, text)


def frequency(root: Path = ROOT) -> Finding:
    """Whether the processor changes its frequency by itself: the check reads the governor of each core, and the
    boost."""
    governors: Counter[str] = Counter()
    for file in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"):
        if text := _text(file):
            governors[text] += 1
    if not governors:
        return Finding("frequency", Status.OK, "not readable here, as in most virtual machines")
    description = "governor " + ", ".join(f"{name} ({count})" for name, count in sorted(governors.items()))
    boost = {"0": "off", "1": "on"}.get(_text(root / "sys/devices/system/cpu/cpufreq/boost"))
    turbo = {"0": "on", "1": "off"}.get(_text(root / "sys/devices/system/cpu/intel_pstate/no_turbo"))
    if state := boost or turbo:
        description += f", boost {state}"
    if set(governors) != {"performance"}:
        advice = "for steadier measurements: sudo cpupower frequency-set -g performance"
        return Finding("frequency", Status.WARN, description, advice)
    return Finding("frequency", Status.OK, description)


def memory(root: Path = ROOT) -> Finding:
    """The free memory of the machine, within the limit of the control group."""
    machine = psutil.virtual_memory()
    permitted = limits(root)
    free, text = machine.available, f"{_gib(machine.available)} free of {_gib(machine.total)}"
    if permitted.memory is not None and permitted.memory < machine.total:
        free = min(free, permitted.memory - (permitted.used or 0))
        text += f"; {_gib(free)} free of {_gib(permitted.memory)} by the limit of the control group"
    if free < _LITTLE:
        return Finding(
            "memory", Status.WARN, text, "large models will not fit: free some, or raise the limit"
        )
    return Finding("memory", Status.OK, text)


def _versions(permitted: Limits) -> str:
    return "version " + " and ".join(map(str, permitted.versions))


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def _text(path: Path) -> str:
    """The content of a file; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
