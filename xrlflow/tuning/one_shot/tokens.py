"""The input of a model that predicts the times of a layer's kernels (choices). There are three kinds of tokens as in
Ryu et al., 2022 ("One-Shot Tuner for Deep Learning Compilers", section 3): for the loops of the kernel ("curves"), for
the knobs, and for the layer with its machine. One more token has numbers that are computed from the loops and the
machine, such as how many registers the innermost loop takes."""

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
"""The greatest number of loops of a kernel."""
LOOP_FEATURES = 8
KERNEL_FEATURES = 10
ALGORITHMS = 8
"""The number of algorithms, including the two of inverted residuals."""
KNOB_FEATURES = ALGORITHMS + len(KNOBS)
SIZES = 13
TASK_FEATURES = SIZES + 6
_LEAST = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of N choices of one layer. `loops`: [N, LOOPS, LOOP_FEATURES] (zeros: no such loop). `knobs`: the
    algorithm (one-hot) and the knobs, [N, KNOB_FEATURES]. `kernel`: [N, KERNEL_FEATURES]. `task`: the features of the
    layer and the machine, [TASK_FEATURES]."""

    loops: Floats
    knobs: Floats
    kernel: Floats
    task: Floats

    def __len__(self) -> int:
        return len(self.knobs)

    @property
    def estimates(self) -> Floats:
        """The logarithms (base 2) of the estimated times of the choices, [N]."""
        return self.knobs[:, ALGORITHMS]

    def some(self, positions: npt.NDArray[np.int64]) -> Tokens:
        return Tokens(self.loops[positions], self.knobs[positions], self.kernel[positions], self.task)


def tokens_of(space: DesignSpace, positions: npt.NDArray[np.int64] | None = None) -> Tokens:
    """The tokens of the choices at these positions of a space (None: of all choices)."""
    layer, machine = space.layer, space.machine
    indices = range(space.size) if positions is None else positions.tolist()
    each = [layer.loops(space.choices[i]) for i in indices]
    loops = np.stack([_of_loops(some) for some in each])
    numbers = space.numbers[list(indices)]
    algorithm = np.eye(ALGORITHMS)[numbers[:, 0].astype(np.int64)]
    logs = np.where(numbers < 0, -1.0, np.log2(1.0 + np.maximum(numbers, 0.0)))
    estimates = np.log2(space.estimates[list(indices)])
    knobs = np.concatenate([algorithm, estimates[:, None], logs[:, 1:]], axis=1)
    kernel = np.array(
        [
            _of_kernel(some, layer.weights(space.choices[i]), layer, machine, estimate)
            for i, some, estimate in zip(indices, each, estimates.tolist())
        ]
    ).reshape(-1, KERNEL_FEATURES)
    return Tokens(
        loops.astype(np.float32),
        knobs.astype(np.float32),
        kernel.astype(np.float32),
        _of_task(layer, machine),
    )


def _of_loops(loops: Sequence[Loop]) -> npt.NDArray[np.float64]:
    """The features of each loop: the logarithms of its fields, of how often its body runs, and of the count of
    different numbers that an iteration uses."""
    features = np.zeros((LOOPS, LOOP_FEATURES))
    for i, (loop, total) in enumerate(zip(loops, totals(loops))):
        numbers = np.array([*loop.numbers, total, loop.image + loop.weights + loop.results])
        features[i, :-1] = np.log2(np.maximum(numbers, _LEAST) + 1.0)
        features[i, -1] = 1.0
    return features


def _of_kernel(
    loops: Sequence[Loop], read: int, layer: Measurable[Any], machine: Machine, estimate: float
) -> tuple[float, ...]:
    """The features of a kernel's token. All but the third and the fourth are logarithms:

    - the number of vectors of sums, and of weights, in the innermost loop; the fraction of the registers that they
      take;
    - how unevenly tasks are spread over the cores: the time of the busiest core divided by the mean time;
    - the computed multiplications divided by those that the layer needs; the multiplications for each number that the
      innermost loop reads; the estimated time divided by the computed multiplications;
    - for the weights, whose number is `read`: their bytes divided by the bytes of the second-level cache; how often
      tasks read each weight; and the multiplications for each weight.
    """
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
    """The features of a layer's token: the logarithms of the layer's dimensions and of the properties of the
    machine."""
    about = (
        machine.cores, machine.lanes, machine.registers, machine.second_level / 1024, int(machine.in_halves),
        layer.work / layer.weight,
    )  # fmt: skip
    features: Floats = np.log2(1.0 + np.array([*layer.sizes, *about], np.float64)).astype(np.float32)
    return features
