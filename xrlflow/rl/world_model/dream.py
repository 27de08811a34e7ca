"""Episodes inside the world model: an agent trains in them by PPO and never calls the engine.

A dream begins at the latent of a real state. The world model predicts the candidates of each imagined state, the
saving of each step, and the next latent. Only the agent's heads learn (scores, No-Op, value); its encoder belongs to
the world model and stays the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log1p

import torch
from torch import Tensor, nn

from xrlflow.learn.ppo import Episode, PPOConfig, Rollout, Stats, update
from xrlflow.learn.segments import SegmentCategorical
from xrlflow.rl.agent import Agent, Embedded
from xrlflow.rl.features import FINEST
from xrlflow.rl.world_model.dynamics import World, latent_of
from xrlflow.rl.world_model.experience import SCALE


@dataclass(frozen=True, slots=True, eq=False)
class Imagined:
    """One imagined state with n candidates; the fields are those of `Embedded`."""

    graph: Tensor  # [width]
    candidates: Tensor  # [n, width]
    delta: Tensor  # [n]
    often: Tensor  # [n]
    globals: Tensor

    @staticmethod
    def split(embedded: Embedded) -> list[Imagined]:
        """The states of a batch, one by one."""
        sizes = torch.bincount(embedded.owner, minlength=embedded.graphs.shape[0]).tolist()
        often = embedded.often if embedded.often is not None else torch.ones_like(embedded.delta)
        parts = (torch.split(t, sizes) for t in (embedded.candidates, embedded.delta, often))
        return [
            Imagined(g, c, d, o, row) for g, c, d, o, row in zip(embedded.graphs, *parts, embedded.globals)
        ]  # fmt: skip

    @staticmethod
    def join(states: Sequence[Imagined]) -> Embedded:
        sizes = torch.tensor([len(s.delta) for s in states])
        return Embedded(
            torch.stack([s.graph for s in states]),
            torch.cat([s.candidates for s in states]),
            torch.repeat_interleave(torch.arange(len(states)), sizes),
            torch.cat([s.delta for s in states]),
            torch.stack([s.globals for s in states]),
            torch.cat([s.often for s in states]),
        )


class Heads:
    """The layers of an agent that score candidates and estimate values, as a PPO policy over imagined states."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def evaluate(self, observations: Sequence[Imagined]) -> tuple[SegmentCategorical, Tensor]:
        return self.agent.decide(Imagined.join(observations))

    def parameters(self) -> Iterator[nn.Parameter]:
        yield self.agent.trust
        for head in (self.agent.score, self.agent.stop, self.agent.value):
            yield from head.parameters()


def dream(
    agent: Agent,
    world: World,
    starts: Embedded,
    *,
    horizon: int,
    temperature: float,
    generator: torch.Generator,
) -> list[Episode[Imagined]]:
    """Play one dream from each of B real states. Rewards are the savings relative to the best state so far, as with
    `Objective.BEST`. A dream ends with No-Op, in a state without candidates, or at the horizon.
    """
    heads = Heads(agent)
    count = starts.graphs.shape[0]
    with torch.no_grad():
        latents = latent_of(starts)
        memory = world.memory(count)
        states = Imagined.split(starts)
        episodes: list[Episode[Imagined]] = [Episode() for _ in range(count)]
        costs = [float(s.globals[0]) for s in states]
        best = list(costs)
        running = list(range(count))
        for step in range(horizon):
            going = _act(heads, states, running, episodes, generator)
            if not going:
                break
            running = [i for i, _ in going]
            rows = torch.tensor(running)
            vectors = torch.stack([states[i].candidates[a] for i, a in going])
            deltas = torch.stack([states[i].delta[a] for i, a in going])
            kept_memory = (memory[0][rows], memory[1][rows])
            forecast, after = world.step(latents[rows], vectors, deltas, kept_memory)
            memory[0][rows], memory[1][rows] = after
            latents[rows] = forecast.sample(temperature, generator)
            for i, saving in zip(running, forecast.saving.tolist()):
                costs[i] = max(costs[i] - saving / SCALE, 0.0)
                episodes[i].rewards[-1] = SCALE * max(best[i] - costs[i], 0.0)
                best[i] = min(best[i], costs[i])
            imagined, _ = world.imagined(latents[rows], world.decode(latents[rows]))
            tell(imagined, [costs[i] for i in running], 1.0 - (step + 1) / horizon)
            for i, state in zip(running, Imagined.split(imagined)):
                states[i] = state
            running = [i for i in running if len(states[i].delta)]
            if not running:
                break
        if running:
            _, values = heads.evaluate([states[i] for i in running])
            for i, value in zip(running, values.tolist()):
                if len(episodes[i]) == horizon and episodes[i].actions[-1] < len(
                    episodes[i].observations[-1].delta
                ):
                    episodes[i].bootstrap, episodes[i].truncated = value, True
    return episodes


def _act(
    heads: Heads,
    states: Sequence[Imagined],
    running: Sequence[int],
    episodes: Sequence[Episode[Imagined]],
    generator: torch.Generator,
) -> list[tuple[int, int]]:
    """Draw an action in each running dream, and append it to its episode. Returns the numbers of the dreams that
    continue, each with its action.
    """
    distribution, values = heads.evaluate([states[i] for i in running])
    actions = distribution.sample(generator)
    chances = distribution.log_prob(actions)
    going: list[tuple[int, int]] = []
    for i, action, chance, value in zip(running, actions.tolist(), chances.tolist(), values.tolist()):
        episode = episodes[i]
        episode.observations.append(states[i])
        episode.actions.append(action)
        episode.log_probs.append(chance)
        episode.values.append(value)
        episode.rewards.append(0.0)
        if action < len(states[i].delta):
            going.append((i, action))
    return going


def tell(embedded: Embedded, costs: Sequence[float], remaining: float) -> None:
    """Write the relative costs of dreams, and the remaining fraction of the horizon, into their global features."""
    relative = torch.tensor(costs)
    change = relative - 1
    embedded.globals[:, 0] = relative
    embedded.globals[:, 1] = change.sign() * torch.log1p(change.abs() / FINEST) / log1p(1 / FINEST)
    embedded.globals[:, 2] = remaining


def train_in_dreams(
    agent: Agent,
    world: World,
    starts: Sequence[Callable[[], Embedded]],
    config: PPOConfig,
    *,
    horizon: int,
    temperature: float,
    generator: torch.Generator,
    deadline: float = math.inf,
) -> list[Stats]:
    """Update the agent's heads by PPO, once for each batch of start states. A batch is embedded just before its
    update. After `deadline` (time.monotonic) no further update begins, except the first. Raises TrainingError as
    `ppo.update` does.
    """
    heads = Heads(agent)
    optimizer = config.optimizer(heads)
    stats: list[Stats] = []
    for number, start in enumerate(starts):
        if stats and time.monotonic() >= deadline:
            break
        episodes = dream(agent, world, start(), horizon=horizon, temperature=temperature, generator=generator)
        rollout = Rollout.of(episodes, config)
        stats.append(update(heads, optimizer, rollout, config, generator, number / len(starts)))
    return stats
