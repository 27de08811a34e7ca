"""A compiled rule library: plans by operator, and statistics of their use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xrlflow.rewrite.pattern import Pattern, trace_patterns
from xrlflow.rewrite.plan import PlanFunction, compile_plan
from xrlflow.rewrite.rule import AnyRule, Refused, RegionRule, Rule, RuleError, check_rules


@dataclass(slots=True)
class RuleStats:
    """How a rule has fared: matches of its pattern, those admitted, refusals by reason, seconds spent."""

    matched: int = 0
    admitted: int = 0
    applied: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A pattern's plan from one of its nodes."""

    pattern: Pattern
    start: int
    run: PlanFunction


class Library:
    """Rules compiled for matching. Rules of another backend, and those that assume something, stay out; those that
    write operators of the backend alone too, unless `contrib`.

    `stats` counts matches, refusals with their reasons, and, with `timed`, the seconds per rule. `refusals` keeps
    the refusals themselves, if it is a list.
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
    ) -> None:
        offered = [
            r
            for r in rules
            if (r.backend is None or r.backend == backend)
            and (r.assumes is None or r.assumes in assuming)
            and (contrib or not r.contrib)
        ]
        check_rules(offered)
        self.backend, self.assuming = backend, tuple(assuming)
        self.rules: dict[str, AnyRule] = {r.name: r for r in offered}
        self.timed = timed
        self.stats: dict[str, RuleStats] = {r.name: RuleStats() for r in offered}
        # Plans from the first root alone find every match of a whole graph; those from every node what is new.
        self.root_plans: dict[str, list[Plan]] = {}
        self.plans: dict[str, list[Plan]] = {}
        # Region rules by the anchor's operator, with the operators of which one must be above it, and again those
        # with such a demand by (anchor's operator, operator above it).
        self.regions: dict[str, list[tuple[RegionRule, frozenset[str] | None]]] = {}
        self.regions_below: dict[tuple[str, str], list[RegionRule]] = {}
        for rule in offered:
            if isinstance(rule, Rule):
                for pattern in trace_patterns(rule):
                    self._compile(pattern)
            else:
                if not rule.anchors:
                    raise RuleError(f"{rule.name} has no anchors")
                above = None if rule.reads_from is None else frozenset(rule.reads_from)
                for op in rule.anchors:
                    self.regions.setdefault(op, []).append((rule, above))
                    for other in above or ():
                        self.regions_below.setdefault((op, other), []).append(rule)

    def _compile(self, pattern: Pattern) -> None:
        root = pattern.outputs[0].node.index
        for node in pattern.nodes:
            plan = Plan(pattern, node.index, compile_plan(pattern, node.index))
            self.plans.setdefault(node.op, []).append(plan)
            if node.index == root:
                self.root_plans.setdefault(node.op, []).append(plan)

    def refuse(self, rule: AnyRule, reason: Refused) -> None:
        """Note a near miss."""
        self.stats[rule.name].refused[str(reason)] += 1
        if self.refusals is not None:
            self.refusals.append(reason)

    def only(self, names: Iterable[str]) -> Library:
        """The library with only the rules of these names."""
        wanted = set(names)
        return self._part(r for r in self.rules.values() if r.name in wanted)

    def certain(self) -> Library:
        """The library with only the rules that need no price."""
        return self._part(r for r in self.rules.values() if r.certain)

    def _part(self, rules: Iterable[AnyRule]) -> Library:
        return Library(rules, backend=self.backend, assuming=self.assuming, contrib=True, timed=self.timed)
