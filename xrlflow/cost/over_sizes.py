"""Costs over several sizes of a model's open dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from xrlflow.cost.model import AdditiveCost, CostModel, InTypes
from xrlflow.ir import Graph, Node


class OverSizes(AdditiveCost):
    """The mean of the costs at several sizes, where each size counts the same: what an operator costs at a size is
    divided by what `original` costs there. The unit is seconds of the first of `models`, which is for the usual size.
    """

    def __init__(self, models: Sequence[AdditiveCost], original: Graph) -> None:
        super().__init__(models[0].bindings)
        self.models = tuple(models)
        self.provenance = models[0].provenance
        self.lanes = models[0].lanes
        totals = [model.cost(original) for model in models]
        # A graph without operators that run costs nothing at any size.
        self._weights = [totals[0] / total / len(models) if total else 0.0 for total in totals]

    @property
    def name(self) -> str:
        return self.models[0].name

    def seconds(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        """As in `AdditiveCost`. Each of the models remembers its own costs."""
        return fsum(w * m.seconds(graph, node, in_types) for w, m in zip(self._weights, self.models))

    def price(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        return fsum(w * m.price(graph, node, in_types) for w, m in zip(self._weights, self.models))


def at_usual_size(model: CostModel) -> CostModel:
    """The costs at the usual size alone."""
    return model.models[0] if isinstance(model, OverSizes) else model
