"""Small models for the backend tests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper


def matmuls(layers: int, width: int = 64, rows: int = 4) -> bytes:
    """A chain of `layers` pairs of MatMul and Relu, from x[rows, width] to y."""
    rng = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for index in range(layers):
        weight = (rng.standard_normal((width, width)) / width**0.5).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{index}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{index}"], [f"m{index}"]))
        value = "y" if index == layers - 1 else f"r{index}"
        nodes.append(helper.make_node("Relu", [f"m{index}"], [value]))
    shape = [rows, width]
    graph = helper.make_graph(
        nodes,
        "matmuls",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        weights,
    )
    return _serialized(graph)


def strings() -> bytes:
    """y = Identity(x) on strings."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "strings",
        [helper.make_tensor_value_info("x", TensorProto.STRING, [2])],
        [helper.make_tensor_value_info("y", TensorProto.STRING, [2])],
    )
    return _serialized(graph)


def unknown_operator() -> bytes:
    """A model with an operator that no runtime implements."""
    graph = helper.make_graph(
        [helper.make_node("Frobnicate", ["x"], ["y"], domain="nowhere")],
        "unknown",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    return _serialized(graph)


def feeds(rows: int = 4, width: int = 64) -> dict[str, npt.NDArray[np.float32]]:
    return {"x": np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)}


def _serialized(graph: object) -> bytes:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("nowhere", 1)]
    data: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return data
