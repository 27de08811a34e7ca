"""Training an agent on models."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rewrite_rules import LIBRARY
from xrlflow.cost import Roofline
from xrlflow.options import OptionError, TrainOptions
from xrlflow.pipeline.outputs import check_apart

if TYPE_CHECKING:
    from xrlflow.learn.log import Logs
    from xrlflow.rl.train import Trained

_SHOWN = {
    "episode/return": "return {:.3f}",
    "episode/gain": "gain {:.4f}",
    "evaluation/gain": "evaluation {:.4f}",
    "ppo/approx_kl": "kl {:.3f}",
    "ppo/entropy": "entropy {:.2f}",
    "time/steps_per_second": "{:.0f} steps/s",
}


def train(
    models: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    options: TrainOptions,
    quiet: bool = True,
) -> Trained:
    """Train an agent; raises what `xrlflow.train` raises. Unless `quiet`, standard error gets a line per iteration."""
    from xrlflow.learn.checkpoint import CheckpointError
    from xrlflow.learn.ppo import TrainingError
    from xrlflow.rl import train as training
    from xrlflow.rl.agent import Agent
    from xrlflow.rl.env import EnvConfig
    from xrlflow.rl.features import Vocabulary
    from xrlflow.rl.parameters import AgentConfig
    from xrlflow.rl.workers import WorkerError

    if isinstance(models, (str, bytes, os.PathLike)):
        raise OptionError(f"models is one path, {models!r}: give a list of them")
    for path in (*models, *options.held_out):
        if not os.path.isfile(path):
            raise OptionError(f"{os.fspath(path)} is no file")
        check_apart(model=path, output=output)
    if options.log is not None and os.path.isfile(options.log):
        raise OptionError(f"log {os.fspath(options.log)} is a file: name a folder")
    files = training.Files(
        tuple(str(m) for m in models), tuple(str(m) for m in options.held_out), tuple(LIBRARY), Roofline
    )
    try:
        begin = None
        if options.start is not None:
            begin = Agent.load(options.start).extended(files.library())
        config = training.TrainConfig(
            options.iterations, options.steps, options.workers, seed=options.seed,
            env=EnvConfig(horizon=options.horizon), agent=AgentConfig() if begin is None else begin.config,
        )  # fmt: skip
        return training.train(
            files, Vocabulary.of(files.library()) if begin is None else begin.vocabulary, config, output,
            start=begin, resume=not options.restart,
            deadline=None if options.time_limit is None else time.monotonic() + options.time_limit,
            log=lambda done: _logs(options, done, quiet), about={"command": " ".join(["xrlflow", *sys.argv[1:]])},
        )  # fmt: skip
    except (CheckpointError, TrainingError, WorkerError) as error:
        raise OptionError(str(error)) from error


def _logs(options: TrainOptions, done: int, quiet: bool) -> Logs:
    """The log that figures go to. A run that goes on continues after `done` iterations."""
    from xrlflow.learn.log import Logs, TensorBoard, Terminal

    told = [] if quiet else [Terminal(options.iterations, _SHOWN, done)]
    kept = [] if options.log is None else [TensorBoard(options.log, since=done + 1 if done else 0)]
    return Logs(*told, *kept)
