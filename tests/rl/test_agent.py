"""The agent: what it is before training, that batches change nothing, that it comes back from its file."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch_geometric.nn import GATConv

import models
from rewrite_rules import LIBRARY
from tests.rewrite.test_engine import layered
from tests.rewrite.toy import TOY, CancelTransposes, PushTransposeThroughRelu
from tests.rules.harness import model
from xrlflow.cost import Roofline
from xrlflow.ir import Graph
from xrlflow.onnxio import load
from xrlflow.rewrite import Library
from xrlflow.rl.agent import Agent
from xrlflow.rl.encoder import Attention
from xrlflow.rl.env import Problem, RewriteEnv
from xrlflow.rl.features import EDGE_FEATURES, Featuriser, Observation, Vocabulary, squash
from xrlflow.rl.parameters import KIND, AgentConfig, EncoderConfig
from xrlflow.rl.situation import Situation
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.learns

torch.set_num_threads(1)

ALL = Library(LIBRARY)
WORDS = Vocabulary.of(ALL)
SMALL = AgentConfig(EncoderConfig(width=16, layers=2, heads=2))


def an_agent(words: Vocabulary = WORDS, seed: int = 0) -> Agent:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Agent(words, SMALL)


def untrained_no_more(agent: Agent) -> Agent:
    """With noise in every parameter, so that each of them matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in agent.named_parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            if name in ("rule.weight", "family.weight", "changed.weight", "encoder.operator.weight"):
                parameter[0] = 0.0
    return agent


@cache
def graph_of(name: str) -> Graph:
    return load(models.small(name)).graph


def situations(name: str, steps: int = 6) -> list[Situation]:
    """The situations that an agent without training comes to."""
    featuriser = Featuriser(WORDS, Roofline())
    problem = Problem.of(name, graph_of(name), ALL, featuriser.prices, featuriser.pricing)
    env = RewriteEnv([problem], featuriser)
    data, _ = env.reset(seed=0)
    result, agent = [env.situation], an_agent()
    for _ in range(steps):
        action = int(agent.evaluate([data])[0].mode()[0])
        data, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            break
        result.append(env.situation)
    return result


def observe(*seen: Situation) -> list[Observation]:
    featuriser = Featuriser(WORDS, Roofline())
    return [featuriser(s) for s in seen]


@pytest.mark.parametrize("name", ["squeezenet", "bert", "nasrnn-shared", "resnext50"])
def test_before_training_it_is_as_good_as_greedy(name: str) -> None:
    agent = an_agent()
    seen = situations(name)
    for situation, data in zip(seen, observe(*seen)):
        action = int(agent.evaluate([data])[0].mode()[0])
        gains = [-m.delta / situation.cost for m in situation.candidates]
        best = max(gains, default=0.0)
        taken = gains[action] if action < len(gains) else 0.0
        assert squash(taken) > squash(max(best, 0.0)) - 0.02
    assert any(m.delta < -0.001 * s.cost for s in seen for m in s.candidates), "there was nothing to gain"


def test_batches_change_nothing() -> None:
    agent = untrained_no_more(an_agent())
    seen = [*situations("squeezenet", 2), *situations("bert", 2)]
    together, values = agent.evaluate(observe(*seen))
    alone = [agent.evaluate([data]) for data in observe(*seen)]
    assert together.counts.tolist() == [len(s.candidates) + 1 for s in seen]
    torch.testing.assert_close(
        together.log_probs, torch.cat([d.log_probs for d, _ in alone]), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(values, torch.cat([v for _, v in alone]), atol=1e-4, rtol=1e-4)
    assert float(values.detach().std()) > 0


def test_candidates_are_scored_wherever_they_stand_and_no_op_is_last() -> None:
    agent = untrained_no_more(an_agent())
    one = situations("squeezenet", 1)[0]
    order = torch.randperm(len(one.candidates), generator=torch.Generator().manual_seed(0))
    other = replace(one, candidates=tuple(one.candidates[i] for i in order.tolist()))
    (before, value), (after, again) = (agent.evaluate([data]) for data in observe(one, other))
    torch.testing.assert_close(after.log_probs[:-1], before.log_probs[order], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after.log_probs[-1], before.log_probs[-1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(value, again, atol=1e-5, rtol=1e-5)


def test_without_candidates_only_no_op_is_left() -> None:
    one = situations("squeezenet", 1)[0]
    distribution, values = untrained_no_more(an_agent()).evaluate(observe(replace(one, candidates=()), one))
    assert distribution.counts.tolist() == [1, len(one.candidates) + 1]
    assert float(distribution.probs.detach()[0]) == 1.0
    assert bool(torch.isfinite(values).all())


def test_every_parameter_learns() -> None:
    agent = untrained_no_more(an_agent())
    # The situations of several models have every kind of part.
    distribution, values = agent.evaluate(observe(*situations("squeezenet", 3), *situations("bert", 3)))
    actions = distribution.counts // 2
    (distribution.log_prob(actions).sum() + values.square().sum()).backward()
    for name, parameter in agent.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


def test_the_attention_is_that_of_pyg() -> None:
    width, heads, nodes, edges = 12, 3, 9, 40
    torch.manual_seed(0)
    theirs = GATConv(width, width // heads, heads, edge_dim=EDGE_FEATURES, add_self_loops=False)
    ours = Attention(width, heads)
    with torch.no_grad():
        theirs.bias.normal_()
        weight = theirs.lin.weight.view(heads, -1, width)
        parts = [torch.einsum("hcw,hc->hw", weight, a[0]) for a in (theirs.att_src, theirs.att_dst)]
        ours.of_node.weight.copy_(torch.cat([theirs.lin.weight, *parts]))
        of_edge = theirs.lin_edge.weight.view(heads, -1, EDGE_FEATURES)
        ours.of_edge.weight.copy_(torch.einsum("hce,hc->he", of_edge, theirs.att_edge[0]))
        ours.of_edge.bias.zero_()
        ours.bias.copy_(theirs.bias)
    x, edge_attr = torch.randn(nodes, width), torch.randn(edges, EDGE_FEATURES)
    edge_index = torch.randint(0, nodes - 1, (2, edges))  # the last node has no edge
    heard = theirs(ours.before(x), edge_index, edge_attr)
    torch.testing.assert_close(ours(x, edge_index[0], edge_index[1], edge_attr), x + torch.relu(heard))


# --- rules that come later ---


def test_an_agent_that_is_extended_decides_as_before() -> None:
    part = Library([r for r in LIBRARY if r.family != "merge"])
    agent = untrained_no_more(an_agent(Vocabulary.of(part)))
    grown = agent.extended(ALL)
    assert set(grown.vocabulary.rules) == set(ALL.rules)
    featuriser, problem = (f := Featuriser(agent.vocabulary, Roofline())), graph_of("bert")
    start = Problem.of("bert", problem, part, f.prices, f.pricing)
    situation = Situation(start.state, tuple(start.state.candidates), start.cost, start.cost)
    old, value = agent.evaluate([featuriser(situation)])
    new, again = grown.evaluate([Featuriser(grown.vocabulary, Roofline())(situation)])
    torch.testing.assert_close(old.log_probs, new.log_probs)
    torch.testing.assert_close(value, again)


def test_a_rule_that_was_not_there_is_scored_as_an_untrained_one_of_its_family() -> None:
    """By an agent of old, and by one extended: a new rule's own embedding begins at nothing."""
    known, later = PushTransposeThroughRelu(), CancelTransposes()
    old, both = Library([known]), Library([known, later])
    agent = untrained_no_more(an_agent(Vocabulary.of(old)))
    graph = load(
        model("agraph (float[2,3,4] x) => (float[2,3,4] y) { a = Transpose<perm=[0,2,1]>(x)\n"
              " y = Transpose<perm=[0,2,1]>(a) }")
    ).graph  # fmt: skip

    def scores(agent: Agent) -> torch.Tensor:
        featuriser = Featuriser(agent.vocabulary, Roofline())
        start = Problem.of("t", graph, both, featuriser.prices, featuriser.pricing)
        assert [m.rule for m in start.state.candidates] == [later]
        situation = Situation(start.state, tuple(start.state.candidates), start.cost, start.cost)
        return agent.evaluate([featuriser(situation)])[0].log_probs

    grown = agent.extended(both)
    torch.testing.assert_close(scores(agent), scores(grown))
    with torch.no_grad():
        grown.rule.weight[grown.vocabulary.rules.index(later.name) + 1] += 1.0
    assert not torch.allclose(scores(agent), scores(grown))


# --- files ---


def test_comes_back_from_its_file(tmp_path: Path) -> None:
    agent = untrained_no_more(an_agent())
    agent.save(tmp_path / "agent.safetensors", {"seed": 3})
    back = Agent.load(tmp_path / "agent.safetensors")
    assert back.vocabulary == agent.vocabulary
    assert back.config == agent.config
    data = observe(*situations("squeezenet", 2))
    assert torch.equal(agent.evaluate(data)[0].log_probs, back.evaluate(data)[0].log_probs)


def changed(checkpoint: Checkpoint, **config: Any) -> Checkpoint:
    return replace(checkpoint, config={**checkpoint.config, **config})


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    agent = an_agent(Vocabulary.of(Library(TOY)))
    agent.save(tmp_path / "whole.safetensors")
    whole = load_checkpoint(tmp_path / "whole.safetensors", KIND)
    words = dict(whole.config["vocabulary"])
    cases = {
        "vocabulary wants": changed(whole, vocabulary={**words, "rules": words["rules"][1:]}),
        "other features": changed(whole, features=["x"] * 100_000),
        "configuration is damaged": changed(whole, vocabulary={"rules": ["A"]}),
        "configuration wants": changed(whole, agent={"encoder": {"width": 8, "layers": 2, "heads": 2}}),
        "damaged: TypeError": changed(whole, agent={"encoder": {"width": 16.0, "layers": 2, "heads": 2}}),
        "damaged: ValueError": changed(whole, agent={"encoder": {"width": 16, "layers": 10**9, "heads": 2}}),
        "parameters are not those": replace(whole, tensors={**whole.tensors, "more": np.zeros(1)}),
        "not float32": replace(whole, tensors={**whole.tensors, "trust": np.ones(2)}),
        "not finite": replace(whole, tensors={**whole.tensors, "trust": np.array([10, np.nan], np.float32)}),
    }
    for index, (message, checkpoint) in enumerate(cases.items()):
        path = tmp_path / f"{index}.safetensors"
        save_checkpoint(checkpoint, path)
        with pytest.raises(CheckpointError, match=message) as refused:
            Agent.load(path)
        assert len(str(refused.value)) < 1000
    for index, damage in enumerate((b"[" * 100_000, b"1" * 5_000)):
        path = tmp_path / f"json{index}.safetensors"
        save_file({}, path, {"format": "1", "kind": KIND, "config": damage.decode()})
        with pytest.raises(CheckpointError, match="configuration is damaged"):
            Agent.load(path)
    path = tmp_path / "cut.safetensors"
    agent.save(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="damaged"):
        Agent.load(path)


@pytest.mark.parametrize("wrong", [{"width": 10, "heads": 4}, {"layers": -1}, {"width": 0}])
def test_refuses_widths_that_make_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="an encoder of width"):
        EncoderConfig(**wrong)


def test_layered_graphs_have_work_for_the_toy_rules() -> None:
    """What the tests of training rely on."""
    library = Library(TOY)
    featuriser = Featuriser(Vocabulary.of(library), Roofline())
    start = Problem.of("layered", load(layered(1)).graph, library, featuriser.prices, featuriser.pricing)
    data = featuriser(Situation(start.state, tuple(start.state.candidates), start.cost, start.cost))
    assert an_agent(featuriser.vocabulary).evaluate([data])[0].counts.tolist() == [
        len(start.state.candidates) + 1
    ]
