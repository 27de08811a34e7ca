"""Models of rules' left-hand sides for `tests/fuzz/run.py`: every rule is seen, next to others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import onnx
from onnx import helper

from models.rule_graphs import rule_graph
from rewrite_rules import LIBRARY
from tests.fuzz.check import sees_nan
from tests.fuzz.models import Subject
from xrlflow.ir import FLOATS, Graph, TensorType
from xrlflow.onnxio import ImportedModel, load, to_proto
from xrlflow.verify.inputs import InputPlan

_TRIES = 5


def _exchanged(info: onnx.ValueInfoProto) -> bool:
    """Whether NumPy knows the elements: ONNX Runtime's binding does not exchange others."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)).kind != "V"


@cache
def _empty() -> ImportedModel:
    value = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "fuzz", [value], [])
    graph.output.append(helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1]))
    return load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10))


def _declared(name: str, type: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, int(type.dtype), type.shape)


def as_proto(graph: Graph) -> onnx.ModelProto:
    """A graph that came from no file, as a model."""
    frame = onnx.ModelProto()
    frame.CopyFrom(_empty().frame)
    for listed, stem, values in (
        (frame.graph.input, "x", graph.inputs),
        (frame.graph.output, "y", graph.outputs),
    ):
        del listed[:]
        listed.extend(_declared(f"{stem}{i}", graph.type(v)) for i, v in enumerate(values))
    return to_proto(replace(_empty(), graph=graph, frame=frame, labels={}, recipes={}), graph)


def rules(seed: int) -> Subject:
    """Two or three rules' left-hand sides. Integers are what the operators that read them take."""
    for attempt in range(_TRIES):
        proto = as_proto(rule_graph(LIBRARY, _TRIES * seed + attempt, 2 + seed % 2))
        if all(_exchanged(v) for v in (*proto.graph.input, *proto.graph.output)):
            break
    imported = load(proto)
    feeds = InputPlan.of(imported).case({}, seed, 0).feeds
    floats = {int(t) for t in FLOATS}
    fixed = {v.name: feeds[v.name] for v in proto.graph.input if v.type.tensor_type.elem_type not in floats}
    return Subject(proto, fixed=fixed, specials=sees_nan(proto))
