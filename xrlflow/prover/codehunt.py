"""The hunt for mutants of a rule's code: which of them are found out, and how.

The graphs that the rule's proof tries are kept, and others that are given, with what the rule makes of each and with
the lines of its code that are run for that. A mutant is asked about those that come to what is changed. It is
*wrong* if something that it does in one of them does not compute the same; it *raises*; it *loops*; it *loses* a
graph in which the rule applies; it applies where the rule finds no use in it (*useless*: `profitable` refuses); what
it makes has more operators or elements than what the rule makes (*costlier*); or a test of the rule fails (*tested*,
by `bench/mutants.py`). Where it does the same in all of them, further graphs are drawn near them. What does none of
that survives: it does the same in all graphs, or other things that are right.
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
from xrlflow.prover.code import CodeMutant, Compiled, forget, functions_of, mutants_of, places_of, put
from xrlflow.prover.draw import Draw
from xrlflow.prover.growth import grown
from xrlflow.prover.proof import Proof, different, in_turn, library_of
from xrlflow.prover.reached import Line, lines_run
from xrlflow.prover.sketch import Problem, sketch_of
from xrlflow.prover.variations import at_limit
from xrlflow.rewrite import AnyRule, Library, Refused
from xrlflow.rewrite.state import match_all

Verdict = Literal["wrong", "raises", "loops", "loses", "useless", "costlier", "tested", "same", "right"]
KILLED: tuple[Verdict, ...] = ("wrong", "raises", "loops", "loses", "useless", "costlier", "tested")

# Graphs near those in which a survivor does something else, and how many of these are looked at closely.
_NEAR, _CLOSELY = 60, 12
# Graphs that are drawn near those that come to some lines, how many are wanted, and near how many they are drawn.
_DRAWN, _WANTED, _GIVEN = 400, 150, 24
# In ONNX Runtime, too, so many of the cases are run in which a mutant does something else.
_RUN = 3
# Graphs that are drawn to come to what none has come to; of those that come to the same lines how many are drawn from.
_EXPLORED, _ALIKE = 900, 4
# Of all draws every so many-th is near each graph that came to something new.
_OFTEN = 20
# A mutant is put into its place for so many graphs that are drawn.
_AT_ONCE = 40
# Of a rule so many cases are tested before its code is mutated.
_TESTED = 8
# A mutant that takes longer, in seconds, for one graph loops.
_LONGEST = 5.0


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a mutant of code: `cases` in which it does something else, and is right; `rule`: by which it was
    found out, or the last that was asked."""

    mutant: CodeMutant
    verdict: Verdict
    cases: int
    rule: str

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


class TooLong(BaseException):  # no handler of what a rule raises may take it
    pass


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TooLong after so many seconds (in the main thread of a process, where there are signals)."""

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
    """How many operators run, and how many elements they write (symbols taken for 7)."""

    operators: int
    elements: int

    def exceeds(self, other: Cost) -> bool:
        """Whether there is more of one, and no less of the other."""
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
class _Known:
    """A graph, and what the rule makes of it: the results, the matches where nothing says why it does not apply, and
    whether it was refused as useless, or by a condition. `cost`: of all results together. `lines`: those of its code
    that were run."""

    problem: Problem
    outcome: tuple[int, ...]
    plain: tuple[Any, ...]
    useless: bool
    cost: Cost
    lines: frozenset[Line]

    def reaches(self, lines: Iterable[Line]) -> bool:
        return not self.lines.isdisjoint(lines)


@dataclass(slots=True)
class _Pool:
    """Graphs that come to some lines, as they are drawn, in chunks."""

    source: Iterator[Sequence[_Known]]
    known: list[Sequence[_Known]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Sequence[_Known]]:
        turn = 0
        while turn < len(self.known) or self._more():
            yield self.known[turn]
            turn += 1

    def _more(self) -> bool:
        found = next(self.source, None)
        if found is not None:
            self.known.append(found)
        return found is not None


@dataclass(slots=True)
class _Gathered(Proof):
    """The graphs of a proof, of which the first few cases are tested."""

    def check(self, case: Case) -> bool:
        return len(self.cases) >= _TESTED or Proof.check(self, case)


class CodeHunt:
    """A rule with the graphs that its proof tries, and `given` ones. Raises ValueError for a rule that is found to be
    wrong by itself (which is looked for in the first cases only)."""

    def __init__(self, rule: AnyRule, seed: int = 0, given: Iterable[Graph] = ()) -> None:
        self.rule, self.seed = rule, seed
        self.grows = False  # whether some results of the rule cost more than what was there
        self.home = type(rule).__module__.partition(".")[0]
        proof = _Gathered(rule, seed)
        proof.gather()
        if proof.failures:
            raise ValueError(f"{rule.name} is not proven: {proof.failures[0]}")
        self.proof = proof
        self.rng = np.random.default_rng(seed)
        with lines_run(self.home) as lines:
            self._library()
        self.at_first = frozenset(lines)
        problems = [c.problem for c in proof.cases]
        problems += [p for kept in proof.sites.values() for p in kept]
        problems += proof.tried
        problems += [Problem(g, {}, sketch_of(g)) for g in given]
        self.corpus = [k for p in different(problems) if (k := self._known(p)) is not None]
        self.corpus += self._explored()
        self.pools: dict[frozenset[Line], _Pool] = {}

    def _explored(self) -> Iterator[_Known]:
        """Graphs that come to places to which none of those that are known comes, found from step to step."""
        places = {p for f in functions_of(self.rule).values() for p in places_of(f)}
        open_ = {
            p for p in places if self.at_first.isdisjoint(p) and not any(k.reaches(p) for k in self.corpus)
        }
        seen = {line for k in self.corpus for line in k.lines}
        own = {line for p in places for line in p}
        draw = Draw(digest(self.rule.name) ^ self.seed)
        self.proof.draw.rng = draw.rng
        # Of those that come to the same lines the first few.
        count = Counter[frozenset[Line]]()
        seeds = []
        for each in self.corpus:
            lines = each.lines & own
            count[lines] += 1
            if lines and count[lines] <= _ALIKE and each.problem.sketch.varied:
                seeds.append(each.problem)
        near = in_turn(self.proof.drawn_near(seeds), grown(seeds, draw))
        for problem in islice(near, _EXPLORED):
            if not open_:
                break
            known = self._known(problem)
            if known is None or (known.lines & own) <= seen:
                continue
            seen |= known.lines
            open_ = {p for p in open_ if not known.reaches(p)}
            seeds += [problem] * (1 + len(seeds) // _OFTEN)  # what is new is drawn from more often
            yield known

    def _known(self, problem: Problem) -> _Known | None:
        """What the rule makes of a graph; None if it raises, as it may where the graph means nothing."""
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
        return _Known(problem, _outcome(cases), plain, useless, _cost_of_all(cases), frozenset(lines))

    def _library(self) -> Library:
        """A library of one's own, of a rule of one's own: both remember what conditions say."""
        return library_of(anew(self.rule))

    @property
    def functions(self) -> Mapping[str, FunctionType]:
        return functions_of(self.rule)

    def reaching(self, compiled: Compiled) -> Sequence[_Known]:
        """The graphs that come to what a mutant changes."""
        lines = compiled.lines
        if not self.at_first.isdisjoint(lines):
            return self.corpus
        return [k for k in self.corpus if k.reaches(lines)]

    def judge(self, function: FunctionType, compiled: Compiled, further: bool = True) -> Found:
        """What becomes of one mutant; `further`: whether graphs are drawn besides those that are known."""
        reaching = self.reaching(compiled)
        others: list[Problem] = []
        verdict = self._asked_all(function, compiled, [reaching], others)
        if verdict is None and further and reaching:
            drawn: list[Problem] = []
            verdict = self._asked_all(function, compiled, self._pool(compiled, reaching), drawn)
            others += drawn
        if verdict is None and further and others:
            near = filter(None, map(self._known, islice(different(self.proof.around(others)), _NEAR)))
            verdict = self._asked_all(function, compiled, _chunks(near), [])
        return Found(compiled.mutant, verdict or ("right" if others else "same"), len(others), self.rule.name)

    def _asked_all(
        self,
        function: FunctionType,
        compiled: Compiled,
        chunks: Iterable[Sequence[_Known]],
        others: list[Problem],
    ) -> Verdict | None:
        """What can be said against a mutant by some graphs, which are drawn while it is not in its place.

        Those in which it does other things are added to `others`; the results in the first of them are compared.
        """
        for chunk in chunks:
            with put(function, compiled.code):
                try:
                    library = self._library()
                except Exception:  # its source is no pattern any more
                    return "raises"
                for each in chunk:
                    verdict = self._asked(library, each, others)
                    if verdict is not None:
                        return verdict
        return None

    def _pool(self, compiled: Compiled, reaching: Sequence[_Known]) -> Iterable[Sequence[_Known]]:
        """Graphs near those that come to what is changed, the same whoever asks and when."""
        lines = compiled.lines
        if lines not in self.pools:
            self.pools[lines] = _Pool(_chunks(self._drawn(lines, compiled.numbers, reaching)))
        return self.pools[lines]

    def _drawn(
        self, lines: frozenset[Line], numbers: Iterable[int], reaching: Sequence[_Known]
    ) -> Iterator[_Known]:
        draw = Draw(digest(f"{self.rule.name} {sorted(line for _, line in lines)}") ^ self.seed)
        self.proof.draw.rng = draw.rng  # whatever was drawn before
        step = max(1, len(reaching) // _GIVEN)
        given = [k.problem for k in reaching[::step] if k.problem.sketch.varied][:_GIVEN]
        limits = chain.from_iterable(
            at_limit(p.sketch, abs(n), draw)
            for n in sorted(numbers)
            if 0 < abs(n) <= LARGEST
            for p in given[::6]
        )
        at_limits = filter(None, map(self.proof.source.built, limits))
        found = in_turn(self.proof.around(given), grown(given, draw), at_limits)
        drawn = (self._known(p) for p in different(islice(found, _DRAWN)))
        everywhere = not self.at_first.isdisjoint(lines)
        return islice((k for k in drawn if k is not None and (everywhere or k.reaches(lines))), _WANTED)

    def _asked(self, library: Library, known: _Known, others: list[Problem]) -> Verdict | None:
        """What a mutant does with a graph; None if nothing can be said against it."""
        problem = known.problem
        try:
            with limited(_LONGEST):
                cases, _ = find_cases(library, problem)
                plain = _plain(library, problem)
        except TooLong:
            return "loops"
        except Exception:  # whatever the mutant raises
            return "raises" if known.outcome or usable(problem, self.rng) else None
        outcome = _outcome(cases)
        if outcome == known.outcome and plain == known.plain:
            return None
        new = [c for c in cases if c.after.fingerprint not in known.outcome]
        new = new if len(others) < _CLOSELY else []
        if any(self._is_wrong(c, len(others) < _RUN) for c in new):
            return "wrong"
        if len(outcome) < len(known.outcome) or len(plain) < len(known.plain):
            return "loses"
        if known.useless and outcome != known.outcome:
            return "useless"
        if len(cases) == len(known.outcome):
            costlier = _cost_of_all(cases).exceeds(known.cost)
        else:
            before = cost_of(problem.graph)
            costlier = not self.grows and any(cost_of(c.after).exceeds(before) for c in new)
        if costlier:
            return "costlier"
        others.append(problem)
        return None

    def _is_wrong(self, case: Case, run: bool) -> bool:
        try:
            if self.rule.proof == "field":
                check_field(case, self.rng, 0.5)
            check_floats(case, self.rng, self.rule)
            whole = bool(whole_types(case))
            if whole or (run and _is_static(case)):
                check_runtime(case, self.rng, wide=whole)
        except Wrong:
            return True
        except (NotEvaluable, Refused):
            return False
        return False


def anew(rule: AnyRule) -> AnyRule:
    """A rule that remembers nothing; the rule itself if it is not made without arguments."""
    kind = type(rule)
    if kind.__init__ is object.__init__ or inspect.signature(kind).parameters:
        return rule
    return kind()


def _chunks(known: Iterable[_Known]) -> Iterator[Sequence[_Known]]:
    source = iter(known)
    while chunk := list(islice(source, _AT_ONCE)):
        yield chunk


def _is_static(case: Case) -> bool:
    """Whether all sizes are known, and none is 0: there some of ONNX Runtime's kernels end the process."""
    types = [t for g in (case.before, case.after) for n in g.nodes() for t in n.types]
    types += [case.problem.type(v) for v in case.before.inputs]
    return all(t.is_static and 0 not in (t.shape or ()) for t in types)


def _outcome(cases: Sequence[Case]) -> tuple[int, ...]:
    return tuple(sorted(c.after.fingerprint for c in cases))


def _plain(library: Library, problem: Problem) -> tuple[Any, ...]:
    """The matches as a search finds them: what seems hopeless is not looked at."""
    return tuple(sorted(m.key for m in match_all(problem.graph, library)))


__all__ = ["KILLED", "CodeHunt", "Found", "mutants_of"]
