"""An original that does not run: the message says why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import xrlflow
from tests.onnxio.support import model
from xrlflow.backends import BackendError
from xrlflow.onnxio import ModelError
from xrlflow.verify import InputsNeeded, OriginalFails

make, declare = helper.make_node, helper.make_tensor_value_info


def widened() -> onnx.ModelProto:
    """A normalisation whose scale widens the shape: ONNX Runtime's fusion of it refuses the scale."""
    nodes = [
        make("Pow", ["x", "two"], ["q"]), make("ReduceMean", ["q"], ["v"], axes=[-1]), make("Add", ["v", "e"], ["w"]),
        make("Sqrt", ["w"], ["s"]), make("Div", ["x", "s"], ["r"]), make("Mul", ["r", "gain"], ["y"]),
    ]  # fmt: skip
    consts: dict[str, Any] = {"two": np.float32(2), "e": np.float32(1e-5), "gain": np.array([1.5, -2], "f4")}
    x, y = declare("x", TensorProto.FLOAT, ["n", 1]), declare("y", TensorProto.FLOAT, ["n", 2])
    return model(nodes, [x], [y], consts, opset=17)


def test_what_the_runtimes_optimiser_breaks_is_said_to_be() -> None:
    with pytest.raises(OriginalFails) as caught:
        xrlflow.optimize(widened(), portable=True, search="greedy")
    told = str(caught.value)
    assert told.startswith(
        "ONNX Runtime's own optimiser breaks the original, which runs with optimisations off: "
    )
    assert "SimplifiedLayerNormalization" in told
    assert "must match X.shape[axis:]" in told


@pytest.mark.parametrize("measure", [True, False])
def test_where_no_inputs_are_found_the_original_is_kept(measure: bool) -> None:
    """It runs with no inputs: an index is outside of its table. The first failure is told."""
    x, y = declare("x", TensorProto.FLOAT, [2, 3]), declare("y", TensorProto.FLOAT, None)
    proto = model([make("Gather", ["x", "i"], ["y"])], [x], [y], {"i": np.array([7])}, opset=17)
    proto.graph.node.insert(0, make("Relu", ["x"], ["r"]))
    proto.graph.node.insert(1, make("Relu", ["r"], ["s"]))
    proto.graph.node[2].input[0] = "s"
    result = xrlflow.optimize(proto, portable=True, search="greedy", measure=measure)
    assert result.report.returned_original
    assert result.model.SerializeToString() == proto.SerializeToString()
    assert re.search(r"--inputs data.npz.*Gather.*out of data bounds", result.report.reason)
    assert xrlflow.optimize(proto, portable=True, measure=False, verify=False).trace


def test_kernels_that_cannot_be_tried_raise() -> None:
    x, y = declare("x", TensorProto.FLOAT, [2, 3]), declare("y", TensorProto.FLOAT, None)
    proto = model([make("Gather", ["x", "i"], ["y"])], [x], [y], {"i": np.array([7])}, opset=17)
    with pytest.raises(InputsNeeded, match=r"no inputs could be drawn.*Gather.*out of data bounds"):
        xrlflow.optimize(proto, backend="tvm")


def test_the_types_without_a_kernel_are_named() -> None:
    x, y = (declare(name, TensorProto.BFLOAT16, [3]) for name in "xy")
    proto = model([make("Mul", ["x", "x"], ["y"])], [x], [y], opset=17)
    with pytest.raises(BackendError, match=r"implementation for Mul.*it reads bfloat16\[3\], bfloat16\[3\]"):
        xrlflow.optimize(proto, portable=True, search="greedy")


def test_an_output_that_numpy_lacks_is_named() -> None:
    x, y = declare("x", TensorProto.FLOAT, [3]), declare("y", TensorProto.BFLOAT16, [3])
    proto = model([make("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)], [x], [y], opset=17)
    result = xrlflow.optimize(proto, portable=True, search="greedy")
    assert result.report.returned_original
    assert re.search(r"output 'y' is bfloat16.*--no-measure", result.report.reason)
    xrlflow.optimize(proto, portable=True, search="greedy", measure=False)


def test_a_file_in_the_runtimes_own_format_is_said_to_be(tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "m.ort")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.add_session_config_entry("session.save_model_format", "ORT")
    x, y = declare("x", TensorProto.FLOAT, [3]), declare("y", TensorProto.FLOAT, [3])
    proto = model([make("Relu", ["x"], ["y"])], [x], [y], opset=17)
    ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    with pytest.raises(ModelError, match=r"own format \(\.ort\).*pass the ONNX file that it was made from"):
        xrlflow.optimize(tmp_path / "m.ort")


@pytest.mark.parametrize("place", [False, True])
def test_no_rule_is_to_blame_for_a_file_that_changes(tmp_path: Path, place: bool) -> None:
    """The result of the old file would be compared with the new one."""
    source = tmp_path / "m.onnx"
    x, y = declare("x", TensorProto.FLOAT, [4, 64]), declare("y", TensorProto.FLOAT, [4, 64])
    nodes = [make("MatMul", ["x", "w"], ["a"]), make("Relu", ["a"], ["b"]), make("Relu", ["b"], ["y"])]
    onnx.save(model(nodes, [x], [y], {"w": np.full((64, 64), 1, np.float32)}), source)
    other = model(nodes, [x], [y], {"w": np.full((64, 64), 2, np.float32)}).SerializeToString()

    def listener(phase: str, *_: Any) -> None:
        if phase == "verify" and source.read_bytes() != other:
            if not place:
                source.unlink()
            source.write_bytes(other)

    with pytest.raises(ModelError, match=re.escape(f"{source}: the file has changed since it was read")):
        xrlflow.optimize(source, portable=True, measure=False, search="greedy", listener=listener)
