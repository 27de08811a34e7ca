"""Proximal policy optimisation in one file (Schulman et al., 2017, arXiv:1707.06347).

It is independent of graphs and kernels. Observations may be of any type. A policy turns a list of observations into
a distribution over the actions of each one, and into values. The details follow "The 37 implementation details of
PPO" (Huang et al., ICLR blog track 2022).

    episodes = collect(policy, environments, steps=2048, generator)   # whole episodes, batched over environments
    rollout = Rollout.of(episodes, config)                            # advantages by GAE
    statistics = update(policy, optimizer, rollout, config, generator)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xrlflow.learn.segments import SegmentCategorical

Obs = TypeVar("Obs")
ObsIn = TypeVar("ObsIn", contravariant=True)
ObsOut = TypeVar("ObsOut", covariant=True)
Floats = npt.NDArray[np.float64]


class TrainingError(RuntimeError):
    """Training cannot continue: a figure is not finite, or there are no steps to learn from."""


class Distribution(Protocol):
    """Distributions of an actor. Each of B observations gets one action: an integer or K integers."""

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probabilities [B] of actions [B] or [B, K]."""
        ...

    def entropy(self) -> Tensor:
        """Entropies in nats [B]."""
        ...

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Actions [B] or [B, K]."""
        ...


class ActorCritic(Protocol[ObsIn]):
    """An actor and critic that PPO improves, with actions of any kind."""

    def evaluate(self, observations: Sequence[ObsIn]) -> tuple[Distribution, Tensor]:
        """The distribution over the actions of each of B observations, and their values [B]."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Policy(Protocol[ObsIn]):
    """An actor and critic that chooses among numbered actions, usually an nn.Module. It collates its observations."""

    def evaluate(self, observations: Sequence[ObsIn]) -> tuple[SegmentCategorical, Tensor]:
        """The distribution over the actions of each of B observations, and their values [B]."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Environment(Protocol[ObsOut]):
    """The part of Gymnasium's interface that `collect` uses."""

    def reset(self, *, seed: int | None = None) -> tuple[ObsOut, dict[str, Any]]: ...

    def step(self, action: Any) -> tuple[ObsOut, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated (the episode ended), truncated (it was cut off), information."""
        ...


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """Hyper-parameters. Defaults are those of X-RLflow where its paper states them (appendix)."""

    learning_rate: float = 5e-4
    # The learning rate falls linearly to this part of its first value at the end of training.
    final_learning_rate: float = 0.1
    adam_eps: float = 1e-5
    gamma: float = 0.99
    gae_lambda: float = 0.95
    epochs: int = 4
    minibatch: int = 64
    clip: float = 0.2
    # Once a value differs by this from the value before the update, its loss no longer falls; None: no such limit.
    value_clip: float | None = None
    value_weight: float = 0.25
    entropy_weight: float = 0.01
    # An update ends early when a minibatch's KL divergence from the old policy exceeds 1.5 times this.
    target_kl: float | None = 0.05
    max_grad_norm: float = 0.5
    normalize_advantages: bool = True
    # Rewards are multiplied by this factor, which should bring values to the order of 1.
    reward_scale: float = 1.0

    def __post_init__(self) -> None:
        positive = (
            "learning_rate",
            "adam_eps",
            "epochs",
            "minibatch",
            "clip",
            "max_grad_norm",
            "reward_scale",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"PPOConfig.{name} must be positive, not {getattr(self, name)}")
        for name in ("gamma", "gae_lambda", "final_learning_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"PPOConfig.{name} must be between 0 and 1, not {getattr(self, name)}")

    def rate(self, progress: float) -> float:
        """The learning rate after this part of the training (0 to 1)."""
        remaining = 1.0 - min(max(progress, 0.0), 1.0)
        return self.learning_rate * (self.final_learning_rate + (1.0 - self.final_learning_rate) * remaining)

    def optimizer(self, policy: ActorCritic[Any]) -> torch.optim.Adam:
        return torch.optim.Adam(policy.parameters(), lr=self.learning_rate, eps=self.adam_eps)


@dataclass(slots=True)
class Episode(Generic[Obs]):
    """T steps of one environment."""

    observations: list[Obs] = field(default_factory=list)
    # Integers, or lists of K of them.
    actions: list[Any] = field(default_factory=list)
    # Log-probabilities of the actions under the policy that acted.
    log_probs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    # The value of the state after the last step: 0 at a termination, the critic's estimate at a truncation.
    bootstrap: float = 0.0
    truncated: bool = False
    # The information that the environment gave with the last step.
    info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def total(self) -> float:
        """The undiscounted return."""
        return math.fsum(self.rewards)


def collect(
    policy: ActorCritic[Obs],
    environments: Sequence[Environment[Obs]],
    steps: int,
    generator: torch.Generator,
) -> list[Episode[Obs]]:
    """Play whole episodes with at least `steps` steps in total. The policy evaluates all environments in one batch.

    New episodes begin until `steps` steps were taken; then the running episodes are finished. So the next call depends
    only on its generator. A truncated episode bootstraps from the value of its last observation.
    """
    episodes: list[Episode[Obs]] = []
    running: dict[int, tuple[Episode[Obs], Obs]] = {}
    idle = list(range(len(environments)))
    played = 0
    with torch.no_grad():
        while True:
            # Steps of unfinished episodes count, too.
            while idle and played < steps:
                index = idle.pop(0)
                seed = int(torch.randint(2**31 - 1, (), generator=generator))
                observation, _ = environments[index].reset(seed=seed)
                episodes.append(Episode())
                running[index] = (episodes[-1], observation)
            if not running:
                return episodes
            order = sorted(running)
            distribution, values = policy.evaluate([running[i][1] for i in order])
            actions = distribution.sample(generator)
            log_probs = distribution.log_prob(actions)
            for index, action, log_prob, value in zip(
                order, actions.tolist(), log_probs.tolist(), values.tolist()
            ):
                episode, observation = running[index]
                episode.observations.append(observation)
                episode.actions.append(action)
                episode.log_probs.append(log_prob)
                episode.values.append(value)
                observation, reward, terminated, truncated, info = environments[index].step(action)
                episode.rewards.append(float(reward))
                played += 1
                running[index] = (episode, observation)
                if terminated or truncated:
                    del running[index]
                    idle.append(index)
                    episode.info, episode.truncated = info, truncated and not terminated
                    if episode.truncated:
                        episode.bootstrap = float(policy.evaluate([observation])[1][0])
            idle.sort()


def gae(rewards: Floats, values: Floats, bootstrap: float, gamma: float, gae_lambda: float) -> Floats:
    """Generalised advantage estimates [T] of consecutive steps (Schulman et al., 2016, equation 16).

    `rewards` [T], `values` [T]. `bootstrap` is the value of the state after the last step: 0 at a termination, an
    estimate at a truncation or at the end of the buffer.
    """
    following = np.append(values[1:], bootstrap)
    errors = rewards + gamma * following - values
    advantages = np.zeros_like(errors)
    carried = 0.0
    for step in reversed(range(len(errors))):
        carried = errors[step] + gamma * gae_lambda * carried
        advantages[step] = carried
    return advantages


@dataclass(frozen=True, slots=True, eq=False)
class Rollout(Generic[Obs]):
    """T steps to learn from: observations, and tensors [T]. Factored actions are [T, K].

    The observations may be left out if `Differentiate` computes the gradients in another process.
    """

    observations: list[Obs]
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    @staticmethod
    def of(episodes: Sequence[Episode[Obs]], config: PPOConfig) -> Rollout[Obs]:
        """The steps of the episodes with their advantages and returns.

        Raises TrainingError if there is no step, or if a reward, value or log-probability is not finite.
        """
        if not any(len(e) for e in episodes):
            raise TrainingError("no steps to learn from")
        for name in ("rewards", "values", "log_probs"):
            if not all(math.isfinite(figure) for e in episodes for figure in getattr(e, name)):
                raise TrainingError(f"{name} of the collected steps are not finite")
        advantages, values = [], []
        for e in episodes:
            old = np.asarray(e.values, np.float64)
            scaled = config.reward_scale * np.asarray(e.rewards, np.float64)
            advantages.append(gae(scaled, old, e.bootstrap, config.gamma, config.gae_lambda))
            values.append(old)
        flat, old = np.concatenate(advantages), np.concatenate(values)
        return Rollout(
            [o for e in episodes for o in e.observations],
            torch.tensor([a for e in episodes for a in e.actions]),
            torch.tensor([p for e in episodes for p in e.log_probs], dtype=torch.float32),
            torch.tensor(old, dtype=torch.float32),
            torch.tensor(flat, dtype=torch.float32),
            torch.tensor(flat + old, dtype=torch.float32),
        )

    def part(self, steps: Tensor, advantages: Tensor) -> Rollout[Obs]:
        """The steps of these numbers [S], with these advantages [S]."""
        observations = [self.observations[i] for i in steps.tolist()]
        return Rollout(
            observations,
            self.actions[steps],
            self.log_probs[steps],
            self.values[steps],
            advantages,
            self.returns[steps],
        )

    def __len__(self) -> int:
        return int(self.actions.shape[0])


@dataclass(frozen=True, slots=True)
class Stats:
    """Averages over the minibatches of an update."""

    policy_loss: float
    value_loss: float
    entropy: float
    # KL divergence from the policy that acted, estimated as in http://joschu.net/blog/kl-approx.html (k3).
    approx_kl: float
    # The part of the steps whose probability ratio was clipped.
    clipfrac: float
    grad_norm: float
    # The part of the returns' variance that the acting critic predicted.
    explained_variance: float
    learning_rate: float
    # The number of minibatches that changed the parameters: not all of them if the KL divergence ended the update.
    minibatches: int


# differentiate(steps, advantages): put the gradient of the mean loss on these steps into the parameters' `grad`, and
# return the figures of `losses` as numbers. So the work can be done in the process that has the observations.
Differentiate = Callable[[Tensor, Tensor], dict[str, float]]


def update(
    policy: ActorCritic[Obs],
    optimizer: torch.optim.Optimizer,
    rollout: Rollout[Obs],
    config: PPOConfig,
    generator: torch.Generator,
    progress: float = 0.0,
    differentiate: Differentiate | None = None,
) -> Stats:
    """Improve the policy in `config.epochs` passes over the rollout. `progress` (0 to 1) sets the learning rate.

    Raises TrainingError if a loss or the gradient of a minibatch is not finite, before that minibatch changes the
    parameters.
    """

    def here(steps: Tensor, advantages: Tensor) -> dict[str, float]:
        terms = losses(policy, rollout.part(steps, advantages), config)
        terms["loss"].backward()  # type: ignore[no-untyped-call]
        return {name: float(term.detach()) for name, term in terms.items()}

    slope = differentiate or here
    rate = config.rate(progress)
    for group in optimizer.param_groups:
        group["lr"] = rate
    sums: dict[str, float] = {}
    figures: dict[str, float] = {}
    minibatches, stop = 0, False
    for _ in range(config.epochs):
        order = torch.randperm(len(rollout), generator=generator)
        for steps in torch.split(order, config.minibatch):
            advantages = rollout.advantages[steps]
            if config.normalize_advantages and steps.numel() > 1:
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            optimizer.zero_grad()
            figures = slope(steps, advantages)
            figures["grad_norm"] = float(
                nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm).detach()
            )
            for name, figure in figures.items():
                if not math.isfinite(figure):
                    raise TrainingError(f"{name} is {figure}: the policy gives numbers that are not finite")
            if config.target_kl is not None and figures["approx_kl"] > 1.5 * config.target_kl:
                stop = True
                break
            optimizer.step()
            minibatches += 1
            for name, figure in figures.items():
                sums[name] = sums.get(name, 0.0) + figure
        if stop:
            break
    mean = {name: total / minibatches for name, total in sums.items()} if minibatches else figures
    mean.pop("loss")
    return Stats(
        **mean,
        explained_variance=explained_variance(rollout.values, rollout.returns),
        learning_rate=rate,
        minibatches=minibatches,
    )


def losses(policy: ActorCritic[Obs], steps: Rollout[Obs], config: PPOConfig) -> dict[str, Tensor]:
    """Means over the steps of the loss, its terms, and measures of the policy's change, by their names in `Stats`."""
    distribution, values = policy.evaluate(steps.observations)
    log_ratio = distribution.log_prob(steps.actions) - steps.log_probs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    policy_loss = -torch.minimum(ratio * steps.advantages, clipped * steps.advantages).mean()
    errors = (values - steps.returns).square()
    if config.value_clip is not None:
        limited = steps.values + (values - steps.values).clamp(-config.value_clip, config.value_clip)
        errors = torch.maximum(errors, (limited - steps.returns).square())
    value_loss, entropy = errors.mean(), distribution.entropy().mean()
    with torch.no_grad():
        approx_kl = (ratio - 1 - log_ratio).mean()
        clipfrac = ((ratio - 1).abs() > config.clip).float().mean()
    return {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": approx_kl,
        "clipfrac": clipfrac,
        "loss": policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy,
    }


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns); 0 if the returns do not vary."""
    variance = float(returns.var(correction=0))
    return 1.0 - float((returns - values).var(correction=0)) / variance if variance > 1e-12 else 0.0


def orthogonal(layer: nn.Linear, gain: float = math.sqrt(2.0)) -> nn.Linear:
    """Give a layer orthogonal weights and a bias of 0. Usual gains: sqrt(2) inside, 0.01 for policies, 1 for values."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
