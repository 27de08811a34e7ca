"""Convolutions and products as layers to measure: the kernels of each way, alone, and what they compute.

A layer is known by its form. Its weights and images are drawn, since times do not depend on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from xrlflow.backends.interrupts import heeding_interrupts
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.fusion import tiles
from xrlflow.backends.tvm.fusion.layers import estimates, plain
from xrlflow.backends.tvm.kernels import direct
from xrlflow.backends.tvm.kernels.loops import Loop, loops_of, weights_of
from xrlflow.backends.tvm.kernels.ways import (
    KERNELS,
    Algorithm,
    Floats,
    LayerForm,
    Way,
    algorithms_of,
    tiles_cost,
    title,
)
from xrlflow.backends.tvm.lowering.executable import schedule_all
from xrlflow.backends.tvm.lowering.joined import joined
from xrlflow.backends.tvm.schedules.ratings import TileBlocking
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.tuning.alone import alone, run
from xrlflow.tuning.measurable import form_key, key_of

if TYPE_CHECKING:
    from tvm.ir import IRModule


_PLACES = {algorithm: place for place, algorithm in enumerate(Algorithm)}


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution or product, of whichever algorithm (see `Measurable`). `weight`: how often the model calls it."""

    form: LayerForm
    far: bool
    weight: int = 1

    @property
    def name(self) -> str:
        return title(self.form)

    @property
    def key(self) -> str:
        return form_key("layer", self.form, self.far)

    @property
    def work(self) -> int:
        return self.weight * math.prod(self.form.out) * self.form.terms

    def needed(self, machine: Machine) -> tuple[Algorithm, ...]:
        return (plain(self.form, machine),)

    def at(self, far: bool) -> Layer:
        return replace(self, far=far)

    def usual(self, algorithm: Algorithm, machine: Machine) -> Way:
        """The kernel of an algorithm in an untuned compilation."""
        if algorithm is not Algorithm.TILES:
            return Way(algorithm, KERNELS[algorithm].usual(self.form, machine))
        return Way(algorithm, next(iter(tiles.tile_choices(self.form, machine)), None))

    def estimated(self, machine: Machine) -> Way:
        """The kernel of an untuned compilation without a predictor, whatever its errors."""
        costs = estimates(self.form, machine)
        return self.usual(min(costs, key=costs.__getitem__), machine)

    def untuned(self, machine: Machine) -> list[Way]:
        first = plain(self.form, machine)
        others = [algorithm for algorithm in algorithms_of(self.form) if algorithm is not first]
        return [self.usual(algorithm, machine) for algorithm in (first, *others)]

    def everything(self, machine: Machine) -> list[Way]:
        found = [Way(Algorithm.TILES, how) for how in tiles.tile_choices(self.form, machine) or (None,)]
        for algorithm in algorithms_of(self.form):
            if algorithm is not Algorithm.TILES:
                plans = dict.fromkeys(KERNELS[algorithm].plans(self.form, machine))
                found += [Way(algorithm, how) for how in plans]
        return found

    def numbers(self, way: Way) -> dict[str, int]:
        algorithm = {"algorithm": _PLACES[way.algorithm]}
        if isinstance(way.plan, TileBlocking):
            tile = way.plan.tile
            blocked = {"rows": tile.rows, "vectors": tile.columns // tile.lanes, "lanes": tile.lanes}
            return algorithm | blocked | {"order": int(way.plan.columns_first)}
        if way.algorithm is Algorithm.TILES:
            return algorithm
        return algorithm | KERNELS[way.algorithm].numbers(self.form, way.plan)

    def loops(self, way: Way) -> list[Loop]:
        return loops_of(self.form, way)

    def weights(self, way: Way) -> int:
        return weights_of(self.form, way)

    def estimate(self, way: Way, machine: Machine) -> float:
        if way.algorithm is Algorithm.TILES:
            return tiles_cost(self.form, machine)
        return KERNELS[way.algorithm].cost(self.form, way.plan, machine)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows and columns of the image and of the result, channels, groups, terms, extras of the steps, and whether
        weights come from memory."""
        form = self.form
        read, written = math.prod(form.image[:-1]), math.prod(form.out[:-1])
        window, groups, stride = 1, 1, 1
        if isinstance(form, direct.Convolution):
            window, groups, stride = math.prod(form.window), form.groups, max(form.strides)
        width = form.out[-2] if len(form.out) > 1 else 1
        large = sum(not extra.by_channel for extra in form.extras)
        return (
            read, written, width, form.image[-1], form.out[-1], form.terms, window, groups, stride,
            len(form.steps), large, int(self.far), 0,
        )  # fmt: skip

    def stored(self, text: str) -> Way | None:
        return Way.stored(text)

    def is_current(self, way: Way, key: str, machine: Machine) -> bool:
        if way.algorithm not in algorithms_of(self.form):
            return False
        if way.algorithm is Algorithm.TILES:
            known: Any = tiles.tile_choices(self.form, machine) or (None,)
        else:
            known = _plans(self.form, way.algorithm, machine)
        try:
            return way.plan in known and key_of(self, way, machine) == key
        except BackendError:  # today the layer has no such kernel
            return False

    def kernel(self, way: Way, machine: Machine) -> IRModule:
        """Tiles with other kernels beside them, which pad and crop, are one function with those."""
        if way.algorithm is not Algorithm.TILES:
            return _written(self.form, way)
        return _tiled(self.form, way, machine)

    def arguments(self, way: Way, machine: Machine) -> list[Floats] | None:
        """Results are compared with those of the untuned tiles, which are not compared themselves."""
        form, given = self.form, tiles.drawn(self.form)
        if way == self.usual(Algorithm.TILES, machine):
            return None
        if way.algorithm is Algorithm.TILES:
            only = tiles.only_kernel(tiles.fused(form, machine))
            return None if only is None else tiles.arguments(only, _tiled(form, way, machine), form)
        large = tiles.large_of(form)
        packed = KERNELS[way.algorithm].packed(given.weights, form, way.plan)
        extras = [large[f"extra{i}"] if x is None else x for i, x in enumerate(given.extras)]
        return [large["image"], packed, *extras]

    def expected(self, machine: Machine) -> Floats:
        """What untuned tiles compute."""
        return run(_scheduled(self.form, machine), tiles.large_of(self.form), machine)


@cache
def _plans(form: LayerForm, algorithm: Algorithm, machine: Machine) -> frozenset[Any]:
    return frozenset(KERNELS[algorithm].plans(form, machine))


@cache
def _written(form: LayerForm, way: Way) -> IRModule:
    with heeding_interrupts():
        return alone(KERNELS[way.algorithm].code(form, way.plan))


@cache
def _tiled(form: LayerForm, way: Way, machine: Machine) -> IRModule:
    if way.plan is not None:
        assert isinstance(way.plan, TileBlocking)
        only = tiles.only_kernel(tiles.fused(form, machine))
        scheduled = None if only is None else tiles.tiled(only, way.plan, machine)
        if scheduled is None:
            raise BackendError(f"{title(form)} has no kernel of {way}")
        return alone(scheduled)
    return alone(joined(_scheduled(form, machine))[0])


def _scheduled(form: LayerForm, machine: Machine) -> Any:
    """The scheduled module of a layer with untuned tiles."""
    return schedule_all(tiles.fuse_alone(form, tiles.drawn(form), machine), machine)
