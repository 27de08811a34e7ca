"""PPO on CartPole-v1: `python bench/cartpole.py [--steps N] [--seed S] [--json FILE]`.

The agents' PPO (xrlflow/learn/ppo.py, unchanged) on a task with a known solution: the mean return over 100 evaluation
episodes must exceed 475. Here a mistake cannot hide behind the difficulty of choosing substitutions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from xrlflow.learn.ppo import PPOConfig, Rollout, collect, orthogonal, update
from xrlflow.learn.segments import SegmentCategorical

SOLVED = 475.0
CONFIG = PPOConfig(
    learning_rate=1e-3, final_learning_rate=0.0, gamma=0.99, epochs=10, minibatch=128, value_weight=0.5,
    entropy_weight=0.0, target_kl=0.03, reward_scale=0.02,
)  # fmt: skip


class CartPolePolicy(nn.Module):
    """Actor and critic; each observation has two actions."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = _mlp(2, 0.01)
        self.critic = _mlp(1, 1.0)

    def evaluate(self, observations: Sequence[np.ndarray]) -> tuple[SegmentCategorical, Tensor]:
        batch = torch.from_numpy(np.stack(observations))
        logits: Tensor = self.actor(batch)
        return SegmentCategorical.of(logits.reshape(-1), [2] * len(batch)), self.critic(batch).squeeze(-1)


def _mlp(outputs: int, gain: float) -> nn.Sequential:
    return nn.Sequential(
        orthogonal(nn.Linear(4, 64)), nn.Tanh(),
        orthogonal(nn.Linear(64, 64)), nn.Tanh(),
        orthogonal(nn.Linear(64, outputs), gain),
    )  # fmt: skip


def train(steps: int, seed: int, per_update: int = 2048, parallel: int = 8) -> CartPolePolicy:
    """A policy after this many environment steps."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    policy = CartPolePolicy()
    optimizer = CONFIG.optimizer(policy)
    environments = [gymnasium.make("CartPole-v1") for _ in range(parallel)]
    done = 0
    while done < steps:
        episodes = collect(policy, environments, per_update, generator)
        done += sum(map(len, episodes))
        stats = update(policy, optimizer, Rollout.of(episodes, CONFIG), CONFIG, generator, done / steps)
        print(
            f"{done:7d} steps  return {np.mean([e.total for e in episodes]):6.1f}  kl {stats.approx_kl:.4f}  "
            f"explained variance {stats.explained_variance:5.2f}",
            file=sys.stderr,
        )
    return policy


def evaluate(policy: CartPolePolicy, episodes: int, seed: int) -> list[float]:
    """The returns of episodes in which the likeliest action is taken."""
    environment = gymnasium.make("CartPole-v1")
    returns = []
    for index in range(episodes):
        observation, _ = environment.reset(seed=seed + index)
        total, over = 0.0, False
        while not over:
            with torch.no_grad():
                action = int(policy.evaluate([observation])[0].mode()[0])
            observation, reward, terminated, truncated, _ = environment.step(action)
            total += float(reward)
            over = terminated or truncated
        returns.append(total)
    return returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=80_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    policy = train(options.steps, options.seed)
    seconds = time.perf_counter() - begin
    returns = evaluate(policy, 100, seed=10_000 + options.seed)
    mean = float(np.mean(returns))
    print(
        f"CartPole-v1, seed {options.seed}: mean return {mean:.1f} (least {min(returns):.0f}) over 100 episodes "
        f"after {options.steps} steps in {seconds:.0f} s; solved above {SOLVED:.0f}: {'yes' if mean > SOLVED else 'NO'}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({
            "task": "CartPole-v1", "seed": options.seed, "steps": options.steps, "seconds": seconds,
            "mean_return": mean, "returns": returns,
        }, indent=1))  # fmt: skip
    if mean <= SOLVED:
        sys.exit(1)


if __name__ == "__main__":
    main()
