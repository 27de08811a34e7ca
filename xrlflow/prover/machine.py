"""Machine arithmetic: integers of fixed width, and casts that round as in ONNX Runtime.

In `Reals`, which verification uses, a Cast to half keeps all digits. A proof must round in casts, because a rule that
ignores the rounding of a narrow type is wrong. Other arithmetic of floats is that of real numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from xrlflow.ir import FLOATS, NO_ATTRS, DType, Graph, Node
from xrlflow.ops.evaluate import Evaluation
from xrlflow.ops.field import Array, Reals
from xrlflow.ops.schema import canonical_attrs

# The types to which casts round. NumPy has no bfloat16. DOUBLE is missing because floats are computed in float64.
_ROUNDED = {
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.FLOAT: np.dtype(np.float32),
}
# By item size in bytes, the integer type to which a float is cast first. A float that does not fit this type becomes
# the type's least number. Then the upper bits are dropped. This is what x86 does; ONNX leaves it open.
_CAST_REGISTERS = {1: "int32", 2: "int32", 4: "int64", 8: "int64"}


class Undefined(ArithmeticError):
    """An integer division that would crash the process: by zero, or of the least integer by -1."""


class Machine(Reals):
    """Floats are computed as real numbers, except that casts round. Integers wrap around.

    Raises Undefined for integer divisions that processors refuse.
    """

    def narrow(self, a: Array, to: DType) -> Array:
        return round_to(a, to)

    def truncate(self, a: Array, dtype: np.dtype[Any]) -> Array:
        register: np.dtype[Any] = np.dtype("int32" if dtype == np.int32 else _CAST_REGISTERS[dtype.itemsize])
        limit = 2.0 ** (8 * register.itemsize - 1)
        truncated = np.trunc(a)
        fits = (truncated >= -limit) & (truncated < limit)  # NaN does not fit
        indefinite = np.iinfo(register).min
        return np.where(fits, np.where(fits, truncated, 0).astype(register), indefinite).astype(dtype)

    def div(self, a: Any, b: Any) -> Array:
        _refuse_division(a, b)
        return super().div(a, b)

    def binary(self, name: str, a: Any, b: Any) -> Array:
        if name in ("mod", "fmod"):
            _refuse_division(a, b)
        return super().binary(name, a, b)


MACHINE = Machine()


def round_to(a: Array, to: DType) -> Array:
    """Round floats (float64) to a type; numbers beyond its range become infinite. Other arrays are
    returned unchanged.
    """
    narrow = _ROUNDED.get(to)
    if narrow is None or a.dtype.kind != "f":
        return a
    with np.errstate(over="ignore"):
        rounded: Array = a.astype(narrow).astype(np.float64)
    return rounded


def _refuse_division(a: Any, b: Any) -> None:
    left, right = np.asarray(a), np.asarray(b)
    if left.dtype.kind not in "iu" or right.dtype.kind not in "iu":
        return
    if (right == 0).any():
        raise Undefined("a division by zero")
    lowest = np.iinfo(left.dtype).min
    if lowest and ((left == lowest) & (right == -1)).any():
        raise Undefined("the least integer divided by -1")


# For each float type the wider types that hold all of its numbers.
_HOLDING_TYPES = {
    DType.FLOAT16: (DType.FLOAT, DType.DOUBLE),
    DType.BFLOAT16: (DType.FLOAT, DType.DOUBLE),
    DType.FLOAT: (DType.DOUBLE,),
}


@lru_cache(maxsize=64)  # each side of a case is evaluated a dozen times
def evaluation(graph: Graph) -> Evaluation:
    """The evaluation of a graph, with casts that round by the graph's types (see `with_known_casts`)."""
    return Evaluation.of(with_known_casts(graph))


def with_known_casts(graph: Graph) -> Graph:
    """The graph with each CastLike replaced by a Cast, and each Cast between floats that rounds nothing by an Identity.

    It is made from the types of the graph, because all floats are evaluated as float64 arrays.
    """
    if not any(n.op in ("Cast", "CastLike") for n in graph.nodes()):
        return graph
    return Graph.make(
        [_with_known_cast(graph, n) for n in graph.topological()], graph.inputs, graph.outputs, graph.leaves
    )


def _with_known_cast(graph: Graph, node: Node) -> Node:
    if node.op not in ("Cast", "CastLike"):
        return node
    source, to = graph.type(node.inputs[0]), node.types[0].dtype
    if source.dtype in FLOATS and (to == source.dtype or to in _HOLDING_TYPES.get(source.dtype, ())):
        return Node("Identity", node.inputs[:1], node.outputs, node.types, NO_ATTRS)
    attrs = canonical_attrs("Cast", {**node.attrs, "to": int(to)}, [source])
    return Node("Cast", node.inputs[:1], node.outputs, node.types, attrs)


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Random integers of a type. Half are uniform over its range; the other half are small, or at or near the range's
    ends.
    """
    info = np.iinfo(dtype)
    even = rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    ends = [info.min, info.min + 1, info.max // 2, info.max // 2 + 1, info.max - 1, info.max]
    small = [n for n in range(-3, 6) if n >= info.min]
    odd = rng.choice(np.array([*ends, *small], dtype), shape)
    out: Array = np.where(rng.random(shape) < 0.5, even, odd).astype(dtype)
    return out
