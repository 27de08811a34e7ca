"""Prices of operators in generated kernels are those of the algorithms that they get, and a search goes by them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("tvm")

from rewrite_rules.merge import MergeParallelConvs
from tests.rules.harness import model
from xrlflow.backends.tvm import detect
from xrlflow.backends.tvm.kernels import bands
from xrlflow.backends.tvm.kernels.algorithms import Algorithms, Timed, Times
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm, LayerWorkload
from xrlflow.backends.tvm.library.operator_times import Operator, operator_times
from xrlflow.backends.tvm.library.operator_times import Times as Taken
from xrlflow.backends.tvm.library.operator_times import _compiled as compiled
from xrlflow.cost import Database, KernelPrices, PlacementCost, Roofline
from xrlflow.cost.machine import REFERENCE
from xrlflow.onnxio import load
from xrlflow.rewrite import Library, RewriteState
from xrlflow.search import Limits, greedy

pytestmark = pytest.mark.measures

MACHINE = detect(cores=1)
LESS = {Algorithm.TILES.value: 1.0, Algorithm.F23.value: 2.25, Algorithm.F43.value: 4.0}


def conv(columns: int, channels: int = 64, side: int = 16) -> onnx.ModelProto:
    weights = np.random.default_rng(0).standard_normal((columns, channels, 3, 3)).astype(np.float32)
    return model(
        f"agraph (float[1,{channels},{side},{side}] x) => (float[1,{columns},{side},{side}] y) "
        "{ y = Conv<pads = [1, 1, 1, 1]>(x, w) }",
        w=weights,
    )


class Fastest:
    """Times of which one algorithm's are the least."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._times = {a: Timed(1.0 if a is algorithm else 2.0) for a in Algorithm}

    def of(self, workload: LayerWorkload, far: bool) -> Times:
        return self._times

    def of_block(self, workload: bands.ConvBlock, far: bool) -> None:
        return None


@pytest.mark.parametrize(
    "algorithm", [a for a in Algorithm if a is not Algorithm.PRODUCT], ids=lambda a: a.name
)
def test_an_operator_is_timed_with_the_algorithm_that_it_gets(
    algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what was measured, if something was."""
    from xrlflow.backends.tvm.library import operator_times as module

    result = []
    compile_region = module.compile_region

    def watched(*given: object, **named: object) -> object:
        result.append(compile_region(*given, **named))  # type: ignore[arg-type]
        return result[-1]

    monkeypatch.setattr(module, "compile_region", watched)
    feeds = {"x": np.ones((1, 16, 8, 8), np.float32)}
    (times,) = operator_times(
        [(conv(16, 16, 8).SerializeToString(), feeds)], MACHINE, 1,
        channels_last=True, algorithms=Algorithms(timings=Fastest(algorithm)),
    )  # fmt: skip
    assert times is not None
    assert [chosen.algorithm for chosen in result[0].chosen] == [algorithm.value]
    assert any("winograd" in str(v) for v in result[0].module.functions) == (algorithm.m is not None)


def work_of(algorithms: Algorithms, operators: Sequence[Operator], channels_last: bool) -> list[Taken | None]:
    """Prices that are exact: seconds in proportion to the multiplications of the kernels of each operator."""
    result: list[Taken | None] = []
    for serialized, _ in operators:
        proto = onnx.load_from_string(serialized)
        region = compiled(proto, MACHINE, channels_last, algorithms)
        assert region is not None
        less = LESS.get(region.chosen[0].algorithm, 1.0) if region.chosen else 1.0
        sizes = [math.prod(t.dims) for t in proto.graph.initializer if len(t.dims) == 4]
        result.append(Taken(np.full(5, 1e-9 * (1 + sum(sizes)) / less), 0.0))
    return result


@pytest.mark.parametrize(("algorithms", "merges"), [(Algorithms(), True), (Algorithms(exact=True), False)])
def test_a_search_merges_where_channels_fit_a_faster_algorithm(
    algorithms: Algorithms, merges: bool, tmp_path: Path
) -> None:
    """Convolutions to 8 channels have direct kernels alone; one to 16 channels has others."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((8, 64, 3, 3)).astype(np.float32) for name in "vw"}
    both = model(
        "agraph (float[1,64,16,16] x) => (float[1,8,16,16] a, float[1,8,16,16] b) "
        "{ a = Conv<pads = [1, 1, 1, 1]>(x, v) b = Conv<pads = [1, 1, 1, 1]>(x, w) }",
        **weights,
    )
    graph, library = load(both).graph, Library([MergeParallelConvs()])
    with Database(tmp_path / "prices.sqlite") as database:

        def measure(operators: Sequence[Operator], channels_last: bool) -> list[Taken | None]:
            return work_of(algorithms, operators, channels_last)

        prices = KernelPrices(Roofline(REFERENCE), measure, 1, "", database)
        placed = PlacementCost(Roofline(REFERENCE), prices, REFERENCE)
        prices.learn(graph, time.monotonic() + 100)
        (candidate, *_) = RewriteState.start(graph, library).candidates
        prices.learn(RewriteState.start(graph, library).apply(candidate).graph, time.monotonic() + 100)
        base = RewriteState.start(graph, library, placed.delta)
        result = greedy(base, placed.cost(graph), Limits()).best
    assert [step.rule for step in result.trace] == ["MergeParallelConvs"] * merges
    assert sum(node.op == "Conv" for node in result.state.graph.nodes()) == (1 if merges else 2)
