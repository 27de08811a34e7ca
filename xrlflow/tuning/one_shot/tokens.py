"""What a model of times sees of the ways of a layer: three kinds of tokens (Ryu et al., 2022, "One-Shot Tuner for Deep
Learning Compilers", section 3), the loops of the kernel ("curves"), the knobs, and the layer with its machine; and one
token of what follows from the loops for this machine, such as how many registers the innermost one takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.kernels.layer_kernels import Floats
from xrlflow.backends.tvm.kernels.loops import Loop, totals
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.tuning.space import KNOBS, DesignSpace

if TYPE_CHECKING:
    from xrlflow.tuning.measurable import Measurable

LOOPS = 6
"""The most loops of a kernel."""
LOOP_FEATURES = 8
KERNEL_FEATURES = 10
ALGORITHMS = 8
"""Algorithms, with those of blocks."""
KNOB_FEATURES = ALGORITHMS + len(KNOBS)
SIZES = 13
TASK_FEATURES = SIZES + 6
_LEAST = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Of N ways of one layer: the loops, [N, LOOPS, LOOP_FEATURES] (0: no such loop); the algorithm (one of
    ALGORITHMS) and the knobs, [N, KNOB_FEATURES]; the kernel, [N, KERNEL_FEATURES]; the layer, [TASK_FEATURES]."""

    loops: Floats
    knobs: Floats
    kernel: Floats
    task: Floats

    def __len__(self) -> int:
        return len(self.knobs)

    @property
    def estimates(self) -> Floats:
        """The logarithms (base 2) of the estimated times, [N]."""
        return self.knobs[:, ALGORITHMS]

    def some(self, places: npt.NDArray[np.int64]) -> Tokens:
        return Tokens(self.loops[places], self.knobs[places], self.kernel[places], self.task)


def tokens_of(space: DesignSpace, places: npt.NDArray[np.int64] | None = None) -> Tokens:
    """The tokens of a space's ways at these places (None: of all)."""
    layer, machine = space.layer, space.machine
    wanted = range(space.size) if places is None else places.tolist()
    each = [layer.loops(space.choices[i]) for i in wanted]
    loops = np.stack([_of_loops(some) for some in each])
    numbers = space.numbers[list(wanted)]
    algorithm = np.eye(ALGORITHMS)[numbers[:, 0].astype(np.int64)]
    logs = np.where(numbers < 0, -1.0, np.log2(1.0 + np.maximum(numbers, 0.0)))
    estimates = np.log2(space.estimates[list(wanted)])
    knobs = np.concatenate([algorithm, estimates[:, None], logs[:, 1:]], axis=1)
    kernel = np.array(
        [
            _of_kernel(some, layer.weights(space.choices[i]), layer, machine, estimate)
            for i, some, estimate in zip(wanted, each, estimates.tolist())
        ]
    ).reshape(-1, KERNEL_FEATURES)
    return Tokens(
        loops.astype(np.float32),
        knobs.astype(np.float32),
        kernel.astype(np.float32),
        _of_task(layer, machine),
    )


def _of_loops(loops: Sequence[Loop]) -> npt.NDArray[np.float64]:
    """Logarithms of the loops' numbers, of how often their bodies run, and of all that a turn touches."""
    found = np.zeros((LOOPS, LOOP_FEATURES))
    for i, (loop, total) in enumerate(zip(loops, totals(loops))):
        numbers = np.array([*loop.numbers, total, loop.image + loop.weights + loop.results])
        found[i, :-1] = np.log2(np.maximum(numbers, _LEAST) + 1.0)
        found[i, -1] = 1.0
    return found


def _of_kernel(
    loops: Sequence[Loop], read: int, layer: Measurable[Any], machine: Machine, estimate: float
) -> tuple[float, ...]:
    """Vectors of sums and of weights in the innermost loop, the part of the registers that they take, how unevenly
    tasks are spread over the cores, what is computed over what is asked for, the multiplications for each number that
    is read, and the estimate over what is computed; of the weights that are `read`, their bytes over those of the
    second-level cache, how often tasks read them, and the multiplications for each. All but two are logarithms."""
    if not loops:
        return (0.0,) * KERNEL_FEATURES
    outer, inner, tasks = loops[0], loops[-1], loops[0].extent
    sums, weights = inner.results / machine.lanes, inner.weights / machine.lanes
    computed = max(outer.extent * outer.work, totals(loops)[-1] * inner.work)
    return (
        math.log2(1.0 + sums), math.log2(1.0 + weights), (sums + weights + 1.0) / machine.registers,
        -(-tasks // machine.cores) * machine.cores / tasks,
        math.log2(computed * machine.lanes * layer.weight / layer.work),
        math.log2((1.0 + inner.work) / (1.0 + inner.image + weights)), estimate - math.log2(computed),
        math.log2(1.0 + 4.0 * read / machine.second_level), math.log2(tasks * outer.weights / read),
        math.log2(computed * machine.lanes / read),
    )  # fmt: skip


def _of_task(layer: Measurable[Any], machine: Machine) -> Floats:
    """Logarithms of the sizes of a layer, and of those of the machine."""
    about = (
        machine.cores, machine.lanes, machine.registers, machine.second_level / 1024, int(machine.in_halves),
        layer.work / layer.weight,
    )  # fmt: skip
    found: Floats = np.log2(1.0 + np.array([*layer.sizes, *about], np.float64)).astype(np.float32)
    return found
