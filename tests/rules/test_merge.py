"""Products and convolutions merged, associated, and taken apart."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import onnx
import pytest

from rewrite_rules import merge
from rewrite_rules.constants import concat_constants, cut_order, slice_constant
from rewrite_rules.identity import CancelInvolution
from rewrite_rules.merge import (
    AssociateMatMulsLeft,
    AssociateMatMulsRight,
    EnlargeConv,
    FoldSumOfConvs,
    FoldSumOfMatMuls,
    MergeGemms,
    MergeGroupConv,
    MergeGroupConvToBlocks,
    MergeManyMatMuls,
    MergeMatMuls,
    MergeParallelConvs,
    MergeSumOfConvs,
    MergeSumOfGemms,
    MergeSumOfMatMuls,
    SplitConvOverConcat,
    SplitConvsOverConcat,
    SplitMatMulsOverConcat,
    SplitMergedConv,
    SplitMergedMatMul,
)
from tests.rules.harness import applies, model, normal, refuses
from xrlflow.onnxio import load
from xrlflow.rewrite import GraphBuilder, Library, RewriteState, Val


@pytest.mark.parametrize("widths", [(2, 3), (4, 4, 1)])
@pytest.mark.parametrize("x", ["3", "2,3", "B,S,3"])
def test_matmuls(x, widths):
    names = "abc"[: len(widths)]
    source = model(
        f"agraph (float[{x}] x) => ({', '.join(f'float[] {n}' for n in names)}) "
        f"{{ {' '.join(f'{n} = MatMul(x, w{n})' for n in names)} }}",
        **{f"w{n}": normal(3, width) for n, width in zip(names, widths)},
    )
    last = len(load_candidates(MergeMatMuls(), source)) - 1  # pairs and, of three, the triple
    applies(MergeMatMuls(), source, pick=last)
    for pick in range(last):
        applies(MergeMatMuls(), source, pick=pick)


def load_candidates(rule, source):
    return RewriteState.start(load(source).graph, Library([rule], assuming=("finite",))).candidates


def test_each_set_of_matmuls_once():
    source = model(
        "agraph (float[2,3] x) => (float[] a, float[] b, float[] c) "
        "{ a = MatMul(x, u) b = MatMul(x, v) c = MatMul(x, w) }",
        u=normal(3, 2),
        v=normal(3, 2, seed=1),
        w=normal(3, 2, seed=2),
    )
    assert len(load_candidates(MergeMatMuls(), source)) == 3 + 1


def test_matmuls_of_batched_weights():
    source = model(
        "agraph (float[2,4,3] x) => (float[] a, float[] b) { a = MatMul(x, u) b = MatMul(x, v) }",
        u=normal(2, 3, 2),
        v=normal(2, 3, 5),
    )
    applies(MergeMatMuls(), source, ops=["MatMul", "Split"])


def test_matmuls_that_cannot_be_merged():
    text = (
        "agraph (float[2,3] x, float[3,2] w) => (float[] a, float[] b) { a = MatMul(x, u) b = MatMul(x, w) }"
    )
    refuses(MergeMatMuls(), model(text, u=normal(3, 4)))  # w changes
    text = (
        "agraph (float[2,3] x, float[2,3] y) => (float[] a, float[] b) { a = MatMul(x, u) b = MatMul(y, w) }"
    )
    refuses(MergeMatMuls(), model(text, u=normal(3, 4), w=normal(3, 2)))
    text = "agraph (float[2,3] x) => (float[] a, float[] b) { a = MatMul(x, u) b = MatMul(w, x) }"
    refuses(MergeMatMuls(), model(text, u=normal(3, 4), w=normal(3, 2)))


def many(count, x="2,3", depth=3):
    return model(
        f"agraph (float[{x}] x) => ({', '.join(f'float[] y{i}' for i in range(count))}) "
        f"{{ {' '.join(f'y{i} = MatMul(x, w{i})' for i in range(count))} }}",
        **{f"w{i}": normal(depth, 1 + i % 3, seed=i) for i in range(count)},
    )


@pytest.mark.parametrize("count", [4, 8])
def test_many_matmuls(count):
    applies(MergeManyMatMuls(), many(count), ops=["MatMul", "Split"])
    assert len(load_candidates(MergeManyMatMuls(), many(count))) == 1


@pytest.mark.parametrize("later", list(combinations(range(4), 2)))
def test_products_that_come_later(later):
    """Whichever two of the four: the one that finds them all may have been asked before there were enough readers."""
    products = " ".join(f"y{i} = MatMul({'b' if i in later else 'x'}, w{i})" for i in range(4))
    proto = model(
        f"agraph (float[2,3] x) => ({', '.join(f'float[] y{i}' for i in range(4))}) "
        f"{{ a = Neg(x) b = Neg(a) {products} }}",
        **{f"w{i}": normal(3, 2, seed=i) for i in range(4)},
    )
    state = RewriteState.start(load(proto).graph, Library([MergeManyMatMuls(), CancelInvolution()]))
    (match,) = state.candidates
    state = state.apply(match)
    assert [m.rule.name for m in state.candidates] == ["MergeManyMatMuls"]


@pytest.mark.parametrize("rule", [MergeMatMuls(), MergeManyMatMuls()])
def test_steps_that_merge_the_same_weights_share_the_merged_one(rule):
    count = 2 if isinstance(rule, MergeMatMuls) else 5
    lines = [f"y{x}{i} = MatMul({x}, w{i})" for x in "pqr" for i in range(count)]
    source = model(
        f"agraph (float[1,40] p, float[1,40] q, float[1,40] r) => "
        f"({', '.join(f'float[] y{x}{i}' for x in 'pqr' for i in range(count))}) {{ {' '.join(lines)} }}",
        **{f"w{i}": normal(40, 30, seed=i) for i in range(count)},
    )
    state = RewriteState.start(load(source).graph, Library([rule]))
    while state.candidates:
        state = state.apply(state.candidates[0])
    assert len({n.inputs[1] for n in state.graph.nodes() if n.op == "MatMul"}) == 1


def test_few_matmuls():
    refuses(MergeManyMatMuls(), many(3))
    beside = many(3)
    beside.graph.node.add(op_type="Neg", input=["x"], output=["z"])
    beside.graph.output.add().CopyFrom(
        onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [2, 3])
    )
    refuses(MergeManyMatMuls(), beside, "too few")


@pytest.mark.parametrize("attrs", ["", "<alpha=0.5, transB=1>", "<transA=1, beta=2.0>"])
@pytest.mark.parametrize("bias", [None, (), (1,)])
def test_gemms(attrs, bias):
    x = "3,2" if "transA" in attrs else "2,3"
    flip = -1 if "transB" in attrs else 1
    b, c = ("", "") if bias is None else (", b", ", c")
    source = model(
        f"agraph (float[{x}] x) => (float[] y, float[] z) "
        f"{{ y = Gemm{attrs}(x, v{b}) z = Gemm{attrs}(x, w{c}) }}",
        v=normal(*(3, 4)[::flip]),
        w=normal(*(3, 5)[::flip]),
        b=normal(*(bias or ()), 4),
        c=normal(*(bias or ()), 5),
    )
    graph = applies(MergeGemms(), source, ops=["Gemm", "Split"])
    assert len(graph.inputs) == 1
    assert len(load_candidates(MergeGemms(), source)) == 1


def test_gemms_that_differ():
    text = "agraph (float[2,3] x) => (float[] y, float[] z) {{ y = Gemm{}(x, v, b) z = Gemm{}(x, w{}) }}"
    given = {"v": normal(3, 3), "w": normal(3, 3, seed=1), "b": normal(3)}
    refuses(MergeGemms(), model(text.format("", "<transB=1>", ", b"), **given), "attributes differ")
    refuses(MergeGemms(), model(text.format("", "", ""), **given), "the other has none")
    given["b"] = normal(2, 3)
    refuses(MergeGemms(), model(text.format("", "", ", b"), **given), "dimension")


@pytest.mark.parametrize("sizes", [(2, 4), (1, 2, 3)])
@pytest.mark.parametrize(
    ("product", "x", "w", "b"),
    [
        ("MatMul(x, w)", "2,3", (3, 6), 6),
        ("MatMul(x, w)", "2,B,3", (3, 6), 6),
        ("Gemm(x, w, b)", "2,3", (3, 6), 6),
        ("Gemm<transB=1>(x, w, b)", "2,3", (6, 3), 6),
    ],
)
def test_split_of_a_product(product, x, w, b, sizes):
    names = "cde"[: len(sizes)]
    source = model(
        f"agraph (float[{x}] x) => ({', '.join(f'float[] {n}' for n in names)}) "
        f"{{ y = {product} {', '.join(names)} = Split<axis=-1>(y, s) }}",
        w=normal(*w),
        b=normal(b),
        s=np.array(sizes),
    )
    applies(SplitMergedMatMul(), source, ops=[product.split("(")[0].split("<")[0]] * len(sizes))


def split_gemm(bias, *, given="", split="c, d = Split<axis=-1>(y, s)"):
    """Two parts of a product with a bias of this shape, or one that is `given`."""
    return model(
        f"agraph (float[2,3] x{given}) => (float[] c) {{ y = Gemm(x, w, b) {split} }}",
        w=normal(3, 6),
        s=np.array([2, 4]),
        **({} if given else {"b": normal(*bias)}),
    )


def test_split_of_a_gemm_with_rows_of_biases():
    for bias in ((2, 6), (1, 6), (6,)):
        applies(SplitMergedMatMul(), split_gemm(bias), ops=["Gemm", "Gemm"])


def test_splits_of_a_gemm_that_stay():
    for bias in ((1,), ()):
        refuses(SplitMergedMatMul(), split_gemm(bias), "one number per column")
    refuses(SplitMergedMatMul(), split_gemm((), given=", float[6] b"))
    refuses(SplitMergedMatMul(), split_gemm((6,), split="c = Split<axis=-1, num_outputs=1>(y)"))


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize(
    ("x", "w", "attrs"),
    [
        ("1,2,5,5", (2, 3, 3), "<pads=[1,1,1,1], strides=[2,2]>"),
        ("2,2,7", (2, 2), '<auto_pad="SAME_UPPER">'),
        ("1,2,3,3,3", (2, 1, 1, 1), ""),
    ],
)
def test_parallel_convs(x, w, attrs, bias):
    given = {"v": normal(3, *w), "w": normal(4, *w), "b": normal(3), "c": normal(4)}
    text = "agraph (float[{}] x) => (float[] y, float[] z) {{ y = Conv{}(x, v{}) z = Conv{}(x, w{}) }}"
    source = model(text.format(x, attrs, bias, attrs, bias.replace("b", "c")), **given)
    applies(MergeParallelConvs(), source, ops=["Conv", "Split"])
    assert len(load_candidates(MergeParallelConvs(), source)) == 1
    mixed = model(text.format(x, attrs, bias, attrs, ""), **given)
    applies(MergeParallelConvs(), mixed, ops=["Conv", "Split"])


def test_convs_that_are_not_parallel():
    text = "agraph (float[1,4,5,5] x) => (float[] y, float[] z) {{ y = Conv{}(x, v) z = Conv{}(x, w) }}"
    small, large, grouped = normal(2, 4, 1, 1), normal(2, 4, 3, 3), normal(2, 2, 3, 3)
    refuses(MergeParallelConvs(), model(text.format("", ""), v=small, w=large), "dimension")
    refuses(
        MergeParallelConvs(), model(text.format("", "<strides=[2,2]>"), v=large, w=large + 1), "attributes"
    )
    both = text.format("<group=2>", "<group=2>")
    refuses(MergeParallelConvs(), model(both, v=grouped, w=grouped + 1), "dimension")


@pytest.mark.parametrize("bias", ["", ", b"])
def test_split_of_a_conv(bias):
    text = (
        "agraph (float[1,2,5,5] x) => (float[] c, float[] d) "
        f"{{{{ y = Conv<pads=[1,0,1,0]>(x, w{bias}) c, d = Split<axis={{}}>(y, s) }}}}"
    )
    given = {"w": normal(5, 2, 3, 3), "b": normal(5)}
    applies(SplitMergedConv(), model(text.format(1), s=np.array([2, 3]), **given), ops=["Conv", "Conv"])
    refuses(SplitMergedConv(), model(text.format(2), s=np.array([2, 3]), **given), "columns")
    grouped = text.format(1).replace("<pads", "<group=2, pads")
    four = {"w": normal(4, 1, 3, 3), "b": normal(4), "s": np.array([2, 2])}
    refuses(SplitMergedConv(), model(grouped, **four), "grouped")


def test_split_of_what_is_read_elsewhere():
    source = model(
        "agraph (float[2,3] x) => (float[] a, float[] b, float[] y) "
        "{ y = MatMul(x, w) a, b = Split<axis=1>(y, s) }",
        w=normal(3, 4),
        s=np.array([1, 3]),
    )
    refuses(SplitMergedMatMul(), source)


def test_there_and_back_is_one_state():
    # Large weights: they are not evaluated, but what is put together of parts comes apart into the parts.
    source = model(
        "agraph (float[2,50] x) => (float[] a, float[] b) { a = MatMul(x, u) b = MatMul(x, v) }",
        u=normal(50, 30),
        v=normal(50, 40),
    )
    library = Library([MergeMatMuls(), SplitMergedMatMul()])
    start = RewriteState.start(load(source).graph, library)
    merged = start.apply(start.candidates[0])
    assert len(merged.candidates) == 1
    back = merged.apply(merged.candidates[0])
    assert back.fingerprint == start.fingerprint
    assert back.apply(back.candidates[0]).fingerprint == merged.fingerprint
    source = model(
        "agraph (float[2,50] x) => (float[] a, float[] b) { y = MatMul(x, w) a, b = Split<axis=1>(y, s) }",
        w=normal(50, 70),
        s=np.array([30, 40]),
    )
    start = RewriteState.start(load(source).graph, library)
    split = start.apply(start.candidates[0])
    merged = split.apply(split.candidates[0])
    (before, after) = ([n.inputs for n in s.graph.nodes() if n.op == "MatMul"] for s in (start, merged))
    assert before == after


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize(
    ("small", "large", "attrs"),
    [
        ((1, 1), (3, 3), ("", "<pads=[1,1,1,1]>")),
        ((1, 3), (3, 3), ("<pads=[0,1,0,1]>", "<pads=[1,1,1,1]>")),
        ((3, 3), (5, 5), ("<pads=[0,0,1,1], strides=[2,2]>", "<pads=[1,1,2,2], strides=[2,2]>")),
        ((1,), (5,), ("", "<pads=[2,2]>")),
    ],
)
def test_enlarged_convs_can_be_merged(small, large, attrs, bias):
    image = "7,6"[: 2 * len(small) - 1]
    source = model(
        f"agraph (float[2,2,{image}] x) => (float[] y, float[] z) "
        f"{{ y = Conv{attrs[0]}(x, v{bias}) z = Conv{attrs[1]}(x, w) }}",
        v=normal(3, 2, *small),
        w=normal(4, 2, *large),
        b=normal(3),
    )
    graph = applies(EnlargeConv(), source, ops=["Conv", "Conv"])
    assert RewriteState.start(graph, Library([MergeParallelConvs()])).candidates


@pytest.mark.parametrize(
    "attrs", ["", "<pads=[2,2,2,2]>", "<pads=[1,1,1,1], strides=[2,2]>", "<pads=[1,1,1,0]>"]
)
def test_convs_without_a_larger_neighbour(attrs):
    text = f"agraph (float[2,2,6,6] x) => (float[] y, float[] z) {{ y = Conv(x, v) z = Conv{attrs}(x, w) }}"
    refuses(EnlargeConv(), model(text, v=normal(3, 2, 1, 1), w=normal(4, 2, 3, 3)))


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize(
    ("x", "w", "attrs", "groups"),
    [
        ("2,8,5,5", (12, 2, 3, 3), "strides=[2,2], pads=[1,1,1,1]", 4),
        ("1,6,7", (6, 1, 3), "dilations=[2]", 6),
        ("1,4,3,3,3", (2, 2, 2, 2, 2), "pads=[0,0,1,0,0,1]", 2),
    ],
)
def test_groups_by_two(x, w, attrs, groups, bias):
    source = model(
        f"agraph (float[{x}] x) => (float[] y) {{ y = Conv<group={groups}, {attrs}>(x, w{bias}) }}",
        w=normal(*w),
        b=normal(w[0]),
    )
    graph = applies(MergeGroupConv(), source, ops=["Conv"])
    (conv,) = [n for n in graph.nodes() if n.op == "Conv"]
    assert conv.attrs.get("group", 1) == groups // 2


@pytest.mark.parametrize(
    ("groups", "channels", "left"), [(8, 4, 2), (32, 4, 8), (8, 2, 1), (12, 2, 2), (6, 5, 2), (10, 3, 2)]
)
def test_groups_to_blocks(groups, channels, left):
    source = model(
        f"agraph (float[1,{groups * channels},3,3] x) => (float[] y) {{ y = Conv<group={groups}>(x, w) }}",
        w=normal(groups, channels, 3, 3),
    )
    graph = applies(MergeGroupConvToBlocks(), source, ops=["Conv"])
    (conv,) = [n for n in graph.nodes() if n.op == "Conv"]
    assert conv.attrs.get("group", 1) == left


@pytest.mark.parametrize(
    ("groups", "channels", "reason"),
    [(8, 1, "depthwise"), (4, 16, "too many"), (4, 8, "too many"), (1, 4, "too many")],
)
def test_groups_that_stay(groups, channels, reason):
    source = model(
        f"agraph (float[1,{groups * channels},3,3] x) => (float[] y) {{ y = Conv<group={groups}>(x, w) }}",
        w=normal(groups, channels, 1, 1),
    )
    refuses(MergeGroupConvToBlocks(), source, reason)
    if groups == 1:
        refuses(MergeGroupConv(), source, "odd")


@pytest.mark.parametrize(
    ("x", "y", "z"),
    [
        ("2,3", (3, 4), (4, 5)),
        ("B,2,3", (3, 4), (2, 4, 5)),
        ("2,1,2,3", (7, 3, 4), (4, 5)),
        ("B,3", (3, 3), (3, 3)),
    ],
)
def test_associativity(x, y, z):
    given = {"y": normal(*y), "z": normal(*z)}
    source = model(f"agraph (float[{x}] x) => (float[] o) {{ m = MatMul(x, y) o = MatMul(m, z) }}", **given)
    applies(AssociateMatMulsRight(), source, ops=["MatMul"])
    sizes = [",".join(map(str, s)) for s in (y, z)]
    source = model(
        f"agraph (float[{x}] x, float[{sizes[0]}] y, float[{sizes[1]}] z) => (float[] o) "
        "{ m = MatMul(y, z) o = MatMul(x, m) }"
    )
    applies(AssociateMatMulsLeft(), source, ops=["MatMul", "MatMul"])


def test_vectors_do_not_associate():
    source = model(
        "agraph (float[2,3] x, float[3] y) => (float[] o) { m = MatMul(x, y) o = MatMul(m, z) }",
        z=normal(2, 4),
    )
    refuses(AssociateMatMulsRight(), source, "dimensions")


@pytest.mark.parametrize("lead", ["2,", "2,B,", "A,2,B,"])
def test_sums_of_matmuls(lead):
    source = model(
        f"agraph (float[{lead}3] x, float[{lead}4] y) => (float[] o) "
        "{ a = MatMul(x, v) b = MatMul(y, w) o = Add(a, b) }",
        v=normal(3, 5),
        w=normal(4, 5),
    )
    graph = applies(MergeSumOfMatMuls(), source, ops=["Concat", "MatMul"])
    (state,) = RewriteState.start(graph, Library([SplitMatMulsOverConcat()])).candidates
    assert len(state.nodes) == 2


def test_sums_of_matmuls_that_broadcast():
    source = model(
        "agraph (float[2,3] x, float[1,4] y) => (float[] o) { a = MatMul(x, v) b = MatMul(y, w) o = Add(a, b) }",
        v=normal(3, 5),
        w=normal(4, 5),
    )
    refuses(MergeSumOfMatMuls(), source, "dimension")
    source = model(
        "agraph (float[2,3] x) => (float[] o) { a = MatMul(x, v) b = MatMul(x, w) o = Add(a, b) }",
        v=normal(3, 5),
        w=normal(3, 1),
    )
    applies(FoldSumOfMatMuls(), source, ops=["MatMul"])
    text = "agraph (float[2,3] x, float[3,5] v) => (float[2,5] y) { a = MatMul(x, v) b = MatMul(x, w) y = Add(a, b) }"
    applies(FoldSumOfMatMuls(), model(text, w=normal(3, 5)), ops=["Add", "MatMul"])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("b", "c"), [((4,), (4,)), ((1, 4), (4,)), (None, (4,)), ((4,), None), (None, None)])
def test_sums_of_gemms(transposed, b, c):
    flip = -1 if transposed else 1
    attrs = "<transB=1>" if transposed else ""
    source = model(
        f"agraph (float[2,3] x, float[2,5] y) => (float[] o) {{ "
        f"a = Gemm{attrs}(x, v{', b' if b else ''}) d = Gemm{attrs}(y, w{', c' if c else ''}) o = Add(a, d) }}",
        v=normal(*(3, 4)[::flip]),
        w=normal(*(5, 4)[::flip]),
        b=normal(*(b or ())),
        c=normal(*(c or ())),
    )
    applies(MergeSumOfGemms(), source, ops=["Concat", "Gemm"])


@pytest.mark.parametrize(("b", "c"), [("", ""), (", b", ""), (", b", ", c")])
def test_sums_of_convs(b, c):
    text = (
        "agraph (float[2,3,6] x, float[2,{}] y) => (float[] o) {{ "
        f"a = Conv{{}}(x, v{b}) d = Conv{{}}(y, w{c}) o = Add(a, d) }}}}"
    )
    given = {"v": normal(4, 3, 3), "b": normal(4), "c": normal(4, seed=1)}
    attrs = "<pads=[1,0], strides=[2]>"
    wide = {"w": normal(4, 2, 3), **given}
    applies(MergeSumOfConvs(), model(text.format("2,6", attrs, attrs), **wide), ops=["Concat", "Conv"])
    refuses(
        MergeSumOfConvs(), model(text.format("2,6", "<pads=[1,1]>", "<pads=[0,2]>"), **wide), "attributes"
    )
    refuses(MergeSumOfConvs(), model(text.format("2,3", "<pads=[1,1]>", "<pads=[1,4]>"), **wide), "dimension")
    same = text.replace("(y, w", "(x, w")
    alike = {"w": normal(4, 3, 3, seed=5), **given}
    applies(FoldSumOfConvs(), model(same.format("2,6", attrs, attrs), **alike), ops=["Conv"])
    differing = model(same.format("2,6", "<pads=[1,1]>", "<pads=[0,2]>"), **alike)
    refuses(FoldSumOfConvs(), differing, "attributes")


def test_sum_of_matmuls_of_one_input():
    source = model(
        "agraph (int32[B,3] x) => (int32[B,4] o) { a = MatMul(x, v) b = MatMul(x, w) o = Add(b, a) }",
        v=np.arange(12, dtype=np.int32).reshape(3, 4),
        w=np.arange(12, 24, dtype=np.int32).reshape(3, 4),
    )
    applies(FoldSumOfMatMuls(), source, ops=["MatMul"])


CONCAT = "agraph (float[N,2,5,5] x, float[N,3,5,5] y, float[N,1,5,5] z) => (float[] a, float[] b) "


@pytest.mark.parametrize("relu", [False, True])
def test_convs_over_concat(relu):
    given = {"v": normal(4, 6, 3, 3), "w": normal(3, 6, 1, 1), "k": normal(4)}
    first = "p = Relu(x) q = Relu(y) c = Concat<axis=1>(p, q, z)" if relu else "c = Concat<axis=-3>(x, y, z)"
    source = model(f"{CONCAT} {{ {first} a = Conv<pads=[1,1,1,1]>(c, v, k) b = Conv(c, w) }}", **given)
    ops = ["Add"] * 4 + ["Conv"] * 6 + ["Relu"] * 2 * relu
    applies(SplitConvsOverConcat(), source, ops=ops)
    applies(SplitConvOverConcat(), source, ops=["Add"] * 2 + ["Concat"] + ["Conv"] * 4 + ["Relu"] * 2 * relu)


def test_convs_over_concat_that_stay():
    given = {"v": normal(4, 6, 1, 1), "w": normal(4, 3, 1, 1), "u": normal(2, 11)}
    mixed = model(f"{CONCAT} {{ c = Concat<axis=1>(x, y, z) a = Conv(c, v) b = Relu(c) }}", **given)
    refuses(SplitConvsOverConcat(), mixed, "another operator")
    grouped = model(
        f"{CONCAT} {{ c = Concat<axis=1>(x, y, z) a = Conv<group=2>(c, w) b = Relu(a) }}", **given
    )
    refuses(SplitConvsOverConcat(), grouped, "grouped")
    along = model(
        "agraph (float[1,3,2,5] x, float[1,3,3,5] y) => (float[] a) { c = Concat<axis=2>(x, y) a = Conv(c, w) }",
        **given,
    )
    refuses(SplitConvsOverConcat(), along)
    given_out = model(f"{CONCAT} {{ b = Concat<axis=1>(x, y, z) a = Conv(b, v) }}", **given)
    refuses(SplitConvsOverConcat(), given_out)
    alone = model(f"{CONCAT} {{ c = Concat<axis=1>(x, y, z) a = Conv(c, v) b = Relu(a) }}", **given)
    refuses(SplitConvOverConcat(), alone)


def test_a_conv_whose_weights_are_the_concat():
    source = model(
        "agraph (float[2,3,1,1] x, float[2,3,1,1] y) => (float[] a) { c = Concat<axis=1>(x, y) a = Conv(c, c) }"
    )
    refuses(SplitConvsOverConcat(), source, "is a weight")


@pytest.mark.parametrize("product", ["MatMul(c, v)", "Gemm(c, v, k)", "Gemm<transB=1, alpha=2.0>(c, w, k)"])
def test_products_over_concat(product):
    source = model(
        f"agraph (float[2,3] x, float[2,4] y) => (float[] a) {{ c = Concat<axis=-1>(x, y) a = {product} }}",
        v=normal(7, 5),
        w=normal(5, 7),
        k=normal(5),
    )
    name = product.split("(")[0].split("<")[0]
    applies(SplitMatMulsOverConcat(), source, ops=["Add", name, name])


def test_products_over_concat_of_rows():
    text = "agraph (float[2,3] x, float[4,3] y) => (float[] a) {{ c = Concat<axis=0>(x, y) a = {} }}"
    refuses(SplitMatMulsOverConcat(), model(text.format("MatMul(c, v)"), v=normal(3, 5)))
    text = "agraph (float[2,3] x, float[2,4] y) => (float[] a) {{ c = Concat<axis=1>(x, y) a = {} }}"
    refuses(SplitMatMulsOverConcat(), model(text.format("Gemm<transA=1>(c, v)"), v=normal(2, 5)), "another")


def test_large_constants_are_not_multiplied_out(monkeypatch):
    monkeypatch.setattr(merge, "AT_EXPORT", 5 * 6 * 7 - 1)
    source = "agraph (float[2,5] x) => (float[2,7] y) { p = MatMul(x, w)\n y = MatMul(p, v) }"
    w, v = np.ones((5, 6), np.float32), np.ones((6, 7), np.float32)
    refuses(merge.AssociateMatMulsRight(), model(source, w=w, v=v), "would take long")
    monkeypatch.setattr(merge, "AT_EXPORT", 5 * 6 * 7)
    applies(merge.AssociateMatMulsRight(), model(source, w=w, v=v), ops=["MatMul"])


def constants() -> tuple[GraphBuilder, dict[str, Val]]:
    """Parts of two matrices, too large to be folded: top and bottom are all of one."""
    cuts = {"top": ("w", 0, 40), "bottom": ("w", 40, 64), "inner": ("w", 10, 30), "other": ("u", 40, 64)}
    made = " ".join(f"{name} = Slice({of}, n{a}, n{b}, n0)" for name, (of, a, b) in cuts.items())
    names = [*cuts, "leaf", "glued"]
    outputs = ", ".join(f"float[A,B] {name}" for name in names)
    rng = np.random.default_rng(0)
    sizes = {"w": 64, "u": 64, "v": 24}
    graph = load(
        model(
            f"agraph (float[1] x) => ({outputs}) {{ {made} leaf = Identity(v)"
            " glued = Concat<axis = 0>(top, other) }",
            **{name: rng.standard_normal((n, 64)).astype(np.float32) for name, n in sizes.items()},
            **{f"n{i}": np.array([i]) for i in (0, 10, 30, 40, 64)},
        )
    ).graph
    return GraphBuilder(graph), {n: Val(graph, v, graph.type(v)) for n, v in zip(names, graph.outputs)}


@pytest.mark.parametrize(
    ("parts", "is_whole"),
    [
        (["top", "bottom"], True),
        (["bottom", "top"], False),
        (["top", "other"], False),
        (["top", "leaf"], False),
        (["top", "glued"], False),
        (["top"], False),
    ],
)
def test_the_parts_of_a_constant_are_the_constant(parts: list[str], is_whole: bool) -> None:
    op, known = constants()
    found = concat_constants(op, [known[name] for name in parts], 0)
    source = found.graph.producers[known["top"].value].inputs[0]
    assert (found.value == source) is is_whole


@pytest.mark.parametrize(
    ("start", "stop", "part"), [(0, 40, "top"), (40, 64, "other"), (10, 64, None), (0, 30, None)]
)
def test_a_part_of_a_constant_that_was_put_together(start: int, stop: int, part: str | None) -> None:
    op, known = constants()
    found = slice_constant(op, known["glued"], 0, start, stop).value
    assert [name for name, v in known.items() if v.value == found] == ([part] if part else [])


def test_parts_of_a_constant_are_ordered_by_where_they_begin() -> None:
    _, known = constants()
    assert cut_order([known[name] for name in ("bottom", "top")]) == [1, 0]
    assert cut_order([known[name] for name in ("inner", "top")]) == [1, 0]
