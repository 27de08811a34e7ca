"""Fits the learned costs to the model before an agent learns from them: what searches find by them is measured."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from dataclasses import replace
from itertools import chain, zip_longest

from xrlflow.cost import Learned
from xrlflow.cost.fine_tuning import LEAST
from xrlflow.pipeline import history
from xrlflow.pipeline.choose import Trials
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.prepare import Start, fitted
from xrlflow.rewrite import RewriteState
from xrlflow.search import Limits, Ratio, SearchNode, greedy, random_walk, retraced, taso

# Graphs that are measured before the costs are fitted again.
_AT_ONCE = 8
# The part of the time that is left which each search of a round may take, and the states that it expands.
_SEARCHING, _EXPANDED = 0.1, 100
# If that gives too few: random walks, and the most steps of each.
_WALKS, _STEPS = 24, 16
# So many of the graphs that were measured to be faster are proposed.
_PROPOSED = 4


def corrected(context: Context, start: Start, model: Learned, until: float) -> Start:
    """Search by learned costs, measure what was found against the graph where the search begins, fit the costs to that,
    and search again, as a search goes where its costs are wrong (DAgger; Ross, Gordon, Bagnell, 2011). Random graphs
    are measured, too. It ends when there is nothing new, and at `until` (time.monotonic).

    The start has the costs that were fitted last, and what was measured to be faster, best first (`Start.measured`).
    After Ctrl-C the clock is hurried.
    """
    measured: list[tuple[Ratio, SearchNode]] = []
    fits = 0
    rng = random.Random(context.options.seed)
    seen = {start.base.state.fingerprint}
    try:
        with context.clock.phase("correct"), history.opened(context) as known:
            trials = Trials(context, start, known, until)
            while time.monotonic() < until and (new := _found(context, start, until, seen, rng)):
                for node in new:
                    if time.monotonic() >= until:
                        break
                    seen.add(node.state.fingerprint)
                    measured.append((trials.compare(start.base, node), node))
                if trials.kept >= LEAST:
                    start = _with_costs(start, fitted(model.prices, known, also=trials.kept))
                    fits = trials.kept
    except KeyboardInterrupt:
        context.notes.append("interrupted while learned costs were corrected")
        context.clock.hurry()
    if not measured:
        return start
    context.notes.append(
        f"{len(measured)} whole models were measured, and learned costs corrected by {fits} of them"
    )
    faster = sorted((m for m in measured if m[0].low > 1.0), key=lambda m: m[0].median, reverse=True)
    return replace(start, measured=tuple(retraced(start.base, node.trace) for _, node in faster[:_PROPOSED]))


def _found(
    context: Context, start: Start, until: float, seen: Collection[int], rng: random.Random
) -> list[SearchNode]:
    """Graphs that are not among `seen` (fingerprints): what searches find by these costs first, then random ones.
    Raises KeyboardInterrupt."""
    base, shortlists = start.base, []
    for search in (greedy, taso):
        now = time.monotonic()
        result = search(base.state, base.cost, Limits(_EXPANDED, now + _SEARCHING * (until - now)))
        if result.interrupted:
            raise KeyboardInterrupt
        shortlists.append(result.shortlist)
    new: dict[int, SearchNode] = {}

    def offer(node: SearchNode | None) -> None:
        if node is not None and node.state.fingerprint not in seen and context.fits(node):
            new.setdefault(node.state.fingerprint, node)

    for node in chain.from_iterable(zip_longest(*shortlists)):
        offer(node)
    for _ in range(_WALKS):
        if len(new) >= _AT_ONCE:
            break
        limits = Limits(rng.randint(1, _STEPS), until)
        walk = random_walk(base.state, base.cost, limits, rng.getrandbits(32))
        if walk.interrupted:
            raise KeyboardInterrupt
        offer(walk.best)
    return list(new.values())[:_AT_ONCE]


def _with_costs(start: Start, model: Learned) -> Start:
    """The start with another cost model."""
    state = start.base.state
    state = RewriteState.start(state.graph, state.library, model.delta)
    return replace(start, base=SearchNode(state, None, model.cost(state.graph)), model=model)
