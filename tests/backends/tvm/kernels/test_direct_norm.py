"""A depthwise convolution and the normalisation of its channels become one kernel."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from tests.backends.tvm.kernels.test_kernels import network, numbers
from tests.backends.tvm.kernels.test_winograd import assert_close, results
from tests.levels import crossed, whole
from xrlflow.backends.tvm import Machine, detect
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.kernels import direct_norm
from xrlflow.backends.tvm.kernels.direct import Convolution, DirectBlocking, blockings
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm
from xrlflow.backends.tvm.kernels.steps import Earlier, Extra, Step
from xrlflow.backends.tvm.lowering.importer import import_model

pytestmark = pytest.mark.measures

ONE, TWO, EIGHT = detect(cores=1), detect(cores=2), detect(cores=8)


def block(
    image: str, window: str, attributes: str, end: str = "t", norm: str = "axis=-1, epsilon=0.001"
) -> str:
    """A graph that convolves x with a bias (d), moves the channels last (t), normalises them (n), and adds `end` to
    n."""
    channels = window.split(",")[0]
    return (
        f"(float[{image}] x, float[{window}] w, float[{channels}] b, float[{channels}] s, float[{channels}] z)"
        f" => (float[N,H,W,C] y) {{ d = Conv<group={channels}, {attributes}>(x, w, b)"
        f" t = Transpose<perm=[0,2,3,1]>(d) n = LayerNormalization<{norm}>(t, s, z) {end} }}"
    )


ALONE = "y = Relu(n)"
GRAPHS = {
    "7x7": block("1,96,14,14", "96,1,7,7", "pads=[3,3,3,3]", ALONE),
    "7x7, an odd number of channels, a batch": block("2,45,13,11", "45,1,7,7", "pads=[3,3,3,3]", ALONE),
    "5x5, strides": block("2,64,15,13", "64,1,5,5", "pads=[2,2,2,2], strides=[2,2]", ALONE),
    "3x3, no borders": block("1,33,9,12", "33,1,3,3", "pads=[0,0,0,0]", ALONE),
    "3x5, dilated": block("1,48,12,12", "48,1,3,5", "pads=[2,2,2,2], dilations=[2,1]", ALONE),
    "read twice": block("1,48,12,14", "48,1,7,7", "pads=[3,3,3,3]", "y = Add(n, n)"),
    "many channels": block("1,391,8,7", "391,1,7,7", "pads=[3,3,3,3]", ALONE),
}
MACHINES = {
    "16 registers of 8 floats": detect(cpu="haswell", cores=1),
    "32 registers of 16 floats": replace(detect(cores=1), lanes=16, registers=32),
    "32 registers of 4 floats": replace(detect(cores=1), lanes=4, registers=32),
}


def fused(text: str, machine: Machine) -> bool:
    module = fuse(import_model(network(text)), machine)
    return any("direct_norm" in variable.name_hint for variable in module.functions)


@pytest.mark.parametrize("name", GRAPHS)
def test_results(name: str) -> None:
    assert fused(GRAPHS[name], ONE)
    assert_close(*results(network(GRAPHS[name]), Algorithm.F23, ONE))


ELSEWHERE = ["7x7, an odd number of channels, a batch", "5x5, strides", "3x5, dilated"]
# `make test` runs each graph on one machine, and the first on all.
QUICK = [*((ELSEWHERE[0], machine) for machine in MACHINES), *zip(ELSEWHERE[1:], MACHINES)]


@pytest.mark.parametrize(("name", "machine"), crossed(ELSEWHERE, MACHINES, QUICK))
def test_other_machines(name: str, machine: str) -> None:
    assert fused(GRAPHS[name], MACHINES[machine])
    assert_close(*results(network(GRAPHS[name]), Algorithm.F23, MACHINES[machine]))


@pytest.mark.parametrize(
    "name", ["7x7, an odd number of channels, a batch", "5x5, strides", "3x3, no borders"]
)
@pytest.mark.parametrize("seed", whole(range(3), (0,)))
def test_every_blocking_computes_the_same(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[DirectBlocking] = []

    def drawn(workload: Convolution, machine: Machine) -> DirectBlocking:
        whole = [
            blocking
            for blocking in blockings(workload, machine)
            if blocking.together == blocking.lanes == machine.lanes
        ]
        chosen.append(random.Random(f"{name}{seed}").choice(sorted(whole, key=repr)))
        return chosen[-1]

    monkeypatch.setattr(direct_norm, "best_blocking", drawn)
    assert_close(*results(network(GRAPHS[name]), Algorithm.F23, detect(cores=3)))
    assert chosen


LEFT = {
    "the convolution is read elsewhere": block("1,96,14,14", "96,1,7,7", "pads=[3,3,3,3]", "y = Add(n, t)"),
    "another axis": block("1,48,14,48", "48,1,7,7", "pads=[3,3,3,3]", ALONE).replace(
        "Transpose<perm=[0,2,3,1]>", "Identity"
    ),
    "several axes": block("1,96,14,14", "96,1,7,7", "pads=[3,3,3,3]", ALONE, "axis=-2").replace(
        "float[96] s, float[96] z", "float[14,96] s, float[14,96] z"
    ),
    "not depthwise": block("1,96,14,14", "96,1,7,7", "pads=[3,3,3,3]", ALONE).replace(
        "96,1,7,7", "96,2,7,7"
    ).replace("group=96", "group=48"),
    "few channels": block("1,3,14,14", "3,1,7,7", "pads=[3,3,3,3]", ALONE),
    "large windows": block("1,96,28,28", "96,1,9,9", "pads=[4,4,4,4]", ALONE),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    assert not fused(LEFT[name], ONE)
    assert_close(*results(network(LEFT[name]), Algorithm.F23, ONE))


def workload(channels: int, size: int, window: int = 7) -> Convolution:
    image, border = (1, size, size, channels), window // 2
    steps = (Step("relax.add", (Earlier(0), Extra(True))),)
    return Convolution(
        image, image, (1, window, window), (1, 1, 1), (1, 1, 1), (0, border, border), channels, steps
    )


@pytest.mark.parametrize(("channels", "size"), [(96, 56), (192, 28), (384, 14), (768, 7)])
def test_rows_that_cores_cannot_share_stay_apart(channels: int, size: int) -> None:
    """If there are few rows, two kernels share the work better: they divide channels among cores."""
    wide = [replace(machine, lanes=16, registers=32) for machine in (ONE, TWO, EIGHT)]
    chosen = [direct_norm.best_blocking(workload(channels, size), machine) is not None for machine in wide]
    assert chosen == [True, size % 2 == 0, size == 56]


def test_the_plan_costs_least() -> None:
    machine = TWO
    best = direct_norm.best_blocking(workload(96, 28), machine)
    assert best is not None
    whole = [
        blocking
        for blocking in blockings(workload(96, 28), machine)
        if blocking.together == blocking.lanes == machine.lanes
    ]
    least = min(direct_norm.fused_cost(workload(96, 28), blocking, machine) for blocking in whole)
    assert direct_norm.fused_cost(workload(96, 28), best, machine) == least


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_sums_are_as_exact_as_those_of_two_kernels(mean: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(GRAPHS["many channels"])
    (bias,) = (tensor for tensor in model.graph.initializer if tensor.name == "b")
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + np.float32(mean), "b"))
    _, one = results(model, Algorithm.F23, ONE)
    monkeypatch.setattr("xrlflow.backends.tvm.fusion.fuse.use_direct_norm", lambda module, machine: module)
    _, two = results(model, Algorithm.F23, ONE)
    exact = _in_doubles(model)
    errors = [float(np.sqrt(np.mean((result - exact) ** 2))) for result in (one, two)]
    assert not np.array_equal(one, two)
    assert 0 < errors[0] <= 1.1 * errors[1]


def _in_doubles(model: onnx.ModelProto) -> npt.NDArray[np.float64]:
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    known = {name: array.astype(np.float64) for name, array in (weights | numbers(model)).items()}
    windows = sliding_window_view(np.pad(known["x"], ((0, 0), (0, 0), (3, 3), (3, 3))), (7, 7), (2, 3))
    filtered = np.einsum("bcyxij,cij->byxc", windows, known["w"][:, 0]) + known["b"]
    centred = filtered - filtered.mean(-1, keepdims=True)
    spread = np.sqrt(np.mean(centred**2, -1, keepdims=True) + 0.001)
    return np.asarray(np.maximum(centred / spread * known["s"] + known["z"], 0))
