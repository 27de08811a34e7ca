"""Helpers that cut and join constant weights. What is cut and joined again becomes the original constant."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from rewrite_rules.axes import axis_of
from xrlflow.ir import Node
from xrlflow.rewrite import Op, Val

# The most multiplications of a product of constants, which is computed when the model is written.
AT_EXPORT = 1 << 32


def _producer(v: Val) -> Node | None:
    return v.graph.producers.get(v.value)


def slice_constant(op: Op, w: Val, axis: int, start: int, stop: int) -> Any:
    """w[start:stop] along an axis; if w is a Concat that has exactly this part, the part itself."""
    node = _producer(w)
    if node is not None and node.op == "Concat" and axis_of(node, w.rank) == axis:
        parts = [Val(w.graph, v, w.graph.type(v)) for v in node.inputs]
        ends = list(accumulate(p.size(axis) for p in parts))
        for part, end in zip(parts, ends):
            if end == stop and end - part.size(axis) == start:
                return part
    return op.Slice(w, [start], [stop], [axis])


def concat_constants(op: Op, parts: Sequence[Val], axis: int) -> Any:
    """The concatenation of the parts; if they are all parts of one constant, that constant."""
    first = _producer(parts[0])
    if first is not None and first.op == "Slice":
        source = Val(parts[0].graph, first.inputs[0], parts[0].graph.type(first.inputs[0]))
        ends = list(accumulate(p.size(axis) for p in parts))
        starts = [0, *ends[:-1]]
        cuts = list(zip(parts, starts, ends))
        if (
            source.rank == parts[0].rank
            and source.size(axis) == ends[-1]
            and all(_is_slice(part, source, axis, start, stop) for part, start, stop in cuts)
        ):
            return source
    return op.Concat(*parts, axis=axis)


def cut_order(parts: Sequence[Val]) -> list[int]:
    """The order in which the parts were cut out of one constant. For other parts, an order that depends only on the
    parts: the one of their names in the file.

    So callers that join the same parts (for instance in each time step) get the same constant, and those that join
    other parts of the same names (in each layer of a network) get them in the same order.
    """

    def named(i: int) -> tuple[int, str, int]:
        name = parts[i].graph.leaves.names.get(parts[i].value, "")
        return len(name), name, parts[i].value

    by_name = sorted(range(len(parts)), key=named)
    positions = []
    for part in parts:
        node = _producer(part)
        start = part.graph.const(node.inputs[1]) if node is not None and node.op == "Slice" else None
        if node is None or start is None or start.array is None or start.array.size != 1:
            return by_name
        positions.append((node.inputs[0], int(start.array.reshape(()))))
    if len({source for source, _ in positions}) != 1:
        return by_name
    return sorted(range(len(parts)), key=lambda i: positions[i][1])


def _is_slice(part: Val, source: Val, axis: int, start: int, stop: int) -> bool:
    """Whether a constant is source[start:stop], written as `slice_constant` does."""
    node = _producer(part)
    if node is None or node.op != "Slice" or node.inputs[0] != source.value or len(node.inputs) != 4:
        return False
    consts = [part.graph.const(v) for v in node.inputs[1:]]
    arrays = [None if c is None else c.array for c in consts]
    return all(
        a is not None and a.shape == (1,) and int(a[0]) == expected
        for a, expected in zip(arrays, (start, stop, axis))
    )
