"""Sizes that a user states for a model's inputs: numbers, and ranges of numbers."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
"""The least and the greatest number that a dimension takes."""
Size: TypeAlias = int | Range
Shapes: TypeAlias = Mapping[str, Sequence[Size]]
"""Shapes by the name of the input."""


def parse_size(text: str) -> Size:
    """The size that a user wrote: "16", or "16..512". Raises ValueError."""
    low, dots, high = text.partition("..")
    return (int(low), int(high)) if dots else int(text)


def show_size(size: Size) -> str:
    """The size as a user writes it."""
    low, high = as_range(size)
    return str(low) if low == high else f"{low}..{high}"


def as_range(size: Size) -> Range:
    """The least and the greatest number; twice the same for a number."""
    low, high = size if isinstance(size, tuple) else (size, size)
    return operator.index(low), operator.index(high)


def middle(low: int, high: int) -> int:
    """The size between both: their geometric mean, so that the greatest size does not count more than the least."""
    return isqrt(low * high)


def has_range(shape: Sequence[Size]) -> bool:
    return any(isinstance(size, tuple) for size in shape)


def numbers_only(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes without those that have a range."""
    return {n: tuple(as_range(d)[0] for d in shape) for n, shape in shapes.items() if not has_range(shape)}
