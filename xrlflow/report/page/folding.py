"""Finds repeated layers in the order of a graph's nodes, so that a drawing can fold them.

Each node of a topological order is given as a number for its kind, and this sequence is cut into nested intervals. An
interval of a topological order can be drawn as one node without making a cycle, whatever the edges are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

CROWDED = 48
"""A level with more parts than this is cut into sections."""
_SECTION = 30
# A repeated part has at least this many nodes: a chain of one operator is no layer.
_MIN_PERIOD = 4


@dataclass(frozen=True, slots=True)
class Interval:
    """The nodes from `start` to before `end`, as one part of a drawing."""

    start: int
    end: int
    parts: tuple[Interval, ...] = ()  # the intervals inside it, in order
    times: int = 1  # the number of `parts`, if they are equal repetitions; 1: a single part, or a section


def fold(kinds: Sequence[int]) -> tuple[Interval, ...]:
    """The intervals of a sequence that repeat, and sections if a level has too many parts. A single node gets no
    interval."""
    return _level(np.asarray(kinds, np.int64), 0)


def _level(kinds: npt.NDArray[np.int64], offset: int) -> tuple[Interval, ...]:
    intervals = _repeats(kinds, offset)
    return _sections(intervals, offset, offset + len(kinds))


def _repeats(kinds: npt.NDArray[np.int64], offset: int) -> list[Interval]:
    """The repetition that saves most nodes, and recursively those before and after it."""
    best = _longest(kinds)
    if best is None:
        return []
    start, period, times = best
    end = start + period * times
    inner = _level(kinds[start : start + period], 0)
    layers = tuple(
        Interval(at, at + period, tuple(_shifted(part, at) for part in inner))
        for at in range(offset + start, offset + end, period)
    )
    return [
        *_repeats(kinds[:start], offset),
        Interval(offset + start, offset + end, layers, times),
        *_repeats(kinds[end:], offset + end),
    ]


def _longest(kinds: npt.NDArray[np.int64]) -> tuple[int, int, int] | None:
    """The consecutive equal parts whose folding leaves the fewest nodes: start, length of a part, number of parts."""
    best: tuple[int, int, int] | None = None
    saved = 0
    count = len(kinds)
    for period in range(_MIN_PERIOD, count // 2 + 1):
        if count - period <= saved:  # no repetition of this length can save more
            break
        same = np.flatnonzero(np.diff(np.concatenate(([0], kinds[period:] == kinds[:-period], [0]))))
        starts, ends = same[::2], same[1::2]
        if not len(starts):
            continue
        longest = int(np.argmax(ends - starts))
        start, run = int(starts[longest]), int(ends[longest] - starts[longest])
        times = run // period + 1
        if times < 2 or period * (times - 1) <= saved or len(np.unique(kinds[start : start + period])) < 2:
            continue
        best, saved = (start, period, times), period * (times - 1)
    return best


def _shifted(part: Interval, by: int) -> Interval:
    return Interval(
        part.start + by, part.end + by, tuple(_shifted(inner, by) for inner in part.parts), part.times
    )


def _sections(parts: list[Interval], start: int, end: int) -> tuple[Interval, ...]:
    """The parts of a level; if they are too many, sections of consecutive parts (and sections of sections, if
    needed)."""
    level: list[Interval | int] = []
    at = start
    for part in parts:
        level += [*range(at, part.start), part]
        at = part.end
    level += range(at, end)
    while len(level) > CROWDED:
        number = -(-len(level) // _SECTION)
        cuts = [len(level) * i // number for i in range(number + 1)]
        level = [_section(level[a:b]) for a, b in pairwise(cuts)]
    return tuple(part for part in level if isinstance(part, Interval))


def _section(level: Sequence[Interval | int]) -> Interval:
    first, last = level[0], level[-1]
    return Interval(
        first.start if isinstance(first, Interval) else first,
        last.end if isinstance(last, Interval) else last + 1,
        tuple(part for part in level if isinstance(part, Interval)),
    )
