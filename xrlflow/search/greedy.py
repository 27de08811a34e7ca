"""Greedy search: always the substitution with the largest gain."""

from __future__ import annotations

import time

from xrlflow.rewrite import RewriteState
from xrlflow.search.result import Limits, Path, SearchNode, SearchResult, Shortlist, extend


def greedy(state: RewriteState, cost: float, limits: Limits) -> SearchResult:
    """Apply the candidate with the largest modelled gain until none gains.

    `state` has the cost model's deltas in its candidates; `cost` is the modelled cost of its graph, in seconds.
    """
    begin = time.monotonic()
    path: Path | None = None
    shortlist = Shortlist()
    shortlist.offer(SearchNode(state, path, cost))
    expanded = generated = 0
    interrupted = False
    try:
        while not limits.over(expanded, cost):
            generated += state.count
            # Gains of rounding size do not count: they could go on for ever.
            best = state.gains_most(1e-9 * cost)
            if best is None:
                break
            state = state.apply(best)
            expanded += 1
            cost += best.delta
            path = extend(path, best, cost)
            shortlist.offer(SearchNode(state, path, cost))
    except KeyboardInterrupt:
        interrupted = True
    found = SearchNode(state, path, cost)
    return SearchResult(found, shortlist.best(), expanded, generated, time.monotonic() - begin, interrupted)
