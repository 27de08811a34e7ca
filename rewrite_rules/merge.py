"""Rules that merge products and convolutions side by side, and rules that split them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.axes import axis_of
from rewrite_rules.constants import AT_EXPORT, concat_constants, cut_order, slice_constant
from rewrite_rules.elementwise import made_by, read_once, sum_of
from rewrite_rules.examples import graphs
from rewrite_rules.fold_into_weights import NUMBERS, group_of
from rewrite_rules.shapes import either, per_rank
from xrlflow.ir import ABSENT, FLOATS, Attrs, Node, Value
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, profitable, require

# Several products of one input


class MergeMatMuls(Rule, family="merge"):
    """x@w0, x@w1, ... -> split(x @ [w0|w1|...]).  With three it is the QKV merge."""

    arity = (2, 3)
    symmetric = True
    shapes = "x[...,k] w*[k,n*]:const | x[...,a,k] w*[b,k,n*]:const"

    examples = graphs(
        "(float[2,40] x) => (float[2,20] a, float[2,40] b) { v = Range(0.0, 2400.0, 1.0) w = Reshape(v, [40, 60]) "
        "p = Slice(w, [0], [20], [1]) q = Slice(w, [20], [60], [1]) a = MatMul(x, q) b = MatMul(x, p) }",
        "(float[2,40] x) => (float[2,20] a, float[2,30] b) { v = Range(0.0, 2400.0, 1.0) w = Reshape(v, [40, 60]) "
        "p = Slice(w, [0], [20], [1]) q = Slice(w, [30], [60], [1]) a = MatMul(x, p) b = MatMul(x, q) }",
        "(float[2,40] x) => (float[2,20] a, float[2,20] b, float[2,20] c) { v = Range(0.0, 2400.0, 1.0) "
        "w = Reshape(v, [40, 60]) p = Slice(w, [0], [20], [1]) q = Slice(w, [20], [40], [1]) "
        "r = Slice(w, [40], [60], [1]) a = MatMul(x, r) b = MatMul(x, p) c = MatMul(x, q) }",
        "(float[2,20] x) => (float[2,60] a, float[2,60] b) { v = Range(0.0, 2400.0, 1.0) w = Reshape(v, [40, 60]) "
        "p = Slice(w, [0], [20], [0]) q = Slice(w, [20], [40], [0]) a = MatMul(x, p) b = MatMul(x, q) }",
        "(float[2,40] x) => (float[2,60] a, float[2,30] b) { v = Range(0.0, 2400.0, 1.0) w = Reshape(v, [40, 60]) "
        "p = Slice(w, [0], [30], [1]) a = MatMul(x, w) b = MatMul(x, p) }",
        "(float[2,40] x) => (float[2,30] a, float[2,30] b) { v = Range(0.0, 2400.0, 1.0) w = Reshape(v, [40, 60]) "
        "u = Neg(w) p = Slice(w, [0], [30], [1]) q = Slice(u, [30], [60], [1]) a = MatMul(x, p) b = MatMul(x, q) }",
    )

    def source(self, op: Op, x: Any, *w: Any) -> Any:
        return [op.MatMul(x, wi) for wi in w]

    def target(self, op: Op, x: Val, *w: Val) -> Any:
        order = cut_order(w)
        y = op.MatMul(x, concat_constants(op, [w[i] for i in order], w[0].rank - 1))
        return _split(op, y, w, -1, -1, order)


def _split(op: Op, y: Val, weights: Sequence[Val], columns: int, axis: int, order: Sequence[int]) -> Any:
    """The products with each of the weights, cut out of the product with all weights joined in this order."""
    parts = op.Split(y, axis=axis, sizes=[weights[i].size(columns) for i in order])
    return [parts[order.index(i)] for i in range(len(order))]


class MergeGemms(Rule, family="merge"):
    """gemm(x, v, b), gemm(x, w, c) -> split(gemm(x, [v|w], [b|c]))."""

    symmetric = True
    optional = ("b", "c")
    shapes = either(
        "x[i,j]",
        ("v[k,p]:const w[k,q]:const", "v[p,k]:const w[q,k]:const"),
        ("b[p]:const c[q]:const", "b[1,p]:const c[1,q]:const"),
    )
    near_misses = graphs(
        "(float[2,1] x) => (float[2,3] y, float[2,3] z) <float[1,3] v = {1, 2, 3}, float[1,3] w = {5, 6, 7}> "
        "{ y = Gemm(x, v, [4.0]) z = Gemm(x, w, [8.0]) }",
        "(float[2,1] x) => (float[2,3] y, float[2,3] z) <float[1,3] v = {1, 2, 3}, float[1,3] w = {5, 6, 7}> "
        "{ y = Gemm(x, v, [4.0, 5, 6]) z = Gemm(x, w, [8.0]) }",
        "(float[2,1] x) => (float[2,3] y, float[2,3] z) <float[1,3] v = {1, 2, 3}, float[1,3] w = {5, 6, 7}> "
        "{ y = Gemm(x, v, [4.0]) z = Gemm(x, w, [8.0, 9, 1]) }",
    )

    def source(self, op: Op, x: Any, v: Any, b: Any, w: Any, c: Any) -> Any:
        return [op.Gemm(x, v, b, attrs="f"), op.Gemm(x, w, c, attrs="g")]

    def where(self, m: Captures, v: Val, b: Val | None, c: Val | None) -> None:
        require(m.f == m.g, "their attributes differ")
        require((b is None) == (c is None), "one has a bias, the other has none")
        columns = 0 if m.f.get("transB") else 1
        # Only b is checked. The declared shapes also admit a b with as many numbers as v has rows; then v and w have
        # one shape, and c fits if b does.
        require(b is None or b.size(-1) == v.size(columns), "a bias is not one number per column")

    def target(self, op: Op, m: Captures, x: Val, v: Val, b: Val | None, w: Val, c: Val | None) -> Any:
        axis = 0 if m.f.get("transB") else 1
        order = cut_order((v, w))
        bias = None
        if b is not None:
            assert c is not None
            bias = concat_constants(op, [(b, c)[i] for i in order], b.rank - 1)
        y = op.Gemm(x, concat_constants(op, [(v, w)[i] for i in order], axis), bias, attrs=m.f)
        return _split(op, y, (v, w), axis, 1, order)


class MergeManyMatMuls(RegionRule, family="merge"):
    """x@w0, ..., x@wn -> split(x @ [w0|...|wn])  for all products of x, four or more, at once."""

    composite_of = ("MergeMatMuls", "MergeSplits")
    anchors = ("MatMul",)
    examples = graphs(
        "(float[2,3] x, float[3,2] o) => (float[2,2] a, float[2,2] b, float[2,1] c, float[2,3] d) "
        "{ w = Reshape([1.0, 2, 3], [3, 1]) v = Concat<axis=1>(w, w) t = Concat<axis=1>(v, w) a = MatMul(x, v) "
        "n = Neg(v) b = MatMul(x, n) c = MatMul(x, w) d = MatMul(x, t) }"
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        x = node.inputs[0]
        users = reader.graph.users(x)
        if len(users) < 4:  # too few readers, whatever they compute
            reader.count_users(x)
            return None
        # Only the node with the smallest id finds all of them. The search from another node records only that it
        # depends on this one.
        first = min((n.id for n in users if _multiplies(reader, n, x)), default=node.id)
        if first != node.id:
            reader.producer(first)
            return None
        if not _multiplies(reader, node, x):
            return None
        group = [n for n in reader.users(x) if _multiplies(reader, n, x)]
        profitable(len({n.inputs[1] for n in group}) == len(group), "the same product twice")
        profitable(len(group) > 3, "there are too few")
        outputs = tuple(n.outputs[0] for n in group)
        return Region(outputs, (x, *(n.inputs[1] for n in group)), tuple(group))

    def target(self, op: Op, region: Region, x: Val, *w: Val) -> Any:
        order = cut_order(w)
        y = op.MatMul(x, concat_constants(op, [w[i] for i in order], 1))
        return _split(op, y, w, 1, -1, order)


def _multiplies(reader: Reader, node: Node, x: Value) -> bool:
    """Whether a node computes x @ w for a constant matrix w."""
    if node.op != "MatMul" or node.inputs[0] != x or node.const:
        return False
    weight = reader.graph.type(node.inputs[1])
    return weight.const and weight.rank == 2 and weight.is_static


@dataclass(frozen=True, slots=True)
class _Cut:
    """A product or convolution whose result is split: its operator and attributes, and the sizes of the parts."""

    op: str
    attrs: Attrs
    sizes: tuple[int, ...]
    biased: bool


class _SplitMerged(RegionRule, family="merge"):
    """A rule for a Split along the columns, or output channels, of a product with constant weights."""

    anchors = ("Split",)
    product: tuple[str, ...] = ("MatMul",)

    def find(self, reader: Reader, node: Node) -> Region | None:
        merged = made_by(reader, node.inputs[0], *self.product)
        if merged is None or len(node.outputs) < 2 or not read_once(reader, node.inputs[0]):
            return None
        x, w, *more = merged.inputs
        biases = [b for b in more if b != ABSENT]
        if not all(reader.is_const(v) for v in (w, *biases)):
            return None
        rank = reader.val(node.inputs[0]).rank
        axis = axis_of(node, rank)
        require(axis == (1 if merged.op == "Conv" else rank - 1), "it does not cut the columns")
        sizes = tuple(reader.val(v).size(axis) for v in node.outputs)
        columns = _column_axis(merged.op, merged.attrs, reader.val(w).rank)
        require(reader.val(w).rank >= 2, "the weight is no matrix")
        require(merged.op != "Conv" or group_of(merged.attrs) == 1, "the convolution is grouped")
        require(reader.val(w).size(columns) == sum(sizes), "the parts are not the weight's columns")
        if biases:
            bias = reader.val(biases[0])
            require(bias.rank >= 1 and bias.size(-1) == sum(sizes), "the bias is not one number per column")
        data = _Cut(merged.op, merged.attrs, sizes, bool(biases))
        return Region(node.outputs, (x, w, *biases), (merged, node), data)

    def target(self, op: Op, region: Region, x: Val, w: Val, b: Val | None = None) -> Any:
        cut: _Cut = region.data
        axis = _column_axis(cut.op, cut.attrs, w.rank)
        results = []
        for start, stop in pairwise([0, *accumulate(cut.sizes)]):
            weight = slice_constant(op, w, axis, start, stop)
            bias = None if b is None else slice_constant(op, b, b.rank - 1, start, stop)
            results.append(op[cut.op](x, weight, bias, attrs=cut.attrs))
        return results


def _column_axis(op: str, attrs: Attrs, rank: int) -> int:
    """The axis of the output columns or channels in the weights of a product or convolution."""
    if op == "Conv":
        return 0
    if op == "Gemm":
        return 0 if attrs.get("transB") else 1
    return rank - 1


class SplitMergedMatMul(_SplitMerged):
    """split(x @ w) -> x @ w[:, a:b], ...  for constant w;  Gemm alike."""

    product = ("MatMul", "Gemm")
    reads_from = product
    examples = graphs(
        "(float[2,1,3] x) => (float[2,1,2] a, float[2,1,1] b) <float[9] u = {1, 2, 3, 4, 5, 6, 7, 8, 9}> "
        "{ w = Reshape(u, [3, 3]) y = MatMul(x, w) a, b = Split<axis=2>(y, [2, 1]) }"
    )


# Several convolutions of one input


class _TwoConvs(Rule, family="merge"):
    """A rule for two convolutions with equal attributes."""

    optional = ("b", "c")

    def where(self, m: Captures) -> None:
        require(m.f == m.g, "their attributes differ")


class MergeParallelConvs(_TwoConvs):
    """conv(x, v, b), conv(x, w, c) -> split(conv(x, [v; w], [b; c]))  with equal kernels and attributes."""

    symmetric = True
    shapes = per_rank("x[i,j{h}] v[p,j{k}]:const b[p]:const w[q,j{k}]:const c[q]:const")

    def source(self, op: Op, x: Any, v: Any, b: Any, w: Any, c: Any) -> Any:
        return [op.Conv(x, v, b, attrs="f"), op.Conv(x, w, c, attrs="g")]

    def target(self, op: Op, m: Captures, x: Val, v: Val, b: Val | None, w: Val, c: Val | None) -> Any:
        order = cut_order((v, w))
        bias = None
        if b is not None or c is not None:
            one = b if b is not None else _zeros(op, v)
            two = c if c is not None else _zeros(op, w)
            bias = concat_constants(op, [(one, two)[i] for i in order], 0)
        y = op.Conv(x, concat_constants(op, [(v, w)[i] for i in order], 0), bias, attrs=m.f)
        return _split(op, y, (v, w), 0, 1, order)


def _zeros(op: Op, w: Val) -> Any:
    """A bias of zeros for a convolution's weights."""
    return op.Expand(np.zeros(1, w.storage), [w.size(0)])


class SplitMergedConv(_SplitMerged):
    """split(conv(x, w, b)) -> conv(x, w[a:b], b[a:b]), ...  along the channels."""

    product = ("Conv",)
    reads_from = product
    examples = (
        "agraph (float[1,1,3,3] x) => (float[1,2,3,3] a, float[1,1,3,3] b) {"
        " u = Constant<value_floats=[1.0,2.0,3.0]>() s = Constant<value_ints=[3,1,1,1]>() w = Reshape(u, s)"
        " z = Constant<value_ints=[2,1]>() y = Conv(x, w, u) a, b = Split<axis=1>(y, z) }",
    )


class EnlargeConv(RegionRule, family="merge"):
    """conv(x, w) -> conv(x, pad(w))  to the kernel of another convolution of x, so that the two can be merged.

    The new taps are zero and multiply elements that the old kernel did not read. So if x is infinite or NaN somewhere,
    more of the result is NaN.
    """

    may_add_nonfinite = True
    anchors = ("Conv",)
    examples = graphs(
        "(float[1,1,4,4] x) => (float[1,1,4,4] a, float[1,1,4,4] b) <float[9] u = {1, 2, 3, 4, 5, 6, 7, 8, 9}> "
        "{ w = Reshape(u, [1, 1, 3, 3]) v = Reshape([2.0], [1, 1, 1, 1]) a = Conv<pads=[1,1,1,1]>(x, w) "
        "b = Conv(x, v) }"
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        x, w, *more = node.inputs
        if not _plain(reader, node):
            return None
        kernel = _kernel(reader, node)
        best: tuple[int, ...] | None = None
        for sibling in reader.users(x):
            if (
                sibling is node
                or sibling.op != "Conv"
                or sibling.inputs[0] != x
                or not _plain(reader, sibling)
            ):
                continue
            larger = _kernel(reader, sibling)
            rim = [b - a for a, b in zip(kernel, larger)]
            if len(larger) != len(kernel) or not any(rim) or any(r < 0 or r % 2 for r in rim):
                continue
            widened = tuple(p + r // 2 for p, r in zip(_pads(node, len(kernel)), rim * 2))
            if widened != _pads(sibling, len(kernel)) or node.attrs.get("strides") != sibling.attrs.get(
                "strides"
            ):
                continue
            best = larger if best is None else min(best, larger)
        if best is None:
            return None
        biases = [b for b in more if b != ABSENT]
        return Region(node.outputs, (x, w, *biases), (node,), (node.attrs, kernel, best))

    def target(self, op: Op, region: Region, x: Val, w: Val, b: Val | None = None) -> Any:
        attrs, kernel, larger = region.data
        rim = [(b - a) // 2 for a, b in zip(kernel, larger)]
        pads = attrs.get("pads", (0,) * (2 * len(rim)))
        return op.Conv(
            x,
            op.Pad(w, [0, 0, *rim] * 2),
            b,
            attrs=attrs,
            pads=[p + r for p, r in zip(pads, rim * 2)],
            kernel_shape=None,
        )


def _plain(reader: Reader, node: Node) -> bool:
    """Whether a convolution has constant weights of known shape, explicit pads, one group, and no dilation."""
    weight = reader.type(node.inputs[1])
    return weight.const and weight.is_static and node.attrs.keys() <= {"pads", "strides"}


def _kernel(reader: Reader, node: Node) -> tuple[int, ...]:
    return reader.val(node.inputs[1]).sizes[2:]


def _pads(node: Node, dims: int) -> tuple[int, ...]:
    pads = node.attrs.get("pads", (0,) * (2 * dims))
    assert isinstance(pads, tuple)
    return tuple(int(p) for p in pads)


# Groups


class MergeGroupConv(Rule, family="merge"):
    """conv(x, w; groups g) -> conv(x, blockdiagonal(w); groups g/2).

    The zeros between the blocks multiply channels that a group did not read before. So if x is infinite or NaN
    somewhere, more of the result is NaN.
    """

    may_add_nonfinite = True
    optional = ("b",)
    shapes = per_rank("x[i,c{h}] w[m,p{k}]:const b[m]")

    def factor(self, m: Captures, w: Val) -> int:
        """How many groups become one. Refuses a convolution whose groups cannot be merged."""
        require(group_of(m.c) % 2 == 0, "the number of groups is odd")
        return 2

    def source(self, op: Op, x: Any, w: Any, b: Any) -> Any:
        return op.Conv(x, w, b, attrs="c")

    def where(self, m: Captures, w: Val) -> None:
        self.factor(m, w)

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None) -> Any:
        n = self.factor(m, w)
        require(all(w.sizes), "a dimension is 0")
        groups = group_of(m.c)
        outputs, inputs, *kernel = w.sizes
        ones = [1] * len(kernel)
        # Shape [merged group, old group, output, old group, input, kernel]: zero where the two old groups differ.
        parts = op.Reshape(w, [groups // n, n, outputs // groups, 1, inputs, *kernel])
        diagonal = np.eye(n, dtype=w.storage).reshape(1, n, 1, n, 1, *ones)
        blocks = op.Reshape(op.Mul(parts, diagonal), [outputs, n * inputs, *kernel])
        return op.Conv(x, blocks, b, attrs=m.c, group=groups // n)


# Up to this many input channels per group, zeros between blocks do not make ONNX Runtime's convolution slower.
_BLOCK = 16


class MergeGroupConvToBlocks(MergeGroupConv):
    """conv(x, w; groups g) -> conv(x, blockdiagonal(w); groups g/n)  with the most channels a group up to 16.

    In one step it does what repeated merging of two groups does. Depthwise convolutions are left out, because the
    runtime has kernels of their own for them.
    """

    composite_of = ("MergeGroupConv",)
    unpriced = True
    examples = (
        "agraph (float[N,8,3,3] x) => (y) <float[4,2,1,1] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = Conv<group=4>(x, w) }",
        "agraph (float[N,12,4] x, float[6] b) => (y) "
        "<float[6,2,2] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, -2, 3, -4, 5, -6, 7, -8, 9, 1, 2, 3, 4, 5, 6}> "
        "{ y = Conv<group=6, strides=[2]>(x, w, b) }",
        "agraph (float[1,24,2] x) => (y) <float[6,4,1] w = "
        "{1,2,3,4,5,1,2,3,4,5,1,2,3,4,5,1,2,3,4,5,1,2,3,4}> { y = Conv<group=6>(x, w) }",
    )
    near_misses = ("agraph (float[1,4,2] x) => (y) <float[2,2,1] w = {1,2,3,4}> { y = Conv<group=2>(x, w) }",)

    def factor(self, m: Captures, w: Val) -> int:
        groups, channels = group_of(m.c), w.size(1)
        profitable(channels > 1, "it is depthwise")
        fits = (d for d in range(groups, 2, -1) if groups % d == 0 and d * channels <= _BLOCK)
        n = next(fits, 0)
        profitable(n, "a group has too many channels")
        return n


# Order of products


class AssociateMatMulsRight(Rule, family="merge"):
    """(x @ y) @ z -> x @ (y @ z)."""

    nonempty = True
    may_add_nonfinite = True
    dtypes = NUMBERS
    shapes = "x[...,a,b] y[...,b,c] z[...,c,d]"

    # Two graphs: at the limit for products of constants, and beyond it.
    examples = graphs(
        "(float[3,2] x) => (float[3,2048] y) { u = Expand(1.0, [2, 1048576]) v = Expand(1.0, [1048576, 2048]) "
        "p = MatMul(x, u) y = MatMul(p, v) }",
        "(float[3,2] x, float[1048576,4096] z) => (float[3,4096] y) { u = Expand(1.0, [2, 1048576]) "
        "p = MatMul(x, u) y = MatMul(p, z) }",
    )
    near_misses = graphs(
        "(float[3,2] x) => (float[3,4096] y) { u = Expand(1.0, [2, 1048576]) v = Expand(1.0, [1048576, 4096]) "
        "p = MatMul(x, u) y = MatMul(p, v) }",
        "(float[3,4096] x) => (float[3,1048576] y) { u = Expand(1.0, [4096, 2]) v = Expand(1.0, [2, 1048576]) "
        "p = MatMul(x, u) y = MatMul(p, v) }",
    )

    def source(self, op: Op, x: Any, y: Any, z: Any) -> Any:
        return op.MatMul(op.MatMul(x, y), z)

    def where(self, y: Val, z: Val) -> None:
        # A sum over no elements is 0, even if other factors are infinite or NaN.
        require(0 not in (y.shape[-2], y.shape[-1]), "an inner dimension is 0")
        if y.const and z.const:
            work = y.size(-2) * y.size(-1) * z.size(-1)
            profitable(work <= AT_EXPORT, "multiplying the constants out would take long")

    def target(self, op: Op, x: Val, y: Val, z: Val) -> Any:
        return op.MatMul(x, op.MatMul(y, z))


class AssociateMatMulsLeft(Rule, family="merge"):
    """x @ (y @ z) -> (x @ y) @ z."""

    nonempty = True
    may_add_nonfinite = True
    dtypes = NUMBERS
    shapes = "x[...,a,b] y[...,b,c] z[...,c,d]"

    def source(self, op: Op, x: Any, y: Any, z: Any) -> Any:
        return op.MatMul(x, op.MatMul(y, z))

    def where(self, y: Val) -> None:
        require(0 not in (y.shape[-2], y.shape[-1]), "an inner dimension is 0")

    def target(self, op: Op, x: Val, y: Val, z: Val) -> Any:
        return op.MatMul(op.MatMul(x, y), z)


# Sums of products


class MergeSumOfMatMuls(Rule, family="merge"):
    """x @ v + y @ w -> [x|y] @ [v; w]."""

    dtypes = NUMBERS
    shapes = either(
        ("x[a,k] y[a,l]", "x[a,b,k] y[a,b,l]", "x[a,b,c,k] y[a,b,c,l]"), "v[k,n]:const w[l,n]:const"
    )

    def source(self, op: Op, x: Any, v: Any, y: Any, w: Any) -> Any:
        return op.Add(op.MatMul(x, v), op.MatMul(y, w))

    def target(self, op: Op, x: Val, v: Val, y: Val, w: Val) -> Any:
        return op.MatMul(op.Concat(x, y, axis=-1), concat_constants(op, (v, w), 0))


class MergeSumOfGemms(Rule, family="merge"):
    """gemm(x, v, b) + gemm(y, w, c) -> gemm([x|y], [v; w], b + c)."""

    dtypes = FLOATS
    optional = ("b", "c")
    shapes = either(
        "x[a,k] y[a,l]",
        ("v[k,n]:const w[l,n]:const", "v[n,k]:const w[n,l]:const"),
        ("b[n]:const c[n]:const", "b[1,n]:const c[n]:const", "b[n]:const c[1,n]:const"),
    )

    def source(self, op: Op, x: Any, v: Any, b: Any, y: Any, w: Any, c: Any) -> Any:
        return op.Add(op.Gemm(x, v, b, transB="t"), op.Gemm(y, w, c, transB="t"))

    def target(
        self, op: Op, m: Captures, x: Val, v: Val, b: Val | None, y: Val, w: Val, c: Val | None
    ) -> Any:
        weight = concat_constants(op, (v, w), 1 if m.t else 0)
        return op.Gemm(op.Concat(x, y, axis=1), weight, sum_of(op, b, c), transB=m.t)


class MergeSumOfConvs(_TwoConvs):
    """conv(x, v, b) + conv(y, w, c) -> conv([x|y], [v|w], b + c)  along the channels, attributes being equal."""

    shapes = per_rank("x[i,p{h}] v[m,p{k}]:const b[m]:const y[i,q{h}] w[m,q{k}]:const c[m]:const")

    def source(self, op: Op, x: Any, v: Any, b: Any, y: Any, w: Any, c: Any) -> Any:
        return op.Add(op.Conv(x, v, b, attrs="f"), op.Conv(y, w, c, attrs="g"))

    def target(
        self, op: Op, m: Captures, x: Val, v: Val, b: Val | None, y: Val, w: Val, c: Val | None
    ) -> Any:
        weight = concat_constants(op, (v, w), 1)
        return op.Conv(op.Concat(x, y, axis=1), weight, sum_of(op, b, c), attrs=m.f)


class FoldSumOfMatMuls(Rule, family="merge"):
    """x @ v + x @ w -> x @ (v + w)."""

    nonempty = True
    may_add_nonfinite = True
    dtypes = NUMBERS
    shapes = "x[...,k] v[...,k,n] w[...,k,o]"

    def source(self, op: Op, x: Any, v: Any, w: Any) -> Any:
        return op.Add(op.MatMul(x, v), op.MatMul(x, w))

    def target(self, op: Op, x: Val, v: Val, w: Val) -> Any:
        return op.MatMul(x, op.Add(v, w))


class FoldSumOfConvs(_TwoConvs):
    """conv(x, v, b) + conv(x, w, c) -> conv(x, v + w, b + c)  with equal kernels and attributes."""

    may_add_nonfinite = True
    shapes = per_rank("x[i,j{h}] v[m,p{k}]:const b[m]:const w[m,p{k}]:const c[m]:const")

    def source(self, op: Op, x: Any, v: Any, b: Any, w: Any, c: Any) -> Any:
        return op.Add(op.Conv(x, v, b, attrs="f"), op.Conv(x, w, c, attrs="g"))

    def target(self, op: Op, m: Captures, x: Val, v: Val, b: Val | None, w: Val, c: Val | None) -> Any:
        return op.Conv(x, op.Add(v, w), sum_of(op, b, c), attrs=m.f)


@dataclass(frozen=True, slots=True)
class _Over:
    """Products or convolutions of one Concat: the sizes of its parts, and for each product the operator, the
    attributes, and whether it has a bias.
    """

    sizes: tuple[int, ...]
    products: tuple[tuple[str, Attrs, bool], ...]


class _SplitOverConcat(RegionRule, family="merge"):
    """A rule that replaces the product of a Concat by the sum of the products of its parts."""

    product: tuple[str, ...] = ("Conv",)

    def region(self, reader: Reader, concat: Node, products: Sequence[Node]) -> Region | None:
        rank = concat.types[0].rank
        if rank is None or len(concat.inputs) < 2:
            return None
        axis = axis_of(concat, rank)
        if axis != (1 if "Conv" in self.product else rank - 1):
            return None
        sizes = tuple(reader.val(v).size(axis) for v in concat.inputs)
        profitable(all(sizes), "a part is empty")
        inputs = list(concat.inputs)
        attributes = []
        for node in products:
            require(node.op in self.product and not node.attrs.get("transA"), "another operator reads it")
            x, w, *more = node.inputs
            require(x == concat.outputs[0] and w != x and x not in more, "the Concat is a weight or a bias")
            profitable(reader.is_const(w), "the weights are not constant")
            require(node.op != "Conv" or group_of(node.attrs) == 1, "a convolution is grouped")
            weight = reader.val(w)
            require(weight.rank >= 2, "the weight is no matrix")
            biases = [b for b in more if b != ABSENT]
            inputs += [w, *biases]
            attributes.append((node.op, node.attrs, bool(biases)))
        outputs = tuple(n.outputs[0] for n in products)
        return Region(outputs, tuple(inputs), (concat, *products), _Over(sizes, tuple(attributes)))

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        over: _Over = region.data
        parts, more = inputs[: len(over.sizes)], list(inputs[len(over.sizes) :])
        cuts = list(pairwise([0, *accumulate(over.sizes)]))
        results = []
        for name, attrs, biased in over.products:
            w = more.pop(0)
            bias: Val | None = more.pop(0) if biased else None
            axis = _row_axis(name, attrs, w.rank)
            total: Any = None
            for part, (start, stop) in zip(parts, cuts):
                weight = slice_constant(op, w, axis, start, stop)
                total = sum_of(op, total, op[name](part, weight, bias, attrs=attrs))
                bias = None
            results.append(total)
        return results


def _row_axis(op: str, attrs: Attrs, rank: int) -> int:
    """The axis of the input columns or channels in the weights of a product or convolution."""
    if op == "Conv":
        return 1
    if op == "Gemm":
        return 1 if attrs.get("transB") else 0
    return rank - 2


class SplitConvsOverConcat(_SplitOverConcat):
    """conv([x|y|...], w, b) -> conv(x, w_x, b) + conv(y, w_y) + ...  for all readers of the Concat at once."""

    may_lose_errors = ("sizes",)
    unpriced = True
    anchors = ("Concat",)
    examples: ClassVar[tuple[str, ...]] = (
        "agraph (float[1,1,3,3] x, float[1,2,3,3] y) => (float[1,1,3,3] a, float[1,1,3,3] b) {"
        " u = Constant<value_floats=[1.0,2.0,3.0]>() s = Constant<value_ints=[1,3,1,1]>() w = Reshape(u, s)"
        " z = Neg(w) c = Concat<axis=1>(x, y) a = Conv(c, w) b = Conv(c, z) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        users = reader.users(node.outputs[0])
        if reader.is_output(node.outputs[0]) or not any(u.op in self.product for u in users):
            return None
        return self.region(reader, node, users)


class SplitConvOverConcat(_SplitOverConcat):
    """conv([x|y|...], w, b) -> conv(x, w_x, b) + conv(y, w_y) + ...  for one reader among several."""

    may_lose_errors = ("sizes",)
    anchors = ("Conv",)
    reads_from = ("Concat",)
    examples = (
        "agraph (float[1,1,3,3] x, float[1,2,3,3] y) => (float[1,1,3,3] a, float[1,3,3,3] c) {"
        " u = Constant<value_floats=[1.0,2.0,3.0]>() s = Constant<value_ints=[1,3,1,1]>() w = Reshape(u, s)"
        " c = Concat<axis=1>(x, y) a = Conv(c, w) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        concat = reader.producer(node.inputs[0])
        if concat is None or concat.op != "Concat" or concat.const or read_once(reader, node.inputs[0]):
            return None
        region = self.region(reader, concat, [node])
        return None if region is None else Region(region.outputs, region.inputs, (node,), region.data)


class SplitMatMulsOverConcat(SplitConvsOverConcat):
    """[x|y|...] @ w -> x @ w_x + y @ w_y + ...  for all readers of the Concat at once, MatMul or Gemm."""

    product = ("MatMul", "Gemm")
    examples = graphs(
        "(float[2,1] x, float[2,2] y) => (float[2,1] a) { w = Reshape([1.0, 2, 3], [3, 1]) c = Concat<axis=1>(x, y) "
        "a = MatMul(c, w) }"
    )
