"""Whole models: measured once each, compared by difference."""

import numpy as np
import pytest

from tests.cost.graphs import Builder, t
from xrlflow.backends.protocol import BackendError
from xrlflow.cost.measured import Measured
from xrlflow.ir import Graph, Node, plan_edit
from xrlflow.ops.subgraph import input_name, model_of


def small_graph() -> tuple[Graph, Node]:
    b = Builder()
    x = b.input(t(2, 3))
    first = b.node("Relu", [x], t(2, 3))
    return b.graph(b.node("Tanh", [first.id], t(2, 3)).id), first


def test_each_graph_is_exported_and_measured_once() -> None:
    exported: list[int] = []

    def export(graph: Graph) -> bytes:
        exported.append(graph.fingerprint)
        return model_of(graph.topological(), {v: graph.type(v) for v in graph.inputs}, {}, graph.outputs)

    graph, first = small_graph()
    feeds = {input_name(graph.inputs[0]): np.ones((2, 3), np.float32)}
    model = Measured(export, feeds, threads=1, time_limit=0.002)
    assert (model.name, model.provenance) == ("measured", "measured")
    edit = plan_edit(graph, "swap", (Node("Abs", first.inputs, first.outputs, first.types),), {})
    delta = model.delta(graph, edit)
    assert model.delta(graph, edit) == delta
    assert len(exported) == len(set(exported)) == 2
    assert model.cost(graph) > 0
    assert model.cost(graph) + delta > 0


def test_a_model_that_the_runtime_refuses_is_an_error() -> None:
    graph, _ = small_graph()
    model = Measured(lambda _: b"not a model", {}, threads=1)
    with pytest.raises(BackendError, match="cannot load"):
        model.cost(graph)
