"""Requirements of all tuners, and that each finds the optimum of a small landscape. Nothing is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.tuning.spaces import CONVOLUTION, FOUR, ONE, PRODUCT, SMALLEST, TINY, MadeUp, space_of
from xrlflow.tuning.knobs import Candidate
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.surrogate import Surrogate
from xrlflow.tuning.tuners.annealing import AnnealingConfig, AnnealingTuner
from xrlflow.tuning.tuners.beam import BeamConfig, BeamTuner
from xrlflow.tuning.tuners.chameleon import ChameleonConfig, ChameleonTuner
from xrlflow.tuning.tuners.factory import make_tuner
from xrlflow.tuning.tuners.frontier import Frontier
from xrlflow.tuning.tuners.genetic import GeneticConfig, GeneticTuner
from xrlflow.tuning.tuners.protocol import Measurement, Method, Tuner
from xrlflow.tuning.tuners.random import RandomTuner

pytestmark = pytest.mark.learns

# Small searches, because tests should take seconds.
ANNEALING = AnnealingConfig(chains=32, steps=60)
BEAM = BeamConfig(beam=8, completions=4, passes=2)
GENES = GeneticConfig(population=32, generations=3, best=8)
WALKS = ChameleonConfig(walks=24, steps=12, rounds=2)
MAKERS: dict[Method, Callable[[DesignSpace, int], Tuner]] = {
    Method.RANDOM: RandomTuner,
    Method.ANNEALING: lambda space, seed: AnnealingTuner(space, seed, ANNEALING),
    Method.GENETIC: lambda space, seed: GeneticTuner(space, seed, GENES),
    Method.BEAM: lambda space, seed: BeamTuner(space, seed, BEAM),
    Method.CHAMELEON: lambda space, seed: ChameleonTuner(space, seed, WALKS),
}
GUIDED = [Method.ANNEALING, Method.GENETIC, Method.BEAM, Method.CHAMELEON]


class Landscape:
    """Times in milliseconds that grow with the distance from a goal, measured in logarithms of knobs. Another algorithm
    adds much.

    The goal's kernel takes one millisecond. Some vectors decode to the same kernel, and all vectors of the goal's have
    this time.
    """

    def __init__(self, space: DesignSpace, goal: Candidate) -> None:
        self.goal = goal
        self._logs = dict(zip(space.enumerate(), np.log2(2 + space.numbers)))

    def __call__(self, candidate: Candidate) -> Measurement:
        assert self.goal.vector is not None
        if candidate.key == self.goal.key:
            return Measurement((1e-3,))
        if candidate.vector is None:
            return Measurement(error="no vector, no place in the landscape")
        apart = np.abs(self._logs[candidate.vector] - self._logs[self.goal.vector])
        return Measurement((1e-3 * (1.01 + float(apart.sum() + 3 * (apart[0] > 0))),))


def goal_of(space: DesignSpace, seed: int) -> Candidate:
    """A random candidate."""
    candidate = space.decode(space.random(np.random.default_rng(100 + seed)))
    assert candidate is not None
    return candidate


def trials_to_goal(tuner: Tuner, landscape: Landscape, most: int, batch: int = 8) -> int | None:
    """The number of measurements until the tuner proposes the goal; None if `most` do not suffice."""
    done = 0
    while done < most:
        proposed = tuner.propose(batch)
        if not proposed:
            return None
        measured = [(candidate, landscape(candidate)) for candidate in proposed]
        done += len(measured)
        if any(outcome.median == 1e-3 for _, outcome in measured):
            return done
        tuner.update(measured)
    return None


def play(tuner: Tuner, space: DesignSpace, batches: Sequence[int]) -> list[Candidate]:
    """The proposals of a tuner on a landscape in which every fifth measurement fails."""
    landscape, result = Landscape(space, goal_of(space, 0)), []
    for size in batches:
        proposed = tuner.propose(size)
        assert len(proposed) <= size
        result += proposed
        tuner.update(
            [
                (c, Measurement(error="it fell over") if i % 5 == 4 else landscape(c))
                for i, c in enumerate(proposed)
            ]
        )
    return result


@pytest.mark.parametrize("layer", [PRODUCT, CONVOLUTION, FOUR])
@pytest.mark.parametrize("method", MAKERS)
def test_proposals_are_distinct_valid_and_reproducible(method: Method, layer: MadeUp) -> None:
    space = space_of(layer)
    batches = (8, 3, 6)
    result = play(MAKERS[method](space, 1), space, batches)
    assert len({c.key for c in result}) == len(result) >= 10
    for candidate in result:
        assert candidate.vector is not None
        again = space.decode(candidate.vector)
        assert again is not None
        assert (again.key, again.vector) == (candidate.key, candidate.vector)
    assert [c.key for c in play(MAKERS[method](space, 1), space, batches)] == [c.key for c in result]
    assert [c.key for c in play(MAKERS[method](space, 2), space, batches[:1])] != [c.key for c in result[:8]]


@pytest.mark.parametrize("method", MAKERS)
def test_a_task_without_knobs_ends(method: Method) -> None:
    space = space_of(ONE)
    tuner = MAKERS[method](space, 0)
    first = tuner.propose(4)
    assert len(first) == 1
    tuner.update([(first[0], Measurement((1e-3,)))])
    assert list(tuner.propose(4)) == []


@pytest.mark.parametrize("method", MAKERS)
def test_nothing_is_asked_for_and_nothing_told(method: Method) -> None:
    tuner = MAKERS[method](space_of(PRODUCT), 0)
    assert list(tuner.propose(0)) == []
    tuner.update([])
    assert len(tuner.propose(2)) == 2


@pytest.mark.parametrize("make", [AnnealingTuner, BeamTuner])
def test_all_that_is_proposed_may_be_drawn_at_random(
    make: type[AnnealingTuner] | type[BeamTuner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one candidate is proposed at a time, it is random in one of twenty cases. Then nothing is planned."""
    tuner = make(space_of(SMALLEST), 0)
    tuner.update([(c, Measurement((1e-3 * (1 + i),))) for i, c in enumerate(tuner.propose(16))])
    monkeypatch.setattr(make, "explore", 1.0)
    monkeypatch.setattr(make, "plan", lambda *_: pytest.fail("nothing is wanted"))
    assert tuner.surrogate.ready
    assert len(tuner.propose(1)) == 1


@pytest.mark.parametrize("method", MAKERS)
def test_what_another_has_measured_is_not_proposed(method: Method) -> None:
    space = space_of(SMALLEST)
    measured = RandomTuner(space, 5).propose(space.size // 2)
    tuner = MAKERS[method](space, 0)
    tuner.update([(c, Measurement((1e-3 * (1 + i),))) for i, c in enumerate(measured)])
    result: list[Candidate] = []
    for _ in range(6):
        proposed = tuner.propose(8)
        result += proposed
        tuner.update([(c, Measurement((1e-2,))) for c in proposed])
    assert result
    assert not {c.key for c in result} & {c.key for c in measured}


@pytest.mark.parametrize(
    "make",
    [
        RandomTuner,
        lambda space, seed: AnnealingTuner(space, seed, AnnealingConfig(chains=8, steps=20)),
        lambda space, seed: BeamTuner(space, seed, BeamConfig(beam=4, completions=2, passes=1)),
        lambda space, seed: ChameleonTuner(
            space, seed, ChameleonConfig(walks=8, steps=4, rounds=1, groups=40)
        ),
    ],
)
def test_every_kernel_is_proposed_once_and_then_it_ends(make: Callable[[DesignSpace, int], Tuner]) -> None:
    space = space_of(SMALLEST)
    kernels = {c.key for v in space.enumerate() if (c := space.decode(v)) is not None}
    tuner, result = make(space, 0), []
    landscape = Landscape(space, goal_of(space, 0))
    while proposed := tuner.propose(40):
        result += [c.key for c in proposed]
        tuner.update([(c, landscape(c)) for c in proposed])
    assert len(result) == len(kernels)
    assert set(result) == kernels


@pytest.mark.parametrize("method", GUIDED)
def test_all_failing_is_survived(method: Method) -> None:
    tuner = MAKERS[method](space_of(PRODUCT), 0)
    for _ in range(3):
        proposed = tuner.propose(8)
        assert len(proposed) == 8
        tuner.update([(c, Measurement(error="no compiler")) for c in proposed])


@pytest.mark.parametrize("method", GUIDED)
def test_the_best_is_found_in_a_fraction_of_the_space(method: Method) -> None:
    """Random search would need 1,800 trials on average, half of the space."""
    space = space_of(TINY)
    assert space.size == 3600
    result = [
        trials_to_goal(MAKERS[method](space, seed), Landscape(space, goal_of(space, seed)), space.size // 16)
        for seed in range(3)
    ]
    assert sum(trials is not None for trials in result) >= 2


@pytest.mark.parametrize("method", GUIDED)
def test_what_was_measured_guides_what_is_proposed(method: Method) -> None:
    """The measurements are of other candidates than the tuner's own. Its proposals are then better than random ones."""
    space = space_of(PRODUCT)
    landscape = Landscape(space, goal_of(space, 1))
    known = [(c, landscape(c)) for c in RandomTuner(space, 3).propose(60)]
    tuner = MAKERS[method](space, 0)
    tuner.update(known)
    times = [landscape(c).median for c in tuner.propose(16)]
    assert np.median(times) < 0.75 * np.median([o.median for _, o in known])


def test_the_surrogate_orders_what_it_has_not_seen() -> None:
    space = space_of(PRODUCT)
    landscape = Landscape(space, goal_of(space, 0))
    drawn = RandomTuner(space, 0).propose(200)
    surrogate = Surrogate(space, 0)
    assert not surrogate.ready
    assert surrogate.rank(drawn[:3]).tolist() == [0, 0, 0]
    surrogate.add([(c, landscape(c)) for c in drawn[:120]])
    assert surrogate.ready
    rest = drawn[120:]
    truth = np.array([-landscape(c).median for c in rest])
    vectors = [c.vector for c in rest if c.vector is not None]
    for scores in (surrogate.predict(vectors), surrogate.rank(rest)):
        order = np.corrcoef(np.argsort(np.argsort(scores)), np.argsort(np.argsort(truth)))[0, 1]
        assert order > 0.5


def test_the_surrogate_keeps_the_best_and_leaves_failures_out() -> None:
    space = space_of(PRODUCT)
    drawn = RandomTuner(space, 0).propose(9)
    surrogate = Surrogate(space, 0)
    surrogate.add([(c, Measurement((1.0 + i,))) for i, c in enumerate(drawn[:8])])
    surrogate.add([(drawn[8], Measurement(error="no")), (drawn[7], Measurement((0.5, 0.4, 9.0)))])
    assert surrogate.best(2) == [drawn[7].vector, drawn[0].vector]
    assert drawn[8].vector not in surrogate.best(99)


def test_a_frontier_gives_each_kernel_once() -> None:
    space = space_of(CONVOLUTION)
    frontier = Frontier(space, np.random.default_rng(0))
    vector = space.random(np.random.default_rng(0))
    (one,) = frontier.new([vector, vector], 2)
    assert not frontier.claimed(one)
    assert [c.key for c in frontier.new([vector], 1)] == [one.key]
    frontier.claim([one])
    assert frontier.claimed(one)
    assert frontier.new([vector], 1) == []
    assert frontier.spent(vector)


def test_a_frontier_tries_no_more_vectors_than_it_needs() -> None:
    space = space_of(PRODUCT)  # whose vectors are all of different kernels
    drawn = iter([tuple(v) for v in np.random.default_rng(0).permutation(space.points)[:40].tolist()])
    frontier = Frontier(space, np.random.default_rng(0))
    assert len(frontier.new(drawn, 6)) == 6
    rest = list(drawn)
    assert len(rest) == 34
    assert len(frontier.new(rest, 99)) == 34
    assert frontier.new(rest, 0) == []


def test_outcomes_are_times_or_an_error() -> None:
    assert Measurement((3.0, 1.0, 2.0)).median == 2.0
    assert Measurement(error="no").median == math.inf
    for wrong in ({}, {"seconds": (1.0,), "error": "no"}, {"seconds": (0.0,)}, {"seconds": (math.nan,)}):
        with pytest.raises(ValueError):
            Measurement(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", MAKERS)
def test_each_method_makes_its_tuner(method: Method) -> None:
    assert make_tuner(method, space_of(PRODUCT), 0).name == method.value


def test_an_agent_is_for_chameleon_alone() -> None:
    from xrlflow.tuning.tuners.chameleon import Agent

    with pytest.raises(ValueError, match="no use to beam"):
        make_tuner(Method.BEAM, space_of(PRODUCT), 0, agent=Agent(0))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: AnnealingConfig(chains=0),
        lambda: AnnealingConfig(temperature=0),
        lambda: BeamConfig(beam=0),
        lambda: ChameleonConfig(walks=0),
        lambda: ChameleonConfig(knee=1),
        lambda: ChameleonConfig(rest=0),
        lambda: ChameleonConfig(explore=1.5),
        lambda: ChameleonConfig(imagined=-1),
        lambda: ChameleonConfig(neighbours=-1),
    ],
)
def test_configurations_that_make_no_sense_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        wrong()
