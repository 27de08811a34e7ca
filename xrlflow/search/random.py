"""Random substitutions, legal and drawn without regard to cost: for tests, and as a baseline for other strategies."""

from __future__ import annotations

import random as stdlib_random
import time

from xrlflow.rewrite import RewriteState
from xrlflow.search.result import Limits, Path, SearchNode, SearchResult, extend


def random_walk(state: RewriteState, cost: float, limits: Limits, seed: int = 0) -> SearchResult:
    """Apply `limits.budget` substitutions, each drawn uniformly from the candidates of its state.

    The result is the end of the walk, not the cheapest graph on the way.
    """
    begin = time.monotonic()
    rng = stdlib_random.Random(seed)
    path: Path | None = None
    expanded = generated = 0
    interrupted = False
    try:
        while not limits.over(expanded, cost):
            candidates = state.candidates
            generated += len(candidates)
            if not candidates:
                break
            match = rng.choice(candidates)
            edit, delta = state.priced(match)
            state = state.apply(match, edit)
            cost += delta
            expanded += 1
            path = extend(path, match, edit, cost)
    except KeyboardInterrupt:
        interrupted = True
    last = SearchNode(state, path, cost)
    return SearchResult(last, (last,), expanded, generated, time.monotonic() - begin, interrupted)
