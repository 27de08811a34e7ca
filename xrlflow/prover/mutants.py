"""Mutants of a rule's target. A proof that accepts wrong ones proves nothing.

The target is traced with a builder that makes one change: it swaps inputs, changes an attribute or a number, leaves out
an operator, or exchanges results. (Mutants of conditions are made by `hooks.without`, which drops a `require`.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from xrlflow.ir import NO_ATTRS, Attrs, Edit, Graph, Value
from xrlflow.ops.schema import COMMUTATIVE, defaults, schema
from xrlflow.prover.cases import ProofBuilder
from xrlflow.rewrite import Lit, Val

_MOST_SWAPS, _MOST_ELEMENTS = 3, 6
# Attributes that do not change what is computed in float64, or that follow from something else.
_IDLE = frozenset(
    {
        *("stash_type", "momentum", "saturate", "seed", "num_outputs"),
        *("kernel_shape", "round_mode", "storage_order"),
    }
)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of a target: how, and at which call of an operator, counted in the order of the target's calls."""

    call: int
    op: str
    kind: str  # "swap", "attribute", "number", "omit", "results"
    detail: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.kind == "results":
            return "exchange the results"
        where = f"{self.op} (call {self.call})"
        if self.kind == "omit":
            return f"omit {where}"
        if self.kind == "attribute":
            name, *element = self.detail
            return f"attribute {name}{element if any(element) else ''} of {where}"
        return f"{self.kind} {' '.join(map(str, self.detail))} of {where}"


class RecordingBuilder(ProofBuilder):
    """Traces a target and records the mutations that are possible."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.mutations: list[Mutation] = []
        self._calls = 0

    def node(self, name: str, *inputs: Any, **named: Any) -> Any:
        call, self._calls = self._calls, self._calls + 1
        present = [i for i, v in enumerate(inputs) if v is not None]
        if name not in COMMUTATIVE:
            pairs = list(pairwise(present))[:_MOST_SWAPS]
            self.mutations += [Mutation(call, name, "swap", p) for p in pairs]
        for i in present:
            if isinstance(inputs[i], (list, tuple)):
                elements = range(min(len(inputs[i]), _MOST_ELEMENTS))
                self.mutations += [Mutation(call, name, "number", (i, e)) for e in elements]
            elif isinstance(inputs[i], (int, float)) and not isinstance(inputs[i], bool):
                self.mutations.append(Mutation(call, name, "number", (i, 0)))
        sizes = named.get("sizes")
        if sizes is not None and len(sizes) > 1:
            self.mutations.append(Mutation(call, name, "attribute", ("sizes",)))
        for attribute, value in {**dict(named.get("attrs") or {}), **named}.items():
            if attribute in ("attrs", "outputs", "sizes", "type", "declared") or attribute in _IDLE:
                continue
            listed = isinstance(value, (tuple, list)) and not _is_permutation(value)
            elements = range(min(len(value), _MOST_ELEMENTS) if listed else 1)
            self.mutations += [Mutation(call, name, "attribute", (attribute, e)) for e in elements]
        if present and isinstance(inputs[present[0]], Val) and named.get("outputs", 1) == 1 and sizes is None:
            self.mutations.append(Mutation(call, name, "omit"))
        return super().node(name, *inputs, **named)

    def edit(self, rule: str, replaced: Sequence[Value], results: Sequence[Val]) -> Edit:
        if len(results) > 1:
            self.mutations.append(Mutation(0, "", "results"))
        return super().edit(rule, replaced, results)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operator in a target."""

    op: str
    inputs: tuple[Any, ...]
    named: Mapping[str, Any]


class MutatingBuilder(ProofBuilder):
    """Traces a target with one mutation.

    `reached`: whether the target made the call to be changed. `right`: that call as the target makes it. `wrong`: the
    call, or the value, that replaced it.
    """

    def __init__(self, graph: Graph, mutation: Mutation) -> None:
        super().__init__(graph)
        self.mutation = mutation
        self.reached = False
        self.right: Call | None = None
        self.wrong: Call | Val | None = None
        self._calls = 0

    def node(self, name: str, *inputs: Any, **named: Any) -> Any:
        call, self._calls = self._calls, self._calls + 1
        m = self.mutation
        if m.kind == "results" or call != m.call or name != m.op:
            return super().node(name, *inputs, **named)
        values, right = list(inputs), named
        if m.kind == "swap":
            i, j = m.detail
            if max(i, j) >= len(values):
                return super().node(name, *inputs, **named)
            values[i], values[j] = values[j], values[i]
        elif m.kind == "number":
            i, element = m.detail
            if i >= len(values):
                return super().node(name, *inputs, **named)
            values[i] = _perturbed_input(name, i, values[i], element)
        elif m.kind == "attribute":
            named = _perturbed(name, named, *m.detail)
        self.reached = True
        self.right = Call(name, inputs, right)
        if m.kind == "omit":
            self.wrong = next(v for v in values if v is not None)
            return self.wrong
        self.wrong = Call(name, tuple(values), named)
        return super().node(name, *values, **named)

    def edit(self, rule: str, replaced: Sequence[Value], results: Sequence[Val]) -> Edit:
        if self.mutation.kind == "results":
            self.reached = True
            results = [*results[1:], results[0]]
        return super().edit(rule, replaced, results)


def _perturbed_input(op: str, index: int, value: Any, element: int) -> Any:
    if isinstance(value, (list, tuple)):
        numbers = list(value)
        if element < len(numbers):
            numbers[element] = _next_number(op, index, numbers[element])
        return numbers
    return _next_number(op, index, value) if isinstance(value, (int, float)) else value


def _next_number(op: str, index: int, number: float) -> float:
    """Another number than `number` for an input of an operator, with a different meaning."""
    if (op, index) == ("Slice", 2):  # an end beyond the dimension: changing it by one has no effect
        return number - 1 if abs(number) < 2**31 - 1 else 1
    if op == "Reshape" and number in (0, -1):  # 0 and -1 can stand for the same size
        return 2
    return number + 1


def _perturbed(op: str, named: dict[str, Any], name: str, element: int = 0) -> dict[str, Any]:
    """The keyword arguments of a node in a target, with one attribute changed."""
    out = dict(named)
    if name == "sizes":
        sizes = list(out["sizes"])
        out["sizes"] = sizes[1:] + sizes[:1] if len(set(sizes)) > 1 else [sizes[0] + 1, *sizes[1:]]
        return out
    attrs: Attrs = out.get("attrs") or NO_ATTRS
    value = out[name] if name in out else attrs.get(name)
    out[name] = _changed_value(op, name, value, element)
    return out


def _is_permutation(value: Sequence[Any]) -> bool:
    return len(value) > 1 and sorted(value) == list(range(len(value)))


def _changed_value(op: str, name: str, value: Any, element: int) -> Any:
    if isinstance(value, Lit):
        value = value.text
    if value is None:
        value = defaults(op).get(name)
    if isinstance(value, bool | int):
        # Without a schema no defaults are known. Then an attribute of 0 or 1 may be a flag, for which 2 means the same
        # as 1.
        flag = value in (0, 1) and (schema(op) is None or defaults(op).get(name) in (0, 1))
        return 1 - value if flag else value + 1
    if isinstance(value, float):
        return value * 2 if value else 1.0
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], int):
        numbers: list[Any] = list(value)
        if _is_permutation(value):
            return tuple(numbers[1:] + numbers[:1])
        if element < len(numbers):
            numbers[element] += 1
        return tuple(numbers)
    return None if value is not None else 1
