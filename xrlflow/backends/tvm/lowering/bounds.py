"""Indices that are data: none leaves its table, and one that would is reported as the caller's error.

TVM's kernels read and write wherever an index points. So each index first goes through `inside`, which counts negative
ones from the end and moves those outside to the nearest end: a kernel stays in its memory for all data, even if only
TVM's runtime is used. The model has one more output than its own: the least and the greatest of each tensor of indices.
Whatever runs the model compares them with the table sizes (`Check`), and raises an error. Constant indices are compared
when the model is compiled.
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
_SCHEDULED = {"tirx.is_scheduled": True, "op_pattern": 8}  # not fused, and not scheduled again


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the graph, as messages name it, with its results and the origins of its operands."""

    title: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    sources: Callable[[str], Sequence[str]]
    """The inputs of the model that a tensor is computed from."""

    def origin(self, operand: int) -> str:
        """Where the numbers of an operand come from, for messages."""
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
        reached, waiting = set[str](), [name]
        while waiting:
            if (tensor := waiting.pop()) not in reached:
                reached.add(tensor)
                waiting += producers[tensor].input if tensor in producers else ()
        return [name for name in inputs if name in reached]

    def title(node: Any) -> str:
        return f"{node.op_type} {node.name or next((o for o in node.output if o), '')}".strip()

    return [Node(title(node), tuple(node.output), tuple(node.input), sources) for node in graph.node]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A check and its tensor: all of it, or one column of its last dimension."""

    check: Check
    tensor: Any
    column: int | None


@dataclass(slots=True)
class Bounds:
    """The checks of a graph while it is imported with TVM's builder `builder`."""

    builder: Any
    seen: list[_Seen] = field(default_factory=list)

    def operands(self, node: Node, op: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> list[Any]:
        """The operands of a node, with indices moved inside their tables. The model will check them.

        Raises BackendError for constant indices outside, and for tables of sizes that the operator does not take.
        """
        rule = RULES.get(op)
        given = list(inputs)
        return given if rule is None else rule(self, node, given, attrs)

    def output(self) -> Any | None:
        """The additional output; None if there is nothing to check."""
        if not self.seen:
            return None
        columns = [seen.column for seen in self.seen]
        return self.builder.emit_te(
            lambda tensors: least_and_greatest(tensors, columns),
            [seen.tensor for seen in self.seen],
            primfunc_name_hint=_KERNEL,
            primfunc_attrs=_SCHEDULED,
        )

    @property
    def checks(self) -> list[Check]:
        return [seen.check for seen in self.seen]

    def look(self, check: Check, tensor: Any, column: int | None = None) -> None:
        """Check a tensor of whole numbers, or one column of it: now, if it is constant, else at run time."""
        shape = sizes(tensor)
        if shape is not None and 0 in shape:
            return
        if (known := known_value(tensor)) is not None:
            complain([check], ends_of(known if column is None else known[..., column]))
        elif not any(s.check == check and s.tensor.same_as(tensor) and s.column == column for s in self.seen):
            self.seen.append(_Seen(check, tensor, column))

    def index(
        self, node: Node, operand: int, given: list[Any], extents: Sequence[int], *, wraps: bool = True
    ) -> None:
        """Move operand `operand` of a node inside a table. There is one extent for all of it, or one for each column.

        `wraps`: negative indices count from the end.
        """
        tensor, origin = given[operand], node.origin(operand)
        for column, extent in enumerate(extents):
            low, high = -extent if wraps else 0, extent - 1
            table = f" in dimension {column}" if len(extents) > 1 else ""
            room = f"{low} to {high}" if extent else "none"
            text = (f"{node.title}: index ", f" ({origin}) is outside of its table{table}, which has {room}")
            self.look(Check(text, low, high), tensor, column if len(extents) > 1 else None)
        if known_value(tensor) is None and 0 not in (sizes(tensor) or ()):
            given[operand] = self.builder.emit_te(
                inside, tensor, list(extents), wraps, primfunc_name_hint="inside"
            )


def inside(x: Any, extents: Sequence[int], wraps: bool) -> Any:
    """Indices moved to 0 ... extent - 1. Negative ones count from the end (with `wraps`); those outside become the
    nearest end. Several extents are one for each column."""
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
    """The least and greatest number of each tensor, or of a column of its last dimension, as int64[tensors, 2]."""
    from tvm import te, tirx

    def end(x: Any, column: int | None, reduce: Callable[..., Any]) -> Any:
        kept = len(x.shape) - (column is not None)
        axes = [te.reduce_axis((0, n), name="k") for n in x.shape[:kept]]
        number = x[(*axes, column) if column is not None else tuple(axes)].astype("int64")
        return te.compute((1,), lambda _: reduce(number, axis=axes) if axes else number, name="end")

    ends = [end(x, c, reduce) for x, c in zip(tensors, columns) for reduce in (te.min, te.max)]

    def element(i: Any, j: Any) -> Any:
        found = ends[-1][0]
        for place in reversed(range(len(ends) - 1)):
            found = tirx.if_then_else(i * 2 + j == place, ends[place][0], found)
        return found

    return te.compute((len(tensors), 2), element, name=_KERNEL)


# --- The indices of each operator


def _known(node: Node, tensor: Any) -> tuple[int, ...]:
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


def _gather(bounds: Bounds, node: Node, given: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    shape = _known(node, given[0])
    bounds.index(node, 1, given, [shape[_axis(node, attrs, len(shape))]])
    return given


def _elements(bounds: Bounds, node: Node, given: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    shape, indices = _known(node, given[0]), _known(node, given[1])
    axis = _axis(node, attrs, len(shape))
    others = (i for i in range(len(shape)) if i != axis)
    if len(indices) != len(shape) or any(indices[i] > shape[i] for i in others):
        raise BackendError(
            f"{node.title}: indices of shape {list(indices)} reach beyond a table of shape {list(shape)}"
        )
    if len(given) > 2 and _known(node, given[2]) != indices:
        raise BackendError(
            f"{node.title}: updates of shape {list(_known(node, given[2]))}, not {list(indices)}"
        )
    bounds.index(node, 1, given, [shape[axis]])
    return given


def _coordinates(bounds: Bounds, node: Node, given: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    shape, indices = _known(node, given[0]), _known(node, given[1])
    batch = int(attrs.get("batch_dims", 0))
    if not indices or batch + indices[-1] > len(shape) or indices[:batch] != shape[:batch]:
        raise BackendError(
            f"{node.title}: indices of shape {list(indices)} reach beyond a table of shape {list(shape)}"
        )
    expected = indices[:-1] + shape[indices[-1] :]
    if len(given) > 2 and _known(node, given[2]) != expected:
        raise BackendError(
            f"{node.title}: updates of shape {list(_known(node, given[2]))}, not {list(expected)}"
        )
    if indices[-1]:
        bounds.index(node, 1, given, shape[batch : batch + indices[-1]])
    return given


def _top(bounds: Bounds, node: Node, given: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    shape = _known(node, given[0])
    extent = shape[_axis(node, attrs, len(shape), -1)]
    known = known_value(given[1]) if len(given) > 1 else None
    count = int(attrs.get("k", 1)) if known is None else int(known.item())
    if not 0 <= count <= extent:
        raise BackendError(f"{node.title}: asked for the first {count} of {extent}")
    return given


def _padded(bounds: Bounds, node: Node, given: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    if attrs.get("mode", b"constant") != b"reflect":
        return given
    shape = _known(node, given[0])
    known, chosen = (
        known_value(given[i]) if len(given) > i and given[i] is not None else None for i in (1, 3)
    )
    pads = list(attrs.get("pads", ())) if known is None else known.ravel().tolist()
    axes = list(range(len(shape))) if chosen is None else [int(axis) % len(shape) for axis in chosen.ravel()]
    for axis, before, after in zip(axes, pads, pads[len(axes) :]):
        if max(before, after) >= max(shape[axis], 1):
            raise BackendError(f"{node.title}: {max(before, after)} reflected elements of {shape[axis]}")
    return given


def _sampled(bounds: Bounds, node: Node, given: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    images, grids = _known(node, given[0]), _known(node, given[1])
    if images[:1] != grids[:1]:
        raise BackendError(f"{node.title}: {images[0]} images, {grids[0]} grids")
    return given


def _unpooled(bounds: Bounds, node: Node, given: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    shape, kernel = _known(node, given[0]), attrs["kernel_shape"]
    if len(given) > 2 or any(attrs.get("pads", ())):
        raise BackendError(f"TVM cannot lower {node.title} (with pads, or an output_shape)", USE_ONNXRUNTIME)
    strides = attrs.get("strides", [1] * len(kernel))
    image = [(n - 1) * s + k for n, s, k in zip(shape[2:], strides, kernel)]
    if _known(node, given[1]) != shape:
        raise BackendError(
            f"{node.title}: indices of shape {list(_known(node, given[1]))}, not {list(shape)}"
        )
    bounds.index(node, 1, given, [math.prod([*shape[:2], *image])], wraps=False)
    return given


def _aligned(bounds: Bounds, node: Node, given: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    from tvm import relax

    images, (count, *_) = _known(node, given[0]), _known(node, given[1])
    if _known(node, given[2]) != (count,):
        raise BackendError(f"{node.title}: not one batch index for each of {count} regions")
    finite = bounds.builder.emit(relax.op.astype(relax.op.isfinite(given[1]), "int8"))
    bounds.look(Check((f"{node.title}: a region ({node.origin(1)}) is not finite",), 1, 1), finite)
    bounds.index(node, 2, given, [images[0]], wraps=False)
    return given


def _pooled(bounds: Bounds, node: Node, given: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    """The first of the five numbers of a region is the index of its image, a float."""
    images = _known(node, given[0])
    batches = bounds.builder.emit_te(first_column, given[1], primfunc_name_hint="first_column")
    column = [given[0], batches]
    bounds.index(node, 1, column, [images[0]], wraps=False)
    given[1] = bounds.builder.emit_te(with_first, given[1], column[1], primfunc_name_hint="with_first")
    return given


def first_column(x: Any) -> Any:
    """The first column of a matrix in whole numbers."""
    from tvm import te

    return te.compute(x.shape[:1], lambda i: whole(x[i, 0], "int64"), name="first_column")


def with_first(x: Any, column: Any) -> Any:
    """A matrix with this first column."""
    from tvm import te, tirx

    return te.compute(
        x.shape, lambda i, j: tirx.Select(j == 0, column[i].astype(x.dtype), x[i, j]), name="with_first"
    )


def _divided(bounds: Bounds, node: Node, given: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    """Dividing integers by zero crashes the process, and so does the least one divided by -1: here it stays itself."""
    import numpy as np
    from tvm import relax

    if not all(isinstance(getattr(x, "ty", None), relax.TensorType) for x in given):
        return given
    (x, y), kind = given, str(given[1].ty.dtype)
    known, signed = known_value(y), kind.startswith("int")
    if not kind.startswith(("int", "uint")):
        return given
    text = f"{node.title}: a divisor ({node.origin(1)}) is zero"
    if known is not None and (known == 0).any():
        raise BackendError(text)
    if known is not None and not (signed and (known == -1).any()):
        return given

    def number(n: int) -> Any:
        return relax.const(n, kind)

    emit, op = bounds.builder.emit, relax.op
    if known is None:
        bounds.look(Check((text,), 1, 1), emit(op.astype(op.not_equal(y, number(0)), "int8")))
    impossible = op.equal(y, number(0))
    if signed:
        least = op.equal(x, number(int(np.iinfo(kind).min)))
        impossible = op.logical_or(impossible, op.logical_and(least, op.equal(y, number(-1))))
    given[1] = emit(op.where(impossible, number(1), y))
    return given


def cast(builder: Any, x: Any, kind: str) -> Any | None:
    """Floats as whole numbers of 32 or 64 bits, converted as ONNX Runtime's processor does. None: another conversion.

    Numbers that do not fit, and NaN, become the least number, which is no valid index. TVM's importer would convert NaN
    and infinity to 0, which is one.
    """
    from tvm import relax

    if kind not in ("int32", "int64") or not isinstance(getattr(x, "ty", None), relax.TensorType):
        return None
    if known_value(x) is not None or not str(x.ty.dtype).startswith("float") or sizes(x) is None:
        return None
    return builder.emit_te(whole_numbers, x, kind, primfunc_name_hint="cast")


def whole_numbers(x: Any, kind: str) -> Any:
    """Floats as whole numbers (see `whole`)."""
    from tvm import te

    return te.compute(x.shape, lambda *i: whole(x[i], kind), name="cast")


def whole(x: Any, kind: str) -> Any:
    """A float without its fraction, as a whole number. NaN, and numbers that are too large, become the least one."""
    from tvm import tirx

    bits = int(kind.removeprefix("int"))
    wide = x.astype("float32") if str(x.dtype) in ("float16", "bfloat16") else x
    limit = tirx.const(2.0 ** (bits - 1), wide.dtype)
    known = tirx.all(wide < limit, wide >= -limit)
    return tirx.Select(known, wide.astype(kind), tirx.const(-(1 << (bits - 1)), kind))


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
"""By operator: moves the indices of a node inside their tables."""
