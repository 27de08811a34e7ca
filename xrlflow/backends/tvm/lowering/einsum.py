"""Lowers Einsum of two operands to a product of matrices in batches. TVM's own operator computes element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.toolchain.reading import sizes

_FLOATS = frozenset({"float16", "float32", "float64"})


@dataclass(frozen=True, slots=True)
class Product:
    """An Einsum equation of two operands. The letters of `batch` are in both operands and in the result, those of
    `rows` in the first operand and the result, those of `columns` in the second operand and the result, and those of
    `summed` in both operands only."""

    first: str
    second: str
    out: str

    @property
    def batch(self) -> str:
        return "".join(c for c in self.out if c in self.first and c in self.second)

    @property
    def rows(self) -> str:
        return "".join(c for c in self.out if c not in self.second)

    @property
    def columns(self) -> str:
        return "".join(c for c in self.out if c not in self.first)

    @property
    def summed(self) -> str:
        return "".join(c for c in self.first if c in self.second and c not in self.out)


def product_of(equation: str) -> Product | None:
    """The product of matrices that an equation describes; None for any other equation, and for products with a
    vector."""
    operands, arrow, out = equation.replace(" ", "").partition("->")
    first, comma, second = operands.partition(",")
    if not comma or "," in second or "." in equation:
        return None
    if not arrow:  # the result has the letters that occur once, in alphabetical order
        out = "".join(sorted(c for c in {*operands} - {","} if operands.count(c) == 1))
    if any(len({*letters}) < len(letters) for letters in (first, second, out)):
        return None
    alone = ({*first} ^ {*second}) - {*out}
    product = Product(first, second, out)
    if alone or {*out} - {*first, *second} or not (product.rows and product.columns and product.summed):
        return None
    return product


def legal_einsum(builder: Any, equation: str, operands: Sequence[Any]) -> Any | None:
    """An Einsum as a product, emitted with TVM's builder; None if it is no product, or if sizes differ or are
    unknown."""
    from tvm import relax

    parsed = product_of(equation) if len(operands) == 2 else None
    if parsed is None or not all(str(x.ty.dtype) in _FLOATS for x in operands):
        return None
    shapes = [sizes(x) for x in operands]
    if any(
        shape is None or len(shape) != len(letters) or 0 in shape
        for shape, letters in zip(shapes, (parsed.first, parsed.second))
    ):
        return None
    size: dict[str, int] = {}
    for shape, letters in zip(shapes, (parsed.first, parsed.second)):
        for letter, n in zip(letters, shape or ()):
            if size.setdefault(letter, n) != n:
                return None

    def transposed(x: Any, letters: str, order: str) -> Any:
        axes = [letters.index(letter) for letter in order]
        return x if letters == order else builder.normalize(relax.op.permute_dims(x, axes))

    def shaped(x: Any, parts: Sequence[str]) -> Any:
        """A tensor reshaped to one dimension for each part."""
        if all(len(part) == 1 for part in parts):
            return x
        return builder.normalize(
            relax.op.reshape(x, [math.prod(size[letter] for letter in part) for part in parts])
        )

    batch = [*parsed.batch]
    left = transposed(operands[0], parsed.first, parsed.batch + parsed.rows + parsed.summed)
    right = transposed(operands[1], parsed.second, parsed.batch + parsed.summed + parsed.columns)
    product = builder.normalize(
        relax.op.matmul(
            shaped(left, [*batch, parsed.rows, parsed.summed]),
            shaped(right, [*batch, parsed.summed, parsed.columns]),
        )
    )
    letters_out = parsed.batch + parsed.rows + parsed.columns
    if len(parsed.rows) > 1 or len(parsed.columns) > 1:
        product = builder.normalize(relax.op.reshape(product, [size[letter] for letter in letters_out]))
    return transposed(product, letters_out, parsed.out)
