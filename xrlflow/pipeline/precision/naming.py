"""Names for nodes, by which the libraries select them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import onnx


def name_nodes(model: onnx.ModelProto) -> dict[str, str]:
    """Give each node of the main graph a name of its own, in place. Returns the former names of renamed nodes by their
    new names.
    """
    count = Counter(node.name for node in model.graph.node)
    taken, former = set(count), {}
    for index, node in enumerate(model.graph.node):
        if not node.name or count[node.name] > 1:
            unique = f"{node.name or node.op_type}_{index}"
            while unique in taken:
                unique += "_"
            taken.add(unique)
            former[unique], node.name = node.name, unique
    return former


def restore(model: onnx.ModelProto, former: Mapping[str, str]) -> None:
    """Give the nodes that `name_nodes` renamed their former names."""
    for node in model.graph.node:
        node.name = former.get(node.name, node.name)
