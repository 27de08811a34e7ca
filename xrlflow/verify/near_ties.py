"""Integer outputs that may differ because the numbers that they come from are equal up to rounding.

A difference in one element is accepted if one of two proofs exists:

- By value: the integer comes from ArgMax, ArgMin, TopK or a Cast of floats. The floats are evaluated in float64, and
  the other integer is an equally good choice if each float is off by at most 8 times its own noise, the distance by
  which rounding moves that element. Floats that are never rounded have no noise: ONNX defines which of
  equal floats is first.
- By the original: at another optimisation level, or with its inputs replaced by neighbouring floats, it gives the same
  integer as the new model.

Without a proof the difference is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from xrlflow.ir import FLOATS, INTEGERS, Graph, Node, Value
from xrlflow.onnxio import ImportedModel
from xrlflow.verify.compare import wide
from xrlflow.verify.inputs import Case
from xrlflow.verify.noise import rounding_noise
from xrlflow.verify.reference import NoReference, evaluate, evaluate_rounded
from xrlflow.verify.runner import Array

# Operators that keep all elements in their order.
_SAME_ORDER = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})
# The noise is measured on a few samples, which may show less than an element really has. So this multiple of it is
# allowed.
_NOISE = 8.0
_ROUNDINGS: dict[str, Callable[[Array], Array]] = {"Floor": np.floor, "Ceil": np.ceil, "Round": np.rint}


def undecided(
    imported: ImportedModel, case: Case, output: int, original: Array, new: Array, reruns: Sequence[Array]
) -> Array:
    """Which differences are proven to be near-ties: a mask of the output's shape.

    `output`: the index of the output. `reruns`: outputs of the original at other levels and with perturbed inputs.
    """
    proven = np.zeros(original.shape, dtype=bool)
    for other in reruns:
        if other.shape == new.shape:
            proven |= other == new
    if (proven | (original == new)).all():
        return proven
    by_value = _by_value(imported, case, imported.graph.outputs[output], original, new)
    return proven if by_value is None else proven | by_value


def _by_value(imported: ImportedModel, case: Case, value: Value, original: Array, new: Array) -> Array | None:
    graph = imported.graph
    node = graph.producers.get(value)
    while node is not None and (node.op in _SAME_ORDER or _is_integer_cast(graph, node)):
        value = node.inputs[0]
        node = graph.producers.get(value)
    if node is None:
        return None
    if node.op in ("ArgMax", "ArgMin"):
        source, judge = node.inputs[0], _extreme
    elif node.op == "TopK" and len(node.outputs) > 1 and node.outputs[1] == value:
        source, judge = node.inputs[0], _ranked
    elif node.op == "Cast" and graph.type(node.inputs[0]).dtype in FLOATS:
        source, judge = node.inputs[0], _truncated
    else:
        return None
    rounding = graph.producers.get(source)
    chain = [node]
    if judge is _truncated and rounding is not None and rounding.op in _ROUNDINGS:
        chain, source = [node, rounding], rounding.inputs[0]
    if graph.type(source).dtype not in FLOATS:
        return None
    try:
        exact = evaluate(imported, case, (source,))[0]
        rounded = wide(evaluate_rounded(imported, case, (source,))[0])
        noise = rounding_noise(imported, case, (source,))[0]
    except NoReference:
        return None
    if exact.shape != rounded.shape or not np.isfinite(exact).all() or not np.isfinite(rounded).all():
        return None
    decided = judge(chain, exact, original, new, _NOISE * np.maximum(noise, np.abs(rounded - exact)))
    return None if decided is None else decided.reshape(original.shape)


def _is_integer_cast(graph: Graph, node: Node) -> bool:
    return (
        node.op == "Cast" and graph.type(node.inputs[0]).dtype in INTEGERS and node.types[0].dtype in INTEGERS
    )


def _axis(node: Node, default: int, rank: int) -> int:
    axis = node.attrs.get("axis", default)
    return axis % rank if isinstance(axis, int) and rank else 0


def _extreme(chain: Sequence[Node], x: Array, original: Array, new: Array, tolerance: Array) -> Array | None:
    node = chain[0]
    axis = _axis(node, 0, x.ndim)
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    if new.size != int(np.prod(shape)) or x.ndim == 0:
        return None
    picked = new.reshape(shape).astype(np.int64)
    inside = (picked >= 0) & (picked < x.shape[axis])
    best = np.expand_dims(x.argmax(axis) if node.op == "ArgMax" else x.argmin(axis), axis)
    return np.asarray(inside & _within(x, tolerance, axis, np.where(inside, picked, 0), best))


def _within(x: Array, tolerance: Array, axis: int, a: Array, b: Array) -> Array:
    """Where x at the indices `a` of an axis equals x at the indices `b`, up to the tolerance."""
    distance = np.abs(np.take_along_axis(x, a, axis) - np.take_along_axis(x, b, axis))
    allowed = np.take_along_axis(tolerance, a, axis) + np.take_along_axis(tolerance, b, axis)
    return np.asarray(distance < allowed)


def _ranked(chain: Sequence[Node], x: Array, original: Array, new: Array, tolerance: Array) -> Array | None:
    axis = _axis(chain[0], -1, x.ndim)
    count = new.size // max(1, x.size // x.shape[axis]) if x.size else 0
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    if x.ndim == 0 or new.size != int(np.prod(shape)):
        return None
    old, ranking = original.reshape(shape).astype(np.int64), new.reshape(shape).astype(np.int64)
    inside = (ranking >= 0) & (ranking < x.shape[axis])
    ranking = np.where(inside, ranking, 0)
    # A ranking contains each index at most once.
    ordered = np.sort(ranking, axis)
    distinct = (np.diff(ordered, axis=axis) != 0).all(axis, keepdims=True)
    return np.asarray(inside & distinct & _within(x, tolerance, axis, ranking, old))


def _truncated(
    chain: Sequence[Node], x: Array, original: Array, new: Array, tolerance: Array
) -> Array | None:
    if x.size != new.size:
        return None
    rounding = _ROUNDINGS[chain[1].op] if len(chain) > 1 else np.trunc
    lowest, highest = rounding(x - tolerance), rounding(x + tolerance)
    value = new.reshape(x.shape).astype(np.float64)
    return np.asarray((lowest <= value) & (value <= highest))
