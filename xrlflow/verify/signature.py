"""The signature of a model, on which its callers rely: names, types, ranks and dimensions of its inputs and outputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from xrlflow.ir import DType, TensorType
from xrlflow.ops.infer import type_of_proto
from xrlflow.verify.errors import VerificationError
from xrlflow.verify.runner import Model, first_line


@dataclass(frozen=True, slots=True)
class Port:
    """One declared input or output. `default`: whether it is an input that a caller may omit."""

    name: str
    type: TensorType
    default: bool = False

    @property
    def shown(self) -> str:
        return f"{self.name}: {describe(self.type)}"


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs in order. `constant_defaults`: whether callers cannot override defaults (IR version below
    4)."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    constant_defaults: bool

    @property
    def required(self) -> tuple[Port, ...]:
        return tuple(port for port in self.inputs if not port.default)


def signature(model: Model) -> Signature:
    """The signature as the file declares it. Raises VerificationError if the file cannot be read."""
    try:
        if isinstance(model, onnx.ModelProto):
            proto = model
        elif isinstance(model, bytes):
            proto = onnx.load_model_from_string(model)
        else:
            proto = onnx.load_model(os.fspath(model), load_external_data=False)
    except (OSError, ValueError, DecodeError) as error:
        name = "the model" if isinstance(model, (bytes, onnx.ModelProto)) else os.fspath(model)
        raise VerificationError(f"{name} cannot be read: {first_line(error)}") from error
    return signature_of_proto(proto, ())


def signature_of_proto(proto: onnx.ModelProto, defaults: Iterable[str]) -> Signature:
    """The signature of a model whose initialisers may be missing: `defaults` names the inputs that have one."""
    graph = proto.graph
    required = (
        set(defaults)
        | {t.name for t in graph.initializer}
        | {t.values.name for t in graph.sparse_initializer}
    )
    return Signature(
        tuple(Port(v.name, type_of_proto(v.type), v.name in required) for v in graph.input),
        tuple(Port(v.name, type_of_proto(v.type)) for v in graph.output),
        proto.ir_version < 4,
    )


def differences(original: Signature, new: Signature, fixed: Mapping[str, int] = {}) -> tuple[str, ...]:
    """The differences between the declarations that a caller would notice; empty if there are none.

    Names, order, element types, ranks, and numbers and symbols of dimensions must be equal. `fixed`: symbols of the
    original that were replaced by numbers on purpose. Inputs with a default that cannot be overridden (IR version below
    4) may be missing.
    """
    expected = original.inputs
    if original.constant_defaults:
        names = {port.name for port in new.inputs}
        expected = tuple(port for port in expected if not port.default or port.name in names)
    return (
        *_compare("input", expected, new.inputs, fixed, not original.constant_defaults),
        *_compare("output", original.outputs, new.outputs, fixed, False),
    )


def _compare(
    what: str, expected: Sequence[Port], actual: Sequence[Port], fixed: Mapping[str, int], defaults: bool
) -> Iterable[str]:
    names, actual_names = [p.name for p in expected], [p.name for p in actual]
    if names != actual_names:
        if sorted(names) == sorted(actual_names):
            yield f"the {what}s are in another order: {', '.join(actual_names)} instead of {', '.join(names)}"
            return
        for name in sorted(set(names) - set(actual_names)):
            yield f"{what} {name!r} is missing"
        for name in sorted(set(actual_names) - set(names)):
            yield f"{what} {name!r} is new"
        return
    for a, b in zip(expected, actual):
        if bound(a.type, fixed) != bound(b.type, fixed):
            yield f"{what} {a.name!r} is declared {describe(b.type)}, was {describe(a.type)}"
        elif defaults and a.default != b.default:
            yield f"{what} {a.name!r} {'lost its' if a.default else 'got a'} default"


def bound(type: TensorType, numbers: Mapping[str, int]) -> TensorType:
    """The type with symbols replaced by numbers."""
    if type.shape is None or not numbers:
        return type
    shape = tuple(numbers.get(d, d) if isinstance(d, str) else d for d in type.shape)
    return TensorType(type.dtype, shape, type.const, type.other)


def describe(type: TensorType) -> str:
    """A type for messages: "float[batch,3]", "seq(tensor(float))"."""
    if type.dtype != DType.UNDEFINED:
        return repr(type.as_const(False))
    if type.other is None:
        return "a value of unknown type"
    return _describe(onnx.TypeProto.FromString(type.other))


def _describe(proto: onnx.TypeProto) -> str:
    if proto.HasField("tensor_type"):
        return describe(type_of_proto(proto))
    if proto.HasField("sequence_type"):
        return f"a sequence of {_describe(proto.sequence_type.elem_type)}"
    if proto.HasField("optional_type"):
        return f"an optional {_describe(proto.optional_type.elem_type)}"
    if proto.HasField("map_type"):
        key = DType(proto.map_type.key_type).name.lower()
        return f"a map from {key} to {_describe(proto.map_type.value_type)}"
    return "a sparse tensor" if proto.HasField("sparse_tensor_type") else "a value of unknown type"
