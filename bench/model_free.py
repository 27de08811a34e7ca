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

import torch

sys.path.insert(0, str(File(__file__).resolve().parent.parent))  # the checkout

from bench.agents import learn
from xrlflow.cost import AdditiveCost
from xrlflow.learn.ppo import Episode
from xrlflow.learn.threads import one_thread
from xrlflow.pipeline.context import Context
from xrlflow.pipeline.explore import Explored
from xrlflow.pipeline.prepare import Start
from xrlflow.rl.agent import Agent
from xrlflow.rl.env import EnvConfig, Problem, Reward, RewriteEnv
from xrlflow.rl.features import Featuriser, Pricing
from xrlflow.rl.latency import PairedLatency
from xrlflow.rl.pretrained import PRETRAINED
from xrlflow.search import SearchNode, SearchResult, TraceStep, extend
from xrlflow.search.result import retrace

# The part of the time limit after which training must be over, steps of an update, and seconds of a measurement.
TRAIN_UNTIL, STEPS, SECONDS = 0.7, 64, 0.5
# Graphs that are compared afterwards.
SHORTLIST = 10
EPISODES = EnvConfig(Reward.END_TO_END, horizon=30)


@contextmanager
def instead_of_search() -> Iterator[None]:
    """In this context, `optimize` explores by PPO with measured rewards."""
    with mock.patch("xrlflow.pipeline.attempts.explore", explore):
        yield


def explore(context: Context, start: Start) -> Explored:
    """Train the shipped agent by measured rewards. The graphs that were measured to be fastest are proposed; their
    costs are those of the start times the measured part."""
    assert context.feeds is not None
    assert isinstance(start.model, AdditiveCost)
    base = start.base
    assert base.state.delta is not None
    begin = time.monotonic()
    agent = Agent.load(PRETRAINED).extended(context.library)
    latency = PairedLatency(context.imported, context.original, context.feeds, context.threads, SECONDS)
    state = replace(base.state, delta=Pricing.of(base.state.delta))
    problem = Problem(context.imported.name, state, base.cost, latency)
    environment = RewriteEnv([problem], Featuriser(agent.vocabulary, start.model), EPISODES)
    found = Measured(base, latency)
    torch.manual_seed(context.options.seed)
    budget = context.clock.budget
    seconds = budget.begin + TRAIN_UNTIL * budget.limit - begin
    with context.clock.phase("search"), one_thread():
        row = learn(agent.train(), [environment], STEPS, context.options.seed, seconds, found.note)
    context.notes.append(f"PPO took {row['steps']} steps and measured {len(found.nodes)} graphs")
    context.clock.again()
    fastest = sorted(found.nodes.values(), key=lambda node: node.cost)[:SHORTLIST]
    best = min([base, *fastest], key=lambda node: node.cost)
    result = SearchResult(best, tuple(fastest), row["steps"], row["steps"], row["seconds"], False)
    return Explored(result, tuple(f for f in fastest if context.fits(f)), in_time=True)


class Measured:
    """The graphs of episodes that were measured, by fingerprint."""

    def __init__(self, base: SearchNode, latency: PairedLatency) -> None:
        self.base, self.latency = base, latency
        self.nodes: dict[int, SearchNode] = {}

    def note(self, episode: Episode[Any]) -> None:
        """Keep those of an episode: every few steps, and the last."""
        steps: tuple[TraceStep, ...] = episode.info["trace"]
        path = None
        for number, (_, match, state) in enumerate(retrace(self.base.state, steps), 1):
            measured = number % EPISODES.measure_every == 0 or number == len(steps)
            cost = self.latency(state.graph) * self.base.cost if measured else self.base.cost
            path = extend(path, match, cost)
            if measured and state.fingerprint != self.base.state.fingerprint:
                self.nodes[state.fingerprint] = SearchNode(state, path, cost)
