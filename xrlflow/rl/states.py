"""The states of a search. Each state is created once, even if several paths lead to it, and has one greedy descent."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from xrlflow.ir.graph import FINGERPRINT_MASK
from xrlflow.rewrite import Match, RewriteState
from xrlflow.rl.features import Pricing
from xrlflow.search.result import Limits, SearchNode, SearchResult, Shortlist, extend

# Smaller gains, relative to the cost, count as rounding errors.
ROUNDING = 1e-9
# The limit on growth treats smaller graphs as if they had this many operators.
_SMALL = 32


class LimitReached(Exception):
    """The search has reached its limits."""


class States:
    """All states by their fingerprints, with the best one and a shortlist. `growth`: see `StrategyConfig`."""

    def __init__(self, state: RewriteState, cost: float, limits: Limits, growth: float) -> None:
        assert state.delta is not None, "a state without prices has nothing to minimise"
        self._delta = state.delta
        self.root = SearchNode(replace(state, delta=Pricing.of(state.delta)), None, cost)
        self.best = self.root
        self.limits = limits
        self.shortlist = Shortlist()
        self.shortlist.offer(self.root)
        self.most_nodes = growth * max(state.graph.node_count, _SMALL)
        # By fingerprint: each state, its parent, and the end of its descent.
        self.reached: dict[int, SearchNode] = {state.fingerprint: self.root}
        self.parents: dict[int, int] = {}
        self.ends: dict[int, SearchNode] = {}
        self.expanded = self.generated = 0
        self.improved_at = 0

    def result(self, seconds: float, interrupted: bool) -> SearchResult:
        """The result of the search, with costs by the cost model that the caller passed."""

        def plain(node: SearchNode) -> SearchNode:
            return replace(node, state=replace(node.state, delta=self._delta))

        shortlist = tuple(plain(f) for f in self.shortlist.best())
        return SearchResult(plain(self.best), shortlist, self.expanded, self.generated, seconds, interrupted)

    def make(self, parent: SearchNode, match: Match) -> SearchNode | None:
        """The successor of a state, from the cache if it was created before; None if it is too large. Raises
        LimitReached at the limits.
        """
        cached = self.reached.get((parent.state.fingerprint + match.shift) & FINGERPRINT_MASK)
        if cached is not None:
            return cached
        if self.limits.over(self.expanded, self.best.cost):
            raise LimitReached
        state = parent.state
        edit = state.edit(match)
        if state.graph.node_count + len(edit.added) - len(edit.removed) > self.most_nodes:
            return None
        assert state.delta is not None, "a state without prices has nothing to minimise"
        # The edit also removes nodes that lose their last reader. Which nodes these are may have changed since the
        # match's delta was computed.
        cost = parent.cost + float(state.delta(state.graph, edit))
        successor = state.apply(match, edit)
        self.expanded += 1
        cached = self.reached.get(successor.fingerprint)
        if cached is not None:
            return cached
        node = SearchNode(successor, extend(parent.path, match, edit, cost), cost)
        self.reached[successor.fingerprint] = node
        self.parents[successor.fingerprint] = parent.state.fingerprint
        self.shortlist.offer(node)
        if cost < self.best.cost - ROUNDING * self.root.cost:
            self.best, self.improved_at = node, self.expanded
        return node

    def descend(self, node: SearchNode, back: float | None = None) -> SearchNode:
        """The end of the greedy descent from a state.

        After a substitution that loses, the largest gain often comes from undoing this substitution, directly or by
        another rule. So the descent avoids states of other descents, and states with the same cost as the state before
        the loss (`back`).
        """
        here = node.state.fingerprint
        if here in self.ends:
            return self.ends[here]
        path: list[int] = []
        self.ends[here] = node  # preliminary, so that the descent does not return here
        while True:
            path.append(here)
            self.generated += node.state.count
            match = node.state.gains_most(ROUNDING * node.cost, partial(self.leads_back, node, back))
            if match is None:
                break
            successor = self.make(node, match)
            if successor is None or successor.state.fingerprint in self.ends:
                break
            node = successor
            here = node.state.fingerprint
            self.ends[here] = node
        for fingerprint in path:
            self.ends[fingerprint] = node
        return node

    def leads_back(self, node: SearchNode, back: float | None, match: Match) -> bool:
        """Whether a candidate leads to a state in which an earlier descent ended, or to a graph of cost `back`."""
        if (node.state.fingerprint + match.shift) & FINGERPRINT_MASK in self.ends:
            return True
        return back is not None and abs(node.cost + match.delta - back) <= ROUNDING * self.root.cost

    def ancestors(self, node: SearchNode) -> set[int]:
        """The fingerprints of all states on the path to a state, including its own."""
        at: int | None = node.state.fingerprint
        out: set[int] = set()
        while at is not None:
            out.add(at)
            at = self.parents.get(at)
        return out
