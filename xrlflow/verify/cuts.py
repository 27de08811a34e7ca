"""Copies of a model that have its quantised tensors as outputs, or that are cut at these tensors.

A cut copy also has the quantised tensors as inputs, and computes each of them from the inputs that replace the tensors
before it. ONNX Runtime still fuses the operators between two quantised tensors: DequantizeLinear, Conv, QuantizeLinear
become one operator as in the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import onnx
import onnx.helper
import onnx.numpy_helper

from xrlflow.ir import DType
from xrlflow.onnxio import protos
from xrlflow.verify.inputs import perturbed
from xrlflow.verify.runner import Model

GIVEN = ".given"
"""The suffix, after the name of a quantised tensor, of the input that replaces it in a copy that is cut."""

_MICROSOFT = "com.microsoft"
# The size limit of a ModelProto.
_MOST_BYTES = 2_000_000_000


class Uncut(ValueError):
    """A model that cannot be copied."""


def as_proto(model: Model) -> onnx.ModelProto:
    """The model with its weights. Raises Uncut if one ModelProto cannot hold them."""
    if isinstance(model, onnx.ModelProto):
        return model
    if isinstance(model, bytes):
        parsed: onnx.ModelProto = onnx.ModelProto.FromString(model)
        return parsed
    path = os.fspath(model)
    proto = onnx.load(path, load_external_data=False)
    outside = [t for t in protos.all_tensors(proto) if t.data_location == onnx.TensorProto.EXTERNAL]
    size = os.path.getsize(path)
    for name in {e.value for t in outside for e in t.external_data if e.key == "location"}:
        size += os.path.getsize(os.path.join(os.path.dirname(path), name))
    if size > _MOST_BYTES:
        raise Uncut("it is over 2 GB")
    return onnx.load(path) if outside else proto


def decomposed(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with each DynamicQuantizeMatMul as DynamicQuantizeLinear and MatMulIntegerToFloat, which compute the
    same and show the quantised numbers. The model itself if it has no such node."""
    fused = [n for n in proto.graph.node if (n.domain, n.op_type) == (_MICROSOFT, "DynamicQuantizeMatMul")]
    if not fused:
        return proto
    out = onnx.ModelProto()
    out.CopyFrom(proto)
    nodes: list[onnx.NodeProto] = []
    for node in out.graph.node:
        if (node.domain, node.op_type) != (_MICROSOFT, "DynamicQuantizeMatMul"):
            nodes.append(node)
            continue
        a, b, scale, zero, bias = [*node.input, "", ""][:5]
        names = [f"{a}.{part}" for part in ("quantised", "scale", "zero")]
        if not any(names[0] in n.output for n in nodes):
            nodes.append(onnx.helper.make_node("DynamicQuantizeLinear", [a], names))
        inputs = [names[0], b, names[1], scale, names[2], zero, bias]
        nodes.append(
            onnx.helper.make_node("MatMulIntegerToFloat", inputs, [node.output[0]], domain=_MICROSOFT)
        )
    del out.graph.node[:]
    out.graph.node.extend(nodes)
    return out


def twins(proto: onnx.ModelProto) -> Mapping[str, str]:
    """For each value of the main graph, the first value that the same operators compute from the same inputs."""
    first: dict[bytes, str] = {}
    firsts: dict[str, str] = {}
    for tensor in proto.graph.initializer:
        bare = onnx.TensorProto()
        bare.CopyFrom(tensor)
        bare.ClearField("name")
        key = blake2b(bare.SerializeToString(deterministic=True)).digest()
        firsts[tensor.name] = first.setdefault(key, tensor.name)
    for node in proto.graph.node:
        if any(True for _ in protos.subgraphs(node)):
            continue
        parts = [node.domain, node.op_type, *(firsts.get(name, name) for name in node.input), ""]
        attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        content = "\0".join(parts).encode("utf-8", "surrogateescape") + b"".join(attributes)
        for at, name in enumerate(node.output):
            firsts[name] = first.setdefault(blake2b(content + bytes([at % 256])).digest(), name)
    return firsts


def showing(proto: onnx.ModelProto, tensors: Mapping[str, DType], *, cut: bool) -> bytes:
    """A serialised copy whose outputs are those of the model, then those of `tensors` (values of its main graph) that
    are not among them.

    `cut`: the readers of each of `tensors` read an input instead; see the module's docstring.
    """
    out = onnx.ModelProto()
    out.CopyFrom(proto)
    del out.graph.value_info[:]  # they may state sizes that a cut copy does not have
    there = {v.name for v in proto.graph.output}
    out.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, int(dtype), None)
        for name, dtype in tensors.items()
        if name not in there
    )
    if cut:
        same = twins(proto)
        roots = {same.get(name, name): name for name in tensors}
        inputs = {name: roots[root] + GIVEN for name, root in same.items() if root in roots}
        inputs.update({name: name + GIVEN for name in tensors})
        _rename(out.graph.node, inputs)
        out.graph.input.extend(
            onnx.helper.make_tensor_value_info(name + GIVEN, int(dtype), None)
            for name, dtype in tensors.items()
        )
    serialised: bytes = out.SerializeToString()
    return serialised


def perturbed_constants(proto: onnx.ModelProto, seed: int) -> bytes:
    """A copy in which each float of the initialisers is replaced by one of its two neighbouring floats."""
    out = onnx.ModelProto()
    out.CopyFrom(proto)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in out.graph.initializer}
    perturbed_arrays = perturbed(arrays, seed)
    for tensor in out.graph.initializer:
        if arrays[tensor.name].dtype.kind == "f":
            tensor.CopyFrom(onnx.numpy_helper.from_array(perturbed_arrays[tensor.name], tensor.name))
    serialised: bytes = out.SerializeToString()
    return serialised


def _rename(nodes: Sequence[onnx.NodeProto], names: Mapping[str, str]) -> None:
    for node in nodes:
        for at, name in enumerate(node.input):
            if name in names:
                node.input[at] = names[name]
        for body in protos.subgraphs(node):
            _rename(body.node, names)
            for value in body.output:  # a body may return a value of the enclosing graph
                value.name = names.get(value.name, value.name)
