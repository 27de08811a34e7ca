"""Training episodes: an environment over `PassEnv` with a curriculum and shaped rewards, each of which can be switched
off; and what all training runs share.

- Masking (`AgentConfig.masking`): passes are masked if they were observed to have no effect on the present module,
  or if the compiler knows that they have none. Observations are forgotten at the end of the episode, because an agent
  has no observations of a module that is new to it.
- Shaping: an order ends at its best prefix. So the reward of a step is the improvement over the best module of the
  episode, as a difference of logarithms, and a step that makes the module worse costs nothing. Without shaping, the
  reward is that of `PassEnv`, the change of the metric relative to the first module.
- Curriculum: training begins with the smallest modules; larger modules join in the order of their size until the
  middle of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xrlflow.passes.agent import Agent
from xrlflow.passes.compiler import Compiler, Metric
from xrlflow.passes.environment import Configuration, Observation, PassEnv, Problem
from xrlflow.passes.play import narrowed, play

# A function that receives the figures of a part of the training, and the number of this part.
Progress = Callable[[Mapping[str, float], int], None]
# The curriculum begins with the first fraction of the modules, and includes all modules after the second fraction of
# the training.
_FIRST, _ALL = 0.25, 0.5
_LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class Teaching:
    """The additions of training to plain episodes (see the module's docstring), and the metric that the agent
    reduces."""

    shaping: bool = True
    curriculum: bool = True
    metric: Metric = Metric.OPERATIONS


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The result of training: the agent with the best evaluation."""

    agent: Agent
    score: float  # mean logarithm of value / initial value over the training modules: lower is better
    iterations: int
    steps: int  # steps of the environment during training
    seconds: float
    interrupted: bool = False
    history: tuple[Mapping[str, float], ...] = field(default=(), repr=False)

    @property
    def reduction(self) -> float:
        """1 - the geometric mean of value / initial value; 0 if the agent was never evaluated."""
        return 0.0 if math.isinf(self.score) else 1.0 - math.exp(self.score)


class Lessons:
    """The environment for `collect`. `progress`: the fraction of the training that is over, set by the training run."""

    def __init__(
        self,
        compiler: Compiler,
        problems: Sequence[Problem],
        configuration: Configuration,
        teaching: Teaching = Teaching(),
    ) -> None:
        if not problems:
            raise ValueError("training needs at least one module")
        self.compiler, self.configuration, self.teaching = compiler, configuration, teaching
        self.problems = sorted(problems, key=lambda p: (p.module.summary.operations, p.name))
        self.progress = 0.0
        self._env: PassEnv | None = None
        self._best = 0.0

    @property
    def open(self) -> Sequence[Problem]:
        """The modules from which episodes draw at the present progress."""
        if not self.teaching.curriculum:
            return self.problems
        part = _FIRST + (1.0 - _FIRST) * min(1.0, self.progress / _ALL)
        return self.problems[: max(1, math.ceil(part * len(self.problems) - 1e-9))]

    def reset(self, *, seed: int | None = None) -> tuple[Observation, dict[str, Any]]:
        problem = self.open[int(np.random.default_rng(seed).integers(len(self.open)))]
        # A new environment has no observations of passes without effect.
        self._env = PassEnv(self.compiler, [problem], self.configuration)
        observation, information = self._env.reset(seed=seed)
        self._best = float(information["initial"])
        return self._narrowed(observation, information), information

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._env is None:
            raise ValueError("no episode is running: call reset first")
        observation, reward, terminated, truncated, information = self._env.step(action)
        if self.teaching.shaping and self.teaching.metric is not Metric.SECONDS:
            value = float(information["value"])
            reward = math.log(max(self._best, _LEAST) / max(min(value, self._best), _LEAST))
            self._best = min(self._best, value)
        return self._narrowed(observation, information), reward, terminated, truncated, information

    def _narrowed(self, observation: Observation, information: Mapping[str, Any]) -> Observation:
        return narrowed(observation, self.compiler, information["module"], self.configuration.masking)


def score(agent: Agent, compiler: Compiler, problems: Sequence[Problem], metric: Metric) -> float:
    """The mean over the modules of the logarithm of value / initial value after the agent's likeliest order: 0 without
    gain, lower is better.

    The results' outputs are not compared with the original's: agents are scored often, and the results of an agent are
    compared whenever it is used.
    """
    orders = [play(agent, compiler, p.module, metric, compared=False) for p in problems]
    return math.fsum(math.log(max(1.0 - o.reduction, _LEAST)) for o in orders) / len(orders)
