#!/usr/bin/env bash
# onnxruntime 1.31.1 (CPU): QuantizeLinear of float16 does not saturate where the quotient exceeds 32-bit integers: a large
# positive number becomes the least byte, and with a negative zero point a large negative one the greatest.
#
# Guess: QuantizeLinear saturates (ONNX says so), for float16 as for float32, at every optimisation level. Seen: float32
# gives 127 and -128 for infinities and for 65504 / 1e-6; float16 gives -128 for +inf, and 127 for -inf if the zero point
# is -3. Numbers of ordinary size are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.0 onnxruntime==1.31.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime as ort
from onnx import parser

NUMBERS = [np.inf, -np.inf, 65504, -65504, 10, -10]


def run(kind, zero, scale):
    made = parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 19]> g ({kind}[N] x, {kind} s) => (int8[N] y) <int8 z = {{{zero}}}> '
        "{ y = QuantizeLinear(x, s, z) }"
    )
    onnx.checker.check_model(made, full_check=True)
    dtype = {"float": np.float32, "float16": np.float16}[kind]
    feeds = {"x": np.array(NUMBERS, dtype), "s": np.array(scale, dtype)}
    found = set()
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        session = ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found.add(tuple(session.run(None, feeds)[0].tolist()))
    (bytes_,) = found
    return bytes_


seen = {(k, z, s): run(k, z, s) for k in ("float", "float16") for z in (0, -3) for s in (1.0, 1e-6)}
print(f"onnxruntime {ort.__version__}: bytes of {NUMBERS} (type, zero point, scale): {seen}")
saturated = (127, -128, 127, -128)
assert all(seen["float", z, s][:4] == saturated for z in (0, -3) for s in (1.0, 1e-6)), "this has changed"
assert seen["float16", 0, 1.0] == (-128, -128, 127, -128, 10, -10), "this has changed"
assert seen["float16", -3, 1.0] == (127, 127, 127, -128, 7, -13), "this has changed"
assert seen["float16", 0, 1e-6][2] == -128 and seen["float16", -3, 1e-6][3] == 127, "this has changed"
PYTHON
