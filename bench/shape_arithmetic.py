"""Counts the operators of an ONNX file that compute with sizes instead of data.

    counts = count(onnx.load("model.onnx"))    # Counts(shapes=9, masks=4)

A value depends on sizes alone if it is computed from the dimensions of tensors (Shape, Size) and from constants. The
values are followed through the file: what computes them may have any name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import onnx

from xrlflow.onnxio.inference import infer_shapes
from xrlflow.onnxio.protos import live_nodes, subgraphs

# Constants of more elements than this hold no shape: inference need not see them.
_MOST = 1024
_INTEGERS = frozenset(
    {
        onnx.TensorProto.BOOL,
        *(getattr(onnx.TensorProto, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)),
    }
)


@dataclass(frozen=True, slots=True)
class Counts:
    """The operators of a file that depend on sizes alone and run in each run.

    `shapes`: those whose outputs are integers and booleans of rank 0 or 1. `masks`: all others, such as masks and
    tables of positions.
    """

    shapes: int
    masks: int


def count(model: onnx.ModelProto) -> Counts:
    """Counts the operators that depend on sizes alone, without those that no output needs and without those that depend
    on constants alone (which a runtime computes once).

    The nodes in bodies are not counted, and a node with a body counts as one that depends on data.
    """
    types = _types(model)
    constant = {t.name for t in model.graph.initializer} | {""}
    sized: set[str] = set()
    shapes = masks = 0
    for node in live_nodes(model.graph):
        if _is_constant(node, constant, types):
            constant.update(node.output)
        elif _is_sized(node, constant | sized):
            sized.update(node.output)
            if all(_is_shape(types.get(name)) for name in node.output if name):
                shapes += 1
            else:
                masks += 1
    return Counts(shapes, masks)


def _is_constant(node: onnx.NodeProto, constant: set[str], types: dict[str, onnx.TypeProto]) -> bool:
    """Whether all outputs are the same in every run at every size. Random numbers are not."""
    if next(subgraphs(node), None) is not None or node.op_type.startswith("Random"):
        return False
    if node.op_type in ("Shape", "Size"):
        sizes = _sizes(node, types.get(node.input[0]))
        return sizes is not None and all(d.HasField("dim_value") for d in sizes)
    return all(name in constant for name in node.input)


def _sizes(
    node: onnx.NodeProto, type: onnx.TypeProto | None
) -> Sequence[onnx.TensorShapeProto.Dimension] | None:
    """The dimensions that a Shape or Size reads; None for an unknown rank."""
    if type is None or not type.tensor_type.HasField("shape"):
        return None
    ends = {a.name: a.i for a in node.attribute}
    return list(type.tensor_type.shape.dim)[ends.get("start", 0) : ends.get("end")]


def _is_sized(node: onnx.NodeProto, known: set[str]) -> bool:
    if next(subgraphs(node), None) is not None or node.op_type.startswith("Random"):
        return False
    return node.op_type in ("Shape", "Size") or all(name in known for name in node.input)


def _is_shape(type: onnx.TypeProto | None) -> bool:
    """Whether a type is that of integers or booleans of rank 0 or 1."""
    if type is None or not type.tensor_type.HasField("shape"):
        return False
    return type.tensor_type.elem_type in _INTEGERS and len(type.tensor_type.shape.dim) <= 1


def _types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """The types of all values of the graph, as far as ONNX's inference and the file know them."""
    small = onnx.ModelProto()
    small.CopyFrom(model)
    graph = small.graph
    for tensor in graph.initializer:
        if prod(tensor.dims) > _MOST:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    kept = [t for t in graph.initializer if prod(t.dims) <= _MOST]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    typed = infer_shapes(small, data_prop=True).graph
    return {v.name: v.type for v in (*typed.input, *typed.output, *typed.value_info)}
