"""Rules that replace a chain of operators that only move data by a cheaper chain with the same map (see `access`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.access import (
    AccessMap,
    Joined,
    Plan,
    Price,
    Step,
    Unmappable,
    best,
    best_joined,
    core_of,
    extent_of,
    price,
    scattered,
    shuffles,
)
from rewrite_rules.axes import axis_of, front, fronts, int_attr, ints_input, perm_of, required, slice_numbers
from rewrite_rules.examples import graphs
from rewrite_rules.slices import sizes_along
from xrlflow.ir import ABSENT, Dim, DType, Node, Value
from xrlflow.ir.dims import LARGEST
from xrlflow.rewrite import Lit, Op, Reader, Refused, Region, RegionRule, Val, profitable

_VIEWS = frozenset(("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"))
# Operators with one data input and one output.
_PLAIN = (
    *("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Slice", "Gather", "Expand", "Tile", "Pad"),
    *("DepthToSpace", "SpaceToDepth"),
)
MOVES = (*_PLAIN, "Identity", "Split", "Concat")
_PLAIN_SET, _MOVES_SET = frozenset(_PLAIN), frozenset(MOVES)
# The greatest length of a chain, and how far up the quick check looks, both in operators.
_MOST_NODES, _FAR = 32, 8
# How many examined chains are remembered.
_MOST_LINES = 4096
# The size that a symbolic dimension is assumed to have, unless it is the first dimension.
_SYMBOL = 32
# Element types for which ONNX Runtime has DepthToSpace and SpaceToDepth.
_BLOCKS = frozenset((DType.FLOAT, DType.DOUBLE))


class _Trace:
    """Computes the maps of values, back to the first values that are not computed by data movement."""

    def __init__(
        self, reader: Reader, maximum: int = _MOST_NODES, stop: frozenset[Value] = frozenset()
    ) -> None:
        self.reader = reader
        self.left = maximum
        self.stop = stop
        self.maps: dict[Value, AccessMap] = {}
        self.makers: dict[Value, Node] = {}
        self.sources: list[Value] = []
        self.shapes: list[tuple[int | str, ...]] = []
        self.fill: Value | None = None

    def map(self, value: Value) -> AccessMap:
        result = self.maps.get(value)
        if result is None:
            result = self.maps[value] = self._made(value)
        return result

    def _made(self, value: Value) -> AccessMap:
        node = self.reader.producer(value)
        if node is None or node.op not in _MOVES_SET or node.const or value in self.stop or self.left <= 0:
            return self._source(value)
        self.left -= 1
        try:
            result = self._moved(node, value)
        except Refused:
            return self._source(value)
        self.makers[value] = node
        return result

    def _source(self, value: Value) -> AccessMap:
        dims = self.reader.type(value).shape
        if dims is None:
            raise Unmappable("a rank is not known")
        shape = tuple(f"?{value}.{i}" if d is None else d for i, d in enumerate(dims))
        result = AccessMap.source(shape, len(self.sources))
        self.sources.append(value)
        self.shapes.append(shape)
        return result

    def _ints(self, node: Node, index: int) -> tuple[int, ...]:
        return required(ints_input(self.reader, node, index), "an input is left out")

    def _moved(self, node: Node, value: Value) -> AccessMap:
        """The map of a node's output. The numbers of its constant inputs are read first; if they are unknown, nothing
        else is read.
        """
        op = node.op
        if op == "Concat":
            parts = [self.map(v) for v in node.inputs]
            return AccessMap.concat(parts, axis_of(node, len(parts[0].dims)))
        if op == "Reshape":
            shape = self._ints(node, 1)
            if node.attrs.get("allowzero") and 0 in shape:
                raise Unmappable("a dimension is 0")
            return self.map(node.inputs[0]).reshape(shape)
        if op == "Slice":
            return self._sliced(node)
        if op == "Gather":
            index = self.reader.val(node.inputs[1]).array
            x = self.map(node.inputs[0])
            return x.gather(axis_of(node, len(x.dims)), [int(i) for i in index.ravel()], index.shape)
        if op == "Split":
            return self._split(node, value)
        if op == "Pad":
            return self._padded(node)
        if op in ("Squeeze", "Unsqueeze"):
            axes = ints_input(self.reader, node, 1)
            x = self.map(node.inputs[0])
            if op == "Squeeze":
                return x.squeeze(None if axes is None else fronts(axes, len(x.dims)))
            return x.unsqueeze(fronts(axes or (), len(x.dims) + len(axes or ())))
        if op in ("Expand", "Tile"):
            numbers = self._ints(node, 1)
            x = self.map(node.inputs[0])
            return x.expand(numbers) if op == "Expand" else x.tile(numbers)
        x = self.map(node.inputs[0])
        if op == "Transpose":
            return x.transpose(perm_of(node, len(x.dims)))
        if op == "Flatten":
            axis = int_attr(node, "axis", 1)
            return x.flatten(axis if axis == len(x.dims) else front(axis, len(x.dims)))
        if op == "DepthToSpace":
            return x.depth_to_space(int_attr(node, "blocksize", 1), node.attrs.get("mode", "DCR") == "CRD")
        if op == "SpaceToDepth":
            return x.space_to_depth(int_attr(node, "blocksize", 1))
        return x  # for an Identity

    def _size(self, x: AccessMap, axis: int) -> int | None:
        """The size of a dimension; None if it is symbolic."""
        return None if any(d.name for d in x.dims[axis]) else prod(d.size for d in x.dims[axis])

    def _sliced(self, node: Node) -> AccessMap:
        rank = self.reader.val(node.inputs[0]).rank
        cuts = slice_numbers(self.reader, node, rank)
        x = self.map(node.inputs[0])
        for axis, start, end, step in cuts:
            size = self._size(x, axis)
            if size is None:
                # A larger end stands for the last element: exporters write "to the end" as 2^31 - 1 or more.
                if start != 0 or step != 1 or end < LARGEST:
                    raise Unmappable("a symbolic dimension is cut")
                continue
            positions = range(size)[start:end:step]  # Python's slices count and clamp as ONNX's do
            x = x.slice(axis, positions.start, len(positions), step)
        return x

    def _split(self, node: Node, value: Value) -> AccessMap:
        x = self.map(node.inputs[0])
        axis = axis_of(node, len(x.dims))
        sizes = sizes_along(self.reader, node.outputs[: node.outputs.index(value) + 1], axis)
        if sizes is None:
            raise Unmappable("a symbolic dimension is cut")
        return x.slice(axis, sum(sizes[:-1]), sizes[-1], 1)

    def _padded(self, node: Node) -> AccessMap:
        if node.attrs.get("mode", "constant") != "constant":
            raise Unmappable("it pads with elements")
        pads, axes_input = self._ints(node, 1), ints_input(self.reader, node, 3)
        fill = node.inputs[2] if len(node.inputs) > 2 else ABSENT
        x = self.map(node.inputs[0])
        axes = fronts(range(len(x.dims)) if axes_input is None else axes_input, len(x.dims))
        if len(pads) != 2 * len(axes):
            raise Unmappable("the pads are of another rank")
        if self.fill not in (None, fill):
            raise Unmappable("two pads put in different numbers")
        ends = [dict(zip(axes, numbers)) for numbers in (pads, pads[len(axes) :])]
        result = x.pad(*([end.get(axis, 0) for axis in range(len(x.dims))] for end in ends))
        self.fill = fill
        return result

    # The chain's cost

    def nodes(self, end: Node) -> list[Node]:
        """The nodes between the sources and the end of the chain, producers first."""
        out: dict[Value, Node] = {}
        visited: set[Value] = set()

        def visit(node: Node) -> None:
            if node.id in visited:
                return
            visited.add(node.id)
            for value in _moved(node):
                maker = self.makers.get(value)
                if maker is not None:
                    visit(maker)
            out[node.id] = node

        visit(end)
        return list(out.values())[::-1]

    def removed(self, nodes: Sequence[Node]) -> set[Value]:
        """The first node, and those nodes that lose all readers when it is replaced."""
        removed_ids = {nodes[0].id}
        for node in nodes[1:]:
            if all(
                not self.reader.is_output(v) and all(u.id in removed_ids for u in self.reader.users(v))
                for v in node.outputs
            ):
                removed_ids.add(node.id)
        return removed_ids

    def price(self, node: Node) -> Price:
        elements_read = sum(self.maps[v].volume for v in _moved(node) if v in self.maps)
        elements_written = sum(self.maps[v].volume for v in node.outputs if v in self.maps)
        torn = False
        if node.op == "Transpose":
            dims = self.maps[node.inputs[0]].dims
            torn = shuffles(perm_of(node, len(dims)), lambda p: not dims[p])
        elif node.op == "Gather":
            dims = self.maps[node.inputs[0]].dims
            torn = scattered([extent_of(dim) for dim in dims[axis_of(node, len(dims)) + 1 :]])
        return price(node.op, elements_read, elements_written, torn)

    def scale(self) -> int:
        """The factor by which numbers of elements are too small because symbolic dimensions count as 1."""
        return max(prod(_SYMBOL for d in shape[1:] if isinstance(d, str)) for shape in self.shapes)

    def may_use_blocks(self) -> bool:
        return self.reader.type(self.sources[0]).dtype in _BLOCKS


def _total(prices: Iterable[Price], scale: int) -> int:
    return sum(prices, Price()).total(scale)


def _emit(op: Op, x: Any, steps: Sequence[Step], fill: Val | None = None) -> Any:
    """Build the operators of a chain on x. `fill` is the value of its Pads."""
    for step in steps:
        numbers = step.numbers
        if step.op == "Transpose":
            x = op.Transpose(x, perm=numbers[0])
        elif step.op == "Gather":
            x = op.Gather(x, list(numbers[1]), axis=numbers[0][0])
        elif step.op == "Pick":
            x = op.Gather(x, np.array(numbers[1][0], np.int64), axis=numbers[0][0])
        elif step.op == "DepthToSpace":
            block, crd = numbers[0]
            x = op.DepthToSpace(x, blocksize=block, mode=Lit("CRD" if crd else "DCR"))
        elif step.op == "SpaceToDepth":
            x = op.SpaceToDepth(x, blocksize=numbers[0][0])
        elif step.op == "Pad":
            x = op.Pad(x, list(numbers[0]), fill, list(numbers[1]))
        else:
            x = op[step.op](x, *map(list, numbers))
    return x


def _moved(node: Node) -> tuple[Value, ...]:
    """The data inputs of a node. Its other inputs hold indices, shapes or a fill value."""
    return node.inputs if node.op == "Concat" else (node.inputs[0],)


def _above(reader: Reader, node: Node) -> Iterator[Node]:
    """A node and the operators above it, along first inputs, as long as they only move data."""
    for _ in range(_FAR):
        yield node
        maker = reader.producer(node.inputs[0])
        if maker is None or maker.op not in _MOVES_SET or maker.const:
            return
        node = maker


def _goes_on(reader: Reader, node: Node) -> bool:
    """Whether a node has a single reader that moves its data by known numbers, so that the chain continues."""
    (value,) = node.outputs
    if reader.count_users(value) != 1 or reader.is_output(value):
        return False
    (user,) = reader.users(value)
    if user.op not in _PLAIN_SET or user.inputs[0] != value:
        return False
    return all(v == ABSENT or reader.is_const(v) for v in user.inputs[1:])


def _hopeless(reader: Reader, nodes: Sequence[Node]) -> bool:
    """Whether a quick check shows that nothing can be gained: the chain has one view and one Transpose, and needs
    both.
    """
    ops = {n.op for n in nodes}
    if ops.issubset(_VIEWS) or ops == {"Transpose"}:  # rules for two operators handle these
        return True
    if len(nodes) != 2 or {n.op == "Transpose" for n in nodes} != {True, False}:
        return False
    view, transpose = sorted(nodes, key=lambda n: n.op == "Transpose")
    before, after = reader.type(view.inputs[0]).shape, view.types[0].shape
    shape = reader.type(transpose.inputs[0]).shape
    if view.op not in _VIEWS or before is None or after is None or shape is None:
        return False
    order = [p for p in perm_of(transpose, len(shape)) if shape[p] != 1]
    return order != sorted(order) and [d for d in before if d != 1] != [d for d in after if d != 1]


# The key of a chain without branches, see `_line`.
_Line = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Shortcut:
    """A cheaper plan for the last `nodes` operators of a line. `fill` are the values of its Pads."""

    nodes: int
    fill: tuple[Value, ...]
    plan: Plan


def _line(reader: Reader, end: Node) -> _Line | None:
    """A key for everything on which a cheaper chain depends; None if the chain branches or is too long.

    For each operator the key holds its name, attributes and numbers, which of its outputs the next operator reads, its
    output types, and whether it loses its readers when the end is replaced. It also holds the type of the chain's
    input. Equal layers have equal keys.
    """
    links: list[object] = []
    removed: set[Value] = set()
    value, node = end.outputs[0], reader.producer(end.outputs[0])
    while node is not None and node.op in _MOVES_SET and not node.const:
        if node.op == "Concat" or len(links) == _MOST_NODES:
            return None
        if not links or (
            len(removed) == len(links)
            and all(
                not reader.is_output(v) and all(u.id in removed for u in reader.users(v))
                for v in node.outputs
            )
        ):
            removed.add(node.id)
        # The name of a constant identifies its content. A computed value is not a known number, but may be the number
        # of a Pad.
        numbers = tuple([(v, reader.producer(v) is None) for v in node.inputs[1:]])
        index = node.outputs.index(value)
        links.append((node.op, node.attrs.digest, numbers, index, node.types, node.id in removed))
        value = node.inputs[0]
        node = reader.producer(value)
    return (*links, reader.type(value))


def _common(reader: Reader, node: Node) -> bool:
    """Whether all parts of a Concat may come from one value."""
    shared: set[Value] | None = None
    for value in dict.fromkeys(node.inputs):
        chain = {value}
        maker = reader.producer(value)
        if maker is not None and maker.op in _MOVES_SET:
            chain.update(n.inputs[0] for n in _above(reader, maker))
        shared = chain if shared is None else shared & chain
        if not shared:
            return False
    return True


_TO_THE_END = (
    "agraph (float[N,6] x) => (float[M,2] y) <int64[2] i = {{{start},1}}, int64[2] p = {{2147483647,5}}, "
    "int64[2] k = {{0,1}}, int64[2] t = {{{step},1}}, int64[1] o = {{1}}, int64[1] q = {{3}}> "
    "{{ a = Slice(x, i, p, k, t) y = Slice(a, o, q, o) }}"
)


class MergeMovement(RegionRule, family="movement"):
    """move_k(... move_1(x)) -> the cheapest chain that takes the same elements of x to the same places.

    Reshape, Transpose, Slice, Split, Concat, Gather by constants, Expand, Tile, Pad and their like in any order: their
    effects are composed into one map of positions, and a new chain of operators is made from that map. The rule applies
    if the new chain moves fewer elements, or has fewer operators. It may only move symbolic dimensions as a whole.
    """

    anchors = (*_PLAIN, "Concat")
    reads_from = MOVES
    examples = graphs(
        # Reshape, Transpose and Reshape that equal a Transpose; others that change nothing.
        "(float[N,6,4] x) => (float[N,4,6] y) "
        "{ a = Reshape(x, [0, 2, 3, 4]) b = Transpose<perm=[0,3,1,2]>(a) y = Reshape(b, [0, 4, 6]) }",
        "(float[2,3,4,5] x) => (float[2,3,4,5] y) { a = Transpose<perm=[0,3,1,2]>(x) "
        "b = Reshape(a, [2, 5, 12]) c = Reshape(b, [2, 5, 3, 4]) y = Transpose<perm=[0,2,3,1]>(c) }",
        # A shuffle of channels and its inverse.
        "(float[N,6,5] x) => (float[N,6,5] y) "
        "{ a = Reshape(x, [0, 2, 3, 5]) b = Transpose<perm=[0,2,1,3]>(a) c = Reshape(b, [0, 6, 5]) "
        "d = Reshape(c, [0, 3, 2, 5]) e = Transpose<perm=[0,2,1,3]>(d) f = Reshape(e, [0, 6, 5]) y = Neg(f) }",
        # Strided slices that are concatenated (Focus), in the order of SpaceToDepth and in another order.
        "(float[N,3,4,6] x) => (float[N,12,2,3] y) { p = Slice(x, [0], [9], [2], [2]) "
        "q = Slice(x, [1], [9], [2], [2]) a = Slice(p, [0], [9], [3], [2]) b = Slice(q, [0], [9], [3], [2]) "
        "c = Slice(p, [1], [9], [3], [2]) d = Slice(q, [1], [9], [3], [2]) y = Concat<axis=1>(a, c, b, d) }",
        "(float[N,2,4,6] x) => (float[N,8,2,3] y) { p = Slice(x, [0], [9], [2], [2]) "
        "q = Slice(x, [1], [9], [2], [2]) a = Slice(p, [0], [9], [3], [2]) b = Slice(q, [0], [9], [3], [2]) "
        "c = Slice(p, [1], [9], [3], [2]) d = Slice(q, [1], [9], [3], [2]) y = Concat<axis=1>(a, b, c, d) }",
        # Pixel shuffle written as Reshape, Transpose, Reshape, in both orders.
        "(float[N,8,3,5] x) => (float[N,2,6,10] y) "
        "{ a = Reshape(x, [-1, 2, 2, 2, 3, 5]) b = Transpose<perm=[0,1,4,2,5,3]>(a) y = Reshape(b, [-1, 2, 6, 10]) }",
        "(float[2,18,2,3] x) => (float[2,2,6,9] y) "
        "{ a = Reshape(x, [2, 3, 3, 2, 2, 3]) b = Transpose<perm=[0,3,4,1,5,2]>(a) y = Reshape(b, [2, 2, 6, 9]) }",
        # Slices of slices, with steps.
        "(float[N,12] x) => (float[N,3] y) { a = Slice(x, [10], [0], [1], [-2]) y = Slice(a, [0], [5], [1], [1]) }",
        # The cyclic shift of a window.
        "(float[N,7,3] x) => (float[N,7,3] y) "
        "{ a = Slice(x, [3], [7], [1]) b = Slice(x, [0], [3], [1]) y = Concat<axis=1>(a, b) }",
        # The parts of a Split in another order.
        "(float[N,6,2] x) => (float[N,6,2] y) "
        "{ a, b, c = Split<axis=1, num_outputs=3>(x) y = Concat<axis=1>(c, a, b) }",
        # Repeated, then cut.
        "(float[N,1,4] x) => (float[N,2,4] y) { a = Expand(x, [1, 5, 4]) y = Slice(a, [1], [3], [1]) }",
        "(float[2,3] x) => (float[2,3] y) { a = Tile(x, [1, 3]) y = Slice(a, [3], [6], [1]) }",
        # Padded twice; padded, and then the padding removed again.
        "(float[N,3,4] x) => (float[N,6,6] y) { a = Pad(x, [0, 1, 0, 0, 2, 0]) y = Pad(a, [0, 0, 1, 0, 0, 1]) }",
        "(float[N,3] x) => (float[N,3] y) { a = Pad(x, [0, 1, 0, 2]) b = Slice(a, [1], [4], [1]) y = Neg(b) }",
        # A permutation written as Gathers.
        "(float[N,6,3] x) => (float[N,6,3] y) "
        "{ a = Gather<axis=1>(x, [0, 3, 1, 4, 2, 5]) b = Gather<axis=1>(a, [0, 2, 4, 1, 3, 5]) y = Neg(b) }",
        # One position of a transposed tensor.
        "(float[2,3,4] x) => (float[2,3] y) { a = Transpose<perm=[2,0,1]>(x) y = Gather(a, 1) }",
        "(float[N,M,3] x) => (float[N,M,1,3] y) { a = Unsqueeze(x, [1]) b = Transpose<perm=[0,2,1,3]>(a) y = Relu(b) }",
        "(float[N,M,1,3] x) => (float[1,N,M,3] y) "
        "{ a = Squeeze(x, [2]) b = Unsqueeze(a, [1]) c = Transpose<perm=[1,0,2,3]>(b) y = Relu(c) }",
        "(float[N,1,M,3] x) => (float[N,M,3,1] y) "
        "{ a = Transpose<perm=[0,2,1,3]>(x) b = Squeeze(a, [2]) d = Unsqueeze(b, [-1]) y = Relu(d) }",
        "(float[2,6,4] x) => (float[2,4,4] y) { "
        "a = Transpose<perm=[0,2,1]>(x) b = Pad(a, [0, 0, -1, 0, 0, -1]) d = Transpose<perm=[0,2,1]>(b) y = Relu(d) }",
        "(float[2,6,4] x) => (float[2,6,4] y) { "
        "a = Transpose<perm=[0,2,1]>(x) b = Pad(a, [0, 1, -2, 0, -1, 1]) d = Transpose<perm=[0,2,1]>(b) y = Relu(d) }",
        "(float[2,6,4] x) => (float[2,12,4] y) "
        "{ a = Transpose<perm=[0,2,1]>(x) b = Tile(a, [1, 1, 2]) d = Transpose<perm=[0,2,1]>(b) y = Relu(d) }",
        "(float[1,6,4] x) => (float[6,4,1] y) "
        "{ a = Transpose<perm=[1,0,2]>(x) b = Squeeze(a) d = Unsqueeze(b, [2]) y = Relu(d) }",
        "(float[1,8,3,2] x) => (float[1,3,2,8] y) { a = DepthToSpace<blocksize=2>(x) "
        "b = SpaceToDepth<blocksize=2>(a) d = Transpose<perm=[0,2,3,1]>(b) y = Relu(d) }",
        '(float[1,8,3,2] x) => (float[1,3,2,8] y) { a = DepthToSpace<blocksize=2,mode="CRD">(x) '
        "b = SpaceToDepth<blocksize=2>(a) d = Transpose<perm=[0,2,3,1]>(b) y = Relu(d) }",
        "(float[2,12] x) => (float[2,6] y) "
        "{ a = Gather(x, [1, 0]) b = Gather<axis=1>(a, [1, 3, 5, 7, 9, 11]) y = Relu(b) }",
        "(float[1,8,3,2] x) => (float[1,6,4,2] y) { a = Reshape(x, [1, 2, 2, 2, 3, 2]) b = "
        "Transpose<perm=[0,3,4,1,5,2]>(a) d = Reshape(b, [1, 2, 6, 4]) e = Transpose<perm=[0,2,3,1]>(d) y = Relu(e) }",
        "(float[1,12,3,2] x) => (float[1,24,3] y) "
        "{ a = DepthToSpace<blocksize=2>(x) b = Reshape(a, [1, 3, 24]) d = Transpose<perm=[0,2,1]>(b) y = Relu(d) }",
        # The operator after the chain moves data by unknown numbers.
        "(float[N,6] x, float[N,2] z) => (float[A,B] y) "
        "{ s = Shape(z) a = Slice(x, [1], [5], [1]) b = Slice(a, [1], [3], [1]) y = Reshape(b, s) }",
        # The first operator has another reader, and should stay.
        "(float[2,3,4] x) => (float[2,2,3] y, float[2,4,3] z) "
        "{ a = Transpose<perm=[0,2,1]>(x) b = Slice(a, [0], [3], [1]) y = Slice(b, [0], [2], [1]) z = Relu(a) }",
        *(
            "agraph (float[2,3,4] x) => (float[2,3,4] y) <int64[3] s = {2,4,3}> { a = Transpose<perm=[0,2,1]>(x) "
            f"b = Flatten{axis}(a) c = Reshape(b, s) d = Transpose<perm=[0,2,1]>(c) y = Relu(d) }}"
            for axis in ("", "<axis=3>", "<axis=-1>")
        ),
        # A Slice to the end of a dimension of unknown size.
        _TO_THE_END.format(start=0, step=1),
    )
    near_misses = (_TO_THE_END.format(start=1, step=1), _TO_THE_END.format(start=0, step=2))

    def __init__(self) -> None:
        # For each line that was examined: its shortcut, or the reason why it has none (may be empty).
        self._shortcuts: dict[_Line | None, _Shortcut | str] = {}

    def find(self, reader: Reader, node: Node) -> Region | None:
        if _goes_on(reader, node):
            return None
        if node.op == "Concat":
            return self._cheaper(reader, node) if _common(reader, node) else None
        line = _line(reader, node)
        shortcut = self._shortcuts.get(line)
        if isinstance(shortcut, _Shortcut):
            nodes = [node]
            while len(nodes) < shortcut.nodes:
                maker = reader.producer(nodes[-1].inputs[0])
                assert maker is not None, "a line that was known has as many operators"
                nodes.append(maker)
            return Region(node.outputs, (nodes[-1].inputs[0], *shortcut.fill), tuple(nodes), shortcut.plan)
        if shortcut is not None:
            profitable(not shortcut, shortcut)
            return None
        # `_line` has read everything on which the result depends. So a match depends on the same values whether the
        # line was already examined or not.
        apart = reader if line is None else Reader(reader.graph, node.id)
        try:
            region = None if _hopeless(apart, list(_above(apart, node))) else self._cheaper(apart, node)
        except Refused as refused:
            if refused.site is None:
                self._note(line, str(refused))
            raise
        self._note(
            line, "" if region is None else _Shortcut(len(region.nodes), region.inputs[1:], region.data)
        )
        return region

    def _note(self, line: _Line | None, shortcut: _Shortcut | str) -> None:
        if line is not None:
            if len(self._shortcuts) >= _MOST_LINES:
                self._shortcuts.clear()
            self._shortcuts[line] = shortcut

    def _cheaper(self, reader: Reader, node: Node) -> Region | None:
        """The region of a chain. Refuses if no chain is cheaper."""
        region, shared = self._cheaper_region(reader, node, frozenset())
        if region is None and shared:
            region, _ = self._cheaper_region(reader, node, shared)
        profitable(region is not None, "nothing is gained")
        return region

    def _cheaper_region(
        self, reader: Reader, node: Node, stop: frozenset[Value]
    ) -> tuple[Region | None, frozenset[Value]]:
        """The region, if a chain is cheaper, else None; and the values of the chain that are read elsewhere."""
        (output,) = node.outputs
        trace = _Trace(reader, stop=stop)
        m = trace.map(output)
        profitable(output in trace.makers, "the map of the chain is not known")
        nodes = trace.nodes(node)
        removed = trace.removed(nodes)
        shared = frozenset(v for n in nodes if n.id not in removed for v in n.outputs)
        core = core_of(m)
        if core is None or len(nodes) < 2 or _hopeless(reader, nodes):
            return None, shared
        scale = trace.scale()
        before = _total((trace.price(n) for n in nodes if n.id in removed), scale)
        try:
            plan = best(trace.shapes[core.source], core, trace.may_use_blocks(), scale, before)
        except Unmappable:
            return None, shared
        fill = (trace.fill,) if trace.fill else ()
        return Region(node.outputs, (trace.sources[core.source], *fill), tuple(nodes), plan), shared

    def target(self, op: Op, region: Region, x: Val, fill: Val | None = None) -> Any:
        plan: Plan = region.data
        return _emit(op, x, plan.steps, fill)


class PushMovementIntoConcat(RegionRule, family="movement"):
    """move(concat(x, y, ...)) -> concat(move_x(x), move_y(y), ...)  where that moves less.

    `move` is any chain that only moves data. The Concat's inputs may have been moved, too. The new Concat may have
    another axis.
    """

    anchors = _PLAIN
    reads_from = MOVES
    examples = graphs(
        "(float[N,3] x, float[N,3] z) => (float[N,3,2] y) "
        "{ a = Unsqueeze(x, [1]) b = Unsqueeze(z, [1]) c = Concat<axis=1>(a, b) y = Transpose<perm=[0,2,1]>(c) }",
        "(float[N,2,3] x, float[N,4,3] z) => (float[6,N,3] y) { a = Transpose<perm=[0,2,1]>(x) "
        "b = Transpose<perm=[0,2,1]>(z) c = Concat<axis=2>(a, b) y = Transpose<perm=[2,0,1]>(c) }",
        "(float[2,4] x, float[2,4] z) => (float[16] y) { a = Reshape(x, [2, 2, 2]) b = Reshape(z, [2, 2, 2]) "
        "c = Concat<axis=1>(a, b) d = Transpose<perm=[1,0,2]>(c) e = Transpose<perm=[1,0,2]>(d) y = Reshape(e, [16]) }",
    )
    survivors: ClassVar[Mapping[str, str]] = {
        "attribute axis of Concat (call 4)": "beside a dimension of 1 the numbers lie the same, and are flattened"
    }

    def find(self, reader: Reader, node: Node) -> Region | None:
        concat = next((n for n in _above(reader, node) if n.op == "Concat"), None)
        if concat is None or _goes_on(reader, node):
            return None
        # The Concat's inputs may have been moved, too, so that the movements combine or do not.
        region = self._cheaper_region(reader, node, frozenset()) or self._cheaper_region(
            reader, node, frozenset(concat.inputs)
        )
        profitable(region is not None, "nothing is gained")
        return region

    def _cheaper_region(self, reader: Reader, node: Node, stop: frozenset[Value]) -> Region | None:
        (output,) = node.outputs
        trace = _Trace(reader, stop=stop)
        try:
            m = trace.map(output)
            nodes = trace.nodes(node) if output in trace.makers else []
            if core_of(m) is not None:  # the chain has a single source
                return None
            scale = trace.scale()
            joined = best_joined(trace.shapes, m, trace.may_use_blocks(), scale)
        except Unmappable:
            return None
        removed = trace.removed(nodes)
        before = _total((trace.price(n) for n in nodes if n.id in removed), scale)
        if joined.price.total(scale) >= before:
            return None
        inputs = tuple(trace.sources[number] for number, _ in joined.parts)
        return Region(node.outputs, inputs, tuple(nodes), joined)

    def target(self, op: Op, region: Region, *sources: Val) -> Any:
        joined: Joined = region.data
        parts = [_emit(op, x, plan.steps) for x, (_, plan) in zip(sources, joined.parts)]
        return _emit(op, op.Concat(*parts, axis=joined.axis), joined.steps)


class ReplaceMovement(RegionRule, family="movement"):
    """gather(x, consecutive constants) -> slice(x);  move(x) -> reshape(x)  when no data moves.

    In the second case `move` is a Gather, Expand, DepthToSpace or SpaceToDepth along dimensions of 1.
    """

    anchors = ("Gather", "Expand", "DepthToSpace", "SpaceToDepth")
    examples = graphs(
        "(float[N,6] x) => (float[N,3] y) { y = Gather<axis=1>(x, [2, 3, 4]) }",
        "(float[N,6] x) => (float[N,3] y) { y = Gather<axis=1>(x, [-1, -3, -5]) }",
        "(float[N,1,4] x) => (float[N,4] y) { y = Gather<axis=1>(x, 0) }",
        "(float[3,4] x) => (float[1,1,3,4] y) { y = Expand(x, [1, 1, 3, 1]) }",
        '(float[N,8,1,1] x) => (float[N,2,2,2] y) { y = DepthToSpace<blocksize=2, mode="CRD">(x) }',
        "(float[2,1,2,2] x) => (float[2,4,1,1] y) { y = SpaceToDepth<blocksize=2>(x) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if not self._promises(reader, node):
            return None
        (output,) = node.outputs
        trace = _Trace(reader, maximum=1)
        core = core_of(trace.map(output))
        if output not in trace.makers or core is None:
            return None
        plan = best(trace.shapes[0], core, False)
        ops = [s.op for s in plan.steps]
        better = not ops or ops == ["Reshape"] or (ops == ["Slice"] and node.op == "Gather")
        profitable(better, "it moves data")
        return Region(node.outputs, node.inputs[:1], (node,), plan)

    @staticmethod
    def _promises(reader: Reader, node: Node) -> bool:
        """Whether the numbers alone allow a gain. Most nodes are refused here."""
        before, after = reader.type(node.inputs[0]).shape, node.types[0].shape
        if before is None or after is None:
            return False
        if node.op != "Gather":
            return _elements(before) == _elements(after)
        index = reader.val(node.inputs[1]).array_or_none
        if index is None or not index.size:
            return False
        if index.size == 1:
            return before[axis_of(node, len(before))] == 1 or index.ndim > 0
        steps = np.diff(index.ravel())
        return bool((steps == steps[0]).all())

    def target(self, op: Op, region: Region, x: Val) -> Any:
        plan: Plan = region.data
        return _emit(op, x, plan.steps)


def _elements(shape: Sequence[Dim]) -> int:
    """The number of elements of a tensor, with symbolic dimensions counted as 1."""
    return prod(d for d in shape if isinstance(d, int))
