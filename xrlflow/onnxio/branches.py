"""Branches around operators that ONNX Runtime does not run where a size is 0.

    y = Attention(q, k, v)  ->  y = If(no size is 0) { Attention(q, k, v) } else { zeros }

A graph has the operator alone (`xrlflow.ops.empty.guarded`), so that rules and costs see it; only its file has the
branch. The operator's weights and inputs stay outside of it. It costs some microseconds for each run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import onnx
from onnx.helper import make_attribute, make_graph, make_node, make_tensor, make_tensor_value_info

from xrlflow.ir import ABSENT, Graph, Node, TensorType, dims
from xrlflow.ops.empty import Size, guarded, needed, sizes_needed


def surely_filled(graph: Graph) -> frozenset[Size]:
    """The dimensions that are at least 1 whenever a model runs."""
    found = set(sizes_needed(graph, graph.nodes()))
    for node in graph.nodes():
        types = [None if v == ABSENT else graph.type(v) for v in node.explicit_inputs]
        found.update(size for size in _sizes(node, types) if size is not None)
    return frozenset(found)


def _sizes(node: Node, types: Sequence[TensorType | None]) -> Iterator[int | str | None]:
    """The sizes that a guarded operator needs; None for an unknown one."""
    if guarded(node.op, types, len(node.outputs)):
        for index, axis in needed(node.op, node.attrs, types):
            shape = None if (type := types[index]) is None else type.shape
            yield None if shape is None else shape[axis]


FOR_EMPTY = "xrlflow.empty."
"""How the names of the branches begin."""


class Branches:
    """Writes the branches of one graph.

    `filled`: dimensions that are at least 1, or None if all are. `fresh`: makes a name that is used nowhere.
    """

    def __init__(self, filled: Collection[Size] | None, fresh: Callable[[str], str]) -> None:
        self.filled, self.fresh = filled, fresh
        self.conditions: dict[frozenset[str], str] = {}

    def around(
        self, written: onnx.NodeProto, node: Node, types: Sequence[TensorType | None]
    ) -> Iterator[onnx.NodeProto]:
        """The nodes to write for a node with inputs of these types: itself, or a branch around it."""
        filled = self.filled
        sizes = () if filled is None else [s for s in _sizes(node, types) if not dims.positive(s, filled)]
        if not sizes:
            yield written
            return
        known = frozenset(s for s in sizes if isinstance(s, str))
        condition = self.conditions.get(known) if len(known) == len(set(sizes)) else None
        if condition is None:
            counts = [self.fresh("elements") for _ in range(3)]
            least, condition = self.fresh("least_elements"), self.fresh("not_empty")
            for name, count in zip(written.input, counts):
                yield make_node("Size", [name], [count])
            yield make_node("Min", counts, [least])
            yield make_node("Cast", [least], [condition], to=onnx.TensorProto.BOOL)
            if len(known) == len(set(sizes)):
                self.conditions[known] = condition
        (result,) = written.output
        inside, zeros, shape = (self.fresh(f"{result}_{part}") for part in ("filled", "empty", "shape"))
        lead, last = self.fresh(f"{result}_lead"), self.fresh(f"{result}_last")
        query, _, value = written.input[:3]
        dtype = int(node.types[0].dtype)
        zero = make_tensor("zero", dtype, [1], [0.0])
        operator = onnx.NodeProto()
        operator.CopyFrom(written)
        operator.output[0] = inside
        empty = [
            make_node("Shape", [query], [lead], end=3),
            make_node("Shape", [value], [last], start=3),
            make_node("Concat", [lead, last], [shape], axis=0),
            make_node("ConstantOfShape", [shape], [zeros], value=zero),
        ]
        branch = make_node("If", [condition], [result], name=FOR_EMPTY + result)
        for name, nodes, output in (("then_branch", [operator], inside), ("else_branch", empty, zeros)):
            body = make_graph(nodes, name, [], [make_tensor_value_info(output, dtype, [None] * 4)])
            branch.attribute.append(make_attribute(name, body))
        yield branch
