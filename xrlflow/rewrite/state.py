"""Rewrite states: a graph with all substitutions that apply to it, updated after each edit.

Matching is semi-naive: after an edit only dirty nodes can take part in a new match. Dirty are nodes that were added,
that read other values, that have other readers, or that read a value of another type. Plans start at dirty nodes. A
match falls (is dropped) when one of its nodes is dirty.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from immutables import Map

from xrlflow.ir import ABSENT, Edit, Graph, Node, TensorType, Value, apply_edit, dims, mix
from xrlflow.ir.graph import FINGERPRINT_MASK, outputs_fingerprint
from xrlflow.ops.empty import NEEDING, Size, sizes_needed
from xrlflow.rewrite.build import GraphBuilder
from xrlflow.rewrite.library import Library, MatchSignature, Plan, Plans
from xrlflow.rewrite.pattern import Pattern
from xrlflow.rewrite.plan import mismatch
from xrlflow.rewrite.rule import (
    AnyRule,
    Captures,
    Reader,
    Refused,
    Region,
    RegionRule,
    RuleError,
    Val,
    WatchedVal,
    uses_key,
)

# A function that returns the change of cost by an edit, in the unit of the cost model that the search uses.
Delta = Callable[[Graph, Edit], float]

Key = tuple[str, tuple[Value, ...]]

MAY_BE_EMPTY = "an open dimension may be 0"

MOST_MATCHES = 32
"""Matches of one pattern that begin at one node. Of 180 products of one input there are a million triples, and each of
them can be merged in place of another."""
_MOST_CONSIDERED = 1024
"""Matches of one pattern at one node whose conditions are evaluated."""


class _EnoughMatches(Exception):
    """A pattern has reached the maximum number of matches at a node."""


# Not frozen: freezing would take most of the time of making a match, and thousands are made.
@dataclass(slots=True, eq=False)
class Match:
    """A part of a graph where a rule applies, and the change of cost (`delta`). A candidate never changes.

    `key` names the substitution in traces: rule, ids of the matched nodes, values of the variables.
    """

    rule: AnyRule
    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    key: Key
    # The captured attributes of a pattern, or the region that `find` returned.
    pattern: Pattern | None
    binding: Any
    reads: tuple[Value, ...]
    delta: float = 0.0
    # The edit's change of the graph's fingerprint, valid until other edits change the nodes around it.
    shift: int = 0


@dataclass(slots=True, eq=False)  # see `Match`
class Attempt:
    """A region rule that found no match at an anchor, but read more than the anchor. It runs again when that
    changes.
    """

    rule: RegionRule
    reads: tuple[Value, ...]


Entry = Match | Attempt


@dataclass(frozen=True, slots=True, eq=False)
class RewriteState:
    """A graph and its candidates. A state never changes; successors share with it what an edit does not touch."""

    graph: Graph
    library: Library
    delta: Delta | None
    # Every match and attempt, under each key on which it depends (`Entry.reads`). `candidates` lists a match only under
    # its first key.
    index: Map[Value, tuple[Entry, ...]]
    count: int
    # The candidates whose `delta` is negative, in no particular order. A search that only descends reads nothing else.
    gaining: Map[Match, None]
    # Dimensions that are at least 1 at all sizes at which the graph runs.
    filled: frozenset[Size] = frozenset()

    @staticmethod
    def start(
        graph: Graph, library: Library, delta: Delta | None = None, until: float = math.inf
    ) -> RewriteState:
        """The state of a graph, matched from scratch. `delta` is computed for each candidate.

        `until`: the time (time.monotonic) at which matching stops. Matches that were not found by then are missing.
        """
        with _no_collection():
            filled = (
                frozenset(sizes_needed(graph, graph.nodes()))
                if library.least_size is not None
                else frozenset()
            )
            finder = _match_all(graph, library, delta, filled, until)
            finder.settle(until)
            gaining = Map((match, None) for match in finder.admitted.values() if match.delta < 0)
            index = Map(finder.index({}))
            return RewriteState(graph, library, delta, index, len(finder.admitted), gaining, filled)

    @property
    def fingerprint(self) -> int:
        return self.graph.fingerprint

    @property
    def candidates(self) -> list[Match]:
        """Every admitted match, in a reproducible order."""
        return [
            e
            for value, entries in self.index.items()
            for e in entries
            if e.__class__ is Match and e.reads[0] == value
        ]

    def gains_most(self, threshold: float, but: Callable[[Match], bool] | None = None) -> Match | None:
        """Of the candidates that `but` does not exclude, the one with the greatest gain above `threshold`; None if
        there is none.
        """
        best: Match | None = None
        for match in self.gaining:
            if match.delta >= -threshold or (
                best is not None and (match.delta, match.key) >= (best.delta, best.key)
            ):
                continue
            if but is None or not but(match):
                best = match
        return best

    def find(self, key: Key) -> Match | None:
        """The candidate with this key; None if there is none."""
        for entry in self.index.get(key[1][0], ()):
            if isinstance(entry, Match) and entry.key == key:
                return entry
        return self._left_out(key)

    def _left_out(self, key: Key) -> Match | None:
        """The match with this key, if it is not among the candidates because there are many like it (see
        `MOST_MATCHES`).
        """
        rule = self.library.rules.get(key[0])
        node = self.graph.producers.get(key[1][0])
        if rule is None or node is None or isinstance(rule, RegionRule):
            return None
        finder = _Finder(
            self.graph, self.library.only(frozenset({rule.name})), self.delta, self.filled, many=None
        )
        finder.match_at(node, finder.library.plans)
        finder.matches = [match for match in finder.matches if match.key == key]
        finder.settle()
        return finder.admitted.get(key)

    def edit(self, match: Match) -> Edit:
        """The edit that applies a candidate."""
        return build_edit(self.graph, match)

    def priced(self, match: Match) -> tuple[Edit, float]:
        """The edit that applies a candidate, and its change of the cost of this graph.

        `match.delta` was computed when the candidate was found. Since then edits of neighbouring nodes may have changed
        it: the cost of a node may depend on its neighbours, and other nodes may become unused.
        """
        edit = self.edit(match)
        return edit, match.delta if self.delta is None else float(self.delta(self.graph, edit))

    def apply(self, match: Match, edit: Edit | None = None) -> RewriteState:
        """The successor of this state after a candidate, with its candidates. Pass `edit` if it was already built.

        Raises RuleError if the rule's target does not fit.
        """
        if edit is None:
            edit = build_edit(self.graph, match)
        self.library.stats[match.rule.name].applied += 1
        graph, reread = apply_edit(self.graph, edit)
        dirty = Dirty.of(self.graph, graph, edit, reread)
        fallen = self._fallen(dirty)
        finder = _Finder(graph, self.library, self.delta, self.filled)
        self._look_again(finder, dirty, fallen)
        finder.settle()
        return self._successor(finder, fallen, dirty.removed)

    def _fallen(self, dirty: Dirty) -> set[Entry]:
        """The matches and attempts that an edit invalidates."""
        index = self.index
        fallen: set[Entry] = set()
        for value in dirty.nodes | dirty.uses:
            fallen.update(index.get(value, ()))
        for value in dirty.producers:
            # A region depends on a node's readers only if `find` has read them.
            fallen.update([e for e in index.get(value, ()) if e.__class__ is Match and e.pattern is not None])
        return fallen

    def _look_again(self, finder: _Finder, dirty: Dirty, fallen: set[Entry]) -> None:
        """Match at dirty nodes, and at the anchors where region rules may find another region after the edit."""
        anchors: dict[Value, set[str]] = {}
        for entry in fallen:
            if isinstance(entry.rule, RegionRule):
                anchors.setdefault(entry.reads[0], set()).add(entry.rule.name)
        index, producers, plans = self.index, finder.graph.producers, self.library.plans
        for value in dirty.nodes:
            node = producers.get(value)
            if node is None or node.outputs[0] != value:
                continue
            finder.match_at(node, plans)
            finder.look_for_regions(node, None)
            for anchor, rule in finder.without_trace(node, dirty.nodes):
                live = [e for e in index.get(anchor, ()) if e.rule is rule and e.reads[0] == anchor]
                if all(e in fallen for e in live):
                    anchors.setdefault(anchor, set()).add(rule.name)
        for value in dirty.producers:
            finder.match_at(producers[value], plans)
        for value, names in anchors.items():
            node = producers.get(value)
            if node is not None and value not in dirty.nodes:
                finder.look_for_regions(node, names)

    def _successor(self, finder: _Finder, fallen: set[Entry], removed: set[Value]) -> RewriteState:
        """The state of the finder's graph.

        Its index is this state's index without the entries in `fallen` and the ids in `removed`, and with the entries
        that the finder found.
        """
        index, gaining = self.index, self.gaining.mutate()
        entries_of: dict[Value, list[Entry]] = {}
        fallen_matches = 0
        for entry in fallen:
            if entry.__class__ is Match:
                fallen_matches += 1
                gaining.pop(entry, None)
            for value in entry.reads:
                if value not in entries_of:
                    entries_of[value] = [e for e in index[value] if e not in fallen]
        mutation = index.mutate()
        for value, entries in finder.index(entries_of, index).items():
            if entries:
                mutation[value] = entries
            elif value in mutation:
                del mutation[value]
        for value in removed:
            if value in mutation:
                del mutation[value]
        for match in finder.admitted.values():
            if match.delta < 0:
                gaining[match] = None
        return RewriteState(
            finder.graph,
            self.library,
            self.delta,
            mutation.finish(),
            self.count - fallen_matches + len(finder.admitted),
            gaining.finish(),
            self.filled,
        )


def match_all(graph: Graph, library: Library) -> list[Match]:
    """Every match in a graph whose conditions hold, found from scratch. No edits are built and no costs are
    computed.
    """
    with _no_collection():
        return _match_all(graph, library, None).matches


def _match_all(
    graph: Graph,
    library: Library,
    delta: Delta | None,
    filled: frozenset[Size] = frozenset(),
    until: float = math.inf,
) -> _Finder:
    finder = _Finder(graph, library, delta, filled)
    for node in graph.nodes():
        if time.monotonic() >= until:
            break
        finder.match_at(node, library.root_plans)
        finder.look_for_regions(node, None)
    return finder


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turn garbage collection off. Matching makes no cyclic garbage, and a collection would walk the whole graph."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if gc.get_freeze_count() == 0:  # makes new objects old, so that they are not collected at once
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@dataclass(frozen=True, slots=True)
class Dirty:
    """What an edit affects: the keys of the index that are out of date, and the nodes where new matches can begin.

    `nodes`: ids of nodes that were added, removed or rewired, or that read a value whose type became more precise.
    `uses`: keys (`uses_key`) of values whose readers changed. `producers`: ids of otherwise unchanged nodes that
    compute those values. `removed`: ids that no longer name a node.
    """

    nodes: set[Value]
    uses: set[Value]
    producers: set[Value]
    removed: set[Value]

    @staticmethod
    def of(old: Graph, new: Graph, edit: Edit, reread: Iterable[Value]) -> Dirty:
        nodes: set[Value] = set()
        producers = new.producers
        for node in edit.removed:
            nodes.add(node.outputs[0])
        for before, after in edit.rewired:
            nodes.add(before.outputs[0])
            nodes.add(after.outputs[0])
        for node in edit.added:
            nodes.add(node.outputs[0])
            for out, type in zip(node.outputs, node.types):
                # Conditions read types, so the readers of a value with a more precise type are matched again.
                if out in old.producers and old.type(out) is not type:
                    nodes.update(new.uses.get(out, ()))
        removed = {value for value in nodes if value not in producers or producers[value].outputs[0] != value}
        uses: set[Value] = set()
        makers: set[Value] = set()
        for value in reread:
            uses.add(uses_key(value))
            producer = producers.get(value)
            if producer is not None and producer.outputs[0] not in nodes:
                makers.add(producer.outputs[0])
        return Dirty(nodes, uses, makers, removed)


def _captured(pattern: Pattern, attributes: Sequence[Any]) -> Captures:
    return Captures({**pattern.alternatives, **dict(zip(pattern.captures, attributes))})


def build_edit(graph: Graph, match: Match, builder: GraphBuilder | None = None) -> Edit:
    """The edit of a match, found by tracing the target. Raises RuleError if the target does not fit, and Refused if the
    target itself refuses.
    """
    builder = builder or GraphBuilder(graph)
    rule = match.rule
    if isinstance(rule, RegionRule):
        region: Region = match.binding
        results = rule.target(builder, region, *(builder.val(v) for v in region.inputs))
        replaced = region.outputs
    else:
        assert match.pattern is not None
        values = [builder.val(v) for v in match.values]
        captures = _captured(match.pattern, match.binding)
        results = rule.target(builder, *rule.target_takes.of(captures, values))
        replaced = tuple(match.nodes[o.node.index].outputs[o.index] for o in match.pattern.outputs)
    listed = list(results) if isinstance(results, (list, tuple)) else [results]
    if len(listed) != len(replaced) or not all(isinstance(r, Val) for r in listed):
        raise RuleError(f"{rule.name}: the target must return {len(replaced)} values")
    return builder.edit(rule.name, replaced, listed)


# Marks types for which the rule's conditions have not been evaluated yet.
_NOT_ASKED: Final = object()


class _Types(dict[Value, TensorType | None]):
    """The types of values. Each type is looked up once. An absent input has the type None."""

    def __init__(self, graph: Graph) -> None:
        super().__init__({ABSENT: None})
        self._graph = graph

    def __missing__(self, value: Value) -> TensorType:
        tensor_type = self[value] = self._graph.type(value)
        return tensor_type


class _Finder:
    """Collects the matches that start at some nodes of a graph: at most `many` of one pattern at one node (None:
    all).
    """

    def __init__(
        self,
        graph: Graph,
        library: Library,
        delta: Delta | None,
        filled: frozenset[Size] = frozenset(),
        many: int | None = MOST_MATCHES,
    ) -> None:
        self.many = many
        self.graph = graph
        self.library = library
        self.delta = delta
        self.filled = filled
        self.outputs = frozenset(graph.outputs)
        self.matches: list[Match] = []
        self.admitted: dict[Key, Match] = {}
        self.seen: set[Key] = set()
        self.attempts: dict[tuple[Value, str], Attempt] = {}
        self._around: dict[Value, MatchSignature] = {}
        self._types = _Types(graph)
        # Counts for the plan that is running: its matches, and the matches refused by the types of their variables
        # alone.
        self.considered = self.refused_by_types = 0
        self._before = 0  # the number of matches before the plan that is running

    def around(self, node: Node) -> MatchSignature:
        signature = self._around.get(node.outputs[0])
        if signature is None:
            signature = self._around[node.outputs[0]] = MatchSignature.of(
                node, self.graph.producers, self._types
            )
        return signature

    def match_at(self, node: Node, plans: Plans) -> None:
        """Run the plans that start at a node."""
        if node.types[0].const or node.op not in plans.by_op:
            return
        graph, library = self.graph, self.library
        fitting = plans.by_op[node.op] if library.thorough else plans.of(node, self.around(node))
        hopeless: list[Plan] = []
        for plan in fitting:
            pattern, run = plan.pattern, plan.run  # the plan is compiled before the clock starts
            begin = time.perf_counter() if library.timed else 0.0
            self.refused_by_types = self.considered = 0
            self._before = len(self.matches)
            on_match = partial(self.consider, pattern)
            with suppress(_EnoughMatches):
                run(node, graph.producers, graph.uses, self.outputs, graph, on_match)
            if len(pattern.nodes) == 1 and 0 < self.considered == self.refused_by_types:
                hopeless.append(plan)
            if library.timed:
                library.stats[pattern.rule.name].seconds += time.perf_counter() - begin
        if hopeless and not library.thorough:
            for plan in hopeless:
                fitting.remove(plan)

    def consider(
        self, pattern: Pattern, nodes: tuple[Node, ...], values: tuple[Value, ...], attrs: tuple[Any, ...]
    ) -> None:
        """Evaluate the conditions of the rule for a match of its pattern. If they hold, add it to the matches."""
        rule, stats = pattern.rule, self.library.stats[pattern.rule.name]
        if self.many is not None and (
            self.considered >= _MOST_CONSIDERED or len(self.matches) - self._before >= self.many
        ):
            raise _EnoughMatches
        types = tuple(map(self._types.__getitem__, values))
        self.considered += 1
        situation = (types, attrs)
        verdicts = pattern.verdicts
        verdict = verdicts.get(situation, _NOT_ASKED)
        if verdict.__class__ is Refused:  # most matches end here, so this comes first
            stats.matched += 1
            self.refused_by_types += 1
            self.library.refuse(rule, verdict)
            return
        ids = tuple([n.outputs[0] for n in nodes])
        key = (rule.name, ids + values)
        before = len(self.seen)
        self.seen.add(key)
        if len(self.seen) == before:
            return
        stats.matched += 1
        if verdict is None and pattern.unconditional:
            self.matches.append(Match(rule, nodes, values, key, pattern, attrs, ids))
            return
        graph, watch = self.graph, [False]
        try:
            if verdict is _NOT_ASKED:
                declared = pattern.asked_at_start and not self.library.thorough
                if not declared and (wrong := _undeclared(pattern, types)):
                    raise Refused(wrong)
                verdicts[situation] = None
            if rule.has_where:
                vals = [None if t is None else WatchedVal(graph, v, t, watch) for v, t in zip(values, types)]
                rule.where(*rule.where_takes.of(_captured(pattern, attrs), vals))
            watch[0] = True  # the conditions below depend on more than the types of the variables
            if rule.dtypes is not None:
                out = pattern.outputs[0]
                if nodes[out.node.index].types[out.index].dtype not in rule.dtypes:
                    raise Refused("no kernel for the element type")
            self.matches.append(Match(rule, nodes, values, key, pattern, attrs, ids))
        except Refused as reason:
            self.library.refuse(rule, reason)
            if not watch[0] and not self.library.thorough:
                verdicts[situation] = reason.bare()
                self.refused_by_types += 1

    def look_for_regions(self, node: Node, names: set[str] | None) -> None:
        """Call `find` of the region rules for which `node` may be an anchor; if `names` is given, only of the rules in
        it.
        """
        graph, library, anchor = self.graph, self.library, node.outputs[0]
        if node.types[0].const or node.op not in library.regions.by_op:
            return
        around = self.around(node)
        regions, thorough, timed = library.regions, library.thorough, library.timed
        fitting = regions.demanded(node, around) if thorough else regions.of(node, around)
        hopeless: list[RegionRule] = []
        for rule in fitting:
            if names is not None and rule.name not in names:
                continue
            begin = time.perf_counter() if timed else 0.0
            reader = Reader(graph, anchor)
            region: Region | None = None
            try:
                region = rule.find(reader, node)
                if region is not None:
                    library.stats[rule.name].matched += 1
                    if rule.dtypes is not None and graph.type(region.outputs[0]).dtype not in rule.dtypes:
                        raise Refused("no kernel for the element type")
                    reads = self._reads(anchor, reader)
                    detail = mix(*(n.outputs[0] for n in region.nodes), *region.inputs, *region.outputs)
                    key = (rule.name, (anchor, detail))
                    if key not in self.seen:
                        self.seen.add(key)
                        self.matches.append(
                            Match(rule, region.nodes, region.inputs, key, None, region, reads)
                        )
            except Refused as reason:
                library.refuse(rule, reason)
                region = None
            if region is None:
                if reader.near:
                    hopeless.append(rule)
                elif len(reader.reads) > 1:
                    self.attempts[(anchor, rule.name)] = Attempt(rule, self._reads(anchor, reader))
            if timed:
                library.stats[rule.name].seconds += time.perf_counter() - begin
        if hopeless and not thorough:
            for rule in hopeless:
                fitting.remove(rule)

    def without_trace(self, node: Node, but: set[Value]) -> list[tuple[Value, RegionRule]]:
        """Pairs of anchor and rule to try again after `node` changed, although the index has no entry for them.

        The rules are those that demand an operator above their anchor, and those with partners. Anchors in `but` are
        left out.
        """
        graph, regions = self.graph, self.library.regions
        pairs: list[tuple[Value, RegionRule]] = []
        for user in {u for out in node.outputs for u in graph.uses.get(out, ())} - but:
            for rule in regions.below.get((graph.producers[user].op, node.op), ()):
                pairs.append((user, rule))
        for rule in regions.paired.get(node.op, ()):
            for partner in rule.partners(graph, node):
                if partner not in but:
                    pairs.append((partner, rule))
        return pairs

    @staticmethod
    def _reads(anchor: Value, reader: Reader) -> tuple[Value, ...]:
        reader.reads.discard(anchor)
        return (anchor, *sorted(reader.reads))

    def settle(self, until: float = math.inf) -> None:
        """Build the edit of every match. Drop matches that are refused or change nothing, and compute the others'
        change of cost.

        Matches whose edits are not built by the time `until` (time.monotonic) are dropped, too.
        """
        for match in self.matches:
            if time.monotonic() >= until:
                return
            stats = self.library.stats[match.rule.name]
            begin = time.perf_counter() if self.library.timed else 0.0
            try:
                edit = build_edit(self.graph, match)
                if self.library.runs is not None:
                    for node in edit.added:
                        if not self.library.runs(node.op):
                            raise Refused(f"the backend has no {node.op}")
                if match.rule.nonempty and _may_be_empty(self.graph, edit):
                    raise Refused("a dimension may be 0")
                if self.library.least_size is not None:
                    self._check_sizes(edit, self.library.least_size)
            except Refused as reason:
                self.library.refuse(match.rule, reason)
                self._keep_trying(match)
                continue
            shift = fingerprint_shift(self.graph, edit)
            if not shift:
                self._keep_trying(match)
                continue
            match.shift = shift
            if self.delta is not None:
                match.delta = self.delta(self.graph, edit)
            self.admitted[match.key] = match
            stats.admitted += 1
            if self.library.timed:
                stats.seconds += time.perf_counter() - begin

    def _check_sizes(self, edit: Edit, minimum: int) -> None:
        """Raise Refused if an operator that an edit adds fails at sizes at which the graph runs."""
        if not any(node.op in NEEDING for node in edit.added):
            return
        new_types = {value: type for node in edit.added for value, type in zip(node.outputs, node.types)}
        nonempty = self.filled.union(sizes_needed(self.graph, edit.removed))
        for size in sizes_needed(self.graph, edit.added, new_types):
            if size in nonempty:
                continue
            of = None if isinstance(size, tuple) else size
            if not (dims.filled(of) if minimum else dims.positive(of, nonempty)):
                raise Refused(MAY_BE_EMPTY)

    def _keep_trying(self, match: Match) -> None:
        """Store a region match without an edit as an attempt, so that it is tried again when the values it read
        change.
        """
        if isinstance(match.rule, RegionRule) and len(match.reads) > 1:
            self.attempts[(match.reads[0], match.rule.name)] = Attempt(match.rule, match.reads)

    def index(
        self, entries_of: dict[Value, list[Entry]], old: Map[Value, tuple[Entry, ...]] | None = None
    ) -> dict[Value, tuple[Entry, ...]]:
        """The new index entries under each key on which a new or fallen entry depends.

        `entries_of` holds, for the keys of fallen entries, the entries that remain; the new ones are added to it. `old`
        is the previous index.
        """
        entries: list[Entry] = [*self.admitted.values(), *self.attempts.values()]
        for entry in entries:
            for value in entry.reads:
                if value not in entries_of:
                    entries_of[value] = list(old.get(value, ())) if old is not None else []
                entries_of[value].append(entry)
        return {value: tuple(of_value) for value, of_value in entries_of.items()}


def _may_be_empty(graph: Graph, edit: Edit) -> bool:
    """Whether a value that an edit reads or computes may be empty although no input of the model is."""
    new_types = {value: type for node in edit.added for value, type in zip(node.outputs, node.types)}
    for node in (*edit.removed, *edit.added):
        input_types = [new_types.get(v) or graph.type(v) for v in node.inputs if v != ABSENT]
        for type in (*node.types, *input_types):
            if any(isinstance(d, str) and not dims.filled(d) for d in type.shape or ()):
                return True
    return False


def fingerprint_shift(graph: Graph, edit: Edit) -> int:
    """The change of the graph's fingerprint by an edit, modulo 2^64; 0 if the edit changes nothing."""
    shift = sum([n.fingerprint for n in edit.added]) - sum([n.fingerprint for n in edit.removed])
    for before, after in edit.rewired:
        shift += after.fingerprint - before.fingerprint
    if edit.outputs != graph.outputs:
        shift += outputs_fingerprint(edit.outputs) - outputs_fingerprint(graph.outputs)
    return shift & FINGERPRINT_MASK


def _undeclared(pattern: Pattern, types: tuple[TensorType | None, ...]) -> str:
    """The reason why the rule's `shapes` do not admit these types; empty if they admit them."""
    of = {var.name: type for var, type in zip(pattern.variables, types)}
    reason = ""
    for alternative in pattern.shapes:
        reason = mismatch(alternative, of)
        if not reason:
            break
    return reason
