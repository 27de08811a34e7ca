"""Factored actions against torch's own distributions, and learned by PPO."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent

from xrlflow.learn.factored import FactoredCategorical
from xrlflow.learn.ppo import Episode, PPOConfig, Rollout, update


def logits() -> Tensor:
    return torch.randn((5, 4, 3), generator=torch.Generator().manual_seed(0), dtype=torch.double)


def test_as_independent_categorical_distributions() -> None:
    ours = FactoredCategorical.of(logits(), torch.ones(5, 4, dtype=torch.bool))
    theirs = Independent(Categorical(logits=logits()), 1)
    actions = ours.sample(torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())


def test_factors_that_are_not_used_count_for_nothing() -> None:
    used = torch.tensor([[True, False, True, False]]).expand(5, 4)
    ours = FactoredCategorical.of(logits(), used, idle=1)
    few = FactoredCategorical.of(logits()[:, ::2], torch.ones(5, 2, dtype=torch.bool))
    actions = ours.sample(torch.Generator().manual_seed(1))
    assert bool((actions[:, 1::2] == 1).all())
    torch.testing.assert_close(ours.log_prob(actions), few.log_prob(actions[:, ::2]))
    torch.testing.assert_close(ours.entropy(), few.entropy())


def test_samples_have_the_right_frequencies_and_depend_on_the_generator_alone() -> None:
    ours = FactoredCategorical.of(logits()[:1].expand(8000, 4, 3), torch.ones(8000, 4, dtype=torch.bool))
    actions = ours.sample(torch.Generator().manual_seed(3))
    assert torch.equal(actions, ours.sample(torch.Generator().manual_seed(3)))
    seen = nn.functional.one_hot(actions, 3).double().mean(0)
    assert float((seen - logits()[0].softmax(-1)).abs().max()) < 0.03


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="used factors of shape"):
        FactoredCategorical.of(logits(), torch.ones(5, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="idle choice 3"):
        FactoredCategorical.of(logits(), torch.ones(5, 4, dtype=torch.bool), idle=3)


class Table(nn.Module):
    """The same two choices of three, whatever is observed."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2, 3))
        self.value = nn.Parameter(torch.zeros(()))

    def evaluate(self, observations: Sequence[int]) -> tuple[FactoredCategorical, Tensor]:
        size = len(observations)
        used = torch.ones(size, 2, dtype=torch.bool)
        return FactoredCategorical.of(self.logits.expand(size, 2, 3), used), self.value.expand(size)


def test_ppo_learns_factored_actions() -> None:
    """A bandit that pays for the first factor's choice 2 and the second's choice 0."""
    policy, generator = Table(), torch.Generator().manual_seed(0)
    config = PPOConfig(learning_rate=0.05, entropy_weight=0.0, target_kl=None)
    optimizer = config.optimizer(policy)
    for _ in range(25):
        with torch.no_grad():
            distribution, values = policy.evaluate([0] * 64)
            actions = distribution.sample(generator)
            log_probs = distribution.log_prob(actions)
        episodes = [
            Episode([0], [a], [p], [v], [float(a[0] == 2) + float(a[1] == 0)])
            for a, p, v in zip(actions.tolist(), log_probs.tolist(), values.tolist())
        ]
        update(policy, optimizer, Rollout.of(episodes, config), config, generator)
    with torch.no_grad():
        best = policy.evaluate([0])[0].log_probs[0].exp()
    assert float(best[0, 2]) > 0.95
    assert float(best[1, 0]) > 0.95
