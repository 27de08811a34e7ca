"""Searches for whole sequences: evolution on one module, and the best fixed sequence for several modules.

The meter remembers the results of passes in earlier sequences. So a sequence that differs at one position costs only
the passes from this position on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xrlflow.passes.compiler import Compiler, Metric, Module
from xrlflow.passes.searches.steps import (
    Budget,
    BudgetUsedUp,
    Explorer,
    Meter,
    Node,
    Order,
    Refused,
    until_over,
)

Passes = tuple[str, ...]
_POPULATION = 8
# A search ends after this many sequences in a row that ran no new pass.
_IDLE = 2000


@dataclass(frozen=True, slots=True)
class Fixed:
    """One sequence for all modules."""

    passes: Passes
    ratio: float  # the geometric mean of (best value along the sequence / initial value) over the modules
    steps: int
    seconds: float


def evolve(
    compiler: Compiler, module: Module, budget: Budget, seed: int = 0, metric: Metric = Metric.OPERATIONS
) -> Order:
    """Evolution: sequences are changed and crossed at random, and the best ones survive."""
    explorer = Explorer(compiler, module, budget, metric)
    generator = np.random.default_rng(seed)
    names = explorer.passes
    first = [
        tuple(str(n) for n in generator.choice(names, min(8, budget.horizon))) for _ in range(_POPULATION)
    ]

    def measured(passes: Passes) -> float:
        return explorer.replay(passes).value

    return until_over(
        explorer, lambda: _evolution(measured, first, names, budget.horizon, explorer.meter, generator)
    )


def refined(
    compiler: Compiler,
    module: Module,
    passes: Sequence[str],
    budget: Budget,
    seed: int = 0,
    metric: Metric = Metric.OPERATIONS,
) -> Order:
    """Improve a sequence by `improve`, which appends passes without preferring any."""
    explorer = Explorer(compiler, module, budget, metric)

    def go_on() -> None:
        explorer.replay(passes[: budget.horizon])
        improve(explorer, explorer.open, seed)

    return until_over(explorer, go_on)


def improve(explorer: Explorer, ranked: Callable[[Node], Sequence[str]], seed: int) -> None:
    """Improve the best order, until the budget is used up. Raises BudgetUsedUp.

    First, passes are appended one by one: each is the first pass, in the order of `ranked(node)`, that improves the
    module. When no pass improves it, evolution continues from this order.
    """
    node, bettered = explorer.best, True
    while bettered and len(node.passes) < explorer.budget.horizon:
        bettered = False
        for name in ranked(node):
            successor = explorer.apply(node, name)
            if successor is not None and successor.value < node.value:
                node, bettered = successor, True
                break
    _evolve_from(explorer, explorer.best.passes, seed)


def _evolve_from(explorer: Explorer, passes: Passes, seed: int) -> None:
    horizon = explorer.budget.horizon
    _evolution(
        lambda changed: explorer.replay(changed).value,
        [passes],
        explorer.passes,
        horizon,
        explorer.meter,
        np.random.default_rng(seed),
    )


def fixed(
    compiler: Compiler,
    modules: Sequence[Module],
    budget: Budget,
    seed: int = 0,
    metric: Metric = Metric.OPERATIONS,
) -> Fixed:
    """The sequence that is best for several modules together: greedy construction, then evolution from the result.

    Sequences are compared by the sum of the logarithms of the values after them. The steps of the budget count for all
    modules together.
    """
    meter = Meter(compiler, budget)
    explorers = [Explorer(meter, module, budget, metric) for module in modules]
    generator = np.random.default_rng(seed)
    best: list[tuple[float, Passes]] = [(0.0, ())]

    def measured(passes: Passes) -> float:
        value = _together([(e.replay(passes), e) for e in explorers])
        if (value, len(passes)) < (best[0][0], len(best[0][1])):
            best[0] = (value, passes)
        return value

    while True:
        best[0] = (0.0, ())
        try:
            measured(_built(explorers, budget.horizon))
            _evolution(measured, [best[0][1]], meter.passes, budget.horizon, meter, generator)
        except BudgetUsedUp:
            pass
        except Refused:  # a step changes what a module computes: search again without it
            continue
        value, passes = best[0]
        if all(e.check(e.replay(passes)) for e in explorers):
            break
    return Fixed(passes, math.exp(value / len(modules)), meter.steps, time.monotonic() - meter.begin)


def follow(
    compiler: Compiler,
    module: Module,
    passes: Sequence[str],
    budget: Budget,
    metric: Metric = Metric.OPERATIONS,
) -> Order:
    """Apply a sequence of passes. Returns its best prefix as an order."""
    explorer = Explorer(compiler, module, budget, metric)
    return until_over(explorer, lambda: explorer.replay(passes))


def _together(nodes: Sequence[tuple[Node, Explorer]]) -> float:
    return math.fsum(
        math.log(max(node.value, 1e-30) / max(explorer.root.value, 1e-30)) for node, explorer in nodes
    )


def _built(explorers: Sequence[Explorer], horizon: int) -> Passes:
    """Build a sequence: append the pass that is best for all modules together, again and again. If no steps are left,
    returns the sequence built by then.
    """
    nodes = [e.root for e in explorers]
    built: list[str] = []
    try:
        while len(built) < horizon:
            rows = [
                [successor or node for successor in e.each(node, e.passes)]
                for e, node in zip(explorers, nodes)
            ]
            columns = list(zip(*rows))
            values = [_together(list(zip(column, explorers))) for column in columns]
            number = int(np.argmin(values))
            if values[number] >= _together(list(zip(nodes, explorers))):
                break
            nodes = list(columns[number])
            built.append(explorers[0].passes[number])
    except BudgetUsedUp:
        pass
    return tuple(built)


def _evolution(
    measured: Callable[[Passes], float],
    first: Sequence[Passes],
    names: Sequence[str],
    horizon: int,
    meter: Meter,
    generator: np.random.Generator,
) -> None:
    """Steady-state evolution: a child of one or two sequences replaces the worst one, if it is as good.

    Of equally good sequences the newest come first, so that a pass without gain may stay until a later pass benefits
    from it.
    """
    population = [(measured(passes), passes) for passes in dict.fromkeys(first)]
    idle = 0
    while idle < _IDLE:
        before = meter.steps
        child = _child([passes for _, passes in population], names, horizon, generator)
        idle += 1
        if all(child != passes for _, passes in population):
            population.insert(0, (measured(child), child))
            population.sort(key=lambda pair: pair[0])
            del population[_POPULATION:]
        if meter.steps > before:
            idle = 0


def _child(
    parents: Sequence[Passes], names: Sequence[str], horizon: int, generator: np.random.Generator
) -> Passes:
    """A new sequence: the beginning of one parent and the end of another, or a whole parent; and in either case one to
    three random changes.
    """

    def one() -> Passes:
        return parents[
            int(len(parents) * generator.random() ** 2)
        ]  # prefers the first sequences, which are the best

    child = list(one())
    if generator.random() < 0.3:
        other = one()
        child = child[: int(generator.integers(len(child) + 1))] + list(
            other[int(generator.integers(len(other) + 1)) :]
        )
    for _ in range(int(generator.integers(1, 4))):
        name = str(names[int(generator.integers(len(names)))])
        position = int(generator.integers(len(child) + 1))
        match int(generator.integers(4)):
            case 0:
                child.insert(position, name)
            case 1 if child:
                child[min(position, len(child) - 1)] = name
            case 2 if child:
                del child[min(position, len(child) - 1)]
            case 3 if len(child) > 1:
                other_place = int(generator.integers(len(child)))
                position = min(position, len(child) - 1)
                child[position], child[other_place] = child[other_place], child[position]
    return tuple(child[:horizon])
