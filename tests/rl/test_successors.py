"""The paper's encoding: successors as graphs of their own."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch

import models
from rewrite_rules import LIBRARY
from xrlflow.cost import Roofline
from xrlflow.ir import Graph
from xrlflow.learn.ppo import PPOConfig, Rollout, collect, update
from xrlflow.onnxio import load
from xrlflow.rewrite import Library
from xrlflow.rl.agent import InTorch
from xrlflow.rl.env import EnvConfig, Problem, RewriteEnv
from xrlflow.rl.features import INPUT, UNKNOWN, Featuriser, Vocabulary
from xrlflow.rl.situation import Situation
from xrlflow.rl.strategy import agent_search
from xrlflow.rl.successors import SuccessorAgent, SuccessorData, SuccessorFeaturiser
from xrlflow.search import Limits, greedy

pytestmark = pytest.mark.learns

ALL = Library(LIBRARY)
WORDS = Vocabulary.of(ALL)


def environment(*names: str, horizon: int = 100) -> RewriteEnv[SuccessorData]:
    model = Roofline()
    problems = [Problem.of(name, load(models.small(name)).graph, ALL, model) for name in names]
    return RewriteEnv(problems, SuccessorFeaturiser(Featuriser(WORDS, model)), EnvConfig(horizon=horizon))


def operators(graph: Graph) -> Counter[int]:
    numbers, _, _ = WORDS.numbers()
    result = Counter(numbers.get(n.op, UNKNOWN) for n in graph.nodes())
    result[numbers[INPUT]] += len(graph.inputs)
    return result


def test_each_successor_is_a_graph_and_the_last_is_the_current_one() -> None:
    env = environment("squeezenet")
    data, _ = env.reset(seed=0)
    now = env.situation
    assert int(data.graphs) == len(now.candidates) + 1
    graphs = [now.state.apply(m).graph for m in now.candidates] + [now.state.graph]
    for number, graph in enumerate(graphs):
        inside = data.graph == number
        assert Counter(data.op[inside].tolist()) == operators(graph)
    # No edge joins two graphs; loops for nodes and constants, and one edge for each other input.
    source, target = data.edge_index
    assert (data.graph[source] == data.graph[target]).all()
    reads = sum(sum(v != 0 for v in n.inputs) for g in graphs for n in g.nodes())
    assert len(source) == reads + len(data.op)
    assert data.edge_attr.shape == (len(source), 4)


def test_edges_are_shapes() -> None:
    env = environment("squeezenet")
    data, _ = env.reset(seed=0)
    graph = env.situation.state.graph
    expected = Counter(
        tuple(d / 4096 for d in (*(graph.type(v).shape or ()), 0, 0, 0, 0)[:4])
        for n in graph.nodes()
        for v in n.inputs
        if v != 0
    )
    mine = data.graph[data.edge_index[1]] == int(data.graphs) - 1
    shapes = data.edge_attr[mine][: sum(expected.values())]  # after them come the nodes' loops
    assert Counter(map(tuple, shapes.tolist())) == {
        tuple(np.array(k, np.float32).tolist()): n for k, n in expected.items()
    }


def test_batching_changes_nothing() -> None:
    env = environment("squeezenet", "bert")
    seen = [env.reset(seed=s, options={"problem": p})[0] for s, p in enumerate(("squeezenet", "bert"))]
    torch.manual_seed(0)
    agent = SuccessorAgent(WORDS)
    together, values = agent.evaluate(seen)
    alone = [agent.evaluate([data]) for data in seen]
    assert together.counts.tolist() == [int(d.graphs) for d in seen]
    torch.testing.assert_close(together.log_probs, torch.cat([d.log_probs for d, _ in alone]))
    torch.testing.assert_close(values, torch.cat([v for _, v in alone]))
    joined = Batch.from_data_list(seen)
    assert joined.graph.max() + 1 == sum(int(d.graphs) for d in seen)


def test_no_candidates() -> None:
    env = environment("squeezenet")
    env.reset(seed=0)
    now = env.situation
    assert isinstance(env.observe, SuccessorFeaturiser)
    data = env.observe(Situation(now.state, (), now.cost, now.initial))
    distribution, values = SuccessorAgent(WORDS).evaluate([data])
    assert distribution.counts.tolist() == [1]
    assert values.shape == (1,)


def test_it_learns_with_the_same_ppo() -> None:
    torch.manual_seed(0)
    env, agent, config = environment("squeezenet", horizon=8), SuccessorAgent(WORDS), PPOConfig(minibatch=16)
    generator = torch.Generator().manual_seed(0)
    before = [p.detach().clone() for p in agent.parameters()]
    episodes = collect(agent, [env], 16, generator)
    update(agent, config.optimizer(agent), Rollout.of(episodes, config), config, generator)
    assert any(not torch.equal(a, b) for a, b in zip(before, agent.parameters()))
    assert all(torch.isfinite(p).all() for p in agent.parameters())


def test_the_same_search_takes_it() -> None:
    torch.manual_seed(0)
    env = environment("squeezenet")
    start = env.problems["squeezenet"]
    agent = SuccessorAgent(WORDS)
    result = agent_search(start.state, start.cost, Limits(60), InTorch(agent), env.observe)
    assert result.best.cost <= greedy(start.state, start.cost, Limits()).best.cost
