"""Workers play episodes and compute gradients, in this process or in others.

An order contains everything that its episodes depend on (parameters and seed). So it gives the same episodes whatever
came before, and a run with the same seed and number of workers is repeatable. Observations are large, so a worker keeps
those of its episodes and sends gradients. The size of its messages does not depend on the graphs.
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
    """A worker failed or ended. The message has its error or exit code; a note has its traceback."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """The problems of training, the problems of evaluation, and the function that observes a situation."""

    problems: Sequence[Problem]
    held_out: Sequence[Problem]
    observe: Callable[[Situation], Observation]


class Objective(Enum):
    """The graph of an episode whose cost training minimises.

    FINAL: the last graph. The reward of a step is that of the environment. BEST: the cheapest graph of the episode, as
    a search returns it. The reward of a step is its improvement over the best so far; a loss has reward 0.
    """

    FINAL = "final"
    BEST = "best"


# Makes the task in the worker's process. It is pickled and sent there, so it is a module's function or an object.
# Observations must use the numbers of the vocabulary.
MakeTask = Callable[[Vocabulary], Task]


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """The arguments of a worker: the task, the configurations, and the number of environments in one batch."""

    make: MakeTask
    vocabulary: Vocabulary
    agent: AgentConfig
    env: EnvConfig
    ppo: PPOConfig
    objective: Objective = Objective.BEST
    environments: int = 16


@dataclass(frozen=True, slots=True, eq=False)
class Collect:
    """Play episodes of at least `steps` steps in total, with sampled actions."""

    parameters: Parameters
    seed: int
    steps: int


@dataclass(frozen=True, slots=True, eq=False)
class Evaluate:
    """Play one episode of every `every`-th problem from number `first` on, with the likeliest actions.

    The problems are the held-out ones, or those of training if none are held out.
    """

    parameters: Parameters
    first: int = 0
    every: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Differentiate:
    """Differentiate the loss on steps [S] of the last Collect, numbered through its episodes, with advantages [S]."""

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
    """The result of an episode: modelled seconds at its start, the least on its way, and at its end."""

    problem: str
    initial: float
    best: float
    final: float
    steps: int

    @property
    def gain(self) -> float:
        """The modelled seconds of the first graph divided by those of the best."""
        return self.initial / self.best if self.best > 0 else 1.0

    @staticmethod
    def of(info: Mapping[str, Any], steps: int) -> Outcome:
        return Outcome(info["problem"], info["initial"], info["best"], info["cost"], steps)


Episodes = list[Episode[Observation]]


class Worker(Protocol):
    """Carries out one order at a time: call `begin`, then ask for the result. These methods raise WorkerError."""

    def begin(self, order: Order) -> None: ...

    def episodes(self) -> Episodes:
        """The result of a Collect, without observations. `info["outcome"]` of each episode is its Outcome."""
        ...

    def outcomes(self) -> list[Outcome]:
        """The result of an Evaluate."""
        ...

    def slope(self) -> Slope:
        """The result of a Differentiate."""
        ...

    def close(self) -> None: ...


class _Episodes:
    """An environment that draws a problem for each episode and only then makes it."""

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
    """Carries out orders, in any process."""

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
        self.rollout = None  # frees the old one first, because it may be large
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
    """Play one episode of each problem with the likeliest actions, all in one batch."""
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
    """The agent's parameters in one vector, for orders."""
    found: Parameters = parameters_to_vector(agent.parameters()).detach().numpy()
    return found


class _Answers:
    """The results of a worker by kind of order."""

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
    """Works in this process, when the result is asked for."""

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
    """An error in a worker's process."""

    error: str
    traceback: str


class ProcessWorker(_Answers):
    """Works in a process of its own, on one thread. That process ends whenever this one ends."""

    def __init__(self, setup: Setup, name: str = "worker") -> None:
        # Threads of torch and of runtimes do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._name = name
        self._process = context.Process(target=_serve, args=(theirs, setup), name=name, daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, order: Order) -> None:
        try:
            self._connection.send(order)
        except OSError:  # the process is dead; its last message says why
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
        """Receive the next message. Raises WorkerError if the worker failed or ended."""
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
    """Run a worker's process: carry out orders until the other end closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that gives the orders handles Ctrl-C
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
    """Start this number of worker processes; 0 gives one worker in this process."""
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
