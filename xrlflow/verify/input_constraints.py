"""The constraints that a graph puts on its inputs: each input is followed to the operators that read it.

An integer input that a Gather uses as an index must stay inside the table, also if a Cast, a Concat, an offset or a
branch of an If lies between. Operators of other types end the walk. If a constraint is missed, a run fails, and the
caller draws other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import ceil, floor
from typing import Any

import numpy as np

from xrlflow.ir import INTEGERS, Attrs, Body, Dim, DType, Graph, Node, TensorType, Value
from xrlflow.ops.schema import plain_name

# Limit on the steps of a walk: enough for any network whose integers matter, and a fraction of a second.
_MAX_STEPS = 20_000


class TensorConstraint(Enum):
    """Constraints on a whole tensor, which bounds on its elements cannot express."""

    MASK = "mask"  # 0 and 1, with at least one 1
    RESHAPE = "reshape"  # a shape for Reshape: one -1, else ones
    EXPAND = "expand"  # a shape for Expand: ones
    AXES = "axes"  # distinct axes
    SPLIT = "split"  # sizes that add up to a dimension
    TRUE = "true"
    FALSE = "false"


@dataclass(frozen=True, slots=True)
class Bound:
    """scale * x + shift lies in [low, high] for every shift in [shift_low, shift_high].

    If `high` is None, it is the size of `dim` minus 1, or the size itself if `inclusive` (a count, not an index). The
    size of `plus` is added and that of `less` is subtracted, if they are given. `exact`: `low` is `high`, too.
    `unsure`: the path to the reader adds an unknown number, so only the lower half of the interval is used. `wraps`: a
    negative index counts from the end, and the reader raises an error for an index outside the table.
    """

    low: float
    high: float | None
    dim: Dim = None
    inclusive: bool = False
    scale: float = 1.0
    shift_low: float = 0.0
    shift_high: float = 0.0
    unsure: bool = False
    wraps: bool = False
    plus: Dim = None
    less: Dim = None
    exact: bool = False

    def interval(self, size: Callable[[Dim], int | None], negative: bool = False) -> tuple[int, int]:
        """The least and the greatest integer x. `size` returns the size of a dimension, or None, which counts as 1.

        `negative`: include indices that count from the end, if the reader allows them.
        """
        low, high = self.low, self.high
        if high is None:
            extent = size(self.dim)
            high = (1 if extent is None else extent) - (0 if self.inclusive else 1)
            high += (size(self.plus) or 0) - (size(self.less) or 0)
            low = high if self.exact else low
        if negative and self.wraps:
            low = -high - 1
        ends = sorted(((low - self.shift_low) / self.scale, (high - self.shift_high) / self.scale))
        lower, upper = ceil(ends[0] - 1e-9), floor(ends[1] + 1e-9)
        if self.unsure and upper > lower:
            upper = lower + (upper - lower) // 2
        return lower, max(lower, upper)


@dataclass(slots=True)
class Demands:
    """The constraints that the readers of one input put on it."""

    bounds: list[Bound] = field(default_factory=list)
    # Numbers that the model compares the input with: a sampling rate, an end-of-text token, ...
    landmarks: list[float] = field(default_factory=list)
    constraint: TensorConstraint | None = None
    # The dimension that is the sum of a Split's sizes, or the rank to which axes refer.
    extent: Dim = None
    # If the input is a shape for Reshape or Expand: the shape that the file declares for the result. Any other value
    # of the input would contradict it.
    declared: tuple[int, ...] | None = None
    # The input is an argument of a logarithm or root, or a divisor.
    positive: bool = False
    # A size, a number of iterations or an integer divisor is computed from the input. Unusual values could take all
    # memory, never end, or crash the process.
    steers: bool = False

    @property
    def divides(self) -> bool:
        """Whether a size or number of iterations is divided by the input."""
        return self.positive and self.steers

    @property
    def loose(self) -> bool:
        """Whether values outside the bounds only raise an error."""
        return (
            bool(self.bounds)
            and not self.steers
            and all(b.wraps for b in self.bounds)
            and self.constraint is None
        )

    def interval(self, size: Callable[[Dim], int | None], negative: bool = False) -> tuple[int, int] | None:
        """The interval of integers that all bounds allow. If bounds contradict each other, the lowest bound decides."""
        if not self.bounds:
            return None
        ends = [bound.interval(size, negative) for bound in self.bounds]
        lower = max(low for low, _ in ends)
        upper = min(high for _, high in ends)
        return (lower, upper) if lower <= upper else (upper, upper)


@dataclass(frozen=True, slots=True)
class _Derived:
    """A value that the walk has reached. Its elements are scale * x + shift, where x is the corresponding element of
    the input.
    """

    graph: Graph
    value: Value
    scale: float = 1.0
    shift_low: float = 0.0
    shift_high: float = 0.0
    unsure: bool = False


def input_constraints(
    graph: Graph, value: Value, declared: Mapping[Value, tuple[int, ...]] | None = None
) -> Demands:
    """The constraints on `value`, one of the graph's inputs.

    `declared`: the shapes that the file declares for values, true or not (`ImportedModel.declared`).
    """
    demands = Demands()
    visited: set[tuple[int, Value, float, float, float, bool]] = set()
    # Each entry lists the nodes whose bodies enclose its graph, because the walk leaves a body through its outputs.
    work: list[tuple[_Derived, tuple[tuple[Graph, Node, Body], ...]]] = [(_Derived(graph, value), ())]
    for _ in range(_MAX_STEPS):
        if not work:
            break
        derived, owners = work.pop()
        key = (
            id(derived.graph),
            derived.value,
            round(derived.scale, 6),
            derived.shift_low,
            derived.shift_high,
            derived.unsure,
        )
        if key in visited:
            continue
        visited.add(key)
        for node in derived.graph.users(derived.value):
            for position, read in enumerate(node.inputs):
                if read == derived.value:
                    _demand(demands, derived, node, position, declared or {})
                    work.extend((next_, owners) for next_ in _through(derived, node, position))
                    work.extend(_into(derived, node, position, owners))
        if owners and derived.value in derived.graph.outputs:
            outer, node, body = owners[-1]
            for out in _out_of(derived, node, body):
                work.append((replace(derived, graph=outer, value=out), owners[:-1]))
                again = _carried(node, body, out)
                if again is not None:
                    work.append((replace(derived, value=again), owners))
    demands.steers = _steers(graph, value)
    return demands


def _steers(graph: Graph, value: Value) -> bool:
    """Whether a value, or another value computed from it, decides how much the model computes: see `Demands.steers`."""
    visited: set[tuple[int, Value]] = set()  # pairs, as a body can be reached along several paths
    work = [(graph, value)]
    while work:
        graph, value = work.pop()
        if (id(graph), value) in visited:
            continue
        visited.add((id(graph), value))
        for node in graph.users(value):
            if node.op in ("Shape", "Size"):
                continue
            at = [i for i, read in enumerate(node.inputs) if read == value]
            if any(_decides(graph, node, i) for i in at):
                return True
            for body, first in _bodies(node):
                inner = [body.captured[i - first] for i in at if first <= i < first + len(body.captured)]
                # A body's inputs are in the order of the node's states and scanned inputs, after a Loop's counter.
                explicit = [i for i in at if i < len(node.inputs) - node.captured]
                inner += [body.graph.inputs[i] for i in explicit if i < len(body.graph.inputs)]
                ends = body.graph.outputs[:1] if node.op == "Loop" else ()
                if any(v in ends or _reaches(body.graph, v, ends) for v in inner):
                    return True
                work.extend((body.graph, v) for v in inner)
            work.extend((graph, v) for v in node.outputs)
    return False


def _reaches(graph: Graph, value: Value, ends: tuple[Value, ...]) -> bool:
    """Whether one of `ends` is computed from a value."""
    visited: set[Value] = set()
    work = list(ends)
    while work:
        node = graph.producers.get(work.pop())
        if node is None or node.id in visited:
            continue
        visited.add(node.id)
        if value in node.inputs:
            return True
        work.extend(node.inputs)
    return False


def _decides(graph: Graph, node: Node, position: int) -> bool:
    if node.op in ("Div", "Mod", "BitShift") and position == 1:
        return graph.type(node.inputs[1]).dtype in INTEGERS
    reader = _READERS.get((plain_name(node.op), position))
    if (
        reader is None
        or (reader.bound is None and reader.constraint is None)
        or reader.constraint is TensorConstraint.MASK
    ):
        return False
    return (node.op, position) not in _CHECKED


# --- operators that pass values through ---

# Operators that pass elements of an input through unchanged, with the positions of those inputs (None: all).
_PASSES: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("Identity", "Cast", "CastLike", "Reshape", "Squeeze", "Unsqueeze", "Flatten"), (0,)),
    **dict.fromkeys(("Transpose", "Slice", "Split", "Expand", "Tile", "Gather", "GatherElements"), (0,)),
    **dict.fromkeys(("GatherND", "Pad", "Clip", "Floor", "Ceil", "Round", "Dropout", "ReduceMax"), (0,)),
    **dict.fromkeys(("ReduceMin", "Compress", "TopK", "ReverseSequence", "Trilu", "DepthToSpace"), (0,)),
    **dict.fromkeys(("SpaceToDepth", "MaxPool", "Abs", "Relu"), (0,)),
    **dict.fromkeys(("Concat", "Max", "Min"), None),
    "Where": (1, 2),
    **dict.fromkeys(("ScatterElements", "ScatterND"), (0, 2)),
}


def _through(derived: _Derived, node: Node, position: int) -> Iterator[_Derived]:
    if node.op in _PASSES:
        positions = _PASSES[node.op]
        if positions is None or position in positions:
            outputs = node.outputs if node.op == "Split" else node.outputs[:1]
            yield from (replace(derived, value=out) for out in outputs)
        return
    step = _ARITHMETIC.get(node.op)
    if step is None:
        return
    out = replace(derived, value=node.outputs[0])
    if node.op == "Neg":
        yield _scaled(out, -1.0)
        return
    other = derived.graph.const(node.inputs[1 - position])
    if other is None or other.array is None or other.array.dtype.kind not in "iuf" or other.array.size == 0:
        yield replace(out, unsure=True)
        return
    low, high = float(np.min(other.array)), float(np.max(other.array))
    result = step(out, low, high, position)
    if result is not None and np.isfinite([result.scale, result.shift_low, result.shift_high]).all():
        yield result


def _scaled(derived: _Derived, by: float) -> _Derived:
    ends = sorted((derived.shift_low * by, derived.shift_high * by))
    return replace(derived, scale=derived.scale * by, shift_low=ends[0], shift_high=ends[1])


def _shifted(derived: _Derived, low: float, high: float) -> _Derived:
    return replace(derived, shift_low=derived.shift_low + low, shift_high=derived.shift_high + high)


def _add(derived: _Derived, low: float, high: float, position: int) -> _Derived | None:
    return _shifted(derived, low, high)


def _sub(derived: _Derived, low: float, high: float, position: int) -> _Derived | None:
    return _shifted(derived, -high, -low) if position == 0 else _shifted(_scaled(derived, -1.0), low, high)


def _mul(derived: _Derived, low: float, high: float, position: int) -> _Derived | None:
    # If there are several factors, the largest decides. The walk ends if there are none, or their signs differ.
    return _scaled(derived, high if high > 0 else low) if low * high > 0 else None


def _div(derived: _Derived, low: float, high: float, position: int) -> _Derived | None:
    return _scaled(derived, 1 / (low if low > 0 else high)) if position == 0 and low * high > 0 else None


_ARITHMETIC: dict[str, Callable[[_Derived, float, float, int], _Derived | None]] = {
    "Add": _add,
    "Sub": _sub,
    "Mul": _mul,
    "Div": _div,
    "Neg": _add,
}


# --- bodies ---


def _bodies(node: Node) -> Iterator[tuple[Body, int]]:
    """The bodies of a node, each with the position of the first value that it captures."""
    at = len(node.inputs) - node.captured
    for attr in node.attrs.values():
        if isinstance(attr, Body):
            yield attr, at
            at += len(attr.captured)


def _into(
    derived: _Derived, node: Node, position: int, owners: tuple[tuple[Graph, Node, Body], ...]
) -> Iterator[tuple[_Derived, tuple[tuple[Graph, Node, Body], ...]]]:
    explicit = len(node.inputs) - node.captured
    for body, first in _bodies(node):
        inner: Value | None = None
        if first <= position < first + len(body.captured):
            inner = body.captured[position - first]
        elif position < explicit and (node.op == "Scan" or (node.op == "Loop" and position >= 2)):
            # A Loop's inputs are (trip count, condition, state...), its body's (iteration, condition, state...).
            inner = body.graph.inputs[position] if position < len(body.graph.inputs) else None
        if inner is not None:
            yield replace(derived, graph=body.graph, value=inner), (*owners, (derived.graph, node, body))


def _out_of(derived: _Derived, node: Node, body: Body) -> Iterator[Value]:
    skip = 1 if node.op == "Loop" else 0  # the first output of a Loop's body is its condition
    for index, out in enumerate(body.graph.outputs):
        if out == derived.value and 0 <= index - skip < len(node.outputs):
            yield node.outputs[index - skip]


def _carried(node: Node, body: Body, out: Value) -> Value | None:
    """The body's input that receives an output of the loop in the next iteration."""
    explicit, at = len(node.inputs) - node.captured, node.outputs.index(out)
    if node.op == "Loop":
        return body.graph.inputs[at + 2] if at < explicit - 2 else None
    scanned = node.attrs.get("num_scan_inputs", 0)
    if node.op == "Scan" and isinstance(scanned, int):
        return body.graph.inputs[at] if at < explicit - scanned else None
    return None


# --- constraints by readers ---


def _dim(graph: Graph, node: Node, position: int, axis: int) -> Dim:
    shape = _type(graph, node, position).shape
    return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None


def _type(graph: Graph, node: Node, position: int) -> TensorType:
    if position >= len(node.inputs) or not node.inputs[position]:
        return TensorType(DType.UNDEFINED, None)
    return graph.type(node.inputs[position])


def _axis(attrs: Attrs, default: int = 0) -> int:
    axis = attrs.get("axis", default)
    return axis if isinstance(axis, int) else default


@dataclass(frozen=True, slots=True)
class _Reader:
    """The constraint that an operator puts on one of its inputs."""

    bound: Callable[[Graph, Node], Bound] | None = None
    constraint: TensorConstraint | None = None
    extent: Callable[[Graph, Node], Dim] | None = None
    positive: bool = False


def _index(data: int, axis: Callable[[Graph, Node], int], wraps: bool = False) -> _Reader:
    """An index into input `data`, along an axis."""
    return _Reader(lambda g, n: Bound(0, None, _dim(g, n, data, axis(g, n)), wraps=wraps))


def _range(low: float, high: float) -> _Reader:
    return _Reader(lambda g, n: Bound(low, high))


def _count(data: int, axis: Callable[[Graph, Node], int]) -> _Reader:
    """A number from 1 to the size of a dimension."""
    return _Reader(lambda g, n: Bound(1, None, _dim(g, n, data, axis(g, n)), inclusive=True))


def _gather_nd(graph: Graph, node: Node) -> Bound:
    """Tuples of indices: bounded by the smallest dimension that they index, since any index may be at any position."""
    data, indices = _type(graph, node, 0).shape, _type(graph, node, 1).shape
    batch = node.attrs.get("batch_dims", 0)
    if data is None or not indices or not isinstance(batch, int):
        return Bound(0, 0)
    length = indices[-1]
    reached = data[batch : batch + length] if isinstance(length, int) else data[batch:]
    numbers = [d for d in reached if isinstance(d, int)]
    symbols = [d for d in reached if not isinstance(d, int)]
    if len(reached) == 1:
        return Bound(0, None, reached[0], wraps=True)
    if symbols or not numbers:
        return Bound(0, 0)
    return Bound(0, min(numbers) - 1, wraps=True)


def _written_at(graph: Graph, node: Node) -> Bound:
    """Where a TensorScatter begins to write: what it writes must not reach beyond the cache, except in a circle."""
    axis = _axis(node.attrs, -2)
    written = None if node.attrs.get("mode") == "circular" else _dim(graph, node, 1, axis)
    return Bound(0, None, _dim(graph, node, 0, axis), inclusive=written is not None, less=written)


def _positions(counted: bool) -> Callable[[Graph, Node], Bound]:
    """The number of positions that a GroupQueryAttention attends to, cached ones and new ones, or the last of them."""

    def bound(graph: Graph, node: Node) -> Bound:
        past = _dim(graph, node, 3, 2) if node.inputs[3] else 0
        return Bound(0, None, past, inclusive=counted, plus=_dim(graph, node, 0, 1), exact=True)

    return bound


def _one_hot(graph: Graph, node: Node) -> Bound:
    depth = graph.const(node.inputs[1])
    if depth is None or depth.array is None:
        return Bound(0, 4)
    return Bound(0, float(depth.array.reshape(-1)[0]) - 1)


def _rank_bound(graph: Graph, node: Node) -> Bound:
    return Bound(0, (_type(graph, node, 0).rank or 1) - 1)


def _rank(graph: Graph, node: Node) -> Dim:
    return _type(graph, node, 0).rank


def _slice_end(graph: Graph, node: Node) -> Bound:
    shape = _type(graph, node, 0).shape or ()
    numbers = [d for d in shape if isinstance(d, int)]
    return Bound(1, max(1, min(numbers))) if numbers and len(numbers) == len(shape) else Bound(1, 1)


def _by_axis(default: int) -> Callable[[Graph, Node], int]:
    return lambda g, n: _axis(n.attrs, default)


def _fixed(axis: int) -> Callable[[Graph, Node], int]:
    return lambda g, n: axis


def _time_axis(graph: Graph, node: Node) -> int:
    return 1 if node.attrs.get("layout", 0) else 0


def _reverse_axis(graph: Graph, node: Node) -> int:
    axis = node.attrs.get("time_axis", 0)
    return axis if isinstance(axis, int) else 0


_POSITIVE = _Reader(positive=True)

_READERS: dict[tuple[str, int], _Reader] = {
    ("Gather", 1): _index(0, _by_axis(0), True),
    ("GatherElements", 1): _index(0, _by_axis(0), True),
    ("GatherND", 1): _Reader(_gather_nd),
    ("ScatterElements", 1): _index(0, _by_axis(0), True),
    ("Scatter", 1): _index(0, _by_axis(0)),
    ("ScatterND", 1): _Reader(_gather_nd),
    ("TensorScatter", 2): _Reader(_written_at),
    ("ai.onnx.ml::ArrayFeatureExtractor", 1): _index(0, _fixed(-1)),
    ("com.microsoft::GatherBlockQuantized", 1): _index(0, _fixed(0)),
    ("com.microsoft::GroupQueryAttention", 5): _Reader(_positions(False)),
    ("com.microsoft::GroupQueryAttention", 6): _Reader(_positions(True)),
    ("com.microsoft::GroupQueryAttention", 9): _index(7, _fixed(0)),
    ("com.microsoft::EmbedLayerNormalization", 0): _index(2, _fixed(0)),
    ("com.microsoft::EmbedLayerNormalization", 1): _index(4, _fixed(0)),
    ("NegativeLogLikelihoodLoss", 1): _index(0, _fixed(1)),
    ("SoftmaxCrossEntropyLoss", 1): _index(0, _fixed(1)),
    ("CenterCropPad", 1): _range(1, 6),
    ("DFT", 1): _range(2, 8),
    ("DFT", 2): _range(1, 1),
    ("OneHot", 0): _Reader(_one_hot),
    ("OneHot", 1): _range(2, 8),
    ("SequenceAt", 1): _range(0, 0),
    ("SequenceErase", 1): _range(0, 0),
    ("SequenceInsert", 2): _range(0, 0),
    ("LSTM", 4): _count(0, _time_axis),
    ("GRU", 4): _count(0, _time_axis),
    ("RNN", 4): _count(0, _time_axis),
    ("ReverseSequence", 1): _count(0, _reverse_axis),
    ("TopK", 1): _count(0, _by_axis(-1)),
    ("Reshape", 1): _Reader(constraint=TensorConstraint.RESHAPE),
    ("Expand", 1): _Reader(constraint=TensorConstraint.EXPAND),
    ("Tile", 1): _range(1, 3),
    ("ConstantOfShape", 0): _range(1, 4),
    ("Range", 0): _range(0, 0),
    ("Range", 1): _range(1, 8),
    ("Range", 2): _range(1, 1),
    ("Slice", 1): _range(0, 0),
    ("Slice", 2): _Reader(_slice_end),
    ("Slice", 3): _Reader(_rank_bound, TensorConstraint.AXES, _rank),
    ("Slice", 4): _range(1, 1),
    ("Split", 1): _Reader(
        constraint=TensorConstraint.SPLIT, extent=lambda g, n: _dim(g, n, 0, _axis(n.attrs))
    ),
    ("SplitToSequence", 1): _Reader(
        constraint=TensorConstraint.SPLIT, extent=lambda g, n: _dim(g, n, 0, _axis(n.attrs))
    ),
    ("Pad", 1): _range(0, 2),
    ("Resize", 2): _range(1, 2),
    ("Resize", 3): _range(1, 12),
    ("CumSum", 1): _Reader(_rank_bound),
    ("Squeeze", 1): _Reader(_rank_bound, TensorConstraint.AXES, _rank),
    ("Unsqueeze", 1): _Reader(_rank_bound, TensorConstraint.AXES, _rank),
    **{
        (f"Reduce{name}", 1): _Reader(_rank_bound, TensorConstraint.AXES, _rank)
        for name in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
    },
    ("Trilu", 1): _range(-1, 1),
    ("Loop", 0): _range(0, 4),
    ("Loop", 1): _Reader(constraint=TensorConstraint.TRUE),
    ("Dropout", 1): _range(0, 0),
    ("Dropout", 2): _Reader(constraint=TensorConstraint.FALSE),
    ("NonMaxSuppression", 2): _range(1, 8),
    ("NonMaxSuppression", 3): _range(0, 1),
    ("NonMaxSuppression", 4): _range(0, 1),
    ("STFT", 1): _range(1, 4),
    ("HannWindow", 0): _range(4, 16),
    ("HammingWindow", 0): _range(4, 16),
    ("BlackmanWindow", 0): _range(4, 16),
    ("Attention", 3): _Reader(constraint=TensorConstraint.MASK),
    ("Attention", 6): _count(1, _fixed(-2)),
    ("Log", 0): _POSITIVE,
    ("Sqrt", 0): _POSITIVE,
    ("Pow", 0): _POSITIVE,
    ("Div", 1): _POSITIVE,
    ("Mod", 1): _POSITIVE,
    ("Reciprocal", 0): _POSITIVE,
    ("BatchNormalization", 4): _POSITIVE,
    ("BitShift", 1): _range(0, 7),
}

_COMPARING = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")

# Readers that raise an error for an index outside the table.
_CHECKED = frozenset(
    (op, 1) for op in ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND")
)

# Multiplying by a constant of at least this magnitude makes an additive mask.
_MASKING = 1e3


def _demand(
    demands: Demands, derived: _Derived, node: Node, position: int, declared: Mapping[Value, tuple[int, ...]]
) -> None:
    reader = _READERS.get((plain_name(node.op), position))
    plain = (derived.scale, derived.shift_low, derived.shift_high) == (1.0, 0.0, 0.0)
    if reader is not None:
        if reader.bound is not None:
            bound = reader.bound(derived.graph, node)
            demands.bounds.append(
                replace(
                    bound,
                    scale=derived.scale,
                    shift_low=derived.shift_low,
                    shift_high=derived.shift_high,
                    unsure=derived.unsure,
                )
            )
        if reader.constraint is not None and demands.constraint is None and plain:
            demands.constraint = reader.constraint
            demands.extent = reader.extent(derived.graph, node) if reader.extent is not None else None
            if reader.constraint in (TensorConstraint.RESHAPE, TensorConstraint.EXPAND):
                demands.declared = declared.get(node.outputs[0])
        demands.positive |= reader.positive and plain and not _is_whole_power(derived.graph, node)
    elif node.op in (*_COMPARING, "Mul", "Add") and len(node.inputs) == 2:
        other = derived.graph.const(node.inputs[1 - position])
        if (
            other is None
            or other.array is None
            or other.array.size == 0
            or other.array.dtype.kind not in "iuf"
        ):
            return
        values = other.array.reshape(-1)
        if node.op in _COMPARING and derived.shift_low == derived.shift_high and values.size <= 8:
            offsets = (0, 1, -1) if node.op != "Equal" else (0,)
            numbers = [(float(v) - derived.shift_low) / derived.scale + k for v in values for k in offsets]
            demands.landmarks.extend(v for v in numbers if v not in demands.landmarks)
        elif node.op == "Mul" and derived.scale < 0 and abs(float(values[0])) >= _MASKING:
            demands.constraint = demands.constraint or TensorConstraint.MASK
    elif node.op == "Cast" and node.types[0].dtype == DType.BOOL:
        demands.constraint = demands.constraint or TensorConstraint.MASK


def _is_whole_power(graph: Graph, node: Node) -> bool:
    """Whether the exponent of a Pow is a constant integer: then any base is allowed."""
    exponent = graph.const(node.inputs[1]) if node.op == "Pow" else None
    return (
        exponent is not None
        and exponent.array is not None
        and bool(np.all(exponent.array == np.round(exponent.array)))
    )


def random_operators(graph: Graph) -> set[str]:
    """Operators with random results on which an output depends, in bodies too."""
    operators: set[str] = set()
    reached: set[Value] = set()
    work = list(graph.outputs)
    while work:
        node = graph.producers.get(work.pop())
        if node is None or node.id in reached:
            continue
        reached.add(node.id)
        work.extend(v for v in node.inputs if v)
        if node.op in _RANDOM or (node.op == "Dropout" and _trains(graph, node)):
            operators.add(node.op)
        for attr in node.attrs.values():
            if isinstance(attr, Body):
                operators |= random_operators(attr.graph)
    return operators


_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
)


def _trains(graph: Graph, node: Node) -> bool:
    """Whether a Dropout drops elements: its mode is true or computed. A mode that callers pass as an input counts as
    false: verification sets it to false.
    """
    if len(node.inputs) < 3 or not node.inputs[2] or node.inputs[2] in graph.inputs:
        return False
    ratio: Any = graph.const(node.inputs[1]) if node.inputs[1] else None
    mode = graph.const(node.inputs[2])
    if ratio is not None and ratio.array is not None and not np.any(ratio.array):
        return False
    return mode is None or bool(np.any(mode.numpy()))
