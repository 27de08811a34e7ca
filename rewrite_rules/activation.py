"""Activations written with several operators become single ones: Relu and its variants, Clip, sigmoids, Gelu,
HardSwish.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from rewrite_rules.elementwise import FLOAT, WIDE, keeps_shape, made_by
from rewrite_rules.examples import graphs
from rewrite_rules.reading import (
    COMPARISONS,
    between,
    is_number,
    number_for,
    number_of,
    only_reader,
    operands,
)
from xrlflow.ir import Node, Value
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, profitable, require

# Activations written with Where


@dataclass(frozen=True, slots=True)
class _Choice:
    """where(x < bound, below, above), or the same with another comparison.

    `equal_below`: whether the result is `below` if x equals the bound; `nan_below`: whether it is `below` if x is NaN.
    """

    x: Value
    bound: float
    below: Value
    above: Value
    equal_below: bool
    nan_below: bool


def _choice(reader: Reader, node: Node | None) -> _Choice | None:
    """A Where as a choice between two results by the sign of x - bound; None if it is no such choice."""
    if node is None or node.op != "Where":
        return None
    condition, yes, no = node.inputs
    compare = made_by(reader, condition, *COMPARISONS)
    if compare is None:
        return None
    less, equal = COMPARISONS[compare.op]
    x, c = compare.inputs
    if reader.is_const(x):
        x, c, less = c, x, not less
    bound = number_of(reader, c, x)
    if bound is None:
        return None
    below, above = (yes, no) if less else (no, yes)
    return _Choice(x, bound, below, above, equal == less, not less)


def _exponential(reader: Reader, value: Value, x: Value) -> float | None:
    """The number c, if a value is c * exp(x); else None."""
    node = made_by(reader, value, "Exp", "Mul")
    if node is None:
        return None
    if node.op == "Exp":
        return 1.0 if node.inputs[0] == x else None
    for inner, c in operands(node):
        number = number_of(reader, c, inner)
        if number is not None:
            factor = _exponential(reader, inner, x)
            return None if factor is None else factor * number
    return None


def _exponential_less_one(reader: Reader, value: Value, x: Value) -> float | None:
    """The number c, if a value is c * (exp(x) - 1) or c * exp(x) - c; else None."""
    node = made_by(reader, value, "Add", "Sub", "Mul")
    if node is None:
        return None
    for inner, c in operands(node):
        number = number_of(reader, c, inner)
        if number is None:
            continue
        if node.op == "Mul":
            factor = _exponential_less_one(reader, inner, x)
            return None if factor is None else factor * number
        factor = _exponential(reader, inner, x)
        less = number if node.op == "Sub" else -number
        return factor if factor is not None and math.isclose(factor, less, rel_tol=1e-6) else None
    return None


def _shift(reader: Reader, value: Value, x: Value) -> float | None:
    """The number c, if a value is x + c; else None."""
    if value == x:
        return 0.0
    node = made_by(reader, value, "Add", "Sub")
    for inner, c in operands(node):
        number = number_of(reader, c, inner)
        if inner == x and number is not None and node is not None:
            return number if node.op == "Add" else -number
    return None


class _ReplaceWhere(RegionRule, family="idioms"):
    """An activation with two branches between which a Where chooses."""

    proof = "numeric"
    relies_on = "the definition by cases"
    dtypes = FLOAT
    anchors = ("Where",)
    reads_from = tuple(COMPARISONS)

    # A function that returns the activation's inputs and parameters, or None if the choice is no such activation.
    read: Callable[[Reader, _Choice], tuple[tuple[Value, ...], Any] | None]

    def find(self, reader: Reader, node: Node) -> Region | None:
        choice = _choice(reader, node)
        match = None if choice is None else self.read(reader, choice)
        if match is None:
            return None
        inputs, data = match
        return Region(node.outputs, inputs, between(reader, node.outputs[0], inputs), data)


class ReplaceWhereByRelu(_ReplaceWhere):
    """where(x < 0, 0, x) -> relu(x)  for any comparison that comes to this, and gives x where x is NaN."""

    dtypes = WIDE
    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { c = Less(x, 0.0) y = Where(c, 0.0, x) }",
        "(float[2,3] x) => (float[2,3] y) { c = LessOrEqual(x, 0.0) y = Where(c, 0.0, x) }",
        "(double[N] x) => (double[N] y) <double[1] z = {0}> { c = GreaterOrEqual(z, x) y = Where(c, z, x) }",
    )
    near_misses = graphs("(float[N,3] x) => (float[N,3] y) { c = Greater(x, 0.0) y = Where(c, x, 0.0) }")

    def read(self, reader: Reader, choice: _Choice) -> tuple[tuple[Value, ...], Any] | None:
        if (
            choice.bound != 0
            or choice.above != choice.x
            or not is_number(reader, choice.below, 0.0, choice.x)
        ):
            return None
        require(not choice.nan_below, "NaN becomes 0")
        return (choice.x,), None

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Relu(x)


class ReplaceWhereByPRelu(_ReplaceWhere):
    """where(x < 0, a * x, x) -> prelu(x, a), or leakyrelu(x, a) of a single number,  for any comparison."""

    examples = (
        "agraph (float[N,3] x, float[3] a) => (float[N,3] y) "
        "{ z = Constant<value_float=0.0>() c = Less(x, z) m = Mul(a, x) y = Where(c, m, x) }",
        "agraph (float[N,3] x) => (float[N,3] y) { z = Constant<value_float=0.0>() "
        "a = Constant<value_float=0.125>() c = Greater(x, z) m = Mul(x, a) y = Where(c, x, m) }",
        "agraph (float[2,3,4] x) => (float[2,3,4] y) <float[3,1] a = {0.5, 2, -1}, float[1] z = {0}> "
        "{ c = LessOrEqual(z, x) m = Mul(x, a) y = Where(c, x, m) }",
    )

    def read(self, reader: Reader, choice: _Choice) -> tuple[tuple[Value, ...], Any] | None:
        if choice.bound != 0 or choice.above != choice.x:
            return None
        for x, slope in operands(made_by(reader, choice.below, "Mul")):
            if x != choice.x or not keeps_shape(reader.type(x).shape, reader.type(slope).shape):
                continue
            if not reader.is_const(slope):
                # At 0 the left side is 0 * a, which is NaN if a is infinite.
                return None if choice.equal_below else ((x, slope), None)
            number = reader.val(slope).uniform
            return ((x, slope), None) if number is None else ((x,), number)
        return None

    def target(self, op: Op, region: Region, x: Val, slope: Val | None = None) -> Any:
        return op.LeakyRelu(x, alpha=region.data) if slope is None else op.PRelu(x, slope)


class ReplaceWhereByElu(_ReplaceWhere):
    """where(x < 0, a * (exp(x) - 1), x) -> elu(x, a)."""

    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { c = Less(x, 0.0) e = Exp(x) s = Sub(e, 1.0) m = Mul(0.5, s) "
        "y = Where(c, m, x) }",
        "(float[2,3] x) => (float[2,3] y) { c = Greater(x, 0.0) e = Exp(x) s = Add(e, -1.0) y = Where(c, x, s) }",
    )

    def read(self, reader: Reader, choice: _Choice) -> tuple[tuple[Value, ...], Any] | None:
        if choice.bound != 0 or choice.above != choice.x:
            return None
        alpha = _exponential_less_one(reader, choice.below, choice.x)
        return None if alpha is None else ((choice.x,), alpha)

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Elu(x, alpha=region.data)


class ReplaceWhereBySelu(_ReplaceWhere):
    """where(x < 0, g * (a * exp(x) - a), g * x) -> selu(x, a, g)."""

    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { c = Less(x, 0.0) e = Exp(x) m = Mul(1.5, e) s = Sub(m, 1.5) "
        "n = Mul(0.75, s) p = Mul(0.75, x) y = Where(c, n, p) }"
    )

    def read(self, reader: Reader, choice: _Choice) -> tuple[tuple[Value, ...], Any] | None:
        below = _exponential_less_one(reader, choice.below, choice.x)
        if choice.bound != 0 or below is None:
            return None
        for x, c in operands(made_by(reader, choice.above, "Mul")):
            gamma = number_of(reader, c, x)
            if x == choice.x and gamma:
                return (x,), (below / gamma, gamma)
        return None

    def target(self, op: Op, region: Region, x: Val) -> Any:
        alpha, gamma = region.data
        return op.Selu(x, alpha=alpha, gamma=gamma)


class ReplaceWhereByThresholdedRelu(_ReplaceWhere):
    """where(x > a, x, 0) -> thresholdedrelu(x, a)."""

    examples = graphs("(float[N,3] x) => (float[N,3] y) { c = Less(0.5, x) y = Where(c, x, 0.0) }")
    near_misses = graphs("(float[N,3] x) => (float[N,3] y) { c = LessOrEqual(x, 0.5) y = Where(c, 0.0, x) }")

    def read(self, reader: Reader, choice: _Choice) -> tuple[tuple[Value, ...], Any] | None:
        if (
            choice.above != choice.x
            or not choice.equal_below
            or not is_number(reader, choice.below, 0.0, choice.x)
        ):
            return None
        require(choice.nan_below, "NaN stays NaN")
        return (choice.x,), choice.bound

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.ThresholdedRelu(x, alpha=region.data)


class ReplaceWhereByShrink(_ReplaceWhere):
    """where(x < -l, x + b, where(x > l, x - b, 0)) -> shrink(x, l, b)."""

    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { c = Less(x, -0.5) p = Add(x, 0.25) m = Sub(x, 0.25) d = Less(0.5, x) "
        "i = Where(d, m, 0.0) y = Where(c, p, i) }"
    )

    def read(self, reader: Reader, choice: _Choice) -> tuple[tuple[Value, ...], Any] | None:
        inner = _choice(reader, reader.producer(choice.above))
        if inner is None or inner.x != choice.x or inner.bound != -choice.bound:
            return None
        if choice.equal_below or choice.nan_below or not inner.equal_below or not inner.nan_below:
            return None
        up = _shift(reader, choice.below, choice.x)
        down = _shift(reader, inner.above, choice.x)
        if up is None or down != -up or not is_number(reader, inner.below, 0.0, choice.x):
            return None
        return (choice.x,), (inner.bound, up)

    def target(self, op: Op, region: Region, x: Val) -> Any:
        bound, bias = region.data
        return op.Shrink(x, lambd=bound, bias=bias)


# Relu, Clip, PRelu without Where


class ReplaceMaxByClip(Rule, family="idioms"):
    """max(x, c) -> clip(x, c, inf)  for one number c."""

    proof = "numeric"
    relies_on = "clip(x, c, inf) = max(x, c) and clip(x, -inf, c) = min(x, c)"
    dtypes = WIDE
    shapes = "x[...]:float c[...]:const"

    def source(self, op: Op, x: Any, c: Any) -> Any:
        return op.Max(x, c)

    def where(self, x: Val, c: Val) -> None:
        number_for(c, x)

    def target(self, op: Op, x: Val, c: Val) -> Any:
        return op.Clip(x, c.uniform, math.inf)  # otherwise infinity would become a number


class ReplaceMinByClip(ReplaceMaxByClip):
    """min(x, c) -> clip(x, -inf, c)  for one number c."""

    def source(self, op: Op, x: Any, c: Any) -> Any:
        return op.Min(x, c)

    def target(self, op: Op, x: Val, c: Val) -> Any:
        return op.Clip(x, -math.inf, c.uniform)


class RemoveNoopMax(Rule, family="idioms"):
    """max(x, -inf) -> x,  min(x, inf) -> x,  clip(x, -inf, inf) -> x."""

    proof = "numeric"
    relies_on = "no number is below minus infinity or above infinity"
    shapes = "x[...]:float"
    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { n = Log(0.0) y = Max(n, x) }",
        "(float[2,3] x) => (float[2,3] y) { n = Reciprocal(0.0) y = Min(x, n) }",
        "(float[2,3,4] x) => (float[2,3,4] y) { l = Log(0.0) h = Reciprocal(0.0) y = Clip(x, l, h) }",
    )

    def source(self, op: Op, x: Any) -> Any:
        return op.either(op.Max(x, -math.inf), op.Min(x, math.inf), op.Clip(x, -math.inf, math.inf))

    def target(self, op: Op, x: Val) -> Any:
        return x


class ReplaceClipByRelu(Rule, family="idioms"):
    """clip(x, 0, inf) -> relu(x)."""

    proof = "numeric"
    relies_on = "relu(x) = max(x, 0)"
    dtypes = WIDE
    shapes = "x[...]:float a[]:const b[]:const"
    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { h = Reciprocal(0.0) y = Clip(x, 0.0, h) }",
        "(double[2,3] x) => (double[2,3] y) <double a = {0}> { h = Reciprocal(a) y = Clip(x, a, h) }",
    )

    def source(self, op: Op, x: Any, a: Any, b: Any) -> Any:
        return op.Clip(x, a, b)

    def where(self, a: Val, b: Val) -> None:
        require(b.uniform == math.inf, "there is an upper bound (one that is absent is a number)")
        require(a.uniform == 0, "the lower bound is not 0")

    def target(self, op: Op, x: Val) -> Any:
        return op.Relu(x)


class ReplacePReluByLeakyRelu(Rule, family="idioms"):
    """prelu(x, a) -> leakyrelu(x, a)  for one number a."""

    proof = "numeric"
    relies_on = "leakyrelu(x, a) = prelu(x, a)"
    dtypes = FLOAT
    shapes = "x[...]:float a[...]:const"

    def source(self, op: Op, x: Any, a: Any) -> Any:
        return op.PRelu(x, a)

    def where(self, x: Val, a: Val) -> None:
        number_for(a, x)

    def target(self, op: Op, x: Val, a: Val) -> Any:
        return op.LeakyRelu(x, alpha=a.uniform)


class FusePRelu(Rule, family="idioms"):
    """relu(x) - a * relu(-x) -> prelu(x, a), or leakyrelu(x, a) of a single number.

    The slope a must be constant. The sum of relu(x) and -a * relu(-x) is matched, too.
    """

    proof = "numeric"
    relies_on = "relu(x) - relu(-x) = x"
    dtypes = FLOAT
    shapes = "x[...]:float a[...]:const"
    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { p = Relu(x) n = Neg(x) r = Relu(n) m = Mul(r, [0.5, 0.25, -2]) "
        "y = Sub(p, m) }",
        "(float[2,3] x) => (float[2,3] y) { n = Neg(x) r = Relu(n) m = Mul(-0.125, r) p = Relu(x) y = Add(m, p) }",
    )

    def source(self, op: Op, x: Any, a: Any) -> Any:
        return op.any_of(("Add", "Sub"), "join")(op.Relu(x), op.Mul(a, op.Relu(op.Neg(x))))

    def where(self, x: Val, a: Val) -> None:
        profitable(keeps_shape(x.type.shape, a.type.shape), "the slope broadcasts x")

    def target(self, op: Op, m: Captures, x: Val, a: Val) -> Any:
        if a.uniform is not None:
            return op.LeakyRelu(x, alpha=a.uniform if m.join == "Sub" else -a.uniform)
        return op.PRelu(x, a if m.join == "Sub" else op.Neg(a))


class FuseLeakyReluFromMax(Rule, family="idioms"):
    """max(x, a * x) -> leakyrelu(x, a)  for 0 < a < 1."""

    proof = "numeric"
    relies_on = "a * x is the greater one just where x is negative"
    dtypes = FLOAT
    shapes = "x[...]:float a[...]:const"
    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { m = Mul(x, 0.125) y = Max(x, m) }",
        "(float[2,3] x) => (float[2,3] y) { m = Mul([0.5], x) y = Max(m, x) }",
    )

    def source(self, op: Op, x: Any, a: Any) -> Any:
        return op.Max(x, op.Mul(x, a))

    def where(self, x: Val, a: Val) -> None:
        require(0 < number_for(a, x) < 1, "the slope is not between 0 and 1")

    def target(self, op: Op, x: Val, a: Val) -> Any:
        return op.LeakyRelu(x, alpha=a.uniform)


# Sigmoid, Softplus, Tanh and their like


def _negative(op: Op, x: Any) -> Any:
    """The pattern of -x in a source."""
    return op.either(op.Neg(x), op.Mul(x, -1.0))


class FuseSigmoid(Rule, family="idioms"):
    """1 / (1 + exp(-x)) -> sigmoid(x)."""

    # ONNX Runtime's sigmoid is exact only to 1.7e-7 (relative to 1) for x below -9, and it is 0 for x below -18.
    assumes = "approximate"
    proof = "numeric"
    relies_on = "sigmoid(x) = 1 / (1 + exp(-x))"
    dtypes = WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        below = op.Add(1.0, op.Exp(_negative(op, x)))
        return op.either(op.Div(1.0, below), op.Reciprocal(below))

    def target(self, op: Op, x: Val) -> Any:
        return op.Sigmoid(x)


class ReplaceDivBySigmoid(Rule, family="idioms"):
    """a / (1 + exp(-x)) -> a * sigmoid(x).  With a = x it is SiLU.

    ONNX Runtime's sigmoid is 0 for x below about -18, so its product with an infinite a is NaN.
    """

    may_add_nonfinite = True
    # ONNX Runtime's sigmoid is exact only to 1.7e-7 (relative to 1) for x below -9, and it is 0 for x below -18.
    assumes = "approximate"
    proof = "numeric"
    relies_on = "sigmoid(x) = 1 / (1 + exp(-x))"
    dtypes = WIDE
    shapes = "a[...]:float x[...]:float"
    examples = (
        "agraph (float[N,3] x) => (float[N,3] y) { one = Constant<value_float=1.0>() n = Neg(x) e = Exp(n) "
        "s = Add(e, one) y = Div(x, s) }",
    )

    def source(self, op: Op, a: Any, x: Any) -> Any:
        return op.Div(a, op.Add(1.0, op.Exp(_negative(op, x))))

    def where(self, a: Val) -> None:
        profitable(a.uniform != 1.0, "it is a sigmoid")

    def target(self, op: Op, a: Val, x: Val) -> Any:
        return op.Mul(a, op.Sigmoid(x))


class FuseSoftplus(Rule, family="idioms"):
    """log(1 + exp(x)) -> softplus(x).

    Where exp(x) overflows, the left side is infinite, and the right side is x.
    """

    may_remove_nonfinite = True
    proof = "numeric"
    relies_on = "softplus(x) = log(1 + exp(x))"
    dtypes = FLOAT
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Log(op.Add(1.0, op.Exp(x)))

    def target(self, op: Op, x: Val) -> Any:
        return op.Softplus(x)


class FuseTanh(Rule, family="idioms"):
    """(exp(x) - exp(-x)) / (exp(x) + exp(-x)) -> tanh(x).

    Where an exponential overflows, the left side is NaN, and the right side is 1 or -1.
    """

    may_remove_nonfinite = True
    proof = "numeric"
    relies_on = "the definition of tanh by exponentials"
    dtypes = WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        up, down = op.Exp(x), op.Exp(_negative(op, x))
        return op.Div(op.Sub(up, down), op.Add(up, down))

    def target(self, op: Op, x: Val) -> Any:
        return op.Tanh(x)


class FuseSoftsign(Rule, family="idioms"):
    """x / (1 + |x|) -> softsign(x)."""

    dtypes = FLOAT
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Div(x, op.Add(1.0, op.Abs(x)))

    def target(self, op: Op, x: Val) -> Any:
        return op.Softsign(x)


class FuseHardSwishFromScaled(Rule, family="idioms"):
    """x * clip(x + 3, 0, 6) * (1/6) -> x * hardsigmoid(x, 1/6, 1/2)  with the factors in any order."""

    proof = "numeric"
    relies_on = "hardsigmoid(x) = clip(x / 6 + 1/2, 0, 1)"
    dtypes = FLOAT
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        gate = op.Clip(op.Add(x, 3.0), 0.0, 6.0)
        return op.either(*(
            whole
            for a, b in ((x, gate), (gate, x))
            for whole in (
                op.Div(op.Mul(a, b), 6.0), op.Mul(op.Mul(a, b), 1 / 6),
                op.Mul(a, op.Div(b, 6.0)), op.Mul(a, op.Mul(b, 1 / 6)),
            )
        ))  # fmt: skip

    def target(self, op: Op, x: Val) -> Any:
        return op.Mul(x, op.HardSigmoid(x, alpha=float(np.float32(1 / 6)), beta=0.5))


def _polynomial(reader: Reader, value: Value, x: Value, depth: int = 6) -> dict[int, float] | None:
    """The coefficients of a value by power of x, if the value is a polynomial of x; else None."""
    if value == x:
        return {1: 1.0}
    node = made_by(reader, value, "Add", "Mul", "Pow", "Div") if depth else None
    if node is None:
        return None
    a, b = node.inputs
    exponent = number_of(reader, b, a) if node.op == "Pow" else None
    coefficients = _coefficients(reader, a, b, x, depth)
    if coefficients is None or (node.op == "Pow" and (exponent not in (2.0, 3.0) or len(coefficients) != 1)):
        return None
    if exponent is not None:
        return {p * int(exponent): c ** int(exponent) for p, c in coefficients.items()}
    right = _coefficients(reader, b, a, x, depth)
    if right is None or (node.op == "Div" and not (right.keys() == {0} and right[0])):
        return None
    terms = [*coefficients.items(), *right.items()]
    if node.op != "Add":
        terms = [
            (p + q, k / m if node.op == "Div" else k * m)
            for p, k in coefficients.items()
            for q, m in right.items()
        ]
    out: dict[int, float] = {}
    for power, factor in terms:
        out[power] = out.get(power, 0.0) + factor
    return out


def _coefficients(
    reader: Reader, value: Value, partner: Value, x: Value, depth: int
) -> dict[int, float] | None:
    """The coefficients of one operand of an operator: a number, or a polynomial of x. `partner` is the other
    operand.
    """
    number = number_of(reader, value, partner)
    return _polynomial(reader, value, x, depth - 1) if number is None else {0: number}


class FuseTanhGeluOfPolynomial(RegionRule, family="idioms"):
    """x * 0.5 * (1 + tanh(p(x))) -> gelu(x, tanh)  for p(x) = sqrt(2/pi) * (x + 0.044715 * x^3) written in any way."""

    proof = "numeric"
    relies_on = "the definition of gelu by tanh"
    dtypes = FLOAT
    anchors = ("Tanh",)
    reads_from = ("Mul", "Add", "Div")
    examples = graphs(
        "(float[N,4] x) => (float[N,4] y) { a = Mul(0.044715, x) b = Mul(x, a) d = Mul(x, b) e = Add(x, d) "
        "f = Mul(0.7978845608, e) t = Tanh(f) u = Add(1.0, t) v = Mul(0.5, u) y = Mul(x, v) }",
        "(float[2,3] x) => (float[2,3] y) { p = Pow(x, 3.0) a = Mul(p, 0.0356774081) b = Mul(x, 0.7978845608) "
        "f = Add(a, b) t = Tanh(f) u = Add(t, [1.0]) w = Mul(x, 0.5) y = Mul(u, w) }",
        "(float[2,3] x) => (float[2,3] y) { s = Mul(x, x) a = Mul(s, 0.0356774081) b = Add(0.7978845608, a) "
        "f = Mul(b, x) t = Tanh(f) u = Add(t, 1.0) w = Mul(x, 0.5) y = Mul(u, w) }",
        "(float[2,3] x) => (float[2,3] y) { s = Pow(x, 2.0) a = Mul(s, x) b = Mul(0.044715, a) g = Add(b, x) "
        "f = Div(g, 1.2533141373) t = Tanh(f) u = Add(t, 1.0) w = Mul(x, u) y = Mul(w, 0.5) }",
        "(float[2,3] x) => (float[2,3] y) { p = Pow(x, 3.0) a = Mul(p, 0.0356774081) b = Mul(x, 0.3989422804) "
        "d = Add(b, b) f = Add(a, d) t = Tanh(f) u = Add(t, 1.0) w = Mul(x, 0.5) y = Mul(u, w) }",
    )
    near_misses = graphs(
        "(float[2,3] x) => (float[2,3] y) { p = Pow(x, 4.0) a = Mul(p, 0.0356774081) b = Mul(x, 0.7978845608) "
        "f = Add(a, b) t = Tanh(f) u = Add(t, 1.0) w = Mul(x, 0.5) y = Mul(u, w) }",
        "(float[2,3] x) => (float[2,3] y) { p = Pow(x, 5.0) q = Mul(p, 0.0356774081) a = Div(q, p) "
        "d = Div(0.7978845608, x) b = Mul(x, 0.7978845608) g = Add(a, b) f = Add(g, d) t = Tanh(f) u = Add(t, 1.0) "
        "w = Mul(x, 0.5) y = Mul(u, w) }",
        "(float[2,3] x) => (float[2,3] y) { a = Mul(x, 0.188884642) q = Add(a, 0.893243841) p = Pow(q, 2.0) "
        "f = Mul(x, p) t = Tanh(f) u = Add(t, 1.0) w = Mul(x, 0.5) y = Mul(u, w) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if not self._shifted(reader, node.outputs[0]):
            return None
        for x in self._leaves(reader, node.inputs[0]):
            polynomial = _polynomial(reader, node.inputs[0], x)
            root = math.sqrt(2 / math.pi)
            if polynomial is None or set(polynomial) != {1, 3}:
                continue
            if not math.isclose(polynomial[1], root, rel_tol=1e-6):
                continue
            require(math.isclose(polynomial[3], root * 0.044715, rel_tol=1e-6), "the cube has another factor")
            out = self._product(reader, node.outputs[0], x)
            if out is not None:
                return Region((out,), (x,), between(reader, out, (x,)))
        return None

    @staticmethod
    def _leaves(reader: Reader, value: Value) -> list[Value]:
        """The values x of which `value` may be a polynomial."""
        leaves: dict[Value, None] = {}
        work = [(value, 0)]
        while work:
            at, depth = work.pop()
            leaves[at] = None
            node = made_by(reader, at, "Add", "Mul", "Pow", "Div") if depth < 6 else None
            if node is not None:
                work.extend((v, depth + 1) for v in node.inputs if not reader.is_const(v))
        return list(leaves)

    @staticmethod
    def _shifted(reader: Reader, at: Value) -> Value | None:
        """The value 1 + at, if the only reader of `at` computes it; else None."""
        step = only_reader(reader, at)
        if step is None or step.op != "Add" or not any(is_number(reader, v, 1.0, at) for v in step.inputs):
            return None
        return step.outputs[0]

    @classmethod
    def _product(cls, reader: Reader, at: Value, x: Value) -> Value | None:
        """The value 0.5 * x * (1 + at), if the only readers of `at` and of the values after it compute it; else
        None.
        """
        shifted = cls._shifted(reader, at)
        if shifted is None:
            return None
        at, power, factor = shifted, 0, 1.0
        while (step := only_reader(reader, at)) is not None and step.op == "Mul":
            cofactor = step.inputs[0] if step.inputs[1] == at else step.inputs[1]
            number = number_of(reader, cofactor, at)
            term = {0: number} if number is not None else _polynomial(reader, cofactor, x)
            if term is None or len(term) != 1:
                return None
            ((p, c),) = term.items()
            power, factor, at = power + p, factor * c, step.outputs[0]
            if power == 1 and math.isclose(factor, 0.5, rel_tol=1e-6):
                return at
        return None

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Gelu(x, approximate="tanh")


# Gelu


def _halves(op: Op, x: Any, gate: Any) -> Any:
    """The pattern of x * gate / 2 in a source, with the factors in any order."""
    half = op.either(op.Mul(x, 0.5), op.Div(x, 2.0))
    return op.either(op.Mul(half, gate), op.Mul(op.Mul(x, gate), 0.5), op.Mul(x, op.Mul(gate, 0.5)))


class FuseGelu(Rule, family="normalisation"):
    """x * 0.5 * (1 + erf(x / sqrt(2))) -> gelu(x), the factors in any order."""

    proof = "numeric"
    relies_on = "gelu(x) = x (1 + erf(x / sqrt 2)) / 2, with sqrt 2 as float32 rounds it"
    dtypes = FLOAT
    shapes = "x[...]:float"
    examples = graphs(
        "(float[N,4] x) => (float[N,4] y) { a = Div(x, 1.4142135623730951) b = Erf(a) c = Add(b, 1.0) d = Mul(x, c) "
        "y = Mul(d, 0.5) }",
        "(float[N,4] x) => (float[N,4] y) { a = Mul(x, 0.7071067811865476) b = Erf(a) c = Add(1.0, b) "
        "d = Mul(x, 0.5) y = Mul(d, c) }",
    )
    near_misses = (
        "agraph (float[N,4] x) => (float[N,4] y) { r = Constant<value_float=1.4142135623730951>() one = "
        "Constant<value_float=1.0>() half = Constant<value_float=0.5>() a = Div(x, r) b = Erf(a) c = "
        "Add(b, one) d = Mul(x, c) e = Mul(x, half) y = Mul(d, e) }",
    )

    def source(self, op: Op, x: Any) -> Any:
        scaled = op.either(op.Div(x, math.sqrt(2)), op.Mul(x, math.sqrt(0.5)))
        return _halves(op, x, op.Add(op.Erf(scaled), 1.0))

    def target(self, op: Op, x: Val) -> Any:
        return op.Gelu(x)


class FuseTanhGelu(Rule, family="normalisation"):
    """x * 0.5 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3))) -> gelu(x, tanh), the factors in any order."""

    proof = "numeric"
    relies_on = "the approximation of gelu by tanh, with its constants as float32 rounds them"
    dtypes = FLOAT
    shapes = "x[...]:float"
    examples = graphs(
        "(float[N,4] x) => (float[N,4] y) { p = Pow(x, 3.0) q = Mul(p, 0.044715) s = Add(x, q) "
        "u = Mul(s, 0.7978845608028654) t = Tanh(u) v = Add(t, 1.0) h = Mul(x, 0.5) y = Mul(h, v) }",
        "(float[N,4] x) => (float[N,4] y) { a = Mul(x, x) p = Mul(a, x) q = Mul(0.044715, p) s = Add(x, q) "
        "u = Mul(0.7978845608028654, s) t = Tanh(u) v = Add(1.0, t) h = Mul(0.5, v) y = Mul(x, h) }",
    )

    def source(self, op: Op, x: Any) -> Any:
        square = op.either(op.Mul(x, x), op.Pow(x, 2.0))
        cube = op.either(op.Pow(x, 3.0), op.Mul(x, square))
        inner = op.Mul(op.Add(x, op.Mul(cube, 0.044715)), math.sqrt(2 / math.pi))
        return _halves(op, x, op.Add(op.Tanh(inner), 1.0))

    def target(self, op: Op, x: Val) -> Any:
        return op.Gelu(x, approximate="tanh")


# HardSigmoid and HardSwish


_SIXTH = float(np.float32(1.0 / 6.0))


class FuseHardSigmoid(Rule, family="normalisation"):
    """clip(x + 3, 0, 6) / 6 -> hardsigmoid(x, 1/6, 1/2)."""

    proof = "numeric"
    relies_on = "hardsigmoid(x) = max(0, min(1, a x + b)), scaling an interval scales its bounds"
    dtypes = FLOAT
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Div(op.Clip(op.Add(x, 3.0), 0.0, 6.0), 6.0)

    def target(self, op: Op, x: Val) -> Any:
        return op.HardSigmoid(x, alpha=_SIXTH, beta=0.5)


class FuseScaledHardSigmoid(FuseHardSigmoid):
    """clip(x + 3, 0, 6) * (1/6) -> hardsigmoid(x, 1/6, 1/2)."""

    def source(self, op: Op, x: Any) -> Any:
        return op.Mul(op.Clip(op.Add(x, 3.0), 0.0, 6.0), 1 / 6)


class FuseHardSwishFromClip(FuseHardSigmoid):
    """x * clip(x + 3, 0, 6) / 6 -> x * hardsigmoid(x, 1/6, 1/2)."""

    def source(self, op: Op, x: Any) -> Any:
        return op.Div(op.Mul(x, op.Clip(op.Add(x, 3.0), 0.0, 6.0)), 6.0)

    def target(self, op: Op, x: Val) -> Any:
        return op.Mul(x, super().target(op, x))


class FuseAffineHardSigmoid(Rule, family="normalisation"):
    """clip(x * a + b, 0, 1) -> hardsigmoid(x, a, b)."""

    proof = "numeric"
    relies_on = "hardsigmoid(x) = max(0, min(1, a x + b))"
    dtypes = FLOAT
    shapes = "x[...]:float a[]:const b[]:const | x[...]:float a[1]:const b[1]:const"

    def source(self, op: Op, x: Any, a: Any, b: Any) -> Any:
        return op.Clip(op.Add(op.Mul(x, a), b), 0.0, 1.0)

    def where(self, x: Val, a: Val) -> None:
        require(x.rank >= a.rank, "it adds a dimension")

    def target(self, op: Op, x: Val, a: Val, b: Val) -> Any:
        return op.HardSigmoid(x, alpha=a.scalar, beta=b.scalar)


class FuseHardSwish(Rule, family="normalisation"):
    """x * hardsigmoid(x, 1/6, 1/2) -> hardswish(x)."""

    proof = "numeric"
    relies_on = "hardswish(x) = x hardsigmoid(x, 1/6, 1/2), with 1/6 as float32 rounds it"
    dtypes = FLOAT
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Mul(x, op.HardSigmoid(x, alpha=_SIXTH))

    def target(self, op: Op, x: Val) -> Any:
        return op.HardSwish(x)


class SplitHardSwish(Rule, family="normalisation"):
    """hardswish(x) -> x * hardsigmoid(x, 1/6, 1/2)."""

    proof = "numeric"
    relies_on = "hardswish(x) = x hardsigmoid(x, 1/6, 1/2), with 1/6 as float32 rounds it"
    dtypes = FLOAT
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.HardSwish(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Mul(x, op.HardSigmoid(x, alpha=_SIXTH))


def _bounds(x: Val, low: Val | None, high: Val | None) -> tuple[float, float]:
    """The bounds of a Clip. For an absent bound the type's least or greatest number is returned, not infinity."""
    highest = float(ml_dtypes.finfo(x.storage).max)  # type: ignore[no-untyped-call]
    return (-highest if low is None else low.scalar, highest if high is None else high.scalar)


class MergeClips(Rule, family="identity"):
    """clip(clip(x, a, b), c, d) -> clip(x, clip(a, c, d), clip(b, c, d))."""

    proof = "numeric"
    relies_on = (
        "max and min are those of an ordered set; a lower bound above the upper one means the upper one"
    )
    optional: ClassVar[tuple[str, ...]] = ("a", "b", "c", "d")
    shapes = "x[...]:float a[]:const b[]:const c[]:const d[]:const"

    def source(self, op: Op, x: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return op.Clip(op.Clip(x, a, b), c, d)

    def target(self, op: Op, x: Val, a: Val | None, b: Val | None, c: Val | None, d: Val | None) -> Any:
        (low, high), (low2, high2) = _bounds(x, a, b), _bounds(x, c, d)
        return _clip(op, x, float(np.clip(low, low2, high2)), float(np.clip(high, low2, high2)))


def _clip(op: Op, x: Val, low: float, high: float) -> Any:
    """A Clip that leaves out bounds which equal the default."""
    lowest, highest = _bounds(x, None, None)
    return op.Clip(x, None if low == lowest else low, None if high == highest else high)


class _ClipAndRelu(Rule, family="identity"):
    """A rule for a Clip and a Relu, one after the other."""

    proof = "numeric"
    relies_on = MergeClips.relies_on
    optional = ("a", "b")
    shapes = "x[...]:float a[]:const b[]:const"


class MergeReluIntoClip(_ClipAndRelu):
    """clip(relu(x), a, b) -> clip(x, clip(0, a, b), clip(inf, a, b))."""

    def source(self, op: Op, x: Any, a: Any, b: Any) -> Any:
        return op.Clip(op.Relu(x), a, b)

    def target(self, op: Op, x: Val, a: Val | None, b: Val | None) -> Any:
        low, high = _bounds(x, a, b)
        return _clip(op, x, float(np.clip(0.0, low, high)), high)


class MergeClipIntoRelu(_ClipAndRelu):
    """relu(clip(x, a, b)) -> clip(x, max(a, 0), max(b, 0))."""

    def source(self, op: Op, x: Any, a: Any, b: Any) -> Any:
        return op.Relu(op.Clip(x, a, b))

    def target(self, op: Op, x: Val, a: Val | None, b: Val | None) -> Any:
        low, high = _bounds(x, a, b)
        return _clip(op, x, max(low, 0.0), max(high, 0.0))
