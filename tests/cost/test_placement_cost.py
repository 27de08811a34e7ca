"""The cost of graphs of which a part runs in generated kernels, and prices of single kernels."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cost.graphs import Builder, random_edit, random_graph, t
from xrlflow.backends.tvm.library.operator_times import Operator, Times
from xrlflow.cost import AdditiveCost, Database, KernelPrices, PlacementCost, Roofline
from xrlflow.cost.machine import REFERENCE
from xrlflow.cost.model import InTypes
from xrlflow.ir import Edit, Graph, Node, apply_edit, digest, plan_edit
from xrlflow.ops.work import work

pytestmark = pytest.mark.measures


class Drawn(AdditiveCost):
    """A price drawn for each operator, attributes and types."""

    @property
    def name(self) -> str:
        return "drawn"

    def price(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        return Random(digest(f"{node.op} {node.attrs!r} {in_types} {node.types}")).random()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database(tmp_path / "prices.sqlite") as opened:
        yield opened


def never(operators: Sequence[Operator], channels_last: bool) -> list[None]:
    raise AssertionError("nothing is to be measured")


def taken(seconds: float, waiting: float = 0.0) -> Times:
    return Times(np.full(5, seconds), waiting)


def unknown(runtime: AdditiveCost, database: Database) -> KernelPrices:
    return KernelPrices(runtime, never, 2, "test", database)


def placed_edit(draw: Random, graph: Graph) -> Edit:
    """One node on the other side."""
    node = draw.choice([n for n in graph.nodes() if not n.const])
    return plan_edit(graph, "place", (node.with_runtime(not node.on_runtime),), {})


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), nodes=st.integers(1, 25))
def test_the_delta_is_the_difference_of_the_costs(
    seed: int, nodes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = Random(seed)
    with Database(tmp_path_factory.getbasetemp() / "drawn.sqlite") as opened:
        model = PlacementCost(Drawn({"N": 9}), unknown(Drawn({"N": 9}), opened), REFERENCE)
        graph = random_graph(draw, nodes)
        cost = model.cost(graph)
        for step in range(8):
            if all(n.const for n in graph.nodes()):
                break
            edit = placed_edit(draw, graph) if draw.random() < 0.5 else random_edit(draw, graph, step)
            delta = model.delta(graph, edit)
            graph, _ = apply_edit(graph, edit)
            successor = model.cost(graph)
            assert successor == pytest.approx(cost + delta, rel=1e-9, abs=1e-12)
            cost = successor


def chain(*left: bool) -> tuple[Graph, list[Node]]:
    """A product, an activation, a normalisation: each with or without kernels."""
    b = Builder()
    square, scale = b.weight(16, 16), b.weight(16)
    first = b.node("MatMul", [b.input(t(4, 16)), square], t(4, 16))
    second = b.node("Relu", [first.id], t(4, 16))
    third = b.node("LayerNormalization", [second.id, scale], t(4, 16))
    b.nodes = [node.with_runtime(side) for node, side in zip(b.nodes, left)]
    return b.graph(third.id), b.nodes


def test_what_follows_in_a_kernel_costs_nothing_and_a_border_costs_a_call(database: Database) -> None:
    runtime = Roofline(REFERENCE)
    model = PlacementCost(runtime, unknown(runtime, database), REFERENCE)

    def alone(graph: Graph, node: Node) -> float:
        return runtime.seconds(graph, node, tuple(graph.type(v) for v in node.inputs))

    graph, (product, relu, norm) = chain(False, False, False)
    assert model.cost(graph) == pytest.approx(alone(graph, product) + alone(graph, norm))
    graph, (product, relu, norm) = chain(False, True, True)
    every = sum(alone(graph, node) for node in (product, relu, norm))
    assert model.cost(graph) == pytest.approx(every + REFERENCE.overhead)
    assert model.runs_on_runtime(graph, relu)
    assert not model.runs_on_runtime(graph, product)


def test_a_border_in_an_image_costs_conversions(database: Database) -> None:
    b = Builder()
    first = b.node("Tanh", [b.input(t(1, 64, 56, 56))], t(1, 64, 56, 56))
    last = b.node("Exp", [first.id], t(1, 64, 56, 56))
    whole = b.graph(last.id)
    b.nodes[0] = first.with_runtime(True)
    split = b.graph(last.id)
    runtime = Roofline(REFERENCE)
    model = PlacementCost(runtime, unknown(runtime, database), REFERENCE)
    relative = (model.cost(split) - model.cost(whole)) / model.cost(whole)
    assert relative > 1.0  # Exp is no longer computed with Tanh, and 800 kB are converted


def test_operators_of_a_graph_are_measured_once_and_remembered(database: Database) -> None:
    asked: list[int] = []

    def measure(operators: Sequence[Operator], channels_last: bool) -> list[Times | None]:
        asked.append(len(operators))
        assert not channels_last
        return [taken(1e-3) if b"MatMul" in model else None for model, _ in operators]

    graph, (product, relu, norm) = chain(False, False, False)
    runtime = Roofline(REFERENCE)
    later = time.monotonic() + 100
    prices = KernelPrices(runtime, measure, 2, "one", database)
    types = {node.id: tuple(graph.type(v) for v in node.inputs) for node in (product, relu, norm)}
    before = prices.seconds(graph, relu, types[relu.id])
    assert before == runtime.seconds(graph, relu, types[relu.id])
    assert prices.learn(graph, later) == 3
    assert prices.learn(graph, later) == 0
    assert asked == [3]
    assert prices.seconds(graph, product, types[product.id]) == pytest.approx(1e-3)
    assert prices.seconds(graph, relu, types[relu.id]) is None
    model = PlacementCost(runtime, prices, REFERENCE)
    assert model.runs_on_runtime(graph, relu)
    assert model.loses(graph, product)
    again = KernelPrices(runtime, never, 2, "one", database)
    again.learn(graph, later)
    assert again.seconds(graph, relu, types[relu.id]) is None  # that there is no kernel is remembered, too
    other = KernelPrices(runtime, measure, 2, "another code generator", database)
    other.learn(graph, later)
    assert asked == [3, 3]


def test_unknown_operators_cost_what_others_of_their_kind_do(database: Database) -> None:
    graph, (product, *_) = chain(False, False, False)
    runtime = Roofline(REFERENCE)
    b = Builder()
    larger = b.node("MatMul", [b.input(t(64, 16)), b.weight(16, 16)], t(64, 16))
    other = b.graph(larger.id)
    in_types = tuple(other.type(v) for v in larger.inputs)
    price = runtime.seconds(graph, product, tuple(graph.type(v) for v in product.inputs))
    prices = KernelPrices(runtime, lambda ops, last: [taken(3 * price)] * len(ops), 2, "", database)
    prices.learn(graph, time.monotonic() + 100)
    assert work(larger, in_types, {}).kind is work(product, in_types, {}).kind
    assert prices.seconds(other, larger, in_types) == pytest.approx(
        3 * runtime.seconds(other, larger, in_types)
    )


def test_nothing_is_measured_when_time_is_over(database: Database) -> None:
    prices = unknown(Roofline(REFERENCE), database)
    assert prices.learn(chain(False, False, False)[0], time.monotonic()) == 0


def test_images_have_channels_last_where_a_convolution_sums_over_them(database: Database) -> None:
    layouts: list[bool] = []

    def measure(operators: Sequence[Operator], channels_last: bool) -> list[None]:
        layouts.append(channels_last)
        return [None] * len(operators)

    for groups in (1, 16):
        b = Builder()
        image = t(1, 16, 32, 32)
        conv = b.node("Conv", [b.input(image), b.weight(16, 16 // groups, 1, 1)], image, group=groups)
        prices = KernelPrices(Roofline(REFERENCE), measure, 2, f"{groups}", database)
        prices.learn(b.graph(conv.id), time.monotonic() + 100)
    assert layouts == [True, False]


def test_what_was_disturbed_is_not_remembered(database: Database) -> None:
    graph, (product, *_) = chain(False, False, False)
    in_types = tuple(graph.type(v) for v in product.inputs)
    asked: list[int] = []

    def measure(operators: Sequence[Operator], channels_last: bool) -> list[Times | None]:
        asked.append(len(operators))
        times = Times(np.array([1.0, 3.0, 3.0, 3.0, 3.0]), 0.5)
        return [times] * len(operators)

    for _ in range(2):
        prices = KernelPrices(Roofline(REFERENCE), measure, 2, "", database)
        prices.learn(graph, time.monotonic() + 100)
        found = prices.seconds(graph, product, in_types)
        assert found is not None
        assert found < 2.0  # the fastest are closer to the truth
    assert asked == [3, 3]
