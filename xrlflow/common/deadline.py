"""Until when what is being done may take: what works for long asks, and ends or leaves something out.

A deadline is a moment of time.monotonic. It holds for everything that is called inside a `within` block, so that
functions in between need not pass it on. Foreign code that asks nothing is bounded otherwise: ONNX Runtime is told to
end, TVM runs in a process that is ended (`backends.children.Child`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_UNTIL: ContextVar[float] = ContextVar("until", default=math.inf)


class Over(Exception):
    """The time for a computation is over."""


@contextmanager
def within(moment: float) -> Iterator[None]:
    """What the block does has to end at this moment, or at the one of a block around it if that is earlier."""
    token = _UNTIL.set(min(moment, _UNTIL.get()))
    try:
        yield
    finally:
        _UNTIL.reset(token)


def until() -> float:
    """The moment at which everything here has to end; infinite if there is none."""
    return _UNTIL.get()


def left() -> float:
    """Seconds that are left, at least 0."""
    return max(0.0, _UNTIL.get() - time.monotonic())


def over() -> bool:
    """Whether the time is over."""
    moment = _UNTIL.get()
    return moment < math.inf and time.monotonic() >= moment


def check() -> None:
    """Raise Over if the time is over."""
    if over():
        raise Over
