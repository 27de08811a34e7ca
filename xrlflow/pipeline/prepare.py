"""Before the search: read the model, draw inputs for measurements, and set up a cost model."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

from rewrite_rules.placement import without_placement
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.onnxruntime.session import OrtModel
from xrlflow.backends.protocol import NotFromPython, OutOfTime
from xrlflow.backends.tvm.devices.execution import ExecutionTarget, find_target
from xrlflow.backends.tvm.devices.remote import Remote
from xrlflow.common import deadline
from xrlflow.cost import (
    AdditiveCost,
    CostModel,
    Database,
    Learned,
    Measured,
    OverSizes,
    Profiled,
    Roofline,
    calibrated,
    load_network,
)
from xrlflow.cost.fine_tuning import fine_tuned
from xrlflow.cost.history import History
from xrlflow.cost.pretrained import PRETRAINED
from xrlflow.ir import Graph
from xrlflow.onnxio import ImportedModel, ModelError, Source, load, preferring, to_proto
from xrlflow.onnxio.shapes import solve
from xrlflow.ops.schema import OPSET
from xrlflow.options import NONEMPTY, Common, OptionError, Options
from xrlflow.pipeline import history
from xrlflow.pipeline.artifact import Artifacts, Original
from xrlflow.pipeline.context import Clock, Context
from xrlflow.pipeline.failing import explained
from xrlflow.pipeline.library import check_supported, library_for
from xrlflow.pipeline.trace import Trace, read_trace
from xrlflow.report import Listener
from xrlflow.rewrite import Library, RewriteState
from xrlflow.search import (
    Limits,
    Path,
    Ratio,
    SearchNode,
    TraceError,
    TraceStep,
    append,
    greedy,
    retrace,
    simplify,
    steps_of,
    with_bodies,
)
from xrlflow.storage.stores import server_of
from xrlflow.tuning.store import Store
from xrlflow.verify import InputsNeeded, feeds_for_measurement
from xrlflow.verify.inputs import InputPlan, user_case
from xrlflow.verify.layers import is_quantised

# The fraction of the search's time that measuring operators may take.
_PROFILING = 0.5
# The number of this machine's latest comparisons to which the learned cost model is fitted.
_REMEMBERED = 64
# The fraction of the search's time that fitting the learned cost model may take.
_FITTING = 0.1
# The fraction of the remaining time for drawing inputs, loading the original and running it on these inputs; and the
# duration of a run, as a fraction of the time limit, above which the run counts as long.
_DRAWING, _LONG = 0.4, 0.03
# The fraction of the remaining time for finding all substitutions that apply to the original.
_LOOKING = 0.4
# If the first run takes this many seconds, its time is the latency, and no second run is made.
_SLOW = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Early:
    """Substitutions that were applied to `graph` before the search."""

    body: str
    """The control-flow body that `graph` is ("If.then_branch/Loop.body"); "" for the model itself."""
    graph: Graph
    path: Path | None
    cost: float | None
    """The modelled seconds before the substitutions; None: the substitutions canonicalise the graph, for which no cost
    is computed.
    """

    @property
    def steps(self) -> tuple[TraceStep, ...]:
        return steps_of(self.path)


@dataclass(frozen=True, slots=True)
class Start:
    """The node with which the search begins, its cost model, and the substitutions that were applied before the
    search.
    """

    base: SearchNode
    model: CostModel
    before: tuple[Early, ...] = ()
    to_replay: tuple[TraceStep, ...] = ()  # the substitutions of a trace that come after `before`
    measured: tuple[tuple[Ratio, SearchNode], ...] = ()  # measured graphs with their speed-ups over `base`

    @property
    def early(self) -> tuple[TraceStep, ...]:
        """All substitutions that were applied before the search, in order."""
        return tuple(step for part in self.before for step in part.steps)


def target_of(options: Common) -> ExecutionTarget:
    """The processor and device on which a compiled model runs. Raises BackendError."""
    device = Remote.parse(options.remote) if isinstance(options.remote, str) else options.remote
    return find_target(options.cpu, options.triple, device, options.threads)


@contextmanager
def opened(
    source: Source,
    options: Options,
    listener: Listener | None,
    begin: float,
    kernels: str | os.PathLike[str] | None = None,
) -> Iterator[Context]:
    """The context of an optimisation that began at `begin`: it has a temporary folder and, for TVM, a store of
    kernels.

    The store is the file `kernels`, or else the file that the options name, or else a file in the user's cache
    directory. Raises ModelError for a model that cannot be read, or whose file changes before the end of the block,
    BackendError and StoreError.
    """
    compiling = options.compiling
    target = target_of(options) if compiling else None
    if target is not None and (options.measure or options.verify):
        target.check_runs()
    clock = Clock(begin, begin + options.time_limit, options.verify, compiling)
    with ExitStack() as stack:
        with clock.phase("import", begin):
            database = stack.enter_context(Database(options.server))
            if server_of(options.store) is not None:
                database.check()  # to report a wrong address before any work is done
            # TVM compiles for fixed sizes, and some operators can be decomposed only for fixed sizes.
            imported = load(source, shapes=options.shapes, fix_shapes=options.fix_shapes or compiling)
            opset = OPSET if compiling else options.opset
            imported = imported if opset is None else preferring(imported, opset)
            imported = replace(imported, nonempty=NONEMPTY in options.assumptions)
            clock.quantised = is_quantised(imported.graph)
            folder = stack.enter_context(TemporaryDirectory(prefix="xrlflow-"))
            library = library_for(options)
            store: Store | None = None
            if compiling:
                check_supported(imported, library)
                store = stack.enter_context(Store(options.store if kernels is None else kernels))
                store.check()
        stack.enter_context(_unchanged(imported))
        yield Context(
            options, Original(source, folder), imported, library, clock, Artifacts(folder), listener, target=target,
            store=store, database=database,
        )  # fmt: skip


@contextmanager
def _unchanged(imported: ImportedModel) -> Iterator[None]:
    """Raise ModelError at the end of the block if the model's file has changed, in place of any error that the block
    raises. The check compares the content that was read with the present file.
    """
    try:
        yield
    except Exception as error:
        try:
            imported.store.check_unchanged(current=True)
        except ModelError as changed:
            raise changed from error
        raise
    imported.store.check_unchanged(current=True)


def fed(context: Context) -> Context:
    """The context `with_feeds`. If the original runs on no inputs, the result of the optimisation will be the
    original, unless there is a trace or the user requires kernels. Raises what `with_feeds` raises.
    """
    options = context.options
    try:
        return with_feeds(context)
    except (InputsNeeded, NotFromPython) as error:
        if options.replay is not None or options.backend not in ("auto", "onnxruntime"):
            raise
        return replace(context, unwritable=str(error))


def with_feeds(context: Context) -> Context:
    """The context with inputs for measurements, if anything is measured; the sizes of these inputs replace open
    dimensions.

    If there is no time to draw inputs, or to run the original once, nothing is measured, and a note says so. Raises
    what the original raises on the user's inputs, and OutOfTime if the user's cost model requires measurements.
    """
    options, clock = context.options, context.clock
    until = time.monotonic() + _DRAWING * max(0.0, clock.limit - time.monotonic())
    with clock.phase("inputs"), deadline.within(until):
        feeds: dict[str, Any] | None = None
        try:
            if options.inputs is not None:
                feeds = dict(user_case(context.imported, options.inputs).feeds)
                if options.measure:
                    _time_original(context, feeds)
            elif options.measure or options.cost_name == "measured":
                with explained(context):
                    feeds = random_feeds(context)
        except OutOfTime as error:
            if options.cost_name == "measured":
                raise
            context.notes.append(f"nothing is measured: {error} (--time-limit, --inputs, --shape)")
            context = replace(context, options=replace(options, measure=False))
        if feeds is not None:
            context = replace(context, feeds=feeds, imported=_bound(context, feeds))
    return context


def random_feeds(context: Context) -> dict[str, Any]:
    """Random inputs on which the original runs. The clock notes the times of loading and of a run.

    If there is a deadline and a run takes long, smaller sizes of open dimensions are tried, since most of the
    optimisation consists of runs. Raises OutOfTime if no inputs are found in time.
    """
    clock, options = context.clock, context.options
    long = math.inf if math.isinf(deadline.until()) else _LONG * (clock.limit - clock.begin)
    with _original(context) as model:
        model.check_types()

        def run(feeds: Mapping[str, Any]) -> None:
            begin = time.monotonic()
            with deadline.within(begin + long):
                model.run(feeds)
            clock.latency = time.monotonic() - begin

        try:
            inputs = feeds_for_measurement(context.imported, options.seed, run)
        except OutOfTime:
            if deadline.over():
                raise
            long = math.inf
            inputs = feeds_for_measurement(context.imported, options.seed, run)
        if clock.latency < _SLOW:
            clock.latency = _warm_latency(lambda: model.run(inputs))
        return inputs


@contextmanager
def _original(context: Context) -> Iterator[OrtModel]:
    """The original in a session. The clock notes how long loading takes."""
    since = time.monotonic()
    with open_model(
        context.original.runnable, threads=context.threads, session_options=context.options.session_options
    ) as model:
        context.clock.loading = time.monotonic() - since
        yield model


def _time_original(context: Context, feeds: dict[str, Any]) -> None:
    """Let the clock note roughly how long loading, and a run on the user's inputs, take.

    The first run is slower and does not count. Raises OutOfTime.
    """
    clock = context.clock
    with _original(context) as model:
        begin = time.monotonic()
        model.run(feeds)
        clock.latency = time.monotonic() - begin
        if clock.latency < _SLOW:
            clock.latency = _warm_latency(lambda: model.run(feeds))


def _warm_latency(run: Callable[[], object]) -> float:
    """Rough seconds of a run after the first: the minimum of three runs, or one run if the model is slow."""
    seconds = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        run()
        seconds = min(seconds, time.perf_counter() - begin)
        if seconds > 0.1:
            break
    return seconds


def _bound(context: Context, feeds: Mapping[str, Any]) -> ImportedModel:
    """The model with the sizes of the inputs for measurements in place of open dimensions."""
    imported = context.imported
    shapes: dict[str, Sequence[int]] = {}  # none has a range any more
    for value, info in zip(imported.graph.inputs, imported.frame.graph.input):
        declared = imported.graph.type(value).shape
        shape = getattr(feeds.get(info.name), "shape", ())
        fixed = (isinstance(d, int) or d in imported.bindings for d in declared or ())
        if not all(fixed) and min(shape, default=0) > 0:
            shapes[info.name] = shape
    if not shapes or imported.fixed:
        return imported
    again = load(context.original.source, shapes={**context.shapes, **shapes})
    return replace(preferring(again, imported.opset), nonempty=imported.nonempty, ranges=imported.ranges)


def _ends(imported: ImportedModel) -> list[dict[str, int]]:
    """The sizes of all dimensions with the least, and with the greatest, sizes of the user's ranges."""
    dimensions = InputPlan.of(imported).dimensions
    stated = {s.name: imported.bindings[s.name] for s in dimensions.slots if s.name in imported.bindings}
    ends = dimensions.ends({name: size for name, size in stated.items() if name not in imported.ranges})
    return [solve(imported.graph, end) for end in ends]


def _over_sizes(context: Context, models: Sequence[AdditiveCost]) -> AdditiveCost:
    return OverSizes(models, context.imported.graph) if len(models) > 1 else models[0]


def cost_model(context: Context, cost: str | CostModel) -> CostModel:
    """The cost model with the name `cost`, with this machine's figures; or `cost` itself if it is the user's own
    object. Raises OptionError.
    """
    options, bindings = context.options, context.imported.bindings
    if not isinstance(cost, str):
        if isinstance(cost, AdditiveCost):
            _check_prices(cost, context.imported.graph)
        return cost
    machine = calibrated(context.threads)
    if cost == "roofline":
        return _over_sizes(context, [Roofline(machine, b) for b in (bindings, *_ends(context.imported))])
    if cost in ("profiled", "learned"):
        budget = context.clock.budget
        until = (budget.train_until if options.train_steps else None) or budget.search_until
        seconds_left = until - time.monotonic()
        ends = _ends(context.imported) if cost == "profiled" else []
        seconds_each = _PROFILING * seconds_left / (1 + len(ends))
        prices = [
            Profiled(machine, database=context.database, bindings=b, time_budget=seconds_each)
            for b in (bindings, *ends)
        ]
        return _learned(context, prices[0]) if cost == "learned" else _over_sizes(context, prices)
    assert context.feeds is not None
    return Measured(
        lambda graph: to_proto(context.imported, graph).SerializeToString(),
        dict(context.feeds),
        threads=context.threads,
        session_options=options.session_options,
    )


def _check_prices(model: AdditiveCost, graph: Graph) -> None:
    """Raise OptionError if the user's own cost model gives a node of the original no valid number of seconds."""
    prices = model.breakdown(graph)
    for node in graph.nodes():
        if not 0.0 <= prices[node.id] < math.inf:
            raise OptionError(
                f"cost {model.name!r} gives {node.op} {prices[node.id]} seconds: give 0 or more"
            )


def _learned(context: Context, prices: Profiled) -> Learned:
    """The network of the package, fitted to the comparisons of models that were measured on this machine."""
    with history.opened(context) as comparisons:
        now = time.monotonic()
        until = now + _FITTING * (context.clock.budget.search_until - now)
        return fitted(prices, comparisons, until=until)


def fitted(prices: AdditiveCost, store: History, *, also: int = 0, until: float = math.inf) -> Learned:
    """The network of the package, fitted until `until` (time.monotonic) to the latest comparisons in the history: to
    _REMEMBERED of these, and `also` more.
    """
    comparisons = store.latest(_REMEMBERED + also)
    return Learned(prices, fine_tuned(load_network(PRETRAINED), comparisons, until))


def start(context: Context, model: CostModel) -> Start:
    """The first node of the search: rules that need no cost model are applied, and control-flow bodies are optimised.

    With a trace, its substitutions of this phase are repeated instead. Raises TraceError if they do not fit.
    """
    options, library = context.options, context.library
    if options.replay is not None:
        return _started_again(context, model, read_trace(options.replay))
    before: list[Early] = []
    now = time.monotonic()
    until = now + _LOOKING * (context.clock.limit - now)

    def tidy(graph: Graph, body: str = "") -> Graph:
        # Operators that TVM lacks must be decomposed in any case.
        simple, path = simplify(graph, library, model.cost, math.inf if options.compiling else until)
        before.append(Early(body, graph, path, None))
        return simple

    def improve(graph: Graph, label: str) -> Graph:
        state = RewriteState.start(graph, library, model.delta, until)
        limits = Limits(budget=options.budget, deadline=context.clock.budget.search_until)
        cost = model.cost(graph)
        result = greedy(state, cost, limits)
        if result.interrupted:
            raise KeyboardInterrupt
        best = result.best
        before.append(Early(label, graph, best.path, cost))
        return best.state.graph if best.path is not None else graph

    graph = without_placement(context.imported.graph)
    if options.search != "random" and options.cost_name != "measured":
        graph = with_bodies(tidy(graph), improve, tidy)
    elif options.compiling:
        graph = tidy(graph)
    state = RewriteState.start(graph, library, model.delta, until)
    if time.monotonic() >= until:
        context.notes.append("not all substitutions were looked for: there was no time (--time-limit)")
    return Start(SearchNode(state, None, model.cost(graph)), model, tuple(before))


def _started_again(context: Context, model: CostModel, trace: Trace) -> Start:
    """The first node of a replay: the substitutions in control-flow bodies come from the trace, not from a search with
    `model`.
    """
    library, done = context.library, 0
    counts = iter(trace.before)
    before: list[Early] = []

    def follow(graph: Graph, body: str = "") -> Graph:
        nonlocal done
        steps = trace.steps[done : done + next(counts, 0)]
        rules = makers(library, steps)
        priced = rules is library and context.options.cost_name != "measured"
        start = cost = model.cost(graph) if priced else None
        state = RewriteState.start(graph, rules, model.delta if priced else None)
        path: Path | None = None
        for step, (at, match, after) in zip(steps, retrace(state, steps, done + 1)):
            state = after
            edit, delta = at.priced(match)
            if cost is not None:
                cost += delta
            path = append(path, step if cost is None else replace(step, cost=cost), edit)
        before.append(Early(body, graph, path, start))
        done += len(steps)
        return state.graph

    graph = without_placement(context.imported.graph)
    if trace.before:
        graph = follow(graph)
    if len(trace.before) > 1:
        graph = with_bodies(graph, follow, follow)
    if next(counts, None) is not None:
        raise TraceError("the trace has substitutions in control-flow bodies that this graph lacks")
    if context.options.compiling:  # a trace of another backend may leave operators that TVM lacks
        simple, path = simplify(graph, library, model.cost)
        before.append(Early("", graph, path, None))
        graph = simple
    base = SearchNode(RewriteState.start(graph, library, model.delta), None, model.cost(graph))
    return Start(base, model, tuple(before), trace.searched)


def restarted(context: Context, start: Start, without: Collection[str]) -> Start:
    """The start without these rules: without their substitutions, and without later substitutions that cannot be
    applied any more.
    """
    library, model = context.library, start.model
    library = library.only(library.rules.keys() - set(without))
    before: list[Early] = []

    def follow(graph: Graph, body: str = "") -> Graph:
        # Bodies may share a name. A step of another body does not apply to this body, as its key has other values.
        parts = [part for part in start.before if part.body == body]
        steps = [step for part in parts for step in part.steps if step.rule not in without]
        state = RewriteState.start(graph, makers(library, steps))
        path: Path | None = None
        for step in steps:
            match = state.find(step.key)
            if match is not None:
                edit = state.edit(match)
                state = state.apply(match, edit)
                path = append(path, step, edit)
        cost = next((part.cost for part in parts if part.graph.fingerprint == graph.fingerprint), None)
        before.append(Early(body, graph, path, cost))
        return state.graph

    graph = without_placement(context.imported.graph)
    if start.before:
        graph = follow(graph)
    if len(start.before) > 1:
        graph = with_bodies(graph, follow, follow)
    base = SearchNode(RewriteState.start(graph, library, model.delta), None, model.cost(graph))
    return Start(base, model, tuple(before))


def makers(library: Library, steps: Sequence[TraceStep]) -> Library:
    """The rules that may have made these substitutions: only the rules that need no cost model (`simplify`) if these
    suffice.
    """
    few = library.canonicalising()
    return few if all(step.rule in few.rules for step in steps) else library
