"""Rules that are right for real numbers, but lose digits that the left side has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.prover.test_wrong_rules import rejected
from xrlflow.ir import FLOATS
from xrlflow.prover import prove
from xrlflow.rewrite import AnyRule, Op, Rule, Val

pytestmark = pytest.mark.proof


class DifferenceOfSquares(Rule):
    """(a - b)(a + b) -> a^2 - b^2."""

    dtypes = FLOATS
    may_add_nonfinite = True
    shapes = "a[...] b[...]"

    def source(self, op: Op, a: Any, b: Any) -> Any:
        return op.Mul(op.Sub(a, b), op.Add(a, b))

    def target(self, op: Op, a: Val, b: Val) -> Any:
        return op.Sub(op.Mul(a, a), op.Mul(b, b))


class FactorDifference(Rule):
    """a^2 - b^2 -> (a - b)(a + b), which is the more accurate one."""

    dtypes = FLOATS
    may_add_nonfinite = True
    shapes = "a[...] b[...]"

    def source(self, op: Op, a: Any, b: Any) -> Any:
        return op.Sub(op.Mul(a, a), op.Mul(b, b))

    def target(self, op: Op, a: Val, b: Val) -> Any:
        return op.Mul(op.Sub(a, b), op.Add(a, b))


class ExpandSquare(Rule):
    """(a - b)^2 -> a^2 - 2ab + b^2."""

    dtypes = FLOATS
    may_add_nonfinite = True
    shapes = "a[...] b[...]"

    def source(self, op: Op, a: Any, b: Any) -> Any:
        d = op.Sub(a, b)
        return op.Mul(d, d)

    def target(self, op: Op, a: Val, b: Val) -> Any:
        return op.Add(op.Sub(op.Mul(a, a), op.Mul(2.0, op.Mul(a, b))), op.Mul(b, b))


class Distribute(Rule):
    """x(y - z) -> xy - xz."""

    dtypes = FLOATS
    may_add_nonfinite = True
    shapes = "x[...] y[...] z[...]"

    def source(self, op: Op, x: Any, y: Any, z: Any) -> Any:
        return op.Mul(x, op.Sub(y, z))

    def target(self, op: Op, x: Val, y: Val, z: Val) -> Any:
        return op.Sub(op.Mul(x, y), op.Mul(x, z))


class DistributeProduct(Rule):
    """(x + y) @ w -> x @ w + y @ w."""

    dtypes = FLOATS
    may_add_nonfinite = True
    shapes = "x[a,k] y[a,k] w[k,n]"

    def source(self, op: Op, x: Any, y: Any, w: Any) -> Any:
        return op.MatMul(op.Add(x, y), w)

    def target(self, op: Op, x: Val, y: Val, w: Val) -> Any:
        return op.Add(op.MatMul(x, w), op.MatMul(y, w))


class FactorProduct(Rule):
    """x @ w + y @ w -> (x + y) @ w."""

    dtypes = FLOATS
    may_add_nonfinite = True
    shapes = "x[a,k] y[a,k] w[k,n]"

    def source(self, op: Op, x: Any, y: Any, w: Any) -> Any:
        return op.Add(op.MatMul(x, w), op.MatMul(y, w))

    def target(self, op: Op, x: Val, y: Val, w: Val) -> Any:
        return op.MatMul(op.Add(x, y), w)


class Regroup(Rule):
    """(a + b) + c -> a + (b + c)."""

    dtypes = FLOATS
    may_add_nonfinite = True
    shapes = "a[...] b[...] c[...]"

    def source(self, op: Op, a: Any, b: Any, c: Any) -> Any:
        return op.Add(op.Add(a, b), c)

    def target(self, op: Op, a: Val, b: Val, c: Val) -> Any:
        return op.Add(a, op.Add(b, c))


class AddAndSubtract(Rule):
    """relu(b) -> (relu(b) + a) - a  for a number a: digits of a small b are lost."""

    dtypes = FLOATS
    may_add_nonfinite = True
    shapes = "b[...]"

    def source(self, op: Op, b: Any) -> Any:
        return op.Relu(b)

    def target(self, op: Op, b: Val) -> Any:
        return op.Sub(op.Add(op.Relu(b), 4.0), 4.0)


class SquareOfMean(Rule):
    """mean((x - mean(x))^2) -> mean(x^2) - mean(x)^2."""

    dtypes = FLOATS
    may_add_nonfinite = True
    shapes = "x[a,n]"

    def source(self, op: Op, x: Any) -> Any:
        d = op.Sub(x, op.ReduceMean(x))
        return op.ReduceMean(op.Mul(d, d))

    def target(self, op: Op, x: Val) -> Any:
        mean = op.ReduceMean(x)
        return op.Sub(op.ReduceMean(op.Mul(x, x)), op.Mul(mean, mean))


class LogOfQuotient(Rule):
    """log(|a| / |b|) -> log|a| - log|b|."""

    proof = "numeric"
    relies_on = "the logarithm of a quotient"
    dtypes = FLOATS
    may_add_nonfinite = True
    shapes = "a[...] b[...]"

    def source(self, op: Op, a: Any, b: Any) -> Any:
        return op.Log(op.Div(op.Exp(a), op.Exp(b)))

    def target(self, op: Op, a: Val, b: Val) -> Any:
        return op.Sub(op.Log(op.Exp(a)), op.Log(op.Exp(b)))


class ShiftBeforeScale(Rule):
    """(x - c) * s -> x * s - c * s  for numbers c and s."""

    dtypes = FLOATS
    may_add_nonfinite = True
    shapes = "x[...] c[]:const s[]:const"

    def source(self, op: Op, x: Any, c: Any, s: Any) -> Any:
        return op.Mul(op.Sub(x, c), s)

    def target(self, op: Op, x: Val, c: Val, s: Val) -> Any:
        return op.Sub(op.Mul(x, s), op.Mul(c, s))


WRONG = [
    DifferenceOfSquares(),
    ExpandSquare(),
    Distribute(),
    DistributeProduct(),
    Regroup(),
    AddAndSubtract(),
    SquareOfMean(),
    ShiftBeforeScale(),
]


@pytest.mark.parametrize("rule", WRONG, ids=lambda r: r.name)
def test_digits_that_cancel_are_missed(rule: AnyRule) -> None:
    assert "rounding" in rejected(rule)


@pytest.mark.parametrize("rule", [FactorDifference(), FactorProduct()], ids=lambda r: r.name)
def test_what_loses_no_digits_is_proven(rule: AnyRule) -> None:
    found = prove(rule)
    assert found.proven, found.failures


def _declaring(rule: AnyRule) -> AnyRule:
    kind = type(rule)
    made: AnyRule = type(rule.name, (kind,), {"__doc__": kind.__doc__, "may_round_inputs": True})()
    return made


@pytest.mark.parametrize(
    "rule", [Regroup(), Distribute(), DistributeProduct(), ShiftBeforeScale()], ids=lambda r: r.name
)
def test_a_rule_may_say_that_it_rounds_its_inputs(rule: AnyRule) -> None:
    """Its error is no larger than what one rounding of each input would cause."""
    found = prove(_declaring(rule))
    assert found.proven, found.failures


@pytest.mark.parametrize("rule", [ExpandSquare(), AddAndSubtract(), SquareOfMean()], ids=lambda r: r.name)
def test_what_loses_more_than_that_is_wrong_all_the_same(rule: AnyRule) -> None:
    assert "rounding" in rejected(_declaring(rule))
