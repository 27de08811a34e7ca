"""The real field's own functions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from xrlflow.ops.field import REALS, NotEvaluable, erf, integer_divide


def test_erf_in_double_precision() -> None:
    x = np.concatenate((np.linspace(-7, 7, 4001), [0.46875, 4.0, 1e-300, 30.0]))
    exact = np.array([math.erf(v) for v in x])
    np.testing.assert_allclose(erf(x), exact, rtol=1e-14, atol=0)
    np.testing.assert_array_equal(erf(np.array([np.inf, -np.inf, np.nan])), [1.0, -1.0, np.nan])
    assert math.copysign(1.0, erf(np.array(-0.0)).item()) == -1.0
    assert erf(np.zeros((2, 0, 3))).shape == (2, 0, 3)


def test_integers_divide_towards_zero() -> None:
    a = np.array([7, -7, 7, -7, 6, -6], np.int32)
    b = np.array([2, 2, -2, -2, 3, 3], np.int32)
    quotient = integer_divide(a, b)
    np.testing.assert_array_equal(quotient, [3, -3, -3, 3, 2, -2])
    assert quotient.dtype == np.int32
    unsigned = integer_divide(np.array([255], np.uint8), np.array([2], np.uint8))
    assert unsigned.dtype == np.uint8
    assert unsigned[0] == 127


def test_a_function_that_the_reals_do_not_know() -> None:
    with pytest.raises(NotEvaluable, match="frobnicate"):
        REALS.unary("frobnicate", np.ones(2))
