"""Knobs, which are the dimensions of a design space, and kernels as vectors with one index for each knob."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xrlflow.tuning.tasks import module_key

if TYPE_CHECKING:
    from tvm.ir import IRModule

Vector = tuple[int, ...]
"""A kernel in a design space: for each knob the index of its value."""
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


class KnobError(ValueError):
    """A design space is empty, or does not contain a vector."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One dimension of a design space. `levels`: its values, ascending. `ordered`: whether neighbouring values are
    similar (False for algorithms)."""

    name: str
    levels: tuple[float, ...]
    ordered: bool = True

    def __len__(self) -> int:
        return len(self.levels)

    def near(self, index: int) -> tuple[int, ...]:
        """The indices of the values nearest to the value at `index`, ascending, without `index`: its neighbours, or all
        other indices if the knob is not ordered."""
        indices = (index - 1, index + 1) if self.ordered else range(len(self))
        return tuple(i for i in indices if i != index and 0 <= i < len(self))


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A kernel to measure.

    `vector`: the kernel's vector in the design space; None if it belongs to no design space. `trace`: the choice that
    describes the kernel, as JSON. Candidates with equal `key` are the same kernel.
    """

    vector: Vector | None
    trace: list[Any]
    mod: IRModule
    key: str

    @staticmethod
    def of(vector: Vector | None, trace: list[Any], mod: IRModule) -> Candidate:
        return Candidate(vector, trace, mod, module_key(mod))
