"""Keeps indices that are known only at run time inside the tensors that they index, and reports indices outside as
errors of the caller.

TVM's kernels read and write wherever an index points. So each index first goes through `inside`, which counts negative
indices from the end and moves indices outside to the nearest end: a kernel stays in its memory for all data, even if
only TVM's runtime is used. The model gets one additional output: the least and the greatest number of each tensor of
indices. The program that runs the model compares them with the sizes of the tables (`Check`), and raises an error.
Constant indices are checked when the model is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xrlflow.backends.protocol import USE_ONNXRUNTIME, BackendError
from xrlflow.backends.tvm.fusion.checks import Check, complain, ends_of
from xrlflow.backends.tvm.toolchain.reading import known_value, sizes

_KERNEL = "least_and_greatest"
_SCHEDULED = {"tirx.is_scheduled": True, "op_pattern": 8}  # neither fused nor scheduled again


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the graph: its name in messages, its results and its operands."""

    title: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    sources: Callable[[str], Sequence[str]]
    """The inputs of the model from which a tensor is computed."""

    def origin(self, operand: int) -> str:
        """A text for messages that says where the numbers of an operand come from."""
        name = self.operands[operand]
        sources = self.sources(name)
        if list(sources) == [name]:
            return f"input {name}"
        many = "s" if len(sources) > 1 else ""
        return f"computed from input{many} {', '.join(sources)}" if sources else "constant"


def nodes_of(graph: Any) -> list[Node]:
    """The nodes of an ONNX GraphProto, in their order."""
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in constants]
    producers = {name: node for node in graph.node for name in node.output if name}

    def sources(name: str) -> Sequence[str]:
        reached, pending = set[str](), [name]
        while pending:
            if (tensor := pending.pop()) not in reached:
                reached.add(tensor)
                pending += producers[tensor].input if tensor in producers else ()
        return [name for name in inputs if name in reached]

    def title(node: Any) -> str:
        return f"{node.op_type} {node.name or next((o for o in node.output if o), '')}".strip()

    return [Node(title(node), tuple(node.output), tuple(node.input), sources) for node in graph.node]


@dataclass(frozen=True, slots=True)
class _CheckedTensor:
    """A check and its tensor. `column`: only this column of the tensor's last dimension; None: all of it."""

    check: Check
    tensor: Any
    column: int | None


@dataclass(slots=True)
class Bounds:
    """The checks of a graph while it is imported with TVM's builder `builder`."""

    builder: Any
    checked: list[_CheckedTensor] = field(default_factory=list)

    def operands(self, node: Node, op: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> list[Any]:
        """The operands of a node, with indices moved inside their tables. Checks of these indices are added to the
        module.

        Raises BackendError for constant indices outside their tables, and for sizes of tables that the operator does
        not admit.
        """
        rule = RULES.get(op)
        operands = list(inputs)
        return operands if rule is None else rule(self, node, operands, attrs)

    def output(self) -> Any | None:
        """The additional output of the model; None if there is nothing to check."""
        if not self.checked:
            return None
        columns = [entry.column for entry in self.checked]
        return self.builder.emit_te(
            lambda tensors: least_and_greatest(tensors, columns),
            [entry.tensor for entry in self.checked],
            primfunc_name_hint=_KERNEL,
            primfunc_attrs=_SCHEDULED,
        )

    @property
    def checks(self) -> list[Check]:
        return [entry.check for entry in self.checked]

    def add_check(self, check: Check, tensor: Any, column: int | None = None) -> None:
        """Check a tensor of integers, or one column of it: at once if the tensor is constant, otherwise at each run."""
        shape = sizes(tensor)
        if shape is not None and 0 in shape:
            return
        if (constant := known_value(tensor)) is not None:
            complain([check], ends_of(constant if column is None else constant[..., column]))
        elif not any(
            s.check == check and s.tensor.same_as(tensor) and s.column == column for s in self.checked
        ):
            self.checked.append(_CheckedTensor(check, tensor, column))

    def index(
        self, node: Node, operand: int, operands: list[Any], extents: Sequence[int], *, wraps: bool = True
    ) -> None:
        """Move the indices in operand `operand` inside their table, and check them. `extents`: the size of the table,
        for the entire tensor or for each of its columns.

        `wraps`: negative indices count from the end.
        """
        tensor, origin = operands[operand], node.origin(operand)
        for column, extent in enumerate(extents):
            low, high = -extent if wraps else 0, extent - 1
            table = f" in dimension {column}" if len(extents) > 1 else ""
            room = f"{low} to {high}" if extent else "none"
            text = (f"{node.title}: index ", f" ({origin}) is outside of its table{table}, which has {room}")
            self.add_check(Check(text, low, high), tensor, column if len(extents) > 1 else None)
        if known_value(tensor) is None and 0 not in (sizes(tensor) or ()):
            operands[operand] = self.builder.emit_te(
                inside, tensor, list(extents), wraps, primfunc_name_hint="inside"
            )


def inside(x: Any, extents: Sequence[int], wraps: bool) -> Any:
    """Indices moved to 0 ... extent - 1. Negative indices count from the end (with `wraps`); indices outside become the
    nearest end. `extents`: one extent for all indices, or one for each column."""
    from tvm import te, tirx

    def element(*i: Any) -> Any:
        index, kind = x[i], x.dtype
        extent = tirx.const(extents[-1], kind)
        for column in range(len(extents) - 1):
            extent = tirx.Select(i[-1] == column, tirx.const(extents[column], kind), extent)
        zero, one = tirx.const(0, kind), tirx.const(1, kind)
        if wraps:
            index = tirx.Select(index < zero, index + extent, index)
        return tirx.max(tirx.min(index, extent - one), zero)

    return te.compute(x.shape, element, name="inside")


def least_and_greatest(tensors: Sequence[Any], columns: Sequence[int | None]) -> Any:
    """The least and the greatest number of each tensor (of only one column of its last dimension, if `columns` has its
    number), as int64[tensors, 2]."""
    from tvm import te, tirx

    def end(x: Any, column: int | None, reduce: Callable[..., Any]) -> Any:
        rank = len(x.shape) - (column is not None)
        axes = [te.reduce_axis((0, n), name="k") for n in x.shape[:rank]]
        number = x[(*axes, column) if column is not None else tuple(axes)].astype("int64")
        return te.compute((1,), lambda _: reduce(number, axis=axes) if axes else number, name="end")

    ends = [end(x, c, reduce) for x, c in zip(tensors, columns) for reduce in (te.min, te.max)]

    def element(i: Any, j: Any) -> Any:
        result = ends[-1][0]
        for index in reversed(range(len(ends) - 1)):
            result = tirx.if_then_else(i * 2 + j == index, ends[index][0], result)
        return result

    return te.compute((len(tensors), 2), element, name=_KERNEL)


# --- The indices of each operator


def _shape_of(node: Node, tensor: Any) -> tuple[int, ...]:
    from tvm import relax, tirx

    if isinstance(tensor, relax.ShapeExpr):
        return (len(tensor.values),)
    if isinstance(tensor, tirx.IntImm):
        return ()
    shape = sizes(tensor)
    if shape is None:
        raise BackendError(
            f"TVM cannot lower {node.title}: the size of its table depends on values", USE_ONNXRUNTIME
        )
    return shape


def _axis(node: Node, attrs: Mapping[str, Any], rank: int, default: int = 0) -> int:
    axis = int(attrs.get("axis", default))
    if not -rank <= axis < rank:
        raise BackendError(f"{node.title}: axis {axis} of a tensor of {rank} dimensions")
    return axis % rank


def _gather(bounds: Bounds, node: Node, operands: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    shape = _shape_of(node, operands[0])
    bounds.index(node, 1, operands, [shape[_axis(node, attrs, len(shape))]])
    return operands


def _elements(bounds: Bounds, node: Node, operands: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    shape, indices = _shape_of(node, operands[0]), _shape_of(node, operands[1])
    axis = _axis(node, attrs, len(shape))
    others = (i for i in range(len(shape)) if i != axis)
    if len(indices) != len(shape) or any(indices[i] > shape[i] for i in others):
        raise BackendError(
            f"{node.title}: indices of shape {list(indices)} reach beyond a table of shape {list(shape)}"
        )
    if len(operands) > 2 and _shape_of(node, operands[2]) != indices:
        raise BackendError(
            f"{node.title}: updates of shape {list(_shape_of(node, operands[2]))}, not {list(indices)}"
        )
    bounds.index(node, 1, operands, [shape[axis]])
    return operands


def _coordinates(bounds: Bounds, node: Node, operands: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    shape, indices = _shape_of(node, operands[0]), _shape_of(node, operands[1])
    batch = int(attrs.get("batch_dims", 0))
    if not indices or batch + indices[-1] > len(shape) or indices[:batch] != shape[:batch]:
        raise BackendError(
            f"{node.title}: indices of shape {list(indices)} reach beyond a table of shape {list(shape)}"
        )
    expected = indices[:-1] + shape[indices[-1] :]
    if len(operands) > 2 and _shape_of(node, operands[2]) != expected:
        raise BackendError(
            f"{node.title}: updates of shape {list(_shape_of(node, operands[2]))}, not {list(expected)}"
        )
    if indices[-1]:
        bounds.index(node, 1, operands, shape[batch : batch + indices[-1]])
    return operands


def _top(bounds: Bounds, node: Node, operands: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    shape = _shape_of(node, operands[0])
    extent = shape[_axis(node, attrs, len(shape), -1)]
    constant = known_value(operands[1]) if len(operands) > 1 else None
    count = int(attrs.get("k", 1)) if constant is None else int(constant.item())
    if not 0 <= count <= extent:
        raise BackendError(f"{node.title}: asked for the first {count} of {extent}")
    return operands


def _padded(bounds: Bounds, node: Node, operands: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    if attrs.get("mode", b"constant") != b"reflect":
        return operands
    shape = _shape_of(node, operands[0])
    constant, constant_axes = (
        known_value(operands[i]) if len(operands) > i and operands[i] is not None else None for i in (1, 3)
    )
    pads = list(attrs.get("pads", ())) if constant is None else constant.ravel().tolist()
    axes = (
        list(range(len(shape)))
        if constant_axes is None
        else [int(axis) % len(shape) for axis in constant_axes.ravel()]
    )
    for axis, before, after in zip(axes, pads, pads[len(axes) :]):
        if max(before, after) >= max(shape[axis], 1):
            raise BackendError(f"{node.title}: {max(before, after)} reflected elements of {shape[axis]}")
    return operands


def _sampled(bounds: Bounds, node: Node, operands: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    images, grids = _shape_of(node, operands[0]), _shape_of(node, operands[1])
    if images[:1] != grids[:1]:
        raise BackendError(f"{node.title}: {images[0]} images, {grids[0]} grids")
    return operands


def _unpooled(bounds: Bounds, node: Node, operands: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    shape, kernel = _shape_of(node, operands[0]), attrs["kernel_shape"]
    if len(operands) > 2 or any(attrs.get("pads", ())):
        raise BackendError(f"TVM cannot lower {node.title} (with pads, or an output_shape)", USE_ONNXRUNTIME)
    strides = attrs.get("strides", [1] * len(kernel))
    image = [(n - 1) * s + k for n, s, k in zip(shape[2:], strides, kernel)]
    if _shape_of(node, operands[1]) != shape:
        raise BackendError(
            f"{node.title}: indices of shape {list(_shape_of(node, operands[1]))}, not {list(shape)}"
        )
    bounds.index(node, 1, operands, [math.prod([*shape[:2], *image])], wraps=False)
    return operands


def _aligned(bounds: Bounds, node: Node, operands: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    from tvm import relax

    images, (count, *_) = _shape_of(node, operands[0]), _shape_of(node, operands[1])
    if _shape_of(node, operands[2]) != (count,):
        raise BackendError(f"{node.title}: not one batch index for each of {count} regions")
    finite = bounds.builder.emit(relax.op.astype(relax.op.isfinite(operands[1]), "int8"))
    bounds.add_check(Check((f"{node.title}: a region ({node.origin(1)}) is not finite",), 1, 1), finite)
    bounds.index(node, 2, operands, [images[0]], wraps=False)
    return operands


def _pooled(bounds: Bounds, node: Node, operands: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    """The operands of a pool of regions, with the indices of images moved inside the table. Each region is five floats,
    of which the first is the index of its image."""
    images = _shape_of(node, operands[0])
    batches = bounds.builder.emit_te(first_column, operands[1], primfunc_name_hint="first_column")
    column = [operands[0], batches]
    bounds.index(node, 1, column, [images[0]], wraps=False)
    operands[1] = bounds.builder.emit_te(with_first, operands[1], column[1], primfunc_name_hint="with_first")
    return operands


def first_column(x: Any) -> Any:
    """The first column of a matrix, as integers."""
    from tvm import te

    return te.compute(x.shape[:1], lambda i: to_integer(x[i, 0], "int64"), name="first_column")


def with_first(x: Any, column: Any) -> Any:
    """The matrix with `column` as its first column."""
    from tvm import te, tirx

    return te.compute(
        x.shape, lambda i, j: tirx.Select(j == 0, column[i].astype(x.dtype), x[i, j]), name="with_first"
    )


def _divided(bounds: Bounds, node: Node, operands: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    """The operands of a division of integers, with a divisor that does not crash the process. It would crash on
    division by zero, and of the least integer by -1. In both cases the divisor becomes 1. A zero is reported as an
    error."""
    import numpy as np
    from tvm import relax

    if not all(isinstance(getattr(x, "ty", None), relax.TensorType) for x in operands):
        return operands
    (x, y), kind = operands, str(operands[1].ty.dtype)
    constant, signed = known_value(y), kind.startswith("int")
    if not kind.startswith(("int", "uint")):
        return operands
    text = f"{node.title}: a divisor ({node.origin(1)}) is zero"
    if constant is not None and (constant == 0).any():
        raise BackendError(text)
    if constant is not None and not (signed and (constant == -1).any()):
        return operands

    def number(n: int) -> Any:
        return relax.const(n, kind)

    emit, op = bounds.builder.emit, relax.op
    if constant is None:
        bounds.add_check(Check((text,), 1, 1), emit(op.astype(op.not_equal(y, number(0)), "int8")))
    impossible = op.equal(y, number(0))
    if signed:
        least = op.equal(x, number(int(np.iinfo(kind).min)))
        impossible = op.logical_or(impossible, op.logical_and(least, op.equal(y, number(-1))))
    operands[1] = emit(op.where(impossible, number(1), y))
    return operands


def cast(builder: Any, x: Any, kind: str) -> Any | None:
    """Floats as integers of 32 or 64 bits, converted as ONNX Runtime's processor does. None for other conversions.

    Numbers that do not fit, and NaN, become the least integer, which is no valid index. TVM's importer would convert
    NaN and infinity to 0, which is a valid index.
    """
    from tvm import relax

    if kind not in ("int32", "int64") or not isinstance(getattr(x, "ty", None), relax.TensorType):
        return None
    if known_value(x) is not None or not str(x.ty.dtype).startswith("float") or sizes(x) is None:
        return None
    return builder.emit_te(to_integers, x, kind, primfunc_name_hint="cast")


def to_integers(x: Any, kind: str) -> Any:
    """Floats as integers (see `to_integer`)."""
    from tvm import te

    return te.compute(x.shape, lambda *i: to_integer(x[i], kind), name="cast")


def to_integer(x: Any, kind: str) -> Any:
    """A float as an integer, without its fraction. NaN, and numbers that are too large, become the least integer."""
    from tvm import tirx

    bits = int(kind.removeprefix("int"))
    wide = x.astype("float32") if str(x.dtype) in ("float16", "bfloat16") else x
    limit = tirx.const(2.0 ** (bits - 1), wide.dtype)
    fits = tirx.all(wide < limit, wide >= -limit)
    return tirx.Select(fits, wide.astype(kind), tirx.const(-(1 << (bits - 1)), kind))


RULES: Mapping[str, Callable[[Bounds, Node, list[Any], Mapping[str, Any]], list[Any]]] = {
    "Gather": _gather,
    "GatherElements": _elements,
    "Scatter": _elements,
    "ScatterElements": _elements,
    "GatherND": _coordinates,
    "ScatterND": _coordinates,
    "TopK": _top,
    "Pad": _padded,
    "GridSample": _sampled,
    "MaxUnpool": _unpooled,
    "RoiAlign": _aligned,
    "MaxRoiPool": _pooled,
    "Div": _divided,
    "Mod": _divided,
}
"""For each operator with indices: a function that moves the indices of a node inside their tables."""
