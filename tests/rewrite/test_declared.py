"""What a rule's class says by itself: its family, and that it is a rule of its module."""

from __future__ import annotations

import sys
from typing import Any

from xrlflow.rewrite import Op, Rule, declared_in


class _Negated(Rule, family="signs"):
    """-x, in some way."""

    def target(self, op: Op, x: Any) -> Any:
        return x


class Second(_Negated):
    """-(-x) -> x."""

    def source(self, op: Op, x: Any) -> Any:
        return op.Neg(op.Neg(x))


class First(_Negated, family="zeros"):
    """0 - (0 - x) -> x."""

    def source(self, op: Op, x: Any) -> Any:
        return op.Sub(0.0, op.Sub(0.0, x))


class Plain(Rule):
    """identity(x) -> x."""

    def source(self, op: Op, x: Any) -> Any:
        return op.Identity(x)

    def target(self, op: Op, x: Any) -> Any:
        return x


def test_a_module_declares_its_public_rules_in_their_order() -> None:
    assert [r.name for r in declared_in(sys.modules[__name__])] == ["Second", "First", "Plain"]


def test_a_family_is_declared_or_that_of_the_base_or_the_module() -> None:
    assert {r.name: r.family for r in declared_in(sys.modules[__name__])} == {
        "Second": "signs",
        "First": "zeros",
        "Plain": "test_declared",
    }
