"""Operators spelt out of others, by hand or by an exporter, back to the operators themselves; simpler spellings.

Only operators that ONNX Runtime has a CPU kernel for: Mish, GroupNormalization and Swish are taken apart again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.axes import axis_of, fronts, ints_input, inverse, is_identity, rank_of, same_dims
from rewrite_rules.elementwise import (
    BROADCAST,
    is_number,
    is_unary,
    keeps_shape,
    made_by,
    number_of,
    only_reader,
    operands,
    square_of,
)
from rewrite_rules.reshape import VIEWS
from rewrite_rules.slices import piece
from xrlflow.ir import ABSENT, FLOATS, INTEGERS, Attrs, Dim, DType, Node, Value
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, accurate, require, worthwhile

_FLOAT = frozenset({DType.FLOAT})
_WIDE = frozenset({DType.FLOAT, DType.DOUBLE})


# How regions are read


def _between(reader: Reader, out: Value, inputs: Collection[Value]) -> tuple[Node, ...]:
    """The nodes that make `out` from `inputs` and constants; an inner value may not be read elsewhere.

    How the shape of a Reshape or Expand is computed is no part of it.
    """
    nodes: dict[Value, Node] = {}
    work = [out]
    while work:
        value = work.pop()
        if value == ABSENT or value in inputs:
            continue
        node = reader.producer(value)
        if node is None or node.const or node.id in nodes:
            continue
        nodes[node.id] = node
        work.extend(node.inputs[:1] if node.op in _SEEN else node.inputs)
    for node in nodes.values():
        for value in node.outputs:
            if value != out:
                inside = not reader.is_output(value) and all(u.id in nodes for u in reader.users(value))
                worthwhile(inside, "an inner value is read elsewhere")
    return tuple(nodes.values())


# How the result of a reduction is seen in the rank of what it was reduced from.
_SEEN = (*VIEWS, "Expand")


def _unseen(reader: Reader, value: Value) -> Value:
    """What a value is a view of."""
    while (node := made_by(reader, value, *_SEEN)) is not None:
        value = node.inputs[0]
    return value


def _axes(reader: Reader, node: Node) -> tuple[int, ...] | None:
    """The axes of a reduction, from the front, in order; None where they are not known."""
    rank = reader.type(node.inputs[0]).rank
    axes = ints_input(reader, node, 1)
    if rank is None or (not axes and node.attrs.get("noop_with_empty_axes")):
        return None
    return tuple(sorted(fronts(axes or tuple(range(rank)), rank)))


# ONNX Runtime's sums of squares and of magnitudes add in order, its ReduceSum adds in a tree: of so many elements the
# former have 3 times the error, of 1,024 they have 9 times, of a million 22.
_IN_ORDER = 64


def _fits(reader: Reader, value: Value, x: Value, axes: tuple[int, ...]) -> bool:
    """Whether a value, a view of x reduced over the axes, has x's dimensions with 1 in their place.

    Then an Expand on the way repeats nothing: there are no more elements than before it.
    """
    shape = reader.type(x).shape or ()
    return same_dims(reader.type(value).shape, [1 if i in axes else d for i, d in enumerate(shape)])


def _reduced(reader: Reader, value: Value, x: Value, op: str) -> tuple[int, ...] | None:
    """The axes, if a value is x reduced over them, and has 1 in their place."""
    node = made_by(reader, _unseen(reader, value), op)
    axes = None if node is None or node.inputs[0] != x else _axes(reader, node)
    return axes if axes is not None and _fits(reader, value, x, axes) else None


def _number_beside(c: Val, x: Val) -> float:
    """The number that a constant is everywhere; refuses one that is none, or that x would broadcast to."""
    number = c.uniform
    require(number is not None, "the constant is not one number")
    require(keeps_shape(x.type.shape, c.type.shape), "it may broadcast")
    assert number is not None
    return number


# Activations by Where


@dataclass(frozen=True, slots=True)
class _Choice:
    """where(x < bound, below, above), or the same by another comparison.

    `equal_below`: at the bound itself `below` is taken; `nan_below`: where x is NaN.
    """

    x: Value
    bound: float
    below: Value
    above: Value
    equal_below: bool
    nan_below: bool


# Whether it is true of smaller numbers, and of equal ones.
_COMPARISONS = {
    "Less": (True, False),
    "LessOrEqual": (True, True),
    "Greater": (False, False),
    "GreaterOrEqual": (False, True),
}


def _choice(reader: Reader, node: Node | None) -> _Choice | None:
    """A Where as a choice by the sign of x - bound."""
    if node is None or node.op != "Where":
        return None
    condition, yes, no = node.inputs
    compare = made_by(reader, condition, *_COMPARISONS)
    if compare is None:
        return None
    less, equal = _COMPARISONS[compare.op]
    x, c = compare.inputs
    if reader.is_const(x):
        x, c, less = c, x, not less
    bound = number_of(reader, c, x)
    if bound is None:
        return None
    below, above = (yes, no) if less else (no, yes)
    return _Choice(x, bound, below, above, equal == less, not less)


def _exponential(reader: Reader, value: Value, x: Value) -> float | None:
    """c, if a value is c * exp(x)."""
    node = made_by(reader, value, "Exp", "Mul")
    if node is None:
        return None
    if node.op == "Exp":
        return 1.0 if node.inputs[0] == x else None
    for inner, c in operands(node):
        number = number_of(reader, c, inner)
        if number is not None:
            found = _exponential(reader, inner, x)
            return None if found is None else found * number
    return None


def _exponential_less_one(reader: Reader, value: Value, x: Value) -> float | None:
    """c, if a value is c * (exp(x) - 1), the product taken apart or not."""
    node = made_by(reader, value, "Add", "Sub", "Mul")
    if node is None:
        return None
    for inner, c in operands(node):
        number = number_of(reader, c, inner)
        if number is None:
            continue
        if node.op == "Mul":
            found = _exponential_less_one(reader, inner, x)
            return None if found is None else found * number
        found = _exponential(reader, inner, x)
        less = number if node.op == "Sub" else -number
        return found if found is not None and math.isclose(found, less, rel_tol=1e-6) else None
    return None


def _shift(reader: Reader, value: Value, x: Value) -> float | None:
    """c, if a value is x + c."""
    if value == x:
        return 0.0
    node = made_by(reader, value, "Add", "Sub")
    for inner, c in operands(node):
        number = number_of(reader, c, inner)
        if inner == x and number is not None and node is not None:
            return number if node.op == "Add" else -number
    return None


class _ReplaceWhere(RegionRule, family="idioms"):
    """An activation with two branches, chosen by Where."""

    proof = "numeric"
    relies_on = "the definition by cases"
    dtypes = _FLOAT
    anchors = ("Where",)
    reads_from = tuple(_COMPARISONS)

    # The activation's inputs, and its parameters.
    read: Callable[[Reader, _Choice], tuple[tuple[Value, ...], Any] | None]

    def find(self, reader: Reader, node: Node) -> Region | None:
        choice = _choice(reader, node)
        found = None if choice is None else self.read(reader, choice)
        if found is None:
            return None
        inputs, data = found
        return Region(node.outputs, inputs, _between(reader, node.outputs[0], inputs), data)


class ReplaceWhereByRelu(_ReplaceWhere):
    """where(x < 0, 0, x) -> relu(x)  for any comparison that comes to this, and gives x where x is NaN."""

    dtypes = _WIDE
    examples = (
        "agraph (float[N,3] x) => (float[N,3] y) <float z = {0}> { c = Less(x, z) y = Where(c, z, x) }",
        "agraph (float[2,3] x) => (float[2,3] y) <float z = {0}> { c = LessOrEqual(x, z) y = Where(c, z, x) }",
        "agraph (double[N] x) => (double[N] y) <double[1] z = {0}> { c = GreaterOrEqual(z, x) y = Where(c, z, x) }",
    )
    near_misses = (
        "agraph (float[N,3] x) => (float[N,3] y) <float z = {0}> { c = Greater(x, z) y = Where(c, x, z) }",
    )

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
                # At 0 the left side is 0 * a, NaN for an infinite one.
                return None if choice.equal_below else ((x, slope), None)
            number = reader.val(slope).uniform
            return ((x, slope), None) if number is None else ((x,), number)
        return None

    def target(self, op: Op, region: Region, x: Val, slope: Val | None = None) -> Any:
        return op.LeakyRelu(x, alpha=region.data) if slope is None else op.PRelu(x, slope)


class ReplaceWhereByElu(_ReplaceWhere):
    """where(x < 0, a * (exp(x) - 1), x) -> elu(x, a)."""

    examples = (
        "agraph (float[N,3] x) => (float[N,3] y) <float z = {0}, float one = {1}, float a = {0.5}> { c = Less(x, z) "
        "e = Exp(x) s = Sub(e, one) m = Mul(a, s) y = Where(c, m, x) }",
        "agraph (float[2,3] x) => (float[2,3] y) <float z = {0}, float one = {-1}> { c = Greater(x, z) e = Exp(x) "
        "s = Add(e, one) y = Where(c, x, s) }",
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

    examples = (
        "agraph (float[N,3] x) => (float[N,3] y) <float z = {0}, float a = {1.5}, float g = {0.75}> "
        "{ c = Less(x, z) e = Exp(x) m = Mul(a, e) s = Sub(m, a) n = Mul(g, s) p = Mul(g, x) y = Where(c, n, p) }",
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

    examples = (
        "agraph (float[N,3] x) => (float[N,3] y) <float a = {0.5}, float z = {0}> { c = Less(a, x) "
        "y = Where(c, x, z) }",
    )
    near_misses = (
        "agraph (float[N,3] x) => (float[N,3] y) <float a = {0.5}, float z = {0}> "
        "{ c = LessOrEqual(x, a) y = Where(c, z, x) }",
    )

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

    examples = (
        "agraph (float[N,3] x) => (float[N,3] y) <float l = {0.5}, float n = {-0.5}, float b = {0.25}, "
        "float z = {0}> { c = Less(x, n) p = Add(x, b) m = Sub(x, b) d = Less(l, x) i = Where(d, m, z) "
        "y = Where(c, p, i) }",
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
    dtypes = _WIDE
    shapes = "x[...]:float c[...]:const"

    def source(self, op: Op, x: Any, c: Any) -> Any:
        return op.Max(x, c)

    def where(self, x: Val, c: Val) -> None:
        _number_beside(c, x)

    def target(self, op: Op, x: Val, c: Val) -> Any:
        return op.Clip(x, c.uniform, math.inf)  # without an upper bound infinity would become a number


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
    examples = (
        "agraph (float[N,3] x) => (float[N,3] y) <float z = {0}> { n = Log(z) y = Max(n, x) }",
        "agraph (float[2,3] x) => (float[2,3] y) <float z = {0}> { n = Reciprocal(z) y = Min(x, n) }",
        "agraph (float[2,3,4] x) => (float[2,3,4] y) <float z = {0}> { l = Log(z) h = Reciprocal(z) "
        "y = Clip(x, l, h) }",
    )

    def source(self, op: Op, x: Any) -> Any:
        return op.either(op.Max(x, -math.inf), op.Min(x, math.inf), op.Clip(x, -math.inf, math.inf))

    def target(self, op: Op, x: Val) -> Any:
        return x


class ReplaceClipByRelu(Rule, family="idioms"):
    """clip(x, 0, inf) -> relu(x)."""

    proof = "numeric"
    relies_on = "relu(x) = max(x, 0)"
    dtypes = _WIDE
    shapes = "x[...]:float a[]:const b[]:const"
    examples = (
        "agraph (float[N,3] x) => (float[N,3] y) <float z = {0}> { h = Reciprocal(z) y = Clip(x, z, h) }",
        "agraph (double[2,3] x) => (double[2,3] y) <double a = {0}> { h = Reciprocal(a) y = Clip(x, a, h) }",
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
    dtypes = _FLOAT
    shapes = "x[...]:float a[...]:const"

    def source(self, op: Op, x: Any, a: Any) -> Any:
        return op.PRelu(x, a)

    def where(self, x: Val, a: Val) -> None:
        _number_beside(a, x)

    def target(self, op: Op, x: Val, a: Val) -> Any:
        return op.LeakyRelu(x, alpha=a.uniform)


class FusePRelu(Rule, family="idioms"):
    """relu(x) - a * relu(-x) -> prelu(x, a), or leakyrelu(x, a) of a single number.

    The slope is constant; the sum of relu(x) and -a * relu(-x) alike.
    """

    proof = "numeric"
    relies_on = "relu(x) - relu(-x) = x"
    dtypes = _FLOAT
    shapes = "x[...]:float a[...]:const"
    examples = (
        "agraph (float[N,3] x) => (float[N,3] y) <float[3] a = {0.5, 0.25, -2}> "
        "{ p = Relu(x) n = Neg(x) r = Relu(n) m = Mul(r, a) y = Sub(p, m) }",
        "agraph (float[2,3] x) => (float[2,3] y) <float a = {-0.125}> "
        "{ n = Neg(x) r = Relu(n) m = Mul(a, r) p = Relu(x) y = Add(m, p) }",
    )

    def source(self, op: Op, x: Any, a: Any) -> Any:
        return op.any_of(("Add", "Sub"), "join")(op.Relu(x), op.Mul(a, op.Relu(op.Neg(x))))

    def where(self, x: Val, a: Val) -> None:
        worthwhile(keeps_shape(x.type.shape, a.type.shape), "the slope broadcasts x")

    def target(self, op: Op, m: Captures, x: Val, a: Val) -> Any:
        if a.uniform is not None:
            return op.LeakyRelu(x, alpha=a.uniform if m.join == "Sub" else -a.uniform)
        return op.PRelu(x, a if m.join == "Sub" else op.Neg(a))


class FuseLeakyReluFromMax(Rule, family="idioms"):
    """max(x, a * x) -> leakyrelu(x, a)  for 0 < a < 1."""

    proof = "numeric"
    relies_on = "a * x is the greater one just where x is negative"
    dtypes = _FLOAT
    shapes = "x[...]:float a[...]:const"
    examples = (
        "agraph (float[N,3] x) => (float[N,3] y) <float a = {0.125}> { m = Mul(x, a) y = Max(x, m) }",
        "agraph (float[2,3] x) => (float[2,3] y) <float[1] a = {0.5}> { m = Mul(a, x) y = Max(m, x) }",
    )

    def source(self, op: Op, x: Any, a: Any) -> Any:
        return op.Max(x, op.Mul(x, a))

    def where(self, x: Val, a: Val) -> None:
        require(0 < _number_beside(a, x) < 1, "the slope is not between 0 and 1")

    def target(self, op: Op, x: Val, a: Val) -> Any:
        return op.LeakyRelu(x, alpha=a.uniform)


# Sigmoid, Softplus, Tanh and their like


def _negative(op: Op, x: Any) -> Any:
    """-x, in a source."""
    return op.either(op.Neg(x), op.Mul(x, -1.0))


class FuseSigmoid(Rule, family="idioms"):
    """1 / (1 + exp(-x)) -> sigmoid(x)."""

    # Of x below -9 the sigmoid is exact to 1.7e-7 of 1, and no more; below -18 it is 0.
    assumes = "approximate"
    proof = "numeric"
    relies_on = "sigmoid(x) = 1 / (1 + exp(-x))"
    dtypes = _WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        below = op.Add(1.0, op.Exp(_negative(op, x)))
        return op.either(op.Div(1.0, below), op.Reciprocal(below))

    def target(self, op: Op, x: Val) -> Any:
        return op.Sigmoid(x)


class ReplaceDivBySigmoid(Rule, family="idioms"):
    """a / (1 + exp(-x)) -> a * sigmoid(x).  With a = x it is SiLU.

    ONNX Runtime's sigmoid of less than -18 or so is 0, and the product with an infinite a is NaN.
    """

    spreads = True
    # Of x below -9 the sigmoid is exact to 1.7e-7 of 1, and no more; below -18 it is 0.
    assumes = "approximate"
    proof = "numeric"
    relies_on = "sigmoid(x) = 1 / (1 + exp(-x))"
    dtypes = _WIDE
    shapes = "a[...]:float x[...]:float"
    examples = (
        "agraph (float[N,3] x) => (float[N,3] y) { one = Constant<value_float=1.0>() n = Neg(x) e = Exp(n) "
        "s = Add(e, one) y = Div(x, s) }",
    )

    def source(self, op: Op, a: Any, x: Any) -> Any:
        return op.Div(a, op.Add(1.0, op.Exp(_negative(op, x))))

    def where(self, a: Val) -> None:
        worthwhile(a.uniform != 1.0, "it is a sigmoid")

    def target(self, op: Op, a: Val, x: Val) -> Any:
        return op.Mul(a, op.Sigmoid(x))


class FuseSoftplus(Rule, family="idioms"):
    """log(1 + exp(x)) -> softplus(x).

    Where exp(x) overflows, the left side is infinite, and the right side x.
    """

    mends = True
    proof = "numeric"
    relies_on = "softplus(x) = log(1 + exp(x))"
    dtypes = _FLOAT
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Log(op.Add(1.0, op.Exp(x)))

    def target(self, op: Op, x: Val) -> Any:
        return op.Softplus(x)


class FuseTanh(Rule, family="idioms"):
    """(exp(x) - exp(-x)) / (exp(x) + exp(-x)) -> tanh(x).

    Where an exponential overflows, the left side is NaN, and the right side 1 or -1.
    """

    mends = True
    proof = "numeric"
    relies_on = "the definition of tanh by exponentials"
    dtypes = _WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        up, down = op.Exp(x), op.Exp(_negative(op, x))
        return op.Div(op.Sub(up, down), op.Add(up, down))

    def target(self, op: Op, x: Val) -> Any:
        return op.Tanh(x)


class FuseSoftsign(Rule, family="idioms"):
    """x / (1 + |x|) -> softsign(x)."""

    dtypes = _FLOAT
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Div(x, op.Add(1.0, op.Abs(x)))

    def target(self, op: Op, x: Val) -> Any:
        return op.Softsign(x)


class FuseHardSwishFromScaled(Rule, family="idioms"):
    """x * clip(x + 3, 0, 6) * (1/6) -> x * hardsigmoid(x, 1/6, 1/2)  with the factors in any order."""

    proof = "numeric"
    relies_on = "hardsigmoid(x) = clip(x / 6 + 1/2, 0, 1)"
    dtypes = _FLOAT
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
    """The coefficients by power, if a value is a polynomial of x."""
    if value == x:
        return {1: 1.0}
    node = made_by(reader, value, "Add", "Mul", "Pow", "Div") if depth else None
    if node is None:
        return None
    a, b = node.inputs
    exponent = number_of(reader, b, a) if node.op == "Pow" else None
    left = _coefficients(reader, a, b, x, depth)
    if left is None or (node.op == "Pow" and (exponent not in (2.0, 3.0) or len(left) != 1)):
        return None
    if exponent is not None:
        return {p * int(exponent): c ** int(exponent) for p, c in left.items()}
    right = _coefficients(reader, b, a, x, depth)
    if right is None or (node.op == "Div" and not (right.keys() == {0} and right[0])):
        return None
    terms = [*left.items(), *right.items()]
    if node.op != "Add":
        terms = [
            (p + q, k / m if node.op == "Div" else k * m) for p, k in left.items() for q, m in right.items()
        ]
    out: dict[int, float] = {}
    for power, factor in terms:
        out[power] = out.get(power, 0.0) + factor
    return out


def _coefficients(
    reader: Reader, value: Value, beside: Value, x: Value, depth: int
) -> dict[int, float] | None:
    """A number, or a polynomial of x: one side of an operator, with `beside` on the other."""
    number = number_of(reader, value, beside)
    return _polynomial(reader, value, x, depth - 1) if number is None else {0: number}


class FuseTanhGeluOfPolynomial(RegionRule, family="idioms"):
    """x * 0.5 * (1 + tanh(p(x))) -> gelu(x, tanh)  for p(x) = sqrt(2/pi) * (x + 0.044715 * x^3) written in any way."""

    proof = "numeric"
    relies_on = "the definition of gelu by tanh"
    dtypes = _FLOAT
    anchors = ("Tanh",)
    reads_from = ("Mul", "Add", "Div")
    examples = (
        "agraph (float[N,4] x) => (float[N,4] y) <float k = {0.044715}, float c = {0.7978845608}, float one = {1}, "
        "float h = {0.5}> { a = Mul(k, x) b = Mul(x, a) d = Mul(x, b) e = Add(x, d) f = Mul(c, e) t = Tanh(f) "
        "u = Add(one, t) v = Mul(h, u) y = Mul(x, v) }",
        "agraph (float[2,3] x) => (float[2,3] y) <float k = {0.0356774081}, float c = {0.7978845608}, "
        "float[1] one = {1}, float h = {0.5}, float three = {3}> { p = Pow(x, three) a = Mul(p, k) b = Mul(x, c) "
        "f = Add(a, b) t = Tanh(f) u = Add(t, one) w = Mul(x, h) y = Mul(u, w) }",
        "agraph (float[2,3] x) => (float[2,3] y) <float k = {0.0356774081}, float c = {0.7978845608}, float one = "
        "{1}, float h = {0.5}> { s = Mul(x, x) a = Mul(s, k) b = Add(c, a) f = Mul(b, x) t = Tanh(f) u = Add(t, one) "
        "w = Mul(x, h) y = Mul(u, w) }",
        "agraph (float[2,3] x) => (float[2,3] y) <float k = {0.044715}, float q = {1.2533141373}, float two = {2}, "
        "float h = {0.5}, float one = {1}> { s = Pow(x, two) a = Mul(s, x) b = Mul(k, a) g = Add(b, x) f = Div(g, q) "
        "t = Tanh(f) u = Add(t, one) w = Mul(x, u) y = Mul(w, h) }",
        "agraph (float[2,3] x) => (float[2,3] y) <float k = {0.0356774081}, float c = {0.3989422804}, float one = "
        "{1}, float h = {0.5}, float three = {3}> { p = Pow(x, three) a = Mul(p, k) b = Mul(x, c) d = Add(b, b) "
        "f = Add(a, d) t = Tanh(f) u = Add(t, one) w = Mul(x, h) y = Mul(u, w) }",
    )
    near_misses = (
        "agraph (float[2,3] x) => (float[2,3] y) <float k = {0.0356774081}, float c = {0.7978845608}, float one = "
        "{1}, float h = {0.5}, float four = {4}> { p = Pow(x, four) a = Mul(p, k) b = Mul(x, c) f = Add(a, b) "
        "t = Tanh(f) u = Add(t, one) w = Mul(x, h) y = Mul(u, w) }",
        "agraph (float[2,3] x) => (float[2,3] y) <float k = {0.0356774081}, float c = {0.7978845608}, float one = "
        "{1}, float h = {0.5}, float five = {5}> { p = Pow(x, five) q = Mul(p, k) a = Div(q, p) d = Div(c, x) "
        "b = Mul(x, c) g = Add(a, b) f = Add(g, d) t = Tanh(f) u = Add(t, one) w = Mul(x, h) y = Mul(u, w) }",
        "agraph (float[2,3] x) => (float[2,3] y) <float k = {0.188884642}, float c = {0.893243841}, float "
        "one = {1}, float h = {0.5}, float two = {2}> { a = Mul(x, k) q = Add(a, c) p = Pow(q, two) f = "
        "Mul(x, p) t = Tanh(f) u = Add(t, one) w = Mul(x, h) y = Mul(u, w) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if not self._shifted(reader, node.outputs[0]):
            return None
        for x in self._leaves(reader, node.inputs[0]):
            found = _polynomial(reader, node.inputs[0], x)
            root = math.sqrt(2 / math.pi)
            if found is None or set(found) != {1, 3}:
                continue
            if not math.isclose(found[1], root, rel_tol=1e-6):
                continue
            require(math.isclose(found[3], root * 0.044715, rel_tol=1e-6), "the cube has another factor")
            out = self._product(reader, node.outputs[0], x)
            if out is not None:
                return Region((out,), (x,), _between(reader, out, (x,)))
        return None

    @staticmethod
    def _leaves(reader: Reader, value: Value) -> list[Value]:
        """What a polynomial may be one of: the values that it is made of."""
        found: dict[Value, None] = {}
        work = [(value, 0)]
        while work:
            at, depth = work.pop()
            found[at] = None
            node = made_by(reader, at, "Add", "Mul", "Pow", "Div") if depth < 6 else None
            if node is not None:
                work.extend((v, depth + 1) for v in node.inputs if not reader.is_const(v))
        return list(found)

    @staticmethod
    def _shifted(reader: Reader, at: Value) -> Value | None:
        """1 + at, if that is made by the one reader of `at`."""
        step = only_reader(reader, at)
        if step is None or step.op != "Add" or not any(is_number(reader, v, 1.0, at) for v in step.inputs):
            return None
        return step.outputs[0]

    @classmethod
    def _product(cls, reader: Reader, at: Value, x: Value) -> Value | None:
        """0.5 * x * (1 + at), made by the readers of `at`."""
        shifted = cls._shifted(reader, at)
        if shifted is None:
            return None
        at, power, factor = shifted, 0, 1.0
        while (step := only_reader(reader, at)) is not None and step.op == "Mul":
            other = step.inputs[0] if step.inputs[1] == at else step.inputs[1]
            number = number_of(reader, other, at)
            term = {0: number} if number is not None else _polynomial(reader, other, x)
            if term is None or len(term) != 1:
                return None
            ((p, c),) = term.items()
            power, factor, at = power + p, factor * c, step.outputs[0]
            if power == 1 and math.isclose(factor, 0.5, rel_tol=1e-6):
                return at
        return None

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Gelu(x, approximate="tanh")


# Softmax


def _less_its_greatest(reader: Reader, value: Value) -> tuple[Value, tuple[int, ...]] | None:
    """x and the axes, if a value is x - max(x) over them."""
    node = made_by(reader, value, "Sub")
    if node is None:
        return None
    axes = _reduced(reader, node.inputs[1], node.inputs[0], "ReduceMax")
    return None if axes is None else (node.inputs[0], axes)


class FuseSoftmax(RegionRule, family="idioms"):
    """exp(x - max(x)) / sum(exp(x - max(x))) -> softmax(x)  along one axis;  the product with the reciprocal alike."""

    proof = "numeric"
    relies_on = "exp(a - b) = exp(a) / exp(b)"
    dtypes = _WIDE
    anchors = ("Div", "Mul")
    reads_from = ("Exp",)
    examples: ClassVar[tuple[str, ...]] = (
        "agraph (float[N,3] x) => (float[N,3] y) <int64[1] i = {-1}> { m = ReduceMax(x, i) d = Sub(x, m) e = Exp(d) "
        "s = ReduceSum(e, i) y = Div(e, s) }",
        "agraph (float[2,3,4] x) => (float[2,3,4] y) <int64[1] i = {1}> { m = ReduceMax(x, i) d = Sub(x, m) "
        "e = Exp(d) s = ReduceSum(e, i) r = Reciprocal(s) y = Mul(r, e) }",
        "agraph (float[2,3,4] x) => (float[2,3,4] y) { i = Constant<value_ints=[-1]>() m = "
        "ReduceMax<keepdims=0>(x, i) u = Unsqueeze(m, i) "
        "d = Sub(x, u) e = Exp(d) s = ReduceSum<keepdims=0>(e, i) t = Unsqueeze(s, i) y = Div(e, t) }",
        "agraph (float[N,1,3] x) => (float[N,1,3] y) <int64[3] c = {-1,1,1}, int64[1] i = {2}> { m = "
        "ReduceMax<keepdims=0>(x, i) u = Reshape(m, c) d = Sub(x, u) e = Exp(d) s = ReduceSum(e, i) y = "
        "Div(e, s) }",
        "agraph (float[N,M,3] x) => (float[N,M,3] y) <int64[3] c = {0,-1,1}, int64[1] i = {2}> { m = "
        "ReduceMax<keepdims=0>(x, i) u = Reshape(m, c) d = Sub(x, u) e = Exp(d) s = ReduceSum(e, i) y = "
        "Div(e, s) }",
    )
    near_misses: ClassVar[tuple[str, ...]] = (
        "agraph (float[3,3] x) => (float[3,3] y) <int64[1] i = {1}, int64[1] z = {0}> { m = "
        "ReduceMax<keepdims=0>(x, i) u = Unsqueeze(m, z) d = Sub(x, u) e = Exp(d) s = ReduceSum(e, i) y = "
        "Div(e, s) }",
        "agraph (float[N,0,3] x) => (float[M,0,3] y) <int64[3] c = {2,0,1}, int64[1] i = {2}> { m = "
        "ReduceMax<keepdims=0>(x, i) u = Reshape(m, c) d = Sub(x, u) e = Exp(d) s = ReduceSum(e, i) y = "
        "Div(e, s) }",
        "agraph (float[N,3] x) => (float[2,3] y) <int64[2] c = {2,1}, int64[2] v = {-1,1}, int64[1] i = "
        "{1}> { m = ReduceMax(x, i) t = Expand(m, c) u = Reshape(t, v) d = Sub(x, u) e = Exp(d) s = "
        "ReduceSum(e, i) y = Div(e, s) }",
        "agraph (float[2,3] x, float[2,3] z) => (float[2,3] y) <int64[1] i = {1}> { m = ReduceMax<keepdims=0>(z, i) "
        "u = Unsqueeze(m, i) d = Sub(x, u) e = Exp(d) s = ReduceSum(e, i) y = Div(e, s) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        pairs = [(node.inputs[0], node.inputs[1])]
        if node.op == "Mul":
            pairs = [
                (p, r.inputs[0])
                for p, q in operands(node)
                if (r := made_by(reader, q, "Reciprocal")) is not None
            ]
        for powers, total in pairs:
            exponential = made_by(reader, powers, "Exp")
            axes = None if exponential is None else _reduced(reader, total, powers, "ReduceSum")
            if exponential is None or axes is None or len(axes) != 1:
                continue
            x = self.argument(reader, exponential.inputs[0], axes)
            if x is not None:
                return Region(node.outputs, (x,), _between(reader, node.outputs[0], (x,)), axes[0])
        return None

    def argument(self, reader: Reader, value: Value, axes: tuple[int, ...]) -> Value | None:
        """What the softmax is of, if this is what is exponentiated."""
        found = _less_its_greatest(reader, value)
        return None if found is None or found[1] != axes else found[0]

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Softmax(x, axis=region.data)


class FuseUnshiftedSoftmax(FuseSoftmax):
    """exp(x) / sum(exp(x)) -> softmax(x)  along one axis;  the product with the reciprocal alike.

    Where the exponentials overflow, the left side is NaN, and the right side is not.
    """

    spreads = True
    mends = True

    near_misses = ()
    examples = (
        "agraph (float[N,3] x) => (float[N,3] y) <int64[1] i = {-1}> { e = Exp(x) s = ReduceSum(e, i) y = Div(e, s) }",
        "agraph (float[2,3,4] x) => (float[2,3,4] y) <int64[1] i = {1}> { e = Exp(x) s = ReduceSum(e, i) "
        "r = Reciprocal(s) y = Mul(e, r) }",
    )

    def argument(self, reader: Reader, value: Value, axes: tuple[int, ...]) -> Value | None:
        return value if _less_its_greatest(reader, value) is None else None


class FuseLogSoftmax(RegionRule, family="idioms"):
    """(x - max(x)) - log(sum(exp(x - max(x)))) -> logsoftmax(x)  along one axis."""

    proof = "numeric"
    relies_on = "exp(a - b) = exp(a) / exp(b)"
    dtypes = _WIDE
    anchors = ("Sub",)
    reads_from = ("Log", *_SEEN)
    examples = (
        "agraph (float[N,3] x) => (float[N,3] y) <int64[1] i = {-1}> { m = ReduceMax(x, i) d = Sub(x, m) e = Exp(d) "
        "s = ReduceSum(e, i) l = Log(s) y = Sub(d, l) }",
        "agraph (float[2,3,4] x) => (float[2,3,4] y) <int64[1] i = {1}> { m = ReduceMax(x, i) d = Sub(x, m) "
        "e = Exp(d) s = ReduceSum(e, i) l = Log(s) y = Sub(d, l) }",
        "agraph (float[2,3,4] x) => (float[2,3,4] y) <int64[1] i = {-1}> { m = ReduceMax(x, i) d = Sub(x, m) "
        "e = Exp(d) s = ReduceSum<keepdims=0>(e, i) l = Log(s) t = Unsqueeze(l, i) y = Sub(d, t) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        shifted, value = node.inputs
        log = made_by(reader, _unseen(reader, value), "Log")
        summed = None if log is None else made_by(reader, log.inputs[0], "ReduceSum")
        exponential = None if summed is None else made_by(reader, summed.inputs[0], "Exp")
        found = _less_its_greatest(reader, shifted)
        if summed is None or exponential is None or found is None:
            return None
        x, axes = found
        if exponential.inputs[0] != shifted or len(axes) != 1 or _axes(reader, summed) != axes:
            return None
        if not _fits(reader, value, x, axes):
            return None
        return Region(node.outputs, (x,), _between(reader, node.outputs[0], (x,)), axes[0])

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.LogSoftmax(x, axis=region.data)


class FuseLogOfSoftmax(Rule, family="idioms"):
    """log(softmax(x)) -> logsoftmax(x).

    Where the softmax underflows, the left side is minus infinity, and the right side is not.
    """

    mends = True

    proof = "numeric"
    relies_on = "log(exp(x) / s) = x - log(s)"
    dtypes = _WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Log(op.Softmax(x, axis="axis"))

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return op.LogSoftmax(x, axis=m.axis)


# Reductions


def _reduced_axes(x: Val, axes: Val | None, attrs: Attrs) -> tuple[int, ...]:
    """The axes of a reduction; refuses those that are not known, and one that may do nothing."""
    given = () if axes is None else axes.ints
    require(given or not attrs.get("noop_with_empty_axes"), "it may reduce nothing")
    return fronts(given or range(x.rank), x.rank)


class FuseReduceMean(Rule, family="idioms"):
    """sum(x) / n -> mean(x)  when n elements are summed;  sum(x) * (1/n) alike."""

    proof = "numeric"
    relies_on = "the product with 1/n as its type rounds it"
    dtypes = _WIDE
    optional = ("axes",)
    shapes = "x[...]:float axes:const c[...]:const"
    examples = (
        "agraph (float[N,4] x) => (float[N,1] y) <int64[1] i = {-1}, float n = {4}> "
        "{ s = ReduceSum(x, i) y = Div(s, n) }",
        "agraph (float[N,2,4] x) => (float[N] y) <int64[2] i = {1,2}, float n = {0.125}> "
        "{ s = ReduceSum<keepdims=0>(x, i) y = Mul(n, s) }",
        "agraph (float[2,3] x) => (float y) <float n = {6}> { s = ReduceSum<keepdims=0>(x) y = Div(s, n) }",
    )

    def source(self, op: Op, x: Any, axes: Any, c: Any) -> Any:
        return op.any_of(("Div", "Mul"), "by")(op.ReduceSum(x, axes, attrs="sum"), c)

    def where(self, m: Captures, x: Val, axes: Val | None, c: Val) -> None:
        reduced = _reduced_axes(x, axes, m.sum)
        left = x.rank if m.sum.get("keepdims", 1) else x.rank - len(reduced)
        require(c.uniform is not None and all(d == 1 for d in c.sizes), "the constant is not one number")
        require(c.rank <= left, "it may broadcast")
        count = prod(x.size(a) for a in reduced)
        worthwhile(count, "nothing is summed")
        wanted = count if m.by == "Div" else 1 / count
        require(math.isclose(c.scalar, wanted, rel_tol=1e-6), "another number of elements is summed")

    def target(self, op: Op, m: Captures, x: Val, axes: Val | None) -> Any:
        return op.ReduceMean(x, axes, attrs=m.sum)


class FuseReduceSumSquare(Rule, family="idioms"):
    """sum(x * x) -> sumsquare(x)  over the same axes;  sum(x^2) alike.

    Not of integers: the product wraps around, where ONNX Runtime's sum of squares stops at the greatest number.
    """

    dtypes = _WIDE
    optional = ("axes",)
    shapes = "x[...]:float axes:const"
    examples: ClassVar[tuple[str, ...]] = (
        "agraph (float[N,4] x) => (float[N,1] y) <int64[1] i = {-1}> { s = Mul(x, x) y = ReduceSum(s, i) }",
        "agraph (float[2,3,4] x) => (float[3] y) <int64[2] i = {0,2}, float t = {2}> "
        "{ s = Pow(x, t) y = ReduceSum<keepdims=0>(s, i) }",
        "agraph (float[2,3] x) => (float[1,1] y) { s = Mul(x, x) y = ReduceSum(s) }",
    )
    survivors: ClassVar[Mapping[str, str]] = {
        "drop: it may reduce nothing": "what is not summed is squared all the same; it is of no use"
    }
    reduce = "ReduceSumSquare"

    def summed(self, op: Op, x: Any) -> Any:
        return op.either(op.Mul(x, x), op.Pow(x, 2.0))

    def source(self, op: Op, x: Any, axes: Any) -> Any:
        return op.ReduceSum(self.summed(op, x), axes, attrs="sum")

    def where(self, m: Captures, x: Val, axes: Val | None) -> None:
        sizes = [x.shape[a] for a in _reduced_axes(x, axes, m.sum)]
        known = [d for d in sizes if isinstance(d, int)]
        few = len(known) == len(sizes) and prod(known) <= _IN_ORDER
        accurate(few, "a sum of so many squares or magnitudes loses accuracy")

    def target(self, op: Op, m: Captures, x: Val, axes: Val | None) -> Any:
        return op[self.reduce](x, axes, attrs=m.sum)


class FuseReduceL1(FuseReduceSumSquare):
    """sum(|x|) -> l1(x)  over the same axes."""

    dtypes = _FLOAT
    reduce = "ReduceL1"
    examples = (
        "agraph (float[N,4] x) => (float[N,1] y) <int64[1] i = {-1}> { s = Abs(x) y = ReduceSum(s, i) }",
        "agraph (float[2,3,2] x) => (float[3] y) <int64[2] i = {0, 2}> { s = Abs(x) y = ReduceSum<keepdims=0>(s, i) }",
        "agraph (float[2,3] x) => (float[1,1] y) { s = Abs(x) y = ReduceSum(s) }",
    )
    near_misses = (
        "agraph (float[2,3] x) => (float[2,3] y) { s = Abs(x) y = ReduceSum<noop_with_empty_axes=1>(s) }",
    )

    def summed(self, op: Op, x: Any) -> Any:
        return op.Abs(x)


class FuseReduceL2(Rule, family="idioms"):
    """sqrt(sumsquare(x)) -> l2(x)  over the same axes."""

    dtypes = _FLOAT
    optional = ("axes",)
    shapes = "x[...]:float axes:int"

    def source(self, op: Op, x: Any, axes: Any) -> Any:
        return op.Sqrt(op.ReduceSumSquare(x, axes, keepdims="keep"))

    def target(self, op: Op, m: Captures, x: Val, axes: Val | None) -> Any:
        return op.ReduceL2(x, axes, keepdims=m.keep)


# Normalisations by moments


def _mean(reader: Reader, value: Value) -> tuple[Value, tuple[int, ...]] | None:
    """x and the axes, if a value is the mean of x over them (whether it keeps them or not)."""
    node = made_by(reader, value, "ReduceMean", "GlobalAveragePool", "Div", "Mul")
    if node is None:
        return None
    if node.op == "GlobalAveragePool":
        return node.inputs[0], tuple(range(2, rank_of(reader, node.inputs[0])))
    if node.op == "ReduceMean":
        axes = _axes(reader, node)
        return None if axes is None else (node.inputs[0], axes)
    return _averaged(reader, value, "ReduceSum")


def _averaged(reader: Reader, value: Value, op: str) -> tuple[Value, tuple[int, ...]] | None:
    """x and the axes, if a value is what a reduction makes of x over them, divided by the number of elements."""
    node = made_by(reader, value, "Div", "Mul")
    for total, c in operands(node):
        summed = made_by(reader, total, op)
        number = number_of(reader, c, total)
        axes = None if summed is None or number is None else _axes(reader, summed)
        if axes is None:
            continue
        assert node is not None
        assert summed is not None
        assert number is not None
        count = prod(reader.val(summed.inputs[0]).size(a) for a in axes)
        wanted = count if node.op == "Div" else 1 / count if count else math.nan
        if math.isclose(number, wanted, rel_tol=1e-6):
            return summed.inputs[0], axes
    return None


def _mean_square(reader: Reader, value: Value) -> tuple[Value, tuple[int, ...]] | None:
    """x and the axes, if a value is the mean of x^2 over them."""
    found = _averaged(reader, value, "ReduceSumSquare")
    mean = None if found is not None else _mean(reader, value)
    base = None if mean is None else square_of(reader, mean[0])
    if base is None:
        return found
    assert mean is not None
    return base, mean[1]


def _centred(reader: Reader, value: Value) -> tuple[Value, tuple[int, ...]] | None:
    """x and the axes, if a value is x less its mean over them."""
    node = made_by(reader, value, "Sub")
    if node is None:
        return None
    x, mean = node.inputs
    found = _mean(reader, _unseen(reader, mean))
    if found is None or found[0] != x:
        return None
    return found if _fits(reader, mean, *found) else None


def _variance(reader: Reader, value: Value) -> tuple[Value, tuple[int, ...]] | None:
    """x and the axes, if a value is the variance of x over them: E[(x - m)^2] or E[x^2] - m^2, at least 0."""
    node = made_by(reader, value, "Max", "Relu", "Clip", "Sub")
    if node is not None and node.op != "Sub":
        inner = node.inputs[0]
        if node.op == "Max":
            inner = next((a for a, b in operands(node) if is_number(reader, b, 0.0, a)), ABSENT)
        elif node.op == "Clip":
            free = len(node.inputs) == 2 and is_number(reader, node.inputs[1], 0.0, inner)
            inner = inner if free else ABSENT
        return None if inner == ABSENT else _variance(reader, inner)
    if node is None:
        mean = _mean_square(reader, value)
        found = None if mean is None else _centred(reader, mean[0])
        return found if found is not None and mean is not None and found[1] == mean[1] else None
    of_square, squared = _mean_square(reader, node.inputs[0]), square_of(reader, node.inputs[1])
    plain = None if squared is None else _mean(reader, squared)
    return plain if plain == of_square else None


@dataclass(frozen=True, slots=True)
class _Normal:
    """What a region normalises: a tensor, over which axes, with which epsilon, scale and shift (ABSENT: none)."""

    x: Value
    axes: tuple[int, ...]
    epsilon: float
    scale: Value
    shift: Value
    out: Value


def _normal(reader: Reader, node: Node) -> _Normal | None:
    """A normalisation whose deviation is made by `node`, a Sqrt or a Pow."""
    x, *exponent = node.inputs
    inverted = any(is_number(reader, v, -0.5, x) for v in exponent)
    if not inverted and not all(is_number(reader, v, 0.5, x) for v in exponent):
        return None
    total = made_by(reader, x, "Add")
    for viewed, c in operands(total):
        epsilon = number_of(reader, c, viewed)
        variance = _unseen(reader, viewed)
        found = None if epsilon is None else _variance(reader, variance)
        if found is None or epsilon is None:
            continue
        if _fits(reader, viewed, *found):
            return _applied(reader, node.outputs[0], inverted, *found, epsilon)
    return None


def _applied(
    reader: Reader, at: Value, inverted: bool, x: Value, axes: tuple[int, ...], epsilon: float
) -> _Normal | None:
    """How the deviation is used: (x - m) / d, (x - m) * (1 / d) or (x - m) * ((1 / d) * scale), and a shift."""
    scale = shift = ABSENT
    step = only_reader(reader, at)
    if (
        not inverted
        and step is not None
        and (step.op == "Reciprocal" or (step.op == "Div" and is_number(reader, step.inputs[0], 1.0, at)))
    ):
        at, inverted = step.outputs[0], True
        step = only_reader(reader, at)
    if step is None or len(step.inputs) != 2 or step.op != ("Mul" if inverted else "Div"):
        return None
    other = step.inputs[0] if step.inputs[1] == at else step.inputs[1]
    if not inverted and step.inputs[1] != at:
        return None
    if inverted and _centred(reader, other) is None:
        scale, at = other, step.outputs[0]
        step = only_reader(reader, at)
        if step is None or step.op != "Mul":
            return None
        other = step.inputs[0] if step.inputs[1] == at else step.inputs[1]
    if _centred(reader, other) != (x, axes):
        return None
    at = step.outputs[0]
    shape = reader.type(x).shape
    for op in ("Mul", "Add"):
        step = only_reader(reader, at)
        if (
            step is None
            or step.op != op
            or step.inputs[0] == step.inputs[1]
            or (op == "Mul" and scale != ABSENT)
        ):
            continue
        other = step.inputs[0] if step.inputs[1] == at else step.inputs[1]
        if not reader.is_const(other) or not keeps_shape(shape, reader.type(other).shape):
            continue
        scale, shift = (other, shift) if op == "Mul" else (scale, other)
        at = step.outputs[0]
    if scale != ABSENT and (not reader.is_const(scale) or not keeps_shape(shape, reader.type(scale).shape)):
        return None
    return _Normal(x, axes, epsilon, scale, shift, at)


class _FuseNormalization(RegionRule, family="idioms"):
    """A normalisation by mean and variance, in the spellings of JAX, TensorFlow and Keras."""

    mends = True  # the operator's sums do not overflow where those of the left side do

    proof = "numeric"
    relies_on = "E[(x - m)^2] = E[x^2] - m^2"
    dtypes = _FLOAT
    anchors = ("Sqrt", "Pow")
    reads_from = ("Add",)

    # Which axes it is for, and over which axes its scale and shift vary.
    varying: Callable[[Reader, _Normal], tuple[int, ...] | None]

    def find(self, reader: Reader, node: Node) -> Region | None:
        normal = _normal(reader, node)
        varying = None if normal is None else self.varying(reader, normal)
        if normal is None or varying is None:
            return None
        x = reader.val(normal.x)
        given = tuple(v for v in (normal.scale, normal.shift) if v != ABSENT)
        for v in given:
            shape = reader.val(v).sizes
            aligned = (1,) * (x.rank - len(shape)) + shape
            fits = all(d == 1 or a in varying for a, d in enumerate(aligned))
            require(fits, "a parameter varies along other axes")
        sizes = tuple(x.size(a) for a in varying)
        data = (normal.axes, normal.epsilon, sizes, normal.scale != ABSENT, normal.shift != ABSENT)
        nodes = _between(reader, normal.out, (normal.x,))
        return Region((normal.out,), (normal.x, *given), nodes, data)


def _spread(op: Op, v: Val, varying: Sequence[int], rank: int, sizes: Sequence[int]) -> Any:
    """A parameter with the axes over which it varies, of these sizes, and no others."""
    aligned = (1,) * (rank - v.rank) + v.sizes
    kept = [aligned[a] for a in varying]
    flat = op.Reshape(v, kept)
    return flat if kept == list(sizes) else op.Expand(flat, list(sizes))


def _filled(op: Op, number: float, sizes: Sequence[int]) -> Any:
    return op.Expand(np.full(1, number, np.float32), list(sizes))


class FuseLayerNormalizationByMoments(_FuseNormalization):
    """(x - m) * (scale / sqrt(E[x^2] - m^2 + eps)) + bias -> layernormalization(x, scale, bias)  over any axes.

    Axes that are not the last are moved there. The mean may be a sum times 1/n, the variance at least 0,
    and both seen in x's rank by Reshape and Expand.
    """

    examples = (
        "agraph (float[N,3,4] x) => (float[N,3,4] y) <int64[1] i = {-1}, float n = {0.25}, float z = {0}, "
        "float e = {0.125}, float[4] g = {1,2,3,4}, float[4] b = {4,3,2,1}> { s = ReduceSum(x, i) m = Mul(s, n) "
        "p = Mul(x, x) q = ReduceSum(p, i) r = Mul(q, n) t = Mul(m, m) v = Sub(r, t) w = Max(v, z) a = Add(w, e) "
        "d = Sqrt(a) k = Reciprocal(d) f = Mul(k, g) c = Sub(x, m) h = Mul(c, f) y = Add(h, b) }",
        "agraph (float[3,4] x) => (float[3,4] y) <int64[1] i = {1}, float e = {0.125}, float h = {-0.5}, "
        "float t = {2}, float[4] g = {1,2,3,4}> { m = ReduceMean(x, i) c = Sub(x, m) p = Pow(c, t) "
        "v = ReduceMean(p, i) a = Add(v, e) k = Pow(a, h) n = Mul(c, k) y = Mul(n, g) }",
        "agraph (float[2,3,4] x) => (float[2,3,4] y) <int64[1] i = {-1}, int64[3] u = {2,3,1}, float e = {0.125}, "
        "float one = {1}, float[4] b = {4,3,2,1}> { m = ReduceMean<keepdims=0>(x, i) p = Mul(x, x) "
        "q = ReduceMean<keepdims=0>(p, i) t = Mul(m, m) v = Sub(q, t) o = Reshape(v, u) l = Expand(o, u) "
        "a = Add(l, e) d = Sqrt(a) k = Div(one, d) j = Reshape(m, u) c = Sub(x, j) h = Mul(k, c) y = Add(b, h) }",
        "agraph (float[2,3,4] x) => (float[2,3,4] y) <int64[2] i = {1,2}, float e = {0.125}> { m = ReduceMean(x, i) "
        "p = Mul(x, x) q = ReduceMean(p, i) t = Mul(m, m) v = Sub(q, t) a = Add(v, e) d = Sqrt(a) c = Sub(x, m) "
        "y = Div(c, d) }",
        "agraph (float[3,4] x) => (float[3,4] y) <int64[1] i = {1}, float e = {0.125}, float z = {0}, float n = "
        "{4}, float h = {0.5}> { s = ReduceSum(x, i) m = Div(s, n) p = Mul(x, x) q = ReduceSum(p, i) r = Div(q, "
        "n) t = Mul(m, m) u = Sub(r, t) v = Clip(u, z) a = Add(e, v) d = Pow(a, h) c = Sub(x, m) y = Div(c, d) }",
        "agraph (float[3,4] x) => (float[3,4] y) <int64[1] i = {1}, float e = {0.125}> { m = ReduceMean(x, i) p = "
        "Mul(x, x) r = ReduceMean(p, i) t = Mul(m, m) u = Sub(r, t) v = Relu(u) a = Add(v, e) d = Sqrt(a) c = "
        "Sub(x, m) y = Div(c, d) }",
    )
    near_misses = (
        "agraph (float[3,4] x) => (float[3,4] y) <int64[1] i = {1}, float e = {0.125}, float z = {0}, float k = "
        "{9}> { m = ReduceMean(x, i) p = Mul(x, x) r = ReduceMean(p, i) t = Mul(m, m) u = Sub(r, t) v = Clip(u, "
        "z, k) a = Add(v, e) d = Sqrt(a) c = Sub(x, m) y = Div(c, d) }",
        "agraph (float[3,4] x) => (float[3,4] y) <int64[1] i = {1}, float e = {0.125}, float z = {1}> { m = "
        "ReduceMean(x, i) p = Mul(x, x) r = ReduceMean(p, i) t = Mul(m, m) u = Sub(r, t) v = Clip(u, z) a = "
        "Add(v, e) d = Sqrt(a) c = Sub(x, m) y = Div(c, d) }",
        "agraph (float[3,4] x) => (float[3,4] y) <int64[1] i = {1}, float e = {0.125}, float n = {4}> { s = "
        "ReduceSum(x, i) m = Div(n, s) c = Sub(x, m) p = Mul(c, c) r = ReduceMean(p, i) a = Add(r, e) d = Sqrt(a) "
        "y = Div(c, d) }",
        "agraph (float[3,4] x) => (float[3,4] y) <int64[1] i = {1}, float e = {0.125}, float h = {0.75}> { m = "
        "ReduceMean(x, i) c = Sub(x, m) p = Mul(c, c) r = ReduceMean(p, i) a = Add(r, e) d = Pow(a, h) y = Div(c, "
        "d) }",
        "agraph (float[3,4] x) => (float[1,3,4] y) <int64[1] i = {1}, float e = {0.125}, float[1,1,1] h = "
        "{-0.5}> { m = ReduceMean(x, i) c = Sub(x, m) p = Mul(c, c) r = ReduceMean(p, i) a = Add(r, e) d = "
        "Pow(a, h) y = Mul(c, d) }",
    )

    def varying(self, reader: Reader, normal: _Normal) -> tuple[int, ...] | None:
        return normal.axes

    def target(self, op: Op, region: Region, x: Val, *given: Val) -> Any:
        axes, epsilon, sizes, scaled, shifted = region.data
        scale = _spread(op, given[0], axes, x.rank, sizes) if scaled else _filled(op, 1.0, sizes)
        shift = _spread(op, given[-1], axes, x.rank, sizes) if shifted else None
        perm = (*(a for a in range(x.rank) if a not in axes), *axes)
        rows = x if is_identity(perm) else op.Transpose(x, perm=perm)
        y = op.LayerNormalization(rows, scale, shift, axis=x.rank - len(axes), epsilon=epsilon)
        return y if is_identity(perm) else op.Transpose(y, perm=inverse(perm))


class FuseInstanceNormalization(_FuseNormalization):
    """(x - m) / sqrt(var + eps) * scale + bias -> instancenormalization(x, scale, bias)  over all spatial axes."""

    examples = (
        "agraph (float[N,3,4,5] x) => (float[N,3,4,5] y) <int64[2] i = {2,3}, float e = {0.125}, "
        "float[3,1,1] g = {1,2,3}, float[1,3,1,1] b = {3,2,1}> { m = ReduceMean(x, i) c = Sub(x, m) p = Mul(c, c) "
        "v = ReduceMean(p, i) a = Add(v, e) d = Sqrt(a) n = Div(c, d) s = Mul(n, g) y = Add(s, b) }",
        "agraph (float[N,3,4] x) => (float[N,3,4] y) <int64[1] i = {-1}, float e = {0.125}, float[3,1] g = {1,2,3}> "
        "{ m = GlobalAveragePool(x) p = Mul(x, x) q = ReduceMean(p, i) t = Mul(m, m) v = Sub(q, t) a = Add(v, e) "
        "d = Sqrt(a) k = Reciprocal(d) f = Mul(g, k) c = Sub(x, m) y = Mul(f, c) }",
        "agraph (float[N,2,3,4] x) => (float[N,2,3,4] y) <int64[2] i = {2,3}, float e = {0.125}> { m = "
        "ReduceMean(x, i) "
        "c = Sub(x, m) p = Mul(c, c) v = ReduceMean(p, i) a = Add(v, e) d = Sqrt(a) y = Div(c, d) }",
    )

    def varying(self, reader: Reader, normal: _Normal) -> tuple[int, ...] | None:
        rank = rank_of(reader, normal.x)
        return (1,) if normal.axes and normal.axes == tuple(range(2, rank)) else None

    def target(self, op: Op, region: Region, x: Val, *given: Val) -> Any:
        _, epsilon, sizes, scaled, shifted = region.data
        scale = _spread(op, given[0], (1,), x.rank, sizes) if scaled else _filled(op, 1.0, sizes)
        shift = _spread(op, given[-1], (1,), x.rank, sizes) if shifted else _filled(op, 0.0, sizes)
        return op.InstanceNormalization(x, scale, shift, epsilon=epsilon)


# Rotary embeddings, nearest neighbours


def _twice(reader: Reader, value: Value) -> bool:
    """Whether the last dimension of a value, which is even, is the same half twice: functions of concat(f, f)."""
    while True:
        node = reader.producer(value)
        if node is None:
            array = reader.val(value).array_or_none if reader.is_const(value) else None
            if array is None:
                return False
            first, second = np.split(array, 2, axis=-1)
            return bool(np.array_equal(first, second))
        if node.op == "Concat":
            rank = rank_of(reader, value)
            return (
                len(node.inputs) == 2 and node.inputs[0] == node.inputs[1] and axis_of(node, rank) == rank - 1
            )
        if node.op == "Mul":
            scaled = [a for a, c in operands(node) if number_of(reader, c, a) is not None]
            if not scaled:
                return False
            value = scaled[0]
        elif node.op == "Unsqueeze" or is_unary(node):  # (a dimension of 1 is not the last one)
            value = node.inputs[0]
        else:
            return False


class FuseRotaryEmbedding(RegionRule, family="idioms"):
    """x * [c|c] + [-x2|x1] * [s|s] -> rotaryembedding(x, c, s)  for x = [x1|x2] of four dimensions.

    As `rotate_half` has it in transformers.
    """

    dtypes = _FLOAT
    anchors = ("Add",)
    reads_from = ("Mul",)
    examples = (
        "agraph (float[2,3,5,4] x, float[2,5,2] f) => (float[2,3,5,4] y) <int64[1] i = {1}, int64[1] z = {0}, "
        "int64[1] h = {2}, int64[1] e = {9223372036854775807}, int64[1] l = {3}> { d = Concat<axis=-1>(f, f) "
        "a = Cos(d) b = Sin(d) c = Unsqueeze(a, i) s = Unsqueeze(b, i) p = Slice(x, z, h, l) q = Slice(x, h, e, l) "
        "n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "agraph (float[N,3,5,4] x, float[N,5,2] f, float[N,5,2] g) => (float[N,3,5,4] y) <int64[1] i = {1}, "
        "int64[2] k = {2,2}> { d = Concat<axis=2>(f, f) t = Concat<axis=2>(g, g) c = Unsqueeze(d, i) "
        "s = Unsqueeze(t, i) p, q = Split<axis=-1>(x, k) n = Neg(q) r = Concat<axis=3>(n, p) v = Mul(s, r) "
        "u = Mul(c, x) y = Add(v, u) }",
        "agraph (float[2,3,5,4] x, float[2,5,2] f) => (float[2,3,5,4] y) <int64[1] i = {1}, int64[2] k = {2,2}, float "
        "m = {0.5}> { d = Concat<axis=-1>(f, f) a = Cos(d) j = Mul(a, m) b = Sin(d) l = Mul(m, b) c = Unsqueeze(j, i) "
        "s = Unsqueeze(l, i) p, q = Split<axis=-1>(x, k) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, c) "
        "v = Mul(r, s) y = Add(u, v) }",
        "agraph (float[1,3,2,4] x) => (float[1,3,2,4] y) <float[1,1,2,4] c = {1,2,1,2,3,4,3,4}, "
        "float[1,1,2,4] s = {4,3,4,3,2,1,2,1}, int64[2] k = {2,2}> { p, q = Split<axis=-1>(x, k) n = Neg(q) "
        "r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
    )
    near_misses = (
        "agraph (float[2,3,5,4] x, float[2,5,2] f, float[2,5,2] g) => (float[2,3,5,4] y) <int64[1] i = {1}, "
        "int64[2] k = {2,2}> { d = Concat<axis=-1>(f, g) a = Cos(d) b = Sin(d) c = Unsqueeze(a, i) s = Unsqueeze(b, i) "
        "p, q = Split<axis=-1>(x, k) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "agraph (float[1,3,2,4] x) => (float[1,3,2,4] y) <float[1,1,2,4] c = {1,2,3,4,5,6,7,8}, "
        "float[1,1,2,4] s = {4,3,4,3,2,1,2,1}, int64[2] k = {2,2}> { p, q = Split<axis=-1>(x, k) n = Neg(q) "
        "r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "agraph (float[2,3,5,4] x, float[2,1,5,4] c, float[2,1,5,4] s) => (float[2,3,5,4] y) <int64[2] k = {2,2}> { "
        "p, q = Split<axis=-1>(x, k) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "agraph (float[2,3,5,4] x, float[2,1,5,4] c, float[2,1,5,4] s) => (float[2,3,5,4] y) <int64[2] k = {2,2}> { "
        "a = Mul(c, s) b = Mul(s, c) p, q = Split<axis=-1>(x, k) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, a) "
        "v = Mul(r, b) y = Add(u, v) }",
        "agraph (float[2,3,5,4] x, float[2,1,5,4] c, float[2,1,5,4] s) => (float[2,3,5,4] y) <int64[2] k = {2,2}> { "
        "a = Softmax(c) b = Softmax(s) p, q = Split<axis=-1>(x, k) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, a) "
        "v = Mul(r, b) y = Add(u, v) }",
        "agraph (float[2,3,5,4] x, float[2,5,2] f, float[2,5,4] w) => (float[2,3,5,4] y) <int64[1] i = "
        "{1}, int64[1] z = {0}, int64[1] h = {2}, int64[1] e = {9223372036854775807}, int64[1] l = {3}> { "
        "d0 = Concat<axis=-1>(f, f) d = Mul(d0, w) a = Cos(d) b = Sin(d) c = Unsqueeze(a, i) s = "
        "Unsqueeze(b, i) p = Slice(x, z, h, l) q = Slice(x, h, e, l) n = Neg(q) r = Concat<axis=-1>(n, p) "
        "u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "agraph (float[2,3,5,4] x, float[2,5,2] f, float[2,5,4] w) => (float[2,3,5,4] y) <int64[1] i = "
        "{1}, int64[1] z = {0}, int64[1] h = {2}, int64[1] e = {9223372036854775807}, int64[1] l = {3}> { "
        "d0 = Concat<axis=-1>(f, f) d = Add(d0, w) a = Cos(d) b = Sin(d) c = Unsqueeze(a, i) s = "
        "Unsqueeze(b, i) p = Slice(x, z, h, l) q = Slice(x, h, e, l) n = Neg(q) r = Concat<axis=-1>(n, p) "
        "u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "agraph (float[2,3,5,4] x, float[2,5,2] f, float[2,3,5,4] t) => (float[2,3,5,4] y) <int64[1] i = "
        "{1}, int64[1] z = {0}, int64[1] h = {2}, int64[1] e = {9223372036854775807}, int64[1] l = {3}> { "
        "d0 = Concat<axis=-1>(f, f) d = Identity(d0) a = Cos(d) b = Sin(d) c = Unsqueeze(a, i) s = "
        "Unsqueeze(b, i) p = Slice(x, z, h, l) q = Slice(t, h, e, l) n = Neg(q) r = Concat<axis=-1>(n, p) "
        "u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if node.types[0].rank != 4:
            return None
        for straight, crossed in operands(node):
            for turned, sine in operands(made_by(reader, crossed, "Mul")):
                x = self._turned(reader, turned)
                if x is None:
                    continue
                for same, cosine in operands(made_by(reader, straight, "Mul")):
                    if same == x:
                        self._check(reader, x, cosine, sine)
                        inputs = (x, cosine, sine)
                        return Region(node.outputs, inputs, _between(reader, node.outputs[0], inputs))
        return None

    @staticmethod
    def _turned(reader: Reader, value: Value) -> Value | None:
        """[x1|x2], if a value is [-x2|x1]."""
        concat = made_by(reader, value, "Concat")
        if concat is None or len(concat.inputs) != 2 or axis_of(concat, 4) != 3:
            return None
        neg = made_by(reader, concat.inputs[0], "Neg")
        first = piece(reader, concat.inputs[1])
        second = None if neg is None else piece(reader, neg.inputs[0])
        if first is None or second is None or not first.kept or not second.kept:
            return None
        halves = (first.start, first.length, second.start) == (0, second.length, first.length)
        same = first.source == second.source and first.axis == second.axis == 3
        whole = reader.type(first.source).shape
        return (
            first.source if same and halves and whole is not None and whole[3] == 2 * first.length else None
        )

    @staticmethod
    def _check(reader: Reader, x: Value, cosine: Value, sine: Value) -> None:
        """Refuse angles that RotaryEmbedding does not take."""
        shape = reader.type(x).shape or ()
        wanted = (shape[0], 1, shape[2], shape[3])
        for angle in (cosine, sine):
            require(same_dims(reader.type(angle).shape, wanted), "the angles are not those of each position")
            require(_twice(reader, angle), "the two halves have other angles")

    def target(self, op: Op, region: Region, x: Val, cosine: Val, sine: Val) -> Any:
        half = x.size(3) // 2
        tables = [op.Squeeze(op.Slice(v, [0], [half], [3]), [1]) for v in (cosine, sine)]
        return op.RotaryEmbedding(x, *tables)


class FuseNearestResize(RegionRule, family="idioms"):
    """reshape(expand(reshape(x))) -> resize(x)  to nearest neighbours, when each pixel is repeated;  Tile alike."""

    proof = "numeric"
    relies_on = "the nearest neighbour by rounding down repeats each pixel"
    dtypes = _FLOAT
    anchors = ("Reshape",)
    reads_from = ("Expand", "Tile")
    examples = (
        "agraph (float[1,2,3,4] x) => (float[1,2,6,12] y) <int64[6] a = {1,2,3,1,4,1}, int64[6] b = {1,2,3,2,4,3}, "
        "int64[4] c = {1,2,6,12}> { r = Reshape(x, a) e = Expand(r, b) y = Reshape(e, c) }",
        "agraph (float[N,2,3,4] x) => (float[N,2,6,4] y) <int64[2] a = {3,5}, int64[6] b = {1,1,1,2,1,1}, "
        "int64[4] c = {-1,2,6,4}> { r = Unsqueeze(x, a) e = Tile(r, b) y = Reshape(e, c) }",
    )
    near_misses = (
        "agraph (float[1,2,3,4] x, int64[K] b) => (float[1,2,6,12] y) <int64[6] a = {1,2,3,1,4,1}, "
        "int64[4] c = {1,2,6,12}> { r = Reshape(x, a) e = Expand(r, b) y = Reshape(e, c) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        repeat = made_by(reader, node.inputs[0], "Expand", "Tile")
        view = None if repeat is None else made_by(reader, repeat.inputs[0], *VIEWS)
        if repeat is None or view is None or node.types[0].rank != 4:
            return None
        x = view.inputs[0]
        shapes = [reader.type(v).shape for v in (x, view.outputs[0], repeat.outputs[0], node.outputs[0])]
        if any(s is None for s in shapes):
            return None
        before, cut, repeated, after = (s or () for s in shapes)
        if len(before) != 4 or len(cut) != 6:
            return None
        n, c, h, w = before
        require(same_dims(cut, (n, c, h, 1, w, 1)), "it is not cut into pixels")
        rows, columns = repeated[3], repeated[5]
        sizes = tuple(d for d in (rows, columns, h, w) if isinstance(d, int))
        if len(sizes) < 4:
            return None
        require(
            same_dims(after, (n, c, sizes[0] * sizes[2], sizes[1] * sizes[3])), "it is not put together again"
        )
        nodes = _between(reader, node.outputs[0], (x,))
        return Region(node.outputs, (x,), nodes, (rows, columns))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        scales = np.array([1, 1, *region.data], np.float32)
        return op.Resize(
            x, None, scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
        )


# Powers, quotients, signs


class ReplacePowByProduct(Rule, family="idioms"):
    """x ^ 2 -> x * x."""

    dtypes = _WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Pow(x, 2.0)

    def target(self, op: Op, x: Val) -> Any:
        return op.Mul(x, x)


class ReplacePowBySqrt(Rule, family="idioms"):
    """x ^ 0.5 -> sqrt(x).

    Of minus infinity the left side is infinite, the right side NaN.
    """

    spreads = True
    dtypes = _WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Pow(x, 0.5)

    def target(self, op: Op, x: Val) -> Any:
        return op.Sqrt(x)


class ReplaceDivByReciprocal(Rule, family="idioms"):
    """x / y -> x * (1 / y)  when y is smaller, and repeated along x."""

    dtypes = _WIDE
    shapes = "x[...]:float y[...]:float"

    examples = (
        "agraph (float[N,3] x, float[N,1] z) => (float[N,3] y) { y = Div(x, z) }",
        "agraph (float[2,3,4] x, float[4] z) => (float[2,3,4] y) { y = Div(x, z) }",
        "agraph (double[2,3] x, double z) => (double[2,3] y) { y = Div(x, z) }",
    )

    def source(self, op: Op, x: Any, y: Any) -> Any:
        return op.Div(x, y)

    def where(self, x: Val, y: Val) -> None:
        worthwhile(not x.const and not y.const, "an operand is constant")
        worthwhile(_repeats(y.shape, x.shape), "the divisor is not smaller")

    def target(self, op: Op, x: Val, y: Val) -> Any:
        return op.Mul(x, op.Reciprocal(y))


def _repeats(small: tuple[Dim, ...], large: tuple[Dim, ...]) -> bool:
    """Whether a shape has a 1, or nothing, where another has more."""
    padded = (1,) * (len(large) - len(small)) + small
    aligned = len(padded) == len(large) and all(a == b or a == 1 for a, b in zip(padded, large))
    return aligned and any(a == 1 and b != 1 for a, b in zip(padded, large))


class ReplaceNegByMul(Rule, family="idioms"):
    """-x -> x * -1, so that it can be folded as a factor."""

    dtypes = _WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Neg(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Mul(x, -1.0)


class ReplaceMulByNeg(Rule, family="idioms"):
    """x * -1 -> -x."""

    dtypes = _WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Mul(x, -1.0)

    def target(self, op: Op, x: Val) -> Any:
        return op.Neg(x)


# Conditions and casts


class ReplaceCastLike(Rule, family="idioms"):
    """castlike(x, y) -> cast(x)  to y's element type."""

    proof = "numeric"
    relies_on = "a cast depends on the element type alone"
    shapes = "x y | x:int y:float | x:float y:int | x:bool y:float | x:int y:bool"

    def source(self, op: Op, x: Any, y: Any) -> Any:
        return op.CastLike(x, y, saturate="saturate")

    def where(self, y: Val) -> None:
        worthwhile(y.dtype != DType.UNDEFINED, "the element type is not known")

    def target(self, op: Op, m: Captures, x: Val, y: Val) -> Any:
        return op.Cast(x, to=int(y.dtype), saturate=m.saturate)


class RemoveConstantWhere(Rule, family="idioms"):
    """where(true, x, y) -> x,  where(false, x, y) -> y."""

    shapes = "c[...]:const:bool x[...] y[...]"

    def source(self, op: Op, c: Any, x: Any, y: Any) -> Any:
        return op.Where(c, x, y)

    def where(self, c: Val, x: Val, y: Val) -> None:
        require(c.uniform is not None, "the condition is not the same everywhere")
        chosen, other = (x, y) if c.uniform else (y, x)
        for v in (c, other):
            require(keeps_shape(chosen.type.shape, v.type.shape), "it may broadcast")

    def target(self, op: Op, c: Val, x: Val, y: Val) -> Any:
        return x if c.uniform else y


class ReplaceWhereByCast(Rule, family="idioms"):
    """where(c, 1, 0) -> cast(c),  where(c, 0, 1) -> cast(not c)."""

    proof = "numeric"
    relies_on = "a boolean is cast to 0 or 1"
    shapes = "c[...]:bool a[...]:const b[...]:const"

    dtypes = FLOATS | {DType.INT32, DType.INT64}
    examples = (
        "agraph (bool[N,3] c) => (float[N,3] y) <float z = {0}, float one = {1}> { y = Where(c, one, z) }",
        "agraph (bool[N,3] c) => (int64[N,3] y) <int64[1] z = {0}, int64 one = {1}> { y = Where(c, z, one) }",
    )

    def source(self, op: Op, c: Any, a: Any, b: Any) -> Any:
        return op.Where(c, a, b)

    def where(self, c: Val, a: Val, b: Val) -> None:
        require((a.uniform, b.uniform) in ((1, 0), (0, 1)), "the constants are not 1 and 0")
        for v in (a, b):
            require(keeps_shape(c.type.shape, v.type.shape), "it may broadcast")

    def target(self, op: Op, c: Val, a: Val) -> Any:
        return op.Cast(c if a.uniform else op.Not(c), to=int(a.dtype))


class FlipWhere(Rule, family="idioms"):
    """where(not c, x, y) -> where(c, y, x)."""

    shapes = "c[...]:bool x[...] y[...]"

    def source(self, op: Op, c: Any, x: Any, y: Any) -> Any:
        return op.Where(op.Not(c), x, y)

    def target(self, op: Op, c: Val, x: Val, y: Val) -> Any:
        return op.Where(c, y, x)


_ORDERED = frozenset({DType.FLOAT, DType.DOUBLE, DType.INT32, DType.INT64})


class FuseLessOrEqual(Rule, family="idioms"):
    """x < y or x = y -> x <= y."""

    proof = "numeric"
    relies_on = "the definition of <="
    shapes = "x[...] y[...]"
    strict, wide = "Less", "LessOrEqual"

    def source(self, op: Op, x: Any, y: Any) -> Any:
        return op.Or(op[self.strict](x, y), op.Equal(x, y))

    def where(self, x: Val) -> None:
        worthwhile(x.dtype in _ORDERED, "there is no kernel for this element type")

    def target(self, op: Op, x: Val, y: Val) -> Any:
        return op[self.wide](x, y)


class FuseGreaterOrEqual(FuseLessOrEqual):
    """x > y or x = y -> x >= y."""

    relies_on = "the definition of >="
    strict, wide = "Greater", "GreaterOrEqual"


_OPPOSITE = {
    "Less": "GreaterOrEqual",
    "GreaterOrEqual": "Less",
    "Greater": "LessOrEqual",
    "LessOrEqual": "Greater",
}


class PushNotIntoComparison(Rule, family="idioms"):
    """not (x < y) -> x >= y  for integers;  the other comparisons alike.

    Of NaN neither is true, hence no floats.
    """

    proof = "numeric"
    relies_on = "of two integers one is less, or they are equal"
    shapes = "x[...] y[...]"
    examples = (
        "agraph (int64[N,3] a, int64[3] b) => (bool[N,3] y) { c = Less(a, b) y = Not(c) }",
        "agraph (int32[N,3] a, int32[N,3] b) => (bool[N,3] y) { c = GreaterOrEqual(a, b) y = Not(c) }",
        "agraph (float[N,3] a, int64[N,3] i, int64 k) => (bool[N,3] y) { c = Greater(i, k) y = Not(c) }",
        "agraph (float[N,3] a, float[3] b) => (bool[N,3] y) { c = LessOrEqual(a, b) y = Not(c) }",
    )

    def source(self, op: Op, x: Any, y: Any) -> Any:
        return op.Not(op.any_of(_COMPARISONS, "compare")(x, y))

    def where(self, x: Val) -> None:
        require(x.dtype not in FLOATS, "one of the two may be NaN")
        worthwhile(x.dtype in _ORDERED, "there is no kernel for this element type")

    def target(self, op: Op, m: Captures, x: Val, y: Val) -> Any:
        return op[_OPPOSITE[m.compare]](x, y)


_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
}


class FoldComparisonOfBool(Rule, family="idioms"):
    """cast(c) = 1 -> c,  cast(c) = 0 -> not c  for a boolean c;  the other comparisons with a number alike."""

    proof = "numeric"
    relies_on = "a boolean is cast to 0 or 1"
    shapes = "c[...]:bool n[...]:const"
    examples = (
        "agraph (bool[N,3] c) => (bool[N,3] y) <int64 one = {1}> { i = Cast<to=7>(c) y = Equal(i, one) }",
        "agraph (bool[N,3] c) => (bool[N,3] y) <float z = {0}> { f = Cast<to=1>(c) y = Equal(z, f) }",
        "agraph (bool[N,3] c) => (bool[N,3] y) <float h = {0.5}> { f = Cast<to=1>(c) y = Greater(f, h) }",
    )
    near_misses = (
        "agraph (bool[N,3] c) => (bool[N,3] y) <bool t = {1}> { b = Cast<to=9>(c) y = Equal(b, t) }",
    )

    def source(self, op: Op, c: Any, n: Any) -> Any:
        compare, number = op.any_of(_FUNCTIONS, "compare"), op.Cast(c, to="to")
        return op.either(compare(number, n), compare(n, number), name="turned")

    def where(self, m: Captures, c: Val, n: Val) -> None:
        worthwhile(m.to in FLOATS | INTEGERS, "it is no number")
        of_false, of_true = self._truth(m, c, n)
        require(of_false != of_true, "it is the same for both")

    def target(self, op: Op, m: Captures, c: Val, n: Val) -> Any:
        return c if self._truth(m, c, n)[1] else op.Not(c)

    @staticmethod
    def _truth(m: Captures, c: Val, n: Val) -> tuple[bool, bool]:
        """What is said of False and of True."""
        number, compare = _number_beside(n, c), _FUNCTIONS[m.compare]
        of_false, of_true = (bool(compare(number, b) if m.turned else compare(b, number)) for b in (0.0, 1.0))
        return of_false, of_true


# Shapes


class RemoveExpandBeforeBroadcast(RegionRule, family="idioms"):
    """f(expand(x), y) -> f(x, y)  when broadcasting gives the same shape anyway;  Tile of dimensions of 1 alike."""

    anchors = BROADCAST
    reads_from = ("Expand", "Tile")
    examples = (
        "agraph (float[1,3] x, float[N,3] z) => (float[N,3] y) { o = Constant<value_ints=[1]>() s = Shape(z) "
        "e = Expand(x, s) y = Add(e, z) }",
        "agraph (float[3,1] x, float[2,3,4] z) => (float[2,3,4] y) { s = Constant<value_ints=[3,4]>() e = "
        "Expand(x, s) y = Mul(z, e) }",
        "agraph (float[3,1] x, float[2,3,4] z) => (float[2,3,4] y) { s = Constant<value_ints=[1,4]>() e = "
        "Tile(x, s) y = Sub(e, z) }",
        "agraph (bool[1,4] c, float[3,4] x, float[1] z) => (float[3,4] y) { s = Constant<value_ints=[3,4]>() "
        "e = Expand(c, s) y = Where(e, x, z) }",
        # Here it does not apply.
        "agraph (float[1,3] x, float[1,3] z) => (float[2,3] y) { s = Constant<value_ints=[2,3]>() e = "
        "Expand(x, s) y = Add(e, z) }",
        "agraph (float[1,3] x, float[2,6] z) => (float[2,6] y) <int64[2] s = {2, 2}> { e = Tile(x, s) y = Add(e, z) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        out = node.types[0].shape
        for place, value in enumerate(node.inputs):
            inner = made_by(reader, value, "Expand", "Tile")
            if inner is None or out is None:
                continue
            inputs = (*node.inputs[:place], inner.inputs[0], *node.inputs[place + 1 :])
            if inner.op == "Tile":
                before, after = reader.val(inner.inputs[0]).shape, reader.val(value).shape
                once = all(a == 1 or (a is not None and a == b) for a, b in zip(before, after))
                require(once, "a dimension is repeated")
            shapes = [reader.val(v).shape for v in inputs]
            require(_broadcast_to(out, shapes), "the shape would be another")
            return Region(node.outputs, inputs, (node, inner), (node.op, node.attrs))
        return None

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        name, attrs = region.data
        return op[name](*inputs, attrs=attrs)


def _broadcast_to(out: tuple[Dim, ...], shapes: list[tuple[Dim, ...]]) -> bool:
    """Whether, of shapes that broadcast, each dimension of the result stands in one of them."""
    for i, dim in enumerate(reversed(out)):
        dims = [s[-1 - i] for s in shapes if len(s) > i]
        if dim is None or dim not in dims:
            return False
    return True
