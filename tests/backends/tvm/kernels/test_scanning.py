"""CumSum and TopK have the results of ONNX Runtime, also in a library of kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.backends.tvm.kernels.test_kernels import network
from tests.levels import whole
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.library.hybrid import hybrid
from xrlflow.backends.tvm.lowering.compiled import compiled
from xrlflow.backends.tvm.lowering.importer import import_model

pytestmark = pytest.mark.measures

KINDS = {"float": np.float32, "double": np.float64, "int32": np.int32, "int64": np.int64}
# Single rows, rows of images, and columns: fewer and more than a vector, and not divisible by one.
SHAPES = ((11,), (3, 21), (19, 7), (2, 5, 3), (2, 9, 83), (1, 6, 16))


def drawn(shape: tuple[int, ...], kind: str) -> npt.NDArray[np.generic]:
    """Random whole numbers. Sums of them are exact, and some of them are equal."""
    return np.random.default_rng(2).integers(-9, 10, shape).astype(KINDS[kind])


@pytest.mark.parametrize(
    ("shape", "kind"),
    [*((shape, "float") for shape in SHAPES), *((SHAPES[4], kind) for kind in KINDS)],
    ids=str,
)
def test_running_sums(shape: tuple[int, ...], kind: str) -> None:
    axes = [*range(len(shape)), -1]
    text = ",".join(map(str, shape))
    flags = [(exclusive, reverse) for exclusive in (0, 1) for reverse in (0, 1)]
    nodes, outputs, given = [], [], []
    for n, axis in enumerate(axes):
        given.append(f"int64{'[1]' if n % 2 else ''} a{n} = {{{axis}}}")
        exclusive, reverse = flags[(n + len(kind)) % 4]
        outputs.append(f"{kind}[{text}] y{n}")
        nodes.append(f"y{n} = CumSum<exclusive={exclusive}, reverse={reverse}>(x, a{n})")
    nodes, outputs, given = (
        separator.join(each) for separator, each in (("\n ", nodes), (", ", outputs), (", ", given))
    )  # type: ignore[assignment]
    model = network(f"({kind}[{text}] x) => ({outputs}) <{given}> {{ {nodes} }}")
    x = drawn(shape, kind)
    with open_model(model.SerializeToString()) as runtime, compiled(model, detect()) as ours:
        for a, b in zip(runtime.run({"x": x}), ours.run({"x": x}), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(b, a)


def test_running_sums_of_infinities_and_zeros() -> None:
    model = network("(float[4,5] x) => (float[4,5] y) <int64 a = {1}> { y = CumSum(x, a) }")
    x = np.array(
        [
            [1, np.inf, 1, -np.inf, 1],
            [-0.0, -0.0, 0, -0.0, 1],
            [np.nan, 1, 2, 3, 4],
            [3e38, 3e38, -3e38, 0, 1],
        ]
    )
    x = x.astype(np.float32)
    with open_model(model.SerializeToString()) as runtime, compiled(model, detect()) as ours:
        expected, result = runtime.run({"x": x})[0], ours.run({"x": x})[0]
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(np.signbit(result), np.signbit(expected))


@pytest.mark.parametrize("kind", ["float", "int32"])
@pytest.mark.parametrize("shape", whole([(40,), (3, 37), (2, 33, 5)], [(2, 33, 5)]), ids=str)
def test_greatest(shape: tuple[int, ...], kind: str) -> None:
    """Along each axis, in both directions, from one element to all. Equal elements are in the order of their
    indices."""
    x = drawn(shape, kind)
    nodes, outputs, given, order = [], [], [], []
    for axis in range(len(shape)):
        for n, k in enumerate({1, 2, shape[axis] // 2, shape[axis]}):
            name = f"{axis}{n}"
            out = ",".join(map(str, (*shape[:axis], k, *shape[axis + 1 :])))
            given.append(f"int64[1] k{name} = {{{k}}}")
            outputs.append(f"{kind}[{out}] y{name}, int64[{out}] i{name}")
            largest, ordered = (n + axis) % 2, 1 if n else axis % 2
            nodes.append(
                f"y{name}, i{name} = TopK<axis={axis}, largest={largest}, sorted={ordered}>(x, k{name})"
            )
            order.append((axis, ordered))
    body = "\n ".join(nodes)
    text = (
        f"({kind}[{','.join(map(str, shape))}] x) => ({', '.join(outputs)}) <{', '.join(given)}> {{ {body} }}"
    )
    model = network(text)
    with open_model(model.SerializeToString()) as runtime, compiled(model, detect()) as ours:
        expected, result = runtime.run({"x": x}), ours.run({"x": x})
    for n, (a, b) in enumerate(zip(expected, result, strict=True)):
        axis, ordered = order[n // 2]
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(*((b, a) if ordered else (np.sort(b, axis), np.sort(a, axis))))


def test_greatest_of_infinities_and_zeros() -> None:
    model = network("(float[2,7] x) => (float[2,5] y, int64[2,5] i) <int64[1] k = {5}> { y, i = TopK(x, k) }")
    x = np.array(
        [[-np.inf, 0.0, -0.0, np.inf, 1e-45, -1e-45, np.inf], [-1, -2, -0.0, 0.0, -0.0, -np.inf, -3]]
    )
    x = x.astype(np.float32)
    with open_model(model.SerializeToString()) as runtime, compiled(model, detect()) as ours:
        for a, b in zip(runtime.run({"x": x}), ours.run({"x": x}), strict=True):
            np.testing.assert_array_equal(b, a)
        x[0, 4] = np.nan  # ONNX does not say where it comes; indices stay inside
        values, places = ours.run({"x": x})
        assert places[0].tolist() == [4, 3, 6, 1, 2]
        np.testing.assert_array_equal(values[0], x[0, places[0]])


def test_no_number_is_the_greatest_whatever_its_sign() -> None:
    model = network(
        "(float[9] x) => (int64[4] i, int64[9] j) <int64[1] k = {4}, int64[1] n = {9}> {"
        " y, i = TopK(x, k)\n z, j = TopK<largest=0>(x, n) }"
    )
    x = np.array([1, -np.inf, 0, np.inf, 0, 2, 0, -1, -0.0], np.float32)
    x[[2, 4, 6]] = np.array([0xFFC00000, 0x7FC00000, 0xFFFFFFFF], np.uint32).view(np.float32)
    with compiled(model, detect()) as ours:
        best, ascending = ours.run({"x": x})
    assert best.tolist() == [2, 4, 6, 3]
    assert ascending.tolist() == [1, 7, 8, 0, 5, 3, 2, 4, 6]


def test_in_a_library_of_kernels(tmp_path: Path) -> None:
    """Neither operator calls a function of TVM's runtime."""
    model = network(
        "(float[4,40] x) => (float[4,3] y, int64[4,3] i) <int64[1] k = {3}, int64 a = {1}> {"
        " e = Exp(x)\n c = CumSum(e, a)\n y, i = TopK(c, k) }"
    )
    compiled_graph = hybrid(model, {}, detect())
    assert compiled_graph.nodes == 3
    compiled_graph.save(tmp_path / "model.onnx")
    x = np.random.default_rng(0).standard_normal((4, 40)).astype(np.float32)
    with open_model(model.SerializeToString()) as runtime, open_model(str(tmp_path / "model.onnx")) as ours:
        for a, b in zip(runtime.run({"x": x}), ours.run({"x": x}), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5)


def test_elements_of_64_bits_are_left_to_onnx_runtime() -> None:
    model = network(
        "(float[9] x, int64[9] z) => (float[9] y, int64[2] v, int64[2] i) <int64[1] k = {2}> {"
        " a = Exp(x)\n b = Add(a, x)\n c = Mul(a, b)\n y = Tanh(c)\n v, i = TopK(z, k) }"
    )
    assert hybrid(model, {}, detect()).nodes == 4


def test_other_elements_are_refused_by_name() -> None:
    model = network("(int64[9] z) => (int64[2] v, int64[2] i) <int64[1] k = {2}> { v, i = TopK(z, k) }")
    with pytest.raises(BackendError, match=r"TopK .* \(of int64\)"):
        import_model(model)
