"""Candidates with generated kernels: an ONNX file and a library, if measurements show that these are faster than the
plain file.

Several graphs are compiled, as long as there is time: the proposal that ONNX Runtime runs fastest, the imported graph,
and the result of a search by the costs of operators in both runtimes. If a graph with kernels is faster than the plain
file by a margin, it is compared with the original and verified like any other candidate. Otherwise the plain file is
the candidate.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from xrlflow.backends import BackendError
from xrlflow.backends.children import Child
from xrlflow.backends.library_files import library_path
from xrlflow.backends.onnxruntime import Options, measure, with_library
from xrlflow.backends.onnxruntime.saturation import saturates
from xrlflow.backends.protocol import Feeds, OutOfTime
from xrlflow.backends.results import SpeedUp
from xrlflow.backends.tvm.kernels.algorithms import multiplies_less
from xrlflow.backends.tvm.library.hybrid import SavedHybrid, open_inputs
from xrlflow.common import deadline
from xrlflow.ir import Graph
from xrlflow.pipeline.choose import Proposal, offer, plain, propose
from xrlflow.pipeline.confirm import Judging
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.finish import Candidates, Finished
from xrlflow.pipeline.placement import PlacementResult, search_with_kernels
from xrlflow.pipeline.prepare import Start, target_of
from xrlflow.pipeline.sizes import other_sizes
from xrlflow.pipeline.verifier import check_without
from xrlflow.search import SearchNode
from xrlflow.search.result import Limits
from xrlflow.search.sweep import sweep
from xrlflow.tuning.lowering import Lowering, load_tvm
from xrlflow.tuning.store import Store

MARGIN = 1.02
"""A model with kernels must certainly be at least this many times faster than the plain file, since its deployment
needs two files.
"""
# Limits of a comparison with the plain file: seconds in addition to loading and runs, the number of runs, and the
# relative width of the confidence interval.
_COMPARING, _RUNS, _NARROW = 3.0, 60, 0.02
# Estimated seconds to load TVM, to measure the kernel of a node, to compile the kernel of a node, and for a search.
_LOADING, _PRICE, _COMPILE, _SEARCH = 3.0, 0.03, 0.06, 2.0
_IN_FLOAT = frozenset({"ConvolveIntegersInFloat32"})
"""Rules that bring operators of integers into the form of kernels."""
# How much slower models are without generated kernels: from the geometric means of docs/benchmarks, 1.426 with them
# and 1.133 without.
_LOST = "with them a model is 1.26 times as fast on average"
# The largest fraction of the time limit that is reserved for kernels, if the model itself needs the whole limit.
_AT_MOST = 0.35


def lacking(context: Context) -> str | None:
    """What is missing to generate kernels for any graph of the model (a compiler, or sizes of inputs); None if nothing
    is missing.

    Raises BackendError if something is lacking and the user requires generated kernels.
    """
    missing = missing_for_kernels()
    if missing is None:
        try:
            open_inputs(context.imported.frame, _sizes(context))
        except BackendError as error:
            missing = error.reason
    if missing is not None and context.options.backend == "hybrid":
        raise BackendError(f"generated kernels: {missing}")
    return missing


def missing_for_kernels() -> str | None:
    """The software that this machine lacks to generate kernels; None if it lacks nothing."""
    if importlib.util.find_spec("tvm") is None:
        return "they need TVM (pip install 'xrlflow[tvm]')"
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        return "they need a C compiler (cc)"
    return None


def compile_seconds(context: Context) -> float:
    """Seconds to reserve for kernels: enough for a search by the kernels' costs and for two graphs; if there is less
    time, enough for one graph.
    """
    clock = context.clock
    limit, other = clock.limit - clock.begin, clock.budget.end - clock.begin
    one = _LOADING + _one_graph(context, context.imported.graph)
    more = one + _further(context, context.imported.graph)
    return more if more <= _AT_MOST * limit or other + more <= limit else min(one, _AT_MOST * limit)


def _comparing(context: Context) -> float:
    """Estimated seconds to compare two files."""
    return _COMPARING + 2 * context.clock.loading + _RUNS * context.clock.latency


def _patience(context: Context) -> float:
    """The time limit in seconds of a comparison that stays undecided: up to twice the usual limit, if there is time."""
    usual = _comparing(context)
    return max(usual, min(2 * usual, context.clock.budget.compile_until - time.monotonic()))


def _one_graph(context: Context, graph: Graph) -> float:
    """Estimated seconds to compile a graph with kernels and to compare it."""
    return _COMPILE * sum(1 for _ in graph.nodes()) + _comparing(context)


def _further(context: Context, graph: Graph) -> float:
    """Estimated seconds to search for another graph by the costs of its operators, and to compile this graph."""
    return _PRICE * sum(1 for _ in graph.nodes()) + _SEARCH + _one_graph(context, graph)


@dataclass(frozen=True, slots=True)
class _BuiltCandidate:
    """A graph that was compiled with kernels, at `path`. `costs`: see `Finished`. `gain`: how many times faster than
    the plain file it was measured to be; 1 if that was not measured.
    """

    node: SearchNode
    hybrid: SavedHybrid
    path: str
    costs: tuple[float, float] | None
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The graphs to compile, in the order in which they are compiled."""

    nodes: Sequence[SearchNode]
    base: Graph
    cost: Callable[[Graph], float] | None = None
    """The modelled cost of a graph, from the costs of operators in both runtimes; None: the costs are unknown."""

    def costs(self, node: SearchNode) -> tuple[float, float] | None:
        return None if self.cost is None else (self.cost(self.base), self.cost(node.state.graph))


def candidates(context: Context, start: Start, explored: Explored) -> Candidates:
    """The candidates, each if the one before is rejected: the fastest graph with kernels; if it computes something
    else, the same graph with plain kernels; the plain proposal. See `Source`.

    Raises BackendError if the user requires kernels (`backend="hybrid"`) and there are none, and KeyboardInterrupt if
    there is no result yet.
    """
    if not context.options.with_kernels:
        return (yield from plain(context, start, explored))
    proposal = propose(context, start, explored)
    missing = lacking(context)
    if missing is None and context.options.backend != "hybrid":
        missing = _too_late(context, [f.state.graph for f in (start.base, proposal.chosen) if f is not None])
    if missing is not None:
        context.notes.append(f"no generated kernels: {missing}")
        return (yield from offer(context, start, explored, proposal))
    built = _best(context, start, explored, proposal)
    context.clock.reserved = 0.0
    if built is not None and _gains_little(context, built, proposal):
        context.notes.append(
            "not kept with kernels: there was time to decide on one file only (--time-limit), and they are "
            f"{built.gain:.2f} times as fast as the plain file, this about {_gain(proposal):.2f} times as fast as the "
            "original"
        )
        built = None
    while built is not None:
        context.notes.append(_describe(built))
        finished = yield _judging(context, start, built, proposal)
        context.notes.append(f"not kept with kernels: {finished.reason}")
        different = finished.verification is not None and not finished.verification.verified
        if different:
            check_without(context, start, built.node)
        if not different or not multiplies_less(built.hybrid.chosen):
            break
        context.notes.append("compiled again, with plain kernels")
        context = replace(context, options=replace(context.options, exact_kernels=True))
        built = _best(context, start, explored, proposal, built)
    return (yield from offer(context, start, explored, proposal))


def _gain(proposal: Proposal) -> float:
    return 1.0 if proposal.selection is None else proposal.selection.gain


def _gains_little(context: Context, built: _BuiltCandidate, proposal: Proposal) -> bool:
    """Whether there is time to decide on one more file only, and the plain file has more of the gain: if a decision on
    kernels failed, what the plain file gains would be lost, too.
    """
    options, budget = context.options, context.clock.budget
    if options.backend == "hybrid" or not options.measure or context.clock.hurried or proposal.chosen is None:
        return False
    return time.monotonic() + 2 * budget.decision > budget.until and built.gain < _gain(proposal)


def _too_late(context: Context, graphs: Sequence[Graph]) -> str | None:
    """Why there is no time to compile, verify and compare any of these graphs; None if there is.

    Large graphs have many equal kernels, which are compiled once: for large graphs the time is assumed to suffice.
    """
    clock = context.clock
    if clock.hurried:
        return "interrupted"
    if not context.options.measure:
        return None
    nodes = min(sum(1 for _ in graph.nodes()) for graph in graphs)
    compiling = _LOADING + min(_COMPILE * nodes, _AT_MOST / 2 * (clock.limit - clock.begin))
    if time.monotonic() + compiling + _COMPARING + clock.budget.verification > clock.budget.until:
        return f"there was no time (--time-limit); {_LOST}"
    return None


def _judging(context: Context, start: Start, built: _BuiltCandidate, proposal: Proposal) -> Judging:
    """A graph with kernels as a candidate to be decided on."""
    asked = context.options.backend == "hybrid"
    context = with_kernels(context, built.path)
    decision = Finished(None, "", selection=proposal.selection, hybrid=built.hybrid, costs=built.costs)
    return Judging(
        context, start, built.node, built.path, decision, kernels=_sizes(context), decides=not asked
    )


def _candidates(
    context: Context, start: Start, explored: Explored, proposal: Proposal, how: Lowering
) -> _Candidates:
    """The graphs to compile, in order. The first is the choice without kernels or the imported graph, whichever costs
    less by the costs of operators in both runtimes; the second is the result of a search by these costs; the third is
    the remaining one of the first two. With a trace: only the graph to which it leads.
    """
    base = start.base.state.graph
    if context.options.replay is not None:
        return _Candidates([explored.result.best], base)
    plain = [_for_kernels(node) for node in (proposal.chosen, start.base) if node is not None]
    further: Sequence[SearchNode] = ()
    searched = _searched(context, start, how)
    if searched is not None:
        plain.sort(key=lambda node: searched.cost(node.state.graph))
        further = searched.proposals
    different: dict[int, SearchNode] = {}
    for node in (plain[0], *further[:1], *plain[1:], *further[1:]):
        different.setdefault(node.state.graph.fingerprint, node)
    return _Candidates(list(different.values()), base, None if searched is None else searched.cost)


def _for_kernels(node: SearchNode) -> SearchNode:
    """A graph whose integer convolutions are in float32, if that is exact and the processor has no instruction for
    products of bytes: regions of kernels then have fewer borders, and kernels with fewer multiplications are possible.
    """
    names = node.state.library.rules.keys() & _IN_FLOAT
    if not saturates():
        return node
    for name in sorted(names):
        node = sweep(node, name, Limits(), math.inf)
    return node


def _searched(context: Context, start: Start, how: Lowering) -> PlacementResult | None:
    """The result of a search by the costs of operators in both runtimes; None, with a note, if there is no time, or if
    the costs are unknown.
    """
    if context.feeds is None or context.options.search == "random":
        return None
    until = context.clock.budget.compile_until - 2 * _one_graph(context, start.base.state.graph)
    late = "no search for another graph that suits kernels: there was no time (--time-limit)"
    try:
        if how.child is not None and time.monotonic() + _SEARCH < until:
            with deadline.within(context.clock.budget.compile_until):
                how.child.call(load_tvm)  # first: loading may leave the search no time
        if time.monotonic() + _SEARCH <= until:  # in less time, some operators would not be measured
            return search_with_kernels(context, start, how, until)
        context.notes.append(late)
    except OutOfTime:
        context.notes.append(late)
    except BackendError as error:
        context.notes.append(f"generated kernels have no prices: {error.reason}")
    return None


def with_kernels(context: Context, path: str) -> Context:
    """The context for measuring and verifying a file with its library. Models without the library's operators ignore
    the library.
    """
    options = with_library(context.options.session_options, str(library_path(path)))
    return replace(context, options=replace(context.options, session_options=options))


def _best(
    context: Context,
    start: Start,
    explored: Explored,
    proposal: Proposal,
    before: _BuiltCandidate | None = None,
) -> _BuiltCandidate | None:
    """See `_Trials.best`. `before`: the only graph to compile, which was compiled earlier with other algorithms. After
    Ctrl-C the result is the best so far: a graph with kernels, or None for the plain proposal.

    Raises KeyboardInterrupt at the second Ctrl-C, and if the user requires kernels and there are none yet.
    """
    trials = _Trials(context, context.options.backend == "hybrid")
    try:
        with _lowering(context) as how:
            if before is not None:
                candidates = _Candidates([before.node], start.base.state.graph)
            else:
                candidates = _candidates(context, start, explored, proposal, how)
            return trials.best(how, proposal.chosen, candidates)
    except KeyboardInterrupt:
        fastest = trials.fastest
        if context.clock.hurried or (fastest is None and trials.asked):
            raise
        result = "the plain file" if fastest is None else "the best so far"
        context.notes.append(f"interrupted while kernels were compiled: {result} is kept")
        context.clock.hurry()
        return fastest


@contextmanager
def _lowering(context: Context) -> Iterator[Lowering]:
    """The compiler for this processor, with the store of tuned kernels."""
    options = context.options
    with Child(TMPDIR=context.folder) as child, Store(options.store) as store:
        with context.clock.phase("compile"):
            if child is not None:
                child.prepare(load_tvm)  # at the same time as this process loads TVM
            target = target_of(options)
            if options.measure or options.verify:
                target.check_runs()
        yield replace(replace(context, target=target, store=store).lowering, child=child)


def _sizes(context: Context) -> list[dict[str, tuple[int, ...]]]:
    """The sizes of inputs for which to generate kernels: those in the options, or the sizes of the user's own
    inputs."""
    options = context.options
    first = context.sizes
    if options.inputs is not None and context.feeds is not None:
        first.update({name: np.shape(value) for name, value in context.feeds.items()})
    further = [{name: tuple(shape) for name, shape in shapes.items()} for shapes in options.further_shapes]
    return [first, *({**first, **shapes} for shapes in further)]


def _describe(built: _BuiltCandidate) -> str:
    """A line that says which nodes run in generated kernels."""
    hybrid = built.hybrid
    regions = f"in {len(hybrid.regions)} regions" if len(hybrid.regions) > 1 else "as one region"
    remarks = "".join(f"; {remark}" for remark in hybrid.remarks)
    return f"generated kernels run {hybrid.nodes} of {hybrid.total} nodes, {regions}{remarks}"


@dataclass(slots=True)
class _Trials:
    """Compiles graphs with kernels, and compares them with the plain proposal."""

    context: Context
    asked: bool  # whether the user requires generated kernels
    fastest: _BuiltCandidate | None = field(default=None, init=False)  # None: the plain proposal
    refused: list[str] = field(default_factory=list, init=False)  # why graphs could not be compiled

    def best(
        self, how: Lowering, plain: SearchNode | None, candidates: _Candidates
    ) -> _BuiltCandidate | None:
        """The fastest graph with kernels; None if no graph compiles, or if no graph is faster than the plain proposal.

        Raises BackendError if the user requires kernels and no graph compiles.
        """
        before: str | bytes
        compiled = 0
        for node in candidates.nodes:
            begun = time.monotonic()
            if self.refused and begun >= self._compile_until():
                break
            built = self._build(how, node, candidates.costs(node))
            if built is None:
                continue
            compiled += 1
            if self.fastest is not None:
                before, margin, name = self.fastest.path, 1.0, "the other graph with kernels"
            else:
                original = self.context.original.runnable
                before = original if plain is None else self.context.artifact(plain.state.graph).file
                margin, name = MARGIN, "the plain file"
                self.fastest = built if self.asked else None
            known = 1.0 if self.fastest is None else self.fastest.gain
            gain = self._gain(before, built, name)
            if gain.low > margin:
                self.fastest = replace(built, gain=known * gain.median)
            if not self._has_time(time.monotonic() - begun):
                break
        if self.fastest is None and self.asked:
            raise BackendError(self.refused[0])
        if not compiled:  # if one graph compiles, the failures of others do not matter
            self.context.notes.extend(dict.fromkeys(self.refused))
        return self.fastest

    def _compile_until(self) -> float:
        """The deadline of compiling (time.monotonic). If the user requires kernels, no time is reserved for a
        decision.
        """
        budget = self.context.clock.budget
        if not self.context.options.measure or (self.asked and self.fastest is None):
            return budget.until - budget.verification
        return budget.compile_at_latest

    def _has_time(self, seconds: float) -> bool:
        """Whether there is time to compile and compare another graph, if this takes `seconds`."""
        budget = self.context.clock.budget
        return self.context.options.measure and time.monotonic() + seconds < budget.compile_until

    def _build(
        self, how: Lowering, node: SearchNode, costs: tuple[float, float] | None
    ) -> _BuiltCandidate | None:
        """A graph compiled with kernels; None if the compilation fails."""
        context = self.context
        with context.clock.phase("compile"):
            context.say("compile", note="generated kernels")
            try:
                path = os.path.join(tempfile.mkdtemp(dir=context.folder), "model.onnx")
                plain = context.artifact(node.state.graph).file
                with deadline.within(self._compile_until()):
                    hybrid = how.hybrid(plain, _sizes(context), path)
            except OutOfTime:
                late = "there was no time to compile them (--time-limit)"
                self.refused.append(f"no generated kernels: {late}; {_LOST}")
                return None
            except BackendError as error:
                self.refused.append(f"no generated kernels: {error.reason}")
                return None
        return _BuiltCandidate(node, hybrid, path, costs)

    def _gain(self, before: str | bytes, built: _BuiltCandidate, name: str) -> SpeedUp:
        """How many times faster than the file `before` a graph with kernels is, measured in this process; infinite if
        no models are measured, 0 if kernels are to be dropped.

        Kernels for any number of rows are measured with few rows and with many, too: the geometric mean counts, and
        with none of these sizes they may certainly be slower.
        """
        context = self.context
        if context.feeds is None:
            return SpeedUp(1.0, math.inf, math.inf)
        dropped = SpeedUp(0.0, 0.0, 0.0)
        speedups: list[SpeedUp] = []
        others = other_sizes(context) if built.hybrid.rows else []
        for sizes, feeds in [("", dict(context.feeds)), *others]:
            if sizes and not self._has_time(_COMPARING):
                context.notes.append(f"not measured with {sizes}: there was no time (--time-limit)")
                break
            try:
                speedup = self._speedup(
                    before, built.path, feeds, _COMPARING if others else _patience(context)
                )
            except BackendError as error:
                context.notes.append(f"generated kernels were dropped: {error}")
                return dropped
            at = f" and {sizes}" if sizes else ""
            context.notes.append(f"with generated kernels{at}, measured against {name}: {speedup}")
            if sizes and speedup.slower:
                context.notes.append("generated kernels were dropped: they are slower with some sizes")
                return dropped
            if speedup.bounded or not sizes:  # a slow size may have too few runs to say anything
                speedups.append(speedup)
        return _mean(speedups)

    def _speedup(self, before: str | bytes, after: str, feeds: Feeds, seconds: float) -> SpeedUp:
        """How many times faster the file `after` is. Raises BackendError."""
        context = self.context
        options: Options | None = context.options.session_options
        for path in (before, after):
            if not isinstance(path, bytes) and library_path(path).is_file():
                options = with_library(options, str(library_path(path)))
        latest = max(context.clock.budget.until, time.monotonic() + _comparing(context))
        with context.clock.phase("select"), deadline.within(latest):
            context.say("select", note="with and without generated kernels")
            return measure(
                [before, after], feeds, threads=context.threads, time_limit=seconds, target_width=_NARROW,
                control=False, session_options=options,
            ).speedup  # fmt: skip


def _mean(speedups: Sequence[SpeedUp]) -> SpeedUp:
    """The geometric mean of speed-ups that were measured independently, with the lower end of its interval."""
    mean = math.fsum(math.log(speedup.median) for speedup in speedups) / len(speedups)
    if any(speedup.low <= 0.0 for speedup in speedups):
        return SpeedUp(math.exp(mean), 0.0, math.inf)
    below = [math.log(speedup.median) - math.log(speedup.low) for speedup in speedups]
    return SpeedUp(math.exp(mean), math.exp(mean - math.hypot(*below) / len(speedups)), math.inf)
