"""Give a model kernels of its own, and run it in ONNX Runtime: `python examples/run_with_kernels.py [MODEL.onnx]`.

Needs `xrlflow[tvm]` and a C compiler. Running the two files needs ONNX Runtime alone; `cpp/` does it in C++.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from slow_model import slow_model

import xrlflow


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "slow.onnx")
    if len(sys.argv) == 1:
        onnx.save(slow_model(steps=4), path)

    # backend="hybrid" makes kernels in any case. Leave it and measure=False out to have them where they are faster.
    result = xrlflow.optimize(
        path, backend="hybrid", search="greedy", cost="roofline", measure=False, time_limit=60
    )
    fast = path.with_suffix(".fast.onnx")
    result.save(fast)  # an ordinary ONNX file, and in its folder the library of its kernels
    print(*(note for note in result.report.notes if note.startswith("generated kernels")))

    options = ort.SessionOptions()
    options.register_custom_ops_library(str(fast.with_suffix(".so").resolve()))
    session = ort.InferenceSession(fast, options, providers=["CPUExecutionProvider"])
    # The last three lines in one: session = xrlflow.session(fast)

    inputs = {i.name: np.zeros(i.shape, np.float32) for i in session.get_inputs()}
    without = ort.InferenceSession(fast, providers=["CPUExecutionProvider"]).run(None, inputs)
    for a, b in zip(session.run(None, inputs), without):
        print("an output of shape", a.shape, "differs from that without kernels by", np.abs(a - b).max())


if __name__ == "__main__":
    main()
