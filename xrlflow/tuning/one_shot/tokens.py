"""What a model of times sees of the ways of a layer: three kinds of tokens (Ryu et al., 2022, "One-Shot Tuner for Deep
Learning Compilers", section 3): the loops of the kernel ("curves"), the knobs, and the layer with its machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.loops import Loop, totals
from xrlflow.backends.tvm.target import Machine
from xrlflow.backends.tvm.ways import Floats
from xrlflow.tuning.space import KNOBS, WaySpace

if TYPE_CHECKING:
    from xrlflow.tuning.measurable import Measurable

LOOPS = 6
"""The most loops of a kernel."""
LOOP_FEATURES = 7
ALGORITHMS = 8
"""Algorithms, with those of blocks."""
KNOB_FEATURES = ALGORITHMS + len(KNOBS)
SIZES = 13
TASK_FEATURES = SIZES + 6
_LEAST = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Of N ways of one layer: the loops, [N, LOOPS, LOOP_FEATURES] (0: no such loop); the algorithm (one of
    ALGORITHMS) and the knobs, [N, KNOB_FEATURES]; the layer, [TASK_FEATURES]."""

    loops: Floats
    knobs: Floats
    task: Floats

    def __len__(self) -> int:
        return len(self.knobs)

    @property
    def estimates(self) -> Floats:
        """The logarithms (base 2) of the estimated times, [N]."""
        return self.knobs[:, ALGORITHMS]

    def some(self, places: npt.NDArray[np.int64]) -> Tokens:
        return Tokens(self.loops[places], self.knobs[places], self.task)


def tokens_of(space: WaySpace, places: npt.NDArray[np.int64] | None = None) -> Tokens:
    """The tokens of a space's ways at these places (None: of all)."""
    layer, machine = space.layer, space.machine
    wanted = range(space.size) if places is None else places.tolist()
    loops = np.stack([_of_loops(layer.loops(space.ways[i])) for i in wanted])
    numbers = space.numbers[list(wanted)]
    algorithm = np.eye(ALGORITHMS)[numbers[:, 0].astype(np.int64)]
    logs = np.where(numbers < 0, -1.0, np.log2(1.0 + np.maximum(numbers, 0.0)))
    estimates = np.log2(space.estimates[list(wanted)])
    knobs = np.concatenate([algorithm, estimates[:, None], logs[:, 1:]], axis=1)
    return Tokens(loops.astype(np.float32), knobs.astype(np.float32), _of_task(layer, machine))


def _of_loops(loops: Sequence[Loop]) -> npt.NDArray[np.float64]:
    """Logarithms of the loops' numbers, and of how often their bodies run."""
    found = np.zeros((LOOPS, LOOP_FEATURES))
    for i, (loop, total) in enumerate(zip(loops, totals(loops))):
        numbers = np.array([*loop.numbers, total])
        found[i, :-1] = np.log2(np.maximum(numbers, _LEAST) + 1.0)
        found[i, -1] = 1.0
    return found


def _of_task(layer: Measurable[Any], machine: Machine) -> Floats:
    """Logarithms of the sizes of a layer, and of those of the machine."""
    about = (
        machine.cores, machine.lanes, machine.registers, machine.second_level / 1024, int(machine.in_halves),
        layer.work / layer.weight,
    )  # fmt: skip
    found: Floats = np.log2(1.0 + np.array([*layer.sizes, *about], np.float64)).astype(np.float32)
    return found
