"""Einsum of two operands as a product of matrices in batches, which TVM's own operator computes element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xrlflow.backends.tvm.toolchain.reading import sizes

_FLOATS = frozenset({"float16", "float32", "float64"})


@dataclass(frozen=True, slots=True)
class Product:
    """The letters of an equation of two operands: those of both and of the result (`batch`), of the first operand and
    the result (`rows`), of the second and the result (`columns`), and of both operands only (`summed`)."""

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
    """The product that an equation is; None for any other equation, and for products with a vector."""
    operands, arrow, out = equation.replace(" ", "").partition("->")
    first, comma, second = operands.partition(",")
    if not comma or "," in second or "." in equation:
        return None
    if not arrow:  # letters that are there once, in alphabetical order
        out = "".join(sorted(c for c in {*operands} - {","} if operands.count(c) == 1))
    if any(len({*letters}) < len(letters) for letters in (first, second, out)):
        return None
    alone = ({*first} ^ {*second}) - {*out}
    found = Product(first, second, out)
    if alone or {*out} - {*first, *second} or not (found.rows and found.columns and found.summed):
        return None
    return found


def legal_einsum(builder: Any, equation: str, operands: Sequence[Any]) -> Any | None:
    """An Einsum as a product, emitted with TVM's builder; None if it is none, or for sizes that differ or are open."""
    from tvm import relax

    found = product_of(equation) if len(operands) == 2 else None
    if found is None or not all(str(x.ty.dtype) in _FLOATS for x in operands):
        return None
    shapes = [sizes(x) for x in operands]
    if any(
        shape is None or len(shape) != len(letters) or 0 in shape
        for shape, letters in zip(shapes, (found.first, found.second))
    ):
        return None
    size: dict[str, int] = {}
    for shape, letters in zip(shapes, (found.first, found.second)):
        for letter, n in zip(letters, shape or ()):
            if size.setdefault(letter, n) != n:
                return None

    def turned(x: Any, now: str, wanted: str) -> Any:
        axes = [now.index(letter) for letter in wanted]
        return x if now == wanted else builder.normalize(relax.op.permute_dims(x, axes))

    def shaped(x: Any, parts: Sequence[str]) -> Any:
        """With one dimension for each part."""
        if all(len(part) == 1 for part in parts):
            return x
        return builder.normalize(
            relax.op.reshape(x, [math.prod(size[letter] for letter in part) for part in parts])
        )

    batch = [*found.batch]
    left = turned(operands[0], found.first, found.batch + found.rows + found.summed)
    right = turned(operands[1], found.second, found.batch + found.summed + found.columns)
    product = builder.normalize(
        relax.op.matmul(
            shaped(left, [*batch, found.rows, found.summed]),
            shaped(right, [*batch, found.summed, found.columns]),
        )
    )
    made = found.batch + found.rows + found.columns
    if len(found.rows) > 1 or len(found.columns) > 1:
        product = builder.normalize(relax.op.reshape(product, [size[letter] for letter in made]))
    return turned(product, made, found.out)
