"""Layers as tuning tasks: which kernels they have, who proposes them, and how they are checked and timed."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from xrlflow.backends.placement import last_level
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.target import Machine
from xrlflow.backends.tvm.ways import Floats
from xrlflow.tuning.knobs import Candidate, KnobError
from xrlflow.tuning.layer_times import deviation
from xrlflow.tuning.measurable import Measurable
from xrlflow.tuning.pool import Kernel, Pool, PoolOptions
from xrlflow.tuning.session import MakeTuner, Outcomes
from xrlflow.tuning.space import WaySpace
from xrlflow.tuning.store import Record
from xrlflow.tuning.tasks import Task
from xrlflow.tuning.tuners.factory import make_tuner
from xrlflow.tuning.tuners.protocol import Measurement, Method, Tuner


@dataclass(frozen=True, eq=False)
class LayerTasks:
    """Layers, each of a key of its own, as tasks of a session. `heuristic`: the way of a layer in an untuned
    compilation."""

    layers: Sequence[Measurable[Any]]
    machine: Machine
    heuristic: Callable[[Measurable[Any]], Any]

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
        those within a budget of errors can be compared."""

        def make(task: Task, seed: int) -> Tuner:
            layer = self.by_key[task.key]
            space = WaySpace.of(layer, self.machine)
            untuned = dict.fromkeys([self.heuristic(layer), *layer.untuned(self.machine)])
            first = [candidate for way in untuned if (candidate := space.candidate(way)) is not None]
            if self.usual(task) is None:
                raise KnobError(f"{layer.name}: its untuned kernel cannot be measured alone")
            return BeginWith(first, make_tuner(method, task, seed, space=space))

        return make

    def usual(self, task: Task) -> Candidate | None:
        """The kernel of an untuned compilation; None if it cannot be measured alone."""
        layer = self.by_key[task.key]
        return self._candidate(layer, self.heuristic(layer))

    def recorded(self, task: Task, record: Record) -> Candidate | None:
        """The kernel of a record; None if the layer has no such kernel today."""
        layer = self.by_key[task.key]
        way = layer.stored(record.trace)
        current = way is not None and layer.is_current(way, record.candidate, self.machine)
        return self._candidate(layer, way) if current else None

    def _candidate(self, layer: Measurable[Any], way: Any) -> Candidate | None:
        try:
            module = layer.kernel(way, self.machine)
        except BackendError:  # it is more than a sequence of kernels
            return None
        return Candidate.of(None, json.loads(way.text), module)


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


@dataclass(slots=True)
class LayerMeasurer:
    """Checks and times kernels of layers (see `session.Measurer`). Weights of layers that are `far` come from memory.

    A kernel's results are compared with the expected ones before it is timed, but not those of a remote device, where
    only whole models are verified. The pool starts when there is something to measure.
    """

    layers: LayerTasks
    options: PoolOptions
    at_end: contextlib.ExitStack
    _pool: Pool | None = None
    _expected: dict[str, Floats] = field(default_factory=dict)

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
        far = self.layers.by_key[task.key].far
        timing = replace(self.options.timing, others=last_level() if far else 0)
        for position, kernel in self.checked(task, candidates, until):
            timed = kernel if isinstance(kernel, Measurement) else self._started().timed(kernel, timing)
            yield position, timed

    def checked(
        self, task: Task, candidates: Sequence[Candidate], until: float = math.inf
    ) -> Iterator[tuple[int, Kernel | Measurement]]:
        """The kernels of candidates, by position, or what is wrong with them. Those that would begin after `until`
        (`time.monotonic`) are left out."""
        layer = self.layers.by_key[task.key]
        with self._started().built(task.target, [one.mod for one in candidates], until) as built:
            for position, kernel in enumerate(built):
                if isinstance(kernel, Kernel):
                    wrong = self._wrong(layer, candidates[position], kernel)
                    yield position, kernel if wrong is None else Measurement(error=wrong)
                elif kernel is not None:
                    yield position, kernel

    def _wrong(self, layer: Measurable[Any], candidate: Candidate, kernel: Kernel) -> str | None:
        if self.options.remote is not None:
            return None
        way = layer.stored(json.dumps(candidate.trace))
        assert way is not None
        arguments = layer.arguments(way, self.layers.machine)
        try:
            if layer.key not in self._expected:
                self._expected = {layer.key: layer.expected(self.layers.machine)}
        except BackendError as error:
            return f"the layer cannot run alone: {error}"
        return deviation(self._started(), kernel, arguments, self._expected[layer.key])

    def _started(self) -> Pool:
        if self._pool is None:
            self._pool = self.at_end.enter_context(Pool(self.options))
        return self._pool
