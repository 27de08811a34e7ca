"""Unrolled cells in the spellings of exporters."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import models
import xrlflow
from rewrite_rules import native_recurrent
from rewrite_rules.native_recurrent import FuseUnrolledGRU, FuseUnrolledLSTM, FuseUnrolledRNN
from tests.rules.harness import applies, model, refuses
from xrlflow.rewrite import RegionRule, declared_in

EXAMPLES = [(r, e) for r in declared_in(native_recurrent) if isinstance(r, RegionRule) for e in r.examples]


@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
def test_examples(rule: RegionRule, example: str) -> None:
    graph = applies(rule, model(example))
    assert any(n.op in ("LSTM", "GRU", "RNN") for n in graph.nodes())


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


@pytest.mark.parametrize(("name", "op"), [("lstm-unrolled", "LSTM"), ("gru-unrolled", "GRU")])
def test_zoo(name: str, op: str) -> None:
    """Nothing but the cell and what shapes its output is left."""
    proto = models.small(name)
    result = xrlflow.optimize(proto, search="greedy", cost="roofline", measure=False)
    left = [n.op for n in result.graph.nodes() if not n.const]
    assert op in left
    assert len(left) <= 6, left
