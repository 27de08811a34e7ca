"""Finds 3x3 convolutions in a Relax function, and replaces them and what follows them by one kernel each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from xrlflow.backends.tvm.attention_fusion import parts_of
from xrlflow.backends.tvm.import_tvm import tvm
from xrlflow.backends.tvm.reading import constant, numbers, operator, sizes, with_main
from xrlflow.backends.tvm.target import Machine
from xrlflow.backends.tvm.winograd import STEPS, Extra, Form, Step, kernel, packed, plan

_FLOAT = "float32"
# Fewer channels, on either side, leave little to multiply.
_CHANNELS = 16
# Results along a side from which tiles of 4 x 4 pay; below, tiles of 2 x 2 do.
_LARGE = 20

Match = tuple[Form, Any, Any, Sequence[Any]]
"""The computation, and the expressions of the image, the weights and the extras."""


def use_winograd(module: Any, machine: Machine) -> Any:
    """The module with a kernel for each 3x3 convolution in "main" that fewer multiplications make faster."""
    tvm()
    from tvm import relax

    found = {
        variable: (*match, how)
        for variable, match in _Reader(module["main"]).matches().items()
        if (how := plan(match[0], machine)) is not None
    }
    if not found:
        return module
    functions: dict[Any, Any] = {}

    @relax.expr_functor.mutator
    class Fuser(relax.PyExprMutator):  # type: ignore[misc]
        def visit_var_binding_(self, binding: Any) -> None:
            if binding.var not in found:
                super().visit_var_binding_(binding)
                return
            form, image, weights, extras, how = found[binding.var]
            if form not in functions:
                functions[form] = self.builder_.add_func(kernel(form, how), "winograd")
            wide = constant(packed(weights.value.numpy(), form, how))
            read = [self.visit_expr(image), wide, *map(self.visit_expr, extras)]
            call = relax.call_tir(functions[form], read, relax.TensorType(form.out, _FLOAT))
            self.builder_.emit_normalized(relax.VarBinding(binding.var, self.builder_.normalize(call)))

    return relax.transform.DeadCodeElimination()(with_main(module, Fuser(module)))


class _Reader:
    """Looks for 3x3 convolutions in a Relax function."""

    def __init__(self, function: Any) -> None:
        from tvm import relax

        self._values: dict[Any, Any] = {}
        self._uses: Counter[Any] = Counter()
        self._order: dict[Any, int] = {}

        def count(expression: Any) -> None:
            for part in parts_of(expression):
                if isinstance(part, relax.Var):
                    self._uses[part] += 1

        for block in function.body.blocks:
            for binding in block.bindings:
                self._order[binding.var] = len(self._order)
                self._values[binding.var] = binding.value
                count(binding.value)
        count(function.body.body)

    def matches(self) -> dict[Any, Match]:
        """The matches, by the variable of the last result."""
        found: dict[Any, Match] = {}
        for variable, value in self._values.items():
            if operator(value) == "relax.nn.conv2d":
                match = self._convolution(value)
                if match is not None:
                    found[variable] = match
                continue
            before = [a for a in getattr(value, "args", ()) if a in found and self._uses[a] == 1]
            if len(before) == 1 and (more := self._step(value, before[0], found[before[0]])) is not None:
                found.pop(before[0])
                found[variable] = more
        return found

    def _convolution(self, call: Any) -> Match | None:
        from tvm.ir import GenericConst

        attrs = call.attrs
        image, weights, out = (sizes(x, _FLOAT) for x in (*call.args, call))
        if (
            attrs.data_layout != "NHWC"
            or attrs.kernel_layout != "HWIO"
            or attrs.out_layout not in ("", "NHWC")
        ):
            return None
        if image is None or out is None or weights is None or not isinstance(call.args[1], GenericConst):
            return None
        plain = numbers(attrs.strides) == numbers(attrs.dilation) == [1, 1] and int(attrs.groups) == 1
        if not plain or weights[:2] != (3, 3) or min(weights[2:]) < _CHANNELS or min(out[1:3]) < 4:
            return None
        top, left, _, _ = numbers(attrs.padding)
        if max(top, left) > 2:
            return None
        m = 4 if min(out[1:3]) >= _LARGE else 2
        return Form(image, out, top, left, m), call.args[0], call.args[1], ()

    def _step(self, call: Any, variable: Any, match: Match) -> Match | None:
        form, image, weights, extras = match
        if operator(call) not in STEPS or sizes(call, _FLOAT) != form.out:
            return None
        operands: list[float | Extra | None] = []
        more = []
        for operand in call.args:
            if operand is variable or operand.same_as(variable):
                operands.append(None)
                continue
            found = _other(operand, form.out)
            if found is None:
                return None
            operands.append(found[0])
            more += found[1]
        if operands.count(None) != 1:
            return None
        steps = (*form.steps, Step(operator(call), tuple(operands)))
        return replace(form, steps=steps), image, weights, (*extras, *more)


def _other(expression: Any, out: tuple[int, ...]) -> tuple[float | Extra, list[Any]] | None:
    """An operand of a step: a number, numbers by channel, or a tensor like the result; None for any other."""
    from tvm.ir import GenericConst

    shape = sizes(expression, _FLOAT)
    if shape is None:
        return None
    if shape == out:
        return Extra(False), [expression]
    if isinstance(expression, GenericConst):
        array = expression.value.numpy()
        if array.size == 1:
            return float(array.reshape(-1)[0]), []
        if array.size == out[3] and shape[-1] == out[3]:
            return Extra(True), [constant(array.reshape(-1))]
    return None
