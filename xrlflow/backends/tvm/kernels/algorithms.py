"""Which algorithm each convolution or product gets: the fastest ones whose errors together stay within a budget.

A plain algorithm multiplies as often as the layer says. Errors of layers add up as variances. A layer that rounds r
times as much as with a plain algorithm takes r^2 shares of the variance; with a plain one it takes one, like each other
layer with weights. The shares of a graph of n layers may add up to n times the budget squared: then the whole graph
rounds about as many times as much as with plain algorithms.
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
"""The verification of a result accepts four times the original's own error."""
WORST_CHANNEL = 6.0
"""A layer keeps its plain algorithm if another one rounds more times as much in an output channel: with weights that
take differences of pixels, for instance, on smooth images. (F(4,3) has 3.1 to 5.9 in layers of trained networks.)"""


@dataclass(frozen=True, slots=True)
class AlgorithmOption:
    """An algorithm for a layer. `cost`: time, estimated or measured, in the unit of all layers; infinite if there is no
    estimate. `error`: relative to that of plain algorithms, for usual images. `plan`: the blocking; None: the one with
    the least estimated time. `most`: the bound of the error for every image, relative to that of plain algorithms."""

    algorithm: Algorithm
    cost: float
    error: float = 1.0
    blocking: Blocking | None = None
    most: float = 1.0

    @property
    def shares(self) -> float:
        return self.error**2


@dataclass(frozen=True, slots=True)
class Timed:
    """The fastest kernel of an algorithm that was measured: its seconds, and its blocking (None: the one with the least
    estimated time)."""

    seconds: float
    blocking: Blocking | None = None


Times: TypeAlias = Mapping[Algorithm, Timed | None]
"""What was measured of a layer's algorithms. None: all kernels of the algorithm failed."""


@dataclass(frozen=True, slots=True)
class TimedBlock:
    """The fastest way of a depthwise convolution with its neighbours that was measured: its seconds, and the blocking
    of the kernel in bands (None: one kernel for each convolution)."""

    seconds: float
    blocking: bands.BandBlocking | None = None


class Timings(Protocol):
    """Measured times of layers."""

    def of(self, workload: LayerWorkload, far: bool) -> Times:
        """What is known of a layer; empty if it was not measured. `far`: its weights come from memory."""
        ...

    def of_block(self, workload: bands.ConvBlock, far: bool) -> TimedBlock | None:
        """The same of a depthwise convolution with its neighbours; None if it was not measured."""
        ...


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """The algorithm of a layer in a compiled graph. `share`: its part of the estimated variance of rounding errors of
    all layers with weights. `layer`: the kind and sizes of the layer. `error`, `most`: see `Choice`."""

    layer: str
    algorithm: str
    error: float
    share: float
    most: float = 1.0

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


def multiplies_less(chosen: Iterable[AlgorithmChoice]) -> bool:
    """Whether a layer has an algorithm that is not plain."""
    return not all(each.plain for each in chosen)


@dataclass(frozen=True, slots=True)
class Algorithms:
    """What convolutions and products may use. `exact`: plain algorithms, which alone round no more than that for every
    image: estimated errors are those of usual ones. (F(2,3) has 0.7 to 1.1 times the plain error, but about twice where
    most pixels are zero.) `only`: this algorithm wherever it can be used, whatever it costs (for measurements).
    `timings`: times that take the place of estimates where they are known. `blocks`: whether a depthwise convolution
    and its neighbours may be one kernel."""

    exact: bool = False
    budget: float = BUDGET
    only: Algorithm | None = None
    timings: Timings | None = None
    blocks: bool = True

    def choose(self, layers: Sequence[Sequence[AlgorithmOption]], others: int) -> list[AlgorithmOption]:
        """A choice for each layer, whose first choice is plain. `others`: how many more layers with weights the graph
        has."""
        if self.only is not None:
            return [next((c for c in layer if c.algorithm is self.only), layer[0]) for layer in layers]
        if self.exact:
            layers = [[c for c in layer if c.algorithm.m is None] for layer in layers]
        spare = (len(layers) + others) * self.budget**2 - others
        return _cheapest(layers, spare)


def with_times(
    layers: Sequence[Sequence[AlgorithmOption]], times: Sequence[Times]
) -> list[list[AlgorithmOption]]:
    """The choices of layers, their estimated costs replaced by measured seconds.

    A layer was measured if its first choice was. There, what was not measured of it costs its estimate times the
    ratio of the first one's seconds to its estimate, and an algorithm whose kernels all failed is no choice. In
    other layers the median ratio makes seconds of estimates. Without measured layers all remain as they are.
    """
    ratios = [
        known.seconds / layer[0].cost if (known := found.get(layer[0].algorithm)) is not None else None
        for layer, found in zip(layers, times)
    ]
    if not (measured := [ratio for ratio in ratios if ratio is not None]):
        return [list(layer) for layer in layers]
    usual = statistics.median(measured)
    return [
        [replace(c, cost=usual * c.cost) for c in layer] if ratio is None else _timed(layer, found, ratio)
        for layer, found, ratio in zip(layers, times, ratios)
    ]


def _timed(layer: Sequence[AlgorithmOption], times: Times, ratio: float) -> list[AlgorithmOption]:
    """The choices of a layer that was measured."""
    choices = []
    for choice in layer:
        if choice.algorithm not in times:
            choices.append(replace(choice, cost=ratio * choice.cost))
        elif (found := times[choice.algorithm]) is not None:
            choices.append(replace(choice, cost=found.seconds, blocking=found.blocking))
    return choices


def _cheapest(layers: Sequence[Sequence[AlgorithmOption]], shares: float) -> list[AlgorithmOption]:
    """The choices that cost least, of at most so many shares together: from the cheapest of all, those are given up
    that save least for the shares that they take (a greedy solution of the knapsack problem)."""
    chosen = [min(layer, key=lambda c: (c.cost, c.shares)) for layer in layers]
    while sum(c.shares for c in chosen) > shares:
        steps = [
            (_price(now, other), at, other)
            for at, (now, layer) in enumerate(zip(chosen, layers))
            for other in layer
            if other.shares < now.shares
        ]
        if not steps:
            break
        _, at, other = min(steps, key=lambda step: step[:2])
        chosen[at] = other
    return chosen


def _price(now: AlgorithmOption, other: AlgorithmOption) -> float:
    """What is lost for each share that is gained by another choice."""
    return (other.cost - now.cost) / (now.shares - other.shares)


def shared_out(names: Sequence[str], chosen: Sequence[AlgorithmOption], others: int) -> list[AlgorithmChoice]:
    """What was chosen, with each layer's part of the variance."""
    total = math.fsum(c.shares for c in chosen) + others
    return [
        AlgorithmChoice(name, c.algorithm.value, c.error, c.shares / total, c.most)
        for name, c in zip(names, chosen)
    ]


DEFAULT = Algorithms()
