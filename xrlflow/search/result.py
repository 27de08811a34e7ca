"""The types that all search strategies share: limits, search nodes, traces, results."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from xrlflow.ir import Edit
from xrlflow.rewrite import Match, RewriteState
from xrlflow.rewrite.state import Key


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One substitution of a trace: the rule, the ids of nodes and values that it matched, and the cost afterwards."""

    rule: str
    family: str
    key: Key
    cost: float


@dataclass(frozen=True, slots=True)
class Path:
    """The substitutions that lead to a state, as a linked list: the last substitution with its edit, and the path
    before it."""

    step: TraceStep
    edit: Edit
    before: Path | None
    families: frozenset[str]

    def parts(self) -> list[Path]:
        """For each substitution the path that ends with it, the shortest path first."""
        parts: list[Path] = []
        at: Path | None = self
        while at is not None:
            parts.append(at)
            at = at.before
        return parts[::-1]

    def steps(self) -> tuple[TraceStep, ...]:
        return tuple(part.step for part in self.parts())


def append(path: Path | None, step: TraceStep, edit: Edit) -> Path:
    """The path with one more step. `path` is None at the start."""
    families = path.families if path is not None else frozenset()
    return Path(step, edit, path, families if step.family in families else families | {step.family})


def extend(path: Path | None, match: Match, edit: Edit, cost: float) -> Path:
    """The path with one more substitution."""
    return append(path, TraceStep(match.rule.name, match.rule.family, match.key, cost), edit)


def joined(path: Path | None, further: Path | None) -> Path | None:
    """This path, followed by the substitutions of the path `further`."""
    for part in further.parts() if further is not None else ():
        path = append(path, part.step, part.edit)
    return path


def steps_of(path: Path | None) -> tuple[TraceStep, ...]:
    return path.steps() if path is not None else ()


@dataclass(frozen=True, slots=True)
class SearchNode:
    """A state, the path that leads to it, and its modelled cost in seconds."""

    state: RewriteState
    path: Path | None
    cost: float

    @property
    def trace(self) -> tuple[TraceStep, ...]:
        return steps_of(self.path)

    @property
    def families(self) -> frozenset[str]:
        return self.path.families if self.path is not None else frozenset()


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best node by modelled cost, and a shortlist: the best node of each set of rule families, best first."""

    best: SearchNode
    shortlist: tuple[SearchNode, ...]
    expanded: int
    generated: int
    seconds: float
    interrupted: bool


@dataclass(slots=True)
class Limits:
    """When a search stops, besides on Ctrl-C."""

    budget: int = 1000  # number of states that may be expanded
    deadline: float | None = None  # a moment of time.monotonic
    progress: Callable[[int, float], None] | None = None  # called with the expanded states and the best cost

    def over(self, expanded: int, best: float) -> bool:
        if self.progress is not None:
            self.progress(expanded, best)
        return expanded >= self.budget or (self.deadline is not None and time.monotonic() >= self.deadline)


@dataclass(slots=True)
class Shortlist:
    """The cheapest node of each set of rule families."""

    size: int = 8
    nodes: dict[frozenset[str], SearchNode] = field(default_factory=dict)

    def offer(self, node: SearchNode) -> None:
        cheapest = self.nodes.get(node.families)
        if cheapest is None or node.cost < cheapest.cost:
            self.nodes[node.families] = node
            if len(self.nodes) > 8 * self.size:
                self.nodes = {f.families: f for f in self.best()}

    def best(self) -> tuple[SearchNode, ...]:
        return tuple(sorted(self.nodes.values(), key=lambda f: f.cost)[: self.size])


class TraceError(ValueError):
    """A trace does not fit the graph that it is replayed on."""


def retrace(
    state: RewriteState, trace: Sequence[TraceStep], first: int = 1
) -> Iterator[tuple[RewriteState, Match, RewriteState]]:
    """For each step of a trace: the state before, the match, and the state after.

    `first`: the number of the first step. Raises TraceError if a step is not among the candidates.
    """
    for number, step in enumerate(trace, first):
        match = state.find((step.key[0], step.key[1]))
        if match is None:
            raise TraceError(_misfit(state, number, step))
        after = state.apply(match)
        yield state, match, after
        state = after


def retraced(base: SearchNode, trace: Sequence[TraceStep], first: int = 1) -> SearchNode:
    """The search node that a trace leads to from `base`, with costs by the cost model of `base`. Raises TraceError as
    `retrace` does."""
    node = base
    for number, step in enumerate(trace, first):
        match = node.state.find(step.key)
        if match is None:
            raise TraceError(_misfit(node.state, number, step))
        node = successor(node, match)
    return node


def _misfit(state: RewriteState, number: int, step: TraceStep) -> str:
    """Why a step of a trace cannot be replayed."""
    text = f"step {number} of the trace ({step.rule}) does not apply to this graph"
    left_out = step.rule not in state.library.rules
    return f"{text}: the options leave its rule out, or what it assumes (--assume)" if left_out else text


def successor(node: SearchNode, match: Match) -> SearchNode:
    """The node after one more substitution, with its cost by the cost model."""
    edit, delta = node.state.priced(match)
    cost = node.cost + delta
    return SearchNode(node.state.apply(match, edit), extend(node.path, match, edit, cost), cost)


def leave_out(base: SearchNode, trace: Sequence[TraceStep], rules: Collection[str]) -> SearchNode:
    """The search node that a trace leads to from `base` if the steps of `rules` are left out, and steps that cannot be
    applied without them. Keys of other steps stay valid, because a node's id does not depend on the order of steps."""
    node = base
    for step in trace:
        match = None if step.rule in rules else node.state.find(step.key)
        if match is not None:
            node = successor(node, match)
    return node


def replay(state: RewriteState, trace: Sequence[TraceStep]) -> Iterator[RewriteState]:
    """The state after each step of a trace. Raises TraceError as `retrace` does."""
    return (after for _, _, after in retrace(state, trace))
