"""Building and running small models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from xrlflow.verify.compare import by_deviation, is_float, judge_exact, judge_floats


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, np.ndarray] | Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    consts: Mapping[str, np.ndarray] | None = None,
    *,
    opset: int = 23,
    ir_version: int = 8,
    **extra: Any,
) -> onnx.ModelProto:
    if isinstance(inputs, Mapping):
        inputs = [info(name, array) for name, array in inputs.items()]
    initializers = [numpy_helper.from_array(np.asarray(a), n) for n, a in (consts or {}).items()]
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), initializers)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in extra.pop("domains", ()))]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version, **extra)


def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def run(model: onnx.ModelProto | str | bytes, feeds: Mapping[str, np.ndarray]) -> list[Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def assert_same_outputs(expected: Sequence[Any], got: Sequence[Any]) -> None:
    assert len(expected) == len(got)
    for a, b in zip(expected, got):
        if isinstance(a, (list, tuple)):
            assert_same_outputs(a, b)
            continue
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        judgement = judge_floats(by_deviation(a, None), b) if is_float(a) else judge_exact(a, b)
        assert judgement.passed, f"{judgement.reason}; {judgement.worst}"
