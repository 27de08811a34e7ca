"""What a report page shows, as plain values. `to_json` is what the page reads, and what `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.onnxruntime.profile import OperatorProfile
from xrlflow.backends.results import RepeatedComparison, SpeedUp
from xrlflow.report.page.changes import Substitution
from xrlflow.report.page.drawing import Drawing
from xrlflow.report.report import Report
from xrlflow.search import Ratio
from xrlflow.verify import Verification

VERSION = 1
"""Of the data. A page is made of a trace only if its data have this version."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured comparison: how many times faster, with its 95% interval (None: too few measurements for one).

    `group`: "result", "decision", "control" or "trial". `kept`: whether what was measured was kept; None: no trial.
    """

    group: str
    name: str
    median: float
    low: float | None
    high: float | None
    kept: bool | None = None

    @staticmethod
    def of(group: str, name: str, found: SpeedUp | Ratio, kept: bool | None = None) -> Measured:
        known = 0.0 < found.low <= found.high < float("inf")
        return Measured(
            group, name, found.median, found.low if known else None, found.high if known else None, kept
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "group": self.group, "name": self.name, "median": self.median, "low": self.low, "high": self.high,
            "kept": self.kept,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class RuleText:
    """A rule that was used: its equation, and how it is proven."""

    name: str
    family: str
    equation: str
    proof: str

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "family": self.family, "equation": self.equation, "proof": self.proof}


@dataclass(frozen=True, slots=True)
class Curve:
    """The search. `path`: modelled seconds at the start and after each substitution that led to the best graph.

    `progress`: (graphs expanded, modelled seconds of the best so far) whenever that changed. `kept`: the path is that
    of the result; otherwise that of the best proposal, which was not kept.
    """

    path: tuple[float, ...]
    rules: tuple[str, ...]
    progress: tuple[tuple[int, float], ...]
    kept: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "path": list(self.path), "rules": list(self.rules), "progress": [list(p) for p in self.progress],
            "kept": self.kept,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One result beside the original. None, or nothing, where something was not done or not measured.

    `ratios`, `controls`: how many times faster the new model, and the original itself, ran in each measuring process.
    `lines`: why there are no times by operator, and the like.
    """

    name: str
    after: Drawing | None
    substitutions: tuple[Substitution, ...] = ()
    rules: tuple[RuleText, ...] = ()
    report: Report | None = None
    measured: tuple[Measured, ...] = ()
    ratios: tuple[float, ...] = ()
    controls: tuple[float, ...] = ()
    verification: Verification | None = None
    curve: Curve | None = None
    operators_before: OperatorProfile | None = None
    operators_after: OperatorProfile | None = None
    lines: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        checked = self.verification
        return {
            "name": self.name,
            "after": self.after.to_json() if self.after is not None else None,
            "substitutions": [s.to_json() for s in self.substitutions],
            "rules": [r.to_json() for r in self.rules],
            "report": self.report.to_json() if self.report is not None else None,
            "measured": [m.to_json() for m in self.measured],
            "ratios": list(self.ratios),
            "controls": list(self.controls),
            "verification": {**checked.to_json(), "message": checked.message()} if checked is not None else None,
            "curve": self.curve.to_json() if self.curve is not None else None,
            "operators_before": self.operators_before.to_json() if self.operators_before else None,
            "operators_after": self.operators_after.to_json() if self.operators_after else None,
            "lines": list(self.lines),
            "advice": list(self.advice),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Page:
    """A model and its results: one of `optimize`, several of `compare`, one or none of `view`.

    `kind`: which of these commands it is of.
    """

    kind: str
    title: str
    before: Drawing
    runs: tuple[Run, ...]
    environment: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "kind": self.kind,
            "title": self.title,
            "before": self.before.to_json(),
            "runs": [run.to_json() for run in self.runs],
            "environment": dict(self.environment),
        }


def measurements(report: Report, compared: RepeatedComparison | None) -> tuple[Measured, ...]:
    """The comparisons of a report, the last one first, then those of the selection."""
    found = []
    if report.speedup is not None:
        found.append(Measured.of("result", "the result, measured after the decision", report.speedup))
    if report.decided is not None:
        found.append(Measured.of("decision", "the measurement that decided", report.decided))
    elif compared is not None and compared.speedup is not None and report.speedup is None:
        found.append(Measured.of("decision", "the last comparison", compared.speedup))
    if report.control is not None:
        found.append(Measured.of("control", "the original against itself (A/A)", report.control))
    trials = (
        Measured.of("trial", f"{t.proposal}, against {t.against}", t.ratio, t.kept)
        for t in report.trials
        if t.ratio.median > 0.0  # 0: it could not be run
    )
    return (*found, *trials)
