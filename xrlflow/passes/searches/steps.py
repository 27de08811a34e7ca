"""The parts that all searches share: the budget, the meter that counts the compiler's steps, and the result.

A *step* is one pass run on one module. If a search repeats a step, the result comes from memory and costs nothing; a
pass that the compiler knows to have no effect costs nothing either. So searches are compared at equal numbers of
passes that the compiler had to run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol, runtime_checkable

from xrlflow.passes.compiler import (
    Applied,
    Arrays,
    Comparison,
    Compiler,
    CompilerError,
    Metric,
    Module,
    ModuleGraph,
)

# How often a search compares the best module so far with the first one, and the minimum number of steps between two
# comparisons: a comparison takes as long as about 20 steps.
_CHECKS, _APART = 4, 100
_log = logging.getLogger(__name__)


class BudgetUsedUp(Exception):
    """The steps or the time of a budget are used up."""


class Refused(Exception):
    """The best module of a search computes something else than the first one. The search begins again without the step
    that caused this.
    """


@runtime_checkable
class Foreseeing(Protocol):
    """A compiler that knows for some passes, without running them, that they have no effect on a module."""

    def without_effect(self, module: Module) -> Collection[str]:
        """The names of the passes that are known to have no effect on the module."""
        ...


def without_effect(compiler: Compiler, module: Module) -> frozenset[str]:
    """The passes that the compiler knows, without running them, to have no effect on a module."""
    return frozenset(compiler.without_effect(module)) if isinstance(compiler, Foreseeing) else frozenset()


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a search."""

    steps: int = 500  # the number of passes that the compiler may run
    horizon: int = 30  # the greatest length of an order
    deadline: float | None = None  # a time of time.monotonic()

    def __post_init__(self) -> None:
        if self.steps < 0 or self.horizon < 1:
            raise ValueError(
                f"a budget has steps >= 0 and a horizon >= 1, not {self.steps} and {self.horizon}"
            )


class Meter:
    """A compiler that counts its steps, raises `BudgetUsedUp` when no steps are left, and remembers all results.

    `wrong`: by digest, modules that compute something else than the first module, each with the difference. A pass
    that leads to such a module counts as failed.
    """

    def __init__(self, compiler: Compiler, budget: Budget) -> None:
        self.inner, self.budget = compiler, budget
        self.steps = 0
        self.begin = time.monotonic()
        self.wrong: dict[str, str] = {}
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
        """See `Compiler.apply_each`. Raises BudgetUsedUp if the budget is too small for all of them."""
        asked = list(dict.fromkeys(names))
        for name in self.without_effect(module).intersection(asked):
            self._known[module.digest, name] = Applied(module, False)
        new = [name for name in asked if (module.digest, name) not in self._known]
        deadline = self.budget.deadline
        if new:
            if self.steps + len(new) > self.budget.steps:
                raise BudgetUsedUp
            if deadline is not None and time.monotonic() >= deadline:
                raise BudgetUsedUp
            self.steps += len(new)
            for name, result in zip(new, self.inner.apply_each(module, new)):
                self._known[module.digest, name] = result
        return [self._corrected(module, self._known[module.digest, name]) for name in names]

    def _corrected(self, module: Module, applied: Applied) -> Applied:
        error = self.wrong.get(applied.module.digest) if applied.changed else None
        return applied if error is None else Applied(module, False, error)

    def idle(self, module: Module, name: str) -> bool:
        """Whether a pass is known to have no effect on a module."""
        cached = self._known.get((module.digest, name))
        if cached is None:
            return name in self.without_effect(module)
        return not self._corrected(module, cached).changed

    def without_effect(self, module: Module) -> frozenset[str]:
        return without_effect(self.inner, module)

    def default(self, module: Module, names: Sequence[str] | None = None) -> Module:
        return self.inner.default(module, names)

    def graph(self, module: Module) -> ModuleGraph:
        return self.inner.graph(module)

    def compare(
        self, reference: Module, module: Module, seed: int = 0, inputs: Sequence[Arrays] = ()
    ) -> Comparison:
        return self.inner.compare(reference, module, seed, inputs)

    def seconds(
        self, modules: Sequence[Module], repetitions: int = 20, seed: int = 0
    ) -> list[tuple[float, ...]]:
        return self.inner.seconds(modules, repetitions, seed)


@dataclass(frozen=True, slots=True)
class Node:
    """A module that a search reached."""

    module: Module
    passes: tuple[str, ...]  # the passes that led to this node, without those that had no effect
    value: float  # the metric: lower is better
    before: Node | None = field(default=None, compare=False, repr=False)

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        nodes, node = [self], self.before
        while node is not None:
            nodes.append(node)
            node = node.before
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Order:
    """The best order of a search. Passes without effect are left out, and it ends at its best prefix."""

    passes: tuple[str, ...]
    module: Module
    """The module after `passes`. It has the lowest value of all modules that the search reached and that compute the
    same as the original.
    """
    initial: float  # the value of the original
    value: float
    steps: int  # steps of the compiler
    seconds: float  # seconds of the search, without the comparison of its result
    curve: tuple[tuple[int, float], ...] = field(default=(), compare=False)
    """The step and the value of each improvement."""
    refused: tuple[str, ...] = ()
    """A line for each step that would have led to a better module, but changes what the module computes."""

    @property
    def reduction(self) -> float:
        """The relative reduction of the value."""
        return 1.0 - self.value / self.initial if self.initial > 0 else 0.0

    def value_at(self, steps: int) -> float:
        """The lowest value that the search had reached after this many steps."""
        return min((value for step, value in self.curve if step <= steps), default=self.initial)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a search. `order`: the best one until then."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order


class Explorer:
    """The nodes of one search, and the best of them. It applies passes until the budget is used up.

    `compared`: whether the search's result is compared with the first module.
    """

    def __init__(
        self,
        compiler: Compiler,
        module: Module,
        budget: Budget,
        metric: Metric = Metric.OPERATIONS,
        compared: bool = True,
    ) -> None:
        self.meter = compiler if isinstance(compiler, Meter) else Meter(compiler, budget)
        self.budget, self.metric = budget, metric
        self._measured: dict[str, float] = {module.digest: 1.0}
        self.root = Node(module, (), self._value(module))
        self.best = self.root
        self._nodes: dict[str, Node] = {module.digest: self.root}
        self._right = {module.digest}
        self._comparing = 0.0
        self._apart = max(_APART, budget.steps // _CHECKS)
        self._next_check = self._apart if compared else math.inf
        self._compared = compared
        self.curve: list[tuple[int, float]] = [(0, self.root.value)]

    @property
    def passes(self) -> tuple[str, ...]:
        return self.meter.passes

    def apply(self, node: Node, name: str) -> Node | None:
        """The node after a pass; None if the pass has no effect. Raises BudgetUsedUp."""
        return self.each(node, (name,))[0]

    def each(self, node: Node, names: Sequence[str]) -> list[Node | None]:
        """The nodes after each of several passes; None for a pass without effect.

        If the budget is too small for all passes, only the first ones are run, and the next call raises BudgetUsedUp.
        """
        try:
            results = self.meter.apply_each(node.module, names)
        except BudgetUsedUp:
            if len(names) < 2:
                raise
            return [self.each(node, (name,))[0] for name in names]
        return [self._successor(node, name, applied) for name, applied in zip(names, results)]

    def open(self, node: Node) -> tuple[str, ...]:
        """The passes that are not known to have no effect on a node's module."""
        return tuple(name for name in self.passes if not self.meter.idle(node.module, name))

    def replay(self, names: Iterable[str]) -> Node:
        """Apply these passes, and return the best node along the way. Raises BudgetUsedUp."""
        node = best = self.root
        for name in names:
            node = self.apply(node, name) or node
            if node.value < best.value:
                best = node
        return best

    def order(self) -> Order:
        """The best order. Only `check` compares its module with the first one."""
        return Order(
            self.best.passes, self.best.module, self.root.value, self.best.value, self.meter.steps,
            self.seconds, tuple(self.curve), tuple(self.meter.wrong.values()),
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Seconds since the beginning, without comparisons."""
        return time.monotonic() - self.meter.begin - self._comparing

    def check(self, node: Node | None = None) -> bool:
        """Compare the module of a node (by default the best one) with the first one. Returns whether they compute the
        same.

        If not, the step that caused it is refused from now on, and the best node becomes one that does not depend on
        it. Raises CompilerError if the first module does not run.
        """
        if not self._compared:
            return True
        begin = time.monotonic()
        node = node if node is not None else self.best
        try:
            if node.module.digest in self._right or self._difference(node) is None:
                self._right.add(node.module.digest)
                return True
            changed = self._first_wrong(node.path())
            before = ", ".join(changed.passes[:-1]) or "no other pass"
            error = f"{changed.passes[-1]} after {before}: {self._difference(changed)}"
        finally:
            self._comparing += time.monotonic() - begin
        _log.error("a pass changes what the module computes: %s", error)
        self.meter.wrong[changed.module.digest] = error
        self._nodes = {
            digest: node
            for digest, node in self._nodes.items()
            if not any(n.module.digest in self.meter.wrong for n in node.path())
        }
        self.best = min(self._nodes.values(), key=lambda n: (n.value, len(n.passes)))
        self.curve = [point for point in self.curve if point[1] > self.best.value]
        self.curve.append((self.meter.steps if self.curve else 0, self.best.value))
        return False

    def _first_wrong(self, nodes: Sequence[Node]) -> Node:
        """The first node of a path that computes something else than the root. The last node must compute something
        else.
        """
        right, wrong = 0, len(nodes) - 1
        while wrong - right > 1:
            middle = (right + wrong) // 2
            if self._difference(nodes[middle]) is None:
                right = middle
            else:
                wrong = middle
        return nodes[wrong]

    def _difference(self, node: Node) -> str | None:
        """How a node's outputs differ from the root's; None if they do not. Raises CompilerError if the root does not
        run."""
        if node.module == self.root.module:
            return None
        try:
            comparison = self.meter.compare(self.root.module, node.module)
        except CompilerError as error:
            self.meter.compare(self.root.module, self.root.module)
            return str(error)
        return None if comparison.equal else comparison.difference or "it computes something else"

    def _successor(self, node: Node, name: str, applied: Applied) -> Node | None:
        if not applied.changed:
            return None
        successor = Node(applied.module, (*node.passes, name), self._value(applied.module), node)
        earlier = self._nodes.get(applied.module.digest)
        if earlier is None or len(successor.passes) < len(earlier.passes):
            self._nodes[applied.module.digest] = successor
        # A shorter path to the same value counts as better, too.
        if (successor.value, len(successor.passes)) < (self.best.value, len(self.best.passes)):
            if successor.value < self.best.value:
                self.curve.append((self.meter.steps, successor.value))
            self.best = successor
        if self.meter.steps >= self._next_check:
            self._next_check = self.meter.steps + self._apart
            if not self.check():
                raise Refused
        return successor

    def _value(self, module: Module) -> float:
        """The value of a module. Seconds are relative to those of the first module, from pairs of runs."""
        if self.metric is not Metric.SECONDS:
            return module.summary.of(self.metric)
        if module.digest not in self._measured:
            old, new = self.meter.seconds([self.root.module, module])
            self._measured[module.digest] = median(b / a for a, b in zip(old, new))
        return self._measured[module.digest]


def until_over(explorer: Explorer, search: Callable[[], object]) -> Order:
    """Run a search that may end by `BudgetUsedUp`, and compare its result with the first module. If a step changed
    what the module computes, the search begins again with the remaining budget; passes that it has run before cost
    nothing.

    Raises Interrupted after Ctrl-C, and CompilerError if the first module does not run.
    """
    try:
        _run(explorer, search)
    except KeyboardInterrupt as interrupt:
        _settle(explorer)
        raise Interrupted(explorer.order()) from interrupt
    return explorer.order()


def _run(explorer: Explorer, search: Callable[[], object]) -> None:
    while True:
        try:
            search()
        except BudgetUsedUp:
            return _settle(explorer)
        except Refused:
            continue
        if explorer.check():
            return None


def _settle(explorer: Explorer) -> None:
    """Return to the best module that computes the same as the first one."""
    while not explorer.check():
        pass
