"""ONNX's inference of types, safe for models on which it would crash the process."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx.shape_inference

from xrlflow.onnxio.protos import subgraphs

# What ONNX's inference raises in strict mode; the last one if an element type is not known.
REFUSED = (onnx.shape_inference.InferenceError, ValueError)

# Operators whose inference reads the type of the first operand without checking that it is known.
_ASSUMING = frozenset(
    [("", "EyeLike"), ("ai.onnx", "EyeLike"), ("", "RegexFullMatch"), ("ai.onnx", "RegexFullMatch")]
    + [("ai.onnx.ml", op) for op in ("DictVectorizer", "LabelEncoder", "TreeEnsemble")]
)


def infer_shapes(model: onnx.ModelProto, **options: bool) -> onnx.ModelProto:
    """`onnx.shape_inference.infer_shapes`, with the same results and errors, which does not crash.

    The inference of some operators (`_ASSUMING`) crashes if an operand has an unknown type. Such an operand is the
    output of an operator that ONNX does not define, or of a later node, since files need not be sorted. Here these
    operands get a tensor type without an element type.
    """
    if not any(True for _ in _assumed(model.graph)):
        return onnx.shape_inference.infer_shapes(model, **options)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for graph, name in [*_assumed(copy.graph)]:
        declared = {v.name: v for v in (*graph.input, *graph.output, *graph.value_info)}
        value = declared[name] if name in declared else graph.value_info.add(name=name)
        if value.type.WhichOneof("value") is None:
            value.type.tensor_type.SetInParent()
    typed = onnx.shape_inference.infer_shapes(copy, **options)
    _forget_unknown(typed.graph)
    return typed


def _assumed(graph: onnx.GraphProto) -> Iterator[tuple[onnx.GraphProto, str]]:
    """The values whose types must be known, each with the graph that reads it."""
    for node in graph.node:
        if (node.domain, node.op_type) in _ASSUMING and node.input:
            yield graph, node.input[0]
        for body in subgraphs(node):
            yield from _assumed(body)


def _forget_unknown(graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.HasField("tensor_type") and not value.type.tensor_type.elem_type:
            value.ClearField("type")
    remaining = [v for v in graph.value_info if v.HasField("type")]
    del graph.value_info[:]
    graph.value_info.extend(remaining)
    for node in graph.node:
        for body in subgraphs(node):
            _forget_unknown(body)
