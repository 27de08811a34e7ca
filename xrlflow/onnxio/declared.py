"""What a file declares of its values, and whether that is so.

Runtimes take a model whose declarations contradict what it computes: they warn, and compute. Here what is declared is
believed until it contradicts what ONNX infers; then nothing that the file declares is, but for its inputs. Only what is
said of the model's outputs may be wrong alone: nothing is computed from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from xrlflow.ir import Attrs, Body, Dim, TensorType, TypeConflict, merge_types
from xrlflow.onnxio.protos import subgraphs
from xrlflow.onnxio.shapes import is_made_up


class Contradiction(Exception):
    """A declaration that is not true; the message names the value, and both types."""

    def __init__(self, name: str, declared: TensorType, found: TensorType) -> None:
        super().__init__(f"{name!r} is declared {declared.as_const(False)} and is {found.as_const(False)}")


def check(name: str, declared: TensorType, found: TensorType) -> TensorType:
    """What both types say. Raises Contradiction if they cannot both be true."""
    try:
        both = merge_types(found, declared)
    except TypeConflict as error:
        raise Contradiction(name, declared, found) from error
    if any(_is_open(a) and isinstance(b, int) for a, b in zip(found.shape or (), both.shape or ())):
        raise Contradiction(name, declared, found)
    return both


def _is_open(dim: Dim) -> bool:
    """Whether a dimension is known to follow the inputs' (and is not merely unknown)."""
    return isinstance(dim, str) and not is_made_up(dim)


def names(graph: onnx.GraphProto) -> set[str]:
    """The values that a model declares and computes: its outputs, and what bodies declare."""
    return {v.name for v in graph.output} | {
        v.name for _, body in _bodies(graph) for v in (*body.value_info, *body.output)
    }


def forget_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without the shapes that it declares for its outputs, from which nothing else follows."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for info in bare.graph.output:
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    return bare


def forget(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without the shapes that it declares for what it computes (element types stay)."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    infos = [*bare.graph.value_info, *bare.graph.output]
    for op, body in _bodies(bare.graph):
        scalars = 2 if op == "Loop" else 0  # the step and the condition are what they are
        infos += [*body.value_info, *body.output, *body.input[scalars:]]
    for info in infos:
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    return bare


def _bodies(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """All bodies in a graph, those in bodies too, each with the operator that it belongs to."""
    for node in graph.node:
        for body in subgraphs(node):
            yield node.op_type, body
            yield from _bodies(body)


def check_bodies(op: str, attrs: Attrs, outputs: Sequence[str], types: Sequence[TensorType]) -> None:
    """Raise Contradiction if an If or Loop cannot have outputs of these types, or a Loop's state changes its own."""
    if op == "If":
        for body in attrs.values():
            if isinstance(body, Body):
                for name, value, type in zip(outputs, body.graph.outputs, types):
                    check(name, type, body.graph.type(value).as_const(type.const))
    loop = attrs.get("body")
    if op == "Loop" and isinstance(loop, Body):
        graph = loop.graph
        formals = graph.inputs[2 : len(graph.inputs) - len(loop.captured)]
        for formal, value in zip(formals, graph.outputs[1:]):
            check(
                graph.leaves.names.get(formal, "state"), graph.type(formal), graph.type(value).as_const(False)
            )
        for name, value, type in zip(outputs, graph.outputs[1 : 1 + len(formals)], types):
            check(name, type, graph.type(value).as_const(type.const))
