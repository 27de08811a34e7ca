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
from xrlflow.backends.tvm.kernels.bands_plan import cost, plan, plans, usual
from xrlflow.backends.tvm.kernels.building import FLOAT
from xrlflow.backends.tvm.kernels.loops import Loop, loops_of_bands, weights_of_bands
from xrlflow.backends.tvm.kernels.steps import Step, extras_of
from xrlflow.backends.tvm.kernels.ways import Algorithm, Floats, is_typed
from xrlflow.backends.tvm.lowering.executable import schedule_all
from xrlflow.backends.tvm.lowering.joined import joined
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.tuning.alone import alone, run
from xrlflow.tuning.measurable import form_key, key_of

if TYPE_CHECKING:
    from tvm.ir import IRModule


class Kernels(Enum):
    """What computes a block."""

    APART = "one by one"
    BANDS = "bands"


@dataclass(frozen=True, slots=True)
class BlockWay:
    """The blocking of a block's kernel in bands; None: one kernel for each convolution."""

    plan: BandBlocking | None = None

    @property
    def group(self) -> Kernels:
        return Kernels.APART if self.plan is None else Kernels.BANDS

    @property
    def text(self) -> str:
        """As it is stored: JSON."""
        return json.dumps([self.group.value, None if self.plan is None else asdict(self.plan)])

    @staticmethod
    def stored(text: str) -> BlockWay | None:
        """The way of a record; None if another version of the program wrote something else."""
        try:
            name, blocking = json.loads(text)
            how = None
            if blocking is not None:
                expand, project = (Tile(**blocking.pop(part)) for part in ("expand", "project"))
                how = BandBlocking(expand, project, **blocking)
            way = BlockWay(how)
            return way if way.group is Kernels(name) and (how is None or is_typed(how)) else None
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None

    def __str__(self) -> str:
        how = self.plan
        if how is None:
            return self.group.value
        parts = f" in {how.parts} parts" if how.parts > 1 else ""
        tiles = ", ".join(f"{tile.rows}x{tile.columns}" for tile in (how.expand, how.project))
        return f"bands of {how.band} by {how.block}{parts}, {tiles}"


@dataclass(frozen=True, slots=True)
class Block:
    """A depthwise convolution with its neighbours (see `Measurable`). `weight`: how often the model calls it."""

    form: ConvBlock
    far: bool
    weight: int = 1

    @property
    def name(self) -> str:
        form = self.form
        channels = [form.middle[3]]
        if form.expand is not None:
            channels.insert(0, form.image[3])
        if form.project is not None:
            channels.append(form.out[3])
        window, stride = "x".join(map(str, form.window)), max(form.strides)
        strided = f" with stride {stride}" if stride > 1 else ""
        among = " to ".join(map(str, channels))
        return f"{window} block of {among} channels at {form.image[1]}x{form.image[2]}{strided}"

    @property
    def key(self) -> str:
        return form_key("block", self.form, self.far)

    @property
    def work(self) -> int:
        form, wide = self.form, self.form.middle[3]
        expand = 0 if form.expand is None else math.prod(form.image) * wide
        project = 0 if form.project is None else math.prod(form.out) * wide
        return self.weight * (expand + math.prod(form.middle) * math.prod(form.window) + project)

    def needed(self, machine: Machine) -> tuple[Kernels, ...]:
        return Kernels.APART, Kernels.BANDS

    def at(self, far: bool) -> Block:
        return replace(self, far=far)

    def usual(self, machine: Machine) -> BlockWay:
        """What an untuned compilation chooses."""
        return BlockWay(usual(self.form, machine))

    def untuned(self, machine: Machine) -> list[BlockWay]:
        return [BlockWay(), BlockWay(plan(self.form, machine))]

    def everything(self, machine: Machine) -> list[BlockWay]:
        return [BlockWay(), *map(BlockWay, dict.fromkeys(plans(self.form, machine)))]

    def numbers(self, way: BlockWay) -> dict[str, int]:
        algorithm = {"algorithm": len(Algorithm) + list(Kernels).index(way.group)}
        if (how := way.plan) is None:
            return algorithm
        return algorithm | {
            "rows": how.expand.rows, "vectors": how.expand.columns // how.lanes, "lanes": how.lanes,
            "blocks": how.bands(self.form), "parts": how.parts, "order": how.block // how.lanes,
            "other rows": how.project.rows,
        }  # fmt: skip

    def loops(self, way: BlockWay) -> list[Loop]:
        return [] if way.plan is None else loops_of_bands(self.form, way.plan)

    def weights(self, way: BlockWay) -> int:
        return weights_of_bands(self.form)

    def estimate(self, way: BlockWay, machine: Machine) -> float:
        """One kernel for each convolution has no estimate: it counts as the usual blocking."""
        return cost(self.form, way.plan or plan(self.form, machine), machine)

    @property
    def sizes(self) -> tuple[int, ...]:
        """As of `Layer`, with the expanded channels in the end."""
        form = self.form
        convolutions = (form.expand, form.depthwise, form.project)
        steps = [step for some in convolutions if some is not None for step in some]
        large = sum(not extra.by_channel for extra in extras_of(steps))
        window = math.prod(form.window)
        return (
            math.prod(form.image[:3]), math.prod(form.middle[:3]), form.out[2], form.image[3], form.out[3],
            form.image[3], window, form.middle[3], max(form.strides), len(steps), large, int(self.far),
            form.middle[3],
        )  # fmt: skip

    def stored(self, text: str) -> BlockWay | None:
        return BlockWay.stored(text)

    def is_current(self, way: BlockWay, key: str, machine: Machine) -> bool:
        if way.plan is not None and way.plan not in set(plans(self.form, machine)):
            return False
        try:
            return key_of(self, way, machine) == key
        except BackendError:  # today the block has no kernels of its own
            return False

    def kernel(self, way: BlockWay, machine: Machine) -> IRModule:
        if way.plan is None:
            return _apart(self.form, machine)[0]
        return _in_bands(self.form, way.plan)

    def arguments(self, way: BlockWay, machine: Machine) -> list[Floats]:
        form, how = self.form, way.plan
        drawn = _drawn(form)
        if how is None:
            return [drawn.image, *drawn.large.values(), *_apart(form, machine)[1]]
        found = [drawn.image]
        if (first := drawn.expand) is not None:
            found.append(packed_expansion(first.weights[0, 0], form, how))
            found += [by_channel(extra, form, how) for extra in first.extras]
        found.append(by_channel(drawn.depthwise.weights[:, :, 0], form, how))
        found += [by_channel(extra, form, how) for extra in drawn.depthwise.extras]
        if (last := drawn.project) is not None:
            found.append(packed_projection(last.weights[0, 0], form, how))
            found += last.extras
        return found

    def expected(self, machine: Machine) -> Floats:
        """What one kernel for each convolution computes."""
        drawn = _drawn(self.form)
        given = {"image": drawn.image, **{f"extra{i}": array for i, array in drawn.large.items()}}
        return run(_scheduled(self.form, machine), given, machine)


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


def _drawn(form: ConvBlock) -> _Drawn:
    rng = np.random.default_rng(0)

    def draw(shape: tuple[int, ...], steps: tuple[Step, ...]) -> _Convolution:
        scale = np.float32(math.prod(shape[:3]) ** -0.5)
        weights = rng.standard_normal(shape, np.float32) * scale
        shapes = [shape[3:] if extra.by_channel else form.out for extra in extras_of(steps)]
        return _Convolution(weights, steps, [rng.standard_normal(each, np.float32) for each in shapes])

    wide = form.middle[3]
    expand = None if form.expand is None else draw((1, 1, form.image[3], wide), form.expand)
    depthwise = draw((*form.window, 1, wide), form.depthwise)
    project = None if form.project is None else draw((1, 1, wide, form.out[3]), form.project)
    extras = [] if project is None else zip(project.extras, extras_of(project.steps))
    large = {i: array for i, (array, extra) in enumerate(extras) if not extra.by_channel}
    image = rng.standard_normal(form.image, np.float32)
    return _Drawn(image, expand, depthwise, project, large)


@cache
def _in_bands(form: ConvBlock, how: BandBlocking) -> IRModule:
    with heeding_interrupts():
        return alone(kernel(form, how))


@cache
def _apart(form: ConvBlock, machine: Machine) -> tuple[IRModule, tuple[Floats, ...]]:
    """All kernels of a block one after the other, and the constants that they read.

    They are one function, since between them nothing replaces what the caches hold.
    """
    function, constants = joined(_scheduled(form, machine))
    return alone(function), tuple(constants)


def _scheduled(form: ConvBlock, machine: Machine) -> IRModule:
    """The scheduled module of a block with one kernel for each convolution."""
    module = fuse(_module(form), machine, channels_last=False, algorithms=Algorithms(blocks=False))
    return schedule_all(module, machine)


def _module(form: ConvBlock) -> IRModule:
    """A Relax module of the block: "main" takes the image and the extras that are as large as the result."""
    tvm()
    from tvm import relax

    builder, drawn = relax.BlockBuilder(), _drawn(form)
    at = relax.Var("image", relax.TensorType(form.image, FLOAT))
    given = {i: relax.Var(f"extra{i}", relax.TensorType(form.out, FLOAT)) for i in drawn.large}

    def followed(expression: Any, by: _Convolution, large: Mapping[int, Any]) -> Any:
        extras = [large.get(i, relax.const(x.reshape(1, 1, 1, -1))) for i, x in enumerate(by.extras)]
        return with_steps(builder, builder.emit(expression), by.steps, extras)

    with builder.function("main", [at, *given.values()]):
        with builder.dataflow():
            if (first := drawn.expand) is not None:
                at = followed(_convolved(at, first), first, {})
            middle = drawn.depthwise
            convolved = _convolved(at, middle, form.strides, _padding(form), form.middle[3])
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


def _padding(form: ConvBlock) -> list[int]:
    """Top, left, bottom and right: as much as the last window reaches beyond the image."""
    ends = [
        max(0, (out - 1) * stride + window - size - before)
        for out, stride, window, size, before in zip(
            form.middle[1:3], form.strides, form.window, form.image[1:3], (form.top, form.left)
        )
    ]
    return [form.top, form.left, *ends]
