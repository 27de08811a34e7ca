"""Models that TVM's importer or its passes would misunderstand."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx.numpy_helper
import onnx.parser
import pytest

import xrlflow
from tests.backends.tvm import node_tests
from tests.backends.tvm.kernels.test_kernels import network, numbers
from tests.backends.tvm.kernels.test_pooling import compare
from tests.levels import whole
from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.tvm import Tvm, detect
from xrlflow.backends.tvm.library.hybrid import hybrid
from xrlflow.backends.tvm.lowering import operators

pytestmark = pytest.mark.measures

IMAGES = "(float[1,8,12,12] x, float[8,8,3,3] w)"


@pytest.mark.parametrize("nodes", ["b = Dropout(a)", "b, m = Dropout(a)", "b, mask = Dropout(a)"])
def test_a_dropout_between_layouts_keeps_everything(nodes: str) -> None:
    results = "float[1,8,10,10] y" + (", bool[1,8,10,10] mask" if "mask" in nodes else "")
    text = f"{IMAGES} => ({results}) {{ a = Conv(x, w)\n {nodes}\n y = Relu(b) }}"
    model = compare(text, detect())
    compiled_graph = hybrid(model, {}, detect())
    assert (compiled_graph.nodes, compiled_graph.remarks) == (3, ())


@pytest.mark.parametrize("trains", [True, False])
def test_a_dropout_that_may_drop_is_refused(trains: bool) -> None:
    model = network("(float[64] x) => (float[64] y) { y = Dropout(x, ratio, mode) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "ratio"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.bool_(trains), "mode"))
    if not trains:
        x = np.arange(64, dtype=np.float32)
        (y,) = Tvm().compile(model.SerializeToString()).run({"x": x})
        np.testing.assert_array_equal(y, x)
        return
    with pytest.raises(
        BackendError, match=r"TVM cannot lower Dropout y \(in training mode\): use optimize --backend"
    ):
        Tvm().compile(model.SerializeToString())
    with pytest.raises(BackendError, match="no part of the model can be lowered"):
        hybrid(model, {}, detect())


@pytest.mark.parametrize(
    "text",
    [
        f"{IMAGES} => (float[1,8,10,10] y, int64[4] s) {{ y = Conv(x, w)\n s = Shape(y) }}",
        "(float[3,4] x) => (int64[2] s, float[3,4] y) { y = Relu(x)\n s = Shape(y) }",
        "(float[3,4] x) => (int64[2] s) { s = Shape(x) }",
        "(float[3,4] x) => (int64[1] s, int64 n) { s = Shape<start=1>(x)\n n = Size(x) }",
        "(float[3,4] x) => (int64 n) <int64 one = {1}> { s = Shape(x)\n n = Gather(s, one) }",
    ],
)
def test_sizes_are_outputs(text: str) -> None:
    compare(text, detect())


def test_a_size_that_depends_on_values_is_no_output() -> None:
    model = network("(float[3,4] x) => (int64[2] sizes) { i = NonZero(x)\n sizes = Shape(i) }")
    with pytest.raises(BackendError, match="TVM cannot compile output sizes, a size that depends on values"):
        Tvm().compile(model.SerializeToString())


def after_a_convolution(node: str, weights: str = "", outputs: str = "float[p,q,r,s] y") -> str:
    """A graph in which a node reads an image that a convolution made, with channels last."""
    return (
        f"(float[2,8,6,5] x, float[8,8,1,1] w) => ({outputs}) <int64 none = {{0}}{weights}>"
        f" {{ a = Conv(x, w)\n {node} }}"
    )


@pytest.mark.parametrize("axes", ["-1, -2", "-1", "3"])
def test_dimensions_that_are_left_out(axes: str) -> None:
    """Axes may be negative, as exporters write them."""
    count = axes.count(",") + 1
    text = after_a_convolution(
        "b = ReduceMean(a, axes)\n c = Squeeze(b, axes)\n y = Relu(c)",
        f", int64[{count}] axes = {{{axes}}}",
        "float[p] y",
    )
    compare(text, detect())


@pytest.mark.parametrize("axis", whole(range(-4, 0), (-3, -1)))
@pytest.mark.parametrize("outputs", whole(["y", "y, mean, deviation"], ("y, mean, deviation",)))
def test_a_normalized_image(axis: int, outputs: str) -> None:
    """The normalisation covers several axes, and a change of layouts moves one of them. Scale and bias may have fewer
    dimensions."""
    shape = ",".join(map(str, (2, 8, 6, 5)[axis:]))
    named = ", ".join(f"float[p,q,r,s] {name}" for name in outputs.split(", "))
    node = f"{outputs} = LayerNormalization<axis={axis}>(a, scale, bias)"
    text = after_a_convolution(node, "", named).replace(
        ") =>", f", float[{shape}] scale, float[{shape}] bias) =>", 1
    )
    compare(text, detect())
    compare(text.replace(f"float[{shape}] bias", "float[5] bias"), detect())
    compare(text.replace(f", float[{shape}] bias", "").replace(", bias", ""), detect())


def test_a_scale_that_differs_between_rows_is_refused() -> None:
    model = network("(float[4,8] x, float[4,8] s) => (float[4,8] y) { y = LayerNormalization(x, s) }")
    with pytest.raises(
        BackendError, match=r"LayerNormalization y \(with a scale or bias that differs between"
    ):
        Tvm().compile(model.SerializeToString())


@pytest.mark.parametrize("axis", range(-3, 0))
def test_root_mean_squares(axis: int) -> None:
    shape = ",".join(map(str, (2, 7, 20)[axis:]))
    text = f"(float[2,7,20] x, float[{shape}] s) => (float[2,7,20] y) {{ y = RMSNormalization<axis={axis}>(x, s) }}"
    model = network(text)
    model.opset_import[0].version, model.ir_version = 23, 11
    feeds = numbers(model)
    with open_model(model.SerializeToString(), threads=1) as runtime:
        (expected,) = runtime.run(feeds)
    (result,) = Tvm().compile(model.SerializeToString()).run(feeds)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("pad", ["NOTSET", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("shape", [(12, 10), (11, 9), (13, 11), (14, 12)])
def test_a_transposed_convolution_to_a_shape(shape: tuple[int, int], pad: str) -> None:
    attributes = f'strides=[2,2], output_shape=[{shape[0]},{shape[1]}], auto_pad="{pad}"'
    text = (
        "(float[1,8,6,5] x, float[8,4,3,3] w, float[4] b) => (float[1,4,p,q] y)"
        f" {{ y = ConvTranspose<{attributes}>(x, w, b) }}"
    )
    compare(text, detect())


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("scales = Identity(half)\n y = Resize(a,, scales)", "by a scale that does not give whole numbers"),
        ("y = Resize<antialias=1>(a,, double)", "with antialias"),
        ('y = Resize<keep_aspect_ratio_policy="not_larger">(a,,, size)', "that keeps the ratio of sides"),
        ("y = Resize(a,, batch)", "of images or channels"),
        (
            'y = Resize<coordinate_transformation_mode="half_pixel_symmetric">(a,, double)',
            "with half_pixel_symmetric",
        ),
        (
            'y = Resize<coordinate_transformation_mode="tf_crop_and_resize">(a, box,, line)',
            "of corners to one pixel",
        ),
        ('y = Resize<coordinate_transformation_mode="align_corners">(a,,, line)', "of corners to one pixel"),
        (
            'y = Resize<coordinate_transformation_mode="tf_half_pixel_for_nn", mode="linear">(a,,, high)',
            "that moves pixels along an axis that keeps its size",
        ),
        (
            'y = Resize<coordinate_transformation_mode="tf_crop_and_resize">(a, box,, high)',
            "that moves pixels along an axis that keeps its size",
        ),
        ('y = Resize<axes=[2,3], coordinate_transformation_mode="half_pixel">(a,, two)', ""),
        ("y = Resize<axes=[-1,2]>(a,,, sides)", ""),
        ('y = Resize<mode="linear">(a,, double)', ""),
        ("y = Resize(a, empty, empty, size)", ""),
        ('y = Resize<coordinate_transformation_mode="align_corners", mode="linear">(a,, half)', ""),
    ],
)
def test_an_image_is_resized_as_it_says_or_refused(node: str, reason: str) -> None:
    weights = (
        ", float[4] half = {1, 1, 0.5, 0.5}, float[4] double = {1, 1, 2, 2}, float[4] batch = {2, 1, 2, 2},"
        " float[2] two = {2, 2}, float[0] empty = {}, int64[4] size = {2, 8, 12, 10}, int64[2] sides = {10, 12},"
        " int64[4] line = {2, 8, 1, 10}, int64[4] high = {2, 8, 12, 5}, float[8] box = {0, 0, 0.1, 0.1, 1, 1, 0.8, 0.8}"
    )
    text = after_a_convolution(node, weights)
    if not reason:
        compare(text, detect())
        return
    with pytest.raises(BackendError, match=rf"TVM cannot lower Resize y \({reason}\)"):
        Tvm().compile(network(text).SerializeToString())


@pytest.mark.parametrize(
    ("signature", "node", "reason"),
    [
        (
            "float[1,1,5,5] x) => (float[1,1,2,2] y", "LpPool<ceil_mode=1, kernel_shape=[2,2], strides=[3,3]>(x)",
            "with ceil_mode",
        ),
        ("float[0,3] x) => (float[3] y", "ReduceMax<keepdims=0>(x, axis)", "of no elements"),
        ("float[3] x, float[3] z) => (float[3] y", "Mod(x, z)", "of floats without fmod"),
        ("float[3] x) => (float8e5m2[3] y", "Cast<to=19>(x)", "a tensor of FLOAT8E5M2"),
        ("int64[3] x) => (float[3,4] y", "OneHot(x, depth, values)", r"gives \w+ in the place of float32"),
    ],
)  # fmt: skip
def test_what_is_imported_as_something_else_is_refused(signature: str, node: str, reason: str) -> None:
    text = f"({signature}) <int64[1] axis = {{0}}, int64 depth = {{4}}, float[2] values = {{0, 1}}> {{ y = {node} }}"
    with pytest.raises(BackendError, match=reason):
        Tvm().compile(network(text).SerializeToString())


def test_a_result_of_another_type_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The types of TVM's importer are compared with those that ONNX infers. The other nodes get kernels."""
    from tvm import relax

    def halves(node: Any) -> Any:
        return node.emit(relax.op.astype(node.inputs[0], "float16"))

    def shorter(node: Any) -> Any:
        return node.emit(relax.op.strided_slice(node.inputs[0], [0], [0], [2]))

    model = network(
        "(float[3,4] x) => (float[3,4] y) { a = Exp(x)\n b = Neg(a)\n c = Abs(b)\n d = Elu(c)\n y = Erf(d) }"
    )
    for own, said in (
        (halves, "float16 in the place of float32"),
        (shorter, r"[2, 4] in the place of [3, 4]"),
    ):
        monkeypatch.setattr(operators, "_LOWERED", {**operators._LOWERED, "Abs": own})
        compiled_graph = hybrid(model, {}, detect())
        assert [region.nodes for region in compiled_graph.regions] == [(0, 1), (3, 4)]
        (remark,) = compiled_graph.remarks
        assert said in remark


def test_node_tests_give_what_they_expect() -> None:
    """The first test of each operator that is changed or refused here. `tests/backends/tvm/node_tests.py` runs all of
    them."""
    left = {*operators._LOWERED, "AveragePool", "Cast", "Clip", "LpPool", "Max", "MaxPool", "Mean", "OneHot"}
    tried: Counter[str] = Counter()
    for case in node_tests.cases():
        if case.operator in left and "expanded" not in case.name and tried[case.operator] < 3:
            result, reason = node_tests.outcome(case)
            assert result != "wrong", f"{case.name}: {reason}"
            tried[case.operator] += 1
            if result == "right":
                left.remove(case.operator)
    assert left <= {"Mod", "OneHot", "RoiAlign"}


@pytest.mark.parametrize("sides", ["", "<detect_negative=0>", "<detect_positive=0>"])
def test_infinities_of_either_sign(sides: str) -> None:
    model = network(f"(float[4] x) => (bool[4] y) {{ y = IsInf{sides}(x) }}")
    x = np.float32([-np.inf, np.inf, np.nan, 1])
    with open_model(model.SerializeToString(), threads=1) as runtime:
        (expected,) = runtime.run({"x": x})
    np.testing.assert_array_equal(Tvm().compile(model.SerializeToString()).run({"x": x})[0], expected)


def test_kernels_stand_around_a_node_that_is_refused(tmp_path: Path) -> None:
    """Only this node is left to ONNX Runtime, not the whole region around it."""
    text = after_a_convolution(
        "b = Relu(a)\n c = Resize(b,, half)\n d = Conv(c, w)\n y = Relu(d)",
        ", float[4] half = {1, 1, 0.5, 0.5}",
    )
    model = network(text)
    compiled_graph = hybrid(model, {}, detect())
    assert sorted(len(region.nodes) for region in compiled_graph.regions) == [2, 2]
    (remark,) = compiled_graph.remarks
    assert remark.startswith("Resize c is left to ONNX Runtime: TVM cannot lower Resize c")
    assert "--backend" not in remark, "the other nodes have kernels"
    compiled_graph.save(tmp_path / "fast.onnx")
    feeds = numbers(model)
    with open_model(model.SerializeToString(), threads=1) as runtime:
        (expected,) = runtime.run(feeds)
    (result,) = xrlflow.session(tmp_path / "fast.onnx").run(None, feeds)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)


BATCH_NORM = (
    "(float[2,8,5,5] x, float[8] s, float[8] b, float[8] m, float[8] v) =>"
    " (float[2,8,5,5] y, float[8] n, float[8] w) { r = Relu(x)\n t = Tanh(r)\n"
    " y, n, w = BatchNormalization<training_mode=1>(t, s, b, m, v) }"
)


def test_statistics_of_a_batch_are_left_to_the_runtime() -> None:
    """ONNX Runtime computes the statistics from the input, but TVM's importer would use the fixed ones."""
    with pytest.raises(BackendError, match=r"TVM cannot lower BatchNormalization y \(in training mode\)"):
        Tvm().compile(network(BATCH_NORM).SerializeToString())
    compiled_graph = hybrid(network(BATCH_NORM), {}, detect())
    assert [node.op_type for node in compiled_graph.model.graph.node] == ["Region_0", "BatchNormalization"]


def test_a_region_that_is_not_given_is_no_region() -> None:
    text = (
        "(float[1,2,6,6] x) => (float[1,2,4,4] y) <int64[4] to = {1, 2, 4, 4}> "
        '{ y = Resize<mode="linear", coordinate_transformation_mode="tf_crop_and_resize">(x, , , to) }'
    )
    with pytest.raises(BackendError, match=r"TVM cannot lower Resize y \(to a region that is not given\)"):
        Tvm().compile(network(text).SerializeToString())


def test_tvm_is_loaded_without_torch() -> None:
    """Torch takes longer to load than TVM. If it is imported later, it is loaded then. If it was imported before, it
    remains."""
    program = (
        "import sys\n{first}\nfrom xrlflow.backends.tvm.toolchain.import_tvm import tvm\ntvm()\n"
        "print('torch' in sys.modules)\nimport torch\nprint(float(torch.ones(2) @ torch.ones(2)))"
    )
    for first, loaded in (("", "False"), ("import torch", "True")):
        told = subprocess.run(
            [sys.executable, "-c", program.format(first=first)], capture_output=True, text=True, check=True
        )
        assert told.stdout.split() == [loaded, "2.0"]
