"""The world model: its likelihood is one, it learns dynamics, dreams call no engine, and an agent learns in them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from tests.rl.test_strategy import PRICES, VALLEYS, valleys
from tests.rules.harness import model
from xrlflow.cli import app
from xrlflow.cost import Roofline
from xrlflow.learn.ppo import TrainingError
from xrlflow.onnxio import load
from xrlflow.options import OptionError
from xrlflow.rewrite import Library, RewriteState
from xrlflow.rl.agent import Agent
from xrlflow.rl.env import EnvConfig, Problem, RewriteEnv
from xrlflow.rl.features import Featuriser, Vocabulary
from xrlflow.rl.parameters import AgentConfig, EncoderConfig
from xrlflow.rl.pretrained import DREAMER, PRETRAINED
from xrlflow.rl.workers import play
from xrlflow.rl.world_model.diagnostics import TEMPERATURES, errors, f1, figures, promised
from xrlflow.rl.world_model.dream import dream
from xrlflow.rl.world_model.dynamics import Forecast, Truth, World, WorldConfig, latent_of
from xrlflow.rl.world_model.experience import SCALE, Play, explore
from xrlflow.rl.world_model.files import load_world, save_alone, save_world, world_path
from xrlflow.rl.world_model.learning import Learner, LearningConfig, chunks, train_world_model
from xrlflow.rl.world_model.planning import PlanConfig, Planner
from xrlflow.storage.checkpoint import CheckpointError

pytestmark = pytest.mark.learns

torch.set_num_threads(1)

LIBRARY = Library(VALLEYS)
WORDS = Vocabulary.of(LIBRARY)
ENV = EnvConfig(horizon=8)
SMALL = LearningConfig(60, ENV, hidden=64, mixtures=1, chunk=4, dreams=30, starts=32, horizon=8)


@pytest.fixture
def brief_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """World models learn as always, but less: for tests of what comes in and out, not of how well it learns."""
    learn = Learner.learn

    def little(self: Learner, plays: Any, updates: int, *given: Any) -> dict[str, float]:
        return learn(self, plays, min(updates, 10), *given)

    monkeypatch.setattr(Learner, "learn", little)
    brief = partial(LearningConfig, dreams=2)
    monkeypatch.setattr("xrlflow.rl.world_model.learning.LearningConfig", brief)


def agent(seed: int = 0) -> Agent:
    torch.manual_seed(seed)
    return Agent(WORDS, AgentConfig(EncoderConfig(width=16, layers=1, heads=2)))


def problems(relus: tuple[int, ...] = (1, 2)) -> tuple[list[Problem], Featuriser]:
    featuriser = Featuriser(WORDS, Roofline())
    valley_problems = []
    for count in relus:
        graph = load(valleys(1, count, distractors=1)).graph
        valley_problems.append(Problem.of(f"valley {count}", graph, LIBRARY, PRICES, featuriser.pricing))
    return valley_problems, featuriser


def test_the_likelihood_of_a_forecast_is_that_of_its_mixture() -> None:
    """Against torch's own mixtures, and it integrates to one."""
    generator = torch.Generator().manual_seed(0)
    logits, means, wide = (torch.randn(size, generator=generator) for size in ((1, 3), (1, 3, 1), (1, 3, 1)))
    forecast = Forecast(logits, means, 0.3 * wide, torch.zeros(1), torch.zeros(1))
    grid = torch.linspace(-12, 12, 4001).unsqueeze(1)
    many = Forecast(
        *(t.expand(len(grid), *t.shape[1:]) for t in (logits, means, 0.3 * wide)), *2 * [torch.zeros(1)]
    )  # type: ignore[arg-type]
    density = many.log_likelihood(grid).exp()
    assert float(torch.trapezoid(density, grid[:, 0])) == pytest.approx(1.0, abs=1e-3)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=logits[0]),
        torch.distributions.Normal(means[0, :, 0], (0.3 * wide[0, :, 0]).exp()),
    )
    assert torch.allclose(many.log_likelihood(grid), mixture.log_prob(grid[:, 0]), atol=1e-4)
    draws = torch.cat([forecast.sample(1.0, generator) for _ in range(4000)])
    expected = float((torch.softmax(logits, 1) * means[..., 0]).sum())
    assert float(draws.mean()) == pytest.approx(expected, abs=0.08)
    assert float(forecast.sample(0.0)) == float(means[0, logits.argmax()])


def test_the_truth_counts_candidates_by_rule() -> None:
    valley_problems, featuriser = problems((2,))
    learner = Learner(agent(), SMALL)
    observation, _ = RewriteEnv(valley_problems, featuriser, ENV).reset(seed=0)
    seen, rule = learner.embed([observation, observation])
    truth = Truth.of(seen, rule, learner.world.config.rules)
    numbers = np.bincount(observation.rule, minlength=learner.world.config.rules)
    assert np.array_equal(np.rint(np.expm1(truth.often[1].detach().numpy())), numbers)
    assert np.array_equal(truth.present[0].numpy() > 0, numbers > 0)
    number = int(np.flatnonzero(numbers)[0])
    mine = seen.candidates[(seen.owner == 1) & (rule == number)]
    assert torch.allclose(truth.vectors[1, number], mine.mean(0), atol=1e-6)
    assert float(truth.delta[1, number]) == pytest.approx(float(seen.delta[rule == number].min()))


def test_chunks_are_parts_of_plays() -> None:
    valley_problems, featuriser = problems()
    plays = explore(agent(), valley_problems, featuriser, 60, seed=1, config=ENV)
    assert sum(map(len, plays)) >= 60
    for chunk in chunks(plays, 3, 50, np.random.default_rng(0)):
        assert 1 <= chunk.length <= 3
        assert len(chunk.observations) == chunk.length + 1
        assert chunk.first + chunk.length <= len(chunk.play)
    with pytest.raises(TrainingError, match="no steps"):
        chunks([], 3, 5, np.random.default_rng(0))


def test_plays_record_what_the_engine_saved() -> None:
    valley_problems, featuriser = problems()
    plays = explore(agent(), valley_problems, featuriser, 40, seed=2, config=ENV)
    again = explore(agent(), valley_problems, featuriser, 40, seed=2, config=ENV)
    assert [p.actions for p in plays] == [p.actions for p in again]
    for one in plays:
        problem = next(p for p in valley_problems if p.name == one.problem)
        env = RewriteEnv([problem], featuriser, ENV)
        _, info = env.reset(seed=0)
        initial = info["cost"]
        for action in one.actions:
            _, _, _, _, info = env.step(action)
        assert SCALE * (initial - info["cost"]) / initial == pytest.approx(
            sum(one.savings), rel=1e-5, abs=1e-6
        )


@pytest.mark.whole
def test_it_learns_which_rules_apply_and_what_steps_save() -> None:
    valley_problems, featuriser = problems()
    learner = Learner(agent(), SMALL)
    plays = explore(learner.agent, valley_problems, featuriser, 300, seed=0, config=ENV)
    others = explore(learner.agent, valley_problems, featuriser, 80, seed=9, config=ENV)
    before = errors(learner, others, (1, 3))
    first = learner.learn(plays, 20)
    learner.learn(plays, 400)
    masks = []
    for _ in range(5):  # a rule more or less of one state: the last update decides it by luck
        last = learner.learn(plays, 20)
        after = errors(learner, others, (1, 3))
        masks.append([e.masks for e in after])
        for old, new in zip(before, after):
            assert new.saving < 0.5 * old.saving
    assert last["present"] < 0.5 * first["present"]
    assert np.mean(masks) > 0.9
    assert np.mean(masks) > np.mean([e.masks for e in before])


def test_the_encoder_learns_with_the_world_model() -> None:
    valley_problems, featuriser = problems()
    learner = Learner(agent(), SMALL)
    plays = explore(learner.agent, valley_problems, featuriser, 40, seed=0, config=ENV)
    before = {n: p.detach().clone() for n, p in learner.agent.named_parameters()}
    learner.learn(plays, 2)
    moved = {n for n, p in learner.agent.named_parameters() if not torch.equal(p, before[n])}
    assert any(n.startswith("encoder.") for n in moved)
    assert not {n for n in moved if n.split(".")[0] in ("score", "stop", "value", "trust")}


def test_a_dream_calls_no_engine_and_is_the_same_for_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    valley_problems, featuriser = problems()
    learner = Learner(agent(), SMALL)
    plays = explore(learner.agent, valley_problems, featuriser, 40, seed=0, config=ENV)
    learner.learn(plays, 20)
    with torch.no_grad():
        starts, _ = learner.embed([p.observations[0] for p in plays])

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a dream called the engine")

    for called in ("apply", "edit", "candidates", "start"):
        monkeypatch.setattr(RewriteState, called, refuse)

    def once(seed: int) -> list[tuple[list[int], list[float]]]:
        generator = torch.Generator().manual_seed(seed)
        episodes = dream(
            learner.agent, learner.world, starts, horizon=8, temperature=1.0, generator=generator
        )
        return [(e.actions, e.rewards) for e in episodes]

    assert once(1) == once(1)
    assert once(1) != once(2)
    for actions, rewards in once(3):
        assert 1 <= len(actions) <= 8
        assert min(rewards) >= 0.0


@pytest.mark.whole
def test_an_agent_that_dreamt_crosses_the_valley() -> None:
    """Each step into the valley is a loss. The engine is asked for 400 steps; the policy learns in dreams."""
    valley_problems, featuriser = problems((1,))
    dreamer = agent(3)
    learner = Learner(dreamer, replace(SMALL, updates=150))
    plays = train_world_model(learner, valley_problems, featuriser, steps=400, rounds=4)
    outcome = play(dreamer, valley_problems, featuriser, ENV)[0]
    assert outcome.best < 0.9 * outcome.initial
    # In dreams actions are drawn, so that some end early.
    saved = 1 - outcome.best / outcome.initial
    assert 0.7 * saved < promised(learner, plays) < 1.05 * saved
    assert promised(Learner(agent(3), SMALL), plays) < 0.2 * saved


def test_figures_for_a_log_are_those_of_plays_that_were_not_learned_from() -> None:
    valley_problems, featuriser = problems((1,))
    watched: list[tuple[int, dict[str, float]]] = []

    def watch(learner: Learner, plays: Sequence[Play]) -> dict[str, float]:
        watched.append((sum(map(len, plays)), figures(learner, plays)))
        return watched[-1][1]

    logged: list[dict[str, float]] = []
    plays = train_world_model(
        Learner(agent(), replace(SMALL, dreams=1)), valley_problems, featuriser, steps=60, rounds=3,
        watch=watch, progress=lambda known, number, learner: logged.append(dict(known)),
    )  # fmt: skip
    assert sum(steps for steps, _ in watched) == sum(map(len, plays))
    assert all(known.items() <= row.items() for (_, known), row in zip(watched, logged, strict=True))
    first, *_, last = (known["errors/saving_1"] for _, known in watched)
    assert last < first
    assert {f"errors/latent_5_at_{t:g}" for t in TEMPERATURES if t} <= set(logged[-1])


def test_imagined_states_have_a_row_for_each_rule_that_is_present() -> None:
    world = World(WorldConfig(width=4, rules=5, hidden=8, mixtures=1))
    latents = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    offers = world.decode(latents)
    offers = replace(offers, present=torch.eye(3, 5) - 0.5)
    seen, rule = world.imagined(latents, offers)
    assert int((offers.present >= 0).sum()) == len(rule) == len(seen.candidates)
    assert seen.often is not None
    assert float(seen.often.detach().min()) >= 1.0
    assert latent_of(seen).shape == latents.shape


def test_f1() -> None:
    a, b = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    assert f1(a, b) == pytest.approx(2 / 3)
    assert f1(b & False, b & False) == 1.0


def test_a_world_model_and_its_agent_are_read_as_they_were_written(tmp_path: Path) -> None:
    learner = Learner(agent(), SMALL)
    save_world(learner.agent, learner.world, tmp_path / "a.safetensors", {"seed": 0})
    assert world_path(tmp_path / "a.safetensors").is_file()
    read, world = load_world(tmp_path / "a.safetensors")
    latents = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    for mine, theirs in zip(vars_of(learner.world.decode(latents)), vars_of(world.decode(latents))):
        assert torch.equal(mine, theirs)
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), learner.agent.parameters()))


def vars_of(offers: Any) -> list[torch.Tensor]:
    return [getattr(offers, name) for name in ("present", "often", "delta", "hidden", "globals")]


@pytest.mark.parametrize("damage", ["missing", "another agent", "not finite"])
def test_a_world_model_that_does_not_fit_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.safetensors"
    learner = Learner(agent(), SMALL)
    if damage == "not finite":
        with torch.no_grad():
            learner.world.rule.weight.fill_(float("nan"))
    save_world(learner.agent, learner.world, path)
    if damage == "missing":
        world_path(path).unlink()
    elif damage == "another agent":
        other = Vocabulary.of(Library(VALLEYS[:1]))
        Agent(other, AgentConfig(EncoderConfig(width=16, layers=1, heads=2))).save(path)
    with pytest.raises(CheckpointError, match=r"a\.world\.safetensors"):
        load_world(path)


@pytest.mark.usefixtures("brief_learning")
def test_train_with_a_world_model_writes_an_agent_that_optimize_takes(tmp_path: Path) -> None:
    import onnx

    import xrlflow

    model, output = tmp_path / "valley.onnx", tmp_path / "agent.safetensors"
    onnx.save(valleys(1, 1), model)
    log = tmp_path / "log"
    trained = xrlflow.train(
        [model], output, iterations=2, steps=20, horizon=6, world_model=True, seed=1, log=log
    )
    curves = EventAccumulator(str(log)).Reload()
    for tag in ("errors/saving_1", "errors/masks_1", "dream/saved", "evaluation/saved"):
        assert len(curves.Scalars(tag)) == 2, tag
    assert trained.iterations == 2
    assert trained.steps == 40
    assert trained.score.gain >= 1.0
    result = xrlflow.optimize(model, agent=output, cost="roofline", measure=False, budget=20)
    assert result.report.search == "xrlflow"
    dreamt = xrlflow.optimize(
        model, search="rlflow", agent=output, cost="roofline", measure=False, budget=20, train_steps=10,
        time_limit=600.0,
    )  # fmt: skip
    assert any("in a world model of this model for 5 rounds" in note for note in dreamt.report.notes)
    assert dreamt.report.cost_after <= result.report.cost_before


@pytest.mark.whole
@pytest.mark.usefixtures("brief_learning")
def test_rlflow_goes_on_with_the_world_model_of_its_agent_and_begins_one_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx

    import xrlflow
    from rewrite_rules import LIBRARY as ALL
    from xrlflow.rl.train import random_agent

    model, path = tmp_path / "m.onnx", tmp_path / "a.safetensors"
    onnx.save(valleys(1, 1), model)
    mine = random_agent(Vocabulary.of(Library(ALL)), 0)
    rules = len(mine.vocabulary.rules) + 1
    world = World(WorldConfig(mine.config.encoder.width, rules, hidden=24, mixtures=2))
    given: list[World | None] = []

    class Noting(Learner):
        def __init__(self, agent: Agent, config: LearningConfig, seed: int, world: World | None) -> None:
            given.append(world)
            super().__init__(agent, replace(config, updates=1, dreams=1), seed, world)

    monkeypatch.setattr("xrlflow.rl.world_model.learning.Learner", Noting)
    mine.save(path)
    xrlflow.optimize(model, search="rlflow", agent=path, cost="roofline", measure=False, budget=5)
    save_world(mine, world, path)
    xrlflow.optimize(model, search="rlflow", agent=path, cost="roofline", measure=False, budget=5)
    first, second = given
    assert first is None
    assert second is not None
    assert torch.equal(second.rule.weight, world.rule.weight)
    world_path(path).write_bytes(b"no world model")
    with pytest.raises(OptionError, match=r"a\.world\.safetensors"):
        xrlflow.optimize(model, search="rlflow", agent=path, cost="roofline", measure=False, budget=5)


def test_the_world_model_of_the_package_belongs_to_its_agent() -> None:
    mine, world = load_world(DREAMER)
    shipped = Agent.load(PRETRAINED)
    assert set(shipped.vocabulary.rules) <= set(mine.vocabulary.rules)
    assert world.config.rules == len(mine.vocabulary.rules) + 1
    known, same = dict(mine.named_parameters()), dict(shipped.named_parameters())
    assert all(torch.equal(known[name][: len(p)], p) for name, p in same.items())


def test_ctrl_c_in_a_dream_keeps_what_greedy_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    import models
    import xrlflow
    from rewrite_rules import LIBRARY as ALL
    from xrlflow.rl.train import random_agent

    def interrupt(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("xrlflow.rl.world_model.learning.Learner.dream", interrupt)
    monkeypatch.setattr("xrlflow.rl.world_model.learning.Learner.learn", lambda *args: {})
    proto = tmp_path / "m.onnx"
    onnx.save(models.small("squeezenet"), proto)
    path = tmp_path / "a.safetensors"
    random_agent(Vocabulary.of(Library(ALL)), 0).save(path)
    result = xrlflow.optimize(
        proto, search="rlflow", agent=path, cost="roofline", measure=False, backend="onnxruntime"
    )
    assert any("interrupted" in note for note in result.report.notes)
    assert result.report.cost_after < result.report.cost_before


def test_a_world_model_learns_about_new_rules_and_keeps_what_it_knows_of_others() -> None:
    world = World(WorldConfig(16, 5, hidden=8, mixtures=1))
    wider = World.of(replace(world.config, rules=7), world.state_dict())
    latents = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(wider.decode(latents).present[:, :5], world.decode(latents).present)
    assert float(wider.decode(latents).present[:, 5:].max()) < 0


def test_an_encoder_that_stays_as_it_is() -> None:
    valley_problems, featuriser = problems()
    config = replace(SMALL, encoder=False, dreams=0)
    dreamer = agent()
    before = {name: p.clone() for name, p in dreamer.named_parameters()}
    learner = Learner(dreamer, config)
    train_world_model(learner, valley_problems, featuriser, steps=60, rounds=1)
    assert all(torch.equal(p, before[name]) for name, p in dreamer.named_parameters())
    fresh = Learner(agent(), config)
    others = explore(dreamer, valley_problems, featuriser, 40, seed=9, config=ENV)
    assert errors(learner, others, (1,))[0].saving < errors(fresh, others, (1,))[0].saving


@pytest.mark.whole
def test_a_plan_in_latents_crosses_the_valley_that_the_policy_does_not() -> None:
    """The world model has learned the valley; the heads are those of a random agent, which stops at once."""
    valley_problems, featuriser = problems((1,))
    learner = Learner(agent(), SMALL)
    learner.learn(explore(learner.agent, valley_problems, featuriser, 300, seed=0, config=ENV), 450)
    planner = Planner(learner.agent, learner.world, PlanConfig(simulations=64, depth=6), seed=0)
    env = RewriteEnv(valley_problems, featuriser, ENV)
    observation, info = env.reset(seed=0)
    initial = info["cost"]
    for _ in range(4):
        with torch.no_grad():
            seen, _ = learner.embed([observation])
        observation, _, terminated, truncated, info = env.step(planner.plan(seen))
        if terminated or truncated:
            break
    assert play(learner.agent, valley_problems, featuriser, ENV)[0].best == initial
    assert info["best"] < 0.9 * initial


def test_there_is_nothing_to_learn_where_nothing_can_be_done() -> None:
    """It used to play empty episodes for ever."""
    _, featuriser = problems((1,))
    graph = load(model("agraph (float[2,3,4] x) => (float[2,3,4] y) { y = Exp(x) }")).graph
    hopeless = Problem.of("nothing", graph, Library(VALLEYS[:1]), PRICES, featuriser.pricing)
    with pytest.raises(TrainingError, match="nothing to learn"):
        explore(agent(), [hopeless, hopeless], featuriser, 5, seed=0, config=ENV)
    valley_problems, _ = problems((1,))
    plays = explore(agent(), [hopeless, *valley_problems], featuriser, 20, seed=0, config=ENV)
    assert {p.problem for p in plays} == {valley_problems[0].name}


@pytest.mark.parametrize(("deadline", "expected"), [(0.0, 1), (math.inf, 60)])
def test_an_episode_ends_at_the_deadline(deadline: float, expected: int) -> None:
    valley_problems, featuriser = problems()
    plays = explore(agent(), valley_problems, featuriser, 60, seed=0, config=ENV, deadline=deadline)
    assert all(len(p.observations) == len(p) + 1 for p in plays)
    steps = sum(map(len, plays))
    assert steps == 1 if expected == 1 else steps >= expected


def test_a_deadline_cuts_a_round_short() -> None:
    valley_problems, featuriser = problems((1,))
    rounds: list[int] = []
    begin = time.monotonic()
    plays = train_world_model(
        Learner(agent(), replace(SMALL, updates=10**6)), valley_problems, featuriser, steps=10**6,
        deadline=begin + 0.5, progress=lambda figures, number, learner: rounds.append(number),
    )  # fmt: skip
    assert rounds == [0]
    assert plays
    assert time.monotonic() - begin < 30


def test_a_world_model_of_an_earlier_agent_is_not_taken_for_that_of_a_later_one(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    learner = Learner(agent(), SMALL)
    save_world(learner.agent, learner.world, path)
    agent(7).save(path)  # of the same form
    with pytest.raises(CheckpointError, match="belongs to another agent"):
        load_world(path)


def test_ctrl_c_before_the_first_evaluation_leaves_the_first_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx

    import xrlflow
    from xrlflow.rl import workers

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    proto = tmp_path / "valley.onnx"
    onnx.save(valleys(1, 1), proto)
    monkeypatch.setattr(workers, "play", interrupt)
    trained = xrlflow.train([proto], tmp_path / "a.safetensors", iterations=1, steps=5, world_model=True)
    assert trained.interrupted
    assert trained.score.outcomes == ()


@pytest.mark.usefixtures("brief_learning")
def test_a_run_without_a_world_model_is_not_overwritten_unasked(tmp_path: Path) -> None:
    import onnx

    import xrlflow

    proto, output = tmp_path / "valley.onnx", tmp_path / "a.safetensors"
    onnx.save(valleys(1, 1), proto)
    xrlflow.train([proto], output, iterations=1, steps=5, horizon=6, workers=0)
    before = output.read_bytes()
    with pytest.raises(OptionError, match="without a world model"):
        xrlflow.train([proto], output, iterations=1, steps=5, horizon=6, world_model=True)
    assert output.read_bytes() == before
    xrlflow.train([proto], output, iterations=1, steps=5, horizon=6, world_model=True, restart=True)


def test_no_states_are_embedded_for_dreams_that_there_is_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    valley_problems, featuriser = problems((1,))
    learner = Learner(agent(), replace(SMALL, dreams=3), 0)
    plays = explore(learner.agent, valley_problems, featuriser, 5, seed=0, config=ENV)
    begun: list[int] = []
    start = learner.start
    monkeypatch.setattr(learner, "start", lambda given: begun.append(0) or start(given))
    for deadline, updates in ((0.0, 1), (math.inf, 3)):
        begun.clear()
        learner.dream(plays, deadline)
        assert len(begun) == updates


@pytest.mark.usefixtures("brief_learning")
def test_a_training_that_fails_changes_no_file(tmp_path: Path) -> None:
    """It used to begin with writing an untrained agent, and with removing the world model of the one before."""
    import onnx

    import xrlflow

    proto, output = tmp_path / "valley.onnx", tmp_path / "a.safetensors"
    onnx.save(model("agraph (float[2,3,4] x) => (float[2,3,4] y) { y = Exp(x) }"), proto)
    run = {"iterations": 1, "steps": 5, "horizon": 6, "world_model": True}
    with pytest.raises(OptionError, match="nothing to learn"):
        xrlflow.train([proto], output, **run)
    assert list(tmp_path.iterdir()) == [proto]
    output.write_bytes(b"an agent")
    world_path(output).write_bytes(b"its world model")
    with pytest.raises(OptionError, match="nothing to learn"):
        xrlflow.train([proto], output, **run, restart=True)
    assert (output.read_bytes(), world_path(output).read_bytes()) == (b"an agent", b"its world model")
    (tmp_path / "folder.safetensors").mkdir()
    for folder in (tmp_path / "folder.safetensors", ".", "/"):
        with pytest.raises(OptionError, match="names no file: give the path of one"):
            xrlflow.train([proto], folder, **run)
    with pytest.raises(OptionError, match="cannot be written: File name too long"):
        xrlflow.train([proto], tmp_path / ("x" * 300) / "a.safetensors", **run)
    world_path(tmp_path / "b.safetensors").mkdir()
    with pytest.raises(OptionError, match=r"b\.world\.safetensors cannot be written: Is a directory"):
        xrlflow.train([proto], tmp_path / "b.safetensors", **run)


@pytest.mark.usefixtures("brief_learning")
@pytest.mark.parametrize("earlier", [True, False])
def test_ctrl_c_before_the_first_round_keeps_the_agent_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    import onnx

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    proto, output = tmp_path / "valley.onnx", tmp_path / "a.safetensors"
    onnx.save(valleys(1, 1), proto)
    if earlier:
        output.write_bytes(b"an agent")
        world_path(output).write_bytes(b"its world model")
    monkeypatch.setattr("xrlflow.rl.world_model.learning.explore", interrupt)
    asked = ["train", str(proto), "-o", str(output), "--world-model", "--restart"]
    outcome = CliRunner().invoke(app, asked)
    assert outcome.exit_code == 0, outcome.output
    assert "no world model" not in outcome.output
    assert "go on" not in outcome.output
    if earlier:
        assert (output.read_bytes(), world_path(output).read_bytes()) == (b"an agent", b"its world model")
    else:
        assert Agent.load(output)


@pytest.mark.usefixtures("brief_learning")
def test_it_is_said_that_no_round_was_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    from xrlflow.rl import workers

    proto, output = tmp_path / "valley.onnx", tmp_path / "new" / "a.safetensors"
    onnx.save(valleys(1, 1), proto)
    play = workers.play
    for change, saved in ((1.0, False), (0.5, True)):
        played: list[float] = []

        def steadily(*args: Any, factor: float = change, done: list[float] = played, **options: Any) -> Any:
            done.append(factor)
            return [replace(o, best=o.initial * factor ** len(done)) for o in play(*args, **options)]

        monkeypatch.setattr(workers, "play", steadily)
        asked = ["train", str(proto), "-o", str(output), "--world-model", "--restart", "--iterations", "1"]
        outcome = CliRunner().invoke(app, [*asked, "--steps", "5", "--horizon", "6"])
        assert outcome.exit_code == 0, outcome.output
        assert Agent.load(output)
        assert world_path(output).exists() == saved
        line = f"{output} has no world model: no round was better than the beginning"
        assert (line in outcome.output.splitlines()) != saved


@pytest.mark.usefixtures("brief_learning")
def test_a_run_with_a_world_model_goes_on_from_its_best_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run neither begins again nor overwrites what the first one learned."""
    import onnx

    import xrlflow
    from xrlflow.rl import workers

    proto, output = tmp_path / "valley.onnx", tmp_path / "a.safetensors"
    onnx.save(valleys(1, 1), proto)
    played: list[int] = []
    play = workers.play

    def better(*args: Any, **options: Any) -> Any:
        """Each evaluation finds more."""
        played.append(len(played))
        return [replace(outcome, best=outcome.best / 2 ** len(played)) for outcome in play(*args, **options)]

    monkeypatch.setattr(workers, "play", better)
    # The random agent of this seed does not stop at once: there are substitutions to learn from.
    run = {"steps": 5, "horizon": 6, "world_model": True, "seed": 3}
    xrlflow.train([proto], output, iterations=1, **run)
    first, rule = load_world(output)[0].arrays(), load_world(output)[1].rule.weight
    monkeypatch.setattr(workers, "play", play)
    given: list[tuple[Any, World | None]] = []

    class Noting(Learner):
        def __init__(self, agent: Agent, config: LearningConfig, seed: int, world: World | None) -> None:
            given.append((agent.arrays(), world))
            super().__init__(agent, config, seed, world)

    monkeypatch.setattr("xrlflow.rl.world_model.learning.Learner", Noting)
    before = output.read_bytes()
    stopped = xrlflow.train([proto], output, iterations=3, time_limit=1e-9, **run)
    assert stopped.iterations == 2
    ((begun, world),) = given
    assert all((array == first.arrays[name]).all() for name, array in begun.arrays.items())
    assert world is not None
    assert torch.equal(world.rule.weight, rule)
    assert output.read_bytes() == before  # the evaluation found nothing better


def test_a_run_that_begins_again_leaves_no_world_model_of_an_earlier_agent(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    learner = Learner(agent(), SMALL)
    save_world(learner.agent, learner.world, path)
    save_alone(agent(7), path)
    assert Agent.load(path)
    assert not world_path(path).exists()
    world_path(path).mkdir()
    with pytest.raises(CheckpointError, match=r"a\.world\.safetensors cannot be removed"):
        save_alone(agent(7), path)
