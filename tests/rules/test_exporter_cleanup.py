"""What exporters leave behind."""

from __future__ import annotations

import numpy as np
import pytest

from rewrite_rules.exporter_cleanup import (
    FoldComputedShape,
    KeepRowsInQuantizedProduct,
    MergeFlattenedTranspose,
    MoveReshapeIntoConstant,
    _takes,
)
from tests.rules.harness import alone, applies, model, refuses
from xrlflow.ir import dims
from xrlflow.onnxio import load
from xrlflow.rewrite import RewriteState


def test_a_shape_through_casts_and_negative_indices() -> None:
    proto = model(
        "agraph (float[N,M,4,3] x) => (float[A,B,C] y) { s = Shape(x) i = Constant<value_ints = [-4, 1]>()"
        " g = Gather(s, i) c = Cast<to = 6>(g) t = Constant<value = int32[1] {12}>() f = Concat<axis = 0>(c, t)"
        " d = Cast<to = 7>(f) y = Reshape(x, d) }"
    )
    graph = applies(FoldComputedShape(), proto, ops=["Reshape"])
    node = next(graph.nodes())
    shape = graph.const(node.inputs[1])
    assert shape is not None
    assert shape.numpy().tolist() == [0, 0, 12]


def test_an_expand_to_its_own_shape_goes() -> None:
    """The Reshape leaves one dimension open, which is that of x."""
    proto = model(
        "agraph (int32[N,6] x) => (int32[A,6,1] y) { one = Constant<value_ints = [-1, 6, 1]>() a = Reshape(x, one)"
        " s = Shape(x) t = Constant<value_ints = [1]>() f = Concat<axis = 0>(s, t) e = Expand(a, f) y = Neg(e) }"
    )
    applies(FoldComputedShape(), proto, ops=["Neg", "Reshape"])


def test_an_expand_that_repeats_stays() -> None:
    proto = model(
        "agraph (float[N,1] x, float[M] z) => (float[A,B] y) { s = Shape(x) i = Constant<value_ints = [0]>()"
        " n = Gather(s, i) t = Shape(z) f = Concat<axis = 0>(n, t) y = Expand(x, f) }"
    )
    refuses(FoldComputedShape(), proto, "a dimension is not known")


def test_two_open_dimensions_stay() -> None:
    proto = model(
        "agraph (float[N,M,4] x) => (float[A,B,C] y) { s = Shape(x) i = Constant<value_ints = [1, 0, 2]>()"
        " f = Gather(s, i) y = Reshape(x, f) }"
    )
    refuses(FoldComputedShape(), proto, "a dimension is not known")


def test_keys_are_transposed_at_once() -> None:
    """As PyTorch writes the transpose of the keys of an attention with named dimensions."""
    text = (
        "agraph (float[N,12,S,8] x) => (float[A,B,C,D] y) {{ s = Shape(x) a = Constant<value_ints = [-2]>()"
        " b = Constant<value_ints = [-1]>() e = Constant<value_ints = [9]>() z = Constant<value_ints = [0]>()"
        " m = Slice(s, a, b) n = Slice(s, b, e) lead = Slice(s, z, a) f = Concat<axis = 0>(b, m, n)"
        " r = Reshape(x, f) t = Transpose<perm = {perm}>(r) g = Concat<axis = 0>(lead, {back}) y = Reshape(t, g) }}"
    )
    graph = applies(
        MergeFlattenedTranspose(), model(text.format(perm="[0, 2, 1]", back="n, m")), ops=["Transpose"]
    )
    assert next(graph.nodes()).attrs["perm"] == (0, 1, 3, 2)
    refuses(MergeFlattenedTranspose(), model(text.format(perm="[0, 2, 1]", back="m, n")), "not those of x")
    refuses(MergeFlattenedTranspose(), model(text.format(perm="[2, 0, 1]", back="n, m")), "leading")


def test_shapes_of_shapes_are_followed_through_two_dimensions() -> None:
    text = (
        "agraph (float[N,3,M,4] x) => (y) {{ a = Constant<value_ints = [-2]>() b = Constant<value_ints = [-1]>()"
        " e = Constant<value_ints = [9]>() z = Constant<value_ints = [0]>() k = Constant<value_ints = [{axes}]>()"
        " s = Shape(x) m = Slice(s, a, b) n = Slice(s, b, e) lead = Slice(s, z, a) f = Concat<axis = 0>(b, m, n)"
        " u = Unsqueeze(f, k) v = Squeeze(u, k) r = Reshape(x, v) t = Transpose<perm = [0, 2, 1]>(r)"
        " g = Concat<axis = 0>(lead, n, m) y = Reshape(t, g) }}"
    )
    applies(MergeFlattenedTranspose(), model(text.format(axes="0")), ops=["Transpose"])
    refuses(MergeFlattenedTranspose(), model(text.format(axes="0, 1")))


@pytest.mark.parametrize(
    ("before", "flat", "after", "reason"),
    [
        # The second Reshape copies 5, where x has 0.
        ("0,0,4", "5,0,4", "0,4,0", "another number may lead"),
        # The second Reshape copies 4, where x has 0.
        ("0,0,3,4", "-1,3,4", "0,0,4,3", "another be copied"),
        # The first one is taken by no runtime: x has no third dimension.
        ("3,4", "1,3,0", "4,3", None),
    ],
)
def test_dimensions_of_zero_may_be_copied(before: str, flat: str, after: str, reason: str | None) -> None:
    proto = model(
        f"agraph (float[{before}] x) => (y) {{ f = Constant<value_ints = [{flat}]>() a = Reshape(x, f)"
        f" b = Transpose<perm = [0, 2, 1]>(a) g = Constant<value_ints = [{after}]>() y = Reshape(b, g) }}"
    )
    refuses(MergeFlattenedTranspose(), proto, reason)


QUANTISED = (
    "agraph (float[T,2,1,4] x) => (float[A,B,C] y{more}) <float[6] b = {{1, 2, 3, 4, 5, 6}}, uint8 v = {{119}}> {{"
    " k = Constant<value_ints = [0, 8]>() r = Reshape(x, k) q, s, z = DynamicQuantizeLinear(r)"
    " m = MatMulInteger(q, w, z, v) f = Cast<to = 1>(m) g = Mul(f, s) h = Add(g, b)"
    " l = Constant<value_ints = [{out}]>() y = Reshape(h, l) }}"
)

BYTES = np.random.default_rng(0).integers(0, 256, (8, 6)).astype(np.uint8)


def test_rows_of_a_quantised_product_are_not_flattened() -> None:
    graph = applies(
        KeepRowsInQuantizedProduct(),
        model(QUANTISED.format(out="0, 1, 6", more=""), w=BYTES),
        ops=["Add", "Cast", "DynamicQuantizeLinear", "MatMulInteger", "Mul", "Reshape"],
    )
    assert graph.type(graph.outputs[0]).shape == ("T", 1, 6)


def test_columns_that_are_cut_stay() -> None:
    refuses(
        KeepRowsInQuantizedProduct(), model(QUANTISED.format(out="0, 2, 3", more=""), w=BYTES), "rows are cut"
    )
    refuses(
        KeepRowsInQuantizedProduct(),
        model(QUANTISED.format(out="0, 1, 6", more=", float[D,8] r"), w=BYTES),
        "read elsewhere",
    )


@pytest.mark.parametrize(
    ("flat", "quantize", "inputs"),
    [
        ("0, 2, 4", "q, s, z = DynamicQuantizeLinear(r)", "q, w, z, v"),  # it does not make rows
        ("0, 4", "q, s, z = DynamicQuantizeLinear(r)", "q, w, z"),
        ("0, 4", "q, s, z = other.DynamicQuantizeLinear(r)", "q, w, z, v"),
        ("0, 4", "q = Identity(u)", "q, w, v, v"),
        ("0, 4", "", "u, w, v, v"),
    ],
)
def test_other_products_stay(flat: str, quantize: str, inputs: str) -> None:
    proto = model(
        f"agraph (float[T,2,4] x, uint8[T,4] u) => (y) <uint8 v = {{119}}> {{ k = Constant<value_ints = [{flat}]>()"
        f" r = Reshape(x, k) {quantize} m = MatMulInteger({inputs}) n = Cast<to = 1>(m)"
        " l = Constant<value_ints = [0, 1, 1, 6]>() y = Reshape(n, l) }",
        w=BYTES[:4],
    )
    proto.opset_import.add(domain="other", version=1)
    refuses(KeepRowsInQuantizedProduct(), proto)


def test_a_product_of_an_unknown_rank_stays() -> None:
    proto = model(QUANTISED.format(out="0, 1, 6", more=""), w=BYTES)
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    refuses(KeepRowsInQuantizedProduct(), proto)


def test_a_bias_is_reshaped_before_it_is_scaled() -> None:
    text = (
        "agraph (float s, float[1,4,2,2] x) => (float[1,4,2,2] y{more}) <float[4] b = {{1, -2, 3, 5}}> {{"
        " d = Div(b, s) f = Floor(d) c = Cast<to = 6>(f) i = Constant<value_ints = [1, -1, 1, 1]>()"
        " r = Reshape(c, i) g = Cast<to = 1>(r) y = Add(x, g) }}"
    )
    applies(
        MoveReshapeIntoConstant(),
        model(text.format(more="")),
        ops=["Add", "Cast", "Cast", "Div", "Floor"],
    )
    refuses(MoveReshapeIntoConstant(), model(text.format(more=", float[4] f")))
    computed = text.replace("float s,", "float s, float[4] b,").replace("<float[4] b = {{1, -2, 3, 5}}>", "")
    refuses(MoveReshapeIntoConstant(), model(computed.format(more="")))


def test_shape_of_a_known_result() -> None:
    source = (
        "agraph (float[N,S,12] x) => (float[N,S,3,4] y) "
        "{ n = Shape<start=0, end=2>(x) s = Concat<axis=0>(n, t) y = Reshape(x, s) }"
    )
    applies(FoldComputedShape(), model(source, t=np.array([3, 4])), ops=["Reshape"])
    source = "agraph (float[N,1] x, float[N,3] z) => (float[N,3] y) { s = Shape(z) y = Expand(x, s) }"
    applies(FoldComputedShape(), model(source), ops=["Expand"])
    source = "agraph (float[1,4] x, int64[2] s) => (float[{}] y) {{ y = Expand(x, s) }}"
    refuses(FoldComputedShape(), model(source.format("A,B")), "not known")
    source = "agraph (float[2,6] x, int64[2] s) => (float[A,B] y) { y = Reshape(x, s) }"
    refuses(FoldComputedShape(), model(source), "not known")
    refuses(FoldComputedShape(), model(source.replace(", int64[2] s", ""), s=np.array([3, 4])))


def test_dimensions_that_agree_on_most_sizes_are_two() -> None:
    """ceil(S/6) and floor(S/6)+1 differ at the multiples of 6: a Reshape that turns them round is none that copies."""
    proto = model(
        "agraph (float[S,S,2,1] x) => (float[A,B,2] y) <float[2,2,1,1] w = {1,0,0,1}, int64[3] i = {1,0,2}> {"
        " t = Transpose<perm=[3,2,0,1]>(x) c = Conv<strides=[6,6], pads=[0,1,0,0]>(t, w)"
        " u = Transpose<perm=[2,3,1,0]>(c)"
        " k = Constant<value_ints=[3]>() v = Squeeze(u, k) s = Shape(v) g = Gather(s, i) y = Reshape(v, g) }"
    )
    refuses(FoldComputedShape(), proto, "a dimension is not known")
    (a, b, _) = load(proto).graph.topological()[3].types[0].shape
    assert a != b
    assert {dims.value(a, {"S": s}) == dims.value(b, {"S": s}) for s in (1, 5, 7, 11, 13, 997)} == {True}
    assert dims.value(a, {"S": 12}) == 2
    assert dims.value(b, {"S": 12}) == 3


@pytest.mark.parametrize("end", [480_000, 1_000_003, 2**31 - 2])
def test_a_limit_that_few_sizes_reach_is_a_limit(end: int) -> None:
    proto = model(
        f"agraph (float[N,M] x) => (float[A,B] y) <int64[1] z = {{0}}, int64[1] e = {{{end}}}> {{"
        " c = Slice(x, z, e, z) d = Slice(x, z, e, o) o = Constant<value_ints=[1]>() s = Shape(c) t = Shape(d)"
        " p = Slice(s, z, o) q = Slice(t, o, r) r = Constant<value_ints=[2]>() f = Concat<axis=0>(p, q)"
        " y = Reshape(x, f) }"
    )
    refuses(FoldComputedShape(), proto, "a dimension is not known")


def test_what_wraps_around_is_no_dimension() -> None:
    """S*S*S*S / (S*S*S) is S until the product leaves 64 bits, and one of 32 leaves them sooner."""
    for cast, back in (("", ""), (" c = Cast<to=6>(m)", " q = Cast<to=7>(r)")):
        proto = model(
            "agraph (float[S,T] x) => (float[A,B] y) <int64[2] i = {1, 0}> { h = Shape(x) m = Identity(h)"
            + (cast or " c = Identity(m)")
            + " p = Mul(c, c) u = Mul(p, p) v = Mul(p, c) r = Div(u, v)"
            + (back or " q = Identity(r)")
            + " g = Gather(q, i) j = Gather(g, i) y = Reshape(x, j) }"
        )
        refuses(FoldComputedShape(), proto, "a dimension is not known")


def test_what_a_file_says_of_computed_dimensions_is_a_claim() -> None:
    """The names of outputs and of intermediate values say that M is N, which no runtime checks."""
    text = (
        "agraph (float[N,M] x) => (float[M,N] y) <int64[2] i = {1, 0}, float[N,N] t> { t = Relu(x) s = Shape(t)"
        " g = Gather(s, i) y = Reshape(t, g) }"
    )
    refuses(FoldComputedShape(), model(text), "a dimension is not known")
    unknown = (
        "agraph (float[N,M] x) => (float[M,N] y) <int64[2] i = {1, 0}, float[N,N] t> { t = other.Op(x) s = Shape(t)"
        " g = Gather(s, i) y = Reshape(t, g) }"
    )
    proto = model(unknown)
    proto.opset_import.add(domain="other", version=1)
    refuses(FoldComputedShape(), proto, "a dimension is not known")


def test_a_size_of_zero_counts() -> None:
    """At S = 0 the Reshape copies 12 where it would else have S, so that its dimension is not S."""
    proto = model(
        "agraph (float[B,12,S,4] x) => (float[A,C,D] y, float[E,F,G] z) <int64[1] a = {0}, int64[1] b = {2},"
        " int64[1] c = {3}, int64[1] n = {12}, int64[1] m = {-1}> { h = Shape(x) p = Slice(h, a, o) q = Slice(h, b, c)"
        " o = Constant<value_ints=[1]>() r = Mul(p, n) f = Concat<axis=0>(r, q, m) y = Reshape(x, f)"
        " k = Constant<value_ints=[-1]>() g = Concat<axis=0>(r, k, q) v = Reshape(x, g) z = Relu(v) }"
    )
    graph = load(proto).graph
    shape = graph.type(graph.outputs[0]).shape
    assert shape is not None
    assert [dims.value(d, {"B": 2, "S": 0}) for d in shape] == [24, 12, 0]
    assert [dims.value(d, {"B": 2, "S": 3}) for d in shape] == [24, 3, 4]


def test_a_shape_that_is_doubled_many_times_is_read_once() -> None:
    """Each of the nodes reads the one before twice: two to the power of their number ways to the first."""
    doubled = " ".join(f"v{k + 1} = Sub(v{k}, w{k}) w{k + 1} = Add(v{k}, w{k})" for k in range(22))
    proto = model(
        "agraph (float[N,2] x) => (float[a,b] y) <int64[2] o = {0, 0}> { v0 = Shape(x) w0 = Identity(o)"
        f" {doubled} u = Max(v22, v0) y = Reshape(x, u) }}"
    )
    state = RewriteState.start(load(proto).graph, alone(FoldComputedShape()))
    assert len(state.candidates) <= 1


@pytest.mark.parametrize(
    ("before", "shape", "taken"),
    [
        ((2, 6), (3, 4), True),
        ((2, 6), (3, 5), False),
        ((2, 6), (0, 6), True),
        ((2, 6), (0, 5), False),
        ((2, 6), (2, 6, 0), False),  # nothing is there to be copied
        ((2, 6), (4, -1), True),
        ((2, 6), (1, -1), True),
        ((2, 6), (5, -1), False),
        ((2, 6), (0, -1), True),
        ((0, 6), (0, -1), False),  # nothing can be inferred beside a 0
        ((0, 6), (6, 0), False),
        (("N", 6), (5, 1), True),
    ],
)
def test_a_reshape_keeps_the_number_of_elements(before, shape, taken):
    assert _takes(before, shape) is taken


@pytest.mark.parametrize(
    "text",
    [
        "agraph (float[4,3] x, float[N] z) => (float[a,b] y) <int64[1] o = {7}> {"
        " d = Shape(z) e = Sub(d, d) f = Add(e, o) u = Concat<axis=0>(f, f) y = Expand(x, u) }",
        "agraph (float[4,3] x, float[N] z) => (float[a] y) <int64[1] o = {7}> {"
        " d = Shape(z) e = Sub(d, d) f = Add(e, o) y = Reshape(x, f) }",
        "agraph (float[4,3] x, float[N] z) => (float[a,b] y) <int64[1] o = {7}, int64[1] m = {-1}> {"
        " d = Shape(z) e = Sub(d, d) f = Add(e, o) u = Concat<axis=0>(m, f) y = Reshape(x, u) }",
    ],
)
def test_a_computed_shape_that_never_fits_stays(text: str) -> None:
    """The model fails whenever it runs; reading it for substitutions must not."""
    state = RewriteState.start(load(model(text)).graph, alone(FoldComputedShape()))
    assert not state.candidates
