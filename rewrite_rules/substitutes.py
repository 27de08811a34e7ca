"""Rules that replace an operator that ONNX Runtime computes slowly by several that it computes fast.

Where that gains is decided by measured costs of operators. Generated kernels do not have these weaknesses, so the rules
are offered only for ONNX Runtime.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.axes import front, fronts, reshape_numbers
from rewrite_rules.convolution import meets_whole, pads_of, per_axis, worthwhile_data
from rewrite_rules.elementwise import FLOAT, WIDE, keeps_shape
from rewrite_rules.examples import graphs
from rewrite_rules.reading import number_for
from rewrite_rules.shapes import per_rank
from xrlflow.ir import Dim, DType
from xrlflow.rewrite import Captures, Op, Rule, Val, accurate, profitable, require

# Limit of the axis. Along an axis that is not the last, ONNX Runtime's ReduceSum adds one element after the other: with
# 512 exponentials the error of a softmax is 4 times that of a softmax that adds in vectors.
_IN_ORDER = 512
# The longest axis that is summed by a product with a row of ones, which the model's file has to hold.
_LONGEST_ROW = 4096


class _Substitute(Rule, family="idioms"):
    """A rule that is offered only for ONNX Runtime."""

    backend = "onnxruntime"
    dtypes: ClassVar[frozenset[DType] | None] = FLOAT
    shapes = "x[...]:float"


# Softmax and reductions along an axis that is not the last


class ReplaceSoftmaxByExp(_Substitute):
    """softmax(x) -> e / sum(e)  with e = exp(x - max(x)), over an axis that is not the last;  LogSoftmax alike.

    ONNX Runtime's kernel works along the last axis; for another axis it transposes the tensor before and after.
    Transposing in the graph does not help: ONNX Runtime moves the transposes back.
    """

    proof = "numeric"
    relies_on = "log(exp(a) / b) = a - log(b)"
    nonempty = True
    may_add_nonfinite = (
        True  # in double precision, ONNX Runtime's LogSoftmax gives numbers in rows with infinite elements
    )
    dtypes = WIDE
    examples = graphs(
        "(float[N,3,4] x) => (float[N,3,4] y) { y = Softmax<axis=1>(x) }",
        "(float[N,3,2,2] x) => (float[N,3,2,2] y) { y = LogSoftmax<axis=-3>(x) }",
    )
    near_misses = graphs("(float[2,3,4] x) => (float[2,3,4] y) { y = Softmax(x) }")

    def source(self, op: Op, x: Any) -> Any:
        return op.any_of(("LogSoftmax", "Softmax"), "f")(x, axis="axis")

    def where(self, m: Captures, x: Val) -> None:
        axis = front(m.axis, x.rank)
        profitable(axis < x.rank - 1, "the axis is the last")
        accurate(x.size(axis) <= _IN_ORDER, "a sum of so many exponentials loses accuracy")
        worthwhile_data(x)

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        axes = [front(m.axis, x.rank)]
        less = op.Sub(x, op.ReduceMax(x, axes))
        powers = op.Exp(less)
        total = op.ReduceSum(powers, axes)
        return op.Div(powers, total) if m.f == "Softmax" else op.Sub(less, op.Log(total))


class _SubstituteReduce(_Substitute):
    """A rule for a reduction along neighbouring axes before the last."""

    shapes = "x[...]:float axes:const"
    dtypes = WIDE

    def where(self, m: Captures, x: Val, axes: Val) -> None:
        profitable(axes.ints, "it reduces everything, or nothing")
        first, last = self._ends(x, axes)
        profitable(last - first + 1 == len(axes.ints), "the axes are no neighbours")
        profitable(last < x.rank - 1, "the last axis is reduced")
        worthwhile_data(x)

    @staticmethod
    def _ends(x: Val, axes: Val) -> tuple[int, int]:
        """The first and the last of the axes."""
        reduced = fronts(axes.ints, x.rank)
        return min(reduced), max(reduced)


class ReplaceReduceByMatMul(_SubstituteReduce):
    """sum(x) -> [1 1 ... 1] @ x  along axes that are not the last, seen as one;  the mean alike, by a row of 1/n.

    A matrix product adds partial sums, so its error is half that of ONNX Runtime's ReduceSum, which adds one element
    after the other.
    """

    nonempty = True
    examples = graphs(
        "(float[N,3,4] x) => (float[N,1,4] y) { y = ReduceSum(x, [1]) }",
        "(float[2,3,4,5] x) => (float[2,4,5] y) { y = ReduceMean<keepdims=0>(x, [-3]) }",
        "(float[N,3,2,2] x) => (float[N,1,1,2] y) { y = ReduceMean(x, [2, 1]) }",
        "(float[3,4] x) => (float[4] y) { y = ReduceSum<keepdims=0>(x, [0]) }",
    )
    near_misses = graphs(
        "(float[2,3,2,4] x) => (float[1,3,1,4] y) { y = ReduceSum(x, [0, 2]) }",
        "(float[2,3] x) => (float[2,1] y) { y = ReduceSum(x, [1]) }",
    )

    def source(self, op: Op, x: Any, axes: Any) -> Any:
        return op.any_of(("ReduceMean", "ReduceSum"), "reduce")(x, axes, attrs="a")

    def where(self, m: Captures, x: Val, axes: Val) -> None:
        super().where(m, x, axes)
        first, last = self._ends(x, axes)
        profitable(
            1 < prod(x.size(i) for i in range(first, last + 1)) <= _LONGEST_ROW, "the axis is too long"
        )

    def target(self, op: Op, m: Captures, x: Val, axes: Val) -> Any:
        first, last = self._ends(x, axes)
        count = prod(x.size(i) for i in range(first, last + 1))
        lead, tail = x.shape[:first], x.shape[last + 1 :]
        weight = op.Div(np.ones(1, x.storage), float(count if m.reduce == "ReduceMean" else 1))
        flat = _viewed(op, x, (*lead, count, _product(tail)))
        y = op.MatMul(op.Expand(weight, [1, count]), flat)
        if m.a.get("keepdims", 1):
            return _viewed(op, y, (*lead, *[1] * (last - first + 1), *tail))
        return op.Squeeze(y, [first]) if len(tail) == 1 else _viewed(op, y, (*lead, *tail))


def _product(dims: tuple[Dim, ...]) -> Dim:
    """The product of dimensions. A single dimension is returned as it is; None for several of which one is no
    number.
    """
    if len(dims) == 1:
        return dims[0]
    numbers = [d for d in dims if isinstance(d, int)]
    return prod(numbers) if len(numbers) == len(dims) else None


def _viewed(op: Op, x: Val, shape: tuple[Dim, ...]) -> Any:
    """x in another shape with the same number of elements."""
    return x if x.shape == shape else op.Reshape(x, reshape_numbers(x.shape, shape))


class ReplaceReduceBySplit(_SubstituteReduce):
    """max(x) -> max(x_0, x_1, ...)  along an axis of few elements that is not the last, x split;  the least alike."""

    proof = "numeric"
    relies_on = "the greatest and the least of several are those of all elements"
    may_add_nonfinite = True  # ONNX Runtime's reductions ignore a NaN that is not the first element
    most = 32
    examples = graphs(
        "(float[N,3,4] x) => (float[N,1,4] y) { y = ReduceMax(x, [1]) }",
        "(float[2,3,4,5] x) => (float[2,4,5] y) { y = ReduceMin<keepdims=0>(x, [-3]) }",
    )
    near_misses = graphs(
        "(float[2,3,2,4] x) => (float[2,1,1,4] y) { y = ReduceMax(x, [1, 2]) }",
        "(float[2,3] x) => (float[2,1] y) { y = ReduceMax(x, [1]) }",
    )

    def source(self, op: Op, x: Any, axes: Any) -> Any:
        return op.any_of(("ReduceMax", "ReduceMin"), "reduce")(x, axes, attrs="a")

    def where(self, m: Captures, x: Val, axes: Val) -> None:
        super().where(m, x, axes)
        first, last = self._ends(x, axes)
        profitable(first == last, "several axes are reduced")
        profitable(1 < x.size(first) <= self.most, "the axis is too long")

    def target(self, op: Op, m: Captures, x: Val, axes: Val) -> Any:
        axis, _ = self._ends(x, axes)
        parts = op.Split(x, axis=axis, sizes=[1] * x.size(axis), outputs=x.size(axis))
        y = op[m.reduce.removeprefix("Reduce")](*parts)
        return y if m.a.get("keepdims", 1) else op.Squeeze(y, [axis])


# Functions of one number


class ReplaceSoftplusByLog(_Substitute):
    """softplus(x) -> relu(x) + (log(1 + e) + (e - ((1 + e) - 1)))  with e = exp(-|x|).

    Without rounding the last term would be 0. It is the part of e that rounding 1 + e loses, and keeps small results
    exact.
    """

    proof = "numeric"
    relies_on = "log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|))"
    survivors: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("omit Add (call 8)", "swap 0 1 of Sub (call 5)"),
        "what changes is 0 but for rounding (the rule's own tests see it)",
    )

    def source(self, op: Op, x: Any) -> Any:
        return op.Softplus(x)

    def target(self, op: Op, x: Val) -> Any:
        power = op.Exp(op.Neg(op.Abs(x)))
        more = op.Add(power, 1)
        error = op.Sub(power, op.Sub(more, 1))
        return op.Add(op.Relu(x), op.Add(op.Log(more), error))


class ReplaceMishByExp(_Substitute):
    """mish(x) -> x * (n / (n + 2))  with n = e * (e + 2), e = exp(min(x, 20)).

    For x beyond 20 the quotient is rounded to 1, so the minimum changes nothing. It prevents an overflow.
    """

    proof = "numeric"
    relies_on = "tanh(log(1 + e)) = (e^2 + 2 * e) / (e^2 + 2 * e + 2), which is 1 for e >= exp(20)"

    survivors: ClassVar[Mapping[str, str]] = {
        "number 2 0 of Clip (call 0)": "the quotient is rounded to 1 from 20 on, and so it is from 21 on"
    }

    def source(self, op: Op, x: Any) -> Any:
        return op.Mish(x)

    def target(self, op: Op, x: Val) -> Any:
        power = op.Exp(op.Clip(x, -math.inf, 20.0))
        part = op.Mul(power, op.Add(power, 2))
        return op.Mul(x, op.Div(part, op.Add(part, 2)))


def _exponential_less_one(op: Op, x: Any, alpha: float, scale: float = 1.0) -> Any:
    """The value alpha * (exp(min(x, 0) * scale) - 1), which ONNX Runtime's kernels compute for x below 0."""
    low = op.Clip(x, -math.inf, 0.0)
    power = op.Sub(op.Exp(low if scale == 1 else op.Mul(low, scale)), 1)
    return power if alpha == 1 else op.Mul(power, alpha)


class ReplaceEluByExp(_Substitute):
    """elu(x) -> max(x, a * (exp(min(x, 0)) - 1))  for a <= 1."""

    proof = "numeric"
    relies_on = "exp(x) - 1 >= x, so that a * (exp(x) - 1) >= x for x < 0 and a <= 1"
    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { y = Elu(x) }",
        "(float[N,3] x) => (float[N,3] y) { y = Elu<alpha=0.5>(x) }",
    )
    near_misses = graphs("(float[N,3] x) => (float[N,3] y) { y = Elu<alpha=1.5>(x) }")

    def source(self, op: Op, x: Any) -> Any:
        return op.Elu(x, alpha="alpha")

    def where(self, m: Captures) -> None:
        require(-math.inf < m.alpha <= 1, "the line is above the exponential")

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return op.Max(x, _exponential_less_one(op, x, m.alpha))


class ReplaceCeluByExp(_Substitute):
    """celu(x) -> max(x, a * (exp(min(x, 0) / a) - 1))  for a > 0."""

    proof = "numeric"
    relies_on = "a * (exp(x / a) - 1) >= x for a > 0"
    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { y = Celu(x) }",
        "(float[N,3] x) => (float[N,3] y) { y = Celu<alpha=2.0>(x) }",
    )
    near_misses = graphs("(float[N,3] x) => (float[N,3] y) { y = Celu<alpha=-2.0>(x) }")

    def source(self, op: Op, x: Any) -> Any:
        return op.Celu(x, alpha="alpha")

    def where(self, m: Captures) -> None:
        require(0 < m.alpha < math.inf, "the line is above the exponential")

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return op.Max(x, _exponential_less_one(op, x, m.alpha, 1 / m.alpha))


class ReplaceSeluByExp(_Substitute):
    """selu(x) -> (relu(x) + a * (exp(min(x, 0)) - 1)) * g."""

    proof = "numeric"
    relies_on = "exp(0) = 1"
    examples = graphs("(float[N,3] x) => (float[N,3] y) { y = Selu<alpha=1.5, gamma=0.5>(x) }")

    def source(self, op: Op, x: Any) -> Any:
        return op.Selu(x, alpha="alpha", gamma="gamma")

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return op.Mul(op.Add(op.Relu(x), _exponential_less_one(op, x, m.alpha)), m.gamma)


class ReplacePReluByMax(_Substitute):
    """prelu(x, a) -> max(x, a * x)  for slopes up to 1, or relu(x) + a * min(x, 0)  for others."""

    proof = "numeric"
    relies_on = "a * x >= x for x < 0 and a <= 1"
    shapes = "x[...]:float a[...]:const"
    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { y = PRelu(x, [0.5, -1, 1]) }",
        "(float[2,3,4] x) => (float[2,3,4] y) <float[3,1] a = {0.5, 0.25, 2}> { y = PRelu(x, a) }",
        "(float[N,3] x) => (float[N,3] y) { y = PRelu(x, [0.5, 0, 1]) }",
    )
    near_misses = graphs("(float[3] x) => (float[3] y) { a = Log([0.0, 1, 2]) y = PRelu(x, a) }")

    def source(self, op: Op, x: Any, a: Any) -> Any:
        return op.PRelu(x, a)

    def where(self, x: Val, a: Val) -> None:
        require(keeps_shape(x.type.shape, a.type.shape), "it may broadcast")
        require(np.all(np.isfinite(a.array)), "a slope is not finite")

    def target(self, op: Op, x: Val, a: Val) -> Any:
        if np.all((a.array <= 1) & (a.array != 0)):  # 0 times infinity is no number
            return op.Max(x, op.Mul(x, a))
        return op.Add(op.Relu(x), op.Mul(op.Min(x, 0), a))


class ReplacePowByProducts(_Substitute):
    """x ^ 4 -> (x * x) * (x * x),  x ^ -1 -> 1 / x,  x ^ -2 -> (1 / x) * (1 / x)."""

    dtypes = WIDE
    shapes = "x[...]:float c[...]:const:float"
    examples = graphs(
        *(f"(float[N,3] x) => (float[N,3] y) {{ y = Pow(x, {c}.0) }}" for c in (4, -1, -2)),
        "(double[2,3] x) => (double[2,3] y) <double[1] c = {4}> { y = Pow(x, c) }",
    )
    near_misses = graphs(
        "(float[3] x) => (float[1,3] y) <float[1,1] c = {4}> { y = Pow(x, c) }",
        "(float[3] x) => (float[3] y) { y = Pow(x, [4.0, 4, -1]) }",
        "(float[3] x) => (float[3] y) { y = Pow(x, 4.5) }",
    )

    def source(self, op: Op, x: Any, c: Any) -> Any:
        return op.Pow(x, c)

    def where(self, x: Val, c: Val) -> None:
        profitable(number_for(c, x) in (4, -1, -2), "the power is another")

    def target(self, op: Op, x: Val, c: Val) -> Any:
        if c.uniform == 4:
            square = op.Mul(x, x)
            return op.Mul(square, square)
        inverse = op.Reciprocal(x)
        return inverse if c.uniform == -1 else op.Mul(inverse, inverse)


# Resizing


class _SubstituteResize(_Substitute):
    """A rule for a Resize whose scales or sizes are constants."""

    optional = ("roi", "scales", "sizes")
    shapes = "x[...] scales:const sizes:const"

    def source(self, op: Op, x: Any, roi: Any, scales: Any, sizes: Any) -> Any:
        return op.Resize(x, roi, scales, sizes, attrs="r")

    @staticmethod
    def factors(m: Captures, x: Val, scales: Val | None, sizes: Val | None) -> dict[int, float]:
        """By axis, the factor by which a Resize changes the size; only for axes whose size or scale changes."""
        require("keep_aspect_ratio_policy" not in m.r, "one axis sets the scale of others")
        axes = fronts(m.r["axes"], x.rank) if "axes" in m.r else tuple(range(x.rank))
        if scales is not None and scales.array.size:
            by = dict(zip(axes, map(float, scales.array)))
        else:
            profitable(sizes is not None, "it has neither scales nor sizes")
            targets = () if sizes is None else sizes.ints
            profitable(all(x.size(a) > 0 for a in axes), "it is empty")
            by = {a: size / x.size(a) for a, size in zip(axes, targets)}
        return {a: factor for a, factor in by.items() if factor != 1}


class ReplaceNearestResize(_SubstituteResize):
    """resize(x) to the nearest pixel, enlarged a whole number of times -> the same by other coordinates.

    Pixel i is a copy of pixel floor(i / s), whether coordinates refer to the centres or to the corners of pixels. For
    corners ONNX Runtime has special kernels.
    """

    proof = "numeric"
    relies_on = "(i + 1/2) / s - 1/2 is less than half a pixel from floor(i / s)"
    dtypes = None
    examples = graphs(
        "(float[2,1,2,3] x) => (float[2,1,4,9] y) { y = Resize(x, , [1.0, 1, 2, 3]) }",
        '(float[N,1,3] x) => (float[N,1,6] y) { y = Resize<nearest_mode="round_prefer_ceil", axes=[2], '
        'coordinate_transformation_mode="pytorch_half_pixel">(x, , , [6]) }',
    )
    near_misses = graphs(
        "(float[2,1,2,3] x) => (float[2,1,3,6] y) { y = Resize(x, , [1.0, 1, 1.5, 2]) }",
        '(float[2,1,2,3] x) => (float[2,1,4,6] y) { y = Resize<nearest_mode="floor">(x, , [1.0, 1, 2, 2]) }',
        '(float[2,1,2,3] x) => (float[2,1,4,6] y) { y = Resize<mode="linear">(x, , [1.0, 1, 2, 2]) }',
        "(float[2,1,2,3] x) => (float[2,1,4,6] y) "
        '{ y = Resize<coordinate_transformation_mode="align_corners">(x, , [1.0, 1, 2, 2]) }',
    )

    def where(self, m: Captures, x: Val, scales: Val | None, sizes: Val | None) -> None:
        require(m.r.get("mode", "nearest") == "nearest", "it does not take the nearest pixel")
        coordinates = m.r.get("coordinate_transformation_mode", "half_pixel")
        require(coordinates in ("half_pixel", "pytorch_half_pixel"), "it has other coordinates")
        rounding = m.r.get("nearest_mode", "round_prefer_floor")
        require(rounding in ("round_prefer_floor", "round_prefer_ceil"), "it does not round to the nearest")
        factors = self.factors(m, x, scales, sizes)
        require(all(f >= 1 and f == int(f) for f in factors.values()), "it does not repeat pixels")

    def target(
        self, op: Op, m: Captures, x: Val, roi: Val | None, scales: Val | None, sizes: Val | None
    ) -> Any:
        return op.Resize(
            x, roi, scales, sizes, attrs=m.r,
            coordinate_transformation_mode="asymmetric", nearest_mode="floor",
        )  # fmt: skip


# The most elements of a matrix of interpolation weights, which the model's file has to hold.
_MOST_WEIGHTS = 1 << 18


class ReplaceResizeByMatMul(_SubstituteResize):
    """resize(x) -> a @ x @ b  with the matrices of weights a = resize(1) along rows, b = resize(1) along columns.

    It handles linear and cubic interpolation along the last two axes, or one of them.
    """

    proof = "numeric"
    relies_on = "interpolation is linear in the pixels, one axis after the other"
    nonempty = True
    may_add_nonfinite = True  # weights of 0 multiply infinite pixels
    examples = graphs(
        '(float[2,1,2,3] x) => (float[2,1,4,6] y) { y = Resize<mode="linear">(x, , [1.0, 1, 2, 2]) }',
        '(float[N,2,3,2] x) => (float[N,2,5,2] y) { y = Resize<mode="cubic", axes=[-2], antialias=1, '
        "exclude_outside=1>(x, , , [5]) }",
        '(float[2,2,4] x) => (float[2,2,3] y) { y = Resize<mode="linear", '
        'coordinate_transformation_mode="align_corners">(x, , , [2, 2, 3]) }',
    )
    near_misses = graphs(
        '(float[2,4,4] x) => (float[4,4,4] y) { y = Resize<mode="linear">(x, , [2.0, 1, 1]) }',
        "(float[2,1,2,3] x) => (float[2,1,4,6] y) { y = Resize(x, , [1.0, 1, 2, 2]) }",
        '(float[2,1,2,3] x) => (float[2,1,4,6] y) { y = Resize<mode="linear", '
        'coordinate_transformation_mode="tf_crop_and_resize">(x, [0.0, 0, 0, 0, 1, 1, 1.5, 1], [1.0, 1, 2, 2]) }',
    )

    def where(self, m: Captures, x: Val, scales: Val | None, sizes: Val | None) -> None:
        profitable(m.r.get("mode") in ("linear", "cubic"), "it does not interpolate")
        require(m.r.get("coordinate_transformation_mode") != "tf_crop_and_resize", "it crops")
        worthwhile_data(x)
        factors = self.factors(m, x, scales, sizes)
        profitable(factors, "nothing changes")
        for axis, factor in factors.items():
            require(axis >= x.rank - 2, "an axis is none of the last two")
            simple = factor >= 1 or m.r.get("antialias")
            require(simple, "pixels are left out, whose infinities would show")
            # Runtimes compute the scale differently if the size of the result is rounded.
            size = x.size(axis) * factor
            profitable(math.isclose(size, round(size), rel_tol=1e-9), "the size is rounded")
            profitable(x.rank > 1 and x.size(axis) * size <= _MOST_WEIGHTS, "a matrix is too large")

    def target(self, op: Op, m: Captures, x: Val, scales: Val | None, sizes: Val | None) -> Any:
        axes = fronts(m.r["axes"], x.rank) if "axes" in m.r else tuple(range(x.rank))
        y: Any = x
        for axis in sorted(self.factors(m, x, scales, sizes)):
            rows, index = axis < x.rank - 1, axes.index(axis)
            scale = None if scales is None or not scales.array.size else scales.array[[index]]
            to = [sizes.ints[index]] if scale is None and sizes is not None else None
            one = op.EyeLike(op.Expand(np.zeros(1, np.float32), [x.size(axis)] * 2))
            weights = op.Resize(one, None, scale, to, attrs=m.r, axes=[0 if rows else 1])
            y = op.MatMul(weights, y) if rows else op.MatMul(y, weights)
        return y


# Pixels from channels


class SplitDepthToSpace(_Substitute):
    """depth_to_space(x) -> transpose(transpose(x)): columns first, in which pixels move, then rows, which move whole.

    ONNX Runtime uses a single Transpose of six dimensions, which moves one pixel at a time.
    """

    dtypes = None
    shapes = "x[n,c,h,w]"
    examples = (
        "agraph (float[N,8,3,5] x) => (float[N,2,6,10] y) { y = DepthToSpace<blocksize=2>(x) }",
        'agraph (float[2,9,2,1] x) => (float[2,1,6,3] y) { y = DepthToSpace<blocksize=3, mode="CRD">(x) }',
    )

    def source(self, op: Op, x: Any) -> Any:
        return op.DepthToSpace(x, blocksize="size", mode="mode")

    def where(self, m: Captures, x: Val) -> None:
        profitable(m.size > 1, "the blocks are single pixels")
        worthwhile_data(x)

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        size, batch = m.size, x.shape[0]
        channels, height, width = (x.size(i) for i in (1, 2, 3))
        out = channels // size**2
        # The channels are ordered as (row in the block, column in the block, channel), with CRD as (channel, row,
        # column).
        crd = m.mode == "CRD"
        columns = (out * size, size, height * width) if crd else (size, size, out * height * width)
        pixels = op.Transpose(_viewed(op, x, (batch, *columns)), perm=[0, 1, 3, 2])
        rows = (out, size, height, width * size) if crd else (1, size, out * height, width * size)
        lines = op.Transpose(_viewed(op, pixels, (batch, *rows)), perm=[0, 1, 3, 2, 4])
        return _viewed(op, lines, (batch, out, height * size, width * size))


# Convolutions to few channels


class ReplaceNarrowConvByConvTranspose(_Substitute):
    """conv(x, w, b) -> convtranspose(x, w', b)  with w' = w, its channels exchanged and its taps reversed; no strides.

    The padding of the transposed convolution is the kernel's size less 1 (times the dilation), minus the padding of the
    convolution. For a convolution ONNX Runtime copies the image once for each tap of the kernel, and then multiplies.
    For a transposed convolution it multiplies first, and then moves the results, which are fewer elements if there are
    few output channels.
    """

    nonempty = True
    optional = ("b",)
    shapes = per_rank("x[i,c{h}] w[m,c{k}]:const b[m]", ranks=(1, 2))
    examples = graphs(
        "(float[N,8,3,4] x) => (float[N,1,3,4] y) <float[1,8,3,3] w = {" + ",".join("123456789" * 8) + "}> "
        "{ y = Conv<pads=[1,1,1,1]>(x, w, [3.0]) }",
        "(float[2,8,7] x) => (float[2,2,5] y) <float[2,8,3] w = {" + ",".join("12345678" * 6) + "}> "
        "{ y = Conv<dilations=[2], pads=[0,2]>(x, w) }",
    )
    near_misses = graphs(
        "(float[2,4,7] x) => (float[2,1,3] y) <float[1,4,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}> "
        "{ y = Conv<strides=[2]>(x, w) }",
        "(float[2,4,7] x) => (float[2,1,11] y) <float[1,4,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}> "
        "{ y = Conv<pads=[3,3]>(x, w) }",
        "(float[2,4,7] x) => (float[2,1,7] y) <float[1,4,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}> "
        '{ y = Conv<auto_pad="SAME_UPPER">(x, w) }',
    )

    def source(self, op: Op, x: Any, w: Any, b: Any) -> Any:
        return op.Conv(x, w, b, attrs="c")

    def where(self, m: Captures, x: Val, w: Val) -> None:
        require("strides" not in m.c, "it strides")
        require("auto_pad" not in m.c, "it pads as the image demands")
        profitable(w.size(0) * 4 <= w.size(1), "it has many output channels")
        profitable(prod(w.sizes[2:]) > 1, "the kernel has one tap")
        require(min(self._pads(m, w)) >= 0, "it pads by more than the kernel's reach")
        worthwhile_data(x, w)
        profitable(meets_whole(x, w.sizes[2:], m.c), "the kernel is larger than the image")

    @staticmethod
    def _pads(m: Captures, w: Val) -> list[int]:
        """The padding of the transposed convolution."""
        kernel = w.sizes[2:]
        reach = [d * (k - 1) for d, k in zip(per_axis(m.c, "dilations", len(kernel)), kernel)]
        before, after = pads_of(m.c, len(kernel))
        return [r - p for r, p in zip([*reach, *reach], [*before, *after])]

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        kernel = w.sizes[2:]
        axes = list(range(2, w.rank))
        back = op.Slice(w, [-1] * len(kernel), [-k - 1 for k in kernel], axes, [-1] * len(kernel))
        weights = op.Transpose(back, perm=[1, 0, *axes])
        return op.ConvTranspose(x, weights, b, attrs=m.c, group=None, pads=self._pads(m, w))
