"""Runs the original on cases: with ordinary values, with sizes near the numbers that the models mention, and with
values that reach each branch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from xrlflow.backends.onnxruntime.session import Options
from xrlflow.backends.protocol import BackendError, OutOfTime
from xrlflow.common import deadline
from xrlflow.onnxio import ImportedModel
from xrlflow.verify.branches import deciding, has_branches, watched
from xrlflow.verify.cases import CaseSampler, SampledCases, is_whole
from xrlflow.verify.compare import Exemption, by_deviation, is_float
from xrlflow.verify.dims import Bindings, Role
from xrlflow.verify.errors import OriginalFails
from xrlflow.verify.inputs import Case, InputPlan, evaluable_feeds
from xrlflow.verify.isolated import run_isolated
from xrlflow.verify.nonfinite import Fate, fates
from xrlflow.verify.numbers import ENDLESS, LEAST, has_ties, marks, on_symbols, thresholds
from xrlflow.verify.reference import NoReference, Sizes, evaluable
from xrlflow.verify.runner import Model, Runner, first_line, flat
from xrlflow.verify.targets import ReferenceCase, not_credible
from xrlflow.verify.values import TIES, Masks

_EXEMPTIONS = {Fate.EXACT: Exemption.NONE, Fate.SPREADS: Exemption.SPREADS, Fate.UNDEFINED: None}

# A number that only one of the models mentions has its weight multiplied by this.
_ALONE = 4

# The smallest time limit of a run in seconds: on some inputs a Loop does not end.
_LEAST_LIMIT = 20.0


class Runs:
    """Runs the original on cases, in one session."""

    def __init__(self, model: Model, imported: ImportedModel, runner: Runner) -> None:
        self.imported, self._model, self._runner = imported, model, runner
        self.at = Sizes(model, imported)
        self.errors: list[str] = []
        self._misfits_fail = False
        self._first: float | None = None
        self._whole = True
        self._fates: list[tuple[Case, tuple[Fate, ...]]] = []

    def on(self, case: Case) -> tuple[Case, list[Any]]:
        """The case with its outputs. Raises OriginalFails if the run fails."""
        outputs = self.attempt(case)
        if outputs is None:
            raise OriginalFails(f"the original fails on the inputs given: {self.errors[-1]}")
        return case, outputs

    def attempt(self, case: Case) -> list[Any] | None:
        """The outputs; None if the run fails, or takes a thousand times as long as the first one."""
        if not case.values.floats.finite and all(fate is Fate.UNDEFINED for fate in self.fates(case)):
            return None
        if not self._survives(case):
            return None
        begin = time.monotonic()
        limit = None if self._first is None else max(_LEAST_LIMIT, 1000 * self._first)
        try:
            outputs = self._runner.run(case.feeds, limit)
        except OutOfTime as error:
            if self._first is None:
                raise
            self.errors.append(first_line(error))
            return None
        except BackendError as error:
            self.errors.append(first_line(error))
            return None
        if self._first is None:
            self._first = time.monotonic() - begin
        if case.values.ordinary:
            self._whole &= is_whole(outputs)
        return outputs

    def _survives(self, case: Case) -> bool:
        """Whether a case may be run in this process. If a window is larger than its image, some kernels of ONNX
        Runtime divide by zero, so such a case is run in a separate process first. Once one such case failed, no
        further ones are run.
        """
        if not case.bindings or self.at.windows_fit(case):
            return True
        if self._misfits_fail:
            return False
        try:
            run_isolated(self._model, case.feeds)
        except BackendError as error:
            self.errors.append(first_line(error))
            self._misfits_fail = True
        return not self._misfits_fail

    def fates(self, case: Case) -> tuple[Fate, ...]:
        """For each output, what is guaranteed about it if inputs are not finite: see `Fate`."""
        feeds = evaluable_feeds(self.imported, case.feeds)
        if feeds is None:
            return tuple(Fate.UNDEFINED for _ in self.imported.graph.outputs)
        outcome = next((result for other, result in self._fates if other is case), None)
        if outcome is None:
            outcome = fates(self.imported.graph, feeds, self.at.numbers(case.bindings))
            self._fates.append((case, outcome))
        return outcome

    def sensible(self, case: Case, outputs: list[Any]) -> bool:
        return _is_full(outputs) and self.at.windows_fit(case)

    def telling(self, case: Case, outputs: list[Any]) -> bool:
        """Whether the outputs of a case with unusual values are evidence. If the model overflows, they are not."""
        return (
            not case.values.floats.finite
            or case.values.masks is Masks.EMPTY
            or case.values is TIES
            or not self._whole
            or is_whole(outputs)
        )

    def exemptions(self, case: Case) -> tuple[Exemption | None, ...]:
        """For each output, which of its elements are not compared; empty if all elements of all outputs are."""
        if case.values.masks is Masks.EMPTY:
            return tuple(Exemption.MENDS for _ in self.imported.graph.outputs)
        if case.values.floats.finite:
            return ()
        return tuple(_EXEMPTIONS[fate] for fate in self.fates(case))

    def sampler(
        self, other: ImportedModel | None, bindings: Bindings | None, seed: int, further: Iterable[int] = ()
    ) -> CaseSampler[list[Any]]:
        """The sampler of cases, with the numbers of both models.

        Numbers that only one model mentions weigh most. Those of `further`, which neither model mentions, weigh least.
        """
        plan = InputPlan.of(self.imported)
        if bindings is not None:
            plan = replace(plan, bound=bindings)
        graphs = [self.imported.graph, *([other.graph] if other is not None else [])]
        plan = replace(
            plan,
            thresholds=tuple(sorted(frozenset().union(*map(thresholds, graphs)))),
            ties=any(map(has_ties, graphs)),
        )
        slots = [slot for slot in plan.dimensions.slots if slot.role is not Role.RANK]
        symbols = [slot.name for slot in slots]
        numbers: dict[str, dict[int, int]] = {symbol: {} for symbol in symbols}
        weights_by_model = [on_symbols(marks(graph), symbols) for graph in graphs] if symbols else []
        for slot in slots:
            for own in weights_by_model:
                for number, weight in own[slot.name].items():
                    alone = any(number not in others[slot.name] for others in weights_by_model)
                    # A fixed part of a shape (weight 1) that both models mention says little about a batch beside it.
                    if alone or weight > 1 or slot.role is not Role.BATCH:
                        weight_so_far = numbers[slot.name].get(number, 0)
                        numbers[slot.name][number] = max(weight_so_far, _ALONE * weight if alone else weight)
        return CaseSampler(
            plan,
            self.attempt,
            self.sensible,
            self.telling,
            numbers,
            tuple(sorted({n for n in further if LEAST <= n < ENDLESS})),
            self.at.estimate,
            seed,
        )


def run_empty(
    run: Runs,
    model: Model,
    cases: Iterable[Case],
    threads: int | None,
    session_options: Options | None,
    float64_flops: float,
) -> tuple[tuple[ReferenceCase, ...], tuple[str, ...]]:
    """Cases with a size of 0 on which the original runs, each with its outputs, and notes.

    They are run in a separate process. Some kernels of ONNX Runtime return wrong results or uninitialised memory for
    empty inputs; such cases are left out, with a note.
    """
    references, notes = [], []
    for case in cases:
        if deadline.over():
            notes.append("not compared with a dimension of 0: there was no time")
            break
        try:
            outputs = run_isolated(model, case.feeds, threads=threads, session_options=session_options)
        except BackendError:
            continue  # ONNX defines no output at this size
        reference = ReferenceCase(case, [flat(output) for output in outputs])
        deviation = _unusual(run, reference, float64_flops)
        if deviation:
            notes.append(f"not compared on {case}: ONNX Runtime gives {deviation}")
            continue
        for index, parts in enumerate(reference.outputs):
            for part, array in parts:
                if is_float(array):
                    reference.targets[index, part] = by_deviation(array, None)
        references.append(reference)
    return tuple(references), tuple(notes)


def _unusual(run: Runs, reference: ReferenceCase, float64_flops: float) -> str:
    """A note on an output that differs from what the ONNX operators define; "" if no difference was found."""
    graph, numbers = run.imported.graph, run.at.numbers(reference.case.bindings)
    names = [info.name for info in run.imported.frame.graph.output]
    filled = []
    for index, (name, value, parts) in enumerate(zip(names, graph.outputs, reference.outputs)):
        shape = graph.type(value).shape
        for part, array in parts:
            if part or shape is None:
                continue
            sizes = [numbers.get(d) if isinstance(d, str) else d for d in shape]
            if len(sizes) != array.ndim or any(n not in (None, m) for n, m in zip(sizes, array.shape)):
                shown = ", ".join("?" if n is None else str(n) for n in sizes)
                return f"output {name!r} the shape {list(array.shape)}, its operators give [{shown}]"
            if array.size and is_float(array):
                filled.append(index)
    computed = [i for i in filled if evaluable(graph)[i]]
    if not computed or run.at.flops(reference.case) > float64_flops:
        return ""
    with suppress(NoReference):
        for index in not_credible(run.imported, reference, computed):
            return f"output {names[index]!r} other values than its operators"
    return ""


def exercise(
    sampler: CaseSampler[list[Any]],
    sampled: SampledCases[list[Any]],
    models: Sequence[tuple[Model, ImportedModel]],
    threads: int | None,
    session_options: Options | None,
) -> tuple[str, ...]:
    """Draw inputs until they reach every branch of the models, and add them. Returns the branches never reached."""
    missing: dict[str, None] = {}
    for model, imported in models:
        if not has_branches(imported):
            continue
        try:
            with watched(model, threads=threads, session_options=session_options) as watch:
                for case, _ in sampled.cases:
                    watch.run(case.feeds, _LEAST_LIMIT)
                for case in sampler.seeking(sampled.bindings[:5], deciding(imported.graph)):
                    if not watch.missing or deadline.over():
                        break
                    if watch.run(case.feeds, _LEAST_LIMIT):
                        outputs = sampler.attempt(case)
                        if outputs is not None:
                            sampled.cases.append((case, outputs))
                missing.update((str(arm), None) for arm in watch.missing)
        except OutOfTime:
            missing["any branch: there was no time"] = None
        except BackendError as error:
            missing[
                f"any branch: a copy of the model that counts them does not run ({first_line(error)})"
            ] = None
    return tuple(missing)


def _is_full(outputs: Sequence[Any]) -> bool:
    """Whether every output has elements."""
    return all(array.size for output in outputs for _, array in flat(output))
