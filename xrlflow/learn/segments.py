"""Categorical distributions over action sets of different sizes, one per segment of a flat vector of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SegmentCategorical:
    """B categorical distributions in one flat vector of log-probabilities [A], without padding.

    `counts` [B] is the number of actions of each distribution, in order. `segment` [A] is the distribution of each
    action. Actions are numbered from 0 within their segment.
    """

    log_probs: Tensor
    counts: Tensor
    segment: Tensor

    @staticmethod
    def of(logits: Tensor, counts: Tensor | Sequence[int]) -> SegmentCategorical:
        """The softmax of logits [A] within each segment. A logit of -inf masks its action.

        Raises ValueError if the counts do not add up to A, or if a segment is empty.
        """
        sizes = torch.as_tensor(counts, dtype=torch.long, device=logits.device)
        if logits.dim() != 1 or int(sizes.sum()) != logits.numel():
            raise ValueError(
                f"segments of {int(sizes.sum())} actions for logits of shape {tuple(logits.shape)}"
            )
        if sizes.numel() and int(sizes.min()) < 1:
            raise ValueError("a segment has no action")
        segment = torch.repeat_interleave(sizes, output_size=logits.numel())
        # Subtracting the maximum only avoids overflow. The softmax does not depend on the maximum, so it needs no
        # gradient.
        top = _largest(logits.detach(), segment, sizes.numel())
        shifted = logits - top[segment]
        total = logits.new_zeros(sizes.numel()).index_add(0, segment, shifted.exp())
        return SegmentCategorical(shifted - total.log()[segment], sizes, segment)

    @property
    def starts(self) -> Tensor:
        """The flat index of each segment's first action, [B]."""
        return self.counts.cumsum(0) - self.counts

    @property
    def probs(self) -> Tensor:
        """Probabilities [A]."""
        return self.log_probs.exp()

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probabilities [B] of one action per segment [B]. Raises IndexError if a segment lacks its action."""
        if bool(((actions < 0) | (actions >= self.counts)).any()):
            raise IndexError("an action is not one of its segment")
        return self.log_probs[self.starts + actions]

    def entropy(self) -> Tensor:
        """Entropies in nats [B]; an action of probability 0 adds nothing."""
        probs = self.log_probs.exp()
        terms = -probs * self.log_probs.clamp(min=torch.finfo(self.log_probs.dtype).min)
        return probs.new_zeros(self.counts.numel()).index_add(0, self.segment, terms)

    def mode(self) -> Tensor:
        """The likeliest action of each segment [B]; the first one if several are equally likely."""
        flat = self.log_probs.detach()
        size = flat.numel()
        top = _largest(flat, self.segment, self.counts.numel())
        index = torch.arange(size, device=flat.device)
        index = index.masked_fill(flat < top[self.segment], size)
        first = index.new_full((self.counts.numel(),), size).scatter_reduce(0, self.segment, index, "amin")
        return first - self.starts

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw one action of each segment [B] by inversion, from one uniform number per segment."""
        with torch.no_grad():
            cumulative = self.log_probs.double().exp().cumsum(0)
            ends = self.counts.cumsum(0)
            above = cumulative[ends - 1]
            below = torch.cat([above.new_zeros(1), above[:-1]])
            uniform = torch.rand(above.numel(), generator=generator, dtype=torch.double).to(above.device)
            # The first action whose cumulated probability exceeds the draw. This action never has probability 0.
            index = torch.searchsorted(cumulative, below + uniform * (above - below), right=True)
            return torch.minimum(index, ends - 1).clamp(min=self.starts) - self.starts


def _largest(values: Tensor, segment: Tensor, count: int) -> Tensor:
    """The largest value of each segment [count]; 0 if all its values are -inf, so that differences stay defined."""
    top = values.new_full((count,), float("-inf")).scatter_reduce(0, segment, values, "amax")
    return top.masked_fill(top == float("-inf"), 0.0)
