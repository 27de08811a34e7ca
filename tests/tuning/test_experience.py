"""What a surrogate and an agent take from other tasks. Here a schedule's time is a number that its description has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.tuning.problems import convolution, matmul, softmax
from tests.tuning.tuners.test_tuners import WALKS, space_of
from xrlflow.checkpoint import Checkpoint, CheckpointError, save_checkpoint
from xrlflow.learn.tensors import to_arrays
from xrlflow.tuning.knobs import SCHEDULE_FEATURES, Candidate, Floats, KnobSpace
from xrlflow.tuning.surrogate import Experience, Surrogate
from xrlflow.tuning.tasks import Task
from xrlflow.tuning.tuners.chameleon import Agent, ChameleonTuner
from xrlflow.tuning.tuners.protocol import Measurement
from xrlflow.tuning.tuners.random import RandomTuner

pytestmark = pytest.mark.usefixtures("remembered")


def descriptions(space: KnobSpace, candidates: Sequence[Candidate]) -> Floats:
    surrogate = Surrogate(space, 0)
    surrogate.add([(c, Measurement((1.0,))) for c in candidates])
    return surrogate.experience.schedules


def drawn(task: Callable[[], Task], count: int, seed: int = 0) -> tuple[KnobSpace, Sequence[Candidate]]:
    space = space_of(task)
    return space, RandomTuner(space, seed).propose(count)


@pytest.fixture(scope="module")
def column() -> int:
    """Of the store that computes most, the feature that differs most between schedules of every task here."""
    spread = [descriptions(*drawn(task, 40)).std(axis=0) for task in (matmul, convolution, softmax)]
    return int(np.min(spread, axis=0)[SCHEDULE_FEATURES // 2 :].argmax()) + SCHEDULE_FEATURES // 2


def measured(
    space: KnobSpace, candidates: Sequence[Candidate], column: int
) -> list[tuple[Candidate, Measurement]]:
    values = descriptions(space, candidates)[:, column]
    return [(c, Measurement((float(2 ** (-v / 4)),))) for c, v in zip(candidates, values)]


def learned(task: Callable[[], Task], column: int) -> Experience:
    space, candidates = drawn(task, 150, seed=1)
    surrogate = Surrogate(space, 0)
    surrogate.add(measured(space, candidates, column))
    return surrogate.experience


def order(one: Floats, other: Floats) -> float:
    """Spearman's rank correlation."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_of_a_schedule_there_is_the_store_that_computes_most_beside_the_sum() -> None:
    """A convolution adds and multiplies in one; the others pad, set to zero and copy."""
    both = descriptions(*drawn(convolution, 8))
    whole, main = both[:, : SCHEDULE_FEATURES // 2], both[:, SCHEDULE_FEATURES // 2 :]
    arithmetic = slice(1, 3)
    assert (main[:, arithmetic] > 0).all()
    assert np.array_equal(main[:, arithmetic], whole[:, arithmetic])
    assert (main.sum(axis=1) < whole.sum(axis=1)).all()


@pytest.mark.parametrize("task", [convolution, softmax])
def test_schedules_are_ordered_by_what_others_have_shown(task: Callable[[], Task], column: int) -> None:
    space, candidates = drawn(task, 60)
    told = Surrogate(space, 0, learned(matmul, column))
    assert told.ready
    truth = np.array([-o.median for _, o in measured(space, candidates, column)], np.float32)
    assert order(told.rank(candidates), truth) > 0.5
    assert not Surrogate(space, 0, Experience.none()).ready


def test_own_measurements_count_more_than_those_of_others(column: int) -> None:
    """Others say the opposite of what is true here."""
    space, candidates = drawn(convolution, 120)
    pairs = measured(space, candidates, column)
    truth = np.array([-o.median for _, o in pairs], np.float32)
    wrong = learned(matmul, column)
    misled = Surrogate(space, 0, Experience(wrong.schedules, 1 - wrong.scores))
    assert order(misled.rank(candidates[60:]), truth[60:]) < 0
    misled.add(pairs[:60])
    assert order(misled.rank(candidates[60:]), truth[60:]) > 0.5


@pytest.mark.parametrize(("others", "times", "own", "least"), [(60, 10, 100, 0.2), (4, 1, 30, 0.75)])
def test_however_much_or_little_others_have_shown_measurements_here_outweigh_it(
    others: int, times: int, own: int, least: float, column: int
) -> None:
    """Others say the opposite of what is true of the same schedules; no knobs tell them apart."""
    space, candidates = drawn(convolution, 160)
    blind = [Candidate(None, c.trace, c.mod, c.key) for c in candidates]
    pairs = measured(space, blind, column)
    truth = np.array([-o.median for _, o in pairs], np.float32)
    told = Surrogate(space, 0)
    told.add(pairs[:others])
    true = told.experience
    wrong = Experience(np.tile(true.schedules, (times, 1)), np.tile(1 - true.scores, times))
    misled = Surrogate(space, 0, wrong)
    misled.add(pairs[:own])
    assert order(misled.rank(blind[120:]), truth[120:]) > least


def test_the_model_of_knobs_learns_from_the_model_of_schedules(column: int) -> None:
    space, candidates = drawn(convolution, 400)
    surrogate = Surrogate(space, 0, learned(matmul, column))
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


def test_what_was_supposed_is_forgotten_when_it_is_measured(column: int) -> None:
    space, candidates = drawn(convolution, 8)
    surrogate = Surrogate(space, 0, learned(matmul, column))
    surrogate.suppose(candidates)
    surrogate.add([(c, Measurement((1.0,))) for c in candidates[:5]])
    supposed = sorted(vector for vector, _ in surrogate.promising(99))
    assert supposed == sorted(c.vector for c in candidates[5:] if c.vector is not None)
    surrogate.suppose(candidates)
    assert len(surrogate.promising(99)) == 3


def test_experience_adds_up_and_leaves_out_tasks_of_which_nothing_ran(column: int) -> None:
    space, candidates = drawn(convolution, 6)
    before = learned(matmul, column)
    surrogate = Surrogate(space, 0, before)
    surrogate.add([(c, Measurement(error="it fell over")) for c in candidates])
    assert len(surrogate.experience) == len(before)
    assert np.isfinite(surrogate.rank(candidates)).all()
    surrogate.add([(candidates[0], Measurement((2.0,))), (candidates[1], Measurement((1.0,)))])
    after = surrogate.experience
    assert after.scores[len(before) :].tolist() == [0.5, 1, 0, 0, 0, 0]
    assert np.array_equal(after.schedules[: len(before)], before.schedules)


def test_an_agent_begins_with_what_it_has_measured_before(column: int, tmp_path: Path) -> None:
    space, candidates = drawn(matmul, 150, seed=1)
    teacher = ChameleonTuner(space, 0, WALKS)
    teacher.update(measured(space, candidates, column))
    teacher.agent.save(tmp_path / "agent")
    agent = Agent.load(tmp_path / "agent")
    assert len(agent.experience) == 150
    assert np.array_equal(agent.experience.schedules, teacher.agent.experience.schedules)
    assert np.array_equal(agent.experience.scores, teacher.agent.experience.scores)

    other = space_of(convolution)
    first = ChameleonTuner(other, 0, WALKS, agent).propose(8)
    anyhow = RandomTuner(other, 0).propose(60)
    ours, theirs = ([o.median for _, o in measured(other, found, column)] for found in (first, anyhow))
    faster = [np.mean(np.array(theirs) < time) for time in ours]
    assert np.mean(faster) < 0.25  # of the kernels drawn at random; of one of those it would be a half


@pytest.mark.parametrize(
    "measured",
    [
        {},
        {"experience.schedules": np.zeros(3), "experience.scores": np.zeros(3)},
        {"experience.schedules": np.zeros((3, SCHEDULE_FEATURES)), "experience.scores": np.zeros(2)},
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
