"""Graphs for `bench/mutants.py`: what the tests of the rules read, and the examples of all rules.

As a plugin of pytest (`-p bench.mutant_graphs`) it keeps every small model that a test loads.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rewrite_rules import LIBRARY
from xrlflow.ir import Graph
from xrlflow.onnxio import ModelError, load
from xrlflow.rewrite import Library, RegionRule, Rule
from xrlflow.rewrite.state import match_all
from xrlflow.verify.rules.code import forget
from xrlflow.verify.rules.reached import lines_run
from xrlflow.verify.rules.thresholds import function_of

ROOT = Path(__file__).resolve().parent.parent
INDEX = "index.json"
_FOLDER = "XRLFLOW_MUTANT_GRAPHS"
# Larger models are left out: nodes, and bytes.
_NODES, _BYTES = 80, 1 << 18


def pytest_configure() -> None:
    """Have `xrlflow.onnxio.load` keep what it is given."""
    from xrlflow import onnxio

    folder, load = Path(os.environ[_FOLDER]), onnxio.load

    def loaded(model: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(model, onnx.ModelProto) and len(model.graph.node) <= _NODES:
            data = model.SerializeToString(deterministic=True)
            if len(data) <= _BYTES:
                (folder / f"{hashlib.sha256(data).hexdigest()[:24]}.onnx").write_bytes(data)
        return load(model, *arguments, **named)

    onnxio.load = loaded


def harvest(folder: Path) -> None:
    """Run the tests of the rules (but their proofs), and keep what they load in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tests = [str(p) for p in sorted((ROOT / "tests" / "rules").glob("test_*.py")) if p.stem != "test_proofs"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "bench.mutant_graphs", *tests],
        cwd=ROOT,
        env={**os.environ, _FOLDER: str(folder), "PYTHONPATH": str(ROOT)},
        check=True,
    )


def graphs(folder: Path) -> Iterator[tuple[str, Graph]]:
    """The graphs that are kept, by their files' names; what is no model is left out."""
    for path in sorted(folder.glob("*.onnx")):
        try:
            yield path.name, load(onnx.load(str(path))).graph
        except ModelError:  # tests of what is no model
            continue


def index(folder: Path) -> Mapping[str, list[str]]:
    """Rule -> names of the graphs for which code of the rule's own class is run, beyond its pattern."""
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
            LIBRARY, backend=b, contrib=True, assuming=("finite", "vnni", "approximate"), thorough=True
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


def collect(folder: Path) -> None:
    """Fill a folder with graphs and their index."""
    harvest(folder)
    (folder / INDEX).write_text(json.dumps(index(folder)))
