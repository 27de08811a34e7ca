"""The numbers in a graph near which mistakes show: shapes are compared with them, divided by them, cut at them.

A rewrite that is wrong for some sizes only is usually wrong below such a number, above it, at it, or at its multiples.
A rewrite that is wrong for some values only is usually wrong beyond a number with which values are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from xrlflow.ir import Body, Dim, Graph, Node, Value
from xrlflow.ir import dims as formulas
from xrlflow.ir.dims import Floor, Formula, Minimum
from xrlflow.verify.values import LARGE

Symbols: TypeAlias = frozenset[str]

# Weights of a number, by its origin: arithmetic and cuts of shapes; windows and strides; fixed parts of shapes.
_CUT, _WINDOW, _PART = 4, 2, 1
# Smaller numbers than LEAST are tried in any case; the end of a slice of ENDLESS or more means "to the end".
LEAST, ENDLESS = 2, 1 << 27
# Constants with more elements are data, not bounds.
_FEW = 64
# A model compares values with larger numbers than this only to distinguish them from infinity (a mask's -3.4e38).
_LARGEST_THRESHOLD = 1e8


@dataclass(frozen=True, slots=True)
class Mark:
    """A number, the dimensions that it concerns (none: they are unknown, so it may concern all), and its weight."""

    number: int
    dims: Symbols
    weight: int


def marks(graph: Graph) -> frozenset[Mark]:
    """The numbers in a graph and its bodies near which sizes should be tried."""
    dims = {
        d
        for node in graph.nodes()
        for type in node.types
        for d in type.shape or ()
        if formulas.is_computed(d)
    }
    return frozenset(_MarkCollector(graph).all()) | {
        mark for d in dims if isinstance(d, str) for mark in _in_formula(d)
    }


def _in_formula(computed: str) -> Iterator[Mark]:
    """Marks of the divisors in a dimension's formula, and of the sizes at which its minima change."""
    for atom in formulas.atoms(formulas.formula(computed)):
        if isinstance(atom, Floor) and atom.by.number is not None:
            for multiple in (1, 2):
                yield from _on(atom.over, multiple * atom.by.number)
        elif isinstance(atom, Minimum):
            for part in atom.parts:
                limit = part.number
                if limit is not None:
                    yield from (mark for other in atom.parts for mark in _on(other, limit))


def _on(over: Formula, number: int) -> Iterator[Mark]:
    where = formulas.dim(over)
    if isinstance(where, str):
        yield Mark(abs(number), frozenset((where,)), _CUT)


def on_symbols(marks: Iterable[Mark], inputs: Sequence[str]) -> dict[str, dict[int, int]]:
    """For each symbol of the inputs, the numbers around which to try sizes, with their weights.

    A mark on a computed dimension becomes, for each symbol, the least size at which the dimension reaches the number
    if all other symbols are 1. If no size reaches it, the mark's number concerns every symbol.
    """
    out: dict[str, dict[int, int]] = {symbol: {} for symbol in inputs}

    def add(symbol: str, number: int | None, weight: int) -> None:
        if number is not None and LEAST <= number < ENDLESS:
            out[symbol][number] = max(weight, out[symbol].get(number, 0))

    for mark in sorted(marks, key=lambda m: (m.number, sorted(m.dims), m.weight)):
        for dim in sorted(mark.dims) or [""]:
            if dim in out:
                add(dim, mark.number, mark.weight)
            elif formulas.is_computed(dim):
                for symbol in sorted(formulas.symbols(formulas.formula(dim)) & out.keys()):
                    for number in (mark.number, mark.number + 1):
                        add(symbol, _reaching(dim, symbol, number), mark.weight)
            else:
                for symbol in inputs:
                    add(symbol, mark.number, max(1, mark.weight // 2))
    return out


def _reaching(dim: str, symbol: str, number: int) -> int | None:
    """The least size of `symbol` at which `dim` is at least `number`, if all other symbols are 1. `dim` must grow with
    `symbol`.
    """
    ones = dict.fromkeys(formulas.symbols(formulas.formula(dim)), 1)

    def reaches(size: int) -> bool | None:
        extent = formulas.value(dim, {**ones, symbol: size})
        return None if extent is None else extent >= number

    high = 1
    while not (reached := reaches(high)):
        high *= 2
        if reached is None or high >= ENDLESS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def around(numbers: Mapping[int, int]) -> list[int]:
    """Sizes to try for one symbol. Each size covers as many as possible of the cases that the sizes before it do not
    cover.

    The cases are: for every number d, the sizes d - 1, d, d + 1 and a multiple, and one size beyond all numbers.
    """
    if not numbers:
        return []
    beyond = 2 * max(numbers) + 1
    sizes = sorted({n for d in numbers for n in (d - 1, d, d + 1, 2 * d)} | {beyond})
    open_: dict[tuple[int, str], int] = {}
    for d, weight in numbers.items():
        for case, share in (("above", 4), ("at", 3), ("multiple", 2), ("below", 2)):
            open_[d, case] = share * weight
    open_[beyond, "beyond"] = 3 * max(numbers.values())

    def covered(size: int) -> set[tuple[int, str]]:
        cases = {(size - 1, "above"), (size, "at"), (size + 1, "below")}
        cases |= {(d, "multiple") for d in numbers if size > d and size % d == 0}
        if size >= beyond:
            cases.add((beyond, "beyond"))
        return cases & open_.keys()

    out: list[int] = []
    while open_ and sizes:
        best = max(sizes, key=lambda n: (sum(open_[p] for p in covered(n)), -n))
        gained = covered(best)
        if not gained:
            break
        for key in gained:
            del open_[key]
        sizes.remove(best)
        out.append(best)
    return out


def thresholds(graph: Graph) -> frozenset[float]:
    """The numbers that values are compared with or clipped at, in bodies too."""
    bounds: set[float] = set()
    for node in graph.nodes():
        for attr in node.attrs.values():
            if isinstance(attr, Body):
                bounds |= thresholds(attr.graph)
        if node.op in _COMPARING:
            numbers = [n for value in node.inputs for n in _ends(graph, value)]
            bounds.update(numbers)
            bounds.update(m for value in node.inputs for n in numbers for m in _carried(graph, value, n))
        if node.op in _BENDING:
            # Ordinary values lie around smaller numbers, such as biases, anyway.
            bounds.update(n for n in _carried(graph, node.inputs[0], 0.0) if abs(n) > LARGE)
        alpha = node.attrs.get("alpha")
        if node.op == "ThresholdedRelu" and isinstance(alpha, (int, float)):
            bounds.add(float(alpha))
    return frozenset(abs(n) for n in bounds if 0 < abs(n) <= _LARGEST_THRESHOLD)


def _carried(graph: Graph, value: Value, number: float) -> Iterator[float]:
    """`number` for this value, and the numbers for the values from which a few operators with constants compute it:
    those at which this value becomes `number`.
    """
    for _ in range(_STEPS_BACK):
        node = graph.producers.get(value)
        if node is None or node.op not in _INVERSES or len(node.inputs) != 2:
            return
        sides = [_ends(graph, v) for v in node.inputs]
        if bool(sides[0]) == bool(sides[1]):
            return
        constant_first = bool(sides[0])  # whether the constant is the first operand
        value = node.inputs[constant_first]
        numbers = [
            _INVERSES[node.op](number, n, constant_first)
            for n in sides[not constant_first]
            if n or node.op in ("Add", "Sub")
        ]
        if not numbers:
            return
        yield from numbers
        number = numbers[0]


_STEPS_BACK = 4
# Functions that solve y = op(x, n) for x, or y = op(n, x) if the constant n is on the left.
_INVERSES: Mapping[str, Callable[[float, float, bool], float]] = {
    "Add": lambda y, n, left: y - n,
    "Sub": lambda y, n, left: n - y if left else y + n,
    "Mul": lambda y, n, left: y / n,
    "Div": lambda y, n, left: (n / y if y else 0.0) if left else y * n,
}
# Functions with a kink at 0.
_BENDING = frozenset(
    {"Abs", "Elu", "Gelu", "HardSigmoid", "LeakyRelu", "PRelu", "Relu", "Sigmoid", "Sign", "Softplus", "Tanh"}
)


def has_ties(graph: Graph) -> bool:
    """Whether results depend on how halves are rounded or on the sign of a zero, in bodies too."""
    return any(
        node.op in _TYING
        or any(isinstance(attr, Body) and has_ties(attr.graph) for attr in node.attrs.values())
        for node in graph.nodes()
    )


_TYING = frozenset({
    "ArgMax", "ArgMin", "Atan", "Cast", "Ceil", "Div", "DynamicQuantizeLinear", "Equal", "Floor", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "Mod", "Pow", "QuantizeLinear", "Reciprocal", "Round", "Sign", "TopK",
})  # fmt: skip

_COMPARING = frozenset(
    {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Clip", "Min", "Max", "Mod", "HardSwish"}
)


def _few(graph: Graph, value: Value) -> list[float]:
    """The elements of a small constant."""
    const = graph.const(value) if value else None
    array = const.array if const is not None else None
    if array is None or array.size > _FEW or array.dtype.kind not in "iuf":
        return []
    return [float(n) for n in array.reshape(-1) if np.isfinite(n)]


def _ends(graph: Graph, value: Value) -> list[float]:
    """The elements of a small constant; of a larger one, the least and the greatest."""
    const = graph.const(value) if value else None
    array = const.array if const is not None else None
    if array is None or array.size <= _FEW or array.dtype.kind not in "iuf":
        return _few(graph, value)
    return [float(n) for n in (array.min(), array.max()) if np.isfinite(n)]


# --- sizes ---


@dataclass(slots=True)
class _MarkCollector:
    """Collects marks from a graph. `of`: for a value that depends on shapes only, the dimensions from which each of
    its elements is computed. One entry stands for all elements if their number is unknown.
    """

    graph: Graph
    of: dict[Value, list[Symbols]] = field(default_factory=dict)

    def all(self) -> Iterator[Mark]:
        for node in self.graph.topological():
            yield from self._compared(node)
            reader = _READERS.get(node.op)
            if reader is not None:
                for number, dim, weight in reader(self.graph, node):
                    if isinstance(dim, str) and LEAST <= abs(number) < ENDLESS:
                        yield Mark(abs(int(number)), frozenset((dim,)), weight)
            derived = self._derived(node)
            if derived is not None:
                self.of.update(dict.fromkeys(node.outputs, derived))
            outer = iter(node.inputs[len(node.inputs) - node.captured :])
            for attr in node.attrs.values():
                if isinstance(attr, Body):
                    captured = {inner: self.of[v] for inner, v in zip(attr.captured, outer) if v in self.of}
                    yield from _MarkCollector(attr.graph, captured).all()

    def _compared(self, node: Node) -> Iterator[Mark]:
        """Marks of constants that are combined with computed shapes, and of lengths of tables that shapes index or
        cut."""
        reads = [v for v in node.inputs if v in self.of]
        if not reads:
            return
        symbols: Symbols = frozenset().union(*(s for v in reads for s in self.of[v]))
        if not symbols:
            return
        weight = _PART if node.op in ("Concat", "Reshape", "Expand", "Tile", "Gather") else _CUT
        for value in node.inputs if node.op not in _INDEXING else ():
            for number in _few(self.graph, value):
                integer = _integer(number)
                if integer is not None:
                    yield Mark(integer, symbols, weight)
        if node.op in _INDEXING and node.inputs[0] not in self.of:
            axis = node.attrs.get("axis", 0)
            dims = _shape(self.graph, node, 0)
            if node.op != "Slice" and isinstance(axis, int) and -len(dims) <= axis < len(dims):
                dims = dims[axis : axis + 1] if axis >= 0 else dims[len(dims) + axis :][:1]
            for dim in dims:
                if isinstance(dim, int) and LEAST <= dim < ENDLESS:
                    yield Mark(dim, symbols, _CUT)

    def _derived(self, node: Node) -> list[Symbols] | None:
        """The dimensions that the node's outputs are computed from, if they depend on shapes only."""
        if node.op in ("Shape", "Size"):
            dims = [
                frozenset((d,)) if isinstance(d, str) else frozenset[str]()
                for d in _shape(self.graph, node, 0)
            ]
            if node.op == "Size":
                return [frozenset().union(*dims)]
            start, end = node.attrs.get("start", 0), node.attrs.get("end")
            return dims[start if isinstance(start, int) else 0 : end if isinstance(end, int) else None]
        inputs = [v for v in node.inputs if v]
        if node.captured or not any(v in self.of for v in inputs):
            return None
        if not all(v in self.of or self.graph.const(v) is not None for v in inputs):
            return None
        first = self.of.get(inputs[0])
        if node.op in _KEEPING and first is not None:
            return first
        if node.op == "Concat":
            parts = [self.of.get(v, [frozenset()] * max(1, len(_few(self.graph, v)))) for v in inputs]
            return [symbols for part in parts for symbols in part]
        if node.op == "Gather" and first is not None:
            at = [int(n) for n in _few(self.graph, inputs[1])]
            if at and all(-len(first) <= n < len(first) for n in at):
                return [first[n] for n in at]
        if node.op == "Slice" and first is not None:
            bounds = [_few(self.graph, v) for v in inputs[1:3]]
            if len(inputs) <= 4 and all(len(b) == 1 for b in bounds):
                return first[int(bounds[0][0]) : int(min(bounds[1][0], ENDLESS))]
        return [frozenset().union(*(s for v in inputs for s in self.of.get(v, [])))]


_KEEPING = frozenset({"Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape", "Floor", "Ceil", "Neg", "Abs"})
_INDEXING = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})


def _integer(number: float) -> int | None:
    """The number as an integer if it is an integer of at least 2; n if the number is the fraction 1 / n (8 for 0.125);
    else None.
    """
    size = abs(number)
    if 0 < size < 1:
        size = 1 / size
    return int(size) if size == int(size) and LEAST <= size < ENDLESS else None


def _shape(graph: Graph, node: Node, position: int) -> tuple[Dim, ...]:
    if position >= len(node.inputs) or not node.inputs[position]:
        return ()
    return graph.type(node.inputs[position]).shape or ()


def _numbers(node: Node, name: str, default: Sequence[int] = ()) -> list[int]:
    value = node.attrs.get(name)
    return [int(n) for n in value if isinstance(n, int)] if isinstance(value, tuple) else list(default)


_WeightedNumbers: TypeAlias = Iterator[tuple[float, Dim, int]]
"""Numbers, each with the dimension that it concerns and its weight."""


def _window(graph: Graph, node: Node) -> _WeightedNumbers:
    """Numbers of a window that slides over an image: extent, step, padding."""
    dims = _shape(graph, node, 0)[2:]
    rank = len(dims)
    kernel = _numbers(node, "kernel_shape") or [d for d in _shape(graph, node, 1)[2:] if isinstance(d, int)]
    if len(kernel) != rank:
        return
    strides, dilations = _numbers(node, "strides", [1] * rank), _numbers(node, "dilations", [1] * rank)
    pads = _numbers(node, "pads", [0] * 2 * rank)
    for axis, dim in enumerate(dims):
        for number in ((kernel[axis] - 1) * dilations[axis] + 1, strides[axis], *pads[axis::rank]):
            yield number, dim, _WINDOW


def _slice(graph: Graph, node: Node) -> _WeightedNumbers:
    dims = _shape(graph, node, 0)
    starts, ends, axes, steps = (
        [int(n) for n in _few(graph, v)] for v in (*node.inputs[1:], *[Value(0)] * 4)[:4]
    )
    axes = axes or list(range(max(len(starts), len(ends))))
    for numbers in (starts, ends, steps):
        if len(numbers) == len(axes):
            yield from ((n, dims[a], _CUT) for n, a in zip(numbers, axes) if -len(dims) <= a < len(dims))


def _along(index: int, weight: int) -> Callable[[Graph, Node], _WeightedNumbers]:
    """A function that reads the constant input at `index` of a node. The numbers in it concern the dimension that the
    attribute `axis` names.
    """

    def read(graph: Graph, node: Node) -> _WeightedNumbers:
        axis, dims = node.attrs.get("axis", -1 if node.op == "TopK" else 0), _shape(graph, node, 0)
        numbers = _few(graph, node.inputs[index]) if index < len(node.inputs) else []
        parts = node.attrs.get("num_outputs")
        if isinstance(axis, int) and -len(dims) <= axis < len(dims):
            for number in {*numbers, *accumulate(numbers), *([parts] if isinstance(parts, int) else [])}:
                yield number, dims[axis], weight

    return read


def _each(index: int) -> Callable[[Graph, Node], _WeightedNumbers]:
    """A function that reads the constant input at `index` of a node. The numbers in it concern one dimension each, in
    order (pads: all dimensions in order, twice).
    """

    def read(graph: Graph, node: Node) -> _WeightedNumbers:
        dims = _shape(graph, node, 0)
        numbers = _few(graph, node.inputs[index]) if index < len(node.inputs) else []
        if dims and len(numbers) % len(dims) == 0:
            yield from (
                (w, dims[i % len(dims)], _WINDOW) for i, n in enumerate(numbers) if (w := _integer(n))
            )

    return read


def _resize(graph: Graph, node: Node) -> _WeightedNumbers:
    yield from _each(2)(graph, node)
    yield from _each(3)(graph, node)


def _blocks(graph: Graph, node: Node) -> _WeightedNumbers:
    size = node.attrs.get("blocksize", 1)
    if isinstance(size, int):
        yield from ((size, dim, _CUT) for dim in _shape(graph, node, 0)[2:])


def _reshape(graph: Graph, node: Node) -> _WeightedNumbers:
    """The fixed sizes of a Reshape's target: the number of elements must be a multiple of them."""
    for number in _few(graph, node.inputs[1]):
        yield from ((number, dim, _PART) for dim in _shape(graph, node, 0))


def _broadcast(graph: Graph, node: Node) -> _WeightedNumbers:
    """Sizes of dimensions that are broadcast against several elements, for instance the length of a table of
    positions."""
    shapes = [_shape(graph, node, i) for i in range(len(node.inputs))]
    for a in shapes:
        for b in shapes:
            for left, right in zip(a[::-1], b[::-1]):
                if isinstance(left, int) and isinstance(right, str):
                    yield left, right, _PART


_READERS: dict[str, Callable[[Graph, Node], _WeightedNumbers]] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool", "ConvInteger"), _window),
    "Slice": _slice,
    "TopK": _along(1, _CUT),
    "Split": _along(1, _CUT),
    "SplitToSequence": _along(1, _CUT),
    "Pad": _each(1),
    "Tile": _each(1),
    "Resize": _resize,
    **dict.fromkeys(("SpaceToDepth", "DepthToSpace"), _blocks),
    "Reshape": _reshape,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Where", "And", "Or"), _broadcast),
}
