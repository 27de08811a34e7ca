"""A table of operators: which axes of the result are which axes of the inputs. Rules that move data past operators use
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Operators that work element by element on the first input. Clip's bounds are scalars, which no data movement changes.
UNARY: tuple[str, ...] = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "Ceil", "Celu", "Clip"),
    *("Cos", "Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "IsInf", "IsNaN"),
    *("LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid"),
    *("Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "ThresholdedRelu"),
)

# Operators that work element by element on several inputs, which are broadcast against each other.
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
    """For an operator, which axes of the inputs become which axes of the result.

    `of`: the axes of the result are those of the first input alone; or those of all inputs, which have the same
    dimensions except along the operator's own axes ("alike"); or those of all inputs, aligned at the last axis as in
    broadcasting.

    Along most axes the operator does the same at every position. Along its `own` axes it combines positions, and `does`
    says how. The own axes are given by an attribute ("axis", absent: `default`) or by constants in the second input
    ("axes", absent: all). A "reduced" axis has size 1 in the result, or disappears without `keepdims`. `onwards`: all
    later axes are `own` axes as well.
    """

    of: Literal["first", "alike", "broadcast"] = "first"
    own: Literal["", "axis", "axes"] = ""
    default: int = 0
    does: Literal["", "normalised", "reduced", "put together", "split"] = ""
    onwards: bool = False


AXES: Mapping[str, Axes] = {
    **dict.fromkeys(UNARY, Axes()),
    **dict.fromkeys(BROADCAST, Axes("broadcast")),
    **dict.fromkeys((*SOFTMAX, "LpNormalization"), Axes(own="axis", default=-1, does="normalised")),
    **dict.fromkeys(
        ("LayerNormalization", "RMSNormalization"), Axes("broadcast", "axis", -1, "normalised", onwards=True)
    ),
    **dict.fromkeys(REDUCTIONS, Axes(own="axes", does="reduced")),
    **dict.fromkeys(("ArgMax", "ArgMin"), Axes(own="axis", does="reduced")),
    "Concat": Axes("alike", own="axis", does="put together"),
    "Split": Axes(own="axis", does="split"),
}
