"""Many small products become one kernel: its results, and when it is used."""

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
from xrlflow.backends.tvm.kernels.batches import BatchedProduct, best_blocking, blockings, cost
from xrlflow.backends.tvm.lowering.compiled import compiled
from xrlflow.backends.tvm.lowering.importer import import_model

pytestmark = pytest.mark.measures

Array = npt.NDArray[Any]


def products(batch: str, sizes: tuple[int, int, int], more: str = "y = Identity(a)", inputs: str = "") -> str:
    """A graph of products of x and z with result a, followed by the given nodes. `sizes`: rows, terms and columns."""
    m, k, n = sizes
    return (
        f"(float[{batch},{m},{k}] x, float[{batch},{k},{n}] z{inputs}) => (float[{batch},{m},{n}] y) {{"
        f" a = MatMul(x, z) {more} }}"
    )


FUSED = {
    "windows": products("16", (49, 32, 49)),
    "values of windows": products("2,3,4", (49, 49, 32)),
    "odd everywhere": products("9", (13, 7, 37)),
    "one vector, overlapping rows": products("8", (5, 3, 16)),
    "long rows": products("3,3", (4, 30, 131)),
    "steps": products("8", (10, 12, 24), "c = Mul(a, s) d = Add(c, r) y = Relu(d)", ", float[8,10,24] r").replace(
        "{", "<float s = {0.3}> {", 1
    ),
    "bias of columns": products("8", (10, 12, 24), "y = Add(a, b)", ", float[24] b"),
    "read by others": "(float[8,9,12] x, float[8,12,24] z) => (float[8,9,24] y, float[8,9,24] a) {"
    " a = MatMul(x, z) y = Relu(a) }",
}  # fmt: skip
LEFT = {
    "few products": products("3", (49, 32, 49)),
    "few columns": products("16", (20, 16, 9)),
    "few rows": products("16", (2, 16, 32)),
    "many terms": products("8", (20, 160, 17)),
    "large": products("8", (20, 100, 100)),
    "spread": "(float[16,20,16] x, float[1,16,32] z) => (float[16,20,32] y) { y = MatMul(x, z) }",
    "one matrix": "(float[16,20,16] x, float[16,32] z) => (float[16,20,32] y) { y = MatMul(x, z) }",
    "before what TVM fuses": products("8", (10, 12, 24), "y = Exp(a)"),
    "doubles": products("16", (20, 16, 32)).replace("float", "double"),
}


def kernels(text: str) -> list[str]:
    """The names of the kernels after fusion for vectors of 16 floats, on whatever processor the tests run."""
    module = fuse(import_model(network(text)), detect(cpu="skylake-avx512", cores=2))
    return [v.name_hint for v in module.functions if v.name_hint != "main"]


def results(text: str, machine: Machine, feeds: dict[str, Array] | None = None) -> list[tuple[Array, Array]]:
    """The outputs of ONNX Runtime, and those of our kernels."""
    model = network(text)
    given = numbers(model) if feeds is None else feeds
    with open_model(model.SerializeToString(), threads=1) as runtime:
        expected = runtime.run(given)
    with compiled(model, machine, threads=2) as lowered:
        return [(np.asarray(a), np.asarray(b)) for a, b in zip(expected, lowered.run(given), strict=True)]


@pytest.mark.parametrize("name", FUSED)
def test_results(name: str) -> None:
    assert any("batches" in kernel for kernel in kernels(FUSED[name]))
    for expected, result in results(FUSED[name], detect(cores=2)):
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, rtol=0, atol=4e-6 * float(np.abs(expected).max()))


@pytest.mark.parametrize("name", ["steps", "bias of columns"])
def test_steps_are_part_of_the_kernel(name: str) -> None:
    assert len(kernels(FUSED[name])) == 1


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    assert not any("batches" in kernel for kernel in kernels(LEFT[name]))


@pytest.mark.parametrize("name", ["windows", "odd everywhere"])
def test_other_machines(name: str) -> None:
    """The target has 16 registers of 8 floats."""
    ((expected, result),) = results(FUSED[name], detect(cpu="haswell", cores=2))
    np.testing.assert_allclose(result, expected, rtol=0, atol=4e-6 * float(np.abs(expected).max()))


def test_what_is_not_a_number_stays_in_its_row_and_column() -> None:
    text = FUSED["odd everywhere"]
    given = numbers(network(text))
    given["x"][2, 3, 1], given["z"][4, 1, 36] = np.nan, np.inf
    ((expected, result),) = results(text, detect(cores=2), given)
    assert np.isnan(result[2, 3]).all()
    assert np.isinf(result[4, :, 36]).all()
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@given(rows=st.integers(1, 300), columns=st.integers(16, 700), narrow=st.booleans(), in_halves=st.booleans())
@settings(max_examples=40, deadline=None)
def test_tiles_fit_registers_and_cover_the_columns(
    rows: int, columns: int, narrow: bool, in_halves: bool
) -> None:
    lanes, registers = (8, 16) if narrow else (16, 32)
    machine = Machine("x86_64", "znver4", 2, lanes, registers, in_halves=in_halves)
    workload = BatchedProduct((8,), rows, 10, columns)
    blocking = best_blocking(workload, machine)
    groups = blocking.groups(workload)
    assert all(machine.keeps(blocking.rows, len(group)) for group in groups)
    covered = {c for group in groups for start in group for c in range(start, start + blocking.lanes)}
    assert covered == set(range(columns))
    assert blocking.rows <= rows
    assert cost(workload, blocking, machine) == min(
        cost(workload, each, machine) for each in blockings(workload, machine)
    )
