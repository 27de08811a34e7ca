"""Branches around operators that ONNX Runtime does not run where a size is 0.

    y = Attention(q, k, v)  ->  y = If(no size is 0) { Attention(q, k, v) } else { zeros }

A graph has the operator alone (`xrlflow.ops.empty.where_empty`), so that rules and costs see it; only its file has the
branch. The operator's weights and inputs stay outside of it. It costs some microseconds for each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx.helper import make_attribute, make_graph, make_node, make_tensor, make_tensor_value_info

from xrlflow.ir import ABSENT, Body, Dim, Graph, Node, TensorType, Value, dims
from xrlflow.ops.empty import InputAxis, Size, needed, sizes_needed, where_empty


@dataclass(frozen=True, slots=True)
class Own:
    """What a model has itself: the operators in it, and the dimensions that are at least 1 whenever it runs."""

    nodes: frozenset[Value]
    filled: frozenset[Size]

    @staticmethod
    def of(graph: Graph) -> Own:
        filled = set(sizes_needed(graph, graph.nodes()))
        for node in graph.nodes():
            filled.update(size for _, size in _sizes(node, _types(graph, node)) if size is not None)
        return Own(frozenset(_nodes(graph)), frozenset(filled))


def _nodes(graph: Graph) -> Iterator[Value]:
    """The ids of the operators that can get a branch, in bodies too."""
    for node in graph.nodes():
        if where_empty(node.op, _types(graph, node), node.types) is not None:
            yield node.id
        for attr in node.attrs.values():
            if isinstance(attr, Body):
                yield from _nodes(attr.graph)


def _types(graph: Graph, node: Node) -> list[TensorType | None]:
    return [None if v == ABSENT else graph.type(v) for v in node.explicit_inputs]


def _sizes(node: Node, types: Sequence[TensorType | None]) -> Iterator[tuple[int, Dim]]:
    """The inputs, each with a size that it needs (None: unknown), of an operator that gets a branch."""
    if where_empty(node.op, types, node.types) is not None:
        for index, axis in needed(node.op, node.attrs, types):
            shape = None if (type := types[index]) is None else type.shape
            yield index, None if shape is None else shape[axis]


def _causes(size: int | str, filled: frozenset[Size]) -> frozenset[object]:
    """What makes a size 0: some of the symbols whose product it is, or itself.

    `filled`: dimensions that are at least 1.
    """
    terms = dims.formula(size).terms if isinstance(size, str) else ()
    atoms = terms[0][0] if len(terms) == 1 else ()
    names = [atom.name for atom in atoms if isinstance(atom, dims.Symbol)]
    if not names or len(names) < len(atoms):
        return frozenset({size})
    return frozenset(name for name in names if not dims.positive(name, filled)) or frozenset({size})


def _telling(causes: Mapping[int, frozenset[object]]) -> list[int]:
    """The inputs whose numbers of elements say whether a size is 0: few inputs that together have all the causes."""
    left, chosen = dict(causes), list[int]()
    while any(left.values()):
        best = max(left, key=lambda index: len(left[index]))
        chosen.append(best)
        found = left.pop(best)
        left = {index: own - found for index, own in left.items()}
    return sorted(chosen)


FOR_EMPTY = "xrlflow.empty."
"""How the names of the branches begin."""


class Branches:
    """Writes the branches of one graph.

    `own`: what the model has, which gets no branches; None if nothing does. `fresh`: makes a name that is used nowhere.
    """

    def __init__(self, own: Own | None, fresh: Callable[[str], str]) -> None:
        self.own, self.fresh = own, fresh
        self.conditions: dict[frozenset[object], str] = {}

    def around(self, written: onnx.NodeProto, node: Node, graph: Graph) -> Iterator[onnx.NodeProto]:
        """The nodes to write for a node of a graph: itself, or a branch around it."""
        own, types = self.own, _types(graph, node)
        new = own is not None and node.id not in own.nodes
        sizes = [s for s in _sizes(node, types) if not dims.positive(s[1], own.filled)] if own and new else []
        shapes = where_empty(node.op, types, node.types) if sizes else None
        if shapes is None:
            yield written
            return
        causes: dict[int, frozenset[object]] = {}
        for index, size in sizes:
            cause = _causes(size, own.filled if own else frozenset()) if size is not None else {(index,)}
            causes[index] = causes.get(index, frozenset()) | cause
        known = frozenset[object]().union(*causes.values())
        shared = all(isinstance(cause, str) for cause in known)
        condition = self.conditions.get(known) if shared else None
        if condition is None:
            counts = {written.input[index]: self.fresh("elements") for index in _telling(causes)}
            condition = self.fresh("not_empty")
            for name, count in counts.items():
                yield make_node("Size", [name], [count])
            least = next(iter(counts.values()))
            if len(counts) > 1:
                least = self.fresh("least_elements")
                yield make_node("Min", list(counts.values()), [least])
            yield make_node("Cast", [least], [condition], to=onnx.TensorProto.BOOL)
            if shared:
                self.conditions[known] = condition
        operator = onnx.NodeProto()
        operator.CopyFrom(written)
        zeros: list[onnx.NodeProto] = []
        outputs: dict[str, tuple[str, str, TensorType]] = {}  # with the names inside of the branches
        for at, (result, shape, type) in enumerate(zip(written.output, shapes, node.types)):
            if result:
                inside, empty = self.fresh(f"{result}_filled"), self.fresh(f"{result}_empty")
                zeros.extend(self._zeros(written, shape, int(type.dtype), empty))
                operator.output[at] = inside
                outputs[result] = inside, empty, type
        branch = make_node("If", [condition], list(outputs), name=FOR_EMPTY + next(iter(outputs)))
        for side, (name, nodes) in enumerate((("then_branch", [operator]), ("else_branch", zeros))):
            infos = [
                make_tensor_value_info(names[side], int(type.dtype), [None] * (type.rank or 0))
                for *names, type in outputs.values()
            ]
            branch.attribute.append(make_attribute(name, make_graph(nodes, name, [], infos)))
        yield branch

    def _zeros(
        self, written: onnx.NodeProto, shape: Sequence[int | InputAxis], dtype: int, empty: str
    ) -> Iterator[onnx.NodeProto]:
        """The nodes that compute the zeros `empty` of a shape."""
        parts = []
        for size in shape:
            parts.append(self.fresh(f"{empty}_size"))
            if isinstance(size, int):
                yield make_node("Constant", [], parts[-1:], value_ints=[size])
            else:
                index, axis = size
                yield make_node("Shape", [written.input[index]], parts[-1:], start=axis, end=axis + 1)
        whole = self.fresh(f"{empty}_shape")
        yield make_node("Concat", parts, [whole], axis=0)
        yield make_node("ConstantOfShape", [whole], [empty], value=make_tensor("zero", dtype, [1], [0.0]))
