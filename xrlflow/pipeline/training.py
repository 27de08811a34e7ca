"""Trains an agent on models."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rewrite_rules import LIBRARY
from xrlflow.cost import Roofline
from xrlflow.options import OptionError, TrainOptions
from xrlflow.pipeline.factories import factory_of
from xrlflow.pipeline.outputs import check_distinct_paths

if TYPE_CHECKING:
    from xrlflow.learn.log import Logs
    from xrlflow.rl.agent import Agent
    from xrlflow.rl.train import Files, Score, Trained
    from xrlflow.rl.world_model.dynamics import World

# A key in the file of an agent that trained in a world model: the number of rounds after which this agent was the
# best.
_ROUNDS = "world model rounds"

_SHOWN = {
    "episode/return": "return {:.3f}",
    "episode/gain": "gain {:.4f}",
    "evaluation/gain": "evaluation {:.4f}",
    "ppo/approx_kl": "kl {:.3f}",
    "ppo/entropy": "entropy {:.2f}",
    "world/present": "masks {:.3f}",
    "world/saving": "savings {:.4f}",
    "time/steps_per_second": "{:.0f} steps/s",
}


def train(
    models: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    options: TrainOptions,
    quiet: bool = True,
) -> Trained:
    """Train an agent; raises what `xrlflow.train` raises. Unless `quiet` is set, prints a line per iteration to
    standard error.
    """
    from xrlflow.learn.ppo import TrainingError
    from xrlflow.rl import train as training
    from xrlflow.rl.agent import Agent
    from xrlflow.rl.env import EnvConfig
    from xrlflow.rl.features import Vocabulary
    from xrlflow.rl.parameters import AgentConfig
    from xrlflow.rl.world_model.files import world_path
    from xrlflow.storage.checkpoint import CheckpointError, check_savable

    if isinstance(models, (str, bytes, os.PathLike)):
        raise OptionError(f"models is one path, {models!r}: give a list of them")
    if not models:
        raise OptionError("models: there is none to learn from: name one or more")
    if os.path.isdir(output) or not os.path.basename(output):
        raise OptionError(f"output {os.fspath(output)!r} names no file: give the path of one")
    for path in (*models, *options.held_out):
        if not os.path.isfile(path):
            raise OptionError(f"{os.fspath(path)} is no file")
        check_distinct_paths(model=path, output=output)
        if options.world_model:
            check_distinct_paths(model=path, world_model=world_path(output))
    if options.log is not None and os.path.isfile(options.log):
        raise OptionError(f"log {os.fspath(options.log)} is a file: name a folder")
    files = training.Files(
        tuple(str(m) for m in models), tuple(str(m) for m in options.held_out), tuple(LIBRARY), Roofline,
        folder=os.getcwd(),
    )  # fmt: skip
    try:
        for path in (output, world_path(output)) if options.world_model else (output,):
            check_savable(path)
        begin = None
        if options.start is not None:
            begin = Agent.load(options.start).extended(files.library())
        if options.world_model:
            return _with_world_model(files, begin, output, options, quiet)
        if not options.restart:
            _check_evaluated_on(files.held_out or files.problems, output)
        config = training.TrainConfig(
            options.iterations, options.steps, options.workers, seed=options.seed,
            env=EnvConfig(horizon=options.horizon), agent=AgentConfig() if begin is None else begin.config,
        )  # fmt: skip
        deadline = None if options.time_limit is None else time.monotonic() + options.time_limit
        with factory_of(options.ray) as factory:
            return training.train(
                files, Vocabulary.of(files.library()) if begin is None else begin.vocabulary, config, output,
                start=begin, resume=not options.restart, deadline=deadline, factory=factory,
                log=lambda done: _logs(options, done, quiet), about={"command": " ".join(["xrlflow", *sys.argv[1:]])},
            )  # fmt: skip
    except (CheckpointError, TrainingError) as error:
        raise OptionError(str(error)) from error


def _check_evaluated_on(models: Sequence[str], output: str | os.PathLike[str]) -> None:
    """Raise OptionError if the run to be continued was evaluated on other files, so that its scores are not comparable.
    Raises CheckpointError."""
    from xrlflow.rl.train import KIND, state_path
    from xrlflow.storage.checkpoint import load_checkpoint

    if not state_path(output).exists():
        return
    score = load_checkpoint(state_path(output), KIND).config.get("score")
    outcomes = [o for o in score if isinstance(o, dict)] if isinstance(score, list) else []
    # Files are compared by name only, as folders may have been moved.
    earlier = {os.path.basename(str(o.get("problem"))) for o in outcomes}
    if earlier and earlier != {os.path.basename(m) for m in models}:
        raise OptionError(
            f"{os.fspath(output)} belongs to a run that was evaluated on {', '.join(sorted(earlier))}: name another "
            "file, or restart (start goes on from its agent)"
        )


@dataclass(slots=True)
class _Best:
    """The best agent so far of a run in a world model. A better agent is written at once, with the world model. The
    first agent is written only by the last `save`, so that an earlier file stays if the training fails.
    """

    output: str | os.PathLike[str]
    seed: int
    fresh: bool  # whether no earlier run wrote the output; if so, the first agent is written, too
    score: Score | None = None
    agent: Agent | None = None
    unsaved: Callable[[], None] | None = None

    def offer(self, score: Score, agent: Agent, rounds: int, world: World | None) -> None:
        """Make an agent the best one if its score is the best so far. `world`: its world model; None before the first
        round.
        """
        from xrlflow.rl.agent import Agent
        from xrlflow.rl.world_model.files import save_alone, save_world

        if self.score is not None and score.gain <= self.score.gain:
            return
        self.score, self.agent = score, Agent.of(agent.arrays())
        about = {"command": " ".join(["xrlflow", *sys.argv[1:]]), "seed": self.seed, _ROUNDS: rounds}
        if world is not None:
            self.unsaved = partial(save_world, self.agent, world, self.output, about)
            self.save()
        elif self.fresh:
            self.unsaved = partial(save_alone, self.agent, self.output, about)

    def save(self) -> None:
        """Write the best agent if it is not written yet: it is the first agent, or Ctrl-C interrupted its writing."""
        if self.unsaved is not None:
            self.unsaved()
            self.unsaved = None


def _with_world_model(
    files: Files, begin: Agent | None, output: str | os.PathLike[str], options: TrainOptions, quiet: bool
) -> Trained:
    """Train an agent inside a world model. The agent and its world model are written after each round with the best
    evaluation so far, and a later run continues from these files. If no round improves on the first agent, this agent
    is written at the end, without a world model.
    """
    from xrlflow.rl.env import EnvConfig
    from xrlflow.rl.features import Vocabulary
    from xrlflow.rl.train import Score, Trained, random_agent
    from xrlflow.rl.workers import play
    from xrlflow.rl.world_model.diagnostics import Watching
    from xrlflow.rl.world_model.learning import Learner, LearningConfig, train_world_model

    started = time.monotonic()
    deadline = math.inf if options.time_limit is None else started + options.time_limit
    earlier = None if options.restart else _earlier(output)
    world, first = None, 0
    if earlier is not None:
        begin, world, first = earlier[0].extended(files.library()), *earlier[1:]
    done = first
    agent = random_agent(Vocabulary.of(files.library()), options.seed) if begin is None else begin
    task = files(agent.vocabulary)
    env, watching = EnvConfig(horizon=options.horizon), Watching()
    best = _Best(output, options.seed, fresh=earlier is None)

    def evaluated() -> Score:
        return Score(tuple(play(agent, task.held_out or task.problems, task.observe, env)))

    def progress(figures: Mapping[str, float], number: int, learner: Learner) -> bool:
        nonlocal done
        done = first + number + 1
        score = evaluated()
        best.offer(score, agent, done, learner.world)
        logs.scalars({**figures, **score.figures, "dream/saved": watching.promised(learner)}, done)
        return time.monotonic() < deadline

    interrupted = False
    try:
        with _logs(options, first, quiet) as logs:
            best.offer(evaluated(), agent, done, None)
            rounds = max(options.iterations - first, 0)
            train_world_model(
                Learner(agent, LearningConfig(env=env), options.seed + first, world), task.problems, task.observe,
                steps=options.steps * rounds, rounds=rounds, deadline=deadline, progress=progress, watch=watching,
            )  # fmt: skip
    except KeyboardInterrupt:
        interrupted = True
    # On Ctrl-C before the first round, the agent has learned nothing, so it does not replace another agent's file.
    if not interrupted or done > first or not os.path.exists(output):
        best.save()
    score = best.score or Score(())
    seconds = time.monotonic() - started
    return Trained(best.agent or agent, score, done, options.steps * done, seconds, interrupted)


def _earlier(output: str | os.PathLike[str]) -> tuple[Agent, World | None, int] | None:
    """If an earlier run with a world model wrote this file: its best agent, its world model (None before the first
    round), and the number of its rounds; otherwise None. Raises OptionError for a run without a world model, and
    CheckpointError for a world model that does not fit.
    """
    from xrlflow.rl.agent import Agent
    from xrlflow.rl.parameters import Parameters
    from xrlflow.rl.train import state_path
    from xrlflow.rl.world_model.files import load_world, world_path
    from xrlflow.storage.checkpoint import CheckpointError

    if state_path(output).exists():
        raise OptionError(
            f"{os.fspath(output)} belongs to a run without a world model: name another file, or restart"
        )
    try:
        rounds = Parameters.load(output).about.get(_ROUNDS)
    except CheckpointError:  # the file is no agent, so there is no run to continue
        return None
    if type(rounds) is not int:
        return None
    agent, world = load_world(output) if world_path(output).exists() else (Agent.load(output), None)
    return agent, world, rounds


def _logs(options: TrainOptions, done: int, quiet: bool) -> Logs:
    """The log of figures. The log of a continued run counts on from `done` iterations."""
    from xrlflow.learn.log import Logs, TensorBoard, Terminal

    terminal = [] if quiet else [Terminal(options.iterations, _SHOWN, done)]
    files = [] if options.log is None else [TensorBoard(options.log, since=done + 1 if done else 0)]
    return Logs(*terminal, *files)
