"""Unrolled recurrent cells."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from rewrite_rules.recurrent import (
    FuseStepsIntoGemms,
    FuseSumOfGemms,
    FuseUnrolledGRU,
    FuseUnrolledLSTM,
    FuseUnrolledRNN,
    SwapSplits,
)
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


def _weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: (rng.standard_normal(shape) / 2).astype(np.float32) for name, shape in shapes.items()}


def _lstm(gates: str, *, inner: str = "", steps: int = 3) -> onnx.ModelProto:
    """Steps of an LSTM with a matrix for each gate, x first; `gates` gives the order in which they are made."""
    lines = []
    for t in range(steps):
        lines.append(f"x{t} = Squeeze(p{t}, one)")
        for g in gates:
            lines.append(
                f"a{g}{t} = MatMul(x{t}, w{g}) b{g}{t} = MatMul(h{t}, r{g}) s{g}{t} = Add(b{g}{t}, a{g}{t})"
                f" z{g}{t} = Add(s{g}{t}, b{g}) {g}{t} = {'Tanh' if g == 'g' else 'Sigmoid'}(z{g}{t})"
            )
        lines.append(
            f"k{t} = Mul(c{t}, f{t}) n{t} = Mul(g{t}, i{t}) c{t + 1} = Add(n{t}, k{t}) {inner}"
            f" u{t + 1} = Tanh(c{t + 1}) h{t + 1} = Mul(u{t + 1}, o{t})"
        )
    parts = ", ".join(f"p{t}" for t in range(steps))
    text = (
        f"agraph (float[2,{steps},3] x, float[2,4] h0, float[2,4] c0) => (float[2,4] h{steps}, float[2,4] c{steps}) "
        f"<int64[1] one = {{1}}> {{ {parts} = Split<axis=1, num_outputs={steps}>(x) {' '.join(lines)} }}"
    )
    shapes: dict[str, tuple[int, ...]] = {}
    for g in "ifgo":
        shapes |= {f"w{g}": (3, 4), f"r{g}": (4, 4), f"b{g}": (4,)}
    return model(text, **_weights(**shapes))


@pytest.mark.parametrize("gates", ["ifgo", "iofg", "gofi"])
def test_gates_of_their_own_in_any_order(gates: str) -> None:
    graph = applies(FuseUnrolledLSTM(), _lstm(gates))
    (lstm,) = [n for n in graph.nodes() if n.op == "LSTM"]
    assert lstm.attrs["hidden_size"] == 4


def test_peepholes_are_no_lstm() -> None:
    text = "agraph (float[2,3] x0, float[2,3] x1, float[2,4] h0, float[2,4] c0) => (float[2,4] h2) { "
    for t in range(2):
        text += (
            f"a{t} = MatMul(x{t}, w) b{t} = MatMul(h{t}, r) z{t} = Add(a{t}, b{t}) "
            f"zi{t}, zf{t}, zg{t}, zo{t} = Split<axis=1, num_outputs=4>(z{t}) q{t} = Mul(c{t}, p) "
            f"y{t} = Add(zi{t}, q{t}) i{t} = Sigmoid(y{t}) f{t} = Sigmoid(zf{t}) g{t} = Tanh(zg{t}) "
            f"o{t} = Sigmoid(zo{t}) "
            f"k{t} = Mul(f{t}, c{t}) n{t} = Mul(i{t}, g{t}) c{t + 1} = Add(k{t}, n{t}) u{t} = Tanh(c{t + 1}) "
            f"h{t + 1} = Mul(o{t}, u{t}) "
        )
    proto = model(text + "}", **_weights(w=(3, 16), r=(4, 16), p=(4,)))
    refuses(FuseUnrolledLSTM(), proto)


def test_what_feeds_itself_is_not_fused() -> None:
    """A decoder whose next input is what it said last."""
    text = "agraph (float[2,3] x0, float[2,4] h0) => (float[2,3] x2) { "
    for t in range(2):
        text += f"a{t} = MatMul(x{t}, w) b{t} = MatMul(h{t}, r) z{t} = Add(a{t}, b{t}) h{t + 1} = Tanh(z{t}) "
        text += f"x{t + 1} = MatMul(h{t + 1}, v) "
    refuses(
        FuseUnrolledRNN(),
        model(text + "}", **_weights(w=(3, 4), r=(4, 4), v=(4, 3))),
        "an input may depend on a state",
    )


def test_steps_with_other_weights_are_other_layers() -> None:
    text = "agraph (float[2,3] x0, float[2,3] x1, float[2,4] h0) => (float[2,4] h2) { "
    for t in range(2):
        text += (
            f"a{t} = MatMul(x{t}, w) b{t} = MatMul(h{t}, r{t}) z{t} = Add(a{t}, b{t}) h{t + 1} = Tanh(z{t}) "
        )
    refuses(
        FuseUnrolledRNN(),
        model(text + "}", **_weights(w=(3, 4), r0=(4, 4), r1=(4, 4))),
        "it is a single step",
    )


def test_reset_before_the_product() -> None:
    """As Keras and the papers have it: n = W x + R (r * h)."""
    text = "agraph (float[2,3,3] x, float[2,4] h0) => (float[2,4] h3) { x0, x1, x2 = Split<axis=1, num_outputs=3>(x) "
    for t in range(3):
        text += (
            f"y{t} = Squeeze(x{t}, one) j{t} = Concat<axis=1>(h{t}, y{t}) m{t} = MatMul(j{t}, u) v{t} = Add(m{t}, b) "
            f"zr{t}, zz{t} = Split<axis=1, num_outputs=2>(v{t}) r{t} = Sigmoid(zr{t}) z{t} = Sigmoid(zz{t}) "
            f"q{t} = Mul(r{t}, h{t}) k{t} = Concat<axis=1>(q{t}, y{t}) l{t} = MatMul(k{t}, w) n{t} = Add(l{t}, c) "
            f"g{t} = Tanh(n{t}) e{t} = Sub(unit, z{t}) s{t} = Mul(e{t}, g{t}) d{t} = Mul(z{t}, h{t}) "
            f"h{t + 1} = Add(d{t}, s{t}) "
        )
    extra = {"one": np.array([1]), "unit": np.float32(1)}
    proto = model(text + "}", **_weights(u=(7, 8), b=(8,), w=(7, 4), c=(4,)), **extra)
    graph = applies(FuseUnrolledGRU(), proto)
    (gru,) = [n for n in graph.nodes() if n.op == "GRU"]
    assert "linear_before_reset" not in gru.attrs


@pytest.mark.parametrize("given", ["rz", "n", "r", ""])
def test_biases_of_some_gates(given: str) -> None:
    """A gate without a bias has zeros."""
    text = "agraph (float[2,3] x0, float[2,3] x1, float[2,4] h0) => (float[2,4] h2) { "
    for t in range(2):
        for g, state, function in (
            ("r", f"h{t}", "Sigmoid"),
            ("z", f"h{t}", "Sigmoid"),
            ("n", f"q{t}", "Tanh"),
        ):
            text += f"q{t} = Mul(r{t}, h{t}) " if g == "n" else ""
            text += f"a{g}{t} = MatMul(x{t}, w{g}) b{g}{t} = MatMul({state}, u{g}) s{g}{t} = Add(a{g}{t}, b{g}{t}) "
            text += f"d{g}{t} = Add(s{g}{t}, b{g}) " if g in given else ""
            text += f"{g}{t} = {function}({'d' if g in given else 's'}{g}{t}) "
        text += f"e{t} = Sub(unit, z{t}) m{t} = Mul(e{t}, n{t}) k{t} = Mul(z{t}, h{t}) h{t + 1} = Add(k{t}, m{t}) "
    shapes = (
        {f"w{g}": (3, 4) for g in "rzn"} | {f"u{g}": (4, 4) for g in "rzn"} | {f"b{g}": (4,) for g in given}
    )
    graph = applies(FuseUnrolledGRU(), model(text + "}", **_weights(**shapes), unit=np.float32(1)))
    assert "GRU" in {n.op for n in graph.nodes()}


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 4), (1,)])
def test_a_bias_is_one_row(shape: tuple[int, ...]) -> None:
    text = "agraph (float[2,3] x0, float[2,3] x1, float[2,4] h0) => (float[2,4] h2) { "
    for t in range(2):
        text += f"a{t} = MatMul(x{t}, w) b{t} = MatMul(h{t}, r) z{t} = Add(a{t}, b{t}) y{t} = Add(z{t}, c) "
        text += f"h{t + 1} = Tanh(y{t}) "
    proto = model(text + "}", **_weights(w=(3, 4), r=(4, 4), c=shape))
    if shape in ((4,), (1, 4)):
        applies(FuseUnrolledRNN(), proto)
    else:
        refuses(FuseUnrolledRNN(), proto)
