"""Nodes and tensors as rows of numbers, for networks that learn from graphs.

Dimensions and counts are given as logarithms, scaled to about 0 to 1. Constant nodes are evaluated before the model
runs, so their columns of work are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log1p, prod

from xrlflow.cost.model import InTypes
from xrlflow.ir import DType, Node, TensorType
from xrlflow.ir.types import FLOATS, INTEGERS
from xrlflow.ops.work import OpKind, dimensions, work

_KINDS = tuple(OpKind)
_DIMS = 4  # the number of trailing dimensions of a tensor among its columns

NODE_CONTENT = (
    "flops", "bytes", "seconds", "m", "n", "k", "products", "channels", "groups", "kernel", "stride", "dilation",
    "axis", "constant", "rank", "size", "bits", "inputs", "outputs",
)  # fmt: skip
NODE_COLUMNS = len(NODE_CONTENT) + len(_KINDS)
TYPE_COLUMNS = _DIMS + 8


@dataclass(frozen=True, slots=True)
class NodeColumns:
    """A node without its neighbourhood: a row of NODE_COLUMNS numbers, and its work at run time."""

    row: tuple[float, ...]
    flops: float
    bytes: float


def log_scale(number: float, top: float) -> float:
    """The logarithm of 1 + number, scaled so that `top` gives 1."""
    return log1p(number) / log1p(top)


def node_columns(node: Node, in_types: InTypes, bindings: Mapping[str, int], seconds: float) -> NodeColumns:
    """The columns of a node that takes `seconds` when it runs alone."""
    node_work = work(node, in_types, bindings)
    flops, traffic = (0.0, 0.0) if node.const else (float(node_work.flops), float(node_work.bytes))
    gemm = node_work.gemm
    m, n, k, products = (0, 0, 0, 0) if gemm is None else (gemm.m, gemm.n, gemm.k, gemm.count)
    columns: dict[str, float] = {
        "flops": log_scale(flops, 1e12),
        "bytes": log_scale(traffic, 1e10),
        "seconds": log_scale(seconds * 1e6, 1e6),
        "m": log_scale(m, 65536),
        "n": log_scale(n, 65536),
        "k": log_scale(k, 65536),
        "products": log_scale(products, 65536),
        "channels": log_scale(node_work.channels, 4096),
        "groups": log_scale(_number(node, "group", 1), 4096),
        "kernel": log_scale(prod(_numbers(node, "kernel_shape")) - 1, 128),
        "stride": log_scale(max(_numbers(node, "strides"), default=1) - 1, 8),
        "dilation": log_scale(max(_numbers(node, "dilations"), default=1) - 1, 8),
        "axis": _from_the_end(node, node.types[0].rank or 0) / 8,
        "constant": node.const,
        "inputs": log_scale(len(node.inputs), 16),
        "outputs": log_scale(len(node.outputs), 16),
        **_output_columns(node.types[0], bindings),
    }
    return NodeColumns(_row(columns, node_work.kind), flops, traffic)


def input_columns(type: TensorType, bindings: Mapping[str, int]) -> NodeColumns:
    """The columns of a graph's input, which counts as a node with one output."""
    columns = dict.fromkeys(NODE_CONTENT, 0.0)
    columns.update(_output_columns(type, bindings), outputs=log_scale(1, 16))
    return NodeColumns(_row(columns, OpKind.VIEW), 0.0, 0.0)


def type_columns(type: TensorType, bindings: Mapping[str, int]) -> list[float]:
    """Columns of a tensor type: trailing dimensions, number of elements, rank, bits of an element, and flags: float,
    integer, bool, constant, not static."""
    shape = dimensions(type, bindings)
    sizes = [log_scale(d, 65536) for d in shape[-_DIMS:]]
    return [
        *[0.0] * (_DIMS - len(sizes)),
        *sizes,
        log_scale(prod(shape), 1e9),
        len(shape) / 8,
        type.dtype.bits / 64,
        type.dtype in FLOATS,
        type.dtype in INTEGERS,
        type.dtype is DType.BOOL,
        type.const,
        not type.is_static,
    ]


def _row(columns: Mapping[str, float], kind: OpKind) -> tuple[float, ...]:
    return (*(columns[name] for name in NODE_CONTENT), *(float(k is kind) for k in _KINDS))


def _output_columns(type: TensorType, bindings: Mapping[str, int]) -> dict[str, float]:
    shape = dimensions(type, bindings)
    return {"rank": len(shape) / 8, "size": log_scale(prod(shape), 1e9), "bits": type.dtype.bits / 64}


def _number(node: Node, name: str, default: int) -> int:
    value = node.attrs.get(name, default)
    return value if isinstance(value, int) else default


def _numbers(node: Node, name: str) -> tuple[int, ...]:
    value = node.attrs.get(name, ())
    return tuple(int(v) for v in value if isinstance(v, int)) if isinstance(value, tuple) else ()


def _from_the_end(node: Node, rank: int) -> int:
    """The axis of an operator counted from the end, 1 for the last; 0 if it has no axis."""
    axis = node.attrs.get("axis")
    if not isinstance(axis, int):
        return 0
    return -axis if axis < 0 else max(rank - axis, 0)
