"""Tunes the kernels of one model: its graph and the result of a greedy search share one budget of trials."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Any

from xrlflow.backends import BackendError
from xrlflow.backends.results import SpeedUp
from xrlflow.backends.tvm.devices.execution import running
from xrlflow.cost import Roofline
from xrlflow.ir import Graph
from xrlflow.onnxio import Source
from xrlflow.options import Options, TuneOptions
from xrlflow.pipeline.confirm import final
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import search
from xrlflow.pipeline.factories import factory_of
from xrlflow.pipeline.prepare import opened, random_feeds, start
from xrlflow.pipeline.verifier import Verifier
from xrlflow.report import Listener, bounds, finite
from xrlflow.search import simplify
from xrlflow.tuning.crew import PoolError
from xrlflow.tuning.models import TunedModel, TuningPlan, tune_model
from xrlflow.tuning.session import Progress
from xrlflow.tuning.tuners.protocol import Method
from xrlflow.verify import Verification
from xrlflow.verify.inputs import user_case

# Time limits in seconds of the last comparison: usually, and after Ctrl-C.
_FINAL, _FINAL_HURRIED = 20.0, 8.0


@dataclass(frozen=True, slots=True, eq=False)
class Tuned:
    """A model whose kernels were tuned. `save` writes the shared library.

    `speedup` compares the compiled model with the original in ONNX Runtime, in fresh processes. On a remote device
    (`device`) it compares the better tuned model with the untuned model, in one session. It is None if it was not
    measured.
    """

    result: TunedModel
    speedup: SpeedUp | None
    control: SpeedUp | None
    verification: Verification | None
    device: str | None = None
    notes: tuple[str, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the shared library. Raises BackendError if the file cannot be written."""
        self.result.model.save(path)

    def to_json(self) -> dict[str, Any]:
        tuning = self.result.tuning
        return {
            "kernels": [
                {
                    "name": result.task.name, "calls": result.task.weight, "flops": result.task.flops,
                    "best_us": finite(result.seconds * 1e6), "trials": result.trials, "measured": result.measured,
                    "failed": result.failed, "error": result.error,
                }
                for result in tuning.tasks
            ],
            "layers": [
                {
                    "name": layer.name, "calls": layer.calls, "plain_us": _us(layer.plain_seconds),
                    "heuristic": layer.heuristic, "heuristic_us": _us(layer.heuristic_seconds),
                    "algorithm": layer.chosen, "best_us": _us(layer.chosen_seconds),
                }
                for layer in self.result.layers
            ],
            "device": self.device, "against": "onnxruntime" if self.device is None else "untuned",
            "stop": tuning.stop.name.lower(), "seconds": tuning.seconds, "proposing": tuning.proposing,
            "measuring": tuning.measuring, "onnxruntime_ms": self.result.onnxruntime_ms,
            "untuned_ms": self.result.untuned_ms, "tuned_ms": self.result.tuned_ms,
            "rewritten_ms": self.result.rewritten_ms, "notes": list(self.notes),
            "speedup": self.speedup.median if self.speedup else None,
            **bounds("speedup", self.speedup), **bounds("control", self.control),
            "verified": self.verification.verified if self.verification is not None else None,
            "max_error": finite(self.verification.max_error) if self.verification is not None else None,
            "written": self.result.written,
        }  # fmt: skip


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def tune(source: Source, options: TuneOptions, listener: Listener | None = None) -> Tuned:
    """Rewrite, tune, verify and measure. Raises what `xrlflow.tune` raises."""
    with opened(source, _for_search(options), listener, time.monotonic(), options.store) as context:
        target = context.target
        assert target is not None
        target.check_runs()
        graphs = [
            context.artifact(graph).file for graph in _graphs(context, options.rewrite and options.measure)
        ]
        if options.measure:
            inputs = options.inputs
            feeds = (
                dict(user_case(context.imported, inputs).feeds)
                if inputs is not None
                else random_feeds(context)
            )
            context = replace(context, feeds=feeds)
        tuned = _tuned(context, options, graphs)
        verification: Verification | None = None
        if options.verify:
            with running(target, tuned.path, tuned.model) as runner:
                verification = Verifier(context, limited=False).check_compiled(runner, tuned.model.sizes)
        compared = tuned.compared
        if options.measure and target.remote is None:
            hurried = context.clock.hurried or tuned.tuning.interrupted
            compared = final(context, tuned.path, verification, _FINAL_HURRIED if hurried else _FINAL)
    return Tuned(
        tuned,
        compared.speedup if compared is not None else None,
        compared.control if compared is not None else None,
        verification,
        target.device,
        (*context.notes, *tuned.remarks),
    )


def _for_search(options: TuneOptions) -> Options:
    """The options of the search that precedes the tuning."""
    return Options(
        search="greedy", cost="roofline", backend="tvm", cpu=options.cpu, triple=options.triple, remote=options.remote,
        shapes=options.shapes, threads=options.threads, seed=options.seed, measure=options.measure,
        verify=options.verify, inputs=options.inputs, exact_kernels=options.exact_kernels,
        time_limit=options.time_limit, store=options.server,
    )  # fmt: skip


def _tuned(context: Context, options: TuneOptions, graphs: list[str]) -> TunedModel:
    hurried = context.clock.hurried
    trials = 0 if hurried else options.trials

    def tell(progress: Progress) -> None:
        note = f"{progress.task.name} {progress.best * 1e6:.1f} us"
        context.say("tune", progress.spent, progress.budget, note)

    try:
        with factory_of(options.ray) as factory:
            plan = TuningPlan(
                Method(options.method), trials, options.batch, options.time_limit, options.seed,
                None if options.ray is None else factory,
            )  # fmt: skip
            return tune_model(
                context.lowering, context.original.runnable, graphs, context.feeds, plan, tell, hurried
            )
    except PoolError as error:
        raise BackendError(f"{error} (what was measured is kept: the same command goes on)") from error


def _graphs(context: Context, rewrite: bool) -> list[Graph]:
    """The original graph as TVM can lower it, and the search's result if that costs less."""
    # Costs by figures of the reference machine, so that the choice of graphs depends on no measurement.
    model = Roofline(bindings=context.imported.bindings)
    if not rewrite:
        return [simplify(context.imported.graph, context.library, model.cost)[0]]
    base = start(context, model).base
    result = search(context, base, model)
    if result.interrupted:
        context.notes.append("interrupted: nothing was tuned, the best so far is kept")
        context.clock.hurry()
    graphs = [base.state.graph]
    if result.best.cost < base.cost:
        if context.fits(result.best):
            graphs.append(result.best.state.graph)
        else:
            growth = context.options.max_growth
            context.notes.append(f"the best graph exceeds {growth:g} times the input's size")
    return graphs
