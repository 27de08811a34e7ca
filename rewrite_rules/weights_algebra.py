"""Rules that multiply weights when the model is written: tables, two linear layers in a row, constant factors.

If a product of weights replaces a product at run time, rounding changes as it does with any other order of operations.
Moving a factor may make intermediate numbers larger or smaller by that factor. Only finite constants are moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.axes import axis_of, rank_of
from rewrite_rules.elementwise import FLOAT, UNARY, WIDE, given, keeps_shape, made_by, read_once, sum_of
from rewrite_rules.examples import graphs
from rewrite_rules.fold_into_weights import flat
from rewrite_rules.shapes import either
from xrlflow.ir import ABSENT, Attrs, Dim, DType, Node, Value
from xrlflow.rewrite import Captures, Op, Reader, Region, RegionRule, Rule, Val, profitable, require

# Limits for constants that are computed when the model is written: multiplications, and bytes of the result.
_WORK = 1 << 32

_BYTES = 1 << 26


def _factor(reader: Reader, value: Value, partner: Value) -> bool:
    """Whether a value is a constant of one element that does not change the shape of the other operand, `partner`."""
    type = reader.type(value)
    single = type.const and type.shape is not None and all(d == 1 for d in type.shape)
    return single and keeps_shape(reader.type(partner).shape, type.shape)


def _require_number(s: Val, x: Val) -> None:
    """Refuse a scale with several elements, and a scale of higher rank than x."""
    single = s.type.shape is not None and all(d == 1 for d in s.type.shape)
    require(single and keeps_shape(x.type.shape, s.type.shape), "the scale is not one number")


# Tables


class PushGatherThroughMatMul(Rule, family="weights_algebra"):
    """table[i] @ w -> (table @ w)[i]  for a constant table and matrix, when the product is not too large."""

    dtypes = WIDE
    shapes = "t[v,d]:const i[...]:int w[d,n]:const"

    def source(self, op: Op, t: Any, i: Any, w: Any) -> Any:
        return op.MatMul(op.Gather(t, i), w)

    def where(self, t: Val, w: Val) -> None:
        rows, columns = t.size(0), w.size(1)
        profitable(rows * columns * t.dtype.bits // 8 <= _BYTES, "the table would be large")
        profitable(rows * columns * t.size(1) <= _WORK, "multiplying the table out would take long")

    def target(self, op: Op, t: Val, i: Val, w: Val) -> Any:
        return op.Gather(op.MatMul(t, w), i)


# Cast is left out: the small result of a look-up can be cast instead of the table.
_FUNCTIONS = tuple(op for op in UNARY if op != "Cast")

_ALONG_ROWS = ("Softmax", "LayerNormalization", "RMSNormalization")


class PushGatherThroughFunction(RegionRule, family="weights_algebra"):
    """f(table[i], c) -> f(table, c)[i]  for f element by element, or along rows, and c constant.

    c is one number, or has one number for each column. Softmax and the normalisations over the last axis count as
    functions along rows.
    """

    anchors = (*_FUNCTIONS, "Add", "Mul", "Sub", "Div", *_ALONG_ROWS)
    reads_from = ("Gather",)
    dtypes = WIDE
    examples = graphs(
        "(int64[N,5] i) => (float[N,5,2] y) <float[3,2] t = {1,2,3,4,5,6}> { g = Gather(t, i) y = Tanh(g) }",
        "(int64[N,5] i) => (float[N,5,2] y) <float[3,2] t = {1,2,3,4,5,6}> { g = Gather(t, i) y = Add([7.0, 8], g) }",
        "(int32[5] i) => (float[5,2] y) <float[3,2] t = {1,2,3,4,5,6}, float[1,2] c = {7,8}> { g = Gather(t, i) "
        "y = Div(g, c) }",
        "(int64[N,5] i) => (float[N,5,2] y) <float[3,2] t = {1,2,3,4,5,6}> { g = Gather(t, i) "
        "y = LayerNormalization<epsilon=0.125>(g, [7.0, 8], [2.0, 1]) }",
        "(int64[N,5] i) => (float[N,5,2] y) <float[3,2] t = {1,2,3,4,5,6}> { g = Gather(t, i) y = Mul(g, 0.5) }",
        "(int64[N] i) => (float[N,2] y) <float[3,2] t = {1,2,3,4,5,6}> { g = Gather(t, i) y = Softmax(g) }",
        "(int64[5] i) => (float[5,2] y) { p = Constant<value_ints=[8388608,2]>() o = Constant<value_float=0.5>() "
        "t = Expand(o, p) g = Gather(t, i) y = Tanh(g) }",
    )
    near_misses = (
        "agraph (float[N,2] x, int64 i) => (float[N,2] y) <float[3,2] t = {1,2,3,4,5,6}> "
        "{ g = Gather(t, i) y = LayerNormalization(x, g) }",
        "agraph (int64[5] i) => (float[5,2] y, float[5,1] u) <float[3,2] t = {1,2,3,4,5,6}, float[2] s = "
        "{7,8}, float[2] b = {2,1}> { g = Gather(t, i) y, u = LayerNormalization(g, s, b) }",
        "agraph (int64[5] i) => (float[5,2] y) { p = Constant<value_ints=[8388609,2]>() o = "
        "Constant<value_float=0.5>() t = Expand(o, p) g = Gather(t, i) y = Tanh(g) }",
        "agraph (int64[5] i) => (float[3,5,2] y) <float[3,2] t = {1,2,3,4,5,6}, float[1,1,2] c = {7,8}> { "
        "g = Gather(t, i) y = Add(g, c) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if len(node.outputs) > 1:
            return None
        for position, value in enumerate(node.inputs):
            gather = None if value == ABSENT else made_by(reader, value, "Gather")
            if gather is None or not reader.is_const(gather.inputs[0]):
                continue
            table = reader.val(gather.inputs[0])
            rank = rank_of(reader, value)
            profitable(table.rank == 2, "it is no table of rows")
            require(axis_of(gather, 2) == 0, "it takes columns")
            constants = [v for k, v in enumerate(node.inputs) if k != position]
            if node.op in _ALONG_ROWS:
                require(axis_of(node, rank, -1) == rank - 1, "the axis is not the last")
                require(position == 0, "it is a parameter")
            for v in given(tuple(constants)):
                constant = reader.is_const(v) and self._fits(reader.type(v).shape, table.shape[1], rank)
                require(constant, "an operand is not constant, or not one number per column")
            profitable(read_once(reader, value), "the rows are read elsewhere")
            profitable(prod(table.sizes) * table.dtype.bits // 8 <= _BYTES, "the table is large")
            attrs = Attrs({k: v for k, v in node.attrs.items() if k != "axis"})
            data = (node.op, attrs, position, gather.attrs)
            return Region(node.outputs, (*gather.inputs, *constants), (node, gather), data)
        return None

    @staticmethod
    def _fits(shape: tuple[Dim, ...] | None, columns: Dim, rank: int) -> bool:
        """Whether an operand is one number, or has one for each column, and adds no dimension."""
        if shape is None or len(shape) > rank:
            return False
        return not shape or (shape[-1] in (1, columns) and all(d == 1 for d in shape[:-1]))

    def target(self, op: Op, region: Region, table: Val, index: Val, *constants: Val | None) -> Any:
        name, attrs, position, gather = region.data
        operands = [v if v is None or not v.rank else flat(op, v) for v in constants]
        operands.insert(position, table)
        return op.Gather(op[name](*operands, attrs=attrs), index, attrs=gather)


class ReplaceOneHotByGather(Rule, family="weights_algebra"):
    """cast(i = [0, 1, ..., n-1]) @ w -> [w; 0][i]  for integers i and a constant matrix w of n rows.

    An index i that is out of range gives zeros on the left side. The target maps it to a row of zeros after the last
    row.
    """

    dtypes = WIDE
    shapes = "i[...] r[...]:const w[...]:const"
    survivors: ClassVar[Mapping[str, str]] = {
        "number 1 0 of Less (call 4)": "the first index out of range is that of the zeros anyway"
    }
    examples = (
        "agraph (int64[N,5,1] i) => (float[N,5,2] y) <int64[3] r = {0,1,2}, float[3,2] w = {1,2,3,4,5,6}> "
        "{ e = Equal(i, r) h = Cast<to=1>(e) y = MatMul(h, w) }",
        "agraph (int32[4,1] i) => (float[4,2] y) <int32[1,4] r = {0,1,2,3}, float[4,2] w = {1,2,3,4,5,6,7,8}> "
        "{ e = Equal(r, i) h = Cast<to=1>(e) y = MatMul(h, w) }",
    )
    near_misses = graphs(
        "(int64[N,1] i) => (float[N] y) { e = Equal(i, [0, 1, 2]) h = Cast<to=1>(e) y = MatMul(h, [1.0, 2, 3]) }",
        "(float[N,1] i) => (float[N,2] y) <float[3,2] w = {1,2,3,4,5,6}> { e = Equal(i, [0.0, 1, 2]) "
        "h = Cast<to=1>(e) y = MatMul(h, w) }",
        "(int64[2,1] i) => (float[2,2] y) <int64[2,3] r = {0,1,2,0,1,2}, float[3,2] w = {1,2,3,4,5,6}> "
        "{ e = Equal(i, r) h = Cast<to=1>(e) y = MatMul(h, w) }",
    )

    def source(self, op: Op, i: Any, r: Any, w: Any) -> Any:
        equal = op.Equal(i, r)
        return op.MatMul(op.either(*(op.Cast(equal, to=int(t)) for t in sorted(WIDE))), w)

    def where(self, i: Val, r: Val, w: Val) -> None:
        require(w.rank == 2, "the weight is no matrix")
        require(i.dtype in (DType.INT32, DType.INT64), "the index is no integer")
        require(i.rank >= 2 and i.shape[-1] == 1 and r.rank <= i.rank, "the index is not one number")
        # If the last dimension had not as many elements as w has rows, the product would be invalid.
        require(r.ints == tuple(range(w.size(0))), "the numbers are not those of the rows, from 0")

    def target(self, op: Op, i: Val, w: Val) -> Any:
        rows, columns = w.sizes
        zeros = op.Expand(np.zeros((1, 1), w.storage), [1, columns])
        table = op.Concat(w, zeros, axis=0)
        index = op.Squeeze(i, [-1])
        in_range = op.And(op.GreaterOrEqual(index, 0), op.Less(index, rows))
        return op.Gather(table, op.Where(in_range, index, op.Cast(np.array(rows), to=int(i.dtype))))


# Two linear layers, one after the other


class FoldGemmIntoGemm(Rule, family="weights_algebra"):
    """gemm(gemm(x, v, b), w, c) -> gemm(x, v w, b w + c)  for constant weights."""

    may_add_nonfinite = True
    dtypes = WIDE
    optional = ("b", "c")
    shapes = either(
        "x[a,k]",
        ("v[k,m]:const", "v[m,k]:const"),
        ("b[m]:const", "b[1,m]:const"),
        ("w[m,n]:const", "w[n,m]:const"),
        ("c[n]:const", "c[1,n]:const"),
    )

    def source(self, op: Op, x: Any, v: Any, b: Any, w: Any, c: Any) -> Any:
        return op.Gemm(op.Gemm(x, v, b, transB="t"), w, c, transB="u")

    def where(self, v: Val, w: Val) -> None:
        require(prod(v.sizes) > 0, "a sum is one of nothing")
        profitable(prod(v.sizes) * max(w.sizes) <= _WORK, "it would take long")

    def target(self, op: Op, m: Captures, x: Val, v: Val, b: Val | None, w: Val, c: Val | None) -> Any:
        first = op.Transpose(v) if m.t else v
        second = op.Transpose(w) if m.u else w
        offset = None if b is None else op.MatMul(b, second)
        return op.Gemm(x, op.MatMul(first, second), sum_of(op, offset, c))


# Constant factors moved towards constant weights


class MoveScaleIntoMatMul(Rule, family="weights_algebra"):
    """(x @ y) * s -> (x * s) @ y  with s a constant number, and neither x nor y constant.

    It moves the scale of attention scores to the queries. Other rules then fold it into the weights that compute the
    queries.
    """

    dtypes = WIDE
    shapes = "x[...,m,k] y[...,k,n] s[...]:const"
    examples = graphs(
        "(float[N,3,4] x, float[N,4,5] z) => (float[N,3,5] y) { p = MatMul(x, z) y = Mul(p, 0.5) }",
        "(float[3,4] x, float[N,4,5] z) => (float[N,3,5] y) { p = MatMul(x, z) y = Mul([3.0], p) }",
    )
    near_misses = graphs(
        "(float[4] x, float[3,4,5] z) => (float[3,5] y) <float[1,1] s = {0.5}> { p = MatMul(x, z) y = Mul(p, s) }",
        "(float[3,4] x, float[4,5] z, float s) => (float[3,5] y) { p = MatMul(x, z) y = Mul(p, s) }",
    )

    def source(self, op: Op, x: Any, y: Any, s: Any) -> Any:
        return op.Mul(op.MatMul(x, y), s)

    def where(self, x: Val, y: Val, s: Val) -> None:
        _require_number(s, x)
        profitable(not x.const and not y.const, "a factor is constant")

    def target(self, op: Op, x: Val, y: Val, s: Val) -> Any:
        return op.MatMul(op.Mul(x, s), y)


class MoveScaleOutOfMatMul(Rule, family="weights_algebra"):
    """(x * s) @ y -> (x @ y) * s  with s a constant number, and neither x nor y constant;  x @ (y * s) alike."""

    dtypes = WIDE
    shapes = "x[...,m,k] y[...,k,n] s[...]:const"
    examples = graphs(
        "(float[N,3,4] x, float[N,4,5] z) => (float[N,3,5] y) { p = Mul(x, 0.5) y = MatMul(p, z) }",
        "(float[N,3,4] x, float[4,5] z) => (float[N,3,5] y) { p = Mul([3.0], z) y = MatMul(x, p) }",
    )

    def source(self, op: Op, x: Any, y: Any, s: Any) -> Any:
        return op.either(op.MatMul(op.Mul(x, s), y), op.MatMul(x, op.Mul(y, s)), name="right")

    def where(self, m: Captures, x: Val, y: Val, s: Val) -> None:
        _require_number(s, y if m.right else x)
        profitable(not x.const and not y.const, "a factor is constant")

    def target(self, op: Op, x: Val, y: Val, s: Val) -> Any:
        return op.Mul(op.MatMul(x, y), s)


class FoldScaleOfPartIntoMatMul(RegionRule, family="weights_algebra"):
    """split(x @ w + b)[i] * s -> split(x @ (w * f) + b * f)[i]  with f = [1, ..., s, ..., 1]  and constant s, w, b.

    It folds the scale of the queries if one product computes queries, keys and values. The product may be a Gemm.
    """

    anchors = ("Mul",)
    reads_from = ("Split",)
    dtypes = FLOAT
    examples = graphs(
        "(float[N,3,2] x) => (float[N,3,2] y, float[N,3,1] b) <float[2,3] w = {1,2,3,4,5,6}> { p = MatMul(x, w) "
        "a, b = Split<axis=-1>(p, [2, 1]) y = Mul(a, 0.5) }",
        "(float[5,2] x) => (float[5,1] a, float[5,2] y) <float[2,3] w = {1,2,3,4,5,6}> { p = MatMul(x, w) "
        "q = Add(p, [1.0, 2, 3]) a, b = Split<axis=1>(q, [1, 2]) y = Mul([0.5], b) }",
        "(float[5,2] x) => (float[5,1] a, float[5,2] y) <float[3,2] w = {1,2,3,4,5,6}> "
        "{ q = Gemm<transB=1, beta=0.5>(x, w, [1.0, 2, 3]) a, b = Split<axis=1>(q, [1, 2]) y = Mul(b, 3.0) }",
    )
    near_misses = graphs(
        "(float[2,3,2] x) => (float[2,2] y, float[2,1] b) { p = MatMul(x, [1.0, 2]) a, b "
        "= Split<axis=-1>(p, [2, 1]) y = Mul(a, 0.5) }",
        "(float[5,2] x, float[3] c) => (float[5,1] a, float[5,2] y) <float[3,2] w = {1,2,3,4,5,6}> "
        "{ q = Gemm<transB=1>(x, w, c) a, b = Split<axis=1>(q, [1, 2]) y = Mul(b, 3.0) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        for value, s in (node.inputs, node.inputs[::-1]):
            split = made_by(reader, value, "Split")
            if split is None or not _factor(reader, s, value):
                continue
            rank = rank_of(reader, value)
            require(axis_of(split, rank) == rank - 1, "it does not cut the columns")
            nodes, biases = [node, split], []
            split_value = split.inputs[0]
            added = made_by(reader, split_value, "Add")
            for inner, c in () if added is None else (added.inputs, added.inputs[::-1]):
                if added is not None and reader.is_const(c):
                    profitable(read_once(reader, split_value), "the sum is read elsewhere")
                    nodes.append(added)
                    biases.append(c)
                    split_value = inner
            product = made_by(reader, split_value, "MatMul", "Gemm")
            if product is None:
                return None
            x, w, *bias = product.inputs
            constant = [w, *(v for v in bias if v != ABSENT)]
            profitable(all(reader.is_const(v) for v in constant), "a weight is not constant")
            require(reader.val(w).rank >= 2, "the weight is no matrix")
            profitable(read_once(reader, value) and read_once(reader, split_value), "it is read elsewhere")
            sizes = tuple(reader.val(v).size(rank - 1) for v in split.outputs)
            part = split.outputs.index(value)
            outputs = tuple(node.outputs[0] if k == part else v for k, v in enumerate(split.outputs))
            data = _Part(part, sizes, split.attrs, product.op, product.attrs, len(constant), len(biases))
            inputs = (x, s, *constant, *biases, *split.inputs[1:])
            return Region(outputs, inputs, (*nodes, product), data)
        return None

    def target(self, op: Op, region: Region, x: Val, s: Val, *inputs: Val) -> Any:
        data: _Part = region.data
        ones = np.ones(1, s.storage)
        pieces = [op.Expand(flat(op, s) if k == data.part else ones, [n]) for k, n in enumerate(data.sizes)]
        factors = op.Concat(*pieces, axis=0)
        w, *inner = inputs[: data.constants]
        column = op.Reshape(factors, [-1, 1]) if data.attrs.get("transB") else factors
        y = op[data.op](x, op.Mul(w, column), *(op.Mul(b, factors) for b in inner), attrs=data.attrs)
        remaining = list(inputs[data.constants :])
        for _ in range(data.biases):
            y = op.Add(y, op.Mul(remaining.pop(0), factors))
        return op.Split(y, *remaining, attrs=data.split, outputs=len(data.sizes))


@dataclass(frozen=True, slots=True)
class _Part:
    """The scaled part of a Split, the sizes and attributes of the Split, and the product that is split."""

    part: int
    sizes: tuple[int, ...]
    split: Attrs
    op: str
    attrs: Attrs
    constants: int
    biases: int
