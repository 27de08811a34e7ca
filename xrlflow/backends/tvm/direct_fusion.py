"""Finds convolutions with few channels in each group in a Relax function, and makes one kernel of each and what follows
it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from xrlflow.backends.tvm.building import FLOAT
from xrlflow.backends.tvm.direct import Form, gains, kernel, packed, plan
from xrlflow.backends.tvm.following import Function
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.reading import constant, numbers, operator, sizes, with_main
from xrlflow.backends.tvm.target import Machine

_LAYOUTS = {
    "relax.nn.conv1d": ("NWC", "WIO"),
    "relax.nn.conv2d": ("NHWC", "HWIO"),
    "relax.nn.conv3d": ("NDHWC", "DHWIO"),
}


@dataclass(frozen=True, slots=True)
class _Match:
    """A convolution and the steps after it, up to the variable `last`. `extras`: the expressions of its `Extra`s."""

    form: Form
    image: Any
    weights: Any
    extras: tuple[Any, ...]
    last: Any


def use_direct(module: Any, machine: Machine) -> Any:
    """The module with a kernel for each convolution in "main" that gains by it."""
    tvm()
    from tvm import relax

    found = _matches(Function(module["main"]), machine)
    if not found:
        return module
    functions: dict[Form, Any] = {}

    @relax.expr_functor.mutator
    class Fuser(relax.PyExprMutator):  # type: ignore[misc]
        def visit_var_binding_(self, binding: Any) -> None:
            if binding.var not in found:
                super().visit_var_binding_(binding)
                return
            match = found[binding.var]
            form, how = match.form, plan(match.form, machine)
            if form not in functions:
                functions[form] = self.builder_.add_func(kernel(form, how), "direct")
            panels = constant(packed(match.weights.value.numpy(), form, how))
            read = [self.visit_expr(match.image), panels, *map(self.visit_expr, match.extras)]
            call = relax.call_tir(functions[form], read, relax.TensorType(form.out, FLOAT))
            self.builder_.emit_normalized(relax.VarBinding(binding.var, self.builder_.normalize(call)))

    return relax.transform.DeadCodeElimination()(with_main(module, Fuser(module)))


def _matches(function: Function, machine: Machine) -> dict[Any, _Match]:
    """Convolutions by the last variable of what follows them. No two share a step."""
    found: dict[Any, _Match] = {}
    taken: set[Any] = set()
    for variable, call in function.values.items():
        form = _form(call) if operator(call) in _LAYOUTS else None
        if form is None or not gains(form, machine):
            continue
        followed = function.followed(variable, taken)
        taken |= followed.inside
        form = replace(form, steps=followed.steps)
        found[followed.last] = _Match(form, call.args[0], call.args[1], followed.extras, followed.last)
    return found


def _form(call: Any) -> Form | None:
    """The form of a convolution with channels last, known sizes and constant weights; None for another one."""
    from tvm.ir import GenericConst

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
