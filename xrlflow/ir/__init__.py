"""The graph IR: values, types, nodes, graphs, edits. It depends neither on ONNX files nor on rules."""

from xrlflow.ir import dims
from xrlflow.ir.dims import Dim
from xrlflow.ir.edit import Edit, apply_edit, plan_edit
from xrlflow.ir.graph import SMALL, ArrayHandle, Const, Graph, Leaves, TensorHandle
from xrlflow.ir.node import NO_ATTRS, Attr, Attrs, Body, Node, RawAttr, digest, mix, node_key, output_key
from xrlflow.ir.text import text
from xrlflow.ir.types import (
    ABSENT,
    FLOATS,
    INTEGERS,
    DType,
    TensorType,
    TypeConflict,
    Value,
    merge_types,
)

__all__ = [
    "ABSENT",
    "FLOATS",
    "INTEGERS",
    "NO_ATTRS",
    "SMALL",
    "ArrayHandle",
    "Attr",
    "Attrs",
    "Body",
    "Const",
    "DType",
    "Dim",
    "Edit",
    "Graph",
    "Leaves",
    "Node",
    "RawAttr",
    "TensorHandle",
    "TensorType",
    "TypeConflict",
    "Value",
    "apply_edit",
    "digest",
    "dims",
    "merge_types",
    "mix",
    "node_key",
    "output_key",
    "plan_edit",
    "text",
]
