"""The loops that are read off a blocking are those of the kernel: they multiply as often."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from tests.tuning.measured import MACHINE
from tests.tuning.test_blocks import BLOCK
from tests.tuning.test_layers import FORMS
from xrlflow.backends.tvm.kernels import direct, winograd
from xrlflow.backends.tvm.kernels.loops import Loop, loops_of, loops_of_bands, totals
from xrlflow.backends.tvm.kernels.ways import Algorithm, LayerForm, Way
from xrlflow.tuning.layers import Layer

pytestmark = pytest.mark.measures


def consistent(loops: Sequence[Loop]) -> None:
    """A turn of a loop is all turns of the next one; what the last turn of a tile computes too much counts."""
    for outer, inner in itertools.pairwise(loops):
        assert outer.work <= inner.extent * inner.work * (1 + 1e-9)
        assert inner.extent * inner.work < 2 * outer.work + inner.work
        assert outer.image * 1.001 >= inner.image
        assert outer.weights >= inner.weights


def multiplications(form: LayerForm, way: Way) -> float:
    """Of vectors, if nothing is padded."""
    lanes = way.plan.tile.lanes if hasattr(way.plan, "tile") else way.plan.lanes  # type: ignore[union-attr]
    all_of_them = math.prod(form.out) * form.terms / lanes
    if isinstance(way.plan, winograd.WinogradBlocking):
        m = way.algorithm.m or 0
        return all_of_them * (m + 2) ** 2 / (9 * m * m)
    return all_of_them


@pytest.mark.parametrize("name", [name for name in FORMS if name != "groups"])
def test_all_multiplications_are_in_the_loops(name: str) -> None:
    form = FORMS[name]
    ways = Layer(form, False).everything(MACHINE)
    for way in random.Random(0).sample(ways, min(150, len(ways))):
        if way.plan is None or getattr(way.plan, "together", 1) > 1:
            continue
        loops = loops_of(form, way)
        consistent(loops)
        done = totals(loops)[-1] * loops[-1].work
        assert done >= 0.999 * multiplications(form, way)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "groups"])
def test_what_fits_exactly_is_not_padded(name: str) -> None:
    """The blocking that multiplies least does not multiply more than a fifth too much, but for odd sizes."""
    form = FORMS[name]
    least = min(
        totals(loops)[-1] * loops[-1].work / multiplications(form, way)
        for way in Layer(form, False).everything(MACHINE)
        if way.plan is not None and (loops := loops_of(form, way))
    )
    assert least < 1.2


def test_groups_that_share_a_vector_have_loops() -> None:
    form = direct.Convolution((1, 9, 9, 16), (1, 9, 9, 16), (1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1), 4)
    how = next(how for how in direct.plans(form, MACHINE) if how.together > 1)
    consistent(loops_of(form, Way(Algorithm.DIRECT, how)))


def test_loops_of_bands() -> None:
    for way in random.Random(1).sample(BLOCK.everything(MACHINE)[1:], 50):
        assert way.plan is not None
        loops = loops_of_bands(BLOCK.form, way.plan)
        assert all(value > 0 for loop in loops for value in loop.numbers)
        each = sum(loop.extent * loop.work for loop in loops[2:])
        assert each == pytest.approx(loops[1].work)
