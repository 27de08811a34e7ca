"""Chooses an algorithm for each convolution and product: the fastest ones whose errors together stay within a budget.

A plain algorithm does all multiplications of the layer's definition. Rounding errors of layers add up as variances. The
unit of variance, called a share, is the variance that a layer with a plain algorithm adds. A layer whose algorithm
rounds r times as much adds r^2 shares. The shares of a graph of n layers with weights may add up to n times the square
of `BUDGET`. The graph's error is then about `BUDGET` times as large as with plain algorithms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol, TypeAlias

from xrlflow.backends.tvm.kernels import bands
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm, Blocking, LayerWorkload

BUDGET = 3.5
"""How many times larger the error of a graph may become. (The verification of a result accepts four times the
original's own error.)"""
WORST_CHANNEL = 6.0
"""An algorithm is not used in a layer if its error in one output channel is more than this many times the error of
plain sums.

Errors become so large on smooth images if weights take differences of pixels. (Winograd's F(4,3) has 3.1 to 5.9 times
the error of plain sums in layers of trained networks.)
"""


@dataclass(frozen=True, slots=True)
class AlgorithmOption:
    """An algorithm that can compute a layer, with its cost and its errors."""

    algorithm: Algorithm
    cost: float
    """The estimated or measured time, in the same unit for all layers; infinite if there is no estimate."""
    error: float = 1.0
    """The rounding error for usual images, divided by the error of plain algorithms."""
    blocking: Blocking | None = None
    """The blocking of the kernel; None: the blocking with the least estimated time."""
    most: float = 1.0
    """A bound of the rounding error for every image, divided by the error of plain algorithms."""

    @property
    def shares(self) -> float:
        return self.error**2


@dataclass(frozen=True, slots=True)
class Timed:
    """The fastest measured kernel of an algorithm: its seconds, and its blocking (None: the blocking with the least
    estimated time)."""

    seconds: float
    blocking: Blocking | None = None


Times: TypeAlias = Mapping[Algorithm, Timed | None]
"""The measurements of a layer, by algorithm. None: all kernels of the algorithm failed."""


@dataclass(frozen=True, slots=True)
class TimedBlock:
    """The fastest measured computation of an inverted residual: its seconds, and the blocking of the fused kernel
    (None: the fastest computation has one kernel for each convolution)."""

    seconds: float
    blocking: bands.BandBlocking | None = None


class Timings(Protocol):
    """A source of measured times of layers."""

    def of(self, workload: LayerWorkload, far: bool) -> Times:
        """The measurements of a layer; empty if there are none. `far`: whether the weights come from memory, not from
        caches."""
        ...

    def of_block(self, workload: bands.ConvBlock, far: bool) -> TimedBlock | None:
        """The measurement of an inverted residual; None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """The algorithm that was chosen for a layer of a compiled graph, with its estimated errors."""

    layer: str
    """The kind and dimensions of the layer, as text."""
    algorithm: str
    error: float
    """See `AlgorithmOption`."""
    share: float
    """The layer's part of the estimated variance of rounding errors of all layers with weights."""
    most: float = 1.0
    """See `AlgorithmOption`."""

    @property
    def plain(self) -> bool:
        return Algorithm(self.algorithm).m is None

    def stored(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.layer}: {self.algorithm}, {self.error:.1f} times the plain error (whatever the image: "
            f"{self.most:.0f} times its bound), {self.share:.0%} of all"
        )


def multiplies_less(choices: Iterable[AlgorithmChoice]) -> bool:
    """Whether an algorithm with fewer multiplications was chosen for one of the layers."""
    return not all(each.plain for each in choices)


@dataclass(frozen=True, slots=True)
class Algorithms:
    """Which algorithms convolutions and products may use."""

    exact: bool = False
    """Whether only plain algorithms are used. The estimated errors of other algorithms hold for usual images only.
    (Winograd's F(2,3) has 0.7 to 1.1 times the plain error, but about twice where most pixels are zero.)"""
    budget: float = BUDGET
    only: Algorithm | None = None
    """An algorithm that is used wherever it can be used, whatever it costs (for measurements); None: the cheapest."""
    timings: Timings | None = None
    """Measured times, which replace estimates."""
    blocks: bool = True
    """Whether an inverted residual may be one kernel."""
    packed_for: int = 0
    """If not 0: large products pack their weights as the fastest kernel for this number of rows does, so that kernels
    for other numbers of rows can share them."""

    def choose(self, layers: Sequence[Sequence[AlgorithmOption]], others: int) -> list[AlgorithmOption]:
        """Choose an option for each layer, so that the rounding errors together stay within the budget. The first
        option of each layer is a plain algorithm. `others`: the number of further layers with weights in the graph."""
        if self.only is not None:
            return [next((c for c in layer if c.algorithm is self.only), layer[0]) for layer in layers]
        if self.exact:
            layers = [[c for c in layer if c.algorithm.m is None] for layer in layers]
        spare = (len(layers) + others) * self.budget**2 - others
        return _cheapest(layers, spare)


def with_times(
    layers: Sequence[Sequence[AlgorithmOption]], times: Sequence[Times]
) -> list[list[AlgorithmOption]]:
    """The options of layers, in which measured seconds replace estimated costs.

    A layer counts as measured if its first option was measured. If another option of such a layer was not measured, its
    estimate is converted to seconds: by the ratio of the first option's seconds to the first option's estimate. An
    algorithm whose kernels all failed is removed. In layers that were not measured, the median of these ratios converts
    estimates to seconds. If no layer was measured, nothing changes.
    """
    ratios = [
        timed.seconds / layer[0].cost if (timed := measurements.get(layer[0].algorithm)) is not None else None
        for layer, measurements in zip(layers, times)
    ]
    if not (measured := [ratio for ratio in ratios if ratio is not None]):
        return [list(layer) for layer in layers]
    median = statistics.median(measured)
    return [
        [replace(c, cost=median * c.cost) for c in layer]
        if ratio is None
        else _timed(layer, measurements, ratio)
        for layer, measurements, ratio in zip(layers, times, ratios)
    ]


def _timed(layer: Sequence[AlgorithmOption], times: Times, ratio: float) -> list[AlgorithmOption]:
    """The options of a layer that was measured."""
    options = []
    for option in layer:
        if option.algorithm not in times:
            options.append(replace(option, cost=ratio * option.cost))
        elif (timed := times[option.algorithm]) is not None:
            options.append(replace(option, cost=timed.seconds, blocking=timed.blocking))
    return options


def _cheapest(layers: Sequence[Sequence[AlgorithmOption]], shares: float) -> list[AlgorithmOption]:
    """One option for each layer, with a small sum of costs. Their shares of the error budget add up to at most
    `shares`.

    At first each layer has its cheapest option. Then one layer after another changes to the option with the smallest
    increase of cost for each saved share, until the shares suffice (the greedy solution of the knapsack problem).
    """
    selected = [min(layer, key=lambda c: (c.cost, c.shares)) for layer in layers]
    while sum(c.shares for c in selected) > shares:
        steps = [
            (_price(now, other), at, other)
            for at, (now, layer) in enumerate(zip(selected, layers))
            for other in layer
            if other.shares < now.shares
        ]
        if not steps:
            break
        _, at, other = min(steps, key=lambda step: step[:2])
        selected[at] = other
    return selected


def _price(now: AlgorithmOption, other: AlgorithmOption) -> float:
    """The additional cost of the option `other`, compared with `now`, for each share of the error budget that it
    saves."""
    return (other.cost - now.cost) / (now.shares - other.shares)


def shared_out(
    names: Sequence[str], selected: Sequence[AlgorithmOption], others: int
) -> list[AlgorithmChoice]:
    """The selected options, each with its part of the variance of rounding errors of all layers."""
    total = math.fsum(c.shares for c in selected) + others
    return [
        AlgorithmChoice(name, c.algorithm.value, c.error, c.shares / total, c.most)
        for name, c in zip(names, selected)
    ]


DEFAULT = Algorithms()
