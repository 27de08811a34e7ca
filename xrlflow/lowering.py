"""Compiles the results of a search with TVM: which graph is compiled, and how fast it runs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xrlflow.backends import BackendError, RepeatedComparison
from xrlflow.backends.children import Child
from xrlflow.backends.limits import default_threads
from xrlflow.backends.onnxruntime import measure
from xrlflow.backends.protocol import USE_ONNXRUNTIME, CompiledModel
from xrlflow.backends.results import Comparison
from xrlflow.backends.tvm import Machine, Tvm, TvmModel, detect
from xrlflow.backends.tvm.devices.device import Device
from xrlflow.backends.tvm.devices.remote import PATIENCE, Remote
from xrlflow.backends.tvm.fusion.layers import chosen_in
from xrlflow.backends.tvm.kernels.algorithms import DEFAULT, Algorithm, Algorithms, Chosen, Timings
from xrlflow.backends.tvm.kernels.ways import Way
from xrlflow.backends.tvm.library.hybrid import Hybrid, Told, hybrid
from xrlflow.backends.tvm.library.operator_times import Operator, Times, operator_times
from xrlflow.backends.tvm.lowering.compiled import Interface
from xrlflow.backends.tvm.lowering.lower import check_sizes, fuse, import_model
from xrlflow.backends.tvm.toolchain.target import compiler, lacking, linker
from xrlflow.cost.machine import cpu_name
from xrlflow.ir import Graph
from xrlflow.onnxio import ImportedModel
from xrlflow.rewrite import Library, RewriteState
from xrlflow.search.bodies import simplify
from xrlflow.search.result import SearchNode
from xrlflow.storage.stores import Where
from xrlflow.tuning.blocks import Block
from xrlflow.tuning.layer_times import LayerResult, Seen, StoredTimes, block_results, results, together
from xrlflow.tuning.layer_tuning import LayerMeasurer, LayerTasks
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.one_shot.predictor import Predictor, shipped
from xrlflow.tuning.one_shot.times import PredictedTimes, version_of
from xrlflow.tuning.pool import PoolOptions
from xrlflow.tuning.session import Progress, Stop, TuningResult, tune
from xrlflow.tuning.store import Store
from xrlflow.tuning.tuners.protocol import Method
from xrlflow.tuning.worker import Timing
from xrlflow.workers import Place


@dataclass(frozen=True, slots=True)
class ExecutionTarget:
    """The processor, and the remote device (None: this machine), that a compiled model runs on.

    Kernels have as many threads as the processor has cores.
    """

    machine: Machine
    remote: Remote | None = None

    @property
    def device(self) -> str | None:
        """The device's name in stored measurements; None: this machine."""
        return str(self.remote) if self.remote is not None else None

    def check_runs(self) -> None:
        """Raise BackendError if the code cannot run here because it is for another processor."""
        missing = () if self.remote is not None else lacking(self.machine.triple, self.machine.cpu)
        if missing:
            raise BackendError(
                f"code for {self.machine.cpu} cannot run here: this machine has no {', '.join(missing)}; name a remote "
                "device (--remote), or only compile (optimize --no-measure --no-verify)"
            )


def find_target(
    cpu: str | None, triple: str | None, remote: Remote | None, threads: int | None
) -> ExecutionTarget:
    """The target that the options ask for. A remote device is asked for its processor, which is the default.

    Raises BackendError for a processor that LLVM does not know, or that the device cannot run, and DeviceError (a
    BackendError) if the device does not answer.
    """
    if remote is None:
        return _linkable(ExecutionTarget(detect(cpu, threads, triple)))
    with Device(remote, threads) as device:
        about = device.about
    if cpu is None and about.system is None:
        raise BackendError(
            f"remote device {remote} does not tell its processor: give LLVM's name of it (--cpu)"
        )
    if about.system is not None:
        triple, cpu = triple or about.system[0], cpu or about.system[1]
    machine = detect(cpu, about.threads, triple)
    missing = lacking(machine.triple, machine.cpu, about.system) if about.system is not None else ()
    if missing:
        raise BackendError(f"remote device {remote} has no {', '.join(missing)}, which code for {cpu} uses")
    return _linkable(ExecutionTarget(machine, remote))


def _linkable(target: ExecutionTarget) -> ExecutionTarget:
    triple = target.machine.triple
    if linker(triple) is None:
        raise BackendError(f"what is compiled for {triple} is linked with {compiler(triple)}: install that")
    return target


@contextlib.contextmanager
def running(target: ExecutionTarget, path: str, model: TvmModel) -> Iterator[CompiledModel]:
    """A compiled model, saved at `path`, ready to run on its target. Raises DeviceError (a BackendError)."""
    if target.remote is None:
        yield model
        return
    with Device(target.remote, target.machine.cores, patience=PATIENCE) as device:
        yield device.load(path, model.interface)


Export = Callable[[Graph], str]
"""Writes a graph as an ONNX file and returns the path."""
COLD_PRIVATE_CACHES = Timing(samples=10, flush=True)
"""How the kernels of a model are timed: other kernels have just replaced their weights in the cores' own caches."""
# The most proposals that are compiled besides the original graph.
_AT_MOST = 3
# Seconds for the comparison of tuned models.
_COMPARING, _COMPARING_HURRIED = 20.0, 5.0


@dataclass(frozen=True, slots=True)
class Lowered:
    """A compiled graph: the path of the shared library, and its milliseconds if it was measured.

    `compared`: measured against the compiled original, on a remote device.
    """

    found: SearchNode
    path: str
    model: TvmModel
    milliseconds: float | None = None
    compared: RepeatedComparison | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of `lower_best`, with remarks for the user. `interrupted`: by Ctrl-C, before it could compare."""

    lowered: Lowered
    remarks: tuple[str, ...]
    interrupted: bool = False


def load_tvm() -> None:
    """What a process does first that will compile."""
    detect()


@functools.cache
def runs(op: str) -> bool:
    """Whether TVM has an operator, by its name in the IR (`domain::name` for other domains)."""
    domain, _, name = op.rpartition("::")
    return Tvm().supports(name, domain)


def missing_for_kernels() -> str | None:
    """What this machine needs to make kernels of our own; None if it has everything."""
    if importlib.util.find_spec("tvm") is None:
        return "they need TVM (pip install 'xrlflow[tvm]')"
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        return "they need a C compiler (cc)"
    return None


def check_supported(imported: ImportedModel, library: Library) -> None:
    """Raise BackendError for inputs without fixed sizes, and for operators that TVM cannot lower and no rule writes
    out.

    The message names the operators and, if a rule refused, its reason: "LSTM (sequence_lens is given)".
    """
    check_sizes(value for value in imported.frame.graph.input if value.name not in imported.overridable)
    graph = imported.graph
    if all(runs(node.op) for node in graph.nodes()):
        return
    left, _ = simplify(graph, library, lambda _: 0.0)
    missing = sorted({node.op for node in left.nodes() if not runs(node.op)})
    if not missing:
        return
    expansions = library.canonicalising()
    RewriteState.start(left, expansions)
    named = []
    for op in missing:
        reasons = {
            reason
            for name, stats in expansions.stats.items()
            if op in getattr(expansions.rules[name], "anchors", ())
            for reason in stats.refused
        }
        named.append(f"{op} ({'; '.join(sorted(reasons))})" if reasons else op)
    raise BackendError(f"TVM cannot lower {', '.join(named)}", USE_ONNXRUNTIME)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A `Lowering` as another process makes it: without open files, and without what only measuring needs."""

    target: ExecutionTarget
    shapes: Mapping[str, Sequence[int]]
    folder: str
    store: Where
    algorithms: Algorithms
    predicts: bool

    @contextlib.contextmanager
    def made(self) -> Iterator[Lowering]:
        with Store(self.store) as store:
            predictor = shipped() if self.predicts else None
            yield Lowering(self.target, self.shapes, self.folder, store, None, self.algorithms, predictor)


def _hybrid_there(recipe: _Recipe, path: str, sizes: Sequence[Mapping[str, Sequence[int]]], to: str) -> Told:
    """`Lowering.hybrid` in a process of its own."""
    with recipe.made() as how:
        return Told.of(how.hybrid(path, sizes, to))


def _compiled_there(recipe: _Recipe, path: str, to: str) -> tuple[Interface, tuple[Chosen, ...]]:
    """`Lowering.compiled` in a process of its own."""
    with recipe.made() as how:
        model = how.backend().compile(path, threads=how.threads)
        model.save(to)
        return model.interface, model.chosen


def _operators_there(
    recipe: _Recipe, operators: Sequence[Operator], channels_last: bool
) -> Sequence[Times | None]:
    """`Lowering.operator_times` in a process of its own."""
    with recipe.made() as how:
        return how.operator_times(operators, channels_last)


@dataclass(frozen=True, slots=True)
class Lowering:
    """What is needed to compile the graphs of a model: input sizes, a folder for libraries, stored measurements of
    kernels, the options of ONNX Runtime, with which the results are compared, the algorithms that convolutions may use,
    and the predictor that chooses kernels where nothing is measured (None: estimates choose).

    `child`: the process in which TVM compiles; None: this one, where nothing can end it. The child is ended when the
    time is over (`deadline`), and what was asked for raises OutOfTime (a BackendError).
    """

    target: ExecutionTarget
    shapes: Mapping[str, Sequence[int]]
    folder: str
    store: Store
    session_options: Any = None
    algorithms: Algorithms = DEFAULT
    predictor: Predictor | None = None
    child: Child | None = None

    @property
    def threads(self) -> int:
        return self.target.machine.cores

    @property
    def _recipe(self) -> _Recipe:
        plain = replace(self.algorithms, timings=None)
        return _Recipe(
            self.target, self.shapes, self.folder, self.store.where, plain, self.predictor is not None
        )

    def backend(self, tuned: bool = True) -> Tvm:
        """The TVM backend. `tuned`: use the times of kernels that the store has."""
        timings = self._predicted(self.layer_times) if tuned else self.untuned_times
        return Tvm(self.target.machine, self.shapes or None, replace(self.algorithms, timings=timings))

    @property
    def tuned_algorithms(self) -> Algorithms:
        """The algorithms, with the times that the store has of them, or a predictor."""
        return replace(self.algorithms, timings=self._predicted(self.layer_times))

    @property
    def untuned_times(self) -> Timings | None:
        """Those of untuned compilations: predictions; None: estimates."""
        return self._predicted(None)

    def _predicted(self, measured: Timings | None) -> Timings | None:
        if self.predictor is None:
            return measured
        return PredictedTimes(self.predictor, self.target.machine, measured)

    @property
    def layer_times(self) -> StoredTimes:
        """What the store knows of convolutions and blocks of them."""
        return StoredTimes.on(self.store, self.target.machine, self.threads, self.target.device)

    def hybrid(self, path: str, sizes: Sequence[Mapping[str, Sequence[int]]], to: str) -> Hybrid:
        """The model of a file, with kernels of our own, saved at `to`. Raises BackendError (see `hybrid`)."""
        if self.child is not None:
            told = self.child.call(_hybrid_there, self._recipe, path, sizes, to)
            return told.loaded(to)
        import onnx

        made = hybrid(onnx.load(path), sizes, self.target.machine, self.tuned_algorithms)
        made.save(to)
        return made

    def compiled(self, path: str, to: str) -> TvmModel:
        """The model of a file, compiled and saved at `to`. Raises BackendError (see `Tvm.compile`)."""
        if self.child is not None:
            made = self.child.call(_compiled_there, self._recipe, path, to)
            return TvmModel.settled(to, made[0], self.threads, made[1])
        model = self.backend().compile(path, threads=self.threads)
        model.settle(to)
        return model

    def operator_times(self, operators: Sequence[Operator], channels_last: bool) -> Sequence[Times | None]:
        """How long kernels of single operators take on this machine. Raises BackendError (see `operator_times`)."""
        if self.child is not None:
            return self.child.call(_operators_there, self._recipe, operators, channels_last)
        return operator_times(
            operators, self.target.machine, self.threads,
            channels_last=channels_last, algorithms=self.tuned_algorithms,
        )  # fmt: skip

    @property
    def kernels_version(self) -> str:
        """Changes with the algorithms, and when kernels may have been tuned further."""
        exact = " exact" if self.algorithms.exact else ""
        exact += f" predicted {version_of(self.predictor)}" if self.predictor is not None else ""
        state = self.store.state(self.target.device or cpu_name())
        return f"tuned {self.store.path} {state}{exact}" if state is not None else f"untuned{exact}"


def lower_best(
    how: Lowering,
    original: str | bytes,
    base: SearchNode,
    proposals: Sequence[SearchNode],
    export: Export,
    feeds: Mapping[str, Any] | None,
    time_left: Callable[[], float],
    hurried: bool = False,
) -> Choice:
    """Compile the imported graph and the best proposals, and choose what runs fastest.

    Kernels that the store knows are compiled as they were tuned. With `feeds`, all models are measured in turns,
    together with the original in ONNX Runtime; without, only the best by modelled cost is compiled. A remote device has
    no ONNX Runtime, so there the compiled original is the baseline. Compiling stops when another model would not fit
    into the time left. `hurried`: only the best proposal is compiled, and measuring takes less time. On Ctrl-C the
    model compiled first is kept. Raises BackendError if the original graph cannot be compiled, and KeyboardInterrupt if
    there is nothing to keep.
    """
    # The best proposal is among the proposals already.
    different = {found.state.graph.fingerprint: found for found in proposals if found.cost < base.cost}
    cheaper = list(different.values())[: 1 if hurried else _AT_MOST]
    compiling = _Compiling(how, base, export, time_left, feeds is None)
    made = compiling.made
    try:
        # Without measuring, take the best by modelled cost that can be compiled.
        compiling.compile_all([base, *cheaper] if feeds is not None else [*cheaper, base])
        if feeds is None:
            return Choice(made[0], tuple(compiling.remarks))
        limit = max(2.0, min(5.0 if hurried else 15.0, 0.3 * time_left()))
        if how.target.remote is not None:
            best, said = _best_there(how.target, made, feeds, limit)
        else:
            best, said = _best_here(how, original, made, feeds, limit)
    except KeyboardInterrupt:
        if not made:
            raise
        compiling.remarks.append(
            "interrupted before the compiled graphs were compared: the first of them is kept"
        )
        return Choice(made[0], tuple(compiling.remarks), interrupted=True)
    return Choice(best, (*compiling.remarks, *said))


@dataclass(slots=True)
class _Compiling:
    """Compiles graphs one after the other: `made`, with remarks on failures. `alone`: stop after the first success."""

    how: Lowering
    base: SearchNode
    export: Export
    time_left: Callable[[], float]
    alone: bool
    made: list[Lowered] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def compile_all(self, wanted: Sequence[SearchNode]) -> None:
        """Compile these graphs. Raises BackendError if the original graph cannot be compiled."""
        longest = 0.0
        for index, found in enumerate(wanted):
            before = self.time_left()
            if self.made and (self.alone or before < 3 * longest):
                return
            path = os.path.join(self.how.folder, f"compiled{index}.so")
            try:
                model = self.how.compiled(self.export(found.state.graph), path)
            except BackendError as error:
                if found is self.base and not self.made:
                    raise
                self.remarks.append(f"a proposal was dropped: {error}")
                continue
            self.made.append(Lowered(found, path, model))
            longest = max(longest, before - self.time_left())


def _best_here(
    how: Lowering, original: str | bytes, made: Sequence[Lowered], feeds: Mapping[str, Any], limit: float
) -> tuple[Lowered, tuple[str, ...]]:
    """The fastest model on this machine, measured in turns with the original in ONNX Runtime: (choice, remarks)."""
    measured = measure(
        [original, *(lowered.path for lowered in made)], dict(feeds), threads=how.threads, time_limit=limit,
        target_width=0.02, control=False, session_options=how.session_options,
    )  # fmt: skip
    timed = [
        replace(lowered, milliseconds=latency.median_ms)
        for lowered, latency in zip(made, measured.latencies[1:])
    ]
    remarks = [
        f"ONNX Runtime runs the original in {measured.latencies[0].median_ms:.2f} ms",
        f"TVM runs the original graph in {timed[0].milliseconds:.2f} ms",
    ]
    if len(timed) > 1:
        others = ", ".join(f"{lowered.milliseconds:.2f}" for lowered in timed[1:])
        remarks.append(f"and what the search found in {others} ms")
    return min(timed, key=lambda lowered: lowered.milliseconds or 0.0), tuple(remarks)


def _best_there(
    target: ExecutionTarget, made: Sequence[Lowered], feeds: Mapping[str, Any], limit: float
) -> tuple[Lowered, tuple[str, ...]]:
    """The fastest model on the remote device, with a comparison to the first one: (choice, remarks).

    The best of several measurements looks better than it is, so the comparison is measured in another session. A model
    that is not clearly faster there is not chosen.
    """
    if len(made) == 1:
        return made[0], (f"nothing measured on remote device {target.remote}: no other graph was compiled",)
    files = [(lowered.path, lowered.model) for lowered in made]
    measured = compare_there(target, files, feeds, 0.5 * limit)
    times = [latency.median_ms for latency in measured.latencies]
    fastest = min(range(len(made)), key=times.__getitem__)
    others = ", ".join(f"{milliseconds:.2f}" for milliseconds in times[1:])
    remarks = (
        f"measured on remote device {target.remote}, in one session, without ONNX Runtime",
        f"TVM runs the original graph there in {times[0]:.2f} ms, and what the search found in {others} ms",
    )
    first = replace(made[0], milliseconds=times[0])
    if fastest == 0:
        return first, remarks
    # A slow model needs all of the time for an interval; other models end when theirs is narrow.
    again = compare_there(target, [files[0], files[fastest]], feeds, limit)
    said = f"measured again in another session, the fastest of them is {{}}clearly faster: {again.speedup}"
    if not again.speedup.faster:
        return first, (*remarks, said.format("not "))
    chosen = replace(made[fastest], milliseconds=again.latencies[1].median_ms, compared=repeated(again))
    return chosen, (*remarks, said.format(""))


def compare_there(
    target: ExecutionTarget, models: Sequence[tuple[str, TvmModel]], feeds: Mapping[str, Any], limit: float
) -> Comparison:
    """Time models, saved at these paths, in turns on the remote device for `limit` seconds. Raises DeviceError."""
    assert target.remote is not None
    with Device(target.remote, target.machine.cores, patience=PATIENCE) as device:
        loaded = [device.load(path, model.interface) for path, model in models]
        return device.compare(loaded, dict(feeds), time_limit=limit)


def repeated(measured: Comparison) -> RepeatedComparison:
    """A comparison of two models in one session, in the form of a report."""
    assert measured.control is not None
    before, after = measured.latencies
    return RepeatedComparison(
        measured.speedup, measured.control, before, after, measured.seconds, measured.threads,
        pairs=measured.samples, disturbed=measured.load.disturbed, fresh_processes=False,
    )  # fmt: skip


# The models that `tune` compares, in this order.
_WRITTEN = (
    "the original graph, untuned",
    "the original graph with what tuning found",
    "the rewritten graph with what tuning found",
)


@dataclass(frozen=True, slots=True)
class TunedModel:
    """A model with tuned kernels: the results of tuning, and the fastest compiled model.

    The candidates are the original graph untuned and tuned, and the graph of the search, tuned. `written`: which of
    them it is. `layers`: what tuning found for the convolutions of its graph. `compared`: the best tuned one against
    the untuned one, on a remote device.
    """

    tuning: TuningResult
    model: TvmModel
    path: str
    written: str
    onnxruntime_ms: float | None = None
    untuned_ms: float | None = None
    tuned_ms: float | None = None
    rewritten_ms: float | None = None
    compared: RepeatedComparison | None = None
    remarks: tuple[str, ...] = ()
    layers: tuple[LayerResult, ...] = ()


@dataclass(frozen=True, slots=True)
class TuningPlan:
    """How kernels are tuned: `trials` in all, `batch` at a time for one kernel, within `time_limit` seconds. `place`:
    of the workers; None: this machine."""

    method: Method
    trials: int
    batch: int
    time_limit: float
    seed: int
    place: Place | None = None

    def pool(self, threads: int, remote: Remote | None) -> PoolOptions:
        """How kernels are built and run."""
        builders = default_threads() if self.place is None else self.place.cores
        return PoolOptions(builders, threads, COLD_PRIVATE_CACHES, remote=remote, place=self.place)


def tune_model(
    how: Lowering,
    original: str | bytes,
    graphs: Sequence[str],
    feeds: Mapping[str, Any] | None,
    plan: TuningPlan,
    listener: Callable[[Progress], None] | None = None,
    hurried: bool = False,
) -> TunedModel:
    """Tune the layers of one or two ONNX files within one budget, and compile them.

    `graphs`: the original's graph, and that of a search. With `feeds`, the original in ONNX Runtime (not on a
    remote device), the untuned and the tuned models are compared, in less time if the tuning was interrupted or
    `hurried`. Without `feeds` the result is the original's graph, tuned.

    Raises BackendError if the original graph cannot be lowered or run, and PoolError if nothing can be measured.
    """
    how.target.check_runs()
    predicted = plan.method is Method.ONE_SHOT
    if predicted:  # what is compared with is not predicted
        how = replace(how, predictor=None)
    # First of all, because a graph that cannot be compiled is not worth tuning.
    untuned = how.backend(tuned=False).compile(graphs[0], threads=how.threads)
    fused, remarks = _fused(how, graphs)
    layers: list[tuple[LayerResult, ...]]
    if predicted:
        found, layers = TuningResult((), Stop.TRIALS, 0.0, 0.0, 0.0), [() for _ in fused]
        how = replace(how, predictor=shipped())
        remarks.append(
            "a predictor chose the kernels of convolutions and products whose times are not stored: none was measured"
        )
    else:
        found, layers = _tuned(how, fused, plan, listener)
    models = [untuned, *_compiled(how, [graph.path for graph in fused], remarks)]
    made = [(os.path.join(how.folder, f"tuned{number}.so"), model) for number, model in enumerate(models)]
    for path, model in made:
        model.settle(path)
    if feeds is None:
        return TunedModel(
            found, made[1][1], made[1][0], _WRITTEN[1], remarks=tuple(remarks), layers=layers[0]
        )
    limit = _COMPARING_HURRIED if hurried or found.interrupted else _COMPARING
    runtime: float | None = None
    compared: RepeatedComparison | None = None
    if how.target.remote is not None:
        times, best, compared = _fastest_there(how.target, made, feeds, limit)
    else:
        runtime, times, best = _fastest_here(how, original, made, feeds, limit)
    path, model = made[best]
    untuned_ms, tuned_ms, *rewritten = times
    return TunedModel(
        found, model, path, _WRITTEN[best], runtime, untuned_ms, tuned_ms, rewritten[0] if rewritten else None,
        compared, tuple(remarks), layers[max(0, best - 1)],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Fused:
    """A file as a fused module, with its layers, the algorithms that they have, and blocks of convolutions."""

    path: str
    module: Any
    layers: tuple[Layer, ...]
    chosen: tuple[Chosen, ...]
    blocks: tuple[Block, ...]

    @property
    def choices(self) -> list[tuple[Layer, Chosen]]:
        """Each layer with the algorithm that it has."""
        return list(zip(self.layers, self.chosen, strict=True))


def _tuned(
    how: Lowering, graphs: Sequence[_Fused], plan: TuningPlan, listener: Callable[[Progress], None] | None
) -> tuple[TuningResult, list[tuple[LayerResult, ...]]]:
    """Tune the layers and blocks of graphs: the result, and what became of those of each graph."""
    choices = [choice for graph in graphs for choice in graph.choices]
    untuned = _Untuned(how.target.machine, choices, how.untuned_times)
    end, again = time.monotonic() + plan.time_limit, list(graphs)
    found: TuningResult | None = None
    with contextlib.ExitStack() as at_end:
        tasks = LayerTasks(_together(again, ()), how.target.machine, untuned.way, how.predictor)
        measurer = LayerMeasurer(tasks, plan.pool(how.threads, how.target.remote), at_end)
        tried: set[str] = set()
        # A block that is no longer one kernel leaves its convolutions to others, which may come apart in turn.
        while found is None or (tasks.layers and not found.interrupted):
            spent = 0 if found is None else sum(task.trials for task in found.tasks)
            result = tune(
                tasks.tasks, tasks.maker(plan.method), trials=max(0, plan.trials - spent), batch=plan.batch,
                time_limit=max(1e-3, end - time.monotonic()), seed=plan.seed, store=how.store, pool=measurer,
                listener=listener, kernels=tasks,
            )  # fmt: skip
            found = result if found is None else found.joined(result)
            tried.update(layer.key for layer in tasks.layers)
            again = [_fuse(how, graph.path, how.tuned_algorithms.timings) for graph in graphs]
            tasks = LayerTasks(_together(again, tried), how.target.machine, untuned.way, how.predictor)
            measurer.layers = tasks
    layers = [
        (
            *results(graph.choices, tuned.choices, how.layer_times, untuned.of),
            *block_results(tuned.blocks, how.layer_times),
        )
        for graph, tuned in zip(graphs, again)
    ]
    return found, layers


def _together(graphs: Iterable[_Fused], tried: Collection[str]) -> list[Layer | Block]:
    """The layers and blocks of graphs, each once, that were not tried before."""
    graphs = list(graphs)
    found: list[Layer | Block] = [
        *together(layer for graph in graphs for layer in graph.layers),
        *together(block for graph in graphs for block in graph.blocks),
    ]
    return [layer for layer in found if layer.key not in tried]


class _Untuned:
    """The ways of layers and blocks in untuned compilations. `choices`: the algorithms of the layers there; those that
    were part of a block have a plain one. `times`: by which blockings are chosen; None: by estimates."""

    def __init__(
        self, machine: Machine, choices: Iterable[tuple[Layer, Chosen]], times: Timings | None = None
    ) -> None:
        self._machine, self._times = machine, times
        self._chosen = {layer.key: Algorithm(chosen.algorithm) for layer, chosen in choices}

    def way(self, layer: Any) -> Any:
        if isinstance(layer, Block):
            return layer.usual(self._machine)
        return self.of(layer, self._chosen.get(layer.key, layer.needed(self._machine)[0]))

    def of(self, layer: Layer, algorithm: Algorithm) -> Way:
        """The way of an algorithm for a layer."""
        known = None if self._times is None else self._times.of(layer.form, layer.far).get(algorithm)
        return layer.usual(algorithm, self._machine) if known is None else Way(algorithm, known.plan)


def _compiled(how: Lowering, graphs: Sequence[str], remarks: list[str]) -> Iterator[TvmModel]:
    """Compile files with the results of tuning. If one fails, there is a remark, except for the first."""
    backend = how.backend()
    for graph in graphs:
        try:
            yield backend.compile(graph, threads=how.threads)
        except BackendError as error:
            if graph == graphs[0]:
                raise
            remarks.append(_left_out(error))


def _fastest_here(
    how: Lowering,
    original: str | bytes,
    made: Sequence[tuple[str, TvmModel]],
    feeds: Mapping[str, Any],
    limit: float,
) -> tuple[float, list[float], int]:
    """Milliseconds of the original in ONNX Runtime and of the other models on this machine, and which is the fastest (a
    tuned one, if several are equal)."""
    measured = measure(
        [original, *(path for path, _ in made)], dict(feeds), threads=how.threads, time_limit=limit,
        target_width=0.02, control=False,
    )  # fmt: skip
    runtime, *times = (latency.median_ms for latency in measured.latencies)
    return runtime, times, min(range(len(made)), key=lambda i: (times[i], -i))


def _fastest_there(
    target: ExecutionTarget, made: Sequence[tuple[str, TvmModel]], feeds: Mapping[str, Any], limit: float
) -> tuple[list[float], int, RepeatedComparison]:
    """Milliseconds of all models on the remote device, which is the fastest, and the best tuned one against the untuned
    one. If there are several tuned ones, another session decides."""
    there = compare_there(target, made, feeds, limit if len(made) == 2 else 0.5 * limit)
    times = [latency.median_ms for latency in there.latencies]
    better = min(range(1, len(made)), key=times.__getitem__)
    if len(made) > 2:
        there = compare_there(target, [made[0], made[better]], feeds, limit)
        times[0], times[better] = (latency.median_ms for latency in there.latencies)
    return times, better if times[better] <= times[0] else 0, repeated(there)


def _fused(how: Lowering, graphs: Sequence[str]) -> tuple[list[_Fused], list[str]]:
    """ONNX files as fused modules, and remarks. Files that cannot be lowered are left out, except the first."""
    found: list[_Fused] = []
    remarks: list[str] = []
    for graph in graphs:
        try:
            found.append(_fuse(how, graph, how.untuned_times))
        except BackendError as error:
            if not found:
                raise
            remarks.append(_left_out(error))
    return found, remarks


def _fuse(how: Lowering, path: str, known: Timings | None = None) -> _Fused:
    """A file as a fused module, with estimates where there are no times. Raises BackendError if it cannot be
    lowered."""
    import onnx

    seen = Seen(known)
    module = import_model(onnx.load(path), how.shapes or None)
    module = fuse(module, how.target.machine, algorithms=replace(how.algorithms, timings=seen))
    return _Fused(path, module, tuple(seen.layers), chosen_in(module), tuple(seen.blocks))


def _left_out(error: BackendError) -> str:
    return f"the rewritten graph is left out: {error}"
