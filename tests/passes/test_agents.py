"""Agents: what they learn on the toy, how they play, and their files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.passes.toy import Words
from xrlflow.learn.log import Logs
from xrlflow.passes import Metric, run
from xrlflow.passes.agent import KIND, Agent, AgentConfig, Network, random_agent
from xrlflow.passes.dqn import DQNConfig
from xrlflow.passes.dqn import train as train_dqn
from xrlflow.passes.environment import Masking, PassEnv, Problem
from xrlflow.passes.lessons import Lessons, Teaching, Trained, score
from xrlflow.passes.play import guided, play, refine, sample
from xrlflow.passes.ppo import TrainConfig, state_path, train
from xrlflow.passes.searches import Budget, Order, greedy, random
from xrlflow.storage.checkpoint import CheckpointError, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.learns

# In each, the way to the best word leads through a longer one.
WORDS = ("dbbd", "bbaad", "dbbdbbd")
UNSEEN = "ddbbdbb"
SMALL = AgentConfig(width=32, graph_width=8, rounds=2, horizon=10)


def problems(words: Sequence[str] = WORDS) -> list[Problem]:
    return [Problem(w, Words().load(w)) for w in words]


def config(seed: int, network: Network = Network.COUNTS, iterations: int = 15) -> TrainConfig:
    return TrainConfig(iterations, 128, seed=seed, evaluate_every=5, agent=replace(SMALL, network=network))


@cache
def trained(seed: int, network: Network = Network.COUNTS) -> Trained:
    iterations = 25 if network is Network.GRAPH else 15
    return train(Words(), problems(), config(seed, network, iterations))


def left(agent: Agent, words: Sequence[str] = WORDS) -> float:
    """The letters that an agent's likeliest orders leave."""
    return sum(play(agent, Words(), p.module).value for p in problems(words))


@pytest.mark.whole
def test_ppo_crosses_valleys_where_greedy_stays() -> None:
    """Means over seeds, because one run may be lucky."""
    compiler = Words()
    by_greedy = sum(greedy(compiler, p.module, Budget(400, 10)).value for p in problems())
    before = np.mean([left(random_agent(compiler, SMALL, seed)) for seed in range(3)])
    after = np.mean([left(trained(seed).agent) for seed in range(3)])
    assert by_greedy == 4 + 4 + 7
    assert after < min(before, by_greedy) - 3


@pytest.mark.whole
def test_what_was_learned_holds_for_a_word_that_was_not_seen() -> None:
    result = np.mean([left(trained(seed).agent, [UNSEEN]) for seed in range(3)])
    assert result < greedy(Words(), Words().load(UNSEEN), Budget(400, 10)).value


@pytest.mark.whole
def test_shaping_pays_for_crossing_valleys() -> None:
    """Plain PPO learns that every way begins with a loss."""
    plain = train(Words(), problems(), config(0).plain()).agent
    assert left(plain) > left(trained(0).agent)


@pytest.mark.whole
def test_an_agent_that_sees_the_graph_learns_too() -> None:
    result = [left(trained(seed, Network.GRAPH).agent) for seed in range(2)]
    assert np.mean(result) < 4 + 4 + 7 - 3


@pytest.mark.whole
def test_dqn_learns() -> None:
    options = DQNConfig(steps=1500, begin=100, follow=100, evaluate_every=500, agent=SMALL)
    result = [train_dqn(Words(), problems(), replace(options, seed=seed)) for seed in range(2)]
    assert np.mean([left(f.agent) for f in result]) < 4 + 4 + 7 - 2
    assert result[0].reduction == pytest.approx(
        1 - np.exp(score(result[0].agent, Words(), problems(), Metric.OPERATIONS))
    )


def test_equal_seeds_give_equal_agents() -> None:
    def parameters(seed: int) -> torch.Tensor:
        agent = train(Words(), problems(), replace(config(seed), iterations=2, evaluate_every=1)).agent
        return torch.cat([p.detach().flatten() for p in agent.parameters()])

    assert torch.equal(parameters(5), parameters(5))
    assert not torch.equal(parameters(5), parameters(6))


def test_a_search_with_an_agent() -> None:
    compiler, agent = Words(), trained(0).agent
    module = compiler.load("dbbdbbdd")
    shot = play(agent, compiler, module)
    assert shot.steps <= agent.config.horizon
    assert run(compiler, module, shot.passes) == shot.module
    for search in (sample, guided, refine):
        order = search(agent, compiler, module, Budget(100, 10), seed=2)
        again = search(agent, compiler, module, Budget(100, 10), seed=2)
        assert order.passes == again.passes
        assert order.steps <= 100
        assert order.value <= shot.value
        assert run(compiler, module, order.passes) == order.module
        assert search(agent, compiler, module, Budget(0, 10)).passes == ()
    # With the same steps the agent finds more than chance: a mean over seeds.
    few = Budget(25, 10)
    by_chance = np.mean([random(compiler, module, few, seed).value for seed in range(10)])
    assert np.mean([sample(agent, compiler, module, few, seed).value for seed in range(3)]) < by_chance


def test_masked_passes_are_not_chosen() -> None:
    agent = random_agent(Words(), replace(SMALL, masking=Masking.ALL))
    env = PassEnv(Words(), problems(), agent.config.episode())
    observation, _ = env.reset(seed=0)
    distribution, values = agent.evaluate([observation, observation])
    assert values.shape == (2,)
    assert distribution.probs.reshape(2, -1)[0][observation["action_mask"] == 0].sum() == 0
    assert 0 < observation["action_mask"].sum() < len(observation["action_mask"])


def test_shaped_rewards_sum_to_the_best_prefix() -> None:
    lessons = Lessons(Words(), problems(["dbbd"]), SMALL.episode())
    lessons.reset(seed=0)
    numbers = [Words().passes.index(n) for n in ("open", "merge", "drop", "merge", "noise")]
    rewards = [lessons.step(n)[1] for n in numbers]
    assert rewards == pytest.approx([0.0, 0.0, 0.0, np.log(4 / 3), 0.0])
    plain = Lessons(Words(), problems(["dbbd"]), SMALL.episode(), Teaching(shaping=False))
    plain.reset(seed=0)
    assert [plain.step(n)[1] for n in numbers] == pytest.approx([-1.0, 0.25, 0.75, 0.25, -0.5])


def test_the_curriculum_begins_with_small_modules() -> None:
    words = ["aaaaaaaa", "a", "aaaa", "aa"]
    lessons = Lessons(Words(), problems(words), SMALL.episode())
    assert [p.name for p in lessons.open] == ["a"]
    lessons.progress = 0.25
    assert [p.name for p in lessons.open] == ["a", "aa", "aaaa"]
    lessons.progress = 0.5
    assert [p.name for p in lessons.open] == ["a", "aa", "aaaa", "aaaaaaaa"]
    everything = Lessons(Words(), problems(words), SMALL.episode(), Teaching(curriculum=False))
    assert len(everything.open) == 4
    names = {everything.reset(seed=seed)[1]["problem"] for seed in range(40)}
    assert names == set(words)
    with pytest.raises(ValueError, match="at least one module"):
        Lessons(Words(), [], SMALL.episode())


def test_a_run_ends_at_its_deadline_and_at_an_interrupt(tmp_path: Path) -> None:
    late = train(Words(), problems(), config(0), tmp_path / "late", deadline=time.monotonic() - 1)
    assert late.iterations == 0
    assert left(Agent.load(tmp_path / "late")) > 0

    class Interrupting:
        def scalars(self, values: object, step: int) -> None:
            if step == 2:
                raise KeyboardInterrupt

        def close(self) -> None:
            pass

    stopped = train(
        Words(), problems(), config(0), tmp_path / "stopped", log=lambda done: Logs(Interrupting())
    )
    assert stopped.interrupted
    assert stopped.iterations == 2
    assert Agent.load(tmp_path / "stopped").about["iteration"] == 2


class _Stopping:
    """A log that stops the run after some iterations, as a kill would: nothing is written after the state."""

    def __init__(self, at: int) -> None:
        self.at = at

    def scalars(self, values: object, step: int) -> None:
        if step == self.at:
            raise RuntimeError("killed")

    def close(self) -> None:
        pass


@pytest.mark.whole
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    options = replace(config(4), iterations=6, evaluate_every=2)
    whole = train(Words(), problems(), options, tmp_path / "whole")
    done: list[int] = []

    def log(first: int) -> Logs:
        done.append(first)
        return Logs(_Stopping(first + 3))

    with pytest.raises(RuntimeError, match="killed"):
        train(Words(), problems(), options, tmp_path / "agent", log=log)
    with pytest.raises(RuntimeError, match="killed"):
        train(Words(), problems(), options, tmp_path / "agent", log=log)
    again = train(Words(), problems(), options, tmp_path / "agent", log=log)
    assert done == [0, 3, 6]
    assert (again.iterations, again.steps, again.score) == (6, whole.steps, whole.score)
    for unlinked in (False, True):
        if unlinked:  # the state has the best agent, too
            (tmp_path / "agent").unlink()
            train(Words(), problems(), options, tmp_path / "agent")
        kept = Agent.load(tmp_path / "agent")
        assert kept.about == whole.agent.about
        for name, tensor in whole.agent.state_dict().items():
            assert torch.equal(again.agent.state_dict()[name], tensor)
            assert torch.equal(kept.state_dict()[name], tensor)


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "agent.safetensors"
    few = replace(config(0), iterations=1, evaluate_every=1)
    train(Words(), problems(), few, output)
    state = state_path(output)
    assert state.name == "agent.training.safetensors"
    with pytest.raises(CheckpointError, match="other seed: restart"):
        train(Words(), problems(), replace(few, seed=1), output)
    with pytest.raises(CheckpointError, match="other modules: restart"):
        train(Words(), problems(["aab"]), few, output)
    assert train(Words(), problems(), replace(few, seed=1), output, restart=True).iterations == 1
    held = load_checkpoint(state, "training of a passes agent")
    save_checkpoint(replace(held, tensors={k: v for k, v in held.tensors.items() if k != "generator"}), state)
    with pytest.raises(CheckpointError, match="do not fit"):
        train(Words(), problems(), replace(few, seed=1), output)
    state.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        train(Words(), problems(), few, output)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    """And is not trained on, nor written again."""
    output = tmp_path / "agent"
    once = replace(config(0), iterations=1, evaluate_every=1)
    train(Words(), problems(), once, output)
    state = state_path(output)
    held = load_checkpoint(state, "training of a passes agent")
    nan, seven = float("nan"), np.zeros(7, np.float32)
    configs = [{"run": run} for run in ([1], "run", None)]
    configs += [{"iteration": number} for number in (-1, "x", True, 10**400)]
    configs += [{"steps": -1}, {"seconds": -1}, {"score": "x"}, {"score": [1]}, {"about": [1]}]
    damaged = [replace(held, config={**held.config, **changes}) for changes in configs]
    for name, value in (
        *((f"{who}.value.bias", np.array([nan], np.float32)) for who in ("agent", "best")),
        *((f"optimizer.value.bias.{key}", seven) for key in ("exp_avg", "exp_avg_sq", "step")),
        ("optimizer.value.bias.exp_avg_sq", np.array([-1], np.float32)),
        ("optimizer.value.bias.step", np.float32(-1)),
    ):
        damaged.append(replace(held, tensors={**held.tensors, name: np.asarray(value)}))
    for each in damaged:
        save_checkpoint(each, state)
        before = state.read_bytes()
        with pytest.raises(CheckpointError, match=r"do not fit|is damaged"):
            train(Words(), problems(), replace(once, iterations=2), output)
        assert state.read_bytes() == before
    save_checkpoint(held, state)
    output.write_bytes(b"damaged")
    train(Words(), problems(), once, output)
    assert Agent.load(output).about == held.config["about"]


def test_the_best_agent_outlives_the_end_of_a_run(tmp_path: Path) -> None:
    """What is evaluated last, after all iterations, is the best for the run that goes on, too."""
    output = tmp_path / "agent"
    first = train(Words(), problems(), replace(config(3), iterations=1, evaluate_every=2), output)
    held = load_checkpoint(state_path(output), "training of a passes agent")
    assert held.config["score"] == first.score
    assert held.config["about"] == Agent.load(output).about


@pytest.mark.parametrize("network", Network)
def test_a_file_keeps_the_agent(network: Network, tmp_path: Path) -> None:
    agent = random_agent(Words(), replace(SMALL, network=network), seed=3)
    agent.save(tmp_path / "agent", {"steps": 5})
    again = Agent.load(tmp_path / "agent")
    assert again.config == agent.config
    assert again.about == {"steps": 5}
    env = PassEnv(Words(), problems(), agent.config.episode())
    observation, _ = env.reset(seed=0)
    assert torch.equal(agent.scores([observation])[0], again.scores([observation])[0])


def test_a_file_that_is_no_agent(tmp_path: Path) -> None:
    path = tmp_path / "agent"
    agent = random_agent(Words(), SMALL)
    agent.save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        Agent.load(path)
    with pytest.raises(CheckpointError, match="No such file"):
        Agent.load(tmp_path / "none")
    agent.save(path)
    good = load_checkpoint(path, KIND)
    save_checkpoint(replace(good, kind="something"), path)
    with pytest.raises(CheckpointError, match="something"):
        Agent.load(path)
    sizes = [{"horizon": h} for h in (0, -1, 10**15, "10", 1.5, None, True)]
    sizes += [{"width": 10**9}, {"width": 0}, {"network": "graph", "rounds": 10**7}, {"network": "none"}]
    for changes in (
        *({"config": {**good.config["config"], **size}} for size in sizes),
        *({"passes": passes} for passes in (["merge"], list(range(7)), "m" * 7, ["m"] * 10**5)),
    ):
        save_checkpoint(replace(good, config={**good.config, **changes}), path)
        with pytest.raises(CheckpointError, match="do not fit"):
            Agent.load(path)
    broken = {**good.tensors, "value.bias": np.full(1, np.nan, np.float32)}
    save_checkpoint(replace(good, tensors=broken), path)
    with pytest.raises(CheckpointError, match="not finite"):
        Agent.load(path)
    narrow = {name: t.astype(np.float16) for name, t in good.tensors.items()}
    save_checkpoint(replace(good, tensors=narrow), path)
    with pytest.raises(CheckpointError, match="float16"):
        Agent.load(path)


@pytest.mark.parametrize("look", [play, sample, guided, refine])
def test_finite_weights_whose_scores_are_not(look: Callable[..., Order]) -> None:
    agent = random_agent(Words(), SMALL)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.fill_(3e38)
    arguments = () if look is play else (Budget(40, 10),)
    with pytest.raises(CheckpointError, match="scores that are not finite"):
        look(agent, Words(), Words().load("dbbd"), *arguments)


def test_an_agent_is_for_its_passes() -> None:
    agent = random_agent(Words(), SMALL)
    module = Words().load("aab")
    with pytest.raises(CheckpointError, match="other passes than words has: wrong"):
        play(agent, Words(wrong=True), module)
    with pytest.raises(CheckpointError, match="other passes"):
        train(Words(wrong=True), problems(), config(0), start=agent)
