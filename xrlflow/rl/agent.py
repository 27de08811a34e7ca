"""The agent: scores the candidates of a state and No-Op, and says what the state is worth.

A candidate is scored from the nodes that it matches, its rule, what it adds and removes, its features and the whole
graph. Its modelled gain enters the score directly, with a weight that is learned: an agent that knows nothing yet
does what greedy search does, and learns where that is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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

# To an agent that knows nothing, a gain of one percent is e^5 times as likely as No-Op, and a loss of one percent e^2
# times less: it must be tried now and then, or what lies behind it is never learned.
_TRUST = (10.0, 4.0)


class Agent(nn.Module):
    """A policy over the candidates of a state, then No-Op, for `xrlflow.learn.ppo`."""

    def __init__(self, vocabulary: Vocabulary, config: AgentConfig | None = None) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.config = config or AgentConfig()
        width = self.config.encoder.width
        self.encoder = Encoder(len(vocabulary.operators) + 1, self.config.encoder)
        # A rule is its family and what it changes, and what its own embedding adds, which begins at nothing. So a
        # rule that was not there in training is scored as one of its family.
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
        self.trust = nn.Parameter(torch.tensor(_TRUST))  # in gains, in losses
        self.stop = _head(2 * width, width, 0.01)
        self.value = _head(2 * width + GLOBAL_FEATURES, width, 1.0)

    def evaluate(self, observations: Sequence[Observation]) -> tuple[SegmentCategorical, Tensor]:
        """The distribution over each one's candidates, in their order, and then No-Op; values [B]."""
        return self(collate(observations), len(observations))  # type: ignore[no-any-return]

    def forward(self, data: RewriteData, graphs: int) -> tuple[SegmentCategorical, Tensor]:
        """The same for observations that are collated: `data` has `batch` [N] and `rule_batch` [C]."""
        assert data.rule_batch is not None
        owner = data.rule_batch
        encoded = self.encoder(data, graphs)
        hidden = self._candidates(data, encoded.nodes, self.from_graph(encoded.graphs)[owner])
        delta = data.candidate[:, DELTA]
        scores = self.score(hidden).squeeze(-1)
        scores = scores + self.trust[0] * torch.relu(-delta) - self.trust[1] * torch.relu(delta)
        # What can be done here, on the whole.
        pooled = _mean(hidden, owner, graphs)
        state = torch.cat([encoded.graphs, pooled], 1)
        stop = self.stop(state).squeeze(-1)
        values = self.value(torch.cat([state, data.globals], 1)).squeeze(-1)
        return _with_stop(scores, stop, owner), values

    def _candidates(self, data: RewriteData, nodes: Tensor, context: Tensor) -> Tensor:
        """Vectors of the candidates [C, width]; `context` [C, width] is what the graph has to say."""
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
        """An agent that also has embeddings for what a library has besides; it decides as this one does."""
        vocabulary = self.vocabulary.extended(library)
        return self if vocabulary == self.vocabulary else Agent.of(self.arrays().extended(library))

    def arrays(self, about: Mapping[str, Any] | None = None) -> Parameters:
        """Copies of the parameters. `about`: what else is to be known of the agent (how it was trained), as JSON."""
        return Parameters(self.vocabulary, self.config, to_arrays(self.state_dict()), dict(about or {}))

    @staticmethod
    def of(parameters: Parameters) -> Agent:
        agent = Agent(parameters.vocabulary, parameters.config)
        agent.load_state_dict(to_tensors(parameters.arrays))
        return agent

    def save(self, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> None:
        """Write parameters, configuration and vocabulary. Raises CheckpointError if that cannot be done."""
        self.arrays(about).save(path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Agent:
        """Raises CheckpointError for a file that is damaged, or is no agent of this version."""
        return Agent.of(Parameters.load(path))


class InTorch(Generic[Obs]):
    """A policy of torch that scores candidates, for `xrlflow.rl.strategy.agent_search`."""

    def __init__(self, policy: Policy[Obs]) -> None:
        self.policy = policy

    def log_probs(self, observations: Sequence[Obs]) -> npt.NDArray[np.float64]:
        """Log-probabilities of each one's candidates, in their order, and then of No-Op, one after the other."""
        with torch.inference_mode():
            distribution, _ = self.policy.evaluate(observations)
        return np.asarray(distribution.log_probs.double().numpy())


def _head(inputs: int, width: int, gain: float) -> nn.Sequential:
    return nn.Sequential(
        orthogonal(nn.Linear(inputs, width)), nn.Tanh(), orthogonal(nn.Linear(width, 1), gain)
    )


def _mean(rows: Tensor, owner: Tensor, count: int) -> Tensor:
    """The mean of the rows of each owner [count, width]; 0 for one without rows."""
    total = rows.new_zeros(count, rows.shape[1]).index_add(0, owner, rows)
    sizes = torch.bincount(owner, minlength=count).clamp(min=1)
    return total / sizes.unsqueeze(1)


def _with_stop(scores: Tensor, stop: Tensor, owner: Tensor) -> SegmentCategorical:
    """Scores [C] of candidates that belong to `owner` [C] (ascending), each owner's followed by its stop [B]."""
    count = stop.shape[0]
    sizes = torch.bincount(owner, minlength=count) + 1
    places = torch.cat([torch.arange(owner.shape[0]) + owner, sizes.cumsum(0) - 1])
    logits = stop.new_zeros(places.shape[0]).index_copy(0, places, torch.cat([scores, stop]))
    return SegmentCategorical.of(logits, sizes)
