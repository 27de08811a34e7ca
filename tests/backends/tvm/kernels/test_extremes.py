"""The least and the greatest number of a tensor, in one kernel."""

from __future__ import annotations

import math

import numpy as np
import pytest

from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.kernels.extremes import WIDTH, extremes
from xrlflow.backends.tvm.toolchain.import_tvm import tvm


@pytest.mark.parametrize("shape", [(WIDTH,), (WIDTH + 1,), (3, 5, 7), (40, 40, 40), (1, 30_001), (1 << 20,)])
def test_the_extremes_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    package = tvm()
    function = extremes(shape).with_attr("global_symbol", "main")
    run = package.tirx.build(package.IRModule({"main": function}), detect().target())
    rng = np.random.default_rng(0)
    size = math.prod(shape)
    for at in (0, size - 1, size // 2, *rng.integers(0, size, 8).tolist()):
        x = rng.standard_normal(shape).astype(np.float32)
        x.flat[at], x.flat[(at + size // 3 + 1) % size] = -99, np.inf
        least, greatest = (package.runtime.tensor(np.zeros((), np.float32)) for _ in range(2))
        run["main"](package.runtime.tensor(x), least, greatest)
        assert (float(least.numpy()), float(greatest.numpy())) == (x.min(), x.max())
