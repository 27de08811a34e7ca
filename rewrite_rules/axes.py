"""Helpers for axes and permutations, and for the attributes and constant inputs that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from xrlflow.ir import ABSENT, Dim, Node, Value, dims
from xrlflow.ops.axes import AXES
from xrlflow.ops.eval_shape import ends_of_slice
from xrlflow.rewrite import Reader, Refused, profitable, require

T = TypeVar("T")


def front(axis: int, rank: int) -> int:
    """An axis counted from the front. Refuses an axis that a tensor of this rank does not have."""
    require(-rank <= axis < rank, "an axis is out of range")
    return axis % rank


def fronts(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Axes counted from the front. Refuses repeated axes, whose meaning ONNX does not define."""
    out = tuple(front(a, rank) for a in axes)
    profitable(len(set(out)) == len(out), "an axis is repeated")
    return out


def permutation(perm: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """A Transpose's permutation. Without the attribute it reverses the dimensions."""
    return tuple(range(rank))[::-1] if perm is None else tuple(perm)


def compose(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """The permutation that transposes by `first`, then by `second`."""
    return tuple(first[i] for i in second)


def inverse(perm: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes `perm`."""
    return tuple(sorted(range(len(perm)), key=perm.__getitem__))


def is_identity(perm: Sequence[int]) -> bool:
    return tuple(perm) == tuple(range(len(perm)))


def int_attr(node: Node, name: str, default: int) -> int:
    """An integer attribute, or its default."""
    value = node.attrs.get(name, default)
    assert isinstance(value, int)
    return value


def perm_of(node: Node, rank: int) -> tuple[int, ...]:
    """The permutation of a Transpose."""
    perm = node.attrs.get("perm")
    return permutation(perm if isinstance(perm, tuple) else None, rank)  # type: ignore[arg-type]


def rank_of(reader: Reader, *values: Value) -> int:
    """The common rank of values. Refuses an unknown rank and different ranks."""
    first, *more = [reader.val(v).rank for v in values]
    require(all(rank == first for rank in more), "ranks differ")
    return first


def ints_input(reader: Reader, node: Node, index: int) -> tuple[int, ...] | None:
    """The numbers of a constant input; None if the input is left out. Refuses an input that is not a small constant."""
    if index >= len(node.inputs) or node.inputs[index] == ABSENT:
        return None
    return reader.val(node.inputs[index]).ints


def required(value: T | None, reason: str) -> T:
    """The value, if it is not None. Refuses the match if it is."""
    if value is None:
        raise Refused(reason)
    return value


def slice_numbers(reader: Reader, node: Node, rank: int) -> list[tuple[int, int, int, int]]:
    """The axes (from the front), starts, ends (see `slice_ends`) and steps of a Slice. Refuses inputs that are not
    constant.
    """
    starts, ends, axes, steps = (ints_input(reader, node, i) for i in range(1, 5))
    starts, ends = required(starts, "a start is left out"), required(ends, "an end is left out")
    steps = steps or (1,) * len(starts)
    axes_ = fronts(range(len(starts)) if axes is None else axes, rank)
    profitable(len(axes_) == len(starts) == len(ends) == len(steps), "the numbers of a slice are not as many")
    if any(s < 0 for s in steps):
        ends = slice_ends(ends, steps)
    return list(zip(axes_, starts, ends, steps))


def slice_ends(ends: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    """The ends of a Slice as ONNX, and Python, mean them (`ends_of_slice`)."""
    return tuple(ends_of_slice(np.array(ends, np.int64), np.array(steps, np.int64)).tolist())


def same_dims(a: Sequence[Dim] | None, b: Sequence[Dim] | None) -> bool:
    """Whether two shapes are known and are equal at all sizes of their symbols."""
    return a is not None and b is not None and len(a) == len(b) and all(map(dims.equal, a, b))


def axis_of(node: Node, rank: int, default: int = 0) -> int:
    """A node's `axis` counted from the front."""
    return front(int_attr(node, "axis", default), rank)


def own_axes(reader: Reader, node: Node) -> tuple[int, ...]:
    """The axes along which a node combines positions (see `xrlflow.ops.axes`)."""
    axes = AXES[node.op]
    if not axes.own:
        return ()
    rank = rank_of(reader, node.inputs[0])
    if axes.own == "axis":
        return (axis_of(node, rank, axes.default),)
    numbers = ints_input(reader, node, 1)
    return fronts(numbers or (() if node.attrs.get("noop_with_empty_axes") else range(rank)), rank)


def keeps_axes(node: Node) -> bool:
    """Whether all axes of a node's input are axes of its result."""
    return AXES[node.op].does != "reduced" or bool(node.attrs.get("keepdims", 1))


def data_inputs(node: Node) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """The inputs that have the axes of the result, and the other inputs except those that list axes."""
    axes = AXES[node.op]
    count = 1 if axes.of == "first" else len(node.inputs)
    return node.inputs[:count], () if axes.own == "axes" else node.inputs[count:]


def reshape_numbers(before: Sequence[Dim], after: Sequence[Dim]) -> list[int]:
    """The constant shape with which a Reshape of `before` gives `after`, for all sizes of the symbols.

    A symbol at the same index is copied (0). One more symbol may be inferred (-1), if no other dimension can be 0.
    Refuses if this is not enough. Refuses a dimension that becomes 0, because Reshape would copy the input's dimension
    instead.
    """
    out: list[int] = []
    for i, dim in enumerate(after):
        if isinstance(dim, int):
            require(dim > 0 or (i < len(before) and before[i] == 0), "a dimension is 0")
            out.append(dim)
        elif i < len(before) and dims.equal(before[i], dim):
            out.append(0)
        else:
            out.append(-1)
    require(out.count(-1) <= 1, "a dimension is not known")
    require(-1 not in out or 0 not in out, "a dimension that is not known may be 0")
    return out
