"""More evidence on outputs that differ: further runs of the original, measured noise, and further targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xrlflow.backends.onnxruntime.session import Options
from xrlflow.backends.protocol import BackendError, OutOfTime
from xrlflow.onnxio import ImportedModel
from xrlflow.verify.compare import Leg, Yardstick, by_deviation, judge_floats, wide
from xrlflow.verify.inputs import perturbed
from xrlflow.verify.noise import SAMPLES, jumps, rounding_noise
from xrlflow.verify.reference import NoReference, Sizes
from xrlflow.verify.runner import Array, Model, first_line, flat, opened
from xrlflow.verify.yardsticks import ON_DEMAND, Known

# How many sets of perturbed inputs are run; in each, every float is replaced by a neighbouring one.
_MOVED = 2


@dataclass(slots=True, eq=False)
class Rerun:
    """Further outputs of the original on one case. None or empty: the run failed."""

    plain: list[Any] | None = None  # without ONNX Runtime's optimisations
    moved: list[list[Any]] = field(default_factory=list)  # with perturbed inputs, as the user runs it
    plain_moved: list[list[Any]] = field(default_factory=list)  # with perturbed inputs, without optimisations
    noise: dict[int, Array] = field(default_factory=dict)  # by output: how far rounding moves each element

    def arrays(self, index: int) -> list[Array]:
        """All these results of one output that is a tensor."""
        runs = [*self.moved, *self.plain_moved, *([self.plain] if self.plain is not None else [])]
        found = [dict(flat(run[index])).get("") for run in runs]
        return [array for array in found if array is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Reruns:
    """Runs the original again on cases with disputed outputs, each once. `budget`: see FLOAT64_FLOPS."""

    model: Model
    imported: ImportedModel
    seed: int
    threads: int | None
    session_options: Options | None
    budget: float
    _made: dict[int, Rerun] = field(default_factory=dict)

    def on(self, known: Iterable[Known]) -> None:
        """Run the original again on these cases, at each optimisation level at which it runs."""
        new = {id(k): k for k in known if id(k) not in self._made}
        self._made.update((key, Rerun()) for key in new)
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
                    made = self._made[key]
                    if not optimized:
                        made.plain = runner.run(k.case.feeds)
                    into = made.moved if optimized else made.plain_moved
                    for i in range(_MOVED):
                        into.append(runner.run(perturbed(k.case.feeds, self.seed + i)))

    def arrays(self, known: Known, index: int) -> list[Array]:
        """The further results for one output of a case that was run again."""
        return self._made[id(known)].arrays(index)

    def targets(self, known: Known, index: int) -> list[Yardstick]:
        """The targets that an output (a tensor) of a case that was run again may equal, with measured noise: that of
        its tolerance scale, the original as the user runs it, and the original without ONNX Runtime's optimisations."""
        made = self._made[id(known)]
        first = known.yardsticks.get((index, "")) or known.doubtful[index]
        original = first.original
        noise = self._noise(known, made, index, original)
        variants = tuple(a for a in made.arrays(index) if a.shape == original.shape)
        plain = None if made.plain is None else dict(flat(made.plain[index])).get("")
        found = [
            first,
            replace(by_deviation(original, None), relative=first.relative),
            replace(by_deviation(original, plain), leg=Leg.PLAIN, relative=first.relative),
        ]
        if found[2].other is None:
            found.pop()
        if first.leg is not Leg.FLOAT64:
            found.pop(0)
        kinds = () if known.case.values.ordinary else variants
        return [replace(target, noise=noise, variants=kinds) for target in found]

    def _noise(self, known: Known, made: Rerun, index: int, original: Array) -> Array:
        if index in made.noise:
            return made.noise[index]
        noise = np.zeros(original.shape)
        value = self.imported.graph.outputs[index]
        if not jumps(self.imported.graph, value):
            levels = [(known.outputs[index][0][1], made.moved)]
            if made.plain is not None:
                levels.append((dict(flat(made.plain[index])).get(""), made.plain_moved))
            for base, runs in levels:
                for run in runs:
                    other = dict(flat(run[index])).get("")
                    if base is not None and other is not None and other.shape == base.shape == original.shape:
                        noise = np.maximum(noise, _apart(base, other))
        cost = (1 + SAMPLES) * Sizes(self.model, self.imported).flops(known.case)
        if cost <= ON_DEMAND * self.budget:
            with suppress(NoReference):
                found = rounding_noise(self.imported, known.case, [value])[0]
                if found.shape == original.shape:
                    noise = np.maximum(noise, found)
        made.noise[index] = noise
        return noise

    def settle(self, known: Sequence[Known]) -> list[str]:
        """Decide whether to use float64 evaluations that the original is far from. Returns notes.

        An evaluation is used if measured noise explains the distance, or if the original agrees with it without ONNX
        Runtime's optimisations. Otherwise the evaluation itself may be wrong.
        """
        doubtful = [k for k in known if k.doubtful]
        self.on(doubtful)
        notes = []
        for k in doubtful:
            for index, yardstick in k.doubtful.items():
                name = self.imported.frame.graph.output[index].name
                exact, *others = self.targets(k, index)
                plain = next((t.other for t in others if t.leg is Leg.PLAIN), None)
                if judge_floats(exact, yardstick.original).passed:
                    k.yardsticks[index, ""] = exact
                elif plain is not None and judge_floats(exact, plain).passed:
                    k.yardsticks[index, ""] = exact
                    k.changed[index] = float(_apart(yardstick.original, plain).max(initial=0.0))
                elif k.case.values.ordinary:
                    notes.append(
                        f"the float64 evaluation of output {name!r} is not what the original computes"
                    )
            k.doubtful.clear()
        return list(dict.fromkeys(notes))

    def unoptimised(self, known: Sequence[Known]) -> list[str]:
        """Add the outputs without ONNX Runtime's optimisations to scales that have no float64 evaluation.

        Returns notes. Outputs of which the two levels differ by more than rounding are entered in `changed`.
        """
        try:
            with opened(
                self.model, optimized=False, threads=self.threads, session_options=self.session_options
            ) as runner:
                for k in known:
                    for index, output in enumerate(runner.run(k.case.feeds)):
                        self._add(k, index, dict(flat(output)))
        except OutOfTime:
            return ["there was no time to run the original without ONNX Runtime's optimisations"]
        except BackendError as error:
            return [f"the original does not run without ONNX Runtime's optimisations: {first_line(error)}"]
        far = [
            (k, index)
            for k in known
            for (index, part), y in k.yardsticks.items()
            if y.leg is Leg.DEVIATION and y.other is not None and not part and not _agree(y, y.other)
        ]
        self.on(k for k, _ in far)
        for k, index in far:
            plain = next((t for t in self.targets(k, index) if t.leg is Leg.PLAIN), None)
            if (
                plain is not None
                and plain.other is not None
                and not judge_floats(plain, plain.original).passed
            ):
                k.changed[index] = float(_apart(plain.original, plain.other).max(initial=0.0))
        return []

    def _add(self, k: Known, index: int, others: dict[str, Array]) -> None:
        for part, array in k.outputs[index]:
            yardstick = k.yardsticks.get((index, part))
            if yardstick is not None and yardstick.leg is Leg.DEVIATION and part in others:
                added = by_deviation(array, others[part])
                k.yardsticks[index, part] = replace(added, relative=yardstick.relative)


def _agree(yardstick: Yardstick, other: Array) -> bool:
    return judge_floats(yardstick, other).passed


def _apart(a: Array, b: Array) -> Array:
    """|a - b| where both are finite, else 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(wide(a) - wide(b))
    return np.where(np.isfinite(apart), apart, 0.0)
