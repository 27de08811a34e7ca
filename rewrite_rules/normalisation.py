"""Rules that recognise Softmax, LayerNormalization and similar operators, and that fold constants into
normalisations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.axes import axis_of, fronts, ints_input, inverse, is_identity, rank_of, same_dims
from rewrite_rules.constants import slice_constant
from rewrite_rules.elementwise import FLOAT, WIDE, keeps_shape, made_by, read_once, sum_of
from rewrite_rules.examples import graphs
from rewrite_rules.fold_into_weights import STATISTICS, factor_and_shift, flat, normalised
from rewrite_rules.reading import RANK_VIEWS, between, is_number, number_of, only_reader, operands, square_of
from rewrite_rules.shapes import either
from xrlflow.ir import ABSENT, Attrs, Dim, DType, Node, Value
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, profitable, require

# Element types that are computed in float32 at most: a double would lose digits by the default `stash_type`.
_STASHED = frozenset({DType.FLOAT, DType.FLOAT16})


# Parts of regions


def _last_axes(reader: Reader, node: Node) -> int | None:
    """The first reduced axis of a ReduceMean that keeps dimensions and reduces all axes from there on; None for other
    nodes.
    """
    if node.op != "ReduceMean" or node.attrs.get("keepdims", 1) != 1:
        return None
    axes = ints_input(reader, node, 1)
    rank = reader.type(node.inputs[0]).rank
    if not axes or rank is None:
        return None
    axes_ = sorted(fronts(axes, rank))
    return axes_[0] if axes_ == list(range(axes_[0], rank)) else None


def _fits(shape: tuple[Dim, ...] | None, normal: tuple[Dim, ...]) -> bool:
    """Whether a scale or bias has the shape of the normalised dimensions, perhaps with dimensions of 1 before them."""
    if shape is None or len(shape) < len(normal):
        return False
    lead = len(shape) - len(normal)
    return shape[lead:] == normal and None not in normal and all(d == 1 for d in shape[:lead])


def _single(shape: tuple[Dim, ...] | None) -> bool:
    return shape is not None and all(d == 1 for d in shape)


def _parameter(op: Op, v: Val, sizes: tuple[int, ...]) -> Any:
    """A scale or bias, reshaped to the normalised dimensions."""
    if v.shape == sizes:
        return v
    if _single(v.shape):
        return op.Expand(op.Reshape(v, [1]), list(sizes))
    return op.Reshape(v, list(sizes))


def _ones(op: Op, dtype: DType, sizes: tuple[int, ...]) -> Any:
    return op.Expand(op.Cast(np.ones(1, np.float32), to=int(dtype)), list(sizes))


def _normal_sizes(reader: Reader, x: Value, axis: int) -> tuple[int, ...]:
    shape = reader.type(x).shape
    assert shape is not None
    sizes = tuple(d for d in shape[axis:] if isinstance(d, int))
    require(len(sizes) == len(shape) - axis, "a normalised dimension is not a known number")
    return sizes


@dataclass
class _Walk:
    """A region under construction: its nodes so far, and the value up to which they compute."""

    reader: Reader
    nodes: list[Node]
    at: Value

    def take(self, node: Node) -> None:
        if node not in self.nodes:
            self.nodes.append(node)

    def step(self, op: str) -> tuple[Node, Value] | None:
        """If the current value's only reader is `op`, add it and go on to its result. Returns the node and its other
        input, or None.
        """
        node = only_reader(self.reader, self.at)
        if node is None or node.op != op or len(node.inputs) != 2:
            return None
        a, b = node.inputs
        if a == b:
            return None
        return node, (b if a == self.at else a)

    def division(self) -> tuple[Node, Value] | None:
        """Like `step`, for a division by the current value or a product with its Reciprocal."""
        user = only_reader(self.reader, self.at)
        if user is None or user.op != "Reciprocal":
            step = self.step("Div")
            return step if step is not None and step[0].inputs[1] == self.at else None
        self.take(user)
        self.at = user.outputs[0]
        return self.step("Mul")

    def scale(self, sizes: tuple[int, ...]) -> Value | None:
        """If a parameter over the normalised dimensions multiplies the current value, go on to the product. Returns the
        parameter, or None.
        """
        return self._parameter("Mul", sizes)

    def bias(self, sizes: tuple[int, ...]) -> Value | None:
        """If a parameter over the normalised dimensions is added to the current value, go on to the sum. Returns the
        parameter, or None.
        """
        return self._parameter("Add", sizes)

    def _parameter(self, op: str, sizes: tuple[int, ...]) -> Value | None:
        step = self.step(op)
        if step is None:
            return None
        node, parameter = step
        type = self.reader.type(parameter)
        fits = _fits(type.shape, sizes) or (type.const and _single(type.shape))
        if not fits or (not type.const and len(type.shape or ()) != len(sizes)):
            return None
        # Leading dimensions of 1 in a parameter must not add dimensions to the result.
        if len(type.shape or ()) > len(self.reader.type(self.at).shape or ()):
            return None
        self.take(node)
        self.at = node.outputs[0]
        return parameter

    def closed(self, *exempt: Value) -> None:
        """Refuse if an inner value of the region is read elsewhere."""
        members = {n.outputs[0] for n in self.nodes}
        for node in self.nodes:
            out = node.outputs[0]
            if out == self.at or out in exempt:
                continue
            inside = not self.reader.is_output(out) and all(
                u.outputs[0] in members for u in self.reader.users(out)
            )
            profitable(inside, "an inner value is read elsewhere")


# LayerNormalization


@dataclass(frozen=True, slots=True)
class _Deviation:
    """The value sqrt(mean(x^2) + epsilon) over the last axes from one on, and the nodes that compute it."""

    x: Value
    axis: int
    epsilon: float
    nodes: tuple[Node, ...]


def _deviation(reader: Reader, node: Node) -> _Deviation | None:
    """The deviation that a Sqrt computes; None if it computes something else."""
    for mean, c in operands(made_by(reader, node.inputs[0], "Add")):
        epsilon, variance = number_of(reader, c, mean), reader.producer(mean)
        if epsilon is None or variance is None:
            continue
        axis = _last_axes(reader, variance)
        if axis is None:
            continue
        x = square_of(reader, variance.inputs[0])
        if x is not None:
            added, squared = reader.producer(node.inputs[0]), reader.producer(variance.inputs[0])
            nodes = (node, *(n for n in (added, variance, squared) if n is not None))
            return _Deviation(x, axis, epsilon, nodes)
    return None


def _centred(reader: Reader, value: Value) -> tuple[Value, int, list[Node]] | None:
    """A value as x - mean(x) over the last axes: (x, the first of these axes, the nodes); None if it is something
    else.
    """
    node = reader.producer(value)
    if node is None or node.op != "Sub":
        return None
    mean = reader.producer(node.inputs[1])
    if mean is None or mean.inputs[0] != node.inputs[0]:
        return None
    axis = _last_axes(reader, mean)
    return None if axis is None else (node.inputs[0], axis, [node, mean])


class FuseLayerNormalization(RegionRule, family="normalisation"):
    """(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * scale + bias -> layernormalization(x, scale, bias).

    Scale and bias may be missing; the square may be a product, the division a product with the reciprocal; x - mean(x)
    may be computed twice. The new operator computes float16 in float32.
    """

    may_remove_nonfinite = True  # the operator's sums do not overflow where those of the source do

    proof = "numeric"
    relies_on = "a variance is the mean of squared deviations; float32 moments as the operator computes them"
    dtypes = _STASHED
    anchors = ("Sqrt",)
    examples = graphs(
        "(float[N,3,4] x, float[4] g, float[4] b) => (float[N,3,4] y) { m = ReduceMean(x, [-1]) d = Sub(x, m) "
        "s = Pow(d, 2.0) v = ReduceMean(s, [-1]) e = Add(v, 0.00001) r = Sqrt(e) n = Div(d, r) a = Mul(n, g) "
        "y = Add(a, b) }",
        "(float[N,3,4] x) => (float[N,3,4] y) { i = Constant<value_ints=[1, 2]>() "
        "eps = Constant<value_float=0.001>() m = ReduceMean(x, i) d = Sub(x, m) s = Mul(d, d) v = ReduceMean(s, i) "
        "e = Add(v, eps) r = Sqrt(e) t = Reciprocal(r) y = Mul(d, t) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        deviation = _deviation(reader, node)
        centred = None if deviation is None else _centred(reader, deviation.x)
        if deviation is None or centred is None or centred[1] != deviation.axis:
            return None
        x, axis, nodes = centred
        walk = _Walk(reader, [*deviation.nodes, *nodes], node.outputs[0])
        sizes = _normal_sizes(reader, x, axis)
        division = walk.division()
        again = None if division is None else _centred(reader, division[1])
        require(again is not None and again[:2] == (x, axis), "what is divided is not x - mean(x)")
        assert division is not None
        assert again is not None
        for n in (*again[2], division[0]):
            walk.take(n)
        walk.at = division[0].outputs[0]
        scale = walk.scale(sizes)
        bias = walk.bias(sizes)
        walk.closed()
        inputs = (x, *(v for v in (scale, bias) if v is not None))
        data = (axis, deviation.epsilon, sizes, scale is not None, bias is not None)
        return Region((walk.at,), inputs, tuple(walk.nodes), data)

    def target(self, op: Op, region: Region, x: Val, *parameters: Val) -> Any:
        axis, epsilon, sizes, has_scale, has_bias = region.data
        remaining = list(parameters)
        scale = _parameter(op, remaining.pop(0), sizes) if has_scale else _ones(op, x.dtype, sizes)
        bias = _parameter(op, remaining.pop(0), sizes) if has_bias else None
        return op.LayerNormalization(x, scale, bias, axis=axis, epsilon=epsilon)


class FuseMomentsLayerNormalization(Rule, family="normalisation"):
    """x * g + (bias - mean * g), g = scale / sqrt(var + eps) -> layernormalization(x, scale, bias).

    TensorFlow writes it like this (as a batch normalisation by the moments of each row).
    """

    may_remove_nonfinite = True  # the operator's sums do not overflow where those of the source do

    may_add_nonfinite = True
    proof = "numeric"
    relies_on = "a variance is the mean of squared deviations; sums in another order"
    dtypes = _STASHED
    shapes = "x[...] axes:const eps[...]:const scale[...] bias[...]"
    examples = (
        "agraph (float[N,3,4] x, float[4] s, float[4] b) => (float[N,3,4] y) { i = Constant<value_ints=[-1]>() "
        "eps = Constant<value_float=0.001>() m = ReduceMean(x, i) d = Sub(x, m) q = Mul(d, d) "
        "v = ReduceMean(q, i) e = Add(v, eps) r = Sqrt(e) t = Reciprocal(r) g = Mul(t, s) "
        "xg = Mul(x, g) mg = Mul(m, g) c = Sub(b, mg) y = Add(xg, c) }",
    )
    near_misses = (
        examples[0].replace("[N,3,4] x, float[4] s, float[4] b", "[N,3,D] x, float[D] s, float[D] b"),
        examples[0].replace("y = Add(xg, c)", "y = Sub(xg, c)"),
        examples[0].replace("float[4] b) => (float[N,3,4] y)", "float[1,1,1,4] b) => (y)"),
    )

    def source(self, op: Op, x: Any, axes: Any, eps: Any, scale: Any, bias: Any) -> Any:
        mean = op.ReduceMean(x, axes)
        centred = op.Sub(x, mean)
        variance = op.ReduceMean(op.either(op.Mul(centred, centred), op.Pow(centred, 2.0)), axes)
        factor = op.Mul(op.Reciprocal(op.Sqrt(op.Add(variance, eps))), scale)
        return op.Add(op.Mul(x, factor), op.Sub(bias, op.Mul(mean, factor)))

    def where(self, x: Val, axes: Val, eps: Val, scale: Val, bias: Val) -> None:
        sizes = self._sizes(x, axes)
        require(eps.scalar is not None and eps.rank <= x.rank, "the epsilon adds a dimension")
        single = scale.const and _single(scale.shape)
        require(single or _fits(scale.shape, sizes), "the scale is not of the normalised dimensions")
        require(_fits(bias.shape, sizes), "the bias is not of the normalised dimensions")
        require(max(scale.rank, bias.rank) <= x.rank, "a parameter adds a dimension")

    @staticmethod
    def _sizes(x: Val, axes: Val) -> tuple[int, ...]:
        fronts_ = sorted(fronts(axes.ints, x.rank))
        require(fronts_ and fronts_ == list(range(fronts_[0], x.rank)), "the axes are not the last")
        return tuple(x.size(i) for i in fronts_)

    def target(self, op: Op, x: Val, axes: Val, eps: Val, scale: Val, bias: Val) -> Any:
        sizes = self._sizes(x, axes)
        scale, bias = _parameter(op, scale, sizes), _parameter(op, bias, sizes)
        return op.LayerNormalization(x, scale, bias, axis=x.rank - len(sizes), epsilon=eps.scalar)


class FuseRMSNormalization(RegionRule, family="normalisation"):
    """x / sqrt(mean(x^2) + eps) * scale -> rmsnormalization(x, scale)."""

    may_remove_nonfinite = True  # the operator's sums do not overflow where those of the source do

    proof = "numeric"
    relies_on = "the square root of the mean square, then its reciprocal or the quotient"
    dtypes = _STASHED
    anchors = ("Sqrt",)
    examples = (
        "agraph (float[N,3,4] x, float[4] g) => (float[N,3,4] y) { i = Constant<value_ints=[-1]>() "
        "two = Constant<value_float=2.0>() eps = Constant<value_float=0.00001>() s = Pow(x, two) "
        "v = ReduceMean(s, i) e = Add(v, eps) r = Sqrt(e) t = Reciprocal(r) n = Mul(x, t) y = Mul(g, n) }",
    )
    near_misses = (examples[0].replace("float[N,3,4] x, float[4] g", "float[N,3,D] x, float[D] g"),)
    survivors: ClassVar[Mapping[str, str]] = {
        "drop: a normalised dimension is not a known number": "ONNX lets a scale of one number broadcast"
    }

    def find(self, reader: Reader, node: Node) -> Region | None:
        deviation = _deviation(reader, node)
        if deviation is None:
            return None
        x, axis = deviation.x, deviation.axis
        profitable(_centred(reader, x) is None, "it is a LayerNormalization")
        walk = _Walk(reader, list(deviation.nodes), node.outputs[0])
        division = walk.division()
        if division is None or division[1] != x:
            return None
        walk.take(division[0])
        walk.at = division[0].outputs[0]
        sizes = _normal_sizes(reader, x, axis)
        scale = walk.scale(sizes)
        walk.closed()
        inputs = (x,) if scale is None else (x, scale)
        return Region((walk.at,), inputs, tuple(walk.nodes), (axis, deviation.epsilon, sizes))

    def target(self, op: Op, region: Region, x: Val, scale: Val | None = None) -> Any:
        axis, epsilon, sizes = region.data
        weight = _ones(op, x.dtype, sizes) if scale is None else _parameter(op, scale, sizes)
        return op.RMSNormalization(x, weight, axis=axis, epsilon=epsilon)


# The addition before a LayerNormalization


class ReplaceAddBySum(RegionRule, family="normalisation"):
    """layernormalization(a + b) -> layernormalization(sum(a, b)).

    ONNX Runtime fuses an Add and a LayerNormalization into a SkipLayerNormalization, which on several threads is slower
    than the two operators. It does not fuse a Sum.
    """

    unpriced = True
    backend = "onnxruntime"
    dtypes = FLOAT
    anchors = ("LayerNormalization",)
    examples = (
        "agraph (float[N,3,4] a, float[N,3,4] b, float[4] s) => (float[N,3,4] y) "
        "{ c = Add(a, b) y = LayerNormalization(c, s) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        add = reader.producer(node.inputs[0])
        if add is None or add.op != "Add":
            return None
        # If the sum has other readers, ONNX Runtime does not fuse it.
        profitable(read_once(reader, add.outputs[0]), "the sum is read elsewhere")
        return Region(add.outputs, add.inputs, (node, add))

    def target(self, op: Op, region: Region, a: Val, b: Val) -> Any:
        return op.Sum(a, b)


def _without_views(reader: Reader, value: Value) -> Value:
    """The value from which a chain of views (Reshape, Squeeze, ...) computes this value."""
    while (node := made_by(reader, value, *RANK_VIEWS)) is not None:
        value = node.inputs[0]
    return value


def _axes(reader: Reader, node: Node) -> tuple[int, ...] | None:
    """The sorted axes of a reduction, counted from the front; None if they are not known."""
    rank = reader.type(node.inputs[0]).rank
    axes = ints_input(reader, node, 1)
    if rank is None or (not axes and node.attrs.get("noop_with_empty_axes")):
        return None
    return tuple(sorted(fronts(axes or tuple(range(rank)), rank)))


def _keeps_axes(reader: Reader, value: Value, x: Value, axes: tuple[int, ...]) -> bool:
    """Whether a value, a view of a reduction of x over the axes, has x's dimensions with 1 for these axes.

    An Expand among the views then repeats nothing: it adds no elements.
    """
    shape = reader.type(x).shape or ()
    return same_dims(reader.type(value).shape, [1 if i in axes else d for i, d in enumerate(shape)])


def _reduced(reader: Reader, value: Value, x: Value, op: str) -> tuple[int, ...] | None:
    """The axes over which `op` reduces x to a value that has size 1 along them; None if the value is something else."""
    node = made_by(reader, _without_views(reader, value), op)
    axes = None if node is None or node.inputs[0] != x else _axes(reader, node)
    return axes if axes is not None and _keeps_axes(reader, value, x, axes) else None


# Softmax


def _less_its_greatest(reader: Reader, value: Value) -> tuple[Value, tuple[int, ...]] | None:
    """(x, axes) if a value is x - max(x) over these axes; else None."""
    node = made_by(reader, value, "Sub")
    if node is None:
        return None
    axes = _reduced(reader, node.inputs[1], node.inputs[0], "ReduceMax")
    return None if axes is None else (node.inputs[0], axes)


class FuseSoftmax(RegionRule, family="idioms"):
    """exp(x - max(x)) / sum(exp(x - max(x))) -> softmax(x)  along one axis;  the product with the reciprocal alike."""

    may_lose_errors = ("sizes",)
    proof = "numeric"
    relies_on = "exp(a - b) = exp(a) / exp(b)"
    dtypes = WIDE
    anchors = ("Div", "Mul")
    reads_from = ("Exp",)
    examples: ClassVar[tuple[str, ...]] = graphs(
        "(float[N,3] x) => (float[N,3] y) { m = ReduceMax(x, [-1]) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, [-1]) "
        "y = Div(e, s) }",
        "(float[2,3,4] x) => (float[2,3,4] y) { m = ReduceMax(x, [1]) d = Sub(x, m) e = Exp(d) "
        "s = ReduceSum(e, [1]) r = Reciprocal(s) y = Mul(r, e) }",
        "(float[2,3,4] x) => (float[2,3,4] y) { i = Constant<value_ints=[-1]>() m = ReduceMax<keepdims=0>(x, i) "
        "u = Unsqueeze(m, i) d = Sub(x, u) e = Exp(d) s = ReduceSum<keepdims=0>(e, i) t = Unsqueeze(s, i) "
        "y = Div(e, t) }",
        "(float[N,1,3] x) => (float[N,1,3] y) { m = ReduceMax<keepdims=0>(x, [2]) u = Reshape(m, [-1, 1, 1]) "
        "d = Sub(x, u) e = Exp(d) s = ReduceSum(e, [2]) y = Div(e, s) }",
        "(float[N,M,3] x) => (float[N,M,3] y) { m = ReduceMax<keepdims=0>(x, [2]) u = Reshape(m, [0, -1, 1]) "
        "d = Sub(x, u) e = Exp(d) s = ReduceSum(e, [2]) y = Div(e, s) }",
    )
    near_misses: ClassVar[tuple[str, ...]] = graphs(
        "(float[3,3] x) => (float[3,3] y) { m = ReduceMax<keepdims=0>(x, [1]) u = Unsqueeze(m, [0]) d = Sub(x, u) "
        "e = Exp(d) s = ReduceSum(e, [1]) y = Div(e, s) }",
        "(float[N,0,3] x) => (float[M,0,3] y) { m = ReduceMax<keepdims=0>(x, [2]) u = Reshape(m, [2, 0, 1]) "
        "d = Sub(x, u) e = Exp(d) s = ReduceSum(e, [2]) y = Div(e, s) }",
        "(float[N,3] x) => (float[2,3] y) { m = ReduceMax(x, [1]) t = Expand(m, [2, 1]) u = Reshape(t, [-1, 1]) "
        "d = Sub(x, u) e = Exp(d) s = ReduceSum(e, [1]) y = Div(e, s) }",
        "(float[2,3] x, float[2,3] z) => (float[2,3] y) { m = ReduceMax<keepdims=0>(z, [1]) u = Unsqueeze(m, [1]) "
        "d = Sub(x, u) e = Exp(d) s = ReduceSum(e, [1]) y = Div(e, s) }",
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
                return Region(node.outputs, (x,), between(reader, node.outputs[0], (x,)), axes[0])
        return None

    def argument(self, reader: Reader, value: Value, axes: tuple[int, ...]) -> Value | None:
        """The argument of the softmax, if `value` is the argument of its exponential; else None."""
        shifted = _less_its_greatest(reader, value)
        return None if shifted is None or shifted[1] != axes else shifted[0]

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.Softmax(x, axis=region.data)


class FuseUnshiftedSoftmax(FuseSoftmax):
    """exp(x) / sum(exp(x)) -> softmax(x)  along one axis;  the product with the reciprocal alike.

    Where the exponentials overflow, the left side is NaN, but the right side is not.
    """

    may_add_nonfinite = True
    may_remove_nonfinite = True

    near_misses = ()
    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { e = Exp(x) s = ReduceSum(e, [-1]) y = Div(e, s) }",
        "(float[2,3,4] x) => (float[2,3,4] y) { e = Exp(x) s = ReduceSum(e, [1]) r = Reciprocal(s) y = Mul(e, r) }",
    )

    def argument(self, reader: Reader, value: Value, axes: tuple[int, ...]) -> Value | None:
        return value if _less_its_greatest(reader, value) is None else None


class FuseLogSoftmax(RegionRule, family="idioms"):
    """(x - max(x)) - log(sum(exp(x - max(x)))) -> logsoftmax(x)  along one axis."""

    proof = "numeric"
    relies_on = "exp(a - b) = exp(a) / exp(b)"
    dtypes = WIDE
    anchors = ("Sub",)
    reads_from = ("Log", *RANK_VIEWS)
    examples = graphs(
        "(float[N,3] x) => (float[N,3] y) { m = ReduceMax(x, [-1]) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, [-1]) "
        "l = Log(s) y = Sub(d, l) }",
        "(float[2,3,4] x) => (float[2,3,4] y) { m = ReduceMax(x, [1]) d = Sub(x, m) e = Exp(d) "
        "s = ReduceSum(e, [1]) l = Log(s) y = Sub(d, l) }",
        "(float[2,3,4] x) => (float[2,3,4] y) { m = ReduceMax(x, [-1]) d = Sub(x, m) e = Exp(d) "
        "s = ReduceSum<keepdims=0>(e, [-1]) l = Log(s) t = Unsqueeze(l, [-1]) y = Sub(d, t) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        shifted, value = node.inputs
        log = made_by(reader, _without_views(reader, value), "Log")
        summed = None if log is None else made_by(reader, log.inputs[0], "ReduceSum")
        exponential = None if summed is None else made_by(reader, summed.inputs[0], "Exp")
        argument = _less_its_greatest(reader, shifted)
        if summed is None or exponential is None or argument is None:
            return None
        x, axes = argument
        if exponential.inputs[0] != shifted or len(axes) != 1 or _axes(reader, summed) != axes:
            return None
        if not _keeps_axes(reader, value, x, axes):
            return None
        return Region(node.outputs, (x,), between(reader, node.outputs[0], (x,)), axes[0])

    def target(self, op: Op, region: Region, x: Val) -> Any:
        return op.LogSoftmax(x, axis=region.data)


class FuseLogOfSoftmax(Rule, family="idioms"):
    """log(softmax(x)) -> logsoftmax(x).

    Where the softmax underflows, the left side is minus infinity, but the right side is not.
    """

    may_remove_nonfinite = True

    proof = "numeric"
    relies_on = "log(exp(x) / s) = x - log(s)"
    dtypes = WIDE
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Log(op.Softmax(x, axis="axis"))

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        return op.LogSoftmax(x, axis=m.axis)


# Normalisations by moments


def _mean(reader: Reader, value: Value) -> tuple[Value, tuple[int, ...]] | None:
    """(x, axes) if a value is the mean of x over these axes (with or without keepdims); else None."""
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
    """(x, axes) if a value is the reduction `op` of x over these axes, divided by the number of elements; else None."""
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
        expected = count if node.op == "Div" else 1 / count if count else math.nan
        if math.isclose(number, expected, rel_tol=1e-6):
            return summed.inputs[0], axes
    return None


def _mean_square(reader: Reader, value: Value) -> tuple[Value, tuple[int, ...]] | None:
    """(x, axes) if a value is the mean of x^2 over these axes; else None."""
    averaged = _averaged(reader, value, "ReduceSumSquare")
    mean = None if averaged is not None else _mean(reader, value)
    base = None if mean is None else square_of(reader, mean[0])
    if base is None:
        return averaged
    assert mean is not None
    return base, mean[1]


def _less_its_mean(reader: Reader, value: Value) -> tuple[Value, tuple[int, ...]] | None:
    """(x, axes) if a value is x minus its mean over these axes; else None."""
    node = made_by(reader, value, "Sub")
    if node is None:
        return None
    x, mean = node.inputs
    averaged = _mean(reader, _without_views(reader, mean))
    if averaged is None or averaged[0] != x:
        return None
    return averaged if _keeps_axes(reader, mean, *averaged) else None


def _variance(reader: Reader, value: Value) -> tuple[Value, tuple[int, ...]] | None:
    """(x, axes) if a value is the variance of x over these axes: E[(x - m)^2] or E[x^2] - m^2, at least 0."""
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
        centred = None if mean is None else _less_its_mean(reader, mean[0])
        return centred if centred is not None and mean is not None and centred[1] == mean[1] else None
    of_square, squared = _mean_square(reader, node.inputs[0]), square_of(reader, node.inputs[1])
    plain = None if squared is None else _mean(reader, squared)
    return plain if plain == of_square else None


@dataclass(frozen=True, slots=True)
class _Normal:
    """The normalisation that a region computes: its tensor, axes, epsilon, scale and shift (ABSENT: none)."""

    x: Value
    axes: tuple[int, ...]
    epsilon: float
    scale: Value
    shift: Value
    out: Value


def _normal(reader: Reader, node: Node) -> _Normal | None:
    """The normalisation whose deviation `node`, a Sqrt or a Pow, computes; None if there is none."""
    x, *exponent = node.inputs
    inverted = any(is_number(reader, v, -0.5, x) for v in exponent)
    if not inverted and not all(is_number(reader, v, 0.5, x) for v in exponent):
        return None
    total = made_by(reader, x, "Add")
    for viewed, c in operands(total):
        epsilon = number_of(reader, c, viewed)
        variance = _without_views(reader, viewed)
        centred = None if epsilon is None else _variance(reader, variance)
        if centred is None or epsilon is None:
            continue
        if _keeps_axes(reader, viewed, *centred):
            return _applied(reader, node.outputs[0], inverted, *centred, epsilon)
    return None


def _applied(
    reader: Reader, at: Value, inverted: bool, x: Value, axes: tuple[int, ...], epsilon: float
) -> _Normal | None:
    """How the deviation d is used: (x - m) / d, (x - m) * (1 / d) or (x - m) * ((1 / d) * scale), and a shift; None
    otherwise.
    """
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
    operand = step.inputs[0] if step.inputs[1] == at else step.inputs[1]
    if not inverted and step.inputs[1] != at:
        return None
    if inverted and _less_its_mean(reader, operand) is None:
        scale, at = operand, step.outputs[0]
        step = only_reader(reader, at)
        if step is None or step.op != "Mul":
            return None
        operand = step.inputs[0] if step.inputs[1] == at else step.inputs[1]
    if _less_its_mean(reader, operand) != (x, axes):
        return None
    at = step.outputs[0]
    shape = reader.type(x).shape
    for op in ("Mul", "Add"):
        step = only_reader(reader, at)
        if step is None or step.op != op or (op == "Mul" and scale != ABSENT):
            continue
        operand = step.inputs[0] if step.inputs[1] == at else step.inputs[1]
        if not reader.is_const(operand) or not keeps_shape(shape, reader.type(operand).shape):
            continue
        scale, shift = (operand, shift) if op == "Mul" else (scale, operand)
        at = step.outputs[0]
    if scale != ABSENT and (not reader.is_const(scale) or not keeps_shape(shape, reader.type(scale).shape)):
        return None
    return _Normal(x, axes, epsilon, scale, shift, at)


class _FuseNormalization(RegionRule, family="idioms"):
    """A rule for a normalisation by mean and variance as JAX, TensorFlow and Keras write it."""

    may_remove_nonfinite = True  # the operator's sums do not overflow where those of the source do

    proof = "numeric"
    relies_on = "E[(x - m)^2] = E[x^2] - m^2"
    dtypes = FLOAT
    anchors = ("Sqrt", "Pow")
    reads_from = ("Add",)

    # The axes that the rule's operator normalises, and the axes over which scale and shift vary.
    varying: Callable[[Reader, _Normal], tuple[int, ...] | None]

    def find(self, reader: Reader, node: Node) -> Region | None:
        normal = _normal(reader, node)
        varying = None if normal is None else self.varying(reader, normal)
        if normal is None or varying is None:
            return None
        x = reader.val(normal.x)
        parameters = tuple(v for v in (normal.scale, normal.shift) if v != ABSENT)
        for v in parameters:
            shape = reader.val(v).sizes
            aligned = (1,) * (x.rank - len(shape)) + shape
            fits = all(d == 1 or a in varying for a, d in enumerate(aligned))
            require(fits, "a parameter varies along other axes")
        sizes = tuple(x.size(a) for a in varying)
        data = (normal.axes, normal.epsilon, sizes, normal.scale != ABSENT, normal.shift != ABSENT)
        nodes = between(reader, normal.out, (normal.x,))
        return Region((normal.out,), (normal.x, *parameters), nodes, data)


def _spread(op: Op, v: Val, varying: Sequence[int], rank: int, sizes: Sequence[int]) -> Any:
    """A parameter reduced to the axes over which it varies, in these sizes."""
    aligned = (1,) * (rank - v.rank) + v.sizes
    shape = [aligned[a] for a in varying]
    flat = op.Reshape(v, shape)
    return flat if shape == list(sizes) else op.Expand(flat, list(sizes))


def _filled(op: Op, number: float, sizes: Sequence[int]) -> Any:
    return op.Expand(np.full(1, number, np.float32), list(sizes))


class FuseLayerNormalizationByMoments(_FuseNormalization):
    """(x - m) * (scale / sqrt(E[x^2] - m^2 + eps)) + bias -> layernormalization(x, scale, bias)  over any axes.

    Normalised axes that are not the last ones are transposed to the end. The mean may be a sum times 1/n, the variance
    may be clamped at 0, and Reshape and Expand may bring both to x's rank.
    """

    examples = graphs(
        "(float[N,3,4] x) => (float[N,3,4] y) { s = ReduceSum(x, [-1]) m = Mul(s, 0.25) p = Mul(x, x) "
        "q = ReduceSum(p, [-1]) r = Mul(q, 0.25) t = Mul(m, m) v = Sub(r, t) w = Max(v, 0.0) a = Add(w, 0.125) "
        "d = Sqrt(a) k = Reciprocal(d) f = Mul(k, [1.0, 2, 3, 4]) c = Sub(x, m) h = Mul(c, f) "
        "y = Add(h, [4.0, 3, 2, 1]) }",
        "(float[3,4] x) => (float[3,4] y) { m = ReduceMean(x, [1]) c = Sub(x, m) p = Pow(c, 2.0) "
        "v = ReduceMean(p, [1]) a = Add(v, 0.125) k = Pow(a, -0.5) n = Mul(c, k) y = Mul(n, [1.0, 2, 3, 4]) }",
        "(float[2,3,4] x) => (float[2,3,4] y) { m = ReduceMean<keepdims=0>(x, [-1]) p = Mul(x, x) "
        "q = ReduceMean<keepdims=0>(p, [-1]) t = Mul(m, m) v = Sub(q, t) o = Reshape(v, [2, 3, 1]) "
        "l = Expand(o, [2, 3, 1]) a = Add(l, 0.125) d = Sqrt(a) k = Div(1.0, d) j = Reshape(m, [2, 3, 1]) "
        "c = Sub(x, j) h = Mul(k, c) y = Add([4.0, 3, 2, 1], h) }",
        "(float[2,3,4] x) => (float[2,3,4] y) { m = ReduceMean(x, [1, 2]) p = Mul(x, x) q = ReduceMean(p, [1, 2]) "
        "t = Mul(m, m) v = Sub(q, t) a = Add(v, 0.125) d = Sqrt(a) c = Sub(x, m) y = Div(c, d) }",
        "(float[3,4] x) => (float[3,4] y) { s = ReduceSum(x, [1]) m = Div(s, 4.0) p = Mul(x, x) "
        "q = ReduceSum(p, [1]) r = Div(q, 4.0) t = Mul(m, m) u = Sub(r, t) v = Clip(u, 0.0) a = Add(0.125, v) "
        "d = Pow(a, 0.5) c = Sub(x, m) y = Div(c, d) }",
        "(float[3,4] x) => (float[3,4] y) { m = ReduceMean(x, [1]) p = Mul(x, x) r = ReduceMean(p, [1]) "
        "t = Mul(m, m) u = Sub(r, t) v = Relu(u) a = Add(v, 0.125) d = Sqrt(a) c = Sub(x, m) y = Div(c, d) }",
    )
    near_misses = graphs(
        "(float[3,4] x) => (float[3,4] y) { m = ReduceMean(x, [1]) p = Mul(x, x) r = ReduceMean(p, [1]) "
        "t = Mul(m, m) u = Sub(r, t) v = Clip(u, 0.0, 9.0) a = Add(v, 0.125) d = Sqrt(a) c = Sub(x, m) "
        "y = Div(c, d) }",
        "(float[3,4] x) => (float[3,4] y) { m = ReduceMean(x, [1]) p = Mul(x, x) r = ReduceMean(p, [1]) "
        "t = Mul(m, m) u = Sub(r, t) v = Clip(u, 1.0) a = Add(v, 0.125) d = Sqrt(a) c = Sub(x, m) y = Div(c, d) }",
        "(float[3,4] x) => (float[3,4] y) { s = ReduceSum(x, [1]) m = Div(4.0, s) c = Sub(x, m) p = Mul(c, c) "
        "r = ReduceMean(p, [1]) a = Add(r, 0.125) d = Sqrt(a) y = Div(c, d) }",
        "(float[3,4] x) => (float[3,4] y) { m = ReduceMean(x, [1]) c = Sub(x, m) p = Mul(c, c) "
        "r = ReduceMean(p, [1]) a = Add(r, 0.125) d = Pow(a, 0.75) y = Div(c, d) }",
        "(float[3,4] x) => (float[1,3,4] y) <float[1,1,1] h = {-0.5}> { m = ReduceMean(x, [1]) c = Sub(x, m) "
        "p = Mul(c, c) r = ReduceMean(p, [1]) a = Add(r, 0.125) d = Pow(a, h) y = Mul(c, d) }",
    )

    def varying(self, reader: Reader, normal: _Normal) -> tuple[int, ...] | None:
        return normal.axes

    def target(self, op: Op, region: Region, x: Val, *parameters: Val) -> Any:
        axes, epsilon, sizes, scaled, shifted = region.data
        scale = _spread(op, parameters[0], axes, x.rank, sizes) if scaled else _filled(op, 1.0, sizes)
        shift = _spread(op, parameters[-1], axes, x.rank, sizes) if shifted else None
        perm = (*(a for a in range(x.rank) if a not in axes), *axes)
        rows = x if is_identity(perm) else op.Transpose(x, perm=perm)
        y = op.LayerNormalization(rows, scale, shift, axis=x.rank - len(axes), epsilon=epsilon)
        return y if is_identity(perm) else op.Transpose(y, perm=inverse(perm))


class FuseInstanceNormalization(_FuseNormalization):
    """(x - m) / sqrt(var + eps) * scale + bias -> instancenormalization(x, scale, bias)  over all spatial axes."""

    examples = graphs(
        "(float[N,3,4,5] x) => (float[N,3,4,5] y) <float[3,1,1] g = {1,2,3}, float[1,3,1,1] b = {3,2,1}> "
        "{ m = ReduceMean(x, [2, 3]) c = Sub(x, m) p = Mul(c, c) v = ReduceMean(p, [2, 3]) a = Add(v, 0.125) "
        "d = Sqrt(a) n = Div(c, d) s = Mul(n, g) y = Add(s, b) }",
        "(float[N,3,4] x) => (float[N,3,4] y) <float[3,1] g = {1,2,3}> { m = GlobalAveragePool(x) p = Mul(x, x) "
        "q = ReduceMean(p, [-1]) t = Mul(m, m) v = Sub(q, t) a = Add(v, 0.125) d = Sqrt(a) k = Reciprocal(d) "
        "f = Mul(g, k) c = Sub(x, m) y = Mul(f, c) }",
        "(float[N,2,3,4] x) => (float[N,2,3,4] y) { m = ReduceMean(x, [2, 3]) c = Sub(x, m) p = Mul(c, c) "
        "v = ReduceMean(p, [2, 3]) a = Add(v, 0.125) d = Sqrt(a) y = Div(c, d) }",
    )

    def varying(self, reader: Reader, normal: _Normal) -> tuple[int, ...] | None:
        rank = rank_of(reader, normal.x)
        return (1,) if normal.axes and normal.axes == tuple(range(2, rank)) else None

    def target(self, op: Op, region: Region, x: Val, *parameters: Val) -> Any:
        _, epsilon, sizes, scaled, shifted = region.data
        scale = _spread(op, parameters[0], (1,), x.rank, sizes) if scaled else _filled(op, 1.0, sizes)
        shift = _spread(op, parameters[-1], (1,), x.rank, sizes) if shifted else _filled(op, 0.0, sizes)
        return op.InstanceNormalization(x, scale, shift, epsilon=epsilon)


# Scale and shift of normalisations


@dataclass(frozen=True, slots=True)
class _Affine:
    """A normalisation and its readers: the readers' operators and attributes, whether the normalisation has a shift,
    and whether each reader has a bias.
    """

    op: str
    attrs: Attrs
    shifted: bool
    readers: tuple[tuple[str, Attrs, bool], ...]


class FoldAffineIntoReaders(RegionRule, family="weights_algebra"):
    """layernorm(x, s, b) @ w -> layernorm(x, 1) @ (s^T * w) + b @ w  for all readers, MatMul or Gemm.

    RMSNormalization is handled in the same way. Several normalisations of one tensor become one. The shift is added to
    the reader's bias.
    """

    anchors = ("LayerNormalization", "RMSNormalization")
    dtypes = FLOAT
    examples = (
        "agraph (float[N,5,2] x) => (float[N,5,3] y, float[N,5,1] z) <float[2] s = {1,2}, float[2] b = {3,4}, "
        "float[2,3] w = {1,2,3,4,5,6}, float[2,1] v = {7,8}> { n = LayerNormalization(x, s, b) y = MatMul(n, w) "
        "z = MatMul(n, v) }",
        "agraph (float[5,2] x) => (float[5,3] y) <float[2] s = {1,2}, float[2] b = {3,4}, "
        "float[3,2] w = {1,2,3,4,5,6}, float[3] c = {1,-1,2}> "
        "{ n = LayerNormalization<epsilon=0.125>(x, s, b) y = Gemm<transB=1, alpha=0.5, beta=2.0>(n, w, c) }",
        "agraph (float[N,5,2] x) => (float[N,5,3] y) <float[2] s = {1,2}, float[2,3] w = {1,2,3,4,5,6}> "
        "{ n = RMSNormalization(x, s) y = MatMul(n, w) }",
        "agraph (float[5,2] x) => (float[5,3] y) <float[2] s = {1,2}, float[2] b = {3,4}, "
        "float[2,3] w = {1,2,3,4,5,6}> { n = LayerNormalization(x, s, b) y = Gemm(n, w) }",
        "agraph (float[5,2] x) => (float[5,3] y) <float[2] s = {2,2}, float[2,3] w = {1,2,3,4,5,6}> { n = "
        "RMSNormalization(x, s) y = MatMul(n, w) }",
    )
    near_misses = (
        "agraph (float[2,2] x, float[2,2] z) => (float[2,2] y) <float[2] s = {1,2}, float[2] b = {3,4}, "
        "float[2,2] w = {1,2,3,4}> { n = LayerNormalization(x, s, b) y = Gemm(z, w, n) }",
        examples[0].replace("float[2] b = {3,4}", "float[1] b = {3}"),
        "agraph (float[5,2] x) => (float[5,3] y, float[5,1] u) <float[2] s = {1,2}, float[2] b = {3,4}, "
        "float[2,3] w = {1,2,3,4,5,6}> { n, u = LayerNormalization(x, s, b) y = MatMul(n, w) }",
        "agraph (float[5,2] x) => (float[5,3] y) <float[2] s = {1,1}, float[2,3] w = {1,2,3,4,5,6}> { n = "
        "RMSNormalization(x, s) y = MatMul(n, w) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        out = node.outputs[0]
        if len(node.outputs) > 1 or reader.is_output(out):
            return None
        users = reader.users(out)
        if not users or any(u.op not in ("MatMul", "Gemm") for u in users):
            return None
        x, scale, *shift = node.inputs
        shifts = [v for v in shift if v != ABSENT]
        rank = rank_of(reader, x)
        profitable(axis_of(node, rank, -1) == rank - 1, "the axis is not the last")
        parameters = [scale, *shifts]
        profitable(all(reader.is_const(v) for v in parameters), "the scale or the shift is not constant")
        sizes = {reader.val(v).sizes for v in parameters}
        require(len(sizes) == 1 and len(next(iter(sizes))) == 1, "it is not one number per column")
        profitable(shifts or reader.val(scale).uniform != 1, "there is nothing to fold")
        inputs = [x, *parameters]
        kinds = []
        for user in users:
            y, w, *more = user.inputs
            require(y == out and w != out and out not in more, "a reader has it as a weight or a bias")
            require(not user.attrs.get("transA"), "a reader transposes it")
            require(reader.is_const(w) and reader.val(w).rank == 2, "a reader has no constant matrix")
            biases = [v for v in more if v != ABSENT]
            inputs += [w, *biases]
            kinds.append((user.op, user.attrs, bool(biases)))
        data = _Affine(node.op, node.attrs, bool(shifts), tuple(kinds))
        return Region(tuple(u.outputs[0] for u in users), tuple(inputs), (node, *users), data)

    def target(self, op: Op, region: Region, x: Val, scale: Val, *inputs: Val) -> Any:
        affine: _Affine = region.data
        remaining = list(inputs)
        shift = remaining.pop(0) if affine.shifted else None
        ones = op.Expand(np.ones(1, scale.storage), list(scale.sizes))
        normal = op[affine.op](x, ones, attrs=affine.attrs)
        results = []
        for name, attrs, biased in affine.readers:
            w = remaining.pop(0)
            bias: Any = remaining.pop(0) if biased else None
            transposed = bool(attrs.get("transB"))
            weight = op.Mul(w, op.Reshape(scale, [1, -1] if transposed else [-1, 1]))
            offset = None if shift is None else op.MatMul(shift, op.Transpose(w) if transposed else w)
            if name == "MatMul":
                results.append(sum_of(op, op.MatMul(normal, weight), offset))
            elif offset is None:
                results.append(op.Gemm(normal, weight, bias, attrs=attrs))
            else:
                alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
                weighted = bias if bias is None or beta == 1.0 else op.Mul(bias, beta)
                offset = sum_of(op, op.Mul(offset, alpha), weighted)
                results.append(op.Gemm(normal, weight, offset, attrs=attrs, beta=None))
        return results


class FoldScaleIntoNormalization(Rule, family="weights_algebra"):
    """layernorm(x, g, b) * s -> layernorm(x, g * s, b * s)  with s constant, one number or one per column."""

    dtypes = WIDE
    optional = ("b",)
    shapes = either("x[...,d] g[d]:const b[d]:const", ("s[d]:const", "s[]:const", "s[1]:const"))

    def source(self, op: Op, x: Any, g: Any, b: Any, s: Any) -> Any:
        return op.Mul(op.LayerNormalization(x, g, b, attrs="a"), s)

    def target(self, op: Op, m: Captures, x: Val, g: Val, b: Val | None, s: Val) -> Any:
        return op.LayerNormalization(x, op.Mul(g, s), None if b is None else op.Mul(b, s), attrs=m.a)


class FoldBiasIntoNormalization(FoldScaleIntoNormalization):
    """layernorm(x, g, b) + c -> layernorm(x, g, b + c)  with c constant, one number or one per column."""

    shapes = either("x[...,d] g[d]:const b[d]:const", ("c[d]:const", "c[]:const", "c[1]:const"))

    def source(self, op: Op, x: Any, g: Any, b: Any, c: Any) -> Any:
        return op.Add(op.LayerNormalization(x, g, b, attrs="a"), c)

    def target(self, op: Op, m: Captures, x: Val, g: Val, b: Val | None, c: Val) -> Any:
        shift = op.Add(b, c) if b is not None else op.Expand(flat(op, c), list(g.sizes))
        return op.LayerNormalization(x, g, shift, attrs=m.a)


# BatchNormalization


def _require_deviation(var: Val, epsilon: float) -> None:
    """Refuse constant variances with a deviation of 0. (For a negative variance both sides are NaN.)"""
    numbers = var.array_or_none
    require(numbers is None or bool(np.all(numbers + epsilon != 0)), "a variance cannot be divided by")


class SplitBatchNormalization(Rule, family="weights_algebra"):
    """batch_norm(x) -> x * f + (shift - mean * f)  with f = scale / sqrt(var + eps)."""

    dtypes = WIDE
    may_round_inputs = True
    shapes = either(("x[n,c]", "x[n,c,h]", "x[n,c,h,k]", "x[n,c,h,k,t]"), "s*[c]:const")
    arity = (4, 4)
    near_misses = (
        f"agraph (double[N,2,3] x) => (double[N,2,3] y) <{STATISTICS}> {{ y = BatchNormalization(x, s, b, m, v) }}",
        f"agraph (float[N,2,3] x) => (float[N,2,3] y) <{STATISTICS}>"
        " { y = BatchNormalization<epsilon=-4.0>(x, s, b, m, v) }",
    )

    def source(self, op: Op, x: Any, *s: Any) -> Any:
        return normalised(op, x, s)

    def where(self, m: Captures, x: Val, *s: Val) -> None:
        scale, _, mean, var = s
        require(scale.dtype == mean.dtype == x.dtype, "the statistics are of another element type")
        _require_deviation(var, m.epsilon)

    def target(self, op: Op, m: Captures, x: Val, *s: Val) -> Any:
        factor, offset = factor_and_shift(op, s, m.epsilon)
        column = [-1] + [1] * (x.rank - 2)
        return op.Add(op.Mul(x, op.Reshape(factor, column)), op.Reshape(offset, column))


class MergeBatchNormalizations(Rule, family="weights_algebra"):
    """batch_norm(batch_norm(x)) -> batch_norm(x)  with scale1 * f2 and (shift1 - mean2) * f2 + shift2."""

    dtypes = WIDE
    shapes = either(("x[n,c]", "x[n,c,h]", "x[n,c,h,k]"), "s*[c]:const")
    arity = (8, 8)
    near_misses = (
        f"agraph (double[N,2,3] x) => (double[N,2,3] y) <{STATISTICS}, double[2] t = {{1, 2}}>"
        " { a = BatchNormalization(x, t, t, m, v) y = BatchNormalization(a, t, t, m, v) }",
        f"agraph (float[N,2,3] x) => (float[N,2,3] y) <{STATISTICS}>"
        " { a = BatchNormalization(x, s, b, m, v) y = BatchNormalization<epsilon=-4.0>(a, s, b, m, v) }",
    )

    def source(self, op: Op, x: Any, *s: Any) -> Any:
        return normalised(op, normalised(op, x, s[:4]), s[4:], "2")

    def where(self, m: Captures, x: Val, *s: Val) -> None:
        require(len({v.dtype for v in s}) == 1, "the statistics are of several element types")
        _require_deviation(s[-1], m.epsilon2)

    def target(self, op: Op, m: Captures, x: Val, *s: Val) -> Any:
        scale, shift, mean, var = s[:4]
        factor, offset = factor_and_shift(op, s[4:], m.epsilon2)
        offset_ = op.Add(op.Mul(shift, factor), offset)
        return op.BatchNormalization(x, op.Mul(scale, factor), offset_, mean, var, epsilon=m.epsilon)


class PushBatchNormalizationIntoConcat(RegionRule, family="weights_algebra"):
    """batch_norm(concat(x, y)) -> concat(batch_norm(x), batch_norm(y))  for a concat of channels."""

    anchors = ("BatchNormalization",)
    reads_from = ("Concat",)
    dtypes = WIDE
    examples = graphs(
        "(float[N,1,4] x, float[N,2,4] z) => (float[N,3,4] y) { c = Concat<axis=1>(x, z) "
        "y = BatchNormalization<epsilon=0.125>(c, [1.0, 2, 3], [4.0, 5, 6], [1.0, -1, 2], [3.0, 2, 1]) }",
        "(float[N,1,2,2] x, float[N,2,2,2] z) => (float[N,4,2,2] y) { c = Concat<axis=-3>(x, z, x) "
        "y = BatchNormalization(c, [1.0, 2, 3, 4], [4.0, 5, 6, 7], [1.0, -1, 2, 0], [3.0, 2, 1, 1]) }",
    )
    near_misses = (
        f"agraph (float[3,2,4] x, float[5,2,4] z) => (float[8,2,4] y) <{STATISTICS}> "
        "{ c = Concat<axis=0>(x, z) y = BatchNormalization(c, s, b, m, v) }",
        "agraph (float[2,1,4] x, float[2,2,4] z) => (float[2,3,4] y, float[3] q, float[3] r) <float[3] s = "
        "{1,2,3}, float[3] b = {4,5,6}, float[3] m = {1,-1,2}, float[3] v = {3,2,1}> { c = "
        "Concat<axis=1>(x, z) y, q, r = BatchNormalization<training_mode=1>(c, s, b, m, v) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        concat = made_by(reader, node.inputs[0], "Concat")
        if concat is None or len(node.outputs) > 1:
            return None
        require(axis_of(concat, rank_of(reader, concat.outputs[0])) == 1, "the concat is not one of channels")
        profitable(all(reader.is_const(v) for v in node.inputs[1:]), "the statistics are not constant")
        profitable(read_once(reader, node.inputs[0]), "the concat is read elsewhere")
        sizes = tuple(reader.val(v).size(1) for v in concat.inputs)
        data = (sizes, node.attrs, concat.attrs)
        return Region(node.outputs, (*concat.inputs, *node.inputs[1:]), (node, concat), data)

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        sizes, attrs, concat = region.data
        parts, statistics = inputs[: len(sizes)], inputs[len(sizes) :]
        ends = list(accumulate(sizes))
        out = []
        for x, size, end in zip(parts, sizes, ends):
            cut = [slice_constant(op, v, 0, end - size, end) for v in statistics]
            out.append(op.BatchNormalization(x, *cut, attrs=attrs))
        return op.Concat(*out, attrs=concat)
