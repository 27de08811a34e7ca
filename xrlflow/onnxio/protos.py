"""Functions that walk through ModelProtos."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies of a control-flow node."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def all_nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph or function, and of the bodies inside it."""
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from all_nodes(body)


def count_nodes(graph: onnx.GraphProto) -> int:
    """The number of operators in a graph and its bodies."""
    return len(graph.node) + sum(count_nodes(g) for n in graph.node for g in subgraphs(n))


def tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every dense tensor in a graph and its bodies: initialisers and attributes."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == onnx.AttributeProto.TENSORS:
                yield from attribute.tensors
        for body in subgraphs(node):
            yield from tensors(body)


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor in a model, including those of functions and the parts of sparse tensors."""
    yield from _all_tensors(model.graph)
    for function in model.functions:
        yield from tensors_of_nodes(function.node)


def _all_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from tensors_of_nodes(graph.node)


def tensors_of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """Every tensor in the attributes of nodes, and in their bodies."""
    for node in nodes:
        for attribute in node.attribute:
            yield from tensors_of_attribute(attribute)


def tensors_of_attribute(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    """Every tensor in an attribute and in its bodies, whatever type the attribute declares."""
    yield from (attribute.t, *attribute.tensors)
    for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
        yield from (sparse.values, sparse.indices)
    for graph in (attribute.g, *attribute.graphs):
        yield from _all_tensors(graph)


def free_names(graph: onnx.GraphProto) -> set[str]:
    """Names that a body reads from the graphs around it."""
    own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    own.update(t.values.name for t in graph.sparse_initializer)
    own.update(name for node in graph.node for name in node.output)
    names = {v.name for v in graph.output}
    for node in graph.node:
        names.update(reads(node))
    return names - own - {""}


def reads(node: onnx.NodeProto) -> set[str]:
    """Names that a node reads, also in its bodies."""
    out = {name for name in node.input if name}
    for body in subgraphs(node):
        out |= free_names(body)
    return out


def live_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes on which the outputs depend, producers first (files are not always sorted).

    Raises ValueError on a cycle.
    """
    makers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    needs = [sorted({makers[n] for n in reads(node) if n in makers}) for node in graph.node]
    live: set[int] = set()
    work = [makers[v.name] for v in graph.output if v.name in makers]
    while work:
        at = work.pop()
        if at not in live:
            live.add(at)
            work.extend(needs[at])
    if all(child < at for at in live for child in needs[at]):
        return [graph.node[i] for i in sorted(live)]
    order: list[int] = []
    state: dict[int, int] = {}
    for root in sorted(live):
        stack = [(root, iter(needs[root]))] if root not in state else []
        state.setdefault(root, 1)
        while stack:
            at, children = stack[-1]
            for child in children:
                if state.get(child) == 1:
                    raise ValueError(
                        f"node {graph.node[child].name!r} ({graph.node[child].op_type}) is on a cycle"
                    )
                if child not in state:
                    state[child] = 1
                    stack.append((child, iter(needs[child])))
                    break
            else:
                state[at] = 2
                order.append(at)
                stack.pop()
    return [graph.node[i] for i in order]


def all_names(graph: onnx.GraphProto) -> set[str]:
    """The names of all values in a graph and its bodies."""
    names = {v.name for v in (*graph.input, *graph.output)} | {t.name for t in graph.initializer}
    for node in graph.node:
        names.update(node.output)
        for body in subgraphs(node):
            names |= all_names(body)
    return names
