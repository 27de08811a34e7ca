"""Values and their types: element types, dimensions, tensor types."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar, NewType

from xrlflow.ir.dims import Dim, brief, readable

# A value names one *semantic* tensor. The number is derived from how the tensor is first computed. So two searches, or
# two processes, that compute a tensor in the same way give it the same number.
Value = NewType("Value", int)

# Stands for an optional input that is missing.
ABSENT = Value(0)


class DType(IntEnum):
    """Element types, numbered as in `onnx.TensorProto.DataType`. UNDEFINED: not a dense tensor."""

    UNDEFINED = 0
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
    FLOAT8E4M3FN = 17
    FLOAT8E4M3FNUZ = 18
    FLOAT8E5M2 = 19
    FLOAT8E5M2FNUZ = 20
    UINT4 = 21
    INT4 = 22
    FLOAT4E2M1 = 23
    FLOAT8E8M0 = 24
    UINT2 = 25
    INT2 = 26

    @property
    def bits(self) -> int:
        """The number of bits of an element; 0 for strings and for types that are no tensors."""
        return _BITS.get(self, 8)


_BITS: dict[DType, int] = {
    DType.UNDEFINED: 0,
    DType.STRING: 0,
    DType.FLOAT: 32,
    DType.INT32: 32,
    DType.UINT32: 32,
    DType.INT64: 64,
    DType.UINT64: 64,
    DType.DOUBLE: 64,
    DType.COMPLEX64: 64,
    DType.COMPLEX128: 128,
    DType.UINT16: 16,
    DType.INT16: 16,
    DType.FLOAT16: 16,
    DType.BFLOAT16: 16,
    DType.UINT4: 4,
    DType.INT4: 4,
    DType.FLOAT4E2M1: 4,
    DType.UINT2: 2,
    DType.INT2: 2,
}

FLOATS = frozenset({DType.FLOAT, DType.DOUBLE, DType.FLOAT16, DType.BFLOAT16})
INTEGERS = frozenset(
    {
        DType.INT8,
        DType.INT16,
        DType.INT32,
        DType.INT64,
        DType.UINT8,
        DType.UINT16,
        DType.UINT32,
        DType.UINT64,
    }
)


class TensorType:
    """The type of a value: element type, shape (None: unknown rank), and whether it is constant.

    Types are interned: equal types are one object, so comparing and hashing are cheap. Types other than dense tensors
    (sequence, optional, sparse tensor, map) have `dtype` UNDEFINED and a serialised `onnx.TypeProto` in `other`.
    """

    __slots__ = ("const", "dtype", "other", "shape")

    dtype: DType
    shape: tuple[Dim, ...] | None
    const: bool
    other: bytes | None

    _pool: ClassVar[dict[tuple[DType, tuple[Dim, ...] | None, bool, bytes | None], TensorType]] = {}

    def __new__(
        cls,
        dtype: DType,
        shape: tuple[Dim, ...] | None,
        const: bool = False,
        other: bytes | None = None,
    ) -> TensorType:
        key = (dtype, shape, const, other)
        pooled = cls._pool.get(key)
        if pooled is None:
            pooled = object.__new__(cls)
            object.__setattr__(pooled, "dtype", dtype)
            object.__setattr__(pooled, "shape", shape)
            object.__setattr__(pooled, "const", const)
            object.__setattr__(pooled, "other", other)
            cls._pool[key] = pooled
        return pooled

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a TensorType is immutable")

    def __reduce__(self) -> Any:
        return (TensorType, (self.dtype, self.shape, self.const, self.other))

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    @property
    def is_static(self) -> bool:
        """Whether every dimension is a number."""
        return self.shape is not None and all(isinstance(d, int) for d in self.shape)

    @property
    def size(self) -> int | None:
        """The number of elements; None if a dimension is unknown."""
        if self.shape is None:
            return None
        n = 1
        for d in self.shape:
            if not isinstance(d, int):
                return None
            n *= d
        return n

    @property
    def nbytes(self) -> int | None:
        """The bytes of the tensor; None if a dimension is unknown."""
        n = self.size
        return None if n is None else (n * self.dtype.bits + 7) // 8

    def as_const(self, const: bool) -> TensorType:
        return self if self.const == const else TensorType(self.dtype, self.shape, const, self.other)

    def __repr__(self) -> str:
        constant = self.const and self.dtype != DType.UNDEFINED
        return self._shown(readable) + (":const" if constant else "")

    @property
    def brief(self) -> str:
        """The type for a message, without long formulas."""
        return self._shown(brief)

    def _shown(self, show: Callable[[Dim], str]) -> str:
        if self.dtype == DType.UNDEFINED:
            return "opaque"
        sizes = "..." if self.shape is None else ",".join(map(show, self.shape))
        return f"{self.dtype.name.lower()}[{sizes}]"


class TypeConflict(ValueError):
    """Two types of one value contradict each other."""


def merge_types(old: TensorType, new: TensorType) -> TensorType:
    """The more precise of two types of one value; `const` is that of `new`.

    Raises TypeConflict if they differ in element type or rank, or have different numbers for the same dimension.
    """
    if old.dtype != new.dtype:
        if DType.UNDEFINED in (old.dtype, new.dtype):
            precise = new if old.dtype == DType.UNDEFINED and old.other is None else old
            return precise.as_const(new.const)
        raise TypeConflict(f"{old} is not {new}")
    if old.shape == new.shape or new.shape is None:
        return old.as_const(new.const)
    if old.shape is None:
        return new
    if len(old.shape) != len(new.shape):
        raise TypeConflict(f"{old} is not {new}")
    dims: list[Dim] = []
    for a, b in zip(old.shape, new.shape):
        if isinstance(a, int) and isinstance(b, int) and a != b:
            raise TypeConflict(f"{old} is not {new}")
        # A number is more precise than a symbol, and a symbol more than None. Of two symbols, the old one is used.
        dims.append(
            a if isinstance(a, int) or b is None or (isinstance(a, str) and isinstance(b, str)) else b
        )
    return TensorType(old.dtype, tuple(dims), new.const, new.other)
