"""The graph network: operators and tensors of a graph to one vector a node and one a graph.

As in X-RLflow (He et al., 2023, section 3.3): tensors' features flow into nodes, graph attention layers pass them
on, and attention over all nodes gives the graph's. Unlike there, layers are residual and normalised, and a tensor's
features take part in the attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv
from torch_geometric.nn.aggr import AttentionalAggregation

from xrlflow.rl.features import EDGE_FEATURES, GLOBAL_FEATURES, NODE_FEATURES, RewriteData


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Widths. `width` must be a multiple of `heads`."""

    width: int = 64
    layers: int = 3
    heads: int = 4

    def __post_init__(self) -> None:
        if self.width < 1 or self.layers < 0 or self.heads < 1 or self.width % self.heads:
            raise ValueError(f"an encoder of width {self.width}, {self.layers} layers, {self.heads} heads")


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Vectors of N nodes and B graphs: `nodes` [N, width], `graphs` [B, width]."""

    nodes: Tensor
    graphs: Tensor


class EdgeToNode(nn.Module):
    """Each node gets the sum of what its tensors and their other ends say, on a scale that degrees do not blow up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_edge = nn.Linear(EDGE_FEATURES, width)
        self.of_source = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, nodes: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index[0], edge_index[1]
        messages = torch.relu(self.of_edge(edge_attr) + self.of_source(nodes)[source])
        summed = torch.zeros_like(nodes).index_add(0, target, messages)
        out: Tensor = nodes + self.out(summed.div(2.0).tanh())
        return out


class Attention(nn.Module):
    """One residual layer of graph attention (Velickovic et al., 2018), with a step of its own for each node."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = GATConv(width, width // heads, heads, add_self_loops=False, edge_dim=EDGE_FEATURES)
        self.out = nn.Linear(width, width)

    def forward(self, nodes: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        heard = self.attention(self.before(nodes), edge_index, edge_attr)
        out: Tensor = nodes + self.out(torch.relu(heard))
        return out


class Encoder(nn.Module):
    """`operators`: how many numbers operators have, 0 included."""

    def __init__(self, operators: int, config: EncoderConfig) -> None:
        super().__init__()
        width = config.width
        # An unknown operator has no embedding: it is what its features say.
        self.operator = nn.Embedding(operators, width, padding_idx=0)
        self.of_node = nn.Linear(NODE_FEATURES, width)
        self.edges = EdgeToNode(width)
        self.layers = nn.ModuleList(Attention(width, config.heads) for _ in range(config.layers))
        self.last = nn.LayerNorm(width)
        self.pool = AttentionalAggregation(nn.Linear(width, 1), nn.Linear(width, width))
        self.of_globals = nn.Linear(GLOBAL_FEATURES, width)

    def forward(self, data: RewriteData, graphs: int) -> Encoded:
        """`data` with `batch` [N], the graph of each node; `graphs` is how many there are."""
        nodes = torch.relu(self.of_node(data.x) + self.operator(data.op))
        nodes = self.edges(nodes, data.edge_index, data.edge_attr)
        for layer in self.layers:
            nodes = layer(nodes, data.edge_index, data.edge_attr)
        nodes = self.last(nodes)
        pooled = self.pool(nodes, data.batch, dim_size=graphs)
        return Encoded(nodes, torch.tanh(pooled + self.of_globals(data.globals)))
