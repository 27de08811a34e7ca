"""Collects more evidence on outputs that differ: further runs of the original, measured noise, and further targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xrlflow.backends.onnxruntime.session import Options
from xrlflow.backends.protocol import BackendError, OutOfTime
from xrlflow.onnxio import ImportedModel
from xrlflow.verify.compare import (
    Criterion,
    Target,
    around,
    by_deviation,
    epsilon,
    judge_floats,
    magnitudes,
    wide,
)
from xrlflow.verify.inputs import moved_weights, perturbed
from xrlflow.verify.noise import SAMPLES, jumps, rounding_noise
from xrlflow.verify.reference import NoReference, Sizes
from xrlflow.verify.runner import Array, Model, first_line, flat, opened
from xrlflow.verify.targets import ON_DEMAND, ReferenceCase

# How many sets of perturbed inputs are run. In a perturbed set, every float is replaced by a neighbouring float.
_MOVED = 2
# The most noise that runs with moved weights show, as a multiple of eps times the magnitudes around the element (see
# `compare`). It only widens the tolerance of elements that are small beside others.
_OF_WEIGHTS = 1 / 8


@dataclass(slots=True, eq=False)
class Rerun:
    """Further outputs of the original on one case. A field is None or empty if its run failed."""

    plain: list[Any] | None = None  # without ONNX Runtime's optimisations
    perturbed: list[list[Any]] = field(default_factory=list)  # with perturbed inputs, as the user runs it
    plain_perturbed: list[list[Any]] = field(
        default_factory=list
    )  # with perturbed inputs, without optimisations
    rounding: dict[int, Array] = field(default_factory=dict)  # by output: noise by stochastic arithmetic
    spread: dict[int, Array] = field(default_factory=dict)  # by output: noise by runs of the original

    def arrays(self, index: int) -> list[Array]:
        """All these results of one output that is a tensor."""
        runs = [*self.perturbed, *self.plain_perturbed, *([self.plain] if self.plain is not None else [])]
        outputs = [dict(flat(run[index])).get("") for run in runs]
        return [array for array in outputs if array is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Reruns:
    """Runs the original again on cases with disputed outputs, once per case. `budget`: see FLOAT64_FLOPS."""

    model: Model
    imported: ImportedModel
    seed: int
    threads: int | None
    session_options: Options | None
    budget: float
    sizes: Sizes = field(init=False)
    _reruns: dict[int, Rerun] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", Sizes(self.model, self.imported))

    def on(self, cases: Iterable[ReferenceCase]) -> None:
        """Run the original again on these cases, at each optimisation level at which it runs."""
        new = {id(k): k for k in cases if id(k) not in self._reruns}
        self._reruns.update((key, Rerun()) for key in new)
        for optimized in (True, False) if new else ():
            # A failed run is no evidence: differences that only it could explain stay failures.
            with (
                suppress(BackendError),
                opened(
                    self.model,
                    optimized=optimized,
                    threads=self.threads,
                    session_options=self.session_options,
                ) as runner,
            ):
                for key, k in new.items():
                    rerun = self._reruns[key]
                    if not optimized:
                        rerun.plain = runner.run(k.case.feeds)
                    into = rerun.perturbed if optimized else rerun.plain_perturbed
                    for i in range(_MOVED):
                        into.append(runner.run(perturbed(k.case.feeds, self.seed + i)))

    def with_moved_weights(self, cases: Iterable[ReferenceCase]) -> Mapping[int, Rerun]:
        """Run the original on cases with each weight replaced by a neighbour. Returns the outputs by case.

        They show which elements depend on weights at all, not how far rounding moves them: stored weights are exact,
        and 1 - w may be exact, too. So they count as little noise (`_OF_WEIGHTS`). Constants that ONNX Runtime folds
        are made of the file's weights, which shows less noise.

        Nothing is run if there are no such weights. Raises BackendError.
        """
        made: dict[int, Rerun] = {}
        # Options that are an object of ONNX Runtime cannot be copied, and would keep the weights.
        if self.session_options is None or isinstance(self.session_options, Mapping):
            weights = moved_weights(self.imported, self.seed)
            if weights:
                with opened(
                    self.model, threads=self.threads, session_options=self.session_options, weights=weights
                ) as runner:
                    for case in cases:
                        made[id(case)] = Rerun(perturbed=[runner.run(case.case.feeds)])
        return made

    def without_running(self, cases: Iterable[ReferenceCase]) -> None:
        """Let the noise of these cases be measured without another run of the original, which may crash with them."""
        for case in cases:
            self._reruns.setdefault(id(case), Rerun())

    def arrays(self, case: ReferenceCase, index: int) -> list[Array]:
        """The further results for one output of a case that was run again."""
        return self._reruns[id(case)].arrays(index)

    def measure(self, case: ReferenceCase, indices: Iterable[int]) -> None:
        """Measure the rounding noise of several float outputs in one evaluation, after `on` has run their case."""
        rounding = self._reruns[id(case)].rounding
        missing = [index for index in dict.fromkeys(indices) if index not in rounding]
        cost = (1 + SAMPLES) * self.sizes.flops(case.case)
        if not missing or cost > ON_DEMAND * self.budget:
            return
        values = [self.imported.graph.outputs[index] for index in missing]
        try:
            rounding.update(zip(missing, rounding_noise(self.imported, case.case, values)))
        except NoReference:  # of one of these outputs, maybe
            for index, value in zip(missing, values) if len(missing) > 1 else ():
                with suppress(NoReference):
                    rounding[index] = rounding_noise(self.imported, case.case, [value])[0]

    def targets(self, case: ReferenceCase, index: int, by: Rerun | None = None) -> list[Target]:
        """The targets, with noise, that an output (a tensor) may equal: its present target, the original as the user
        runs it, and the original without ONNX Runtime's optimisations.

        `by`: runs with moved weights that tell the noise; None: those of `on`, and stochastic arithmetic (see `noise`).
        """
        rerun = self._reruns[id(case)] if by is None else by
        first = case.targets.get((index, "")) or case.unexplained[index]
        original = first.original
        noise = self._spread(case, rerun, index, original)
        if by is not None:
            noise = np.minimum(noise, _OF_WEIGHTS * epsilon(original) * around(magnitudes(original)))
        else:
            self.measure(case, [index])
            if index in rerun.rounding and rerun.rounding[index].shape == original.shape:
                noise = np.maximum(noise, rerun.rounding[index])
        variants = tuple(a for a in rerun.arrays(index) if a.shape == original.shape)
        plain = None if rerun.plain is None else dict(flat(rerun.plain[index])).get("")
        candidates = [
            first,
            replace(by_deviation(original, None), relative=first.relative),
            replace(by_deviation(original, plain), criterion=Criterion.PLAIN, relative=first.relative),
        ]
        if candidates[2].other is None:
            candidates.pop()
        if first.criterion is not Criterion.FLOAT64:
            candidates.pop(0)
        kinds = () if case.case.values.ordinary else variants
        return [replace(target, noise=noise, variants=kinds) for target in candidates]

    def _spread(self, case: ReferenceCase, rerun: Rerun, index: int, original: Array) -> Array:
        """How far apart the runs of the original are, with inputs or weights that are neighbours."""
        if index in rerun.spread:
            return rerun.spread[index]
        noise = np.zeros(original.shape)
        value = self.imported.graph.outputs[index]
        if not jumps(self.imported.graph, value):
            levels = [(case.outputs[index][0][1], rerun.perturbed)]
            if rerun.plain is not None:
                levels.append((dict(flat(rerun.plain[index])).get(""), rerun.plain_perturbed))
            for base, runs in levels:
                for run in runs:
                    other = dict(flat(run[index])).get("")
                    if base is not None and other is not None and other.shape == base.shape == original.shape:
                        noise = np.maximum(noise, _distance(base, other))
        rerun.spread[index] = noise
        return noise

    def settle(self, cases: Sequence[ReferenceCase]) -> list[str]:
        """Decide whether to use float64 evaluations from which the original's outputs are far. Returns notes.

        An evaluation is used if measured noise explains the distance, or if the original without ONNX Runtime's
        optimisations agrees with the evaluation. Otherwise the evaluation itself may be wrong.
        """
        unexplained = [k for k in cases if k.unexplained]
        self.on(unexplained)
        notes = []
        for k in unexplained:
            for index, target in k.unexplained.items():
                name = self.imported.frame.graph.output[index].name
                exact, *others = self.targets(k, index)
                plain = next((t.other for t in others if t.criterion is Criterion.PLAIN), None)
                if judge_floats(exact, target.original).passed:
                    k.targets[index, ""] = exact
                elif plain is not None and judge_floats(exact, plain).passed:
                    k.targets[index, ""] = exact
                    k.changed[index] = float(_distance(target.original, plain).max(initial=0.0))
                elif k.case.values.ordinary:
                    notes.append(
                        f"the float64 evaluation of output {name!r} is not what the original computes"
                    )
            k.unexplained.clear()
        return list(dict.fromkeys(notes))

    def unoptimised(self, cases: Sequence[ReferenceCase]) -> list[str]:
        """Add the outputs without ONNX Runtime's optimisations to targets that have no float64 evaluation.

        Returns notes. Outputs that differ between the two optimisation levels by more than rounding are entered in
        `changed`.
        """
        try:
            with opened(
                self.model, optimized=False, threads=self.threads, session_options=self.session_options
            ) as runner:
                for k in cases:
                    for index, output in enumerate(runner.run(k.case.feeds)):
                        self._add(k, index, dict(flat(output)))
        except OutOfTime:
            return ["there was no time to run the original without ONNX Runtime's optimisations"]
        except BackendError as error:
            return [f"the original does not run without ONNX Runtime's optimisations: {first_line(error)}"]
        far = [
            (k, index)
            for k in cases
            for (index, part), y in k.targets.items()
            if y.criterion is Criterion.DEVIATION
            and y.other is not None
            and not part
            and not _agree(y, y.other)
        ]
        self.on(k for k, _ in far)
        for k, index in far:
            plain = next((t for t in self.targets(k, index) if t.criterion is Criterion.PLAIN), None)
            if (
                plain is not None
                and plain.other is not None
                and not judge_floats(plain, plain.original).passed
            ):
                k.changed[index] = float(_distance(plain.original, plain.other).max(initial=0.0))
        return []

    def _add(self, k: ReferenceCase, index: int, others: dict[str, Array]) -> None:
        for part, array in k.outputs[index]:
            target = k.targets.get((index, part))
            if target is not None and target.criterion is Criterion.DEVIATION and part in others:
                added = by_deviation(array, others[part])
                k.targets[index, part] = replace(added, relative=target.relative)


def _agree(target: Target, other: Array) -> bool:
    return judge_floats(target, other).passed


def _distance(a: Array, b: Array) -> Array:
    """|a - b| where both are finite, else 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(wide(a) - wide(b))
    return np.where(np.isfinite(distance), distance, 0.0)
