"""Attention and rotary embeddings, spelt out."""

from __future__ import annotations

import numpy as np
import pytest

from rewrite_rules import attention
from rewrite_rules.attention import FuseAttention, FuseRotaryEmbedding
from tests.rules.harness import applies, model, numbers, refuses
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
    uneven = given | {"k": np.array([2, 2]), "i": np.array([1])}
    one_batch = ROTARY.replace("float[2,5,2] f", "float[1,5,2] f").format("", "f, f", "q", "p")
    refuses(rule, model(one_batch, **uneven), "each position")


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
    applies(FuseAttention(), attend(body, more=", float[N,1,3,5] m"), ops=["Attention", "Mul"])
    applies(FuseAttention(), attend(body, more=", float[N,1,1,5] m"), ops=["Attention", "Expand", "Mul"])
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
    assert [r.name for r in declared_in(attention)] == ["FuseAttention", "FuseRotaryEmbedding"]
