"""Pools have the results of ONNX Runtime, for all kinds of borders, strides, dilations, sizes and channels."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from tests.backends.tvm.kernels.test_kernels import network, numbers
from tests.levels import whole
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm import Machine, detect
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.lowering.compiled import compiled
from xrlflow.backends.tvm.lowering.importer import import_model

pytestmark = pytest.mark.measures

POOLS = (
    "MaxPool<kernel_shape=[3,3], strides=[2,2]>",
    "MaxPool<kernel_shape=[3,2], strides=[2,3], pads=[1,0,0,1]>",
    "MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1>",
    "MaxPool<kernel_shape=[2,2], strides=[3,3], ceil_mode=1>",
    "MaxPool<kernel_shape=[3,3], dilations=[3,3], pads=[2,2,2,2]>",
    "MaxPool<kernel_shape=[9,9], pads=[4,4,4,4]>",
    'MaxPool<kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_LOWER">',
    "AveragePool<kernel_shape=[2,3], strides=[2,1]>",
    "AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>",
    "AveragePool<kernel_shape=[3,3], pads=[1,0,1,2], count_include_pad=1>",
    "AveragePool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1>",
    "AveragePool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1>",
    "AveragePool<kernel_shape=[3,3], dilations=[3,2], pads=[2,2,2,2]>",
    "AveragePool<kernel_shape=[3,3], dilations=[3,3], pads=[2,2,2,2], count_include_pad=1>",
    'AveragePool<kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_UPPER">',
)


def pools(channels: int, pools: tuple[str, ...]) -> str:
    """A graph of pools that all read the result of one convolution, with channels last."""
    outputs = ", ".join(f"float[2,{channels},p{n},q{n}] y{n}" for n in range(len(pools)))
    nodes = "\n ".join(f"y{n} = {pool}(a)" for n, pool in enumerate(pools))
    return f"(float[2,3,15,13] x, float[{channels},3,3,3] w) => ({outputs}) {{ a = Conv(x, w)\n {nodes} }}"


def compare(text: str, machine: Machine, rtol: float = 2e-5) -> Any:
    """Compare all outputs with those of ONNX Runtime. Returns the model."""
    model = network(text)
    feeds = numbers(model)
    with open_model(model.SerializeToString(), threads=1) as runtime:
        expected = runtime.run(feeds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a kernel that is left unscheduled
        lowered = compiled(model, machine, threads=2)
    with lowered:
        result = lowered.run(feeds)
    for n, (a, b) in enumerate(zip(expected, result, strict=True)):
        assert a.shape == b.shape
        np.testing.assert_allclose(b, a, rtol=rtol, atol=2e-6, err_msg=f"output {n}")
    return model


@pytest.mark.parametrize("channels", [64, 24, 5])
def test_pools_agree_with_onnx_runtime(channels: int) -> None:
    """The number of channels is divisible by a vector, by half a vector, or by neither."""
    compare(pools(channels, POOLS), detect())


@pytest.mark.parametrize("cpu", whole(["haswell", "nehalem"], ("haswell",)))
def test_narrower_machines(cpu: str) -> None:
    compare(pools(24, POOLS[1:14:4]), detect(cpu=cpu))


def test_what_follows_a_pool_runs_on_its_registers() -> None:
    text = (
        "(float[1,8,19,19] x, float[32,8,1,1] w, float[32] b) => (float[1,32,10,10] y, float[1,32,10,10] z) {"
        " a = Conv(x, w, b)\n p = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(a)"
        " q = AveragePool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(a)\n y = Add(p, q)\n"
        " z = Sigmoid(y) }"
    )
    compare(text, detect())


def test_infinities_beyond_the_border_are_not_seen() -> None:
    """A tap outside of the image must not enter the sum, whatever is in memory there."""
    model = network(
        "(float[1,16,5,5] x, float[16,16,1,1] w) => (float[1,16,5,5] y) {"
        " a = Conv(x, w)\n y = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(a) }"
    )
    x = np.ones((1, 16, 5, 5), np.float32)
    x[0, :, 0, 0] = np.inf
    with open_model(model.SerializeToString()) as runtime, compiled(model, detect()) as ours:
        expected, result = runtime.run({"x": x})[0], ours.run({"x": x})[0]
    np.testing.assert_array_equal(np.isfinite(result), np.isfinite(expected))


@pytest.mark.parametrize("pool", POOLS[1:12:5])
def test_pools_between_convolutions_keep_channels_last(pool: str) -> None:
    text = (
        "(float[1,8,15,13] x, float[32,8,1,1] w, float[8,32,1,1] v) => (float[1,8,p,q] y) {"
        f" a = Conv(x, w)\n b = {pool}(a)\n y = Conv(b, v) }}"
    )
    kernels = [variable.name_hint for variable in fuse(import_model(network(text)), detect()).functions]
    assert sum("transpose" in name for name in kernels) == 2  # of the input and of the output


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("MaxPool<kernel_shape=[3,3]>", "larger than the image"),
        (
            "MaxPool<kernel_shape=[1,3], dilations=[1,4], pads=[0,2,0,2], ceil_mode=1>",
            "larger than the image",
        ),
        ('AveragePool<kernel_shape=[1,1,3], auto_pad="VALID">', "larger than the image"),
        ('MaxPool<kernel_shape=[2,1], dilations=[2,1], auto_pad="SAME_UPPER">', "dilations"),
        ('AveragePool<kernel_shape=[1,1], strides=[3,1], auto_pad="SAME_UPPER">', "leave pixels out"),
        ('LpPool<kernel_shape=[1,1], strides=[4,1], auto_pad="SAME_LOWER">', "leave pixels out"),
    ],
)
def test_pools_that_onnx_runtime_takes_for_other_windows(node: str, reason: str) -> None:
    """For such pools, ONNX Runtime counts the windows differently, or starts them after the first pixels."""
    rank = node.count(",", 0, node.index("]")) + 1
    size = ",".join(["1", "3", *["12"] * (rank - 1), "2"])
    model = network(f"(float[{size}] x) => (float[{','.join('abcdefg'[: rank + 2])}] y) {{ y = {node}(x) }}")
    with pytest.raises(BackendError, match=reason):
        import_model(model)


def test_windows_beside_each_other_may_leave_the_last_pixels_out() -> None:
    text = (
        "(float[1,16,12,9] x) => (float[1,16,6,3] y, float[1,16,4,9] z) {"
        ' y = MaxPool<kernel_shape=[1,3], strides=[2,3], auto_pad="SAME_UPPER">(x)\n'
        ' z = MaxPool<kernel_shape=[1,1], strides=[3,1], auto_pad="SAME_LOWER">(x) }'
    )
    compare(text, detect())
