"""Search with a trained agent: `search="xrlflow"`.

A plain rollout of the policy needs one network call per step. This search uses each call for several steps, and uses
the cost model instead of the network where the cost model is enough:

- Descents. From every state that the search reaches, a greedy descent by modelled cost continues, without network
  calls. The first descent starts at the input, so the result is never worse than that of greedy search (if the limits
  let the descent finish).
- Level steps. At the end of the first descent, every substitution that changes the cost by nearly nothing is tried,
  and a descent follows each. These trials take less time than a network call.
- Perturbations. At the end of a descent, the agent chooses substitutions that are worth a loss. A descent follows each.
  If a perturbation does not gain at once, further perturbations start from its result. Perturbations are ordered by the
  policy's probability along the path (as in Orseau et al., 2018, Single-Agent Policy Tree Search) and by their loss. So
  the search crosses valleys of several steps.
- Rollouts. They start at the input and run in bursts: one network call applies all substitutions that are nearly as
  probable as the likeliest one. The first rollout applies the likeliest actions; later ones sample.

Candidates of one rule with the same context and delta of the cost (mostly in different layers) form one perturbation.
One of them is tried; if it gains, the other candidates are applied at once. A state is identified by its fingerprint,
and no state is expanded or evaluated twice. The network evaluates states in batches.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from xrlflow.ir import Graph
from xrlflow.ir.graph import FINGERPRINT_MASK
from xrlflow.rewrite import Match, RewriteState
from xrlflow.rl.situation import Situation, choices
from xrlflow.rl.states import LimitReached, States
from xrlflow.search.result import Limits, SearchNode, SearchResult

Obs = TypeVar("Obs")
ObsIn = TypeVar("ObsIn", contravariant=True)

# The maximum number of nodes of a match that `alike` compares.
_SHOWN = 16
# For the repetition of a rule whose first substitution loses, since it may gain when it is applied again: the greatest
# depth of perturbations, and the nats that each repetition adds.
_REPEATS, _AGAIN = 5, 1.5
# The search ends after this many rollouts in a row that find nothing new.
_IDLE = 4


class Scorer(Protocol[ObsIn]):
    """The methods of an agent that a search uses. See `xrlflow.rl.network.Network` and `xrlflow.rl.agent.InTorch`."""

    def log_probs(self, observations: Sequence[ObsIn]) -> npt.NDArray[np.float64]:
        """For each observation, the log-probabilities of its candidates and, last, of No-Op, all in one flat array."""
        ...


@dataclass(frozen=True, slots=True)
class StrategyConfig:
    """The parameters of the search."""

    batch: int = 4  # states per network call
    perturbations: int = 8  # perturbations between two network calls
    rollouts: int = 1  # rollouts that run in parallel
    burst: float = 0.5
    """A burst also applies candidates whose probability is at least this fraction of the largest probability."""
    temperature: float = 1.0  # temperature of rollouts that sample
    caution: float = 0.3
    """The share of a perturbation's probability that prefers small losses instead of following the policy."""
    rise: float = 8.0  # the nats by which a loss of the whole initial cost lowers this share
    twins: float = 2.0  # the n-th state of the same size and cost gets `twins` * log(n) nats more
    elsewhere: float = 0.2
    """The factor on the probability of candidates that existed before the last perturbation. Such candidates are
    independent of the perturbation and could have come first.
    """
    level: float = 0.005  # level steps try losses of up to this fraction of the initial cost
    horizon: int = 100  # the greatest number of steps of a rollout
    patience: int | None = 100
    """The search ends after this many expanded states without an improvement. None: it ends only at the limits."""
    growth: float = 2.0  # graphs that have more than this many times the operators of the input are dropped


Group = tuple[object, ...]


@dataclass(slots=True, eq=False)
class _Evaluated:
    """An evaluated state: its C candidates (choices), and the log-probabilities [C + 1] of these and No-Op.

    `group` [C] is the group of each choice; the choices of one group are equal substitutions in different parts of the
    graph. `groups` lists the members of each group, the likeliest first.
    """

    node: SearchNode
    choices: tuple[Match, ...]
    log_probs: npt.NDArray[np.float64]
    group: npt.NDArray[np.int64]
    groups: list[list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A state that waits for its evaluation. `before`: the state from which the perturbation that led to this state
    started.
    """

    node: SearchNode
    nats: float
    depth: int
    before: SearchNode | None


@dataclass(slots=True, eq=False)
class _Rollout:
    """A walk that follows the policy."""

    at: SearchNode
    temperature: float
    visited: set[int] = field(default_factory=set)
    steps: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Perturbation:
    """Equal substitutions in different parts of the graph, of which one is tried. `nats`: the order in the queue;
    perturbations with fewer nats come first.
    """

    node: SearchNode
    alike: tuple[Match, ...]
    nats: float
    depth: int


def agent_search(
    state: RewriteState,
    cost: float,
    limits: Limits,
    policy: Scorer[Obs],
    observe: Callable[[Situation], Obs],
    config: StrategyConfig = StrategyConfig(),
    seed: int = 0,
) -> SearchResult:
    """Search with a policy. `observe`, such as a featuriser, computes the observations for the policy.

    The candidates of `state` have the cost model's deltas; `cost` is the modelled cost of its graph in seconds.
    `limits.budget` counts expanded states. The same seed gives the same result unless the deadline ends the search.
    """
    begin = time.monotonic()
    search = _Search(state, cost, limits, policy, observe, config, seed)
    interrupted = False
    try:
        search.run()
    except KeyboardInterrupt:
        interrupted = True

    return search.result(time.monotonic() - begin, interrupted)


class PolicyError(RuntimeError):
    """A policy returned NaN, or a wrong number of log-probabilities for its observations."""


class _Search(States, Generic[Obs]):
    def __init__(
        self,
        state: RewriteState,
        cost: float,
        limits: Limits,
        policy: Scorer[Obs],
        observe: Callable[[Situation], Obs],
        config: StrategyConfig,
        seed: int,
    ) -> None:
        super().__init__(state, cost, limits, config.growth)
        self.policy, self.observe, self.config = policy, observe, config
        self.rng = np.random.default_rng(seed)
        # By fingerprint: the evaluations of states.
        self.evaluated_states: dict[int, _Evaluated] = {}
        # Both queues are ordered by (nats, number).
        self.pending: list[tuple[float, int, _Pending]] = []
        self.perturbations: list[tuple[float, int, _Perturbation]] = []
        self.queued: set[int] = set()
        # Counts states of one size and cost. Mostly these result from the same substitutions in other parts of the
        # graph, or from detours back to an earlier state.
        self.twins: Counter[tuple[int, float]] = Counter()
        self.numbers = 0
        self.evaluated = 0

    def run(self) -> None:
        try:
            self.descend(self.root)
            self.try_level_steps()
            self.await_evaluation(self.best, 0.0, 0)
            rollouts = [
                _Rollout(self.root, 0.0 if i == 0 else self.config.temperature)
                for i in range(self.config.rollouts)
            ]
            idle = 0
            patience = self.config.patience
            while idle < _IDLE and (patience is None or self.expanded - self.improved_at < patience):
                before = self.expanded + self.evaluated
                ended = self.round(rollouts)
                idle = 0 if self.expanded + self.evaluated > before else idle + ended
        except LimitReached:
            pass

    def round(self, rollouts: list[_Rollout]) -> int:
        """Make one network call and use it for perturbations and rollouts. Returns the number of rollouts that
        ended."""
        config = self.config
        requested = {
            r.at.state.fingerprint: r.at
            for r in rollouts
            if r.at.state.fingerprint not in self.evaluated_states
        }
        arrived: list[_Pending] = []
        while self.pending and len(requested) < config.batch:
            if (
                self.perturbations
                and self.perturbations[0][0] < self.pending[0][0]
                and len(self.perturbations) >= config.perturbations
            ):
                break  # the queue has enough perturbations that are likelier
            pending = heapq.heappop(self.pending)[2]
            arrived.append(pending)
            if pending.node.state.fingerprint not in self.evaluated_states:
                requested[pending.node.state.fingerprint] = pending.node
        self.evaluate(list(requested.values()))
        for pending in arrived:
            self.consider_perturbations(pending)
        ended = 0
        for index, rollout in enumerate(rollouts):
            if not self.advance(rollout):
                ended += 1
                self.settle(rollout.at)
                rollouts[index] = _Rollout(self.root, config.temperature)
        count = 0
        while self.perturbations and count < config.perturbations:
            count += self.perturb(heapq.heappop(self.perturbations)[2])
        return ended

    # --- the network ---

    def evaluate(self, states: Sequence[SearchNode]) -> None:
        """Evaluate states with the policy, in batches."""
        size = self.config.batch
        for start in range(0, len(states), size):
            if self.limits.over(self.expanded, self.best.cost):
                raise LimitReached
            situations = []
            for node in states[start : start + size]:
                offered = choices(node.state, self.ancestors(node))
                self.generated += len(offered)
                situations.append(Situation(node.state, offered, node.cost, self.root.cost))
            flat = self.policy.log_probs([self.observe(s) for s in situations])
            if len(flat) != sum(len(s.candidates) + 1 for s in situations) or np.isnan(flat).any():
                raise PolicyError(
                    "the policy gives no probability for each candidate and No-Op: train it again"
                )
            first = 0
            for node, situation in zip(states[start : start + size], situations):
                matches = situation.candidates
                log_probs = flat[first : first + len(matches) + 1]
                first += len(matches) + 1
                numbers: dict[Group, int] = {}
                graph = node.state.graph
                group = np.array(
                    [numbers.setdefault(alike(graph, m, node.cost), len(numbers)) for m in matches], np.int64
                )
                groups: list[list[int]] = [[] for _ in numbers]
                for index in np.argsort(-log_probs[:-1], kind="stable").tolist():
                    groups[group[index]].append(index)
                self.evaluated_states[node.state.fingerprint] = _Evaluated(
                    node, matches, log_probs, group, groups
                )
                self.evaluated += 1

    # --- perturbations ---

    def await_evaluation(
        self, node: SearchNode, nats: float, depth: int, before: SearchNode | None = None
    ) -> None:
        if node.state.fingerprint in self.queued:
            return
        self.queued.add(node.state.fingerprint)
        twin = (node.state.graph.node_count, round(node.cost / max(self.root.cost, 1e-30), 9))
        self.twins[twin] += 1
        nats += self.config.twins * log(self.twins[twin])
        self.numbers += 1
        heapq.heappush(self.pending, (nats, self.numbers, _Pending(node, nats, depth, before)))

    def consider_perturbations(self, pending: _Pending) -> None:
        """Queue one perturbation per group of choices. Choices that existed before the last perturbation form groups of
        their own."""
        evaluated = self.evaluated_states[pending.node.state.fingerprint]
        before = pending.before
        old = {m.key for m in before.state.candidates} if before is not None else set()
        sides = [
            [[i for i in g if (evaluated.choices[i].key in old) is known] for g in evaluated.groups]
            for known in (False, True)
        ]
        shares = (1.0, self.config.elsewhere if any(sides[0]) else 1.0)
        for groups, share in zip(sides, shares):
            parts = [g for g in groups if g]
            if not parts:
                continue
            probability = np.array([np.exp(evaluated.log_probs[g]).sum() for g in parts])
            loss = np.array([evaluated.choices[g[0]].delta for g in parts]) / max(self.root.cost, 1e-30)
            prior = np.exp(-np.maximum(loss, 0.0) * self.config.rise)
            mixed = (1 - self.config.caution) * probability + self.config.caution * prior / prior.sum()
            for members, chance in zip(parts, (share * mixed).tolist()):
                same = tuple(evaluated.choices[i] for i in members)
                nats = pending.nats - log(max(chance, 1e-12))
                self.await_perturbation(_Perturbation(evaluated.node, same, nats, pending.depth + 1))

    def try_level_steps(self) -> None:
        """Try all perturbations with a loss of at most `level`, and start again after each improvement."""
        limit = self.config.level * self.root.cost
        settled: SearchNode | None = None
        while settled is not self.best:
            settled = self.best
            groups: dict[Group, list[Match]] = {}
            for match in choices(settled.state, self.ancestors(settled)):
                if match.delta <= limit:
                    group = alike(settled.state.graph, match, settled.cost)
                    groups.setdefault(group, []).append(match)
            for alikes in sorted(groups.values(), key=lambda g: (g[0].delta, g[0].key)):
                loss = max(0.0, alikes[0].delta) / max(self.root.cost, 1e-30)
                self.perturb(
                    _Perturbation(settled, tuple(alikes), self.config.rise * loss + log(len(groups)), 1)
                )
                if self.best is not settled:
                    break

    def await_perturbation(self, perturbation: _Perturbation) -> None:
        self.numbers += 1
        heapq.heappush(self.perturbations, (perturbation.nats, self.numbers, perturbation))

    def perturb(self, perturbation: _Perturbation) -> bool:
        """Apply one of a perturbation's substitutions and descend. If that gains, apply its other substitutions.
        Returns False if the state was reached before.
        """
        base, best = perturbation.node, self.best
        here = base.state.fingerprint
        # A rollout may have reached the state before, but rollouts queue no perturbations.
        new = (m for m in perturbation.alike if (here + m.shift) & FINGERPRINT_MASK not in self.queued)
        match = next(new, None)
        perturbed = None if match is None else self.make(base, match)
        if perturbed is None or match is None:
            return False
        end = self.descend(perturbed, base.cost)
        if self.best is not best:
            self.spread(perturbation.alike, self.descend(self.best))
            self.await_evaluation(self.best, 0.0, 0)
            return True
        for node in (perturbed, end):
            loss = max(0.0, node.cost - best.cost) / max(self.root.cost, 1e-30)
            self.await_evaluation(node, perturbation.nats + self.config.rise * loss, perturbation.depth, base)
        if perturbation.depth < _REPEATS:
            self.repeat(perturbation, match, perturbed)
        return True

    def repeat(self, perturbation: _Perturbation, match: Match, perturbed: SearchNode) -> None:
        """Queue the same rule again: one perturbation of the candidates that were in the last perturbation, and one of
        all other candidates of the rule.
        """
        again = sorted(
            (m for m in perturbed.state.candidates if m.rule is match.rule), key=lambda m: (m.delta, m.key)
        )
        earlier = {m.key for m in perturbation.alike}
        for part in ([m for m in again if m.key in earlier], [m for m in again if m.key not in earlier]):
            if part:
                self.await_perturbation(
                    _Perturbation(perturbed, tuple(part), perturbation.nats + _AGAIN, perturbation.depth + 1)
                )

    def spread(self, alike: Sequence[Match], node: SearchNode) -> None:
        """Apply the other substitutions of a perturbation that gained, but each only if it gains too."""
        for other in alike:
            match = node.state.find(other.key)
            if match is None:
                continue
            perturbed = self.make(node, match)
            end = self.descend(perturbed, node.cost) if perturbed is not None else node
            if end.cost < node.cost:
                node = end

    # --- rollouts ---

    def advance(self, rollout: _Rollout) -> bool:
        """Make one burst of a rollout. Returns False if the rollout is over."""
        evaluated = self.evaluated_states[rollout.at.state.fingerprint]
        if not evaluated.choices or rollout.steps >= self.config.horizon:
            return False
        scores = evaluated.log_probs.copy()
        if rollout.temperature:
            noise = rollout.temperature * self.rng.gumbel(size=len(evaluated.groups) + 1)
            scores[:-1] += noise[evaluated.group]  # choices that are alike get the same noise
            scores[-1] += noise[-1]
        order = np.argsort(-scores, kind="stable").tolist()
        stop = len(evaluated.choices)
        if order[0] == stop:
            return False
        threshold = scores[order[0]] + log(self.config.burst)
        rollout.visited.add(rollout.at.state.fingerprint)
        advanced = False
        for index in order:
            if index == stop or scores[index] < threshold or scores[index] <= scores[stop]:
                break
            match = rollout.at.state.find(evaluated.choices[index].key)
            if match is None:
                continue  # an earlier substitution of this burst removed it
            successor = self.make(rollout.at, match)
            if successor is None or successor.state.fingerprint in rollout.visited:
                continue
            rollout.visited.add(successor.state.fingerprint)
            rollout.at = successor
            rollout.steps += 1
            advanced = True
        return advanced

    def settle(self, node: SearchNode) -> None:
        """Descend from the end of a rollout, and queue the resulting state for evaluation if it is new."""
        best = self.best
        end = self.descend(node)
        loss = max(0.0, end.cost - best.cost) / max(self.root.cost, 1e-30)
        self.await_evaluation(self.best if self.best is not best else end, self.config.rise * loss, 0)


def alike(graph: Graph, match: Match, cost: float) -> Group:
    """A key that is equal for the same substitution in different parts of a graph.

    The key consists of the rule, the delta of the cost, the matched nodes, and the operators around them.
    """
    producers = graph.producers
    around: list[object] = []
    for node in match.nodes[:_SHOWN]:
        makers = [producers[v].op if v in producers else "" for v in node.inputs]
        readers = sorted([u.op for out in node.outputs for u in graph.users(out)])
        around.append((node.op, node.attrs.digest, node.types, tuple(makers), tuple(readers)))
    return (match.rule.name, round(match.delta / max(cost, 1e-30), 9), len(match.nodes), tuple(around))
