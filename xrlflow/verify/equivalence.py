"""Whether two ONNX models compute the same: signatures, then outputs on several inputs of several sizes.

The models are run one after the other, so that only one ONNX Runtime session is in memory. `Reference` stores the
outputs of the original, so that the comparison of several new models (in a bisection, for instance) needs only one run
of the original.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from xrlflow.backends.onnxruntime.session import Options
from xrlflow.backends.protocol import BackendError, CompiledModel, OutOfTime
from xrlflow.common import deadline
from xrlflow.ir import Body, Graph
from xrlflow.onnxio import ImportedModel, ModelError, load
from xrlflow.verify.branches import GUARD
from xrlflow.verify.cases import SampledCases
from xrlflow.verify.compare import (
    Criterion,
    Exemption,
    Judgement,
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
from xrlflow.verify.isolated import run_isolated
from xrlflow.verify.near_ties import undecided
from xrlflow.verify.quantised import Exactness, Judged, Quantised, judge_whole, samples_of
from xrlflow.verify.reference import Sizes
from xrlflow.verify.reruns import Rerun, Reruns
from xrlflow.verify.runner import Array, Model, Runner, first_line, flat, opened
from xrlflow.verify.signature import Signature, differences, signature, signature_of_proto
from xrlflow.verify.targets import ReferenceCase, by_float64, on_demand

FLOAT64_FLOPS = 3e10
"""Floating-point operations that all float64 evaluations of one verification may take together: a few seconds on two
cores.
"""


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
    sides: frozenset[Criterion] = frozenset()
    """If ONNX Runtime's optimiser changes this output of the original: which of the original's two results the new
    model's output equals.
    """

    @property
    def row(self) -> tuple[str, ...]:
        """A row of a table with the columns HEADERS."""
        judgement = self.judgement
        exact = judgement.criterion in (Criterion.EXACT, Criterion.LAYERS, Criterion.TIE)
        return (
            self.name,
            self.type,
            judgement.criterion.value,
            "" if exact else f"{judgement.error:.2g}",
            "" if exact else f"{judgement.tolerance:.2g}",
            str(judgement.worst) if judgement.worst is not None and not judgement.passed else "",
            "equal" if judgement.passed else "DIFFERENT",
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
    exactness: Exactness | None = None  # of a quantised model whose layers were judged

    @property
    def verified(self) -> bool:
        return self.status is Status.VERIFIED

    @property
    def compared(self) -> bool:
        """Whether there is a verdict; False if the time was too short, or nothing could be compared."""
        return self.status is not Status.NOT_COMPARABLE

    @property
    def sizes(self) -> str:
        """The choices of sizes that were run, as "n=2, s=11; n=1, s=3"."""
        return "; ".join(", ".join(f"{k}={v}" for k, v in bindings.items()) for bindings in self.bindings)

    @property
    def max_error(self) -> float:
        """The greatest absolute difference between corresponding elements, over all numeric outputs of the two
        models."""
        return max((o.judgement.difference for o in self.outputs), default=0.0)

    @property
    def worst(self) -> OutputReport | None:
        """The output whose error is the largest fraction of its tolerance."""
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
            "exactness": None if self.exactness is None else str(self.exactness),
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
                    "judged_by": o.judgement.criterion.value,
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
        """The verdict in one line. For a failure it names the output, its worst element, and the substitution if it is
        known.
        """
        if self.status is Status.VERIFIED:
            criteria = sorted({o.judgement.criterion.value for o in self.outputs})
            if self.exactness is not None:
                criteria = [
                    f"layers {self.exactness}" if c == Criterion.LAYERS.value else c for c in criteria
                ]
            return (
                f"verified on {self.cases} sets of inputs, {max(1, len(self.bindings))} sizes ({', '.join(criteria)}), "
                f"greatest difference {self.max_error:.3g}"
            )
        if self.status is Status.NOT_COMPARABLE:
            return f"cannot be verified: {self.reason}"
        text = f"the models differ: {self.failures[0]}"
        return text if substitution is None else f"{text}; the substitution that caused it: {substitution}"


@dataclass(frozen=True, slots=True, eq=False)
class _InputRequest:
    """Which random inputs to draw; see `Reference.of`. `other`: the model `against` of `Reference.of`, if it could be
    imported.
    """

    against: Model | None
    other: ImportedModel | None
    bindings: Bindings | None
    further: Iterable[int]
    samples: int
    sizes: int


def _undecided(reason: str) -> Verification:
    return Verification(Status.NOT_COMPARABLE, reason=reason)


def _late(cases: Sequence[ReferenceCase]) -> str:
    """The text about cases that are left out for lack of time."""
    return f"{'; '.join(str(r.case) for r in cases[:3])}{', ...' if cases[3:] else ''} (there was no time)"


def _bindings(cases: Iterable[ReferenceCase]) -> tuple[Bindings, ...]:
    """The choices of sizes of the cases, each once."""
    choices: list[Bindings] = []
    for reference in cases:
        if reference.case.bindings and reference.case.bindings not in choices:
            choices.append(reference.case.bindings)
    return tuple(choices)


def not_exercised(arm: str) -> str:
    """The note on a branch that no input reached. For the branch of a guard, the note names what the guard chooses
    (`GUARD`).
    """
    guard = GUARD.fullmatch(arm)
    if guard is None:
        return f"not exercised: {arm}"
    if guard["taken"] == "then":
        return (
            f"not exercised: the kernels of {guard['region']}: no input has their sizes (--shape names them)"
        )
    return f"not exercised: the graph itself: all inputs have the sizes of {guard['region']}"


@dataclass(frozen=True, slots=True, eq=False)
class _OriginalRuns:
    """Cases on which the original was run."""

    sampled: SampledCases[list[Any]]
    unexercised: tuple[str, ...] = ()
    empty: tuple[ReferenceCase, ...] = ()  # cases with a size of 0
    empty_notes: tuple[str, ...] = ()  # notes on cases with a size of 0 that were left out


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The original's signature, and its outputs on the inputs of the comparison."""

    model: Model
    imported: ImportedModel
    declared: Signature
    cases: tuple[ReferenceCase, ...]
    seed: int
    threads: int | None
    session_options: Options | None
    incomparable: str = ""
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unexercised: tuple[str, ...] = ()
    float64_flops: float = FLOAT64_FLOPS
    empty: tuple[ReferenceCase, ...] = ()
    """Cases with a size of 0. They are run in a separate process."""
    quantised: Quantised | None = None
    """The exact evaluation, layer by layer, of a quantised original."""
    reruns: Reruns = field(init=False)

    def __post_init__(self) -> None:
        reruns = Reruns(
            self.model, self.imported, self.seed, self.threads, self.session_options, self.float64_flops
        )
        object.__setattr__(self, "reruns", reruns)

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
        - `bindings`: the user's sizes of dimensions (default: those of `imported`). They are one choice of sizes.
        - `further`: numbers around which sizes are chosen, after those that the models mention.
        - `samples`: how many sets of ordinary values. `sizes`: the number of choices of sizes without further ones.

        Raises OriginalFails, InputsNeeded, BadInputs, and ModelError if the file cannot be read.
        """
        if imported is None:
            imported = load(model)
        # The declared types, with the user's sizes for those dimensions whose sizes will be written into the file.
        declared = signature_of_proto(imported.frame, imported.overridable)
        if not imported.fixed:
            declared = signature(model)
        base = Reference(
            model, imported, declared, (), seed, threads, session_options, float64_flops=float64_flops
        )
        random = random_operators(imported.graph)
        if random:
            return replace(base, incomparable=f"it has random operators ({', '.join(sorted(random))})")
        request = _InputRequest(against, _other(against), bindings, further, samples, sizes)
        try:
            with opened(model, threads=threads, session_options=session_options) as runner:
                run = Runs(model, imported, runner)
                if inputs is not None:
                    runs = _OriginalRuns(SampledCases([run.on(user_case(imported, inputs))]))
                else:
                    runs = base._try(run, request)
                cases = tuple(
                    ReferenceCase(case, [flat(o) for o in outputs], exemptions=run.exemptions(case))
                    for case, outputs in runs.sampled.cases
                )
                if _has_custom(imported.graph) and not _repeats(runner, cases[0]):
                    reason = "the original gives other results when it is run again on the same inputs"
                    return replace(base, incomparable=reason)
        except OutOfTime:
            return replace(base, incomparable="there was no time to run the original")
        except BackendError as error:
            raise OriginalFails(f"the original cannot be run: {first_line(error)}") from error
        return base._with_outputs(cases, runs, run.at)

    def _try(self, run: Runs, request: _InputRequest) -> _OriginalRuns:
        """Run the original on random inputs, on inputs for every branch, and on inputs with a size of 0."""
        sampler = run.sampler(request.other, request.bindings, self.seed, request.further)
        try:
            sampled = sampler.all(request.samples, request.sizes)
        except VerificationError as error:
            if run.errors:
                raise type(error)(f"{error} (the last failure: {run.errors[-1]})") from error
            raise
        models = [(self.model, self.imported)]
        if request.against is not None and request.other is not None:
            models.append((request.against, request.other))
        unexercised = exercise(sampler, sampled, models, self.threads, self.session_options)
        without = sampler.empty(sampled.bindings[0])
        empty, notes = run_empty(
            run, self.model, without, self.threads, self.session_options, self.float64_flops
        )
        return _OriginalRuns(sampled, unexercised, empty, notes)

    def _with_outputs(self, cases: tuple[ReferenceCase, ...], runs: _OriginalRuns, at: Sizes) -> Reference:
        """A copy of this reference with the original's outputs, their targets, and notes."""
        quantised = Quantised.of(
            self.model,
            self.imported,
            samples_of(cases, at.flops),
            self.float64_flops,
            threads=self.threads,
            session_options=self.session_options,
        )
        by_layers = quantised is not None and quantised.judges_all
        notes = [*(quantised.notes if quantised is not None else ()), *runs.empty_notes]
        if not by_layers:
            notes.extend(by_float64(at, self.imported, cases, self.float64_flops))
        reference = replace(
            self,
            cases=cases,
            quantised=quantised,
            empty=runs.empty,
            left_out=_shortened(runs.sampled.left_out),
            unexercised=runs.unexercised,
        )
        if not by_layers:
            notes.extend(reference.reruns.settle(cases))
        notes.extend(reference._by_deviation(run=not by_layers))
        notes.extend(_changed(self.declared, cases))
        notes.extend(_empty_outputs(self.declared, cases))
        notes.extend(map(not_exercised, runs.unexercised))
        return replace(reference, notes=tuple(notes))

    def check(self, new: Model, nonempty: Sequence[str] = ()) -> Verification:
        """Judge a model, case by case, so that only the outputs of one case are in memory.

        `nonempty`: rules that were applied to the model and require sizes of at least 1. If there are any, outputs
        that differ at a size of 0 give only a note. A model that raises an error or crashes at a size of 0 fails
        nevertheless.
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
                verification = self._compare(runner, self.cases, by_layers=judged.evaluated)
            verification = _with_layers(verification, judged)
            if verification.verified:
                verification = self._compare_empty(new, verification, nonempty)
        except OutOfTime:
            return _undecided("there was no time to run the new model")
        except BackendError as error:
            reason = f"the new model cannot be loaded: {first_line(error)}"
            return Verification(Status.FAILED, failures=(reason,), notes=self.notes)
        bad = [r for r in verification.outputs if not r.judgement.passed]
        if verification.failures and deadline.over():
            return _undecided(
                f"there was no time to decide whether this is rounding: {verification.failures[0]}"
            )
        if bad and not judged.failures:
            broken = next((k for k in self.cases if str(k.case) == bad[0].case), None)
            if broken is not None:
                verification = replace(
                    verification, notes=(*verification.notes, *self._without_optimizer(new, broken))
                )
        return verification

    def check_compiled(self, new: CompiledModel, sizes: Mapping[str, tuple[int, ...]]) -> Verification:
        """Judge a model that is already loaded, in any runtime, and was compiled for inputs of these `sizes`.

        The caller guarantees its names and types. Two kinds of cases are not compared: those of other sizes, and those
        that override a default that the compiled model has as a constant. If no case remains, the result is "not
        comparable".
        """
        if self.incomparable:
            return Verification(Status.NOT_COMPARABLE, reason=self.incomparable)
        fitting = tuple(
            reference
            for reference in self.cases
            if reference.case.feeds.keys() <= sizes.keys() and _has_sizes(reference.case, sizes)
        )
        if not fitting:
            return Verification(
                Status.NOT_COMPARABLE, reason="no input has the sizes that it was compiled for"
            )
        return self._compare(new, fitting)

    def tries(self, sizes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether some case has inputs of these sizes; inputs that `sizes` does not name may have any size."""
        return any(_has_sizes(reference.case, sizes) for reference in self.cases)

    def _compare(
        self, runner: CompiledModel | Runner, cases: Sequence[ReferenceCase], by_layers: bool = False
    ) -> Verification:
        """Run a model on cases, and judge it. `by_layers`: outputs that depend on quantised numbers need to have only
        the same shapes and types, and NaN and infinities at the same elements.
        """
        failures: list[str] = []
        reports: dict[str, OutputReport] = {}
        disputes: list[_Dispute] = []
        left_out = self.left_out
        for at, reference in enumerate(cases):
            if at and deadline.over():
                left_out = (*left_out, _late(cases[at:]))
                cases = cases[:at]
                break
            try:
                outputs = runner.run(reference.case.feeds)
            except OutOfTime:
                if not at:
                    raise
                left_out = (*left_out, _late(cases[at:]))
                cases = cases[:at]
                break
            except BackendError as error:
                failures.append(f"the new model fails on {reference.case}: {first_line(error)}")
                break
            disputes.extend(self._judge(reference, outputs, reports, by_layers))
        self._resolve(disputes, reports)
        bad = [r for r in reports.values() if not r.judgement.passed]
        failures[:0] = [_sentence(report) for report in sorted(bad, key=lambda r: -r.judgement.ratio)]
        return Verification(
            Status.FAILED if failures else Status.VERIFIED,
            tuple(reports.values()),
            tuple(failures),
            notes=(*self.notes, *_optimiser_notes(reports.values())),
            bindings=_bindings(cases),
            cases=len(cases),
            values=tuple(dict.fromkeys(k.case.values.name for k in cases if k.case.values.name)),
            left_out=left_out,
            unexercised=self.unexercised,
        )

    def _compare_empty(self, new: Model, verification: Verification, nonempty: Sequence[str]) -> Verification:
        """Compare at sizes of 0 as well, and add the result to `verification`."""
        reports: dict[str, OutputReport] = {}
        failures: list[str] = []
        empty = self.empty
        for at, reference in enumerate(self.empty):
            try:
                outputs = run_isolated(
                    new, reference.case.feeds, threads=self.threads, session_options=self.session_options
                )
            except OutOfTime:
                verification = replace(verification, left_out=(*verification.left_out, _late(empty[at:])))
                empty = empty[:at]
                break
            except BackendError as error:
                failures.append(f"the new model fails on {reference.case}: {first_line(error)}")
                continue
            disputes = self._judge(reference, outputs, reports)
            self.reruns.without_running([reference])
            self._resolve(disputes, reports, running=False)
        unlike = [_sentence(r) for r in reports.values() if not r.judgement.passed]
        if unlike and nonempty and not failures:
            rules = f"{', '.join(nonempty)} {'need' if len(nonempty) > 1 else 'needs'} sizes from 1"
            notes = tuple(f"not the same where a dimension is 0 ({rules}): {text}" for text in unlike)
            return replace(verification, notes=(*verification.notes, *notes))
        failures.extend(unlike)
        rows = {r.name: r for r in verification.outputs}
        for report in reports.values():
            _note(rows, report)
        return replace(
            verification,
            status=Status.FAILED if failures else verification.status,
            outputs=tuple(rows.values()),
            failures=tuple(failures),
            bindings=(*verification.bindings, *(reference.case.bindings for reference in empty)),
            cases=verification.cases + len(empty),
        )

    @property
    def bindings(self) -> tuple[Bindings, ...]:
        """The choices of sizes that are compared."""
        return _bindings(self.cases)

    # --- the original at another optimisation level ---

    def _by_deviation(self, run: bool) -> list[str]:
        """Add targets for float outputs that have none. `run`: run the original without optimisations to get them."""
        missing = [
            (reference, index, part, array)
            for reference in self.cases
            for index, parts in enumerate(reference.outputs)
            for part, array in parts
            if is_float(array) and (index, part) not in reference.targets
        ]
        if not missing:
            return []
        errors: dict[int, float] = {}
        for reference in self.cases:
            for (index, _), target in reference.targets.items():
                errors[index] = max(errors.get(index, 0.0), target.error())
        for reference, index, part, array in missing:
            reference.targets[index, part] = replace(
                by_deviation(array, None), relative=errors.get(index, 0.0)
            )
        return self.reruns.unoptimised(list({id(k): k for k, *_ in missing}.values())) if run else []

    # --- judging ---

    def _judge(
        self,
        reference: ReferenceCase,
        outputs: Sequence[Any],
        reports: dict[str, OutputReport],
        by_layers: bool = False,
    ) -> list[_Dispute]:
        """Judge the outputs of one case, and add them to `reports`. Numeric tensors that differ are not added but
        returned: they are judged again.
        """
        disputes: list[_Dispute] = []
        for index, (port, output) in enumerate(zip(self.declared.outputs, outputs)):
            expected, parts_of_new = reference.outputs[index], dict(flat(output))
            for part, a in expected:
                name = port.name + part
                b = parts_of_new.get(part)
                judgement = _mismatch(a, b)
                exemption = reference.exemption(index)
                if judgement is None and b is not None:
                    if exemption is None or (exemption is Exemption.SPREADS and not is_float(a)):
                        continue  # this output depends on NaN or infinities, so any value is right
                    layered = by_layers and self.quantised is not None and self.quantised.touched[index]
                    if layered:
                        judgement = judge_whole(a, b, exemption)
                    elif is_float(a):
                        judgement = judge_floats(reference.targets[index, part], b, exemption)
                    else:
                        judgement = judge_exact(a, b)
                    if (
                        not judgement.passed
                        and not part
                        and not layered
                        and (is_float(a) or a.dtype.kind in "iu")
                    ):
                        disputes.append(_Dispute(reference, index, name, a, b, judgement))
                        continue
                if judgement is not None:
                    sides = _sides(reference, index, judgement) if not part else frozenset()
                    _note(reports, OutputReport(name, _shown(a), judgement, str(reference.case), sides))
        return disputes

    def _resolve(
        self, disputes: Sequence[_Dispute], reports: dict[str, OutputReport], running: bool = True
    ) -> None:
        """Judge disputed outputs again: integers pass if a near-tie is proven, floats if they equal another target.

        `running`: whether the original may run again in this process.
        """
        judged = self._by_runs(disputes) if running else [None] * len(disputes)
        remaining = [d for d, judgement in zip(disputes, judged) if judgement is None]
        self.reruns.on(d.reference for d in remaining)
        for dispute, judgement in zip(disputes, judged):
            shown, case = _shown(dispute.original), str(dispute.reference.case)
            if judgement is None and is_float(dispute.original):
                alike = (d for d in remaining if d.reference is dispute.reference and is_float(d.original))
                self.reruns.measure(dispute.reference, [d.index for d in alike])
                judgement = self._float_again(dispute)
            elif judgement is None:
                judgement = self._integer_again(dispute)
            sides = _sides(dispute.reference, dispute.index, judgement)
            _note(reports, OutputReport(dispute.name, shown, judgement, case, sides))

    def _by_runs(self, disputes: Sequence[_Dispute]) -> list[Judgement | None]:
        """The judgements on floats that differ by no more than the original does with neighbouring weights, which is
        known soonest; None for others."""
        floats = {id(d.reference): d.reference for d in disputes if is_float(d.original)}
        runs: Mapping[int, Rerun] = {}
        with suppress(BackendError):  # no evidence: other evidence is sought
            runs = self.reruns.with_moved_weights(floats.values()) if floats else {}

        def judged(dispute: _Dispute) -> Judgement | None:
            run = runs.get(id(dispute.reference))
            if run is None or not is_float(dispute.original):
                return None
            exemption = dispute.reference.exemption(dispute.index) or Exemption.NONE
            targets = self.reruns.targets(dispute.reference, dispute.index, run)
            found = (judge_floats(target, dispute.new, exemption) for target in targets)
            return next((judgement for judgement in found if judgement.passed), None)

        return [judged(dispute) for dispute in disputes]

    def _integer_again(self, dispute: _Dispute) -> Judgement:
        proven = undecided(
            self.imported,
            dispute.reference.case,
            dispute.index,
            dispute.original,
            dispute.new,
            self.reruns.arrays(dispute.reference, dispute.index),
        )
        unproven = (dispute.original != dispute.new) & ~proven
        if unproven.any():
            return judge_exact(dispute.original, np.where(unproven, dispute.new, dispute.original))
        return replace(dispute.judgement, criterion=Criterion.TIE, reason="", difference=0.0, error=0.0)

    def _float_again(self, dispute: _Dispute) -> Judgement:
        """Judge floats again with measured noise, against each of their targets. A missing float64 evaluation is
        computed now.
        """
        reference, index = dispute.reference, dispute.index
        if reference.targets[index, ""].criterion is Criterion.DEVIATION and reference.case.feeds:
            on_demand(self.reruns.sizes, self.imported, reference, self.float64_flops)
            self.reruns.settle([reference])
        exemption = reference.exemption(index) or Exemption.NONE
        judged = [judge_floats(t, dispute.new, exemption) for t in self.reruns.targets(reference, index)]
        return next((j for j in judged if j.passed), judged[0])

    def _without_optimizer(self, new: Model, reference: ReferenceCase) -> list[str]:
        """A note if the new model is right without ONNX Runtime's optimiser, because in this case the optimiser may
        have an error.
        """
        reports: dict[str, OutputReport] = {}
        try:
            with opened(
                new, optimized=False, threads=self.threads, session_options=self.session_options
            ) as runner:
                disputes = self._judge(reference, runner.run(reference.case.feeds), reports)
        except BackendError:
            return []
        if disputes or any(not r.judgement.passed for r in reports.values()):
            return []
        return [
            "with ONNX Runtime's own optimisations off the new model is right on these inputs: its optimiser is suspect"
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Dispute:
    """An output that differs but may still be right. It is judged again after further runs of the original."""

    reference: ReferenceCase
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
    further: Iterable[int] = (),
    seed: int = 0,
    samples: int = 2,
    sizes: int = 3,
    threads: int | None = None,
    session_options: Options | None = None,
    float64_flops: float = FLOAT64_FLOPS,
) -> Verification:
    """Whether model `b` may replace model `a` (paths, bytes or ModelProtos).

    See `Reference.of` for the arguments, and for the exceptions if the models cannot be compared. A model `b` that
    differs, or does not load or run, is a failed Verification, not an exception.
    """
    reference = Reference.of(
        a,
        imported=imported,
        against=b,
        inputs=inputs,
        bindings=bindings,
        further=further,
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


def _shortened(names: Sequence[str], limit: int = 8) -> tuple[str, ...]:
    """The first names, and a last entry that states how many further names there are."""
    return (*names[:limit], *([f"and {len(names) - limit} more"] if len(names) > limit else []))


def _repeats(runner: Runner, reference: ReferenceCase) -> bool:
    """Whether a second run gives the same outputs."""
    for parts, output in zip(reference.outputs, runner.run(reference.case.feeds)):
        parts_again = dict(flat(output))
        for part, a in parts:
            b = parts_again.get(part)
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


def _changed(declared: Signature, cases: Sequence[ReferenceCase]) -> list[str]:
    """Notes on outputs that ONNX Runtime's optimiser changes in the original."""
    greatest: dict[int, float] = {}
    for k in cases:
        for index, apart in k.changed.items():
            greatest[index] = max(apart, greatest.get(index, 0.0))
    return [
        f"ONNX Runtime's own optimiser changes output {declared.outputs[index].name!r} of the original by up to "
        f"{apart:.3g} from what its operators define"
        for index, apart in greatest.items()
    ]


def _with_layers(verification: Verification, judged: Judged) -> Verification:
    """The verification with the verdict on a quantised model's layers. Without such a verdict, only with a note."""
    if judged.reason:
        return replace(
            verification, notes=(*verification.notes, f"not judged layer by layer: {judged.reason}")
        )
    if not judged.evaluated or not (judged.failures or judged.counts.tensors):
        return verification
    if not judged.failures:
        note = f"layer by layer, on {judged.samples} sets of inputs: {judged.counts}"
        return replace(verification, notes=(*verification.notes, note), exactness=judged.counts.exactness)
    rows = [
        replace(r, judgement=replace(r.judgement, reason=judged.failures[0], worst=None))
        if r.judgement.criterion is Criterion.LAYERS and r.judgement.passed
        else r
        for r in verification.outputs
    ]
    return replace(
        verification,
        status=Status.FAILED,
        outputs=tuple(rows),
        failures=(*judged.failures, *verification.failures),
    )


def _sides(reference: ReferenceCase, index: int, judgement: Judgement) -> frozenset[Criterion]:
    return (
        frozenset((judgement.criterion,)) if judgement.passed and index in reference.changed else frozenset()
    )


def _optimiser_notes(reports: Iterable[OutputReport]) -> Iterator[str]:
    """For outputs that ONNX Runtime's optimiser changes in the original: notes on which of the original's two results
    the new model has.
    """
    for report in reports:
        if report.judgement.passed and report.sides:
            results = [
                "what ONNX Runtime makes of it today"
                if criterion is Criterion.DEVIATION
                else "what its operators define"
                for criterion in sorted(report.sides, key=lambda criterion: criterion.value)
            ]
            yield f"output {report.name!r}: the new model computes {' or '.join(dict.fromkeys(results))}"


def _empty_outputs(declared: Signature, cases: Sequence[ReferenceCase]) -> list[str]:
    """Notes on outputs that were never compared: all NaN, infinite or without elements on every input."""
    notes = []
    for index, port in enumerate(declared.outputs):
        arrays = [a for k in cases for _, a in k.outputs[index] if is_float(a)]
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
    return Judgement(Criterion.EXACT, reason=reason) if reason else None


def _note(reports: dict[str, OutputReport], report: OutputReport) -> None:
    """Add a report to `reports`: of two results of one output, the worse stays (a near-tie is worse than equality),
    with the greater difference of both.
    """
    old = reports.get(report.name)
    if old is None:
        reports[report.name] = report
        return
    difference = max(old.judgement.difference, report.judgement.difference)
    worse = max(old, report, key=lambda r: (r.judgement.ratio, r.judgement.criterion is Criterion.TIE))
    judgement = replace(worse.judgement, difference=difference)
    reports[report.name] = replace(worse, judgement=judgement, sides=old.sides | report.sides)


def _sentence(report: OutputReport) -> str:
    judgement = report.judgement
    text = f"output {report.name!r}: {judgement.reason}"
    if judgement.worst is not None:
        text += f"; worst element {judgement.worst}"
    return f"{text} (on {report.case})"


def _finite(value: float) -> float | None:
    """The value, or None if it is not finite: JSON has no infinity."""
    return value if np.isfinite(value) else None


def _shown(array: Array) -> str:
    return "string" if array.dtype.kind == "O" else array.dtype.name
