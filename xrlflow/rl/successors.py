"""X-RLflow's agent as in its paper (He et al., 2023, section 3), for comparison.

Every successor graph is built and encoded, and also the current graph, which represents No-Op: C + 1 graphs per
decision instead of one. The only feature of a node is its operator, and the only feature of an edge is the shape of
its tensor. Nothing marks the nodes that a candidate changed. The environment, PPO and the search are the same as for
`agent.Agent`.

    observe = SuccessorFeaturiser(featuriser)
    env, policy = RewriteEnv(problems, observe), SuccessorAgent(featuriser.vocabulary)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv
from torch_geometric.nn.aggr import SumAggregation

from xrlflow.ir import apply_edit
from xrlflow.learn.ppo import orthogonal
from xrlflow.learn.segments import SegmentCategorical
from xrlflow.ops.work import dimensions
from xrlflow.rl.features import Featuriser, Structure, Vocabulary
from xrlflow.rl.situation import Situation

# Dimensions are divided by _LARGE; shapes are padded or cut to _DIMS dimensions.
_LARGE, _DIMS = 4096.0, 4


class SuccessorData(Data):  # type: ignore[misc]
    """The successors of a situation in the order of its candidates and, last, its own graph: G = C + 1 disjoint
    graphs.

    op [N]: operator numbers; edge_index [2, E]; edge_attr [E, 4]: shapes; graph [N]: the graph of each node; graphs
    [1]: G. Edges run from producer to consumer. Each node has a loop, and another loop for each constant that it
    reads.
    """

    op: Tensor
    graph: Tensor
    graphs: Tensor

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return int(self.graphs) if key == "graph" else super().__inc__(key, value, *args, **kwargs)

    def __cat_dim__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return 1 if key == "edge_index" else 0


class SuccessorFeaturiser:
    """Computes `SuccessorData`. It caches the arrays of nodes that several graphs share."""

    def __init__(self, featuriser: Featuriser) -> None:
        self.featuriser = featuriser
        self._shapes: list[list[float]] = []

    def __call__(self, situation: Situation) -> SuccessorData:
        state = situation.state
        graphs = [apply_edit(state.graph, state.edit(m))[0] for m in situation.candidates]
        parts = [self.featuriser.structure(graph) for graph in (*graphs, state.graph)]
        shapes = self._table()
        sizes = [len(part.op) for part in parts]
        starts = np.cumsum([0, *sizes[:-1]])
        edges, attrs = zip(*(self._edges(part, shapes) for part in parts))
        return SuccessorData(
            op=torch.from_numpy(np.concatenate([part.op for part in parts])),
            edge_index=torch.from_numpy(np.concatenate([e + s for e, s in zip(edges, starts)], 1)),
            edge_attr=torch.from_numpy(np.concatenate(attrs)),
            graph=torch.from_numpy(np.repeat(np.arange(len(parts)), sizes)),
            graphs=torch.tensor([len(parts)]),
            num_nodes=sum(sizes),
        )

    @staticmethod
    def _edges(part: Structure, shapes: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Ends [2, E] and shapes [E, 4] of a graph's edges and, after these, of the loops of its nodes (shape 0)."""
        source = np.where(part.source < 0, part.target, part.source)
        nodes = np.arange(len(part.op))
        ends = np.stack((np.concatenate((source, nodes)), np.concatenate((part.target, nodes))))
        return ends, np.concatenate((shapes[part.type], np.zeros((len(nodes), _DIMS), np.float32)))

    def _table(self) -> npt.NDArray[Any]:
        """The shapes [T, 4] of the featuriser's tensor types."""
        bindings = self.featuriser.prices.bindings
        for type in self.featuriser.types[len(self._shapes) :]:
            shape = [d / _LARGE for d in dimensions(type, bindings)[:_DIMS]]
            self._shapes.append(shape + [0.0] * (_DIMS - len(shape)))
        return np.array(self._shapes, np.float32).reshape(-1, _DIMS)


class SuccessorAgent(nn.Module):
    """The paper's policy: edge-to-node update, graph attention layers, global update, and two heads."""

    def __init__(
        self, vocabulary: Vocabulary, width: int = 64, layers: int = 5, graph_width: int = 32
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.operator = nn.Embedding(len(vocabulary.operators) + 1, width)  # a product with one-hot vectors
        self.edge_to_node = nn.Linear(width + _DIMS, width)
        self.layers = nn.ModuleList(GATConv(width, width) for _ in range(layers))
        self.sum = SumAggregation()
        self.of_graph = nn.Linear(width, graph_width)
        self.actor = _head(2 * graph_width, 0.01)
        self.critic = _head(graph_width, 1.0)

    def evaluate(self, observations: Sequence[SuccessorData]) -> tuple[SegmentCategorical, Tensor]:
        """For each of B observations: the distribution over its candidates and, last, No-Op; and its value [B]."""
        counts = torch.cat([o.graphs for o in observations])
        ends = counts.cumsum(0)
        embedded = self._encode(observations, int(ends[-1]))
        current = embedded[ends - 1]
        pairs = torch.cat([embedded, torch.repeat_interleave(current, counts, 0)], 1)
        logits = self.actor(pairs).squeeze(-1)
        return SegmentCategorical.of(logits, counts), self.critic(current).squeeze(-1)

    def _encode(self, observations: Sequence[SuccessorData], total: int) -> Tensor:
        """Vectors of all graphs of all observations, [sum of G, graph_width]."""
        nodes = torch.tensor([o.op.shape[0] for o in observations])
        node_starts = (nodes.cumsum(0) - nodes).tolist()
        counts = torch.cat([o.graphs for o in observations])
        graph_starts = (counts.cumsum(0) - counts).tolist()
        op = torch.cat([o.op for o in observations])
        edge_index = torch.cat([o.edge_index + s for o, s in zip(observations, node_starts)], 1)
        edge_attr = torch.cat([o.edge_attr for o in observations])
        graph = torch.cat([o.graph + s for o, s in zip(observations, graph_starts)])
        x = self.operator(op)
        arriving = x.new_zeros(len(op), _DIMS).index_add(0, edge_index[1], edge_attr)
        x = torch.relu(self.edge_to_node(torch.cat([x, arriving], 1)))
        for layer in self.layers:
            x = torch.relu(layer(x, edge_index))
        return torch.tanh(self.of_graph(torch.log1p(self.sum(x, graph, dim_size=total))))


def _head(inputs: int, gain: float) -> nn.Sequential:
    return nn.Sequential(
        orthogonal(nn.Linear(inputs, 256)),
        nn.Tanh(),
        orthogonal(nn.Linear(256, 64)),
        nn.Tanh(),
        orthogonal(nn.Linear(64, 1), gain),
    )
