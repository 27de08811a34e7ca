"""Rules. A rule is declared once; the matcher, the applier and the prover all read this declaration."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from xrlflow.ir import ABSENT, FLOATS, Attr, Attrs, Const, Dim, DType, Graph, Node, TensorType, Value
from xrlflow.ops.tensors import numpy_dtype

Proof = Literal["field", "numeric"]

T = TypeVar("T")


# A line of code that refuses: file, line number.
Site = tuple[str, int]


class Refused(Exception):
    """A near miss: the pattern of a rule matches, but a condition refuses. The message says why.

    `site` is the line that called `require`; None if `profitable`, `accurate` or a `Val` refused.
    """

    site: Site | None = None

    def bare(self) -> Refused:
        """This refusal without its traceback. If stored, a traceback would keep all objects on the stack alive."""
        self.__cause__ = self.__context__ = self.__traceback__ = None
        return self


class RuleError(Exception):
    """A rule is wrong: it cannot be compiled, or its target does not fit the values that it replaces."""


class Contradiction(RuleError):
    """The type of a target's result contradicts the type of the value that it replaces."""


def require(condition: object, reason: str) -> None:
    """Refuse the match unless the condition holds. This is for legality; for profitability see `profitable`."""
    if not condition:
        frame = sys._getframe(1)
        refused = Refused(reason)
        refused.site = (frame.f_code.co_filename, frame.f_lineno)
        raise refused


def profitable(condition: object, reason: str) -> None:
    """Refuse the match unless the condition holds. Otherwise the rule would be right, but could not make the graph
    faster.
    """
    if not condition:
        raise Refused(reason)


def accurate(condition: object, reason: str) -> None:
    """Refuse the match unless the condition holds. Otherwise the rule would lose more than two bits of float32.

    This is for rounding errors of sums in a runtime's kernels, which the small graphs of a proof do not show.
    """
    if not condition:
        raise Refused(reason)


@dataclass(frozen=True)
class Lit:
    """A string as the value of an attribute. (A plain string in a source names a capture.)"""

    text: str


class Val:
    """A value of the graph as `where` and `target` see it: its type, and its numbers if it is a small constant."""

    __slots__ = ("graph", "type", "value")

    def __init__(self, graph: Graph, value: Value, type: TensorType) -> None:
        self.graph = graph
        self.value = value
        self.type = type

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The dimensions; refuses the match if not even the number of dimensions is known."""
        if self.type.shape is None:
            raise Refused("a rank is not known")
        return self.type.shape

    @property
    def storage(self) -> np.dtype[Any]:
        """NumPy's type of the elements; refuses the match if the type is not known."""
        if self.type.dtype == DType.UNDEFINED:
            raise Refused("an element type is not known")
        return numpy_dtype(self.type.dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The dimensions as numbers; refuses the match if one of them is not a number."""
        return tuple(self.size(i) for i in range(self.rank))

    def size(self, axis: int) -> int:
        """The size of one dimension as a number; refuses the match if it is not a number."""
        dim = self.shape[axis]
        if not isinstance(dim, int):
            raise Refused("a dimension is not a known number")
        return dim

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def const(self) -> bool:
        return self.type.const

    @property
    def known(self) -> bool:
        """Whether the numbers can be read: the value is a constant of at most 1,024 elements."""
        return self.array_or_none is not None

    @property
    def array_or_none(self) -> npt.NDArray[Any] | None:
        """The numbers of a small constant; None if the value is none."""
        const = self.graph.const(self.value)
        return None if const is None else const.array

    @property
    def array(self) -> npt.NDArray[Any]:
        """The numbers of a small constant; refuses the match if the value is none."""
        elements = self.array_or_none
        if elements is None:
            raise Refused("a value is not a small constant")
        return elements

    @property
    def whole_array(self) -> npt.NDArray[Any]:
        """The numbers of a constant of any size, read from the model's file; refuses the match if the value is none."""
        const = self.graph.const(self.value)
        if const is None:
            raise Refused("a value is not a constant")
        return const.numpy()

    @property
    def uniform(self) -> float | None:
        """The number that all elements of a small constant equal; None if they differ or the value is no small
        constant.
        """
        return self.graph.leaves.uniform(self.value)

    @property
    def ints(self) -> tuple[int, ...]:
        """The numbers of a small integer constant (shape, axes), flattened."""
        return tuple(int(i) for i in np.ravel(self.array))

    @property
    def scalar(self) -> float:
        """The number of a constant of one element; refuses the match if it has more."""
        array = self.array
        if array.size != 1:
            raise Refused("a constant is not a scalar")
        return float(array.reshape(()))

    def __repr__(self) -> str:
        return f"{self.type}"


class WatchedVal(Val):
    """A value that sets `watch[0]` when a rule reads anything other than its type."""

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
    """The object on which `source` and `target` call operators: `op.MatMul(x, w)`, `op["com.microsoft::Gelu"](x)`.

    In a source `attrs=` captures all attributes of the node; in a target it sets them. `outputs=` is the number of
    outputs; if it is not 1, the call returns a tuple. Split takes `sizes=`.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise NotImplementedError

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self.__getattr__(name)

    def either(self, *alternatives: Any, name: str | None = None) -> Any:
        """In a source: matches any one of these values, `op.either(op.Neg(x), op.Mul(x, -1.0))`.

        With `name="f"`, `m.f` is the index of the alternative that matched, from 0. All alternatives must read the same
        variables.
        """
        raise NotImplementedError

    def any_of(self, ops: Iterable[str], name: str | None = None) -> Callable[..., Any]:
        """In a source: matches any one of these operators, `op.any_of(("Add", "Sub"), "f")(x, y)`; `m.f` is the one
        that matched.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class VarSpec:
    """One variable of a rule's `shapes`: name[dims]:flags. `dims` None: any shape; `open`: any dimensions may precede
    `dims`.
    """

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
    """The alternatives of a `shapes` declaration. A starred variable becomes `arity` variables.

    Raises RuleError if the declaration is malformed.
    """
    out = []
    for alternative in text.split("|"):
        specs: dict[str, VarSpec] = {}
        for word in alternative.split():
            match = _VAR.match(word)
            if not match:
                raise RuleError(f"shapes: {word!r} is not name[dims]:flags")
            name, star, dims, flags = match.groups()
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
    """The attributes that pattern rules and region rules have in common."""

    # How the rule is proven. If "numeric", `relies_on` says on which property of which functions the rule relies.
    proof: ClassVar[Proof] = "field"
    relies_on: ClassVar[str] = ""
    # Element types of the replaced outputs for which the target's operators have kernels; None: any.
    dtypes: ClassVar[frozenset[DType] | None] = None
    # The only backend for which the rule is offered ("onnxruntime"); None: all backends.
    backend: ClassVar[str | None] = None
    # Whether the rule writes operators that only this backend has. Such a rule is off unless the user allows it.
    contrib: ClassVar[bool] = False
    # Whether the gain comes from fusion in the runtime, which the cost of single operators does not show. Such rules
    # are measured before others.
    unpriced: ClassVar[bool] = False
    # Rules of which one must have been applied before this rule is swept over a graph: alone it is of no use.
    swept_after: ClassVar[tuple[str, ...]] = ()
    # Whether the rule is canonicalising: it removes useless work, or replaces an operator that the backend does not
    # have. It is applied before the cost of any graph is computed.
    canonicalises: ClassVar[bool] = False
    # What the rule assumes of the data or the machine ("finite", "memory", "saturates", "vnni"), or "approximate": it
    # may lose more than two bits of float32 accuracy. Such a rule is off unless the user asks for it.
    assumes: ClassVar[str | None] = None
    # If an input is infinite or NaN, the right side may be NaN in more places, and may have NaN for infinity or
    # infinity for NaN (never a number for either). This happens if sums have another order, or if there are new
    # products with zero.
    may_add_nonfinite: ClassVar[bool] = False
    # Where the left side is infinite or NaN although the exact result is a number (overflow of an exponential, softmax
    # of -inf alone), the right side may be that number.
    may_remove_nonfinite: ClassVar[bool] = False
    # Where terms nearly cancel, the right side may lose digits that the left side has: as many as one more rounding of
    # each input would cost. This happens if a sum is grouped otherwise, or if x * (y - z) becomes x * y - x * z. It is
    # acceptable because inputs are mostly rounded results themselves. A rule that loses more must assume "approximate".
    may_round_inputs: ClassVar[bool] = False
    # The right side leaves out roundings to float16 that nobody sees (`prover.half`), and makes all others. So a number
    # that overflows in between stays one.
    rounds_once: ClassVar[bool] = False
    # Errors of the left side where the right side may have a value: for sizes that do not fit together ("sizes"), for
    # an index or a size that is an operand and out of range ("indices").
    may_lose_errors: ClassVar[tuple[Literal["sizes", "indices"], ...]] = ()
    # Whether the rule needs all dimensions to be at least 1. If one is 0, ONNX Runtime refuses an operator of the right
    # side, or leaves its result uninitialised.
    nonempty: ClassVar[bool] = False
    # For a composite rule, the rules that it replaces: it does in one step what their chain does through slower graphs.
    composite_of: ClassVar[tuple[str, ...]] = ()
    # Graphs (ONNX text form) to which the rule applies. For a region rule they are the only declaration of its left
    # side.
    examples: ClassVar[tuple[str, ...]] = ()
    # More graphs for the proof: those that the rule refuses by conditions that refuse no variation of the examples.
    near_misses: ClassVar[tuple[str, ...]] = ()
    # Why some mutants of the rule pass its proof and are right all the same, by the mutant's description.
    survivors: ClassVar[Mapping[str, str]] = {}

    @cached_property
    def name(self) -> str:
        return type(self).__name__

    # The name that agents, traces and the selection use for rules of a kind: `class X(Rule, family="merge")`. Without
    # it a class has the family of its base class, or else the name of its module.
    family: ClassVar[str]

    def __init_subclass__(cls, family: str = "") -> None:
        super().__init_subclass__()
        if family:
            cls.family = family
        elif not hasattr(cls, "family") and cls.__module__ != __name__:
            cls.family = cls.__module__.rpartition(".")[2]

    @cached_property
    def equation(self) -> str:
        """The rule as an equation: the first paragraph of its docstring."""
        doc = inspect.cleandoc(type(self).__dict__.get("__doc__") or "")  # not an inherited docstring
        return " ".join(doc.partition("\n\n")[0].split())


class Rule(_Declared):
    """A substitution with a left side of fixed form.

    `source(op, x, ...)` is traced to get the patterns; its parameters are the variables. A pattern is made for each
    number of starred variables in `arity` and for each choice of `op.either` and `op.any_of`. `where` refuses by
    `require`. `target(op, ...)` is traced for each match and returns as many values as `source`. `where` and `target`
    get what their parameters name: variables, and `m` with the captured attributes; `*others` are all other variables.

    An attribute that a source does not mention must have its default. A source's nodes must not be constant.
    """

    arity: ClassVar[tuple[int, int]] = (0, 0)  # least and greatest number of starred variables
    shapes: ClassVar[str] = ""
    # Variables that may be absent inputs. Such a variable is None if the input is absent.
    optional: ClassVar[tuple[str, ...]] = ()
    # Whether the results can be permuted. Then each set of nodes is matched once.
    symmetric: ClassVar[bool] = False
    # Whether inner values may also be read from outside the match. Their nodes then stay in the graph.
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
        """The arguments of `where`. Raises RuleError for a name that is no variable."""
        return self._takes("where", list(inspect.signature(self.where).parameters.values()))

    @cached_property
    def target_takes(self) -> Takes:
        """The arguments of `target` after `op`. Raises RuleError for a name that is no variable."""
        return self._takes("target", list(inspect.signature(self.target).parameters.values())[1:])

    def _takes(self, function: str, parameters: Sequence[inspect.Parameter]) -> Takes:
        captures = bool(parameters) and parameters[0].name == "m"
        named = [p.name for p in parameters[captures:] if p.kind is not inspect.Parameter.VAR_POSITIONAL]
        fixed = [name for name, star in self.variables if not star]
        if unknown := [name for name in named if name not in fixed]:
            raise RuleError(f"{self.name}: {function} takes {', '.join(unknown)}, which the source does not")
        indices = [fixed.index(name) for name in named]
        starred = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        if starred:
            indices += [i for i, name in enumerate(fixed) if name not in named]
        return Takes(captures, tuple(indices), len(fixed), starred)


@dataclass(frozen=True, slots=True)
class Takes:
    """Which parts of a match a rule's function takes as arguments.

    `captures`: whether it takes the captured attributes. `indices`: the indices of the variables that it takes.
    `starred`: whether it also takes the starred variables, whose values follow the first `fixed` values.
    """

    captures: bool
    indices: tuple[int, ...]
    fixed: int
    starred: bool

    def of(self, captures: Captures, values: Sequence[T]) -> list[Captures | T]:
        arguments: list[Captures | T] = [captures] if self.captures else []
        arguments += [values[i] for i in self.indices]
        if self.starred:
            arguments += values[self.fixed :]
        return arguments


class Captures:
    """Captured attributes by name: `m.perm`. Attributes captured by `attrs="c"` are an `Attrs` in `m.c`."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"the source captures no attribute {name!r}") from None


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a graph that a region rule matches.

    `outputs` are the values that the target replaces, in order. `inputs` are the values that it reads. `nodes` are the
    nodes of the left side, with the anchor. `data` is any hashable object that `target` needs.
    """

    outputs: tuple[Value, ...]
    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    data: Any = None


def uses_key(value: Value) -> Value:
    """The index key of entries that depend on which nodes read a value. (Entries that depend on its producer have
    another key.)
    """
    return Value(-value)


class Reader:
    """A graph as `RegionRule.find` sees it. It records in `reads` what was read; if an edit changes that, the match is
    dropped.

    `near` is true as long as only the anchor and the types of its inputs were read.
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
        """The node that computes a value; None for inputs and constants."""
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
        """How many nodes read a value. The nodes themselves are not recorded as read."""
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

    def const(self, value: Value) -> Const | None:
        """The constant with this name; None if a node computes the value or it is an input."""
        return self._graph.const(value)

    def val(self, value: Value) -> Val:
        type = self.type(value)
        return Val(self.graph, value, type)


class RegionRule(_Declared):
    """A substitution whose left side has no fixed form, for example T time steps, a chain, or a body.

    `find` is called for each node whose operator is among `anchors`. It reads the graph only through the Reader. It
    returns a region or None, or refuses by `require`. `target(op, region, *inputs)` returns the values that replace
    `region.outputs`. `examples` gives graphs (ONNX text, `onnx.parser`) to which the rule applies.

    A region with several outputs must make sure that no input depends on an output (see `common_source`).
    """

    anchors: ClassVar[tuple[str, ...]] = ()
    # At least one input of the anchor must be computed by one of these operators (None: no such demand).
    reads_from: ClassVar[Sequence[str] | None] = None

    find: Callable[[Reader, Node], Region | None]
    target: Callable[..., Any]

    def partners(self, graph: Graph, node: Node) -> Iterable[Value]:
        """Other anchors that may match now that `node` was added or reads other values. `find` is called for them
        again.

        This is for a rule whose `find` reads many nodes in vain and does not record them with the Reader.
        """
        return ()

    @cached_property
    def has_partners(self) -> bool:
        return type(self).partners is not RegionRule.partners


AnyRule = Rule | RegionRule


def declared_in(module: ModuleType) -> tuple[AnyRule, ...]:
    """The rules that a module declares, in the module's order: an instance of each class whose name does not begin with
    `_`.
    """
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
    """Whether nodes that each read one of `values` (and constants) can surely be merged without closing a cycle.

    Each value is followed upwards, for at most `limit` steps, through operators that only move the data of one input.
    No cycle can arise if all values lead to one value, because none of the nodes lies on the way, nor if all values
    lead to inputs of the graph. Only the nodes on the way are read.
    """
    chains: list[list[Value]] = []
    for value in dict.fromkeys(values):
        chain = [value]
        while len(chain) <= limit:
            node = reader.producer(chain[-1])
            if node is None or node.op not in _MOVES:
                break
            if not all(reader.is_const(i) for i in node.inputs[1:] if i != ABSENT):
                break  # its other input, which says where the data go, could depend on anything
            chain.append(node.inputs[0])
        chains.append(chain)
    shared = set(chains[0]).intersection(*chains)
    return bool(shared) or all(chain[-1] in reader.graph.inputs for chain in chains)


def check_rules(rules: Iterable[AnyRule]) -> None:
    """Raises RuleError if two rules have the same name or a rule has no equation."""
    names: set[str] = set()
    for rule in rules:
        if rule.name in names:
            raise RuleError(f"two rules are called {rule.name}")
        names.add(rule.name)
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
]
