"""Finds where substitutions changed a graph: their nodes before and after, and which substitutions touch each other."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

from xrlflow.ir import Edit, Graph, Node, Value
from xrlflow.report.page.drawing import Drawing, NodeKey

# Between two pairs of equal nodes, at most this many pairs of other nodes are compared.
_MOST_PAIRS = 100_000


@dataclass(frozen=True, slots=True)
class Substitution:
    """One substitution. Boxes are given by their indices in the old or the new drawing."""

    rule: str
    gain: float | None  # the modelled seconds that it saves; None if they are not known
    before: tuple[int, ...]  # boxes that it removed
    after: tuple[int, ...]  # boxes that it added
    near: tuple[int, ...]  # boxes that read its results, if the new drawing has no box that it added
    region: int  # substitutions that touch each other have the same number

    def to_json(self) -> list[Any]:
        """Boxes are given as ranges, [first, last]."""
        return [self.rule, self.gain, *map(_ranges, (self.before, self.after, self.near)), self.region]


def _ranges(indices: Sequence[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ranges


@dataclass(slots=True)
class Changes:
    """Follows nodes through edits. Lists have an entry for each substitution."""

    rules: list[tuple[str, float | None]] = field(default_factory=list)  # names and gains
    # For each node that an edit added: the nodes of the first graph that it replaces, and the substitutions behind it.
    origins: dict[NodeKey, frozenset[NodeKey]] = field(default_factory=dict)
    steps: dict[NodeKey, frozenset[int]] = field(default_factory=dict)
    sources: list[frozenset[NodeKey]] = field(default_factory=list)  # replaced nodes of the first graph
    readers: list[frozenset[NodeKey]] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # a union-find structure of regions

    def step(self, scope: str, rule: str, gain: float | None, edit: Edit) -> None:
        """Add a substitution."""
        number = len(self.rules)
        self.rules.append((rule, gain))
        self.parents.append(number)
        removed = [(scope, n.id) for n in edit.removed if not n.const]
        added = [(scope, n.id) for n in edit.added if not n.const]
        rewired = [(scope, new.id) for _, new in edit.rewired]
        origins = frozenset[NodeKey]().union(*(self.origins.get(p, frozenset([p])) for p in removed))
        steps = frozenset([number]).union(*(self.steps.get(p, frozenset()) for p in removed))
        for earlier in steps:
            self._join(number, earlier)
        for key in removed:
            self.origins.pop(key, None)
            self.steps.pop(key, None)
        for key in added:
            self.origins[key] = origins
            self.steps[key] = steps
        self.sources.append(origins)
        self.readers.append(frozenset(rewired))

    def _root(self, number: int) -> int:
        while self.parents[number] != number:
            number = self.parents[number]
        return number

    def _join(self, a: int, b: int) -> None:
        a, b = sorted((self._root(a), self._root(b)))
        self.parents[b] = a

    def substitutions(self, before: Drawing, after: Drawing) -> tuple[Substitution, ...]:
        """The substitutions, as the two drawings show them."""
        owners: dict[NodeKey, int] = {}
        for number, sources in enumerate(self.sources):
            for key in sources:  # one node may have been split between several
                self._join(number, owners.setdefault(key, number))
        old, new = before.indices, after.indices
        boxes: dict[int, list[int]] = {}
        for key, steps in self.steps.items():
            if key in new:
                for number in steps:
                    boxes.setdefault(number, []).append(new[key])
        roots = list(dict.fromkeys(self._root(n) for n in range(len(self.rules))))
        return tuple(
            Substitution(
                rule, gain,
                _indices(self.sources[n], old), tuple(sorted(boxes.get(n, ()))),
                () if n in boxes else _indices(self.readers[n], new), roots.index(self._root(n)),
            )
            for n, (rule, gain) in enumerate(self.rules)
        )  # fmt: skip


def _indices(keys: Iterable[NodeKey], indices: Mapping[NodeKey, int]) -> tuple[int, ...]:
    return tuple(sorted(indices[key] for key in keys if key in indices))


def differences(old: Graph, new: Graph, before: Drawing, after: Drawing) -> tuple[Substitution, ...]:
    """The regions in which two graphs differ, if the substitutions between them are not known.

    Two nodes count as the same if they apply the same operator to the same inputs, if the same nodes read them at the
    same inputs, or if they are alike and lie between nodes that are the same.
    """
    pairs = _pairs(old, new)
    _align(pairs, _Ordered(old, before), _Ordered(new, after))
    matched = set(pairs.values())
    removed = {n.id for n in old.nodes() if not n.const and n.id not in pairs}
    added = {n.id for n in new.nodes() if not n.const and n.id not in matched}
    regions = _Regions()
    for graph, changed, side in ((old, removed, 0), (new, added, 1)):
        for id in changed:
            regions.add((side, id))
            for value in graph.producers[id].inputs:
                producer = graph.producers.get(value)
                if producer is not None and producer.id in changed:
                    regions.join((side, id), (side, producer.id))
    for a, b in pairs.items():
        for x, y in zip(old.producers[a].inputs, new.producers[b].inputs):
            first, second = old.producers.get(x), new.producers.get(y)
            if first is not None and second is not None and first.id in removed and second.id in added:
                regions.join((0, first.id), (1, second.id))
    for x, y in zip(old.outputs, new.outputs):
        first, second = old.producers.get(x), new.producers.get(y)
        if first is not None and second is not None and first.id in removed and second.id in added:
            regions.join((0, first.id), (1, second.id))
    sides = (before.indices, after.indices)
    out = []
    for number, members in enumerate(regions.all()):
        here, there = (
            _indices((("", id) for at, id in members if at == side), sides[side]) for side in (0, 1)
        )
        out.append(Substitution("", None, here, there, (), number))
    return tuple(out)


def _pairs(old: Graph, new: Graph) -> dict[Value, Value]:
    """Pairs of equal nodes of two graphs: from the inputs down, then from the outputs up."""
    same: dict[Value, Value] = dict(zip(old.inputs, new.inputs))
    by_content: dict[tuple[int, tuple[Value, ...]], Node] = {}
    pairs: dict[Value, Value] = {}
    used: set[Value] = set()
    for node in new.topological():
        by_content.setdefault((_kind(node), node.inputs), node)
    for node in old.topological():
        inputs = tuple(same.get(v, v) for v in node.inputs)
        match = by_content.get((_kind(node), inputs))
        if match is not None and match.id not in used:
            pairs[node.id] = match.id
            used.add(match.id)
            same.update(zip(node.outputs, match.outputs))
    pending: list[tuple[Value, Value]] = list(zip(old.outputs, new.outputs))
    visited: set[tuple[Value, Value]] = set()
    while pending:
        pair = pending.pop()
        first, second = old.producers.get(pair[0]), new.producers.get(pair[1])
        if first is None or second is None or pair in visited:
            continue
        visited.add(pair)
        if pairs.get(first.id) != second.id:
            if first.id in pairs or second.id in used or _kind(first) != _kind(second):
                continue
            pairs[first.id] = second.id
            used.add(second.id)
        pending += zip(first.inputs, second.inputs)
    return pairs


class _Ordered:
    """The nodes of a graph in order, and two keys of each node: its name in the file, and its operator with types."""

    def __init__(self, graph: Graph, drawing: Drawing) -> None:
        names = {key[1]: drawing.boxes[i].name for key, i in drawing.indices.items() if not key[0]}
        self.nodes = [node for node in graph.topological() if not node.const]
        self.names = [(node.op, names.get(node.id, "")) for node in self.nodes]
        self.kinds = [
            (_kind(node), node.types, tuple(v for v in node.inputs if graph.const(v) is not None))
            for node in self.nodes
        ]


def _align(pairs: dict[Value, Value], old: _Ordered, new: _Ordered) -> None:
    """Add pairs of nodes that are alike and in the same order, between nodes that are paired already.

    Nodes whose name or kind is unique in both graphs are paired first, then nodes between these.
    """
    first = {node.id: i for i, node in enumerate(old.nodes)}
    second = {node.id: i for i, node in enumerate(new.nodes)}
    anchors = [(first[a], second[b]) for a, b in pairs.items() if a in first and b in second]
    used = ({a for a, _ in anchors}, {b for _, b in anchors})
    for a_keys, b_keys in ((old.names, new.names), (old.kinds, new.kinds)):
        a_only, b_only = _unique(a_keys), _unique(b_keys)
        for key, a in a_only.items():
            b = b_only.get(key)
            if b is not None and a not in used[0] and b not in used[1] and _alike(old.nodes[a], new.nodes[b]):
                anchors.append((a, b))
                used[0].add(a)
                used[1].add(b)
    fixed = [(-1, -1), *_rising(sorted(anchors)), (len(old.nodes), len(new.nodes))]
    matches = list(anchors)
    for (a, b), (c, d) in pairwise(fixed):
        here = [i for i in range(a + 1, c) if i not in used[0]]
        there = [i for i in range(b + 1, d) if i not in used[1]]
        if len(here) * len(there) > _MOST_PAIRS:
            continue
        matcher = SequenceMatcher(
            None, [old.kinds[i] for i in here], [new.kinds[i] for i in there], autojunk=False
        )
        matches += [
            (here[m.a + k], there[m.b + k]) for m in matcher.get_matching_blocks() for k in range(m.size)
        ]
    pairs.update((old.nodes[a].id, new.nodes[b].id) for a, b in matches)


def _unique(keys: Sequence[Hashable]) -> dict[Hashable, int]:
    """The indices of keys that occur once."""
    count = Counter(keys)
    return {key: i for i, key in enumerate(keys) if count[key] == 1}


def _alike(first: Node, second: Node) -> bool:
    return (_kind(first), first.types) == (_kind(second), second.types)


def _rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest subsequence in which both numbers of the pairs increase. `pairs` are sorted by their first
    numbers."""
    ends: list[int] = []  # for each length, the smallest last number of a subsequence
    last: list[tuple[int, int]] = []
    before: dict[tuple[int, int], tuple[int, int] | None] = {}
    for pair in pairs:
        at = bisect_left(ends, pair[1])
        before[pair] = last[at - 1] if at else None
        ends[at : at + 1] = [pair[1]]
        last[at : at + 1] = [pair]
    chain: list[tuple[int, int]] = []
    step = last[-1] if last else None
    while step is not None:
        chain.append(step)
        step = before[step]
    return chain[::-1]


def _kind(node: Node) -> int:
    return hash((node.op, node.attrs.digest, len(node.inputs), len(node.outputs)))


Member = tuple[int, Value]


class _Regions:
    """A union-find structure of nodes of both graphs: sets of nodes that belong to one region."""

    def __init__(self) -> None:
        self._parent: dict[Member, Member] = {}

    def add(self, member: Member) -> None:
        self._parent.setdefault(member, member)

    def _root(self, member: Member) -> Member:
        while self._parent[member] != member:
            member = self._parent[member]
        return member

    def join(self, a: Member, b: Member) -> None:
        self.add(a)
        self.add(b)
        self._parent[self._root(a)] = self._root(b)

    def all(self) -> Sequence[Sequence[Member]]:
        groups: dict[Member, list[Member]] = {}
        for member in self._parent:
            groups.setdefault(self._root(member), []).append(member)
        return list(groups.values())
