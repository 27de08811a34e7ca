"""Knobs, the dimensions of a design space, and kernels as vectors of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xrlflow.tuning.tasks import module_key

if TYPE_CHECKING:
    from tvm.ir import IRModule

Vector = tuple[int, ...]
"""For each knob the index of its value."""
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


class KnobError(ValueError):
    """There is nothing to choose from, or a vector is not in this space."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One dimension of a design space. `levels`: its values, ascending. `ordered`: neighbouring values are similar (not
    so for algorithms)."""

    name: str
    levels: tuple[float, ...]
    ordered: bool = True

    def __len__(self) -> int:
        return len(self.levels)

    def near(self, index: int) -> tuple[int, ...]:
        """The indices of the values nearest to this one, ascending, without itself: its neighbours, or all others if
        the knob is not ordered."""
        indices = (index - 1, index + 1) if self.ordered else range(len(self))
        return tuple(i for i in indices if i != index and 0 <= i < len(self))


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A kernel to measure.

    `vector`: its vector in the design space; None if it is in none. `trace`: the choice that describes it, as JSON.
    Candidates with equal `key` are the same kernel.
    """

    vector: Vector | None
    trace: list[Any]
    mod: IRModule
    key: str

    @staticmethod
    def of(vector: Vector | None, trace: list[Any], mod: IRModule) -> Candidate:
        return Candidate(vector, trace, mod, module_key(mod))
