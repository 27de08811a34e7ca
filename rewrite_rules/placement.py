"""Placement as substitutions: which operators run in generated kernels, and which in ONNX Runtime.

These rules change nothing that a graph computes, so there is nothing to prove. A search applies them like other rules.
An operator that moves to ONNX Runtime splits a region; one that moves to a generated kernel merges regions. Both can
also shift the border of a region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xrlflow.ir import Graph, Node, Value
from xrlflow.ops.work import COUNTS, ELEMENTWISE
from xrlflow.rewrite.rule import Op, Reader, Region, RegionRule

PLACEMENT = "placement"
_OPERATORS = tuple(sorted({*COUNTS, *ELEMENTWISE}))
# How many elementwise operators are moved at most together with the operator that they follow.
_MOST = 8

Loses = Callable[[Graph, Node], bool]
"""Whether ONNX Runtime runs a node faster than a generated kernel would."""


class _Placement(RegionRule, family=PLACEMENT):
    """Moves an operator between ONNX Runtime and generated kernels, with the elementwise operators that alone read its
    result.
    """

    anchors = _OPERATORS
    on_runtime = False

    def target(self, op: Op, region: Region, *inputs: Any) -> Any:
        changed: dict[Value, Any] = {}
        results = []
        for node in region.nodes:
            values = op.again(node, self.on_runtime, changed)
            changed.update(zip(node.outputs, values))
            results.extend(values)
        return [changed[value] for value in region.outputs]

    def _region(self, graph: Reader, anchor: Node) -> Region:
        nodes = [anchor]
        while len(nodes) < _MOST:
            last = nodes[-1]
            if len(last.outputs) != 1 or graph.is_output(last.id):
                break
            users = graph.users(last.id)
            if len(users) != 1 or users[0].op not in ELEMENTWISE or users[0].on_runtime == self.on_runtime:
                break
            nodes.append(users[0])
        outputs = tuple(value for node in nodes for value in node.outputs)
        inside = set(outputs)
        inputs = tuple(dict.fromkeys(v for node in nodes for v in node.inputs if v and v not in inside))
        return Region(outputs, inputs, tuple(nodes), None)


class LeaveToRuntime(_Placement):
    """kernel(x) == runtime(x)"""

    on_runtime = True

    def __init__(self, loses: Loses) -> None:
        self.loses = loses

    def find(self, graph: Reader, node: Node) -> Region | None:
        if node.on_runtime or node.captured:
            return None
        adjacent = any(
            (source := graph.producer(v)) is not None and source.on_runtime for v in node.inputs if v
        ) or any(user.on_runtime for value in node.outputs for user in graph.users(value))
        if not (adjacent or self.loses(graph.graph, node)):
            return None
        return self._region(graph, node)


class TakeFromRuntime(_Placement):
    """runtime(x) == kernel(x)"""

    def find(self, graph: Reader, node: Node) -> Region | None:
        return self._region(graph, node) if node.on_runtime and not node.captured else None


def without_placement(graph: Graph) -> Graph:
    """The graph without any node that is placed in ONNX Runtime."""
    if not any(node.on_runtime for node in graph.nodes()):
        return graph
    nodes = [node.with_runtime(False) for node in graph.topological()]
    return Graph.make(nodes, graph.inputs, graph.outputs, graph.leaves)


def placement_rules(loses: Loses = lambda graph, node: True) -> tuple[RegionRule, ...]:
    """Both rules. A node moves to ONNX Runtime if its generated kernel `loses` (by default always), or if a node next
    to it runs there.
    """
    return LeaveToRuntime(loses), TakeFromRuntime()
