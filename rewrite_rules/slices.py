"""Rules for Concat, Split, Slice and Gather: they cancel cuts against joins, and move operators across both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from rewrite_rules.axes import axis_of, rank_of, required, reshape_numbers, same_dims, slice_numbers
from rewrite_rules.elementwise import BROADCAST, UNARY, is_unary, read_once, unary_form
from rewrite_rules.examples import graphs
from rewrite_rules.reshape import VIEWS, maker, makers
from xrlflow.ir import Dim, Node, Value
from xrlflow.rewrite import Op, Reader, Refused, Region, RegionRule, Val, profitable, require

# How a value was cut out of another one


@dataclass(frozen=True, slots=True)
class Piece:
    """A value that consists of `length` positions of `source` along `axis`, from `start` on.

    `keeps_axis`: the value still has all dimensions of the source. Otherwise `length` is 1, and the value may lack the
    axis or have further dimensions of 1. `nodes` are the nodes that cut it out.
    """

    source: Value
    axis: int
    start: int
    length: int
    keeps_axis: bool
    nodes: tuple[Node, ...]


def _size(shape: Sequence[Dim] | None, axis: int) -> int | None:
    """The size of a dimension; None if it is not a known number."""
    dim = None if shape is None else shape[axis]
    return dim if isinstance(dim, int) else None


def sizes_along(reader: Reader, values: Sequence[Value], axis: int) -> list[int] | None:
    """The sizes of values along an axis; None if one is not a known number."""
    out = [_size(reader.type(v).shape, axis) for v in values]
    sizes = [s for s in out if s is not None]
    return sizes if len(sizes) == len(out) else None


_CUTS = frozenset((*VIEWS, "Split", "Slice", "Gather"))


def piece(reader: Reader, value: Value) -> Piece | None:
    """The value as a piece of one tensor; None if it is none, or if the numbers of the cut are not known."""
    node = maker(reader, value, _CUTS)
    if node is None:
        return None
    if node.op in VIEWS:
        inner = piece(reader, node.inputs[0])
        if inner is None or inner.length != 1 or reader.type(value).shape is None:
            return None
        return Piece(inner.source, inner.axis, inner.start, 1, False, (node, *inner.nodes))
    source = node.inputs[0]
    shape = reader.type(source).shape
    if not shape:
        return None
    if node.op == "Split":
        axis = axis_of(node, len(shape))
        sizes = sizes_along(reader, node.outputs[: node.outputs.index(value) + 1], axis)
        return None if sizes is None else Piece(source, axis, sum(sizes[:-1]), sizes[-1], True, (node,))
    try:
        if node.op == "Gather":
            axis = axis_of(node, len(shape))
            index = reader.val(node.inputs[1])
            size = _size(shape, axis)
            numbers = [i + size if i < 0 and size is not None else i for i in index.ints]
            if index.array.ndim > 1 or not numbers or numbers[0] < 0:
                return None
            if any(b != a + 1 for a, b in pairwise(numbers)):
                return None
            return Piece(source, axis, numbers[0], len(numbers), index.array.ndim == 1, (node,))
        cuts = slice_numbers(reader, node, len(shape))
    except Refused:  # the numbers of the cut are not constant
        return None
    if len(cuts) != 1 or cuts[0][3] != 1:
        return None
    axis, start, *_ = cuts[0]
    length, size = _size(reader.type(value).shape, axis), _size(shape, axis)
    if start < 0 and size is not None:
        start = max(0, start + size)
    if start < 0 or not length:
        return None
    return Piece(source, axis, start, length, True, (node,))


def _cut(op: Op, x: Val, axis: int, start: int, length: int) -> Any:
    """`length` positions of x from `start` on; x itself if these are all its positions."""
    if start == 0 and _size(x.type.shape, axis) == length:
        return x
    return op.Slice(x, [start], [start + length], [axis])


def _nodes(*groups: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes of all groups, each once."""
    return tuple({n.outputs[0]: n for group in groups for n in group}.values())


def _follows(first: Piece | None, second: Piece | None, axis: int) -> bool:
    """Whether the second piece begins where the first one ends, along an axis."""
    if first is None or second is None or not (first.keeps_axis and second.keeps_axis):
        return False
    end = (first.source, first.axis, first.start + first.length)
    return first.axis == axis and end == (second.source, second.axis, second.start)


# Joining pieces of one tensor again


class MergeConcatOfPieces(RegionRule, family="slices"):
    """concat(x[a:b], x[b:c], ...) -> x[a:c], or x  when the pieces cover x.

    The pieces may be outputs of a Split, of Slices, or of Gathers with consecutive constants. Several runs of adjacent
    pieces may alternate with other inputs.
    """

    may_lose_errors = ("sizes",)
    anchors = ("Concat",)
    examples = graphs(
        "(float[N,6] x) => (float[N,6] y) { a, b, c = Split<axis=1>(x, [1, 2, 3]) y = Concat<axis=1>(a, b, c) }",
        "(float[N,6] x, float[N,2] z) => (float[N,6] y) "
        "{ a = Slice(x, [1], [3], [1]) b = Slice(x, [3], [5], [1]) y = Concat<axis=1>(a, z, a, b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if len(node.inputs) < 2:
            return None
        pieces_of = [piece(reader, v) for v in node.inputs]
        if sum(p is not None for p in pieces_of) < 2:
            return None
        axis = axis_of(node, rank_of(reader, *node.inputs))
        groups: list[list[int]] = []
        for k, own in enumerate(pieces_of):
            if groups and _follows(pieces_of[groups[-1][-1]], own, axis):
                groups[-1].append(k)
            else:
                groups.append([k])
        if len(groups) == len(pieces_of):
            return None
        inputs: list[Value] = []
        runs: list[tuple[int, int] | None] = []  # start and length; None: the input stays as it is
        nodes: list[Node] = [node]
        for ks in groups:
            pieces = [p for k in ks if (p := pieces_of[k]) is not None] if len(ks) > 1 else []
            inputs.append(pieces[0].source if pieces else node.inputs[ks[0]])
            runs.append((pieces[0].start, sum(p.length for p in pieces)) if pieces else None)
            nodes += [n for p in pieces for n in p.nodes]
        return Region(node.outputs, tuple(inputs), _nodes(nodes), (axis, tuple(runs)))

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        axis, runs = region.data
        parts = [v if run is None else _cut(op, v, axis, *run) for v, run in zip(inputs, runs)]
        return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)


class MergeStackOfPieces(RegionRule, family="slices"):
    """concat(x[t0], x[t1], ...) -> reshape(transpose(x))  when each part is one position of x along one axis.

    Unrolled recurrent networks cut the input into its steps and later join these again. The other dimensions of a
    position may be reshaped, as long as the Concat's axis lies between two of them.
    """

    may_lose_errors = ("sizes",)
    anchors = ("Concat",)
    examples = graphs(
        "(float[2,3,4] x) => (float[6,4] y) "
        "{ a = Gather<axis=1>(x, 0) b = Gather<axis=1>(x, 1) c = Gather<axis=1>(x, 2) y = Concat<axis=0>(a, b, c) }",
        "(float[3,N,4] x) => (float[N,2,4] y) "
        "{ a = Gather(x, 2) b = Gather(x, 0) c = Unsqueeze(a, [1]) d = Unsqueeze(b, [1]) y = Concat<axis=1>(c, d) }",
    )
    near_misses = tuple(
        f"agraph ({kind} x) => (float[K,L] y) <int64 i = {{0}}, int64 j = {{1}}, int64[2] s = {{{shape}}}> {{"
        f" a = Gather(x, i) b = Gather(x, j) c = Reshape(a, s) d = Reshape(b, s) y = Concat<axis={axis}>(c, d) }}"
        for kind, axis, shape in (
            ("float[2,6]", 1, "2, 3"),
            ("float[2,?,3]", 0, "2, 3"),
            ("float[2,?,4]", 1, "-1, 2"),
        )
    ) + (
        "agraph (float[N,4] x) => (float[N,2] y) <int64[1] i = {1}, int64[1] j = {2}, int64[1] k = {3}> {"
        " a = Slice(x, i, j, i) b = Slice(x, j, k, i) y = Concat<axis=1>(a, b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if len(node.inputs) < 2:
            return None
        first = piece(reader, node.inputs[0])
        if first is None or first.length != 1:
            return None
        pieces = [first, *(p for v in node.inputs[1:] if (p := piece(reader, v)) is not None)]
        alike = all((p.source, p.axis, p.length) == (first.source, first.axis, 1) for p in pieces)
        if not alike or len(pieces) != len(node.inputs):
            return None
        starts = [p.start for p in pieces]
        source_shape, shape = reader.val(first.source).shape, reader.val(node.inputs[0]).shape
        axis = axis_of(node, len(shape))
        if first.keeps_axis and first.axis == axis:
            profitable({b - a for a, b in pairwise(starts)} != {1}, "it is one run of pieces")
        remaining = (*source_shape[: first.axis], *source_shape[first.axis + 1 :])
        before = [d for d in shape[:axis] if d != 1]
        require(None not in before, "a dimension is not known")
        cuts = [k for k in range(len(source_shape)) if [d for d in remaining[:k] if d != 1] == before]
        require(cuts, "the parts are put together inside a dimension")
        cut = first.axis if first.axis in cuts else cuts[0]
        other_axes = [i for i in range(len(source_shape)) if i != first.axis]
        perm = (*other_axes[:cut], first.axis, *other_axes[cut:])
        stacked = (*remaining[:cut], len(starts), *remaining[cut:])
        result = reader.val(node.outputs[0]).shape
        numbers = None if same_dims(stacked, result) else tuple(reshape_numbers(stacked, result))
        data = (first.axis, tuple(starts), perm, numbers)
        return Region(node.outputs, (first.source,), _nodes((node,), *(p.nodes for p in pieces)), data)

    def target(self, op: Op, region: Region, x: Val) -> Any:
        axis, starts, perm, numbers = region.data
        if all(b == a + 1 for a, b in pairwise(starts)):
            steps = _cut(op, x, axis, starts[0], len(starts))
        else:
            steps = op.Gather(x, list(starts), axis=axis)
        if perm != tuple(range(len(perm))):
            steps = op.Transpose(steps, perm=perm)
        return steps if numbers is None else op.Reshape(steps, list(numbers))


class MergeSlices(RegionRule, family="slices"):
    """x[a:b][c:d] -> x[a+c:a+d]  along one axis. The first may be a Split, the second a Gather."""

    may_lose_errors = ("sizes",)
    anchors = ("Slice", "Gather")
    examples = graphs(
        "(float[N,6] x) => (float[N,2] y) { a = Slice(x, [1], [5], [1]) y = Slice(a, [1], [3], [1]) }",
        "(float[N,6] x) => (float[N] y, float[N,2] z) { z, b = Split<axis=1>(x, [2, 4]) y = Gather<axis=1>(b, 1) }",
    )
    near_misses = tuple(
        f"agraph (float[N,6] x) => (float[N,{size}] y) <int64[1] i = {{1}}, int64[1] p = {{5}},"
        f" int64[{size}] j = {{{at}}}>"
        " { a = Slice(x, i, p, i) y = Gather<axis=1>(a, j) }"
        for size, at in (("1,1", "2"), ("1,2", "2, 3"), ("0", ""))
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = piece(reader, node.inputs[0])
        if inner is None or not inner.keeps_axis:
            return None
        outer = required(piece(reader, node.outputs[0]), "they cut along different axes")
        require(outer.axis == inner.axis, "they cut along different axes")
        data = (inner.axis, inner.start + outer.start, outer.length, outer.keeps_axis)
        return Region(node.outputs, (inner.source,), _nodes((node,), inner.nodes), data)

    def target(self, op: Op, region: Region, x: Val) -> Any:
        axis, start, length, keeps_axis = region.data
        if not keeps_axis:
            return op.Gather(x, np.array(start, np.int64), axis=axis)
        return _cut(op, x, axis, start, length)


class MergeSliceAxes(RegionRule, family="slices"):
    """slice(slice(x, axis i), axis j) -> slice(x, axes i and j)."""

    anchors = ("Slice",)
    examples = graphs(
        "(float[N,6] x) => (float[A,2] y) { a = Slice(x, [1], [3], [1]) y = Slice(a, [1], [3], [0]) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = maker(reader, node.inputs[0], ("Slice",))
        if inner is None:
            return None
        rank = rank_of(reader, node.inputs[0])
        cuts = [*slice_numbers(reader, inner, rank), *slice_numbers(reader, node, rank)]
        require(len({axis for axis, *_ in cuts}) == len(cuts), "they cut along the same axis")
        profitable(read_once(reader, node.inputs[0]), "the inner slice is read elsewhere")
        columns = tuple(tuple(c[k] for c in cuts) for k in (1, 2, 0, 3))
        return Region(node.outputs, inner.inputs[:1], (node, inner), columns)

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Slice(x, *(list(c) for c in region.data))


class MergeConcats(RegionRule, family="slices"):
    """concat(a, concat(b, c), d) -> concat(a, b, c, d)  along one axis."""

    anchors = ("Concat",)
    examples = graphs(
        "(float[N,2] x, float[N,3] z) => (float[N,7] y) { a = Concat<axis=1>(x, z) y = Concat<axis=1>(a, x) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = [maker(reader, v, ("Concat",)) for v in node.inputs]
        if not any(inner):
            return None
        axis = axis_of(node, rank_of(reader, *node.inputs))
        inputs: list[Value] = []
        nodes = [node]
        for v, concat in zip(node.inputs, inner):
            if concat is not None and axis_of(concat, rank_of(reader, v)) == axis and read_once(reader, v):
                inputs += concat.inputs
                nodes.append(concat)
            else:
                inputs.append(v)
        profitable(len(nodes) > 1, "the inner concat is read elsewhere, or along another axis")
        return Region(node.outputs, tuple(inputs), _nodes(nodes), axis)

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        return op.Concat(*inputs, axis=region.data)


# Cutting a concatenation


def _cover(sizes: Sequence[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """The parts that hold positions [start, stop) of their concatenation: (index of the part, start in it, length)."""
    out = []
    at = 0
    for k, size in enumerate(sizes):
        a, b = max(start, at), min(stop, at + size)
        if a < b:
            out.append((k, a - at, b - a))
        at += size
    return out


def _joined(op: Op, parts: Sequence[Val], axis: int, cover: Sequence[tuple[int, int, int]]) -> Any:
    cut = [_cut(op, parts[k], axis, start, length) for k, start, length in cover]
    return cut[0] if len(cut) == 1 else op.Concat(*cut, axis=axis)


_ANOTHER = "it is put together along another axis, or a size is not known"


def _concat_along(reader: Reader, value: Value, axis: int) -> tuple[Node, list[int]] | None:
    """The Concat along an axis that computes a value, with the sizes of its parts; else None."""
    node, rank = maker(reader, value, ("Concat",)), reader.type(value).rank
    if node is None or rank is None or axis_of(node, rank) != axis:
        return None
    sizes = sizes_along(reader, node.inputs, axis)
    return None if sizes is None else (node, sizes)


class CancelSplitOfConcat(RegionRule, family="slices"):
    """split(concat(a, b, c)) -> a, concat(b, c)  when it cuts only between parts."""

    may_lose_errors = ("sizes",)
    anchors = ("Split",)
    reads_from = ("Concat",)
    examples = graphs(
        "(float[N,2] x, float[N,3] z, float[N,1] w) => (float[N,2] a, float[N,4] b) "
        "{ c = Concat<axis=1>(x, z, w) p, q = Split<axis=1>(c, [2, 4]) a = Relu(p) b = Neg(q) }",
    )
    near_misses = graphs(
        "(float[N,2] x, float[N,3] z) => (float[N,2] a, float[N,0] b, float[N,3] d) "
        "{ c = Concat<axis=1>(x, z) a, b, d = Split<axis=1>(c, [2, 0, 3]) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        axis = axis_of(node, rank_of(reader, node.inputs[0]))
        concat, sizes = required(_concat_along(reader, node.inputs[0], axis), _ANOTHER)
        lengths = required(sizes_along(reader, node.outputs, axis), _ANOTHER)
        stops = list(accumulate(lengths))
        covers = tuple(tuple(_cover(sizes, b - n, b)) for b, n in zip(stops, lengths))
        complete = all(n == sizes[k] for cover in covers for k, _, n in cover)
        profitable(complete, "it cuts inside a part")
        require(all(covers), "a part is empty")
        return Region(node.outputs, concat.inputs, (node, concat), (axis, covers))

    def target(self, op: Op, region: Region, *parts: Val) -> Any:
        axis, covers = region.data
        return [_joined(op, parts, axis, cover) for cover in covers]


class PushSliceIntoConcat(RegionRule, family="slices"):
    """slice(concat(a, b, c)) -> slice(b), or a concat of the parts that it touches;  Gather by a constant alike."""

    may_lose_errors = ("sizes",)
    anchors = ("Slice", "Gather")
    reads_from = ("Concat",)
    examples = graphs(
        "(float[N,2] x, float[N,3] z) => (float[N,2] y) { c = Concat<axis=1>(x, z) y = Slice(c, [3], [5], [1]) }",
        "(float[N,2] x, float[N,3] z) => (float[N] y) { c = Concat<axis=1>(x, z) y = Gather<axis=1>(c, 3) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        own = required(piece(reader, node.outputs[0]), "it is not one piece of known size")
        concat, sizes = required(_concat_along(reader, node.inputs[0], own.axis), _ANOTHER)
        cover = _cover(sizes, own.start, own.start + own.length)
        require(sum(n for _, _, n in cover) == own.length, "it reaches beyond the end")
        profitable(len(cover) < len(sizes), "it touches every part")
        selected = tuple(concat.inputs[k] for k, _, _ in cover)
        local = tuple((i, start, n) for i, (_, start, n) in enumerate(cover))
        return Region(node.outputs, selected, (node, concat), (own.axis, local, own.keeps_axis))

    def target(self, op: Op, region: Region, *parts: Val) -> Any:
        axis, cover, keeps_axis = region.data
        if not keeps_axis:
            return op.Gather(parts[0], np.array(cover[0][1], np.int64), axis=axis)
        return _joined(op, parts, axis, cover)


class MergeSplits(RegionRule, family="slices"):
    """split(split(x)[i]) -> split(x)  along one axis, into all the parts of both."""

    anchors = ("Split",)
    examples = graphs(
        "(float[N,6] x) => (float[N,2] a, float[N,1] b, float[N,3] c) "
        "{ a, r = Split<axis=1>(x, [2, 4]) b, c = Split<axis=1>(r, [1, 3]) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        outer = maker(reader, node.inputs[0], ("Split",))
        if outer is None:
            return None
        rank = rank_of(reader, node.inputs[0])
        axis = axis_of(node, rank)
        require(axis_of(outer, rank) == axis, "they cut along different axes")
        profitable(read_once(reader, node.inputs[0]), "the part is read elsewhere")
        index = outer.outputs.index(node.inputs[0])
        outputs = (*outer.outputs[:index], *node.outputs, *outer.outputs[index + 1 :])
        sizes = required(sizes_along(reader, outputs, axis), "a size is not known")
        return Region(outputs, outer.inputs[:1], (node, outer), (axis, tuple(sizes)))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        axis, sizes = region.data
        return op.Split(x, axis=axis, sizes=list(sizes))


class ReplaceSplitBySlice(RegionRule, family="slices"):
    """split(x) -> slice(x)  when only one part is read."""

    may_lose_errors = ("sizes",)
    anchors = ("Split",)
    examples = graphs(
        "(float[N,6] x) => (float[N,4] y) { a, b = Split<axis=1>(x, [2, 4]) y = Relu(b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        read_parts = [v for v in node.outputs if reader.is_output(v) or reader.users(v)]
        if len(read_parts) != 1 or len(node.outputs) == 1:
            return None
        own = required(piece(reader, read_parts[0]), "a size is not known")
        return Region((read_parts[0],), (own.source,), (node,), (own.axis, own.start, own.length))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return _cut(op, x, *region.data)


class MergePiecesIntoSplit(RegionRule, family="slices"):
    """x[a], x[b:c], ... -> split(x)  when Slices and Gathers of x along one axis take each position once.

    To match only once, the rule matches at the piece with the smallest id.
    """

    anchors = ("Slice", "Gather")
    examples = graphs(
        "(float[N,3] x) => (float[N] a, float[N,2] b) { a = Gather<axis=1>(x, 0) b = Slice(x, [1], [3], [1]) }",
    )
    near_misses = graphs(
        "(float[N,M] x) => (float[N] a, float[N] b) { a = Gather<axis=1>(x, 0) b = Gather<axis=1>(x, 1) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        source = node.inputs[0]
        own = piece(reader, node.outputs[0])
        if own is None:
            return None
        cuts: list[tuple[Piece, Node]] = []
        for user in reader.users(source):
            if user.op not in ("Slice", "Gather"):
                continue
            cut = piece(reader, user.outputs[0])
            if cut is None or cut.axis != own.axis:
                continue
            if not cuts and user is not node:
                return None  # the rule matches at the piece with the smallest id
            cuts.append((cut, user))
        require(len(cuts) > 1, "it is the only piece")
        size = required(_size(reader.type(source).shape, own.axis), "the size is not known")
        cuts.sort(key=lambda f: (f[0].start, f[0].length))
        at, sizes, indices = 0, [], []
        last: tuple[int, int] | None = None
        for cut, _ in cuts:
            if (cut.start, cut.length) != last:
                require(cut.start == at, "the pieces overlap, or leave something out")
                last = (cut.start, cut.length)
                at += cut.length
                sizes.append(cut.length)
            indices.append((len(sizes) - 1, cut.keeps_axis))
        require(at == size and len(sizes) > 1, "the pieces leave something out")
        outputs = tuple(n.outputs[0] for _, n in cuts)
        data = (own.axis, tuple(sizes), tuple(indices))
        return Region(outputs, (source,), tuple(n for _, n in cuts), data)

    def target(self, op: Op, region: Region, x: Val) -> Any:
        axis, sizes, indices = region.data
        parts = op.Split(x, axis=axis, sizes=list(sizes))
        return [parts[k] if keeps_axis else op.Squeeze(parts[k], [axis]) for k, keeps_axis in indices]


# Element-wise operators across Concat and Split


class _PushIntoConcat(RegionRule, family="slices"):
    """f(concat(x, y)) -> concat(f(x), f(y)) for f of one data input; the bounds of a Clip do not count as data."""

    reads_from = ("Concat",)

    def check(self, reader: Reader, node: Node, concat: Node) -> None:
        """Refuse an operator that does not treat each part on its own."""

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = maker(reader, node.inputs[0], ("Concat",))
        if inner is None:
            return None
        self.check(reader, node, inner)
        profitable(read_once(reader, node.inputs[0]), "the concat is read elsewhere")
        data = (node.op, node.attrs, len(inner.inputs), inner.attrs)
        return Region(node.outputs, (*inner.inputs, *node.inputs[1:]), (node, inner), data)

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        name, attrs, count, concat = region.data
        return op.Concat(*[op[name](x, *inputs[count:], attrs=attrs) for x in inputs[:count]], attrs=concat)


class _PullOutOfConcat(RegionRule, family="slices"):
    """concat(f(x), f(y)) -> f(concat(x, y)) for f of one data input; the bounds of a Clip do not count as data."""

    anchors = ("Concat",)

    def check(self, reader: Reader, node: Node, inner: Sequence[Node]) -> None:
        """Refuse operators that do not treat each part on its own."""
        raise NotImplementedError

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = makers(reader, node.inputs, self.reads_from or ())
        if not inner:
            return None
        name, attrs, bounds = function = unary_form(inner[0])
        require(all(unary_form(n) == function for n in inner), "the functions differ")
        self.check(reader, node, inner)
        profitable(all(read_once(reader, v) for v in node.inputs), "a function is read elsewhere")
        inputs = (*(n.inputs[0] for n in inner), *bounds)
        return Region(node.outputs, inputs, _nodes((node,), inner), (name, attrs, len(inner), node.attrs))

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        name, attrs, count, concat = region.data
        return op[name](op.Concat(*inputs[:count], attrs=concat), *inputs[count:], attrs=attrs)


class PushUnaryIntoConcat(_PushIntoConcat):
    """f(concat(x, y)) -> concat(f(x), f(y))  for f element by element, of one input."""

    anchors = UNARY
    examples = graphs(
        "(float[N,2] x, float[N,3] z) => (float[N,5] y) { a = Concat<axis=1>(x, z) y = Relu(a) }",
    )


class PullUnaryOutOfConcat(_PullOutOfConcat):
    """concat(f(x), f(y)) -> f(concat(x, y))  for f element by element, of one input."""

    reads_from = UNARY
    examples = graphs(
        "(float[N,2] x, float[N,3] z) => (float[N,5] y) { a = Relu(x) b = Relu(z) y = Concat<axis=1>(a, b) }",
        "(float[N,2] x, float[N,3] z) => (float[N,5] y) "
        "{ a = LeakyRelu<alpha=0.5>(x) b = LeakyRelu<alpha=0.5>(z) y = Concat<axis=1>(a, b) }",
    )
    near_misses = graphs(
        "(float[N,2] x, double[N,3] z) => (int64[N,5] y) "
        "{ a = Cast<to=7>(x) b = Cast<to=7>(z) y = Concat<axis=1>(a, b) }",
        "(float[N,2] x) => (float[N,2] y) { a = Relu(x) y = Concat<axis=1>(a) }",
    )

    def check(self, reader: Reader, node: Node, inner: Sequence[Node]) -> None:
        dtypes = {reader.type(n.inputs[0]).dtype for n in inner}
        require(len(dtypes) == 1, "the element types differ")


# Pools treat each channel by itself.
_POOLS = ("MaxPool", "AveragePool", "LpPool", "GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool")


class PushPoolIntoConcat(_PushIntoConcat):
    """pool(concat(x, y)) -> concat(pool(x), pool(y))  for a concat of channels."""

    nonempty = True
    anchors = _POOLS
    examples = graphs(
        "(float[N,2,4,4] x, float[N,3,4,4] z) => (float[N,5,2,2] y) "
        "{ a = Concat<axis=1>(x, z) y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(a) }",
    )
    near_misses = graphs(
        "(float[N,2,4,4] x, float[N,3,4,4] z) => (float[N,5,3,3] y, int64[N,5,3,3] i) "
        "{ a = Concat<axis=1>(x, z) y, i = MaxPool<kernel_shape=[2,2]>(a) }",
    )

    def check(self, reader: Reader, node: Node, concat: Node) -> None:
        require(len(node.outputs) == 1, "the places of the maxima are given out")
        rank = rank_of(reader, concat.outputs[0])
        require(axis_of(concat, rank) == 1, "the concat is not one of channels")


class PullPoolOutOfConcat(_PullOutOfConcat):
    """concat(pool(x), pool(y)) -> pool(concat(x, y))  for a concat of channels."""

    may_lose_errors = ("sizes",)
    reads_from = _POOLS
    examples = graphs(
        "(float[N,2,4,4] x, float[N,3,4,4] z) => (float[N,5,1,1] y) "
        "{ a = GlobalMaxPool(x) b = GlobalMaxPool(z) y = Concat<axis=1>(a, b) }",
        "(float[N,2,4] x, float[N,3,4] z) => (float[N,5,3] y) "
        "{ a = MaxPool<kernel_shape=[2]>(x) b = MaxPool<kernel_shape=[2]>(z) y = Concat<axis=1>(a, b) }",
    )
    near_misses = graphs(
        "(float[N,2,4] x, float[N,3,4] z) => (float[N,5,3] y, int64[N,2,3] i) "
        "{ a, i = MaxPool<kernel_shape=[2]>(x) b, j = MaxPool<kernel_shape=[2]>(z) y = Concat<axis=1>(a, b) }",
    )

    def check(self, reader: Reader, node: Node, inner: Sequence[Node]) -> None:
        require(axis_of(node, rank_of(reader, node.outputs[0])) == 1, "the concat is not one of channels")
        require(all(len(n.outputs) == 1 for n in inner), "the places of the maxima are given out")
        shapes = [reader.type(n.inputs[0]).shape for n in inner]
        spatial = [(s[0], *s[2:]) for s in shapes if s is not None]
        same = len(spatial) == len(inner) and all(same_dims(spatial[0], r) for r in spatial)
        require(same, "the inputs differ besides their channels, or are not known")


class PushUnaryThroughSplit(RegionRule, family="slices"):
    """split(f(x)) -> f(split(x)), each part,  for f element by element, of one input."""

    anchors = ("Split",)
    examples = graphs(
        "(float[N,4] x) => (float[N,2] y, float[N,2] z) { a = Relu(x) y, z = Split<axis=1, num_outputs=2>(a) }",
        "(float[N,4] x) => (float[N,4] y) { a = Relu(x) y = Split<axis=1, num_outputs=1>(a) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = maker(reader, node.inputs[0], UNARY)
        if inner is None:
            return None
        profitable(read_once(reader, node.inputs[0]), "the function is read elsewhere")
        data = (inner.op, inner.attrs, len(inner.inputs), node.attrs, len(node.outputs))
        return Region(node.outputs, (*inner.inputs, *node.inputs[1:]), (node, inner), data)

    def target(self, op: Op, region: Region, x: Val, *more: Val | None) -> Any:
        name, attrs, count, split, outputs = region.data
        bounds, sizes = more[: count - 1], more[count - 1 :]
        parts = op.Split(x, *sizes, attrs=split, outputs=outputs)
        return [op[name](p, *bounds, attrs=attrs) for p in (parts if outputs > 1 else (parts,))]


class PullUnaryOutOfSplit(RegionRule, family="slices"):
    """f(split(x)), each part -> split(f(x))  for f element by element, of one input."""

    anchors = ("Split",)
    examples = graphs(
        "(float[N,4] x) => (float[N,2] y, float[N,2] z) "
        "{ a, b = Split<axis=1, num_outputs=2>(x) y = Relu(a) z = Relu(b) }",
        "(float[N,4] x) => (float[N,2] y, float[N,2] z) "
        "{ a, b = Split<axis=1, num_outputs=2>(x) y = Elu<alpha=0.5>(a) z = Elu<alpha=0.5>(b) }",
    )
    near_misses = graphs(
        "(float[N] x, float[1] u) => (float[N] y) { a = Split<num_outputs=1>(u) y = Clip(x, a) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        outer = readers_of_parts(reader, node)
        if not outer or not is_unary(outer[0]):
            return None
        function = unary_form(outer[0])
        require(all(unary_form(n) == function for n in outer), "the functions differ")
        # If a part of the Split is a bound (of a Clip), the functions have no common bound.
        require(outer[0].inputs[0] == node.outputs[0], "a part is a bound")
        outputs = tuple(n.outputs[0] for n in outer)
        data = (function[0], function[1], len(node.inputs), node.attrs, len(outputs))
        return Region(outputs, (*node.inputs, *function[2]), (node, *outer), data)

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        name, attrs, count, split, outputs = region.data
        y = op[name](inputs[0], *inputs[count:], attrs=attrs)
        parts = op.Split(y, *inputs[1:count], attrs=split, outputs=outputs)
        return list(parts) if outputs > 1 else [parts]


def readers_of_parts(reader: Reader, node: Node) -> list[Node]:
    """The readers of a Split's outputs, if each output has one reader and all readers have the same operator; otherwise
    [].
    """
    outer: list[Node] = []
    for v in node.outputs:
        users = reader.users(v)
        if len(users) != 1 or reader.is_output(v) or users[0] in outer:
            return []
        if outer and users[0].op != outer[0].op:
            return []
        outer.append(users[0])
    return outer


def _classify(
    reader: Reader, values: Sequence[Value], outs: Sequence[Sequence[Dim]], axis: int
) -> tuple[Value, ...] | None:
    """One operand of the operators of all parts: one value for each part, or a single value that all share.

    None if these values cannot be concatenated along the axis. `outs` are the shapes of the operators' results.
    """
    rank = len(outs[0])
    if len(set(values)) == 1:
        shape = reader.val(values[0]).shape
        at = axis - (rank - len(shape))
        if at < 0 or shape[at] == 1:
            return (values[0],)
    rests = set()
    for v, out in zip(values, outs):
        shape = reader.val(v).shape
        at = axis - (rank - len(shape))
        if at < 0 or shape[at] is None or shape[at] != out[axis]:
            return None
        rests.add((*shape[:at], *shape[at + 1 :]))
    if len(rests) != 1 or None in next(iter(rests)):
        return None
    return tuple(values)


def _same_function(nodes: Sequence[Node]) -> bool:
    first = nodes[0]
    return all((n.op, n.attrs, len(n.inputs)) == (first.op, first.attrs, len(first.inputs)) for n in nodes)


class PullBinaryOutOfConcat(RegionRule, family="slices"):
    """concat(f(x, a), f(y, b)) -> f(concat(x, y), concat(a, b))  for f element by element.

    If all parts share an operand that broadcasts along the axis, it is not concatenated.
    """

    anchors = ("Concat",)
    examples = graphs(
        "(float[N,2] x, float[N,3] z, float[2] a, float[3] b) => (float[N,5] y) "
        "{ p = Add(x, a) q = Add(z, b) y = Concat<axis=1>(p, q) }",
        "(float[N,2] x, float[N,3] z, float[N,1] a) => (float[N,5] y) "
        "{ p = Mul(x, a) q = Mul(z, a) y = Concat<axis=1>(p, q) }",
    )
    near_misses = graphs(
        "(float[N,2] x, float[N,3] z, int64[2] a, float[3] b) => (float[N,5] y) "
        "{ p = Pow(x, a) q = Pow(z, b) y = Concat<axis=1>(p, q) }",
        "(float[N,2] x, float[2] a) => (float[N,4] y) { p = Add(x, a) y = Concat<axis=1>(p, p) }",
        "(float[N,2,3] x, float[N,4,3] z, float[2,3] a, float[4,1] b) => (float[N,6,3] y) "
        "{ p = Add(x, a) q = Add(z, b) y = Concat<axis=1>(p, q) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = makers(reader, node.inputs, BROADCAST)
        if not inner or not _same_function(inner):
            return None
        rank = rank_of(reader, *node.inputs)
        axis = axis_of(node, rank)
        profitable(all(read_once(reader, v) for v in node.inputs), "a function is read elsewhere")
        profitable(len({n.outputs[0] for n in inner}) == len(inner), "a part is repeated")
        outs = [n.types[0].shape or () for n in inner]
        operands = _columns(reader, inner, outs, axis)
        data = (inner[0].op, inner[0].attrs, rank, axis, tuple(len(o) for o in operands))
        return Region(node.outputs, tuple(v for o in operands for v in o), (node, *inner), data)

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        name, attrs, rank, axis, counts = region.data
        return op[name](*_together(op, inputs, rank, axis, counts), attrs=attrs)


def _columns(
    reader: Reader, inner: Sequence[Node], outs: Sequence[Sequence[Dim]], axis: int
) -> list[tuple[Value, ...]]:
    """The operands of the operators of all parts, by position. Refuses operands that cannot be concatenated."""
    columns = []
    for k in range(len(inner[0].inputs)):
        values = [n.inputs[k] for n in inner]
        columns.append(required(_classify(reader, values, outs, axis), "operands cannot be put together"))
    dtypes = [{reader.type(n.inputs[k]).dtype for n in inner} for k in range(len(inner[0].inputs))]
    require(all(len(d) == 1 for d in dtypes), "the element types differ")
    require(any(len(o) > 1 for o in columns), "nothing differs along the axis")
    return columns


def _together(op: Op, inputs: Sequence[Val], rank: int, axis: int, counts: Sequence[int]) -> list[Any]:
    """Concatenate operands: `counts` says how many of the inputs form each operand. A single input broadcasts."""
    out = []
    at = 0
    for count in counts:
        parts = inputs[at : at + count]
        at += count
        out.append(parts[0] if count == 1 else op.Concat(*parts, axis=axis - (rank - parts[0].rank)))
    return out


class PullBinaryOutOfSplit(RegionRule, family="slices"):
    """f(split(x), c), each part with a constant -> split(f(x, concat(c)))  for f element by element.

    If all parts share an operand that broadcasts along the axis, it need not be constant.
    """

    may_lose_errors = ("sizes",)
    anchors = ("Split",)
    examples = graphs(
        "(float[N,5] x) => (float[N,2] y, float[N,3] z) "
        "{ a, b = Split<axis=1>(x, [2, 3]) y = Add(a, [1.0, 2.0]) z = Add(b, [3.0, 4.0, 5.0]) }",
    )
    near_misses = graphs(
        "(float[N,M] x, float w) => (float[N,K] y, float[N,K] z) "
        "<float[N,K] a, float[N,K] b> { a, b = Split<axis=1, num_outputs=2>(x) y = Add(a, w) z = Add(b, w) }",
        "(float[N,4] x) => (float[N,2] y, float[N,2] z) "
        "{ a, b = Split<axis=1, num_outputs=2>(x) y = Mul(a, a) z = Mul(b, b) }",
        "(float[N,4] x, float[N,2] c) => (float[N,2] y, float[N,2] z) "
        "{ a, b = Split<axis=1, num_outputs=2>(x) y = Add(a, c) t = Relu(y) z = Add(b, t) }",
        "(float[2,4] x) => (float[2,2,2] y, float[2,2,2] z) "
        "<float[2,2,2] c = {1,2,3,4,5,6,7,8}> { a, b = Split<axis=1, num_outputs=2>(x) y = Add(a, c) z = Add(b, c) }",
        "(float[1,4] x) => (float[2,2] y, float[2,2] z) <float[2,2] c = {1,2,3,4}, float[2,1] d = {5,6}> "
        "{ a, b = Split<axis=1, num_outputs=2>(x) y = Add(a, c) z = Add(b, d) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        outer = readers_of_parts(reader, node)
        if len(outer) < 2 or outer[0].op not in _BROADCAST or not _same_function(outer):
            return None
        indices = [n.inputs.index(v) for n, v in zip(outer, node.outputs)]
        require(len(set(indices)) == 1, "the parts stand in different places")
        index = indices[0]
        rank = rank_of(reader, *node.outputs)
        axis = axis_of(node, rank)
        outs = [n.types[0].shape or () for n in outer]
        for n, v in zip(outer, node.outputs):
            require(same_dims(n.types[0].shape, reader.type(v).shape), "an operand broadcasts the part")
            require(n.inputs.count(v) == 1, "a part is read twice")
        operands = _columns(reader, outer, outs, axis)
        for k, operand in enumerate(operands):
            if k != index:
                fixed = len(operand) == 1 or all(reader.is_const(v) for v in operand)
                require(fixed, "an operand is not constant")
        counts = tuple(1 if k == index else len(o) for k, o in enumerate(operands))
        inputs = [v for k, o in enumerate(operands) for v in (node.inputs[:1] if k == index else o)]
        sizes = required(sizes_along(reader, node.outputs, axis), "a size is not known")
        outputs = tuple(n.outputs[0] for n in outer)
        data = (outer[0].op, outer[0].attrs, rank, axis, counts, tuple(sizes))
        return Region(outputs, tuple(inputs), (node, *outer), data)

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        name, attrs, rank, axis, counts, sizes = region.data
        y = op[name](*_together(op, inputs, rank, axis, counts), attrs=attrs)
        return op.Split(y, axis=axis, sizes=list(sizes))


class PushBinaryIntoConcat(RegionRule, family="slices"):
    """f(concat(x, y), c) -> concat(f(x, c'), f(y, c"))  for f element by element.

    Each of the other operands broadcasts along the axis, is constant (and is sliced), or is a concatenation of parts of
    the same sizes.
    """

    may_lose_errors = ("sizes",)
    anchors = BROADCAST
    reads_from = ("Concat",)
    examples = graphs(
        "(float[N,2] x, float[N,3] z, float[N,1] b) => (float[N,5] y) { a = Concat<axis=1>(x, z) y = Add(a, b) }",
        "(float[N,2] x, float[N,3] z) => (float[N,5] y) "
        "{ a = Concat<axis=1>(x, z) y = Mul(a, [1.0, 2.0, 3.0, 4.0, 5.0]) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        first = next(filter(None, (maker(reader, v, ("Concat",)) for v in node.inputs)), None)
        if first is None:
            return None
        rank = rank_of(reader, first.outputs[0], node.outputs[0])
        axis = axis_of(first, rank)
        sizes = required(sizes_along(reader, first.inputs, axis), "a size is not known")
        total = sum(sizes)
        kinds: list[str] = []
        inputs: list[Value] = []
        nodes = [node]
        for v in node.inputs:
            shape = reader.val(v).shape
            at = axis - (rank - len(shape))
            concat = _concat_along(reader, v, axis) if len(shape) == rank else None
            if concat is not None and concat[1] == sizes:
                profitable(read_once(reader, v), "a concat is read elsewhere")
                kinds.append("parts")
                inputs += concat[0].inputs
                nodes.append(concat[0])
            elif at < 0 or shape[at] == 1:
                kinds.append("shared")
                inputs.append(v)
            else:
                require(reader.is_const(v) and _size(shape, at) == total, "an operand is not cut alike")
                kinds.append("cut")
                inputs.append(v)
        data = (node.op, node.attrs, rank, axis, tuple(sizes), tuple(kinds))
        return Region(node.outputs, tuple(inputs), _nodes(nodes), data)

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        name, attrs, rank, axis, sizes, kinds = region.data
        starts = [0, *accumulate(sizes)]
        out = []
        for k, size in enumerate(sizes):
            operands = []
            at = 0
            for kind in kinds:
                v = inputs[at + k] if kind == "parts" else inputs[at]
                at += len(sizes) if kind == "parts" else 1
                if kind == "cut":
                    v = _cut(op, v, axis - (rank - v.rank), starts[k], size)
                operands.append(v)
            out.append(op[name](*operands, attrs=attrs))
        return op.Concat(*out, axis=axis)


_BROADCAST = frozenset(BROADCAST)
