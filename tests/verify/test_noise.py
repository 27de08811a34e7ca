"""Tolerances come from rounding: it is measured, and nothing else widens them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

from tests.verify.models import model, normal
from xrlflow.onnxio import load
from xrlflow.verify import Reference, Status, verify
from xrlflow.verify.compare import by_deviation, judge_floats
from xrlflow.verify.inputs import Case
from xrlflow.verify.noise import jumps, rounding_noise


def noise_of(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    imported = load(proto)
    return rounding_noise(imported, Case({}, 0, {"x": x}), imported.graph.outputs)[0]


def elementwise(text: str, kind: str = "float", **constants: np.ndarray) -> onnx.ModelProto:
    return model(f"g ({kind}[4, 16] x) => ({kind}[4, 16] y) {{ {text} }}", **constants)


X = normal(4, 16, seed=3)
BIG = "a = Add(x, c)\n y = Sub(a, c)"


# --- what noise is ---


def test_digits_that_a_large_number_takes_are_noise() -> None:
    noise = noise_of(elementwise(BIG, c=np.float32(1e8)), X)
    assert 2 < noise.max() < 16
    noise = noise_of(elementwise(BIG, "double", c=np.float64(1e8)), X.astype(np.float64))
    assert 1e-9 < noise.max() < 1e-7


def test_each_element_has_its_own_noise() -> None:
    scale = np.where(np.arange(16) == 3, 1e8, 1).astype(np.float32)
    noise = noise_of(elementwise("y = Mul(x, m)", m=scale), X)
    assert noise[:, 3].max() > 1
    assert np.delete(noise, 3, axis=1).max() < 1e-6


def test_what_is_added_up_is_moved_before() -> None:
    """A sum of large numbers that cancel has their noise, not its own."""
    proto = model(
        "g (float[4, 16] x) => (float[4, 1] y) { y = MatMul(x, w) }", w=np.float32([[1e6], [-1e6]] * 8)
    )
    noise = noise_of(proto, np.ones((4, 16), np.float32) * np.float32(1.1))
    assert noise.max() > 1e-2


@pytest.mark.parametrize(
    "text",
    [
        "y = Transpose<perm=[0, 1]>(x)",
        "a = Relu(x)\n y = Neg(a)",
        "y = Mul(x, two)",  # exact
        "a = Mul(x, k)\n y = Floor(a)",  # a moved number never becomes another one
        "a = Mul(x, k)\n b = Greater(a, two)\n y = Where(b, x, two)",
        "a = Mul(x, k)\n b = Cast<to=7>(a)\n y = Cast<to=1>(b)",
    ],
)
def test_what_has_no_noise(text: str) -> None:
    assert not noise_of(elementwise(text, two=np.float32(2), k=np.float32(1.1)), X).any()


def test_sums_of_masks_have_no_noise() -> None:
    proto = model("g (float[4, 16] x) => (float[4, 16] y) { y = CumSum(x, axis) }", axis=np.int64(1))
    assert not noise_of(proto, (X > 0).astype(np.float32)).any()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("y = Tanh(x)", False),
        ("a = Shape(x)\n b = Cast<to=1>(a)\n c = ReduceSum<keepdims=0>(b)\n y = Mul(x, c)", False),
        ("a = Round(x)\n y = Add(a, x)", True),
        ("a = ArgMax<axis=1>(x)\n b = Cast<to=1>(a)\n y = Add(x, b)", True),
        ("a = Greater(x, k)\n y = Where(a, x, k)", True),
    ],
)
def test_jumps(text: str, found: bool) -> None:
    graph = load(elementwise(text, k=np.float32(1))).graph
    assert jumps(graph, graph.outputs[0]) is found


# --- what is judged by it ---


def test_a_more_accurate_rewrite_of_a_double_model_is_equal() -> None:
    a = elementwise(BIG, "double", c=np.float64(1e8))
    assert verify(a, elementwise("y = Identity(x)", "double")).verified
    off = elementwise("y = Mul(x, k)", "double", k=np.float64(1 + 1e-5))
    assert verify(a, off).status is Status.FAILED


@pytest.mark.parametrize(
    "scale",
    [
        np.where(np.arange(16) == 3, 1e8, 1) * np.ones((4, 1)),
        np.where(np.indices((4, 16)).sum(0) % 2, 1e8, 1),
    ],
    ids=["a column", "a checkerboard"],
)
def test_large_elements_do_not_hide_small_ones(scale: np.ndarray) -> None:
    right = scale.astype(np.float32)
    wrong = np.where(right == 1, 3, right).astype(np.float32)
    one = wrong.copy()
    one[wrong != right] = 1
    one.reshape(-1)[int(np.argmax(wrong != right))] = 1.01
    a = elementwise("y = Mul(x, m)", m=right)
    for other in (wrong, one):
        for budget in (3e10, 0.0):
            assert (
                verify(a, elementwise("y = Mul(x, m)", m=other), float64_flops=budget).status is Status.FAILED
            )


def test_in_narrow_floats_large_elements_hide_no_small_ones_either() -> None:
    """The third of 16 channels is off by a tenth, beside one that is 300 times as large."""

    def scaled(third: float) -> onnx.ModelProto:
        scales = np.where(np.arange(16) == 0, 300, 1) * np.where(np.arange(16) == 3, third, 1)
        return elementwise(
            "a = Mul(x, m)\n y = Mul(a, k)", "float16", m=np.float16(scales), k=np.float16(0.7)
        )

    assert verify(scaled(1), scaled(1)).verified
    assert not verify(scaled(1), scaled(1.1)).verified


POOLED = "g (float[2, 3, 16, 16] x) => (float[2, 3, 9, 9] y) {{ p = Pad(x, pads, v)\n {}\n y = Neg(n) }}"
PADS = np.int64([0, 0, 1, 1, 0, 0, 1, 1])


def pooled(
    value: float, text: str = "q = MaxPool<kernel_shape=[2,2], strides=[2,2]>(p)\n n = Neg(q)"
) -> onnx.ModelProto:
    return model(POOLED.format(text), pads=PADS, v=np.float32(value))


@pytest.mark.parametrize("budget", [3e10, 0.0])
def test_a_runtime_that_is_off_is_no_licence(budget: float) -> None:
    """ONNX Runtime's optimiser makes a padding of 0 the pool's own, which is minus infinity."""
    verification = verify(pooled(0.0), pooled(-0.7), float64_flops=budget)
    assert verification.status is Status.FAILED
    assert any("optimiser changes output 'y'" in note for note in verification.notes)
    same = verify(pooled(0.0), pooled(0.0), float64_flops=budget)
    assert same.verified
    assert any("the new model computes what ONNX Runtime makes of it today" in note for note in same.notes)


@pytest.mark.parametrize("budget", [3e10, 0.0])
def test_what_the_operators_define_is_right_where_the_runtime_is_off(budget: float) -> None:
    same = "r = Relu(p)\n m = Neg(p)\n s = Relu(m)\n d = Sub(r, s)"
    plain = f"{same}\n q = MaxPool<kernel_shape=[2,2], strides=[2,2]>(d)\n n = Neg(q)"
    verification = verify(pooled(0.0), pooled(0.0, plain), float64_flops=budget)
    assert verification.verified, verification.message()
    assert any("the new model computes what its operators define" in note for note in verification.notes)


def test_one_difference_is_noise_only_within_a_limit() -> None:
    y = normal(8, 8)
    far = y.copy()
    far[2] += np.float32(0.5)
    assert not judge_floats(by_deviation(y, far), far).passed
    assert judge_floats(by_deviation(y, y + np.float32(2e-6)), y - np.float32(4e-6)).passed
    assert judge_floats(replace(by_deviation(y, far), noise=np.abs(far - y)), far).passed, (
        "if it was measured"
    )


# --- values at which functions jump ---


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("y = Round(x)", "h = Add(x, half)\n y = Floor(h)"),
        ("s = Add(x, zero)\n y = Reciprocal(s)", "y = Reciprocal(x)"),
        ("y = Mod<fmod=1>(x, one)", "i = Floor(x)\n y = Sub(x, i)"),
        ("y = Ceil(x)", "i = Floor(x)\n y = Add(i, one)"),
    ],
)
def test_halves_and_signed_zeros_are_drawn(a: str, b: str) -> None:
    numbers = {"half": np.float32(0.5), "zero": np.float32(0), "one": np.float32(1)}
    assert verify(elementwise(a, **numbers), elementwise(b, **numbers)).status is Status.FAILED
    assert verify(elementwise(a, **numbers), elementwise(a, **numbers)).verified


def test_halves_are_drawn_only_where_they_decide() -> None:
    names = [
        {k.case.values.name for k in Reference.of(elementwise(t)).cases}
        for t in ("y = Tanh(x)", "y = Sign(x)")
    ]
    assert ["halves and zeros of both signs" in item for item in names] == [False, True]


def test_sizes_are_not_moved() -> None:
    """The scales of a Resize decide its shape."""
    proto = model(
        "g (float[1, 1, 4, 4] x) => (float[1, 1, 8, 8] y) { a = Add(x, c)\n d = Sub(a, c)\n "
        "y = Resize<mode=\"linear\">(d, , scales) }",
        c=np.float32(1e8), scales=np.float32([1, 1, 2, 2]),
    )  # fmt: skip
    assert noise_of(proto, normal(1, 1, 4, 4)).max() > 1


@pytest.mark.parametrize("text", ["y = Mod<fmod=1>(d, k)", "y = Shrink<lambd=0.5>(d)"])
def test_noise_passes_between_jumps(text: str) -> None:
    result = noise_of(
        elementwise(f"a = Add(x, c)\n d = Sub(a, c)\n {text}", c=np.float32(1e5), k=np.float32(9)), X
    )
    assert 1e-3 < result.max() < 0.1


def test_defaults_that_are_not_given_are_known() -> None:
    a = model("g (float[4, 16] x, float[1] c = {1e8}) => (float[4, 16] y) { a = Add(x, c)\n y = Sub(a, c) }")
    assert verify(a, elementwise("y = Identity(x)")).status is Status.FAILED  # another signature
    verification = verify(a, a)
    assert verification.verified
    assert not any("not fed" in note for note in verification.notes)


def test_small_numbers_of_a_half_are_compared() -> None:
    """float16 keeps numbers below 6e-5, since it is computed in float32."""
    a = elementwise("s = Sigmoid(x)\n y = Mul(s, k)", "float16", k=np.float16(5e-5))
    assert not verify(a, elementwise("y = Mul(x, k)", "float16", k=np.float16(0))).verified


def test_a_double_has_digits_of_its_own() -> None:
    a = elementwise("y = Add(x, c)", "double", c=np.float64(1.7e9))
    assert not verify(
        a, elementwise("m = Mul(x, z)\n y = Add(m, c)", "double", c=np.float64(1.7e9), z=np.float64(0))
    ).verified


@pytest.mark.parametrize(("level", "wrong"), [(4, 1.2), (0, 1.01)])
def test_quantised_activations_are_noise_where_a_kernel_quantises_them(level: int, wrong: float) -> None:
    """A model that rounds otherwise in front of a product at level 4 is the same; one with other scales is not."""
    k = 256
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (k, k // 32, 16)).astype(np.uint8)
    scales = (rng.random((k, k // 32)) * 0.01).astype(np.float32)
    numbers = {"c": np.float32(1000), "d": np.float32(500)}

    def chain(between: str, factor: float = 1.0, level: int = level) -> onnx.ModelProto:
        product = f"com.microsoft.MatMulNBits<K={k}, N={k}, bits=4, block_size=32, accuracy_level={level}>"
        text = f"""g (float[64, {k}] x) => (float[64, {k}] y) {{
          h = {product}(x, w, s) {between} y = {product}(r, w, t) }}"""
        proto = model(text, w=packed, s=scales, t=scales * np.float32(factor), **numbers)
        proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
        return proto

    plain = "a = Add(h, c) b = Sub(a, c) r = Relu(b)"
    other = "o = Add(h, d) a = Add(o, d) b = Sub(a, c) r = Relu(b)"
    assert verify(chain(plain), chain(other)).verified
    assert not verify(chain(plain), chain(other, wrong)).verified
    assert level == 4 or not verify(chain(plain), chain(plain, level=4)).verified


def test_few_rows_times_many_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terms of a product get their errors from the left operand alone, which are as large."""
    proto = model("g (float[1, 64] x) => (float[1, 512] y) { y = MatMul(x, w) }", w=normal(64, 512))
    x = normal(1, 64, seed=5)
    few = noise_of(proto, x)
    monkeypatch.setattr("xrlflow.verify.noise._LARGER", 1 << 30)
    both = noise_of(proto, x)
    assert 0.7 < np.median(few) / np.median(both) < 1.4
    assert few.min() > 0


def test_results_at_a_size_of_zero_are_judged_by_rounding_too() -> None:
    """Beside an empty cache, a step computes sums whose small elements differ by rounding. A mistake is still found."""
    weights, order = normal(64, 65536), np.random.default_rng(0).permutation(64)
    text = "g (float[P, 64] past, float[1, 64] x) => (float[Q, 65536] y) { a = Concat<axis=0>(past, x) "
    plain = model(f"{text} y = MatMul(a, w) }}", w=weights)
    turned = f"{text} b = Gather<axis=1>(a, i) y = MatMul(b, w) }}"
    late = 1e8  # the budget of float64 evaluations: enough for those on demand
    assert verify(plain, model(turned, w=weights[order], i=order), float64_flops=late).verified
    wrong = weights[order]
    wrong[:, 7] *= 1.001
    assert verify(plain, model(turned, w=wrong, i=order), float64_flops=late).status is Status.FAILED
    only_empty = model(
        "g (float[P, 64] past, float[1, 64] x) => (float[Q, 65536] y) { a = Concat<axis=0>(past, x) s = Shape(a) "
        "n = Cast<to=1>(s) m = Gather(n, zero) k = Equal(m, one) f = Cast<to=1>(k) d = Mul(f, tiny) "
        "z = MatMul(a, w) y = Add(z, d) }",
        w=weights, zero=np.int64(0), one=np.float32(1), tiny=np.float32(1e-3),
    )  # fmt: skip
    assert verify(plain, only_empty, float64_flops=late).status is Status.FAILED


STORED = (1e6 + np.random.default_rng(0).integers(-32, 32, (64, 64)) * 0.0625).astype(np.float32)
NEAR = (1 - np.random.default_rng(1).integers(1, 64, (64, 64)) * 2.0**-16).astype(np.float32)


@pytest.mark.parametrize(
    ("original", "wrong", "weights", "off"),
    [
        ("e = Gather(w, i)\n d = Sub(e, c)\n y = Add(x, d)", "e = Gather(w, i)\n d = Sub(e, c)\n "
         "f = Mul(d, o)\n y = Add(x, f)", {"w": STORED, "c": np.float32(1e6)}, 1.001),
        ("e = Gather(w, i)\n d = Sub(c, e)\n r = Reciprocal(d)\n y = Add(x, r)", "e = Gather(w, i)\n d = Sub(c, e)\n "
         "r = Reciprocal(d)\n s = Mul(r, o)\n y = Add(x, s)", {"w": NEAR, "c": np.float32(1)}, 1.001),
        ("e = Gather(w, i)\n d = Sub(e, c)\n m = Mul(d, k)\n r = Sigmoid(m)\n y = Add(x, r)", "e = Gather(w, i)\n "
         "d = Sub(e, c)\n m = Mul(d, k)\n r = Sigmoid(m)\n s = Mul(r, o)\n y = Add(x, s)",
         {"w": NEAR, "c": np.float32(1), "k": np.float32(2**17)}, 1.01),
    ],
    ids=["an exact difference", "a steep function", "a threshold"],
)  # fmt: skip
def test_stored_weights_are_exact(
    original: str, wrong: str, weights: dict[str, np.ndarray], off: float
) -> None:
    """What a neighbouring weight would change is not rounding."""
    header = "g (int64[n] i, float[n, 64] x) => (float[n, 64] y)"
    a = model(f"{header} {{ {original} }}", **weights)
    b = model(f"{header} {{ {wrong} }}", **weights, o=np.float32(off))
    assert verify(a, a).verified
    assert verify(a, b).status is Status.FAILED
    assert verify(a, b, float64_flops=1).status is Status.FAILED


@pytest.mark.parametrize(("length", "more"), [(400, True), (512, False), (257, False), (384, True)])
def test_a_transform_is_as_exact_as_onnx_runtimes(length: int, more: bool) -> None:
    """Its algorithm for lengths that are no powers of two loses digits; 257 numbers of half a spectrum make 512."""
    half = length == 257
    body = "y = DFT<inverse=1, onesided=1>(x)" if half else "y = DFT(x)"
    proto = model(
        f"g (float[1,{length},2] x) => (float[1,{512 if half else length},{1 if half else 2}] y) {{ {body} }}"
    )
    data = np.random.default_rng(0).standard_normal((1, length, 2)).astype(np.float32)
    noise = noise_of(proto, data)
    exact = (
        np.fft.irfft(data[..., 0] + 1j * data[..., 1])
        if half
        else np.fft.fft(data[..., 0] + 1j * data[..., 1])
    )
    ratio = noise.max() / np.abs(exact).max()
    assert (1e-5 < ratio < 2e-4) if more else ratio < 1e-6
