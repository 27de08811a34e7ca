"""TASO's search: best-first with backtracking (Jia et al., SOSP 2019, section 5)."""

from __future__ import annotations

import heapq
import time

from xrlflow.ir.graph import FINGERPRINT_MASK
from xrlflow.rewrite import Match, RewriteState
from xrlflow.search.result import Limits, Path, SearchNode, SearchResult, Shortlist, extend


def taso(state: RewriteState, cost: float, limits: Limits, alpha: float = 1.05) -> SearchResult:
    """Expand the cheapest graph of a queue, again and again; queue its successors that cost less than `alpha` times the
    best graph.

    Graphs of more than twice the original's operators are dropped, and each graph is visited once. A successor is a
    (state, candidate) pair until it is expanded; only then is its graph built and matched. `limits.budget` counts
    expanded graphs.
    """
    begin = time.monotonic()
    best = SearchNode(state, None, cost)
    shortlist = Shortlist()
    shortlist.offer(best)
    most_nodes = 2 * state.graph.node_count
    visited = {state.fingerprint}
    promised = {state.fingerprint}  # expected fingerprints of the entries of the queue
    queue: list[tuple[float, int, RewriteState, Path | None, Match]] = []
    generated = expanded = 0
    interrupted = False

    def push(parent: RewriteState, cost: float, path: Path | None) -> None:
        nonlocal generated
        limit = alpha * best.cost
        for match in parent.candidates:
            successor_cost = cost + match.delta
            if successor_cost >= limit:
                continue
            expected = (parent.fingerprint + match.shift) & FINGERPRINT_MASK
            if expected in promised:
                continue
            promised.add(expected)
            generated += 1
            heapq.heappush(queue, (successor_cost, generated, parent, path, match))

    try:
        push(state, cost, None)
        while queue and not limits.over(expanded, best.cost):
            successor_cost, _, parent, path, match = heapq.heappop(queue)
            if successor_cost >= alpha * best.cost:
                break  # the queue is in order of cost, so all other entries are as expensive
            edit, delta = parent.priced(match)
            successor_cost += delta - match.delta
            if successor_cost >= alpha * best.cost:
                continue
            successor = parent.apply(match, edit)
            if successor.fingerprint in visited or successor.graph.node_count > most_nodes:
                continue
            visited.add(successor.fingerprint)
            expanded += 1
            path = extend(path, match, edit, successor_cost)
            node = SearchNode(successor, path, successor_cost)
            if successor_cost < best.cost:
                best = node
            shortlist.offer(node)
            push(successor, successor_cost, path)
    except KeyboardInterrupt:
        interrupted = True
    return SearchResult(best, shortlist.best(), expanded, generated, time.monotonic() - begin, interrupted)
