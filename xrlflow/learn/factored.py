"""Actions of several independent choices: one categorical distribution per factor of an action."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FactoredCategorical:
    """B distributions over actions of K factors with A choices each: log-probabilities [B, K, A].

    `used` [B, K] says which factors count. An unused factor always takes choice `idle`, and adds nothing to
    probabilities or entropies.
    """

    log_probs: Tensor
    used: Tensor
    idle: int

    @staticmethod
    def of(logits: Tensor, used: Tensor, idle: int = 0) -> FactoredCategorical:
        """The softmax of each factor's logits. Raises ValueError if the shapes do not fit."""
        if logits.dim() != 3 or used.shape != logits.shape[:2] or not 0 <= idle < logits.shape[2]:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)}, used factors of shape {tuple(used.shape)}, idle choice {idle}"
            )
        return FactoredCategorical(logits.log_softmax(-1), used, idle)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probabilities [B] of actions [B, K]."""
        each = self.log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return each.masked_fill(~self.used, 0.0).sum(-1)

    def entropy(self) -> Tensor:
        """Entropies [B] in nats, summed over the used factors."""
        each = -(self.log_probs.exp() * self.log_probs).sum(-1)
        return each.masked_fill(~self.used, 0.0).sum(-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw one action per distribution [B, K] by inversion."""
        with torch.no_grad():
            cumulative = self.log_probs.double().exp().cumsum(-1)
            uniform = torch.rand(self.used.shape, generator=generator, dtype=torch.double)
            choices = (cumulative < (uniform.to(cumulative.device) * cumulative[..., -1]).unsqueeze(-1)).sum(
                -1
            )
            return choices.clamp(max=self.log_probs.shape[-1] - 1).masked_fill(~self.used, self.idle)
