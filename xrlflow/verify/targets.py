"""The targets for the outputs, case by case: from a float64 evaluation of the original if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from xrlflow.ir import Value
from xrlflow.onnxio import ImportedModel
from xrlflow.verify.compare import Exemption, Target, by_reference, is_float, judge_floats
from xrlflow.verify.inputs import Case
from xrlflow.verify.reference import (
    NoReference,
    Sizes,
    evaluable,
    evaluate,
    evaluate_rounded,
    is_credible,
)
from xrlflow.verify.runner import Array

# For a difference that would be reported, the float64 evaluation may cost this many times the budget.
ON_DEMAND = 10


@dataclass(slots=True)
class ReferenceCase:
    """One case with the original's outputs, and the targets with which a new model's outputs are compared.

    An output that is a sequence or map has several parts: (label, array); a tensor has one, with the label "".
    """

    case: Case
    outputs: list[Sequence[tuple[str, Any]]]
    targets: dict[tuple[int, str], Target] = field(default_factory=dict)  # by output and part
    exemptions: tuple[Exemption | None, ...] = ()
    unexplained: dict[int, Target] = field(default_factory=dict)
    """By output: targets from float64 evaluations from which the original is too far. They are not used until the
    distance is explained.
    """
    changed: dict[int, float] = field(default_factory=dict)
    """By output: how much ONNX Runtime's optimiser changes it."""

    def exemption(self, index: int) -> Exemption | None:
        """Which elements of an output are not compared; None: the output is not judged at all."""
        return self.exemptions[index] if self.exemptions else Exemption.NONE


def by_float64(
    at: Sizes, imported: ImportedModel, cases: Sequence[ReferenceCase], budget: float
) -> list[str]:
    """Add targets from our float64 evaluation, as long as its floating-point operations stay within `budget`.

    Cases of ordinary values come first. Returns notes on what could not be evaluated.
    """
    indices = _evaluable(imported, cases[0])
    if not indices:
        return []
    costs: dict[tuple[int, ...], float] = {}

    def cost_of(item: ReferenceCase) -> float:
        key = tuple(item.case.bindings.values())
        if key not in costs:
            costs[key] = at.flops(item.case)
        return costs[key]

    for item in sorted(cases, key=lambda k: (not k.case.values.ordinary, k.case.sample, cost_of(k))):
        cost = cost_of(item)
        if cost > budget:
            continue
        budget -= cost
        try:
            _measure(imported, item, indices)
        except NoReference as error:
            if item.case.values.ordinary:
                return [str(error)]
    return []


def on_demand(at: Sizes, imported: ImportedModel, item: ReferenceCase, budget: float) -> None:
    """Evaluate one case in float64 beyond the budget, because a difference would be reported otherwise."""
    indices = _evaluable(imported, item)
    if indices and at.flops(item.case) <= ON_DEMAND * budget:
        with suppress(NoReference):  # without an evaluation, the present target stays
            _measure(imported, item, indices)


def not_credible(imported: ImportedModel, item: ReferenceCase, indices: Sequence[int]) -> list[int]:
    """Those of these outputs, by index, that differ from our evaluation by more than rounding. Raises NoReference."""
    values = [imported.graph.outputs[index] for index in indices]
    references = evaluate(imported, item.case, values)
    rounded = _Rounded(imported, item.case, values)
    suspicious = []
    for position, (index, reference) in enumerate(zip(indices, references)):
        original = item.outputs[index][0][1]
        if original.shape != reference.shape or not is_credible(
            original, reference, partial(rounded.output, position)
        ):
            suspicious.append(index)
    return suspicious


def _evaluable(imported: ImportedModel, item: ReferenceCase) -> list[int]:
    """The indices of the float outputs that have a float64 evaluation."""
    able = evaluable(imported.graph)
    return [
        i for i, can in enumerate(able) if can and any(is_float(a) for part, a in item.outputs[i] if not part)
    ]


def _measure(imported: ImportedModel, item: ReferenceCase, indices: Sequence[int]) -> None:
    """Evaluate the outputs `indices` of a case in float64, and add their targets. Raises NoReference."""
    values = [imported.graph.outputs[index] for index in indices]
    for index, reference in zip(indices, evaluate(imported, item.case, values)):
        original = item.outputs[index][0][1]
        target = by_reference(original, reference)
        if target is None:
            continue
        if judge_floats(target, original).passed:
            item.targets[index, ""] = target
        else:
            item.unexplained[index] = target


class _Rounded:
    """Our evaluation of some values in the model's own precision, computed on first use."""

    def __init__(self, imported: ImportedModel, case: Case, values: Sequence[Value]) -> None:
        self._imported, self._case, self._values = imported, case, values
        self._found: list[Array] | None = None
        self._tried = False

    def output(self, index: int) -> Array | None:
        if not self._tried:
            self._tried = True
            with suppress(NoReference):
                self._found = evaluate_rounded(self._imported, self._case, self._values)
        return None if self._found is None else self._found[index]
