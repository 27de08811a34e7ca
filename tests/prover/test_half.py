"""Rules that compute float16 in float32 (`rounds_once`): what is more accurate is proven, what rounds more is not."""

from __future__ import annotations

from typing import Any

import pytest

from rewrite_rules.precision import ComputeInFloat32, ComputeRegionInFloat32
from tests.prover.test_wrong_rules import rejected
from xrlflow.ir import DType
from xrlflow.prover import prove
from xrlflow.rewrite import AnyRule, Captures, Op, Rule, Val, require

pytestmark = pytest.mark.proof

HALF, SINGLE, BRAIN = int(DType.FLOAT16), int(DType.FLOAT), int(DType.BFLOAT16)


class _ExpThenSquare(Rule):
    """e(x) * e(x)  of float16."""

    rounds_once = True
    may_remove_nonfinite = True
    dtypes = frozenset({DType.FLOAT16})
    shapes = "x[...]"
    examples = ("agraph (float16[N,3] x) => (float16[N,3] z) { y = Sigmoid(x) z = Mul(y, y) }",)

    def source(self, op: Op, x: Any) -> Any:
        y = op.Sigmoid(x)
        return op.Mul(y, y)


class Once(_ExpThenSquare):
    """e(x) * e(x) -> cast16(e(a) * e(a)), a = cast32(x)."""

    def target(self, op: Op, x: Val) -> Any:
        y = op.Sigmoid(op.Cast(x, to=SINGLE))
        return op.Cast(op.Mul(y, y), to=HALF)


class Twice(_ExpThenSquare):
    """e(x) * e(x) -> cast16(cast16(e(a)) * e(a)): one factor is rounded."""

    def target(self, op: Op, x: Val) -> Any:
        y = op.Sigmoid(op.Cast(x, to=SINGLE))
        return op.Mul(op.Cast(y, to=HALF), op.Cast(y, to=HALF))


class Coarsely(_ExpThenSquare):
    """e(x) * e(x) -> cast16(castbf16(e(a) * e(a)))."""

    def target(self, op: Op, x: Val) -> Any:
        y = op.Sigmoid(op.Cast(x, to=SINGLE))
        return op.Cast(op.Cast(op.Mul(y, y), to=BRAIN), to=HALF)


class Otherwise(_ExpThenSquare):
    """e(x) * e(x) -> cast16(e(a) + e(a))."""

    def target(self, op: Op, x: Val) -> Any:
        y = op.Sigmoid(op.Cast(x, to=SINGLE))
        return op.Cast(op.Add(y, y), to=HALF)


class UsesAgain(_ExpThenSquare):
    """e(x) * e(x) -> cast16(cast32(e(x)) * cast32(e(x))): e(x) of float16 is the node that was matched."""

    def target(self, op: Op, x: Val) -> Any:
        y = op.Cast(op.Sigmoid(x), to=SINGLE)
        return op.Cast(op.Mul(y, y), to=HALF)


class RoundsConstants(Rule):
    """x * c * d -> cast16(cast32(x) * cast32(c * d))  of float16: the product of the constants is rounded."""

    rounds_once = True
    may_remove_nonfinite = True
    dtypes = frozenset({DType.FLOAT16})
    shapes = "x[...] c[...] d[...]"
    examples = (
        "agraph (float16[N,3] x) => (float16[N,3] z) <float[3] a = {0.1, 1.1, 2.3}, float[3] b = {0.3, 1.7, 3.1}> "
        "{ c = Cast<to=10>(a) d = Cast<to=10>(b) y = Mul(x, c) z = Mul(y, d) }",
    )

    def source(self, op: Op, x: Any, c: Any, d: Any) -> Any:
        return op.Mul(op.Mul(x, c), d)

    def where(self, m: Captures, x: Val, c: Val, d: Val) -> None:
        require(c.const and d.const, "they are no constants")

    def target(self, op: Op, x: Val, c: Val, d: Val) -> Any:
        return op.Cast(op.Mul(op.Cast(x, to=SINGLE), op.Cast(op.Mul(c, d), to=SINGLE)), to=HALF)


class Jumps(Rule):
    """floor(e(x)) -> cast16(floor(e(cast32(x))))  of float16: e(x) may round up to an integer."""

    rounds_once = True
    may_remove_nonfinite = True
    dtypes = frozenset({DType.FLOAT16})
    shapes = "x[...]"
    examples = ("agraph (float16[N,3] x) => (float16[N,3] z) { y = Exp(x) z = Floor(y) }",)

    def source(self, op: Op, x: Any) -> Any:
        return op.Floor(op.Exp(x))

    def target(self, op: Op, x: Val) -> Any:
        return op.Cast(op.Floor(op.Exp(op.Cast(x, to=SINGLE))), to=HALF)


class SeenInSingle(Rule):
    """neg(cast32(e(x))) -> neg(e(cast32(x)))  of float16: who reads it in float32 sees that a rounding is missing."""

    rounds_once = True
    may_remove_nonfinite = True
    shapes = "x[...]"
    examples = ("agraph (float16[N,3] x) => (float[N,3] z) { y = Exp(x) w = Cast<to=1>(y) z = Neg(w) }",)

    def source(self, op: Op, x: Any) -> Any:
        return op.Neg(op.Cast(op.Exp(x), to="a"))

    def where(self, m: Captures, x: Val) -> None:
        require(x.dtype == DType.FLOAT16 and m.a == SINGLE, "it is another type")

    def target(self, op: Op, x: Val) -> Any:
        return op.Neg(op.Exp(op.Cast(x, to=SINGLE)))


class CountsThroughHalf(Rule):
    """cast32(cast16(n)) -> cast32(n)  of integers: float16 holds no more than 2,048 of them."""

    rounds_once = True
    may_remove_nonfinite = True
    proof = "numeric"
    examples = ("agraph (int32[N,3] n) => (float[N,3] y) { a = Cast<to=10>(n) y = Cast<to=1>(a) }",)

    def source(self, op: Op, n: Any) -> Any:
        return op.Cast(op.Cast(n, to="a"), to="b")

    def where(self, m: Captures, n: Val) -> None:
        require(n.dtype == DType.INT32 and (m.a, m.b) == (HALF, SINGLE), "it is another cast")

    def target(self, op: Op, n: Val) -> Any:
        return op.Cast(n, to=SINGLE)


def _undeclared(rule: AnyRule, **attributes: object) -> AnyRule:
    kind = type(rule)
    made: AnyRule = type(rule.name, (kind,), {"__doc__": kind.__doc__, **attributes})()
    return made


def test_what_rounds_once_is_proven() -> None:
    found = prove(Once())
    assert found.proven, found.failures
    assert found.mutants
    assert not found.unexplained


@pytest.mark.parametrize(
    "rule",
    [
        Twice(),
        Coarsely(),
        Otherwise(),
        UsesAgain(),
        RoundsConstants(),
        Jumps(),
        SeenInSingle(),
        CountsThroughHalf(),
    ],
    ids=lambda r: r.name,
)
def test_what_rounds_more_or_computes_something_else_is_wrong(rule: AnyRule) -> None:
    rejected(rule)


@pytest.mark.parametrize("rule", [ComputeInFloat32(), ComputeRegionInFloat32()], ids=lambda r: r.name)
def test_a_rule_must_say_that_it_rounds_once(rule: AnyRule) -> None:
    rejected(_undeclared(rule, rounds_once=False))
