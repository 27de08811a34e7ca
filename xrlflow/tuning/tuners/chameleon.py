"""Reinforcement learning over knob moves: Chameleon (Ahn et al., ICLR 2020, "Chameleon: Adaptive Code Optimization for
Expedited Deep Neural Network Compilation").

Adaptive exploration: PPO (the graph agent's, `xrlflow.learn.ppo`) walks through the knobs, decreasing, keeping or
increasing each in one action; the reward is a surrogate's score of where it gets to. Adaptive sampling: of the many
configurations that were visited k-means finds groups, as many as pay, and one of each is measured.

What differs from the paper, and why:
- One small network is applied to every knob, with the mean over all knobs and features of the task beside it. So an
  agent serves tasks with any number of knobs, and what it has learned on some is of use on others.
- A knob has up to dozens of values; moves begin wide and end at one place, so that a walk of a few dozen steps can get
  from anywhere to anywhere. Walks from the best that was measured stay about there.
- The surrogate that is asked in a walk sees knobs alone (see `xrlflow.tuning.surrogate`): nothing is decoded.
- Of the visited configurations those that the surrogate thinks best are grouped, and of a group not what is nearest to
  its middle is measured: a few are decoded, and the best by the surrogate that sees kernels is. Both together led to
  known optima sooner on analytic landscapes; neither was tried alone against the paper's way.
- Some configurations that no walk has visited are decoded too, and what the surrogate that sees kernels thinks of
  them is learned by that which sees knobs: decoding takes a hundredth of measuring.
- What an agent takes from layer to layer is its policy and what was measured: kernels are described alike for all
  layers, so that the surrogate that sees them knows good from bad before the first measurement of a layer.
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

# Actions of a knob, in this order: decrease, stay, increase.
_MOVES, _STAY = 3, 1
# So many of the best measured have neighbours that are looked at.
_BEST = 2
# Features: of a knob's value, of a knob, of a task.
_VALUE, _KNOB, _TASK = 2, 5, 4
_AGENT = "kernel agent"
_KERNELS, _SCORES = "experience.kernels", "experience.scores"


@dataclass(frozen=True, slots=True)
class ChameleonConfig:
    """Of the paper: gamma, lambda, clip, epochs and learning rate of PPO, the part of the knobs whose rest ends a walk,
    the numbers of groups and the knee. It has 128 walks of up to 500 steps and minibatches of 32; here walks are fewer
    and shorter, so that planning takes less than measuring."""

    walks: int = 64
    steps: int = 32
    # Times that walks are taken and learned from in a plan.
    rounds: int = 3
    # A walk ends when this part of its knobs stays or is at its end.
    rest: float = 0.75
    # So many of the visited configurations, the best by the surrogate, are grouped.
    pool: int = 128
    # Of a group so many are decoded, the best by their knobs; the best by their descriptions is taken.
    shortlist: int = 4
    # Configurations that are drawn and decoded when the surrogate first has something to say of kernels.
    imagined: int = 128
    # In each plan so many more are, of those one decision away from each of the two best that were measured.
    neighbours: int = 12
    # The part of what is proposed that is drawn at random, as AutoTVM does.
    explore: float = 0.05
    # Groups that are tried: this many, twice as many and so on, up to what is wanted.
    groups: int = 8
    # More groups pay if the sum of squared distances falls by this factor.
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
            # A score of 1 for ever is then worth 1.
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
    """What an agent sees of a space whatever the vector: tensors, K knobs of at most N values."""

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
    """The state of a walk: indices [K], which knobs can be moved [K], and how far a move goes [K]."""

    view: View
    vector: Indices
    movable: npt.NDArray[np.bool_]
    strides: Floats


class Agent(nn.Module):
    """Actor and critic: tanh networks of 20-20 (as in the paper), shared by all knobs; and the measurements so far."""

    def __init__(self, seed: int, hidden: int = 20) -> None:
        super().__init__()
        self.hidden = hidden
        # The number of updates. Before the first, the agent knows nothing.
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
        """Actions with K factors, and values [B], for B observations of one space."""
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
        """Write the agent to a file. Raises CheckpointError if that fails."""
        config = {"hidden": self.hidden, "updates": self.updates}
        measured = {_KERNELS: self.experience.kernels, _SCORES: self.experience.scores}
        save_checkpoint(Checkpoint(_AGENT, config, {**to_arrays(self.state_dict()), **measured}), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read an agent. Raises CheckpointError if the file is not one, or is of another version."""
        found = load_checkpoint(path, _AGENT)
        hidden, updates = found.config.get("hidden"), found.config.get("updates")
        if not (isinstance(hidden, int) and isinstance(updates, int) and 0 < hidden <= 4096):
            raise CheckpointError(f"{path}: its configuration is damaged: {dict(found.config)}")
        agent = cls(0, hidden)
        tensors = dict(found.tensors)
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
    """The results of walks: visited vectors [N, K] with scores [N], the ends [W, K], and the data to learn from."""

    visited: Indices
    scores: Floats
    ends: Indices
    episodes: list[Episode[Observation]]


class ChameleonTuner:
    """Walks of an agent that learns from plan to plan. It may begin with an agent that learned on other tasks."""

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
        """A copy of the present agent, for other tasks."""
        agent = copy.deepcopy(self._agent)
        agent.experience = self._surrogate.experience
        return agent

    def propose(self, count: int) -> Sequence[Candidate]:
        """At most `count` candidates: first the likeliest, one for each group of visited configurations, then random
        ones. None if no walk finds anything new."""
        if count < 1:
            return []
        if self._space.size < 2 or not (self._surrogate.ready or self._agent.updates):
            return self._frontier.random(count)
        with one_thread():
            self._imagine()
            pool = self._explore()
        wanted = count - int(self._generator.binomial(count, self._config.explore))
        chosen = self._sample(pool, wanted) if len(pool) and wanted else []
        # The likeliest come first, so that good kernels are known sooner.
        chosen = [chosen[i] for i in np.argsort(-self._surrogate.rank(chosen), kind="stable")]
        self._frontier.claim(chosen)
        return [*chosen, *self._frontier.random(count - wanted if chosen else count)]

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        self._frontier.claim([candidate for candidate, _ in measured])
        self._surrogate.add(measured)

    def _imagine(self) -> None:
        """Let the model of kernels score some configurations: once random ones, and then some that are one decision
        away from the best measured. The model of knobs learns these scores."""
        if not self._surrogate.ready:
            return
        if not self._imagined:
            drawn = self._space.draw(self._generator, self._config.imagined)
            self._decode(list(dict.fromkeys(map(tuple, drawn.tolist()))), self._config.imagined)
            self._imagined = True
        for best in self._surrogate.best(_BEST):
            near = self._space.neighbours(best)
            some = self._generator.permutation(len(near))[: self._config.neighbours]
            self._decode([near[i] for i in some], self._config.neighbours)

    def _explore(self) -> Indices:
        """Walk and learn. Returns what was visited or imagined and may be new, best first: [N, K]."""
        config = self._config
        promising = self._surrogate.promising(config.pool)
        visited = [self._array([vector for vector, _ in promising])]
        # A configuration's score by its kernel replaces the one by its knobs.
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
                # Without scores, the places that an agent of other tasks walks to are all there is.
                visited.append(walks.ends)
                scores.append(np.zeros(len(walks.ends), np.float32))
        places, first = np.unique(np.concatenate(visited), axis=0, return_index=True)
        values = np.concatenate(scores)[first]
        fresh = [i for i, place in enumerate(places.tolist()) if not self._frontier.spent(tuple(place))]
        places, values = places[fresh], values[fresh]
        return places[np.argsort(-values, kind="stable")[: config.pool]]

    def _starts(self) -> tuple[Indices, int]:
        """The starts of walks [W, K]: a quarter at the best measured configurations (or imagined ones, if there are too
        few), a quarter where earlier walks ended, the others anywhere; and how many, the first, begin at the best."""
        walks = self._config.walks
        best = self._surrogate.best(walks // 4)
        best += [vector for vector, _ in self._surrogate.promising(walks // 4 - len(best))]
        ends = self._generator.permutation(self._ends)[: walks // 4]
        others = self._space.draw(self._generator, walks - len(best) - len(ends))
        return np.concatenate([self._array(best), ends, others]), len(best)

    def _array(self, vectors: Sequence[Vector]) -> Indices:
        return np.array(vectors, np.int64).reshape(len(vectors), len(self._space.knobs))

    def _sample(self, pool: Indices, count: int) -> list[Candidate]:
        """Adaptive sampling: the best configuration of each group of the pool [N, K], among those that were decoded and
        a few more. If none of a group is new and valid, one is made from the most frequent values of the pool (as in
        the paper), or from values drawn by frequency."""
        features = self._space.features(pool)
        features = (features - features.mean(0)) / (features.std(0) + 1e-6)
        centres = groups(features, self._config.groups, count, self._config.knee, self._generator)
        owner = _distances(features, centres).argmin(axis=1)
        found: dict[str, Candidate] = {}
        for group in range(len(centres)):
            members = np.flatnonzero(owner == group)
            vectors = [tuple(place) for place in pool[members].tolist()]
            here = [c for c in self._decode(vectors, self._config.shortlist) if c.key not in found]
            if not here:
                synthetic = [tuple(v) for v in self._synthetic(pool).tolist()]
                here = [c for c in self._decode(synthetic, 1) if c.key not in found]
            if here:
                best = here[int(self._surrogate.rank(here).argmax())]
                found[best.key] = best
        return list(found.values())

    def _decode(self, vectors: Sequence[Vector], count: int) -> list[Candidate]:
        """The new kernels of those vectors that were decoded before, and of the first `count` others."""
        there = [
            candidate
            for vector in vectors
            if (candidate := self._decoded.get(vector)) and not self._frontier.known(candidate)
        ]
        others = self._frontier.new([v for v in vectors if v not in self._decoded], count)
        self._decoded |= {c.vector: c for c in others if c.vector is not None}
        self._surrogate.suppose(others)
        return [*there, *others]

    def _synthetic(self, pool: Indices, tries: int = 8) -> Indices:
        """The vector of each knob's most frequent value, and others drawn by frequency: [T, K]."""
        most = [int(np.bincount(column).argmax()) for column in pool.T]
        rows = self._generator.integers(len(pool), size=(tries, pool.shape[1]))
        drawn = np.take_along_axis(pool, rows, axis=0)
        return self._space.masked(np.concatenate([np.array([most], np.int64), drawn]))


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
    """Walks from these starts [W, K], all at once. The reward of a visited configuration is its score.

    The first `near` walks stay close to their start: their moves are one step long. A walk that rests is truncated, not
    terminated: the critic estimates what it would get by resting for ever.
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
            seen = _observe(view, points, movable, strides, space)
            distribution, values = agent.evaluate(seen)
            actions = distribution.sample(generator)
            log_probs = distribution.log_prob(actions)
            moves = (actions.numpy() - _STAY) * strides
            moved = np.clip(points + moves, 0, space.sizes - 1)
            # A knob rests if its move changes nothing: it stays, or is at its end.
            resting = ((moved == points) & movable).sum(1) >= config.rest * movable.sum(1)
            # Moves longer than one step do not end a walk.
            resting &= (strides == 1).all(1)
            points = space.masked(moved)
            found = surrogate.predict(points)
            visited.append(points)
            scores.append(found)
            for i, episode in enumerate(episodes[j] for j in running):
                episode.observations.append(seen[i])
            for values_of, name in (
                (actions.tolist(), "actions"),
                (log_probs.tolist(), "log_probs"),
                (values.tolist(), "values"),
                (found.tolist(), "rewards"),
            ):
                for j, value in zip(running, values_of):
                    getattr(episodes[j], name).append(value)
            ends[running] = points
            running, points = running[~resting], points[~resting]
            if not len(running):
                break
        last = np.broadcast_to(_strides(space, config.steps, config.steps), ends.shape)
        _, beyond = agent.evaluate(_observe(view, ends, space.movable(ends), last, space))
        for episode, value in zip(episodes, beyond.tolist()):
            episode.bootstrap, episode.truncated = value, True
    return Walks(np.concatenate(visited), np.concatenate(scores), ends, episodes)


def groups(points: Floats, least: int, most: int, knee: float, generator: np.random.Generator) -> Floats:
    """The centres [G, F] of points [N, F] by k-means. The number of groups is `least`, two, three times as many, as
    long as the squared distances fall by the factor `knee`; at most `most`, and at most the number of points."""
    most = min(most, len(points))
    chosen, loss = kmeans(points, min(least, most), generator)
    for size in range(2 * least, most + 1, least):
        centres, smaller = kmeans(points, size, generator)
        if smaller >= loss / knee:
            break
        chosen, loss = centres, smaller
    return chosen


def kmeans(
    points: Floats, size: int, generator: np.random.Generator, rounds: int = 20
) -> tuple[Floats, float]:
    """Lloyd's algorithm from k-means++ starts (Arthur and Vassilvitskii, 2007): centres [size, F], and the sum of
    squared distances to them. An empty group keeps its centre."""
    centres = points[generator.integers(len(points), size=1)]
    while len(centres) < size:
        near = _distances(points, centres).min(axis=1).astype(np.float64)
        total = near.sum()
        chances = near / total if total > 0 else np.full(len(points), 1 / len(points))
        centres = np.concatenate([centres, points[generator.choice(len(points), size=1, p=chances)]])
    for _ in range(rounds):
        owner = _distances(points, centres).argmin(axis=1)
        counts = np.bincount(owner, minlength=size)
        sums = np.zeros_like(centres)
        np.add.at(sums, owner, points)
        moved = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)
        if np.allclose(moved, centres):
            break
        centres = moved.astype(np.float32)
    return centres, float(_distances(points, centres).min(axis=1).sum())


def _distances(points: Floats, centres: Floats) -> Floats:
    """Squared distances [N, G]."""
    squares = np.square(points).sum(1)[:, None] + np.square(centres).sum(1)[None, :]
    found: Floats = np.maximum(squares - 2 * points @ centres.T, 0)
    return found


def _strides(space: DesignSpace, step: int, steps: int) -> Indices:
    """The length of a move at a step of a walk, for each knob [K]: a quarter of its values at first, halved repeatedly
    in the first half of the walk, then one."""
    halvings = np.log2(np.maximum(space.sizes / 4, 1))
    left = halvings * max(0.0, 1 - 2 * step / steps)
    found: Indices = np.maximum(1, np.round(2**left)).astype(np.int64)
    return found


def _observe(
    view: View, points: Indices, movable: npt.NDArray[np.bool_], strides: Indices, space: DesignSpace
) -> list[Observation]:
    relative = (strides / space.sizes).astype(np.float32)
    return [Observation(view, *seen) for seen in zip(points, movable, relative)]
