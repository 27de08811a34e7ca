#!/usr/bin/env bash
# onnx 1.23.0: ReferenceEvaluator ignores the input sequence_lens of RNN, GRU and LSTM, without a word.
#
# Guess: the reference implementation computes what the specification says. A sequence of one step in a batch padded to
# three should leave Y zero after it, and Y_h should be the state after that step. Seen: all three steps are computed.
# ONNX Runtime 1.31.1 does as the specification says.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.0 onnxruntime==1.31.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

rng, seen = np.random.default_rng(0), {}
for op, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
    node = helper.make_node(op, ["x", "w", "r", "", "lens"], ["y", "h"], hidden_size=2)
    feeds = {
        "x": rng.standard_normal((3, 1, 2)).astype(np.float32),
        "w": rng.standard_normal((1, 2 * gates, 2)).astype(np.float32),
        "r": rng.standard_normal((1, 2 * gates, 2)).astype(np.float32),
        "lens": np.int32([1]),
    }
    kinds = {"lens": TensorProto.INT32}
    inputs = [helper.make_tensor_value_info(k, kinds.get(k, TensorProto.FLOAT), v.shape) for k, v in feeds.items()]
    outputs = [helper.make_tensor_value_info(k, TensorProto.FLOAT, None) for k in ("y", "h")]
    graph = helper.make_graph([node], "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for name, (y, h) in (("onnx", ReferenceEvaluator(model).run(None, feeds)), ("onnxruntime", session.run(None, feeds))):
        seen[op, name] = "as specified" if not np.any(y[1:]) and np.allclose(h, y[0]) else "ignored"
print(f"onnx {onnx.__version__}, onnxruntime {ort.__version__}: {seen}")
wanted = {(op, n): s for op in ("RNN", "GRU", "LSTM") for n, s in (("onnx", "ignored"), ("onnxruntime", "as specified"))}
assert seen == wanted, "this has changed"
PYTHON
