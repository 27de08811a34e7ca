"""Attempts at an optimisation, each with another cost model, one after the other until a result is faster than the
original.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from xrlflow.cost import CostModel, Learned, NoTimeLeft, Profiled, Roofline, at_usual_size
from xrlflow.pipeline import choose, compiled, kernels
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.correct import corrected, ordered
from xrlflow.pipeline.explore import Explored, explore
from xrlflow.pipeline.finish import Finished, Source, finish
from xrlflow.pipeline.kernels import compile_seconds, lacking
from xrlflow.pipeline.prepare import Start, cost_model, restarted, start
from xrlflow.pipeline.verifier import VerificationFailed
from xrlflow.rewrite import Library, RewriteState
from xrlflow.rewrite.state import MAY_BE_EMPTY
from xrlflow.search import SearchNode, SearchResult, leave_out

CANDIDATES: Mapping[str, Source] = {
    "auto": kernels.candidates,
    "hybrid": kernels.candidates,
    "onnxruntime": choose.plain,
    "tvm": compiled.candidates,
}
"""For each backend, the source of the candidates that come from a search."""

# How many rules a note names, of those that cannot apply because a dimension may be 0.
_NAMED = 3
# The fraction of an agent's training time that is spent on correcting the costs from which it learns.
_CORRECTING = 0.4


@dataclass(frozen=True, slots=True)
class Attempt:
    """A search, its result, and the decision on this result. `context`: the context without the rules that broke a
    graph.
    """

    context: Context
    start: Start
    explored: Explored
    finished: Finished


def attempted(context: Context) -> Attempt:
    """The first attempt whose result is accepted; if no result is accepted, the first attempt of all.

    A later attempt has the time that earlier attempts left, and generates no kernels. After Ctrl-C no attempt begins.
    Raises what `Source` raises, and OptionError; VerificationFailed only if the user fixed the graph by a trace, or
    requires a compiled model.
    """
    options, clock = context.options, context.clock
    if context.unwritable:
        return _none(context)
    if options.with_kernels and lacking(context) is None:
        clock.compiling = clock.reserved = compile_seconds(context)
    first, *later_costs = options.costs
    attempts = [_attempt(context, first)]
    clock.compiling = clock.reserved = 0.0
    for cost in later_costs:
        if attempts[-1].finished.accepted is not None or not clock.again():
            break
        try:
            attempts.append(_attempt(attempts[-1].context, cost, later=True))
        except NoTimeLeft:
            context.notes.append(f"there was no time for a search by {cost} costs (--time-limit)")
        except KeyboardInterrupt:
            context.notes.append("interrupted: the original is kept")
            break
    attempt = attempts[-1] if attempts[-1].finished.accepted is not None else attempts[0]
    context.notes.extend(_needing_sizes(context.library))
    context.notes.extend(
        f"by {each.start.model.name} costs: {each.finished.reason}"
        for each in attempts
        if each is not attempt
    )
    return attempt


def _needing_sizes(library: Library) -> list[str]:
    """A note on rules that were refused because a dimension may be 0; the rules with most refusals come first."""
    refusals = {name: stats.refused[MAY_BE_EMPTY] for name, stats in library.stats.items()}
    names = sorted(
        (name for name, count in refusals.items() if count), key=lambda name: (-refusals[name], name)
    )
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [
        f"not applied, because an open dimension may be 0: {', '.join(names[:_NAMED])}{more} "
        "(if none is ever 0: --assume nonempty)"
    ]


def _none(context: Context) -> Attempt:
    """The attempt that returns the original, for a model of which no written file can replace the original."""
    model, graph = Roofline(bindings=context.imported.bindings), context.imported.graph
    base = SearchNode(RewriteState.start(graph, context.library), None, model.cost(graph))
    explored = Explored(SearchResult(base, (base,), 0, 0, 0.0, False), ())
    return Attempt(context, Start(base, model), explored, Finished(None, context.unwritable))


def _attempt(context: Context, cost: str | CostModel, later: bool = False) -> Attempt:
    """Search, choose, verify and measure. `later`: this is not the first attempt, so it generates no kernels. A later
    attempt raises NoTimeLeft if predicting the costs of all substitutions, which may be thousands, would take all of
    the search's time.
    """
    with context.clock.phase("calibrate"):
        model = cost_model(context, cost)
        if later and isinstance(model, Learned):
            model.until = context.clock.budget.search_until
        begin = start(context, model)
        if isinstance(model, Learned):
            model.until = math.inf
    if not context.options.train_steps:  # preparing a large model may have used up the search's time
        context.clock.share()
    if isinstance(model, Learned):
        begin = _corrected(context, begin, model)
    explored = explore(context, begin)
    if begin.measured:
        explored = ordered(context, begin, explored)
    prices = model.prices if isinstance(model, Learned) else at_usual_size(model)
    if isinstance(prices, Profiled) and not later:
        context.notes.append(f"operators: {prices.counts}")
    source = choose.plain if later else CANDIDATES[context.options.backend]
    return _finished(Attempt(context, begin, explored, Finished(None, "")), source)


def _finished(attempt: Attempt, source: Source) -> Attempt:
    """The attempt with the decision on its candidates. If a rule broke a graph, all substitutions of this rule are
    removed from the search's graphs, and the decision is made again on the resulting graphs. If no rule is to blame,
    or the rule is unknown, the original stays.
    """
    context = attempt.context
    while True:
        try:
            finished = finish(source(attempt.context, attempt.start, attempt.explored))
        except VerificationFailed as failed:
            if context.options.replay is not None or (context.options.compiling and not failed.rule):
                raise
            if not failed.rule:
                return replace(attempt, finished=Finished(None, f"the original is kept: {failed.why}"))
            context.notes.append(f"{failed.rule} was taken back: {failed.why}")
            attempt = _without(attempt, failed.rule)
        else:
            return replace(attempt, finished=finished)


def _without(attempt: Attempt, rule: str) -> Attempt:
    """The attempt without a rule: each graph without the rule's substitutions and without those that depend on them."""
    begin = restarted(attempt.context, attempt.start, [rule])

    def without_rule(node: SearchNode) -> SearchNode:
        return leave_out(begin.base, node.trace, (rule,))

    before = attempt.explored.result
    result = replace(
        before, best=without_rule(before.best), shortlist=tuple(map(without_rule, before.shortlist))
    )
    proposals = {node.state.fingerprint: node for node in map(without_rule, attempt.explored.proposals)}
    explored = replace(attempt.explored, result=result, proposals=tuple(proposals.values()))
    return replace(
        attempt,
        context=replace(attempt.context, library=begin.base.state.library),
        start=begin,
        explored=explored,
    )


def _corrected(context: Context, start: Start, model: Learned) -> Start:
    """The start with costs that are fitted to this model. They are fitted only if an agent will learn from them, if it
    has training time, and if models can be measured; otherwise the start is returned as it is.
    """
    until = context.clock.budget.train_until
    options = context.options
    if not options.train_steps or options.replay is not None or context.feeds is None or until is None:
        return start
    now = time.monotonic()
    return corrected(context, start, model, now + _CORRECTING * (until - now))
