"""The input of an agent's decision: a state and the candidates that the agent may choose."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from xrlflow.ir.graph import FINGERPRINT_MASK
from xrlflow.rewrite import Match, RewriteState


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """A state, the candidates that the agent may choose, and the progress of the episode."""

    state: RewriteState
    candidates: tuple[Match, ...]
    cost: float  # modelled seconds of the state
    initial: float  # modelled seconds at the start of the episode
    left: float = 1.0  # the remaining fraction of the horizon, from 1 to 0


def choices(state: RewriteState, visited: Collection[int] = ()) -> tuple[Match, ...]:
    """One candidate for each resulting graph, without candidates that lead to a graph whose fingerprint is in
    `visited`.
    """
    here = state.fingerprint
    fingerprints: set[int] = set()
    matches = []
    for match in state.candidates:
        there = (here + match.shift) & FINGERPRINT_MASK
        if there not in fingerprints and there not in visited:
            fingerprints.add(there)
            matches.append(match)
    return tuple(matches)
