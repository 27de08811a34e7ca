"""The learned cost model: measured seconds of operators, corrected by a network for the nodes around each operator.

It predicts how many times faster a graph runs than the graph at which the search begins, with an uncertainty. See
`xrlflow.cost.latency_network`.
"""

from __future__ import annotations

import math
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import fsum

import numpy as np

from xrlflow.cost.latency_network import Evaluator, NetworkConfig, NetworkParameters, shapes
from xrlflow.cost.model import AdditiveCost, InTypes, NoTimeLeft
from xrlflow.cost.neighbourhoods import CONTENT_COLUMNS, EDGE_COLUMNS, Neighbourhoods, View
from xrlflow.ir import Edit, Graph, Node, Value
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint

KIND = "latency network"
# Half of a 90% interval of a normal distribution, in standard deviations.
HALF_OF_90 = 1.645
# Views of graphs that are cached: those of a search's latest states.
_MAX_VIEWS = 64
# Seconds of a graph without operators that run, so that ratios are finite.
_INSTANT = 1e-9


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction of how many times faster one graph runs than another."""

    median: float
    low: float  # of the 90% interval
    high: float

    @property
    def spread(self) -> float:
        """The standard deviation of the logarithm."""
        return math.log(self.high / self.low) / (2 * HALF_OF_90)


class Learned(AdditiveCost):
    """The sum of the nodes' seconds, each predicted by the network from the node's neighbourhood.

    `prices`: the seconds of operators that run alone, which the network corrects. The prediction is the mean of an
    ensemble. An edit changes the seconds of the nodes around it; computing its `delta` takes about a millisecond. After
    the moment `until` (time.monotonic), `delta` raises NoTimeLeft.
    """

    def __init__(self, prices: AdditiveCost, parameters: NetworkParameters) -> None:
        super().__init__(prices.bindings)
        self.prices = prices
        self.lanes = prices.lanes
        self.parameters = parameters
        self.until = math.inf
        self._neighbourhoods = Neighbourhoods(prices, parameters.config.radius)
        self._evaluator = Evaluator(parameters, self._neighbourhoods.table)
        self._views: OrderedDict[int, View] = OrderedDict()

    @property
    def name(self) -> str:
        return "learned"

    def price(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        return self.prices.price(graph, node, in_types)

    def seconds(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        """Seconds of the node when it runs alone."""
        return self.prices.seconds(graph, node, in_types)

    def breakdown(self, graph: Graph) -> dict[Value, float]:
        """Seconds of each node in its neighbourhood, by its id."""
        view, top = self._view(graph), self.parameters.config.radius
        nodes = [n for n in graph.nodes() if not n.const]
        seconds = self._evaluator.seconds([view.number(n, top) for n in nodes]).mean(0)
        costs = {n.id: 0.0 for n in graph.nodes()}
        return costs | dict(zip((n.id for n in nodes), seconds.tolist()))

    def delta(self, graph: Graph, edit: Edit) -> float:
        if time.monotonic() > self.until:
            raise NoTimeLeft
        _, before, after = self._view(graph).successor(edit)
        seconds = self._evaluator.seconds([*before, *after]).mean(0)
        return fsum(seconds[len(before) :]) - fsum(seconds[: len(before)])

    def predict(self, start: Graph, graph: Graph) -> Prediction:
        """How many times faster `graph` runs than `start`."""
        counts = [self._view(g).counts() for g in (start, graph)]
        totals = []
        for count in counts:
            numbers = list(count)
            total = self._evaluator.seconds(numbers) @ np.array([count[n] for n in numbers])
            totals.append(np.maximum(total, _INSTANT))
        logs = np.log(totals[0] / totals[1])
        numbers = list((counts[0] - counts[1]) + (counts[1] - counts[0]))
        weights = np.array([abs(counts[0][n] - counts[1][n]) for n in numbers])
        changed = (
            float((self._evaluator.seconds(numbers).mean(0) @ weights) / totals[0].mean()) if numbers else 0.0
        )
        noise = self.parameters.arrays["noise"].mean(0)
        spread = math.sqrt(float(logs.var()) + float(noise[0]) ** 2 + (float(noise[1]) * changed) ** 2)
        half = HALF_OF_90 * spread * float(self.parameters.arrays["scale"].mean())
        middle = float(logs.mean())
        return Prediction(math.exp(middle), math.exp(middle - half), math.exp(middle + half))

    def _view(self, graph: Graph) -> View:
        """The view of a graph, from the cache if it was used lately."""
        view = self._views.pop(id(graph), None)
        if view is None or view.graph is not graph:
            view = self._neighbourhoods.view(graph)
        self._views[id(graph)] = view
        if len(self._views) > _MAX_VIEWS:
            self._views.popitem(last=False)
        return view


def save_network(parameters: NetworkParameters, path: str | os.PathLike[str]) -> None:
    """Write a network. Raises CheckpointError if the file cannot be written."""
    config = {
        "network": asdict(parameters.config),
        "columns": _columns(),
        "operators": list(parameters.operators),
        "about": dict(parameters.about),
    }
    save_checkpoint(Checkpoint(KIND, config, parameters.arrays), path)


def load_network(path: str | os.PathLike[str]) -> NetworkParameters:
    """Read a network. Raises CheckpointError if the file is damaged or is no network of this version."""
    checkpoint = load_checkpoint(path, KIND)
    where = os.fspath(path)
    config = checkpoint.config
    if config.get("columns") != _columns():
        raise CheckpointError(f"{where}: the network was made for other features: train it again")
    try:
        network = NetworkConfig(**config["network"])
        operators = tuple(map(str, config["operators"]))
        expected = {n: (network.members, *s) for n, s in shapes(network, len(operators)).items()}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: its configuration is damaged: {error!r}") from error
    expected |= {"noise": (network.members, 2), "scale": (network.members,)}
    _check(where, checkpoint, expected)
    return NetworkParameters(network, operators, checkpoint.tensors, config.get("about", {}))


def _check(where: str, checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the arrays have these names and shapes and are finite."""
    if odd := sorted(expected.keys() ^ checkpoint.tensors.keys()):
        raise CheckpointError(f"{where}: its arrays are not those of its configuration: {odd[0]}")
    for name, array in checkpoint.tensors.items():
        if array.shape != expected[name] or array.dtype != np.float32 or not np.isfinite(array).all():
            raise CheckpointError(
                f"{where}: its array {name} is not finite float32 of shape {expected[name]}"
            )
    if (checkpoint.tensors["scale"] <= 0).any():
        raise CheckpointError(f"{where}: its array scale has numbers that are not positive")


def _columns() -> dict[str, int]:
    return {"content": CONTENT_COLUMNS, "edge": EDGE_COLUMNS}


__all__: Sequence[str] = ("KIND", "Learned", "Prediction", "load_network", "save_network")
