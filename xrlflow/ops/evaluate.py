"""The evaluator of ONNX's operators (opset 23), over any field.

Over REALS (float64) it computes the reference results of verification, and folds constants. Over a prime field it
proves rules. Semantics: the ONNX operator documentation, https://onnx.ai/onnx/operators/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrlflow.common import deadline
from xrlflow.ir import ABSENT, Attrs, Body, Graph, Node, Value
from xrlflow.ops import (
    eval_attention,
    eval_contrib,
    eval_elementwise,
    eval_image,
    eval_linear,
    eval_norm,
    eval_qlinear,
    eval_quant,
    eval_recurrent,
    eval_shape,
)
from xrlflow.ops.eval_elementwise import promote
from xrlflow.ops.eval_spec import Inputs, OpSpec, integer, integers, table
from xrlflow.ops.field import REALS, Array, Field, NotEvaluable

__all__ = [
    "MISFIT", "REALS", "SPECS", "Evaluation", "Field", "NotEvaluable", "OpSpec", "evaluate_graph", "evaluate_node",
    "promote",
]  # fmt: skip


# The exceptions that NumPy raises for inputs that do not fit an operator.
MISFIT = (ArithmeticError, IndexError, KeyError, MemoryError, TypeError, ValueError)


def evaluate_node(
    op: str, attrs: Attrs, inputs: Inputs, n_outputs: int, field: Field = REALS
) -> tuple[Array, ...]:
    """The outputs of one operator (at least `n_outputs`, absent ones included).

    Inputs are arrays, or None if absent. Floats should be elements of the field, that is float64 (see `promote`). Over
    REALS, narrower floats are used as they are if NumPy can compute with them. Integers and booleans are exact. Outputs
    are float64 if the inputs were: then a Cast to float16, bfloat16 or float32 does not round, but a Cast to a float8
    or float4 format does. Arrays of less than eight bits, or in a float8 or float4 format, have the dtypes of
    ml_dtypes. Outputs may share memory with inputs and may be read-only.

    Raises NotEvaluable for operators, or uses of them, that have no evaluation here. Inputs that do not fit the
    operator raise whatever NumPy raises (MISFIT).
    """
    with np.errstate(all="ignore"):
        return _evaluated(op, attrs, inputs, n_outputs, field)


def _evaluated(op: str, attrs: Attrs, inputs: Inputs, n_outputs: int, field: Field) -> tuple[Array, ...]:
    """As `evaluate_node`, for a caller that has already suppressed NumPy's floating-point warnings."""
    spec = SPECS.get(op)
    if spec is None:
        raise NotEvaluable(op)
    if (
        spec.proof == "numeric"
        and not field.real
        and any(x is not None and x.dtype.kind == "f" for x in inputs)
    ):
        raise NotEvaluable(op)
    outputs = spec.evaluate(field, attrs, inputs, n_outputs)
    return tuple([out if type(out) is np.ndarray else np.asarray(out) for out in outputs])


# Operators that read only a part of their input. A large constant table, for instance of embeddings, is then not
# converted as a whole.
_PARTIAL = frozenset({"Gather", "GatherElements", "GatherND", "Slice", "Split"})


def evaluate_graph(graph: Graph, feeds: Mapping[Value, Array], field: Field = REALS) -> list[Array]:
    """The outputs of a graph for these inputs: float64 wherever the graph has floats of any precision.

    Constants are converted when a node reads them. Intermediate arrays are freed after their last use. A graph input
    without an array in `feeds` has the value of its constant, if it is an overridable initialiser. Bodies of If, Loop
    and Scan are evaluated the same way. Raises NotEvaluable at the first node without an evaluation, KeyError for an
    input without a value, and `deadline.DeadlineExceeded` when the time limit is reached.
    """
    return Evaluation.of(graph).run(feeds, field)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A graph that is to be evaluated several times (see `evaluate_graph`). `reads`: how many times each value is
    read.
    """

    graph: Graph
    order: tuple[Node, ...]
    reads: Mapping[Value, int]

    @staticmethod
    def of(graph: Graph) -> Evaluation:
        order = tuple(graph.topological())
        reads: dict[Value, int] = {}
        for node in order:
            for value in node.inputs:
                reads[value] = reads.get(value, 0) + 1
        for value in graph.outputs:
            reads[value] = reads.get(value, 0) + 1
        return Evaluation(graph, order, reads)

    def run(self, feeds: Mapping[Value, Array], field: Field = REALS) -> list[Array]:
        graph, reads = self.graph, dict(self.reads)
        consts = graph.leaves.consts
        arrays: dict[Value, Array] = {
            v: promote(field, np.asarray(a)) for v, a in feeds.items() if v in reads
        }

        def take(value: Value, lift: bool = True) -> Array | None:
            if value == ABSENT:
                return None
            array_ = arrays.get(value)
            if array_ is None:
                const = consts.get(value)
                if const is None:
                    name = graph.leaves.names.get(value, str(value))
                    raise KeyError(
                        f"input {name} is not fed" if value in graph.inputs else f"value {name} is not known"
                    )
                array = const.numpy()
                return promote(field, array) if lift else array
            reads[value] -= 1
            if not reads[value]:
                del arrays[value]
            return array_

        with np.errstate(all="ignore"):
            for node in self.order:
                deadline.check()
                partial = node.op in _PARTIAL
                arguments = [take(value, not partial) for value in node.inputs]
                results = _evaluated(node.op, node.attrs, arguments, len(node.outputs), field)
                for value, result in zip(node.outputs, results):
                    if value in reads:
                        arrays[value] = promote(field, result) if partial else result
                del arguments, results
            outputs = [take(value) for value in graph.outputs]
        return [out for out in outputs if out is not None]


# --- control flow: a body's captured values are the last inputs of its graph, and of the node ---


def _bodies(
    attrs: Attrs, inputs: Inputs
) -> tuple[list[Array | None], dict[str, tuple[Graph, list[Array | None]]]]:
    """The explicit inputs of a node, and its bodies by name, each with the values that it captures."""
    bodies = {name: value for name, value in attrs.items() if isinstance(value, Body)}
    at = explicit = len(inputs) - sum(len(body.captured) for body in bodies.values())
    out = {}
    for name, body in bodies.items():
        out[name] = (body.graph, list(inputs[at : at + len(body.captured)]))
        at += len(body.captured)
    return list(inputs[:explicit]), out


def _run_body(
    field: Field, body: Evaluation, arguments: Sequence[Array | None], captured: Sequence[Array | None]
) -> list[Array]:
    pairs = zip(body.graph.inputs, (*arguments, *captured), strict=True)
    return body.run({value: array for value, array in pairs if array is not None}, field)


def _if(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
    (condition,), bodies = _bodies(attrs, inputs)
    assert condition is not None
    graph, captured = bodies["then_branch" if condition.item() else "else_branch"]
    return tuple(_run_body(field, Evaluation.of(graph), (), captured))


def _stacked(graph: Graph, rows: list[list[Array]], first: int, axes: Sequence[int]) -> list[Array]:
    """The results of each step for the outputs from `first` on, stacked. Without steps, empty arrays of the declared
    types.
    """
    out = []
    for i, axis in enumerate(axes, start=first):
        if rows:
            out.append(np.stack([row[i] for row in rows], axis=axis))
        else:
            shape = [d if isinstance(d, int) else 0 for d in graph.type(graph.outputs[i]).shape or ()]
            shape.insert(axis if axis >= 0 else axis + len(shape) + 1, 0)
            out.append(np.zeros(shape))
    return out


# A loop with more iterations is assumed to be endless.
_MOST_TRIPS = 100_000


def _loop(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
    (trips, condition, *state), bodies = _bodies(attrs, inputs)
    graph, captured = bodies["body"]
    if (trips is not None and trips.dtype.kind not in "iu") or (
        condition is not None and condition.dtype.kind != "b"
    ):
        raise TypeError("Loop: its trip count is an integer, its condition a boolean")
    going = condition is None or bool(condition.item())
    rows: list[list[Array]] = []
    each = Evaluation.of(graph)
    while going and (trips is None or len(rows) < trips.item()):
        if len(rows) >= _MOST_TRIPS:
            raise NotEvaluable(f"a loop of more than {_MOST_TRIPS} steps")
        step = (np.array(len(rows), dtype=np.int64), np.array(going), *state)
        results = _run_body(field, each, step, captured)
        going = bool(results[0].item())
        state[:] = results[1 : 1 + len(state)]
        rows.append(results)
    scans = len(graph.outputs) - 1 - len(state)
    return (*state, *_stacked(graph, rows, 1 + len(state), [0] * scans))


def _scan(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
    explicit, bodies = _bodies(attrs, inputs)
    graph, captured = bodies["body"]
    scanned = integer(attrs, "num_scan_inputs", 1)
    states = len(explicit) - scanned
    state, sources = explicit[:states], explicit[states:]
    scans = len(graph.outputs) - states
    axes = integers(attrs, "scan_input_axes") or (0,) * scanned
    backwards = integers(attrs, "scan_input_directions") or (0,) * scanned
    if not {*backwards, *(integers(attrs, "scan_output_directions") or ())} <= {0, 1}:
        raise ValueError("Scan: a direction is 0 or 1")
    columns = []
    for x, axis, flip in zip(sources, axes, backwards, strict=True):
        assert x is not None
        columns.append(np.moveaxis(np.flip(x, axis) if flip else x, axis, 0))
    rows: list[list[Array]] = []
    each = Evaluation.of(graph)
    for step in zip(*columns, strict=True):
        results = _run_body(field, each, (*state, *map(np.asarray, step)), captured)
        state[:] = results[:states]
        rows.append(results)
    out_axes = integers(attrs, "scan_output_axes") or (0,) * scans
    out_ways = integers(attrs, "scan_output_directions") or (0,) * scans
    stacked = _stacked(graph, rows, states, out_axes)
    flipped = [np.flip(y, axis) if flip else y for y, axis, flip in zip(stacked, out_axes, out_ways)]
    return (*state, *flipped)


SPECS: dict[str, OpSpec] = {
    **eval_attention.SPECS,
    **eval_contrib.SPECS,
    **eval_elementwise.SPECS,
    **eval_image.SPECS,
    **eval_linear.SPECS,
    **eval_norm.SPECS,
    **eval_qlinear.SPECS,
    **eval_quant.SPECS,
    **eval_recurrent.SPECS,
    **eval_shape.SPECS,
    **table("movement", If=_if, Loop=_loop, Scan=_scan),
}
