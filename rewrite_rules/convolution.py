"""Rules that replace convolutions and pools by other operators, and rules that merge them with their neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.axes import fronts, inverse, reshape_numbers, same_dims
from rewrite_rules.constants import AT_EXPORT
from rewrite_rules.elementwise import FLOAT, WIDE, made_by, read_once, sum_of
from rewrite_rules.examples import graphs
from rewrite_rules.fold_into_weights import group_of, scale_columns
from rewrite_rules.reading import between
from rewrite_rules.reshape import VIEWS
from rewrite_rules.shapes import per_rank
from xrlflow.ir import ABSENT, Attrs, Dim, Node, Value
from xrlflow.ir.dims import LARGEST
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, accurate, profitable, require

_IMAGE = per_rank("x[i,c{h}]")

_POINTWISE = per_rank("x[i,j{h}] w[m,p{1}] b[m]")

_POOLED = per_rank("x[i,j{h}] w[m,p{1}]:const b[m]:const")

# Attributes that have no effect if the kernel is 1x1.
_UNHEEDED: dict[str, None] = {"auto_pad": None, "dilations": None}


# Attributes


def per_axis(attrs: Attrs, name: str, dims: int, default: int = 1) -> tuple[int, ...]:
    """An attribute that has one number for each spatial dimension (strides, dilations, kernel_shape)."""
    value = attrs.get(name)
    return _ints(value) if isinstance(value, tuple) else (default,) * dims


def pads_of(attrs: Attrs, dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The explicit padding before and after the image, one number for each spatial dimension."""
    pads = per_axis(attrs, "pads", 2 * dims, 0)
    return pads[:dims], pads[dims:]


def window_of(attrs: Attrs) -> tuple[int, ...]:
    """A pool's kernel_shape, a required attribute."""
    return _ints(attrs["kernel_shape"])


def _ints(value: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in value)


def require_no_padding(attrs: Attrs) -> None:
    """Refuse a convolution or pool that pads or may pad."""
    require("pads" not in attrs and "auto_pad" not in attrs, "it pads")


def require_pointwise(attrs: Attrs) -> None:
    """Refuse a 1x1 convolution that does more than mix channels. (auto_pad adds no padding for a 1x1 kernel.)"""
    require("pads" not in attrs, "it pads")
    require("strides" not in attrs, "it strides")


def meets_whole(x: Val, kernel: Sequence[int], attrs: Attrs) -> bool:
    """Whether each known size of an image is at least that of a window, so that the result is not empty."""
    dims = x.rank - 2
    sizes = zip(x.shape[2:], *pads_of(attrs, dims), per_axis(attrs, "dilations", dims), kernel)
    return all(not isinstance(n, int) or n + b + a > d * (k - 1) for n, b, a, d, k in sizes)


def per_channel(op: Op, b: Val, dims: int) -> Any:
    """A bias [C] in a shape that broadcasts against [N, C, ...]."""
    return op.Reshape(b, [b.size(0)] + [1] * dims)


def worthwhile_data(*values: Val) -> None:
    """Refuse tensors without elements: nothing is gained, and implementations of shape inference disagree on their
    results.
    """
    profitable(not any(0 in v.shape for v in values), "it is empty")


def _positive(sizes: Sequence[Dim]) -> bool:
    return all(isinstance(d, int) and d > 0 for d in sizes)


class _OneConv(Rule, family="convolution"):
    """A rule for one convolution, with or without a bias."""

    optional: ClassVar[tuple[str, ...]] = ("b",)

    def source(self, op: Op, x: Any, w: Any, b: Any) -> Any:
        return op.Conv(x, w, b, attrs="c")


# 1x1 convolutions and products of matrices


class ReplacePointwiseConvByMatMul(_OneConv):
    """conv(x, w, b) -> reshape(w @ reshape(x) + b)  for a 1x1 kernel: the image is a matrix of channels by pixels."""

    nonempty = True
    # TVM's kernels already compute this product. With channels last, the matrix would need layout conversions.
    backend = "onnxruntime"
    dtypes = WIDE
    shapes = per_rank("x[i,c{h}] w[m,c{1}] b[m]")

    def where(self, m: Captures) -> None:
        require_pointwise(m.c)

    def target(self, op: Op, x: Val, w: Val, b: Val | None) -> Any:
        batch, channels, *space = x.shape
        outputs = w.size(0)
        flat: Any = x
        if len(space) > 1:
            pixels = prod(d for d in space if isinstance(d, int)) if _positive(space) else None
            flat = op.Reshape(x, reshape_numbers(x.shape, (batch, channels, pixels)))
        y = op.MatMul(op.Reshape(w, [outputs, w.size(1)]), flat)
        if b is not None:
            y = op.Add(y, per_channel(op, b, 1))
        if len(space) == 1:
            return y
        return op.Reshape(y, reshape_numbers(y.shape, (batch, outputs, *space)))


class ReplaceMatMulByPointwiseConv(Rule, family="convolution"):
    """w @ x -> conv(x, w)  for a constant matrix w and x of three dimensions."""

    dtypes = FLOAT
    shapes = "w[m,c]:const x[i,c,h]"

    def source(self, op: Op, w: Any, x: Any) -> Any:
        return op.MatMul(w, x)

    def where(self, w: Val) -> None:
        worthwhile_data(w)

    def target(self, op: Op, w: Val, x: Val) -> Any:
        return op.Conv(x, op.Reshape(w, [*w.sizes, 1]))


def _channels_last(rank: int) -> tuple[int, ...]:
    """The permutation that turns [N, C, ...] into [N, ..., C]."""
    return (0, *range(2, rank), 1)


class MergeTransposedMatMulIntoConv(Rule, family="convolution"):
    """transpose(transpose(x) @ w) -> conv(x, w^T)  when the transposes move the channels last and back."""

    dtypes = FLOAT
    shapes = per_rank("x[i,c{h}] w[c,n]:const")

    def source(self, op: Op, x: Any, w: Any) -> Any:
        return op.Transpose(op.MatMul(op.Transpose(x, perm="p"), w), perm="q")

    def where(self, m: Captures, x: Val, w: Val) -> None:
        last = _channels_last(x.rank)  # an absent permutation reverses the dimensions, which is refused
        require(m.p == last, "the channels do not go last")
        require(m.q == inverse(last), "the channels do not come back")
        worthwhile_data(w)

    def target(self, op: Op, x: Val, w: Val) -> Any:
        columns, rows = w.sizes
        return op.Conv(x, op.Reshape(op.Transpose(w), [rows, columns] + [1] * (x.rank - 2)))


class ReplaceConvOfTransposeByMatMul(Rule, family="convolution"):
    """conv(transpose(x), w, b) -> transpose(x @ w^T + b)  for a 1x1 kernel and x with the channels last."""

    survivors: ClassVar[Mapping[str, str]] = {
        "omit Reshape (call 0)": "transposed, the kernel's dimensions of 1 stand in front, where a product broadcasts"
    }

    dtypes = WIDE
    optional = ("b",)
    shapes = per_rank("x[i{h},c] w[m,c{1}] b[m]")
    examples = (
        "agraph (float[N,4,5,3] x) => (float[N,2,4,5] y) <float[2,3,1,1] w = {1,2,3,4,5,6}, float[2] b = {7,8}> "
        "{ t = Transpose<perm=[0,3,1,2]>(x) y = Conv(t, w, b) }",
        "agraph (float[2,L,3] x) => (float[2,2,L] y) <float[2,3,1] w = {1,2,3,4,5,6}> "
        "{ t = Transpose<perm=[0,2,1]>(x) y = Conv(t, w) }",
    )
    near_misses = (
        "agraph (float[2,3,3] x) => (float[3,2,2] y) <float[2,3,1] w = {1,2,3,4,5,6}> "
        "{ t = Transpose<perm=[2,1,0]>(x) y = Conv(t, w) }",
    )

    def source(self, op: Op, x: Any, w: Any, b: Any) -> Any:
        return op.Conv(op.Transpose(x, perm="p"), w, b, attrs="c")

    def where(self, m: Captures, x: Val) -> None:
        # An absent permutation reverses the dimensions, so that another dimension would become the channels.
        require(m.p is not None and m.p[1] == x.rank - 1, "the channels were not last")
        require_pointwise(m.c)

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        y = op.MatMul(x, op.Transpose(op.Reshape(w, [w.size(0), w.size(1)])))
        return op.Transpose(y if b is None else op.Add(y, b), perm=m.p)


class ReplaceConvStrideBySlice(_OneConv):
    """conv(x, w, b; strides s) -> conv(x[::s], w, b)  for a 1x1 kernel."""

    shapes = _POINTWISE
    examples = (
        "agraph (float[2,1,5,6] x) => (float[2,1,2,6] y) <float[1,1,1,1] w = {2}> { y = Conv<strides=[3,1]>(x, w) }",
    )

    def where(self, m: Captures, x: Val) -> None:
        require("pads" not in m.c, "it pads")
        profitable("strides" in m.c, "it does not stride")
        worthwhile_data(x)

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        steps = {2 + i: s for i, s in enumerate(_ints(m.c.get("strides", ()))) if s > 1}
        sliced = op.Slice(x, [0] * len(steps), [LARGEST] * len(steps), list(steps), list(steps.values()))
        return op.Conv(sliced, w, b, attrs=m.c, strides=None, **_UNHEEDED)


class FoldSliceIntoConvStride(Rule, family="convolution"):
    """conv(x[::s], w, b) -> conv(x, w, b; strides s)  for a 1x1 kernel."""

    optional = ("b",)  # without axes or steps, the Slice does not take every s-th pixel
    shapes = per_rank("x[i,j{h}] w[m,p{1}] b[m] starts:const ends:const axes:const steps:const", ranks=(1, 2))
    examples = graphs(
        "(float[2,3,5,6] x) => (float[2,1,3,3] y) <float[1,3,1,1] w = {1,2,3}> "
        "{ z = Slice(x, [0, 0], [2147483647, 6], [2, 3], [2, 2]) y = Conv(z, w) }",
        "(float[N,2,H] x) => (float[N,2,P] y) <float[2,2,1] w = {1,2,3,4}> "
        "{ z = Slice(x, [0], [9223372036854775807], [-1], [3]) y = Conv<strides=[2]>(z, w, [5.0, 6]) }",
        "(float[2,1,5,6] x) => (float[2,1,5,3] y) <float[1,1,1,1] w = {2}> "
        "{ z = Slice(x, [0, 0], [5, 6], [2, 3], [1, 2]) y = Conv(z, w) }",
    )
    near_misses = graphs(
        "(float[1,2,6] x) => (float[1,1,2] y) <float[1,2,1] w = {1,2}> { z = Slice(x, [0], [3], [2], [2]) "
        "y = Conv(z, w) }"
    )

    def source(self, op: Op, x: Any, w: Any, b: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> Any:
        return op.Conv(op.Slice(x, starts, ends, axes, steps), w, b, attrs="c")

    def where(self, m: Captures, x: Val, starts: Val, ends: Val, axes: Val, steps: Val) -> None:
        require("pads" not in m.c, "it pads")
        profitable(any(s != 1 for s in steps.ints), "it does not step")
        worthwhile_data(x)
        for (axis, step), start, end in zip(self._steps(x, axes, steps), starts.ints, ends.ints):
            size = x.shape[axis]
            require(axis > 1 and 0 < step < LARGEST, "it does not step over the image, or backwards")
            require(start == 0, "it leaves out a beginning")
            require(end >= LARGEST or (isinstance(size, int) and end >= size), "it leaves out an end")

    @staticmethod
    def _steps(x: Val, axes: Val, steps: Val) -> list[tuple[int, int]]:
        return list(zip(fronts(axes.ints, x.rank), steps.ints))

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, axes: Val, steps: Val) -> Any:
        strides = list(per_axis(m.c, "strides", x.rank - 2))
        for axis, step in self._steps(x, axes, steps):
            strides[axis - 2] *= step
        return op.Conv(x, w, b, attrs=m.c, strides=strides, **_UNHEEDED)


class ReplaceDepthwisePointwiseConvByMul(_OneConv):
    """conv(x, w, b; each channel by itself) -> x * w + b  for a 1x1 kernel."""

    may_lose_errors = ("sizes",)
    shapes = per_rank("x[i,c{h}] w[c,1{1}] b[c]")

    def where(self, m: Captures) -> None:
        require_pointwise(m.c)

    def target(self, op: Op, x: Val, w: Val, b: Val | None) -> Any:
        y = op.Mul(x, per_channel(op, w, x.rank - 2))
        return y if b is None else op.Add(y, per_channel(op, b, x.rank - 2))


# Convolutions whose kernel is as large as the image, or as their stride


class ReplaceFullConvByGemm(_OneConv):
    """conv(x, w, b) -> reshape(gemm(reshape(x), reshape(w), b))  when the kernel covers the image in a single place.

    It also applies to an image of one pixel: if it is padded, the pixel meets a single tap of the kernel.
    """

    dtypes = WIDE
    shapes = per_rank("x[i,c{h}] w[m,c{k}]:const b[m]")
    examples = graphs(
        "(float[N,3,1,1] x) => (float[N,2,1,1] y) <float[2,3,1,1] w = {1,2,3,4,5,6}> { y = Conv(x, w, [7.0, 8]) }",
        "(float[2,1,2,1] x) => (float[2,1,1,1] y) <float[1,1,3,3] w = {1,2,3,4,5,6,7,8,9}> "
        "{ y = Conv<pads=[1,1,0,1]>(x, w) }",
        "(float[2,1,1,1] x) => (float[2,2,1,1] y) <float[2,1,3,3] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9}> "
        "{ y = Conv<pads=[1,0,1,2]>(x, w, [1.0, 2]) }",
        "(float[2,2,3] x) => (float[2,2,1] y) <float[2,2,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}> "
        "{ y = Conv<strides=[2]>(x, w) }",
    )

    def where(self, m: Captures, x: Val, w: Val) -> None:
        require("auto_pad" not in m.c, "it pads")
        dims = x.rank - 2
        before, after = pads_of(m.c, dims)
        kernel = w.sizes[2:]
        if "dilations" in m.c:
            spaced = zip(kernel, per_axis(m.c, "dilations", dims))
            require(all(k == 1 or d == 1 for k, d in spaced), "it is dilated")
        for i in range(dims):  # almost all convolutions fail this check
            require(before[i] + x.size(2 + i) <= kernel[i], "the kernel does not meet the whole image")
        for i, stride in enumerate(per_axis(m.c, "strides", dims)):
            padded = before[i] + x.size(2 + i) + after[i]
            require(0 <= padded - kernel[i] < stride, "there is more than one place")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        dims = x.rank - 2
        sizes = [x.size(2 + i) for i in range(dims)]
        before, _ = pads_of(m.c, dims)
        taps: Any = w
        if w.sizes[2:] != tuple(sizes):
            ends = [p + s for p, s in zip(before, sizes)]
            taps = op.Slice(w, list(before), ends, [2 + i for i in range(dims)])
        columns = x.size(1) * prod(sizes)
        flat = op.Reshape(x, reshape_numbers(x.shape, (x.shape[0], columns)))
        y = op.Gemm(flat, op.Reshape(taps, [w.size(0), columns]), b, transB=1)
        return op.Reshape(y, reshape_numbers(y.shape, (x.shape[0], w.size(0), *[1] * dims)))


class ReplacePatchConvByMatMul(_OneConv):
    """conv(x, w, b; strides = kernel) -> reshape(transpose(patches(x) @ w^T + b))  with patches(x) a transpose."""

    dtypes = WIDE
    shapes = per_rank("x[i,c{h}] w[m,c{k}] b[m]")
    examples = (
        "agraph (float[2,1,4,6] x) => (float[2,2,2,2] y) <float[2,1,2,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}, "
        "float[2] b = {1,2}> { y = Conv<strides=[2,3]>(x, w, b) }",
        "agraph (float[N,2,6] x) => (float[N,1,3] y) <float[1,2,2] w = {1,2,3,4}> { y = Conv<strides=[2]>(x, w) }",
    )

    def where(self, m: Captures, x: Val, w: Val) -> None:
        kernel = w.sizes[2:]
        require_no_padding(m.c)
        require("dilations" not in m.c, "it is dilated")
        require(per_axis(m.c, "strides", len(kernel)) == kernel, "the strides are not the kernel")
        profitable(prod(kernel) > 1, "the kernel has one tap")
        divisible = all(x.size(2 + i) % k == 0 for i, k in enumerate(kernel))
        require(divisible, "the image is not a whole number of patches")

    def target(self, op: Op, x: Val, w: Val, b: Val | None) -> Any:
        batch, channels, outputs, kernel = x.shape[0], x.size(1), w.size(0), w.sizes[2:]
        dims = len(kernel)
        counts = [x.size(2 + i) // k for i, k in enumerate(kernel)]
        cut = [d for pair in zip(counts, kernel) for d in pair]
        parts = op.Reshape(x, reshape_numbers(x.shape, (batch, channels, *cut)))
        inside = [3 + 2 * i for i in range(dims)]
        transposed = op.Transpose(parts, perm=[0, *[2 + 2 * i for i in range(dims)], 1, *inside])
        columns = channels * prod(kernel)
        rows = op.Reshape(transposed, reshape_numbers(transposed.shape, (batch, prod(counts), columns)))
        y = op.MatMul(rows, op.Transpose(op.Reshape(w, [outputs, columns])))
        y = op.Transpose(y if b is None else op.Add(y, b), perm=[0, 2, 1])
        return y if dims == 1 else op.Reshape(y, reshape_numbers(y.shape, (batch, outputs, *counts)))


def _filled(numbers: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """A Reshape's target shape with its 0s and its -1 replaced by sizes. Refuses an empty tensor.

    A 0 beyond the input's last dimension stays 0, and then a -1 stays -1: such a Reshape is invalid.
    """
    require(prod(sizes) > 0, "a tensor is empty")
    out = [sizes[i] if d == 0 and i < len(sizes) else d for i, d in enumerate(numbers)]
    product = prod(d for d in out if d != -1)
    return tuple(prod(sizes) // product if d == -1 and product > 0 else d for d in out)


class MergePatchMatMulIntoConv(Rule, family="convolution"):
    """reshape(transpose(reshape(x))) @ w -> transpose(reshape(conv(x, w'; strides = kernel)))  for rows of patches.

    A patch may have its channels first or last.
    """

    dtypes = FLOAT
    shapes = "x[i,c,h0,h1] s[6]:const t[3]:const w[q,n]:const | x[i,c,h0] s[4]:const t[3]:const w[q,n]:const"
    examples = graphs(
        "(float[2,1,4,6] x) => (float[2,4,2] y) <float[6,2] w = {1,2,3,4,5,6,7,8,9,10,11,12}> "
        "{ r = Reshape(x, [2, 1, 2, 2, 2, 3]) p = Transpose<perm=[0,2,4,1,3,5]>(r) q = Reshape(p, [2, 4, -1]) "
        "y = MatMul(q, w) }",
        "(float[2,2,2,4] x) => (float[2,2,1] y) <float[8,1] w = {1,2,3,4,5,6,7,8}> "
        "{ r = Reshape(x, [2, 2, 1, 2, -1, 2]) p = Transpose<perm=[0,2,4,3,5,1]>(r) q = Reshape(p, [0, 2, 8]) "
        "y = MatMul(q, w) }",
        "(float[2,2,6] x) => (float[2,3,1] y) <float[4,1] w = {1,2,3,4}> { r = Reshape(x, [2, 2, 3, 2]) "
        "p = Transpose<perm=[0,2,1,3]>(r) q = Reshape(p, [2, 3, 4]) y = MatMul(q, w) }",
    )

    def source(self, op: Op, x: Any, s: Any, t: Any, w: Any) -> Any:
        return op.MatMul(op.Reshape(op.Transpose(op.Reshape(x, s), perm="p"), t), w)

    def where(self, m: Captures, x: Val, s: Val, t: Val) -> None:
        dims = x.rank - 2
        cut = _filled(s.ints, x.sizes)
        counts, kernel = cut[2::2], cut[3::2]
        image = tuple(a * k for a, k in zip(counts, kernel))
        require(cut[:2] == x.sizes[:2] and image == x.sizes[2:], "it does not cut the image")
        outside, inside = range(2, 2 + 2 * dims, 2), range(3, 3 + 2 * dims, 2)
        orders = ((0, *outside, 1, *inside), (0, *outside, *inside, 1))
        require(m.p in orders, "it does not put patches together")
        rows = _filled(t.ints, [cut[p] for p in m.p])
        columns = x.size(1) * prod(kernel)
        require(rows == (x.size(0), prod(counts), columns), "the rows are not patches")

    def target(self, op: Op, m: Captures, x: Val, s: Val, w: Val) -> Any:
        dims = x.rank - 2
        kernel = _filled(s.ints, x.sizes)[3::2]
        channels, outputs = x.size(1), w.size(1)
        taps = op.Transpose(w)
        if m.p[-1] == 1:
            by_tap = op.Reshape(taps, [outputs, *kernel, channels])
            weight = op.Transpose(by_tap, perm=[0, dims + 1, *range(1, dims + 1)])
        else:
            weight = op.Reshape(taps, [outputs, channels, *kernel])
        y = op.Conv(x, weight, strides=kernel)
        flat = y if dims == 1 else op.Reshape(y, [x.size(0), outputs, prod(y.sizes[2:])])
        return op.Transpose(flat, perm=[0, 2, 1])


class ReplaceConvTransposeByConv(Rule, family="convolution"):
    """conv_transpose(x, w, b; strides = kernel) -> depth_to_space(conv(x, w', b'))  with one tap for each output pixel.

    For a block that is not square, a reshape and a transpose replace depth_to_space.
    """

    optional = ("b",)
    shapes = per_rank("x[i,c{h}] w[c,p{k}] b[m]")
    examples = (
        "agraph (float[N,1,H,W] x) => (float[N,2,P,Q] y) <float[1,2,2,2] w = {1,2,3,4,5,6,7,8}, float[2] b = {1,2}> "
        "{ y = ConvTranspose<strides=[2,2]>(x, w, b) }",
        "agraph (float[N,2,3,2] x) => (float[N,2,6,2] y) <float[2,1,2,1] w = {1,2,3,4}> "
        "{ y = ConvTranspose<strides=[2,1], group=2>(x, w) }",
        "agraph (float[N,2,3] x) => (float[N,1,9] y) <float[2,1,3] w = {1,2,3,4,5,6}> "
        "{ y = ConvTranspose<strides=[3]>(x, w) }",
        "agraph (float[N,1,3,2] x) => (float[N,2,6,6] y) <float[1,2,2,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}, "
        "float[2] b = {1,2}> { y = ConvTranspose<strides=[2,3]>(x, w, b) }",
    )

    def source(self, op: Op, x: Any, w: Any, b: Any) -> Any:
        return op.ConvTranspose(x, w, b, attrs="c")

    def where(self, m: Captures, x: Val, w: Val, b: Val | None) -> None:
        dims = x.rank - 2
        require(per_axis(m.c, "strides", dims) == w.sizes[2:], "the strides are not the kernel")
        require(m.c.keys() <= {"strides", "group"}, "it pads, dilates, or says what it gives")
        maps = w.size(1) * group_of(m.c)
        profitable(b is None or b.size(0) == maps, "the bias is not one number per channel")
        worthwhile_data(x, w)

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        groups, (channels, maps, *kernel) = group_of(m.c), w.sizes
        taps, dims, outputs = prod(kernel), len(kernel), maps * groups
        parts = op.Reshape(w, [groups, channels // groups, maps * taps])
        weight = op.Reshape(
            op.Transpose(parts, perm=[0, 2, 1]), [outputs * taps, channels // groups] + [1] * dims
        )
        bias = b
        if b is not None and taps > 1:
            bias = op.Reshape(op.Expand(op.Reshape(b, [outputs, 1]), [outputs, taps]), [outputs * taps])
        y = op.Conv(x, weight, bias, group=groups)
        if taps == 1:
            return y
        side = kernel[0]
        if kernel == [side, side]:
            return op.DepthToSpace(y, blocksize=side, mode="CRD")
        batch, sizes = x.shape[0], [x.size(2 + i) for i in range(dims)]
        cut = op.Reshape(y, reshape_numbers(y.shape, (batch, outputs, *kernel, *sizes)))
        woven = [p for i in range(dims) for p in (2 + dims + i, 2 + i)]
        transposed = op.Transpose(cut, perm=[0, 1, *woven])
        sizes_out = [s * k for s, k in zip(sizes, kernel)]
        return op.Reshape(transposed, reshape_numbers(transposed.shape, (batch, outputs, *sizes_out)))


# Exact replacements of a convolution by another one of a different shape


class SplitDilatedConvIntoPhases(_OneConv):
    """conv(x, w, b; dilations d) -> interleave(conv(phases(x), w, b))  with every d-th row in one image."""

    shapes = per_rank("x[i,j{h}] w[m,p{k}] b[m]")
    examples = (
        "agraph (float[2,1,5,6] x) => (float[2,1,5,4] y) <float[1,1,3,2] w = {1,2,3,4,5,6}, float[1] b = {7}> "
        "{ y = Conv<dilations=[2,3], pads=[2,0,2,1]>(x, w, b) }",
        "agraph (float[1,2,9] x) => (float[1,2,5] y) <float[2,1,3] w = {1,2,3,4,5,6}> "
        "{ y = Conv<dilations=[2], group=2>(x, w) }",
    )

    def where(self, m: Captures, x: Val, w: Val) -> None:
        profitable("dilations" in m.c, "it is not dilated")
        require("strides" not in m.c, "it strides")
        require("auto_pad" not in m.c, "it pads by itself")
        worthwhile_data(x, w)
        profitable(_positive(self._out(m, x, w)), "it gives nothing")

    @staticmethod
    def _out(m: Captures, x: Val, w: Val) -> list[int]:
        dims = x.rank - 2
        before, after = pads_of(m.c, dims)
        return [
            size + b + a - d * (k - 1)
            for size, b, a, d, k in zip(
                x.sizes[2:], before, after, per_axis(m.c, "dilations", dims), w.sizes[2:]
            )
        ]

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        batch, channels, *sizes = x.sizes
        dims = len(sizes)
        spacing = per_axis(m.c, "dilations", dims)
        before, after = pads_of(m.c, dims)
        lengths = [-(-(s + b + a) // d) for s, b, a, d in zip(sizes, before, after, spacing)]
        more = [n * d - s - b for n, d, s, b in zip(lengths, spacing, sizes, before)]
        padded = op.Pad(x, [0, 0, *before, 0, 0, *more]) if any(before) or any(more) else x
        cut = op.Reshape(padded, [batch, channels, *[v for pair in zip(lengths, spacing) for v in pair]])
        phase, position = [3 + 2 * i for i in range(dims)], [2 + 2 * i for i in range(dims)]
        phases = op.Transpose(cut, perm=[*phase, 0, 1, *position])
        images = op.Reshape(phases, [prod(spacing) * batch, channels, *lengths])
        y = op.Conv(images, w, b, attrs=m.c, dilations=None, pads=None)
        _, outputs, *short = y.sizes
        apart = op.Reshape(y, [*spacing, batch, outputs, *short])
        woven = [p for i in range(dims) for p in (dims + 2 + i, i)]
        together = op.Transpose(apart, perm=[dims, dims + 1, *woven])
        full = [n * d for n, d in zip(short, spacing)]
        out = self._out(m, x, w)
        y = op.Reshape(together, [batch, outputs, *full])
        return y if full == out else op.Slice(y, [0] * dims, out, [2 + i for i in range(dims)])


class MergeBatchIntoHeight(_OneConv):
    """conv(x, w, b) -> cut(conv(stack(x), w, b))  with the images of a batch below each other, padding between them.

    Results of windows that cover parts of two images are left out.
    """

    shapes = per_rank("x[i,j{h}] w[m,p{k}] b[m]")
    near_misses = (
        'agraph (float[2,1,4,5] x, float[1,1,3,3] w) => (float[2,1,4,5] y) { y = Conv<auto_pad="SAME_UPPER">(x, w) }',
    )

    def where(self, m: Captures, x: Val, w: Val) -> None:
        profitable(x.size(0) > 1, "there is one image")
        require("auto_pad" not in m.c, "it pads by itself")
        worthwhile_data(x, w)
        profitable(meets_whole(x, w.sizes[2:], m.c), "it gives nothing")

    @staticmethod
    def _heights(m: Captures, x: Val, w: Val) -> tuple[int, int, int]:
        """Three heights: of a padded image, of that image rounded up to a multiple of the stride, and of the window."""
        dims = x.rank - 2
        before, after = pads_of(m.c, dims)
        stride = per_axis(m.c, "strides", dims)[0]
        height = x.size(2) + before[0] + after[0]
        return (
            height,
            -(-height // stride) * stride,
            per_axis(m.c, "dilations", dims)[0] * (w.size(2) - 1) + 1,
        )

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        batch, channels, _, *spatial = x.sizes
        dims = x.rank - 2
        before, after = pads_of(m.c, dims)
        stride = per_axis(m.c, "strides", dims)[0]
        height, tall, window = self._heights(m, x, w)
        more = tall - x.size(2) - before[0]
        padded = x
        if before[0] or more:
            padded = op.Pad(x, [0, 0, before[0], *[0] * (dims - 1), 0, 0, more, *[0] * (dims - 1)])
        swap = [1, 0, *range(2, x.rank)]
        stacked = op.Reshape(op.Transpose(padded, perm=swap), [1, channels, batch * tall, *spatial])
        pads = [0, *before[1:], max(window - stride, 0), *after[1:]]
        y = op.Conv(stacked, w, b, attrs=m.c, pads=pads)
        _, outputs, rows, *wide = y.sizes
        apart = op.Reshape(y, [outputs, batch, rows // batch, *wide])
        valid_rows = (height - window) // stride + 1
        y = op.Transpose(apart, perm=swap)
        return y if valid_rows == rows // batch else op.Slice(y, [0], [valid_rows], [2])


# Attributes that have a number for each spatial dimension, by default 1.
_PER_AXIS = ("strides", "dilations")


class RaiseConvToTwoDimensions(_OneConv):
    """conv(x, w, b) -> squeeze(conv(unsqueeze(x), unsqueeze(w), b))  from one spatial dimension to two.

    ONNX Runtime uses its fastest layout only for two spatial dimensions.
    """

    unpriced = True
    backend = "onnxruntime"
    shapes = "x[i,j,h] w[m,p,k] b[m]"
    survivors: ClassVar[Mapping[str, str]] = {
        "attribute strides of Conv (call 2)": "a stride along the new dimension, which has one position"
    }

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        (before,), (after,) = pads_of(m.c, 1)
        y = op.Conv(
            op.Unsqueeze(x, [2]),
            op.Unsqueeze(w, [2]),
            b,
            attrs=m.c,
            pads=None if "auto_pad" in m.c else [0, before, 0, after],
            kernel_shape=None,
            **{n: [1, *_ints(m.c[n])] for n in _PER_AXIS if n in m.c},
        )
        return op.Squeeze(y, [2])


class LowerConvToOneDimension(_OneConv):
    """conv(x, w, b) -> unsqueeze(conv(squeeze(x), squeeze(w), b))  for an image, and a kernel, of one row."""

    shapes = "x[i,j,1,h] w[m,p,1,k] b[m]"

    def where(self, m: Captures) -> None:
        before, after = pads_of(m.c, 2)
        require(before[0] == 0 and after[0] == 0, "it pads the row")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        (_, before), (_, after) = pads_of(m.c, 2)
        y = op.Conv(
            op.Squeeze(x, [2]),
            op.Squeeze(w, [2]),
            b,
            attrs=m.c,
            pads=None if "auto_pad" in m.c else [before, after],
            kernel_shape=None,
            **{n: _ints(m.c[n])[1:] for n in _PER_AXIS if n in m.c},
        )
        return op.Unsqueeze(y, [2])


class _MergeConvs(Rule, family="convolution"):
    """A rule for two convolutions, one after the other, of which one has a 1x1 kernel."""

    composite_of = ("ReplacePointwiseConvByMatMul", "MergeReshapes", "AssociateMatMulsLeft")
    may_add_nonfinite = True
    optional = ("b", "c")

    def source(self, op: Op, x: Any, w: Any, b: Any, v: Any, c: Any) -> Any:
        return op.Conv(op.Conv(x, w, b, attrs="f"), v, c, attrs="g")


class MergeConvIntoPointwise(_MergeConvs):
    """conv(conv(x, w, b), v, c) -> conv(x, v @ w, v @ b + c)  for a 1x1 kernel v, when that is less work."""

    shapes = per_rank("x[i,p{h}] w[m,p{k}]:const b[m]:const v[n,m{1}]:const c[n]:const")

    def where(self, m: Captures, w: Val, v: Val) -> None:
        require_pointwise(m.g)
        inner, outer = prod(w.sizes), prod(v.sizes)
        merged = v.size(0) * prod(w.sizes[1:])
        profitable(merged < inner + outer, "it is more work")
        profitable(v.size(0) * inner <= AT_EXPORT, "multiplying the constants out would take long")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, v: Val, c: Val | None) -> Any:
        middle, *window = w.sizes
        outputs = v.size(0)
        mix = op.Reshape(v, [outputs, middle])
        weight = op.Reshape(op.MatMul(mix, op.Reshape(w, [middle, prod(window)])), [outputs, *window])
        bias = sum_of(op, None if b is None else op.MatMul(mix, b), c)
        return op.Conv(x, weight, bias, attrs=m.f)


class MergePointwiseIntoConv(_MergeConvs):
    """conv(conv(x, w, b), v, c) -> conv(x, v w, sum(v) b + c)  for a 1x1 kernel w, when that is less work."""

    shapes = per_rank("x[i,p{h}] w[m,p{1}]:const b[m]:const v[n,m{k}]:const c[n]:const")

    def where(self, m: Captures, w: Val, b: Val | None, v: Val) -> None:
        require_pointwise(m.f)
        padded = "pads" in m.g or "auto_pad" in m.g
        require(b is None or not padded, "the bias meets padding")
        taps = prod(v.sizes[2:])
        merged = v.size(0) * w.size(1) * taps
        profitable(merged < prod(v.sizes) + prod(w.sizes), "it is more work")
        profitable(merged * w.size(0) <= AT_EXPORT, "multiplying the constants out would take long")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, v: Val, c: Val | None) -> Any:
        (middle, inputs), (outputs, _, *kernel) = w.sizes[:2], v.sizes
        taps = prod(kernel)
        columns = op.Reshape(v, [outputs, middle, taps])
        mixed = op.MatMul(op.Transpose(columns, perm=[0, 2, 1]), op.Reshape(w, [middle, inputs]))
        weight = op.Reshape(op.Transpose(mixed, perm=[0, 2, 1]), [outputs, inputs, *kernel])
        offset = None if b is None else op.MatMul(op.ReduceSum(columns, [2], keepdims=0), b)
        return op.Conv(x, weight, sum_of(op, offset, c), attrs=m.g)


class MoveScaleIntoConvWeights(Rule, family="convolution"):
    """conv(x * s, w, b) -> conv(x, w * s, b)  for one image, a 1x1 kernel, and s a computed number for each channel.

    Squeeze-and-excite blocks compute such numbers. The target scales the weights instead of the image.
    """

    unpriced = True
    optional = ("b",)
    shapes = per_rank("x[1,c{h}] s[1,c{1}] w[m,p{k}]:const b[m]")

    def source(self, op: Op, x: Any, s: Any, w: Any, b: Any) -> Any:
        return op.Conv(op.Mul(x, s), w, b, attrs="c")

    def where(self, m: Captures, x: Val, s: Val, w: Val) -> None:
        profitable(not s.const, "the scale is constant")
        worthwhile_data(x, w)
        profitable(prod(w.sizes[2:]) == 1, "the kernel is larger than one tap")
        profitable("pads" not in m.c, "it pads")

    def target(self, op: Op, m: Captures, x: Val, s: Val, w: Val, b: Val | None) -> Any:
        return op.Conv(x, scale_columns(op, w, s, group_of(m.c)), b, attrs=m.c)


# Padding


class _FoldPad(Rule, family="convolution"):
    """A rule that replaces a Pad by padding of the next operator."""

    optional: ClassVar[tuple[str, ...]] = ("value", "axes")

    def widened_pads(self, attrs: Attrs, x: Val, pads: Val, axes: Val | None) -> list[int]:
        """The sums of the Pad's and the operator's padding. Refuses a Pad of other dimensions, and one that removes
        pixels.
        """
        rank = x.rank
        pad_axes = fronts(range(rank) if axes is None else axes.ints, rank)
        numbers = pads.ints
        before, after = [0] * rank, [0] * rank
        for axis, low, high in zip(pad_axes, numbers[: len(pad_axes)], numbers[len(pad_axes) :]):
            before[axis], after[axis] = low, high
        require(all(n >= 0 for n in numbers), "it cuts")
        require(before[:2] == [0, 0] == after[:2], "it pads channels or the batch")
        profitable(any(numbers), "it does not pad")
        own = pads_of(attrs, rank - 2)
        return [p + q for p, q in zip((*own[0], *own[1]), (*before[2:], *after[2:]))]


class FoldPadIntoConv(_FoldPad):
    """conv(pad(x, p), w, b) -> conv(x, w, b; pads p)  for a padding with zeros."""

    optional: ClassVar[tuple[str, ...]] = ("b", "value", "axes")
    shapes = per_rank("x[i,j{h}] w[m,p{k}] b[m] pads:const value:const axes:const")
    examples = graphs(
        "(float[N,1,H,3] x) => (float[N,1,P,Q] y) <float[1,1,2,2] w = {1,2,3,4}, int64[8] p = {0,0,1,2,0,0,0,1}> "
        "{ z = Pad(x, p) y = Conv<pads=[1,0,0,0], strides=[2,1]>(z, w) }",
        "(float[N,1,4] x) => (float[N,1,P] y) <float[1,1,2] w = {1,2}> { z = Pad(x, [2, 1], 0.0, [-1]) "
        "y = Conv(z, w) }",
    )

    def source(self, op: Op, x: Any, w: Any, b: Any, pads: Any, value: Any, axes: Any) -> Any:
        return op.Conv(op.Pad(x, pads, value, axes), w, b, attrs="c")

    def where(self, m: Captures, x: Val, pads: Val, value: Val | None, axes: Val | None) -> None:
        require(value is None or value.scalar == 0, "it does not pad with zeros")
        require("auto_pad" not in m.c, "it pads by itself")
        self.widened_pads(m.c, x, pads, axes)

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, pads: Val, axes: Val | None) -> Any:
        return op.Conv(x, w, b, attrs=m.c, pads=self.widened_pads(m.c, x, pads, axes))


class FoldPadIntoAveragePool(_FoldPad):
    """averagepool(pad(x, p)) -> averagepool(x; pads p, padding counted)  for a padding with zeros."""

    shapes = per_rank("x[i,c{h}] pads:const value:const axes:const")
    examples = graphs(
        "(float[N,2,5,4] x) => (float[N,2,P,Q] y) <int64[8] p = {0,0,1,1,0,0,0,1}> { z = Pad(x, p) "
        "y = AveragePool<kernel_shape=[2,3], strides=[2,2]>(z) }",
        "(float[N,2,5] x) => (float[N,2,P] y) { z = Pad(x, [1, 0], 0.0, [2]) "
        "y = AveragePool<kernel_shape=[3], count_include_pad=1, pads=[1,1]>(z) }",
    )
    near_misses = graphs(
        "(float[N,2,4] x) => (float[N,2,P] y) { z = Pad(x, [0, 0, 0, 0, 0, 1]) "
        "y = AveragePool<kernel_shape=[2], strides=[2], ceil_mode=1>(z) }",
        "(float[N,2,5] x) => (float[N,2,P] y) { z = Pad(x, [1, 0], 1.0, [2]) y = AveragePool<kernel_shape=[2]>(z) }",
    )

    def source(self, op: Op, x: Any, pads: Any, value: Any, axes: Any) -> Any:
        return op.AveragePool(op.Pad(x, pads, value, axes), attrs="c")

    def where(self, m: Captures, x: Val, pads: Val, value: Val | None, axes: Val | None) -> None:
        require(value is None or value.scalar == 0, "it does not pad with zeros")
        require("auto_pad" not in m.c, "it pads by itself")
        require(not m.c.get("ceil_mode"), "a window may hang over the end")
        require("pads" not in m.c or m.c.get("count_include_pad"), "the pool does not count its padding")
        widened = self.widened_pads(m.c, x, pads, axes)
        profitable(all(p < k for p, k in zip(widened, window_of(m.c) * 2)), "the runtime refuses it")

    def target(self, op: Op, m: Captures, x: Val, pads: Val, axes: Val | None) -> Any:
        return op.AveragePool(x, attrs=m.c, pads=self.widened_pads(m.c, x, pads, axes), count_include_pad=1)


def meets_image(attrs: Attrs) -> bool:
    """Whether every window of a pool contains an element of the image, and not only padding.

    Runtimes refuse padding as large as the window, so a window can lie wholly in the padding only through dilation.
    """
    pads = per_axis(attrs, "pads", 0)
    return "dilations" not in attrs or not (any(pads) or "auto_pad" in attrs)


# Operators whose results are never negative.
_NOT_NEGATIVE = frozenset({"Abs", "Exp", "HardSigmoid", "Relu", "Sigmoid", "Softmax", "Softplus"})


class FoldPadIntoMaxPool(RegionRule, family="convolution"):
    """maxpool(pad(x, p)) -> maxpool(x; pads p)  for a padding with -inf, or with zeros where x is not negative."""

    proof = "numeric"
    relies_on = "max(x, -inf) = x, and max(x, 0) = x for x >= 0"
    anchors = ("MaxPool",)
    reads_from = ("Pad",)
    examples = graphs(
        "(float[N,2,5,4] x) => (float[N,2,P,Q] y) <int64[8] p = {0,0,1,1,0,0,0,1}> { r = Relu(x) z = Pad(r, p) "
        "y = MaxPool<kernel_shape=[2,3], strides=[2,2]>(z) }",
        "(float[N,2,5] x) => (float[N,2,P] y) { r = Sigmoid(x) z = Pad(r, [1, 0], 0.0, [2]) "
        "y = MaxPool<kernel_shape=[3], pads=[0,1]>(z) }",
        "(float[N,2,5] x) => (float[N,2,P] y) { m = Div(1.0, 0.0) v = Neg(m) z = Pad(x, [0, 0, 1, 0, 0, 1], v) "
        "y = MaxPool<kernel_shape=[2]>(z) }",
        "(float[N,2,5] x) => (float[N,2,P] y) { r = Clip(x, 0.0) z = Pad(r, [0, 0, 1, 0, 0, 0]) "
        "y = MaxPool<kernel_shape=[2]>(z) }",
    )
    near_misses = graphs(
        "(float[N,2,4] x) => (float[N,2,P] y) { r = Relu(x) z = Pad(r, [0, 0, 0, 0, 0, 1]) "
        "y = MaxPool<kernel_shape=[2], strides=[2], ceil_mode=1>(z) }",
        "(float[N,2,1] x) => (float[N,2,P] y) { r = Relu(x) z = Pad(r, [0, 0, 1, 0, 0, 1]) "
        "y = MaxPool<kernel_shape=[2], dilations=[2]>(z) }",
        "(float[N,2,5] x) => (float[N,2,P] y, int64[N,2,P] i) { r = Relu(x) z = Pad(r, [0, 0, 1, 0, 0, 0]) y, i "
        "= MaxPool<kernel_shape=[2]>(z) }",
        "(float[N,2,5] x) => (float[N,2,P] y) { r = Clip(x) z = Pad(r, [0, 0, 1, 0, 0, 0]) "
        "y = MaxPool<kernel_shape=[2]>(z) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        pad = made_by(reader, node.inputs[0], "Pad")
        if pad is None or len(node.outputs) > 1:
            return None
        profitable(read_once(reader, node.inputs[0]), "the padded image is read elsewhere")
        require("mode" not in pad.attrs, "it does not pad with a number")
        x = pad.inputs[0]
        optional = [reader.val(v) if v else None for v in (*pad.inputs[1:], ABSENT, ABSENT)[:3]]
        pads, number, axes = optional
        assert pads is not None
        value = 0.0 if number is None else number.scalar
        require(
            value == -math.inf or (value == 0 and self._not_negative(reader, x)),
            "the padding may be the largest number",
        )
        attrs = node.attrs
        require("auto_pad" not in attrs, "it pads by itself")
        require(not attrs.get("ceil_mode"), "a window may hang over the end")
        widened = _FoldPad().widened_pads(attrs, reader.val(x), pads, axes)
        require("dilations" not in attrs, "a window may lie in the padding")
        require(all(p < k for p, k in zip(widened, window_of(attrs) * 2)), "a window may lie in the padding")
        return Region(node.outputs, (x,), (node, pad), (attrs, tuple(widened)))

    @staticmethod
    def _not_negative(reader: Reader, x: Value) -> bool:
        maker = reader.producer(x)
        if maker is None:
            return False
        if maker.op == "Clip":
            low = maker.inputs[1] if len(maker.inputs) > 1 else ABSENT
            return bool(low) and reader.is_const(low) and reader.val(low).scalar >= 0
        return maker.op in _NOT_NEGATIVE

    def target(self, op: Op, region: Region, x: Val) -> Any:
        attrs, pads = region.data
        return op.MaxPool(x, attrs=attrs, pads=pads)


class WriteOutAutoPad(RegionRule, family="convolution"):
    """conv(x, w; auto_pad SAME) -> conv(x, w; pads)  where the padding is known;  MaxPool and AveragePool alike."""

    anchors = ("Conv", "MaxPool", "AveragePool")
    examples = (
        "agraph (float[N,1,H,W] x) => (float[N,1,H,W] y) <float[1,1,3,2] w = {1,2,3,4,5,6}> "
        '{ y = Conv<auto_pad="SAME_UPPER">(x, w) }',
        'agraph (float[N,2,5] x) => (float[N,2,3] y) { y = MaxPool<auto_pad="SAME_LOWER", kernel_shape=[2], '
        "strides=[2]>(x) }",
        "agraph (float[N,2,5,6] x) => (float[N,2,P,Q] y) "
        '{ y = AveragePool<auto_pad="SAME_UPPER", kernel_shape=[3,4], strides=[2,3]>(x) }',
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        mode = node.attrs.get("auto_pad")
        if mode is None or len(node.outputs) > 1:
            return None
        x = reader.val(node.inputs[0])
        dims = x.rank - 2
        if node.op == "Conv":
            kernel = reader.val(node.inputs[1]).sizes[2:]
        else:
            kernel = window_of(node.attrs)
        before, after = [], []
        for axis, (k, stride, spacing) in enumerate(
            zip(kernel, per_axis(node.attrs, "strides", dims), per_axis(node.attrs, "dilations", dims))
        ):
            total = spacing * (k - 1)
            if stride > 1:
                size = x.size(2 + axis)
                total = max((-(-size // stride) - 1) * stride + total + 1 - size, 0)
            less, more = total // 2, total - total // 2
            before.append(less if mode == "SAME_UPPER" else more)
            after.append(more if mode == "SAME_UPPER" else less)
        pads = (*before, *after)
        profitable(
            node.op == "Conv" or all(p < k for p, k in zip(pads, kernel * 2)), "the runtime refuses it"
        )
        return Region(node.outputs, node.inputs, (node,), (node.op, node.attrs, pads))

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        name, attrs, pads = region.data
        return op[name](*inputs, attrs=attrs, auto_pad=None, pads=pads)


# Pools


class ReplaceAveragePoolByConv(Rule, family="convolution"):
    """averagepool(x) -> conv(x, 1/n; each channel by itself)  when the padding is counted, or there is none."""

    may_round_inputs = True
    proof = "numeric"
    relies_on = "a quotient by n is the product with 1/n, rounded"
    dtypes = FLOAT
    shapes = _IMAGE

    def source(self, op: Op, x: Any) -> Any:
        return op.AveragePool(x, attrs="c")

    def where(self, m: Captures, x: Val) -> None:
        require("auto_pad" not in m.c, "it pads by itself")
        require(not m.c.get("ceil_mode"), "a window may hang over the end")
        require("pads" not in m.c or m.c.get("count_include_pad"), "it does not count the padding")
        worthwhile_data(x)
        profitable(meets_whole(x, window_of(m.c), m.c), "it gives nothing")

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        channels, kernel = x.size(1), window_of(m.c)
        share = np.full((1,) * x.rank, 1 / prod(kernel), x.storage)
        window = {n: m.c.get(n) for n in ("strides", "pads", "dilations")}
        return op.Conv(x, op.Expand(share, [channels, 1, *kernel]), group=channels, **window)


class ReplaceUniformConvByAveragePool(_OneConv):
    """conv(x, c, b; each channel by itself) -> averagepool(x) * (n c) + b  when all weights are one number c."""

    may_lose_errors = ("sizes",)
    proof = "numeric"
    relies_on = "a sum is n times the average, rounded"
    dtypes = FLOAT
    shapes = per_rank("x[i,c{h}] w[c,1{k}]:const b[c]")

    def where(self, m: Captures, w: Val) -> None:
        require(w.uniform is not None, "the weights are not one number")
        profitable(prod(w.sizes[2:]) > 1, "the kernel has one tap")
        require("auto_pad" not in m.c, "it pads by itself")
        pads = _ints(m.c.get("pads", ()))
        profitable(all(p < k for p, k in zip(pads, w.sizes[2:] * 2)), "the runtime refuses it")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        kernel = w.sizes[2:]
        window = {n: m.c.get(n) for n in ("strides", "pads", "dilations")}
        y = op.AveragePool(x, kernel_shape=kernel, count_include_pad=int("pads" in m.c), **window)
        assert w.uniform is not None
        factor = w.uniform * prod(kernel)
        if not math.isclose(factor, 1.0, rel_tol=1e-7):
            y = op.Mul(y, factor)
        return y if b is None else op.Add(y, per_channel(op, b, x.rank - 2))


class ReplaceFullAveragePoolByGlobal(Rule, family="convolution"):
    """averagepool(x; kernel = image) -> globalaveragepool(x)."""

    pool, whole = "AveragePool", "GlobalAveragePool"
    dtypes = FLOAT
    shapes = _IMAGE
    examples: ClassVar[tuple[str, ...]] = (
        "agraph (float[N,2,3,4] x) => (float[N,2,1,1] y) { y = AveragePool<kernel_shape=[3,4]>(x) }",
        "agraph (float[N,2,3] x) => (float[N,2,1] y) { y = AveragePool<kernel_shape=[3], strides=[2]>(x) }",
    )

    def source(self, op: Op, x: Any) -> Any:
        return op[self.pool](x, attrs="c")

    def where(self, m: Captures, x: Val) -> None:
        sizes = tuple(x.size(2 + i) for i in range(x.rank - 2))
        require(window_of(m.c) == sizes, "the kernel is not the image")
        require("dilations" not in m.c, "it is dilated")
        require_no_padding(m.c)

    def target(self, op: Op, x: Val) -> Any:
        return op[self.whole](x)


class ReplaceFullMaxPoolByGlobal(ReplaceFullAveragePoolByGlobal):
    """maxpool(x; kernel = image) -> globalmaxpool(x)."""

    proof = "numeric"
    relies_on = "max is associative and commutative"
    pool, whole = "MaxPool", "GlobalMaxPool"
    examples: ClassVar[tuple[str, ...]] = tuple(
        e.replace("Average", "Max") for e in ReplaceFullAveragePoolByGlobal.examples
    )


class ReplaceGlobalAveragePoolByMean(Rule, family="convolution"):
    """globalaveragepool(x) -> reducemean(x; the spatial axes)."""

    pool, reduce = "GlobalAveragePool", "ReduceMean"
    dtypes = FLOAT
    shapes = _IMAGE
    examples: ClassVar[tuple[str, ...]] = (
        "agraph (float[N,2,3,4] x) => (float[N,2,1,1] y) { y = GlobalAveragePool(x) }",
        "agraph (float[2,C,3] x) => (float[2,C,1] y) { y = GlobalAveragePool(x) }",
        "agraph (float[N,1,2,3,2] x) => (float[N,1,1,1,1] y) { y = GlobalAveragePool(x) }",
    )

    def source(self, op: Op, x: Any) -> Any:
        return op[self.pool](x)

    def target(self, op: Op, x: Val) -> Any:
        return op[self.reduce](x, list(range(2, x.rank)))


class ReplaceGlobalMaxPoolByMax(ReplaceGlobalAveragePoolByMean):
    """globalmaxpool(x) -> reducemax(x; the spatial axes)."""

    # Whether ONNX Runtime's kernel ignores a NaN depends on the NaN's position.
    may_add_nonfinite = True
    may_remove_nonfinite = True
    pool, reduce = "GlobalMaxPool", "ReduceMax"
    examples: ClassVar[tuple[str, ...]] = tuple(
        e.replace("Average", "Max") for e in ReplaceGlobalAveragePoolByMean.examples
    )


class ReplaceMeanByGlobalAveragePool(Rule, family="convolution"):
    """reducemean(x; the spatial axes) -> globalaveragepool(x), squeezed where it keeps no dimensions."""

    nonempty = True
    # ONNX Runtime's pools add one element after the other, its ReduceMean adds in a tree. With more elements than this,
    # a pool would lose more than two bits.
    most: ClassVar[int | None] = 512
    pool, reduce = "GlobalAveragePool", "ReduceMean"
    dtypes = FLOAT
    shapes = per_rank("x[i,c{h}] axes[n]:const")
    examples: ClassVar[tuple[str, ...]] = graphs(
        "(float[N,2,3,4] x) => (float[N,2,1,1] y) { y = ReduceMean(x, [2, 3]) }",
        "(float[N,2,3,4] x) => (float[N,2] y) { y = ReduceMean<keepdims=0>(x, [-1, -2]) }",
        "(float[N,C,3] x) => (float[N,C] y) { y = ReduceMean<keepdims=0>(x, [2]) }",
        "(float[2,C,3,4,5] x) => (float[2,C,1,1,1] y) { y = ReduceMean(x, [2, 4, 3]) }",
    )

    def source(self, op: Op, x: Any, axes: Any) -> Any:
        return op[self.reduce](x, axes, keepdims="keep")

    def where(self, x: Val, axes: Val) -> None:
        reduced = sorted(fronts(axes.ints, x.rank))
        require(reduced == list(range(2, x.rank)), "it does not reduce the spatial axes")
        if self.most is not None:
            elements = prod(x.size(i) for i in range(2, x.rank))
            accurate(elements <= self.most, "a mean of so many elements loses accuracy")

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        y = op[self.pool](x)
        return y if m.keep else op.Squeeze(y, list(range(2, x.rank)))


class ReplaceMaxByGlobalMaxPool(ReplaceMeanByGlobalAveragePool):
    """reducemax(x; the spatial axes) -> globalmaxpool(x), squeezed where it keeps no dimensions."""

    # Whether ONNX Runtime's kernel ignores a NaN depends on the NaN's position.
    may_add_nonfinite = True
    may_remove_nonfinite = True
    most = None
    pool, reduce = "GlobalMaxPool", "ReduceMax"
    examples: ClassVar[tuple[str, ...]] = tuple(
        e.replace("ReduceMean", "ReduceMax") for e in ReplaceMeanByGlobalAveragePool.examples
    )


# With AVX-512 ONNX Runtime stores images in blocks of this many channels, otherwise in blocks of 8. Whether the rules
# below gain anything is measured.
_BLOCK = 16


class AlignChannelsBeforeGlobalAveragePool(Rule, family="convolution"):
    """globalaveragepool(relu(conv(x, w, b))) -> slice(globalaveragepool(relu(conv(x, pad(w), pad(b)))), the channels).

    pad adds channels of zeros up to a multiple of 16. Without these, ONNX Runtime reorders the whole image before it
    pools.
    """

    unpriced = True
    optional = ("b",)
    shapes = per_rank("x[i,j{h}] w[m,p{k}]:const b[m]:const")
    examples: ClassVar[tuple[str, ...]] = (
        "agraph (float[N,2,3,W] x) => (y) <float[2,2,1,1] w = {1, -2, 3, 4}, float[2] b = {3, -1}> "
        "{ a = Conv(x, w, b) r = Relu(a) y = GlobalAveragePool(r) }",
        "agraph (float[1,1,5] x) => (y) <float[2,1,2] w = {1, -2, 3, 4}> "
        "{ a = Conv<pads=[1,0]>(x, w) r = Relu(a) y = GlobalAveragePool(r) }",
    )

    def source(self, op: Op, x: Any, w: Any, b: Any) -> Any:
        return op.GlobalAveragePool(op.Relu(op.Conv(x, w, b, attrs="c")))

    def where(self, m: Captures, x: Val, w: Val, b: Val | None) -> None:
        require(group_of(m.c) == 1, "it has groups")
        profitable(w.size(0) % _BLOCK != 0, "the channels are aligned")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        channels, more = w.size(0), -w.size(0) % _BLOCK
        rows = op.Pad(w, [0] * w.rank + [more] + [0] * (w.rank - 1))
        image = op.Relu(op.Conv(x, rows, None if b is None else op.Pad(b, [0, more]), attrs=m.c))
        return op.Slice(op.GlobalAveragePool(image), [0], [channels], [1])


class AlignChannelsBeforeMean(AlignChannelsBeforeGlobalAveragePool):
    """reducemean(relu(conv(x, w, b)); the spatial axes) -> slice(globalaveragepool(relu(conv(x, pad(w), pad(b))))).

    As `AlignChannelsBeforeGlobalAveragePool`, but for a ReduceMean, which becomes a GlobalAveragePool.
    """

    nonempty = True
    shapes = per_rank("x[i,j{h}] w[m,p{k}]:const b[m]:const axes[n]:const")
    examples: ClassVar[tuple[str, ...]] = tuple(
        f"agraph (float[{image}] x) => (y) <float[{kernel}] w = {{{weights}}}, float[2] b = {{3, -1}}, "
        f"int64[{dims}] i = {{{axes}}}> "
        f"{{ a = Conv(x, w{bias}) r = Relu(a) y = ReduceMean<keepdims={min(dims - 1, 1)}>(r, i) }}"
        for image, kernel, weights, dims, axes, bias in (
            ("N,2,H,W", "2,2,1,1", "1, -2, 3, 4", 2, "2,-1", ", b"),
            ("2,1,3,4", "2,1,1,2", "1, -2, 3, 4", 2, "3,2", ""),
            ("2,1,W", "2,1,1", "1, -2", 1, "2", ""),
            ("1,1,5", "2,1,2", "1, -2, 3, 4", 1, "2", ", b"),
            ("1,1,D,H,2", "2,1,1,1,1", "1, -2", 3, "2,4,3", ", b"),
            ("1,1,2,2,W", "2,1,1,1,1", "1, -2", 3, "2,3,4", ""),
        )
    )

    def source(self, op: Op, x: Any, w: Any, b: Any, axes: Any) -> Any:  # type: ignore[override]
        return op.ReduceMean(op.Relu(op.Conv(x, w, b, attrs="c")), axes, keepdims="keep")

    def where(self, m: Captures, x: Val, w: Val, b: Val | None, axes: Val) -> None:  # type: ignore[override]
        super().where(m, x, w, b)
        require(
            sorted(fronts(axes.ints, x.rank)) == list(range(2, x.rank)), "it does not reduce the spatial axes"
        )

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        y = super().target(op, m, x, w, b)
        return y if m.keep else op.Squeeze(y, list(range(2, x.rank)))


class PushAveragePoolBeforeConv(Rule, family="convolution"):
    """averagepool(conv(x, w, b)) -> conv(averagepool(x), w, b)  for a 1x1 kernel."""

    optional = ("b",)
    shapes = _POOLED

    def source(self, op: Op, x: Any, w: Any, b: Any) -> Any:
        return op.AveragePool(op.Conv(x, w, b, attrs="c"), attrs="p")

    def where(self, m: Captures, x: Val, w: Val, b: Val | None) -> None:
        require_pointwise(m.c)
        worthwhile_data(x, w)
        profitable(meets_whole(x, window_of(m.p), m.p), "it gives nothing")
        counted = bool(m.p.get("count_include_pad")) and ("pads" in m.p or "auto_pad" in m.p)
        require(b is None or not counted, "the bias is averaged with padding")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        return op.Conv(op.AveragePool(x, attrs=m.p), w, b, attrs=m.c, **_UNHEEDED)


class PushGlobalAveragePoolBeforeConv(Rule, family="convolution"):
    """globalaveragepool(conv(x, w, b)) -> conv(globalaveragepool(x), w, b)  for a 1x1 kernel."""

    optional = ("b",)
    shapes = _POOLED

    def source(self, op: Op, x: Any, w: Any, b: Any) -> Any:
        return op.GlobalAveragePool(op.Conv(x, w, b, attrs="c"))

    def where(self, m: Captures, x: Val, w: Val) -> None:
        require_pointwise(m.c)
        worthwhile_data(x, w)

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        return op.Conv(op.GlobalAveragePool(x), w, b, attrs=m.c, **_UNHEEDED)


class PushConvBeforeAveragePool(Rule, family="convolution"):
    """conv(averagepool(x), w, b) -> averagepool(conv(x, w)) + b  for a 1x1 kernel: the pool may have fewer channels."""

    optional = ("b",)
    shapes = _POOLED

    def source(self, op: Op, x: Any, w: Any, b: Any) -> Any:
        return op.Conv(op.AveragePool(x, attrs="p"), w, b, attrs="c")

    def where(self, m: Captures, x: Val, w: Val) -> None:
        require_pointwise(m.c)
        worthwhile_data(x, w)
        profitable(w.size(1) * group_of(m.c) == x.shape[1], "it is no convolution")
        profitable(meets_whole(x, window_of(m.p), m.p), "it gives nothing")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        if b is None or not m.p.get("count_include_pad"):
            return op.AveragePool(op.Conv(x, w, b, attrs=m.c, **_UNHEEDED), attrs=m.p)
        y = op.AveragePool(op.Conv(x, w, attrs=m.c, **_UNHEEDED), attrs=m.p)
        return op.Add(y, per_channel(op, b, x.rank - 2))


class MergeMaxPools(Rule, family="convolution"):
    """maxpool(maxpool(x; k, s); l, t) -> maxpool(x; k + s (l - 1), s t)  for kernels k, l and strides s, t."""

    proof = "numeric"
    relies_on = "max is associative, commutative and idempotent"
    # Whether ONNX Runtime's kernel ignores a NaN depends on the NaN's position.
    may_add_nonfinite = True
    may_remove_nonfinite = True
    shapes = _IMAGE
    examples = (
        "agraph (float[N,2,H,7] x) => (float[N,2,P,Q] y) { a = MaxPool<kernel_shape=[5,3], pads=[2,1,2,1]>(x) "
        "y = MaxPool<kernel_shape=[5,3], pads=[2,0,2,1]>(a) }",
        "agraph (float[N,2,8] x) => (float[N,2,P] y) { a = MaxPool<kernel_shape=[2], strides=[2]>(x) "
        "y = MaxPool<kernel_shape=[3], strides=[2], pads=[1,1]>(a) }",
        "agraph (float[N,2,9] x) => (float[N,2,P] y) { a = MaxPool<kernel_shape=[3], strides=[2], pads=[1,0]>(x) "
        "y = MaxPool<kernel_shape=[2]>(a) }",
    )
    near_misses = (
        "agraph (float[N,2,9] x) => (float[N,2,P] y) { a = MaxPool<kernel_shape=[1], strides=[2]>(x) "
        "y = MaxPool<kernel_shape=[2]>(a) }",
        "agraph (float[N,2,9] x) => (float[N,2,P] y) { a = MaxPool<kernel_shape=[2], dilations=[2]>(x) "
        "y = MaxPool<kernel_shape=[2]>(a) }",
        "agraph (float[N,2,9] x) => (float[N,2,P] y) { a = MaxPool<kernel_shape=[2], strides=[2], ceil_mode=1>(x) "
        "y = MaxPool<kernel_shape=[2]>(a) }",
    )

    def source(self, op: Op, x: Any) -> Any:
        return op.MaxPool(op.MaxPool(x, attrs="a"), attrs="b")

    def where(self, m: Captures, x: Val) -> None:
        dims = x.rank - 2
        for attrs in (m.a, m.b):
            require("auto_pad" not in attrs, "it pads by itself")
            require(not attrs.get("ceil_mode"), "a window may hang over the end")
            require("dilations" not in attrs, "the windows have holes")
        inner, outer = window_of(m.a), window_of(m.b)
        strides = per_axis(m.a, "strides", dims)
        profitable(meets_whole(x, inner, m.a), "it gives nothing")
        full = [s * (n - 1) + k for s, n, k in zip(strides, outer, inner)]
        (before, after), (ahead, behind) = pads_of(m.a, dims), pads_of(m.b, dims)
        more = [b + a + s * (q + r) for b, a, s, q, r in zip(before, after, strides, ahead, behind)]
        sizes = zip(x.shape[2:], more, full)
        profitable(all(not isinstance(n, int) or n + p >= k for n, p, k in sizes), "it gives nothing")
        holes = any(s > k and n > 1 for s, k, n in zip(strides, inner, outer))
        require(not holes, "the windows have holes")
        for axis, (k, s) in enumerate(zip(inner, strides)):
            if s > 1 and behind[axis]:
                room = x.size(2 + axis) + before[axis] + after[axis] - k
                reach = room // s * s + k - before[axis]
                require(
                    reach >= x.size(2 + axis), "the first pool leaves out an end that the second would meet"
                )

    def target(self, op: Op, m: Captures, x: Val) -> Any:
        dims = x.rank - 2
        inner, outer = window_of(m.a), window_of(m.b)
        s, t = (per_axis(a, "strides", dims) for a in (m.a, m.b))
        p, q = (per_axis(a, "pads", 2 * dims, 0) for a in (m.a, m.b))
        return op.MaxPool(
            x,
            kernel_shape=[k + a * (n - 1) for k, a, n in zip(inner, s, outer)],
            strides=[a * b for a, b in zip(s, t)],
            pads=[a + b * c for a, b, c in zip(p, s * 2, q)],
        )


# Functions that never decrease, unless their `alpha` is negative.
_RISING: tuple[str, ...] = (
    *("Ceil", "Clip", "Elu", "Erf", "Exp", "Floor", "HardSigmoid", "LeakyRelu", "Relu", "Round"),
    *("Sigmoid", "Softplus", "Tanh"),
)

_MAX_POOLS = ("GlobalMaxPool", "MaxPool")


class _SwapMaxPool(Rule, family="convolution"):
    """A rule for a max pool and a function that never decreases (for Clip, `low` and `high` are the bounds)."""

    proof = "numeric"
    relies_on = "a function that does not fall commutes with max"
    # Whether ONNX Runtime's kernel ignores a NaN depends on the NaN's position.
    may_add_nonfinite = True
    may_remove_nonfinite = True
    dtypes = FLOAT
    optional = ("low", "high")
    shapes = per_rank("x[i,c{h}] low[]:const high[]:const")
    survivors: ClassVar[Mapping[str, str]] = {
        "drop: the image may be empty": "which is the greatest of no numbers, ONNX leaves open: it is not evaluated"
    }

    def where(self, m: Captures, x: Val) -> None:
        slope = m.of_f.get("alpha", 1.0)
        require(slope > 0, "the function may fall, or is NaN of infinity")
        if m.pool == "MaxPool":
            require(meets_image(m.of_pool), "a window may lie in the padding")
        else:
            require(_positive(x.shape[2:]), "the image may be empty")


class PushRisingBeforeMaxPool(_SwapMaxPool):
    """f(maxpool(x)) -> maxpool(f(x))  for f that never decreases: ONNX Runtime may fuse f with what makes x."""

    unpriced = True
    examples = graphs(
        "(float[N,2,5,6] x) => (float[N,2,P,Q] y) "
        "{ a = MaxPool<kernel_shape=[3,2], strides=[2,2], pads=[1,0,1,0]>(x) y = Relu(a) }",
        "(float[N,2,1] x) => (float[N,2,1] y) { a = GlobalMaxPool(x) y = LeakyRelu<alpha=0.1>(a) }",
        "(float[N,2,5] x) => (float[N,2,3] y) { a = MaxPool<kernel_shape=[3]>(x) y = Clip(a, -0.5) }",
        "(float[N,2,5] x) => (float[N,2,P] y) { a = MaxPool<kernel_shape=[2], dilations=[2]>(x) y = Elu(a) }",
    )
    near_misses = graphs(
        "(float[N,2,1] x) => (float[N,2,1] y) { a = MaxPool<kernel_shape=[2], dilations=[2], pads=[1,1]>(x) "
        "y = Sigmoid(a) }",
        "(float[N,2,5] x) => (float[N,2,4] y) { a = MaxPool<kernel_shape=[2]>(x) y = LeakyRelu<alpha=0.0>(a) }",
        "(float[N,2,5] x) => (float[N,2,P] y, int64[N,2,P] i) { a, i = MaxPool<kernel_shape=[2]>(x) y = Relu(a) }",
        "(float[N,2,5] x) => (float[N,2,P] y) { a = MaxPool<kernel_shape=[2], dilations=[2], pads=[0,1]>(x) "
        "y = Relu(a) }",
        "(float[N,2,5] x) => (float[N,2,4] y) { a = MaxPool<kernel_shape=[2]>(x) y = HardSigmoid<alpha=-0.5>(a) }",
    )

    def source(self, op: Op, x: Any, low: Any, high: Any) -> Any:
        pooled = op.any_of(_MAX_POOLS, "pool")(x, attrs="of_pool")
        return op.any_of(_RISING, "f")(pooled, low, high, attrs="of_f")

    def target(self, op: Op, m: Captures, x: Val, low: Val | None, high: Val | None) -> Any:
        return op[m.pool](op[m.f](x, low, high, attrs=m.of_f), attrs=m.of_pool)


class PushRisingBehindMaxPool(_SwapMaxPool):
    """maxpool(f(x)) -> f(maxpool(x))  for f that never decreases: it then has fewer elements to compute."""

    survivors: ClassVar[Mapping[str, str]] = {
        **_SwapMaxPool.survivors,
        "drop: a window may lie in the padding": "its greatest is -inf, which may become a number",
    }
    examples = graphs(
        "(float[N,2,5,6] x) => (float[N,2,P,Q] y) { a = Sigmoid(x) "
        "y = MaxPool<kernel_shape=[3,2], strides=[2,2], pads=[1,0,1,0]>(a) }",
        "(float[N,2,5] x) => (float[N,2,1] y) { a = HardSigmoid<alpha=0.3>(x) y = GlobalMaxPool(a) }",
        "(float[N,2,5] x) => (float[N,2,3] y) { a = Clip(x, -0.5, 0.75) y = MaxPool<kernel_shape=[3]>(a) }",
    )
    near_misses = graphs(
        "(float[N,2,1] x) => (float[N,2,1] y) { a = Sigmoid(x) "
        "y = MaxPool<kernel_shape=[2], dilations=[2], pads=[1,1]>(a) }",
        "(float[N,2,5] x) => (float[N,2,P] y, int64[N,2,P] i) { a = Relu(x) y, i = MaxPool<kernel_shape=[2]>(a) }",
        "(float[2,2,0] x) => (float[2,2,1] y) { a = Relu(x) y = GlobalMaxPool(a) }",
    )

    def source(self, op: Op, x: Any, low: Any, high: Any) -> Any:
        risen = op.any_of(_RISING, "f")(x, low, high, attrs="of_f")
        return op.any_of(_MAX_POOLS, "pool")(risen, attrs="of_pool")

    def target(self, op: Op, m: Captures, x: Val, low: Val | None, high: Val | None) -> Any:
        return op[m.f](op[m.pool](x, attrs=m.of_pool), low, high, attrs=m.of_f)


# Resize


class _SwapResize(Rule, family="convolution"):
    """A rule for a 1x1 convolution and a Resize."""

    may_add_nonfinite = True  # the sum over channels and the sum over pixels are exchanged
    proof = "numeric"
    relies_on = "each pixel that is made is a mean of others, with weights that sum up to one"
    optional = ("b", "roi", "scales", "sizes")
    shapes = per_rank("x[i,j{h}] w[m,p{1}] b[m] scales:const sizes:const", ranks=(1, 2))

    def where(self, m: Captures, x: Val, w: Val, scales: Val | None, sizes: Val | None) -> None:
        worthwhile_data(x, w)
        require_pointwise(m.c)
        mode = m.r.get("coordinate_transformation_mode")
        require(mode != "tf_crop_and_resize", "it crops")
        require("keep_aspect_ratio_policy" not in m.r, "the channels may set the scale")
        if "axes" in m.r:
            require(1 not in fronts(_ints(m.r["axes"]), x.rank), "it resizes the channels")
        elif scales is not None and scales.array.size:
            require(scales.array[1] == 1, "it resizes the channels")
        else:
            profitable(sizes is not None and len(sizes.ints) == x.rank, "it has no sizes")
            require(sizes is None or sizes.ints[1] == self.channels(x, w), "it resizes the channels")

    def channels(self, x: Val, w: Val) -> int:
        """The number of channels of the tensor that the left side resizes."""
        return x.size(1)

    def resized(
        self,
        op: Op,
        m: Captures,
        x: Val,
        channels: int,
        roi: Val | None,
        scales: Val | None,
        sizes: Val | None,
    ) -> Any:
        to: Any = sizes
        if sizes is not None and "axes" not in m.r:
            to = [sizes.ints[0], channels, *sizes.ints[2:]]
        y = op.Resize(x, roi, scales, to, attrs=m.r)
        worthwhile_data(y)
        return y


class PushConvBeforeResize(_SwapResize):
    """conv(resize(x), w, b) -> resize(conv(x, w, b))  for a 1x1 kernel."""

    examples = (
        "agraph (float[2,1,2,3] x) => (float[2,2,4,6] y) <float[2,1,1,1] w = {1,2}, float[2] b = {3,4}, "
        "float[4] s = {1,1,2,2}> { r = Resize(x, , s) y = Conv(r, w, b) }",
        "agraph (float[2,2,3,2] x) => (float[2,1,4,3] y) <float[1,2,1,1] w = {1,2}, int64[4] s = {2,2,4,3}> "
        '{ r = Resize<coordinate_transformation_mode="asymmetric", nearest_mode="floor">(x, , , s) y = Conv(r, w) }',
        "agraph (float[N,2,3] x) => (float[N,1,5] y) <float[1,2,1] w = {1,2}, int64[1] s = {5}> "
        "{ r = Resize<axes=[2]>(x, , , s) y = Conv(r, w) }",
        "agraph (float[N,2,3] x) => (float[N,4,6] y) <float[4,1,1] w = {1,2,3,4}, float[3] s = {1,1,2}> "
        "{ r = Resize(x, , s) y = Conv<group=2>(r, w) }",
    )

    def source(self, op: Op, x: Any, w: Any, b: Any, roi: Any, scales: Any, sizes: Any) -> Any:
        return op.Conv(op.Resize(x, roi, scales, sizes, attrs="r"), w, b, attrs="c")

    def target(
        self,
        op: Op,
        m: Captures,
        x: Val,
        w: Val,
        b: Val | None,
        roi: Val | None,
        scales: Val | None,
        sizes: Val | None,
    ) -> Any:
        y = op.Conv(x, w, b, attrs=m.c, **_UNHEEDED)
        return self.resized(op, m, y, w.size(0), roi, scales, sizes)


class PushResizeBeforeConv(_SwapResize):
    """resize(conv(x, w, b)) -> conv(resize(x), w, b)  for a 1x1 kernel."""

    examples = graphs(
        "(float[2,1,4,6] x) => (float[2,2,2,3] y) <float[2,1,1,1] w = {1,2}> { r = Conv(x, w, [3.0, 4]) "
        "y = Resize(r, , [1, 1, 0.5, 0.5]) }",
        "(float[2,2,3,2] x) => (float[2,1,4,3] y) <float[1,2,1,1] w = {1,2}> { r = Conv(x, w) "
        'y = Resize<nearest_mode="ceil">(r, , , [2, 1, 4, 3]) }',
        "(float[N,2,3] x) => (float[N,1,5] y) <float[1,2,1] w = {1,2}> { r = Conv(x, w) "
        "y = Resize<axes=[2]>(r, , , [5]) }",
        "(float[N,2,3] x) => (float[N,4,6] y) <float[4,1,1] w = {1,2,3,4}> { r = Conv<group=2>(x, w) "
        "y = Resize(r, , [1.0, 1, 2]) }",
    )

    def source(self, op: Op, x: Any, w: Any, b: Any, roi: Any, scales: Any, sizes: Any) -> Any:
        return op.Resize(op.Conv(x, w, b, attrs="c"), roi, scales, sizes, attrs="r")

    def channels(self, x: Val, w: Val) -> int:
        return w.size(0)

    def target(
        self,
        op: Op,
        m: Captures,
        x: Val,
        w: Val,
        b: Val | None,
        roi: Val | None,
        scales: Val | None,
        sizes: Val | None,
    ) -> Any:
        return op.Conv(self.resized(op, m, x, x.size(1), roi, scales, sizes), w, b, attrs=m.c, **_UNHEEDED)


class FuseNearestResize(RegionRule, family="idioms"):
    """reshape(expand(reshape(x))) -> resize(x)  to nearest neighbours, when each pixel is repeated;  Tile alike."""

    may_lose_errors = ("sizes",)
    proof = "numeric"
    relies_on = "the nearest neighbour by rounding down repeats each pixel"
    dtypes = FLOAT
    anchors = ("Reshape",)
    reads_from = ("Expand", "Tile")
    examples = graphs(
        "(float[1,2,3,4] x) => (float[1,2,6,12] y) { r = Reshape(x, [1, 2, 3, 1, 4, 1]) "
        "e = Expand(r, [1, 2, 3, 2, 4, 3]) y = Reshape(e, [1, 2, 6, 12]) }",
        "(float[N,2,3,4] x) => (float[N,2,6,4] y) { r = Unsqueeze(x, [3, 5]) e = Tile(r, [1, 1, 1, 2, 1, 1]) "
        "y = Reshape(e, [-1, 2, 6, 4]) }",
    )
    near_misses = graphs(
        "(float[1,2,3,4] x, int64[K] b) => (float[1,2,6,12] y) { r = Reshape(x, [1, 2, 3, 1, 4, 1]) "
        "e = Expand(r, b) y = Reshape(e, [1, 2, 6, 12]) }"
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
        nodes = between(reader, node.outputs[0], (x,))
        return Region(node.outputs, (x,), nodes, (rows, columns))

    def target(self, op: Op, region: Region, x: Val) -> Any:
        scales = np.array([1, 1, *region.data], np.float32)
        return op.Resize(
            x, None, scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
        )
