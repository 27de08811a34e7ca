"""Fits learned costs to the user's model before an agent learns from them, by measuring the graphs that searches
find."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain, zip_longest

from xrlflow.cost import Learned
from xrlflow.cost.fine_tuning import MIN_COMPARISONS
from xrlflow.pipeline import history
from xrlflow.pipeline.choose import Trials
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.prepare import Start, fitted
from xrlflow.rewrite import RewriteState
from xrlflow.search import Limits, Ratio, SearchNode, greedy, random_walk, retraced, taso

# How many graphs are measured before the costs are fitted again.
_AT_ONCE = 8
# For each search of a round: the fraction of the remaining time that it may take, and the number of states that it
# expands.
_SEARCHING, _EXPANDED = 0.1, 100
# Random walks, for rounds in which searches find too few graphs: the number of walks, and the maximum number of steps
# of each.
_WALKS, _STEPS = 24, 16
# How many of the graphs that were faster in measurements are proposed.
_PROPOSED = 4
# Standard deviation of the logarithm of the ratio of two sessions of one file, in addition to the interval of a ratio.
_SESSIONS = 0.01
# The fraction of the selection's time that may be used to measure the first proposals of a search.
_ORDERING = 0.2


def corrected(context: Context, start: Start, model: Learned, until: float) -> Start:
    """The start with costs that are fitted to measurements of graphs of this model, and with these measurements
    (`Start.measured`).

    Each round searches by the present costs, measures the graphs that the searches found against the first graph, and
    fits the costs to the measurements: a search leads to the graphs for which its costs are wrong (DAgger; Ross,
    Gordon, Bagnell, 2011). Random graphs are measured, too. The rounds end when there is no new graph, when a round
    gives no usable measurement (some operators have no measured cost, or other programs use the processors), and at
    `until` (time.monotonic). Ctrl-C ends the rounds and calls `Clock.hurry`.
    """
    measured: list[tuple[Ratio, SearchNode]] = []
    rng = random.Random(context.options.seed)
    measured_before = {start.base.state.fingerprint}
    fits = 0
    try:
        with context.clock.phase("correct"), history.opened(context) as comparisons:
            trials = Trials(context, start, comparisons, until, careful=True)
            while time.monotonic() < until and (
                new := _graphs_to_measure(context, start, until, measured_before, rng)
            ):
                if history.prices_of(start.model) is None:
                    break
                before = trials.stored
                for node in new:
                    if time.monotonic() >= until:
                        break
                    measured_before.add(node.state.fingerprint)
                    ratio = trials.compare(start.base, node)
                    if ratio.ran:
                        measured.append((ratio, node))
                if trials.stored == before:
                    break
                if trials.stored >= MIN_COMPARISONS:
                    start = _with_costs(start, fitted(model.prices, comparisons, also=trials.stored))
                    fits = trials.stored
            context.notes.extend(_refused(trials.refused))
    except KeyboardInterrupt:
        context.notes.append("interrupted while learned costs were corrected")
        context.clock.hurry()
    if measured:
        context.notes.append(
            f"{len(measured)} whole models were measured, and learned costs corrected by {fits} of them"
        )
    else:
        context.notes.append("learned costs were not corrected: no whole model was measured")
    return replace(start, measured=tuple(measured))


def ordered(context: Context, start: Start, explored: Explored) -> Explored:
    """The result of a search with its proposals in a new order: the fastest first, by a mean of learned costs and
    measurements, each weighted by its error. (The errors of learned costs may be greater than the gains of proposals.)

    The search's first proposals are measured for this order. The fastest of the graphs that were measured earlier
    become proposals as well. After Ctrl-C, `Clock.hurry` moves the deadline, and nothing is measured.
    """
    ratios = {node.state.fingerprint: ratio for ratio, node in start.measured}
    proposals = {node.state.fingerprint: node for node in explored.proposals}
    before = len(ratios)
    now = time.monotonic()
    until = now + _ORDERING * (context.clock.budget.begin_comparing_until - now)
    try:
        with context.clock.phase("select"), history.opened(context) as comparisons:
            faster = sorted(
                (m for m in start.measured if m[0].low > 1.0), key=lambda m: m[0].median, reverse=True
            )
            for _, node in faster[:_PROPOSED]:
                proposals.setdefault(node.state.fingerprint, retraced(start.base, node.trace))
            trials = Trials(context, start, comparisons, until, careful=True)
            for node in explored.proposals[:_AT_ONCE]:
                if context.clock.hurried or time.monotonic() >= until:
                    break
                if node.state.fingerprint not in ratios and node.path is not None:
                    ratios[node.state.fingerprint] = trials.compare(start.base, node)
            context.notes.extend(_refused(trials.refused))
    except KeyboardInterrupt:
        context.notes.append("interrupted while proposals were measured")
        context.clock.hurry()
    if len(ratios) > before:
        context.notes.append(f"measured of the search's proposals: {len(ratios) - before}")

    best = sorted(proposals.items(), key=lambda p: _expected(start, p[1], ratios.get(p[0])), reverse=True)
    return replace(explored, proposals=tuple(node for _, node in best))


def _expected(start: Start, node: SearchNode, ratio: Ratio | None) -> float:
    """The expected logarithm of a graph's speed-up over the start: the mean of the prediction and of the measurement
    `ratio` (None: not measured), weighted by their variances.
    """
    assert isinstance(start.model, Learned)
    predicted = start.model.predict(start.base.state.graph, node.state.graph)
    mean, spread = math.log(predicted.median), predicted.spread
    if ratio is None:
        return mean
    if not ratio.ran:
        return -math.inf
    error = math.hypot(history.error_of(ratio), _SESSIONS)
    weight = spread**2 / (spread**2 + error**2)
    return (1.0 - weight) * mean + weight * math.log(ratio.median)


def _refused(refusals: Sequence[str]) -> list[str]:
    """One note on all graphs that were refused; an empty list without refusals."""
    if not refusals:
        return []
    return [f"{len(refusals)} graphs could not be measured; the first: {refusals[0]}"]


def _graphs_to_measure(
    context: Context, start: Start, until: float, measured_before: Collection[int], rng: random.Random
) -> list[SearchNode]:
    """Graphs whose fingerprints are not in `measured_before`: first the graphs that searches find by the start's
    costs, then random graphs. Raises KeyboardInterrupt.
    """
    base, shortlists = start.base, []
    for search in (greedy, taso):
        now = time.monotonic()
        result = search(base.state, base.cost, Limits(_EXPANDED, now + _SEARCHING * (until - now)))
        if result.interrupted:
            raise KeyboardInterrupt
        shortlists.append(result.shortlist)
    new: dict[int, SearchNode] = {}

    def offer(node: SearchNode | None) -> None:
        if node is not None and node.state.fingerprint not in measured_before and context.fits(node):
            new.setdefault(node.state.fingerprint, node)

    for node in chain.from_iterable(zip_longest(*shortlists)):
        offer(node)
    now = time.monotonic()
    walking_until = now + _SEARCHING * (until - now)
    for _ in range(_WALKS):
        if len(new) >= _AT_ONCE or (new and time.monotonic() >= walking_until):
            break
        limits = Limits(rng.randint(1, _STEPS), walking_until if new else until)
        walk = random_walk(base.state, base.cost, limits, rng.getrandbits(32))
        if walk.interrupted:
            raise KeyboardInterrupt
        offer(walk.best)
    return list(new.values())[:_AT_ONCE]


def _with_costs(start: Start, model: Learned) -> Start:
    """The start with the cost model `model`."""
    state = start.base.state
    state = RewriteState.start(state.graph, state.library, model.delta)
    return replace(start, base=SearchNode(state, None, model.cost(state.graph)), model=model)
