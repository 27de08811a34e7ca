"""The sum over nodes and its difference by an edit agree, whatever a node costs."""

import math
import time
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cost.graphs import SHAPE, Builder, random_edit, random_graph, t
from xrlflow.cost.model import AdditiveCost, InTypes, NoTimeLeft, in_time
from xrlflow.cost.roofline import Roofline
from xrlflow.ir import Graph, Node, Value, apply_edit, digest, plan_edit


class Arbitrary(AdditiveCost):
    """A price drawn for each operator and types, and the number of times that one was asked for."""

    asked = 0

    @property
    def name(self) -> str:
        return "arbitrary"

    def price(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        self.asked += 1
        return Random(digest(f"{node.op} {node.attrs!r} {in_types} {node.types}")).random()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), nodes=st.integers(1, 25), roofline=st.booleans())
def test_the_delta_is_the_difference_of_the_costs(seed: int, nodes: int, roofline: bool) -> None:
    draw = Random(seed)
    model: AdditiveCost = Roofline(bindings={"N": 9}) if roofline else Arbitrary()
    graph = random_graph(draw, nodes)
    cost = model.cost(graph)
    for step in range(6):
        if all(n.const for n in graph.nodes()):
            break
        edit = random_edit(draw, graph, step)
        delta = model.delta(graph, edit)
        graph, _ = apply_edit(graph, edit)
        successor = model.cost(graph)
        assert successor == pytest.approx(cost + delta, rel=1e-9, abs=1e-15)
        cost = successor


def test_a_reader_of_a_value_that_became_more_precise_is_priced_again() -> None:
    b = Builder()
    x = b.input(SHAPE)
    first = b.node("Relu", [x], SHAPE)
    reader = b.node("Tanh", [first.id], SHAPE)
    graph = b.graph(reader.id)
    model = Arbitrary()
    edit = plan_edit(graph, "refine", (Node("Neg", (x,), first.outputs, (t(4, 16),)),), {})
    before, after = model.cost(graph), model.cost(apply_edit(graph, edit)[0])
    replaced = model.breakdown(graph)[first.id]
    assert model.delta(graph, edit) == pytest.approx(after - before)
    assert model.breakdown(apply_edit(graph, edit)[0])[reader.id] != model.breakdown(graph)[reader.id]
    assert after - before != pytest.approx(model.breakdown(apply_edit(graph, edit)[0])[first.id] - replaced)


def test_constant_nodes_cost_nothing() -> None:
    b = Builder()
    x, w = b.input(SHAPE), b.weight(16, 16)
    folded = b.node("Exp", [w], t(16, 16, const=True))
    y = b.node("MatMul", [x, folded.id], SHAPE)
    model = Arbitrary()
    breakdown = model.breakdown(b.graph(y.id))
    assert breakdown[folded.id] == 0
    assert model.cost(b.graph(y.id)) == breakdown[y.id] > 0


def test_a_price_is_asked_for_once() -> None:
    b = Builder()
    x = b.input(SHAPE)
    value: Value = x
    for _ in range(10):
        value = b.node("Relu", [value], SHAPE).id
    model = Arbitrary()
    graph = b.graph(value)
    assert model.cost(graph) == model.cost(graph) == pytest.approx(10 * model.breakdown(graph)[value])
    assert model.asked == 1


def test_no_price_is_given_too_late() -> None:
    b = Builder()
    x = b.input(SHAPE)
    graph = b.graph(b.node("Relu", [x], SHAPE).id)
    edit = plan_edit(graph, "nothing", (), {})
    assert in_time(lambda graph, edit: 5.0, math.inf)(graph, edit) == 5.0
    with pytest.raises(NoTimeLeft):
        in_time(lambda graph, edit: 5.0, time.monotonic() - 1e-3)(graph, edit)


def test_an_absent_input_is_priced() -> None:
    b = Builder()
    x = b.input(SHAPE)
    y = b.node("Clip", [x, Value(0), b.weight()], SHAPE)
    assert Roofline().cost(b.graph(y.id)) > 0
