"""Control-flow bodies are graphs of their own, and are optimised as such."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from xrlflow.ir import Attr, Attrs, Body, Graph, Node, Value, apply_edit, plan_edit
from xrlflow.rewrite import Library, Match, RewriteState
from xrlflow.search.result import TraceStep


def simplify(graph: Graph, library: Library, cost: Callable[[Graph], float]) -> tuple[Graph, list[TraceStep]]:
    """The graph after the library's rules that need no price (`certain`), and those substitutions.

    They find constants and decide branches, and so the types of what follows: a search before that would price what it
    does not know. They spell out operators that the backend lacks, too. All steps have the cost of the result.
    """
    state = RewriteState.start(graph, library.certain())
    matches: list[Match] = []
    # One operator that is spelt out may become thousands of nodes: those of the graph as it is now count.
    while (candidates := state.candidates) and len(matches) < 4 * state.graph.node_count:
        matches.append(min(candidates, key=lambda m: m.key))
        state = state.apply(matches[-1])
    if not matches:
        return graph, []
    price = cost(state.graph)
    return state.graph, [TraceStep(m.rule.name, m.rule.family, m.key, price) for m in matches]


def with_bodies(
    graph: Graph,
    improve: Callable[[Graph, str], Graph],
    prepare: Callable[[Graph], Graph] = lambda graph: graph,
    where: str = "",
) -> Graph:
    """The graph with each body replaced by what `improve` makes of it, its own bodies before.

    `improve` gets a body's graph and a name for it ("If.then_branch/Loop.body"); `prepare` is called for it before its
    own bodies are looked at. What a body does not read any more is not captured, and what nobody else reads is not
    computed.
    """
    changed = [n for node in graph.nodes() if (n := _with_bodies(node, improve, prepare, where)) is not node]
    if not changed:
        return graph
    return apply_edit(graph, plan_edit(graph, "bodies", changed, {}))[0]


def _with_bodies(
    node: Node, improve: Callable[[Graph, str], Graph], prepare: Callable[[Graph], Graph], where: str
) -> Node:
    attrs: dict[str, Attr] = dict(node.attrs)
    outer = iter(node.inputs[len(node.explicit_inputs) :])
    captured: list[Value] = []
    changed = False
    for name, body in node.attrs.items():
        if not isinstance(body, Body):
            continue
        label = f"{where}{node.op}.{name}"
        improved = improve(with_bodies(prepare(body.graph), improve, prepare, f"{label}/"), label)
        pairs = list(zip(body.captured, outer))
        read = {inside for inside in body.captured if inside in improved.uses or inside in improved.outputs}
        captured += [value for inside, value in pairs if inside in read]
        if improved is body.graph and len(read) == len(body.captured):
            continue
        changed = True
        kept = tuple(inside for inside in body.captured if inside in read)
        formals = improved.inputs[: len(improved.inputs) - len(body.captured)]
        attrs[name] = Body(replace(improved, inputs=(*formals, *kept)), kept, body.name)
    if not changed:
        return node
    inputs = (*node.explicit_inputs, *captured)
    return Node(node.op, inputs, node.outputs, node.types, Attrs(attrs), len(captured))
