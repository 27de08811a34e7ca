"""Scaled dot-product attention and rotary embeddings, spelt out, to ONNX's own operators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from rewrite_rules.axes import axis_of, compose, is_identity, perm_of, rank_of, same_dims
from rewrite_rules.elementwise import FLOAT, is_unary, keeps_shape, made_by, read_once
from rewrite_rules.examples import graphs
from rewrite_rules.reading import between, number_of, operands
from rewrite_rules.slices import piece
from xrlflow.ir import Dim, Node, Value
from xrlflow.rewrite import Op, Reader, Region, RegionRule, Val, profitable, require


def _factor(reader: Reader, value: Value) -> tuple[Value, float, Node] | None:
    """A value as x * c or x / c, with c a constant of one element that adds no dimension."""
    node = reader.producer(value)
    if node is None or node.op not in ("Mul", "Div") or len(node.inputs) != 2:
        return None
    places = ((0, 1), (1, 0)) if node.op == "Mul" else ((0, 1),)
    for x, c in places:
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
    """Whether a mask is one that Attention takes: the last dimension that of the scores, others 1 or equal.

    One row for all queries is repeated for each, if their number is known.
    """
    if not 2 <= len(shape) <= len(scores):
        return False
    (*others, rows, columns), (*lead, queries, keys) = shape, scores
    if columns is None or columns != keys or rows is None:
        return False
    if rows != queries and (rows != 1 or not isinstance(queries, int)):
        return False
    return all(m == 1 or (m is not None and m == s) for m, s in zip(others[::-1], lead[::-1]))


_NEARLY_ONE = float(np.nextafter(np.float32(1), np.float32(0)))


class FuseAttention(RegionRule, family="attention"):
    """softmax(q @ transpose(k) * scale + mask) @ v -> attention(q, k, v, mask), for four dimensions.

    The scale may be a product or a quotient, of q, of k (before or after its transpose), of the scores; the mask
    may be missing. Heads and batch must be the same in q, k and v.
    """

    nonempty = True
    may_remove_nonfinite = True  # a row of the mask that is nothing but -inf: zeros instead of NaN

    # Only a row of nothing but the least float shows them, which the proof does not draw (the rule's own tests do).
    survivors: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("omit Mul (call 0)", "omit Mul (call 1)"), "the proof draws no row of nothing but the least float"
    )

    proof = "numeric"
    relies_on = "softmax of scaled scores; several scales make one product, rounded to float32"
    # ONNX Runtime has kernels for these.
    dtypes = FLOAT
    anchors = ("Softmax",)
    examples = graphs(
        "(float[N,2,3,4] q, float[N,2,5,4] k, float[N,2,5,6] v, float[1,1,3,5] m) => (float[N,2,3,6] y) "
        "{ t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) c = Constant<value_float=0.5>() s = Mul(a, c) "
        "b = Add(s, m) p = Softmax(b) y = MatMul(p, v) }",
        "(float[N,2,3,4] q, float[N,5,2,4] k, float[N,2,5,4] v) => (float[N,2,3,4] y) "
        "{ c = Constant<value_float=0.7>() r = Mul(q, c) t = Transpose<perm=[0,2,3,1]>(k) u = Mul(t, c) "
        "a = MatMul(r, u) p = Softmax<axis=3>(a) y = MatMul(p, v) }",
        "(float[N,2,3,4] q, float[N,2,5,4] k, float[N,2,5,6] v) => (float[N,2,3,6] y) <float[1,1,1,1] c = {0.5}> "
        "{ t = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, t) s = Mul(a, c) p = Softmax(s) y = MatMul(p, v) }",
    )
    near_misses = graphs(
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

    def find(self, reader: Reader, node: Node) -> Region | None:
        if reader.type(node.inputs[0]).rank != 4 or axis_of(node, 4, -1) != 3:
            return None
        nodes = [node]
        # After the softmax: the product with the values.
        readers = reader.users(node.outputs[0])
        if len(readers) != 1 or readers[0].op != "MatMul" or readers[0].inputs[0] != node.outputs[0]:
            return None
        last = readers[0]
        v = last.inputs[1]
        inner = [node.outputs[0]]
        # Before it: the mask, the scale, the product of queries and keys.
        at, mask = node.inputs[0], None
        above = reader.producer(at)
        if above is not None and above.op == "Add":
            for scores, other in (above.inputs, above.inputs[::-1]):
                if self._product(reader, scores) is not None:
                    nodes.append(above)
                    inner.append(at)
                    at, mask = scores, other
                    break
        scale = 1.0
        while (found := _factor(reader, at)) is not None:
            inner.append(at)
            at, number, scaler = found
            scale *= number
            nodes.append(scaler)
        product = reader.producer(at)
        if product is None or product.op != "MatMul":
            return None
        nodes.append(product)
        inner.append(at)
        q, kt = product.inputs
        while (found := _factor(reader, q)) is not None:
            q, number, scaler = found
            scale *= number
            nodes.append(scaler)
        # The keys: transposed, before or after their scale.
        perm: tuple[int, ...] = (0, 1, 3, 2)
        while True:
            maker = reader.producer(kt)
            if (found := _factor(reader, kt)) is not None:
                kt, number, scaler = found
                scale *= number
                nodes.append(scaler)
            elif maker is not None and maker.op == "Transpose" and not maker.const:
                require(reader.type(kt).rank == 4, "the keys have another rank")
                perm = compose(perm_of(maker, 4), perm)
                nodes.append(maker)
                kt = maker.inputs[0]
            else:
                break
        for value in inner:
            profitable(read_once(reader, value), "an inner value is read elsewhere")
        self._check(reader, q, kt, v, perm, mask)
        inputs = (q, kt, v) if mask is None else (q, kt, v, mask)
        return Region(last.outputs, inputs, (last, *nodes), (scale, perm))

    @staticmethod
    def _product(reader: Reader, value: Value) -> Node | None:
        """The matrix product whose scaled result a value is."""
        while (found := _factor(reader, value)) is not None:
            value = found[0]
        node = reader.producer(value)
        return node if node is not None and node.op == "MatMul" else None

    @staticmethod
    def _check(
        reader: Reader, q: Value, k: Value, v: Value, perm: tuple[int, ...], mask: Value | None
    ) -> None:
        """Refuse shapes and types that Attention refuses or interprets differently."""
        shapes = [reader.type(x).shape for x in (q, k, v)]
        require(all(s is not None and len(s) == 4 for s in shapes), "not four dimensions")
        queries, before, values = (s or () for s in shapes)
        keys = tuple(before[p] for p in perm)
        for place, same in ((0, "batch"), (1, "heads")):
            dims = {queries[place], keys[place], values[place]}
            require(len(dims) == 1 and None not in dims, f"the {same} differ, or are not known")
        require(isinstance(queries[1], int) and queries[1] > 0, "the number of heads is not known")
        require(
            isinstance(queries[3], int) and queries[3] > 0 and keys[3] == queries[3],
            "the size of a head is not known",
        )
        profitable(isinstance(values[3], int) and values[3] > 0, "the size of a value is not known")
        if mask is not None:
            scores = (queries[0], queries[1], queries[2], keys[2])
            shape = reader.type(mask).shape
            require(shape is not None and _broadcasts(shape, scores), "the mask does not fit")

    def target(self, op: Op, region: Region, q: Val, k: Val, v: Val, mask: Val | None = None) -> Any:
        scale, perm = region.data
        keys = k if is_identity(perm) else op.Transpose(k, perm=perm)
        if mask is not None:
            # ONNX Runtime gives zeros for a fully masked row. It also treats the least float as a mask, for which a
            # softmax gives equal weights. One bit less masks the same, and keeps -inf and 0.
            mask = op.Mul(mask, _NEARLY_ONE)
        if mask is not None and mask.shape[-2] != q.shape[2]:
            mask = op.Expand(mask, [q.size(2), 1])
        return op.Attention(q, keys, v, mask, scale=float(np.float32(scale)))


# Rotary embeddings, nearest neighbours


def _twice(reader: Reader, value: Value) -> bool:
    """Whether the last dimension of a value, which is even, is the same half twice: functions of concat(f, f)."""
    while True:
        node = reader.producer(value)
        if node is None:
            array = reader.val(value).array_or_none if reader.is_const(value) else None
            if array is None:
                return False
            first, second = np.split(array, 2, axis=-1)
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
        elif node.op == "Unsqueeze" or is_unary(node):  # (a dimension of 1 is not the last one)
            value = node.inputs[0]
        else:
            return False


class FuseRotaryEmbedding(RegionRule, family="idioms"):
    """x * [c|c] + [-x2|x1] * [s|s] -> rotaryembedding(x, c, s)  for x = [x1|x2] of four dimensions.

    `rotate_half` of the transformers library writes it so.
    """

    dtypes = FLOAT
    anchors = ("Add",)
    reads_from = ("Mul",)
    examples = graphs(
        "(float[2,3,5,4] x, float[2,5,2] f) => (float[2,3,5,4] y) { d = Concat<axis=-1>(f, f) a = Cos(d) b = Sin(d) "
        "c = Unsqueeze(a, [1]) s = Unsqueeze(b, [1]) p = Slice(x, [0], [2], [3]) "
        "q = Slice(x, [2], [9223372036854775807], [3]) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, c) "
        "v = Mul(r, s) y = Add(u, v) }",
        "(float[N,3,5,4] x, float[N,5,2] f, float[N,5,2] g) => (float[N,3,5,4] y) { d = Concat<axis=2>(f, f) "
        "t = Concat<axis=2>(g, g) c = Unsqueeze(d, [1]) s = Unsqueeze(t, [1]) p, q = Split<axis=-1>(x, [2, 2]) "
        "n = Neg(q) r = Concat<axis=3>(n, p) v = Mul(s, r) u = Mul(c, x) y = Add(v, u) }",
        "(float[2,3,5,4] x, float[2,5,2] f) => (float[2,3,5,4] y) { d = Concat<axis=-1>(f, f) a = Cos(d) "
        "j = Mul(a, 0.5) b = Sin(d) l = Mul(0.5, b) c = Unsqueeze(j, [1]) s = Unsqueeze(l, [1]) p, q "
        "= Split<axis=-1>(x, [2, 2]) n = Neg(q) r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
        "(float[1,3,2,4] x) => (float[1,3,2,4] y) <float[1,1,2,4] c = {1,2,1,2,3,4,3,4}, "
        "float[1,1,2,4] s = {4,3,4,3,2,1,2,1}> { p, q = Split<axis=-1>(x, [2, 2]) n = Neg(q) "
        "r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }",
    )
    near_misses = graphs(
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
            for turned, sine in operands(made_by(reader, crossed, "Mul")):
                x = self._turned(reader, turned)
                if x is None:
                    continue
                for same, cosine in operands(made_by(reader, straight, "Mul")):
                    if same == x:
                        self._check(reader, x, cosine, sine)
                        inputs = (x, cosine, sine)
                        return Region(node.outputs, inputs, between(reader, node.outputs[0], inputs))
        return None

    @staticmethod
    def _turned(reader: Reader, value: Value) -> Value | None:
        """[x1|x2], if a value is [-x2|x1]."""
        concat = made_by(reader, value, "Concat")
        if concat is None or len(concat.inputs) != 2 or axis_of(concat, 4) != 3:
            return None
        neg = made_by(reader, concat.inputs[0], "Neg")
        first = piece(reader, concat.inputs[1])
        second = None if neg is None else piece(reader, neg.inputs[0])
        if first is None or second is None or not first.kept or not second.kept:
            return None
        halves = (first.start, first.length, second.start) == (0, second.length, first.length)
        same = first.source == second.source and first.axis == second.axis == 3
        whole = reader.type(first.source).shape
        return (
            first.source if same and halves and whole is not None and whole[3] == 2 * first.length else None
        )

    @staticmethod
    def _check(reader: Reader, x: Value, cosine: Value, sine: Value) -> None:
        """Refuse angles that RotaryEmbedding does not take."""
        shape = reader.type(x).shape or ()
        wanted = (shape[0], 1, shape[2], shape[3])
        for angle in (cosine, sine):
            require(same_dims(reader.type(angle).shape, wanted), "the angles are not those of each position")
            require(_twice(reader, angle), "the two halves have other angles")

    def target(self, op: Op, region: Region, x: Val, cosine: Val, sine: Val) -> Any:
        half = x.size(3) // 2
        tables = [op.Squeeze(op.Slice(v, [0], [half], [3]), [1]) for v in (cosine, sine)]
        return op.RotaryEmbedding(x, *tables)
