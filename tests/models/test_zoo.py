"""Every network of the zoo is a valid model that runs, and its parameters do what they say."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import models
from models.__main__ import main
from models.builder import divisible, spread

pytestmark = pytest.mark.corpus

FOLDING = [name for name, model in models.ZOO.items() if "fold_batchnorm" in model.options]


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    """The outputs for random inputs; token ids and masks are small integers."""
    rng = np.random.default_rng(0)
    feeds = {}
    for entry in model.graph.input:
        shape = [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
        if entry.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            feeds[entry.name] = rng.integers(0, 2, shape)
        else:
            feeds[entry.name] = rng.standard_normal(shape, dtype=np.float32)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options).run(None, feeds)


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("name", models.ZOO)
def test_small_build_is_valid_and_runs(name: str) -> None:
    model = models.small(name)
    onnx.checker.check_model(model, full_check=True)
    assert model.ByteSize() < 10e6
    for output in run(model):
        assert np.isfinite(output).all()
        assert 0.01 < output.std() < 10


@pytest.mark.parametrize("name", models.ZOO)
def test_seed_fixes_the_weights(name: str) -> None:
    first, again, other = models.small(name), models.small(name), models.small(name, seed=1)
    assert first.SerializeToString() == again.SerializeToString()
    assert operators(first) == operators(other)
    assert first.SerializeToString() != other.SerializeToString()


@pytest.mark.parametrize("name", models.ZOO)
def test_depth_changes_the_number_of_nodes(name: str) -> None:
    model = models.ZOO[name]
    deeper = models.build(name, model.small_depth + 1, **model.small_options)
    assert len(deeper.graph.node) > len(models.small(name).graph.node)
    onnx.checker.check_model(models.build(name, 1, **model.small_options), full_check=True)


@pytest.mark.parametrize("name", models.ZOO)
def test_no_two_float_weights_are_equal(name: str) -> None:
    floats = [
        onnx.numpy_helper.to_array(tensor).tobytes()
        for tensor in models.small(name).graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    ]
    assert len(set(floats)) == len(floats)


@pytest.mark.parametrize("name", FOLDING)
def test_folded_batchnorm_is_the_same_function(name: str) -> None:
    folded, kept = models.small(name), models.small(name, fold_batchnorm=False)
    assert operators(kept)["BatchNormalization"] > 0 == operators(folded)["BatchNormalization"]
    for a, b in zip(run(folded), run(kept), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize("name", ["gpt2", "dalle"])
def test_last_logits_are_the_last_of_all(name: str) -> None:
    all_ = run(models.small(name))[0][:, -1:]
    last = run(models.small(name, last=True))[0]
    np.testing.assert_allclose(last, all_, rtol=0, atol=1e-5 * np.abs(all_).max())


@pytest.mark.parametrize("name", ["bert", "resnext50", "nasnet-a", "gru-unrolled"])
def test_depth_for_a_number_of_nodes(name: str) -> None:
    model = models.ZOO[name]
    built = models.build(name, models.depth_for(name, 1000), **model.small_options)
    assert 980 <= len(built.graph.node) <= 1020


def test_depths_of_the_papers() -> None:
    resnet = operators(models.build("resnet50", width=16, image=32))
    assert (resnet["Conv"], resnet["Gemm"], resnet["MaxPool"]) == (53, 1, 1)
    assert operators(models.build("mobilenetv2", width=16, image=32))["Conv"] == 52
    assert operators(models.build("efficientnet-b0", width=16, image=32))["Conv"] == 81
    assert operators(models.build("inceptionv3", width=4, image=75))["Conv"] == 94
    assert operators(models.build("squeezenet", width=16, image=64))["Conv"] == 26
    assert operators(models.build("nasrnn", width=32))["MatMul"] == 5 * 16
    assert operators(models.build("bert", width=64))["LayerNormalization"] == 25


def test_resnext_has_four_channels_in_a_group_and_twice_as_many_each_stage() -> None:
    for width in (16, 64):
        model = models.build("resnext50", 4, width=width, image=32)
        shapes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
        grouped = [
            shapes[node.input[1]][1]
            for node in model.graph.node
            if any(attribute.name == "group" and attribute.i == width // 2 for attribute in node.attribute)
        ]
        assert grouped == [4, 8, 16, 32]


@pytest.mark.parametrize(
    ("name", "options"), [("bert", {"tokens": 32}), ("gpt2", {"tokens": 16}), ("vit", {})]
)
def test_builders_have_the_form_of_the_exports(name: str, options: dict[str, int]) -> None:
    pytest.importorskip("transformers")
    from models.exported import export

    exported = export(name, 1, width=64, **options)
    assert operators(exported) == operators(models.build(name, 1, width=64, **options))


def test_errors_list_what_there_is() -> None:
    with pytest.raises(
        models.ZooError, match=r"no network is called 'resnet'.*resnet18.*transformer-transducer"
    ):
        models.build("resnet")
    with pytest.raises(models.ZooError, match="at least 1, not 0"):
        models.build("bert", 0)
    with pytest.raises(models.ZooError, match=r"nasrnn has no option image; it has: width"):
        models.build("nasrnn", image=3)


def test_command_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "net.onnx"
    assert main(["build", "squeezenet", "-o", str(target), "--small"]) == 0
    assert onnx.load(target) == models.small("squeezenet")
    assert main(["build", "lstm-unrolled", "-o", str(target), "--nodes", "200", "--width", "16"]) == 0
    assert abs(len(onnx.load(target).graph.node) - 200) < 20
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in models.ZOO)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["bert", "--depth", "0"],
        ["bert", "--depth", "1", "--nodes", "9"],
        ["nasrnn", "--image", "3"],
        ["resnet18", "--exporter", "dynamo"],
    ],
)
def test_command_line_errors(arguments: list[str], tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "net.onnx"
    assert main(["build", *arguments, "-o", str(target)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not target.exists()


def test_spread_and_divisible() -> None:
    assert spread(16, (3, 4, 6, 3)) == [3, 4, 6, 3]
    assert all(sum(spread(total, (5, 5, 5))) == total for total in range(1, 40))
    assert [divisible(channels) for channels in (3, 16, 18.9, 24)] == [8, 16, 24, 24]
