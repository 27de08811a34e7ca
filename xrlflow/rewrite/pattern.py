"""Patterns: a rule's source, traced once for each arity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from xrlflow.ir import Attr, TensorType
from xrlflow.ops.schema import COMMUTATIVE, defaults
from xrlflow.rewrite.rule import Lit, Op, Refused, Rule, RuleError, VarSpec, parse_shapes


@dataclass(frozen=True, eq=False)
class Var:
    """A variable of a pattern."""

    name: str


@dataclass(frozen=True, eq=False)
class Out:
    """An output of a pattern's node."""

    node: PNode
    index: int


@dataclass(frozen=True)
class Number:
    """A constant of one element with just this value."""

    value: float


@dataclass(frozen=True)
class Capture:
    """The value of an attribute, kept under a name."""

    name: str


PInput = Var | Out | Number | None


@dataclass(eq=False)
class PNode:
    """A node of a pattern. `attrs` must match, all others must be default unless `rest` captures them."""

    index: int
    op: str
    inputs: tuple[PInput, ...]
    outputs: int
    attrs: dict[str, Attr | Capture]
    rest: str | None


@dataclass(eq=False)
class Pattern:
    """The left side of a rule for one arity: a directed graph of nodes, connected through values."""

    rule: Rule
    arity: int | None
    nodes: list[PNode]
    variables: list[Var]
    outputs: list[Out]
    optional: frozenset[str]
    shapes: Sequence[Mapping[str, VarSpec]]
    captures: list[str] = field(default_factory=list)
    # What the types of the variables and the captured attributes alone say: a refusal, or None if the types are
    # what `shapes` declares.
    verdicts: dict[tuple[tuple[TensorType | None, ...], tuple[Any, ...]], Refused | None] = field(
        default_factory=dict
    )

    @property
    def name(self) -> str:
        return self.rule.name if self.arity is None else f"{self.rule.name}/{self.arity}"

    @cached_property
    def unconditional(self) -> bool:
        """Whether a match is admitted wherever the variables are of declared types."""
        return not self.rule.has_where and self.rule.dtypes is None

    @cached_property
    def asked_at_start(self) -> bool:
        """Whether a plan that may start (`plan.may_start`) finds variables of declared types alone."""
        (first, *others) = self.nodes
        return not others and not (first.op in COMMUTATIVE and len(first.inputs) == 2)


class _Tracer(Op):
    def __init__(self) -> None:
        self.nodes: list[PNode] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(
            *inputs: PInput | float | int, attrs: str | None = None, outputs: int = 1, **named: object
        ) -> Out | tuple[Out, ...]:
            wanted: dict[str, Attr | Capture] = {}
            for key, value in named.items():
                if isinstance(value, str):
                    wanted[key] = Capture(value)
                elif isinstance(value, Lit):
                    wanted[key] = value.text
                elif isinstance(value, (list, tuple)):
                    wanted[key] = tuple(value)
                elif isinstance(value, (int, float, bytes)):
                    wanted[key] = value
                else:
                    raise RuleError(f"{name}: attribute {key}={value!r} cannot be matched")
            parts = tuple(
                Number(float(i)) if isinstance(i, (int, float)) else i  # a plain number: a scalar constant
                for i in inputs
            )
            node = PNode(len(self.nodes), name, parts, outputs, wanted, attrs)
            self.nodes.append(node)
            outs = tuple(Out(node, i) for i in range(outputs))
            return outs[0] if outputs == 1 else outs

        return call


def trace_patterns(rule: Rule) -> list[Pattern]:
    """The patterns of a rule, one for each arity. Raises RuleError if the rule is badly declared."""
    starred = any(star for _, star in rule.variables)
    low, high = rule.arity
    if starred != (high > 0):
        raise RuleError(f"{rule.name}: a starred variable and `arity` go together")
    return [_trace(rule, n) for n in (range(low, high + 1) if starred else [None])]


def _trace(rule: Rule, arity: int | None) -> Pattern:
    variables: list[Var] = []
    for name, star in rule.variables:
        variables += [Var(f"{name}{i}") for i in range(arity or 0)] if star else [Var(name)]
    op = _Tracer()
    traced = rule.source(op, *variables)
    outputs = list(traced) if isinstance(traced, (list, tuple)) else [traced]
    if not outputs or not all(isinstance(o, Out) for o in outputs):
        raise RuleError(f"{rule.name}: the source must return outputs of its operators")
    shapes = parse_shapes(rule.shapes, arity) or [{}]
    names = {v.name for v in variables}
    for alternative in shapes:
        if unknown := alternative.keys() - names:
            raise RuleError(f"{rule.name}: shapes mention {', '.join(sorted(unknown))}, the source does not")
    if unknown := set(rule.optional) - names:
        raise RuleError(f"{rule.name}: optional mentions {', '.join(sorted(unknown))}, the source does not")
    captures: list[str] = []
    for node in op.nodes:
        if node.rest is not None:
            captures.append(node.rest)
        for value in node.attrs.values():
            if isinstance(value, Capture) and value.name not in captures:
                captures.append(value.name)
    pattern = Pattern(rule, arity, op.nodes, variables, outputs, frozenset(rule.optional), shapes, captures)
    _check_roots(pattern)
    return pattern


def _check_roots(pattern: Pattern) -> None:
    """With several roots, what one reads and another does not must be constant, or an edit could close a cycle."""
    reads = {id(out.node): _ancestors(out.node) for out in pattern.outputs}
    every = set.union(*reads.values())
    for name in every:
        if all(name in r for r in reads.values()):
            continue
        if not all(name in alt and alt[name].const for alt in pattern.shapes):
            raise RuleError(
                f"{pattern.name}: {name} is not read by every root: declare it constant, or write a RegionRule"
            )
    used = {i.name for n in pattern.nodes for i in n.inputs if isinstance(i, Var)}
    if missing := {v.name for v in pattern.variables} - used:
        raise RuleError(f"{pattern.name}: the source does not use {', '.join(sorted(missing))}")


def _ancestors(node: PNode) -> set[str]:
    out: set[str] = set()
    for i in node.inputs:
        if isinstance(i, Var):
            out.add(i.name)
        elif isinstance(i, Out):
            out |= _ancestors(i.node)
    return out


def default_of(op: str, name: str) -> Attr | None:
    return defaults(op).get(name)
