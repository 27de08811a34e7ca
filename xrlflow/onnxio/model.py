"""An imported model: its graph, and everything in its file besides the computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from xrlflow.common.sizes import Range
from xrlflow.ir import Attrs, Const, Graph, Value
from xrlflow.onnxio.tensors import TensorStore

ON_RUNTIME = "xrlflow.left"
"""The metadata key of nodes that ONNX Runtime runs even in a model with generated kernels (`Node.on_runtime`)."""


@dataclass(frozen=True, slots=True)
class NodeLabel:
    """What a file says about a node and runtimes do not read."""

    op: str
    name: str
    doc_string: str
    metadata: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How the file computes a small constant that it does not store: by ConstantOfShape, Expand, Tile, ..."""

    op: str
    attrs: Attrs
    inputs: tuple[Const | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(c.type.nbytes or 0 for c in self.inputs if c is not None)


@dataclass(frozen=True, slots=True, eq=False)
class ImportedModel:
    """A model as read from a file.

    `frame` has the declared inputs and outputs, IR version, opset imports, producer, metadata, and doc strings.
    """

    name: str
    graph: Graph  # at opset 23; operators that only later opsets define have names like "ai.onnx@24::Swish"
    opset: int  # to write unless the result needs a newer one: the file's, or the user's choice
    frame: onnx.ModelProto  # the file's ModelProto without nodes, initialisers and value infos
    bindings: Mapping[str, int]  # sizes of symbols, from the shapes that the caller gave
    ranges: Mapping[str, Range]  # the least and greatest sizes of symbols, from these shapes
    fixed: bool  # whether numbers have replaced the symbols in `bindings`
    nodes_before: int  # the number of operators in the file, with functions inlined, and with those in bodies
    overridable: Mapping[str, Const]  # initialisers that are also graph inputs
    labels: Mapping[Value, NodeLabel]
    recipes: Mapping[Value, Recipe]  # of constants that take fewer bytes in the file as a node
    store: TensorStore
    stripped: bytes  # the file without large tensors: see wire.strip_model
    size: int  # bytes, including external data
    external: bool  # whether the file has external data
    declared: Mapping[
        Value, tuple[int, ...]
    ]  # shapes without symbols that the file declares for computed values
    notes: tuple[str, ...] = ()  # messages that say which of these shapes are wrong
    # Functions with the names of the runtime's own operators, which are not inlined, and those that they call.
    functions: tuple[onnx.FunctionProto, ...] = ()
    nonempty: bool = False  # whether the user says that no dimension is ever 0
