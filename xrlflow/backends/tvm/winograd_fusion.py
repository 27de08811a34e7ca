"""Finds 3x3 convolutions in a Relax function, and replaces them and what follows them by one kernel each."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xrlflow.backends.tvm.algorithms import (
    Algorithm,
    Algorithms,
    Choice,
    Chosen,
    shared_out,
    with_times,
)
from xrlflow.backends.tvm.building import FLOAT
from xrlflow.backends.tvm.following import Function
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.reading import constant, numbers, operator, sizes, weights_from_memory, with_main
from xrlflow.backends.tvm.target import Machine
from xrlflow.backends.tvm.winograd import (
    Form,
    Plan,
    cost,
    direct_cost,
    kernel,
    packed,
    plan,
)
from xrlflow.backends.tvm.winograd_errors import relative_errors

# Fewer channels, on either side, leave little to multiply.
_CHANNELS = 16
_WEIGHTED = frozenset(
    f"relax.{name}" for name in ("nn.conv1d", "nn.conv2d", "nn.conv3d", "nn.conv2d_transpose", "matmul")
)
CHOSEN = "xrlflow.algorithms"
"""The attribute of a module that says what was chosen, in JSON."""


def use_winograd(module: Any, machine: Machine, algorithms: Algorithms) -> Any:
    """The module with a kernel for each 3x3 convolution in "main" that fewer multiplications make faster."""
    tvm()
    from tvm import relax

    main = module["main"]
    matches = _matches(Function(main))
    if not matches:
        return module
    others = _layers(main) - len(matches)
    options = [_choices(match, machine) for match in matches]
    if (timings := algorithms.timings) is not None:
        far = weights_from_memory(main)
        options = with_times(options, [timings.of(match.form, far) for match in matches])
    chosen = algorithms.choose(options, others)
    report = shared_out([title(match.form) for match in matches], chosen, others)
    found = {
        match.last: (replace(match, form=form), choice.plan or plan(form, machine))
        for match, choice in zip(matches, chosen)
        if choice.algorithm.m is not None
        for form in [replace(match.form, m=choice.algorithm.m)]
    }
    functions: dict[tuple[Form, Plan], Any] = {}

    @relax.expr_functor.mutator
    class Fuser(relax.PyExprMutator):  # type: ignore[misc]
        def visit_var_binding_(self, binding: Any) -> None:
            if binding.var not in found:
                super().visit_var_binding_(binding)
                return
            match, how = found[binding.var]
            form = match.form
            if (form, how) not in functions:
                functions[form, how] = self.builder_.add_func(kernel(form, how), "winograd")
            wide = constant(packed(match.weights.value.numpy(), form, how))
            read = [self.visit_expr(match.image), wide, *map(self.visit_expr, match.extras)]
            call = relax.call_tir(functions[form, how], read, relax.TensorType(form.out, FLOAT))
            self.builder_.emit_normalized(relax.VarBinding(binding.var, self.builder_.normalize(call)))

    done = relax.transform.DeadCodeElimination()(with_main(module, Fuser(module)))
    return done.with_attr(CHOSEN, json.dumps([each.stored() for each in report]))


def chosen_in(module: Any) -> tuple[Chosen, ...]:
    """What `use_winograd` chose for a module."""
    stored = (module.attrs or {}).get(CHOSEN)
    return () if stored is None else tuple(Chosen(**each) for each in json.loads(str(stored)))


def _layers(function: Any) -> int:
    """How many operators of a function have constant weights."""
    from tvm.ir import GenericConst

    values = [binding.value for block in function.body.blocks for binding in block.bindings]
    return sum(operator(v) in _WEIGHTED and isinstance(v.args[1], GenericConst) for v in values)


def _choices(match: Match, machine: Machine) -> list[Choice]:
    """The algorithms for a convolution: those whose error is known."""
    found = [Choice(Algorithm.DIRECT, direct_cost(match.form, machine))]
    weights = match.weights.value.numpy()
    faster = [(a, a.m) for a in (Algorithm.F23, Algorithm.F43) if a.m is not None]
    for (algorithm, m), errors in zip(faster, relative_errors(weights, *(m for _, m in faster)), strict=True):
        form = replace(match.form, m=m)
        if np.isfinite([*errors.values()]).all():
            found.append(Choice(algorithm, cost(form, plan(form, machine), machine), max(errors.values())))
    return found


def title(form: Form) -> str:
    """The kind and sizes of a layer."""
    groups = f" in {form.groups} groups" if form.groups > 1 else ""
    return (
        f"3x3 convolution of {form.image[3]} to {form.out[3]} channels{groups} at {form.out[1]}x{form.out[2]}"
    )


@dataclass(frozen=True, slots=True)
class Match:
    """A convolution and the steps after it, up to the variable `last`. `extras`: the expressions of its `Extra`s."""

    form: Form
    image: Any
    weights: Any
    extras: tuple[Any, ...]
    last: Any


def _matches(function: Function) -> list[Match]:
    """3x3 convolutions, each with as many steps as are read by nothing else. No two matches share a step."""
    found = []
    taken: set[Any] = set()
    for variable, value in function.values.items():
        if operator(value) != "relax.nn.conv2d" or (match := _convolution(variable, value)) is None:
            continue
        followed = function.followed(variable, taken)
        taken |= followed.inside
        form = replace(match.form, steps=followed.steps)
        found.append(replace(match, form=form, extras=followed.extras, last=followed.last))
    return found


def _convolution(variable: Any, call: Any) -> Match | None:
    from tvm.ir import GenericConst

    attrs = call.attrs
    image, weights, out = (sizes(x, FLOAT) for x in (*call.args, call))
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or "NHWC")
    if layouts != ("NHWC", "HWIO", "NHWC") or not isinstance(call.args[1], GenericConst):
        return None
    if image is None or out is None or weights is None or 0 in (*image, *out):
        return None
    groups, (top, left, _, _) = int(attrs.groups), numbers(attrs.padding)
    plain = numbers(attrs.strides) == numbers(attrs.dilation) == [1, 1] and weights[:2] == (3, 3)
    if not plain or min(weights[2], weights[3] // groups) < _CHANNELS:
        return None
    return Match(Form(image, out, top, left, 2, groups=groups), call.args[0], call.args[1], (), variable)
