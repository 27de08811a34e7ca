"""Pools of images with channels first have the results of ONNX Runtime, also for infinities and NaN."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.backends.tvm.kernels.test_kernels import network
from tests.backends.tvm.kernels.test_pooling import POOLS
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.tvm import Machine, detect
from xrlflow.backends.tvm.lowering.compiled import compiled

pytestmark = pytest.mark.measures

MORE = (
    "MaxPool<kernel_shape=[2,11], strides=[1,5], pads=[0,4,1,8]>",
    "MaxPool<kernel_shape=[1,2], strides=[1,4]>",
    "MaxPool<kernel_shape=[11,3], strides=[1,3], pads=[7,0,7,2]>",
    "MaxPool<kernel_shape=[5,3], dilations=[2,1], strides=[2,1], pads=[3,1,2,0], ceil_mode=1>",
    "AveragePool<kernel_shape=[11,11], pads=[9,9,8,8]>",
    "AveragePool<kernel_shape=[12,12]>",
    "AveragePool<kernel_shape=[3,1], strides=[4,5], pads=[1,0,0,0], ceil_mode=1, count_include_pad=1>",
    "AveragePool<kernel_shape=[5,11], strides=[4,5], pads=[1,4,2,8], ceil_mode=1, count_include_pad=1>",
)


def compare(pools: tuple[str, ...], machine: Machine, *images: npt.NDArray[np.float32]) -> None:
    """Compare pools that all read the same image with those of ONNX Runtime."""
    count, channels, height, width = images[0].shape
    outputs = ", ".join(f"float[{count},{channels},p{n},q{n}] y{n}" for n in range(len(pools)))
    nodes = "\n ".join(f"y{n} = {pool}(x)" for n, pool in enumerate(pools))
    model = network(f"(float[{count},{channels},{height},{width}] x) => ({outputs}) {{ {nodes} }}")
    with (
        open_model(model.SerializeToString(), threads=1) as runtime,
        compiled(model, machine, threads=2) as ours,
    ):
        for image in images:
            for pool, a, b in zip(pools, runtime.run({"x": image}), ours.run({"x": image}), strict=True):
                np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6, err_msg=pool)


def image(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("size", "first"), [((12, 16), 0), ((33, 35), 1)])
def test_agrees_with_onnx_runtime(size: tuple[int, int], first: int) -> None:
    """Some widths are divisible by vectors, and there may be several images. Each of the two cases tests half of the
    pools."""
    compare((*POOLS[first::2], *MORE[first::2]), detect(), image(2, 3, *size))


def test_one_pixel_wide() -> None:
    compare(("MaxPool<kernel_shape=[3,1], strides=[2,1]>", POOLS[8]), detect(), image(1, 5, 20, 1))


@pytest.mark.parametrize("cpu", ["haswell", "nehalem"])
def test_narrower_machines(cpu: str) -> None:
    compare(POOLS[::4], detect(cpu=cpu), image(1, 3, 15, 13))


def test_many_rows_in_parallel() -> None:
    """Cores share rows whose number is not divisible by a block of rows."""
    compare((POOLS[2], POOLS[8]), detect(cores=2), image(1, 1, 147, 200))


def test_infinities_and_nan() -> None:
    """Some windows contain only -inf. ONNX Runtime computes this width in vectors."""
    result, rng = image(2, 3, 20, 64), np.random.default_rng(1)
    result[rng.random(result.shape) < 0.02] = np.inf
    result[rng.random(result.shape) < 0.05] = -np.inf
    result[0, 0, :8, :8] = -np.inf
    spoiled = result.copy()
    spoiled[rng.random(result.shape) < 0.05] = np.nan
    gaps = tuple(pool for pool in (*POOLS, *MORE) if "dilations" in pool)
    others = tuple(pool for pool in (*POOLS[:8:2], *MORE[::3]) if pool not in gaps)
    compare(others, detect(), result, spoiled)
    compare(gaps[::2], detect(), result)
