"""Greedy search that looks a few substitutions ahead: a baseline for strategies that claim to plan."""

from __future__ import annotations

import time

from xrlflow.ir.graph import FINGERPRINT_MASK
from xrlflow.rewrite import Match, RewriteState
from xrlflow.search.result import Limits, Path, SearchNode, SearchResult, Shortlist, extend

# The part of the cost below which a gain counts as rounding: such gains could go on for ever.
_NOTHING = 1e-9


def lookahead(state: RewriteState, cost: float, limits: Limits, depth: int = 2) -> SearchResult:
    """Apply the chain of up to `depth` substitutions with the largest gain, until none gains.

    Shorter chains are tried first, longer ones only if no shorter one gains: with `depth` 1 this is `greedy`. With n
    candidates, two steps cost n expanded states and three up to n^2, which `limits.budget` counts. Each graph is
    visited once within a chain, however it is reached. Raises ValueError if `depth` is below 1.
    """
    if depth < 1:
        raise ValueError(f"a look ahead of {depth} steps sees nothing")
    begin = time.monotonic()
    search = _Lookahead(limits, SearchNode(state, None, cost))
    interrupted = False
    try:
        while search.improve(depth):
            pass
    except KeyboardInterrupt:
        interrupted = True
    return SearchResult(
        search.best,
        search.shortlist.best(),
        search.expanded,
        search.generated,
        time.monotonic() - begin,
        interrupted,
    )


class _Lookahead:
    """The current search node and the shortlist."""

    def __init__(self, limits: Limits, start: SearchNode) -> None:
        self.limits = limits
        self.best = start
        self.shortlist = Shortlist()
        self.shortlist.offer(start)
        self.expanded = 0
        self.generated = 0

    @property
    def over(self) -> bool:
        return self.limits.over(self.expanded, self.best.cost)

    def improve(self, depth: int) -> bool:
        """Follow the best of the shortest chains that gain. False if there is none, or the limits came first."""
        reached = [self.best]
        seen = {self.best.state.fingerprint}
        for length in range(depth):
            if self.over:
                return False
            self.generated += sum(found.state.count for found in reached)
            if self._finish(reached):
                return True
            if length + 1 < depth:
                reached = self._successors(reached, seen)
        return False

    def _finish(self, reached: list[SearchNode]) -> bool:
        """Follow the best chain that ends one substitution further. False if none gains."""
        least = self.best.cost * (1 - _NOTHING)
        # The last substitution of a chain is priced by its delta: only the best chain's graph is made.
        chains = [
            (found.cost + match.delta, match.key, found, match)
            for found in reached
            for match in found.state.candidates
            if found.cost + match.delta < least
        ]
        for _, _, found, match in sorted(chains, key=lambda chain: chain[:2]):
            now = found.cost + found.state.priced(match)[1]  # edits beside it may have changed its delta
            if now < least:
                self.best = self._follow(found, match)
                self.shortlist.offer(self.best)
                return True
        return False

    def _successors(self, reached: list[SearchNode], seen: set[int]) -> list[SearchNode]:
        """All graphs that are one substitution further, as far as the limits allow."""
        made: list[SearchNode] = []
        for found in reached:
            for match in found.state.candidates:
                expected = (found.state.fingerprint + match.shift) & FINGERPRINT_MASK
                if expected in seen:
                    continue
                if self.over:
                    return made
                successor = self._follow(found, match)
                if successor.state.fingerprint not in seen:
                    seen.update((expected, successor.state.fingerprint))
                    made.append(successor)
        return made

    def _follow(self, found: SearchNode, match: Match) -> SearchNode:
        self.expanded += 1
        edit, delta = found.state.priced(match)
        cost = found.cost + delta
        path: Path = extend(found.path, match, cost)
        return SearchNode(found.state.apply(match, edit), path, cost)
