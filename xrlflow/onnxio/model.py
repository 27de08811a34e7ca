"""What a file holds besides its computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from xrlflow.ir import Const, Graph, Value
from xrlflow.onnxio.tensors import TensorStore


@dataclass(frozen=True, slots=True)
class NodeLabel:
    """What a file says about a node and the runtime does not read."""

    op: str
    name: str
    doc_string: str
    metadata: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class ImportedModel:
    """A model as read from a file.

    `graph` is at opset `opset` (23, unless the file has operators that only a later opset defines; those have
    names like "ai.onnx@24::Swish"). `frame` is the ModelProto without nodes, initialisers and value infos:
    declared inputs and outputs, IR version, opset imports, producer, metadata, doc strings, and those
    functions that could not be inlined. `bindings` gives numbers for symbols of the types, where the caller
    gave shapes. `nodes_before` counts the file's operators, functions inlined, bodies included.
    `overridable` are initialisers that are graph inputs too. `size` is in bytes, external data included.
    """

    name: str
    graph: Graph
    opset: int
    frame: onnx.ModelProto
    bindings: Mapping[str, int]
    fixed: bool
    nodes_before: int
    overridable: Mapping[str, Const]
    labels: Mapping[Value, NodeLabel]
    store: TensorStore
    stripped: bytes  # the model as it was, without large tensors: see wire.strip_model
    size: int
    external: bool
