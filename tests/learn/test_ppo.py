"""PPO: advantages by hand, the clipped loss, a bandit and a corridor that it must learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from xrlflow.learn.ppo import (
    Episode,
    PPOConfig,
    Rollout,
    TrainingError,
    collect,
    explained_variance,
    gae,
    update,
)
from xrlflow.learn.segments import SegmentCategorical

pytestmark = pytest.mark.learns


class Table(nn.Module):
    """A logit for each action of each observation (an int), and a value. Observation i has i + 2 actions."""

    def __init__(self, observations: int = 3) -> None:
        super().__init__()
        self.logits = nn.ParameterList([nn.Parameter(torch.zeros(i + 2)) for i in range(observations)])
        self.values = nn.Parameter(torch.zeros(observations))

    def evaluate(self, observations: Sequence[int]) -> tuple[SegmentCategorical, Tensor]:
        logits = torch.cat([self.logits[i] for i in observations])
        return SegmentCategorical.of(logits, [i + 2 for i in observations]), self.values[list(observations)]


class Bandit:
    """One step: the last action of each observation pays 1."""

    def __init__(self, observation: int) -> None:
        self.observation = observation

    def reset(self, *, seed: int | None = None) -> tuple[int, dict[str, Any]]:
        return self.observation, {"seed": seed}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return self.observation, float(action == self.observation + 1), True, False, {"paid": True}


class Endless:
    """A reward of 1 for ever; every episode is cut off after three steps."""

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None) -> tuple[int, dict[str, Any]]:
        self.steps = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.steps % 3, 1.0, False, self.steps == 3, {}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_gae_by_hand() -> None:
    # gamma .5, lambda .5; the errors are 1 + .5*2 - 1 = 1, 2 + .5*3 - 2 = 1.5, 3 + .5*4 - 3 = 2.
    rewards, values = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])
    cut_off = gae(rewards, values, 4.0, 0.5, 0.5)
    np.testing.assert_allclose(cut_off, [1 + 0.25 * (1.5 + 0.25 * 2), 1.5 + 0.25 * 2, 2])
    # A termination is worth nothing: the last error is 3 - 3.
    np.testing.assert_allclose(gae(rewards, values, 0.0, 0.5, 0.5), [1 + 0.25 * 1.5, 1.5, 0])


def test_gae_with_lambda_1_is_the_return_less_the_value() -> None:
    rewards, values = np.array([1.0, -2.0, 4.0]), np.array([0.3, 0.7, -0.1])
    returns = [1 + 0.9 * (-2 + 0.9 * (4 + 0.9 * 5)), -2 + 0.9 * (4 + 0.9 * 5), 4 + 0.9 * 5]
    np.testing.assert_allclose(gae(rewards, values, 5.0, 0.9, 1.0), np.array(returns) - values)


def test_truncations_bootstrap_and_terminations_do_not() -> None:
    policy = Table()
    with torch.no_grad():
        policy.values.copy_(torch.tensor([7.0, 1.0, 1.0]))
    truncated = collect(policy, [Endless()], 1, generator())[0]
    assert (truncated.truncated, truncated.bootstrap, len(truncated)) == (True, 7.0, 3)
    terminated = collect(policy, [Bandit(0)], 1, generator())[0]
    assert (terminated.truncated, terminated.bootstrap) == (False, 0.0)
    config = PPOConfig(gamma=0.5, gae_lambda=1.0)
    np.testing.assert_allclose(
        Rollout.of([truncated], config).returns, [1 + 0.5 + 0.25 + 0.125 * 7, 3.25, 4.5]
    )
    np.testing.assert_allclose(Rollout.of([terminated], config).returns, terminated.rewards)


def test_collects_whole_episodes_and_no_more_than_it_must() -> None:
    environments = [Endless(), Endless(), Bandit(1)]
    episodes = collect(Table(), environments, 12, generator())
    assert all(len(e) == (3 if e.truncated else 1) for e in episodes)
    assert 12 <= sum(map(len, episodes)) <= 12 + 2 * 3
    again = collect(Table(), environments, 12, generator())
    assert [e.actions for e in episodes] == [e.actions for e in again]
    assert [e.log_probs for e in episodes] == [e.log_probs for e in again]


def test_learns_bandits_with_different_numbers_of_actions() -> None:
    policy = Table()
    config = PPOConfig(learning_rate=0.05, minibatch=32, entropy_weight=0.0, target_kl=None)
    optimizer, draw = config.optimizer(policy), generator()
    environments = [Bandit(i) for i in range(3)]
    before = np.mean([e.total for e in collect(policy, environments, 300, draw)])
    for _ in range(15):
        update(policy, optimizer, Rollout.of(collect(policy, environments, 96, draw), config), config, draw)
    after = np.mean([e.total for e in collect(policy, environments, 300, draw)])
    assert before < 0.5
    assert after > 0.95
    assert policy.evaluate([0, 1, 2])[0].mode().tolist() == [1, 2, 3]


def test_the_first_minibatch_moves_by_the_policy_gradient() -> None:
    """At ratio 1 nothing is clipped, and the gradient is that of -mean(advantage * log_prob)."""
    policy = Table()
    episodes = collect(policy, [Bandit(0), Bandit(1)], 40, generator())
    config = PPOConfig(
        epochs=1, minibatch=1000, value_weight=0.0, entropy_weight=0.0, max_grad_norm=1e9, final_learning_rate=1.0,
        normalize_advantages=False,
    )  # fmt: skip
    rollout = Rollout.of(episodes, config)
    distribution, _ = policy.evaluate(rollout.observations)
    loss = -(rollout.advantages * distribution.log_prob(rollout.actions)).mean()
    expected = torch.autograd.grad(loss, list(policy.logits)[:2])
    before = [p.detach().clone() for p in policy.logits]
    optimizer = torch.optim.SGD(policy.parameters(), lr=123.0)  # the schedule replaces the rate
    stats = update(policy, optimizer, rollout, config, generator())
    for old, new, slope in zip(before, policy.logits, expected):
        torch.testing.assert_close(new.detach(), old - config.learning_rate * slope)
    assert stats.approx_kl == pytest.approx(0.0, abs=1e-7)
    assert stats.clipfrac == 0.0
    assert stats.minibatches == 1


def test_a_step_that_went_far_enough_has_no_gradient() -> None:
    policy = Table(1)
    config = PPOConfig(
        epochs=1, value_weight=0.0, entropy_weight=0.0, target_kl=None, normalize_advantages=False
    )
    # The acting policy took action 1 with probability .25, now .5: ratio 2, beyond the clip, and it was good.
    episode = Episode([0], [1], [float(np.log(0.25))], [0.0], [1.0])
    update(policy, config.optimizer(policy), Rollout.of([episode], config), config, generator())
    assert torch.equal(policy.logits[0], torch.zeros(2))
    # A bad action has to go back: the clip does not hold for it.
    update(
        policy,
        config.optimizer(policy),
        Rollout.of([replace(episode, rewards=[-1.0])], config),
        config,
        generator(),
    )
    assert float(policy.logits[0][1].detach()) < 0


def test_kl_ends_the_update() -> None:
    policy = Table(1)
    config = PPOConfig(target_kl=0.01)
    episode = Episode([0], [1], [float(np.log(0.01))], [0.0], [1.0])
    stats = update(policy, config.optimizer(policy), Rollout.of([episode], config), config, generator())
    assert stats.minibatches == 0
    assert stats.approx_kl > 1.0
    assert torch.equal(policy.logits[0], torch.zeros(2))


def test_value_clipping_stops_values_that_moved_far() -> None:
    policy = Table(1)
    config = PPOConfig(epochs=1, value_clip=0.5, entropy_weight=0.0, max_grad_norm=1e9, gae_lambda=1.0)
    with torch.no_grad():
        policy.values.fill_(0.9)
    # The old value was 0, the return 2: the value has moved further than .5 towards it.
    episode = Episode([0], [1], [float(np.log(0.5))], [0.0], [2.0])
    rollout = Rollout.of([episode], config)
    stats = update(policy, config.optimizer(policy), rollout, config, generator())
    assert stats.value_loss == pytest.approx(1.5**2)
    assert float(policy.values.detach()[0]) == pytest.approx(0.9)


def test_the_learning_rate_falls_linearly() -> None:
    config = PPOConfig(learning_rate=1.0, final_learning_rate=0.2)
    assert [config.rate(p) for p in (-1.0, 0.0, 0.5, 1.0, 2.0)] == pytest.approx([1.0, 1.0, 0.6, 0.2, 0.2])


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.zeros(3), returns) == 0.0
    assert explained_variance(returns, torch.ones(3)) == 0.0


@pytest.mark.parametrize("broken", ["logits", "values"])
def test_a_loss_that_is_no_number_is_an_error_and_spoils_nothing(broken: str) -> None:
    policy = Table(1)
    config = PPOConfig()
    rollout = Rollout.of(collect(policy, [Bandit(0)], 8, generator()), config)
    with torch.no_grad():
        (policy.logits[0] if broken == "logits" else policy.values)[0] = float("nan")
    before = [p.detach().clone() for p in policy.parameters()]
    with pytest.raises(
        TrainingError, match="policy_loss is nan" if broken == "logits" else "value_loss is nan"
    ):
        update(policy, config.optimizer(policy), rollout, config, generator())
    for old, new in zip(before, policy.parameters()):
        assert torch.equal(old.nan_to_num(), new.detach().nan_to_num())


def test_nothing_to_learn_from_is_an_error() -> None:
    with pytest.raises(TrainingError, match="no steps"):
        Rollout.of([], PPOConfig())


@pytest.mark.parametrize(
    ("field", "value"), [("minibatch", 0), ("gamma", 1.5), ("learning_rate", float("nan"))]
)
def test_refuses_a_configuration_that_makes_no_sense(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        PPOConfig(**{field: value})


@pytest.mark.parametrize("name", ["rewards", "values", "log_probs"])
def test_collected_figures_that_are_not_finite_are_an_error(name: str) -> None:
    episode: Episode[int] = Episode([0], [1], [-0.7], [0.0], [1.0])
    getattr(episode, name)[0] = float("nan")
    with pytest.raises(TrainingError, match=f"{name} of the collected steps"):
        Rollout.of([episode], PPOConfig())
