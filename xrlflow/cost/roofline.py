"""The roofline cost model: operations and bytes of each operator against the machine's speed.

time = overhead + max(operations / reachable peak, bytes / reachable bandwidth)   (Williams et al., 2009)

adjusted to ONNX Runtime's CPU kernels:

- Output channels and columns are computed in blocks of as many as a vector has lanes; convolutions pad input channels
  as well.
- A grouped convolution runs in blocks only if its channels per group are a multiple of the lanes. Otherwise it is one
  small matrix product per group and reaches a fraction of the peak rate; the fewer channels, the less.
- Small calls run on one thread, since waking the other threads takes longer than they save.
- Where there is no kernel for float16, the runtime casts to float32 before the operator and back behind it. It casts
  constants once, when it loads the model.
- Convolutions of integers copy the image for each position in the kernel, and those of signed weights have no fast
  product.
- Data that exceeds the cache streams from memory. A product of few rows is then bound by its weights.

The roofline does not see fusion. ONNX Runtime fuses activations with convolutions and biases with products; in this
model each of these operators reads and writes memory by itself. So the cost of an operator does not depend on its
neighbours, and deltas are exact; but the model exaggerates the gain of rewrites that fold elementwise operators. In the
end, measurements of whole models decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import ceil, fsum, log

from xrlflow.backends.onnxruntime.kernels import supports
from xrlflow.cost.machine import Machine
from xrlflow.cost.model import AdditiveCost, InTypes
from xrlflow.ir import ABSENT, NO_ATTRS, DType, Graph, Node, TensorType
from xrlflow.ops.schema import split_op
from xrlflow.ops.work import OpKind, Work, bodies, work

# The time of ConvInteger in that of Conv in float32: with groups or without, of signed weights or of unsigned ones.
# Measured on Zen 4 (with VNNI), 7 layers of MobileNetV2 and ResNet: 3.6 to 19 and 0.5 to 0.9, 12 and 3.
_INTEGERS = {(False, True): 7.0, (False, False): 0.8, (True, True): 12.0, (True, False): 3.0}
# Starting a product's inner loop (loading and storing the block of results) takes as long as this many steps of the
# loop.
_LOOP_START = 8


class Roofline(AdditiveCost):
    """Computes the cost of each operator from a machine's figures. No operator is measured, so equal figures give equal
    costs."""

    def __init__(self, machine: Machine | None = None, bindings: Mapping[str, int] | None = None) -> None:
        super().__init__(bindings)
        self.machine = machine or Machine.reference()
        self.lanes = self.machine.lanes

    @property
    def name(self) -> str:
        return "roofline"

    def price(self, graph: Graph, node: Node, in_types: InTypes) -> float:
        inside = list(bodies(node, in_types, self.bindings, graph.leaves.consts))
        if inside:
            return self.machine.overhead + fsum(t * (self.machine.overhead + self.cost(b)) for b, t in inside)
        if node.op == "ConvInteger":
            return self._price_of_integers(node, in_types)
        if not any(t is not None and t.dtype == DType.FLOAT16 for t in (*in_types, *node.types)):
            return seconds(work(node, in_types, self.bindings), self.machine)
        return self._price_of_half(node, in_types)

    def _price_of_half(self, node: Node, in_types: InTypes) -> float:
        """Seconds of a node that reads or writes float16, with the Casts that the runtime adds."""
        types = [t for t in (*in_types, *node.types) if t is not None]
        domain, name = split_op(node.op)
        used = {t.dtype.name.lower() for t in types if t.dtype != DType.UNDEFINED}
        if supports(name, domain, used):
            return seconds(work(node, in_types, self.bindings), self.machine)
        wide = replace(node, types=tuple(map(_widened, node.types)))
        widened = [None if t is None else _widened(t) for t in in_types]
        price = seconds(work(wide, tuple(widened), self.bindings), self.machine)
        return price + fsum(self._cast(t) for t in types if t.dtype == DType.FLOAT16 and not t.const)

    def _price_of_integers(self, node: Node, in_types: InTypes) -> float:
        """Seconds of a convolution of integers, from those of one of floats."""
        done = work(node, in_types, self.bindings)
        grouped = done.kind in (OpKind.DEPTHWISE_CONV, OpKind.GROUPED_CONV)
        signed = in_types[1] is not None and in_types[1].dtype == DType.INT8
        return _INTEGERS[grouped, signed] * seconds(replace(done, bits=32), self.machine)

    def _cast(self, type: TensorType) -> float:
        """Seconds of a Cast from float16 to float32, or back."""
        cast = Node("Cast", (ABSENT,), (ABSENT,), (_widened(type),), NO_ATTRS)
        return seconds(work(cast, (type,), self.bindings), self.machine)


def _widened(type: TensorType) -> TensorType:
    """The type with float32 for float16."""
    return TensorType(DType.FLOAT, type.shape, type.const) if type.dtype == DType.FLOAT16 else type


def seconds(w: Work, machine: Machine) -> float:
    """Seconds of one call that does this work on the machine."""
    if w.kind is OpKind.VIEW:
        return machine.overhead
    speed = machine.speeds[w.kind]
    peak = machine.peak * reachable(w, machine) * 32 / max(w.bits, 16)
    computing = w.flops / peak if w.flops else 0.0
    bandwidth = machine.cache_bandwidth if w.footprint <= machine.cache else machine.memory_bandwidth
    spread = max(computing, w.bytes / (bandwidth * speed.bandwidth))
    return machine.overhead + min(spread * machine.threads, spread + machine.fork)


def reachable(w: Work, machine: Machine) -> float:
    """The part of the peak rate that this work can reach: the part for its kind of operator, less what padding
    wastes."""
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
    """Interpolate between `points` on logarithmic axes. Beyond the last point, approach `top`, which is reached at
    channels of four times the lanes."""
    points = (*points, (4 * lanes, top))
    if channels <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if channels <= x1:
            share = log(channels / x0) / log(x1 / x0)
            return float(y0 * (y1 / y0) ** share)
    return top
