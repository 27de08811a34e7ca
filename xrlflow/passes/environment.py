"""The Gymnasium environment. An episode concerns one of several modules; each of its steps applies one pass to this
module, or stops.

Actions 0 to P - 1 are the compiler's passes, in the order of `Compiler.passes`; action P stops. An observation is a
dictionary of arrays:

- `figures` float32 [6]: log2 of (1 + operations), (1 + bytes), (1 + flops); operations relative to the first module;
  the remaining fraction of the horizon; log2 of (1 + functions).
- `opcodes` float32 [K + 1]: log2 of (1 + live instructions) of each kind; the last entry counts unknown kinds.
- `computations` float32 [8]: log2 of (1 + operations) of the entry and of the next seven largest functions.
- `applied` float32 [P]: log2 of (1 + the number of times that each pass was applied in the episode).
- `history` int64 [8]: the latest passes, the last one first; P stands for no pass.
- `action_mask` int8 [P + 1]: 0 for passes that are known to have no effect (see `Masking`).
- `graph` (if the configuration requests it): a `GraphInstance`; `nodes` float32 [N, 7] are the opcode's number and `x`
  of `ModuleGraph`, `edges` float32 [E, 1] the kinds, `edge_links` [E, 2] operands and readers.

The information dictionary has `problem`, `module` (the present one), `best` (the module with the lowest value so far),
`value` and `initial` (the metric of the present and the first module; relative if it is measured), `trace` (names of
passes), `changed`, `error` (why the last pass failed), and `mask`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.spaces import GraphInstance

from xrlflow.passes.compiler import Compiler, Metric, Module

FIGURES = 6
COMPUTATIONS = 8
HISTORY = 8
# An environment remembers, for at most this many modules, which passes have no effect.
_KNOWN = 100_000

Observation: TypeAlias = dict[str, Any]

_log = logging.getLogger(__name__)


class EpisodeError(ValueError):
    """An environment has wrong arguments, an action does not exist, or no episode is running."""


class SemanticsError(RuntimeError):
    """A pass changed what a module computes."""


class Masking(Enum):
    """Which passes the action mask excludes."""

    NONE = "none"
    KNOWN = "known"  # passes that this environment has observed to have no effect on the present module
    ALL = "all"  # all passes without effect: every pass is run on every module, so the compiler should have a cache


class Check(Enum):
    """When the present module is run and its outputs are compared with those of the first module. Differences are
    logged.
    """

    NEVER = "never"
    END = "end"  # a difference at the end of an episode is an error
    STEP = "step"  # a step that changes what the module computes counts as a failed pass


@dataclass(frozen=True, slots=True)
class Configuration:
    """The rules of episodes.

    The reward of a step is the reduction of the metric, relative to the first module: over an episode, rewards sum to
    the relative reduction. With Metric.SECONDS the last step gets the whole reward.
    """

    reward: Metric = Metric.OPERATIONS
    horizon: int = 30  # the greatest number of steps
    masking: Masking = Masking.KNOWN
    check: Check = Check.NEVER
    graph: bool = False
    repetitions: int = 20  # pairs of runs to measure seconds

    def __post_init__(self) -> None:
        if self.horizon < 1 or self.repetitions < 1:
            raise EpisodeError("horizon and repetitions must be at least 1")


@dataclass(frozen=True, slots=True)
class Problem:
    """A module to improve."""

    name: str
    module: Module


class PassEnv(gymnasium.Env[Observation, np.int64]):
    """Episodes over several problems. Each episode draws a problem at random, unless `options={"problem": name}` names
    one.
    """

    def __init__(
        self,
        compiler: Compiler,
        problems: Sequence[Problem],
        configuration: Configuration = Configuration(),
    ) -> None:
        if not problems:
            raise EpisodeError("an environment needs at least one problem")
        self.problems = {p.name: p for p in problems}
        if len(self.problems) < len(problems):
            raise EpisodeError("two problems have one name")
        self.compiler, self.configuration = compiler, configuration
        self.passes = compiler.passes
        self._numbers = {name: number for number, name in enumerate(compiler.opcodes)}
        self._idle: dict[str, set[int]] = {}
        self._problem = problems[0]
        self._module = self._best = problems[0].module
        self._trace: list[int] = []
        self._running = False
        self.action_space = spaces.Discrete(len(self.passes) + 1)
        self.observation_space = spaces.Dict(self._spaces())

    def _spaces(self) -> dict[str, spaces.Space[Any]]:
        count = len(self.passes)

        def box(*shape: int) -> spaces.Space[Any]:
            return spaces.Box(0.0, np.inf, shape, np.float32)

        boxes: dict[str, spaces.Space[Any]] = {
            "figures": box(FIGURES),
            "opcodes": box(len(self._numbers) + 1),
            "computations": box(COMPUTATIONS),
            "applied": box(count),
            "history": spaces.Box(0, count, (HISTORY,), np.int64),
            "action_mask": spaces.MultiBinary(count + 1),
        }
        if self.configuration.graph:
            boxes["graph"] = spaces.Graph(box(7), box(1))
        return boxes

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode. Raises EpisodeError if `options` names an unknown problem."""
        super().reset(seed=seed)
        name = (options or {}).get("problem")
        if name is None:
            name = list(self.problems)[int(self.np_random.integers(len(self.problems)))]
        if name not in self.problems:
            raise EpisodeError(f"no problem is called {name!r}; there are: {', '.join(self.problems)}")
        self._problem = self.problems[name]
        self._module = self._best = self._problem.module
        self._trace, self._running = [], True
        mask = self._mask()
        return self._observation(mask), self._information(mask)

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Apply a pass, or stop. Raises EpisodeError if the action does not exist, and SemanticsError if a check at
        the end of an episode finds that the module computes something else than the first module.
        """
        if not self._running:
            raise EpisodeError("no episode is running: call reset first")
        action = int(action)
        if not 0 <= action <= len(self.passes):
            raise EpisodeError(f"action {action} of {len(self.passes)} passes and stop")
        before, error, changed = self._module, None, False
        terminated = action == len(self.passes)
        if not terminated:
            applied = self.compiler.apply(before, self.passes[action])
            self._trace.append(action)
            self._module, error, changed = applied.module, applied.error, applied.changed
            if changed and self.configuration.check is Check.STEP and (error := self._difference()):
                self._module, changed = before, False
            if not changed:
                self._note(before, action)
        truncated = not terminated and len(self._trace) >= self.configuration.horizon
        over = terminated or truncated
        if over and self.configuration.check is Check.END and (difference := self._difference()):
            self._running = False
            raise SemanticsError(difference)
        reward, relative = self._reward(before, over)
        mask = self._mask()
        information = self._information(mask, changed, error, relative)
        self._running = not over
        return self._observation(mask), reward, terminated, truncated, information

    def _reward(self, before: Module, over: bool) -> tuple[float, float | None]:
        """The reward of the last step, and the module's time divided by that of the first module, if the time was
        measured.
        """
        metric, first = self.configuration.reward, self._problem.module
        if metric is not Metric.SECONDS:
            if self._module.summary.of(metric) < self._best.summary.of(metric):
                self._best = self._module
            initial = first.summary.of(metric)
            change = before.summary.of(metric) - self._module.summary.of(metric)
            return (change / initial if initial > 0 else 0.0), None
        self._best = self._module
        if not over:
            return 0.0, None
        if self._module == first:
            return 0.0, 1.0
        pairs = self.compiler.seconds([first, self._module], self.configuration.repetitions)
        relative = median(new / old for old, new in zip(*pairs))
        return 1.0 - relative, relative

    def _mask(self) -> npt.NDArray[np.int8]:
        mask = np.ones(len(self.passes) + 1, np.int8)
        masking = self.configuration.masking
        if masking is Masking.ALL and self._module.digest not in self._idle:
            applied = self.compiler.apply_each(self._module, self.passes)
            for number, result in enumerate(applied):
                if not result.changed:
                    self._note(self._module, number)
            self._idle.setdefault(self._module.digest, set())
        if masking is not Masking.NONE:
            mask[list(self._idle.get(self._module.digest, ()))] = 0
        return mask

    def _note(self, module: Module, action: int) -> None:
        if len(self._idle) >= _KNOWN and module.digest not in self._idle:
            self._idle.clear()
        self._idle.setdefault(module.digest, set()).add(action)

    def _difference(self) -> str | None:
        """How the present module's outputs differ from those of the first module; None if they do not. A difference is
        logged.
        """
        first = self._problem.module
        if self._module == first or (comparison := self.compiler.compare(first, self._module)).equal:
            return None
        passes = ", ".join(self.passes[a] for a in self._trace)
        message = f"{self._problem.name} after {passes}: {comparison.difference}"
        _log.error("a pass changed what a module computes: %s", message)
        return message

    def _observation(self, mask: npt.NDArray[np.int8]) -> Observation:
        module, first = self._module, self._problem.module
        summary = module.summary
        count = len(self.passes)
        opcodes = np.zeros(len(self._numbers) + 1, np.float32)
        for name, number in summary.opcodes:
            opcodes[self._numbers.get(name, len(self._numbers))] += number
        sizes = np.zeros(COMPUTATIONS, np.float32)
        largest = summary.computations[:COMPUTATIONS]
        sizes[: len(largest)] = largest
        applied = np.bincount(np.array(self._trace, np.int64), minlength=count).astype(np.float32)
        history = np.full(HISTORY, count, np.int64)
        recent = self._trace[: -HISTORY - 1 : -1]
        history[: len(recent)] = recent
        figures = np.array(
            [
                *np.log2(1.0 + np.array([summary.operations, summary.bytes_accessed, summary.flops])),
                summary.operations / max(1, first.summary.operations),
                1.0 - len(self._trace) / self.configuration.horizon,
                np.log2(1.0 + len(summary.computations)),
            ],
            np.float32,
        )
        observation: Observation = {
            "figures": figures,
            "opcodes": np.log2(1.0 + opcodes),
            "computations": np.log2(1.0 + sizes),
            "applied": np.log2(1.0 + applied),
            "history": history,
            "action_mask": mask,
        }
        if self.configuration.graph:
            graph = self.compiler.graph(module)
            nodes = np.concatenate([graph.opcode[:, None].astype(np.float32), graph.x], axis=1)
            kinds = graph.edge_kind[:, None].astype(np.float32)
            observation["graph"] = GraphInstance(nodes, kinds, np.ascontiguousarray(graph.edge_index.T))
        return observation

    def _information(
        self,
        mask: npt.NDArray[np.int8],
        changed: bool = False,
        error: str | None = None,
        relative: float | None = None,
    ) -> dict[str, Any]:
        metric, first = self.configuration.reward, self._problem.module
        measured = metric is Metric.SECONDS
        return {
            "problem": self._problem.name,
            "module": self._module,
            "best": self._best,
            "value": relative if measured else self._module.summary.of(metric),
            "initial": 1.0 if measured else first.summary.of(metric),
            "trace": tuple(self.passes[a] for a in self._trace),
            "changed": changed,
            "error": error,
            "mask": mask,
        }


def first_difference(
    compiler: Compiler, module: Module, names: Sequence[str], seed: int = 0
) -> tuple[int, str] | None:
    """The position of the first pass of a sequence after which the module computes something else, and the difference.

    None if there is no such pass. Raises CompilerError if a module does not run.
    """
    present = module
    for position, name in enumerate(names):
        applied = compiler.apply(present, name)
        if applied.changed:
            present = applied.module
            comparison = compiler.compare(module, present, seed)
            if not comparison.equal:
                return position, comparison.difference or "unknown"
    return None
