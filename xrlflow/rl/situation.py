"""What an agent decides on: a state, and which of its candidates it may choose."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from xrlflow.ir.graph import FINGERPRINT_MASK
from xrlflow.rewrite import Match, RewriteState


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """What an agent decides on: a state, those of its candidates that it may choose, and how far it has come.

    `cost` and `initial` are modelled seconds, now and where the episode began; `left` the part of the horizon that is
    left.
    """

    state: RewriteState
    candidates: tuple[Match, ...]
    cost: float
    initial: float
    left: float = 1.0


def choices(state: RewriteState, visited: Collection[int] = ()) -> tuple[Match, ...]:
    """The candidates that lead to different graphs, and to none whose fingerprint is among `visited`."""
    here = state.fingerprint
    seen: set[int] = set()
    kept = []
    for match in state.candidates:
        there = (here + match.shift) & FINGERPRINT_MASK
        if there not in seen and there not in visited:
            seen.add(there)
            kept.append(match)
    return tuple(kept)
