"""1x1 convolutions of flattened images read the images."""

from __future__ import annotations

import math

import pytest

from tests.backends.tvm.kernels.test_kernels import network
from tests.backends.tvm.kernels.test_pooling import compare
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.fusion.pointwise import on_images
from xrlflow.backends.tvm.lowering.importer import import_model

pytestmark = pytest.mark.measures


def text(flat: str, back: str, weights: str = "8,4,1", attributes: str = "", channels: int = 4) -> str:
    ones = ", ".join(["1", "4", flat]), ", ".join(["1", "8", back])
    numbers = ", ".join(str(n % 7 - 3) for n in range(math.prod(map(int, weights.split(",")))))
    return (
        f"(float[1,{channels},3,5] x, float[1] v) => (float[a,b,c,d] y) "
        f"<int64[{ones[0].count(',') + 1}] s = {{{ones[0]}}}, int64[{ones[1].count(',') + 1}] t = {{{ones[1]}}}, "
        f"float[{weights}] w = {{{numbers}}}> "
        f"{{ f = Reshape(x, s) c = Conv{attributes}(f, w) r = Reshape(c, t) y = Mul(r, v) }}"
    )


@pytest.mark.parametrize(
    ("model", "reshapes"),
    [
        (text("15", "3, 5"), 0),
        (text("1, 15", "3, 5", "8,4,1,1"), 0),
        (text("15", "5, 3"), 2),  # to another image: both come after the convolution now
        (text("15", "3, 5", "8,2,1", "<group=2>"), 0),
        (text("5, 3", "5, 3", "8,4,1,1"), 2),
        (text("15", "3, 5", "8,4,3", "<pads=[1,1]>"), 2),  # it reads neighbouring pixels
        (
            text("8", "2, 4", "8,4,1", "<strides=[2]>")
            .replace("1,4,3,5", "1,4,4,2")
            .replace("8, 2, 4", "8, 2, 2"),
            2,
        ),
        (text("30", "5, 6", channels=8), 2),  # it also flattens channels
    ],
)
def test_it_reads_the_image(model: str, reshapes: int) -> None:
    module = on_images(import_model(network(model)))
    assert str(module["main"]).count("R.reshape") == reshapes
    compare(model, detect())
