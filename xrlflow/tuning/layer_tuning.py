"""Layers as tuning tasks: which kernels they have, who proposes them, and how they are checked and timed."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from xrlflow.backends.placement import last_level
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.kernels.layer_kernels import Floats
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.tuning.knobs import Candidate, KnobError
from xrlflow.tuning.layer_times import deviation
from xrlflow.tuning.measurable import Measurable
from xrlflow.tuning.one_shot.predictor import Predictor
from xrlflow.tuning.one_shot.times import predictable
from xrlflow.tuning.pool import Kernel, Pool, PoolOptions
from xrlflow.tuning.session import MakeTuner, Outcomes
from xrlflow.tuning.space import DesignSpace
from xrlflow.tuning.store import Record
from xrlflow.tuning.tasks import Task
from xrlflow.tuning.tuners.factory import make_tuner
from xrlflow.tuning.tuners.one_shot import OneShotTuner
from xrlflow.tuning.tuners.protocol import Measurement, Method, Tuner
from xrlflow.tuning.worker import Timing

# So many kernels of a layer, the fastest by a predictor, are measured first.
_PREDICTED = 8

COLD_PRIVATE_CACHES = Timing(samples=10, flush=True)
"""How the kernels of a model are timed: other kernels have just replaced their weights in the cores' own caches."""


@dataclass(frozen=True, eq=False)
class LayerTasks:
    """Layers, each of a key of its own, as tasks of a session. `heuristic`: the way of a layer in an untuned
    compilation. `predictor`: with one, its choices are measured first."""

    layers: Sequence[Measurable[Any]]
    machine: Machine
    heuristic: Callable[[Measurable[Any]], Any]
    predictor: Predictor | None = None

    @cached_property
    def by_key(self) -> Mapping[str, Measurable[Any]]:
        return {layer.key: layer for layer in self.layers}

    @cached_property
    def tasks(self) -> list[Task]:
        target = self.machine.target()
        return [
            Task(layer.name, None, target, layer.weight, layer.key, 2.0 * layer.work / layer.weight)
            for layer in self.layers
        ]

    def maker(self, method: Method) -> MakeTuner:
        """Makes tuners that first propose the untuned kernels of each algorithm: the tuned kernel is never slower, and
        those within a budget of errors can be compared. Then they propose what the predictor thinks fastest."""

        def make(task: Task, seed: int) -> Tuner:
            layer = self.by_key[task.key]
            space = DesignSpace.of(layer, self.machine)
            untuned = dict.fromkeys([self.heuristic(layer), *layer.untuned(self.machine)])
            first = [candidate for choice in untuned if (candidate := space.candidate(choice)) is not None]
            if self.usual(task) is None:
                raise KnobError(f"{layer.name}: its untuned kernel cannot be measured alone")
            if self.predictor is not None and predictable(layer):
                first += OneShotTuner(space, self.predictor).propose(_PREDICTED)
            return BeginWith(first, make_tuner(method, space, seed))

        return make

    def usual(self, task: Task) -> Candidate | None:
        """The kernel of an untuned compilation; None if it cannot be measured alone."""
        layer = self.by_key[task.key]
        return self._candidate(layer, self.heuristic(layer))

    def recorded(self, task: Task, record: Record) -> Candidate | None:
        """The kernel of a record; None if the layer has no such kernel today."""
        layer = self.by_key[task.key]
        choice = layer.stored(record.trace)
        current = choice is not None and layer.is_current(choice, record.candidate, self.machine)
        return self._candidate(layer, choice) if current else None

    def _candidate(self, layer: Measurable[Any], choice: Any) -> Candidate | None:
        try:
            module = layer.kernel(choice, self.machine)
        except BackendError:  # it is more than a sequence of kernels
            return None
        return Candidate.of(None, json.loads(choice.text), module)


class BeginWith:
    """A tuner that first proposes given candidates."""

    def __init__(self, first: Sequence[Candidate], tuner: Tuner) -> None:
        self.name = tuner.name
        self._known = frozenset(candidate.key for candidate in first)
        self._left = [*{candidate.key: candidate for candidate in first}.values()]
        self._tuner = tuner

    def propose(self, count: int) -> Sequence[Candidate]:
        begin, self._left = self._left[:count], self._left[count:]
        others: list[Candidate] = []
        while len(begin) + len(others) < count and not others:
            own = self._tuner.propose(count - len(begin))
            others = [candidate for candidate in own if candidate.key not in self._known]
            if not own:
                break
        return [*begin, *others]

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        self._tuner.update(measured)


# Rounds in which a kernel and the untuned one are timed in turns, fewer if these take so many milliseconds; before that
# the latter is timed alone, so often and so long at most.
_ROUNDS, _LIMIT, _STEADY, _MOST = 6, 60.0, 20, 500.0


@dataclass(frozen=True, slots=True)
class _Reference:
    """The untuned kernel of a layer, and its time in seconds."""

    kernel: Kernel
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class _Built:
    """Kernels that were built together and checked, by the keys of their layer and their code."""

    files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    kernels: dict[tuple[str, str], Kernel] = field(default_factory=dict)


@dataclass(slots=True)
class LayerMeasurer:
    """Checks and times kernels of layers (see `session.Measurer`). Weights of layers that are `far` come from memory.

    A kernel's results are compared with the expected ones before it is timed, but not those of a remote device, where
    only whole models are verified. Here a kernel is timed in turns with the untuned one of its layer: a processor may
    change its rate from one second to the next by a third. Its time is the ratio of the two, times the untuned kernel's
    time when the layer's first kernel was measured. `pool`: one with these options, which stays open; None: one starts
    when there is something to measure. Kernels stay built as long as they are asked for in each call; the outcomes of a
    call end with the next one.
    """

    layers: LayerTasks
    options: PoolOptions
    at_end: contextlib.ExitStack
    pool: Pool | None = None
    _expected: dict[str, Floats] = field(default_factory=dict)
    _references: dict[str, _Reference | None] = field(default_factory=dict)
    _built: list[_Built] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.at_end.callback(self._keep, frozenset())

    @property
    def threads(self) -> int:
        return self.options.threads

    @property
    def device(self) -> str | None:
        return self.options.device

    @property
    def flushed(self) -> bool:
        return self.options.timing.flush

    def outcomes(self, task: Task, candidates: Sequence[Candidate], *, until: float = math.inf) -> Outcomes:
        for position, kernel in self._checked(task, candidates, until):
            yield position, kernel if isinstance(kernel, Measurement) else self._timed(task, kernel)

    def _timed(self, task: Task, kernel: Kernel) -> Measurement:
        """In turns with the layer's untuned kernel, if that can be measured alone."""
        far, pool = self.layers.by_key[task.key].far, self._started()
        timing = replace(self.options.timing, others=last_level() if far else 0)
        if (usual := self._reference(task, timing)) is None:
            return pool.timed(kernel, timing)
        found = pool.in_turns([usual.kernel, kernel], replace(timing, samples=_ROUNDS, limit_ms=_LIMIT))
        if isinstance(found, Measurement):
            return found
        return Measurement(tuple(usual.seconds * mine / other for other, mine in found))

    def untuned_seconds(self, key: str) -> float | None:
        """The time of the kernel with which those of a layer are timed in turns; None if none was measured so."""
        found = self._references.get(key)
        return None if found is None else found.seconds

    def _reference(self, task: Task, timing: Timing) -> _Reference | None:
        if self.options.remote is not None:
            return None
        if task.key not in self._references:
            self._references[task.key] = self._untuned(task, timing)
        return self._references[task.key]

    def _untuned(self, task: Task, timing: Timing) -> _Reference | None:
        if (candidate := self.layers.usual(task)) is None:
            return None
        pool = self._started()
        (kernel,) = self.at_end.enter_context(pool.built(task.target, [candidate.mod]))
        if not isinstance(kernel, Kernel):
            return None
        timed = pool.timed(kernel, replace(timing, samples=_STEADY, limit_ms=_MOST))
        return None if timed.error is not None else _Reference(kernel, timed.median)

    def _checked(
        self, task: Task, candidates: Sequence[Candidate], until: float = math.inf
    ) -> Iterator[tuple[int, Kernel | Measurement]]:
        """The kernels of candidates, by position, or what is wrong with them. Those that would begin after `until`
        (`time.monotonic`) are left out."""
        layer, pool = self.layers.by_key[task.key], self._started()
        self._keep({(task.key, one.key) for one in candidates})
        known = {name: kernel for built in self._built for name, kernel in built.kernels.items()}
        new = [i for i, one in enumerate(candidates) if (task.key, one.key) not in known]
        for i, one in enumerate(candidates):
            if (kernel := known.get((task.key, one.key))) is not None and time.monotonic() < until:
                yield i, kernel
        if not new:
            return
        self._built.append(built := _Built())
        modules = [candidates[i].mod for i in new]
        for i, found in zip(new, built.files.enter_context(pool.built(task.target, modules, until))):
            if isinstance(found, Kernel):
                if (wrong := self._wrong(layer, candidates[i], found)) is None:
                    built.kernels[task.key, candidates[i].key] = found
                yield i, found if wrong is None else Measurement(error=wrong)
            elif found is not None:
                yield i, found

    def _keep(self, names: Collection[tuple[str, str]]) -> None:
        """Remove the files of what was built, but for those that were built with one of these."""
        kept = [built for built in self._built if not built.kernels.keys().isdisjoint(names)]
        for built in self._built:
            if built not in kept:
                built.files.close()
        self._built = kept

    def _wrong(self, layer: Measurable[Any], candidate: Candidate, kernel: Kernel) -> str | None:
        if self.options.remote is not None:
            return None
        choice = layer.stored(json.dumps(candidate.trace))
        assert choice is not None
        arguments = layer.arguments(choice, self.layers.machine)
        try:
            if layer.key not in self._expected:
                self._expected = {layer.key: layer.expected(self.layers.machine)}
        except BackendError as error:
            return f"the layer cannot run alone: {error}"
        return deviation(self._started(), kernel, arguments, self._expected[layer.key])

    def _started(self) -> Pool:
        if self.pool is None:
            self.pool = self.at_end.enter_context(Pool(self.options))
        return self.pool
