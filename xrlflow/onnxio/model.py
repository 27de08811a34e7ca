"""What a file holds besides its computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from xrlflow.ir import Attrs, Const, Graph, Value
from xrlflow.onnxio.tensors import TensorStore


@dataclass(frozen=True, slots=True)
class NodeLabel:
    """What a file says about a node and the runtime does not read."""

    op: str
    name: str
    doc_string: str
    metadata: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How the file made a small constant that it did not store: ConstantOfShape, Expand, Tile, ..."""

    op: str
    attrs: Attrs
    inputs: tuple[Const | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(c.type.nbytes or 0 for c in self.inputs if c is not None)


@dataclass(frozen=True, slots=True, eq=False)
class ImportedModel:
    """A model as read from a file.

    The operators of `graph` are opset 23's. `opset` is the one to write: 23 as well, unless the file has
    operators that only a later opset defines (they have names like "ai.onnx@24::Swish"), or operators that
    runtimes lack at 23 (then 21, see `versions.KEPT_BELOW_22`). `frame` is the ModelProto without nodes,
    initialisers and value infos: declared inputs and outputs, IR version, opset imports, producer, metadata,
    doc strings, and those functions that could not be inlined. `bindings` gives numbers for symbols of the
    types, where the caller gave shapes. `nodes_before` counts the file's operators, functions inlined, bodies
    included. `recipes` are of constants that take less room in the file as the node that makes them.
    `overridable` are initialisers that are graph inputs too. `size` is in bytes, external data included.
    `declared` has the shapes, in numbers, that the file declares of what its nodes compute; they need not be true.
    `notes` say which of them are not.
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
    recipes: Mapping[Value, Recipe]
    store: TensorStore
    stripped: bytes  # the model as it was, without large tensors: see wire.strip_model
    size: int
    external: bool
    declared: Mapping[Value, tuple[int, ...]]
    notes: tuple[str, ...] = ()
