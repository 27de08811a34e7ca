"""Stores the comparisons that an optimisation measures, for the learned cost model."""

from __future__ import annotations

import math

from xrlflow.cost import AdditiveCost, CostModel, Learned, Profiled, at_usual_size
from xrlflow.cost.calibrate import runtime
from xrlflow.cost.history import History
from xrlflow.cost.machine import cpu_name
from xrlflow.ir import Graph
from xrlflow.pipeline.context import Context
from xrlflow.search import Ratio

# The width of a 95% confidence interval in standard deviations.
_WIDTH = 3.92
# A ratio is too imprecise to be stored if its logarithm has a larger standard deviation.
_VAGUE = 0.05


def opened(context: Context) -> History:
    return History(cpu_name(), runtime(), context.threads, context.options.server)


def keep(
    history: History, context: Context, model: CostModel, before: Graph, after: Graph, ratio: Ratio
) -> bool:
    """Store in `history` that `after` was measured to be `ratio` times faster than `before`. Returns whether it was
    stored.

    Comparisons with other options of the session, or without measured costs of operators, are not comparable with the
    stored ones, and imprecise comparisons are useless. Neither kind is stored.
    """
    prices = prices_of(model)
    if prices is None or context.options.session_options is not None:
        return False
    error = error_of(ratio)
    if not ratio.ran or error > _VAGUE:
        return False
    return history.keep(prices, before, after, math.log(ratio.median), max(error, 1e-3))


def error_of(ratio: Ratio) -> float:
    """The standard deviation of the logarithm of a measured ratio; inf if it has no interval."""
    if not 0.0 < ratio.low <= ratio.high < math.inf:
        return math.inf
    return math.log(ratio.high / ratio.low) / _WIDTH


def prices_of(model: CostModel) -> AdditiveCost | None:
    """The measured costs of operators that a cost model uses; None if it uses costs that are not measured, or had no
    time to measure some.
    """
    prices = model.prices if isinstance(model, Learned) else at_usual_size(model)
    return prices if isinstance(prices, Profiled) and prices.counts.complete else None
