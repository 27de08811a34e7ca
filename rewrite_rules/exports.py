"""What exporters leave behind: arithmetic on shapes, reductions of nothing, weights in slow formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rewrite_rules.axes import fronts, int_attr, ints_input, perm_of, reshape_numbers
from xrlflow.ir import ABSENT, Dim, DType, Node, Value
from xrlflow.rewrite import AnyRule, Op, Reader, Region, RegionRule, Val, require, worthwhile

# Shapes as values

_MOST_STEPS = 24


def dims(reader: Reader, value: Value, steps: int = _MOST_STEPS) -> tuple[Dim, ...] | None:
    """The dimensions of a value, with names where ONNX's own inference loses them; None if the rank is not known."""
    shape = reader.type(value).shape
    node = reader.producer(value) if steps else None
    if shape is None or node is None or node.const or all(isinstance(d, int) for d in shape):
        return shape
    if node.op == "Reshape" and not node.attrs.get("allowzero"):
        before, wanted = dims(reader, node.inputs[0], steps - 1), numbers(reader, node.inputs[1], steps - 1)
        if before is not None and wanted is not None and len(wanted) == len(shape):
            return _more(shape, _reshaped(before, wanted))
    elif node.op in ("Unsqueeze", "Squeeze", "Cast", "Identity", "Transpose"):
        before = dims(reader, node.inputs[0], steps - 1)
        if before is not None:
            moved = _moved(reader, node, before)
            return shape if moved is None else _more(shape, moved)
    return shape


def _more(shape: Sequence[Dim], found: Sequence[Dim]) -> tuple[Dim, ...]:
    """What was found of dimensions, where it says more than what is known."""
    return tuple(a if isinstance(a, int) or b is None else b for a, b in zip(shape, found))


def _reshaped(before: Sequence[Dim], wanted: Sequence[Dim]) -> list[Dim]:
    """The dimensions that a Reshape gives."""
    out: list[Dim] = []
    for i, dim in enumerate(wanted):
        out.append((before[i] if i < len(before) else None) if dim == 0 else dim)
    if -1 not in out:
        return out
    at = out.index(-1)
    out[at] = _quotient(before, [d for i, d in enumerate(out) if i != at])
    return out


def _quotient(whole: Sequence[Dim], parts: Sequence[Dim]) -> Dim:
    """The one dimension that is left of a product; None if it is no number and no name."""
    if None in whole or None in parts or 0 in whole or 0 in parts:
        return None
    names = Counter(d for d in whole if isinstance(d, str))
    names.subtract(d for d in parts if isinstance(d, str))
    left = [name for name, count in names.items() for _ in range(count)]
    if any(count < 0 for count in names.values()) or len(left) > 1:
        return None
    top = int(np.prod([d for d in whole if isinstance(d, int)], dtype=np.int64))
    bottom = int(np.prod([d for d in parts if isinstance(d, int)], dtype=np.int64))
    if top % bottom or (left and top != bottom):
        return None
    return left[0] if left else top // bottom


def _moved(reader: Reader, node: Node, before: Sequence[Dim]) -> list[Dim] | None:
    """The dimensions of a node that only adds, drops or permutes some."""
    if node.op in ("Cast", "Identity"):
        return list(before)
    if node.op == "Transpose":
        return [before[p] for p in perm_of(node, len(before))]
    axes = _ints(reader, node, 1)
    if axes is None:
        return None
    if node.op == "Squeeze":
        gone = {a % len(before) for a in axes}
        return [d for i, d in enumerate(before) if i not in gone]
    rank = len(before) + len(axes)
    new = {a % rank for a in axes}
    rest = iter(before)
    return [1 if i in new else next(rest) for i in range(rank)]


def _ints(reader: Reader, node: Node, index: int) -> tuple[int, ...] | None:
    """The numbers of a constant input; None if it is left out or not constant."""
    if index >= len(node.inputs) or node.inputs[index] == ABSENT:
        return None
    array = reader.val(node.inputs[index]).array_or_none
    return None if array is None else tuple(int(i) for i in np.ravel(array))


def numbers(reader: Reader, value: Value, steps: int = _MOST_STEPS) -> tuple[Dim, ...] | None:
    """What a value holds that was computed from shapes: numbers, names of dimensions, None for what is neither."""
    type = reader.type(value)
    if type.dtype not in (DType.INT64, DType.INT32) or type.rank is None or type.rank > 1:
        return None
    array = reader.val(value).array_or_none
    if array is not None:
        return tuple(int(i) for i in np.ravel(array))
    node = reader.producer(value) if steps else None
    if node is None or len(node.outputs) != 1:
        return None
    if node.op == "Shape":
        found = dims(reader, node.inputs[0], steps - 1)
        if found is None:
            return None
        end = node.attrs.get("end")
        return found[int_attr(node, "start", 0) : end if isinstance(end, int) else None]
    if node.op == "Concat":
        parts = [numbers(reader, v, steps - 1) for v in node.inputs]
        return None if None in parts else tuple(d for part in parts if part is not None for d in part)
    if node.op not in ("Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape", "Gather", "Slice"):
        return None
    source = numbers(reader, node.inputs[0], steps - 1)
    if source is None or node.op not in ("Gather", "Slice"):
        return source
    if node.op == "Gather":
        places = _ints(reader, node, 1)
        if places is None or not all(-len(source) <= i < len(source) for i in places):
            return None
        return tuple(source[i] for i in places)
    starts, ends, strides = _ints(reader, node, 1), _ints(reader, node, 2), _ints(reader, node, 4)
    if starts is None or ends is None or (len(node.inputs) > 4 and strides is None):
        return None
    return source[starts[0] : ends[0] : strides[0] if strides else 1]


class FoldComputedShape(RegionRule):
    """reshape(x, s) -> reshape(x, constant)  for an s that is computed from the dimensions of x.

    Expand alike; one that changes nothing goes. Names of dimensions are followed through what is done to a shape, where
    ONNX's own inference gives up: casts, negative indices, and the one dimension that a Reshape leaves open.
    """

    certain = True
    anchors = ("Reshape", "Expand")
    examples = (
        "agraph (float[N,3,4] x) => (float[A,12] y) { t = Constant<value_ints = [12]>() s = Shape(x)"
        " i = Constant<value_ints = [-3]>() g = Gather(s, i) c = Cast<to = 6>(g) d = Cast<to = 7>(c)"
        " f = Concat<axis = 0>(d, t) y = Reshape(x, f) }",
        "agraph (float[N,6] x) => (float[A,B,C] y) { r = Constant<value_ints = [-1, 2, 3]>()"
        " t = Constant<value_ints = [2]>()"
        " u = Constant<value_ints = [1]>() v = Constant<value_ints = [0]>() a = Reshape(x, r) s = Shape(x)"
        " g = Slice(s, v, u, v) h = Cast<to = 6>(g) k = Cast<to = 7>(h) w = Constant<value_ints = [3]>()"
        " f = Concat<axis = 0>(k, t, w) y = Expand(a, f) }",
        "agraph (float[N,M,4] x) => (float[A,B,C] y) { s = Shape(x) i = Constant<value_int = -2>()"
        " j = Constant<value_int = 0>()"
        " z = Constant<value_ints = [0]>() g = Gather(s, i) h = Gather(s, j) k = Unsqueeze(g, z) l = Unsqueeze(h, z)"
        " k2 = Cast<to = 6>(k) k3 = Cast<to = 7>(k2) o = Constant<value_ints = [2, 2]>() f = Concat<axis = 0>(l, k3, o)"
        " y = Reshape(x, f) }",
        "agraph (float[N,1,4] x) => (float[A,B,C] y) { s = Shape(x) c = Cast<to = 6>(s) d = Cast<to = 7>(c)"
        " y = Expand(x, d) }",
    )  # fmt: skip

    def find(self, reader: Reader, node: Node) -> Region | None:
        source, shape = node.inputs
        if reader.is_const(shape) or node.const:
            return None
        before, wanted = dims(reader, source), numbers(reader, shape)
        if before is None or wanted is None or None in wanted:
            return None
        if node.op == "Expand":
            if len(wanted) > len(before):
                before = (1,) * (len(wanted) - len(before)) + before
            own = before[len(before) - len(wanted) :]
            if all(d in (1, b) for d, b in zip(wanted, own)) and reader.type(source).rank == len(before):
                return Region(node.outputs, (source,), (node,), None)
            require(
                all(isinstance(d, int) or d == b for d, b in zip(wanted, own)), "a dimension is not known"
            )
            return Region(node.outputs, (source,), (node,), [d if isinstance(d, int) else 1 for d in wanted])
        require(not node.attrs.get("allowzero") or 0 not in wanted, "a 0 means 0")
        return Region(node.outputs, (source,), (node,), reshape_numbers(before, _reshaped(before, wanted)))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        if region.data is None:
            return x
        return op[region.nodes[0].op](x, list(region.data))


class MergeFlattenedTranspose(RegionRule):
    """reshape(transpose(reshape(x, [-1, m, n])), [..., n, m]) -> transpose(x)  of the last dimensions of x.

    The leading dimensions are put together and taken apart again, by shapes that are computed.
    """

    certain = True
    anchors = ("Reshape",)
    reads_from = ("Transpose",)
    examples = tuple(
        f"agraph (float[{leading},M,4] x) => (float[{','.join('ABCDE'[: leading.count(',') + 3])}] y) {{"
        " all = Constant<value_ints = [-1]>() two = Constant<value_ints = [-2]>() low = Constant<value_ints = [0]>()"
        " end = Constant<value_ints = [100]>() s = Shape(x) m = Slice(s, two, all) n = Slice(s, all, end)"
        f" lead = Slice(s, low, two) f = Concat<axis = 0>({first}) a = Reshape(x, f)"
        f" b = Transpose<perm = [0, 2, 1]>(a) g = Concat<axis = 0>({second}) y = Reshape(b, g) }}"
        for leading in ("N,3", "2,N", "N,K", "2,3,N", "5", "3,1", "N", "2,3,4")
        for first, second in (("all, m, n", "lead, n, m"),)
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        transpose = reader.producer(node.inputs[0])
        flat = None if transpose is None else reader.producer(transpose.inputs[0])
        if (
            transpose is None
            or transpose.op != "Transpose"
            or flat is None
            or flat.op != "Reshape"
            or flat.const
        ):
            return None
        if node.attrs.get("allowzero") or flat.attrs.get("allowzero"):
            return None
        before, first = dims(reader, flat.inputs[0]), numbers(reader, flat.inputs[1])
        second = numbers(reader, node.inputs[1])
        if before is None or first is None or second is None or None in before or len(before) != len(second):
            return None
        perm = perm_of(transpose, len(first))
        behind = len(first) - 1
        leading = len(before) - behind
        require(perm[0] == 0 and leading > 0, "the leading dimensions move")
        own = [before[i] if d == 0 and i < len(before) else d for i, d in enumerate(first)]
        require(tuple(own[1:]) == before[leading:], "the last dimensions are not those of x")
        moved = (*range(leading), *(p - 1 + leading for p in perm[1:]))
        after = [before[p] for p in moved]
        require(tuple(after) == second, "the dimensions are not those of x")
        return Region(node.outputs, (flat.inputs[0],), (node, transpose, flat), moved)

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Transpose(x, perm=list(region.data))


class ReplaceUnitReduceBySqueeze(RegionRule):
    """reduce(x) -> squeeze(x)  over dimensions of 1: sum, mean, product, greatest and least of one number are it."""

    anchors = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
    examples = tuple(
        f"agraph (float[N,1,3] x) => (float[{out}] y) {{ i = Constant<value_ints = [{axis}]>()"
        f" y = {name}{attrs}(x, i) }}"
        for name in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
        for axis, attrs, out in ((1, "<keepdims = 0>", "N,3"), (-2, "", "N,1,3"))
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        shape = reader.type(node.inputs[0]).shape
        axes = ints_input(reader, node, 1)
        if shape is None or not axes:
            return None
        places = fronts(axes, len(shape))
        require(all(shape[a] == 1 for a in places), "a dimension is not 1")
        kept = int_attr(node, "keepdims", 1)
        return Region(node.outputs, (node.inputs[0],), (node,), () if kept else places)

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Squeeze(x, list(region.data)) if region.data else x


# Quantised weights


class UseSignedWeights(RegionRule):
    """matmulinteger(x, w, z, v) -> matmulinteger(x, w - 128, z, v - 128)  for unsigned weights w.

    ONNX Runtime has instructions for products of unsigned with signed bytes where the processor does not saturate their
    sums (VNNI), and multiplies two unsigned ones at half the speed.
    """

    assumes = "vnni"
    backend = "onnxruntime"
    unpriced = True
    anchors = ("MatMulInteger",)
    examples = tuple(
        f"agraph (uint8[{shape},3] x, uint8 z) => (int32[{shape},2] y) <uint8[3,2] w = {{0, 255, 7, 128, 127, 30}},"
        f" uint8{kind} v = {value}> {{ y = MatMulInteger(x, w, z, v) }}"
        for shape in ("N", "2,N", "4", "2,5")
        for kind, value in (("", "{128}"), ("[2]", "{120, 255}"))
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if len(node.inputs) < 4 or ABSENT in node.inputs:
            return None
        x, w, z, v = node.inputs
        require(reader.type(x).dtype == DType.UINT8, "the other factor is signed")
        require(
            reader.type(w).dtype == DType.UINT8 and reader.type(v).dtype == DType.UINT8,
            "the weights are signed",
        )
        worthwhile(reader.is_const(w) and reader.is_const(v), "the weights are computed")
        return Region(node.outputs, (x, w, z, v), (node,))

    def target(self, op: Op, region: Region, x: Val, w: Val, z: Val, v: Val) -> Any:
        def signed(u: Val) -> Any:
            return op.Cast(op.Sub(op.Cast(u, to=int(DType.INT32)), 128), to=int(DType.INT8))

        return op.MatMulInteger(x, signed(w), z, signed(v))


RULES: tuple[AnyRule, ...] = (
    FoldComputedShape(),
    MergeFlattenedTranspose(),
    ReplaceUnitReduceBySqueeze(),
    UseSignedWeights(),
)
