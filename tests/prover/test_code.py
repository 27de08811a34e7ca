"""Mutants of a rule's own code are made, put in its place, and found out."""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from rewrite_rules import LIBRARY
from tests.rules import mutants
from xrlflow.ir import Node
from xrlflow.onnxio import load
from xrlflow.prover.code import functions_of, mutants_of, put
from xrlflow.prover.codehunt import KILLED, CodeHunt, CodeHuntResult
from xrlflow.prover.proof import parse
from xrlflow.prover.thresholds import function_of
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, profitable, require

pytestmark = pytest.mark.proof

EXPLAINED = Path(__file__).parents[1] / "rules" / "survivors.json"
# Rules of which all mutants are tried, quick ones of several families.
SAMPLE = ("RemoveZeroAdd", "RemoveNoopSlice", "ReplacePowBySqrt")


@lru_cache(maxsize=8)
def helper(numbers: tuple[int, ...]) -> bool:
    return numbers[0] == 1 and len(numbers) < 2


class Twice(Rule):
    """relu(relu(x)) -> relu(x)  of three to five numbers."""

    proof = "numeric"
    relies_on = "Relu is idempotent"
    shapes = "x[n]"

    def source(self, op: Op, x: Any) -> Any:
        return op.Relu(op.Relu(x))

    def where(self, m: Captures, x: Val) -> None:
        require(x.size(0) < 6 and not x.const, "they are many")
        profitable(x.size(0) > 2, "they are few")

    def target(self, op: Op, x: Val) -> Any:
        return op.Relu(op.Mul(x, 1.0))


def changes(function: Any) -> list[tuple[str, str]]:
    return [(c.mutant.kind, c.mutant.change) for c in mutants_of(function)]


def test_every_comparison_number_and_connective_is_changed() -> None:
    found = functions_of(Twice())
    assert {k.rpartition(".")[2] for k in found} == {"source", "where", "target"}
    where = next(f for k, f in found.items() if k.endswith("where"))
    assert changes(where) == [
        ("boolean", "x.size(0) < 6 and (not x.const) -> x.size(0) < 6 or not x.const"),
        ("comparison", "x.size(0) < 6 -> x.size(0) <= 6"),
        ("constant", "x.size(0) -> x.size(1)"),
        ("constant", "x.size(0) < 6 -> x.size(0) < 7"),
        ("boolean", "not x.const -> not not x.const"),
        ("comparison", "x.size(0) > 2 -> x.size(0) >= 2"),
        ("constant", "x.size(0) -> x.size(1)"),
        ("constant", "x.size(0) > 2 -> x.size(0) > 3"),
    ]


def test_a_function_is_changed_for_all_who_call_it_and_what_it_remembered_is_forgotten() -> None:
    assert helper((1,))
    function = function_of(helper)
    assert function is not None
    mutant = next(m for m in mutants_of(function) if m.mutant.kind == "comparison")
    with put(function, mutant.code):
        assert not helper((1,))
    assert helper((1,))


def test_mutants_are_found_out() -> None:
    hunt = CodeHunt(Twice())
    found: dict[str, CodeHuntResult] = {}
    for function in hunt.functions.values():
        for mutant in mutants_of(function):
            found.setdefault(mutant.mutant.change, hunt.judge(function, mutant))
    assert found["op.Mul(x, 1.0) -> op.Mul(x, 2.0)"].verdict == "wrong"
    assert found["x.size(0) -> x.size(1)"].verdict == "raises"
    assert found["x.size(0) > 2 -> x.size(0) > 3"].verdict == "loses"
    assert found["x.size(0) > 2 -> x.size(0) >= 2"].verdict == "useless"
    # More numbers would do no harm.
    assert found["x.size(0) < 6 -> x.size(0) <= 6"].verdict == "right"


class Least(RegionRule):
    """neg(relu(x)) -> min(neg(x), 0), unless it is of many numbers."""

    proof = "numeric"
    relies_on = "-max(x, 0) = min(-x, 0)"
    anchors = ("Neg",)
    examples = ("agraph (float[3] x) => (float[3] y) { a = Relu(x) y = Neg(a) }",)
    near_misses = ("agraph (float[30] x) => (float[30] y) { a = Relu(x) y = Neg(a) }",)

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = reader.producer(node.inputs[0])
        if inner is None or inner.op != "Relu":
            return None
        return self.small(reader, node, inner)

    def small(self, reader: Reader, node: Node, inner: Node) -> Region | None:
        size = reader.val(inner.inputs[0]).shape
        require(size == () or size[0] != 30, "it is large")
        return Region(node.outputs, (inner.inputs[0],), (node,))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Min(op.Neg(x), 0.0)


class Remembers(Least):
    """What a graph's inputs come to is decided once."""

    def __init__(self) -> None:
        self.known: dict[object, bool] = {}

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = reader.producer(node.inputs[0])
        if inner is None or inner.op != "Relu":
            return None
        key = reader.type(inner.inputs[0])
        if key not in self.known:
            self.known[key] = self.fits(reader, inner)
        require(self.known[key], "it is large")
        return Region(node.outputs, (inner.inputs[0],), (node,))

    def fits(self, reader: Reader, inner: Node) -> bool:
        return reader.val(inner.inputs[0]).shape[:1] != (30,)


def test_what_a_rule_remembers_hides_no_mutant() -> None:
    rule = Remembers()
    hunt = CodeHunt(rule)
    fits = next(f for k, f in hunt.functions.items() if k.endswith("fits"))
    (mutant,) = [m for m in mutants_of(fits) if m.mutant.kind == "comparison"]
    assert hunt.judge(fits, mutant, further=False).killed


def test_what_mutants_did_is_not_remembered() -> None:
    """The conditions of one mutant say nothing of the next."""
    hunt = CodeHunt(Twice())
    functions = {k.rpartition(".")[2]: f for k, f in hunt.functions.items()}
    for mutant in mutants_of(functions["where"]):
        hunt.judge(functions["where"], mutant, further=False)
    (mutant,) = mutants_of(functions["target"])
    assert hunt.judge(functions["target"], mutant, further=False).verdict == "wrong"


def test_only_graphs_that_come_to_a_change_are_asked() -> None:
    hunt = CodeHunt(Least())
    functions = {k.rpartition(".")[2]: f for k, f in hunt.functions.items()}
    everywhere = next(mutants_of(functions["find"]))
    within = next(mutants_of(functions["small"]))
    assert 0 < len(hunt.reaching(within)) < len(hunt.reaching(everywhere))
    lines = {line for _, line in within.lines}
    assert all(lines & {n for _, n in k.lines} for k in hunt.reaching(within))


def test_given_graphs_are_asked_too() -> None:
    source = "agraph (float[2,3,4,5,6,7,8] x) => (float[2,3,4,5,6,7,8] y) { a = Relu(x) y = Neg(a) }"
    hunts = [CodeHunt(Least(), 0, [load(parse(source)).graph]), CodeHunt(Least())]
    ranks = [
        {len(k.problem.graph.type(k.problem.graph.inputs[0]).shape or ()) for k in h.corpus} for h in hunts
    ]
    assert 7 in ranks[0]
    assert 7 not in ranks[1]


def test_the_numbers_beside_a_change_are_known() -> None:
    where = next(f for k, f in functions_of(Twice()).items() if k.endswith("where"))
    assert {m.mutant.change: m.numbers for m in mutants_of(where)}["x.size(0) > 2 -> x.size(0) > 3"] == {0, 2}


class Wrong(Twice):
    """relu(relu(x)) -> x."""

    def target(self, op: Op, x: Val) -> Any:
        return x


def test_a_wrong_rule_has_no_mutants() -> None:
    with pytest.raises(ValueError, match="Wrong is not proven: output 0"):
        CodeHunt(Wrong())


def test_what_takes_too_long_loops() -> None:
    from xrlflow.prover.codehunt import TooLong, limited

    def wait() -> None:
        while True:
            pass

    with pytest.raises(TooLong), limited(0.05):
        wait()


def explained() -> dict[str, str]:
    """Why survivors are right, by name."""
    return {name: why for why, names in json.loads(EXPLAINED.read_text()).items() for name in names}


@pytest.mark.whole
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 writes some expressions otherwise")
def test_explained_survivors_are_mutants_of_the_library() -> None:
    functions = {k: f for r in LIBRARY for k, f in functions_of(r).items()}
    wanted = {name.partition(": ")[0] for name in explained()}
    names = {
        str(m.mutant) for k, f in functions.items() if k.replace(":", ".") in wanted for m in mutants_of(f)
    }
    assert set(explained()) <= names
    assert all(explained().values())


@pytest.mark.parametrize(
    ("code", "fails"),
    [(pytest.ExitCode.OK, False), (pytest.ExitCode.TESTS_FAILED, True), (pytest.ExitCode.USAGE_ERROR, None)],
)
def test_tests_that_are_not_found_again_are_no_survivor(
    monkeypatch: pytest.MonkeyPatch, code: pytest.ExitCode, fails: bool | None
) -> None:
    compiled = next(mutants_of(Twice.where))
    known = mutants.Reaching()
    known.lines, known.seconds = {"test_x.py::test_y": compiled.lines}, {"test_x.py::test_y": 0.0}
    monkeypatch.setattr(mutants, "reaching", lambda module: known)
    monkeypatch.setattr(mutants, "run_tests", lambda which: code)
    if fails is None:
        with pytest.raises(ValueError, match="not all of these tests are found again"):
            mutants.suite_fails(Twice.where, compiled)
    else:
        assert mutants.suite_fails(Twice.where, compiled) is fails


@pytest.mark.parametrize("name", SAMPLE)
def test_mutants_of_a_rule(name: str) -> None:
    """All are found out or explained. (`bench/mutants.py` tries the whole library.)"""
    (rule,) = [r for r in LIBRARY if r.name == name]
    hunt = CodeHunt(rule)
    own = {k: f for k, f in hunt.functions.items() if k.partition(":")[0] == type(rule).__module__}
    found = [hunt.judge(f, m) for f in own.values() for m in mutants_of(f)]
    left = [str(f.mutant) for f in found if f.verdict not in KILLED]
    assert set(left) <= set(explained())
    assert len(found) > len(left)
