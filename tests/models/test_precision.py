"""Low-precision forms: every file loads, runs, and is optimised; and the tools wrote what the forms promise."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

import models
import xrlflow
from models import exports, precision, training
from models.__main__ import main
from models.precision import FILES, FORMS, HELD_OUT, TRAINED
from tests.levels import whole
from xrlflow.onnxio import load
from xrlflow.verify import Status

pytestmark = pytest.mark.corpus

QUICK = (
    "squeezenet-float16",
    "mobilenetv2-int8-dynamic",
    "resnet18-qdq-s8s8",
    "resnet18-qoperator-u8s8",
    "bert-classifier-tensorrt",
    "mobilenetv2-tflite",
    "bert-classifier-int4-blocks",
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("exports")
        patch.setattr(exports, "cache_folder", lambda: folder)
        yield


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], optimised: bool = True) -> list[np.ndarray]:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, feeds)


def deviation(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The greatest, in parts of an output's greatest number."""
    return max(
        float(np.abs(a.astype(np.float64) - b).max() / np.abs(b.astype(np.float64)).max())
        for a, b in zip(found, wanted, strict=True)
    )


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("name", whole(FILES, QUICK))
def test_file_runs_and_is_optimised(name: str) -> None:
    file = FILES[name]
    if file.network in exports.EXPORTS:
        pytest.importorskip("transformers")
    model = precision.build(name, small=True)
    assert model.ByteSize() < 10e6
    assert load(model).graph.outputs
    feeds = file.inputs(model, small=True)
    original = run(model, feeds)
    float32 = file.float32(small=True)
    # Four bits without calibration, and a network of random weights, are 12% off.
    assert deviation(original, run(float32, file.inputs(float32, small=True))) < 0.2

    result = xrlflow.optimize(model, search="greedy", cost="roofline", measure=False, backend="onnxruntime")
    assert result.report.returned_original or result.verification.status is Status.VERIFIED
    # What the result means, without what ONNX Runtime's optimiser makes of either model.
    unoptimised = [run(m, feeds, optimised=False) for m in (result.model, model)]
    assert deviation(*unoptimised) < (2e-3 if file.form.startswith("float16") else 1e-5)


@pytest.mark.parametrize("name", ["resnet18-float16", "resnet18-qdq-u8s8", "bert-classifier-int4"])
def test_a_seed_fixes_a_file(name: str) -> None:
    assert precision.build(name, small=True) == precision.build(name, small=True)
    assert precision.build(name, small=True) != precision.build(name, small=True, seed=1)


def test_conversion_leaves_the_network_as_it_is() -> None:
    network = models.small("resnet18")
    for form in FORMS:
        precision.convert(network, form)
        assert network == models.small("resnet18"), form


def test_half_is_held_out_and_never_trained_on() -> None:
    assert set(precision.names()) > HELD_OUT
    assert abs(len(HELD_OUT) - len(precision.names()) / 2) <= 1
    assert 0 < len(HELD_OUT & set(TRAINED)) < len(TRAINED)
    assert all(name in HELD_OUT for name, f in FILES.items() if f.network in training.UNSEEN)
    assert all(name in HELD_OUT for name, f in FILES.items() if f.network in exports.HELD_OUT)
    sources = list(training.precision_sources())
    assert {s.name for s in sources} == set(FILES) - HELD_OUT
    assert next(s for s in sources if s.name == "squeezenet-qdq-s8s8").build().node_count == 95


def test_there_are_files_of_every_kind() -> None:
    assert len(precision.names()) >= 40
    assert len(TRAINED) == 8
    assert {f.form for f in FILES.values()} == set(FORMS) - {"qoperator-u8s8-channels", "qoperator-u8u8"}


# ---------------------------------------------------------------- forms


def small(form: str, network: str = "mobilenetv2") -> onnx.ModelProto:
    return precision.convert(models.small(network), form)


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def zero_points(model: onnx.ModelProto, op: str) -> list[np.ndarray]:
    known = constants(model)
    return [known[n.input[2]] for n in model.graph.node if n.op_type == op and n.input[2] in known]


def test_float16_has_float_inputs_only_where_they_are_kept() -> None:
    for form, kind in (("float16", onnx.TensorProto.FLOAT16), ("float16-float-io", onnx.TensorProto.FLOAT)):
        model = small(form)
        values = [*model.graph.input, *model.graph.output]
        assert {v.type.tensor_type.elem_type for v in values} == {kind}
        assert {a.dtype for n, a in constants(model).items() if "weight" in n} == {np.dtype(np.float16)}


@pytest.mark.parametrize(("form", "kind"), [("int8-dynamic", np.int8), ("int8-dynamic-u8", np.uint8)])
def test_dynamic_weights(form: str, kind: type) -> None:
    model = small(form)
    assert operators(model)["ConvInteger"] == operators(models.small("mobilenetv2"))["Conv"]
    assert {
        z.dtype
        for n in model.graph.node
        if n.op_type == "ConvInteger"
        for z in [constants(model)[n.input[3]]]
    } == {np.dtype(kind)}


@pytest.mark.parametrize("form", [f for f in FORMS if f.startswith(("qdq", "qoperator"))])
def test_static_types_and_channels(form: str) -> None:
    model = small(form)
    kinds = {"u": np.dtype(np.uint8), "s": np.dtype(np.int8)}
    activations, weights = (kinds[form.split("-")[1][i]] for i in (0, 2))
    assert {z.dtype for z in zero_points(model, "QuantizeLinear")} == {activations}
    known = constants(model)
    if form.startswith("qdq"):
        makers = {n.output[0]: n for n in model.graph.node}
        found = [makers[n.input[1]] for n in model.graph.node if n.op_type == "Conv"]
        scales, values = [known[n.input[1]] for n in found], [known[n.input[0]] for n in found]
    else:
        found = [n for n in model.graph.node if n.op_type == "QLinearConv"]
        scales, values = [known[n.input[4]] for n in found], [known[n.input[3]] for n in found]
    assert {v.dtype for v in values} == {weights}
    sizes = [v.shape[0] if form.endswith("channels") else 1 for v in values]
    assert [s.size for s in scales] == sizes


def test_tensorrt_style() -> None:
    """Symmetric s8 before products alone, float weights behind Q-DQ by channel, no Q at the sums."""
    model = small("tensorrt")
    assert {(z.dtype, int(np.abs(z).max())) for z in zero_points(model, "QuantizeLinear")} == {
        (np.dtype(np.int8), 0)
    }
    readers = {name: node.op_type for node in model.graph.node for name in node.input}
    pairs = [n for n in model.graph.node if n.op_type == "DequantizeLinear"]
    assert {readers[n.output[0]] for n in pairs} == {"Conv", "Gemm"}
    before = [n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] in constants(model)]
    assert len(before) == operators(model)["Conv"] + operators(model)["Gemm"]
    assert operators(model)["Clip"] == operators(models.small("mobilenetv2"))["Clip"]


def test_tflite_style() -> None:
    """Bytes with zero points everywhere, one scale a tensor, and no Relu6 but in the ranges."""
    model = small("tflite")
    points = zero_points(model, "DequantizeLinear")
    assert all(p.size == 1 for p in points)
    assert {p.dtype for p in points} == {np.dtype(np.uint8), np.dtype(np.int32)}  # biases have 32 bits
    assert len({int(p) for p in points if p.dtype == np.uint8} - {0, 128}) > 5
    assert operators(model)["Clip"] == 0 < operators(models.small("mobilenetv2"))["Clip"]


def test_weights_of_four_bits() -> None:
    products = operators(small("int4", "bert-classifier"))["MatMulNBits"]
    assert products > 0
    for form, level in (("int4", 0), ("int4-level4", 4)):
        nodes = [n for n in small(form, "bert-classifier").graph.node if n.op_type == "MatMulNBits"]
        levels = {a.i for n in nodes for a in n.attribute if a.name == "accuracy_level"} or {0}
        assert levels == {level}
    blocks = small("int4-blocks", "bert-classifier")
    nodes = [n for n in blocks.graph.node if n.op_type == "DequantizeLinear"]
    kinds = {t.data_type for t in blocks.graph.initializer if t.name in {n.input[0] for n in nodes}}
    assert (len(nodes), kinds) == (products, {onnx.TensorProto.INT4})
    assert {a.i for n in nodes for a in n.attribute if a.name == "block_size"} == {32}


# ---------------------------------------------------------------- names and commands


def test_errors_list_what_there_is() -> None:
    with pytest.raises(
        models.ZooError, match=r"no precision is called 'int3'; there are: float16, .*int4-blocks"
    ):
        precision.form("int3")
    with pytest.raises(
        models.ZooError, match=r"no file is called 'bert-int4'; there are: squeezenet-float16"
    ):
        precision.build("bert-int4")


def test_command_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "net.onnx"
    assert main(["build", "resnet18", "--small", "--precision", "int8-dynamic", "-o", str(target)]) == 0
    assert onnx.load(target) == precision.build("resnet18-int8-dynamic", small=True)
    assert main(["build", "resnet18", "--small", "--precision", "int3", "-o", str(target)]) == 2
    assert main(["build", "llama", "--depth", "2", "--precision", "int4", "-o", str(target)]) == 2
    assert "llama is an export: it takes --small" in capsys.readouterr().err
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*FORMS, *precision.names()))
    assert listed.count("held out") == len(HELD_OUT)
