"""3x3 convolutions as layers to measure: the kernels of each algorithm, alone, and what they compute.

A layer is known by its form. Its weights and images are drawn, since times do not depend on them.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from xrlflow.backends.interrupts import heeding_interrupts
from xrlflow.backends.tvm.algorithms import Algorithm, Algorithms
from xrlflow.backends.tvm.building import FLOAT
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.lower import fuse, schedule_all
from xrlflow.backends.tvm.target import Machine
from xrlflow.backends.tvm.winograd import Form, Plan, cost, kernel, packed, plan, plans
from xrlflow.backends.tvm.winograd_fusion import title
from xrlflow.tuning.alone import alone, run, with_steps
from xrlflow.tuning.measurable import Floats, is_typed, key_of

if TYPE_CHECKING:
    from tvm.ir import IRModule

FAST = (Algorithm.F23, Algorithm.F43)


@dataclass(frozen=True, slots=True)
class Way:
    """An algorithm, and the blocking of its kernel (None: the direct kernel is blocked by its schedule)."""

    algorithm: Algorithm
    plan: Plan | None = None

    def form(self, layer: Layer) -> Form:
        return replace(layer.form, m=self.algorithm.m or layer.form.m)

    @property
    def group(self) -> Algorithm:
        return self.algorithm

    @property
    def text(self) -> str:
        """As it is stored: JSON."""
        return json.dumps([self.algorithm.value, None if self.plan is None else asdict(self.plan)])

    @staticmethod
    def stored(text: str) -> Way | None:
        """The way of a record; None if another version of the program wrote something else."""
        try:
            name, blocking = json.loads(text)
            how = None if blocking is None else Plan(**blocking)
            return Way(Algorithm(name), how) if how is None or is_typed(how) else None
        except (ValueError, TypeError, RecursionError):
            return None

    def __str__(self) -> str:
        how = self.plan
        if how is None:
            return self.algorithm.value
        ahead = ", fetched ahead" if how.ahead else ""
        parts = f" in {how.parts} parts" if how.parts > 1 else ""
        return f"{self.algorithm.value}, {how.rows}x{how.columns} by {how.block}{parts}{ahead}"


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution, of whichever algorithm (see `Measurable`). `weight`: how often the model calls it."""

    form: Form
    far: bool
    weight: int = 1

    @property
    def name(self) -> str:
        return title(self.form)

    @property
    def key(self) -> str:
        text = json.dumps([repr(replace(self.form, m=0)), self.far])
        return "layer " + hashlib.sha256(text.encode()).hexdigest()[:24]

    @property
    def work(self) -> int:
        return self.weight * math.prod(self.form.out) * self.form.channels

    @property
    def needed(self) -> tuple[Algorithm, ...]:
        return (Algorithm.DIRECT,)

    def at(self, far: bool) -> Layer:
        return replace(self, far=far)

    def usual(self, algorithm: Algorithm, machine: Machine) -> Way:
        """The kernel of an algorithm in an untuned compilation."""
        way = Way(algorithm)
        return way if algorithm.m is None else replace(way, plan=plan(way.form(self), machine))

    def untuned(self, machine: Machine) -> list[Way]:
        return [self.usual(algorithm, machine) for algorithm in (Algorithm.DIRECT, *FAST)]

    def ways(self, machine: Machine, most: int) -> list[Way]:
        """The direct kernel, and of each other algorithm the `most` most promising blockings by the estimate, the best
        of all algorithms first. The first one is tried with and without fetching ahead."""
        ranked = []
        for algorithm in FAST:
            first = self.usual(algorithm, machine)
            form, best = first.form(self), first.plan
            assert best is not None
            likely = heapq.nsmallest(most, plans(form, machine), key=lambda how: cost(form, how, machine))
            found = [best, *(replace(how, ahead=best.ahead) for how in likely)]
            if most > 1:
                found.insert(1, replace(best, ahead=not best.ahead))
            ranked.append([Way(algorithm, how) for how in dict.fromkeys(found)][:most])
        turns = [way for several in zip(*ranked) for way in several]
        left = [way for several in ranked for way in several if way not in turns]
        return [Way(Algorithm.DIRECT), *turns, *left]

    def stored(self, text: str) -> Way | None:
        return Way.stored(text)

    def is_current(self, way: Way, key: str, machine: Machine) -> bool:
        if way.plan is not None:
            if way.algorithm.m is None:
                return False
            known = {replace(how, ahead=way.plan.ahead) for how in plans(way.form(self), machine)}
            if way.plan not in known:
                return False
        elif way.algorithm.m is not None:
            return False
        return key_of(self, way, machine) == key

    def kernels(self, way: Way, machine: Machine) -> tuple[IRModule, ...]:
        """The direct kernel may have others beside it, which pad."""
        if way.plan is None:
            return _direct_kernels(replace(self.form, m=0), machine)
        return (_fast_kernel(way.form(self), way.plan),)

    def arguments(self, way: Way, machine: Machine) -> list[Floats] | None:
        """Results are compared with those of the direct kernel."""
        if way.plan is None:
            return None
        form = way.form(self)
        weights, extras = operands(form)
        return [image_of(form), packed(weights, form, way.plan), *extras]

    def expected(self, machine: Machine) -> Floats:
        """What the direct kernel computes."""
        form = self.form
        _, extras = operands(form)
        large = [array for array, extra in zip(extras, form.extras) if not extra.by_channel]
        given = {"image": image_of(form), **{f"extra{i}": array for i, array in enumerate(large)}}
        return run(_direct(form, machine), given, machine)


@cache
def _fast_kernel(form: Form, how: Plan) -> IRModule:
    with heeding_interrupts():
        return alone(kernel(form, how))


@cache
def _direct_kernels(form: Form, machine: Machine) -> tuple[IRModule, ...]:
    from tvm import tirx

    functions = _direct(form, machine).functions.values()
    return tuple(alone(function) for function in functions if isinstance(function, tirx.PrimFunc))


def _direct(form: Form, machine: Machine) -> IRModule:
    """The scheduled module of a layer with a direct kernel."""
    module = fuse(_module(form), machine, channels_last=False, algorithms=Algorithms(only=Algorithm.DIRECT))
    return schedule_all(module, machine)


def _module(form: Form) -> IRModule:
    """A Relax module of the layer: "main" takes the image and the extras that are as large as the result."""
    tvm()
    from tvm import relax

    builder = relax.BlockBuilder()
    image = relax.Var("image", relax.TensorType(form.image, FLOAT))
    weights, extras = operands(form)
    given = {
        i: relax.Var(f"extra{i}", relax.TensorType(form.out, FLOAT))
        for i, extra in enumerate(form.extras)
        if not extra.by_channel
    }
    bottom, right = (
        out + 2 - size - pad for out, size, pad in zip(form.out[1:3], form.image[1:3], (form.top, form.left))
    )
    with builder.function("main", [image, *given.values()]):
        with builder.dataflow():
            convolved = builder.emit(
                relax.op.nn.conv2d(
                    image, relax.const(weights), padding=[form.top, form.left, bottom, right],
                    groups=form.groups, data_layout="NHWC", kernel_layout="HWIO", out_layout="NHWC",
                )
            )  # fmt: skip
            result = builder.emit_output(with_steps(builder, convolved, form.steps, extras, given))
        builder.emit_func_output(result)
    return builder.get()


def operands(form: Form) -> tuple[Floats, list[Floats]]:
    """Weights [3, 3, channel, output channel], and the extras of the steps."""
    rng = np.random.default_rng(0)
    scale = np.float32((9 * form.channels) ** -0.5)
    weights = rng.standard_normal((3, 3, form.channels, form.out[3]), np.float32) * scale
    shapes = [form.out[3:] if extra.by_channel else form.out for extra in form.extras]
    return weights, [rng.standard_normal(shape, np.float32) for shape in shapes]


def image_of(form: Form) -> Floats:
    return np.random.default_rng(1).standard_normal(form.image, np.float32)
