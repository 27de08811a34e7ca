"""The number of threads that torch uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from xrlflow.backends.limits import default_threads


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread. More threads do not speed up small networks, and idle threads spin and disturb
    measurements."""
    with at_most(1):
        yield


@contextmanager
def permitted_threads() -> Iterator[None]:
    """Run torch on no more threads than this process may use: torch does not know the quota of control groups."""
    with at_most(default_threads()):
        yield


@contextmanager
def at_most(count: int) -> Iterator[None]:
    """Run torch on at most `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, count))
    try:
        yield
    finally:
        torch.set_num_threads(before)
