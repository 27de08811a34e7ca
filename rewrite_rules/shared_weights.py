"""Rules for several products with one weight: the steps of an unrolled recurrence, or towers that share weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rewrite_rules.examples import graphs
from rewrite_rules.slices import Piece, piece
from xrlflow.ir import ABSENT, FLOATS, Attrs, Dim, Node, Value
from xrlflow.rewrite import Op, Reader, Refused, Region, RegionRule, Val, common_source, require


@dataclass(frozen=True, slots=True)
class _Stack:
    """Describes how several products become one.

    The products have operator `op` and `attrs`. Their inputs are joined along `axis`; `sizes` are the inputs' sizes
    along it (None: all have the same unknown size). `source_axis` is None if a Concat joins the inputs. Otherwise the
    inputs are the positions `indices` of one tensor along that axis; `keeps_axis` says whether they still have the
    axis.
    """

    op: str
    attrs: Attrs
    count: int
    axis: int
    sizes: tuple[int, ...] | None
    source_axis: int | None = None
    indices: tuple[int, ...] = ()
    keeps_axis: bool = True


# How many parts of one tensor are followed at most, and how many readers of each part.
_FEW_PARTS, _FEW_READERS = 8, 16


class MergeSharedWeightProducts(RegionRule, family="shared_weights"):
    """x0@w, x1@w, ..., xn@w -> split([x0; x1; ...; xn] @ w), also for Gemm with one bias.

    The inputs must not depend on the products: they come from one tensor by operators that only move data (the steps of
    a sequence), or from inputs of the graph. If all inputs are positions of one tensor along one axis, one cut takes
    all of them; if they are the whole tensor, nothing is cut.
    """

    may_lose_errors = ("sizes",)
    anchors = ("MatMul", "Gemm")
    dtypes = FLOATS
    examples = graphs(
        "(float[2,3,4] x, float[4,5] w) => (float[2,5] a, float[2,5] b) { x0 = Gather<axis=1>(x, 0) "
        "x1 = Gather<axis=1>(x, 1) a = MatMul(x0, w) b = MatMul(x1, w) }",
        "(float[N,2,4] x) => (float[N,2] a, float[N,2] b) <float[4,2] w = {1,2,3,4,5,6,7,8}> "
        "{ x0 = Gather<axis=1>(x, 0) x1 = Gather<axis=1>(x, 1) a = MatMul(x0, w) b = MatMul(x1, w) }",
        "(float[2,N,4] x) => (float[N,2] a, float[N,2] b) <float[4,2] w = {1,2,3,4,5,6,7,8}> "
        "{ x0 = Gather<axis=0>(x, 0) x1 = Gather<axis=0>(x, 1) a = MatMul(x0, w) b = MatMul(x1, w) }",
        "(float[2,4] x, float[3,4] z) => (float[2,5] a, float[3,5] b) "
        "<float[5,4] w = {1,2,3,4,5,6,7,8,9,8,7,6,5,4,3,2,1,2,3,4}> { a = Gemm<transB=1>(x, w, [1.0, 2, 3, 4, 5]) "
        "b = Gemm<transB=1>(z, w, [1.0, 2, 3, 4, 5]) }",
        "(float[2,6,4] x) => (float[2,2,3] a, float[2,4,3] b) <float[4,3] w = {1,2,3,4,5,6,7,8,9,8,7,6}> "
        "{ p = Slice(x, [0], [2], [1]) q = Slice(x, [2], [6], [1]) a = MatMul(p, w) b = MatMul(q, w) }",
        "(float[2,6,4] x) => (float[2,2,3] a, float[2,3,3] b) <float[4,3] w = {1,2,3,4,5,6,7,8,9,8,7,6}> "
        "{ p = Slice(x, [0], [2], [1]) q = Slice(x, [3], [6], [1]) a = MatMul(p, w) b = MatMul(q, w) }",
        "(float[2,6,4] x) => (float[2,1,3] a, float[2,2,3] b, float[2,3,3] c) "
        "<float[4,3] w = {1,2,3,4,5,6,7,8,9,8,7,6}> { p, q, r = Split<axis=1>(x, [1, 2, 3]) a = MatMul(p, w) "
        "b = MatMul(q, w) c = MatMul(r, w) }",
        "(float[3,2,4] x) => (float[2,3] a, float[2,3] b) <float[4,3] w = {1,2,3,4,5,6,7,8,9,8,7,6}> "
        "{ p = Gather(x, 2) q = Gather(x, 0) a = MatMul(p, w) b = MatMul(q, w) }",
        "(float[2,5,4] x) => (float[2,3] a, float[2,3] b, float[2,3] c) <float[4,3] w = {1,2,3,4,5,6,7,8,9,8,7,6}> "
        "{ p = Gather<axis=1>(x, 1) q = Gather<axis=1>(x, 3) r = Gather<axis=1>(x, 2) a = MatMul(p, w) "
        "b = MatMul(q, w) c = MatMul(r, w) }",
        "(float[2,N,5,4] x) => (float[2,N,3] a, float[2,N,3] b) <float[4,3] w = {1,2,3,4,5,6,7,8,9,8,7,6}> "
        "{ p = Gather<axis=2>(x, 1) q = Gather<axis=2>(x, 3) a = MatMul(p, w) b = MatMul(q, w) }",
        "(float[N,4] x, float[N,4] z) => (float[N,3] a, float[N,3] b) <float[4,3] w = {1,2,3,4,5,6,7,8,9,8,7,6}> "
        "{ a = MatMul(x, w) b = MatMul(z, w) }",
        "(float[2,3,4] x, float[2,5,4] z) => (float[2,3,3] a, float[2,5,3] b) "
        "<float[4,3] w = {1,2,3,4,5,6,7,8,9,8,7,6}> { a = MatMul(x, w) b = MatMul(z, w) }",
        "(float[2,8] x) => (float[2,3] a, float[2,3] b) <float[4,3] w = {1,2,3,4,5,6,7,8,9,8,7,6}> "
        "{ p = Slice(x, [0], [4], [1]) q = Slice(x, [4], [8], [1]) a = MatMul(p, w) b = MatMul(q, w) }",
        "(float[2,6,4] x) => (float[2,1,3] a, float[2,1,3] b, float[2,2,3] c) "
        "<float[4,3] w = {1,2,3,4,5,6,7,8,9,8,7,6}> { p = Slice(x, [0], [1], [1]) q = Slice(x, [1], [2], [1]) "
        "r = Slice(x, [3], [5], [1]) a = MatMul(p, w) b = MatMul(q, w) c = MatMul(r, w) }",
    )
    near_misses = graphs(
        "(float[2,3] x) => (float[1,2] b) <float[3,2] w = {1,2,3,4,5,6}> { x0 = Gather(x, [0]) a = MatMul(x0, w) "
        "k = ArgMax<axis=1, keepdims=0>(a) x1 = Gather(x, k) b = MatMul(x1, w) }",
        "(float[2,4] x, float[2,4] z) => (float[2,1] a, float[2,1] b) <float[4,1] w = {1,2,3,4}, "
        "float[2,1] c = {1,2}> { a = Gemm(x, w, c) b = Gemm(z, w, c) }",
        "(float[N,4] x, float[M,4] z) => (float[N,3] a, float[M,3] b) <float[4,3] w = {1,2,3,4,5,6,7,8,9,8,7,6}> "
        "{ a = MatMul(x, w) b = MatMul(z, w) }",
        "(float[2,4] x, float[2,2,4] z) => (float[2,3] a, float[2,2,3] b) "
        "<float[4,3] w = {1,2,3,4,5,6,7,8,9,8,7,6}> { a = MatMul(x, w) b = MatMul(z, w) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        weight, *more = node.inputs[1:]
        if reader.count_users(weight) < 2 or not _multiplies(reader, node):
            return None
        own = _origin(reader, node.inputs[0])
        candidates = _products(reader, node, own)
        # Only the node with the smallest id finds the group. The search from another node records only that it depends
        # on this one.
        unrecorded = Reader(reader.graph)
        for sibling in reader.graph.users(weight) if candidates is None else candidates:
            if sibling.id >= node.id:
                break
            if _alike(unrecorded, sibling, node) and _origin(unrecorded, sibling.inputs[0]) == own:
                reader.producer(sibling.id)
                _origin(reader, sibling.inputs[0])
                return None
        members = [
            user
            for user in (reader.users(weight) if candidates is None else candidates)
            if _alike(reader, user, node) and _origin(reader, user.inputs[0]) == own
        ]
        group = list({user.inputs[0]: user for user in members}.values())
        if len(group) < 2:
            return None
        require(common_source(reader, [u.inputs[0] for u in group]), "an input may depend on a product")
        biases = [b for b in more if b != ABSENT]
        if biases:
            bias = reader.val(biases[0])
            rows = 1 if bias.rank < 2 else bias.shape[-2]
            require(bias.const and rows == 1, "the bias differs from row to row")
        group, stack, inputs = _stacked(reader, group)
        outputs = tuple(u.outputs[0] for u in group)
        return Region(outputs, (weight, *biases, *inputs), tuple(group), (stack, len(biases)))

    def target(self, op: Op, region: Region, weight: Val, *inputs: Val) -> Any:
        stack: _Stack
        stack, biases = region.data
        rows = _rows(op, stack, inputs[biases:])
        product = op[stack.op](rows, weight, *inputs[:biases], attrs=stack.attrs)
        if stack.sizes is not None:
            return op.Split(product, axis=stack.axis, sizes=stack.sizes)
        # The Split gets sizes. With a number of parts instead, ONNX Runtime could not split an empty batch.
        at = stack.axis if stack.source_axis is None or stack.axis < stack.source_axis else stack.axis + 1
        sizes = op.Expand(op.Shape(inputs[biases], start=at, end=at + 1), [stack.count])
        return op.Split(product, sizes, axis=stack.axis, outputs=stack.count)


def _multiplies(reader: Reader, node: Node) -> bool:
    """Whether a node multiplies a value that is not constant with a constant matrix."""
    weight = node.inputs[1]
    if node.attrs.get("transA") or node.const or not reader.is_const(weight):
        return False
    return reader.type(weight).rank == 2 and not reader.is_const(node.inputs[0])


def _products(reader: Reader, node: Node, origin: Value) -> list[Node] | None:
    """The readers of a node's weight whose input may have this origin, in the order of their ids.

    None if the origin has too many parts to find out.
    """
    if origin == ABSENT:
        return None
    graph = reader.graph
    products: dict[Value, Node] = {}
    parts = [origin]
    for part in parts:  # the list grows during the loop
        readers = graph.uses.get(part, ())
        if len(parts) > _FEW_PARTS or len(readers) > _FEW_READERS:
            return None
        for user in map(graph.producers.__getitem__, readers):
            if user.inputs[0] != part:
                continue
            if user.op in _STEPS:
                parts += user.outputs
            elif user.op == node.op and user.inputs[1] == node.inputs[1]:
                products[user.id] = user
    for part in parts:
        reader.users(part)
    return [products[i] for i in sorted(products)]


def _alike(reader: Reader, other: Node, node: Node) -> bool:
    """Whether another node computes the same product as `node`, for another input."""
    same = other.op == node.op and other.inputs[1:] == node.inputs[1:] and other.attrs == node.attrs
    return same and other.inputs[0] != node.inputs[1] and _multiplies(reader, other)


def _stacked(reader: Reader, group: Sequence[Node]) -> tuple[list[Node], _Stack, tuple[Value, ...]]:
    """The products in the order of their joined inputs, how the inputs are joined, and the values from which they are
    cut.
    """
    pieces = [piece(reader, n.inputs[0]) for n in group]
    known_pieces = [p for p in pieces if p is not None]
    if len(known_pieces) == len(group) and len({(p.source, p.axis, p.keeps_axis) for p in known_pieces}) == 1:
        order = sorted(range(len(group)), key=lambda i: known_pieces[i].start)
        ordered, parts = [group[i] for i in order], [known_pieces[i] for i in order]
        stack = (_stack_keeping_axis if parts[0].keeps_axis else _stack_dropping_axis)(reader, ordered, parts)
        if stack is not None:
            return ordered, stack, (parts[0].source,)
    # Sorted by input, so that products with another weight join the same rows in the same order.
    ordered = sorted(group, key=lambda n: n.inputs[0])
    shapes = [reader.val(n.inputs[0]).shape for n in ordered]
    rank = len(shapes[0])
    require(rank >= 2, "the inputs cannot be stacked")
    for axis in dict.fromkeys((0, rank - 2)):
        other_sizes = {(*s[:axis], *s[axis + 1 :]) for s in shapes}
        if len(other_sizes) == 1 and None not in other_sizes.pop():
            stack = _Stack(ordered[0].op, ordered[0].attrs, len(ordered), axis, _sizes(shapes, axis))
            return ordered, stack, tuple(n.inputs[0] for n in ordered)
    raise Refused("the inputs cannot be stacked")


def _sizes(shapes: Sequence[tuple[Dim, ...]], axis: int) -> tuple[int, ...] | None:
    """The shapes' sizes along an axis; None if all are the same symbol. Refuses other unknown sizes."""
    dims = [s[axis] for s in shapes]
    numbers = tuple(d for d in dims if isinstance(d, int))
    if len(numbers) == len(dims):
        return numbers
    require(len(set(dims)) == 1 and dims[0] is not None, "a dimension is not a known number")
    return None


def _stack_keeping_axis(reader: Reader, group: Sequence[Node], parts: Sequence[Piece]) -> _Stack | None:
    """How to join inputs x[..., a:b, ...] and x[..., b:c, ...], which are adjacent in x if there are no gaps; else
    None.
    """
    axis, rank = parts[0].axis, reader.val(parts[0].source).rank
    if axis > rank - 2 or any(p.start + p.length != q.start for p, q in pairwise(parts)):
        return None
    sizes = tuple(p.length for p in parts)
    indices = tuple(range(parts[0].start, parts[0].start + sum(sizes)))
    return _Stack(group[0].op, group[0].attrs, len(group), axis, sizes, axis, indices)


def _stack_dropping_axis(reader: Reader, group: Sequence[Node], parts: Sequence[Piece]) -> _Stack | None:
    """How to join inputs x[:, t, ...] that lack the axis of t: it is merged into the first axis; None if they are
    others.
    """
    source = reader.type(parts[0].source).shape
    axis = parts[0].axis
    shapes = [reader.val(n.inputs[0]).shape for n in group]
    assert source is not None
    remaining = (*source[:axis], *source[axis + 1 :])
    if len(remaining) < 2 or not all(isinstance(d, int) and d for d in remaining[1:]):
        return None
    if remaining[0] in (None, 0):
        return None
    indices = tuple(p.start for p in parts)
    return _Stack(
        group[0].op, group[0].attrs, len(group), 0, _sizes(shapes, 0), axis, indices, keeps_axis=False
    )


def _rows(op: Op, stack: _Stack, values: Sequence[Val]) -> Any:
    """The tensor in which all inputs are joined."""
    if stack.source_axis is None:
        return op.Concat(*values, axis=stack.axis)
    (source,) = values
    axis, indices = stack.source_axis, stack.indices
    rows = source
    if indices != tuple(range(len(indices))) or source.shape[axis] != len(indices):
        if all(b == a + 1 for a, b in pairwise(indices)):
            rows = op.Slice(source, [indices[0]], [indices[-1] + 1], [axis])
        else:
            rows = op.Gather(source, list(indices), axis=axis)
    if stack.keeps_axis:
        return rows
    if any(d != 1 for d in source.shape[:axis]):
        rows = op.Transpose(rows, perm=[axis, *(i for i in range(source.rank) if i != axis)])
    first, *other_sizes = (d for i, d in enumerate(source.shape) if i != axis)
    return op.Reshape(rows, [len(indices) * first if isinstance(first, int) else -1, *other_sizes])


_STEPS = frozenset(("Slice", "Gather", "Split", "Squeeze", "Unsqueeze", "Reshape", "Transpose", "Identity"))


def _origin(reader: Reader, value: Value) -> Value:
    """The tensor of which a value is a part; 0 for parts of a graph's inputs, which depend on no node."""
    for _ in range(6):
        node = reader.producer(value)
        if node is None or node.op not in _STEPS:
            break
        value = node.inputs[0]
    return ABSENT if value in reader.graph.inputs else value
