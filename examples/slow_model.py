"""A model that is slower than it has to be: an LSTM whose time steps are spelt out one by one, as exporters do it."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def slow_model(steps: int = 16, width: int = 256) -> onnx.ModelProto:
    """x[1,steps,width] -> y[1,width], the hidden state after the last step. The weights are random."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((4 * width, width)) / width**0.5,
        "r": rng.standard_normal((4 * width, width)) / width**0.5,
        "b": rng.standard_normal(4 * width) / width**0.5,
        "h": np.zeros((1, width)),
        "c": np.zeros((1, width)),
    }
    nodes = []

    def add(op: str, *inputs: str, outputs: int = 1, **attributes: object) -> list[str]:
        names = [f"{op}_{len(nodes)}_{i}" for i in range(outputs)]
        nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names

    h, c = "h", "c"
    for step in range(steps):
        weights[f"step_{step}"] = np.array(step)
        (x,) = add("Gather", "x", f"step_{step}", axis=1)
        (from_x,) = add("Gemm", x, "w", "b", transB=1)
        (from_h,) = add("Gemm", h, "r", transB=1)
        (gates,) = add("Add", from_x, from_h)
        i, f, g, o = add("Split", gates, outputs=4, axis=1, num_outputs=4)
        (i,), (f,), (g,), (o,) = add("Sigmoid", i), add("Sigmoid", f), add("Tanh", g), add("Sigmoid", o)
        (kept,), (new,) = add("Mul", f, c), add("Mul", i, g)
        (c,) = add("Add", kept, new)
        (shown,) = add("Tanh", c)
        (h,) = add("Mul", o, shown)
    nodes.append(helper.make_node("Identity", [h], ["y"]))
    graph = helper.make_graph(
        nodes,
        "slow",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, steps, width))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, width))],
        [
            numpy_helper.from_array(a.astype(np.int64 if name.startswith("step") else np.float32), name)
            for name, a in weights.items()
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
