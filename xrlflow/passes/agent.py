"""Agents that choose passes: neural networks whose inputs are the observations of `PassEnv`, and their files.

There are two networks. Both see the figures of the module, its opcodes, its functions, the passes applied so far and
the mask; the second one also sees the graph of instructions. An agent works only with the passes and opcodes that it
was created for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xrlflow.learn.ppo import orthogonal
from xrlflow.learn.segments import SegmentCategorical
from xrlflow.learn.states import check_weights
from xrlflow.learn.tensors import to_arrays, to_tensors
from xrlflow.passes.compiler import Compiler
from xrlflow.passes.environment import COMPUTATIONS, FIGURES, HISTORY, Configuration, Masking, Observation
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint

KIND = "passes agent"
# Factors that scale the figures (log2 of operations, bytes and flops, relative operations, remaining horizon, log2 of
# functions) to about 1; and the factor of the logarithms of counts, which scales a count of 255 to 1.
_FIGURES = (0.1, 0.04, 0.04, 1.0, 1.0, 0.2)
_COUNTS = 0.125
_RECENT = 8  # the size of the embedding of a pass in the history
# Limits on the sizes in an agent's configuration.
_MOST = {"width": 4096, "graph_width": 1024, "rounds": 64, "horizon": 1_000_000}
_NODES, _KINDS = 6, 8  # features of an instruction; kinds of edges (see `ModuleGraph`)


class Network(Enum):
    """What an agent sees of a module."""

    COUNTS = "counts"  # histograms
    GRAPH = "graph"  # histograms, and the instructions with their edges


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The sizes of an agent's network, and the rules of the episodes for which it is trained."""

    network: Network = Network.COUNTS
    width: int = 128  # units of each hidden layer
    graph_width: int = 32  # elements of the vector of an instruction
    rounds: int = 3  # rounds of messages between instructions
    masking: Masking = Masking.KNOWN
    horizon: int = 25

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid size, which a damaged file may have."""
        for name, limit in _MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise ValueError(f"an agent's {name} is an integer of 1 to {limit}, not {value!r}")

    def episode(self, **changes: Any) -> Configuration:
        """The configuration of environments for this agent, with `changes`."""
        graph = self.network is Network.GRAPH
        return Configuration(horizon=self.horizon, masking=self.masking, graph=graph, **changes)


class Agent(nn.Module):
    """A policy for `xrlflow.learn.ppo` with a critic. Its actions are P passes and the action "stop"."""

    def __init__(
        self, passes: Sequence[str], opcodes: Sequence[str], config: AgentConfig = AgentConfig()
    ) -> None:
        super().__init__()
        self.passes, self.opcodes, self.config = tuple(passes), tuple(opcodes), config
        self.about: dict[str, Any] = {}
        count, width = len(self.passes), config.width
        self.recent = nn.Embedding(count + 1, _RECENT)
        inputs = FIGURES + len(self.opcodes) + 1 + COMPUTATIONS + count + HISTORY * _RECENT + count + 1
        self.graph: GraphEncoder | None = None
        if config.network is Network.GRAPH:
            self.graph = GraphEncoder(len(self.opcodes) + 1, config.graph_width, config.rounds)
            inputs += 2 * config.graph_width
        self.body = nn.Sequential(
            orthogonal(nn.Linear(inputs, width)), nn.Tanh(), orthogonal(nn.Linear(width, width)), nn.Tanh()
        )
        self.policy = orthogonal(nn.Linear(width, count + 1), 0.01)
        self.value = orthogonal(nn.Linear(width, 1), 1.0)

    def evaluate(self, observations: Sequence[Observation]) -> tuple[SegmentCategorical, Tensor]:
        """For B observations: the distributions over the passes and "stop", and the values of the critic [B]."""
        logits, values = self.scores(observations)
        counts = torch.full((len(observations),), logits.shape[1])
        return SegmentCategorical.of(logits.flatten(), counts), values

    def scores(self, observations: Sequence[Observation]) -> tuple[Tensor, Tensor]:
        """For B observations: the scores of the passes and "stop" [B, P + 1], -inf where the mask is 0, and the
        critic's values [B].
        """
        hidden = self.body(self._collated(observations))
        allowed = torch.from_numpy(np.stack([o["action_mask"] for o in observations])).bool()
        return self.policy(hidden).masked_fill(~allowed, float("-inf")), self.value(hidden).squeeze(-1)

    def _collated(self, observations: Sequence[Observation]) -> Tensor:
        """The observations as the input of the network [B, ...]."""

        def stacked(name: str) -> Tensor:
            return torch.from_numpy(np.stack([o[name] for o in observations]))

        parts = [
            stacked("figures") * torch.tensor(_FIGURES),
            stacked("opcodes") * _COUNTS,
            stacked("computations") * _COUNTS,
            stacked("applied"),
            self.recent(stacked("history")).flatten(1),
            stacked("action_mask").float(),
        ]
        if self.graph is not None:
            parts.append(self.graph([o["graph"] for o in observations]))
        return torch.cat(parts, 1)

    def fits(self, compiler: Compiler) -> bool:
        """Whether the compiler has the passes and opcodes that the agent was created for."""
        return (self.passes, self.opcodes) == (compiler.passes, compiler.opcodes)

    def check(self, compiler: Compiler) -> None:
        """Raise CheckpointError if the compiler has other passes or opcodes than the agent was created for."""
        for what, mine, theirs in (
            ("passes", self.passes, compiler.passes),
            ("opcodes", self.opcodes, compiler.opcodes),
        ):
            if mine != theirs:
                other = sorted(set(mine) ^ set(theirs))
                named = f": {', '.join(other[:5])}" if other else ", in another order"
                raise CheckpointError(f"the agent is for other {what} than {compiler.name} has{named}")

    def save(self, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> None:
        """Write the agent to a file. `about`: facts about its training, as JSON. Raises CheckpointError."""
        config = asdict(self.config) | {
            "network": self.config.network.value,
            "masking": self.config.masking.value,
        }
        content = {
            "config": config,
            "passes": self.passes,
            "opcodes": self.opcodes,
            "about": dict(about or self.about),
        }
        save_checkpoint(Checkpoint(KIND, content, to_arrays(self.state_dict())), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Agent:
        """Read an agent. Raises CheckpointError if the file is damaged, or has no agent."""
        checkpoint = load_checkpoint(path, KIND)
        content = checkpoint.config
        try:
            arguments = dict(content["config"])
            arguments["network"], arguments["masking"] = (
                Network(arguments["network"]),
                Masking(arguments["masking"]),
            )
            agent = _empty(_names(content, "passes"), _names(content, "opcodes"), AgentConfig(**arguments))
            agent.about = dict(content["about"])
            tensors = to_tensors(checkpoint.tensors)
            check_weights(agent, tensors)
        except (KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{os.fspath(path)}: the agent's parts do not fit: {reason}") from error
        agent.load_state_dict(tensors, assign=True)
        return agent

    def copy(self) -> Agent:
        agent = Agent(self.passes, self.opcodes, self.config)
        agent.load_state_dict(self.state_dict())
        agent.about = dict(self.about)
        return agent


def _empty(passes: Sequence[str], opcodes: Sequence[str], config: AgentConfig) -> Agent:
    """An agent whose weights are not allocated yet, since a damaged file may state huge sizes."""
    with torch.device("meta"):
        return Agent(passes, opcodes, config)


def _names(content: Mapping[str, Any], what: str) -> list[str]:
    names = content[what]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"its {what} are no list of names")
    return names


def random_agent(compiler: Compiler, config: AgentConfig = AgentConfig(), seed: int = 0) -> Agent:
    """An agent with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Agent(compiler.passes, compiler.opcodes, config)


class GraphEncoder(nn.Module):
    """Encodes modules as vectors: messages from operands to readers and back, then the mean and maximum over
    instructions."""

    def __init__(self, opcodes: int, width: int, rounds: int) -> None:
        super().__init__()
        self.opcode = nn.Embedding(opcodes, width)
        self.features = nn.Linear(_NODES, width)
        self.kinds = nn.ModuleList(nn.Embedding(2 * _KINDS, width) for _ in range(rounds))
        self.updates = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(rounds))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(rounds))

    def forward(self, graphs: Sequence[Any]) -> Tensor:
        """B graphs of Gymnasium (see `PassEnv`) -> vectors [B, 2 * width]."""
        joined = _Joined.of(graphs)
        hidden = torch.relu(self.opcode(joined.opcode) + self.features(joined.x))
        for kinds, change, norm in zip(self.kinds, self.updates, self.norms):
            down = _mean(torch.relu(hidden[joined.operand] + kinds(joined.kind)), joined.reader, len(hidden))
            up = _mean(
                torch.relu(hidden[joined.reader] + kinds(joined.kind + _KINDS)), joined.operand, len(hidden)
            )
            hidden = norm(hidden + torch.relu(change(torch.cat([hidden, down, up], 1))))
        mean = _mean(hidden, joined.owner, len(graphs))
        index = joined.owner[:, None].expand_as(hidden)
        largest = hidden.new_zeros(len(graphs), hidden.shape[1]).scatter_reduce(0, index, hidden, "amax")
        return torch.cat([mean, largest], 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """B graphs as one: N instructions, each with its opcode, its features and the number of its graph; E edges."""

    opcode: Tensor
    x: Tensor
    owner: Tensor
    operand: Tensor
    reader: Tensor
    kind: Tensor = field(repr=False)

    @staticmethod
    def of(graphs: Sequence[Any]) -> _Joined:
        sizes = np.array([len(g.nodes) for g in graphs])
        nodes = torch.from_numpy(np.concatenate([g.nodes for g in graphs]))
        first = np.repeat(np.cumsum(sizes) - sizes, [len(g.edge_links) for g in graphs])
        links = np.concatenate([g.edge_links for g in graphs]) + first[:, None]
        edges = torch.from_numpy(np.ascontiguousarray(links.T))
        kinds = torch.from_numpy(np.concatenate([g.edges[:, 0] for g in graphs])).long()
        owner = torch.from_numpy(np.repeat(np.arange(len(graphs)), sizes))
        return _Joined(
            nodes[:, 0].long(), nodes[:, 1:] * nodes.new_tensor(0.2), owner, edges[0], edges[1], kinds
        )


def _mean(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """For each index, the mean of the rows that have it [count, width]; 0 for an index without rows."""
    total = rows.new_zeros(count, rows.shape[1]).index_add(0, index, rows)
    number = torch.bincount(index, minlength=count).clamp(min=1)
    return total / number[:, None]
