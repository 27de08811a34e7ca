"""Control-flow bodies are graphs of their own and are optimised one by one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from xrlflow.ir import Attr, Attrs, Body, Edit, Graph, Node, Value, apply_edit, plan_edit
from xrlflow.rewrite import Library, Match, RewriteState
from xrlflow.search.result import Path, extend


def simplify(
    graph: Graph, library: Library, cost: Callable[[Graph], float], until: float = math.inf
) -> tuple[Graph, Path | None]:
    """Apply all rules that need no cost (`canonicalises`) until `until` (time.monotonic). Returns the graph and the
    substitutions.

    These rules find constants and decide branches, so that types become known: a search before that would compute costs
    of unknown types. They also replace operators that the backend lacks. Each step has the cost of the final graph.
    """
    state = RewriteState.start(graph, library.canonicalising())
    applied: list[tuple[Match, Edit]] = []
    # Replacing one operator may add thousands of nodes, so the bound grows with the graph.
    while (candidates := state.candidates) and len(applied) < 4 * state.graph.node_count:
        if time.monotonic() >= until:
            break
        match = min(candidates, key=lambda m: m.key)
        edit = state.edit(match)
        applied.append((match, edit))
        state = state.apply(match, edit)
    path: Path | None = None
    price = cost(state.graph) if applied else 0.0
    for match, edit in applied:
        path = extend(path, match, edit, price)
    return state.graph, path


def with_bodies(
    graph: Graph,
    improve: Callable[[Graph, str], Graph],
    prepare: Callable[[Graph, str], Graph] = lambda graph, name: graph,
    where: str = "",
) -> Graph:
    """The graph in which each body is replaced by the result of `improve`. Inner bodies are improved before outer ones.

    `improve` gets a body's graph and its name ("If.then_branch/Loop.body"); `prepare` gets the same before the bodies
    inside this body are improved. Values that a body no longer reads are no longer captured, and nodes whose outputs
    no node reads are removed.
    """
    changed = [n for node in graph.nodes() if (n := _with_bodies(node, improve, prepare, where)) is not node]
    if not changed:
        return graph
    return apply_edit(graph, plan_edit(graph, "bodies", changed, {}))[0]


def _with_bodies(
    node: Node, improve: Callable[[Graph, str], Graph], prepare: Callable[[Graph, str], Graph], where: str
) -> Node:
    attrs: dict[str, Attr] = dict(node.attrs)
    outer = iter(node.inputs[len(node.explicit_inputs) :])
    captured: list[Value] = []
    changed = False
    for name, body in node.attrs.items():
        if not isinstance(body, Body):
            continue
        label = f"{where}{node.op}.{name}"
        improved = improve(with_bodies(prepare(body.graph, label), improve, prepare, f"{label}/"), label)
        pairs = list(zip(body.captured, outer))
        used = {inside for inside in body.captured if inside in improved.uses or inside in improved.outputs}
        captured += [value for inside, value in pairs if inside in used]
        if improved is body.graph and len(used) == len(body.captured):
            continue
        changed = True
        captures = tuple(inside for inside in body.captured if inside in used)
        formals = improved.inputs[: len(improved.inputs) - len(body.captured)]
        attrs[name] = Body(replace(improved, inputs=(*formals, *captures)), captures, body.name)
    if not changed:
        return node
    inputs = (*node.explicit_inputs, *captured)
    return Node(node.op, inputs, node.outputs, node.types, Attrs(attrs), len(captured), node.on_runtime)
