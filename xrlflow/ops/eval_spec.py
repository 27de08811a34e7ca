"""How the evaluation of an operator is declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from xrlflow.ir import Attrs, RawAttr
from xrlflow.ops.field import Array, Field

Inputs = Sequence[Array | None]
Evaluate = Callable[[Field, Attrs, Inputs, int], tuple[Any, ...]]

# What a proof over a prime field can conclude about an operator.
Proof = Literal[
    "movement",  # only moves elements, in the same way over every field
    "integer",  # computes with integers and booleans, which are the same in every field
    "polynomial",  # computes sums, products, quotients
    "uninterpreted",  # functions of which a proof knows only the name (exp, sqrt, Relu, max)
    "numeric",  # needs order, rounding, interpolation or irrational constants: only over the real numbers
]


@dataclass(frozen=True, slots=True)
class OpSpec:
    """How an operator is evaluated, and over which fields.

    `evaluate` takes the field, the attributes (without defaults), the inputs (None: absent; trailing ones may be
    missing) and the number of wanted outputs. It returns at least that many arrays or NumPy scalars.
    """

    op: str
    evaluate: Evaluate
    proof: Proof


def single(function: Callable[..., Any]) -> Evaluate:
    """Make an `evaluate` from function(field, attrs, *inputs) -> output."""

    def evaluate(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
        return (function(field, attrs, *inputs),)

    return evaluate


def several(function: Callable[..., tuple[Any, ...]]) -> Evaluate:
    """Make an `evaluate` from function(field, attrs, *inputs) -> outputs."""

    def evaluate(field: Field, attrs: Attrs, inputs: Inputs, outputs: int) -> tuple[Any, ...]:
        return function(field, attrs, *inputs)

    return evaluate


def table(proof: Proof, **operators: Evaluate) -> dict[str, OpSpec]:
    return {op: OpSpec(op, evaluate, proof) for op, evaluate in operators.items()}


def f32(value: float) -> float:
    """The float32 nearest to a number, for defaults that the specification stores in float attributes."""
    return float(np.float32(value))


def integer(attrs: Attrs, name: str, default: int) -> int:
    value = attrs.get(name, default)
    if not isinstance(value, int):
        raise TypeError(f"attribute {name} is {value!r}, not an integer")
    return value


def optional_integer(attrs: Attrs, name: str) -> int | None:
    return integer(attrs, name, 0) if name in attrs else None


def number(attrs: Attrs, name: str, default: float) -> float:
    value = attrs.get(name, default)
    if not isinstance(value, (int, float)):
        raise TypeError(f"attribute {name} is {value!r}, not a number")
    return float(value)


def string(attrs: Attrs, name: str, default: str) -> str:
    value = attrs.get(name, default)
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"attribute {name} is {value!r}, not a string")
    return value


def integers(attrs: Attrs, name: str) -> tuple[int, ...] | None:
    """An attribute that is a list of integers; None if it is missing. An empty list in a file is a RawAttr."""
    value = attrs.get(name)
    if value is None:
        return None
    if isinstance(value, RawAttr):
        return ()
    if not isinstance(value, tuple):
        raise TypeError(f"attribute {name} is {value!r}, not a list of integers")
    return tuple(int(v) for v in value)


def listed(array: Array | None) -> tuple[int, ...] | None:
    """A tensor of integers (axes, a shape) as a tuple; None if it is absent."""
    return None if array is None else tuple(array.reshape(-1).tolist())
