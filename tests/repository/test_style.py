"""Functions stay short: no more than 60 lines, and no more than 8 parameters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 60  # docstring and signature included, decorators not
MOST_PARAMETERS = 8  # without self and cls

# By file and function: why it is longer, or takes more.
EXCEPTIONS = {
    "xrlflow/api.py optimize": "its options, and what each of them does, are most of its lines",
}
# A rule's `source` and `target` take the variables of its pattern: as many as the operators have inputs.
RULES = "rewrite_rules"
VARIABLES = ("source", "target")


def functions(
    tree: ast.AST, inside: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a module, with its name: those of classes and functions, too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inside + node.name, node
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from functions(node, f"{inside}{node.name}." if named else inside)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters count: a public function may have any number of options, which have names where it is called.

    `*args` and `**kwargs` are one each.
    """
    given = function.args
    positional = [a.arg for a in (*given.posonlyargs, *given.args)]
    count = len(positional) - (positional[:1] in (["self"], ["cls"]))
    count += (given.vararg is not None) + (given.kwarg is not None)
    return count + (len(given.kwonlyargs) if function.name.startswith("_") else 0)


def faults(source: str, *, of_rules: bool = False) -> dict[str, str]:
    """What is wrong with the functions of a module, by their names."""
    found = {}
    for name, function in functions(ast.parse(source)):
        assert function.end_lineno is not None
        lines, count = function.end_lineno - function.lineno + 1, parameters(function)
        if lines > MOST_LINES:
            found[name] = f"{lines} lines, and {MOST_LINES} are allowed"
        elif count > MOST_PARAMETERS and not (of_rules and function.name in VARIABLES):
            found[name] = f"{count} parameters, and {MOST_PARAMETERS} are allowed"
    return found


@pytest.mark.parametrize("folder", ["xrlflow", "bench", "tests/fuzz", RULES])
def test_functions_are_short(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()} {name}": fault
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, fault in faults(path.read_text(), of_rules=folder == RULES).items()
    }
    excepted = {name for name in EXCEPTIONS if name.startswith(f"{folder}/")}
    long = [f"{name}: {fault}" for name, fault in found.items() if name not in excepted]
    assert not long, "split these functions:\n" + "\n".join(long)
    stale = sorted(excepted - found.keys())
    assert not stale, f"no exceptions any more: {', '.join(stale)}"


BODY = "\n".join(["    pass"] * MOST_LINES)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (f"def long():\n{BODY}", "long"),
        (f"class A:\n    def long(self):\n{BODY.replace('    ', '        ')}", "A.long"),
        (f"if True:\n    async def long():\n{BODY.replace('    ', '        ')}", "long"),
        ("def outer():\n    def wide(a, b, c, d, e, f, g, h, i): ...", "outer.wide"),
        ("class A:\n    def __init__(self, a, b, c, d, e, f, g, /, h, i): ...", "A.__init__"),
        ("def wide(a, b, c, d, e, f, g, h, *i): ...", "wide"),
        ("def _wide(a, *, b, c, d, e, f, g, h, i): ...", "_wide"),
        ("class A:\n    def source(self, a, b, c, d, e, f, g, h, i): ...", "A.source"),
    ],
)
def test_a_fault_is_named(source: str, named: str) -> None:
    assert list(faults(source)) == [named]


@pytest.mark.parametrize(
    "source",
    [
        f"@decorated\ndef whole():\n{BODY.removesuffix('    pass')}",
        "class A:\n    def method(self, a, b, c, d, e, f, g, h): ...",
        "class A:\n    @classmethod\n    def made(cls, a, b, c, d, e, f, g, h): ...",
        "def options(a, *, b, c, d, e, f, g, h, i): ...",
    ],
)
def test_what_is_allowed(source: str) -> None:
    assert faults(source) == {}


def test_a_rule_takes_as_many_variables_as_its_pattern_has() -> None:
    many = "class A:\n    def target(self, op, a, b, c, d, e, f, g, h, i): ..."
    assert faults(many, of_rules=True) == {}
    assert list(faults(many)) == ["A.target"]
    assert list(faults(many.replace("target", "other"), of_rules=True)) == ["A.other"]


def test_tests_import_no_benchmark() -> None:
    """What both need lives in the package or in tests/; tests of benchmarks are in bench/tests."""
    importing = re.compile(r"^\s*(?:from|import) bench\b", re.MULTILINE)
    assert [str(p) for p in sorted((ROOT / "tests").rglob("*.py")) if importing.search(p.read_text())] == []


def test_what_make_test_leaves_out_is_listed() -> None:
    """The table of CONTRIBUTING.md names the files with cases for `make test-all` alone, and no others."""
    rows = re.findall(
        r"^\| (tests/\S.*?|bench/tests) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    named = {name.rsplit("/", 1)[-1] for row in rows for name in row.split(", ")} - {"tests"}
    marked = re.compile(r"pytest\.mark\.whole|from tests\.levels import")
    assert named == {
        p.name
        for p in (ROOT / "tests").rglob("test_*.py")
        if p != Path(__file__) and marked.search(p.read_text())
    }


@pytest.mark.parametrize("kind", ["proof", "corpus", "process", "measures", "learns", "cluster"])
def test_each_kind_has_a_test_that_make_check_runs(kind: str) -> None:
    texts = [p.read_text() for p in (ROOT / "tests").rglob("test_*.py") if p != Path(__file__)]
    assert any(f"pytest.mark.{kind}" in text and "pytest.mark.quick" in text for text in texts)
