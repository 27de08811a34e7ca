"""How far rounding moves each element of a model's outputs: stochastic arithmetic.

The graph is evaluated in float64, several times side by side: once as it is, and with a random relative error after
each operator that rounds, as large as the rounding error of the declared type. The terms of a sum get an error before
they are added, so that the loss of digits by cancellation is visible. (Parker, "Monte Carlo Arithmetic", 1997.)

A product with packed weights at accuracy level 4 quantises its left operand, which gets errors of half a step.

Two things keep the noise from excusing any difference. A result that the declared type can hold gets no error: sums of
masks and positions stay exact. And integers, booleans and the results of jumps (Floor, Sign, ...) come from the
evaluation without errors: an error never turns one index into another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from xrlflow.common import deadline
from xrlflow.ir import ABSENT, FLOATS, Body, DType, Graph, Node, Value
from xrlflow.onnxio import ImportedModel
from xrlflow.ops.eval_elementwise import promote
from xrlflow.ops.eval_spec import integer
from xrlflow.ops.evaluate import REALS, SPECS, evaluate_node
from xrlflow.ops.packed import PRODUCT, QUANTISING
from xrlflow.ops.tensors import numpy_dtype
from xrlflow.verify.inputs import Case
from xrlflow.verify.reference import evaluate_by, part_for
from xrlflow.verify.runner import Array

SAMPLES = 3
"""Number of evaluations with errors, besides the one without."""
# The least error, as a multiple of the relative error: float32 loses digits of numbers below this (denormal ones), or
# flushes them to zero.
_TINY = 2.0**-126

# Operators that choose among their operands, or change a sign.
_CHOOSING = frozenset(
    {"Abs", "Clip", "GlobalMaxPool", "Max", "MaxPool", "Min", "Neg", "ReduceMax", "ReduceMin", "Relu", "TopK"}
)
# Operators that round only their result: their inputs count as exact.
_ROUNDING_ONCE = frozenset(
    {"Add", "Cast", "CastLike", "Div", "Exp", "Log", "Mul", "Pow", "Reciprocal", "Sqrt", "Sub"}
)
_CASTS = frozenset({"Cast", "CastLike"})
# Kernels compute these functions as a sum with numbers near 1 or near the argument, so the errors of small results are
# as large as those of large results.
_SATURATING = frozenset({
    "Celu", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "Mish", "Selu", "Sigmoid", "Softplus", "Softsign", "Tanh",
    "com.microsoft::BiasGelu", "com.microsoft::FastGelu", "com.microsoft::Gelu", "com.microsoft::QuickGelu",
})  # fmt: skip
# Functions of floats that jump. Those that give integers or booleans are recognised by their types.
_JUMPING = frozenset(
    {"Ceil", "Floor", "GridSample", "Hardmax", "Mod", "NonMaxSuppression", "Round", "Shrink", "Sign", "ThresholdedRelu"}
)  # fmt: skip
# Functions of floats that errors do not change: of sizes, and whether numbers are finite.
_UNMOVED = frozenset({"IsInf", "IsNaN", "Shape", "Size"})
# Jumping functions whose slope between jumps is 1, in their first input.
_FOLLOWING = frozenset({"Mod", "Shrink", "ThresholdedRelu"})
# Operators that add up only elements of their first inputs, and the number of these inputs. Their further inputs are
# factors, sizes and positions.
_ADDED = {"Resize": 1, "GridSample": 1, "RoiAlign": 1}
# Roundings of the greatest number, for each number that is transformed (`_transformed`).
_ANGLES = 4.0
# Products whose terms get their errors from the left operand alone if the right one has this many times its elements:
# drawing an error for each weight of a language model, for a product with one row, takes longer than everything else.
_PRODUCTS, _LARGER = frozenset({"MatMul", "Gemm"}), 16


def rounding_noise(imported: ImportedModel, case: Case, values: Sequence[Value]) -> list[Array]:
    """For each value, a float64 array of its shape: for each element the greatest difference between the evaluations
    with errors and the one without. Raises NoReference.
    """
    return evaluate_by(imported, case, values, _noise)


def jumps(graph: Graph, value: Value) -> bool:
    """Whether a value depends on float inputs or large weights through an operator that jumps: a small change of these
    may change it by any amount. (What is computed from sizes alone stays as it is.)"""
    part = part_for(graph, (value,))
    moved = {v for v in graph.inputs if graph.type(v).dtype in FLOATS}
    moved |= {v for v, c in graph.leaves.consts.items() if c.type.dtype in FLOATS and c.array is None}
    for node in part.topological():
        if node.op in _UNMOVED or moved.isdisjoint(node.inputs):
            if _bodies_jump(node):  # they may read anything
                return True
            continue
        if jumps_at(graph, node):
            return True
        moved.update(node.outputs)
    return False


def jumps_at(graph: Graph, node: Node) -> bool:
    """Whether the result of one operator jumps as its float inputs vary."""
    floats = any(v != ABSENT and graph.type(v).dtype in FLOATS for v in node.inputs)
    steps = node.op in _JUMPING or any(type.dtype not in FLOATS for type in node.types)
    return (floats and steps and node.op not in _UNMOVED) or _bodies_jump(node)


def _bodies_jump(node: Node) -> bool:
    bodies = [attr.graph for attr in node.attrs.values() if isinstance(attr, Body)]
    return any(jumps_at(body, inner) for body in bodies for inner in body.nodes())


def _noise(graph: Graph, feeds: Mapping[Value, Array]) -> list[Array]:
    rng = np.random.default_rng(0)
    order = graph.topological()
    last = {value: at for at, node in enumerate(order) for value in node.inputs}
    # For each value, one array if no element has an error, else 1 + SAMPLES arrays.
    arrays_of: dict[Value, list[Array]] = {v: [promote(REALS, np.asarray(a))] for v, a in feeds.items()}

    def read(value: Value) -> list[Array] | None:
        if value == ABSENT:
            return None
        return (
            arrays_of[value] if value in arrays_of else [promote(REALS, graph.leaves.consts[value].numpy())]
        )

    for at, node in enumerate(order):
        deadline.check()
        results = _results(graph, node, [read(v) for v in node.inputs], rng)
        arrays_of.update(zip(node.outputs, results))
        for value in node.inputs:
            if last[value] == at and value not in graph.outputs:
                arrays_of.pop(value, None)
    noises = []
    for value in graph.outputs:
        arrays = read(value)
        assert arrays is not None
        with np.errstate(invalid="ignore"):
            distances = [np.abs(with_errors - arrays[0]) for with_errors in arrays[1:]]
        greatest = np.max(distances, axis=0) if distances else np.zeros(arrays[0].shape)
        noises.append(np.where(np.isfinite(greatest), greatest, 0.0))
    return noises


def _results(
    graph: Graph, node: Node, inputs: Sequence[list[Array] | None], rng: np.random.Generator
) -> list[list[Array]]:
    """The outputs of one operator: for each output, one array if it has no errors, else 1 + SAMPLES arrays."""

    def chosen(sample: int) -> list[Array | None]:
        return [None if x is None else x[min(sample, len(x) - 1)] for x in inputs]

    def evaluated(arrays: Sequence[Array | None]) -> tuple[Array, ...]:
        return evaluate_node(node.op, node.attrs, arrays, len(node.outputs))

    exact = evaluated(chosen(0))
    clean = all(x is None or len(x) == 1 for x in inputs)
    moves = SPECS[node.op].proof == "movement" and node.op not in _CASTS
    rounds = not moves and node.op not in _CHOOSING
    adds = rounds and node.op not in _ROUNDING_ONCE and node.op not in _SATURATING
    if adds:  # errors of the sum alone would not include the terms that cancel
        read = [x[0] for x in inputs if x is not None]
        holds = clean and all(_whole(a, _digits(node)) for a in (*read, *exact))
    else:
        holds = clean and (not rounds or all(_held(a, t.dtype) for a, t in zip(exact, node.types)))
    quantises = node.op == PRODUCT and node.attrs.get("accuracy_level", 0) == QUANTISING
    if (holds and not quantises) or (node.op in _JUMPING and node.op not in _FOLLOWING) or _bodies_jump(node):
        return [[array] for array in exact]
    unit = max((_unit(t.dtype) for t in node.types if t.dtype in FLOATS), default=0.0)
    results = [[array] for array in exact]
    for sample in range(1, 1 + SAMPLES):
        arrays = chosen(sample)
        if quantises and arrays[0] is not None:
            arrays[0] = _quantised(arrays[0], integer(node.attrs, "block_size", 32), rng)
        if adds:
            summands = _ADDED.get(node.op, len(arrays))
            arrays = [*_terms_with_errors(node.op, arrays[:summands], unit, rng), *arrays[summands:]]
        results_with_errors = evaluated(arrays)
        if node.op in _FOLLOWING:
            results_with_errors = (_followed(exact[0], results_with_errors[0], chosen(0)[0], arrays[0]),)
        if node.op == "DFT":
            results_with_errors = (_transformed(results_with_errors[0], node, chosen(0), unit, rng),)
        for index, (array, type) in enumerate(zip(results_with_errors, node.types)):
            if type.dtype in FLOATS:
                noise = 1.0 if node.op in _SATURATING else _TINY
                results[index].append(_with_error(array, _unit(type.dtype), rng, noise) if rounds else array)
    return results


def _transformed(
    array: Array, node: Node, inputs: Sequence[Array | None], unit: float, rng: np.random.Generator
) -> Array:
    """The results of a Fourier transform with the errors of ONNX Runtime's algorithm (Bluestein) for lengths that are
    no powers of two: it computes angles up to pi n in float32. Its error was measured as 3.6 to 4.6 n roundings of the
    greatest number, for lengths from 80 to 4,097.
    """
    x, length, along = (*inputs, None, None)[:3]
    assert x is not None
    axis = -2 if along is None else int(along.item())
    half = integer(node.attrs, "inverse", 0) and integer(node.attrs, "onesided", 0)
    n = (2 * (x.shape[axis] - 1) if half else x.shape[axis]) if length is None else int(length.item())
    if not array.size or n & (n - 1) == 0:
        return array
    greatest = np.max(np.abs(array), axis=(axis % array.ndim, -1), keepdims=True)
    return np.asarray(array + rng.uniform(-1, 1, array.shape) * _ANGLES * n * unit * greatest)


def _followed(exact: Array, with_error: Array, before: Array | None, after: Array | None) -> Array:
    """The results with errors, except where a jump separates such a result from the exact result: these elements are
    the exact result.
    """
    assert before is not None
    assert after is not None
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(with_error - exact) <= 2 * np.abs(after - before), with_error, exact)


def _terms_with_errors(
    op: str, arrays: Sequence[Array | None], unit: float, rng: np.random.Generator
) -> list[Array | None]:
    """The operands of a sum, with errors such that each of its terms gets one."""
    left, right = (*arrays, None, None)[:2]
    if op in _PRODUCTS and left is not None and right is not None and right.size > _LARGER * left.size:
        # the error of a term is that of both factors
        first = _with_error(left, np.sqrt(2) * unit, rng)
        return [first, right, *(x if x is None else _with_error(x, unit, rng) for x in arrays[2:])]
    return [x if x is None else _with_error(x, unit, rng) for x in arrays]


def _with_error(array: Array, unit: float, rng: np.random.Generator, absolute: float = _TINY) -> Array:
    """Floats with random errors: a relative error of at most two units, and an absolute error of `absolute` units."""
    if array.dtype.kind != "f" or not unit:
        return array
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(array + unit * rng.uniform(-1, 1, array.shape) * (2 * np.abs(array) + absolute))


def _quantised(array: Array, block: int, rng: np.random.Generator) -> Array:
    """Floats with the errors that quantising each block of a row to 8 bits, by its greatest number, may make."""
    length = array.shape[-1]
    blocks = -(-length // block)
    greatest = np.zeros((*array.shape[:-1], blocks * block))
    greatest[..., :length] = np.abs(array)
    steps = greatest.reshape(*array.shape[:-1], blocks, block).max(-1) / 127
    return np.asarray(array + rng.uniform(-0.5, 0.5, array.shape) * np.repeat(steps, block, -1)[..., :length])


def _held(array: Array, dtype: DType) -> bool:
    """Whether a type represents the array exactly. For float64 this is certain only if all elements are integers."""
    if dtype not in FLOATS:
        return True
    if dtype == DType.DOUBLE:
        return _whole(array, 2.0**53)
    with np.errstate(all="ignore"):
        same = array.astype(numpy_dtype(dtype)).astype(np.float64) == array
    return bool((same | np.isnan(array)).all())


def _whole(array: Array, below: float) -> bool:
    """Whether the array's floats are integers below a bound, so that their sums are exact; True for other types."""
    if array.dtype.kind != "f":
        return True
    with np.errstate(all="ignore"):
        return bool(((np.trunc(array) == array) & (np.abs(array) < below) | np.isnan(array)).all())


def _digits(node: Node) -> float:
    """The bound below which integers are exact in all types of a node's outputs."""
    return 1 / max((_unit(t.dtype) for t in node.types if t.dtype in FLOATS), default=1.0)


def _unit(dtype: DType) -> float:
    """The greatest relative error of rounding to a type."""
    return float(ml_dtypes.finfo(numpy_dtype(dtype)).eps) / 2  # type: ignore[no-untyped-call]
