"""The protocol of cost models, whose costs searches minimise, and the base of most of them, a sum over operators."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import fsum
from typing import Literal, Protocol

from xrlflow.cost.machine import REFERENCE
from xrlflow.ir import ABSENT, Edit, Graph, Node, TensorType, Value

Provenance = Literal["modelled", "measured"]
InTypes = tuple[TensorType | None, ...]


class CostModel(Protocol):
    """Gives graphs a number of seconds to minimise, and says where it comes from. Only measured seconds are called
    latency."""

    @property
    def name(self) -> str: ...

    @property
    def provenance(self) -> Provenance: ...

    def cost(self, graph: Graph) -> float:
        """Seconds of one run of the graph."""
        ...

    def delta(self, graph: Graph, edit: Edit) -> float:
        """Seconds of the successor minus those of the graph: negative if the edit saves time."""
        ...


class NoTimeLeft(Exception):
    """A cost model was asked for a cost after its deadline."""


def in_time(delta: Callable[[Graph, Edit], float], until: float) -> Callable[[Graph, Edit], float]:
    """The `delta` of a cost model that raises NoTimeLeft after `until` (time.monotonic)."""

    def timely(graph: Graph, edit: Edit) -> float:
        if time.monotonic() > until:
            raise NoTimeLeft
        return delta(graph, edit)

    return timely


class AdditiveCost(ABC):
    """The sum of the costs of single operators (TASO, section 5), so an edit gives the cost of the successor.

    The cost of an operator (its *price*) depends on its name, attributes and types, and is remembered for them.
    Constant nodes are evaluated before the model runs and cost nothing. `bindings` gives symbolic dimensions a number.
    `lanes`: the vector lanes of the machine whose seconds these are (see `Machine`).
    """

    provenance: Provenance = "modelled"
    lanes = REFERENCE.lanes

    def __init__(self, bindings: Mapping[str, int] | None = None) -> None:
        self.bindings: dict[str, int] = dict(bindings or {})
        self._prices: dict[tuple[object, ...], float] = {}

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def price(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        """Seconds of one call of the node, computed anew. `graph` has the node's constants."""

    def seconds(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        """Seconds of one call of the node, remembered; 0 for a constant node."""
        types = node.types
        if types[0].const:
            return 0.0
        # Types are interned, so they are compared by identity.
        key: tuple[object, ...] = (node.op, node.attrs.digest, in_types, types)
        if node.op in ("If", "Loop"):
            key = (*key, node.inputs[0])  # the condition or trip count may be constant
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = self.price(graph, node, in_types)
        return price

    def cost(self, graph: Graph) -> float:
        """Seconds of one run of the graph: the sum over its nodes."""
        return fsum(self.breakdown(graph).values())

    def breakdown(self, graph: Graph) -> dict[Value, float]:
        """Seconds of each node, by its id."""
        types: dict[Value, TensorType | None] = dict(graph.leaves.types)
        types[ABSENT] = None
        for node in graph.nodes():
            types.update(zip(node.outputs, node.types))
        of = types.__getitem__
        return {n.outputs[0]: self.seconds(graph, n, tuple(map(of, n.inputs))) for n in graph.nodes()}

    def delta(self, graph: Graph, edit: Edit) -> float:
        """Seconds of the successor minus those of the graph.

        Computes only the costs of nodes that the edit removes, adds or rewires, and of readers of values whose type it
        makes more precise.
        """
        seconds = self.seconds
        producers, leaves = graph.producers, graph.leaves.types
        added = edit.added
        new: dict[Value, TensorType | None] = {ABSENT: None}
        refined: list[Value] = []
        for node in added:
            for value, type in zip(node.outputs, node.types):
                new[value] = type
                old_node = producers.get(value)
                if old_node is not None and old_node.types[old_node.outputs.index(value)] is not type:
                    refined.append(value)
        old: dict[Value, TensorType | None] = {ABSENT: None}

        def before(value: Value) -> TensorType | None:
            type = old.get(value)
            if type is None and value:
                node = producers.get(value)
                type = old[value] = (
                    leaves[value]
                    if node is None
                    else node.types[0 if node.outputs[0] == value else node.outputs.index(value)]
                )
            return type

        def after(value: Value) -> TensorType | None:
            return new[value] if value in new else before(value)

        total = 0.0
        for node in added:
            total += seconds(graph, node, tuple([after(v) for v in node.inputs]))
        for node in edit.removed:
            total -= seconds(graph, node, tuple([before(v) for v in node.inputs]))
        for was, node in edit.rewired:
            new.update((v, t) for v, t in zip(node.outputs, node.types) if v not in producers)
            total += seconds(graph, node, tuple([after(v) for v in node.inputs]))
            total -= seconds(graph, was, tuple([before(v) for v in was.inputs]))
        if refined:
            touched = {n.id for n in edit.removed} | {n.id for n, _ in edit.rewired}
            for user in {i for v in refined for i in graph.uses.get(v, ())} - touched:
                node = producers[user]
                total += seconds(graph, node, tuple([after(v) for v in node.inputs]))
                total -= seconds(graph, node, tuple([before(v) for v in node.inputs]))
        return total
