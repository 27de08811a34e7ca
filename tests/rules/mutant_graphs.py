"""Graphs for `bench/mutants.py`: those that the tests of the rules load, and the examples of all rules.

As a plugin of pytest (`-p tests.rules.mutant_graphs`) it keeps every small model that a test loads.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import onnx

from rewrite_rules import LIBRARY
from xrlflow.ir import Graph
from xrlflow.onnxio import ModelError, load
from xrlflow.prover.code import forget
from xrlflow.prover.reached import Line, lines_run
from xrlflow.prover.thresholds import function_of
from xrlflow.rewrite import AnyRule, Library, Refused, RegionRule, RewriteState, Rule, RuleError
from xrlflow.rewrite.state import build_edit, match_all

ROOT = Path(__file__).resolve().parents[2]
INDEX, CLAIMS = "index.json", "claims.jsonl"
_FOLDER = "XRLFLOW_MUTANT_GRAPHS"
# Larger models are left out: nodes, and bytes.
_NODES, _BYTES = 80, 1 << 18
# Random walks: they start from every _EVERY-th graph with at most _SMALL nodes; their number and length. The results of
# this many matches are compared.
_EVERY, _SMALL, _WALKS, _STEPS, _MATCHES = 2, 24, 2, 3, 12


def _kept(folder: Path, model: onnx.ModelProto) -> str | None:
    """The name of the file that keeps a model; None if it is too large."""
    data = model.SerializeToString(deterministic=True)
    if len(model.graph.node) > _NODES or len(data) > _BYTES:
        return None
    name = f"{hashlib.sha256(data).hexdigest()[:24]}.onnx"
    (folder / name).write_bytes(data)
    return name


def pytest_configure() -> None:
    """Make `xrlflow.onnxio.load` keep its models, and the harness its claims."""
    from tests.rules import harness
    from xrlflow import onnxio

    folder = Path(os.environ[_FOLDER])
    load_, applies, refuses = onnxio.load, harness.applies, harness.refuses

    def loaded(model: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(model, onnx.ModelProto):
            _kept(folder, model)
        return load_(model, *arguments, **named)

    def claimed(rule: AnyRule, proto: onnx.ModelProto, **claim: Any) -> None:
        if (name := _kept(folder, proto)) is not None and rule.name in {r.name for r in LIBRARY}:
            with (folder / CLAIMS).open("a") as file:
                file.write(json.dumps({"rule": rule.name, "graph": name, **claim}) + "\n")

    def applied(rule: AnyRule, proto: Any, *, pick: int = 0, ops: list[str] | None = None) -> Graph:
        found = applies(rule, proto, pick=pick, ops=ops)
        claimed(rule, proto, pick=pick, ops=ops)
        return found

    def refused(rule: AnyRule, proto: Any, reason: str | None = None) -> None:
        refuses(rule, proto, reason)
        claimed(rule, proto, refused=True, reason=reason)

    onnxio.load, harness.applies, harness.refuses = loaded, applied, refused


@dataclass(frozen=True, slots=True)
class Claim:
    """What a test claims about a rule and a graph: it applies and leaves these operators, or it refuses."""

    graph: Graph
    refused: bool = False
    reason: str | None = None
    pick: int = 0
    ops: tuple[str, ...] | None = None

    def holds(self, rule: AnyRule, library: Library) -> bool:
        """Check the claim as `tests/rules/harness.py` does. `library` has only this rule."""
        library.stats[rule.name].refused.clear()
        state = RewriteState.start(self.graph, library)
        candidates = sorted(state.candidates, key=lambda m: m.key)
        if self.refused:
            reasons = library.stats[rule.name].refused
            return not candidates and (self.reason is None or any(self.reason in r for r in reasons))
        if self.pick >= len(candidates):
            return False
        graph = state.apply(candidates[self.pick]).graph
        graph.topological()
        found = sorted(n.op for n in graph.nodes() if not n.const)
        return self.ops is None or found == sorted(self.ops)


def claims(folder: Path, name: str) -> list[Claim]:
    """The claims of the tests about a rule."""
    found = []
    for line in (folder / CLAIMS).read_text().splitlines():
        row = json.loads(line)
        if row.pop("rule") == name:
            ops = row.pop("ops", None)
            graph = load(onnx.load(str(folder / row.pop("graph")))).graph
            found.append(Claim(graph, ops=None if ops is None else tuple(ops), **row))
    return found


def harvest(folder: Path) -> None:
    """Run the tests of the rules, except their proofs, and keep the models that they load in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tests = [str(p) for p in sorted((ROOT / "tests" / "rules").glob("test_*.py")) if p.stem != "test_proofs"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "tests.rules.mutant_graphs", *tests],
        cwd=ROOT,
        env={**os.environ, _FOLDER: str(folder), "PYTHONPATH": str(ROOT)},
        check=True,
    )


def graphs(folder: Path) -> Iterator[tuple[str, Graph]]:
    """The kept graphs, by file name, without invalid models."""
    for path in sorted(folder.glob("*.onnx")):
        try:
            yield path.name, load(onnx.load(str(path))).graph
        except ModelError:  # tests of invalid models
            continue


def index(folder: Path) -> Mapping[str, list[str]]:
    """Rule -> names of the graphs for which the rule's own code runs, beyond its pattern."""
    owners: dict[tuple[str, int], list[str]] = {}
    for rule in LIBRARY:
        for kind in type(rule).__mro__:
            if kind not in Rule.__mro__ and kind not in RegionRule.__mro__:
                for function in filter(None, map(function_of, vars(kind).values())):
                    code = function.__code__
                    if code.co_name not in ("source", "__init__"):
                        for _, _, line in code.co_lines():
                            if line is not None and line > code.co_firstlineno:
                                owners.setdefault((code.co_filename, line), []).append(rule.name)
    backends = sorted({str(r.backend) for r in LIBRARY if r.backend is not None})
    libraries = [
        Library(
            LIBRARY,
            backend=b,
            contrib=True,
            assuming=("finite", "memory", "vnni", "approximate"),
            thorough=True,
        )
        for b in backends
    ]
    found: dict[str, list[str]] = {}
    for name, graph in graphs(folder):
        forget("rewrite_rules")
        with lines_run("rewrite_rules") as lines:
            for library in libraries:
                match_all(graph, library)
        for rule in {r for line in lines for r in owners.get(line, ())}:
            found.setdefault(rule, []).append(name)
    return found


def walked(graph: Graph, seed: int) -> Iterator[Graph]:
    """The graphs after each of a few random substitutions."""
    draw = Random(seed)
    library = Library(LIBRARY, contrib=True)
    state = RewriteState.start(graph, library)
    seen: set[str] = set()
    for _ in range(_STEPS):
        candidates = sorted(state.candidates, key=lambda m: m.key)
        fresh = [m for m in candidates if m.rule.name not in seen] or candidates
        if not fresh:
            return
        match = draw.choice(fresh)
        seen.add(match.rule.name)
        state = state.apply(match)
        yield state.graph


def graph_of(folder: Path, name: str) -> Graph:
    """A graph of the index: that of a file, or one that substitutions made of it (FILE:SEED:STEP)."""
    file, *walk = name.split(":")
    graph = load(onnx.load(str(folder / file))).graph
    if not walk:
        return graph
    seed, step = map(int, walk)
    return list(islice(walked(graph, seed), step + 1))[step]


def index_of_walks(folder: Path) -> Mapping[str, list[str]]:
    """Rule -> graphs made by substitutions that reach lines which no other graph reaches."""
    found: dict[str, list[str]] = {}
    seen: dict[str, set[Line]] = {}

    def looked_at(name: str, graph: Graph, library: Library) -> None:
        for rule, lines in lines_by_rule(graph, library):
            known = seen.setdefault(rule, set())
            if not lines <= known:
                known |= lines
                if ":" in name:
                    found.setdefault(rule, []).append(name)

    library = Library(LIBRARY, contrib=True)
    chosen = [
        (n, g)
        for i, (n, g) in enumerate(graphs(folder))
        if i % _EVERY == 0 and len(g.topological()) <= _SMALL
    ]
    for name, graph in chosen:
        looked_at(name, graph, library)
    for name, graph in chosen:
        for seed in range(_WALKS):
            try:
                for step, after in enumerate(walked(graph, seed)):
                    looked_at(f"{name}:{seed}:{step}", after, library)
            except RuleError:
                continue
    return found


def lines_by_rule(graph: Graph, library: Library) -> Iterator[tuple[str, set[Line]]]:
    """For each rule that applies to a graph, the lines that run when it makes its target."""
    for match in match_all(graph, library)[:_MATCHES]:
        forget("rewrite_rules")
        try:
            with lines_run("rewrite_rules") as lines:
                build_edit(graph, match)
        except (Refused, RuleError):  # the rule refuses only now, or the graph is meaningless
            continue
        yield match.rule.name, set(lines)


def collect(folder: Path) -> None:
    """Fill a folder with graphs and their index."""
    harvest(folder)
    found = {k: list(v) for k, v in index(folder).items()}
    for rule, names in index_of_walks(folder).items():
        found.setdefault(rule, []).extend(names)
    (folder / INDEX).write_text(json.dumps(found))
