"""Single layers: a convolution or product with the steps after it, as a Relax module, and the schedules of the module's
kernel.

A model's layer usually gets its kernel from Relax's fusion, with the tile that a heuristic chooses. To use another
tile, the layer is compiled as a module of its own, and its kernel and operands replace the layer in the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np

from xrlflow.backends.interrupts import heeding_interrupts
from xrlflow.backends.tvm.fusion.last_passes import last_passes
from xrlflow.backends.tvm.fusion.passes import applied
from xrlflow.backends.tvm.kernels import products
from xrlflow.backends.tvm.kernels.building import FLOAT, OPAQUE, SCHEDULED
from xrlflow.backends.tvm.kernels.layer_kernels import Floats, LayerWorkload
from xrlflow.backends.tvm.kernels.steps import CASTS, Earlier, Extra, Step
from xrlflow.backends.tvm.schedules.dispatch import apply, choices, heuristic
from xrlflow.backends.tvm.schedules.ratings import TileBlocking
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.backends.tvm.toolchain.weights import array_of

# Operators, and their layouts, by the number of dimensions of the image.
_CONVOLUTIONS = {3: ("conv1d", "NWC", "WIO"), 4: ("conv2d", "NHWC", "HWIO"), 5: ("conv3d", "NDHWC", "DHWIO")}


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """The constant operands of a layer: its weights, and for each extra operand of its steps one number for each
    channel, or None if the extra operand is a variable."""

    weights: Floats
    extras: tuple[Floats | None, ...]


def random_operands(workload: LayerWorkload) -> Operands:
    """Random weights and extra operands of a layer. Times do not depend on their values."""
    rng = np.random.default_rng(0)
    shape, terms = weights_shape(workload), workload.terms
    weights = rng.standard_normal(shape, np.float32) * np.float32(terms**-0.5)
    extras = workload.extras
    return Operands(
        weights,
        tuple(rng.standard_normal(workload.out[-1:], np.float32) if e.by_channel else None for e in extras),
    )


def random_variables(workload: LayerWorkload) -> dict[str, Floats]:
    """Random values of the variables of `module_of`, by name."""
    rng = np.random.default_rng(1)
    large = [f"extra{i}" for i, extra in enumerate(workload.extras) if not extra.by_channel]
    shapes = {"image": workload.image, **dict.fromkeys(large, workload.out)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def weights_shape(workload: LayerWorkload) -> tuple[int, ...]:
    if isinstance(workload, products.Product):
        return workload.terms, workload.columns
    return *workload.window[5 - len(workload.image) :], workload.channels, workload.out[-1]


def module_of(workload: LayerWorkload, operands: Operands) -> Any:
    """A Relax module of a layer. The parameters of "main" are the image and those extra operands that are as large as
    the result."""
    tvm()
    from tvm import relax

    builder = relax.BlockBuilder()
    image = relax.Var("image", relax.TensorType(workload.image, FLOAT))
    extras: list[Any] = [
        relax.Var(f"extra{i}", relax.TensorType(workload.out, FLOAT))
        if value is None
        else constant_of(value, workload)
        for i, value in enumerate(operands.extras)
    ]
    variables = [x for x in extras if isinstance(x, relax.Var)]
    with builder.function("main", [image, *variables]):
        with builder.dataflow():
            first = builder.emit(_computed(workload, image, relax.const(operands.weights)))
            result = builder.emit_output(with_steps(builder, first, workload.steps, extras))
        builder.emit_func_output(result)
    return builder.get()


def constant_of(by_channel: Floats, workload: LayerWorkload) -> Any:
    from tvm import relax

    return relax.const(by_channel.reshape(*(1,) * (len(workload.out) - 1), -1))


def _computed(workload: LayerWorkload, image: Any, weights: Any) -> Any:
    from tvm import relax

    if isinstance(workload, products.Product):
        return relax.op.matmul(image, weights)
    name, layout, kernel_layout = _CONVOLUTIONS[len(workload.image)]
    first = 5 - len(workload.image)
    sizes = zip(
        workload.results,
        workload.space,
        workload.window,
        workload.strides,
        workload.dilations,
        workload.begin,
    )
    end = [max(0, (out - 1) * s + (w - 1) * d + 1 - size - b) for out, size, w, s, d, b in sizes]
    return getattr(relax.op.nn, name)(
        image, weights, strides=list(workload.strides[first:]), dilation=list(workload.dilations[first:]),
        padding=[*workload.begin[first:], *end[first:]], groups=workload.groups,
        data_layout=layout, kernel_layout=kernel_layout, out_layout=layout,
    )  # fmt: skip


def with_steps(builder: Any, first: Any, steps: Sequence[Step], extras: Sequence[Any]) -> Any:
    """Append `steps` after the variable `first` of a Relax function that is being built, and return the last variable.
    `extras`: the expressions of the steps' extra operands. An operand of one number for each channel has a shape that
    broadcasts."""
    results, remaining = [first], iter(extras)
    for step in steps:
        args = [_operand(o, results, remaining) for o in step.operands]
        results.append(builder.emit(_operator(step)(*args)))
    return results[-1]


def _operand(operand: float | Extra | Earlier, results: Sequence[Any], remaining: Iterator[Any]) -> Any:
    from tvm import relax

    if isinstance(operand, Earlier):
        return results[operand.step]
    return next(remaining) if isinstance(operand, Extra) else relax.const(operand, FLOAT)


def _operator(step: Step) -> Any:
    from tvm import relax

    if step.operator in CASTS:
        return partial(relax.op.astype, dtype=CASTS[step.operator])
    result: Any = relax.op
    for name in step.operator.split(".")[1:]:
        result = getattr(result, name)
    return result


def fuse_layer(workload: LayerWorkload, operands: Operands, machine: Machine) -> Any:
    """The fused module of a layer that is computed by TVM's loops in tiles."""
    return applied("layer", module_of(workload, operands), last_passes(machine), machine)


@lru_cache(maxsize=2)
def fused(workload: LayerWorkload, machine: Machine) -> Any:
    """The fused module of a layer with random operands. The cache holds few modules, since each contains all weights of
    a layer."""
    return fuse_layer(workload, random_operands(workload), machine)


@dataclass(frozen=True, slots=True, eq=False)
class OnlyKernel:
    """The only kernel of a layer, not yet scheduled, and the call of this kernel."""

    kernel: Any
    call: Any

    @property
    def module(self) -> Any:
        return tvm().IRModule({"main": self.kernel.with_attr("global_symbol", "main")})


def only_kernel(module: Any) -> OnlyKernel | None:
    """The kernel of a fused module that consists of one call; None if the module has other expressions or several
    kernels."""
    from tvm import tirx

    bindings = [binding for block in module["main"].body.blocks for binding in block.bindings]
    kernels = [f for f in module.functions.values() if isinstance(f, tirx.PrimFunc)]
    if len(kernels) != 1 or len(bindings) != 1 or not hasattr(bindings[0].value, "args"):
        return None
    return OnlyKernel(kernels[0], bindings[0].value)


@cache
def tile_choices(workload: LayerWorkload, machine: Machine) -> tuple[TileBlocking, ...]:
    """The tiles from which a tuner chooses for a layer's kernel: the heuristic's tile first, then the tiles with the
    best ratings. The list is empty if the kernel's tile cannot be chosen, or if the layer has several kernels. TVM may
    refuse some of the tiles (see `tiled`)."""
    with heeding_interrupts():
        alone = only_kernel(fused(workload, machine))
        if alone is None or (default := heuristic(alone.module, machine)) is None:
            return ()
        return tuple(dict.fromkeys([default, *choices(alone.module, machine)]))


def tiled(alone: OnlyKernel, choice: TileBlocking, machine: Machine) -> Any | None:
    """The kernel with this tile, scheduled; None if TVM cannot apply the tile to the blocks around the sum."""
    from tvm.s_tir import ScheduleError

    with heeding_interrupts():
        try:
            scheduled = apply(alone.module, machine, choice).mod["main"]
        except ScheduleError:
            return None
    return scheduled.without_attr("global_symbol").with_attrs({SCHEDULED: True, "op_pattern": OPAQUE})


def spliced(module: Any, variables: Mapping[str, Any]) -> Sequence[Any]:
    """The operands of a layer's only kernel. `variables`: the expressions that replace the parameters of the layer's
    module, by name."""
    from tvm import relax

    alone = only_kernel(module)
    assert alone is not None
    return [variables[str(x.name)] if isinstance(x, relax.Var) else x for x in alone.call.args[1].fields]


def arguments(alone: OnlyKernel, scheduled: Any, workload: LayerWorkload) -> list[Floats] | None:
    """The arguments of a layer's scheduled kernel, with random values; None if the kernel packs weights in an unknown
    order."""
    from tvm import relax

    package, variables = tvm(), random_variables(workload)
    stripped = package.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(scheduled)
    arrays = []
    for x, parameter in zip(alone.call.args[1].fields, stripped["main"].params):
        value = variables[str(x.name)] if isinstance(x, relax.Var) else array_of(x)
        shape = tuple(int(n) for n in parameter.shape)
        packed = value if value.shape == shape else _in_panels(value, shape[-1])
        if packed.shape != shape:
            return None
        arrays.append(packed)
    return arrays


def _in_panels(weights: Floats, width: int) -> Floats:
    """Weights [.., column] as panels [column / width, .., column] (see `schedules`)."""
    if weights.shape[-1] % width:
        return weights
    split = weights.reshape(*weights.shape[:-1], -1, width)
    return np.ascontiguousarray(np.moveaxis(split, -2, 0))
