#!/usr/bin/env bash
# onnxruntime 1.31.1: reductions of an empty tensor ignore a negative axis.
#
# x has the shape [0, 2, 7, 6], and an axis is reduced with keepdims=1. Guess: axes 2 and -2 are the same axis, so both
# give [0, 2, 1, 6]; the reference evaluator of ONNX says so. Seen: for axis 2 [0, 2, 1, 6], for axis -2 [0, 2, 7, 6].
# A sum over no keys, [3, 2, 0, 6], has 36 zeros with axis 2, and no elements with axis -2. Tensors with elements are
# reduced along either. A model can therefore fail on an empty batch or cache, in whatever reads the result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.0 onnxruntime==1.31.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnx.reference
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

ort.set_default_logger_severity(4)
seen, wanted = {}, {}
for op in ("ReduceSum", "ReduceMax", "ReduceMean", "ReduceL2"):
    for axis in (2, -2):
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, "k", 6])
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2, 1, 6])
        axes = numpy_helper.from_array(np.array([axis], np.int64), "axes")
        node = helper.make_node(op, ["x", "axes"], ["y"], keepdims=1)
        graph = helper.make_graph([node], "g", [x], [y], [axes])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        onnx.checker.check_model(model, full_check=True)
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for batch, keys in ((3, 7), (0, 7), (3, 0)):
            feeds = {"x": np.ones((batch, 2, keys, 6), np.float32)}
            seen[op, axis, batch, keys] = session.run(None, feeds)[0].shape
            whole = (batch, 2, keys if axis < 0 and 0 in (batch, keys) else 1, 6)
            wanted[op, axis, batch, keys] = whole
            if op == "ReduceSum":
                reference = onnx.reference.ReferenceEvaluator(model).run(None, feeds)[0].shape
                assert reference == (batch, 2, 1, 6), reference
for (op, axis, batch, keys), shape in seen.items():
    print(ort.__version__, f"{op} along {axis} of {(batch, 2, keys, 6)}:", shape)
assert seen == wanted, "this has changed"
PYTHON
