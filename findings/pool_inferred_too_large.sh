#!/usr/bin/env bash
# onnx 1.23.0: below opset 22 its shape inference gives a pool with ceil_mode a window more than anybody computes.
#
# A window that would begin in the padding behind the input is left out. Guess: inference counts as onnx's reference and
# ONNX Runtime do, at every opset of the operator. Seen: at opset 22 it does; at 12 (MaxPool) and 19 (AveragePool) it
# infers 3 where both compute 2. A file that keeps inferred shapes, as quantisation tools write them, then declares a
# size that no run has, and what reads declared sizes (a layout pass, a memory plan) plans for another tensor.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.0 onnxruntime==1.31.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, shape_inference
from onnx.reference import ReferenceEvaluator

ort.set_default_logger_severity(4)
x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 3])
y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, "n"])
data = np.arange(1, 4, dtype=np.float32).reshape(1, 1, 3)
seen = {}
for op, opset in (("MaxPool", 12), ("MaxPool", 22), ("AveragePool", 19), ("AveragePool", 22)):
    node = helper.make_node(op, ["x"], ["y"], kernel_shape=[2], strides=[2], pads=[1, 1], ceil_mode=1)
    graph = helper.make_graph([node], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    inferred = shape_inference.infer_shapes(model).graph.output[0].type.tensor_type.shape.dim[2].dim_value
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (run,) = session.run(None, {"x": data})
    (reference,) = ReferenceEvaluator(model).run(None, {"x": data})
    seen[op, opset] = (inferred, run.shape[2], reference.shape[2])
    print(onnx.__version__, ort.__version__, op, opset, "inferred, run, reference:", *seen[op, opset])
wanted = {("MaxPool", 12): (3, 2, 2), ("MaxPool", 22): (2, 2, 2)}
wanted |= {("AveragePool", 19): (3, 2, 2), ("AveragePool", 22): (2, 2, 2)}
assert seen == wanted, "this has changed"
PYTHON
