"""The loops that are derived from a blocking have as many multiplications as the kernel."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from tests.tuning.measured import MACHINE
from tests.tuning.test_blocks import BLOCK
from tests.tuning.test_layers import WORKLOADS
from xrlflow.backends.tvm.kernels import direct, winograd
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm, KernelChoice, LayerWorkload
from xrlflow.backends.tvm.kernels.loops import Loop, loops_of, loops_of_bands, totals
from xrlflow.tuning.layers import Layer

pytestmark = pytest.mark.measures


def consistent(loops: Sequence[Loop]) -> None:
    """Check that one iteration of a loop runs the whole next loop. The last iteration of a tile may compute too
    much."""
    for outer, inner in itertools.pairwise(loops):
        assert outer.work <= inner.extent * inner.work * (1 + 1e-9)
        assert inner.extent * inner.work < 2 * outer.work + inner.work
        assert outer.image * 1.001 >= inner.image
        assert outer.weights >= inner.weights


def multiplications(workload: LayerWorkload, choice: KernelChoice) -> float:
    """The number of multiplications of vectors, without padding."""
    lanes = choice.blocking.tile.lanes if hasattr(choice.blocking, "tile") else choice.blocking.lanes  # type: ignore[union-attr]
    all_of_them = math.prod(workload.out) * workload.terms / lanes
    if isinstance(choice.blocking, winograd.WinogradBlocking):
        m = choice.algorithm.m or 0
        return all_of_them * (m + 2) ** 2 / (9 * m * m)
    return all_of_them


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "groups"])
def test_all_multiplications_are_in_the_loops(name: str) -> None:
    workload = WORKLOADS[name]
    choices = Layer(workload, False).everything(MACHINE)
    for choice in random.Random(0).sample(choices, min(150, len(choices))):
        if choice.blocking is None or getattr(choice.blocking, "together", 1) > 1:
            continue
        loops = loops_of(workload, choice)
        consistent(loops)
        done = totals(loops)[-1] * loops[-1].work
        assert done >= 0.999 * multiplications(workload, choice)


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "groups"])
def test_what_fits_exactly_is_not_padded(name: str) -> None:
    """The blocking with the fewest multiplications has less than a fifth too many."""
    workload = WORKLOADS[name]
    least = min(
        totals(loops)[-1] * loops[-1].work / multiplications(workload, choice)
        for choice in Layer(workload, False).everything(MACHINE)
        if choice.blocking is not None and (loops := loops_of(workload, choice))
    )
    assert least < 1.2


def test_groups_that_share_a_vector_have_loops() -> None:
    workload = direct.Convolution((1, 9, 9, 16), (1, 9, 9, 16), (1, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1), 4)
    blocking = next(blocking for blocking in direct.blockings(workload, MACHINE) if blocking.together > 1)
    consistent(loops_of(workload, KernelChoice(Algorithm.DIRECT, blocking)))


def test_loops_of_bands() -> None:
    for choice in random.Random(1).sample(BLOCK.everything(MACHINE)[1:], 50):
        assert choice.blocking is not None
        loops = loops_of_bands(BLOCK.workload, choice.blocking)
        assert all(value > 0 for loop in loops for value in loop.numbers)
        each = sum(loop.extent * loop.work for loop in loops[2:])
        assert each == pytest.approx(loops[1].work)
