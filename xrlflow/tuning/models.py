"""Tunes the kernels of one model. The original graph and the graph that a search found share one budget of trials. The
faster of the two tuned graphs is used."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xrlflow.backends import BackendError, RepeatedComparison
from xrlflow.backends.limits import default_threads
from xrlflow.backends.onnxruntime import measure
from xrlflow.backends.tvm import Machine, TvmModel
from xrlflow.backends.tvm.devices.execution import ExecutionTarget, compare_there, repeated
from xrlflow.backends.tvm.devices.remote import Remote
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.fusion.layers import chosen_in
from xrlflow.backends.tvm.kernels.algorithms import AlgorithmChoice, Timings
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm, KernelChoice
from xrlflow.backends.tvm.lowering.importer import import_model
from xrlflow.tuning.blocks import Block
from xrlflow.tuning.layer_times import LayerLog, LayerResult, block_results, results, together
from xrlflow.tuning.layer_tuning import COLD_PRIVATE_CACHES, LayerMeasurer, LayerTasks
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.lowering import Lowering
from xrlflow.tuning.one_shot.predictor import shipped
from xrlflow.tuning.pool import PoolOptions
from xrlflow.tuning.session import Progress, Stop, TuningResult, tune
from xrlflow.tuning.tuners.protocol import Method
from xrlflow.workers import WorkerFactory

# Seconds for the comparison of tuned models, and the seconds if the tuning was interrupted or is in a hurry.
_COMPARING, _COMPARING_HURRIED = 20.0, 5.0


# Descriptions of the models that `tune_model` compares, in the order of the models.
_WRITTEN = (
    "the original graph, untuned",
    "the original graph with what tuning found",
    "the rewritten graph with what tuning found",
)


@dataclass(frozen=True, slots=True)
class TunedModel:
    """A model with tuned kernels: the results of tuning, and the fastest compiled model.

    There are up to three compiled models: the original graph, untuned and tuned, and the graph of the search, tuned.
    `written`: a description of the fastest model. `layers`: the results of tuning for the layers of the fastest model's
    graph. `compared`: on a remote device, the best tuned model against the untuned one.
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
    """How kernels are tuned: with `trials` measured candidates in all, `batch` at a time for one layer, within
    `time_limit` seconds.

    `factory`: creates the workers; None: this machine does the work.
    """

    method: Method
    trials: int
    batch: int
    time_limit: float
    seed: int
    factory: WorkerFactory | None = None

    def pool(self, threads: int, remote: Remote | None) -> PoolOptions:
        """The options of the pool that builds and runs kernels."""
        builders = default_threads() if self.factory is None else self.factory.cores
        return PoolOptions(builders, threads, COLD_PRIVATE_CACHES, remote=remote, factory=self.factory)


def tune_model(
    lowering: Lowering,
    original: str | bytes,
    graphs: Sequence[str],
    feeds: Mapping[str, Any] | None,
    plan: TuningPlan,
    listener: Callable[[Progress], None] | None = None,
    hurried: bool = False,
) -> TunedModel:
    """Tune the layers of one or two ONNX files within one budget, and compile them.

    `graphs`: the original's graph and, if there is one, the graph of a search. With `feeds`, the original in ONNX
    Runtime (not on a remote device), the untuned and the tuned models are compared, in less time if the tuning was
    interrupted or `hurried`. Without `feeds` the result is the original's graph, tuned.

    Raises BackendError if the original graph cannot be lowered or run, and PoolError if nothing can be measured.
    """
    lowering.target.check_runs()
    predicted = plan.method is Method.ONE_SHOT
    if predicted:  # the untuned model must not use predicted times
        lowering = replace(lowering, predictor=None)
    # The untuned compilation comes first, because a graph that cannot be compiled is not worth tuning.
    untuned = lowering.backend(tuned=False).compile(graphs[0], threads=lowering.threads)
    fused, remarks = _fused(lowering, graphs)
    layers: list[tuple[LayerResult, ...]]
    if predicted:
        tuning, layers = TuningResult((), Stop.TRIALS, 0.0, 0.0, 0.0), [() for _ in fused]
        lowering = replace(lowering, predictor=shipped())
        remarks.append(
            "a predictor chose the kernels of convolutions and products whose times are not stored: none was measured"
        )
    else:
        tuning, layers = _tuned(lowering, fused, plan, listener)
    models = [untuned, *_compiled(lowering, [graph.path for graph in fused], remarks)]
    saved = [
        (os.path.join(lowering.folder, f"tuned{number}.so"), model) for number, model in enumerate(models)
    ]
    for path, model in saved:
        model.settle(path)
    if feeds is None:
        return TunedModel(
            tuning, saved[1][1], saved[1][0], _WRITTEN[1], remarks=tuple(remarks), layers=layers[0]
        )
    limit = _COMPARING_HURRIED if hurried or tuning.interrupted else _COMPARING
    runtime, times, best, compared = _fastest(lowering, original, saved, feeds, limit, remarks)
    path, model = saved[best]
    untuned_ms, tuned_ms, *rewritten = times
    return TunedModel(
        tuning, model, path, _WRITTEN[best], runtime, untuned_ms, tuned_ms, rewritten[0] if rewritten else None,
        compared, tuple(remarks), layers[max(0, best - 1)],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Fused:
    """An ONNX file as a module after fusion, with its layers, the algorithms of the layers, and its inverted residuals
    (`blocks`)."""

    path: str
    module: Any
    layers: tuple[Layer, ...]
    chosen: tuple[AlgorithmChoice, ...]
    blocks: tuple[Block, ...]

    @property
    def choices(self) -> list[tuple[Layer, AlgorithmChoice]]:
        """Each layer with its algorithm."""
        return list(zip(self.layers, self.chosen, strict=True))


def _tuned(
    lowering: Lowering,
    graphs: Sequence[_Fused],
    plan: TuningPlan,
    listener: Callable[[Progress], None] | None,
) -> tuple[TuningResult, list[tuple[LayerResult, ...]]]:
    """Tune the layers and inverted residuals of graphs. Returns the result of the session, and for each graph the
    results of its layers and inverted residuals."""
    choices = [choice for graph in graphs for choice in graph.choices]
    untuned = _Untuned(lowering.target.machine, choices, lowering.untuned_times)
    end, again = time.monotonic() + plan.time_limit, list(graphs)
    total: TuningResult | None = None
    with contextlib.ExitStack() as at_end:
        tasks = LayerTasks(_together(again, ()), lowering.target.machine, untuned.choice, lowering.predictor)
        measurer = LayerMeasurer(tasks, plan.pool(lowering.threads, lowering.target.remote), at_end)
        tuned_keys: set[str] = set()
        # If an inverted residual is faster with separate kernels, its convolutions become layers, or parts of smaller
        # inverted residuals. So there may be new layers to tune in further rounds.
        while total is None or (tasks.layers and not total.interrupted):
            spent = 0 if total is None else sum(task.trials for task in total.tasks)
            result = tune(
                tasks.tasks, tasks.maker(plan.method), trials=max(0, plan.trials - spent), batch=plan.batch,
                time_limit=max(1e-3, end - time.monotonic()), seed=plan.seed, store=lowering.store, pool=measurer,
                listener=listener, kernels=tasks,
            )  # fmt: skip
            total = result if total is None else total.joined(result)
            tuned_keys.update(layer.key for layer in tasks.layers)
            again = [_fuse(lowering, graph.path, lowering.tuned_algorithms.timings) for graph in graphs]
            tasks = LayerTasks(
                _together(again, tuned_keys), lowering.target.machine, untuned.choice, lowering.predictor
            )
            measurer.layers = tasks
    layers = [
        (
            *results(graph.choices, tuned.choices, lowering.layer_times, untuned.of),
            *block_results(tuned.blocks, lowering.layer_times),
        )
        for graph, tuned in zip(graphs, again)
    ]
    return total, layers


def _together(graphs: Iterable[_Fused], tuned_keys: Collection[str]) -> list[Layer | Block]:
    """The layers and inverted residuals of all graphs, each once, but none whose key is in `tuned_keys`."""
    graphs = list(graphs)
    layers: list[Layer | Block] = [
        *together(layer for graph in graphs for layer in graph.layers),
        *together(block for graph in graphs for block in graph.blocks),
    ]
    return [layer for layer in layers if layer.key not in tuned_keys]


class _Untuned:
    """The kernels that untuned compilations use. `choices`: the algorithms of layers in these compilations; layers that
    were part of an inverted residual have a plain algorithm. `times`: the times by which blockings are chosen; None:
    they are chosen by estimated times."""

    def __init__(
        self, machine: Machine, choices: Iterable[tuple[Layer, AlgorithmChoice]], times: Timings | None = None
    ) -> None:
        self._machine, self._times = machine, times
        self._algorithms = {layer.key: Algorithm(chosen.algorithm) for layer, chosen in choices}

    def choice(self, layer: Any) -> Any:
        if isinstance(layer, Block):
            return layer.untuned_choice(self._machine)
        return self.of(layer, self._algorithms.get(layer.key, layer.needed(self._machine)[0]))

    def of(self, layer: Layer, algorithm: Algorithm) -> KernelChoice:
        """The kernel that an untuned compilation uses for a layer with this algorithm."""
        timed = None if self._times is None else self._times.of(layer.workload, layer.far).get(algorithm)
        return (
            layer.untuned_choice(algorithm, self._machine)
            if timed is None
            else KernelChoice(algorithm, timed.blocking)
        )


def _compiled(lowering: Lowering, graphs: Sequence[str], remarks: list[str]) -> Iterator[TvmModel]:
    """Compile files with the results of tuning. If the first file fails, its error is raised; if another file fails, a
    remark is added."""
    backend = lowering.backend()
    for graph in graphs:
        try:
            yield backend.compile(graph, threads=lowering.threads)
        except BackendError as error:
            if graph == graphs[0]:
                raise
            remarks.append(_left_out(error))


def _fastest(
    lowering: Lowering,
    original: str | bytes,
    models: Sequence[tuple[str, TvmModel]],
    feeds: Mapping[str, Any],
    limit: float,
    remarks: list[str],
) -> tuple[float | None, Sequence[float | None], int, RepeatedComparison | None]:
    """Compare the models by `_fastest_here` or `_fastest_there`. Returns milliseconds of the original in ONNX Runtime,
    and of each model; the index of the fastest; and on a remote device a comparison. If the models cannot be measured,
    a remark says why, all times are None, and the tuned original graph counts as the fastest."""
    try:
        if lowering.target.remote is not None:
            return None, *_fastest_there(lowering.target, models, feeds, limit)
        return *_fastest_here(lowering, original, models, feeds, limit), None
    except BackendError as error:
        remarks.append(f"the models could not be compared, the original's graph is kept: {error}")
        return None, (None, None), 1, None


def _fastest_here(
    lowering: Lowering,
    original: str | bytes,
    models: Sequence[tuple[str, TvmModel]],
    feeds: Mapping[str, Any],
    limit: float,
) -> tuple[float, list[float], int]:
    """Milliseconds of the original in ONNX Runtime and of the compiled models on this machine, and the index of the
    fastest model (of equally fast models, the last, so that a tuned model is preferred)."""
    measured = measure(
        [original, *(path for path, _ in models)], dict(feeds), threads=lowering.threads, time_limit=limit,
        target_width=0.02, control=False,
    )  # fmt: skip
    runtime, *times = (latency.median_ms for latency in measured.latencies)
    return runtime, times, min(range(len(models)), key=lambda i: (times[i], -i))


def _fastest_there(
    target: ExecutionTarget, models: Sequence[tuple[str, TvmModel]], feeds: Mapping[str, Any], limit: float
) -> tuple[list[float], int, RepeatedComparison]:
    """Milliseconds of all models on the remote device, the index of the fastest, and the best tuned model compared with
    the untuned one. If there are two tuned models, this comparison is a session of its own."""
    there = compare_there(target, models, feeds, limit if len(models) == 2 else 0.5 * limit)
    times = [latency.median_ms for latency in there.latencies]
    better = min(range(1, len(models)), key=times.__getitem__)
    if len(models) > 2:
        there = compare_there(target, [models[0], models[better]], feeds, limit)
        times[0], times[better] = (latency.median_ms for latency in there.latencies)
    return times, better if times[better] <= times[0] else 0, repeated(there)


def _fused(lowering: Lowering, graphs: Sequence[str]) -> tuple[list[_Fused], list[str]]:
    """ONNX files as fused modules, and remarks on files that cannot be lowered. These are left out; for the first file,
    the error is raised."""
    fused: list[_Fused] = []
    remarks: list[str] = []
    for graph in graphs:
        try:
            fused.append(_fuse(lowering, graph, lowering.untuned_times))
        except BackendError as error:
            if not fused:
                raise
            remarks.append(_left_out(error))
    return fused, remarks


def _fuse(lowering: Lowering, path: str, known: Timings | None = None) -> _Fused:
    """An ONNX file as a fused module. Kernels of layers without `known` times are chosen by estimated times. Raises
    BackendError if the file cannot be lowered."""
    import onnx

    log = LayerLog(known)
    module = import_model(onnx.load(path), lowering.shapes or None)
    module = fuse(module, lowering.target.machine, algorithms=replace(lowering.algorithms, timings=log))
    return _Fused(path, module, tuple(log.layers), chosen_in(module), tuple(log.blocks))


def _left_out(error: BackendError) -> str:
    return f"the rewritten graph is left out: {error}"
