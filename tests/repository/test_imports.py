"""What modules import: no circles, and nothing heavy before it is needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import xrlflow

pytestmark = pytest.mark.process

PACKAGE = Path(xrlflow.__file__).parent


def modules() -> dict[str, Path]:
    files = {".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts): f for f in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for name, file in files.items()}


def imported(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The package's modules that a file imports, those for types alone left out."""
    tree = ast.parse(file.read_text())
    for_types = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and isinstance(test.test, ast.Name) and test.test.id == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in for_types:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    graph = nx.DiGraph((name, other) for name, file in known.items() for other in imported(file, known))
    assert [c for c in nx.strongly_connected_components(graph) if len(c) > 1] == []


def test_help_needs_nothing_heavy() -> None:
    program = (
        "import sys, xrlflow, xrlflow.cli\n"
        "heavy = {'numpy', 'onnx', 'onnxruntime', 'torch', 'tvm', 'networkx', 'scipy', 'rewrite_rules'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def forking(source: str) -> list[str]:
    """Calls that fork this process, or may do so by default, on some versions of Python."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name, given = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
        context = name.endswith(("get_context", "set_start_method")) and "spawn" not in ast.unparse(call)
        bare = name in ("multiprocessing.Process", "multiprocessing.Pool", "Process")
        pool = name.endswith("ProcessPoolExecutor") and "mp_context" not in given
        if name in ("os.fork", "os.forkpty") or "preexec_fn" in given or context or bare or pool:
            found.append(name)
    return found


def test_only_processes_of_one_thread_fork() -> None:
    """Threads of runtimes do not survive it: TVM's would be waited for forever. A server has one, and so has a process
    that starts."""
    found = {name: forking(file.read_text()) for name, file in modules().items()}
    assert {name: calls for name, calls in found.items() if calls} == {
        "xrlflow.workers.serving": ["os.fork", "os.fork"],
    }


def test_only_workers_start_and_end_processes() -> None:
    """What runs this package apart has one start, one log, one reason of death and one kill. A command that is waited
    for (`subprocess.run`) is no such process."""
    calls = re.compile(r"\b(Popen|posix_spawn|killpg|os\.kill|ProcessPoolExecutor)\(")
    found = {name for name, file in modules().items() if calls.search(file.read_text())}
    assert found == {"xrlflow.workers.cluster", "xrlflow.workers.process", "xrlflow.workers.serving"}


def test_what_forks_is_found() -> None:
    for source in (
        "multiprocessing.get_context('fork')",
        "multiprocessing.get_context()",
        "ProcessPoolExecutor(2)",
        "Process(target=f)",
        "subprocess.run([], preexec_fn=f)",
    ):
        assert forking(source), source
    assert not forking("multiprocessing.get_context('spawn')\nProcessPoolExecutor(2, mp_context=c)")
