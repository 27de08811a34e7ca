"""Runs models in a separate process: at a size of 0, some kernels of ONNX Runtime divide by zero and crash.

Other kernels return uninitialised memory. The process fills new memory with a pattern, so that these kernels are never
right by chance. A process serves many runs, one at a time, and a new one is started after a crash.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from xrlflow.backends.children import Child, ChildDied
from xrlflow.backends.onnxruntime.session import Options
from xrlflow.backends.protocol import BackendError, OutOfTime
from xrlflow.common import deadline
from xrlflow.verify.runner import Model, first_line, opened

# Time limit in seconds, for starting the process and one run together.
_LIMIT = 60.0

# The GNU C library fills new memory with the complement of this byte: every float becomes -0.37.
_PATTERN = "65"
# Processes that run nothing now. A thread removes a process from this list while it uses it, because the calls of two
# threads must not mix.
_idle: list[Child] = []


def run_isolated(
    model: Model,
    feeds: Mapping[str, Any],
    *,
    threads: int | None = None,
    session_options: Options | None = None,
) -> list[Any]:
    """The outputs of one run. Raises BackendError, also if the run crashes its process or takes more than a minute;
    OutOfTime if the deadline of the caller passes (`deadline`)."""
    if session_options is not None and not isinstance(session_options, Mapping):
        raise BackendError("session options that are an object cannot be handed to another process")
    source = model if isinstance(model, (str, os.PathLike, bytes)) else model.SerializeToString()
    options = None if session_options is None else dict(session_options)
    try:
        with deadline.within(time.monotonic() + _LIMIT), _child() as child:
            return child.call(_run, source, dict(feeds), threads, options)
    except ChildDied as error:
        raise BackendError(f"ONNX Runtime ends the process: {first_line(error)}") from error
    except OutOfTime as error:
        if deadline.over():
            raise
        raise BackendError("ONNX Runtime ends the process, or does not end") from error


@contextmanager
def _child() -> Iterator[Child]:
    """An idle process, or a new one. After use, at most as many idle processes stay as there are processors."""
    try:
        child = _idle.pop()
    except IndexError:
        child = Child(MALLOC_PERTURB_=_PATTERN)
    try:
        yield child
    finally:
        if len(_idle) < (os.cpu_count() or 1):
            _idle.append(child)
        else:
            child.close()


@atexit.register
def _close() -> None:
    while _idle:
        _idle.pop().close()


def _run(
    model: Model, feeds: Mapping[str, Any], threads: int | None, session_options: Options | None
) -> list[Any]:
    """One run, inside the separate process."""
    with opened(model, threads=threads, session_options=session_options) as runner:
        return runner.run(feeds)
