"""What the comparison of outputs lets pass, and what not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rules.harness import assert_same

NUMBERS = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


def changed(place: tuple[int, ...], value: float, array: np.ndarray = NUMBERS) -> np.ndarray:
    out = array.copy()
    out[place] = value
    return out


INFINITE = changed((0, 0), np.inf)
BESIDE_A_LARGE_ONE = np.concatenate([np.full((1, 100), 1e3, np.float32), np.ones((1, 100), np.float32)])


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (INFINITE, changed((1, 1), 5.0, INFINITE)),  # an infinite output is no scale
        (INFINITE, changed((0, 0), -np.inf)),
        (INFINITE, changed((0, 0), 3e38)),
        (NUMBERS, changed((0, 0), np.nan)),
        (changed((0, 0), np.nan), changed((0, 1), np.nan)),
        (changed((0, 0), np.nan), NUMBERS),
        (NUMBERS, NUMBERS[0]),  # which would broadcast
        (np.zeros((1,), np.float32), np.float32(0)),
        (NUMBERS, NUMBERS.astype(np.float64)),
        (NUMBERS, NUMBERS * np.float32(1 + 3e-5)),
        (BESIDE_A_LARGE_ONE, changed((1,), 1.01, BESIDE_A_LARGE_ONE)),  # a slice of small numbers
        (np.asarray([2**62]), np.asarray([2**62 + 1])),  # equal in float64
        (np.asarray([True]), np.asarray([False])),
    ],
)
def test_what_differs(expected: np.ndarray, found: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        assert_same([expected], [found])


@pytest.mark.parametrize("array", [NUMBERS, INFINITE, changed((0, 0), np.nan), np.asarray([2**63 - 1])])
def test_what_is_the_same(array: np.ndarray) -> None:
    assert_same([array], [array.copy()])
    with pytest.raises(AssertionError):
        assert_same([array], [])
    if array.dtype.kind == "f":
        assert_same([array], [array * np.float32(1 + 1e-7)])


def test_the_original_s_own_error_is_allowed() -> None:
    exact = NUMBERS.astype(np.float64)
    rough = (exact * (1 + 1e-4)).astype(np.float32)
    assert_same([rough], [NUMBERS], [exact])
    with pytest.raises(AssertionError):
        assert_same([rough], [NUMBERS])
