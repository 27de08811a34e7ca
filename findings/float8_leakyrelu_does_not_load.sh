#!/usr/bin/env bash
# onnxruntime 1.31.1 (CPU): a valid model that loads without optimisation does not load with the default ones.
#
# Guess: optimisation never makes a model invalid. Seen: LeakyRelu between DequantizeLinear and QuantizeLinear becomes
# com.microsoft's QLinearLeakyRelu, also where the quantised type is float8, which that operator does not have. Loading
# fails from ORT_ENABLE_EXTENDED on. With int8 it loads.
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


def model(dtype):
    zero = helper.make_tensor("z", dtype, [], [0])
    scale = numpy_helper.from_array(np.float32(0.5), "s")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["a"]),
        helper.make_node("LeakyRelu", ["a"], ["b"], alpha=0.1),
        helper.make_node("QuantizeLinear", ["b", "s", "z"], ["r"]),
        helper.make_node("DequantizeLinear", ["r", "s", "z"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3]) for n in "xy")
    made = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], [zero, scale]),
        opset_imports=[helper.make_opsetid("", 19)],
        ir_version=9,
    )
    onnx.checker.check_model(made, full_check=True)
    return made.SerializeToString()


def loads(dtype, level):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    try:
        ort.InferenceSession(model(dtype), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return "QLinearLeakyRelu" if "QLinearLeakyRelu" in str(error) else str(error)[:200]
    return True


seen = {
    (name, level): loads(getattr(TensorProto, name), level)
    for name in ("INT8", "FLOAT8E4M3FN")
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED")
}
print(f"onnxruntime {ort.__version__}: loads, or what the error names: {seen}")
failed = {key: value for key, value in seen.items() if value is not True}
assert failed == {("FLOAT8E4M3FN", "ORT_ENABLE_EXTENDED"): "QLinearLeakyRelu"}, "this has changed"
PYTHON
