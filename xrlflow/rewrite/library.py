"""A rule library made ready for matching: plans by operator, and statistics of their use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from xrlflow.ir import Node, TensorType, Value
from xrlflow.rewrite.pattern import Pattern, trace_patterns
from xrlflow.rewrite.plan import PlanFunction, compile_plan, may_start
from xrlflow.rewrite.rule import AnyRule, Refused, RegionRule, Rule, RuleError, check_rules


@dataclass(slots=True)
class RuleStats:
    """How a rule has fared: matches of its pattern, those admitted, refusals by reason, seconds spent."""

    matched: int = 0
    admitted: int = 0
    applied: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass(eq=False)
class Plan:
    """A pattern's plan from one of its nodes. It is compiled when it is first run: most are not, in most models."""

    pattern: Pattern
    start: int

    @cached_property
    def run(self) -> PlanFunction:
        return compile_plan(self.pattern, self.start)


@dataclass(slots=True, eq=False)  # not frozen: that is most of what one takes
class MatchSignature:
    """What can be told of a node without looking further: many nodes of a graph are alike in it.

    `types` are those of the inputs, `above` the operators that make them (None: no operator does). `key` holds
    them, operator, attributes, the number of outputs and which inputs are one value.
    """

    types: tuple[TensorType | None, ...]
    above: tuple[str | None, ...]
    key: Hashable

    @staticmethod
    def of(
        node: Node, producers: Mapping[Value, Node], type_of: Mapping[Value, TensorType | None]
    ) -> MatchSignature:
        inputs = node.inputs
        types = tuple([type_of[v] for v in inputs])
        above = tuple([None if (p := producers.get(v)) is None else p.op for v in inputs])
        same = tuple(map(inputs.index, inputs)) if len(set(inputs)) < len(inputs) else None
        return MatchSignature(types, above, (node.op, node.attrs.digest, types, above, node.types, same))


class Plans:
    """Plans by the operator of the node that they start from; and which of them can lead anywhere from a given node.

    Graphs repeat themselves: what a node's signature rules out is remembered by it.
    """

    def __init__(self) -> None:
        self.by_op: dict[str, list[Plan]] = {}
        self._fitting: dict[Hashable, list[Plan]] = {}

    def add(self, op: str, plan: Plan) -> None:
        self.by_op.setdefault(op, []).append(plan)

    def __iter__(self) -> Iterator[str]:
        """The operators from which plans start."""
        return iter(self.by_op)

    def of(self, node: Node, around: MatchSignature) -> list[Plan]:
        """The plans that can lead anywhere from a node. Plans that cannot after all may be taken out."""
        found = self._fitting.get(around.key)
        if found is None:
            found = [
                plan
                for plan in self.by_op.get(node.op, ())
                if may_start(plan.pattern, plan.start, node, around.types, around.above)
            ]
            self._fitting[around.key] = found
        return found


class Regions:
    """Region rules by the operator of their anchor, and which of them can lead anywhere from a given node."""

    def __init__(self) -> None:
        self.by_op: dict[str, list[RegionRule]] = {}
        # Those that demand an operator above their anchor, by both.
        self.below: dict[tuple[str, str], list[RegionRule]] = {}
        # What each demands above its anchor, by name.
        self.wanted: dict[str, frozenset[str]] = {}
        # Those that look for partners of their anchor.
        self.paired: dict[str, list[RegionRule]] = {}
        self._fitting: dict[Hashable, list[RegionRule]] = {}

    def add(self, rule: RegionRule) -> None:
        if rule.reads_from is not None:
            self.wanted[rule.name] = frozenset(rule.reads_from)
        for op in rule.anchors:
            self.by_op.setdefault(op, []).append(rule)
            if rule.has_partners:
                self.paired.setdefault(op, []).append(rule)
            for other in rule.reads_from or ():
                self.below.setdefault((op, other), []).append(rule)

    def __iter__(self) -> Iterator[str]:
        """The operators of anchors."""
        return iter(self.by_op)

    def demanded(self, node: Node, around: MatchSignature) -> list[RegionRule]:
        """The rules for a node's operator that find the operators above it that they demand."""
        return [
            rule
            for rule in self.by_op.get(node.op, ())
            if (wanted := self.wanted.get(rule.name)) is None or not wanted.isdisjoint(around.above)
        ]

    def of(self, node: Node, around: MatchSignature) -> list[RegionRule]:
        """The rules that can lead anywhere from a node. Rules that cannot after all may be taken out."""
        found = self._fitting.get(around.key)
        if found is None:
            found = self._fitting[around.key] = self.demanded(node, around)
        return found


class Library:
    """Rules made ready for matching. Rules of another backend, and those that assume something, stay out; those that
    write operators of the backend alone too, unless `contrib`.

    `stats` counts matches and refusals with their reasons (with `thorough` all of them, else not those that are known
    from a node of the same signature), and, with `timed`, the seconds per rule. `refusals` keeps the refusals
    themselves, if it is a list.
    """

    refusals: list[Refused] | None = None

    def __init__(
        self,
        rules: Iterable[AnyRule],
        *,
        backend: str | None = "onnxruntime",
        assuming: Sequence[str] = (),
        contrib: bool = False,
        timed: bool = False,
        thorough: bool = False,
        runs: Callable[[str], bool] | None = None,
    ) -> None:
        """`runs` says whether the backend has an operator; substitutions do not write those that it lacks."""
        offered = [
            r
            for r in rules
            if (r.backend is None or r.backend == backend)
            and (r.assumes is None or r.assumes in assuming)
            and (contrib or not r.contrib)
        ]
        check_rules(offered)
        self.backend, self.assuming = backend, tuple(assuming)
        self.runs = runs
        self.rules: dict[str, AnyRule] = {r.name: r for r in offered}
        self.timed, self._thorough = timed, thorough
        self.stats: dict[str, RuleStats] = {r.name: RuleStats() for r in offered}
        # Plans from the first root alone find every match of a whole graph; those from every node what is new.
        self.root_plans, self.plans = Plans(), Plans()
        self.regions = Regions()
        for rule in offered:
            if isinstance(rule, Rule):
                for pattern in trace_patterns(rule):
                    self._add(pattern)
            else:
                if not rule.anchors:
                    raise RuleError(f"{rule.name} has no anchors")
                self.regions.add(rule)

    def _add(self, pattern: Pattern) -> None:
        root = pattern.outputs[0].node.index
        for node in pattern.nodes:
            plan = Plan(pattern, node.index)
            for op in node.ops:
                self.plans.add(op, plan)
                if node.index == root:
                    self.root_plans.add(op, plan)

    @property
    def thorough(self) -> bool:
        """Whether every refusal is counted, also where one of the same kind is known."""
        return self._thorough or self.refusals is not None

    def refuse(self, rule: AnyRule, reason: Refused) -> None:
        """Note a near miss."""
        self.stats[rule.name].refused[str(reason)] += 1
        if self.refusals is not None:
            self.refusals.append(reason.bare())

    def only(self, names: Iterable[str]) -> Library:
        """The library with only the rules of these names."""
        wanted = set(names)
        return self._part(r for r in self.rules.values() if r.name in wanted)

    def canonicalising(self) -> Library:
        """The library with only the rules that need no price."""
        return self._part(r for r in self.rules.values() if r.canonicalises)

    def _part(self, rules: Iterable[AnyRule]) -> Library:
        return Library(
            rules,
            backend=self.backend,
            assuming=self.assuming,
            contrib=True,
            timed=self.timed,
            thorough=self._thorough,
            runs=self.runs,
        )
