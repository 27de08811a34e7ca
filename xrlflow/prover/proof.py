"""Proofs of rules.

For each rule, sketches (small graphs) of its left side are drawn from its `shapes` or `examples`, and so are variations
of these sketches. Sketches that the rule's conditions admit become cases. Every case must pass three tests:

1. Both sides agree over prime fields, in so many trials that a false rule would pass with a probability below 1e-12
   (rules with `proof = "field"`).
2. Both sides agree over float64, also with NaN and infinities, and for numeric rules at extreme magnitudes.
3. Both sides agree in ONNX Runtime in float32 without its optimisations.

Sketches are drawn until every kind of attribute, index, size, rank and type that the declaration leaves open has been
tried (`coverage`) and every `require` of the rule has refused a sketch. Then the same tests must reject mutants of the
rule (`mutation_testing`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import onnx
import onnx.parser

from xrlflow.backends.onnxruntime.saturation import saturates
from xrlflow.ir import FLOATS, DType, Graph, digest, text
from xrlflow.ir.dims import LARGEST
from xrlflow.onnxio import load
from xrlflow.ops.evaluate import NotEvaluable
from xrlflow.ops.schema import IR_VERSION, OPSET
from xrlflow.prover.cases import (
    Case,
    Wrong,
    check_field,
    check_floats,
    check_runtime,
    find_cases,
    large,
    symbols,
    too_large,
    usable,
    whole_types,
)
from xrlflow.prover.coverage import Coverage, example_kinds, grant, matched, own_conditions
from xrlflow.prover.draw import Draw, T
from xrlflow.prover.equivalence_classes import DegenerateSample, Kind, UndefinedExpression
from xrlflow.prover.errors import check_errors
from xrlflow.prover.mutation_testing import Hunt, HuntResult, Survivor
from xrlflow.prover.patterns import dimension_of, draw_pattern, pattern_kinds
from xrlflow.prover.ranges import at_sizes, check_ranges, converted
from xrlflow.prover.rounding import check_rounding
from xrlflow.prover.sketch import Problem, Sketch, Unbuildable, build, sketch_of
from xrlflow.prover.thresholds import integers_in_code, limits, watch
from xrlflow.prover.variations import (
    at_limit,
    at_number,
    neighbours,
    numbers_of,
    of_sizes,
    resize,
    square,
    vary,
)
from xrlflow.rewrite import AnyRule, Library, Refused, Rule, RuleError
from xrlflow.rewrite.pattern import Pattern, trace_patterns
from xrlflow.rewrite.rule import Contradiction, Site
from xrlflow.rewrite.state import match_all
from xrlflow.workers import WorkerFactory, WorkerPool

# The greatest number of sketches of a proof, the number of cases at which drawing stops, and the least number of cases.
MOST_SKETCHES, CASES, LEAST_CASES = 1200, 60, 8
_RUNTIME_CASES = 8
# How many further cases run in ONNX Runtime for each integer type, with integers of its full range.
_RUNTIME_OF_TYPE = 4
# How many refused problems are stored for each `require`; how many sketches are drawn to make each `require` refuse;
# and how many sketches are drawn for mutants that survive the cases.
_MOST_STORED, _MISSES, _FURTHER = 24, 600, 300
# How many cases or refused graphs are searched for at most, near those where a surviving mutant makes a difference.
_MOST_NEAR = 300
# For so many refused graphs of each condition, and for so many admitted graphs, variants with numbers and sizes near
# limits are tried.
_AT_LIMITS = 3
# How many of these variants may have large tensors.
_LARGE = 8
# How many of these variants are tried: half with the numbers that the rule compares with, half with numbers of its
# cases.
_AROUND_LIMITS = 600
# How many graphs are tried with sizes beyond the range of narrow types.
_AT_RANGES = 96
# Limits around which numbers and sizes are always tried, because a rule may compute a limit that is no literal in its
# code.
_ALWAYS_TRIED = (100, LARGEST - 1)
# How many bits of float32 a case may lose, and how many times a case that seems to lose more is run again.
MOST_BITS, _RUNS = 2.0, 16


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate of a rule: what its proof tried and found."""

    name: str
    proof: str
    sketches: int  # graphs (sketches) that were tried
    admitted: int  # cases among them
    refused: dict[str, int]  # number of near misses by reason
    unreached: tuple[str, ...]  # conditions of the rule that refused no graph
    trials: int  # number of evaluations over a prime field
    field_cases: int
    bound: float  # the greatest probability, over the cases, that a wrong rule passes (1 for numeric rules)
    float_draws: int
    runtime_cases: int
    bits: float | None  # the most bits of float32 that a case lost; None: not run
    lost: float  # the greatest ratio of the right side's rounding error to the left side's
    mutants: int
    mutants_rejected: int
    mutants_by_kind: dict[str, tuple[int, int]]  # by kind: number of mutants rejected, number of all mutants
    survivors: tuple[Survivor, ...]  # mutants that passed, and why they are right
    redundant: tuple[str, ...]  # conditions that can be dropped because another one refuses
    # For each attribute, index, dimension, rank and type the verdict on each kind: admitted; refused (by a condition);
    # beside (no graph of the kind matched the left side); untested; meaningless (no value of the kind fits the shapes);
    # unbuilt (no operator took such values).
    covered: dict[str, dict[str, str]]
    failures: tuple[str, ...]
    seconds: float

    @property
    def proven(self) -> bool:
        return not self.failures

    @property
    def unexplained(self) -> tuple[Survivor, ...]:
        """Mutants that passed without an explanation."""
        return tuple(s for s in self.survivors if not s.why)

    def to_json(self) -> dict[str, Any]:
        return {"proven": self.proven, **asdict(self), "seconds": round(self.seconds, 3)}


@dataclass(slots=True)
class Proof:
    """A proof while it runs."""

    rule: AnyRule
    seed: int
    library: Library = field(init=False)
    draw: Draw = field(init=False)
    rng: np.random.Generator = field(init=False)
    # The generator for later tests. They do not use `rng`, so that adding a test does not change what the other tests
    # draw.
    own_rng: np.random.Generator = field(init=False)
    source: Source = field(init=False)
    coverage: Coverage = field(init=False)
    keys: set[object] = field(default_factory=set)
    bases: list[Base] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    sites: dict[Site, list[Problem]] = field(default_factory=dict)
    reasons: dict[Site, str] = field(default_factory=dict)
    conditions: Mapping[Site, str] = field(init=False)
    failures: list[str] = field(default_factory=list)
    sketches: int = 0
    trials: int = 0
    field_cases: int = 0
    bound: float = 0.0
    float_draws: int = 0
    runtime_cases: int = 0
    bits: float = -float("inf")
    lost: float = 1.0
    large: int = 0
    at_their_limits: bool = False
    ranged: list[Case] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    runtime_cases_of_type: Counter[DType] = field(default_factory=Counter)
    in_runtime: bool = True

    def __post_init__(self) -> None:
        self.library = library_of(self.rule)
        # On this processor the rule's assumption (`vnni`) may be false; then its cases are not run in ONNX Runtime.
        self.in_runtime = self.rule.assumes != "vnni" or not saturates()
        self.draw = Draw(digest(self.rule.name) ^ self.seed)
        self.rng, self.own_rng = self.draw.rng, np.random.default_rng(digest(self.rule.name) ^ self.seed)
        self.source = Source.of(self.rule, self.draw)
        self.coverage = Coverage.of(self.source.kinds)
        self.conditions = own_conditions(self.rule)

    def gather(self) -> None:
        """Find cases and test them: random ones first, then cases for kinds not settled, unreached conditions and
        limits.
        """
        for problem in self.source.problems():
            self.take(problem)
            if self.failures or len(self.cases) >= CASES or self.sketches >= MOST_SKETCHES:
                break
        for kind in self.coverage.open:
            tally = self.coverage.tallies[kind]
            while not tally.settled and not self.failures:
                turn, tally.attempts = tally.attempts, tally.attempts + 1
                try:
                    wished = self.source.problem(kind, self.bases, turn)
                except UndefinedExpression:
                    tally.meaningless += 1
                    continue
                if wished is not None:
                    self.take(wished)
        bases = [sketch for sketch, _ in self.source.examples or self.bases[:_MOST_STORED]]
        for problem in chain(self.neighbours(bases), self.directed(_MISSES)):
            if self.failures or not self.unreached:
                break
            self.take(problem)
        tested, self.at_their_limits = len(self.cases), True
        for problem in islice(different(self.at_limits()), _AROUND_LIMITS):
            if self.failures:
                break
            self.take(problem, always=len(self.cases) < tested + CASES)
        self.at_ranges()

    def at_ranges(self) -> None:
        """If some cases convert integers to a narrower type, test graphs with sizes beyond the range of that type."""
        kinds: dict[object, list[Case]] = {}
        for case in self.cases:
            if types := converted(case):
                kinds.setdefault((types, bool(symbols(case.problem))), []).append(case)
        selected = [c for alike in kinds.values() for c in alike[:_AT_LIMITS]]
        draw = Draw(self.seed)
        for problem in islice(in_turn(*(at_sizes(c, draw) for c in selected)), _AT_RANGES):
            cases, refusals = self.matches(problem)
            self.refused.update(map(str, refusals))
            for case in cases[:1] if not self.failures else ():
                try:
                    if check_ranges(case, self.own_rng, self.rule):
                        self.ranged.append(case)
                except (Wrong, RuleError) as error:
                    self.fail(str(error), case.before)

    def at_limits(self) -> Iterator[Problem]:
        """Graphs with numbers and sizes near limits: those that the rule's conditions compare with, and those of
        admitted cases.
        """
        near_misses = [p for refused in self.sites.values() for p in refused[:_AT_LIMITS] if p.sketch.varied]
        bases = [s for s, _ in (*self.source.examples, *self.bases[:_AT_LIMITS])]
        with watch() as notes:
            for problem in [*near_misses, *self.source.fixed, *(p for _, p in self.bases[:_AT_LIMITS])]:
                self.matches(problem, conditions_only=True)
        numbers = limits(integers_in_code(self.rule) | set(notes))
        bases += [p.sketch for p in near_misses]
        sources = [at_number(s, n, attributes=False) for s in bases for n in _ALWAYS_TRIED]
        sources += [at_limit(s, n, self.draw) for s in bases for n in numbers]
        yield from islice(filter(None, map(self.source.built, in_turn(*sources))), _AROUND_LIMITS // 2)
        numbers_seen = set[int]()
        for case in reversed(self.cases):  # cases whose numbers are the rule's come first
            sketch = case.problem.sketch
            for number in limits(numbers_of(sketch)) if sketch.varied else ():
                if number not in numbers_seen:
                    yield from filter(None, map(self.source.built, of_sizes(sketch, number, self.draw)))
                numbers_seen.add(number)

    def directed(self, count: int) -> Iterator[Problem]:
        """At most `count` graphs near the left side. Every second graph is drawn to show a kind; the kinds take
        turns.
        """
        kinds = list(self.coverage.tallies)
        for i in range(count):
            turn, number = divmod(i // 2, len(kinds) or 1)
            wish = kinds[number] if kinds and i % 2 else None
            try:
                problem = self.source.problem(wish, self.bases, turn)
            except UndefinedExpression:
                continue
            if problem is not None:
                yield problem

    def neighbours(self, sketches: Iterable[Sketch]) -> Iterator[Problem]:
        """The graphs that differ from one of the sketches in one detail (`variations.neighbours`), from each sketch in
        turn.
        """
        return filter(None, map(self.source.built, in_turn(*map(neighbours, sketches))))

    def around(self, problems: Sequence[Problem]) -> Iterator[Problem]:
        """Graphs that differ a little from one of `problems` or of the examples.

        They differ in one number, show another kind, or differ at random. `problems` may grow during the iteration.
        """
        bases = [s for s, _ in self.source.examples or self.bases[:_MOST_STORED]]
        sketches = [p.sketch for p in problems[:_MOST_STORED] if p.sketch.varied]
        return in_turn(
            self.neighbours(bases),
            self.neighbours(sketches),
            self.drawn_near(problems),
            self.of_kinds(problems),
        )

    def drawn_near(self, problems: Sequence[Problem]) -> Iterator[Problem]:
        for _ in range(_MISSES if problems else 0):
            sketch = self.draw.choice(problems).sketch
            if sketch.varied and (problem := self.source.near(sketch)) is not None:
                yield problem

    def of_kinds(self, problems: Sequence[Problem]) -> Iterator[Problem]:
        """Graphs for each kind in turn, made from one of `problems` or from a drawn graph."""
        kinds = list(self.coverage.tallies)
        for i in range(_MISSES if kinds and problems else 0):
            turn, number = divmod(i, len(kinds))
            base = self.draw.choice(problems)
            # A problem read from a file lacks the types of each node's inputs (`arguments`). Examples have them as
            # sketches.
            own = turn % 2 == 0 and bool(base.arguments) and base.sketch.varied and not base.sketch.hidden
            try:
                problem = self.source.problem(
                    kinds[number], [(base.sketch, base)] if own else self.bases, 1 if own else turn // 2
                )
            except UndefinedExpression:
                continue
            if problem is not None:
                yield problem

    def take(self, problem: Problem, always: bool = False) -> None:
        """Find the cases in a graph. Test them if there are too few cases, if they show a new kind, or if `always`."""
        self.sketches += 1
        self.problems.append(problem)
        kinds = self.coverage.shown_by(problem)
        try:
            cases, refusals = find_cases(self.library, problem)
        except Exception as error:  # a rule must not raise anything here
            broken = isinstance(error, Contradiction) and too_large(problem)
            if broken or usable(problem, self.rng):
                self.fail(f"it raises {type(error).__name__}: {error}", problem.graph)
            return
        for refused in refusals:
            self.refused[str(refused)] += 1
            if refused.site is not None:
                sample = self.sites.setdefault(refused.site, [])
                self.reasons[refused.site] = str(refused)
                if len(sample) < _MOST_STORED:
                    sample.append(problem)
                elif self.draw.chance(_MOST_STORED / self.refused[str(refused)]):  # keep a random sample
                    at = self.draw.integer(0, _MOST_STORED - 1)
                    if sample[at] not in self.source.fixed:  # near misses that the rule declares stay
                        sample[at] = problem
        if not cases:
            self.coverage.count(kinds, "refused" if refusals else "beside")
            return
        key = key_of(problem)
        new = key not in self.keys
        self.keys.add(key)
        more, dims = matched(cases[0])
        kinds |= more & self.coverage.tallies.keys()
        if always and large(problem):
            self.large += 1
            always = self.large <= _LARGE
        if new and (always or len(self.cases) < CASES or self.coverage.new(kinds)):
            tested = [self.test(case) for case in cases[:2]]
            if any(tested):
                self.coverage.count(kinds, "admitted")
                if problem.arguments and not problem.sketch.hidden:
                    self.bases.append((replace(problem.sketch, dims=dims), problem))
            elif usable(problem, self.rng):
                self.coverage.count(kinds, "untested")

    def test(self, case: Case) -> bool:
        """Test a case and record a failure. Returns whether it could be tested."""
        try:
            if not self.check(case):
                return False
        except (Wrong, RuleError) as error:
            self.fail(str(error), case.before)
        self.cases.append(case)
        return True

    def check(self, case: Case) -> bool:
        """Run all three tests. Returns whether at least one gave a result. Raises Wrong, RuleError."""
        tested = False
        if self.rule.proof == "field":
            result = check_field(case, self.rng)
            if result is not None:
                tested = True
                self.trials += result.trials
                self.field_cases += 1
                if not self.at_their_limits:  # large sizes give degrees so great that the bound says nothing
                    self.bound = max(self.bound, result.bound)
        try:
            draws = check_floats(case, self.rng, self.rule)
        except NotEvaluable:
            draws = 0
        self.float_draws += draws
        tested |= draws > 0
        if self.rule.assumes != "approximate" and len(self.cases) < CASES:
            factor = check_rounding(case, self.own_rng, self.rule, len(self.cases))
            self.lost = max(self.lost, factor or 1.0)
        check_errors(case, self.own_rng, self.rule)
        tested |= check_ranges(case, self.own_rng, self.rule)
        types = whole_types(case)
        wide = any(self.runtime_cases_of_type[t] < _RUNTIME_OF_TYPE for t in types)
        if self.in_runtime and (self.runtime_cases < _RUNTIME_CASES or wide):
            runtime = check_runtime(case, self.rng, wide)
            if runtime is not None:
                tested = True
                self.runtime_cases += 1
                self.runtime_cases_of_type.update(types)
                for _ in range(_RUNS if runtime.bits > MOST_BITS else 0):
                    if (again := check_runtime(case, self.rng)) is not None:
                        runtime = runtime.joined(again)
                self.bits = max(self.bits, runtime.bits)
        return tested

    def fail(self, reason: str, graph: Graph) -> None:
        self.failures.append(f"{reason}\n{text(graph)}")

    @property
    def unreached(self) -> tuple[str, ...]:
        return tuple(reason for site, reason in self.conditions.items() if site not in self.sites)

    def judge(self) -> None:
        """Check what a proof needs besides cases that pass. What is missing is recorded as a failure."""
        if self.failures:
            return
        if len(self.cases) < LEAST_CASES:
            reasons = ", ".join(f"{r} ({n})" for r, n in self.refused.most_common(3))
            self.failures.append(
                f"only {len(self.cases)} cases in {self.sketches} sketches: give it (more) examples; refused: {reasons}"
            )
            return
        if self.bits > MOST_BITS and self.rule.assumes != "approximate":
            self.failures.append(
                f'a case lost {self.bits:.1f} bits of float32: declare assumes = "approximate"'
            )
        if self.rule.proof == "field" and not self.field_cases:
            self.failures.append('no case can be evaluated over a field: declare proof = "numeric"')
        elif self.rule.proof == "field" and self.bound >= 1e-12:
            self.failures.append(f"a false rule would pass with probability {self.bound:.1e}")
        if untested := self.coverage.with_verdict("untested"):
            self.failures.append(f"admitted, but never tested: {'; '.join(map(str, untested))}")
        unbuilt = [k for k in self.coverage.with_verdict("unbuilt") if k.subject not in ("rank", "type")]
        if unbuilt and isinstance(self.rule, Rule):
            self.failures.append(f"never tried: {'; '.join(map(str, unbuilt))}")
        if unreached := self.unreached:
            self.failures.append(
                f"it has never been refused that {'; '.join(unreached)}: name a near miss, or drop the condition"
            )

    def further_cases(self) -> list[Case]:
        """More cases, for mutants of the target that pass the first ones."""
        cases = list(self.ranged)
        for problem in self.directed(_FURTHER):
            cases += self.matches(problem)[0][:1]
            if len(cases) >= len(self.ranged) + CASES:
                break
        return cases

    def cases_near(self, cases: Sequence[Case]) -> Iterator[Case]:
        """More cases, whose graphs differ a little from that of one of `cases`."""
        problems = different(self.around([c.problem for c in cases]))
        cases_of = (self.matches(p)[0][:1] for p in problems)
        return islice(chain.from_iterable(cases_of), _MOST_NEAR)

    def further_refused(self, site: Site) -> Iterator[Problem]:
        """More graphs that a condition refuses: graphs near each refused one in turn, then others."""
        sketches = [p.sketch for p in self.sites[site] if p.sketch.varied]
        varied = filter(None, map(self.source.near, islice(cycle(sketches), _FURTHER)))
        return islice(self.refused_by(site, chain(varied, self.directed(_FURTHER))), CASES)

    def refused_near(self, site: Site, problems: Sequence[Problem]) -> Iterator[Problem]:
        """More graphs that a condition refuses and that differ a little from one of `problems`.

        `problems` may grow during the iteration; the search then continues near the new ones, too.
        """
        return islice(self.refused_by(site, different(self.around(problems))), _MOST_NEAR)

    def refused_by(self, site: Site, problems: Iterable[Problem]) -> Iterator[Problem]:
        return (p for p in problems if any(r.site == site for r in self.matches(p)[1]))

    def matches(self, problem: Problem, conditions_only: bool = False) -> tuple[list[Case], list[Refused]]:
        try:
            if conditions_only:
                match_all(problem.graph, self.library)
                return [], []
            return find_cases(self.library, problem)
        except Exception:  # the rule may raise if the graph is meaningless
            return [], []

    def certificate(self) -> Certificate:
        begin = time.perf_counter()
        self.gather()
        self.judge()
        hunt = HuntResult({}, (), ())
        if not self.failures:
            hunt = Hunt(self.rule, self.library, self.rng, self.cases, self.sites, self.reasons, self).run()
        return Certificate(
            name=self.rule.name,
            proof=self.rule.proof,
            sketches=self.sketches,
            admitted=len(self.cases),
            refused=dict(self.refused.most_common()),
            unreached=self.unreached,
            trials=self.trials,
            field_cases=self.field_cases,
            bound=self.bound if self.rule.proof == "field" else 1.0,
            float_draws=self.float_draws,
            runtime_cases=self.runtime_cases,
            bits=self.bits if math.isfinite(self.bits) else None,
            lost=self.lost,
            mutants=hunt.mutants,
            mutants_rejected=hunt.mutants - len(hunt.survivors),
            mutants_by_kind=hunt.by_kind,
            survivors=hunt.survivors,
            redundant=hunt.redundant,
            covered=self.coverage.summary(),
            failures=tuple(self.failures),
            seconds=time.perf_counter() - begin,
        )


def prove(rule: AnyRule, seed: int = 0) -> Certificate:
    """Try to prove a rule. The certificate says whether the proof succeeded, or where the rule is wrong. The same seed
    gives the same certificate.
    """
    return Proof(rule, seed).certificate()


def prove_all(rules: Iterable[AnyRule], seed: int = 0) -> Iterator[Certificate]:
    """The certificates of rules, in the order of the rules."""
    for rule in rules:
        yield prove(rule, seed)


class Prover:
    """Proves rules in a worker. Each rule is passed itself, or by its name among the rules that `load` returns."""

    def __init__(self, seed: int, load: Callable[[], Iterable[AnyRule]] | None = None) -> None:
        self._named = {} if load is None else {rule.name: rule for rule in load()}
        self._seed = seed

    def do(self, order: AnyRule | str) -> Certificate:
        return prove(self._named[order] if isinstance(order, str) else order, self._seed)


def prove_by(
    place: WorkerFactory,
    rules: Sequence[AnyRule],
    seed: int,
    workers: int,
    load: Callable[[], Iterable[AnyRule]] | None = None,
) -> Iterator[Certificate]:
    """The certificates of rules, in the order in which their proofs finish in workers on the machines of `place`.

    `load` loads the rules in a worker. It is needed for rules that cannot be pickled, because their module is a file.
    Raises WorkerError if a worker fails.
    """
    orders = iter(rules) if load is None else (rule.name for rule in rules)
    with WorkerPool(place, partial(Prover, seed, load), workers, "prover") as crew:
        for _, certificate in crew.work(orders):
            yield certificate


def library_of(rule: AnyRule) -> Library:
    """A library of this rule alone, which allows its assumption and its contrib operators."""
    assuming = () if rule.assumes is None else (rule.assumes,)
    return Library([rule], backend=rule.backend, assuming=assuming, contrib=True)


# A sketch and the problem (graph with types) that it builds.
Base = tuple[Sketch, Problem]


@dataclass(slots=True)
class Source:
    """Draws graphs near a rule's left side, from its patterns and its examples (sketches and what they build).

    `fixed`: the examples as graphs read from text. Examples with bodies are only here, because they cannot be varied.
    """

    rule: AnyRule
    draw: Draw
    patterns: list[Pattern]
    examples: list[Base]
    fixed: list[Problem]

    @classmethod
    def of(cls, rule: AnyRule, draw: Draw) -> Source:
        examples: list[Base] = []
        fixed: list[Problem] = []
        for example in (*rule.examples, *rule.near_misses):
            graph = load(parse(example)).graph
            sketch = sketch_of(graph)
            fixed.append(Problem(graph, {}, sketch))
            if sketch.varied:
                examples.append((sketch, build(sketch)))
        patterns = trace_patterns(rule) if isinstance(rule, Rule) else []
        return cls(rule, draw, patterns, examples, fixed)

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that a proof must try."""
        return pattern_kinds(self.patterns) if self.patterns else example_kinds([s for s, _ in self.examples])

    def problems(self) -> Iterator[Problem]:
        """The examples, then drawn graphs, practically without end. Without patterns and examples none are drawn."""
        yield from self.fixed
        yield from (problem for _, problem in self.examples)
        misses = 0
        while (self.patterns or self.examples) and misses < 20 * MOST_SKETCHES:
            problem = self.problem()
            misses += 1
            if problem is not None:
                yield problem

    def problem(self, wish: Kind | None = None, bases: Sequence[Base] = (), turn: int = 0) -> Problem | None:
        """Draw a graph near the left side; None if the draw fails.

        The graph should show the kind `wish`. In every second `turn` it is one of `bases`, changed to show that kind.
        Raises UndefinedExpression if the shapes have no value of the kind.
        """
        try:
            if wish is not None and (dim := dimension_of(wish)) is not None:
                bases = [base for base in bases if dim in base[0].dims]
            if wish is not None and wish.subject == "type":
                bases = [b for b in bases if any(t.dtype in FLOATS for t in b[0].inputs)] or bases
            if wish is not None and bases and turn % 2:
                return build(self._granted(*self.draw.choice(bases), wish))
            return build(self._sketch(wish, turn // 2))
        except UndefinedExpression:
            raise
        except (DegenerateSample, Unbuildable):
            return None

    def near(self, sketch: Sketch) -> Problem | None:
        """Draw a graph that differs a little from a sketch; None if the draw fails."""
        return self.built((resize if self.draw.chance(0.5) else vary)(sketch, self.draw))

    def built(self, sketch: Sketch) -> Problem | None:
        """The problem that a sketch builds; None if it cannot be built."""
        try:
            return build(sketch)
        except Unbuildable:
            return None

    def _granted(self, sketch: Sketch, problem: Problem, wish: Kind) -> Sketch:
        chance = self.draw.rng.random()
        if chance < 0.5:
            change = resize if chance < 0.3 else square
            sketch = change(sketch, self.draw)
            problem = build(sketch)
        return grant(sketch, problem, wish, self.draw)

    def _sketch(self, wish: Kind | None, turn: int) -> Sketch:
        draw = self.draw
        if not self.patterns and not self.examples:
            raise DegenerateSample("there is nothing to vary")
        # Examples do not name their dimensions, so the kind of a dimension cannot be wished for.
        drawn_only = not self.examples or (wish is not None and dimension_of(wish) is not None)
        if self.patterns and (drawn_only or not draw.chance(0.3)):
            sketch = draw_pattern(self.rule, self.patterns, draw, wish, turn)  # type: ignore[arg-type]
            if wish is not None:
                special = wish.subject == "size" and wish.name not in ("0", "1")
                return grant(sketch, build(sketch), wish, draw) if special else sketch
            varied = draw.chance(0.25)
        else:
            sketch, problem = draw.choice(self.examples)
            if wish is not None:
                return self._granted(sketch, problem, wish)
            varied = True
            for _ in range(draw.integer(0, 2)):
                sketch = resize(sketch, draw)
        return vary(sketch, draw) if varied and draw.chance(0.8) else sketch


def key_of(problem: Problem) -> object:
    """A key of a problem: equal problems have equal keys."""
    graph = problem.graph
    return (graph.fingerprint, *(graph.type(v) for v in graph.inputs), *problem.opaque.values())


def different(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Each problem once."""
    keys = set[object]()
    for problem in problems:
        if (key := key_of(problem)) not in keys:
            keys.add(key)
            yield problem


def in_turn(*sources: Iterator[T]) -> Iterator[T]:
    """The first item of each source, then the second of each, and so on until all sources have ended."""
    remaining = list(sources)
    while remaining:
        for source in tuple(remaining):
            try:
                yield next(source)
            except StopIteration:
                remaining.remove(source)


def parse(graph: str) -> onnx.ModelProto:
    """A model from ONNX's text form of a graph."""
    proto: onnx.ModelProto = onnx.parser.parse_model(
        f'<ir_version: {IR_VERSION}, opset_import: ["" : {OPSET}, "com.microsoft" : 1]>\n{graph}'
    )
    return proto
