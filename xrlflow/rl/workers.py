"""Workers that play episodes and differentiate: in this process, in others, and some day on other machines.

A worker is told what to do by an order that has all it depends on (parameters and seed), so that an order gives the
same episodes whatever came before it, and a run of fixed seed and number of workers is the same each time. The
observations of its episodes stay with the worker, which gives gradients on them: they are large, and what is sent
does not grow with the graphs.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from xrlflow.learn.ppo import Episode, PPOConfig, Rollout, collect, losses
from xrlflow.rl.agent import Agent
from xrlflow.rl.env import EnvConfig, Problem, RewriteEnv
from xrlflow.rl.features import Observation, Vocabulary
from xrlflow.rl.parameters import AgentConfig
from xrlflow.rl.situation import Situation

Parameters = npt.NDArray[np.float32]


class WorkerError(RuntimeError):
    """A worker failed or ended; the message has its error or exit code, a note its traceback."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What an agent is trained on, what it is evaluated on, and how it sees a situation."""

    problems: Sequence[Problem]
    held_out: Sequence[Problem]
    observe: Callable[[Situation], Observation]


class Objective(Enum):
    """What an episode is to make cheap.

    FINAL: the graph at its end; a step is worth what the environment says. BEST: the cheapest graph on its way, which
    is what a search returns; a step is worth what it improves on the best so far, and a loss costs nothing but time.
    """

    FINAL = "final"
    BEST = "best"


# Makes the task in the worker's own process, hence is pickled on its way there: a function of a module, or an object.
# Observations must have the numbers of this vocabulary.
MakeTask = Callable[[Vocabulary], Task]


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """What a worker is made of: the task, the agent's form, and how many environments it steps together."""

    make: MakeTask
    vocabulary: Vocabulary
    agent: AgentConfig
    env: EnvConfig
    ppo: PPOConfig
    objective: Objective = Objective.BEST
    environments: int = 16


@dataclass(frozen=True, slots=True, eq=False)
class Collect:
    """Play episodes of at least so many steps, sampling actions."""

    parameters: Parameters
    seed: int
    steps: int


@dataclass(frozen=True, slots=True, eq=False)
class Evaluate:
    """Play one episode of each `every`-th problem from `first` on, taking the likeliest actions.

    The held-out problems, or those of the training where none are held out.
    """

    parameters: Parameters
    first: int = 0
    every: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Differentiate:
    """The loss on some steps [S] of the last Collect, numbered as its episodes have them, with these advantages."""

    parameters: Parameters
    steps: npt.NDArray[np.int64]
    advantages: npt.NDArray[np.float32]


Order = Collect | Evaluate | Differentiate


@dataclass(frozen=True, slots=True, eq=False)
class Slope:
    """The gradient of the mean loss with respect to the parameters, and the figures of `ppo.losses`."""

    gradient: Parameters
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode went: modelled seconds at its begin, the least on its way, and at its end."""

    problem: str
    initial: float
    best: float
    final: float
    steps: int

    @property
    def gain(self) -> float:
        """How many times cheaper the best graph is than the first."""
        return self.initial / self.best if self.best > 0 else 1.0

    @staticmethod
    def of(info: Mapping[str, Any], steps: int) -> Outcome:
        return Outcome(info["problem"], info["initial"], info["best"], info["cost"], steps)


Episodes = list[Episode[Observation]]


class Worker(Protocol):
    """Carries out one order at a time: `begin` it, then ask for its result. All raise WorkerError."""

    def begin(self, order: Order) -> None: ...

    def episodes(self) -> Episodes:
        """The result of a Collect, without observations; each episode's information is its Outcome, as "outcome"."""
        ...

    def outcomes(self) -> list[Outcome]:
        """The result of an Evaluate."""
        ...

    def slope(self) -> Slope:
        """The result of a Differentiate."""
        ...

    def close(self) -> None: ...


class _Episodes:
    """An environment that draws one of many problems for each episode; they are not made before that."""

    def __init__(self, task: Task, config: EnvConfig, objective: Objective) -> None:
        self.task = task
        self.config = config
        self.objective = objective
        self._best = 0.0

    def reset(self, *, seed: int | None = None) -> tuple[Observation, dict[str, Any]]:
        problems = self.task.problems
        problem = problems[random.Random(seed).randrange(len(problems))]
        self._env = RewriteEnv([problem], self.task.observe, self.config)
        observation, info = self._env.reset(seed=seed)
        self._best = info["best"]
        return observation, info

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._env.step(action)
        if self.objective is Objective.BEST:
            reward = 100.0 * (self._best - info["best"]) / info["initial"] if info["initial"] > 0 else 0.0
            self._best = info["best"]
        return observation, reward, terminated, truncated, info


class _Hand:
    """What every worker does, in whatever process."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.task = setup.make(setup.vocabulary)
        self.agent = Agent(setup.vocabulary, setup.agent)
        self.environments = [
            _Episodes(self.task, setup.env, setup.objective) for _ in range(setup.environments)
        ]
        self.rollout: Rollout[Observation] | None = None

    def do(self, order: Order) -> Episodes | list[Outcome] | Slope:
        vector_to_parameters(torch.from_numpy(order.parameters.copy()), self.agent.parameters())
        if isinstance(order, Collect):
            return self.collect(order)
        return self.evaluate(order) if isinstance(order, Evaluate) else self.differentiate(order)

    def collect(self, order: Collect) -> Episodes:
        self.rollout = None  # before there is another: it may be large
        generator = torch.Generator().manual_seed(order.seed)
        episodes = collect(self.agent, self.environments, order.steps, generator)
        self.rollout = Rollout.of(episodes, self.setup.ppo)
        for episode in episodes:
            episode.observations = []
            episode.info = {"outcome": Outcome.of(episode.info, len(episode))}
        return episodes

    def differentiate(self, order: Differentiate) -> Slope:
        assert self.rollout is not None, "nothing was collected"
        steps = self.rollout.part(torch.from_numpy(order.steps), torch.from_numpy(order.advantages))
        self.agent.zero_grad()
        terms = losses(self.agent, steps, self.setup.ppo)
        terms["loss"].backward()  # type: ignore[no-untyped-call]
        gradients = [
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self.agent.parameters()
        ]
        return Slope(torch.cat(gradients).numpy(), {name: float(t.detach()) for name, t in terms.items()})

    def evaluate(self, order: Evaluate) -> list[Outcome]:
        problems = (self.task.held_out or self.task.problems)[order.first :: order.every]
        return play(self.agent, problems, self.task.observe, self.setup.env)


def play(
    agent: Agent, problems: Sequence[Problem], observe: Callable[[Situation], Observation], config: EnvConfig
) -> list[Outcome]:
    """One episode of each problem, taking the likeliest actions, all in one batch."""
    outcomes: dict[str, Outcome] = {}
    running = {}
    for problem in problems:
        env = RewriteEnv([problem], observe, config)
        running[problem.name] = (env, env.reset(seed=0)[0], 0)
    while running:
        names = list(running)
        with torch.no_grad():
            distribution, _ = agent.evaluate([running[name][1] for name in names])
        for name, action in zip(names, distribution.mode().tolist()):
            env, _, steps = running[name]
            observation, _, terminated, truncated, info = env.step(action)
            running[name] = (env, observation, steps + 1)
            if terminated or truncated:
                outcomes[name] = Outcome.of(info, steps + 1)
                del running[name]
    return [outcomes[p.name] for p in problems]


def parameters_of(agent: Agent) -> Parameters:
    """The agent's parameters in one vector, as orders carry them."""
    found: Parameters = parameters_to_vector(agent.parameters()).detach().numpy()
    return found


class _Answers:
    """What a worker answers, by the kind of order."""

    def answer(self) -> Any:
        raise NotImplementedError

    def episodes(self) -> Episodes:
        found: Episodes = self.answer()
        return found

    def outcomes(self) -> list[Outcome]:
        found: list[Outcome] = self.answer()
        return found

    def slope(self) -> Slope:
        found = self.answer()
        assert isinstance(found, Slope), "no Differentiate was begun"
        return found


class LocalWorker(_Answers):
    """Works in this process, when it is asked for the result."""

    def __init__(self, setup: Setup) -> None:
        self._hand = _Hand(setup)
        self._order: Order | None = None

    def begin(self, order: Order) -> None:
        self._order = order

    def answer(self) -> Any:
        order, self._order = self._order, None
        assert order is not None, "no order was begun"
        return self._hand.do(order)

    def close(self) -> None:
        self._order = None


@dataclass(frozen=True, slots=True)
class _Failure:
    """What went wrong in a worker's process."""

    error: str
    traceback: str


class ProcessWorker(_Answers):
    """Works in a process of its own, with one thread. It ends when this process does, however that ends."""

    def __init__(self, setup: Setup, name: str = "worker") -> None:
        # Not forked: threads of torch and of runtimes do not survive that.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._name = name
        self._process = context.Process(target=_serve, args=(theirs, setup), name=name, daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, order: Order) -> None:
        try:
            self._connection.send(order)
        except OSError:  # it is dead; why is in what it sent before
            self.answer()
            raise WorkerError(f"{self._name} takes no orders") from None

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def answer(self) -> Any:
        """What the worker sends next. Raises WorkerError if it failed, or ended without a word."""
        wait([self._connection, self._process.sentinel])
        try:
            if not self._connection.poll():
                raise EOFError
            found = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5.0)
            raise WorkerError(f"{self._name} ended with exit code {self._process.exitcode}") from None
        if isinstance(found, _Failure):
            failed = WorkerError(f"{self._name} failed: {found.error}")
            if sys.version_info >= (3, 11):
                failed.add_note(found.traceback)
            raise failed
        return found


def _serve(connection: Connection[Any, Any], setup: Setup) -> None:
    """A worker's process: carry out orders until the other end of the connection is gone."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is the business of the process that gives the orders
    torch.set_num_threads(1)
    try:
        hand = _Hand(setup)
        while True:
            try:
                order = connection.recv()
            except EOFError:
                return
            connection.send(hand.do(order))
    except BrokenPipeError:
        return
    except Exception as error:
        connection.send(_Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))


def make_workers(setup: Setup, processes: int) -> list[Worker]:
    """So many processes; with 0, one worker in this process."""
    if processes == 0:
        return [LocalWorker(setup)]
    workers: list[Worker] = []
    try:
        for number in range(processes):
            workers.append(ProcessWorker(setup, f"worker {number}"))
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    return workers
