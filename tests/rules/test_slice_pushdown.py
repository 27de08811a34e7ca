"""What is not read is not computed: cuts moved up through operators."""

from __future__ import annotations

import numpy as np
import pytest

import models
from rewrite_rules import LIBRARY, slice_pushdown
from rewrite_rules.slice_pushdown import (
    PushKeyWeightsIntoQueries,
    PushSliceIntoAttention,
    PushSliceIntoGemm,
    PushSliceIntoMatMul,
    PushSlicesThroughSplit,
    PushSliceThroughBroadcast,
    PushSliceThroughMovement,
    PushSliceThroughNormalization,
    PushSliceThroughReduction,
    PushSliceThroughReshape,
    PushSliceThroughTranspose,
    PushSliceThroughUnary,
    PushSliceThroughWindows,
    PushValueWeightsBehindScores,
    PushWeightsOutOfAttention,
    ReplaceLastStepByFinalState,
    Span,
)
from tests.rules.harness import applies, assert_equivalent, ints, model, random_feeds, refuses
from xrlflow.cost.roofline import Roofline
from xrlflow.ir import Graph
from xrlflow.onnxio import load, to_proto
from xrlflow.rewrite import Library, Refused, RewriteState, declared_in
from xrlflow.search.greedy import greedy
from xrlflow.search.result import Limits


def sizes(graph: Graph, op: str) -> list[tuple[int | str | None, ...] | None]:
    """The shapes of what an operator gives, wherever it stands."""
    return [n.types[0].shape for n in graph.topological() if n.op == op and not n.const]


def rows(body: str, out: str, x: str = "N,6,4", more: str = "", **given: int | list[int]):
    """A model that cuts axis 1 of what `body` makes of x; p and q are 1 and 3."""
    source = f"agraph (float[{x}] x{more}) => (float[{out}] y) {{ {body} }}"
    return model(source, **ints(**{"p": [1], "q": [3], "d": [1], "one": 1, **given}))


# What is read


def test_one_position_is_dropped_at_the_end():
    graph = applies(
        PushSliceThroughUnary(),
        rows("a = Relu(x) y = Gather<axis=1>(a, one)", "N,4"),
        ops=["Relu", "Slice", "Squeeze"],
    )
    assert sizes(graph, "Relu") == [("N", 1, 4)]


def test_of_a_dimension_that_is_not_known():
    last = rows("a = Relu(x) y = Gather<axis=1>(a, i)", "N,4", "N,S,4", i=-1)
    applies(PushSliceThroughUnary(), last, ops=["Gather", "Relu", "Squeeze"])
    several = rows("a = Relu(x) y = Gather<axis=1>(a, i)", "N,2,4", "N,S,4", i=[1, 2])
    applies(PushSliceThroughUnary(), several, ops=["Gather", "Relu"])
    some = rows("a = Relu(x) y = Slice(a, p, q, d)", "N,T,4", "N,S,4")
    applies(PushSliceThroughUnary(), some, ops=["Relu", "Slice"])


def test_steps_and_reversal():
    stepped = rows("a = Relu(x) y = Slice(a, p, q, d, s)", "N,3,4", p=[0], q=[6], s=[2])
    applies(PushSliceThroughUnary(), stepped, ops=["Relu", "Slice"])
    backwards = rows("a = Relu(x) y = Slice(a, p, q, d, s)", "N,2,4", p=[-2], q=[-99], s=[-3])
    applies(PushSliceThroughUnary(), backwards, ops=["Relu", "Slice"])
    all_reversed = rows("a = Relu(x) y = Slice(a, p, q, d, s)", "N,6,4", p=[-1], q=[-99], s=[-1])
    refuses(PushSliceThroughUnary(), all_reversed, "nothing is left out")


def test_several_readers_take_the_run_that_holds_all():
    source = (
        "agraph (float[N,6,4] x) => (float[N,4] y, float[N,2,4] z, float[N,2,4] w) { a = Relu(x) "
        "y = Gather<axis=1>(a, i) z = Slice(a, p, q, d) w = Gather<axis=1>(a, j) }"
    )
    proto = model(source, **ints(i=3, p=[1], q=[3], d=[1], j=[3, 1]))
    ops = ["Gather", "Relu", "Slice", "Slice", "Slice", "Squeeze"]
    graph = applies(PushSliceThroughUnary(), proto, ops=ops)
    assert sizes(graph, "Relu") == [("N", 3, 4)]
    refuses(PushSliceThroughUnary(), model(source, **ints(i=5, p=[0], q=[3], d=[1], j=[3, 1])), "all of it")
    whole = source.replace("float[N,4] y", "float[N,4] y, float[N,6,4] a")
    refuses(PushSliceThroughUnary(), model(whole, **ints(i=3, p=[1], q=[3], d=[1], j=[3, 1])), "given out")
    read = source.replace("w = Gather<axis=1>(a, j)", "b = Neg(a) w = Gather<axis=1>(b, j)")
    only = model(read, **ints(i=3, p=[1], q=[3], d=[1], j=[3, 1]))
    applies(PushSliceThroughUnary(), only, ops=["Gather", "Gather", "Neg", "Relu", "Slice"])


def test_the_same_rows_written_in_two_ways():
    source = (
        "agraph (float[N,6,4] x) => (float[N,4] y, float[N,1,4] z) { a = Relu(x) "
        "y = Gather<axis=1>(a, i) z = Slice(a, p, q, d) }"
    )
    proto = model(source, **ints(i=-5, p=[1], q=[2], d=[1]))
    applies(PushSliceThroughUnary(), proto, ops=["Relu", "Slice", "Squeeze"])


def test_parts_that_nobody_reads():
    source = (
        "agraph (float[N,7] x) => (float[N,2] y, float[N,1] z) { s = Constant<value_ints=[1,2,2,1,1]>() "
        "a = Relu(x) b, c, e, f, g = Split<axis=1>(a, s) y = Neg(c) z = Abs(f) }"
    )
    graph = applies(PushSliceThroughUnary(), model(source), ops=["Abs", "Neg", "Relu", "Slice", "Split"])
    assert sizes(graph, "Relu") == [("N", 5)]


def test_axes_along_which_it_does_not_pass_are_cut_afterwards():
    body = "a = Softmax(x) y = Slice(a, p, q, d)"
    graph = applies(
        PushSliceThroughReduction(),
        rows(body, "N,2,3", p=[1, 0], q=[3, 3], d=[1, 2]),
        ops=["Slice", "Slice", "Softmax"],
    )
    assert sizes(graph, "Softmax") == [("N", 2, 4)]


def test_across_a_reshape():
    body = "a = Relu(x) b = Reshape(a, s) y = Slice(b, p, q, d)"
    applies(PushSliceThroughUnary(), rows(body, "N,2,2,2", s=[0, 0, 2, 2]), ops=["Relu", "Reshape", "Slice"])
    symbol = rows(
        body.replace("Slice(b, p, q, d)", "Gather<axis=1>(b, one)"), "N,2,2", "N,S,4", s=[0, 0, 2, 2]
    )
    applies(PushSliceThroughUnary(), symbol, ops=["Gather", "Relu", "Reshape", "Squeeze"])
    refuses(PushSliceThroughUnary(), rows(body, "N,2,3", s=[0, 8, 3]), "does not keep")
    refuses(
        PushSliceThroughUnary(),
        rows(body, "N,2,2,3,2", "N,6,2,2", s=[0, 2, 3, 2, 2], p=[0], q=[1], d=[2]),
        None,
    )
    shared = "a = Relu(x) b = Reshape(a, s) c = Slice(b, p, q, d) e = Neg(a) f = ReduceSum<keepdims=0>(e, d) "
    refuses(
        PushSliceThroughUnary(),
        rows(shared + "y = Add(c, f)", "N,2,4", "2,6,4", s=[2, 6, 4], p=[1], q=[2]),
        "read elsewhere",
    )


def test_several_readers_of_what_is_reshaped():
    """They stay, though together they leave out a row."""
    source = (
        "agraph (float[3,6] x) => (float[1,2,3] y, float[1,2,3] z) { a = Relu(x) b = Reshape(a, s) "
        "y = Slice(b, p, q, p) z = Slice(b, q, r, p) }"
    )
    refuses(PushSliceThroughUnary(), model(source, **ints(s=[3, 2, 3], p=[0], q=[1], r=[2])))


def test_all_parts_of_a_dimension_that_is_not_known():
    source = (
        "agraph (float[N,4] x) => (float[1,4] y, float[2,4] z) { a = Relu(x) y, z = Split<axis=0>(a, s) }"
    )
    refuses(PushSliceThroughUnary(), model(source, **ints(s=[1, 2])))


@pytest.mark.parametrize(
    ("span", "is_run"),
    [
        (Span(1, 3), True),
        (Span(0, 1), True),
        (Span(2, 2), False),
        (Span(-2, 3), False),
        (Span(0, 4, 2), False),
        (Span(3, 1, -1), False),
        (Span(listed=(1, 2)), False),
    ],
)
def test_neighbours_counted_from_the_front(span, is_run):
    assert span.is_run is is_run


@pytest.mark.parametrize(
    ("spans", "hull"),
    [
        ([Span(0, 3), Span(2, 4)], Span(0, 4)),
        ([Span(listed=(4, 1)), Span(2, 3)], Span(1, 5)),
        ([Span(listed=(3, 1)), Span(listed=(3, 1))], Span(listed=(3, 1))),
        ([Span(0, 4, 2), Span(1, 2)], None),
        ([Span(0, 3), Span(2, 6)], None),
    ],
)
def test_the_run_that_holds_what_several_take(spans, hull):
    cuts = [slice_pushdown.Cut(None, ((1, s),), ()) for s in spans]  # type: ignore[arg-type]
    assert slice_pushdown._together(cuts, (2, 6)) == (() if hull is None else ((1, hull),))


def test_sizes_after_a_cut():
    """One may be unknown."""
    cut = (0, Span(1, 3))
    assert slice_pushdown._cut_dims((6, 5), [cut, (1, Span(1, 2))]) == (2, 1)
    assert slice_pushdown._cut_dims(("S", 5), [cut, (1, Span(1, 2))]) == (slice_pushdown._LEFT, 1)
    with pytest.raises(Refused, match="two dimensions"):
        slice_pushdown._cut_dims(("S", "T"), [cut, (1, Span(1, 2))])


# Operators


def test_broadcast():
    def both(z, given="Slice(a, p, q, d)", out="N,2,4", x="N,6,4"):
        return rows(f"a = Add(x, z) y = {given}", out, x, f", float[{z}] z")

    rule = PushSliceThroughBroadcast()
    for z in ("4", "1,4", "1,1,4"):
        applies(rule, both(z), ops=["Add", "Slice"])
    for z in ("6,4", "6,1", "1,6,4"):
        applies(rule, both(z), ops=["Add", "Slice", "Slice"])
    applies(rule, both("6,4", x="N,1,4"), ops=["Add", "Slice"])
    applies(rule, both("S,4", out="N,T,4", x="N,S,4"), ops=["Add", "Slice", "Slice"])
    refuses(rule, both("T,4", out="N,U,4", x="N,S,4"), "may be repeated")


def test_normalization():
    body = "a = LayerNormalization{axis}(x, s) y = Slice(a, p, q, d)"
    source = "agraph (float[N,6,4] x, float[{s}] s) => (float[N,2,4] y) {{ {body} }}"
    given = ints(p=[1], q=[3], d=[1])
    rule = PushSliceThroughNormalization()
    applies(
        rule,
        model(source.format(s="4", body=body.format(axis="")), **given),
        ops=["LayerNormalization", "Slice"],
    )
    proto = model(source.format(s="6,4", body=body.format(axis="<axis=1>")), **given)
    refuses(rule, proto, "normalised along this axis")


def test_softmax():
    refuses(
        PushSliceThroughReduction(),
        rows("a = Softmax<axis=1>(x) y = Slice(a, p, q, d)", "N,2,4"),
        "normalised along this axis",
    )


def test_statistics():
    source = (
        "agraph (float[N,6,4] x, float[6] s, float[6] b) => (float[N,6,2] y) "
        "{ a = InstanceNormalization(x, s, b) y = Slice(a, p, q, d) }"
    )
    proto = model(source, **ints(p=[1], q=[3], d=[2]))
    refuses(PushSliceThroughNormalization(), proto, "normalised along this axis")


def test_matrix_products():
    rule = PushSliceIntoMatMul()
    body = "a = MatMul(x, w) y = Slice(a, p, q, d)"
    applies(rule, rows(body, "N,2,5", more=", float[4,5] w"), ops=["MatMul", "Slice"])
    applies(rule, rows(body, "N,6,2", more=", float[4,5] w", d=[2]), ops=["MatMul", "Slice"])
    applies(rule, rows(body, "N,2,6,5", "N,1,6,4", ", float[7,4,5] w"), ops=["MatMul", "Slice"])
    applies(rule, rows(body, "N,2,6,5", "N,7,6,4", ", float[7,4,5] w"), ops=["MatMul", "Slice", "Slice"])
    refuses(rule, rows(body, "N,2", more=", float[4] w"), "vector")


def test_gemm():
    source = (
        "agraph (float[6,4] x, float[4,5] w, float[{b}] b) => (float[2,5] y) {{ a = Gemm(x, w, b) {cut} }}"
    )
    for b, count in (("5", 1), ("1,5", 1), ("6,1", 2), ("6,5", 2), ("1,1", 1)):
        proto = model(source.format(b=b, cut="y = Slice(a, p, q, d)"), **ints(p=[1], q=[3], d=[0]))
        applies(PushSliceIntoGemm(), proto, ops=["Gemm", *["Slice"] * count])


def test_attention():
    source = (
        "agraph (float[N,2,5,4] q, float[N,2,3,4] k, float[N,2,3,4] v{more}) => (float[N,2,1,4] y) "
        "{{ a = Attention{attrs}(q, k, v{m}) y = Slice(a, p, r, d) }}"
    )
    given = ints(p=[2], r=[3], d=[2])
    rule = PushSliceIntoAttention()
    for shape, count in (("5,3", 2), ("1,5,3", 2), ("N,2,5,3", 2)):
        proto = model(source.format(more=f", float[{shape}] m", m=", m", attrs=""), **given)
        applies(rule, proto, ops=["Attention", *["Slice"] * count])
    causal = model(source.format(more="", m="", attrs="<is_causal=1>"), **given)
    refuses(rule, causal, "each row sees others")


def test_attention_with_past_keys():
    source = (
        "agraph (float[2,4,5,4] q, float[2,4,3,4] k, float[2,4,3,6] v, float[2,4,5,5] m, float[2,4,2,4] s, "
        "float[2,4,2,6] t) => (float[] y) { a = Attention(q, k, v, m, s, t) y = Slice(a, i, j, d) }"
    )
    rule = PushSliceIntoAttention()
    refuses(rule, model(source, **ints(i=[1], j=[3], d=[1])), "past keys")
    refuses(rule, model(source, **ints(i=[1], j=[3], d=[3])), "past values")


def test_attention_with_heads_that_are_not_known():
    source = (
        "agraph (float[2,?,5,4] q, float[2,?,3,4] k, float[2,?,3,6] v) => (float[] y) "
        "{ a = Attention(q, k, v) y = Gather<axis=1>(a, i) }"
    )
    refuses(PushSliceIntoAttention(), model(source, **ints(i=[1, 0])), "heads share keys")


def test_transpose_and_reshape():
    body = "a = Transpose<perm=[0,2,1]>(x) y = Slice(a, p, q, d)"
    graph = applies(PushSliceThroughTranspose(), rows(body, "N,2,6"), ops=["Slice", "Transpose"])
    assert sizes(graph, "Slice") == [("N", 6, 2)]
    body = "a = Reshape(x, s) y = {}"
    rule = PushSliceThroughReshape()
    applies(
        rule, rows(body.format("Gather<axis=1>(a, one)"), "N,2,2", s=[0, 0, 2, 2]), ops=["Reshape", "Slice"]
    )
    applies(
        rule,
        rows(body.format("Slice(a, p, q, d)"), "2,4", "1,6,4", s=[6, 4], d=[0]),
        ops=["Reshape", "Slice"],
    )
    refuses(rule, rows(body.format("Slice(a, p, q, d)"), "N,2,8", s=[0, 3, 8]), "does not keep")


def test_concat():
    body = "a = Concat<axis=1>(x, x) y = Slice(a, p, q, d)"
    refuses(PushSliceThroughMovement(), rows(body, "N,2,4"), "put together along this axis")


def test_reduction():
    rule = PushSliceThroughReduction()
    body = "a = ReduceSum<keepdims={keep}>(x, r) y = Slice(a, p, q, d)"
    applies(rule, rows(body.format(keep=0), "N,2", "N,6,4,3", r=[1, 3]), ops=["ReduceSum", "Slice"])
    applies(rule, rows(body.format(keep=1), "N,2,1", r=[2]), ops=["ReduceSum", "Slice"])


def test_expand():
    rule = PushSliceThroughMovement()
    graph = applies(
        rule,
        rows("a = Expand(x, s) y = Slice(a, p, q, d)", "3,2,4", "1,6,4", s=[3, 1, 1]),
        ops=["Expand", "Slice"],
    )
    assert sizes(graph, "Expand") == [(3, 2, 4)]
    applies(
        rule, rows("a = Expand(x, s) y = Slice(a, p, q, d)", "3,2,4", "1,1,4", s=[3, 6, 1]), ops=["Expand"]
    )
    unknown = rows("a = Expand(x, s) y = Slice(a, p, q, d)", "N,2,4", "N,S,4", s=[1, 6, 1])
    refuses(rule, unknown, "may be repeated")


@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize("dilations", [1, 2])
@pytest.mark.parametrize("pads", ["pads=[2,1]", 'auto_pad="SAME_UPPER"', 'auto_pad="SAME_LOWER"', "group=1"])
def test_windows(strides, dilations, pads):
    """Every run of positions of a small convolution and of two small pools."""
    if "SAME" in pads and dilations > 1:
        pytest.skip("ONNX Runtime has no kernel")
    attrs = f"strides=[{strides}], dilations=[{dilations}], {pads}"
    for op, rest, channels in (
        (f"Conv<{attrs}>(x, w)", ", float[3,2,3] w", 3),
        (f"MaxPool<kernel_shape=[3], {attrs}>(x)".replace(", group=1", ""), "", 2),
        (f"AveragePool<kernel_shape=[3], count_include_pad=0, {attrs}>(x)".replace(", group=1", ""), "", 2),
    ):
        rule = PushSliceThroughWindows()
        source = f"agraph (float[1,2,7] x{rest}) => (float[1,{channels},N] a) {{ a = {op} }}"
        size = load(model(source)).graph
        (length,) = {n.types[0].shape[2] for n in size.nodes()}
        for start in range(length):
            for stop in range(start + 1, length + (start > 0)):
                body = f"agraph (float[1,2,7] x{rest}) => (float[1,{channels},{stop - start}] y)"
                proto = model(
                    f"{body} {{ a = {op} y = Slice(a, p, q, d) }}", **ints(p=[start], q=[stop], d=[2])
                )
                applies(rule, proto)


def test_channels_of_a_convolution():
    source = (
        "agraph (float[1,4,5] x, float[6,2,3] w, float[6] b) => (float[1,{n},3] y) "
        "{{ a = Conv<group=2>(x, w, b) y = Slice(a, p, q, d) }}"
    )
    applies(
        PushSliceThroughWindows(),
        model(source.format(n=3), **ints(p=[0], q=[3], d=[1])),
        ops=["Conv", "Slice", "Slice", "Slice"],
    )
    refuses(
        PushSliceThroughWindows(), model(source.format(n=3), **ints(p=[1], q=[4], d=[1])), "inside a group"
    )


def test_nothing_left():
    nothing = rows("a = Relu(x) y = Slice(a, p, q, d)", "N,0,4", p=[3], q=[3])
    refuses(PushSliceThroughUnary(), nothing)
    source = "agraph (float[2,C,5] x) => (float[2,K,3] y) {{ a = {}(x) y = Slice(a, p, q, p) }}"
    proto = model(source.format("MaxPool<kernel_shape=[3]>"), **ints(p=[1], q=[2]))
    refuses(PushSliceThroughWindows(), proto, "may be nothing left")


def test_windows_that_stay():
    source = (
        "agraph (float[N,2,6] x) => (float[N,2,{n}] y) "
        "{{ a = MaxPool<kernel_shape=[3], strides=[2], ceil_mode=1>(x) y = Slice(a, p, q, d) }}"
    )
    refuses(
        PushSliceThroughWindows(),
        model(source.format(n=1), **ints(p=[2], q=[3], d=[2])),
        "beyond the padding",
    )
    unknown = (
        "agraph (float[1,2,L] x, float[3,2,3] w) => (float[1,3,K] y) { a = Conv(x, w) y = Slice(a, p, q, d) }"
    )
    refuses(PushSliceThroughWindows(), model(unknown, **ints(p=[1], q=[2], d=[2])), "where the windows lie")


def test_pad():
    rule = PushSliceThroughWindows()
    for start, stop in ((0, 4), (2, 5), (3, 9), (1, 9)):
        body = "a = Pad(x, w, , e) y = Slice(a, p, q, d)"
        proto = rows(body, f"N,{stop - start},4", w=[2, 1], e=[1], p=[start], q=[stop])
        applies(rule, proto)
    refuses(
        rule,
        rows("a = Pad(x, w, , e) y = Slice(a, p, q, d)", "N,2,4", w=[2, 1], e=[1], p=[0], q=[2]),
        "only padding",
    )
    mirrored = 'a = Pad<mode="reflect">(x, w, , e) y = Slice(a, p, q, d)'
    refuses(rule, rows(mirrored, "N,2,4", w=[2, 1], e=[1]), "taken from the data")
    applies(rule, rows(mirrored, "N,2,7", w=[2, 1], e=[2]), ops=["Pad", "Slice"])


def test_gather():
    source = (
        "agraph (float[7,3] e, int64[N,5] i) => (float[N,2,3] y) { a = Gather(e, i) y = Slice(a, p, q, p) }"
    )
    graph = applies(PushSliceThroughMovement(), model(source, **ints(p=[1], q=[3])), ops=["Gather", "Slice"])
    assert sizes(graph, "Slice") == [("N", 2)]


def test_split():
    source = (
        "agraph (float[N,6,4] x) => (float[N,2,1] y, float[N,2,3] z) {{ a, b = Split<axis=2>(x, s) "
        "y = Slice(a, p, q, d) z = Slice(b, {}, d) }}"
    )
    rule = PushSlicesThroughSplit()
    given = ints(s=[1, 3], p=[1], q=[3], d=[1], r=[2], t=[4])
    applies(rule, model(source.format("p, q"), **given), ops=["Slice", "Split"])
    refuses(rule, model(source.format("r, t"), **given), "not cut alike")
    along = (
        "agraph (float[N,6,4] x) => (float[N,1,4] y, float[N,1,4] z) { a, b = Split<axis=1, num_outputs=2>(x) "
        "y = Slice(a, p, q, p) z = Slice(b, p, q, p) }"
    )
    refuses(rule, model(along, **ints(p=[1], q=[2])), "split along this axis")


def test_final_state():
    source = (
        "agraph (float[5,2,3] x, float[{n},8,3] w, float[{n},8,2] r{more}) => (float[{n},2,2] y) "
        "{{ a = LSTM<hidden_size=2{attrs}>(x, w, r{rest}) y = Gather(a, i) }}"
    )
    rule = ReplaceLastStepByFinalState()
    plain = {"n": 1, "more": "", "rest": "", "attrs": ""}
    applies(rule, model(source.format(**plain), **ints(i=-1)), ops=["LSTM"])
    refuses(rule, model(source.format(**plain), **ints(i=0)), "not the step")
    backwards = plain | {"attrs": ', direction="reverse"'}
    applies(rule, model(source.format(**backwards), **ints(i=0)), ops=["LSTM"])
    refuses(rule, model(source.format(**backwards), **ints(i=-1)), "not the step")
    both = plain | {"n": 2, "attrs": ', direction="bidirectional"'}
    refuses(rule, model(source.format(**both), **ints(i=-1)), "directions end")
    lengths = plain | {"more": ", int32[2] l", "rest": ", , l"}
    refuses(rule, model(source.format(**lengths), **ints(i=-1)), "may end earlier")


@pytest.mark.parametrize(
    ("cut", "attrs", "found"),
    [
        ("Gather(a, last)", "", True),
        ("Gather(a, last)", ', direction="reverse"', False),
        ("Gather(a, first)", "", False),
        ("Gather(a, first)", ', direction="reverse"', True),
        ("Gather(a, before)", "", False),
        ("Slice(a, last, end, axis)", "", False),
        ("Slice(a, first, one, axis)", ', direction="reverse"', False),
    ],
)
def test_final_state_of_a_sequence_of_unknown_length(cut, attrs, found):
    """A Slice gives nothing if there is no step; a Gather fails."""
    source = (
        "agraph (float[S,2,3] x, float[1,8,3] w, float[1,8,2] r) => (float[] y) "
        f"{{ a = LSTM<hidden_size=2{attrs}>(x, w, r) y = {cut} }}"
    )
    given = ints(last=[-1], first=[0], before=[-2], one=[1], end=[2**63 - 1], axis=[0])
    if found:
        applies(ReplaceLastStepByFinalState(), model(source, **given), ops=["LSTM", "Unsqueeze"])
    else:
        refuses(ReplaceLastStepByFinalState(), model(source, **given), "not the step")


@pytest.mark.parametrize("cut", ["Gather<axis=2>(a, i)", "Slice(a, p, q, d)"])
def test_final_state_is_of_a_whole_step(cut):
    source = (
        "agraph (float[5,2,3] x, float[1,8,3] w, float[1,8,2] r) => (float[] y) "
        f"{{ a = LSTM<hidden_size=2>(x, w, r) y = {cut} }}"
    )
    proto = model(source, **ints(i=1, p=[4, 0], q=[5, 1], d=[0, 3]))
    refuses(ReplaceLastStepByFinalState(), proto, "not a step")


# Keys and values of few queries


def attention(rows: int, tail: str, **given: np.ndarray):
    rng = np.random.default_rng(0)
    weights = {
        n: rng.standard_normal(s).astype(np.float32)
        for n, s in (("w", (8, 12)), ("v", (8, 12)), ("b", (12,)))
    }
    source = (
        f"agraph (float[N,2,{rows},6] q, float[N,5,8] x, float[N,1,1,5] m) => (float[N,2,{rows},6] y) {{ "
        "k = MatMul(x, w) kb = Add(b, k) kh = Reshape(kb, s) u = MatMul(x, v) ub = Add(u, b) uh = Reshape(ub, s) "
        f"ut = Transpose<perm=[0,2,1,3]>(uh) {tail} }}"
    )
    return model(source, **weights, **ints(s=[0, 0, 2, 6]), **given)


SPELT = "kt = Transpose<perm=[0,2,3,1]>(kh) a = MatMul(q, kt) c = Add(a, m) p = Softmax(c) y = MatMul(p, ut)"
FUSED = "kt = Transpose<perm=[0,2,1,3]>(kh) y = Attention{}(q, kt, ut, {})"


def test_keys_and_values_of_few_queries():
    for rule in (PushKeyWeightsIntoQueries(), PushValueWeightsBehindScores()):
        applies(rule, attention(1, SPELT))
        applies(rule, attention(2, SPELT))
        refuses(rule, attention(5, SPELT), "many queries")
        shared = attention(
            1,
            SPELT.replace(
                "c = Add(a, m)",
                "r = ReduceSum(kh) e = Mul(a, r) f = ReduceSum(uh) g = Mul(e, f) c = Add(g, m)",
            ),
        )
        refuses(rule, shared)


def test_attention_of_few_queries():
    rule = PushWeightsOutOfAttention()
    graph = applies(rule, attention(1, FUSED.format("<scale=0.3>", "m")))
    assert all(shape is not None and shape[-1] != 12 for shape in sizes(graph, "MatMul"))
    applies(rule, attention(1, FUSED.format("", "").replace(", )", ")")))
    applies(rule, attention(2, FUSED.format("", "").replace(", )", ")")))
    refuses(rule, attention(5, FUSED.format("", "").replace(", )", ")")), "many queries")
    refuses(rule, attention(1, FUSED.format("<is_causal=1>", "").replace(", )", ")")), "causal")
    refuses(rule, attention(1, FUSED.format("<softcap=2.0>", "m")), "capped")
    seen = attention(1, "z = Constant<value_float=0.0>() n = Greater(m, z) " + FUSED.format("", "n"))
    refuses(rule, seen, "not added")


def test_rows_of_all_heads_in_one_matrix_and_apart():
    """A batch that is a symbol is copied, whatever else is known."""
    layer = slice_pushdown._Projection(1, 2, 3, 2, 9, 4, ())
    detour = slice_pushdown._Detour.of(layer, 3, ("N", 2, 3, 4), ("N", 2, 3, 5))
    assert (detour.flat, detour.apart) == ((0, 6, 4), (0, 2, 3, 5))
    detour = slice_pushdown._Detour.of(layer, 3, (7, 2, 3, 4), (7, 2, 3, "S"))
    assert (detour.flat, detour.apart) == ((7, 6, 4), (7, 2, 3, -1))
    assert slice_pushdown._Detour.of(layer, 1, ("N", 2, 1, 4), ("N", 2, 1, "S")).flat is None


def test_layers_of_no_channels():
    source = (
        "agraph (float[1,2,1,3] q, float[1,4,0] x) => (float[] y) { k = MatMul(x, w) r = Reshape(k, s) "
        "t = Transpose<perm=[0,2,3,1]>(r) y = MatMul(q, t) }"
    )
    proto = model(source, w=np.zeros((0, 6), np.float32), **ints(s=[1, 4, 2, 3]))
    refuses(PushKeyWeightsIntoQueries(), proto, "sum of nothing")


def test_attention_that_gives_its_keys_out():
    for given in ("y, pk", "y, pk, pv"):
        keys = f"kt = Transpose<perm=[0,2,1,3]>(kh) {given} = Attention(q, kt, ut, m)"
        refuses(PushWeightsOutOfAttention(), attention(1, keys))


# Whole networks


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert-classifier", {}),
        ("vit-classifier", {"image": 160}),
    ],
)
def test_one_row_of_the_last_layer(name, options):
    graph = load(models.build(name, 1, width=256, **options)).graph
    cost = Roofline()
    state = RewriteState.start(graph, Library(LIBRARY), cost.delta)
    best = greedy(state, cost.cost(graph), Limits(budget=300)).best.state.graph
    products = [n for n in best.nodes() if n.op in ("MatMul", "Gemm") and not n.const]
    large = [n.types[0].shape for n in products if (n.types[0].size or 0) > 80 * 256]
    assert not large, large


def test_a_layer_of_unknown_length():
    """All of an attention layer, by this family alone, for a batch and a length that are not known."""
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal((8, 8)).astype(np.float32) for n in ("wq", "wk", "wv", "wo")}
    weights["g"] = np.ones(8, np.float32)
    source = (
        "agraph (float[N,S,8] x, float[N,1,1,S] m) => (float[N,8] y) { "
        "q = MatMul(x, wq) qh = Reshape(q, s) qt = Transpose<perm=[0,2,1,3]>(qh) "
        "k = MatMul(x, wk) kh = Reshape(k, s) kt = Transpose<perm=[0,2,3,1]>(kh) "
        "v = MatMul(x, wv) vh = Reshape(v, s) vt = Transpose<perm=[0,2,1,3]>(vh) "
        "a = MatMul(qt, kt) b = Add(a, m) p = Softmax(b) c = MatMul(p, vt) d = Transpose<perm=[0,2,1,3]>(c) "
        "e = Reshape(d, t) f = MatMul(e, wo) h = Add(f, x) l = LayerNormalization(h, g) y = Gather<axis=1>(l, i) }"
    )
    proto = model(source, **weights, **ints(s=[0, 0, 2, 4], t=[0, 0, 8], i=0))
    imported = load(proto)
    state = RewriteState.start(imported.graph, Library(declared_in(slice_pushdown)))
    while state.candidates:
        state = state.apply(min(state.candidates, key=lambda m: m.key))
    after = to_proto(imported, state.graph)
    assert_equivalent(proto, after, random_feeds(proto))
    long = [n.op for n in state.graph.nodes() if not n.const and "S" in (n.types[0].shape or ())]
    # What is left for each position: the scores of its features, which are not projected to keys.
    assert sorted(long) == ["Add", "MatMul", "Softmax", "Squeeze", "Transpose", "Unsqueeze"], long
