"""Searches by several cost models, and a race of what they found: the fastest leads the selection."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from xrlflow.cost import CostModel, Learned, NoTimeLeft, Profiled
from xrlflow.cost.history import History
from xrlflow.pipeline import history
from xrlflow.pipeline.choose import Trials
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored, explore
from xrlflow.pipeline.prepare import Start, cost_models, start
from xrlflow.search import SearchNode

Searched = tuple[Start, Explored]


def searched(context: Context) -> Searched:
    """Search by the cost model that was asked for, or by several in turn. Raises OptionError."""
    with context.clock.phase("calibrate"):
        models = cost_models(context)
        begin = start(context, models[0])
    found = [(begin, explore(context, begin))]
    try:
        for model in models[1:]:
            if context.clock.hurried:
                break
            until = context.clock.budget.second_until(time.monotonic())
            try:
                begin = _begun(context, model, until)
            except NoTimeLeft:
                context.notes.append(f"there was no time for a search by {model.name} costs (--time-limit)")
                continue
            found.append((begin, explore(context, begin, until)))
    except KeyboardInterrupt:  # outside of what a search keeps: control-flow bodies, an agent that is loaded
        context.notes.append("interrupted: the best so far is kept")
        context.clock.hurry()
    prices = models[0].prices if isinstance(models[0], Learned) else models[0]
    if isinstance(prices, Profiled):
        context.notes.append(f"operators: {prices.tally}")
    return _fastest(context, found)


def _begun(context: Context, model: CostModel, until: float) -> Start:
    """The first node of a search that is over at `until`. Where there are thousands of substitutions, their prices take
    seconds: raises NoTimeLeft if they take more than half of the time."""
    with context.clock.phase("calibrate"):
        if not isinstance(model, Learned):
            return start(context, model)
        now = time.monotonic()
        model.until = now + (until - now) / 2
        begin = start(context, model)
        model.until = math.inf
        return begin


def _fastest(context: Context, found: Sequence[Searched]) -> Searched:
    """The search whose best proposal is measured to be the fastest; the earlier one where that is not clear."""
    leader, *others = found
    clock = context.clock
    with clock.phase("select"), history.opened(context) as known:
        for other in others:
            if clock.hurried or time.monotonic() >= clock.budget.begin_comparing_until:
                break
            try:
                if _faster(context, leader, other, known):
                    leader = other
            except KeyboardInterrupt:
                context.notes.append("interrupted while whole models were compared: the best so far is kept")
                clock.hurry()
    return leader


def _faster(context: Context, leader: Searched, other: Searched, known: History) -> bool:
    """Whether the best proposal of `other` is measured to be faster than the leader's, twice."""
    best, challenger = _best(leader), _best(other)
    name, than = other[0].model.name, leader[0].model.name
    if best.state.fingerprint == challenger.state.fingerprint:
        context.notes.append(f"searches by {than} and by {name} costs found the same")
        return False
    trials = Trials(context, leader[0], known, context.clock.budget.select_until)
    ratio = trials.compare(best, challenger)
    # Where it leads by chance, little is lost: the selection and the last comparison still decide.
    if ratio.promising:
        ratio = ratio.weaker(trials.compare(best, challenger))
    context.notes.append(
        f"what a search by {name} costs found is {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] times as fast "
        f"as by {than} costs"
    )
    return ratio.promising


def _best(found: Searched) -> SearchNode:
    begin, explored = found
    return next(iter(explored.proposals), begin.base)
