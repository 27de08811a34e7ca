"""Monte Carlo tree search over modules, with transpositions.

- A module that several orders reach is one vertex (by its digest). Each edge counts its own visits.
- A simulation descends by PUCT to a vertex and a pass that was not tried on it, and continues from the new module with
  a few random passes. The result of the simulation is the best value that it reaches.
- The worth of an edge is the mean of its simulations' results, mixed with the best result (since the search returns
  a maximum), scaled to the range 0 to 1 by the lowest and the highest result so far.
- A pass that turns out to have no effect is removed from its vertex.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xrlflow.passes.compiler import Compiler, Metric, Module
from xrlflow.passes.searches.steps import Budget, Explorer, Node, Order, until_over

Floats = npt.NDArray[np.float64]

# The probability of each pass by name, as a function of a node. None: uniform.
Priors = Callable[[Node], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """The parameters of the tree search."""

    exploration: float = 0.7  # the weight of the priors
    best: float = 0.7  # the weight of an edge's best simulation; the mean of all has 1 minus this
    rollout: int = 4  # random passes after the new module


class _Vertex:
    """A module in the tree, with A passes, and arrays [A] of their priors and the results of their simulations."""

    __slots__ = ("best", "node", "open", "passes", "priors", "total", "visits")

    def __init__(self, node: Node, passes: tuple[str, ...], priors: Floats) -> None:
        self.node, self.passes, self.priors = node, passes, priors
        count = len(passes)
        self.open = np.ones(count, bool)
        self.visits, self.total = np.zeros(count), np.zeros(count)
        self.best = np.full(count, -np.inf)


_Path = list[tuple[_Vertex, int]]


def tree(
    compiler: Compiler,
    module: Module,
    budget: Budget,
    seed: int = 0,
    metric: Metric = Metric.OPERATIONS,
    config: TreeConfig = TreeConfig(),
    priors: Priors | None = None,
) -> Order:
    """Monte Carlo tree search from the first module, until the budget is used up."""
    explorer = Explorer(compiler, module, budget, metric)
    generator = np.random.default_rng(seed)
    return until_over(explorer, lambda: _Tree(explorer, generator, config, priors).run())


class _Tree:
    def __init__(
        self, explorer: Explorer, generator: np.random.Generator, config: TreeConfig, priors: Priors | None
    ) -> None:
        self.explorer, self.generator, self.config, self.priors = explorer, generator, config, priors
        self.vertices: dict[str, _Vertex] = {}
        self.least, self.greatest = np.inf, -np.inf

    def run(self) -> None:
        meter, idle = self.explorer.meter, 0
        while idle < 1000:  # simulations in a row that ran no new pass: no new module is likely
            before = meter.steps
            if not self.simulate():
                return
            idle = 0 if meter.steps > before else idle + 1

    def simulate(self) -> bool:
        """Run one simulation. Returns False if no pass at the root is left to be tried."""
        vertex = self.vertex(self.explorer.root)
        path: _Path = []
        visited = {vertex.node.module.digest}
        value = -np.inf
        while len(path) < self.explorer.budget.horizon:
            action = self.choose(vertex)
            if action is None:
                break
            successor = self.explorer.apply(vertex.node, vertex.passes[action])
            if successor is None:
                vertex.open[action] = False
                continue
            path.append((vertex, action))
            value = max(value, self.saved(successor))
            if successor.module.digest in visited:  # the path returned to an earlier module
                break
            visited.add(successor.module.digest)
            is_known = successor.module.digest in self.vertices
            vertex = self.vertex(successor)
            if not is_known:
                value = max(value, self.roll(successor, len(path)))
                break
        self.learn(path, value)
        return bool(path)

    def vertex(self, node: Node) -> _Vertex:
        """The vertex of a node's module. If several nodes have this module, the vertex keeps the one with the shortest
        order.
        """
        vertex = self.vertices.get(node.module.digest)
        if vertex is None:
            names = self.explorer.open(node)
            weights_by_name = self.priors(node) if self.priors is not None else {}
            weights = (
                np.array([weights_by_name.get(name, 0.0) for name in names])
                if weights_by_name
                else np.ones(len(names))
            )
            vertex = _Vertex(node, names, weights / max(float(weights.sum()), 1e-12))
            self.vertices[node.module.digest] = vertex
        elif len(node.passes) < len(vertex.node.passes):
            vertex.node = node
        return vertex

    def roll(self, node: Node, depth: int) -> float:
        """Apply random passes from a node. Returns the best value that they reach."""
        best = self.saved(node)
        for _ in range(min(self.config.rollout, self.explorer.budget.horizon - depth)):
            names = self.explorer.open(node)
            if not names:
                break
            node = self.explorer.apply(node, names[self.generator.integers(len(names))]) or node
            best = max(best, self.saved(node))
        return best

    def saved(self, node: Node) -> float:
        initial = self.explorer.root.value
        return 1.0 - node.value / initial if initial > 0 else 0.0

    def choose(self, vertex: _Vertex) -> int | None:
        """The pass with the greatest PUCT score (Silver et al., 2018); None if all passes were removed."""
        if not vertex.open.any():
            return None
        visits = vertex.visits
        with np.errstate(invalid="ignore"):
            means = vertex.total / np.maximum(visits, 1)
            worth = self.config.best * self.scaled(vertex.best) + (1 - self.config.best) * self.scaled(means)
        worth = np.where(np.isfinite(worth) & (visits > 0), worth, 0.0)
        bonus = self.config.exploration * vertex.priors * np.sqrt(visits.sum() + 1) / (1 + visits)
        score = np.where(vertex.open, worth + bonus * len(vertex.passes) ** 0.5, -np.inf)
        top = np.flatnonzero(score >= score.max() - 1e-12)
        return int(top[self.generator.integers(len(top))])

    def scaled(self, values: Floats) -> Floats:
        """The values scaled to 0 (the lowest so far) to 1 (the highest)."""
        span = self.greatest - self.least
        return (values - self.least) / span if span > 0 else np.zeros_like(values)

    def learn(self, path: _Path, value: float) -> None:
        if not path:
            return
        self.least, self.greatest = min(self.least, value), max(self.greatest, value)
        for vertex, action in path:
            vertex.visits[action] += 1
            vertex.total[action] += value
            vertex.best[action] = max(vertex.best[action], value)
