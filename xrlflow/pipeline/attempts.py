"""One attempt after the other, each by another cost model, until a result is faster than the original."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from xrlflow.cost import CostModel, Learned, NoTimeLeft, Profiled
from xrlflow.lowering import missing_for_kernels
from xrlflow.pipeline import compiled, confirm, kernels
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.correct import corrected, ordered
from xrlflow.pipeline.explore import Explored, explore
from xrlflow.pipeline.finish import Finished, Finisher
from xrlflow.pipeline.kernels import compile_seconds
from xrlflow.pipeline.prepare import Start, cost_model, start

FINISHERS: Mapping[str, Finisher] = {
    "auto": kernels.finish,
    "hybrid": kernels.finish,
    "onnxruntime": confirm.finish,
    "tvm": compiled.finish,
}
"""What follows the search, by backend."""

# The part of an agent's training time in which the costs that it learns from are corrected.
_CORRECTING = 0.4


@dataclass(frozen=True, slots=True)
class Attempt:
    """A search, what it found, and what became of it."""

    start: Start
    explored: Explored
    finished: Finished


def attempted(context: Context) -> Attempt:
    """The first attempt whose result is kept, or the first of all if none is.

    A later attempt has the time that an earlier one left, and makes no kernels. After Ctrl-C none begins. Raises what
    `Finisher` raises, and OptionError.
    """
    options, clock = context.options, context.clock
    if options.with_kernels and missing_for_kernels() is None:
        clock.compiling = clock.reserved = compile_seconds(context)
    first, *others = options.costs
    made = [_attempt(context, first)]
    clock.compiling = clock.reserved = 0.0
    for cost in others:
        if made[-1].finished.kept is not None or not clock.again():
            break
        try:
            made.append(_attempt(context, cost, later=True))
        except NoTimeLeft:
            context.notes.append(f"there was no time for a search by {cost} costs (--time-limit)")
        except KeyboardInterrupt:
            context.notes.append("interrupted: the original is kept")
            break
    found = made[-1] if made[-1].finished.kept is not None else made[0]
    context.notes.extend(
        f"by {each.start.model.name} costs: {each.finished.reason}" for each in made if each is not found
    )
    return found


def _attempt(context: Context, cost: str | CostModel, later: bool = False) -> Attempt:
    """Search, choose, verify and measure. `later`: without kernels. It raises NoTimeLeft where the learned prices of
    all substitutions, of which there may be thousands, take as long as the search may."""
    with context.clock.phase("calibrate"):
        model = cost_model(context, cost)
        if later and isinstance(model, Learned):
            model.until = context.clock.budget.search_until
        begin = start(context, model)
        if isinstance(model, Learned):
            model.until = math.inf
    if isinstance(model, Learned):
        begin = _corrected(context, begin, model)
    explored = explore(context, begin)
    if begin.measured:
        explored = ordered(context, begin, explored)
    prices = model.prices if isinstance(model, Learned) else model
    if isinstance(prices, Profiled) and not later:
        context.notes.append(f"operators: {prices.tally}")
    finish = confirm.finish if later else FINISHERS[context.options.backend]
    return Attempt(begin, explored, finish(context, begin, explored))


def _corrected(context: Context, start: Start, model: Learned) -> Start:
    """The start with costs that were fitted to this model where an agent will learn from them, has time of its own for
    it, and models can be measured."""
    until = context.clock.budget.train_until
    options = context.options
    if not options.train_steps or options.replay is not None or context.feeds is None or until is None:
        return start
    now = time.monotonic()
    return corrected(context, start, model, now + _CORRECTING * (until - now))
