"""Whether a model computes the same as a quantised model, layer by layer.

One tie that is rounded differently changes everything computed from it, so the outputs of whole models cannot be
compared. Quantised tensors can: both models are cut at those that they share, by structure, name or value, and each
part gets the same quantised inputs, those of the original's exact evaluation (integers and float64).

- Meaning: the new model's tensors, evaluated exactly, are rounded from the same numbers as the original's, within TIE
  of a step. This needs no runtime. A part of the same operators on the same inputs is not evaluated.
- Runtime: what ONNX Runtime computes for each part of the new model, at the user's optimisation level, is a rounding of
  a number within TIE of the exact one. Else it must equal what ONNX Runtime computes for the original's part, at that
  level or without optimisations: where the runtime deviates from a model's meaning, the new model may do so too.
- Whole models: if their outputs differ, the parts must explain it: each of the new model's own quantised tensors is
  what its part computes, or means, from the tensors before it.

Where a part has long sums of floats, TIE is too small. If a tensor exceeds it, the window of each element is 8 times
the distance by which rounding to the declared types moves the numbers around it, in our evaluation. The runtimes' own
errors never count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xrlflow.backends.onnxruntime.session import Options
from xrlflow.backends.protocol import BackendError, OutOfTime
from xrlflow.ir import Value
from xrlflow.onnxio import ImportedModel
from xrlflow.verify.compare import Judgement, Leg, Licence, by_deviation, is_float, judge_floats, wide
from xrlflow.verify.cuts import GIVEN, moved_constants
from xrlflow.verify.inputs import Case
from xrlflow.verify.layers import TIE, Layers, is_quantised, moved
from xrlflow.verify.meaning import (
    Apart,
    Comparison,
    CutModel,
    Meaning,
    Sample,
    Unjudged,
    compared,
    distance,
    meaning_of,
    most,
    output_apart,
    share,
    shift_of,
)
from xrlflow.verify.runner import Array, Model, Runner, first_line, opened
from xrlflow.verify.yardsticks import Known

PRECISE = "session.x64quantprecision"
"""The session option that makes ONNX Runtime add products of bytes without saturation."""

# On this many sets of inputs the original runs once more, without optimisations, to see how its results vary.
_VARIED = 3
# How many copies of an original with perturbed constants are run, to see how far ties move its outputs.
_MOVES = 4
# Once the samples have this many elements of quantised tensors, about 10 bytes each, no further ones are evaluated.
_MOST_ELEMENTS = 30_000_000


@dataclass(frozen=True, slots=True)
class Tally:
    """How many elements of a model's quantised tensors ONNX Runtime computes exactly, and why the others differ."""

    tensors: int = 0
    elements: int = 0  # of all tensors
    ties: int = 0  # elements that differ by a tie
    rounded: int = 0  # elements that differ more, within the window
    runtime: int = 0  # elements that equal what ONNX Runtime computes for the original, but not what it means

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            max(self.tensors, other.tensors),
            self.elements + other.elements,
            self.ties + other.ties,
            self.rounded + other.rounded,
            self.runtime + other.runtime,
        )

    def __str__(self) -> str:
        found = [
            f"{self.tensors} quantised tensors of {self.elements:,} elements are what the original means"
        ]
        if not (self.ties or self.rounded or self.runtime):
            return f"{found[0]}, exactly"
        if self.ties:
            found.append(f"{self.ties:,} elements within one step at rounding ties")
        if self.rounded:
            found.append(f"{self.rounded:,} as near as the types of their floats allow")
        if self.runtime:
            found.append(f"{self.runtime:,} as ONNX Runtime computes the original")
        return ", ".join(found)


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on a model."""

    reason: str = ""  # why nothing was judged; "" if it was
    samples: int = 0  # the number of sets of inputs
    failures: tuple[str, ...] = ()  # sentences, the most important first
    wrong: tuple[Apart, ...] = ()
    tally: Tally = Tally()

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
class _Seen:
    """How the results of ONNX Runtime for the parts of a model differ from what the parts mean."""

    wrong: list[Apart] = field(default_factory=list)
    tally: Tally = Tally()


def _seen(
    meaning: Meaning, run: Mapping[str, Array], others: Callable[[Value], list[Array]] = lambda _: []
) -> _Seen:
    """Compare a run of the parts with what they mean. `others`: further results that a tensor or output may equal."""
    found = _Seen(tally=Tally(tensors=len(meaning.model.cuts)))
    for value, name in meaning.model.cuts.items():
        array, exact = run[name], meaning.layers[value]
        if array.shape != exact.numbers.shape:
            found.wrong.append(Apart(name, float("inf"), array.size, array.size))
            continue
        far, strange, shift = _misses(meaning, run, value)
        wrong = strange
        if strange.any():
            for other in others(value):
                if other.shape == array.shape:
                    wrong = wrong & (array != other)
        if wrong.any():
            steps = most(np.abs(array.astype(np.float64) - shift - exact.numbers)[wrong])
            count = int(np.count_nonzero(wrong))
            found.wrong.append(Apart(name, steps, count, wrong.size, exact.offsets is None))
        differs = array != meaning.given[value]
        ties = 0 if exact.offsets is None else int(np.count_nonzero(differs & ~far))
        rounded, runtime = np.count_nonzero(far & ~strange), np.count_nonzero(strange & ~wrong)
        found.tally += Tally(0, array.size, ties, int(rounded), int(runtime))
    for value, name in zip(meaning.model.graph.outputs, meaning.model.output_names):
        if value in meaning.layers:
            continue
        targets = [meaning.outputs[value], *others(value)]
        apart = [output_apart(meaning, value, run[name], target) for target in targets]
        if all(apart):
            found.wrong.append(replace(apart[0], name=name) if apart[0] else Apart(name, 0, 0, 0))
    return found


def _misses(meaning: Meaning, run: Mapping[str, Array], value: Value) -> tuple[Array, Array, int]:
    """Masks of the elements of a tensor that a run rounds from a number farther than TIE, and farther than the window,
    from the exact one; and the run's zero point minus the exact one."""
    array, exact = run[meaning.model.cuts[value]], meaning.layers[value]
    zero = exact.zero if exact.zero in meaning.model.cuts else None
    shift = 0 if zero is None else shift_of(run[meaning.model.cuts[zero]], meaning.layers[zero])
    far = strange = exact.misses(array, TIE, shift)
    if far.any() and exact.offsets is not None:
        strange = exact.misses(array, meaning.window(value), shift)
    return far, strange, shift


# --- the original, and what is judged by it ---


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """The exact evaluation of a quantised original on some inputs."""

    touched: tuple[bool, ...]  # for each output, whether it depends on operators of quantised numbers
    reason: str = ""  # why there is no evaluation; "" if there is one
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
        """Evaluate a model on as many samples as `budget` (operations) allows; None if nothing in it is quantised.

        The first sample may cost ten times the budget.
        """
        if not is_quantised(imported.graph):
            return None
        layers = Layers(imported.graph)
        base = Quantised(layers.touched, "", (), (), threads, session_options)
        base = replace(base, notes=base._variations(model, imported, samples))
        chosen = _within(samples, budget)
        try:
            if layers.obstacle or not chosen:
                raise Unjudged(layers.obstacle or "its exact evaluation takes too long")
            meanings, left = _meanings(CutModel.of(model, imported), chosen)
            notes = base.notes
            left += len(samples) - len(chosen)
            if left:
                tried = f"{len(samples) - left} of {len(samples)} sets of inputs"
                notes = (
                    *notes,
                    f"judged layer by layer on {tried}: the others take too long, or too much memory",
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
        """Notes on outputs of floats that differ between ONNX Runtime's optimisation levels."""
        some = samples[:_VARIED]
        with suppress(BackendError), self._opened(model, optimized=False) as runner:
            plain = [runner.run(sample.feeds) for sample in some]
            found = [
                variation(info.name, [(sample.outputs[at], run[at]) for sample, run in zip(some, plain)])
                for at, info in enumerate(imported.frame.graph.output)
                if self.touched[at]
            ]
            return tuple(text for text in found if text is not None)
        return ()

    @property
    def judges_all(self) -> bool:
        """Whether the layers decide on all outputs of a model."""
        return not self.reason and all(self.touched)

    def _with_runs(self) -> Quantised:
        """Run the parts of the original, and add a note if the results differ from what they mean."""
        copy = self._meanings[0].showing(cut=True)
        seen: list[_Seen] = []
        with self._opened(copy) as runner:
            for meaning in self._meanings:
                meaning.runs.append(_run(runner, meaning))
                seen.append(_seen(meaning, meaning.runs[0]))
        found = _worst(s.wrong for s in seen)
        if found:
            self._run_plain()
            return replace(self, notes=(*self.notes, self._deviation(found, copy)))
        return self

    def _opened(self, model: Model, optimized: bool = True) -> AbstractContextManager[Runner]:
        return opened(model, optimized=optimized, threads=self._threads, session_options=self._options)

    def _run_plain(self) -> None:
        """Run the parts of the original without ONNX Runtime's optimisations, once. If that fails, a new model has one
        result less that it may equal."""
        with suppress(BackendError):
            if len(self._meanings[0].runs) == 1:
                with self._opened(self._meanings[0].showing(cut=True), optimized=False) as runner:
                    for meaning in self._meanings:
                        meaning.runs.append(_run(runner, meaning))

    def _deviation(self, found: Mapping[str, Apart], copy: bytes) -> str:
        """The note that ONNX Runtime does not compute what the original means, and where."""
        worst = max(found.values(), key=lambda apart: (not apart.floats, apart.most))
        meaning = self._meanings[0]
        count = len({*meaning.model.cuts, *meaning.outputs})
        text = (
            "ONNX Runtime on this processor does not compute what the original means: it differs in "
            f"{len(found)} of {count} quantised tensors and outputs, most in {worst}"
        )
        if self._is_mended(copy):
            return (
                f"{text}; it adds pairs of products of bytes in 16 bits, which saturate "
                f"(the session option {PRECISE}=1 makes it exact, and slower)"
            )
        plain = [_seen(m, m.runs[1]).wrong for m in self._meanings if len(m.runs) > 1]
        if plain and not any(plain):
            return f"{text}; with its optimisations off it computes what is meant"
        return text

    def _is_mended(self, copy: bytes) -> bool:
        """Whether ONNX Runtime computes the original's parts right once products of bytes do not saturate."""
        if self._options is not None and not isinstance(self._options, Mapping):
            return False
        options = {**(self._options or {}), PRECISE: "1"}
        with suppress(BackendError), opened(copy, threads=self._threads, session_options=options) as runner:
            return not any(_seen(m, _run(runner, m)).wrong for m in self._meanings)
        return False

    def judge(self, new: Model) -> Judged:
        """Whether a model computes what the original means, or what ONNX Runtime computes for the original."""
        if self.reason:
            return Judged(self.reason)
        try:
            b = CutModel.of(new)
            found = [self._compare(original, b) for original in self._meanings]
            wrong = _worst(comparison.wrong for comparison in found)
            if wrong:
                return self._failed(wrong, "from the same inputs, the original means something else")
            return self._judge_runs(new, b, found)
        except Unjudged as error:
            return Judged(f"the new model: {error}")
        except BackendError as error:
            return Judged(f"the new model: a copy that is cut does not run: {first_line(error)}")

    def _compare(self, original: Meaning, b: CutModel) -> Comparison:
        """Compare what both models mean. Equal names need not mean equal tensors, so names count only if that helps."""
        found = compared(original, b, by_name=True)
        if found.wrong:
            again = compared(original, b, by_name=False)
            if not again.wrong and not again.left & again.new:
                return again
        return found

    def _judge_runs(self, new: Model, b: CutModel, compared: Sequence[Comparison]) -> Judged:
        seen: list[_Seen] = []
        with self._opened(compared[0].meaning.showing(cut=True)) as runner:
            for original, comparison in zip(self._meanings, compared):
                run = _run(runner, comparison.meaning)
                seen.append(_seen(comparison.meaning, run, self._others(original, comparison)))
        wrong = _worst(s.wrong for s in seen)
        if wrong:
            return self._failed(
                wrong, "ONNX Runtime computes neither what is meant nor what it makes of the original"
            )
        strange = self._unexplained(new, b, compared)
        if strange:
            return self._failed(
                strange, "ONNX Runtime makes something else of the whole model than of its parts"
            )
        tally = sum((s.tally for s in seen), Tally())
        return Judged(samples=len(seen), tally=tally)

    def _others(self, original: Meaning, comparison: Comparison) -> Callable[[Value], list[Array]]:
        """A function from a value of the new model to what ONNX Runtime computes for the same value of the original."""
        names = {
            **original.model.cuts,
            **dict(zip(original.model.graph.outputs, original.model.output_names)),
        }
        places = dict(zip(comparison.meaning.model.graph.outputs, original.model.graph.outputs))

        def others(value: Value) -> list[Array]:
            self._run_plain()
            name = names.get(places.get(value, comparison.pairs.of[value]))
            layer = comparison.meaning.layers.get(value)
            found = [] if name is None else [run[name] for run in original.runs]
            if layer is None or layer.offsets is None:
                return found
            dtype = layer.numbers.dtype
            return [moved(a, dtype) for a in found if a.dtype.itemsize == dtype.itemsize]

        return others

    def _failed(self, wrong: Mapping[str, Apart], why: str) -> Judged:
        worst = sorted(wrong.values(), key=lambda apart: (apart.floats, -apart.most))
        return Judged(
            samples=len(self._meanings),
            failures=tuple(f"tensor {apart.name!r} differs {apart.extent}: {why}" for apart in worst),
            wrong=tuple(worst),
        )

    def _unexplained(self, new: Model, b: CutModel, compared: Sequence[Comparison]) -> dict[str, Apart]:
        """Outputs of the whole new model that differ both from the original's and from what the new parts compute."""
        found: list[list[Apart]] = []
        doubtful: list[tuple[Comparison, list[Any], list[Apart]]] = []
        with self._opened(new) as runner:
            for original, comparison in zip(self._meanings, compared):
                whole = runner.run(original.sample.feeds)
                apart = self._outputs_apart(original, whole)
                if apart:
                    doubtful.append((comparison, whole, apart))
        if doubtful:
            with (
                self._opened(compared[0].meaning.showing(cut=False)) as shown,
                self._opened(compared[0].meaning.showing(cut=True)) as cut,
            ):
                for comparison, whole, apart in doubtful:
                    if not _is_explained(comparison.meaning, whole, shown, cut) and not (
                        _is_explained(comparison.meaning, None, shown, cut)
                        and self._varies_as_much(comparison.meaning.sample, apart)
                    ):
                        found.append(apart)
        return _worst(found)

    def _varies_as_much(self, sample: Sample, apart: Sequence[Apart]) -> bool:
        """Whether the original's own outputs of floats differ at least half as much when its constants are replaced by
        neighbouring floats.

        This concerns models that quantise at run time and fuse it with products. There the last bit of a tensor's
        largest element changes the scale, and so all its elements.
        """
        proto = self._meanings[0].model.proto
        if not any(node.op_type == "DynamicQuantizeLinear" for node in proto.graph.node):
            return False
        names = [info.name for info in proto.graph.output]
        spread = dict.fromkeys(names, 0.0)
        for seed in range(_MOVES):
            with self._opened(moved_constants(proto, seed)) as runner:
                for name, a, b in zip(names, sample.outputs, runner.run(sample.feeds)):
                    if is_float(a) and a.shape == b.shape:
                        spread[name] = max(spread[name], float(np.abs(wide(a) - wide(b)).max(initial=0.0)))
        return all(each.floats and each.most <= 2 * spread[each.name] for each in apart)

    def _outputs_apart(self, original: Meaning, whole: Sequence[Array]) -> list[Apart]:
        """The outputs of a whole model that differ from the original's by more than rounding."""
        found = []
        for at, (value, name) in enumerate(zip(original.model.graph.outputs, original.model.output_names)):
            a, b = original.sample.outputs[at], whole[at]
            if not self.touched[at] or (a.shape == b.shape and bool((a == b).all())):
                continue
            if value in original.layers:
                found.append(Apart(name, *distance(b, a)))
            elif apart := output_apart(original, value, b, a):
                found.append(replace(apart, name=name))
        return found


def _is_explained(meaning: Meaning, whole: Sequence[Array] | None, shown: Runner, cut: Runner) -> bool:
    """Whether each quantised tensor of a whole model is what its part computes, or means, from the tensors before it.

    `whole`: the outputs of the whole model; None: those of the copy that shows its tensors.
    """
    model = meaning.model
    run = model.results(shown.run(meaning.sample.feeds))
    own = {value: run[name] for value, name in model.cuts.items()}
    mine = meaning_of(model, meaning.sample, own)
    # In a copy that shows the tensors, ONNX Runtime may fuse less, and round the floats behind them differently.
    for value, name, array in zip(model.graph.outputs, model.output_names, whole or ()):
        if not np.array_equal(run[name], array) and (
            value in mine.layers or output_apart(mine, value, run[name], array) is not None
        ):
            return False  # the copy computes something else than the model
    given = {name + GIVEN: run[name] for name in model.cuts.values()}
    parts = model.results(cut.run({**meaning.sample.feeds, **given}))
    if all(np.array_equal(run[name], parts[name]) for name in run):
        return True
    names = {**model.cuts, **dict(zip(model.graph.outputs, model.output_names))}
    return not _seen(mine, run, lambda value: [parts[names[value]]]).wrong


def samples_of(known: Sequence[Known], cost: Callable[[Case], float]) -> list[Sample]:
    """Cases of tensors only, whose outputs are finite. Ordinary values come first, then cheap cases."""
    found: list[tuple[bool, float, Sample]] = []
    for item in known:
        plain = all(len(parts) == 1 and not parts[0][0] for parts in item.outputs)
        tensors = all(isinstance(a, np.ndarray) for a in item.case.feeds.values())
        if plain and tensors and all(licence is Licence.NONE for licence in item.licences):
            needed = cost(item.case)
            sample = Sample(item.case.feeds, [parts[0][1] for parts in item.outputs], needed)
            found.append((not item.case.values.ordinary, needed, sample))
    return [sample for _, _, sample in sorted(found, key=lambda entry: entry[:2])]


def _is_finite(array: Array) -> bool:
    return not is_float(array) or bool(np.isfinite(wide(array)).all())


def _within(samples: Sequence[Sample], budget: float) -> list[Sample]:
    """The samples to be evaluated, in order, until their cost exceeds the budget."""
    chosen: list[Sample] = []
    left = budget
    for sample in samples:
        if sample.cost <= left or (not chosen and sample.cost <= 10 * budget):
            chosen.append(sample)
            left -= sample.cost
    return chosen


def _meanings(model: CutModel, samples: Sequence[Sample]) -> tuple[tuple[Meaning, ...], int]:
    """A model's meanings on the first samples, as many as fit into memory, and the number of samples that do not.

    Samples where a quantised tensor depends on NaN or infinities are left out: each runtime rounds NaN to something
    else. Raises Unjudged.
    """
    found: list[Meaning] = []
    kept = 0
    for at, sample in enumerate(samples):
        if kept >= _MOST_ELEMENTS:
            return tuple(found), len(samples) - at
        finite = all(map(_is_finite, sample.feeds.values()))
        try:
            meaning = meaning_of(model, sample)
        except Unjudged:
            if finite or not found:
                raise
            continue
        if finite or all(map(_is_finite, (layer.steps for layer in meaning.layers.values()))):
            found.append(meaning)
            kept += sum(layer.numbers.size for layer in meaning.layers.values())
    if not found:
        raise Unjudged("its quantised numbers are NaN or infinite on these inputs")
    return tuple(found), 0


def _worst(found: Iterable[Sequence[Apart]]) -> dict[str, Apart]:
    """The greatest difference of each tensor."""
    out: dict[str, Apart] = {}
    for some in found:
        for apart in some:
            if apart.name not in out or out[apart.name].most < apart.most:
                out[apart.name] = apart
    return out


def judge_whole(original: Array, new: Array, licence: Licence = Licence.NONE) -> Judgement:
    """The verdict on an output of a whole model whose layers are judged: only NaN and infinities must be the same."""
    if not is_float(original):
        return Judgement(Leg.LAYERS, difference=distance(new, original)[0])
    finite = np.isfinite(wide(original)) & np.isfinite(wide(new))
    found = judge_floats(by_deviation(original, None), np.where(finite, original, new), licence)
    apart = np.max(np.abs(wide(new) - wide(original)), initial=0.0, where=finite)
    return replace(found, leg=Leg.LAYERS, difference=float(apart))


def variation(name: str, pairs: Iterable[tuple[Array, Array]]) -> str | None:
    """The note on how much an output of floats varies between two runs of one model; None if only by rounding. `pairs`:
    the output at two of ONNX Runtime's optimisation levels, for each set of inputs."""
    apart = scale = 0.0
    changed = rows = 0
    for a, b in pairs:
        if a.shape != b.shape or not is_float(a) or a.dtype.kind == "c" or not a.size:
            continue
        x, y = wide(a), wide(b)
        finite = np.isfinite(x) & np.isfinite(y)
        apart = max(apart, float(np.max(np.abs(x - y), initial=0.0, where=finite)))
        scale = max(scale, float(np.max(np.abs(x), initial=0.0, where=finite)))
        if x.ndim and x.shape[-1] > 1:
            first = x.argmax(-1) != y.argmax(-1)
            changed, rows = changed + int(np.count_nonzero(first)), rows + first.size
    if apart <= 2.0**-10 * scale:
        return None
    text = (
        f"output {name!r}: the original's own results vary by up to {apart:.3g} (values up to {scale:.3g}) "
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
