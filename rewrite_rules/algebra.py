"""Rules that associate, distribute and factor sums, products and concatenations.

Such equations hold everywhere, but mostly gain nothing by themselves. Where a rule gains nothing by itself, it applies
only if another rule may gain afterwards: if an operand or a factor then occurs twice, if a constant is then folded, or
if only the part of a result that is read is computed then.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from rewrite_rules.axes import axis_of, rank_of, same_dims
from rewrite_rules.constants import AT_EXPORT, concat_constants, slice_constant
from rewrite_rules.elementwise import BROADCAST, made_by, read_once, sum_of
from rewrite_rules.examples import graphs
from rewrite_rules.fold_into_weights import NUMBERS, group_of
from rewrite_rules.shapes import per_rank
from rewrite_rules.slices import sizes_along
from xrlflow.ir import ABSENT, FLOATS, Node, Value
from xrlflow.rewrite import (
    Captures,
    Op,
    Reader,
    Region,
    RegionRule,
    Rule,
    Val,
    common_source,
    profitable,
    require,
)

# Operators into which a constant factor of their result can be folded.
_TAKE_FACTORS = frozenset(("Conv", "ConvTranspose", "MatMul", "Gemm"))


class DistributeMulOverSum(RegionRule, family="algebra"):
    """(y + z) * c -> y * c + z * c  with c constant, where y is a product or convolution that c folds into."""

    anchors = ("Mul",)
    reads_from = ("Add",)
    dtypes = NUMBERS
    examples = (
        "agraph (float[2,3] x, float[3,4] w, float[2,4] z) => (float[2,4] y) "
        "{ c = Constant<value_floats=[1.0,2.0,3.0,4.0]>() p = MatMul(x, w) s = Add(p, z) y = Mul(s, c) }",
        "agraph (float[1,2,4,4] x, float[3,2,3,3] w, float[1,3,2,2] z) => (float[1,3,2,2] y) "
        "{ c = Constant<value_float=2.0>() p = Conv(x, w) s = Add(z, p) y = Mul(c, s) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        for factor, total in (node.inputs, node.inputs[::-1]):
            add = reader.producer(total)
            if add is None or add.op != "Add" or add.const or not reader.is_const(factor):
                continue
            # The rule PushMulThroughConstantAdd handles constant addends.
            if any(reader.is_const(v) for v in add.inputs) or not read_once(reader, total):
                continue
            for v in add.inputs:
                maker = reader.producer(v)
                if maker is not None and maker.op in _TAKE_FACTORS and read_once(reader, v):
                    return Region(node.outputs, (*add.inputs, factor), (node, add))
        return None

    def target(self, op: Op, region: Region, y: Val, z: Val, c: Val) -> Any:
        return op.Add(op.Mul(y, c), op.Mul(z, c))


# Matrix products


def _is_matrix(reader: Reader, value: Value) -> bool:
    """Whether a value is a matrix or a batch of matrices."""
    rank = reader.type(value).rank
    return rank is not None and rank > 1


def _worthwhile_product(x: Val, y: Val) -> None:
    """Refuse a product of two constants that would take too long to compute when the model is written."""
    profitable(
        x.size(-2) * x.size(-1) * y.size(-1) <= AT_EXPORT, "multiplying the constants out would take long"
    )


def _meet(reader: Reader, value: Value, other: Value) -> bool:
    """Whether a node reads both values."""
    return any(other in n.inputs for n in reader.users(value))


class AssociateSharedMatMuls(RegionRule, family="algebra"):
    """(x @ y) @ z -> x @ (y @ z), and z @ (x @ y) -> (z @ x) @ y,  where others read x @ y too.

    It applies if a node reads both products (x @ y + (x @ y) @ z), or if z is x or y. Then a factor or product occurs
    twice.
    """

    anchors = ("MatMul",)
    reads_from = ("MatMul",)
    dtypes = NUMBERS
    may_add_nonfinite = True
    examples = graphs(
        "(float[2,3] x, float[3,4] z, float[4,4] w) => (float[2,4] y) { a = MatMul(x, z) b = MatMul(a, w) "
        "y = Add(a, b) }",
        "(float[3,3] x, float[3,3] z) => (float[3,3] y, float[3,3] a) { a = MatMul(x, z) y = MatMul(a, x) }",
        "(float[2,3,3] x, float[3,4] z, float[3,3] w) => (float[2,6,4] y) { a = MatMul(x, z) b = MatMul(w, a) "
        "y = Concat<axis=1>(a, b) }",
        "(float[N,3,3] x, float[N,3,3] z) => (float[N,3,3] y, float[N,3,3] a) { a = MatMul(x, z) y = MatMul(z, a) }",
        "(float[2,3] x, float[3,4] z, float[4,4] w) => (float[2,4] y, float[2,4] r) { a = MatMul(x, z) "
        "b = MatMul(a, w) y = Add(a, b) r = Relu(b) }",
        "(float[2,2] x, float[2,2] z) => (float[2,2] y) { a = MatMul(x, z) b = MatMul(a, a) y = Add(a, b) }",
        "(float[1,2048] x) => (float[1,2050] y) { p = Constant<value_ints=[2048,2]>() "
        "q = Constant<value_ints=[2,2048]>() o = Constant<value_float=0.5>() u = Expand(o, p) v = Expand(o, q) "
        "a = MatMul(x, u) b = MatMul(a, v) y = Concat<axis=1>(a, b) }",
    )
    near_misses = (
        "agraph (float[1,8192] x) => (float[1,8257] y) { p = Constant<value_ints=[8192,65]>() q = "
        "Constant<value_ints=[65,8192]>() o = Constant<value_float=0.5>() u = Expand(o, p) v = Expand(o, "
        "q) a = MatMul(x, u) b = MatMul(a, v) y = Concat<axis=1>(a, b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        for index, value in enumerate(node.inputs):
            inner = reader.producer(value)
            if inner is None or inner.op != "MatMul" or inner.const:
                continue
            factor = node.inputs[1 - index]
            if read_once(reader, value):
                continue  # other rules of associativity handle these
            if not all(_is_matrix(reader, v) for v in (*inner.inputs, factor)):
                continue
            if factor in inner.inputs or _meet(reader, node.outputs[0], value):
                fixed = [inner.inputs[1 - index], factor]
                if all(reader.is_const(v) for v in fixed):
                    _worthwhile_product(*(reader.val(v) for v in (fixed if index == 0 else fixed[::-1])))
                return Region(node.outputs, (*inner.inputs, factor), (node, inner), index)
        return None

    def target(self, op: Op, region: Region, x: Val, y: Val, z: Val) -> Any:
        return op.MatMul(x, op.MatMul(y, z)) if region.data == 0 else op.MatMul(op.MatMul(z, x), y)


class DistributeMatMul(RegionRule, family="algebra"):
    """(x + y) @ z -> x @ z + y @ z, and z @ (x + y) -> z @ x + z @ y,  where y is a product with x.

    Afterwards other rules can associate the products and factor out x: (x + x @ w) @ z -> x @ (z + w @ z).
    """

    nonempty = True
    anchors = ("MatMul",)
    reads_from = ("Add",)
    dtypes = NUMBERS
    may_add_nonfinite = True
    examples = (
        "agraph (float[2,3] x, float[3,3] w, float[3,4] z) => (float[2,4] y) "
        "{ a = MatMul(x, w) s = Add(x, a) y = MatMul(s, z) }",
        "agraph (float[N,3,4] x, float[3,3] w, float[2,3] z) => (float[N,2,4] y) "
        "{ a = MatMul(w, x) s = Add(a, x) y = MatMul(z, s) }",
        "agraph (float[2,3] x, float[2,2] w, float[3,4] z) => (float[2,4] y) "
        "{ a = MatMul(w, x) s = Add(x, a) y = MatMul(s, z) }",
    )
    near_misses = (
        "agraph (float[2,1] x, float[1,3] w, float[3,4] z) => (float[2,4] y) "
        "{ a = MatMul(x, w) s = Add(x, a) y = MatMul(s, z) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        for index, value in enumerate(node.inputs):
            add = reader.producer(value)
            if add is None or add.op != "Add" or add.const or not read_once(reader, value):
                continue
            if not all(_is_matrix(reader, v) for v in (*add.inputs, node.inputs[1 - index])):
                continue
            for own, addend in (add.inputs, add.inputs[::-1]):
                maker = reader.producer(own)
                if maker is not None and maker.op == "MatMul" and not maker.const and addend in maker.inputs:
                    # No operand may broadcast along the axis over which the product sums.
                    axis = -1 if index == 0 else -2
                    sizes = [(reader.type(v).shape or ())[axis] for v in add.inputs]
                    require(sizes[0] == sizes[1] is not None, "an addend broadcasts, or a size is not known")
                    return Region(node.outputs, (*add.inputs, node.inputs[1 - index]), (node, add), index)
        return None

    def target(self, op: Op, region: Region, x: Val, y: Val, z: Val) -> Any:
        if region.data == 0:
            return op.Add(op.MatMul(x, z), op.MatMul(y, z))
        return op.Add(op.MatMul(z, x), op.MatMul(z, y))


class FactorMatMulOutOfSum(Rule, family="algebra"):
    """x @ w + y @ w -> (x + y) @ w."""

    nonempty = True
    dtypes = NUMBERS
    may_add_nonfinite = True
    shapes = "x[...,a,k] y[...,b,k] w[...,k,n]"

    def source(self, op: Op, x: Any, y: Any, w: Any) -> Any:
        return op.Add(op.MatMul(x, w), op.MatMul(y, w))

    def target(self, op: Op, x: Val, y: Val, w: Val) -> Any:
        return op.MatMul(op.Add(x, y), w)


class FactorConvOutOfSum(Rule, family="algebra"):
    """conv(x, w, b) + conv(y, w, c) -> conv(x + y, w, b + c)  with equal attributes."""

    dtypes = FLOATS
    may_add_nonfinite = True
    optional = ("b", "c")
    shapes = per_rank("x[i,j{h}] y[i,j{h}] w[m,p{k}] b[m] c[m]")

    def source(self, op: Op, x: Any, w: Any, b: Any, y: Any, c: Any) -> Any:
        return op.Add(op.Conv(x, w, b, attrs="f"), op.Conv(y, w, c, attrs="g"))

    def where(self, m: Captures) -> None:
        require(m.f == m.g, "their attributes differ")

    def target(self, op: Op, m: Captures, x: Val, w: Val, b: Val | None, y: Val, c: Val | None) -> Any:
        return op.Conv(op.Add(x, y), w, sum_of(op, b, c), attrs=m.f)


# Products and convolutions across Concat


_PRODUCTS = ("MatMul", "Gemm", "Conv")


def _products(reader: Reader, concat: Node) -> list[Node] | None:
    """The products that a Concat joins, if all are of one operator type and only the Concat reads them; else None."""
    products = {v: n for v in concat.inputs if (n := made_by(reader, v, *_PRODUCTS)) is not None}
    if len(products) != len(concat.inputs) or len(products) < 2 or len({n.op for n in products.values()}) > 1:
        return None
    profitable(all(read_once(reader, v) for v in products), "a product is read elsewhere")
    return list(products.values())


def _require_alike(reader: Reader, values: Sequence[Value], axis: int) -> None:
    """Refuse shapes that are not known, or that differ along other axes than `axis`."""
    shapes = [reader.val(v).shape for v in values]
    first = shapes[0]
    index = axis % len(first)
    rests = {(len(s), *s[:index], *s[index + 1 :]) for s in shapes}
    require(len(rests) == 1 and None not in next(iter(rests)), "the shapes differ, or are not known")


def _is_rows(reader: Reader, node: Node, rank: int, axis: int) -> bool:
    """Whether this axis of a product's result counts the rows of the product's left factor."""
    if reader.type(node.inputs[0]).rank != rank:
        return False
    if node.op == "MatMul":
        weight = reader.val(node.inputs[1]).shape
        if axis == rank - 1:
            return False
        at = axis - (rank - len(weight))
        return axis == rank - 2 or at < 0 or weight[at] == 1
    if axis != 0 or node.attrs.get("transA"):
        return False
    if node.op == "Gemm" and len(node.inputs) > 2 and node.inputs[2] != ABSENT:
        bias = reader.val(node.inputs[2]).shape
        return len(bias) < 2 or bias[-2] == 1
    return True


class PullProductOutOfConcat(RegionRule, family="algebra"):
    """[x @ w; y @ w] -> [x; y] @ w  for a concat of rows;  Gemm, and convolutions and a concat of the batch, alike."""

    anchors = ("Concat",)
    reads_from = _PRODUCTS
    dtypes = NUMBERS
    examples = (
        "agraph (float[2,3] x, float[4,3] z, float[3,5] w) => (float[6,5] y) "
        "{ a = MatMul(x, w) b = MatMul(z, w) y = Concat<axis=0>(a, b) }",
        "agraph (float[1,2,3] x, float[2,2,3] z, float[1,3,5] w) => (float[3,2,5] y) "
        "{ a = MatMul(x, w) b = MatMul(z, w) y = Concat<axis=-3>(a, b) }",
        "agraph (float[N,2,3] x, float[N,4,3] z, float[N,3,5] w) => (float[N,6,5] y) "
        "{ a = MatMul(x, w) b = MatMul(z, w) y = Concat<axis=1>(a, b) }",
        "agraph (float[2,3] x, float[4,3] z, float[5,3] w, float[5] c) => (float[6,5] y) "
        "{ a = Gemm<transB=1>(x, w, c) b = Gemm<transB=1>(z, w, c) y = Concat<axis=0>(a, b) }",
        "agraph (float[1,2,4,4] x, float[3,2,4,4] z, float[5,2,3,3] w, float[5] c) => (float[4,5,2,2] y) "
        "{ a = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w, c) b = Conv<strides=[2,2], pads=[1,1,1,1]>(z, w, c) "
        "y = Concat<axis=0>(a, b) }",
        "agraph (float[1,4,5] x, float[N,4,5] z, float[6,2,3] w) => (float[M,6,3] y) "
        "{ a = Conv<group=2>(x, w) b = Conv<group=2>(z, w) y = Concat<axis=0>(a, b) }",
        "agraph (float[2,3] x, float[4,3] z, float[3,5] w) => (float[6,5] y) { a = Gemm<alpha=0.5>(x, w) b "
        "= Gemm<alpha=0.5>(z, w) y = Concat<axis=0>(a, b) }",
    )
    near_misses = (
        "agraph (float[1,2,3] x, float[2,4,3] z, float[2,3,5] w) => (float[2,6,5] y) "
        "{ a = MatMul(x, w) b = MatMul(z, w) y = Concat<axis=1>(a, b) }",
        "agraph (float[2,3] x, float[2,3] z, float[2,3,5] w) => (float[2,4,5] y) { a = MatMul(x, w) b = "
        "MatMul(z, w) y = Concat<axis=1>(a, b) }",
        "agraph (float[2,3] x, float[2,3] z, float[3,1] w) => (float[2,2] y) { a = MatMul(x, w) b = "
        "MatMul(z, w) y = Concat<axis=1>(a, b) }",
        "agraph (float[2,3] x, float[4,3] z, float[3,5] w) => (float[6,5] y) { a = MatMul(x, w) b = "
        "Gemm(z, w) y = Concat<axis=0>(a, b) }",
        "agraph (float[2,3] x, float[3,5] w) => (float[4,5] y) { a = MatMul(x, w) y = Concat<axis=0>(a, a) }",
        "agraph (float[2,3] x, float[3,5] w) => (float[2,5] y) { a = MatMul(x, w) y = Concat<axis=0>(a) }",
        "agraph (float[2,3] x, float[4,5] z, float[3,5] w) => (float[6,5] y) { a = MatMul(x, w) b = "
        "Relu(z) y = Concat<axis=0>(a, b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        products = _products(reader, node)
        if (
            products is None
            or len({n.inputs[1:] for n in products}) != 1
            or len({n.attrs for n in products}) != 1
        ):
            return None
        rank = rank_of(reader, *node.inputs)
        axis = axis_of(node, rank)
        require(_is_rows(reader, products[0], rank, axis), "the concat is not one of rows")
        factors = tuple(n.inputs[0] for n in products)
        _require_alike(reader, factors, axis)
        data = (products[0].op, products[0].attrs, len(factors), axis)
        return Region(node.outputs, (*factors, *products[0].inputs[1:]), (node, *products), data)

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        name, attrs, count, axis = region.data
        return op[name](op.Concat(*inputs[:count], axis=axis), *inputs[count:], attrs=attrs)


class PullProductOutOfConcatOfColumns(RegionRule, family="algebra"):
    """[x @ v | x @ w] -> x @ [v | w];  Gemm, and convolutions and a concat of channels, alike."""

    anchors = ("Concat",)
    reads_from = _PRODUCTS
    dtypes = NUMBERS
    examples = (
        "agraph (float[2,3] x, float[3,4] v, float[3,5] w) => (float[2,9] y) "
        "{ a = MatMul(x, v) b = MatMul(x, w) y = Concat<axis=1>(a, b) }",
        "agraph (float[N,2,3] x, float[N,3,4] v, float[N,3,5] w) => (float[N,2,9] y) "
        "{ a = MatMul(x, v) b = MatMul(x, w) y = Concat<axis=-1>(a, b) }",
        "agraph (float[2,3] x, float[4,3] v, float[5,3] w, float[4] b, float[5] c) => (float[2,9] y) "
        "{ p = Gemm<transB=1>(x, v, b) q = Gemm<transB=1>(x, w, c) y = Concat<axis=1>(p, q) }",
        "agraph (float[1,2,4,4] x, float[3,2,3,3] v, float[5,2,3,3] w) => (float[1,8,4,4] y) "
        "{ a = Conv<pads=[1,1,1,1]>(x, v) b = Conv<pads=[1,1,1,1]>(x, w) y = Concat<axis=1>(a, b) }",
        "agraph (float[1,2,5] x, float[3,2,3] v, float[4,2,3] w, float[3] b, float[4] c) => (float[1,7,3] y) "
        "{ p = Conv(x, v, b) q = Conv(x, w, c) y = Concat<axis=1>(p, q) }",
        "agraph (float[2,3] x, float[3,4] v, float[3,5] w, float[1,4] b, float[1,5] c) => (float[2,9] y) { "
        "p = Gemm(x, v, b) q = Gemm(x, w, c) y = Concat<axis=1>(p, q) }",
    )
    near_misses = (
        "agraph (float[2,2,3] x, float[3] v, float[3] w) => (float[2,4] y) "
        "{ p = MatMul(x, v) q = MatMul(x, w) y = Concat<axis=1>(p, q) }",
        "agraph (float[1,2,5] x, float[3,2,3] v, float[4,2,3] w, float[3] b) => (float[1,7,3] y) "
        "{ p = Conv(x, v, b) q = Conv(x, w) y = Concat<axis=1>(p, q) }",
        "agraph (float[2,3] x, float[3,4] v, float[3,5] w, float[1] b, float[1] c) => (float[2,9] y) "
        "{ p = Gemm(x, v, b) q = Gemm(x, w, c) y = Concat<axis=1>(p, q) }",
        "agraph (float[1,2,4] x, float[2,1,3] v, float[4,1,3] w) => (float[1,6,2] y) "
        "{ p = Conv<group=2>(x, v) q = Conv<group=2>(x, w) y = Concat<axis=1>(p, q) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        products = _products(reader, node)
        if (
            products is None
            or len({n.inputs[0] for n in products}) != 1
            or len({n.attrs for n in products}) != 1
        ):
            return None
        first = products[0]
        rank = rank_of(reader, *node.inputs)
        columns = 1 if first.op == "Conv" else rank - 1
        require(axis_of(node, rank) == columns, "the concat is not one of columns")
        require(first.op != "Conv" or group_of(first.attrs) == 1, "the convolutions are grouped")
        require(_is_matrix(reader, first.inputs[1]), "the right factor is a vector")
        axis = -1
        if first.op != "MatMul":
            axis = 0 if first.op == "Conv" or first.attrs.get("transB") else 1
        weights = tuple(n.inputs[1] for n in products)
        _require_alike(reader, weights, axis)
        biases = tuple(b for n in products for b in n.inputs[2:] if b != ABSENT)
        require(len(biases) in (0, len(products)), "one has a bias, the other has none")
        for bias, weight in zip(biases, weights):
            width = reader.val(bias).shape[-1:]
            require(width == (reader.val(weight).size(axis),), "a bias is not one number per column")
        if biases:
            _require_alike(reader, biases, -1)
        data = (first.op, first.attrs, len(weights), axis % reader.val(weights[0]).rank)
        return Region(node.outputs, (first.inputs[0], *weights, *biases), (node, *products), data)

    def target(self, op: Op, region: Region, x: Val, *factors: Val) -> Any:
        name, attrs, count, axis = region.data
        weights, biases = factors[:count], factors[count:]
        bias = concat_constants(op, biases, biases[0].rank - 1) if biases else None
        return op[name](x, concat_constants(op, weights, axis), bias, attrs=attrs)


class PushMatMulIntoConcat(RegionRule, family="algebra"):
    """[x; y] @ w -> [x @ w; y @ w], and x @ [v | w] -> [x @ v | x @ w],  where a part is a product itself.

    Other rules can then associate the new products. The rule also applies if a part and the other factor are constant.
    """

    anchors = ("MatMul",)
    reads_from = ("Concat",)
    dtypes = NUMBERS
    examples = graphs(
        "(float[2,3] x, float[3,3] z, float[3,4] w) => (float[5,4] y) { a = MatMul(x, z) c = Concat<axis=0>(z, a) "
        "y = MatMul(c, w) }",
        "(float[N,2,3] x, float[3,4] z, float[4,5] w) => (float[N,2,9] y) { a = MatMul(z, w) "
        "c = Concat<axis=1>(z, a) y = MatMul(x, c) }",
        "(float[2,2,3] x) => (float[3,2,2] y) { p = Reshape([1.0, 2, 3], [1, 1, 3]) q = Concat<axis=1>(p, p) "
        "v = Reshape([1.0, 2, 3, 4, 5, 6], [3, 2]) c = Concat<axis=0>(q, x) y = MatMul(c, v) }",
        "(float[3] x, float[3,4] z, float[4,5] w) => (float[9] y) { a = MatMul(z, w) c = Concat<axis=1>(z, a) "
        "y = MatMul(x, c) }",
    )
    near_misses = (
        "agraph (float[2,4] x, float[2,2] z) => (float[4,4] y) { a = MatMul(z, x) c = Concat<axis=0>(x, a) "
        "y = MatMul(c, c) }",
        "agraph (float[4,5] w, float[2] x, float[2] u, float[2,3] z) => (float[4] y) { a = MatMul(x, z) c "
        "= Concat<axis=0>(u, a) y = MatMul(w, c) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        for index, value in enumerate(node.inputs):
            concat = reader.producer(value)
            if concat is None or concat.op != "Concat" or concat.const or len(concat.inputs) < 2:
                continue
            factor = node.inputs[1 - index]
            rank = rank_of(reader, value)
            axis = axis_of(concat, rank)
            result = rank_of(reader, node.outputs[0])
            if factor == value or rank < 2:
                continue
            if (axis != rank - 1) if index else not _is_rows(reader, node, result, axis):
                continue
            producers = [reader.producer(v) for v in concat.inputs]
            useful = any(n is not None and n.op == "MatMul" and not n.const for n in producers)
            folds = reader.is_const(factor) and any(reader.is_const(v) for v in concat.inputs)
            profitable(useful or folds, "no part is a product, and none becomes constant")
            profitable(read_once(reader, value), "the concat is read elsewhere")
            data = (index, result - 1 if index else axis)
            return Region(node.outputs, (factor, *concat.inputs), (node, concat), data)
        return None

    def target(self, op: Op, region: Region, factor: Val, *parts: Val) -> Any:
        index, axis = region.data
        products = [op.MatMul(factor, p) if index else op.MatMul(p, factor) for p in parts]
        return op.Concat(*products, axis=axis)


class SplitMatMulOfConcats(RegionRule, family="algebra"):
    """[x | y] @ [v; w] -> x @ v + y @ w  where the parts are of the same sizes."""

    may_lose_errors = ("sizes",)
    anchors = ("MatMul",)
    reads_from = ("Concat",)
    dtypes = NUMBERS
    examples = (
        "agraph (float[2,3] x, float[2,4] z, float[3,5] v, float[4,5] w) => (float[2,5] y) "
        "{ a = Concat<axis=1>(x, z) b = Concat<axis=0>(v, w) y = MatMul(a, b) }",
        "agraph (float[N,2,3] x, float[N,2,4] z, float[3,5] v, float[4,5] w) => (float[N,2,5] y) "
        "{ a = Concat<axis=-1>(x, z, x) b = Concat<axis=0>(v, w, v) y = MatMul(a, b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        makers = [reader.producer(v) for v in node.inputs]
        sizes = []
        for maker, value, inner in zip(makers, node.inputs, (1, 2)):
            if maker is None or maker.op != "Concat" or maker.const or len(maker.inputs) < 2:
                return None  # the rule SplitMatMulsOverConcat handles constant weights
            rank = rank_of(reader, value)
            if rank < 2 or axis_of(maker, rank) != rank - inner:
                return None
            sizes.append(sizes_along(reader, maker.inputs, rank - inner))
        columns, rows = sizes
        require(columns is not None and columns == rows, "the parts are of other sizes, or not known")
        profitable(all(read_once(reader, v) for v in node.inputs), "a concat is read elsewhere")
        nodes = tuple(n for n in makers if n is not None)
        inputs = tuple(v for n in nodes for v in n.inputs)
        return Region(node.outputs, inputs, (node, *nodes), len(inputs) // 2)

    def target(self, op: Op, region: Region, *parts: Val) -> Any:
        count = region.data
        total: Any = None
        for x, w in zip(parts[:count], parts[count:]):
            total = sum_of(op, total, op.MatMul(x, w))
        return total


class MergeConvsIntoGroups(RegionRule, family="algebra"):
    """[conv(x, v, b) | conv(y, w, c)] -> conv([x|y], [v; w], [b; c]; in groups)  along the channels."""

    anchors = ("Concat",)
    reads_from = ("Conv",)
    dtypes = FLOATS
    examples = (
        "agraph (float[1,2,4,4] x, float[1,2,4,4] z, float[3,2,3,3] v, float[3,2,3,3] w) => (float[1,6,4,4] y) "
        "{ a = Conv<pads=[1,1,1,1]>(x, v) b = Conv<pads=[1,1,1,1]>(z, w) y = Concat<axis=1>(a, b) }",
        "agraph (float[N,2,5] x, float[N,4,5] z, float[3,2,3] v, float[6,2,3] w, float[3] b, float[6] c) "
        "=> (float[N,9,3] y) { p = Conv(x, v, b) q = Conv<group=2>(z, w, c) y = Concat<axis=-2>(p, q) }",
        "agraph (float[1,1,4,4] x, float[1,1,4,4] z, float[1,1,4,4] u, float[1,1,2,2] v, float[1,1,2,2] w) "
        "=> (float[1,3,2,2] y) { a = Conv<strides=[2,2]>(x, v) b = Conv<strides=[2,2]>(z, w) "
        "c = Conv<strides=[2,2]>(u, v) y = Concat<axis=1>(a, b, c) }",
    )
    near_misses = (
        "agraph (float[1,2,5] x, float[1,2,5] z, float[3,2,3] v, float[3,2,3] w, float[3] b) => (float[1,6,3] y) "
        "{ p = Conv(x, v, b) q = Conv(z, w) y = Concat<axis=1>(p, q) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        convs = _products(reader, node)
        if convs is None or convs[0].op != "Conv":
            return None
        inputs = tuple(n.inputs[0] for n in convs)
        weights = tuple(n.inputs[1] for n in convs)
        attributes = {tuple((k, v) for k, v in n.attrs.items() if k != "group") for n in convs}
        if len(attributes) != 1 or len(set(inputs)) < 2:
            return None  # other rules merge convolutions of one input without groups
        rank = rank_of(reader, *node.inputs)
        require(axis_of(node, rank) == 1, "the concat is not one of channels")
        _require_alike(reader, inputs, 1)
        _require_alike(reader, weights, 0)
        groups = [group_of(n.attrs) for n in convs]
        outputs = [reader.val(w).size(0) for w in weights]
        first, *remaining = zip(outputs, groups)
        require(
            all(m * first[1] == first[0] * g for m, g in remaining),
            "a group has more output channels than another",
        )
        biases = tuple(b for n in convs for b in n.inputs[2:] if b != ABSENT)
        require(len(biases) in (0, len(convs)), "one has a bias, the other has none")
        require(all(reader.val(b).rank == 1 for b in biases), "a bias is no vector")
        data = (convs[0].attrs, sum(groups), len(convs))
        return Region(node.outputs, (*inputs, *weights, *biases), (node, *convs), data)

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        attrs, groups, n = region.data
        biases = inputs[2 * n :]
        return op.Conv(
            op.Concat(*inputs[:n], axis=1),
            concat_constants(op, inputs[n : 2 * n], 0),
            concat_constants(op, biases, 0) if biases else None,
            attrs=attrs,
            group=groups,
        )


class SplitGroupsOverConcat(RegionRule, family="algebra"):
    """conv([x|y], w, b; in groups) -> [conv(x, w_x, b_x) | conv(y, w_y, b_y)]  when each part has whole groups."""

    anchors = ("Conv",)
    reads_from = ("Concat",)
    dtypes = FLOATS
    examples = (
        "agraph (float[1,2,4,4] x, float[1,2,4,4] z, float[6,2,3,3] w) => (float[1,6,4,4] y) "
        "{ a = Concat<axis=1>(x, z) y = Conv<pads=[1,1,1,1], group=2>(a, w) }",
        "agraph (float[N,2,5] x, float[N,4,5] z, float[9,2,3] w) => (float[N,9,3] y) "
        "<float[9] c = {1, 2, 3, 4, 5, 6, 7, 8, 9}> { a = Concat<axis=1>(x, z) y = Conv<group=3>(a, w, c) }",
        "agraph (float[1,1,4,4] x, float[1,1,4,4] z, float[1,1,4,4] u, float[3,1,2,2] w) => (float[1,3,2,2] y) "
        "{ a = Concat<axis=1>(x, z, u) y = Conv<group=3, strides=[2,2]>(a, w) }",
    )
    near_misses = (
        "agraph (float[1,1,4] x, float[1,3,4] z, float[2,2,1] w) => (float[1,2,4] y) "
        "{ a = Concat<axis=1>(x, z) y = Conv<group=2>(a, w) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        groups = group_of(node.attrs)
        concat = made_by(reader, node.inputs[0], "Concat")
        if concat is None or len(concat.inputs) < 2:
            return None
        weight = reader.val(node.inputs[1])
        require(axis_of(concat, weight.rank) == 1, "the concat is not one of channels")
        sizes = sizes_along(reader, concat.inputs, 1) or ()
        own = weight.size(1)
        require(sum(sizes) == own * groups, "the channels are not those of the groups, or not known")
        require(all(s and s % own == 0 for s in sizes), "a group reads several parts")
        profitable(read_once(reader, node.inputs[0]), "the concat is read elsewhere")
        biases = tuple(v for v in node.inputs[2:] if v != ABSENT)
        width = weight.size(0) // groups
        require(width * groups == weight.size(0), "the output channels are not those of the groups")
        data = (node.attrs, tuple(s // own for s in sizes), width)
        return Region(node.outputs, (node.inputs[1], *biases, *concat.inputs), (node, concat), data)

    def target(self, op: Op, region: Region, w: Val, *inputs: Val) -> Any:
        attrs, groups, width = region.data
        biases, parts = inputs[: -len(groups)], inputs[-len(groups) :]
        cuts = [(a * width, b * width) for a, b in pairwise([0, *accumulate(groups)])]
        results = []
        for x, n, (start, stop) in zip(parts, groups, cuts):
            weight = slice_constant(op, w, 0, start, stop)
            bias = slice_constant(op, biases[0], 0, start, stop) if biases else None
            results.append(op.Conv(x, weight, bias, attrs=attrs, group=n))
        return op.Concat(*results, axis=1)


class MergeSharedWeightConvs(RegionRule, family="algebra"):
    """conv(x, w, b), conv(y, w, b), ... -> split(conv([x; y; ...], w, b))  along the batch.

    The inputs must not depend on the results (see MergeSharedWeightProducts).
    """

    anchors = ("Conv",)
    dtypes = FLOATS
    examples = graphs(
        "(float[1,2,4,4] x, float[3,2,4,4] z, float[5,2,3,3] w, float[5] c) => (float[1,5,4,4] a, float[3,5,4,4] b) "
        "{ a = Conv<pads=[1,1,1,1]>(x, w, c) b = Conv<pads=[1,1,1,1]>(z, w, c) }",
        "(float[2,4,6] x, float[6,2,3] w) => (float[1,6,4] a, float[1,6,4] b) { p, q "
        "= Split<axis=0, num_outputs=2>(x) a = Conv<group=2>(p, w) b = Conv<group=2>(q, w) }",
        "(float[1,2,K] x, float[3,2,K] z, float[2,2,K] u, float[2,2,1] w) "
        "=> (float[1,2,K] a, float[3,2,K] b, float[2,2,K] c) { a = Conv(x, w) b = Conv(z, w) c = Conv(u, w) }",
    )
    near_misses = (
        "agraph (float[1,2,4] x, float[2,2,1] w) => (float[1,2,4] b) { a = Conv(x, w) r = Relu(a) b = Conv(r, w) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        weight = node.inputs[1]
        if reader.count_users(weight) < 2:
            return None
        # Only the node with the smallest id finds the group. The search from another node records only that it depends
        # on this one.
        first = min((n.id for n in reader.graph.users(weight) if _convolves(reader, n, node)), default=None)
        if first is None:
            return None
        if first != node.id:
            reader.producer(first)
            return None
        group = {n.inputs[0]: n for n in reader.users(weight) if _convolves(reader, n, node)}
        if len(group) < 2:
            return None
        inputs = sorted(group)
        require(common_source(reader, inputs), "an input may depend on a result")
        # ONNX Runtime splits an empty tensor only if the sizes of the parts are given.
        sizes = sizes_along(reader, inputs, 0)
        require(sizes is not None, "a batch is not a known number")
        nodes = tuple(group[v] for v in inputs)
        data = (node.attrs, tuple(sizes or ()))
        return Region(tuple(n.outputs[0] for n in nodes), (*inputs, *node.inputs[1:]), nodes, data)

    def target(self, op: Op, region: Region, *inputs: Val | None) -> Any:
        attrs, sizes = region.data
        n = len(sizes)
        y = op.Conv(op.Concat(*inputs[:n], axis=0), *inputs[n:], attrs=attrs)
        return op.Split(y, axis=0, sizes=sizes)


def _convolves(reader: Reader, other: Node, node: Node) -> bool:
    """Whether another node computes the same convolution as `node`, for another image of the same size."""
    if other.op != "Conv" or other.const or other.inputs[1:] != node.inputs[1:] or other.attrs != node.attrs:
        return False
    shape, own = (reader.graph.type(n.inputs[0]).shape for n in (other, node))
    return shape is not None and own is not None and same_dims(shape[1:], own[1:])


# Concat and Split


class ExchangeConcats(RegionRule, family="algebra"):
    """[[x|y]; [v|w]] -> [[x; v] | [y; w]]  where the parts fit together both ways."""

    anchors = ("Concat",)
    reads_from = ("Concat",)
    examples = (
        "agraph (float[2,3] x, float[2,4] z, float[5,3] v, float[5,4] w) => (float[7,7] y) "
        "{ a = Concat<axis=1>(x, z) b = Concat<axis=1>(v, w) y = Concat<axis=0>(a, b) }",
        "agraph (float[N,2,3] x, float[N,2,3] z) => (float[N,6,6] y) "
        "{ a = Concat<axis=-1>(x, z) b = Concat<axis=2>(z, z) c = Concat<axis=2>(z, x) y = Concat<axis=1>(a, b, c) }",
    )
    near_misses = (
        "agraph (float[2,3] x, float[2,4] z, float[5,4] v, float[5,3] w) => (float[7,7] y) "
        "{ a = Concat<axis=1>(x, z) b = Concat<axis=1>(v, w) y = Concat<axis=0>(a, b) }",
        "agraph (float[2,3] x, float[2,4] z) => (float[2,7] y) { a = Concat<axis=1>(x, z) y = Concat<axis=0>(a) }",
        "agraph (float[2,3] x, float[5,3] v) => (float[7,3] y) { a = Concat<axis=1>(x) b = "
        "Concat<axis=1>(v) y = Concat<axis=0>(a, b) }",
        "agraph (float[2,3] x, float[2,4] z) => (float[4,7] y) { a = Concat<axis=1>(x, z) y = Concat<axis=0>(a, a) }",
        "agraph (float[2,3] x, float[2,4] z, float[5,7] v) => (float[7,7] y) { a = Concat<axis=1>(x, z) b "
        "= Relu(v) y = Concat<axis=0>(a, b) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        concats = {v: n for v in node.inputs if (n := made_by(reader, v, "Concat")) is not None}
        if len(concats) != len(node.inputs) or len(concats) < 2:
            return None
        inner = tuple(concats.values())
        counts = {len(n.inputs) for n in inner}
        if len(counts) > 1 or counts == {1}:
            return None
        rank = rank_of(reader, *node.inputs)
        axis, axes = axis_of(node, rank), {axis_of(n, rank) for n in inner}
        if len(axes) != 1 or axis in axes:
            return None
        profitable(all(read_once(reader, v) for v in node.inputs), "an inner concat is read elsewhere")
        for column in zip(*(n.inputs for n in inner)):
            _require_alike(reader, column, axis)
        inputs = tuple(v for n in inner for v in n.inputs)
        return Region(node.outputs, inputs, (node, *inner), (axis, axes.pop(), len(inner)))

    def target(self, op: Op, region: Region, *parts: Val) -> Any:
        outer, inner, rows = region.data
        columns = len(parts) // rows
        joined = [op.Concat(*parts[k::columns], axis=outer) for k in range(columns)]
        return op.Concat(*joined, axis=inner)


class PushBinaryThroughSplit(RegionRule, family="algebra"):
    """split(f(x, c)) -> f(split(x), split(c)), each part,  for f element by element.

    At most one operand is split at run time. Each of the other operands broadcasts along the axis, is constant, or is a
    concatenation of parts of these sizes.
    """

    anchors = ("Split",)
    reads_from = BROADCAST
    examples = (
        "agraph (float[N,5] x) => (float[N,2] y, float[N,3] z) { s = Constant<value_ints=[2, 3]>() "
        "c = Constant<value_floats=[1.0, 2.0, 3.0, 4.0, 5.0]>() a = Add(x, c) y, z = Split<axis=1>(a, s) }",
        "agraph (float[2,4,3] x, float[4,1] w) => (float[2,4,1] y, float[2,4,2] z) "
        "{ s = Constant<value_ints=[1, 2]>() a = Mul(w, x) y, z = Split<axis=-1>(a, s) }",
        "agraph (float[N,4] x, float[N,2] u) => (float[N,2] y, float[N,2] z) "
        "{ c = Concat<axis=1>(u, u) a = Sub(x, c) y, z = Split<axis=1, num_outputs=2>(a) }",
        "agraph (bool[1] x, float[4] u) => (float[3] y, float[1] z) { s = Constant<value_ints=[3, 1]>() "
        "c = Constant<value_float=1.0>() a = Where(x, c, u) y, z = Split(a, s) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner = made_by(reader, node.inputs[0], *BROADCAST)
        if inner is None or len(node.outputs) < 2:
            return None
        rank = rank_of(reader, node.inputs[0])
        axis = axis_of(node, rank)
        sizes = sizes_along(reader, node.outputs, axis)
        if sizes is None:
            return None
        total = sum(sizes)
        kinds: list[str] = []
        inputs: list[Value] = []
        matched = [node, inner]
        for v in inner.inputs:
            shape = reader.val(v).shape
            at = axis - (rank - len(shape))
            if at < 0 or (shape[at] == 1 and total != 1):
                kinds.append("shared")
                inputs.append(v)
                continue
            require(shape[at] == total, "an operand's size is not known")
            maker = reader.producer(v)
            parts = None
            if maker is not None and maker.op == "Concat" and not maker.const:
                parts = sizes_along(reader, maker.inputs, at) if axis_of(maker, len(shape)) == at else None
            if maker is not None and parts == sizes:
                kinds.append("parts")
                inputs += maker.inputs
                matched.append(maker)
            else:
                kinds.append("cut" if reader.is_const(v) else "split")
                inputs.append(v)
        profitable(kinds.count("split") < 2, "several operands would be split")
        profitable(read_once(reader, node.inputs[0]), "the function is read elsewhere")
        nodes = tuple({n.outputs[0]: n for n in matched}.values())
        data = (inner.op, inner.attrs, rank, axis, tuple(sizes), tuple(kinds))
        return Region(node.outputs, tuple(inputs), nodes, data)

    def target(self, op: Op, region: Region, *inputs: Val) -> Any:
        name, attrs, rank, axis, sizes, kinds = region.data
        cuts = list(pairwise([0, *accumulate(sizes)]))
        operands: list[list[Any]] = []
        at = 0
        for kind in kinds:
            v = inputs[at]
            own_axis = axis - (rank - v.rank)
            if kind == "parts":
                operands.append(list(inputs[at : at + len(sizes)]))
            elif kind == "shared":
                operands.append([v] * len(sizes))
            elif kind == "cut":
                operands.append([slice_constant(op, v, own_axis, a, b) for a, b in cuts])
            else:
                operands.append(list(op.Split(v, axis=own_axis, sizes=sizes)))
            at += len(sizes) if kind == "parts" else 1
        return [op[name](*arguments, attrs=attrs) for arguments in zip(*operands)]
