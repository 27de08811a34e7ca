"""What a file declares of its values, and whether that is so.

Runtimes take a model whose declarations contradict what it computes: they warn, and compute. A shape that a file
declares is a claim, which may hold for the inputs that its exporter saw alone. So it is not believed, but for

- the model's inputs, which runtimes check,
- what operators compute that ONNX does not define: of these the file alone knows,
- the bodies of loops, until one contradicts what follows: a loop of no turns has the shapes that its body declares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx
import onnx.defs

from xrlflow.ir import Attrs, Body, Dim, TensorType, TypeConflict, merge_types
from xrlflow.onnxio.protos import subgraphs
from xrlflow.onnxio.shapes import is_made_up, tensors, without_symbols
from xrlflow.ops.infer import type_of_proto

_LOOPS = ("Loop", "Scan")


class Contradiction(Exception):
    """A declaration that is not true; the message names the value, and both types."""

    def __init__(self, name: str, declared: TensorType, found: TensorType) -> None:
        super().__init__(f"{name!r} is declared {declared.as_const(False)} and is {found.as_const(False)}")


def check(name: str, declared: TensorType, found: TensorType, proven: bool = False) -> TensorType:
    """What both types say. Raises Contradiction if they cannot both be true.

    `proven`: also if a size is declared that does not follow.
    """
    try:
        both = merge_types(found, declared)
    except TypeConflict as error:
        raise Contradiction(name, declared, found) from error
    known = (None,) * len(both.shape or ()) if found.shape is None else found.shape
    open_ = [a for a, b in zip(known, both.shape or ()) if isinstance(b, int) and a != b]
    if open_ if proven else any(map(_is_open, open_)):
        raise Contradiction(name, declared, found)
    return both


def _is_open(dim: Dim) -> bool:
    """Whether a dimension is known to follow the inputs' (and is not merely unknown)."""
    return isinstance(dim, str) and not is_made_up(dim)


def is_defined(node: onnx.NodeProto) -> bool:
    """Whether ONNX defines the node's operator, so that its outputs' types follow from its inputs'."""
    return bool(onnx.defs.has(node.op_type, "" if node.domain == "ai.onnx" else node.domain))


def claims(model: onnx.ModelProto) -> dict[str, TensorType]:
    """What a model declares of the values that it computes outside of loops, its outputs among them."""
    return {
        info.name: without_symbols(type_of_proto(info.type))
        for graph in _graphs(model.graph)
        for info in (*graph.value_info, *graph.output)
        if info.type.WhichOneof("value")
    }


def in_loops(model: onnx.ModelProto) -> set[str]:
    """The values that the bodies of loops declare."""
    return {v.name for _, body in _loops(model.graph) for v in (*body.value_info, *body.output)}


def forget(model: onnx.ModelProto, loops: bool = False) -> onnx.ModelProto:
    """The model without the shapes that it declares for what it computes, in loops only if asked.

    Element types stay: a runtime checks them when it loads the model, which it does not shapes.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for graph in _graphs(bare.graph):
        known = {name for node in graph.node if not is_defined(node) for name in node.output}
        _clear(v for v in (*graph.value_info, *graph.output) if v.name not in known)
    for op, body in _loops(bare.graph) if loops else ():
        scalars = 2 if op == "Loop" else 0  # the step and the condition are what they are
        _clear([*body.value_info, *body.output, *body.input[scalars:]])
    return bare


def _clear(infos: Iterable[onnx.ValueInfoProto]) -> None:
    for info in infos:
        for tensor in tensors(info.type):
            tensor.ClearField("shape")


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and the bodies in it, but for those of loops and what is in these."""
    yield graph
    for node in graph.node:
        if node.op_type not in _LOOPS:
            for body in subgraphs(node):
                yield from _graphs(body)


def _loops(graph: onnx.GraphProto, inside: str = "") -> Iterator[tuple[str, onnx.GraphProto]]:
    """The bodies of loops, and all bodies in these, each with the operator that it belongs to."""
    for node in graph.node:
        for body in subgraphs(node):
            if inside or node.op_type in _LOOPS:
                yield node.op_type, body
            yield from _loops(body, inside or (node.op_type if node.op_type in _LOOPS else ""))


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
