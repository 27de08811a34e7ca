"""Both sides of rules that compute float16 in float32 (`rounds_once`), with the roundings that their proof compares.

Elsewhere a proof takes results of float16 as they are, unrounded. Here the left side leaves out the roundings of values
that only matched nodes read, if none of these jumps, and makes all others. On the right side each result of float16
that the rule adds, or uses again, is rounded. If both are equal, the rule has left out roundings, and changed nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from xrlflow.ir import FLOATS, NO_ATTRS, DType, Graph, Node, TensorType, Value, mix
from xrlflow.ops.continuity import keeps_rounding
from xrlflow.ops.schema import canonical_attrs

# Casts to these types are exact on the left side: what is float32 there was float16, or becomes it.
_EXACT_TYPES = frozenset({DType.FLOAT16, DType.FLOAT})
_EXACT, _ROUNDED, _AGAIN = 0x6578616374, 0x726F756E64, 0x616761696E


def double(type: TensorType) -> TensorType:
    """The type with elements of 64 bits."""
    return TensorType(DType.DOUBLE, type.shape, type.const)


def rounded(node: Node, types: frozenset[DType]) -> list[Node]:
    """The node with a Cast behind each result of one of these types. (A constant is rounded as it is.)"""
    if node.const:
        return [node]
    return _with_casts(node, {v: t for v, t in zip(node.outputs, node.types) if t.dtype in types})


def _with_casts(node: Node, to: dict[Value, TensorType]) -> list[Node]:
    """The node, and for each of these outputs a Cast to this type. The outputs keep their names."""
    renamed = {v: mix(v, _ROUNDED) for v in to}
    outs = tuple(renamed.get(v, v) for v in node.outputs)
    types = tuple(double(t) if v in to else t for v, t in zip(node.outputs, node.types))
    casts = [_cast(renamed[v], v, to[v]) for v in node.outputs if v in to]
    return [replace(node, outputs=outs, types=types), *casts]


def _cast(source: Value, value: Value, type: TensorType) -> Node:
    attrs = canonical_attrs("Cast", {"to": int(type.dtype)}, [double(type)])
    return Node("Cast", (source,), (value,), (type,), attrs)


def exact_within(graph: Graph, matched: Iterable[Node], replaced: frozenset[Value]) -> Graph:
    """The graph in which the matched nodes compute exactly, and some of their results are not rounded to float16.

    A result keeps its rounding, for all who read it, if it is one of the values `replaced`, or if a node that is not
    matched reads it, or one that jumps (`continuity.keeps_rounding`).
    """
    ids = {n.id for n in matched}
    within = [n for n in graph.topological() if n.id in ids]
    exact = {v: mix(v, _EXACT) for n in within for v in n.outputs if v}
    nodes = [n for n in graph.topological() if replaced.isdisjoint(n.outputs)]
    for node in within:
        kept = frozenset(v for v in node.outputs if v in replaced or _keeps_rounding(graph, v, ids))
        nodes += _exact(graph, node, exact, kept)
        for value, type in zip(node.outputs, node.types):
            if value in replaced:
                nodes.append(Node("Identity", (exact[value],), (value,), (type,), NO_ATTRS))
    return Graph.make(nodes, graph.inputs, graph.outputs, graph.leaves)


def _keeps_rounding(graph: Graph, value: Value, ids: set[Value]) -> bool:
    """Whether a result must be rounded: these nodes are not all that reads it, or one of them jumps."""
    return value in graph.outputs or any(
        user.id not in ids
        or any(
            v == value and keeps_rounding(graph, user, i) and not _is_last(graph, user)
            for i, v in enumerate(user.inputs)
        )
        for user in graph.users(value)
    )


def _is_last(graph: Graph, node: Node) -> bool:
    """Whether a node is a Cast to float32, of which nothing is computed: nobody sees whether its number was rounded."""
    return node.op == "Cast" and node.types[0].dtype == DType.FLOAT and not graph.users(node.outputs[0])


def _exact(graph: Graph, node: Node, exact: dict[Value, Value], kept: frozenset[Value]) -> list[Node]:
    """The node between the copies of its values, and the Casts of those results that keep their rounding."""
    inputs = tuple(exact.get(v, v) for v in node.inputs)
    outputs = tuple(exact.get(v, v) for v in node.outputs)
    types = tuple(double(t) if t.dtype in FLOATS else t for t in node.types)
    if node.op == "Cast":
        if node.types[0].dtype not in _EXACT_TYPES or graph.type(node.inputs[0]).dtype not in FLOATS:
            return [replace(node, inputs=inputs, outputs=outputs)]  # it rounds integers, or to another type
        made = Node("Identity", inputs, outputs, types, NO_ATTRS)
    else:
        made = replace(node, inputs=inputs, outputs=outputs, types=types)
    halves = {exact[v]: t for v, t in zip(node.outputs, node.types) if t.dtype == DType.FLOAT16 and v in kept}
    return _with_casts(made, halves)


def rounded_results(graph: Graph, added: Iterable[Node], matched: Iterable[Node]) -> Graph:
    """The graph in which each result of float16 of the nodes `added` is rounded, and so is what they read of the nodes
    `matched` (but nobody else reads these copies).
    """
    ids = {n.id for n in added}
    old = {n.id for n in matched} - ids
    again = {v: mix(v, _AGAIN) for n in graph.topological() if n.id in old for v in n.outputs if v}
    nodes = list[Node]()
    for node in graph.topological():
        if node.id in old:
            nodes.append(node)
        if node.id in old or node.id in ids:
            inputs = tuple(again.get(v, v) for v in node.inputs)
            outputs = tuple(again.get(v, v) for v in node.outputs)
            made = replace(node, inputs=inputs, outputs=outputs)
            halves = {v: t for v, t in zip(outputs, node.types) if t.dtype == DType.FLOAT16}
            nodes += _with_casts(made, halves)
        else:
            nodes.append(node)
    return Graph.make(nodes, graph.inputs, graph.outputs, graph.leaves)
