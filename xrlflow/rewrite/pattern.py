"""Patterns: the source of a rule, traced once for each arity and each choice of `either` and `any_of`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from xrlflow.ir import Attr, TensorType
from xrlflow.ops.schema import COMMUTATIVE, defaults, schema
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
    """A small constant whose elements all equal this number."""

    value: float


@dataclass(frozen=True)
class Capture:
    """The value of an attribute, which a match records under a name."""

    name: str


PInput = Var | Out | Number | None
# The most patterns of one source and arity (with more a `RegionRule` is faster), and the most combinations of choices.
_MOST_FORMS, _MOST_CHOICES = 64, 4096


@dataclass(eq=False)
class PNode:
    """A node of a pattern. `attrs` must match; all other attributes must be default unless `rest` captures them.

    `ops` are the operators that the node may have; the matcher treats them alike. `op_name` is the name under which
    `any_of` records the operator that was found.
    """

    index: int
    ops: tuple[str, ...]
    inputs: tuple[PInput, ...]
    outputs: int
    attrs: dict[str, Attr | Capture]
    rest: str | None
    op_name: str | None = None

    @property
    def op(self) -> str:
        """The node's operator, or the first of several that are matched in the same way."""
        return self.ops[0]

    @property
    def matched_as(self) -> object:
        """A key of the node's operators: operators with equal keys are matched in the same way."""
        definition = schema(self.op)
        single = definition is not None and definition.max_output == 1
        return self.op in COMMUTATIVE, single, *(repr(default_of(self.op, name)) for name in self.attrs)


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
    # By the name of an `either`: the index of the alternative that this pattern has.
    alternatives: Mapping[str, int] = field(default_factory=dict)
    # The number of this pattern among the patterns of its arity, if there are several.
    form: int | None = None
    # By types of the variables and captured attributes: the refusal that follows from these alone, or None if they
    # alone do not refuse.
    verdicts: dict[tuple[tuple[TensorType | None, ...], tuple[Any, ...]], Refused | None] = field(
        default_factory=dict
    )
    # The compiled plans (`plan.PlanFunction`), by the number of the node from which they start.
    plans: dict[int, Callable[..., None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        arity = "" if self.arity is None else f"/{self.arity}"
        return f"{self.rule.name}{arity}" + ("" if self.form is None else f" ({self.form})")

    @cached_property
    def unconditional(self) -> bool:
        """Whether the rule has no condition beyond the types that it declares for its variables."""
        return not self.rule.has_where and self.rule.dtypes is None

    @cached_property
    def asked_at_start(self) -> bool:
        """Whether `plan.may_start` already checks that the variables of a match have types that the rule declares."""
        (first, *more) = self.nodes
        return not more and not (first.op in COMMUTATIVE and len(first.inputs) == 2)


class _Tracer(Op):
    """Traces one source. At each `either` and `any_of` it makes one choice: those in `choices` first, then always
    option 0.

    `counts` holds the number of options of each choice. `named` holds each choice that has a name: name, index, node.
    """

    def __init__(self, choices: Sequence[int] = ()) -> None:
        self.nodes: list[PNode] = []
        self.choices = choices
        self.counts: list[int] = []
        self.named: list[tuple[str, int, PNode]] = []

    def _choose(self, options: Sequence[Any]) -> int:
        if not options:
            raise RuleError("a choice of nothing: give either and any_of something to choose from")
        index = len(self.counts)
        self.counts.append(len(options))
        return self.choices[index] if index < len(self.choices) else 0

    def either(self, *alternatives: Any, name: str | None = None) -> Any:
        index = self._choose(alternatives)
        alternative = alternatives[index]
        if name is not None:
            if not isinstance(alternative, Out):
                raise RuleError(f"either(name={name!r}) is for outputs of operators")
            self.named.append((name, index, alternative.node))
        return alternative

    def any_of(self, ops: Iterable[str], name: str | None = None) -> Callable[..., Any]:
        options = sorted(ops)
        op = options[self._choose(options)]

        def call(*inputs: Any, **named: Any) -> Any:
            outputs = self[op](*inputs, **named)
            self.nodes[-1].op_name = name
            return outputs

        return call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(
            *inputs: PInput | float | int, attrs: str | None = None, outputs: int = 1, **named: object
        ) -> Out | tuple[Out, ...]:
            expected: dict[str, Attr | Capture] = {}
            for key, value in named.items():
                if isinstance(value, str):
                    expected[key] = Capture(value)
                elif isinstance(value, Lit):
                    expected[key] = value.text
                elif isinstance(value, (list, tuple)):
                    expected[key] = tuple(value)
                elif isinstance(value, (int, float, bytes)):
                    expected[key] = value
                else:
                    raise RuleError(f"{name}: attribute {key}={value!r} cannot be matched")
            parts = tuple(
                Number(float(i)) if isinstance(i, (int, float)) else i  # a plain number stands for a constant
                for i in inputs
            )
            node = PNode(len(self.nodes), (name,), parts, outputs, expected, attrs)
            self.nodes.append(node)
            outs = tuple(Out(node, i) for i in range(outputs))
            return outs[0] if outputs == 1 else outs

        return call


def patterns_of(rule: Rule) -> tuple[Pattern, ...]:
    """The patterns of a rule. All libraries share them, with their compiled plans, until `forget_patterns`."""
    hashable = getattr(type(rule), "__hash__", None) is not None  # a dataclass need not be hashable
    return _traced(rule) if hashable else tuple(trace_patterns(rule))


@lru_cache(maxsize=1024)
def _traced(rule: Rule) -> tuple[Pattern, ...]:
    return tuple(trace_patterns(rule))


def forget_patterns() -> None:
    """Forget the traced patterns of all rules, so that they are traced again. Needed when the code of a rule has
    changed.
    """
    _traced.cache_clear()


def trace_patterns(rule: Rule) -> list[Pattern]:
    """The patterns of a rule, for each arity and form (combination of choices). Raises RuleError if the rule is badly
    declared.
    """
    starred = any(star for _, star in rule.variables)
    low, high = rule.arity
    if starred != (high > 0):
        raise RuleError(f"{rule.name}: a starred variable and `arity` go together")
    assert rule.where_takes or not rule.has_where  # both properties raise RuleError
    assert rule.target_takes
    return [p for n in (range(low, high + 1) if starred else [None]) for p in _variants(rule, n)]


def _variants(rule: Rule, arity: int | None) -> list[Pattern]:
    """The different patterns that the combinations of choices give. Raises RuleError if there are too many."""
    variants: dict[object, Pattern] = {}
    choices: list[int] | None = []
    while choices is not None:
        tracer = _Tracer(choices)
        pattern = _trace(rule, arity, tracer)
        variants.setdefault(_identity(pattern), pattern)
        if len(variants) > _MOST_CHOICES:
            raise RuleError(f"{rule.name}: more than {_MOST_CHOICES} choices: write a RegionRule")
        choices = _next([*choices, *[0] * len(tracer.counts)][: len(tracer.counts)], tracer.counts)
    patterns = _together(list(variants.values()))
    if len(patterns) > _MOST_FORMS:
        raise RuleError(f"{rule.name}: more than {_MOST_FORMS} forms: write a RegionRule")
    for number, pattern in enumerate(patterns if len(patterns) > 1 else ()):
        pattern.form = number
    return patterns


def _together(patterns: list[Pattern]) -> list[Pattern]:
    """Merge patterns that differ only in the operator of one node, if those operators are matched in the same way."""
    for index in range(max(len(p.nodes) for p in patterns)):
        alike: dict[object, list[Pattern]] = {}
        for pattern in patterns:
            node = pattern.nodes[index] if index < len(pattern.nodes) else None
            ops, matched_as = ((), None) if node is None else (node.ops, node.matched_as)
            if node is not None:
                node.ops = ()
            alike.setdefault((_identity(pattern), matched_as), []).append(pattern)
            if node is not None:
                node.ops = ops
        for first, *more in alike.values():
            if more:
                first.nodes[index].ops = tuple(
                    sorted({o for p in (first, *more) for o in p.nodes[index].ops})
                )
        patterns = [first for first, *_ in alike.values()]
    return patterns


def _next(choices: list[int], counts: Sequence[int]) -> list[int] | None:
    """The combination of choices after this one, with the last choice changing fastest; None after the last
    combination.
    """
    for index in reversed(range(len(choices))):
        if choices[index] + 1 < counts[index]:
            return [*choices[:index], choices[index] + 1]
    return None


def _identity(pattern: Pattern) -> object:
    """A key of a pattern: patterns with equal keys match the same graphs."""
    nodes = [
        (
            n.ops,
            n.op_name,
            tuple((i.node.index, i.index) if isinstance(i, Out) else getattr(i, "name", i) for i in n.inputs),
            n.outputs,
            tuple(sorted((k, repr(v)) for k, v in n.attrs.items())),
            n.rest,
        )
        for n in pattern.nodes
    ]
    return (
        tuple(nodes),
        tuple((o.node.index, o.index) for o in pattern.outputs),
        tuple(pattern.alternatives.items()),
    )


def _trace(rule: Rule, arity: int | None, op: _Tracer) -> Pattern:
    variables: list[Var] = []
    for name, star in rule.variables:
        variables += [Var(f"{name}{i}") for i in range(arity or 0)] if star else [Var(name)]
    traced = rule.source(op, *variables)
    outputs = list(traced) if isinstance(traced, (list, tuple)) else [traced]
    if not outputs or not all(isinstance(o, Out) for o in outputs):
        raise RuleError(f"{rule.name}: the source must return outputs of its operators")
    nodes = _read(op.nodes, outputs) if op.counts else op.nodes
    shapes = parse_shapes(rule.shapes, arity) or [{}]
    names = {v.name for v in variables}
    for alternative in shapes:
        if unknown := alternative.keys() - names:
            raise RuleError(f"{rule.name}: shapes mention {', '.join(sorted(unknown))}, the source does not")
    if unknown := set(rule.optional) - names:
        raise RuleError(f"{rule.name}: optional mentions {', '.join(sorted(unknown))}, the source does not")
    captures: list[str] = []
    for node in nodes:
        if node.rest is not None:
            captures.append(node.rest)
        if node.op_name is not None and node.op_name not in captures:
            captures.append(node.op_name)
        for value in node.attrs.values():
            if isinstance(value, Capture) and value.name not in captures:
                captures.append(value.name)
    pattern = Pattern(
        rule, arity, nodes, variables, outputs, frozenset(rule.optional), shapes, captures,
        alternatives={name: index for name, index, node in op.named if node in nodes},
    )  # fmt: skip
    _check_roots(pattern)
    return pattern


def _read(nodes: Sequence[PNode], outputs: Sequence[Out]) -> list[PNode]:
    """The nodes on which the outputs depend, numbered anew. Nodes of alternatives that were not chosen are left out."""
    required, pending = set[int](), [out.node for out in outputs]
    while pending:
        node = pending.pop()
        if node.index not in required:
            required.add(node.index)
            pending += [i.node for i in node.inputs if isinstance(i, Out)]
    live = [node for node in nodes if node.index in required]
    for index, node in enumerate(live):
        node.index = index
    return live


def _check_roots(pattern: Pattern) -> None:
    """Raises RuleError if a variable is unused, or if it is not constant and a root (output node) does not depend on
    it.

    Without this check an edit with several roots could close a cycle.
    """
    reads = {id(out.node): _ancestors(out.node) for out in pattern.outputs}
    every = set.union(*reads.values())
    for name in every:
        if all(name in r for r in reads.values()):
            continue
        if not all(name in alt and alt[name].const for alt in pattern.shapes):
            raise RuleError(
                f"{pattern.name}: {name} is not read by every root: declare it constant, or write a RegionRule"
            )
    mentioned = {i.name for n in pattern.nodes for i in n.inputs if isinstance(i, Var)}
    if missing := {v.name for v in pattern.variables} - mentioned:
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
