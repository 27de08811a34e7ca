"""What an optimisation returns: the model, the substitutions, and the report."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rewrite_rules import LIBRARY
from rewrite_rules.placement import without_placement
from xrlflow.backends import RepeatedComparison
from xrlflow.backends.results import SpeedUp
from xrlflow.backends.tvm import TvmModel
from xrlflow.backends.tvm.library.hybrid import Hybrid
from xrlflow.ir import Graph
from xrlflow.onnxio import ImportedModel, Source, save, save_original, to_proto
from xrlflow.onnxio.versions import opset_of
from xrlflow.options import VNNI, OptionError
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.finish import Finished
from xrlflow.pipeline.pages import Evidence, result_page
from xrlflow.pipeline.prepare import Start
from xrlflow.pipeline.trace import write_trace
from xrlflow.pipeline.verifier import remarks
from xrlflow.report import Report, finite, operators
from xrlflow.report.page.html import page_html
from xrlflow.report.page.summary import summary_html
from xrlflow.search import Selection, TraceStep
from xrlflow.verify import Verification

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, eq=False)
class Result:
    """An optimised model, or the original if nothing better was found (`returned_original`).

    `speedup` is the measured speed-up over the original, as median and 95% interval; None if it was not measured.
    `trace` has all substitutions in order; the substitutions from before the search (by canonicalising rules, and in
    control-flow bodies) come first.
    """

    report: Report
    trace: tuple[TraceStep, ...]
    imported: ImportedModel
    graph: Graph
    source: Source
    max_growth: float
    opset: int | None
    evidence: Evidence
    verification: Verification | None = None
    selection: Selection | None = None
    compiled: TvmModel | None = None
    hybrid: Hybrid | None = None

    def __repr__(self) -> str:
        text = "the original" if self.returned_original else f"{self.report.nodes_after} operators"
        return f"<Result for {self.report.model}: {text} ({self.report.reason})>"

    @property
    def speedup(self) -> SpeedUp | None:
        return self.report.speedup

    @property
    def returned_original(self) -> bool:
        return self.report.returned_original

    @property
    def _unchanged(self) -> bool:
        """Whether `imported` is written as it was read: the original, or what a change of precision made of it."""
        return self.evidence.accepted is None

    @property
    def model(self) -> onnx.ModelProto:
        """The result as one ModelProto, without the library of kernels. Raises ModelError if it is larger than 2 GB."""
        if self.hybrid is not None:
            return self.hybrid.model
        if not self._unchanged:
            return to_proto(self.imported, self.graph, opset=self.opset)
        import onnx

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "original.onnx")
            save_original(self.imported, path)
            return onnx.load(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result to a file, completely or not at all.

        An original is written byte for byte. External data is written to `NAME.DIGEST.data` in the same folder; no
        other file is changed. A result with generated kernels has its library in the same folder, `NAME.so`. With TVM
        as the backend the result is a shared library. Raises ModelError or BackendError if a file cannot be written.
        """
        if self.compiled is not None:
            self.compiled.save(path)
        elif self.hybrid is not None:
            self.hybrid.save(path)
        elif self._unchanged:
            save_original(self.imported, path)
        else:
            save(self.imported, self.graph, path, opset=self.opset, max_growth=self.max_growth)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the substitutions as JSON, for `replay` and `xrlflow report`. The file includes the times of operators
        if `page` or `report_html` was called before. Raises ModelError if the file cannot be written, and OptionError
        if the precision was changed: the substitutions are not those of the original.
        """
        if self.report.precision is not None:
            raise OptionError("precision: a trace has substitutions of the file, which is converted before")
        timed = self.__dict__.get("page")
        page = timed if timed is not None else result_page([self], profiled=False).to_json()
        before = [len(part.steps) for part in self.evidence.before] if self.trace else []
        write_trace(path, self.report.model, self.trace, before, page)

    @cached_property
    def page(self) -> dict[str, Any]:
        """The data of the report page, as JSON values. The first call measures the times of operators (two seconds)."""
        return result_page([self]).to_json()

    def report_html(self) -> str:
        """The report as one HTML file that needs no network."""
        return page_html(self.page)

    def _repr_html_(self) -> str:
        """The result in a few lines of HTML, which a notebook shows."""
        return summary_html(self.report)


def result_of(context: Context, start: Start, explored: Explored, finished: Finished) -> Result:
    """Assemble the result, with its report."""
    node = finished.accepted if finished.accepted is not None else start.base
    steps = (*start.early, *node.trace) if finished.accepted is not None else ()
    graph = node.state.graph if finished.hybrid is not None else without_placement(node.state.graph)
    return Result(
        _report(context, start, explored, finished, steps),
        steps,
        context.imported,
        graph,
        context.original.source,
        context.options.max_growth,
        context.options.opset,
        Evidence.of(context, start, explored, finished),
        finished.verification,
        finished.selection,
        finished.compiled,
        finished.hybrid.loaded() if finished.hybrid is not None else None,
    )


def _report(
    context: Context, start: Start, explored: Explored, finished: Finished, steps: tuple[TraceStep, ...]
) -> Report:
    options, imported, base, accepted = context.options, context.imported, start.base, finished.accepted
    verification, compared = finished.verification, finished.compared
    shipped: RepeatedComparison | None = compared if accepted is not None else None
    costs = finished.costs or (base.cost, accepted.cost if accepted is not None else base.cost)
    before = operators(base.state.graph)
    after = operators(accepted.state.graph) if accepted is not None else before
    return Report(
        model=imported.name,
        search=options.search if options.replay is None else "replay",
        cost_model=start.model.name,
        backend=options.backend,
        threads=finished.threads or context.threads,
        nodes_before=imported.nodes_before,
        nodes_after=sum(after.values()) if accepted is not None else imported.nodes_before,
        operators_before=before,
        operators_after=after,
        substitutions=Counter(s.rule for s in steps),
        cost_before=costs[0],
        cost_after=costs[1],
        expanded=explored.result.expanded,
        latency_before=compared.before if compared else None,
        latency_after=shipped.after if shipped else None,
        speedup=shipped.speedup if shipped else None,
        control=compared.control if compared else None,
        decided=compared.decided if compared else None,
        processes=compared.processes if compared else 0,
        verified=verification.verified if verification is not None and verification.compared else None,
        max_error=finite(verification.max_error)
        if verification is not None and verification.outputs
        else None,
        seconds=round(time.monotonic() - context.clock.begin, 3),
        phases=context.clock.phases,
        returned_original=accepted is None,
        reason=finished.reason,
        notes=_notes(context, finished, {s.rule for s in steps}),
        trials=finished.selection.trials if finished.selection is not None else (),
        at_sizes=dict(context.found_at) if accepted is not None else {},
        kernel_nodes=finished.hybrid.nodes if finished.hybrid is not None else 0,
        algorithms=finished.algorithms,
        exactness=str(verification.exactness)
        if verification is not None and verification.exactness is not None
        else "",
    )


def _notes(context: Context, finished: Finished, applied: Collection[str] = ()) -> tuple[str, ...]:
    """The notes of a result. `applied`: the names of the rules that made it."""
    notes = [*context.imported.notes, *context.notes]
    if any(rule.assumes == VNNI for rule in LIBRARY if rule.name in applied):
        assumed = VNNI in context.options.assuming
        where = "you say that it is exact there" if assumed else "that is exact on this one"
        hint = "" if assumed else "; --portable avoids it"
        notes.append(
            f"the result depends on the processor: it multiplies unsigned with signed bytes, and {where}{hint}"
        )
    own, asked = opset_of(context.imported.frame), context.options.opset
    if finished.accepted is None and asked is not None and asked != own:
        notes.append(
            f"the original is kept as it is, at opset {own}: only another graph is written at opset {asked}"
        )
    if finished.compared is not None and finished.compared.disturbed:
        notes.append("other programs used the processor while the result was measured")
    if finished.verification is not None and finished.verification.verified:
        notes.extend(remarks(finished.verification))
    return tuple(dict.fromkeys(notes))  # two searches may add the same note
