"""Plain files as candidates: measurements of whole models decide among the search's proposals and variations of
these."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import measure
from xrlflow.common import deadline
from xrlflow.cost import InContextBenchmark
from xrlflow.cost.history import History
from xrlflow.ir import Graph
from xrlflow.onnxio import ImportedModel, ModelError, check_result
from xrlflow.pipeline import history
from xrlflow.pipeline.confirm import Judging, runs
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.finish import Candidates, Finished
from xrlflow.pipeline.prepare import Start
from xrlflow.pipeline.verifier import failure, on_file
from xrlflow.report import nothing_chosen, operators
from xrlflow.rewrite import RewriteState
from xrlflow.search import Limits, Ratio, SearchNode, Selection, greedy, joined, retrace, select

# Substitutions that increase the modelled cost by up to this fraction may be measured, since they may be faster in
# reality.
_TOLERANCE = 0.02
# A comparison of two models ends early when its confidence interval is at least this far from 1 (first number), or is
# this narrow (second number).
_DECIDED, _NARROW = 0.01, 0.02
# The smallest time limit of a comparison, in seconds.
_COMPARE_AT_LEAST = 0.5
# If loading the models of a comparison takes this many times as long as the whole comparison may take, it is stopped.
_PATIENCE = 3.0
# The fractions of the remaining selection time for measuring substitutions in context: first for the substitutions of
# the best proposal, second for the substitutions that could be added to it.
_LOOKING_BACK, _LOOKING_AHEAD = 0.25, 0.15
# Families of rules that clean up after other rules.
_TIDYING = frozenset({"identity", "reshape", "slices", "transpose"})
_REFUSED = Ratio(0.0, 0.0, 0.0)


class Unrunnable(BackendError):
    """The runtime refuses a graph, although it runs the original."""

    def __init__(self, node: SearchNode, reason: str) -> None:
        super().__init__(reason)
        self.node = node


@dataclass(frozen=True, slots=True)
class Proposal:
    """The chosen proposal, with the measurements that decided (`selection`), if there were any.

    `chosen`: None if no proposal is worth a comparison with the original.
    """

    chosen: SearchNode | None
    selection: Selection | None


def propose(context: Context, start: Start, explored: Explored) -> Proposal:
    """Choose a proposal. Raises KeyboardInterrupt if the search was interrupted before anything was chosen, and
    VerificationFailed if the runtime refuses the best proposal because of one rule."""
    options = context.options
    leaner = context.meant is not None or _runs_fewer(context.imported, start.base.state.graph)
    selection: Selection | None = None
    chosen: SearchNode | None = None
    if options.replay is not None:
        chosen = explored.result.best if context.fits(explored.result.best) else None
    elif options.measure and options.search != "random":
        selection = _selected(context, start, explored, leaner)
        chosen = selection.selected
    elif explored.proposals:
        best = explored.proposals[0]
        if options.search == "random" or best.cost < start.base.cost or leaner:
            chosen = best
    if chosen is not None and chosen.path is None and not leaner and not start.early:
        chosen = None
    return Proposal(chosen, selection)


def plain(context: Context, start: Start, explored: Explored) -> Candidates:
    """The candidate is the fastest proposal by measurements or, without measuring, the first proposal, as a plain
    file. See `Source`.
    """
    return (yield from offer(context, start, explored, propose(context, start, explored)))


def offer(context: Context, start: Start, explored: Explored, proposal: Proposal) -> Candidates:
    """A proposal as a candidate in a plain file; no candidate if nothing was chosen. Raises VerificationFailed if the
    file is no valid model.
    """
    chosen, decision = proposal.chosen, Finished(None, "", selection=proposal.selection)
    if chosen is None:
        return replace(decision, reason=nothing_chosen(proposal.selection, explored.late))
    try:
        context.notes.extend(check_result(context.imported, chosen.state.graph))
        path = context.artifact(chosen.state.graph).file
    except ModelError as error:
        raise failure(context, start, chosen, str(error), partial(_is_model, context)) from error
    yield Judging(context, start, chosen, path, decision)
    return None


def _runs_fewer(imported: ImportedModel, graph: Graph) -> bool:
    """Whether the imported graph (with folded constants, without dead nodes) has fewer operators than the file."""
    return sum(operators(graph).values()) < imported.nodes_before


def _selected(context: Context, start: Start, explored: Explored, leaner: bool) -> Selection:
    """Choose among the proposals by measurement. Raises what `propose` raises."""
    improving: Sequence[SearchNode] = explored.proposals
    if not (leaner or start.early):
        improving = [f for f in improving if f.path is not None]
    with context.clock.phase("select"):
        try:
            selection = choose(context, start, improving, strict=True)
        except Unrunnable as refused:
            failed = failure(
                context, start, refused.node, str(refused), on_file(context, partial(runs, context))
            )
            if failed.rule:
                raise failed from refused
            selection = choose(context, start, improving)
    if selection.interrupted and explored.result.interrupted:
        raise KeyboardInterrupt
    if selection.interrupted:
        context.notes.append("interrupted while whole models were compared: the best so far is kept")
        context.clock.hurry()
    return selection


def _is_model(context: Context, graph: Graph) -> bool:
    """Whether a graph can be written as a model that passes ONNX's checker."""
    try:
        check_result(context.imported, graph)
        return bool(context.artifact(graph).file)
    except ModelError:
        return False


def choose(
    context: Context, start: Start, proposals: Sequence[SearchNode], strict: bool = False
) -> Selection:
    """Choose the fastest of the proposals whose files are not too large. `strict`: see `Trials`."""
    clock, library = context.clock, context.library
    in_context = InContextBenchmark(
        context.threads,
        context.imported.bindings,
        session_options=context.options.session_options,
        opset=context.imported.opset,
    )
    deadline = clock.budget.begin_comparing_until
    tidying = frozenset(name for name, rule in library.rules.items() if rule.family in _TIDYING)
    with history.opened(context) as comparisons:
        trials = Trials(context, start, comparisons, clock.budget.select_until, strict=strict)
        selection = select(
            start.base, [f for f in proposals if context.fits(f)], trials.compare, trials.search, deadline,
            _TOLERANCE, tidying, _Survey(in_context, start.base, deadline, trials.say),
        )  # fmt: skip
    context.notes.extend(f"a proposal was dropped: {refusal}" for refusal in dict.fromkeys(trials.refused))
    context.notes.extend(f"not measured where it stands: {refusal}" for refusal in in_context.refused)
    return selection


@dataclass(slots=True)
class Trials:
    """Compares whole models, and searches for models to compare, until `deadline` (time.monotonic)."""

    context: Context
    start: Start
    history: History
    deadline: float
    careful: bool = False
    """Each comparison gets enough time for a confidence interval; comparisons without an interval are not stored."""
    strict: bool = False
    """As long as no graph is faster than the original, a graph that the runtime refuses raises Unrunnable."""
    count: int = field(default=0, init=False)
    stored: int = field(default=0, init=False)  # comparisons stored in the history so far
    best: float | None = field(default=None, init=False)  # the greatest speed-up over the original so far
    refused: list[str] = field(default_factory=list, init=False)  # why graphs could not be measured

    def say(self) -> None:
        self.context.say("select", self.count, 0, "measuring substitutions where they stand")

    def compare(self, against: SearchNode | None, node: SearchNode) -> Ratio:
        """The speed-up of `node` over `against`, which is another node or, if None, the original; `_REFUSED` if `node`
        cannot be run.
        """
        context = self.context
        if not context.fits(node):
            growth = context.options.max_growth
            self.refused.append(f"over {growth:g} times the input's size (--max-growth)")
            return _REFUSED
        self.count += 1
        best = "" if self.best is None else f", best so far {self.best:.3f} times as fast"
        context.say("select", self.count, 0, f"measuring whole models{best}")
        before = context.original.runnable if against is None else context.artifact(against.state.graph).file
        models = [before, context.artifact(node.state.graph).file]
        seconds_left = max(_COMPARE_AT_LEAST, self.deadline - time.monotonic())
        budget = context.clock.budget
        limit = budget.careful_comparison if self.careful else budget.each_comparison
        assert context.feeds is not None
        try:
            with deadline.within(time.monotonic() + _PATIENCE * limit):
                measured = measure(
                    models, dict(context.feeds), threads=context.threads,
                    time_limit=min(limit, seconds_left), target_width=_NARROW, control=False, margin=_DECIDED,
                    session_options=context.options.session_options, load_reversed=self.count % 2 == 0,
                )  # fmt: skip
        except BackendError as error:  # the original ran, so the runtime refuses the proposal
            if self.strict and (self.best is None or self.best <= 1.0):
                raise Unrunnable(node, str(error)) from error
            self.refused.append(str(error))
            return _REFUSED
        ratio = Ratio(measured.speedup.median, measured.speedup.low, measured.speedup.high)
        if against is None:
            self.best = max(ratio.median, self.best or 0.0)
        baseline = self._of(against)
        if baseline is not None and not measured.load.disturbed:
            self.stored += history.keep(
                self.history, context, self.start.model, baseline, node.state.graph, ratio
            )
        return ratio

    def _of(self, against: SearchNode | None) -> Graph | None:
        """The graph that was measured as `against`; None for the original, if it was simplified before the search, or
        has another accuracy level."""
        if against is not None:
            return against.state.graph
        base = self.start.base.state.graph
        if self.context.meant is not None:
            return None
        return base if base.fingerprint == self.context.imported.graph.fingerprint else None

    def search(self, node: SearchNode, rules: frozenset[str]) -> SearchNode:
        """The result of a greedy search with these rules only, as a node that has the candidates of all rules."""
        library = self.context.library
        state = RewriteState.start(node.state.graph, library.only(rules), node.state.delta)
        result = greedy(state, node.cost, Limits(self.context.options.budget, self.deadline))
        if result.interrupted:  # the caller stays with its best choice
            raise KeyboardInterrupt
        better = result.best
        if better.path is None:
            return node
        full = RewriteState.start(better.state.graph, library, node.state.delta)
        return replace(better, state=full, path=joined(node.path, better.path))


@dataclass(frozen=True, slots=True)
class _Survey:
    """Measures substitutions in context, within the time of the selection."""

    in_context: InContextBenchmark
    base: SearchNode
    deadline: float
    say: Callable[[], None]

    def candidates(self, node: SearchNode, rules: Sequence[str]) -> Mapping[str, float]:
        return self.in_context.survey(
            node.state, rules, _TOLERANCE * self.base.cost, self._until(_LOOKING_AHEAD)
        )

    def steps(self, node: SearchNode) -> Mapping[str, float]:
        applied = ((state, match) for state, match, _ in retrace(self.base.state, node.trace))
        return self.in_context.retrace(applied, self._until(_LOOKING_BACK))

    def _until(self, share: float) -> float:
        self.say()
        now = time.monotonic()
        return now + share * (self.deadline - now)
