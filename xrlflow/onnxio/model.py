"""What is kept of a file besides its computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from xrlflow.ir import Attrs, Const, Graph, Value
from xrlflow.onnxio.tensors import TensorStore

LEFT = "xrlflow.left"
"""Metadata of a node that ONNX Runtime runs even where kernels of our own run others (`Node.left`)."""


@dataclass(frozen=True, slots=True)
class NodeLabel:
    """What a file says about a node that runtimes do not read."""

    op: str
    name: str
    doc_string: str
    metadata: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How the file computes a small constant that it does not store: ConstantOfShape, Expand, Tile, ..."""

    op: str
    attrs: Attrs
    inputs: tuple[Const | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(c.type.nbytes or 0 for c in self.inputs if c is not None)


@dataclass(frozen=True, slots=True, eq=False)
class ImportedModel:
    """A model as read from a file.

    - `graph` has operators of opset 23, and those that only a later opset defines (they have names like
      "ai.onnx@24::Swish"). `opset` is the one to write where the result needs no newer one: that of the file, unless
      somebody chose another.
    - `frame` is the ModelProto without nodes, initialisers and value infos: declared inputs and outputs, IR version,
      opset imports, producer, metadata, doc strings, and functions that could not be inlined.
    - `bindings`: sizes for symbols, from the shapes that the caller gave.
    - `nodes_before`: the number of operators in the file, with functions inlined, and with bodies.
    - `recipes`: constants that take less room in the file as the node that makes them.
    - `overridable`: initialisers that are also graph inputs. `size`: bytes, including external data.
    - `declared`: the shapes, in numbers, that the file declares for computed values; `notes`: which of them are wrong.
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
    stripped: bytes  # the file without large tensors: see wire.strip_model
    size: int
    external: bool
    declared: Mapping[Value, tuple[int, ...]]
    notes: tuple[str, ...] = ()
