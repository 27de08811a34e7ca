"""The parts of Chameleon: its agent, walks, k-means and learning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tuning.spaces import CONVOLUTION, FOUR, ONE, PRODUCT, MadeUp, space_of
from tests.tuning.tuners.test_tuners import Landscape, goal_of
from xrlflow.learn.ppo import Rollout, update
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, save_checkpoint
from xrlflow.tuning.knobs import Candidate, Floats, Indices, Vector
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.surrogate import Surrogate
from xrlflow.tuning.tuners.chameleon import (
    Agent,
    ChameleonConfig,
    ChameleonTuner,
    Observation,
    View,
    Walks,
    groups,
    kmeans,
    walk,
)
from xrlflow.tuning.tuners.protocol import Measurement
from xrlflow.tuning.tuners.random import RandomTuner

pytestmark = pytest.mark.learns

torch.set_num_threads(1)

LAYERS = [PRODUCT, CONVOLUTION, FOUR, ONE]
SMALL = ChameleonConfig(walks=32, steps=16)


class Known(Surrogate):
    """A surrogate that needs no measurements: scores fall with the distance from a goal."""

    def __init__(self, space: DesignSpace, goal: Vector | None) -> None:
        super().__init__(space, 0)
        assert goal is not None
        self.goal = np.array(goal)

    def predict(self, vectors: object) -> Floats:
        away = np.abs(np.asarray(vectors) - self.goal) / np.maximum(1, self.space.sizes - 1)
        scores: Floats = np.exp(-2 * away.sum(axis=1)).astype(np.float32)
        return scores


def observations(space: DesignSpace, count: int, seed: int = 0) -> list[Observation]:
    view, points = View.of(space), space.draw(np.random.default_rng(seed), count)
    strides = np.full(len(space.knobs), 0.1, np.float32)
    return [Observation(view, p, m, strides) for p, m in zip(points, space.movable(points))]


def starts(space: DesignSpace, count: int = 32) -> Indices:
    return space.draw(np.random.default_rng(0), count)


def walks_of(agent: Agent, space: DesignSpace, surrogate: Surrogate, seed: int = 0, near: int = 0) -> Walks:
    draws = torch.Generator().manual_seed(seed)
    return walk(agent, View.of(space), space, surrogate, starts(space), SMALL, draws, near)


def biased(*moves: float) -> Agent:
    """An agent whose logits for decreasing, keeping and increasing a knob are `moves`, whatever it observes."""
    agent = Agent(0)
    with torch.no_grad():
        agent.actor.weight.zero_()
        agent.actor.bias.copy_(torch.tensor(moves))
    return agent


@pytest.mark.parametrize("layer", LAYERS)
def test_one_agent_serves_every_layer(layer: MadeUp) -> None:
    space = space_of(layer)
    distribution, values = Agent(0).evaluate(observations(space, 5))
    assert distribution.log_probs.shape == (5, len(space.knobs), 3)
    assert values.shape == (5,)
    assert bool(torch.isfinite(distribution.entropy()).all())


def test_knobs_without_a_choice_do_not_count() -> None:
    space = space_of(FOUR)
    seen = observations(space, 20)
    distribution, _ = Agent(0).evaluate(seen)
    movable = np.stack([o.movable for o in seen])
    assert not movable.all()
    actions = distribution.sample(torch.Generator().manual_seed(0)).numpy()
    assert (actions[~movable] == 1).all()


def test_observations_are_independent_of_their_company() -> None:
    seen = observations(space_of(CONVOLUTION), 6)
    agent = Agent(0)
    # The initial actor is nearly indifferent, so give it random weights.
    torch.nn.init.normal_(agent.actor.weight, generator=torch.Generator().manual_seed(0))
    together, values = agent.evaluate(seen)
    alone, value = agent.evaluate(seen[2:3])
    torch.testing.assert_close(together.log_probs[2], alone.log_probs[0])
    torch.testing.assert_close(values[2], value[0])


@pytest.mark.parametrize("layer", LAYERS)
def test_walks_stay_in_the_space_and_say_what_was_visited(layer: MadeUp) -> None:
    space = space_of(layer)
    surrogate = Known(space, goal_of(space, 0).vector)
    walks = walks_of(Agent(0), space, surrogate)
    assert len(walks.visited) == len(walks.scores) == 32 + sum(len(e) for e in walks.episodes)
    assert all(space.normal(v) == tuple(v) for v in walks.visited.tolist())
    assert np.array_equal(surrogate.predict(walks.visited), walks.scores)
    assert all(1 <= len(e) <= SMALL.steps for e in walks.episodes)
    assert all(e.truncated for e in walks.episodes)
    # The reward of a step is the score of the vector that it reaches.
    for episode, end in zip(walks.episodes, walks.ends):
        assert episode.rewards[-1] == pytest.approx(float(surrogate.predict(end[None])[0]))


def test_a_walk_without_a_choice_rests() -> None:
    space = space_of(ONE)
    walks = walks_of(Agent(0), space, Known(space, (0,)))
    # It ends with the first step whose moves have length one.
    assert {len(e) for e in walks.episodes} == {1}


def test_the_first_walks_move_by_one_place_from_the_start() -> None:
    space = space_of(PRODUCT)
    walks = walks_of(Agent(0), space, Known(space, goal_of(space, 0).vector), near=8)
    before, after = walks.visited[:32], walks.visited[32:64]
    # Vectors of different algorithms have different knobs, so their distances do not count.
    places = np.abs(after - before).max(axis=1) * (after[:, 0] == before[:, 0])
    assert places[:8].max() == 1
    assert places[8:].max() > 1


def test_a_walk_that_stays_rests_when_its_moves_are_of_one_place() -> None:
    space = space_of(PRODUCT)
    surrogate = Known(space, goal_of(space, 0).vector)
    walks = walks_of(biased(0.0, 99.0, 0.0), space, surrogate, near=8)
    lengths = [len(episode) for episode in walks.episodes]
    assert set(lengths[:8]) == {1}
    assert set(lengths[8:]) == {7}  # of 16 steps: the longest knobs have 20 values


def test_walks_are_reproducible() -> None:
    space = space_of(PRODUCT)
    surrogate = Known(space, goal_of(space, 0).vector)
    one, same, other = (walks_of(Agent(0), space, surrogate, seed) for seed in (0, 0, 1))
    assert np.array_equal(one.visited, same.visited)
    assert [e.log_probs for e in one.episodes] == [e.log_probs for e in same.episodes]
    assert len(one.visited) != len(other.visited) or not np.array_equal(one.visited, other.visited)


def test_the_agent_learns_to_walk_to_better_places() -> None:
    space = space_of(PRODUCT)
    surrogate = Known(space, goal_of(space, 3).vector)
    agent, config = Agent(0), ChameleonConfig(walks=32, steps=16)
    optimizer = config.ppo.optimizer(agent)
    draws = torch.Generator().manual_seed(0)

    def mean_end() -> float:
        walks = walks_of(agent, space, surrogate, seed=99)
        return float(surrogate.predict(walks.ends).mean())

    before = mean_end()
    for _ in range(25):
        walks = walk(agent, View.of(space), space, surrogate, starts(space), config, draws)
        update(agent, optimizer, Rollout.of(walks.episodes, config.ppo), config.ppo, draws)
    assert mean_end() > 1.5 * before


def test_kmeans_finds_groups_that_are_apart() -> None:
    generator = np.random.default_rng(0)
    truth = np.array([[0, 0], [10, 0], [0, 10]], np.float32)
    points = np.concatenate([c + generator.normal(0, 0.1, (50, 2)) for c in truth]).astype(np.float32)
    centres, loss = kmeans(points, 3, generator)
    assert sorted(np.abs(np.round(centres)).tolist()) == sorted(truth.tolist())
    assert loss == pytest.approx(150 * 2 * 0.01, rel=0.3)


def test_kmeans_takes_points_that_are_all_alike() -> None:
    centres, loss = kmeans(np.ones((5, 2), np.float32), 3, np.random.default_rng(0))
    assert (centres.tolist(), loss) == ([[1, 1]] * 3, 0.0)


def clustered(count: int) -> Floats:
    generator = np.random.default_rng(0)
    centres = generator.normal(0, 100, (count, 4))
    return np.concatenate([c + generator.normal(0, 0.1, (20, 4)) for c in centres]).astype(np.float32)


def test_groups_stop_at_the_knee() -> None:
    """There are twelve clusters. More than eight groups are much better, more than sixteen are hardly better."""
    result = groups(clustered(12), 8, 64, 2.5, np.random.default_rng(0))
    assert len(result) == 16


def test_groups_are_no_more_than_wanted_or_there_are_points() -> None:
    points = clustered(12)
    assert len(groups(points, 8, 5, 2.5, np.random.default_rng(0))) == 5
    assert len(groups(points[:3], 8, 64, 2.5, np.random.default_rng(0))) == 3


def test_a_cloud_without_structure_needs_few_measurements() -> None:
    """This makes Chameleon cheaper than others: it proposes only one candidate for each group."""
    space = space_of(PRODUCT)
    landscape = Landscape(space, goal_of(space, 0))
    tuner = ChameleonTuner(space, 0, ChameleonConfig(walks=32, steps=16, explore=0.0))
    tuner.update([(c, landscape(c)) for c in tuner.propose(64)])
    assert 0 < len(tuner.propose(64)) < 64


def test_a_group_whose_kernels_are_another_groups_gives_one_made_of_what_the_pool_has() -> None:
    space = space_of(CONVOLUTION)
    kernels: dict[str, list[Vector]] = {}
    for vector in space.enumerate():
        if (candidate := space.decode(vector)) is not None:
            kernels.setdefault(candidate.key, []).append(vector)
    # Two vectors with the same kernel, and another vector to combine them with.
    one, same = next(vectors for vectors in kernels.values() if len(vectors) == 2)
    other = next(vectors[0] for vectors in kernels.values() if len(vectors) == 1)
    tuner = ChameleonTuner(space, 0, SMALL)
    chosen = tuner._sample(np.array([one, same, other]), 3)
    assert len({c.key for c in chosen}) == 3


def test_what_was_decoded_is_not_proposed_again_once_it_is_known() -> None:
    space = space_of(PRODUCT)
    tuner = ChameleonTuner(space, 0, SMALL)
    pool = space.draw(np.random.default_rng(0), 12)
    first = tuner._sample(pool, 4)
    assert first
    tuner.update([(c, Measurement((1e-3,))) for c in first])
    again = tuner._sample(pool, 4)
    assert again
    assert not {c.key for c in again} & {c.key for c in first}


def test_an_agent_is_saved_and_loaded(tmp_path: Path) -> None:
    agent = Agent(3)
    agent.updates = 7
    agent.save(tmp_path / "agent.safetensors")
    again = Agent.load(tmp_path / "agent.safetensors")
    assert again.updates == 7
    seen = observations(space_of(PRODUCT), 4)
    torch.testing.assert_close(again.evaluate(seen)[0].log_probs, agent.evaluate(seen)[0].log_probs)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("agent", {"hidden": 20, "updates": 1}, "holds: agent"),
        ("kernel agent", {"hidden": "20", "updates": 1}, "configuration is damaged"),
        ("kernel agent", {"hidden": 20, "updates": 1}, "another version"),
    ],
)
def test_other_files_are_no_agents(
    tmp_path: Path, kind: str, config: dict[str, object], message: str
) -> None:
    save_checkpoint(Checkpoint(kind, config, {"w": np.zeros(2)}), tmp_path / "x")
    with pytest.raises(CheckpointError, match=message):
        Agent.load(tmp_path / "x")


def test_a_tuner_leaves_the_agent_that_it_was_given_alone_and_goes_on_from_it() -> None:
    space = space_of(PRODUCT)
    landscape = Landscape(space, goal_of(space, 0))
    given = Agent(0)
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    tuner = ChameleonTuner(space, 0, SMALL, given)
    for _ in range(2):
        tuner.update([(c, landscape(c)) for c in tuner.propose(8)])
    assert given.updates == 0
    assert tuner.agent.updates > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in tuner.agent.state_dict().items())
    # The agent that was taken from the tuner does not change with it.
    taken = tuner.agent
    updates, known = taken.updates, len(taken.experience)
    tuner.update([(c, landscape(c)) for c in tuner.propose(8)])
    assert (taken.updates, len(taken.experience)) == (updates, known)
    assert tuner.agent.updates > updates
    assert len(tuner.agent.experience) > known


class Decoded(list[Vector]):
    """A list of the vectors that are decoded, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        decode = DesignSpace.decode

        def noted(space: DesignSpace, vector: Vector) -> Candidate | None:
            self.append(space.normal(vector))
            return decode(space, vector)

        monkeypatch.setattr(DesignSpace, "decode", noted)


def informed_tuner(config: ChameleonConfig) -> tuple[ChameleonTuner, list[Vector]]:
    """A tuner that knows 30 measurements, and the vectors of these, fastest first."""
    space = space_of(PRODUCT)
    landscape = Landscape(space, goal_of(space, 0))
    tuner = ChameleonTuner(space, 0, config)
    known = [(c, landscape(c)) for c in RandomTuner(space, 3).propose(30)]
    tuner.update(known)
    known.sort(key=lambda pair: (pair[1].median, pair[0].key))
    return tuner, [c.vector for c, _ in known if c.vector is not None]


def test_plans_begin_with_neighbours_of_the_two_best(monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_of(PRODUCT)
    tuner, best = informed_tuner(replace(SMALL, imagined=0, neighbours=4))
    decoded = Decoded(monkeypatch)
    tuner.propose(1)
    assert len(set(decoded[:4]) & set(space.neighbours(best[0]))) > 1
    assert len(set(decoded[4:8]) & set(space.neighbours(best[1]))) > 1


def test_configurations_are_imagined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner, _ = informed_tuner(replace(SMALL, imagined=40, neighbours=0, shortlist=1, explore=0.0))
    decoded = Decoded(monkeypatch)
    tuner.propose(1)
    first = len(decoded)
    assert first > 30
    tuner.propose(1)
    assert len(decoded) - first < 10


def test_what_is_imagined_counts_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectors that walks visited have scores of at most 1, so the decoded vectors with larger scores come first."""
    tuner, known = informed_tuner(SMALL)
    order = np.random.default_rng(9).permutation(space_of(PRODUCT).points)
    imagined = [vector for point in order.tolist() if (vector := tuple(point)) not in known][:12]
    scored = [(vector, 2.0 - 0.05 * i) for i, vector in enumerate(imagined)]
    monkeypatch.setattr(tuner._surrogate, "promising", lambda count: scored[:count])
    assert [tuple(place) for place in tuner._explore()[:12].tolist()] == imagined


def test_what_was_decoded_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner, _ = informed_tuner(replace(SMALL, explore=0.0))
    decoded = Decoded(monkeypatch)
    for _ in range(3):
        tuner.propose(4)
    assert len(decoded) == len(set(decoded)) > 100


def test_of_a_group_all_that_have_been_decoded_are_compared() -> None:
    tuner, _ = informed_tuner(SMALL)
    pool = space_of(PRODUCT).draw(np.random.default_rng(9), 20)
    decoded = tuner._decode([tuple(vector) for vector in pool.tolist()], 20)
    assert len(decoded) > 2 * SMALL.shortlist
    best = decoded[int(tuner._surrogate.rank(decoded).argmax())]
    pool = np.array([c.vector for c in decoded if c is not best] + [best.vector])
    chosen = tuner._sample(pool, 1)
    assert tuner._surrogate.rank(chosen).tolist() == tuner._surrogate.rank([best]).tolist()


def test_the_likeliest_comes_first() -> None:
    tuner, _ = informed_tuner(replace(SMALL, explore=0.0))
    proposed = tuner.propose(8)
    assert len(proposed) > 3
    scores = tuner._surrogate.rank(proposed).tolist()
    assert scores == sorted(scores, reverse=True)


def test_nothing_has_to_be_imagined() -> None:
    tuner, _ = informed_tuner(replace(SMALL, imagined=0, neighbours=0))
    assert len(tuner.propose(8)) > 1


def test_walks_begin_at_the_best_measured_and_then_at_the_best_imagined() -> None:
    tuner, best = informed_tuner(SMALL)
    tuner.propose(1)
    starts, near = tuner._starts()
    assert (len(starts), near) == (32, 8)
    assert [tuple(start) for start in starts[:8].tolist()] == best[:8]

    other = space_of(CONVOLUTION)
    blank = ChameleonTuner(other, 0, SMALL, tuner.agent)
    blank.propose(1)
    promising = [vector for vector, _ in blank._surrogate.promising(8)]
    starts, near = blank._starts()
    assert near == 8
    assert [tuple(start) for start in starts[:8].tolist()] == promising


def test_an_agent_of_other_tasks_chooses_from_the_start() -> None:
    """Its first proposals are the ends of its walks. Without an agent, they are random."""
    space = space_of(CONVOLUTION)
    agent = biased(9.0, 0.0, 0.0)
    agent.updates = 1
    config = ChameleonConfig(walks=32, steps=16, explore=0.0)
    proposed = ChameleonTuner(space, 0, config, agent).propose(4)
    drawn = ChameleonTuner(space, 0, config).propose(4)
    assert len(drawn) == 4
    assert proposed
    lower, upper = (np.mean([sum(c.vector or ()) for c in result]) for result in (proposed, drawn))
    assert lower < 0.5 * upper


def test_times_are_learned_from_until_no_kernel_is_left() -> None:
    space = space_of(ONE)
    tuner = ChameleonTuner(space, 0, SMALL)
    (only,) = tuner.propose(8)
    tuner.update([(only, Measurement((1e-3,)))])
    assert list(tuner.propose(8)) == []
