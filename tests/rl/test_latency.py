"""The measured reward against the runtime."""

from __future__ import annotations

import pytest

import models
from tests.rules.harness import random_feeds
from xrlflow.ir import Node, apply_edit, plan_edit
from xrlflow.onnxio import load
from xrlflow.rl.latency import UNRUNNABLE, PairedLatency

pytestmark = pytest.mark.learns


@pytest.fixture
def paired() -> PairedLatency:
    proto = models.small("squeezenet")
    return PairedLatency(load(proto), proto.SerializeToString(), random_feeds(proto), 1, 0.5)


def test_a_graph_is_measured_once(paired: PairedLatency, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = paired.imported.graph
    first = paired(graph)
    assert 0.0 < first < float("inf")

    def never(*args: object, **options: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("xrlflow.rl.latency.measure", never)
    assert paired(graph) == first


def test_what_the_runtime_refuses_is_worth_nothing(paired: PairedLatency) -> None:
    graph = paired.imported.graph
    relu = next(n for n in graph.nodes() if n.op == "Relu")
    unknown = Node("com.nobody::Relu", relu.inputs, relu.outputs, relu.types, relu.attrs)
    assert paired(apply_edit(graph, plan_edit(graph, "toy", [unknown], {}))[0]) == UNRUNNABLE
