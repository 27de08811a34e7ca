"""Control-flow bodies are graphs of their own, and are optimised as such."""

from __future__ import annotations

from collections.abc import Callable

from xrlflow.ir import Attr, Attrs, Body, Edit, Graph, Node, apply_edit


def with_bodies(graph: Graph, improve: Callable[[Graph, str], Graph], where: str = "") -> Graph:
    """The graph with each body, innermost first, replaced by what `improve` makes of it.

    `improve` gets a body's graph and a name for it ("If.then_branch/Loop.body").
    """
    rewired: list[tuple[Node, Node]] = []
    for node in graph.nodes():
        changed: dict[str, Attr] = {}
        for name, value in node.attrs.items():
            if isinstance(value, Body):
                label = f"{where}{node.op}.{name}"
                improved = improve(with_bodies(value.graph, improve, f"{label}/"), label)
                if improved is not value.graph:
                    changed[name] = Body(improved, value.captured, value.name)
        if changed:
            attrs = Attrs({**node.attrs, **changed})
            rewired.append((node, Node(node.op, node.inputs, node.outputs, node.types, attrs, node.captured)))
    if not rewired:
        return graph
    return apply_edit(graph, Edit("bodies", (), (), tuple(rewired), graph.outputs))[0]
