"""A library of rules prepared for matching: plans by operator, and statistics of their use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from xrlflow.ir import Node, TensorType, Value
from xrlflow.rewrite.pattern import Pattern, patterns_of
from xrlflow.rewrite.plan import PlanFunction, compile_plan, may_start
from xrlflow.rewrite.rule import AnyRule, Refused, RegionRule, Rule, RuleError, check_rules


@dataclass(slots=True)
class RuleStats:
    """Counts for one rule: matches of its pattern, admitted and applied matches, refusals by reason, and seconds
    spent.
    """

    matched: int = 0
    admitted: int = 0
    applied: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass(eq=False)
class Plan:
    """The plan that finds a pattern starting from one of its nodes. It is compiled when it first runs, since most plans
    never do, and only once for all libraries.
    """

    pattern: Pattern
    start: int

    @cached_property
    def run(self) -> PlanFunction:
        compiled = self.pattern.plans
        if self.start not in compiled:
            compiled[self.start] = compile_plan(self.pattern, self.start)
        return compiled[self.start]


@dataclass(slots=True, eq=False)  # not frozen: freezing would take most of the time of making an object
class MatchSignature:
    """Everything that the choice of plans reads of a node and its inputs. Many nodes of a graph share a signature.

    `types` are the types of the inputs, `above` the operators that compute the inputs (None: no operator does). `key`
    consists of both, the operator, the attributes, the output types, which inputs are the same value, and
    `Node.on_runtime`.
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
        return MatchSignature(
            types, above, (node.op, node.attrs.digest, types, above, node.types, same, node.on_runtime)
        )


class Plans:
    """Plans by the operator of the node from which they start. `of` selects the plans that may find a match from a
    node.

    The selection is remembered for each signature, because many nodes of a graph are alike.
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
        """The plans that may find a match from a node. The caller may remove plans that cannot from this list."""
        plans = self._fitting.get(around.key)
        if plans is None:
            plans = [
                plan
                for plan in self.by_op.get(node.op, ())
                if may_start(plan.pattern, plan.start, node, around.types, around.above)
            ]
            self._fitting[around.key] = plans
        return plans


class Regions:
    """Region rules by the operator of their anchor. `of` selects the rules that may find a region from a node.

    The *anchor* is the node at which a rule's search for a region begins.
    """

    def __init__(self) -> None:
        self.by_op: dict[str, list[RegionRule]] = {}
        # Rules that demand an operator that computes an input of their anchor, by (anchor's operator, demanded
        # operator).
        self.below: dict[tuple[str, str], list[RegionRule]] = {}
        # By the rule's name, the operators of which one must compute an input of its anchor.
        self.wanted: dict[str, frozenset[str]] = {}
        # Rules with partners of their anchor (`RegionRule.partners`), by the anchor's operator.
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
        """The operators that the anchors of rules have."""
        return iter(self.by_op)

    def demanded(self, node: Node, around: MatchSignature) -> list[RegionRule]:
        """The rules for a node's operator that demand no operator above it (`reads_from`), or one that computes an
        input.
        """
        return [
            rule
            for rule in self.by_op.get(node.op, ())
            if (required := self.wanted.get(rule.name)) is None or not required.isdisjoint(around.above)
        ]

    def of(self, node: Node, around: MatchSignature) -> list[RegionRule]:
        """The rules that may find a region from a node. The caller may remove rules that cannot from this list."""
        rules = self._fitting.get(around.key)
        if rules is None:
            rules = self._fitting[around.key] = self.demanded(node, around)
        return rules


class Library:
    """Rules prepared for matching.

    It leaves out rules of another backend, rules whose assumption is not in `assuming`, and, without `contrib`, rules
    that write operators which only the backend has. `stats` counts matches and refusals by reason, and with `timed` the
    seconds of each rule. Without `thorough` it does not count a refusal that an earlier node of the same signature had,
    too. If `refusals` is a list, refusals are appended to it. `least_size` is the smallest size, 0 or 1, that a
    dimension without a number may have. A match is refused if its operators would fail at a size (`xrlflow.ops.empty`)
    at which the graph runs. None: this is not checked, as in proofs.
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
        least_size: int | None = None,
    ) -> None:
        """`runs` says whether the backend has an operator; a match whose edit adds an operator that it lacks is
        refused.
        """
        offered = [
            r
            for r in rules
            if (r.backend is None or r.backend == backend)
            and (r.assumes is None or r.assumes in assuming)
            and (contrib or not r.contrib)
        ]
        check_rules(offered)
        self.backend, self.assuming = backend, tuple(assuming)
        self.runs, self.least_size = runs, least_size
        self.rules: dict[str, AnyRule] = {r.name: r for r in offered}
        self.timed, self._thorough = timed, thorough
        self.stats: dict[str, RuleStats] = {r.name: RuleStats() for r in offered}
        # `root_plans` start at a pattern's first root (output node) and find every match of a whole graph. `plans`
        # start at every node of a pattern and find the matches that are new after an edit.
        self.root_plans, self.plans = Plans(), Plans()
        self.regions = Regions()
        for rule in offered:
            if isinstance(rule, Rule):
                for pattern in patterns_of(rule):
                    self._add(replace(pattern, verdicts={}))  # a proof, which drops conditions, has its own
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
        """Whether every refusal is counted, even if an earlier node of the same signature had it, too."""
        return self._thorough or self.refusals is not None

    def refuse(self, rule: AnyRule, reason: Refused) -> None:
        """Count a near miss of a rule."""
        self.stats[rule.name].refused[str(reason)] += 1
        if self.refusals is not None:
            self.refusals.append(reason.bare())

    def only(self, names: Iterable[str]) -> Library:
        """The library with only the rules of these names."""
        requested = set(names)
        return self._part(r for r in self.rules.values() if r.name in requested)

    def extended(self, rules: Iterable[AnyRule]) -> Library:
        """The library with further rules."""
        return self._part((*self.rules.values(), *rules))

    def canonicalising(self) -> Library:
        """The library with only the canonicalising rules."""
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
            least_size=self.least_size,
        )
