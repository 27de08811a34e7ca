"""Inverted residuals (depthwise convolutions with pointwise neighbours) as layers to be measured: with one kernel for
each convolution, or with one fused kernel, which computes a few rows at a time (a band). The package `tuning` calls
inverted residuals blocks.

A block is identified by its workload. Its weights and images are random numbers, since times do not depend on them.
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
    """The two groups of kernels for an inverted residual: one kernel for each convolution, or one fused kernel."""

    APART = "one by one"
    BANDS = "bands"


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """A choice of kernels for an inverted residual. `blocking`: the blocking of the fused kernel; None: one kernel for
    each convolution."""

    blocking: BandBlocking | None = None

    @property
    def group(self) -> Kernels:
        return Kernels.APART if self.blocking is None else Kernels.BANDS

    @property
    def text(self) -> str:
        """The choice as JSON text, in which it is stored."""
        return json.dumps([self.group.value, None if self.blocking is None else asdict(self.blocking)])

    @staticmethod
    def stored(text: str) -> BlockChoice | None:
        """The choice that a stored text describes; None if another version of the program wrote a text that this
        version cannot read."""
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
    """An inverted residual (see `Measurable`). `weight`: how often the model calls it."""

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

    def untuned_choice(self, machine: Machine) -> BlockChoice:
        """The choice that an untuned compilation makes."""
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
        """The estimated time. If `choice` is one kernel for each convolution, there is no estimate, and the time of the
        best blocking of the fused kernel is returned."""
        return cost(self.workload, choice.blocking or best_blocking(self.workload, machine), machine)

    @property
    def sizes(self) -> tuple[int, ...]:
        """See `Layer.sizes`. The last number is the number of expanded channels."""
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
        except BackendError:  # this version has no kernels for the block
            return False

    def kernel(self, choice: BlockChoice, machine: Machine) -> IRModule:
        if choice.blocking is None:
            return _apart(self.workload, machine)[0]
        return _in_bands(self.workload, choice.blocking)

    def arguments(self, choice: BlockChoice, machine: Machine) -> list[Floats]:
        workload, blocking = self.workload, choice.blocking
        samples = _samples(workload)
        if blocking is None:
            return [samples.image, *samples.large.values(), *_apart(workload, machine)[1]]
        arrays = [samples.image]
        if (first := samples.expand) is not None:
            arrays.append(packed_expansion(first.weights[0, 0], workload, blocking))
            arrays += [by_channel(extra, workload, blocking) for extra in first.extras]
        arrays.append(by_channel(samples.depthwise.weights[:, :, 0], workload, blocking))
        arrays += [by_channel(extra, workload, blocking) for extra in samples.depthwise.extras]
        if (last := samples.project) is not None:
            arrays.append(packed_projection(last.weights[0, 0], workload, blocking))
            arrays += last.extras
        return arrays

    def expected(self, machine: Machine) -> Floats:
        """The output of one kernel for each convolution."""
        samples = _samples(self.workload)
        inputs = {"image": samples.image, **{f"extra{i}": array for i, array in samples.large.items()}}
        return run(_scheduled(self.workload, machine), inputs, machine)


@dataclass(frozen=True, slots=True, eq=False)
class _Convolution:
    """Weights [row, column, input channel, channel], the steps after the convolution, and the values of the steps'
    extra operands."""

    weights: Floats
    steps: tuple[Step, ...]
    extras: list[Floats]


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """Random inputs of a block. `large`: those extra operands of the last convolution that are as large as the result,
    by their numbers."""

    image: Floats
    expand: _Convolution | None
    depthwise: _Convolution
    project: _Convolution | None
    large: dict[int, Floats]


def _samples(workload: ConvBlock) -> _Samples:
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
    return _Samples(image, expand, depthwise, project, large)


@cache
def _in_bands(workload: ConvBlock, blocking: BandBlocking) -> IRModule:
    with heeding_interrupts():
        return alone(kernel(workload, blocking))


@cache
def _apart(workload: ConvBlock, machine: Machine) -> tuple[IRModule, tuple[Floats, ...]]:
    """A function that runs all separate kernels of a block one after the other, and the constants that it reads.

    The kernels are measured together, because nothing replaces the contents of the caches between them in a model.
    """
    function, constants = joined(_scheduled(workload, machine))
    return alone(function), tuple(constants)


def _scheduled(workload: ConvBlock, machine: Machine) -> IRModule:
    """The scheduled module of a block with one kernel for each convolution."""
    module = fuse(_module(workload), machine, channels_last=False, algorithms=Algorithms(blocks=False))
    return schedule_all(module, machine)


def _module(workload: ConvBlock) -> IRModule:
    """A Relax module of the block: the parameters of "main" are the image and the extra operands that are as large as
    the result."""
    tvm()
    from tvm import relax

    builder, samples = relax.BlockBuilder(), _samples(workload)
    at = relax.Var("image", relax.TensorType(workload.image, FLOAT))
    variables = {i: relax.Var(f"extra{i}", relax.TensorType(workload.out, FLOAT)) for i in samples.large}

    def followed(expression: Any, by: _Convolution, large: Mapping[int, Any]) -> Any:
        extras = [large.get(i, relax.const(x.reshape(1, 1, 1, -1))) for i, x in enumerate(by.extras)]
        return with_steps(builder, builder.emit(expression), by.steps, extras)

    with builder.function("main", [at, *variables.values()]):
        with builder.dataflow():
            if (first := samples.expand) is not None:
                at = followed(_convolved(at, first), first, {})
            middle = samples.depthwise
            convolved = _convolved(at, middle, workload.strides, _padding(workload), workload.middle[3])
            at = followed(convolved, middle, {})
            if (last := samples.project) is not None:
                at = followed(_convolved(at, last), last, variables)
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
    """The padding at the top, left, bottom and right: at the end, as many pixels as the last window reaches beyond the
    image."""
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
