"""Depthwise convolutions with their pointwise neighbours as blocks to measure: one kernel for each convolution, or one
in bands for all.

A block is known by its form. Its weights and images are drawn, since times do not depend on them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from xrlflow.backends.interrupts import heeding_interrupts
from xrlflow.backends.protocol import BackendError
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.fusion.tiles import with_steps
from xrlflow.backends.tvm.kernels.algorithms import Algorithms
from xrlflow.backends.tvm.kernels.bands import (
    BandBlocking,
    ConvBlock,
    Tile,
    by_channel,
    kernel,
    packed_expansion,
    packed_projection,
)
from xrlflow.backends.tvm.kernels.bands_plan import best_blocking, blockings, cost, untuned_blocking
from xrlflow.backends.tvm.kernels.building import FLOAT
from xrlflow.backends.tvm.kernels.layer_kernels import Algorithm, Floats, is_typed
from xrlflow.backends.tvm.kernels.loops import Loop, loops_of_bands, weights_of_bands
from xrlflow.backends.tvm.kernels.steps import Step, extras_of
from xrlflow.backends.tvm.lowering.executable import schedule_all
from xrlflow.backends.tvm.lowering.joined import joined
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.tuning.alone import alone, run
from xrlflow.tuning.measurable import key_of, workload_key

if TYPE_CHECKING:
    from tvm.ir import IRModule


class Kernels(Enum):
    """What computes a block."""

    APART = "one by one"
    BANDS = "bands"


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """The blocking of a block's kernel in bands; None: one kernel for each convolution."""

    blocking: BandBlocking | None = None

    @property
    def group(self) -> Kernels:
        return Kernels.APART if self.blocking is None else Kernels.BANDS

    @property
    def text(self) -> str:
        """As it is stored: JSON."""
        return json.dumps([self.group.value, None if self.blocking is None else asdict(self.blocking)])

    @staticmethod
    def stored(text: str) -> BlockChoice | None:
        """The way of a record; None if another version of the program wrote something else."""
        try:
            name, values = json.loads(text)
            blocking = None
            if values is not None:
                expand, project = (Tile(**values.pop(part)) for part in ("expand", "project"))
                blocking = BandBlocking(expand, project, **values)
            choice = BlockChoice(blocking)
            return (
                choice if choice.group is Kernels(name) and (blocking is None or is_typed(blocking)) else None
            )
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None

    def __str__(self) -> str:
        blocking = self.blocking
        if blocking is None:
            return self.group.value
        parts = f" in {blocking.parts} parts" if blocking.parts > 1 else ""
        tiles = ", ".join(f"{tile.rows}x{tile.columns}" for tile in (blocking.expand, blocking.project))
        return f"bands of {blocking.band} by {blocking.block}{parts}, {tiles}"


@dataclass(frozen=True, slots=True)
class Block:
    """A depthwise convolution with its neighbours (see `Measurable`). `weight`: how often the model calls it."""

    workload: ConvBlock
    far: bool
    weight: int = 1

    @property
    def name(self) -> str:
        workload = self.workload
        channels = [workload.middle[3]]
        if workload.expand is not None:
            channels.insert(0, workload.image[3])
        if workload.project is not None:
            channels.append(workload.out[3])
        window, stride = "x".join(map(str, workload.window)), max(workload.strides)
        strided = f" with stride {stride}" if stride > 1 else ""
        among = " to ".join(map(str, channels))
        return f"{window} block of {among} channels at {workload.image[1]}x{workload.image[2]}{strided}"

    @property
    def key(self) -> str:
        return workload_key("block", self.workload, self.far)

    @property
    def work(self) -> int:
        workload, wide = self.workload, self.workload.middle[3]
        expand = 0 if workload.expand is None else math.prod(workload.image) * wide
        project = 0 if workload.project is None else math.prod(workload.out) * wide
        return self.weight * (expand + math.prod(workload.middle) * math.prod(workload.window) + project)

    def needed(self, machine: Machine) -> tuple[Kernels, ...]:
        return Kernels.APART, Kernels.BANDS

    def at(self, far: bool) -> Block:
        return replace(self, far=far)

    def usual(self, machine: Machine) -> BlockChoice:
        """What an untuned compilation chooses."""
        return BlockChoice(untuned_blocking(self.workload, machine))

    def untuned(self, machine: Machine) -> list[BlockChoice]:
        return [BlockChoice(), BlockChoice(best_blocking(self.workload, machine))]

    def everything(self, machine: Machine) -> list[BlockChoice]:
        return [BlockChoice(), *map(BlockChoice, dict.fromkeys(blockings(self.workload, machine)))]

    def numbers(self, choice: BlockChoice) -> dict[str, int]:
        algorithm = {"algorithm": len(Algorithm) + list(Kernels).index(choice.group)}
        if (blocking := choice.blocking) is None:
            return algorithm
        return algorithm | {
            "rows": blocking.expand.rows, "vectors": blocking.expand.columns // blocking.lanes, "lanes": blocking.lanes,
            "blocks": blocking.bands(self.workload), "parts": blocking.parts, "order": blocking.block // blocking.lanes,
            "other rows": blocking.project.rows,
        }  # fmt: skip

    def loops(self, choice: BlockChoice) -> list[Loop]:
        return [] if choice.blocking is None else loops_of_bands(self.workload, choice.blocking)

    def weights(self, choice: BlockChoice) -> int:
        return weights_of_bands(self.workload)

    def estimate(self, choice: BlockChoice, machine: Machine) -> float:
        """One kernel for each convolution has no estimate: it counts as the usual blocking."""
        return cost(self.workload, choice.blocking or best_blocking(self.workload, machine), machine)

    @property
    def sizes(self) -> tuple[int, ...]:
        """As of `Layer`, with the expanded channels in the end."""
        workload = self.workload
        convolutions = (workload.expand, workload.depthwise, workload.project)
        steps = [step for some in convolutions if some is not None for step in some]
        large = sum(not extra.by_channel for extra in extras_of(steps))
        window = math.prod(workload.window)
        return (
            math.prod(workload.image[:3]), math.prod(workload.middle[:3]), workload.out[2], workload.image[3],
            workload.out[3], workload.image[3], window, workload.middle[3], max(workload.strides), len(steps), large,
            int(self.far), workload.middle[3],
        )  # fmt: skip

    def stored(self, text: str) -> BlockChoice | None:
        return BlockChoice.stored(text)

    def is_current(self, choice: BlockChoice, key: str, machine: Machine) -> bool:
        if choice.blocking is not None and choice.blocking not in set(blockings(self.workload, machine)):
            return False
        try:
            return key_of(self, choice, machine) == key
        except BackendError:  # today the block has no kernels of its own
            return False

    def kernel(self, choice: BlockChoice, machine: Machine) -> IRModule:
        if choice.blocking is None:
            return _apart(self.workload, machine)[0]
        return _in_bands(self.workload, choice.blocking)

    def arguments(self, choice: BlockChoice, machine: Machine) -> list[Floats]:
        workload, blocking = self.workload, choice.blocking
        drawn = _drawn(workload)
        if blocking is None:
            return [drawn.image, *drawn.large.values(), *_apart(workload, machine)[1]]
        found = [drawn.image]
        if (first := drawn.expand) is not None:
            found.append(packed_expansion(first.weights[0, 0], workload, blocking))
            found += [by_channel(extra, workload, blocking) for extra in first.extras]
        found.append(by_channel(drawn.depthwise.weights[:, :, 0], workload, blocking))
        found += [by_channel(extra, workload, blocking) for extra in drawn.depthwise.extras]
        if (last := drawn.project) is not None:
            found.append(packed_projection(last.weights[0, 0], workload, blocking))
            found += last.extras
        return found

    def expected(self, machine: Machine) -> Floats:
        """What one kernel for each convolution computes."""
        drawn = _drawn(self.workload)
        given = {"image": drawn.image, **{f"extra{i}": array for i, array in drawn.large.items()}}
        return run(_scheduled(self.workload, machine), given, machine)


@dataclass(frozen=True, slots=True, eq=False)
class _Convolution:
    """Weights [row, column, input channel, channel], the steps that follow, and the values of their extras."""

    weights: Floats
    steps: tuple[Step, ...]
    extras: list[Floats]


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    """What a block reads. `large`: the extras of the last convolution that are as large as the result, by number."""

    image: Floats
    expand: _Convolution | None
    depthwise: _Convolution
    project: _Convolution | None
    large: dict[int, Floats]


def _drawn(workload: ConvBlock) -> _Drawn:
    rng = np.random.default_rng(0)

    def draw(shape: tuple[int, ...], steps: tuple[Step, ...]) -> _Convolution:
        scale = np.float32(math.prod(shape[:3]) ** -0.5)
        weights = rng.standard_normal(shape, np.float32) * scale
        shapes = [shape[3:] if extra.by_channel else workload.out for extra in extras_of(steps)]
        return _Convolution(weights, steps, [rng.standard_normal(each, np.float32) for each in shapes])

    wide = workload.middle[3]
    expand = None if workload.expand is None else draw((1, 1, workload.image[3], wide), workload.expand)
    depthwise = draw((*workload.window, 1, wide), workload.depthwise)
    project = None if workload.project is None else draw((1, 1, wide, workload.out[3]), workload.project)
    extras = [] if project is None else zip(project.extras, extras_of(project.steps))
    large = {i: array for i, (array, extra) in enumerate(extras) if not extra.by_channel}
    image = rng.standard_normal(workload.image, np.float32)
    return _Drawn(image, expand, depthwise, project, large)


@cache
def _in_bands(workload: ConvBlock, blocking: BandBlocking) -> IRModule:
    with heeding_interrupts():
        return alone(kernel(workload, blocking))


@cache
def _apart(workload: ConvBlock, machine: Machine) -> tuple[IRModule, tuple[Floats, ...]]:
    """All kernels of a block one after the other, and the constants that they read.

    They are one function, since between them nothing replaces what the caches hold.
    """
    function, constants = joined(_scheduled(workload, machine))
    return alone(function), tuple(constants)


def _scheduled(workload: ConvBlock, machine: Machine) -> IRModule:
    """The scheduled module of a block with one kernel for each convolution."""
    module = fuse(_module(workload), machine, channels_last=False, algorithms=Algorithms(blocks=False))
    return schedule_all(module, machine)


def _module(workload: ConvBlock) -> IRModule:
    """A Relax module of the block: "main" takes the image and the extras that are as large as the result."""
    tvm()
    from tvm import relax

    builder, drawn = relax.BlockBuilder(), _drawn(workload)
    at = relax.Var("image", relax.TensorType(workload.image, FLOAT))
    given = {i: relax.Var(f"extra{i}", relax.TensorType(workload.out, FLOAT)) for i in drawn.large}

    def followed(expression: Any, by: _Convolution, large: Mapping[int, Any]) -> Any:
        extras = [large.get(i, relax.const(x.reshape(1, 1, 1, -1))) for i, x in enumerate(by.extras)]
        return with_steps(builder, builder.emit(expression), by.steps, extras)

    with builder.function("main", [at, *given.values()]):
        with builder.dataflow():
            if (first := drawn.expand) is not None:
                at = followed(_convolved(at, first), first, {})
            middle = drawn.depthwise
            convolved = _convolved(at, middle, workload.strides, _padding(workload), workload.middle[3])
            at = followed(convolved, middle, {})
            if (last := drawn.project) is not None:
                at = followed(_convolved(at, last), last, given)
            result = builder.emit_output(at)
        builder.emit_func_output(result)
    return builder.get()


def _convolved(
    image: Any,
    convolution: _Convolution,
    strides: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    groups: int = 1,
) -> Any:
    from tvm import relax

    return relax.op.nn.conv2d(
        image, relax.const(convolution.weights), strides=list(strides), padding=list(padding), groups=groups,
        data_layout="NHWC", kernel_layout="HWIO", out_layout="NHWC",
    )  # fmt: skip


def _padding(workload: ConvBlock) -> list[int]:
    """Top, left, bottom and right: as much as the last window reaches beyond the image."""
    ends = [
        max(0, (out - 1) * stride + window - size - before)
        for out, stride, window, size, before in zip(
            workload.middle[1:3],
            workload.strides,
            workload.window,
            workload.image[1:3],
            (workload.top, workload.left),
        )
    ]
    return [workload.top, workload.left, *ends]
