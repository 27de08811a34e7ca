"""Gives names to a model's dynamic dimensions, and finds their sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import onnx

from xrlflow.common.sizes import Range, Shapes, Size, as_range, show_size
from xrlflow.ir import (
    ABSENT,
    Body,
    Const,
    Dim,
    DType,
    Graph,
    Node,
    TensorType,
    TypeConflict,
    Value,
    dims,
    merge_types,
)
from xrlflow.ir.graph import SMALL, ArrayHandle
from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.protos import subgraphs
from xrlflow.ops.evaluate import MISFIT, evaluate_node
from xrlflow.ops.field import NotEvaluable
from xrlflow.ops.infer import InferenceError, infer
from xrlflow.ops.schema import is_foldable, schema
from xrlflow.ops.symbolic_values import evaluate_call
from xrlflow.ops.tensors import numpy_dtype

_Arrays = Sequence[npt.NDArray[Any] | None]
_Shape = onnx.TensorShapeProto


def name_dimensions(proto: onnx.ModelProto) -> None:
    """Give each nameless dimension of an input a symbol ("input.0"), in place. All readers of the input share the
    symbol.

    Two dimensions have the same name only if they have it in the file. Declared sizes of a sequence's elements are
    removed: no runtime checks them, and elements may differ in size.
    """
    shapes = [(v, v.type.tensor_type.shape) for v in proto.graph.input if v.type.HasField("tensor_type")]
    used_names = {dim.dim_param for _, shape in shapes for dim in shape.dim}

    def free(name: str) -> str:
        while name in used_names or dims.is_computed(name) or is_made_up(name):
            name = f"_{name}"
        used_names.add(name)
        return name

    renamed: dict[str, str] = {}
    for value, shape in shapes:
        for axis, dim in enumerate(shape.dim):
            own = dim.dim_param
            if not dim.HasField("dim_value") and not own:
                dim.dim_param = free(f"{value.name}.{axis}")
            elif dims.is_computed(own) or is_made_up(own):  # here such a name has another meaning
                dim.dim_param = renamed[own] if own in renamed else renamed.setdefault(own, free(own))
    for value in proto.graph.input:
        for kind in tensors(value.type) if not value.type.HasField("tensor_type") else ():
            kind.ClearField("shape")


def bind(name: str, proto: onnx.ModelProto, shapes: Shapes) -> tuple[dict[str, int], dict[str, Range]]:
    """The sizes, and the ranges of sizes, of symbols that follow from `shapes`. All dimensions of inputs must have
    names (`name_dimensions`).

    An input of unknown rank gets its dimensions, in place. Raises ModelError if an input is unknown, or if ranks or
    sizes contradict each other.
    """
    inputs = {v.name: v for v in proto.graph.input}
    bound: dict[str, Range] = {}
    for key, shape in shapes.items():
        if key not in inputs:
            raise ModelError(
                f"{name}: there is no input {key!r} to give a shape to: the inputs are {', '.join(inputs)}"
            )
        ranges = [as_range(size) for size in shape]
        if any(not 1 <= low <= high for low, high in ranges):
            raise ModelError(
                f"{name}: the shape {_show(shape)} of input {key!r} must hold positive numbers only"
            )
        kind = inputs[key].type
        if not kind.HasField("tensor_type"):
            raise ModelError(f"{name}: input {key!r} is not a tensor and takes no shape")
        if not kind.tensor_type.HasField("shape"):
            named = [_Shape.Dimension(dim_param=f"{key}.{axis}") for axis in range(len(shape))]
            kind.tensor_type.shape.CopyFrom(_Shape(dim=named))
        dims = kind.tensor_type.shape.dim
        if len(dims) != len(shape):
            raise ModelError(
                f"{name}: input {key!r} has {len(dims)} dimensions ({_describe(dims)}), "
                f"the shape {_show(shape)} has {len(shape)}"
            )
        for axis, (dim, (low, high)) in enumerate(zip(dims, ranges)):
            if dim.HasField("dim_value"):
                if not low <= dim.dim_value <= high:
                    raise ModelError(
                        f"{name}: dimension {axis} of input {key!r} is {dim.dim_value} in the model, "
                        f"the shape {_show(shape)} says {show_size((low, high))}"
                    )
                continue
            if (other := bound.setdefault(dim.dim_param, (low, high))) != (low, high):
                raise ModelError(
                    f"{name}: the shapes contradict each other: dimension {dim.dim_param!r} would be "
                    f"{show_size(other)} and {show_size((low, high))} (input {key!r})"
                )
    numbers = {symbol: low for symbol, (low, high) in bound.items() if low == high}
    return numbers, {symbol: both for symbol, both in bound.items() if symbol not in numbers}


def fix(proto: onnx.ModelProto, bindings: Mapping[str, int], *, outputs: bool = False) -> None:
    """Replace the symbols in inputs by their sizes, in place; in outputs, too, with `outputs`.

    Other values stay as they are: only the file claims that they have the size of an input.
    """
    for value in proto.graph.input:
        if value.type.HasField("tensor_type"):
            shape = value.type.tensor_type.shape
            if not value.type.tensor_type.HasField("shape") and f"{value.name}.0" in bindings:
                rank = next(k for k in count() if f"{value.name}.{k}" not in bindings)
                shape.CopyFrom(_Shape(dim=[_Shape.Dimension() for _ in range(rank)]))
            for axis, dim in enumerate(shape.dim):
                number = bindings.get(f"{value.name}.{axis}")
                if number is not None and not dim.HasField("dim_value") and not dim.dim_param:
                    dim.dim_value = number
                elif dim.dim_param in bindings:
                    dim.dim_value = bindings[dim.dim_param]
    for value in proto.graph.output if outputs else ():
        for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
            if dim.dim_param in bindings:
                dim.dim_value = bindings[dim.dim_param]


def as_declared(
    frame: onnx.ModelProto, named: onnx.ModelProto, bindings: Mapping[str, int]
) -> dict[str, int]:
    """The sizes by the symbols that the file uses for its inputs, given the sizes by the symbols of
    `name_dimensions`.
    """
    sizes = dict(bindings)
    for old, new in zip(frame.graph.input, named.graph.input):
        for a, b in zip(old.type.tensor_type.shape.dim, new.type.tensor_type.shape.dim):
            if a.dim_param and a.dim_param != b.dim_param and b.dim_param in bindings:
                sizes[a.dim_param] = bindings[b.dim_param]
    return sizes


def solve(graph: Graph, bindings: Mapping[str, int]) -> dict[str, int]:
    """The sizes of all dimensions of the graph that follow from `bindings`, and these bindings.

    Formulas are evaluated. Names that ONNX's inference invented have no formula: for them, types are inferred again
    with numbers, and small values that the model computes from sizes (shapes, axes, counts) are evaluated.
    """
    numbers = dict(bindings)
    open_ = dict.fromkeys(_symbolic(graph))
    if any(map(is_made_up, open_)):
        _solve(graph, numbers, {}, {})
    for dim in open_:
        if (value := dims.value(dim, numbers, evaluate_call)) is not None:
            numbers[dim] = value
    return numbers


class DimensionNames:
    """Gives equal computed dimensions the same name.

    Dimensions are formulas in normal form (`xrlflow.ir.dims`, which decides whether two of them are equal at all
    sizes). Of equal formulas the first one is used.
    """

    def __init__(self) -> None:
        self._names: dict[str, Dim] = {}
        self._alike: dict[tuple[int | None, ...], list[Dim]] = {}

    def add(self, type: TensorType) -> None:
        """Use the symbols of an input's type as names."""
        for dim in type.shape or ():
            if isinstance(dim, str):
                self._name(dim)

    def __call__(self, type: TensorType) -> TensorType:
        """The type with its dimensions replaced by their names."""
        if type.shape is None or not any(map(dims.is_computed, type.shape)):
            return type
        shape = tuple(self._name(d) if isinstance(d, str) and dims.is_computed(d) else d for d in type.shape)
        return TensorType(type.dtype, shape, type.const, type.other)

    def _name(self, dim: str) -> Dim:
        name = self._names.get(dim)
        if name is None:
            alike = self._alike.setdefault(dims.fingerprint(dims.formula(dim)), [])
            name = next((candidate for candidate in alike if dims.equal(dim, candidate)), None)
            if name is None:
                name = dim
                alike.append(dim)
            self._names[dim] = name
        return name


def without_claims(graph: onnx.GraphProto) -> None:
    """Give each symbol that a file declares for a computed dimension a name of its own, in place.

    Only the symbols of inputs can be trusted. Runtimes do not check the types of other values, so two dimensions of the
    same name may differ. Types of outputs are removed. Types with which inference starts (of operators that ONNX does
    not define, and of inputs of bodies) get unknown sizes.
    """
    fresh = (f"unk__d{k}" for k in count())
    for value in graph.output:
        _rename(value.type, lambda: "")
    for value in graph.value_info:
        _rename(value.type, lambda: next(fresh))
    for node in graph.node:
        for body in subgraphs(node):
            _without_claims_inside(body, fresh)


def _without_claims_inside(body: onnx.GraphProto, fresh: Iterator[str]) -> None:
    for value in (*body.input, *body.output, *body.value_info):
        _rename(value.type, lambda: next(fresh))
    for node in body.node:
        for inner in subgraphs(node):
            _without_claims_inside(inner, fresh)


def _rename(type: onnx.TypeProto, name: Callable[[], str]) -> None:
    """Rename the symbols of a tensor's dimensions. Symbols of a sequence's elements are removed."""
    if not type.HasField("tensor_type"):
        name = str
    for dim in _dimensions(type):
        if dim.HasField("dim_param"):
            dim.dim_param = name()


def tensors(type: onnx.TypeProto) -> Iterator[onnx.TypeProto.Tensor]:
    """The tensor types in a type: of a tensor, or of the elements of a sequence, optional or map."""
    kind = type.WhichOneof("value")
    if kind == "tensor_type":
        yield type.tensor_type
    elif kind in ("sequence_type", "optional_type"):
        yield from tensors(getattr(type, kind).elem_type)
    elif kind == "map_type":
        yield from tensors(type.map_type.value_type)


def _dimensions(type: onnx.TypeProto) -> Iterator[_Shape.Dimension]:
    return (dim for tensor in tensors(type) for dim in tensor.shape.dim)


def without_names_of_elements(graph: onnx.GraphProto) -> None:
    """Remove the names that ONNX's inference invents for dimensions of a sequence's elements, in place.

    Inference gives the same name to all elements taken from the sequence, although their sizes may differ.
    """
    types = [*_all_types(graph)]
    made_up = {
        dim.dim_param
        for type in types
        if not type.HasField("tensor_type")
        for dim in _dimensions(type)
        if is_made_up(dim.dim_param)
    }
    for type in types:
        for dim in _dimensions(type):
            if dim.dim_param in made_up:
                dim.Clear()


def _symbolic(graph: Graph) -> Iterator[str]:
    """The dimensions, in a graph and its bodies, that are no numbers."""
    for node in graph.nodes():
        yield from (d for t in node.types for d in t.shape or () if isinstance(d, str))
        for body in node.attrs.values():
            if isinstance(body, Body):
                yield from _symbolic(body.graph)


def is_made_up(dim: Dim) -> TypeGuard[str]:
    """Whether ONNX's inference invented this name."""
    return isinstance(dim, str) and (dim.startswith("unk__") or (dims.is_computed(dim) and "unk__" in dim))


def without_computed(type: TensorType) -> TensorType:
    """The type without computed dimensions. A file cannot hold formulas, and inference finds them again."""
    if type.shape is None or not any(isinstance(d, str) for d in type.shape):
        return type
    shape = tuple(None if is_made_up(d) or dims.is_computed(d) else d for d in type.shape)
    return TensorType(type.dtype, shape, type.const, type.other)


def without_symbols(type: TensorType) -> TensorType:
    """The type without symbols, which only the file claims."""
    if type.shape is None or not any(isinstance(d, str) for d in type.shape):
        return type
    shape = tuple(d if isinstance(d, int) else None for d in type.shape)
    return TensorType(type.dtype, shape, type.const, type.other)


def _solve(
    graph: Graph,
    numbers: dict[str, int],
    types: dict[Value, TensorType],
    evaluated: dict[Value, npt.NDArray[Any]],
) -> None:
    """Add sizes to `numbers`. `types` and `evaluated` are the types and small values of the graph's captured inputs."""

    def type_of(value: Value) -> TensorType:
        if value not in types:
            types[value] = _with_numbers(graph.type(value), numbers)
        return types[value]

    def array_of(value: Value) -> npt.NDArray[Any] | None:
        const = graph.const(value)
        return const.array if const is not None else evaluated.get(value)

    for node in graph.topological():
        ins = [None if v == ABSENT else type_of(v) for v in node.inputs]
        arrays = [None if v == ABSENT else array_of(v) for v in node.inputs]
        outer = iter(node.inputs[len(node.explicit_inputs) :])
        for body in node.attrs.values():
            if isinstance(body, Body):
                captured = list(zip(body.captured, outer))
                inside = {i: a for i, v in captured if (a := array_of(v)) is not None}
                _solve(body.graph, numbers, {i: type_of(v) for i, v in captured}, inside)
        for value, type in zip(node.outputs, _inferred(node, ins, arrays)):
            for dim, number in zip(graph.type(value).shape or (), type.shape or ()):
                if isinstance(dim, str) and isinstance(number, int):
                    numbers.setdefault(dim, number)
            with contextlib.suppress(TypeConflict):
                types[value] = merge_types(type_of(value), type)
        evaluated.update(_evaluated(node, [type_of(v) for v in node.outputs], ins, arrays))


def _inferred(node: Node, types: Sequence[TensorType | None], arrays: _Arrays) -> Sequence[TensorType]:
    """The outputs' types, inferred from the inputs' types and small values. If inference fails, the declared types."""
    if schema(node.op) is None or any(isinstance(a, Body) for a in node.attrs.values()):
        return node.types
    data = [None if a is None or t is None else Const(t, ArrayHandle(a), a) for a, t in zip(arrays, types)]
    try:
        return infer(node.op, node.attrs, types, data, len(node.outputs))
    except InferenceError:  # the file that declares these types may know more
        return node.types


def _evaluated(
    node: Node, out_types: Sequence[TensorType], types: Sequence[TensorType | None], arrays: _Arrays
) -> dict[Value, npt.NDArray[Any]]:
    """The outputs of a node, if they are small and all its inputs are evaluated; otherwise an empty mapping."""
    if not is_foldable(node.op) or any(
        t.dtype is DType.UNDEFINED or t.size is None or t.size > SMALL for t in out_types
    ):
        return {}
    if node.op == "Shape":
        dims = types[0].shape if types[0] is not None else None
        start, end = node.attrs.get("start", 0), node.attrs.get("end")
        selected = (
            dims[start if isinstance(start, int) else 0 : end if isinstance(end, int) else None]
            if dims
            else ()
        )
        numbers = [d for d in selected if isinstance(d, int)]
        return (
            {node.outputs[0]: np.array(numbers, np.int64)} if dims and len(numbers) == len(selected) else {}
        )
    if any(a is None and v != ABSENT for a, v in zip(arrays, node.inputs)):
        return {}
    try:
        results = evaluate_node(node.op, node.attrs, arrays, len(out_types))
    except (NotEvaluable, *MISFIT):  # MISFIT: the given shapes do not fit the model, which a run will report
        return {}
    return {
        v: np.asarray(a).astype(numpy_dtype(t.dtype)) for v, a, t in zip(node.outputs, results, out_types)
    }


def _with_numbers(type: TensorType, numbers: Mapping[str, int]) -> TensorType:
    if type.shape is None or not any(isinstance(d, str) for d in type.shape):
        return type
    dims = tuple(numbers.get(d, d) if isinstance(d, str) else d for d in type.shape)
    return TensorType(type.dtype, dims, type.const, type.other)


def _all_types(graph: onnx.GraphProto) -> Iterator[onnx.TypeProto]:
    """The types that a graph declares, and those of its bodies."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.type
    for node in graph.node:
        for body in subgraphs(node):
            yield from _all_types(body)


def _show(shape: Sequence[Size]) -> str:
    return ",".join(map(show_size, shape))


def _describe(dims: Sequence[_Shape.Dimension]) -> str:
    return ",".join(d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?") for d in dims)
