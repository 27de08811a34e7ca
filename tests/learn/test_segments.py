"""Distributions over ragged actions against torch's own, one segment at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical

from xrlflow.learn.segments import SegmentCategorical

COUNTS = [3, 1, 7, 2]


def ragged(seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(sum(COUNTS), generator=generator, dtype=torch.double)


def test_as_categorical_distributions_one_by_one() -> None:
    logits = ragged().requires_grad_()
    ours = SegmentCategorical.of(logits, COUNTS)
    theirs = [Categorical(logits=part) for part in logits.split(COUNTS)]
    actions = torch.tensor([2, 0, 4, 1])
    torch.testing.assert_close(ours.probs, torch.cat([d.probs for d in theirs]))
    torch.testing.assert_close(
        ours.log_prob(actions), torch.stack([d.log_prob(a) for d, a in zip(theirs, actions)])
    )
    torch.testing.assert_close(ours.entropy(), torch.stack([d.entropy() for d in theirs]))
    assert ours.mode().tolist() == [int(d.probs.argmax()) for d in theirs]
    weights = torch.tensor([1.0, 2.0, -0.5, 3.0], dtype=torch.double)

    def gradient(log_probs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad((weights * (log_probs + entropies)).sum(), logits)
        return found

    torch.testing.assert_close(
        gradient(ours.log_prob(actions), ours.entropy()),
        gradient(
            torch.stack([d.log_prob(a) for d, a in zip(theirs, actions)]),
            torch.stack([d.entropy() for d in theirs]),
        ),
    )


def test_samples_have_the_right_frequencies_and_depend_on_the_generator_alone() -> None:
    logits = ragged(1, 1.0)
    ours = SegmentCategorical.of(logits.repeat(4000), COUNTS * 4000)
    actions = ours.sample(torch.Generator().manual_seed(3)).reshape(4000, len(COUNTS))
    assert torch.equal(actions, ours.sample(torch.Generator().manual_seed(3)).reshape(4000, -1))
    for column, part in zip(actions.T, logits.split(COUNTS)):
        seen = torch.bincount(column, minlength=part.numel()) / 4000
        assert float((seen - part.softmax(0)).abs().max()) < 0.04


def test_masked_actions_are_never_taken() -> None:
    logits = torch.tensor([0.0, -math.inf, -math.inf, 0.0, 0.0, -math.inf])
    ours = SegmentCategorical.of(logits.repeat(500), [3, 3] * 500)
    actions = ours.sample(torch.Generator().manual_seed(0)).reshape(500, 2)
    assert set(actions[:, 0].tolist()) == {0}
    assert set(actions[:, 1].tolist()) == {0, 1}
    torch.testing.assert_close(ours.entropy()[:2], torch.tensor([0.0, math.log(2)]))


def test_large_logits_do_not_overflow() -> None:
    ours = SegmentCategorical.of(torch.tensor([1e4, 0.0, -1e4, -1e4 + 1]), [2, 2])
    torch.testing.assert_close(ours.probs, torch.tensor([1.0, 0.0, 0.26894142, 0.73105858]))
    assert ours.mode().tolist() == [0, 1]


def test_the_first_of_equals_is_the_mode() -> None:
    assert SegmentCategorical.of(torch.zeros(5), [2, 3]).mode().tolist() == [0, 0]


@pytest.mark.parametrize("counts", [[2, 2], [5], [3, 0]])
def test_refuses_segments_that_do_not_fit_or_are_empty(counts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"segment"):
        SegmentCategorical.of(torch.zeros(3), counts)


@pytest.mark.parametrize("action", [-1, 2])
def test_refuses_an_action_of_another_segment(action: int) -> None:
    with pytest.raises(IndexError):
        SegmentCategorical.of(torch.zeros(4), [2, 2]).log_prob(torch.tensor([action, 0]))
