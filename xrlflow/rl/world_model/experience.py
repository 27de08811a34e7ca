"""Episodes of the real environment, from which a world model learns."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from xrlflow.cost import NoTimeLeft
from xrlflow.learn.ppo import TrainingError
from xrlflow.rl.agent import Agent
from xrlflow.rl.env import EnvConfig, Problem, RewriteEnv
from xrlflow.rl.features import Observation
from xrlflow.rl.situation import Situation


@dataclass(slots=True, eq=False)
class Play:
    """A real episode of T steps. No-Op is not a step."""

    problem: str
    observations: list[Observation] = field(default_factory=list)  # [T + 1]
    actions: list[int] = field(default_factory=list)  # [T]: numbers of candidates
    savings: list[float] = field(default_factory=list)
    """[T]: the fraction of the initial cost that each step saves, times `SCALE`."""
    ended: bool = False  # the last observation has no candidates

    def __len__(self) -> int:
        return len(self.actions)


EPISODES = EnvConfig(horizon=30)
"""Short episodes, since the later parts of long episodes are mostly repetitions."""
SCALE = 5.0
"""The factor of savings, which is the one by which PPO scales rewards: a saving of the whole cost becomes 5."""


def explore(
    agent: Agent,
    problems: Sequence[Problem],
    observe: Callable[[Situation], Observation],
    steps: int,
    *,
    seed: int,
    config: EnvConfig = EPISODES,
    curious: float = 0.3,
    deadline: float = math.inf,
) -> list[Play]:
    """Play episodes with at least `steps` steps in total. Actions are drawn from the agent's policy or, with
    probability `curious`, at random.

    An episode lasts until the horizon, or until there are no candidates: when the agent would stop, its likeliest
    substitution is applied instead, because the world model must learn what follows, too. At `deadline`
    (time.monotonic) the running episode is cut short, but the first episode has at least one step. If the cost model
    raises NoTimeLeft, the episode is cut before this step. Raises TrainingError if no graph has a candidate.
    """
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    plays: list[Play] = []
    count = 0
    while count < steps and not (plays and time.monotonic() >= deadline):
        if not problems:
            raise TrainingError("no substitution applies to any of the graphs: there is nothing to learn")
        problem = problems[rng.randrange(len(problems))]
        env = RewriteEnv([problem], observe, config)
        observation, info = env.reset(seed=rng.randrange(2**31))
        if not observation.candidates:
            problems = [p for p in problems if p is not problem]
            continue
        play = Play(problem.name, [observation])
        plays.append(play)
        while observation.candidates and len(play) < config.horizon:
            action = _action(agent, observation, generator, rng, curious)
            before = info["cost"]
            try:
                observation, _, terminated, truncated, info = env.step(action)
            except NoTimeLeft:
                return [p for p in plays if len(p)]
            play.observations.append(observation)
            play.actions.append(action)
            play.savings.append(SCALE * (before - info["cost"]) / max(info["initial"], 1e-30))
            count += 1
            if terminated or truncated or time.monotonic() >= deadline:
                break
        play.ended = observation.candidates == 0
    return plays


def _action(
    agent: Agent, observation: Observation, generator: torch.Generator, rng: random.Random, curious: float
) -> int:
    if rng.random() < curious:  # draws the rule first, so that rules with few candidates are tried as often
        rule = rng.choice(np.unique(observation.rule).tolist())
        return int(rng.choice(np.flatnonzero(observation.rule == rule).tolist()))
    with torch.inference_mode():
        distribution, _ = agent.evaluate([observation])
    chances = distribution.log_probs[:-1].softmax(0)
    return int(torch.multinomial(chances, 1, generator=generator))
