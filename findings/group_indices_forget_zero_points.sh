#!/usr/bin/env bash
# onnxruntime 1.31.1 (CPU): com.microsoft::MatMulNBits with group indices (g_idx) ignores packed zero points.
#
# Guess: y = x @ ((weights - zero point of the group) * scale of the group), with g_idx or without, however zero points
# are given: packed like the weights, or as floats.
# Seen: with g_idx and packed uint8 zero points the kernel subtracts 8, the default of 4-bit weights. The same zero
# points as floats are used, and so are packed ones without g_idx.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.0 onnxruntime==1.31.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime as ort
from onnx import helper, numpy_helper

ROWS, COLUMNS, BLOCK = 64, 2, 32
# All weights are 0 and all scales 1, so an element of the product with the unit matrix is a zero point, negated.
consts = {
    "w": np.zeros((COLUMNS, ROWS // BLOCK, BLOCK // 2), np.uint8),
    "s": np.ones(COLUMNS * ROWS // BLOCK, np.float32),
    "packed": np.array([0x21, 0x43], np.uint8),  # 1 and 2 for the first column, 3 and 4 for the second
    "floats": np.array([1, 2, 3, 4], np.float32),
    "g": np.repeat(np.arange(ROWS // BLOCK, dtype=np.int32), BLOCK),  # the groups are the blocks themselves
}
meant = -np.repeat([[1, 3], [2, 4]], BLOCK, axis=0).astype(np.float32)


def run(zeros, groups):
    inputs = ["x", "w", "s", zeros, groups]
    attributes = dict(domain="com.microsoft", K=ROWS, N=COLUMNS, bits=4, block_size=BLOCK)
    graph = helper.make_graph(
        [helper.make_node("MatMulNBits", inputs, ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info("x", 1, [ROWS, ROWS])],
        [helper.make_tensor_value_info("y", 1, [ROWS, COLUMNS])],
        [numpy_helper.from_array(v, k) for k, v in consts.items() if k in inputs],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.eye(ROWS, dtype=np.float32)})[0]


right = {(z, bool(g)): bool((run(z, g) == meant).all()) for z in ("packed", "floats") for g in ("", "g")}
print(f"onnxruntime {ort.__version__}: right by (zero points, with g_idx): {right}")
print("packed zero points with g_idx give", np.unique(run("packed", "g")), "instead of", np.unique(meant))
assert right == {("packed", False): True, ("packed", True): False, ("floats", False): True, ("floats", True): True}, "changed"
assert (run("packed", "g") == -8).all(), "this has changed"
PYTHON
