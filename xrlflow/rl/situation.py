"""The input of an agent's decision: a state and the candidates that the agent may choose."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from xrlflow.ir.graph import FINGERPRINT_MASK
from xrlflow.rewrite import Match, RewriteState


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """A state, the candidates that the agent may choose, and the progress of the episode.

    `cost`: modelled seconds now; `initial`: modelled seconds at the start of the episode; `left`: the remaining part
    of the horizon, 1 to 0.
    """

    state: RewriteState
    candidates: tuple[Match, ...]
    cost: float
    initial: float
    left: float = 1.0


def choices(state: RewriteState, visited: Collection[int] = ()) -> tuple[Match, ...]:
    """The first candidate for each resulting graph, without graphs whose fingerprint is in `visited`."""
    here = state.fingerprint
    seen: set[int] = set()
    kept = []
    for match in state.candidates:
        there = (here + match.shift) & FINGERPRINT_MASK
        if there not in seen and there not in visited:
            seen.add(there)
            kept.append(match)
    return tuple(kept)
