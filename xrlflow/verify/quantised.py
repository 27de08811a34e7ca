"""Whether a model computes the same as a quantised model, layer by layer.

A tie that is rounded differently changes everything computed from it, so the outputs of whole models cannot be
compared. Quantised tensors can be compared: both models are cut at the quantised tensors that they share (by
structure, name or value), and the same part of both models gets the same quantised inputs, those of the original's
exact evaluation (in integers and float64).

- Meaning: the new model's tensors, evaluated exactly, are rounded from the same numbers as the original's, within TIE
  of a step. This needs no runtime. A part of the same operators on the same inputs is not evaluated.
- Runtime: what ONNX Runtime computes for each part of the new model, at the user's optimisation level, is a rounding of
  a number within TIE of the exact number. If not, it must equal what ONNX Runtime computes for the original's part, at
  that level or without optimisations: where the runtime deviates from the original's meaning, the new model may.
- Whole models: if their outputs differ, the parts must explain the difference: each quantised tensor that only the new
  model has must be what its part computes, or means, from the tensors before it.

Where a part has long sums of floats, TIE is too small. If a tensor exceeds TIE, its elements get a wider window: 8
times the distance by which rounding to the declared types moves the numbers around the element, in our evaluation. The
runtimes' own errors never count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from xrlflow.backends.onnxruntime.session import Options
from xrlflow.backends.protocol import BackendError, OutOfTime
from xrlflow.common import deadline
from xrlflow.ir import Value
from xrlflow.onnxio import ImportedModel
from xrlflow.verify.compare import Criterion, Exemption, Judgement, by_deviation, is_float, judge_floats, wide
from xrlflow.verify.cuts import GIVEN, perturbed_constants
from xrlflow.verify.inputs import Case
from xrlflow.verify.layers import TIE, Layers, is_quantised, shifted
from xrlflow.verify.meaning import (
    Comparison,
    CutModel,
    Difference,
    Meaning,
    Sample,
    Unjudged,
    compared,
    distance,
    greatest,
    meaning_of,
    output_difference,
    share,
    shift_of,
)
from xrlflow.verify.runner import Array, Model, Runner, first_line, opened
from xrlflow.verify.targets import ReferenceCase

PRECISE = "session.x64quantprecision"
"""The session option that makes ONNX Runtime add products of bytes without saturation."""

# On this many sets of inputs, the original runs once more, without optimisations, which shows how its results vary.
_VARIED = 3
# How many copies of the original with perturbed constants are run, which shows how far ties move its outputs.
_MOVES = 4
# Once the samples have this many elements of quantised tensors, about 10 bytes each, no further ones are evaluated.
_MOST_ELEMENTS = 30_000_000
# How many times longer than its exact evaluation a set of inputs takes, with runs of the original's parts.
_COMPARED = 5


@dataclass(frozen=True, slots=True, order=True)
class Exactness:
    """How near the quantised tensors of a new model are to what the original means, each computed from the exact ones
    before it. A greater one is less exact.

    `steps`: the greatest difference, of elements that also differ from ONNX Runtime's result for the original. A
    scale that is computed, and differs in its last bits, counts as one step. `runtime`: the number of elements that
    differ from the exact ones but equal that result.
    """

    steps: int = 0
    runtime: int = 0

    def __str__(self) -> str:
        if self.steps:
            return f"within {self.steps} step{'s' if self.steps > 1 else ''}"
        return "as the runtime" if self.runtime else "exact"


@dataclass(frozen=True, slots=True)
class Counts:
    """How many elements of a model's quantised tensors ONNX Runtime computes exactly, and why the other elements
    differ.
    """

    tensors: int = 0
    elements: int = 0  # of all tensors
    ties: int = 0  # elements that differ by a tie
    rounded: int = 0  # elements that differ more, within the window
    runtime: int = 0  # elements that equal what ONNX Runtime computes for the original, but not its meaning
    exactness: Exactness = Exactness()

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            max(self.tensors, other.tensors),
            self.elements + other.elements,
            self.ties + other.ties,
            self.rounded + other.rounded,
            self.runtime + other.runtime,
            Exactness(
                max(self.exactness.steps, other.exactness.steps),
                self.exactness.runtime + other.exactness.runtime,
            ),
        )

    def __str__(self) -> str:
        parts = [
            f"{self.tensors} quantised tensors of {self.elements:,} elements are what the original means"
        ]
        if not (self.ties or self.rounded or self.runtime):
            return f"{parts[0]}, exactly"
        if self.ties:
            parts.append(f"{self.ties:,} elements within one step at rounding ties")
        if self.rounded:
            parts.append(f"{self.rounded:,} as near as the types of their floats allow")
        if self.runtime:
            parts.append(f"{self.runtime:,} as ONNX Runtime computes the original")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on a model."""

    reason: str = ""  # why nothing was judged; "" if it was
    samples: int = 0  # the number of sets of inputs
    failures: tuple[str, ...] = ()  # sentences, the most important first
    wrong: tuple[Difference, ...] = ()
    counts: Counts = Counts()

    @property
    def evaluated(self) -> bool:
        return self.samples > 0

    @property
    def passed(self) -> bool:
        return self.evaluated and not self.failures


# --- what ONNX Runtime computes for the parts ---


def _run(runner: Runner, meaning: Meaning) -> dict[str, Array]:
    return meaning.model.results(runner.run(meaning.feeds()))


@dataclass(slots=True, eq=False)
class _RunResult:
    """How the results of ONNX Runtime for the parts of a model differ from what the parts mean."""

    wrong: list[Difference] = field(default_factory=list)
    counts: Counts = Counts()


def _compare_run(
    meaning: Meaning,
    run: Mapping[str, Array],
    others: Callable[[Value], list[Array]] = lambda _: [],
    usual: Callable[[Value], list[Array]] = lambda _: [],
) -> _RunResult:
    """Compare a run of the parts with what they mean. `others`: a function to the further results that a tensor or
    output may equal; `usual`: to those of the original at the user's optimisation level.
    """
    result = _RunResult(counts=Counts(tensors=len(meaning.model.cuts)))
    for value, name in meaning.model.cuts.items():
        array, exact = run[name], meaning.layers[value]
        if array.shape != exact.numbers.shape:
            result.wrong.append(Difference(name, float("inf"), array.size, array.size))
            continue
        beyond_tie, beyond_window, shift = _misses(meaning, run, value)
        wrong = beyond_window
        if beyond_window.any():
            for other in others(value):
                if other.shape == array.shape:
                    wrong = wrong & (array != other)
        if wrong.any():
            steps = greatest(np.abs(array.astype(np.float64) - shift - exact.numbers)[wrong])
            count = int(np.count_nonzero(wrong))
            result.wrong.append(Difference(name, steps, count, wrong.size, exact.offsets is None))
        differs = array != meaning.given[value]
        ties = 0 if exact.offsets is None else int(np.count_nonzero(differs & ~beyond_tie))
        rounded, runtime = (
            np.count_nonzero(beyond_tie & ~beyond_window),
            np.count_nonzero(beyond_window & ~wrong),
        )
        usual_results = usual(value) if differs.any() else []
        exactness = _exactness(meaning.given[value], array, shift, usual_results)
        result.counts += Counts(0, array.size, ties, int(rounded), int(runtime), exactness)
    for value, name in zip(meaning.model.graph.outputs, meaning.model.output_names):
        if value in meaning.layers:
            continue
        targets = [meaning.outputs[value], *others(value)]
        differences = [output_difference(meaning, value, run[name], target) for target in targets]
        if differences[0] is not None and not all(differences):
            result.counts += Counts(exactness=Exactness(0, differences[0].count))
        if all(differences):
            result.wrong.append(
                replace(differences[0], name=name) if differences[0] else Difference(name, 0, 0, 0)
            )
    return result


def _exactness(exact: Array, array: Array, shift: int, usual: Sequence[Array]) -> Exactness:
    """The exactness of a tensor that ONNX Runtime computed. `exact`: what the original means by it."""
    differs = unlike = array != exact
    for other in usual:
        if other.shape == array.shape:
            unlike = unlike & (array != other)
    if is_float(exact):
        steps = int(unlike.any())
    else:
        distances = np.abs(array.astype(np.float64) - shift - exact)
        steps = int(np.max(distances, initial=0.0, where=unlike))
    return Exactness(steps, int(np.count_nonzero(differs & ~unlike)))


def _misses(meaning: Meaning, run: Mapping[str, Array], value: Value) -> tuple[Array, Array, int]:
    """For a quantised tensor of a run: a mask of the elements that are not the rounding of any number within TIE of
    the exact number, the same mask for the tensor's window instead of TIE, and the run's zero point minus the exact
    zero point.
    """
    array, exact = run[meaning.model.cuts[value]], meaning.layers[value]
    zero = exact.zero if exact.zero in meaning.model.cuts else None
    shift = 0 if zero is None else shift_of(run[meaning.model.cuts[zero]], meaning.layers[zero])
    beyond_tie = beyond_window = exact.misses(array, TIE, shift)
    if beyond_tie.any() and exact.offsets is not None:
        beyond_window = exact.misses(array, meaning.window(value), shift)
    return beyond_tie, beyond_window, shift


# --- the original, and the models that are judged by it ---


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """The exact evaluation of a quantised original on some inputs."""

    touched: tuple[bool, ...]  # for each output, whether it depends on operators of quantised numbers
    reason: str = ""  # why there is no evaluation; "" if there is
    notes: tuple[
        str, ...
    ] = ()  # how ONNX Runtime's results deviate from what the original means; what was left out
    _meanings: tuple[Meaning, ...] = ()
    _threads: int | None = None
    _options: Options | None = None

    @staticmethod
    def of(
        model: Model,
        imported: ImportedModel,
        samples: Sequence[Sample],
        budget: float,
        *,
        threads: int | None = None,
        session_options: Options | None = None,
    ) -> Quantised | None:
        """Evaluate a model on as many samples as `budget` (operations) allows; None if nothing in it is quantised, or
        weights alone: then no tie can move what is computed, and outputs are compared.

        The first sample may cost ten times the budget.
        """
        if not is_quantised(imported.graph):
            return None
        layers = Layers(imported.graph)
        if layers.only_weights:
            return None
        base = Quantised(layers.touched, "", (), (), threads, session_options)
        base = replace(base, notes=base._variations(model, imported, samples))
        selected = _within(samples, budget)
        try:
            if layers.obstacle or not selected:
                raise Unjudged(layers.obstacle or "its exact evaluation takes too long")
            meanings, left_out = _meanings(CutModel.of(model, imported), selected)
            notes = base.notes
            left_out += len(samples) - len(selected)
            if left_out:
                evaluated = f"{len(samples) - left_out} of {len(samples)} sets of inputs"
                notes = (
                    *notes,
                    f"judged layer by layer on {evaluated}: the others take too long, or too much memory",
                )
            return replace(base, notes=notes, _meanings=meanings)._with_runs()
        except Unjudged as error:
            reason = str(error)
        except OutOfTime:
            reason = "there was no time for the exact evaluation"
        except BackendError as error:
            reason = f"a copy that is cut does not run: {first_line(error)}"
        return replace(base, reason=reason)

    def _variations(
        self, model: Model, imported: ImportedModel, samples: Sequence[Sample]
    ) -> tuple[str, ...]:
        """Notes on float outputs that differ between ONNX Runtime's optimisation levels."""
        some = samples[:_VARIED]
        with suppress(BackendError), self._opened(model, optimized=False) as runner:
            plain = [runner.run(sample.feeds) for sample in some]
            notes = [
                variation(info.name, [(sample.outputs[at], run[at]) for sample, run in zip(some, plain)])
                for at, info in enumerate(imported.frame.graph.output)
                if self.touched[at]
            ]
            return tuple(text for text in notes if text is not None)
        return ()

    @property
    def judges_all(self) -> bool:
        """Whether the comparison of layers decides on all outputs of a model."""
        return not self.reason and all(self.touched)

    def _with_runs(self) -> Quantised:
        """Run the parts of the original. Returns a copy with these runs, and with a note if the results differ from
        the exact ones.
        """
        copy = self._meanings[0].showing(cut=True)
        results: list[_RunResult] = []
        with self._opened(copy) as runner:
            for meaning in self._meanings:
                meaning.runs.append(_run(runner, meaning))
                results.append(_compare_run(meaning, meaning.runs[0]))
        wrong = _worst(s.wrong for s in results)
        if wrong:
            self._run_plain()
            return replace(self, notes=(*self.notes, self._deviation(wrong, copy)))
        return self

    def _opened(self, model: Model, optimized: bool = True) -> AbstractContextManager[Runner]:
        return opened(model, optimized=optimized, threads=self._threads, session_options=self._options)

    def _run_plain(self) -> None:
        """Run the parts of the original without ONNX Runtime's optimisations, once. If the run fails, there is one
        result less that a new model may equal.
        """
        with suppress(BackendError):
            if len(self._meanings[0].runs) == 1:
                with self._opened(self._meanings[0].showing(cut=True), optimized=False) as runner:
                    for meaning in self._meanings:
                        meaning.runs.append(_run(runner, meaning))

    def _deviation(self, wrong: Mapping[str, Difference], copy: bytes) -> str:
        """The note that ONNX Runtime does not compute what the original means, with the greatest difference."""
        worst = max(wrong.values(), key=lambda difference: (not difference.floats, difference.maximum))
        meaning = self._meanings[0]
        count = len({*meaning.model.cuts, *meaning.outputs})
        text = (
            "ONNX Runtime on this processor does not compute what the original means: it differs in "
            f"{len(wrong)} of {count} quantised tensors and outputs, most in {worst}"
        )
        if self._is_mended(copy):
            return (
                f"{text}; it adds pairs of products of bytes in 16 bits, which saturate "
                f"(the session option {PRECISE}=1 makes it exact, and slower)"
            )
        plain = [_compare_run(m, m.runs[1]).wrong for m in self._meanings if len(m.runs) > 1]
        if plain and not any(plain):
            return f"{text}; with its optimisations off it computes what is meant"
        return text

    def _is_mended(self, copy: bytes) -> bool:
        """Whether ONNX Runtime computes the original's parts correctly with the session option PRECISE."""
        if self._options is not None and not isinstance(self._options, Mapping):
            return False
        options = {**(self._options or {}), PRECISE: "1"}
        with suppress(BackendError), opened(copy, threads=self._threads, session_options=options) as runner:
            return not any(_compare_run(m, _run(runner, m)).wrong for m in self._meanings)
        return False

    def judge(self, new: Model) -> Judged:
        """Whether a model computes what the original means, or what ONNX Runtime computes for the original."""
        if self.reason:
            return Judged(self.reason)
        try:
            b = CutModel.of(new)
            comparisons = [self._compare(original, b) for original in self._meanings]
            wrong = _worst(comparison.wrong for comparison in comparisons)
            if wrong:
                return self._failed(wrong, "from the same inputs, the original means something else")
            return self._judge_runs(new, b, comparisons)
        except Unjudged as error:
            return Judged(f"the new model: {error}")
        except BackendError as error:
            return Judged(f"the new model: a copy that is cut does not run: {first_line(error)}")

    def _compare(self, original: Meaning, b: CutModel) -> Comparison:
        """Compare what both models mean: first with tensors paired by name; if the models differ, again without
        names."""
        comparison = compared(original, b, by_name=True)
        if comparison.wrong:
            again = compared(original, b, by_name=False)
            if not again.wrong and not again.left & again.new:
                return again
        return comparison

    def _judge_runs(self, new: Model, b: CutModel, compared: Sequence[Comparison]) -> Judged:
        results: list[_RunResult] = []
        with self._opened(compared[0].meaning.showing(cut=True)) as runner:
            for original, comparison in zip(self._meanings, compared):
                run = _run(runner, comparison.meaning)
                others = self._others(original, comparison)
                results.append(_compare_run(comparison.meaning, run, others, partial(others, plain=False)))
        wrong = _worst(s.wrong for s in results)
        if wrong:
            return self._failed(
                wrong, "ONNX Runtime computes neither what is meant nor what it makes of the original"
            )
        unexplained = self._unexplained(new, b, compared)
        if unexplained:
            return self._failed(
                unexplained, "ONNX Runtime makes something else of the whole model than of its parts"
            )
        counts = sum((s.counts for s in results), Counts())
        return Judged(samples=len(results), counts=counts)

    def _others(self, original: Meaning, comparison: Comparison) -> Callable[..., list[Array]]:
        """A function from a value of the new model to what ONNX Runtime computes for the same value of the original:
        at the user's optimisation level and, if `plain`, without optimisations.
        """
        names = {
            **original.model.cuts,
            **dict(zip(original.model.graph.outputs, original.model.output_names)),
        }
        originals = dict(zip(comparison.meaning.model.graph.outputs, original.model.graph.outputs))

        def others(value: Value, plain: bool = True) -> list[Array]:
            if plain:
                self._run_plain()
            runs = original.runs if plain else original.runs[:1]
            name = names.get(originals.get(value, comparison.pairs.of[value]))
            layer = comparison.meaning.layers.get(value)
            results = [] if name is None else [run[name] for run in runs]
            if layer is None or layer.offsets is None:
                return results
            dtype = layer.numbers.dtype
            return [shifted(a, dtype) for a in results if a.dtype.itemsize == dtype.itemsize]

        return others

    def _failed(self, wrong: Mapping[str, Difference], why: str) -> Judged:
        worst = sorted(wrong.values(), key=lambda difference: (difference.floats, -difference.maximum))
        return Judged(
            samples=len(self._meanings),
            failures=tuple(
                f"tensor {difference.name!r} differs {difference.extent}: {why}" for difference in worst
            ),
            wrong=tuple(worst),
        )

    def _unexplained(self, new: Model, b: CutModel, compared: Sequence[Comparison]) -> dict[str, Difference]:
        """Outputs of the whole new model that differ both from the original's and from what the new parts compute."""
        unexplained: list[list[Difference]] = []
        differing: list[tuple[Comparison, list[Any], list[Difference]]] = []
        with self._opened(new) as runner:
            for original, comparison in zip(self._meanings, compared):
                outputs = runner.run(original.sample.feeds)
                differences = self._output_differences(original, outputs)
                if differences:
                    differing.append((comparison, outputs, differences))
        if differing:
            with (
                self._opened(compared[0].meaning.showing(cut=False)) as shown,
                self._opened(compared[0].meaning.showing(cut=True)) as cut,
            ):
                for comparison, outputs, differences in differing:
                    if not _is_explained(comparison.meaning, outputs, shown, cut) and not (
                        _is_explained(comparison.meaning, None, shown, cut)
                        and self._varies_as_much(comparison.meaning.sample, differences)
                    ):
                        unexplained.append(differences)
        return _worst(unexplained)

    def _varies_as_much(self, sample: Sample, differences: Sequence[Difference]) -> bool:
        """Whether the original's own outputs of floats differ at least half as much when its constants are replaced by
        neighbouring floats.

        This concerns models that quantise at run time, in an operator that is fused with a product. In these, the last
        bit of a tensor's largest element changes the scale, and so all elements of the tensor.
        """
        proto = self._meanings[0].model.proto
        if not any(node.op_type == "DynamicQuantizeLinear" for node in proto.graph.node):
            return False
        names = [info.name for info in proto.graph.output]
        spread = dict.fromkeys(names, 0.0)
        for seed in range(_MOVES):
            with self._opened(perturbed_constants(proto, seed)) as runner:
                for name, a, b in zip(names, sample.outputs, runner.run(sample.feeds)):
                    if is_float(a) and a.shape == b.shape:
                        spread[name] = max(spread[name], float(np.abs(wide(a) - wide(b)).max(initial=0.0)))
        return all(each.floats and each.maximum <= 2 * spread[each.name] for each in differences)

    def _output_differences(self, original: Meaning, outputs: Sequence[Array]) -> list[Difference]:
        """The outputs of a whole model that differ from the original's by more than rounding."""
        differences = []
        for at, (value, name) in enumerate(zip(original.model.graph.outputs, original.model.output_names)):
            a, b = original.sample.outputs[at], outputs[at]
            if not self.touched[at] or (a.shape == b.shape and bool((a == b).all())):
                continue
            if value in original.layers:
                differences.append(Difference(name, *distance(b, a)))
            elif difference := output_difference(original, value, b, a):
                differences.append(replace(difference, name=name))
        return differences


def _is_explained(meaning: Meaning, outputs: Sequence[Array] | None, shown: Runner, cut: Runner) -> bool:
    """Whether each quantised tensor of a whole model is what its part computes, or means, from the tensors before it.

    `outputs`: the outputs of the whole model; None stands for the outputs of the copy that has its quantised tensors
    as outputs.
    """
    model = meaning.model
    run = model.results(shown.run(meaning.sample.feeds))
    own = {value: run[name] for value, name in model.cuts.items()}
    mine = meaning_of(model, meaning.sample, own)
    # In a copy that has the tensors as outputs, ONNX Runtime may fuse less, and round the floats computed from them
    # differently.
    for value, name, array in zip(model.graph.outputs, model.output_names, outputs or ()):
        if not np.array_equal(run[name], array) and (
            value in mine.layers or output_difference(mine, value, run[name], array) is not None
        ):
            return False  # the copy computes something else than the model
    inputs = {name + GIVEN: run[name] for name in model.cuts.values()}
    parts = model.results(cut.run({**meaning.sample.feeds, **inputs}))
    if all(np.array_equal(run[name], parts[name]) for name in run):
        return True
    names = {**model.cuts, **dict(zip(model.graph.outputs, model.output_names))}
    return not _compare_run(mine, run, lambda value: [parts[names[value]]]).wrong


def samples_of(cases: Sequence[ReferenceCase], cost: Callable[[Case], float]) -> list[Sample]:
    """The cases whose inputs and outputs are all tensors, with finite outputs. Ordinary values come first, then cheap
    cases.
    """
    ranked: list[tuple[bool, float, Sample]] = []
    for item in cases:
        plain = all(len(parts) == 1 and not parts[0][0] for parts in item.outputs)
        tensors = all(isinstance(a, np.ndarray) for a in item.case.feeds.values())
        if plain and tensors and all(exemption is Exemption.NONE for exemption in item.exemptions):
            needed = cost(item.case)
            sample = Sample(item.case.feeds, [parts[0][1] for parts in item.outputs], needed)
            ranked.append((not item.case.values.ordinary, needed, sample))
    return [sample for _, _, sample in sorted(ranked, key=lambda entry: entry[:2])]


def _is_finite(array: Array) -> bool:
    return not is_float(array) or bool(np.isfinite(wide(array)).all())


def _within(samples: Sequence[Sample], budget: float) -> list[Sample]:
    """The samples to be evaluated, in order, until their cost exceeds the budget."""
    selected: list[Sample] = []
    remaining = budget
    for sample in samples:
        if sample.cost <= remaining or (not selected and sample.cost <= 10 * budget):
            selected.append(sample)
            remaining -= sample.cost
    return selected


def _meanings(model: CutModel, samples: Sequence[Sample]) -> tuple[tuple[Meaning, ...], int]:
    """A model's meanings on the first samples, as many as fit into memory and into the time until the deadline, and the
    number of samples that do not.

    Samples where a quantised tensor depends on NaN or infinities are left out: each runtime rounds NaN to another
    integer. Raises Unjudged.
    """
    meanings: list[Meaning] = []
    elements, last = 0, time.monotonic()
    for at, sample in enumerate(samples):
        before, last = last, time.monotonic()
        late = deadline.remaining() < _COMPARED * (last - before) * (len(meanings) + 1)
        if elements >= _MOST_ELEMENTS or (meanings and late):
            return tuple(meanings), len(samples) - at
        finite = all(map(_is_finite, sample.feeds.values()))
        try:
            meaning = meaning_of(model, sample)
        except Unjudged:
            if finite or not meanings:
                raise
            continue
        if finite or all(map(_is_finite, (layer.steps for layer in meaning.layers.values()))):
            meanings.append(meaning)
            elements += sum(layer.numbers.size for layer in meaning.layers.values())
    if not meanings:
        raise Unjudged("its quantised numbers are NaN or infinite on these inputs")
    return tuple(meanings), 0


def _worst(groups: Iterable[Sequence[Difference]]) -> dict[str, Difference]:
    """The greatest difference of each tensor."""
    out: dict[str, Difference] = {}
    for some in groups:
        for apart in some:
            if apart.name not in out or out[apart.name].maximum < apart.maximum:
                out[apart.name] = apart
    return out


def judge_whole(original: Array, new: Array, exemption: Exemption = Exemption.NONE) -> Judgement:
    """The verdict on an output of a whole model whose layers are judged: only NaN and infinities must be the same."""
    if not is_float(original):
        return Judgement(Criterion.LAYERS, difference=distance(new, original)[0])
    finite = np.isfinite(wide(original)) & np.isfinite(wide(new))
    judgement = judge_floats(by_deviation(original, None), np.where(finite, original, new), exemption)
    with np.errstate(invalid="ignore"):  # for the difference of equal infinities
        apart = np.max(np.abs(wide(new) - wide(original)), initial=0.0, where=finite)
    return replace(judgement, criterion=Criterion.LAYERS, difference=float(apart))


def variation(name: str, pairs: Iterable[tuple[Array, Array]]) -> str | None:
    """The note on how much a float output varies between two runs of one model; None if only by rounding. `pairs`: the
    output at two of ONNX Runtime's optimisation levels, for each set of inputs.
    """
    distance = scale = 0.0
    changed = rows = 0
    for a, b in pairs:
        if a.shape != b.shape or not is_float(a) or a.dtype.kind == "c" or not a.size:
            continue
        x, y = wide(a), wide(b)
        finite = np.isfinite(x) & np.isfinite(y)
        distance = max(distance, float(np.max(np.abs(x - y), initial=0.0, where=finite)))
        scale = max(scale, float(np.max(np.abs(x), initial=0.0, where=finite)))
        if x.ndim and x.shape[-1] > 1:
            first = x.argmax(-1) != y.argmax(-1)
            changed, rows = changed + int(np.count_nonzero(first)), rows + first.size
    if distance <= 2.0**-10 * scale:
        return None
    text = (
        f"output {name!r}: the original's own results vary by up to {distance:.3g} (values up to {scale:.3g}) "
        "between ONNX Runtime's optimisation levels"
    )
    if not rows:
        return text
    if not changed:
        return f"{text}; in each row the same class or token comes first"
    return (
        f"{text}; differences of this size change which class or token comes first in "
        f"{share(changed, rows)} of its rows"
    )
