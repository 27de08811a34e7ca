"""How processes of this package are started: with Python, this package, and this process's environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, in which a child imports this package, and these variables."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = root + (os.pathsep + inherited if inherited else "")
    return {**os.environ, "PYTHONPATH": path, **variables}


def command(module: str, function: str, *arguments: int | str) -> list[str]:
    """The command of a process that calls a function of a module of ours.

    The working directory is not searched for modules: a file there may have the name of one.
    """
    path = "import sys; sys.path[:] = filter(None, sys.path)"
    return [sys.executable, "-c", f"{path}; from {module} import {function}; {function}(*{arguments!r})"]
