"""Conditions, comparisons, and casts of booleans."""

from __future__ import annotations

import numpy as np

from rewrite_rules.logic import (
    FlipWhere,
    FoldComparisonOfBool,
    FuseGreaterOrEqual,
    FuseLessOrEqual,
    PushNotIntoComparison,
    RemoveConstantWhere,
    ReplaceCastLike,
    ReplaceNumberInWhere,
    ReplaceWhereByCast,
)
from tests.rules.harness import applies, model, refuses


def test_cast_like():
    source = "agraph (float[N,4] x, int64[3] z) => (int64[N,4] y) { y = CastLike(x, z) }"
    applies(ReplaceCastLike(), model(source), ops=["Cast"])


ONE, ZERO, SIX, THREE = (np.float32(v) for v in (1, 0, 6, 3))


def test_where():
    source = "agraph (float[N,4] x, float[4] z) => (float[N,4] y) {{ y = Where(c, {}) }}"
    applies(RemoveConstantWhere(), model(source.format("x, z"), c=np.ones((1, 4), np.bool_)))
    applies(RemoveConstantWhere(), model(source.format("z, x"), c=np.bool_(False)))
    refuses(RemoveConstantWhere(), model(source.format("z, x"), c=np.bool_(True)), "may broadcast")
    mixed = np.array([True, False, True, True])
    refuses(RemoveConstantWhere(), model(source.format("x, z"), c=mixed), "not the same")
    source = (
        "agraph (bool[N,4] c, float[N,4] x, float[4] z) => (float[N,4] y) { n = Not(c) y = Where(n, x, z) }"
    )
    applies(FlipWhere(), model(source), ops=["Where"])
    source = "agraph (bool[N,4] c) => (float[N,4] y) { y = Where(c, a, b) }"
    applies(ReplaceWhereByCast(), model(source, a=ONE, b=np.zeros(4, np.float32)), ops=["Cast"])
    applies(ReplaceWhereByCast(), model(source, a=ZERO, b=ONE), ops=["Cast", "Not"])
    refuses(ReplaceWhereByCast(), model(source, a=THREE, b=ZERO), "not 1 and 0")
    wide = model(
        source.replace("bool[N,4]", "bool[4]").replace("[N,4] y", "[2,4] y"),
        a=np.ones((2, 4), np.float32),
        b=ZERO,
    )
    refuses(ReplaceWhereByCast(), wide, "may broadcast")


def test_a_number_of_a_mask_is_replaced():
    source = (
        "agraph (bool[N,4] c) => (float[N,4] y) { w = Where(c, a, b) e = Equal(w, k) y = Where(e, d, w) }"
    )
    lowest, low = np.float32(-3.4e38), np.float32(-3.3e38)
    graph = applies(ReplaceNumberInWhere(), model(source, a=ZERO, b=lowest, k=lowest, d=low), ops=["Where"])
    (node,) = (n for n in graph.nodes() if n.op == "Where")
    numbers = [graph.const(v).numpy().item() for v in node.inputs[1:]]
    np.testing.assert_allclose(numbers, [0, low])
    applies(ReplaceNumberInWhere(), model(source, a=lowest, b=ZERO, k=lowest, d=low), ops=["Where"])
    mixed = np.array([1, 2, 3, 4], np.float32)
    refuses(ReplaceNumberInWhere(), model(source, a=mixed, b=ONE, k=ONE, d=low), "not the same")
    wide = model(
        source.replace("bool[N,4]", "bool[4]").replace("[N,4] y", "[2,4] y"),
        a=ZERO,
        b=ONE,
        k=ONE,
        d=np.full((2, 4), low),
    )
    refuses(ReplaceNumberInWhere(), wide, "may broadcast")


def test_comparisons():
    source = (
        "agraph (float[N,4] x, float[4] z) => (bool[N,4] y) {{ a = {}(x, z) b = Equal(z, x) y = {}(b, a) }}"
    )
    applies(FuseLessOrEqual(), model(source.format("Less", "Or")), ops=["LessOrEqual"])
    applies(FuseGreaterOrEqual(), model(source.format("Greater", "Or")), ops=["GreaterOrEqual"])
    refuses(FuseLessOrEqual(), model(source.format("Less", "And")))
    refuses(FuseLessOrEqual(), model(source.format("Less", "Or").replace("Less(x, z)", "Less(z, z)")))
    source = "agraph ({0}[N,4] x, {0}[4] z) => (bool[N,4] y) {{ a = Less(x, z) y = Not(a) }}"
    applies(PushNotIntoComparison(), model(source.format("int64")), ops=["GreaterOrEqual"])
    refuses(PushNotIntoComparison(), model(source.format("float")), "NaN")


def test_comparisons_of_booleans():
    source = "agraph (bool[N,4] c) => (bool[N,4] y) {{ i = Cast<to=1>(c) b = {} y = Not(b) }}"
    for compare, ops in (
        ("Equal(i, one)", ["Not"]),
        ("Equal(zero, i)", ["Not", "Not"]),
        ("Greater(i, zero)", ["Not"]),
        ("Greater(one, i)", ["Not", "Not"]),
    ):
        name = "one" if "one" in compare else "zero"
        given = {name: ONE if name == "one" else ZERO}
        applies(FoldComparisonOfBool(), model(source.format(compare), **given), ops=ops)
    refuses(FoldComparisonOfBool(), model(source.format("Greater(i, one)"), one=ONE), "the same for both")
    refuses(
        FoldComparisonOfBool(),
        model(source.replace("bool[N,4] c", "int64[N,4] c").format("Equal(i, one)"), one=ONE),
    )


def test_whole_numbers_are_not_compared_as_floats() -> None:
    (near,) = ReplaceNumberInWhere.near_misses
    refuses(ReplaceNumberInWhere(), model(near), "too large")
