"""Rules for conditions, comparisons, and casts from and to booleans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rewrite_rules.elementwise import keeps_shape
from rewrite_rules.examples import graphs
from rewrite_rules.reading import COMPARISONS, number_for
from xrlflow.ir import FLOATS, INTEGERS, DType
from xrlflow.rewrite import Captures, Op, Rule, Val, profitable, require


class ReplaceCastLike(Rule, family="idioms"):
    """castlike(x, y) -> cast(x)  to y's element type."""

    proof = "numeric"
    relies_on = "a cast depends on the element type alone"
    shapes = "x y | x:int y:float | x:float y:int | x:bool y:float | x:int y:bool"

    def source(self, op: Op, x: Any, y: Any) -> Any:
        return op.CastLike(x, y, saturate="saturate")

    def where(self, y: Val) -> None:
        profitable(y.dtype != DType.UNDEFINED, "the element type is not known")

    def target(self, op: Op, m: Captures, x: Val, y: Val) -> Any:
        return op.Cast(x, to=int(y.dtype), saturate=m.saturate)


class RemoveConstantWhere(Rule, family="idioms"):
    """where(true, x, y) -> x,  where(false, x, y) -> y."""

    shapes = "c[...]:const:bool x[...] y[...]"

    def source(self, op: Op, c: Any, x: Any, y: Any) -> Any:
        return op.Where(c, x, y)

    def where(self, c: Val, x: Val, y: Val) -> None:
        require(c.uniform is not None, "the condition is not the same everywhere")
        selected, dropped = (x, y) if c.uniform else (y, x)
        for v in (c, dropped):
            require(keeps_shape(selected.type.shape, v.type.shape), "it may broadcast")

    def target(self, op: Op, c: Val, x: Val, y: Val) -> Any:
        return x if c.uniform else y


class ReplaceWhereByCast(Rule, family="idioms"):
    """where(c, 1, 0) -> cast(c),  where(c, 0, 1) -> cast(not c)."""

    proof = "numeric"
    relies_on = "a boolean is cast to 0 or 1"
    shapes = "c[...]:bool a[...]:const b[...]:const"

    dtypes = FLOATS | {DType.INT32, DType.INT64}
    examples = graphs(
        "(bool[N,3] c) => (float[N,3] y) { y = Where(c, 1.0, 0.0) }",
        "(bool[N,3] c) => (int64[N,3] y) { y = Where(c, [0], 1) }",
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


class ReplaceNumberInWhere(Rule, family="idioms"):
    """where(w = k, d, w) -> where(c, a or d, b or d)  for constants, and w = where(c, a, b).

    One number of a mask is replaced by another one.
    """

    proof = "numeric"
    relies_on = "two numbers are equal or not"
    shapes = "c[...]:bool a[...]:const b[...]:const k[...]:const d[...]:const"
    allow_multi_use = True
    examples = graphs(
        "(bool[N,3] c) => (float[N,3] y) { w = Where(c, 0.5, -3.0) e = Equal(w, -3.0) y = Where(e, -2.0, w) }",
        "(bool[N,3] c) => (float[N,3] y) { w = Where(c, 0.5, -3.0) e = Equal(w, 0.5) y = Where(e, -2.0, w) }",
        "(bool[N,3] c) => (int64[N,3] y) { w = Where(c, 5, 4) e = Equal(w, 3) y = Where(e, [2], w) }",
    )
    near_misses = (
        "agraph (bool[N,3] c) => (int64[N,3] y) <int64 a = {9007199254740993}, int64 b = {1}, "
        "int64 k = {9007199254740992}, int64 d = {7}> { w = Where(c, a, b) e = Equal(w, k) y = Where(e, d, w) }",
    )

    def source(self, op: Op, c: Any, a: Any, b: Any, k: Any, d: Any) -> Any:
        w = op.Where(c, a, b)
        return op.Where(op.Equal(w, k), d, w)

    def where(self, c: Val, a: Val, b: Val, k: Val, d: Val) -> None:
        for v in (a, b, k, d):
            require(v.uniform is not None, "a constant is not the same everywhere")
            exact = v.dtype in FLOATS or abs(v.uniform or 0.0) < 2.0**53
            require(exact, "the whole numbers are too large to be compared as floats")
            require(keeps_shape(c.type.shape, v.type.shape), "it may broadcast")

    def target(self, op: Op, c: Val, a: Val, b: Val, k: Val, d: Val) -> Any:
        return op.Where(c, d if a.uniform == k.uniform else a, d if b.uniform == k.uniform else b)


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
        profitable(x.dtype in _ORDERED, "there is no kernel for this element type")

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

    Floats are excluded: for NaN both comparisons are false.
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
        return op.Not(op.any_of(COMPARISONS, "compare")(x, y))

    def where(self, x: Val) -> None:
        require(x.dtype not in FLOATS, "one of the two may be NaN")
        profitable(x.dtype in _ORDERED, "there is no kernel for this element type")

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
    examples = graphs(
        "(bool[N,3] c) => (bool[N,3] y) { i = Cast<to=7>(c) y = Equal(i, 1) }",
        "(bool[N,3] c) => (bool[N,3] y) { f = Cast<to=1>(c) y = Equal(0.0, f) }",
        "(bool[N,3] c) => (bool[N,3] y) { f = Cast<to=1>(c) y = Greater(f, 0.5) }",
    )
    near_misses = (
        "agraph (bool[N,3] c) => (bool[N,3] y) <bool t = {1}> { b = Cast<to=9>(c) y = Equal(b, t) }",
    )

    def source(self, op: Op, c: Any, n: Any) -> Any:
        compare, number = op.any_of(_FUNCTIONS, "compare"), op.Cast(c, to="to")
        return op.either(compare(number, n), compare(n, number), name="turned")

    def where(self, m: Captures, c: Val, n: Val) -> None:
        profitable(m.to in FLOATS | INTEGERS, "it is no number")
        of_false, of_true = self._truth(m, c, n)
        require(of_false != of_true, "it is the same for both")

    def target(self, op: Op, m: Captures, c: Val, n: Val) -> Any:
        return c if self._truth(m, c, n)[1] else op.Not(c)

    @staticmethod
    def _truth(m: Captures, c: Val, n: Val) -> tuple[bool, bool]:
        """The results of the comparison if c is False and if c is True."""
        number, compare = number_for(n, c), _FUNCTIONS[m.compare]
        of_false, of_true = (bool(compare(number, b) if m.turned else compare(b, number)) for b in (0.0, 1.0))
        return of_false, of_true
