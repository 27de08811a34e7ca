"""The hunt for mutants: wrong rules, made of a right one, have to be found out; those that are not are explained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np

from xrlflow.ir import FLOATS, Graph, TensorType, Value
from xrlflow.ops.evaluate import REALS, NotEvaluable, evaluate_node, promote
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.prover.cases import (
    Array,
    Case,
    ProofBuilder,
    Wrong,
    applied,
    check_field,
    check_floats,
    check_runtime,
    find_cases,
    usable,
    whole_types,
)
from xrlflow.prover.mutants import Call, MutatingBuilder, Mutation, RecordingBuilder
from xrlflow.prover.sketch import Problem
from xrlflow.rewrite import AnyRule, Library, Val, without
from xrlflow.rewrite.rule import Site

# Cases on which each mutant is tried first, and on which a survivor is tried by all means.
_FIRST, _THOROUGH = 10, 40
# Draws that must agree if an operator is to compute the same with a change.
_DRAWS = 4

_SAME = "equivalent: on other inputs of these types, too, the operator computes the same so"
_BROADCASTS = "equivalent: only the shape differs, and what reads it broadcasts"


@dataclass(frozen=True, slots=True)
class Survivor:
    """A mutant that passed: what was done otherwise, in how many cases it makes a difference to the graph but not to
    what it computes, and why that is right (empty: nobody knows)."""

    mutant: str
    cases: int
    why: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Hunted:
    """How many mutants of each kind were made, those that passed, and conditions without which another one refuses."""

    made: Mapping[str, int]
    survivors: tuple[Survivor, ...]
    redundant: tuple[str, ...]

    @property
    def mutants(self) -> int:
        return sum(self.made.values())

    @property
    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Of each kind how many mutants were rejected, and how many made."""
        passed = Counter(s.kind for s in self.survivors)
        return {kind: (count - passed[kind], count) for kind, count in sorted(self.made.items())}


class Further(Protocol):
    """Where there are more cases, and more that a condition refuses, to try survivors on."""

    def further_cases(self) -> Sequence[Case]: ...

    def cases_near(self, cases: Sequence[Case]) -> Iterator[Case]: ...

    def further_refused(self, site: Site) -> Iterator[Problem]: ...

    def refused_near(self, site: Site, problems: Sequence[Problem]) -> Iterator[Problem]: ...


@dataclass(slots=True)
class Hunt:
    """`cases` of the right rule, and the problems that each condition refused."""

    rule: AnyRule
    library: Library
    rng: np.random.Generator
    cases: Sequence[Case]
    refused: Mapping[Site, Sequence[Problem]]
    reasons: Mapping[Site, str]
    more: Further
    _cases: Sequence[Case] | None = field(init=False, default=None)

    def run(self) -> Hunted:
        made, survivors = self._targets()
        dropped, kept, redundant = self._conditions()
        made.update({"condition": dropped} if dropped else {})
        return Hunted(made, (*survivors, *kept), tuple(redundant))

    @property
    def further(self) -> Sequence[Case]:
        """More cases: drawn if there is a survivor."""
        if self._cases is None:
            self._cases = self.more.further_cases()
        return self._cases

    def _rejects(self, case: Case, thorough: bool = False) -> bool | None:
        """Whether a wrong rule's case is found out; None if the graph has no value anyway.

        One trial will do, a survivor is tried in every way.
        """
        said = False
        try:
            if self.rule.proof == "field":
                for _ in range(4 if thorough else 1):  # dimensions that have a name get other numbers
                    said |= check_field(case, self.rng, 0.5) is not None
            if thorough:
                for wide in {False, bool(whole_types(case))}:
                    said |= check_runtime(case, self.rng, wide) is not None
            if not said or thorough:
                said |= check_floats(case, self.rng, self.rule) > 0
        except Wrong:
            return True
        except NotEvaluable:
            return False
        return False if said or usable(case.problem, self.rng) else None

    # Targets

    def _targets(self) -> tuple[Counter[str], list[Survivor]]:
        """Mutants of the target: how many of each kind, and which survive."""
        found: dict[Mutation, None] = {}
        chosen = self.cases[:: max(1, len(self.cases) // _FIRST)]
        for case in chosen:
            recorder = RecordingBuilder(case.before)
            applied(case.problem, case.match, recorder)
            found.update(dict.fromkeys(recorder.mutations))
        others = [c for c in self.cases if c not in chosen]
        made, survivors = Counter[str](), []
        for mutation in found:
            tried = _Tried()
            if not self._finds_out(mutation, (*chosen, *others), tried) and tried.effective:
                survivor = self._survivor(mutation, tried.cases[:_THOROUGH])
                if survivor is not None:
                    survivors.append(survivor)
            made[mutation.kind] += bool(tried.effective)
        return +made, survivors

    def _survivor(self, mutation: Mutation, cases: Sequence[Case]) -> Survivor | None:
        """What is known of a mutant that makes a difference in these cases, and passed; None if it is found out."""
        if self._finds_out(mutation, (*cases, *self.further), tried := _Tried(), thorough=True):
            return None
        survivor = self._explained(mutation, tried)
        # The more cases where it makes a difference, the more likely is one that shows which: they are looked for.
        if not survivor.why and self._finds_out(mutation, self.more.cases_near(cases), tried, thorough=True):
            return None
        return self._explained(mutation, tried)

    def _finds_out(
        self, mutation: Mutation, cases: Iterable[Case], tried: _Tried, thorough: bool = False
    ) -> bool:
        """Whether one of these cases shows that a mutant is wrong."""
        for case in cases:
            builder = MutatingBuilder(case.before, mutation)
            try:
                mutant = applied(case.problem, case.match, builder)
            except Exception:  # the mutant's nodes do not even fit together
                tried.effective += 1
                return True
            if not builder.reached or (
                mutant is not None and mutant.after.fingerprint == case.after.fingerprint
            ):
                continue
            if mutant is None:
                tried.effective += 1
                tried.alike.add("")
                continue
            rejected = self._rejects(mutant, thorough)
            if rejected is None:
                continue
            tried.effective += 1
            tried.cases.append(case)
            if rejected:
                return True
            if thorough and (alike := _likeness(builder, case, self.rng)) is not None:
                tried.alike.add(alike)
        return False

    def _explained(self, mutation: Mutation, tried: _Tried) -> Survivor:
        mutant = str(mutation)
        why = self.rule.survivors.get(mutant, "")
        if not why and tried.alike == {_SAME}:
            why = _SAME
        elif not why and tried.alike and tried.alike <= {_SAME, _BROADCASTS}:
            why = _BROADCASTS
        return Survivor(mutant, tried.effective, why, mutation.kind)

    # Conditions

    def _conditions(self) -> tuple[int, list[Survivor], list[str]]:
        """Mutants without one `require`: how many, which survive, and which make no difference."""
        count, survivors, redundant = 0, [], []
        for site, kept in self.refused.items():
            mutant = f"drop: {self.reasons[site]}"
            passed: list[Problem] = []
            rejected = self._drop(site, kept, passed)
            if not rejected:
                passed.clear()
                further = chain(kept, self.more.further_refused(site))
                rejected = self._drop(site, further, passed, thorough=True)
            why = self.rule.survivors.get(mutant, "")
            if passed and not rejected and not why:
                near = self.more.refused_near(site, passed)
                rejected = self._drop(site, near, passed, thorough=True)
            if not rejected and not passed:
                redundant.append(mutant)
                continue
            count += 1
            if not rejected:
                survivors.append(Survivor(mutant, len(passed), why, "condition"))
        return count, survivors, redundant

    def _drop(
        self, site: Site, problems: Iterable[Problem], passed: list[Problem], thorough: bool = False
    ) -> bool:
        """Whether a case that there is without a condition is found out; those that are not are added to `passed`."""
        for problem in problems:
            try:
                with without(site):  # not while the problems are looked for
                    cases, _ = find_cases(self.library, problem)
            except Exception:  # it needs what the condition says, if the graph means anything
                if not usable(problem, self.rng):
                    continue
                return True
            for case in cases:
                rejected = self._rejects(case, thorough)
                if rejected:
                    return True
                if rejected is not None:
                    passed.append(problem)
        return False


@dataclass(slots=True)
class _Tried:
    """In how many cases a mutant makes a difference, and how alike the two operators are by themselves."""

    effective: int = 0
    cases: list[Case] = field(default_factory=list)
    alike: set[str] = field(default_factory=set)


def _likeness(builder: MutatingBuilder, case: Case, rng: np.random.Generator) -> str | None:
    """How a wrong operator by itself compares with the right one, on random inputs of the same types.

    Empty if it differs; None if the right one takes none of the inputs that were drawn, which says nothing.
    """
    if builder.right is None or builder.wrong is None:
        return ""
    verdict, drawn = _SAME, 0
    for _ in range(4 * _DRAWS):
        known: dict[Value, Array] = {}
        sizes: dict[str, int] = {}
        try:
            right = _alone(case, builder.right, known, sizes, rng)
        except Exception:  # inputs of one's own that the operator does not take
            continue
        try:
            wrong = _alone(case, builder.wrong, known, sizes, rng)
            for a, b in zip(right, wrong, strict=True):
                if a.shape != b.shape:
                    verdict = _BROADCASTS
                shape = np.broadcast_shapes(a.shape, b.shape)
                a, b = np.broadcast_to(a, shape), np.broadcast_to(b, shape)
                real = a.dtype.kind == "f"  # the mean of nothing is NaN on both sides
                same = np.allclose(a, b, 1e-12, 1e-12, equal_nan=True) if real else np.array_equal(a, b)
                if not same:
                    return ""
        except Exception:
            return ""
        drawn += 1
        if drawn == _DRAWS:
            break
    return verdict if drawn else None


def _alone(
    case: Case, call: Call | Val, known: dict[Value, Array], sizes: dict[str, int], rng: np.random.Generator
) -> tuple[Array, ...]:
    """What an operator computes of random inputs; those in `known` are given, the others are added to it."""
    graph = case.before
    if isinstance(call, Val):
        return (_number(case, graph, call.value, call.type, known, sizes, rng),)
    scratch = ProofBuilder(graph)
    made = scratch.node(call.op, *call.inputs, **call.named)
    if not scratch.drafts:  # a constant
        return tuple(promote(REALS, v.array) for v in (made if isinstance(made, tuple) else (made,)))
    draft = scratch.drafts[-1]
    types = {v.value: v.type for v in call.inputs if isinstance(v, Val)}
    arrays = [
        _number(case, graph, v, types.get(v) or graph.type(v), known, sizes, rng) if v else None
        for v in draft.inputs
    ]
    return evaluate_node(draft.op, draft.attrs, arrays, len(draft.types))[: len(draft.types)]


def _number(
    case: Case,
    graph: Graph,
    value: Value,
    type: TensorType,
    known: dict[Value, Array],
    sizes: dict[str, int],
    rng: np.random.Generator,
) -> Array:
    const = graph.leaves.consts.get(value)
    if value not in known:
        if const is not None and value not in case.problem.opaque:
            known[value] = promote(REALS, const.numpy())
        else:
            shape = tuple(
                d if isinstance(d, int) else sizes.setdefault(d or "", int(rng.integers(1, 5)))
                for d in type.shape or ()
            )
            known[value] = (
                rng.standard_normal(shape)
                if type.dtype in FLOATS
                else rng.integers(0, 2 if numpy_dtype(type.dtype).kind == "b" else 4, shape).astype(
                    numpy_dtype(type.dtype)
                )
            )
    return known[value]
