"""Deadlines of long computations. A computation asks for the remaining time, and ends or leaves something out if it is
short.

A deadline is a moment of time.monotonic. It holds for everything that is called inside a `within` block, so that
functions in between need not pass the deadline on. Foreign code does not know it: ONNX Runtime is asked to end, and TVM
runs in a process that is killed (`backends.children.Child`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_UNTIL: ContextVar[float] = ContextVar("until", default=math.inf)


class DeadlineExceeded(Exception):
    """The deadline has passed."""


@contextmanager
def within(moment: float) -> Iterator[None]:
    """Set the deadline of the block to this moment, unless a block around it has an earlier deadline."""
    token = _UNTIL.set(min(moment, _UNTIL.get()))
    try:
        yield
    finally:
        _UNTIL.reset(token)


def until() -> float:
    """The deadline; infinite if there is none."""
    return _UNTIL.get()


def remaining() -> float:
    """Seconds until the deadline, at least 0."""
    return max(0.0, _UNTIL.get() - time.monotonic())


def over() -> bool:
    """Whether the deadline has passed."""
    moment = _UNTIL.get()
    return moment < math.inf and time.monotonic() >= moment


def check() -> None:
    """Raise DeadlineExceeded if the deadline has passed."""
    if over():
        raise DeadlineExceeded
