"""Converts a model to another precision, optimises what it became, and compares the result with the original."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx

from rewrite_rules import LIBRARY
from xrlflow.backends import BackendError, RepeatedComparison
from xrlflow.backends.library_files import library_of
from xrlflow.backends.onnxruntime import Deciding, default_threads, measure_in_fresh_processes, with_library
from xrlflow.backends.onnxruntime import Options as Session
from xrlflow.backends.results import Verdict
from xrlflow.cost import Roofline
from xrlflow.ir import Graph
from xrlflow.onnxio import ImportedModel, ModelError, Source, load, to_proto
from xrlflow.onnxio.versions import opset_of
from xrlflow.options import BY_CHANNEL, FLOAT16, FLOAT32, INT8, KEEP, OptionError, Options
from xrlflow.pipeline.artifact import Original
from xrlflow.pipeline.attempts import attempted
from xrlflow.pipeline.context import largest_result
from xrlflow.pipeline.precision import floats
from xrlflow.pipeline.precision.calibration import Deviation, Sets, deviation, random_sets, run_all, user_sets
from xrlflow.pipeline.precision.integers import Quantiser, Selection
from xrlflow.pipeline.prepare import opened
from xrlflow.pipeline.results import Result, result_of
from xrlflow.report import Listener, Precision, compared_with, operators
from xrlflow.rewrite import Library, RewriteState
from xrlflow.search import Limits, greedy
from xrlflow.verify import InputsNeeded

Optimize = Callable[[Source, Options, Listener | None], Result]

# The fraction of the time limit for converting, the fraction of the rest for optimising, and the least seconds of
# that and of the last comparison.
_CONVERTING, _OPTIMISING, _LEAST = 0.45, 0.75, 3.0
_INNER = "compared with the model after the conversion"


@dataclass(frozen=True, slots=True)
class _Conversion:
    """A converted model. `model` is None if none was made, for this `reason`."""

    model: bytes | None
    converted: tuple[str, ...]
    candidates: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Job:
    """One change of precision. `options` are the user's; `begin`: when it began (time.monotonic)."""

    original: Original
    imported: ImportedModel
    options: Options
    listener: Listener | None
    sets: Sets
    begin: float

    @property
    def threads(self) -> int:
        return self.options.threads or default_threads()

    @property
    def left(self) -> float:
        """The seconds that are left, or those that a phase gets in any case."""
        return max(_LEAST, self.begin + self.options.time_limit - time.monotonic())

    @property
    def kept(self) -> Options:
        """The options of a model whose precision is kept."""
        default = Options()
        return replace(
            self.options,
            precision=KEEP,
            precision_error=default.precision_error,
            inputs=None if self.options.inputs is None else self.sets.whole,
        )

    @property
    def size(self) -> int:
        """The bytes from which growth counts. Wider weights take their bytes, since they were asked for."""
        return self.imported.size * (2 if self.options.precision == FLOAT32 else 1)

    @property
    def largest(self) -> float:
        """The most bytes of a result."""
        return largest_result(self.options, self.size)

    def say(self, done: int, total: int, note: str) -> None:
        if self.listener is not None:
            self.listener("precision", done, total, note)


def converted(source: Source, options: Options, listener: Listener | None, optimize: Optimize) -> Result:
    """The model in another precision, optimised by `optimize`; or the original, if the result is not faster or its
    error exceeds the bound. Raises what `xrlflow.optimize` raises.
    """
    begin = time.monotonic()
    with TemporaryDirectory(prefix="xrlflow-") as folder:
        imported, original = load(source, shapes=options.shapes), Original(source, folder)
        if options.inputs is not None:
            sets = user_sets(imported, options.inputs, options.seed, calibrated=options.precision == INT8)
        else:
            try:
                sets = random_sets(imported, original.runnable, options.seed)
            except InputsNeeded as needed:
                job = _Job(original, imported, options, listener, Sets((), (), {}), begin)
                return _kept(job, _Conversion(None, (), 0), f"the error cannot be measured: {needed}", 0.0)
        job = _Job(original, imported, options, listener, sets, begin)
        try:
            conversion = _CONVERSIONS[options.precision](job, Path(folder))
        except ModelError as failure:
            raise ModelError(f"precision {options.precision!r}: {failure}") from failure
        spent = time.monotonic() - begin
        if conversion.model is None:
            return _kept(job, conversion, conversion.reason, spent)
        if too_large := _too_large(job, len(conversion.model)):
            return _kept(job, conversion, too_large, spent)
        error = _error(job, conversion.model)
        if not error.rms <= options.precision_error:
            return _kept(job, conversion, _exceeds(job, error), spent, error)
        limit = max(_LEAST, _OPTIMISING * job.left)
        inner = replace(job.kept, time_limit=limit, max_growth=job.largest / len(conversion.model))
        result = optimize(conversion.model, inner, listener)
        return _judged(job, conversion, result, Path(folder) / "result.onnx", spent)


def _judged(job: _Job, conversion: _Conversion, result: Result, path: Path, spent: float) -> Result:
    """The result, if it is better than the original and its error is within the bound; otherwise the original."""
    result.save(path)
    size = sum(file.stat().st_size for file in path.parent.glob("result.onnx*"))
    options, bound = job.options.session_options, job.options.precision_error
    if (library := library_of(str(path))) is not None:
        options = with_library(options, library)
    error = _error(job, str(path), options)
    if not error.rms <= bound:
        return _kept(job, conversion, _exceeds(job, error), spent, error, optimised=result)
    if too_large := _too_large(job, size):
        return _kept(job, conversion, too_large, spent, error, optimised=result)
    smaller = job.options.precision == FLOAT16 and size < job.imported.size
    compared: RepeatedComparison | None = None
    if job.options.measure:
        compared = measure_in_fresh_processes(
            job.original.file, str(path), dict(job.sets.whole), deciding=Deciding(lambda: True),
            threads=job.threads, time_limit=job.left, session_options=options,
        )  # fmt: skip
        if not _better(compared, smaller):
            return _kept(job, conversion, compared_with(compared), spent, error, compared, result)
    return _accepted(job, conversion, result, spent, error, compared, smaller)


def _too_large(job: _Job, size: int) -> str:
    """Why a file of so many bytes is no result; empty if it may be one."""
    if size <= job.largest:
        return ""
    counted = ", of which --precision float32 counts half" if job.options.precision == FLOAT32 else ""
    allowing = math.ceil(size / job.size * 10) / 10
    growth = size / job.imported.size
    return f"the file would be {growth:.2f} times as large{counted} (allow it with --max-growth {allowing:g})"


def _error(job: _Job, model: str | bytes, session_options: Session | None = None) -> Deviation:
    """The error of a model's outputs on the checking sets. Raises OptionError if the model does not run."""
    own = job.options.session_options
    expected = run_all(job.original.runnable, job.sets.checking, threads=job.threads, session_options=own)
    try:
        found = run_all(model, job.sets.checking, threads=job.threads, session_options=session_options or own)
    except BackendError as error:
        raise OptionError(
            f"precision {job.options.precision!r}: the converted model does not run: {error}"
        ) from error
    return deviation(expected, found)


def _exceeds(job: _Job, error: Deviation) -> str:
    return f"the error {error.rms:.3g} exceeds the bound of {job.options.precision_error:g}"


def _better(compared: RepeatedComparison, smaller: bool) -> bool:
    """Whether the result replaces the original. A smaller file in float16 need not be faster."""
    if not smaller:
        return compared.verdict is Verdict.FASTER
    slower = compared.decided is not None and compared.decided.slower
    return not slower and compared.verdict is not Verdict.REFUTED


def _accepted(
    job: _Job, conversion: _Conversion, result: Result, spent: float, error: Deviation,
    compared: RepeatedComparison | None, smaller: bool,
) -> Result:  # fmt: skip
    """The result of the converted model, with a report that compares it with the original."""
    report, record = result.report, _record(job, conversion, error)
    size = ", and the file is smaller" if smaller else ""
    inner = f"{_INNER}, as are verification and modelled cost: {report.reason}"
    report = replace(
        report,
        nodes_before=job.imported.nodes_before,
        operators_before=operators(job.imported.graph),
        reason="not measured" if compared is None else compared_with(compared) + size,
        returned_original=False,
        notes=(str(record), *_warnings(job), inner, *report.notes),
    )
    return _reported(job, replace(result, report=report), record, spent, compared)


def _kept(
    job: _Job, conversion: _Conversion, reason: str, spent: float, error: Deviation | None = None,
    compared: RepeatedComparison | None = None, optimised: Result | None = None,
) -> Result:  # fmt: skip
    """The original, with the reason. `optimised`: the result that does not replace it, if there is one."""
    record = _record(job, conversion, error)
    with opened(job.original.source, job.kept, job.listener, time.monotonic()) as context:
        attempt = attempted(replace(context, unwritable=reason))
        result = result_of(attempt.context, attempt.start, attempt.explored, attempt.finished)
    notes, phases = [str(record), *_warnings(job)], dict(result.report.phases)
    if optimised is not None:
        notes += [f"{_INNER}: {optimised.report.reason}", *optimised.report.notes]
        phases = dict(optimised.report.phases)
    notes += result.report.notes
    report = replace(result.report, notes=tuple(dict.fromkeys(notes)), phases=phases)
    return _reported(job, replace(result, report=report), record, spent, compared)


def _reported(
    job: _Job, result: Result, record: Precision, spent: float, compared: RepeatedComparison | None
) -> Result:
    """The result with the original's name, what was measured, and the record of the conversion."""
    report, name, returned = result.report, job.imported.name, result.report.returned_original
    evidence = result.evidence
    context = replace(evidence.context, imported=replace(evidence.context.imported, name=name))
    phases = {**report.phases, "precision": round(spent, 3)}
    if compared is not None:
        phases["measure"] = round(phases.get("measure", 0.0) + compared.seconds, 3)
    report = replace(
        report,
        model=name,
        precision=record,
        phases=phases,
        seconds=round(time.monotonic() - job.begin, 3),
        latency_before=compared.before if compared else None,
        latency_after=compared.after if compared and not returned else None,
        speedup=compared.speedup if compared and not returned else None,
        control=compared.control if compared else None,
        decided=compared.decided if compared else None,
        processes=compared.processes if compared else 0,
    )
    return replace(
        result,
        report=report,
        imported=replace(result.imported, name=name),
        evidence=replace(evidence, context=context, compared=compared),
    )


def _record(job: _Job, conversion: _Conversion, error: Deviation | None) -> Precision:
    return Precision(
        asked=job.options.precision,
        converted=conversion.converted,
        candidates=conversion.candidates,
        bound=job.options.precision_error,
        error=error.rms if error is not None else None,
        largest_error=error.largest if error is not None else None,
        calibrating=len(job.sets.calibrating) if job.options.precision == INT8 else 0,
        checking=len(job.sets.checking),
        held_out=bool(job.sets.held_out) and job.options.precision == INT8,
        random=job.options.inputs is None,
    )


def _warnings(job: _Job) -> tuple[str, ...]:
    if job.sets.held_out or job.options.precision != INT8:
        return ()
    return (
        "the error was measured on the inputs for calibration, because there is only one set: give more "
        "(--inputs FOLDER)",
    )


# ---------------------------------------------------------------- conversions


def _to_integers(job: _Job, folder: Path) -> _Conversion:
    imported, graph = job.imported, _without_batch_norms(job.imported)
    own, wanted = opset_of(imported.frame) or BY_CHANNEL, job.options.opset
    model = to_proto(imported, graph, opset=BY_CHANNEL if wanted is None and own < BY_CHANNEL else wanted)
    quantiser = Quantiser(model, job.sets, folder)
    until = job.begin + _CONVERTING * job.options.time_limit
    selection = Selection(
        quantiser, job.original.runnable, job.options.precision_error, until, job.threads, job.say,
        measuring=job.options.measure,
    )  # fmt: skip
    found = selection.run()
    candidates = len(quantiser.layers)
    if isinstance(found, str):
        return _Conversion(None, (), candidates, found)
    return _Conversion(found.model, tuple(layer.shown for layer in found.layers), candidates)


def _to_float16(job: _Job, folder: Path) -> _Conversion:
    model, names = floats.to_float16(_as_proto(job))
    return _of_floats(model, names, f"the model has no weights in float32{_inputs(job)}")


def _to_float32(job: _Job, folder: Path) -> _Conversion:
    model, names = floats.to_float32(_as_proto(job))
    return _of_floats(model, names, f"the model has no weights in float16 or bfloat16{_inputs(job)}")


def _inputs(job: _Job) -> str:
    return (
        " (inputs with defaults, which a caller may override, do not count)"
        if job.imported.overridable
        else ""
    )


def _as_proto(job: _Job) -> onnx.ModelProto:
    return to_proto(job.imported, job.imported.graph, opset=job.options.opset)


def _of_floats(model: onnx.ModelProto, names: tuple[str, ...], otherwise: str) -> _Conversion:
    if not names:
        return _Conversion(None, (), 0, otherwise)
    return _Conversion(model.SerializeToString(), names, len(names))


_CONVERSIONS = {INT8: _to_integers, FLOAT16: _to_float16, FLOAT32: _to_float32}


def _without_batch_norms(imported: ImportedModel) -> Graph:
    """The graph with BatchNormalizations folded into the layers before or behind them, which are then quantised."""
    graph = imported.graph
    if all(node.op != "BatchNormalization" for node in graph.nodes()):
        return graph
    rules = Library([rule for rule in LIBRARY if rule.name.startswith("FoldBatchNorm")])
    model = Roofline(bindings=imported.bindings)
    cost = model.cost(graph)
    found = greedy(
        RewriteState.start(graph, rules, model.delta), cost, Limits(budget=1000, deadline=math.inf)
    )
    return found.best.state.graph
