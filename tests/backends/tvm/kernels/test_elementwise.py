"""Element-wise operators that TVM's importer lacks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.backends.tvm.kernels.test_kernels import network
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.lowering.compiled import compiled

pytestmark = pytest.mark.measures

CALLS = (
    "Celu(x)",
    "Celu<alpha=0.3>(x)",
    "LpNormalization(x)",
    "LpNormalization<axis=0>(x)",
    "LpNormalization<axis=1, p=1>(x)",
    "LpNormalization<axis=-2, p=2>(x)",
)


def test_agree_with_onnx_runtime() -> None:
    """The inputs include zeros, infinities and NaN."""
    outputs = ", ".join(f"float[3,6,19] y{n}" for n in range(len(CALLS)))
    nodes = "\n ".join(f"y{n} = {call}" for n, call in enumerate(CALLS))
    model = network(f"(float[3,6,19] x) => ({outputs}) {{ {nodes} }}")
    x = np.random.default_rng(0).standard_normal((3, 6, 19)).astype(np.float32)
    x[1] = 0.0
    special = x.copy()
    special[0, 0, :4] = [np.inf, -np.inf, np.nan, 90.0]
    with open_model(model.SerializeToString()) as runtime, compiled(model, detect()) as ours:
        for feeds in ({"x": x}, {"x": special}):
            for a, b, call in zip(runtime.run(feeds), ours.run(feeds), CALLS, strict=True):
                np.testing.assert_allclose(b, a, rtol=2e-6, atol=2e-7, err_msg=call)
