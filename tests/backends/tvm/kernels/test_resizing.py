"""Resize has the results of ONNX Runtime, for all modes, several sizes, and both layouts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pytest

from tests.backends.tvm.kernels.test_kernels import network, numbers
from tests.levels import whole
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.tvm import Machine, detect
from xrlflow.backends.tvm.kernels.resizing import linear, nearest
from xrlflow.backends.tvm.lowering.compiled import compiled

pytestmark = pytest.mark.measures

PLACES = ("half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
LINEAR = [f'mode="linear", coordinate_transformation_mode="{place}"' for place in PLACES]
NEAREST = [
    f'mode="nearest", coordinate_transformation_mode="{place}", nearest_mode="{rounding}"'
    for place in (*PLACES, "tf_half_pixel_for_nn")
    for rounding in ROUNDINGS
]
# Results of an image of 6 x 10: whole factors, other ratios, and ratios with long periods, larger and smaller.
SIZES = ((12, 20), (18, 40), (6, 10), (3, 5), (9, 15), (1, 1), (7, 97), (5, 3))


def compare(wanted: Sequence[tuple[str, tuple[int, int]]], machine: Machine, last: bool) -> None:
    """Compare results for these attributes and sizes. The image has channels first or, with `last`, last."""
    wanted = [
        (a, size) for a, size in wanted if "align_corners" not in a or size != (1, 1)
    ]  # TVM divides by zero
    outputs = ", ".join(f"float[2,16,{h},{w}] y{n}" for n, (_, (h, w)) in enumerate(wanted))
    given = ", ".join(f"int64[4] s{n} = {{2, 16, {h}, {w}}}" for n, (_, (h, w)) in enumerate(wanted))
    nodes = "\n ".join(
        f"y{n} = Resize<{attributes}>(a, , , s{n})" for n, (attributes, _) in enumerate(wanted)
    )
    inputs = "float[2,3,6,10] x, float[16,3,3,3] w" if last else "float[2,16,6,10] x"
    first = "a = Conv<pads=[1,1,1,1]>(x, w)" if last else "a = Identity(x)"
    model = network(f"({inputs}) => ({outputs}) <{given}> {{ {first}\n {nodes} }}")
    feeds = numbers(model)
    with open_model(model.SerializeToString(), threads=1) as runtime:
        expected = runtime.run(feeds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a kernel that is left unscheduled
        lowered = compiled(model, machine, threads=2)
    with lowered:
        result = lowered.run(feeds)
    for a, b, (attributes, size) in zip(expected, result, wanted, strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=4e-6, err_msg=f"{attributes} {size}")


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_linear(last: bool) -> None:
    pairs = [(attributes, size) for size in SIZES for attributes in LINEAR]
    compare(pairs[last::2], detect(), last)


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_nearest(last: bool) -> None:
    """Each mode at several sizes."""
    pairs = [(attributes, SIZES[(n + k) % 8]) for n, attributes in enumerate(NEAREST) for k in (2, 3)]
    compare(pairs[last::2], detect(), last)


@pytest.mark.parametrize("cpu", whole(["haswell", "nehalem"], ("haswell",)))
def test_narrower_machines(cpu: str) -> None:
    pairs = [(attributes, size) for attributes in (LINEAR[0], NEAREST[0]) for size in SIZES[::3]]
    compare(pairs, detect(cpu=cpu), False)


def test_periods() -> None:
    """Repeating coefficients are recognised, with their exceptions at the borders."""
    doubled = linear(40, 80, "half_pixel")
    assert doubled.period == (1, 2)
    assert doubled.repeated() == (1, 38)
    assert linear(40, 60, "half_pixel").period == (2, 3)
    assert linear(40, 80, "asymmetric").repeated() == (0, 39)
    assert nearest(40, 80, "asymmetric", "floor").repeated() == (0, 40)
    assert nearest(40, 80, "asymmetric", "floor").copies == 2
    assert nearest(40, 80, "align_corners", "floor").copies == 1
