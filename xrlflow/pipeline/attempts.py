"""One attempt after the other, each by another cost model, until a result is faster than the original."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from xrlflow.cost import CostModel, Learned, NoTimeLeft, Profiled
from xrlflow.lowering import missing_for_kernels
from xrlflow.pipeline import compiled, confirm, kernels
from xrlflow.pipeline.context import Context
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


@dataclass(frozen=True, slots=True)
class Attempt:
    """A search, what it found, and what became of it."""

    start: Start
    explored: Explored
    finished: Finished


def attempted(context: Context) -> Attempt:
    """The first attempt whose result is kept, or the first of all if none is.

    A later attempt has the time that an earlier one left. After Ctrl-C none begins. Raises what `Finisher` raises, and
    OptionError.
    """
    options, clock = context.options, context.clock
    costs = options.costs
    if options.with_kernels and missing_for_kernels() is None:
        clock.compiling = clock.reserved = compile_seconds(context)
        costs = costs[:1]  # compiling leaves no time for another attempt
    first = _attempt(context, costs[0])
    last = first
    for cost in costs[1:]:
        if last.finished.kept is not None or not clock.again():
            break
        try:
            last = _attempt(context, cost, hasty=True)
        except NoTimeLeft:
            context.notes.append(f"there was no time for a search by {cost} costs (--time-limit)")
            continue
        except KeyboardInterrupt:
            context.notes.append("interrupted: the original is kept")
            break
        context.notes.append(f"by {last.start.model.name} costs, after that: {last.finished.reason}")
    return last if last.finished.kept is not None else first


def _attempt(context: Context, cost: str | CostModel, hasty: bool = False) -> Attempt:
    """Search, choose, verify and measure. `hasty`: raises NoTimeLeft where the learned prices of all substitutions, of
    which there may be thousands, take as long as the search may."""
    with context.clock.phase("calibrate"):
        model = cost_model(context, cost)
        if hasty and isinstance(model, Learned):
            model.until = context.clock.budget.search_until
        begin = start(context, model)
        if isinstance(model, Learned):
            model.until = math.inf
    explored = explore(context, begin)
    prices = model.prices if isinstance(model, Learned) else model
    if isinstance(prices, Profiled):
        context.notes.append(f"operators: {prices.tally}")
    return Attempt(begin, explored, FINISHERS[context.options.backend](context, begin, explored))
