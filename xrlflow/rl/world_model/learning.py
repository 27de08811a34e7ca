"""Training the world model, and the loop of RLFlow: play some episodes, learn the dynamics, train the agent in dreams,
play again.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

from xrlflow.learn.ppo import PPOConfig, TrainingError
from xrlflow.learn.threads import permitted_threads
from xrlflow.rl.agent import Agent, Embedded
from xrlflow.rl.data import collate
from xrlflow.rl.env import EnvConfig, Problem
from xrlflow.rl.features import Observation
from xrlflow.rl.situation import Situation
from xrlflow.rl.world_model.dream import train_in_dreams
from xrlflow.rl.world_model.dynamics import Truth, World, WorldConfig, latent_of
from xrlflow.rl.world_model.experience import EPISODES, Play, explore


def _ppo() -> PPOConfig:
    # Rewards of dreams are scaled already (`experience.SCALE`).
    return PPOConfig(learning_rate=1e-3, epochs=3, minibatch=256, reward_scale=1.0)


@dataclass(frozen=True, slots=True)
class LearningConfig:
    """The parameters of RLFlow's training."""

    updates: int = 100  # updates of the world model in each round, on the plays so far
    env: EnvConfig = EPISODES  # the rules of the episodes that are played
    hidden: int = 256
    mixtures: int = 8
    chunk: int = 8  # successive steps of an episode in one sequence
    batch: int = 16  # chunks of a minibatch
    learning_rate: float = 3e-3
    max_grad_norm: float = 5.0
    weights: Mapping[str, float] = field(default_factory=lambda: {"saving": 5.0, "likelihood": 0.2})
    """The weights of the parts of the loss; parts that are not named have the weight 1."""
    encoder: bool = True  # whether the agent's encoder learns, too
    dreams: int = 20  # PPO updates of the agent in each round
    starts: int = 32  # the number of dreams in each PPO update
    horizon: int = 30  # the greatest number of steps of a dream
    temperature: float = 0.5
    ppo: PPOConfig = field(default_factory=_ppo)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Steps `first` to `first + length` of a play."""

    play: Play
    first: int
    length: int

    @property
    def observations(self) -> list[Observation]:
        return self.play.observations[self.first : self.first + self.length + 1]


def chunks(plays: Sequence[Play], length: int, count: int, rng: np.random.Generator) -> list[Chunk]:
    """Draw chunks of plays; each step has the same probability of being the first of a chunk. Raises TrainingError if
    there is no step.
    """
    sizes = np.array([len(p) for p in plays])
    if not sizes.sum():
        raise TrainingError("there are no steps to learn from")
    ends = np.cumsum(sizes)
    drawn_chunks = []
    for at in rng.integers(ends[-1], size=count).tolist():
        number = int(np.searchsorted(ends, at, side="right"))
        first = at - int(ends[number] - sizes[number])
        drawn_chunks.append(Chunk(plays[number], first, min(length, len(plays[number]) - first)))
    return drawn_chunks


class Learner:
    """A world model and the agent whose encoder it shares, with their optimizer.

    `world` is a world model to be trained further; if it has fewer rules than the agent, the new rules are added to
    it. By default a new world model is created.
    """

    def __init__(
        self, agent: Agent, config: LearningConfig, seed: int = 0, world: World | None = None
    ) -> None:
        self.agent, self.config, self.seed = agent, config, seed
        rules = len(agent.vocabulary.rules) + 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            width = agent.config.encoder.width
            if world is None:
                self.world = World(WorldConfig(width, rules, config.hidden, config.mixtures))
            else:
                self.world = World.of(replace(world.config, rules=rules), world.state_dict())
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        heads = {id(p) for part in (agent.score, agent.stop, agent.value) for p in part.parameters()}
        heads.add(id(agent.trust))
        trunk = [p for p in agent.parameters() if config.encoder and id(p) not in heads]
        self.learned = [*trunk, *self.world.parameters()]
        self.optimizer = torch.optim.Adam(self.learned, lr=config.learning_rate)

    def embed(self, observations: Sequence[Observation]) -> tuple[Embedded, Tensor]:
        """The embedded observations, and the rule of each candidate."""
        data = collate(observations)
        return self.agent.embed(data, len(observations)), data.rule

    def learn(self, plays: Sequence[Play], updates: int, deadline: float = math.inf) -> dict[str, float]:
        """Train the world model on minibatches of the plays. Returns the means of the losses by part.

        After `deadline` (time.monotonic) no further update begins, except the first. Raises TrainingError if a loss is
        not finite.
        """
        totals: defaultdict[str, float] = defaultdict(float)
        done = 0
        while done < updates and not (done and time.monotonic() >= deadline):
            done += 1
            batch = chunks(plays, self.config.chunk, self.config.batch, self.rng)
            parts = self.losses(batch)
            loss = torch.stack([self.config.weights.get(n, 1.0) * part for n, part in parts.items()]).sum()
            if not math.isfinite(float(loss.detach())):
                raise TrainingError("the world model's loss is not finite")
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.learned, self.config.max_grad_norm)
            self.optimizer.step()
            for name, part in parts.items():
                totals[name] += float(part.detach())
        return {name: total / done for name, total in totals.items()}

    def losses(self, batch: Sequence[Chunk]) -> dict[str, Tensor]:
        """The parts of the loss on some chunks."""
        observations = [o for chunk in batch for o in chunk.observations]
        with torch.set_grad_enabled(self.config.encoder):
            embedded, rule = self.embed(observations)
        latents = latent_of(embedded)
        truth = Truth.of(embedded, rule, self.world.config.rules)
        offers = self.world.decode(latents)
        owner, number = torch.nonzero(truth.present, as_tuple=True)
        parts = truth.losses(offers, self.world.vectors(offers.hidden[owner], number))
        starts = np.cumsum([0, *(len(c.observations) for c in batch[:-1])])
        sizes = torch.bincount(embedded.owner, minlength=len(observations))
        firsts = sizes.cumsum(0) - sizes
        memory = self.world.memory(len(batch))
        rows = np.arange(len(batch))
        terms: defaultdict[str, list[Tensor]] = defaultdict(list)
        for step in range(max(c.length for c in batch)):
            going = [i for i in rows.tolist() if step < batch[i].length]
            at = torch.tensor([int(starts[i]) + step for i in going])
            rows_of_actions = firsts[at] + torch.tensor(
                [batch[i].play.actions[batch[i].first + step] for i in going]
            )
            now = torch.tensor(going)
            kept_memory = (memory[0][now], memory[1][now])
            forecast, after = self.world.step(
                latents[at],
                embedded.candidates[rows_of_actions],
                embedded.delta[rows_of_actions],
                kept_memory,
            )
            memory = (memory[0].index_copy(0, now, after[0]), memory[1].index_copy(0, now, after[1]))
            goal = latents[at + 1].detach()
            terms["likelihood"].append(-forecast.log_likelihood(goal))
            saved = torch.tensor([batch[i].play.savings[batch[i].first + step] for i in going])
            terms["saving"].append(smooth_l1_loss(forecast.saving, saved, beta=0.05, reduction="none"))
            over = (sizes[at + 1] == 0).float()
            terms["end"].append(binary_cross_entropy_with_logits(forecast.end, over, reduction="none"))
            # Predicted latents must be decoded as well as real ones.
            imagined = self.world.decode(forecast.sample(0.0))
            present = truth.present[at + 1]
            wrong = binary_cross_entropy_with_logits(imagined.present, present, reduction="none").mean(1)
            terms["imagined"].append(wrong)
        return parts | {name: torch.cat(each).mean() for name, each in terms.items()}

    def start(self, plays: Sequence[Play]) -> Embedded:
        """Embedded real states with which the dreams of one PPO update begin: first states of episodes, and later
        ones.
        """
        observations = []
        for index in self.rng.integers(len(plays), size=self.config.starts).tolist():
            play = plays[index]
            usable = [o for o in play.observations if o.candidates]
            first = self.rng.random() < 0.5
            observations.append(usable[0 if first else int(self.rng.integers(len(usable)))])
        with torch.no_grad():
            return self.embed(observations)[0]

    def dream(self, plays: Sequence[Play], deadline: float = math.inf) -> dict[str, float]:
        """Train the agent's heads in dreams that begin in these plays."""
        config = self.config
        if not config.dreams:
            return {}
        stats = train_in_dreams(
            self.agent, self.world, [partial(self.start, plays)] * config.dreams, config.ppo, horizon=config.horizon,
            temperature=config.temperature, generator=self.generator, deadline=deadline,
        )  # fmt: skip
        return {
            "dream/entropy": float(np.mean([s.entropy for s in stats])),
            "dream/explained_variance": float(np.mean([s.explained_variance for s in stats])),
            "dream/policy_loss": float(np.mean([s.policy_loss for s in stats])),
        }


Progress = Callable[[Mapping[str, float], int, Learner], bool | None]
Watch = Callable[[Learner, Sequence[Play]], Mapping[str, float]]


@permitted_threads()
def train_world_model(
    learner: Learner,
    problems: Sequence[Problem],
    observe: Callable[[Situation], Observation],
    *,
    steps: int,
    rounds: int = 5,
    deadline: float = math.inf,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> list[Play]:
    """Train a world model on `steps` real steps, and the learner's agent inside it. Returns the plays.

    In each round the agent plays an equal part of the steps, the world model learns from all plays so far, and the
    agent trains in dreams. `progress(figures, round, learner)` is called after each round, and may end the training by
    returning False. `watch(learner, plays)` computes further figures from the plays of a round before the world model
    learns from them. At `deadline` (time.monotonic) the running round is cut short, and is the last round. Raises
    TrainingError if no problem has a candidate, or if a loss is not finite.
    """
    config = learner.config
    plays: list[Play] = []
    for number in range(rounds):
        new = explore(
            learner.agent, problems, observe, math.ceil(steps / rounds), seed=learner.seed * 1000 + number,
            config=config.env, deadline=deadline,
        )  # fmt: skip
        plays += new
        if not plays:  # no cost was computed in time
            break
        figures = {} if watch is None else dict(watch(learner, new))
        figures |= {f"world/{n}": x for n, x in learner.learn(plays, config.updates, deadline).items()}
        figures |= learner.dream(plays, deadline)
        if progress is not None and progress(figures, number, learner) is False:
            break
        if time.monotonic() >= deadline:
            break
    return plays
