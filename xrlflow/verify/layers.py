"""Exact evaluation of a quantised model: for each quantised tensor, its integers and the real numbers from which they
are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from xrlflow.common import deadline
from xrlflow.ir import ABSENT, FLOATS, Body, DType, Graph, Node, Value
from xrlflow.ops.eval_qlinear import ROUNDINGS
from xrlflow.ops.evaluate import REALS, evaluate_node, promote
from xrlflow.ops.schema import split_op
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.verify.runner import Array

TIE = 1e-3
"""The distance from a tie, in steps of the scale, within which a number may be rounded up or down."""

# The relative difference by which two evaluations of DynamicQuantizeLinear in float32 may compute different ranges.
_SCALE = 2.0**-20

DYNAMIC = "DynamicQuantizeLinear"
_INTEGER = frozenset({"MatMulInteger", "ConvInteger"})
_WITH_SCALES = frozenset(
    {"DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits", "QGemm", "QAttention"}
)
# Operators of quantised numbers that quantise nothing.
_OF_WEIGHTS = frozenset({"DequantizeLinear", "com.microsoft::DequantizeLinear", "com.microsoft::MatMulNBits"})
# The types that NumPy and ONNX Runtime exchange. Types of operators that ONNX does not define may be unknown.
_EXCHANGED = frozenset({DType.UINT8, DType.INT8, DType.UINT16, DType.INT16, DType.FLOAT, DType.UNDEFINED})


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A quantised tensor. The scale of DynamicQuantizeLinear counts as a quantised tensor too, without offsets."""

    numbers: Array  # the exact integers
    offsets: Array | None  # real number minus integer, in steps of the scale; None: not rounded
    zero: Value | None = None  # the zero point, a value of the graph (for DynamicQuantizeLinear only)

    @property
    def steps(self) -> Array:
        """The real numbers before rounding, in steps, clamped to the range of the type."""
        value = self.numbers.astype(np.float64)
        return value if self.offsets is None else value + self.offsets

    def misses(self, other: Array, window: Array | float, shift: int = 0) -> Array:
        """A mask of the elements of `other` that are not the rounding of any number within `window` of the exact
        number.

        `shift`: the zero point of `other` minus that of this tensor.
        """
        if self.offsets is None:
            exact = self.numbers.astype(np.float64)
            return np.asarray(~(np.abs(other - exact) <= _SCALE * np.abs(exact)))
        value = other.astype(np.float64) - shift
        lowest, highest = limits(self.numbers.dtype)
        steps = self.steps
        mask = ~((np.rint(steps - window) <= value) & (value <= np.rint(steps + window)))
        if shift:  # with another zero point, other numbers are clamped
            mask &= (other != lowest) & (other != highest)
        return np.asarray(mask)

    def differs(self, other: Layer, window: Array | float) -> Array:
        """A mask of the elements that `other` rounds from other numbers than this layer does. Both must have the same
        zero point.
        """
        if self.offsets is None or other.offsets is None:
            return self.misses(other.numbers, window)
        # Quantising integers again does not change them: without the first of two equal quantisations the result is
        # the same.
        if self.is_whole or other.is_whole:
            return self.misses(other.numbers, window) & other.misses(self.numbers, window)
        return np.asarray(~(np.abs(self.steps - other.steps) <= window))

    @property
    def is_whole(self) -> bool:
        """Whether rounding changed nothing, as all numbers were integers."""
        return self.offsets is None or float(np.max(np.abs(self.offsets), initial=0.0)) <= TIE

    def shifted(self, dtype: np.dtype[Any]) -> Layer | None:
        """The same layer in the type `dtype`, whose zero point differs if one type is signed and the other is not;
        None if the numbers are not rounded, or if `dtype` is no integer type of the same size.
        """
        if dtype == self.numbers.dtype:
            return self
        if self.offsets is None or dtype.kind not in "iu" or dtype.itemsize != self.numbers.dtype.itemsize:
            return None
        return Layer(shifted(self.numbers, dtype), self.offsets)


def shifted(numbers: Array, dtype: np.dtype[Any]) -> Array:
    """Integers in a type of the same size, shifted so that the least number of one type becomes that of the other."""
    shift = limits(dtype)[0] - limits(numbers.dtype)[0]
    return (numbers.astype(np.int64) + shift).astype(dtype)


def limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def is_quantised(graph: Graph) -> bool:
    """Whether a graph or one of its bodies has an operator of quantised numbers."""
    return any(_is_quantised(node) for node in graph.nodes())


def _is_quantised(node: Node) -> bool:
    _, name = split_op(node.op)
    return (
        node.op in ROUNDINGS
        or name in _INTEGER | _WITH_SCALES
        or "QuantizeLinear" in name
        or "DequantizeLinear" in name
        or name.startswith("QLinear")
        or any(isinstance(a, Body) and is_quantised(a.graph) for a in node.attrs.values())
    )


def _quantised_operators(graph: Graph) -> set[str]:
    """The operators of quantised numbers in a graph and its bodies."""
    found = {node.op for node in graph.nodes() if _is_quantised(node) and not _bodies(node)}
    return found.union(*(_quantised_operators(b) for node in graph.nodes() for b in _bodies(node)))


def _bodies(node: Node) -> list[Graph]:
    return [a.graph for a in node.attrs.values() if isinstance(a, Body)]


def _rounds(node: Node) -> bool:
    if node.op.endswith("QGemm"):  # without a zero point for its output it gives floats
        return len(node.inputs) > 8 and node.inputs[8] != ABSENT
    return node.op == DYNAMIC or node.op in ROUNDINGS


@dataclass(frozen=True, eq=False)
class Layers:
    """A graph with the quantised tensors at which it is cut into parts."""

    graph: Graph

    @cached_property
    def order(self) -> tuple[Node, ...]:
        return tuple(self.graph.topological())

    @cached_property
    def varying(self) -> frozenset[Value]:
        """The values that depend on an input of the graph."""
        values = set(self.graph.inputs)
        for node in self.order:
            if any(v in values for v in node.inputs):
                values.update(node.outputs)
        return frozenset(values)

    @cached_property
    def tensors(self) -> tuple[Value, ...]:
        """The quantised tensors that depend on inputs, producers first."""
        return tuple(v for node in self.order if _rounds(node) for v in node.outputs if v in self.varying)

    @property
    def only_weights(self) -> bool:
        """Whether all operators of quantised numbers read quantised weights, and quantise nothing."""
        return _quantised_operators(self.graph) <= _OF_WEIGHTS

    @cached_property
    def touched(self) -> tuple[bool, ...]:
        """For each output of the graph, whether it depends on an operator of quantised numbers."""
        values: set[Value] = set()
        for node in self.order:
            if _is_quantised(node) or any(v in values for v in node.inputs):
                values.update(node.outputs)
        return tuple(value in values for value in self.graph.outputs)

    @cached_property
    def obstacle(self) -> str:
        """The reason why the graph cannot be evaluated layer by layer; "" if it can."""
        for node in self.order:
            if any(isinstance(a, Body) and _has_rounding(a.graph) for a in node.attrs.values()):
                return f"it quantises numbers in the body of a node {node.op}"
        for dtype in {self.graph.type(value).dtype for value in self.tensors} - _EXCHANGED:
            return f"it has quantised tensors of type {dtype.name.lower()}"
        return ""

    def nearest(self, output: Value) -> frozenset[Value]:
        """The quantised tensors from which a value is computed with no other quantised tensor in between."""
        return frozenset((output,)) if output in self._tensor_set else self._before(output) & self._tensor_set

    def origin(self, tensor: Value, name: Callable[[Value], Value]) -> tuple[str, int, frozenset[Value]]:
        """What identifies a quantised tensor: its operator, which of the operator's outputs it is, and the quantised
        tensors and inputs of the graph that it is computed from, each by `name`."""
        node = self.graph.producers[tensor]
        return node.op, node.outputs.index(tensor), frozenset(map(name, self._before(tensor)))

    def _before(self, value: Value) -> frozenset[Value]:
        ends = self._tensor_set | set(self.graph.inputs)
        return frozenset(v for node in self.part([value], ends) for v in node.inputs if v in ends)

    @cached_property
    def _tensor_set(self) -> frozenset[Value]:
        return frozenset(self.tensors)

    def part(self, wanted: Iterable[Value], stops: Container[Value]) -> list[Node]:
        """The nodes that compute `wanted`, producers first, without the nodes that compute the values of `stops`."""
        producers, needed = self.graph.producers, set()
        pending = list(wanted)
        while pending:
            node = producers.get(pending.pop())
            if node is not None and node.id not in needed:
                needed.add(node.id)
                pending.extend(v for v in node.inputs if v not in stops)
        return [node for node in self.order if node.id in needed]


def _has_rounding(graph: Graph) -> bool:
    return any(
        _rounds(node) or any(isinstance(a, Body) and _has_rounding(a.graph) for a in node.attrs.values())
        for node in graph.nodes()
    )


Settle = Callable[[Value, Layer], Array]
"""A function from a quantised tensor and its exact layer to the array that the readers of the tensor get."""


def evaluate_layers(
    layers: Layers,
    feeds: Mapping[Value, Array],
    wanted: Iterable[Value],
    stops: Mapping[Value, Array],
    settle: Settle = lambda _, layer: layer.numbers,
    *,
    rounded: bool = False,
) -> tuple[dict[Value, Layer], dict[Value, Array]]:
    """Evaluate a graph. Returns the layers of the quantised tensors from which `wanted` are computed, and the arrays
    of those of `wanted` that are not quantised.

    Readers of a value in `stops` get its array, and the nodes that compute the value are left out unless it is wanted.
    `rounded`: evaluate in float32, rounded to the declared types after each operator. Raises NotEvaluable, and
    whatever NumPy raises.
    """
    wanted = list(dict.fromkeys(wanted))
    order = layers.part(wanted, stops)
    graph, goals = layers.graph, frozenset(wanted)
    last = {value: at for at, node in enumerate(order) for value in node.inputs}
    lift = _single if rounded else _double
    arrays: dict[Value, Array] = {v: lift(np.asarray(a)) for v, a in feeds.items() if v in last or v in goals}
    layers_found: dict[Value, Layer] = {}
    plain: dict[Value, Array] = {}

    def read(value: Value) -> Array | None:
        if value == ABSENT:
            return None
        if value in stops:
            return lift(stops[value])
        array = arrays.get(value)
        return lift(graph.leaves.consts[value].numpy()) if array is None else array

    for at, node in enumerate(order):
        deadline.check()
        arguments = [read(value) for value in node.inputs]
        if _rounds(node) and node.outputs[0] in layers.varying:
            computed = _layers_of(node, arguments)
            layers_found.update(computed)
            arrays.update((v, lift(settle(v, layer))) for v, layer in computed.items() if v not in stops)
        else:
            results = evaluate_node(node.op, node.attrs, arguments, len(node.outputs))
            for value, type, result in zip(node.outputs, node.types, results):
                narrow = rounded and type.dtype in FLOATS
                arrays[value] = lift(result.astype(numpy_dtype(type.dtype)) if narrow else result)
        plain.update((v, arrays[v]) for v in node.outputs if v in goals and v not in layers_found)
        for value in node.inputs:
            if last[value] == at and value not in goals:
                arrays.pop(value, None)
    for value in goals - layers_found.keys() - plain.keys():
        array = read(value)
        if array is not None:
            plain[value] = array
    return layers_found, plain


def _double(array: Array) -> Array:
    return promote(REALS, array)


def _single(array: Array) -> Array:
    """Floats as float32; float64 as it is."""
    wide = promote(REALS, array)
    return wide.astype(np.float32) if wide is not array else array


def _layers_of(node: Node, arguments: list[Array | None]) -> dict[Value, Layer]:
    with np.errstate(all="ignore"):
        if node.op == DYNAMIC:
            return _dynamic(node, arguments)
        value = ROUNDINGS[node.op](REALS, node.attrs, *arguments)
        return {node.outputs[0]: _layer(value.rounded(), value.steps)}


def _layer(numbers: Array, steps: Array, zero: Value | None = None) -> Layer:
    clamped = np.clip(steps, *limits(numbers.dtype))
    return Layer(numbers, (clamped - numbers).astype(np.float32), zero)


def _dynamic(node: Node, arguments: list[Array | None]) -> dict[Value, Layer]:
    (x,) = arguments
    assert x is not None
    numbers, scale, zero = evaluate_node(node.op, node.attrs, [x], 3)
    results = [
        _layer(numbers, x / scale + zero, node.outputs[2] if len(node.outputs) > 2 else None),
        Layer(np.asarray(scale, np.float32), None),
        _layer(zero, np.asarray(-min(0.0, float(x.min(initial=0.0))) / scale)),
    ]
    return dict(zip(node.outputs, results))
