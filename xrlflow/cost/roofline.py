"""The roofline cost model: operations and bytes of each operator against the machine's speed.

time = overhead + max(operations / reachable peak, bytes / reachable bandwidth)   (Williams et al., 2009)

with what ONNX Runtime's CPU kernels do to the two terms:

- Output channels and columns come in blocks of a vector's lanes; a convolution pads its input channels as well.
- A grouped convolution runs in blocks only if its channels per group are a multiple of the lanes. Otherwise it is
  one small matrix product per group and reaches a fraction of the peak, smaller with fewer channels.
- Small calls run on one thread, since waking the others takes longer than they save.
- What exceeds the cache streams from memory. A product of few rows is then bound by its weights.

What it does not see: fusion. ONNX Runtime folds activations into convolutions, and bias into products; here they cost
their own pass. That keeps a price local to its node, hence deltas exact, and flatters rewrites that fold
elementwise operators. The end-to-end measurement decides last.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import ceil, fsum, log

from xrlflow.cost.machine import Machine
from xrlflow.cost.model import AdditiveCost, InTypes
from xrlflow.ir import Graph, Node
from xrlflow.ops.work import OpKind, Work, bodies, work

# Steps of a product's inner loop that its start costs (loading and storing the block of results).
_LOOP_START = 8


class Roofline(AdditiveCost):
    """Prices from a machine's figures alone: no measurement per operator, the same everywhere."""

    def __init__(self, machine: Machine | None = None, bindings: Mapping[str, int] | None = None) -> None:
        super().__init__(bindings)
        self.machine = machine or Machine.reference()

    @property
    def name(self) -> str:
        return "roofline"

    def price(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        inside = list(bodies(node, in_types, self.bindings, graph.leaves.consts))
        if inside:
            return self.machine.overhead + fsum(t * (self.machine.overhead + self.cost(b)) for b, t in inside)
        return seconds(work(node, in_types, self.bindings), self.machine)


def seconds(w: Work, machine: Machine) -> float:
    """Seconds of one call that does this work."""
    if w.kind is OpKind.VIEW:
        return machine.overhead
    speed = machine.speeds[w.kind]
    peak = machine.peak * reachable(w, machine) * 32 / max(w.bits, 16)
    computing = w.flops / peak if w.flops else 0.0
    bandwidth = machine.cache_bandwidth if w.footprint <= machine.cache else machine.memory_bandwidth
    spread = max(computing, w.bytes / (bandwidth * speed.bandwidth))
    return machine.overhead + min(spread * machine.threads, spread + machine.fork)


def reachable(w: Work, machine: Machine) -> float:
    """The part of the peak that this work can reach: what its kind does, less what padding wastes."""
    gemm, lanes = w.gemm, machine.lanes
    part = machine.speeds[w.kind].compute
    if gemm is None or w.kind is OpKind.DEPTHWISE_CONV:
        return part
    if w.kind is OpKind.GROUPED_CONV and (w.channels % lanes or gemm.n % lanes):
        return min(part, _between(machine.grouped, w.channels, lanes, part))
    part *= gemm.n / _padded(gemm.n, lanes) if gemm.n > 1 else 1.0
    if w.channels > lanes:
        part *= w.channels / _padded(w.channels, lanes)
    return part * gemm.k / (gemm.k + _LOOP_START)


def _padded(n: int, lanes: int) -> int:
    return ceil(n / lanes) * lanes


def _between(points: tuple[tuple[int, float], ...], channels: int, lanes: int, top: float) -> float:
    """Interpolates on logarithmic axes; beyond the last point towards `top` at four times the lanes."""
    points = (*points, (4 * lanes, top))
    if channels <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if channels <= x1:
            share = log(channels / x0) / log(x1 / x0)
            return float(y0 * (y1 / y0) ** share)
    return top
