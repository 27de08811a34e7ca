"""Where substitutions changed a graph: their places before and after, and which of them touch each other."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

from xrlflow.ir import Edit, Graph, Node, Value
from xrlflow.report.page.drawing import Drawing, Place

# Between two nodes that are the same, this many pairs of nodes are tried at most.
_MOST_PAIRS = 100_000


@dataclass(frozen=True, slots=True)
class Substitution:
    """One substitution. `gain`: the modelled seconds that it saves, None if it was made without a price.

    `before`, `after`: indices of boxes. `near`: boxes of the new graph that read the results, if nothing that it wrote
    is left. `region`: substitutions that touch each other have one number.
    """

    rule: str
    gain: float | None
    before: tuple[int, ...]
    after: tuple[int, ...]
    near: tuple[int, ...]
    region: int

    def to_json(self) -> list[Any]:
        """Boxes are given as ranges, [first, last]."""
        return [self.rule, self.gain, *map(_ranges, (self.before, self.after, self.near)), self.region]


def _ranges(indices: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for index in indices:
        if found and found[-1][1] == index - 1:
            found[-1][1] = index
        else:
            found.append([index, index])
    return found


@dataclass(slots=True)
class Changes:
    """Follows nodes through edits.

    `origins`: for each node that an edit made, the nodes of the first graph that it goes back to. `made_by`: the steps
    that led to it.
    """

    rules: list[tuple[str, float | None]] = field(default_factory=list)
    origins: dict[Place, frozenset[Place]] = field(default_factory=dict)
    made_by: dict[Place, frozenset[int]] = field(default_factory=dict)
    sources: list[frozenset[Place]] = field(default_factory=list)
    readers: list[frozenset[Place]] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)

    def step(self, scope: str, rule: str, gain: float | None, edit: Edit | None) -> None:
        """One more substitution; `edit` is None if its place is not known."""
        number = len(self.rules)
        self.rules.append((rule, gain))
        self.joined.append(number)
        removed = [(scope, n.id) for n in (edit.removed if edit else ()) if not n.const]
        added = [(scope, n.id) for n in (edit.added if edit else ()) if not n.const]
        rewired = [(scope, new.id) for _, new in (edit.rewired if edit else ())]
        origins = frozenset[Place]().union(*(self.origins.get(p, frozenset([p])) for p in removed))
        steps = frozenset([number]).union(*(self.made_by.get(p, frozenset()) for p in removed))
        for earlier in steps:
            self._join(number, earlier)
        for place in removed:
            self.origins.pop(place, None)
            self.made_by.pop(place, None)
        for place in added:
            self.origins[place] = origins
            self.made_by[place] = steps
        self.sources.append(origins)
        self.readers.append(frozenset(rewired))

    def _root(self, number: int) -> int:
        while self.joined[number] != number:
            number = self.joined[number]
        return number

    def _join(self, a: int, b: int) -> None:
        a, b = sorted((self._root(a), self._root(b)))
        self.joined[b] = a

    def found(self, before: Drawing, after: Drawing) -> tuple[Substitution, ...]:
        """The substitutions, as the two drawings show them."""
        owners: dict[Place, int] = {}
        for number, sources in enumerate(self.sources):
            for place in sources:  # one node may have been split between several
                self._join(number, owners.setdefault(place, number))
        old, new = before.places, after.places
        written: dict[int, list[int]] = {}
        for place, steps in self.made_by.items():
            if place in new:
                for number in steps:
                    written.setdefault(number, []).append(new[place])
        roots = list(dict.fromkeys(self._root(n) for n in range(len(self.rules))))
        return tuple(
            Substitution(
                rule, gain,
                _indices(self.sources[n], old), tuple(sorted(written.get(n, ()))),
                () if n in written else _indices(self.readers[n], new), roots.index(self._root(n)),
            )
            for n, (rule, gain) in enumerate(self.rules)
        )  # fmt: skip


def _indices(places: Iterable[Place], known: Mapping[Place, int]) -> tuple[int, ...]:
    return tuple(sorted(known[place] for place in places if place in known))


def differences(old: Graph, new: Graph, before: Drawing, after: Drawing) -> tuple[Substitution, ...]:
    """The regions in which two graphs differ, where nobody knows how one was made of the other.

    Nodes are the same if they compute the same of the same inputs, if the same nodes read them in the same way, or if
    they are alike, and between nodes that are the same.
    """
    pairs = _pairs(old, new)
    _align(pairs, _Ordered(old, before), _Ordered(new, after))
    matched = set(pairs.values())
    gone = {n.id for n in old.nodes() if not n.const and n.id not in pairs}
    come = {n.id for n in new.nodes() if not n.const and n.id not in matched}
    regions = _Regions()
    for graph, changed, side in ((old, gone, 0), (new, come, 1)):
        for id in changed:
            regions.add((side, id))
            for value in graph.producers[id].inputs:
                producer = graph.producers.get(value)
                if producer is not None and producer.id in changed:
                    regions.join((side, id), (side, producer.id))
    for a, b in pairs.items():
        for x, y in zip(old.producers[a].inputs, new.producers[b].inputs):
            first, second = old.producers.get(x), new.producers.get(y)
            if first is not None and second is not None and first.id in gone and second.id in come:
                regions.join((0, first.id), (1, second.id))
    for x, y in zip(old.outputs, new.outputs):
        first, second = old.producers.get(x), new.producers.get(y)
        if first is not None and second is not None and first.id in gone and second.id in come:
            regions.join((0, first.id), (1, second.id))
    sides = (before.places, after.places)
    out = []
    for number, members in enumerate(regions.all()):
        here, there = (
            _indices((("", id) for at, id in members if at == side), sides[side]) for side in (0, 1)
        )
        out.append(Substitution("", None, here, there, (), number))
    return tuple(out)


def _pairs(old: Graph, new: Graph) -> dict[Value, Value]:
    """Nodes of two graphs that are the same: from the inputs down, then from the outputs up."""
    same: dict[Value, Value] = dict(zip(old.inputs, new.inputs))
    by_content: dict[tuple[int, tuple[Value, ...]], Node] = {}
    pairs: dict[Value, Value] = {}
    taken: set[Value] = set()
    for node in new.topological():
        by_content.setdefault((_kind(node), node.inputs), node)
    for node in old.topological():
        inputs = tuple(same.get(v, v) for v in node.inputs)
        other = by_content.get((_kind(node), inputs))
        if other is not None and other.id not in taken:
            pairs[node.id] = other.id
            taken.add(other.id)
            same.update(zip(node.outputs, other.outputs))
    waiting: list[tuple[Value, Value]] = list(zip(old.outputs, new.outputs))
    seen: set[tuple[Value, Value]] = set()
    while waiting:
        pair = waiting.pop()
        first, second = old.producers.get(pair[0]), new.producers.get(pair[1])
        if first is None or second is None or pair in seen:
            continue
        seen.add(pair)
        if pairs.get(first.id) != second.id:
            if first.id in pairs or second.id in taken or _kind(first) != _kind(second):
                continue
            pairs[first.id] = second.id
            taken.add(second.id)
        waiting += zip(first.inputs, second.inputs)
    return pairs


class _Ordered:
    """The nodes of a graph in order, and two keys of each: what the file calls it, and what it is."""

    def __init__(self, graph: Graph, drawing: Drawing) -> None:
        names = {place[1]: drawing.boxes[i].name for place, i in drawing.places.items() if not place[0]}
        self.nodes = [node for node in graph.topological() if not node.const]
        self.names = [(node.op, names.get(node.id, "")) for node in self.nodes]
        self.kinds = [
            (_kind(node), node.types, tuple(v for v in node.inputs if graph.const(v) is not None))
            for node in self.nodes
        ]


def _align(pairs: dict[Value, Value], old: _Ordered, new: _Ordered) -> None:
    """Add pairs of nodes that are alike and stand in the same order, between those that are paired already.

    Those that only one node of each graph can be, by name or by kind, come first; then what lies between.
    """
    first = {node.id: i for i, node in enumerate(old.nodes)}
    second = {node.id: i for i, node in enumerate(new.nodes)}
    known = [(first[a], second[b]) for a, b in pairs.items() if a in first and b in second]
    taken = ({a for a, _ in known}, {b for _, b in known})
    for a_keys, b_keys in ((old.names, new.names), (old.kinds, new.kinds)):
        a_only, b_only = _unique(a_keys), _unique(b_keys)
        for key, a in a_only.items():
            b = b_only.get(key)
            if (
                b is not None
                and a not in taken[0]
                and b not in taken[1]
                and _alike(old.nodes[a], new.nodes[b])
            ):
                known.append((a, b))
                taken[0].add(a)
                taken[1].add(b)
    fixed = [(-1, -1), *_rising(sorted(known)), (len(old.nodes), len(new.nodes))]
    found = list(known)
    for (a, b), (c, d) in pairwise(fixed):
        here = [i for i in range(a + 1, c) if i not in taken[0]]
        there = [i for i in range(b + 1, d) if i not in taken[1]]
        if len(here) * len(there) > _MOST_PAIRS:
            continue
        matcher = SequenceMatcher(
            None, [old.kinds[i] for i in here], [new.kinds[i] for i in there], autojunk=False
        )
        found += [
            (here[m.a + k], there[m.b + k]) for m in matcher.get_matching_blocks() for k in range(m.size)
        ]
    pairs.update((old.nodes[a].id, new.nodes[b].id) for a, b in found)


def _unique(keys: Sequence[Hashable]) -> dict[Hashable, int]:
    """The places of keys that occur once."""
    count = Counter(keys)
    return {key: i for i, key in enumerate(keys) if count[key] == 1}


def _alike(first: Node, second: Node) -> bool:
    return (_kind(first), first.types) == (_kind(second), second.types)


def _rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest run of pairs, sorted by their first numbers, whose second numbers rise as well."""
    ends: list[int] = []  # the least last number of a run of each length
    last: list[tuple[int, int]] = []
    before: dict[tuple[int, int], tuple[int, int] | None] = {}
    for pair in pairs:
        at = bisect_left(ends, pair[1])
        before[pair] = last[at - 1] if at else None
        ends[at : at + 1] = [pair[1]]
        last[at : at + 1] = [pair]
    found: list[tuple[int, int]] = []
    step = last[-1] if last else None
    while step is not None:
        found.append(step)
        step = before[step]
    return found[::-1]


def _kind(node: Node) -> int:
    return hash((node.op, node.attrs.digest, len(node.inputs), len(node.outputs)))


Member = tuple[int, Value]


class _Regions:
    """Sets of nodes that are joined, each node with its side."""

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
        found: dict[Member, list[Member]] = {}
        for member in self._parent:
            found.setdefault(self._root(member), []).append(member)
        return list(found.values())
