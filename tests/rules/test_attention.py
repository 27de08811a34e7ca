"""Attention and rotary embeddings, spelt out."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from rewrite_rules import attention
from rewrite_rules.attention import FuseAttention, FuseGuardedAttention, FuseRotaryEmbedding
from tests.rules.harness import (
    applies,
    assert_same,
    ints,
    model,
    normal,
    numbers,
    random_feeds,
    refuses,
    rewritten,
    run,
)
from xrlflow.rewrite import declared_in

ROTARY = (
    "agraph (float[2,3,5,4] x, float[2,5,2] f{}) => (float[2,3,5,4] y) {{ d = Concat<axis=-1>({}) a = "
    "Cos(d) b = Sin(d) "
    "c = Unsqueeze(a, i) s = Unsqueeze(b, i) p, q = Split<axis=-1>(x, k) n = Neg({}) r = Concat<axis=-1>(n, "
    "{}) "
    "u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }}"
)


def test_rotary_embedding():
    given = {"i": np.array([1]), "k": np.array([2, 2])}
    rule = FuseRotaryEmbedding()
    ops = [
        "Concat",
        "Cos",
        "RotaryEmbedding",
        "Sin",
        "Slice",
        "Slice",
        "Squeeze",
        "Squeeze",
        "Unsqueeze",
        "Unsqueeze",
    ]
    applies(rule, model(ROTARY.format("", "f, f", "q", "p"), **given), ops=ops)
    refuses(rule, model(ROTARY.format(", float[2,5,2] g", "f, g", "q", "p"), **given), "other angles")
    refuses(rule, model(ROTARY.format("", "f, f", "p", "q"), **given))
    one_batch = ROTARY.replace("float[2,5,2] f", "float[1,5,2] f").format("", "f, f", "q", "p")
    applies(rule, model(one_batch, **given))
    open_batch = one_batch.replace("float[2,3,5,4]", "float[N,3,5,4]")
    assert "Shape" in {n.op for n in applies(rule, model(open_batch, **given)).nodes()}
    two_batches = one_batch.replace("float[2,3,5,4]", "float[1,3,5,4]").replace(
        "float[1,5,2] f", "float[2,5,2] f"
    )
    refuses(
        rule, model(two_batches.replace("(float[1,3,5,4] y)", "(float[2,3,5,4] y)"), **given), "each position"
    )


@pytest.mark.parametrize("rows", [10, 100])  # small enough to be kept in memory, and not
def test_rotary_embedding_of_tables(rows):
    """Exporters look the angles of each position up in a table."""
    rule = FuseRotaryEmbedding()
    body = (
        "agraph (float[2,3,5,16] x, int64[2,5] i) => (float[2,3,5,16] y) { a = Gather(cosines, i) "
        "b = Gather(sines, i) c = Unsqueeze(a, one) s = Unsqueeze(b, one) p, q = Split<axis=-1>(x, k) n = Neg(q) "
        "r = Concat<axis=-1>(n, p) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) }"
    )
    given = {"one": np.array([1]), "k": np.array([8, 8])}
    cosines, sines = (np.tile(normal(rows, 8, seed=seed), 2) for seed in (0, 1))
    graph = applies(rule, model(body, cosines=cosines, sines=sines, **given))
    assert "RotaryEmbedding" in {node.op for node in graph.nodes()}
    sines[-1, -1] += 1
    refuses(rule, model(body, cosines=cosines, sines=sines, **given), "other angles")
    # Columns of a table, not rows.
    columns = body.replace("float[2,3,5,16] x, int64[2,5] i", "float[1,3,5,16] x, int64[16] i")
    columns = columns.replace("float[2,3,5,16] y", "float[1,3,5,16] y").replace("Gather(", "Gather<axis=2>(")
    flat = np.tile(normal(1, 5, 8), 2)
    refuses(rule, model(columns, cosines=flat, sines=flat, **given), "other angles")


def attend(
    body: str,
    *,
    q: str = "N,2,3,4",
    k: str = "N,2,5,4",
    v: str = "N,2,5,6",
    y: str = "N,2,3,6",
    more: str = "",
    outputs: str = "",
    **given: np.ndarray,
):
    return model(
        f"agraph (float[{q}] q, float[{k}] k, float[{v}] v{more}) => (float[{y}] y{outputs}) {{ {body} }}",
        **given,
    )


SCALE = np.float32(0.4)

KT = "t = Transpose<perm=[0,1,3,2]>(k)"


@pytest.mark.parametrize(
    "body",
    [
        f"{KT} s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v)",
        f"{KT} a = MatMul(q, t) s = Mul(a, c) p = Softmax<axis=3>(s) y = MatMul(p, v)",
        f"{KT} a = MatMul(q, t) s = Div(a, c) p = Softmax(s) y = MatMul(p, v)",
        f"{KT} r = Mul(c, q) s = MatMul(r, t) p = Softmax(s) y = MatMul(p, v)",
        f"{KT} r = Mul(q, c) u = Mul(t, c) s = MatMul(r, u) p = Softmax(s) y = MatMul(p, v)",
        "r = Div(q, c) u = Mul(k, c) t = Transpose<perm=[0,1,3,2]>(u) s = MatMul(r, t) "
        "p = Softmax(s) y = MatMul(p, v)",
    ],
)
def test_scale(body):
    given = {"c": SCALE} if " c)" in body or "(c," in body else {}
    applies(FuseAttention(), attend(body, **given), ops=["Attention"])


@pytest.mark.parametrize("number", [1e-30, 1e30])
def test_scales_that_make_no_float(number):
    """ONNX Runtime takes no scale of 0, which the product of small ones is in float32."""
    body = f"{KT} r = Mul(q, c) u = Mul(t, c) s = MatMul(r, u) p = Softmax(s) y = MatMul(p, v)"
    refuses(FuseAttention(), attend(body, c=np.float32(number)), "none that is a float32")
    apart = body.replace("(t, c)", "(t, d)")
    applies(FuseAttention(), attend(apart, c=np.float32(number), d=np.float32(1 / number)), ops=["Attention"])


def test_keys_in_other_layouts():
    rest = "s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v)"
    applies(
        FuseAttention(),
        attend(f"t = Transpose<perm=[0,2,3,1]>(k) {rest}", k="N,5,2,4"),
        ops=["Attention", "Transpose"],
    )
    # A permutation that is not written reverses the dimensions.
    reverse = attend(f"t = Transpose(k) {rest}", q="2,2,3,4", k="5,4,2,2", v="2,2,5,6", y="2,2,3,6")
    applies(FuseAttention(), reverse, ops=["Attention", "Transpose"])
    # Already transposed: Attention wants them otherwise.
    applies(
        FuseAttention(),
        attend(f"t = Identity(k) {rest}", k="N,2,4,5"),
        ops=["Attention", "Identity", "Transpose"],
    )


@pytest.mark.parametrize(
    ("shape", "ops"),
    [
        ((3, 5), ["Attention"]),
        ((1, 3, 5), ["Attention"]),
        ((2, 3, 5), ["Attention"]),
        ((1, 1, 3, 5), ["Attention"]),
        ((1, 2, 3, 5), ["Attention"]),
        ((1, 1, 1, 5), ["Attention"]),
        ((1, 5), ["Attention"]),
    ],
)
def test_mask(shape, ops):
    body = f"{KT} a = MatMul(q, t) b = Mul(a, c) s = Add(m, b) p = Softmax(s) y = MatMul(p, v)"
    applies(FuseAttention(), attend(body, c=SCALE, m=numbers(*shape)), ops=ops)


@pytest.mark.parametrize(
    ("mask", "scores", "fits"),
    [
        ((4, 5), (2, 3, 4, 5), True),
        ((1, 5), (2, 3, 4, 5), True),
        ((1, 5), (2, 3, "Q", 5), False),
        (("Q", 5), (2, 3, "Q", 5), True),
        ((3, 5), (2, 3, 4, 5), False),
        ((4, 1), (2, 3, 4, 5), False),
        ((2, 3, 4, 5), (2, 3, 4, 5), True),
        ((1, 3, 4, 5), (2, 3, 4, 5), True),
        ((7, 3, 4, 5), (2, 3, 4, 5), False),
        ((2, 1, 4, 5), (3, 2, 4, 5), False),
        ((None, 1, 4, 5), (None, 2, 4, 5), False),
        ((2, 4, 5), (2, 3, 4, 5), False),
    ],
)
def test_masks_that_fit(mask, scores, fits):
    assert attention._broadcasts(mask, scores) is fits


def test_mask_at_run_time():
    body = f"{KT} a = MatMul(q, t) s = Add(a, m) p = Softmax(s) y = MatMul(p, v)"
    applies(FuseAttention(), attend(body, more=", float[N,1,3,5] m"), ops=["Attention", "Equal", "Where"])
    applies(
        FuseAttention(),
        attend(body, more=", float[N,1,1,5] m"),
        ops=["Attention", "Equal", "Expand", "Where"],
    )
    # Every number minus infinity but one.
    hidden = np.full((3, 5), -np.inf, np.float32)
    hidden[:, 2] = 0
    applies(FuseAttention(), attend(body, m=hidden), ops=["Attention"])


@pytest.mark.parametrize("least", [np.finfo(np.float32).min, np.float32(-1e30), np.float32(-1e4)])
def test_a_row_that_is_masked_everywhere(least):
    """The least float is a number: a softmax of nothing else is not zero."""
    body = f"{KT} a = MatMul(q, t) s = Add(a, m) p = Softmax(s) y = MatMul(p, v)"
    hidden = np.where(np.arange(15).reshape(3, 5) < 7, least, np.float32(0)).astype(np.float32)
    applies(FuseAttention(), attend(body, m=hidden))
    mixed = hidden.copy()
    mixed[0, 1] = -np.inf
    applies(FuseAttention(), attend(body, m=mixed))


def test_a_bias_and_a_mask():
    """T5 adds a bias for positions, and then a mask for padding."""
    body = f"{KT} a = MatMul(q, t) b = Add(a, l) s = Add(m, b) p = Softmax(s) y = MatMul(p, v)"
    both = attend(body, more=", float[1,2,3,5] l, float[N,1,1,5] m")
    applies(FuseAttention(), both, ops=["Add", "Attention", "Equal", "Where"])
    applies(FuseAttention(), attend(body, l=numbers(2, 3, 5), m=numbers(1, 5)), ops=["Attention"])
    refuses(FuseAttention(), attend(body, l=numbers(2, 3, 5), m=numbers(3, 1)), "mask does not fit")
    hidden = np.zeros((3, 5), np.float32)
    hidden[1], hidden[2, :3] = np.finfo(np.float32).min, np.finfo(np.float32).min
    applies(FuseAttention(), attend(body, l=numbers(2, 3, 5), m=hidden))


KEYS = "j = Unsqueeze(k, two) e = Expand(j, each) f = Reshape(e, ks) t = Transpose<perm=[0,1,3,2]>(f)"
SCORES = "a = MatMul(q, t) s = Mul(a, c) p = Softmax(s)"
VALUES = "l = Unsqueeze(v, two) g = Expand(l, each) h = Reshape(g, vs)"


def grouped(body: str, **shapes: str):
    """Six heads of queries, of which three share a head of keys and values."""
    given = ints(two=[2], each=[1, 1, 3, 1, 1], ks=[-1, 6, 5, 4], kts=[-1, 6, 4, 5], vs=[-1, 6, 5, 6])
    used = {name: array for name, array in given.items() if f" {name})" in body} | {"c": SCALE}
    return attend(body, **({"q": "N,6,3,4", "y": "N,6,3,6"} | shapes), **used)


def test_heads_that_share_keys():
    body = f"{KEYS} {SCORES} {VALUES} y = MatMul(p, h)"
    views = ["Squeeze", "Squeeze", "Unsqueeze", "Unsqueeze"]
    applies(FuseAttention(), grouped(body), ops=["Attention", *views])
    # Transposed before they are repeated, with a scale between.
    expanded = "j = Unsqueeze(r, two) e = Expand(j, each) f = Reshape(e, kts)"
    before = f"r = Transpose<perm=[0,1,3,2]>(k) {expanded} t = Mul(f, c)"
    turned = f"{before} {SCORES} {VALUES} y = MatMul(p, h)"
    applies(FuseAttention(), grouped(turned), ops=["Attention", "Transpose", "Transpose", *views])
    guarded = f"{KEYS} {SCORES} {VALUES} i = IsNaN(p) w = Where(i, z, p) y = MatMul(w, h)"
    ops = ["Attention", "Expand", "IsNaN", "Mul", "ReduceSum", "Reshape", *views, "Where"]
    applies(FuseGuardedAttention(), with_zero(grouped(guarded)), ops=ops)


def test_heads_that_share_keys_of_open_length():
    """An exporter computes the shape. Where the length is 0, this Reshape copies another dimension."""
    given = {"two": np.array([2]), "each": np.array([1, 1, 3, 1, 1]), "six": np.array([6]), "c": SCALE}
    sizes = (
        "n = Shape<end=1>(k) kd = Shape<start=2>(k) vd = Shape<start=2>(v) "
        "ks = Concat<axis=0>(n, six, kd) vs = Concat<axis=0>(n, six, vd)"
    )
    body = f"{sizes} {KEYS} {SCORES} {VALUES} y = MatMul(p, h)"
    shapes = {"q": "N,6,3,4", "k": "N,2,T,4", "v": "N,2,T,6", "y": "N,6,3,6"}
    graph = applies(FuseAttention(), attend(body, **shapes, **given))
    assert "Expand" not in {node.op for node in graph.nodes()}
    # The batch and the length change places.
    turned = body.replace(
        "ks = Concat<axis=0>(n, six, kd)",
        "t0 = Shape<start=2, end=3>(k) t1 = Shape<start=3>(k) ks = Concat<axis=0>(t0, six, n, t1)",
    ).replace("vs = Concat<axis=0>(n, six, vd)", "t2 = Shape<start=3>(v) vs = Concat<axis=0>(t0, six, n, t2)")
    refuses(FuseAttention(), attend(turned, **(shapes | {"q": "T,6,3,4", "y": "T,6,3,6"}), **given))


def test_what_is_no_sharing_of_keys():
    """Then Attention takes the keys as they are after their repetition."""
    repeated = ["Attention", "Expand", "Expand", "Reshape", "Reshape", "Unsqueeze", "Unsqueeze"]
    # The heads take turns: 0, 1, 0, 1, ... instead of 0, 0, 0, 1, ...
    turns = f"{KEYS} {SCORES} {VALUES} y = MatMul(p, h)".replace(" two)", " one)")
    proto = attend(
        turns,
        q="N,6,3,4",
        y="N,6,3,6",
        c=SCALE,
        **ints(one=[1], each=[1, 3, 1, 1, 1], ks=[-1, 6, 5, 4], vs=[-1, 6, 5, 6]),
    )
    applies(FuseAttention(), proto, ops=repeated)
    # Only the keys are shared.
    keys = f"{KEYS} {SCORES} y = MatMul(p, v)"
    only = grouped(keys, v="N,6,5,6")
    applies(FuseAttention(), only, ops=["Attention", "Expand", "Reshape", "Unsqueeze"])


GUARD = "i = IsNaN(p) w = Where(i, z, p) y = MatMul(w, v)"


def with_zero(proto, zero: float = 0.0):
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(zero), "z"))
    return proto


def test_a_guard_against_rows_that_are_masked_everywhere():
    """PyTorch's exporter writes it: a softmax of nothing but -inf is NaN."""
    hidden = np.zeros((3, 5), np.float32)
    hidden[0], hidden[1, :4] = -np.inf, -np.inf
    hidden[2] = np.finfo(np.float32).min  # a number: equal weights
    body = f"{KT} a = MatMul(q, t) s = Add(a, m) p = Softmax(s) {GUARD}"
    proto = with_zero(attend(body, m=hidden))
    applies(FuseGuardedAttention(), proto, ops=["Attention", "IsNaN", "Mul", "ReduceSum", "Where"])
    rows = run(rewritten(FuseGuardedAttention(), proto)[0], random_feeds(proto))[0]
    assert not rows[:, :, 0].any()
    assert rows[:, :, 1:].all()
    # Without the guard such a row is NaN, and so it is no number that the fusion may change.
    plain = attend(body.replace(GUARD, "y = MatMul(p, v)"), m=hidden)
    assert np.isnan(run(plain, random_feeds(plain))[0][:, :, 0]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.float32(3e38)])
@pytest.mark.parametrize("where", ["q", "k", "v", "m"])
@pytest.mark.parametrize("keys", ["5", "T"])
def test_a_guard_gives_numbers_where_queries_and_keys_are_not_finite(bad: float, where: str, keys: str):
    """What the guard hides stays hidden, and what it does not hide is not hidden."""
    body = f"{KT} a = MatMul(q, t) s = Add(a, m) p = Softmax(s) {GUARD}"
    proto = with_zero(attend(body, k=f"N,2,{keys},4", v=f"N,2,{keys},6", more=f", float[3,{keys}] m"))
    after, _ = rewritten(FuseGuardedAttention(), proto)
    feeds = random_feeds(proto)
    feeds[where][..., 1, :2] = bad
    assert_same(run(proto, feeds), run(after, feeds))


def test_what_is_no_guard():
    rule = FuseGuardedAttention()
    body = f"{KT} s = MatMul(q, t) p = Softmax(s) {GUARD}"
    refuses(rule, with_zero(attend(body), 1.0), "does not give zeros")
    other = attend(body.replace("IsNaN(p)", "IsNaN(n)"), more=", float[N,2,3,5] n")
    refuses(rule, with_zero(other), "no guard")
    refuses(rule, with_zero(attend(body, outputs=", float[N,2,3,5] p")), "read elsewhere")
    refuses(rule, with_zero(attend(body, outputs=", bool[N,2,3,5] i")), "read elsewhere")
    refuses(rule, with_zero(attend(body, outputs=", float[N,2,3,5] w")))
    refuses(rule, with_zero(attend(body.replace("IsNaN(p)", "IsInf(p)"))))
    refuses(FuseAttention(), with_zero(attend(body)))


def test_refusals():
    rule = FuseAttention()
    tail = "p = Softmax(s) y = MatMul(p, v)"
    body = f"{KT} a = MatMul(q, t) s = Add(a, m) {tail}"
    refuses(rule, attend(body, m=numbers(1, 1, 3, 1)), "mask does not fit")
    refuses(rule, attend(body, m=numbers(5)), "mask does not fit")
    plain = f"{KT} s = MatMul(q, t) {tail}"
    refuses(rule, attend(plain, outputs=", float[N,2,3,5] p"))
    refuses(rule, attend(plain, outputs=", float[N,2,3,5] s"), "read elsewhere")
    refuses(rule, attend(plain.replace("Softmax(s)", "Softmax<axis=2>(s)")))
    refuses(rule, attend(plain, k="N,1,5,4"), "heads")
    refuses(rule, attend(plain, q="N,0,3,4", k="N,0,5,4", v="N,0,5,6", y="N,0,3,6"), "number of heads")
    refuses(rule, attend(plain, q="1,2,3,4"), "batch")
    refuses(rule, attend(plain, q="N,2,3,D", k="N,2,5,D"), "size of a head")
    refuses(rule, attend(f"{KT} a = MatMul(q, t) s = Mul(a, c) {tail}", c=numbers(5)))
    three = plain.replace("[0,1,3,2]", "[0,2,1]")
    refuses(rule, attend(three, q="2,3,4", k="2,5,4", v="2,5,6", y="2,3,6"))


def test_module():
    assert [r.name for r in declared_in(attention)] == [
        "FuseAttention",
        "FuseGuardedAttention",
        "FuseRotaryEmbedding",
    ]
