"""Inverted residuals, and depthwise convolutions with one neighbour, become one kernel each."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.backends.tvm.kernels.test_kernels import network
from tests.backends.tvm.kernels.test_winograd import assert_close, kernels, results
from tests.levels import crossed, whole
from xrlflow.backends.tvm import Machine, detect
from xrlflow.backends.tvm.fusion import bands as bands_fusion
from xrlflow.backends.tvm.kernels.bands import BandBlocking, ConvBlock
from xrlflow.backends.tvm.kernels.bands_plan import best_blocking, blockings, cost
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm

pytestmark = pytest.mark.measures


def block_graph(
    image: str = "1,24,14,14",
    wide: int = 144,
    out: str = "1,24,14,14",
    depthwise: str = "pads=[1,1,1,1]",
    window: str = "3,3",
    end: str = "y = Identity(p)",
) -> str:
    """A graph that expands x to `wide` channels, convolves and projects it to p, followed by the given nodes."""
    channels, results = int(image.split(",")[1]), int(out.split(",")[1])
    return (
        f"(float[{image}] x, float[{wide},{channels},1,1] w, float[{wide}] b, float[{wide},1,{window}] w1,"
        f" float[{wide}] b1, float[{results},{wide},1,1] w2, float[{results}] b2) => (float[{out}] y)"
        " <float l = {-0.5}, float h = {1.5}> {"
        f" e = Conv(x, w, b) f = Clip(e, l, h) d = Conv<group={wide}, {depthwise}>(f, w1, b1) a = Clip(d, l, h)"
        f" p = Conv(a, w2, b2) {end} }}"
    )


GRAPHS = {
    "a residual": block_graph(end="y = Add(x, p)"),
    "strides": block_graph(out="1,40,7,7", depthwise="pads=[1,1,1,1], strides=[2,2]"),
    "strides of which one is more": block_graph(out="1,24,14,5", depthwise="pads=[1,1,1,1], strides=[1,3]"),
    "a window of 5, and a batch": block_graph(
        "3,8,9,11",
        40,
        "3,8,9,11",
        depthwise="pads=[2,2,2,2]",
        window="5,5",
        end="s = Sigmoid(p) y = Mul(p, s)",
    ),
    "a flat window": block_graph("1,8,9,11", 40, "1,8,9,9", depthwise="pads=[0,0,0,0]", window="1,3"),
    "no padding": block_graph(out="1,24,12,12", depthwise="pads=[0,0,0,0]"),
    "padded more than the window": block_graph("1,8,5,6", 16, "1,8,12,9", depthwise="pads=[4,1,5,4]"),
    "no column of the image is read": block_graph("1,8,5,5", 16, "1,8,5,1", "pads=[1,9,1,0], strides=[1,12]"),
    "the last columns of the image are not read": block_graph(
        "1,8,9,9", 16, "1,8,2,2", "pads=[0,0,0,0], strides=[4,4]"
    ),
    "channels that no vector divides": block_graph("1,23,13,10", 37, "1,11,13,10"),
    "an output of one channel": block_graph("1,5,9,9", 24, "1,1,9,9"),
    "one row": block_graph("1,16,1,30", 48, "1,16,1,30"),
    "one pixel": block_graph("1,16,3,3", 48, "1,16,1,1", depthwise="pads=[0,0,0,0]"),
    "read between": block_graph(
        "1,16,9,9", 48, "1,16,9,9", end="m = GlobalAveragePool(a) q = ReduceMean<keepdims=1>(m) y = Add(p, q)"
    ),
    "expansion alone": (
        "(float[1,16,20,20] x, float[72,16,1,1] w, float[72,1,3,3] w1) => (float[1,72,20,20] y) {"
        " e = Conv(x, w) f = Relu(e) d = Conv<group=72, pads=[1,1,1,1]>(f, w1) y = Relu(d) }"
    ),
    "projection alone": (
        "(float[1,72,9,9] x, float[72,1,3,3] w, float[24,72,1,1] w1) => (float[1,24,9,9] y) {"
        " e = Conv<group=72, pads=[1,1,1,1]>(x, w) f = Relu(e) d = Conv(f, w1) y = Relu(d) }"
    ),
    "projection alone, odd channels": (
        "(float[1,37,9,9] x, float[37,1,3,3] w, float[24,37,1,1] w1) => (float[1,24,5,5] y) {"
        " e = Conv<group=37, pads=[1,1,1,1], strides=[2,2]>(x, w) f = Relu(e) d = Conv(f, w1) y = Relu(d) }"
    ),
    "two that share a 1x1 convolution": (
        "(float[1,32,9,9] x, float[32,1,3,3] w, float[64,32,1,1] w1, float[64,1,3,3] w2, float[32,64,1,1] w3)"
        " => (float[1,32,9,9] y) { a = Conv<group=32, pads=[1,1,1,1]>(x, w) b = Relu(a) c = Conv(b, w1) d = Relu(c)"
        " e = Conv<group=64, pads=[1,1,1,1]>(d, w2) f = Relu(e) y = Conv(f, w3) }"
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_results(name: str) -> None:
    assert any("bands" in kernel for kernel in kernels(GRAPHS[name]))
    assert_close(*results(network(GRAPHS[name]), Algorithm.F23, detect()))


MACHINES = {
    "16 registers of 8 floats, 5 cores": detect(cpu="haswell", cores=5),
    "32 registers of 16 floats": replace(detect(), lanes=16, registers=32),
    "32 registers of 4 floats, 3 cores": replace(detect(cores=3), lanes=4, registers=32),
}
ELSEWHERE = [
    "a residual",
    "strides",
    "channels that no vector divides",
    "expansion alone",
    "projection alone",
]


# `make test` runs a graph on all machines, and each other graph on none or one.
QUICK = [
    *(("a residual", machine) for machine in MACHINES),
    ("expansion alone", "16 registers of 8 floats, 5 cores"),
    ("projection alone", "32 registers of 4 floats, 3 cores"),
]


@pytest.mark.parametrize(("name", "machine"), crossed(ELSEWHERE, MACHINES, QUICK))
def test_other_machines(name: str, machine: str) -> None:
    assert_close(*results(network(GRAPHS[name]), Algorithm.F23, MACHINES[machine]))


@pytest.mark.parametrize("seed", whole(range(6), (0,)))
@pytest.mark.parametrize(
    "name", ["a residual", "strides", "expansion alone", "channels that no vector divides"]
)
def test_every_blocking_computes_the_same(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[BandBlocking] = []

    def drawn(workload: ConvBlock, machine: Machine) -> BandBlocking:
        options = sorted(blockings(workload, machine), key=repr)
        chosen.append(random.Random(f"{name}{seed}").choice(options))
        return chosen[-1]

    monkeypatch.setattr(bands_fusion, "untuned_blocking", drawn)
    assert_close(*results(network(GRAPHS[name]), Algorithm.F23, detect(cores=3)))
    assert chosen


@pytest.mark.parametrize("size", [3e38, np.inf])
def test_infinities_stay_in_their_channel(size: float) -> None:
    """Activations turn infinities into finite numbers. The channels that only fill up vectors have weights of 0, and 0
    times infinity would be NaN."""
    model = network(GRAPHS["channels that no vector divides"])
    x = np.random.default_rng(0).standard_normal((1, 23, 13, 10)).astype(np.float32)
    x[0, 3, 4, 5] = size
    expected, result = results(model, Algorithm.F23, detect(), {"x": x})
    assert np.isfinite(expected).all()
    assert_close(expected, result)


def test_one_kernel_for_a_block() -> None:
    (only,) = (k for k in kernels(GRAPHS["a residual"]) if "transpose" not in k)
    assert "bands" in only


LEFT = {
    "dilation": block_graph(out="1,24,12,12", depthwise="pads=[1,1,1,1], dilations=[2,2]"),
    "few channels": block_graph("1,2,14,14", 3, "1,2,14,14"),
    "a projection alone, of many pixels": (
        "(float[1,32,56,56] x, float[32,1,3,3] w, float[24,32,1,1] w1) => (float[1,24,56,56] y) {"
        " e = Conv<group=32, pads=[1,1,1,1]>(x, w) f = Relu(e) y = Conv(f, w1) }"
    ),
    "doubles": block_graph().replace("float", "double"),
    "long sums": block_graph("1,264,20,20", 32, "1,8,20,20"),
    "a large window": block_graph("1,8,31,31", 24, "1,8,31,31", depthwise="pads=[4,4,4,4]", window="9,9"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    assert not any("bands" in kernel for kernel in kernels(LEFT[name]))


def test_what_is_read_elsewhere_is_not_swallowed() -> None:
    text = block_graph(end="y = Identity(p)").replace(
        "=> (float[1,24,14,14] y)", "=> (float[1,24,14,14] y, float[1,144,14,14] f)"
    )
    assert "fused_conv2d" in " ".join(kernels(text))


def test_the_plan_costs_least() -> None:
    workload = ConvBlock((1, 28, 28, 32), (1, 28, 28, 192), (1, 28, 28, 32), (3, 3), (1, 1), 1, 1, (), (), ())
    machine = replace(detect(cores=2), second_level=512 << 10)
    best = best_blocking(workload, machine)
    assert cost(workload, best, machine) == min(
        cost(workload, blocking, machine) for blocking in blockings(workload, machine)
    )
    assert 4 * best.rows(workload) * workload.width * best.block <= machine.second_level
    assert np.isfinite(cost(workload, best, machine))
