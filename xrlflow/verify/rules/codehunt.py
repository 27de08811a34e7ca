"""The hunt for mutants of a rule's code: which of them a proof finds out, and how.

A rule is proven once, and the graphs that the proof has tried are kept, with what came of each. A mutant is asked
about the same graphs: it is *wrong* if something that it does in one of them does not compute the same, it *raises*, it
*loops*, it *loses* a graph in which the rule applies, or it applies where the rule finds no use in it (*useless*:
`worthwhile` refuses). What does none of that survives: it does the same in all graphs, or other things that are right.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from types import FrameType, FunctionType
from typing import Any, Literal

import numpy as np

from xrlflow.ops.evaluate import NotEvaluable
from xrlflow.rewrite import AnyRule, Library, Refused
from xrlflow.verify.rules.cases import (
    Case,
    Wrong,
    check_field,
    check_floats,
    check_runtime,
    find_cases,
    usable,
    whole_types,
)
from xrlflow.verify.rules.code import CodeMutant, Compiled, functions_of, mutants_of, put
from xrlflow.verify.rules.proof import Proof, different, library_of
from xrlflow.verify.rules.sketch import Problem

Verdict = Literal["wrong", "raises", "loops", "loses", "useless", "same", "right"]
KILLED: tuple[Verdict, ...] = ("wrong", "raises", "loops", "loses", "useless")

# Graphs that a mutant is asked about, besides those in which the rule applies or a condition refuses: of those that
# another reason refuses, and of those that are not the rule's left side.
_REFUSED, _BESIDE = 120, 160
# Graphs near those in which a survivor does something else, and how many of these are looked at closely.
_NEAR, _CLOSELY = 120, 12
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


class _TooLong(BaseException):  # no handler of what a rule raises may take it
    pass


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises _TooLong after so many seconds (in the main thread of a process, where there are signals)."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@dataclass(frozen=True, slots=True)
class _Known:
    """A graph, what the rule makes of it, and whether it was refused as useless, or by a condition."""

    problem: Problem
    outcome: tuple[int, ...]
    useless: bool


class CodeHunt:
    """A rule with the graphs that its proof has tried. Raises ValueError for a rule that is wrong by itself."""

    def __init__(self, rule: AnyRule, seed: int = 0) -> None:
        self.rule = rule
        proof = Proof(rule, seed)
        proof.gather()
        if proof.failures:
            raise ValueError(f"{rule.name} is not proven: {proof.failures[0]}")
        self.proof = proof
        self.rng = np.random.default_rng(seed)
        self.corpus = [*self._corpus(proof)]

    def _corpus(self, proof: Proof) -> Iterator[_Known]:
        first = [c.problem for c in proof.cases]
        first += [p for kept in proof.sites.values() for p in kept]
        library, refused, beside = library_of(self.rule), 0, 0
        for n, problem in enumerate(different([*first, *proof.tried])):
            try:
                cases, refusals = find_cases(library, problem)
            except Exception:  # the rule raises where the graph means nothing
                continue
            if n >= len(first):
                refused += bool(refusals) and not cases
                beside += not refusals and not cases
                if not cases and (refused > _REFUSED if refusals else beside > _BESIDE):
                    continue
            useless = bool(refusals) and all(r.site is None for r in refusals)
            yield _Known(problem, _outcome(cases), useless)

    @property
    def functions(self) -> Mapping[str, FunctionType]:
        return functions_of(self.rule)

    def judge(self, function: FunctionType, compiled: Compiled) -> Found:
        """What becomes of one mutant."""
        others: list[Problem] = []

        def found(verdict: Verdict) -> Found:
            return Found(compiled.mutant, verdict, len(others), self.rule.name)

        with put(function, compiled.code):
            try:
                library = library_of(self.rule)
            except Exception:  # its source is no pattern any more
                return found("raises")
            for known in self.corpus:
                verdict = self._asked(library, known, others)
                if verdict is not None:
                    return found(verdict)
                if len(others) >= _CLOSELY:
                    break
            if others:
                for problem in islice(self._near(others), _NEAR):
                    verdict = self._asked_anew(library, problem)
                    if verdict is not None:
                        return found(verdict)
        return found("right" if others else "same")

    def _near(self, problems: Sequence[Problem]) -> Iterator[Problem]:
        return different(self.proof.around(problems))

    def _asked(self, library: Library, known: _Known, others: list[Problem]) -> Verdict | None:
        """What a mutant does with a graph; None if nothing can be said against it."""
        try:
            with _limited(_LONGEST):
                cases, _ = find_cases(library, known.problem)
        except _TooLong:
            return "loops"
        except Exception:  # whatever the mutant raises
            return "raises" if known.outcome or usable(known.problem, self.rng) else None
        outcome = _outcome(cases)
        if outcome == known.outcome:
            return None
        new = [c for c in cases if c.after.fingerprint not in known.outcome]
        if any(map(self._is_wrong, new)):
            return "wrong"
        if len(outcome) < len(known.outcome):
            return "loses"
        if known.useless:
            return "useless"
        others.append(known.problem)
        return None

    def _asked_anew(self, library: Library, problem: Problem) -> Verdict | None:
        try:
            with _limited(_LONGEST):
                cases, _ = find_cases(library, problem)
        except _TooLong:
            return "loops"
        except Exception:
            return "raises" if usable(problem, self.rng) else None
        return "wrong" if any(map(self._is_wrong, cases)) else None

    def _is_wrong(self, case: Case) -> bool:
        try:
            if self.rule.proof == "field":
                check_field(case, self.rng, 0.5)
            check_floats(case, self.rng, self.rule)
            if whole_types(case):
                check_runtime(case, self.rng, wide=True)
        except Wrong:
            return True
        except (NotEvaluable, Refused):
            return False
        return False


def _outcome(cases: Sequence[Case]) -> tuple[int, ...]:
    return tuple(sorted(c.after.fingerprint for c in cases))


__all__ = ["KILLED", "CodeHunt", "Found", "mutants_of"]
