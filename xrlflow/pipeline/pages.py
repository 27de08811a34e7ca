"""Collects the data of report pages from an optimisation, from a trace, or from files."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rewrite_rules import LIBRARY
from xrlflow.backends import BackendError, RepeatedComparison
from xrlflow.backends.library_files import library_of
from xrlflow.backends.onnxruntime import with_library
from xrlflow.backends.onnxruntime.profile import OperatorProfile, profile_operators
from xrlflow.ir import Graph
from xrlflow.ir.exchange import FORMATS, serialised, to_labelled
from xrlflow.onnxio import ImportedModel, ModelError, Source, load
from xrlflow.options import OptionError, Options
from xrlflow.pipeline.artifact import runnable
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.finish import Finished
from xrlflow.pipeline.outputs import check_writable
from xrlflow.pipeline.prepare import Early, Start, opened, with_feeds
from xrlflow.report.page.advice import advice
from xrlflow.report.page.changes import Changes, Substitution, differences
from xrlflow.report.page.document import VERSION, Curve, Page, RuleText, Run, measurements
from xrlflow.report.page.drawing import Drawing, draw
from xrlflow.report.page.environment import environment
from xrlflow.report.page.html import page_html
from xrlflow.rewrite import AnyRule
from xrlflow.search import Path as Steps
from xrlflow.search import SearchNode
from xrlflow.storage import files

if TYPE_CHECKING:
    import networkx

    from xrlflow.pipeline.results import Result

_PROOFS = {
    "field": "proven: both sides agree over prime fields, in float64 and in ONNX Runtime",
    "numeric": "proven with numbers: both sides agree in float64 and in ONNX Runtime",
}


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The data from the phases of an optimisation that a page shows in addition to the report."""

    context: Context
    before: tuple[Early, ...]
    base: SearchNode
    accepted: SearchNode | None
    best: SearchNode  # the best graph of the search, accepted or not
    progress: tuple[tuple[int, float], ...]  # see `Explored`
    compared: RepeatedComparison | None

    @staticmethod
    def of(context: Context, start: Start, explored: Explored, finished: Finished) -> Evidence:
        return Evidence(
            context, start.before, start.base, finished.accepted, explored.result.best, explored.progress,
            finished.compared,
        )  # fmt: skip


def result_page(results: Sequence[Result], *, profiled: bool = True) -> Page:
    """The page of one result, or of several results of one model. `profiled`: measure the time of each operator first,
    for about a second for each model."""
    first = results[0].evidence
    options, imported = first.context.options, first.context.imported
    report = results[0].report
    changed = report.precision is not None and not report.returned_original
    before = drawing("in another precision" if changed else "original", imported, imported.graph)
    profile: OperatorProfile | str | None = None
    runs = []
    for result in results:
        profiles = _profiles(result, profile) if profiled else (None, None, ())
        profile = profiles[0]
        runs.append(_run(result, before, *profiles))
    asked = {
        "seed": str(options.seed), "time limit": f"{options.time_limit:g} s", "cost model": options.cost_name,
        "backend": options.backend,
    }  # fmt: skip
    title = imported.name
    kind = "optimize" if len(results) == 1 else "compare"
    return Page(kind, title, before, tuple(runs), environment(results[0].report.threads, asked))


def drawing(title: str, imported: ImportedModel, graph: Graph) -> Drawing:
    """The drawing of a graph of a model, with the names from the model's file."""
    declared = imported.frame.graph
    names = [[v.name for v in declared.input], [v.name for v in declared.output]]
    return draw(title, graph, imported.labels, names)


def _run(
    result: Result,
    before: Drawing,
    profile_before: OperatorProfile | None,
    profile_after: OperatorProfile | None,
    lines: tuple[str, ...],
) -> Run:
    evidence, report = result.evidence, result.report
    imported, accepted, compared = evidence.context.imported, evidence.accepted, evidence.compared
    after = drawing("result", imported, result.graph) if accepted is not None else None
    changes = _changes(evidence) if accepted is not None else Changes()
    shapes = [imported.graph.type(value).shape for value in imported.graph.inputs]
    opened = any(shape is None or not all(isinstance(d, int) for d in shape) for shape in shapes)
    best = accepted if accepted is not None else evidence.best
    start = report.cost_before if accepted is not None else evidence.base.cost
    return Run(
        name=report.search,
        after=after,
        substitutions=changes.substitutions(before, after) if after is not None else (),
        rules=tuple(_texts({rule for rule, _ in changes.rules} | {s.rule for s in best.trace}, result)),
        report=report,
        measured=measurements(report, compared),
        ratios=compared.ratios if compared is not None else (),
        controls=compared.controls if compared is not None else (),
        verification=result.verification,
        curve=Curve(
            (start, *(step.cost for step in best.trace)),
            tuple(step.rule for step in best.trace),
            evidence.progress,
            accepted is not None,
        ),
        operators_before=profile_before,
        operators_after=profile_after,
        lines=lines,
        advice=advice(report, result.verification, profile_after, imported.bindings, opened),
    )


def _changes(evidence: Evidence) -> Changes:
    """The edits that the substitutions make, in order."""
    assert evidence.accepted is not None
    changes = Changes()
    for part in evidence.before:
        _note(changes, f"{part.body}/" if part.body else "", part.path, part.cost)
    _note(changes, "", evidence.accepted.path, evidence.base.cost)
    return changes


def _note(changes: Changes, scope: str, path: Steps | None, cost: float | None) -> None:
    """Add the changes that the substitutions of a path make. `cost`: the modelled seconds before the substitutions;
    None: unknown.
    """
    for part in () if path is None else path.parts():
        gain = None if cost is None else cost - part.step.cost
        cost = None if cost is None else part.step.cost
        changes.step(scope, part.step.rule, gain, part.edit)


def _texts(names: set[str], result: Result) -> Iterator[RuleText]:
    """The equations and proofs of these rules."""
    context = result.evidence.context
    accepted = result.evidence.accepted
    ours = {rule.name for rule in LIBRARY}
    rules: dict[str, AnyRule] = dict(context.library.rules)
    if accepted is not None:
        rules.update(accepted.state.library.rules)
    for name in sorted(names & rules.keys()):
        rule = rules[name]
        proof = _PROOFS[rule.proof]
        if rule.relies_on:
            proof = f"{proof}; it relies on this: {rule.relies_on}"
        if rule.assumes:
            proof = f"{proof}; it assumes: {rule.assumes}"
        if rule.may_round_inputs:
            proof = f"{proof}; it may lose digits that cancel"
        if rule.rounds_once:
            proof = f"{proof}; it rounds to float16 once, the original in between, too"
        if rule.may_lose_errors:
            proof = (
                f"{proof}; it may have a value where the original fails: {', '.join(rule.may_lose_errors)}"
            )
        if context.options.trust_rules and name not in ours:
            proof = "not proven: a rule of your own, used with --trust-rules"
        yield RuleText(name, rule.family, rule.equation, proof)


# --- measured times of operators ---


def _profiles(
    result: Result, earlier: OperatorProfile | str | None
) -> tuple[OperatorProfile | None, OperatorProfile | None, tuple[str, ...]]:
    """The profiles of the original (`earlier`, if it was profiled before) and of the result, and lines that say why
    one is missing.
    """
    context = result.evidence.context
    options = context.options
    if options.remote is not None:
        return None, None, ("No times by operator: the result runs on a remote device.",)
    if context.feeds is None:
        return None, None, ("No times by operator: nothing was measured (--no-measure).",)
    if options.session_options is not None and not isinstance(options.session_options, Mapping):
        return (
            None,
            None,
            ("No times by operator: the session options are an object, which cannot be copied.",),
        )
    profiler = _Profiler(dict(context.feeds), context.threads, options.session_options)
    before = earlier if isinstance(earlier, OperatorProfile) else profiler.of(context.original.runnable)
    after: OperatorProfile | None = None
    if result.compiled is not None:
        profiler.lines.append("No times by operator of the result: it does not run in ONNX Runtime.")
    elif not result.returned_original:
        with tempfile.TemporaryDirectory(prefix="xrlflow-") as folder:
            path = os.path.join(folder, "model.onnx")
            try:
                result.save(path)
                after = profiler.of(path, kernels=True)
            except (ModelError, BackendError) as error:
                profiler.lines.append(f"No times by operator of the result: {error}.")
    return before, after, tuple(profiler.lines)


class _Profiler:
    """Profiles models on the same inputs. `lines`: why models could not be profiled."""

    def __init__(
        self, feeds: Mapping[str, Any], threads: int | None, session_options: Mapping[str, str] | None
    ) -> None:
        self.feeds, self.threads, self.session_options = feeds, threads, session_options
        self.lines: list[str] = []

    def of(self, model: str | bytes, kernels: bool = False) -> OperatorProfile | None:
        """The profile of a model; None if it does not run. `kernels`: load the library of kernels in the model's
        folder.
        """
        options = self.session_options
        if kernels and (library := library_of(model)) is not None:
            with_kernels = with_library(options, library)
            assert isinstance(with_kernels, Mapping)
            options = with_kernels
        try:
            return profile_operators(model, self.feeds, threads=self.threads, session_options=options)
        except BackendError as error:
            self.lines.append(f"No times by operator: {error}.")
            return None


# --- pages from files ---


def view(model: Source, other: Source | None, options: Options) -> Page:
    """The page of one model, or of two, without an optimisation. With `options.measure`, operators are timed."""
    with opened(model, options, None, time.monotonic()) as context:
        context = with_feeds(context)
        return _pair_page(model, other, context.feeds, context.threads, context.imported)


def _pair_page(
    model: Source,
    other: Source | None,
    feeds: Mapping[str, Any] | None,
    threads: int,
    imported: ImportedModel,
) -> Page:
    before = drawing("A" if other is not None else "model", imported, imported.graph)
    profiler = _Profiler(feeds, threads, None) if feeds is not None else None
    profile = profiler.of(runnable(model)) if profiler is not None else None
    lines = [] if profiler is not None else ["No times by operator: they were not asked for (--no-measure)."]
    after: Drawing | None = None
    substitutions: tuple[Substitution, ...] = ()
    profile_after: OperatorProfile | None = None
    title = imported.name
    if other is not None:
        second = load(other)
        title = f"{imported.name} and {second.name}"
        after = drawing("B", second, second.graph)
        substitutions = differences(imported.graph, second.graph, before, after)
        profile_after = profiler.of(runnable(other)) if profiler is not None else None
    lines += profiler.lines if profiler is not None else []
    run = Run(
        "view",
        after,
        substitutions,
        operators_before=profile,
        operators_after=profile_after,
        lines=tuple(lines),
    )
    return Page("view", title, before, (run,), environment(threads, {}))


def data_of_trace(trace: str | os.PathLike[str] | files.StandardInput) -> Mapping[str, Any]:
    """The data of the page in a trace. Raises OptionError for a file that is no trace, or has no such data."""
    path = trace.name if isinstance(trace, files.StandardInput) else os.fspath(trace)
    try:
        text = trace if isinstance(trace, bytes) else Path(trace).read_text(encoding="utf-8")
        data = json.loads(text, parse_constant=_no_number)
        count, page = len(data["steps"]), data.get("page")
    except FileNotFoundError as error:
        raise OptionError(f"{path}: there is no such trace: check the path") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OptionError(f"{path}: not a trace of xrlflow ({error}): write one with --trace") from error
    if not isinstance(page, dict) or page.get("version") != VERSION or not isinstance(page.get("title"), str):
        raise OptionError(
            f"{path}: it has {count} substitutions, but neither graphs nor measurements of this version's page: "
            "write it again with --trace"
        )
    return page


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def write_page(data: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the page with the data of `Page.to_json`. Raises ModelError if the file cannot be written."""
    _write(path, page_html(data).encode())


def write_networkx(model: Source, path: str | os.PathLike[str]) -> networkx.MultiDiGraph:
    """Write the graph of a model for other programs, in the format of the path's extension (`ir.exchange`).

    Returns what was written. Raises ModelError, or OptionError for an unknown extension.
    """
    check_writable(path)
    ending = Path(path).suffix
    if ending not in FORMATS:
        raise OptionError(f"{os.fspath(path)}: a graph is written as {' or '.join(FORMATS)}: name it so")
    graph = to_labelled(load(model).graph)
    _write(path, serialised(graph, ending))
    return graph


def _write(path: str | os.PathLike[str], content: bytes) -> None:
    try:
        files.write(Path(path), content)
    except OSError as error:
        raise ModelError(
            f"{os.fspath(path)}: cannot be written ({error.strerror}): choose another file"
        ) from error
