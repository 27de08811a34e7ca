"""Measured times of single operators' kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.rules.harness import model
from xrlflow.backends.protocol import Array

pytest.importorskip("tvm")

from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.library.operator_times import Operator, code_version, operator_times

pytestmark = pytest.mark.measures


def operator(text: str, feeds: Mapping[str, tuple[int, ...]], **weights: Array) -> Operator:
    rng = np.random.default_rng(0)
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in feeds.items()}
    return model(text, **weights).SerializeToString(), drawn


IMAGE = {"x": (1, 8, 12, 12)}
CONV = operator(
    "agraph (float[1,8,12,12] x) => (float[1,16,12,12] y) { y = Conv<pads = [1, 1, 1, 1]>(x, w) }",
    IMAGE,
    w=np.ones((16, 8, 3, 3), np.float32),
)
POOL = operator(
    "agraph (float[1,8,12,12] x) => (float[1,8,6,6] y) { y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) }",
    IMAGE,
)
CONCAT = operator("agraph (float[1,8,12,12] x) => (float[1,16,12,12] y) { y = Concat<axis=1>(x, x) }", IMAGE)
PRODUCT = operator(
    "agraph (float[4,8] x) => (float[4,6] y) { y = MatMul(x, w) }",
    {"x": (4, 8)},
    w=np.ones((8, 6), np.float32),
)
UNIQUE = operator("agraph (float[4] x) => (float[?] y) { y = Unique(x) }", {"x": (4,)})


@pytest.mark.parametrize("channels_last", [False, True])
def test_each_operator_has_its_times(channels_last: bool) -> None:
    result = operator_times(
        [CONV, UNIQUE, POOL, PRODUCT, CONCAT], detect(None, 1), 1, channels_last=channels_last
    )
    assert result[1] is None
    for times in (result[0], *result[2:]):
        assert times is not None
        assert len(times.seconds) >= 5
        assert (times.seconds > 0).all()
        assert times.waiting >= 0


def test_a_number_is_a_tensor() -> None:
    """ONNX Runtime only accepts arrays, and NumPy's scalars are not arrays."""
    proto = model("agraph (float x, float[8] z) => (float[8] y) { y = Mul(z, x) }").SerializeToString()
    feeds = {"x": np.float32(1.0), "z": np.ones(8, np.float32)}
    (times,) = operator_times([(proto, feeds)], detect(None, 1), 1)
    assert times is not None


def test_without_kernels_nothing_is_built() -> None:
    assert operator_times([UNIQUE], detect(None, 1), 1) == [None]
    assert operator_times([], detect(None, 1), 1) == []


def test_images_are_turned_around_operators_on_images_only() -> None:
    from xrlflow.backends.tvm.library.operator_times import _with_channels_last

    for given, count in ((CONV, 3), (PRODUCT, 1)):
        proto, feeds = onnx.load_from_string(given[0]), dict(given[1])
        _with_channels_last(proto, feeds)
        assert len(proto.graph.node) == count
        onnx.checker.check_model(proto, full_check=True)
        shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in proto.graph.input}
        assert shapes == {name: array.shape for name, array in feeds.items()}


def test_the_code_has_a_version() -> None:
    assert code_version().startswith("kernels of tvm ")


def test_libraries_that_measured_are_unloaded() -> None:
    for _ in range(2):
        operator_times([PRODUCT], detect(None, 1), 1)
    assert "operators.so" not in Path("/proc/self/maps").read_text()
