"""Training: it crosses a valley, is the same each time, and goes on after it was stopped as if it had not been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from typer.testing import CliRunner

import models
from rewrite_rules import LIBRARY
from tests.rl.training import CONFIG, RULES, WORDS, Valleys, valley
from xrlflow.cli import app
from xrlflow.cost import Roofline
from xrlflow.learn.log import Logs
from xrlflow.learn.ppo import TrainingError
from xrlflow.learn.tensors import to_tensors
from xrlflow.rewrite import Library, RewriteState
from xrlflow.rl.agent import Agent
from xrlflow.rl.env import EnvConfig, Reward
from xrlflow.rl.train import KIND, Files, TrainConfig, Trained, fine_tune, state_path, train
from xrlflow.search import Limits, greedy
from xrlflow.storage.checkpoint import CheckpointError, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.learns

torch.set_num_threads(1)


class Stop:
    """A log that presses Ctrl-C when an iteration is told of; the states of the run are remembered."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.told: list[tuple[int, dict[str, float]]] = []

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.told.append((step, dict(values)))
        if step == self.at:
            raise KeyboardInterrupt

    def close(self) -> None:
        pass


def run(output: Path | None = None, stop: int | None = None, **changes: object) -> tuple[Trained, Stop]:
    log = Stop(stop)
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    return train(Valleys(), WORDS, config, output, log=lambda first: Logs(log)), log


def same(a: Agent, b: Agent) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_crosses_a_valley_where_greedy_stops() -> None:
    costs = Roofline()
    graph = valley(320)
    state = RewriteState.start(graph, Library(RULES), costs.delta)
    stopped = greedy(state, costs.cost(graph), Limits()).best.cost
    assert stopped == costs.cost(graph), "there is no valley"
    trained, _ = run(iterations=12)
    # Both pairs of transposes are gone, on a graph that was not there in training.
    assert trained.score.outcomes[0].best < 0.6 * stopped
    # The agent that is kept is the one that was evaluated.
    again = train(Valleys(), WORDS, replace(CONFIG, iterations=1, seed=9), start=trained.agent)
    assert again.score.gain >= trained.score.gain


@pytest.mark.quick
def test_a_seed_gives_the_same_run_and_another_seed_another() -> None:
    one, log = run(iterations=2)
    two, again = run(iterations=2)
    three, _ = run(iterations=2, seed=1)
    assert same(one.agent, two.agent)
    assert not same(one.agent, three.agent)

    def timeless(told: Stop) -> list[dict[str, float]]:
        return [{k: v for k, v in values.items() if not k.startswith("time/")} for _, values in told.told]

    assert timeless(log) == timeless(again)
    assert one.steps == two.steps >= 2 * CONFIG.steps


def state_of(path: Path) -> dict[str, torch.Tensor]:
    from xrlflow.storage.checkpoint import load_checkpoint

    return to_tensors(load_checkpoint(state_path(path), "training").tensors)


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole.safetensors", tmp_path / "stopped.safetensors"
    run(whole)
    first, _ = run(stopped, stop=2)
    assert (first.interrupted, first.iterations) == (True, 2)
    Agent.load(stopped)
    second, log = run(stopped)
    assert not second.interrupted
    assert [step for step, _ in log.told] == [3, 4]
    expected, result = state_of(whole), state_of(stopped)
    assert expected.keys() == result.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, result[name]), name
    assert same(Agent.load(whole), Agent.load(stopped))


def test_ctrl_c_in_the_middle_gives_the_best_agent_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xrlflow.rl import train as module

    calls = 0

    def interrupted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return update(*args, **kwargs)  # type: ignore[arg-type]

    update = module.update
    monkeypatch.setattr(module, "update", interrupted)
    path = tmp_path / "agent.safetensors"
    trained, _ = run(path)
    assert (trained.interrupted, trained.iterations) == (True, 1)
    assert same(Agent.load(path), trained.agent)


def test_goes_on_for_more_iterations_but_not_as_another_run(tmp_path: Path) -> None:
    path = tmp_path / "agent.safetensors"
    run(path, iterations=1)
    assert run(path, iterations=2)[0].iterations == 2
    for changes, message in (
        ({"seed": 5}, "another seed"),
        ({"steps": 7, "env": EnvConfig(horizon=3)}, "another env, steps"),
    ):
        with pytest.raises(CheckpointError, match=message):
            run(path, **changes)
    with pytest.raises(CheckpointError, match="other rules"):
        train(Valleys(), replace(WORDS, rules=("A",)), CONFIG, path)
    # From the beginning, when asked to.
    fresh = train(Valleys(), WORDS, replace(CONFIG, iterations=1, seed=5), path, resume=False)
    assert fresh.iterations == 1


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.safetensors"
    run(path, iterations=1)
    os.truncate(state_path(path), 1000)
    with pytest.raises(CheckpointError, match="damaged"):
        run(path)


def test_a_state_whose_parts_are_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.safetensors"
    run(path, iterations=1)
    held = load_checkpoint(state_path(path), KIND)
    outcome = held.config["score"][0]
    configs: list[dict[str, object]] = [
        *({"run": run} for run in ([1], "run", None)),
        *({"iteration": number} for number in (-1, "x", True, 10**400)),
        *({"score": [{**outcome, **changes}]} for changes in ({"initial": "x"}, {"steps": -1})),
        {"seconds": -1},
    ]
    damaged = [replace(held, config={**held.config, **changes}) for changes in configs]
    for name, value in (
        ("agent.value.0.bias", np.float32("nan")),
        ("optimizer.value.0.bias.exp_avg", np.float32("nan")),
        ("optimizer.value.0.bias.exp_avg_sq", np.float32(-1)),
    ):
        broken = np.full_like(held.tensors[name], value)
        damaged.append(replace(held, tensors={**held.tensors, name: broken}))
    for each in damaged:
        save_checkpoint(each, state_path(path))
        with pytest.raises(CheckpointError, match=r"do not fit|is damaged"):
            run(path, iterations=2)


def test_a_loss_that_is_no_number_ends_the_training(tmp_path: Path) -> None:
    agent = Agent(WORDS, CONFIG.agent)
    with torch.no_grad():
        agent.value[0].bias.fill_(float("nan"))
    with pytest.raises(TrainingError, match="values of the collected steps are not finite"):
        train(Valleys(), WORDS, CONFIG, tmp_path / "agent.safetensors", start=agent)


def test_an_agent_of_other_rules_is_no_start() -> None:
    agent = Agent(replace(WORDS, rules=("A",)), CONFIG.agent)
    with pytest.raises(CheckpointError, match="another vocabulary"):
        train(Valleys(), WORDS, CONFIG, start=agent)


def test_ends_at_the_deadline() -> None:
    trained = train(Valleys(), WORDS, CONFIG, deadline=time.monotonic())
    assert (trained.iterations, trained.interrupted) == (0, False)


def test_fine_tuning_gives_an_agent_that_is_no_worse_on_the_graph() -> None:
    agent = Agent(WORDS, CONFIG.agent)
    task = Valleys((320,), ())(WORDS)
    told: list[float] = []
    trained = fine_tune(
        agent,
        task,
        300,
        seed=1,
        horizon=6,
        progress=lambda values, step: told.append(values["evaluation/gain"]),
    )
    assert trained.steps >= 300
    assert trained.score.gain == max(told) >= told[0]


@pytest.mark.parametrize(
    "wrong",
    [{"iterations": 0}, {"workers": -1}, {"steps": 0}, {"env": EnvConfig(Reward.HYBRID)}],
)
def test_refuses_a_configuration_that_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="TrainConfig"):
        TrainConfig(**wrong)


KILLED = """
import sys
from dataclasses import replace
from tests.rl.training import CONFIG, WORDS, Valleys
from xrlflow.rl.train import train
if __name__ == "__main__":
    train(Valleys(), WORDS, replace(CONFIG, workers=1, iterations=10**6), sys.argv[1])
"""


def test_a_run_that_is_killed_leaves_no_processes_and_goes_on(tmp_path: Path) -> None:
    path, script = tmp_path / "agent.safetensors", tmp_path / "killed.py"
    script.write_text(KILLED)
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, str(script), str(path)], env={**os.environ, "PYTHONPATH": root}, cwd=tmp_path,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not (state_path(path).exists() and iterations_of(path) > 0):
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline, "the run does not come to its first iteration"
        time.sleep(0.2)
    process.kill()  # the run alone, not its workers
    process.wait()
    while processes_of(process.pid):
        assert time.monotonic() < deadline, "workers outlive their run"
        time.sleep(0.2)
    at = iterations_of(path)
    trained = train(Valleys(), WORDS, replace(CONFIG, workers=1, iterations=at + 1), path)
    assert trained.iterations == at + 1


def iterations_of(path: Path) -> int:
    from xrlflow.storage.checkpoint import load_checkpoint

    return int(load_checkpoint(state_path(path), "training").config["iteration"])


def processes_of(session: int) -> list[int]:
    """The processes of a session that are alive; in its group the resource tracker is too."""
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                result.append(int(entry.name))
    return result


def test_files_are_simplified_and_priced(tmp_path: Path) -> None:
    path = tmp_path / "squeezenet.onnx"
    onnx.save(models.small("squeezenet"), path)
    files = Files((str(path),), (), LIBRARY, Roofline)
    task = files(WORDS)
    (problem,) = task.problems
    assert problem.cost == pytest.approx(Roofline().cost(problem.state.graph))
    assert not task.held_out
    assert len(problem.state.candidates) > 0


# --- the command ---


def test_the_command_trains_and_goes_on(tmp_path: Path) -> None:
    model, agent = tmp_path / "squeezenet.onnx", tmp_path / "agent.safetensors"
    onnx.save(models.small("squeezenet"), model)
    arguments = [
        "train", str(model), "-o", str(agent), "--steps", "16", "--workers", "0", "--horizon", "4", "--seed", "3",
        "--log", str(tmp_path / "log"), "--json",
    ]  # fmt: skip
    first = CliRunner().invoke(app, [*arguments, "--iterations", "1"])
    assert first.exit_code == 0, first.output
    told = json.loads(first.stdout)
    assert told["iterations"] == 1
    assert told["evaluation"][str(model)] >= 1.0
    second = CliRunner().invoke(app, [*arguments, "--iterations", "2"])
    assert json.loads(second.stdout)["iterations"] == 2
    assert set(Agent.load(agent).vocabulary.rules) == set(Library(LIBRARY).rules)
    assert any((tmp_path / "log").iterdir())
    other = CliRunner().invoke(app, [*arguments, "--iterations", "2", "--horizon", "5"])
    assert other.exit_code == 2
    assert "another env" in other.stderr
    started = CliRunner().invoke(
        app, [*arguments, "--iterations", "1", "--restart", "--start", str(agent), "--horizon", "5"]
    )
    assert started.exit_code == 0, started.output


def test_a_run_that_was_evaluated_on_other_files_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """Its best score says nothing about these files, and is not reported as theirs."""
    (tmp_path / "moved").mkdir()
    paths = [tmp_path / "a.onnx", tmp_path / "b.onnx", tmp_path / "moved" / "a.onnx"]
    for path in paths:
        onnx.save(models.small("squeezenet"), path)
    arguments = ["train", "-o", str(tmp_path / "agent.safetensors"), "--steps", "8", "--workers", "0"]
    arguments += ["--horizon", "4", "--iterations", "1"]
    assert CliRunner().invoke(app, [*arguments, str(paths[0])]).exit_code == 0
    before = state_path(tmp_path / "agent.safetensors").read_bytes()
    other = CliRunner().invoke(app, [*arguments, str(paths[1])])
    assert other.exit_code == 2
    assert "evaluated on a.onnx" in other.stderr
    held_out = CliRunner().invoke(app, [*arguments, str(paths[0]), "--held-out", str(paths[1])])
    assert held_out.exit_code == 2
    assert state_path(tmp_path / "agent.safetensors").read_bytes() == before
    assert CliRunner().invoke(app, [*arguments, str(paths[2])]).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, str(paths[1]), "--restart"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere.onnx"], "nowhere.onnx"), (["{model}", "--start", "{model}"], "no checkpoint")],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, arguments: list[str], message: str) -> None:
    model = tmp_path / "squeezenet.onnx"
    onnx.save(models.small("squeezenet"), model)
    given = [a.format(model=model) for a in arguments]
    result = CliRunner().invoke(
        app, ["train", *given, "-o", str(tmp_path / "a.safetensors"), "--workers", "0", "--iterations", "1"]
    )
    assert result.exit_code == 2
    assert message in result.stderr
