#!/usr/bin/env bash
# onnxruntime 1.31.1 (CPU): a float16 value that the model casts to float32 may never have been float16, also with all
# optimisations off, and an operator without effect in between changes the result.
#
# Guess: with ORT_DISABLE_ALL each value has its declared type, so x * x of 1000 in float16 is infinite. Seen: Pow has no
# float16 kernel on the CPU and runs in float32. The model's own Cast to float32 is taken together with the one that was
# inserted behind Pow, and the two cancel: 1e6. With a Slice of everything (which has a float16 kernel)
# between Pow and Cast the result is infinite, as in onnx's reference implementation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.0 onnxruntime==1.31.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import warnings

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

warnings.simplefilter("ignore")
feeds = {"x": np.float16([3, 1000])}


def model(with_slice):
    nodes = [helper.make_node("Pow", ["x", "two"], ["p"])]
    consts = [numpy_helper.from_array(np.float16(2), "two")]
    if with_slice:
        nodes.append(helper.make_node("Slice", ["p", "start", "end"], ["s"]))
        consts += [numpy_helper.from_array(np.int64([n]), name) for name, n in (("start", 0), ("end", 2))]
    nodes.append(helper.make_node("Cast", [nodes[-1].output[0]], ["y"], to=TensorProto.FLOAT))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, [2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    graph = helper.make_graph(nodes, "g", [x], [y], consts)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(made, full_check=True)
    return made


seen = {}
for with_slice in (False, True):
    made = model(with_slice)
    seen[with_slice, "onnx"] = ReferenceEvaluator(made).run(None, feeds)[0].tolist()
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        session = ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
        seen[with_slice, level] = session.run(None, feeds)[0].tolist()
print(f"onnxruntime {ort.__version__} (Slice in between or not): {seen}")
infinite = {key: [9.0, float("inf")] for key in seen}
wanted = infinite | {(False, "ORT_DISABLE_ALL"): [9.0, 1e6], (False, "ORT_ENABLE_ALL"): [9.0, 1e6]}
assert seen == wanted, "this has changed"
PYTHON
