"""Rules by which attention and rotary embeddings, written with several operators, become ONNX's own operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rewrite_rules.axes import axis_of, compose, is_identity, perm_of, rank_of, same_dims
from rewrite_rules.elementwise import FLOAT, is_unary, keeps_shape, made_by, read_once, sum_of
from rewrite_rules.examples import graphs
from rewrite_rules.reading import between, carrier_of, number_of, only_reader, operands
from rewrite_rules.slices import piece
from xrlflow.ir import Dim, Node, Value
from xrlflow.rewrite import Op, Reader, Region, RegionRule, Val, profitable, require


def _factor(reader: Reader, value: Value) -> tuple[Value, float, Node] | None:
    """A value as x * c or x / c, with a constant c of one element that adds no dimension: x, the factor and the node;
    None if it is no such product.
    """
    node = reader.producer(value)
    if node is None or node.op not in ("Mul", "Div") or len(node.inputs) != 2:
        return None
    orders = ((0, 1), (1, 0)) if node.op == "Mul" else ((0, 1),)
    for x, c in orders:
        constant = node.inputs[c]
        if not reader.is_const(constant):
            continue
        array = reader.val(constant).array_or_none
        if (
            array is None
            or array.size != 1
            or not keeps_shape(reader.type(node.inputs[x]).shape, array.shape)
        ):
            continue
        number = float(array.reshape(()))
        if number > 0 and math.isfinite(number):
            return node.inputs[x], number if node.op == "Mul" else 1.0 / number, node
    return None


def _broadcasts(shape: tuple[Dim, ...], scores: tuple[Dim, ...]) -> bool:
    """Whether Attention takes a mask of this shape: its last dimension is that of the scores, and the others are 1 or
    equal.

    A mask with one row for all queries is repeated for each query, if the number of queries is known.
    """
    if not 2 <= len(shape) <= len(scores):
        return False
    (*batch, rows, columns), (*lead, queries, keys) = shape, scores
    if columns is None or columns != keys or rows is None:
        return False
    if rows != queries and (rows != 1 or not isinstance(queries, int)):
        return False
    return all(m == 1 or (m is not None and m == s) for m, s in zip(batch[::-1], lead[::-1]))


# The limits of a scale: float32 holds it, and its root, with all bits. ONNX Runtime multiplies queries and keys by the
# root.
_SMALLEST, _GREATEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_LEAST = float(np.finfo(np.float32).min)
_ABOVE_LEAST = float(np.nextafter(np.finfo(np.float32).min, np.float32(0)))


@dataclass(slots=True)
class _Passed:
    """The nodes between the softmax and the queries and keys, collected on the way up. Their `inner` values must be
    read once.
    """

    reader: Reader
    nodes: list[Node]
    inner: list[Value]
    masks: list[Value] = field(default_factory=list)
    scale: float = 1.0

    def unmasked(self, value: Value) -> Value:
        """The scores to which masks are added; the value itself if there are no masks."""
        while len(self.masks) < _MOST_MASKS:
            node = made_by(self.reader, value, "Add")
            scores = next((a for a, _ in operands(node) if _is_product(self.reader, a, _MOST_MASKS)), None)
            if node is None or scores is None:
                break
            a, b = node.inputs
            self.masks.append(b if scores == a else a)
            self._pass(node, value)
            value = scores
        return value

    def unscaled(self, value: Value) -> Value:
        """The value without the constants by which it is multiplied, in any number of steps."""
        while (factor := _factor(self.reader, value)) is not None:
            self._pass(factor[2], value)
            value, number, _ = factor
            self.scale *= number
        return value

    def product(self, value: Value) -> Node | None:
        node = self.reader.producer(value)
        if node is None or node.op != "MatMul":
            return None
        self._pass(node, value)
        return node

    def untransposed(self, value: Value, grouped: bool) -> tuple[_Keys, tuple[int, ...]]:
        """The keys, if a value is their transpose, and the permutation that brings them to [batch, heads, keys,
        size].
        """
        perm: tuple[int, ...] = (0, 1, 3, 2)
        keys = _Keys(value)
        while True:
            scaled = self.unscaled(keys.value)
            maker = self.reader.producer(scaled)
            if keys.repeats == 1 and maker is not None and maker.op == "Transpose" and not maker.const:
                require(self.reader.type(scaled).rank == 4, "the keys have another rank")
                perm = compose(perm_of(maker, 4), perm)
                self._pass(maker, scaled)
                keys = _Keys(maker.inputs[0])
            elif (
                grouped
                and keys.repeats == 1
                and perm[:2] == (0, 1)
                and (unrepeated := self.unrepeated(scaled)) is not None
            ):
                keys = unrepeated
            else:
                return replace(keys, value=scaled), perm

    def unrepeated(self, value: Value) -> _Keys | None:
        """The original keys or values, if each head of theirs is repeated: [b,h,1,n,d] -> [b,h,r,n,d] -> [b,h*r,n,d];
        else None.
        """
        expand = made_by(self.reader, value, "Reshape")
        expand = None if expand is None else made_by(self.reader, expand.inputs[0], "Expand")
        if expand is None:
            return None
        shape, parts = self.reader.type(value).shape, expand.types[0].shape
        before = self.reader.type(expand.inputs[0]).shape
        if shape is None or parts is None or len(shape) != 4 or len(parts) != 5:
            return None
        batch, heads, repeats, length, size = parts
        if not (isinstance(heads, int) and isinstance(repeats, int) and repeats > 1):
            return None
        # The length need not be compared. It follows from the number of elements, unless that is 0: a computed shape
        # without `allowzero` copies another dimension where the length is 0.
        if not same_dims(before, (batch, heads, 1, length, size)) or not same_dims(
            (shape[0], shape[1], shape[3]), (batch, heads * repeats, size)
        ):
            return None
        reshape = self.reader.producer(value)
        assert reshape is not None
        self._pass(reshape, value)
        self._pass(expand, reshape.inputs[0])
        return _Keys(expand.inputs[0], repeats)

    def _pass(self, node: Node, value: Value) -> None:
        self.nodes.append(node)
        self.inner.append(value)


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys or values: [b,h,n,d], or [b,h,1,n,d] if `repeats` heads of the queries share each head."""

    value: Value
    repeats: int = 1


# How many masks may be added to the scores one after the other: a bias for positions and a mask for padding.
_MOST_MASKS = 2


def _is_product(reader: Reader, value: Value, masks: int) -> bool:
    """Whether a value is a matrix product that may be scaled, and to which fewer than `masks` masks are added."""
    while (factor := _factor(reader, value)) is not None:
        value = factor[0]
    node = reader.producer(value)
    if node is None:
        return False
    added = masks > 1 and node.op == "Add" and any(_is_product(reader, v, masks - 1) for v in node.inputs)
    return node.op == "MatMul" or added


class _FuseAttention(RegionRule, family="attention"):
    """A rule that writes Attention for a softmax of scaled scores and the product of its result with the values."""

    proof = "numeric"
    relies_on = "softmax of scaled scores; several scales make one product, rounded to float32"
    # The element types for which ONNX Runtime has kernels of Attention.
    dtypes = FLOAT
    anchors = ("Softmax",)

    def find(self, reader: Reader, node: Node) -> Region | None:
        if reader.type(node.inputs[0]).rank != 4 or axis_of(node, 4, -1) != 3:
            return None
        weights = self._weights(reader, node)
        if weights is None:
            return None
        nodes, last = weights
        # First with shared heads of keys and values. If keys and values are not shared in the same way, without
        # sharing.
        return self._region(reader, nodes, last, True) or self._region(reader, nodes, last, False)

    @staticmethod
    def _weights(reader: Reader, node: Node) -> tuple[tuple[Node, ...], Node] | None:
        """The nodes that compute the softmax weights from the scores, and the product of the weights with the values;
        else None.
        """
        readers = reader.users(node.outputs[0])
        if len(readers) != 1 or readers[0].op != "MatMul" or readers[0].inputs[0] != node.outputs[0]:
            return None
        return (node,), readers[0]

    def _region(self, reader: Reader, weights: tuple[Node, ...], last: Node, grouped: bool) -> Region | None:
        softmax = weights[-1]
        passed = _Passed(reader, list(weights), [last.inputs[0]])
        scores = passed.unscaled(passed.unmasked(softmax.inputs[0]))
        product = passed.product(scores)
        if product is None:
            return None
        q = passed.unscaled(product.inputs[0])
        k, perm = passed.untransposed(product.inputs[1], grouped)
        v = (passed.unrepeated(last.inputs[1]) if grouped else None) or _Keys(last.inputs[1])
        if k.repeats != v.repeats:
            return None
        for value in passed.inner:
            profitable(read_once(reader, value), "an inner value is read elsewhere")
        require(_SMALLEST <= passed.scale <= _GREATEST, "the scales make none that is a float32")
        self._check(reader, q, k, v, perm, passed.masks)
        inputs = (q, k.value, v.value, *passed.masks)
        return Region(last.outputs, inputs, (last, *passed.nodes), (passed.scale, perm))

    @staticmethod
    def _check(
        reader: Reader, q: Value, k: _Keys, v: _Keys, perm: tuple[int, ...], masks: Sequence[Value]
    ) -> None:
        """Refuse shapes and types that Attention refuses or interprets differently."""
        shapes = [reader.type(q).shape, *(_once(reader.type(x.value).shape, x.repeats) for x in (k, v))]
        require(all(s is not None and len(s) == 4 for s in shapes), "not four dimensions")
        queries, before, values = (s or () for s in shapes)
        keys = tuple(before[p] for p in perm)
        batches = {queries[0], keys[0], values[0]}
        require(len(batches) == 1 and None not in batches, "the batch differs, or is not known")
        heads = {queries[1], _times(keys[1], k.repeats), _times(values[1], v.repeats)}
        require(len(heads) == 1 and None not in heads, "the heads differ, or are not known")
        require(isinstance(queries[1], int) and queries[1] > 0, "the number of heads is not known")
        require(
            isinstance(queries[3], int) and queries[3] > 0 and keys[3] == queries[3],
            "the size of a head is not known",
        )
        profitable(isinstance(values[3], int) and values[3] > 0, "the size of a value is not known")
        scores = (queries[0], queries[1], queries[2], keys[2])
        for mask in masks:
            shape = reader.type(mask).shape
            require(shape is not None and _broadcasts(shape, scores), "the mask does not fit")

    def target(self, op: Op, region: Region, q: Val, k: Val, v: Val, *masks: Val) -> Any:
        scale, perm = region.data
        k, v = (op.Squeeze(x, [2]) if x.rank == 5 else x for x in (k, v))
        keys = k if is_identity(perm) else op.Transpose(k, perm=perm)
        mask = None
        for other in reversed(masks):
            mask = sum_of(op, other, mask)
        if mask is not None:
            # ONNX Runtime gives zeros for a fully masked row. It also takes the least float for a mask; a softmax gives
            # equal weights to a row of such numbers. The next greater float masks as well, and ONNX Runtime does not
            # take it for a mask.
            mask = op.Where(op.Equal(mask, _LEAST), np.asarray(_ABOVE_LEAST, np.float32), mask)
        if mask is not None and mask.shape[-2] != q.shape[2]:
            mask = op.Expand(mask, [q.size(2), 1])
        return op.Attention(q, keys, v, mask, scale=float(np.float32(scale)))


def _once(shape: tuple[Dim, ...] | None, repeats: int) -> tuple[Dim, ...] | None:
    """The shape of keys or values before they are repeated: for [b,h,1,n,d] it is [b,h,n,d]."""
    return shape if shape is None or repeats == 1 else shape[:2] + shape[3:]


def _times(heads: Dim, repeats: int) -> Dim:
    return heads * repeats if isinstance(heads, int) else heads


_NEAR_MISSES = (
    "(float[N,2,3,4] q, float[5,4] k, float[N,2,5,6] v) => (float[N,2,3,6] y) { t = Transpose(k) "
    "a = MatMul(q, t) p = Softmax(a) y = MatMul(p, v) }",
    "(float[N,2,3,0] q, float[N,2,5,0] k, float[N,2,5,6] v) => (float[N,2,3,6] y) "
    "{ t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) s = Mul(a, 0.5) p = Softmax(s) y = MatMul(p, v) }",
    "(float[N,2,3,4] q, float[N,2,5,4] k, float[N,2,5,0] v) => (float[N,2,3,0] y) "
    "{ t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) s = Mul(a, 0.5) p = Softmax(s) y = MatMul(p, v) }",
    "(float[N,2,3,4] q, float[N,2,5,4] k, float[N,2,5,D] v) => (float[N,2,3,D] y) "
    "{ t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) s = Mul(a, 0.5) p = Softmax(s) y = MatMul(p, v) }",
    "(float[N,2,3,4] q, float[N,2,5,4] k, float[N,2,5,6] v) => (float[N,2,3,6] y) "
    "{ t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) s = Mul(a, -0.5) p = Softmax(s) y = MatMul(p, v) }",
    "(float[N,2,3,4] q, float[N,2,5,4] k, float[N,2,5,6] v) => (float[N,2,3,6] y) "
    "{ t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) s = Mul(a, 0.0) p = Softmax(s) y = MatMul(p, v) }",
)


def _guarded(text: str) -> str:
    """The text of a graph with a guard against NaN inserted between the softmax p and the product."""
    return text.replace("y = MatMul(p, ", "n = IsNaN(p) w = Where(n, 0.0, p) y = MatMul(w, ")


class FuseAttention(_FuseAttention):
    """softmax(q @ transpose(k) * scale + mask) @ v -> attention(q, k, v, mask), for four dimensions.

    The scale may multiply or divide q, k (before or after its transpose) or the scores. There may be no mask, or two
    that are added one after the other. q, k and v have the same batch. They also have the same number of heads, unless
    heads of k and v are repeated: then several heads of q share each.
    """

    may_remove_nonfinite = True  # for a row of the mask that is nothing but -inf: zeros instead of NaN

    examples = graphs(
        "(float[N,2,3,4] q, float[N,2,5,4] k, float[N,2,5,6] v, float[1,1,3,5] m) => (float[N,2,3,6] y) "
        "{ t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) c = Constant<value_float=0.5>() s = Mul(a, c) "
        "b = Add(s, m) p = Softmax(b) y = MatMul(p, v) }",
        "(float[N,2,3,4] q, float[N,5,2,4] k, float[N,2,5,4] v) => (float[N,2,3,4] y) "
        "{ c = Constant<value_float=0.7>() r = Mul(q, c) t = Transpose<perm=[0,2,3,1]>(k) u = Mul(t, c) "
        "a = MatMul(r, u) p = Softmax<axis=3>(a) y = MatMul(p, v) }",
        "(float[N,2,3,4] q, float[N,2,5,4] k, float[N,2,5,6] v) => (float[N,2,3,6] y) <float[1,1,1,1] c = {0.5}> "
        "{ t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) s = Mul(a, c) p = Softmax(s) y = MatMul(p, v) }",
        "(float[N,2,3,4] q, float[N,2,5,4] k, float[N,2,5,6] v, float[2,3,5] m, float[1,1,1,5] l) "
        "=> (float[N,2,3,6] y) { t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) s = Mul(a, 0.5) b = Add(s, m) "
        "c = Add(l, b) p = Softmax(c) y = MatMul(p, v) }",
        "(float[N,4,3,4] q, float[N,2,5,4] k, float[N,2,5,6] v, float[3,5] m) => (float[N,4,3,6] y) "
        "{ j = Unsqueeze(k, [2]) e = Expand(j, [1,1,2,1,1]) f = Reshape(e, [-1,4,5,4]) "
        "t = Transpose<perm=[0,1,3,2]>(f) a = MatMul(q, t) s = Mul(a, 0.5) b = Add(s, m) p = Softmax(b) "
        "l = Unsqueeze(v, [2]) g = Expand(l, [1,1,2,1,1]) h = Reshape(g, [-1,4,5,6]) y = MatMul(p, h) }",
        "(float[N,4,3,4] q, float[N,2,T,4] k, float[N,2,T,6] v, float[3,T] m) => (float[N,4,3,6] y) "
        "{ j = Unsqueeze(k, [2]) e = Expand(j, [1,1,2,1,1]) a0 = Shape<end=1>(k) b0 = Shape<start=2>(k) "
        "c0 = Concat<axis=0>(a0, [4], b0) f = Reshape(e, c0) t = Transpose<perm=[0,1,3,2]>(f) a = MatMul(q, t) "
        "s = Mul(a, 0.5) b = Add(s, m) p = Softmax(b) l = Unsqueeze(v, [2]) g = Expand(l, [1,1,2,1,1]) "
        "b1 = Shape<start=2>(v) c1 = Concat<axis=0>(a0, [4], b1) h = Reshape(g, c1) y = MatMul(p, h) }",
    )
    near_misses = graphs(*_NEAR_MISSES)


class FuseGuardedAttention(_FuseAttention):
    """where(isnan(p), 0, p) @ v -> where(isnan(y), 0 @ v, y)  for p = softmax(...), y = attention(q, k, v, mask).

    PyTorch's exporter writes this guard for rows that are masked everywhere. Attention gives zeros for such rows, too.
    But if q, k or the scores are not finite, Attention gives NaN, while the guard gives zeros. So the right side
    replaces NaN by 0 @ v.
    """

    examples = graphs(
        "(float[N,2,3,4] q, float[N,2,5,4] k, float[N,2,5,6] v, float[1,1,3,5] m) => (float[N,2,3,6] y) "
        "{ t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) s = Mul(a, 0.5) b = Add(s, m) p = Softmax(b) "
        "n = IsNaN(p) w = Where(n, 0.0, p) y = MatMul(w, v) }",
        "(float[N,4,3,4] q, float[N,2,5,4] k, float[N,2,5,6] v) => (float[N,4,3,6] y) "
        "{ j = Unsqueeze(k, [2]) e = Expand(j, [1,1,2,1,1]) f = Reshape(e, [-1,4,5,4]) "
        "t = Transpose<perm=[0,1,3,2]>(f) a = MatMul(q, t) s = Mul(a, 0.5) p = Softmax(s) n = IsNaN(p) "
        "w = Where(n, 0.0, p) l = Unsqueeze(v, [2]) g = Expand(l, [1,1,2,1,1]) h = Reshape(g, [-1,4,5,6]) "
        "y = MatMul(w, h) }",
        "(float[2,2,3,4] q, float[2,2,T,4] k, float[2,2,T,6] v, float[3,T] m) => (float[2,2,3,6] y) "
        "{ t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) s = Mul(a, 0.5) b = Add(s, m) p = Softmax(b) "
        "n = IsNaN(p) w = Where(n, 0.0, p) y = MatMul(w, v) }",
    )
    near_misses = graphs(
        "(float[N,2,3,4] q, float[N,2,5,4] k, float[N,2,5,6] v, float[1,1,3,5] m) => (float[N,2,3,6] y) "
        "{ t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) s = Mul(a, 0.5) b = Add(s, m) p = Softmax(b) "
        "n = IsNaN(p) w = Where(n, 1.0, p) y = MatMul(w, v) }",
        "(float[N,2,3,4] q, float[N,2,5,4] k, float[N,2,5,6] v, float[N,2,3,5] z) => (float[N,2,3,6] y) "
        "{ t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) s = Mul(a, 0.5) p = Softmax(s) r = Sqrt(z) "
        "n = IsNaN(r) w = Where(n, 0.0, p) y = MatMul(w, v) }",
        *map(_guarded, _NEAR_MISSES),
    )

    @staticmethod
    def _weights(reader: Reader, node: Node) -> tuple[tuple[Node, ...], Node] | None:
        weights = node.outputs[0]
        readers = reader.users(weights)
        guard = next((r for r in readers if r.op == "Where" and r.inputs[2] == weights), None)
        if guard is None:
            return None
        test = made_by(reader, guard.inputs[0], "IsNaN")
        if test is None:
            return None
        require(test.inputs[0] == weights, "it is no guard against NaN")
        require(number_of(reader, guard.inputs[1], weights) == 0.0, "the guard does not give zeros")
        inside = all(r in (guard, test) for r in readers) and not reader.is_output(weights)
        profitable(inside and read_once(reader, test.outputs[0]), "an inner value is read elsewhere")
        last = only_reader(reader, guard.outputs[0])
        if last is None or last.op != "MatMul" or last.inputs[0] != guard.outputs[0]:
            return None
        return (guard, test, node), last

    def target(self, op: Op, region: Region, q: Val, k: Val, v: Val, *masks: Val) -> Any:
        y = super().target(op, region, q, k, v, *masks)
        keys, size = v.shape[-2], v.size(v.rank - 1)
        if all(isinstance(size, int) for size in v.shape):  # else a batch of the product may be empty
            nothing = op.MatMul(np.zeros((1, keys), np.float32), v)
        else:
            # ONNX Runtime 1.31 does not reduce an empty tensor along a negative axis.
            nothing = op.ReduceSum(op.Mul(v, 0.0), [v.rank - 2], keepdims=1)
        if v.rank == 5:
            heads = q.size(1)
            nothing = op.Expand(nothing, [1, 1, heads // v.size(1), 1, 1])
            nothing = op.Reshape(nothing, [0, heads, 1, size])
        return op.Where(op.IsNaN(y), nothing, y)


# Rotary embeddings


def _repeats_half(reader: Reader, value: Value) -> bool:
    """Whether the last dimension of a value, which is even, consists of the same half twice: functions of
    concat(f, f).
    """
    while True:
        node = reader.producer(value)
        if node is None:
            const = reader.const(value)
            if const is None:
                return False
            first, second = np.split(const.numpy(), 2, axis=-1)  # a table of all positions may be large
            return bool(np.array_equal(first, second))
        if node.op == "Concat":
            rank = rank_of(reader, value)
            return (
                len(node.inputs) == 2 and node.inputs[0] == node.inputs[1] and axis_of(node, rank) == rank - 1
            )
        if node.op == "Mul":
            scaled = [a for a, c in operands(node) if number_of(reader, c, a) is not None]
            if not scaled:
                return False
            value = scaled[0]
        elif (
            node.op == "Unsqueeze" or is_unary(node) or _takes_rows(reader, node)
        ):  # a new 1 is not the last one
            value = node.inputs[0]
        else:
            return False


def _takes_rows(reader: Reader, node: Node) -> bool:
    """Whether a node is a Gather of rows of a table, so that its last dimension is the table's."""
    rank = reader.type(node.inputs[0]).rank if node.op == "Gather" else None
    return rank is not None and axis_of(node, rank, 0) < rank - 1


class FuseRotaryEmbedding(RegionRule, family="idioms"):
    """x * [c|c] + [-x2|x1] * [s|s] -> rotaryembedding(x, c, s)  for x = [x1|x2] of four dimensions.

    The function `rotate_half` of the transformers library writes it like this.
    """

    dtypes = FLOAT
    anchors = ("Add",)
    reads_from = ("Mul",)
    examples = graphs(
        "(float[2,3,5,4] x, float[2,5,2] f) => (float[2,3,5,4] y) { d = Concat<axis=-1>(f, f) a = Cos(d) b = Sin(d) "
        "c = Unsqueeze(a, [1]) s = Unsqueeze(b, [1]) p = Slice(x, [0], [2], [3]) "
        "q = Slice(x, [2], [9223372036854775807], [3]) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, c) "
        "v = Mul(r, s) y = Add(u, v) }",
        "(float[3] b, float[N,3,5,6] z, float[1,5,3] f, float[N,5,3] g) => (float[N,3,5,6] y) { x = Mul(z, 2.0) "
        "d = Concat<axis=-1>(f, f) t = Concat<axis=-1>(g, g) c = Unsqueeze(d, [1]) s = Unsqueeze(t, [1]) "
        "p, q = Split<axis=-1>(x, [3, 3]) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) "
        "y = Add(u, v) }",
        "(float[2,3,5,4] x, float[1,5,2] f) => (float[2,3,5,4] y) { d = Concat<axis=-1>(f, f) a = Cos(d) b = Sin(d) "
        "c = Unsqueeze(a, [1]) s = Unsqueeze(b, [1]) p, q = Split<axis=-1>(x, [2, 2]) n = Neg(q) "
        "r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "(float[N,3,5,4] x, float[N,5,2] f, float[N,5,2] g) => (float[N,3,5,4] y) { d = Concat<axis=2>(f, f) "
        "t = Concat<axis=2>(g, g) c = Unsqueeze(d, [1]) s = Unsqueeze(t, [1]) p, q = Split<axis=-1>(x, [2, 2]) "
        "n = Neg(q) r = Concat<axis=3>(n, p) v = Mul(s, r) u = Mul(c, x) y = Add(v, u) }",
        "(float[2,3,5,4] x, float[2,5,2] f) => (float[2,3,5,4] y) { d = Concat<axis=-1>(f, f) a = Cos(d) "
        "j = Mul(a, 0.5) b = Sin(d) l = Mul(0.5, b) c = Unsqueeze(j, [1]) s = Unsqueeze(l, [1]) p, q "
        "= Split<axis=-1>(x, [2, 2]) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "(float[1,3,2,4] x) => (float[1,3,2,4] y) <float[1,1,2,4] c = {1,2,1,2,3,4,3,4}, "
        "float[1,1,2,4] s = {4,3,4,3,2,1,2,1}> { p, q = Split<axis=-1>(x, [2, 2]) n = Neg(q) "
        "r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "(float[2,3,2,4] x, int64[2,2] i) => (float[2,3,2,4] y) <float[4,4] a = {1,2,1,2,3,4,3,4,5,6,5,6,1,1,1,1}, "
        "float[4,4] b = {4,3,4,3,2,1,2,1,7,8,7,8,2,2,2,2}> { d = Gather(a, i) e = Gather(b, i) c = Unsqueeze(d, [1]) "
        "s = Unsqueeze(e, [1]) p, q = Split<axis=-1>(x, [2, 2]) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, c) "
        "v = Mul(r, s) y = Add(u, v) }",
    )
    near_misses = graphs(
        "(float[1,3,2,4] x, int64[4] i) => (float[1,3,2,4] y) <float[1,2,4] a = {1,2,1,2,3,4,3,4}> "
        "{ d = Gather<axis=2>(a, i) c = Unsqueeze(d, [1]) p, q = Split<axis=-1>(x, [2, 2]) n = Neg(q) "
        "r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, c) y = Add(u, v) }",
        "(float[2,3,5,4] x, float[2,5,2] f, float[2,5,2] g) => (float[2,3,5,4] y) { d = Concat<axis=-1>(f, g) "
        "a = Cos(d) b = Sin(d) c = Unsqueeze(a, [1]) s = Unsqueeze(b, [1]) p, q = Split<axis=-1>(x, [2, 2]) "
        "n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "(float[1,3,2,4] x) => (float[1,3,2,4] y) <float[1,1,2,4] c = {1,2,3,4,5,6,7,8}, "
        "float[1,1,2,4] s = {4,3,4,3,2,1,2,1}> { p, q = Split<axis=-1>(x, [2, 2]) n = Neg(q) "
        "r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "(float[2,3,5,4] x, float[2,1,5,4] c, float[2,1,5,4] s) => (float[2,3,5,4] y) { p, q "
        "= Split<axis=-1>(x, [2, 2]) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "(float[2,3,5,4] x, float[2,1,5,4] c, float[2,1,5,4] s) => (float[2,3,5,4] y) { a = Mul(c, s) b = Mul(s, c) "
        "p, q = Split<axis=-1>(x, [2, 2]) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, a) v = Mul(r, b) "
        "y = Add(u, v) }",
        "(float[2,3,5,4] x, float[2,1,5,4] c, float[2,1,5,4] s) => (float[2,3,5,4] y) { a = Softmax(c) "
        "b = Softmax(s) p, q = Split<axis=-1>(x, [2, 2]) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, a) "
        "v = Mul(r, b) y = Add(u, v) }",
        "(float[2,3,5,4] x, float[2,5,2] f, float[2,5,4] w) => (float[2,3,5,4] y) { d0 = Concat<axis=-1>(f, f) "
        "d = Mul(d0, w) a = Cos(d) b = Sin(d) c = Unsqueeze(a, [1]) s = Unsqueeze(b, [1]) "
        "p = Slice(x, [0], [2], [3]) q = Slice(x, [2], [9223372036854775807], [3]) n = Neg(q) "
        "r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "(float[2,3,5,4] x, float[2,5,2] f, float[2,5,4] w) => (float[2,3,5,4] y) { d0 = Concat<axis=-1>(f, f) "
        "d = Add(d0, w) a = Cos(d) b = Sin(d) c = Unsqueeze(a, [1]) s = Unsqueeze(b, [1]) "
        "p = Slice(x, [0], [2], [3]) q = Slice(x, [2], [9223372036854775807], [3]) n = Neg(q) "
        "r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "(float[2,3,5,4] x, float[2,5,2] f, float[2,3,5,4] t) => (float[2,3,5,4] y) { d0 = Concat<axis=-1>(f, f) "
        "d = Identity(d0) a = Cos(d) b = Sin(d) c = Unsqueeze(a, [1]) s = Unsqueeze(b, [1]) "
        "p = Slice(x, [0], [2], [3]) q = Slice(t, [2], [9223372036854775807], [3]) n = Neg(q) "
        "r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        if node.types[0].rank != 4:
            return None
        for straight, crossed in operands(node):
            for rotated, sine in operands(made_by(reader, crossed, "Mul")):
                x = self._rotated(reader, rotated)
                if x is None:
                    continue
                for same, cosine in operands(made_by(reader, straight, "Mul")):
                    if same == x:
                        self._check(reader, x, cosine, sine)
                        inputs = (x, cosine, sine)
                        inside = between(reader, node.outputs[0], inputs)
                        batch = _expanded_batch(reader, x, (cosine, sine))
                        return Region(
                            node.outputs, inputs if batch is None else (*inputs, batch[0]), inside, batch
                        )
        return None

    @staticmethod
    def _rotated(reader: Reader, value: Value) -> Value | None:
        """The value [x1|x2], if the given value is [-x2|x1]; else None."""
        concat = made_by(reader, value, "Concat")
        if concat is None or len(concat.inputs) != 2 or axis_of(concat, 4) != 3:
            return None
        neg = made_by(reader, concat.inputs[0], "Neg")
        first = piece(reader, concat.inputs[1])
        second = None if neg is None else piece(reader, neg.inputs[0])
        if first is None or second is None or not first.keeps_axis or not second.keeps_axis:
            return None
        halves = (first.start, first.length, second.start) == (0, second.length, first.length)
        same = first.source == second.source and first.axis == second.axis == 3
        shape = reader.type(first.source).shape
        return (
            first.source if same and halves and shape is not None and shape[3] == 2 * first.length else None
        )

    @staticmethod
    def _check(reader: Reader, x: Value, cosine: Value, sine: Value) -> None:
        """Refuse angles that RotaryEmbedding does not take."""
        shape = reader.type(x).shape or ()
        for angle in (cosine, sine):
            batch = (reader.type(angle).shape or (None,))[0]
            expected = (1 if batch == 1 else shape[0], 1, shape[2], shape[3])
            require(
                same_dims(reader.type(angle).shape, expected), "the angles are not those of each position"
            )
            require(_repeats_half(reader, angle), "the two halves have other angles")

    def target(self, op: Op, region: Region, x: Val, cosine: Val, sine: Val, *sized: Val) -> Any:
        half = x.size(3) // 2
        tables = [op.Squeeze(op.Slice(v, [0], [half], [3]), [1]) for v in (cosine, sine)]
        if region.data is not None:
            batch, axis = x.shape[0], region.data[1]
            known = np.array([batch, 1, 1]) if isinstance(batch, int) else None
            shape = (
                op.Concat(op.Shape(*sized, start=axis, end=axis + 1), [1, 1], axis=0)
                if known is None
                else known
            )
            tables = [op.Expand(v, shape) if v.shape[0] == 1 != batch else v for v in tables]
        return op.RotaryEmbedding(x, *tables)


def _expanded_batch(reader: Reader, x: Value, angles: Sequence[Value]) -> tuple[Value, int] | None:
    """A value and its axis with the size of x's batch, to which angles of a batch of 1 must be expanded; None if none
    has to be.
    """
    batch = (reader.type(x).shape or (None,))[0]
    if batch == 1 or all((reader.type(a).shape or (None,))[0] != 1 for a in angles):
        return None
    return carrier_of(reader, x, 0)
