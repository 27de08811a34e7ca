"""Rules for Reshape, Squeeze, Unsqueeze and Flatten: they merge them, cancel them, or move them to where they
cancel.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rewrite_rules.axes import axis_of, data_inputs, fronts, ints_input, rank_of, reshape_numbers, same_dims
from rewrite_rules.elementwise import read_once
from rewrite_rules.examples import graphs
from xrlflow.ir import Dim, Node, Value
from xrlflow.ops.axes import BROADCAST, UNARY
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, profitable, require

Shape = tuple[Dim, ...] | None

# Operators that give the same data another shape.
VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")


def maker(reader: Reader, value: Value, ops: Collection[str]) -> Node | None:
    """The node that computes a value at run time, if it has one of these operators; else None."""
    node = reader.producer(value)
    return None if node is None or node.const or node.op not in ops else node


def makers(reader: Reader, values: Sequence[Value], ops: Collection[str]) -> list[Node]:
    """The nodes that compute two or more values at run time, all by these operators; empty if another operator computes
    one.
    """
    nodes = [n for v in values if (n := maker(reader, v, ops)) is not None]
    return nodes if 1 < len(nodes) == len(values) else []


class MergeReshapes(RegionRule, family="reshape"):
    """reshape(reshape(x)) -> reshape(x), or x;  Squeeze, Unsqueeze and Flatten alike, in any mixture."""

    may_lose_errors = ("sizes", "indices")
    anchors = VIEWS
    reads_from = VIEWS
    examples = graphs(
        "(float[N,3,4] x) => (float[N,12] y) { a = Unsqueeze(x, [1]) y = Reshape(a, [0, 12]) }",
        "(float[N,3,4] x) => (float[N,3,4] y) { a = Unsqueeze(x, [3]) b = Squeeze(a, [3]) y = Relu(b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = maker(reader, node.inputs[0], VIEWS)
        if inner is None:
            return None
        before, after = reader.type(inner.inputs[0]).shape, node.types[0].shape
        if same_dims(before, after):
            return Region(node.outputs, inner.inputs[:1], (node, inner))
        require(before is not None and after is not None, "a rank is not known")
        numbers = tuple(reshape_numbers(before or (), after or ()))
        return Region(node.outputs, inner.inputs[:1], (node, inner), numbers)

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return x if region.data is None else op.Reshape(x, list(region.data))


class MergeUnitAxes(RegionRule, family="reshape"):
    """unsqueeze(unsqueeze(x)) -> unsqueeze(x), squeeze(squeeze(x)) -> squeeze(x), and mixtures that become one of both.

    The axes alone say that the result is right, so several dimensions may be open, which no Reshape can name.
    """

    may_lose_errors = ("sizes",)
    canonicalises = True
    anchors = ("Unsqueeze", "Squeeze")
    reads_from = ("Unsqueeze", "Squeeze")
    examples = graphs(
        "(float[N,M] x) => (float[N,1,M,1] y) { a = Unsqueeze(x, [1]) y = Unsqueeze(a, [-1]) }",
        "(float[N,1,M,1] x) => (float[N,M] y) { a = Squeeze(x, [1]) y = Squeeze(a, [2]) }",
        "(float[N,M] x) => (float[N,1,M] y) { a = Unsqueeze(x, [1, 2]) y = Squeeze(a, [-2]) }",
        "(float[N,1,M] x) => (float[N,M] y) { a = Unsqueeze(x, [0]) y = Squeeze(a, [0, 2]) }",
    )
    near_misses = graphs(
        "(float[N,1,M] x) => (float[1,N,M] y) { a = Squeeze(x, [1]) y = Unsqueeze(a, [0]) }",
        "(float[N,M] x) => (float[A,B] y) { a = Unsqueeze(x, [1]) y = Squeeze(a) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = maker(reader, node.inputs[0], self.reads_from)
        if inner is None:
            return None
        rank = rank_of(reader, inner.inputs[0])
        left: list[int | None] = list(range(rank))  # the axes of x that remain; None: a new one
        for view in (inner, node):
            axes = ints_input(reader, view, 1)
            if not axes:  # a Squeeze drops all dimensions of 1
                return None
            if view.op == "Squeeze":
                dropped = fronts(axes, len(left))
                left = [own for at, own in enumerate(left) if at not in dropped]
            else:
                added, old = fronts(axes, len(left) + len(axes)), iter(left)
                left = [None if at in added else next(old) for at in range(len(left) + len(axes))]
        new = tuple(at for at, own in enumerate(left) if own is None)
        gone = tuple(axis for axis in range(rank) if axis not in left)
        profitable(not (new and gone), "nothing is gained")
        return Region(node.outputs, inner.inputs[:1], (node, inner), (new, gone))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        new, gone = region.data
        if new:
            return op.Unsqueeze(x, list(new))
        return op.Squeeze(x, list(gone)) if gone else x


class CancelUnsqueeze(Rule, family="reshape"):
    """squeeze(unsqueeze(x, axes), axes) -> x, whatever the dimensions."""

    shapes = "x a:const b:const"
    allow_multi_use = True

    def source(self, op: Op, x: Any, a: Any, b: Any) -> Any:
        return op.Squeeze(op.Unsqueeze(x, a), b)

    def where(self, m: Captures, x: Val, a: Val, b: Val) -> None:
        rank = x.rank + len(a.ints)
        require(set(fronts(a.ints, rank)) == set(fronts(b.ints, rank)), "the axes differ")

    def target(self, op: Op, x: Val, a: Val, b: Val) -> Any:
        return x


class CancelSqueeze(Rule, family="reshape"):
    """unsqueeze(squeeze(x, axes), axes) -> x, whatever the dimensions."""

    may_lose_errors = ("sizes",)
    shapes = "x a:const b:const"
    allow_multi_use = True

    def source(self, op: Op, x: Any, a: Any, b: Any) -> Any:
        return op.Unsqueeze(op.Squeeze(x, a), b)

    def where(self, m: Captures, x: Val, a: Val, b: Val) -> None:
        require(set(fronts(a.ints, x.rank)) == set(fronts(b.ints, x.rank)), "the axes differ")

    def target(self, op: Op, x: Val, a: Val, b: Val) -> Any:
        return x


# Through element-wise operators


def _stays(shape: Shape, before: Shape, after: Shape) -> bool:
    """Whether a small operand broadcasts alike against both shapes: it is a scalar, or has only the last dimension."""
    if shape is None or before is None or after is None or len(shape) > min(1, len(before), len(after)):
        return False
    return shape in ((), (1,)) or (shape[0] is not None and shape[0] == before[-1] == after[-1])


class _PushDown(RegionRule, family="reshape"):
    """f(reshape(x), ...) -> reshape(f(x, ...))."""

    reads_from = VIEWS

    def find(self, reader: Reader, node: Node) -> Region | None:
        operands, bounds = data_inputs(node)
        views = [maker(reader, v, VIEWS) for v in operands]
        first = next(filter(None, views), None)
        if first is None:
            return None
        before, after = reader.type(first.inputs[0]).shape, first.types[0].shape
        for v, view in zip(operands, views):
            if view is None:
                require(_stays(reader.type(v).shape, before, after), "an operand is not reshaped")
                continue
            same = same_dims(before, reader.type(view.inputs[0]).shape) and same_dims(
                after, view.types[0].shape
            )
            require(view is first or same, "operands are reshaped in different ways")
            profitable(read_once(reader, v), "the reshape is read elsewhere")
        inputs = [v if view is None else view.inputs[0] for v, view in zip(operands, views)]
        shape = first.inputs[1:]
        data = (node.op, node.attrs, len(inputs), first.op, first.attrs, len(shape))
        nodes = tuple({n.id: n for n in (node, *filter(None, views))}.values())
        return Region(node.outputs, (*inputs, *shape, *bounds), nodes, data)

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        name, attrs, count, view, view_attrs, more = region.data
        y = op[name](*inputs[:count], *inputs[count + more :], attrs=attrs)
        return op[view](y, *inputs[count : count + more], attrs=view_attrs)


class _PushUp(RegionRule, family="reshape"):
    """reshape(f(x, ...)) -> f(reshape(x), ...)."""

    anchors = VIEWS

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = maker(reader, node.inputs[0], self.reads_from or ())
        if inner is None:
            return None
        operands, bounds = data_inputs(inner)
        viewed = self._viewed_operands(reader, inner, node, operands) if inner.op in BROADCAST else (True,)
        profitable(read_once(reader, node.inputs[0]), "the function is read elsewhere")
        shape = node.inputs[1:]
        data = (inner.op, inner.attrs, viewed, node.op, node.attrs, len(shape))
        return Region(node.outputs, (*operands, *shape, *bounds), (node, inner), data)

    @staticmethod
    def _viewed_operands(
        reader: Reader, inner: Node, node: Node, operands: Sequence[Value]
    ) -> tuple[bool, ...]:
        """For each operand, whether it is reshaped."""
        before, after = inner.types[0].shape, node.types[0].shape
        changes = tuple(not _stays(reader.type(v).shape, before, after) for v in operands)
        changed = [v for v, moves in zip(operands, changes) if moves]
        require(all(same_dims(reader.type(v).shape, before) for v in changed), "an operand has another shape")
        views = any(maker(reader, v, VIEWS) for v in changed)
        profitable(sum(not reader.is_const(v) for v in changed) == 1 or views, "no operand is reshaped")
        return changes

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        name, attrs, viewed, view, view_attrs, more = region.data
        shape, bounds = inputs[len(viewed) : len(viewed) + more], inputs[len(viewed) + more :]
        operands = [op[view](v, *shape, attrs=view_attrs) if moves else v for v, moves in zip(inputs, viewed)]
        return op[name](*operands, *bounds, attrs=attrs)


class PushReshapeDown(_PushDown):
    """f(reshape(x)) -> reshape(f(x))  for f element by element, of one input;  the other views alike."""

    anchors = UNARY
    examples = graphs(
        "(float[N,3,4] x) => (float[N,12] y) { a = Reshape(x, [0, -1]) y = Relu(a) }",
        "(float[N,3] x) => (float[N,1,3] y) { a = Unsqueeze(x, [1]) y = Tanh(a) }",
        "(float[2,6] x) => (float[3,4] y) { a = Reshape<allowzero=1>(x, [3, 4]) y = Sigmoid(a) }",
    )


class PushReshapeUp(_PushUp):
    """reshape(f(x)) -> f(reshape(x))  for f element by element, of one input;  the other views alike."""

    reads_from = UNARY
    examples = graphs(
        "(float[N,3,4] x) => (float[N,12] y) { a = Relu(x) y = Reshape(a, [0, -1]) }",
        "(float[N,3,4] x) => (float[N,12] y) { a = Relu(x) y = Flatten(a) }",
    )


class PushReshapesDown(_PushDown):
    """f(reshape(x), reshape(y)) -> reshape(f(x, y))  for f element by element, x and y of one shape.

    Operands may also be scalars, or vectors along the last dimension if the reshape leaves it whole.
    """

    anchors = BROADCAST
    examples = graphs(
        "(float[N,3,4] x, float[4] b) => (float[M,4] y) { a = Reshape(x, [-1, 4]) y = Add(a, b) }",
        "(float[N,3,4] x, float[N,3,4] z) => (float[N,12] y) { a = Flatten(x) b = Flatten(z) y = Mul(a, b) }",
    )


class PushReshapesUp(_PushUp):
    """reshape(f(x, y)) -> f(reshape(x), reshape(y))  for f element by element, x and y of one shape.

    The rule applies if an operand is the result of a reshape, or if all operands but one are constant or need no
    reshape.
    """

    reads_from = BROADCAST
    examples = graphs(
        "(float[N,3,4] x, float[4] b) => (float[M,4] y) { a = Add(x, b) y = Reshape(a, [-1, 4]) }",
        "(float[N,12] x, float[N,3,4] z) => (float[N,3,4] y) "
        "{ a = Flatten(z) b = Add(x, a) y = Reshape(b, [0, 3, 4]) }",
    )


# Through matrix products


def _rows(reader: Reader, before: Value, after: Value) -> None:
    """Refuse a view that changes the last dimension."""
    a, b = reader.val(before).shape, reader.val(after).shape
    require(a and b and a[-1] is not None and a[-1] == b[-1], "the last dimension changes")
    require(a[-1] != 0, "what has no elements has many shapes")


class PushReshapeThroughMatMul(RegionRule, family="reshape"):
    """reshape(x) @ w -> reshape(x @ w)  for a matrix w, when the reshape keeps the last dimension."""

    may_lose_errors = ("sizes",)
    anchors = ("MatMul",)
    reads_from = VIEWS
    examples = graphs(
        "(float[2,3,4] x, float[4,5] w) => (float[6,5] y) { a = Reshape(x, [6, 4]) y = MatMul(a, w) }",
        "(float[N,M,4] x, float[4,5] w) => (float[N,M,1,5] y) { a = Reshape(x, [0, 0, 1, 4]) y = MatMul(a, w) }",
    )
    near_misses = graphs(
        "(float[2,6] x, float[4,5] w) => (float[3,5] y) { a = Reshape(x, [3, 4]) y = MatMul(a, w) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = maker(reader, node.inputs[0], VIEWS)
        if inner is None:
            return None
        require(reader.type(node.inputs[1]).rank == 2, "the right factor is not a matrix")
        _rows(reader, inner.inputs[0], node.inputs[0])
        profitable(read_once(reader, node.inputs[0]), "the reshape is read elsewhere")
        before, after = reader.val(inner.inputs[0]).shape, reader.val(node.outputs[0]).shape
        numbers = tuple(reshape_numbers((*before[:-1], after[-1]), after))
        return Region(node.outputs, (inner.inputs[0], node.inputs[1]), (node, inner), numbers)

    def target(self, op: Op, region: Region, x: Val, w: Val) -> Any:
        return op.Reshape(op.MatMul(x, w), list(region.data))


class PushReshapeIntoMatMul(RegionRule, family="reshape"):
    """reshape(x @ w) -> reshape(x) @ w  for a matrix w, when the reshape keeps the last dimension."""

    may_lose_errors = ("sizes",)
    nonempty = True
    anchors = VIEWS
    examples = graphs(
        "(float[2,3,4] x, float[4,5] w) => (float[6,5] y) { a = MatMul(x, w) y = Reshape(a, [6, 5]) }",
    )
    near_misses = graphs(
        "(float[2,3,4] x, float[4,0] w) => (float[5,0] y) { a = MatMul(x, w) y = Reshape<allowzero=1>(a, [5, 0]) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = maker(reader, node.inputs[0], ("MatMul",))
        if inner is None:
            return None
        x, w = inner.inputs
        require(reader.type(w).rank == 2, "the right factor is not a matrix")
        _rows(reader, node.inputs[0], node.outputs[0])
        profitable(read_once(reader, node.inputs[0]), "the product is read elsewhere")
        before, after = reader.val(x).shape, node.types[0].shape or ()
        numbers = tuple(reshape_numbers(before, (*after[:-1], before[-1])))
        return Region(node.outputs, (x, w), (node, inner), numbers)

    def target(self, op: Op, region: Region, x: Val, w: Val) -> Any:
        return op.MatMul(op.Reshape(x, list(region.data)), w)


class PullUnsqueezeOutOfConcat(RegionRule, family="reshape"):
    """concat_a(unsqueeze_a(x0), ..., unsqueeze_a(xn)) -> reshape(concat_a(x0, ..., xn))  for x of one shape.

    The steps of an unrolled recurrence are stacked in this way. A single view replaces many.
    """

    may_lose_errors = ("sizes",)
    anchors = ("Concat",)
    reads_from = ("Unsqueeze",)
    examples = graphs(
        "(float[N,3] x, float[N,3] z) => (float[N,2,3] y) "
        "{ a = Unsqueeze(x, [1]) b = Unsqueeze(z, [1]) y = Concat<axis=1>(a, b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        unsqueezes = makers(reader, node.inputs, ("Unsqueeze",))
        if not unsqueezes:
            return None
        rank = rank_of(reader, node.outputs[0])
        axis = axis_of(node, rank)
        axes = {ints_input(reader, p, 1) for p in unsqueezes}
        require(axes in ({(axis,)}, {(axis - rank,)}), "another axis is inserted")
        require(axis < rank - 1, "the new axis is the last")
        profitable(all(read_once(reader, v) for v in node.inputs), "a part is read elsewhere")
        before = [*reader.val(unsqueezes[0].inputs[0]).shape]
        before[axis] = None  # stands for the concatenated dimension: no dimension of the result equals it
        numbers = tuple(reshape_numbers(before, node.types[0].shape or ()))
        inputs = tuple(p.inputs[0] for p in unsqueezes)
        return Region(node.outputs, inputs, (node, *unsqueezes), (axis, numbers))

    def target(self, op: Op, region: Region, *x: Val) -> Any:
        axis, numbers = region.data
        return op.Reshape(op.Concat(*x, axis=axis), numbers)
