"""Training: workers play episodes, the agent learns from them and is evaluated, and files store the state of the
training run.

An iteration depends only on its number, the parameters, and the states of the optimizer and the generator. Workers get
a seed derived from the number and play whole episodes. So a run that is killed and resumed gives the same agent as a
run without interruption.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from xrlflow.cost import AdditiveCost, NoTimeLeft
from xrlflow.learn.log import Logs
from xrlflow.learn.ppo import PPOConfig, Rollout, Stats, TrainingError, update
from xrlflow.learn.states import adam_state, check_weights, number, under
from xrlflow.learn.tensors import to_arrays, to_tensors
from xrlflow.learn.threads import permitted_threads
from xrlflow.onnxio import load
from xrlflow.rewrite import AnyRule, Library
from xrlflow.rl.agent import Agent
from xrlflow.rl.env import EnvConfig, Problem, Reward
from xrlflow.rl.features import Featuriser, Vocabulary
from xrlflow.rl.parameters import AgentConfig
from xrlflow.rl.workers import (
    Collect,
    Differentiate,
    Episodes,
    Evaluate,
    MakeTask,
    Objective,
    Outcome,
    PlayingWorker,
    Setup,
    Task,
    make_workers,
    parameters_of,
)
from xrlflow.search import simplify
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from xrlflow.workers import WorkerFactory

if TYPE_CHECKING:
    from typing_extensions import Self

KIND = "training"


def _ppo() -> PPOConfig:
    # An episode that halves the cost returns 50. The scale turns such returns into about 1, and gains of 1% into 0.05.
    # The learning rate is twice the paper's, because minibatches are four times as large and the network is smaller.
    return PPOConfig(learning_rate=1e-3, epochs=3, minibatch=64, reward_scale=0.05)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The options of a training run. A resumed run may only change `iterations` and `evaluate_every`."""

    iterations: int = 200
    # Environment steps of an iteration, summed over all workers. Unfinished episodes are played to their end.
    steps: int = 2048
    # How many processes play episodes; 0: this process plays them.
    workers: int = 2
    # How many episodes each worker plays in one batch.
    environments: int = 16
    seed: int = 0
    evaluate_every: int = 10
    # With FINAL, agents soon learn to stop when every step is a loss, and so they cross fewer valleys.
    objective: Objective = Objective.BEST
    ppo: PPOConfig = field(default_factory=_ppo)
    env: EnvConfig = field(default_factory=EnvConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)

    def __post_init__(self) -> None:
        for name in ("iterations", "steps", "environments", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainConfig.{name} must be at least 1")
        if self.workers < 0 or self.seed < 0:
            raise ValueError("TrainConfig.workers and seed must not be negative")
        if self.objective is Objective.BEST and self.env.reward is not Reward.MODELLED:
            raise ValueError("TrainConfig.objective can be the best only by the modelled reward")

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["env"]["reward"] = self.env.reward.value
        values["objective"] = self.objective.value
        return values


@dataclass(frozen=True, slots=True)
class Score:
    """An evaluation: the outcome of each problem, and the geometric mean of their gains (1: nothing gained)."""

    outcomes: tuple[Outcome, ...]

    @property
    def gain(self) -> float:
        logs = [math.log(o.gain) for o in self.outcomes]
        return math.exp(math.fsum(logs) / len(logs)) if logs else 1.0

    @property
    def figures(self) -> dict[str, float]:
        """Figures for a log: the gain, and the fraction of the modelled seconds that is saved, averaged over the
        problems.
        """
        saved = math.fsum(1 - 1 / o.gain for o in self.outcomes) / max(len(self.outcomes), 1)
        return {"evaluation/gain": self.gain, "evaluation/saved": saved}


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The result of a training run: the agent with the best evaluation, this evaluation, and the progress made."""

    agent: Agent
    score: Score
    iterations: int
    steps: int
    seconds: float
    interrupted: bool


class Trainer:
    """Improves an agent, iteration by iteration. As a context manager, it closes its workers."""

    def __init__(self, agent: Agent, workers: Sequence[PlayingWorker], config: TrainConfig) -> None:
        self.agent = agent
        self.workers = workers
        self.config = config
        self.optimizer = config.ppo.optimizer(agent)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.iteration = 0
        self.steps = 0
        self.seconds = 0.0
        # The end of each worker's steps in the rollout.
        self._ends: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.close()

    def iterate(self) -> dict[str, float]:
        """Collect episodes and learn from them. Returns the scalars of this iteration.

        Raises TrainingError if a loss is not finite, WorkerError if a worker fails.
        """
        config, begin = self.config, time.perf_counter()
        episodes = self._collect()
        collected = time.perf_counter()
        rollout = Rollout.of(episodes, config.ppo)  # the observations stay in the workers
        progress = self.iteration / config.iterations
        stats = update(
            self.agent, self.optimizer, rollout, config.ppo, self.generator, progress, self._differentiate
        )
        end = time.perf_counter()
        self.iteration += 1
        self.steps += len(rollout)
        self.seconds += end - begin
        return _scalars(episodes, stats, len(rollout), collected - begin, end - collected)

    def _collect(self) -> Episodes:
        parameters, count = parameters_of(self.agent), len(self.workers)
        for index, worker in enumerate(self.workers):
            key = (self.config.seed, self.iteration, index)
            seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
            worker.begin(Collect(parameters, seed, math.ceil(self.config.steps / count)))
        played = [worker.episodes() for worker in self.workers]
        self._ends = np.cumsum([sum(map(len, episodes)) for episodes in played])
        return [episode for episodes in played for episode in episodes]

    def _differentiate(self, steps: torch.Tensor, advantages: torch.Tensor) -> dict[str, float]:
        """Let each worker differentiate the loss on the steps that it played, as `ppo.Differentiate` specifies."""
        parameters, numbers = parameters_of(self.agent), steps.numpy()
        owner = np.searchsorted(self._ends, numbers, side="right")
        asked = []
        for index, worker in enumerate(self.workers):
            mine = np.flatnonzero(owner == index)
            if mine.size:
                first = self._ends[index - 1] if index else 0
                worker.begin(Differentiate(parameters, numbers[mine] - first, advantages.numpy()[mine]))
                asked.append((worker, mine.size / numbers.size))
        gradient = np.zeros_like(parameters)
        figures: defaultdict[str, float] = defaultdict(float)
        for worker, share in asked:
            slope = worker.slope()
            gradient += np.float32(share) * slope.gradient
            for name, figure in slope.figures.items():
                figures[name] += share * figure
        at = 0
        for parameter in self.agent.parameters():
            parameter.grad = torch.from_numpy(gradient[at : at + parameter.numel()]).view_as(parameter)
            at += parameter.numel()
        return dict(figures)

    def evaluate(self) -> Score:
        """Play the held-out problems, or the training problems if none are held out. Each worker plays a part of
        them."""
        parameters = parameters_of(self.agent)
        for index, worker in enumerate(self.workers):
            worker.begin(Evaluate(parameters, index, len(self.workers)))
        return Score(tuple(outcome for worker in self.workers for outcome in worker.outcomes()))

    def to_checkpoint(self, best: Agent, score: Score) -> Checkpoint:
        """A checkpoint of everything that the next iteration depends on, and of the best agent so far."""
        tensors = {f"agent.{name}": t for name, t in self.agent.state_dict().items()}
        tensors |= {f"best.{name}": t for name, t in best.state_dict().items()}
        names = [name for name, _ in self.agent.named_parameters()]
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{names[index]}.{key}": t for key, t in state.items()}
        tensors["generator"] = self.generator.get_state()
        config = {
            "run": self.config.to_json(),
            "vocabulary": asdict(self.agent.vocabulary),
            "iteration": self.iteration,
            "steps": self.steps,
            "seconds": self.seconds,
            "score": [asdict(o) for o in score.outcomes],
        }
        return Checkpoint(KIND, config, to_arrays(tensors))

    def resume(self, checkpoint: Checkpoint) -> tuple[Agent, Score]:
        """Continue a run from its checkpoint. Returns the best agent so far and its score.

        Raises CheckpointError if the checkpoint is of another run, or if its parts do not fit together.
        """
        config = checkpoint.config
        mine, theirs = self.config.to_json(), config.get("run")
        if not isinstance(theirs, dict):
            raise CheckpointError("the checkpoint is damaged: it does not say which run it is of")
        differing = sorted(
            k for k in mine if k not in ("iterations", "evaluate_every") and mine[k] != theirs.get(k)
        )
        vocabulary = asdict(self.agent.vocabulary)
        if differing:
            raise CheckpointError(f"the checkpoint is of a run with another {', '.join(differing)}")
        if {k: list(v) for k, v in vocabulary.items()} != config.get("vocabulary"):
            raise CheckpointError("the checkpoint is of a run with other rules")
        try:
            tensors = to_tensors(checkpoint.tensors)
            best = Agent(self.agent.vocabulary, self.config.agent)
            for agent, prefix in ((self.agent, "agent."), (best, "best.")):
                check_weights(agent, under(tensors, prefix))
                agent.load_state_dict(under(tensors, prefix))
            state = adam_state(self.agent, under(tensors, "optimizer."))
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": state, "param_groups": groups})
            self.generator.set_state(tensors["generator"])
            score = Score(tuple(_outcome(o) for o in config["score"]))
            self.iteration, self.steps = (int(number(config, name)) for name in ("iteration", "steps"))
            self.seconds = number(config, "seconds")
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"the checkpoint's parts do not fit: {error}") from error
        return best, score


def _outcome(content: Mapping[str, Any]) -> Outcome:
    """The outcome in a saved state. Raises KeyError, TypeError or ValueError if it is invalid."""
    initial, best, final, steps = (number(content, name) for name in ("initial", "best", "final", "steps"))
    return Outcome(str(content["problem"]), initial, best, final, int(steps))


def _scalars(
    episodes: Episodes, stats: Stats, steps: int, collecting: float, updating: float
) -> dict[str, float]:
    outcomes: list[Outcome] = [e.info["outcome"] for e in episodes]
    return {
        "episode/return": float(np.mean([e.total for e in episodes])),
        "episode/length": float(np.mean([len(e) for e in episodes])),
        "episode/truncated": float(np.mean([e.truncated for e in episodes])),
        "episode/gain": Score(tuple(outcomes)).gain,
        **{f"ppo/{f.name}": float(getattr(stats, f.name)) for f in fields(stats)},
        "time/steps_per_second": steps / max(collecting + updating, 1e-9),
        "time/collecting": collecting,
        "time/updating": updating,
    }


# A function that receives the scalars of an iteration (with "evaluation/gain" if there was an evaluation) and the
# number of the iteration.
Progress = Callable[[Mapping[str, float], int], None]


def state_path(output: str | os.PathLike[str]) -> Path:
    """The path of the state of the training run that writes its agent to `output`."""
    path = Path(output)
    return path.with_name(f"{path.stem}.training{path.suffix}")


def train(
    make: MakeTask,
    vocabulary: Vocabulary,
    config: TrainConfig,
    output: str | os.PathLike[str] | None = None,
    *,
    start: Agent | None = None,
    resume: bool = True,
    deadline: float | None = None,
    log: Callable[[int], Logs] | None = None,
    about: Mapping[str, Any] | None = None,
    factory: WorkerFactory | None = None,
) -> Trained:
    """Train an agent. Writes the agent to `output` whenever its evaluation is better than all before.

    `make` creates the problems, once in each worker. Training starts from the agent `start`, or from a random one.
    After each iteration, the state of the run is saved to `state_path(output)`; with `resume`, a stopped run continues
    from it. The run ends after `config.iterations`, at `deadline` (time.monotonic) or on Ctrl-C, and returns the best
    agent so far. `log(first)` creates the logs, given the first iteration. `about` is stored in the agent's file.
    `factory` starts the workers, by default in processes of this machine; the resulting agent does not depend on the
    factory.

    Raises CheckpointError if the state is of another run or `output` cannot be written, TrainingError if a loss is not
    finite, WorkerError if a worker fails.
    """
    agent = _first_agent(vocabulary, config, start)
    interrupted = False
    with permitted_threads(), Trainer(agent, (), config) as trainer:
        run = _Run(trainer, output, about or {})
        if resume:
            run.resume()
        logs = log(trainer.iteration) if log is not None else Logs()
        setup = Setup(
            make, vocabulary, config.agent, config.env, config.ppo, config.objective, config.environments
        )
        try:
            with logs:
                trainer.workers = make_workers(setup, config.workers, factory)
                run.begin(logs)
                while trainer.iteration < config.iterations:
                    if deadline is not None and time.monotonic() >= deadline:
                        break
                    run.iterate(logs)
        except KeyboardInterrupt:  # the files hold the state of the last iteration and the best agent
            interrupted = True
        except NoTimeLeft:  # costs took too long in the last iteration: the best agent so far is the result
            pass
    return Trained(run.best, run.score, trainer.iteration, trainer.steps, trainer.seconds, interrupted)


class _Run:
    """A training run: the best agent so far, its evaluation, and the files that store both."""

    def __init__(
        self, trainer: Trainer, output: str | os.PathLike[str] | None, about: Mapping[str, Any]
    ) -> None:
        self._trainer, self._output, self._about = trainer, output, about
        self._state = state_path(output) if output is not None else None
        self.best, self.score = _copy(trainer.agent), Score(())

    def resume(self) -> None:
        """Continue from the saved state, if there is one. Raises CheckpointError if it is of another run."""
        if self._state is not None and self._state.exists():
            self.best, self.score = self._trainer.resume(load_checkpoint(self._state, KIND))

    def begin(self, logs: Logs) -> None:
        """Evaluate and save the first agent of the run, unless an earlier run did so."""
        if not self.score.outcomes:
            self.score = self._trainer.evaluate()
            logs.scalars(_evaluated(self.score), self._trainer.iteration)
            self._keep()
            self._keep_agent()

    def iterate(self, logs: Logs) -> None:
        trainer, config = self._trainer, self._trainer.config
        scalars = trainer.iterate()
        done = trainer.iteration
        if done % config.evaluate_every == 0 or done == config.iterations:
            score = trainer.evaluate()
            scalars |= _evaluated(score)
            if score.gain > self.score.gain:
                self.best, self.score = _copy(trainer.agent), score
                self._keep_agent()
        self._keep()
        logs.scalars(scalars, done)

    def _keep(self) -> None:
        if self._state is not None:
            save_checkpoint(self._trainer.to_checkpoint(self.best, self.score), self._state)

    def _keep_agent(self) -> None:
        if self._output is not None:
            self.best.save(self._output, {**self._about, **_about(self._trainer, self.score)})


def _evaluated(score: Score) -> dict[str, float]:
    return {**score.figures, **{f"evaluation/{o.problem}": o.gain for o in score.outcomes}}


def _about(trainer: Trainer, score: Score) -> dict[str, Any]:
    return {
        "run": trainer.config.to_json(),
        "iteration": trainer.iteration,
        "steps": trainer.steps,
        "seconds": round(trainer.seconds, 1),
        "evaluation": {o.problem: round(o.gain, 4) for o in score.outcomes},
    }


def _first_agent(vocabulary: Vocabulary, config: TrainConfig, start: Agent | None) -> Agent:
    if start is not None:
        if start.vocabulary != vocabulary or start.config != config.agent:
            raise CheckpointError(
                "the agent to start from has another vocabulary or another form than the run"
            )
        return _copy(start)
    return random_agent(vocabulary, config.seed, config.agent)


def random_agent(vocabulary: Vocabulary, seed: int, config: AgentConfig | None = None) -> Agent:
    """An agent with random parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Agent(vocabulary, config)


def _copy(agent: Agent) -> Agent:
    copy = Agent(agent.vocabulary, agent.config)
    copy.load_state_dict(agent.state_dict())
    return copy


def fine_tune(
    agent: Agent,
    task: Task,
    steps: int,
    *,
    seed: int = 0,
    deadline: float | None = None,
    horizon: int = 100,
    progress: Progress | None = None,
) -> Trained:
    """Train an agent on one task for at least `steps` steps, in this process, by the modelled reward.

    Returns the agent with the best evaluation on the task; it may be the original one. No iteration begins after
    `deadline` (time.monotonic), and an iteration in which a cost model raises NoTimeLeft does not count.
    """
    per_iteration = min(256, max(1, steps))
    config = TrainConfig(
        iterations=max(1, math.ceil(steps / per_iteration)), steps=per_iteration, workers=0, environments=4,
        seed=seed, evaluate_every=1, env=EnvConfig(horizon=horizon), agent=agent.config,
    )  # fmt: skip

    def log(first: int) -> Logs:
        return Logs(_Listener(progress)) if progress is not None else Logs()

    return train(_FixedTask(task), agent.vocabulary, config, start=agent, deadline=deadline, log=log)


@dataclass(frozen=True, slots=True, eq=False)
class _FixedTask:
    """A function that returns a given task: handlers of workers need a function that creates their task."""

    task: Task

    def __call__(self, vocabulary: Vocabulary) -> Task:
        return self.task


@dataclass(frozen=True, slots=True)
class _Listener:
    """A log that passes the figures to a progress function."""

    progress: Progress

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.progress(values, step)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Files:
    """Creates a task from ONNX files, with these rules and this cost model. The graphs are simplified first.

    `folder`: the folder to which relative paths refer, because workers may have another working directory.
    """

    problems: tuple[str, ...]
    held_out: tuple[str, ...]
    rules: tuple[AnyRule, ...]
    model: Callable[[], AdditiveCost]
    contrib: bool = False
    folder: str = ""

    def library(self) -> Library:
        return Library(self.rules, contrib=self.contrib)

    def __call__(self, vocabulary: Vocabulary) -> Task:
        """Create the task. Raises ModelError if a file cannot be read."""
        library, model = self.library(), self.model()
        featuriser = Featuriser(vocabulary, model)

        def problem(path: str) -> Problem:
            graph, _ = simplify(load(os.path.join(self.folder, path)).graph, library, model.cost)
            return Problem.of(path, graph, library, model, featuriser.pricing)

        return Task([problem(p) for p in self.problems], [problem(p) for p in self.held_out], featuriser)


__all__ = [
    "Files",
    "Progress",
    "Reward",
    "Score",
    "TrainConfig",
    "Trained",
    "Trainer",
    "TrainingError",
    "fine_tune",
    "state_path",
    "train",
]
