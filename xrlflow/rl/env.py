"""The Gymnasium environment: an episode rewrites one of several graphs, one substitution per step.

The function `observe` turns a `Situation` into an observation (see `features` and `successors`). Actions 0 to C - 1
are the situation's candidates; action C is No-Op, which ends the episode. C changes from step to step, so `RewriteEnv`
has no `observation_space`. `FixedSizeEnv` pads its observations and has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Generic, TypeVar, cast

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from xrlflow.cost import CostModel
from xrlflow.ir import Graph
from xrlflow.rewrite import Library, RewriteState
from xrlflow.rewrite.state import Delta
from xrlflow.rl.features import (
    CANDIDATE_FEATURES,
    CHANGE_FEATURES,
    EDGE_FEATURES,
    GLOBAL_FEATURES,
    NODE_FEATURES,
    Featuriser,
    Observation,
    Pricing,
)
from xrlflow.rl.situation import Situation, choices
from xrlflow.search.result import Path, extend, steps_of

Obs = TypeVar("Obs")


class EpisodeError(ValueError):
    """An environment has wrong arguments, an action does not exist, a graph is too large, or no episode is running."""


class Reward(Enum):
    """The reward of a step. Over an episode, rewards sum to about 100 times the fraction of the initial cost that the
    episode saves.
    """

    MODELLED = "modelled"  # 100 * (last - new) / initial, by the cost model
    END_TO_END = "end_to_end"
    """The same with measured latency, every `measure_every` steps and at the end. All other steps have the reward
    `in_between` (X-RLflow's paper, section 3.3).
    """
    HYBRID = "hybrid"
    """The modelled reward; the last step corrects the sum of the episode to the measured saving."""


# A function that measures, in pairs of runs, the latency of a graph divided by the latency of the graph with which
# episodes begin.
RelativeLatency = Callable[[Graph], float]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A graph to rewrite: the state with which episodes begin, its cost in seconds, and a function that measures
    latency, if any.
    """

    name: str
    state: RewriteState
    cost: float
    latency: RelativeLatency | None = None

    @staticmethod
    def of(
        name: str,
        graph: Graph,
        library: Library,
        model: CostModel,
        pricing: Callable[[Delta], Delta] = Pricing.of,
        latency: RelativeLatency | None = None,
    ) -> Problem:
        """The problem of a graph: compute its candidates and their costs. The default `pricing` speeds up the
        observation of candidates.
        """
        state = RewriteState.start(graph, library, pricing(model.delta))
        return Problem(name, state, model.cost(graph), latency)


@dataclass(frozen=True, slots=True)
class EnvConfig:
    """The rules of episodes. An episode ends after `horizon` steps. `Reward` explains the other fields."""

    reward: Reward = Reward.MODELLED
    horizon: int = 100
    measure_every: int = 5
    in_between: float = 0.1
    # Whether to offer candidates that lead back to an earlier graph of the episode.
    revisits: bool = False
    # At most this many candidates are offered: those with the least modelled delta. None: no limit.
    candidates: int | None = None

    def __post_init__(self) -> None:
        if self.horizon < 1 or self.measure_every < 1:
            raise EpisodeError("horizon and measure_every must be at least 1")


class RewriteEnv(gymnasium.Env[Obs, int], Generic[Obs]):
    """Episodes over several problems. Each episode draws a problem at random, unless `options={"problem": name}` names
    one.

    The information dictionary has `problem`, `cost` and `initial` (modelled seconds), `best` (the least cost so far),
    `latency` (relative; None if this step was not measured), `trace` (steps), `action_mask` (all ones).
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        observe: Callable[[Situation], Obs],
        config: EnvConfig = EnvConfig(),
    ) -> None:
        if not problems:
            raise EpisodeError("an environment needs at least one problem")
        if config.reward is not Reward.MODELLED:
            unmeasured = [p.name for p in problems if p.latency is None]
            if unmeasured:
                raise EpisodeError(f"the reward {config.reward.value} needs a way to measure {unmeasured[0]}")
        self.problems = {p.name: p for p in problems}
        if len(self.problems) < len(problems):
            raise EpisodeError("two problems have one name")
        self.observe = observe
        self.config = config
        self._situation: Situation | None = None
        self._problem = problems[0]
        self._path: Path | None = None
        self._visited: set[int] = set()
        self._best = 0.0
        self._steps = 0
        self._latency = 1.0

    @property
    def situation(self) -> Situation:
        """The situation of the next decision. Raises EpisodeError if no episode is running."""
        if self._situation is None:
            raise EpisodeError("no episode is running: call reset first")
        return self._situation

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Begin an episode. Raises EpisodeError if `options` names an unknown problem."""
        super().reset(seed=seed)
        name = (options or {}).get("problem")
        if name is None:
            name = list(self.problems)[int(self.np_random.integers(len(self.problems)))]
        if name not in self.problems:
            raise EpisodeError(f"no problem is called {name!r}; there are: {', '.join(self.problems)}")
        problem = self._problem = self.problems[name]
        self._path, self._steps, self._best, self._latency = None, 0, problem.cost, 1.0
        self._visited = {problem.state.fingerprint}
        self._arrive(problem.state, problem.cost)
        return self.observe(self.situation), self._information(None)

    def step(self, action: int) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        """Apply a candidate or end the episode. Raises EpisodeError if the action does not exist."""
        now = self.situation
        action = int(action)
        if not 0 <= action <= len(now.candidates):
            raise EpisodeError(f"action {action} of {len(now.candidates)} candidates and No-Op")
        self._steps += 1
        terminated = action == len(now.candidates)
        if terminated:
            self._arrive(now.state, now.cost)
        else:
            match = now.candidates[action]
            state = now.state
            edit = state.edit(match)
            # The edit also removes nodes that lose their last reader. Which nodes these are may have changed since the
            # candidate's delta was computed.
            delta = match.delta if state.delta is None else float(state.delta(state.graph, edit))
            cost = now.cost + delta
            self._path = extend(self._path, match, edit, cost)
            self._visited.add((state := state.apply(match, edit)).fingerprint)
            self._best = min(self._best, cost)
            self._arrive(state, cost)
            terminated = not self.situation.candidates
        truncated = not terminated and self._steps >= self.config.horizon
        reward, latency = self._reward(now, terminated or truncated)
        observation, information = self.observe(self.situation), self._information(latency)
        if terminated or truncated:
            self._situation = None
        return observation, reward, terminated, truncated, information

    def _arrive(self, state: RewriteState, cost: float) -> None:
        offered = choices(state, () if self.config.revisits else self._visited)
        limit = self.config.candidates
        if limit is not None and len(offered) > limit:
            threshold = sorted(offered, key=lambda m: (m.delta, m.key))[limit - 1]
            last = (threshold.delta, threshold.key)
            offered = tuple(m for m in offered if (m.delta, m.key) <= last)
        remaining = max(0.0, 1.0 - self._steps / self.config.horizon)
        self._situation = Situation(state, offered, cost, self._problem.cost, remaining)
        self.action_space = cast("spaces.Space[int]", spaces.Discrete(len(offered) + 1))

    def _reward(self, before: Situation, over: bool) -> tuple[float, float | None]:
        """The reward of the last step, and the relative latency if it was measured, else None."""
        config, now = self.config, self.situation
        scale = 100.0 / now.initial if now.initial > 0 else 0.0
        modelled = scale * (before.cost - now.cost)
        if config.reward is Reward.MODELLED:
            return modelled, None
        if not over and (config.reward is Reward.HYBRID or self._steps % config.measure_every):
            return (modelled if config.reward is Reward.HYBRID else config.in_between), None
        assert self._problem.latency is not None, "checked in __init__"
        latency = self._problem.latency(now.state.graph) if self._path is not None else 1.0
        last, self._latency = self._latency, latency
        if config.reward is Reward.END_TO_END:
            return 100.0 * (last - latency), latency
        return modelled + scale * now.cost - 100.0 * latency, latency

    def _information(self, latency: float | None) -> dict[str, Any]:
        now = self.situation
        return {
            "problem": self._problem.name,
            "cost": now.cost,
            "initial": now.initial,
            "best": self._best,
            "latency": latency,
            "trace": steps_of(self._path),
            "action_mask": np.ones(len(now.candidates) + 1, np.int8),
        }


@dataclass(frozen=True, slots=True)
class Sizes:
    """The maximum counts of nodes, edges and so on in a fixed-size observation."""

    nodes: int = 1024
    edges: int = 4096
    candidates: int = 500
    roles: int = 4096
    changes: int = 8192


FixedObs = dict[str, npt.NDArray[Any]]


class FixedSizeEnv(gymnasium.Env[FixedObs, np.int64]):
    """A RewriteEnv with padded observations, for agents that need fixed sizes. xrlflow's own training uses RewriteEnv.

    An observation has the arrays of `Observation`, padded with zeros, and `counts`: the numbers of nodes, edges,
    candidates, roles and changes. `action_mask` (also in the information) is 1 for the valid actions: the candidates,
    and action `sizes.candidates`, which is No-Op. Any invalid action counts as No-Op. If there are too many candidates,
    those with the least modelled delta are offered. Raises EpisodeError if a graph exceeds another size.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        featuriser: Featuriser,
        config: EnvConfig = EnvConfig(),
        sizes: Sizes = Sizes(),
    ) -> None:
        limit = sizes.candidates if config.candidates is None else min(config.candidates, sizes.candidates)
        self.env = RewriteEnv(problems, featuriser, replace(config, candidates=limit))
        self.sizes = s = sizes
        words = featuriser.vocabulary
        operators, rules, families = len(words.operators), len(words.rules), len(words.families)
        # The shape, and the largest value of integer arrays; None marks float features.
        self._arrays: dict[str, tuple[tuple[int, ...], int | None]] = {
            "op": ((s.nodes,), operators),
            "x": ((s.nodes, NODE_FEATURES), None),
            "edge_index": ((2, s.edges), s.nodes - 1),
            "edge_attr": ((s.edges, EDGE_FEATURES), None),
            "rule": ((s.candidates,), rules),
            "family": ((s.candidates,), families),
            "candidate": ((s.candidates, CANDIDATE_FEATURES), None),
            "role_node": ((s.roles,), s.nodes - 1),
            "role_candidate": ((s.roles,), s.candidates - 1),
            "change_op": ((s.changes,), operators),
            "change_candidate": ((s.changes,), s.candidates - 1),
            "change": ((s.changes, CHANGE_FEATURES), None),
            "globals": ((1, GLOBAL_FEATURES), None),
        }
        boxes: dict[str, spaces.Space[Any]] = {
            key: spaces.Box(-16.0, 16.0, shape, np.float32)
            if largest is None
            else spaces.Box(0, largest, shape, np.int64)
            for key, (shape, largest) in self._arrays.items()
        }
        counts = np.array([s.nodes, s.edges, s.candidates, s.roles, s.changes])
        boxes["counts"] = spaces.Box(np.zeros_like(counts), counts, dtype=np.int64)
        boxes["action_mask"] = spaces.Box(0, 1, (s.candidates + 1,), np.int8)
        self.observation_space = cast("spaces.Space[FixedObs]", spaces.Dict(boxes))
        self.action_space = spaces.Discrete(s.candidates + 1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FixedObs, dict[str, Any]]:
        super().reset(seed=seed)
        data, information = self.env.reset(seed=seed, options=options)
        return self._padded(data), {**information, "action_mask": self._mask(data)}

    def step(self, action: np.int64) -> tuple[FixedObs, float, bool, bool, dict[str, Any]]:
        choice = min(int(action), len(self.env.situation.candidates))
        data, reward, terminated, truncated, information = self.env.step(choice)
        information = {**information, "action_mask": self._mask(data)}
        return self._padded(data), float(reward), terminated, truncated, information

    def _mask(self, data: Observation) -> npt.NDArray[np.int8]:
        mask = np.zeros(self.sizes.candidates + 1, np.int8)
        mask[: data.candidates] = 1
        mask[-1] = 1
        return mask

    def _padded(self, data: Observation) -> FixedObs:
        out: FixedObs = {}
        for key, (shape, largest) in self._arrays.items():
            array = getattr(data, key)
            if any(have > limit for have, limit in zip(array.shape, shape)):
                raise EpisodeError(
                    f"{key} is of shape {array.shape}, and there is space for {shape}: raise Sizes"
                )
            padded = out[key] = np.zeros(shape, np.float32 if largest is None else np.int64)
            padded[tuple(slice(n) for n in array.shape)] = array
        sized = (data.op, data.edge_attr, data.rule, data.role_node, data.change_op)
        out["counts"] = np.array([len(array) for array in sized])
        out["action_mask"] = self._mask(data)
        return out
