"""Sweeps: the application of one rule wherever it matches, for rules whose gain a cost model of single operators cannot
see."""

from __future__ import annotations

from xrlflow.rewrite import RewriteState
from xrlflow.search.result import Limits, SearchNode, extend


def sweep(node: SearchNode, rule: str, limits: Limits, at_most: float) -> SearchNode:
    """Apply `rule` until it has no candidate whose modelled delta is at most `at_most` (seconds).

    A rule that keeps finding new matches stops after as many substitutions as the graph has nodes.
    """
    state, path, cost = node.state, node.path, node.cost
    maximum = state.graph.node_count
    visited = {state.fingerprint}
    applied = 0
    while applied < maximum and not limits.over(applied, cost):
        fitting = [m for m in state.candidates if m.rule.name == rule and m.delta <= at_most]
        if not fitting:
            break
        match = min(fitting, key=lambda m: (m.delta, m.key))
        edit, delta = state.priced(match)
        successor: RewriteState = state.apply(match, edit)
        if successor.fingerprint in visited:
            break
        visited.add(successor.fingerprint)
        state = successor
        cost += delta
        path = extend(path, match, edit, cost)
        applied += 1
    return SearchNode(state, path, cost)
