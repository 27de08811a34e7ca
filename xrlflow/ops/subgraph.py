"""Turns a few nodes into a model of their own, which can be measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper
import onnx.numpy_helper

from xrlflow.ir import Body, DType, Node, TensorType, Value
from xrlflow.ops.infer import attr_proto, type_proto
from xrlflow.ops.schema import IR_VERSION, OPSET, later, split_op


class NotStandalone(ValueError):
    """The nodes cannot be a model of their own: there is a body, or there are values that NumPy cannot hold."""


def input_name(value: Value) -> str:
    """The name that a value gets in the model."""
    return f"v{value}"


def model_of(
    nodes: Sequence[Node],
    inputs: Mapping[Value, TensorType],
    consts: Mapping[Value, npt.NDArray[Any]],
    outputs: Sequence[Value],
) -> bytes:
    """A serialised model of these nodes, producers first, at the canonical opset or the first that defines them all.

    The caller of the model feeds `inputs`; `consts` become initialisers, so that the runtime may pack them in advance.
    Raises NotStandalone for control flow and for element types that NumPy lacks.
    """
    newer = [late[1] for n in nodes if (late := later(n.op)) is not None]
    domains = dict.fromkeys(split_op(n.op)[0] for n in nodes if later(n.op) is None)
    imports = [
        onnx.helper.make_opsetid("", max([OPSET, *newer])),
        *(onnx.helper.make_opsetid(d, 1) for d in domains if d),
    ]
    types = {v: type_proto(t) for n in nodes for v, t in zip(n.outputs, n.types)}
    graph = onnx.helper.make_graph(
        [_node(n) for n in nodes],
        "alone",
        [onnx.helper.make_value_info(input_name(v), type_proto(t)) for v, t in inputs.items()],
        [onnx.helper.make_value_info(input_name(v), types[v]) for v in outputs],
        [onnx.numpy_helper.from_array(np.asarray(a, order="C"), input_name(v)) for v, a in consts.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)
    serialized: bytes = model.SerializeToString()
    return serialized


def numpy_type(dtype: DType) -> np.dtype[Any]:
    """The NumPy type for an element type. Raises NotStandalone if NumPy has none."""
    try:
        result = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(int(dtype)))
    except (KeyError, TypeError, ValueError) as error:
        raise NotStandalone(f"{dtype.name} has no NumPy type") from error
    if result.kind not in "biuf":
        raise NotStandalone(f"{dtype.name} is not a plain number")
    return result


def _node(node: Node) -> onnx.NodeProto:
    if node.captured or any(isinstance(v, Body) for v in node.attrs.values()):
        raise NotStandalone(f"{node.op} has a body")
    late = later(node.op)
    domain, name = split_op(node.op) if late is None else ("", late[0])
    return onnx.NodeProto(
        op_type=name,
        domain=domain,
        name=f"n{node.id}",
        input=[input_name(v) if v else "" for v in node.inputs],
        output=[input_name(v) for v in node.outputs],
        attribute=[attr_proto(k, v) for k, v in node.attrs.items()],
    )
