"""MetaSchedule's search, driven from outside, keeps to what tuners promise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("tvm")

from bench.evolutionary import EvolutionaryConfig, EvolutionaryTuner
from tests.tuning.problems import knobless, matmul
from xrlflow.tuning.knobs import Candidate
from xrlflow.tuning.tuners.protocol import Measurement

pytestmark = pytest.mark.learns

SMALL = EvolutionaryConfig(population=16, generations=1, warmup=8)


def play(tuner: EvolutionaryTuner, batches: Sequence[int]) -> list[Candidate]:
    """What it proposes while every fifth fails."""
    found: list[Candidate] = []
    for size in batches:
        proposed = tuner.propose(size)
        assert len(proposed) <= size
        found += proposed
        tuner.update(
            [
                (c, Measurement(error="it fell over") if i % 5 == 4 else Measurement((1e-3 * (1 + i),)))
                for i, c in enumerate(proposed)
            ]
        )
    return found


@pytest.mark.whole
def test_proposals_are_distinct_and_reproducible() -> None:
    batches = (8, 3, 6)
    found = play(EvolutionaryTuner(matmul(), 1, SMALL), batches)
    assert len({c.key for c in found}) == len(found) >= 10
    assert [c.key for c in play(EvolutionaryTuner(matmul(), 1, SMALL), batches)] == [c.key for c in found]
    other = play(EvolutionaryTuner(matmul(), 2, SMALL), batches[:1])
    assert [c.key for c in other] != [c.key for c in found[:8]]


def test_a_task_without_choices_ends() -> None:
    tuner = EvolutionaryTuner(knobless(), 0, SMALL)
    (only,) = tuner.propose(4)
    tuner.update([(only, Measurement((1e-3,)))])
    assert list(tuner.propose(4)) == []


def test_nothing_is_asked_for_and_nothing_told() -> None:
    tuner = EvolutionaryTuner(matmul(), 0, SMALL)
    assert list(tuner.propose(0)) == []
    tuner.update([])
    assert len(tuner.propose(2)) == 2


@pytest.mark.whole
def test_what_another_has_measured_is_not_proposed() -> None:
    measured = EvolutionaryTuner(matmul(4), 5, SMALL).propose(12)
    tuner = EvolutionaryTuner(matmul(4), 0, SMALL)
    tuner.update([(c, Measurement((1e-3 * (1 + i),))) for i, c in enumerate(measured)])
    found = play(tuner, (8,) * 4)
    assert found
    assert not {c.key for c in found} & {c.key for c in measured}


def test_global_random_numbers_are_left_alone() -> None:
    np.random.seed(7)
    expected = np.random.random(3)
    np.random.seed(7)
    tuner = EvolutionaryTuner(matmul(), 0, SMALL)
    tuner.update([(c, Measurement((1e-3,))) for c in tuner.propose(4)])
    assert np.random.random(3).tolist() == expected.tolist()


def test_configurations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="positive numbers"):
        EvolutionaryConfig(threads=0)
