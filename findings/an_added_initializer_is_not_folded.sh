#!/usr/bin/env bash
# onnxruntime 1.31.1 (CPU, x86-64): weights given with SessionOptions.add_initializer replace those of the file where an
# operator reads them at run time, and not where constants are folded when the model is loaded. One run then computes with
# both.
#
# Guess: ONNX Runtime's documentation says that a session uses the given tensor instead of the file's initializer of that
# name; so everything that depends on it follows. Seen, for a = x + t and b = x + Cos(t), with ones in the file and zeros
# given: a is computed from the zeros, b from the ones. Without optimisations both are computed from the zeros. The result
# depends on which operators are folded, so it may change with the version and with an operator in between. Whoever shares
# or replaces weights in memory has to switch constant folding off, or keep the file's weights equal to those given.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.0 onnxruntime==1.31.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import warnings

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

warnings.simplefilter("ignore")
model = onnx.parser.parse_model(
    """<ir_version: 10, opset_import: ["": 21]>
    g (float[4] x) => (float[4] a, float[4] b) <float[4] t = {1, 1, 1, 1}> {
      a = Add(x, t)
      c = Cos(t)
      b = Add(x, c)
    }"""
)
onnx.checker.check_model(model, full_check=True)
given = ort.OrtValue.ortvalue_from_numpy(np.zeros(4, np.float32))
x = np.zeros(4, np.float32)
seen = {}
levels = {
    "all optimisations": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
for name, level in levels.items():
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.add_initializer("t", given)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    a, b = session.run(None, {"x": x})
    seen[name] = (round(float(a[0]), 4), round(float(b[0]), 4))
    print(f"{name}: a = {seen[name][0]}, b = {seen[name][1]}")
expected = {"all optimisations": (0.0, 0.5403), "none": (0.0, 1.0)}
if seen != expected:
    raise SystemExit(f"changed: {expected} was seen before")
PYTHON
