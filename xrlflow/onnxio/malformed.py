"""Files that are not valid models: every error is reported in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx
import onnx.checker
import onnx.defs
import onnx.shape_inference
import onnx.version_converter

from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.protos import subgraphs

# The exceptions of code that expects inputs, attributes of the right types, numbers in range, and UTF-8. Our own
# mistakes would look the same, so every model that ONNX Runtime runs has to load (bench/fuzz.py).
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

# No tensor has a dimension with more elements.
_LONGEST = 1 << 48
# No tensor has more dimensions, so no list of sizes, axes or bounds is longer (pads: twice as long).
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
# An Einsum's equation, without spaces: terms of letters, which may have an ellipsis.
_TERM = rb"[A-Za-z]*(\.\.\.[A-Za-z]*)?"
_EQUATION = re.compile(rb"%b(,%b)*(->%b)?" % (_TERM, _TERM, _TERM))


@contextmanager
def reading(name: str, what: str) -> Iterator[None]:
    """While a part of a file is read, turn the exceptions of malformed files into ModelError."""
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
    """Refuse what makes ONNX's own code abort or allocate endless memory: absurd numbers, undefined values, inputs
    without a type.

    A negative dimension, or one with a name that is not UTF-8, is made unknown in place. Raises ModelError.
    """
    damaged = "the file is damaged, export it again"
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
            if dim.dim_value < 0 or isinstance(dim.dim_param, bytes):
                dim.Clear()
            elif dim.dim_value > _LONGEST:
                raise ModelError(
                    f"{name}: {value.name!r} has a dimension of {dim.dim_value}, which no tensor has: {damaged}"
                )
    _check_lists(name, graph)
    for sparse in graph.sparse_initializer:
        if any(d < 0 for d in sparse.dims):
            raise ModelError(
                f"{name}: {sparse.values.name!r} has the dimensions {list(sparse.dims)}: {damaged}"
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
            check_structure(name, body, known)


def _check_equation(name: str, node: onnx.NodeProto) -> None:
    """Refuse an Einsum with whose equation ONNX's inference might not end."""
    for attribute in node.attribute:
        wanted = node.op_type == "Einsum" and attribute.name == "equation"
        if wanted and not _EQUATION.fullmatch(attribute.s.replace(b" ", b"")):
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


# Functions that call each other can give a small file endless nodes.
_MOST_NODES = 1_000_000

# Attributes that are counts: kernels divide by them or iterate over them.
_COUNTS = frozenset(
    [
        "blocksize",
        "dilations",
        "group",
        "hidden_size",
        "kernel_shape",
        "kv_num_heads",
        "num_groups",
        "num_heads",
    ]
    + ["num_scan_inputs", "q_num_heads", "strides"]
)
# The numbers of attribute types in schemas.
_KINDS = {
    getattr(onnx.defs.OpSchema.AttrType, name): number
    for name, number in onnx.AttributeProto.AttributeType.items()
    if name != "UNDEFINED"
}
_CONSTANT = frozenset(
    ["sparse_value", "value", "value_float", "value_floats", "value_int", "value_ints", "value_string"]
    + ["value_strings"]
)


def check_functions(name: str, model: onnx.ModelProto) -> None:
    """Refuse functions that call themselves or exceed a million nodes when inlined, or with equations that are none.

    Raises ModelError.
    """
    for function in model.functions:
        _check_equations(name, function.node)
    bodies = {(f.domain, f.name, f.overload): f for f in model.functions}
    sizes: dict[tuple[str, str, str], int | None] = {}  # None: not yet known

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
        found = sizes[key]
        if found is None:
            raise ModelError(
                f"{name}: function {key[0]}::{key[1]} calls itself: the file is damaged, export it again"
            )
        return found

    if (total := count(model.graph.node)) > _MOST_NODES:
        raise ModelError(
            f"{name}: its functions are {total:,} nodes when they are inlined, at most {_MOST_NODES:,} are read"
        )


def check_nodes(name: str, model: onnx.ModelProto) -> None:
    """Refuse nodes that no runtime accepts. Raises ModelError, which names the node or value.

    These are nodes without an input, attribute or body that their operator needs, with an attribute of the wrong type,
    or with text that is not UTF-8. But for the text, ONNX Runtime checks the same when it loads a model.
    """
    opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}
    _check_nodes(name, model.graph, opsets)


def _check_nodes(name: str, graph: onnx.GraphProto, opsets: Mapping[str, int]) -> None:
    for value in (*graph.input, *graph.output):
        if not isinstance(value.name, str):
            raise ModelError(
                f"{name}: a value's name, {value.name!r}, is not UTF-8: the file is damaged, export it again"
            )
    # Nothing can read these: who does has a name that is no text.
    _drop(graph.value_info, [not isinstance(v.name, str) for v in graph.value_info])
    _drop(graph.initializer, [not isinstance(t.name, str) for t in graph.initializer])
    _drop(graph.sparse_initializer, [not isinstance(t.values.name, str) for t in graph.sparse_initializer])
    for node in graph.node:
        texts = (node.name, node.op_type, node.domain, *node.input, *node.output)
        wrong = (
            "has a name that is not UTF-8"
            if not all(isinstance(t, str) for t in (*texts, *(a.name for a in node.attribute)))
            else _fault(node, opsets)
        )
        if wrong is not None:
            title = (
                f"node {node.name!r}" if node.name else f"the node that makes {next(iter(node.output), '')!r}"
            )
            raise ModelError(
                f"{name}: {title} ({node.op_type}) {wrong}: the file is damaged, export it again"
            )
        for body in subgraphs(node):
            _check_nodes(name, body, opsets)


def _drop(fields: Any, wanted: Sequence[bool]) -> None:
    """Delete entries of a repeated field, in place."""
    for at in reversed([i for i, drop in enumerate(wanted) if drop]):
        del fields[at]


def _fault(node: onnx.NodeProto, opsets: Mapping[str, int]) -> str | None:
    """What is wrong with a node of an operator that ONNX defines, or None."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, 0), domain)
    except (onnx.defs.SchemaError, TypeError):  # not ONNX's operator, or an opset that is refused elsewhere
        return None
    if not schema.min_input <= len(node.input) <= schema.max_input:
        return f"has {len(node.input)} inputs and needs {_range(schema.min_input, schema.max_input)}"
    if not schema.min_output <= len(node.output) <= schema.max_output:
        return f"has {len(node.output)} outputs and needs {_range(schema.min_output, schema.max_output)}"
    given = {a.name: a for a in node.attribute}
    for key, attribute in given.items():
        known = schema.attributes.get(key)
        wanted = None if known is None else _KINDS[known.type]
        if wanted is not None and attribute.type and attribute.type != wanted:
            kinds = onnx.AttributeProto.AttributeType
            return f"has the attribute {key!r} of type {kinds.Name(attribute.type)}, not {kinds.Name(wanted)}"
        counts = [attribute.i] if attribute.type == onnx.AttributeProto.INT else attribute.ints
        if key in _COUNTS and min(counts, default=1) < 1:
            return f"has the attribute {key!r} below 1"
    for key, known in schema.attributes.items():
        if known.required and key not in given:
            return f"lacks {key!r}"
    if domain:
        return None
    if node.op_type == "Constant" and len(given.keys() & _CONSTANT) != 1:
        return "has no value" if not given else "has not one value"
    if node.op_type == "Transpose" and "perm" in given:
        perm = list(given["perm"].ints)
        if sorted(perm) != list(range(len(perm))):
            return f"has {perm} for a permutation"
    return _fault_of_body(node, given, opsets.get(domain, 0))


def _fault_of_body(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto], opset: int) -> str | None:
    """What is wrong with the bodies of an If, Loop or Scan: the number of their inputs or outputs."""
    made = len(node.output)
    if node.op_type == "If":
        for key in ("then_branch", "else_branch"):
            if len(given[key].g.output) < made or given[key].g.input:
                return f"has {made} outputs, {len(given[key].g.output)} in {key!r}, and inputs there none"
        return None
    if node.op_type not in ("Loop", "Scan"):
        return None
    body = given["body"].g
    read = len(node.input)
    if node.op_type == "Loop":
        states, more = read - 2, 1  # the body also computes the condition
    else:
        read -= opset < 9  # the first input had the lengths of a batch's sequences
        states, more = read - given["num_scan_inputs"].i, 0
    if states < 0:
        return f"has {read} inputs, too few for what it scans"
    if len(body.input) != read:
        return f"has {read} inputs, and its body {len(body.input)}"
    if len(body.output) < more + max(states, made):
        return f"has {made} outputs, and its body {len(body.output)}"
    return None


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"at least {least}" if most > 1 << 20 else f"{least} to {most}"
