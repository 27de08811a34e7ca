"""Rules: what a substitution is, declared once for the matcher, the applier and the prover."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from xrlflow.ir import ABSENT, FLOATS, Attr, Attrs, Dim, DType, Graph, Node, TensorType, Value

Proof = Literal["field", "numeric"]

T = TypeVar("T")


# A line of code that refuses: file, line.
Site = tuple[str, int]


class Refused(Exception):
    """A rule's pattern is there, but its condition does not hold; the message says why (a near miss).

    `site` is where `require` was called, None for the refusals of a `Val`.
    """

    site: Site | None = None

    def bare(self) -> Refused:
        """Without its traceback, which keeps alive whatever was on the stack: for one that is remembered."""
        self.__cause__ = self.__context__ = self.__traceback__ = None
        return self


class RuleError(Exception):
    """A rule is wrong: it cannot be compiled, or its target does not fit what it replaces."""


class Contradiction(RuleError):
    """The type of what a target gives is not that of what it replaces."""


_dropped: set[Site] = set()


@contextmanager
def without(site: Site) -> Iterator[None]:
    """The rules with one `require` dropped: mutants, which a proof has to reject."""
    _dropped.add(site)
    try:
        yield
    finally:
        _dropped.discard(site)


# What rules see of numbers, if somebody watches what they compare them with.
_shown: Callable[[Any], Any] | None = None


@contextmanager
def watched(show: Callable[[Any], Any]) -> Iterator[None]:
    """Rules see sizes, numbers of constants and attributes as `show` gives them: for conditions only, not targets."""
    global _shown
    before, _shown = _shown, show
    try:
        yield
    finally:
        _shown = before


def require(condition: object, reason: str) -> None:
    """Refuse the match unless the condition holds. Without it the rule would be wrong: see `profitable`."""
    if not condition:
        frame = sys._getframe(1)
        site = (frame.f_code.co_filename, frame.f_lineno)
        if site not in _dropped:
            refused = Refused(reason)
            refused.site = site
            raise refused


def profitable(condition: object, reason: str) -> None:
    """Refuse a match on which the rule would be right, but to no avail."""
    if not condition:
        raise Refused(reason)


def accurate(condition: object, reason: str) -> None:
    """Refuse a match on which the rule would lose more than two bits of float32.

    That is for sums in a runtime's kernels, which the small graphs of a proof do not show.
    """
    if not condition:
        raise Refused(reason)


@dataclass(frozen=True)
class Lit:
    """A string attribute that must be just this (a plain string in a source names a capture)."""

    text: str


class Val:
    """A value as `where` and `target` see it: its type, and its numbers if it is a small constant."""

    __slots__ = ("graph", "type", "value")

    def __init__(self, graph: Graph, value: Value, type: TensorType) -> None:
        self.graph = graph
        self.value = value
        self.type = type

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The dimensions; refuses the match if not even the rank is known."""
        if self.type.shape is None:
            raise Refused("a rank is not known")
        return self.type.shape if _shown is None else _shown(self.type.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The dimensions as numbers; refuses the match if one is not known."""
        return tuple(self.size(i) for i in range(self.rank))

    def size(self, axis: int) -> int:
        """One dimension as a number; refuses the match if it is not known."""
        dim = self.shape[axis]
        if not isinstance(dim, int):
            raise Refused("a dimension is not a known number")
        return dim

    @property
    def rank(self) -> int:
        rank = len(self.shape)
        return rank if _shown is None else _shown(rank)

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def const(self) -> bool:
        return self.type.const

    @property
    def known(self) -> bool:
        """Whether the numbers can be read: a constant of at most 1,024 elements."""
        return self.array_or_none is not None

    @property
    def array_or_none(self) -> npt.NDArray[Any] | None:
        const = self.graph.const(self.value)
        return None if const is None else const.array

    @property
    def array(self) -> npt.NDArray[Any]:
        """The numbers of a small constant; refuses the match if there are none to read."""
        found = self.array_or_none
        if found is None:
            raise Refused("a value is not a small constant")
        return found

    @property
    def uniform(self) -> float | None:
        """The number that a small constant holds everywhere; None if there is no such number."""
        found = self.graph.leaves.uniform(self.value)
        return found if _shown is None else _shown(found)

    @property
    def ints(self) -> tuple[int, ...]:
        """The numbers of a small integer constant (shape, axes), flattened."""
        numbers = tuple(int(i) for i in np.ravel(self.array))
        return numbers if _shown is None else _shown(numbers)

    @property
    def scalar(self) -> float:
        """The number of a constant of one element; refuses the match if it has more."""
        array = self.array
        if array.size != 1:
            raise Refused("a constant is not a scalar")
        number = float(array.reshape(()))
        return number if _shown is None else _shown(number)

    def __repr__(self) -> str:
        return f"{self.type}"


class WatchedVal(Val):
    """A value that notes when more of it is looked at than its type."""

    __slots__ = ("_graph", "_value", "watch")

    def __init__(self, graph: Graph, value: Value, type: TensorType, watch: list[bool]) -> None:
        self._graph = graph
        self._value = value
        self.type = type
        self.watch = watch

    @property
    def graph(self) -> Graph:  # type: ignore[override]
        self.watch[0] = True
        return self._graph

    @property
    def value(self) -> Value:  # type: ignore[override]
        self.watch[0] = True
        return self._value


class Op:
    """What `source` and `target` call operators on: `op.MatMul(x, w)`, `op["com.microsoft::Gelu"](x)`.

    `attrs=` of a source captures all attributes that are not named, `attrs=` of a target adds them back;
    `outputs=` says how many outputs there are (a tuple comes back if it is not 1). Split takes `sizes=`.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise NotImplementedError

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self.__getattr__(name)

    def either(self, *alternatives: Any, name: str | None = None) -> Any:
        """Any of these values, in a source: `op.either(op.Neg(x), op.Mul(x, -1.0))`.

        With `name="f"`, `m.f` is the place of the one that it is, from 0. Each reads the same variables.
        """
        raise NotImplementedError

    def any_of(self, ops: Iterable[str], name: str | None = None) -> Callable[..., Any]:
        """Any of these operators, in a source: `op.any_of(("Add", "Sub"), "f")(x, y)`; `m.f` is which of them it is."""
        raise NotImplementedError


@dataclass(frozen=True)
class VarSpec:
    """One variable of a rule's `shapes`: name[dims]:flags. `dims` None: anything; `open`: leading dims are free."""

    name: str
    dims: tuple[int | str, ...] | None = None
    open: bool = False
    const: bool = False
    dtype: str | None = None


_VAR = re.compile(r"(\w+)(\*?)(?:\[([^\]]*)\])?((?::\w+)*)$")
DTYPE_FLAGS = {
    "float": FLOATS,
    "int": frozenset({DType.INT32, DType.INT64}),
    "bool": frozenset({DType.BOOL}),
}


@lru_cache(maxsize=1024)
def parse_shapes(text: str, arity: int | None) -> Sequence[Mapping[str, VarSpec]]:
    """The alternatives of a `shapes` declaration, starred variables expanded to `arity` of them."""
    out = []
    for alternative in text.split("|"):
        specs: dict[str, VarSpec] = {}
        for word in alternative.split():
            found = _VAR.match(word)
            if not found:
                raise RuleError(f"shapes: {word!r} is not name[dims]:flags")
            name, star, dims, flags = found.groups()
            flag_set = set(flags.split(":")) - {""}
            unknown = flag_set - {"const", *DTYPE_FLAGS}
            if unknown:
                raise RuleError(f"shapes: unknown flag {unknown.pop()!r} in {word!r}")
            dtype = next((f for f in flag_set if f in DTYPE_FLAGS), None)
            for i in range(arity or 0) if star else [None]:
                parts: list[int | str] | None = None
                is_open = False
                if dims is not None:
                    names = [d.strip() for d in dims.split(",") if d.strip()]
                    is_open = bool(names) and names[0] == "..."
                    parts = [
                        int(d) if d.lstrip("-").isdigit() else (f"{d[:-1]}{i}" if d.endswith("*") else d)
                        for d in (names[1:] if is_open else names)
                    ]
                full = name if i is None else f"{name}{i}"
                specs[full] = VarSpec(
                    full, None if parts is None else tuple(parts), is_open, "const" in flag_set, dtype
                )
        out.append(specs)
    return out


class _Declared:
    """What pattern rules and region rules share."""

    # How the rule is proven; a numeric one says which property of which functions it relies on.
    proof: ClassVar[Proof] = "field"
    relies_on: ClassVar[str] = ""
    # Element types of the replaced outputs for which the target has kernels; None: any.
    dtypes: ClassVar[frozenset[DType] | None] = None
    # Only offered for this backend ("onnxruntime"), None: for all.
    backend: ClassVar[str | None] = None
    # It writes operators that only this backend has: off unless the user allows it.
    contrib: ClassVar[bool] = False
    # Its worth lies in what the runtime fuses, which no cost of single operators sees: it is measured first.
    unpriced: ClassVar[bool] = False
    # It leaves out what is computed for nothing, and may show more of the types, or it spells out what its backend does
    # not have: applied before anything is priced.
    canonicalises: ClassVar[bool] = False
    # What must hold of the data or the machine ("finite", "vnni"), or "approximate": the rule may lose more than two
    # bits of float32 accuracy. Such a rule is off unless asked for.
    assumes: ClassVar[str | None] = None
    # Where an input is infinite or NaN, more of the right side may be NaN, and an infinity become NaN or NaN an
    # infinity (never another number): sums in another order, or zeros that meet what they did not meet before.
    may_add_nonfinite: ClassVar[bool] = False
    # Where the left side is infinite or NaN though a number was meant (exponentials that overflow, a softmax of
    # nothing but -inf), the right side may be that number.
    may_remove_nonfinite: ClassVar[bool] = False
    # It needs sizes from 1: where a dimension is 0, ONNX Runtime does not run an operator of the right side, or leaves
    # its result as the memory was.
    nonempty: ClassVar[bool] = False
    # It does in one step what a chain of these other rules does, because the chain leads through slower graphs.
    composite_of: ClassVar[tuple[str, ...]] = ()
    # Graphs (ONNX's text form) in which the rule applies; a region rule has no other declaration of its left side.
    examples: ClassVar[tuple[str, ...]] = ()
    # More graphs for the proof: conditions refuse in them that no variation of the others comes across.
    near_misses: ClassVar[tuple[str, ...]] = ()
    # Why mutants of the rule that pass its proof are right all the same, by what was done otherwise.
    survivors: ClassVar[Mapping[str, str]] = {}

    @cached_property
    def name(self) -> str:
        return type(self).__name__

    # By which agents, traces and the selection know rules of a kind: `class X(Rule, family="merge")`. A class that does
    # not say has that of its base, or else the name of its module.
    family: ClassVar[str]

    def __init_subclass__(cls, family: str = "") -> None:
        super().__init_subclass__()
        if family:
            cls.family = family
        elif not hasattr(cls, "family") and cls.__module__ != __name__:
            cls.family = cls.__module__.rpartition(".")[2]

    @property
    def equation(self) -> str:
        """The first paragraph of the docstring."""
        doc = inspect.cleandoc(type(self).__dict__.get("__doc__") or "")  # its own, not an inherited one
        return " ".join(doc.partition("\n\n")[0].split())


class Rule(_Declared):
    """A substitution with a left side of fixed form.

    `source(op, x, ...)` is traced to get the patterns, its parameters are the variables (a starred one is expanded to
    each number of `arity`, `op.either` and `op.any_of` to each of what they are given); `where` refuses by `require`;
    `target(op, ...)` is traced for each match and returns as many values as `source`. Both are given what they name:
    variables, and `m`, which has the captured attributes; `*others` are all variables that have no name there.

    An attribute that a source does not mention must have its default. A source's nodes must not be constant.
    """

    arity: ClassVar[tuple[int, int]] = (0, 0)  # least and most of the starred variable
    shapes: ClassVar[str] = ""
    # Inputs that may be left out; their variable is then None.
    optional: ClassVar[tuple[str, ...]] = ()
    # The starred variables' outputs can be permuted: match each set of nodes once.
    symmetric: ClassVar[bool] = False
    # Inner values may be read from outside the match; their nodes then stay beside the target.
    allow_multi_use: ClassVar[bool] = False

    source: Callable[..., Any]
    target: Callable[..., Any]

    def where(self, *args: Any) -> None:
        """Refuse by `require`; the default admits everything."""

    @cached_property
    def variables(self) -> tuple[tuple[str, bool], ...]:
        """Names of the variables and whether they are starred."""
        parameters = list(inspect.signature(self.source).parameters.values())[1:]
        return tuple((p.name, p.kind is inspect.Parameter.VAR_POSITIONAL) for p in parameters)

    @cached_property
    def has_where(self) -> bool:
        return type(self).where is not Rule.where

    @cached_property
    def where_takes(self) -> Takes:
        """What `where` is given. Raises RuleError for a name that is no variable."""
        return self._takes("where", list(inspect.signature(self.where).parameters.values()))

    @cached_property
    def target_takes(self) -> Takes:
        """What `target` is given besides `op`. Raises RuleError for a name that is no variable."""
        return self._takes("target", list(inspect.signature(self.target).parameters.values())[1:])

    def _takes(self, function: str, parameters: Sequence[inspect.Parameter]) -> Takes:
        captures = bool(parameters) and parameters[0].name == "m"
        named = [p.name for p in parameters[captures:] if p.kind is not inspect.Parameter.VAR_POSITIONAL]
        fixed = [name for name, star in self.variables if not star]
        if unknown := [name for name in named if name not in fixed]:
            raise RuleError(f"{self.name}: {function} takes {', '.join(unknown)}, which the source does not")
        places = [fixed.index(name) for name in named]
        starred = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        if starred:
            places += [i for i, name in enumerate(fixed) if name not in named]
        return Takes(captures, tuple(places), len(fixed), starred)


@dataclass(frozen=True, slots=True)
class Takes:
    """What a function of a rule is given of a match: its captures, some of the variables (`places`), and, if it takes
    all others, the values of the starred one, which come after the first `fixed` ones."""

    captures: bool
    places: tuple[int, ...]
    fixed: int
    starred: bool

    def of(self, captures: Captures, values: Sequence[T]) -> list[Captures | T]:
        given: list[Captures | T] = [captures] if self.captures else []
        given += [values[i] for i in self.places]
        if self.starred:
            given += values[self.fixed :]
        return given


class Captures:
    """Captured attributes by name: `m.perm`. Attributes captured by `attrs="c"` are an `Attrs` in `m.c`."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            value = self._values[name]
        except KeyError:
            raise AttributeError(f"the source captures no attribute {name!r}") from None
        return value if _shown is None else _shown(value)


@dataclass(frozen=True, slots=True)
class Region:
    """Where a region rule applies.

    `outputs` are the values that the target replaces, in order; `inputs` what the target reads; `nodes` the
    nodes of the left side (the anchor among them); `data` whatever `target` needs to know, hashable.
    """

    outputs: tuple[Value, ...]
    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    data: Any = None


def uses_key(value: Value) -> Value:
    """The key under which the index keeps what depends on a value's readers (its producer has another)."""
    return Value(-value)


class Reader:
    """A graph as `RegionRule.find` sees it; it records what was read, so that matches fall when that changes.

    `near` is true for as long as only the anchor and the types of its inputs were looked at.
    """

    __slots__ = ("_graph", "near", "reads")

    def __init__(self, graph: Graph, anchor: Value | None = None) -> None:
        self._graph = graph
        self.reads: set[Value] = set() if anchor is None else {anchor}
        self.near = True

    @property
    def graph(self) -> Graph:
        self.near = False
        return self._graph

    def producer(self, value: Value) -> Node | None:
        """The node that makes a value; None for inputs and constants."""
        node = self._graph.producers.get(value)
        if node is not None:
            self.reads.add(node.outputs[0])
            self.near = False
        return node

    def users(self, value: Value) -> list[Node]:
        """The nodes that read a value."""
        self.near = False
        self.reads.add(uses_key(value))
        users = self._graph.users(value)
        self.reads.update(n.outputs[0] for n in users)
        return users

    def count_users(self, value: Value) -> int:
        """How many nodes read a value, without looking at them."""
        self.near = False
        self.reads.add(uses_key(value))
        return len(self._graph.uses.get(value, ()))

    def is_output(self, value: Value) -> bool:
        """Whether the value is an output of the graph."""
        self.near = False
        self.reads.add(uses_key(value))
        return value in self._graph.outputs

    def type(self, value: Value) -> TensorType:
        node = self._graph.producers.get(value)
        if node is None:
            return self._graph.leaves.types[value]
        self.reads.add(node.outputs[0])
        return self._graph.type(value)

    def is_const(self, value: Value) -> bool:
        return value != ABSENT and self.type(value).const

    def val(self, value: Value) -> Val:
        type = self.type(value)
        return Val(self.graph, value, type)


class RegionRule(_Declared):
    """A substitution whose left side has no fixed form: T time steps, a chain, a body.

    `find` is called for each node whose operator is among `anchors`, reads the graph through a Reader only,
    and returns a region, or None, or refuses by `require`. `target(op, region, *inputs)` returns the values
    that replace `region.outputs`. `examples` gives graphs (ONNX text, `onnx.parser`) in which it applies.

    A region with several outputs must make sure that no input depends on an output (see `common_source`).
    """

    anchors: ClassVar[tuple[str, ...]] = ()
    # Early rejection: at least one input of the anchor must come from one of these operators (None: not asked).
    reads_from: ClassVar[Sequence[str] | None] = None

    find: Callable[[Reader, Node], Region | None]
    target: Callable[..., Any]

    def partners(self, graph: Graph, node: Node) -> Iterable[Value]:
        """Other anchors of which a node that has come, or reads something else, can make matches.

        They are asked again. For a rule whose `find` looks at many nodes in vain: what it sees without recording it
        leaves no trace in the index.
        """
        return ()

    @cached_property
    def has_partners(self) -> bool:
        return type(self).partners is not RegionRule.partners


AnyRule = Rule | RegionRule


def declared_in(module: ModuleType) -> tuple[AnyRule, ...]:
    """The rules that a module declares, in its order: one of each class whose name does not begin with `_`."""
    kinds = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, (Rule, RegionRule))]
    return tuple(c() for c in kinds if c.__module__ == module.__name__ and not c.__name__.startswith("_"))


_MOVES = frozenset(
    (
        "Slice",
        "Gather",
        "Split",
        "Squeeze",
        "Unsqueeze",
        "Reshape",
        "Transpose",
        "Identity",
        "Flatten",
        "Cast",
    )
)


def common_source(reader: Reader, values: Sequence[Value], limit: int = 6) -> bool:
    """Whether nodes that read one of `values` each (and constants) can be merged without closing a cycle.

    Each value is followed up through operators that only move the data of one input. If all come from one
    value, that one cannot depend on a reader of any of them (the reader depends on it), so neither can they,
    for there is no reader between; the same if all come from inputs of the graph. Only these few nodes are read.
    """
    chains: list[list[Value]] = []
    for value in dict.fromkeys(values):
        chain = [value]
        while len(chain) <= limit:
            node = reader.producer(chain[-1])
            if node is None or node.op not in _MOVES:
                break
            if not all(reader.is_const(i) for i in node.inputs[1:] if i != ABSENT):
                break  # where it moves the data to could depend on anything
            chain.append(node.inputs[0])
        chains.append(chain)
    shared = set(chains[0]).intersection(*chains)
    return bool(shared) or all(chain[-1] in reader.graph.inputs for chain in chains)


def check_rules(rules: Iterable[AnyRule]) -> None:
    """Raises RuleError for two rules of one name or a rule without an equation."""
    seen: set[str] = set()
    for rule in rules:
        if rule.name in seen:
            raise RuleError(f"two rules are called {rule.name}")
        seen.add(rule.name)
        if not rule.equation:
            raise RuleError(f"{rule.name} has no docstring with its equation")


__all__ = [
    "AnyRule",
    "Attr",
    "Attrs",
    "Captures",
    "Lit",
    "Op",
    "Reader",
    "Refused",
    "Region",
    "RegionRule",
    "Rule",
    "RuleError",
    "Val",
    "VarSpec",
    "check_rules",
    "common_source",
    "declared_in",
    "parse_shapes",
    "profitable",
    "require",
    "watched",
    "without",
]
