"""Products of rows with constant weights become one kernel: its results, and when it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.tvm.kernels.test_kernels import network, numbers
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.tvm import Machine, detect
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.kernels.products import Product, best_blocking, blockings, chunk_of, cost, packed
from xrlflow.backends.tvm.lowering.compiled import compiled
from xrlflow.backends.tvm.lowering.importer import import_model

pytestmark = pytest.mark.measures

Array = npt.NDArray[Any]


def product(x: str, weights: str, out: str, more: str = "y = Identity(a)", inputs: str = "") -> str:
    """A graph of a product of x with w with result a, followed by the given nodes."""
    return f"(float[{x}] x, float[{weights}] w{inputs}) => (float[{out}] y) {{ a = MatMul(x, w) {more} }}"


FUSED = {
    "whole tiles": product("8,256", "256,192", "8,192"),
    "odd rows": product("37,256", "256,192", "37,192"),
    "odd columns": product("19,200", "200,203", "19,203"),
    "odd terms": product("9,397", "397,96", "9,96"),
    "two rows, many terms": product("2,1033", "1033,36", "2,36"),
    "rows of two dimensions": product("3,7,128", "128,300", "3,7,300"),
    "rows of four dimensions": product("2,1,3,5,256", "256,130", "2,1,3,5,130"),
    "bias and activation": product("13,256", "256,132", "13,132", "c = Add(a, b) y = Relu(c)", ", float[132] b"),
    "bias first, Gelu, residual": product(
        "3,5,256", "256,150", "3,5,150", "c = Add(b, a) d = Gelu(c) y = Add(d, r)",
        ", float[150] b, float[3,5,150] r",
    ),
    "Gelu spelt out": product(
        "17,256", "256,140", "17,140", "d = Div(a, s) e = Erf(d) f = Add(e, o) g = Mul(a, f) y = Mul(g, h)"
    ).replace("{", "<float s = {1.4142135}, float o = {1.0}, float h = {0.5}> {", 1),
    "read twice by a step": product("9,256", "256,140", "9,140", "s = Sigmoid(a) t = Tanh(s) y = Mul(a, t)"),
    "Gemm": "(float[10,130] x, float[270,130] w, float[270] b) => (float[10,270] y) {"
    " y = Gemm<transB=1, alpha=0.5, beta=2.0>(x, w, b) }",
    "two of a kind": "(float[8,192] x, float[192,192] w, float[192,192] w1) => (float[8,192] y) {"
    " a = MatMul(x, w) b = MatMul(a, w1) y = Relu(b) }",
    "read by others": "(float[8,192] x, float[192,192] w) => (float[8,192] y, float[8,192] a) {"
    " a = MatMul(x, w) y = Relu(a) }",
    "concatenated": product("16,256", "256,192", "16,384", "r = Relu(a) s = Sigmoid(a) y = Concat<axis=1>(r, s)"),
}  # fmt: skip
LEFT = {
    "one row": product("1,256", "256,192", "1,192"),
    "a vector": product("256", "256,192", "192"),
    "few weights": product("16,64", "64,64", "16,64"),
    "few columns": product("16,4096", "4096,16", "16,16"),
    "many rows": product("600,256", "256,192", "600,192"),
    "weights given": "(float[16,256] x, float[256,192] z) => (float[16,192] y) { y = MatMul(x, z) }",
    "weights of a batch": product("2,16,256", "2,256,192", "2,16,192"),
    "doubles": product("16,256", "256,192", "16,192").replace("float", "double"),
}


def kernels(text: str, machine: Machine | None = None) -> list[str]:
    module = fuse(import_model(network(text)), machine or detect())
    return [v.name_hint for v in module.functions if v.name_hint != "main"]


def results(text: str, machine: Machine, feeds: dict[str, Array] | None = None) -> list[tuple[Array, Array]]:
    """The outputs of ONNX Runtime, and those of our kernels."""
    model = network(text)
    given = numbers(model) if feeds is None else feeds
    with open_model(model.SerializeToString(), threads=1) as runtime:
        expected = runtime.run(given)
    with compiled(model, machine, threads=2) as lowered:
        return [(np.asarray(a), np.asarray(b)) for a, b in zip(expected, lowered.run(given), strict=True)]


def assert_close(expected: Array, result: Array) -> None:
    """Check that results differ only by rounding in single precision."""
    assert result.shape == expected.shape
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(result, expected, rtol=0, atol=4e-6 * scale)


@pytest.mark.parametrize("name", FUSED)
def test_results(name: str) -> None:
    assert any("product" in kernel for kernel in kernels(FUSED[name]))
    for expected, result in results(FUSED[name], detect()):
        assert_close(expected, result)


@pytest.mark.parametrize("name", ["bias and activation", "bias first, Gelu, residual", "Gelu spelt out"])
def test_steps_are_part_of_the_kernel(name: str) -> None:
    assert len(kernels(FUSED[name])) == 1


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    machine = Machine("x86_64-unknown-linux-gnu", "znver4", 2, 16, 32)
    assert not any("product" in kernel for kernel in kernels(LEFT[name], machine))


@pytest.mark.parametrize("name", ["odd columns", "rows of two dimensions", "bias and activation"])
@pytest.mark.parametrize("cores", [1, 7])
def test_other_machines(name: str, cores: int) -> None:
    """The target has 16 registers of 8 floats. Panels and rows are divided among any number of threads."""
    ((expected, result),) = results(FUSED[name], detect(cpu="haswell", cores=cores))
    assert_close(expected, result)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    text = FUSED["odd columns"]
    x = numbers(network(text))["x"]
    x[3, 7], x[5, 9] = np.nan, np.inf
    ((expected, result),) = results(text, detect(), {"x": x})
    assert np.isnan(result[3]).all()
    np.testing.assert_array_equal(np.isfinite(result), np.isfinite(expected))
    np.testing.assert_array_equal(result[5], expected[5])
    finite = np.isfinite(expected).all(axis=1)
    assert_close(expected[finite], result[finite])


def test_long_sums_are_exact() -> None:
    """Summation in chunks keeps the error of 4,000 terms near that of a pairwise sum."""
    text = product("4,4001", "4001,40", "4,40")
    model = network(text)
    given = numbers(model)
    (weights,) = (t for t in model.graph.initializer if t.name == "w")
    from onnx import numpy_helper

    exact = given["x"].astype(np.float64) @ numpy_helper.to_array(weights)
    ((expected, result),) = results(text, detect(), given)
    assert np.abs(result - exact).max() <= 2 * np.abs(expected - exact).max()


def test_panels_of_weights() -> None:
    workload, weights = Product((5, 3), (5, 21)), np.arange(63, dtype=np.float32).reshape(3, 21)
    blocking = next(h for h in blockings(workload, Machine("x86_64", "haswell", 1, 8, 16)) if h.columns == 16)
    panels = packed(weights, workload, blocking)
    assert panels.shape == (2, 3, 16)
    np.testing.assert_array_equal(panels[0], weights[:, :16])
    np.testing.assert_array_equal(panels[1, :, :5], weights[:, 16:])
    assert not panels[1, :, 5:].any()


@given(
    rows=st.integers(1, 256), depth=st.integers(1, 5000), columns=st.integers(1, 4000),
    cores=st.sampled_from([1, 2, 7]), narrow=st.booleans(),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_plans_fit_registers_and_cover_the_result(
    rows: int, depth: int, columns: int, cores: int, narrow: bool
) -> None:
    machine = Machine("x86_64", "znver4", cores, *((8, 16) if narrow else (16, 32)))
    workload = Product((rows, depth), (rows, columns))
    blocking = best_blocking(workload, machine)
    vectors = blocking.columns // blocking.lanes
    assert machine.keeps(blocking.rows, vectors)
    assert (
        blocking.panels(workload) * blocking.columns
        >= columns
        > (blocking.panels(workload) - 1) * blocking.columns
    )
    assert 1 <= blocking.parts <= blocking.panels(workload)
    assert blocking.rows <= rows
    assert blocking.block <= rows
    chunk = chunk_of(depth)
    assert chunk <= 192
    assert cost(workload, blocking, machine) == min(
        cost(workload, each, machine) for each in blockings(workload, machine)
    )
