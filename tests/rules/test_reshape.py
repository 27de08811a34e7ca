"""Reshapes and their like: merged, cancelled, moved."""

from __future__ import annotations

import numpy as np
import pytest

from rewrite_rules.elementwise import keeps_shape
from rewrite_rules.reshape import (
    CancelSqueeze,
    CancelUnsqueeze,
    MergeReshapes,
    MergeUnitAxes,
    PullUnsqueezeOutOfConcat,
    PushReshapeDown,
    PushReshapeIntoMatMul,
    PushReshapesDown,
    PushReshapesUp,
    PushReshapeThroughMatMul,
    PushReshapeUp,
)
from tests.rules.harness import applies, ints, model, numbers, refuses


@pytest.mark.parametrize(
    ("before", "nodes", "after", "given", "ops"),
    [
        ("2,3,4", "a = Reshape(x, s) b = Reshape(a, t)", "4,6", ints(s=[24], t=[4, -1]), ["Relu", "Reshape"]),
        (
            "N,3,4",
            "a = Reshape(x, s) b = Reshape(a, t)",
            "N,4,3",
            ints(s=[0, 12], t=[0, 4, 3]),
            ["Relu", "Reshape"],
        ),
        ("N,3,4", "a = Reshape(x, s) b = Reshape(a, t)", "N,3,4", ints(s=[0, 12], t=[0, 3, 4]), ["Relu"]),
        ("N,3", "a = Unsqueeze(x, s) b = Squeeze(a, t)", "N,3", ints(s=[0], t=[0]), ["Relu"]),
        ("2,3,4", "a = Flatten(x) b = Unsqueeze(a, s)", "2,1,12", ints(s=[1]), ["Relu", "Reshape"]),
        ("1,2,1,3", "a = Squeeze(x) b = Flatten<axis=0>(a)", "1,6", {}, ["Relu", "Reshape"]),
        ("M,2,1", "a = Squeeze(x, s) b = Unsqueeze(a, s)", "M,2,1", ints(s=[-1]), ["Relu"]),
    ],
)
def test_merge(before, nodes, after, given, ops):
    source = f"agraph (float[{before}] x) => (float[{after}] y) {{ {nodes} y = Relu(b) }}"
    applies(MergeReshapes(), model(source, **given), ops=ops)


def test_merge_where_the_inner_is_read_elsewhere():
    source = (
        "agraph (float[2,3,4] x) => (float[4,6] y, float[24] a) "
        "{ a = Reshape(x, s) b = Reshape(a, t) y = Relu(b) }"
    )
    applies(MergeReshapes(), model(source, **ints(s=[24], t=[4, 6])), ops=["Relu", "Reshape", "Reshape"])


def test_merge_refusals():
    source = "agraph (float[A,B,C] x) => (float[P,Q] y) { a = Flatten<axis=2>(x) y = Flatten(a) }"
    refuses(MergeReshapes(), model(source), "not known")
    source = "agraph (float[N,0] x) => (float[0,5] y) { a = Reshape(x, s) y = Reshape<allowzero=1>(a, t) }"
    refuses(MergeReshapes(), model(source, **ints(s=[0, 0], t=[0, 5])), "a dimension is 0")


def test_squeeze_of_unsqueeze():
    source = (
        "agraph (float[A,B] x) => (float[A,B] y) "
        "{ r = Identity(x) a = Unsqueeze(r, i) b = Squeeze(a, j) y = Relu(b) }"
    )
    proto = model(source, **ints(i=[0, 2], j=[2, -4]))
    applies(CancelUnsqueeze(), proto, ops=["Identity", "Relu"])
    source = (
        "agraph (float[A,1,B] x) => (float[A,1,B] y) { a = Squeeze(x, i) b = Unsqueeze(a, j) y = Relu(b) }"
    )
    applies(CancelSqueeze(), model(source, **ints(i=[1], j=[-2])), ops=["Relu"])
    source = "agraph (float[A,1,B] x) => (float[1,A,B] y) { a = Squeeze(x, i) y = Unsqueeze(a, j) }"
    refuses(CancelSqueeze(), model(source, **ints(i=[1], j=[0])), "axes differ")
    source = "agraph (float[1,B] x) => (float[B,1] y) { a = Unsqueeze(x, i) y = Squeeze(a, j) }"
    refuses(CancelUnsqueeze(), model(source, **ints(i=[2], j=[0])), "axes differ")


VIEWS = [
    ("2,3,4", "Reshape({}, s)", "6,4", ints(s=[-1, 4])),
    ("N,3,4", "Flatten({})", "N,12", {}),
    ("N,3", "Unsqueeze({}, s)", "N,1,3", ints(s=[1])),
    ("N,1,3", "Squeeze({}, s)", "N,3", ints(s=[1])),
]
UNARY = ["Relu({})", "Clip({}, lo, hi)", "LeakyRelu<alpha=0.2>({})", "Cast<to=1>({})"]


@pytest.mark.parametrize(("before", "view", "after", "given"), VIEWS)
@pytest.mark.parametrize("unary", UNARY)
def test_unary(before, view, after, given, unary):
    given = given | ({"lo": np.float32(-0.5), "hi": np.float32(0.5)} if "lo" in unary else {})
    head = f"agraph (float[{before}] x) => (float[{after}] y)"
    down = model(f"{head} {{ a = {view.format('x')} y = {unary.format('a')} }}", **given)
    graph = applies(PushReshapeDown(), down)
    assert graph.producers[graph.outputs[0]].op == view.partition("(")[0]
    up = model(f"{head} {{ a = {unary.format('x')} y = {view.format('a')} }}", **given)
    graph = applies(PushReshapeUp(), up)
    assert graph.producers[graph.outputs[0]].op != view.partition("(")[0]


def test_unary_refusals():
    source = "agraph (float[N,3] x) => (float[N,1,3] y, float[N,1,3] a) { a = Unsqueeze(x, s) y = Relu(a) }"
    refuses(PushReshapeDown(), model(source, **ints(s=[1])), "read elsewhere")
    source = "agraph (float[N,3] x) => (float[N,1,3] y) { a = Unsqueeze(x, s) y = Softmax<axis=0>(a) }"
    refuses(PushReshapeDown(), model(source, **ints(s=[1])))
    source = "agraph (float[N,3] x) => (float[N,1,3] y, float[N,3] a) { a = Relu(x) y = Unsqueeze(a, s) }"
    refuses(PushReshapeUp(), model(source, **ints(s=[1])), "read elsewhere")


@pytest.mark.parametrize("op", ["Add", "Sub", "Pow", "Min"])
def test_binary(op):
    source = (
        f"agraph (float[2,3,4] x, float[2,3,4] z) => (float[6,4] y) "
        f"{{ a = Reshape(x, s) b = Reshape(z, t) y = {op}(a, b) }}"
    )
    if op == "Pow":
        source = source.replace("b = Reshape(z, t)", "c = Abs(z) b = Reshape(c, t)").replace(
            "Pow(a, b)", "Pow(b, a)"
        )
    applies(PushReshapesDown(), model(source, **ints(s=[6, 4], t=[-1, 4])))
    source = (
        f"agraph (float[2,3,4] x, float[6,4] z) => (float[6,4] y) "
        f"{{ b = Reshape(z, t) a = {op}(x, b) y = Reshape(a, s) }}"
    )
    if op != "Pow":
        applies(
            PushReshapesUp(),
            model(source, **ints(s=[6, 4], t=[2, 3, 4])),
            ops=[op, "Reshape", "Reshape", "Reshape"],
        )


@pytest.mark.parametrize("shape", [(), (1,), (4,)])
def test_binary_with_a_small_operand(shape):
    source = "agraph (float[2,3,4] x) => (float[6,4] y) { a = Reshape(x, s) y = Sub(c, a) }"
    applies(PushReshapesDown(), model(source, c=numbers(*shape), **ints(s=[6, 4])), ops=["Reshape", "Sub"])
    source = "agraph (float[2,3,4] x) => (float[6,4] y) { a = Sub(c, x) y = Reshape(a, s) }"
    applies(PushReshapesUp(), model(source, c=numbers(*shape), **ints(s=[6, 4])), ops=["Reshape", "Sub"])


def test_binary_with_a_constant_of_the_whole_shape():
    source = "agraph (float[2,3,4] x) => (float[6,4] y) { a = Mul(c, x) y = Reshape(a, s) }"
    applies(PushReshapesUp(), model(source, c=numbers(2, 3, 4), **ints(s=[6, 4])), ops=["Mul", "Reshape"])


def test_binary_refusals():
    source = "agraph (float[2,3,4] x) => (float[6,4] y) { a = Reshape(x, s) y = Add(a, c) }"
    refuses(PushReshapesDown(), model(source, c=numbers(6, 4), **ints(s=[6, 4])), "not reshaped")
    source = "agraph (float[3,4,4] x) => (float[3,16] y) { a = Add(x, c) y = Reshape(a, s) }"
    refuses(PushReshapesUp(), model(source, c=numbers(4), **ints(s=[3, 16])), "another shape")
    source = "agraph (float[2,3] x, float[3,2] z) => (float[6] y) { a = Reshape(x, s) b = Reshape(z, s) y = Add(a, b) }"
    refuses(PushReshapesDown(), model(source, **ints(s=[6])), "different ways")
    source = "agraph (float[2,3] x, float[2,3] z) => (float[6] y) { a = Add(x, z) y = Reshape(a, s) }"
    refuses(PushReshapesUp(), model(source, **ints(s=[6])), "no operand")


@pytest.mark.parametrize(
    ("shape", "other", "kept"),
    [
        ((2, 3), (2, 3), True),
        ((2, 3), (3,), True),
        ((2, 3), (2, 1), True),
        ((2, 3), (), True),
        ((2, 1), (3,), False),
        ((3,), (1, 3), False),
        (("N", 3), ("N", 3), True),
        (("N", 3), ("M", 3), False),
        ((None, 3), (None, 3), False),
        ((2, 3), None, False),
        (None, (3,), False),
        (None, (), True),
    ],
)
def test_what_broadcasting_leaves_as_it_is(shape, other, kept):
    assert keeps_shape(shape, other) is kept


def test_matmul():
    source = "agraph (float[{0}] x) => (float[{1},5] y) {{ a = Reshape(x, s) y = MatMul(a, w) }}"
    w = numbers(4, 5)
    for before, after, s in (
        ("2,3,4", "6", [6, 4]),
        ("6,4", "2,3", [2, 3, 4]),
        ("N,3,4", "N,1,3", [0, 1, 3, 4]),
    ):
        proto = model(source.format(before, after), w=w, **ints(s=s))
        applies(PushReshapeThroughMatMul(), proto, ops=["MatMul", "Reshape"])
    proto = model(source.format("2,12", "6"), w=w, **ints(s=[6, 4]))
    refuses(PushReshapeThroughMatMul(), proto, "last dimension")
    proto = model(source.format("24", "6"), w=w, **ints(s=[6, 4]))
    refuses(PushReshapeThroughMatMul(), proto, "last dimension")
    proto = model(source.format("4", "1"), w=w, **ints(s=[1, 4]))
    applies(PushReshapeThroughMatMul(), proto, ops=["MatMul", "Reshape"])
    symbolic = source.replace("x)", "x, float[4,K] w)").replace("5]", "K]").format("N,2,3,4", "N,3,2")
    applies(PushReshapeThroughMatMul(), model(symbolic, **ints(s=[0, 3, 2, 4])), ops=["MatMul", "Reshape"])
    proto = model(source.format("2,3,4", "1,6"), w=numbers(1, 4, 5), **ints(s=[6, 4]))
    refuses(PushReshapeThroughMatMul(), proto, "not a matrix")


def test_reshape_of_matmul():
    source = "agraph (float[{0},4] x) => (float[{1}] y) {{ a = MatMul(x, w) y = Reshape(a, s) }}"
    w = numbers(4, 5)
    for before, after, s in (
        ("2,3", "6,5", [6, 5]),
        ("6", "2,3,5", [2, 3, 5]),
        ("N,3", "N,1,3,5", [0, 1, 3, 5]),
    ):
        applies(
            PushReshapeIntoMatMul(),
            model(source.format(before, after), w=w, **ints(s=s)),
            ops=["MatMul", "Reshape"],
        )
    refuses(PushReshapeIntoMatMul(), model(source.format("6", "30"), w=w, **ints(s=[30])), "last dimension")
    refuses(
        PushReshapeIntoMatMul(), model(source.format("6", "5,6"), w=w, **ints(s=[5, 6])), "last dimension"
    )


STACK = (
    "agraph (float[{dims}] x, float[{dims}] z) => (float[{out}] y) {{"
    " a = Unsqueeze(x, i)\n b = Unsqueeze(z, j)\n y = Concat<axis={axis}>(a, b) }}"
)


@pytest.mark.parametrize(
    ("dims", "out", "axis", "inserted"),
    [
        ("N,3", "N,2,3", 1, 1),
        ("N,3", "N,2,3", 1, -2),
        ("2,3,4", "2,2,3,4", 0, 0),
        ("2,3,4", "2,3,2,4", -2, 2),
    ],
)
def test_unsqueezes_below_a_concat(dims: str, out: str, axis: int, inserted: int) -> None:
    source = STACK.format(dims=dims, out=out, axis=axis)
    proto = model(source, i=np.array([inserted]), j=np.array([inserted]))
    applies(PullUnsqueezeOutOfConcat(), proto, ops=["Concat", "Reshape"])


def test_a_last_axis_is_not_stacked_by_a_reshape() -> None:
    source = STACK.format(dims="2,3", out="2,3,2", axis=2)
    refuses(PullUnsqueezeOutOfConcat(), model(source, i=np.array([2]), j=np.array([2])), "is the last")


def test_unsqueezes_along_another_axis() -> None:
    source = STACK.format(dims="2,3", out="2,6,1", axis=1)
    refuses(PullUnsqueezeOutOfConcat(), model(source, i=np.array([2]), j=np.array([2])), "another axis")


@pytest.mark.parametrize(
    ("before", "first", "second", "after", "ops"),
    [
        ("N,M", ("Unsqueeze", [1]), ("Unsqueeze", [0, -1]), "1,N,1,M,1", ["Relu", "Unsqueeze"]),
        ("N,1,M,1", ("Squeeze", [3]), ("Squeeze", [-2]), "N,M", ["Relu", "Squeeze"]),
        ("N,M", ("Unsqueeze", [1, 2]), ("Squeeze", [-2]), "N,1,M", ["Relu", "Unsqueeze"]),
        ("N,1,M", ("Unsqueeze", [0]), ("Squeeze", [0, 2]), "N,M", ["Relu", "Squeeze"]),
        ("N,M", ("Unsqueeze", [2]), ("Squeeze", [2]), "N,M", ["Relu"]),
        ("N,1,M", ("Squeeze", [1]), ("Unsqueeze", [2]), "N,M,1", None),
    ],
)
def test_dimensions_of_1_around_open_ones(before, first, second, after, ops):
    """No Reshape could name two open dimensions."""
    nodes = f"a = {first[0]}(x, s) b = {second[0]}(a, t) y = Relu(b)"
    source = f"agraph (float[{before}] x) => (float[{after}] y) {{ {nodes} }}"
    proto = model(source, **ints(s=first[1], t=second[1]))
    if ops is None:
        refuses(MergeUnitAxes(), proto, "nothing is gained")
    else:
        applies(MergeUnitAxes(), proto, ops=ops)
