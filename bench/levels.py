"""Which mutants of central modules each level of tests kills: `python bench/levels.py [--each N] [--seed S]`.

A mutant changes one comparison, number or operator of one function (`xrlflow.prover.code`). In each module N functions
are drawn, and one mutant of each. Files are in out/levels; what is there is not done again.

1. All tests run once, with probes: which test runs the statement of which mutant, and for how long (`hits-*.jsonl`).
2. Each mutant runs the tests of `make check` that reach it, then those that `make test` adds, then those that `make
   test-all` adds, until one fails (`kills-*.jsonl`). Of each level the tests that reach the fewest mutants come first,
   for as long as `SECONDS` says, by the durations of step 1.

A mutant that tests see only in a process that they start is not killed here: the code is changed in the test's process.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the checkout

from xrlflow.prover.code import Compiled, forget, mutants_of, put
from xrlflow.prover.thresholds import codes, function_of

MODULES = (
    "xrlflow.ir.dims",
    "xrlflow.rewrite.state",
    "xrlflow.rewrite.rule",
    "xrlflow.ops.work",
    "xrlflow.onnxio.importer",
    "xrlflow.prover.proof",
    "xrlflow.verify.compare",
    "xrlflow.search.select",
    "xrlflow.pipeline.kernels",
    "xrlflow.backends.tvm.kernels.direct",
)
LEVELS = ("check", "test", "test-all")
LONG = ("proof", "corpus", "process", "measures", "learns", "cluster")
SECONDS = {"check": 20.0, "test": 30.0, "test-all": 60.0}
Row = dict[str, Any]
Mutants = list[tuple[FunctionType, Compiled]]


# Mutants


def functions(module: str) -> Iterator[FunctionType]:
    """The functions and methods that a module defines, in the order of their lines."""
    there = vars(importlib.import_module(module)).values()
    values = [v for value in there for v in (vars(value).values() if isinstance(value, type) else (value,))]
    own = {f for v in values if (f := function_of(v)) and f.__module__ == module}
    yield from sorted(own, key=lambda f: (f.__code__.co_firstlineno, f.__qualname__))


def sample(each: int, seed: int) -> Mutants:
    """One mutant in each of at most `each` functions of each module."""
    draws, mutants = random.Random(seed), []
    for module in MODULES:
        able = [(function, found) for function in functions(module) if (found := list(mutants_of(function)))]
        for function, choices in draws.sample(able, min(each, len(able))):
            mutants.append((function, draws.choice(choices)))
    return mutants


def probed(function: FunctionType, line: int, number: int) -> CodeType:
    """The function's code with a call of `__probe__(number)` before the statement that has this line."""
    code = function.__code__
    tree = ast.parse(Path(code.co_filename).read_text())
    inside = [
        (node, name, i)
        for node in ast.walk(tree)
        for name, body in ast.iter_fields(node)
        if isinstance(body, list)
        for i, statement in enumerate(body)
        if isinstance(statement, ast.stmt) and statement.lineno <= line <= (statement.end_lineno or 0)
    ]
    node, name, i = inside[-1]
    (call,) = ast.parse(f"__probe__({number})").body
    for part in ast.walk(call):
        ast.copy_location(part, getattr(node, name)[i])
    getattr(node, name).insert(i, call)
    compiled = compile(tree, code.co_filename, "exec")
    same = (code.co_name, code.co_firstlineno)
    return next(c for c in codes(compiled) if (c.co_name, c.co_firstlineno) == same)


# The plugin of pytest, which a run gets with `-p bench.levels`


def _level(item: pytest.Item) -> str:
    names = {mark.name for mark in item.iter_markers()}
    if "whole" in names:
        return "test-all"
    return "check" if "quick" in names or names.isdisjoint(LONG) else "test"


class Probes:
    """Run tests with probes; write what each test reached, for how long it ran, and whether it failed."""

    def __init__(self, folder: Path, plan: Row, mutants: Mutants) -> None:
        self._folder, self._plan, self._mutants = folder, plan, mutants
        self._reached: set[int] = set()
        self._failed = False

    def pytest_collection_finish(self) -> None:
        builtins.__probe__ = self._reached.add  # type: ignore[attr-defined]
        for number, (function, mutant) in enumerate(self._mutants):
            function.__code__ = probed(function, min(n for _, n in mutant.lines), number)
        forget("xrlflow")
        forget("rewrite_rules")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._reached.clear()
        self._failed = False
        begin = time.perf_counter()
        done = yield
        row = {
            "test": item.nodeid,
            "level": _level(item),
            "reached": sorted(self._reached),
            "seconds": time.perf_counter() - begin,
            "failed": self._failed,
        }
        with (self._folder / f"{self._plan['name']}-{os.getpid()}.jsonl").open("a") as out:
            out.write(json.dumps(row) + "\n")
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed


class Alone:
    """Run each task, a mutant (or none) and tests, in a fork of the process that has collected all tests."""

    def __init__(self, folder: Path, plan: Row, mutants: Mutants) -> None:
        self._folder, self._plan, self._mutants = folder, plan, mutants

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for task in self._plan["tasks"]:
            tests = [items[test] for test in task["tests"]]
            before, after = os.pipe()
            if (child := os.fork()) == 0:
                os.setpgid(0, 0)
                os.close(before)
                os.write(after, self._killer(session, task["mutant"], tests).encode())
                os._exit(0)
            os.close(after)
            by = _within(before, child, task["limit"])
            with (self._folder / f"{self._plan['name']}-{os.getpid()}.jsonl").open("a") as out:
                out.write(json.dumps({"mutant": task["mutant"], "tests": task["tests"], "by": by}) + "\n")
        return True

    def _killer(self, session: pytest.Session, number: int | None, tests: list[pytest.Item]) -> str:
        """The test that fails with a mutant, as far as one does."""
        with ExitStack() as stack:
            if number is not None:
                function, mutant = self._mutants[number]
                stack.enter_context(put(function, mutant.code))
                forget("rewrite_rules")
            for item, following in zip(tests, [*tests[1:], None], strict=True):
                if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
                    session._setupstate.teardown_exact(None)
                    return item.nodeid
        return "-"


def _within(pipe: int, child: int, limit: float) -> str | None:
    """What a child writes in `limit` seconds: None if it ended without a word, "time" if it was ended."""
    signal.setitimer(signal.ITIMER_REAL, limit)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    begin = time.monotonic()
    with os.fdopen(pipe) as reader:
        word = reader.read()
    signal.setitimer(signal.ITIMER_REAL, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also what it has started
    os.waitpid(child, 0)
    return word or ("time" if time.monotonic() - begin >= limit else None)


def pytest_configure(config: pytest.Config) -> None:
    plan = json.loads(Path(os.environ["XRLFLOW_LEVELS"]).read_text())
    mutants = sample(plan["each"], plan["seed"])
    folder = Path(os.environ["XRLFLOW_LEVELS"]).parent
    if "tasks" in plan:
        config.pluginmanager.register(Alone(folder, plan, mutants))
    elif hasattr(config, "workerinput"):
        config.pluginmanager.register(Probes(folder, plan, mutants))


# The driver


def _run(folder: Path, plan: Row, *arguments: str) -> list[Row]:
    """Run pytest with a plan, unless its rows are there. Returns the rows that it wrote."""
    path = folder / f"{plan['name']}.json"
    if not path.exists():
        path.write_text(json.dumps(plan))
        variables = {**os.environ, "XRLFLOW_LEVELS": str(path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "pytest", "-p", "bench.levels", "-q", *arguments]
        with (folder / f"{plan['name']}.log").open("w") as log:
            subprocess.run(command, cwd=ROOT, env=variables, stdout=log, stderr=log)
    files = sorted(folder.glob(f"{plan['name']}-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _alone(folder: Path, plan: Row, tasks: list[Row], jobs: int) -> list[Row]:
    """Run tasks in `jobs` processes at once."""
    plans = [{**plan, "name": f"{plan['name']}{n}", "tasks": tasks[n::jobs]} for n in range(jobs)]
    files = [sorted({t.partition("::")[0] for k in p["tasks"] for t in k["tests"]}) for p in plans]
    with ThreadPoolExecutor(jobs) as pool:
        return [
            row for rows in pool.map(lambda p, f: _run(folder, p, "-n0", *f), plans, files) for row in rows
        ]


def _specific(tests: Iterable[Row]) -> Iterator[str]:
    """For each level the tests that reach the fewest mutants, the fastest first, as long as its time goes."""
    for name, limit in SECONDS.items():
        own = [row for row in tests if row["level"] == name]
        spent = 0.0
        for row in sorted(own, key=lambda row: (len(row["reached"]), row["seconds"])):
            if spent and spent + row["seconds"] > limit:
                continue
            spent += row["seconds"]
            yield row["test"]


def measure(folder: Path, each: int, seed: int, jobs: int) -> None:
    """Do both steps, as far as their files are not there, and print the report."""
    plan: Row = {"each": each, "seed": seed}
    rows = _run(folder, {**plan, "name": "hits"}, "-n", str(jobs), "--dist", "worksteal")
    sound = [row for row in rows if not row["failed"]]
    reaching = {n: [row for row in sound if n in row["reached"]] for n in range(len(sample(each, seed)))}
    level = {row["test"]: row["level"] for row in rows}
    limit = 60 + 10 * sum(SECONDS.values())
    tasks = [
        {"mutant": n, "tests": list(_specific(tests)), "limit": limit}
        for n, tests in reaching.items()
        if tests
    ]
    # A mutant with which tests hang, or that ends the process, is killed by the first level that reaches it.
    kills = _alone(folder, {**plan, "name": "kills"}, tasks, jobs)
    killed = {
        row["mutant"]: level.get(row["by"], level[row["tests"][0]]) for row in kills if row["by"] != "-"
    }
    report(sample(each, seed), reaching, killed)


def report(mutants: Mutants, reaching: dict[int, list[Row]], killed: dict[int, str]) -> None:
    """Print a table by modules, and each mutant that `make test` does not kill."""
    print("| module | mutants | reached | " + " | ".join(LEVELS) + " |\n|---|---:|---:|---:|---:|---:|")
    for module in (*MODULES, "all"):
        own = [n for n, (_, m) in enumerate(mutants) if module in (m.mutant.module, "all")]
        by = [sum(LEVELS.index(killed[n]) <= i for n in own if n in killed) for i in range(len(LEVELS))]
        shares = " | ".join(f"{b} ({100 * b / len(own):.1f}%)" for b in by)
        print(f"| {module} | {len(own)} | {sum(bool(reaching[n]) for n in own)} | {shares} |")
    for n, (_, compiled) in enumerate(mutants):
        if killed.get(n) not in ("check", "test"):
            print(f"{killed.get(n, 'survives' if reaching[n] else 'not reached')}: {compiled.mutant}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--each", type=int, default=30, help="functions of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "levels")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    measure(options.out.resolve(), options.each, options.seed, options.jobs)


if __name__ == "__main__":
    main()
