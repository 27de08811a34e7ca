"""The space of a layer: each choice has a vector of knobs, and each vector stands for a choice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.levels import whole
from tests.tuning.measured import MACHINE
from tests.tuning.test_blocks import BLOCK
from tests.tuning.test_layers import WORKLOADS
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm
from xrlflow.tuning.blocks import Block
from xrlflow.tuning.knobs import KnobError
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.measurable import key_of
from xrlflow.tuning.space import KNOBS, DesignSpace
from xrlflow.tuning.tuners.factory import make_tuner
from xrlflow.tuning.tuners.protocol import SEARCHING, Measurement, Method

pytestmark = pytest.mark.learns

LAYERS_BY_NAME: dict[str, Layer | Block] = {
    **{
        name: Layer(WORKLOADS[name], False)
        for name in ("steps", "pointwise", "strided", "a product", "groups")
    },
    "a block": BLOCK,
}
EACH = pytest.mark.parametrize("name", LAYERS_BY_NAME)


def space_of(name: str) -> DesignSpace:
    return DesignSpace.of(LAYERS_BY_NAME[name], MACHINE)


@EACH
def test_every_way_has_a_vector_of_its_own(name: str) -> None:
    space = space_of(name)
    vectors = list(space.enumerate())
    assert len(set(vectors)) == len(vectors) == space.size == len(set(space.choices))
    assert set(space.choices) == set(LAYERS_BY_NAME[name].everything(MACHINE))
    points = np.array(vectors)
    assert np.array_equal(space.masked(points), points)
    assert (points < space.sizes).all()
    assert [space.choices.index(choice) for choice in space.choices[::97]] == list(range(0, space.size, 97))


@EACH
def test_every_vector_stands_for_a_way_of_its_algorithm(name: str) -> None:
    space, generator = space_of(name), np.random.default_rng(0)
    anything = generator.integers(space.sizes, size=(300, len(space.knobs)))
    result = space.masked(anything)
    assert np.array_equal(result[:, 0], anything[:, 0])
    assert set(map(tuple, result.tolist())) <= set(space.enumerate())
    assert np.array_equal(space.masked(result), result)
    drawn = space.draw(generator, 2000)
    assert set(map(tuple, drawn.tolist())) <= set(space.enumerate())
    counts = Counter(drawn[:, 0].tolist())
    assert len(counts) == space.kinds
    assert max(counts.values()) < 1.4 * min(counts.values()), "algorithms are equally likely"


@EACH
def test_a_vector_decodes_to_the_kernel_of_its_way(name: str) -> None:
    space, layer = space_of(name), LAYERS_BY_NAME[name]
    for choice in [*layer.untuned(MACHINE), *space.choices[:: max(1, space.size // 5)]]:
        candidate = space.candidate(choice)
        if candidate is None:  # a tile that does not fit
            with pytest.raises(BackendError):
                layer.kernel(choice, MACHINE)
            continue
        assert layer.stored(json.dumps(candidate.trace)) == choice
        assert candidate.key == key_of(layer, choice, MACHINE)
        assert candidate.vector in set(space.enumerate())


@EACH
def test_neighbours_are_near(name: str) -> None:
    space = space_of(name)
    start = space.random(np.random.default_rng(3))
    result = space.neighbours(start)
    assert len(set(result)) == len(result) > 0
    assert start not in result
    assert set(result) <= set(space.enumerate())


@EACH
def test_features_tell_ways_apart(name: str) -> None:
    space = space_of(name)
    features = space.features(list(space.enumerate()))
    assert np.isfinite(features).all()
    assert len(np.unique(features, axis=0)) == space.size
    decoded = [c for v in list(space.enumerate())[:: space.size // 3] if (c := space.decode(v)) is not None]
    assert space.described(decoded).shape == (len(decoded), space.width)


def test_descriptions_have_one_width() -> None:
    assert len({space_of(name).width for name in LAYERS_BY_NAME}) == 1
    layer = LAYERS_BY_NAME["steps"]
    near, far = (DesignSpace.of(layer.at(far), MACHINE) for far in (False, True))
    candidate = near.decode(next(near.enumerate()))
    assert candidate is not None
    assert not np.array_equal(near.described([candidate]), far.described([candidate]))


def test_what_is_no_vector_is_refused() -> None:
    space = space_of("steps")
    with pytest.raises(KnobError, match="a vector of 1 knobs"):
        space.decode([0])
    with pytest.raises(KnobError, match="knob algorithm has 4 values; 9 is none of them"):
        space.decode([9] * len(space.knobs))


def test_knobs_are_named() -> None:
    assert space_of("steps").knobs[0].name == KNOBS[0] == "algorithm"
    assert {knob.name for knob in space_of("a block").knobs} <= set(KNOBS)
    algorithms = {list(Algorithm).index(choice.algorithm) for choice in space_of("pointwise").choices}
    assert {int(level) for level in space_of("pointwise").knobs[0].levels} == algorithms


@pytest.mark.parametrize("method", whole([m for m in SEARCHING if m is not Method.RANDOM], (Method.BEAM,)))
def test_tuners_find_what_is_fast(method: Method) -> None:
    """The true times are the estimates, which the tuner does not see.

    On average over five seeds, the best of its 64 proposals must be better than the best of 64 random ones.
    """
    layer = Layer(replace(WORKLOADS["steps"], image=(1, 28, 28, 64), out=(1, 28, 28, 96)), False)
    space = DesignSpace.of(layer, MACHINE)
    seconds = {choice: float(value) for choice, value in zip(space.choices, space.estimates)}
    hidden = np.ones(space.size)
    space.__dict__["estimates"] = hidden
    result = dict.fromkeys((method, Method.RANDOM), 0.0)
    for name, seed in product(result, range(5)):
        tuner = make_tuner(name, space, seed)
        best = float("inf")
        for _ in range(4):
            proposed = tuner.propose(16)
            measured = [
                (c, Measurement((1e-9 * seconds[layer.stored(json.dumps(c.trace))],))) for c in proposed
            ]
            tuner.update(measured)
            best = min([best, *(outcome.median for _, outcome in measured)])
        result[name] += best
    assert result[method] < result[Method.RANDOM]
