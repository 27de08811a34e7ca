"""Workers that play episodes and compute gradients, in this process, in other processes, or on a cluster.

A request contains everything on which its episodes depend (parameters and seed). So it gives the same episodes
whatever came before, and a run with the same seed and number of workers is repeatable on any machines. Observations
are large, so a worker holds the observations of its episodes and sends only gradients. The size of its messages does
not depend on the graphs. A worker that is lost is replaced, and the new worker repeats the last episodes.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

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
from xrlflow.workers import InProcess, Processes, Worker, WorkerError, WorkerFactory, WorkerLost
from xrlflow.workers.pool import ATTEMPTS

Parameters = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """The problems of training, the problems of evaluation, and the function that observes a situation."""

    problems: Sequence[Problem]
    held_out: Sequence[Problem]
    observe: Callable[[Situation], Observation]


class Objective(Enum):
    """The choice of the graph, among those of an episode, whose cost training minimises."""

    FINAL = "final"  # the last graph; the reward of a step is that of the environment
    BEST = "best"
    """The cheapest graph of the episode, as a search returns it. The reward of a step is its improvement over the best
    graph so far; a step that loses has reward 0.
    """


# Creates the task in the worker's process. The function is pickled and sent to that process, so it is a function of a
# module, or an object with `__call__`. Observations must use the numbers of the vocabulary.
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
    """Differentiate the loss on the steps `steps` [S] of the last Collect, which are numbered through all its
    episodes, with the advantages [S].
    """

    parameters: Parameters
    steps: npt.NDArray[np.int64]
    advantages: npt.NDArray[np.float32]


Request = Collect | Evaluate | Differentiate


@dataclass(frozen=True, slots=True, eq=False)
class Slope:
    """The gradient of the mean loss with respect to the parameters, and the figures of `ppo.losses`."""

    gradient: Parameters
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an episode."""

    problem: str
    initial: float  # modelled seconds of its first graph
    best: float  # modelled seconds of its graph of least cost
    final: float  # modelled seconds of its last graph
    steps: int

    @property
    def gain(self) -> float:
        """The modelled seconds of the first graph divided by those of the best graph."""
        return self.initial / self.best if self.best > 0 else 1.0

    @staticmethod
    def of(info: Mapping[str, Any], steps: int) -> Outcome:
        return Outcome(info["problem"], info["initial"], info["best"], info["cost"], steps)


Episodes = list[Episode[Observation]]


class _Episodes:
    """An environment that draws a problem for each episode and builds only this problem."""

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


class Player:
    """Plays the episodes and computes the gradients that requests specify, in any process."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.task = setup.make(setup.vocabulary)
        self.agent = Agent(setup.vocabulary, setup.agent)
        self.environments = [
            _Episodes(self.task, setup.env, setup.objective) for _ in range(setup.environments)
        ]
        self.rollout: Rollout[Observation] | None = None

    def do(self, request: Request) -> Episodes | list[Outcome] | Slope:
        vector_to_parameters(torch.from_numpy(request.parameters.copy()), self.agent.parameters())
        if isinstance(request, Collect):
            return self.collect(request)
        return self.evaluate(request) if isinstance(request, Evaluate) else self.differentiate(request)

    def collect(self, request: Collect) -> Episodes:
        self.rollout = None  # frees the old rollout first, because it may be large
        generator = torch.Generator().manual_seed(request.seed)
        episodes = collect(self.agent, self.environments, request.steps, generator)
        self.rollout = Rollout.of(episodes, self.setup.ppo)
        for episode in episodes:
            episode.observations = []
            episode.info = {"outcome": Outcome.of(episode.info, len(episode))}
        return episodes

    def differentiate(self, request: Differentiate) -> Slope:
        assert self.rollout is not None, "nothing was collected"
        steps = self.rollout.part(torch.from_numpy(request.steps), torch.from_numpy(request.advantages))
        self.agent.zero_grad()
        terms = losses(self.agent, steps, self.setup.ppo)
        terms["loss"].backward()  # type: ignore[no-untyped-call]
        gradients = [
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self.agent.parameters()
        ]
        return Slope(torch.cat(gradients).numpy(), {name: float(t.detach()) for name, t in terms.items()})

    def evaluate(self, request: Evaluate) -> list[Outcome]:
        problems = (self.task.held_out or self.task.problems)[request.first :: request.every]
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
    """The agent's parameters in one vector, for requests."""
    vector: Parameters = parameters_to_vector(agent.parameters()).detach().numpy()
    return vector


def _player(setup: Setup) -> Player:
    """The handler of a worker's process. It uses one thread, because there are as many workers as cores."""
    torch.set_num_threads(1)
    return Player(setup)


class PlayingWorker:
    """A worker that plays episodes. If it is lost, another worker replaces it and repeats its last request."""

    def __init__(self, setup: Setup, factory: WorkerFactory, name: str = "worker") -> None:
        self.name = name
        self._factory = factory
        self._make = functools.partial(Player if isinstance(factory, InProcess) else _player, setup)
        self._request: Request | None = None
        self._collected: Collect | None = None
        self.worker: Worker = factory.worker(self._make, name)

    def begin(self, request: Request) -> None:
        """Send a request to the worker. Raises WorkerError if the worker is lost again and again."""
        self._request = request
        try:
            self.worker.begin(request)
        except WorkerLost as lost:
            self._replace(lost)

    def episodes(self) -> Episodes:
        """The result of a Collect, without observations. `info["outcome"]` of each episode is its Outcome."""
        episodes: Episodes = self._reply()
        return episodes

    def outcomes(self) -> list[Outcome]:
        """The result of an Evaluate."""
        outcomes: list[Outcome] = self._reply()
        return outcomes

    def slope(self) -> Slope:
        """The result of a Differentiate."""
        slope = self._reply()
        assert isinstance(slope, Slope), "no Differentiate was begun"
        return slope

    def close(self) -> None:
        self.worker.close()

    def _reply(self) -> Any:
        """The reply to the last request. Raises WorkerError if the worker failed, or is lost again and again."""
        for _ in range(ATTEMPTS):
            try:
                reply = self.worker.reply()
            except WorkerLost as lost:
                self._replace(lost)
                continue
            if isinstance(self._request, Collect):
                self._collected = self._request
            self._request = None
            return reply
        raise WorkerError(f"{self.name} was lost {ATTEMPTS} times over one task")

    def _replace(self, lost: WorkerLost) -> None:
        """Start another worker, and repeat the last request. For a gradient, the new worker first plays the episodes
        again.
        """
        for _ in range(ATTEMPTS):
            self.worker.close()
            self.worker = self._factory.worker(self._make, self.name)
            try:
                if isinstance(self._request, Differentiate) and self._collected is not None:
                    self.worker.begin(self._collected)
                    self.worker.reply()
                self.worker.begin(self._request)
            except WorkerLost as again:
                lost = again
            else:
                return
        raise WorkerError(f"{lost} ({ATTEMPTS} more were lost after it)") from lost


def make_workers(setup: Setup, workers: int, factory: WorkerFactory | None = None) -> list[PlayingWorker]:
    """Start this number of workers; 0 gives one worker in this process. `factory`: starts the workers, by default as
    processes of this machine.
    """
    where = InProcess() if workers == 0 else factory if factory is not None else Processes()
    started: list[PlayingWorker] = []
    try:
        for number in range(max(1, workers)):
            started.append(PlayingWorker(setup, where, f"worker {number}"))
    except BaseException:
        for worker in started:
            worker.close()
        raise
    return started
