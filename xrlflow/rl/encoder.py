"""The graph network: it encodes a graph as one vector per node and one vector for the whole graph.

It follows X-RLflow (He et al., 2023, section 3.3): nodes collect the features of their tensors, graph attention layers
pass the vectors of nodes to their neighbours, and attention over all nodes gives the vector of the graph. Unlike in
the paper, layers are residual and normalised, and the attention also depends on the features of tensors.

Training spends most of its time in this network, on few cores. So a layer multiplies the nodes by one matrix, and a
tensor adds one number per head to the attention. PyG's GATConv with `edge_dim` computes this number from a vector of
full width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu
from torch_geometric.nn.aggr import AttentionalAggregation

from xrlflow.rl.data import RewriteData
from xrlflow.rl.features import EDGE_FEATURES, GLOBAL_FEATURES, NODE_FEATURES
from xrlflow.rl.parameters import EncoderConfig


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Vectors of N nodes and B graphs: `nodes` [N, width], `graphs` [B, width]."""

    nodes: Tensor
    graphs: Tensor


class EdgeToNode(nn.Module):
    """Adds log(1 + sum of messages) to the vector of each node. The message of an edge is computed from its tensor and
    from the node at its other end.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_edge = nn.Linear(EDGE_FEATURES, width)
        self.of_source = nn.Linear(width, width, bias=False)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor, edge_attr: Tensor) -> Tensor:
        """Nodes [N, width], ends of edges [E] and [E], features of edges [E, EDGE_FEATURES] -> nodes [N, width]."""
        messages = torch.relu(self.of_edge(edge_attr) + self.of_source(nodes).index_select(0, source))
        summed = torch.zeros_like(nodes).index_add(0, target, messages)
        return nodes + torch.log1p(summed)


class Attention(nn.Module):
    """One residual layer of graph attention (Velickovic et al., 2018, equations 1 to 5)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        # Computes a node's message, and its terms of the attention score as source and as target of an edge.
        self.of_node = nn.Linear(width, width + 2 * heads, bias=False)
        self.of_edge = nn.Linear(EDGE_FEATURES, heads)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor, edge_attr: Tensor) -> Tensor:
        """Nodes [N, width], ends of edges [E] and [E], features of edges [E, EDGE_FEATURES] -> nodes [N, width]."""
        (count, width), heads = nodes.shape, self.heads
        values, of_source, of_target = self.of_node(self.before(nodes)).split([width, heads, heads], 1)
        scores = leaky_relu(
            of_source.index_select(0, source) + of_target.index_select(0, target) + self.of_edge(edge_attr),
            0.2,
        )
        # The softmax over the edges of each target. The messages are summed first, and the sum is then divided by the
        # sum of the softmax weights.
        owner = target.unsqueeze(1).expand(-1, heads)
        top = scores.new_full((count, heads), float("-inf"))
        top = top.scatter_reduce(0, owner, scores.detach(), "amax")
        weights = (scores - top.index_select(0, target)).exp()
        total = weights.new_zeros(count, heads).index_add(0, target, weights)
        messages = values.index_select(0, source).view(-1, heads, width // heads) * weights.unsqueeze(2)
        heard = torch.zeros_like(nodes).index_add(0, target, messages.view(-1, width))
        # Nodes without edges get 0.
        heard = heard.view(count, heads, -1) / total.clamp(min=1e-9).unsqueeze(2)
        return nodes + torch.relu(heard.reshape(count, width) + self.bias)


class Encoder(nn.Module):
    """Encodes the graphs of a batch. `operators`: how many operator numbers there are, including 0 for unknown
    operators.
    """

    def __init__(self, operators: int, config: EncoderConfig) -> None:
        super().__init__()
        width = config.width
        # The embedding of an unknown operator (0) is zero, so only its features describe it.
        self.operator = nn.Embedding(operators, width, padding_idx=0)
        self.of_node = nn.Linear(NODE_FEATURES, width)
        self.edges = EdgeToNode(width)
        self.layers = nn.ModuleList(Attention(width, config.heads) for _ in range(config.layers))
        self.last = nn.LayerNorm(width)
        self.pool = AttentionalAggregation(nn.Linear(width, 1))
        self.of_graph = nn.Linear(width, width)
        self.of_globals = nn.Linear(GLOBAL_FEATURES, width)

    def forward(self, data: RewriteData, graphs: int) -> Encoded:
        """Encode B graphs. `data.batch` [N] is the graph of each node; `graphs` is B."""
        source, target = data.edge_index[0], data.edge_index[1]
        nodes = torch.relu(self.of_node(data.x) + self.operator(data.op))
        nodes = self.edges(nodes, source, target, data.edge_attr)
        for layer in self.layers:
            nodes = layer(nodes, source, target, data.edge_attr)
        nodes = self.last(nodes)
        pooled = self.of_graph(self.pool(nodes, data.batch, dim_size=graphs))
        return Encoded(nodes, torch.tanh(pooled + self.of_globals(data.globals)))
