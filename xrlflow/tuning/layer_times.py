"""The measured times of layers (convolutions, products, inverted residuals) in a store, and the results of tuning.

The least of many noisy times is low by chance. So kernels that were measured often enough are preferred, and another
kernel than the untuned compilation's is used only if it is faster by a margin.
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

# The leading kernels of an algorithm: at most the first number of kernels, and slower than the fastest by at most the
# second number as a factor.
_LEADERS, _NEAR = 3, 1.05
# How often the leading kernels are measured again. Other kernels may lead after each time.
_PASSES = 3
# A measured blocking must take less than this fraction of the untuned blocking's time (see
# `tuning.one_shot.times.WORTH`).
_WORTH = 0.97
# The largest deviation from the expected results, relative to the largest expected result.
_DEVIATION = 2e-5


class LayerLog:
    """Timings that record all layers whose times a compilation requests, because these layers can be measured. `known`:
    the timings from which the times are returned (None: no times are returned)."""

    def __init__(self, known: Timings | None = None) -> None:
        self._best_kernels = known
        self.layers: list[Layer] = []
        """The recorded layers, in the order of the model."""
        self.blocks: list[Block] = []

    def of(self, workload: LayerWorkload, far: bool) -> Times:
        self.layers.append(Layer(workload, far))
        return {} if self._best_kernels is None else self._best_kernels.of(workload, far)

    def of_block(self, workload: bands.ConvBlock, far: bool) -> TimedBlock | None:
        self.blocks.append(Block(workload, far))
        return None if self._best_kernels is None else self._best_kernels.of_block(workload, far)


Called = TypeVar("Called", Layer, Block)


def together(layers: Iterable[Called]) -> list[Called]:
    """Each of the layers once, with the number of its calls as its weight."""
    layers_by_key: dict[str, Called] = {}
    for layer in layers:
        earlier = layers_by_key.get(layer.key)
        layers_by_key[layer.key] = (
            layer if earlier is None else replace(earlier, weight=earlier.weight + layer.weight)
        )
    return list(layers_by_key.values())


@dataclass(frozen=True, slots=True)
class StoredTimes:
    """The `Timings` that a store contains. If a layer was measured only with weights from caches although they come
    from memory, or the other way round, those times are used."""

    store: Store
    machine: Machine
    setting: Setting

    @staticmethod
    def on(store: Store, machine: Machine, threads: int, device: str | None = None) -> StoredTimes:
        """The times of a device (None: this machine)."""
        return StoredTimes(store, machine, Setting.on(device, machine.target(), threads, flushed=True))

    def of(self, workload: LayerWorkload, far: bool) -> Times:
        measured = self._used(Layer(workload, far))[1]
        return {
            algorithm: None if best is None else Timed(best.seconds, best.choice.blocking)
            for algorithm in Algorithm
            if algorithm in measured
            for best in [measured[algorithm]]
        }

    def of_block(self, workload: bands.ConvBlock, far: bool) -> TimedBlock | None:
        """The measured choice for an inverted residual: the untuned compilation's choice, unless another choice is
        faster by a margin. None without measurements."""
        block = Block(workload, far)
        measured = self._used(block)[1]
        if (apart := measured.get(Kernels.APART)) is None:
            return None
        if (fused := measured[Kernels.BANDS]) is None:
            return TimedBlock(apart.seconds)
        untuned, other = (
            (fused, apart) if block.untuned_choice(self.machine).blocking is not None else (apart, fused)
        )
        best = other if other.seconds < _WORTH * untuned.seconds else untuned
        return TimedBlock(best.seconds, best.choice.blocking)

    def _used(self, layer: Measurable[W]) -> tuple[Measurable[W], dict[Hashable, _MeasuredKernel[W] | None]]:
        """The layer with weights where they were in the measurements (memory or caches), and the best kernels by group;
        an empty mapping if too few kernels were measured."""
        for at in (layer, layer.at(not layer.far)):
            measured = self._best_kernels(at)
            needed = layer.needed(self.machine)
            if measured.get(needed[0]) is not None and measured.keys() >= set(needed):
                return at, measured
        return layer, {}

    def _best_kernels(self, layer: Measurable[W]) -> dict[Hashable, _MeasuredKernel[W] | None]:
        """The best measured kernel of each group of choices; None: all kernels of the group failed. Groups without
        measurements are left out."""
        kernels = _measured_kernels(self.store, layer, self.setting)
        best_kernels: dict[Hashable, _MeasuredKernel[W] | None] = {}
        for untuned in layer.untuned(self.machine) if kernels else ():
            some = [kernel for kernel in kernels if kernel.choice.group == untuned.group]
            best = next((kernel for kernel in _ranked(some) if self._is_current(layer, kernel)), None)
            if best is not None:
                best_kernels[untuned.group] = self._better(layer, best, untuned, some)
            elif any(kernel.failed and self._is_current(layer, kernel) for kernel in some):
                best_kernels[untuned.group] = None
        return best_kernels

    def _better(
        self, layer: Measurable[W], best: _MeasuredKernel[W], untuned: W, some: Sequence[_MeasuredKernel[W]]
    ) -> _MeasuredKernel[W]:
        """The kernel to use: the best kernel, unless the untuned kernel is as fast."""
        for kernel in some:
            as_fast = (
                kernel.choice == untuned and not kernel.failed and best.seconds > _WORTH * kernel.seconds
            )
            if as_fast and self._is_current(layer, kernel):
                return kernel
        return best

    def _is_current(self, layer: Measurable[W], kernel: _MeasuredKernel[W]) -> bool:
        return layer.is_current(kernel.choice, kernel.key, self.machine)

    def seconds(self, layer: Measurable[W], choice: W) -> float | None:
        """The median seconds of a choice's kernel, measured with weights from memory or from caches as in `_used`; None
        if the kernel was not measured."""
        for kernel in _measured_kernels(self.store, self._used(layer)[0], self.setting):
            if kernel.choice == choice and not kernel.failed and self._is_current(layer, kernel):
                return kernel.seconds
        return None


@dataclass(frozen=True, slots=True)
class _MeasuredKernel(Generic[W]):
    """The measurements of a kernel in the store. `failed`: whether the last measurement failed. `seconds`: the median
    of `count` measurements."""

    choice: W
    key: str
    seconds: float
    count: int
    failed: bool


def _measured_kernels(store: Store, layer: Measurable[W], setting: Setting) -> list[_MeasuredKernel[W]]:
    groups: dict[tuple[W, str], list[Measurement]] = {}
    for record in store.records(layer.key, setting):
        if (choice := layer.stored(record.trace)) is not None:
            groups.setdefault((choice, record.candidate), []).append(record.outcome)
    return [
        _MeasuredKernel(choice, key, _median(outcomes), len(outcomes), outcomes[-1].error is not None)
        for (choice, key), outcomes in groups.items()
    ]


def _median(outcomes: Sequence[Measurement]) -> float:
    times = [outcome.median for outcome in outcomes if outcome.error is None]
    return statistics.median(times) if times else math.inf


def _ranked(some: Sequence[_MeasuredKernel[W]]) -> list[_MeasuredKernel[W]]:
    """The kernels of one group, fastest first. If some of them were measured often enough, all other kernels are left
    out."""
    running = [kernel for kernel in some if not kernel.failed]
    often = [kernel for kernel in running if kernel.count >= CONFIRMED] or running
    return sorted(often, key=lambda kernel: kernel.seconds)


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The result of tuning for a layer, which the model calls `calls` times.

    `heuristic`, `chosen`: the kernels that an untuned and a tuned compilation use, with their seconds (None: not
    measured). `plain_seconds`: the time of the plain algorithm (for an inverted residual: the time of one kernel for
    each convolution). Both kernels stay within the same budget of rounding errors, so `chosen` need not be the fastest.
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

    `before`, `after`: the layers of both models with the algorithms chosen for them. A layer that belonged to an
    inverted residual before tuning counts as untuned, with a plain algorithm. `untuned`: returns the kernel that an
    untuned compilation uses for a layer and an algorithm.
    """
    rows: dict[tuple[str, str, str], LayerResult] = {}
    algorithms: dict[str, deque[Algorithm]] = defaultdict(deque)
    for layer, chosen in before:
        algorithms[layer.key].append(Algorithm(chosen.algorithm))
    for layer, chosen in after:
        measured = times.of(layer.workload, layer.far)
        earlier_ones = algorithms[layer.key] or deque(layer.needed(times.machine))
        first = untuned(layer, earlier_ones.popleft())
        algorithm = Algorithm(chosen.algorithm)
        best = measured.get(algorithm)
        last = untuned(layer, algorithm) if best is None else KernelChoice(algorithm, best.blocking)
        plain = measured.get(layer.needed(times.machine)[0])
        key = (layer.key, str(first), str(last))
        earlier = rows.get(key)
        rows[key] = LayerResult(
            layer.name, 1 if earlier is None else earlier.calls + 1,
            str(first), times.seconds(layer, first), str(last), None if best is None else best.seconds,
            None if plain is None else plain.seconds,
        )  # fmt: skip
    return list(rows.values())


def block_results(blocks: Iterable[Block], times: StoredTimes) -> list[LayerResult]:
    """The kernels of inverted residuals before and after tuning, with their times. Equal blocks share an entry."""
    rows = []
    for block in together(blocks):
        first, measured = block.untuned_choice(times.machine), times.of_block(block.workload, block.far)
        last = first if measured is None else BlockChoice(measured.blocking)
        rows.append(
            LayerResult(
                block.name, block.weight, str(first), times.seconds(block, first), str(last),
                None if measured is None else measured.seconds, times.seconds(block, BlockChoice()),
            )
        )  # fmt: skip
    return rows


def deviation(pool: Pool, kernel: Kernel, arguments: Sequence[Floats] | None, expected: Floats) -> str | None:
    """A message about wrong results of a kernel for these arguments; None if the results are as expected, or if
    `arguments` is None."""
    if arguments is None:
        return None
    try:
        (output,) = pool.called(kernel, arguments)
    except BackendError as error:
        return str(error)
    off, largest = float(np.abs(output - expected).max()), float(np.abs(expected).max())
    if off <= _DEVIATION * largest:
        return None
    return f"its results are off by {off:.1e}, where the largest is {largest:.1e}"
