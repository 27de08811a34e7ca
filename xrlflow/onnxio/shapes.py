"""Numbers for a model's dynamic dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
import onnx.shape_inference

from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.protos import subgraphs

_Shape = onnx.TensorShapeProto


def bind(name: str, proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """What `shapes` say about the symbols of the inputs' dimensions.

    Nameless dimensions of the inputs in question get a symbol ("input.0"), in place. Raises ModelError if an
    input is unknown, or ranks or numbers contradict each other.
    """
    inputs = {v.name: v for v in proto.graph.input}
    bindings: dict[str, int] = {}
    for key, given in shapes.items():
        if key not in inputs:
            raise ModelError(
                f"{name}: there is no input {key!r} to give a shape to: the inputs are {', '.join(inputs)}"
            )
        if any(d < 1 for d in given):
            raise ModelError(
                f"{name}: the shape {_show(given)} of input {key!r} must hold positive numbers only"
            )
        kind = inputs[key].type
        if not kind.HasField("tensor_type"):
            raise ModelError(f"{name}: input {key!r} is not a tensor and takes no shape")
        if not kind.tensor_type.HasField("shape"):
            kind.tensor_type.shape.CopyFrom(_Shape(dim=[_Shape.Dimension() for _ in given]))
        dims = kind.tensor_type.shape.dim
        if len(dims) != len(given):
            raise ModelError(
                f"{name}: input {key!r} has {len(dims)} dimensions ({_describe(dims)}), "
                f"the shape {_show(given)} has {len(given)}"
            )
        for axis, (dim, number) in enumerate(zip(dims, given)):
            if dim.HasField("dim_value"):
                if dim.dim_value != number:
                    raise ModelError(
                        f"{name}: dimension {axis} of input {key!r} is {dim.dim_value} in the model, "
                        f"the shape {_show(given)} says {number}"
                    )
                continue
            if not dim.dim_param:
                dim.dim_param = f"{key}.{axis}"
            if bindings.setdefault(dim.dim_param, number) != number:
                raise ModelError(
                    f"{name}: the shapes contradict each other: dimension {dim.dim_param!r} would be "
                    f"{bindings[dim.dim_param]} and {number} (input {key!r})"
                )
    return bindings


def fix(proto: onnx.ModelProto, bindings: Mapping[str, int]) -> None:
    """Write the numbers in place of the symbols, everywhere in the model."""
    for type in _types(proto.graph):
        for dim in type.tensor_type.shape.dim:
            if dim.dim_param in bindings:
                dim.dim_value = bindings[dim.dim_param]


def solve(typed: onnx.ModelProto, bindings: Mapping[str, int]) -> dict[str, int]:
    """Numbers for further symbols, those that ONNX's inference made up for computed dimensions included."""
    bound = onnx.ModelProto()
    bound.CopyFrom(typed)
    del bound.graph.value_info[:]
    fix(bound, bindings)
    numeric = onnx.shape_inference.infer_shapes(bound, data_prop=True)
    numbers = {v.name: v.type for v in (*numeric.graph.value_info, *numeric.graph.output)}
    found: dict[str, int] = {}
    for value in (*typed.graph.value_info, *typed.graph.output):
        other = numbers.get(value.name)
        if other is None or len(other.tensor_type.shape.dim) != len(value.type.tensor_type.shape.dim):
            continue
        for dim, number in zip(value.type.tensor_type.shape.dim, other.tensor_type.shape.dim):
            if dim.dim_param and number.HasField("dim_value"):
                found.setdefault(dim.dim_param, number.dim_value)
    return found


def _types(graph: onnx.GraphProto) -> Iterator[onnx.TypeProto]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.HasField("tensor_type"):
            yield value.type
    for node in graph.node:
        for body in subgraphs(node):
            yield from _types(body)


def _show(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


def _describe(dims: Sequence[_Shape.Dimension]) -> str:
    return ",".join(d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?") for d in dims)
