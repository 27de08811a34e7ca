"""Whether a model computes what a quantised model means, layer by layer.

One rounding tie that falls the other way moves everything behind it, so whole outputs cannot be compared. Each quantised
tensor is: both models are cut at those that they share, by structure, name or value, and each part gets the same
quantised inputs, those of the original's exact evaluation (integers and float64).

- Meaning: the new model's tensors, evaluated exactly, are rounded from the same numbers as the original's, within TIE
  of a step. This needs no runtime. A part of the same operators on the same inputs is not evaluated.
- Runtime: what ONNX Runtime makes of each part of the new model, at the user's optimisation level, is a rounding of a
  number within TIE of the exact one. Else it must be what it makes of the original's part, at that level or without
  optimisations: where the runtime does not compute what a model means, the new model may do as the original does.
- Whole: if the outputs of whole models differ, the parts must explain them: the new model's own quantised tensors,
  given to its parts, give the next ones, bit by bit.

Where a part has long sums of floats, TIE is too small. If a tensor exceeds it, the window is 8 times what rounding to
the declared types moves the numbers by, in our evaluation. The runtimes' own errors never count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from xrlflow.backends.onnxruntime.session import Options
from xrlflow.backends.protocol import BackendError
from xrlflow.ir import DType, Graph, Value, node_key
from xrlflow.onnxio import ImportedModel, ModelError, load
from xrlflow.onnxio.tensors import same_content
from xrlflow.ops.evaluate import NotEvaluable
from xrlflow.ops.tensors import dtype_of
from xrlflow.verify.compare import Leg, Yardstick, is_float, judge_floats, wide
from xrlflow.verify.cuts import GIVEN, Uncut, as_proto, showing, spelt_out
from xrlflow.verify.inputs import evaluable_feeds
from xrlflow.verify.layers import TIE, Layer, Layers, evaluate_layers, is_quantised
from xrlflow.verify.runner import Array, Model, Runner, first_line, opened

PRECISE = "session.x64quantprecision"
"""The session option that makes ONNX Runtime add products of bytes without saturation."""

_NOISE = 8.0
# What NumPy raises for uses of an operator that our evaluator does not know.
_FAILS = (ArithmeticError, AssertionError, IndexError, KeyError, MemoryError, TypeError, ValueError)


class Unjudged(ValueError):
    """A model has no exact evaluation layer by layer. The message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Inputs, with the outputs of the original as the user runs it (tensors only)."""

    label: str
    feeds: Mapping[str, Array]
    outputs: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Apart:
    """How a tensor differs from another: by up to `most` steps of its scale, in `count` of `size` elements.

    For a tensor of floats, `most` is absolute.
    """

    name: str
    most: float
    count: int
    size: int
    floats: bool = False

    def __str__(self) -> str:
        unit = "" if self.floats else " step" if self.most == 1 else " steps"
        return (
            f"{self.name!r} by up to {self.most:.4g}{unit} in {share(self.count, self.size)} of its elements"
        )


def share(count: int, size: int) -> str:
    """A part as a percentage, "under 0.01%" if it is very small."""
    percent = 100 * count / max(1, size)
    return "none" if not count else "under 0.01%" if percent < 0.01 else f"{percent:.3g}%"


@dataclass(frozen=True, slots=True)
class Tally:
    """How the quantised tensors of a model compare with what they mean. `ties`: elements that a tie may explain;
    `runtime`: those that are what ONNX Runtime makes of the original, though not what it means; `elements`: all."""

    tensors: int = 0
    elements: int = 0
    ties: int = 0
    runtime: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            max(self.tensors, other.tensors),
            self.elements + other.elements,
            self.ties + other.ties,
            self.runtime + other.runtime,
        )

    def __str__(self) -> str:
        found = [
            f"{self.tensors} quantised tensors of {self.elements:,} elements are what the original means"
        ]
        if not self.ties and not self.runtime:
            return f"{found[0]}, exactly"
        if self.ties:
            found.append(f"{self.ties:,} elements within one step at rounding ties")
        if self.runtime:
            found.append(f"{self.runtime:,} as ONNX Runtime computes the original")
        return ", ".join(found)


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on a model.

    - `reason`: why nothing was judged; "" if it was. `samples`: how many inputs were used.
    - `failures`: sentences, the most telling first; `wrong`: what differs; `tally`: what does not.
    """

    reason: str = ""
    samples: int = 0
    failures: tuple[str, ...] = ()
    wrong: tuple[Apart, ...] = ()
    tally: Tally = Tally()
    notes: tuple[str, ...] = ()

    @property
    def evaluated(self) -> bool:
        return not self.reason

    @property
    def passed(self) -> bool:
        return self.evaluated and not self.failures


@dataclass(frozen=True, eq=False)
class _Model:
    """A model that can be cut. `proto`: as the user runs it, but for `spelt_out`."""

    proto: onnx.ModelProto
    imported: ImportedModel
    layers: Layers

    @staticmethod
    def of(model: Model, imported: ImportedModel | None = None) -> _Model:
        """Raises Unjudged."""
        try:
            proto = as_proto(model)
            spelt = spelt_out(proto)
            if imported is None or spelt is not proto:
                imported = load(spelt)
        except (Uncut, ModelError) as error:
            raise Unjudged(str(error)) from error
        return _Model(spelt, imported, Layers(imported.graph))

    @property
    def graph(self) -> Graph:
        return self.imported.graph

    def name(self, value: Value) -> str:
        return self.graph.leaves.names.get(value, str(value))

    @cached_property
    def cuts(self) -> Mapping[Value, str]:
        """The quantised tensors that nodes of the file's main graph compute, with their names there."""
        there = {name for node in self.proto.graph.node for name in node.output}
        return {v: self.name(v) for v in self.layers.tensors if self.name(v) in there}


    @cached_property
    def output_names(self) -> tuple[str, ...]:
        return tuple(info.name for info in self.proto.graph.output)

    def results(self, arrays: Sequence[Array]) -> dict[str, Array]:
        """The outputs of a copy that shows the cuts, by name."""
        there = set(self.output_names)
        names = [*self.output_names, *(name for name in self.cuts.values() if name not in there)]
        return dict(zip(names, arrays, strict=True))

    def feeds(self, sample: Sample) -> dict[Value, Array]:
        feeds = evaluable_feeds(self.imported, sample.feeds)
        if feeds is None:
            raise Unjudged("the inputs are not all tensors")
        return feeds

    def evaluate(
        self,
        sample: Sample,
        wanted: Iterable[Value],
        stops: Mapping[Value, Array],
        settle: Callable[[Value, Layer], Array] = lambda _, layer: layer.numbers,
        *,
        rounded: bool = False,
    ) -> tuple[dict[Value, Layer], dict[Value, Array]]:
        """See `evaluate_layers`. Raises Unjudged."""
        from threadpoolctl import threadpool_limits

        try:
            with threadpool_limits(1, user_api="blas"):
                return evaluate_layers(
                    self.layers, self.feeds(sample), wanted, stops, settle, rounded=rounded
                )
        except NotEvaluable as error:
            raise Unjudged(f"{error} has no exact evaluation") from error
        except _FAILS as error:
            raise Unjudged(f"the exact evaluation fails: {error}") from error


@dataclass(slots=True, eq=False)
class _Meaning:
    """A model's exact tensors and outputs on one sample.

    `given`: what its parts get in place of their quantised inputs. `runs`: what ONNX Runtime makes of the parts, at
    several levels, the user's first; by the names of the cuts and outputs.
    """

    model: _Model
    sample: Sample
    layers: dict[Value, Layer]
    outputs: dict[Value, Array]
    given: dict[Value, Array]
    runs: list[dict[str, Array]] = field(default_factory=list)
    _windows: dict[Value, float] = field(default_factory=dict)
    _rounded: dict[Value, Array] = field(default_factory=dict)

    def showing(self, *, cut: bool) -> bytes:
        """A copy that shows the quantised tensors."""
        types = {name: dtype_of(self.given[value].dtype) for value, name in self.model.cuts.items()}
        return showing(self.model.proto, types, cut=cut)

    def feeds(self) -> dict[str, Array]:
        """The inputs of the copy that is cut."""
        given = {name + GIVEN: self.given[value] for value, name in self.model.cuts.items()}
        return {**self.sample.feeds, **given}

    def window(self, value: Value) -> float:
        """TIE, or 8 times what rounding to the declared types moves the numbers by, if that is more."""
        if value not in self._windows:
            others = {v: a for v, a in self.given.items() if v != value}
            found, _ = self.model.evaluate(self.sample, [value], others, rounded=True)
            exact, moved = self.layers[value], found[value]
            strays = 0.0
            if exact.offsets is not None and moved.offsets is not None:
                shift = (
                    0 if exact.zero is None else _shift(found[exact.zero].numbers, self.layers[exact.zero])
                )
                strays = float(np.max(np.abs(moved.steps - shift - exact.steps), initial=0.0))
            self._windows[value] = max(TIE, _NOISE * strays)
        return self._windows[value]

    def rounded(self, value: Value) -> Array:
        """An output in the model's own precision, from the same quantised tensors."""
        if value not in self._rounded:
            _, found = self.model.evaluate(self.sample, [value], self.given, rounded=True)
            self._rounded[value] = found[value]
        return self._rounded[value]


def _shift(zero: Array, exact: Layer) -> int:
    """How much larger a zero point is than the exact one."""
    return int(zero.item()) - int(exact.numbers.item())


def _meaning(model: _Model, sample: Sample) -> _Meaning:
    """Raises Unjudged."""
    layers, others = model.evaluate(sample, [*model.layers.tensors, *model.graph.outputs], {})
    outputs = {v: layers[v].numbers if v in layers else others[v] for v in model.graph.outputs}
    return _Meaning(model, sample, layers, outputs, {v: layer.numbers for v, layer in layers.items()})


# --- which values of two models are one ---


@dataclass(slots=True, eq=False)
class _Pairs:
    """For values of the new model, those of the original that they are. `claimed`: tensors that only names pair.

    A value that is none of the original's is paired with a negative number.
    """

    of: dict[Value, Value]
    claimed: list[Value]

    def known(self, value: Value) -> bool:
        return self.of[value] > 0


def _paired(a: _Model, b: _Model, by_name: bool) -> _Pairs:
    """Pairs by structure: the same operators on the same inputs. Tensors that differ so are paired by name."""
    nodes = {node.key: node for node in a.graph.nodes()}
    named = {a.name(v): v for v in a.layers.tensors}
    of = {value: value for value in b.graph.inputs}
    for value, const in b.graph.leaves.consts.items():
        # Large constants have the same number if samples of them are equal.
        other = a.graph.leaves.consts.get(value)
        same = other is not None and other.type == const.type and same_content(other, const)
        of.setdefault(value, value if same else Value(-value))
    claimed: list[Value] = []
    for node in b.layers.order:
        inputs = tuple(of[v] if v else v for v in node.inputs)
        same_node = nodes.get(node_key(node.op, node.attrs, inputs))
        if same_node is not None and len(same_node.outputs) == len(node.outputs):
            of.update(zip(node.outputs, same_node.outputs))
            continue
        for value in node.outputs:
            of[value] = Value(-value)
            other_value = named.get(b.name(value)) if by_name and value in b.layers.tensors else None
            types = {a.graph.type(other_value).dtype, b.graph.type(value).dtype} if other_value else set()
            if other_value is not None and len(types - {DType.UNDEFINED}) < 2:
                of[value] = other_value
                claimed.append(value)
    return _Pairs(of, claimed)


@dataclass(slots=True, eq=False)
class _Comparison:
    """The new model's meaning on one sample, and where it is not the original's.

    `left`: tensors of the original, and of the new model, that are equal to none of the other; names and types.
    """

    meaning: _Meaning
    pairs: _Pairs
    wrong: list[Apart]
    left: tuple[set[tuple[str, Any]], set[tuple[str, Any]]]


def _compared(original: _Meaning, b: _Model, by_name: bool) -> _Comparison:
    """Evaluate what the new model does not have in common with the original. Raises Unjudged."""
    a, pairs = original.model, _paired(original.model, b, by_name)
    known = {v: pairs.of[v] for v in b.layers.tensors if pairs.known(v)}
    stops = {v: original.given[u] for v, u in known.items()}
    taken = set(known.values())
    outputs = dict(zip(b.graph.outputs, a.graph.outputs))
    wanted = [v for v in b.layers.tensors if v not in known or v in pairs.claimed]
    wanted += [v for v, u in outputs.items() if pairs.of[v] != u]

    def settle(value: Value, layer: Layer) -> Array:
        for u, other in original.layers.items():
            if u not in taken and _alike(layer, other) and not layer.differs(other, TIE).any():
                pairs.of[value] = u
                taken.add(u)
                return original.given[u]
        return layer.numbers

    computed, others = b.evaluate(original.sample, wanted, stops, settle)
    layers = {v: computed[v] if v in computed else original.layers[u] for v, u in known.items()}
    layers.update(computed)
    given = {v: original.given[pairs.of[v]] if pairs.known(v) else layers[v].numbers for v in layers}
    results = {
        v: others[v] if v in others else layers[v].numbers if v in layers else original.outputs[u]
        for v, u in outputs.items()
    }
    wrong = [apart for v in pairs.claimed if (apart := _apart(original, pairs.of[v], layers[v], b.name(v)))]
    wrong += [
        apart
        for v, u in outputs.items()
        if pairs.of[v] != u and v not in layers
        if (apart := _output_apart(original, u, results[v], original.outputs[u]))
    ]
    wrong += [
        Apart(b.name(v), *_distance(results[v], original.outputs[u]))
        for v, u in outputs.items()
        if v in layers and pairs.of[v] != u
    ]
    left = (
        {(a.name(v), layer.numbers.dtype) for v, layer in original.layers.items() if v not in taken},
        {(b.name(v), layer.numbers.dtype) for v, layer in layers.items() if not pairs.known(v)},
    )
    return _Comparison(_Meaning(b, original.sample, layers, results, given), pairs, wrong, left)


def _alike(a: Layer, b: Layer) -> bool:
    return a.numbers.shape == b.numbers.shape and a.numbers.dtype == b.numbers.dtype


def _apart(original: _Meaning, value: Value, new: Layer, name: str) -> Apart | None:
    """Where a tensor is not rounded from the numbers that the original's is."""
    exact = original.layers[value]
    if not _alike(exact, new):
        return Apart(name, float("inf"), new.numbers.size, new.numbers.size)
    wrong = exact.differs(new, TIE)
    if wrong.any():
        wrong = exact.differs(new, original.window(value))
    if not wrong.any():
        return None
    steps = np.abs(new.steps - exact.steps)[wrong].max()
    return Apart(name, float(steps), int(np.count_nonzero(wrong)), wrong.size, exact.offsets is None)


def _distance(a: Array, b: Array) -> tuple[float, int, int]:
    """The greatest difference of two arrays, the number of elements that differ, and that of all."""
    if a.shape != b.shape:
        return float("inf"), a.size, a.size
    wrong = a != b
    if a.dtype.kind not in "iufb":
        return float(wrong.any()), int(np.count_nonzero(wrong)), a.size
    distance = np.abs(wide(a) - wide(b))
    return float(np.max(distance[wrong], initial=0.0)), int(np.count_nonzero(wrong)), a.size


def _output_apart(exact: _Meaning, value: Value, new: Array, target: Array) -> Apart | None:
    """How an output that is no quantised tensor differs from `target`, by more than rounding. `exact`: its meaning."""
    name = exact.model.name(value)
    if new.shape != target.shape or target.shape != exact.outputs[value].shape:
        return Apart(name, float("inf"), new.size, new.size, True)
    dtype = exact.sample.outputs[exact.model.graph.outputs.index(value)].dtype
    if not is_float(np.empty(0, dtype)):
        return Apart(name, *_distance(new, target)) if (new != target).any() else None
    moved = wide(exact.rounded(value)) - wide(exact.outputs[value])
    yardstick = Yardstick(Leg.FLOAT64, (wide(target) + moved).astype(dtype), wide(target))
    if judge_floats(yardstick, new.astype(dtype)).passed:
        return None
    return Apart(name, *_distance(wide(new), wide(target)), True)


# --- what ONNX Runtime makes of the parts ---


def _run(runner: Runner, meaning: _Meaning) -> dict[str, Array]:
    return meaning.model.results(runner.run(meaning.feeds()))


@dataclass(slots=True, eq=False)
class _Seen:
    """How a run of the parts compares with what they mean."""

    wrong: list[Apart] = field(default_factory=list)
    tally: Tally = Tally()


def _seen(
    meaning: _Meaning, run: Mapping[str, Array], others: Callable[[Value], list[Array]] = lambda _: []
) -> _Seen:
    """Compare a run with what the parts mean; `others`: further results that a tensor or an output may be equal to."""
    found = _Seen(tally=Tally(tensors=len(meaning.model.cuts)))
    for value, name in meaning.model.cuts.items():
        array, exact = run[name], meaning.layers[value]
        if array.shape != exact.numbers.shape:
            found.wrong.append(Apart(name, float("inf"), array.size, array.size))
            continue
        strange, shift = _misses(meaning, run, value)
        wrong = strange
        if strange.any():
            for other in others(value):
                wrong = wrong & (array != other)
        if wrong.any():
            steps = np.abs(array.astype(np.float64) - shift - exact.numbers)[wrong].max()
            count = int(np.count_nonzero(wrong))
            found.wrong.append(Apart(name, float(steps), count, wrong.size, exact.offsets is None))
        ties = 0 if exact.offsets is None else int(np.count_nonzero((array != exact.numbers) & ~strange))
        found.tally += Tally(0, array.size, ties, int(np.count_nonzero(strange & ~wrong)))
    for value, name in zip(meaning.model.graph.outputs, meaning.model.output_names):
        if value in meaning.layers:
            continue
        targets = [meaning.outputs[value], *others(value)]
        apart = [_output_apart(meaning, value, run[name], target) for target in targets]
        if all(apart):
            found.wrong.append(replace(apart[0], name=name) if apart[0] else Apart(name, 0, 0, 0))
    return found


def _misses(meaning: _Meaning, run: Mapping[str, Array], value: Value) -> tuple[Array, int]:
    """Where a tensor of a run is not what its part means, and how much larger its zero point is there."""
    array, exact = run[meaning.model.cuts[value]], meaning.layers[value]
    zero = exact.zero if exact.zero in meaning.model.cuts else None
    shift = 0 if zero is None else _shift(run[meaning.model.cuts[zero]], meaning.layers[zero])
    wrong = exact.misses(array, TIE, shift)
    if wrong.any() and exact.offsets is not None:
        wrong = exact.misses(array, meaning.window(value), shift)
    return wrong, shift


# --- the original, and what is judged by it ---


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """What a quantised original means on some inputs. `reason`: why that is not known; "" if it is.

    `touched`: for each output, whether it depends on operators of quantised numbers. `notes`: how what ONNX Runtime
    makes of the original differs from what it means, and what was left out.
    """

    touched: tuple[bool, ...]
    reason: str = ""
    notes: tuple[str, ...] = ()
    _meanings: tuple[_Meaning, ...] = ()
    _threads: int | None = None
    _options: Options | None = None

    @staticmethod
    def of(
        model: Model,
        imported: ImportedModel,
        samples: Sequence[Sample],
        cost: Callable[[Sample], float],
        budget: float,
        *,
        threads: int | None = None,
        session_options: Options | None = None,
    ) -> Quantised | None:
        """Evaluate a model on as many samples as `budget` allows; None if it has no operator of quantised numbers.

        `cost`: the operations of one evaluation. The first sample may cost ten times the budget.
        """
        if not is_quantised(imported.graph):
            return None
        layers = Layers(imported.graph)
        base = Quantised(layers.touched, layers.obstacle, (), (), threads, session_options)
        if base.reason:
            return base
        chosen, notes = _within(samples, cost, budget)
        if not chosen:
            return replace(
                base, reason="an exact evaluation takes too long" if samples else "there is no input"
            )
        try:
            own = _Model.of(model, imported)
            meanings = tuple(_meaning(own, sample) for sample in chosen)
            return replace(base, _meanings=meanings)._with_runs(notes)
        except Unjudged as error:
            return replace(base, reason=str(error))
        except BackendError as error:
            return replace(base, reason=f"a copy that is cut does not run: {first_line(error)}")

    def _with_runs(self, notes: Sequence[str]) -> Quantised:
        """Run the parts of the original, and say how the results differ from what they mean."""
        copy = self._meanings[0].showing(cut=True)
        seen: list[_Seen] = []
        with self._opened(copy) as runner:
            for meaning in self._meanings:
                meaning.runs.append(_run(runner, meaning))
                seen.append(_seen(meaning, meaning.runs[0]))
        found = _worst(s.wrong for s in seen)
        if found:
            self._run_plain()
            notes = [*notes, self._deviation(found, copy)]
        return replace(self, notes=tuple(notes))

    def _opened(self, model: Model, optimized: bool = True):  # type: ignore[no-untyped-def]
        return opened(model, optimized=optimized, threads=self._threads, session_options=self._options)

    def _run_plain(self) -> None:
        """Run the parts of the original without ONNX Runtime's optimisations, if that was not done. A failure proves
        nothing: then there is one result less that a new model may be equal to."""
        with suppress(BackendError):
            if len(self._meanings[0].runs) == 1:
                with self._opened(self._meanings[0].showing(cut=True), optimized=False) as runner:
                    for meaning in self._meanings:
                        meaning.runs.append(_run(runner, meaning))

    def _deviation(self, found: Mapping[str, Apart], copy: bytes) -> str:
        """The sentence on a runtime that does not compute what the original means."""
        worst = max(found.values(), key=lambda apart: (not apart.floats, apart.most))
        count = len(self._meanings[0].model.cuts)
        text = (
            "ONNX Runtime on this processor does not compute what the original means: it differs in "
            f"{len(found)} of {count} quantised tensors and the outputs, most in {worst}"
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
        """Whether the parts of the original are right with exact products of bytes."""
        if self._options is not None and not isinstance(self._options, Mapping):
            return False
        options = {**(self._options or {}), PRECISE: "1"}
        with suppress(BackendError), opened(copy, threads=self._threads, session_options=options) as runner:
            return not any(_seen(m, _run(runner, m)).wrong for m in self._meanings)
        return False

    def judge(self, new: Model) -> Judged:
        """Whether a model computes what the original means, or what ONNX Runtime makes of it."""
        if self.reason:
            return Judged(self.reason)
        try:
            b = _Model.of(new)
            compared = [self._compare(original, b) for original in self._meanings]
        except Unjudged as error:
            return Judged(f"the new model: {error}")
        wrong = _worst(c.wrong for c in compared)
        if wrong:
            return self._failed(wrong, "it is computed from other numbers than in the original")
        try:
            return self._judge_runs(new, b, compared)
        except BackendError as error:
            return Judged(f"the new model: a copy that is cut does not run: {first_line(error)}")

    def _compare(self, original: _Meaning, b: _Model) -> _Comparison:
        """Compare meanings. Names may be others than in the original, so they do not count if values are equal."""
        found = _compared(original, b, by_name=True)
        if found.wrong:
            again = _compared(original, b, by_name=False)
            if not again.wrong and not again.left[0] & again.left[1]:
                return again
        return found

    def _judge_runs(self, new: Model, b: _Model, compared: Sequence[_Comparison]) -> Judged:
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
            return self._failed(strange, "the parts of the model do not explain it")
        tally = sum((s.tally for s in seen), Tally())
        return Judged(samples=len(seen), tally=tally)

    def _others(self, original: _Meaning, comparison: _Comparison) -> Callable[[Value], list[Array]]:
        """What ONNX Runtime makes of the original, for a value of the new model."""
        names = {
            **original.model.cuts,
            **dict(zip(original.model.graph.outputs, original.model.output_names)),
        }
        places = dict(zip(comparison.meaning.model.graph.outputs, original.model.graph.outputs))

        def others(value: Value) -> list[Array]:
            self._run_plain()
            name = names.get(places.get(value, comparison.pairs.of[value]))
            shape = (comparison.meaning.outputs.get(value), comparison.meaning.layers.get(value))
            expected = (
                shape[0].shape if shape[0] is not None else shape[1].numbers.shape if shape[1] else None
            )
            return [run[name] for run in original.runs if name is not None and run[name].shape == expected]

        return others

    def _failed(self, wrong: Mapping[str, Apart], why: str) -> Judged:
        worst = sorted(wrong.values(), key=lambda apart: (apart.floats, -apart.most))
        return Judged(
            samples=len(self._meanings),
            failures=tuple(f"quantised tensor or output {apart} ({why})" for apart in worst),
            wrong=tuple(worst),
        )

    def _unexplained(self, new: Model, b: _Model, compared: Sequence[_Comparison]) -> dict[str, Apart]:
        """The outputs of the whole new model that are not the original's, nor what its parts make of them."""
        found: list[list[Apart]] = []
        doubtful: list[tuple[_Comparison, Sequence[Array], list[Apart]]] = []
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
                    if not _is_explained(comparison.meaning, whole, shown, cut):
                        found.append(apart)
        return _worst(found)

    def _outputs_apart(self, original: _Meaning, whole: Sequence[Array]) -> list[Apart]:
        """The outputs of a whole model that differ from the original's by more than rounding."""
        found = []
        for at, (value, name) in enumerate(zip(original.model.graph.outputs, original.model.output_names)):
            a, b = original.sample.outputs[at], whole[at]
            if not self.touched[at] or (a.shape == b.shape and bool((a == b).all())):
                continue
            if value in original.layers:
                found.append(Apart(name, *_distance(b, a)))
            elif apart := _output_apart(original, value, b, a):
                found.append(replace(apart, name=name))
        return found


def _is_explained(meaning: _Meaning, whole: Sequence[Array], shown: Runner, cut: Runner) -> bool:
    """Whether the parts of a model, on the quantised tensors of its own run, give these and the whole model's outputs."""
    model = meaning.model
    run = model.results(shown.run(meaning.sample.feeds))
    if not all(np.array_equal(run[name], array) for name, array in zip(model.output_names, whole)):
        return False
    given = {name + GIVEN: run[name] for name in model.cuts.values()}
    parts = model.results(cut.run({**meaning.sample.feeds, **given}))
    return all(np.array_equal(run[name], parts[name]) for name in run)


def _within(
    samples: Sequence[Sample], cost: Callable[[Sample], float], budget: float
) -> tuple[list[Sample], list[str]]:
    """The samples that are evaluated, the first ones before others, and a note on those that are not."""
    chosen: list[Sample] = []
    left = budget
    for sample in samples:
        needed = cost(sample)
        if needed <= left or (not chosen and needed <= 10 * budget):
            chosen.append(sample)
            left -= needed
    note = (
        f"judged layer by layer on {len(chosen)} of {len(samples)} sets of inputs: the others take too long"
    )
    return chosen, [note] if chosen and len(chosen) < len(samples) else []


def _worst(found: Iterable[Sequence[Apart]]) -> dict[str, Apart]:
    """The greatest difference of each tensor."""
    out: dict[str, Apart] = {}
    for some in found:
        for apart in some:
            if apart.name not in out or out[apart.name].most < apart.most:
                out[apart.name] = apart
    return out


def variation(name: str, pairs: Iterable[tuple[Array, Array]]) -> str | None:
    """The sentence on how much an output of floats varies between two runs of a model that should be equal; None if
    that is no more than rounding. `pairs`: the output at ONNX Runtime's optimisation levels, on several inputs."""
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
        f"output {name!r}: the original's own results vary by up to {apart:.3g} (values up to {scale:.3g}) between ONNX "
        "Runtime's optimisation levels"
    )
    if not rows:
        return text
    return (
        f"{text}; differences of this size change which class or token comes first in {share(changed, rows)} "
        f"of its rows"
    )
