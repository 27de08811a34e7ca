"""Convolutions and products as layers to be measured: for each choice the kernel as a module of its own, and the
expected results.

A layer is identified by its workload. Its weights and images are random numbers, since times do not depend on them.
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
from xrlflow.backends.tvm.kernels.layer_kernels import (
    KERNELS,
    Algorithm,
    Floats,
    KernelChoice,
    LayerWorkload,
    algorithms_of,
    tiles_cost,
    title,
)
from xrlflow.backends.tvm.kernels.loops import Loop, loops_of, weights_of
from xrlflow.backends.tvm.lowering.executable import schedule_all
from xrlflow.backends.tvm.lowering.joined import joined
from xrlflow.backends.tvm.schedules.ratings import TileBlocking
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.tuning.alone import alone, run
from xrlflow.tuning.measurable import key_of, workload_key

if TYPE_CHECKING:
    from tvm.ir import IRModule


_INDICES = {algorithm: index for index, algorithm in enumerate(Algorithm)}


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution or product, whatever algorithm computes it (see `Measurable`). `weight`: how often the model calls
    it."""

    workload: LayerWorkload
    far: bool
    weight: int = 1

    @property
    def name(self) -> str:
        return title(self.workload)

    @property
    def key(self) -> str:
        return workload_key("layer", self.workload, self.far)

    @property
    def work(self) -> int:
        return self.weight * math.prod(self.workload.out) * self.workload.terms

    def needed(self, machine: Machine) -> tuple[Algorithm, ...]:
        return (plain(self.workload, machine),)

    def at(self, far: bool) -> Layer:
        return replace(self, far=far)

    def untuned_choice(self, algorithm: Algorithm, machine: Machine) -> KernelChoice:
        """The kernel that an untuned compilation uses if it chooses this algorithm."""
        if algorithm is not Algorithm.TILES:
            return KernelChoice(algorithm, KERNELS[algorithm].best_blocking(self.workload, machine))
        return KernelChoice(algorithm, next(iter(tiles.tile_choices(self.workload, machine)), None))

    def estimated(self, machine: Machine) -> KernelChoice:
        """The kernel with the least estimated time. An untuned compilation without a predictor uses it, if the rounding
        errors permit."""
        costs = estimates(self.workload, machine)
        return self.untuned_choice(min(costs, key=costs.__getitem__), machine)

    def untuned(self, machine: Machine) -> list[KernelChoice]:
        first = plain(self.workload, machine)
        others = [algorithm for algorithm in algorithms_of(self.workload) if algorithm is not first]
        return [self.untuned_choice(algorithm, machine) for algorithm in (first, *others)]

    def everything(self, machine: Machine) -> list[KernelChoice]:
        choices = [
            KernelChoice(Algorithm.TILES, blocking)
            for blocking in tiles.tile_choices(self.workload, machine) or (None,)
        ]
        for algorithm in algorithms_of(self.workload):
            if algorithm is not Algorithm.TILES:
                blockings = dict.fromkeys(KERNELS[algorithm].blockings(self.workload, machine))
                choices += [KernelChoice(algorithm, blocking) for blocking in blockings]
        return choices

    def numbers(self, choice: KernelChoice) -> dict[str, int]:
        algorithm = {"algorithm": _INDICES[choice.algorithm]}
        if isinstance(choice.blocking, TileBlocking):
            tile = choice.blocking.tile
            blocked = {"rows": tile.rows, "vectors": tile.columns // tile.lanes, "lanes": tile.lanes}
            return algorithm | blocked | {"order": int(choice.blocking.columns_first)}
        if choice.algorithm is Algorithm.TILES:
            return algorithm
        return algorithm | KERNELS[choice.algorithm].numbers(self.workload, choice.blocking)

    def loops(self, choice: KernelChoice) -> list[Loop]:
        return loops_of(self.workload, choice)

    def weights(self, choice: KernelChoice) -> int:
        return weights_of(self.workload, choice)

    def estimate(self, choice: KernelChoice, machine: Machine) -> float:
        if choice.algorithm is Algorithm.TILES:
            return tiles_cost(self.workload, machine)
        return KERNELS[choice.algorithm].cost(self.workload, choice.blocking, machine)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The pixels (or rows) of the image and of the result, the width of the result, channels of both, terms,
        window, groups, stride, steps, the extra operands that are as large as the result, whether weights come from
        memory, and a 0 (see `Block.sizes`)."""
        workload = self.workload
        read, written = math.prod(workload.image[:-1]), math.prod(workload.out[:-1])
        window, groups, stride = 1, 1, 1
        if isinstance(workload, direct.Convolution):
            window, groups, stride = math.prod(workload.window), workload.groups, max(workload.strides)
        width = workload.out[-2] if len(workload.out) > 1 else 1
        large = sum(not extra.by_channel for extra in workload.extras)
        return (
            read, written, width, workload.image[-1], workload.out[-1], workload.terms, window, groups, stride,
            len(workload.steps), large, int(self.far), 0,
        )  # fmt: skip

    def stored(self, text: str) -> KernelChoice | None:
        return KernelChoice.stored(text)

    def is_current(self, choice: KernelChoice, key: str, machine: Machine) -> bool:
        if choice.algorithm not in algorithms_of(self.workload):
            return False
        if choice.algorithm is Algorithm.TILES:
            current: Any = tiles.tile_choices(self.workload, machine) or (None,)
        else:
            current = _blockings(self.workload, choice.algorithm, machine)
        try:
            return choice.blocking in current and key_of(self, choice, machine) == key
        except BackendError:  # this version has no such kernel for the layer
            return False

    def kernel(self, choice: KernelChoice, machine: Machine) -> IRModule:
        """The kernel of a choice. If TILES need further kernels for padding and cropping, one function runs all of
        them."""
        if choice.algorithm is not Algorithm.TILES:
            return _written(self.workload, choice)
        return _tiled(self.workload, choice, machine)

    def arguments(self, choice: KernelChoice, machine: Machine) -> list[Floats] | None:
        """The arguments of the kernel. None for TILES with the untuned blocking, since its results are the expected
        results of all other kernels."""
        workload, operands = self.workload, tiles.random_operands(self.workload)
        if choice == self.untuned_choice(Algorithm.TILES, machine):
            return None
        if choice.algorithm is Algorithm.TILES:
            only = tiles.only_kernel(tiles.fused(workload, machine))
            return (
                None if only is None else tiles.arguments(only, _tiled(workload, choice, machine), workload)
            )
        large = tiles.random_variables(workload)
        packed = KERNELS[choice.algorithm].packed(operands.weights, workload, choice.blocking)
        extras = [large[f"extra{i}"] if x is None else x for i, x in enumerate(operands.extras)]
        return [large["image"], packed, *extras]

    def expected(self, machine: Machine) -> Floats:
        """The expected results: the output of TILES with the untuned blocking."""
        return run(_scheduled(self.workload, machine), tiles.random_variables(self.workload), machine)


@cache
def _blockings(workload: LayerWorkload, algorithm: Algorithm, machine: Machine) -> frozenset[Any]:
    return frozenset(KERNELS[algorithm].blockings(workload, machine))


@cache
def _written(workload: LayerWorkload, choice: KernelChoice) -> IRModule:
    with heeding_interrupts():
        return alone(KERNELS[choice.algorithm].code(workload, choice.blocking))


@cache
def _tiled(workload: LayerWorkload, choice: KernelChoice, machine: Machine) -> IRModule:
    if choice.blocking is not None:
        assert isinstance(choice.blocking, TileBlocking)
        only = tiles.only_kernel(tiles.fused(workload, machine))
        scheduled = None if only is None else tiles.tiled(only, choice.blocking, machine)
        if scheduled is None:
            raise BackendError(f"{title(workload)} has no kernel of {choice}")
        return alone(scheduled)
    return alone(joined(_scheduled(workload, machine))[0])


def _scheduled(workload: LayerWorkload, machine: Machine) -> Any:
    """The scheduled module of a layer for TILES with the untuned blocking."""
    return schedule_all(tiles.fuse_layer(workload, tiles.random_operands(workload), machine), machine)
