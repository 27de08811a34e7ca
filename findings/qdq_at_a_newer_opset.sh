#!/usr/bin/env bash
# onnxruntime 1.31.1: a signed QDQ model loads at opset 19 and not at opset 21, with the same nodes.
#
# Guess: raising opset_import of a model whose operators did not change in meaning changes nothing. With int8 activations
# and a Reshape between DequantizeLinear and its reader, the optimiser (level EXTENDED and above) puts in a QuantizeLinear
# whose output_dtype (new in opset 21) and zero point disagree. Seen at opset 21: "[TypeInferenceError] output_dtype INT8
# does not match y_zero_point type UINT8"; with optimisations off, and at opset 19, the model loads.
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

constants = {
    "s": np.float32(0.03), "z": np.int8(0), "shape": np.int64([32, 8]), "ws": np.float32(0.01), "wz": np.int8(0),
    "w": np.random.default_rng(0).integers(-100, 100, (8, 16)).astype(np.int8),
}
nodes = [
    helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
    helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
    helper.make_node("Reshape", ["d", "shape"], ["r"]),
    helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"]),
    helper.make_node("MatMul", ["r", "wd"], ["m"]),
    helper.make_node("QuantizeLinear", ["m", "s", "z"], ["mq"]),
    helper.make_node("DequantizeLinear", ["mq", "s", "z"], ["y"]),
]
x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 64])
y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [32, 16])
graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(v, k) for k, v in constants.items()])
seen = {}
for opset in (19, 21):
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED):
        options = ort.SessionOptions()
        options.graph_optimization_level, options.log_severity_level = level, 4
        try:
            ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            seen[opset, level.name] = "loads"
        except Exception as error:
            seen[opset, level.name] = "output_dtype INT8 does not match" in str(error) and "refused" or str(error)
print(f"onnxruntime {ort.__version__}: {seen}")
assert seen == {
    (19, "ORT_DISABLE_ALL"): "loads", (19, "ORT_ENABLE_EXTENDED"): "loads",
    (21, "ORT_DISABLE_ALL"): "loads", (21, "ORT_ENABLE_EXTENDED"): "refused",
}, "this has changed"
PYTHON
