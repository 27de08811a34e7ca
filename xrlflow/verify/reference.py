"""The original evaluated in float64 by our own evaluator. Both models are compared with this evaluation where it
exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TypeAlias

import numpy as np

from xrlflow.common import deadline
from xrlflow.ir import ABSENT, FLOATS, Body, Graph, Node, TensorType, Value
from xrlflow.onnxio import ImportedModel, ModelError, load
from xrlflow.onnxio.shapes import solve
from xrlflow.ops.evaluate import SPECS, NotEvaluable, evaluate_graph, evaluate_node
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.ops.work import dimensions, work
from xrlflow.verify.cases import Estimate
from xrlflow.verify.compare import wide
from xrlflow.verify.inputs import Case, evaluable_feeds
from xrlflow.verify.runner import Array, Model

# If the original's error exceeds this fraction of its output, either the model is ill-conditioned, or our evaluation
# computes something else. Errors below _HARMLESS are always accepted: a runtime's sigmoid is accurate to 2^-23 of 1,
# even if its results are small.
_SUSPICIOUS = 2.0**-8
_HARMLESS = 2.0**-20

_CONVERSION = 50.0

# A slow machine, for estimates of time: operations per second, bytes per second, and seconds per call.
_FLOPS, _BANDWIDTH, _CALL = 2e10, 4e9, 5e-6

_Evaluator: TypeAlias = Callable[[Graph, Mapping[Value, Array]], list[Array]]


class NoReference(ValueError):
    """A model has no float64 evaluation on some inputs."""


def evaluate(imported: ImportedModel, case: Case, values: Sequence[Value]) -> list[Array]:
    """These values of the model's graph in float64. Raises NoReference."""
    return evaluate_by(imported, case, values, evaluate_graph)


def evaluate_rounded(imported: ImportedModel, case: Case, values: Sequence[Value]) -> list[Array]:
    """These values, rounded to the model's own precision after each operator. Raises NoReference."""
    return evaluate_by(imported, case, values, _as_declared)


def evaluate_by(
    imported: ImportedModel, case: Case, values: Sequence[Value], evaluator: _Evaluator
) -> list[Array]:
    """These values, as `evaluator` computes them from the part of the graph that they depend on. Raises NoReference."""
    feeds = evaluable_feeds(imported, case.feeds)
    if feeds is None:
        raise NoReference("the inputs are not all tensors")
    from threadpoolctl import threadpool_limits

    try:
        # The matrix products are small: more threads gain little on an idle machine, and on a busy machine they wait
        # for each other (14 times slower on two shared processors).
        with threadpool_limits(1, user_api="blas"):
            return evaluator(part_for(imported.graph, values), feeds)
    except deadline.DeadlineExceeded:
        raise NoReference("there was no time for the float64 evaluation") from None
    except NotEvaluable as error:
        raise NoReference(f"{error} has no float64 evaluation") from error
    except (ArithmeticError, IndexError, KeyError, MemoryError, TypeError, ValueError) as error:
        # NumPy raises this for uses of an operator that our evaluator does not know.
        raise NoReference(f"the float64 evaluation fails: {error}") from error


def part_for(graph: Graph, values: Sequence[Value]) -> Graph:
    """The part of a graph that computes these values."""
    nodes: dict[Value, Node] = {}
    pending = list(values)
    while pending:
        node = graph.producers.get(pending.pop())
        if node is not None and node.id not in nodes:
            nodes[node.id] = node
            pending.extend(node.inputs)
    return Graph.make(nodes.values(), graph.inputs, tuple(values), graph.leaves)


def _as_declared(graph: Graph, feeds: Mapping[Value, Array]) -> list[Array]:
    """Like `evaluate_graph`, but each operator's outputs are rounded to their declared types."""
    order = graph.topological()
    last = {value: at for at, node in enumerate(order) for value in node.inputs}
    arrays: dict[Value, Array] = dict(feeds)

    def read(value: Value) -> Array | None:
        if value == ABSENT:
            return None
        return arrays[value] if value in arrays else graph.leaves.consts[value].numpy()

    for at, node in enumerate(order):
        deadline.check()
        results = evaluate_node(node.op, node.attrs, [read(v) for v in node.inputs], len(node.outputs))
        for value, type, result in zip(node.outputs, node.types, results):
            arrays[value] = result.astype(numpy_dtype(type.dtype)) if type.dtype in FLOATS else result
        for value in node.inputs:
            if last[value] == at and value not in graph.outputs:
                arrays.pop(value, None)
    outputs = [read(value) for value in graph.outputs]
    return [array for array in outputs if array is not None]


def evaluable(graph: Graph) -> tuple[bool, ...]:
    """For each output of a graph, whether all operators that it depends on can be evaluated."""
    unable: set[Value] = set()
    for node in graph.topological():
        if not _has_meaning(node) or not unable.isdisjoint(node.inputs):
            unable.update(node.outputs)
    return tuple(value not in unable for value in graph.outputs)


def _has_meaning(node: Node) -> bool:
    bodies = [attr.graph for attr in node.attrs.values() if isinstance(attr, Body)]
    return node.op in SPECS and all(_has_meaning(inner) for body in bodies for inner in body.nodes())


def is_credible(original: Array, reference: Array, rounded: Callable[[], Array | None]) -> bool:
    """Whether rounding can explain the distance of the reference from the original.

    Rounding can explain a small distance. For a large distance, `rounded` (the output in the model's own precision, by
    our evaluator) must differ from the reference as well. Otherwise our evaluation computes something else than the
    runtime.
    """
    a, y = wide(original), wide(reference)
    finite = np.isfinite(a) & np.isfinite(y)
    a, y = a[finite], y[finite]
    if not a.size:
        return True
    scale = float(np.abs(y).max())
    distance = float(np.abs(a - y).max())
    if distance <= max(_SUSPICIOUS * scale, _HARMLESS):
        return True
    other = rounded()
    if other is None or other.shape != reference.shape:
        return False
    with np.errstate(invalid="ignore"):
        strays = np.abs(wide(other)[finite] - y)
    return distance <= 16 * float(np.max(strays[np.isfinite(strays)], initial=0.0)) + _SUSPICIOUS * scale


class Sizes:
    """A model at several choices of sizes: the cost of a run, and whether its operators are defined at these sizes."""

    def __init__(self, model: Model, imported: ImportedModel) -> None:
        self._model, self._imported = model, imported
        self._known: dict[tuple[int, ...], Graph | None] = {}
        self._numbers: dict[tuple[int, ...], Mapping[str, int]] = {}
        self._flops: dict[tuple[int, ...], float] = {}

    def numbers(self, bindings: Mapping[str, int]) -> Mapping[str, int]:
        """The sizes of all dimensions that follow from the sizes of the inputs (`bindings`)."""
        key = tuple(bindings.values())
        if key not in self._numbers:
            self._numbers[key] = solve(self._imported.graph, bindings)
        return self._numbers[key]

    def estimate(self, bindings: Mapping[str, int]) -> Estimate:
        """The cost of one run. Constants are not counted, since they are in memory anyway."""
        graph, numbers = self._imported.graph, self.numbers(bindings)
        seconds, working = 0.0, 0.0
        for node in graph.nodes():
            types = [graph.type(v) if v else None for v in node.inputs]
            done = work(node, types, numbers)
            seconds += done.flops / _FLOPS + done.bytes / _BANDWIDTH + _CALL
            working = max(
                working, sum(_bytes(t, numbers) for t in (*types, *node.types) if t and not t.const)
            )
        exchanged = sum(_bytes(graph.type(v), numbers) for v in (*graph.inputs, *graph.outputs))
        return Estimate(seconds, working, exchanged)

    def flops(self, case: Case) -> float:
        """Floating-point operations of one evaluation on the case's inputs; infinite if unknown.

        Converting a constant counts as _CONVERSION operations for each element.
        """
        key = tuple(case.bindings.values())
        if key not in self._flops:
            self._flops[key] = self._flops_of(case)
        return self._flops[key]

    def _flops_of(self, case: Case) -> float:
        graph, numbers = self.graph(case)
        if graph is None:
            return float("inf")
        total = 0.0
        for node in graph.nodes():
            types = [graph.type(v) if v else None for v in node.inputs]
            total += work(node, types, numbers).flops
            total += _CONVERSION * sum(t.size or 0 for t in types if t is not None and t.const)
        return total

    def windows_fit(self, case: Case) -> bool:
        """Whether the window of every convolution and pooling fits into its padded input, if sizes are known.

        If not, ONNX defines no output, and the runtime's result cannot be compared with anything.
        """
        if not any(node.op in _WINDOWED for node in self._imported.graph.nodes()):
            return True
        graph, numbers = self.graph(case)
        return graph is None or all(_window_fits(graph, node, numbers) for node in graph.nodes())

    def graph(self, case: Case) -> tuple[Graph | None, Mapping[str, int]]:
        """The graph, and the sizes of its dimensions by symbol.

        If these do not follow from the inputs' sizes, the model is imported again with the case's sizes; (None, ...) if
        that fails.
        """
        graph, numbers = self._imported.graph, self.numbers(case.bindings)
        if all(_is_bound(type, numbers) for node in graph.nodes() for type in node.types):
            return graph, numbers
        key = tuple(case.bindings.values())
        if key not in self._known:
            shapes = {name: a.shape for name, a in case.feeds.items() if isinstance(a, np.ndarray)}
            shapes = {name: shape for name, shape in shapes.items() if 0 not in shape}
            try:
                self._known[key] = load(self._model, shapes=shapes, fix_shapes=True).graph
            except ModelError:
                self._known[key] = None
        return self._known[key], case.bindings


# Operators that slide a window: the position of the input that has the window's size, None if attributes have it.
_WINDOWED: Mapping[str, int | None] = {
    "Conv": 1,
    "ConvInteger": 1,
    "QLinearConv": 3,
    "MaxPool": None,
    "AveragePool": None,
    "LpPool": None,
}


def _window_fits(graph: Graph, node: Node, numbers: Mapping[str, int]) -> bool:
    if node.op not in _WINDOWED or node.attrs.get("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER"):
        return True
    shape, at = graph.type(node.inputs[0]).shape, _WINDOWED[node.op]
    kernel = node.attrs.get("kernel_shape")
    if kernel is None and at is not None:
        kernel = (graph.type(node.inputs[at]).shape or ())[2:]  # type: ignore[assignment]
    if shape is None or not isinstance(kernel, tuple):
        return True
    rank = len(kernel)
    pads, dilations = node.attrs.get("pads", (0,) * 2 * rank), node.attrs.get("dilations", (1,) * rank)
    if not isinstance(pads, tuple) or not isinstance(dilations, tuple) or len(shape) != rank + 2:
        return True
    for axis, (dim, size) in enumerate(zip(shape[2:], kernel)):
        number = numbers.get(dim) if isinstance(dim, str) else dim
        if number is None or not isinstance(size, int):
            continue
        if number + int(pads[axis]) + int(pads[axis + rank]) < (size - 1) * int(dilations[axis]) + 1:
            return False
    return True


def _bytes(type: TensorType, numbers: Mapping[str, int]) -> float:
    return prod(dimensions(type, numbers)) * type.dtype.bits / 8


def _is_bound(type: TensorType, bindings: Mapping[str, int]) -> bool:
    return type.shape is not None and all(isinstance(d, int) or d in bindings for d in type.shape)
