"""Training an agent by PPO (`xrlflow.learn.ppo`), plain or with what `lessons` adds."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from xrlflow.learn.log import Logs
from xrlflow.learn.ppo import Episode, PPOConfig, Rollout, Stats, collect, update
from xrlflow.learn.threads import one_thread
from xrlflow.passes.agent import Agent, AgentConfig, random_agent
from xrlflow.passes.compiler import Compiler
from xrlflow.passes.environment import Masking, Observation, Problem
from xrlflow.passes.lessons import Lessons, Teaching, Trained, score


def _ppo() -> PPOConfig:
    # An episode that leaves 80% of the operations returns 0.2; the scale makes 2 of it. Gains are discounted, so that a
    # pass without effect is not free. Episodes are dear: much is learned from each.
    return PPOConfig(
        learning_rate=2e-3, gamma=0.9, epochs=10, target_kl=0.08, reward_scale=10.0, value_weight=0.5
    )


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Options of a training run: `iterations` of at least `steps` steps each, in episodes over `environments`.

    `evaluate_every`: iterations after which the agent plays all modules, and is kept if it is better than before.
    """

    iterations: int = 100
    steps: int = 256
    environments: int = 8
    seed: int = 0
    evaluate_every: int = 10
    teaching: Teaching = field(default_factory=Teaching)
    ppo: PPOConfig = field(default_factory=_ppo)
    agent: AgentConfig = field(default_factory=AgentConfig)

    def __post_init__(self) -> None:
        for name in ("iterations", "steps", "environments", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainConfig.{name} must be at least 1, not {getattr(self, name)}")

    def plain(self) -> TrainConfig:
        """The same without masking, shaping and curriculum: model-free PPO on the environment as it is."""
        return replace(
            self,
            agent=replace(self.agent, masking=Masking.NONE),
            teaching=replace(self.teaching, shaping=False, curriculum=False),
        )

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["teaching"]["metric"] = self.teaching.metric.value
        found["agent"]["masking"] = self.agent.masking.value
        found["agent"]["network"] = self.agent.network.value
        return found


def train(
    compiler: Compiler,
    problems: Sequence[Problem],
    config: TrainConfig = TrainConfig(),
    output: str | os.PathLike[str] | None = None,
    *,
    start: Agent | None = None,
    deadline: float | None = None,
    logs: Logs | None = None,
) -> Trained:
    """Train an agent on modules. It is written to `output` whenever it plays them better than before.

    The run ends after all iterations, at `deadline` (time.monotonic) or at Ctrl-C, with the best agent so far. The
    compiler should have a cache: episodes repeat themselves.
    Raises CheckpointError if `start` is for other passes or `output` cannot be written, TrainingError if a loss is not
    finite.
    """
    run = _Run(compiler, problems, config, output, start)
    interrupted = False
    try:
        with one_thread(), logs or Logs() as log:
            while run.iteration < config.iterations and (deadline is None or time.monotonic() < deadline):
                log.scalars(run.iterate(), run.iteration)
            if run.iteration % config.evaluate_every:
                log.scalars(run.evaluate(), run.iteration)
    except KeyboardInterrupt:
        interrupted = True
    return run.trained(interrupted)


class _Run:
    def __init__(
        self,
        compiler: Compiler,
        problems: Sequence[Problem],
        config: TrainConfig,
        output: str | os.PathLike[str] | None,
        start: Agent | None,
    ) -> None:
        self.compiler, self.problems, self.config, self.output = compiler, problems, config, output
        self.agent = start.copy() if start is not None else random_agent(compiler, config.agent, config.seed)
        self.agent.check(compiler)
        episode = self.agent.config.episode(reward=config.teaching.metric)
        self.lessons = [
            Lessons(compiler, problems, episode, config.teaching) for _ in range(config.environments)
        ]
        self.optimizer = config.ppo.optimizer(self.agent)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.iteration = self.steps = 0
        self.begin = time.monotonic()
        self.best, self.score = self.agent.copy(), math.inf
        self.history: list[Mapping[str, float]] = []

    def iterate(self) -> dict[str, float]:
        """Collect episodes, learn from them, and now and then see what the agent can do."""
        config, begin = self.config, time.perf_counter()
        progress = self.iteration / config.iterations
        for lesson in self.lessons:
            lesson.progress = progress
        episodes = collect(self.agent, self.lessons, config.steps, self.generator)
        collected = time.perf_counter()
        rollout = Rollout.of(episodes, config.ppo)
        stats = update(self.agent, self.optimizer, rollout, config.ppo, self.generator, progress)
        self.iteration += 1
        self.steps += len(rollout)
        found = _scalars(episodes, stats)
        found["time/steps_per_second"] = len(rollout) / max(collected - begin, 1e-9)
        found["time/updating"] = time.perf_counter() - collected
        if self.iteration % config.evaluate_every == 0:
            found |= self.evaluate()
        self.history.append(found)
        return found

    def evaluate(self) -> dict[str, float]:
        """Play all modules, and keep the agent if it is the best so far."""
        found = score(self.agent, self.compiler, self.problems, self.config.teaching.metric)
        if found < self.score:
            self.best, self.score = self.agent.copy(), found
            self.best.about = self._about()
            if self.output is not None:
                self.best.save(self.output)
        return {"evaluation/reduction": 1.0 - math.exp(found)}

    def trained(self, interrupted: bool) -> Trained:
        if math.isinf(self.score):
            self.best = self.agent.copy()
            self.best.about = self._about()
            if self.output is not None:
                self.best.save(self.output)
        return Trained(
            self.best, self.score, self.iteration, self.steps, time.monotonic() - self.begin, interrupted,
            tuple(self.history),
        )  # fmt: skip

    def _about(self) -> dict[str, Any]:
        return {
            "compiler": self.compiler.name,
            "modules": [p.name for p in self.problems],
            "run": self.config.to_json(),
            "iteration": self.iteration,
            "steps": self.steps,
            "reduction": None if math.isinf(self.score) else round(1.0 - math.exp(self.score), 4),
        }


def _scalars(episodes: Sequence[Episode[Observation]], stats: Stats) -> dict[str, float]:
    return {
        "episode/return": float(np.mean([e.total for e in episodes])),
        "episode/length": float(np.mean([len(e) for e in episodes])),
        **{f"ppo/{f.name}": float(getattr(stats, f.name)) for f in fields(stats)},
    }
