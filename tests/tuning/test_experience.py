"""What a surrogate and an agent learn from other layers. In these tests, kernels with many rows and vectors are
fast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.tuning.spaces import CONVOLUTION, PRODUCT, TINY, MadeUp, space_of
from tests.tuning.tuners.test_tuners import WALKS
from xrlflow.learn.tensors import to_arrays
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, save_checkpoint
from xrlflow.tuning.knobs import Candidate, Floats
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.surrogate import Experience, Surrogate
from xrlflow.tuning.tuners.chameleon import Agent, ChameleonTuner
from xrlflow.tuning.tuners.protocol import Measurement
from xrlflow.tuning.tuners.random import RandomTuner

pytestmark = pytest.mark.measures

_KNOBS = slice(8, 10)
"""The logarithms of rows and vectors in a description."""


def descriptions(space: DesignSpace, candidates: Sequence[Candidate]) -> Floats:
    surrogate = Surrogate(space, 0)
    surrogate.add([(c, Measurement((1.0,))) for c in candidates])
    return surrogate.experience.kernels


def drawn(layer: MadeUp, count: int, seed: int = 0) -> tuple[DesignSpace, Sequence[Candidate]]:
    space = space_of(layer)
    return space, RandomTuner(space, seed).propose(count)


def measured(space: DesignSpace, candidates: Sequence[Candidate]) -> list[tuple[Candidate, Measurement]]:
    values = descriptions(space, candidates)[:, _KNOBS].sum(axis=1)
    return [(c, Measurement((float(2 ** (-v / 4)),))) for c, v in zip(candidates, values)]


def learned(layer: MadeUp) -> Experience:
    space, candidates = drawn(layer, 150, seed=1)
    surrogate = Surrogate(space, 0)
    surrogate.add(measured(space, candidates))
    return surrogate.experience


def order(one: Floats, other: Floats) -> float:
    """Spearman's rank correlation."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


@pytest.mark.parametrize("layer", [CONVOLUTION, TINY])
def test_kernels_are_ordered_by_what_others_have_shown(layer: MadeUp) -> None:
    space, candidates = drawn(layer, 60)
    surrogate = Surrogate(space, 0, learned(PRODUCT))
    assert surrogate.ready
    truth = np.array([-o.median for _, o in measured(space, candidates)], np.float32)
    assert order(surrogate.rank(candidates), truth) > 0.5
    assert not Surrogate(space, 0, Experience.none()).ready


def test_own_measurements_count_more_than_those_of_others() -> None:
    """In this experience, the scores are the opposite of the truth."""
    space, candidates = drawn(CONVOLUTION, 120)
    pairs = measured(space, candidates)
    truth = np.array([-o.median for _, o in pairs], np.float32)
    wrong = learned(PRODUCT)
    misled = Surrogate(space, 0, Experience(wrong.kernels, 1 - wrong.scores))
    assert order(misled.rank(candidates[60:]), truth[60:]) < 0
    misled.add(pairs[:60])
    assert order(misled.rank(candidates[60:]), truth[60:]) > 0.5


@pytest.mark.parametrize(("others", "times", "own", "least"), [(60, 10, 100, 0.2), (4, 1, 30, 0.75)])
def test_however_much_or_little_others_have_shown_measurements_here_outweigh_it(
    others: int, times: int, own: int, least: float
) -> None:
    """In this experience, the same kernels have the opposite of their true scores."""
    space, candidates = drawn(CONVOLUTION, 160)
    pairs = measured(space, candidates)
    truth = np.array([-o.median for _, o in pairs], np.float32)
    surrogate = Surrogate(space, 0)
    surrogate.add(pairs[:others])
    true = surrogate.experience
    wrong = Experience(np.tile(true.kernels, (times, 1)), np.tile(1 - true.scores, times))
    misled = Surrogate(space, 0, wrong)
    misled.add(pairs[:own])
    assert order(misled.rank(candidates[120:]), truth[120:]) > least


def test_the_model_of_knobs_learns_from_the_model_of_kernels() -> None:
    space, candidates = drawn(CONVOLUTION, 400)
    surrogate = Surrogate(space, 0, learned(PRODUCT))
    vectors = [c.vector for c in candidates if c.vector is not None]
    assert surrogate.predict(vectors).tolist() == [0] * len(vectors)
    surrogate.suppose(candidates[:5])
    early = surrogate.predict(vectors[320:])
    surrogate.suppose(candidates[5:320])
    assert not np.array_equal(surrogate.predict(vectors[320:]), early)
    (vector, score), *_ = surrogate.promising(3)
    assert vector in vectors[:320]
    assert score == surrogate.rank(candidates[:320]).max() > 0
    assert len(surrogate.predict([])) == 0
    assert order(surrogate.predict(vectors[320:]), surrogate.rank(candidates[320:])) > 0.3


def test_what_was_supposed_is_forgotten_when_it_is_measured() -> None:
    space, candidates = drawn(CONVOLUTION, 8)
    surrogate = Surrogate(space, 0, learned(PRODUCT))
    surrogate.suppose(candidates)
    surrogate.add([(c, Measurement((1.0,))) for c in candidates[:5]])
    supposed = sorted(vector for vector, _ in surrogate.promising(99))
    assert supposed == sorted(c.vector for c in candidates[5:] if c.vector is not None)
    surrogate.suppose(candidates)
    assert len(surrogate.promising(99)) == 3


def test_experience_adds_up_and_leaves_out_layers_of_which_nothing_ran() -> None:
    space, candidates = drawn(CONVOLUTION, 6)
    before = learned(PRODUCT)
    surrogate = Surrogate(space, 0, before)
    surrogate.add([(c, Measurement(error="it fell over")) for c in candidates])
    assert len(surrogate.experience) == len(before)
    assert np.isfinite(surrogate.rank(candidates)).all()
    surrogate.add([(candidates[0], Measurement((2.0,))), (candidates[1], Measurement((1.0,)))])
    after = surrogate.experience
    assert after.scores[len(before) :].tolist() == [0.5, 1, 0, 0, 0, 0]
    assert np.array_equal(after.kernels[: len(before)], before.kernels)


def test_an_agent_begins_with_what_it_has_measured_before(tmp_path: Path) -> None:
    space, candidates = drawn(PRODUCT, 150, seed=1)
    teacher = ChameleonTuner(space, 0, WALKS)
    teacher.update(measured(space, candidates))
    teacher.agent.save(tmp_path / "agent")
    agent = Agent.load(tmp_path / "agent")
    assert len(agent.experience) == 150
    assert np.array_equal(agent.experience.kernels, teacher.agent.experience.kernels)
    assert np.array_equal(agent.experience.scores, teacher.agent.experience.scores)

    other = space_of(CONVOLUTION)
    first = ChameleonTuner(other, 0, WALKS, agent).propose(8)
    anyhow = RandomTuner(other, 0).propose(60)
    ours, theirs = ([o.median for _, o in measured(other, result)] for result in (first, anyhow))
    faster = [np.mean(np.array(theirs) < time) for time in ours]
    assert np.mean(faster) < 0.25  # of the kernels drawn at random; of one of those it would be a half


@pytest.mark.parametrize(
    "measured",
    [
        {},
        {"experience.kernels": np.zeros(3), "experience.scores": np.zeros(3)},
        {"experience.kernels": np.zeros((3, 30)), "experience.scores": np.zeros(2)},
    ],
)
def test_an_agent_without_its_measurements_is_of_another_version(
    measured: dict[str, np.ndarray], tmp_path: Path
) -> None:
    config = {"hidden": 20, "updates": 1}
    tensors = {**to_arrays(Agent(0).state_dict()), **measured}
    save_checkpoint(Checkpoint("kernel agent", config, tensors), tmp_path / "x")
    with pytest.raises(CheckpointError, match="another version"):
        Agent.load(tmp_path / "x")
