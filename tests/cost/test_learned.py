"""The learned cost: neighbourhoods and their numbers, the network in NumPy, and the sum that a search minimises."""

from __future__ import annotations

import contextlib
import io
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models
from rewrite_rules import LIBRARY
from tests.cost.graphs import Builder, random_edit, random_graph, t
from xrlflow.cost import Learned, Machine, Profiled, Roofline, load_network
from xrlflow.cost.comparisons import Comparisons, ComparisonsError
from xrlflow.cost.fine_tuning import MIN_COMPARISONS, fine_tuned
from xrlflow.cost.latency_network import Evaluator, NetworkConfig, NetworkParameters, shapes
from xrlflow.cost.learned import KIND, save_network
from xrlflow.cost.neighbourhoods import Neighbourhoods
from xrlflow.ir import Graph, apply_edit
from xrlflow.onnxio import load
from xrlflow.rewrite import Library, RewriteState
from xrlflow.search import Limits, SearchResult, greedy, lookahead, random_walk, taso
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.learns

ALL = Library(LIBRARY)


def network(seed: int = 0, spread: float = 0.3, **sizes: int) -> NetworkParameters:
    """A network all of whose parameters matter."""
    config = NetworkConfig(**{"width": 8, "radius": 2, "members": 3, **sizes})
    rng = np.random.default_rng(seed)
    operators = ("(constant)", "(input)", "Add", "Conv", "MatMul", "Relu", "Transpose")
    arrays = {
        name: rng.normal(0.0, spread, (config.members, *shape)).astype(np.float32)
        for name, shape in shapes(config, len(operators)).items()
    }
    arrays |= {
        "noise": np.full((config.members, 2), 0.02, np.float32),
        "scale": np.ones(config.members, np.float32),
    }
    return NetworkParameters(config, operators, arrays)


def small(name: str) -> Graph:
    return load(models.small(name)).graph


def walk(graph: Graph, steps: int, seed: int = 0) -> list[Graph]:
    """The graphs of a random walk over the library's substitutions."""
    rng, state = random.Random(seed), RewriteState.start(graph, ALL)
    found = [graph]
    for _ in range(steps):
        state = state.apply(rng.choice(state.candidates))
        found.append(state.graph)
    return found


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32), nodes=st.integers(1, 25), radius=st.integers(0, 3))
def test_an_edit_changes_the_cost_as_if_the_successor_were_priced(seed: int, nodes: int, radius: int) -> None:
    draw = Random(seed)
    prices = Roofline(bindings={"N": 9})
    learned = Learned(prices, network(radius=radius))
    graph = random_graph(draw, nodes)
    for step in range(4):
        if all(n.const for n in graph.nodes()):
            break
        edit = random_edit(draw, graph, step)
        successor, _ = apply_edit(graph, edit)
        fresh = Learned(prices, network(radius=radius))
        before, after = fresh.cost(graph), fresh.cost(successor)
        # The network computes in float32, and sums in another order where more nodes are computed at once.
        rounding = 4 * float(np.finfo(np.float32).eps) * max(before, after)
        assert learned.delta(graph, edit) == pytest.approx(after - before, rel=1e-6, abs=rounding)
        graph = successor


@pytest.mark.parametrize("name", ["bert", "squeezenet", "nasrnn"])
def test_the_candidates_of_a_walk_cost_what_their_graphs_cost(name: str) -> None:
    learned = Learned(Roofline(), network())
    rng = random.Random(1)
    state = RewriteState.start(small(name), ALL, learned.delta)
    cost = learned.cost(state.graph)
    for _ in range(6):
        match = rng.choice(state.candidates)
        cost += learned.delta(state.graph, state.edit(match))
        state = state.apply(match)
        assert cost == pytest.approx(learned.cost(state.graph), rel=1e-6)


@pytest.mark.parametrize("radius", [0, 1, 2])
def test_nodes_with_one_number_look_alike_and_others_do_not(radius: int) -> None:
    """Layers have the numbers of other layers; a deeper network adds only what all of its layers read, and what is
    around that. Other sizes have numbers of their own."""
    view = Neighbourhoods(Roofline(), radius)
    deep = view.view(load(models.build("bert", depth=8, width=64)).graph).counts()
    before = len(view.table.levels[-1])
    deeper = view.view(load(models.build("bert", depth=9, width=64)).graph).counts()
    assert len(view.table.levels[-1]) - before <= 2 * radius
    assert sum(deeper.values()) - sum(deep.values()) > 20
    narrow = view.view(load(models.build("bert", depth=8, width=128)).graph).counts()
    assert len(narrow.keys() & deep.keys()) < len(deep) / 4


def test_a_network_sees_the_lanes_of_the_machine() -> None:
    graph = small("squeezenet")
    wide, narrow = Roofline(), Roofline()
    narrow.lanes = 8
    assert narrow.cost(graph) == wide.cost(graph)
    costs = [Learned(prices, network()).cost(graph) for prices in (wide, narrow)]
    assert costs[0] != pytest.approx(costs[1], rel=1e-3)


@pytest.mark.parametrize("lanes", [8, 16])
def test_all_prices_have_the_lanes_of_their_machine(lanes: int) -> None:
    machine = replace(Machine.reference(), lanes=lanes)
    for prices in (Roofline(machine), Profiled(machine, time_budget=0.0)):
        assert Learned(prices, network()).lanes == lanes
        known = Neighbourhoods(prices, 1)
        known.view(small("squeezenet")).counts()
        assert {row[-1] for row in known.table.contents[2:]} == {lanes / 16}


def test_a_network_without_corrections_costs_what_the_prices_say() -> None:
    parameters = network(spread=0.0)
    graph, prices = small("squeezenet"), Roofline()
    assert prices.cost(graph) < Learned(prices, parameters).cost(graph) < 1.2 * prices.cost(graph)


def test_predictions_have_the_interval_of_the_ensemble_and_of_the_noise() -> None:
    graph, other = walk(small("squeezenet"), 4)[::4]
    learned = Learned(Roofline(), network())
    same = learned.predict(graph, graph)
    assert same.median == pytest.approx(1.0)
    assert same.low < 1.0 < same.high
    found = learned.predict(graph, other)
    assert found.low < found.median < found.high
    ratios = np.log([found.low, found.median, found.high])
    assert ratios[2] - ratios[1] == pytest.approx(ratios[1] - ratios[0])
    assert found.high / found.low > same.high / same.low


@pytest.mark.filterwarnings("error")
def test_a_graph_where_nothing_runs_has_a_prediction() -> None:
    nothing = Builder()
    nothing.input(t(2))
    graph = nothing.graph(*nothing.inputs)
    learned = Learned(Roofline(), network())
    assert learned.cost(graph) == 0.0
    assert learned.predict(graph, graph).median == pytest.approx(1.0)
    assert 1.0 < learned.predict(small("nasrnn"), graph).median < np.inf


def test_a_saved_network_predicts_the_same(tmp_path: Path) -> None:
    parameters = network()
    save_network(parameters, tmp_path / "network.safetensors")
    graph = small("squeezenet")
    before = Learned(Roofline(), parameters).cost(graph)
    assert Learned(Roofline(), load_network(tmp_path / "network.safetensors")).cost(graph) == before


@pytest.mark.parametrize("damage", ["missing", "shape", "nan", "config"])
def test_a_damaged_network_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    parameters = network()
    arrays = dict(parameters.arrays)
    config = parameters.config
    if damage == "missing":
        del arrays["head.bias"]
    elif damage == "shape":
        arrays["head.bias"] = arrays["head.bias"][:, :1]
    elif damage == "nan":
        arrays["head.bias"] = np.full_like(arrays["head.bias"], np.nan)
    else:
        config = NetworkConfig(width=9, members=3)
    path = tmp_path / "network.safetensors"
    save_network(NetworkParameters(config, parameters.operators, arrays), path)
    with pytest.raises(CheckpointError, match=r"network\.safetensors: its array"):
        load_network(path)


def test_comparisons_keep_what_the_network_needs(tmp_path: Path) -> None:
    graphs = walk(small("nasrnn"), 3)
    known = Neighbourhoods(Roofline(), 2)
    counts = [known.view(g).counts() for g in graphs]
    found = Comparisons.of(known, counts, [0.1, -0.2, 0.0], [0.01] * 3, {"name": "nasrnn", "threads": 2})
    found.save(tmp_path / "nasrnn.npz")
    read = Comparisons.load(tmp_path / "nasrnn.npz")
    assert read.about["name"] == "nasrnn"
    assert read.radius == 2
    assert read.ops == found.ops
    assert all(np.array_equal(read.arrays[name], array) for name, array in found.arrays.items())
    expected = [Roofline().cost(g) for g in graphs]
    assert read.prices() == pytest.approx(expected)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"a text"])
def test_a_file_that_holds_no_comparisons_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.npz"
    path.write_bytes(content)
    with pytest.raises(ComparisonsError, match=r"some\.npz holds no comparisons"):
        Comparisons.load(path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("logs", lambda a: a * np.nan),
        ("errors", lambda a: a[1:]),
        ("seconds", lambda a: -a - 1e-6),
        ("seconds", lambda a: a.astype(np.int64)),
        ("contents", lambda a: a[:, :1]),
        ("inner.1", lambda a: a + 1_000_000),
        ("inner.1", lambda a: a.astype(np.float64)),
        ("sources.2", lambda a: a - 1_000_000),
        ("kinds.2", lambda a: a[:-1]),
        ("starts.1", lambda a: a[::-1]),
        ("number", lambda a: a + 1_000_000),
        ("graph", lambda a: np.zeros_like(a)),
        ("count", lambda a: a * 0),
        ("inner.9", lambda a: np.zeros(3, np.int32)),
    ],
)
def test_comparisons_whose_arrays_do_not_fit_are_refused(
    name: str, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    """They would end an optimisation that learns from them, or make its costs NaN."""
    found = compared(Learned(Roofline(), network()), "nasrnn", 3, 0)
    arrays = {**found.arrays, name: change(found.arrays.get(name, np.zeros(1)))}
    data = replace(found, arrays=arrays).to_bytes()
    with pytest.raises(ComparisonsError, match="collect it again"):
        Comparisons.from_bytes(data)


@pytest.mark.parametrize("value", [float("nan"), np.float64(1.0), [1]])
def test_comparisons_that_could_not_be_read_are_not_written(value: object) -> None:
    found = compared(Learned(Roofline(), network()), "nasrnn", 3, 0)
    with pytest.raises(ValueError, match="seconds"):
        replace(found, about={**found.about, "seconds": value}).to_bytes()


def test_any_damage_to_comparisons_is_reported() -> None:
    data = compared(Learned(Roofline(), network()), "nasrnn", 3, 0).to_bytes()
    rng = random.Random(0)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 3, 20])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with contextlib.suppress(ComparisonsError):
            Comparisons.from_bytes(bytes(damaged))
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    with pytest.raises(ComparisonsError):
        Comparisons.from_bytes(array.getvalue())


@pytest.mark.parametrize("sizes", [{"width": 8.0}, {"radius": 10**9}, {"members": True}, {"width": -1}])
def test_a_network_of_odd_sizes_is_refused(tmp_path: Path, sizes: dict[str, Any]) -> None:
    parameters = network()
    path = tmp_path / "network.safetensors"
    save_network(parameters, path)
    found = load_checkpoint(path, KIND)
    config = {**found.config, "network": {**found.config["network"], **sizes}}
    save_checkpoint(Checkpoint(KIND, config, found.tensors), path)
    with pytest.raises(CheckpointError, match="configuration is damaged"):
        load_network(path)


def test_a_network_whose_intervals_are_turned_round_is_refused(tmp_path: Path) -> None:
    parameters = network()
    arrays = {**parameters.arrays, "scale": -parameters.arrays["scale"]}
    save_network(replace(parameters, arrays=arrays), tmp_path / "n.safetensors")
    with pytest.raises(CheckpointError, match="scale"):
        load_network(tmp_path / "n.safetensors")


def test_comparisons_of_smaller_neighbourhoods_teach_nothing() -> None:
    found = compared(Learned(Roofline(), network()), "nasrnn", 9, 0)
    parameters = network(radius=4)
    assert fine_tuned(parameters, [found]) is parameters


def shifted(parameters: NetworkParameters, by: float) -> NetworkParameters:
    """Another machine, where moving tensors takes longer."""
    arrays = dict(parameters.arrays)
    arrays["head.bias"] = arrays["head.bias"] + np.float32([0.0, by])
    return NetworkParameters(parameters.config, parameters.operators, arrays)


def compared(truth: Learned, name: str, count: int, seed: int) -> Comparisons:
    """Walks on a network, measured by a cost model."""
    rng = random.Random(seed)
    start = small(name)
    graphs = [start, *(walk(start, rng.randint(1, 8), rng.randrange(1000))[-1] for _ in range(count))]
    known = Neighbourhoods(Roofline(), 3)
    counts = [known.view(g).counts() for g in graphs]
    logs = [float(np.log(truth.cost(start) / truth.cost(g))) for g in graphs[1:]]
    return Comparisons.of(known, counts, logs, [0.003] * count, {"name": name})


def off(parameters: NetworkParameters, truth: Learned, name: str) -> float:
    learned, start = Learned(Roofline(), parameters), small(name)
    graphs = [walk(start, 5, seed)[-1] for seed in range(100, 112)]
    wrong = [
        np.log(learned.predict(start, g).median) - np.log(truth.cost(start) / truth.cost(g)) for g in graphs
    ]
    return float(np.abs(wrong).mean())


@pytest.mark.parametrize(("count", "left"), [(MIN_COMPARISONS, 0.9), (24, 0.5)])
def test_a_few_comparisons_of_a_machine_correct_the_network(count: int, left: float) -> None:
    parameters = network(spread=0.2)
    parameters = replace(parameters, arrays={**parameters.arrays, "noise": np.full((3, 2), 2e-3, np.float32)})
    truth = Learned(Roofline(), shifted(parameters, 1.0))
    known = [compared(truth, "squeezenet", count, 0)]
    better = fine_tuned(parameters, known)
    assert off(better, truth, "squeezenet") < left * off(parameters, truth, "squeezenet")
    assert fine_tuned(parameters, [compared(truth, "squeezenet", MIN_COMPARISONS - 1, 0)]) is parameters


def test_without_time_nothing_is_learned() -> None:
    parameters = network(spread=0.2)
    known = [compared(Learned(Roofline(), shifted(parameters, 1.0)), "squeezenet", 24, 0)]
    assert fine_tuned(parameters, known, time.monotonic() - 1) is parameters


@pytest.mark.parametrize("log", [1e40, 1e300])
def test_a_comparison_beyond_all_measure_teaches_nothing(log: float) -> None:
    parameters = network(spread=0.2)
    found = compared(Learned(Roofline(), parameters), "squeezenet", 12, 0)
    wild = replace(found, arrays={**found.arrays, "logs": found.arrays["logs"] + log})
    tuned = fine_tuned(parameters, [wild])
    for name in ("head.weight", "head.bias"):
        assert tuned.arrays[name] == pytest.approx(parameters.arrays[name], abs=1e-4)


@pytest.mark.parametrize("log", [1.0, 4.0, 20.0])
def test_one_comparison_that_is_far_off_changes_little(log: float) -> None:
    parameters = network(spread=0.2)
    truth = Learned(Roofline(), shifted(parameters, 1.0))
    known = compared(truth, "squeezenet", 24, 0)
    logs = known.arrays["logs"].copy()
    logs[3] += log
    wrong = fine_tuned(parameters, [replace(known, arrays={**known.arrays, "logs": logs})])
    right = fine_tuned(parameters, [known])
    start = small("squeezenet")
    costs = [Learned(Roofline(), p).cost(start) for p in (wrong, right)]
    assert costs[0] == pytest.approx(costs[1], rel=0.1)


def test_comparisons_that_say_what_is_known_change_nothing() -> None:
    parameters = network(spread=0.2, members=1)
    truth = Learned(Roofline(), parameters)
    same = fine_tuned(parameters, [compared(truth, "squeezenet", 12, 0)])
    for name in ("head.weight", "head.bias"):
        assert same.arrays[name] == pytest.approx(parameters.arrays[name], abs=1e-4)


def test_a_table_of_comparisons_is_the_one_that_was_kept() -> None:
    parameters = network()
    found = compared(Learned(Roofline(), parameters), "nasrnn", 4, 0)
    evaluator = Evaluator(parameters, found.table())
    counts = found.counts(parameters.config.radius)
    totals = evaluator.seconds(range(counts.shape[1])).mean(0) @ counts.T  # type: ignore[arg-type]
    assert np.log(totals[0] / totals[1:]) == pytest.approx(found.arrays["logs"], abs=1e-6)


SEARCHES: dict[str, Callable[[RewriteState, float], SearchResult]] = {
    "greedy": lambda state, cost: greedy(state, cost, Limits(100)),
    "taso": lambda state, cost: taso(state, cost, Limits(30)),
    "lookahead": lambda state, cost: lookahead(state, cost, Limits(60), 2),
    "random": lambda state, cost: random_walk(state, cost, Limits(8), 3),
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", ["nasrnn", "squeezenet"])
def test_what_a_search_finds_costs_what_it_says(search: str, name: str) -> None:
    """The price of a candidate changes with what stands around it after the candidate was found."""
    learned, graph = Learned(Roofline(), network()), small(name)
    cost = learned.cost(graph)
    result = SEARCHES[search](RewriteState.start(graph, ALL, learned.delta), cost)
    assert result.best.path is not None
    for found in (result.best, *result.shortlist):
        assert found.cost == pytest.approx(learned.cost(found.state.graph), rel=1e-9)
        assert found.path is None or found.path.step.cost == found.cost
