"""3x3 convolutions with fewer multiplications: their results, their rounding errors, and when they are used."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.tvm.kernels.test_kernels import network, numbers
from tests.levels import crossed, whole
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.tvm import Machine, detect
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.fusion.layers import chosen_in
from xrlflow.backends.tvm.kernels.algorithms import WORST_CHANNEL, AlgorithmOption, Algorithms, shared_out
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm
from xrlflow.backends.tvm.kernels.winograd import (
    WinogradConvolution,
    best_blocking,
    blockings,
    cost,
    transforms,
)
from xrlflow.backends.tvm.kernels.winograd_errors import relative_errors
from xrlflow.backends.tvm.lowering.compiled import compiled
from xrlflow.backends.tvm.lowering.importer import import_model

pytestmark = pytest.mark.measures

FAST = (Algorithm.F23, Algorithm.F43)
Array = npt.NDArray[Any]


def conv(image: str, weights: str, out: str, more: str = "", attributes: str = "pads=[1,1,1,1]") -> str:
    """A graph of a convolution of x with w with result c, followed by the given nodes."""
    return (
        f"(float[{image}] x, float[{weights}] w) => (float[{out}] y) {{ c = Conv<{attributes}>(x, w) "
        f"{more or 'y = Identity(c)'} }}"
    )


def kernels(text: str, algorithm: Algorithm = Algorithm.F23) -> list[str]:
    module = fuse(import_model(network(text)), detect(), algorithms=Algorithms(only=algorithm))
    return [v.name_hint for v in module.functions if v.name_hint != "main"]


def results(
    model: onnx.ModelProto, algorithm: Algorithm, machine: Machine, feeds: dict[str, Array] | None = None
) -> tuple[Array, Array]:
    """The outputs of ONNX Runtime, and those of our kernels."""
    given = numbers(model) if feeds is None else feeds
    with open_model(model.SerializeToString(), threads=1) as runtime:
        (expected,) = runtime.run(given)
    with compiled(model, machine, threads=2, algorithms=Algorithms(only=algorithm)) as lowered:
        (result,) = lowered.run(given)
    return np.asarray(expected), np.asarray(result)


def assert_close(expected: Array, result: Array) -> None:
    """Check that results differ only by rounding in single precision."""
    assert result.shape == expected.shape
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(result, expected, rtol=0, atol=8e-6 * scale)


@pytest.mark.parametrize("m", [2, 4])
def test_the_transforms_make_a_convolution(m: int) -> None:
    """Winograd's identity: transforming (weights x kernel) * (pixels x data) gives the correlation of pixels with the
    kernel."""
    rng = np.random.default_rng(0)
    data, kernel, t = rng.standard_normal(m + 2), rng.standard_normal(3), transforms(m)
    np.testing.assert_allclose(
        t.results @ ((t.weights @ kernel) * (t.pixels @ data)), np.correlate(data, kernel), atol=1e-13
    )


GRAPHS = {
    "plain": conv("1,32,12,12", "32,32,3,3", "1,32,12,12"),
    "odd sizes and a batch": conv("2,48,21,23", "80,48,3,3", "2,80,21,23"),
    "channels that no vector divides": conv("1,23,13,10", "37,23,3,3", "1,37,13,10"),
    "no padding": conv("1,16,9,9", "16,16,3,3", "1,16,7,7", attributes="pads=[0,0,0,0]"),
    "one side padded, and twice": conv("1,16,9,9", "16,16,3,3", "1,16,9,10", attributes="pads=[2,0,0,3]"),
    "groups": conv("1,64,10,10", "96,32,3,3", "1,96,10,10", attributes="pads=[1,1,1,1], group=2"),
    "one tile": conv("1,64,3,3", "16,64,3,3", "1,16,1,1", attributes="pads=[0,0,0,0]"),
    "bias and activation": (
        "(float[1,40,12,12] x, float[32,40,3,3] w, float[32] b) => (float[1,32,12,12] y) {"
        " c = Conv<pads=[1,1,1,1]>(x, w, b) y = Relu(c) }"
    ),
    "clipped": conv("1,32,12,12", "32,32,3,3", "1,32,12,12", "y = Clip(c, l, h)").replace(
        "{", "<float l = {-0.5}, float h = {0.75}> {", 1
    ),
    "a residual": conv("1,32,12,12", "32,32,3,3", "1,32,12,12", "d = Add(x, c) y = Relu(d)"),
    "read twice by a step": conv("1,32,12,12", "32,32,3,3", "1,32,12,12", "s = Sigmoid(c) y = Mul(c, s)"),
    "concatenated": conv(
        "1,32,12,12", "32,32,3,3", "1,64,12,12", "r = Relu(c) s = Sigmoid(c) y = Concat<axis=1>(r, s)"
    ),
    "both parts concatenated": (
        "(float[1,32,16,16] x, float[48,32,3,3] w, float[32,32,3,3] w1) => (float[1,80,16,16] y) {"
        " c = Conv<pads=[1,1,1,1]>(x, w) d = Conv<pads=[1,1,1,1]>(x, w1) r = Relu(c) s = Relu(d)"
        " y = Concat<axis=1>(r, s) }"
    ),
}


def named(parameter: object) -> str | None:
    return parameter.name if isinstance(parameter, Algorithm) else None


# `make test` runs each graph with one of two tiles: kernels of the larger one take several times as long to compile.
# The larger one in groups and before steps: `test_what_is_not_finite_spreads_as_in_plain_sums`.
LARGE = [
    "plain", "odd sizes and a batch", "no padding", "one side padded, and twice", "one tile", "bias and activation",
]  # fmt: skip
ONE_TILE = [(name, Algorithm.F43 if name in LARGE else Algorithm.F23) for name in GRAPHS]


@pytest.mark.parametrize(("name", "algorithm"), crossed(GRAPHS, FAST, ONE_TILE), ids=named)
def test_results(name: str, algorithm: Algorithm) -> None:
    model = network(GRAPHS[name])
    assert any("winograd" in kernel for kernel in kernels(GRAPHS[name], algorithm))
    assert_close(*results(model, algorithm, detect()))


STEPPED = ["bias and activation", "clipped", "a residual", "read twice by a step"]


@pytest.mark.parametrize("name", STEPPED)
def test_steps_are_part_of_the_kernel(name: str) -> None:
    assert not [k for k in kernels(GRAPHS[name]) if "winograd" not in k and "transpose" not in k]


ODD = ["odd sizes and a batch", "channels that no vector divides"]


@pytest.mark.parametrize(
    ("name", "algorithm"), crossed(ODD, FAST, [pair for pair in ONE_TILE if pair[0] in ODD]), ids=named
)
def test_other_machines(name: str, algorithm: Algorithm) -> None:
    """The target has 16 registers of 8 floats. Panels are divided among 5 threads."""
    model = network(GRAPHS[name])
    assert_close(*results(model, algorithm, detect(cpu="haswell", cores=5)))


LEFT = {
    "strides": conv("1,32,12,12", "32,32,3,3", "1,32,6,6", attributes="pads=[1,1,1,1], strides=[2,2]"),
    "dilation": conv("1,32,12,12", "32,32,3,3", "1,32,12,12", attributes="pads=[2,2,2,2], dilations=[2,2]"),
    "another kernel": conv("1,32,12,12", "32,32,5,5", "1,32,8,8", attributes="pads=[0,0,0,0]"),
    "few channels": conv("1,3,32,32", "32,3,3,3", "1,32,32,32"),
    "few channels of a group": conv(
        "1,32,12,12", "32,4,3,3", "1,32,12,12", attributes="pads=[1,1,1,1], group=8"
    ),
    "weights that are computed": conv("1,32,12,12", "32,32,3,3", "1,32,12,12")
    .replace(" w)", " k)")
    .replace("x, w)", "x, k)"),
    "doubles": conv("1,32,12,12", "32,32,3,3", "1,32,12,12").replace("float[", "double["),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    assert not any("winograd" in kernel for kernel in kernels(LEFT[name]))


def test_what_is_read_elsewhere_is_no_step() -> None:
    """The sum before the activation is an output, too, so the kernel must end there."""
    text = conv("1,32,12,12", "32,32,3,3", "1,32,12,12", "d = Add(x, c) y = Relu(d)").replace(
        "12] y)", "12] y, float[1,32,12,12] d)"
    )
    model = network(text)
    given = numbers(model)
    with open_model(model.SerializeToString(), threads=1) as runtime:
        expected = runtime.run(given)
    with compiled(model, detect(), threads=2, algorithms=Algorithms(only=Algorithm.F43)) as lowered:
        for a, b in zip(expected, lowered.run(given), strict=True):
            assert_close(np.asarray(a), np.asarray(b))


SPREAD = ["odd sizes and a batch", "groups", *STEPPED]
SPREAD_QUICK = [
    *((name, np.nan) for name in SPREAD if name != "bias and activation"),
    *((name, 1e37) for name in ("clipped", "a residual")),
]


@pytest.mark.parametrize("algorithm", whole(FAST, FAST[1:]), ids=named)
@pytest.mark.parametrize(("name", "value"), crossed(SPREAD, [np.nan, np.inf, -np.inf, 1e37], SPREAD_QUICK))
def test_what_is_not_finite_spreads_as_in_plain_sums(name: str, algorithm: Algorithm, value: float) -> None:
    """The infinities and NaN are in the corners of tiles, at the border of the image, and where transforms overflow."""
    model = network(GRAPHS[name])
    given = numbers(model)
    image = given["x"]
    places = {(0, 0), (0, 5), (7, 3), (4, 4), (image.shape[2] - 1, image.shape[3] - 1)}
    for channel, (y, x) in enumerate(places):
        image[-1, channel, y, x] = value
    expected, result = results(model, algorithm, detect(), given)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    np.testing.assert_array_equal(np.isposinf(result), np.isposinf(expected))
    np.testing.assert_array_equal(np.isneginf(result), np.isneginf(expected))
    usual = np.abs(expected) < 1e6
    assert usual.mean() > 0.3
    if value != 1e37:  # finite: its neighbours in a tile round with it
        np.testing.assert_allclose(result[usual], expected[usual], rtol=0, atol=1e-4)


def convolved(image: Array, weights: Array) -> Array:
    """A 3x3 convolution with padding 1, in double precision."""
    wide = np.pad(image, ((0, 0), (0, 0), (1, 1), (1, 1))).astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), axis=(2, 3))
    return np.asarray(np.einsum("ncyxij,kcij->nkyx", windows, weights.astype(np.float64), optimize=True))


@pytest.mark.parametrize("algorithm", FAST, ids=lambda a: a.name)
def test_errors_are_those_of_the_kernels(algorithm: Algorithm) -> None:
    """The estimate, from some tiles in NumPy, must match the ratio of the kernel's error to that of the direct
    kernel."""
    model = network(conv("1,64,40,40", "64,64,3,3", "1,64,40,40"))
    (weights,) = (onnx.numpy_helper.to_array(t) for t in model.graph.initializer)
    given = numbers(model)
    exact = convolved(given["x"], weights)
    direct, fast = (
        float(np.sqrt(np.mean((results(model, a, detect(), given)[1] - exact) ** 2)))
        for a in (Algorithm.TILES, algorithm)
    )
    assert algorithm.m is not None
    (estimated,) = relative_errors(weights.transpose(2, 3, 1, 0), algorithm.m)
    assert estimated.usual["normal"] == pytest.approx(fast / direct, rel=0.15)


SOBEL = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], np.float32)


def gradients(channels: int, columns: int) -> Array:
    """Weights that compute differences of pixels, with a factor for each channel."""
    factors = np.random.default_rng(0).standard_normal((channels, columns))
    return np.asarray(np.einsum("ij,ck->ijck", SOBEL, factors), np.float32)


def in_one_channel() -> Array:
    weights = np.random.default_rng(0).standard_normal((3, 3, 32, 64)).astype(np.float32)
    weights[..., 37] = gradients(32, 1)[..., 0]
    return weights


@pytest.mark.parametrize("weights", [gradients(32, 64), in_one_channel()], ids=["all", "one"])
def test_differences_of_pixels_stay_plain(weights: Array) -> None:
    """Sums of differences are small, so F(4,3) has 6 to 20 times the error of plain sums, in one output channel or in
    all."""
    (result,) = relative_errors(weights, 4)
    assert result.channel > WORST_CHANNEL
    model = network(conv("1,32,12,12", "64,32,3,3", "1,64,12,12"))
    (tensor,) = model.graph.initializer
    tensor.CopyFrom(onnx.numpy_helper.from_array(weights.transpose(3, 2, 0, 1).copy(), tensor.name))
    module = fuse(import_model(model), detect(), algorithms=Algorithms(only=Algorithm.F43))
    assert [c.algorithm for c in chosen_in(module)] == [Algorithm.TILES.value]


def test_errors_on_smooth_images_are_those_of_the_kernels() -> None:
    weights = gradients(32, 32)
    model = network(conv("1,32,40,40", "32,32,3,3", "1,32,40,40"))
    (tensor,) = model.graph.initializer
    tensor.CopyFrom(onnx.numpy_helper.from_array(weights.transpose(3, 2, 0, 1).copy(), tensor.name))
    rows = np.linspace(1.0, 2.0, 40)
    slopes = np.random.default_rng(1).standard_normal((32, 1, 1))
    image = {"x": (1.0 + 0.5 * slopes * rows[:, None] + 0.5 * slopes * rows)[None].astype(np.float32)}
    exact = convolved(image["x"], np.asarray(weights.transpose(3, 2, 0, 1)))
    direct, fast = (
        float(np.sqrt(np.mean((results(model, a, detect(), image)[1] - exact)[..., 4:-4, 4:-4] ** 2)))
        for a in (Algorithm.TILES, Algorithm.F23)
    )
    (estimated,) = relative_errors(weights, 2)
    assert fast / direct <= estimated.channel


@pytest.mark.parametrize("algorithm", whole(FAST, FAST[1:]), ids=lambda a: a.name)
@pytest.mark.parametrize("kind", ["one large pixel", "alternating signs", "smooth"])
def test_no_error_is_beyond_the_bound(algorithm: Algorithm, kind: str) -> None:
    """The bound is that of the direct kernel, times the growth of magnitudes in the transforms."""
    model = network(conv("1,32,24,24", "32,32,3,3", "1,32,24,24"))
    (weights,) = (onnx.numpy_helper.to_array(t) for t in model.graph.initializer)
    given = numbers(model)
    image = given["x"]
    if kind == "one large pixel":
        image[0, 3, 9, 9] = 1e6
    elif kind == "alternating signs":
        image[:] = np.sign(image)
    else:
        image[:] = 1.0 + 1e-3 * image
    result = results(model, algorithm, detect(), given)[1]
    assert algorithm.m is not None
    (errors,) = relative_errors(weights.transpose(2, 3, 1, 0), algorithm.m)
    plain = 9 * 32 * 2.0**-24 * np.abs(weights).sum(axis=(1, 2, 3)) * np.abs(image).max()
    error = np.abs(result - convolved(image, weights)).max(axis=(0, 2, 3))
    assert (error <= errors.most * plain).all()
    assert errors.most < {2: 6, 4: 50}[algorithm.m]


def test_an_outlier_channel_counts() -> None:
    """One input channel has much larger weights. The estimate must take them into account."""
    rng = np.random.default_rng(0)
    usual = rng.standard_normal((3, 3, 32, 32)).astype(np.float32)
    spiked = usual.copy()
    spiked[0, 0] *= 100.0
    (before,), (after,) = relative_errors(usual, 4), relative_errors(spiked, 4)
    assert after.error != pytest.approx(before.error, rel=0.1)


CHOICES = st.lists(
    st.tuples(st.floats(0.3, 1.2), st.floats(0.6, 1.4), st.floats(0.1, 1.2), st.floats(1.2, 9.0)), max_size=5
)


@given(layers=CHOICES, others=st.integers(0, 8), budget=st.floats(1.0, 4.0))
def test_choices_stay_within_the_budget(
    layers: list[tuple[float, float, float, float]], others: int, budget: float
) -> None:
    options = [
        [
            AlgorithmOption(Algorithm.TILES, 1.0),
            AlgorithmOption(Algorithm.F23, cheap, error),
            AlgorithmOption(Algorithm.F43, cheaper, worse),
        ]
        for cheap, error, cheaper, worse in layers
    ]
    chosen = Algorithms(budget=budget).choose(options, others)
    allowed = (len(layers) + others) * budget**2 - others
    assert sum(c.shares for c in chosen) <= allowed + 1e-9
    best = min(
        (
            sum(c.cost for c in some)
            for some in itertools.product(*options)
            if sum(c.shares for c in some) <= allowed
        ),
        default=0.0,
    )
    spent = sum(c.cost for c in chosen)
    assert best <= spent + 1e-9 <= best + max((1.2 for _ in layers), default=0.0) + 1e-9
    exact = Algorithms(exact=True, budget=budget).choose(options, others)
    assert all(c.algorithm is Algorithm.TILES for c in exact)


def test_no_estimate_holds_for_every_image() -> None:
    """F(2,3) has a smaller error than the direct kernel for usual pixels, but a larger one if most pixels are zero."""
    model = network(conv("1,16,40,40", "16,16,3,3", "1,16,40,40"))
    (weights,) = (onnx.numpy_helper.to_array(t) for t in model.graph.initializer)
    (estimated,) = relative_errors(weights.transpose(2, 3, 1, 0), 2)
    assert estimated.error < 1.0
    rng = np.random.default_rng(0)
    given = {
        "x": np.where(rng.random((1, 16, 40, 40)) < 0.01, rng.random((1, 16, 40, 40)), 0).astype(np.float32)
    }
    direct, fast = (
        np.sqrt(np.mean((results(model, a, detect(), given)[1] - convolved(given["x"], weights)) ** 2))
        for a in (Algorithm.TILES, Algorithm.F23)
    )
    assert fast > 1.2 * direct
    exact = fuse(import_model(model), detect(), algorithms=Algorithms(exact=True))
    assert [c.algorithm for c in chosen_in(exact)] == [Algorithm.TILES.value]


@pytest.mark.parametrize("weight", [np.nan, 3e38])
def test_what_cannot_be_estimated_is_no_choice(weight: float) -> None:
    """NaN as an error would satisfy every limit of a sum of errors."""
    model = network(GRAPHS["plain"])
    (tensor,) = model.graph.initializer
    weights = onnx.numpy_helper.to_array(tensor).copy()
    weights[0, :2, 0, 0] = weight, -weight
    tensor.CopyFrom(onnx.numpy_helper.from_array(weights, tensor.name))
    module = fuse(import_model(model), detect(), algorithms=Algorithms(only=Algorithm.F43))
    assert [c.stored() for c in chosen_in(module)] == [
        {
            "layer": "3x3 convolution of 32 to 32 channels at 12x12",
            "algorithm": "tiles",
            "error": 1.0,
            "share": 1.0,
            "most": 1.0,
        }
    ]


def test_every_group_is_estimated() -> None:
    """The second group has weights only in one corner, so its direct kernel adds up a ninth of the terms."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((3, 3, 32, 64)).astype(np.float32)
    (before,) = relative_errors(weights, 4)
    weights[1:, :, :, 32:] = weights[0, 1:, :, 32:] = 0.0
    weights[0, 0, :, 32:] *= 10.0
    (after,) = relative_errors(weights, 4)
    assert after.usual["normal"] > 1.5 * before.usual["normal"]


def test_shares_add_up() -> None:
    chosen = [AlgorithmOption(Algorithm.F43, 1.0, 3.0), AlgorithmOption(Algorithm.TILES, 1.0)]
    result = shared_out(["a", "b"], chosen, others=2)
    assert [c.share for c in result] == pytest.approx([9 / 12, 1 / 12])


def test_the_choice_is_noted() -> None:
    module = fuse(import_model(network(GRAPHS["odd sizes and a batch"])), detect())
    (chosen,) = chosen_in(module)
    assert chosen.layer == "3x3 convolution of 48 to 80 channels at 21x23"
    assert chosen.algorithm in {"F(2,3)", "F(4,3)"}
    assert chosen.share == 1.0
    exact = fuse(import_model(network(GRAPHS["plain"])), detect(), algorithms=Algorithms(exact=True))
    assert all(c.error <= 1.0 for c in chosen_in(exact))


@pytest.mark.parametrize("cpu", [None, "haswell"])
def test_a_plan_fits_registers(cpu: str | None) -> None:
    machine = detect(cpu=cpu, cores=2)
    workload = WinogradConvolution((1, 14, 14, 100), (1, 14, 14, 70), 1, 1, 4)
    for blocking in blockings(workload, machine):
        vectors = blocking.columns // blocking.lanes
        assert blocking.rows * vectors + vectors + 1 <= machine.registers
        assert blocking.block % blocking.rows == 0
    assert best_blocking(workload, machine).ahead
    assert cost(workload, best_blocking(workload, machine), machine) == min(
        cost(workload, blocking, machine) for blocking in blockings(workload, machine)
    )
