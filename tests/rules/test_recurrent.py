"""Steps of unrolled cells."""

from __future__ import annotations

import numpy as np
import pytest

from rewrite_rules.recurrent import FuseStepsIntoGemms, FuseSumOfGemms, SwapSplits
from tests.rules.harness import applies, model, refuses

RNG = np.random.default_rng(0)


def weight(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


SUM = (
    "agraph (float[2,3] x, float[2,4] y) => (float[2,5] s) {"
    " p = Gemm<transB=1>(x, w, b)\n q = Gemm<transB=1>(y, v, c)\n s = Add(p, q) }"
)


def test_sum_of_gemms() -> None:
    applies(
        FuseSumOfGemms(),
        model(SUM, w=weight(5, 3), v=weight(5, 4), b=weight(5), c=weight(5)),
        ops=["Gemm"] * 2,
    )


def test_sum_of_gemms_with_a_bias_per_row() -> None:
    proto = model(SUM, w=weight(5, 3), v=weight(5, 4), b=weight(2, 5), c=weight(5))
    refuses(FuseSumOfGemms(), proto, "2 dimensions")


def steps(extra: str = "", outputs: str = "float[1,4] f, float[1,4] g, float[1,4] h") -> str:
    return (
        f"agraph (float[3,3] x, float[1,3] s, float[1,3] t) => ({outputs}) {{"
        " p = Gemm<transB=1>(x, v, c)\n q, r, u = Split<axis=0, num_outputs=3>(p)\n"
        " d = Gemm<transB=1>(s, w, b)\n e = Gemm<transB=1>(t, w, b2)\n"
        f" f = Add(q, d)\n g = Add(e, r)\n h = Add(u, z)\n {extra} }}"
    )


def parameters(same_bias: bool = True) -> dict[str, np.ndarray]:
    b = weight(4)
    return {
        "v": weight(4, 3), "c": weight(4), "w": weight(4, 3), "b": b, "b2": b if same_bias else weight(4),
        "z": weight(1, 4),
    }  # fmt: skip


def test_steps_with_a_constant_first_one() -> None:
    applies(FuseStepsIntoGemms(), model(steps(), **parameters()), ops=["Gemm"] * 3 + ["Split", "Add"])


def test_steps_with_different_biases() -> None:
    refuses(FuseStepsIntoGemms(), model(steps(), **parameters(same_bias=False)), "different biases")


def test_a_step_that_is_read_elsewhere() -> None:
    proto = model(
        steps("k = Relu(d)", "float[1,4] f, float[1,4] g, float[1,4] h, float[1,4] k"), **parameters()
    )
    refuses(FuseStepsIntoGemms(), proto, "read elsewhere")


def test_swap_splits() -> None:
    proto = model(
        "agraph (float[6,6] x) => (float[1,2] a, float[1,4] b, float[5,2] c, float[5,4] d) {"
        " p, q = Split<axis=0>(x, r)\n a, b = Split<axis=1>(p, s)\n c, d = Split<axis=1>(q, s) }",
        r=np.array([1, 5]),
        s=np.array([2, 4]),
    )
    applies(SwapSplits(), proto, ops=["Split"] * 3)


def test_swap_splits_of_different_widths() -> None:
    proto = model(
        "agraph (float[6,6] x) => (float[3,2] a, float[3,4] b, float[3,1] c, float[3,5] d) {"
        " p, q = Split<axis=0, num_outputs=2>(x)\n a, b = Split<axis=1>(p, s)\n c, d = Split<axis=1>(q, t) }",
        s=np.array([2, 4]),
        t=np.array([1, 5]),
    )
    refuses(SwapSplits(), proto, "split differently")


def test_swap_splits_along_one_axis() -> None:
    proto = model(
        "agraph (float[8,2] x) => (float[2,2] a, float[2,2] b, float[2,2] c, float[2,2] d) {"
        " p, q = Split<axis=0, num_outputs=2>(x)\n a, b = Split<axis=0, num_outputs=2>(p)\n"
        " c, d = Split<axis=0, num_outputs=2>(q) }"
    )
    refuses(SwapSplits(), proto, "one axis")


def test_swap_splits_of_one_part() -> None:
    text = (
        "agraph (float[6,6] x) => (float[6,2] a, float[6,4] b) {"
        " p = Split<axis=0, num_outputs=1>(x)\n a, b = Split<axis=1>(p, s) }"
    )
    applies(SwapSplits(), model(text, s=np.array([2, 4])))


def test_swap_splits_along_different_axes() -> None:
    """Even where all parts are of no size along one of them."""
    text = (
        "agraph (float[4,0,6] x) => (float[2,0,6] a, float[2,0,6] b, float[2,0,3] c, float[2,0,3] d) {"
        " p, q = Split<axis=0, num_outputs=2>(x)\n a, b = Split<axis=1, num_outputs=2>(p)\n"
        " c, d = Split<axis=2, num_outputs=2>(q) }"
    )
    refuses(SwapSplits(), model(text), "split differently")


def two_steps(first: str = "", product: str = "Gemm", split: str = "axis=0", bias: str = ", c") -> str:
    shape = "4,2" if split == "axis=1" else "2,4"
    return (
        f"agraph (float[4,4] x, float[{shape}] s, float[{shape}] t{first}) => (float[] f, float[] g) {{"
        f" p = {product}(x, v{bias})\n q, r = Split<{split}, num_outputs=2>(p)\n d = {product}(s, w, b)\n"
        f" e = {product}(t, w, b)\n f = Add(q, d)\n g = Add(r, e) }}"
    )


@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_steps_with_a_row_of_biases(shape: tuple[int, ...]) -> None:
    given = {"v": weight(4, 4), "c": weight(4), "w": weight(4, 4), "b": weight(*shape)}
    applies(FuseStepsIntoGemms(), model(two_steps(), **given), ops=["Gemm"] * 3 + ["Split"])


def test_steps_that_stay() -> None:
    given = {"v": weight(4, 4), "c": weight(4), "w": weight(4, 4), "b": weight(4)}
    rule = FuseStepsIntoGemms()
    refuses(rule, model(two_steps(bias=""), **given))
    refuses(rule, model(two_steps(", float[4] c"), **{k: v for k, v in given.items() if k != "c"}))
    columns = {"v": weight(4, 4), "c": weight(4), "w": weight(2, 2), "b": weight(2)}
    refuses(rule, model(two_steps(split="axis=1"), **columns))
    tall = two_steps(product="Gemm<transA=1>").replace("float[2,4]", "float[4,2]")
    refuses(rule, model(tall, **given))
