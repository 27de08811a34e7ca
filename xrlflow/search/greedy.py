"""Greedy search: always the substitution with the largest gain."""

from __future__ import annotations

import time

from xrlflow.rewrite import Match, RewriteState
from xrlflow.search.result import Limits, SearchNode, SearchResult, Shortlist, extend


def greedy(state: RewriteState, cost: float, limits: Limits) -> SearchResult:
    """Apply the candidate with the largest modelled gain until none gains.

    `state` has the cost model's deltas in its candidates; `cost` is the modelled cost of its graph, in seconds.
    """
    begin = time.monotonic()
    found = SearchNode(state, None, cost)
    shortlist = Shortlist()
    shortlist.offer(found)
    expanded = generated = 0
    interrupted = False
    try:
        while not limits.over(expanded, found.cost):
            generated += found.state.count
            after = _step(found)
            if after is None:
                break
            found = after
            expanded += 1
            shortlist.offer(found)
    except KeyboardInterrupt:
        interrupted = True
    return SearchResult(found, shortlist.best(), expanded, generated, time.monotonic() - begin, interrupted)


def _step(found: SearchNode) -> SearchNode | None:
    """The state after the candidate with the largest gain; None if none gains."""
    least = 1e-9 * found.cost  # gains of rounding size do not count: they could go on for ever
    refused: set[Match] = set()
    while (best := found.state.gains_most(least, refused.__contains__)) is not None:
        edit, delta = found.state.priced(best)
        if delta < -least:
            cost = found.cost + delta
            return SearchNode(found.state.apply(best, edit), extend(found.path, best, cost), cost)
        refused.add(best)  # it gained before other edits changed what is around it
    return None
