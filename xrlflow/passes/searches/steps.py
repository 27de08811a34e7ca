"""What all searches share: the budget, the meter that counts the compiler's steps, and the result.

A *step* is one pass run on one module. What the same search asks again is remembered and costs nothing, and neither do
passes that the compiler foresees to have no effect; for every search alike. So searches are compared at equal numbers
of passes that a compiler had to run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol, runtime_checkable

from xrlflow.passes.compiler import Applied, Comparison, Compiler, Metric, Module, ModuleGraph


class Over(Exception):
    """The steps or the time of a budget are used up."""


@runtime_checkable
class Foreseeing(Protocol):
    """A compiler that knows of some passes, without running them, that they have no effect on a module."""

    def without_effect(self, module: Module) -> Collection[str]:
        """The names of such passes."""
        ...


def without_effect(compiler: Compiler, module: Module) -> frozenset[str]:
    """The passes of which the compiler knows, without running them, that they have no effect on a module."""
    return frozenset(compiler.without_effect(module)) if isinstance(compiler, Foreseeing) else frozenset()


@dataclass(frozen=True, slots=True)
class Budget:
    """`steps` of the compiler, orders of at most `horizon` passes, until `deadline` (time.monotonic)."""

    steps: int = 500
    horizon: int = 30
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 0 or self.horizon < 1:
            raise ValueError(
                f"a budget has steps >= 0 and a horizon >= 1, not {self.steps} and {self.horizon}"
            )


class Meter:
    """A compiler that counts its steps, and raises `Over` when there are none left. It remembers what it was asked."""

    def __init__(self, compiler: Compiler, budget: Budget) -> None:
        self.inner, self.budget = compiler, budget
        self.steps = 0
        self.begin = time.monotonic()
        self._known: dict[tuple[str, str], Applied] = {}

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def passes(self) -> tuple[str, ...]:
        return self.inner.passes

    @property
    def opcodes(self) -> tuple[str, ...]:
        return self.inner.opcodes

    def load(self, source: str | bytes) -> Module:
        return self.inner.load(source)

    def write(self, module: Module) -> str | bytes:
        return self.inner.write(module)

    def apply(self, module: Module, name: str) -> Applied:
        return self.apply_each(module, [name])[0]

    def apply_each(self, module: Module, names: Sequence[str]) -> list[Applied]:
        """As `Compiler.apply_each`. Raises Over if the budget does not last for all of them."""
        asked = list(dict.fromkeys(names))
        for name in self.without_effect(module).intersection(asked):
            self._known[module.digest, name] = Applied(module, False)
        new = [name for name in asked if (module.digest, name) not in self._known]
        deadline = self.budget.deadline
        if new:
            if self.steps + len(new) > self.budget.steps:
                raise Over
            if deadline is not None and time.monotonic() >= deadline:
                raise Over
            self.steps += len(new)
            for name, found in zip(new, self.inner.apply_each(module, new)):
                self._known[module.digest, name] = found
        return [self._known[module.digest, name] for name in names]

    def idle(self, module: Module, name: str) -> bool:
        """Whether a pass is known to have no effect on a module."""
        known = self._known.get((module.digest, name))
        return name in self.without_effect(module) if known is None else not known.changed

    def without_effect(self, module: Module) -> frozenset[str]:
        return without_effect(self.inner, module)

    def default(self, module: Module, names: Sequence[str] | None = None) -> Module:
        return self.inner.default(module, names)

    def graph(self, module: Module) -> ModuleGraph:
        return self.inner.graph(module)

    def compare(self, reference: Module, module: Module, seed: int = 0) -> Comparison:
        return self.inner.compare(reference, module, seed)

    def seconds(
        self, modules: Sequence[Module], repetitions: int = 20, seed: int = 0
    ) -> list[tuple[float, ...]]:
        return self.inner.seconds(modules, repetitions, seed)


@dataclass(frozen=True, slots=True)
class Node:
    """A module that a search made, the passes with an effect that led there, and its value: less is better."""

    module: Module
    passes: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Order:
    """The best order that a search found. `module`: after `passes`, whose value is the least of all that were made.

    Passes without effect are left out, and an order ends at its best prefix. `initial`: the value of the given module.
    `steps`: of the compiler. `curve`: the step at which each improvement was found, and its value.
    """

    passes: tuple[str, ...]
    module: Module
    initial: float
    value: float
    steps: int
    seconds: float
    curve: tuple[tuple[int, float], ...] = field(default=(), compare=False)

    @property
    def reduction(self) -> float:
        """The part of the initial value that is saved."""
        return 1.0 - self.value / self.initial if self.initial > 0 else 0.0

    def value_at(self, steps: int) -> float:
        """The least value after this many steps."""
        return min((value for step, value in self.curve if step <= steps), default=self.initial)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a search. `order`: the best one until then."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order


class Explorer:
    """The nodes of one search. It keeps the best one, and makes nodes until the budget is over."""

    def __init__(
        self, compiler: Compiler, module: Module, budget: Budget, metric: Metric = Metric.OPERATIONS
    ) -> None:
        self.meter = compiler if isinstance(compiler, Meter) else Meter(compiler, budget)
        self.budget, self.metric = budget, metric
        self._measured: dict[str, float] = {module.digest: 1.0}
        self.root = Node(module, (), self._value(module))
        self.best = self.root
        self.curve: list[tuple[int, float]] = [(0, self.root.value)]

    @property
    def passes(self) -> tuple[str, ...]:
        return self.meter.passes

    def apply(self, node: Node, name: str) -> Node | None:
        """The node after a pass, or None if the pass has no effect. Raises Over."""
        return self.each(node, (name,))[0]

    def each(self, node: Node, names: Sequence[str]) -> list[Node | None]:
        """The nodes after each of several passes; None where there is no effect.

        When the budget does not last for all of them, the first ones are run, and the next call raises Over.
        """
        try:
            found = self.meter.apply_each(node.module, names)
        except Over:
            if len(names) < 2:
                raise
            return [self.each(node, (name,))[0] for name in names]
        return [self._made(node, name, applied) for name, applied in zip(names, found)]

    def open(self, node: Node) -> tuple[str, ...]:
        """The passes that are not known to have no effect on a node's module."""
        return tuple(name for name in self.passes if not self.meter.idle(node.module, name))

    def replay(self, names: Iterable[str]) -> Node:
        """The best node on the way of these passes. Raises Over."""
        node = best = self.root
        for name in names:
            node = self.apply(node, name) or node
            if node.value < best.value:
                best = node
        return best

    def order(self) -> Order:
        best = self.best
        return Order(
            best.passes, best.module, self.root.value, best.value, self.meter.steps,
            time.monotonic() - self.meter.begin, tuple(self.curve),
        )  # fmt: skip

    def _made(self, node: Node, name: str, applied: Applied) -> Node | None:
        if not applied.changed:
            return None
        made = Node(applied.module, (*node.passes, name), self._value(applied.module))
        # A shorter way to the same value is better, too.
        if (made.value, len(made.passes)) < (self.best.value, len(self.best.passes)):
            if made.value < self.best.value:
                self.curve.append((self.meter.steps, made.value))
            self.best = made
        return made

    def _value(self, module: Module) -> float:
        """The metric; seconds are relative to those of the first module, from pairs of runs."""
        if self.metric is not Metric.SECONDS:
            return module.summary.of(self.metric)
        if module.digest not in self._measured:
            old, new = self.meter.seconds([self.root.module, module])
            self._measured[module.digest] = median(b / a for a, b in zip(old, new))
        return self._measured[module.digest]


def until_over(explorer: Explorer, search: Callable[[], object]) -> Order:
    """Run a search that may end by `Over`. Raises Interrupted after Ctrl-C."""
    try:
        search()
    except Over:
        pass
    except KeyboardInterrupt as interrupt:
        raise Interrupted(explorer.order()) from interrupt
    return explorer.order()
