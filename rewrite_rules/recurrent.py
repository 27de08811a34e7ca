"""What unrolled recurrent cells do in every step and could do once, or not at all."""

from __future__ import annotations

from typing import Any

from rewrite_rules.elementwise import made_by
from xrlflow.ir import FLOATS, Node, Value
from xrlflow.rewrite import Op, Reader, Region, RegionRule, Rule, Val, require, worthwhile


class FuseSumOfGemms(Rule, family="recurrent"):
    """gemm(x, w, b) + gemm(y, v, c) -> gemm(x, w, gemm(y, v, b + c))  with b and c constant rows.

    The addition becomes the start of the second product's accumulation.
    """

    shapes = "x[m,k] w[n,k] b[n]:const y[m,j] v[n,j] c[n]:const"
    dtypes = FLOATS

    def source(self, op: Op, x: Val, w: Val, b: Val, y: Val, v: Val, c: Val) -> Any:
        return op.Add(op.Gemm(x, w, b, transB=1), op.Gemm(y, v, c, transB=1))

    def target(self, op: Op, x: Val, w: Val, b: Val, y: Val, v: Val, c: Val) -> Any:
        return op.Gemm(x, w, op.Gemm(y, v, op.Add(b, c), transB=1), transB=1)


def _of_two_rows(example: str, states: str, bias: str) -> str:
    """The first example of `FuseStepsIntoGemms` with two rows a step, other states and another bias."""
    return (
        example.replace("float[2,3] x, float[1,3] s, float[1,3] t", f"float[4,3] x, {states}")
        .replace("float[1,4] f, float[1,4] g", "float[2,4] f, float[2,4] g")
        .replace("float[4] b = {1, 2, 3, 4}, int64[2] i = {1, 1}", f"{bias}, int64[2] i = {{2, 2}}")
    )


class FuseStepsIntoGemms(RegionRule, family="recurrent"):
    """p_t + gemm(h_t, w, b) for each part p_t of split(gemm(x, v, c)) -> gemm(h_t, w, q_t) with parts q_t of x's
    product with the bias b + c.

    The addition of each step becomes the start of its product's accumulation. A step whose product is constant
    (the first, with a constant state) keeps its addition.
    """

    anchors = ("Split",)
    reads_from = ("Gemm",)
    dtypes = FLOATS
    examples = (
        "agraph (float[2,3] x, float[1,3] s, float[1,3] t) => (float[1,4] f, float[1,4] g) "
        "<float[4,3] v = {1, 2, 3, 4, 5, 6, 7, 8, 9, -1, -2, -3}, float[4] c = {0.5, 1, 2, -1}, "
        "float[4,3] w = {1, -2, 3, -4, 5, -6, 7, -8, 9, 1, 2, 3}, float[4] b = {1, 2, 3, 4}, int64[2] i = {1, 1}> "
        "{ p = Gemm<transB=1>(x, v, c) q, r = Split<axis=0>(p, i) d = Gemm<transB=1>(s, w, b) "
        "e = Gemm<transB=1>(t, w, b) f = Add(q, d) g = Add(r, e) }",
        "agraph (float[3,2] x, float[2,2] s) => (float[2,2] f, float[1,2] g) <float[2,2] v = {1, 2, 3, 4}, "
        "float[2] c = {0.5, 1}, float[2,2] w = {1, -2, 3, -4}, float[2] b = {1, 2}, float[1,2] d = {3, 5}, "
        "int64[2] i = {2, 1}> { p = Gemm(x, v, c) q, r = Split(p, i) e = Gemm(s, w, b) f = Add(e, q) g = Add(r, d) }",
    )
    near_misses = (
        examples[0].replace("e = Gemm<transB=1>(t, w, b)", "e = Gemm<transB=1>(t, v, b)"),
        examples[0].replace("f = Add(q, d)", "f = Add(q, q)"),
        _of_two_rows(examples[0], "float[1,3] s, float[2,3] t", "float[4] b = {1, 2, 3, 4}"),
        _of_two_rows(examples[0], "float[2,3] s, float[2,3] t", "float[2,4] b = {1, 2, 3, 4, 5, 6, 7, 8}"),
        examples[0].replace("e = Gemm<transB=1>(t, w, b)", "e = Gemm<transB=1>(t, w, c)"),
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        product = made_by(reader, node.inputs[0], "Gemm")
        if product is None or len(product.inputs) != 3 or product.attrs.get("transA"):
            return None
        if node.attrs.get("axis", 0) != 0 or not reader.is_const(product.inputs[2]):
            return None
        require(product.attrs.get("beta", 1.0) == 1.0, "what is added is scaled")
        worthwhile(len(reader.users(node.inputs[0])) == 1, "the product is read elsewhere")
        worthwhile(not reader.is_output(node.inputs[0]), "the product is read elsewhere")
        bias: Value | None = None
        adds: list[Node] = []
        gemms: list[Node | None] = []
        others: list[Value] = []
        for part in node.outputs:
            readers = reader.users(part)
            if len(readers) != 1 or readers[0].op != "Add" or reader.is_output(part):
                return None
            (add,) = readers
            other = add.inputs[1] if add.inputs[0] == part else add.inputs[0]
            require(other != part, "a part is added to itself")
            adds.append(add)
            gemm = reader.producer(other)
            if reader.is_const(other):
                gemms.append(None)
                others.append(other)
                continue
            if gemm is None or gemm.op != "Gemm" or len(gemm.inputs) != 3 or gemm.attrs != product.attrs:
                return None
            worthwhile(
                len(reader.users(other)) == 1 and not reader.is_output(other), "a step is read elsewhere"
            )
            require(bias in (None, gemm.inputs[2]), "the steps have different biases")
            require(reader.type(other).shape == reader.type(part).shape, "the addition broadcasts")
            bias = gemm.inputs[2]
            gemms.append(gemm)
            others.append(gemm.inputs[0])
        if bias is None:
            return None
        worthwhile(reader.is_const(bias), "the bias is not constant")
        row = reader.val(bias).shape
        require(len(row) < 2 or row[0] == 1, "the bias differs from row to row")
        weights = {g.inputs[1] for g in gemms if g is not None}
        require(len(weights) == 1, "the steps have different weights")
        heights = tuple(_size(reader, part, 0) for part in node.outputs)
        outputs = tuple(a.outputs[0] for a in adds)
        nodes = (node, product, *adds, *(g for g in gemms if g is not None))
        steps = tuple(g is not None for g in gemms)
        inputs = (*product.inputs, weights.pop(), bias, *others)
        return Region(outputs, inputs, nodes, (product.attrs, heights, steps))

    def target(self, op: Op, region: Region, x: Val, v: Val, c: Val, w: Val, b: Val, *others: Val) -> Any:
        attrs, heights, steps = region.data
        parts = _listed(op.Split(op.Gemm(x, v, op.Add(b, c), attrs=attrs), axis=0, sizes=heights))
        return [
            op.Gemm(other, w, part, attrs=attrs) if step else op.Add(part, op.Sub(other, b))
            for other, part, step in zip(others, parts, steps)
        ]


class SwapSplits(RegionRule, family="recurrent"):
    """split_b(p) for each part p of split_a(x) -> split_a(q) for each part q of split_b(x).

    Pays where x has many parts along a (time steps), each split into a few along b (gates).
    """

    anchors = ("Split",)
    examples = (
        "agraph (float[4,6] x) => (float[2,2] a, float[2,4] b, float[2,2] c, float[2,4] d) <int64[2] s = {2, 4}> "
        "{ p, q = Split<axis=0, num_outputs=2>(x) a, b = Split<axis=1>(p, s) c, d = Split<axis=1>(q, s) }",
    )
    near_misses = (
        "agraph (float[4,6] x) => (float[2,2] a, float[2,4] b, float[2,3] c, float[2,3] d) <int64[2] s = {2, 4}> "
        "{ p, q = Split<axis=0, num_outputs=2>(x) a, b = Split<axis=1>(p, s) c, d = Split<axis=1, num_outputs=2>(q) }",
    )

    def find(self, reader: Reader, node: Node) -> Region | None:
        inner: list[Node] = []
        for part in node.outputs:
            readers = reader.users(part)
            if len(readers) != 1 or readers[0].op != "Split":
                return None
            worthwhile(not reader.is_output(part), "a part is read elsewhere")
            inner.append(readers[0])
        outer_axis, inner_axis = node.attrs.get("axis", 0), inner[0].attrs.get("axis", 0)
        require(outer_axis != inner_axis, "both split along one axis")
        assert isinstance(outer_axis, int)
        assert isinstance(inner_axis, int)
        widths = {tuple(_size(reader, o, inner_axis) for o in n.outputs) for n in inner}
        same_axis = all(n.attrs.get("axis", 0) == inner_axis for n in inner)
        require(same_axis and len(widths) == 1, "the parts are split differently")
        heights = tuple(_size(reader, o, outer_axis) for o in node.outputs)
        outputs = tuple(o for n in inner for o in n.outputs)
        data = (outer_axis, heights, inner_axis, widths.pop())
        return Region(outputs, node.inputs[:1], (node, *inner), data)

    def target(self, op: Op, region: Region, x: Val) -> Any:
        outer_axis, heights, inner_axis, widths = region.data
        wide = op.Split(x, axis=inner_axis, sizes=widths)
        columns = [op.Split(part, axis=outer_axis, sizes=heights) for part in _listed(wide)]
        return [_listed(column)[row] for row in range(len(heights)) for column in columns]


def _listed(parts: Any) -> Any:
    return parts if isinstance(parts, tuple) else (parts,)


def _size(reader: Reader, value: Value, axis: int) -> int:
    return reader.val(value).size(axis)
