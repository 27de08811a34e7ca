"""Graphs for other programs: GraphML (yEd, igraph) and GEXF (Gephi), written by networkx.

xrlflow itself does not use networkx graphs. `Graph.to_networkx` makes one for analysis.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from xrlflow.ir.graph import Graph

if TYPE_CHECKING:
    import networkx

FORMATS = (".graphml", ".gexf")
"""Endings of files, which say in which format a graph is written."""

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_labelled(graph: Graph) -> networkx.MultiDiGraph:
    """The graph with numbers as nodes, and with attributes that a file can hold: strings, integers, truth values.

    Attributes of nodes: `label`, the operator, Input or Constant; `name`, that of the node's (first) output in the
    model's file, or ""; `tensor`, the type of that output; `attrs`, the operator's attributes as text; `output`,
    whether the graph returns an output of the node. Attributes of edges: `name` of the value; `tensor`, its type;
    `output` and `input`, the value's positions among the outputs of the node that computes it and among the inputs of
    the node that reads it.
    """
    import networkx

    full = graph.to_networkx()
    numbers = {node: number for number, node in enumerate(full)}
    names = {value: _text(name) for value, name in graph.leaves.names.items()}
    returned = {
        graph.producers[value].id if value in graph.producers else value for value in graph.outputs
    } & full.nodes  # a constant that is only an output of the graph is no node
    out = networkx.MultiDiGraph()
    for node, data in full.nodes(data=True):
        out.add_node(
            numbers[node],
            label=data["op"],
            name=names.get(node, ""),
            tensor=str(data["type"]),
            attrs=_text(", ".join(f"{name}={value!r}" for name, value in data.get("attrs", {}).items())),
            output=node in returned,
        )
    for source, reader, data in full.edges(data=True):
        value = data["value"]
        out.add_edge(
            numbers[source],
            numbers[reader],
            name=names.get(value, ""),
            tensor=str(graph.type(value)),
            output=data["output"],
            input=data["input"],
        )
    return out


def serialised(labelled: networkx.MultiDiGraph, ending: str) -> bytes:
    """The bytes of a file with a graph that `to_labelled` made. `ending` is one of `FORMATS`."""
    import networkx

    writers: dict[str, Any] = dict(
        zip(FORMATS, (networkx.write_graphml_xml, networkx.write_gexf), strict=True)
    )
    file = io.BytesIO()
    writers[ending](labelled, file)
    return file.getvalue()


def _text(text: str) -> str:
    """Text without the characters that XML cannot hold."""
    return _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)
