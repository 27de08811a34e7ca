"""Products with one weight: steps of an unrolled recurrence, towers that share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xrlflow.ir import FLOATS, Attrs, Node, Value
from xrlflow.rewrite import AnyRule, Op, Reader, Region, RegionRule, Val, common_source, require


@dataclass(frozen=True, slots=True)
class _Parts:
    """How the products are made: operator and attributes, rows of each input, and, if all inputs are
    Gather(X, number) along one axis, that axis and the numbers.
    """

    op: str
    attrs: Attrs
    rows: tuple[int, ...]
    axis: int | None
    indices: tuple[int, ...]


class MergeSharedWeightProducts(RegionRule):
    """x0@w, x1@w, ..., xn@w -> split([x0; x1; ...; xn] @ w), also for Gemm with one bias.

    The inputs must not depend on the products: they come from one tensor by operators that only move data (the
    steps of a sequence), or from inputs of the graph. If all are Gather(X, t), the rows are taken from X at once.
    """

    anchors = ("MatMul", "Gemm")
    dtypes = FLOATS
    examples = (
        "agraph (float[2,3,4] x, float[4,5] w) => (float[2,5] a, float[2,5] b) {"
        " i = Constant<value_int=0>() j = Constant<value_int=1>() x0 = Gather<axis=1>(x, i) x1 = Gather<axis=1>(x, j)"
        " a = MatMul(x0, w) b = MatMul(x1, w) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        weight, rest = node.inputs[1], node.inputs[2:]
        if reader.is_const(node.inputs[0]) or not reader.is_const(weight) or node.attrs.get("transA"):
            return None
        own = _origin(reader, node.inputs[0])
        group = [
            user
            for user in reader.users(weight)
            if user.op == node.op
            and user.attrs == node.attrs
            and user.inputs[1:] == (weight, *rest)
            and user.inputs[0] != weight
            and not user.types[0].const
            and _origin(reader, user.inputs[0]) == own
        ]
        if len(group) < 2:
            return None
        if min(user.id for user in group) != node.id:
            return None  # the group is found once, from its least member
        require(len({user.inputs[0] for user in group}) == len(group), "the same product twice")
        require(common_source(reader, [u.inputs[0] for u in group]), "an input may depend on a product")
        if rest:
            bias = reader.val(rest[0])
            rows = 1 if bias.rank < 2 else bias.shape[-2]
            require(bias.const and rows == 1, "the bias differs from row to row")
        require(reader.val(weight).rank == 2, "the weight is no matrix")
        shapes = [reader.val(u.inputs[0]).sizes for u in group]
        require(len(shapes[0]) >= 2 and len({s[1:] for s in shapes}) == 1, "the inputs cannot be stacked")
        gathered = [_gathered(reader, u.inputs[0]) for u in group]
        tensors = {g[:2] for g in gathered if g is not None}
        if all(g is not None for g in gathered) and len(tensors) == 1:
            order = sorted(range(len(group)), key=lambda i: gathered[i][2])  # type: ignore[index]
            (source, axis) = tensors.pop()
            indices = tuple(gathered[i][2] for i in order)  # type: ignore[index]
            group = [group[i] for i in order]
            inputs: tuple[Value, ...] = (source, weight, *rest)
        else:
            axis, indices = None, ()
            inputs = (weight, *rest, *(u.inputs[0] for u in group))
        heights = tuple(reader.val(u.inputs[0]).size(0) for u in group)
        parts = _Parts(node.op, node.attrs, heights, axis, indices)
        outputs = tuple(u.outputs[0] for u in group)
        return Region(outputs, inputs, tuple(group), (parts, len(rest)))

    def target(self, op: Op, region: Region, *given: Val) -> Any:
        parts, biases = region.data
        if parts.axis is None:
            weight, *more = given[: 1 + biases]
            rows = op.Concat(*given[1 + biases :], axis=0)
        else:
            source, weight, *more = given
            rows = _rows(op, source, parts)
        product = op[parts.op](rows, weight, *more, attrs=parts.attrs)
        return op.Split(product, axis=0, sizes=parts.rows)


def _rows(op: Op, source: Val, parts: _Parts) -> Any:
    """Gather(X, t) for each t, one under the other."""
    axis, indices = parts.axis, parts.indices
    assert axis is not None
    taken = source
    if indices != tuple(range(source.size(axis))):
        taken = op.Gather(source, list(indices), axis=axis)
    if axis and any(d != 1 for d in source.sizes[:axis]):
        order = [axis, *(i for i in range(source.rank) if i != axis)]
        taken = op.Transpose(taken, perm=order)
    others = [d for i, d in enumerate(source.sizes) if i != axis]
    return op.Reshape(taken, [len(indices) * others[0], *others[1:]])


_STEPS = frozenset(("Slice", "Gather", "Split", "Squeeze", "Unsqueeze", "Reshape", "Transpose", "Identity"))


def _origin(reader: Reader, value: Value) -> Value:
    """The tensor that a value is a part of; 0 for parts of a graph's inputs, which depend on nothing."""
    for _ in range(6):
        node = reader.producer(value)
        if node is None or node.op not in _STEPS:
            break
        value = node.inputs[0]
    return Value(0) if value in reader.graph.inputs else value


def _gathered(reader: Reader, value: Value) -> tuple[Value, int, int] | None:
    """(X, axis, t) if a value is Gather(X, t) for a number t that is not negative."""
    node = reader.producer(value)
    if node is None or node.op != "Gather":
        return None
    index = reader.val(node.inputs[1])
    if not index.known or index.rank != 0 or index.scalar < 0:
        return None
    source = reader.val(node.inputs[0])
    axis = node.attrs.get("axis", 0)
    assert isinstance(axis, int)
    if source.type.shape is None or not source.type.is_static:
        return None
    return node.inputs[0], axis % source.rank, int(index.scalar)


RULES: tuple[AnyRule, ...] = (MergeSharedWeightProducts(),)
