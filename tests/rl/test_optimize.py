"""`optimize(search="xrlflow")`: the agent that is shipped, one from a file, one trained on the model."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import models
import xrlflow
from rewrite_rules import LIBRARY
from tests.rules.harness import model
from xrlflow.api import OptionError
from xrlflow.cli import app
from xrlflow.cost import NoTimeLeft, Roofline
from xrlflow.ir import Edit, Graph
from xrlflow.pipeline import explore
from xrlflow.pipeline.context import Clock
from xrlflow.rewrite import Library
from xrlflow.rl import strategy
from xrlflow.rl.agent import Agent
from xrlflow.rl.features import Vocabulary
from xrlflow.rl.parameters import KIND
from xrlflow.rl.pretrained import PRETRAINED
from xrlflow.search import Limits
from xrlflow.search.result import SearchNode, SearchResult
from xrlflow.storage.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.learns


def optimize(name: str, **options: Any) -> xrlflow.Result:
    defaults: dict[str, Any] = {
        "search": "xrlflow", "cost": Roofline(), "measure": False, "verify": False, "threads": 1, "budget": 150,
        "time_limit": 300.0,
    }  # fmt: skip
    return xrlflow.optimize(models.small(name), **(defaults | options))


def small_agent(path: Path, rules: int = 40) -> Path:
    """An untrained agent that knows only some of the rules."""
    torch.manual_seed(0)
    Agent(Vocabulary.of(Library(LIBRARY[:rules]))).save(path)
    return path


@pytest.mark.parametrize("name", ["resnext50", "bert-classifier", "squeezenet"])
def test_the_shipped_agent_is_no_worse_than_greedy(name: str) -> None:
    result, greedy = optimize(name), optimize(name, search="greedy")
    assert result.report.search == "xrlflow"
    assert result.report.cost_after <= greedy.report.cost_after * (1 + 1e-9)


def test_the_result_computes_the_same_and_replays(tmp_path: Path) -> None:
    result = optimize("resnext50", verify=True)
    assert not result.returned_original
    assert result.report.verified
    result.save_trace(tmp_path / "trace.json")
    again = optimize("resnext50", replay=tmp_path / "trace.json")
    assert again.graph.fingerprint == result.graph.fingerprint
    assert optimize("resnext50").trace == result.trace  # of the same seed


def test_an_agent_of_fewer_rules_is_extended(tmp_path: Path) -> None:
    result = optimize("resnext50", agent=small_agent(tmp_path / "agent.safetensors"))
    assert result.report.cost_after < result.report.cost_before


def test_training_on_the_model_is_told(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    result = optimize(
        "squeezenet", agent=small_agent(tmp_path / "agent.safetensors"), train_steps=20, budget=30
    )
    assert any("trained on this model for" in note for note in result.report.notes)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("search", "trainer"),
    [
        pytest.param("xrlflow", "xrlflow.rl.train.fine_tune", marks=pytest.mark.whole),
        ("rlflow", "xrlflow.rl.world_model.learning.train_world_model"),
    ],
)
def test_training_has_half_of_the_limit_and_the_search_its_part_of_the_rest(
    search: str, trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = trainer.rsplit(".", 1)
    train = getattr(importlib.import_module(module), name)
    given: dict[str, float | None] = {}

    def training(*args: Any, deadline: float, **options: Any) -> Any:
        given["trained"] = deadline
        result = train(*args, deadline=deadline, **options)
        time.sleep(1.0)
        return result

    def sharing(clock: Clock) -> None:
        given["over"] = time.monotonic()
        share(clock)

    def searching(function: Any) -> Any:
        def search(state: Any, cost: float, limits: Limits, *args: Any, **options: Any) -> SearchResult:
            given[function.__name__] = limits.deadline
            result: SearchResult = function(state, cost, limits, *args, **options)
            return result

        return search

    share = Clock.share
    monkeypatch.setattr(Clock, "share", sharing)
    monkeypatch.setattr(trainer, training)
    monkeypatch.setattr(explore, "_DREAM_ROUNDS", 1)
    monkeypatch.setattr(explore, "_DREAM_UPDATES", 1)
    monkeypatch.setattr("xrlflow.pipeline.explore.greedy", searching(explore.greedy))
    monkeypatch.setattr("xrlflow.rl.strategy.agent_search", searching(strategy.agent_search))
    begin = time.monotonic()
    optimize("squeezenet", search=search, train_steps=4, budget=10, time_limit=200.0)
    trained, over, quick, searched = (given[n] for n in ("trained", "over", "greedy", "agent_search"))
    assert trained is not None
    assert over is not None
    assert quick is not None
    assert searched is not None
    begun = trained - 100.0
    assert 0.0 <= begun - begin < 10.0
    assert quick - begun < 30.0
    assert searched - over == pytest.approx(0.3 * (begun + 200.0 - over), abs=0.2)


@pytest.mark.parametrize(("steps", "rounds"), [(4, 5), (2000, 5), (4001, 11)])
def test_a_long_training_in_a_world_model_has_more_rounds(
    steps: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "xrlflow.rl.world_model.learning.train_world_model",
        lambda *_, steps, rounds, **__: given.append((steps, rounds)),
    )
    optimize("squeezenet", search="rlflow", train_steps=steps, budget=10)
    assert given == [(steps, rounds)]


def test_training_by_slow_prices_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline comes within an iteration: what it learned does not count."""
    priced = []

    def in_time(delta: Any, until: float) -> Any:
        def timely(graph: Graph, edit: Edit) -> float:
            priced.append(edit)
            if len(priced) > 20:
                raise NoTimeLeft
            return float(delta(graph, edit))

        return timely

    monkeypatch.setattr("xrlflow.pipeline.explore.in_time", in_time)
    result = optimize("squeezenet", train_steps=200)
    assert len(priced) == 21
    assert "the agent did not learn: there was no time for an iteration (--time-limit)" in result.report.notes
    assert result.report.cost_after < result.report.cost_before


def spoiled(path: Path) -> Path:
    """The shipped agent, with a number that is none."""
    checkpoint = load_checkpoint(PRETRAINED, KIND)
    tensors = {k: v.copy() for k, v in checkpoint.tensors.items()}
    tensors["trust"][0] = float("nan")
    save_checkpoint(Checkpoint(KIND, checkpoint.config, tensors), path)
    return path


def truncated(path: Path) -> Path:
    path.write_bytes(PRETRAINED.read_bytes()[:1000])
    return path


def unrelated(path: Path) -> Path:
    save_checkpoint(Checkpoint("training", {}, {"a": np.zeros(1)}), path)
    return path


@pytest.mark.parametrize(
    ("make", "words"), [(spoiled, "trust"), (truncated, "damaged"), (unrelated, "holds: training")]
)
def test_a_bad_agent_is_refused_in_one_line(tmp_path: Path, make: Any, words: str) -> None:
    path = make(tmp_path / "bad.safetensors")
    with pytest.raises(OptionError, match=f"bad.safetensors.*{words}"):
        optimize("squeezenet", agent=path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"agent": "nowhere.safetensors"}, "nowhere.safetensors is no file"),
        ({"train_steps": -1}, "train_steps -1 is negative"),
        ({"search": "taso", "train_steps": 5}, "train_steps has no meaning with search 'taso'"),
        ({"search": "greedy", "agent": str(PRETRAINED)}, "agent has no meaning with search 'greedy'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        optimize("squeezenet", **options)


def test_the_command_line_takes_an_agent(tmp_path: Path) -> None:
    import onnx

    source, output = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(models.small("squeezenet"), source)
    agent = small_agent(tmp_path / "agent.safetensors")
    command = [
        "optimize",
        str(source),
        "-o",
        str(output),
        "--search",
        "xrlflow",
        "--agent",
        str(agent),
        "--budget",
        "20",
    ]
    done = CliRunner().invoke(app, [*command, "--cost", "roofline", "--no-measure", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["search"] == "xrlflow"
    assert output.exists()


def test_without_time_for_the_agent_there_is_what_greedy_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the agent on a busy machine takes longer than a short limit gives."""

    def nothing(state: Any, cost: float, *_: Any, **__: Any) -> SearchResult:
        start = SearchNode(state, None, cost)
        return SearchResult(start, (start,), 0, 0, 0.0, False)

    monkeypatch.setattr("xrlflow.rl.strategy.agent_search", nothing)
    result, greedy = optimize("resnext50"), optimize("resnext50", search="greedy")
    assert not result.returned_original
    assert result.trace == greedy.trace
    assert any("greedy search found a better graph" in note for note in result.report.notes)


@pytest.mark.parametrize(
    ("search", "moment"),
    [
        ("xrlflow", "xrlflow.rl.parameters.Parameters.load"),
        ("mcts", "xrlflow.rl.network.Network.__init__"),
        ("rlflow", "xrlflow.rl.world_model.files.load_world"),
    ],
)
def test_ctrl_c_while_the_agent_is_loaded_keeps_what_greedy_found(
    search: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(moment, interrupted)
    result = optimize("resnext50", search=search)
    assert result.trace == optimize("resnext50", search="greedy").trace
    assert any("interrupted" in note for note in result.report.notes)


@pytest.mark.parametrize(("search", "steps"), [("rlflow", 0), ("xrlflow", 5), ("mcts", 5)])
def test_an_agent_has_nothing_to_learn_where_nothing_can_be_done(
    search: str, steps: int, tmp_path: Path
) -> None:
    proto = model("agraph (float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    agent = small_agent(tmp_path / "agent.safetensors")
    result = xrlflow.optimize(
        proto, search=search, agent=agent, train_steps=steps, cost=Roofline(), measure=False, threads=1
    )
    assert result.returned_original
