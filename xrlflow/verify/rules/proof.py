"""Proofs of rules, and what they rest on.

For each rule sketches of its left side are drawn (from its declared `shapes` or its `examples`, and around them), those
that its conditions admit become cases, and every case has to pass three tests: both sides agree over prime fields, so
often that a false rule would pass with less than 1e-12 (rules with `proof = "field"`); they agree over float64, NaN and
infinities included, and numeric rules at extreme magnitudes; and they agree in ONNX Runtime in float32 with its
optimisations off. Then mutants of the rule are made, and the same tests have to reject them.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.parser

from xrlflow.ir import Graph, digest
from xrlflow.onnxio import load
from xrlflow.ops.evaluate import NotEvaluable
from xrlflow.ops.schema import IR_VERSION, OPSET
from xrlflow.rewrite import AnyRule, Library, Rule, RuleError, without
from xrlflow.rewrite.pattern import trace_patterns
from xrlflow.rewrite.rule import Site
from xrlflow.verify.rules.cases import (
    Case,
    Wrong,
    applied,
    check_field,
    check_floats,
    check_runtime,
    find_cases,
    usable,
)
from xrlflow.verify.rules.draw import Draw
from xrlflow.verify.rules.mutants import MutatingBuilder, Mutation, RecordingBuilder
from xrlflow.verify.rules.patterns import Unlucky, draw_pattern
from xrlflow.verify.rules.sketch import Problem, Sketch, Unbuildable, build, sketch_of
from xrlflow.verify.rules.variations import resize, vary

# How many sketches are drawn at most, how many cases are wanted, and how few are enough.
MOST_SKETCHES, CASES, LEAST_CASES = 1200, 60, 8
_RUNTIME_CASES = 8
# Refused problems that are kept for each `require`, and cases on which each mutant is tried.
_KEPT, _MUTANT_CASES = 24, 10
# More bits of float32 than this may not be lost.
MOST_BITS = 2.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is known of a rule.

    `admitted` cases out of `sketches`; `refused`: near misses by reason. `trials`: evaluations over a prime field, and
    `bound`: the greatest probability over the cases with which a false rule would have passed them (1 for rules that
    are tested numerically). `bits`: the most bits of float32 accuracy that a case lost (None: not run). `survivors`:
    mutants that passed, with the number of cases in which they compute the same: they are right as far as cases were
    drawn, that is, the change makes no difference or the condition refuses more than it has to. `redundant`:
    conditions without which another one refuses. `covered`: how many values of each attribute were admitted.
    """

    name: str
    proof: str
    sketches: int
    admitted: int
    refused: dict[str, int]
    trials: int
    field_cases: int
    bound: float
    float_draws: int
    runtime_cases: int
    bits: float | None
    mutants: int
    mutants_rejected: int
    survivors: tuple[str, ...]
    redundant: tuple[str, ...]
    covered: dict[str, int]
    failures: tuple[str, ...]
    seconds: float

    @property
    def proven(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        names = [f for f in self.__slots__ if f != "seconds"]
        return {
            "proven": self.proven,
            **{n: getattr(self, n) for n in names},
            "seconds": round(self.seconds, 3),
        }


@dataclass(slots=True)
class _Proof:
    """A proof while it runs."""

    rule: AnyRule
    seed: int
    library: Library = field(init=False)
    draw: Draw = field(init=False)
    rng: np.random.Generator = field(init=False)
    cases: list[Case] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    sites: dict[Site, list[Problem]] = field(default_factory=dict)
    reasons: dict[Site, str] = field(default_factory=dict)
    covered: dict[str, set[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    sketches: int = 0
    trials: int = 0
    field_cases: int = 0
    bound: float = 0.0
    float_draws: int = 0
    runtime_cases: int = 0
    bits: float = -float("inf")

    def __post_init__(self) -> None:
        self.library = library_of(self.rule)
        self.draw = Draw(digest(self.rule.name) ^ self.seed)
        self.rng = self.draw.rng

    def gather(self) -> None:
        """Find cases, and test each."""
        seen: set[object] = set()
        for problem in problems(self.rule, self.draw):
            self.sketches += 1
            graph = problem.graph
            key = (graph.fingerprint, *(graph.type(v) for v in graph.inputs), *problem.opaque.values())
            try:
                cases, refusals = find_cases(self.library, problem)
            except Exception as error:  # a rule may raise anything, and must raise nothing
                if not usable(problem, self.rng):
                    continue
                self.fail(f"it raises {type(error).__name__}: {error}", problem.graph)
                return
            for refused in refusals:
                self.refused[str(refused)] += 1
                if refused.site is not None:
                    kept = self.sites.setdefault(refused.site, [])
                    self.reasons[refused.site] = str(refused)
                    if len(kept) < _KEPT:
                        kept.append(problem)
                    elif self.draw.chance(_KEPT / self.refused[str(refused)]):  # a sample of them all
                        kept[self.draw.integer(0, _KEPT - 1)] = problem
            if cases and key not in seen:
                seen.add(key)
                for case in cases[:2]:
                    self.test(case)
            if self.failures or len(self.cases) >= CASES or self.sketches >= MOST_SKETCHES:
                return

    def test(self, case: Case) -> None:
        try:
            if not self.check(case):
                return
        except Wrong as error:
            self.fail(str(error), case.before)
        except RuleError as error:
            self.fail(str(error), case.before)
        self.cases.append(case)
        self.cover(case)

    def check(self, case: Case) -> bool:
        """All three legs; whether at least one of them said something. Raises Wrong."""
        said = False
        if self.rule.proof == "field":
            found = check_field(case, self.rng)
            if found is not None:
                said = True
                self.trials += found.trials
                self.field_cases += 1
                self.bound = max(self.bound, found.bound)
        try:
            draws = check_floats(case, self.rng, self.rule)
        except NotEvaluable:
            draws = 0
        self.float_draws += draws
        said |= draws > 0
        if self.runtime_cases < _RUNTIME_CASES:
            runtime = check_runtime(case, self.rng)
            if runtime is not None:
                said = True
                self.runtime_cases += 1
                self.bits = max(self.bits, runtime.bits)
        return said

    def cover(self, case: Case) -> None:
        """Note the attributes and ranks of the left side."""
        for node in case.before.nodes():
            for name, value in node.attrs.items():
                self.covered.setdefault(f"{node.op}.{name}", set()).add(repr(value))
            self.covered.setdefault(f"{node.op} rank", set()).add(str(node.types[0].rank))
        sizes = {d for v in case.before.inputs for d in case.before.type(v).shape or () if isinstance(d, int)}
        self.covered.setdefault("sizes", set()).update(map(str, sizes))

    def fail(self, reason: str, graph: Graph) -> None:
        from xrlflow.ir import text

        self.failures.append(f"{reason}\n{text(graph)}")

    def judge(self) -> None:
        """What a proof needs besides cases that pass."""
        if self.failures:
            return
        if len(self.cases) < LEAST_CASES:
            reasons = ", ".join(f"{r} ({n})" for r, n in self.refused.most_common(3))
            self.failures.append(
                f"only {len(self.cases)} cases in {self.sketches} sketches: give it (more) examples; refused: {reasons}"
            )
        elif self.bits > MOST_BITS and self.rule.assumes != "approximate":
            self.failures.append(
                f'a case lost {self.bits:.1f} bits of float32: declare assumes = "approximate"'
            )
        elif self.rule.proof == "field" and not self.field_cases:
            self.failures.append('no case can be evaluated over a field: declare proof = "numeric"')
        elif self.rule.proof == "field" and self.bound >= 1e-12:
            self.failures.append(f"a false rule would pass with probability {self.bound:.1e}")

    # Mutants

    def rejects(self, case: Case) -> bool:
        """Whether a wrong rule's case is found out."""
        try:
            found = check_field(case, self.rng, 0.5) if self.rule.proof == "field" else None
            if found is None:
                check_floats(case, self.rng, self.rule)
        except Wrong:
            return True
        except NotEvaluable:
            return False
        return False

    def targets(self) -> tuple[int, list[str]]:
        """Mutants of the target: how many, and which survive."""
        found: dict[Mutation, None] = {}
        chosen = self.cases[:: max(1, len(self.cases) // _MUTANT_CASES)]
        for case in chosen:
            recorder = RecordingBuilder(case.before)
            applied(case.problem, case.match, recorder)
            found.update(dict.fromkeys(recorder.mutations))
        count, survivors = 0, []
        others = [c for c in self.cases if c not in chosen]
        for mutation in found:
            effective, rejected = 0, False
            for case in (*chosen, *others):  # few survive the first
                builder = MutatingBuilder(case.before, mutation)
                try:
                    mutant = applied(case.problem, case.match, builder)
                except Exception:  # the mutant's nodes do not even fit together
                    effective, rejected = effective + 1, True
                    break
                if not builder.reached or (mutant is not None and _same(mutant, case)):
                    continue
                effective += 1
                if mutant is None:
                    rejected = False
                    continue
                rejected = self.rejects(mutant)
                if rejected:
                    break
            if effective:
                count += 1
                if not rejected:
                    survivors.append(f"{mutation}: computes the same in {effective} cases")
        return count, survivors

    def conditions(self) -> tuple[int, list[str], list[str]]:
        """Mutants without one `require`: how many, which survive, and which make no difference."""
        count, survivors, redundant = 0, [], []
        for site, kept in self.sites.items():
            admitted, rejected = 0, False
            with without(site):
                for problem in kept:
                    try:
                        cases, _ = find_cases(self.library, problem)
                    except Exception:  # it needs what the condition says, if the graph means anything
                        if not usable(problem, self.rng):
                            continue
                        admitted, rejected = admitted + 1, True
                        break
                    for case in cases:
                        admitted += 1
                        rejected |= self.rejects(case)
                    if rejected:
                        break
            line = f"drop the condition of line {site[1]}: {self.reasons[site]}"
            if not admitted:
                redundant.append(line)
                continue
            count += 1
            if not rejected:
                survivors.append(f"{line}: right in {admitted} cases without it")
        return count, survivors, redundant

    def certificate(self) -> Certificate:
        begin = time.perf_counter()
        self.gather()
        self.judge()
        mutants, survivors, redundant = 0, list[str](), list[str]()
        if not self.failures:
            targets, survived = self.targets()
            dropped, kept, redundant = self.conditions()
            mutants, survivors = targets + dropped, survived + kept
        return Certificate(
            name=self.rule.name,
            proof=self.rule.proof,
            sketches=self.sketches,
            admitted=len(self.cases),
            refused=dict(self.refused.most_common()),
            trials=self.trials,
            field_cases=self.field_cases,
            bound=self.bound if self.rule.proof == "field" else 1.0,
            float_draws=self.float_draws,
            runtime_cases=self.runtime_cases,
            bits=self.bits if math.isfinite(self.bits) else None,
            mutants=mutants,
            mutants_rejected=mutants - len(survivors),
            survivors=tuple(survivors),
            redundant=tuple(redundant),
            covered={k: len(v) for k, v in sorted(self.covered.items())},
            failures=tuple(self.failures),
            seconds=time.perf_counter() - begin,
        )


def prove(rule: AnyRule, seed: int = 0) -> Certificate:
    """Prove a rule, or show where it is wrong. The same seed gives the same certificate."""
    return _Proof(rule, seed).certificate()


def prove_all(rules: Iterable[AnyRule], seed: int = 0) -> Iterator[Certificate]:
    """Certificates of rules, one after the other."""
    for rule in rules:
        yield prove(rule, seed)


def prove_in_processes(rules: Sequence[AnyRule], seed: int, jobs: int) -> Iterator[Certificate]:
    """Certificates of rules, as they are found, by several processes."""
    context = multiprocessing.get_context("spawn")  # a fork would copy the runtime's threads
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = [pool.submit(prove, rule, seed) for rule in rules]
        for done in as_completed(waiting):
            yield done.result()


def library_of(rule: AnyRule) -> Library:
    """A library of one rule, whatever it assumes and writes."""
    assuming = () if rule.assumes is None else (rule.assumes,)
    return Library([rule], backend=rule.backend, assuming=assuming, contrib=True)


def problems(rule: AnyRule, draw: Draw) -> Iterator[Problem]:
    """Graphs around the left side of a rule, without end."""
    for sketch in sketches(rule, draw):
        if isinstance(sketch, Problem):
            yield sketch
            continue
        try:
            yield build(sketch)
        except Unbuildable:
            continue


def sketches(rule: AnyRule, draw: Draw) -> Iterator[Sketch | Problem]:
    """Sketches around the left side of a rule, without end."""
    examples: list[Sketch] = []
    for text in rule.examples:
        graph = load(parse(text)).graph
        sketch = sketch_of(graph)
        if not sketch.varied:
            yield Problem(graph, {}, sketch)
            continue
        yield sketch
        examples.append(sketch)
    patterns = trace_patterns(rule) if isinstance(rule, Rule) else []
    if not patterns and not examples:
        return
    misses = 0
    while misses < 20 * MOST_SKETCHES:
        misses += 1
        if patterns and not (examples and draw.chance(0.3)):
            try:
                sketch = draw_pattern(rule, patterns, draw)  # type: ignore[arg-type]
            except Unlucky:
                continue
            varied = draw.chance(0.25)
        else:
            sketch, varied = draw.choice(examples), True
            for _ in range(draw.integer(0, 2)):
                sketch = resize(sketch, draw)
        yield vary(sketch, draw) if varied and draw.chance(0.8) else sketch


def parse(text: str) -> onnx.ModelProto:
    """A model from ONNX's text form of a graph."""
    proto: onnx.ModelProto = onnx.parser.parse_model(
        f'<ir_version: {IR_VERSION}, opset_import: ["" : {OPSET}, "com.microsoft" : 1]>\n{text}'
    )
    return proto


def _same(mutant: Case, case: Case) -> bool:
    return mutant.after.fingerprint == case.after.fingerprint
