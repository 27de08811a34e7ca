"""The machine's numbers: integers of so many bits, and casts that round, as ONNX Runtime has them.

`Reals`, in which whole models are verified, lets a Cast to half keep all digits. A proof must not: what a narrow type
cannot hold is lost, and a rule that forgets it is wrong. Arithmetic between floats stays that of real numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from xrlflow.ir import FLOATS, NO_ATTRS, DType, Graph, Node
from xrlflow.ops.field import Array, Reals
from xrlflow.ops.schema import canonical_attrs

# NumPy's own half, and the format that it does not have; doubles are what is computed with.
_ROUNDED = {
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.FLOAT: np.dtype(np.float32),
}
# A float becomes an integer of fewer bits by way of one of 32 (of 64, if that is the unsigned one), whose upper bits
# go; one that does not fit there becomes the least number. That is what x86 does and what ONNX leaves open.
_BY_WAY_OF = {1: "int32", 2: "int32", 4: "int64", 8: "int64"}


class Undefined(ArithmeticError):
    """A division that ends the process: by zero, or of the least integer by -1."""


class Machine(Reals):
    """Floats are real numbers but for casts, which round; integers wrap around.

    Raises Undefined for divisions of integers that processors refuse.
    """

    def narrow(self, a: Array, to: DType) -> Array:
        return round_to(a, to)

    def truncate(self, a: Array, dtype: np.dtype[Any]) -> Array:
        way: np.dtype[Any] = np.dtype("int32" if dtype == np.int32 else _BY_WAY_OF[dtype.itemsize])
        limit = 2.0 ** (8 * way.itemsize - 1)
        whole = np.trunc(a)
        fits = (whole >= -limit) & (whole < limit)  # NaN does not
        least = np.iinfo(way).min
        return np.where(fits, np.where(fits, whole, 0).astype(way), least).astype(dtype)

    def div(self, a: Any, b: Any) -> Array:
        _refuse_division(a, b)
        return super().div(a, b)

    def binary(self, name: str, a: Any, b: Any) -> Array:
        if name in ("mod", "fmod"):
            _refuse_division(a, b)
        return super().binary(name, a, b)


MACHINE = Machine()


def round_to(a: Array, to: DType) -> Array:
    """Floats (float64) as a type rounds them, infinity beyond its range; anything else as it is."""
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
    least = np.iinfo(left.dtype).min
    if least and ((left == least) & (right == -1)).any():
        raise Undefined("the least integer divided by -1")


# What holds every number of a float type, besides the type itself.
_HELD = {
    DType.FLOAT16: (DType.FLOAT, DType.DOUBLE),
    DType.BFLOAT16: (DType.FLOAT, DType.DOUBLE),
    DType.FLOAT: (DType.DOUBLE,),
}


@lru_cache(maxsize=64)  # each side of a case is evaluated a dozen times
def with_known_casts(graph: Graph) -> Graph:
    """Each CastLike as the Cast that it is, and casts that round nothing as Identity.

    An array of float64 does not say of which type it stands for.
    """
    if not any(n.op in ("Cast", "CastLike") for n in graph.nodes()):
        return graph
    return Graph.make(
        [_known(graph, n) for n in graph.topological()], graph.inputs, graph.outputs, graph.leaves
    )


def _known(graph: Graph, node: Node) -> Node:
    if node.op not in ("Cast", "CastLike"):
        return node
    given, to = graph.type(node.inputs[0]), node.types[0].dtype
    if given.dtype in FLOATS and (to == given.dtype or to in _HELD.get(given.dtype, ())):
        return Node("Identity", node.inputs[:1], node.outputs, node.types, NO_ATTRS)
    attrs = canonical_attrs("Cast", {**node.attrs, "to": int(to)}, [given])
    return Node("Cast", node.inputs[:1], node.outputs, node.types, attrs)


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Integers of a type's whole range: evenly drawn, the ends of the range and what is near them, and small ones."""
    info = np.iinfo(dtype)
    even = rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    ends = [info.min, info.min + 1, info.max // 2, info.max // 2 + 1, info.max - 1, info.max]
    small = [n for n in range(-3, 6) if n >= info.min]
    odd = rng.choice(np.array([*ends, *small], dtype), shape)
    out: Array = np.where(rng.random(shape) < 0.5, even, odd).astype(dtype)
    return out
