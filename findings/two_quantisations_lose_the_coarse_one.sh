#!/usr/bin/env bash
# onnxruntime 1.31.1 (CPU): of two quantisations in a row the optimiser drops the rounding of the first, so numbers that
# are coarse by definition come out fine.
#
# Guess: two pairs of QuantizeLinear and DequantizeLinear with different scales are left alone, or are fused if results
# stay equal. Seen, with scales 100 and 1: without optimisations every output is a multiple of 100; with them outputs
# have steps of 1, up to 50 away. Tools write such pairs where one layer's output range meets the next one's input range.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.0 onnxruntime==1.31.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

nodes = [
    helper.make_node("QuantizeLinear", ["x", "coarse", "zero"], ["a"]),
    helper.make_node("DequantizeLinear", ["a", "coarse", "zero"], ["b"]),
    helper.make_node("QuantizeLinear", ["b", "fine", "zero"], ["c"]),
    helper.make_node("DequantizeLinear", ["c", "fine", "zero"], ["y"]),
]
numbers = {"coarse": np.float32(100), "fine": np.float32(1), "zero": np.int8(0)}
constants = [numpy_helper.from_array(np.asarray(v), k) for k, v in numbers.items()]
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [6]) for name in "xy")
model = helper.make_model(
    helper.make_graph(nodes, "g", [x], [y], constants), opset_imports=[helper.make_opsetid("", 13)], ir_version=8
)
onnx.checker.check_model(model, full_check=True)
feeds = {"x": np.array([-80, -30, 10, 45, 60, 99], np.float32)}
seen = {}
for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    seen[level] = session.run(None, feeds)[0]
    print(ort.__version__, level, seen[level].tolist())
assert set(seen["ORT_DISABLE_ALL"].tolist()) <= {-100.0, 0.0, 100.0}, "this has changed"
assert np.abs(seen["ORT_ENABLE_ALL"] - seen["ORT_DISABLE_ALL"]).max() > 10, "this has changed"
PYTHON
