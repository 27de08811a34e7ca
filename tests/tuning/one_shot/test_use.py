"""The uses of the predictor: untuned compilations on processors that it knows, and `tune --method one-shot`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.tuning.measured import MACHINE
from tests.tuning.test_layers import WORKLOADS
from tests.tuning.test_models import network
from xrlflow import api
from xrlflow.backends.tvm.devices.execution import ExecutionTarget
from xrlflow.backends.tvm.fusion import tiles
from xrlflow.backends.tvm.kernels import products
from xrlflow.backends.tvm.kernels.algorithms import Timed, Times
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm, KernelChoice, LayerWorkload
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.lowering import Lowering
from xrlflow.tuning.one_shot.predictor import Predictor, Shape, Standard, for_compiling, shipped
from xrlflow.tuning.one_shot.times import PredictedTimes, predicted
from xrlflow.tuning.one_shot.tokens import tokens_of
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.store import Store
from xrlflow.tuning.tuners.factory import make_tuner
from xrlflow.tuning.tuners.one_shot import OneShotTuner
from xrlflow.tuning.tuners.protocol import Method


def arbitrary(seed: int = 0) -> Predictor:
    """A predictor with random weights. It prefers other kernels than the estimates and measurements."""
    shape, rng = Shape(width=8, hidden=8, layers=1, heads=1), np.random.default_rng(seed)
    weights = {name: rng.standard_normal(size).astype(np.float32) for name, size in shape.arrays().items()}
    return Predictor(shape, weights, Standard(30.0, 1.0), {"processors": ["nothing"]})


class Known:
    """Timings that only know one layer."""

    def __init__(self, workload: LayerWorkload, times: Times) -> None:
        self._workload, self._times = workload, times

    def of(self, workload: LayerWorkload, far: bool) -> Times:
        return self._times if workload == self._workload else {}

    def of_block(self, workload: Any, far: bool) -> None:
        return None


def test_the_shipped_predictor_is_for_the_processors_that_it_knows() -> None:
    result = shipped()
    assert result.about["measurements"] >= 1000
    for setting in result.about["better_on"]:
        processor, threads = setting.split(":")
        assert processor in result.about["processors"]
        assert for_compiling(replace(MACHINE, cpu=processor, cores=int(threads))) is result
        assert for_compiling(replace(MACHINE, cpu=processor, cores=64)) is None
    assert for_compiling(replace(MACHINE, cpu="generic")) is None


def test_it_is_used_where_it_was_shown_to_be_better(monkeypatch: pytest.MonkeyPatch) -> None:
    result = replace(arbitrary(), about={"processors": ["znver3", "znver5"], "better_on": ["znver5:2"]})
    monkeypatch.setattr("xrlflow.tuning.one_shot.predictor.shipped", lambda: result)
    assert for_compiling(replace(MACHINE, cpu="znver5", cores=2)) is result
    assert for_compiling(replace(MACHINE, cpu="znver5", cores=4)) is None
    assert for_compiling(replace(MACHINE, cpu="znver3", cores=2)) is None


def test_what_was_measured_goes_before_what_is_predicted() -> None:
    times: Times = {Algorithm.TILES: Timed(1e-3)}
    result = PredictedTimes(arbitrary(), MACHINE, Known(WORKLOADS["steps"], times))
    assert result.of(WORKLOADS["steps"], False) is times
    assert len(result.of(WORKLOADS["strided"], False)) > 1


@pytest.mark.parametrize(("part", "stays"), [(0.97, True), (0.9, False)])
def test_the_untuned_kernel_must_be_beaten_by_a_margin(
    part: float, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(WORKLOADS["steps"], False)
    untuned = layer.estimated(MACHINE)

    def faked(predictor: Predictor, space: DesignSpace, position: int) -> tuple[Any, Any]:
        """Predict that the kernel at `place` takes 1 ms and all others this fraction (`part`) of it."""
        positions = np.arange(space.size)
        return positions, np.where(positions == position, 1e-3, part * 1e-3)

    monkeypatch.setattr("xrlflow.tuning.one_shot.times.predicted", faked)
    times = PredictedTimes(arbitrary(), MACHINE).of(layer.workload, False)
    best = min(times, key=lambda a: times[a].seconds)  # type: ignore[union-attr]
    assert (KernelChoice(best, times[best].blocking) == untuned) is stays  # type: ignore[union-attr]


def test_the_times_of_all_ways_that_are_looked_at_are_predicted() -> None:
    space = DesignSpace.of(Layer(WORKLOADS["steps"], False), MACHINE)
    worst = int(space.estimates.argmax())
    positions, seconds = predicted(arbitrary(), space, worst)
    assert worst in positions
    assert np.array_equal(seconds, arbitrary().seconds(tokens_of(space, positions)))


def test_untuned_compilations_have_the_predicted_kernels(tmp_path: Path) -> None:
    predictor = arbitrary(1)
    with Store(tmp_path / "store.sqlite") as store:
        lowering = Lowering(ExecutionTarget(MACHINE), {}, str(tmp_path), store, predictor=predictor)
        assert lowering.untuned_times == PredictedTimes(predictor, MACHINE)
        timings = lowering.tuned_algorithms.timings
        assert isinstance(timings, PredictedTimes)
        assert timings.measured == lowering.layer_times
        plain = replace(lowering, predictor=None)
        assert plain.untuned_times is None
        assert plain.tuned_algorithms.timings == lowering.layer_times
        versions = {
            some.kernels_version for some in (plain, lowering, replace(lowering, predictor=arbitrary(2)))
        }
        assert len(versions) == 3
        assert replace(lowering, predictor=arbitrary(1)).kernels_version == lowering.kernels_version


def test_layers_that_are_larger_than_any_that_it_learned_from_are_not_predicted() -> None:
    times = PredictedTimes(arbitrary(), MACHINE)
    assert times.of(products.Product((8, 768), (8, 50257)), False) == {}
    assert times.of(products.Product((8, 76), (8, 502)), False)


def test_estimates_order_the_kernels_of_larger_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    space = DesignSpace.of(Layer(WORKLOADS["steps"], False), MACHINE)
    stubborn = replace(arbitrary(), standard=Standard(30.0, 100.0))  # estimates count for little

    def first() -> list[float]:
        proposed = OneShotTuner(space, stubborn).propose(8)
        choices = [KernelChoice.stored(json.dumps(one.trace)) for one in proposed]
        return [float(space.estimates[space.choices.index(choice)]) for choice in choices]

    assert first() != sorted(first())
    monkeypatch.setattr("xrlflow.tuning.one_shot.times.LARGEST", 1)
    assert first() == sorted(first())
    assert first()[0] == space.estimates.min()


def test_predicting_keeps_the_weights_of_few_layers() -> None:
    tiles.fused.cache_clear()
    times = PredictedTimes(arbitrary(), MACHINE)
    for rows in range(2, 6):
        times.of(products.Product((rows, 64), (rows, 64)), False)
    assert tiles.fused.cache_info().currsize <= 2


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(network(), path)
    return path


def test_one_shot_measures_no_kernel(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LayerWorkload] = []

    class Listening(PredictedTimes):
        def of(self, workload: LayerWorkload, far: bool) -> Times:
            asked.append(workload)
            return PredictedTimes.of(self, workload, far)

    monkeypatch.setattr("xrlflow.tuning.lowering.shipped", arbitrary)
    monkeypatch.setattr("xrlflow.tuning.lowering.PredictedTimes", Listening)
    with Store(tmp_path / "store.sqlite") as store:
        result = api.tune(file, method="one-shot", threads=2, store=store.path, measure=False)
        assert result.result.tuning.measured == 0
        assert result.result.layers == ()
        assert "none was measured" in result.notes[-1]
        assert result.verification is not None
        assert result.verification.verified
        assert len(asked) >= 3


def test_eight_kernels_of_a_layer_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrlflow.tuning.one_shot.predictor.shipped", arbitrary)
    space = DesignSpace.of(Layer(WORKLOADS["steps"], False), MACHINE)
    for method, count in ((Method.ONE_SHOT, 1), (Method.ONE_SHOT_8, 8)):
        tuner = make_tuner(method, space, 0)
        assert len(tuner.propose(16)) == count
        assert tuner.propose(16) == []
