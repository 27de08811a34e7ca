"""The Python interface: where the parts are wired together by name."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewrite_rules import LIBRARY
from xrlflow import files, lowering
from xrlflow.backends import BackendError, RepeatedComparison
from xrlflow.backends.onnxruntime import (
    check_providers,
    default_threads,
    measure,
    measure_in_fresh_processes,
    open_model,
)
from xrlflow.backends.onnxruntime.session import CPU, ort_errors
from xrlflow.backends.protocol import CompiledModel
from xrlflow.backends.results import SpeedUp, Verdict
from xrlflow.backends.tvm import SUFFIX, TvmModel
from xrlflow.backends.tvm.remote import Remote
from xrlflow.cost import AdditiveCost, CostModel, Measured, Profiled, Roofline, Surroundings, calibrated
from xrlflow.ir import Graph
from xrlflow.lowering import Place, TunedModel
from xrlflow.onnxio import (
    ImportedModel,
    ModelError,
    Source,
    check_result,
    load,
    save,
    save_original,
    size_of,
    to_proto,
)
from xrlflow.report import (
    Listener,
    Report,
    bounds,
    compared_with,
    finite,
    not_verified_in_time,
    nothing_chosen,
    operators,
)
from xrlflow.rewrite import AnyRule, Library, RewriteState
from xrlflow.search import (
    SEARCH_UNTIL,
    Budget,
    Found,
    Limits,
    Ratio,
    SearchResult,
    Selection,
    Step,
    TraceError,
    append,
    extend,
    greedy,
    lookahead,
    random_walk,
    replay,
    retrace,
    select,
    simplify,
    taso,
    with_bodies,
)
from xrlflow.tuning.pool import PoolError
from xrlflow.tuning.session import Progress
from xrlflow.tuning.store import Store, StoreError
from xrlflow.tuning.tuners.protocol import Method
from xrlflow.verify import (
    NotASubstitution,
    NotRepeatable,
    Reference,
    Status,
    Verification,
    VerificationError,
    blame,
    feeds_for_measurement,
    verify,
)
from xrlflow.verify.inputs import user_case
from xrlflow.verify.rules import Certificate, prove_all, prove_in_processes
from xrlflow.verify.rules.thresholds import limits, written

if TYPE_CHECKING:
    import onnx
    import onnxruntime as ort

_AGENT = "xrlflow"
_COMPARED = (_AGENT, "taso", "greedy", "random")
# Greedy searches that look so many steps ahead where they are stuck.
_LOOKAHEAD = {"lookahead2": 2, "lookahead3": 3}
SEARCHES = (*_COMPARED, *_LOOKAHEAD)
# What rules may assume besides being approximate.
ASSUMPTIONS = frozenset({"finite", "vnni"})
COSTS = ("roofline", "profiled", "measured")
BACKENDS = ("onnxruntime", "tvm")

# Seconds that the last comparison has at least where it decides nothing: what was compiled is returned in any case.
_FINAL_AT_LEAST = 3.0
# Seconds that a search has in any case, one with an agent after that is loaded, if it is not too late for the rest.
_SEARCH_AT_LEAST = 2.0
# Seconds that loading the agent, and torch with it, takes.
_AGENT_LOADING = 3.0
# Of the time until searching must be over, what fine-tuning an agent may take.
_TRAIN_AT_MOST = 0.6
# Substitutions that the model sees as a loss of no more than this part of the cost are left to measurement.
_TOLERANCE = 0.02
# Comparing two models ends early when the interval is clear of 1 by this much.
_DECIDED = 0.01


class OptionError(ValueError):
    """An argument that makes no sense; the message names it and what it may be."""


class VerificationFailed(Exception):
    """The result does not compute what the original does: it was not written."""


# What the user can put right.
UserError = (ModelError, BackendError, VerificationError, OptionError, TraceError, StoreError)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """An optimised model, or the original if nothing better was found (`returned_original`).

    `speedup` is measured: how many times faster than the original, median and 95% interval; None if not measured.
    `trace` has the substitutions in order, those before the search (certain ones, and in control-flow bodies) first.
    """

    report: Report
    trace: tuple[Step, ...]
    imported: ImportedModel
    graph: Graph
    source: Source
    max_growth: float
    opset: int | None
    verification: Verification | None = None
    selection: Selection | None = None
    compiled: TvmModel | None = None

    @property
    def speedup(self) -> SpeedUp | None:
        return self.report.speedup

    @property
    def returned_original(self) -> bool:
        return self.report.returned_original

    @property
    def model(self) -> onnx.ModelProto:
        """The result as one ModelProto. Raises ModelError if that would be over 2 GB."""
        if not self.returned_original:
            return to_proto(self.imported, self.graph, opset=self.opset)
        import onnx

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "original.onnx")
            save_original(self.imported, path)
            return onnx.load(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result to a file, whole or not at all.

        The original is written byte for byte; external data goes to a file of the result's own, `NAME.DIGEST.data`
        beside it, and nothing else is overwritten. With TVM as the backend a shared library.
        Raises ModelError or BackendError if the file cannot be written.
        """
        if self.compiled is not None:
            self.compiled.save(path)
        elif self.returned_original:
            save_original(self.imported, path)
        else:
            save(self.imported, self.graph, path, opset=self.opset, max_growth=self.max_growth)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the substitutions as JSON, for `replay`."""
        steps = [
            {"rule": s.rule, "family": s.family, "at": list(s.key[1]), "cost": s.cost} for s in self.trace
        ]
        _write_text(path, json.dumps({"model": self.report.model, "steps": steps}, indent=1))


@dataclass(frozen=True, slots=True)
class Comparison:
    """What several strategies made of one model."""

    reports: tuple[Report, ...]


@dataclass(slots=True)
class _Job:
    """One optimisation while it runs."""

    imported: ImportedModel
    source: Source
    search: str
    cost_name: str
    budget: int
    alpha: float
    seed: int
    threads: int
    session_options: Mapping[str, str] | ort.SessionOptions | None
    begin: float
    deadline: float
    max_growth: float
    folder: str
    library: Library
    listener: Listener | None
    shapes: Mapping[str, Sequence[int]]
    agent: str | os.PathLike[str] | None = None
    train_steps: int = 0
    feeds: dict[str, Any] | None = None
    phases: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    early_steps: list[Step] = field(default_factory=list)
    latency: float = 0.0  # rough seconds of one run
    loading: float = 0.0  # rough seconds of opening a session
    files: int = 0
    reference: Reference | None = None
    place: Place | None = None
    store: Store | None = None  # of tuned kernels
    verifying: bool = True
    hurried_at: float | None = None  # time.monotonic
    limit: float = field(init=False)  # the deadline as the user gave it

    def __post_init__(self) -> None:
        self.limit = self.deadline

    @property
    def time(self) -> Budget:
        """What is left for what."""
        begin = self.begin if self.hurried_at is None else self.hurried_at
        return Budget(
            begin, self.deadline - begin, self.latency, self.loading, self.verifying,
            hurried=self.hurried_at is not None, compiled=self.place is not None,
        )  # fmt: skip

    def hurry(self) -> None:
        """After Ctrl-C, take only the time to compare, verify and measure what was found until then."""
        now = time.monotonic()
        self.deadline = self.time.hurry(now).until
        self.hurried_at = now

    def phase(self, name: str, since: float) -> None:
        self.phases[name] = round(self.phases.get(name, 0.0) + time.monotonic() - since, 3)

    def say(self, phase: str, done: int, total: int, note: str) -> None:
        if self.listener is not None:
            self.listener(phase, done, total, note)

    @property
    def original(self) -> str | bytes:
        """The original as the runtime takes it."""
        return _runnable(self.source)

    def write(self, graph: Graph) -> str:
        """A graph as a file, of whatever size, in a folder of its own in the job's folder."""
        self.files += 1
        folder = os.path.join(self.folder, str(self.files))
        os.mkdir(folder)
        path = os.path.join(folder, "model.onnx")
        save(self.imported, graph, path, max_growth=float("inf"), durable=False)
        return path

    def remove(self, path: str) -> None:
        """Remove what `write` wrote."""
        shutil.rmtree(os.path.dirname(path))

    def fits(self, found: Found) -> bool:
        """Whether the result would not be too large a file."""
        size = self.imported.size
        return size_of(self.imported, found.state.graph) <= max(self.max_growth * size, size + (1 << 16))


def optimize(
    model: Source,
    *,
    search: str = "xrlflow",
    cost: str | CostModel = "profiled",
    backend: str = "onnxruntime",
    cpu: str | None = None,
    triple: str | None = None,
    remote: str | Remote | None = None,
    backend_ops: bool = False,
    allow_approximate: bool = False,
    assuming: Sequence[str] = (),
    budget: int = 1000,
    time_limit: float = 60.0,
    alpha: float = 1.05,
    agent: str | os.PathLike[str] | None = None,
    train_steps: int = 0,
    shapes: Mapping[str, Sequence[int]] | None = None,
    fix_shapes: bool = False,
    store: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    session_options: Mapping[str, str] | ort.SessionOptions | None = None,
    providers: Sequence[str] = (CPU,),
    seed: int = 0,
    measure: bool = True,
    verify: bool = True,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    max_growth: float = 1.2,
    opset: int | None = None,
    replay: str | os.PathLike[str] | None = None,
    listener: Listener | None = None,
) -> Result:
    """Make a model faster.

    `model`: a path, the bytes of a file, or a ModelProto. `search`: "xrlflow" (a trained agent: the one that is
    shipped, or that in the file `agent`, trained for `train_steps` more steps on this model), "greedy", "taso" (with
    `alpha`), "lookahead2", "lookahead3" (greedy, but they look so many steps ahead where they are stuck) or "random"
    (`budget` edits that ignore the cost). `budget`: states that a search may expand.
    `cost`: "roofline", "profiled" (operators measured alone) or "measured" (whole models, slow), or any CostModel.
    `backend`: "onnxruntime", or "tvm": the result is compiled, `save` writes a shared library, and its latency is
    compared with the original's in ONNX Runtime (the report says which is faster: it is the library that was asked
    for). Operators that TVM lacks are spelt out before the search.
    `cpu`: LLVM's name of the processor that TVM compiles for (default: this one), `triple` that of its system if it is
    another. What this machine cannot run has to run on a `remote` device ("HOST:PORT/KEY", of TVM's RPC tracker), or
    not at all (`measure=False, verify=False`). On a remote device the result's latency is compared with that of the
    original graph, compiled. Kernels run as they were tuned, where `store` (the file of `tune`; by default in the
    user's cache) knows them.
    `backend_ops`: the result may have operators that only the backend has (com.microsoft for ONNX Runtime).
    `allow_approximate`: also rules that may lose more than two bits of float32 accuracy. `assuming`: what holds of the
    data or the machine, for rules that are right only then: "finite" (no infinities or NaN), "vnni" (the processor
    adds products of 8-bit integers without saturation).
    `time_limit`: seconds, covers everything. `shapes`: input name -> shape, for cost and measurement; with
    `fix_shapes` also written into the model. `threads`: of the runtime, the physical cores by default. `providers`:
    ONNX Runtime's; others than the CPU's are refused for now. `inputs`: the user's own, for verification and
    measurement. `measure=False` gives the best graph by modelled cost, never run. `replay`: apply the substitutions of
    a trace instead of searching.

    Raises ModelError, BackendError, VerificationError, StoreError or OptionError for what the caller can put right,
    and VerificationFailed if the result does not compute the same.
    """
    begin = time.monotonic()
    _check_options(search, cost, backend, budget, time_limit, alpha, max_growth, agent, train_steps)
    if unknown := set(assuming) - ASSUMPTIONS:
        raise OptionError(
            f"assumption {min(unknown)!r} is not known: choose of {', '.join(sorted(ASSUMPTIONS))}"
        )
    _check_seed(seed)
    check_providers(providers)
    _check_backend(backend, "tvm", {"cpu": cpu, "triple": triple, "remote": remote, "store": store})
    _check_backend(backend, "onnxruntime", {"opset": opset, "backend_ops": backend_ops or None})
    if store is not None and not os.path.isfile(store):
        raise OptionError(f"store {os.fspath(store)} is no file: give one that `xrlflow tune --store` wrote")
    place = _place(cpu, triple, remote, threads) if backend == "tvm" else None
    if place is not None and (measure or verify):
        place.check_runs()
    # TVM compiles for fixed sizes, and what is spelt out for it needs them as numbers.
    imported = load(model, shapes=shapes, fix_shapes=fix_shapes or backend == "tvm")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="xrlflow-"))
        job = _Job(
            imported, model, search, cost if isinstance(cost, str) else cost.name, budget, alpha, seed,
            threads or default_threads(), session_options, begin, begin + time_limit, max_growth, folder,
            Library(
                LIBRARY, backend=backend, contrib=backend_ops,
                assuming=(*assuming, *(("approximate",) if allow_approximate else ())),
                runs=lowering.runs if backend == "tvm" else None,
            ),
            listener,
            shapes or {},
            agent,
            train_steps,
            place=place,
        )  # fmt: skip
        if backend == "tvm":
            lowering.check_supported(imported, job.library)
            job.store = stack.enter_context(Store(store))
            job.store.check()
        job.phase("import", begin)
        given = None if isinstance(cost, str) else cost
        return _run(job, given, measure, verify, inputs, opset, replay)


def _run(
    job: _Job,
    given: CostModel | None,
    measuring: bool,
    verifying: bool,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None,
    opset: int | None,
    trace: str | os.PathLike[str] | None,
) -> Result:
    imported = job.imported
    job.verifying = verifying
    since = time.monotonic()
    if inputs is not None:
        job.feeds = dict(user_case(imported, inputs).feeds)
        if measuring:
            _run_twice(job)
    elif measuring or job.cost_name == "measured":
        job.feeds = _feeds(job)
    if job.feeds is not None:
        imported = job.imported = _bound(job, job.feeds)
    job.phase("inputs", since)
    since = time.monotonic()
    model = given or _cost_model(job)
    base = _start(job, model)
    job.phase("calibrate", since)

    since = time.monotonic()
    searching = since < job.time.select_until
    result = _replayed(job, base, trace) if trace is not None else _search(job, base, model)
    job.phase("search", since)
    if result.interrupted:
        job.notes.append("interrupted: the best so far is kept")
        job.hurry()
    if isinstance(model, Profiled):
        job.notes.append(f"operators: {model.tally}")
    proposals = [f for f in (result.best, *result.shortlist) if job.fits(f)]
    if not job.fits(result.best):
        job.notes.append(f"the best graph exceeds {job.max_growth:g} times the input's size (--max-growth)")

    if job.library.backend == "tvm":
        return _lowered(job, base, result, proposals, measuring, verifying, inputs)
    exporting = _runs_fewer(imported, base.state.graph)
    selection: Selection | None = None
    chosen: Found | None = None
    if measuring and job.search != "random":
        since = time.monotonic()
        selection = _select(job, base, proposals, exporting)
        chosen = selection.chosen
        if selection.interrupted and result.interrupted:
            raise KeyboardInterrupt
        if selection.interrupted:
            job.notes.append("interrupted while whole models were compared: the best so far is kept")
            job.hurry()
        job.phase("select", since)
    elif proposals and (job.search == "random" or proposals[0].cost < base.cost or exporting):
        chosen = proposals[0]
    if chosen is not None and chosen.path is None and not exporting and not job.early_steps:
        chosen = None

    if chosen is None:
        judged = _Judged(False, nothing_chosen(selection, searching))
    else:
        judged = _judge(job, base, chosen, measuring, verifying, inputs)
    kept = chosen if judged.kept else None
    return _result(
        job, base, kept, result, judged.verification, judged.compared, selection, judged.reason, opset
    )


@dataclass(frozen=True, slots=True)
class _Judged:
    """Whether what was found takes the original's place, and why."""

    kept: bool
    reason: str
    verification: Verification | None = None
    compared: RepeatedComparison | None = None


def _judge(
    job: _Job,
    base: Found,
    chosen: Found,
    measuring: bool,
    verifying: bool,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None,
) -> _Judged:
    """Compare a result with the original, and verify it if it is faster: that may take longer than all the rest."""
    path = job.write(chosen.state.graph)
    job.notes.extend(check_result(job.imported, chosen.state.graph))
    verification: Verification | None = None

    def right() -> bool:
        """Whether the result is known to compute the same; raises VerificationFailed if it does not."""
        nonlocal verification
        if not verifying:
            return True
        since = time.monotonic()
        if deciding and not job.time.can_verify(since):
            return False
        verification = _verify(job, path, (*job.early_steps, *chosen.trace), inputs)
        job.phase("verify", since)
        if verification.status is Status.FAILED:
            raise VerificationFailed(_blame(job, base, chosen, verification, inputs))
        return verification.verified

    deciding = measuring and job.search != "random"
    compared: RepeatedComparison | None = None
    if deciding:
        compared = _decided(job, path, right)
        if compared.verdict is not Verdict.FASTER:
            return _Judged(False, compared_with(compared), verification, compared)
        if verifying and verification is None:
            return _Judged(False, not_verified_in_time(compared), None, compared)
    elif right() and measuring:
        compared = _final(job, path)
    if verification is not None and not verification.verified:
        reason = f"the result cannot be verified: {verification.reason}"
        return _Judged(False, reason, verification, compared)
    reason = "random edits" if job.search == "random" else "not measured"
    return _Judged(True, compared_with(compared) if compared else reason, verification, compared)


def _result(
    job: _Job,
    base: Found,
    chosen: Found | None,
    result: SearchResult,
    verification: Verification | None,
    compared: RepeatedComparison | None,
    selection: Selection | None,
    reason: str,
    opset: int | None,
) -> Result:
    found = chosen if chosen is not None else base
    steps = (*job.early_steps, *found.trace) if chosen is not None else ()
    if compared is not None and compared.disturbed:
        job.notes.append("other programs used the processor while the result was measured")
    if verification is not None and verification.verified:
        job.notes.extend(_remarks(verification))
    kept: RepeatedComparison | None = compared if chosen is not None else None
    before = operators(base.state.graph)
    after = operators(found.state.graph) if chosen is not None else before
    nodes_after = sum(after.values()) if chosen is not None else job.imported.nodes_before
    report = Report(
        model=job.imported.name,
        search=job.search,
        cost_model=job.cost_name,
        backend=job.library.backend or "onnxruntime",
        threads=job.threads,
        nodes_before=job.imported.nodes_before,
        nodes_after=nodes_after,
        operators_before=before,
        operators_after=after,
        substitutions=Counter(s.rule for s in steps),
        cost_before=base.cost,
        cost_after=found.cost,
        expanded=result.expanded,
        latency_before=compared.before if compared else None,
        latency_after=kept.after if kept else None,
        speedup=kept.speedup if kept else None,
        control=compared.control if compared else None,
        decided=compared.decided if compared else None,
        processes=compared.processes if compared else 0,
        verified=verification.verified if verification is not None else None,
        max_error=finite(verification.max_error) if verification is not None else None,
        seconds=round(time.monotonic() - job.begin, 3),
        phases=job.phases,
        returned_original=chosen is None,
        reason=reason,
        notes=(*job.imported.notes, *job.notes),
        trials=selection.trials if selection is not None else (),
    )
    return Result(
        report,
        steps,
        job.imported,
        found.state.graph,
        job.source,
        job.max_growth,
        opset,
        verification,
        selection,
    )


def _remarks(verification: Verification) -> Iterator[str]:
    """What a reader should know of a verification that passed: the sizes that were run, what was not."""
    if verification.bindings:
        yield f"verified with {verification.sizes}"
    if verification.left_out:
        yield f"not verified with {'; '.join(verification.left_out)}"
    yield from (f"verification: {note}" for note in verification.notes)


def _lowered(
    job: _Job,
    base: Found,
    found: SearchResult,
    proposals: Sequence[Found],
    measuring: bool,
    verifying: bool,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None,
) -> Result:
    """Compile what was found, choose by measurement, verify and measure the compiled model."""
    assert job.place is not None
    assert job.store is not None
    since = time.monotonic()
    job.say("compile", 0, 0, "with TVM")
    choice = lowering.lower_best(
        job.original, base, proposals, job.write, job.feeds if measuring else None, place=job.place,
        shapes=job.shapes, folder=job.folder, time_left=lambda: job.limit - time.monotonic(), store=job.store,
        session_options=job.session_options, hurried=found.interrupted,
    )  # fmt: skip
    best = choice.lowered
    job.notes.extend(choice.remarks)
    if choice.interrupted and found.interrupted:
        raise KeyboardInterrupt
    if choice.interrupted or found.interrupted:
        job.hurry()
    job.phase("compile", since)
    verification: Verification | None = None
    if verifying:
        since = time.monotonic()
        with lowering.running(job.place, best.path, best.model) as runner:
            verification = _verify_compiled(job, runner, best.model.sizes, inputs)
        job.phase("verify", since)
    compared = best.compared
    reason = "not measured"
    if compared is not None:
        reason = f"measured {compared.speedup} against the original graph, compiled, on {job.place.remote}"
    elif measuring and job.place.remote is not None and choice.interrupted:
        reason = "the original graph, compiled: interrupted before anything was compared with it"
    elif measuring and job.place.remote is not None:
        reason = "the original graph, compiled: nothing is faster on the remote device"
    elif measuring:
        compared = _final(job, best.path)
        reason = f"{compared_with(compared)} against ONNX Runtime"
        if compared.speedup is not None and compared.speedup.slower:
            reason += ", which is faster"
    result = _result(job, base, best.found, found, verification, compared, None, reason, None)
    report = replace(result.report, threads=job.place.machine.cores)
    return replace(result, report=report, compiled=best.model)


def _cost_model(job: _Job) -> CostModel:
    bindings = job.imported.bindings
    machine = calibrated(job.threads)
    if job.cost_name == "roofline":
        return Roofline(machine, bindings)
    if job.cost_name == "profiled":
        return Profiled(
            machine, bindings=bindings, time_budget=0.5 * (job.time.search_until - time.monotonic())
        )
    assert job.feeds is not None
    return Measured(
        lambda graph: to_proto(job.imported, graph).SerializeToString(),
        job.feeds,
        threads=job.threads,
        session_options=job.session_options,
    )


def _bound(job: _Job, feeds: Mapping[str, Any]) -> ImportedModel:
    """The model with numbers for the dimensions that the user left open: those of what is measured with."""
    imported = job.imported
    shapes: dict[str, tuple[int, ...]] = {}
    for value, info in zip(imported.graph.inputs, imported.frame.graph.input):
        declared = imported.graph.type(value).shape
        shape = getattr(feeds.get(info.name), "shape", ())
        known = (isinstance(d, int) or d in imported.bindings for d in declared or ())
        if not all(known) and min(shape, default=0) > 0:
            shapes[info.name] = shape
    if not shapes or imported.fixed:
        return imported
    return load(job.source, shapes={**job.shapes, **shapes})


def _start(job: _Job, model: CostModel) -> Found:
    """The original's state: what needs no price is done, and its control-flow bodies are optimised."""

    def prepare(graph: Graph) -> Graph:
        simple, steps = simplify(graph, job.library, model.cost)
        job.early_steps.extend(steps)
        return simple

    def improve(graph: Graph, label: str) -> Graph:
        state = RewriteState.start(graph, job.library, model.delta)
        limits = Limits(budget=job.budget, deadline=job.time.search_until)
        result = greedy(state, model.cost(graph), limits)
        if result.interrupted:
            raise KeyboardInterrupt
        found = result.best
        job.early_steps.extend(found.trace)
        return found.state.graph if found.path is not None else graph

    graph = job.imported.graph
    if job.search != "random" and job.cost_name != "measured":
        graph = with_bodies(prepare(graph), improve, prepare)
    elif job.library.backend == "tvm":  # what it lacks has to go, whoever searches
        graph = prepare(graph)
    return Found(RewriteState.start(graph, job.library, model.delta), None, model.cost(graph))


def _search(job: _Job, base: Found, model: CostModel) -> SearchResult:
    least = min(time.monotonic() + _SEARCH_AT_LEAST, job.time.select_until)
    limits = Limits(job.budget, max(job.time.search_until, least))
    if job.search == "random":
        limits.deadline = job.deadline
    limits.progress = lambda done, best: job.say("search", done, job.budget, f"{best * 1e3:.3f} ms modelled")
    if job.search == "greedy":
        return greedy(base.state, base.cost, limits)
    if job.search == "random":
        return random_walk(base.state, base.cost, limits, job.seed)
    if job.search in _LOOKAHEAD:
        return lookahead(base.state, base.cost, limits, _LOOKAHEAD[job.search])
    if job.search == _AGENT:
        return _agent_search(job, base, model, limits)
    return taso(base.state, base.cost, limits, job.alpha)


def _agent_search(job: _Job, base: Found, model: CostModel, limits: Limits) -> SearchResult:
    """Search with the agent that was asked for, after training it on this model if that was asked for too."""
    if not base.state.candidates and job.agent is None:  # torch takes seconds to load
        return SearchResult(base, (base,), 0, 0, 0.0, False)

    interrupted = False
    # On a busy machine, and with a short limit, loading torch may leave the agent no time: then there is this.
    quick = greedy(base.state, base.cost, Limits(job.budget, limits.deadline))
    if quick.interrupted:
        return quick
    if job.agent is None and time.monotonic() + _AGENT_LOADING > job.time.begin_comparing_until:
        job.notes.append("there was no time for the agent: greedy search took its place (--time-limit)")
        return quick
    from xrlflow.learn.checkpoint import CheckpointError
    from xrlflow.learn.threads import one_thread
    from xrlflow.rl.agent import Agent
    from xrlflow.rl.env import Problem
    from xrlflow.rl.features import Featuriser, Pricing
    from xrlflow.rl.pretrained import PRETRAINED
    from xrlflow.rl.strategy import PolicyError, agent_search
    from xrlflow.rl.train import TrainingError, fine_tune
    from xrlflow.rl.workers import Task

    path = job.agent if job.agent is not None else PRETRAINED
    try:
        agent = Agent.load(path).extended(job.library).eval()
        prices = model if isinstance(model, AdditiveCost) else Roofline(bindings=job.imported.bindings)
        featuriser = Featuriser(agent.vocabulary, prices)
        least = min(time.monotonic() + _SEARCH_AT_LEAST, job.time.select_until)
        limits.deadline = max(job.time.search_until, least)
        with one_thread():
            if job.train_steps:
                assert base.state.delta is not None, "candidates have no prices"
                state = replace(base.state, delta=Pricing.of(base.state.delta))
                task = Task([Problem(job.imported.name, state, base.cost)], (), featuriser)
                trained = fine_tune(
                    agent, task, job.train_steps, seed=job.seed,
                    deadline=job.time.part(SEARCH_UNTIL * _TRAIN_AT_MOST),
                    progress=lambda values, done: job.say("train", done, 0, f"gain {values['evaluation/gain']:.3f}"),
                )  # fmt: skip
                agent, interrupted = trained.agent.eval(), trained.interrupted
                job.notes.append(f"the agent was trained on this model for {trained.steps} steps")
            if interrupted:
                limits.deadline = time.monotonic()
            result = agent_search(base.state, base.cost, limits, agent, featuriser, seed=job.seed)
    except CheckpointError as error:
        raise OptionError(f"agent: {error}") from error
    except (PolicyError, TrainingError) as error:
        raise OptionError(f"agent {path}: {error}") from error
    if quick.best.cost < result.best.cost and not result.interrupted:
        result = quick
    return replace(result, interrupted=result.interrupted or interrupted)


def _replayed(job: _Job, base: Found, trace: str | os.PathLike[str]) -> SearchResult:
    steps = _read_trace(trace)
    steps = steps[len(job.early_steps) :]  # those before the search were made again
    state, path, cost = base.state, None, base.cost
    for step, successor in zip(steps, replay(base.state, steps)):
        match = state.find(step.key)
        assert match is not None
        cost += match.delta
        path = extend(path, match, cost)
        state = successor
    found = Found(state, path, cost)
    return SearchResult(found, (found,), len(steps), len(steps), 0.0, False)


def _runs_fewer(imported: ImportedModel, graph: Graph) -> bool:
    """Whether reading the file alone (folding, dead nodes) leaves fewer operators to run."""
    return sum(operators(graph).values()) < imported.nodes_before


def _feeds(job: _Job) -> dict[str, Any]:
    """Inputs to measure with, on which the original runs."""
    since = time.perf_counter()
    with open_model(job.original, threads=job.threads, session_options=job.session_options) as opened:
        job.loading = time.perf_counter() - since
        failures: tuple[type[Exception], ...] = (BackendError, *ort_errors())

        def runs(feeds: Mapping[str, Any]) -> bool:
            begin = time.perf_counter()
            try:
                opened.run(feeds)
            except failures:
                return False
            job.latency = time.perf_counter() - begin
            return True

        found = feeds_for_measurement(job.imported, job.seed, runs)
        if job.latency < _SLOW:
            job.latency = _warm_latency(lambda: opened.run(found))
        return found


# A first run that takes so many seconds is not repeated to know how long a second one takes.
_SLOW = 1.0


def _warm_latency(run: Callable[[], object]) -> float:
    """Rough seconds of one run, after a first one: the least of three, of one if the model is slow."""
    least = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - begin)
        if least > 0.1:
            break
    return least


def _run_twice(job: _Job) -> None:
    """Note how long loading, and a run on the user's inputs, roughly take: the first run is slower."""
    assert job.feeds is not None
    since = time.perf_counter()
    with open_model(job.original, threads=job.threads, session_options=job.session_options) as opened:
        job.loading = time.perf_counter() - since
        begin, feeds = time.perf_counter(), job.feeds
        opened.run(feeds)
        job.latency = time.perf_counter() - begin
        if job.latency < _SLOW:
            job.latency = _warm_latency(lambda: opened.run(feeds))


def _select(job: _Job, base: Found, proposals: Sequence[Found], exporting: bool) -> Selection:
    """What runs fastest end to end, among the search's proposals and sweeps of single rules."""
    deadline = job.time.select_until
    improving = [f for f in proposals if f.path is not None or exporting or job.early_steps]
    trials = 0

    def compare(against: Found | None, found: Found) -> Ratio:
        nonlocal trials
        if not job.fits(found):
            job.notes.append(
                f"a proposal was dropped: over {job.max_growth:g} times the input's size (--max-growth)"
            )
            return Ratio(0.0, 0.0, 0.0)
        trials += 1
        job.say("select", trials, 0, "measuring whole models")
        old = job.original if against is None else job.write(against.state.graph)
        new = job.write(found.state.graph)
        left = max(0.5, deadline - time.monotonic())
        assert job.feeds is not None
        try:
            measured = measure(
                [old, new], job.feeds, threads=job.threads, time_limit=min(job.time.each_comparison, left),
                target_width=0.02, control=False, margin=_DECIDED, session_options=job.session_options,
                load_reversed=trials % 2 == 0,
            )  # fmt: skip
        except BackendError as error:  # the original ran: it is the proposal that the runtime refuses
            job.notes.append(f"a proposal was dropped: {error}")
            return Ratio(0.0, 0.0, 0.0)
        for path in (old, new):
            if isinstance(path, str) and path.startswith(job.folder):
                job.remove(path)
        return Ratio(measured.speedup.median, measured.speedup.low, measured.speedup.high)

    def search(found: Found, rules: frozenset[str]) -> Found:
        """Greedy with some rules, and all rules' candidates at the end."""
        state = RewriteState.start(found.state.graph, job.library.only(rules), found.state.delta)
        result = greedy(state, found.cost, Limits(job.budget, deadline))
        if result.interrupted:  # it is the selection that keeps what it has
            raise KeyboardInterrupt
        better = result.best
        if better.path is None:
            return found
        path = found.path
        for step in better.trace:
            path = append(path, step)
        full = RewriteState.start(better.state.graph, job.library, found.state.delta)
        return replace(better, state=full, path=path)

    surroundings = Surroundings(job.threads, job.imported.bindings, session_options=job.session_options)

    def say() -> None:
        job.say("select", trials, 0, "measuring substitutions where they stand")

    fitting = [f for f in improving if job.fits(f)]
    tidying = frozenset(name for name, rule in job.library.rules.items() if rule.family in _TIDYING)
    selection = select(
        base, fitting, compare, search, job.time.begin_comparing_until, _TOLERANCE, tidying,
        _Survey(surroundings, base, job.time.begin_comparing_until, say),
    )  # fmt: skip
    job.notes += [f"not measured where it stands: {refusal}" for refusal in surroundings.refused]
    return selection


@dataclass(frozen=True, slots=True)
class _Survey:
    """Substitutions measured where they stand, within the time of the selection."""

    surroundings: Surroundings
    base: Found
    deadline: float
    say: Callable[[], None]

    def candidates(self, found: Found, rules: Sequence[str]) -> Mapping[str, float]:
        return self.surroundings.survey(
            found.state, rules, _TOLERANCE * self.base.cost, self._until(_LOOKING_AHEAD)
        )

    def steps(self, found: Found) -> Mapping[str, float]:
        made = ((state, match) for state, match, _ in retrace(self.base.state, found.trace))
        return self.surroundings.retrace(made, self._until(_LOOKING_BACK))

    def _until(self, share: float) -> float:
        self.say()
        now = time.monotonic()
        return now + share * (self.deadline - now)


# The parts of the time of the selection that is left that may go into one look at substitutions in their surroundings:
# those that were made (they make up the best proposal, which is measured first), and those that could be.
_LOOKING_BACK = 0.25
_LOOKING_AHEAD = 0.15
# Families whose substitutions clear away what others leave behind.
_TIDYING = frozenset({"identity", "reshape", "slices", "transpose"})


def _final(job: _Job, path: str) -> RepeatedComparison:
    """How much faster a result is than the original: the figure that is reported, in fresh processes."""
    return _compared(job, path, max(_FINAL_AT_LEAST, job.time.until - time.monotonic()))


def _decided(job: _Job, path: str, check: Callable[[], bool]) -> RepeatedComparison:
    """Whether a result is faster than the original; if it is, and stands `check`, by how much."""
    now, left = time.monotonic(), job.time
    return _compared(
        job, path, left.final(now), check, left.verification, max(left.end - left.verification - now, 0.0)
    )


def _compared(
    job: _Job,
    path: str,
    seconds: float,
    check: Callable[[], bool] | None = None,
    check_seconds: float = 0.0,
    patience: float = float("inf"),
) -> RepeatedComparison:
    assert job.feeds is not None
    since, verifying = time.monotonic(), job.phases.get("verify", 0.0)
    old = job.original
    if isinstance(old, bytes):
        file = os.path.join(job.folder, "original.onnx")
        Path(file).write_bytes(old)
        old = file
    job.say("measure", 0, 0, "in fresh processes")
    compared = measure_in_fresh_processes(
        old, path, job.feeds, check=check, check_seconds=check_seconds, patience=patience,
        threads=job.threads, time_limit=seconds, session_options=job.session_options,
    )  # fmt: skip
    job.phase("measure", since + job.phases.get("verify", 0.0) - verifying)
    return compared


def _verify(
    job: _Job,
    path: str,
    steps: Iterable[Step],
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None,
) -> Verification:
    """Judge a file that these substitutions led to, also around the numbers that their rules compare with."""
    known = job.library.rules
    rules = [known[name] for name in sorted({s.rule for s in steps} & known.keys())]
    further = {number for rule in rules for number in limits(written(rule, types=False))}
    nonempty = [rule.name for rule in rules if rule.nonempty]
    return _reference(job, inputs, path, further).check(path, nonempty=nonempty)


def _verify_compiled(
    job: _Job,
    model: CompiledModel,
    sizes: Mapping[str, tuple[int, ...]],
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None,
) -> Verification:
    """Raises VerificationFailed for a compiled model that is not known to compute the same."""
    found = _reference(job, inputs).check_compiled(model, sizes)
    if found.status is Status.NOT_COMPARABLE:
        raise VerificationFailed(f"the compiled model cannot be verified: {found.reason} (--no-verify)")
    if not found.verified:
        raise VerificationFailed(f"the compiled model does not compute the same: {'; '.join(found.failures)}")
    return found


def _reference(
    job: _Job,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None,
    against: str | None = None,
    further: Iterable[int] = (),
) -> Reference:
    """What is known of the original. `against`: the first result, whose numbers say what to try as well, and `further`
    those of the rules that made it.
    """
    job.say("verify", 0, 0, "on random inputs")
    if job.reference is None:
        job.reference = Reference.of(
            job.original, imported=job.imported, against=against, inputs=inputs, further=further, seed=job.seed,
            threads=job.threads, session_options=job.session_options,
        )  # fmt: skip
    return job.reference


def _blame(
    job: _Job,
    base: Found,
    chosen: Found,
    failed: Verification,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None,
) -> str:
    """A message that names the substitution that broke the model."""
    graphs = [base.state.graph, *(s.graph for s in replay(base.state, chosen.trace))]
    culprits = [f"{s.rule} (step {i} of {len(chosen.trace)})" for i, s in enumerate(chosen.trace, 1)]
    if job.early_steps:
        graphs.insert(0, job.imported.graph)
        rules = ", ".join(sorted({s.rule for s in job.early_steps}))
        culprits.insert(0, f"one of those before the search ({rules})")

    def right(path: str) -> bool:
        return _verify(job, path, (*job.early_steps, *chosen.trace), inputs).verified

    try:
        culprit = culprits[blame(lambda k: job.write(graphs[k]), len(culprits), right)]
    except (NotASubstitution, NotRepeatable) as error:
        culprit = str(error)
    return f"{job.imported.name}: nothing was written: {failed.message(culprit)}"


def _check_options(
    search: str,
    cost: str | CostModel,
    backend: str,
    budget: int,
    time_limit: float,
    alpha: float,
    max_growth: float,
    agent: str | os.PathLike[str] | None,
    train_steps: int,
) -> None:
    if search not in SEARCHES:
        raise OptionError(f"search {search!r} is not known: choose one of {', '.join(SEARCHES)}")
    if isinstance(cost, str) and cost not in COSTS:
        raise OptionError(f"cost {cost!r} is not known: choose one of {', '.join(COSTS)}")
    if backend not in BACKENDS:
        raise OptionError(f"backend {backend!r} is not known: choose of {', '.join(BACKENDS)}")
    if budget < 0:
        raise OptionError(f"budget {budget} is negative")
    if train_steps < 0:
        raise OptionError(f"train_steps {train_steps} is negative: give steps of training, or 0")
    for option, value in (("agent", agent), ("train_steps", train_steps)):
        if value and search != _AGENT:
            raise OptionError(f"{option} has no meaning with search {search!r}: choose {_AGENT!r}")
    if agent is not None and not os.path.isfile(agent):
        raise OptionError(f"agent {os.fspath(agent)} is no file: give one that `xrlflow train` wrote")
    if time_limit <= 0:
        raise OptionError(f"time_limit {time_limit:g} is not positive: give seconds")
    if alpha < 1:
        raise OptionError(
            f"alpha {alpha:g} is below 1: TASO keeps graphs that cost up to alpha times the best"
        )
    if max_growth <= 0:
        raise OptionError(f"max_growth {max_growth:g} is not positive: give sizes of the input, such as 1.2")


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise OptionError(f"seed {seed} is negative: give 0 or more")


def _check_backend(backend: str, only: str, options: Mapping[str, object]) -> None:
    """Raise OptionError for an option that was given, not to the one backend for which it has a meaning."""
    for option, value in options.items():
        if backend != only and value is not None:
            raise OptionError(f"{option} has no meaning with backend {backend!r}: choose {only!r}")


def _place(cpu: str | None, triple: str | None, remote: str | Remote | None, threads: int | None) -> Place:
    """Where a compiled model runs. Raises BackendError."""
    device = Remote.parse(remote) if isinstance(remote, str) else remote
    return lowering.find_place(cpu, triple, device, threads)


def compare(
    model: Source,
    *,
    searches: Sequence[str] = _COMPARED,
    **options: Any,
) -> Comparison:
    """Optimise with each of several strategies; `options` are those of `optimize`. Raises what it raises."""
    return Comparison(tuple(optimize(model, search=search, **options).report for search in searches))


def _chosen(names: Sequence[str]) -> tuple[AnyRule, ...]:
    """The library's rules of these names, or all. Raises OptionError for a name that is not known."""
    known = {r.name: r for r in LIBRARY}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3)
            hint = f": did you mean {', '.join(near)}?" if near else ": `xrlflow rules` lists them"
            raise OptionError(f"there is no rule {name!r}{hint}")
    return tuple(known[n] for n in names) if names else LIBRARY


def prove_rules(
    names: Sequence[str] = (),
    *,
    seed: int = 0,
    jobs: int | None = None,
    listener: Callable[[Certificate, int, int], None] | None = None,
) -> list[Certificate]:
    """Prove rules of the library (all of them by default): a certificate for each, in the library's order.

    `jobs` processes work (default: the physical cores); `listener` hears of each certificate, how many there are and
    how many there will be. Raises OptionError for a name that is not known.
    """
    _check_seed(seed)
    rules = _chosen(names)
    found: dict[str, Certificate] = {}
    jobs = min(jobs or default_threads(), len(rules))
    if jobs == 1:
        certificates = prove_all(rules, seed)
    else:
        certificates = prove_in_processes(rules, seed, jobs)
    for certificate in certificates:
        found[certificate.name] = certificate
        if listener is not None:
            listener(certificate, len(found), len(rules))
    return [found[r.name] for r in rules]


def list_rules(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The library: name, family, equation, backend, proof, assumption of each rule, and what it is a composite of."""
    return [
        {
            "name": r.name,
            "family": r.family,
            "equation": r.equation,
            "backend": r.backend,
            "contrib": r.contrib,
            "proof": r.proof,
            "relies_on": r.relies_on,
            "assumes": r.assumes,
            "composite_of": list(r.composite_of),
        }
        for r in _chosen(names)
    ]


def rule_stats(model: Source, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What the rules find in a model: admitted matches, refusals by reason (near misses), milliseconds."""
    library = Library(_chosen(names), contrib=True, timed=True, thorough=True)
    RewriteState.start(load(model).graph, library, Roofline().delta)
    rows = []
    for row in list_rules(names):
        stats = library.stats.get(row["name"])
        if stats is not None:
            found = {
                "matched": stats.matched,
                "admitted": stats.admitted,
                "refused": dict(stats.refused.most_common()),
                "ms": stats.seconds * 1e3,
            }
            rows.append(row | found)
    return sorted(rows, key=lambda r: -r["ms"])


def verify_files(
    original: Source,
    new: Source,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Verification:
    """Whether two models compute the same. Raises ModelError, BackendError, VerificationError."""
    _check_seed(seed)
    load(new)  # says what is wrong with the file
    return verify(
        _runnable(original), _runnable(new), imported=load(original, shapes=shapes), inputs=inputs, seed=seed
    )


def bench(
    model: Source,
    against: Source | None = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    threads: int | None = None,
    time_limit: float = 20.0,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Latency of a model in milliseconds, and how many times faster it is than `against`.

    Without `against` it is measured against itself, which shows how far the machine can be trusted.
    """
    _check_seed(seed)
    imported = load(model, shapes=shapes)
    with tempfile.TemporaryDirectory(prefix="xrlflow-") as folder:
        now = time.monotonic()
        job = _Job(
            imported, model, "greedy", "roofline", 0, 1.0, seed, threads or default_threads(), None,
            now, now + time_limit, 1.0, folder, Library(()), None, {},
        )  # fmt: skip
        feeds = dict(user_case(imported, inputs).feeds) if inputs is not None else _feeds(job)
        baseline = _runnable(against) if against is not None else job.original
        measured = measure([baseline, job.original], feeds, threads=job.threads, time_limit=time_limit)
    before, after = measured.latencies[0], measured.latencies[1]
    return {
        "model": imported.name,
        "latency_ms": after.median_ms,
        "latency_p10_ms": after.p10_ms,
        "latency_p90_ms": after.p90_ms,
        "against": str(against) if against is not None else "itself",
        "against_ms": before.median_ms,
        "speedup": measured.speedup.median,
        **bounds("speedup", measured.speedup),
        **bounds("control", measured.control),
        "samples": measured.samples,
        "threads": measured.threads,
        "disturbed": measured.load.disturbed,
    }


@dataclass(frozen=True, slots=True, eq=False)
class Tuned:
    """A model whose kernels were tuned; `save` writes the shared library.

    `speedup`: of the compiled model over the original in ONNX Runtime, measured in fresh processes, or, on a remote
    device (`device`), of the better tuned model over the untuned one, in one session; None if not measured.
    """

    found: TunedModel
    speedup: SpeedUp | None
    control: SpeedUp | None
    verification: Verification | None
    device: str | None = None
    notes: tuple[str, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Raises BackendError if the file cannot be written."""
        self.found.model.save(path)

    def to_json(self) -> dict[str, Any]:
        tuning = self.found.tuning
        return {
            "kernels": [
                {
                    "name": result.task.name, "calls": result.task.weight, "flops": result.task.flops,
                    "best_us": finite(result.seconds * 1e6), "trials": result.trials, "measured": result.measured,
                    "failed": result.failed, "error": result.error,
                }
                for result in tuning.tasks
            ],
            "device": self.device, "against": "onnxruntime" if self.device is None else "untuned",
            "stop": tuning.stop.name.lower(), "seconds": tuning.seconds, "proposing": tuning.proposing,
            "measuring": tuning.measuring, "onnxruntime_ms": self.found.onnxruntime_ms,
            "untuned_ms": self.found.untuned_ms, "tuned_ms": self.found.tuned_ms,
            "rewritten_ms": self.found.rewritten_ms, "notes": list(self.notes),
            "speedup": self.speedup.median if self.speedup else None,
            **bounds("speedup", self.speedup), **bounds("control", self.control),
            "verified": self.verification.verified if self.verification is not None else None,
            "max_error": finite(self.verification.max_error) if self.verification is not None else None,
            "written": self.found.written,
        }  # fmt: skip


def tune(
    model: Source,
    *,
    method: str = "chameleon",
    trials: int = 512,
    batch: int = 16,
    time_limit: float = 600.0,
    cpu: str | None = None,
    triple: str | None = None,
    remote: str | Remote | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    threads: int | None = None,
    seed: int = 0,
    store: str | os.PathLike[str] | None = None,
    rewrite: bool = True,
    measure: bool = True,
    verify: bool = True,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    listener: Listener | None = None,
) -> Tuned:
    """Compile a model with TVM, its kernels tuned by measurement.

    `method`: "chameleon" (reinforcement learning), "evolutionary" (MetaSchedule's own), "random", "annealing" or
    "beam". `trials`: kernels that are built and measured in all, `batch` of one at a time. `time_limit`: seconds of
    tuning. `cpu`, `triple` and `remote` are those of `optimize`: kernels are built here, and timed on the remote
    device. What was measured is kept in `store` (a file; by default in the user's cache), so that a second run goes on
    where the first ended. With `rewrite` the graph that greedy search finds (by the roofline) is tuned beside the
    original's, and the faster one taken (but not without `measure`). Raises ModelError, BackendError,
    VerificationError, StoreError or OptionError for what the caller can put right, and VerificationFailed.
    """
    methods = {m.value: m for m in Method}
    if method not in methods:
        raise OptionError(f"method {method!r} is not known: choose of {', '.join(methods)}")
    if trials < 0 or batch < 1 or not time_limit > 0:
        raise OptionError("trials must not be negative, the batch and the time limit must be above zero")
    _check_seed(seed)
    place = _place(cpu, triple, remote, threads)
    place.check_runs()
    imported = load(model, shapes=shapes, fix_shapes=True)
    library = Library(LIBRARY, backend="tvm", runs=lowering.runs)
    lowering.check_supported(imported, library)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="xrlflow-") as folder, Store(store) as records:
        records.check()
        job = _Job(
            imported, model, "greedy", "roofline", 1000, 1.0, seed, threads or default_threads(), None,
            begin, begin + time_limit, 1.2, folder, library, listener, shapes or {},
            place=place,
        )  # fmt: skip
        graphs = [job.write(graph) for graph in _graphs_to_tune(job, rewrite and measure)]
        if measure:
            job.feeds = dict(user_case(imported, inputs).feeds) if inputs is not None else _feeds(job)

        def tell(progress: Progress) -> None:
            job.say(
                "tune", progress.spent, progress.budget, f"{progress.task.name} {progress.best * 1e6:.1f} us"
            )

        hurried = job.hurried_at is not None
        try:
            found = lowering.tune_model(
                job.original, graphs, job.feeds, method=methods[method], trials=0 if hurried else trials,
                batch=batch, time_limit=time_limit, place=place, shapes=job.shapes, seed=seed, store=records,
                folder=folder, listener=tell, hurried=hurried,
            )  # fmt: skip
        except PoolError as error:
            raise BackendError(f"{error} (what was measured is kept: the same command goes on)") from error
        verification: Verification | None = None
        if verify:
            with lowering.running(place, found.path, found.model) as runner:
                verification = _verify_compiled(job, runner, found.model.sizes, inputs)
        compared = found.compared
        if measure and place.remote is None:
            job.deadline = time.monotonic() + (8.0 if hurried or found.tuning.interrupted else 20.0)
            compared = _final(job, found.path)
    return Tuned(
        found,
        compared.speedup if compared is not None else None,
        compared.control if compared is not None else None,
        verification,
        place.device,
        (*job.notes, *found.remarks),
    )


def _graphs_to_tune(job: _Job, rewrite: bool) -> list[Graph]:
    """The original's graph, as TVM can lower it, and what the search makes of it, if that costs less."""
    # Of an unknown machine: what is tuned must not depend on a measurement.
    model = Roofline(bindings=job.imported.bindings)
    if not rewrite:
        return [simplify(job.imported.graph, job.library, model.cost)[0]]
    base = _start(job, model)
    result = _search(job, base, model)
    if result.interrupted:
        job.notes.append("interrupted: nothing was tuned, the best so far is kept")
        job.hurry()
    found = [base.state.graph]
    if result.best.cost < base.cost:
        if job.fits(result.best):
            found.append(result.best.state.graph)
        else:
            job.notes.append(f"the best graph exceeds {job.max_growth:g} times the input's size")
    return found


def check_writable(path: str | os.PathLike[str], *, library: bool = False) -> None:
    """Raises ModelError or OptionError at once if a result (`library`: a compiled one) could not be written there."""
    target = Path(path)
    if library and target.suffix != SUFFIX:
        raise OptionError(
            f"{target}: a compiled model is a shared library: give it a name that ends in {SUFFIX}"
        )
    folder = target.parent
    if target.is_dir():
        raise ModelError(f"{target}: is a folder: name the file to write")
    if not folder.is_dir():
        raise ModelError(f"{target}: there is no folder {folder}: create it first")
    try:
        files.check(target)
    except OSError as error:
        raise ModelError(f"{target}: cannot be written ({error.strerror}): choose another output") from error


def _runnable(source: Source) -> str | bytes:
    """A model as the runtime takes it."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    serialized: bytes = source.SerializeToString()
    return serialized


def _read_trace(path: str | os.PathLike[str]) -> tuple[Step, ...]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return tuple(
            Step(s["rule"], s["family"], (s["rule"], tuple(s["at"])), s["cost"]) for s in data["steps"]
        )
    except FileNotFoundError as error:
        raise OptionError(f"{path}: there is no such trace: check the path") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{path}: not a trace of xrlflow ({error}): write one with --trace") from error


def _write_text(path: str | os.PathLike[str], content: str) -> None:
    try:
        files.write(path, content.encode())
    except OSError as error:
        raise ModelError(
            f"{os.fspath(path)}: cannot be written ({error.strerror}): choose another file"
        ) from error
