"""The cost of a graph that runs partly in generated kernels and partly in ONNX Runtime.

A node costs the time of its kernel on the side that runs it. On the side of generated kernels, an elementwise operator
costs nothing if it can be fused with the kernel that computes its operand, and if no other node reads this operand. A
concatenation costs nothing if this holds for all its operands. A value that passes from one side to the other is
converted, because the two sides store images in different layouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import fsum

from xrlflow.cost.kernels import KernelPrices
from xrlflow.cost.machine import Machine
from xrlflow.cost.model import AdditiveCost, InTypes
from xrlflow.cost.roofline import seconds as roofline_seconds
from xrlflow.ir import ABSENT, Edit, Graph, Node, TensorType, Value, apply_edit
from xrlflow.ops.work import OpKind, Work, dimensions, work

# Tensors of this rank are images, whose layout differs between the two sides; that of tensors of lower rank does not.
_IMAGE = 4
# Kernels of these operators can apply an elementwise operator to their results before they write them.
_GOES_ON = frozenset(
    {OpKind.GEMM, OpKind.CONV, OpKind.GROUPED_CONV, OpKind.DEPTHWISE_CONV, OpKind.ELEMENTWISE, OpKind.VIEW}
)


class PlacementCost(AdditiveCost):
    """The cost of a graph by the costs of both sides. A node runs in a generated kernel unless its `on_runtime` is set,
    or no such kernel exists."""

    def __init__(self, runtime: AdditiveCost, kernels: KernelPrices, machine: Machine) -> None:
        super().__init__(runtime.bindings)
        self.runtime = runtime
        self.kernels = kernels
        self.machine = machine

    @property
    def name(self) -> str:
        return "placed"

    def price(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        own = None if node.on_runtime else self.kernels.seconds(graph, node, in_types)
        return self.runtime.seconds(graph, node, in_types) if own is None else own

    def seconds(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        return 0.0 if node.const else self.price(graph, node, in_types)

    def breakdown(self, graph: Graph) -> dict[Value, float]:
        return {node.id: self._at(graph, node) for node in graph.nodes()}

    def delta(self, graph: Graph, edit: Edit) -> float:
        """Seconds of the successor minus those of the graph. Only changed nodes and their neighbours are computed."""
        successor, _ = apply_edit(graph, edit)
        before = [*edit.removed, *(old for old, _ in edit.rewired)]
        after = [*edit.added, *(new for _, new in edit.rewired)]
        outputs = set(graph.outputs) ^ set(edit.outputs)
        context = _around(graph, before, outputs) | _around(successor, after, outputs)
        return self._sum(successor, context) - self._sum(graph, context)

    def loses(self, graph: Graph, node: Node) -> bool:
        """Whether ONNX Runtime runs the node faster than a generated kernel would."""
        if node.const or node.on_runtime:
            return False
        in_types = _in_types(graph, node)
        own = self.kernels.seconds(graph, node, in_types)
        return own is not None and own > self.runtime.seconds(graph, node, in_types)

    def runs_on_runtime(self, graph: Graph, node: Node) -> bool:
        """Whether ONNX Runtime runs the node."""
        return node.on_runtime or self.kernels.seconds(graph, node, _in_types(graph, node)) is None

    def _sum(self, graph: Graph, ids: Iterable[Value]) -> float:
        producers = graph.producers
        return fsum(
            self._at(graph, producers[i]) for i in ids if i in producers and producers[i].outputs[0] == i
        )

    def _at(self, graph: Graph, node: Node) -> float:
        """Seconds of a node in this graph, with the conversions of its results."""
        if node.const:
            return 0.0
        in_types = _in_types(graph, node)
        on_runtime = self.runs_on_runtime(graph, node)
        fused = not on_runtime and self._follows(graph, node, in_types)
        return (0.0 if fused else self.price(graph, node, in_types)) + self._borders(graph, node, on_runtime)

    def _follows(self, graph: Graph, node: Node, in_types: InTypes) -> bool:
        """Whether a node is fused with the kernels that compute its operands: an elementwise operator with one of these
        kernels, a concatenation with all, each of which then writes its part of the result."""
        own = [self._source(graph, value) for value in node.inputs]
        if node.op == "Concat":
            return all(source is not None for source in own)
        if work(node, in_types, self.bindings).kind is not OpKind.ELEMENTWISE:
            return False
        return any(
            source is not None
            and graph.type(value).shape == node.types[0].shape
            and work(source, _in_types(graph, source), self.bindings).kind in _GOES_ON
            for value, source in zip(node.inputs, own)
        )

    def _source(self, graph: Graph, value: Value) -> Node | None:
        """The producer of a value, if it runs in a generated kernel and the value has a single reader; else None."""
        source = graph.producers.get(value)
        if source is None or source.const or len(graph.uses.get(value, ())) > 1 or value in graph.outputs:
            return None
        return None if self.runs_on_runtime(graph, source) else source

    def _borders(self, graph: Graph, node: Node, on_runtime: bool) -> float:
        """Seconds to convert the results of a node for readers on the other side."""
        total = 0.0
        for value, type in zip(node.outputs, node.types):
            readers = (user for user in graph.users(value) if not user.const)
            if any(self.runs_on_runtime(graph, reader) != on_runtime for reader in readers):
                total += self._crossing(type)
        return total

    def _crossing(self, type: TensorType) -> float:
        shape = dimensions(type, self.bindings)
        if len(shape) < _IMAGE:
            return self.machine.overhead
        elements = 1
        for size in shape:
            elements *= size
        # Two conversions: one side converts to ONNX's layout, the other from it.
        return 2 * roofline_seconds(Work(0.0, 8.0 * elements, OpKind.SHUFFLE), self.machine)


def _around(graph: Graph, nodes: Iterable[Node], outputs: Iterable[Value]) -> set[Value]:
    """Ids of `nodes`, and of the producers and readers of `outputs` and of all values that they read or compute."""
    ids: set[Value] = set()
    values = set(outputs)
    for node in nodes:
        ids.add(node.id)
        values.update(node.inputs, node.outputs)
    for value in values:
        if value in graph.producers:
            ids.add(graph.producers[value].id)
            ids.update(graph.uses.get(value, ()))
    return ids


def _in_types(graph: Graph, node: Node) -> InTypes:
    return tuple([graph.type(v) if v != ABSENT else None for v in node.inputs])
