"""Knobs know which values are near each other."""

from __future__ import annotations

import pytest

from xrlflow.tuning.knobs import Knob


@pytest.mark.parametrize(
    ("ordered", "index", "near"),
    [(True, 0, (1,)), (True, 2, (1, 3)), (True, 3, (2,)), (False, 1, (0, 2, 3)), (False, 3, (0, 1, 2))],
)
def test_near_values(ordered: bool, index: int, near: tuple[int, ...]) -> None:
    knob = Knob("rows", (1, 2, 4, 8), ordered)
    assert len(knob) == 4
    assert knob.near(index) == near


def test_a_single_value_has_none_near() -> None:
    assert Knob("rows", (1,)).near(0) == Knob("algorithm", (1,), ordered=False).near(0) == ()
