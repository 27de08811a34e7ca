"""Trains an agent by PPO (`xrlflow.learn.ppo`), with or without the additions of `lessons`.

All random numbers of a run come from one generator, and an iteration plays whole episodes. So a run that is killed and
continued from its state gives the same agent as one without interruption.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xrlflow.learn.log import Logs
from xrlflow.learn.ppo import Episode, PPOConfig, Rollout, Stats, collect, update
from xrlflow.learn.states import adam_state, check_weights, number, under
from xrlflow.learn.tensors import to_arrays, to_tensors
from xrlflow.learn.threads import one_thread
from xrlflow.passes.agent import Agent, AgentConfig, random_agent
from xrlflow.passes.compiler import Compiler
from xrlflow.passes.environment import Masking, Observation, Problem
from xrlflow.passes.lessons import Lessons, Teaching, Trained, score
from xrlflow.storage.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint

KIND = "training of a passes agent"


def _ppo() -> PPOConfig:
    # An episode that reduces operations by 20% returns 0.2; the scale turns this into 2. Gains are discounted, so that
    # a pass without effect lowers the return. Episodes are expensive, so each is used for several updates.
    return PPOConfig(
        learning_rate=2e-3, gamma=0.9, epochs=10, target_kl=0.08, reward_scale=10.0, value_weight=0.5
    )


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Options of a training run: it has `iterations` of at least `steps` steps each, played in `environments`
    environments.

    A run that is continued may change only `iterations` and `evaluate_every`. `evaluate_every`: after this many
    iterations the agent plays all modules, and is written to its file if it is better than before.
    """

    iterations: int = 100
    steps: int = 256
    environments: int = 8
    seed: int = 0
    evaluate_every: int = 10
    teaching: Teaching = field(default_factory=Teaching)
    ppo: PPOConfig = field(default_factory=_ppo)
    agent: AgentConfig = field(default_factory=AgentConfig)

    def __post_init__(self) -> None:
        for name in ("iterations", "steps", "environments", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainConfig.{name} must be at least 1, not {getattr(self, name)}")

    def plain(self) -> TrainConfig:
        """The same options without masking, shaping and curriculum: model-free PPO on the plain environment."""
        return replace(
            self,
            agent=replace(self.agent, masking=Masking.NONE),
            teaching=replace(self.teaching, shaping=False, curriculum=False),
        )

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["teaching"]["metric"] = self.teaching.metric.value
        values["agent"]["masking"] = self.agent.masking.value
        values["agent"]["network"] = self.agent.network.value
        return values


def train(
    compiler: Compiler,
    problems: Sequence[Problem],
    config: TrainConfig = TrainConfig(),
    output: str | os.PathLike[str] | None = None,
    *,
    start: Agent | None = None,
    restart: bool = False,
    deadline: float | None = None,
    log: Callable[[int], Logs] | None = None,
) -> Trained:
    """Train an agent on modules. The agent is written to `output` whenever it plays the modules better than before.

    The run ends after all iterations, at `deadline` (time.monotonic) or at Ctrl-C, with the best agent so far. After
    each iteration the state of the run is written to `state_path(output)`, and a later run continues from this state,
    unless `restart` is set. `log(done)` creates the logs, given the number of finished iterations. The compiler should
    have a cache, since episodes repeat the same passes on the same modules. Raises CheckpointError if `start` is for
    other passes, if the state is of another run, or if `output` cannot be written, and TrainingError if a loss is not
    finite.
    """
    run = _Run(compiler, problems, config, output, start)
    if not restart:
        run.resume()
    interrupted = False
    try:
        with one_thread(), log(run.iteration) if log is not None else Logs() as logs:
            while run.iteration < config.iterations and (deadline is None or time.monotonic() < deadline):
                logs.scalars(run.iterate(), run.iteration)
            if run.iteration % config.evaluate_every:
                logs.scalars(run.evaluate(), run.iteration)
                run.save()
    except KeyboardInterrupt:
        interrupted = True
    return run.trained(interrupted)


def state_path(output: str | os.PathLike[str]) -> Path:
    """The path of the state of the training run that writes its agent to `output`."""
    path = Path(output)
    return path.with_name(f"{path.stem}.training{path.suffix}")


class _Run:
    def __init__(
        self,
        compiler: Compiler,
        problems: Sequence[Problem],
        config: TrainConfig,
        output: str | os.PathLike[str] | None,
        start: Agent | None,
    ) -> None:
        self.compiler, self.problems, self.config, self.output = compiler, problems, config, output
        self.agent = start.copy() if start is not None else random_agent(compiler, config.agent, config.seed)
        self.agent.check(compiler)
        episode = self.agent.config.episode(reward=config.teaching.metric)
        self.lessons = [
            Lessons(compiler, problems, episode, config.teaching) for _ in range(config.environments)
        ]
        self.optimizer = config.ppo.optimizer(self.agent)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.iteration = self.steps = 0
        self.begin = time.monotonic()
        self.earlier = 0.0
        """Seconds that the run took before it was stopped."""
        self.best, self.score = self.agent.copy(), math.inf
        self.history: list[Mapping[str, float]] = []
        self._unsaved = False

    def iterate(self) -> dict[str, float]:
        """Collect episodes, learn from them, and evaluate the agent every `evaluate_every` iterations."""
        config, begin = self.config, time.perf_counter()
        progress = self.iteration / config.iterations
        for lesson in self.lessons:
            lesson.progress = progress
        episodes = collect(self.agent, self.lessons, config.steps, self.generator)
        collected = time.perf_counter()
        rollout = Rollout.of(episodes, config.ppo)
        stats = update(self.agent, self.optimizer, rollout, config.ppo, self.generator, progress)
        self.iteration += 1
        self.steps += len(rollout)
        scalars = _scalars(episodes, stats)
        scalars["time/steps_per_second"] = len(rollout) / max(collected - begin, 1e-9)
        scalars["time/updating"] = time.perf_counter() - collected
        if self.iteration % config.evaluate_every == 0:
            scalars |= self.evaluate()
        self.history.append(scalars)
        self.save()
        return scalars

    def save(self) -> None:
        """Write the state, and after it the best agent if it is new. If the program is killed between the two, the
        continued run writes the agent.
        """
        if self.output is None:
            return
        save_checkpoint(self.to_checkpoint(), state_path(self.output))
        if self._unsaved:
            self.best.save(self.output)
            self._unsaved = False

    def evaluate(self) -> dict[str, float]:
        """Play all modules, and store the agent if it is the best so far."""
        result = score(self.agent, self.compiler, self.problems, self.config.teaching.metric)
        if result < self.score:
            self.best, self.score = self.agent.copy(), result
            self.best.about = self._about()
            self._unsaved = True
        return {"evaluation/reduction": 1.0 - math.exp(result)}

    def trained(self, interrupted: bool) -> Trained:
        if math.isinf(self.score):
            self.best = self.agent.copy()
            self.best.about = self._about()
            if self.output is not None:
                self.best.save(self.output)
        return Trained(
            self.best, self.score, self.iteration, self.steps, self.seconds, interrupted, tuple(self.history)
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        return self.earlier + time.monotonic() - self.begin

    def to_checkpoint(self) -> Checkpoint:
        """The state that the next iteration depends on, and the best agent so far."""
        tensors = {f"agent.{name}": t for name, t in self.agent.state_dict().items()}
        tensors |= {f"best.{name}": t for name, t in self.best.state_dict().items()}
        names = [name for name, _ in self.agent.named_parameters()]
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{names[index]}.{key}": t for key, t in state.items()}
        tensors["generator"] = self.generator.get_state()
        config = {
            "run": self._identity(),
            "about": self.best.about,
            "iteration": self.iteration,
            "steps": self.steps,
            "seconds": self.seconds,
            "score": None if math.isinf(self.score) else self.score,
        }
        return Checkpoint(KIND, config, to_arrays(tensors))

    def _identity(self) -> dict[str, Any]:
        """The options that a continued run must share with the one that was stopped."""
        config = {k: v for k, v in self.config.to_json().items() if k not in ("iterations", "evaluate_every")}
        modules = [p.module.digest for p in self.problems]
        return {
            "compiler": self.compiler.name,
            "passes": list(self.agent.passes),
            "modules": modules,
            **config,
        }

    def resume(self) -> None:
        """Continue from the saved state, if there is one. Raises CheckpointError if it is of another run."""
        if self.output is None or not state_path(self.output).exists():
            return
        path = state_path(self.output)
        checkpoint = load_checkpoint(path, KIND)
        mine = json.loads(json.dumps(self._identity()))
        theirs = checkpoint.config.get("run")
        if not isinstance(theirs, dict):
            raise CheckpointError(f"{path}: its configuration is damaged: it does not say which run it is of")
        differing = sorted(k for k, v in mine.items() if theirs.get(k) != v)
        if differing:
            other = ", ".join(differing)
            raise CheckpointError(f"{path} is of a run with other {other}: restart, or name another output")
        try:
            self._restore(to_tensors(checkpoint.tensors), checkpoint.config)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{path}: the parts of the state do not fit: {reason}") from error
        if not math.isinf(self.score):  # the file of the best agent may be missing, older or damaged
            self.best.save(self.output)

    def _restore(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        for agent, prefix in ((self.agent, "agent."), (self.best, "best.")):
            check_weights(agent, under(tensors, prefix))
            agent.load_state_dict(under(tensors, prefix))
        state = adam_state(self.agent, under(tensors, "optimizer."))
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.generator.set_state(tensors["generator"])
        self.iteration, self.steps = (int(number(config, name)) for name in ("iteration", "steps"))
        self.earlier, self.best.about = number(config, "seconds"), dict(config["about"])
        self.score = math.inf if config["score"] is None else number(config, "score", -math.inf)

    def _about(self) -> dict[str, Any]:
        return {
            "compiler": self.compiler.name,
            "modules": [p.name for p in self.problems],
            "run": self.config.to_json(),
            "iteration": self.iteration,
            "steps": self.steps,
            "reduction": None if math.isinf(self.score) else round(1.0 - math.exp(self.score), 4),
        }


def _scalars(episodes: Sequence[Episode[Observation]], stats: Stats) -> dict[str, float]:
    return {
        "episode/return": float(np.mean([e.total for e in episodes])),
        "episode/length": float(np.mean([len(e) for e in episodes])),
        **{f"ppo/{f.name}": float(getattr(stats, f.name)) for f in fields(stats)},
    }
