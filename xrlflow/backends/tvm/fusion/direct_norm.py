"""Finds depthwise convolutions followed by a normalisation of their channels in a Relax function, and replaces each
pair by one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from xrlflow.backends.tvm.fusion.following import Followed, Function
from xrlflow.backends.tvm.fusion.layers import convolution_of
from xrlflow.backends.tvm.fusion.replacing import Replacement, with_kernels
from xrlflow.backends.tvm.kernels import direct_norm
from xrlflow.backends.tvm.kernels.building import FLOAT
from xrlflow.backends.tvm.kernels.direct import Convolution, DirectBlocking, packed
from xrlflow.backends.tvm.toolchain.reading import constant, numbers, operator, sizes
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.backends.tvm.toolchain.weights import array_of


def use_direct_norm(module: Any, machine: Machine) -> Any:
    """The module with one kernel for each depthwise convolution in "main" and the normalisation after it, if one kernel
    is estimated to be faster than two."""
    return with_kernels(module, _normalised(Function(module["main"]), machine))


def _normalised(function: Function, machine: Machine) -> dict[Any, Replacement]:
    """The kernels, by the variable of the normalisation. This must be the only reader of the depthwise convolution, or
    of the last step after it."""
    replacements: dict[Any, Replacement] = {}
    for variable, call in function.values.items():
        workload = convolution_of(call) if operator(call) == "relax.nn.conv2d" else None
        if workload is None or not direct_norm.is_depthwise(workload):
            continue
        followed = function.followed(variable)
        norm = function.reader(followed.last)
        if norm is None or not _is_norm(function.values[norm], followed):
            continue
        workload = replace(workload, steps=followed.steps)
        if (blocking := direct_norm.best_blocking(workload, machine)) is not None:
            replacements[norm] = _with_norm(workload, blocking, call, followed, function.values[norm])
    return replacements


def _is_norm(call: Any, followed: Followed) -> bool:
    """Whether a call normalises the channels of what `followed` computes."""
    if operator(call) != "relax.nn.layer_norm" or call.args[0] != followed.last:
        return False
    image, scale, bias = (sizes(x, FLOAT) for x in call.args)
    last = image is not None and numbers(call.attrs.axes) in ([-1], [len(image) - 1])
    return image is not None and last and scale == bias == image[-1:] and sizes(call, FLOAT) == image


def _with_norm(
    workload: Convolution, blocking: DirectBlocking, call: Any, followed: Followed, norm: Any
) -> Replacement:
    (image, weights), (_, scale, bias), epsilon = call.args, norm.args, float(norm.attrs.epsilon)

    def read() -> Sequence[Any]:
        return [
            image,
            constant(packed(array_of(weights), workload, blocking)),
            *followed.extras,
            scale,
            bias,
        ]

    make = partial(direct_norm.kernel, workload, blocking, epsilon)
    return Replacement("direct_norm", (workload, epsilon), make, read, workload.out)
