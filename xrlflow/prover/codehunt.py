"""Judges mutants of a rule's code: whether a test rejects each of them, and which.

The graphs that the rule's proof tries, and further graphs from the caller, are stored with the rule's results and the
lines of its code that ran. A mutant is run on the graphs for which the changed lines run. The verdicts:

- wrong: a result of the mutant does not compute the same as the graph;
- raises: the mutant raises an exception;
- loops: it takes too long;
- loses: it does not apply to a graph to which the rule applies;
- useless: it applies where the rule refuses by `profitable`;
- costlier: its results have more operators or elements than the rule's;
- tested: a test of the rule fails (found by `bench/mutants.py`).

If none of these holds, the mutant is run on further graphs, drawn near the stored ones. If none rejects it, it
survives: its results are the *same* as the rule's in all graphs, or some differ and are *right*.
"""

from __future__ import annotations

import inspect
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from math import prod
from types import FrameType, FunctionType
from typing import Any, Literal

import numpy as np

from xrlflow.ir import Graph, digest
from xrlflow.ir.dims import LARGEST
from xrlflow.ops.evaluate import NotEvaluable
from xrlflow.prover.cases import (
    Case,
    Wrong,
    check_field,
    check_floats,
    check_runtime,
    find_cases,
    usable,
    whole_types,
)
from xrlflow.prover.code import CodeMutant, Compiled, forget, functions_of, mutable_lines, mutants_of, put
from xrlflow.prover.draw import Draw
from xrlflow.prover.errors import check_errors
from xrlflow.prover.growth import grown
from xrlflow.prover.proof import Proof, different, in_turn, library_of
from xrlflow.prover.ranges import check_ranges
from xrlflow.prover.reached import Line, lines_run
from xrlflow.prover.sketch import Problem, sketch_of
from xrlflow.prover.variations import at_limit
from xrlflow.rewrite import AnyRule, Library, Refused
from xrlflow.rewrite.state import match_all

Verdict = Literal["wrong", "raises", "loops", "loses", "useless", "costlier", "tested", "same", "right"]
KILLED: tuple[Verdict, ...] = ("wrong", "raises", "loops", "loses", "useless", "costlier", "tested")

# For a survivor whose results differ from the rule's: how many graphs are drawn near those where they differ, and on
# how many of the drawn graphs its results are compared.
_NEIGHBOURS, _NEIGHBOURS_CHECKED = 60, 12
# To get graphs for which given lines run: how many graphs are drawn, at how many such graphs drawing stops, and near
# how many stored graphs (seeds) they are drawn.
_DRAWS, _MOST_REACHING, _SEEDS = 400, 150, 24
# How many of the cases in which a mutant's result differs from the rule's also run in ONNX Runtime.
_RUNTIME_CASES = 3
# How many graphs are drawn to run lines that no stored graph runs, and near how many graphs that run the same lines
# they are drawn.
_EXPLORATIONS, _SEEDS_PER_LINES = 900, 4
# A graph that ran new lines is added to the seeds once, and once more for each so many seeds, so that it is drawn near
# more often.
_SEEDS_PER_COPY = 20
# On so many drawn graphs a mutant runs; then the original code is put back to draw more.
_CHUNK = 40
# The number of cases of a rule that are tested before its code is mutated.
_TESTED_CASES = 8
# If a mutant takes longer than this for one graph, in seconds, its verdict is "loops".
_TIME_LIMIT = 5.0


@dataclass(frozen=True, slots=True)
class CodeHuntResult:
    """The verdict on a mutant of a rule's code."""

    mutant: CodeMutant
    verdict: Verdict
    cases: int  # the number of graphs for which its results differ from the rule's and are right
    rule: str  # the rule whose test rejected it, or the last rule that was tried

    @property
    def killed(self) -> bool:
        return self.verdict in KILLED

    def to_json(self) -> dict[str, Any]:
        return {
            "name": str(self.mutant),
            **asdict(self.mutant),
            "verdict": self.verdict,
            "cases": self.cases,
            "rule": self.rule,
        }


class TooLong(BaseException):  # not an Exception, so that no handler for a rule's exceptions catches it
    pass


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A context that raises TooLong after so many seconds. It uses a signal and works only in the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@dataclass(frozen=True, slots=True)
class Cost:
    """The number of operators that a graph runs, and of elements that they write. A symbolic dimension counts as 7."""

    operators: int
    elements: int

    def exceeds(self, other: Cost) -> bool:
        """Whether one of the two numbers is greater than the other cost's, and neither is less."""
        no_less = self.operators >= other.operators and self.elements >= other.elements
        return no_less and self != other


def cost_of(graph: Graph) -> Cost:
    nodes = [n for n in graph.nodes() if not n.const]
    shapes = [t.shape or () for n in nodes for t in n.types]
    return Cost(len(nodes), sum(prod(d if isinstance(d, int) else 7 for d in s) for s in shapes))


def _cost_of_all(cases: Sequence[Case]) -> Cost:
    costs = [cost_of(c.after) for c in cases]
    return Cost(sum(c.operators for c in costs), sum(c.elements for c in costs))


@dataclass(frozen=True, slots=True)
class _ReferenceRun:
    """A graph and what the rule does with it."""

    problem: Problem
    outcome: tuple[int, ...]  # fingerprints of the results
    plain: tuple[Any, ...]  # keys of the matches that a search finds
    useless: bool  # whether the rule refuses matches in the graph, and only by `profitable`
    cost: Cost  # the sum over all results
    lines: frozenset[Line]  # the lines of the rule's code that ran

    def reaches(self, lines: Iterable[Line]) -> bool:
        return not self.lines.isdisjoint(lines)


@dataclass(slots=True)
class _Pool:
    """Graphs for which given lines run, in chunks that are drawn when they are first asked for, and cached."""

    source: Iterator[Sequence[_ReferenceRun]]
    chunks: list[Sequence[_ReferenceRun]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Sequence[_ReferenceRun]]:
        turn = 0
        while turn < len(self.chunks) or self._more():
            yield self.chunks[turn]
            turn += 1

    def _more(self) -> bool:
        chunk = next(self.source, None)
        if chunk is not None:
            self.chunks.append(chunk)
        return chunk is not None


@dataclass(slots=True)
class _Gathered(Proof):
    """A proof that only gathers graphs and tests the first few cases."""

    def check(self, case: Case) -> bool:
        return len(self.cases) >= _TESTED_CASES or Proof.check(self, case)


class CodeHunt:
    """Judges mutants of a rule's code on the graphs that its proof tries and on further `graphs`.

    Raises ValueError if the unchanged rule fails a test. Only its first cases are tested.
    """

    def __init__(self, rule: AnyRule, seed: int = 0, graphs: Iterable[Graph] = ()) -> None:
        self.rule, self.seed = rule, seed
        self.grows = False  # whether some results of the rule cost more than the graph before
        self.home = type(rule).__module__.partition(".")[0]
        proof = _Gathered(rule, seed)
        proof.gather()
        if proof.failures:
            raise ValueError(f"{rule.name} is not proven: {proof.failures[0]}")
        self.proof = proof
        self.rng = np.random.default_rng(seed)
        forget(self.home)
        with lines_run(self.home) as lines:
            self._library()
        self.at_first = frozenset(lines)
        problems = [c.problem for c in proof.cases]
        problems += [p for refused in proof.sites.values() for p in refused]
        problems += proof.problems
        problems += [Problem(g, {}, sketch_of(g)) for g in graphs]
        self.corpus = [k for p in different(problems) if (k := self._reference(p)) is not None]
        self.corpus += self._explored()
        self.pools: dict[frozenset[Line], _Pool] = {}

    def _explored(self) -> Iterator[_ReferenceRun]:
        """Draw graphs near those of the corpus. Returns those that run expressions which can be mutated and which no
        graph of the corpus runs.
        """
        targets = {p for f in functions_of(self.rule).values() for p in mutable_lines(f)}
        open_ = {
            p for p in targets if self.at_first.isdisjoint(p) and not any(k.reaches(p) for k in self.corpus)
        }
        seen_lines = {line for k in self.corpus for line in k.lines}
        own = {line for p in targets for line in p}
        draw = Draw(digest(self.rule.name) ^ self.seed)
        self.proof.draw.rng = draw.rng
        # Of the graphs that run the same lines keep the first few.
        count = Counter[frozenset[Line]]()
        seeds = []
        for each in self.corpus:
            lines = each.lines & own
            count[lines] += 1
            if lines and count[lines] <= _SEEDS_PER_LINES and each.problem.sketch.varied:
                seeds.append(each.problem)
        candidates = in_turn(self.proof.drawn_near(seeds), grown(seeds, draw))
        for problem in islice(candidates, _EXPLORATIONS):
            if not open_:
                break
            reference = self._reference(problem)
            if reference is None or (reference.lines & own) <= seen_lines:
                continue
            seen_lines |= reference.lines
            open_ = {p for p in open_ if not reference.reaches(p)}
            seeds += [problem] * (1 + len(seeds) // _SEEDS_PER_COPY)
            yield reference

    def _reference(self, problem: Problem) -> _ReferenceRun | None:
        """Run the rule on a graph. Returns None if it raises, as it may for a graph that has no value."""
        forget(self.home)
        try:
            library = self._library()
            with lines_run(self.home) as lines:
                cases, refusals = find_cases(library, problem)
                plain = _plain(library, problem)
        except Exception:
            return None
        useless = bool(refusals) and all(r.site is None for r in refusals)
        before = cost_of(problem.graph)
        self.grows = self.grows or any(cost_of(c.after).exceeds(before) for c in cases)
        return _ReferenceRun(problem, _outcome(cases), plain, useless, _cost_of_all(cases), frozenset(lines))

    def _library(self) -> Library:
        """A fresh library with a fresh rule. Library and rule cache verdicts of conditions, so neither can
        be reused.
        """
        return library_of(anew(self.rule))

    @property
    def functions(self) -> Mapping[str, FunctionType]:
        return functions_of(self.rule)

    def reaching(self, compiled: Compiled) -> Sequence[_ReferenceRun]:
        """The stored graphs for which the changed lines of a mutant run."""
        lines = compiled.lines
        if not self.at_first.isdisjoint(lines):
            return self.corpus
        return [k for k in self.corpus if k.reaches(lines)]

    def judge(self, function: FunctionType, compiled: Compiled, further: bool = True) -> CodeHuntResult:
        """The verdict on one mutant. `further`: whether to draw graphs in addition to the stored ones."""
        reaching = self.reaching(compiled)
        differing: list[Problem] = []
        verdict = self._judge_chunks(function, compiled, [reaching], differing)
        if verdict is None and further and reaching:
            drawn_differing: list[Problem] = []
            verdict = self._judge_chunks(function, compiled, self._pool(compiled, reaching), drawn_differing)
            differing += drawn_differing
        if verdict is None and further and differing:
            neighbours = filter(
                None, map(self._reference, islice(different(self.proof.around(differing)), _NEIGHBOURS))
            )
            verdict = self._judge_chunks(function, compiled, _chunks(neighbours), [])
        verdict = verdict or ("right" if differing else "same")
        return CodeHuntResult(compiled.mutant, verdict, len(differing), self.rule.name)

    def _judge_chunks(
        self,
        function: FunctionType,
        compiled: Compiled,
        chunks: Iterable[Sequence[_ReferenceRun]],
        differing: list[Problem],
    ) -> Verdict | None:
        """The verdict that rejects a mutant on some graphs, or None. While a chunk of graphs is drawn, the original
        code is in place.

        Graphs in which the mutant's results differ from the rule's are added to `differing`. Only for the first of
        these it is tested whether the results are wrong.
        """
        for chunk in chunks:
            with put(function, compiled.code):
                try:
                    library = self._library()
                except Exception:  # the changed source is no longer a valid pattern
                    return "raises"
                for each in chunk:
                    verdict = self._judge_on(library, each, differing)
                    if verdict is not None:
                        return verdict
        return None

    def _pool(
        self, compiled: Compiled, reaching: Sequence[_ReferenceRun]
    ) -> Iterable[Sequence[_ReferenceRun]]:
        """Graphs near those for which the changed lines run. They are the same for every mutant of these lines."""
        lines = compiled.lines
        if lines not in self.pools:
            self.pools[lines] = _Pool(_chunks(self._draw_reaching(lines, compiled.numbers, reaching)))
        return self.pools[lines]

    def _draw_reaching(
        self, lines: frozenset[Line], numbers: Iterable[int], reaching: Sequence[_ReferenceRun]
    ) -> Iterator[_ReferenceRun]:
        draw = Draw(digest(f"{self.rule.name} {sorted(line for _, line in lines)}") ^ self.seed)
        self.proof.draw.rng = draw.rng  # makes the draws independent of earlier draws
        step = max(1, len(reaching) // _SEEDS)
        seeds = [k.problem for k in reaching[::step] if k.problem.sketch.varied][:_SEEDS]
        limits = chain.from_iterable(
            at_limit(p.sketch, abs(n), draw)
            for n in sorted(numbers)
            if 0 < abs(n) <= LARGEST
            for p in seeds[::6]
        )
        at_limits = filter(None, map(self.proof.source.built, limits))
        candidates = in_turn(self.proof.around(seeds), grown(seeds, draw), at_limits)
        references = (self._reference(p) for p in different(islice(candidates, _DRAWS)))
        everywhere = not self.at_first.isdisjoint(lines)
        return islice(
            (k for k in references if k is not None and (everywhere or k.reaches(lines))), _MOST_REACHING
        )

    def _judge_on(
        self, library: Library, reference: _ReferenceRun, differing: list[Problem]
    ) -> Verdict | None:
        """The verdict that rejects a mutant on one graph; None if the graph gives no reason to reject it."""
        problem = reference.problem
        try:
            with limited(_TIME_LIMIT):
                cases, _ = find_cases(library, problem)
                plain = _plain(library, problem)
        except TooLong:
            return "loops"
        except Exception:  # a mutant may raise anything
            return "raises" if reference.outcome or usable(problem, self.rng) else None
        outcome = _outcome(cases)
        if outcome == reference.outcome and plain == reference.plain:
            return None
        new = [c for c in cases if c.after.fingerprint not in reference.outcome]
        new = new if len(differing) < _NEIGHBOURS_CHECKED else []
        if any(self._is_wrong(c, len(differing) < _RUNTIME_CASES) for c in new):
            return "wrong"
        if len(outcome) < len(reference.outcome) or len(plain) < len(reference.plain):
            return "loses"
        if reference.useless and outcome != reference.outcome:
            return "useless"
        if len(cases) == len(reference.outcome):
            costlier = _cost_of_all(cases).exceeds(reference.cost)
        else:
            before = cost_of(problem.graph)
            costlier = not self.grows and any(cost_of(c.after).exceeds(before) for c in new)
        if costlier:
            return "costlier"
        differing.append(problem)
        return None

    def _is_wrong(self, case: Case, run: bool) -> bool:
        try:
            if self.rule.proof == "field":
                check_field(case, self.rng, 0.5)
            check_floats(case, self.rng, self.rule)
            check_ranges(case, self.rng, self.rule)
            check_errors(case, self.rng, self.rule)
            wide = bool(whole_types(case))
            if wide or (run and _is_static(case)):
                check_runtime(case, self.rng, wide=wide)
        except Wrong:
            return True
        except (NotEvaluable, Refused):
            return False
        return False


def anew(rule: AnyRule) -> AnyRule:
    """A new instance of a rule, with empty caches; the rule itself if its class has arguments or no `__init__`."""
    kind = type(rule)
    if kind.__init__ is object.__init__ or inspect.signature(kind).parameters:
        return rule
    return kind()


def _chunks(references: Iterable[_ReferenceRun]) -> Iterator[Sequence[_ReferenceRun]]:
    source = iter(references)
    while chunk := list(islice(source, _CHUNK)):
        yield chunk


def _is_static(case: Case) -> bool:
    """Whether all dimensions are numbers and none is 0. With a dimension of 0 some kernels of ONNX Runtime end the
    process.
    """
    types = [t for g in (case.before, case.after) for n in g.nodes() for t in n.types]
    types += [case.problem.type(v) for v in case.before.inputs]
    return all(t.is_static and 0 not in (t.shape or ()) for t in types)


def _outcome(cases: Sequence[Case]) -> tuple[int, ...]:
    return tuple(sorted(c.after.fingerprint for c in cases))


def _plain(library: Library, problem: Problem) -> tuple[Any, ...]:
    """The keys of the matches that a search finds. Where the types alone refuse a match, a search does not try it."""
    return tuple(sorted(m.key for m in match_all(problem.graph, library)))


__all__ = ["KILLED", "CodeHunt", "CodeHuntResult", "mutants_of"]
