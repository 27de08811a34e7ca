"""Rewrite states as arrays for a graph network.

The paper (X-RLflow, He et al., 2023, section 3.2) builds and encodes every successor graph. In this module, a state is
encoded once, and no successor is built: a candidate is described by the nodes that it matches, adds and removes.
`xrlflow.rl.successors` has the paper's encoding.

The row of features of a node or candidate is computed once. A successor shares most nodes and candidates with its
parent, so an edit needs new rows only for the nodes and candidates that it changed. A few NumPy calls on whole arrays
compute everything else.

Scales: sizes and counts are logarithms, scaled to about 0 to 1; seconds are shares of the graph's modelled cost,
scaled by `squash`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import log1p
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xrlflow.cost.columns import (
    NODE_COLUMNS,
    TYPE_COLUMNS,
    NodeColumns,
    input_columns,
    log_scale,
    node_columns,
    type_columns,
)
from xrlflow.cost.model import AdditiveCost, InTypes
from xrlflow.ir import ABSENT, Edit, Graph, Node, TensorType, Value
from xrlflow.ir.graph import Leaves
from xrlflow.ops.work import COUNTS, ELEMENTWISE
from xrlflow.rewrite import Library, Match, RegionRule, RewriteState
from xrlflow.rewrite.state import Delta
from xrlflow.rl.situation import Situation

if TYPE_CHECKING:
    from typing_extensions import Self

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

UNKNOWN = 0
# The operator name of graph inputs in the vocabulary.
INPUT = "(input)"

# The share of a whole below which `squash` returns nearly 0. The share 1 stays 1.
FINEST = 1e-4
# Columns of a node: its content (`xrlflow.cost.columns`), then its position in the graph.
NODE_PLACE = ("share of the cost", "readers", "is an output")
NODE_FEATURES = NODE_COLUMNS + len(NODE_PLACE)
# Columns of an edge: its tensor, the slots that it joins, its direction (none for a constant).
_SLOT_COLUMNS = 4
EDGE_FEATURES = TYPE_COLUMNS + _SLOT_COLUMNS + 2
CANDIDATE_CONTENT = (
    "matched", "added", "removed", "rewired", "unpriced", "region", "flops added", "flops removed", "bytes added",
    "bytes removed",
)  # fmt: skip
CANDIDATE_PLACE = (
    "delta",
    "delta to the initial cost",
    "less than the best",
    "is the best",
    "gains",
    "same rule",
)
CANDIDATE_FEATURES = len(CANDIDATE_CONTENT) + len(CANDIDATE_PLACE)
# The column of a candidate's modelled delta, squashed: 1 is the whole cost, 0.5 is one percent of it.
DELTA = len(CANDIDATE_CONTENT) + CANDIDATE_PLACE.index("delta")
CHANGE_FEATURES = 6  # sign, count, flops, bytes, constant, seconds
GLOBAL_FEATURES = 7


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The numbers of operators, rules and rule families, from 1 on; 0 stands for unknown names. A vocabulary is stored
    with an agent's parameters.
    """

    operators: tuple[str, ...]
    rules: tuple[str, ...]
    families: tuple[str, ...]

    @staticmethod
    def of(library: Library) -> Vocabulary:
        """The vocabulary of a library: its rules, the operators that they match, and the operators whose work the cost
        models know.
        """
        return Vocabulary((INPUT,), (), ()).extended(library)

    def extended(self, library: Library) -> Vocabulary:
        """Add the new words of a library. Known words keep their numbers."""
        operators = {*COUNTS, *ELEMENTWISE, *library.plans, *library.regions}
        families = {rule.family for rule in library.rules.values()}
        return Vocabulary(
            (*self.operators, *sorted(operators.difference(self.operators))),
            (*self.rules, *sorted(library.rules.keys() - set(self.rules))),
            (*self.families, *sorted(families.difference(self.families))),
        )

    def numbers(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """The numbers of operators, rules and families by name; they start at 1."""
        operators, rules, families = (
            {name: number for number, name in enumerate(names, 1)}
            for names in (self.operators, self.rules, self.families)
        )
        return operators, rules, families


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """A situation as arrays. N nodes (operators, then the graph's inputs), E edges, C candidates.

    op [N]: operator numbers; x [N, NODE_FEATURES]: features of nodes
    edge_index [2, E], edge_attr [E, EDGE_FEATURES]: each tensor forward and backward; a constant is a self-loop
    rule, family [C]: numbers; candidate [C, CANDIDATE_FEATURES]: features
    role_node, role_candidate [M]: pairs of a matched node and its candidate
    change_op, change_candidate [K], change [K, CHANGE_FEATURES]: groups of like operators that candidates add or remove
    globals [1, GLOBAL_FEATURES]: progress of the episode, summary of the candidates

    Numbers are int64, features float32.
    """

    op: Ints
    x: Floats
    edge_index: Ints
    edge_attr: Floats
    rule: Ints
    family: Ints
    candidate: Floats
    role_node: Ints
    role_candidate: Ints
    change_op: Ints
    change_candidate: Ints
    change: Floats
    globals: Floats

    @property
    def candidates(self) -> int:
        return len(self.rule)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All arrays by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Observation):
    """The disjoint union of B observations. `globals` is [B, GLOBAL_FEATURES].

    batch [N], rule_batch [C]: the number of the observation of each node and of each candidate.
    """

    batch: Ints
    rule_batch: Ints

    @staticmethod
    def of(observations: Sequence[Observation]) -> Batch:
        """Join observations. Raises ValueError if there is none."""
        nodes = np.array([len(o.op) for o in observations])
        candidates = np.array([o.candidates for o in observations])
        first_node = np.cumsum(nodes) - nodes
        first_candidate = np.cumsum(candidates) - candidates
        starts = {
            "edge_index": first_node,
            "role_node": first_node,
            "role_candidate": first_candidate,
            "change_candidate": first_candidate,
        }

        def joined(name: str) -> npt.NDArray[Any]:
            parts = [getattr(o, name) for o in observations]
            if name in starts:
                parts = [part + start for part, start in zip(parts, starts[name])]
            return np.concatenate(parts, axis=-1 if name == "edge_index" else 0)

        numbers = np.arange(len(observations))
        return Batch(
            **{f.name: joined(f.name) for f in fields(Observation)},
            batch=np.repeat(numbers, nodes),
            rule_batch=np.repeat(numbers, candidates),
        )


def squash(share: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Scale shares of a whole so that small shares stay distinguishable: 1e-4 -> 0.08, 0.01 -> 0.5, 1 -> 1. The sign
    stays.
    """
    value = np.asarray(share, np.float64)
    return np.sign(value) * np.log1p(np.abs(value) / FINEST) / log1p(1 / FINEST)


@dataclass(frozen=True, slots=True)
class Part:
    """A group of operators of one kind and work that an edit adds (count > 0) or removes (count < 0), with the sums of
    their work.
    """

    op: str
    count: int
    flops: float
    bytes: float
    seconds: float
    const: bool


@dataclass(frozen=True, slots=True)
class Change:
    """What an edit changes: the numbers of nodes that it adds and removes, the number of values that it rewires, and
    the groups of operators among these nodes.
    """

    added: int
    removed: int
    rewired: int
    parts: tuple[Part, ...]


class Priced(float):
    """The delta of an edit in seconds, with the change that the edit makes.

    Matching builds the edit of each candidate once, to compute its delta. With `Pricing`, the features need not build
    the edit again.
    """

    __slots__ = ("_change", "_source")

    _source: tuple[Graph, Edit] | None
    _change: Change | None

    def __new__(cls, delta: float, graph: Graph, edit: Edit) -> Self:
        priced = super().__new__(cls, delta)
        priced._source, priced._change = (graph, edit), None
        return priced

    def change(self, featuriser: Featuriser) -> Change:
        """The change that the edit makes, computed on first use."""
        if self._change is None:
            assert self._source is not None
            self._change, self._source = featuriser.change(*self._source), None
        return self._change

    def __reduce__(self) -> Any:
        return (float, (float(self),))


@dataclass(frozen=True, slots=True)
class Pricing:
    """A cost model's delta that returns `Priced` numbers."""

    delta: Delta

    @staticmethod
    def of(delta: Delta) -> Pricing:
        return delta if isinstance(delta, Pricing) else Pricing(delta)

    def __call__(self, graph: Graph, edit: Edit) -> float:
        return Priced(self.delta(graph, edit), graph, edit)


@dataclass(frozen=True, slots=True)
class _Content:
    """The features of a node that do not depend on its position: their row, its work at run time and its seconds."""

    row: int
    flops: float
    bytes: float
    seconds: float
    const: bool


class _Column:
    """A growing array of rows."""

    __slots__ = ("data", "size")

    def __init__(self, width: int | None, dtype: npt.DTypeLike) -> None:
        self.data = np.zeros((256,) if width is None else (256, width), dtype)
        self.size = 0

    def add(self, rows: Sequence[Any]) -> int:
        """Append rows; returns the number of the first one."""
        start, self.size = self.size, self.size + len(rows)
        if self.size > len(self.data):
            grown = np.zeros((max(2 * len(self.data), self.size), *self.data.shape[1:]), self.data.dtype)
            grown[:start] = self.data[:start]
            self.data = grown
        if rows:
            self.data[start : self.size] = rows
        return start


class _Pool:
    """The rows of all nodes and candidates of the states that descend from one graph. The pool numbers their values
    from 0.
    """

    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves
        self.values: dict[Value, int] = {}
        self.leaf_type = _Column(None, np.int64)  # by value; -1 if a node computes it
        self.nodes: dict[Node, int] = {}
        self.node = _Column(6, np.int64)  # operator, content, first input, inputs, first output, outputs
        self.input = _Column(3, np.int64)  # value, slot, type for which the content was computed
        self.output = _Column(3, np.int64)  # value, slot, type
        self.matches: dict[Match, int] = {}
        self.match = _Column(6, np.int64)  # rule, family, first role, roles, first part, parts
        self.match_content = _Column(len(CANDIDATE_CONTENT), np.float32)
        self.delta = _Column(None, np.float64)
        self.role = _Column(None, np.int64)  # value
        self.part_op = _Column(None, np.int64)
        self.part = _Column(CHANGE_FEATURES, np.float64)  # the last one is in seconds

    @property
    def size(self) -> int:
        return len(self.nodes) + len(self.matches)


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """A graph as arrays. N nodes: operators, then the graph's inputs. R inputs of nodes."""

    op: Ints  # [N]: operator number
    content: Ints  # [N]: row of features
    source: Ints  # [R]: the node that computes the input; -1 for a constant
    target: Ints  # [R]: the node that reads the input
    type: Ints  # [R]: row of the input's tensor type
    slots: Ints  # [R, 2]: output slot of the source, input slot of the target
    positions: Ints  # by a value's number in the pool: the node that computes the value


class _Choices:
    """Rows of the candidates in a pool: `table` [C, 6], `content` [C, CANDIDATE_CONTENT], `deltas` [C] in seconds."""

    __slots__ = ("best", "content", "deltas", "gaining", "table")

    def __init__(self, table: Ints, content: Floats, deltas: npt.NDArray[np.float64]) -> None:
        self.table, self.content, self.deltas = table, content, deltas
        self.best = float(deltas.min()) if len(table) else 0.0
        self.gaining = deltas < 0

    def columns(self, situation: Situation) -> Floats:
        """The features of the candidates [C, CANDIDATE_FEATURES]."""
        table, deltas, best = self.table, self.deltas, self.best
        out = np.empty((len(table), CANDIDATE_FEATURES), np.float32)
        out[:, : len(CANDIDATE_CONTENT)] = self.content
        scale = max(situation.cost, 1e-30)
        position_columns = (
            squash(deltas / scale),
            squash(deltas / max(situation.initial, 1e-30)),
            squash((deltas - best) / scale),
            deltas <= best,
            self.gaining,
            np.log1p(np.bincount(table[:, 0])[table[:, 0]]) / log1p(64) if len(table) else 0.0,
        )
        for column, values in enumerate(position_columns, len(CANDIDATE_CONTENT)):
            out[:, column] = values
        return out

    def outlook(self, situation: Situation, nodes: int) -> list[float]:
        """The global features: the progress of the episode, the size of the graph, and a summary of the candidates."""
        relative = situation.cost / max(situation.initial, 1e-30)
        return [
            relative,
            float(squash(relative - 1)),
            situation.left,
            log_scale(nodes, 4096),
            log_scale(len(self.table), 4096),
            float(squash(self.best / max(situation.cost, 1e-30))),
            float(self.gaining.mean()) if len(self.table) else 0.0,
        ]


class Featuriser:
    """Computes observations. It caches the rows of up to `limit` nodes and candidates.

    `prices` computes the nodes' shares of the cost: it is the cost model whose cost the agent minimises, or a similar
    one.
    """

    def __init__(self, vocabulary: Vocabulary, prices: AdditiveCost, limit: int = 100_000) -> None:
        self.vocabulary = vocabulary
        self.prices = prices
        self.limit = limit
        self._ops, self._rules, self._families = vocabulary.numbers()
        self._pools: dict[int, _Pool] = {}
        self._contents: dict[tuple[object, ...], _Content] = {}
        self._content = _Column(NODE_COLUMNS, np.float32)
        self._content_seconds = _Column(None, np.float64)
        self._types: dict[TensorType, int] = {}
        self._type = _Column(TYPE_COLUMNS, np.float32)

    @staticmethod
    def pricing(delta: Delta) -> Delta:
        """Wrap a cost model's delta so that the observation of candidates is faster."""
        return Pricing.of(delta)

    def __call__(self, situation: Situation) -> Observation:
        """Observe a situation. The candidates keep their order."""
        graph, cost = situation.state.graph, situation.cost
        pool = self._pool(graph)
        structure = self._structure(pool, graph)
        x = self._nodes(pool, structure, graph, cost)
        edge_index, edge_attr = self._edges(structure)
        choices = self._candidates(pool, situation)
        table = choices.table
        roles = _ranges(table[:, 2], table[:, 3])
        parts = _ranges(table[:, 4], table[:, 5])
        change = pool.part.data[parts]
        change[:, -1] = squash(change[:, -1] / max(cost, 1e-30))
        numbers = np.arange(len(table))
        return Observation(
            op=structure.op,
            x=x,
            edge_index=edge_index,
            edge_attr=edge_attr,
            rule=table[:, 0].copy(),  # a view would keep the table alive
            family=table[:, 1].copy(),
            candidate=choices.columns(situation),
            role_node=structure.positions[pool.role.data[roles]],
            role_candidate=np.repeat(numbers, table[:, 3]),
            change_op=pool.part_op.data[parts],
            change_candidate=np.repeat(numbers, table[:, 5]),
            change=change.astype(np.float32),
            globals=np.array([choices.outlook(situation, len(x))], np.float32),
        )

    def _nodes(self, pool: _Pool, structure: Structure, graph: Graph, cost: float) -> Floats:
        """The features of the nodes [N, NODE_FEATURES]."""
        source, count = structure.source, len(structure.op)
        x = np.empty((count, NODE_FEATURES), np.float32)
        of_content = self._content.data.shape[1]
        x[:, :of_content] = self._content.data[structure.content]
        x[:, of_content] = squash(self._content_seconds.data[structure.content] / max(cost, 1e-30))
        x[:, of_content + 1] = np.log1p(np.bincount(source[source >= 0], minlength=count)) / log1p(64)
        x[:, of_content + 2] = 0.0
        ends = [structure.positions[pool.values[v]] for v in graph.outputs if v in pool.values]
        x[[p for p in ends if p >= 0], of_content + 2] = 1.0
        return x

    def _edges(self, structure: Structure) -> tuple[Ints, Floats]:
        """The edges [2, E] and their features [E, EDGE_FEATURES].

        An input that a node computes gives a forward and a backward edge; a constant gives a self-loop of its reader.
        """
        source, target = structure.source, structure.target
        computed = source >= 0
        tensors = np.concatenate((self._type.data[structure.type], _slot_columns(structure.slots)), 1)
        read, loops = int(computed.sum()), len(source) - int(computed.sum())
        columns = np.zeros((2 * read + loops, EDGE_FEATURES), np.float32)
        columns[:read, :-2] = columns[read : 2 * read, :-2] = tensors[computed]
        columns[2 * read :, :-2] = tensors[~computed]
        columns[:read, -2] = columns[read : 2 * read, -1] = 1.0
        above, below, alone = source[computed], target[computed], target[~computed]
        ends = np.stack((np.concatenate((above, below, alone)), np.concatenate((below, above, alone))))
        return ends, columns

    @property
    def types(self) -> list[TensorType]:
        """The tensor types seen so far. `Structure.type` holds indices into this list."""
        return list(self._types)

    def structure(self, graph: Graph) -> Structure:
        """The nodes and edges of a graph as arrays. `content` and `type` are rows of this featuriser."""
        return self._structure(self._pool(graph), graph)

    def change(self, graph: Graph, edit: Edit) -> Change:
        """The change that an edit makes. Operators of the same kind and work form one part."""
        new = {v: t for node in edit.added for v, t in zip(node.outputs, node.types)}
        groups: Counter[tuple[str, _Content, bool]] = Counter()
        for node in edit.removed:
            groups[node.op, self._content_of(graph, node, _types(graph, node)), False] += 1
        for node in edit.added:
            in_types = tuple(
                [None if v == ABSENT else new[v] if v in new else graph.type(v) for v in node.inputs]
            )
            groups[node.op, self._content_of(graph, node, in_types), True] += 1
        parts = tuple(
            Part(op, n if added else -n, n * c.flops, n * c.bytes, n * c.seconds, c.const)
            for (op, c, added), n in groups.items()
        )
        return Change(len(edit.added), len(edit.removed), len(edit.rewired), parts)

    def _pool(self, graph: Graph) -> _Pool:
        """The pool of a graph and its successors, which share their leaves. Drops all pools if they grow too large."""
        pool = self._pools.get(id(graph.leaves))
        if pool is not None and sum(p.size for p in self._pools.values()) <= self.limit:
            return pool
        if pool is not None or len(self._pools) > self.limit // 100:
            self._pools.clear()
        pool = self._pools[id(graph.leaves)] = _Pool(graph.leaves)
        return pool

    def _structure(self, pool: _Pool, graph: Graph) -> Structure:
        nodes = list(graph.nodes())
        rows_of_nodes = pool.nodes
        try:
            slots = [rows_of_nodes[n] for n in nodes]
        except KeyError:
            slots = [
                rows_of_nodes[n] if n in rows_of_nodes else self._add_node(pool, graph, n) for n in nodes
            ]
        fed = [self._value(pool, v) for v in graph.inputs]
        at, inputs = len(nodes), len(fed)

        table = pool.node.data[slots] if slots else pool.node.data[:0]
        entries = _ranges(table[:, 2], table[:, 3])
        read = pool.input.data[entries]
        target = np.repeat(np.arange(at), table[:, 3])
        outputs = pool.output.data[_ranges(table[:, 4], table[:, 5])]
        positions = np.full(len(pool.values), -1)
        positions[fed] = np.arange(at, at + inputs)
        positions[outputs[:, 0]] = np.repeat(np.arange(at), table[:, 5])
        types = pool.leaf_type.data[: len(pool.values)].copy()
        types[outputs[:, 0]] = outputs[:, 2]
        output_slot = np.zeros(len(pool.values), np.int64)
        output_slot[outputs[:, 0]] = outputs[:, 1]

        type = types[read[:, 0]]
        stale = np.flatnonzero(type != read[:, 2])
        if stale.size:  # an input of these nodes has another type than when their row was computed
            pool.input.data[entries[stale], 2] = type[stale]
            for position in np.unique(target[stale]).tolist():
                node = nodes[position]
                row = self._content_of(graph, node, _types(graph, node)).row
                pool.node.data[slots[position], 1] = table[position, 1] = row
        content = np.empty(at + inputs, np.int64)
        content[:at] = table[:, 1]
        op = np.empty(at + inputs, np.int64)
        op[:at], op[at:] = table[:, 0], self._ops[INPUT]
        for number, value in enumerate(graph.inputs, at):
            content[number] = self._content_of_input(graph.leaves.types[value]).row
        slots_joined = np.stack((output_slot[read[:, 0]], read[:, 1]), 1)
        return Structure(op, content, positions[read[:, 0]], target, type, slots_joined, positions)

    def _candidates(self, pool: _Pool, situation: Situation) -> _Choices:
        rows_of_matches, state = pool.matches, situation.state
        try:
            rows = [rows_of_matches[m] for m in situation.candidates]
        except KeyError:
            rows = [
                rows_of_matches[m] if m in rows_of_matches else self._add_match(pool, state, m)
                for m in situation.candidates
            ]
        if not rows:
            return _Choices(pool.match.data[:0], pool.match_content.data[:0], pool.delta.data[:0])
        return _Choices(pool.match.data[rows], pool.match_content.data[rows], pool.delta.data[rows])

    def _value(self, pool: _Pool, value: Value) -> int:
        number = pool.values.get(value)
        if number is None:
            number = pool.values[value] = len(pool.values)
            type = pool.leaves.types.get(value)
            pool.leaf_type.add((-1 if type is None else self._type_of(type),))
        return number

    def _add_node(self, pool: _Pool, graph: Graph, node: Node) -> int:
        in_types = _types(graph, node)
        first_input = pool.input.add(
            [
                (self._value(pool, value), slot, self._type_of(type))
                for slot, (value, type) in enumerate(zip(node.inputs, in_types))
                if type is not None
            ]
        )
        first_output = pool.output.add(
            [
                (self._value(pool, value), slot, self._type_of(type))
                for slot, (value, type) in enumerate(zip(node.outputs, node.types))
            ]
        )
        content = self._content_of(graph, node, in_types).row
        op = self._ops.get(node.op, UNKNOWN)
        row = (op, content, first_input, pool.input.size - first_input, first_output, len(node.outputs))
        number = pool.nodes[node] = pool.node.add((row,))
        return number

    def _add_match(self, pool: _Pool, state: RewriteState, match: Match) -> int:
        rule, delta = match.rule, match.delta
        change = (
            delta.change(self) if isinstance(delta, Priced) else self.change(state.graph, state.edit(match))
        )
        role = pool.role.add([self._value(pool, n.id) for n in match.nodes])
        part = pool.part.add(
            [
                (
                    1.0 if p.count > 0 else -1.0,
                    log_scale(abs(p.count), 256),
                    log_scale(p.flops, 1e12),
                    log_scale(p.bytes, 1e10),
                    p.const,
                    p.seconds,
                )
                for p in change.parts
            ]
        )
        pool.part_op.add([self._ops.get(p.op, UNKNOWN) for p in change.parts])
        pool.match_content.add(
            (
                (
                    log_scale(len(match.nodes), 256),
                    log_scale(change.added, 256),
                    log_scale(change.removed, 256),
                    log_scale(change.rewired, 256),
                    rule.unpriced,
                    isinstance(rule, RegionRule),
                    log_scale(sum(p.flops for p in change.parts if p.count > 0), 1e12),
                    log_scale(sum(p.flops for p in change.parts if p.count < 0), 1e12),
                    log_scale(sum(p.bytes for p in change.parts if p.count > 0), 1e10),
                    log_scale(sum(p.bytes for p in change.parts if p.count < 0), 1e10),
                ),
            )
        )
        pool.delta.add((delta,))
        numbers = self._rules.get(rule.name, UNKNOWN), self._families.get(rule.family, UNKNOWN)
        number = pool.match.add(((*numbers, role, len(match.nodes), part, len(change.parts)),))
        pool.matches[match] = number
        return number

    def _type_of(self, type: TensorType) -> int:
        row = self._types.get(type)
        if row is None:
            row = self._types[type] = self._type.add((type_columns(type, self.prices.bindings),))
        return row

    def _content_of_input(self, type: TensorType) -> _Content:
        key = (INPUT, type)
        content = self._contents.get(key)
        if content is None:
            columns = input_columns(type, self.prices.bindings)
            content = self._contents[key] = self._add_content(columns, 0.0, False)
        return content

    def _content_of(self, graph: Graph, node: Node, in_types: InTypes) -> _Content:
        key: tuple[object, ...] = (node.op, node.attrs.digest, in_types, node.types)
        if node.op in ("If", "Loop"):
            key = (*key, node.inputs[0])  # the condition or trip count, which may be constant
        content = self._contents.get(key)
        if content is None:
            content = self._contents[key] = self._content_from(graph, node, in_types)
        return content

    def _content_from(self, graph: Graph, node: Node, in_types: InTypes) -> _Content:
        seconds = self.prices.seconds(graph, node, in_types)
        columns = node_columns(node, in_types, self.prices.bindings, seconds)
        return self._add_content(columns, seconds, node.const)

    def _add_content(self, columns: NodeColumns, seconds: float, const: bool) -> _Content:
        self._content_seconds.add((seconds,))
        return _Content(self._content.add((columns.row,)), columns.flops, columns.bytes, seconds, const)


def _types(graph: Graph, node: Node) -> InTypes:
    return tuple([None if v == ABSENT else graph.type(v) for v in node.inputs])


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """The ranges start, ..., start + count - 1 of all pairs, concatenated."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - counts), counts) + np.arange(total)


def _slot_columns(slots: Ints) -> Floats:
    """Slots [R, 2] -> columns [R, 4]: output slot, input slot, whether the input slot is 0, whether it is 1."""
    out = np.empty((len(slots), _SLOT_COLUMNS), np.float32)
    out[:, :2] = np.minimum(slots, 8) / 8
    out[:, 2] = slots[:, 1] == 0
    out[:, 3] = slots[:, 1] == 1
    return out


__all__ = [
    "CANDIDATE_FEATURES",
    "CHANGE_FEATURES",
    "DELTA",
    "EDGE_FEATURES",
    "GLOBAL_FEATURES",
    "INPUT",
    "NODE_FEATURES",
    "UNKNOWN",
    "Batch",
    "Change",
    "Featuriser",
    "Observation",
    "Part",
    "Priced",
    "Pricing",
    "Structure",
    "Vocabulary",
    "squash",
]
