"""Libraries share the patterns of rules and their compiled plans, and nothing that depends on how they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.rules.harness import applies, model
from xrlflow.prover.code import mutants_of, put
from xrlflow.rewrite import Captures, Library, Op, Rule, Val, require
from xrlflow.rewrite.pattern import patterns_of


class KeepOne(Rule):
    """relu(relu(x)) -> relu(x)  for vectors."""

    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Relu(op.Relu(x))

    def where(self, m: Captures, x: Val) -> None:
        require(x.type.rank == 1, "it is no vector")

    def target(self, op: Op, x: Val) -> Any:
        return op.Relu(x)


@dataclass
class Unhashable(KeepOne):
    """relu(relu(x)) -> relu(x)  for vectors."""

    number: int = 0


TWICE = model("agraph (float[3] x) => (float[3] y) { a = Relu(x) y = Relu(a) }")


def plans(library: Library) -> list[Any]:
    return [plan for found in library.plans.by_op.values() for plan in found]


def test_compiled_plans_are_shared_and_verdicts_are_not() -> None:
    rule = KeepOne()
    one, other = (plans(Library([rule])) for _ in range(2))
    assert [a.run is b.run for a, b in zip(one, other, strict=True)] == [True] * len(one)
    assert len(one) > 1
    verdicts = {id(plan.pattern.verdicts) for plan in (*one, *other)}
    assert len(verdicts) == 2  # one for each library


def test_a_rule_need_not_be_hashable() -> None:
    applies(Unhashable(), TWICE, ops=["Relu"])


def test_code_that_changes_is_traced_again() -> None:
    rule = KeepOne()
    before = patterns_of(rule)
    assert patterns_of(rule) is before
    mutant = next(mutants_of(KeepOne.where))
    with put(KeepOne.where, mutant.code):
        assert patterns_of(rule) is not before
