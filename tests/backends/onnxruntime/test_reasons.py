"""Which part of ONNX Runtime's errors is shown, and the advice about versions."""

from __future__ import annotations

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from xrlflow.backends import BackendError
from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.onnxruntime.reasons import reason

SOURCE = "/onnxruntime_src/onnxruntime/core"
NODE = "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running"
MESSAGES = {
    f"{NODE} Reshape node. Name:'r' Status Message: {SOURCE}/providers/cpu/tensor/reshape_helper.h:47"
    " onnxruntime::ReshapeHelper::ReshapeHelper(const onnxruntime::TensorShape&, onnxruntime::TensorShapeVector&,"
    " bool) input_shape_size == size was false. Input shape:{2,3}, requested shape:{4,4}": (
        "Reshape 'r': input_shape_size == size was false. Input shape:{2,3}, requested shape:{4,4}"
    ),
    f"{NODE} Conv node. Name:'' Status Message: nchwc_ops.cc:166 Compute Input channels C is not equal": (
        "Conv: Input channels C is not equal"
    ),
    f"{NODE} Concat node. Name:'c' Status Message: {SOURCE}/providers/cpu/tensor/concat.cc:170 onnxruntime::common::"
    "Status onnxruntime::ConcatBase::Prepare(const std::vector<const onnxruntime::Tensor*>&, onnxruntime::Prepare&)"
    " const [with T = float; U = int] sizes differ (2 and 3)": "Concat 'c': sizes differ (2 and 3)",
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Exception during initialization: "
    f"{SOURCE}/providers/cpu/math/cumsum.h:20 onnxruntime::CumSum<T>::CumSum(const onnxruntime::OpKernelInfo&)"
    " [with T = float] attribute exclusive can only be 0 or 1": "attribute exclusive can only be 0 or 1",
    "[ONNXRuntimeError] : 10 : FAIL : Load model from a b.onnx failed:This is an invalid model. In Node, Relu": (
        "In Node, Relu"
    ),
    "[ONNXRuntimeError] : 1 : FAIL : Node () Op (Mul) [ShapeInferenceError] Incompatible dimensions": (
        "Node () Op (Mul) [ShapeInferenceError] Incompatible dimensions"
    ),
    "[ONNXRuntimeError] : 1 : FAIL : Fatal error: my.ops:Foo(-1) is not a registered function/op": (
        "it has no operator Foo of 'my.ops': register the library of that operator in SessionOptions, and give them to"
        " xrlflow.optimize(..., options=Options(session_options=...))"
    ),
    '[ONNXRuntimeError] : 10 : INVALID_GRAPH : Load model from m.onnx failed:This is an invalid model. In Node, ("",'
    ' Foo, "", -1) : ("x": tensor(float),) -> ("a",) , Error No Op registered for Foo with domain_version of 17': (
        "opset 17 has no operator Foo: export the model with an opset that has it"
    ),
    f"it ends at {SOURCE}/graph.cc:3 ": f"it ends at {SOURCE}/graph.cc:3",
    "No corresponding Numpy type for Tensor Type. bfloat16": "No corresponding Numpy type for Tensor Type. bfloat16",
}


@pytest.mark.parametrize("text", MESSAGES)
def test_what_tells_nothing_is_left_out(text: str) -> None:
    assert reason(text) == MESSAGES[text]


def test_the_end_of_a_long_message_stays() -> None:
    told = reason("a" * 900 + " and that is the reason")
    assert len(told) < 600
    assert told.endswith("and that is the reason")


def relu(**versions: int) -> bytes:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    opset = helper.make_opsetid("", versions.get("opset", 17))
    return bytes(
        helper.make_model(graph, opset_imports=[opset], ir_version=versions.get("ir", 8)).SerializeToString()
    )


def test_a_newer_ir_version_says_what_to_do() -> None:
    with pytest.raises(BackendError) as caught:
        open_model(relu(ir=99))
    told = str(caught.value)
    assert f"its IR version is 99, and this ONNX Runtime ({ort.__version__}) reads" in told
    assert "set the model's `ir_version` to" in told
    assert "install ONNX Runtime of a newer version" in told


def test_a_newer_opset_says_what_to_do() -> None:
    with pytest.raises(BackendError) as caught:
        open_model(relu(opset=99))
    told = str(caught.value)
    assert f"its opset is 99, and this ONNX Runtime ({ort.__version__}) reads" in told
    assert "export the model with an older opset" in told


@pytest.mark.parametrize(("kind", "given"), [("ir", 14), ("opset", 27), ("opset", 28)])
def test_the_runtime_that_reads_it_is_named(kind: str, given: int) -> None:
    text = {
        "ir": f"Unsupported model IR version: {given}, max supported IR version: 13",
        "opset": f"Opset {given} is under development. Current official support for domain ai.onnx is till opset 26.",
    }[kind]
    assert reason(text).endswith("or install ONNX Runtime 1.32")


def test_types_that_numpy_lacks_are_named() -> None:
    cast = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])
    y = helper.make_tensor_value_info("y", TensorProto.BFLOAT16, [3])
    graph = helper.make_graph([cast], "g", [x], [y])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with open_model(proto.SerializeToString()) as model:
        with pytest.raises(BackendError, match="output 'y' is bfloat16, which NumPy lacks"):
            model.check_types()
        with pytest.raises(BackendError, match="output 'y' is bfloat16"):
            model.run({"x": onnx.numpy_helper.to_array(helper.make_tensor("x", 1, [3], [1.0, 2.0, 3.0]))})
    with open_model(relu()) as model:
        model.check_types()
