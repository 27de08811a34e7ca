"""Regions for any number of rows: which nodes are in them, and what they compute for which sizes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.rules.harness import model
from xrlflow.onnxio import load
from xrlflow.onnxio.exporter import typed_proto

pytest.importorskip("tvm")

from xrlflow.backends import BackendError
from xrlflow.backends.library_files import library_path
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.library.hybrid import Hybrid, hybrid
from xrlflow.backends.tvm.library.kernel_library import KernelLibrary
from xrlflow.backends.tvm.library.rows import RowStructure

RNG = np.random.default_rng(0)
PRODUCTS = {
    "w": RNG.standard_normal((48, 96)).astype(np.float32),
    "v": RNG.standard_normal((96, 48)).astype(np.float32),
    "b": RNG.standard_normal(96).astype(np.float32),
}
MLP = "p = MatMul(x, w) q = Add(p, b) r = Gelu(q) s = MatMul(r, v) t = Add(s, x) y = LayerNormalization(t, g)"
# Rows below, at and above the numbers of rows of blocks, and their sums.
ROWS = (1, 2, 15, 16, 17, 100, 127, 128, 129, 145, 300)


def fitting(text: str, **weights: Any) -> list[str]:
    """The operators of a graph that treat each row alone, in its order."""
    imported = load(model(f"agraph {text}", **weights))
    proto, kinds = typed_proto(imported, imported.graph)
    structure = RowStructure(proto, kinds)
    return [node.op_type for node in proto.graph.node if structure.fits(node)]


ALONE = (
    "(float[B,T,6] x) => (y) { y = Softmax<axis=2>(x) }",
    "(float[B,T,6] x) => (y) { y = Softmax<axis=-1>(x) }",
    "(float[B,T,6] x) => (y) <int64[1] a = {-1}> { y = ReduceMean(x, a) }",
    "(float[B,T,6] x) => (y) <float[6] c = {1,2,3,4,5,6}> { y = Mul(x, c) }",
    "(float[B,T,6] x) => (y) <float[1,1,6] c = {1,2,3,4,5,6}> { y = Mul(x, c) }",
    "(float[B,T,6] x, float[B,T,1] z) => (y) { y = Mul(x, z) }",
    "(float[B,T,6] x) => (y) <float[6,2] w = {1,2,3,4,5,6,7,8,9,10,11,12}> { y = MatMul(x, w) }",
    "(float[B,T,6] x) => (y) <int64[4] s = {0,0,2,3}> { y = Reshape(x, s) }",
    "(float[B,T,6] x) => (y) <int64[2] s = {-1,6}> { y = Reshape(x, s) }",
    "(float[B,T,2,3] x) => (y) { y = Transpose<perm=[0,1,3,2]>(x) }",
    "(float[B,2,3] x) => (y) { y = Transpose<perm=[0,2,1]>(x) }",
    "(float[B,T,6] x, float[B,T,2] z) => (y) { y = Concat<axis=2>(x, z) }",
    "(int64[B,T] i) => (y) <float[3,2] w = {1,2,3,4,5,6}> { y = Gather(w, i) }",
    "(float[B,T,6] x) => (y) <int64[2] i = {5,0}> { y = Gather<axis=2>(x, i) }",
    "(float[B,2,3] x, float[B,3,4] z) => (y) { y = MatMul(x, z) }",
    "(float[B,2,4,4] x) => (y) { y = MaxPool<kernel_shape=[2,2]>(x) }",
    "(float[B,T,6] x) => (y) <int64[1] s = {1}, int64[1] e = {4}, int64[1] a = {2}> { y = Slice(x, s, e, a) }",
    "(float[B,T,6] x) => (y) <int64[6] p = {0,0,1,0,0,2}> { y = Pad(x, p) }",
    "(float[B,T,6] x) => (y) <float s = {0.1}, uint8 z = {3}> { y = QuantizeLinear(x, s, z) }",
)
"""Graphs of one node that treats each row alone."""

TOGETHER = (
    "(float[B,T,6] x) => (y) { y = Softmax<axis=1>(x) }",
    "(float[B,T] x) => (y) { y = Softmax<axis=-1>(x) }",
    "(float[B,T,6] x) => (y) <int64[1] a = {1}> { y = ReduceMean(x, a) }",
    "(float[B,T,6] x) => (y) { y = ReduceMean(x) }",
    "(float[B,T,6] x, float[T,6] z) => (y) { y = Add(x, z) }",
    "(float[B,T,6] x, float[B,1,6] z) => (y) { y = Add(x, z) }",
    "(float[B,T,6] x, float[6] z) => (y) { y = Add(x, z) }",
    "(float[B,T,6] x, float[B,6,T] z) => (y) { y = MatMul(x, z) }",
    "(float[B,T,6] x) => (y) { y = Transpose<perm=[1,0,2]>(x) }",
    "(float[B,B,6] x) => (y) { y = Transpose<perm=[1,0,2]>(x) }",
    "(float[B,T,2,3] x) => (y) { y = Transpose<perm=[0,2,1,3]>(x) }",
    "(float[B,T,6] x, float[B,T,6] z) => (y) { y = Concat<axis=1>(x, z) }",
    "(float[B,T,6] x) => (y) <int64[2] i = {1,0}> { y = Gather<axis=1>(x, i) }",
    "(float[T,6] x, int64[B] i) => (y) { y = Gather<axis=0>(x, i) }",
    "(float[B,2,4,4] x) => (y, z) { y, z = MaxPool<kernel_shape=[2,2]>(x) }",
    "(float[B,T,6] x) => (y) <int64[1] s = {1}, int64[1] e = {99}, int64[1] a = {1}> { y = Slice(x, s, e, a) }",
    "(float[B,T,6] x) => (y) <int64[6] p = {0,1,0,0,-1,0}> { y = Pad(x, p) }",
    "(float[B,T,6] x) => (y) <int64 a = {1}> { y = CumSum(x, a) }",
    "(float[B,T,6] x) => (a, b, c) { a, b, c = DynamicQuantizeLinear(x) }",
    "(float[B,6] x) => (y) <float[6,6] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,"
    "29,30,31,32,33,34,35,36}> { y = Gemm<transA=1>(x, w) }",
)
"""Graphs of one node in which a row of the result depends on other rows, or on its position."""


@pytest.mark.parametrize("text", ALONE)
def test_nodes_that_treat_rows_alone(text: str) -> None:
    assert len(fitting(text)) == 1


@pytest.mark.parametrize("text", TOGETHER)
def test_nodes_that_do_not(text: str) -> None:
    assert fitting(text) == []


def compiled(proto: onnx.ModelProto) -> Hybrid:
    return hybrid(proto, [], detect(None, 2))


def session(path: Path, kernels: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if kernels:
        options.register_custom_ops_library(str(library_path(path)))
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    proto = model(
        f"agraph (float[B,T,48] x) => (float[B,T,48] y) {{ {MLP} }}", **PRODUCTS, g=np.ones(48, np.float32)
    )
    path = tmp_path_factory.mktemp("rows") / "fast.onnx"
    made = compiled(proto)
    assert made.nodes == made.total
    assert made.rows == 128
    made.save(path)
    onnx.save(proto, path.with_name("plain.onnx"))
    return path


def given(*rows: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(sum(rows)).standard_normal((*rows, 48)).astype(np.float32)}


def test_any_number_of_rows(mlp: Path) -> None:
    fast, plain = session(mlp), session(mlp.with_name("plain.onnx"), kernels=False)
    for rows in ROWS:
        for shape in ((1, rows), (rows, 1), (3, rows)):
            expected, outcome = (s.run(None, given(*shape))[0] for s in (plain, fast))
            np.testing.assert_allclose(outcome, expected, rtol=1e-4, atol=1e-5, err_msg=str(shape))


def test_a_row_does_not_depend_on_the_others(mlp: Path) -> None:
    """Whichever blocks have it: the kernels add up in the same order."""
    fast = session(mlp)
    x = given(1, 300)["x"]
    whole = fast.run(None, {"x": x})[0]
    for part in (slice(0, 1), slice(7, 23), slice(100, 250)):
        alone = fast.run(None, {"x": x[:, part]})[0]
        np.testing.assert_allclose(alone, whole[:, part], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0)])
def test_no_rows(mlp: Path, shape: tuple[int, int]) -> None:
    assert session(mlp).run(None, given(*shape))[0].shape == (*shape, 48)


def test_sizes_are_inferred_as_names(mlp: Path) -> None:
    """ONNX Runtime knows the sizes of what follows a region."""
    proto = onnx.load(mlp)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    path = mlp.with_name("unsaid.onnx")
    onnx.save(proto, path)
    library_path(path).write_bytes(library_path(mlp).read_bytes())
    assert session(path).get_outputs()[0].shape == ["B", "T", 48]


def test_without_the_library_the_nodes_run(mlp: Path) -> None:
    plain, bare = session(mlp.with_name("plain.onnx"), kernels=False), session(mlp, kernels=False)
    np.testing.assert_array_equal(bare.run(None, given(2, 5))[0], plain.run(None, given(2, 5))[0])


def test_calls_at_the_same_time(mlp: Path) -> None:
    fast = session(mlp)
    shapes = [(1, 5), (2, 130), (1, 300), (4, 16)] * 3
    expected = [fast.run(None, given(*shape))[0] for shape in shapes]
    found: list[Any] = [None] * len(shapes)

    def run(at: int) -> None:
        found[at] = fast.run(None, given(*shapes[at]))[0]

    threads = [threading.Thread(target=run, args=[at]) for at in range(len(shapes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome, wanted in zip(found, expected):
        np.testing.assert_array_equal(outcome, wanted)


def saved(proto: onnx.ModelProto, folder: Path) -> ort.InferenceSession:
    made = compiled(proto)
    made.save(folder / "fast.onnx")
    return session(folder / "fast.onnx")


@pytest.mark.parametrize("shape", [(1, 1), (3, 2)])
def test_inputs_that_the_model_declares_equal_and_that_are_not(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    """Of another number of rows, or of as many rows in other dimensions."""
    text = "agraph (float[B,T,48] x, float[B,T,96] z) => (float[B,T,96] y) { a = MatMul(x, w) y = Add(a, z) }"
    fast = saved(model(text, w=PRODUCTS["w"]), tmp_path)
    feeds = {"x": np.zeros((2, 3, 48), np.float32), "z": np.zeros((*shape, 96), np.float32)}
    with pytest.raises(Exception, match=r"input z is not of the type and the sizes .* declares to be equal"):
        fast.run(None, feeds)


def test_rows_that_become_one_dimension(tmp_path: Path) -> None:
    text = "agraph (float[B,T,48] x) => (float[R,96] y) <int64[2] s = {-1, 48}> { r = Reshape(x, s) y = MatMul(r, w) }"
    fast = saved(model(text, w=PRODUCTS["w"]), tmp_path)
    x = given(3, 50)["x"]
    np.testing.assert_allclose(
        fast.run(None, {"x": x})[0], x.reshape(-1, 48) @ PRODUCTS["w"], rtol=1e-4, atol=1e-5
    )


def test_an_index_outside_its_table_is_an_error_in_every_block(tmp_path: Path) -> None:
    text = "agraph (int64[B,T] i) => (float[B,T,96] y) { e = Gather(t, i) y = MatMul(e, w) }"
    table = RNG.standard_normal((10, 48)).astype(np.float32)
    fast = saved(model(text, w=PRODUCTS["w"], t=table), tmp_path)
    for rows in (5, 130):
        ids = np.full((1, rows), 9)
        np.testing.assert_allclose(
            fast.run(None, {"i": ids})[0], table[ids] @ PRODUCTS["w"], rtol=1e-4, atol=1e-5
        )
        ids[0, -1] = 10
        with pytest.raises(Exception, match="10"):
            fast.run(None, {"i": ids})


@pytest.mark.parametrize("batch", [0, 1, 2, 5])
def test_images_are_rows(tmp_path: Path, batch: int) -> None:
    text = (
        "agraph (float[N,3,32,32] x) => (float[N,8] y) { c = Conv<pads=[1,1,1,1]>(x, w) r = Relu(c) "
        "p = GlobalAveragePool(r) f = Flatten(p) y = MatMul(f, v) }"
    )
    weights = {
        "w": RNG.standard_normal((16, 3, 3, 3)).astype(np.float32),
        "v": RNG.standard_normal((16, 8)).astype(np.float32),
    }
    proto = model(text, **weights)
    onnx.save(proto, tmp_path / "plain.onnx")
    fast, plain = saved(proto, tmp_path), session(tmp_path / "plain.onnx", kernels=False)
    x = {"x": RNG.standard_normal((batch, 3, 32, 32)).astype(np.float32)}
    np.testing.assert_allclose(fast.run(None, x)[0], plain.run(None, x)[0], rtol=1e-4, atol=1e-5)


def test_ones_before_merged_rows(tmp_path: Path) -> None:
    text = (
        "agraph (float[N,48] x) => (float[1,N,96] y) <int64[1] a = {0}> "
        "{ p = MatMul(x, w) r = Relu(p) y = Unsqueeze(r, a) }"
    )
    fast = saved(model(text, w=PRODUCTS["w"]), tmp_path)
    x = given(50)["x"]
    expected = np.maximum(x @ PRODUCTS["w"], 0)[None]
    np.testing.assert_allclose(fast.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)


def test_weights_that_nodes_make(tmp_path: Path) -> None:
    text = "agraph (float[N,48] x) => (float[N,96] y) { c = Cast<to=1>(w) p = MatMul(x, c) y = Relu(p) }"
    weights = PRODUCTS["w"].astype(np.float16)
    proto = model(text, w=weights)
    assert compiled(proto).nodes == 3
    x = given(50)["x"]
    outcome = saved(proto, tmp_path).run(None, {"x": x})[0]
    np.testing.assert_allclose(outcome, np.maximum(x @ weights.astype(np.float32), 0), rtol=1e-4, atol=1e-5)


def test_blocks_share_packed_weights() -> None:
    weights = RNG.standard_normal((256, 500)).astype(np.float32)
    made = compiled(model("agraph (float[N,256] x) => (y) { p = MatMul(x, w) y = Relu(p) }", w=weights))
    assert isinstance(made.library, KernelLibrary)
    assert weights.nbytes <= sum(each.nbytes for each in made.library.constants) < 1.1 * weights.nbytes


def test_a_model_without_rows_has_no_kernels() -> None:
    with pytest.raises(
        BackendError, match="no part of the model has products with weights and computes each row alone"
    ):
        compiled(model("agraph (float[N,T] x) => (float[N,T] y) { y = Softmax<axis=1>(x) }"))
