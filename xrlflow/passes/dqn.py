"""Deep Q-learning, for comparison with PPO, in one file.

It is double Q-learning (van Hasselt et al., 2016) with replay, a target network and epsilon-greedy exploration (Mnih
et al., 2015). The network is that of `Agent`, but its scores are the values of actions here. So agents are saved and
used like those of PPO.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from xrlflow.learn.log import Logs
from xrlflow.learn.ppo import TrainingError
from xrlflow.learn.threads import one_thread
from xrlflow.passes.agent import AgentConfig, random_agent
from xrlflow.passes.compiler import Compiler
from xrlflow.passes.environment import Observation, Problem
from xrlflow.passes.lessons import Lessons, Teaching, Trained, score


@dataclass(frozen=True, slots=True)
class DQNConfig:
    """The parameters of deep Q-learning. A step is a step of the environment."""

    steps: int = 20_000
    seed: int = 0
    learning_rate: float = 5e-4
    gamma: float = 0.99
    batch: int = 64  # transitions of a minibatch
    memory: int = 20_000  # the latest transitions, from which minibatches are drawn
    begin: int = 256  # the step at which learning begins
    every: int = 2  # steps between minibatches
    follow: int = 500  # steps between updates of the target network
    epsilon: float = 0.05  # the final probability of a random action, to which it falls linearly
    explore: float = 0.5  # the fraction of the steps during which the probability falls
    reward_scale: float = 10.0  # rewards are multiplied by it
    max_grad_norm: float = 10.0
    evaluate_every: int = 2000
    teaching: Teaching = field(default_factory=Teaching)
    agent: AgentConfig = field(default_factory=AgentConfig)

    def rate(self, step: int) -> float:
        """The probability of a random action at a step."""
        gone = min(1.0, step / max(1.0, self.explore * self.steps))
        return 1.0 + (self.epsilon - 1.0) * gone


@dataclass(frozen=True, slots=True)
class _Transition:
    observation: Observation
    action: int
    reward: float
    following: Observation
    terminated: bool


def train(
    compiler: Compiler,
    problems: Sequence[Problem],
    config: DQNConfig = DQNConfig(),
    *,
    deadline: float | None = None,
    logs: Logs | None = None,
) -> Trained:
    """Train an agent by deep Q-learning. Returns the agent with the best evaluation.

    Raises TrainingError if the loss is not finite.
    """
    run = _Run(compiler, problems, config)
    with one_thread(), logs or Logs() as log:
        while run.step < config.steps and (deadline is None or time.monotonic() < deadline):
            run.act()
            if run.step % config.evaluate_every == 0:
                log.scalars(run.evaluate(), run.step)
        if run.step % config.evaluate_every:
            log.scalars(run.evaluate(), run.step)
    return Trained(run.best, run.score, run.step, run.step, time.monotonic() - run.started)


class _Run:
    def __init__(self, compiler: Compiler, problems: Sequence[Problem], config: DQNConfig) -> None:
        self.compiler, self.problems, self.config = compiler, problems, config
        self.online = random_agent(compiler, config.agent, config.seed)
        self.target = self.online.copy()
        self.lessons = Lessons(
            compiler, problems, config.agent.episode(reward=config.teaching.metric), config.teaching
        )
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=config.learning_rate)
        self.generator = np.random.default_rng(config.seed)
        self.memory: deque[_Transition] = deque(maxlen=config.memory)
        self.step = 0
        self.losses: list[float] = []
        self.started = time.monotonic()
        self.best, self.score = self.online.copy(), math.inf
        self._observation: Observation | None = None

    def act(self) -> None:
        """Take one step in the environment, and learn after every `every` steps."""
        config = self.config
        if self._observation is None:
            self.lessons.progress = self.step / config.steps
            self._observation, _ = self.lessons.reset(seed=int(self.generator.integers(2**31 - 1)))
        before = self._observation
        action = self._action(before)
        following, reward, terminated, truncated, _ = self.lessons.step(action)
        self.memory.append(_Transition(before, action, config.reward_scale * reward, following, terminated))
        self._observation = None if terminated or truncated else following
        self.step += 1
        if self.step >= config.begin and self.step % config.every == 0:
            self.learn()
        if self.step % config.follow == 0:
            self.target.load_state_dict(self.online.state_dict())

    def _action(self, observation: Observation) -> int:
        if self.generator.random() < self.config.rate(self.step):
            return int(self.generator.choice(np.flatnonzero(observation["action_mask"])))
        with torch.no_grad():
            return int(self.online.scores([observation])[0][0].argmax())

    def learn(self) -> None:
        """Learn from one minibatch. The online network chooses the next action, the target network gives its value."""
        config = self.config
        batch = [self.memory[i] for i in self.generator.integers(len(self.memory), size=config.batch)]
        following = [t.following for t in batch]
        with torch.no_grad():
            best_actions = self.online.scores(following)[0].argmax(1)
            worth = self.target.scores(following)[0].gather(1, best_actions[:, None]).squeeze(1)
        rewards = torch.tensor([t.reward for t in batch])
        going = torch.tensor([not t.terminated for t in batch])
        targets = rewards + config.gamma * torch.where(going, worth, torch.zeros_like(worth))
        loss = nn.functional.smooth_l1_loss(self._valued(batch), targets)
        if not bool(loss.isfinite()):
            raise TrainingError(f"the loss of deep Q-learning is {float(loss.detach())}")
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.online.parameters(), config.max_grad_norm)
        self.optimizer.step()
        self.losses.append(float(loss.detach()))

    def _valued(self, batch: Sequence[_Transition]) -> Tensor:
        """The online network's values of the actions in these transitions [B]."""
        scores, _ = self.online.scores([t.observation for t in batch])
        return scores.gather(1, torch.tensor([[t.action] for t in batch])).squeeze(1)

    def evaluate(self) -> dict[str, float]:
        result = score(self.online, self.compiler, self.problems, self.config.teaching.metric)
        if result < self.score:
            self.best, self.score = self.online.copy(), result
        recent = self.losses[-200:]
        return {
            "evaluation/reduction": 1.0 - math.exp(result),
            "dqn/loss": float(np.mean(recent)) if recent else 0.0,
            "dqn/epsilon": self.config.rate(self.step),
        }
