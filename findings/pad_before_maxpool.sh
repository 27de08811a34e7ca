#!/usr/bin/env bash
# onnxruntime 1.31.1: its optimiser changes what Pad and MaxPool compute.
#
# Guess: graph optimisations keep a model's results. A Pad with zeros ahead of a MaxPool is part of the function: where
# all numbers of a window are negative, the zero is the greatest. The optimiser (level BASIC and above) makes the Pad
# the pool's own padding, which never wins. Seen: -1.0 with optimisations, 0.0 without, at the border.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.0 onnxruntime==1.31.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

nodes = [
    helper.make_node("Pad", ["x", "pads", "zero"], ["p"]),
    helper.make_node("MaxPool", ["p"], ["y"], kernel_shape=[2, 2], strides=[2, 2]),
]
constants = [
    numpy_helper.from_array(np.int64([0, 0, 1, 1, 0, 0, 1, 1]), "pads"),
    numpy_helper.from_array(np.float32(0), "zero"),
]
x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 4, 4])
y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 3, 3])
graph = helper.make_graph(nodes, "g", [x], [y], constants)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
corner = {}
for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_BASIC):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    corner[level.name] = float(session.run(None, {"x": -np.ones((1, 1, 4, 4), np.float32)})[0][0, 0, 0, 0])
print(f"onnxruntime {ort.__version__}: the corner of MaxPool(Pad(-1)) is {corner}")
assert corner == {"ORT_DISABLE_ALL": 0.0, "ORT_ENABLE_BASIC": -1.0}, "this has changed"
PYTHON
