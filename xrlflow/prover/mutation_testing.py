"""Mutation testing: the tests of a proof must reject mutants of a rule. A mutant that survives needs a reason why it is
right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Protocol

import numpy as np

from xrlflow.ir import FLOATS, Dim, Graph, TensorType, Value
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
from xrlflow.prover.errors import check_errors
from xrlflow.prover.hooks import without
from xrlflow.prover.machine import integers
from xrlflow.prover.mutants import Call, MutatingBuilder, Mutation, RecordingBuilder
from xrlflow.prover.ranges import check_ranges
from xrlflow.prover.sketch import Problem, check_types
from xrlflow.rewrite import AnyRule, Library, Val
from xrlflow.rewrite.rule import Site

# On how many cases each mutant is tried first, and on how many a mutant that passed is tested thoroughly.
_FIRST, _THOROUGH = 10, 40
# On so many draws of inputs two operators must agree to count as equivalent.
_DRAWS = 4
# For these draws: the sizes that named dimensions get, the large sizes, the most elements of a tensor, and the scale of
# large floats.
_SMALL_SIZES, _LARGE_SIZES, _MOST_ELEMENTS, _LARGE_NUMBERS = (1, 2, 3, 4), (1, 2, 130, 2050), 1 << 19, 1e5

_SAME = "equivalent: on other inputs of these types, too, the operator computes the same so"
_BROADCASTS = "equivalent: only the shape differs, and what reads it broadcasts"


@dataclass(frozen=True, slots=True)
class Survivor:
    """A mutant that passed."""

    mutant: str  # the description of the mutant
    cases: int  # the number of cases in which it changes the graph, but not what the graph computes
    why: str  # why the mutant is right (empty: not explained)
    kind: str = ""


@dataclass(frozen=True, slots=True)
class HuntResult:
    """The numbers of mutants by kind, the survivors, and the conditions that can be dropped because another one
    refuses.
    """

    counts: Mapping[str, int]
    survivors: tuple[Survivor, ...]
    redundant: tuple[str, ...]

    @property
    def mutants(self) -> int:
        return sum(self.counts.values())

    @property
    def by_kind(self) -> dict[str, tuple[int, int]]:
        """For each kind of mutants: how many were rejected, and how many there are."""
        passed = Counter(s.kind for s in self.survivors)
        return {kind: (count - passed[kind], count) for kind, count in sorted(self.counts.items())}


class Further(Protocol):
    """A source of more cases and more refused graphs, on which survivors are tried."""

    def further_cases(self) -> Sequence[Case]: ...

    def cases_near(self, cases: Sequence[Case]) -> Iterator[Case]: ...

    def further_refused(self, site: Site) -> Iterator[Problem]: ...

    def refused_near(self, site: Site, problems: Sequence[Problem]) -> Iterator[Problem]: ...


@dataclass(slots=True)
class Hunt:
    """Mutation testing of one rule. `cases` are the rule's; `refused` has, for each `require`, problems that it
    refused.
    """

    rule: AnyRule
    library: Library
    rng: np.random.Generator
    cases: Sequence[Case]
    refused: Mapping[Site, Sequence[Problem]]
    reasons: Mapping[Site, str]
    more: Further
    _cases: Sequence[Case] | None = field(init=False, default=None)

    def run(self) -> HuntResult:
        counts, survivors = self._targets()
        dropped, without_condition, redundant = self._conditions()
        counts.update({"condition": dropped} if dropped else {})
        return HuntResult(counts, (*survivors, *without_condition), tuple(redundant))

    @property
    def further(self) -> Sequence[Case]:
        """More cases. They are drawn when they are first needed, that is, for the first survivor."""
        if self._cases is None:
            self._cases = self.more.further_cases()
        return self._cases

    def _rejects(self, case: Case, thorough: bool = False) -> bool | None:
        """Whether a test rejects a case of a mutant; None if the case's graph has no value at all.

        With `thorough`, for survivors, all tests are run. Otherwise one trial is enough.
        """
        tested = False
        try:
            if self.rule.proof == "field":
                for _ in range(4 if thorough else 1):  # named dimensions get other numbers each time
                    tested |= check_field(case, self.rng, 0.5) is not None
            if thorough:
                for wide in {False, bool(whole_types(case))}:
                    tested |= check_runtime(case, self.rng, wide) is not None
                tested |= check_ranges(case, self.rng, self.rule)
                check_errors(case, self.rng, self.rule)
            if not tested or thorough:
                tested |= check_floats(case, self.rng, self.rule) > 0
        except Wrong:
            return True
        except NotEvaluable:
            return False
        return False if tested or usable(case.problem, self.rng) else None

    # Targets

    def _targets(self) -> tuple[Counter[str], list[Survivor]]:
        """Test the mutants of the target. Returns the number of mutants of each kind, and the survivors."""
        mutations: dict[Mutation, None] = {}
        first = self.cases[:: max(1, len(self.cases) // _FIRST)]
        for case in first:
            recorder = RecordingBuilder(case.before)
            applied(case.problem, case.match, recorder)
            mutations.update(dict.fromkeys(recorder.mutations))
        later = [c for c in self.cases if c not in first]
        counts, survivors = Counter[str](), []
        for mutation in mutations:
            trials = _Trials()
            if not self._rejected_on(mutation, (*first, *later), trials) and trials.effective:
                survivor = self._survivor(mutation, trials.cases[:_THOROUGH])
                if survivor is not None:
                    survivors.append(survivor)
            counts[mutation.kind] += bool(trials.effective)
        return +counts, survivors

    def _survivor(self, mutation: Mutation, cases: Sequence[Case]) -> Survivor | None:
        """Test thoroughly a mutant that passed, and that changes the graph in these cases. None if a test rejects it
        now.
        """
        if self._rejected_on(mutation, (*cases, *self.further), trials := _Trials(), thorough=True):
            return None
        survivor = self._explained(mutation, trials)
        # Cases near those where the mutant makes a difference are the most likely to show that it is wrong.
        if not survivor.why and self._rejected_on(
            mutation, self.more.cases_near(cases), trials, thorough=True
        ):
            return None
        return self._explained(mutation, trials)

    def _rejected_on(
        self, mutation: Mutation, cases: Iterable[Case], trials: _Trials, thorough: bool = False
    ) -> bool:
        """Whether one of these cases shows that a mutant is wrong. The cases where it differs are recorded
        in `trials`.
        """
        for case in cases:
            builder = MutatingBuilder(case.before, mutation)
            try:
                mutant = applied(case.problem, case.match, builder)
                if mutant is not None:
                    _check_fit(mutant)
            except Exception:  # the mutant's nodes do not even fit together
                trials.effective += 1
                return True
            if not builder.reached or (
                mutant is not None and mutant.after.fingerprint == case.after.fingerprint
            ):
                continue
            if mutant is None:
                trials.effective += 1
                trials.alike.add("")
                continue
            rejected = self._rejects(mutant, thorough)
            if rejected is None:
                continue
            trials.effective += 1
            trials.cases.append(case)
            if rejected:
                return True
            if thorough and (alike := _likeness(builder, case, self.rng)) is not None:
                trials.alike.add(alike)
        return False

    def _explained(self, mutation: Mutation, trials: _Trials) -> Survivor:
        mutant = str(mutation)
        why = self.rule.survivors.get(mutant, "")
        if not why and trials.alike == {_SAME}:
            why = _SAME
        elif not why and trials.alike and trials.alike <= {_SAME, _BROADCASTS}:
            why = _BROADCASTS
        return Survivor(mutant, trials.effective, why, mutation.kind)

    # Conditions

    def _conditions(self) -> tuple[int, list[Survivor], list[str]]:
        """Test the mutants that lack one `require`. Returns their number, the survivors, and the
        redundant conditions.
        """
        count, survivors, redundant = 0, [], []
        for site, problems in self.refused.items():
            mutant = f"drop: {self.reasons[site]}"
            passed: list[Problem] = []
            rejected = self._drop(site, problems, passed)
            if not rejected:
                passed.clear()
                further = chain(problems, self.more.further_refused(site))
                rejected = self._drop(site, further, passed, thorough=True)
            why = self.rule.survivors.get(mutant, "")
            if passed and not rejected and not why:
                neighbours = self.more.refused_near(site, passed)
                rejected = self._drop(site, neighbours, passed, thorough=True)
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
        """Whether a test rejects a case that the rule has only without the condition. Cases that pass are added to
        `passed`.
        """
        for problem in problems:
            cases = self._cases_without(site, problem)
            if cases is None:  # the rule raises: it needs the condition, unless the graph is meaningless
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

    def _cases_without(self, site: Site, problem: Problem) -> list[Case] | None:
        """The cases that the rule has in a problem without the condition; None if the rule raises."""
        with without(site):
            try:
                return find_cases(self.library, problem)[0]
            except Exception:
                return None


def _check_fit(mutant: Case) -> None:
    """Raises Unbuildable if a new node's operator does not take the element types of its inputs."""
    for node in (*mutant.edit.added, *(new for _, new in mutant.edit.rewired)):
        check_types(node.op, [mutant.after.type(v) if v else None for v in node.inputs])


@dataclass(slots=True)
class _Trials:
    """The cases in which a mutant changes the graph, and how its operators compare with the right
    ones (`_likeness`).
    """

    effective: int = 0
    cases: list[Case] = field(default_factory=list)
    alike: set[str] = field(default_factory=set)


def _likeness(builder: MutatingBuilder, case: Case, rng: np.random.Generator) -> str | None:
    """Compare the operator that a mutant changed with the right one, alone, on random inputs of the same types, some of
    them large.

    Returns an explanation if the two are equivalent, "" if they differ, and None if the right operator takes none of
    the drawn inputs.
    """
    if builder.right is None or builder.wrong is None:
        return ""
    verdict, comparisons = _SAME, 0
    for turn in range(4 * _DRAWS):
        inputs = _RandomInputs(rng, wide=turn % 2 == 1)
        try:
            right = _evaluate_call(case, builder.right, inputs)
        except Exception:  # the operator does not take the drawn inputs
            continue
        try:
            wrong = _evaluate_call(case, builder.wrong, inputs)
            for a, b in zip(right, wrong, strict=True):
                if a.dtype != b.dtype:
                    return ""
                if a.shape != b.shape:
                    verdict = _BROADCASTS
                shape = np.broadcast_shapes(a.shape, b.shape)
                a, b = np.broadcast_to(a, shape), np.broadcast_to(b, shape)
                real = a.dtype.kind == "f"  # the mean of an empty tensor is NaN on both sides
                same = np.allclose(a, b, 1e-12, 1e-12, equal_nan=True) if real else np.array_equal(a, b)
                if not same:
                    return ""
        except Exception:
            return ""
        comparisons += 1
        if comparisons == _DRAWS:
            break
    return verdict if comparisons else None


@dataclass(slots=True)
class _RandomInputs:
    """Random inputs of operators, and the sizes of named dimensions.

    With `wide`, integers are drawn from their full range, and floats and dimensions are large.
    """

    rng: np.random.Generator
    wide: bool
    values: dict[Value, Array] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def size(self, dim: Dim) -> int:
        if isinstance(dim, int):
            return dim
        options = _LARGE_SIZES if self.wide else _SMALL_SIZES
        return self.sizes.setdefault(dim or "", int(self.rng.choice(options)))

    def of(self, type: TensorType) -> Array:
        """A random tensor of a type. Raises ValueError if it would be too large."""
        shape = tuple(map(self.size, type.shape or ()))
        if prod(shape) > _MOST_ELEMENTS:
            raise ValueError("it is too large")
        if type.dtype in FLOATS:
            return self.rng.standard_normal(shape) * (_LARGE_NUMBERS if self.wide else 1.0)
        dtype = numpy_dtype(type.dtype)
        if self.wide and dtype.kind in "iu":
            return integers(self.rng, shape, dtype)
        return self.rng.integers(0, 2 if dtype.kind == "b" else 4, shape).astype(dtype)


def _evaluate_call(case: Case, call: Call | Val, inputs: _RandomInputs) -> tuple[Array, ...]:
    """The outputs of an operator for random inputs. Each input is drawn once and then reused."""
    graph = case.before
    if isinstance(call, Val):
        return (_number(case, graph, call.value, call.type, inputs),)
    scratch = ProofBuilder(graph)
    outputs = scratch.node(call.op, *call.inputs, **call.named)
    if not scratch.drafts:  # the builder folded the operator to a constant
        return tuple(promote(REALS, v.array) for v in (outputs if isinstance(outputs, tuple) else (outputs,)))
    draft = scratch.drafts[-1]
    types = {v.value: v.type for v in call.inputs if isinstance(v, Val)}
    arrays = [
        _number(case, graph, v, types.get(v) or graph.type(v), inputs) if v else None for v in draft.inputs
    ]
    return evaluate_node(draft.op, draft.attrs, arrays, len(draft.types))[: len(draft.types)]


def _number(case: Case, graph: Graph, value: Value, type: TensorType, inputs: _RandomInputs) -> Array:
    const = graph.leaves.consts.get(value)
    if value not in inputs.values:
        readable = const is not None and value not in case.problem.opaque
        inputs.values[value] = (
            promote(REALS, const.numpy()) if readable and const is not None else inputs.of(type)
        )
    return inputs.values[value]
