"""Workers: in this process and in others they do the same; what goes wrong in one is said, and nothing waits for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import psutil
import pytest
import torch

from tests.rl.training import CONFIG, WORDS, Valleys, broken, loss
from xrlflow.learn.ppo import Episode, Rollout, losses
from xrlflow.rl.agent import Agent
from xrlflow.rl.features import Observation
from xrlflow.rl.train import Trainer
from xrlflow.rl.workers import (
    Collect,
    Differentiate,
    Episodes,
    Evaluate,
    Objective,
    Outcome,
    Parameters,
    PlayingWorker,
    Setup,
    _player,
    parameters_of,
)
from xrlflow.workers import InProcess, Processes, ProcessWorker, WorkerError, WorkerLost
from xrlflow.workers.local import DirectWorker

pytestmark = pytest.mark.learns

torch.set_num_threads(1)

SETUP = Setup(Valleys(), WORDS, CONFIG.agent, CONFIG.env, CONFIG.ppo, environments=3)


def here(setup: Setup = SETUP) -> PlayingWorker:
    return PlayingWorker(setup, InProcess())


def in_a_process(setup: Setup = SETUP, name: str = "worker") -> ProcessWorker:
    return Processes().worker(partial(_player, setup), name)


def an_agent() -> Agent:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Agent(WORDS, CONFIG.agent)


PARAMETERS: Parameters = parameters_of(an_agent())


@pytest.fixture(scope="module")
def other() -> Iterator[PlayingWorker]:
    worker = PlayingWorker(SETUP, Processes())
    yield worker
    worker.close()


def told(episodes: Episodes) -> list[tuple[object, ...]]:
    return [(e.actions, e.log_probs, e.values, e.rewards, e.bootstrap, e.truncated, e.info) for e in episodes]


def test_another_process_does_the_same(other: PlayingWorker) -> None:
    direct = here()
    orders = [Collect(PARAMETERS, seed, 20) for seed in (5, 6, 5)]
    played = []
    for order in orders:
        for worker in (direct, other):
            worker.begin(order)
        mine, theirs = told(direct.episodes()), told(other.episodes())
        assert mine == theirs
        played.append(mine)
    assert played[0] == played[2], "an order depends on nothing but itself"
    assert played[0] != played[1]
    assert sum(len(actions) for actions, *_ in played[0]) >= 20
    assert all(e.observations == [] for e in here_episodes(direct)), "observations stay where they are"

    for worker in (direct, other):
        worker.begin(Evaluate(PARAMETERS))
    outcomes = direct.outcomes()
    assert outcomes == other.outcomes()
    assert [o.problem for o in outcomes] == ["valley 320"]

    steps, advantages = np.array([3, 0, 7]), np.array([1.0, -1.0, 0.5], np.float32)
    for worker in (direct, other):
        worker.begin(Collect(PARAMETERS, 1, 20))
        worker.episodes()
        worker.begin(Differentiate(PARAMETERS, steps, advantages))
    mine_, theirs_ = direct.slope(), other.slope()
    np.testing.assert_allclose(mine_.gradient, theirs_.gradient, rtol=1e-5, atol=1e-7)
    assert mine_.figures == pytest.approx(theirs_.figures)


def here_episodes(worker: PlayingWorker) -> Episodes:
    worker.begin(Collect(PARAMETERS, 0, 5))
    return worker.episodes()


def test_what_is_worth_something_depends_on_the_objective() -> None:
    """To the final graph the steps add up to its gain, to the best one to that of the best on the way."""
    for objective in Objective:
        worker = here(replace(SETUP, make=loss, objective=objective))
        worker.begin(Collect(PARAMETERS, 2, 60))
        worse = 0
        for episode in worker.episodes():
            outcome: Outcome = episode.info["outcome"]
            worse += outcome.final > outcome.best
            aim = outcome.final if objective is Objective.FINAL else outcome.best
            assert episode.total == pytest.approx(100 * (outcome.initial - aim) / outcome.initial, abs=1e-9)
            if objective is Objective.BEST:
                assert min(episode.rewards) >= 0
        assert worse, "no episode ends in a graph that is not its best"


def test_workers_share_the_problems_of_an_evaluation() -> None:
    worker = here(replace(SETUP, make=Valleys(held_out=())))
    result = []
    for first in range(2):
        worker.begin(Evaluate(PARAMETERS, first, 2))
        result.append([o.problem for o in worker.outcomes()])
    assert result == [["valley 256"], ["valley 384"]]


def test_shared_gradients_are_those_of_all_steps_together() -> None:
    """What three workers say together is what one would that has all their observations."""
    workers = [here() for _ in range(3)]
    agent = an_agent()
    trainer = Trainer(agent, workers, CONFIG)
    observations: list[Observation] = []
    episodes: list[Episode[Observation]] = trainer._collect()
    for worker in workers:
        assert isinstance(worker.worker, DirectWorker)
        kept = worker.worker.handler.rollout  # type: ignore[attr-defined]
        observations += kept.observations
    whole = replace(Rollout.of(episodes, CONFIG.ppo), observations=observations)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    steps, advantages = order[:16], whole.advantages[order[:16]]
    figures = trainer._differentiate(steps, advantages)
    shared = [p.grad.clone() for p in agent.parameters() if p.grad is not None]
    agent.zero_grad()
    terms = losses(agent, whole.part(steps, advantages), CONFIG.ppo)
    terms["loss"].backward()  # type: ignore[no-untyped-call]
    assert figures == pytest.approx({name: float(t.detach()) for name, t in terms.items()}, abs=1e-6)
    alone = [torch.zeros_like(p) if p.grad is None else p.grad for p in agent.parameters()]
    for one, other_ in zip(shared, alone, strict=True):
        torch.testing.assert_close(one, other_, rtol=1e-4, atol=1e-6)
    assert any(float(g.abs().max()) > 0 for g in shared)


def test_a_worker_that_fails_says_why() -> None:
    worker = in_a_process(replace(SETUP, make=broken), "worker 7")
    try:
        worker.begin(Collect(PARAMETERS, 0, 5))  # it has not failed yet
        with pytest.raises(
            WorkerError, match="worker 7 failed: ValueError: there are no such files"
        ) as failed:
            worker.reply()
        assert "in broken" in failed.value.__notes__[0]
    finally:
        worker.close()


def test_a_worker_that_is_killed_is_missed_at_once() -> None:
    worker = in_a_process(SETUP, "worker 3")
    worker.begin(Evaluate(PARAMETERS))
    worker.reply()
    worker.begin(Collect(PARAMETERS, 0, 10**6))
    os.kill(worker.process.pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(WorkerLost, match="worker 3 ended by SIGKILL"):
        worker.reply()
    with pytest.raises(WorkerLost, match="worker 3 ended by SIGKILL"):
        worker.begin(Evaluate(PARAMETERS))
    assert time.monotonic() - begin < 60
    worker.close()


def test_closing_ends_a_worker_in_the_middle_of_its_work() -> None:
    worker = in_a_process()
    worker.begin(Collect(PARAMETERS, 0, 10**6))
    worker.close()
    assert not psutil.pid_exists(worker.process.pid)
