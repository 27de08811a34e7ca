"""Greedy search over chains of a few substitutions: a baseline for strategies that claim to plan."""

from __future__ import annotations

import time

from xrlflow.ir.graph import FINGERPRINT_MASK
from xrlflow.rewrite import Match, RewriteState
from xrlflow.search.result import Limits, SearchNode, SearchResult, Shortlist, successor

# A gain of less than this part of the cost is a rounding error; such gains might never end.
_NOTHING = 1e-9


def lookahead(state: RewriteState, cost: float, limits: Limits, depth: int = 2) -> SearchResult:
    """Apply the chain of up to `depth` substitutions with the largest gain, until none gains.

    Shorter chains are tried first, longer chains only if no shorter one gains: with `depth` 1 this is `greedy`. With n
    candidates, chains of two expand n states, and chains of three up to n^2; `limits.budget` limits expanded states. If
    several chains lead to the same graph, it is visited once. Raises ValueError if `depth` is below 1.
    """
    if depth < 1:
        raise ValueError(f"the depth of the lookahead is {depth}: at least 1 is needed")
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
        """Apply the best of the shortest chains that gain. Returns False if no chain gains, or the limits are
        reached."""
        reached = [self.best]
        visited = {self.best.state.fingerprint}
        for length in range(depth):
            if self.over:
                return False
            self.generated += sum(node.state.count for node in reached)
            if self._finish(reached):
                return True
            if length + 1 < depth:
                reached = self._successors(reached, visited)
        return False

    def _finish(self, reached: list[SearchNode]) -> bool:
        """Apply the best chain that ends one substitution after `reached`. Returns False if no chain gains."""
        bound = self.best.cost * (1 - _NOTHING)
        # The delta of a chain's last substitution gives the cost of the chain's graph: only the best chain's graph is
        # built.
        chains = [
            (node.cost + match.delta, match.key, node, match)
            for node in reached
            for match in node.state.candidates
            if node.cost + match.delta < bound
        ]
        for _, _, node, match in sorted(chains, key=lambda chain: chain[:2]):
            now = node.cost + node.state.priced(match)[1]  # edits next to it may have changed its delta
            if now < bound:
                self.best = self._follow(node, match)
                self.shortlist.offer(self.best)
                return True
        return False

    def _successors(self, reached: list[SearchNode], visited: set[int]) -> list[SearchNode]:
        """The graphs after one more substitution, as many as the limits allow."""
        successors: list[SearchNode] = []
        for node in reached:
            for match in node.state.candidates:
                expected = (node.state.fingerprint + match.shift) & FINGERPRINT_MASK
                if expected in visited:
                    continue
                if self.over:
                    return successors
                after = self._follow(node, match)
                if after.state.fingerprint not in visited:
                    visited.update((expected, after.state.fingerprint))
                    successors.append(after)
        return successors

    def _follow(self, node: SearchNode, match: Match) -> SearchNode:
        self.expanded += 1
        return successor(node, match)
