"""Quantised models are judged layer by layer: a tie that falls the other way is no difference, a wrong scale is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from tests.verify.models import changed, model, normal
from xrlflow.backends.protocol import OutOfTime
from xrlflow.ir import DType
from xrlflow.onnxio import load, to_proto
from xrlflow.verify import Verification, cuts, quantised, verify
from xrlflow.verify.cuts import Uncut, as_proto, perturbed_constants, showing, twins
from xrlflow.verify.layers import Layer, Layers, is_quantised
from xrlflow.verify.meaning import Difference, Sample
from xrlflow.verify.quantised import Counts, Exactness, Judged, Quantised, judge_whole, variation
from xrlflow.verify.runner import Runner, opened

NET = """
net (float[1, 4, 8, 8] x) => (float[1, 6, 1, 1] y) {
  q = QuantizeLinear(x, s, z)
  d = DequantizeLinear(q, s, z)
  wd = DequantizeLinear<axis = 0>(w, ws, wz)
  bd = DequantizeLinear<axis = 0>(b, bs)
  c = Conv<pads = [1, 1, 1, 1]>(d, wd, bd)
  r = Relu(c)
  q2 = QuantizeLinear(r, s2, z2)
  d2 = DequantizeLinear(q2, s2, z2)
  g = GlobalAveragePool(d2)
  q3 = QuantizeLinear(g, s2, z2)
  y = DequantizeLinear(q3, s2, z2)
}"""


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    """Weights whose products no processor saturates."""
    return np.random.default_rng([seed, *shape]).integers(-60, 60, shape).astype(np.int8)


def constants() -> dict[str, np.ndarray]:
    scales = np.linspace(0.01, 0.02, 6, dtype=np.float32)
    return {
        "s": np.float32(0.02),
        "z": np.uint8(128),
        "w": drawn(6, 4, 3, 3),
        "ws": scales,
        "wz": np.zeros(6, np.int8),
        "b": np.arange(-300, 300, 100, dtype=np.int32),
        "bs": scales * np.float32(0.02),
        "s2": np.float32(0.05),
        "z2": np.uint8(0),
    }


def net(text: str = NET, **replaced: np.ndarray) -> onnx.ModelProto:
    return model(text, **{n: np.asarray(a) for n, a in (constants() | replaced).items() if a is not None})


def judge(a: onnx.ModelProto, b: onnx.ModelProto, feeds: list[dict[str, np.ndarray]] | None = None) -> Judged:
    return original(a, feeds).judge(b.SerializeToString())


def original(a: onnx.ModelProto, feeds: list[dict[str, np.ndarray]] | None = None) -> Quantised:
    raw = a.SerializeToString()
    shape = [d.dim_value for d in a.graph.input[0].type.tensor_type.shape.dim]
    with opened(raw) as runner:
        given = feeds or [{"x": normal(*shape, seed=i)} for i in (1, 2)]
        samples = [Sample(f, runner.run(f)) for f in given]
    reference = Quantised.of(raw, load(raw), samples, 1e9)
    assert reference is not None
    return reference


def renamed(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Other names for everything but inputs and outputs."""
    out = onnx.ModelProto()
    out.CopyFrom(proto)
    kept = {v.name for v in (*out.graph.input, *out.graph.output)}
    for tensor in out.graph.initializer:
        tensor.name += ".other"
    for node in out.graph.node:
        node.input[:] = [n if n in kept else f"{n}.other" for n in node.input]
        node.output[:] = [n if n in kept else f"{n}.other" for n in node.output]
    return out


def as_it_is(proto: onnx.ModelProto) -> onnx.ModelProto:
    return proto


def swapped() -> np.ndarray:
    return drawn(6, 4, 3, 3)[[1, 0, 2, 3, 4, 5]]


def scaled(channel: int) -> np.ndarray:
    out = constants()["ws"].copy()
    out[channel] *= np.float32(1.5)
    return out


FAULTS = {
    "the scale of a channel": {"ws": scaled(5)},
    "a weight, by one": {
        "w": drawn(6, 4, 3, 3) + (np.arange(216).reshape(6, 4, 3, 3) == 100).astype(np.int8)
    },
    "two channels": {"w": swapped()},
    "a zero point of weights": {"wz": np.int8([0, 0, 1, 0, 0, 0])},
    "a bias": {"b": changed(constants()["b"], (3,), 40)},
    "the scale of the input": {"s": np.float32(0.0201)},
    "the zero point of the input": {"z": np.uint8(127)},
    "the scale of the output": {"s2": np.float32(0.0501)},
}


@pytest.mark.parametrize("name", [as_it_is, renamed])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_layer_is_found(
    fault: str, name: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> None:
    judged = judge(net(), name(net(**FAULTS[fault])))
    assert judged.evaluated
    assert not judged.passed
    assert judged.wrong[0].maximum > 0


def test_verification_finds_a_scale_that_is_half_as_large_again() -> None:
    """Once 5 steps of 255 were within the tolerance, since ONNX Runtime itself was far off at another level."""
    verification = verify(net(), net(ws=scaled(5)))
    assert not verification.verified
    assert "tensor 'q2'" in verification.failures[0]
    assert verification.outputs[0].row[-1] == "DIFFERENT"


def test_the_same_model_is_equal() -> None:
    verification = verify(net(), net())
    assert verification.verified
    assert "3 quantised tensors" in verification.notes[-1]
    assert verification.outputs[0].judgement.criterion.value == "layers"


@pytest.mark.parametrize(
    "change",
    [as_it_is, renamed, lambda proto: to_proto(load(proto), load(proto).graph)],
    ids=["same", "renamed", "written anew"],
)
def test_a_model_that_is_only_written_anew_is_equal(
    change: Callable[[onnx.ModelProto], onnx.ModelProto],
) -> None:
    judged = judge(net(), change(net()))
    assert judged.passed
    assert (judged.counts.tensors, judged.counts.runtime) == (3, 0)


# --- ties ---

TIES = """
ties (float[64] x) => (float[64] y) {
  m = Mul(x, tenth)
  q = QuantizeLinear(m, one, z)
  d = DequantizeLinear(q, one, z)
  k = Mul(d, big)
  y = Sub(k, big)
}"""


def ties(text: str = TIES) -> onnx.ModelProto:
    return model(
        text, tenth=np.float32(0.1), ten=np.float32(10), one=np.float32(1), z=np.uint8(3), big=np.float32(50),
        small=np.float32(1e-3),
    )  # fmt: skip


def test_a_tie_that_falls_the_other_way_is_no_difference() -> None:
    """5 * 0.1 is above 0.5, and 0.5 in float32, as 5 / 10 is: whole outputs differ by 50."""
    x = {"x": np.arange(64, dtype=np.float32) * 5}
    by_ten = TIES.replace("Mul(x, tenth)", "Div(x, ten)")
    for other in (by_ten, TIES):
        judged = judge(ties(), ties(other), [x])
        assert judged.passed, judged.failures
        assert judged.counts.ties > 0
        assert "within one step at rounding ties" in str(judged.counts)
        assert str(judged.counts.exactness) == "as the runtime"
    above = by_ten.replace("m = Div(x, ten)", "n = Add(x, small) m = Div(n, ten)")
    judged = judge(ties(by_ten), ties(above), [x])
    assert judged.passed, judged.failures
    assert str(judged.counts.exactness) == "within 1 step"


def test_the_least_exact_tensor_counts() -> None:
    kinds = [Exactness(2), Exactness(1, 9), Exactness(0, 9), Exactness()]
    assert sorted(kinds, reverse=True) == kinds
    assert [str(kind) for kind in kinds] == ["within 2 steps", "within 1 step", "as the runtime", "exact"]
    assert (Counts(exactness=kinds[1]) + Counts(exactness=kinds[2])).exactness == Exactness(1, 18)


def test_one_step_away_from_a_tie_is_a_difference() -> None:
    x = {"x": np.arange(64, dtype=np.float32) * 5 + 2}
    wrong = TIES.replace("m = Mul(x, tenth)", "n = Mul(x, tenth) m = Add(n, one)")
    assert judge(ties(), ties(wrong), [x]).wrong == (Difference("q", 1.0, 64, 64),)


def test_long_sums_in_float32_widen_the_window() -> None:
    """Steps of 1/65536 of the range: float32 moves the numbers by more than a thousandth of a step."""
    text = """
    g (float[8, 512] x) => (float[8, 16] y) {
      q = QuantizeLinear(x, s, z)
      d = DequantizeLinear(q, s, z)
      m = MatMul(d, w)
      q2 = QuantizeLinear(m, t, z)
      y = DequantizeLinear(q2, t, z)
    }"""
    weights = {"s": np.float32(1e-4), "t": np.float32(2e-3), "z": np.uint16(32768), "w": normal(512, 16)}
    a = model(text, **weights)
    assert judge(a, a).passed
    other = weights | {"w": changed(weights["w"], (3, 3), 2e-3)}
    assert not judge(a, model(text, **other)).passed


@pytest.mark.parametrize(
    ("strange", "c", "s", "k"),
    [("t = Add(d, c) e = Sub(t, c)", 1e6, 0.03, 1), ("a = Abs(d) t = Mul(a, c) e = Floor(t)", -10, 0.1, 0.1)],
    ids=["digits", "jumps"],
)
def test_noise_in_one_channel_hides_no_fault_in_another(strange: str, c: float, s: float, k: float) -> None:
    """Digits that cancel and jumps of Floor, which float32 and float64 see differently, in channel 0."""
    text = f"""
    g (float[2, 8, 32] x) => (float[2, 8, 32] y) {{
      q = QuantizeLinear(x, s, z)
      d = DequantizeLinear(q, s, z)
      {strange}
      f = Where(first, e, d)
      m = Mul(f, k)
      q2 = QuantizeLinear(m, s, z)
      y = DequantizeLinear(q2, s, z)
    }}"""

    def net_of(factor: float) -> onnx.ModelProto:
        first = np.arange(8).reshape(8, 1) == 0
        return model(
            text,
            s=np.float32(s),
            z=np.uint8(128),
            c=np.float32(c),
            first=first,
            k=np.where(first, np.float32(k), np.float32(factor)),
        )

    assert verify(net_of(1), net_of(1)).verified
    assert not verify(net_of(1), net_of(1.007)).verified


@pytest.mark.parametrize(
    "end", ["y = Identity(e)", "q2 = QuantizeLinear(e, t, z) y = DequantizeLinear(q2, t, z)"]
)
def test_what_a_new_model_rounds_worse_is_no_tolerance(end: str) -> None:
    def net_of(middle: str) -> onnx.ModelProto:
        text = f"""
        g (float[n, 16] x) => (float[n, 16] y) {{
          q = QuantizeLinear(x, s, z)
          d = DequantizeLinear(q, s, z)
          m = Mul(d, k)
          {middle}
          {end}
        }}"""
        scales = {"s": np.float32(0.0513), "t": np.float32(0.1), "k": np.float32(1.37)}
        return model(text, **scales, z=np.uint8(128), c=np.float32(1e6))

    assert verify(net_of("e = Identity(m)"), net_of("e = Identity(m)")).verified
    assert not verify(net_of("e = Identity(m)"), net_of("a = Add(m, c) e = Sub(a, c)")).verified
    rounding = net_of("a = Add(m, c) e = Sub(a, c)")
    assert verify(rounding, net_of("e = Identity(m)")).verified
    if "q2" in end:
        assert "as near as the types of their floats allow" in verify(rounding, rounding).notes[-1]


def test_the_default_of_an_input_counts() -> None:
    def with_default(k: float) -> onnx.ModelProto:
        return model(
            """g (float[n, 16] x, float k) => (float[n, 16] y) {
              q = QuantizeLinear(x, s, z)
              d = DequantizeLinear(q, s, z)
              y = Mul(d, k)
            }""",
            s=np.float32(0.05),
            z=np.uint8(128),
            k=np.float32(k),
        )

    assert verify(with_default(1.37), with_default(1.37)).verified
    assert not verify(with_default(1.37), with_default(1.4)).verified


def test_a_guard_against_nan_is_looked_at() -> None:
    def guarded(guard: str, value: float = 0) -> onnx.ModelProto:
        text = f"""
        g (float[n, 16] x) => (float[n, 16] y) {{
          {guard}
          q = QuantizeLinear(f, s, z)
          y = DequantizeLinear(q, s, z)
        }}"""
        return model(text, s=np.float32(0.05), z=np.uint8(128), v=np.float32(value))

    where = "n = IsNaN(x) f = Where(n, v, x)"
    assert verify(guarded(where), guarded(where)).verified
    assert not verify(guarded(where), guarded(where, 1)).verified
    lost = verify(guarded(where), guarded("f = Identity(x)"))
    assert not lost.verified
    assert "in what is NaN or infinite" in lost.failures[0]
    unguarded = guarded("f = Identity(x)")
    assert verify(unguarded, unguarded).verified, "what NaN is rounded to is up to the runtime"


# --- pairs whose quantised tensors are not the same ---

POOL = """
pool (float[1, 4, 8, 8] x) => (float[1, 6, 2, 2] y) {
  q = QuantizeLinear(x, s, z)
  d = DequantizeLinear(q, s, z)
  p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(d)
  MIDDLE
  wd = DequantizeLinear<axis = 0>(w, ws, wz)
  c = Conv(e, wd)
  q2 = QuantizeLinear(c, s2, z3)
  y = DequantizeLinear(q2, s2, z3)
}"""
AGAIN = "p2 = QuantizeLinear(p, s, z) e = DequantizeLinear(p2, s, z)"


def pool(middle: str, **replaced: np.ndarray) -> onnx.ModelProto:
    return net(POOL.replace("MIDDLE", middle), **{"z3": np.uint8(128)} | replaced)


def test_a_quantised_tensor_may_be_missing() -> None:
    """The pool of quantised numbers needs no rounding."""
    assert judge(pool(AGAIN), pool("e = Identity(p)")).passed
    assert judge(pool("e = Identity(p)"), pool(AGAIN)).passed
    assert not judge(pool(AGAIN), pool("e = Identity(p)", ws=scaled(2))).passed
    assert not judge(pool("e = Identity(p)"), pool("e = Neg(p)")).passed


def signed(**replaced: np.ndarray) -> onnx.ModelProto:
    return pool(AGAIN, z=np.int8(0), z3=np.int8(0), **replaced)


def test_bytes_may_have_another_zero_point() -> None:
    """With the names of the original, and with others: the numbers are 128 larger, and stand for the same."""
    assert judge(signed(), pool(AGAIN)).passed
    assert judge(signed(), renamed(pool(AGAIN))).passed
    assert not judge(signed(), pool(AGAIN, ws=scaled(2))).passed


def test_the_first_of_two_equal_quantisations_may_be_missing() -> None:
    """The numbers that are rounded differ by up to half a step, the rounded ones do not."""
    once = pool("e = Identity(p)")
    text = POOL.replace("MIDDLE", "e = Identity(p)")
    twice = text.replace("  q = Q", "  q0 = Q").replace("  d = D", "  d0 = D").replace("r(q, s", "r(q0, s")
    twice = twice.replace("p = Max", "q = QuantizeLinear(d0, s, z) d = DequantizeLinear(q, s, z) p = Max")
    again = net(twice, z3=np.uint8(128))
    assert judge(again, once).passed
    assert judge(once, again).passed
    assert not judge(net(twice.replace("(d0, s, z)", "(d0, s2, z)"), z3=np.uint8(128)), once).passed


LATER = """
later (float[1, 4, 8, 8] x) => (float[1, 6, 1, 1] y) {
  q = QuantizeLinear(x, s, z)
  d = DequantizeLinear(q, s, z)
  wd = DequantizeLinear<axis = 0>(w, ws, wz)
  bd = DequantizeLinear<axis = 0>(b, bs)
  c = Conv<pads = [1, 1, 1, 1]>(d, wd, bd)
  MIDDLE
  g = GlobalAveragePool(e)
  q3 = QuantizeLinear(g, s2, z3)
  y = DequantizeLinear(q3, s2, z3)
}"""


def test_a_relu_may_come_after_the_quantisation() -> None:
    before = "r = Relu(c) q2 = QuantizeLinear(r, s2, z3) e = DequantizeLinear(q2, s2, z3)"
    after = "p2 = QuantizeLinear(c, s2, z3) r = DequantizeLinear(p2, s2, z3) e = Relu(r)"
    a = net(LATER.replace("MIDDLE", before), z3=np.uint8(100))
    b = net(LATER.replace("MIDDLE", after), z3=np.uint8(100))
    assert judge(a, b).passed
    assert judge(b, a).passed
    assert not judge(a, net(LATER.replace("MIDDLE", after), z3=np.uint8(100), ws=scaled(3))).passed


def test_names_say_nothing_if_values_are_others() -> None:
    """The same tensors under each other's names."""
    text = """
    g (float[8, 8] x) => (float[8, 8] y) {
      A = QuantizeLinear(x, s, z)
      d = DequantizeLinear(A, s, z)
      n = Neg(d)
      B = QuantizeLinear(n, s, z)
      e = DequantizeLinear(B, s, z)
      y = Sub(e, d)
    }"""
    weights = {"s": np.float32(0.03), "z": np.uint8(128), "one": np.float32(1)}
    a = model(text, **weights)
    other = text.replace("A", "C").replace("B", "A").replace("C", "B")
    other = other.replace("x, s", "u, s").replace("{", "{ u = Mul(x, one)")
    assert judge(a, model(other, **weights)).passed
    wrong = other.replace("Sub(e, d)", "Sub(d, e)")
    assert not judge(a, model(wrong, **weights)).passed


def test_large_weights_are_compared_as_a_whole() -> None:
    """Their names come from samples of their bytes."""
    text = """
    g (float[4, 200] x) => (float[4, 200] y) {
      q = QuantizeLinear(x, s, z)
      d = DequantizeLinear(q, s, z)
      wd = DequantizeLinear(w, t, u)
      m = MatMul(d, wd)
      q2 = QuantizeLinear(m, r, z)
      y = DequantizeLinear(q2, r, z)
    }"""
    weights = {
        "s": np.float32(0.03),
        "z": np.uint8(128),
        "t": np.float32(0.02),
        "u": np.int8(0),
        "r": np.float32(0.5),
    }
    w = drawn(200, 200)
    a, b = model(text, **weights, w=w), model(text, **weights, w=changed(w, (60, 60), 9))
    first, second = load(a).graph, load(b).graph
    assert set(first.producers) == set(second.producers)
    assert judge(a, a).passed
    assert not judge(a, b).passed


# --- operators ---

DYNAMIC = """
dynamic (float[6, 16] x) => (float[6, 8] y) {
  q, s, z = DynamicQuantizeLinear(x)
  p = MatMulInteger(q, w, z, u)
  f = Cast<to = 1>(p)
  t = Mul(s, ws)
  m = Mul(f, t)
  h = Erf(m)
  q2, s2, z2 = DynamicQuantizeLinear(h)
  p2 = MatMulInteger(q2, v, z2, u)
  f2 = Cast<to = 1>(p2)
  t2 = Mul(s2, ws)
  y = Mul(f2, t2)
}"""
FUSED = """
dynamic (float[6, 16] x) => (float[6, 8] y) {
  m = com.microsoft.DynamicQuantizeMatMul(x, w, ws, u)
  h = Erf(m)
  y = com.microsoft.DynamicQuantizeMatMul(h, v, ws, u)
}"""


def dynamic(text: str = DYNAMIC, **replaced: np.ndarray) -> onnx.ModelProto:
    weights = {"w": drawn(16, 8), "v": drawn(8, 8), "ws": np.float32(0.01), "u": np.int8(0)} | replaced
    out = model(text, **{n: np.asarray(a) for n, a in weights.items()})
    out.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return out


def test_dynamic_quantisation() -> None:
    judged = judge(dynamic(), dynamic())
    assert judged.passed
    assert judged.counts.tensors == 6
    for fault in ({"v": -drawn(8, 8)}, {"u": np.int8(1)}, {"ws": np.float32(0.011)}):
        assert not judge(dynamic(), dynamic(**fault)).passed


def test_a_fused_dynamic_product_shows_its_quantised_numbers() -> None:
    assert judge(dynamic(), dynamic(FUSED)).passed
    assert judge(dynamic(FUSED), dynamic()).passed
    assert not judge(dynamic(), dynamic(FUSED, v=-drawn(8, 8))).passed


def test_a_fused_dynamic_product_may_differ_as_much_as_the_original_from_itself() -> None:
    """As a whole, ONNX Runtime fuses products that a copy with shown tensors keeps apart, and a tie falls otherwise."""
    result = original(dynamic())
    (sample, *_), y = [m.sample for m in result._meanings], Difference("y", 0.0, 1, 48, True)
    moved = perturbed_constants(dynamic(), 0)
    with opened(moved) as runner:
        least = float(np.abs(runner.run(sample.feeds)[0] - sample.outputs[0]).max())
    assert 0 < least < 1e-2
    assert result._varies_as_much(sample, [replace(y, maximum=least)])
    assert not result._varies_as_much(sample, [replace(y, maximum=1.0)])
    assert not result._varies_as_much(sample, [replace(y, maximum=least, floats=False)])
    fixed = original(net())
    assert not fixed._varies_as_much(fixed._meanings[0].sample, [replace(y, maximum=0.0)])


class Shifted:
    """A runner whose first output is larger by a part of itself."""

    def __init__(self, inner: Runner, by: float) -> None:
        self.inner, self.by = inner, by

    def run(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        first, *others = self.inner.run(feeds)
        return [(first * np.float32(1 + self.by)).astype(np.float32), *others]


def test_a_copy_that_shows_tensors_may_round_its_floats_otherwise() -> None:
    result = original(dynamic())
    meaning = result._meanings[0]
    with opened(meaning.showing(cut=False)) as shown, opened(meaning.showing(cut=True)) as cut:
        for by, explained in ((0.0, True), (2.0**-22, True), (0.01, False)):
            whole = [meaning.sample.outputs[0] * np.float32(1 + by)]
            assert quantised._is_explained(meaning, whole, shown, cut) is explained


@pytest.mark.parametrize("varies", [True, False])
def test_a_whole_may_differ_where_the_original_varies_as_much(
    monkeypatch: pytest.MonkeyPatch, varies: bool
) -> None:
    raw = dynamic().SerializeToString()
    result, real = original(dynamic()), Quantised._opened

    def shifting(self: Quantised, model: object, optimized: bool = True) -> object:
        inner = real(self, model, optimized)
        return shifted(inner, 0.01) if model == raw else inner

    monkeypatch.setattr(Quantised, "_opened", shifting)
    monkeypatch.setattr(Quantised, "_varies_as_much", lambda self, sample, apart: varies)
    assert result.judge(raw).passed is varies


@contextmanager
def shifted(inner: AbstractContextManager[Runner], by: float) -> Iterator[Shifted]:
    with inner as runner:
        yield Shifted(runner, by)


def test_constants_move_to_their_neighbours() -> None:
    weights = {"a": np.float32([1, -np.inf, 3]), "i": np.int8([1, 2])}
    proto = model("m (float[3] x) => (float[3] y) { y = Add(x, a) }", **weights)
    after = {
        t.name: onnx.numpy_helper.to_array(t)
        for t in onnx.load_from_string(perturbed_constants(proto, 0)).graph.initializer
    }
    assert after["i"].tolist() == [1, 2]
    assert after["a"][1] == -np.inf
    assert np.abs(after["a"][[0, 2]] - [1, 3]).max() < 1e-6
    assert (after["a"][[0, 2]] != [1, 3]).all()


def test_a_zero_point_that_falls_the_other_way_moves_all_numbers() -> None:
    exact = Layer(np.uint8([0, 7, 255]), np.float32([0, 0.2, 0]))
    assert exact.misses(np.uint8([0, 8, 255]), 1e-3).tolist() == [False, True, False]
    assert not exact.misses(np.uint8([0, 8, 255]), 1e-3, shift=1).any()
    assert exact.misses(np.uint8([0, 9, 255]), 1e-3, shift=1).tolist() == [False, True, False]


def test_operators_that_compute_with_quantised_numbers() -> None:
    text = """
    g (float[1, 4, 8, 8] x) => (float[1, 6, 8, 8] y) {
      q = QuantizeLinear(x, s, z)
      c = QLinearConv<pads = [1, 1, 1, 1]>(q, s, z, w, ws, wz, s2, z2, b)
      a = com.microsoft.QLinearAdd(c, s2, z2, c, s2, z2, s2, z2)
      y = DequantizeLinear(a, s2, z2)
    }"""
    proto = net(text)
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    wrong = net(text, b=changed(constants()["b"], (1,), 50))
    wrong.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    assert judge(proto, proto).counts.tensors == 3
    assert judge(proto, proto).passed
    assert not judge(proto, wrong).passed


@pytest.mark.parametrize(
    ("inputs", "rounds"),
    [
        ("a, s, z, b, s, z", False),
        ("a, s, z, b, s, z, c", False),
        ("a, s, z, b, s, z, c, s", False),
        ("a, s, z, b, s, z, c, s, z", True),
        ("a, s, z, b, s, z, , s, z", True),
        ("a, s, z, b, s, z, , s, ", False),
    ],
)
def test_a_qgemm_quantises_if_it_has_a_zero_point_for_its_output(inputs: str, rounds: bool) -> None:
    kind = "uint8" if rounds else "float"
    proto = model(
        f"""g (float[4, 8] x) => ({kind}[4, 3] y) {{
          a = QuantizeLinear(x, s, z) y = com.microsoft.QGemm({inputs})
        }}""",
        s=np.float32(0.1), z=np.uint8(3), b=np.arange(24, dtype=np.uint8).reshape(8, 3), c=np.zeros(3, np.int32),
    )  # fmt: skip
    assert len(Layers(load(proto).graph).tensors) == 1 + rounds


def test_with_quantised_weights_alone_outputs_are_compared() -> None:
    text = """
    g (float[3, 32] x) => (float[3, 8] y) {
      y = com.microsoft.MatMulNBits<K = 32, N = 8, bits = 4, block_size = 32>(x, w, s)
    }"""
    packed = np.arange(128, dtype=np.uint8).reshape(8, 1, 16)
    weights = {"w": packed, "s": np.linspace(0.1, 0.8, 8, dtype=np.float32)}
    a, b = model(text, **weights), model(text, **weights | {"s": weights["s"] * np.float32(1.01)})
    for proto in (a, b):
        proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    raw = a.SerializeToString()
    assert Quantised.of(raw, load(raw), [Sample({"x": normal(3, 32)}, [])], 1e9) is None
    assert verify(a, a).verified
    assert not verify(a, b).verified


# --- where ONNX Runtime does not compute what a model means ---

SOFTMAX = """
soft (float[16, 16] x) => (float[16, 16] y) {
  q = QuantizeLinear(x, s, z)
  d = DequantizeLinear(q, s, z)
  m = Softmax<axis = -1>(d)
  q2 = QuantizeLinear(m, t, u)
  y = DequantizeLinear(q2, t, u)
}"""
SPELT = "e = Exp(d) k = ReduceSum(e, last) m = Div(e, k)"


def soft(middle: str = "m = Softmax<axis = -1>(d)") -> onnx.ModelProto:
    weights = {"s": np.float32(0.03), "z": np.uint8(128), "t": np.float32(0.0039), "u": np.uint8(0)}
    text = SOFTMAX.replace("m = Softmax<axis = -1>(d)", middle)
    return model(text, **weights, last=np.int64([-1]))


def test_what_the_runtime_makes_of_the_original_is_right_too() -> None:
    """ONNX Runtime's kernel of a quantised Softmax is off by one step where no tie is near."""
    result = original(soft())
    varies, differs = result.notes
    assert "the original's own results vary by up to 0.0039" in varies
    assert "does not compute what the original means: it differs in 1 of 3 quantised tensors" in differs
    assert "'q2' by up to 1 step" in differs
    assert differs.endswith("with its optimisations off it computes what is meant")
    same = result.judge(soft().SerializeToString())
    assert same.passed
    assert same.counts.runtime > 0
    assert "as ONNX Runtime computes the original" in str(same.counts)
    assert str(same.counts.exactness) == "as the runtime"
    right = result.judge(soft(SPELT).SerializeToString())
    assert right.passed, right.failures
    assert right.counts.runtime == 0
    assert str(right.counts.exactness) == "exact"


def test_what_is_neither_is_wrong() -> None:
    """The new model has the meaning of the original, and runs as the runtime makes it, which the original does not."""
    judged = judge(soft(SPELT), soft())
    assert judged.evaluated
    assert "computes neither what is meant nor what it makes of the original" in judged.failures[0]


def saturated(runner: object, meaning: quantised.Meaning) -> dict[str, np.ndarray]:
    run = _RUN(runner, meaning)  # type: ignore[arg-type]
    return {name: np.minimum(a, 40) if name == "q2" else a for name, a in run.items()}


_RUN = quantised._run


def test_saturation_is_no_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that loses what is above 40: a new model may do the same, or be right, and nothing else."""
    monkeypatch.setattr(quantised, "_run", saturated)
    result = original(net())
    (note,) = result.notes
    assert "'q2' by up to" in note
    assert result.judge(net().SerializeToString()).counts.runtime > 0
    assert not result.judge(net(ws=scaled(5)).SerializeToString()).passed
    monkeypatch.setattr(quantised, "_run", _RUN)
    right = result.judge(net().SerializeToString())
    assert right.passed
    assert right.counts.runtime == 0
    monkeypatch.setattr(
        quantised, "_run", lambda r, m: {n: a // 2 if n == "q2" else a for n, a in _RUN(r, m).items()}
    )
    assert not result.judge(net().SerializeToString()).passed


def test_a_runtime_may_do_with_other_bytes_what_it_does_today(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 40
    monkeypatch.setattr(
        quantised,
        "_run",
        lambda r, m: {
            n: np.minimum(a, limit + 128 * (a.dtype == np.uint8)) if n == "q2" else a
            for n, a in _RUN(r, m).items()
        },
    )
    result = original(signed())
    assert result.judge(pool(AGAIN).SerializeToString()).counts.runtime > 0
    limit = 30
    assert not result.judge(pool(AGAIN).SerializeToString()).passed


def test_the_note_names_the_option_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = iter([saturated, saturated, saturated, saturated, _RUN, _RUN])
    monkeypatch.setattr(quantised, "_run", lambda runner, meaning: next(levels)(runner, meaning))  # type: ignore[operator]
    (note,) = original(net()).notes
    assert "session.x64quantprecision=1 makes it exact" in note


PAIRS = """
pairs (float[64] x) => (float[64] y) {
  q = QuantizeLinear(x, s, z)
  d = DequantizeLinear(q, s, z)
  MIDDLE
  q2 = QuantizeLinear(e, t, z)
  y = DequantizeLinear(q2, t, z)
}"""


def pairs(middle: str) -> onnx.ModelProto:
    weights = {"s": np.float32(0.02), "z": np.uint8(0), "t": np.float32(0.031), "none": np.float32(0)}
    return model(PAIRS.replace("MIDDLE", middle), **weights)


def test_what_the_runtime_makes_of_the_whole_model_counts() -> None:
    """It merges pairs of QuantizeLinear and DequantizeLinear, with other results. Where it does not today, it must not
    tomorrow; where it does, a model that is right may take its place."""
    merged, apart = pairs("e = Identity(d)"), pairs("f = Mul(d, d) e = Sqrt(f)")
    x = [{"x": np.linspace(0, 5, 64, dtype=np.float32)}]
    with opened(merged.SerializeToString()) as a, opened(apart.SerializeToString()) as b:
        assert (a.run(x[0])[0] != b.run(x[0])[0]).any()
    assert judge(merged, apart, x).passed
    judged = judge(apart, merged, x)
    assert judged.evaluated
    assert "makes something else of the whole model than of its parts" in judged.failures[0]


# --- what is judged, and what is not ---


def test_what_is_quantised() -> None:
    for proto in (net(), dynamic(), dynamic(FUSED), soft()):
        assert is_quantised(load(proto).graph)
    assert not is_quantised(load(model("g (float[4] x) => (float[4] y) { y = Relu(x) }")).graph)


INSIDE = """
inside (float[16] x, bool c) => (float[16] y) {
  y = If (c) <
    then_branch = a () => (float[16] t) { q = QuantizeLinear(x, s, z) t = DequantizeLinear(q, s, z) },
    else_branch = b () => (float[16] e) { e = Relu(x) }
  >
}"""


def test_bodies_are_not_cut() -> None:
    proto = model(INSIDE, s=np.float32(0.02), z=np.uint8(128))
    verification = verify(proto, proto)
    assert verification.verified
    note = "not judged layer by layer: it quantises numbers in the body of a node If"
    assert note in verification.notes


def test_a_body_reads_what_stands_for_a_quantised_tensor() -> None:
    text = """
    g (float[16] x, bool c) => (float[16] y) {
      q = QuantizeLinear(x, s, z)
      y = If (c) <
        then_branch = a () => (float[16] t) { t = DequantizeLinear(q, s, z) },
        else_branch = b () => (float[16] e) { d = DequantizeLinear(q, s, z) e = Relu(d) }
      >
    }"""
    proto = model(text, s=np.float32(0.02), z=np.uint8(128))
    feeds = [{"x": normal(16), "c": np.array(c)} for c in (True, False)]
    assert judge(proto, proto, feeds).passed
    with opened(showing(proto, {"q": DType.UINT8}, cut=True)) as runner:
        y, q = runner.run({**feeds[0], "q.given": np.full(16, 129, np.uint8)})
    assert (y == np.float32(0.02)).all()
    assert (q != 129).any()


def test_equal_tensors_are_cut_together() -> None:
    text = """
    g (float[16] x) => (float[16] y) {
      q = QuantizeLinear(x, s, z)
      r = QuantizeLinear(x, s2, z)
      d = DequantizeLinear(q, s, z)
      e = DequantizeLinear(r, s, z)
      y = Add(d, e)
    }"""
    proto = model(text, s=np.float32(0.02), s2=np.float32(0.02), z=np.uint8(128))
    assert twins(proto)["r"] == "q"
    with opened(showing(proto, {"q": DType.UINT8}, cut=True)) as runner:
        y, _ = runner.run({"x": normal(16), "q.given": np.full(16, 129, np.uint8)})
    assert (y == np.float32(0.04)).all()


def test_outputs_without_quantised_numbers_are_judged_as_before() -> None:
    text = NET.replace("(float[1, 6, 1, 1] y)", "(float[1, 6, 1, 1] y, float[1, 4, 8, 8] f)")
    text = text.replace("q = Q", "f = Relu(x) q = Q")
    assert Layers(load(net(text)).graph).touched == (True, False)
    verification = verify(net(text), net(text))
    assert {o.name: o.judgement.criterion.value for o in verification.outputs} == {
        "y": "layers",
        "f": "float64",
    }
    assert not verify(net(text), net(text.replace("Relu(x)", "Abs(x)"))).verified


def test_samples_are_chosen_by_their_cost() -> None:
    raw = net().SerializeToString()
    feeds = {"x": normal(1, 4, 8, 8)}
    with opened(raw) as runner:
        one = Sample(feeds, runner.run(feeds), 10.0)
    reference = Quantised.of(raw, load(raw), [one, one, replace(one, cost=1e9)], 20.0)
    assert reference is not None
    assert reference.judge(raw).samples == 2
    assert any("judged layer by layer on 2 of 3 sets of inputs" in note for note in reference.notes)
    none = Quantised.of(raw, load(raw), [one], 0.5)
    assert none is not None
    assert none.judge(raw).reason == "its exact evaluation takes too long"


def test_a_run_that_was_ended_is_not_said_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*given: object) -> None:
        raise OutOfTime("ONNX Runtime was ended")

    monkeypatch.setattr(quantised, "_meanings", ended)
    result = original(net(), [{"x": normal(1, 4, 8, 8)}])
    assert result.judge(net().SerializeToString()).reason == "there was no time for the exact evaluation"


def test_what_is_kept_in_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "_MOST_ELEMENTS", 700)
    result = original(net(), [{"x": normal(1, 4, 8, 8, seed=i)} for i in range(4)])
    assert result.judge(net().SerializeToString()).samples == 2
    assert any("on 2 of 4 sets of inputs" in note for note in result.notes)


def test_fewer_sets_are_judged_if_there_is_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at least, and as many as take less time than there is with all that follows."""
    seconds = iter(range(100))
    monkeypatch.setattr(quantised, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    for remaining, samples in [(0.0, 1), (12.0, 2), (math.inf, 4)]:
        monkeypatch.setattr(quantised, "deadline", SimpleNamespace(remaining=lambda left=remaining: left))
        result = original(net(), [{"x": normal(1, 4, 8, 8, seed=i)} for i in range(4)])
        assert result.judge(net().SerializeToString()).samples == samples


def test_what_cannot_be_judged_is_said() -> None:
    """The new model alone has what is not known: then it is judged by its outputs."""
    unknown = net(NET.replace("y = D", "k = D").replace("z2)\n}", "z2)\n  y = com.microsoft.Inverse(k)\n}"))
    unknown.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    result = original(net())
    reason = result.judge(unknown.SerializeToString()).reason
    assert reason == "the new model: com.microsoft::Inverse has no exact evaluation"
    missing = net(NET.replace("Relu(c)", "com.example.Odd(c)"))
    assert result.judge(missing.SerializeToString()).reason.startswith("the new model: ")
    assert not verify(net(), missing).verified


def test_files_that_are_too_large_are_not_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    path = f"{tmp_path}/net.onnx"
    onnx.save(net(), path, save_as_external_data=True, location="data", size_threshold=0)
    assert len(as_proto(path).graph.node) == len(net().graph.node)
    monkeypatch.setattr(cuts, "_MOST_BYTES", 1000)
    with pytest.raises(Uncut, match="over 2 GB"):
        as_proto(path)


# --- sentences ---


def test_the_sentence_on_what_a_model_varies_by() -> None:
    a = np.float32([[50, 20, 1], [3, 2, 1], [0, 1, 2], [5, 6, 7]])
    b = a + np.float32([[0, 0, 0], [0, 42.7, 0], [0, 0, 0], [0, 0, 0]])
    assert variation("logits", [(a, b)]) == (
        "output 'logits': the original's own results vary by up to 42.7 (values up to 50) between ONNX Runtime's "
        "optimisation levels; differences of this size change which class or token comes first in 25% of its rows"
    )
    small = a + np.float32([[0.5, 0, 0]])
    assert str(variation("logits", [(a, small)])).endswith("in each row the same class or token comes first")
    assert variation("logits", [(a, a + np.float32(1e-4))]) is None


def test_whole_outputs_are_compared_for_what_is_not_finite() -> None:
    a = np.float32([1, 2, np.nan])
    assert judge_whole(a, np.float32([1, 9, np.nan])).passed
    assert judge_whole(a, np.float32([1, 9, np.nan])).difference == 7
    assert not judge_whole(a, np.float32([1, np.nan, np.nan])).passed


def test_equal_infinities_are_no_difference_and_warn_of_nothing() -> None:
    outputs = np.float32([1, -np.inf, np.inf])
    with np.errstate(all="raise"):
        judgement = judge_whole(outputs, outputs.copy())
    assert judgement.passed
    assert judgement.difference == 0


def test_a_verification_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result: Verification = verify(net(), net())
    assert "(layers exact)" in result.message()
    assert result.to_json()["outputs"][0]["judged_by"] == "layers"
    assert result.to_json()["exactness"] == "exact"


# --- how exact ---

FIFTH = "a (float[64] x) => (uint8[64] y) { e = Mul(x, tenth) f = Mul(e, five) "
ROUNDED = "y = QuantizeLinear(f, one, none) }"
WHOLE = (
    "a (float[64] x) => (int32[64] y) { q = QuantizeLinear(x, one, none) d = DequantizeLinear(q, one, none) "
    "e = Mul(d, tenth) f = Mul(e, five) g = Round(f) y = Cast<to=6>(g) }"
)
HALVES = {
    "one": np.float32(1), "tenth": np.float32(0.1), "five": np.float32(5), "none": np.uint8(0),
    "low": np.float32(0), "high": np.float32(255),
}  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (f"{FIFTH} {ROUNDED}", f"{FIFTH} {ROUNDED}"),
        (f"{FIFTH} {ROUNDED}", f"{FIFTH} g = Round(f) h = Clip(g, low, high) y = Cast<to=2>(h) }}"),
        (WHOLE, WHOLE),
    ],
)  # fmt: skip
def test_outputs_as_the_runtime_are_not_exact(a: str, b: str) -> None:
    """Halves: float32 rounds products of a tenth to them, and exact arithmetic does not."""
    judged = judge(model(a, **HALVES), model(b, **HALVES), [{"x": np.arange(64, dtype=np.float32)}])
    assert judged.passed, judged.failures
    assert str(judged.counts.exactness) == "as the runtime"


def test_nothing_is_said_where_nothing_is_quantised_at_run_time() -> None:
    text = "a (uint8[4, 8] x) => (int32[4, 5] y) { y = MatMulInteger(x, w) }"
    proto = model(text, w=np.random.default_rng(0).integers(-128, 128, (8, 5)).astype(np.int8))
    result = verify(proto, proto)
    assert result.verified
    assert result.exactness is None
    assert not any("layer by layer" in note for note in result.notes)
