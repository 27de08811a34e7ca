"""Predicted times of layers, for compilations that know no measured ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from xrlflow.backends.tvm import bands
from xrlflow.backends.tvm.algorithms import Algorithm, Timed, TimedBlock, Times, Timings
from xrlflow.backends.tvm.target import Machine
from xrlflow.backends.tvm.ways import Form
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.one_shot.predictor import Predictor
from xrlflow.tuning.one_shot.tokens import tokens_of
from xrlflow.tuning.space import WaySpace

# So many ways of each algorithm are looked at, those with the least estimates.
_MOST = 200
WORTH = 0.95
"""Another kernel must be predicted to take less than this part of the time of the one that estimates choose."""


@dataclass(frozen=True, slots=True)
class PredictedTimes:
    """The `Timings` of layers by a predictor: of each algorithm the blocking with the least predicted time. What
    `measured` knows goes before. Blocks are not predicted."""

    predictor: Predictor
    machine: Machine
    measured: Timings | None = None

    def of(self, form: Form, far: bool) -> Times:
        found = {} if self.measured is None else self.measured.of(form, far)
        return found or _times(self.predictor, self.machine, form, far)

    def of_block(self, form: bands.Form, far: bool) -> TimedBlock | None:
        return None if self.measured is None else self.measured.of_block(form, far)


@lru_cache(maxsize=4096)
def _times(predictor: Predictor, machine: Machine, form: Form, far: bool) -> Times:
    """The predicted times of a layer. They are kept, since a search compiles many graphs with the same layers."""
    layer = Layer(form, far)
    space = WaySpace.of(layer, machine)
    usual = space.ways.index(layer.estimated(machine))
    places, seconds = predicted(predictor, space, usual)
    seconds[places == usual] *= WORTH
    best: dict[Algorithm, Timed] = {}
    for i in np.argsort(seconds, kind="stable"):
        way = space.ways[places[i]]
        best.setdefault(way.algorithm, Timed(float(seconds[i]), way.plan))
    return MappingProxyType(best)


def predicted(
    predictor: Predictor, space: WaySpace, usual: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The places of promising ways of a layer, among them `usual`, and their predicted seconds. Ways with a large
    estimate are not promising."""
    found = [np.array([usual])]
    for kind in range(space.kinds):
        mine = np.flatnonzero(space.points[:, 0] == kind)
        found.append(mine[np.argsort(space.estimates[mine], kind="stable")[:_MOST]])
    places = np.unique(np.concatenate(found))
    return places, predictor.seconds(tokens_of(space, places))
