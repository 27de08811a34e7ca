"""What the table of axes says of operators is what they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from xrlflow.ir import Attrs
from xrlflow.ops.axes import AXES, Axes
from xrlflow.ops.evaluate import REALS, evaluate_node
from xrlflow.ops.schema import schema

SHAPE = (3, 4, 5)
# What an operator must be told.
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "Cast": {"to": 11},
    "BitShift": {"direction": "LEFT"},
    "Mod": {"fmod": 1},
}
BOOLEAN = ("And", "Or", "Xor", "Not")
BITS = ("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot")


def inputs_of(op: str, axes: Axes) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    if op in BITS:
        numbers = rng.integers(0, 4, (3, *SHAPE)).astype(np.uint8)
    else:
        numbers = rng.random((3, *SHAPE)) > 0.5 if op in BOOLEAN else rng.random((3, *SHAPE)) + 0.1
    if op in ("LayerNormalization", "RMSNormalization"):
        return [numbers[0], numbers[1][0, 0]]
    if op == "Where":
        return [numbers[0] > 0.6, *numbers[1:]]
    return [*numbers[: 1 if axes.of == "first" else 2]]


def run(op: str, inputs: Sequence[np.ndarray], own: int | None, **named: Any) -> list[np.ndarray]:
    axes = AXES[op]
    if axes.own == "axis" and own is not None:
        named["axis"] = own
    more = [np.array([own])] if axes.own == "axes" else []
    outputs = 2 if op == "Split" else 1
    attrs = Attrs({**ATTRIBUTES.get(op, {}), **named})
    return [np.asarray(y) for y in evaluate_node(op, attrs, [*inputs, *more], outputs, REALS)]


def taken(x: np.ndarray, axis: int) -> np.ndarray:
    """Some positions along an axis that is counted in SHAPE; all, of an operand that does not have it."""
    at = axis - (len(SHAPE) - x.ndim)
    return x if at < 0 or x.shape[at] == 1 else np.take(x, [2, 0], at)


@pytest.mark.parametrize("op", AXES)
def test_positions_along_other_axes_do_not_know_of_each_other(op):
    axes = AXES[op]
    assert schema(op) is not None
    for own in range(len(SHAPE)) if axes.own else [None]:
        inputs = inputs_of(op, axes)
        if axes.onwards and own is not None and own < len(SHAPE) - 1:
            continue  # their scale has the normalised axes, here the last
        whole = run(op, inputs, own)
        for axis in range(len(SHAPE)):
            if axis != own:
                cut = run(op, [taken(x, axis) for x in inputs], own)
                for a, b in zip(whole, cut, strict=True):
                    np.testing.assert_allclose(np.take(a, [2, 0], axis), b, rtol=1e-12)


@pytest.mark.parametrize("op", [op for op, axes in AXES.items() if axes.own])
def test_positions_along_its_own_axes_are_taken_together(op):
    inputs = inputs_of(op, AXES[op])
    own = len(SHAPE) - 1
    whole = run(op, inputs, own)
    cut = run(op, [taken(x, own) for x in inputs], own)
    kept = [np.take(a, [2, 0], own, mode="clip") for a in whole]
    assert any(a.shape != b.shape or not np.allclose(a, b) for a, b in zip(kept, cut, strict=True))


# Concat must be told its axis.
SILENT = [op for op, axes in AXES.items() if axes.own == "axis" and op != "Concat"]


@pytest.mark.parametrize("op", SILENT)
def test_an_axis_that_is_not_said_is_the_default(op):
    inputs = inputs_of(op, AXES[op])
    for a, b in zip(run(op, inputs, None), run(op, inputs, AXES[op].default), strict=True):
        np.testing.assert_array_equal(a, b)
