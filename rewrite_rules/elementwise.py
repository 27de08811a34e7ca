"""Which operators work element by element, so that data movement can be exchanged with them."""

from __future__ import annotations

from typing import Any

from xrlflow.ir import ABSENT, Attrs, Dim, DType, Node, Value
from xrlflow.ops.axes import BROADCAST as BROADCAST
from xrlflow.ops.axes import UNARY as UNARY
from xrlflow.rewrite import Op, Reader

# Element types for which ONNX Runtime has kernels.
FLOAT, WIDE = frozenset({DType.FLOAT}), frozenset({DType.FLOAT, DType.DOUBLE})


def is_unary(node: Node) -> bool:
    """Whether a node works element by element on its first input, and has one output."""
    return node.op in _UNARY and len(node.outputs) == 1


def unary_form(node: Node) -> tuple[str, Attrs, tuple[Value, ...]]:
    """A key for an element-wise node with one data input: its operator, attributes, and inputs except the first."""
    return node.op, node.attrs, node.inputs[1:]


def made_by(reader: Reader, value: Value, *ops: str) -> Node | None:
    """The node that computes a value when the model runs, if it is one of these operators; else None."""
    node = reader.producer(value)
    return node if node is not None and node.op in ops and not node.const else None


def read_once(reader: Reader, value: Value) -> bool:
    """Whether a single node reads a value, and the value is no output of the graph."""
    return not reader.is_output(value) and len(reader.users(value)) == 1


def given(inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """The inputs that are not left out."""
    return tuple(v for v in inputs if v != ABSENT)


def sum_of(op: Op, a: Any, b: Any) -> Any:
    """The sum a + b; if one of the two is missing (None), the other one."""
    return a if b is None else b if a is None else op.Add(a, b)


def keeps_shape(shape: tuple[Dim, ...] | None, other: tuple[Dim, ...] | None) -> bool:
    """Whether a tensor of `shape` keeps its shape when it is broadcast against `other`, at all sizes of symbols."""
    if other is None:
        return False
    if not other:
        return True
    if shape is None or len(other) > len(shape):
        return False
    tail = shape[len(shape) - len(other) :]
    return all(b == 1 or (b is not None and a == b) for a, b in zip(tail, other))


_UNARY = frozenset(UNARY)
