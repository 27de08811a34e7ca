"""The computation graph. It consists of persistent maps, most of which successors share with the graph before the
edit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from immutables import Map

from xrlflow.ir.node import Node, mix
from xrlflow.ir.types import ABSENT, DType, TensorType, Value

if TYPE_CHECKING:
    import networkx

FINGERPRINT_MASK = (1 << 64) - 1

# Constants of at most this many elements are evaluated when they are created, so that rules can read them.
SMALL = 1024


class TensorHandle(Protocol):
    """Access to a constant's data, which may still be on disk."""

    def numpy(self) -> npt.NDArray[Any]: ...


@dataclass(frozen=True, slots=True, eq=False)
class ArrayHandle:
    """Data that is already in memory."""

    array: npt.NDArray[Any]

    def numpy(self) -> npt.NDArray[Any]:
        return self.array


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """A constant: its type, a handle to its data, and the data itself if it is small (a read-only array)."""

    type: TensorType
    handle: TensorHandle
    array: npt.NDArray[Any] | None = None

    def numpy(self) -> npt.NDArray[Any]:
        return self.array if self.array is not None else self.handle.numpy()


@dataclass(slots=True)
class Leaves:
    """Graph inputs and constants, which are the values that no node computes.

    All states of a search share one object and only add to it. Values are named by content, so a name never changes its
    meaning. `names`: the names that inputs, constants and node outputs have in the file. `folded`: constants computed
    from constants, by operator, digest of its attributes, inputs and output types; None if they are not small or cannot
    be evaluated.
    """

    types: dict[Value, TensorType] = field(default_factory=dict)
    consts: dict[Value, Const] = field(default_factory=dict)
    names: dict[Value, str] = field(default_factory=dict)
    folded: dict[tuple[str, int, tuple[Value, ...], tuple[TensorType, ...]], tuple[Value, ...] | None] = (
        field(default_factory=dict)
    )
    _uniform: dict[Value, float | None] = field(default_factory=dict)
    _numbers: dict[tuple[int, ...], Value] = field(default_factory=dict)

    def uniform(self, value: Value) -> float | None:
        """The number that all elements of a small constant equal; None if they differ or the constant is not small."""
        if value in self._uniform:
            return self._uniform[value]
        const = self.consts.get(value)
        array = const.array if const is not None else None
        number: float | None = None
        if array is not None and array.size and array.dtype.kind in "fiub":
            first = array.item(0)
            if array.item(-1) == first and bool((array == first).all()):
                number = float(first)
        self._uniform[value] = number
        return number

    def numbers(self, values: tuple[int, ...]) -> Value:
        """The value of a one-dimensional int64 constant (a shape, axes, ...)."""
        value = self._numbers.get(values)
        if value is None:
            value = self._numbers[values] = self.intern(np.array(values, np.int64), DType.INT64)
        return value

    def intern(self, array: npt.NDArray[Any], dtype: DType) -> Value:
        """The value of a small constant. Equal constants get the same value."""
        data = np.ascontiguousarray(array).reshape(array.shape)
        raw = repr(data.tolist()).encode() if data.dtype == object else data.tobytes()
        content = blake2b(raw, digest_size=8).digest()
        value = mix(0x636F6E7374, int(dtype), int.from_bytes(content, "little"), *data.shape)
        if value not in self.consts:
            data.setflags(write=False)
            type = TensorType(dtype, tuple(data.shape), True)
            self.add_const(value, Const(type, ArrayHandle(data), data))
        return value

    def add_const(self, value: Value, const: Const) -> Value:
        if value not in self.consts:
            self.consts[value] = const
            self.types[value] = const.type
        return value


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """One computation graph, which never changes.

    `producers` has an entry for each output of each node. `uses` has the ids of the nodes that read a value, each once;
    a value in `outputs` is used as well. `fingerprint` is the sum of the nodes' fingerprints and of the outputs',
    modulo 2^64, so it does not depend on the order in which nodes were added.
    """

    producers: Map[Value, Node]
    uses: Map[Value, tuple[Value, ...]]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    leaves: Leaves
    fingerprint: int
    node_count: int

    @staticmethod
    def make(
        nodes: Iterable[Node], inputs: tuple[Value, ...], outputs: tuple[Value, ...], leaves: Leaves
    ) -> Graph:
        """A graph of these nodes, in any order. Raises ValueError if two nodes compute one value."""
        producers: dict[Value, Node] = {}
        uses: dict[Value, list[Value]] = {}
        total, count = outputs_fingerprint(outputs), 0
        for node in nodes:
            for out in node.outputs:
                if out in producers:
                    raise ValueError(f"{node.op} and {producers[out].op} both produce value {out}")
                producers[out] = node
            for value in dict.fromkeys(node.inputs):
                if value != ABSENT:
                    uses.setdefault(value, []).append(node.id)
            total += node.fingerprint
            count += 1
        return Graph(
            Map(producers),
            Map({v: tuple(sorted(ids)) for v, ids in uses.items()}),
            inputs,
            outputs,
            leaves,
            total & FINGERPRINT_MASK,
            count,
        )

    def type(self, value: Value) -> TensorType:
        node = self.producers.get(value)
        if node is None:
            return self.leaves.types[value]
        outs = node.outputs
        return node.types[0] if outs[0] == value else node.types[outs.index(value)]

    def const(self, value: Value) -> Const | None:
        """The constant with this name; None if a node computes the value or it is an input."""
        return self.leaves.consts.get(value) if value not in self.producers else None

    def producer(self, value: Value) -> Node | None:
        """The node that computes a value; None for inputs and constants."""
        return self.producers.get(value)

    def users(self, value: Value) -> list[Node]:
        producers = self.producers
        return [producers[i] for i in self.uses.get(value, ())]

    def nodes(self) -> Iterator[Node]:
        """Every node once, in an arbitrary but reproducible order."""
        for value, node in self.producers.items():
            if node.outputs[0] == value:
                yield node

    def topological(self) -> list[Node]:
        """Every node once, producers before consumers. Raises ValueError on a cycle."""
        order: list[Node] = []
        state: dict[Value, int] = {}  # node id -> 1 while the node is visited, 2 when it is done
        producers = self.producers
        roots = [producers[v] for v in self.outputs if v in producers]
        for root in [*roots, *self.nodes()]:
            if root.id in state:
                continue
            stack: list[tuple[Node, int]] = [(root, 0)]
            state[root.id] = 1
            while stack:
                node, at = stack.pop()
                inputs = node.inputs
                while at < len(inputs):
                    child = producers.get(inputs[at])
                    at += 1
                    if child is None:
                        continue
                    mark = state.get(child.id)
                    if mark == 1:
                        raise ValueError(f"the graph has a cycle through {child.op} and {node.op}")
                    if mark is None:
                        stack.append((node, at))
                        stack.append((child, 0))
                        state[child.id] = 1
                        break
                else:
                    state[node.id] = 2
                    order.append(node)
        return order

    def rebuilt_fingerprint(self) -> int:
        """The fingerprint computed from scratch, for checks of the one that edits update."""
        total = outputs_fingerprint(self.outputs) + sum(n.fingerprint for n in self.nodes())
        return total & FINGERPRINT_MASK

    def to_networkx(self) -> networkx.MultiDiGraph:
        """The graph for analysis and drawing. Its nodes are node ids, inputs and constants; its edges are the values
        between them.
        """
        import networkx

        out = networkx.MultiDiGraph()
        for value in self.inputs:
            out.add_node(value, op="Input", type=self.type(value))
        for node in self.nodes():
            out.add_node(node.id, op=node.op, attrs=dict(node.attrs), type=node.types[0])
        for node in self.nodes():
            for index, value in enumerate(node.inputs):
                if value == ABSENT:
                    continue
                producer = self.producers.get(value)
                source = producer.id if producer is not None else value
                if source not in out:
                    out.add_node(source, op="Constant", type=self.type(value))
                output = producer.outputs.index(value) if producer is not None else 0
                out.add_edge(source, node.id, value=value, input=index, output=output)
        return out


def outputs_fingerprint(outputs: tuple[Value, ...]) -> int:
    return hash((0x6F757470757473, *outputs)) & FINGERPRINT_MASK
