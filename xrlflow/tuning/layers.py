"""3x3 convolutions as layers to measure: the kernels of each algorithm, alone, and what they compute.

A layer is known by its form. Its weights and images are drawn, since times do not depend on them.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xrlflow.backends.interrupts import heeding_interrupts
from xrlflow.backends.tvm.algorithms import Algorithm, Algorithms
from xrlflow.backends.tvm.building import FLOAT
from xrlflow.backends.tvm.compiled import Interface, TvmModel, Value
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.lower import compile_module, fuse, schedule_all
from xrlflow.backends.tvm.steps import Earlier, Extra, Step
from xrlflow.backends.tvm.target import Machine
from xrlflow.backends.tvm.winograd import Form, Plan, cost, kernel, packed, plan, plans
from xrlflow.backends.tvm.winograd_fusion import title
from xrlflow.tuning.tasks import module_key

if TYPE_CHECKING:
    from tvm.ir import IRModule

FAST = (Algorithm.F23, Algorithm.F43)
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution, of whichever algorithm. `far`: its weights come from memory. `weight`: how often the model calls
    it."""

    form: Form
    far: bool
    weight: int = 1

    @property
    def name(self) -> str:
        return title(self.form)

    @property
    def key(self) -> str:
        """Equal, in every process, for equal forms. Measurements are stored under it."""
        text = json.dumps([repr(replace(self.form, m=0)), self.far])
        return "layer " + hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class Way:
    """An algorithm, and the blocking of its kernel (None: the direct kernel is blocked by its schedule)."""

    algorithm: Algorithm
    plan: Plan | None = None

    def form(self, layer: Layer) -> Form:
        return replace(layer.form, m=self.algorithm.m or layer.form.m)

    @property
    def text(self) -> str:
        """As it is stored: JSON."""
        return json.dumps([self.algorithm.value, None if self.plan is None else asdict(self.plan)])

    @staticmethod
    def stored(text: str) -> Way | None:
        """The way of a record; None if another version of the program wrote something else."""
        try:
            name, blocking = json.loads(text)
            return Way(Algorithm(name), None if blocking is None else Plan(**blocking))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        how = self.plan
        if how is None:
            return self.algorithm.value
        ahead = ", fetched ahead" if how.ahead else ""
        parts = f" in {how.parts} parts" if how.parts > 1 else ""
        return f"{self.algorithm.value}, {how.rows}x{how.columns} by {how.block}{parts}{ahead}"


def usual(layer: Layer, algorithm: Algorithm, machine: Machine) -> Way:
    """The kernel of an algorithm in an untuned compilation."""
    way = Way(algorithm)
    return way if algorithm.m is None else replace(way, plan=plan(way.form(layer), machine))


def ways(layer: Layer, machine: Machine, most: int) -> list[Way]:
    """What is worth measuring: the direct kernel, and of each other algorithm the `most` most promising blockings by
    the estimate, the best of all algorithms first. The first one is tried with and without fetching ahead."""
    ranked = []
    for algorithm in FAST:
        first = usual(layer, algorithm, machine)
        form, best = first.form(layer), first.plan
        assert best is not None
        likely = heapq.nsmallest(most, plans(form, machine), key=lambda how: cost(form, how, machine))
        found = [best, *(replace(how, ahead=best.ahead) for how in likely)]
        if most > 1:
            found.insert(1, replace(best, ahead=not best.ahead))
        ranked.append([Way(algorithm, how) for how in dict.fromkeys(found)][:most])
    turns = [way for several in zip(*ranked) for way in several]
    left = [way for several in ranked for way in several if way not in turns]
    return [Way(Algorithm.DIRECT), *turns, *left]


def is_current(layer: Layer, way: Way, key: str, machine: Machine) -> bool:
    """Whether a stored way is still one to choose, and its kernel still the one that was measured."""
    if way.plan is not None:
        if way.algorithm.m is None:
            return False
        known = {replace(how, ahead=way.plan.ahead) for how in plans(way.form(layer), machine)}
        if way.plan not in known:
            return False
    elif way.algorithm.m is not None:
        return False
    return key_of(layer, way, machine) == key


def key_of(layer: Layer, way: Way, machine: Machine) -> str:
    """A key of the kernels' code."""
    return "+".join(module_key(module) for module in kernels(layer, way, machine))


def kernels(layer: Layer, way: Way, machine: Machine) -> tuple[IRModule, ...]:
    """The kernels of a layer, in modules of their own. The direct one may have others beside it, which pad."""
    if way.plan is None:
        return _direct_kernels(replace(layer.form, m=0), machine)
    return (_fast_kernel(way.form(layer), way.plan),)


@cache
def _fast_kernel(form: Form, how: Plan) -> IRModule:
    with heeding_interrupts():
        return _alone(kernel(form, how))


@cache
def _direct_kernels(form: Form, machine: Machine) -> tuple[IRModule, ...]:
    from tvm import tirx

    functions = _direct(form, machine).functions.values()
    return tuple(_alone(function) for function in functions if isinstance(function, tirx.PrimFunc))


def _alone(function: Any) -> IRModule:
    return tvm().IRModule({"main": function.with_attr("global_symbol", "main")})


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
            found = [
                builder.emit(
                    relax.op.nn.conv2d(
                        image, relax.const(weights), padding=[form.top, form.left, bottom, right],
                        groups=form.groups, data_layout="NHWC", kernel_layout="HWIO", out_layout="NHWC",
                    )
                )
            ]  # fmt: skip
            left = iter(range(len(extras)))
            for step in form.steps:
                args = [_operand(o, found, left, extras, given) for o in step.operands]
                found.append(builder.emit(_operator(step)(*args)))
            result = builder.emit_output(found[-1])
        builder.emit_func_output(result)
    return builder.get()


def _operand(
    given: float | Extra | Earlier,
    found: Sequence[Any],
    left: Iterator[int],
    extras: Sequence[Floats],
    large: Any,
) -> Any:
    from tvm import relax

    if isinstance(given, Earlier):
        return found[given.step]
    if isinstance(given, Extra):
        number = next(left)
        return relax.const(extras[number].reshape(1, 1, 1, -1)) if given.by_channel else large[number]
    return relax.const(given, FLOAT)


def _operator(step: Step) -> Any:
    from tvm import relax

    found: Any = relax.op
    for name in step.operator.split(".")[1:]:
        found = getattr(found, name)
    return found


def operands(form: Form) -> tuple[Floats, list[Floats]]:
    """Weights [3, 3, channel, output channel], and the extras of the steps."""
    rng = np.random.default_rng(0)
    scale = np.float32((9 * form.channels) ** -0.5)
    weights = rng.standard_normal((3, 3, form.channels, form.out[3]), np.float32) * scale
    shapes = [form.out[3:] if extra.by_channel else form.out for extra in form.extras]
    return weights, [rng.standard_normal(shape, np.float32) for shape in shapes]


def image_of(form: Form) -> Floats:
    return np.random.default_rng(1).standard_normal(form.image, np.float32)


def arguments(layer: Layer, way: Way) -> list[Floats]:
    """What the kernel of a way with a blocking reads."""
    form = way.form(layer)
    assert way.plan is not None
    weights, extras = operands(form)
    return [image_of(form), packed(weights, form, way.plan), *extras]


def expected(layer: Layer, machine: Machine) -> Floats:
    """What the direct kernel computes. Raises BackendError if it cannot run here."""
    form = layer.form
    _, extras = operands(form)
    large = [array for array, extra in zip(extras, form.extras) if not extra.by_channel]
    given = {"image": image_of(form), **{f"extra{i}": array for i, array in enumerate(large)}}
    values = tuple(Value(name, FLOAT, array.shape) for name, array in given.items())
    interface = Interface(values, ("out",), machine.triple, machine.cpu, "")
    executable = compile_module(_direct(form, machine), machine)
    # One thread: others would still spin while kernels are timed in another process.
    with TvmModel(executable, interface, threads=1) as model:
        (found,) = model.run(given)
    return np.asarray(found)
