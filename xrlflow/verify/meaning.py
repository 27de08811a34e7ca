"""The exact evaluation of a quantised model on some inputs, and its comparison with the evaluation of another model.

The parts of the other model get the quantised tensors of the original as inputs: see `quantised.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from xrlflow.common import deadline
from xrlflow.ir import DType, Graph, Value, node_key
from xrlflow.onnxio import ImportedModel, ModelError, load
from xrlflow.onnxio.tensors import same_content
from xrlflow.ops.evaluate import NotEvaluable
from xrlflow.ops.tensors import dtype_of
from xrlflow.verify.compare import Criterion, Target, around, is_float, judge_floats, wide
from xrlflow.verify.cuts import GIVEN, Uncut, as_proto, decomposed, showing
from xrlflow.verify.inputs import evaluable_feeds, input_values
from xrlflow.verify.layers import TIE, Layer, Layers, evaluate_layers
from xrlflow.verify.noise import jumps_at
from xrlflow.verify.runner import Array, Model

_NOISE = 8.0
# The float32 error of one element may be 0 by chance. So the greatest error among this many elements around it counts.
_SLICE = 16
# The exceptions that NumPy raises for uses of an operator that our evaluator does not support.
_FAILS = (ArithmeticError, AssertionError, IndexError, KeyError, MemoryError, TypeError, ValueError)


class Unjudged(ValueError):
    """A model has no exact evaluation layer by layer. The message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Inputs, and the outputs of the original on them, run with the user's options. All are tensors. `cost`:
    operations of a run.
    """

    feeds: Mapping[str, Array]
    outputs: Sequence[Array]
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """How a tensor differs from another: by up to `maximum` steps of its scale, in `count` of `size` elements.

    For a tensor of floats, `maximum` is an absolute difference. It is infinite if the shapes differ, or the positions
    of NaN and infinities.
    """

    name: str
    maximum: float
    count: int
    size: int
    floats: bool = False

    @property
    def extent(self) -> str:
        if self.maximum == float("inf"):
            return (
                f"in shape, or in what is NaN or infinite, in {share(self.count, self.size)} of its elements"
            )
        unit = "" if self.floats else " step" if self.maximum == 1 else " steps"
        return f"by up to {self.maximum:.4g}{unit} in {share(self.count, self.size)} of its elements"

    def __str__(self) -> str:
        return f"{self.name!r} {self.extent}"


def share(count: int, size: int) -> str:
    """A part as a percentage; "under 0.01%" if it is smaller than that."""
    percent = 100 * count / max(1, size)
    return "none" if not count else "under 0.01%" if percent < 0.01 else f"{percent:.3g}%"


@dataclass(frozen=True, eq=False)
class CutModel:
    """A model that can be cut. `proto`: the model as the user runs it, after `decomposed`."""

    proto: onnx.ModelProto
    imported: ImportedModel
    layers: Layers

    @staticmethod
    def of(model: Model, imported: ImportedModel | None = None) -> CutModel:
        """Read a model for cutting. Raises Unjudged if it cannot be cut."""
        try:
            proto = as_proto(model)
            spelt = decomposed(proto)
            if imported is None or spelt is not proto:
                imported = load(spelt)
        except (Uncut, ModelError) as error:
            raise Unjudged(str(error)) from error
        return CutModel(spelt, imported, Layers(imported.graph))

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
        """Arrays by name: the outputs of a copy that has the quantised tensors as outputs."""
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
        """See `evaluate_layers`. Raises Unjudged where `evaluate_layers` raises an error."""
        from threadpoolctl import threadpool_limits

        try:
            with threadpool_limits(1, user_api="blas"):
                return evaluate_layers(
                    self.layers, self.feeds(sample), wanted, stops, settle, rounded=rounded
                )
        except deadline.DeadlineExceeded:
            raise Unjudged("there was no time for the exact evaluation") from None
        except NotEvaluable as error:
            raise Unjudged(f"{error} has no exact evaluation") from error
        except _FAILS as error:
            raise Unjudged(f"the exact evaluation fails: {error}") from error


@dataclass(slots=True, eq=False)
class Meaning:
    """A model's exact quantised tensors and outputs on one sample."""

    model: CutModel
    sample: Sample
    layers: dict[Value, Layer]
    outputs: dict[Value, Array]
    given: dict[Value, Array]  # the quantised tensors that the parts of the model get as inputs
    original: Meaning | None = None  # of a new model: the meaning of the original, with which it is compared
    of: Mapping[Value, Value] = field(default_factory=dict)
    """Of a new model: for each of its tensors and outputs, the same value of the original."""
    spare: Sequence[Value] = ()  # tensors that only the original has
    runs: list[dict[str, Array]] = field(default_factory=list)
    """The results of ONNX Runtime for the parts, by name: one dict for each optimisation level, the user's level
    first.
    """
    _windows: dict[Value, Array] = field(default_factory=dict)
    _noise: dict[Value, Array] = field(default_factory=dict)

    def showing(self, *, cut: bool) -> bytes:
        """A serialised copy of the model that has the quantised tensors as outputs. `cut`: the copy is also cut at
        these tensors.
        """
        types = {name: dtype_of(self.given[value].dtype) for value, name in self.model.cuts.items()}
        return showing(self.model.proto, types, cut=cut)

    def feeds(self) -> dict[str, Array]:
        """The inputs of the copy that is cut."""
        inputs = {name + GIVEN: self.given[value] for value, name in self.model.cuts.items()}
        return {**self.sample.feeds, **inputs}

    def window(self, value: Value) -> Array:
        """For each element of a quantised tensor: how far the number that is rounded may be from the exact number, in
        steps of the scale.

        The window is the larger of TIE and 8 times the distance by which rounding to the declared types moves the
        numbers around the element. The rounding of a new model counts only up to the rounding of the original's part,
        or of the tensors that only the original has, since the new part may compute as much as all of these together.
        """
        if value not in self._windows:
            self._windows[value] = (
                self._judged_by(self.original, value) if self.original else self._own(value)
            )
        return self._windows[value]

    def _judged_by(self, original: Meaning, value: Value) -> Array:
        u = self.of[value]
        window = original.window(u) if u in original.layers else np.asarray(TIE)
        limit = max((float(original.window(v).max(initial=TIE)) for v in self.spare), default=TIE)
        return np.maximum(window, np.minimum(self._own(value), limit)) if limit > TIE else window

    def _own(self, value: Value) -> Array:
        stops = {v: a for v, a in self.given.items() if v != value}
        rounded, _ = self._in_single(value, stops)
        exact, layer = self.layers[value], rounded[value]
        strays = np.zeros(exact.numbers.shape)
        if exact.offsets is not None and layer.offsets is not None:
            shift = (
                0 if exact.zero is None else shift_of(rounded[exact.zero].numbers, self.layers[exact.zero])
            )
            strays = np.abs(layer.steps - shift - exact.steps)
        return np.maximum(TIE, _NOISE * around(strays, _SLICE))

    def noise(self, value: Value) -> Array:
        """How far rounding to the declared types moves each element of a float output, in the original's part."""
        if self.original is not None:
            return self.original.noise(self.of[value])
        if value not in self._noise:
            rounded = self._in_single(value, self.given)[1][value]
            with np.errstate(invalid="ignore"):
                error = np.abs(wide(rounded) - wide(self.outputs[value]))
            self._noise[value] = np.where(np.isfinite(error), error, 0.0)
        return self._noise[value]

    def _in_single(
        self, value: Value, stops: Mapping[Value, Array]
    ) -> tuple[dict[Value, Layer], dict[Value, Array]]:
        """Evaluate a part in float32. Functions that jump (Floor, a comparison) are evaluated exactly, because a
        result on the other side of a jump is no rounding error.
        """
        model = self.model
        jumping = [node for node in model.layers.part([value], stops) if jumps_at(model.graph, node)]
        outputs = {v for node in jumping for v in node.outputs} - {value, *self.layers}
        _, exact = model.evaluate(self.sample, outputs, stops) if outputs else ({}, {})
        return model.evaluate(self.sample, [value], {**stops, **exact}, rounded=True)


def shift_of(zero: Array, exact: Layer) -> int:
    """A zero point minus the exact zero point."""
    return int(zero.item()) - int(exact.numbers.item())


def meaning_of(model: CutModel, sample: Sample, own: Mapping[Value, Array] | None = None) -> Meaning:
    """Evaluate a model exactly. `own`: quantised tensors that its parts get instead of the exact ones. Raises
    Unjudged."""
    own = own or {}
    layers, results = model.evaluate(sample, [*model.layers.tensors, *model.graph.outputs], own)
    outputs = {v: layers[v].numbers if v in layers else results[v] for v in model.graph.outputs}
    return Meaning(
        model, sample, layers, outputs, {**{v: layer.numbers for v, layer in layers.items()}, **own}
    )


# --- which values of two models are the same ---


@dataclass(slots=True, eq=False)
class Pairs:
    """For each value of the new model, the same value of the original, or a negative number if there is none.

    `claimed`: quantised tensors that are paired by name only, so they may differ.
    """

    of: dict[Value, Value]
    claimed: list[Value]

    def known(self, value: Value) -> bool:
        return self.of[value] > 0


def _paired(a: CutModel, b: CutModel, by_name: bool) -> Pairs:
    """Pairs by structure: the same operators on the same inputs. Tensors of another structure are paired by name."""
    nodes = {node.key: node for node in a.graph.nodes()}
    named = {a.name(v): v for v in a.layers.tensors}
    of = {value: value for value in b.graph.inputs}
    for name, value in input_values(b.imported).items():
        default, before = b.imported.overridable.get(name), a.imported.overridable.get(name)
        if default is not None and before is not None and not same_content(before, default):
            of[value] = Value(-value)
    for value, const in b.graph.leaves.consts.items():
        # Large constants count as equal if samples of their elements are.
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
    return Pairs(of, claimed)


@dataclass(slots=True, eq=False)
class Comparison:
    """The new model's meaning on one sample, and where it differs from the original's.

    `left`, `new`: names and types of the tensors of the original and of the new model that equal no tensor of the
    other model.
    """

    meaning: Meaning
    pairs: Pairs
    wrong: list[Difference] = field(default_factory=list)
    left: set[tuple[str, Any]] = field(default_factory=set)
    new: set[tuple[str, Any]] = field(default_factory=set)

    def add(self, apart: Difference | None) -> None:
        if apart is not None:
            self.wrong.append(apart)


def compared(original: Meaning, b: CutModel, by_name: bool) -> Comparison:
    """Compare the new model `b` with the original: evaluate the parts that the original does not have. Raises
    Unjudged.
    """
    a, pairs = original.model, _paired(original.model, b, by_name)
    shared = {v: pairs.of[v] for v in b.layers.tensors if pairs.known(v)}
    stops = {v: original.given[u] for v, u in shared.items()}
    paired = set(shared.values())
    outputs = dict(zip(b.graph.outputs, a.graph.outputs))
    to_evaluate = [v for v in b.layers.tensors if v not in shared or v in pairs.claimed]
    to_evaluate += [v for v, u in outputs.items() if pairs.of[v] != u]

    def settle(value: Value, layer: Layer) -> Array:
        for u, other in original.layers.items():
            same = other.shifted(layer.numbers.dtype) if u not in paired else None
            if same is not None and _alike(layer, same) and not layer.differs(same, TIE).any():
                pairs.of[value] = u
                paired.add(u)
                return same.numbers
        return layer.numbers

    computed, computed_outputs = b.evaluate(original.sample, to_evaluate, stops, settle)
    layers = {v: computed[v] if v in computed else original.layers[u] for v, u in shared.items()}
    layers.update(computed)
    part_inputs = {v: layer.numbers for v, layer in layers.items()} | stops
    for v in layers.keys() - stops.keys():
        same = original.layers[pairs.of[v]].shifted(part_inputs[v].dtype) if pairs.known(v) else None
        part_inputs[v] = part_inputs[v] if same is None else same.numbers
    results = {
        v: computed_outputs[v]
        if v in computed_outputs
        else layers[v].numbers
        if v in layers
        else original.outputs[u]
        for v, u in outputs.items()
    }
    spare = [u for u in original.layers if u not in paired]
    meaning = Meaning(
        b, original.sample, layers, results, part_inputs, original, {**pairs.of, **outputs}, spare
    )
    comparison = Comparison(meaning, pairs)
    for v in pairs.claimed:
        comparison.add(_tensor_difference(original, pairs.of[v], layers[v], b.name(v)))
    for v, u in outputs.items():
        if pairs.of[v] != u:
            comparison.add(output_difference(original, u, results[v], original.outputs[u]))
    for difference in _unlike(original, comparison, paired):
        comparison.add(difference)
    comparison.left.update((a.name(v), original.layers[v].numbers.dtype) for v in spare)
    comparison.new.update((b.name(v), x.numbers.dtype) for v, x in layers.items() if not pairs.known(v))
    return comparison


def _unlike(original: Meaning, comparison: Comparison, paired: Container[Value]) -> Iterator[Difference]:
    """The differences of tensors that equal no tensor of the original, if the original has a tensor at the same
    position or in front of the same output. (Tensors computed from them may be equal by chance.)
    """
    a, b, layers = original.model.layers, comparison.meaning.model.layers, comparison.meaning.layers
    unknown = [v for v in b.tensors if v in layers and not comparison.pairs.known(v)]
    unpaired = [u for u in a.tensors if u not in paired]
    ends = [(b.nearest(v), a.nearest(u)) for v, u in zip(b.graph.outputs, a.graph.outputs)] if unknown else []
    for v, u in itertools.product(unknown, unpaired):
        other = original.layers[u].shifted(layers[v].numbers.dtype)
        if other is None or not _alike(layers[v], other):
            continue
        figures = distance(layers[v].steps, other.steps)
        if any(v in new and u in old for new, old in ends) or (
            b.origin(v, lambda w: comparison.pairs.of[w]) == a.origin(u, lambda w: w)
            and not _are_in_turn(original, u, comparison.meaning, v)
        ):
            yield Difference(comparison.meaning.model.name(v), *figures, layers[v].offsets is None)


def _are_in_turn(first: Meaning, u: Value, second: Meaning, v: Value) -> bool:
    """Whether two different tensors are successive steps of the same computation."""
    same = np.array_equal(first.layers[u].numbers, second.layers[v].numbers)
    return not same and (_is_behind(first, u, second, v) or _is_behind(second, v, first, u))


def _is_behind(first: Meaning, tensor: Value, second: Meaning, other: Value) -> bool:
    """Whether the first model computes, from `tensor`, the second model's tensor `other` or the floats that `other`
    represents: a Relu may come before or after the quantisation.
    """
    graph = second.model.graph
    readers = [n.outputs[0] for n in graph.users(other) if n.op.endswith("DequantizeLinear")]
    _, floats = second.model.evaluate(second.sample, readers, second.given)
    targets = [second.layers[other].numbers, *floats.values()]
    behind = {tensor}
    later: list[Value] = []
    for node in first.model.layers.order:
        if any(v in behind for v in node.inputs) and node.outputs[0] not in first.layers:
            behind.add(node.outputs[0])
            later.append(node.outputs[0])
    _, results = first.model.evaluate(first.sample, later, first.given)
    return any(
        array.shape == target.shape
        and array.dtype.kind == target.dtype.kind
        and np.array_equal(array, target)
        for array in results.values()
        for target in targets
    )


def _alike(a: Layer, b: Layer) -> bool:
    return a.numbers.shape == b.numbers.shape and a.numbers.dtype == b.numbers.dtype


def _tensor_difference(original: Meaning, value: Value, new: Layer, name: str) -> Difference | None:
    """How a quantised tensor differs from the original's; None if both are rounded from the same numbers."""
    exact = original.layers[value]
    if not _alike(exact, new):
        return Difference(name, float("inf"), new.numbers.size, new.numbers.size)
    wrong = exact.differs(new, TIE)
    if wrong.any():
        wrong = exact.differs(new, original.window(value))
    if not wrong.any():
        return None
    steps = greatest(np.abs(new.steps - exact.steps)[wrong])
    return Difference(name, steps, int(np.count_nonzero(wrong)), wrong.size, exact.offsets is None)


def greatest(distances: Array) -> float:
    """The greatest distance; infinite if one of them is NaN."""
    return float(np.max(np.where(np.isnan(distances), np.inf, distances), initial=0.0))


def distance(a: Array, b: Array) -> tuple[float, int, int]:
    """How two arrays differ: the greatest difference, the number of elements that differ, and the number of all
    elements.
    """
    if a.shape != b.shape:
        return float("inf"), a.size, a.size
    wrong = a != b
    if a.dtype.kind not in "iufb":
        return float(wrong.any()), int(np.count_nonzero(wrong)), a.size
    with np.errstate(invalid="ignore"):
        distance = np.abs(wide(a) - wide(b))
    return greatest(distance[wrong]), int(np.count_nonzero(wrong)), a.size


def output_difference(exact: Meaning, value: Value, new: Array, target: Array) -> Difference | None:
    """How an output that is not quantised differs from `target`; None if only by rounding. `exact`: the meaning of the
    model that has the output.
    """
    name = exact.model.name(value)
    if new.shape != target.shape or target.shape != exact.outputs[value].shape:
        return Difference(name, float("inf"), new.size, new.size, True)
    dtype = exact.sample.outputs[exact.model.graph.outputs.index(value)].dtype
    if not is_float(np.empty(0, dtype)):
        return Difference(name, *distance(new, target)) if (new != target).any() else None
    expected = Target(Criterion.FLOAT64, target.astype(dtype), wide(target), noise=exact.noise(value))
    if judge_floats(expected, new.astype(dtype)).passed:
        return None
    return Difference(name, *distance(wide(new), wide(target)), True)
