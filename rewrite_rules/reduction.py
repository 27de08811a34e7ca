"""Rules for reductions: decomposed reductions, reductions over dimensions of 1, and reductions of a sum or product with
a constant.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any, ClassVar

from rewrite_rules.axes import fronts
from rewrite_rules.elementwise import FLOAT, WIDE
from rewrite_rules.examples import graphs
from xrlflow.ir import Attrs, DType
from xrlflow.rewrite import Captures, Op, Rule, Val, accurate, profitable, require

# Limit of the number of elements. ONNX Runtime's sums of squares and of magnitudes add one element after the other, its
# ReduceSum adds in a tree. For 64 elements the error of the former is 3 times as large, for 1,024 it is 9 times as
# large, for a million 22 times.
_IN_ORDER = 64


def _reduced_axes(x: Val, axes: Val | None, attrs: Attrs) -> tuple[int, ...]:
    """The axes of a reduction. Refuses axes that are not known."""
    if axes is None or not axes.ints:
        return () if attrs.get("noop_with_empty_axes") else tuple(range(x.rank))
    return fronts(axes.ints, x.rank)


class FuseReduceMean(Rule, family="idioms"):
    """sum(x) / n -> mean(x)  when n elements are summed;  sum(x) * (1/n) alike."""

    proof = "numeric"
    relies_on = "the product with 1/n as its type rounds it"
    dtypes = WIDE
    optional = ("axes",)
    shapes = "x[...]:float axes:const c[...]:const"
    examples = graphs(
        "(float[N,4] x) => (float[N,1] y) { s = ReduceSum(x, [-1]) y = Div(s, 4.0) }",
        "(float[N,2,4] x) => (float[N] y) { s = ReduceSum<keepdims=0>(x, [1, 2]) y = Mul(0.125, s) }",
        "(float[2,3] x) => (float y) { s = ReduceSum<keepdims=0>(x) y = Div(s, 6.0) }",
    )
    near_misses = graphs("(float[2,3] x) => (y) { s = ReduceSum<noop_with_empty_axes=1>(x) y = Div(s, 6.0) }")

    def source(self, op: Op, x: Any, axes: Any, c: Any) -> Any:
        return op.any_of(("Div", "Mul"), "by")(op.ReduceSum(x, axes, attrs="sum"), c)

    def where(self, m: Captures, x: Val, axes: Val | None, c: Val) -> None:
        reduced = _reduced_axes(x, axes, m.sum)
        rank = x.rank if m.sum.get("keepdims", 1) else x.rank - len(reduced)
        require(c.uniform is not None and all(d == 1 for d in c.sizes), "the constant is not one number")
        require(c.rank <= rank, "it may broadcast")
        count = prod(x.size(a) for a in reduced)
        profitable(count, "nothing is summed")
        expected = count if m.by == "Div" else 1 / count
        require(math.isclose(c.scalar, expected, rel_tol=1e-6), "another number of elements is summed")

    def target(self, op: Op, m: Captures, x: Val, axes: Val | None) -> Any:
        return op.ReduceMean(x, axes, attrs=m.sum)


class FuseReduceSumSquare(Rule, family="idioms"):
    """sum(x * x) -> sumsquare(x)  over the same axes;  sum(x^2) alike.

    Integers are excluded: their product wraps around, but ONNX Runtime's sum of squares stops at the greatest number.
    """

    dtypes = WIDE
    optional = ("axes",)
    shapes = "x[...]:float axes:const"
    examples: ClassVar[tuple[str, ...]] = graphs(
        "(float[N,4] x) => (float[N,1] y) { s = Mul(x, x) y = ReduceSum(s, [-1]) }",
        "(float[2,3,4] x) => (float[3] y) { s = Pow(x, 2.0) y = ReduceSum<keepdims=0>(s, [0, 2]) }",
        "(float[2,3] x) => (float[1,1] y) { s = Mul(x, x) y = ReduceSum(s) }",
    )
    reduce = "ReduceSumSquare"

    def summed(self, op: Op, x: Any) -> Any:
        return op.either(op.Mul(x, x), op.Pow(x, 2.0))

    def source(self, op: Op, x: Any, axes: Any) -> Any:
        return op.ReduceSum(self.summed(op, x), axes, attrs="sum")

    def where(self, m: Captures, x: Val, axes: Val | None) -> None:
        sizes = [x.shape[a] for a in _reduced_axes(x, axes, m.sum)]
        profitable(sizes, "it reduces nothing")
        numbers = [d for d in sizes if isinstance(d, int)]
        few = len(numbers) == len(sizes) and prod(numbers) <= _IN_ORDER
        accurate(few, "a sum of so many squares or magnitudes loses accuracy")

    def target(self, op: Op, m: Captures, x: Val, axes: Val | None) -> Any:
        return op[self.reduce](x, axes, attrs=m.sum)


class FuseReduceL1(FuseReduceSumSquare):
    """sum(|x|) -> l1(x)  over the same axes."""

    dtypes = FLOAT
    reduce = "ReduceL1"
    examples = graphs(
        "(float[N,4] x) => (float[N,1] y) { s = Abs(x) y = ReduceSum(s, [-1]) }",
        "(float[2,3,2] x) => (float[3] y) { s = Abs(x) y = ReduceSum<keepdims=0>(s, [0, 2]) }",
        "(float[2,3] x) => (float[1,1] y) { s = Abs(x) y = ReduceSum(s) }",
    )
    near_misses = (
        "agraph (float[2,3] x) => (float[2,3] y) { s = Abs(x) y = ReduceSum<noop_with_empty_axes=1>(s) }",
    )

    def summed(self, op: Op, x: Any) -> Any:
        return op.Abs(x)


class FuseReduceL2(Rule, family="idioms"):
    """sqrt(sumsquare(x)) -> l2(x)  over the same axes."""

    dtypes = FLOAT
    optional = ("axes",)
    shapes = "x[...]:float axes:int"

    def source(self, op: Op, x: Any, axes: Any) -> Any:
        return op.Sqrt(op.ReduceSumSquare(x, axes, keepdims="keep"))

    def target(self, op: Op, m: Captures, x: Val, axes: Val | None) -> Any:
        return op.ReduceL2(x, axes, keepdims=m.keep)


# Integer types that ONNX Runtime's reductions convert to doubles, which cannot hold all 64-bit integers.
_ROUNDED = frozenset({DType.INT64, DType.UINT64})

_REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")


class ReplaceUnitReduceBySqueeze(Rule, family="exports"):
    """reduce(x) -> squeeze(x)  over dimensions of 1: sum, mean, product, greatest and least of one number are it.

    Sums and similar reductions of 64-bit integers are excluded: ONNX Runtime computes them as doubles, which round
    numbers beyond 2^53.
    """

    may_lose_errors = ("sizes",)
    shapes = "x[...] axes:const"
    examples = tuple(
        f"agraph (float[N,1,3] x) => (float[{out}] y) {{ i = Constant<value_ints = [{axis}]>()"
        f" y = {name}{attrs}(x, i) }}"
        for name in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
        for axis, attrs, out in ((1, "<keepdims = 0>", "N,3"), (-2, "", "N,1,3"))
    )
    near_misses = (
        "agraph (int64[40,1] x) => (y) { i = Constant<value_ints = [1]>() y = ReduceSum<keepdims = 0>(x, i) }",
    )

    def source(self, op: Op, x: Any, axes: Any) -> Any:
        return op.any_of(_REDUCTIONS, "reduce")(x, axes, keepdims="keep", attrs="rest")

    def where(self, m: Captures, x: Val, axes: Val) -> None:
        profitable(axes.ints, "it reduces everything, or nothing")
        require(all(x.shape[a] == 1 for a in fronts(axes.ints, x.rank)), "a dimension is not 1")
        exact = m.reduce in ("ReduceMax", "ReduceMin") or x.dtype not in _ROUNDED
        require(exact, "the runtime rounds integers of 64 bits")

    def target(self, op: Op, m: Captures, x: Val, axes: Val) -> Any:
        return x if m.keep else op.Squeeze(x, list(fronts(axes.ints, x.rank)))


_MEANS = ("ReduceMean", "ReduceSum", "GlobalAveragePool", "AveragePool")


class MoveConstantBehindMean(Rule, family="weights_algebra"):
    """mean(x * c) -> mean(x) * c,  mean(x + c) -> mean(x) + c  with c constant, the same along what is averaged.

    The mean may be a ReduceMean, a GlobalAveragePool or an AveragePool that does not count its padding. For the product
    it may also be a ReduceSum.
    """

    dtypes = WIDE
    may_round_inputs = True
    optional = ("axes",)
    shapes = "x[...] c[...]:const axes:const"
    examples = graphs(
        "(float[N,2,3,4] x) => (float[N,2,1,1] y) <float[2,1,1] c = {2,3}> { m = Mul(x, c) y = GlobalAveragePool(m) }",
        "(float[N,2,3,4] x) => (float[N,2,2,3] y) <float[1,2,1,1] c = {2,3}> { m = Add(c, x) "
        "y = AveragePool<kernel_shape=[2,2]>(m) }",
        "(float[N,2,3] x) => (float[N,3] y) { m = Add(x, [2.0, 3, 4]) y = ReduceMean<keepdims=0>(m, [1]) }",
        "(float[N,2,3] x) => (float[N,2,1] y) <float[2,1] c = {2,3}> { m = Mul(x, c) y = ReduceSum(m, [-1]) }",
        "(float[N,2,3] x) => (float[N,2,1] y) <float[2,1] c = {2,3}> { m = Add(x, c) y = ReduceMean(m, [2]) }",
        "(float[N,2,3] x) => (float[N,2,1] y) <float[2,1] c = {2,3}> { m = Add(x, c) y = GlobalAveragePool(m) }",
        "(float[2,3,4] x) => (float[2,4] y) <float[2,1,4] c = {1,2,3,4,5,6,7,8}> { m = Mul(x, c) "
        "y = ReduceMean<keepdims=0>(m, [1]) }",
        "(float[N,2,0] x) => (float[N,0] y) <float[0] c = {}> { m = Mul(x, c) y = ReduceMean<keepdims=0>(m, [1]) }",
        "(float[N,2,4] x) => (float[N,2,P] y) <float[2,1] c = {2,3}> { m = Add(c, x) "
        "y = AveragePool<kernel_shape=[2], count_include_pad=1>(m) }",
        "(float[2,3,4] x) => (float[3,4] y) <float[1,1,4] c = {1,2,3,4}> { m = Mul(x, c) "
        "y = ReduceMean<keepdims=0>(m, [0]) }",
    )
    near_misses = graphs(
        "(float[N,2,3] x) => (float[N,2,4] y) <float[2,1] c = {2,3}> { m = Add(c, x) "
        "y = AveragePool<kernel_shape=[2], pads=[1,1], count_include_pad=1>(m) }",
        "(float[3] x) => (float[3] y) <float[1,1] c = {2}> { m = Mul(x, c) y = ReduceMean<keepdims=0>(m, [0]) }",
        "(float[N,2,4] x) => (float[N,2,P] y) <float[2,1] c = {2,3}> { m = Add(c, x) "
        "y = AveragePool<kernel_shape=[2], strides=[3], ceil_mode=1, count_include_pad=1>(m) }",
    )

    def source(self, op: Op, x: Any, c: Any, axes: Any) -> Any:
        return op.any_of(_MEANS, "mean")(op.any_of(("Add", "Mul"), "by")(x, c), axes, attrs="a")

    def where(self, m: Captures, x: Val, c: Val, axes: Val | None) -> None:
        profitable(not x.const, "both operands are constant")
        require(m.by == "Mul" or m.mean != "ReduceSum", "the constant is summed")
        require(c.rank <= x.rank, "the constant adds a dimension")
        aligned = (1,) * (x.rank - c.rank) + c.sizes
        averaged = self._averaged(m, x, axes)
        require(all(aligned[a] == 1 for a in averaged), "the constant differs along what is averaged")
        if m.mean == "AveragePool" and m.by == "Add":
            padded = "pads" in m.a or "auto_pad" in m.a or "ceil_mode" in m.a
            require(not padded or not m.a.get("count_include_pad"), "what is padded is counted")

    @staticmethod
    def _averaged(m: Captures, x: Val, axes: Val | None) -> tuple[int, ...]:
        return _reduced_axes(x, axes, m.a) if m.mean.startswith("Reduce") else tuple(range(2, x.rank))

    def target(self, op: Op, m: Captures, x: Val, c: Val, axes: Val | None) -> Any:
        lead = x.rank - c.rank
        dropped = (
            [] if m.a.get("keepdims", 1) else [a - lead for a in self._averaged(m, x, axes) if a >= lead]
        )
        return op[m.by](op[m.mean](x, axes, attrs=m.a), op.Squeeze(c, dropped) if dropped else c)
