"""Both sides of rules that compute float16 in float32 (`rounds_once`), with the roundings that their proof compares.

Elsewhere a proof takes results of float16 as they are, unrounded. Here the left side is computed exactly, and what the
rule replaces is rounded once, to its type. On the right side each result of float16 that the rule adds is rounded. If
both are equal, the right side is as accurate as one rounding permits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from xrlflow.ir import FLOATS, NO_ATTRS, DType, Graph, Node, TensorType, Value, mix
from xrlflow.ops.schema import canonical_attrs

# Casts to these types are exact on the left side: what is float32 there was float16, or becomes it.
_EXACT_TYPES = frozenset({DType.FLOAT16, DType.FLOAT})
_EXACT, _ROUNDED = 0x6578616374, 0x726F756E64


def double(type: TensorType) -> TensorType:
    """The type with elements of 64 bits."""
    return TensorType(DType.DOUBLE, type.shape, type.const)


def rounded(node: Node, types: frozenset[DType]) -> list[Node]:
    """The node with a Cast behind each result of one of these types."""
    renamed = {v: mix(v, _ROUNDED) for v, t in zip(node.outputs, node.types) if t.dtype in types}
    if not renamed or node.const:
        return [node]
    outs = tuple(renamed.get(v, v) for v in node.outputs)
    exact = tuple(double(t) if v in renamed else t for v, t in zip(node.outputs, node.types))
    casts = [_cast(renamed[v], v, t) for v, t in zip(node.outputs, node.types) if v in renamed]
    return [replace(node, outputs=outs, types=exact), *casts]


def _cast(source: Value, value: Value, type: TensorType) -> Node:
    attrs = canonical_attrs("Cast", {"to": int(type.dtype)}, [double(type)])
    return Node("Cast", (source,), (value,), (type,), attrs)


def exact_within(graph: Graph, matched: Iterable[Node], replaced: frozenset[Value]) -> Graph:
    """The graph in which the matched nodes round nothing to float16, but for the values `replaced`, once each.

    Nodes outside of the match, and other readers of what it computes, see what they saw.
    """
    ids = {n.id for n in matched}
    within = [n for n in graph.topological() if n.id in ids]
    exact = {v: mix(v, _EXACT) for n in within for v in n.outputs if v}
    nodes = [n for n in graph.topological() if replaced.isdisjoint(n.outputs)]
    for node in within:
        nodes.append(_exact(graph, node, exact))
        for value, type in zip(node.outputs, node.types):
            if value in replaced:
                half = type.dtype == DType.FLOAT16
                nodes.append(
                    _cast(exact[value], value, type)
                    if half
                    else Node("Identity", (exact[value],), (value,), (type,), NO_ATTRS)
                )
    return Graph.make(nodes, graph.inputs, graph.outputs, graph.leaves)


def _exact(graph: Graph, node: Node, exact: dict[Value, Value]) -> Node:
    """The node between values that are not rounded."""
    inputs = tuple(exact.get(v, v) for v in node.inputs)
    outputs = tuple(exact.get(v, v) for v in node.outputs)
    if node.op != "Cast":
        types = tuple(double(t) if t.dtype in FLOATS else t for t in node.types)
        return replace(node, inputs=inputs, outputs=outputs, types=types)
    if node.types[0].dtype in _EXACT_TYPES and graph.type(node.inputs[0]).dtype in FLOATS:
        return Node("Identity", inputs, outputs, (double(node.types[0]),), NO_ATTRS)
    return replace(node, inputs=inputs, outputs=outputs)  # it rounds integers, or to another type


def rounded_results(graph: Graph, added: Iterable[Node]) -> Graph:
    """The graph in which each result of float16 of the nodes `added` is rounded."""
    ids = {n.id for n in added}
    half = frozenset({DType.FLOAT16})
    nodes = [m for n in graph.topological() for m in (rounded(n, half) if n.id in ids else [n])]
    return Graph.make(nodes, graph.inputs, graph.outputs, graph.leaves)
