"""What a store knows of the kernels of layers (convolutions, products, blocks of convolutions), and what tuning made of
them.

The least of many noisy times is a lucky one: what was measured often enough counts, and another kernel must beat that
of an untuned compilation by a margin.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.kernels import bands
from xrlflow.backends.tvm.kernels.algorithms import AlgorithmChoice, Timed, TimedBlock, Times, Timings
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm, Floats, KernelChoice, LayerWorkload
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.tuning.blocks import Block, BlockChoice, Kernels
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.measurable import Measurable, W
from xrlflow.tuning.pool import Kernel, Pool
from xrlflow.tuning.store import CONFIRMED, Setting, Store
from xrlflow.tuning.tuners.protocol import Measurement

if TYPE_CHECKING:
    pass

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

    def of(self, workload: LayerWorkload, far: bool) -> Times:
        self.layers.append(Layer(workload, far))
        return {} if self._known is None else self._known.of(workload, far)

    def of_block(self, workload: bands.ConvBlock, far: bool) -> TimedBlock | None:
        self.blocks.append(Block(workload, far))
        return None if self._known is None else self._known.of_block(workload, far)


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

    def of(self, workload: LayerWorkload, far: bool) -> Times:
        found = self._used(Layer(workload, far))[1]
        return {
            algorithm: None if best is None else Timed(best.seconds, best.choice.blocking)
            for algorithm in Algorithm
            if algorithm in found
            for best in [found[algorithm]]
        }

    def of_block(self, workload: bands.ConvBlock, far: bool) -> TimedBlock | None:
        """What an untuned compilation chooses is kept, too, unless another way is faster by a margin."""
        block = Block(workload, far)
        found = self._used(block)[1]
        if (apart := found.get(Kernels.APART)) is None:
            return None
        if (fused := found[Kernels.BANDS]) is None:
            return TimedBlock(apart.seconds)
        usual, other = (fused, apart) if block.usual(self.machine).blocking is not None else (apart, fused)
        best = other if other.seconds < _WORTH * usual.seconds else usual
        return TimedBlock(best.seconds, best.choice.blocking)

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
            some = [known for known in kept if known.choice.group == untuned.group]
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
            as_fast = known.choice == untuned and not known.failed and best.seconds > _WORTH * known.seconds
            if as_fast and self._is_current(layer, known):
                return known
        return best

    def _is_current(self, layer: Measurable[W], known: _Known[W]) -> bool:
        return layer.is_current(known.choice, known.key, self.machine)

    def seconds(self, layer: Measurable[W], choice: W) -> float | None:
        """The median time of a kernel, at the distance whose times are used; None if it is not known there."""
        for known in _kept(self.store, self._used(layer)[0], self.setting):
            if known.choice == choice and not known.failed and self._is_current(layer, known):
                return known.seconds
        return None


@dataclass(frozen=True, slots=True)
class _Known(Generic[W]):
    """What the store has of a kernel. `failed`: the last time. `seconds`: the median of `count` measurements."""

    choice: W
    key: str
    seconds: float
    count: int
    failed: bool


def _kept(store: Store, layer: Measurable[W], setting: Setting) -> list[_Known[W]]:
    groups: dict[tuple[W, str], list[Measurement]] = {}
    for record in store.known(layer.key, setting):
        if (choice := layer.stored(record.trace)) is not None:
            groups.setdefault((choice, record.candidate), []).append(record.outcome)
    return [
        _Known(choice, key, _median(outcomes), len(outcomes), outcomes[-1].error is not None)
        for (choice, key), outcomes in groups.items()
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
    before: Iterable[tuple[Layer, AlgorithmChoice]],
    after: Iterable[tuple[Layer, AlgorithmChoice]],
    times: StoredTimes,
    untuned: Callable[[Layer, Algorithm], KernelChoice],
) -> list[LayerResult]:
    """The kernels of each layer before and after tuning, with their times; equal layers share an entry.

    `before`, `after`: the layers of both models with the kernels chosen for them. A layer that was computed within a
    block before counts as untuned, with a plain algorithm. `untuned`: the kernel of an algorithm without tuning.
    """
    found: dict[tuple[str, str, str], LayerResult] = {}
    algorithms: dict[str, deque[Algorithm]] = defaultdict(deque)
    for layer, chosen in before:
        algorithms[layer.key].append(Algorithm(chosen.algorithm))
    for layer, chosen in after:
        known = times.of(layer.workload, layer.far)
        earlier_ones = algorithms[layer.key] or deque(layer.needed(times.machine))
        first = untuned(layer, earlier_ones.popleft())
        algorithm = Algorithm(chosen.algorithm)
        best = known.get(algorithm)
        last = untuned(layer, algorithm) if best is None else KernelChoice(algorithm, best.blocking)
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
        first, known = block.usual(times.machine), times.of_block(block.workload, block.far)
        last = first if known is None else BlockChoice(known.blocking)
        found.append(
            LayerResult(
                block.name, block.weight, str(first), times.seconds(block, first), str(last),
                None if known is None else known.seconds, times.seconds(block, BlockChoice()),
            )
        )  # fmt: skip
    return found


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
