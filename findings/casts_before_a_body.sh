#!/usr/bin/env bash
# onnxruntime 1.31.1 (CPU): a model does not run if an If's branch reads, from outside, a float16 input that was cast to
# float32 and back. This is so with all optimisations off, and if other nodes read the value as well.
#
# Guess: two Casts in a row change nothing, least of all with ORT_DISABLE_ALL. Seen: the session loads, and each run ends
# with "Non-zero status code returned while running Identity node" inside the If. ONNX Runtime drops the pair (it is
# lossless) when it puts in Casts of its own, which it does at every level, and does not count the branch as a reader.
# With any operator between the Casts the model runs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.0 onnxruntime==1.31.1 numpy==2.3.5
ORT_DISABLE_TELEMETRY=1 "$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx.parser
import onnxruntime as ort

OUTSIDE = {
    "cast and back": "w = Cast<to=1>(x) v = Cast<to=10>(w)",
    "an operator between": "w = Cast<to=1>(x) u = Neg(w) v = Cast<to=10>(u)",
    "another reader": "w = Cast<to=1>(x) v = Cast<to=10>(w) z = Shape(v)",
}


def runs(outside, level):
    """Whether a model with these nodes before its If runs."""
    outputs = "(float16[N] y, int64[1] z)" if "z =" in outside else "(float16[N] y)"
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
    g (float16[N] x, bool c) => {outputs} {{ {outside}
      y = If (c) <then_branch: graph = t () => (float16[N] p) {{ p = Identity(v) }},
                  else_branch: graph = e () => (float16[N] q) {{ q = Identity(v) }}> }}""")
    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 4
    session = ort.InferenceSession(model.SerializeToString(), options)
    try:
        session.run(None, {"x": np.ones(2, np.float16), "c": np.array(True)})
    except ort.capi.onnxruntime_pybind11_state.Fail as error:
        assert "while running If node" in str(error), error
        return False
    return True


levels = {"off": ort.GraphOptimizationLevel.ORT_DISABLE_ALL, "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL}
found = {name: {at: runs(outside, level) for at, level in levels.items()} for name, outside in OUTSIDE.items()}
print(f"whether it runs, by optimisations: {found}")
never, always = dict.fromkeys(levels, False), dict.fromkeys(levels, True)
wanted = {"cast and back": never, "an operator between": always, "another reader": never}
assert found == wanted, "this has changed"
PYTHON
