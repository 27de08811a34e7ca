"""Sizes that must be at least 1 where ONNX defines a result for 0, too.

Measured with ONNX Runtime 1.31.1 on the CPU, each operator in a process of its own with one size of 0 after the other.
There its kernel ends the process, does not end, fails, or (products) leaves memory as its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from xrlflow.ir import Attrs, TensorType

Types = Sequence[TensorType | None]
Place = tuple[int, int]
"""An input and one of its axes."""


def needed(op: str, attrs: Attrs, types: Types) -> Iterator[Place]:
    """The sizes of an operator's inputs of these types (None: absent) that must be at least 1. An input of unknown rank
    has none."""
    need = _NEEDS.get(op)
    return iter(()) if need is None else need(attrs, types)


def _axes(types: Types, index: int, start: int = 0) -> Iterator[Place]:
    """The axes of an input from `start` on (negative: from the end)."""
    type = types[index] if index < len(types) else None
    rank = 0 if type is None or type.rank is None else type.rank
    return ((index, axis) for axis in range(start % rank if rank else 0, rank))


def _data(start: int) -> Callable[[Attrs, Types], Iterator[Place]]:
    """An operator that needs its first input's axes from `start` on."""
    return lambda attrs, types: _axes(types, 0, start)


def _normalised(attrs: Attrs, types: Types) -> Iterator[Place]:
    axis = attrs.get("axis", -1)
    assert isinstance(axis, int)
    return _axes(types, 0, axis)


def _attention(attrs: Attrs, types: Types) -> Iterator[Place]:
    return (place for index in range(3) for place in _axes(types, index))


def _product(left: int = 0, right: int = 1) -> Callable[[Attrs, Types], Iterator[Place]]:
    """A matrix product. The right factor's batch may not be empty where the left one has none; then an empty sum is
    left undefined, too."""

    def need(attrs: Attrs, types: Types) -> Iterator[Place]:
        a, b = types[left], types[right]
        if a is None or b is None or a.shape is None or b.shape is None:
            return
        before = (1,) * (len(b.shape) - len(a.shape)) + a.shape[:-2] if len(b.shape) > 2 else ()
        alone = [axis for axis, size in enumerate(before[: len(b.shape) - 2]) if size == 1 != b.shape[axis]]
        yield from ((right, axis) for axis in alone)
        if alone:
            yield left, len(a.shape) - 1

    return need


def _summed(attrs: Attrs, types: Types) -> Iterator[Place]:
    """A product that leaves an empty sum undefined. FusedMatMul may transpose its factors."""
    yield from _product()(attrs, types)
    yield from (place for index in range(2) for place in _axes(types, index, -2))


_NEEDS: Mapping[str, Callable[[Attrs, Types], Iterator[Place]]] = {
    "LSTM": _data(0),
    "GRU": _data(0),
    "Attention": _attention,
    "MatMul": _product(),
    "MatMulInteger": _summed,
    "com.microsoft::FusedMatMul": _summed,
    "com.microsoft::MatMulIntegerToFloat": _summed,
    "com.microsoft::DynamicQuantizeMatMul": _summed,
    "Conv": _data(1),
    "ConvInteger": _data(1),
    "ConvTranspose": _data(1),
    "MaxPool": _data(1),
    "AveragePool": _data(1),
    "LpPool": _data(1),
    "GlobalMaxPool": _data(1),
    "GlobalAveragePool": _data(1),
    "GlobalLpPool": _data(1),
    "InstanceNormalization": _data(2),
    "GroupNormalization": _data(0),
    "LayerNormalization": _normalised,
    "RMSNormalization": _normalised,
    "com.microsoft::SkipLayerNormalization": _data(-1),
}
NEEDING = frozenset(_NEEDS)
"""The operators that need such sizes."""
