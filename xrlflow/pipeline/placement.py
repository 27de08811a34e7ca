"""The search for graphs with generated kernels: by the costs of operators in both runtimes. Its candidates are
substitutions and placements.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from xrlflow.backends.tvm.library.operator_times import code_version
from xrlflow.common import deadline
from xrlflow.cost import (
    AdditiveCost,
    Database,
    KernelPrices,
    PlacementCost,
    Roofline,
    at_usual_size,
    calibrated,
)
from xrlflow.ir import Graph
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import search
from xrlflow.pipeline.library import placing_rules
from xrlflow.pipeline.prepare import Start
from xrlflow.rewrite import RewriteState
from xrlflow.search import SearchNode
from xrlflow.tuning.lowering import Lowering

# How many searches are done. Each uses the measured costs of the operators that the search before it reached.
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """The result of a search by the costs of operators in both runtimes: the graphs, of which the first costs least,
    and a function that computes the cost of any graph.
    """

    proposals: tuple[SearchNode, ...]
    cost: Callable[[Graph], float]


def search_with_kernels(context: Context, start: Start, how: Lowering, until: float) -> PlacementResult:
    """Search by the costs of operators in both runtimes, until `until` (time.monotonic).

    Operators are measured first. If a search reaches operators that were not measured, these are measured and the
    search is repeated. Raises BackendError if an operator's kernel does not run.
    """
    machine = calibrated(context.threads)
    bindings = context.imported.bindings
    usual = at_usual_size(start.model)  # for which kernels are measured, too
    runtime = usual if isinstance(usual, AdditiveCost) else Roofline(machine, bindings)
    with Database(context.options.server) as database:
        version = f"{code_version()} {how.kernels_version}"
        prices = KernelPrices(runtime, how.operator_times, context.threads, version, database)
        model = PlacementCost(runtime, prices, machine)
        with deadline.within(until):
            result = _search(context, start, model, until)
    context.notes.append(f"generated kernels: {prices}")
    proposals = sorted((node for node in result if context.fits(node)), key=lambda node: node.cost)
    return PlacementResult(tuple(proposals), model.cost)


def _search(context: Context, start: Start, model: PlacementCost, until: float) -> tuple[SearchNode, ...]:
    """The best graph and the shortlist of the last of several searches."""
    clock, graph = context.clock, start.base.state.graph
    clock.reserved = clock.budget.compile_until - until
    nodes: tuple[SearchNode, ...] = ()
    for _ in range(_ROUNDS):
        with clock.phase("profile"):
            new = model.kernels.learn(graph, until)
        if nodes and (not new or time.monotonic() >= until):
            break
        library = context.library.extended(placing_rules(context.options, model.loses))
        state = RewriteState.start(start.base.state.graph, library, model.delta)
        base = SearchNode(state, None, model.cost(state.graph))
        with clock.phase("search"):
            result = search(replace(context, library=library), base, model)
        if result.interrupted:
            raise KeyboardInterrupt
        nodes, graph = (result.best, *result.shortlist), result.best.state.graph
    return nodes
