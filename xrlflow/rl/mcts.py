"""Monte Carlo tree search with the real engine: `search="mcts"`.

It is AlphaZero's search (Silver et al., 2018) for a single player who wants the graph of least cost. The agent's
policy gives the priors, and its critic estimates gains that greedy descents do not reach:

- A simulation walks down the tree by PUCT and creates one new state. The value of the simulation is the fraction
  of the initial cost that a greedy descent from the new state saves or, if it is more, the further saving from this
  state that the critic predicts.
- Equal substitutions in different layers are one action, so that the breadth of the tree does not grow with the number
  of layers.
- States that several paths reach are one vertex of the tree (by fingerprint). Each edge counts its own visits.
- An edge's worth is the mean of its simulations, mixed with the best one, since the search returns a maximum.
  Values are scaled to the range 0 to 1 by the least and the greatest value so far (Schrittwieser et al., 2020).
- Simulations alternately begin at the end of the first descent and at the best graph so far. So the search can continue
  from a gain, and can also try to do without the substitutions that led to this gain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from xrlflow.rewrite import Match, RewriteState
from xrlflow.rl.situation import Situation, choices
from xrlflow.rl.states import LimitReached, States
from xrlflow.rl.strategy import Group, PolicyError, alike
from xrlflow.search.result import Limits, SearchNode, SearchResult

Obs = TypeVar("Obs")
ObsIn = TypeVar("ObsIn", contravariant=True)
Floats = npt.NDArray[np.float64]

# The search ends after this many rounds in a row that create no new state.
_IDLE = 20


class Judge(Protocol[ObsIn]):
    """The methods of an agent that a tree search uses."""

    def evaluate(self, observations: Sequence[ObsIn]) -> tuple[Floats, Floats]:
        """The log-probabilities of each observation's candidates and No-Op, in one flat array, and the values [B]."""
        ...


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """The parameters of the tree search."""

    batch: int = 8  # simulations between two calls of the network
    exploration: float = 1.25  # the weight of the priors against the values of simulations
    caution: float = 0.3  # the share of the priors that prefers small losses instead of following the policy
    rise: float = 8.0  # the nats by which a loss of the whole initial cost lowers this share
    best: float = 0.5  # the weight of an edge's best simulation; the mean of all has 1 minus this
    trust: float = 0.25  # the factor of the critic's value
    unit: float = 5.0  # the critic's value for saving the whole cost
    depth: int = 50  # the greatest number of steps of a simulation
    patience: int | None = 400
    """The search ends after this many states without an improvement. None: it ends only at the limits."""
    growth: float = 2.0  # graphs that have more than this many times the operators of the input are dropped


class _Vertex:
    """A state in the tree: its A actions (groups of equal substitutions), their priors, and the results of their
    simulations [A].
    """

    __slots__ = ("actions", "best", "node", "priors", "total", "visits")

    def __init__(self, node: SearchNode, actions: list[tuple[Match, ...]], priors: Floats) -> None:
        self.node, self.actions, self.priors = node, actions, priors
        count = len(actions)
        self.visits, self.total = np.zeros(count), np.zeros(count)
        self.best = np.full(count, -np.inf)


# The path of a simulation: vertices, and the numbers of the actions that it took there.
_Path = list[tuple[_Vertex, int]]


def tree_search(
    state: RewriteState,
    cost: float,
    limits: Limits,
    judge: Judge[Obs],
    observe: Callable[[Situation], Obs],
    config: TreeConfig = TreeConfig(),
) -> SearchResult:
    """Search with an agent's policy and critic. The arguments and the result are as in `strategy.agent_search`.

    Nothing is random, so the result is the same each time, unless the deadline ends the search. Raises PolicyError.
    """
    begin = time.monotonic()
    search = _TreeSearch(state, cost, limits, judge, observe, config)
    interrupted = False
    try:
        search.run()
    except KeyboardInterrupt:
        interrupted = True
    return search.result(time.monotonic() - begin, interrupted)


class _TreeSearch(States, Generic[Obs]):
    def __init__(
        self,
        state: RewriteState,
        cost: float,
        limits: Limits,
        judge: Judge[Obs],
        observe: Callable[[Situation], Obs],
        config: TreeConfig,
    ) -> None:
        super().__init__(state, cost, limits, config.growth)
        self.judge, self.observe, self.config = judge, observe, config
        self.tree: dict[int, _Vertex] = {}
        self.least, self.greatest = np.inf, -np.inf

    def run(self) -> None:
        try:
            first = self.descend(self.root)
            patience, idle = self.config.patience, 0
            while idle < _IDLE and (patience is None or self.expanded - self.improved_at < patience):
                before = self.expanded
                acted = self.round(first)
                if self.best is not first:
                    acted = self.round(self.best) or acted
                if not acted:
                    break
                idle = 0 if self.expanded > before else idle + 1
        except LimitReached:
            pass

    def round(self, start: SearchNode) -> bool:
        """Run some simulations from a state, with one call of the network. Returns whether the state had an action to
        simulate.
        """
        best = self.best
        if start.state.fingerprint not in self.tree:
            self.grow([([], start)])
        root = self.tree[start.state.fingerprint]
        arrived: list[tuple[_Path, SearchNode]] = []
        acted = False
        for _ in range(self.config.batch):
            path, node = self.simulate(root)
            acted = acted or bool(path)
            if node is None:
                self.learn(path, -np.inf)
            else:
                for vertex, action in path:  # a simulation counts as a loss until its value is known
                    vertex.visits[action] += 1
                arrived.append((path, node))
            if self.best is not best:
                break
        for path, _ in arrived:
            for vertex, action in path:
                vertex.visits[action] -= 1
        self.grow(arrived)
        return acted

    def simulate(self, root: _Vertex) -> tuple[_Path, SearchNode | None]:
        """Walk down the tree to a new state. Returns the path, and the state at its end or None if this state repeats
        an earlier one or is too large.
        """
        path: _Path = []
        vertex, visited = root, {root.node.state.fingerprint}
        while len(path) < self.config.depth and vertex.actions:
            action = self.choose(vertex)
            path.append((vertex, action))
            successor = self.follow(vertex, action)
            if successor is None or successor.state.fingerprint in visited:
                return path, None
            here = successor.state.fingerprint
            visited.add(here)
            next_vertex = self.tree.get(here)
            if next_vertex is None:
                self.descend(successor, vertex.node.cost)
                return path, successor
            vertex = next_vertex
        return path, vertex.node if path else None

    def follow(self, vertex: _Vertex, action: int) -> SearchNode | None:
        """The state after the first substitution of an action whose result is not too large; None if all results are
        too large.
        """
        for match in vertex.actions[action]:
            successor = self.make(vertex.node, match)
            if successor is not None:
                return successor
        return None

    def choose(self, vertex: _Vertex) -> int:
        """The action with the greatest PUCT score (Silver et al., 2018)."""
        config = self.config
        visits = vertex.visits
        with np.errstate(invalid="ignore"):
            means = vertex.total / np.maximum(visits, 1)
            worth = config.best * self.scaled(vertex.best) + (1 - config.best) * self.scaled(means)
        worth = np.where(np.isfinite(worth) & (visits > 0), worth, 0.0)
        bonus = config.exploration * vertex.priors * sqrt(visits.sum() + 1) / (1 + visits)
        return int(np.argmax(worth + bonus))

    def scaled(self, values: Floats) -> Floats:
        """The values scaled to 0 (the least so far) to 1 (the greatest)."""
        span = self.greatest - self.least
        return (values - self.least) / span if span > 0 else np.zeros_like(values)

    def grow(self, arrived: Sequence[tuple[_Path, SearchNode]]) -> None:
        """Evaluate new states with the agent, add them to the tree, and add their values to the paths that led to
        them.
        """
        new = {f.state.fingerprint: f for _, f in arrived if f.state.fingerprint not in self.tree}
        promised: dict[int, float] = {}
        if new:
            promised = self.evaluate(list(new.values()))
        for path, node in arrived:
            here = node.state.fingerprint
            end = self.ends.get(here, node)
            saved = 1.0 - min(end.cost, node.cost) / max(self.root.cost, 1e-30)
            hoped = 1.0 - node.cost / max(self.root.cost, 1e-30) + promised.get(here, 0.0)
            self.learn(path, (1 - self.config.trust) * saved + self.config.trust * max(saved, hoped))

    def evaluate(self, states: Sequence[SearchNode]) -> dict[int, float]:
        """Add states to the tree. Returns, by fingerprint, the fraction of the initial cost that the critic expects to
        be saved.
        """
        if self.limits.over(self.expanded, self.best.cost):
            raise LimitReached
        situations = []
        for node in states:
            offered = choices(node.state, self.ancestors(node))
            self.generated += len(offered)
            situations.append(Situation(node.state, offered, node.cost, self.root.cost))
        flat, values = self.judge.evaluate([self.observe(s) for s in situations])
        count = sum(len(s.candidates) + 1 for s in situations)
        if len(flat) != count or len(values) != len(states) or np.isnan(flat).any() or np.isnan(values).any():
            raise PolicyError("the agent gives no probability or value for a state: train it again")
        first = 0
        promised = {}
        for node, situation, value in zip(states, situations, values.tolist()):
            matches = situation.candidates
            log_probs = flat[first : first + len(matches)]
            first += len(matches) + 1
            self.tree[node.state.fingerprint] = self.vertex(node, matches, log_probs)
            promised[node.state.fingerprint] = max(value, 0.0) / self.config.unit
        return promised

    def vertex(self, node: SearchNode, matches: Sequence[Match], log_probs: Floats) -> _Vertex:
        """A vertex whose actions are the groups of equal substitutions. In each group the likeliest substitution is
        first.
        """
        groups: dict[Group, list[int]] = {}
        for index in np.argsort(-log_probs, kind="stable").tolist():
            groups.setdefault(alike(node.state.graph, matches[index], node.cost), []).append(index)
        members = list(groups.values())
        if not members:
            return _Vertex(node, [], np.zeros(0))
        likely = np.array([np.exp(log_probs[each]).sum() for each in members])
        losses = np.array([matches[each[0]].delta for each in members]) / max(self.root.cost, 1e-30)
        steep = np.maximum(losses, 0.0)
        mild = np.exp(
            (steep.min() - steep) * self.config.rise
        )  # the smallest loss gives 1, so the sum is not 0
        caution = self.config.caution if likely.sum() > 0 else 1.0
        priors = (1 - caution) * likely / max(float(likely.sum()), 1e-30) + caution * mild / mild.sum()
        return _Vertex(node, [tuple(matches[i] for i in each) for each in members], priors)

    def learn(self, path: _Path, value: float) -> None:
        """Add the value of a simulation to the edges of its path. The value -inf (no new state) counts as the least
        value so far.
        """
        lost = not np.isfinite(value)
        if lost:
            value = self.least if np.isfinite(self.least) else 0.0
        else:
            self.least, self.greatest = min(self.least, value), max(self.greatest, value)
        for vertex, action in path:
            vertex.visits[action] += 1
            vertex.total[action] += value
            if not lost:
                vertex.best[action] = max(vertex.best[action], value)
