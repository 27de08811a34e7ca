"""Checks for files that are not valid models: every error is reported in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import onnx
import onnx.checker
import onnx.shape_inference
import onnx.version_converter

from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.protos import subgraphs

# Exceptions of code that expects inputs, attributes of the right types, numbers in range, and UTF-8. Mistakes in this
# package would raise the same exceptions, so tests/fuzz/run.py checks that every model that ONNX Runtime runs is read.
_MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    onnx.version_converter.ConvertError,
)

# The most elements of a dimension: no tensor has a dimension with more.
_LONGEST = 1 << 48
# No tensor has more dimensions, so no list of sizes, axes or bounds is longer. (Lists of pads are twice as long.)
_MOST_DIMENSIONS = 1 << 12
_LISTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Expand", "Reshape", "Tile", "Squeeze", "Unsqueeze", "Upsample", "CenterCropPad"), (1,)),
    "ConstantOfShape": (0,),
    "Pad": (1, 3),
    "Slice": (1, 2, 3, 4),
    "Resize": (1, 2, 3),
    "Col2Im": (1, 2),
    "AffineGrid": (1,),
    "MaxUnpool": (2,),
}
# The equation of an Einsum, without spaces: terms of letters, each with at most one ellipsis.
_TERM = rb"[A-Za-z]*(\.\.\.[A-Za-z]*)?"
_EQUATION = re.compile(rb"%b(,%b)*(->%b)?" % (_TERM, _TERM, _TERM))


@contextmanager
def reading(name: str, what: str) -> Iterator[None]:
    """A context in which a part of a file is read: exceptions that malformed files cause become ModelError."""
    try:
        yield
    except ModelError:
        raise
    except _MALFORMED as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(
            f"{name}: {what} is not as ONNX has it ({reason[:200]}): the file is damaged, export it again"
        ) from error


def check_structure(name: str, graph: onnx.GraphProto, outside: frozenset[str] = frozenset()) -> None:
    """Refuse models on which ONNX's own code would abort or allocate endless memory: with absurd numbers, undefined
    values, or inputs without a type.

    A negative dimension, and one whose name is not UTF-8, is replaced by an unknown one, in place; so is an absurd
    dimension of a computed value. Raises ModelError.
    """
    damaged = "the file is damaged, export it again"
    inputs = len(graph.input)
    for at, value in enumerate((*graph.input, *graph.output, *graph.value_info)):
        for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
            absurd = dim.dim_value > _LONGEST
            if dim.dim_value < 0 or isinstance(dim.dim_param, bytes) or (absurd and at >= inputs):
                dim.Clear()
            elif absurd:
                raise ModelError(
                    f"{name}: {value.name!r} has a dimension of {dim.dim_value}, which no tensor has: {damaged}"
                )
    _check_lists(name, graph)
    for sparse in graph.sparse_initializer:
        if any(d < 0 for d in sparse.dims):
            raise ModelError(
                f"{name}: {sparse.values.name!r} has the dimensions {list(sparse.dims)}: {damaged}"
            )
    defined = outside.union(
        (v.name for v in graph.input),
        (t.name for t in graph.initializer),
        (t.values.name for t in graph.sparse_initializer),
        (output for node in graph.node for output in node.output),
    )
    for node in graph.node:
        title = f"node {node.name!r} ({node.op_type})"
        for operand in node.input:
            if operand and operand not in defined:
                raise ModelError(f"{name}: {title} reads {operand!r}, which nothing makes: {damaged}")
        _check_equation(name, node)
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
            check_structure(name, body, defined)


def _check_equation(name: str, node: onnx.NodeProto) -> None:
    """Refuse an Einsum whose equation might keep ONNX's inference busy for ever."""
    for attribute in node.attribute:
        is_equation = node.op_type == "Einsum" and attribute.name == "equation"
        if is_equation and not _EQUATION.fullmatch(attribute.s.replace(b" ", b"")):
            raise ModelError(
                f"{name}: node {node.name!r} (Einsum) has the equation {attribute.s!r}: export the model again"
            )


def _check_equations(name: str, nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        _check_equation(name, node)
        for body in subgraphs(node):
            _check_equations(name, body.node)


def _check_lists(name: str, graph: onnx.GraphProto) -> None:
    """Refuse shapes with so many dimensions that ONNX's inference would run out of memory."""
    lengths = {t.name: t.dims[0] for t in graph.initializer if len(t.dims) == 1}
    for value in (*graph.input, *graph.value_info):
        if value.type.HasField("tensor_type") and len(value.type.tensor_type.shape.dim) == 1:
            length = value.type.tensor_type.shape.dim[0].dim_value
            lengths[value.name] = max(length, lengths.get(value.name, 0))
    long = {k for k, length in lengths.items() if length > _MOST_DIMENSIONS}
    for node in graph.node if long else ():
        for at in _LISTS.get(node.op_type, ()):
            if at < len(node.input) and node.input[at] in long:
                raise ModelError(
                    f"{name}: node {node.name!r} ({node.op_type}) reads {node.input[at]!r} of "
                    f"{lengths[node.input[at]]} elements, and no tensor has so many dimensions: "
                    "the file is damaged, export it again"
                )


def check_inputs(name: str, graph: onnx.GraphProto) -> None:
    """Raise ModelError if an input of the model has no type."""
    for value in graph.input:
        if value.type.WhichOneof("value") is None:
            raise ModelError(
                f"{name}: input {value.name!r} has no type: the file is damaged, export it again"
            )


# The most nodes of inlined functions. Functions that call each other can make endless nodes of a small file.
_MOST_NODES = 1_000_000


def check_functions(name: str, model: onnx.ModelProto) -> None:
    """Refuse functions that call themselves, that exceed a million nodes when inlined, or that have invalid equations.

    Raises ModelError.
    """
    for function in model.functions:
        _check_equations(name, function.node)
    bodies = {(f.domain, f.name, f.overload): f for f in model.functions}
    sizes: dict[tuple[str, str, str], int | None] = {}  # None: not known yet

    def count(nodes: Iterable[onnx.NodeProto]) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            total += size(key) if key in bodies else 1
            total += sum(count(body.node) for body in subgraphs(node))
        return total

    def size(key: tuple[str, str, str]) -> int:
        if key not in sizes:
            sizes[key] = None
            sizes[key] = count(bodies[key].node)
        nodes = sizes[key]
        if nodes is None:
            raise ModelError(
                f"{name}: function {key[0]}::{key[1]} calls itself: the file is damaged, export it again"
            )
        return nodes

    if (total := count(model.graph.node)) > _MOST_NODES:
        raise ModelError(
            f"{name}: its functions are {total:,} nodes when they are inlined, at most {_MOST_NODES:,} are read"
        )
