"""The environment of a report: versions, processor, threads."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

import psutil  # type: ignore[import-untyped]

from xrlflow.backends.limits import limits
from xrlflow.cost.machine import cpu_name

_PACKAGES = ("xrlflow", "onnxruntime", "onnx", "numpy")


def environment(threads: int, further: Mapping[str, str]) -> dict[str, str]:
    """Versions, processor and threads, as names and values for a table. The table has no name of a machine or a
    user."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    permitted = limits()
    quota = "" if permitted.cpus is None else f", {permitted.cpus:g} by quota"
    memory = min(psutil.virtual_memory().total, permitted.memory or math.inf) / 2**30
    return {
        "processor": cpu_name(),
        "cores": f"{cores} physical, {os.cpu_count()} logical{quota}",
        "threads": str(threads),
        "memory": f"{memory:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        **{name: version_of(name) for name in _PACKAGES},
        "Python": platform.python_version(),
        **further,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def version_of(package: str) -> str:
    """The version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:  # the package is on the path, and not installed
        return "not installed"
