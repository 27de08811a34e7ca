"""The contents of a report page as plain values. The page reads the JSON of `to_json`, and `--json` prints it."""

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
"""The version of the data. A page can be made from a trace only if its data have this version."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured comparison: how many times faster a model is, with the 95% interval."""

    group: str  # "result", "decision", "control" or "trial"
    name: str
    median: float
    low: float | None  # None: too few measurements for an interval
    high: float | None
    kept: bool | None = None  # whether a trial's proposal was accepted; None: the measurement is no trial

    @staticmethod
    def of(group: str, name: str, ratio: SpeedUp | Ratio, kept: bool | None = None) -> Measurement:
        bounded = 0.0 < ratio.low <= ratio.high < float("inf")
        return Measurement(
            group, name, ratio.median, ratio.low if bounded else None, ratio.high if bounded else None, kept
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
    """The course of a search, in modelled seconds."""

    path: tuple[float, ...]  # the cost at the start and after each substitution that led to the best graph
    rules: tuple[str, ...]  # the rules of these substitutions
    progress: tuple[
        tuple[int, float], ...
    ]  # (number of expanded graphs, least cost so far), whenever the least cost changed
    kept: bool  # the path is that of the result; otherwise that of the best proposal, which was rejected

    def to_json(self) -> dict[str, Any]:
        return {
            "path": list(self.path), "rules": list(self.rules), "progress": [list(p) for p in self.progress],
            "kept": self.kept,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One result, compared with the original. A field is None or empty if its phase was not run."""

    name: str
    after: Drawing | None
    substitutions: tuple[Substitution, ...] = ()
    rules: tuple[RuleText, ...] = ()
    report: Report | None = None
    measured: tuple[Measurement, ...] = ()
    ratios: tuple[float, ...] = ()  # how many times faster the new model ran, in each measuring process
    controls: tuple[float, ...] = ()  # the same ratios of the original against itself
    verification: Verification | None = None
    curve: Curve | None = None
    operators_before: OperatorProfile | None = None
    operators_after: OperatorProfile | None = None
    lines: tuple[str, ...] = ()  # notes, such as why there are no times by operator
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
    """A model and its results: `optimize` has one result, `compare` several, `view` one or none."""

    kind: str  # the command
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


def measurements(report: Report, compared: RepeatedComparison | None) -> tuple[Measurement, ...]:
    """The comparisons of a report, the last one first, then those of the selection."""
    decisions = []
    if report.speedup is not None:
        decisions.append(Measurement.of("result", "the result, measured after the decision", report.speedup))
    if report.decided is not None:
        decisions.append(Measurement.of("decision", "the measurement that decided", report.decided))
    elif compared is not None and compared.speedup is not None and report.speedup is None:
        decisions.append(Measurement.of("decision", "the last comparison", compared.speedup))
    if report.control is not None:
        decisions.append(Measurement.of("control", "the original against itself (A/A)", report.control))
    trials = (
        Measurement.of("trial", f"{t.proposal}, against {t.against}", t.ratio, t.accepted)
        for t in report.trials
        if t.ratio.median > 0.0  # 0: the model could not be run
    )
    return (*decisions, *trials)
