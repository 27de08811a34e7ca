"""What is cut and put together again, and operators moved across the cuts."""

from __future__ import annotations

import numpy as np
import pytest

from rewrite_rules.slices import (
    CancelSplitOfConcat,
    MergeConcatOfPieces,
    MergeConcats,
    MergePiecesIntoSplit,
    MergeSliceAxes,
    MergeSlices,
    MergeSplits,
    MergeStackOfPieces,
    PullBinaryOutOfConcat,
    PullBinaryOutOfSplit,
    PullPoolOutOfConcat,
    PullUnaryOutOfConcat,
    PullUnaryOutOfSplit,
    PushBinaryIntoConcat,
    PushPoolIntoConcat,
    PushSliceIntoConcat,
    PushUnaryIntoConcat,
    PushUnaryThroughSplit,
    ReplaceSplitBySlice,
)
from tests.rules.harness import applies, ints, model, numbers, refuses


def test_concat_of_split():
    source = (
        "agraph (float[N,6] x) => (float[N,{n}] y) "
        "{{ a, b, c = Split<axis=-1>(x, s) y = Concat<axis={axis}>({parts}) }}"
    )
    sizes = ints(s=[1, 2, 3])
    rule = MergeConcatOfPieces()
    applies(rule, model(source.format(n=6, axis=1, parts="a, b, c"), **sizes), ops=[])
    applies(rule, model(source.format(n=5, axis=-1, parts="b, c"), **sizes), ops=["Slice"])
    applies(
        rule, model(source.format(n=7, axis=1, parts="c, a, b, a"), **sizes), ops=["Concat", "Slice", "Split"]
    )
    refuses(rule, model(source.format(n=6, axis=1, parts="b, a, c"), **sizes))
    even = "agraph (float[N,6] x) => (float[M,3] y) { a, b = Split<axis=1, num_outputs=2>(x) y = Concat<axis=0>(a, b) }"
    refuses(rule, model(even))


def test_concat_of_slices_and_gathers():
    source = (
        "agraph (float[N,6] x) => (float[N,5] y) "
        "{ a = Gather<axis=1>(x, i) b = Slice(x, s, e, d) y = Concat<axis=1>(a, b) }"
    )
    rule = MergeConcatOfPieces()
    applies(rule, model(source, **ints(i=[1, 2], s=[3], e=[99], d=[1])), ops=["Slice"])
    applies(rule, model(source, **ints(i=[-5, -4], s=[-3], e=[6], d=[-1])), ops=["Slice"])
    refuses(rule, model(source, **ints(i=[2, 1], s=[3], e=[6], d=[1])))
    refuses(rule, model(source.replace("[N,5]", "[N,6]"), **ints(i=[0, 1], s=[1], e=[5], d=[1])))
    # How much a slice of a dimension of unknown size takes is not known.
    source = (
        "agraph (float[N,2] x) => (float[M,2] y) "
        "{ a = Slice(x, p, q, d) b = Slice(x, q, r, d) y = Concat<axis=0>(a, b) }"
    )
    refuses(rule, model(source, **ints(p=[0], q=[1], r=[2], d=[0])))


def steps(axis: int, shape: str, out: str, body: str, order: tuple[int, int, int] = (0, 1, 2)):
    """Three steps of x along an axis, as a, b, c without it."""
    g = f"<axis={axis}>"
    return model(
        f"agraph (float[{shape}] x) => (float[{out}] y) "
        f"{{ a = Gather{g}(x, i) b = Gather{g}(x, j) c = Gather{g}(x, k) {body} }}",
        **ints(i=order[0], j=order[1], k=order[2]),
    )


@pytest.mark.parametrize(
    ("axis", "shape", "concat", "out", "ops"),
    [
        (0, "3,2,4", 0, "6,4", ["Reshape"]),
        (0, "3,2,4", 1, "2,12", ["Reshape", "Transpose"]),
        (1, "2,3,4", 0, "6,4", ["Reshape", "Transpose"]),
        (1, "2,3,4", 1, "2,12", ["Reshape"]),
        (1, "1,3,4", 0, "3,4", ["Reshape"]),
        (2, "2,4,3", 0, "6,4", ["Reshape", "Transpose"]),
        (0, "3,N,4", 0, "M,4", ["Reshape"]),
    ],
)
def test_stack_of_steps(axis, shape, concat, out, ops):
    body = f"y = Concat<axis={concat}>(a, b, c)"
    applies(MergeStackOfPieces(), steps(axis, shape, out, body), ops=ops)


def test_stack_of_a_part_and_in_another_order():
    body = "y = Concat<axis=0>(a, b, c)"
    applies(MergeStackOfPieces(), steps(0, "5,2,4", "6,4", body, (1, 2, 3)), ops=["Reshape", "Slice"])
    applies(MergeStackOfPieces(), steps(0, "3,2,4", "6,4", body, (2, 1, 0)), ops=["Gather", "Reshape"])
    applies(MergeStackOfPieces(), steps(0, "3,2,4", "6,4", body, (1, 1, 0)), ops=["Gather", "Reshape"])


def test_stack_of_unsqueezed_steps():
    for at, out, ops in ((0, "3,2,4", []), (1, "2,3,4", ["Transpose"]), (2, "2,4,3", ["Transpose"])):
        body = f"u = Unsqueeze(a, n) v = Unsqueeze(b, n) w = Unsqueeze(c, n) r = Concat<axis={at}>(u, v, w) y = Relu(r)"
        proto = steps(0, "3,2,4", out, body)
        proto.graph.initializer.extend(model("agraph () => () { }", **ints(n=[at])).graph.initializer)
        applies(MergeStackOfPieces(), proto, ops=["Relu", *ops])


def test_stack_of_squeezed_slices():
    source = (
        "agraph (float[2,2,4] x) => (float[4,4] y) { p, q = Split<axis=1, num_outputs=2>(x) "
        "a = Squeeze(p, d) b = Reshape(q, s) y = Concat<axis=0>(a, b) }"
    )
    applies(MergeStackOfPieces(), model(source, **ints(d=[1], s=[2, 4])), ops=["Reshape", "Transpose"])


def test_stack_refusals():
    body = "y = Concat<axis=0>(a, b, c)"
    two = (
        "agraph (float[2,4] x, float[2,4] z) => (float[8] y) "
        "{ a = Gather(x, i) b = Gather(z, i) y = Concat<axis=0>(a, b) }"
    )
    refuses(MergeStackOfPieces(), model(two, **ints(i=0)))
    inside = (
        "agraph (float[2,2,6] x) => (float[3,8] y) { a = Gather(x, i) b = Gather(x, j) "
        "c = Reshape(a, s) d = Reshape(b, s) y = Concat<axis=1>(c, d) }"
    )
    refuses(MergeStackOfPieces(), model(inside, **ints(i=0, j=1, s=[3, 4])), "inside a dimension")
    refuses(MergeStackOfPieces(), steps(0, "3,A,B", "C,B", body))


def test_slice_of_slice():
    source = "agraph (float[N,6] x) => (float[N,{n}] y) {{ a = {first} y = {second} }}"
    first = "Slice(x, p, q, d)"
    rule = MergeSlices()

    def both(second, n, first=first, **given):
        return model(source.format(first=first, second=second, n=n), **ints(**given))

    applies(rule, both("Slice(a, r, s, d)", 2, p=[1], q=[5], r=[1], s=[3], d=[1]), ops=["Slice"])
    applies(rule, both("Slice(a, r, s, d)", 1, p=[1], q=[5], r=[-1], s=[9], d=[1]), ops=["Slice"])
    applies(rule, both("Gather<axis=1>(a, r)", 2, p=[1], q=[5], r=[1, 2], d=[1]), ops=["Slice"])
    scalar = both("Gather<axis=1>(a, r)", 2, p=[1], q=[5], r=2, d=[1])
    scalar.graph.output[0].type.tensor_type.shape.dim.pop()
    applies(rule, scalar, ops=["Gather"])
    refuses(rule, both("Slice(a, r, s, d, t)", 2, p=[1], q=[5], r=[0], s=[4], d=[1], t=[2]), "different axes")
    refuses(rule, both("Slice(a, r, s, e)", 4, p=[1], q=[5], r=[0], s=[1], d=[1], e=[0]), "different axes")
    stepped = "Slice(x, p, q, d, t)"
    refuses(rule, both("Slice(a, r, s, d)", 2, stepped, p=[0], q=[6], t=[2], r=[0], s=[2], d=[1]))


def test_slice_axes():
    source = "agraph (float[4,6] x) => (float[{out}] y) {{ a = Slice(x, p, q, d, t) y = Slice(a, r, s, e) }}"
    given = ints(p=[5], q=[-99], d=[1], t=[-2], r=[1], s=[3], e=[-2])
    applies(MergeSliceAxes(), model(source.format(out="2,3"), **given), ops=["Slice"])
    same = given | ints(e=[1], s=[2])
    refuses(MergeSliceAxes(), model(source.format(out="4,1"), **same), "same axis")
    shared = source.format(out="2,3").replace("[2,3] y)", "[2,3] y, float[4,3] a)")
    refuses(MergeSliceAxes(), model(shared, **given), "read elsewhere")


def test_concats():
    source = (
        "agraph (float[N,2] x, float[N,3] z) => (float[N,{n}] y{o}) "
        "{{ a = Concat<axis=-1>(x, z) y = Concat<axis={axis}>(z, a, a) }}"
    )
    once = source.replace("(z, a, a)", "(z, a)")
    applies(MergeConcats(), model(once.format(n=8, axis=1, o="")), ops=["Concat"])
    applies(MergeConcats(), model(source.format(n=13, axis=1, o="")), ops=["Concat"])
    refuses(MergeConcats(), model(once.format(n=8, axis=1, o=", float[N,5] a")), "read elsewhere")
    other = "agraph (float[N,2] x) => (float[M,4] y) { a = Concat<axis=1>(x, x) y = Concat<axis=0>(a, a) }"
    refuses(MergeConcats(), model(other), "another axis")


def test_split_of_concat():
    source = (
        "agraph (float[N,2] x, float[N,3] z, float[N,1] w) => (float[N,{0}] a, float[N,{1}] b) "
        "{{ c = Concat<axis=-1>(x, z, w) p, q = Split<axis=1>(c, s) a = Relu(p) b = Neg(q) }}"
    )
    rule = CancelSplitOfConcat()
    applies(rule, model(source.format(2, 4), **ints(s=[2, 4])), ops=["Concat", "Neg", "Relu"])
    applies(rule, model(source.format(5, 1), **ints(s=[5, 1])), ops=["Concat", "Neg", "Relu"])
    refuses(rule, model(source.format(3, 3), **ints(s=[3, 3])), "inside a part")
    rows = (
        "agraph (float[N,2] x, float[N,2] z) => (float[M,1] a, float[M,1] b) "
        "{ c = Concat<axis=0>(x, z) p, q = Split<axis=1, num_outputs=2>(c) a = Relu(p) b = Neg(q) }"
    )
    refuses(rule, model(rows), "another axis")


def test_split_of_concat_into_outputs():
    source = (
        "agraph (float[N,2] x, float[N,3] z) => (float[N,2] a, float[N,3] b) "
        "{ c = Concat<axis=1>(x, z) a, b = Split<axis=1>(c, s) }"
    )
    applies(CancelSplitOfConcat(), model(source, **ints(s=[2, 3])))


def test_slice_of_concat():
    source = (
        "agraph (float[N,2] x, float[N,3] z, float[N,4] w) => (float[N,{n}] y) "
        "{{ c = Concat<axis=1>(x, z, w) a = {node} y = Relu(a) }}"
    )
    rule = PushSliceIntoConcat()
    for start, stop, ops in (
        (2, 5, []),
        (3, 5, ["Slice"]),
        (2, 9, ["Concat"]),
        (3, 7, ["Concat", "Slice", "Slice"]),
    ):
        proto = model(
            source.format(n=stop - start, node="Slice(c, p, q, d)"), **ints(p=[start], q=[stop], d=[1])
        )
        applies(rule, proto, ops=sorted(["Relu", *ops]))
    proto = model(source.format(n=2, node="Gather<axis=1>(c, i)"), **ints(i=[-1]))
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1
    applies(rule, proto, ops=["Relu", "Slice"])
    proto = model(source.format(n=7, node="Slice(c, p, q, d)"), **ints(p=[1], q=[8], d=[1]))
    refuses(rule, proto, "every part")
    proto = model(
        source.format(n=9, node="Slice(c, p, q, d)").replace("[N,9]", "[M,9]"), **ints(p=[0], q=[1], d=[0])
    )
    refuses(rule, proto)


def test_splits():
    source = (
        "agraph (float[N,6] x) => (float[N,2] a, float[N,1] b, float[N,3] c) "
        "{ r, p = Split<axis=1>(x, s) b, c = Split<axis=-1>(r, t) a = Relu(p) }"
    )
    applies(MergeSplits(), model(source, **ints(s=[4, 2], t=[1, 3])), ops=["Relu", "Split"])
    shared = source.replace("float[N,3] c)", "float[N,3] c, float[N,4] r)")
    refuses(MergeSplits(), model(shared, **ints(s=[4, 2], t=[1, 3])), "read elsewhere")
    rows = (
        "agraph (float[4,6] x) => (float[4,2] a, float[2,4] b, float[2,4] c) "
        "{ r, a = Split<axis=1>(x, s) b, c = Split<axis=0, num_outputs=2>(r) }"
    )
    refuses(MergeSplits(), model(rows, **ints(s=[4, 2])), "different axes")


def test_split_of_which_one_part_is_read():
    source = "agraph (float[N,6] x) => (float[N,{n}] y) {{ a, b, c = Split<axis=1>(x, s) y = Relu({part}) }}"
    for part, n in (("a", 1), ("b", 2), ("c", 3)):
        proto = model(source.format(part=part, n=n), **ints(s=[1, 2, 3]))
        applies(ReplaceSplitBySlice(), proto, ops=["Relu", "Slice"])
    both = "agraph (float[N,6] x) => (float[N,3] y) { a, b = Split<axis=1, num_outputs=2>(x) y = Add(a, b) }"
    refuses(ReplaceSplitBySlice(), model(both))


def test_pieces_to_split():
    source = (
        "agraph (float[3,N] x) => (float[N] y, float[N] z, float[1,N] w, float[N] u) "
        "{ a = Gather(x, i) b = Gather(x, j) w = Slice(x, k, e) c = Gather(x, i) y = Relu(a) z = Neg(b) u = Exp(c) }"
    )
    applies(
        MergePiecesIntoSplit(),
        model(source, **ints(i=2, j=-3, k=[1], e=[2])),
        ops=["Exp", "Neg", "Relu", "Split", "Squeeze", "Squeeze", "Squeeze"],
    )
    refuses(MergePiecesIntoSplit(), model(source, **ints(i=2, j=1, k=[1], e=[2])), "leave something out")
    refuses(
        MergePiecesIntoSplit(),
        model(source.replace("float[3,N]", "float[4,N]"), **ints(i=2, j=0, k=[1], e=[2])),
        "leave",
    )
    one = "agraph (float[3,N] x) => (float[N] y) { a = Gather(x, i) y = Relu(a) }"
    refuses(MergePiecesIntoSplit(), model(one, **ints(i=0)), "only piece")


@pytest.mark.parametrize("unary", ["Relu({})", "Clip({}, lo, hi)", "Cast<to=11>({})", "Elu<alpha=0.5>({})"])
def test_unary(unary):
    given = {"lo": np.float32(-0.5), "hi": np.float32(0.5)} if "lo" in unary else {}
    out = "double" if "Cast" in unary else "float"
    name = unary.partition("<")[0].partition("(")[0]
    one = f"agraph (float[N,2] x, float[N,3] z) => ({out}[N,5] y)"
    proto = model(f"{one} {{ a = Concat<axis=1>(x, z) y = {unary.format('a')} }}", **given)
    applies(PushUnaryIntoConcat(), proto, ops=sorted(["Concat", name, name]))
    proto = model(
        f"{one} {{ a = {unary.format('x')} b = {unary.format('z')} y = Concat<axis=1>(a, b) }}", **given
    )
    applies(PullUnaryOutOfConcat(), proto, ops=sorted(["Concat", name]))
    two = f"agraph (float[N,5] x) => ({out}[N,2] y, {out}[N,3] z)"
    given |= ints(s=[2, 3])
    proto = model(f"{two} {{ a = {unary.format('x')} y, z = Split<axis=1>(a, s) }}", **given)
    applies(PushUnaryThroughSplit(), proto, ops=sorted(["Split", name, name]))
    proto = model(
        f"{two} {{ a, b = Split<axis=1>(x, s) y = {unary.format('a')} z = {unary.format('b')} }}", **given
    )
    applies(PullUnaryOutOfSplit(), proto, ops=sorted(["Split", name]))


def test_unary_refusals():
    one = "agraph (float[N,2] x, float[N,3] z) => (float[N,5] y{}) {{ {} }}"
    refuses(
        PushUnaryIntoConcat(),
        model(one.format(", float[N,5] a", "a = Concat<axis=1>(x, z) y = Relu(a)")),
        "read",
    )
    body = "a = Relu(x) b = Relu(z) y = Concat<axis=1>(a, b)"
    refuses(PullUnaryOutOfConcat(), model(one.format(", float[N,2] a", body)), "read elsewhere")
    body = "a = Elu<alpha=0.1>(x) b = Elu<alpha=0.2>(z) y = Concat<axis=1>(a, b)"
    refuses(PullUnaryOutOfConcat(), model(one.format("", body)), "functions differ")
    refuses(PullUnaryOutOfConcat(), model(one.format("", body.replace("Elu<alpha=0.2>", "Relu"))))
    two = "agraph (float[N,4] x) => (float[N,2] y, float[N,2] z{}) {{ {} }}"
    split = "Split<axis=1, num_outputs=2>"
    refuses(
        PushUnaryThroughSplit(), model(two.format(", float[N,4] a", f"a = Relu(x) y, z = {split}(a)")), "read"
    )
    refuses(PullUnaryOutOfSplit(), model(two.format("", f"a, b = {split}(x) y = Relu(a) z = Neg(b)")))
    body = f"a, b = {split}(x) y = Elu<alpha=0.1>(a) z = Elu<alpha=0.2>(b)"
    refuses(PullUnaryOutOfSplit(), model(two.format("", body)), "functions differ")
    refuses(PullUnaryOutOfSplit(), model(two.format(", float[N,2] a", body)))


def test_binary_out_of_concat():
    source = (
        "agraph (float[N,2] x, float[N,3] z{more}) => (float[N,5] y) "
        "{{ p = {f} q = {g} y = Concat<axis=1>(p, q) }}"
    )
    rule = PullBinaryOutOfConcat()

    def pulled(f, g, more="", **given):
        return model(source.format(f=f, g=g, more=more), **given)

    applies(rule, pulled("Sub(x, a)", "Sub(z, b)", a=numbers(2), b=numbers(3)), ops=["Concat", "Sub"])
    applies(rule, pulled("Sub(a, x)", "Sub(b, z)", a=numbers(1, 2), b=numbers(1, 3)), ops=["Concat", "Sub"])
    applies(rule, pulled("Pow(x, a)", "Pow(z, a)", a=np.float32(2)), ops=["Concat", "Pow"])
    applies(rule, pulled("Add(x, a)", "Add(z, a)", ", float[N,1] a"), ops=["Add", "Concat"])
    more = ", float[N,2] a, float[N,3] b"
    applies(rule, pulled("Mul(x, a)", "Mul(z, b)", more), ops=["Concat", "Concat", "Mul"])
    refuses(rule, pulled("Add(x, a)", "Sub(z, a)", ", float[N,1] a"))
    refuses(rule, pulled("Add(x, a)", "Add(z, b)", a=np.float32(2), b=np.float32(3)), "put together")
    refuses(rule, pulled("Add(x, a)", "Add(z, b)", ", float[N,1] a, float[N,1] b"), "put together")
    refuses(rule, pulled("Add(x, a)", "Add(z, b)", ", float[N,1] a, float[N,3] b"), "put together")
    refuses(rule, pulled("Add(a, x)", "Add(z, b)", a=numbers(2), b=numbers(1, 3)), "put together")


def test_binary_out_of_split():
    source = (
        "agraph (float[N,5] x{more}) => (float[N,2] y, float[N,3] z) "
        "{{ a, b = Split<axis=1>(x, s) y = {f} z = {g} }}"
    )
    rule = PullBinaryOutOfSplit()

    def pulled(f, g, more="", **given):
        return model(source.format(f=f, g=g, more=more), **given, **ints(s=[2, 3]))

    c, d = numbers(2), numbers(3)
    applies(rule, pulled("Sub(a, c)", "Sub(b, d)", c=c, d=d), ops=["Split", "Sub"])
    applies(rule, pulled("Sub(c, a)", "Sub(d, b)", c=c, d=d), ops=["Split", "Sub"])
    applies(rule, pulled("Mul(a, c)", "Mul(b, c)", ", float[N,1] c"), ops=["Mul", "Split"])
    refuses(rule, pulled("Sub(a, c)", "Sub(d, b)", c=c, d=d), "different places")
    refuses(rule, pulled("Add(a, c)", "Add(b, d)", ", float[N,2] c, float[N,3] d"), "not constant")
    refuses(rule, pulled("Add(a, c)", "Add(b, d)", c=np.float32(1), d=np.float32(2)), "put together")
    refuses(rule, pulled("Add(a, c)", "Mul(b, d)", c=c, d=d))
    refuses(rule, pulled("Add(a, a)", "Add(b, b)"), "read twice")


def test_binary_into_concat():
    source = (
        "agraph (float[N,2] x, float[N,3] z{more}) => (float[{out}] y) {{ a = Concat<axis=1>(x, z) y = {f} }}"
    )
    rule = PushBinaryIntoConcat()

    def pushed(f, more="", out="N,5", **given):
        return model(source.format(f=f, more=more, out=out), **given)

    for shape in ((), (1,), (5,), (1, 5), (1, 1)):
        applies(rule, pushed("Sub(c, a)", c=numbers(*shape)), ops=["Concat", "Sub", "Sub"])
    applies(rule, pushed("Div(a, c)", ", float[N,1] c"), ops=["Concat", "Div", "Div"])
    with_other = source.replace("y = {f}", "b = Concat<axis=1>(u, v) y = {f}")
    more = ", float[N,2] u, float[N,3] v"
    proto = model(with_other.format(more=more, out="N,5", f="Max(a, b)"))
    applies(rule, proto, ops=["Concat", "Max", "Max"])
    more = ", float[N,3] u, float[N,2] v"
    refuses(rule, model(with_other.format(more=more, out="N,5", f="Max(a, b)")), "not cut alike")
    refuses(rule, pushed("Add(a, c)", ", float[N,5] c"), "not cut alike")
    refuses(rule, pushed("Add(a, c)", ", float[2,1,1] c", out="2,N,5"), "ranks differ")


@pytest.mark.parametrize(
    "pool",
    [
        "MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>",
        "AveragePool<kernel_shape=[2,2], count_include_pad=1, pads=[1,0,0,1]>",
        "GlobalAveragePool",
    ],
)
def test_pools_across_a_concat(pool):
    out = {"M": "3,3", "A": "5,5", "G": "1,1"}[pool[0]]
    proto = model(
        f"agraph (float[N,2,5,5] x, float[N,3,5,5] z) => (float[N,5,{out}] y) {{"
        f" a = Concat<axis=1>(x, z)\n y = {pool}(a) }}"
    )
    name = pool.partition("<")[0]
    applies(PushPoolIntoConcat(), proto, ops=["Concat", name, name])
    proto = model(
        f"agraph (float[N,2,5,5] x, float[N,3,5,5] z) => (float[N,5,{out}] y) {{"
        f" a = {pool}(x)\n b = {pool}(z)\n y = Concat<axis=1>(a, b) }}"
    )
    applies(PullPoolOutOfConcat(), proto, ops=["Concat", name])


def test_pools_that_stay():
    along = (
        "agraph (float[2,2,5,5] x, float[2,2,5,5] z) => (float[2,2,1,1] y) {"
        " a = Concat<axis=2>(x, z)\n y = GlobalMaxPool(a) }"
    )
    refuses(PushPoolIntoConcat(), model(along), "not one of channels")
    indices = (
        "agraph (float[2,2,4,4] x, float[2,2,4,4] z) => (float[2,4,2,2] y, int64[2,4,2,2] i) {"
        " a = Concat<axis=1>(x, z)\n y, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(a) }"
    )
    refuses(PushPoolIntoConcat(), model(indices), "places of the maxima")
    other = (
        "agraph (float[2,2,4,4] x, float[2,2,5,5] z) => (float[2,4,1,1] y) {"
        " a = GlobalMaxPool(x)\n b = GlobalMaxPool(z)\n y = Concat<axis=1>(a, b) }"
    )
    refuses(PullPoolOutOfConcat(), model(other), "differ besides")
