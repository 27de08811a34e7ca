"""Decomposed normalisations and activations to ONNX's own operators, and the residual before a LayerNormalization."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.axes import fronts, ints_input
from rewrite_rules.elementwise import made_by, number_of, only_reader, operands, read_once, square_of
from xrlflow.ir import Dim, DType, Node, Value
from xrlflow.rewrite import Op, Reader, Region, RegionRule, Rule, Val, require, worthwhile

# Types that are only computed in float32 inside: a double would lose digits by the default `stash_type`.
_STASHED = frozenset({DType.FLOAT, DType.FLOAT16})
_FLOAT = frozenset({DType.FLOAT})


# What the regions are made of


def _last_axes(reader: Reader, node: Node) -> int | None:
    """The axis from which on a ReduceMean (that keeps dimensions) takes all dimensions; None for other nodes."""
    if node.op != "ReduceMean" or node.attrs.get("keepdims", 1) != 1:
        return None
    axes = ints_input(reader, node, 1)
    rank = reader.type(node.inputs[0]).rank
    if not axes or rank is None:
        return None
    places = sorted(fronts(axes, rank))
    return places[0] if places == list(range(places[0], rank)) else None


def _fits(shape: tuple[Dim, ...] | None, normal: tuple[Dim, ...]) -> bool:
    """Whether a scale or bias covers the normalised dimensions, with any dimensions of 1 before them."""
    if shape is None or len(shape) < len(normal):
        return False
    lead = len(shape) - len(normal)
    return shape[lead:] == normal and None not in normal and all(d == 1 for d in shape[:lead])


def _single(shape: tuple[Dim, ...] | None) -> bool:
    return shape is not None and all(d == 1 for d in shape)


def _parameter(op: Op, v: Val, sizes: tuple[int, ...]) -> Any:
    """A scale or bias in the shape of the normalised dimensions."""
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
    """A region while it is being read: its nodes, and where it has got to."""

    reader: Reader
    nodes: list[Node]
    at: Value

    def take(self, node: Node) -> None:
        if node not in self.nodes:
            self.nodes.append(node)

    def step(self, op: str) -> tuple[Node, Value] | None:
        """Go on to the only reader of where we are, if it is `op`: the node, and its other input."""
        node = only_reader(self.reader, self.at)
        if node is None or node.op != op or len(node.inputs) != 2:
            return None
        a, b = node.inputs
        if a == b:
            return None
        return node, (b if a == self.at else a)

    def scale(self, sizes: tuple[int, ...]) -> Value | None:
        """Take a multiplication by a parameter of the normalised dimensions."""
        return self._parameter("Mul", sizes)

    def bias(self, sizes: tuple[int, ...]) -> Value | None:
        """Take the addition of a parameter of the normalised dimensions."""
        return self._parameter("Add", sizes)

    def _parameter(self, op: str, sizes: tuple[int, ...]) -> Value | None:
        found = self.step(op)
        if found is None:
            return None
        node, other = found
        type = self.reader.type(other)
        fits = _fits(type.shape, sizes) or (type.const and _single(type.shape))
        if not fits or (not type.const and len(type.shape or ()) != len(sizes)):
            return None
        # Leading dimensions of 1 may not add dimensions to the result.
        if len(type.shape or ()) > len(self.reader.type(self.at).shape or ()):
            return None
        self.take(node)
        self.at = node.outputs[0]
        return other

    def closed(self, *kept: Value) -> None:
        """Refuse if an inner value is read elsewhere."""
        members = {n.outputs[0] for n in self.nodes}
        for node in self.nodes:
            out = node.outputs[0]
            if out == self.at or out in kept:
                continue
            inside = not self.reader.is_output(out) and all(
                u.outputs[0] in members for u in self.reader.users(out)
            )
            worthwhile(inside, "an inner value is read elsewhere")


# LayerNormalization


@dataclass(frozen=True, slots=True)
class _Deviation:
    """sqrt(mean(x^2) + epsilon) over the axes from one on, and the nodes that make it."""

    x: Value
    axis: int
    epsilon: float
    nodes: tuple[Node, ...]


def _deviation(reader: Reader, node: Node) -> _Deviation | None:
    """What a Sqrt is the deviation of."""
    for mean, c in operands(made_by(reader, node.inputs[0], "Add")):
        epsilon, variance = number_of(reader, c, mean), reader.producer(mean)
        axis = None if variance is None or epsilon is None else _last_axes(reader, variance)
        x = None if variance is None or axis is None else square_of(reader, variance.inputs[0])
        if x is not None and axis is not None and epsilon is not None and variance is not None:
            added, squared = reader.producer(node.inputs[0]), reader.producer(variance.inputs[0])
            nodes = (node, *(n for n in (added, variance, squared) if n is not None))
            return _Deviation(x, axis, epsilon, nodes)
    return None


def _centred(reader: Reader, value: Value) -> tuple[Value, int, list[Node]] | None:
    """A value as x - mean(x) over the last axes: x, the first of them, the nodes."""
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

    Scale and bias may be missing; the square may be a product, the division a product with the reciprocal;
    x - mean(x) may be computed twice. float16 is computed in float32 afterwards.
    """

    mends = True  # the operator's sums do not overflow where those of the left side do

    proof = "numeric"
    relies_on = "a variance is the mean of squared deviations; float32 moments as the operator computes them"
    dtypes = _STASHED
    anchors = ("Sqrt",)
    examples = (
        "agraph (float[N,3,4] x, float[4] g, float[4] b) => (float[N,3,4] y) <int64[1] i = {-1}, float two = {2}, "
        "float eps = {0.00001}> { m = ReduceMean(x, i) d = Sub(x, m) s = Pow(d, two) v = ReduceMean(s, i) "
        "e = Add(v, eps) r = Sqrt(e) n = Div(d, r) a = Mul(n, g) y = Add(a, b) }",
        "agraph (float[N,3,4] x) => (float[N,3,4] y) { i = Constant<value_ints=[1, 2]>() "
        "eps = Constant<value_float=0.001>() m = ReduceMean(x, i) d = Sub(x, m) s = Mul(d, d) "
        "v = ReduceMean(s, i) e = Add(v, eps) r = Sqrt(e) t = Reciprocal(r) y = Mul(d, t) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        deviation = _deviation(reader, node)
        centred = None if deviation is None else _centred(reader, deviation.x)
        if deviation is None or centred is None or centred[1] != deviation.axis:
            return None
        x, axis, nodes = centred
        walk = _Walk(reader, [*deviation.nodes, *nodes], node.outputs[0])
        sizes = _normal_sizes(reader, x, axis)
        require(self._divide(walk, x, axis), "what is divided is not x - mean(x)")
        scale = walk.scale(sizes)
        bias = walk.bias(sizes)
        walk.closed()
        inputs = (x, *(v for v in (scale, bias) if v is not None))
        data = (axis, deviation.epsilon, sizes, scale is not None, bias is not None)
        return Region((walk.at,), inputs, tuple(walk.nodes), data)

    @staticmethod
    def _divide(walk: _Walk, x: Value, axis: int) -> bool:
        """Take the division of x - mean(x), by the deviation or its reciprocal."""
        user = only_reader(walk.reader, walk.at)
        if user is not None and user.op == "Reciprocal":
            walk.take(user)
            walk.at = user.outputs[0]
            found = walk.step("Mul")
        else:
            found = walk.step("Div")
            if found is not None and found[0].inputs[1] != walk.at:
                return False
        if found is None:
            return False
        divide, other = found
        again = _centred(walk.reader, other)
        if again is None or again[:2] != (x, axis):
            return False
        for n in (*again[2], divide):
            walk.take(n)
        walk.at = divide.outputs[0]
        return True

    def target(self, op: Op, region: Region, x: Val, *parameters: Val) -> Any:
        axis, epsilon, sizes, has_scale, has_bias = region.data
        rest = list(parameters)
        scale = _parameter(op, rest.pop(0), sizes) if has_scale else _ones(op, x.dtype, sizes)
        bias = _parameter(op, rest.pop(0), sizes) if has_bias else None
        return op.LayerNormalization(x, scale, bias, axis=axis, epsilon=epsilon)


class FuseMomentsLayerNormalization(Rule, family="normalisation"):
    """x * g + (bias - mean * g), g = scale / sqrt(var + eps) -> layernormalization(x, scale, bias).

    As TensorFlow writes it (a batch normalisation by moments of the row itself).
    """

    mends = True  # the operator's sums do not overflow where those of the left side do

    spreads = True
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
        places = sorted(fronts(axes.ints, x.rank))
        require(places and places == list(range(places[0], x.rank)), "the axes are not the last")
        return tuple(x.size(i) for i in places)

    def target(self, op: Op, x: Val, axes: Val, eps: Val, scale: Val, bias: Val) -> Any:
        sizes = self._sizes(x, axes)
        scale, bias = _parameter(op, scale, sizes), _parameter(op, bias, sizes)
        return op.LayerNormalization(x, scale, bias, axis=x.rank - len(sizes), epsilon=eps.scalar)


class FuseRMSNormalization(RegionRule, family="normalisation"):
    """x / sqrt(mean(x^2) + eps) * scale -> rmsnormalization(x, scale)."""

    mends = True  # the operator's sums do not overflow where those of the left side do

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
        worthwhile(_centred(reader, x) is None, "it is a LayerNormalization")
        walk = _Walk(reader, list(deviation.nodes), node.outputs[0])
        user = only_reader(reader, walk.at)
        if user is not None and user.op == "Reciprocal":
            walk.take(user)
            walk.at = user.outputs[0]
            found = walk.step("Mul")
        else:
            found = walk.step("Div")
        if found is None or found[1] != x or (found[0].op == "Div" and found[0].inputs[0] != x):
            return None
        walk.take(found[0])
        walk.at = found[0].outputs[0]
        sizes = _normal_sizes(reader, x, axis)
        scale = walk.scale(sizes)
        walk.closed()
        inputs = (x,) if scale is None else (x, scale)
        return Region((walk.at,), inputs, tuple(walk.nodes), (axis, deviation.epsilon, sizes))

    def target(self, op: Op, region: Region, x: Val, scale: Val | None = None) -> Any:
        axis, epsilon, sizes = region.data
        given = _ones(op, x.dtype, sizes) if scale is None else _parameter(op, scale, sizes)
        return op.RMSNormalization(x, given, axis=axis, epsilon=epsilon)


# Gelu


def _halves(op: Op, x: Any, gate: Any) -> Any:
    """x * gate / 2 in a source, the factors in any order."""
    half = op.either(op.Mul(x, 0.5), op.Div(x, 2.0))
    return op.either(op.Mul(half, gate), op.Mul(op.Mul(x, gate), 0.5), op.Mul(x, op.Mul(gate, 0.5)))


class FuseGelu(Rule, family="normalisation"):
    """x * 0.5 * (1 + erf(x / sqrt(2))) -> gelu(x), the factors in any order."""

    proof = "numeric"
    relies_on = "gelu(x) = x (1 + erf(x / sqrt 2)) / 2, with sqrt 2 as float32 rounds it"
    dtypes = _FLOAT
    shapes = "x[...]:float"
    examples = (
        "agraph (float[N,4] x) => (float[N,4] y) <float r = {1.4142135623730951}, float one = {1}, "
        "float half = {0.5}> { a = Div(x, r) b = Erf(a) c = Add(b, one) d = Mul(x, c) y = Mul(d, half) }",
        "agraph (float[N,4] x) => (float[N,4] y) <float r = {0.7071067811865476}, float one = {1}, "
        "float half = {0.5}> { a = Mul(x, r) b = Erf(a) c = Add(one, b) d = Mul(x, half) y = Mul(d, c) }",
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
    dtypes = _FLOAT
    shapes = "x[...]:float"
    examples = (
        "agraph (float[N,4] x) => (float[N,4] y) <float three = {3}, float k = {0.044715}, "
        "float c = {0.7978845608028654}, float one = {1}, float half = {0.5}> { p = Pow(x, three) q = Mul(p, k) "
        "s = Add(x, q) u = Mul(s, c) t = Tanh(u) v = Add(t, one) h = Mul(x, half) y = Mul(h, v) }",
        "agraph (float[N,4] x) => (float[N,4] y) <float k = {0.044715}, float c = {0.7978845608028654}, "
        "float one = {1}, float half = {0.5}> { a = Mul(x, x) p = Mul(a, x) q = Mul(k, p) s = Add(x, q) "
        "u = Mul(c, s) t = Tanh(u) v = Add(one, t) h = Mul(half, v) y = Mul(x, h) }",
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
    dtypes = _FLOAT
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
    dtypes = _FLOAT
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
    dtypes = _FLOAT
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.Mul(x, op.HardSigmoid(x, alpha=_SIXTH))

    def target(self, op: Op, x: Val) -> Any:
        return op.HardSwish(x)


class SplitHardSwish(Rule, family="normalisation"):
    """hardswish(x) -> x * hardsigmoid(x, 1/6, 1/2)."""

    proof = "numeric"
    relies_on = "hardswish(x) = x hardsigmoid(x, 1/6, 1/2), with 1/6 as float32 rounds it"
    dtypes = _FLOAT
    shapes = "x[...]:float"

    def source(self, op: Op, x: Any) -> Any:
        return op.HardSwish(x)

    def target(self, op: Op, x: Val) -> Any:
        return op.Mul(x, op.HardSigmoid(x, alpha=_SIXTH))


# The residual before a LayerNormalization


class ReplaceAddBySum(RegionRule, family="normalisation"):
    """layernormalization(a + b) -> layernormalization(sum(a, b)).

    ONNX Runtime fuses an addition before a LayerNormalization with it to a SkipLayerNormalization that is
    slower than the two on several threads; it does not know Sum.
    """

    unpriced = True
    backend = "onnxruntime"
    dtypes = _FLOAT
    anchors = ("LayerNormalization",)
    examples = (
        "agraph (float[N,3,4] a, float[N,3,4] b, float[4] s) => (float[N,3,4] y) "
        "{ c = Add(a, b) y = LayerNormalization(c, s) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        add = reader.producer(node.inputs[0])
        if add is None or add.op != "Add":
            return None
        # With other readers the runtime fuses nothing either.
        worthwhile(read_once(reader, add.outputs[0]), "the sum is read elsewhere")
        return Region(add.outputs, add.inputs, (node, add))

    def target(self, op: Op, region: Region, a: Val, b: Val) -> Any:
        return op.Sum(a, b)
