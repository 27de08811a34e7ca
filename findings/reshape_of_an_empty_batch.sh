#!/usr/bin/env bash
# onnxruntime 1.31.1: its optimiser makes a model fail on an empty batch that runs without it.
#
# A Reshape takes its shape from parts: two sizes of x, and the last size of another input, which is declared as 64.
# Guess: the optimiser puts in what it knows, [0, 0, 64] (0: as before), as it does where the 64 is a constant. Seen: it
# writes [0, 0, -1], and -1 cannot be computed for a tensor without elements. ORT_DISABLE_ALL returns [0, 3, 64]; from
# ORT_ENABLE_BASIC on the run fails. PyTorch's exporter writes such shapes for x.view(*other.shape).
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

ort.set_default_logger_severity(4)
nodes = [helper.make_node("Shape", ["x"], ["of_x"]), helper.make_node("Shape", ["z"], ["of_z"])]
for at, source in ((0, "of_x"), (1, "of_x"), (2, "of_z")):
    nodes.append(helper.make_node("Gather", [source, f"at{at}"], [f"size{at}"], axis=0))
    nodes.append(helper.make_node("Unsqueeze", [f"size{at}", "first"], [f"part{at}"]))
nodes.append(helper.make_node("Concat", ["part0", "part1", "part2"], ["shape"], axis=0))
nodes.append(helper.make_node("Reshape", ["x", "shape"], ["y"]))
consts = [numpy_helper.from_array(np.array(at, np.int64), f"at{at}") for at in range(3)]
consts.append(numpy_helper.from_array(np.array([0], np.int64), "first"))
x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m", 4, 16])
z = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", "m", 64])
y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "m", 64])
graph = helper.make_graph(nodes, "g", [x, z], [y], consts)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnx.checker.check_model(model, full_check=True)
seen = {}
for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"):
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for batch in (2, 0):
        feeds = {"x": np.zeros((batch, 3, 4, 16), np.float32), "z": np.zeros((batch, 3, 64), np.float32)}
        try:
            seen[level, batch] = str(session.run(None, feeds)[0].shape)
        except Exception as error:
            seen[level, batch] = "fails" if "requested shape:{0,3,-1}" in str(error) else str(error)
for key, what in seen.items():
    print(ort.__version__, key, what)
wanted = {(level, 2): "(2, 3, 64)" for level, _ in seen} | {(level, 0): "fails" for level, _ in seen}
wanted["ORT_DISABLE_ALL", 0] = "(0, 3, 64)"
assert seen == wanted, "this has changed"
PYTHON
