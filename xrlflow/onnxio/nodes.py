"""Checks nodes against the definitions of their operators, at the opset of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import onnx
import onnx.checker
import onnx.defs
import onnx.helper
import onnx.shape_inference

from xrlflow.onnxio import declared
from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.inference import infer_shapes
from xrlflow.onnxio.protos import all_nodes, subgraphs
from xrlflow.onnxio.shapes import without_claims
from xrlflow.ops.infer import type_of_proto
from xrlflow.ops.schema import OPSET

# Attributes that are counts: kernels divide by them or use them as numbers of iterations.
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
# The numbers by which schemas denote attribute types.
_KINDS = {
    getattr(onnx.defs.OpSchema.AttrType, name): number
    for name, number in onnx.AttributeProto.AttributeType.items()
    if name != "UNDEFINED"
}
# The attribute that holds a Constant's value, by the type of the value.
_CONSTANT = {
    onnx.AttributeProto.TENSOR: "value",
    onnx.AttributeProto.SPARSE_TENSOR: "sparse_value",
    onnx.AttributeProto.INT: "value_int",
    onnx.AttributeProto.INTS: "value_ints",
    onnx.AttributeProto.FLOAT: "value_float",
    onnx.AttributeProto.FLOATS: "value_floats",
    onnx.AttributeProto.STRING: "value_string",
    onnx.AttributeProto.STRINGS: "value_strings",
}


# Operators that ONNX Runtime had before ONNX did, with other attributes.
_FORMER = {
    "MeanVarianceNormalization": dict.fromkeys(
        ("across_channels", "normalize_variance"), onnx.AttributeProto.INT
    )
}
_OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional
_SINGLE = onnx.defs.OpSchema.FormalParameterOption.Single
# The field of an attribute that holds its value, by the attribute's type. Other fields must be empty.
_FIELDS = {
    number: {
        "FLOAT": "f",
        "INT": "i",
        "STRING": "s",
        "TENSOR": "t",
        "GRAPH": "g",
        "SPARSE_TENSOR": "sparse_tensor",
    }.get(name, name.lower())
    for name, number in onnx.AttributeProto.AttributeType.items()
} | {onnx.AttributeProto.TYPE_PROTO: "tp"}
_HEADS = ("kv_num_heads", "num_heads", "q_num_heads")
_AUTO_PADS = frozenset([b"NOTSET", b"SAME_UPPER", b"SAME_LOWER", b"VALID"])
# Attributes that must be 0 or 1, and the numbers that ONNX Runtime takes for 1.
_YES: Mapping[str, Callable[[int], bool]] = {
    **dict.fromkeys(("keepdims", "ceil_mode", "noop_with_empty_axes"), (1).__eq__),
    **dict.fromkeys(("transA", "transB", "count_include_pad", "allowzero", "new_axis"), (0).__ne__),
}
# ONNX's inference uses only the lower 32 bits of a number.
_LARGEST_AXIS = 1 << 12
# Operators that ONNX Runtime checks less than ONNX does.
_LENIENT = frozenset(["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"])
_NOT_VALUES = frozenset(["name", "type", "doc_string", "ref_attr_name"])
_STRING, _INT = onnx.AttributeProto.STRING, onnx.AttributeProto.INT
_REFUSED = (
    onnx.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    IndexError,
    RuntimeError,
    ValueError,
)
_DAMAGED = "the file is damaged, export it again"

_Types = Mapping[str, onnx.TypeProto]
_Consts = Mapping[str, onnx.TensorProto]


def check_nodes(name: str, model: onnx.ModelProto) -> None:
    """Refuse nodes that no runtime accepts. Raises ModelError, which names the node or value.

    These are nodes that lack an operand, attribute or body that their operator needs; nodes with an attribute that is
    of the wrong type or that the operator does not have; nodes with text that is not UTF-8; and nodes with an output
    that another node computes, too. ONNX Runtime makes the same checks when it loads a model, except for the text.
    Operators that ONNX does not define are not checked.
    """
    _check_nodes(name, model.graph, _opsets(model))


def _opsets(model: onnx.ModelProto) -> dict[str, int]:
    return {"": OPSET} | {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}


def _check_nodes(name: str, graph: onnx.GraphProto, opsets: Mapping[str, int]) -> None:
    for value in (*graph.input, *graph.output):
        if not isinstance(value.name, str):
            raise ModelError(f"{name}: a value's name, {value.name!r}, is not UTF-8: {_DAMAGED}")
    # No node can read the values with such names, because a node that does is refused below.
    _drop(graph.value_info, [not isinstance(v.name, str) for v in graph.value_info])
    _drop(graph.initializer, [not isinstance(t.name, str) for t in graph.initializer])
    _drop(graph.sparse_initializer, [not isinstance(t.values.name, str) for t in graph.sparse_initializer])
    makers: dict[str, str | onnx.NodeProto] = {v.name: "an input of the graph" for v in graph.input}
    makers.update((t.name, "an initialiser") for t in graph.initializer)
    makers.update((t.values.name, "an initialiser") for t in graph.sparse_initializer)
    for node in graph.node:
        texts = (node.name, node.op_type, node.domain, *node.input, *node.output)
        wrong = (
            "has a name that is not UTF-8"
            if not all(isinstance(t, str) for t in (*texts, *(a.name for a in node.attribute)))
            else _fault(node, opsets)
        )
        if wrong is not None:
            raise ModelError(f"{name}: {_title(node)} {wrong}: {_DAMAGED}")
        for output in node.output:
            if output and output in makers:
                first = makers[output]
                by = first if isinstance(first, str) else f"node {first.name!r} ({first.op_type})"
                raise ModelError(
                    f"{name}: the name {output!r} is defined twice, by {by} and by node {node.name!r} "
                    f"({node.op_type}): give one of them another name"
                )
            makers[output] = node
        for body in subgraphs(node):
            _check_nodes(name, body, opsets)


def _title(node: onnx.NodeProto) -> str:
    subject = f"node {node.name!r}" if node.name else f"the node that makes {next(iter(node.output), '')!r}"
    return f"{subject} ({node.op_type})"


def _drop(fields: Any, unwanted: Sequence[bool]) -> None:
    """Delete entries of a repeated field, in place."""
    for at in reversed([i for i, drop in enumerate(unwanted) if drop]):
        del fields[at]


@dataclass(frozen=True, slots=True)
class _Definition:
    """An operator's definition as Python objects, because reading ONNX's own objects is slow.

    The last entry of `operands` and of `results` stands for all further ones, too.
    """

    schema: onnx.defs.OpSchema
    domain: str
    since: int  # the opset that introduced this definition
    inputs: tuple[int, int]  # the fewest and the most
    outputs: tuple[int, int]
    operands: tuple[tuple[str, bool], ...]  # names, and whether each is optional
    results: tuple[tuple[str, bool], ...]
    attributes: Mapping[str, int]  # the numbers of their types
    required: tuple[str, ...]  # names of attributes


@lru_cache(maxsize=4096)
def _defined(op: str, domain: str, opset: int) -> _Definition | None:
    """The definition of an operator; None if ONNX does not define it, or not at this opset.

    An operator that is newer than the model's opset gets the definition of the canonical opset.
    """
    for version in (opset, 0 if domain else OPSET):
        try:
            schema = onnx.defs.get_schema(op, version, domain)
        except (onnx.defs.SchemaError, TypeError):
            continue
        attributes = schema.attributes
        return _Definition(
            schema, schema.domain, schema.since_version, (schema.min_input, schema.max_input),
            (schema.min_output, schema.max_output),
            tuple((formal.name, formal.option == _OPTIONAL) for formal in schema.inputs),
            tuple((formal.name, formal.option != _SINGLE) for formal in schema.outputs),
            _FORMER[op]
            if op in _FORMER and schema.since_version > opset
            else {key: _KINDS[attribute.type] for key, attribute in attributes.items()},
            tuple(key for key, attribute in attributes.items() if attribute.required),
        )  # fmt: skip
    return None


def _definition(node: onnx.NodeProto, opsets: Mapping[str, int]) -> _Definition | None:
    domain = "" if node.domain == "ai.onnx" else node.domain
    return _defined(node.op_type, domain, opsets.get(domain, 0))


def _fault(node: onnx.NodeProto, opsets: Mapping[str, int]) -> str | None:
    """A description of what is wrong with a node of an operator that ONNX defines, or None."""
    definition = _definition(node, opsets)
    if definition is None:
        return None
    if node.op_type == "Constant" and not definition.domain and not _one_value(node):
        return "has no value"
    if node.op_type not in _FORMER and (
        definition.since > opsets.get(definition.domain, 0) or node.op_type == "LayerNormalization"
    ):
        # ONNX Runtime has its own definition of this operator, which accepts any attribute.
        _drop(node.attribute, [a.name not in definition.attributes for a in node.attribute])
    _drop_unset(node)
    for what, count, (minimum, maximum) in (
        ("inputs", len(node.input), definition.inputs), ("outputs", len(node.output), definition.outputs),
    ):  # fmt: skip
        if not minimum <= count <= maximum:
            return f"has {count} {what} and needs {_range(minimum, maximum)}"
    for at, value in enumerate(node.input):
        if not value:
            name, optional = definition.operands[min(at, len(definition.operands) - 1)]
            if not optional:
                return f"lacks its operand {name!r}"
    for value, (name, optional) in zip(node.output, definition.results):
        if not value and not optional:
            return f"lacks a name for its output {name!r}"
    return _fault_of_attributes(node, definition) or (
        None if definition.domain else _fault_of_values(node, opsets.get("", 0))
    )


def _one_value(node: onnx.NodeProto) -> bool:
    """Remove all attributes of a Constant but the first, in place: ONNX Runtime reads only that one. Returns whether it
    is a value.
    """
    del node.input[:], node.attribute[1:]
    for value in node.attribute:
        fields = [f.name for f, _ in value.ListFields() if f.name not in ("type", _FIELDS.get(value.type))]
        for name in fields:
            value.ClearField(name)
        value.name = _CONSTANT.get(value.type, "")
        field = _FIELDS.get(value.type)
        if field in ("i", "f", "s") and not value.HasField(field):  # a field that is not set stands for 0
            setattr(value, field, getattr(value, field))
    return bool(node.attribute and node.attribute[0].name)


def _drop_unset(node: onnx.NodeProto) -> None:
    """Remove numbers of heads that are not positive, in place. They mean the default, but inference would divide by
    them.
    """
    _drop(node.attribute, [a.name in _HEADS and a.type == _INT and a.i < 1 for a in node.attribute])


def _fault_of_attributes(node: onnx.NodeProto, definition: _Definition) -> str | None:
    # Without a text, ONNX Runtime assumes NOTSET, the default; ONNX's inference does not.
    if "auto_pad" in definition.attributes:
        _drop(
            node.attribute, [a.name == "auto_pad" and a.type == _STRING and not a.s for a in node.attribute]
        )
    kinds = onnx.AttributeProto.AttributeType
    names: set[str] = set()
    for attribute in node.attribute:
        if attribute.name in _YES and attribute.HasField("i"):
            attribute.i = int(_YES[attribute.name](attribute.i))
        key, expected = attribute.name, definition.attributes.get(attribute.name)
        if key in names:
            return f"has the attribute {key!r} twice"
        names.add(key)
        if expected is None:
            if key.startswith("__"):  # private notes of a runtime, which need not have a type
                continue
            return f"has the attribute {key!r}, which {node.op_type} does not have"
        if attribute.type != expected:
            return (
                f"has the attribute {key!r} of type {kinds.Name(attribute.type)}, not {kinds.Name(expected)}"
            )
        if any(f.name not in _NOT_VALUES and f.name != _FIELDS[expected] for f, _ in attribute.ListFields()):
            return f"has the attribute {key!r} with a value that is not of type {kinds.Name(expected)}"
        numbers = [attribute.i] if expected == _INT else attribute.ints
        if key in _COUNTS and min(numbers, default=1) < 1:
            return f"has the attribute {key!r} below 1"
        if key in ("axis", "axes") and max(map(abs, numbers), default=0) > _LARGEST_AXIS:
            return f"has the attribute {key!r} of {attribute.i or list(attribute.ints)}, and no tensor has so many axes"
        if key == "auto_pad" and attribute.s not in _AUTO_PADS:
            return f"has the attribute 'auto_pad' of {attribute.s!r}"
    return next((f"lacks {key!r}" for key in definition.required if key not in names), None)


def _fault_of_values(node: onnx.NodeProto, opset: int) -> str | None:
    """A description of what is wrong with the attributes' values, or None."""
    if node.op_type not in ("Transpose", "If", "Loop", "Scan"):
        return None
    attributes = {a.name: a for a in node.attribute}
    if node.op_type == "Transpose" and "perm" in attributes:
        perm = list(attributes["perm"].ints)
        if sorted(perm) != list(range(len(perm))):
            return f"has {perm} for a permutation"
    return _fault_of_body(node, attributes, opset)


def _fault_of_body(
    node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto], opset: int
) -> str | None:
    """A description of what is wrong with the bodies of an If, Loop or Scan (their numbers of inputs or outputs), or
    None.
    """
    outputs = len(node.output)
    if node.op_type == "If":
        for key in ("then_branch", "else_branch"):
            if len(attributes[key].g.output) < outputs or attributes[key].g.input:
                return f"has {outputs} outputs, {len(attributes[key].g.output)} in {key!r}, and inputs there none"
        return None
    if node.op_type not in ("Loop", "Scan"):
        return None
    body = attributes["body"].g
    inputs = len(node.input)
    if node.op_type == "Loop":
        states, more = inputs - 2, 1  # the body computes the condition, too
    else:
        inputs -= opset < 9  # in old opsets the first input had the lengths of the sequences in a batch
        states, more = inputs - attributes["num_scan_inputs"].i, 0
    if states < 0:
        return f"has {inputs} inputs, too few for what it scans"
    if len(body.input) != inputs:
        return f"has {inputs} inputs, and its body {len(body.input)}"
    if len(body.output) < more + max(states, outputs):
        return f"has {outputs} outputs, and its body {len(body.output)}"
    return None


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"at least {low}" if high > 1 << 20 else f"{low} to {high}"


def check_types(name: str, model: onnx.ModelProto) -> tuple[str, ...]:
    """Refuse nodes whose operands do not fit their operator: element types, ranks, axes, sizes. Returns notes.

    A node that ONNX's inference refuses is also refused by ONNX Runtime when it loads the model. Only the types of
    inputs and constants are believed, and types inferred from these. Shapes that the file declares for outputs of
    operators that ONNX does not define are believed unless they contradict the types inferred; then they are removed,
    in place, with a note. Raises ModelError, which names the node.
    """
    bare = _bare(model)
    wrong = _contradiction(bare)
    if wrong is None:
        return ()
    opaque = {o for node in model.graph.node if not declared.is_defined(node) for o in node.output}
    claims = [v for v in model.graph.value_info if v.name in opaque and v.type.tensor_type.HasField("shape")]
    if claims:
        for value in claims:
            value.type.tensor_type.ClearField("shape")
        doubted, wrong = wrong, _contradiction(_bare(model))
        if wrong is None:
            return (f"what the model declares of its values is not believed: {doubted}",)
    raise ModelError(f"{name}: {wrong}: {_DAMAGED}")


def _bare(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model without those declarations that may be wrong."""
    bare = declared.forget(model, loops=True)
    without_claims(bare.graph)
    inputs = {v.name for v in bare.graph.input}  # inference would use these inputs' defaults
    _drop(bare.graph.initializer, [t.name in inputs for t in bare.graph.initializer])
    return bare


def _contradiction(bare: onnx.ModelProto) -> str | None:
    """The first node of a model that ONNX's inference refuses, with the reason; None if it refuses none."""
    try:
        typed = infer_shapes(bare, check_type=True, strict_mode=True)
    except _REFUSED:  # inference also fails if the types of some values are unknown
        typed = _leniently_typed(bare)
    else:
        if all(map(declared.is_defined, all_nodes(bare.graph))):
            return None  # with undefined operators, inference does not report all errors
    return _first_refused(typed, typed.graph, {}, {})


def _leniently_typed(bare: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return infer_shapes(bare)
    except _REFUSED:
        return bare


def _first_refused(
    model: onnx.ModelProto, graph: onnx.GraphProto, types: _Types, consts: _Consts
) -> str | None:
    """As `_contradiction`, for a graph with inferred types. `types` and `consts` are those of the graphs around it."""
    formals = {v.name for v in graph.input}
    types = {**types, **{v.name: v.type for v in (*graph.value_info, *graph.output, *graph.input)}}
    types.update((t.name, onnx.helper.make_tensor_type_proto(t.data_type, t.dims)) for t in graph.initializer)
    own = {t.name: t for t in graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            own[node.output[0]] = node.attribute[0].t
    consts = {**{k: v for k, v in consts.items() if k not in formals}, **own}
    opsets = _opsets(model)
    for node in graph.node:
        for body in subgraphs(node):
            if (wrong := _first_refused(model, body, types, consts)) is not None:
                return wrong
            for output, value in zip(node.output, body.output[node.op_type == "Loop" :]):
                if _differ(value.type, types.get(output)):
                    return f"{output!r} is declared {_describe(types[output])} and is {_describe(value.type)}"
        definition = _definition(node, opsets)
        reads = [n for n in node.input if n]
        typed = all(n in types and types[n].WhichOneof("value") for n in reads)
        if definition is None or not typed or node.op_type in _LENIENT or any(True for _ in subgraphs(node)):
            continue
        if node.op_type in _FORMER and definition.since > opsets.get(definition.domain, 0):
            continue
        try:
            inferred = onnx.shape_inference.infer_node_outputs(
                definition.schema,
                node,
                {n: types[n] for n in reads},
                {n: consts[n] for n in reads if n in consts},
                opset_imports=model.opset_import,
                ir_version=model.ir_version,
            )
        except _REFUSED as error:
            operands = ", ".join(_describe(types[n]) if n else "nothing" for n in node.input)
            reason = str(error).removeprefix("[ShapeInferenceError] ").removeprefix("[TypeInferenceError] ")
            return f"{_title(node)} does not fit its operands ({operands}): {reason.rstrip('.')}"
        for output, type in inferred.items():
            if _differ(type, types.get(output)):
                return f"{output!r} is declared {_describe(types[output])} and is {_describe(type)}"
    return None


def _differ(a: onnx.TypeProto, b: onnx.TypeProto | None) -> bool:
    """Whether two types have different element types."""
    if b is None:
        return False
    first, second = a.tensor_type.elem_type, b.tensor_type.elem_type
    return bool(first and second and first != second)


def _describe(type: onnx.TypeProto) -> str:
    try:
        return str(type_of_proto(type))
    except ValueError:
        return f"element type {type.tensor_type.elem_type}"
