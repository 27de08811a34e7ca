"""The agent: it scores the candidates of a state and the action No-Op (end the episode), and estimates the value of
the state.

The score of a candidate depends on the nodes that it matches, its rule, the operators that it adds and removes, its
features and the whole graph. Its modelled gain is added to the score with a learned weight. So an untrained agent acts
like greedy search, and training corrects it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xrlflow.learn.ppo import Policy, orthogonal
from xrlflow.learn.segments import SegmentCategorical
from xrlflow.learn.tensors import to_arrays, to_tensors
from xrlflow.rewrite import Library
from xrlflow.rl.data import RewriteData, collate
from xrlflow.rl.encoder import Encoder
from xrlflow.rl.features import (
    CANDIDATE_FEATURES,
    CHANGE_FEATURES,
    DELTA,
    GLOBAL_FEATURES,
    Observation,
    Vocabulary,
)
from xrlflow.rl.parameters import AgentConfig, Parameters

Obs = TypeVar("Obs")

# Weights of modelled gains and losses before training. With these weights, a gain of one percent is e^5 times as
# likely as No-Op, and a loss of one percent is e^2 times less likely. Losses must be tried now and then, or the agent
# never learns to cross valleys.
_TRUST = (10.0, 4.0)


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """The input of an agent's decision: B states with C candidates in total.

    In imagined states, one row can represent several candidates of a rule.
    """

    graphs: Tensor  # [B, width]: vectors of the states' graphs
    candidates: Tensor  # [C, width]: vectors of the candidates
    owner: Tensor  # [C]: the state of each candidate, ascending
    delta: Tensor  # [C]: modelled deltas of the cost, squashed (`features.squash`)
    globals: Tensor  # [B, GLOBAL_FEATURES]
    often: Tensor | None = None  # [C]: the number of candidates that each row represents; None: one per row


class Agent(nn.Module):
    """A policy for `xrlflow.learn.ppo`. Its actions are the candidates of a state and, last, No-Op."""

    def __init__(self, vocabulary: Vocabulary, config: AgentConfig | None = None) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.config = config or AgentConfig()
        width = self.config.encoder.width
        self.encoder = Encoder(len(vocabulary.operators) + 1, self.config.encoder)
        # A rule is described by its family, its change and an embedding of its own, which starts at zero. So a rule
        # that did not occur in training is scored by its family and its change.
        self.rule = nn.Embedding(len(vocabulary.rules) + 1, width, padding_idx=0)
        nn.init.zeros_(self.rule.weight)
        self.family = nn.Embedding(len(vocabulary.families) + 1, width, padding_idx=0)
        self.changed = nn.Embedding(len(vocabulary.operators) + 1, width, padding_idx=0)
        self.of_change = nn.Linear(CHANGE_FEATURES, width)
        self.from_change = nn.Linear(width, width, bias=False)
        self.from_role = nn.Linear(width, width, bias=False)
        self.from_graph = nn.Linear(width, width, bias=False)
        self.of_candidate = nn.Linear(CANDIDATE_FEATURES, width)
        self.candidate = orthogonal(nn.Linear(width, width))
        self.score = orthogonal(nn.Linear(width, 1), 0.01)
        self.trust = nn.Parameter(torch.tensor(_TRUST))  # for gains, for losses
        self.stop = _head(2 * width, width, 0.01)
        self.value = _head(2 * width + GLOBAL_FEATURES, width, 1.0)

    def evaluate(self, observations: Sequence[Observation]) -> tuple[SegmentCategorical, Tensor]:
        """For each of B observations: the distribution over its candidates and, last, No-Op; and its value [B]."""
        return self(collate(observations), len(observations))  # type: ignore[no-any-return]

    def forward(self, data: RewriteData, graphs: int) -> tuple[SegmentCategorical, Tensor]:
        """The same as `evaluate`, for collated observations. `data` has `batch` [N] and `rule_batch` [C]; `graphs` is
        B.
        """
        return self.decide(self.embed(data, graphs))

    def embed(self, data: RewriteData, graphs: int) -> Embedded:
        """The vectors on which decisions depend."""
        assert data.rule_batch is not None
        owner = data.rule_batch
        encoded = self.encoder(data, graphs)
        hidden = self._candidates(data, encoded.nodes, self.from_graph(encoded.graphs)[owner])
        return Embedded(encoded.graphs, hidden, owner, data.candidate[:, DELTA], data.globals)

    def decide(self, embedded: Embedded) -> tuple[SegmentCategorical, Tensor]:
        """For embedded observations: the distributions over candidates and, last, No-Op; and the values."""
        scores = self.score(embedded.candidates).squeeze(-1)
        scores = (
            scores + self.trust[0] * torch.relu(-embedded.delta) - self.trust[1] * torch.relu(embedded.delta)
        )
        if embedded.often is not None:
            scores = scores + embedded.often.log()
        # A summary of all candidates of each state.
        pooled = _mean(embedded.candidates, embedded.owner, embedded.graphs.shape[0], embedded.often)
        state = torch.cat([embedded.graphs, pooled], 1)
        stop = self.stop(state).squeeze(-1)
        values = self.value(torch.cat([state, embedded.globals], 1)).squeeze(-1)
        return _with_stop(scores, stop, embedded.owner), values

    def _candidates(self, data: RewriteData, nodes: Tensor, context: Tensor) -> Tensor:
        """Vectors of the candidates [C, width]. `context` [C, width] comes from each candidate's graph."""
        count = data.rule.shape[0]
        role = _mean(nodes[data.role_node], data.role_candidate, count)
        parts = torch.relu(self.of_change(data.change) + self.changed(data.change_op))
        change = parts.new_zeros(count, parts.shape[1]).index_add(0, data.change_candidate, parts)
        first = torch.relu(
            self.from_role(role)
            + self.from_change(torch.tanh(change))
            + self.of_candidate(data.candidate)
            + self.rule(data.rule)
            + self.family(data.family)
            + context
        )
        return torch.relu(self.candidate(first))

    def extended(self, library: Library) -> Agent:
        """The agent with added embeddings for the new rules and operators of a library. Its decisions stay the same."""
        vocabulary = self.vocabulary.extended(library)
        return self if vocabulary == self.vocabulary else Agent.of(self.arrays().extended(library))

    def arrays(self, about: Mapping[str, Any] | None = None) -> Parameters:
        """Copy the parameters. `about`: further facts about the agent, such as its training, as JSON."""
        return Parameters(self.vocabulary, self.config, to_arrays(self.state_dict()), dict(about or {}))

    @staticmethod
    def of(parameters: Parameters) -> Agent:
        agent = Agent(parameters.vocabulary, parameters.config)
        agent.load_state_dict(to_tensors(parameters.arrays))
        return agent

    def save(self, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> None:
        """Write parameters, configuration and vocabulary. Raises CheckpointError if the file cannot be written."""
        self.arrays(about).save(path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Agent:
        """Read an agent. Raises CheckpointError if the file is damaged or is no agent of this version."""
        return Agent.of(Parameters.load(path))


class InTorch(Generic[Obs]):
    """Adapts a torch policy to searches: as the scorer of `strategy.agent_search`, and as the judge of
    `mcts.tree_search`.
    """

    def __init__(self, policy: Policy[Obs]) -> None:
        self.policy = policy

    def log_probs(self, observations: Sequence[Obs]) -> npt.NDArray[np.float64]:
        """For each observation, the log-probabilities of its candidates and, last, of No-Op, all in one flat array."""
        return self.evaluate(observations)[0]

    def evaluate(
        self, observations: Sequence[Obs]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The log-probabilities, as `log_probs` returns them, and the values [B]."""
        with torch.inference_mode():
            distribution, values = self.policy.evaluate(observations)
        return np.asarray(distribution.log_probs.double().numpy()), np.asarray(values.double().numpy())


def _head(inputs: int, width: int, gain: float) -> nn.Sequential:
    return nn.Sequential(
        orthogonal(nn.Linear(inputs, width)), nn.Tanh(), orthogonal(nn.Linear(width, 1), gain)
    )


def _mean(rows: Tensor, owner: Tensor, count: int, often: Tensor | None = None) -> Tensor:
    """The mean of the rows of each owner [count, width]; 0 for an owner without rows. Each row counts as often as
    `often` [R] states.
    """
    if often is not None:
        rows = rows * often.unsqueeze(1)
        sizes = rows.new_zeros(count).index_add(0, owner, often).clamp(min=1e-9)
    else:
        sizes = torch.bincount(owner, minlength=count).clamp(min=1)
    total = rows.new_zeros(count, rows.shape[1]).index_add(0, owner, rows)
    return total / sizes.unsqueeze(1)


def _with_stop(scores: Tensor, stop: Tensor, owner: Tensor) -> SegmentCategorical:
    """For each of B owners, the distribution over its candidates and, last, No-Op.

    `scores` [C] are those of the candidates, `stop` [B] those of No-Op; `owner` [C] is ascending.
    """
    count = stop.shape[0]
    sizes = torch.bincount(owner, minlength=count) + 1
    positions = torch.cat([torch.arange(owner.shape[0]) + owner, sizes.cumsum(0) - 1])
    logits = stop.new_zeros(positions.shape[0]).index_copy(0, positions, torch.cat([scores, stop]))
    return SegmentCategorical.of(logits, sizes)
