"""Reinforcement learning on knobs, like Chameleon (Ahn et al., ICLR 2020, "Chameleon: Adaptive Code Optimization for
Expedited Deep Neural Network Compilation").

Adaptive exploration: an agent, trained by PPO (`xrlflow.learn.ppo`, also used by the graph agent), walks through the
space. One action decreases, keeps or increases every knob. The reward is the surrogate's score of the vector that the
walk reaches.

Adaptive sampling: k-means divides the visited vectors into groups, and one vector of each group is measured.

The differences from the paper, with the reasons:
- One small network is applied to every knob. It also reads the mean over all knobs, and features of the layer. So one
  agent can serve layers with any number of knobs, and use for one layer what it has learned on another.
- A knob has up to dozens of values. The moves of a walk are long at first and end with a length of one, so that a walk
  of a few dozen steps can reach any vector from any other. Walks that start at the best measured vectors stay close to
  them.
- During a walk, the surrogate scores vectors by their knobs alone (see `xrlflow.tuning.surrogate`), so that no vector
  has to be decoded.
- Only the visited vectors with the best scores are grouped. The paper measures the vector nearest to the centre of a
  group. Here a few vectors of the group are decoded, and the one is measured that the surrogate's model of kernels
  ranks first. On artificial functions with known optima, both changes together reached the optima sooner; they were not
  tested separately.
- Some vectors that no walk has visited are decoded too. The surrogate's model of knobs learns the scores that its model
  of kernels gives them. Decoding takes a hundredth of the time of measuring.
- An agent carries its policy and its measurements from layer to layer. The descriptions of kernels have the same
  meaning for all layers, so the model of kernels can rank kernels before the first measurement of a layer.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xrlflow.learn.factored import FactoredCategorical
from xrlflow.learn.ppo import Episode, PPOConfig, Rollout, orthogonal, update
from xrlflow.learn.tensors import to_arrays, to_tensors
from xrlflow.learn.threads import one_thread
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from xrlflow.tuning.knobs import Candidate, Floats, Indices, Vector
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.surrogate import Experience, Surrogate
from xrlflow.tuning.tuners.frontier import Frontier
from xrlflow.tuning.tuners.protocol import Measurement

if TYPE_CHECKING:
    from typing_extensions import Self

# The number of actions of a knob (decrease, stay, increase, in this order), and the index of the action to stay.
_MOVES, _STAY = 3, 1
# In each plan, neighbours of this many of the best measured vectors are decoded.
_BEST = 2
# The numbers of features of a knob's value, of a knob and of a layer.
_VALUE, _KNOB, _TASK = 2, 5, 4
_AGENT = "kernel agent"
_KERNELS, _SCORES = "experience.kernels", "experience.scores"


@dataclass(frozen=True, slots=True)
class ChameleonConfig:
    """The defaults for gamma, lambda, clip, epochs, learning rate, `rest`, `groups` and `knee` are the paper's.

    The paper uses 128 walks of up to 500 steps, and minibatches of 32. Here, there are fewer and shorter walks, so that
    planning takes less time than measuring.
    """

    # The number of walks in a round, and the largest number of steps of a walk.
    walks: int = 64
    steps: int = 32
    # The number of rounds of a plan. In each round, the agent walks and then learns from the walks.
    rounds: int = 3
    # A walk ends when the moves of at least this fraction of its movable knobs change nothing.
    rest: float = 0.75
    # The number of visited vectors that are grouped: those with the best scores of the surrogate.
    pool: int = 128
    # The number of vectors of a group that are decoded: those with the best scores by their knobs. Of these, the vector
    # with the best score by its description is proposed.
    shortlist: int = 4
    # The number of random vectors that are decoded as soon as the surrogate can score kernels.
    imagined: int = 128
    # In each plan, this many neighbours of each of the two best measured vectors are decoded. Neighbours differ in one
    # knob.
    neighbours: int = 12
    # The fraction of random proposals, as in AutoTVM.
    explore: float = 0.05
    # k-means is run with multiples of this number of groups, up to the number of proposals.
    groups: int = 8
    # A larger number of groups is used if it divides the sum of squared distances by at least this factor.
    knee: float = 2.5
    ppo: PPOConfig = field(
        default_factory=lambda: PPOConfig(
            learning_rate=1e-3,
            final_learning_rate=1.0,
            gamma=0.9,
            gae_lambda=0.99,
            clip=0.2,
            epochs=3,
            minibatch=256,
            value_weight=0.5,
            entropy_weight=0.02,
            target_kl=None,
            # With this scale, a score of 1 in every future step has the value 1.
            reward_scale=0.1,
        )
    )

    def __post_init__(self) -> None:
        if min(self.walks, self.steps, self.rounds, self.pool, self.groups, self.shortlist) < 1:
            raise ValueError(f"walks, steps, rounds, pool, groups and shortlist must be positive, not {self}")
        if min(self.imagined, self.neighbours) < 0:
            raise ValueError(f"imagined and neighbours are numbers of configurations, not {self}")
        if not 0 <= self.explore < 1:
            raise ValueError(f"explore is a part of the whole, not {self.explore}")
        if not 0 < self.rest <= 1 or self.knee <= 1:
            raise ValueError(
                f"rest must be above 0 and at most 1, knee above 1, not {self.rest}, {self.knee}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Those features of a design space that do not depend on the vector: for K knobs with at most N values each."""

    values: Tensor  # [K, N, _VALUE]
    knobs: Tensor  # [K, _KNOB]
    task: Tensor  # [_TASK]

    @staticmethod
    def of(space: DesignSpace) -> View:
        count = len(space.knobs)
        values = np.zeros((count, int(space.sizes.max()), _VALUE), np.float32)
        knobs = np.zeros((count, _KNOB), np.float32)
        for k, knob in enumerate(space.knobs):
            size = len(knob)
            values[k, :size, 0] = np.linspace(-1, 1, size) if size > 1 else 0
            if knob.ordered:
                values[k, :size, 1] = np.log2(1 + np.abs(np.asarray(knob.levels))) / 8
            knobs[k, int(knob.ordered)] = 1
            knobs[k, 2:] = math.log2(size) / 8, k / 16, (count - k) / 16
        task = (math.log2(1 + space.flops) / 32, math.log2(space.size) / 32, count / 16, space.kinds / 8)
        return View(torch.from_numpy(values), torch.from_numpy(knobs), torch.tensor(task))


class Observation(NamedTuple):
    """The state of a walk: the vector [K], which knobs can be moved [K], and the length of each knob's move, as a
    fraction of the knob's number of values [K]."""

    view: View
    vector: Indices
    movable: npt.NDArray[np.bool_]
    strides: Floats


class Agent(nn.Module):
    """Actor and critic, together with all measurements so far.

    Both are tanh networks with two hidden layers of 20 units, as in the paper. The same networks are applied to all
    knobs.
    """

    def __init__(self, seed: int, hidden: int = 20) -> None:
        super().__init__()
        self.hidden = hidden
        # The number of updates. At 0 the agent has not learned anything.
        self.updates = 0
        self.experience = Experience.none()
        width = _VALUE + 1 + _KNOB
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor_knobs = orthogonal(nn.Linear(width, hidden), 1.0)
            self.actor_hidden = orthogonal(nn.Linear(2 * hidden + _TASK, hidden), 1.0)
            self.actor = orthogonal(nn.Linear(hidden, _MOVES), 0.01)
            self.critic_knobs = orthogonal(nn.Linear(width, hidden), 1.0)
            self.critic_hidden = orthogonal(nn.Linear(hidden + _TASK, hidden), 1.0)
            self.critic = orthogonal(nn.Linear(hidden, 1), 1.0)

    def evaluate(self, observations: Sequence[Observation]) -> tuple[FactoredCategorical, Tensor]:
        """The distribution of actions, with K factors, and the values [B], for B observations of the same space."""
        view = observations[0].view
        assert all(o.view is view for o in observations)
        vectors = torch.from_numpy(np.stack([o.vector for o in observations]))
        movable = torch.from_numpy(np.stack([o.movable for o in observations]))
        strides = torch.from_numpy(np.stack([o.strides for o in observations]))
        size, count = vectors.shape
        each = torch.cat(
            [
                view.values[torch.arange(count), vectors],
                strides.unsqueeze(-1),
                view.knobs.expand(size, count, _KNOB),
            ],
            -1,
        )
        weights = movable.float()
        weights = (weights / weights.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(-1)
        task = view.task.expand(size, _TASK)

        own = torch.tanh(self.actor_knobs(each))
        company = torch.cat([(weights * own).sum(1), task], -1)
        company = company.unsqueeze(1).expand(size, count, self.hidden + _TASK)
        logits = self.actor(torch.tanh(self.actor_hidden(torch.cat([own, company], -1))))

        whole = (weights * torch.tanh(self.critic_knobs(each))).sum(1)
        values = self.critic(torch.tanh(self.critic_hidden(torch.cat([whole, task], -1))))
        return FactoredCategorical.of(logits, movable, _STAY), values.squeeze(-1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the agent to a file. Raises CheckpointError if the file cannot be written."""
        config = {"hidden": self.hidden, "updates": self.updates}
        measured = {_KERNELS: self.experience.kernels, _SCORES: self.experience.scores}
        save_checkpoint(Checkpoint(_AGENT, config, {**to_arrays(self.state_dict()), **measured}), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read an agent from a file. Raises CheckpointError if it cannot be read, is not an agent, or is from another
        version."""
        checkpoint = load_checkpoint(path, _AGENT)
        hidden, updates = checkpoint.config.get("hidden"), checkpoint.config.get("updates")
        if not (isinstance(hidden, int) and isinstance(updates, int) and 0 < hidden <= 4096):
            raise CheckpointError(f"{path}: its configuration is damaged: {dict(checkpoint.config)}")
        agent = cls(0, hidden)
        tensors = dict(checkpoint.tensors)
        kernels, scores = tensors.pop(_KERNELS, None), tensors.pop(_SCORES, None)
        try:
            agent.load_state_dict(to_tensors(tensors))
        except RuntimeError as error:
            raise CheckpointError(f"{path} is an agent of another version of xrlflow") from error
        if kernels is None or scores is None or kernels.ndim != 2 or scores.shape != kernels.shape[:1]:
            raise CheckpointError(f"{path} is an agent of another version of xrlflow")
        agent.updates, agent.experience = updates, Experience(kernels, scores)
        return agent


@dataclass(frozen=True, slots=True, eq=False)
class Walks:
    """The results of W walks: the visited vectors [N, K] with their scores [N], the last vector of each walk [W, K],
    and the episodes from which the agent learns."""

    visited: Indices
    scores: Floats
    ends: Indices
    episodes: list[Episode[Observation]]


class ChameleonTuner:
    """Lets an agent walk through the space; the agent learns in every plan. It can start as a copy of an agent that
    learned on other layers."""

    name = "chameleon"

    def __init__(
        self,
        space: DesignSpace,
        seed: int,
        config: ChameleonConfig = ChameleonConfig(),
        agent: Agent | None = None,
    ) -> None:
        self._agent = copy.deepcopy(agent) if agent is not None else Agent(seed)
        self._space, self._config, self._view = space, config, View.of(space)
        self._generator = np.random.default_rng(seed)
        self._draws = torch.Generator().manual_seed(seed)
        self._optimizer = config.ppo.optimizer(self._agent)
        self._frontier = Frontier(space, self._generator)
        self._surrogate = Surrogate(space, seed, self._agent.experience)
        self._ends = space.draw(self._generator, config.walks)
        self._decoded: dict[Vector, Candidate] = {}
        self._imagined = False

    @property
    def agent(self) -> Agent:
        """A copy of the agent with all measurements so far, to start the tuning of other layers."""
        agent = copy.deepcopy(self._agent)
        agent.experience = self._surrogate.experience
        return agent

    def propose(self, count: int) -> Sequence[Candidate]:
        """At most `count` new candidates: first one candidate of each group of visited vectors, in the order of their
        ranks, then random candidates.

        The list is empty if no new kernel can be found.
        """
        if count < 1:
            return []
        if self._space.size < 2 or not (self._surrogate.ready or self._agent.updates):
            return self._frontier.random(count)
        with one_thread():
            self._imagine()
            pool = self._explore()
        by_walks = count - int(self._generator.binomial(count, self._config.explore))
        candidates = self._sample(pool, by_walks) if len(pool) and by_walks else []
        # Candidates with the best ranks come first, so that good kernels are measured sooner.
        candidates = [candidates[i] for i in np.argsort(-self._surrogate.rank(candidates), kind="stable")]
        self._frontier.claim(candidates)
        return [*candidates, *self._frontier.random(count - by_walks if candidates else count)]

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        self._frontier.claim([candidate for candidate, _ in measured])
        self._surrogate.add(measured)

    def _imagine(self) -> None:
        """Decode some vectors, so that the surrogate's model of knobs learns the scores that its model of kernels gives
        them.

        In the first call these include random vectors. In every call they include some neighbours of the best measured
        vectors.
        """
        if not self._surrogate.ready:
            return
        if not self._imagined:
            vectors = self._space.draw(self._generator, self._config.imagined)
            self._decode(list(dict.fromkeys(map(tuple, vectors.tolist()))), self._config.imagined)
            self._imagined = True
        for best in self._surrogate.best(_BEST):
            near = self._space.neighbours(best)
            selected = self._generator.permutation(len(near))[: self._config.neighbours]
            self._decode([near[i] for i in selected], self._config.neighbours)

    def _explore(self) -> Indices:
        """Let the agent walk and learn. Returns the best vectors [N, K], best first, of those that were visited, or
        decoded by `_imagine`, and that may give new kernels."""
        config = self._config
        promising = self._surrogate.promising(config.pool)
        visited = [self._array([vector for vector, _ in promising])]
        # Promising vectors come first: for a vector that is in both lists, `np.unique` below returns the first score,
        # which comes from the model of kernels.
        scores = [np.array([score for _, score in promising], np.float32)]
        for _ in range(config.rounds if self._surrogate.ready else 1):
            starts, near = self._starts()
            walks = walk(
                self._agent, self._view, self._space, self._surrogate, starts, config, self._draws, near
            )
            self._ends = walks.ends
            if self._surrogate.ready:
                rollout = Rollout.of(walks.episodes, config.ppo)
                update(self._agent, self._optimizer, rollout, config.ppo, self._draws)
                self._agent.updates += 1
                visited.append(walks.visited)
                scores.append(walks.scores)
            else:
                # If the surrogate has no scores yet, the ends of all walks are equally promising: the agent has learned
                # on other layers where to walk.
                visited.append(walks.ends)
                scores.append(np.zeros(len(walks.ends), np.float32))
        vectors, first = np.unique(np.concatenate(visited), axis=0, return_index=True)
        values = np.concatenate(scores)[first]
        fresh = [i for i, vector in enumerate(vectors.tolist()) if not self._frontier.spent(tuple(vector))]
        vectors, values = vectors[fresh], values[fresh]
        return vectors[np.argsort(-values, kind="stable")[: config.pool]]

    def _starts(self) -> tuple[Indices, int]:
        """The starts of the walks, [W, K], and how many of them are the best vectors so far (these are at the front).

        A quarter of the walks starts at the best measured vectors or, if these are too few, at the best unmeasured
        vectors that the surrogate has scored. A quarter starts where earlier walks ended, and all others start at
        random vectors.
        """
        walks = self._config.walks
        best = self._surrogate.best(walks // 4)
        best += [vector for vector, _ in self._surrogate.promising(walks // 4 - len(best))]
        ends = self._generator.permutation(self._ends)[: walks // 4]
        others = self._space.draw(self._generator, walks - len(best) - len(ends))
        return np.concatenate([self._array(best), ends, others]), len(best)

    def _array(self, vectors: Sequence[Vector]) -> Indices:
        return np.array(vectors, np.int64).reshape(len(vectors), len(self._space.knobs))

    def _sample(self, pool: Indices, count: int) -> list[Candidate]:
        """Adaptive sampling: one new candidate of each group of the pool [N, K].

        Each candidate has the best rank among the vectors of its group that are already decoded, and a few that are
        decoded now. If a group has no new valid kernel, the vector of the pool's most frequent values is used, as in
        the paper, or a random combination of values of the pool.
        """
        features = self._space.features(pool)
        features = (features - features.mean(0)) / (features.std(0) + 1e-6)
        centres = groups(features, self._config.groups, count, self._config.knee, self._generator)
        group_of = _distances(features, centres).argmin(axis=1)
        selected: dict[str, Candidate] = {}
        for group in range(len(centres)):
            members = np.flatnonzero(group_of == group)
            vectors = [tuple(vector) for vector in pool[members].tolist()]
            candidates = [c for c in self._decode(vectors, self._config.shortlist) if c.key not in selected]
            if not candidates:
                synthetic = [tuple(v) for v in self._synthetic(pool).tolist()]
                candidates = [c for c in self._decode(synthetic, 1) if c.key not in selected]
            if candidates:
                best = candidates[int(self._surrogate.rank(candidates).argmax())]
                selected[best.key] = best
        return list(selected.values())

    def _decode(self, vectors: Sequence[Vector], count: int) -> list[Candidate]:
        """The new candidates (not claimed yet) among the vectors: all that were decoded before, and at most `count`
        that are decoded now."""
        earlier = [
            candidate
            for vector in vectors
            if (candidate := self._decoded.get(vector)) and not self._frontier.claimed(candidate)
        ]
        new = self._frontier.new([v for v in vectors if v not in self._decoded], count)
        self._decoded |= {c.vector: c for c in new if c.vector is not None}
        self._surrogate.suppose(new)
        return [*earlier, *new]

    def _synthetic(self, pool: Indices, tries: int = 8) -> Indices:
        """One vector that has each knob's most frequent value in the pool, and `tries` vectors whose values are drawn
        from the pool, knob by knob: [1 + tries, K]."""
        frequent = [int(np.bincount(column).argmax()) for column in pool.T]
        rows = self._generator.integers(len(pool), size=(tries, pool.shape[1]))
        mixed = np.take_along_axis(pool, rows, axis=0)
        return self._space.masked(np.concatenate([np.array([frequent], np.int64), mixed]))


def walk(
    agent: Agent,
    view: View,
    space: DesignSpace,
    surrogate: Surrogate,
    starts: Indices,
    config: ChameleonConfig,
    generator: torch.Generator,
    near: int = 0,
) -> Walks:
    """Walk from all starts, [W, K], in parallel. The reward of a step is the surrogate's score of the vector that it
    reaches.

    The first `near` walks stay close to their start: their moves have length one. A walk that ends because its knobs
    rest (their moves change nothing) counts as truncated, not as terminated: the critic estimates the value of resting
    for ever.
    """
    points = starts
    episodes: list[Episode[Observation]] = [Episode() for _ in starts]
    running = np.arange(len(starts))
    ends = starts.copy()
    visited, scores = [starts], [surrogate.predict(starts)]
    with torch.no_grad():
        for step in range(config.steps):
            strides = np.where((running < near)[:, None], 1, _strides(space, step, config.steps))
            movable = space.movable(points)
            observed = _observe(view, points, movable, strides, space)
            distribution, values = agent.evaluate(observed)
            actions = distribution.sample(generator)
            log_probs = distribution.log_prob(actions)
            moves = (actions.numpy() - _STAY) * strides
            reached = np.clip(points + moves, 0, space.sizes - 1)
            # A knob rests if its move changes nothing: the action was to stay, or the knob is at its end.
            resting = ((reached == points) & movable).sum(1) >= config.rest * movable.sum(1)
            # A walk does not end while its moves are longer than one.
            resting &= (strides == 1).all(1)
            points = space.masked(reached)
            rewards = surrogate.predict(points)
            visited.append(points)
            scores.append(rewards)
            for i, episode in enumerate(episodes[j] for j in running):
                episode.observations.append(observed[i])
            for numbers, name in (
                (actions.tolist(), "actions"),
                (log_probs.tolist(), "log_probs"),
                (values.tolist(), "values"),
                (rewards.tolist(), "rewards"),
            ):
                for j, value in zip(running, numbers):
                    getattr(episodes[j], name).append(value)
            ends[running] = points
            running, points = running[~resting], points[~resting]
            if not len(running):
                break
        last = np.broadcast_to(_strides(space, config.steps, config.steps), ends.shape)
        _, bootstraps = agent.evaluate(_observe(view, ends, space.movable(ends), last, space))
        for episode, value in zip(episodes, bootstraps.tolist()):
            episode.bootstrap, episode.truncated = value, True
    return Walks(np.concatenate(visited), np.concatenate(scores), ends, episodes)


def groups(points: Floats, step: int, limit: int, knee: float, generator: np.random.Generator) -> Floats:
    """Group points [N, F] by k-means; returns the centres [G, F].

    G is a multiple of `step`. G grows as long as each larger number of groups divides the sum of squared distances by
    more than `knee`. G is at most `limit` and at most N.
    """
    limit = min(limit, len(points))
    best, loss = kmeans(points, min(step, limit), generator)
    for size in range(2 * step, limit + 1, step):
        centres, smaller = kmeans(points, size, generator)
        if smaller >= loss / knee:
            break
        best, loss = centres, smaller
    return best


def kmeans(
    points: Floats, size: int, generator: np.random.Generator, rounds: int = 20
) -> tuple[Floats, float]:
    """k-means of points [N, F]: the centres [size, F], and the sum of the squared distances to the nearest centre.

    It is Lloyd's algorithm with the initial centres of k-means++ (Arthur and Vassilvitskii, 2007). An empty group keeps
    its centre.
    """
    centres = points[generator.integers(len(points), size=1)]
    while len(centres) < size:
        near = _distances(points, centres).min(axis=1).astype(np.float64)
        total = near.sum()
        chances = near / total if total > 0 else np.full(len(points), 1 / len(points))
        centres = np.concatenate([centres, points[generator.choice(len(points), size=1, p=chances)]])
    for _ in range(rounds):
        group_of = _distances(points, centres).argmin(axis=1)
        counts = np.bincount(group_of, minlength=size)
        sums = np.zeros_like(centres)
        np.add.at(sums, group_of, points)
        means = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)
        if np.allclose(means, centres):
            break
        centres = means.astype(np.float32)
    return centres, float(_distances(points, centres).min(axis=1).sum())


def _distances(points: Floats, centres: Floats) -> Floats:
    """The squared distance of each point [N, F] to each centre [G, F]: [N, G]."""
    squares = np.square(points).sum(1)[:, None] + np.square(centres).sum(1)[None, :]
    distances: Floats = np.maximum(squares - 2 * points @ centres.T, 0)
    return distances


def _strides(space: DesignSpace, step: int, steps: int) -> Indices:
    """The length of each knob's move [K] at a step of a walk.

    The length begins with a quarter of the number of the knob's values, and falls to one in the first half of the walk.
    It is never below one.
    """
    halvings = np.log2(np.maximum(space.sizes / 4, 1))
    exponents = halvings * max(0.0, 1 - 2 * step / steps)
    strides: Indices = np.maximum(1, np.round(2**exponents)).astype(np.int64)
    return strides


def _observe(
    view: View, points: Indices, movable: npt.NDArray[np.bool_], strides: Indices, space: DesignSpace
) -> list[Observation]:
    relative = (strides / space.sizes).astype(np.float32)
    return [Observation(view, *parts) for parts in zip(points, movable, relative)]
