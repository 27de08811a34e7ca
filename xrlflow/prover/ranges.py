"""Tests numbers and sizes near the limits of each element type.

int8 holds an index up to 127, and float16 holds each size up to 2,048. A small graph cannot show that a rule is wrong
for greater ones. So if a side converts integers or booleans into a narrower type, dimensions get sizes just beyond what
that type holds, and inputs get numbers around this limit. Wherever the left side rounds nothing, the right side must
not round anything either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

import numpy as np

from xrlflow.ir import FLOATS, INTEGERS, DType, Graph, TensorType
from xrlflow.ops.evaluate import NotEvaluable
from xrlflow.ops.field import Array
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.prover.cases import (
    Case,
    Feeds,
    Wrong,
    bindings,
    compare,
    elements,
    placing,
    says_where,
    shape_of,
    sides,
    symbols,
)
from xrlflow.prover.draw import Draw
from xrlflow.prover.half import rounded
from xrlflow.prover.machine import MACHINE, evaluation, integers, round_to
from xrlflow.prover.sketch import Problem, Sketch, Unbuildable, build
from xrlflow.prover.variations import all_sizes, replace_dims, resize_to, with_dimension
from xrlflow.rewrite import AnyRule

# For each narrow type the greatest number up to which it holds every integer. (No dimension exceeds int32.)
HOLDS: Mapping[DType, int] = {
    DType.INT4: 7,
    DType.UINT4: 15,
    DType.INT8: 127,
    DType.UINT8: 255,
    DType.BFLOAT16: 1 << 8,
    DType.FLOAT16: 1 << 11,
    DType.INT16: (1 << 15) - 1,
    DType.UINT16: (1 << 16) - 1,
    DType.FLOAT: 1 << 24,
}
# The greatest numbers of float types, for casts.
_GREATEST = {DType.FLOAT16: 65504.0, DType.BFLOAT16: 3.3895e38, DType.FLOAT: 3.4028e38}
# Operators that take little time: a graph of a few of them may have larger tensors than other graphs.
_CHEAP = frozenset({
    "Add", "ArgMax", "ArgMin", "Cast", "Concat", "Equal", "Gather", "Greater", "Identity", "Less", "Mul", "Not",
    "ReduceSum", "Reshape", "Shape", "Size", "Squeeze", "Sub", "Transpose", "Unsqueeze",
})  # fmt: skip
_SIZES = frozenset({"Shape", "Size"})
# Operators whose results grow with the sizes of their inputs; operators that reduce (Reduce...) count as well.
_COUNTS = _SIZES | {
    "ArgMax", "ArgMin", "Conv", "ConvInteger", "CumSum", "Einsum", "Gemm", "Loop", "MatMul", "MatMulInteger", "MaxPool",
    "NonZero", "Range", "Scan", "TopK", "Unique",
}  # fmt: skip
_MOST_NODES, _MOST_ELEMENTS, _MOST_CHEAP = 8, 1 << 19, 1 << 25
# The most elements that the inputs of a graph with bodies may have. (Sizes inside of bodies are not inferred.)
_MOST_BODY_ELEMENTS = 1 << 12
# Two tolerances. One is for another order of float64 operations and constants rounded to float32, relative to the
# largest number of an output. The other is for floats that are computed from integers, in roundings of the coarsest
# type of the left side.
_ROUNDED, _UNITS = 2.0**-20, 64.0
_UNIT = {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8, DType.FLOAT: 2.0**-24}

Filling = Literal["high", "low", "mixed"]


def counted(graph: Graph) -> frozenset[DType]:
    """The narrow types into which a graph converts integers or booleans, or numbers computed from them."""
    integer_inputs = {v for v in graph.inputs if graph.type(v).dtype not in FLOATS}
    dtypes = set[DType]()
    for node in graph.topological():
        if node.const:
            continue
        operands = [v for i, v in enumerate(node.inputs) if v in integer_inputs and not _selects(node.op, i)]
        types = {graph.type(v).dtype for v in node.inputs if v}
        for value, type in zip(node.outputs, node.types):
            if operands or type.dtype not in FLOATS:
                integer_inputs.add(value)
                if type.dtype in HOLDS and type.dtype not in types:
                    dtypes.add(type.dtype)
    return frozenset(dtypes)


def _selects(op: str, index: int) -> bool:
    """Whether an input selects elements (as an index or a condition), so that its numbers are not data."""
    return (op, index) in (("Where", 0), ("Compress", 1)) or (says_where(op, index) and op != "Range")


@lru_cache(maxsize=256)
def converted(case: Case) -> frozenset[DType]:
    """The narrow types into which one side of a case, or both, convert integers."""
    return counted(case.before) | counted(case.after)


def counts(case: Case) -> bool:
    """Whether a side of a case makes data of a size or a position, or a size or a position of data."""
    nodes = (*case.before.nodes(), *case.after.nodes())
    return any(n.op in _COUNTS or n.op.startswith("Reduce") for n in nodes) or any(
        case.before.type(v).dtype in INTEGERS for v in placing(case.problem) & set(case.before.inputs)
    )


def beyond(types: frozenset[DType]) -> list[int]:
    """Sizes at which a count or a position no longer fits one of these types, in ascending order."""
    return sorted({HOLDS[t] + more for t in types for more in (1, 2)})


def at_sizes(case: Case, draw: Draw) -> Iterator[Problem]:
    """The graph of a case with larger sizes: one dimension, or all dimensions of one name or one size, are just beyond
    what the case's narrow types hold.
    """
    problem = case.problem
    sketch = problem.sketch
    if not counts(case):
        return
    for size in beyond(converted(case)):
        for name in symbols(problem):
            yield from _named(problem, name, size)
        if sketch.varied:
            for at, type in enumerate(sketch.inputs):
                for axis, dim in enumerate(type.shape or ()):
                    if isinstance(dim, int) and at not in sketch.hidden:
                        long = with_dimension(sketch, at, axis, size)
                        yield from list(_built(long)) or _built(_thin(long, at, axis))
            for old in all_sizes(sketch):
                yield from _built(resize_to(sketch, old, size, draw))


def _thin(sketch: Sketch, at: int, axis: int) -> Sketch:
    """The sketch with 1 for the other dimensions of an input than that of `axis`."""
    for other in range(sketch.inputs[at].rank or 0):
        if other != axis:
            sketch = with_dimension(sketch, at, other, 1)
    return sketch


def _built(sketch: Sketch) -> Iterator[Problem]:
    try:
        problem = build(sketch)
    except Unbuildable:
        return
    if _affordable(problem, problem):
        yield problem


def _named(problem: Problem, name: str, size: int) -> Iterator[Problem]:
    """The problem with `size` for the dimension `name`, and 1 for all other names. The graph keeps the names."""
    graph = problem.graph
    actual = {v: _bound(problem.type(v), name, size) for v in graph.inputs}
    if not problem.sketch.varied:
        if sum(t.size or 0 for t in actual.values()) > _MOST_BODY_ELEMENTS:
            return
        full = problem
    else:
        try:
            full = build(problem.sketch.with_inputs(actual[v] for v in graph.inputs))
        except Unbuildable:
            return
    if _affordable(problem, full):
        yield replace(problem, actual=actual)


def _bound(type: TensorType, name: str, size: int) -> TensorType:
    if type.shape is None:
        return type
    return replace_dims(
        type, tuple((size if d == name else 1) if isinstance(d, str) else d for d in type.shape)
    )


def _affordable(problem: Problem, full: Problem) -> bool:
    """Whether a graph of the sizes of `full` can be evaluated. Values that only Shape and Size read take no memory."""
    nodes = full.graph.topological()
    operands = {v for n in nodes if n.op not in _SIZES for v in n.inputs}
    types = [t for v in full.graph.inputs if v in operands for t in [full.type(v)]] + [
        t for n in nodes for t in n.types
    ]
    largest = max((prod(d for d in t.shape or () if isinstance(d, int)) for t in types), default=0)
    cheap = len(nodes) <= _MOST_NODES and all(n.op in _CHEAP for n in nodes)
    return largest <= (_MOST_CHEAP if cheap else _MOST_ELEMENTS)


# The test


def check_ranges(case: Case, rng: np.random.Generator, rule: AnyRule) -> bool:
    """Compare both sides for numbers and positions at the limits of the narrow types of a case.

    Returns whether the left side has a value for some of these inputs. Raises Wrong.
    """
    try:
        return _checked(case, converted(case), rng, rule)
    except NotEvaluable:
        return False


def _checked(case: Case, types: frozenset[DType], rng: np.random.Generator, rule: AnyRule) -> bool:
    compared = False
    before, after = sides(case)
    fillings: tuple[Filling, ...] = ("high", "low", "mixed", "mixed")
    if elements(case.problem) > _MOST_ELEMENTS:
        fillings = fillings[:2]
    for filling in fillings if types else ():
        feeds = _filled(case, filling, types, rng)
        if feeds is None:
            continue
        floats = [
            v for n in before.nodes() if not n.const for v, t in zip(n.outputs, n.types) if t.dtype in _UNIT
        ]
        inner = Graph.make(before.topological(), before.inputs, (*before.outputs, *floats), before.leaves)
        try:
            results = evaluation(inner).run(feeds, MACHINE)
        except NotEvaluable:
            raise
        except Exception:  # NumPy may raise anything for inputs that do not fit
            continue
        compared = True
        count = len(before.outputs)
        expected = results[:count]
        _compare(expected, _right(after, feeds), _ROUNDED, rule)
        fed = [(feeds[v], before.type(v).dtype) for v in feeds]
        computed = zip(results[count:], (before.type(v).dtype for v in floats), strict=True)
        pairs = [(a, t) for a, t in (*fed, *computed) if t in _UNIT]
        if all(np.array_equal(round_to(a, t), a, equal_nan=True) for a, t in pairs):
            unit = max((_UNIT[t] for _, t in pairs), default=0.0)
            _compare(expected, _right(rounding(case.after), feeds), _UNITS * unit, rule)
    return compared


def _right(graph: Graph, feeds: Feeds) -> list[Array]:
    try:
        return evaluation(graph).run(feeds, MACHINE)
    except NotEvaluable:
        raise
    except Exception as error:
        raise Wrong(f"the right side fails: {type(error).__name__}: {error}") from error


def _compare(left: list[Array], right: list[Array], tolerance: float, rule: AnyRule) -> None:
    try:
        compare(left, right, tolerance, rule.may_add_nonfinite, rule.may_remove_nonfinite)
    except Wrong as error:
        raise Wrong(f"{error} (numbers or sizes are at the end of what a type holds)") from error


def rounding(graph: Graph) -> Graph:
    """The graph with every float result rounded to its type."""
    nodes = [m for n in graph.topological() for m in rounded(n, frozenset(_UNIT))]
    return Graph.make(nodes, graph.inputs, graph.outputs, graph.leaves)


def _filled(case: Case, filling: Filling, types: frozenset[DType], rng: np.random.Generator) -> Feeds | None:
    """Inputs with the greatest counts, positions and indices ("high"), with the least, or with a mixture. None if one
    is too large.
    """
    problem, graph = case.problem, case.before
    numbers = bindings(problem, rng)
    inputs = [*((v, problem.type(v)) for v in graph.inputs), *problem.opaque.items()]
    shapes = {v: shape_of(t, numbers) for v, t in inputs}
    operands = {v for g in (graph, case.after) for n in g.nodes() if n.op not in _SIZES for v in n.inputs}
    longest = max((d for s in shapes.values() for d in s), default=1)
    indices, feeds = placing(problem), Feeds()
    for value, type in inputs:
        shape, dtype = shapes[value], numpy_dtype(type.dtype)
        if value not in operands:
            feeds[value] = np.broadcast_to(np.zeros((), np.float64 if type.dtype in FLOATS else dtype), shape)
        elif prod(shape) > _MOST_CHEAP:
            return None
        elif type.dtype in FLOATS:
            feeds[value] = round_to(_floats(shape, filling, types, rng), type.dtype)
        elif dtype.kind == "b":
            feeds[value] = (
                rng.random(shape) < 0.5 if filling == "mixed" else np.full(shape, filling == "high")
            )
        elif filling != "mixed":
            limit = longest - 1 if value in indices else 1
            feeds[value] = np.full(shape, limit if filling == "high" else 0).astype(dtype)
        elif value in indices:
            feeds[value] = rng.choice([0, 1, -1, longest - 1, longest], shape).astype(dtype)
        else:
            feeds[value] = _integers(shape, dtype, types, rng)
    return feeds


def _floats(
    shape: tuple[int, ...], filling: Filling, types: frozenset[DType], rng: np.random.Generator
) -> Array:
    """Floats of one sign whose extreme is at the last position, or floats near the limits of types."""
    if filling == "mixed":
        ends = [n for t in types for n in (HOLDS[t], HOLDS[t] + 1, HOLDS[t] + 0.5, _GREATEST.get(t, 0.0))]
        return np.asarray(rng.choice([0.0, 1.0, *ends], shape) * rng.choice([-1.0, 1.0], shape))
    numbers = np.ones(shape)
    numbers.reshape(-1)[-1:] = 2.0
    return numbers if filling == "high" else -numbers


def _integers(
    shape: tuple[int, ...], dtype: np.dtype[Any], types: frozenset[DType], rng: np.random.Generator
) -> Array:
    """Integers of the full range of a type, half of them near the limits of narrower types."""
    info = np.iinfo(dtype)
    ends = {s * (HOLDS[t] + more) for t in types for more in (-1, 0, 1, 2) for s in (-1, 1)}
    extremes = np.array([n for n in sorted(ends) if info.min <= n <= info.max] or [0], dtype)
    numbers: Array = np.where(
        rng.random(shape) < 0.5, rng.choice(extremes, shape), integers(rng, shape, dtype)
    )
    return numbers
