"""Compiling what a search found with TVM: which graph, how fast, and whether it is still the same function."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import measure
from xrlflow.backends.tvm import Tvm, TvmModel, detect
from xrlflow.backends.tvm.lower import fuse, import_model
from xrlflow.ir import Graph
from xrlflow.rewrite import Library, RewriteState
from xrlflow.search.bodies import simplify
from xrlflow.search.result import Found
from xrlflow.tuning.kernels import blocked, kernel_tasks, tuned_by
from xrlflow.tuning.pool import PoolOptions
from xrlflow.tuning.session import Progress, TuningResult, tune
from xrlflow.tuning.store import Store
from xrlflow.tuning.tuners.protocol import Method
from xrlflow.tuning.worker import Timing

Export = Callable[[Graph], str]
"""A graph as an ONNX file: its path."""
COLD = Timing(flush=True)
"""How the kernels of a model are timed: other kernels have pushed their weights out of the caches."""
# Proposals beside the original graph that are compiled, if the time allows.
_AT_MOST = 3


@dataclass(frozen=True, slots=True)
class Lowered:
    """One graph compiled: the shared library's path, and its milliseconds if it was measured."""

    found: Found
    path: str
    model: TvmModel
    milliseconds: float | None = None


@functools.cache
def runs(op: str) -> bool:
    """Whether TVM has an operator, given as the IR names it (those of other domains as `domain::name`)."""
    domain, _, name = op.rpartition("::")
    return _backend(None, {}).supports(name, domain)


def check_supported(graph: Graph, library: Library) -> None:
    """Raise BackendError, naming them, for operators that TVM cannot lower and the library's rules do not spell out.

    A rule that refuses to says why: "LSTM (sequence_lens is given)".
    """
    if all(runs(node.op) for node in graph.nodes()):
        return
    left, _ = simplify(graph, library, lambda _: 0.0)
    missing = sorted({node.op for node in left.nodes() if not runs(node.op)})
    if not missing:
        return
    expansions = library.certain()
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
    raise BackendError(f"TVM cannot lower {', '.join(named)}: use --backend onnxruntime for this model")


def _backend(threads: int | None, shapes: Mapping[str, Sequence[int]], store: Store | None = None) -> Tvm:
    """With a store: kernels as they were tuned on this machine."""
    machine = detect(cores=threads)
    tuned = tuned_by(store, machine, machine.cores) if store is not None else None
    return Tvm(machine, shapes or None, tuned)


def lower_best(
    original: str | bytes,
    base: Found,
    proposals: Sequence[Found],
    export: Export,
    feeds: Mapping[str, Any] | None,
    *,
    threads: int,
    shapes: Mapping[str, Sequence[int]],
    folder: str,
    time_left: Callable[[], float],
    store: Store,
    session_options: Any = None,
) -> tuple[Lowered, tuple[str, ...]]:
    """Compile the graph as imported and the best proposals, and choose what runs fastest; (choice, remarks).

    Kernels that `store` knows run as they were tuned.

    With `feeds` all are measured in turns, together with the original in ONNX Runtime; without, the best by modelled
    cost is compiled alone. Compiling more ends when a further one would not fit into the time left. Raises BackendError
    if the original's graph cannot be compiled.
    """
    backend = _backend(threads, shapes, store)
    cheaper = [found for found in proposals if found.cost < base.cost][:_AT_MOST]
    # Without measuring, the best by modelled cost that can be compiled.
    wanted = [base, *cheaper] if feeds is not None else [*cheaper, base]
    made: list[Lowered] = []
    remarks: list[str] = []
    longest = 0.0
    for index, found in enumerate(wanted):
        before = time_left()
        if made and (feeds is None or before < 3 * longest):
            break
        try:
            model = backend.compile(export(found.state.graph), threads=threads)
        except BackendError as error:
            if found is base:
                raise
            remarks.append(f"a proposal was dropped: {error}")
            continue
        path = os.path.join(folder, f"compiled{index}.so")
        model.save(path)
        made.append(Lowered(found, path, model))
        longest = max(longest, before - time_left())
    if feeds is None:
        return made[0], tuple(remarks)
    measured = measure(
        [original, *(lowered.path for lowered in made)], dict(feeds), threads=threads,
        time_limit=max(2.0, min(15.0, 0.3 * time_left())), target_width=0.02, control=False,
        session_options=session_options,
    )  # fmt: skip
    timed = [
        Lowered(lowered.found, lowered.path, lowered.model, latency.median_ms)
        for lowered, latency in zip(made, measured.latencies[1:])
    ]
    best = min(timed, key=lambda lowered: lowered.milliseconds or 0.0)
    remarks.append(f"ONNX Runtime runs the original in {measured.latencies[0].median_ms:.2f} ms")
    remarks.append(f"TVM runs the original graph in {timed[0].milliseconds:.2f} ms")
    if len(timed) > 1:
        others = ", ".join(f"{lowered.milliseconds:.2f}" for lowered in timed[1:])
        remarks.append(f"and what the search found in {others} ms")
    return best, tuple(remarks)


@dataclass(frozen=True, slots=True)
class TunedModel:
    """A model with tuned kernels: what tuning found, and the compiled model (the faster of tuned and untuned)."""

    tuning: TuningResult
    model: TvmModel
    path: str
    onnxruntime_ms: float | None
    untuned_ms: float | None
    tuned_ms: float | None


def tune_model(
    original: str | bytes,
    exported: str,
    feeds: Mapping[str, Any] | None,
    *,
    method: Method,
    trials: int,
    batch: int,
    time_limit: float,
    threads: int,
    shapes: Mapping[str, Sequence[int]],
    seed: int,
    store: Store,
    folder: str,
    listener: Callable[[Progress], None] | None = None,
) -> TunedModel:
    """Tune the kernels of the ONNX file `exported`, compile it with what was found, and compare (with `feeds`) the
    original in ONNX Runtime, the untuned and the tuned model.

    Raises BackendError for what cannot be lowered, PoolError when nothing can be measured.
    """
    import onnx

    machine = detect(cores=threads)
    module = fuse(import_model(onnx.load(exported), shapes or None), machine)
    tasks = kernel_tasks(module, machine)
    found = tune(
        tasks, blocked(method, machine), trials=trials, batch=batch, time_limit=time_limit, seed=seed, store=store,
        pool=PoolOptions(threads=threads, timing=COLD), listener=listener,
    )  # fmt: skip
    made = []
    for name, backend in (
        ("untuned", _backend(threads, shapes)),
        ("tuned", _backend(threads, shapes, store)),
    ):
        model = backend.compile(exported, threads=threads)
        path = os.path.join(folder, f"{name}.so")
        model.save(path)
        made.append((path, model))
    if feeds is None:
        return TunedModel(found, made[1][1], made[1][0], None, None, None)
    measured = measure(
        [original, *(path for path, _ in made)], dict(feeds), threads=threads, time_limit=20.0, target_width=0.02,
        control=False,
    )  # fmt: skip
    runtime, untuned, tuned = (latency.median_ms for latency in measured.latencies)
    path, model = made[1] if tuned <= untuned else made[0]
    return TunedModel(found, model, path, runtime, untuned, tuned)
