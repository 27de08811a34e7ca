"""Numbered neighbourhoods of nodes: all that a graph network of a few layers sees of each node.

A graph network computes a node's vector from its neighbourhood alone. Its layers cannot tell two nodes apart that have
the same neighbourhood (Weisfeiler and Leman, 1968; Xu et al., How Powerful are Graph Neural Networks?, 2019). So each
neighbourhood gets a number, and everything that a network computes is computed once for each number. Layers of a model
repeat each other, and a successor differs from its parent in a few nodes, so a new graph has few new numbers.

Level 0 is a node alone: its operator, attributes, types and seconds. Level r adds the edges to nodes of level r - 1:
forward edges from the producers of the node's inputs, backward edges from its readers. Constants and the graph's inputs
are nodes without content. Constant nodes do not run, so they count as constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from xrlflow.cost.columns import NODE_COLUMNS, TYPE_COLUMNS, node_columns, type_columns
from xrlflow.cost.model import AdditiveCost, InTypes
from xrlflow.ir import ABSENT, Edit, Graph, Node, TensorType, Value, apply_edit

# The numbers of inputs and constants, on every level.
INPUT, CONSTANT = 0, 1
_NAMES = ("(input)", "(constant)")
_SLOTS = 8  # further slots count as this one
# Columns of an edge: the type of its tensor; the output and input slots at its ends; two flags for an input slot that
# is 0 or 1; the direction.
EDGE_COLUMNS = TYPE_COLUMNS + 6
# Columns of a node alone: the node's columns, whether it computes an output of the graph, and the machine's vector
# lanes.
CONTENT_COLUMNS = NODE_COLUMNS + 2
_LANES = 16  # float32 numbers in the widest vectors

_Key = tuple[object, ...]


@dataclass(slots=True)
class Level:
    """The neighbourhoods of one radius, in the order of their numbers."""

    numbers: dict[_Key, int] = field(default_factory=dict)
    # For each number: the number of the same node on the level below (on level 0, its row in the table's `contents`).
    inner: list[int] = field(default_factory=lambda: [INPUT, CONSTANT])
    starts: list[int] = field(
        default_factory=lambda: [0, 0, 0]
    )  # the edges of number i are those from starts[i] to before starts[i + 1]
    sources: list[int] = field(default_factory=list)  # of each edge's source, on the level below
    edges: list[int] = field(default_factory=list)  # for each edge its row of `Table.edges`

    def __len__(self) -> int:
        return len(self.inner)


# Edges: the node at the other end (or INPUT or CONSTANT, if it is read), and the row of `Table.edges`.
_Reads = list[tuple[Node | int, int]]
_Readers = list[tuple[Node, int]]


_NOTHING = (0.0,) * CONTENT_COLUMNS


@dataclass(slots=True)
class Table:
    """Numbered neighbourhoods as a network reads them. It only grows.

    `ops`, `contents`, `seconds` and `traffic` have a row for each number on level 0, a node alone.
    """

    levels: tuple[Level, ...]  # by radius
    ops: list[str] = field(default_factory=lambda: list(_NAMES))
    contents: list[tuple[float, ...]] = field(
        default_factory=lambda: [_NOTHING, _NOTHING]
    )  # CONTENT_COLUMNS each
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of the node alone
    traffic: list[float] = field(default_factory=lambda: [0.0, 0.0])  # bytes read and written
    edges: list[tuple[float, ...]] = field(default_factory=list)  # EDGE_COLUMNS each


class Neighbourhoods:
    """Numbers neighbourhoods of up to `radius` edges in any number of graphs. `prices` gives the seconds of nodes
    alone."""

    def __init__(self, prices: AdditiveCost, radius: int) -> None:
        self.prices = prices
        self.radius = radius
        self.table = Table(tuple(Level() for _ in range(radius + 1)))
        self._edges: dict[tuple[bool, int, int, TensorType], int] = {}

    def view(self, graph: Graph) -> View:
        """The numbers of a graph's nodes, computed on demand."""
        return View(self, graph)

    def edge(self, forward: bool, output_slot: int, input_slot: int, type: TensorType) -> int:
        """The row in `Table.edges` of an edge between these slots; `forward`: from the output to the input."""
        key = (forward, min(output_slot, _SLOTS), min(input_slot, _SLOTS), type)
        row = self._edges.get(key)
        if row is None:
            row = self._edges[key] = len(self.table.edges)
            _, output_slot, input_slot, _ = key
            slots = (
                output_slot / _SLOTS,
                input_slot / _SLOTS,
                float(input_slot == 0),
                float(input_slot == 1),
            )
            columns = type_columns(type, self.prices.bindings)
            self.table.edges.append((*columns, *slots, float(forward), float(not forward)))
        return row

    def content(self, graph: Graph, node: Node, in_types: InTypes, is_output: bool) -> int:
        """The number of a node alone. `is_output`: it computes an output of the graph."""
        seconds = self.prices.seconds(graph, node, in_types)
        key = (node.op, node.attrs.digest, in_types, node.types, seconds, is_output)
        table = self.table
        level = table.levels[0]
        number = level.numbers.get(key)
        if number is None:
            number = level.numbers[key] = len(level.inner)
            columns = node_columns(node, in_types, self.prices.bindings, seconds)
            level.inner.append(number)
            level.starts.append(0)
            table.ops.append(node.op)
            # ONNX Runtime's layouts depend on the machine's vectors, and so does the gain of an edit.
            table.contents.append((*columns.row, float(is_output), self.prices.lanes / _LANES))
            table.seconds.append(seconds)
            table.traffic.append(columns.bytes)
        return number

    def number(self, radius: int, inner: int, ends: tuple[tuple[int, int], ...]) -> int:
        """The number of a neighbourhood on a level: its node on the level below, and its edges (source, row)."""
        level = self.table.levels[radius]
        key = (inner, *ends)
        number = level.numbers.get(key)
        if number is None:
            number = level.numbers[key] = len(level.inner)
            level.inner.append(inner)
            for source, edge in ends:
                level.sources.append(source)
                level.edges.append(edge)
            level.starts.append(len(level.sources))
        return number


class View:
    """The numbers of one graph's nodes, computed on demand and cached.

    A successor's view has the view of its parent as `base`, and copies the numbers of unchanged nodes from it.
    `touched`: the nodes whose edges may differ from those in the base.
    """

    def __init__(
        self, owner: Neighbourhoods, graph: Graph, base: View | None = None, touched: Set[Value] = frozenset()
    ) -> None:
        self.owner, self.graph = owner, graph
        self._base, self._touched = base, touched
        self._outputs = frozenset(graph.outputs)
        self._cache: tuple[dict[Value, int], ...] = tuple({} for _ in range(owner.radius + 1))
        self._ends: dict[Value, tuple[_Reads, _Readers]] = {}

    def counts(self) -> Counter[int]:
        """How many nodes of the graph have each number of the highest level. Constant nodes are not counted."""
        top = self.owner.radius
        return Counter(self.number(node, top) for node in self.graph.nodes() if not node.const)

    def number(self, node: Node, radius: int) -> int:
        """The number of a node on the level `radius`. The node must not be constant."""
        cache = self._cache[radius]
        number = cache.get(node.id)
        if number is None:
            if self._base is not None:
                return self._base.number(node, radius)
            number = cache[node.id] = self._find(node, radius)
        return number

    def _find(self, node: Node, radius: int) -> int:
        if radius == 0:
            is_output = not self._outputs.isdisjoint(node.outputs)
            return self.owner.content(self.graph, node, in_types(self.graph, node), is_output)
        below = radius - 1
        inner = self.number(node, below)
        reads, readers = self._ends_of(node)
        ends = [(e if isinstance(e, int) else self.number(e, below), row) for e, row in reads]
        # A node's readers have no order.
        ends += sorted((self.number(e, below), row) for e, row in readers)
        return self.owner.number(radius, inner, tuple(ends))

    def _ends_of(self, node: Node) -> tuple[_Reads, _Readers]:
        """The forward edges of a node, in the order of its inputs, and its backward edges."""
        ends = self._ends.get(node.id)
        if ends is not None:
            return ends
        if self._base is not None and node.id not in self._touched:
            return self._base._ends_of(node)
        graph, edge = self.graph, self.owner.edge
        producers = graph.producers
        reads: _Reads = []
        for slot, value in enumerate(node.inputs):
            if value == ABSENT:
                continue
            source = producers.get(value)
            if source is None:
                type = graph.leaves.types[value]
                reads.append((CONSTANT if type.const else INPUT, edge(True, 0, slot, type)))
                continue
            port = source.outputs.index(value)
            row = edge(True, port, slot, source.types[port])
            reads.append((CONSTANT if source.const else source, row))
        readers: _Readers = []
        for port, (value, type) in enumerate(zip(node.outputs, node.types)):
            for reader in graph.users(value):
                if not reader.const:
                    readers += [
                        (reader, edge(False, port, slot, type))
                        for slot, operand in enumerate(reader.inputs)
                        if operand == value
                    ]
        ends = self._ends[node.id] = (reads, readers)
        return ends

    def successor(self, edit: Edit) -> tuple[View, list[int], list[int]]:
        """The view after an edit, and the numbers of the highest level that the edit removes and adds.

        Level by level, only those nodes are numbered again whose edges may have changed, and the neighbours of nodes
        whose numbers have changed.
        """
        after, _ = apply_edit(self.graph, edit)
        leaving = [*edit.removed, *(old for old, _ in edit.rewired)]
        coming = [*edit.added, *(new for _, new in edit.rewired)]
        outputs = set(self.graph.outputs) ^ set(edit.outputs)
        values = {v for node in (*leaving, *coming) for v in (*node.inputs, *node.outputs)} | outputs
        touched = _touched(after, coming, values)
        view = View(self.owner, after, self, touched)
        changed = view._renumbered(self._unlike(after, coming, outputs), 0)
        for radius in range(1, self.owner.radius + 1):
            changed = view._renumbered(touched.union(changed, *map(view._around, changed)), radius)
        removed = [node.id for node in leaving if view._running(node.id) is None]
        return view, self._numbers({*removed, *changed}), view._numbers(changed)

    def _unlike(self, after: Graph, coming: Iterable[Node], outputs: Iterable[Value]) -> set[Value]:
        """The ids of nodes of the successor `after` whose number on level 0 may differ from that in this graph: new
        nodes, readers of values with another type, and producers of values that are outputs of only one of both
        graphs."""
        before, producers = self.graph.producers, after.producers
        ids = {producers[v].id for v in outputs if v in producers}
        for node in coming:
            ids.add(node.id)
            for value, type in zip(node.outputs, node.types):
                if value in before and self.graph.type(value) != type:
                    ids.update(after.uses.get(value, ()))
        return ids

    def _renumbered(self, ids: Iterable[Value], radius: int) -> set[Value]:
        """Number these nodes on a level, except constant nodes. Returns the ids whose number differs from the
        base's."""
        base = self._base
        assert base is not None
        cache, changed = self._cache[radius], set()
        for id in ids:
            node = self._running(id)
            if node is None:
                continue
            number = cache[id] = self._find(node, radius)
            earlier = base._running(id)
            if earlier is None or base.number(earlier, radius) != number:
                changed.add(id)
        return changed

    def _running(self, id: Value) -> Node | None:
        """The node with this id, unless it is constant."""
        node = self.graph.producers.get(id)
        return None if node is None or node.const or node.id != id else node

    def _around(self, id: Value) -> list[Value]:
        """The ids of the neighbours of a node that runs."""
        reads, readers = self._ends_of(self.graph.producers[id])
        return [e.id for e, _ in (*reads, *readers) if not isinstance(e, int)]

    def _numbers(self, ids: Iterable[Value]) -> list[int]:
        """The numbers of these nodes on the highest level. Nodes that are constant or not in the graph are left out."""
        top = self.owner.radius
        return [self.number(node, top) for id in ids if (node := self._running(id)) is not None]


def in_types(graph: Graph, node: Node) -> InTypes:
    return tuple([None if v == ABSENT else graph.type(v) for v in node.inputs])


def _touched(graph: Graph, nodes: Iterable[Node], values: Iterable[Value]) -> set[Value]:
    """The ids of `nodes`, and of the producers and readers of `values`: their edges may have changed."""
    ids = {node.id for node in nodes}
    producers, uses = graph.producers, graph.uses
    for value in values:
        if value in producers:
            ids.add(producers[value].id)
        ids.update(uses.get(value, ()))
    return ids
