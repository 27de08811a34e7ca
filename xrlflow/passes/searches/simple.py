"""Searches that remember at most a few nodes: random choice, greedy choice, beam search."""

from __future__ import annotations

import numpy as np

from xrlflow.passes.compiler import Compiler, Metric, Module
from xrlflow.passes.searches.steps import Budget, Explorer, Node, Order, until_over


def random(
    compiler: Compiler, module: Module, budget: Budget, seed: int = 0, metric: Metric = Metric.OPERATIONS
) -> Order:
    """Search by episodes that begin at the first module, and draw each pass with equal probability until the horizon.

    A pass that was observed to have no effect on a module is not drawn for it again.
    """
    explorer = Explorer(compiler, module, budget, metric)
    generator = np.random.default_rng(seed)

    def play() -> None:
        idle = 0
        while idle < 1000:  # episodes in a row that ran no new pass: no new module is likely
            before = explorer.meter.steps
            node = explorer.root
            for _ in range(budget.horizon):
                names = explorer.open(node)
                if not names:
                    break
                node = explorer.apply(node, names[generator.integers(len(names))]) or node
            idle = 0 if explorer.meter.steps > before else idle + 1

    return until_over(explorer, play)


def greedy(
    compiler: Compiler, module: Module, budget: Budget, seed: int = 0, metric: Metric = Metric.OPERATIONS
) -> Order:
    """Apply the pass with the largest gain, until no pass gains. Of equally good passes the first is chosen; nothing
    is random.
    """
    explorer = Explorer(compiler, module, budget, metric)

    def descend() -> None:
        node = explorer.root
        while len(node.passes) < budget.horizon:
            successors = [n for n in explorer.each(node, explorer.passes) if n is not None]
            best = min(successors, key=lambda n: n.value, default=node)
            if best.value >= node.value:
                return
            node = best

    return until_over(explorer, descend)


def beam(
    compiler: Compiler,
    module: Module,
    budget: Budget,
    seed: int = 0,
    metric: Metric = Metric.OPERATIONS,
    width: int = 4,
) -> Order:
    """Run all passes on each of the `width` best new modules of the last round, even if these modules are no
    improvements.

    Among equally good modules the choice is random.
    """
    explorer = Explorer(compiler, module, budget, metric)
    generator = np.random.default_rng(seed)

    def widen() -> None:
        front, visited = [explorer.root], {module.digest}
        for _ in range(budget.horizon):
            successors: dict[str, Node] = {}
            for node in front:
                for new in explorer.each(node, explorer.passes):
                    if new is not None and new.module.digest not in visited:
                        successors.setdefault(new.module.digest, new)
            visited |= successors.keys()
            draws = generator.random(len(successors))
            ranked = sorted(zip(successors.values(), draws), key=lambda pair: (pair[0].value, pair[1]))
            front = [node for node, _ in ranked[:width]]
            if not front:
                return

    return until_over(explorer, widen)
