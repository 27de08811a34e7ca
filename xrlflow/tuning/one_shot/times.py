"""Predicted times of layers, for compilations that know no measured ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrlflow.backends.tvm import bands
from xrlflow.backends.tvm.algorithms import Algorithm, Timed, TimedBlock, Times
from xrlflow.backends.tvm.target import Machine
from xrlflow.backends.tvm.ways import Form
from xrlflow.tuning.blocks import Block, BlockWay
from xrlflow.tuning.layers import Layer
from xrlflow.tuning.measurable import Measurable
from xrlflow.tuning.one_shot.predictor import Predictor
from xrlflow.tuning.one_shot.tokens import tokens_of
from xrlflow.tuning.space import WaySpace

# So many ways of each algorithm are looked at, those with the least estimates.
_MOST = 200


@dataclass(frozen=True, slots=True)
class PredictedTimes:
    """The `Timings` of a predictor: of each algorithm the blocking with the least predicted time."""

    predictor: Predictor
    machine: Machine
    threads: int

    def of(self, form: Form, far: bool) -> Times:
        best: dict[Algorithm, Timed] = {}
        for way, seconds in self._ranked(Layer(form, far)):
            best.setdefault(way.algorithm, Timed(seconds, way.plan))
        return best

    def of_block(self, form: bands.Form, far: bool) -> TimedBlock | None:
        way: BlockWay
        way, seconds = next(self._ranked(Block(form, far)))
        return TimedBlock(seconds, way.plan)

    def _ranked(self, layer: Measurable[Any]) -> Iterator[tuple[Any, float]]:
        """Promising ways with their predicted seconds, the fastest first."""
        space = WaySpace.of(layer, self.machine)
        places = np.concatenate(
            [
                mine[np.argsort(space.estimates[mine], kind="stable")[:_MOST]]
                for kind in range(space.kinds)
                for mine in [np.flatnonzero(space.points[:, 0] == kind)]
            ]
        )
        seconds = self.predictor.seconds(tokens_of(space, self.threads, places), space.flops)
        for i in np.argsort(seconds, kind="stable"):
            yield space.ways[places[i]], float(seconds[i])
