"""Which operands of an operator may lose a rounding.

A rounding to a narrow type changes a number a little. Most operators then change their results continuously (though a
normalisation or a quotient may multiply the change). Some jump: Floor gives another integer, Less another answer, Sqrt
gives NaN for a number just below zero. Such an operator must read the number that the model rounds.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from xrlflow.ir import ABSENT, Const, Node, Value

# Operators that are defined, and continuous, for all numbers. ("Defined" ignores overflow, and a divisor of zero:
# a rounding makes no zero from a number, unless it underflows.)
_CONTINUOUS = """
Abs Add Asinh Atan Attention AveragePool BatchNormalization Clip Conv ConvTranspose Cos Cosh CumSum Div Einsum Elu Erf
Exp GRU Gelu Gemm GlobalAveragePool GlobalMaxPool GroupNormalization HardSigmoid HardSwish InstanceNormalization LSTM
LayerNormalization LeakyRelu LogSoftmax MatMul Max MaxPool Mean Min Mish Mul Neg PRelu RMSNormalization RNN Reciprocal
ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Resize
RotaryEmbedding Selu Sigmoid Sin Sinh Softmax Softplus Softsign Sub Sum Swish Tanh
"""
# Operators that move elements.
_MOVING = """
Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Pad Reshape ReverseSequence ScatterElements
ScatterND Slice SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze Where
"""
# Operators that jump, or that are not defined for all numbers.
_JUMPING = """
Acos Acosh ArgMax ArgMin Asin Atanh Ceil Equal Floor Greater GreaterOrEqual IsInf IsNaN LRN Less
LessOrEqual Log LpNormalization Mod Pow ReduceLogSum Round Sign Sqrt Tan TopK
"""
MOVING = frozenset(_MOVING.split())
CONTINUOUS = frozenset(_CONTINUOUS.split()) | MOVING
JUMPING = frozenset(_JUMPING.split())
_RECURRENT = frozenset(["GRU", "LSTM", "RNN"])
# Normalisations divide by the root of a variance: with `epsilon` 0, equal numbers become 0 / 0.
_NORMALISING = frozenset(
    [
        "BatchNormalization",
        "GroupNormalization",
        "InstanceNormalization",
        "LayerNormalization",
        "RMSNormalization",
    ]
)
_EPSILON = 1e-5  # if the attribute is absent
_VARIANCE = 4  # the operand of BatchNormalization of which it takes the root
_REGION = 1  # the operand of Resize that says which part is resized: it becomes indices
_DEPTH = 8  # how many nodes are looked through for a number that is not negative


class Producers(Protocol):
    """The nodes and constants of a graph, as `Graph` and `Reader` give them."""

    def producer(self, value: Value) -> Node | None: ...

    def const(self, value: Value) -> Const | None: ...


def keeps_rounding(graph: Producers, node: Node, operand: int) -> bool:
    """Whether a node must read the rounded number at this operand."""
    if node.op in ("Sqrt", "Log", "ReduceLogSum") and nonnegative(graph, node.inputs[0]):
        return False
    if node.op == "Pow" and _is_whole_power(graph, node):
        return operand == 1
    if node.op not in CONTINUOUS:
        return True
    if node.op == "MaxPool" and len(node.outputs) > 1:  # it says where each maximum is
        return True
    # ThresholdedRelu is among the activations that an attribute may name.
    if node.op in _RECURRENT and "activations" in node.attrs:
        return True
    epsilon = node.attrs.get("epsilon", _EPSILON) if node.op in _NORMALISING else _EPSILON
    if not isinstance(epsilon, float) or epsilon <= 0:
        return True
    return (node.op, operand) in (("BatchNormalization", _VARIANCE), ("Resize", _REGION))


def nonnegative(graph: Producers, value: Value, depth: int = _DEPTH) -> bool:
    """Whether a number is at least zero, or NaN, by the operators that compute it."""
    if (const := graph.const(value)) is not None:
        return const.array is not None and bool((const.array.astype(np.float64) >= 0).all())
    node = graph.producer(value)
    if node is None or depth == 0:
        return False
    if node.op in _POSITIVE or (node.op == "Mul" and node.inputs[0] == node.inputs[1]):
        return True
    if node.op == "Pow" and _is_whole_power(graph, node, even=True):
        return True
    operands = _SUMS.get(node.op, 0)
    return operands > 0 and all(
        nonnegative(graph, v, depth - 1) for v in node.inputs[:operands] if v != ABSENT
    )


_POSITIVE = frozenset(
    {"Abs", "Exp", "ReduceL1", "ReduceL2", "ReduceSumSquare", "Relu", "Sigmoid", "Softmax", "Softplus"}
)
# Operators that give no negative numbers if their first operands have none, and how many these are.
_SUMS = {
    "Add": 2,
    "AveragePool": 1,
    "Div": 2,
    "GlobalAveragePool": 1,
    "Identity": 1,
    "Mul": 2,
    "ReduceMean": 1,
    "ReduceSum": 1,
    "Reshape": 1,
    "Sqrt": 1,
    "Squeeze": 1,
    "Transpose": 1,
    "Unsqueeze": 1,
}


def _is_whole_power(graph: Producers, node: Node, even: bool = False) -> bool:
    """Whether all exponents are constant, integers, and at least 0 (and even)."""
    const = graph.const(node.inputs[1])
    if const is None or const.array is None:
        return False
    exponents = const.array.astype(np.float64)
    return bool((exponents >= 0).all() and (exponents % (2 if even else 1) == 0).all())
