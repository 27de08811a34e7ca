"""The types of a node's outputs: ONNX's own inference for single nodes, with results that are cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import numpy as np
import onnx
import onnx.checker
import onnx.defs
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference

from xrlflow.ir import Attr, Attrs, Body, Const, Dim, DType, RawAttr, TensorType
from xrlflow.ops.contrib import CONTRIB, standard
from xrlflow.ops.contrib_decoders import TYPED, types_of_outputs
from xrlflow.ops.eval_shape import ends_of_slice
from xrlflow.ops.invalid_nodes import why_invalid
from xrlflow.ops.packed import PRODUCT, Misfit, product_type
from xrlflow.ops.schema import IR_VERSION, OPSET, is_foldable, later, schema, split_op
from xrlflow.ops.symbolic_shapes import refine
from xrlflow.ops.symbolic_values import of_array


class InferenceError(ValueError):
    """ONNX refuses the node: its inputs or attributes do not fit the operator."""


class TooLarge(InferenceError):
    """An output would have more elements than any machine holds."""


# Inputs whose values (shapes, axes, counts) decide the outputs' types. Values of other constants are not used.
_DATA_INPUTS: dict[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "Slice": (1, 2, 3, 4),
    "Pad": (1, 3),
    "Split": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "ConstantOfShape": (0,),
    "Range": (0, 1, 2),
    "OneHot": (1,),
    "TopK": (1,),
    "Resize": (2, 3),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "Upsample": (1,),
    "DFT": (1, 2),
    "STFT": (1,),
    "BlackmanWindow": (0,),
    "HannWindow": (0,),
    "HammingWindow": (0,),
    "MelWeightMatrix": (0, 1),
    "AffineGrid": (1,),
    "MaxUnpool": (2,),
    "SplitToSequence": (1,),
    **{
        f"Reduce{name}": (1,)
        for name in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
    },
}

_MOST_ELEMENTS = 1 << 48

_Key = tuple[str, Attrs, tuple[TensorType | None, ...], tuple[bytes | None, ...], int]
_memo: dict[_Key, tuple[TensorType, ...]] = {}
_memo_of_onnx: dict[_Key, tuple[TensorType, ...]] = {}


def attr_proto(name: str, value: Attr) -> onnx.AttributeProto:
    """An attribute as an ONNX proto. Bodies are excluded; `onnxio` writes them."""
    if isinstance(value, RawAttr):
        raw: onnx.AttributeProto = onnx.AttributeProto.FromString(value.proto)
        return raw
    if isinstance(value, Body):
        raise TypeError(f"attribute {name} is a body")
    proto: onnx.AttributeProto = onnx.helper.make_attribute(name, value)
    return proto


def type_proto(type: TensorType) -> onnx.TypeProto:
    if type.other is not None:
        raw: onnx.TypeProto = onnx.TypeProto.FromString(type.other)
        return raw
    proto: onnx.TypeProto = onnx.helper.make_tensor_type_proto(int(type.dtype), type.shape)
    return proto


_IMPORTS = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid("ai.onnx.ml", 5)]


@lru_cache(maxsize=4096)
def _read_type(type: TensorType) -> onnx.TypeProto:
    """A type for ONNX's inference, which only reads it."""
    return type_proto(type)


def type_of_proto(proto: onnx.TypeProto, const: bool = False) -> TensorType:
    """A TypeProto as a TensorType. Types other than dense tensors are stored unchanged in it."""
    if not proto.HasField("tensor_type"):
        return TensorType(DType.UNDEFINED, None, const, proto.SerializeToString(deterministic=True))
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return TensorType(DType(tensor.elem_type), None, const)
    dims: list[Dim] = []
    for dim in tensor.shape.dim:
        if dim.HasField("dim_value"):
            dims.append(dim.dim_value if dim.dim_value >= 0 else None)
        else:
            dims.append(dim.dim_param if isinstance(dim.dim_param, str) and dim.dim_param else None)
    return TensorType(DType(tensor.elem_type), tuple(dims), const)


UNKNOWN = TensorType(DType.UNDEFINED, None)


def has_types(op: str) -> bool:
    """Whether the types of an operator's outputs can be inferred."""
    return op.startswith(CONTRIB) or op in TYPED or _definition(op)[0] is not None


def infer(
    op: str,
    attrs: Attrs,
    types: Sequence[TensorType | None],
    data: Sequence[Const | None],
    outputs: int = 1,
) -> tuple[TensorType, ...]:
    """Types of the outputs of a node.

    `types` and `data` have, for each input, its type (None: absent) and its constant, if it is one. Outputs are
    constant if the operator can be folded and every input is constant. Dimensions that ONNX's inference does not find
    become formulas if they follow from the inputs' dimensions (`symbolic_shapes`). Operators that ONNX does not define
    give UNKNOWN types, except products with packed weights (`packed`), operators that have the sizes of one of ONNX
    (`contrib`), and those of transformers (`contrib_decoders`). Raises InferenceError if the inputs do not fit the
    operator.
    """
    return _remembered(_memo, _infer, op, attrs, types, data, outputs)


_Inference = Callable[
    [str, Attrs, Sequence[TensorType | None], Sequence[Const | None], int], tuple[TensorType, ...]
]


def _remembered(
    memo: dict[_Key, tuple[TensorType, ...]],
    inference: _Inference,
    op: str,
    attrs: Attrs,
    types: Sequence[TensorType | None],
    data: Sequence[Const | None],
    outputs: int,
) -> tuple[TensorType, ...]:
    key = _key(op, attrs, types, data, outputs)
    types_out = memo.get(key)
    if types_out is None:
        types_out = memo[key] = _of_any(inference, op, attrs, types, data, outputs)
    return types_out


def _of_any(
    inference: _Inference,
    op: str,
    attrs: Attrs,
    types: Sequence[TensorType | None],
    data: Sequence[Const | None],
    outputs: int,
) -> tuple[TensorType, ...]:
    """The types of the outputs of an operator of ONNX, or of one of ONNX Runtime's own."""
    found = types_of_outputs(op, attrs, types, outputs)
    if found is not None:
        return tuple(UNKNOWN if type is None else type for type in found)
    like = standard(op, attrs, types)
    if like is None:
        return inference(op, attrs, types, data, outputs)
    try:
        (sizes,) = inference(like.op, like.attrs, like.types, [None] * len(like.types), 1)
    except InferenceError:  # the runtime decides what it takes
        return (UNKNOWN,) * outputs
    return (TensorType(like.dtype, sizes.shape),)


def sizes_from_data(op: str) -> bool:
    """Whether elements of an input decide the sizes of the outputs (Reshape, Slice, Tile, ...)."""
    return op in _DATA_INPUTS


def infer_as_onnx(
    op: str,
    attrs: Attrs,
    types: Sequence[TensorType | None],
    data: Sequence[Const | None],
    outputs: int = 1,
) -> tuple[TensorType, ...]:
    """Like `infer`, but dimensions that ONNX's inference does not find stay unknown, as they are to a runtime."""
    return _remembered(_memo_of_onnx, _by_onnx, op, attrs, types, data, outputs)


def _key(
    op: str, attrs: Attrs, types: Sequence[TensorType | None], data: Sequence[Const | None], outputs: int
) -> _Key:
    contents = tuple(
        c.array.tobytes() if i < len(data) and (c := data[i]) is not None and c.array is not None else None
        for i in _DATA_INPUTS.get(op, ())
    )
    return op, attrs, tuple(types), contents, outputs


def _infer(
    op: str, attrs: Attrs, types: Sequence[TensorType | None], data: Sequence[Const | None], outputs: int
) -> tuple[TensorType, ...]:
    inferred = [*_by_onnx(op, attrs, types, data, outputs)]
    if any((t.size or 0) > _MOST_ELEMENTS for t in inferred):
        raise TooLarge(f"{op} makes {', '.join(map(str, inferred))}")
    if not _is_defined(op, types):
        return tuple(inferred)
    indices = _DATA_INPUTS.get(op, ())
    # A sequence is built when the model runs, even from constants.
    const = is_foldable(op) and all(t is None or t.const for t in types)
    const = const and all(t.other is None for t in inferred)
    if any(t.shape is None or None in t.shape for t in inferred):
        contents = [
            of_array(c.array)
            if i in indices and i < len(data) and (c := data[i]) and c.array is not None
            else None
            for i in range(len(types))
        ]
        inferred = [*refine(op, attrs, types, contents, inferred)]
    return tuple(t.as_const(const) for t in inferred)


def _is_defined(op: str, types: Sequence[TensorType | None]) -> bool:
    """Whether ONNX defines the operator, and the types of all inputs are known."""
    return schema(op) is not None and not any(t is not None and t is UNKNOWN for t in types)


@cache
def _definition(op: str) -> tuple[onnx.defs.OpSchema | None, list[onnx.OperatorSetIdProto]]:
    """An operator's definition, also if only a later opset has it, and the opsets of a model that has this operator."""
    late = later(op)
    if late is None:
        return schema(op), _IMPORTS
    name, version = late
    if not onnx.defs.has(name, version, ""):
        return None, _IMPORTS
    return onnx.defs.get_schema(name, version, ""), [onnx.helper.make_opsetid("", version), *_IMPORTS[1:]]


def _by_onnx(
    op: str, attrs: Attrs, types: Sequence[TensorType | None], data: Sequence[Const | None], outputs: int
) -> tuple[TensorType, ...]:
    if op == PRODUCT:
        try:
            return (product_type(attrs, types),)
        except Misfit as error:
            raise InferenceError(f"{op}: {error}") from error
    definition, imports = _definition(op)
    indices = _DATA_INPUTS.get(op, ())
    if definition is None or any(isinstance(v, Body) for v in attrs.values()):
        return (UNKNOWN,) * outputs
    if (wrong := why_invalid(op, attrs, types, data, outputs)) is not None:
        raise InferenceError(wrong)
    if any(t is not None and t is UNKNOWN for t in types):
        return (UNKNOWN,) * outputs
    domain, name = ("", late[0]) if (late := later(op)) is not None else split_op(op)
    names = ["" if t is None else f"i{i}" for i, t in enumerate(types)]
    node = onnx.NodeProto(op_type=name, domain=domain, input=names, output=[f"o{i}" for i in range(outputs)])
    node.attribute.extend(attr_proto(k, v) for k, v in attrs.items())
    input_types = {n: _read_type(t) for n, t in zip(names, types) if t is not None}
    input_data = {
        names[i]: onnx.numpy_helper.from_array(np.asarray(c.array, order="C"))  # a scalar stays a scalar
        for i in indices
        if i < len(data) and (c := data[i]) is not None and c.array is not None
    }
    if op == "Slice" and "i2" in input_data and "i4" in input_data:
        ends, steps = (onnx.numpy_helper.to_array(input_data[name]) for name in ("i2", "i4"))
        input_data["i2"] = onnx.numpy_helper.from_array(ends_of_slice(ends, steps))
    try:
        result = onnx.shape_inference.infer_node_outputs(
            definition, node, input_types, input_data, opset_imports=imports, ir_version=IR_VERSION
        )
    except (
        onnx.shape_inference.InferenceError,
        onnx.checker.ValidationError,
        RuntimeError,
        ValueError,
    ) as error:
        inputs = ", ".join(str(t) for t in types)
        raise InferenceError(f"{op}({inputs}; {attrs!r}): {error}") from error
    return tuple(type_of_proto(result[f"o{i}"]) if f"o{i}" in result else UNKNOWN for i in range(outputs))
