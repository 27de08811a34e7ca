"""Measures the kernels of layers (convolutions, and blocks of them), and remembers their times.

Each kernel is compared with untuned tiles before it is timed, with weights as cold as in the model. The fastest ones
of each algorithm are measured again, beside the one of an untuned compilation: the least of many noisy times is a lucky
one. All outcomes are stored at once.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from xrlflow.backends.placement import last_level
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm import bands
from xrlflow.backends.tvm.algorithms import Algorithm, Chosen, Timed, TimedBlock, Times, Timings
from xrlflow.backends.tvm.target import Machine
from xrlflow.backends.tvm.ways import Floats, Form, Way
from xrlflow.tuning.blocks import Block, BlockWay, Kernels
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.measurable import Measurable, W, key_of
from xrlflow.tuning.pool import Kernel, Pool, PoolOptions
from xrlflow.tuning.store import CONFIRMED, Record, Setting, Store
from xrlflow.tuning.tuners.protocol import Measurement

if TYPE_CHECKING:
    from tvm.ir import IRModule

# The leading kernels of an algorithm: at most this many, no slower than the first by this factor.
_LEADERS, _NEAR = 3, 1.05
# What measuring leaders again may take: others may lead then.
_PASSES = 3
# A measured blocking must take less than this part of the untuned one's time (see `kernels._WORTH`).
_WORTH = 0.97
# The largest deviation from the expected results, relative to the largest of them.
_DEVIATION = 2e-5


class Seen:
    """Notes layers, for a compilation that finds what there is to measure. `known`: the times that this one uses."""

    def __init__(self, known: Timings | None = None) -> None:
        self._known = known
        self.layers: list[Layer] = []
        """In the order of the model."""
        self.blocks: list[Block] = []

    def of(self, form: Form, far: bool) -> Times:
        self.layers.append(Layer(form, far))
        return {} if self._known is None else self._known.of(form, far)

    def of_block(self, form: bands.Form, far: bool) -> TimedBlock | None:
        self.blocks.append(Block(form, far))
        return None if self._known is None else self._known.of_block(form, far)


Called = TypeVar("Called", Layer, Block)


def together(layers: Iterable[Called]) -> list[Called]:
    """Each layer once, with the number of its calls."""
    found: dict[str, Called] = {}
    for layer in layers:
        known = found.get(layer.key)
        found[layer.key] = layer if known is None else replace(known, weight=known.weight + layer.weight)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class StoredTimes:
    """The `Timings` of a store. A layer whose weights were measured at another distance is better known so than not."""

    store: Store
    machine: Machine
    setting: Setting

    @staticmethod
    def on(store: Store, machine: Machine, threads: int, device: str | None = None) -> StoredTimes:
        """The times of a device (None: this machine)."""
        return StoredTimes(store, machine, Setting.on(device, machine.target(), threads, flushed=True))

    def of(self, form: Form, far: bool) -> Times:
        found = self._used(Layer(form, far))[1]
        return {
            algorithm: None if best is None else Timed(best.seconds, best.way.plan)
            for algorithm in Algorithm
            if algorithm in found
            for best in [found[algorithm]]
        }

    def of_block(self, form: bands.Form, far: bool) -> TimedBlock | None:
        """What an untuned compilation chooses is kept, too, unless another way is faster by a margin."""
        block = Block(form, far)
        found = self._used(block)[1]
        if (apart := found.get(Kernels.APART)) is None:
            return None
        if (fused := found[Kernels.BANDS]) is None:
            return TimedBlock(apart.seconds)
        usual, other = (fused, apart) if block.usual(self.machine).plan is not None else (apart, fused)
        best = other if other.seconds < _WORTH * usual.seconds else usual
        return TimedBlock(best.seconds, best.way.plan)

    def _used(self, layer: Measurable[W]) -> tuple[Measurable[W], dict[Hashable, _Known[W] | None]]:
        """The layer at the distance whose times are used, and its best kernels: nothing if too little is known."""
        for at in (layer, layer.at(not layer.far)):
            found = self._known(at)
            needed = layer.needed(self.machine)
            if found.get(needed[0]) is not None and found.keys() >= set(needed):
                return at, found
        return layer, {}

    def _known(self, layer: Measurable[W]) -> dict[Hashable, _Known[W] | None]:
        """The best kernels of each group of ways that was measured; None: all failed."""
        kept = _kept(self.store, layer, self.setting)
        found: dict[Hashable, _Known[W] | None] = {}
        for untuned in layer.untuned(self.machine) if kept else ():
            some = [known for known in kept if known.way.group == untuned.group]
            best = next((known for known in _ranked(some) if self._is_current(layer, known)), None)
            if best is not None:
                found[untuned.group] = self._worth(layer, best, untuned, some)
            elif any(known.failed and self._is_current(layer, known) for known in some):
                found[untuned.group] = None
        return found

    def _worth(
        self, layer: Measurable[W], best: _Known[W], untuned: W, some: Sequence[_Known[W]]
    ) -> _Known[W]:
        """The best kernel, unless the untuned one is as fast."""
        for known in some:
            as_fast = known.way == untuned and not known.failed and best.seconds > _WORTH * known.seconds
            if as_fast and self._is_current(layer, known):
                return known
        return best

    def _is_current(self, layer: Measurable[W], known: _Known[W]) -> bool:
        return layer.is_current(known.way, known.key, self.machine)

    def seconds(self, layer: Measurable[W], way: W) -> float | None:
        """The median time of a kernel, at the distance whose times are used; None if it is not known there."""
        for known in _kept(self.store, self._used(layer)[0], self.setting):
            if known.way == way and not known.failed and self._is_current(layer, known):
                return known.seconds
        return None


@dataclass(frozen=True, slots=True)
class _Known(Generic[W]):
    """What the store has of a kernel. `failed`: the last time. `seconds`: the median of `count` measurements."""

    way: W
    key: str
    seconds: float
    count: int
    failed: bool


def _kept(store: Store, layer: Measurable[W], setting: Setting) -> list[_Known[W]]:
    groups: dict[tuple[W, str], list[Measurement]] = {}
    for record in store.known(layer.key, setting):
        if (way := layer.stored(record.trace)) is not None:
            groups.setdefault((way, record.candidate), []).append(record.outcome)
    return [
        _Known(way, key, _median(outcomes), len(outcomes), outcomes[-1].error is not None)
        for (way, key), outcomes in groups.items()
    ]


def _median(outcomes: Sequence[Measurement]) -> float:
    times = [outcome.median for outcome in outcomes if outcome.error is None]
    return statistics.median(times) if times else math.inf


def _ranked(some: Sequence[_Known[W]]) -> list[_Known[W]]:
    """Kernels of one group, the fastest first: of those that were measured often enough, if there are any."""
    running = [known for known in some if not known.failed]
    often = [known for known in running if known.count >= CONFIRMED] or running
    return sorted(often, key=lambda known: known.seconds)


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What tuning found for a layer, which the model calls `calls` times.

    `heuristic`, `chosen`: the kernels of an untuned and of a tuned compilation, with their seconds (None: not
    measured), and the seconds of the plain algorithm (of a block: of one kernel for each convolution). Both stay within
    the same budget of rounding errors, so that `chosen` need not be the fastest.
    """

    name: str
    calls: int
    heuristic: str
    heuristic_seconds: float | None
    chosen: str
    chosen_seconds: float | None
    plain_seconds: float | None


def results(
    before: Iterable[tuple[Layer, Chosen]], after: Iterable[tuple[Layer, Chosen]], times: StoredTimes
) -> list[LayerResult]:
    """What became of the layers of a tuned model, by what was chosen for those of the untuned one and for them. Equal
    ones are together. Those that were part of a block before count as untuned with a plain algorithm."""
    found: dict[tuple[str, str, str], LayerResult] = {}
    untuned: dict[str, deque[Algorithm]] = defaultdict(deque)
    for layer, chosen in before:
        untuned[layer.key].append(Algorithm(chosen.algorithm))
    for layer, chosen in after:
        known = times.of(layer.form, layer.far)
        earlier_ones = untuned[layer.key] or deque(layer.needed(times.machine))
        first = layer.usual(earlier_ones.popleft(), times.machine)
        algorithm = Algorithm(chosen.algorithm)
        best = known.get(algorithm)
        last = layer.usual(algorithm, times.machine) if best is None else Way(algorithm, best.plan)
        plain = known.get(layer.needed(times.machine)[0])
        key = (layer.key, str(first), str(last))
        earlier = found.get(key)
        found[key] = LayerResult(
            layer.name, 1 if earlier is None else earlier.calls + 1,
            str(first), times.seconds(layer, first), str(last), None if best is None else best.seconds,
            None if plain is None else plain.seconds,
        )  # fmt: skip
    return list(found.values())


def block_results(blocks: Iterable[Block], times: StoredTimes) -> list[LayerResult]:
    """What became of blocks. Equal ones are together."""
    found = []
    for block in together(blocks):
        first, known = block.usual(times.machine), times.of_block(block.form, block.far)
        last = first if known is None else BlockWay(known.plan)
        found.append(
            LayerResult(
                block.name, block.weight, str(first), times.seconds(block, first), str(last),
                None if known is None else known.seconds, times.seconds(block, BlockWay()),
            )
        )  # fmt: skip
    return found


@dataclass(frozen=True, slots=True)
class Limits:
    """`blockings` of each algorithm are measured, until `until` (`time.monotonic`)."""

    blockings: int = 8
    until: float = math.inf


Tell = Callable[[int, int, str], None]
"""Called with the number of layers that are done, the number of all, and a note."""


def measure_layers(
    layers: Sequence[Measurable[Any]],
    machine: Machine,
    store: Store,
    pool: Pool | PoolOptions,
    limits: Limits,
    tell: Tell | None = None,
) -> list[str]:
    """Measure the algorithms and blockings of layers, those that take longest first. What the store knows already is
    not measured again. Returns remarks on layers that could not be measured. `pool`: from options one starts when there
    is something to measure.

    Raises PoolError if nothing can be measured.
    """
    remarks = []
    options, given = (pool.options, pool) if isinstance(pool, Pool) else (pool, None)
    setting = Setting.on(options.device, machine.target(), options.threads, flushed=True)
    with contextlib.ExitStack() as at_end:
        session = _Session(machine, store, options, setting, limits, at_end, given)
        for done, layer in enumerate(sorted(layers, key=lambda each: -each.work)):
            if tell is not None:
                tell(done, len(layers), layer.name)
            try:
                session.measure(layer)
            except BackendError as error:  # the plain kernel does not compile or run alone
                remarks.append(f"{layer.name} could not be measured: {error}")
    return remarks


def deviation(pool: Pool, kernel: Kernel, arguments: Sequence[Floats] | None, expected: Floats) -> str | None:
    """What is wrong with the results of a kernel for these arguments; None if they are as expected, or if there are no
    arguments."""
    if arguments is None:
        return None
    try:
        (found,) = pool.called(kernel, arguments)
    except BackendError as error:
        return str(error)
    off, largest = float(np.abs(found - expected).max()), float(np.abs(expected).max())
    if off <= _DEVIATION * largest:
        return None
    return f"its results are off by {off:.1e}, where the largest is {largest:.1e}"


@dataclass(slots=True)
class _Session:
    machine: Machine
    store: Store
    options: PoolOptions
    setting: Setting
    limits: Limits
    at_end: contextlib.ExitStack
    _pool: Pool | None = None
    _expected: dict[str, Floats] = field(default_factory=dict)

    def measure(self, layer: Measurable[W]) -> None:
        """Measure what is not known of a layer."""
        promising = layer.ways(self.machine, self.limits.blockings)
        known = {(k.way, k.key) for k in self._kept(layer)}
        new = [
            way
            for way in self._kernels(layer, promising)[0]
            if (way, key_of(layer, way, self.machine)) not in known
        ]
        self._time(layer, new, 1)
        for _ in range(_PASSES):
            again = self._unsettled(layer)
            if not again or self._over():
                break
            self._time(layer, again, CONFIRMED - 1)
        self._expected.clear()

    def _over(self) -> bool:
        return time.monotonic() >= self.limits.until

    def _kept(self, layer: Measurable[W]) -> list[_Known[W]]:
        return _kept(self.store, layer, self.setting)

    def _unsettled(self, layer: Measurable[W]) -> list[W]:
        """The leading kernels of each group, with the untuned ones, where one of them was measured too seldom."""
        kept = [k for k in self._kept(layer) if not k.failed]
        kept = [k for k in kept if layer.is_current(k.way, k.key, self.machine)]
        found: list[W] = []
        for untuned in layer.untuned(self.machine):
            some = sorted((k for k in kept if k.way.group == untuned.group), key=lambda k: k.seconds)
            near = [k for k in some if k.seconds <= _NEAR * some[0].seconds][:_LEADERS]
            leading = [k for k in some if k in near or k.way == untuned]
            if any(k.count < CONFIRMED for k in leading):
                found += [k.way for k in leading]
        return found

    def _time(self, layer: Measurable[W], some: Sequence[W], rounds: int) -> None:
        """Build kernels, check them, and time them in turns."""
        if not some or self._over():
            return
        ways, modules = self._kernels(layer, some)
        with self._built(modules) as built:
            running: list[tuple[W, list[Kernel]]] = []
            for way, found in zip(ways, built):
                error = next((part.error for part in found if isinstance(part, Measurement)), None)
                parts = [part for part in found if isinstance(part, Kernel)]
                if error is None and len(parts) == len(found) and not self._over():
                    error = self._deviation(layer, way, parts[0])
                if error is not None:
                    self._put(layer, way, Measurement(error=error))
                elif len(parts) == len(found):
                    running.append((way, parts))
            for _ in range(rounds):
                for way, parts in list(running):
                    if self._over():
                        return
                    outcome = self._timed(layer, parts)
                    self._put(layer, way, outcome)
                    if outcome.error is not None:
                        running.remove((way, parts))

    def _kernels(self, layer: Measurable[W], some: Sequence[W]) -> tuple[list[W], list[Sequence[IRModule]]]:
        """Those ways that have kernels, and these."""
        ways, modules = [], []
        for way in some:
            try:
                modules.append(layer.kernels(way, self.machine))
            except BackendError:
                if way in layer.untuned(self.machine)[:1]:
                    raise
                continue
            ways.append(way)
        return ways, modules

    @contextlib.contextmanager
    def _built(
        self, modules: Sequence[Sequence[object]]
    ) -> Iterator[list[list[Kernel | Measurement | None]]]:
        """The kernels of several ways, which consist of several each."""
        if self._pool is None:
            self._pool = self.at_end.enter_context(Pool(self.options))
        flat = [module for several in modules for module in several]
        with self._pool.built(self.machine.target(), flat, self.limits.until) as found:
            left = iter(found)
            yield [[next(left) for _ in several] for several in modules]

    def _deviation(self, layer: Measurable[W], way: W, kernel: Kernel) -> str | None:
        """What is wrong with the results of a kernel; None if they are as expected, or not compared."""
        assert self._pool is not None
        if layer.key not in self._expected:
            self._expected[layer.key] = layer.expected(self.machine)
        return deviation(self._pool, kernel, layer.arguments(way, self.machine), self._expected[layer.key])

    def _timed(self, layer: Measurable[Any], parts: Sequence[Kernel]) -> Measurement:
        """The time of all kernels of a way."""
        assert self._pool is not None
        timing = replace(self.options.timing, others=last_level() if layer.far else 0)
        outcomes = [self._pool.timed(part, timing) for part in parts]
        if len(outcomes) == 1:
            return outcomes[0]
        error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
        if error is not None:
            return Measurement(error=error)
        return Measurement((sum(outcome.median for outcome in outcomes),))

    def _put(self, layer: Measurable[W], way: W, outcome: Measurement) -> None:
        key = key_of(layer, way, self.machine)
        record = Record(
            layer.key, self.setting, key, way.text, "[]", outcome.seconds, outcome.error, time.time()
        )
        self.store.put(record)
