"""Rules for values that hold their own positions: exporters compute masks from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rewrite_rules.axes import axis_of, fronts, int_attr, ints_input, required
from rewrite_rules.exporter_cleanup import numbers
from xrlflow.ir import Dim, Node, Value, dims
from xrlflow.rewrite import Op, Reader, Region, RegionRule, Val, require

_MOST_STEPS = 8


@dataclass(frozen=True, slots=True)
class Counted:
    """A value of integers that counts from 0 along an axis: each element is its own position along this axis.

    `axes` are several only where dimensions are 1. `shape`: the value's dimensions (None: unknown).
    """

    axes: frozenset[int]
    shape: tuple[Dim, ...]


def counted(reader: Reader, value: Value) -> Counted | None:
    """How a value counts; None if it is not known to count. A constant is looked at; views and an Expand are followed
    up to a Range.
    """
    return _counted(reader, value, _MOST_STEPS)


def _counted(reader: Reader, value: Value, steps: int) -> Counted | None:
    """See `counted`. `steps`: the longest chain of nodes."""
    array = reader.val(value).array_or_none
    if array is not None:
        return _constant(array)
    node = reader.producer(value) if steps else None
    if node is None:
        return None
    if node.op == "Range":
        return _range(reader, node)
    if node.op not in ("Unsqueeze", "Reshape", "Expand"):
        return None
    inner = _counted(reader, node.inputs[0], steps - 1)
    if inner is None:
        return None
    if node.op == "Expand":
        return _expanded(inner, numbers(reader, node.inputs[1]))
    given = required(ints_input(reader, node, 1), "the axes are left out")
    if node.op == "Unsqueeze":
        return _unsqueezed(inner, given)
    return _reshaped(inner, given, bool(node.attrs.get("allowzero")))


def _range(reader: Reader, node: Node) -> Counted | None:
    """How a Range counts: from 0, by 1, or not at all."""
    start, step = (reader.val(node.inputs[i]).uniform for i in (0, 2))
    if start != 0 or step != 1:
        return None
    return Counted(frozenset((0,)), numbers(reader, node.inputs[1]) or (None,))


def _unsqueezed(inner: Counted, given: Sequence[int]) -> Counted:
    rank = len(inner.shape) + len(given)
    added = fronts(given, rank)
    old = [axis for axis in range(rank) if axis not in added]
    sizes = dict(zip(old, inner.shape))
    return Counted(frozenset(old[axis] for axis in inner.axes), tuple(sizes.get(i, 1) for i in range(rank)))


def _reshaped(inner: Counted, given: Sequence[int], allowzero: bool) -> Counted | None:
    """A value after a Reshape; None unless this only adds and drops dimensions of 1 around the axis that counts."""
    if len(inner.axes) != 1:
        return None
    (axis,) = inner.axes
    wide = [i for i, n in enumerate(given) if n == -1 or (n == 0 and i == axis and not allowzero)]
    units = all(size == 1 for i, size in enumerate(inner.shape) if i != axis)
    if not units or len(wide) != 1 or any(n != 1 for i, n in enumerate(given) if i != wide[0]):
        return None
    size = inner.shape[axis]
    return Counted(frozenset(wide), tuple(size if i == wide[0] else 1 for i in range(len(given))))


def _constant(array: npt.NDArray[Any]) -> Counted | None:
    """How an array counts."""
    axes = frozenset(
        axis
        for axis, size in enumerate(array.shape)
        if (array == np.arange(size).reshape(-1, *[1] * (array.ndim - axis - 1))).all()
    )
    return Counted(axes, array.shape) if axes else None


def _expanded(inner: Counted, target: Sequence[Dim] | None) -> Counted | None:
    """A value after an Expand to a shape; None if it no longer counts along one of its axes."""
    if target is None:
        return None
    rank = max(len(target), len(inner.shape))
    before = (1,) * (rank - len(inner.shape)) + inner.shape
    wanted = (1,) * (rank - len(target)) + tuple(target)
    shape = tuple(
        new if own == 1 else own if new in (1, own) or dims.equal(new, own) else None
        for own, new in zip(before, wanted)
    )
    moved = (axis + rank - len(inner.shape) for axis in inner.axes)
    axes = frozenset(axis for axis in moved if wanted[axis] == 1 or dims.equal(wanted[axis], before[axis]))
    return Counted(axes, shape) if axes else None


_MASK = (
    "agraph (float[{x}] x) => (float[A,B,C{more}] y) <int64 o = {{0}}, int64 i = {{1}}, int64 k = {{2}},"
    " int64[1] w = {{1}}, int64[1] z = {{2}}, int64[2] a = {{1, 2}}, int64[{count}] r = {{{axes}}},"
    " int64[1] e = {{-1}}> {{"
    " s = Shape<start=0, end=1>(x) n = Squeeze(s) t = Shape<start={second}, end=2>(x) m = Squeeze(t)"
    " p = Range(o, n, i) q = Range({start}, m, {step}) u = Unsqueeze(p, a) v = {view}(q, r)"
    " b = Concat<axis=0>(s, {wide}, t) c = Expand(u, b) d = Expand(v, b) f = Unsqueeze(c, e) l = Unsqueeze(d, e)"
    " j = Concat<axis=-1>({parts}) y = GatherND<batch_dims=0>(x, j) }}"
)
_USUAL = {
    "x": "N,M", "more": "", "second": "1", "start": "o", "step": "i", "view": "Unsqueeze",
    "count": "2", "axes": "0, 1", "wide": "w", "parts": "f, l",
}  # fmt: skip


def _mask(**changes: str) -> str:
    """The text of an example: all positions of a matrix are gathered."""
    return _MASK.format(**_USUAL | changes)


class RemoveGatherOfAllPositions(RegionRule, family="exports"):
    """gathernd(x, [i, j, ...]) -> unsqueeze(x)  where i, j, ... are all positions of x, in order.

    PyTorch writes masks of attention so: it evaluates a function of positions at all of them.
    """

    may_lose_errors = ("sizes",)
    canonicalises = True
    anchors = ("GatherND",)
    examples = (
        _mask(),
        _mask(view="Reshape", count="3", axes="1, 1, -1"),
        _mask(x="N,M,5", more=",5"),
        "agraph (float[N,3] x) => (float[N,3] y) <int64 o = {0}, int64 i = {1}, int64[1] e = {-1}> {"
        " s = Shape<start=0, end=1>(x) n = Squeeze(s) p = Range(o, n, i) u = Unsqueeze(p, e) y = GatherND(x, u) }",
    )
    near_misses = (
        _mask(parts="l, f"),
        _mask(start="i"),
        _mask(step="k"),
        _mask(second="0").replace("end=2", "end=1"),
        _mask(x="N,N", parts="l, l"),
        _mask(wide="z"),
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        x, indices = node.inputs
        shape, rank = reader.type(x).shape, reader.type(indices).rank
        if shape is None or not rank or int_attr(node, "batch_dims", 0):
            return None
        found, nodes = self._parts(reader, indices, rank - 1)
        parts = [part for part in found if part is not None]
        if len(parts) != len(found):
            return None
        axes: list[int] = []
        for size, part in zip(shape, parts):
            later = [axis for axis in sorted(part.axes) if not axes or axis > axes[-1]]
            require(bool(later), "the axes are in another order")
            equal = [axis for axis in later if dims.equal(part.shape[axis], size)]
            require(bool(equal), "not all are gathered")
            axes.append((equal or later or sorted(part.axes))[0])
        others = tuple(i for i in range(rank - 1) if i not in axes)
        single = all(any(part.shape[i] == 1 for part in parts) for i in others)
        require(single, "they are gathered several times")
        return Region(node.outputs, (x,), (node, *nodes), others)

    @staticmethod
    def _parts(
        reader: Reader, indices: Value, last: int
    ) -> tuple[Sequence[Counted | None], tuple[Node, ...]]:
        """How each index counts, and the node that joins them along the axis `last`."""
        array = reader.val(indices).array_or_none
        if array is not None:
            return [_constant(array[..., i]) for i in range(array.shape[last])], ()
        concat = reader.producer(indices)
        joined = concat is not None and concat.op == "Concat" and axis_of(concat, last + 1) == last
        parts: list[Counted | None] = []
        for value in concat.inputs if concat is not None and joined else (indices,):
            part = counted(reader, value)
            alone = part is not None and part.shape[last] == 1
            parts.append(
                Counted(part.axes - {last}, part.shape[:last]) if part is not None and alone else None
            )
        return parts, (concat,) if concat is not None and joined else ()

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Unsqueeze(x, list(region.data)) if region.data else x
