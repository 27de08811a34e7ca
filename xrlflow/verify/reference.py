"""The original in float64, by our own evaluator: what both models are measured against where it exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from xrlflow.ir import ABSENT, FLOATS, Body, Graph, Node, TensorType, Value
from xrlflow.onnxio import ImportedModel, ModelError, load
from xrlflow.ops.evaluate import SPECS, NotEvaluable, evaluate_graph, evaluate_node
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.ops.work import work
from xrlflow.verify.compare import wide
from xrlflow.verify.inputs import Case, evaluable_feeds
from xrlflow.verify.runner import Array, Model

# An error of the original of more than this part of its output is suspicious: either the model is ill-conditioned, or
# our evaluation is of something else.
_SUSPICIOUS = 2.0**-8

_CONVERSION = 50.0

_Evaluator: TypeAlias = Callable[[Graph, Mapping[Value, Array]], list[Array]]


class NoReference(ValueError):
    """There is no float64 evaluation of a model on some inputs."""


def evaluate(imported: ImportedModel, case: Case, values: Sequence[Value]) -> list[Array]:
    """Values of the model's graph in float64. Raises NoReference."""
    return _evaluate(imported, case, values, evaluate_graph)


def evaluate_rounded(imported: ImportedModel, case: Case, values: Sequence[Value]) -> list[Array]:
    """The same in the model's own precision, operator by operator: how much rounding does. Raises NoReference."""
    return _evaluate(imported, case, values, _as_declared)


def _evaluate(
    imported: ImportedModel, case: Case, values: Sequence[Value], evaluator: _Evaluator
) -> list[Array]:
    feeds = evaluable_feeds(imported, case.feeds)
    if feeds is None:
        raise NoReference("the inputs are not all tensors")
    try:
        return evaluator(part_for(imported.graph, values), feeds)
    except NotEvaluable as error:
        raise NoReference(f"{error} has no float64 evaluation") from error
    except (ArithmeticError, IndexError, KeyError, MemoryError, TypeError, ValueError) as error:
        # NumPy's complaint about a use of an operator that our evaluator does not know.
        raise NoReference(f"the float64 evaluation fails: {error}") from error


def part_for(graph: Graph, values: Sequence[Value]) -> Graph:
    """The part of a graph that makes these values."""
    nodes: dict[Value, Node] = {}
    pending = list(values)
    while pending:
        node = graph.producers.get(pending.pop())
        if node is not None and node.id not in nodes:
            nodes[node.id] = node
            pending.extend(node.inputs)
    return Graph.make(nodes.values(), graph.inputs, tuple(values), graph.leaves)


def _as_declared(graph: Graph, feeds: Mapping[Value, Array]) -> list[Array]:
    """Like `evaluate_graph`, but what every operator makes is rounded to its declared type."""
    order = graph.topological()
    last = {value: at for at, node in enumerate(order) for value in node.inputs}
    held: dict[Value, Array] = dict(feeds)

    def read(value: Value) -> Array | None:
        if value == ABSENT:
            return None
        return held[value] if value in held else graph.leaves.consts[value].numpy()

    for at, node in enumerate(order):
        results = evaluate_node(node.op, node.attrs, [read(v) for v in node.inputs], len(node.outputs))
        for value, type, result in zip(node.outputs, node.types, results):
            held[value] = result.astype(numpy_dtype(type.dtype)) if type.dtype in FLOATS else result
        for value in node.inputs:
            if last[value] == at and value not in graph.outputs:
                held.pop(value, None)
    found = [read(value) for value in graph.outputs]
    return [array for array in found if array is not None]


def evaluable(graph: Graph) -> tuple[bool, ...]:
    """For each output of a graph, whether all operators behind it have an evaluation."""
    return tuple(
        all(_has_meaning(node) for node in part_for(graph, (value,)).nodes()) for value in graph.outputs
    )


def _has_meaning(node: Node) -> bool:
    bodies = [attr.graph for attr in node.attrs.values() if isinstance(attr, Body)]
    return node.op in SPECS and all(_has_meaning(inner) for body in bodies for inner in body.nodes())


def is_credible(original: Array, reference: Array, rounded: Callable[[], Array | None]) -> bool:
    """Whether a reference's distance from the original can be rounding.

    If it is small, it can. If not, `rounded` (the output as our evaluator has it in the model's own precision)
    must stray from the reference as well; otherwise what we evaluate is not what the runtime does.
    """
    a, y = wide(original), wide(reference)
    finite = np.isfinite(a) & np.isfinite(y)
    a, y = a[finite], y[finite]
    if not a.size:
        return True
    scale = float(np.abs(y).max())
    distance = float(np.abs(a - y).max())
    if distance <= _SUSPICIOUS * scale:
        return True
    other = rounded()
    if other is None or other.shape != reference.shape:
        return False
    with np.errstate(invalid="ignore"):
        strays = np.abs(wide(other)[finite] - y)
    return distance <= 16 * float(np.max(strays[np.isfinite(strays)], initial=0.0)) + _SUSPICIOUS * scale


def flops(model: Model, imported: ImportedModel, case: Case) -> float:
    """What one evaluation on the case's inputs takes, in floating-point operations; infinite if sizes are unknown.

    Converting a constant's elements counts as _CONVERSION operations each.

    Dimensions that the bindings do not tell are found by importing the model at these sizes.
    """
    graph = imported.graph
    if not all(_known(type, case.bindings) for type in _types(graph)):
        shapes = {name: a.shape for name, a in case.feeds.items() if isinstance(a, np.ndarray)}
        shapes = {name: shape for name, shape in shapes.items() if 0 not in shape}
        try:
            graph = load(model, shapes=shapes, fix_shapes=True).graph
        except ModelError:
            return float("inf")
    total = 0.0
    for node in graph.nodes():
        types = [graph.type(v) if v else None for v in node.inputs]
        total += work(node, types, case.bindings).flops
        total += _CONVERSION * sum(t.size or 0 for t in types if t is not None and t.const)
    return total


def _types(graph: Graph) -> Iterator[TensorType]:
    for node in graph.nodes():
        yield from node.types


def _known(type: TensorType, bindings: Mapping[str, int]) -> bool:
    return type.shape is not None and all(isinstance(d, int) or d in bindings for d in type.shape)
