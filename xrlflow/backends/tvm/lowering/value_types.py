"""The types of a model's values, as ONNX infers them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import ModelProto, NodeProto, TypeProto

from xrlflow.backends.protocol import USE_ONNXRUNTIME, BackendError
from xrlflow.onnxio.inference import infer_shapes

# Types of elements on which TVM computes. For other types, TVM's casts return other numbers than ONNX's casts, or fail.
_SUPPORTED = frozenset(
    onnx.TensorProto.DataType.Value(name)
    for name in (
        "FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16",
        "UINT32", "UINT64", "UNDEFINED",
    )
)  # fmt: skip
_WINDOWS = frozenset({"auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides"})
# Initialisers with more elements than this are not read to infer sizes.
_SMALL = 1024


def types_of(model: ModelProto, sizes: Mapping[str, Sequence[int]]) -> dict[str, TypeProto]:
    """The types of all values of a model whose inputs have these sizes, as far as ONNX infers them.

    Results of some pools with ceil_mode get no sizes: ONNX's inference counts a window that begins in the padding,
    while runtimes and the specification do not count it.
    """
    light = ModelProto(ir_version=model.ir_version)
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = "types"
    graph.node.extend(model.graph.node)
    graph.output.extend(model.graph.output)
    for value in model.graph.input:
        added = graph.input.add(name=value.name, type=value.type)
        if value.name in sizes:
            shape = added.type.tensor_type.shape
            del shape.dim[:]
            for size in sizes[value.name]:
                shape.dim.add(dim_value=size)
    for value in graph.output:  # the file may declare other sizes
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    types = {}
    for tensor in model.graph.initializer:
        kind = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        types[tensor.name] = kind
        if len(tensor.dims) <= 1 and (not tensor.dims or tensor.dims[0] <= _SMALL):
            graph.initializer.append(tensor)
        else:
            graph.input.add(name=tensor.name, type=kind)
    pools = [n for n in graph.node if _may_begin_in_padding(n)]
    if pools:
        first = {v.name: v.type for v in _values(infer_shapes(light).graph)}
        for node in pools:
            graph.node.remove(node)
            for name in filter(None, node.output):
                inferred_type = first.get(name)
                if inferred_type is not None:
                    kind = onnx.helper.make_tensor_type_proto(inferred_type.tensor_type.elem_type, None)
                    types[name] = kind
                    graph.input.add(name=name, type=kind)
    inferred = infer_shapes(light, data_prop=True).graph
    types.update((value.name, value.type) for value in _values(inferred))
    return types


def _may_begin_in_padding(node: NodeProto) -> bool:
    """Whether the last window of a pool with ceil_mode may begin behind the image. It does not if nothing is padded
    there and no stride is larger than a window."""
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.name in _WINDOWS}
    if not attributes.get("ceil_mode") or "kernel_shape" not in attributes:
        return bool(attributes.get("ceil_mode"))
    taps = attributes["kernel_shape"]
    ones = [1] * len(taps)
    spans = [(n - 1) * by + 1 for n, by in zip(taps, attributes.get("dilations", ones))]
    padded = (
        any(attributes.get("pads", [])[len(taps) :]) or attributes.get("auto_pad", b"NOTSET") != b"NOTSET"
    )
    return padded or any(s > span for s, span in zip(attributes.get("strides", ones), spans))


def _values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from (*graph.input, *graph.output, *graph.value_info)


def check_types(types: Mapping[str, TypeProto]) -> None:
    """Raise BackendError for a tensor whose elements have a type on which TVM does not compute."""
    for name, kind in types.items():
        if kind.HasField("tensor_type") and kind.tensor_type.elem_type not in _SUPPORTED:
            element = onnx.TensorProto.DataType.Name(kind.tensor_type.elem_type)
            raise BackendError(f"TVM cannot lower {name}, a tensor of {element}", USE_ONNXRUNTIME)


def disagreement(kind: TypeProto, dtype: str, shape: Sequence[int] | None) -> str | None:
    """How a tensor of this type and shape (None: unknown) differs from the declared type `kind`; None if it does not
    differ."""
    tensor = kind.tensor_type
    if not kind.HasField("tensor_type") or not tensor.elem_type:
        return None
    declared = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    if dtype != declared:
        return f"{dtype} in the place of {declared}"
    dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
    if not tensor.HasField("shape") or shape is None:
        return None
    if len(dims) == len(shape) and all(d in (None, n) for d, n in zip(dims, shape)):
        return None
    return f"{list(shape)} in the place of {dims}".replace("None", "?")
