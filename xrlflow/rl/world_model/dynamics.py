"""The world model: the transition dynamics of rewriting, learned in the agent's latent space.

RLFlow (Parker, Alabed, Yoneki, 2022) and World Models (Ha and Schmidhuber, 2018): the latent z of a state is the
output of the agent's encoder for its graph and candidates. A recurrent network (MDN-RNN) predicts the next latent as a
mixture of Gaussians, and the saving of the step. From a latent, a decoder predicts which rules have candidates, the
number of these, their mean vector and the delta of the best, so that an imagined state needs no engine. The encoder
learns through the decoder and the savings. The latents that the mixture has to predict are constants in its loss;
otherwise the encoder would learn to make all latents equal.

With one mixture component and temperature 0, latents are deterministic (as in MuZero, Schrittwieser et al., 2020).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

from xrlflow.learn.ppo import orthogonal
from xrlflow.rl.agent import Embedded
from xrlflow.rl.features import GLOBAL_FEATURES

# The least and the greatest logarithm of a Gaussian's standard deviation.
_NARROW, _WIDE = -5.0, 1.0
# The maximum number of imagined candidates of a rule.
_MANY = 1e5
# For a rule that did not occur in training: the logit of having candidates.
_UNKNOWN = -4.0


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """The size of a world model. `width` is the encoder's; `rules` the number of rules, the unknown one included."""

    width: int
    rules: int
    hidden: int = 256
    mixtures: int = 8

    @property
    def latent(self) -> int:
        """The size of a latent: the vector of the graph, and the mean of its candidates' vectors."""
        return 2 * self.width


# (h, c) of the LSTM, each [B, hidden].
Memory = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Offers:
    """The predictions of a decoder about R rules, from B latents."""

    present: Tensor  # [B, R]: logits of having a candidate
    often: Tensor  # [B, R]: log(1 + number of candidates)
    delta: Tensor  # [B, R]: squashed modelled delta of the best candidate
    hidden: Tensor
    """[B, hidden]: the input of `World.vectors`, which computes the mean vector of a rule's candidates on demand."""
    globals: Tensor  # [B, GLOBAL_FEATURES]


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """The predictions for B steps, with K Gaussians for the next latent."""

    logits: Tensor  # [B, K]
    means: Tensor  # [B, K, latent]
    deviations: Tensor  # [B, K, latent]: logarithms of standard deviations
    saving: Tensor  # [B]: the fraction of the initial cost that the step saves, scaled like rewards
    end: Tensor  # [B]: logits of the end of the episode

    def log_likelihood(self, latents: Tensor) -> Tensor:
        """The log-likelihood [B] of these next latents [B, latent], divided by the number of dimensions."""
        scaled = (latents.unsqueeze(1) - self.means) / self.deviations.exp()
        gauss = -0.5 * scaled.square() - self.deviations - 0.5 * math.log(2 * math.pi)
        total = torch.logsumexp(torch.log_softmax(self.logits, 1) + gauss.sum(2), 1)
        return total / latents.shape[1]

    def sample(self, temperature: float, generator: torch.Generator | None = None) -> Tensor:
        """Draw the next latents [B, latent]. At temperature 0 the results are the means of the likeliest Gaussians.

        Otherwise the temperature divides the logits, and its square root multiplies the deviations (Ha and
        Schmidhuber, section 4).
        """
        rows = torch.arange(len(self.logits))
        if temperature == 0:
            return self.means[rows, self.logits.argmax(1)]
        chances = torch.softmax(self.logits / temperature, 1)
        component = torch.multinomial(chances, 1, generator=generator).squeeze(1)
        noise = torch.randn(self.means.shape[0], self.means.shape[2], generator=generator)
        return (
            self.means[rows, component]
            + math.sqrt(temperature) * self.deviations[rows, component].exp() * noise
        )


class World(nn.Module):
    """Predicts transitions of latents, and decodes latents."""

    def __init__(self, config: WorldConfig) -> None:
        super().__init__()
        self.config = config
        width, hidden, latent = config.width, config.hidden, config.latent
        # An action is encoded as the vector of its candidate, the candidate's modelled delta, and 1 for No-Op.
        self.cell = nn.LSTMCell(latent + width + 1, hidden)
        self.mixture = nn.Linear(hidden, config.mixtures * (1 + 2 * latent))
        self.saving = orthogonal(nn.Linear(hidden + 1, 1), 0.1)
        self.end = orthogonal(nn.Linear(hidden, 1), 0.1)
        self.read = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        # For each rule: the logit of having candidates, their number, and the delta of the best candidate.
        self.offer = nn.Linear(hidden, 3 * config.rules)
        self.globals = nn.Linear(hidden, GLOBAL_FEATURES)
        self.rule = nn.Embedding(config.rules, width)
        self.of_hidden = nn.Linear(hidden, width)
        self.vector = nn.Linear(width, width)

    @staticmethod
    def of(config: WorldConfig, tensors: Mapping[str, Tensor]) -> World:
        """A world model with the parameters `tensors`. It predicts no candidates for rules that these parameters
        lack."""
        world = World(config)
        wide = dict(tensors)
        for name in ("rule.weight", "offer.weight", "offer.bias"):
            old = tensors[name]
            wide[name] = torch.zeros_like(world.get_parameter(name).detach())
            wide[name][: len(old)] = old
        wide["offer.bias"][len(tensors["offer.bias"]) :: 3] = _UNKNOWN
        world.load_state_dict(wide)
        return world

    def memory(self, count: int) -> Memory:
        """The initial memory of the LSTM for B episodes: zeros."""
        return (torch.zeros(count, self.config.hidden), torch.zeros(count, self.config.hidden))

    def step(
        self, latents: Tensor, actions: Tensor, deltas: Tensor, memory: Memory
    ) -> tuple[Forecast, Memory]:
        """Predict B steps from latents [B, latent], vectors of the chosen candidates [B, width] and their squashed
        modelled deltas [B].
        """
        price = deltas.unsqueeze(1)
        h, c = self.cell(torch.cat([latents, actions, price], 1), memory)
        count, latent = self.config.mixtures, self.config.latent
        raw = self.mixture(h)
        logits, parameters = raw[:, :count], raw[:, count:].view(-1, count, 2 * latent)
        # A substitution changes a latent little, so the network predicts the change.
        means = latents.unsqueeze(1) + parameters[..., :latent]
        deviations = parameters[..., latent:].clamp(_NARROW, _WIDE)
        saving = self.saving(torch.cat([h, price], 1)).squeeze(1)
        return Forecast(logits, means, deviations, saving, self.end(h).squeeze(1)), (h, c)

    def decode(self, latents: Tensor) -> Offers:
        """The predictions about the candidates of every rule, from latents [B, latent]."""
        hidden = self.read(latents)
        present, often, delta = self.offer(hidden).view(len(latents), -1, 3).unbind(2)
        return Offers(present, often, delta, hidden, self.globals(hidden))

    def vectors(self, hidden: Tensor, rule: Tensor) -> Tensor:
        """The mean vectors [N, width] of the candidates of N rules, each in a state with `hidden` [N, hidden]."""
        vectors: Tensor = self.vector(torch.relu(self.of_hidden(hidden) + self.rule(rule)))
        return vectors

    def imagined(self, latents: Tensor, offers: Offers, threshold: float = 0.5) -> tuple[Embedded, Tensor]:
        """Imagined states as inputs of an agent, and the rule of each row of candidates.

        A rule whose probability of having candidates is at least `threshold` has one row, which represents the
        predicted number of candidates.
        """
        width = self.config.width
        owner, rule = torch.nonzero(torch.sigmoid(offers.present) >= threshold, as_tuple=True)
        often = torch.expm1(offers.often[owner, rule]).clamp(1.0, _MANY)
        embedded = Embedded(
            latents[:, :width],
            self.vectors(offers.hidden[owner], rule),
            owner,
            offers.delta[owner, rule],
            offers.globals,
            often,
        )
        return embedded, rule


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """The targets of a decoder for B states."""

    present: Tensor  # [B, R]: 0 or 1
    often: Tensor
    delta: Tensor
    vectors: Tensor  # [B, R, width]: mean vectors of the candidates
    globals: Tensor  # this field and those without a comment are as in `Offers`

    @staticmethod
    def of(embedded: Embedded, rule: Tensor, rules: int) -> Truth:
        """The targets from embedded observations; `rule` [C] is the rule of each candidate."""
        count, width = embedded.graphs.shape[0], embedded.candidates.shape[1]
        index = embedded.owner * rules + rule
        numbers = torch.bincount(index, minlength=count * rules).float()
        total = embedded.candidates.new_zeros(count * rules, width).index_add(
            0, index, embedded.candidates.detach()
        )
        best = embedded.delta.new_full((count * rules,), math.inf).scatter_reduce(
            0, index, embedded.delta, "amin"
        )
        return Truth(
            (numbers > 0).float().view(count, rules),
            torch.log1p(numbers).view(count, rules),
            torch.where(numbers > 0, best, 0.0).view(count, rules),
            (total / numbers.clamp(min=1).unsqueeze(1)).view(count, rules, width),
            embedded.globals,
        )

    def losses(self, offers: Offers, vectors: Tensor) -> dict[str, Tensor]:
        """The loss of a decoder, by part; `vectors` [N, width]: its vectors for the N rules that have candidates.

        For rules without candidates, only the predicted presence counts.
        """
        there = self.present > 0
        return {
            "present": binary_cross_entropy_with_logits(offers.present, self.present),
            "often": smooth_l1_loss(offers.often[there], self.often[there]),
            "delta": smooth_l1_loss(offers.delta[there], self.delta[there], beta=0.1),
            "vectors": smooth_l1_loss(vectors, self.vectors[there]),
            "globals": smooth_l1_loss(offers.globals, self.globals),
        }


def latent_of(embedded: Embedded) -> Tensor:
    """The latents [B, latent] of embedded observations."""
    count = embedded.graphs.shape[0]
    total = embedded.candidates.new_zeros(count, embedded.candidates.shape[1]).index_add(
        0, embedded.owner, embedded.candidates
    )
    sizes = torch.bincount(embedded.owner, minlength=count).clamp(min=1)
    return torch.cat([embedded.graphs, total / sizes.unsqueeze(1)], 1)
