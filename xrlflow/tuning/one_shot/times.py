"""Predicted times of layers, for compilations that have no measured times."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm.kernels import bands
from xrlflow.backends.tvm.kernels.algorithms import Timed, TimedBlock, Times, Timings
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm, LayerWorkload
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.measurable import Measurable
from xrlflow.tuning.one_shot.predictor import Predictor
from xrlflow.tuning.one_shot.tokens import tokens_of
from xrlflow.tuning.space import DesignSpace

# The number of choices of each algorithm that are scored: those with the least estimated times.
_MOST = 200
WORTH = 0.95
"""A kernel replaces the kernel with the least estimated time only if it is predicted to take less than this fraction of
that kernel's time."""
LARGEST = 2e7
"""The greatest number of elements of a layer's image, weights or result: predictors were not trained with larger
layers."""
_CODE = (
    *Path(__file__).parent.glob("*.py"),
    *map(Path(__file__).parents[1].joinpath, ("layers.py", "space.py")),
)


@dataclass(frozen=True, slots=True)
class PredictedTimes:
    """The `Timings` of layers by a predictor: for each algorithm the blocking with the least predicted time.
    `measured`: measured times, which replace predicted times where they exist. Nothing is predicted for inverted
    residuals, and for layers larger than `LARGEST`."""

    predictor: Predictor
    machine: Machine
    measured: Timings | None = None

    def of(self, workload: LayerWorkload, far: bool) -> Times:
        measured = {} if self.measured is None else self.measured.of(workload, far)
        if measured or not predictable(Layer(workload, far)):
            return measured
        return _times(self.predictor, self.machine, workload, far)

    def of_block(self, workload: bands.ConvBlock, far: bool) -> TimedBlock | None:
        return None if self.measured is None else self.measured.of_block(workload, far)


def predictable(layer: Measurable[Any]) -> TypeGuard[Layer]:
    """Whether a predictor was trained with layers of this kind and size."""
    return isinstance(layer, Layer) and largest(layer.workload) <= LARGEST


def largest(workload: LayerWorkload) -> int:
    """The number of elements of a layer's image, weights or result, whichever is largest."""
    return max(math.prod(workload.image), math.prod(workload.out), workload.terms * workload.out[-1])


@cache
def version_of(predictor: Predictor) -> str:
    """A text that changes whenever the kernels that a predictor chooses may change: a digest of its weights, and of the
    code that uses them."""
    digest = hashlib.blake2b(digest_size=6)
    digest.update(repr((predictor.shape, predictor.standard)).encode())
    for name, array in sorted(predictor.weights.items()):
        digest.update(name.encode() + array.tobytes())
    for path in sorted(_CODE):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=4096)
def _times(predictor: Predictor, machine: Machine, workload: LayerWorkload, far: bool) -> Times:
    """The predicted times of a layer. They are cached, since a search compiles many graphs with the same layers."""
    layer = Layer(workload, far)
    space = DesignSpace.of(layer, machine)
    untuned = space.choices.index(layer.estimated(machine))
    positions, seconds = predicted(predictor, space, untuned)
    seconds[positions == untuned] *= WORTH
    best: dict[Algorithm, Timed] = {}
    for i in np.argsort(seconds, kind="stable"):
        choice = space.choices[positions[i]]
        best.setdefault(choice.algorithm, Timed(float(seconds[i]), choice.blocking))
    return MappingProxyType(best)


def predicted(
    predictor: Predictor, space: DesignSpace, untuned: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The positions of promising choices in the design space of a layer, among them `untuned`, and the predicted
    seconds of these choices. Choices with a large estimated time are not promising."""
    candidates = [np.array([untuned])]
    for kind in range(space.kinds):
        mine = np.flatnonzero(space.points[:, 0] == kind)
        candidates.append(mine[np.argsort(space.estimates[mine], kind="stable")[:_MOST]])
    positions = np.unique(np.concatenate(candidates))
    return positions, predictor.seconds(tokens_of(space, positions))
