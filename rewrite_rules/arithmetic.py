"""Rules for element-wise sums, products, powers and quotients: they associate and factor them and merge their
constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rewrite_rules.elementwise import BROADCAST, WIDE, made_by, read_once, unary_form
from rewrite_rules.examples import graphs
from rewrite_rules.fold_into_weights import NUMBERS
from xrlflow.ir import FLOATS, Dim, DType, Node
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, profitable, require

# Sums and products, element by element


def _at_hand(v: Val) -> bool:
    """Whether a value exists before the graph runs: it is an input of the graph or a constant."""
    return v.const or v.value not in v.graph.producers


def _dim(v: Val, index: int) -> Dim:
    """A dimension counted from the last one, as in broadcasting; 1 if the value has fewer dimensions."""
    return v.shape[-index] if index <= v.rank else 1


def _smaller(a: Val, b: Val, c: Val) -> bool:
    """Whether b and c broadcast to a smaller shape than all three do: along some axis both have one position and a has
    more.
    """
    indices = range(1, max(v.rank for v in (a, b, c)) + 1)
    return any(_dim(b, i) == _dim(c, i) == 1 and _dim(a, i) != 1 for i in indices)


class AssociateAdds(Rule, family="algebra"):
    """(a + b) + c -> a + (b + c)."""

    operator = "Add"
    dtypes = NUMBERS
    may_round_inputs = True
    shapes = "a[...] b[...] c[...]"

    def source(self, op: Op, a: Any, b: Any, c: Any) -> Any:
        return op[self.operator](op[self.operator](a, b), c)

    def where(self, a: Val, b: Val, c: Val) -> None:
        values = (a, b, c)
        profitable(sum(v.const for v in values) < 2, "two constants have rules of their own")
        # Operands that exist before the graph runs may always be combined. Computed operands must be smaller or equal.
        two = sum(_at_hand(v) for v in values) > 1
        profitable(
            two or b.value == c.value or _smaller(a, b, c), "no operand is smaller, repeated, or at hand"
        )

    def target(self, op: Op, a: Val, b: Val, c: Val) -> Any:
        return op[self.operator](a, op[self.operator](b, c))


class AssociateMuls(AssociateAdds):
    """(a * b) * c -> a * (b * c)."""

    operator = "Mul"
    may_round_inputs = False


class FactorOutOfSum(Rule, family="algebra"):
    """x * y + x * z -> x * (y + z)."""

    dtypes = NUMBERS
    may_add_nonfinite = True
    shapes = "x[...] y[...] z[...]"

    def source(self, op: Op, x: Any, y: Any, z: Any) -> Any:
        return op.Add(op.Mul(x, y), op.Mul(x, z))

    def target(self, op: Op, x: Val, y: Val, z: Val) -> Any:
        return op.Mul(x, op.Add(y, z))


class FactorOneOutOfSum(Rule, family="algebra"):
    """x + x * y -> x * (y + 1)."""

    dtypes = NUMBERS
    may_add_nonfinite = True
    shapes = "x[...] y[...]"

    def source(self, op: Op, x: Any, y: Any) -> Any:
        return op.Add(x, op.Mul(x, y))

    def target(self, op: Op, x: Val, y: Val) -> Any:
        return op.Mul(x, op.Add(y, 1))


# Functions that are defined for all numbers and never decrease. Infinity counts as a number: Softsign is left out
# because it is NaN there.
MONOTONE: tuple[str, ...] = (
    *("Atan", "Ceil", "Erf", "Exp", "Floor", "HardSigmoid", "LeakyRelu", "Relu", "Round", "Sigmoid"),
    *("Softplus", "Tanh"),
)

_RISES = "f(x) <= f(y) wherever x <= y"


def _require_rising(node: Node) -> None:
    """Refuse a function whose attributes make it decrease."""
    slope = node.attrs.get("alpha")
    require(not isinstance(slope, float) or slope > 0, "the function falls, or is NaN of infinity")


class PullMonotoneOutOfMax(RegionRule, family="algebra"):
    """max(f(x), f(y)) -> f(max(x, y))  for f that never falls;  Min alike."""

    proof = "numeric"
    relies_on = _RISES
    dtypes = FLOATS
    anchors = ("Max", "Min")
    reads_from = MONOTONE
    examples = (
        "agraph (float[N,3] x, float[3] z) => (float[N,3] y) { a = Relu(x) b = Relu(z) y = Max(a, b) }",
        "agraph (float[2,3] x, float[2,3] z, float[1,3] w) => (float[2,3] y) "
        "{ a = Sigmoid(x) b = Sigmoid(z) c = Sigmoid(w) y = Min(a, b, c) }",
        "agraph (float[2,3] x, float[2,3] z) => (float[2,3] y) "
        "{ a = LeakyRelu<alpha=0.2>(x) b = LeakyRelu<alpha=0.2>(z) y = Max(a, b) }",
        "agraph (float[4] x, float[4] z) => (float[4] y) "
        "{ a = HardSigmoid<alpha=0.5, beta=0.25>(x) b = HardSigmoid<alpha=0.5, beta=0.25>(z) y = Min(a, b) }",
    )
    near_misses = (
        "agraph (float[2,3] x, float[2,3] z) => (float[2,3] y) { a = LeakyRelu<alpha=-0.5>(x) b = "
        "LeakyRelu<alpha=-0.5>(z) y = Max(a, b) }",
        "agraph (float[2,3] x, float[2,3] z) => (float[2,3] y) { a = LeakyRelu<alpha=0.0>(x) b = "
        "LeakyRelu<alpha=0.0>(z) y = Max(a, b) }",
        "agraph (float[2,3] x, float[2,3] z) => (float[2,3] y) { a = Relu(x) b = Tanh(z) y = Max(a, b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = [n for v in node.inputs if (n := made_by(reader, v, *MONOTONE)) is not None]
        if len(inner) != len(node.inputs) or len(set(node.inputs)) < 2:
            return None
        function = unary_form(inner[0])
        if not all(unary_form(n) == function for n in inner):
            return None
        _require_rising(inner[0])
        profitable(all(read_once(reader, v) for v in node.inputs), "a function is read elsewhere")
        inputs = tuple(n.inputs[0] for n in inner)
        return Region(node.outputs, inputs, tuple(dict.fromkeys((node, *inner))), (node.op, *function[:2]))

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        extreme, name, attrs = region.data
        return op[name](op[extreme](*inputs), attrs=attrs)


class PushMonotoneThroughMax(RegionRule, family="algebra"):
    """f(max(x, y)) -> max(f(x), f(y))  for f that never falls, where an operand is constant;  Min alike."""

    proof = "numeric"
    relies_on = _RISES
    dtypes = FLOATS
    anchors = MONOTONE
    reads_from = ("Max", "Min")
    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { a = Max(x, [-1, 0.5, 2]) y = Relu(a) }",
        "(float[2,3] x, float[3] z) => (float[2,3] y) { a = Min(x, z, 1.0) y = Tanh(a) }",
        "(float[2,3] x) => (float[2,3] y) { a = Max(-0.5, x) y = LeakyRelu<alpha=0.1>(a) }",
    )
    near_misses = graphs(
        "(float[2,3] x) => (float[2,3] y) { a = Max(-0.5, x) y = LeakyRelu<alpha=-0.5>(a) }",
        "(float[2,3] x) => (float[2,3] y) { a = Max(x) y = Relu(a) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = made_by(reader, node.inputs[0], "Max", "Min")
        if inner is None:
            return None
        _require_rising(node)
        profitable(any(reader.is_const(v) for v in inner.inputs), "no operand is constant")
        profitable(read_once(reader, node.inputs[0]), "the maximum is read elsewhere")
        return Region(node.outputs, inner.inputs, (node, inner), (inner.op, node.op, node.attrs))

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        extreme, name, attrs = region.data
        return op[extreme](*(op[name](x, attrs=attrs) for x in inputs))


# Powers, quotients, signs


class ReplacePowByProduct(Rule, family="idioms"):
    """x ^ 2 -> x * x."""

    dtypes = WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Pow(x, 2.0)

    def target(self, op: Op, x: Val) -> Any:
        return op.Mul(x, x)


class ReplacePowBySqrt(Rule, family="idioms"):
    """x ^ 0.5 -> sqrt(x).

    For x = minus infinity the left side is infinite, and the right side is NaN.
    """

    may_add_nonfinite = True
    dtypes = WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Pow(x, 0.5)

    def target(self, op: Op, x: Val) -> Any:
        return op.Sqrt(x)


class ReplaceDivByReciprocal(Rule, family="idioms"):
    """x / y -> x * (1 / y)  when y is smaller, and repeated along x."""

    dtypes = WIDE
    shapes = "x[...]:float y[...]:float"

    examples = (
        "agraph (float[N,3] x, float[N,1] z) => (float[N,3] y) { y = Div(x, z) }",
        "agraph (float[2,3,4] x, float[4] z) => (float[2,3,4] y) { y = Div(x, z) }",
        "agraph (double[2,3] x, double z) => (double[2,3] y) { y = Div(x, z) }",
    )

    def source(self, op: Op, x: Any, y: Any) -> Any:
        return op.Div(x, y)

    def where(self, x: Val, y: Val) -> None:
        profitable(not x.const and not y.const, "an operand is constant")
        profitable(_repeats(y.shape, x.shape), "the divisor is not smaller")

    def target(self, op: Op, x: Val, y: Val) -> Any:
        return op.Mul(x, op.Reciprocal(y))


def _repeats(small: tuple[Dim, ...], large: tuple[Dim, ...]) -> bool:
    """Whether a shape has size 1, or no dimension, where the other shape has a larger one."""
    padded = (1,) * (len(large) - len(small)) + small
    aligned = len(padded) == len(large) and all(a == b or a == 1 for a, b in zip(padded, large))
    return aligned and any(a == 1 and b != 1 for a, b in zip(padded, large))


class ReplaceNegByMul(Rule, family="idioms"):
    """-x -> x * -1, so that it can be folded as a factor."""

    dtypes = WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Neg(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Mul(x, -1.0)


class ReplaceMulByNeg(Rule, family="idioms"):
    """x * -1 -> -x."""

    dtypes = WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Mul(x, -1.0)

    def target(self, op: Op, x: Val) -> Any:
        return op.Neg(x)


# The reason why mutants without a condition on the magnitudes of numbers pass.
_ROOM = "the numbers have room in float64, and what the runtime computes in float32 is infinite on both sides"


class _TwoConstants(Rule, family="linear"):
    """A rule for two constants that are applied one after the other."""

    dtypes = NUMBERS
    shapes = "x[...] c[...]:const d[...]:const"

    def where(self, m: Captures, x: Val, c: Val, d: Val) -> None:
        profitable(
            np.broadcast_shapes(c.sizes, d.sizes) in (c.sizes, d.sizes),
            "together the constants are larger than either",
        )


class MergeConstantAdds(_TwoConstants):
    """(x + c) + d -> x + (c + d)  with c and d constant."""

    may_round_inputs = True

    def source(self, op: Op, x: Any, c: Any, d: Any) -> Any:
        return op.Add(op.Add(x, c), d)

    def target(self, op: Op, x: Val, c: Val, d: Val) -> Any:
        return op.Add(x, op.Add(c, d))


class MergeConstantMuls(_TwoConstants):
    """(x * c) * d -> x * (c * d)  with c and d constant."""

    near_misses = (
        "agraph (float[N] x) => (float[N] y) <float c = {1e30}, float d = {1e30}> { a = Mul(x, c) y = Mul(a, d) }",
    )
    survivors: ClassVar[Mapping[str, str]] = {"drop: the product over- or underflows": _ROOM}

    def source(self, op: Op, x: Any, c: Any, d: Any) -> Any:
        return op.Mul(op.Mul(x, c), d)

    def where(self, m: Captures, x: Val, c: Val, d: Val) -> None:
        super().where(m, x, c, d)
        if c.known and d.known and c.dtype in FLOATS:
            product = c.array.astype(np.float64) * d.array.astype(np.float64)
            exact = np.logical_or(c.array == 0, d.array == 0)
            require(bool(np.all(exact | _is_normal(product, c.dtype))), "the product over- or underflows")

    def target(self, op: Op, x: Val, c: Val, d: Val) -> Any:
        return op.Mul(x, op.Mul(c, d))


class PushMulThroughConstantAdd(_TwoConstants):
    """(x + c) * d -> x * d + c * d  with c and d constant."""

    may_round_inputs = True

    def source(self, op: Op, x: Any, c: Any, d: Any) -> Any:
        return op.Mul(op.Add(x, c), d)

    def target(self, op: Op, x: Val, c: Val, d: Val) -> Any:
        return op.Add(op.Mul(x, d), op.Mul(c, d))


def _is_normal(numbers: npt.NDArray[np.float64], dtype: DType) -> npt.NDArray[np.bool_]:
    """Which of the numbers an element type holds with full precision (types wider than float32 count as float32)."""
    smallest, greatest = (6.2e-5, 65504.0) if dtype == DType.FLOAT16 else (1.2e-38, 3.4e38)
    size = np.abs(numbers)
    return (size >= smallest) & (size <= greatest)


# Below this a quotient may overflow, or lose digits of its dividend.
_LEAST_DIVISOR = 1e-6


def _require_divisor(c: Val) -> None:
    size = np.abs(c.array.astype(np.float64))
    require(bool(np.all((size >= _LEAST_DIVISOR) & (size <= 1 / _LEAST_DIVISOR))), "it cannot be divided by")


class PullMulOutOfConstantAdd(_TwoConstants):
    """x * d + c -> (x + c / d) * d  with c and d constant."""

    dtypes = WIDE
    near_misses = (
        "agraph (float[N] x) => (float[N] y) <float c = {1e36}, float d = {1e-5}> { a = Mul(x, d) y = Add(a, c) }",
    )
    survivors: ClassVar[Mapping[str, str]] = {
        "drop: the quotient over- or underflows": _ROOM,
        "drop: it cannot be divided by": _ROOM,
    }

    def source(self, op: Op, x: Any, c: Any, d: Any) -> Any:
        return op.Add(op.Mul(x, d), c)

    def where(self, m: Captures, x: Val, c: Val, d: Val) -> None:
        super().where(m, x, c, d)
        profitable(c.known, "a constant is too large to be sure that there and back is one state")
        _require_divisor(d)
        with np.errstate(all="ignore"):
            quotient = c.array.astype(np.float64) / d.array.astype(np.float64)
        require(
            bool(np.all((c.array == 0) | _is_normal(quotient, c.dtype))), "the quotient over- or underflows"
        )

    def target(self, op: Op, x: Val, c: Val, d: Val) -> Any:
        return op.Mul(op.Add(x, op.Div(c, d)), d)


class ReplaceConstantDivByMul(Rule, family="linear"):
    """x / c -> x * (1 / c)  with c constant."""

    dtypes = WIDE
    shapes = "x[...] c[...]:const"
    survivors: ClassVar[Mapping[str, str]] = {"drop: it cannot be divided by": _ROOM}

    def source(self, op: Op, x: Any, c: Any) -> Any:
        return op.Div(x, c)

    def where(self, c: Val) -> None:
        _require_divisor(c)

    def target(self, op: Op, x: Val, c: Val) -> Any:
        return op.Mul(x, op.Reciprocal(c))


class ReplaceConstantSubByAdd(Rule, family="linear"):
    """x - c -> x + (-c)  with c constant."""

    dtypes = FLOATS | {DType.INT32, DType.INT64}
    shapes = "x[...] c[...]:const"

    def source(self, op: Op, x: Any, c: Any) -> Any:
        return op.Sub(x, c)

    def target(self, op: Op, x: Val, c: Val) -> Any:
        return op.Add(x, op.Neg(c))


class MergeConstantsOfSum(Rule, family="weights_algebra"):
    """(x + c) + (y + d) -> (x + y) + (c + d)  with c and d constant."""

    dtypes = FLOATS | {DType.INT32, DType.INT64}
    may_round_inputs = True
    shapes = "x[...] c[...]:const y[...] d[...]:const"

    def source(self, op: Op, x: Any, c: Any, y: Any, d: Any) -> Any:
        return op.Add(op.Add(x, c), op.Add(y, d))

    def where(self, c: Val, d: Val) -> None:
        profitable(np.broadcast_shapes(c.sizes, d.sizes) in (c.sizes, d.sizes), "together they are larger")

    def target(self, op: Op, x: Val, c: Val, y: Val, d: Val) -> Any:
        return op.Add(op.Add(x, y), op.Add(c, d))


# Broadcasting


class RemoveExpandBeforeBroadcast(RegionRule, family="idioms"):
    """f(expand(x), y) -> f(x, y)  when broadcasting gives the same shape anyway;  Tile of dimensions of 1 alike."""

    may_lose_errors = ("sizes", "indices")
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
        # To this graph the rule does not apply.
        "agraph (float[1,3] x, float[1,3] z) => (float[2,3] y) { s = Constant<value_ints=[2,3]>() e = "
        "Expand(x, s) y = Add(e, z) }",
        "agraph (float[1,3] x, float[2,6] z) => (float[2,6] y) <int64[2] s = {2, 2}> { e = Tile(x, s) y = Add(e, z) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        out = node.types[0].shape
        for index, value in enumerate(node.inputs):
            inner = made_by(reader, value, "Expand", "Tile")
            if inner is None or out is None:
                continue
            inputs = (*node.inputs[:index], inner.inputs[0], *node.inputs[index + 1 :])
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
    """Whether these shapes broadcast to `out`: each dimension of `out` must occur in one of them."""
    for i, dim in enumerate(reversed(out)):
        dims = [s[-1 - i] for s in shapes if len(s) > i]
        if dim is None or dim not in dims:
            return False
    return True
