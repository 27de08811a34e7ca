"""The predictor: NumPy computes what torch trained, it learns the order of kernels, and it chooses among them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tuning.measured import MACHINE
from tests.tuning.test_blocks import BLOCK
from tests.tuning.test_layers import WORKLOADS
from xrlflow.backends.tvm.kernels import direct, products
from xrlflow.backends.tvm.kernels.algorithms import Algorithms
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, save_checkpoint
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.one_shot.predictor import Predictor, Shape
from xrlflow.tuning.one_shot.times import PredictedTimes
from xrlflow.tuning.one_shot.tokens import Tokens, tokens_of
from xrlflow.tuning.one_shot.training import Measured, Network, TrainingConfig, train
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.tuners.one_shot import OneShotTuner

pytestmark = pytest.mark.learns

SMALL = Shape(width=16, hidden=32, layers=2, heads=2)


def space_of(name: str, **changed: tuple[int, ...]) -> DesignSpace:
    return DesignSpace.of(Layer(replace(WORKLOADS[name], **changed), False), MACHINE)


def measured(space: DesignSpace, count: int, seed: int) -> Measured:
    """Measured times like the estimates, but tiles of more than two vectors take twice as long. The estimates do not
    know this."""
    places = np.random.default_rng(seed).permutation(space.size)[:count]
    vectors = space.numbers[places, 2]
    seconds = 1e-9 * space.estimates[places] * np.where(vectors > 2, 2.0, 1.0)
    return Measured(tokens_of(space, places), seconds)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    """A predictor that learned from other sizes of the layers in these tests."""
    layers = [
        measured(space_of(name, image=(1, size, size, channels), out=(1, size, size, 48)), 120, size)
        for name in ("steps", "pointwise")
        for size, channels in ((7, 32), (14, 32), (14, 64), (28, 32))
    ]
    return train(layers, TrainingConfig(steps=300, shape=SMALL, learning_rate=3e-3), seed=1)


@pytest.mark.parametrize("name", ["steps", "a product"])
def test_numpy_computes_what_torch_does(name: str) -> None:
    network = Network(SMALL, seed=3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    space = space_of(name)
    tokens = tokens_of(space, np.arange(0, space.size, 7))
    ours = train([measured(space, 8, 0)], TrainingConfig(steps=1, shape=SMALL))
    ours = replace(ours, weights=network.weights())
    tasks = torch.from_numpy(np.repeat(tokens.task[None], len(tokens), axis=0))
    with torch.no_grad():
        parts = map(torch.from_numpy, (tokens.loops, tokens.knobs, tokens.kernel))
        wanted = network(*parts, tasks).numpy()
    np.testing.assert_allclose(ours.scores(tokens), wanted, rtol=1e-4, atol=1e-4)


def test_the_kernels_token_says_what_follows_from_the_loops() -> None:
    space, workload = space_of("steps"), WORKLOADS["steps"]
    assert isinstance(workload, direct.Convolution)
    kernel = tokens_of(space).kernel
    for choice, row in zip(space.choices, kernel.tolist()):
        if not isinstance(choice.blocking, direct.DirectBlocking):
            continue
        sums, weights, registers, balance, computed, _, _, size, turns, uses = row
        wide = choice.blocking.vectors * choice.blocking.lanes / MACHINE.lanes
        assert 2**sums - 1 == pytest.approx(min(choice.blocking.pixels, workload.results[2]) * wide, rel=1e-3)
        assert 2**weights - 1 == pytest.approx(workload.window[2] * wide, rel=1e-3)
        assert registers == pytest.approx((2**sums + 2**weights - 1) / MACHINE.registers, rel=1e-3)
        assert 1 <= balance <= MACHINE.cores
        assert computed > -1e-3, "no less than what is asked for"
        read = workload.terms * workload.out[-1]
        assert 2**size - 1 == pytest.approx(4 * read / MACHINE.second_level, rel=1e-3)
        assert 2**turns >= 0.999, "each weight is read"
        assert 2**uses >= 0.999 * math.prod(workload.out) * workload.terms / read, (
            "each weight is used for each pixel"
        )
    assert any(isinstance(choice.blocking, direct.DirectBlocking) for choice in space.choices)


def test_transformed_weights_are_more() -> None:
    space = space_of("steps")
    sizes = {choice.algorithm: row[7] for choice, row in zip(space.choices, tokens_of(space).kernel.tolist())}
    plain = 2 ** sizes[Algorithm.DIRECT] - 1
    assert 2 ** sizes[Algorithm.F23] - 1 == pytest.approx(plain * 16 / 9, rel=1e-2)
    assert 2 ** sizes[Algorithm.F43] - 1 == pytest.approx(plain * 36 / 9, rel=1e-2)


def test_it_orders_kernels_of_a_layer_that_it_has_not_seen(predictor: Predictor) -> None:
    space = space_of("steps", image=(1, 21, 21, 48), out=(1, 21, 21, 48))
    known = measured(space, 400, 9)
    scores = -predictor.seconds(known.tokens)
    ranks = [np.argsort(np.argsort(values)) for values in (scores, -known.seconds)]
    assert np.corrcoef(*ranks)[0, 1] > 0.8
    best = known.seconds[np.argsort(-scores)[:8]].min()
    assert best <= np.sort(known.seconds)[len(known.seconds) // 20], "among the best twentieth"


@pytest.mark.parametrize(("ranking", "squared"), [(1.0, False), (0.0, True)])
def test_each_loss_teaches_alone(ranking: float, squared: bool) -> None:
    space = space_of("pointwise", image=(1, 14, 14, 32), out=(1, 14, 14, 48))
    config = TrainingConfig(steps=120, ranking=ranking, squared=squared, shape=SMALL, learning_rate=3e-3)
    result = train([measured(space, 200, 1)], config, seed=0)
    known = measured(space, 200, 2)
    ranks = [np.argsort(np.argsort(v)) for v in (result.seconds(known.tokens), known.seconds)]
    assert np.corrcoef(*ranks)[0, 1] > 0.8


def test_training_repeats_with_its_seed() -> None:
    layer = measured(space_of("strided"), 60, 0)
    config = TrainingConfig(steps=5, shape=SMALL)
    one, same, other = (train([layer], config, seed).weights["head"] for seed in (0, 0, 1))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_a_predictor_is_written_and_read(predictor: Predictor, tmp_path: Path) -> None:
    predictor = replace(predictor, about={"processor": "znver5"})
    predictor.save(tmp_path / "p.safetensors")
    again = Predictor.load(tmp_path / "p.safetensors")
    tokens = tokens_of(space_of("strided"), np.arange(20))
    assert np.array_equal(again.scores(tokens), predictor.scores(tokens))
    assert (again.standard, again.about) == (predictor.standard, {"processor": "znver5"})


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        ({"shape": {"width": 15, "hidden": 32, "layers": 2, "heads": 2}}, {}, "is damaged"),
        ({"shape": {"width": 10**9, "hidden": 32, "layers": 2, "heads": 2}}, {}, "is damaged"),
        ({"standard": {"mean": 1.0}}, {}, "is damaged"),
        ({"standard": {"mean": 1.0, "deviation": -1.0}}, {}, "weights are damaged"),
        ({}, {"head": np.zeros((3, 3), np.float32)}, "another version"),
        ({}, {"more": np.zeros(3, np.float32)}, "another version"),
        ({}, {"score.bias": np.full(1, np.nan, np.float32)}, "weights are damaged"),
        ({}, {"score.bias": np.zeros(1, np.float64)}, "weights are damaged"),
    ],
)
def test_a_damaged_file_is_no_predictor(
    config: dict[str, object],
    weights: dict[str, np.ndarray],
    message: str,
    predictor: Predictor,
    tmp_path: Path,
) -> None:
    whole = {
        "shape": {"width": 16, "hidden": 32, "layers": 2, "heads": 2},
        "standard": {"mean": 1.0, "deviation": 1.0},
        "about": {},
    }
    path = tmp_path / "p.safetensors"
    save_checkpoint(
        Checkpoint("one-shot predictor", {**whole, **config}, {**predictor.weights, **weights}), path
    )
    with pytest.raises(CheckpointError, match=message):
        Predictor.load(path)


def test_the_tuner_proposes_each_kernel_once_in_its_order(predictor: Predictor) -> None:
    space = space_of("strided")
    tuner = OneShotTuner(space, predictor, limit=8)
    result = [*tuner.propose(3), *tuner.propose(6)]
    assert tuner.propose(1) == []
    assert len({candidate.key for candidate in result}) == 8
    places = [list(space.enumerate()).index(candidate.vector or ()) for candidate in result]
    scores = -predictor.seconds(tokens_of(space))
    assert list(scores[places]) == sorted(scores[places], reverse=True)
    tuner.update([])


def test_predicted_times_choose_for_a_compilation(predictor: Predictor) -> None:
    from xrlflow.backends.tvm.fusion.fuse import fuse
    from xrlflow.backends.tvm.fusion.layers import chosen_in
    from xrlflow.backends.tvm.fusion.tiles import module_of, random_operands

    times = PredictedTimes(predictor, MACHINE)
    forms = (WORKLOADS["steps"], WORKLOADS["strided"], products.Product((1, 40, 64), (1, 40, 96)))
    for workload in forms:
        known = times.of(workload, False)
        assert {choice.algorithm for choice in Layer(workload, False).untuned(MACHINE)} == set(known)
        module = fuse(
            module_of(workload, random_operands(workload)),
            MACHINE,
            False,
            Algorithms(timings=times, budget=1e9),
        )
        (chosen,) = chosen_in(module)
        fastest = min(known, key=lambda a: known[a].seconds)  # type: ignore[union-attr]
        assert chosen.algorithm == fastest.value
    assert times.of_block(BLOCK.workload, False) is None


def test_tokens_tell_where_weights_come_from() -> None:
    layer = Layer(WORKLOADS["pointwise"], False)
    near, far = (tokens_of(DesignSpace.of(layer.at(far), MACHINE), np.arange(3)) for far in (False, True))
    assert not np.array_equal(near.task, far.task)
    assert np.array_equal(near.loops, far.loops)
    assert isinstance(near, Tokens)
    assert len(near) == 3


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="needs the squared error"):
        TrainingConfig(ranking=0.0, squared=False)
    with pytest.raises(ValueError, match="heads divide"):
        Shape(width=10, heads=4)
    with pytest.raises(ValueError, match="no measurements"):
        train([])
    assert isinstance(WORKLOADS["strided"], direct.Convolution)
