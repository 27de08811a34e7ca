"""Wrong rules, made of right ones: a proof that accepts them proves nothing.

A rule's target is traced with a builder that does one thing otherwise: inputs swapped, an attribute or a number
perturbed, an operator left out, results exchanged. (Dropping a `require` is `xrlflow.rewrite.without`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from xrlflow.ir import NO_ATTRS, Attr, Attrs, Edit, Graph, Value
from xrlflow.ops.schema import COMMUTATIVE, defaults
from xrlflow.rewrite import Lit, Val
from xrlflow.verify.rules.cases import ProofBuilder

_MOST_SWAPS = 3
# Attributes that do not change what is computed in float64, or say what is known otherwise.
_IDLE = frozenset({"stash_type", "momentum", "saturate", "seed", "num_outputs", "kernel_shape", "round_mode"})


@dataclass(frozen=True, slots=True)
class Mutation:
    """What to do otherwise: at which call of an operator (in the order of the target), and how."""

    call: int
    op: str
    kind: str  # "swap", "attribute", "number", "omit", "results"
    detail: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.kind == "results":
            return "exchange the results"
        what = " ".join(map(str, self.detail))
        return f"{self.kind} {what} of {self.op} (call {self.call})".replace("omit  of", "omit")


class RecordingBuilder(ProofBuilder):
    """Notes what can be done otherwise in a target."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.mutations: list[Mutation] = []
        self._calls = 0

    def node(self, name: str, *inputs: Any, **named: Any) -> Any:
        call, self._calls = self._calls, self._calls + 1
        given = [i for i, v in enumerate(inputs) if v is not None]
        if name not in COMMUTATIVE:
            pairs = list(pairwise(given))[:_MOST_SWAPS]
            self.mutations += [Mutation(call, name, "swap", p) for p in pairs]
        for i in given:
            if isinstance(inputs[i], (list, tuple)):
                elements = range(min(len(inputs[i]), 4))
                self.mutations += [Mutation(call, name, "number", (i, e)) for e in elements]
            elif isinstance(inputs[i], (int, float)) and not isinstance(inputs[i], bool):
                self.mutations.append(Mutation(call, name, "number", (i, 0)))
        sizes = named.get("sizes")
        if sizes is not None and len(sizes) > 1:
            self.mutations.append(Mutation(call, name, "attribute", ("sizes",)))
        for attribute in {**dict(named.get("attrs") or {}), **named}:
            if attribute not in ("attrs", "outputs", "sizes", "type", "declared") and attribute not in _IDLE:
                self.mutations.append(Mutation(call, name, "attribute", (attribute,)))
        if given and isinstance(inputs[given[0]], Val) and named.get("outputs", 1) == 1 and sizes is None:
            self.mutations.append(Mutation(call, name, "omit"))
        return super().node(name, *inputs, **named)

    def edit(self, rule: str, replaced: Sequence[Value], results: Sequence[Val]) -> Edit:
        if len(results) > 1:
            self.mutations.append(Mutation(0, "", "results"))
        return super().edit(rule, replaced, results)


class MutatingBuilder(ProofBuilder):
    """Traces a target with one thing otherwise. `reached` says whether the target came to it."""

    def __init__(self, graph: Graph, mutation: Mutation) -> None:
        super().__init__(graph)
        self.mutation = mutation
        self.reached = False
        self._calls = 0

    def node(self, name: str, *inputs: Any, **named: Any) -> Any:
        call, self._calls = self._calls, self._calls + 1
        m = self.mutation
        if m.kind == "results" or call != m.call or name != m.op:
            return super().node(name, *inputs, **named)
        values = list(inputs)
        if m.kind == "swap":
            i, j = m.detail
            if max(i, j) >= len(values):
                return super().node(name, *inputs, **named)
            values[i], values[j] = values[j], values[i]
        elif m.kind == "number":
            i, element = m.detail
            if i >= len(values):
                return super().node(name, *inputs, **named)
            # A Slice may end beyond the end: one more changes nothing.
            values[i] = _perturbed_input(values[i], element, -1 if (name, i) == ("Slice", 2) else 1)
        elif m.kind == "attribute":
            named = _perturbed(name, m.detail[0], named)
        elif m.kind == "omit":
            self.reached = True
            return next(v for v in values if v is not None)
        self.reached = True
        return super().node(name, *values, **named)

    def edit(self, rule: str, replaced: Sequence[Value], results: Sequence[Val]) -> Edit:
        if self.mutation.kind == "results":
            self.reached = True
            results = [*results[1:], results[0]]
        return super().edit(rule, replaced, results)


def _perturbed_input(value: Any, element: int, by: int) -> Any:
    if isinstance(value, (list, tuple)):
        numbers = list(value)
        if element < len(numbers):
            numbers[element] += by
        return numbers
    return value + by if isinstance(value, (int, float)) else value


def _perturbed(op: str, name: str, named: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a target's node with one attribute changed."""
    out = dict(named)
    if name == "sizes":
        sizes = list(out["sizes"])
        out["sizes"] = sizes[1:] + sizes[:1] if len(set(sizes)) > 1 else [sizes[0] + 1, *sizes[1:]]
        return out
    attrs: Attrs = out.get("attrs") or NO_ATTRS
    value = out[name] if name in out else attrs.get(name)
    out[name] = _another(op, name, value)
    return out


def _another(op: str, name: str, value: Any) -> Any:
    if isinstance(value, Lit):
        value = value.text
    if value is None:
        value = defaults(op).get(name)
    if isinstance(value, bool | int):
        return 1 - value if value in (0, 1) and defaults(op).get(name) in (0, 1) else _next(value)
    if isinstance(value, float):
        return value * 2 if value else 1.0
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], int):
        numbers: list[Attr] = list(value)
        if sorted(value) == list(range(len(value))) and len(value) > 1:
            return tuple(numbers[1:] + numbers[:1])
        return (value[0] + 1, *value[1:])
    return None if value is not None else 1


def _next(value: int) -> int:
    return value + 1
