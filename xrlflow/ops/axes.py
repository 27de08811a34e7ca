"""Which axes of an operator's result are which axes of its inputs: a table, for rules that move data past it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Element by element, on the first input. Clip's bounds are scalars, which no movement of the data touches.
UNARY: tuple[str, ...] = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "Ceil", "Celu", "Clip"),
    *("Cos", "Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "IsInf", "IsNaN"),
    *("LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid"),
    *("Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "ThresholdedRelu"),
)

# Element by element, on several inputs that are broadcast against each other.
BROADCAST: tuple[str, ...] = (
    *("Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater"),
    *("GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "Pow", "Sub"),
    *("Sum", "Where", "Xor"),
)

SOFTMAX = ("Softmax", "LogSoftmax", "Hardmax")

REDUCTIONS = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
    *("ReduceProd", "ReduceSum", "ReduceSumSquare"),
)


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of an operator's result.

    They are those of the first input, and the other inputs have none of them; or, with `spread`, those of all inputs,
    aligned at the last one as broadcasting does. Along most axes the operator does the same at every position. The
    others are in `own`: an attribute ("axis", absent: `default`), or constants in the second input ("axes", absent:
    all). It does something with their positions together (`does` says what). Of an axis that is "reduced" one position
    is left, or nothing without `keepdims`. `onwards`: all axes behind its own are like it.
    """

    spread: bool = False
    own: Literal["", "axis", "axes"] = ""
    default: int = 0
    does: str = ""
    onwards: bool = False


AXES: Mapping[str, Axes] = {
    **dict.fromkeys(UNARY, Axes()),
    **dict.fromkeys(BROADCAST, Axes(spread=True)),
    **dict.fromkeys(SOFTMAX, Axes(own="axis", default=-1, does="normalised")),
    **dict.fromkeys(REDUCTIONS, Axes(own="axes", does="reduced")),
    **dict.fromkeys(("ArgMax", "ArgMin"), Axes(own="axis", does="reduced")),
    "LpNormalization": Axes(own="axis", default=-1, does="normalised"),
    **dict.fromkeys(
        ("LayerNormalization", "RMSNormalization"),
        Axes(spread=True, own="axis", default=-1, does="normalised", onwards=True),
    ),
    "Concat": Axes(spread=True, own="axis", does="put together"),
    "Split": Axes(own="axis", does="split"),
}
