"""Bad input gets one line that names the file and says what to do."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.onnxio.support import info, model
from tests.onnxio.test_roundtrip import mlp
from xrlflow import onnxio
from xrlflow.onnxio.errors import ModelError


def refused(path: Path, pattern: str) -> None:
    with pytest.raises(ModelError, match=pattern) as caught:
        onnxio.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", "empty"),
        (b"this is a text, not a model\n" * 50, "not an ONNX model"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)), "not an ONNX model"),
        (b"{}", "not an ONNX model"),
    ],
)
def test_files_that_are_no_models(tmp_path: Path, content: bytes, pattern: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    refused(path, pattern)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.9999])
def test_a_truncated_file(tmp_path: Path, share: float) -> None:
    content = mlp().SerializeToString()
    path = tmp_path / "m.onnx"
    path.write_bytes(content[: int(len(content) * share)])
    refused(path, "cut off")


def test_a_file_that_is_missing_or_a_folder(tmp_path: Path) -> None:
    refused(tmp_path / "none.onnx", "no such file")
    refused(tmp_path, "folder")


def external(folder: Path) -> Path:
    path = folder / "m.onnx"
    onnx.save(mlp(), path, save_as_external_data=True, location="m.data")
    return path


def test_missing_external_data(tmp_path: Path) -> None:
    path = external(tmp_path)
    os.unlink(tmp_path / "m.data")
    refused(path, r"'m\.data' cannot be read.*next to the model")


def test_external_data_that_is_too_short(tmp_path: Path) -> None:
    path = external(tmp_path)
    os.truncate(tmp_path / "m.data", 5000)
    refused(path, "too short")


@pytest.mark.parametrize("location", ["../m.data", "{}/m.data", "sub/../../m.data", "", "link"])
def test_external_data_outside_the_folder(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "inner"
    (folder / "sub").mkdir(parents=True)
    path = external(folder)
    os.rename(folder / "m.data", tmp_path / "m.data")
    os.symlink(tmp_path / "m.data", folder / "link")
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location.format(tmp_path)
    path.write_bytes(proto.SerializeToString())
    refused(path, "outside the model's folder, which is refused")


def test_a_model_may_be_a_link_into_a_store(tmp_path: Path) -> None:
    """As caches of downloads have it: the model and its data are links to files that lie together."""
    store, view = tmp_path / "store", tmp_path / "view"
    store.mkdir()
    view.mkdir()
    external(store)
    for name in ("m.onnx", "m.data"):
        os.symlink(store / name, view / name)
    assert onnxio.load(view / "m.onnx").graph.node_count == 3


def test_external_data_of_a_proto_in_memory(tmp_path: Path) -> None:
    proto = onnx.load(external(tmp_path), load_external_data=False)
    with pytest.raises(ModelError, match="pass the model's path"):
        onnxio.load(proto)


@pytest.mark.parametrize(
    ("shapes", "pattern"),
    [
        ({"z": (1, 8)}, "no input 'z'.*inputs are x"),
        ({"x": (1, 8, 1)}, r"2 dimensions \(batch,8\)"),
        ({"x": (1, 9)}, "dimension 1 of input 'x' is 8"),
        ({"x": (0, 8)}, "positive"),
    ],
)
def test_shapes_that_do_not_fit(shapes: dict[str, tuple[int, ...]], pattern: str) -> None:
    with pytest.raises(ModelError, match=pattern):
        onnxio.load(mlp(), shapes=shapes)


def test_shapes_that_contradict_each_other() -> None:
    inputs = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ("batch", 3)) for n in "ab"]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ("batch", 3))
    proto = model([helper.make_node("Add", ["a", "b"], ["y"])], inputs, [output])
    with pytest.raises(ModelError, match="contradict each other: dimension 'batch' would be 2 and 3"):
        onnxio.load(proto, shapes={"a": (2, 3), "b": (3, 3)})


def test_a_node_that_reads_what_nothing_makes() -> None:
    x = np.zeros(3, np.float32)
    proto = model([helper.make_node("Relu", ["ghost"], ["y"], name="n")], {"x": x}, [info("y", x)])
    with pytest.raises(ModelError, match=r"node 'n' \(Relu\) reads 'ghost'"):
        onnxio.load(proto)


def test_a_cycle() -> None:
    x = np.zeros(3, np.float32)
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    with pytest.raises(ModelError, match="on a cycle"):
        onnxio.load(model(nodes, {"x": x}, [info("b", x)]))


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    imported = onnxio.load(mlp())
    with pytest.raises(ModelError, match=r"cannot be written \(No such file or directory\): choose another"):
        onnxio.save(imported, imported.graph, tmp_path / "none" / "out.onnx")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelError, match="cannot be written"):
        onnxio.save(imported, imported.graph, tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(tmp_path / "folder") == []


MALFORMED = {
    "reads 'q', which nothing makes": "agraph (float[2] x) => (float[2] y) { y = Add(x, q) }",
    "has a dimension of 9223372036854775807": "agraph (int64[9223372036854775807] s) => (y) { y = Abs(s) }",
    "has 2 outputs and says 2147483647": "agraph (float[4] x) => (y, z) { y, z = Split<num_outputs=2147483647>(x) }",
    "makes 'y' .Constant. has no value": "agraph () => (y) { y = Constant() }",
}


@pytest.mark.parametrize("pattern", MALFORMED)
def test_what_is_no_model_is_told_in_a_line_that_names_the_node(tmp_path: Path, pattern: str) -> None:
    path = tmp_path / "m.onnx"
    head = '<ir_version: 10, opset_import: ["": 21]> '
    path.write_bytes(onnx.parser.parse_model(head + MALFORMED[pattern]).SerializeToString())
    refused(path, pattern)


def test_an_input_without_a_type_and_text_that_is_not_utf8(tmp_path: Path) -> None:
    proto = mlp()
    proto.graph.input[0].ClearField("type")
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    refused(path, "has no type")
    path.write_bytes(mlp().SerializeToString().replace(b"MatMul", b"Mat\xfful"))
    refused(path, "has a name that is not UTF-8|not an ONNX model")


def test_a_negative_dimension_is_one_that_is_not_known() -> None:
    proto = mlp()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    imported = onnxio.load(proto)
    assert isinstance(imported.graph.type(imported.graph.inputs[0]).shape[0], str)
