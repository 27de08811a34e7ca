"""The tolerance scales of the original's outputs, case by case: from a float64 evaluation where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from xrlflow.ir import Value
from xrlflow.onnxio import ImportedModel
from xrlflow.verify.compare import Licence, Yardstick, by_reference, is_float, judge_floats
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
class Known:
    """One case with the original's outputs, and what a new model's outputs are compared with.

    An output that is a sequence or map has several parts: (label, array); a tensor has one, with the label "".
    """

    case: Case
    outputs: list[Sequence[tuple[str, Any]]]
    yardsticks: dict[tuple[int, str], Yardstick] = field(default_factory=dict)  # by output and part
    licences: tuple[Licence | None, ...] = ()
    doubtful: dict[int, Yardstick] = field(default_factory=dict)
    """By output: scales from float64 evaluations that the original is too far from, not used until that is
    explained."""
    changed: dict[int, float] = field(default_factory=dict)
    """By output: how much ONNX Runtime's optimiser changes it."""

    def licence(self, index: int) -> Licence | None:
        """Which elements of an output are not compared; None: the output is not judged at all."""
        return self.licences[index] if self.licences else Licence.NONE


def by_float64(at: Sizes, imported: ImportedModel, known: Sequence[Known], budget: float) -> list[str]:
    """Add tolerance scales from our float64 evaluation, as long as their operations stay within `budget`.

    Cases of ordinary values come first. Returns notes on what could not be evaluated.
    """
    wanted = _evaluable(imported, known[0])
    if not wanted:
        return []
    costs: dict[tuple[int, ...], float] = {}

    def cost_of(item: Known) -> float:
        key = tuple(item.case.bindings.values())
        if key not in costs:
            costs[key] = at.flops(item.case)
        return costs[key]

    for item in sorted(known, key=lambda k: (not k.case.values.ordinary, k.case.sample, cost_of(k))):
        cost = cost_of(item)
        if cost > budget:
            continue
        budget -= cost
        try:
            _measure(imported, item, wanted)
        except NoReference as error:
            if item.case.values.ordinary:
                return [str(error)]
    return []


def on_demand(at: Sizes, imported: ImportedModel, item: Known, budget: float) -> None:
    """Evaluate one case in float64 beyond the budget, because a difference would be reported otherwise."""
    wanted = _evaluable(imported, item)
    if wanted and at.flops(item.case) <= ON_DEMAND * budget:
        with suppress(NoReference):  # the present scale stays
            _measure(imported, item, wanted)


def not_credible(imported: ImportedModel, item: Known, wanted: Sequence[int]) -> list[int]:
    """The indices among `wanted` of outputs that differ from our evaluation by more than rounding. Raises
    NoReference."""
    values = [imported.graph.outputs[index] for index in wanted]
    references = evaluate(imported, item.case, values)
    rounded = _Rounded(imported, item.case, values)
    found = []
    for place, (index, reference) in enumerate(zip(wanted, references)):
        original = item.outputs[index][0][1]
        if original.shape != reference.shape or not is_credible(
            original, reference, partial(rounded.output, place)
        ):
            found.append(index)
    return found


def _evaluable(imported: ImportedModel, item: Known) -> list[int]:
    """The indices of the float outputs that have a float64 evaluation."""
    able = evaluable(imported.graph)
    return [
        i for i, can in enumerate(able) if can and any(is_float(a) for part, a in item.outputs[i] if not part)
    ]


def _measure(imported: ImportedModel, item: Known, wanted: Sequence[int]) -> None:
    """Evaluate the outputs `wanted` of a case in float64, and add their scales. Raises NoReference."""
    values = [imported.graph.outputs[index] for index in wanted]
    for index, reference in zip(wanted, evaluate(imported, item.case, values)):
        original = item.outputs[index][0][1]
        yardstick = by_reference(original, reference)
        if yardstick is None:
            continue
        if judge_floats(yardstick, original).passed:
            item.yardsticks[index, ""] = yardstick
        else:
            item.doubtful[index] = yardstick


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
