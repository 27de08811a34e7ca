"""Files that are no models: whatever goes wrong in reading one is told in a line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx.checker
import onnx.shape_inference
import onnx.version_converter

from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.protos import subgraphs

# What code raises that expects a node to have its inputs, attributes of their types, numbers in their range, text in
# UTF-8. Our own mistakes would look the same: every model that ONNX Runtime runs has to load (bench/fuzz.py).
_MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    onnx.version_converter.ConvertError,
)

# No tensor has a dimension of more elements.
_LONGEST = 1 << 48


@contextmanager
def reading(name: str, what: str) -> Iterator[None]:
    """While a part of a file is read, raise ModelError for what is wrong with it."""
    try:
        yield
    except ModelError:
        raise
    except _MALFORMED as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(
            f"{name}: {what} is not as ONNX has it ({told[:200]}): the file is damaged, export it again"
        ) from error


def check_structure(name: str, graph: onnx.GraphProto, outside: frozenset[str] = frozenset()) -> None:
    """Refuse that of which ONNX's own code would allocate memory without end, or abort: absurd numbers, values that
    nothing makes, inputs without a type.

    A negative dimension says that it is not known, and is taken so, in place. Raises ModelError.
    """
    damaged = "the file is damaged, export it again"
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
            if dim.dim_value < 0:
                dim.Clear()
            elif dim.dim_value > _LONGEST:
                raise ModelError(
                    f"{name}: {value.name!r} has a dimension of {dim.dim_value}, which no tensor has: {damaged}"
                )
    known = outside.union(
        (v.name for v in graph.input),
        (t.name for t in graph.initializer),
        (t.values.name for t in graph.sparse_initializer),
        (output for node in graph.node for output in node.output),
    )
    for node in graph.node:
        title = f"node {node.name!r} ({node.op_type})"
        for read in node.input:
            if read and read not in known:
                raise ModelError(f"{name}: {title} reads {read!r}, which nothing makes: {damaged}")
        for attribute in node.attribute:
            if (
                node.op_type == "Split"
                and attribute.name == "num_outputs"
                and attribute.i != len(node.output)
            ):
                raise ModelError(
                    f"{name}: {title} has {len(node.output)} outputs and says {attribute.i}: {damaged}"
                )
        for body in subgraphs(node):
            check_structure(name, body, known)


def check_inputs(name: str, graph: onnx.GraphProto) -> None:
    """Raise ModelError if an input of the model has no type."""
    for value in graph.input:
        if value.type.WhichOneof("value") is None:
            raise ModelError(
                f"{name}: input {value.name!r} has no type: the file is damaged, export it again"
            )
