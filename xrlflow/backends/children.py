"""Processes of our own: Python, with the package that is running here."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO


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


def serve_in_child(
    function: Callable[..., None], descriptor: int, *texts: str, log: IO[bytes], **variables: str
) -> subprocess.Popen[bytes]:
    """A process that calls a function of a module of ours with a descriptor, which it inherits, and these texts.

    What it says on standard error goes to `log`. Ctrl-C does not reach it. `variables`: of its environment. Raises
    OSError where no process can be started.
    """
    return subprocess.Popen(
        command(function.__module__, function.__name__, descriptor, *texts),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,
        pass_fds=(descriptor,),
        start_new_session=True,
        env=environment(**variables),
    )


def end_with_parent(descriptor: int) -> None:
    """End this process as soon as the other end of a socket is closed, whatever it is doing then.

    A parent that is killed cannot end its children, and one of them may be in a loop without end.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # that the other end is closed is told always
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
