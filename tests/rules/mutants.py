"""Mutants of the rules' own code, and what becomes of them. `python bench/mutants.py` tries the whole library.

Each comparison, number, boundary, boolean and sign in the functions of the rules is changed, one at a time, and the
rule is applied again to the graphs of its proof (`xrlflow.prover.codehunt`). A function that several rules call is
tried with a few of them.
"""

from __future__ import annotations

import json
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from rewrite_rules import LIBRARY
from tests.rules.mutant_graphs import INDEX, Claim, claims, graph_of
from tests.rules.results import graphs_of, result_of
from tests.rules.results import known as results
from xrlflow.ir import Graph
from xrlflow.prover.code import Compiled, forget, functions_of, mutants_of, put
from xrlflow.prover.codehunt import KILLED, CodeHunt, CodeHuntResult, TooLong, anew, limited
from xrlflow.prover.proof import library_of
from xrlflow.prover.reached import Line, lines_run
from xrlflow.rewrite import AnyRule, Library

ROOT = Path(__file__).resolve().parents[2]
EXPLAINED = ROOT / "tests" / "rules" / "survivors.json"
# A mutant in a function of many rules is tried with this many of them: first with their known graphs, then with further
# graphs.
_KNOWN, _FURTHER = 24, 3
# The number of rules whose graphs a process remembers.
_HUNTS = 48
# Claims of tests are checked for this many seconds; a test file may become slower by this factor.
_LONGEST, _SLOWER = 60.0, 10.0
# The package whose code is mutated.
_HOME = "rewrite_rules"
# The number of functions that a process gets at a time.
_AT_ONCE = 6
# The bytes of memory that a process may use.
_MEMORY = 6 << 30
# Modules without a test file of their own, and the module whose tests are used.
_TESTED_WITH = {"axes": "transpose", "bodies": "control", "constants": "merge", "elementwise": "reshape"}
Row = dict[str, Any]


def tasks(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Functions, each with the rules that it is tried with. Functions of the same rules are neighbours."""
    callers: dict[str, list[str]] = {}
    for rule in LIBRARY:
        if not names or rule.name in names:
            for function in functions_of(rule):
                callers.setdefault(function, []).append(rule.name)
    return sorted(callers.items(), key=lambda item: (item[1], item[0]))


def pieces(work: Sequence[tuple[str, list[str]]]) -> list[list[tuple[str, list[str]]]]:
    """The tasks in pieces, so that no process has a long one at the end."""
    return [list(work[i : i + _AT_ONCE]) for i in range(0, len(work), _AT_ONCE)]


@lru_cache(maxsize=_HUNTS)
def hunter(name: str, seed: int, folder: Path) -> CodeHunt:
    """The hunt for a rule, with the graphs of a folder that concern it."""
    (rule,) = [r for r in LIBRARY if r.name == name]
    names = json.loads((folder / INDEX).read_text()).get(name, [])
    return CodeHunt(rule, seed, (graph_of(folder, n) for n in names))


def spread(names: Sequence[str], count: int) -> Sequence[str]:
    """`count` of some names, evenly spaced."""
    return names if len(names) <= count else [names[i * len(names) // count] for i in range(count)]


@dataclass(frozen=True, slots=True)
class Judging:
    """How mutants are judged: with the tests' graphs in `folder`; `drawing`: with further graphs; `testing`: by test
    files. Only mutants with `named` in their name are judged."""

    seed: int
    folder: Path
    drawing: bool
    testing: bool
    named: str


def judged(
    function: FunctionType, compiled: Compiled, callers: Sequence[str], plan: Judging
) -> CodeHuntResult:
    """Judge a mutant: by the known graphs of the rules that call it, by the claims of their tests, and, if wanted, by
    test files and by further graphs."""
    seed, folder = plan.seed, plan.folder
    found = None
    for name in spread(callers, _KNOWN):
        last = hunter(name, seed, folder).judge(function, compiled, further=False)
        if last.killed:
            return last
        if found is None or last.cases > found.cases:
            found = last
    assert found is not None
    for name in spread(callers, _KNOWN):
        if not holds(function, compiled, name, folder):
            return replace(found, verdict="tested", rule=name)
    if plan.testing and suite_fails(function, compiled):
        return replace(found, verdict="tested")
    most = sorted(spread(callers, _KNOWN), key=lambda n: -len(hunter(n, seed, folder).reaching(compiled)))
    for name in most[:_FURTHER] if plan.drawing else ():
        last = hunter(name, seed, folder).judge(function, compiled)
        if last.killed:
            return last
        found = max(found, last, key=lambda f: f.cases)
    return found


@lru_cache(maxsize=_HUNTS)
def claimed(name: str, folder: Path) -> Sequence[Claim]:
    """The claims of the tests about a rule that hold without a mutant, with a library of only this rule."""
    rule, library = alone(name)
    return [c for c in claims(folder, name) if c.holds(rule, library)]


@lru_cache(maxsize=_HUNTS)
def made(name: str) -> Sequence[tuple[Graph, str]]:
    """A rule's examples and near misses, with the results of the rule."""
    (rule,) = [r for r in LIBRARY if r.name == name]
    return list(zip(graphs_of(rule), results().get(name, []), strict=True))


def alone(name: str) -> tuple[AnyRule, Library]:
    rule = anew(next(r for r in LIBRARY if r.name == name))
    assuming = () if rule.assumes is None else (rule.assumes,)
    return rule, Library([rule], backend=rule.backend, assuming=assuming, contrib=True, thorough=True)


def holds(function: FunctionType, compiled: Compiled, name: str, folder: Path) -> bool:
    """Whether all claims of the tests about a rule still hold with a mutant."""
    known, pinned = claimed(name, folder), made(name)
    with put(function, compiled.code):
        try:
            rule, library = alone(name)
            with limited(_LONGEST):
                return all(c.holds(rule, library) for c in known) and all(
                    result_of(graph, library_of(anew(rule))) == result for graph, result in pinned
                )
        except (Exception, TooLong):  # a test would fail as well
            return False


class Reaching:
    """A plugin of pytest that notes the lines of rules that each test runs, and its seconds."""

    def __init__(self) -> None:
        self.lines: dict[str, frozenset[Line]] = {}
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        forget(_HOME)  # so that this test also runs what an earlier one has cached
        begin = time.monotonic()
        with lines_run(_HOME) as lines:
            yield
        self.lines[item.nodeid] = frozenset(lines)
        self.seconds[item.nodeid] = time.monotonic() - begin


@lru_cache(maxsize=4)
def reaching(module: str) -> Reaching:
    """The lines that the tests of a module of rules run."""
    name = module.rpartition(".")[2]
    found = Reaching()
    run_tests([str(ROOT / "tests" / "rules" / f"test_{_TESTED_WITH.get(name, name)}.py")], [found])
    return found


def run_tests(which: Sequence[str], plugins: Sequence[object] = ()) -> int:
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        return int(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *which], plugins=[*plugins]))


def suite_fails(function: FunctionType, compiled: Compiled) -> bool:
    """Whether a test that runs a mutant's line fails with the mutant."""
    known = reaching(function.__module__)
    which = [name for name, lines in known.lines.items() if not lines.isdisjoint(compiled.lines)]
    if not which:
        return False
    with put(function, compiled.code):
        try:
            with limited(_LONGEST + _SLOWER * sum(known.seconds[name] for name in which)):
                found = run_tests(which)
        except TooLong:
            return True
    if (
        found == pytest.ExitCode.USAGE_ERROR
    ):  # for instance if a test's parameters are an iterator that is exhausted
        raise ValueError(f"not all of these tests are found again: {', '.join(which)}")
    return found == pytest.ExitCode.TESTS_FAILED


def hunt(
    functions: Sequence[tuple[str, list[str]]], plan: Judging, done: set[str], sample: float
) -> list[Row]:
    """Judge all mutants of some functions that are not done, and return their rows."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))  # a mutant may allocate without limit
    by_key = {k: f for r in LIBRARY for k, f in functions_of(r).items()}
    rows = []
    for key, callers in functions:
        draw = random.Random(f"{key} {plan.seed}")
        for compiled in mutants_of(by_key[key]):
            name = str(compiled.mutant)
            if draw.random() < sample and plan.named in name and name not in done:
                rows.append(judged(by_key[key], compiled, callers, plan).to_json())
    return rows


def names() -> set[str]:
    """The names of all mutants of the present code of the rules."""
    functions = {k: f for r in LIBRARY for k, f in functions_of(r).items()}
    return {str(compiled.mutant) for f in functions.values() for compiled in mutants_of(f)}


def explained() -> Mapping[str, str]:
    """By name, why survivors are not mistakes."""
    reasons: Mapping[str, list[str]] = json.loads(EXPLAINED.read_text())
    return {name: why for why, names in reasons.items() for name in names}


def summary(rows: Iterable[Row]) -> tuple[str, list[Row]]:
    """How many mutants of each kind were killed, and how, in Markdown; and the unexplained survivors."""
    reasons, kinds = explained(), dict[str, Counter[str]]()
    left = []
    for row in rows:
        counts = kinds.setdefault(row["kind"], Counter())
        counts[row["verdict"]] += 1
        if row["verdict"] not in KILLED:
            why = row["name"] in reasons
            counts["explained" if why else "unexplained"] += 1
            if not why:
                left.append(row)
    columns = (*KILLED, "same", "right", "explained")
    lines = [f"| kind | mutants | killed | % | {' | '.join(columns)} |", "|---" * (4 + len(columns)) + "|"]
    total = sum(kinds.values(), Counter())
    for name, counts in [*sorted(kinds.items()), ("total", total)]:
        killed = sum(counts[k] for k in KILLED)
        mutants = killed + counts["same"] + counts["right"]
        shares = [f"{mutants:,}", f"{killed:,}", f"{100 * killed / max(mutants, 1):.1f}"]
        lines.append(f"| {' | '.join([name, *shares, *(f'{counts[c]:,}' for c in columns)])} |")
    return "\n".join(lines), left
