"""Layers as tuning tasks: the tuners that propose a layer's kernels, and the checks and measurements of these
kernels."""

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

# The number of kernels of a layer that are measured first if there is a predictor: those that it predicts to be the
# fastest.
_PREDICTED = 8

COLD_PRIVATE_CACHES = Timing(samples=10, flush=True)
"""How kernels are timed so that their times hold inside a model: other data have just replaced their weights in the
cores' private caches."""


@dataclass(frozen=True, eq=False)
class LayerTasks:
    """Layers, each with a different key, as tasks of a tuning session. `heuristic`: returns the choice that an untuned
    compilation makes for a layer. `predictor`: predicts which kernels are fast, so that these are measured first; None:
    no predictor."""

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
        """A function that makes tuners. Such a tuner first proposes the untuned kernel of each algorithm, so that the
        result is never slower than the untuned kernel, and all algorithms within the budget of rounding errors can be
        compared. Then it proposes the kernels with the least predicted times, and then those of the tuner for
        `method`."""

        def make(task: Task, seed: int) -> Tuner:
            layer = self.by_key[task.key]
            space = DesignSpace.of(layer, self.machine)
            untuned = dict.fromkeys([self.heuristic(layer), *layer.untuned(self.machine)])
            first = [candidate for choice in untuned if (candidate := space.candidate(choice)) is not None]
            if self.untuned_candidate(task) is None:
                raise KnobError(f"{layer.name}: its untuned kernel cannot be measured alone")
            if self.predictor is not None and predictable(layer):
                first += OneShotTuner(space, self.predictor).propose(_PREDICTED)
            return BeginWith(first, make_tuner(method, space, seed))

        return make

    def untuned_candidate(self, task: Task) -> Candidate | None:
        """The kernel that an untuned compilation uses for a layer; None if this kernel cannot be measured alone."""
        layer = self.by_key[task.key]
        return self._candidate(layer, self.heuristic(layer))

    def recorded(self, task: Task, record: Record) -> Candidate | None:
        """The kernel that was measured for a record; None if this version has no such kernel for the layer."""
        layer = self.by_key[task.key]
        choice = layer.stored(record.trace)
        current = choice is not None and layer.is_current(choice, record.candidate, self.machine)
        return self._candidate(layer, choice) if current else None

    def _candidate(self, layer: Measurable[Any], choice: Any) -> Candidate | None:
        try:
            module = layer.kernel(choice, self.machine)
        except BackendError:  # the choice needs more than a sequence of kernels
            return None
        return Candidate.of(None, json.loads(choice.text), module)


class BeginWith:
    """A tuner that proposes the candidates `first`, and then the candidates of another tuner."""

    def __init__(self, first: Sequence[Candidate], tuner: Tuner) -> None:
        self.name = tuner.name
        self._first_keys = frozenset(candidate.key for candidate in first)
        self._remaining = [*{candidate.key: candidate for candidate in first}.values()]
        self._tuner = tuner

    def propose(self, count: int) -> Sequence[Candidate]:
        begin, self._remaining = self._remaining[:count], self._remaining[count:]
        others: list[Candidate] = []
        while len(begin) + len(others) < count and not others:
            proposals = self._tuner.propose(count - len(begin))
            others = [candidate for candidate in proposals if candidate.key not in self._first_keys]
            if not proposals:
                break
        return [*begin, *others]

    def update(self, measured: Sequence[tuple[Candidate, Measurement]]) -> None:
        self._tuner.update(measured)


# A kernel and the untuned kernel of its layer are timed in turns: in the first number of rounds, or in fewer if these
# take more than the second number of milliseconds. Before the first kernel of a layer, the untuned kernel is timed
# alone: with at most the third number of samples, for at most the fourth number of milliseconds.
_ROUNDS, _LIMIT, _STEADY, _STEADY_LIMIT = 6, 60.0, 20, 500.0


@dataclass(frozen=True, slots=True)
class _Reference:
    """The untuned kernel of a layer, and its time in seconds."""

    kernel: Kernel
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class _Built:
    """Kernels that were built together and checked. The keys of `kernels` are the key of the layer and the key of the
    kernel's code."""

    files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    kernels: dict[tuple[str, str], Kernel] = field(default_factory=dict)


@dataclass(slots=True)
class LayerMeasurer:
    """Checks and times kernels of layers (see `session.Measurer`). Weights of layers that are `far` come from memory.

    A kernel's results are compared with the expected results before the kernel is timed. (On a remote device, only
    entire models are verified.) On this machine, a kernel is timed in turns with the untuned kernel of its layer, since
    a processor may change its clock rate by a third from one second to the next. The time that is returned is the ratio
    of both times, multiplied by the time that the untuned kernel took before the layer's first kernel was measured.

    `pool`: a pool with these options, which stays open; None: a pool is started when it is needed. Kernels that were
    built together stay built as long as each call of `outcomes` asks for one of them. The outcomes of a call must be
    read before the next call.
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
        """Time a kernel: in turns with the layer's untuned kernel if the latter can be measured alone."""
        far, pool = self.layers.by_key[task.key].far, self._open_pool()
        timing = replace(self.options.timing, others=last_level() if far else 0)
        if (reference := self._reference(task, timing)) is None:
            return pool.timed(kernel, timing)
        rounds = pool.in_turns([reference.kernel, kernel], replace(timing, samples=_ROUNDS, limit_ms=_LIMIT))
        if isinstance(rounds, Measurement):
            return rounds
        return Measurement(tuple(reference.seconds * mine / other for other, mine in rounds))

    def untuned_seconds(self, key: str) -> float | None:
        """The seconds of a layer's untuned kernel, which takes turns with each other kernel of the layer when that is
        timed; None if the untuned kernel was not measured. `key`: the layer's key."""
        reference = self._references.get(key)
        return None if reference is None else reference.seconds

    def _reference(self, task: Task, timing: Timing) -> _Reference | None:
        if self.options.remote is not None:
            return None
        if task.key not in self._references:
            self._references[task.key] = self._untuned(task, timing)
        return self._references[task.key]

    def _untuned(self, task: Task, timing: Timing) -> _Reference | None:
        if (candidate := self.layers.untuned_candidate(task)) is None:
            return None
        pool = self._open_pool()
        (kernel,) = self.at_end.enter_context(pool.built(task.target, [candidate.mod]))
        if not isinstance(kernel, Kernel):
            return None
        timed = pool.timed(kernel, replace(timing, samples=_STEADY, limit_ms=_STEADY_LIMIT))
        return None if timed.error is not None else _Reference(kernel, timed.median)

    def _checked(
        self, task: Task, candidates: Sequence[Candidate], until: float = math.inf
    ) -> Iterator[tuple[int, Kernel | Measurement]]:
        """For each candidate its position, and its kernel, built and checked, or a measurement with the error.
        Candidates that would begin after `until` (`time.monotonic`) are left out."""
        layer, pool = self.layers.by_key[task.key], self._open_pool()
        self._keep({(task.key, one.key) for one in candidates})
        ready = {name: kernel for built in self._built for name, kernel in built.kernels.items()}
        new = [i for i, one in enumerate(candidates) if (task.key, one.key) not in ready]
        for i, one in enumerate(candidates):
            if (kernel := ready.get((task.key, one.key))) is not None and time.monotonic() < until:
                yield i, kernel
        if not new:
            return
        self._built.append(built := _Built())
        modules = [candidates[i].mod for i in new]
        for i, result in zip(new, built.files.enter_context(pool.built(task.target, modules, until))):
            if isinstance(result, Kernel):
                if (message := self._deviation(layer, candidates[i], result)) is None:
                    built.kernels[task.key, candidates[i].key] = result
                yield i, result if message is None else Measurement(error=message)
            elif result is not None:
                yield i, result

    def _keep(self, names: Collection[tuple[str, str]]) -> None:
        """Remove the files of built kernels. `names`: kernels whose files remain, with the files of all kernels that
        were built together with them."""
        needed = [built for built in self._built if not built.kernels.keys().isdisjoint(names)]
        for built in self._built:
            if built not in needed:
                built.files.close()
        self._built = needed

    def _deviation(self, layer: Measurable[Any], candidate: Candidate, kernel: Kernel) -> str | None:
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
        return deviation(self._open_pool(), kernel, arguments, self._expected[layer.key])

    def _open_pool(self) -> Pool:
        if self.pool is None:
            self.pool = self.at_end.enter_context(Pool(self.options))
        return self.pool
