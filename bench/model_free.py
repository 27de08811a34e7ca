"""Model-free PPO with measured latencies as its rewards (X-RLflow, section 3.3) in the place of a search.

Everything before and after it is what `optimize` does: simplification, comparisons of whole models, verification.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path as File
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(File(__file__).resolve().parent.parent))  # the checkout

from bench.agents import learn
from xrlflow.cost import AdditiveCost
from xrlflow.ir import Graph
from xrlflow.learn.ppo import Episode
from xrlflow.learn.threads import one_thread
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.prepare import Start
from xrlflow.rl.agent import Agent
from xrlflow.rl.env import EnvConfig, Problem, RelativeLatency, Reward, RewriteEnv
from xrlflow.rl.features import Featuriser, Pricing
from xrlflow.rl.latency import UNRUNNABLE, PairedLatency
from xrlflow.rl.pretrained import PRETRAINED
from xrlflow.search import SearchNode, SearchResult, TraceStep, extend
from xrlflow.search.result import retrace

# Steps of an update, and seconds of a measurement: at least, and as many runs of the original.
STEPS, SECONDS, RUNS = 64, 0.5, 10
# Graphs that are proposed.
SHORTLIST = 10
EPISODES = EnvConfig(Reward.END_TO_END, horizon=30)


@contextmanager
def instead_of_search() -> Iterator[None]:
    """In this context, `optimize` explores by PPO with measured rewards."""
    with mock.patch("xrlflow.pipeline.attempts.explore", explore):
        yield


def explore(context: Context, start: Start) -> Explored:
    """Train the shipped agent by measured rewards, for as long as an agent that `optimize` trains. The start, and the
    graphs that were measured to be faster, are proposed: their costs are the start's times the measured part."""
    assert context.feeds is not None
    assert isinstance(start.model, AdditiveCost)
    base, clock = start.base, context.clock
    assert base.state.delta is not None
    begin = time.monotonic()
    agent = Agent.load(PRETRAINED).extended(context.library)
    original = context.artifact(base.state.graph).file
    seconds = max(SECONDS, RUNS * clock.latency)
    found = Measured(base, PairedLatency(context.imported, original, context.feeds, context.threads, seconds))
    state = replace(base.state, delta=Pricing.of(base.state.delta))
    problem = Problem(context.imported.name, state, base.cost, found.latency)
    environment = RewriteEnv([problem], Featuriser(agent.vocabulary, start.model), EPISODES)
    torch.manual_seed(context.options.seed)
    with clock.phase("search"), one_thread():
        until = clock.budget.train_until or clock.budget.train_in_search_until
        row = learn(agent.train(), [environment], STEPS, context.options.seed, until - begin, found.note)
    context.notes.append(f"PPO took {row['steps']} steps and measured {len(found.known)} graphs")
    clock.share()
    faster = [node for node in found.nodes.values() if node.cost < base.cost and context.fits(node)]
    shortlist = tuple(sorted([base, *faster], key=lambda node: node.cost)[:SHORTLIST])
    result = SearchResult(shortlist[0], shortlist, row["steps"], row["steps"], row["seconds"], False)
    return Explored(result, shortlist)


class Measured:
    """The graphs that were measured: their latency as a part of the start's by fingerprint (`known`), those that
    cannot run among them, and the nodes of the others.

    `measure`: the latency of a graph as a part of the start's.
    """

    def __init__(self, base: SearchNode, measure: RelativeLatency) -> None:
        self.base, self.measure = base, measure
        self.known: dict[int, float] = {}
        self.nodes: dict[int, SearchNode] = {}

    def latency(self, graph: Graph) -> float:
        """The latency of a graph as a part of the start's, measured once."""
        if graph.fingerprint not in self.known:
            self.known[graph.fingerprint] = self.measure(graph)
        return self.known[graph.fingerprint]

    def note(self, episode: Episode[Any]) -> None:
        """Keep the graphs of an episode that were measured: every few steps, and the last. Steps between two of them
        have equal parts of the difference."""
        steps: tuple[TraceStep, ...] = episode.info["trace"]
        made = list(retrace(self.base.state, steps))
        measured = [n for n in range(1, len(made) + 1) if n % EPISODES.measure_every == 0 or n == len(made)]
        parts = [self.latency(made[n - 1][2].graph) for n in measured]
        costs = self.base.cost * np.interp(range(1, len(made) + 1), [0, *measured], [1.0, *parts])
        path = None
        for number, ((before, match, state), cost) in enumerate(zip(made, costs.tolist()), 1):
            path = extend(path, match, before.edit(match), cost)
            if number in measured and self.known[state.fingerprint] < UNRUNNABLE:
                self.nodes[state.fingerprint] = SearchNode(state, path, cost)
