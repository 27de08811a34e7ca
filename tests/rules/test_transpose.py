"""Transposes: cancelled, merged, moved."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from rewrite_rules import transpose
from rewrite_rules.axes import front, slice_numbers
from rewrite_rules.transpose import (
    CancelTransposes,
    FoldTransposeIntoGemmA,
    FoldTransposeIntoGemmB,
    MergeTransposes,
    PushTransposeDown,
    PushTransposeIntoConcat,
    PushTransposeIntoMatMul,
    PushTransposeIntoReduce,
    PushTransposeIntoSoftmax,
    PushTransposesDown,
    PushTransposesThroughConcat,
    PushTransposesThroughMatMul,
    PushTransposesUp,
    PushTransposesUpSplit,
    PushTransposeThroughReduce,
    PushTransposeThroughSoftmax,
    PushTransposeThroughSplit,
    PushTransposeUp,
    RemoveNoopTranspose,
    ReplaceReshapedTranspose,
    ReplaceTransposeByReshape,
)
from tests.rules.harness import applies, model, refuses
from xrlflow.onnxio import load
from xrlflow.rewrite import Reader, Refused

SIZES = (2, 3, 4, 5)


def dims(perm, sizes=SIZES):
    return ",".join(str(sizes[p]) for p in perm)


def attr(perm):
    return f"<perm=[{','.join(map(str, perm))}]>"


@pytest.mark.parametrize("p", [(0, 2, 1), (1, 2, 0), (2, 1, 0), (0, 1, 2)])
@pytest.mark.parametrize("q", [(0, 2, 1), (2, 0, 1), (2, 1, 0)])
def test_two(p, q):
    both = tuple(p[i] for i in q)
    source = model(
        f"agraph (float[2,3,4] x) => (float[{dims(both)}] y) "
        f"{{ a = Transpose{attr(p)}(x) b = Transpose{attr(q)}(a) y = Relu(b) }}"
    )
    if both == (0, 1, 2):
        applies(CancelTransposes(), source, ops=["Relu"])
        refuses(MergeTransposes(), source, "cancel")
    else:
        applies(MergeTransposes(), source, ops=["Relu", "Transpose"])
        refuses(CancelTransposes(), source, "do not cancel")


def test_two_of_unknown_sizes_and_rank():
    source = "agraph (float[A,B] x) => (float[A,B] y) { a = Transpose(x) b = Transpose(a) y = Relu(b) }"
    applies(CancelTransposes(), model(source), ops=["Relu"])
    # The inner one is read elsewhere and stays.
    source = (
        "agraph (float[A,B] x) => (float[A,B] y, float[B,A] z) "
        "{ z = Transpose(x) b = Transpose(z) y = Relu(b) }"
    )
    applies(CancelTransposes(), model(source), ops=["Relu", "Transpose"])


def test_noop():
    source = "agraph (float[A,B] x) => (float[A,B] y) { a = Transpose<perm=[0,1]>(x) y = Relu(a) }"
    applies(RemoveNoopTranspose(), model(source), ops=["Relu"])
    refuses(
        RemoveNoopTranspose(), model("agraph (float[A,B] x) => (float[B,A] y) { y = Transpose(x) }"), "moves"
    )


@pytest.mark.parametrize(
    ("before", "perm", "after"),
    [
        ("2,1,3", (0, 2, 1), "2,3,1"),
        ("N,1,3", (0, 2, 1), "N,3,1"),
        ("1,N,3", (1, 2, 0), "N,3,1"),
        ("1,1,3,1", (2, 0, 1, 3), "3,1,1,1"),
    ],
)
def test_unit_dimensions(before, perm, after):
    source = f"agraph (float[{before}] x) => (float[{after}] y) {{ y = Transpose{attr(perm)}(x) }}"
    applies(ReplaceTransposeByReshape(), model(source), ops=["Reshape"])


def test_unit_dimensions_that_are_not():
    for before, after, reason in (("2,1,3", "3,1,2", "moves data"), ("A,1,B", "1,A,B", "not known")):
        perm = (2, 1, 0) if "2" in before else (1, 0, 2)
        source = f"agraph (float[{before}] x) => (float[{after}] y) {{ y = Transpose{attr(perm)}(x) }}"
        refuses(ReplaceTransposeByReshape(), model(source), reason)


UNARY = ["Relu(a)", "LeakyRelu<alpha=0.3>(a)", "Clip(a, lo, hi)", "Cast<to=1>(a)", "Gelu(a)", "Sqrt(a)"]


@pytest.mark.parametrize("node", UNARY)
@pytest.mark.parametrize("perm", [(0, 2, 1), (2, 0, 1), (2, 1, 0)])
def test_unary(node, perm):
    given = {"lo": np.float32(-0.5), "hi": np.float32(0.5)} if "lo" in node else {}
    down = f"agraph (float[2,3,4] x) => (float[{dims(perm)}] y) {{ a = Transpose{attr(perm)}(x) y = {node} }}"
    graph = applies(PushTransposeDown(), model(down.replace("Sqrt", "Exp"), **given))
    assert graph.producers[graph.outputs[0]].op == "Transpose"
    up = f"agraph (float[2,3,4] a) => (float[{dims(perm)}] y) {{ b = {node} y = Transpose{attr(perm)}(b) }}"
    graph = applies(PushTransposeUp(), model(up.replace("Sqrt", "Exp"), **given))
    assert graph.producers[graph.outputs[0]].op != "Transpose"


def test_unary_of_what_is_read_elsewhere():
    source = "agraph (float[A,B] x) => (float[B,A] y, float[B,A] z) { z = Transpose(x) y = Relu(z) }"
    refuses(PushTransposeDown(), model(source), "read elsewhere")
    source = "agraph (float[A,B] x) => (float[B,A] y, float[A,B] z) { z = Relu(x) y = Transpose(z) }"
    refuses(PushTransposeUp(), model(source), "read elsewhere")
    # Softmax is not element by element.
    source = "agraph (float[A,B] x) => (float[B,A] y) { z = Transpose(x) y = Softmax(z) }"
    refuses(PushTransposeDown(), model(source))


@pytest.mark.parametrize("op", ["Add", "Sub", "Div", "Max", "Less"])
def test_binary(op):
    out = "bool" if op == "Less" else "float"
    source = (
        f"agraph (float[2,3,4] x, float[2,1,4] z) => ({out}[2,4,3] y) "
        f"{{ a = Transpose<perm=[0,2,1]>(x) b = Transpose<perm=[0,2,1]>(z) y = {op}(a, b) }}"
    )
    applies(PushTransposesDown(), model(source), ops=[op, "Transpose"])


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 1), (1, 4, 3), (2, 1, 1)])
def test_binary_with_a_constant(shape):
    c = np.random.default_rng(0).random(shape).astype(np.float32)
    source = "agraph (float[2,3,4] x) => (float[2,4,3] y) { a = Transpose<perm=[0,2,1]>(x) y = Sub(c, a) }"
    applies(PushTransposesDown(), model(source, c=c), ops=["Sub", "Transpose"])
    source = "agraph (float[2,4,3] x) => (float[2,3,4] y) { a = Sub(c, x) y = Transpose<perm=[0,2,1]>(a) }"
    applies(PushTransposesUp(), model(source, c=c), ops=["Sub", "Transpose"])


def test_ternary():
    source = (
        "agraph (bool[2,3,4] c, float[2,3,4] x) => (float[4,3,2] y) "
        "{ a = Transpose(c) b = Transpose(x) y = Where(a, b, zero) }"
    )
    applies(PushTransposesDown(), model(source, zero=np.float32(0)), ops=["Transpose", "Where"])


def test_binary_refusals():
    source = (
        "agraph (float[2,3,3] x, float[2,3,3] z) => (float[2,3,3] y) "
        "{ a = Transpose<perm=[0,2,1]>(x) y = Add(a, z) }"
    )
    refuses(PushTransposesDown(), model(source), "not transposed")
    source = (
        "agraph (float[3,3,3] x, float[3,3,3] z) => (float[3,3,3] y) "
        "{ a = Transpose<perm=[0,2,1]>(x) b = Transpose<perm=[1,0,2]>(z) y = Add(a, b) }"
    )
    refuses(PushTransposesDown(), model(source), "different ways")
    source = (
        "agraph (float[2,3,4] x, float[2,3,4] z) => (float[2,4,3] y) "
        "{ a = Add(x, z) y = Transpose<perm=[0,2,1]>(a) }"
    )
    refuses(PushTransposesUp(), model(source), "no operand is transposed")
    source = (
        "agraph (float[4,3] x, float[2,3,4] z) => (float[2,4,3] y) "
        "{ t = Transpose(x) a = Add(t, z) y = Transpose<perm=[0,2,1]>(a) }"
    )
    refuses(PushTransposesUp(), model(source), "fewer dimensions")


def test_a_constant_that_is_transposed_is_not_enough():
    source = "agraph (float s) => (float[30,40] y) { a = Transpose(w) y = Mul(a, s) }"
    w = np.ones((40, 30), np.float32)
    refuses(PushTransposesDown(), model(source, w=w))


@pytest.mark.parametrize(("axis", "found"), [(0, 0), (2, 2), (-1, 2), (-3, 0), (3, None), (-4, None)])
def test_axes_are_counted_from_the_front(axis, found):
    if found is None:
        with pytest.raises(Refused):
            front(axis, 3)
    else:
        assert front(axis, 3) == found


def test_the_greatest_end_of_a_slice_is_before_the_first_backwards_alone():
    """As where its numbers have become known after loading."""
    source = "agraph (float[6,6] x) => (float[4,5] y) { y = Slice(x, p, q, k, s) }"
    given = {"p": np.array([1, 4]), "q": np.array([5, -7]), "k": np.array([0, 1]), "s": np.array([1, -1])}
    graph = load(model(source, **given)).graph
    (node,) = graph.nodes()
    ends = graph.leaves.numbers((5, 2**31 - 1))
    node = replace(node, inputs=(*node.inputs[:2], ends, *node.inputs[3:]))
    assert slice_numbers(Reader(graph), node, 2) == [(0, 1, 5, 1), (1, 4, -(2**63), -1)]


def test_matmul():
    source = (
        "agraph (float[3,2] x, float[4,3] z) => (float[2,4] y) "
        "{ a = Transpose(x) b = Transpose(z) y = MatMul(a, b) }"
    )
    applies(PushTransposesThroughMatMul(), model(source), ops=["MatMul", "Transpose"])
    source = (
        "agraph (float[N,5,3,2] x, float[1,5,4,3] z) => (float[N,5,2,4] y) "
        "{ a = Transpose<perm=[0,1,3,2]>(x) b = Transpose<perm=[0,1,3,2]>(z) y = MatMul(a, b) }"
    )
    applies(PushTransposesThroughMatMul(), model(source), ops=["MatMul", "Transpose"])
    source = (
        "agraph (float[3,5,2] x, float[5,4,3] z) => (float[5,2,4] y) "
        "{ a = Transpose<perm=[1,2,0]>(x) b = Transpose<perm=[0,2,1]>(z) y = MatMul(a, b) }"
    )
    refuses(PushTransposesThroughMatMul(), model(source), "not the last two")


@pytest.mark.parametrize(
    ("x", "w", "out"), [("2,3", (3, 4), "4,2"), ("5,2,3", (3, 4), "5,4,2"), ("5,2,3", (5, 3, 4), "5,4,2")]
)
def test_transpose_of_matmul(x, w, out):
    perm = "<perm=[0,2,1]>" if out.count(",") == 2 else ""
    source = f"agraph (float[{x}] x) => (float[{out}] y) {{ a = MatMul(x, w) y = Transpose{perm}(a) }}"
    weight = np.random.default_rng(0).random(w).astype(np.float32)
    applies(PushTransposeIntoMatMul(), model(source, w=weight), ops=["MatMul", "Transpose"])


def test_transpose_of_matmul_refusals():
    source = (
        "agraph (float[3,3,3] x, float[3,3,3] z) => (float[3,3,3] y) { a = MatMul(x, z) y = Transpose(a) }"
    )
    refuses(PushTransposeIntoMatMul(), model(source), "not the last two")
    source = "agraph (float[4,2,3] x, float[3] z) => (float[2,4] y) { a = MatMul(x, z) y = Transpose(a) }"
    refuses(PushTransposeIntoMatMul(), model(source), "vector")


@pytest.mark.parametrize("flag", [0, 1])
@pytest.mark.parametrize("bias", ["", ", c"])
def test_gemm(flag, bias):
    c = {"c": np.arange(4, dtype=np.float32)} if bias else {}
    x = "3,2" if flag == 0 else "2,3"
    source = (
        f"agraph (float[{x}] x, float[3,4] z) => (float[2,4] y) "
        f"{{ a = Transpose(x) y = Gemm<transA={flag}, alpha=0.5>(a, z{bias}) }}"
    )
    applies(FoldTransposeIntoGemmA(), model(source, **c), ops=["Gemm"])
    z = "4,3" if flag == 0 else "3,4"
    source = (
        f"agraph (float[2,3] x, float[{z}] z) => (float[2,4] y) "
        f"{{ a = Transpose(z) y = Gemm<transB={flag}, beta=2.0>(x, a{bias}) }}"
    )
    applies(FoldTransposeIntoGemmB(), model(source, **c), ops=["Gemm"])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat(axis):
    shape = [2, 4, 3]
    shape[axis] *= 2
    out = ",".join(map(str, shape))
    c = np.random.default_rng(0).random((2, 4, 3)).astype(np.float32)
    source = (
        f"agraph (float[2,3,4] x) => (float[{out}] y) "
        f"{{ a = Transpose<perm=[0,2,1]>(x) y = Concat<axis={axis}>(c, a) }}"
    )
    applies(PushTransposesThroughConcat(), model(source, c=c), ops=["Concat", "Transpose"])
    source = (
        f"agraph (float[2,4,3] x) => (float[{dims((0, 2, 1), shape)}] y) "
        f"{{ a = Concat<axis={axis}>(c, x) y = Transpose<perm=[0,2,1]>(a) }}"
    )
    applies(PushTransposeIntoConcat(), model(source, c=c), ops=["Concat", "Transpose"])


def test_concat_refusals():
    source = (
        "agraph (float[2,3] x, float[3,2] z) => (float[6,2] y) { a = Transpose(x) y = Concat<axis=0>(a, z) }"
    )
    refuses(PushTransposesThroughConcat(), model(source), "not transposed")
    source = (
        "agraph (float[2,3] x, float[2,3] z) => (float[3,4] y) { a = Concat<axis=0>(x, z) y = Transpose(a) }"
    )
    refuses(PushTransposeIntoConcat(), model(source), "no operand")


@pytest.mark.parametrize("perm", [(0, 2, 1), (2, 0, 1)])
def test_split(perm):
    sizes = [6, 4, 2]
    permuted = [sizes[p] for p in perm]
    for axis in range(3):
        first, second = list(permuted), list(permuted)
        first[axis], second[axis] = 1, permuted[axis] - 1
        a, b = ",".join(map(str, first)), ",".join(map(str, second))
        source = (
            f"agraph (float[6,4,2] x) => (float[{a}] y, float[{b}] z) "
            f"{{ t = Transpose{attr(perm)}(x) y, z = Split<axis={axis}>(t, s) }}"
        )
        applies(
            PushTransposeThroughSplit(),
            model(source, s=np.array([1, permuted[axis] - 1])),
            ops=["Split", "Transpose", "Transpose"],
        )


def test_split_up():
    source = (
        "agraph (float[N,6] x) => (float[2,N] y, float[4,N] z) "
        "{ a, b = Split<axis=-1>(x, s) y = Transpose(a) z = Transpose(b) }"
    )
    applies(PushTransposesUpSplit(), model(source, s=np.array([2, 4])), ops=["Split", "Transpose"])
    source = (
        "agraph (float[N,4] x) => (float[2,N] y, float[N,2] z) "
        "{ a, b = Split<axis=-1, num_outputs=2>(x) y = Transpose(a) z = Relu(b) }"
    )
    refuses(PushTransposesUpSplit(), model(source))


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceMax", "ReduceSum", "ReduceL2"])
@pytest.mark.parametrize("keep", [0, 1])
def test_reduce(op, keep):
    for axes in ([0], [1, -1], [2]):
        perm = (2, 0, 1)
        after = [SIZES[p] for p in perm]
        places = {a % 3 for a in axes}
        shape = [1 if i in places else d for i, d in enumerate(after) if keep or i not in places]
        source = (
            f"agraph (float[2,3,4] x) => (float[{','.join(map(str, shape))}] y) "
            f"{{ t = Transpose{attr(perm)}(x) a = {op}<keepdims={keep}>(t, i) y = Relu(a) }}"
        )
        applies(PushTransposeThroughReduce(), model(source, i=np.array(axes)))


def test_reduce_refusals():
    source = "agraph (float[2,3] x) => (float y) { t = Transpose(x) y = ReduceMean<keepdims=0>(t) }"
    refuses(PushTransposeThroughReduce(), model(source), "everything")
    source = "agraph (float[2,3] x) => (float[1,2] y) { a = ReduceMean(x, i) y = Transpose(a) }"
    refuses(PushTransposeIntoReduce(), model(source, i=np.array([1])), "no operand")


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis", [0, 1, 2, None])
def test_softmax(op, axis):
    node = op if axis is None else f"{op}<axis={axis}>"
    source = f"agraph (float[2,3,4] x) => (float[4,2,3] y) {{ a = Transpose<perm=[2,0,1]>(x) y = {node}(a) }}"
    applies(PushTransposeThroughSoftmax(), model(source), ops=[op, "Transpose"])
    source = f"agraph (float[2,3,4] x) => (float[4,2,3] y) {{ a = {node}(x) y = Transpose<perm=[2,0,1]>(a) }}"
    applies(PushTransposeIntoSoftmax(), model(source), ops=[op, "Transpose"])


def test_softmax_refusals():
    source = "agraph (float[A,B] x) => (float[A,B] y) { a = Softmax(x) y = Relu(a) }"
    refuses(PushTransposeIntoSoftmax(), model(source))
    source = "agraph (float[A,B] x) => (float[B,A] y, float[B,A] a) { a = Transpose(x) y = Softmax(a) }"
    refuses(PushTransposeThroughSoftmax(), model(source), "read elsewhere")


@pytest.mark.parametrize(
    ("before", "middle", "perm", "after", "ops"),
    [
        ((2, 12), (2, 3, 4), (1, 2, 0), (12, 2), ["Relu", "Transpose"]),
        ((2, 12), (2, 3, 4), (0, 1, 2), (2, 12), ["Relu"]),
        ((6, 1, 4), (6, 4), (1, 0), (4, 1, 6), ["Relu", "Transpose"]),
        ((2, 3, 4), (2, 3, 1, 4), (3, 2, 0, 1), (4, 2, 3), ["Relu", "Transpose"]),
        ((2, 3), (2, 1, 3), (0, 2, 1), (-1, 3), ["Relu"]),
    ],
)
def test_between_reshapes(before, middle, perm, after, ops):
    array = np.zeros(before).reshape(middle).transpose(perm).reshape(after)
    out = ",".join(map(str, array.shape))
    source = (
        f"agraph (float[{','.join(map(str, before))}] x) => (float[{out}] y) "
        f"{{ a = Reshape(x, s) b = Transpose{attr(perm)}(a) c = Reshape(b, t) y = Relu(c) }}"
    )
    proto = model(source, s=np.array(middle, np.int64), t=np.array(after, np.int64))
    applies(ReplaceReshapedTranspose(), proto, ops=ops)


def test_between_reshapes_any():
    """Whatever it admits among many small cases is right."""
    rng = np.random.default_rng(0)
    admitted = 0
    for before, middle in itertools.product(
        [(4, 6), (2, 12), (1, 24)], [(4, 2, 3), (2, 2, 6), (24, 1), (2, 3, 4)]
    ):
        for perm in itertools.permutations(range(len(middle))):
            for after in ((6, 4), (4, 6), (24, 1), (12, 2)):
                try:
                    found = transpose._whole_moves(before, middle, perm, after)
                except Refused:
                    continue
                x = rng.random(before)
                np.testing.assert_array_equal(
                    x.transpose(found), x.reshape(middle).transpose(perm).reshape(after)
                )
                admitted += 1
    assert admitted > 10


def test_between_reshapes_refusals():
    source = (
        "agraph (float[2,12] x) => (float[2,12] y) "
        "{ a = Reshape(x, s) b = Transpose<perm=[0,2,1]>(a) y = Reshape(b, t) }"
    )
    given = {"s": np.array([2, 3, 4]), "t": np.array([2, 12])}
    refuses(ReplaceReshapedTranspose(), model(source, **given), "as a whole")
