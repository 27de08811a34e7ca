"""Finds depthwise convolutions and the normalisation of their channels in a Relax function, and makes one kernel of
each pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from xrlflow.backends.tvm import direct_norm
from xrlflow.backends.tvm.building import FLOAT
from xrlflow.backends.tvm.direct import Form, Plan, packed
from xrlflow.backends.tvm.following import Followed, Function
from xrlflow.backends.tvm.reading import constant, numbers, operator, sizes
from xrlflow.backends.tvm.replacing import Replacement, with_kernels
from xrlflow.backends.tvm.target import Machine

_LAYOUTS = {
    "relax.nn.conv1d": ("NWC", "WIO"),
    "relax.nn.conv2d": ("NHWC", "HWIO"),
    "relax.nn.conv3d": ("NDHWC", "DHWIO"),
}


def use_direct_norm(module: Any, machine: Machine) -> Any:
    """The module with a kernel for each depthwise convolution in "main" and the normalisation of its channels, where
    that is faster than one for each."""
    return with_kernels(module, _normalised(Function(module["main"]), machine))


def _normalised(function: Function, machine: Machine) -> dict[Any, Replacement]:
    """Normalisations that alone read a depthwise convolution, with or without steps after it."""
    found: dict[Any, Replacement] = {}
    for variable, call in function.values.items():
        form = convolution_of(call) if operator(call) == "relax.nn.conv2d" else None
        if form is None or not direct_norm.is_depthwise(form):
            continue
        followed = function.followed(variable)
        norm = function.reader(followed.last)
        if norm is None or not _is_norm(function.values[norm], followed):
            continue
        form = replace(form, steps=followed.steps)
        if (how := direct_norm.plan(form, machine)) is not None:
            found[norm] = _with_norm(form, how, call, followed, function.values[norm])
    return found


def _is_norm(call: Any, followed: Followed) -> bool:
    """Whether a call normalises the channels of what was computed before."""
    if operator(call) != "relax.nn.layer_norm" or call.args[0] != followed.last:
        return False
    image, scale, bias = (sizes(x, FLOAT) for x in call.args)
    last = image is not None and numbers(call.attrs.axes) in ([-1], [len(image) - 1])
    return image is not None and last and scale == bias == image[-1:] and sizes(call, FLOAT) == image


def _with_norm(form: Form, how: Plan, call: Any, followed: Followed, norm: Any) -> Replacement:
    (image, weights), (_, scale, bias), epsilon = call.args, norm.args, float(norm.attrs.epsilon)

    def read() -> Sequence[Any]:
        return [image, constant(packed(weights.value.numpy(), form, how)), *followed.extras, scale, bias]

    make = partial(direct_norm.kernel, form, how, epsilon)
    return Replacement("direct_norm", (form, epsilon), make, read, form.out)


def convolution_of(call: Any) -> Form | None:
    """The form of a convolution with channels last, known sizes and constant weights; None for another one."""
    from tvm.ir import GenericConst

    if operator(call) not in _LAYOUTS:
        return None
    attrs = call.attrs
    data, kernel_layout = _LAYOUTS[operator(call)]
    layouts = (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout or data))
    if layouts != (data, kernel_layout, data) or not isinstance(call.args[1], GenericConst):
        return None
    image, weights, out = (sizes(x, FLOAT) for x in (*call.args, call))
    if image is None or weights is None or out is None or 0 in (*image, *weights, *out):
        return None
    space = len(image) - 2

    def of_three(values: Any, missing: int) -> tuple[int, int, int]:
        first, second, third = [missing] * (3 - space) + list(values)
        return first, second, third

    return Form(
        image, out, of_three(weights[:space], 1), of_three(numbers(attrs.strides), 1),
        of_three(numbers(attrs.dilation), 1), of_three(numbers(attrs.padding)[:space], 0), int(attrs.groups),
    )  # fmt: skip
