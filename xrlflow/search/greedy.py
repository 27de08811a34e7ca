"""Greedy search: always the substitution with the largest gain."""

from __future__ import annotations

import time

from xrlflow.rewrite import Match, RewriteState
from xrlflow.search.result import Limits, SearchNode, SearchResult, Shortlist, extend


def greedy(state: RewriteState, cost: float, limits: Limits) -> SearchResult:
    """Apply the candidate with the largest modelled gain until none gains.

    The candidates of `state` have deltas of the cost model; `cost` is the modelled cost of its graph, in seconds.
    """
    begin = time.monotonic()
    node = SearchNode(state, None, cost)
    shortlist = Shortlist()
    shortlist.offer(node)
    expanded = generated = 0
    interrupted = False
    try:
        while not limits.over(expanded, node.cost):
            generated += node.state.count
            after = _step(node)
            if after is None:
                break
            node = after
            expanded += 1
            shortlist.offer(node)
    except KeyboardInterrupt:
        interrupted = True
    return SearchResult(node, shortlist.best(), expanded, generated, time.monotonic() - begin, interrupted)


def _step(node: SearchNode) -> SearchNode | None:
    """The state after the candidate with the largest gain; None if none gains."""
    threshold = 1e-9 * node.cost  # smaller gains are rounding errors, and might never end
    rejected: set[Match] = set()
    while (best := node.state.gains_most(threshold, rejected.__contains__)) is not None:
        edit, delta = node.state.priced(best)
        if delta < -threshold:
            cost = node.cost + delta
            return SearchNode(node.state.apply(best, edit), extend(node.path, best, edit, cost), cost)
        rejected.add(best)  # its delta was out of date, because of edits next to the match
    return None
