"""Rules that lose an error of the left side, or make one: what fails must fail."""

from __future__ import annotations

from typing import Any

import pytest

from tests.prover.test_wrong_rules import rejected
from xrlflow.rewrite import AnyRule, Op, Rule, Val


class GatherModulo(Rule):
    """gather(x, i) -> gather(x, i mod n)."""

    shapes = "x[n]:float i[m]:int"

    def source(self, op: Op, x: Any, i: Any) -> Any:
        return op.Gather(x, i)

    def target(self, op: Op, x: Val, i: Val) -> Any:
        return op.Gather(x, op.Mod(i, float(max(x.size(0), 1))))


class GatherClipped(Rule):
    """gather(x, i) -> gather(x, min(i, n - 1))."""

    shapes = "x[n,a]:float i[m]:int"

    def source(self, op: Op, x: Any, i: Any) -> Any:
        return op.Gather(x, i)

    def target(self, op: Op, x: Val, i: Val) -> Any:
        return op.Gather(x, op.Min(i, float(x.size(0) - 1)))


class ElementsModulo(Rule):
    """gatherelements(x, i) -> gatherelements(x, i mod n)."""

    shapes = "x[n]:float i[m]:int"

    def source(self, op: Op, x: Any, i: Any) -> Any:
        return op.GatherElements(x, i)

    def target(self, op: Op, x: Val, i: Val) -> Any:
        return op.GatherElements(x, op.Mod(i, float(max(x.size(0), 1))))


class DropGather(Rule):
    """shape(gather(x, i)) -> shape(i), as if every index were one."""

    proof = "numeric"
    relies_on = "nothing"
    shapes = "x[n]:int i[m]:int"

    def source(self, op: Op, x: Any, i: Any) -> Any:
        return op.Shape(op.Gather(x, i))

    def target(self, op: Op, x: Val, i: Val) -> Any:
        return op.Shape(i)


WRONG = [GatherModulo(), GatherClipped(), ElementsModulo(), DropGather()]


@pytest.mark.parametrize("rule", WRONG, ids=lambda r: r.name)
def test_an_error_is_kept(rule: AnyRule) -> None:
    assert "fails" in rejected(rule)
