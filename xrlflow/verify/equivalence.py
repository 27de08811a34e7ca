"""Whether two ONNX models compute the same: signatures, then outputs on several inputs of several sizes.

The models are run one after the other, so that only one ONNX Runtime session is in memory. `Reference` keeps the
outputs of the original, so that several new models (those of a bisection, for instance) cost one run of the original.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from xrlflow.backends.onnxruntime.session import Options
from xrlflow.backends.protocol import BackendError, CompiledModel, OutOfTime
from xrlflow.common import deadline
from xrlflow.ir import Body, Graph
from xrlflow.onnxio import ImportedModel, ModelError, load
from xrlflow.verify.apart import run_apart
from xrlflow.verify.branches import GUARD
from xrlflow.verify.cases import Drawn
from xrlflow.verify.compare import (
    Judgement,
    Leg,
    Licence,
    by_deviation,
    is_float,
    judge_exact,
    judge_floats,
)
from xrlflow.verify.dims import Bindings
from xrlflow.verify.errors import OriginalFails, VerificationError
from xrlflow.verify.exercise import Runs, exercise, run_empty
from xrlflow.verify.input_constraints import random_operators
from xrlflow.verify.inputs import Case, user_case
from xrlflow.verify.near_ties import undecided
from xrlflow.verify.quantised import Judged, Quantised, judge_whole, samples_of
from xrlflow.verify.reference import Sizes
from xrlflow.verify.reruns import Reruns
from xrlflow.verify.runner import Array, Model, Runner, first_line, flat, opened
from xrlflow.verify.signature import Signature, differences, signature, signature_of_proto
from xrlflow.verify.yardsticks import Known, by_float64, on_demand

FLOAT64_FLOPS = 3e10
"""Operations that all float64 evaluations of one verification may take together: a few seconds on two cores."""


class Status(Enum):
    VERIFIED = "verified"
    FAILED = "failed"
    NOT_COMPARABLE = "not comparable"  # the original gives other results in every run


@dataclass(frozen=True, slots=True)
class OutputReport:
    """The worst result of one output over all cases."""

    name: str
    type: str
    judgement: Judgement
    case: str  # the inputs of the worst result
    sides: frozenset[Leg] = frozenset()
    """Where ONNX Runtime's optimiser changes this output of the original: which of the two results it equals."""

    @property
    def row(self) -> tuple[str, ...]:
        """A row of a table with the columns HEADERS."""
        found = self.judgement
        exact = found.leg in (Leg.EXACT, Leg.LAYERS, Leg.TIE)
        return (
            self.name,
            self.type,
            found.leg.value,
            "" if exact else f"{found.error:.2g}",
            "" if exact else f"{found.tolerance:.2g}",
            str(found.worst) if found.worst is not None and not found.passed else "",
            "equal" if found.passed else "DIFFERENT",
        )


HEADERS = ("output", "type", "judged by", "error", "tolerance", "worst element", "verdict")


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of comparing two models."""

    status: Status
    outputs: tuple[OutputReport, ...] = ()  # the worst result of each output (several for a sequence or map)
    failures: tuple[str, ...] = ()  # sentences, the most important first
    reason: str = ""  # why the models are not comparable
    notes: tuple[str, ...] = ()  # remarks that change no verdict
    bindings: tuple[Bindings, ...] = ()  # the choices of sizes that were run
    cases: int = 0  # the number of sets of inputs
    values: tuple[str, ...] = ()  # the kinds of values besides ordinary ones
    left_out: tuple[str, ...] = ()  # sizes that were too large to run, with reasons
    unexercised: tuple[str, ...] = ()  # branches that no input reached

    @property
    def verified(self) -> bool:
        return self.status is Status.VERIFIED

    @property
    def compared(self) -> bool:
        """Whether there is a verdict; False if time was too short, or nothing could be compared."""
        return self.status is not Status.NOT_COMPARABLE

    @property
    def sizes(self) -> str:
        """The choices of sizes that were run, as "n=2, s=11; n=1, s=3"."""
        return "; ".join(", ".join(f"{k}={v}" for k, v in chosen.items()) for chosen in self.bindings)

    @property
    def max_error(self) -> float:
        """The greatest absolute difference between elements of the two models, over all outputs of numbers."""
        return max((o.judgement.difference for o in self.outputs), default=0.0)

    @property
    def worst(self) -> OutputReport | None:
        """The output that used the largest part of its tolerance."""
        return max(self.outputs, key=lambda o: o.judgement.ratio, default=None)

    @property
    def tolerance(self) -> float:
        """The tolerance of the worst output."""
        return self.worst.judgement.tolerance if self.worst is not None else 0.0

    def to_json(self) -> dict[str, Any]:
        """The verification as JSON data: numbers, strings, lists and dicts."""
        return {
            "status": self.status.value,
            "verified": self.verified,
            "max_error": _finite(self.max_error),
            "cases": self.cases,
            "bindings": [dict(b) for b in self.bindings],
            "values": list(self.values),
            "left_out": list(self.left_out),
            "unexercised": list(self.unexercised),
            "failures": list(self.failures),
            "reason": self.reason,
            "notes": list(self.notes),
            "outputs": [
                {
                    "name": o.name,
                    "type": o.type,
                    "judged_by": o.judgement.leg.value,
                    "error": _finite(o.judgement.error),
                    "tolerance": _finite(o.judgement.tolerance),
                    "difference": _finite(o.judgement.difference),
                    "worst_element": str(o.judgement.worst) if o.judgement.worst is not None else None,
                    "case": o.case,
                    "equal": o.judgement.passed,
                }
                for o in self.outputs
            ],
        }

    def message(self, substitution: str | None = None) -> str:
        """The verdict in one line; for a failure with the output, its worst element, and the substitution if known."""
        if self.status is Status.VERIFIED:
            legs = sorted({o.judgement.leg.value for o in self.outputs})
            return (
                f"verified on {self.cases} sets of inputs, {max(1, len(self.bindings))} sizes ({', '.join(legs)}), "
                f"greatest difference {self.max_error:.3g}"
            )
        if self.status is Status.NOT_COMPARABLE:
            return f"cannot be verified: {self.reason}"
        text = f"the models differ: {self.failures[0]}"
        return text if substitution is None else f"{text}; the substitution that caused it: {substitution}"


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """Which random inputs to draw; see `Reference.of`. `other`: the model `against`, if it could be imported."""

    against: Model | None
    other: ImportedModel | None
    bindings: Bindings | None
    further: Iterable[int]
    samples: int
    sizes: int


def _undecided(reason: str) -> Verification:
    return Verification(Status.NOT_COMPARABLE, reason=reason)


def _late(cases: Sequence[Known]) -> str:
    """The text about cases that are left out for lack of time."""
    return f"{'; '.join(str(known.case) for known in cases[:3])}{', ...' if cases[3:] else ''} (there was no time)"


def _bindings(cases: Iterable[Known]) -> tuple[Bindings, ...]:
    """The choices of sizes of the cases, each once."""
    found: list[Bindings] = []
    for known in cases:
        if known.case.bindings and known.case.bindings not in found:
            found.append(known.case.bindings)
    return tuple(found)


def not_exercised(arm: str) -> str:
    """The note on a branch that no input reached. That of a guard names what the guard chooses (`GUARD`)."""
    guard = GUARD.fullmatch(arm)
    if guard is None:
        return f"not exercised: {arm}"
    if guard["taken"] == "then":
        return (
            f"not exercised: the kernels of {guard['region']}: no input has their sizes (--shape names them)"
        )
    return f"not exercised: the graph itself: all inputs have the sizes of {guard['region']}"


@dataclass(frozen=True, slots=True, eq=False)
class _Tried:
    """Cases on which the original was run."""

    drawn: Drawn[list[Any]]
    unexercised: tuple[str, ...] = ()
    empty: tuple[Known, ...] = ()  # cases with a size of 0
    strange: tuple[str, ...] = ()  # notes on cases with a size of 0 that were left out


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The original's signature, and its outputs on inputs on which it runs."""

    model: Model
    imported: ImportedModel
    declared: Signature
    known: tuple[Known, ...]
    seed: int
    threads: int | None
    session_options: Options | None
    incomparable: str = ""
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unexercised: tuple[str, ...] = ()
    float64_flops: float = FLOAT64_FLOPS
    empty: tuple[Known, ...] = ()
    """Cases with a size of 0. They are run in a separate process."""
    quantised: Quantised | None = None
    """The exact evaluation, layer by layer, of an original that is quantised."""
    reruns: Reruns = field(init=False)

    def __post_init__(self) -> None:
        made = Reruns(
            self.model, self.imported, self.seed, self.threads, self.session_options, self.float64_flops
        )
        object.__setattr__(self, "reruns", made)

    @staticmethod
    def of(
        model: Model,
        *,
        imported: ImportedModel | None = None,
        against: Model | None = None,
        inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        bindings: Bindings | None = None,
        further: Iterable[int] = (),
        seed: int = 0,
        samples: int = 2,
        sizes: int = 3,
        threads: int | None = None,
        session_options: Options | None = None,
        float64_flops: float = FLOAT64_FLOPS,
    ) -> Reference:
        """Run the original on `inputs`, or on random ones (see `cases.py`).

        - `against`: the model that will be judged. Its numbers and branches suggest inputs as well.
        - `bindings`: the user's sizes of dimensions (default: those of `imported`). They are one of the choices.
        - `further`: numbers around which sizes are chosen, after those that the models mention.
        - `samples`: how many sets of ordinary values. `sizes`: how many choices of sizes, before further ones.

        Raises OriginalFails, InputsNeeded, BadInputs, and ModelError if the file cannot be read.
        """
        if imported is None:
            imported = load(model)
        # The declared types, with the user's sizes where these will be written into the file.
        declared = signature_of_proto(imported.frame, imported.overridable)
        if not imported.fixed:
            declared = signature(model)
        base = Reference(
            model, imported, declared, (), seed, threads, session_options, float64_flops=float64_flops
        )
        random = random_operators(imported.graph)
        if random:
            return replace(base, incomparable=f"it has random operators ({', '.join(sorted(random))})")
        wanted = _Wanted(against, _other(against), bindings, further, samples, sizes)
        try:
            with opened(model, threads=threads, session_options=session_options) as runner:
                run = Runs(model, imported, runner)
                if inputs is not None:
                    tried = _Tried(Drawn([run.on(user_case(imported, inputs))]))
                else:
                    tried = base._try(run, wanted)
                known = tuple(
                    Known(case, [flat(o) for o in outputs], licences=run.licences(case))
                    for case, outputs in tried.drawn.cases
                )
                if _has_custom(imported.graph) and not _repeats(runner, known[0]):
                    reason = "the original gives other results when it is run again on the same inputs"
                    return replace(base, incomparable=reason)
        except OutOfTime:
            return replace(base, incomparable="there was no time to run the original")
        except BackendError as error:
            raise OriginalFails(f"the original cannot be run: {first_line(error)}") from error
        return base._knowing(known, tried, run.at)

    def _try(self, run: Runs, wanted: _Wanted) -> _Tried:
        """Run the original on random inputs, on inputs for every branch, and on inputs with a size of 0."""
        drawing = run.drawing(wanted.other, wanted.bindings, self.seed, wanted.further)
        try:
            drawn = drawing.all(wanted.samples, wanted.sizes)
        except VerificationError as error:
            if run.errors:
                raise type(error)(f"{error} (the last failure: {run.errors[-1]})") from error
            raise
        models = [(self.model, self.imported)]
        if wanted.against is not None and wanted.other is not None:
            models.append((wanted.against, wanted.other))
        unexercised = exercise(drawing, drawn, models, self.threads, self.session_options)
        without = drawing.empty(drawn.bindings[0])
        empty, strange = run_empty(
            run, self.model, without, self.threads, self.session_options, self.float64_flops
        )
        return _Tried(drawn, unexercised, empty, strange)

    def _knowing(self, known: tuple[Known, ...], tried: _Tried, at: Sizes) -> Reference:
        """A copy with the original's outputs, their tolerance scales, and notes."""
        quantised = Quantised.of(
            self.model,
            self.imported,
            samples_of(known, at.flops),
            self.float64_flops,
            threads=self.threads,
            session_options=self.session_options,
        )
        by_layers = quantised is not None and quantised.judges_all
        notes = [*(quantised.notes if quantised is not None else ()), *tried.strange]
        if not by_layers:
            notes.extend(by_float64(at, self.imported, known, self.float64_flops))
        found = replace(
            self,
            known=known,
            quantised=quantised,
            empty=tried.empty,
            left_out=_shortened(tried.drawn.left_out),
            unexercised=tried.unexercised,
        )
        if not by_layers:
            notes.extend(found.reruns.settle(known))
        notes.extend(found._by_deviation(run=not by_layers))
        notes.extend(_changed(self.declared, known))
        notes.extend(_empty_outputs(self.declared, known))
        notes.extend(map(not_exercised, tried.unexercised))
        return replace(found, notes=tuple(notes))

    def check(self, new: Model, nonempty: Sequence[str] = ()) -> Verification:
        """Judge a model, case by case, so that only the outputs of one case are in memory.

        `nonempty`: rules that were applied to the model and require sizes of at least 1. If there are any, outputs that
        differ at a size of 0 give only a note. A model that raises an error there, or crashes, fails nevertheless.
        """
        if self.incomparable:
            changed = differences(self.declared, signature(new))
            if changed:
                return Verification(Status.FAILED, failures=changed)
            return Verification(Status.NOT_COMPARABLE, reason=self.incomparable)
        failures = [*differences(self.declared, signature(new))]
        if failures:
            return Verification(Status.FAILED, failures=tuple(failures), notes=self.notes)
        try:
            judged = self.quantised.judge(new) if self.quantised is not None else Judged("")
        except OutOfTime:
            return _undecided("there was no time to run the new model")
        if self.quantised is not None and not judged.evaluated and deadline.over():
            return _undecided("there was no time to compare the new model layer by layer")
        try:
            with opened(new, threads=self.threads, session_options=self.session_options) as runner:
                found = self._compare(runner, self.known, by_layers=judged.evaluated)
            found = _with_layers(found, judged)
            if found.verified:
                found = self._compare_empty(new, found, nonempty)
        except OutOfTime:
            return _undecided("there was no time to run the new model")
        except BackendError as error:
            reason = f"the new model cannot be loaded: {first_line(error)}"
            return Verification(Status.FAILED, failures=(reason,), notes=self.notes)
        bad = [r for r in found.outputs if not r.judgement.passed]
        if found.failures and deadline.over():
            return _undecided(f"there was no time to decide whether this is rounding: {found.failures[0]}")
        if bad and not judged.failures:
            broken = next((k for k in self.known if str(k.case) == bad[0].case), None)
            if broken is not None:
                found = replace(found, notes=(*found.notes, *self._without_optimizer(new, broken)))
        return found

    def check_compiled(self, new: CompiledModel, sizes: Mapping[str, tuple[int, ...]]) -> Verification:
        """Judge a model that is already loaded, in any runtime, and was compiled for inputs of these `sizes`.

        The caller guarantees its names and types. Not compared are cases of other sizes, and cases that override a
        default that is a constant of the compiled model. If no case remains, the result is "not comparable".
        """
        if self.incomparable:
            return Verification(Status.NOT_COMPARABLE, reason=self.incomparable)
        fitting = tuple(
            known
            for known in self.known
            if known.case.feeds.keys() <= sizes.keys() and _has_sizes(known.case, sizes)
        )
        if not fitting:
            return Verification(
                Status.NOT_COMPARABLE, reason="no input has the sizes that it was compiled for"
            )
        return self._compare(new, fitting)

    def tries(self, sizes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether some case has inputs of these sizes; inputs that `sizes` does not name may have any."""
        return any(_has_sizes(known.case, sizes) for known in self.known)

    def _compare(
        self, runner: CompiledModel | Runner, cases: Sequence[Known], by_layers: bool = False
    ) -> Verification:
        """Run a model on cases, and judge it. `by_layers`: outputs that depend on quantised numbers need only have the
        same shapes, types, NaN and infinities."""
        failures: list[str] = []
        reports: dict[str, OutputReport] = {}
        doubtful: list[_Doubt] = []
        left_out = self.left_out
        for at, known in enumerate(cases):
            if at and deadline.over():
                left_out = (*left_out, _late(cases[at:]))
                cases = cases[:at]
                break
            try:
                outputs = runner.run(known.case.feeds)
            except OutOfTime:
                if not at:
                    raise
                left_out = (*left_out, _late(cases[at:]))
                cases = cases[:at]
                break
            except BackendError as error:
                failures.append(f"the new model fails on {known.case}: {first_line(error)}")
                break
            doubtful.extend(self._judge(known, outputs, reports, by_layers))
        self._resolve(doubtful, reports)
        bad = [r for r in reports.values() if not r.judgement.passed]
        failures[:0] = [_sentence(report) for report in sorted(bad, key=lambda r: -r.judgement.ratio)]
        return Verification(
            Status.FAILED if failures else Status.VERIFIED,
            tuple(reports.values()),
            tuple(failures),
            notes=(*self.notes, *_kept(reports.values())),
            bindings=_bindings(cases),
            cases=len(cases),
            values=tuple(dict.fromkeys(k.case.values.name for k in cases if k.case.values.name)),
            left_out=left_out,
            unexercised=self.unexercised,
        )

    def _compare_empty(self, new: Model, found: Verification, nonempty: Sequence[str]) -> Verification:
        """Compare at sizes of 0 as well, and add the result to `found`."""
        reports: dict[str, OutputReport] = {}
        failures: list[str] = []
        empty = self.empty
        for at, known in enumerate(self.empty):
            try:
                outputs = run_apart(
                    new, known.case.feeds, threads=self.threads, session_options=self.session_options
                )
            except OutOfTime:
                found = replace(found, left_out=(*found.left_out, _late(empty[at:])))
                empty = empty[:at]
                break
            except BackendError as error:
                failures.append(f"the new model fails on {known.case}: {first_line(error)}")
                continue
            for doubt in self._judge(known, outputs, reports):
                shown = _shown(doubt.original)
                _note(reports, OutputReport(doubt.name, shown, doubt.judgement, str(known.case)))
        unlike = [_sentence(r) for r in reports.values() if not r.judgement.passed]
        if unlike and nonempty and not failures:
            rules = f"{', '.join(nonempty)} {'need' if len(nonempty) > 1 else 'needs'} sizes from 1"
            notes = tuple(f"not the same where a dimension is 0 ({rules}): {text}" for text in unlike)
            return replace(found, notes=(*found.notes, *notes))
        failures.extend(unlike)
        rows = {r.name: r for r in found.outputs}
        for report in reports.values():
            _note(rows, report)
        return replace(
            found,
            status=Status.FAILED if failures else found.status,
            outputs=tuple(rows.values()),
            failures=tuple(failures),
            bindings=(*found.bindings, *(known.case.bindings for known in empty)),
            cases=found.cases + len(empty),
        )

    @property
    def bindings(self) -> tuple[Bindings, ...]:
        """The choices of sizes that are compared."""
        return _bindings(self.known)

    # --- the original at another optimisation level ---

    def _by_deviation(self, run: bool) -> list[str]:
        """Add tolerance scales for floats that have none. `run`: use the original without optimisations for them."""
        missing = [
            (known, index, part, array)
            for known in self.known
            for index, parts in enumerate(known.outputs)
            for part, array in parts
            if is_float(array) and (index, part) not in known.yardsticks
        ]
        if not missing:
            return []
        errors: dict[int, float] = {}
        for known in self.known:
            for (index, _), reference in known.yardsticks.items():
                errors[index] = max(errors.get(index, 0.0), reference.error())
        for known, index, part, array in missing:
            known.yardsticks[index, part] = replace(
                by_deviation(array, None), relative=errors.get(index, 0.0)
            )
        return self.reruns.unoptimised(list({id(k): k for k, *_ in missing}.values())) if run else []

    # --- judging ---

    def _judge(
        self,
        known: Known,
        outputs: Sequence[Any],
        reports: dict[str, OutputReport],
        by_layers: bool = False,
    ) -> list[_Doubt]:
        """Judge the outputs of one case. Returns tensors of numbers that differ, to be judged again, without
        reports."""
        doubts: list[_Doubt] = []
        for index, (port, output) in enumerate(zip(self.declared.outputs, outputs)):
            expected, found = known.outputs[index], dict(flat(output))
            for part, a in expected:
                name = port.name + part
                b = found.get(part)
                judgement = _mismatch(a, b)
                licence = known.licence(index)
                if judgement is None and b is not None:
                    if licence is None or (licence is Licence.SPREADS and not is_float(a)):
                        continue  # it depends on NaN or infinities, so any value is right
                    layered = by_layers and self.quantised is not None and self.quantised.touched[index]
                    if layered:
                        judgement = judge_whole(a, b, licence)
                    elif is_float(a):
                        judgement = judge_floats(known.yardsticks[index, part], b, licence)
                    else:
                        judgement = judge_exact(a, b)
                    if (
                        not judgement.passed
                        and not part
                        and not layered
                        and (is_float(a) or a.dtype.kind in "iu")
                    ):
                        doubts.append(_Doubt(known, index, name, a, b, judgement))
                        continue
                if judgement is not None:
                    sides = _sides(known, index, judgement) if not part else frozenset()
                    _note(reports, OutputReport(name, _shown(a), judgement, str(known.case), sides))
        return doubts

    def _resolve(self, doubts: Sequence[_Doubt], reports: dict[str, OutputReport]) -> None:
        """Judge disputed outputs again: integers pass at a proven near-tie, floats if they equal another target."""
        self.reruns.on({id(d.known): d.known for d in doubts}.values())
        for doubt in doubts:
            shown, case = _shown(doubt.original), str(doubt.known.case)
            judgement = self._float_again(doubt) if is_float(doubt.original) else self._integer_again(doubt)
            sides = _sides(doubt.known, doubt.index, judgement)
            _note(reports, OutputReport(doubt.name, shown, judgement, case, sides))

    def _integer_again(self, doubt: _Doubt) -> Judgement:
        proven = undecided(
            self.imported,
            doubt.known.case,
            doubt.index,
            doubt.original,
            doubt.new,
            self.reruns.arrays(doubt.known, doubt.index),
        )
        unproven = (doubt.original != doubt.new) & ~proven
        if unproven.any():
            return judge_exact(doubt.original, np.where(unproven, doubt.new, doubt.original))
        return replace(doubt.judgement, leg=Leg.TIE, reason="", difference=0.0, error=0.0)

    def _float_again(self, doubt: _Doubt) -> Judgement:
        """Judge floats with measured noise, by their float64 evaluation, made now if need be, and by each other
        target."""
        known, index = doubt.known, doubt.index
        if known.yardsticks[index, ""].leg is Leg.DEVIATION and known.case.feeds:
            on_demand(Sizes(self.model, self.imported), self.imported, known, self.float64_flops)
            self.reruns.settle([known])
        licence = known.licence(index) or Licence.NONE
        judged = [judge_floats(t, doubt.new, licence) for t in self.reruns.targets(known, index)]
        return next((j for j in judged if j.passed), judged[0])

    def _without_optimizer(self, new: Model, known: Known) -> list[str]:
        """A note if the new model is right without ONNX Runtime's optimiser: then that optimiser may have an error."""
        reports: dict[str, OutputReport] = {}
        try:
            with opened(
                new, optimized=False, threads=self.threads, session_options=self.session_options
            ) as runner:
                doubts = self._judge(known, runner.run(known.case.feeds), reports)
        except BackendError:
            return []
        if doubts or any(not r.judgement.passed for r in reports.values()):
            return []
        return [
            "with ONNX Runtime's own optimisations off the new model is right on these inputs: its optimiser is suspect"
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Doubt:
    """An output that differs, and may still be right: it is judged again after further runs of the original."""

    known: Known
    index: int
    name: str
    original: Array
    new: Array
    judgement: Judgement


def _has_sizes(case: Case, sizes: Mapping[str, tuple[int, ...]]) -> bool:
    return all(np.shape(case.feeds.get(name, ())) == shape for name, shape in sizes.items())


def verify(
    a: Model,
    b: Model,
    *,
    imported: ImportedModel | None = None,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    bindings: Bindings | None = None,
    seed: int = 0,
    samples: int = 2,
    sizes: int = 3,
    threads: int | None = None,
    session_options: Options | None = None,
    float64_flops: float = FLOAT64_FLOPS,
) -> Verification:
    """Whether model `b` may replace model `a` (paths, bytes or ModelProtos).

    See `Reference.of` for the arguments, and for what is raised if the models cannot be compared. A model `b` that
    differs, or does not load or run, is a failed Verification, not an exception.
    """
    reference = Reference.of(
        a,
        imported=imported,
        against=b,
        inputs=inputs,
        bindings=bindings,
        seed=seed,
        samples=samples,
        sizes=sizes,
        threads=threads,
        session_options=session_options,
        float64_flops=float64_flops,
    )
    return reference.check(b)


def _other(against: Model | None) -> ImportedModel | None:
    """The model that will be judged, imported; None if that fails (`check` will report the reason)."""
    if against is None:
        return None
    try:
        return load(against)
    except ModelError:
        return None


def _shortened(names: Sequence[str], most: int = 8) -> tuple[str, ...]:
    """The first names, and a last entry that counts the others."""
    return (*names[:most], *([f"and {len(names) - most} more"] if len(names) > most else []))


def _repeats(runner: Runner, known: Known) -> bool:
    """Whether a second run gives the same outputs."""
    for parts, output in zip(known.outputs, runner.run(known.case.feeds)):
        others = dict(flat(output))
        for part, a in parts:
            b = others.get(part)
            if b is None or _mismatch(a, b) is not None:
                return False
            judged = judge_floats(by_deviation(a, None), b) if is_float(a) else judge_exact(a, b)
            if not judged.passed:
                return False
    return True


def _has_custom(graph: Graph) -> bool:
    """Whether a graph or one of its bodies has operators outside ONNX's own domains."""
    return any(
        ("::" in node.op and not node.op.startswith("ai.onnx"))
        or any(isinstance(a, Body) and _has_custom(a.graph) for a in node.attrs.values())
        for node in graph.nodes()
    )


def _changed(declared: Signature, known: Sequence[Known]) -> list[str]:
    """Notes on outputs that ONNX Runtime's optimiser changes in the original."""
    found: dict[int, float] = {}
    for k in known:
        for index, apart in k.changed.items():
            found[index] = max(apart, found.get(index, 0.0))
    return [
        f"ONNX Runtime's own optimiser changes output {declared.outputs[index].name!r} of the original by up to "
        f"{apart:.3g} from what its operators define"
        for index, apart in found.items()
    ]


def _with_layers(found: Verification, judged: Judged) -> Verification:
    """The verification with the verdict on a quantised model's layers. Without such a verdict, only with a note."""
    if judged.reason:
        return replace(found, notes=(*found.notes, f"not judged layer by layer: {judged.reason}"))
    if not judged.evaluated:
        return found
    if not judged.failures:
        note = f"layer by layer, on {judged.samples} sets of inputs: {judged.tally}"
        return replace(found, notes=(*found.notes, note))
    rows = [
        replace(r, judgement=replace(r.judgement, reason=judged.failures[0], worst=None))
        if r.judgement.leg is Leg.LAYERS and r.judgement.passed
        else r
        for r in found.outputs
    ]
    return replace(
        found,
        status=Status.FAILED,
        outputs=tuple(rows),
        failures=(*judged.failures, *found.failures),
    )


def _sides(known: Known, index: int, judgement: Judgement) -> frozenset[Leg]:
    return frozenset((judgement.leg,)) if judgement.passed and index in known.changed else frozenset()


def _kept(reports: Iterable[OutputReport]) -> Iterator[str]:
    """For outputs that ONNX Runtime's optimiser changes in the original: which of the two results the new model has."""
    for report in reports:
        if report.judgement.passed and report.sides:
            said = [
                "what ONNX Runtime makes of it today" if leg is Leg.DEVIATION else "what its operators define"
                for leg in sorted(report.sides, key=lambda leg: leg.value)
            ]
            yield f"output {report.name!r}: the new model computes {' or '.join(dict.fromkeys(said))}"


def _empty_outputs(declared: Signature, known: Sequence[Known]) -> list[str]:
    """Notes on outputs that were never compared: all NaN, infinite or without elements on every input."""
    notes = []
    for index, port in enumerate(declared.outputs):
        arrays = [a for k in known for _, a in k.outputs[index] if is_float(a)]
        if arrays and not any(np.isfinite(a.astype(np.complex128)).any() for a in arrays):
            notes.append(
                f"output {port.name!r} had no finite element on any input: nothing of it was compared"
            )
    return notes


def _mismatch(a: Array, b: Array | None) -> Judgement | None:
    """The verdict on two arrays that cannot be compared element by element; None if they can."""
    reason = ""
    if b is None:
        reason = "it is missing"
    elif a.shape != b.shape:
        reason = f"its shape is {list(b.shape)}, was {list(a.shape)}"
    elif a.dtype != b.dtype:
        reason = f"its type is {b.dtype.name}, was {a.dtype.name}"
    return Judgement(Leg.EXACT, reason=reason) if reason else None


def _note(reports: dict[str, OutputReport], report: OutputReport) -> None:
    """Keep the worse of two results of an output (a near-tie is worse than none), and the greater difference."""
    old = reports.get(report.name)
    if old is None:
        reports[report.name] = report
        return
    difference = max(old.judgement.difference, report.judgement.difference)
    worse = max(old, report, key=lambda r: (r.judgement.ratio, r.judgement.leg is Leg.TIE))
    judgement = replace(worse.judgement, difference=difference)
    reports[report.name] = replace(worse, judgement=judgement, sides=old.sides | report.sides)


def _sentence(report: OutputReport) -> str:
    found = report.judgement
    text = f"output {report.name!r}: {found.reason}"
    if found.worst is not None:
        text += f"; worst element {found.worst}"
    return f"{text} (on {report.case})"


def _finite(value: float) -> float | None:
    """The value, or None if it is not finite: JSON has no infinity."""
    return value if np.isfinite(value) else None


def _shown(array: Array) -> str:
    return "string" if array.dtype.kind == "O" else array.dtype.name
