"""What the benchmark of low precision says about exactness, on models whose difference is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest

from bench import precision as bench
from bench.meaning import NotEvaluated, meaning
from models import exports, precision
from models.precision import FILES
from tests.levels import whole

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("torch")

TEXT = """<ir_version: 9, opset_import: ["": 17]> net (float[1, 2, 4, 4] x) => (float[1, 32] y) {
  q = QuantizeLinear(x, s, z)
  d = DequantizeLinear(q, s, z)
  w = DequantizeLinear(v, s, n)
  c = Conv<pads = [1, 1, 1, 1]>(d, w)
  p = QuantizeLinear(c, t, z)
  r = DequantizeLinear(p, t, z)
  y = Flatten(r)
}"""


def net(**changed: np.ndarray) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    constants = {
        "s": np.float32(0.02),
        "z": np.uint8(128),
        "n": np.int8(0),
        "t": np.float32(0.05),
        "v": rng.integers(-60, 60, (2, 2, 3, 3)).astype(np.int8),
    }
    model = onnx.parser.parse_model(TEXT)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in (constants | changed).items()
    )
    return model


def judged(folder: Path, variant: onnx.ModelProto) -> dict:
    """What is said of a variant of `net()`."""
    for name, model in (("original", net()), ("variant", variant)):
        onnx.save(model, folder / f"{name}.onnx")
    feeds = [{"x": np.random.default_rng(i).normal(size=(1, 2, 4, 4)).astype(np.float32)} for i in range(3)]
    at = bench.Source(str(folder / "original.onnx"), None, feeds)
    return bench.exactness(str(folder), at, {"variant": str(folder / "variant.onnx")}, 1)


def test_an_equal_model_is_equal(tmp_path: Path) -> None:
    found = judged(tmp_path, net())
    assert found["variant"] == {"differ": 0.0, "steps": 0, "error": found["original"]["error"]}
    assert found["original"]["error"] < 1e-6


def test_another_weight_is_seen_in_bits_steps_and_error(tmp_path: Path) -> None:
    weights = onnx.numpy_helper.to_array(next(t for t in net().graph.initializer if t.name == "v")).copy()
    weights[0, 0, 1, 1] += 8
    found = judged(tmp_path, net(v=weights))
    assert 0 < found["variant"]["differ"] <= 0.5  # one of two channels
    assert found["variant"]["steps"] >= 1
    assert found["variant"]["error"] > 100 * found["original"]["error"]


def test_what_cannot_be_evaluated_is_said(tmp_path: Path) -> None:
    model = net()
    model.graph.node[-1].CopyFrom(onnx.helper.make_node("Unknown", ["r"], ["y"], domain="com.microsoft"))
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(NotEvaluated, match="no evaluation of Unknown"):
        meaning(model, {"x": np.zeros((1, 2, 4, 4), np.float32)})


def test_bits_differ_where_numbers_are_equal() -> None:
    a, b = np.asarray([0.0, 1.0, np.nan], np.float32), np.asarray([-0.0, 1.0, np.nan], np.float32)
    assert bench.other_bits(a, b).tolist() == [True, False, False]
    assert bench.other_bits(a, b.astype(np.float16)).all()


QUICK = (
    "mobilenetv2-float16",
    "resnet18-int8-dynamic",
    "bert-classifier-tensorrt",
    "squeezenet-qoperator-s8s8",
)


@pytest.mark.corpus
@pytest.mark.parametrize("name", whole(FILES, (*QUICK, "bert-classifier-int4-blocks")))
def test_the_meaning_is_what_onnx_runtime_computes_without_optimisations(name: str) -> None:
    if FILES[name].network in exports.EXPORTS:
        pytest.importorskip("transformers")
    model = precision.build(name, small=True)
    feeds = FILES[name].inputs(model, small=True)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    got = ort.InferenceSession(model.SerializeToString(), options).run(None, feeds)
    # Level 4 rounds activations to 8 bits. Of the sums 1 + erf, a quarter are ties in float64, and on either side in
    # float32: a step of 8 bits.
    stepwise = FILES[name].form == "int4-level4" or name.startswith("bert-classifier-qdq")
    bound = 0.03 if stepwise else 1e-3 if "float16" in name else 2e-6
    assert bench.error(got, meaning(model, feeds)) < bound


def row(file: str, **changed: object) -> dict:
    return {
        "file": file,
        "threads": 2,
        "held_out": True,
        "reports": {v: {"returned_original": v == "rewrites"} for v in bench.OURS},
        "failed": {},
        "ratios": {
            "original_ms": 1.0,
            "control": [1.0, 0.9, 1.1],
            "disturbed": False,
            "kernels": [2.0, 1.9, 2.1],
        },
        "exact": {"original": {"error": 1e-3}, "kernels": {"differ": 0.25, "steps": 2, "error": 2e-3}},
        **changed,
    }


def test_tables_say_what_is_exact_and_what_is_refused() -> None:
    refused = {"failed": dict.fromkeys(bench.OURS, "ModelError: no"), "reports": {}}
    rows = [row("bert-classifier-int4"), row("title-encoder", **refused)]
    text = bench.table(rows)
    assert "| 1 (original) | 2.000 [1.900, 2.100]; 25.0% of elements differ, 2 steps, error 2.00 |" in text
    assert "refused: ModelError: no" in text
    assert "| all | 2 | 2 | - | 1.000 | 1.000 | 2.000 | 2.000 | 1 |" in bench.summary(rows)
