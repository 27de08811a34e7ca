#!/usr/bin/env bash
# onnxruntime 1.31.1 (CPU, x86-64): DynamicQuantizeLinear of a tensor with a NaN gives finite numbers, or NaN everywhere,
# depending on the place of the NaN; and numbers before it may no longer count for the range.
#
# Guess: a NaN makes the range, and so the scale, NaN, as in onnx's reference evaluator; or it is ignored. Seen, for 8
# numbers from -1 to 1 with one NaN: at the end, the scale is NaN, and every dequantised number is. At places 0 and 4, the
# NaN becomes the least number, and the range is smaller than that of the other numbers (NaN at place 4: from -0.71, so
# that -1 is clipped to it). A dynamically quantised model so hides a NaN of an earlier layer, and whoever compares two
# runtimes on inputs with NaN sees finite numbers in one of them.
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
from onnx.reference import ReferenceEvaluator

warnings.simplefilter("ignore")
model = onnx.parser.parse_model(
    """<ir_version: 10, opset_import: ["": 21]>
    g (float[8] x) => (float[8] d, float s) {
      y, s, z = DynamicQuantizeLinear(x)
      d = DequantizeLinear(y, s, z)
    }"""
)
onnx.checker.check_model(model, full_check=True)
session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
reference = ReferenceEvaluator(model)
numbers = np.linspace(-1, 1, 8, dtype=np.float32)
_, whole = session.run(None, {"x": numbers})
seen = {}
for place in (0, 4, 7):
    x = numbers.copy()
    x[place] = np.nan
    seen[place] = session.run(None, {"x": x})
    assert np.isnan(reference.run(None, {"x": x})[1]), "this has changed"
    print(ort.__version__, "NaN at", place, "scale", seen[place][1], "(without NaN", whole, ")", seen[place][0].round(3))
assert np.isnan(seen[7][1]) and np.isnan(seen[7][0]).all(), "this has changed"
assert np.isfinite(seen[0][0]).all() and np.isfinite(seen[4][0]).all(), "this has changed"
dequantised, scale = seen[4]
assert scale < whole - 1e-4 and dequantised[0] > -0.75 and dequantised[4] == dequantised.min(), "this has changed"
PYTHON
