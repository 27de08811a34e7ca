"""The types of products with packed weights (com.microsoft::MatMulNBits), which ONNX's own inference does not know.

Semantics: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Sequence

from xrlflow.ir import Attrs, DType, TensorType
from xrlflow.ops.eval_spec import integer

PRODUCT = "com.microsoft::MatMulNBits"


QUANTISING = 4
"""The `accuracy_level` at which the kernel quantises the left operand to 8 bits, block by block."""
_FLOATS = frozenset({DType.FLOAT, DType.FLOAT16, DType.BFLOAT16})


class Misfit(ValueError):
    """The inputs or attributes of a product with packed weights do not fit together."""


def product_type(attrs: Attrs, types: Sequence[TensorType | None]) -> TensorType:
    """The type of the product of a[...,k] and n packed columns: [...,n]. Raises Misfit."""
    a, packed, scales, zeros, groups, bias = [*types, *[None] * 6][:6]
    if a is None or packed is None or scales is None:
        raise Misfit("an input is left out")
    k, n, bits, block = (
        integer(attrs, name, default)
        for name, default in (("K", 0), ("N", 0), ("bits", 4), ("block_size", 0))
    )
    if bits not in (2, 4, 8) or block < 16 or block & (block - 1) or k < 1 or n < 1:
        raise Misfit(f"{bits} bits, blocks of {block}, {k} rows, {n} columns")
    blocks = -(-k // block)
    if packed.dtype != DType.UINT8 or packed.shape not in (None, (n, blocks, block * bits // 8)):
        raise Misfit(f"the weights are {packed}")
    if zeros is not None:
        count = blocks if zeros.dtype != DType.UINT8 else -(-blocks * bits // 8)
        _check_size(zeros, n * count)
    _check_size(scales, n * blocks)
    if bias is not None:
        _check_size(bias, n)
    if groups is not None and groups.size not in (None, k, blocks * block):
        raise Misfit(f"the groups are {groups}")
    floats = {t.dtype for t in (a, scales, bias) if t is not None} - {DType.UNDEFINED}
    if len(floats) > 1 or not floats <= _FLOATS:
        raise Misfit("the types of floats differ, or are no floats")
    if a.shape is None:
        return TensorType(scales.dtype, None)
    if not a.shape or (isinstance(a.shape[-1], int) and a.shape[-1] != k):
        raise Misfit(f"the left operand is {a}")
    return TensorType(scales.dtype, (*a.shape[:-1], n))


def _check_size(type: TensorType, expected: int) -> None:
    if type.size not in (None, expected):
        raise Misfit(f"{type} has not {expected} elements")
