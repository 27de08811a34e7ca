"""Checks the types that a file declares for its values.

Runtimes accept a model whose declarations contradict what it computes: they print a warning and go on. A declared shape
may hold only for the inputs that the exporter used. So declarations are not believed, except for

- the model's inputs, which runtimes check,
- outputs of operators that ONNX does not define: only the file knows their types,
- bodies of loops, until a contradiction is found: the result of a loop without iterations has the declared shape.
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
    """A declaration is wrong. The message names the value and both types."""

    def __init__(self, name: str, declared: TensorType, inferred: TensorType) -> None:
        super().__init__(f"{name!r} is declared {declared.brief} and is {inferred.brief}")


def check(name: str, declared: TensorType, inferred: TensorType, proven: bool = False) -> TensorType:
    """The type that fits both the declared and the inferred type. Raises Contradiction if the two cannot both be true.

    `proven`: also raise it if a size is declared that cannot be inferred.
    """
    try:
        both = merge_types(inferred, declared)
    except TypeConflict as error:
        raise Contradiction(name, declared, inferred) from error
    if proven and inferred.shape is None and both.shape == ():
        raise Contradiction(name, declared, inferred)
    sizes = (None,) * len(both.shape or ()) if inferred.shape is None else inferred.shape
    open_ = [a for a, b in zip(sizes, both.shape or ()) if isinstance(b, int) and a != b]
    if open_ if proven else any(map(_is_open, open_)):
        raise Contradiction(name, declared, inferred)
    return both


def _is_open(dim: Dim) -> bool:
    """Whether a dimension depends on the inputs' dimensions. (An unknown dimension does not count.)"""
    return isinstance(dim, str) and not is_made_up(dim)


def is_defined(node: onnx.NodeProto) -> bool:
    """Whether ONNX defines the node's operator, so that its outputs' types follow from its inputs'."""
    return bool(onnx.defs.has(node.op_type, "" if node.domain == "ai.onnx" else node.domain))


def claims(model: onnx.ModelProto) -> dict[str, TensorType]:
    """The types that a model declares for values that are computed outside loops, including its outputs."""
    return {
        info.name: without_symbols(type_of_proto(info.type))
        for graph in _graphs(model.graph)
        for info in (*graph.value_info, *graph.output)
        if info.type.WhichOneof("value")
    }


def in_loops(model: onnx.ModelProto) -> set[str]:
    """The names of values that are declared in bodies of loops."""
    return {v.name for _, body in _loops(model.graph) for v in (*body.value_info, *body.output)}


def forget(model: onnx.ModelProto, loops: bool = False) -> onnx.ModelProto:
    """The model without the shapes that it declares for computed values; in loops only with `loops`.

    Element types stay, because a runtime checks them when it loads the model. It does not check shapes. Declarations of
    initialisers are removed, because ONNX's inference ignores the axes of a Slice if their declaration has no shape.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for graph in _graphs(bare.graph):
        opaque = {name for node in graph.node if not is_defined(node) for name in node.output}
        constants = {tensor.name for tensor in graph.initializer}
        for at in reversed([i for i, v in enumerate(graph.value_info) if v.name in constants]):
            del graph.value_info[at]
        _clear(v for v in (*graph.value_info, *graph.output) if v.name not in opaque)
    for op, body in _loops(bare.graph) if loops else ():
        scalars = 2 if op == "Loop" else 0  # the iteration number and the condition are scalars
        _clear([*body.value_info, *body.output, *body.input[scalars:]])
    return bare


def _clear(infos: Iterable[onnx.ValueInfoProto]) -> None:
    for info in infos:
        for tensor in tensors(info.type):
            tensor.ClearField("shape")


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and the bodies inside it, except those of loops."""
    yield graph
    for node in graph.node:
        if node.op_type not in _LOOPS:
            for body in subgraphs(node):
                yield from _graphs(body)


def _loops(graph: onnx.GraphProto, inside: str = "") -> Iterator[tuple[str, onnx.GraphProto]]:
    """The bodies of loops and all bodies inside them, each with the operator that owns it."""
    for node in graph.node:
        for body in subgraphs(node):
            if inside or node.op_type in _LOOPS:
                yield node.op_type, body
            yield from _loops(body, inside or (node.op_type if node.op_type in _LOOPS else ""))


def check_bodies(op: str, attrs: Attrs, outputs: Sequence[str], types: Sequence[TensorType]) -> None:
    """Raise Contradiction if an If or Loop cannot have outputs of these types, or a Loop's state changes its type."""
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
