"""Compile a model with TVM and run it: `python examples/compile_with_tvm.py [MODEL.onnx]`. Needs `xrlflow[tvm]`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from slow_model import slow_model

import xrlflow
from xrlflow.backends.tvm import load_compiled


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "slow.onnx")
    if len(sys.argv) == 1:
        onnx.save(slow_model(steps=4), path)

    # Leave measure=False out to see how fast it is, compared with ONNX Runtime.
    result = xrlflow.optimize(
        path, backend="tvm", search="greedy", cost="roofline", measure=False, time_limit=60
    )
    library = path.with_suffix(".so")
    result.save(library)  # the library, and its interface beside it in a .json

    inputs = {
        i.name: np.zeros([d.dim_value for d in i.type.tensor_type.shape.dim], np.float32)
        for i in onnx.load(path).graph.input
    }
    with load_compiled(library) as model:
        for output in model.run(inputs):
            print("an output of shape", output.shape)


if __name__ == "__main__":
    main()
