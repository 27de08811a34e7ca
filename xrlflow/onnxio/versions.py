"""Converts models of other opsets to the canonical opset and back, node by node, including the nodes in bodies.

`ADAPTERS` says what changed in which version of which operator. A version that is not in the table only allows more
element types or ranks, or adds optional attributes and inputs whose default is the old behaviour. Source: the
operators' changelog, https://github.com/onnx/onnx/blob/main/docs/Changelog.md
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.defs
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference

from xrlflow.ir import FLOATS, SMALL, DType, TensorType
from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.inference import infer_shapes
from xrlflow.onnxio.protos import all_names, all_nodes, subgraphs
from xrlflow.ops.infer import type_proto
from xrlflow.ops.schema import LATER, OPSET

# The opsets that can be read: from the first whose elementwise operators broadcast as today's do, to the last that ONNX
# Runtime runs. Older models can be read if their operators did not change before opset 7, or have an adapter.
OLDEST, NEWEST = 7, 28
# Operators for which ONNX Runtime 1.23 has kernels at opset 21, but not at the canonical one.
_LATE_KERNELS, _BEFORE_LATE, _KERNELS_SINCE = frozenset({"QuantizeLinear", "DequantizeLinear"}), 21, (1, 24)

_LAST = 2**31 - 1


class _NotConvertible(Exception):
    """The canonical opset cannot express an old operator. The message says why."""


class _Context:
    """What an adapter knows of a node's graph, and the nodes that it adds `before` and `after` the node."""

    def __init__(
        self, names: set[str], types: dict[str, onnx.TypeProto], consts: dict[str, onnx.TensorProto]
    ) -> None:
        self.names = names
        self.types = types
        self.consts = consts
        self.before: list[onnx.NodeProto] = []
        self.after: list[onnx.NodeProto] = []

    def name(self, stem: str) -> str:
        number = len(self.names)
        while f"{stem}_{number}" in self.names:
            number += 1
        self.names.add(f"{stem}_{number}")
        return f"{stem}_{number}"

    def add(self, op: str, inputs: Sequence[str], **attrs: Any) -> str:
        """Add a node of the canonical opset before the current one. Returns the name of its output."""
        out = self.name(op.lower())
        self.before.append(onnx.helper.make_node(op, list(inputs), [out], **attrs))
        return out

    def const(self, values: Any, dtype: npt.DTypeLike = np.int64) -> str:
        tensor = onnx.numpy_helper.from_array(np.array(values, dtype))
        return self.add("Constant", [], value=tensor)

    def scalar(self, value: float, like: str) -> str:
        """A scalar with the element type of the tensor `like`."""
        dtype = self.dtype(like)
        if dtype is None:
            return self.add("CastLike", [self.const(value, np.float32), like])
        return self.const(value, onnx.helper.tensor_dtype_to_np_dtype(dtype))

    def dtype(self, name: str) -> int | None:
        type = self.types.get(name)
        elem: int = type.tensor_type.elem_type if type is not None else 0
        return elem or None

    def rank(self, name: str) -> int | None:
        type = self.types.get(name)
        if type is None or not type.tensor_type.HasField("shape"):
            return None
        return len(type.tensor_type.shape.dim)

    def array(self, name: str) -> npt.NDArray[np.generic] | None:
        """The elements of a small constant, or None."""
        tensor = self.consts.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        return onnx.numpy_helper.to_array(tensor)


_Adapter = Callable[[_Context, onnx.NodeProto], None]


def _pop(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    """Remove an attribute from a node and return it."""
    for at, attribute in enumerate(node.attribute):
        if attribute.name == name:
            copy = onnx.AttributeProto()
            copy.CopyFrom(attribute)
            del node.attribute[at]
            return copy
    return None


def _set(node: onnx.NodeProto, name: str, value: int | float | str) -> None:
    _pop(node, name)
    node.attribute.append(onnx.helper.make_attribute(name, value))


def _input(node: onnx.NodeProto, index: int, name: str) -> None:
    """Set an input of a node. If inputs before it are missing, empty ones are added."""
    while len(node.input) <= index:
        node.input.append("")
    node.input[index] = name


def _ints_to_input(attribute: str, index: int) -> _Adapter:
    """An adapter that turns an attribute, a list of integers, into an input. An empty list meant the same as no
    attribute.
    """

    def adapt(cx: _Context, node: onnx.NodeProto) -> None:
        values = _pop(node, attribute)
        if values is not None and values.ints:
            _input(node, index, cx.const(list(values.ints)))

    return adapt


def _coerced(cx: _Context, node: onnx.NodeProto) -> None:
    """Softmax and similar operators normalised over all axes from `axis` on; now they normalise over `axis` alone."""
    attribute = _pop(node, "axis")
    axis = attribute.i if attribute is not None else 1
    rank = cx.rank(node.input[0])
    if axis == -1 or (rank is not None and axis % rank == rank - 1):
        return
    x, y = node.input[0], node.output[0]
    node.input[0] = cx.add("Flatten", [x], axis=axis)
    node.output[0] = cx.name(f"{y}_2d")
    cx.after.append(onnx.helper.make_node("Reshape", [node.output[0], cx.add("Shape", [x])], [y]))


def _clip(cx: _Context, node: onnx.NodeProto) -> None:
    for index, name in ((1, "min"), (2, "max")):
        attribute = _pop(node, name)
        if attribute is not None:
            _input(node, index, cx.scalar(attribute.f, node.input[0]))


def _dropout_mask(cx: _Context, node: onnx.NodeProto) -> None:
    """The mask of a Dropout had the element type of the data; now it is boolean."""
    if len(node.output) > 1 and node.output[1]:
        old = node.output[1]
        node.output[1] = cx.name(old)
        cx.after.append(onnx.helper.make_node("CastLike", [node.output[1], node.input[0]], [old]))


def _dropout_ratio(cx: _Context, node: onnx.NodeProto) -> None:
    _pop(node, "ratio")  # ratio is only used in training


def _pad(cx: _Context, node: onnx.NodeProto) -> None:
    pads, value = _pop(node, "pads"), _pop(node, "value")
    _input(node, 1, cx.const([] if pads is None else list(pads.ints)))
    if value is not None and value.f:
        _input(node, 2, cx.scalar(value.f, node.input[0]))


def _slice(cx: _Context, node: onnx.NodeProto) -> None:
    for index, name in enumerate(("starts", "ends", "axes"), 1):
        attribute = _pop(node, name)
        if attribute is not None:
            _input(node, index, cx.const(list(attribute.ints)))


def _split_outputs(cx: _Context, node: onnx.NodeProto) -> None:
    if len(node.input) < 2 or not node.input[1]:
        _set(node, "num_outputs", len(node.output))


def _topk(cx: _Context, node: onnx.NodeProto) -> None:
    attribute = _pop(node, "k")
    _input(node, 1, cx.const([0 if attribute is None else attribute.i]))


def _upsample_scales(cx: _Context, node: onnx.NodeProto) -> None:
    attribute = _pop(node, "scales")
    _input(node, 1, cx.const([] if attribute is None else list(attribute.floats), np.float32))


def _upsample_to_resize(cx: _Context, node: onnx.NodeProto) -> None:
    node.op_type = "Resize"
    scales = node.input[1]
    _input(node, 2, scales)
    node.input[1] = ""
    _old_coordinates(node, "floor")


def _old_coordinates(node: onnx.NodeProto, nearest: str) -> None:
    mode = next((a.s.decode() for a in node.attribute if a.name == "mode"), "nearest")
    _set(node, "coordinate_transformation_mode", "asymmetric")
    if mode == "nearest":
        _set(node, "nearest_mode", nearest)


def _resize(cx: _Context, node: onnx.NodeProto) -> None:
    """Resize-10 did not define coordinates. ONNX Runtime rounds them down to enlarge an image and up to shrink it."""
    if len(node.input) > 2:  # the node was an Upsample, which is already adapted
        return
    mode = next((a.s.decode() for a in node.attribute if a.name == "mode"), "nearest")
    nearest = "floor"
    if mode == "nearest":
        scales = cx.array(node.input[1])
        if scales is None:
            raise _NotConvertible("shrinks or enlarges by factors that are computed")
        values = scales.astype(np.float64)
        if (values < 1).any():
            if (values > 1).any():
                raise _NotConvertible("shrinks and enlarges at once")
            nearest = "ceil"
    _input(node, 2, node.input[1])
    node.input[1] = ""
    _old_coordinates(node, nearest)


def _batchnorm_spatial(cx: _Context, node: onnx.NodeProto) -> None:
    attribute = _pop(node, "spatial")
    if attribute is None or attribute.i != 0:
        return
    # A BatchNormalization can no longer have one mean per element. Write plain arithmetic, which broadcasts over N.
    epsilon = _pop(node, "epsilon")
    _pop(node, "momentum")
    x, scale, bias, mean, var = node.input
    stable = cx.add("Add", [var, cx.scalar(1e-5 if epsilon is None else epsilon.f, x)])
    normal = cx.add("Div", [cx.add("Sub", [x, mean]), cx.add("Sqrt", [stable])])
    node.op_type = "Add"
    del node.input[:], node.output[1:]
    node.input.extend([cx.add("Mul", [normal, scale]), bias])


def _batchnorm_outputs(cx: _Context, node: onnx.NodeProto) -> None:
    """More than one output meant training. ONNX Runtime computes inference in any case, and leaves the other outputs
    empty.
    """
    del node.output[1:]


def _grid_sample(cx: _Context, node: onnx.NodeProto) -> None:
    attribute = _pop(node, "mode")
    mode = "bilinear" if attribute is None else attribute.s.decode()
    _set(node, "mode", {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


def _roi_align(cx: _Context, node: onnx.NodeProto) -> None:
    _set(node, "coordinate_transformation_mode", "output_half_pixel")


def _dft(cx: _Context, node: onnx.NodeProto) -> None:
    attribute = _pop(node, "axis")
    _input(node, 2, cx.const(1 if attribute is None else attribute.i))


def _group_norm(cx: _Context, node: onnx.NodeProto) -> None:
    """Scale and bias of a GroupNormalization were per group; now they are per channel."""
    groups = next(a.i for a in node.attribute if a.name == "num_groups")
    channels = cx.add("Shape", [node.input[0]], start=1, end=2)
    count = cx.const([groups])
    shape = cx.add("Concat", [count, cx.add("Div", [channels, count])], axis=0)
    for index in (1, 2):
        column = cx.add("Unsqueeze", [node.input[index], cx.const([1])])
        node.input[index] = cx.add("Reshape", [cx.add("Expand", [column, shape]), cx.const([-1])])


def _scatter(cx: _Context, node: onnx.NodeProto) -> None:
    node.op_type = "ScatterElements"


def _scan(cx: _Context, node: onnx.NodeProto) -> None:
    """Scan-8 had a leading batch dimension. Now an outer Scan over the batch has the Scan over time in its body."""
    if node.input[0]:
        raise _NotConvertible("has sequence lengths")
    body = next(a.g for a in node.attribute if a.name == "body")
    scanned = next(a.i for a in node.attribute if a.name == "num_scan_inputs")
    directions = _pop(node, "directions")
    inputs = list(node.input[1:])
    states = len(inputs) - scanned
    inner = onnx.NodeProto(op_type="Scan")
    inner.input.extend(cx.name("batch_in") for _ in inputs)
    inner.output.extend(cx.name("batch_out") for _ in node.output)
    inner.attribute.append(onnx.helper.make_attribute("body", body))
    inner.attribute.append(onnx.helper.make_attribute("num_scan_inputs", scanned))
    if directions is not None:
        inner.attribute.append(onnx.helper.make_attribute("scan_input_directions", list(directions.ints)))
    outer = onnx.GraphProto(name=f"{body.name}_batch", node=[inner])
    for at, name in enumerate(inner.input):
        info = outer.input.add(name=name)
        info.type.tensor_type.elem_type = body.input[at].type.tensor_type.elem_type
        if at < states and body.input[at].type.tensor_type.HasField("shape"):
            info.type.CopyFrom(body.input[at].type)
    for at, name in enumerate(inner.output):
        info = outer.output.add(name=name)
        info.type.tensor_type.elem_type = body.output[at].type.tensor_type.elem_type
    del node.input[:], node.attribute[:]
    node.input.extend(inputs)
    node.attribute.append(onnx.helper.make_attribute("body", outer))
    node.attribute.append(onnx.helper.make_attribute("num_scan_inputs", len(inputs)))


def _broadcast(cx: _Context, node: onnx.NodeProto) -> None:
    """The second operand's dimensions were aligned with those of the first operand, beginning at `axis`."""
    axis, broadcast = _pop(node, "axis"), _pop(node, "broadcast")
    if broadcast is None or not broadcast.i or axis is None:
        return
    rank, own = cx.rank(node.input[0]), cx.rank(node.input[1])
    if rank is None or own is None:
        raise _NotConvertible("broadcasts along an axis of tensors of unknown rank")
    missing = rank - axis.i % rank - own
    if missing > 0:
        node.input[1] = cx.add("Unsqueeze", [node.input[1], cx.const([own + i for i in range(missing)])])


def _gemm(cx: _Context, node: onnx.NodeProto) -> None:
    _pop(node, "broadcast")


def _mean_variance(cx: _Context, node: onnx.NodeProto) -> None:
    """ONNX Runtime had this operator before ONNX did, with other attributes."""
    across, variance = _pop(node, "across_channels"), _pop(node, "normalize_variance")
    axes = [0, 1, 2, 3] if across is not None and across.i == 1 else [0, 2, 3]
    if variance is None or variance.i == 1:
        node.attribute.append(onnx.helper.make_attribute("axes", axes))
        return
    node.op_type = "Sub"
    node.input.append(cx.add("ReduceMean", [node.input[0], cx.const(axes)]))


BINARY = ("Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor")
REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")

# (operator, version in which it changed) -> the adapter for a node of an older version.
ADAPTERS: dict[tuple[str, int], _Adapter] = {
    **{(op, 7): _broadcast for op in BINARY},
    ("Gemm", 7): _gemm,
    ("Softmax", 13): _coerced,
    ("LogSoftmax", 13): _coerced,
    ("Hardmax", 13): _coerced,
    ("Clip", 11): _clip,
    ("Dropout", 10): _dropout_mask,
    ("Dropout", 12): _dropout_ratio,
    ("Pad", 11): _pad,
    ("Slice", 10): _slice,
    ("Split", 13): _ints_to_input("split", 1),
    ("Split", 18): _split_outputs,
    ("Squeeze", 13): _ints_to_input("axes", 1),
    ("Unsqueeze", 13): _ints_to_input("axes", 1),
    ("ReduceSum", 13): _ints_to_input("axes", 1),
    **{(f"Reduce{name}", 18): _ints_to_input("axes", 1) for name in REDUCTIONS},
    ("TopK", 10): _topk,
    ("Upsample", 9): _upsample_scales,
    ("Upsample", 10): _upsample_to_resize,
    ("Resize", 11): _resize,
    ("BatchNormalization", 9): _batchnorm_spatial,
    ("BatchNormalization", 14): _batchnorm_outputs,
    ("MeanVarianceNormalization", 9): _mean_variance,
    ("GridSample", 20): _grid_sample,
    ("RoiAlign", 16): _roi_align,
    ("DFT", 20): _dft,
    ("GroupNormalization", 21): _group_norm,
    ("Scatter", 11): _scatter,
    ("Scan", 9): _scan,
}

_ADAPTED: dict[str, tuple[int, ...]] = {
    op: tuple(sorted(v for o, v in ADAPTERS if o == op)) for op, _ in ADAPTERS
}

_DOUBLES = frozenset({onnx.TensorProto.DOUBLE})
# Element types for which ONNX Runtime has no kernel of the operator. At some opsets it computes the operator by ONNX's
# definition, which consists of other operators; at later opsets it refuses the operator. On import, models of the
# former opsets get the definition.
DECOMPOSED: dict[str, frozenset[int]] = {
    **dict.fromkeys(("Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Selu", "Softplus"), _DOUBLES),
    **dict.fromkeys(("Softsign", "ThresholdedRelu"), _DOUBLES),
    "PRelu": _DOUBLES | {onnx.TensorProto.INT32, onnx.TensorProto.INT64, onnx.TensorProto.UINT32},
    "Relu": frozenset({onnx.TensorProto.INT64}),
}
_DECOMPOSED_AT = range(16, 19)
_DEFINITIONS = "xrlflow.spelling"

# Operators that changed after the canonical opset in more than the types that they allow.
_FLOATS = frozenset(map(int, FLOATS))
CHANGED_LATER = frozenset(["Attention"])


@cache
def _old_runtime() -> bool:
    import onnxruntime

    return tuple(map(int, onnxruntime.__version__.split(".")[:2])) < _KERNELS_SINCE


def runnable(proto: onnx.ModelProto, opset: int) -> int:
    """`opset`, or a lower one for which an old ONNX Runtime has kernels for all of the model's operators."""
    if not any(n.op_type in _LATE_KERNELS for n in all_nodes(proto.graph)) or not _old_runtime():
        return opset
    return min(opset, _BEFORE_LATE)


def merge_imports(proto: onnx.ModelProto) -> None:
    """Leave only one import of each domain, the last one, as ONNX Runtime does. Functions get the model's imports."""
    own = _last_imports(proto)
    for owner in (proto, *proto.functions):
        imports = {**_last_imports(owner), **own}
        if len(imports) < len(owner.opset_import) or owner is not proto:
            del owner.opset_import[:]
            owner.opset_import.extend(
                onnx.OperatorSetIdProto(domain=d, version=v) for d, v in imports.items()
            )


def _last_imports(owner: onnx.ModelProto | onnx.FunctionProto) -> dict[str, int]:
    """The opset of each domain; of repeated imports the last one counts."""
    return {("" if o.domain == "ai.onnx" else o.domain): o.version for o in owner.opset_import}


def opset_of(proto: onnx.ModelProto) -> int | None:
    """The model's opset of ONNX's own operators, or None if it uses none."""
    return next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)


def means_the_same(function: onnx.FunctionProto, opset: int | None) -> bool:
    """Whether no operator of a function differs between the function's opset and that of a model. Otherwise ONNX's
    checker refuses the function in that model.
    """
    own = _last_imports(function).get("")
    if own is None or opset is None or own == opset:
        return own is None or own == opset
    names = {n.op_type for n in all_nodes(function) if n.domain in ("", "ai.onnx")}
    return all(_since(name, own) == _since(name, opset) for name in names)


def _since(op: str, opset: int) -> int | None:
    """The opset in which an operator got the form that it has in a given one; None if it does not exist there."""
    return onnx.defs.get_schema(op, opset, "").since_version if onnx.defs.has(op, opset, "") else None


def set_opset(proto: onnx.ModelProto, opset: int) -> None:
    """Set the model's opset of ONNX's own operators, in place."""
    foreign = [o for o in proto.opset_import if o.domain not in ("", "ai.onnx")]
    copies = [onnx.helper.make_opsetid(o.domain, o.version) for o in foreign]
    del proto.opset_import[:]
    proto.opset_import.extend([onnx.helper.make_opsetid("", opset), *copies])


def to_canonical(name: str, proto: onnx.ModelProto) -> int:
    """Convert a model, whose large weights are elsewhere, to the canonical opset, in place.

    Returns the opset at which a result is to be written, unless it needs a newer one: the model's own opset, if models
    of it can be written. If a node uses something that only a newer opset than the canonical one defines, the model's
    opset becomes a part of the node's domain (LATER). Raises ModelError for an opset that is too new, and for a
    node that the canonical opset cannot express.
    """
    opset = opset_of(proto)
    if opset is None:
        set_opset(proto, OPSET)
        return OPSET
    if opset > NEWEST or opset > onnx.defs.onnx_opset_version():
        last = min(NEWEST, onnx.defs.onnx_opset_version())
        newer = " or install a newer onnx" if opset <= NEWEST else ""
        raise ModelError(
            f"{name}: opset {opset} is from the future, {last} is the last that is read: "
            f"export the model with opset {OPSET}{newer}"
        )
    if opset < OPSET:
        if opset in _DECOMPOSED_AT:
            _decompose(proto, opset)
        _raise(name, proto, opset)
    elif opset > OPSET:
        types = dict(_typed_names(_inferred(proto).graph))
        later = [n for n in all_nodes(proto.graph) if _is_later(n, opset, types)]
        for node in later:
            node.domain = f"{LATER}{opset}"
        if later:
            return opset
    set_opset(proto, OPSET)
    return max(opset, OLDEST)


def _raise(name: str, proto: onnx.ModelProto, opset: int) -> None:
    _Raiser(name, opset, all_names(proto.graph)).graph(_inferred(proto).graph, {}, {}, proto.graph)


def raised(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model at the canonical opset, if its own opset is older. If no node has to change, the same object is
    returned.

    New constants are initialisers. Raises ModelError for a node that the canonical opset cannot express.
    """
    opset = opset_of(model) or OPSET
    if all(opset >= OPSET or not _changes(node.op_type, opset) for node in all_nodes(model.graph)):
        return model
    light = onnx.ModelProto()
    light.CopyFrom(model)
    large = [t for t in light.graph.initializer if prod(t.dims) > SMALL]
    small = [t for t in light.graph.initializer if prod(t.dims) <= SMALL]
    inputs = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in light.graph.input]
    del light.graph.initializer[:]
    light.graph.initializer.extend(small)
    light.graph.input.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        for t in large
        if t.name not in {v.name for v in inputs}
    )
    _raise("the model", light, opset)
    del light.graph.input[:]
    light.graph.input.extend(inputs)
    light.graph.initializer.extend(large)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in light.graph.node]
    del light.graph.node[:]
    for node in nodes:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            node.attribute[0].t.name = node.output[0]
            light.graph.initializer.append(node.attribute[0].t)
        else:
            light.graph.node.append(node)
    set_opset(light, OPSET)
    return light


def _changes(op: str, opset: int) -> bool:
    """Whether an adapter rewrites nodes of this operator and opset."""
    return any(version > opset for version in _ADAPTED.get(op, ()))


def _decompose(proto: onnx.ModelProto, opset: int) -> None:
    """Replace operators on element types without a kernel by ONNX's definitions of the operators, in place."""
    import onnx.inliner

    if not any(n.op_type in DECOMPOSED and not n.domain for n in all_nodes(proto.graph)):
        return
    for _ in range(3):  # a definition may use another operator without a kernel
        types = dict(_typed_names(_inferred(proto).graph))
        replaced: set[str] = set()
        for node in all_nodes(proto.graph):
            if node.op_type not in DECOMPOSED or node.domain or not node.input or node.input[0] not in types:
                continue
            if types[node.input[0]].tensor_type.elem_type in DECOMPOSED[node.op_type]:
                _write_defaults(node, opset)
                node.domain = _DEFINITIONS
                replaced.add(node.op_type)
        if not replaced:
            return
        proto.opset_import.add(domain=_DEFINITIONS, version=1)
        proto.functions.extend(_definition(op, opset) for op in sorted(replaced))
        names = [(_DEFINITIONS, op) for op in sorted(replaced)]
        proto.CopyFrom(onnx.inliner.inline_selected_functions(proto, names))
        remaining = [o for o in proto.opset_import if o.domain != _DEFINITIONS]
        del proto.opset_import[:]
        proto.opset_import.extend(remaining)


def _definition(op: str, opset: int) -> onnx.FunctionProto:
    """ONNX's definition of an operator by other operators, as a function for a model of this opset."""
    schema = onnx.defs.get_schema(op, opset, "")
    function = onnx.FunctionProto()
    function.CopyFrom(schema.function_body)
    function.name, function.domain = op, _DEFINITIONS
    del function.opset_import[:]
    function.opset_import.add(domain="", version=opset)
    del function.attribute[:]
    function.attribute.extend(schema.attributes)
    return function


def _write_defaults(node: onnx.NodeProto, opset: int) -> None:
    """Write the default attributes of a node into it."""
    present = {a.name for a in node.attribute}
    for name, attribute in onnx.defs.get_schema(node.op_type, opset, "").attributes.items():
        if name not in present:
            node.attribute.add().CopyFrom(attribute.default_value)


def _inferred(proto: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return infer_shapes(proto)
    except (onnx.shape_inference.InferenceError, RuntimeError):  # without inference fewer types are known
        return proto


def _typed_names(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TypeProto]]:
    """The types by the names of values, including those in bodies."""
    for value in (*graph.input, *graph.value_info, *graph.output):
        yield value.name, value.type
    for tensor in graph.initializer:
        yield tensor.name, onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    for node in graph.node:
        for body in subgraphs(node):
            yield from _typed_names(body)


def _is_later(node: onnx.NodeProto, opset: int, types: dict[str, onnx.TypeProto]) -> bool:
    """Whether a node of a newer opset uses something that the canonical opset lacks. New attributes with default values
    are removed.
    """
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, opset, ""):
        return False
    now = onnx.defs.get_schema(node.op_type, opset, "")
    if now.since_version <= OPSET:
        return False
    if node.op_type == "Mod" and types.get(node.input[0], onnx.TypeProto()).tensor_type.elem_type in _FLOATS:
        return True  # opset 28 allows these types without `fmod`
    if node.op_type in CHANGED_LATER or not onnx.defs.has(node.op_type, OPSET, ""):
        return True
    then = onnx.defs.get_schema(node.op_type, OPSET, "")
    for attribute in list(node.attribute):
        if attribute.name not in then.attributes:
            default = now.attributes[attribute.name].default_value
            if onnx.helper.get_attribute_value(attribute) != onnx.helper.get_attribute_value(default):
                return True
            _pop(node, attribute.name)
    if len(node.input) > then.max_input or len(node.output) > then.max_output:
        return True
    return not _admits(then, node, types)


def _admits(schema: onnx.defs.OpSchema, node: onnx.NodeProto, types: dict[str, onnx.TypeProto]) -> bool:
    """Whether an operator's definition allows the element types of a node."""
    allowed = {t for c in schema.type_constraints for t in c.allowed_type_strs}
    allowed.update(p.type_str for p in (*schema.inputs, *schema.outputs))
    for name in (*node.input, *node.output):
        elem = types[name].tensor_type.elem_type if name in types else 0
        if elem and f"tensor({onnx.TensorProto.DataType.Name(elem).lower()})" not in allowed:
            return False
    return True


class _Raiser:
    """Converts graphs from an older opset to the canonical one."""

    def __init__(self, model: str, opset: int, names: set[str]) -> None:
        self.model = model
        self.opset = opset
        self.names = names

    def graph(
        self,
        typed: onnx.GraphProto,
        types: dict[str, onnx.TypeProto],
        consts: dict[str, onnx.TensorProto],
        graph: onnx.GraphProto,
    ) -> None:
        """Rewrite `graph`. `typed` is the same graph with types; `types` and `consts` are those of the graphs around
        it.
        """
        types = {**types, **{v.name: v.type for v in (*typed.input, *typed.value_info, *typed.output)}}
        for tensor in graph.initializer:
            types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        overridable = {v.name for v in graph.input}
        consts = {**consts, **{t.name: t for t in graph.initializer if t.name not in overridable}}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                consts[node.output[0]] = node.attribute[0].t
        out: list[onnx.NodeProto] = []
        for node, typed_node in zip(graph.node, typed.node):
            for body, typed_body in zip(subgraphs(node), subgraphs(typed_node)):
                self.graph(typed_body, types, consts, body)
            out.extend(self._node(node, types, consts))
        del graph.node[:]
        graph.node.extend(out)

    def _node(
        self, node: onnx.NodeProto, types: dict[str, onnx.TypeProto], consts: dict[str, onnx.TensorProto]
    ) -> list[onnx.NodeProto]:
        if node.domain not in ("", "ai.onnx"):
            return [node]
        at = self.opset
        cx = _Context(self.names, types, consts)
        subject = f"node {node.name or node.output[0]!r} ({node.op_type} of opset {self.opset})"
        while True:
            version = next((v for v in _ADAPTED.get(node.op_type, ()) if at < v <= OPSET), None)
            if at < OLDEST and (version is None or version > OLDEST):
                self._require_same(node, at, subject)
            if version is None:
                return [*cx.before, node, *cx.after]
            try:
                ADAPTERS[node.op_type, version](cx, node)
            except _NotConvertible as error:
                raise ModelError(
                    f"{self.model}: {subject} {error}, which opset {OPSET} cannot say: "
                    "export the model with a newer opset"
                ) from error
            at = version

    def _require_same(self, node: onnx.NodeProto, opset: int, subject: str) -> None:
        """Raise ModelError if the operator changed between this opset, which is before OLDEST, and OLDEST."""
        if onnx.defs.has(node.op_type, opset, "") and onnx.defs.has(node.op_type, OLDEST, ""):
            then, now = (onnx.defs.get_schema(node.op_type, v, "").since_version for v in (opset, OLDEST))
            if then == now:
                return
        raise ModelError(
            f"{self.model}: {subject} is too old, opset {OLDEST} is the first that is read whole: "
            "export the model again, or convert it with onnx.version_converter"
        )


class _NotExpressible(Exception):
    """An older opset cannot express a node."""


_Lowerer = Callable[[_Context, onnx.NodeProto], None]


def _const_input(cx: _Context, node: onnx.NodeProto, index: int) -> list[Any] | None:
    """Remove an input that must be constant, and return its elements, or None if it is absent."""
    if len(node.input) <= index or not node.input[index]:
        return None
    array = cx.array(node.input[index])
    if array is None:
        raise _NotExpressible
    node.input[index] = ""
    return list(array.ravel().tolist())


def _inputs_to_attributes(**positions: int) -> _Lowerer:
    def lower(cx: _Context, node: onnx.NodeProto) -> None:
        for name, index in positions.items():
            values = _const_input(cx, node, index)
            if values is not None:
                node.attribute.append(onnx.helper.make_attribute(name, values))

    return lower


def _scalars_to_attributes(**positions: int) -> _Lowerer:
    def lower(cx: _Context, node: onnx.NodeProto) -> None:
        for name, index in positions.items():
            values = _const_input(cx, node, index)
            if values is not None:
                node.attribute.append(onnx.helper.make_attribute(name, values[0]))

    return lower


def _axes_to_attribute(cx: _Context, node: onnx.NodeProto) -> None:
    noop = _pop(node, "noop_with_empty_axes")
    axes = _const_input(cx, node, 1)
    if axes:
        node.attribute.append(onnx.helper.make_attribute("axes", axes))
    elif noop is not None and noop.i:
        raise _NotExpressible


def _lower_softmax(cx: _Context, node: onnx.NodeProto) -> None:
    attribute, rank = _pop(node, "axis"), cx.rank(node.input[0])
    axis = -1 if attribute is None else attribute.i
    if rank is None or axis % rank != rank - 1:
        raise _NotExpressible
    _set(node, "axis", rank - 1)


def _lower_split(cx: _Context, node: onnx.NodeProto) -> None:
    count = _pop(node, "num_outputs")
    if count is None:
        return
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
    rank = cx.rank(node.input[0])
    if rank is None:
        raise _NotExpressible
    size = cx.types[node.input[0]].tensor_type.shape.dim[axis % rank].dim_value
    if not size or size % count.i:
        raise _NotExpressible


def _lower_slice(cx: _Context, node: onnx.NodeProto) -> None:
    steps = _const_input(cx, node, 4)
    if steps is not None and any(step != 1 for step in steps):
        raise _NotExpressible
    _inputs_to_attributes(starts=1, ends=2, axes=3)(cx, node)


def _lower_dropout(cx: _Context, node: onnx.NodeProto) -> None:
    if any(_const_input(cx, node, 2) or ()):
        raise _NotExpressible
    _pop(node, "seed")
    _scalars_to_attributes(ratio=1)(cx, node)


def _lower_mask(cx: _Context, node: onnx.NodeProto) -> None:
    if len(node.output) > 1:
        raise _NotExpressible


def _lower_grid_sample(cx: _Context, node: onnx.NodeProto) -> None:
    attribute = _pop(node, "mode")
    mode = "linear" if attribute is None else attribute.s.decode()
    _set(node, "mode", {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode))


def _lower_roi_align(cx: _Context, node: onnx.NodeProto) -> None:
    attribute = _pop(node, "coordinate_transformation_mode")
    if attribute is None or attribute.s != b"output_half_pixel":
        raise _NotExpressible


def _unchanged(cx: _Context, node: onnx.NodeProto) -> None:
    """An adapter that changes nothing in the node."""


# Adapters back to older opsets, where possible: by (operator, version in which it changed).
LOWERERS: dict[tuple[str, int], _Lowerer] = {
    ("Softmax", 13): _lower_softmax,
    ("LogSoftmax", 13): _lower_softmax,
    ("Hardmax", 13): _lower_softmax,
    ("Clip", 11): _scalars_to_attributes(min=1, max=2),
    ("Dropout", 12): _lower_dropout,
    ("Dropout", 10): _lower_mask,
    ("Pad", 11): lambda cx, node: (
        _inputs_to_attributes(pads=1)(cx, node),
        _scalars_to_attributes(value=2)(cx, node),
    )[0],
    ("Slice", 10): _lower_slice,
    ("Split", 18): _lower_split,
    ("Split", 13): _inputs_to_attributes(split=1),
    ("Squeeze", 13): _axes_to_attribute,
    ("Unsqueeze", 13): _axes_to_attribute,
    ("ReduceSum", 13): _axes_to_attribute,
    **{(f"Reduce{name}", 18): _axes_to_attribute for name in REDUCTIONS},
    ("TopK", 10): _scalars_to_attributes(k=1),
    ("BatchNormalization", 14): _unchanged,
    ("BatchNormalization", 9): _unchanged,
    ("GridSample", 20): _lower_grid_sample,
    ("RoiAlign", 16): _lower_roi_align,
    ("DFT", 20): _scalars_to_attributes(axis=2),
}


# For values of attributes that were introduced after the attribute, the opset of each.
_LATER_VALUES: dict[tuple[str, str], dict[bytes, int]] = {
    ("Pad", "mode"): {b"wrap": 19},
    ("Resize", "coordinate_transformation_mode"): {b"half_pixel_symmetric": 19},
    ("ScatterElements", "reduction"): {b"max": 18, b"min": 18},
    ("ScatterND", "reduction"): {b"max": 18, b"min": 18},
}
# The first opset in which axes may count from the end.
_NEGATIVE_AXES = 11


def check_writable(name: str, opset: int) -> None:
    """Raise ModelError for an opset that cannot be written."""
    newest = min(NEWEST, onnx.defs.onnx_opset_version())
    if not OLDEST <= opset <= newest:
        raise ModelError(f"{name}: opset {opset} cannot be written, only {OLDEST} to {newest}")


def convert(
    name: str, proto: onnx.ModelProto, types: Mapping[str, TensorType], opset: int, later: Collection[str]
) -> None:
    """Convert a model, as it is written, to another opset, in place. `types`: the types of its values.

    `later`: titles of nodes that only the model's opset, or a newer one, defines. Raises ModelError, which names the
    nodes that cannot be expressed.
    """
    check_writable(name, opset)
    lowered = _Lowered(proto.graph, types, opset, later)
    unwritable = [*(later if opset < (opset_of(proto) or OPSET) else ()), *map(title, lowered.inexpressible)]
    if unwritable:
        more = f" and {len(unwritable) - 5} more" if len(unwritable) > 5 else ""
        raise ModelError(
            f"{name}: cannot be written with opset {opset}: in the way are {', '.join(unwritable[:5])}{more}; "
            "choose a newer opset"
        )
    _replace(proto, lowered, opset)


def convert_at_least(proto: onnx.ModelProto, types: Mapping[str, TensorType], opset: int) -> None:
    """Convert a model of the canonical opset in place. The new opset is this one or, if it cannot express a node, the
    lowest later one that can. If this one is newer than the canonical opset and cannot express a node, nothing changes.
    """
    while opset != OPSET:
        lowered = _Lowered(proto.graph, types, opset)
        if not lowered.inexpressible:
            _replace(proto, lowered, opset)
            return
        if opset > OPSET:
            return
        opset = max(_next_change(node.op_type, opset) for node in lowered.inexpressible)


def at_least(model: bytes, types: Mapping[str, TensorType], opset: int) -> bytes:
    """Convert a serialised model of the canonical opset, as `convert_at_least` does."""
    if opset == OPSET:
        return model
    proto = onnx.ModelProto.FromString(model)
    convert_at_least(proto, types, opset)
    converted: bytes = proto.SerializeToString()
    return converted


def title(node: onnx.NodeProto) -> str:
    """The name for a node in a message about what an opset cannot express."""
    return f"{node.op_type} ({node.name or next(iter(node.output), '')!r})"


@cache
def _history() -> Mapping[str, tuple[int, ...]]:
    """For each operator, the versions in which it changed."""
    versions: dict[str, set[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            versions.setdefault(schema.name, set()).add(schema.since_version)
    return {op: tuple(sorted(since)) for op, since in versions.items()}


def _next_change(op: str, opset: int) -> int:
    """The first opset after this one in which an operator changed; at most the canonical opset."""
    changes = (*_history().get(op, ()), *_ADAPTED.get(op, ()), *_values_since(op))
    return min((v for v in changes if opset < v < OPSET), default=OPSET)


def _values_since(op: str) -> Iterator[int]:
    """The opsets in which an attribute of an operator got new values."""
    yield _NEGATIVE_AXES
    for (of, _), values in _LATER_VALUES.items():
        if of == op:
            yield from values.values()


class _Lowered:
    """The nodes of a graph of the canonical opset, converted to another opset.

    `changed`: pairs of a node and its replacement; `inexpressible`: nodes that the other opset cannot express. The
    graph itself stays as it is. Nodes with titles in `later` are not converted.
    """

    def __init__(
        self,
        graph: onnx.GraphProto,
        types: Mapping[str, TensorType],
        opset: int,
        later: Collection[str] = (),
    ) -> None:
        self.opset = opset
        self.later = later
        self.types = types
        self.changed: list[tuple[onnx.NodeProto, onnx.NodeProto]] = []
        self.inexpressible: list[onnx.NodeProto] = []
        self.same: dict[str, bool] = {}
        self._graph(graph, {}, {})

    def _graph(
        self, graph: onnx.GraphProto, types: dict[str, onnx.TypeProto], consts: dict[str, onnx.TensorProto]
    ) -> None:
        overridable = {v.name for v in graph.input}
        consts = {**consts, **{t.name: t for t in graph.initializer if t.name not in overridable}}
        types = dict(types)
        for tensor in graph.initializer:
            types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        for node in graph.node:
            bodies = list(subgraphs(node))
            for body in bodies:
                self._graph(body, types, consts)
            if node.domain in ("", "ai.onnx") and not self._is_same(node):
                self._node(node, types, consts, without_bodies=not bodies)

    def _node(
        self,
        node: onnx.NodeProto,
        types: dict[str, onnx.TypeProto],
        consts: dict[str, onnx.TensorProto],
        without_bodies: bool,
    ) -> None:
        """Convert one node. `without_bodies`: whether it has no bodies. A node with bodies is not replaced itself: the
        nodes in its bodies are converted one by one.
        """
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        own: dict[str, onnx.TypeProto] = {}
        for name in filter(None, (*node.input, *node.output)):
            if name in types:
                own[name] = types[name]
            elif name in self.types and self.types[name].dtype != DType.UNDEFINED:
                own[name] = type_proto(self.types[name])
        try:
            _lower_node(_Context(set(), own, consts), copy, self.opset)
        except _NotExpressible:
            self.inexpressible.append(node)
            return
        if without_bodies and copy != node:
            self.changed.append((node, copy))

    def _is_same(self, node: onnx.NodeProto) -> bool:
        """Whether a node can stay as it is, because its operator is the same in both opsets."""
        op, lower, upper = node.op_type, min(self.opset, OPSET), max(self.opset, OPSET)
        if op not in self.same:
            changes = any(lower < version <= upper for version in _history().get(op, ()))
            known = self.opset >= _NEGATIVE_AXES and onnx.defs.has(op, OPSET, "")
            # SimplifiedLayerNormalization is ONNX Runtime's, in the domain of ONNX: no opset changes it.
            self.same[op] = (known and not changes) or op not in _history()
        return self.same[op] or (bool(self.later) and title(node) in self.later)


def _replace(proto: onnx.ModelProto, lowered: _Lowered, opset: int) -> None:
    """Replace the nodes by the converted ones, and remove initialisers that nothing reads any more."""
    dropped: set[str] = set()
    for node, copy in lowered.changed:
        dropped |= set(node.input) - set(copy.input)
        node.CopyFrom(copy)
    if dropped:
        _drop_unread(proto.graph, dropped - _names_read(proto.graph))
    set_opset(proto, opset)


def _names_read(graph: onnx.GraphProto) -> set[str]:
    """All names that a graph and its bodies read, in nodes or as outputs, and the names of its inputs."""
    names = {v.name for v in (*graph.input, *graph.output)}
    for node in graph.node:
        names.update(node.input)
        for body in subgraphs(node):
            names |= _names_read(body)
    return names


def _drop_unread(graph: onnx.GraphProto, unread: Collection[str]) -> None:
    for at in reversed([i for i, t in enumerate(graph.initializer) if t.name in unread]):
        del graph.initializer[at]
    for node in graph.node:
        for body in subgraphs(node):
            _drop_unread(body, unread)


def _lower_node(cx: _Context, node: onnx.NodeProto, opset: int) -> None:
    op = node.op_type
    if not onnx.defs.has(op, opset, "") or (opset > OPSET and op in CHANGED_LATER):
        raise _NotExpressible
    for version in sorted((v for v in _ADAPTED.get(op, ()) if v > opset), reverse=True):
        if (op, version) not in LOWERERS:
            raise _NotExpressible
        LOWERERS[op, version](cx, node)
    then = onnx.defs.get_schema(op, opset, "")
    now = onnx.defs.get_schema(op, OPSET, "")
    for attribute in list(node.attribute):
        if attribute.s and _LATER_VALUES.get((op, attribute.name), {}).get(attribute.s, 0) > opset:
            raise _NotExpressible
        if attribute.name not in then.attributes:
            definition = now.attributes.get(attribute.name)
            value = onnx.helper.get_attribute_value(attribute)
            if definition is None or not definition.default_value.name:
                raise _NotExpressible
            if value != onnx.helper.get_attribute_value(definition.default_value):
                raise _NotExpressible
            _pop(node, attribute.name)
    while node.input and not node.input[-1]:
        del node.input[-1]
    if opset < _NEGATIVE_AXES:
        _count_from_the_front(cx, node)
    if not _fits(then, node) or not _admits(then, node, cx.types):
        raise _NotExpressible


def _fits(schema: onnx.defs.OpSchema, node: onnx.NodeProto) -> bool:
    """Whether a node has the inputs, outputs and attributes that an operator's definition requires."""
    present = {a.name for a in node.attribute}
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return (
        schema.min_input <= len(node.input) <= schema.max_input
        and schema.min_output <= len(node.output) <= schema.max_output
        and all(name or p.option != single for name, p in zip(node.input, schema.inputs))
        and all(a.name in present for a in schema.attributes.values() if a.required)
    )


def _count_from_the_front(cx: _Context, node: onnx.NodeProto) -> None:
    """Replace negative axes by axes counted from the front, which old opsets require."""
    for attribute in node.attribute:
        if attribute.name not in ("axis", "axes") or min([attribute.i, *attribute.ints]) >= 0:
            continue
        rank = cx.rank(node.output[0] if node.op_type == "Unsqueeze" else node.input[0])
        if rank is None:
            raise _NotExpressible
        if attribute.ints:
            attribute.ints[:] = [axis % rank for axis in attribute.ints]
        else:
            attribute.i %= rank
