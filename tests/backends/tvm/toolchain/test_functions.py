"""exp, tanh, erf and the sigmoid, computed with vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.toolchain.import_tvm import tvm

pytestmark = pytest.mark.measures

Floats = npt.NDArray[np.floating[Any]]


def _sigmoid(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


REFERENCES: dict[str, tuple[Callable[..., npt.NDArray[np.float64]], float, float]] = {
    # The function, its range, and the largest error in units in the last place.
    "exp": (np.exp, 87.0, 1.0),
    "tanh": (np.tanh, 12.0, 5.0),
    "erf": (np.vectorize(math.erf), 6.0, 5.0),
    "sigmoid": (_sigmoid, 80.0, 2.5),
}


def evaluate(name: str, x: Floats, lanes: int) -> Floats:
    package = tvm()
    from tvm import te, tirx
    from tvm.s_tir import Schedule

    a = te.placeholder(x.shape, str(x.dtype), name="a")
    b = te.compute(x.shape, lambda i: getattr(tirx, name)(a[i]), name="b")
    sch = Schedule(package.IRModule({"main": te.create_prim_func([a, b])}))
    (loop,) = sch.get_loops(sch.get_sblock("b"))
    if lanes > 1:
        _, lane = sch.split(loop, [None, lanes])
        sch.vectorize(lane)
    library = package.compile(sch.mod, target=detect().target())
    result = package.runtime.tensor(np.empty_like(x))
    library["main"](package.runtime.tensor(x), result)
    actual: Floats = result.numpy()
    return actual


@pytest.mark.parametrize("lanes", [1, 8, 16])
@pytest.mark.parametrize("name", REFERENCES)
def test_few_units_in_the_last_place(name: str, lanes: int) -> None:
    reference, limit, units = REFERENCES[name]
    rng = np.random.default_rng(0)
    x = np.concatenate([np.linspace(-limit, limit, 8192), rng.standard_normal(4096) * 1e-3]).astype(
        np.float32
    )
    result = evaluate(name, x, lanes).astype(np.float64)
    exact = reference(x.astype(np.float64))
    spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert float(np.max(np.abs(result - exact) / spacing)) <= units


@pytest.mark.parametrize("lanes", [1, 8, 16])
@pytest.mark.parametrize("name", REFERENCES)
def test_infinities_and_nan(name: str, lanes: int) -> None:
    limits = {"exp": (0.0, np.inf), "tanh": (-1.0, 1.0), "erf": (-1.0, 1.0), "sigmoid": (0.0, 1.0)}
    x = np.array([-np.inf, np.inf, np.nan, 0.0] * 4, np.float32)
    low, high, nothing, _ = evaluate(name, x, lanes)[:4]
    expected = limits[name]
    assert (low, high) == pytest.approx(expected, abs=1e-6)
    assert np.isnan(nothing)


@pytest.mark.parametrize("lanes", [1, 8, 16])
def test_exp_at_the_ends(lanes: int) -> None:
    x = np.array([88.72283, 88.7229, 3.4e38, -87.0, -103.0, -103.98, -3.4e38, 1.0] * 2, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        exact = np.exp(x)
    np.testing.assert_allclose(evaluate("exp", x, lanes), exact, rtol=1e-6, atol=1e-44)


FROM_C: dict[str, Callable[..., npt.NDArray[np.float64]]] = {
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
}


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", [*REFERENCES, *FROM_C])
def test_every_element_in_every_precision(name: str, kind: type[np.floating[Any]], lanes: int) -> None:
    """The reference is the C library, which computes one number at a time, in single or double precision."""
    reference = FROM_C[name] if name in FROM_C else REFERENCES[name][0]
    x = np.linspace(-0.97, 0.97, 64).astype(kind)
    x = x + kind(2) if name == "acosh" else x
    exact = reference(x.astype(np.float64))
    result = evaluate(name, x, lanes)
    assert result.dtype == kind
    spacing = np.spacing(np.abs(exact).astype(kind)).astype(np.float64)
    assert float(np.max(np.abs(result.astype(np.float64) - exact) / spacing)) <= 5
