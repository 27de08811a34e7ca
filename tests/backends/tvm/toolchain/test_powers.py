"""Powers, computed with vectors and as nodes of a graph."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.backends.tvm.kernels.test_kernels import network
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.lowering.compiled import compiled
from xrlflow.backends.tvm.toolchain.import_tvm import tvm

pytestmark = pytest.mark.measures

Floats = npt.NDArray[np.float32]

_NUMBERS = (
    0.0,
    1.0,
    math.inf,
    2.0,
    3.0,
    0.5,
    1e-45,
    3.4e38,
    2.5,
    1e-30,
    16777217.0,
    1e10,
    7.0,
    0.999999,
    1.0001,
)
SPECIAL = np.array([*_NUMBERS, *(-n for n in _NUMBERS), math.nan, 0.75], np.float32)


def evaluate(x: Floats, y: Floats, lanes: int) -> Floats:
    package = tvm()
    from tvm import te, tirx
    from tvm.s_tir import Schedule

    a, b = (te.placeholder(v.shape, "float32", name=name) for v, name in ((x, "a"), (y, "b")))
    c = te.compute(x.shape, lambda i: tirx.power(a[i], b[i]), name="c")
    sch = Schedule(package.IRModule({"main": te.create_prim_func([a, b, c])}))
    (loop,) = sch.get_loops(sch.get_sblock("c"))
    if lanes > 1:
        _, lane = sch.split(loop, [None, lanes])
        sch.vectorize(lane)
    result = package.runtime.tensor(np.empty_like(x))
    library = package.compile(sch.mod, target=detect().target())
    library["main"](package.runtime.tensor(x), package.runtime.tensor(y), result)
    actual: Floats = result.numpy()
    return actual


def exact(x: Floats, y: Any) -> Any:
    """The results of C's pow, rounded to single precision. NumPy would use roots for an exponent that all share."""
    with np.errstate(all="ignore"):
        exponents = np.broadcast_to(np.asarray(y, np.float64), x.shape).copy()
        return np.power(x.astype(np.float64), exponents).astype(np.float32)


def agree(result: Floats, expected: Floats, rtol: float = 1.3e-7) -> None:
    np.testing.assert_allclose(result, expected, rtol=rtol, atol=2e-45)
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(result[known]), np.signbit(expected[known]))


@pytest.mark.parametrize("lanes", [1, 8, 16])
def test_special_numbers_and_others(lanes: int) -> None:
    """All pairs of special numbers, and random ones whose results cover the whole range. The error is at most 1 unit in
    the last place."""
    rng = np.random.default_rng(0)
    x = np.exp(rng.uniform(-80, 80, 1 << 14)).astype(np.float32)
    y = (rng.uniform(-100, 90, x.size) / np.log(x.astype(np.float64))).astype(np.float32)
    bases, exponents = (v.ravel() for v in np.meshgrid(SPECIAL, SPECIAL))
    x, y = np.concatenate([x, bases]), np.concatenate([y, exponents])
    agree(evaluate(x, y, lanes), exact(x, y))


@pytest.mark.parametrize("kind", ["float", "int64"])
def test_constant_exponents(kind: str) -> None:
    """A single exponent for all elements: a small whole number (a product), a root, or another number."""
    exponents = [0, 1, 2, 3, 4, 7, 8, 9, -1, -2, -5] + ([0.5, -0.5, 3.3, 1 / 3] if kind == "float" else [])
    outputs = ", ".join(f"float[4,8] y{n}" for n in range(len(exponents)))
    given = ", ".join(f"{kind}{'[1]' if n % 2 else ''} p{n} = {{{e}}}" for n, e in enumerate(exponents))
    nodes = "\n ".join(f"y{n} = Pow(x, p{n})" for n in range(len(exponents)))
    model = network(f"(float[4,8] x) => ({outputs}) <{given}> {{ {nodes} }}")
    x = SPECIAL.reshape(4, 8)
    with open_model(model.SerializeToString()) as runtime, compiled(model, detect()) as ours:
        result, expected = ours.run({"x": x}), runtime.run({"x": x})
    for exponent, a, b in zip(exponents, result, expected, strict=True):
        agree(a, exact(x, np.float32(exponent)), rtol=2.5e-7)
        agree(b, a, rtol=2.5e-7)


@pytest.mark.parametrize("power", ["Pow(x, c)", "Pow(c, x)", "Pow(x, x)"])
def test_within_other_functions(power: str) -> None:
    """One kernel contains a power and functions that are computed with local variables."""
    follow = ["Exp(p)", "Erf(p)", "Sigmoid(p)", "Pow(p, c)", "Add(p, p)"]
    outputs = ", ".join(f"float[3,9] y{n}" for n in range(len(follow)))
    nodes = "\n ".join(
        f"p{n} = {power}\n y{n} = {f.replace('(p', f'(p{n}').replace(', p', f', p{n}')}"
        for n, f in enumerate(follow)
    )
    model = network(f"(float[3,9] x) => ({outputs}) <float c = {{1.7}}> {{ {nodes} }}")
    x = np.linspace(0, 3, 27, dtype=np.float32).reshape(3, 9)
    with open_model(model.SerializeToString()) as runtime, compiled(model, detect()) as ours:
        for a, b in zip(runtime.run({"x": x}), ours.run({"x": x}), strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-6)


@pytest.mark.parametrize("base", [0.0, -0.0, 1.0, -1.0, 3.3, -2.0, math.inf, -math.inf, math.nan])
def test_constant_base(base: float) -> None:
    package = tvm()
    from tvm import te, tirx

    y = te.placeholder(SPECIAL.shape, "float32", name="y")
    c = te.compute(y.shape, lambda i: tirx.power(tirx.const(base, "float32"), y[i]), name="c")
    library = package.compile(te.create_prim_func([y, c]), target=detect().target())
    result = package.runtime.tensor(np.empty_like(SPECIAL))
    library(package.runtime.tensor(SPECIAL), result)
    agree(result.numpy(), exact(np.full_like(SPECIAL, base), SPECIAL))
