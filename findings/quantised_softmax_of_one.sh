#!/usr/bin/env bash
# onnxruntime 1.31.1 (CPU): the optimiser turns DequantizeLinear, Softmax, QuantizeLinear (uint8) into a kernel that gives
# 0 for a row of one element. A softmax of one number is 1.
#
# Guess: the fused kernel is within one step of the operators that it replaces. Seen, with an output scale of 1/255 and
# zero point 0: 1.0 at every element without optimisations, 0.0 with them; rows of two elements are right. Each
# transformer that was quantised to uint8 meets this at a sequence length of 1.
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

seen = {}
for size in (1, 2):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, size])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, size])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["a"]),
        helper.make_node("DequantizeLinear", ["a", "x_scale", "x_zero"], ["b"]),
        helper.make_node("Softmax", ["b"], ["c"], axis=-1),
        helper.make_node("QuantizeLinear", ["c", "y_scale", "y_zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["d", "y_scale", "y_zero"], ["y"]),
    ]
    numbers = {
        "x_scale": np.float32(0.04), "x_zero": np.uint8(128), "y_scale": np.float32(1 / 255), "y_zero": np.uint8(0),
    }
    consts = [numpy_helper.from_array(np.asarray(v), k) for k, v in numbers.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], consts)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    feeds = {"x": np.linspace(-1, 1, 3 * size, dtype=np.float32).reshape(3, size)}
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        seen[size, level] = session.run(None, feeds)[0]
for key, rows in seen.items():
    print(ort.__version__, key, rows.tolist())
assert np.all(seen[1, "ORT_DISABLE_ALL"] == 1), "this has changed"
assert np.all(seen[1, "ORT_ENABLE_ALL"] == 0), "this has changed"
assert np.abs(seen[2, "ORT_DISABLE_ALL"] - seen[2, "ORT_ENABLE_ALL"]).max() < 1.5 / 255, "this has changed"
PYTHON
