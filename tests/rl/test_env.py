"""Episodes: rewards, ends, determinism, Gymnasium's own checker."""

from __future__ import annotations

import random
import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import models
from rewrite_rules import LIBRARY
from tests.rewrite.test_engine import layered
from tests.rewrite.toy import TOY, CancelTransposes, PushTransposeThroughRelu
from tests.rules.harness import model
from xrlflow.cost import Roofline
from xrlflow.ir import Graph
from xrlflow.ir.graph import FINGERPRINT_MASK
from xrlflow.onnxio import load
from xrlflow.rewrite import Library
from xrlflow.rl.env import EnvConfig, EpisodeError, FixedSizeEnv, Problem, Reward, RewriteEnv, Sizes
from xrlflow.rl.features import Featuriser, Vocabulary
from xrlflow.rl.situation import Situation, choices
from xrlflow.search import replay

pytestmark = pytest.mark.learns

ALL = Library(LIBRARY)
MODEL = Roofline()
WORDS = Vocabulary.of(ALL)


@cache
def problem(name: str) -> Problem:
    return Problem.of(name, load(models.small(name)).graph, ALL, MODEL)


def identity(situation: Situation) -> Situation:
    return situation


@cache
def toy_graph() -> Graph:
    return load(layered(2)).graph


def toys(**options: Any) -> Problem:
    return Problem.of("toys", toy_graph(), Library(TOY), MODEL, **options)


def valley() -> Problem:
    """transpose, relu, transpose: after two steps nothing is left to do."""
    proto = model(
        "agraph (float[2,3,4] x) => (float[2,3,4] y) {"
        " a = Transpose<perm=[0,2,1]>(x)\n b = Relu(a)\n y = Transpose<perm=[0,2,1]>(b) }"
    )
    return Problem.of(
        "valley", load(proto).graph, Library((CancelTransposes(), PushTransposeThroughRelu())), MODEL
    )


@pytest.mark.parametrize("name", ["squeezenet", "nasrnn-shared", "resnet50"])
def test_rewards_add_up_to_what_was_saved(name: str) -> None:
    env = RewriteEnv([problem(name)], identity, EnvConfig(horizon=20))
    rng = random.Random(0)
    now, information = env.reset(seed=0)
    total, over, best = 0.0, False, information["cost"]
    while not over:
        now, reward, terminated, truncated, information = env.step(rng.randrange(len(now.candidates)))
        total += reward
        over = terminated or truncated
        best = min(best, information["cost"])
        # The cost is exact however many steps were taken.
        assert np.isclose(information["cost"], MODEL.cost(now.state.graph), rtol=1e-9)
        assert len(information["action_mask"]) == len(now.candidates) + 1 == env.action_space.n
    initial = information["initial"]
    assert np.isclose(total, 100 * (initial - information["cost"]) / initial)
    assert information["best"] == best
    *_, last = replay(problem(name).state, information["trace"])
    assert last.fingerprint == now.state.fingerprint


def test_noop_ends_the_episode() -> None:
    env = RewriteEnv([toys()], identity)
    now, _ = env.reset(seed=0)
    after, reward, terminated, truncated, information = env.step(len(now.candidates))
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert after.state is now.state
    assert information["trace"] == ()
    with pytest.raises(EpisodeError, match="no episode"):
        env.step(0)


def test_exhaustion_terminates_and_the_horizon_truncates() -> None:
    env = RewriteEnv([valley()], identity, EnvConfig(horizon=2))
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(2)]
    assert ends == [(False, False), (True, False)]  # at the horizon too: there is nothing to bootstrap
    short = RewriteEnv([valley()], identity, EnvConfig(horizon=1))
    short.reset(seed=0)
    now, _, terminated, truncated, _ = short.step(0)
    assert (terminated, truncated) == (False, True)
    assert now.candidates  # what a value is bootstrapped from
    assert now.left == 0.0


def test_no_candidates_leave_noop() -> None:
    graph = load(model("agraph (float[2] x) => (float[2] y) { y = Exp(x) }")).graph
    env = RewriteEnv([Problem.of("bare", graph, ALL, MODEL)], Featuriser(WORDS, MODEL))
    data, _ = env.reset(seed=0)
    assert data.candidates == 0
    assert env.action_space.n == 1
    assert env.step(0)[1:4] == (0.0, True, False)


def test_no_candidate_leads_back_or_to_what_another_leads_to() -> None:
    for revisits in (False, True):
        env = RewriteEnv([toys()], identity, EnvConfig(horizon=30, revisits=revisits))
        now, _ = env.reset(seed=1)
        rng = random.Random(1)
        visited = [now.state.fingerprint]
        over = back = False
        while not over:
            there = [(now.state.fingerprint + m.shift) & FINGERPRINT_MASK for m in now.candidates]
            assert len(set(there)) == len(there)
            back |= not set(visited).isdisjoint(there)
            now, _, terminated, truncated, _ = env.step(rng.randrange(len(now.candidates)))
            visited.append(now.state.fingerprint)
            over = terminated or truncated
        assert back == revisits
    state = toys().state
    one = state.candidates[0]
    assert one.key not in {
        m.key for m in choices(state, {(state.fingerprint + one.shift) & FINGERPRINT_MASK})
    }


def test_of_many_candidates_the_cheapest_are_offered() -> None:
    everything, _ = RewriteEnv([problem("nasnet-a")], identity).reset(seed=0)
    some, _ = RewriteEnv([problem("nasnet-a")], identity, EnvConfig(candidates=10)).reset(seed=0)
    assert len(some.candidates) == 10 < len(everything.candidates)
    worst = max(m.delta for m in some.candidates)
    left_out = {m.key: m for m in everything.candidates}
    for match in some.candidates:
        del left_out[match.key]
    assert all(m.delta >= worst for m in left_out.values())


class Latency:
    """Pretends that a graph takes so much less with every operator that it lacks; counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Graph] = []

    def __call__(self, graph: Graph) -> float:
        self.asked.append(graph)
        return graph.node_count / 100


def run(env: RewriteEnv[Situation], actions: int, seed: int = 0) -> list[float]:
    """The rewards of random substitutions, and of No-Op if the episode goes on after them."""
    now, _ = env.reset(seed=seed)
    rng, rewards, over = random.Random(seed), [], False
    while not over:
        last = len(rewards) == actions
        action = len(now.candidates) if last else rng.randrange(len(now.candidates))
        now, reward, terminated, truncated, _ = env.step(action)
        rewards.append(reward)
        over = terminated or truncated
    return rewards


def test_measured_rewards_come_every_few_steps_and_at_the_end() -> None:
    latency = Latency()
    env = RewriteEnv(
        [toys(latency=latency)], identity, EnvConfig(Reward.END_TO_END, horizon=40, measure_every=3)
    )
    rewards = run(env, 7)
    assert len(latency.asked) == 3  # after steps 3 and 6, and at the end
    assert [i for i, r in enumerate(rewards) if r == 0.1] == [0, 1, 3, 4, 6]
    measured = sum(r for r in rewards if r != 0.1)
    assert np.isclose(measured, 100 * (1 - latency.asked[-1].node_count / 100))


def test_hybrid_rewards_add_up_to_what_was_measured() -> None:
    for horizon in (5, 40):  # cut off, and ended
        latency = Latency()
        env = RewriteEnv([toys(latency=latency)], identity, EnvConfig(Reward.HYBRID, horizon=horizon))
        rewards = run(env, 7)
        assert len(latency.asked) == 1
        assert np.isclose(sum(rewards), 100 * (1 - latency.asked[0].node_count / 100))
        modelled = run(RewriteEnv([toys()], identity, EnvConfig(horizon=horizon)), 7)
        assert np.allclose(rewards[:-1], modelled[:-1])
    assert run(RewriteEnv([toys(latency=Latency())], identity, EnvConfig(Reward.HYBRID)), 0) == [0.0]


def test_a_seed_fixes_the_problems() -> None:
    env = RewriteEnv([problem("squeezenet"), problem("bert"), toys()], identity)

    def drawn(seed: int) -> list[str]:
        names = [env.reset(seed=seed)[1]["problem"]]
        return names + [env.reset()[1]["problem"] for _ in range(20)]

    assert drawn(3) == drawn(3)
    assert set(drawn(3)) == {"squeezenet", "bert", "toys"}
    assert env.reset(options={"problem": "bert"})[1]["problem"] == "bert"


def test_bad_input_is_refused() -> None:
    with pytest.raises(EpisodeError, match="at least one"):
        RewriteEnv([], identity)
    with pytest.raises(EpisodeError, match="needs a way to measure toys"):
        RewriteEnv([toys()], identity, EnvConfig(Reward.END_TO_END))
    with pytest.raises(EpisodeError, match="one name"):
        RewriteEnv([toys(), toys()], identity)
    with pytest.raises(EpisodeError, match="horizon"):
        EnvConfig(horizon=0)
    env = RewriteEnv([toys()], identity)
    with pytest.raises(EpisodeError, match="no problem is called 'bert'"):
        env.reset(options={"problem": "bert"})
    now, _ = env.reset(seed=0)
    for action in (-1, len(now.candidates) + 1):
        with pytest.raises(EpisodeError, match=f"action {action} of"):
            env.step(action)


def fixed(**sizes: int) -> FixedSizeEnv:
    featuriser = Featuriser(WORDS, MODEL)
    problems = [problem("squeezenet"), problem("nasrnn-shared")]
    return FixedSizeEnv(problems, featuriser, EnvConfig(horizon=10), Sizes(**sizes))


def test_the_fixed_size_form_passes_gymnasiums_checker() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(fixed(), skip_render_check=True)


def test_fixed_size_observations_are_the_others_padded() -> None:
    env = fixed(candidates=20)
    padded, information = env.reset(seed=0, options={"problem": "nasrnn-shared"})
    now = env.env.situation
    data = env.env.observe(now)
    assert len(now.candidates) == 20
    assert padded in env.observation_space
    nodes, edges, candidates, _, changes = padded["counts"]
    assert (nodes, candidates) == (len(data.op), 20)
    assert (padded["x"][:nodes] == data.x).all()
    assert not padded["x"][nodes:].any()
    assert (padded["edge_index"][:, :edges] == data.edge_index).all()
    assert (padded["change"][:changes] == data.change).all()
    assert information["action_mask"].all()
    fewer, _, _, _, information = env.step(np.int64(0))
    assert information["action_mask"].sum() == len(env.env.situation.candidates) + 1
    assert information["action_mask"][-1] == 1
    assert (fewer["action_mask"] == information["action_mask"]).all()


def test_masked_actions_are_noop() -> None:
    env = fixed()
    env.reset(seed=0, options={"problem": "squeezenet"})
    assert env.step(np.int64(400))[1:4] == (0.0, True, False)
    env.reset(seed=0, options={"problem": "squeezenet"})
    assert env.step(np.int64(500))[1:4] == (0.0, True, False)


def test_a_graph_that_does_not_fit_is_refused() -> None:
    with pytest.raises(EpisodeError, match="raise Sizes"):
        fixed(nodes=16).reset(seed=0)
