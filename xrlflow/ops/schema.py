"""What ONNX defines about its operators: schemas, default attributes, and properties that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import onnx
import onnx.defs

from xrlflow.ir import Attr, Attrs, DType, TensorType

# The canonical opset. ONNX Runtime 1.31 reads up to 26, and 23 is the newest that all its kernels support.
OPSET = 23
IR_VERSION = 11

COMMUTATIVE = frozenset(
    [
        "Add",
        "Mul",
        "And",
        "Or",
        "Xor",
        "Equal",
        "BitwiseAnd",
        "BitwiseOr",
        "BitwiseXor",
        "Max",
        "Min",
        "Sum",
        "Mean",
    ],
)

# Operators that are never merged, duplicated or evaluated before run time.
_RANDOM = frozenset(
    [
        "RandomNormal",
        "RandomUniform",
        "RandomNormalLike",
        "RandomUniformLike",
        "Bernoulli",
        "Multinomial",
        "Dropout",
    ]
)
_CONTROL_FLOW = frozenset(["If", "Loop", "Scan", "SequenceMap"])
# Operators that are deterministic, but not folded: folding would make the file much larger, lose the integer kernels,
# or take very long for a small file.
_NOT_FOLDED = frozenset(
    [
        "DequantizeLinear",
        "QuantizeLinear",
        "RegexFullMatch",
        "StringConcat",
        "StringNormalizer",
        "StringSplit",
    ]
)


LATER = "ai.onnx@"
"""The domain of operators whose definition differs from the canonical opset's. Their opset follows it."""

_OPAQUE = f"{LATER}0::"


def opaque(op: str) -> str:
    """A name for the operator of a node that would fail if it ran. No rule matches this name."""
    return op if "::" in op else f"{_OPAQUE}{op}"


def is_opaque(op: str) -> bool:
    """Whether `opaque` has made this name."""
    return op.startswith(_OPAQUE)


def split_op(op: str) -> tuple[str, str]:
    """The domain and the name of an operator, from its name in the IR."""
    domain, _, name = op.rpartition("::")
    return domain, name


def later(op: str) -> tuple[str, int] | None:
    """The name of an operator that only an opset after the canonical one defines, and that opset; None for any other.

    Such an operator is called ai.onnx@24::Swish.
    """
    domain, name = split_op(op)
    version = domain.removeprefix(LATER) if domain.startswith(LATER) else ""
    return (name, int(version)) if version.isdecimal() and int(version) > OPSET else None


def plain_name(op: str) -> str:
    """The name of an operator, without the opset that is the first to define it."""
    late = later(op)
    return op if late is None else late[0]


@cache
def schema(op: str) -> onnx.defs.OpSchema | None:
    """The operator's definition at the canonical opset; None if ONNX does not define it at that opset."""
    domain, name = split_op(op)
    if domain not in ("", "ai.onnx", "ai.onnx.ml") or not onnx.defs.has(name, domain):
        return None
    version = OPSET if domain in ("", "ai.onnx") else onnx.defs.onnx_opset_version()
    try:
        return onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:  # only defined in a later opset
        return None


@cache
def is_deterministic(op: str) -> bool:
    """Whether equal inputs give equal outputs.

    False for operators that ONNX does not define, and for control flow, whose bodies are not inspected.
    """
    return schema(op) is not None and op not in _RANDOM and op not in _CONTROL_FLOW


@cache
def is_foldable(op: str) -> bool:
    """Whether a node with this operator and only constant inputs is a constant."""
    return is_deterministic(op) and op not in _NOT_FOLDED and split_op(op)[0] == ""


@cache
def defaults(op: str) -> Mapping[str, Attr]:
    """The default attributes that the operator's schema states."""
    definition = schema(op)
    if definition is None:
        return {}
    out: dict[str, Attr] = {}
    for name, attribute in definition.attributes.items():
        value = attribute.default_value
        if value.type == onnx.AttributeProto.INT:
            out[name] = value.i
        elif value.type == onnx.AttributeProto.FLOAT:
            out[name] = value.f
        elif value.type == onnx.AttributeProto.STRING:
            out[name] = value.s.decode()
        elif value.type == onnx.AttributeProto.INTS:
            out[name] = tuple(value.ints)
        elif value.type == onnx.AttributeProto.FLOATS:
            out[name] = tuple(value.floats)
        elif value.type == onnx.AttributeProto.STRINGS:
            out[name] = tuple(s.decode() for s in value.strings)
    return out


_WINDOWED = frozenset(
    {"Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool", "ConvInteger", "QLinearConv"}
)
_WEIGHTED = {"Conv": 1, "ConvTranspose": 1, "ConvInteger": 1, "QLinearConv": 3}


# Operators whose `axis` refers to the dimensions of the first input (or of the output, which has one dimension more).
_AXIS = frozenset(
    ("ArgMax", "ArgMin", "Concat", "Flatten", "Gather", "GatherElements", "Hardmax", "LayerNormalization")
    + ("LogSoftmax", "RMSNormalization", "ScatterElements", "Softmax", "Split", "TopK")
)


# The types for which a Cast's `saturate` means something: those of 4 and 8 bits.
_SATURATING = frozenset(range(int(DType.FLOAT8E4M3FN), int(DType.FLOAT8E8M0) + 1))


def canonical_attrs(op: str, attrs: Mapping[str, Attr], inputs: Sequence[TensorType | None]) -> Attrs:
    """Attributes in canonical form, as rules see them: without those that equal a default.

    Also left out are defaults that the specification states but no schema has: strides and dilations of 1, pads of 0,
    `auto_pad` VALID, a convolution's `kernel_shape` that repeats its weight's shape, the reversing permutation of a
    Transpose; and a Cast's `saturate` where ONNX gives it no meaning, and ONNX Runtime refuses it. An `axis` counts
    from the front if the rank is known.
    """
    if not attrs:
        return Attrs()
    default = defaults(op)
    out = dict(attrs)
    if op in _AXIS and "axis" in out and inputs and inputs[0] is not None and inputs[0].rank:
        rank = inputs[0].rank
        standard = default.get("axis")
        axis = out["axis"]
        if isinstance(axis, int) and -rank <= axis < 0:
            axis = out["axis"] = axis + rank
        if isinstance(standard, int) and axis == (standard + rank if standard < 0 else standard):
            del out["axis"]
    out = {k: v for k, v in out.items() if not (k in default and default[k] == v)}
    if op in _WINDOWED:
        for name, neutral in (("strides", 1), ("dilations", 1), ("pads", 0), ("output_padding", 0)):
            value = out.get(name)
            if isinstance(value, tuple) and all(v == neutral for v in value):
                del out[name]
        if out.get("auto_pad") == "VALID":
            del out["auto_pad"]
        if op in _WEIGHTED and "kernel_shape" in out and len(inputs) > _WEIGHTED[op]:
            weight = inputs[_WEIGHTED[op]]
            if weight is not None and weight.shape is not None and weight.shape[2:] == out["kernel_shape"]:
                del out["kernel_shape"]
    elif op == "Transpose":
        perm = out.get("perm")
        if isinstance(perm, tuple) and perm == tuple(range(len(perm)))[::-1]:
            del out["perm"]
    elif op == "Cast" and out.get("to") not in _SATURATING:
        out.pop("saturate", None)
    return Attrs(out)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The element types that an input admits, as ONNX writes them. If `alike`, all inputs of one `name` have the same
    type.
    """

    name: str
    types: frozenset[str]
    alike: bool


@cache
def admitted(op: str) -> tuple[Admitted, ...]:
    """For each input of an operator the element types that it admits. The last entry also stands for all further
    inputs. Empty without a schema.
    """
    definition = schema(op)
    if definition is None:
        return ()
    allowed = {c.type_param_str: frozenset(c.allowed_type_strs) for c in definition.type_constraints}
    operands = []
    for formal in definition.inputs:
        types = allowed.get(formal.type_str)
        named = frozenset({formal.type_str})
        operands.append(Admitted(formal.type_str, types or named, bool(types) and formal.is_homogeneous))
    return tuple(operands)


@cache
def output_is_optional(op: str, index: int) -> bool:
    """Whether an output that nobody reads may be left without a name."""
    definition = schema(op)
    if definition is None or index >= len(definition.outputs):
        return False
    return bool(definition.outputs[index].option == onnx.defs.OpSchema.FormalParameterOption.Optional)
