"""Direct convolutions: with small groups, with few channels, dilated, and with one or three dimensions."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.backends.tvm.kernels.test_kernels import network
from tests.backends.tvm.kernels.test_winograd import assert_close, kernels, results
from tests.levels import crossed, whole
from xrlflow.backends.tvm import Machine, detect
from xrlflow.backends.tvm.kernels import direct
from xrlflow.backends.tvm.kernels.direct import Convolution, DirectBlocking, best_blocking, blockings, cost
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm

pytestmark = pytest.mark.measures


def conv(image: str, weights: str, out: str, attributes: str, end: str = "y = Identity(a)") -> str:
    """A graph that convolves x with a bias to a, followed by the given nodes."""
    return (
        f"(float[{image}] x, float[{weights}] w, float[{weights.split(',')[0]}] b) => (float[{out}] y)"
        f" {{ a = Conv<{attributes}>(x, w, b) {end} }}"
    )


GRAPHS = {
    "groups of 4, a batch": conv("2,16,9,7", "16,4,3,3", "2,16,9,7", "group=4, pads=[1,1,1,1]", "y = Relu(a)"),
    "groups of 5, a gate": conv(
        "1,120,5,9", "120,5,3,3", "1,120,5,9", "group=24, pads=[1,1,1,1]", "s = Sigmoid(a) y = Mul(s, a)"
    ),
    "groups of 3 to 5": conv("2,12,9,11", "20,3,3,3", "2,20,9,11", "group=4, pads=[1,1,1,1]"),
    "groups of 8 to 4, strides, a residual": conv(
        "1,40,9,11", "20,8,3,3", "1,20,4,5", "group=5, pads=[0,1,1,0], strides=[2,2]", "y = Add(a, a)"
    ),
    "groups of 3 to 24": conv("1,6,9,11", "48,3,3,3", "1,48,9,11", "group=2, pads=[1,1,1,1]"),
    "groups of 17": conv("1,51,6,7", "51,17,1,3", "1,51,6,5", "group=3"),
    "groups of 1 to 2, dilated": conv("1,16,19,11", "32,1,5,3", "1,32,15,7", "group=16, dilations=[1,2]"),
    "groups of 4, pointwise": conv("1,20,6,7", "20,4,1,1", "1,20,3,7", "group=5, strides=[2,1]"),
    "depthwise 7x7": conv("1,37,19,11", "37,1,7,7", "1,37,19,11", "group=37, pads=[3,3,3,3]", "y = Relu(a)"),
    "depthwise, padded more than the window": conv(
        "1,16,5,6", "16,1,7,7", "1,16,8,7", "group=16, pads=[6,1,3,6]"
    ),
    "the last pixels of the image are not read": conv(
        "1,8,9,9", "8,2,2,2", "1,8,2,2", "group=4, strides=[4,4], pads=[0,0,0,0]"
    ),
    "to 3 channels": conv("1,20,9,17", "3,20,3,3", "1,3,9,17", "pads=[1,1,1,1]"),
    "to one channel": conv("2,40,6,5", "1,40,3,3", "2,1,6,5", "pads=[1,1,1,1]"),
    "from one channel": conv("1,1,14,30", "24,1,3,3", "1,24,7,15", "pads=[1,1,1,1], strides=[2,2]"),
    "dilated": conv("1,32,11,13", "40,32,3,3", "1,40,9,9", "pads=[2,1,2,1], dilations=[3,3], strides=[1,1]"),
    "one dimension": conv("2,20,45", "33,20,3", "2,33,45", "pads=[1,1]", "y = Relu(a)"),
    "one dimension, long, strided, dilated": conv(
        "1,5,601", "24,5,4", "1,24,299", "pads=[3,1], strides=[2], dilations=[2]"
    ),
    "one dimension, many channels": conv("1,150,19", "17,150,3", "1,17,19", "pads=[1,1]"),
    "one dimension, depthwise": conv("2,18,40", "18,1,31", "2,18,40", "group=18, pads=[15,15]"),
    "one dimension, groups": conv("2,16,31", "16,4,3", "2,16,29", "group=4"),
    "three dimensions": conv(
        "2,8,4,5,7", "20,8,3,3,3", "2,20,4,5,7", "pads=[1,1,1,1,1,1]", "y = Relu(a)"
    ),
    "three dimensions, all attributes": conv(
        "1,6,7,9,11", "16,3,2,3,2", "1,16,3,10,6",
        "group=2, pads=[0,3,1,1,2,0], strides=[2,1,2], dilations=[3,2,1]",
    ),
    "three dimensions, depthwise": conv("1,17,3,5,7", "17,1,3,3,3", "1,17,3,5,7", "group=17, pads=[1,1,1,1,1,1]"),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_results(name: str) -> None:
    assert any("direct" in kernel for kernel in kernels(GRAPHS[name]))
    assert_close(*results(network(GRAPHS[name]), Algorithm.F23, detect()))


MACHINES = {
    "16 registers of 8 floats, 5 cores": detect(cpu="haswell", cores=5),
    "32 registers of 16 floats": replace(detect(), lanes=16, registers=32),
    "32 registers of 4 floats, 3 cores": replace(detect(cores=3), lanes=4, registers=32),
}
ELSEWHERE = [
    "groups of 3 to 5",
    "groups of 3 to 24",
    "depthwise 7x7",
    "to 3 channels",
    "one dimension, long, strided, dilated",
    "three dimensions, all attributes",
]


# `make test` runs each graph on one machine, and two graphs on all.
QUICK = [
    *itertools.product(["groups of 3 to 5", "three dimensions, all attributes"], MACHINES),
    *zip(ELSEWHERE[1:5], itertools.cycle(MACHINES)),
]


@pytest.mark.parametrize(("name", "machine"), crossed(ELSEWHERE, MACHINES, QUICK))
def test_other_machines(name: str, machine: str) -> None:
    assert_close(*results(network(GRAPHS[name]), Algorithm.F23, MACHINES[machine]))


@pytest.mark.parametrize("seed", whole(range(2), (0,)))
@pytest.mark.parametrize("name", [*ELSEWHERE, "one dimension, many channels"])
def test_every_blocking_computes_the_same(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[DirectBlocking] = []

    def drawn(workload: Convolution, machine: Machine) -> DirectBlocking:
        chosen.append(random.Random(f"{name}{seed}").choice(sorted(blockings(workload, machine), key=repr)))
        return chosen[-1]

    monkeypatch.setattr(direct, "best_blocking", drawn)
    assert_close(*results(network(GRAPHS[name]), Algorithm.F23, detect(cores=3)))
    assert chosen


GROUPED = ["groups of 5, a gate", "groups of 8 to 4, strides, a residual", "groups of 17"]


@pytest.mark.parametrize(
    ("name", "size"),
    crossed(GROUPED, [np.inf, np.nan], [(GROUPED[0], np.inf), *((name, np.nan) for name in GROUPED)]),
)
def test_what_is_not_finite_stays_in_its_group(name: str, size: float) -> None:
    """The unused lanes of a vector hold channels of other groups."""
    model = network(GRAPHS[name])
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[0, 17, 3, 3] = size
    expected, result = results(model, Algorithm.F23, detect(), {"x": x})
    assert 0 < np.isnan(expected).sum() < expected.size or size == np.inf
    np.testing.assert_array_equal(np.isfinite(result), np.isfinite(expected))
    finite = np.isfinite(expected)
    assert_close(expected[finite], result[finite])


NETWORKS = {
    "audio": "(float[1,8,60] x, float[16,8,5] w, float[16,8,3] v, float[16] s, float[16] z, float[6,16,4] k)"
    " => (float[1,6,15] y) <int64[1] n = {1}> { a = Conv<pads=[2,2]>(x, w) b = BatchNormalization(a, s, z, z, s)"
    " c = MaxPool<kernel_shape=[2], strides=[2]>(b) d = Conv<group=2, pads=[1,1]>(c, v) e = Relu(d)"
    " f = AveragePool<kernel_shape=[3], pads=[1,1]>(e) g = Concat<axis=1>(f, c)"
    " p = Softmax<axis=1>(g) h = ReduceMax<keepdims=0>(p, n) i = Unsqueeze(h, n) j = Mul(i, c)"
    " y = Conv<strides=[2], pads=[1,1]>(j, k) }",
    "audio, transposed": "(float[1,8,20] x, float[16,8,3] w, float[16,4,4] v, float[5,4,3] k) => (float[1,5,38] y) {"
    " a = Conv<pads=[1,1]>(x, w) b = LeakyRelu(a) c = ConvTranspose<strides=[2], pads=[1,1]>(b, v)"
    " y = Conv(c, k) }",
    "video": "(float[1,3,6,12,14] x, float[16,3,3,3,3] w, float[16] s, float[16] z, float[16,16,3,1,1] v,"
    " float[16,4,1,3,3] u, float[7,16] f) => (float[1,7] y) {"
    " a = Conv<pads=[1,1,1,1,1,1]>(x, w) b = BatchNormalization(a, s, z, z, s)"
    " c = MaxPool<kernel_shape=[2,2,2], strides=[2,2,2]>(b) d = Conv<pads=[1,0,0,1,0,0]>(c, v) e = Relu(d)"
    " g = Conv<group=4, pads=[0,1,1,0,1,1]>(e, u) h = AveragePool<kernel_shape=[1,2,2]>(g) m = Sigmoid(h) n = Mul(m, h)"
    " p = GlobalAveragePool(n) q = Flatten(p) y = Gemm<transB=1>(q, f) }",
    "video, transposed": "(float[1,4,3,5,6] x, float[8,4,3,3,3] w, float[8,4,2,2,2] v, float[5,4,1,1,1] k)"
    " => (float[1,5,6,10,12] y) { a = Conv<pads=[1,1,1,1,1,1]>(x, w) b = ConvTranspose<strides=[2,2,2]>(a, v)"
    " c = Relu(b) y = Conv(c, k) }",
    "weights given": "(float[1,6,20] x, float[8,3,3] k) => (float[1,8,18] y) { y = Conv<group=2>(x, k) }",
    "weights of three dimensions given": "(float[1,6,4,5,6] x, float[8,3,3,3,1] k) => (float[1,8,2,3,6] y) {"
    " y = Conv<group=2>(x, k) }",
}


@pytest.mark.parametrize("name", whole(NETWORKS, [*NETWORKS][::2]))
def test_networks(name: str) -> None:
    assert_close(*results(network(NETWORKS[name]), Algorithm.F23, detect()))


LEFT = {
    "depthwise 5x5": conv("1,32,7,7", "32,1,5,5", "1,32,7,7", "group=32, pads=[2,2,2,2]"),
    "depthwise 3x3": conv("1,32,9,9", "32,1,3,3", "1,32,9,9", "group=32, pads=[1,1,1,1]"),
    "many channels": conv("1,32,9,9", "32,32,5,5", "1,32,9,9", "pads=[2,2,2,2]"),
    "pointwise": conv("1,3,9,9", "2,3,1,1", "1,2,9,9", "strides=[1,1]"),
    "many taps of small groups": conv("1,8,9", "8,2,40", "1,8,9", "group=4, pads=[20,19]"),
    "weights given": "(float[1,32,9,9] x, float[32,4,3,3] k) => (float[1,32,7,7] y) { y = Conv<group=8>(x, k) }",
    "doubles": conv("1,32,9,9", "32,4,3,3", "1,32,7,7", "group=8").replace("float", "double"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    assert not any("direct" in kernel for kernel in kernels(LEFT[name]))


def test_the_plan_costs_least() -> None:
    workload = Convolution((1, 28, 28, 128), (1, 28, 28, 128), (1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1), 32)
    machine = detect(cores=2)
    best = best_blocking(workload, machine)
    assert cost(workload, best, machine) == min(
        cost(workload, blocking, machine) for blocking in blockings(workload, machine)
    )
    assert best.together == best.lanes // 4


@pytest.mark.parametrize(
    ("groups", "channels", "columns", "lanes"),
    [
        (1, 64, 64, {16}),
        (1, 64, 24, {16}),
        (1, 64, 4, {16, 8, 4}),
        (1, 3, 7, {16, 8}),
        (40, 1, 1, {16}),
        (7, 1, 1, {16, 8}),
        (2, 30, 5, {16, 8}),
    ],
)
def test_vectors_are_narrower_where_there_are_no_more_of_them(
    groups: int, channels: int, columns: int, lanes: set[int]
) -> None:
    image, out = (1, 8, 8, groups * channels), (1, 8, 8, groups * columns)
    workload = Convolution(image, out, (1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1), groups)
    machine = replace(detect(cores=1), lanes=16, registers=32, in_halves=False)
    assert {blocking.lanes for blocking in blockings(workload, machine)} == lanes
    assert {blocking.lanes for blocking in blockings(workload, replace(machine, in_halves=True))} == lanes | {
        8
    }


@pytest.mark.parametrize("groups", [1, 4])
def test_code_does_not_grow_with_channels(groups: int) -> None:
    def written(channels: int) -> int:
        image, out = (1, 8, 8, groups * channels), (1, 8, 8, groups * 64)
        workload = Convolution(image, out, (1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1), groups)
        best = best_blocking(workload, detect(cores=1))
        return len(direct.kernel(workload, replace(best, band=2)).script().splitlines())

    assert written(1024) == written(512)
