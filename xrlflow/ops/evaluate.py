"""Our own evaluator: what ONNX's operators (opset 23) compute, over any field.

Over REALS it is the float64 reference of whole-model verification and it folds constants; over a prime field
it proves rules. Semantics: the ONNX operator documentation, https://onnx.ai/onnx/operators/
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from xrlflow.ir import ABSENT, Attrs, Graph, Value
from xrlflow.ops import eval_elementwise, eval_linear, eval_norm, eval_shape
from xrlflow.ops.eval_shape import promote
from xrlflow.ops.eval_spec import Inputs, OpSpec
from xrlflow.ops.field import REALS, Array, Field, NotEvaluable

__all__ = ["REALS", "SPECS", "Field", "NotEvaluable", "OpSpec", "evaluate_graph", "evaluate_node", "promote"]


def evaluate_node(
    op: str, attrs: Attrs, inputs: Inputs, n_outputs: int, field: Field = REALS
) -> tuple[Array, ...]:
    """The outputs of one operator (at least `n_outputs`, absent ones included).

    Inputs are arrays, None where absent. Floats should be elements of the field, that is float64 (see
    `promote`); over REALS narrower floats are computed with as they are, where NumPy can. Integers and
    booleans are exact. Outputs are float64 wherever floats came in as float64: a Cast to float16, bfloat16 or
    float32 rounds nothing, one to a float8 or float4 format does. Elements of less than eight bits are held
    in int8 or uint8. Outputs may share memory with inputs, and may be read-only.

    Raises NotEvaluable for an operator (or a use of one) without meaning here, and whatever NumPy raises when
    the inputs do not fit the operator.
    """
    spec = SPECS.get(op)
    if spec is None:
        raise NotEvaluable(op)
    if (
        spec.proof == "numeric"
        and not field.real
        and any(x is not None and x.dtype.kind == "f" for x in inputs)
    ):
        raise NotEvaluable(op)
    with np.errstate(all="ignore"):
        outputs = spec.evaluate(field, attrs, inputs, n_outputs)
    return tuple([out if type(out) is np.ndarray else np.asarray(out) for out in outputs])


def evaluate_graph(graph: Graph, feeds: Mapping[Value, Array], field: Field = REALS) -> list[Array]:
    """The outputs of a graph for these inputs: float64 wherever the graph has floats of any precision.

    Constants are converted when a node reads them, and every intermediate is let go after its last use.
    A graph input that is not fed but has a constant (an overridable initialiser) takes that. Bodies of If,
    Loop and Scan are evaluated the same way. Raises NotEvaluable at the first node without a meaning, KeyError
    for an input that has no value.
    """
    order = graph.topological()
    reads: dict[Value, int] = {}
    for node in order:
        for value in node.inputs:
            reads[value] = reads.get(value, 0) + 1
    for value in graph.outputs:
        reads[value] = reads.get(value, 0) + 1
    consts, inputs = graph.leaves.consts, set(graph.inputs)
    held: dict[Value, Array] = {v: promote(field, np.asarray(a)) for v, a in feeds.items() if v in reads}

    def read(value: Value) -> Array | None:
        if value == ABSENT:
            return None
        found = held.get(value)
        if found is None:
            const = consts.get(value)
            if const is None:
                name = graph.leaves.names.get(value, str(value))
                raise KeyError(
                    f"input {name} is not fed" if value in inputs else f"value {name} is not known"
                )
            return promote(field, const.numpy())
        reads[value] -= 1
        if not reads[value]:
            del held[value]
        return found

    for node in order:
        arguments = [read(value) for value in node.inputs]
        results = evaluate_node(node.op, node.attrs, arguments, len(node.outputs), field)
        for value, result in zip(node.outputs, results):
            if value in reads:
                held[value] = result
        del arguments, results
    outputs = [read(value) for value in graph.outputs]
    return [out for out in outputs if out is not None]


SPECS: dict[str, OpSpec] = {
    **eval_elementwise.SPECS,
    **eval_linear.SPECS,
    **eval_norm.SPECS,
    **eval_shape.SPECS,
}
