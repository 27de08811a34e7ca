"""Helpers with which region rules read a graph: numbers, operands, squares, and the nodes between two values."""

from __future__ import annotations

import math
from collections.abc import Collection

from rewrite_rules.elementwise import keeps_shape, made_by
from rewrite_rules.reshape import VIEWS
from xrlflow.ir import ABSENT, Dim, DType, Node, Value, dims
from xrlflow.rewrite import Reader, Val, profitable, require


def only_reader(reader: Reader, value: Value) -> Node | None:
    """The node that reads a value, if it is the only one and the value is no output of the graph; else None."""
    users = [] if reader.is_output(value) else reader.users(value)
    return users[0] if len(users) == 1 else None


def number_of(reader: Reader, value: Value, partner: Value) -> float | None:
    """The number that all elements of a small constant equal, if the constant does not change the other operand's
    shape.
    """
    if not reader.is_const(value):
        return None
    number = reader.val(value).uniform
    keeps = number is not None and keeps_shape(reader.type(partner).shape, reader.type(value).shape)
    return number if keeps else None


def is_number(reader: Reader, value: Value, number: float, partner: Value) -> bool:
    """Whether all elements of a value equal this number, rounded to float32."""
    actual = number_of(reader, value, partner)
    return actual is not None and math.isclose(actual, number, rel_tol=1e-6)


# Types of which ONNX Runtime can tell the shape.
_SIZED = frozenset({DType.FLOAT, DType.DOUBLE, DType.INT32, DType.INT64, DType.BOOL, DType.UINT8})


def carrier_of(reader: Reader, value: Value, axis: int) -> tuple[Value, int]:
    """A value and its axis with the size that this value has at `axis`: an input of the model if the value is computed
    from one of this size, so that whatever is computed of the size is computed once; else the value itself.
    """
    size = (reader.type(value).shape or ())[axis]
    shapes = {v: reader.type(v).shape or () for v in reader.graph.inputs} if isinstance(size, str) else {}
    carriers = {v: s.index(size) for v, s in shapes.items() if size in s and reader.type(v).dtype in _SIZED}
    visited = {value}
    work = [value] if carriers else []
    for each in work:
        node = reader.graph.producers.get(each)
        new = [] if node is None else [v for v in node.inputs if v != ABSENT and v not in visited]
        visited.update(new)
        work.extend(new)
    return next(((v, at) for v, at in carriers.items() if v in visited), (value, axis))


def most_of(reader: Reader, size: Dim) -> int | None:
    """The greatest number that an open dimension is where the model runs; None if none is known.

    A table of 512 positions bounds the length of a text: the first `min(512, length)` of them are added to `length`
    words, which fails for more.
    """
    if not isinstance(size, str):
        return size
    for node in reader.graph.nodes():
        if node.op not in ("Add", "Mul", "Expand"):
            continue
        for value in node.inputs:
            parts = zip(reversed(reader.type(value).shape or ()), reversed(node.types[0].shape or ()))
            for part in (a for a, whole in parts if whole == size != a and isinstance(a, str)):
                most = dims.value(part, {size: 1 << 40})
                least = None if most is None else dims.dim(dims.minimum(dims.symbol(size), most))
                if most is not None and 1 < most < 1 << 40 and dims.equal(part, least):
                    return most
    return None


def operands(node: Node | None) -> list[tuple[Value, Value]]:
    """The pairs of a node's two inputs: in both orders, except for Sub and Div; empty if the node is None."""
    if node is None or len(node.inputs) != 2:
        return []
    a, b = node.inputs
    return [(a, b)] if node.op in ("Sub", "Div") else [(a, b), (b, a)]


def square_of(reader: Reader, value: Value) -> Value | None:
    """The value of which this value is the square; None if it is no square."""
    node = made_by(reader, value, "Mul", "Pow")
    if node is None:
        return None
    base, factor = node.inputs
    squared = base == factor if node.op == "Mul" else is_number(reader, factor, 2.0, base)
    return base if squared else None


def number_for(c: Val, x: Val) -> float:
    """The number that all elements of a constant equal. Refuses other constants, and a constant that would
    broadcast x.
    """
    number = c.uniform
    require(number is not None, "the constant is not one number")
    require(keeps_shape(x.type.shape, c.type.shape), "it may broadcast")
    assert number is not None
    return number


# The views by which a reduction's result gets the rank of the reduced tensor again.
RANK_VIEWS = (*VIEWS, "Expand")


def between(reader: Reader, out: Value, inputs: Collection[Value]) -> tuple[Node, ...]:
    """The nodes that compute `out` from `inputs` and constants. Refuses if an inner value is read elsewhere.

    Nodes that compute the shape for a Reshape or Expand are not included.
    """
    nodes: dict[Value, Node] = {}
    work = [out]
    while work:
        value = work.pop()
        if value == ABSENT or value in inputs:
            continue
        node = reader.producer(value)
        if node is None or node.const or node.id in nodes:
            continue
        nodes[node.id] = node
        work.extend(node.inputs[:1] if node.op in RANK_VIEWS else node.inputs)
    for node in nodes.values():
        for value in node.outputs:
            if value != out:
                inside = not reader.is_output(value) and all(u.id in nodes for u in reader.users(value))
                profitable(inside, "an inner value is read elsewhere")
    return tuple(nodes.values())


# Whether the comparison is true if the first operand is smaller, and whether it is true if the operands are equal.
COMPARISONS = {
    "Less": (True, False),
    "LessOrEqual": (True, True),
    "Greater": (False, False),
    "GreaterOrEqual": (False, True),
}
