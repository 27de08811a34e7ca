"""Small graphs and edits for the tests of cost models."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from xrlflow.ir import (
    NO_ATTRS,
    Attr,
    Attrs,
    Const,
    DType,
    Edit,
    Graph,
    Leaves,
    Node,
    TensorType,
    Value,
    plan_edit,
)


def t(*shape: int | str | None, dtype: DType = DType.FLOAT, const: bool = False) -> TensorType:
    return TensorType(dtype, shape, const)


@dataclass
class Builder:
    """Nodes one after the other; values are numbered as they come."""

    leaves: Leaves = field(default_factory=Leaves)
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    last: int = 0

    def _next(self) -> Value:
        self.last += 1
        return Value(self.last)

    def input(self, type: TensorType) -> Value:
        value = self._next()
        self.leaves.types[value] = type
        self.inputs.append(value)
        return value

    def weight(self, *shape: int) -> Value:
        """A constant without its numbers at hand."""
        value = self._next()
        self.leaves.types[value] = t(*shape, const=True)
        return value

    def const(self, array: npt.NDArray[Any], dtype: DType) -> Value:
        type = TensorType(dtype, array.shape, True)
        return self.leaves.add_const(self._next(), Const(type, None, array))  # type: ignore[arg-type]

    def node(self, op: str, inputs: list[Value], *types: TensorType, **attrs: Attr) -> Node:
        outputs = tuple(self._next() for _ in types)
        found = Node(op, tuple(inputs), outputs, types, Attrs(attrs) if attrs else NO_ATTRS)
        self.nodes.append(found)
        return found

    def ints(self, *numbers: int) -> Value:
        return self.const(np.array(numbers, np.int64), DType.INT64)

    def graph(self, *outputs: Value) -> Graph:
        return Graph.make(self.nodes, tuple(self.inputs), outputs, self.leaves)


_UNARY = ("Relu", "Tanh", "Sigmoid", "Identity", "Neg")
_BINARY = ("Add", "Mul", "Sub", "MatMul")
SHAPE = t("N", 16)
REFINED = (t("N", 16), t(4, 16))  # from less to more precise


def random_graph(draw: Random, nodes: int) -> Graph:
    """Products and elementwise operators on [N, 16], some with two outputs, some constant."""
    b = Builder()
    square = b.weight(16, 16)
    values = [b.input(SHAPE), b.input(SHAPE)]
    for _ in range(nodes):
        roll = draw.random()
        if roll < 0.1:
            b.node("Exp", [square], t(16, 16, const=True))
        elif roll < 0.2:
            made = b.node("Split", [draw.choice(values)], t("N", 16), t("N", 16), axis=1, num_outputs=2)
            values.extend(made.outputs)
        elif roll < 0.6:
            values.append(b.node(draw.choice(_UNARY), [draw.choice(values)], SHAPE).id)
        else:
            op = draw.choice(_BINARY)
            right = square if op == "MatMul" else draw.choice(values)
            values.append(b.node(op, [draw.choice(values), right], SHAPE).id)
    return b.graph(values[-1], draw.choice(values))


def random_edit(draw: Random, graph: Graph, step: int) -> Edit:
    """Replaces a node's outputs, with types made more precise or not, or lets its readers read its input."""
    order = [n for n in graph.topological() if not n.const]
    node = draw.choice(order)
    if draw.random() < 0.3:
        ahead = {v for n in order[: order.index(node)] for v in n.outputs} | set(graph.inputs)
        source = draw.choice(sorted(ahead))
        return plan_edit(graph, "alias", (), {draw.choice(node.outputs): source})
    fresh = Value((1 << 40) + 2 * step)
    first = Node(draw.choice(_UNARY), (node.inputs[0],), (fresh,), (SHAPE,))
    new = Node(draw.choice(_UNARY), (fresh,), (draw.choice(node.outputs),), (draw.choice(REFINED),))
    return plan_edit(graph, "replace", (first, new), {})
