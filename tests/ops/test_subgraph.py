"""Nodes as models of their own: valid, with the numbers they were given."""

import numpy as np
import onnx
import pytest

from xrlflow.ir import NO_ATTRS, Attrs, DType, Node, TensorType, Value
from xrlflow.ops.subgraph import NotStandalone, input_name, model_of, numpy_type

FLOAT = TensorType(DType.FLOAT, (2, 3))


def test_the_model_is_valid_and_holds_the_constants() -> None:
    x, w, y, z = (Value(i) for i in (1, 2, 3, 4))
    wide = TensorType(DType.FLOAT, (2, 5))
    nodes = [
        Node("MatMul", (x, w), (y,), (wide,), NO_ATTRS),
        Node("Clip", (y, Value(0), x), (z,), (wide,), NO_ATTRS),
    ]
    weight = np.arange(15, dtype=np.float32).reshape(3, 5)
    model = onnx.load_from_string(model_of(nodes[:1], {x: FLOAT}, {w: weight}, [y]))
    onnx.checker.check_model(model, full_check=True)
    [held] = model.graph.initializer
    assert held.name == input_name(w)
    assert (onnx.numpy_helper.to_array(held) == weight).all()
    both = onnx.load_from_string(model_of(nodes, {x: FLOAT}, {w: weight}, [z]))
    assert list(both.graph.node[1].input) == [input_name(y), "", input_name(x)]


def test_a_scalar_stays_a_scalar() -> None:
    node = Node("Gather", (Value(1), Value(2)), (Value(3),), (TensorType(DType.FLOAT, (3,)),))
    model = onnx.load_from_string(model_of([node], {Value(1): FLOAT}, {Value(2): np.array(1)}, [Value(3)]))
    assert list(model.graph.initializer[0].dims) == []


def test_operators_of_later_opsets_are_written_with_theirs() -> None:
    """Next to others, which keep theirs."""
    nodes = [
        Node("ai.onnx@24::Swish", (Value(1),), (Value(2),), (FLOAT,), NO_ATTRS),
        Node("com.microsoft::Gelu", (Value(2),), (Value(3),), (FLOAT,), NO_ATTRS),
    ]
    model = onnx.load_from_string(model_of(nodes, {Value(1): FLOAT}, {}, [Value(3)]))
    assert {i.domain: i.version for i in model.opset_import} == {"": 24, "com.microsoft": 1}
    assert [(n.domain, n.op_type) for n in model.graph.node] == [("", "Swish"), ("com.microsoft", "Gelu")]


def test_other_domains_are_imported() -> None:
    node = Node("com.microsoft::Gelu", (Value(1),), (Value(2),), (FLOAT,), Attrs({}))
    model = onnx.load_from_string(model_of([node], {Value(1): FLOAT}, {}, [Value(2)]))
    assert {i.domain for i in model.opset_import} == {"", "com.microsoft"}
    assert (model.graph.node[0].domain, model.graph.node[0].op_type) == ("com.microsoft", "Gelu")


def test_captured_values_are_refused() -> None:
    node = Node("Loop", (Value(1),), (Value(2),), (FLOAT,), captured=1)
    with pytest.raises(NotStandalone, match="body"):
        model_of([node], {Value(1): FLOAT}, {}, [Value(2)])


def test_numpy_types() -> None:
    assert numpy_type(DType.FLOAT16) == np.float16
    assert numpy_type(DType.BOOL) == np.bool_
    for dtype in (DType.STRING, DType.UNDEFINED, DType.BFLOAT16, DType.COMPLEX64):
        with pytest.raises(NotStandalone):
            numpy_type(dtype)
