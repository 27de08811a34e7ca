"""What is decided of a kernel: knobs, and kernels as vectors of them."""

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
    """One decision. `levels`: its values, ascending. `ordered`: values that follow each other are similar; not so
    algorithms."""

    name: str
    levels: tuple[float, ...]
    ordered: bool = True

    def __len__(self) -> int:
        return len(self.levels)

    def near(self, index: int) -> tuple[int, ...]:
        """The indices of the values nearest to this one, ascending, without itself: its neighbours, or all others if
        there is no order."""
        places = (index - 1, index + 1) if self.ordered else range(len(self))
        return tuple(i for i in places if i != index and 0 <= i < len(self))


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A kernel to measure.

    `vector` decodes to it; None for one that is in no space. Candidates with equal `key` are the same kernel. `trace`:
    how it is made, as JSON.
    """

    vector: Vector | None
    trace: list[Any]
    mod: IRModule
    key: str

    @staticmethod
    def of(vector: Vector | None, trace: list[Any], mod: IRModule) -> Candidate:
        return Candidate(vector, trace, mod, module_key(mod))
