"""Functions of a model: ONNX Runtime runs its own operator where a function has the name of one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from xrlflow.onnxio import load, to_proto
from xrlflow.ops.contrib import OPERATORS

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
_IMPORTS = [
    helper.make_opsetid("", 21),
    helper.make_opsetid("com.microsoft", 1),
    helper.make_opsetid("my", 1),
]


def function(domain: str, name: str, *nodes: onnx.NodeProto) -> onnx.FunctionProto:
    return helper.make_function(domain, name, ["x"], ["y"], list(nodes), _IMPORTS)


def calling(domain: str, name: str, functions: Sequence[onnx.FunctionProto]) -> onnx.ModelProto:
    """y = name(x), for x [2,4]."""
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2, 4]) for n in "xy")
    node = helper.make_node(name, ["x"], ["y"], domain=domain)
    graph = helper.make_graph([node], "g", [x], [y])
    return helper.make_model(graph, opset_imports=_IMPORTS, ir_version=10, functions=functions)


def run(proto: onnx.ModelProto) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": X})[0])


NEG = helper.make_node("Neg", ["x"], ["y"])


@pytest.mark.parametrize(
    ("domain", "name", "op"),
    [
        ("com.microsoft", "QuickGelu", "com.microsoft::QuickGelu"),
        ("com.microsoft", "NotOfTheRuntime", "Neg"),
        ("", "Gelu", "Gelu"),
        ("my", "QuickGelu", "Neg"),
    ],
)
def test_an_operator_of_the_runtime_is_not_inlined(domain: str, name: str, op: str) -> None:
    proto = calling(domain, name, [function(domain, name, NEG)])
    imported = load(proto)
    assert [node.op for node in imported.graph.nodes()] == [op]
    written = to_proto(imported, imported.graph)
    np.testing.assert_array_equal(run(written), run(proto))
    assert [f.name for f in written.functions] == ([] if op == "Neg" else [name])
    onnx.checker.check_model(written, full_check=True)


def test_functions_that_a_kept_one_calls_are_kept() -> None:
    outer = function("com.microsoft", "QuickGelu", helper.make_node("Inner", ["x"], ["y"], domain="my"))
    proto = calling(
        "com.microsoft", "QuickGelu", [outer, function("my", "Inner", NEG), function("my", "Other", NEG)]
    )
    imported = load(proto)
    assert [f.name for f in to_proto(imported, imported.graph).functions] == ["QuickGelu", "Inner"]


def test_defaults_of_a_kept_function_are_not_the_operators() -> None:
    body = function("com.microsoft", "QuickGelu", NEG)
    body.attribute_proto.append(helper.make_attribute("alpha", 5.0))
    proto = calling("com.microsoft", "QuickGelu", [body])
    (node,) = load(proto).graph.nodes()
    assert "alpha" not in node.attrs


def test_weights_of_a_kept_function_are_written() -> None:
    weights = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    body = function(
        "com.microsoft",
        "QuickGelu",
        helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weights)),
        helper.make_node("ReduceMax", ["w"], ["m"], keepdims=0),
        helper.make_node("Add", ["x", "m"], ["y"]),
    )
    imported = load(calling("com.microsoft", "QuickGelu", [body]).SerializeToString())
    (written,) = to_proto(imported, imported.graph).functions
    np.testing.assert_array_equal(numpy_helper.to_array(written.node[0].attribute[0].t), weights)


@pytest.mark.parametrize(("op", "kept"), [("Neg", True), ("Identity", False)])
def test_a_function_is_left_out_where_its_operators_have_changed(op: str, kept: bool) -> None:
    body = function("com.microsoft", "QuickGelu", helper.make_node(op, ["x"], ["y"]))
    imported = load(calling("com.microsoft", "QuickGelu", [body]))
    written = to_proto(imported, imported.graph, opset=23)
    assert len(written.functions) == kept
    onnx.checker.check_model(written, full_check=True)


@pytest.mark.skipif(ort.__version__ != "1.31.1", reason="the names are those of 1.31.1")
def test_the_names_are_those_of_the_runtime() -> None:
    schemas = ort.capi.onnxruntime_pybind11_state.get_all_operator_schema()
    assert {s.name for s in schemas if s.domain == "com.microsoft"} == OPERATORS


def test_the_runtime_takes_no_notice_of_an_overload() -> None:
    own = function("com.microsoft", "FastGelu", NEG)
    own.overload = "v2"
    proto = calling("com.microsoft", "FastGelu", [own])
    proto.graph.node[0].overload = "v2"
    imported = load(proto)
    assert [node.op for node in imported.graph.nodes()] == ["com.microsoft::FastGelu"]
    np.testing.assert_array_equal(run(to_proto(imported, imported.graph)), run(proto))


@pytest.mark.parametrize(("domain", "name"), [("ai.onnx.ml", "Binarizer"), ("", "MeanVarianceNormalization")])
def test_operators_of_other_domains_and_opsets(domain: str, name: str) -> None:
    own = function(domain, name, NEG)
    own.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    proto = calling(domain, name, [own])
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    imported = load(proto)
    assert "Neg" not in [node.op for node in imported.graph.nodes()]
    np.testing.assert_array_equal(run(to_proto(imported, imported.graph)), run(proto))
