"""Sums, products and concatenations: associated, distributed, factored."""

from __future__ import annotations

import numpy as np
import pytest

from rewrite_rules.algebra import (
    AssociateSharedMatMuls,
    DistributeMatMul,
    DistributeMulOverSum,
    ExchangeConcats,
    FactorConvOutOfSum,
    FactorMatMulOutOfSum,
    MergeConvsIntoGroups,
    MergeSharedWeightConvs,
    PullProductOutOfConcat,
    PullProductOutOfConcatOfColumns,
    PushBinaryThroughSplit,
    PushMatMulIntoConcat,
    SplitGroupsOverConcat,
    SplitMatMulOfConcats,
)
from tests.rules.harness import applies, model, normal, refuses
from xrlflow.onnxio import load
from xrlflow.rewrite import Library, RewriteState


def test_a_constant_factor_folds_into_one_addend():
    text = "agraph (float[2,3] x, float[2,4] z) => (float[2,4] y) { p = MatMul(x, w) s = Add(p, z) y = Mul(s, c) }"
    applies(
        DistributeMulOverSum(), model(text, w=normal(3, 4), c=normal(4)), ops=["Add", "MatMul", "Mul", "Mul"]
    )
    text = "agraph (float[2,4] x, float[2,4] z) => (float[2,4] y) { s = Add(x, z) y = Mul(s, c) }"
    refuses(DistributeMulOverSum(), model(text, c=normal(4)))
    text = "agraph (float[2,3] x) => (float[2,4] y) { p = MatMul(x, w) s = Add(p, z) y = Mul(s, c) }"
    refuses(DistributeMulOverSum(), model(text, w=normal(3, 4), c=normal(4), z=normal(4, seed=1)))


def test_products_that_are_read_elsewhere():
    rule = AssociateSharedMatMuls()
    text = (
        "agraph (float[2,3] x, float[3,4] v, float[4,4] w) => (float[2,4] y, float[2,4] b) "
        "{ a = MatMul(x, v) b = MatMul(a, w) c = Relu(a) y = Add(b, c) }"
    )
    refuses(rule, model(text))  # they do not meet
    text = "agraph (float[2,3] x) => (float[2,4] y) { a = MatMul(x, v) b = MatMul(a, w) y = Add(a, b) }"
    applies(rule, model(text, v=normal(3, 4), w=normal(4, 4)), ops=["Add", "MatMul", "MatMul"])
    text = (
        "agraph (float[3] x, float[3,4] v, float[4,4] w) => (float[4] y) "
        "{ a = MatMul(x, v) b = MatMul(a, w) y = Add(a, b) }"
    )
    refuses(rule, model(text))  # a vector


def test_sums_in_products():
    rule = DistributeMatMul()
    text = (
        "agraph (float[{}] x, float[3,3] w, float[3,4] z) => (float[] y) "
        "{{ a = MatMul(x, w) s = Add({}, a) y = MatMul(s, z) }}"
    )
    applies(rule, model(text.format("2,3", "x")), ops=["Add", "MatMul", "MatMul", "MatMul"])
    applies(rule, model(text.format("N,2,3", "x")), ops=["Add", "MatMul", "MatMul", "MatMul"])
    text = (
        "agraph (float[2,1] x, float[1,3] w, float[3,4] z) => (float[] y) "
        "{ a = MatMul(x, w) s = Add(x, a) y = MatMul(s, z) }"
    )
    refuses(rule, model(text), "broadcasts")


def test_common_factors_of_products():
    text = (
        "agraph (float[2,1,3] x, float[4,3] z, float[3,5] w) => (float[2,4,5] y) "
        "{ a = MatMul(x, w) b = MatMul(z, w) y = Add(b, a) }"
    )
    applies(FactorMatMulOutOfSum(), model(text), ops=["Add", "MatMul"])


@pytest.mark.parametrize("biases", [("", ""), (", b", ""), ("", ", c"), (", b", ", c")])
def test_common_weights_of_convs(biases):
    text = (
        "agraph (float[1,2,4,4] x, float[1,2,4,4] z) => (float[1,3,4,4] y) "
        f"{{ p = Conv<pads=[1,1,1,1]>(x, w{biases[0]}) q = Conv<pads=[1,1,1,1]>(z, w{biases[1]}) y = Add(p, q) }}"
    )
    given = {"w": normal(3, 2, 3, 3), "b": normal(3), "c": normal(3, seed=1)}
    applies(FactorConvOutOfSum(), model(text, **given), ops=["Add", "Conv"])


def test_convs_that_differ():
    text = (
        "agraph (float[1,2,5,5] x, float[1,2,5,5] z) => (float[1,3,3,3] y) "
        "{ p = Conv(x, w) q = Conv<pads=[1,1,1,1], strides=[2,2]>(z, w) y = Add(p, q) }"
    )
    refuses(FactorConvOutOfSum(), model(text, w=normal(3, 2, 3, 3)), "attributes differ")


def test_rows_put_together():
    text = (
        "agraph (float[2,{}] x, float[2,{}] z) => (float[] y) "
        "{{ a = MatMul(x, w) b = MatMul(z, w) y = Concat<axis={}>(a, b) }}"
    )
    rule = PullProductOutOfConcat()
    applies(rule, model(text.format("4,3", "5,3", -2), w=normal(3, 5)), ops=["Concat", "MatMul"])
    applies(rule, model(text.format("4,3", "4,3", 0), w=normal(3, 5)), ops=["Concat", "MatMul"])
    applies(rule, model(text.format("4,3", "4,3", 0), w=normal(1, 3, 5)), ops=["Concat", "MatMul"])
    refuses(rule, model(text.format("4,3", "4,3", 0), w=normal(2, 3, 5)), "not one of rows")
    refuses(rule, model(text.format("4,3", "4,3", 2), w=normal(3, 5)), "not one of rows")
    gemm = (
        "agraph (float[2,3] x, float[2,3] z) => (float[4,5] y) "
        "{ a = Gemm(x, w, c) b = Gemm(z, w, c) y = Concat<axis=0>(a, b) }"
    )
    applies(rule, model(gemm, w=normal(3, 5), c=normal(1, 5)), ops=["Concat", "Gemm"])
    refuses(rule, model(gemm, w=normal(3, 5), c=normal(2, 5)), "not one of rows")


def test_columns_put_together():
    text = "agraph (float[{}] x) => (float[] y) {{ a = MatMul(x, v) b = MatMul(x, w) y = Concat<axis={}>(a, b) }}"
    rule = PullProductOutOfConcatOfColumns()
    weights = {"v": normal(3, 4), "w": normal(3, 5)}
    applies(rule, model(text.format("2,3", 1), **weights), ops=["MatMul"])
    applies(rule, model(text.format("3", 0), **weights), ops=["MatMul"])
    same = {"v": normal(3, 4), "w": normal(3, 4, seed=1)}
    refuses(rule, model(text.format("2,3", 0), **same), "not one of columns")
    vectors = {"v": normal(3), "w": normal(3, seed=1)}
    refuses(rule, model(text.format("2,3", 0), **vectors), "a vector")
    conv = (
        "agraph (float[1,4,5,5] x) => (float[] y) "
        "{{ a = Conv<group={0}>(x, v) b = Conv<group={0}>(x, w) y = Concat<axis=1>(a, b) }}"
    )
    kernels = {"v": normal(2, 4, 3, 3), "w": normal(6, 4, 3, 3)}
    applies(rule, model(conv.format(1), **kernels), ops=["Conv"])
    kernels = {"v": normal(2, 2, 3, 3), "w": normal(6, 2, 3, 3)}
    refuses(rule, model(conv.format(2), **kernels), "grouped")
    gemm = "agraph (float[2,3] x) => (float[2,9] y) {{ p = Gemm(x, v, {}) q = Gemm(x, w{}) y = Concat<axis=1>(p, q) }}"
    biases = {**weights, "b": normal(4), "c": normal(5), "d": normal(1)}
    applies(rule, model(gemm.format("b", ", c"), **biases), ops=["Gemm"])
    refuses(rule, model(gemm.format("b", ""), **biases), "has none")
    refuses(rule, model(gemm.format("d", ", c"), **biases), "one number per column")


def test_products_of_parts():
    rule = PushMatMulIntoConcat()
    text = (
        "agraph (float[2,3] x, float[5,3] z, float[3,3] u, float[3,4] w) => (float[] y) "
        "{{ a = {}(x{}) c = Concat<axis=0>(a, z) y = MatMul(c, w) }}"
    )
    applies(rule, model(text.format("MatMul", ", u")), ops=["Concat", "MatMul", "MatMul", "MatMul"])
    refuses(rule, model(text.format("Relu", "")), "no part is a product")
    # The class token of a vision transformer: its product is constant.
    text = "agraph (float[1,4,3] x) => (float[1,5,2] y) { c = Concat<axis=1>(t, x) y = MatMul(c, w) }"
    applies(rule, model(text, t=normal(1, 1, 3), w=normal(3, 2)), ops=["Concat", "MatMul"])
    # Put together along what the product sums over.
    text = (
        "agraph (float[2,3] x, float[3,3] u, float[6,4] w) => (float[2,4] y) "
        "{ a = MatMul(x, u) c = Concat<axis=1>(a, x) y = MatMul(c, w) }"
    )
    refuses(rule, model(text))


def test_product_of_concats():
    text = (
        "agraph (float[2,{}] x, float[2,{}] z, float[3,5] v, float[4,5] w) => (float[2,5] y) "
        "{{ a = Concat<axis=1>(x, z) b = Concat<axis=0>(v, w) y = MatMul(a, b) }}"
    )
    applies(SplitMatMulOfConcats(), model(text.format(3, 4)), ops=["Add", "MatMul", "MatMul"])
    refuses(SplitMatMulOfConcats(), model(text.format(4, 3)), "other sizes")


def test_groups():
    text = (
        "agraph (float[1,{}] x, float[1,{}] z) => (float[] y) "
        "{{ a = Conv{}(x, v) b = Conv{}(z, w) y = Concat<axis=1>(a, b) }}"
    )
    rule = MergeConvsIntoGroups()
    kernels = {"v": normal(3, 2, 3, 3), "w": normal(3, 2, 3, 3, seed=1)}
    graph = applies(rule, model(text.format("2,5,5", "2,5,5", "", ""), **kernels), ops=["Concat", "Conv"])
    assert next(n for n in graph.nodes() if n.op == "Conv").attrs["group"] == 2
    refuses(rule, model(text.format("2,5,5", "2,5,5", "", "<dilations=[2,2], pads=[1,1,1,1]>"), **kernels))
    refuses(
        rule,
        model(text.format("2,5,5", "4,5,5", "", "<group=2>"), v=normal(3, 2, 3, 3), w=normal(4, 2, 3, 3)),
        "more output channels",
    )
    text = (
        "agraph (float[1,2,5,5] x, float[1,4,5,5] z) => (float[] y) "
        "{ a = Concat<axis=1>(x, z) y = Conv<group=3>(a, w) }"
    )
    graph = applies(
        SplitGroupsOverConcat(), model(text, w=normal(6, 2, 3, 3)), ops=["Concat", "Conv", "Conv"]
    )
    assert sorted(n.attrs.get("group", 1) for n in graph.nodes() if n.op == "Conv") == [1, 2]
    text = text.replace("[1,2,5,5]", "[1,3,5,5]").replace("[1,4,5,5]", "[1,3,5,5]")
    refuses(SplitGroupsOverConcat(), model(text, w=normal(6, 2, 3, 3)), "several parts")


def count(rule, proto):
    return RewriteState.start(load(proto).graph, Library([rule], assuming=("finite",))).count


def test_convs_with_one_weight():
    text = "agraph (float[1,2,5,5] x, float[{}] z) => (float[] a, float[] b) {{ a = Conv(x, w) b = Conv({}, w) }}"
    rule = MergeSharedWeightConvs()
    applies(rule, model(text.format("3,2,5,5", "z"), w=normal(3, 2, 3, 3)), ops=["Concat", "Conv", "Split"])
    refuses(rule, model(text.format("3,2,6,5", "z"), w=normal(3, 2, 3, 3)))
    text = "agraph (float[1,2,5,5] x) => (float[] b) { a = Conv<pads=[1,1,1,1]>(x, w) b = Conv<pads=[1,1,1,1]>(a, w) }"
    refuses(rule, model(text, w=normal(2, 2, 3, 3)), "depend")
    # Three that have one source, each read on: one candidate.
    text = (
        "agraph (float[3,2,5,5] x) => (float[] a, float[] b, float[] c) { p, q, r = Split<axis=0, num_outputs=3>(x) "
        "a = Conv(p, w) b = Conv(q, w) c = Conv(r, w) }"
    )
    assert count(rule, model(text, w=normal(3, 2, 3, 3))) == 1


def test_concats_both_ways():
    text = (
        "agraph (float[2,3] x, float[2,{}] z, float[5,{}] v, float[5,4] w) => (float[7,7] y) "
        "{{ a = Concat<axis=1>(x, z) b = Concat<axis=1>(v, w) y = Concat<axis=0>(a, b) }}"
    )
    applies(ExchangeConcats(), model(text.format(4, 3)), ops=["Concat"] * 3)
    text = (
        "agraph (float[2,3] x, float[2,4] z, float[5,4] v, float[5,3] w) => (float[7,7] y) "
        "{ a = Concat<axis=1>(x, z) b = Concat<axis=1>(v, w) y = Concat<axis=0>(a, b) }"
    )
    refuses(ExchangeConcats(), model(text), "shapes differ")


def test_functions_before_a_split():
    rule = PushBinaryThroughSplit()
    text = (
        "agraph (float[2,6] x, float[{}] z) => (float[2,2] a, float[2,4] b) "
        "{{ t = Add(x, z) a, b = Split<axis=1>(t, s) }}"
    )
    sizes = {"s": np.array([2, 4])}
    applies(rule, model(text.format("2,1"), **sizes), ops=["Add", "Add", "Split"])
    refuses(rule, model(text.format("2,6"), **sizes), "several operands")
    text = (
        "agraph (float[2,6] x) => (float[2,2] a, float[2,4] b) { t = Add(x, z) a, b = Split<axis=1>(t, s) }"
    )
    applies(rule, model(text, z=normal(6), **sizes), ops=["Add", "Add", "Split"])


def test_factors_of_shared_products_that_are_constant():
    """One may be of any size, as long as it is not multiplied out."""
    text = (
        "agraph (float[{}] x, float[{}] z) => (float[] y) {{ a = MatMul({}) b = MatMul({}) y = Add(a, b) }}"
    )
    applies(AssociateSharedMatMuls(), model(text.format("2,3", "3,K", "x, z", "a, w"), w=normal(2, 2)))
    given = {"v": normal(2, 3), "w": normal(2, 2)}
    applies(AssociateSharedMatMuls(), model(text.format("3,4", "1", "v, x", "w, a"), **given))


@pytest.mark.parametrize(
    ("one", "other"),
    [("<axis=0>", "<axis=0>"), ("<axis=1>", "<axis=1>"), ("<axis=0>", "<axis=1>")],
)
def test_concats_that_a_product_does_not_sum(one, other):
    """Those of rows times columns, even where what is summed is nothing."""
    shapes = "float[2,0] x, float[2,0] z, float[0,5] v, float[0,5] w"
    body = f"a = Concat{one}(x, z) b = Concat{other}(v, w) y = MatMul(a, b)"
    refuses(SplitMatMulOfConcats(), model(f"agraph ({shapes}) => (float[] y) {{ {body} }}"))


def test_convolutions_of_one_group_and_of_concats_as_weights():
    shapes = "float[1,2,4] x, float[1,2,4] z, float[4,4,1] w, float[2,2,1] v"
    text = (
        f"agraph ({shapes}) => (float[] y) {{{{ a = Concat<axis={{}}>({{}}) y = Conv<group={{}}>({{}}) }}}}"
    )
    rule = SplitGroupsOverConcat()
    refuses(rule, model(text.format(1, "x, z", 1, "a, w")))
    refuses(rule, model(text.format(0, "v, v", 1, "x, a")))
    refuses(rule, model(text.format(1, "x", 1, "a, v")))


def test_concats_of_different_numbers_of_parts():
    shapes = "float[2,3] x, float[2,0] n"
    body = "a = Concat<axis=1>(x, x) b = Concat<axis=1>(x, x, n) y = Concat<axis=0>(a, b)"
    refuses(ExchangeConcats(), model(f"agraph ({shapes}) => (float[] y) {{ {body} }}"))


def test_split_into_one_part():
    text = "agraph (float[2,3] x) => (float[2,3] y) { a = Add(x, c) y = Split<axis=1, num_outputs=1>(a) }"
    refuses(PushBinaryThroughSplit(), model(text, c=normal(3)))
