"""Predicted times of layers, for compilations that know no measured ones."""

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

# So many ways of each algorithm are looked at, those with the least estimates.
_MOST = 200
WORTH = 0.95
"""Another kernel must be predicted to take less than this part of the time of the one that estimates choose."""
LARGEST = 2e7
"""Numbers of a layer's image, weights or result, at most: a predictor learned from none that are larger."""
_CODE = (
    *Path(__file__).parent.glob("*.py"),
    *map(Path(__file__).parents[1].joinpath, ("layers.py", "space.py")),
)


@dataclass(frozen=True, slots=True)
class PredictedTimes:
    """The `Timings` of layers by a predictor: of each algorithm the blocking with the least predicted time. What
    `measured` knows goes before. Blocks are not predicted, and no layer that is larger than `LARGEST`."""

    predictor: Predictor
    machine: Machine
    measured: Timings | None = None

    def of(self, workload: LayerWorkload, far: bool) -> Times:
        found = {} if self.measured is None else self.measured.of(workload, far)
        if found or not predictable(Layer(workload, far)):
            return found
        return _times(self.predictor, self.machine, workload, far)

    def of_block(self, workload: bands.ConvBlock, far: bool) -> TimedBlock | None:
        return None if self.measured is None else self.measured.of_block(workload, far)


def predictable(layer: Measurable[Any]) -> TypeGuard[Layer]:
    """Whether a predictor learned from layers of such a kind and size."""
    return isinstance(layer, Layer) and largest(layer.workload) <= LARGEST


def largest(workload: LayerWorkload) -> int:
    """How many numbers the image, the weights or the result of a layer has, whichever has the most."""
    return max(math.prod(workload.image), math.prod(workload.out), workload.terms * workload.out[-1])


@cache
def version_of(predictor: Predictor) -> str:
    """Changes with what a predictor chooses: its weights, and the code that uses them."""
    digest = hashlib.blake2b(digest_size=6)
    digest.update(repr((predictor.shape, predictor.standard)).encode())
    for name, array in sorted(predictor.weights.items()):
        digest.update(name.encode() + array.tobytes())
    for path in sorted(_CODE):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=4096)
def _times(predictor: Predictor, machine: Machine, workload: LayerWorkload, far: bool) -> Times:
    """The predicted times of a layer. They are kept, since a search compiles many graphs with the same layers."""
    layer = Layer(workload, far)
    space = DesignSpace.of(layer, machine)
    usual = space.choices.index(layer.estimated(machine))
    places, seconds = predicted(predictor, space, usual)
    seconds[places == usual] *= WORTH
    best: dict[Algorithm, Timed] = {}
    for i in np.argsort(seconds, kind="stable"):
        choice = space.choices[places[i]]
        best.setdefault(choice.algorithm, Timed(float(seconds[i]), choice.blocking))
    return MappingProxyType(best)


def predicted(
    predictor: Predictor, space: DesignSpace, usual: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The places of promising ways of a layer, among them `usual`, and their predicted seconds. Ways with a large
    estimate are not promising."""
    found = [np.array([usual])]
    for kind in range(space.kinds):
        mine = np.flatnonzero(space.points[:, 0] == kind)
        found.append(mine[np.argsort(space.estimates[mine], kind="stable")[:_MOST]])
    places = np.unique(np.concatenate(found))
    return places, predictor.seconds(tokens_of(space, places))
